"""Inference engines behind a real Envoy: caches that fill, metrics that go wrong, floods and storms; all over HTTP.

The engines are fakes that schedule, grow, preempt and show their metrics as vLLM and SGLang do.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from extproc.fakes import text_of_tokens
from extproc.stack import Stack
from tests.e2e.conftest import PATIENCE_S, books_balance, chat
from tests.e2e.doubles import CHAT, PATIENT, Crowd, crowd, forget, running, tell, until

CACHE = 100_000
STALE_S = 1.0
TRICKLE_RPS = 2.0
MARKS = {"P0": {"high": 0.9, "low": 0.8}, "P2": {"high": 0.7, "low": 0.5}}
KV = {"high": 0.8, "low": 0.6, "lanes": MARKS, "scrape_s": 0.1, "stale_s": STALE_S, "trickle_rps": TRICKLE_RPS}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A vLLM whose cache is watched, and an SGLang behind it; both schedule by priority."""
    pace = {"first_token_s": 0.01, "prompt_tokens_per_s": 200_000, "output_tokens_per_s": 200}
    with running(
        tmp_path_factory.mktemp("engines"),
        upstreams={
            "vllm": {"kv": KV, "engine_priority": True, "fake": {**pace, "kv_tokens": CACHE}},
            "sglang": {
                "kv": {"scrape_s": 0.1},
                "engine_priority": True,
                "fake": {**pace, "kv_tokens": CACHE, "engine": "sglang"},
            },
        },
        routes=[
            {"models": ["alone"], "chain": ["vllm"], "acknowledge_unowned": True},
            {"models": ["both"], "chain": ["vllm", "sglang"], "acknowledge_unowned": True},
        ],
        lanes={"P0": {"max_wait_s": 20}, "P1": {"max_wait_s": 30}, "P2": {"max_wait_s": 40, "when_busy": "hold"}},
        other_endpoints=None,
    ) as stack:
        yield stack


@pytest.fixture
def vllm(engines: Stack) -> Iterator[Stack]:
    """The same, as it should be at the beginning of a test and at its end."""
    mend(engines)
    until_told(engines, lambda kv: kv["saturation"] == 0)
    forget(engines)
    yield engines
    mend(engines)
    books_balance(engines)


def mend(stack: Stack) -> None:
    """All faults are over."""
    tell(stack, "vllm", kv_usage=None, metrics="told", kv_tokens=CACHE)


def cache(stack: Stack, name: str = "vllm") -> dict[str, Any]:
    """What the service knows of an engine's cache."""
    return dict(stack.state()["counters"][f"upstream/{name}/kv"])


def until_told(stack: Stack, holds: Any, within_s: float = PATIENCE_S) -> dict[str, Any]:
    """The first of these that fits."""
    end = time.monotonic() + within_s
    while not holds(told := cache(stack)):
        assert time.monotonic() < end, told
        time.sleep(0.02)
    return told


async def told(stack: Stack, holds: Any) -> dict[str, Any]:
    """The same without holding up anybody."""
    return await asyncio.to_thread(until_told, stack, holds)


async def change(stack: Stack, **settings: Any) -> None:
    """Let vLLM be otherwise."""
    await asyncio.to_thread(lambda: tell(stack, "vllm", **settings))


def ask(clients: Crowd, lane: str = "P1", text: str = "hello", **more: Any) -> asyncio.Task[Any]:
    """A small request, on its way."""
    return asyncio.create_task(clients.ask(chat(text, model="alone", **more), x_tidegate_priority=lane))


@contextlib.asynccontextmanager
async def busy(stack: Stack, clients: Crowd) -> AsyncIterator[None]:
    """The engine works all the time while the block runs: a pool that runs nothing would take anybody.

    What it works on is in its metrics when the block begins, or it would count beside what they are changed to.
    """
    long = ask(clients, "P0", max_tokens=20_000)
    try:
        await told(stack, lambda kv: kv["requests"] >= 1 and kv["unseen"] == 0)
        yield
    finally:
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)


async def stays(task: asyncio.Task[Any], seconds: float) -> bool:
    """Whether it is not done for so long."""
    await asyncio.wait([task], timeout=seconds)
    assert not task.done(), task.result()
    return not task.done()


