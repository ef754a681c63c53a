"""What those in line wait for, as plain data."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Any

import pytest

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.capacity import Store
from extproc.core.policy import Lane, WhenBusy
from extproc.core.request import Size
from extproc.waiting import FORECAST, MOST_LINES, MOST_TENANTS, oldest_s, standing
from tests.doubles import VirtualLoop, play
from tests.test_limiter import Bench, bucket, slots

NO_RESTS: dict[str, float] = {}


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def told(bench: Bench, rests: dict[str, float] = NO_RESTS) -> dict[str, Any]:
    return standing(bench.limiter, bench.store, bench.loop.time(), rests)


def tokens(loop: VirtualLoop, level: float = 0.0, rate: float = 10.0) -> Store:
    """Two upstreams that only tokens limit."""
    keys = [f"upstream/{name}/m/total" for name in "ab"]
    return {**slots(a=(100, 0), b=(100, 0)), **{key: bucket(loop, rate, 1000.0, level) for key in keys}}


async def ended(bench: Bench, *tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await bench.stop()


def test_nobody_waits() -> None:
    """Then there is nothing to tell."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 0)))
        assert told(bench) == {"lines": [], "tenants": {}}
        assert oldest_s(bench.lanes.queues["P1"], loop.time()) is None
        await bench.stop()

    play(scenario)


def test_a_line_tells_what_it_lacks_and_when_the_next_goes() -> None:
    """Of an empty bucket: when what its first needs has flowed in; a newcomer comes after all of it."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, tokens(loop))
        first = [bench.send("a", tenant="chat") for _ in range(3)]
        await settle()
        await asyncio.sleep(2.0)
        (line,) = told(bench)["lines"]
        assert (line["lane"], line["key"], line["requests"], line["needs"]) == ("P1", "upstream/a/m/total", 3, 100.0)
        assert line["next_s"] == pytest.approx(8.0, abs=0.1)
        assert line["newcomer_s"] == pytest.approx(38.0, abs=1.0)
        assert (line["chain"], line["asked"], line["behind"]) == (["a"], ["a"], False)
        assert oldest_s(bench.lanes.queues["P1"], loop.time()) == pytest.approx(2.0)
        assert told(bench)["tenants"] == {"chat": 3}
        await ended(bench, *first)

    play(scenario)


def test_what_binds_is_where_the_turn_comes_first() -> None:
    """Of two upstreams the one that has enough sooner, and there what lacks longest."""

    async def scenario(loop: VirtualLoop) -> None:
        store = tokens(loop)
        store["upstream/b/m/total"] = TokenBucket(50.0, 1000.0, 0.0, loop.time())
        bench = Bench(loop, store)
        task = bench.send("ab")
        await asyncio.sleep(1.0)  # it passes its first choice over
        await settle()
        (line,) = told(bench)["lines"]
        assert (line["key"], line["asked"]) == ("upstream/b/m/total", ["a", "b"])
        await ended(bench, task)

    play(scenario)


def test_places_come_back_when_they_do() -> None:
    """Nobody knows when, until it is known how long one is held."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(4, 4)))
        task = bench.send("a")
        await settle()
        (line,) = told(bench)["lines"]
        assert (line["key"], line["next_s"], line["needs"]) == ("upstream/a/slots", None, 1.0)
        assert line["newcomer_s"] is None  # not 0: who comes now waits, too
        bench.pace.learn_hold("a", 8.0)
        assert told(bench)["lines"][0]["next_s"] == pytest.approx(2.0)
        assert told(bench)["lines"][0]["newcomer_s"] >= 2.0
        await ended(bench, task)

    play(scenario)


