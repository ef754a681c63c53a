"""An hour in which everything goes wrong, in a minute, on a real Envoy; and whether all that is told of it is true.

Calm, a flood of batch jobs, a provider that refuses for speed, an outage, an engine whose cache is full; calm again.
Meanwhile users come, stream or not, in two lanes, from tenants with names that nobody would choose. In the end
everybody's books are laid side by side: what clients got, what providers have seen, the metrics, the overview, the
explanations, and the alerts of a real Prometheus that goes by our rules sixty times as fast.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.stack import Stack, free_ports
from tests.e2e.conftest import books_balance, chat
from tests.e2e.doubles import PATIENT, Crowd, Result, crowd, running, tell
from tests.e2e.prometheus import Prometheus, prometheus

FASTER = 60.0
TOKENS = 20
TENANTS = ("shop", 'quo"te} 1', "<script>alert(1)</script>", "..%2f..%2fetc", "\\n# HELP x")
KV = {"high": 0.8, "low": 0.6, "scrape_s": 0.2, "stale_s": 5.0}
CAUSES = {
    "Down", "Absent", "Unreached", "BreakerOpen", "AllBreakersOpen", "RequestsFail", "ProviderRefuses", "QueueFull",
    "EngineSaturated", "Bypassed", "LanePaused", "UpstreamOut", "ConfigRefused",
}  # fmt: skip
"""Alerts of what is done on purpose here. Others may be true of a slow machine."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A provider with a backup, and an engine of our own."""
    (metrics_port,) = free_ports(1)
    far = [{"tpm": 60_000_000, "rpm": 600_000}]
    pace = {"first_token_s": 0.05, "output_tokens_per_s": 400}
    with running(
        tmp_path_factory.mktemp("hour"),
        gateway={**PATIENT, "metrics_port": metrics_port},
        upstreams={
            "primary": {
                "limits": far,
                "concurrency": 4,
                "fake": pace,
                "breaker": {"cool_down_s": 1, "cool_down_max_s": 2, "ramp_s": 2, "paced": 1000, "slow": None},
            },
            "backup": {"limits": far, "models": {"gpt-5": "gpt-5-b"}, "fake": pace},
            "engine": {"provider": "fake", "owned": True, "kv": KV, "fake": {**pace, "kv_tokens": 100_000}},
        },
        routes=[
            {"models": ["gpt-5"], "chain": ["primary", "backup"], "acknowledge_unowned": True},
            {"models": ["batch"], "chain": ["primary"], "acknowledge_unowned": True},
            {"models": ["own"], "chain": ["engine"], "acknowledge_unowned": True},
        ],
        lanes={
            "P0": {"max_wait_s": 8, "spill_after_s": 0.2},
            "P1": {"max_wait_s": 30, "spill_after_s": 0.5},
            "P2": {"max_wait_s": 30, "when_busy": "hold", "max_requests": 20},
        },
        identity={"tenant": ["header:x-team"]},
        tenants={"*": {}},
        other_endpoints=None,
        telemetry={"requests": 5000, "tenants": 20},
    ) as one:
        yield one