async def test_requests_wait_above_the_high_mark_and_go_on_below_the_low_one(vllm: Stack) -> None:
    """In between it depends on where the cache came from."""
    async with crowd(vllm) as clients, busy(vllm, clients):
        await change(vllm, kv_usage=0.7)
        await told(vllm, lambda kv: kv["fill"] >= 0.7)
        assert (await asyncio.wait_for(ask(clients), PATIENCE_S)).status == 200
        await change(vllm, kv_usage=0.85)
        await told(vllm, lambda kv: (kv["saturation"] or 0) >= 1)
        held = ask(clients)
        assert await stays(held, 0.5)
        await change(vllm, kv_usage=0.7)
        await told(vllm, lambda kv: kv["fill"] < 0.75)
        assert await stays(held, 0.5)
        await change(vllm, kv_usage=0.55)
        answer = await asyncio.wait_for(held, PATIENCE_S)
    assert answer.status == 200
    assert int(answer.headers["x-tidegate-queue-ms"]) >= 1000


async def test_each_lane_has_its_own_marks(vllm: Stack) -> None:
    """At three quarters batch work waits and the rest goes on; near the top only the best lane does."""
    async with crowd(vllm) as clients, busy(vllm, clients):
        await change(vllm, kv_usage=0.75)
        await told(vllm, lambda kv: kv["fill"] >= 0.75)
        batch = ask(clients, "P2")
        assert [(await asyncio.wait_for(ask(clients, lane), PATIENCE_S)).status for lane in ("P0", "P1")] == [200, 200]
        assert await stays(batch, 0.3)
        await change(vllm, kv_usage=0.85)
        await told(vllm, lambda kv: kv["fill"] >= 0.85)
        api = ask(clients, "P1")
        assert (await asyncio.wait_for(ask(clients, "P0"), PATIENCE_S)).status == 200
        assert await stays(api, 0.3)
        await change(vllm, kv_usage=0.4)
        assert [(await asyncio.wait_for(task, PATIENCE_S)).status for task in (batch, api)] == [200, 200]


@pytest.mark.parametrize("how", ["missing", "garbage", "slow", "percent"])
async def test_without_metrics_a_trickle_goes_until_they_are_back(vllm: Stack, how: str) -> None:
    """Never nothing, never a flood, whatever is wrong with the page."""
    async with crowd(vllm) as clients:
        await change(vllm, metrics=how, kv_usage=0.5, metrics_delay_s=30.0)
        await told(vllm, lambda kv: kv["saturation"] is None)
        began = time.monotonic()
        asks = [ask(clients, max_tokens=4) for _ in range(20)]
        await asyncio.wait(asks, timeout=3.0)
        gone, seconds = sum(task.done() for task in asks), time.monotonic() - began
        assert 3 <= gone <= TRICKLE_RPS * seconds + 2
        mended = time.monotonic()
        await change(vllm, metrics="told", kv_usage=None)
        answers = await asyncio.wait_for(asyncio.gather(*asks), PATIENCE_S)
        assert [answer.status for answer in answers] == [200] * 20
        assert time.monotonic() - mended < 0.8 * (20 - gone) / TRICKLE_RPS, "no trickle any more"


async def test_a_page_that_stands_still_neither_stops_nor_floods(vllm: Stack) -> None:
    """An engine that hangs goes on showing its last moment: full, or empty."""
    async with crowd(vllm) as clients, busy(vllm, clients):
        await change(vllm, kv_usage=0.85)
        await told(vllm, lambda kv: (kv["saturation"] or 0) >= 1)
        await change(vllm, metrics="frozen")
        held = ask(clients)
        assert await stays(held, 0.3)
        await told(vllm, lambda kv: kv["saturation"] is None)
        assert (await asyncio.wait_for(held, PATIENCE_S)).status == 200


async def test_one_request_that_is_larger_than_the_mark_goes_when_nothing_else_runs(vllm: Stack) -> None:
    """A pool of one never deadlocks on it; a second one waits for the first."""
    await change(vllm, kv_tokens=10_000)
    await told(vllm, lambda kv: kv["cache"] == 10_000)
    large = text_of_tokens(9_500)
    async with crowd(vllm) as clients:
        queued = vllm.state()["tally"]["queued"].get("P2", 0)
        first = ask(clients, "P2", large, max_tokens=400)
        await told(vllm, lambda kv: kv["requests"] == 1)
        second = ask(clients, "P2", large, max_tokens=10)
        answers = await asyncio.wait_for(asyncio.gather(first, second), 2 * PATIENCE_S)
    assert [answer.status for answer in answers] == [200, 200]
    assert vllm.state()["tally"]["queued"]["P2"] == queued + 1, "the first did not wait, the second did"
    one, other = vllm.record("vllm")["requests"]
    assert other["admitted"] >= one["finished"]
    assert preemptions(await page(vllm)) == 0


async def test_an_idle_pool_never_holds(vllm: Stack) -> None:
    """However long its page has not moved."""
    queued = vllm.state()["tally"]["queued"]
    async with crowd(vllm) as clients:
        for lane in ("P2", "P0", "P1"):
            await asyncio.sleep(1.5 * STALE_S)
            answer = await asyncio.wait_for(ask(clients, lane), PATIENCE_S)
            assert answer.status == 200
    assert vllm.state()["tally"]["queued"] == queued


