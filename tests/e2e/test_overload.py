"""More than there is room for: who goes, who waits, who is turned away, and that no limit is ever passed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Any

import httpx
import pytest

from extproc.stack import Stack
from tests.e2e.conftest import books_balance, chat
from tests.e2e.doubles import (
    NEVER_OPENS,
    PATIENT,
    Crowd,
    Result,
    connect,
    crowd,
    forget,
    read_reply,
    rss_mb,
    running,
    until,
    waiting,
    written,
)

SLOW = "slow-first-token;s={}"
PATIENT_S = 90.0
"""How long the usual lanes wait: also for a machine on which it takes long until a thousand have come."""


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Upstreams that only count what runs at once, and a lane for each bound."""
    with running(
        tmp_path_factory.mktemp("slots"),
        upstreams={
            "ten": {
                "concurrency": 10,
                "breaker": NEVER_OPENS,
                "fake": {"first_token_s": 0.05, "output_tokens_per_s": 2000},
            },
            "one": {"concurrency": 1, "breaker": NEVER_OPENS},
            "spare": {"concurrency": 20, "breaker": NEVER_OPENS},
        },
        routes=[
            {"models": ["ten"], "chain": ["ten"], "acknowledge_unowned": True},
            {"models": ["one"], "chain": ["one"], "acknowledge_unowned": True},
            {"models": ["both"], "chain": ["one", "spare"], "acknowledge_unowned": True},
            {"models": ["wide"], "chain": ["spare"], "acknowledge_unowned": True},
        ],
        lanes={
            "P0": {"max_wait_s": 4.0},
            "P1": {"max_wait_s": PATIENT_S, "spill_after_s": 0.3},
            "P2": {"max_wait_s": PATIENT_S, "when_busy": "hold"},
            "hasty": {"max_wait_s": 1.0},
            "few": {"max_wait_s": 30.0, "max_requests": 3},
            "light": {"max_wait_s": 30.0, "max_tokens": 1000},
            "small": {"max_wait_s": 30.0, "max_bytes": 5000},
        },
        timeouts={"first_token_s": 120, "stall_s": 120},
        gateway=PATIENT,
    ) as stack:
        yield stack


@contextlib.asynccontextmanager
async def taken(stack: Stack, clients: Crowd, model: str, count: int = 1) -> AsyncIterator[None]:
    """Every slot of an upstream is in use while the block runs."""
    asks = [clients.ask(chat(model=model), x_fake_fault=SLOW.format(100)) for _ in range(count)]
    holders = [asyncio.create_task(ask) for ask in asks]
    try:
        await reached(stack, lambda state: state["flying"] >= count and not sum_waiting(state))
        yield
    finally:
        for holder in holders:
            holder.cancel()
        await asyncio.gather(*holders, return_exceptions=True)


async def reached(stack: Stack, holds: Any, within_s: float = 80.0) -> dict[str, Any]:
    """The first state of the service that fits."""
    end = time.monotonic() + within_s
    while True:
        state = await asyncio.to_thread(stack.state)
        if holds(state):
            return state
        assert time.monotonic() < end, state
        await asyncio.sleep(0.01)


def sum_waiting(state: dict[str, Any]) -> int:
    return sum(lane["requests"] for lane in state["waiting"].values())


def show(capsys: pytest.CaptureFixture[str], line: str) -> None:
    """Print a figure past pytest's capture."""
    with capsys.disabled():
        print(f"\n  {line}")  # noqa: T201 - a figure for people