def test_who_is_behind_others_is_told_so() -> None:
    """There is enough for a small one, but a large one of a better lane wants it first."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, tokens(loop, level=150.0))
        large = bench.send("a", lane="P0", size=Size(160, 0), waits_s=60.0)
        small = bench.send("a", size=Size(20, 0))
        await settle()
        first, second = sorted(told(bench)["lines"], key=lambda line: line["lane"])
        assert (first["lane"], first["behind"]) == ("P0", False)
        assert (second["lane"], second["behind"], second["key"]) == ("P1", True, first["key"])
        assert second["next_s"] is not None
        await ended(bench, large, small)

    play(scenario)


def test_with_every_breaker_open_it_waits_for_the_first_that_may_be_tried() -> None:
    """The one that rests least; where nobody knows when, none is invented."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 0), b=(1, 0)))
        bench.sick, bench.probe_at = {"a", "b"}, loop.time() + 5.0
        task = bench.send("ab")
        await settle()
        now = loop.time()
        (line,) = told(bench, {"a": now + 9.0, "b": now + 5.0})["lines"]
        assert (line["key"], line["asked"], line["next_s"]) == ("upstream/b/breaker", [], pytest.approx(5.0))
        bench.probe_at = inf
        assert told(bench, {"a": inf, "b": inf})["lines"][0]["next_s"] is None
        assert told(bench, {"a": inf, "b": inf})["lines"][0]["key"] == "upstream/a/breaker"
        await ended(bench, task)

    play(scenario)


def test_the_tenant_with_most_of_a_line() -> None:
    """And which share of it that is."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, tokens(loop))
        tasks = [bench.send("a", tenant="loud") for _ in range(3)] + [bench.send("a", tenant="calm")]
        await settle()
        (line,) = told(bench)["lines"]
        assert (line["tenants"], line["tenant"], line["tenant_share"]) == (2, "loud", 0.75)
        await ended(bench, *tasks)

    play(scenario)


def test_paused_lanes_wait_for_nothing_but_that() -> None:
    """Their lines are not among those that wait for capacity; their oldest still is told."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 0)))
        bench.limiter.pause("P1", inf)
        task = bench.send("a")
        await settle()
        await asyncio.sleep(3.0)
        assert told(bench)["lines"] == []
        assert oldest_s(bench.lanes.queues["P1"], loop.time()) == pytest.approx(3.0)
        await ended(bench, task)

    play(scenario)


def test_the_oldest_is_looked_for_among_those_who_wait_longest() -> None:
    """However many tenants wait: the first of them came first."""

    async def scenario(loop: VirtualLoop) -> None:
        lanes = [Lane("P1", 1, 300, WhenBusy.SPILL, 1, 10_000, 10_000_000, 10_000_000)]
        bench = Bench(loop, {"upstream/a/slots": Slots(1, 1.0)}, lanes=lanes)
        tasks = [bench.send("a", tenant="first", waits_s=300.0)]
        await settle()
        await asyncio.sleep(5.0)
        tasks += [bench.send("a", tenant=f"t{i}", waits_s=300.0) for i in range(MOST_TENANTS + 10)]
        await settle()
        assert oldest_s(bench.lanes.queues["P1"], loop.time()) == pytest.approx(5.0)
        assert len(told(bench)["tenants"]) == MOST_TENANTS
        await ended(bench, *tasks)

    play(scenario)


def test_of_very_many_lines_the_largest_are_told() -> None:
    """And those of them that are largest with a forecast."""

    async def scenario(loop: VirtualLoop) -> None:
        lanes = [Lane("P1", 1, 300, WhenBusy.SPILL, 1, 10_000, 10_000_000, 10_000_000)]
        models = [f"m{i}" for i in range(MOST_LINES + 5)]
        store: Store = {"upstream/a/slots": Slots(10_000)}
        store |= {f"upstream/a/{model}/total": bucket(loop, 10.0, 1000.0) for model in models}
        bench = Bench(loop, store, lanes=lanes)
        tasks = [bench.send("a", model=model, waits_s=300.0) for model in models]
        tasks += [bench.send("a", model=models[-1], waits_s=300.0) for _ in range(3)]
        await settle()
        lines = told(bench)["lines"]
        assert len(lines) == MOST_LINES
        assert (lines[0]["model"], lines[0]["requests"]) == (models[-1], 4)
        assert sum(line["newcomer_s"] is not None for line in lines) == FORECAST
        assert {line["next_s"] for line in lines} == {10.0}
        await ended(bench, *tasks)

    play(scenario)