@pytest.mark.parametrize(("lane", "priority"), [("P0", 200), ("P1", 100), ("P2", 0)])
async def test_each_engine_of_an_order_gets_the_priority_in_its_own_sign(vllm: Stack, lane: str, priority: int) -> None:
    """Also after a failover, and whatever the client says of itself."""
    async with crowd(vllm) as clients:
        body = chat(model="both", priority=-99_999)
        answer = await clients.ask(body, x_tidegate_priority=lane, x_fake_fault="503;provider=vllm")
    assert (answer.status, answer.headers["x-tidegate-upstream"]) == (200, "sglang")
    assert [vllm.record(name)["requests"][-1]["priority"] for name in ("vllm", "sglang")] == [-priority, priority]


# Crowds.


async def page(stack: Stack, name: str = "vllm") -> str:
    """An engine's metrics page."""
    upstream = stack.fakes[name]
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{upstream.host}:{upstream.port}/metrics") as got,
    ):
        return await got.text()


def preemptions(text: str) -> float:
    """What the engine counts of them."""
    return sum(
        float(row.rpartition(" ")[2]) for row in text.splitlines() if row.startswith("vllm:num_preemptions_total")
    )


async def first_token_s(session: aiohttp.ClientSession, stack: Stack, model: str) -> float:
    """Seconds to the first byte of a small streamed answer in P0."""
    began = time.monotonic()
    body, lane = chat(model=model, stream=True, max_tokens=8), "P0"
    async with session.post(stack.url + CHAT, json=body, headers={"x-tidegate-priority": lane}) as response:
        assert response.status == 200, await response.text()
        await response.content.readany()
        first = time.monotonic() - began
        await response.read()
    return first


async def steady(stack: Stack, seconds: float, every_s: float = 0.1) -> tuple[float, float]:
    """First-token times of small P0 requests that come at a steady pace, within which nine of ten are: at the engine
    that has much to do, and meanwhile at one like it that has not, which tells how busy the machine is.
    """
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        asks = []
        for _ in range(round(seconds / every_s)):
            for model in ("m", "calm"):
                asks.append(asyncio.create_task(first_token_s(session, stack, model)))
                await asyncio.sleep(every_s / 2)
        times = await asyncio.gather(*asks)
    return late(times[::2]), late(times[1::2])


def late(times: Sequence[float]) -> float:
    """What nine of ten are within."""
    return statistics.quantiles(times, n=10)[-1]


def show(capsys: pytest.CaptureFixture[str], line: str) -> None:
    """Print a figure past pytest's capture."""
    with capsys.disabled():
        print(f"\n  {line}")  # noqa: T201 - a figure for people


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A vLLM that reads 40,000 tokens a second, writes 200, and holds 200,000; and one like it."""
    pace = {"first_token_s": 0.02, "prompt_tokens_per_s": 40_000, "output_tokens_per_s": 200, "kv_tokens": 200_000}
    marks = {"P0": {"high": 0.95, "low": 0.9}, "P2": {"high": 0.7, "low": 0.6}}
    with running(
        tmp_path_factory.mktemp("crowded"),
        upstreams={
            name: {"kv": {"lanes": marks, "scrape_s": 0.2}, "owned": True, "fake": dict(pace)}
            for name in ("vllm", "calm")
        },
        routes=[{"models": ["m"], "chain": ["vllm"]}, {"models": ["calm"], "chain": ["calm"]}],
        other_endpoints=None,
        gateway=PATIENT,
    ) as stack:
        yield stack


async def test_the_best_lane_keeps_its_first_token_while_batch_work_floods_the_engine(
    crowded: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """400 jobs of 2,300 tokens want four times the cache: they wait here, and not before P0 in the engine."""
    before = preemptions(await page(crowded))
    bodies = [chat(text_of_tokens(2000, i), model="m", max_tokens=300) for i in range(400)]
    async with crowd(crowded) as clients:
        jobs = [asyncio.create_task(clients.ask(body, x_tidegate_priority="P2")) for body in bodies]
        await asyncio.sleep(0)
        await asyncio.to_thread(until, lambda: batch_waiting(crowded) >= 300, PATIENCE_S, 0.05)
        flooded, calm = await steady(crowded, 5.0)
        fullest, waiting = cache(crowded), batch_waiting(crowded)
        done = await asyncio.gather(*jobs)
    text = await page(crowded)
    show(
        capsys,
        f"P0 first token p90: {calm * 1000:.0f} ms at a calm engine, {flooded * 1000:.0f} ms in the flood; "
        f"{waiting} jobs waiting, cache {fullest['fill']:.0%}",
    )
    assert waiting > 50
    assert [answer.status for answer in done] == [200] * 400
    assert preemptions(text) == before
    assert flooded <= 1.5 * calm + 0.05


def batch_waiting(stack: Stack) -> int:
    """Jobs in the last lane's line."""
    return int(stack.state()["waiting"]["P2"]["requests"])