async def test_two_hundred_clients_never_pass_a_concurrency_of_ten(
    slots: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """All are served, and the provider never had more than ten at once."""
    forget(slots)
    async with crowd(slots) as clients:
        answers = await asyncio.gather(
            *(clients.ask(chat(model="ten", stream=bool(i % 2), max_tokens=8 + i % 32)) for i in range(200))
        )
    assert [answer.status for answer in answers] == [200] * 200
    record = slots.record("ten")
    assert record["served"] == 200
    assert record["aborted"] == 0
    assert 8 <= record["max_in_flight"] <= 10
    waits = sorted(int(answer.headers["x-tidegate-queue-ms"]) for answer in answers)
    show(capsys, f"200 clients, concurrency 10: {record['max_in_flight']} at most, waited {waits[-1]} ms at most")


async def test_urgent_work_goes_on_while_batch_work_waits(slots: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """P0 is served at the next free slot however long P2's line is; what cannot be in time is refused at once."""
    forget(slots)
    served = slots.state()["tally"]["served"].get("ten", 0)
    async with crowd(slots) as clients:
        batch = [
            asyncio.create_task(
                clients.ask(chat("batch", model="ten"), x_tidegate_priority="P2", x_fake_fault=SLOW.format(0.4))
            )
            for _ in range(160)
        ]
        await reached(slots, lambda state: state["tally"]["served"].get("ten", 0) >= served + 10)
        asks = [_later(0.1 * i, clients.ask(chat("now", model="ten"), x_tidegate_priority="P0")) for i in range(12)]
        late = await clients.ask(chat("late", model="ten"), x_tidegate_priority="P2", x_request_timeout_ms="1500")
        urgent = await asyncio.gather(*asks)
        behind = (await asyncio.to_thread(slots.state))["waiting"]["P2"]["requests"]
        done = await asyncio.gather(*batch)
    assert [answer.status for answer in urgent] == [200] * 12
    assert behind > 30
    waits = [int(answer.headers["x-tidegate-queue-ms"]) for answer in urgent]
    assert max(waits) < 2000
    assert (late.status, late.reason) == (503, "deadline_unmeetable")
    assert late.seconds < 1.5  # it was not kept until its deadline
    assert [answer.status for answer in done] == [200] * 160
    show(capsys, f"P0 beside a line of {behind} P2: waited {statistics.median(waits):.0f} ms, {max(waits)} at most")


async def _later(seconds: float, ask: Awaitable[Result]) -> Result:
    await asyncio.sleep(seconds)
    return await ask


async def test_one_lane_spills_to_the_next_upstream_and_another_holds_for_the_first(slots: Stack) -> None:
    """With the first upstream busy P1 goes to the second after `spill_after_s`, P2 waits for the first."""
    async with crowd(slots) as clients:
        async with taken(slots, clients, "one"):
            spilled = await clients.ask(chat(model="both"), x_tidegate_priority="P1")
            held = asyncio.create_task(clients.ask(chat(model="both"), x_tidegate_priority="P2"))
            await reached(slots, lambda state: state["waiting"]["P2"]["requests"] == 1)
            again = await clients.ask(chat(model="both"), x_tidegate_priority="P1")
            assert not held.done()
        kept = await held
    assert [spilled.status, again.status, kept.status] == [200, 200, 200]
    assert [a.headers["x-tidegate-upstream"] for a in (spilled, again, kept)] == ["spare", "spare", "one"]
    assert int(spilled.headers["x-tidegate-queue-ms"]) < 2000


@pytest.mark.parametrize(
    ("lane", "body", "fit"),
    [("few", {}, 3), ("light", {"max_tokens": 300}, 3), ("small", {"user": "x" * 1400}, 3)],
    ids=["requests", "tokens", "bytes"],
)
async def test_a_lane_is_bounded(slots: Stack, lane: str, body: dict[str, Any], fit: int) -> None:
    """A lane takes what its bound allows in requests, tokens or bytes, sheds the newest, and serves those it took."""
    asked = chat(model="one", **body)
    async with crowd(slots) as clients:
        async with taken(slots, clients, "one"):
            inside = []
            for number in range(1, fit + 1):
                inside.append(asyncio.create_task(clients.ask(asked, x_tidegate_priority=lane)))
                backlog = (await reached(slots, lambda s, n=number: s["waiting"][lane]["requests"] == n))["waiting"][
                    lane
                ]
            refused = await clients.ask(asked, x_tidegate_priority=lane)
            other = asyncio.create_task(clients.ask(asked, x_tidegate_priority="P1"))
            await reached(slots, lambda state: state["waiting"]["P1"]["requests"] == 1)
        answers = await asyncio.gather(*inside, other)
    assert (refused.status, refused.reason) == (503, "lane_full")
    assert [answer.status for answer in answers] == [200] * (fit + 1)
    rules = slots.settings.lanes[lane]
    assert backlog["requests"] <= rules.max_requests
    assert backlog["tokens"] <= rules.max_tokens
    assert backlog["bytes"] <= rules.max_bytes


def test_a_client_that_leaves_its_stream_frees_its_slot_at_once(
    slots: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next in line is served within 100 ms of the moment a streaming client went away; on a machine that is busy,
    not later than that after who finds the slot free.
    """
    took, alone = [], []
    for _ in range(7):
        took.append(_turn_after_leaving(slots))
        alone.append(_turn(slots))
    show(capsys, f"left while streaming: next answer after {[f'{1000 * s:.0f}' for s in took]} ms")
    assert statistics.median(took) < 0.1 + max(0.0, statistics.median(alone) - 0.05)


def _turn(stack: Stack) -> float:
    """Seconds to the whole answer of one who finds the slot free."""
    books_balance(stack)
    with connect(stack) as connection:
        began = time.monotonic()
        connection.sendall(written(body=json.dumps(chat(model="one", max_tokens=1)).encode()))
        assert read_reply(connection)[0].status == 200
        return time.monotonic() - began


def _turn_after_leaving(stack: Stack) -> float:
    """Seconds from one client's end of its stream to the next one's whole answer, the provider's 10 ms included."""
    body = json.dumps(chat(model="one", stream=True, max_tokens=64)).encode()
    with connect(stack) as first, connect(stack) as second:
        first.sendall(written(body=body, headers={"x-fake-fault": "stall;s=100;at=4"}))
        seen = b""
        while b"data: " not in seen:
            seen += first.recv(65536)
        second.sendall(written(body=json.dumps(chat(model="one", max_tokens=1)).encode()))
        until(lambda: waiting(stack) == 1)
        began = time.monotonic()
        first.close()
        assert read_reply(second)[0].status == 200
        return time.monotonic() - began


def test_a_client_that_leaves_the_line_frees_its_place_at_once(
    slots: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """A waiter that goes away is out of its lane within 100 ms, and never reaches a provider."""
    forget(slots)
    body = json.dumps(chat("left", model="one")).encode()
    took, looks = [], []
    with connect(slots) as holder:
        holder.sendall(written(body=body, headers={"x-fake-fault": SLOW.format(100)}))
        until(lambda: slots.state()["flying"] == 1)
        for _ in range(7):
            with connect(slots) as waiter:
                waiter.sendall(written(body=body))
                until(lambda: waiting(slots) == 1)
                began = time.monotonic()
            until(lambda: waiting(slots) == 0, every_s=0.001)
            took.append(time.monotonic() - began)
            began = time.monotonic()
            slots.state()
            looks.append(time.monotonic() - began)
    show(capsys, f"left while queued: out of the lane after {[f'{1000 * s:.0f}' for s in took]} ms, polling included")
    assert statistics.median(took) < 0.1 + statistics.median(looks)
    books_balance(slots)
    assert len(slots.record("one")["requests"]) == 1


async def test_a_thousand_wait_in_one_worker(slots: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """All are held at once, then all are served; those whose lane has less patience are refused in time."""
    pids = {name: slots.processes[name].pid for name in ("service", "envoy")}
    before = {name: rss_mb(pid) for name, pid in pids.items()}
    text = "word " * 400
    async with crowd(slots, timeout_s=3 * PATIENT_S) as clients:
        async with taken(slots, clients, "wide", 20):
            patient = [
                asyncio.create_task(
                    clients.ask(
                        chat(text, model="wide", stream=bool(i % 2)), x_tidegate_priority="P1" if i % 5 else "P2"
                    )
                )
                for i in range(1000)
            ]
            await reached(slots, lambda state: sum_waiting(state) == 1000)
            held = {name: rss_mb(pid) for name, pid in pids.items()}
            hasty = await asyncio.gather(
                *(clients.ask(chat(model="wide"), x_tidegate_priority="hasty") for _ in range(50))
            )
            url, lane = f"{slots.console}/api/v1/requests", {"lane": "hasty", "limit": "500"}
            rows = (await asyncio.to_thread(httpx.get, url, params=lane, headers=slots.proof, timeout=30)).json()
        released = time.monotonic()
        answers = await asyncio.gather(*patient)
        took = time.monotonic() - released
    for name, mb in held.items():
        show(capsys, f"1,000 held: {name} {before[name]:.0f} -> {mb:.0f} MiB ({mb - before[name]:.0f} more)")
    waits = [int(answer.headers.get("x-tidegate-queue-ms", 0)) for answer in answers]
    show(capsys, f"1,000 held: served in {took:.1f} s once there was room, waited {max(waits) / 1000:.1f} s at most")
    assert {(answer.status, answer.reason) for answer in answers} == {(200, "")}
    assert max(waits) <= 1000 * PATIENT_S + 1000
    assert {answer.reason for answer in hasty} <= {"queue_timeout", "deadline_unmeetable"}
    ids = {answer.headers["x-tidegate-request-id"] for answer in hasty}
    kept = [row["waited_s"] or 0.0 for row in rows["requests"] if row["id"] in ids]
    assert len(kept) == 50
    assert max(kept) <= 1.0 + 1.0
    assert held["service"] < 1024 * 0.1 + before["service"]  # a tenth of the goal for ten times as many


# Limits per minute.

TPM, RPM, BURST_S = 60_000, 600, 10.0


@pytest.fixture(scope="module")
def metered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two accounts with small limits; the provider's buckets are of the size that the settings say, not one more."""
    strict = {"first_token_s": 0.02, "output_tokens_per_s": 5000, "burst_s": BURST_S}
    with running(
        tmp_path_factory.mktemp("metered"),
        upstreams={
            "tokens": {"limits": [{"tpm": TPM, "burst_s": BURST_S}], "fake": strict},
            "calls": {"limits": [{"rpm": RPM, "burst_s": BURST_S}], "fake": strict},
        },
        routes=[
            {"models": ["tokens"], "chain": ["tokens"], "acknowledge_unowned": True},
            {"models": ["calls"], "chain": ["calls"], "acknowledge_unowned": True},
        ],
        other_endpoints=None,
        lanes={"P0": {"max_wait_s": 1.0}, "P1": {"max_wait_s": 5.0}, "P2": {"max_wait_s": 5.0, "when_busy": "hold"}},
        gateway=PATIENT,
    ) as stack:
        yield stack


async def test_no_window_ever_holds_more_than_the_limit(metered: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """Under three times the load the provider admits capacity + refill in every window, and never has to say 429."""
    end = time.monotonic() + 15
    async with crowd(metered) as clients:
        await asyncio.gather(
            *(_push(clients, "tokens", random.Random(i), end) for i in range(110)),
            *(_push(clients, "calls", random.Random(i), end) for i in range(60)),
        )
    for name, per_minute in (("tokens", TPM), ("calls", RPM)):
        record = metered.record(name)
        assert record["refused_429"] == 0
        assert set(record["statuses"]) == {"200"}
        charges = [
            (seen["admitted"], seen["charged"] if name == "tokens" else 1)
            for seen in record["requests"]
            if seen["admitted"] is not None
        ]
        span = max(at for at, _ in charges) - min(at for at, _ in charges)
        shares = {w: _fullest(charges, w) / (per_minute / 60 * (BURST_S + w)) for w in (5.0, 20.0, 60.0)}
        used = sum(amount for _, amount in charges) / (per_minute / 60 * (BURST_S + span))
        show(
            capsys,
            f"{name}: fullest windows { ({w: f'{share:.0%}' for w, share in shares.items()}) } of what is allowed",
        )
        show(capsys, f"{name}: {used:.0%} of all that could be had in {span:.1f} s was had")
        assert max(shares.values()) <= 1.0
        assert used > 0.8


async def _push(clients: Crowd, model: str, chance: random.Random, end: float) -> None:
    while time.monotonic() < end:
        body = chat("word " * chance.randint(1, 150), model=model, max_tokens=chance.randint(20, 400))
        if model == "calls":
            body |= {"max_tokens": 4}
        answer = await clients.ask({**body, "stream": chance.random() < 0.5})
        assert answer.status in (200, 429, 503)
        if answer.status != 200:
            await asyncio.sleep(0.5)


def _fullest(charges: Sequence[tuple[float, int]], window_s: float) -> int:
    """The most that was admitted in any window of this length."""
    ordered, first, here, most = sorted(charges), 0, 0, 0
    for at, amount in ordered:
        here += amount
        while ordered[first][0] <= at - window_s:
            here -= ordered[first][1]
            first += 1
        most = max(most, here)
    return most


@pytest.mark.parametrize("name", ["slots", "tokens"])
async def test_a_retry_at_the_time_told_is_admitted(
    name: str, slots: Stack, metered: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who is refused in a burst and comes back at the time told is served, as long as not the whole burst does."""
    stack, model, lane = (slots, "ten", "hasty") if name == "slots" else (metered, "tokens", "P2")
    retried: list[Result] = []
    for returning in (4, 2):
        await asyncio.to_thread(until, lambda: all_there(stack), 60.0)
        async with crowd(stack) as clients:
            outcomes = await asyncio.gather(
                *(_ask_twice(clients, model, lane, again=i % returning == 0) for i in range(115))
            )
        retried += [second for _, second in outcomes if second is not None]
        await reached(stack, lambda state: not state["flying"])
    assert len(retried) >= 3
    admitted = sum(answer.status == 200 for answer in retried) / len(retried)
    show(capsys, f"retry-after on {name}: {admitted:.0%} of {len(retried)} retries were admitted")
    assert admitted >= 0.85


def all_there(stack: Stack) -> bool:
    """Whether every bucket is full, so that a burst is a burst."""
    buckets = [counter for counter in stack.state()["counters"].values() if "level" in counter]
    return all(bucket["level"] >= 0.99 * bucket["capacity"] for bucket in buckets)


async def _ask_twice(clients: Crowd, model: str, lane: str, *, again: bool) -> tuple[Result, Result | None]:
    body = chat(model=model, max_tokens=150)
    first = await clients.ask(body, x_tidegate_priority=lane, x_fake_fault=SLOW.format(0.2))
    if first.status == 200 or not again or first.headers["x-should-retry"] == "false":
        return first, None
    await asyncio.sleep(int(first.headers["retry-after-ms"]) / 1000)
    return first, await clients.ask(body, x_tidegate_priority=lane, x_fake_fault=SLOW.format(0.2))


async def test_a_crowd_that_comes_and_goes_leaves_nothing_behind(
    slots: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients that give up at any moment, queued or served, never let more than ten in, and take nothing with them."""
    forget(slots)
    seed = random.randrange(1 << 32)
    show(capsys, f"coming and going: seed {seed}")
    chance = random.Random(seed)
    async with crowd(slots) as clients:
        patience = [60.0 if i % 20 == 0 else chance.random() * 0.6 for i in range(300)]
        asks = [_give_up(clients, patience_s, stream=chance.random() < 0.5) for patience_s in patience]
        stayed = await asyncio.gather(*asks)
    assert 15 <= sum(stayed) < 300
    await asyncio.to_thread(books_balance, slots)
    record = slots.record("ten")
    assert record["max_in_flight"] <= 10
    assert record["served"] >= sum(stayed)


async def _give_up(clients: Crowd, patience_s: float, *, stream: bool) -> bool:
    try:
        async with asyncio.timeout(patience_s):
            answer = await clients.ask(chat(model="ten", stream=stream, max_tokens=200))
    except TimeoutError:
        return False
    assert answer.status == 200
    return True


def test_nothing_is_kept_when_all_is_over(slots: Stack) -> None:
    """After all of this no slot, no place in a lane and no open book is left."""
    books_balance(slots)
    state = httpx.get(f"http://{slots.settings.service.console}/state").json()
    assert {name: lane for name, lane in state["waiting"].items() if any(lane.values())} == {}