@dataclass
class Hour:
    """What clients did and got. users: they come as long as it runs."""

    stack: Stack
    clients: Crowd
    results: list[tuple[str, str, Result]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    async def ask(
        self, lane: str, model: str, *, tenant: str = "", tokens: int = TOKENS, stream: bool = False
    ) -> Result:
        """One request, and its result noted."""
        number = next(self.numbers)
        tenant = tenant or TENANTS[number % len(TENANTS)]
        more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        body = chat(f"question {number}", model=model, max_tokens=tokens, **more)
        result = await self.clients.ask(body, x_team=tenant, x_tidegate_priority=lane)
        self.results.append((tenant, lane, result))
        return result

    @asynccontextmanager
    async def coming(self, many: int, pause_s: float, lane: str, model: str, **more: Any) -> AsyncIterator[None]:
        """So many callers who ask again and again while the block runs; each comes to its end."""
        over = asyncio.Event()

        async def caller(number: int) -> None:
            while not over.is_set():
                await self.ask(lane, model, **({"stream": bool(number % 2)} | more))
                await asyncio.sleep(pause_s)

        callers = [asyncio.create_task(caller(number)) for number in range(many)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*callers)

    async def overview(self) -> dict[str, Any]:
        """The overview as the page gets it."""
        return dict(await self.get("/api/v1/overview"))

    async def get(self, path: str) -> Any:
        """A page of the console."""
        console = self.stack.settings.service.console

        def fetched() -> Any:
            return httpx.get(f"http://{console}{path}", timeout=30).raise_for_status().json()

        return await asyncio.to_thread(fetched)

    async def until(self, what: str, holds: Callable[[dict[str, Any]], Any], within_s: float = 40.0) -> dict[str, Any]:
        """The first overview that fits."""
        end = time.monotonic() + within_s
        while not holds(seen := await self.overview()):
            assert time.monotonic() < end, (what, {name: seen[name] for name in ("status", "notices", "lanes")})
            await asyncio.sleep(0.2)
        return seen

    async def alert(self, watch: Prometheus | None, name: str, of: str, within_s: float = 40.0) -> None:
        """An alert comes, of this upstream or lane."""
        end = time.monotonic() + within_s
        while watch is not None:
            fired = await asyncio.to_thread(watch.fired, 5)
            if of in fired.get(name, ()):
                return
            assert time.monotonic() < end, (name, of, fired)
            await asyncio.sleep(0.3)


def fault(stack: Stack, name: str, fault: str | None) -> None:
    """Let a provider fail so from now on; None ends it."""
    where = f"{stack.settings.upstreams[name].where}/admin/fault"
    (httpx.post(where, json={"fault": fault}) if fault else httpx.delete(where)).raise_for_status()


async def test_all_that_is_told_of_a_bad_hour_is_true(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """See the head of this file."""
    folder = stack.workdir / "prometheus"
    with prometheus(folder, stack.settings, FASTER) as watch:
        async with crowd(stack, 90) as clients:
            hour = Hour(stack, clients)
            async with hour.coming(4, 0.15, "P0", "gpt-5"), hour.coming(2, 0.2, "P1", "own"):
                await _play(hour, watch)
            await asyncio.to_thread(books_balance, stack, 20.0)
            await asyncio.sleep(0.6)  # a page of metrics serves for half a second whoever asks
            await _compare(hour, watch)
            await _explained(hour)
    if watch is None:
        with capsys.disabled():
            print("\n  there is no Prometheus here: alerts were not looked at")  # noqa: T201 - for people


async def _play(hour: Hour, watch: Prometheus | None) -> None:
    stack = hour.stack
    await hour.until("calm", lambda seen: seen["status"] == "ok" and _served(hour) > 40)
    if watch is not None:
        end = time.monotonic() + 40
        while len(await asyncio.to_thread(watch.ask, "count_over_time(up[1h]) > 10")) < 2 or watch.problems():
            assert time.monotonic() < end, watch.problems()
            await asyncio.sleep(0.3)
        fired = await asyncio.to_thread(watch.fired, 2)
        assert not CAUSES & set(fired), f"in the calm: {fired}"
        assert watch.number('envoy_cluster_membership_healthy{envoy_cluster_name=~"tidegate.service"}') == 1

    async with hour.coming(34, 0.3, "P2", "batch", tenant="etl", tokens=400, stream=False):
        seen = await hour.until(
            "overload", lambda seen: _refused(seen, "lane_full") > 20 and _waiting(seen) > 5, within_s=60
        )
        assert seen["status"] in ("waiting", "shedding")
        assert any(binding["lane"] == "P2" for binding in seen["binding"]), seen["binding"]
        await hour.alert(watch, "QueueFull", "P2")

    fault(stack, "primary", "429;retry-after=0.1")
    await _until_seen(stack, "primary", "429", 15)
    await hour.alert(watch, "ProviderRefuses", "primary")
    fault(stack, "primary", None)

    fault(stack, "primary", "503")
    await hour.until(
        "outage",
        lambda seen: (
            _upstream(seen, "primary")["state"] != "closed"
            and any(notice["runbook"] == "breaker-open" for notice in seen["notices"])
        ),
    )
    await hour.alert(watch, "BreakerOpen", "primary")
    fault(stack, "primary", None)

    tell(stack, "engine", kv_usage=1.0)
    await hour.until("a full cache", lambda seen: (_upstream(seen, "engine")["kv"] or {}).get("saturation", 0) >= 1)
    await hour.alert(watch, "EngineSaturated", "engine")
    tell(stack, "engine", kv_usage=None)

    await hour.until(
        "recovery", lambda seen: _upstream(seen, "primary")["state"] == "closed" and not _waiting(seen), within_s=60
    )
    ended = time.monotonic()
    while watch is not None:
        fired = await asyncio.to_thread(watch.fired, 1)
        if not CAUSES & set(fired):
            break
        assert time.monotonic() < ended + 60, f"after all is over: {fired}"
        await asyncio.sleep(0.5)


def _served(hour: Hour) -> int:
    return sum(result.status == 200 for _, _, result in hour.results)


def _upstream(seen: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in seen["upstreams"] if each["name"] == name]
    return dict(found)


def _waiting(seen: dict[str, Any]) -> int:
    return sum(lane["requests"] for lane in seen["lanes"])


def _refused(seen: dict[str, Any], reason: str) -> int:
    return sum(each["count_5m"] for each in seen["refusals"] if each["reason"] == reason)


async def _until_seen(stack: Stack, name: str, status: str, many: int, within_s: float = 40.0) -> None:
    end = time.monotonic() + within_s
    while (seen := (await asyncio.to_thread(stack.record, name))["statuses"]).get(status, 0) < many:
        assert time.monotonic() < end, seen
        await asyncio.sleep(0.1)


# -------------------------------------------------------------------------------------- everybody's books


class Page:
    """A page of metrics."""

    def __init__(self, text: str) -> None:
        """The text format of Prometheus."""
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def by(self, name: str, label: str) -> Counter[str]:
        """Values of a metric by one of its labels, summed over the others; without those that are nothing."""
        found: Counter[str] = Counter()
        for sample in self._samples:
            if sample.name == name:
                found[sample.labels.get(label, "")] += int(sample.value)
        return +found

    def sum(self, name: str) -> int:
        """Of all its values."""
        return int(sum(sample.value for sample in self._samples if sample.name == name))


async def _compare(hour: Hour, watch: Prometheus | None) -> None:
    stack = hour.stack
    console = stack.settings.service.console
    text = await asyncio.to_thread(lambda: httpx.get(f"http://{console}/metrics", timeout=30).text)
    page, state, seen = Page(text), stack.state(), await hour.overview()
    records = {name: stack.record(name) for name in stack.fakes}
    results = hour.results
    assert all(result.status for *_, result in results), "nobody was cut off"

    served = Counter(result.headers["x-tidegate-upstream"] for *_, result in results if result.status == 200)
    assert page.by("tidegate_served_total", "upstream") == served
    refused = Counter(result.reason for *_, result in results if result.status != 200)
    failed = +Counter({reason: refused.pop(reason, 0) for reason in ("upstream_failed", "deadline_passed")})
    assert page.by("tidegate_refused_total", "reason") == refused
    assert refused["lane_full"] > 20
    assert page.by("tidegate_failed_total", "reason") == failed
    left, evicted = page.sum("tidegate_client_gone_total"), page.sum("tidegate_evicted_total")
    admitted = page.by("tidegate_admitted_total", "lane")
    assert admitted.total() == served.total() + failed.total() + left + evicted == page.sum("tidegate_settled_total")
    assert admitted.total() + refused.total() == len(results), "nobody is lost, nobody is counted twice"
    waits = page.by("tidegate_wait_seconds_count", "outcome")
    assert (waits["admitted"], waits["refused"]) == (admitted.total(), refused.total())

    used: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for tenant, _, result in results:
        if result.status == 200:
            tokens = _usage(result)
            used[result.headers["x-tidegate-upstream"]] += tokens
            spent[tenant] += tokens
    assert page.by("tidegate_tokens_total", "upstream") == used
    assert page.by("tidegate_tenant_tokens_total", "tenant") == spent
    assert {each["name"]: each["tokens"] for each in seen["tenants"]} == spent
    asked = Counter(tenant for tenant, _, _ in results)
    assert page.by("tidegate_tenant_requests_total", "tenant") == asked

    attempts = page.by("tidegate_failed_attempts_total", "upstream")
    probes = page.by("tidegate_probes_total", "upstream")
    for name, record in records.items():
        told = sum(int(each["prompt_tokens"]) + int(each["output_tokens"]) for each in record["requests"]
                   if each["status"] == 200 and not each["aborted"])  # fmt: skip
        assert told == used[name] + page.by("tidegate_probe_tokens_total", "upstream")[name], name
        assert sum(record["statuses"].values()) == served[name] + attempts[name] + probes[name], name
    paced = page.by("tidegate_paced_total", "upstream")
    assert paced == Counter({"primary": records["primary"]["statuses"]["429"]})
    assert page.by("tidegate_failovers_total", "following")["backup"] > 0

    count = Counter({each["reason"]: each["count_5m"] for each in seen["refusals"]})
    assert count - failed == refused or count == refused, (count, refused)
    assert state["tally"]["settled"] == admitted.total()
    if watch is not None:
        await _scraped(watch, served)


async def _scraped(watch: Prometheus, served: Counter[str]) -> None:
    """It comes to know the same, with nothing wrong: what took longer than the pause between two looks is missed."""
    end = time.monotonic() + 40
    while True:
        told = {each["metric"]["upstream"]: int(float(each["value"][1]))
                for each in await asyncio.to_thread(watch.ask, "tidegate_served_total")}  # fmt: skip
        if told == served and not watch.problems():
            return
        assert time.monotonic() < end, (told, served, watch.problems())
        await asyncio.sleep(0.3)


def _usage(result: Result) -> int:
    """Tokens as the client was told."""
    if result.body.startswith(b"data:"):
        events = [line[6:] for line in result.body.splitlines() if line.startswith(b"data: {")]
        usage = next(found for event in reversed(events) if (found := json.loads(event).get("usage")))
    else:
        usage = json.loads(result.body)["usage"]
    return int(usage["prompt_tokens"]) + int(usage["completion_tokens"])


async def _explained(hour: Hour) -> None:
    """One that was refused, one that went on to another, and one that waited."""
    refused = (await hour.get("/api/v1/requests?reason=lane_full"))["requests"]
    assert refused
    story = await hour.get(f"/api/v1/requests/{refused[0]['id']}")
    assert (story["state"], story["reason"]) == ("refused", "lane_full")
    assert story["caller"] == {**story["caller"], "tenant": "etl", "lane": "P2"}
    assert not story.get("attempts")

    failed_at, answered_at = _by_id(hour.stack.record("primary")), _by_id(hour.stack.record("backup"))
    moved = [id_ for id_, status in failed_at.items() if status != 200 and answered_at.get(id_) == 200]
    assert len(moved) > 10
    assert len(moved) == sum(result.headers.get("x-tidegate-attempts") == "2" for *_, result in hour.results)
    for id_ in moved:
        story = await hour.get(f"/api/v1/requests/{id_}")
        first, second = story["attempts"]
        assert (first["upstream"], first["status"], first["then"]) == ("primary", failed_at[id_], "backup")
        assert (second["upstream"], second["status"], second["ok"]) == ("backup", 200, True)
        assert story["state"] == "served"
        assert (story["settlement"]["upstream"], story["settlement"]["attempts"]) == ("backup", 2)
        assert story["settlement"]["used"]["output"] == TOKENS

    waited = (await hour.get("/api/v1/requests?lane=P2&state=served&limit=500"))["requests"]
    story = await hour.get(f"/api/v1/requests/{max(waited, key=lambda each: each['waited_s'])['id']}")
    assert any("upstream/primary/slots" in spell["keys"] for spell in story["queue"]["waited_for"]), story["queue"]
    assert story["queue"]["waited_s"] > 0.5


def _by_id(record: dict[str, Any]) -> dict[str, int]:
    """Statuses that a provider gave, by the id that a request has in the gateway."""
    return {each["headers"]["x-request-id"]: each["status"] for each in record["requests"]}