@dataclass
class Impatient:
    """A client as the SDKs make them: it gives up after so long, and tries again, three times, backing off."""

    session: aiohttp.ClientSession
    url: str
    rng: random.Random
    patience_s: float = 2.0
    retries: int = 3
    outcomes: list[str] = field(default_factory=list)

    async def ask(self, body: dict[str, Any], *, tells: bool) -> None:
        """One request until it is answered or given up; `tells`: it says how long it waits, as newer SDKs do."""
        for attempt in range(1 + self.retries):
            headers = {"x-tidegate-priority": "P1", "x-stainless-retry-count": str(attempt)}
            if tells:
                headers["x-stainless-read-timeout"] = str(self.patience_s)
            pause = min(8.0, 0.5 * 2.0**attempt) * (1.0 - 0.25 * self.rng.random())
            outcome, asked = await self._try(body, headers)
            self.outcomes.append(outcome)
            if outcome == "200":
                return
            await asyncio.sleep(asked if asked is not None and asked <= 60 else pause)
        self.outcomes.append("gave up")

    async def _try(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[str, float | None]:
        """What came of it, and when the answer asks to come again. Silence for `patience_s` is the end."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=self.patience_s)
        try:
            async with self.session.post(self.url + CHAT, json=body, headers=headers, timeout=timeout) as response:
                await response.read()
                after = response.headers.get("retry-after")
                return str(response.status), float(after) if after else None
        except (TimeoutError, aiohttp.ClientError) as error:
            return type(error).__name__, None


def long_prompts(count: int, seed: int) -> list[dict[str, Any]]:
    """Streams of 800 tokens about 8,000 to 32,000."""
    rng = random.Random(seed)
    texts = (text_of_tokens(rng.randint(8_000, 32_000), i) for i in range(count))
    return [chat(text, model="m", max_tokens=800, stream=True) for text in texts]


async def storm(url: str, bodies: Sequence[dict[str, Any]], seconds: float, seed: int) -> list[str]:
    """Impatient clients with these bodies, all within `seconds`; what came of each attempt."""
    rng = random.Random(seed)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Impatient(session, url, rng)

        async def one(i: int) -> None:
            await asyncio.sleep(rng.uniform(0, seconds))
            await client.ask(bodies[i], tells=bool(i % 2))

        await asyncio.gather(*(one(i) for i in range(len(bodies))))
    return client.outcomes


def most_copies(requests: Sequence[dict[str, Any]]) -> int:
    """The most that ran of one request at the same time."""
    by_body: dict[str, list[tuple[float, float]]] = {}
    for seen in requests:
        if seen["admitted"] is not None and seen["prompt_tokens"] > 1000:
            by_body.setdefault(seen["body_sha256"], []).append((seen["admitted"], seen["finished"] or float("inf")))
    most = 0
    for spans in by_body.values():
        most = max(most, *(sum(a <= start < b for a, b in spans) for start, _ in spans))
    return most


async def test_a_storm_of_impatient_clients_causes_no_preemption(
    crowded: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """A 5x burst of long prompts, given up after 2 s and sent again three times: P0 does not notice.

    The engine serves not quite two of these a second, and ten come. Sent to it directly they make it preempt.
    """
    bodies = long_prompts(60, seed=7)
    before = preemptions(await page(crowded))
    forget(crowded)
    storming = asyncio.create_task(storm(crowded.url, bodies, seconds=6.0, seed=7))
    await asyncio.to_thread(until, lambda: cache(crowded)["fill"] >= 0.5, PATIENCE_S, 0.05)
    stormy, calm = await steady(crowded, 6.0)
    outcomes = await storming
    caused = preemptions(await page(crowded)) - before
    copies = most_copies(crowded.record("vllm")["requests"])
    told = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    await storm(crowded.fakes["vllm"].where, bodies[:40], seconds=1.0, seed=7)
    direct = preemptions(await page(crowded)) - before - caused
    show(
        capsys,
        f"storm: P0 first token p90 {calm * 1000:.0f} ms at a calm engine, {stormy * 1000:.0f} ms in it; "
        f"{caused:.0f} preemptions ({direct:.0f} without a gate), {copies} copies at most; {told}",
    )
    assert caused == 0
    assert direct > 0
    assert copies == 1
    assert stormy <= 1.5 * calm + 0.1
    books_balance(crowded)
