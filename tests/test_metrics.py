"""What `GET /metrics` tells, read as a Prometheus reads it."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.console import state
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget, Period
from extproc.core.capacity import Store
from extproc.core.events import Refused
from extproc.core.lanes import Lanes
from extproc.core.policy import KvRules, Lane, WhenBusy
from extproc.core.refusal import Reason
from extproc.core.watermark import Watermark
from extproc.reloading import Told
from extproc.settings import load
from extproc.settings.changes import version_of
from extproc.stack import free_ports
from extproc.telemetry.metrics import GROWING, LEVELS, Metrics
from extproc.telemetry.tally import Tally

LANES = [Lane(name, rank, 10, WhenBusy.SPILL, 1, 9, 9, 9) for rank, name in enumerate(("P0", "P1"))]


def told(**more: Any) -> dict[str, Any]:
    """The state of a service with one counter of each kind, as its page is made of."""
    store = {
        "upstream/a/*/total": TokenBucket(10.0, 1000.0, -5.0, 50.0),
        "upstream/a/slots": Slots(8.0, 3.0),
        "upstream/b/slots": Slots(float("inf"), 2.0),
        "upstream/b/kv": Watermark(KvRules(tokens=1000), booked=100.0, held=1),
        "tenant/x%2Fy/usd_day": Budget(20.0, Period.DAY, used=1.25, at=50.0),
        "session/x/y/tokens": Budget(20.0, at=50.0),
    }
    tally = Tally()
    tally.waited_s = 2.5
    for reason in (Reason.LANE_FULL, Reason.LANE_FULL, Reason.QUEUE_TIMEOUT):
        tally(Refused(reason, 429))
    return {
        **state.describe(Lanes(LANES), store, 50.0),
        "breakers": {"a": {"state": "open"}, "b": {"state": "closed"}},
        "flying": 7,
        "unsettled": 8,
        "draining": False,
        "config": Told("abc", applied=2, at=1700000000.5).state(),
        "tally": tally.snapshot(),
        **more,
    }


def read(page: bytes) -> dict[str, tuple[str, dict[tuple[tuple[str, str], ...], float]]]:
    """By name of a sample: its type, and its values by labels."""
    return {
        family.name: (family.type, {tuple(sorted(one.labels.items())): one.value for one in family.samples})
        for family in text_string_to_metric_families(page.decode())
    }


def test_counts_and_levels_have_their_types_units_and_labels() -> None:
    """A bucket in debt is below nothing; what has no limit tells none; sessions are not told."""
    found = read(Metrics().page(told()))
    none: tuple[()] = ()
    assert found["tidegate_config_info"] == ("gauge", {(("version", "abc"),): 1})
    assert found["tidegate_config_reloads"] == ("counter", {(("result", "applied"),): 2, (("result", "refused"),): 0})
    assert found["tidegate_config_last_reload_timestamp_seconds"] == ("gauge", {none: 1700000000.5})
    assert found["tidegate_refused"] == (
        "counter", {(("reason", "lane_full"),): 2, (("reason", "queue_timeout"),): 1}
    )  # fmt: skip
    assert found["tidegate_waited_seconds"] == ("counter", {none: 2.5})
    assert found["tidegate_queue_requests"] == ("gauge", {(("lane", "P0"),): 0, (("lane", "P1"),): 0})
    assert found["tidegate_queue_bytes"] == ("gauge", {(("lane", "P0"),): 0, (("lane", "P1"),): 0})
    assert found["tidegate_in_flight"] == ("gauge", {none: 7})
    assert found["tidegate_draining"] == ("gauge", {none: 0})
    assert found["tidegate_bucket_level"] == ("gauge", {(("counter", "upstream/a/*/total"),): -5})
    assert found["tidegate_bucket_capacity"] == ("gauge", {(("counter", "upstream/a/*/total"),): 1000})
    assert found["tidegate_slots_limit"] == ("gauge", {(("counter", "upstream/a/slots"),): 8})
    assert found["tidegate_slots_used"][1][("counter", "upstream/a/slots"),] == 3
    assert found["tidegate_slots_used"][1][("counter", "upstream/b/slots"),] == 2
    assert found["tidegate_cache_fill"] == ("gauge", {(("counter", "upstream/b/kv"),): 0.1})
    assert found["tidegate_budget_spent"] == ("gauge", {(("counter", "tenant/x%2Fy/usd_day"),): 1.25})
    assert found["tidegate_breaker_open"][1] == {
        (("state", "open"), ("upstream", "a")): 1,
        (("state", "closed"), ("upstream", "b")): 0,
    }


def test_a_page_tells_the_state_it_was_made_of() -> None:
    """Nothing of the one before is left, and all instruments say what they are."""
    metrics = Metrics()
    metrics.page(told())
    page = metrics.page(told(breakers={}, config=Told("def").state()))
    found = read(page)
    assert found["tidegate_config_info"][1] == {(("version", "def"),): 1}
    assert "tidegate_breaker_open" not in found
    assert "tidegate_config_last_reload_timestamp_seconds" not in found, "there was none"
    names = [name for name, *_ in (*GROWING, *LEVELS)]
    assert len(set(names)) == len(names)
    helps = [line for line in page.decode().splitlines() if line.startswith("# HELP")]
    assert all(len(line.split(maxsplit=3)) == 4 for line in helps)
    assert version_of(load(None, {})) in Metrics().page(told(config=Told(version_of(load(None, {}))).state())).decode()


def test_names_that_come_and_go_cost_nothing_and_hide_nobody() -> None:
    """Versions, and tenants that nobody listed, for as long as the process runs; whatever they are called."""
    metrics = Metrics()
    for number in range(3):
        counters = {f"tenant/{number}.{i}/slots": {"used": 1, "limit": 2} for i in range(900)}
        page = metrics.page(told(counters=counters, config=Told(f"v{number}").state()))
    found = read(page)
    assert found["tidegate_config_info"][1] == {(("version", "v2"),): 1}
    assert list(found["tidegate_slots_used"][1]) == [(("counter", key),) for key in counters]
    hostile = 'tenant/"} 1\n# \\x{y="/slots'
    found = read(metrics.page(told(counters={hostile: {"used": 1, "limit": 2}})))
    assert found["tidegate_slots_used"][1] == {(("counter", hostile),): 1}


def test_what_the_rules_name_is_told_before_the_crowd() -> None:
    """Also when it came later, as a limit does that a reload brings, or that is learned."""
    store: Store = {f"tenant/{number}/slots": Slots(1.0) for number in range(state.MOST_COUNTERS)}
    store["upstream/a/slots"] = Slots(8.0, 3.0)
    shown = state.describe(Lanes(LANES), store, 50.0, ["upstream/gone/slots", "upstream/a/slots"])["counters"]
    assert (next(iter(shown)), len(shown)) == ("upstream/a/slots", state.MOST_COUNTERS)


async def test_the_console_shows_it_as_text() -> None:
    """With the type that says which text it is."""
    [port] = free_ports(1)
    runner = await state.serve(f"127.0.0.1:{port}", told, metrics=Metrics().page)
    try:
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/metrics") as answer:
            assert answer.status == 200
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert read(await answer.read())["tidegate_unsettled"] == ("gauge", {(): 8})
    finally:
        await runner.cleanup()


async def test_whoever_reads_metrics_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many who ask at once get one page; later there is another."""
    made: list[dict[str, Any]] = []

    def page(told_state: dict[str, Any]) -> bytes:
        made.append(told_state)
        return str(len(made)).encode()

    monkeypatch.setattr(state, "FRESH_S", 600.0)
    [port] = free_ports(1)
    runner = await state.serve(f"127.0.0.1:{port}", told, metrics=page)
    try:
        async with aiohttp.ClientSession() as http:

            async def read_one() -> bytes:
                async with http.get(f"http://127.0.0.1:{port}/metrics") as answer:
                    return await answer.read()

            assert {*await asyncio.gather(*(read_one() for _ in range(20)))} == {b"1"}
            monkeypatch.setattr(state, "FRESH_S", 0.0)
            assert await read_one() == b"2"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("gone", ["tally", "config"])
def test_a_state_that_lacks_something_is_a_bug_that_shows(gone: str) -> None:
    """Not a page that silently tells less."""
    broken = told()
    del broken[gone]
    with pytest.raises(KeyError):
        Metrics().page(broken)
