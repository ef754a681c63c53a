"""The only code that waits: what it promises, and then random schedules that try to break it."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget, Period
from extproc.core.capacity import Answer, Ask, Change, Claim, Gauge, Store, answer
from extproc.core.events import Observed, Queued, Shadowed
from extproc.core.fairness import cost, toll
from extproc.core.forecast import Pace
from extproc.core.lanes import Lanes
from extproc.core.lines import Backlog, Waiter
from extproc.core.policy import Bounds, KvRules, Lane, Order, Pacing, WhenBusy
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Request, Size
from extproc.core.watermark import Reading, Watermark
from extproc.granting import MAX_DEPTH, MAX_LOOKS, TICK_S
from extproc.limiter import Grant, Limiter
from extproc.ports import Gone
from extproc.turn import Wants, turn_of
from tests.doubles import FakeExchange, Ledger, Observer, Suspending, VirtualLoop, play, request

KINDS = [Ledger, Suspending]
LANES = [
    Lane("P0", 0, 4, WhenBusy.SPILL, 1, max_requests=100, max_tokens=100_000, max_bytes=1000),
    Lane("P1", 1, 30, WhenBusy.SPILL, 1, max_requests=100, max_tokens=100_000, max_bytes=1000),
    Lane("P2", 2, 110, WhenBusy.HOLD, 1, max_requests=100, max_tokens=100_000, max_bytes=1000),
]


class Bench:
    """A limiter with everything around it; `sick` are the upstreams whose breaker is open until `probe_at`, or for
    `rests_s` from now.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        store: Store,
        kind: type[Ledger] = Ledger,
        lanes: list[Lane] = LANES,
        make: type[Limiter] = Limiter,
        owned: frozenset[str] = frozenset("z"),
        **rules: Any,
    ) -> None:
        self.loop = loop
        self.store = store
        self.capacity = kind(loop, store)
        self.lanes = Lanes(lanes)
        self.pace = Pace()
        self.observer = Observer()
        self.sick: set[str] = set()
        self.probe_at = inf
        self.rests_s: dict[str, float] = {}
        self.limiter = make(
            self.lanes,
            self.capacity,
            loop,
            lambda name: name not in self.sick,
            self.pace,
            self.observer,
            self._earliest_probe,
            owned,
            **rules,
        )
        self.running = asyncio.ensure_future(self.limiter.run())
        self.tickets = 0
        self.order: list[str] = []

    def _earliest_probe(self, names: tuple[str, ...]) -> float:
        rests = [self.loop.time() + self.rests_s[name] for name in names if name in self.rests_s]
        return min(rests, default=self.probe_at)

    def send(
        self,
        names: str = "a",
        exchange: FakeExchange | None = None,
        since: float | None = None,
        **changes: Any,
    ) -> asyncio.Task[Grant]:
        """A request's wait for a permit, as a task. `order` tells who was granted, in order."""
        self.tickets += 1
        one = asking(self.loop, f"t{self.tickets}", **changes)
        what = wants(one, names, self.store)
        return asyncio.ensure_future(self._acquire(one, what, exchange or FakeExchange(), since))

    async def _acquire(self, one: Request, what: Wants, exchange: FakeExchange, since: float | None) -> Grant:
        grant = await self.limiter.acquire(one, what, exchange.hold, since)
        self.order.append(one.ticket)
        return grant

    async def free(self, key: str, amount: float = 1.0) -> None:
        """Give something back, as a flight does."""
        await self.capacity.change([Change(key, amount)])
        self.limiter.kick()

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


def asking(
    loop: VirtualLoop,
    ticket: str,
    *,
    waits_s: float | None = None,
    exchange: FakeExchange | None = None,
    **changes: Any,
) -> Request:
    """A request that arrives now and waits as long as its lane allows, or `waits_s`."""
    del exchange
    lane = next(lane for lane in LANES if lane.name == changes.get("lane", "P1"))
    until = loop.time() + (lane.max_wait_s if waits_s is None else waits_s)
    return request(**{"ticket": ticket, "arrived": loop.time(), "wait_until": until, **changes})


def wants(one: Request, names: str, store: Store) -> Wants:
    """At each upstream a slot, and tokens of its own model, of its cache and dollars (a cent a token) where the store
    counts them; `z` is owned.
    """
    prices = {}
    for name in names:
        price = [Claim(f"upstream/{name}/slots", 1.0)]
        for tokens in (f"upstream/{name}/{one.model}/total", f"upstream/{name}/kv"):
            price += [Claim(tokens, float(one.size.total))] if tokens in store else []
        dollars = f"upstream/{name}/usd_hour"
        price += [Claim(dollars, one.size.total / 100)] if dollars in store else []
        prices[name] = tuple(price)
    limited = any(f"upstream/{name}/usd_hour" in store for name in names)
    return Wants(tuple(names), prices, prompt=one.size.input, costless=frozenset("z") if limited else None)


def slots(**used: tuple[int, int]) -> Store:
    """Slots by upstream: how many, and how many of them are held."""
    return {f"upstream/{name}/slots": Slots(limit, float(held)) for name, (limit, held) in used.items()}


def bucket(loop: VirtualLoop, rate: float, capacity: float, level: float = 0.0) -> TokenBucket:
    return TokenBucket(rate, capacity, level, loop.time())


async def reason_of(task: asyncio.Task[Grant]) -> Reason:
    with pytest.raises(Rejected) as refused:
        await task
    return refused.value.reason


@pytest.fixture(params=KINDS, ids=["memory", "suspending"])
def kind(request: pytest.FixtureRequest) -> type[Ledger]:
    """Capacity that answers at once, and capacity that suspends."""
    return request.param


def test_where_there_is_room_nobody_waits(kind: type[Ledger]) -> None:
    """The permit comes without a word to Envoy, whether capacity answers at once or after a moment."""

    async def scenario(loop: VirtualLoop) -> None:
        bench, exchange = Bench(loop, slots(a=(20, 0)), kind), FakeExchange()
        grants = await asyncio.gather(*(bench.send(exchange=exchange) for _ in range(20)))
        assert grants == [Grant("a", waited=False)] * 20
        assert not exchange.holds
        assert not bench.observer.events
        assert bench.capacity.held() == {"upstream/a/slots": 20}
        await bench.stop()

    play(scenario)


def test_who_has_to_wait_is_told_soon_even_while_others_go_all_the_time() -> None:
    """Permits that are given without a pause to a better lane do not keep a newcomer from hearing that it waits."""

    async def scenario(loop: VirtualLoop) -> None:
        bench, exchange = Bench(loop, slots(a=(3, 0)), Suspending), FakeExchange()
        bench.capacity._on_its_way = lambda: asyncio.sleep(0.001)

        async def busy() -> None:
            while loop.time() < 1001.5:
                await bench.send(lane="P0")
                await asyncio.sleep(0)
                await Ledger.change(bench.capacity, [Change("upstream/a/slots", 1)])  # at once, for the next round
                bench.limiter.kick()

        crowd = [asyncio.ensure_future(busy()) for _ in range(9)]
        await asyncio.sleep(1)
        task = bench.send(exchange=exchange)
        await asyncio.sleep(0.1)
        assert exchange.holds
        await asyncio.gather(*crowd, task)
        await bench.stop()

    play(scenario)


def test_a_burst_that_fits_is_not_taken_for_a_full_lane(kind: type[Ledger]) -> None:
    """The lane's bound counts who really waits, not who has just arrived."""

    async def scenario(loop: VirtualLoop) -> None:
        tight = [Lane("P1", 0, 30, WhenBusy.SPILL, 1, max_requests=1, max_tokens=10**6, max_bytes=10**6)]
        bench = Bench(loop, slots(a=(9, 0)), kind, lanes=tight)
        assert len(await asyncio.gather(*(bench.send() for _ in range(9)))) == 9
        await bench.stop()

    play(scenario)


def test_a_release_lets_the_first_in_line_go(kind: type[Ledger]) -> None:
    """Who waits is told how long it may, once, and goes when a slot comes back."""

    async def scenario(loop: VirtualLoop) -> None:
        bench, exchange = Bench(loop, slots(a=(1, 1)), kind), FakeExchange()
        task = bench.send(exchange=exchange)
        await asyncio.sleep(3)
        assert not task.done()
        assert exchange.holds == [pytest.approx(30, abs=0.1)]
        assert [event.request.ticket for event in bench.observer.of(Queued)] == ["t1"]
        await bench.free("upstream/a/slots")
        assert await task == Grant("a", waited=True)
        assert loop.time() == pytest.approx(1003, abs=0.1)
        await bench.stop()

    play(scenario)


def test_a_refill_lets_go_without_anybodys_help(kind: type[Ledger]) -> None:
    """The pass is scheduled for when the bucket will have enough, and capacity is asked only a few times."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(9, 0)) | {"upstream/a/m/total": bucket(loop, 10, 1000)}, kind)
        assert (await bench.send(size=Size(200, 50))).waited
        assert loop.time() == pytest.approx(1025, abs=0.1)
        assert bench.capacity.takes <= 6
        await bench.stop()

    play(scenario)


def test_prompts_of_a_size_that_an_upstream_answers_badly_go_to_another(kind: type[Ledger]) -> None:
    """Others still go there; and where nobody answers them well, they go where they would."""

    async def scenario(loop: VirtualLoop) -> None:
        bad = {"a"}
        bench = Bench(
            loop, slots(a=(99, 0), b=(99, 0)), kind, fits=lambda name, prompt: prompt < 16_000 or name not in bad
        )
        large, small = Size(20_000, 50), Size(100, 50)
        assert [(await bench.send("ab", size=size)).upstream for size in (large, small)] == ["b", "a"]
        bad.add("b")
        assert (await bench.send("ab", size=large)).upstream == "a"
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize("lane", ["P1", "P2"])
@pytest.mark.parametrize("before", [True, False])
def test_who_may_not_go_to_an_upstream_for_the_size_of_its_prompt_keeps_nobody_from_there(
    kind: type[Ledger],
    lane: str,
    before: bool,  # noqa: FBT001
) -> None:
    """Whether it was so when they came or not: small prompts are not behind a large one that waits for another."""

    async def scenario(loop: VirtualLoop) -> None:
        bad = {"a"} if before else set()
        bench = Bench(
            loop, slots(a=(1, 1), b=(1, 1)), kind, fits=lambda name, prompt: prompt < 16_000 or name not in bad
        )
        large = bench.send("ab", size=Size(20_000, 50), lane=lane)
        small = bench.send("ab", size=Size(100, 50), lane=lane)
        await asyncio.sleep(3)
        bad.add("a")
        await bench.free("upstream/a/slots")
        await asyncio.sleep(0.1)
        assert (small.done(), large.done()) == (True, False)
        assert small.result().upstream == "a"
        await bench.free("upstream/b/slots")
        assert (await large).upstream == "b"
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize(("probe_in_s", "served_by"), [(60.0, "z"), (5.0, "")])
def test_what_is_owned_serves_when_nobody_else_can_be_waited_for(
    kind: type[Ledger], probe_in_s: float, served_by: str
) -> None:
    """Every breaker open: the owned upstream gets the request at once, unless one may be tried within its wait."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 0), z=(1, 0)), kind)
        bench.sick, bench.probe_at = set("az"), loop.time() + probe_in_s
        task = bench.send("az")
        if served_by:
            assert (await task).upstream == served_by
            assert loop.time() == pytest.approx(1000, abs=0.1)
            second = bench.send("az")
            await asyncio.sleep(2)
            assert not second.done(), "the owned one has its limits, too"
            await bench.free("upstream/z/slots")
            assert (await second).upstream == served_by
        else:
            assert await reason_of(task) is Reason.NO_UPSTREAM
        await bench.stop()

    play(scenario)


def test_those_who_are_let_go_together_are_no_more_than_may_return(kind: type[Ledger]) -> None:
    """Thirty wait, each for another model, when traffic returns to their upstream two at a time."""

    async def scenario(loop: VirtualLoop) -> None:
        store = slots(a=(99, 0))
        store |= {f"upstream/a/m{n}/total": TokenBucket(1e6, 1e6, 1e6, loop.time()) for n in range(30)}
        held = store["upstream/a/slots"]
        assert isinstance(held, Slots)
        bench = Bench(loop, store, kind, room=lambda _: 2 - held.used)
        bench.sick, bench.probe_at = {"a"}, loop.time()
        tasks = [bench.send("a", model=f"m{n}") for n in range(30)]
        await asyncio.sleep(1)
        bench.sick.clear()
        bench.limiter._reach._allows = lambda _: held.used < 2
        bench.limiter.kick()
        for going in (2, 4, 6):
            await asyncio.sleep(0.1)
            assert (sum(task.done() for task in tasks), held.used) == (going, 2)
            await bench.free("upstream/a/slots", 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await bench.stop()

    play(scenario)


def test_who_is_merely_slow_serves_where_nobody_else_may_be_asked(kind: type[Ledger]) -> None:
    """At once and within its limits, before what is owned and sick has to; and not while there is anybody else."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(9, 0), b=(1, 0), z=(9, 0)), kind, slow="b".__eq__)
        bench.sick, bench.probe_at = set("abz"), loop.time() + 60
        assert (await bench.send("abz")).upstream == "b"
        second = bench.send("abz")
        await asyncio.sleep(2)
        assert not second.done()
        await bench.free("upstream/b/slots")
        assert (await second).upstream == "b"
        await bench.free("upstream/b/slots")
        bench.sick = {"b"}
        assert (await bench.send("ba")).upstream == "a"
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize(("chain", "a", "b"), [("a", 30, 0), ("ab", 2, 28)])
def test_a_window_does_not_bind_those_who_have_nobody_else_to_ask(
    kind: type[Ledger], chain: str, a: int, b: int
) -> None:
    """Traffic returns to one that was merely slow; it is better than none, and the other one is better than it."""

    async def scenario(loop: VirtualLoop) -> None:
        store = slots(a=(99, 0), b=(99, 0))
        store |= {f"upstream/a/m{n}/total": TokenBucket(1e6, 1e6, 1e6, loop.time()) for n in range(30)}
        held = store["upstream/a/slots"]
        assert isinstance(held, Slots)
        windows = {"a": lambda: 2 - held.used, "b": lambda: inf}
        slow: set[str] = set()
        bench = Bench(loop, store, kind, room=lambda name: windows[name](), slow=slow.__contains__)
        bench.sick, bench.probe_at = {"a", "b"}, loop.time() + 5
        tasks = [bench.send(chain, model=f"m{n}") for n in range(30)]
        await asyncio.sleep(1)
        assert not any(task.done() for task in tasks)
        slow.add("a")
        bench.limiter._reach._allows = lambda name: name == "b" or held.used < 2
        bench.limiter.kick()
        went = [(await task).upstream for task in tasks]
        assert (went.count("a"), went.count("b")) == (a, b)
        assert loop.time() == pytest.approx(1001, abs=0.5)
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize("chain", ["az", "z"])
def test_what_is_owned_serves_when_the_next_probe_turns_out_to_be_too_late(kind: type[Ledger], chain: str) -> None:
    """The one that was waited for has failed, and everybody in line is looked at again."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(9, 0), z=(9, 0)), kind)
        bench.sick, bench.probe_at = set("az"), loop.time() + 5
        tasks = [bench.send(chain) for _ in range(3)]
        await asyncio.sleep(6)
        assert not any(task.done() for task in tasks)
        bench.probe_at = loop.time() + 60
        bench.limiter.kick()
        assert [(await task).upstream for task in tasks] == ["z"] * 3
        assert loop.time() == pytest.approx(1006, abs=0.1)
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize(
    ("changes", "sick", "reason", "after"),
    [
        ({}, "", Reason.QUEUE_TIMEOUT, 30),
        ({"waits_s": 2}, "", Reason.QUEUE_TIMEOUT, 2),
        ({"waits_s": 7, "deadline": 1007.0}, "", Reason.DEADLINE_PASSED, 7),
        ({"waits_s": 7, "deadline": 1009.0}, "", Reason.DEADLINE_PASSED, 7),
        ({}, "a", Reason.NO_UPSTREAM, 30),
        ({"waits_s": 0}, "", Reason.QUEUE_TIMEOUT, 0),
        ({"waits_s": -1}, "", Reason.DEADLINE_UNMEETABLE, 0),
    ],
)
def test_nobody_waits_longer_than_it_may(
    kind: type[Ledger], changes: dict[str, Any], sick: str, reason: Reason, after: float
) -> None:
    """The refusal comes at `wait_until`, with the reason that ended the wait, and leaves nothing behind."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 1)), kind)
        task = bench.send(**changes)
        await asyncio.sleep(0)
        bench.sick, bench.probe_at = set(sick), 1005.0
        found = await reason_of(task)
        if kind is Suspending and changes.get("waits_s") == 0:
            assert found in {reason, Reason.DEADLINE_UNMEETABLE}
        else:
            assert found is reason
        assert loop.time() == pytest.approx(1000 + after, abs=0.1)
        assert len(bench.lanes) == 0
        assert not bench.capacity.held()
        await bench.stop()

    play(scenario)


def test_a_grant_in_the_very_moment_that_the_wait_ends_is_kept() -> None:
    """The slot is taken, so it is used, not refused and given back."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 1)))

        def release() -> None:
            bench.store["upstream/a/slots"].change(1, loop.time())
            bench.limiter.kick()

        loop.call_at(1030.0, release)
        assert await bench.send() == Grant("a", waited=True)
        assert loop.time() == 1030
        await bench.stop()

    play(scenario)


def test_waiting_ends_on_time_even_while_envoy_is_being_told(kind: type[Ledger]) -> None:
    """A client that cannot be reached does not hold its place beyond its time."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 1)), kind)
        assert await reason_of(bench.send(exchange=FakeExchange(hold_s=500))) is Reason.QUEUE_TIMEOUT
        assert loop.time() == pytest.approx(1030, abs=0.1)
        await bench.stop()

    play(scenario)


def test_a_grant_while_envoy_is_being_told_is_kept(kind: type[Ledger]) -> None:
    """The permit may come before the word that it will take a while is out."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 1)), kind)
        task = bench.send(exchange=FakeExchange(hold_s=5))
        await asyncio.sleep(1)
        await bench.free("upstream/a/slots")
        assert await task == Grant("a", waited=True)
        assert loop.time() == pytest.approx(1005, abs=0.1)
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize("leaves_first", [False, True])
def test_a_client_that_is_gone_when_told_to_wait_leaves_nothing(kind: type[Ledger], leaves_first: bool) -> None:  # noqa: FBT001
    """Whether its permit came meanwhile or not."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 1)), kind)
        task = bench.send(exchange=FakeExchange(hold_s=2, leaves_when_held=True))
        await asyncio.sleep(3 if leaves_first else 1)
        await bench.free("upstream/a/slots")
        with pytest.raises(Gone):
            await task
        assert bench.capacity.held() == {"upstream/a/slots": -1}  # the one that was given back from outside
        assert len(bench.lanes) == 0
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize("bound", [{"max_requests": 2}, {"max_tokens": 250}, {"max_bytes": 25}])
def test_a_full_lane_sheds_its_newest(kind: type[Ledger], bound: dict[str, int]) -> None:
    """Over any of its bounds, in requests, tokens or bytes; those in line stay."""

    async def scenario(loop: VirtualLoop) -> None:
        rule = {"max_requests": 100, "max_tokens": 10**6, "max_bytes": 10**6, **bound}
        bench = Bench(loop, slots(a=(1, 1)), kind, lanes=[Lane("P1", 0, 30, WhenBusy.SPILL, 1, **rule)])
        waiting = [bench.send(bytes=10), bench.send(bytes=10)]
        await asyncio.sleep(0.1)
        assert await reason_of(bench.send(bytes=10)) is Reason.LANE_FULL
        assert len(bench.lanes) == 2
        for task in waiting:
            await bench.free("upstream/a/slots")
            assert (await task).waited
        await bench.stop()

    play(scenario)


def test_who_cannot_make_it_is_refused_at_once(kind: type[Ledger]) -> None:
    """The forecast counts what is ahead: 100 tokens/s, 300 ahead, so 4 s for the fourth hundred."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(99, 0)) | {"upstream/a/m/total": bucket(loop, 100, 1000)}, kind)
        waiting = [bench.send() for _ in range(3)]
        await asyncio.sleep(0.05)
        assert await reason_of(bench.send(waits_s=3.8)) is Reason.DEADLINE_UNMEETABLE
        fits = bench.send(waits_s=4.1)
        await asyncio.gather(*waiting, fits)
        assert loop.time() == pytest.approx(1004, abs=0.1)
        await bench.stop()

    play(scenario)


def test_another_models_queue_makes_nobody_hopeless() -> None:
    """What waits for other tokens is not ahead of these."""

    async def scenario(loop: VirtualLoop) -> None:
        store = slots(a=(99, 0)) | {f"upstream/a/{m}/total": bucket(loop, 100, 1000) for m in "mn"}
        bench = Bench(loop, store)
        for _ in range(20):
            bench.send()
        await asyncio.sleep(0.1)
        assert (await bench.send(model="n", waits_s=2)).waited
        assert loop.time() == pytest.approx(1001, abs=0.1)
        await _all_out(bench)

    play(scenario)


@pytest.mark.parametrize(("probe_in", "refused"), [(5.0, False), (31.0, True)])
def test_with_every_breaker_open_it_waits_for_the_first_that_may_be_tried(probe_in: float, refused: bool) -> None:  # noqa: FBT001
    """If that is in time; else it is refused at once and told when."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 0)))
        bench.sick, bench.probe_at = {"a"}, loop.time() + probe_in
        task = bench.send()
        await asyncio.sleep(0)
        if refused:
            with pytest.raises(Rejected) as no_upstream:
                await task
            assert no_upstream.value.reason is Reason.NO_UPSTREAM
            assert no_upstream.value.retry_after == pytest.approx(31)
        else:
            await asyncio.sleep(5)
            assert not task.done()
            bench.sick.clear()
            bench.limiter.kick()
            assert await task == Grant("a", waited=True)
        await bench.stop()

    play(scenario)


def test_a_lane_spills_to_the_next_upstream_after_a_second(kind: type[Ledger]) -> None:
    """Before that it holds for the first, after that it takes whichever is free; a lane that holds never does."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 1), b=(5, 0)), kind)
        holding, spilling = bench.send("ab", lane="P2"), bench.send("ab", lane="P1")
        assert await spilling == Grant("b", waited=True)
        assert loop.time() == pytest.approx(1001, abs=0.1)
        await asyncio.sleep(50)
        assert not holding.done()
        await bench.free("upstream/a/slots")
        assert (await holding).upstream == "a"
        await bench.stop()

    play(scenario)


def test_who_would_wait_more_than_a_second_spills_at_once(kind: type[Ledger]) -> None:
    """The forecast of the first choice decides on arrival; its room comes first all the same."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 1), b=(5, 0)), kind)
        bench.pace.learn_hold("a", 10.0)
        assert await bench.send("ab") == Grant("b", waited=False)
        await bench.free("upstream/a/slots")
        assert await bench.send("ab") == Grant("a", waited=False)
        await bench.stop()

    play(scenario)


def test_who_finds_the_first_choice_paused_spills_at_once(kind: type[Ledger]) -> None:
    """However short the pause: a provider that asked for it is not waited for. A lane that holds waits for its end."""

    async def scenario(loop: VirtualLoop) -> None:
        store: Store = {"upstream/a/slots": Slots(9), "upstream/b/slots": Slots(9)}
        bench = Bench(loop, store, kind)
        store["upstream/a/slots"].closed_until = loop.time() + 0.5
        began = loop.time()
        holding, spilling = bench.send("ab", lane="P2"), bench.send("ab", lane="P1")
        assert (await spilling).upstream == "b"
        assert loop.time() - began < 0.1
        assert (await holding).upstream == "a"
        assert loop.time() - began == pytest.approx(0.5, abs=0.05)
        await bench.stop()

    play(scenario)


def test_a_breaker_that_opens_sends_waiters_to_the_next(kind: type[Ledger]) -> None:
    """Whoever waits for an upstream that turns sick is looked at again, even where the lane holds."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 1), b=(1, 0)), kind)
        task = bench.send("ab", lane="P2")
        await asyncio.sleep(0.5)
        bench.sick.add("a")
        bench.limiter.kick()
        assert await task == Grant("b", waited=True)
        assert loop.time() < 1000.6
        await bench.stop()

    play(scenario)


def test_a_long_queue_that_may_go_at_once_leaves_the_loop_to_others_now_and_then() -> None:
    """A breaker closes before thousands: whoever else waits for the loop does not wait for all of them."""

    async def scenario(loop: VirtualLoop) -> None:
        wide = [Lane("P1", 0, 30, WhenBusy.SPILL, 1, max_requests=9999, max_tokens=10**9, max_bytes=10**9)]
        bench = Bench(loop, slots(a=(9999, 0)), lanes=wide)
        bench.sick, bench.probe_at = {"a"}, loop.time() + 1
        tasks = [bench.send() for _ in range(3 * MAX_LOOKS)]
        await asyncio.sleep(0.5)
        bench.sick.clear()
        bench.limiter.kick()
        seen = [0]
        while seen[-1] < len(tasks):
            await asyncio.sleep(0)
            seen.append(int(bench.store["upstream/a/slots"].used))
        assert max(later - before for before, later in itertools.pairwise(seen)) <= MAX_LOOKS
        await asyncio.gather(*tasks)
        assert bench.order == [f"t{i}" for i in range(1, len(tasks) + 1)]
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize("others", ["P1", "P2"])
def test_a_better_lane_gets_all_that_comes_back_at_once(kind: type[Ledger], others: str) -> None:
    """Ten slots come back together: the ten of the better lane go, and none of those below, however many wait."""

    async def scenario(loop: VirtualLoop) -> None:
        store = slots(a=(10, 10))
        bench = Bench(loop, store, kind)
        below = [bench.send(lane=others) for _ in range(10)]
        await asyncio.sleep(0.1)
        best = [bench.send(lane="P0") for _ in range(10)]
        await asyncio.sleep(0.1)
        await bench.free("upstream/a/slots", 10)
        await asyncio.gather(*best)
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in below)
        await bench.free("upstream/a/slots", 10)
        await asyncio.gather(*below)
        await bench.stop()

    play(scenario)


def test_a_breaker_that_closes_serves_by_lane_and_arrival(kind: type[Ledger]) -> None:
    """After an outage the queue drains in its own order: best lane first, first come first served."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(200, 0), b=(200, 0)), kind)
        bench.sick, bench.probe_at = {"a", "b"}, loop.time() + 1
        rng, tasks = random.Random(5), []
        for _ in range(60):
            tasks.append(bench.send(rng.choice(["a", "ab", "b"]), lane=rng.choice(["P0", "P1", "P2"])))
            await asyncio.sleep(0.001)
        lanes = {waiter.request.ticket: waiter.request.lane for waiter in bench.lanes.waiters()}
        bench.sick.clear()
        bench.limiter.kick()
        await asyncio.gather(*tasks)
        assert bench.order == sorted(bench.order, key=lambda ticket: (lanes[ticket], int(ticket[1:])))
        await bench.stop()

    play(scenario)


def test_a_long_queue_drains_in_few_calls() -> None:
    """Each call asks for more of every group while that goes on: 1,000 permits take tens of calls, not a thousand."""

    async def scenario(loop: VirtualLoop) -> None:
        wide = [Lane("P1", 0, 30, WhenBusy.SPILL, 1, max_requests=9999, max_tokens=10**9, max_bytes=10**9)]
        bench = Bench(loop, slots(a=(1000, 0)), Suspending, lanes=wide)
        bench.sick, bench.probe_at = {"a"}, loop.time() + 1
        tasks = [bench.send() for _ in range(1000)]
        await asyncio.sleep(0.5)
        before = bench.capacity.takes
        bench.sick.clear()
        bench.limiter.kick()
        await asyncio.gather(*tasks)
        assert bench.capacity.takes - before <= 10 + 1000 / MAX_DEPTH
        assert bench.order == [f"t{i}" for i in range(1, 1001)]
        await bench.stop()

    play(scenario)


def test_a_model_without_tokens_does_not_hold_up_another(kind: type[Ledger]) -> None:
    """Same lane, same upstream, other limit: nobody waits while what it wants idles."""

    async def scenario(loop: VirtualLoop) -> None:
        store = slots(a=(99, 0))
        store |= {"upstream/a/m/total": bucket(loop, 1, 1000), "upstream/a/n/total": bucket(loop, 1, 1000, 900)}
        bench = Bench(loop, store, kind)
        stuck = bench.send(model="m", size=Size(20, 8))
        await asyncio.sleep(0.1)
        assert await bench.send(model="n") == Grant("a", waited=False)
        assert not stuck.done()
        await _all_out(bench)

    play(scenario)


def test_a_large_request_is_not_starved_by_small_ones(kind: type[Ledger]) -> None:
    """It needs a full bucket while small ones keep coming in its lane and below: it goes when the bucket is full."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(999, 0)) | {"upstream/a/m/total": bucket(loop, 100, 1000, 100)}, kind)
        large = bench.send(size=Size(900, 100))
        await asyncio.sleep(0.1)
        small = []
        for i in range(90):
            small.append(bench.send(size=Size(5, 5), lane="P1" if i % 2 else "P2", waits_s=100))
            await asyncio.sleep(0.1)
        assert await large == Grant("a", waited=True)
        assert loop.time() == pytest.approx(1009.1, abs=0.3)
        await asyncio.gather(*small)
        await bench.stop()

    play(scenario)


def test_a_request_larger_than_the_bucket_goes_when_it_is_full(kind: type[Ledger]) -> None:
    """And whoever comes next waits until the debt is paid."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(9, 0)) | {"upstream/a/m/total": bucket(loop, 100, 200)}, kind)
        await bench.send(size=Size(900, 100))
        assert loop.time() == pytest.approx(1002, abs=0.1)
        await bench.send(size=Size(5, 5))
        assert loop.time() == pytest.approx(1010.1, abs=0.1)
        await bench.stop()

    play(scenario)


def test_draining_refuses_newcomers_and_everybody_in_line(kind: type[Ledger]) -> None:
    """At once; and from then on nobody is granted, even if capacity comes back in the same moment."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 1)), kind)
        waiting = [bench.send() for _ in range(5)] + [bench.send("a", exchange=FakeExchange(hold_s=3))]
        await asyncio.sleep(1)
        await bench.free("upstream/a/slots")
        bench.limiter.drain()
        assert [await reason_of(task) for task in waiting] == [Reason.DRAINING] * 6
        assert await reason_of(bench.send()) is Reason.DRAINING
        assert bench.limiter.draining
        assert len(bench.lanes) == 0
        assert bench.store["upstream/a/slots"] == Slots(1)
        await bench.stop()

    play(scenario)


def test_who_has_just_arrived_when_it_drains_is_refused_too() -> None:
    """Without being told to wait first."""

    async def scenario(loop: VirtualLoop) -> None:
        bench, exchange = Bench(loop, slots(a=(1, 1)), Suspending), FakeExchange()
        task = bench.send(exchange=exchange)
        await asyncio.sleep(0)
        bench.limiter.drain()
        assert await reason_of(task) is Reason.DRAINING
        assert not exchange.holds
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize("again", [0, 1, 2])
def test_cancelled_in_the_moment_of_its_grant_it_gives_back(kind: type[Ledger], again: int) -> None:
    """Before its task could notice, and cancelled again while it gives back: the next in line gets the slot."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 1)), kind)
        first = bench.send()
        await asyncio.sleep(0.1)
        second = bench.send()
        await asyncio.sleep(0.1)
        grant = bench.limiter.granting._grant

        def grant_and_cancel(head: Waiter, answer: Answer) -> None:
            grant(head, answer)
            if head.request.ticket == "t1":
                first.cancel()
                for turn in range(again):
                    loop.call_later(turn * 0.001, first.cancel)

        bench.limiter.granting._grant = grant_and_cancel  # type: ignore[method-assign]
        await bench.free("upstream/a/slots")
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await second == Grant("a", waited=True)
        assert loop.time() < 1001
        assert bench.store["upstream/a/slots"] == Slots(1, 1.0)
        await bench.stop()

    play(scenario)


def test_a_waiter_that_leaves_while_it_is_being_asked_for_hands_on() -> None:
    """The pass sees that it is gone when the answer comes, gives back, and asks for the next."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 1)), Suspending)
        first, second = bench.send(), bench.send()
        await asyncio.sleep(0.1)
        bench.capacity.on_call = first.cancel
        await bench.free("upstream/a/slots")
        assert await second == Grant("a", waited=True)
        assert first.cancelled()
        assert bench.store["upstream/a/slots"] == Slots(1, 1.0)
        await bench.stop()

    play(scenario)


def test_a_waiting_head_does_not_keep_the_loop_busy(kind: type[Ledger]) -> None:
    """Refills of a thousandth of what is wanted, for an hour: capacity is asked a handful of times."""

    async def scenario(loop: VirtualLoop) -> None:
        long = [Lane("P2", 0, 9999, WhenBusy.HOLD, 1, max_requests=9, max_tokens=10**9, max_bytes=10**9)]
        store = slots(a=(9, 0)) | {"upstream/a/m/total": bucket(loop, 1 / 3, 10_000)}
        bench = Bench(loop, store, kind, lanes=long)
        await bench.send(lane="P2", size=Size(1000, 200), waits_s=9999)
        assert loop.time() == pytest.approx(4600, abs=0.1)
        assert bench.capacity.takes <= 6
        await bench.stop()

    play(scenario)


async def told_to(task: asyncio.Task[Grant]) -> float:
    """Seconds after which a refused request may come back."""
    with pytest.raises(Rejected) as refused:
        await task
    assert refused.value.retry_after is not None
    return refused.value.retry_after


def test_the_time_told_to_a_refused_client_is_shortly_before_its_turn() -> None:
    """A part of its patience before that, at least a second; with every breaker open, when one is tried."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(9, 0)) | {"upstream/a/m/total": bucket(loop, 10, 1000)})
        large, small = {"size": Size(300, 100)}, {"size": Size(12, 2)}
        one = asking(loop, "x", **large)
        assert bench.limiter.prospects.predicted_s(one, wants(one, "a", bench.store)) == pytest.approx(40)
        told = await told_to(bench.send(**large))
        assert 25 < told < 40, "the turn is in 40 s, and 30 s is the longest wait"
        assert await told_to(bench.send(waits_s=1, **small)) == pytest.approx(1.2, abs=0.2)
        bench.sick, bench.probe_at = {"a"}, loop.time() + 32
        assert bench.limiter.prospects.predicted_s(one, wants(one, "a", bench.store)) == inf
        assert await told_to(bench.send(**large)) == pytest.approx(32)
        await bench.stop()

    play(scenario)


def test_under_lasting_overload_nobody_is_promised_a_late_turn() -> None:
    """At first, and when it is over; in between they are told more than a minute, which SDKs take for never."""
    large = {"size": Size(80, 10)}

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(99, 0)) | {"upstream/a/m/total": bucket(loop, 10, 1000)})
        held = [bench.send(**large) for _ in range(3)]
        assert await told_to(bench.send(fingerprint="first", **large)) < 40
        assert len(bench.limiter.promises) == 1
        for i in range(30):
            await asyncio.sleep(5)
            held.append(bench.send(fingerprint=f"f{i}", **large))
        held += [bench.send(**large) for _ in range(3)]
        assert await told_to(bench.send(fingerprint="late", **large)) > 60
        await asyncio.gather(*held, return_exceptions=True)
        await asyncio.sleep(60)
        bench.store["upstream/a/m/total"] = bucket(loop, 10, 1000)
        held = [bench.send(**large) for _ in range(3)]
        assert await told_to(bench.send(fingerprint="after", **large)) < 40
        await asyncio.gather(*held)
        await bench.stop()

    play(scenario)


def test_a_pause_is_told_as_it_is_however_little_a_lane_waits() -> None:
    """What a provider asked for is no queue: who comes back when it is over goes."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(9, 0)))
        bench.store["upstream/a/slots"].closed_until = loop.time() + 20
        told = await told_to(bench.send(lane="P0", fingerprint="hasty"))
        assert 15 < told <= 20
        await asyncio.sleep(told + 1)
        await bench.send(lane="P0", fingerprint="hasty", retries=1)
        await bench.stop()

    play(scenario)


def test_those_who_are_refused_together_are_told_one_time_after_another() -> None:
    """Each promise counts as work ahead of whoever comes next; without a fingerprint nobody is promised anything."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(9, 0)) | {"upstream/a/m/total": bucket(loop, 10, 1000)})
        times = [await told_to(bench.send(fingerprint=f"f{i}", waits_s=5)) for i in range(4)]
        gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
        assert gaps == [pytest.approx(10)] * 3, "10 s of work each"
        assert len({await told_to(bench.send(waits_s=5)) for _ in range(3)}) == 1
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize("in_time", [True, False])
def test_who_comes_back_at_its_time_has_the_place_of_its_first_arrival(in_time: bool) -> None:  # noqa: FBT001
    """It goes before those who came meanwhile. Who comes too early has no such place, and is told the same moment."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(9, 0)) | {"upstream/a/m/total": bucket(loop, 100, 1000)})
        first = [bench.send(size=Size(500, 500)) for _ in range(2)]
        await asyncio.sleep(0.1)
        told = await told_to(bench.send(fingerprint="f", waits_s=16))
        due = loop.time() + told
        assert 14 < told < 20
        await asyncio.sleep(0.1)
        others = [bench.send(waits_s=90) for _ in range(3)]
        await asyncio.sleep(told if in_time else 1)
        if not in_time:
            again = await told_to(bench.send(fingerprint="f", retries=1, waits_s=2))
            assert loop.time() + again == pytest.approx(due, abs=0.1)
            await asyncio.sleep(again)
        back = bench.send(fingerprint="f", retries=1, waits_s=16)
        await asyncio.gather(*first, *others, back)
        mine = f"t{bench.tickets}"
        assert bench.order.index(mine) == 2, bench.order
        await bench.stop()

    play(scenario)


def test_a_promise_costs_the_retry_budget_nothing() -> None:
    """Who was told to come now need not pay for waiting; any other retry that would have to wait does."""

    async def scenario(loop: VirtualLoop) -> None:
        asked = []
        bench = Bench(
            loop,
            slots(a=(9, 0)) | {"upstream/a/m/total": bucket(loop, 10, 1000)},
            patience=lambda one: asked.append(one) or 7.0,
        )
        first = bench.send(size=Size(200, 50))
        await asyncio.sleep(0.1)
        told = await told_to(bench.send(fingerprint="f", waits_s=20))
        assert await told_to(bench.send(fingerprint="g", retries=1)) >= 7
        await asyncio.sleep(told)
        assert (await bench.send(fingerprint="f", retries=1)).upstream == "a"
        assert [one.fingerprint for one in asked] == ["g"]
        await first
        await bench.stop()

    play(scenario)


def test_an_inherited_place_is_before_those_who_came_after_it(kind: type[Ledger]) -> None:
    """Who takes over the place of an earlier copy goes before whoever came later than that."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 1)), kind)
        tasks = []
        for since in (None, None, 1000.5):
            tasks.append(bench.send(since=since))
            await asyncio.sleep(1)
        for _ in tasks:
            await bench.free("upstream/a/slots")
            await asyncio.sleep(0.1)
        assert bench.order == ["t1", "t3", "t2"]
        await bench.stop()

    play(scenario)


def test_a_flood_makes_room_for_another_tenant(kind: type[Ledger]) -> None:
    """The newest of the tenant that takes most room is evicted and told when to come back."""

    async def scenario(loop: VirtualLoop) -> None:
        lane = Lane("P1", 0, 30, WhenBusy.SPILL, 1, max_requests=3, max_tokens=10**6, max_bytes=10**6)
        bench = Bench(loop, slots(a=(1, 1)), kind, lanes=[lane])
        flood = [bench.send(tenant="flood") for _ in range(3)]
        await asyncio.sleep(0.1)
        light = bench.send(tenant="light")
        with pytest.raises(Rejected) as evicted:
            await flood[2]
        assert (evicted.value.reason, evicted.value.retry_after) == (Reason.EVICTED, 1.0)
        assert await reason_of(bench.send(tenant="flood")) is Reason.LANE_FULL
        assert len(bench.lanes) == 3
        for task in (*flood[:2], light):
            await bench.free("upstream/a/slots")
            await asyncio.sleep(0.1)
            assert not task.done() or (await task).waited
        await _all_out(bench)

    play(scenario)


def test_a_better_lane_pushes_out_the_lowest_when_all_together_are_full(kind: type[Ledger]) -> None:
    """And the lowest lane's own newcomer finds it full."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 1)), kind, bounds=Bounds(max_requests=3))
        low = [bench.send(lane="P2"), bench.send(lane="P2"), bench.send(lane="P1")]
        await asyncio.sleep(0.1)
        assert await reason_of(bench.send(lane="P2")) is Reason.LANE_FULL
        best = bench.send(lane="P0")
        assert await reason_of(low[1]) is Reason.EVICTED
        await bench.free("upstream/a/slots")
        assert (await best).waited
        await _all_out(bench)

    play(scenario)


def test_who_is_evicted_while_envoy_is_being_told_is_told_that() -> None:
    """Also when its patience ends in the same moment."""

    async def scenario(loop: VirtualLoop) -> None:
        lane = Lane("P1", 0, 30, WhenBusy.SPILL, 1, max_requests=1, max_tokens=10**6, max_bytes=10**6)
        bench = Bench(loop, slots(a=(1, 1)), lanes=[lane])
        heavy = bench.send(tenant="heavy", size=Size(500, 0), exchange=FakeExchange(hold_s=500), waits_s=9)
        await asyncio.sleep(1)
        light = bench.send(tenant="light", size=Size(5, 0))
        assert await reason_of(light) is Reason.LANE_FULL, "one request each, and it is the newcomer"
        bench.limiter._evict(next(iter(bench.lanes.waiters())))  # type: ignore[arg-type]
        assert await reason_of(heavy) is Reason.EVICTED
        assert loop.time() == pytest.approx(1009, abs=0.1)
        await bench.stop()

    play(scenario)


def test_new_sessions_use_only_a_part_of_room_and_patience(kind: type[Ledger]) -> None:
    """Of a lane of five they get four places, of 30 s they wait 24; calls of running sessions get all."""

    async def scenario(loop: VirtualLoop) -> None:
        lane = Lane("P1", 0, 30, WhenBusy.SPILL, 1, max_requests=5, max_tokens=10**6, max_bytes=10**6)
        store = slots(a=(9, 0)) | {"upstream/a/m/total": bucket(loop, 10, 1000)}
        bench = Bench(loop, store, kind, lanes=[lane], new_share=lambda _: 0.8)
        size = {"size": Size(200, 65)}
        assert await reason_of(bench.send(fresh=True, **size)) is Reason.DEADLINE_UNMEETABLE
        served = bench.send(fresh=False, **size)
        await served
        assert loop.time() == pytest.approx(1026.5, abs=0.1)
        store["upstream/a/slots"].change(-8, loop.time())
        new = []
        for _ in range(5):
            new.append(bench.send(fresh=True, size=Size(1, 0)))
            await asyncio.sleep(0.05)
        assert [task.done() for task in new] == [False] * 4 + [True]
        assert await reason_of(new[4]) is Reason.LANE_FULL
        running = [bench.send(size=Size(1, 0)) for _ in range(2)]
        assert await reason_of(new[3]) is Reason.EVICTED
        assert not any(task.done() for task in running)
        await _all_out(bench)

    play(scenario)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("held", None),
        ("full", Reason.LANE_FULL),
        ("hopeless", Reason.DEADLINE_UNMEETABLE),
        ("sick", Reason.NO_UPSTREAM),
    ],
)
def test_what_is_observed_goes_at_once_whatever_was_decided(
    kind: type[Ledger], case: str, reason: Reason | None
) -> None:
    """It takes what is not there, displaces nobody, and is announced with what would have become of it."""

    async def scenario(loop: VirtualLoop) -> None:
        lane = Lane("P1", 0, 30, WhenBusy.SPILL, 1, max_requests=1, max_tokens=10**6, max_bytes=10**6)
        bench = Bench(loop, slots(a=(1, 1), b=(9, 0)), kind, lanes=[lane] if case == "full" else LANES)
        bench.pace.learn_hold("a", 1.0)
        waiting, exchange = bench.send("a"), FakeExchange()
        await asyncio.sleep(0.1)
        if case == "sick":
            bench.sick, bench.probe_at = {"a", "b"}, loop.time() + 99
        waits_s = 0.5 if case == "hopeless" else None
        seen = bench.send("a", exchange, observed=True, waits_s=waits_s)
        assert await seen == Grant("a", waited=False)
        assert loop.time() < 1000.2
        assert not exchange.holds
        (event,) = bench.observer.of(Observed)
        assert (event.request.ticket, event.reason) == ("t2", reason)
        assert bench.store["upstream/a/slots"] == Slots(1, 2.0)
        assert not waiting.done()
        await _all_out(bench)

    play(scenario)


def test_what_is_observed_goes_as_others_do_where_there_is_room(kind: type[Ledger]) -> None:
    """Nothing is announced then. Draining refuses it like anybody."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(2, 1), b=(1, 1)), kind)
        waiting = bench.send("b")
        await asyncio.sleep(0.1)
        assert await bench.send("a", observed=True) == Grant("a", waited=False)
        assert not bench.observer.of(Observed)
        if kind is Suspending:
            task = bench.send("a", observed=True)
            await asyncio.sleep(0)
            bench.limiter.drain()
            assert await reason_of(task) is Reason.DRAINING
        await _all_out(bench)
        del waiting

    play(scenario)


def test_what_is_observed_and_cancelled_while_it_takes_leaves_nothing() -> None:
    """What it was about to take is taken and given back, in that order."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 1)), Suspending)
        waiting = bench.send("a")
        await asyncio.sleep(0.1)
        task = bench.send("a", observed=True)
        bench.limiter._observe = lambda _: loop.call_soon(task.cancel)  # type: ignore[assignment, method-assign]
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
        assert bench.store["upstream/a/slots"] == Slots(1, 1.0)
        assert not bench.capacity.held()
        assert not waiting.done()
        await _all_out(bench)

    play(scenario)


def test_limits_in_shadow_mode_are_told_once_per_request(kind: type[Ledger]) -> None:
    """Of a counter when it goes, of its lane's bound when it waits; they stop nobody."""

    async def scenario(loop: VirtualLoop) -> None:
        shadow = frozenset({"max_requests"})
        lane = Lane("P1", 0, 30, WhenBusy.SPILL, 1, max_requests=1, max_tokens=10**6, max_bytes=10**6, shadow=shadow)
        store = slots(a=(1, 0), b=(2, 2))
        store["upstream/a/slots"].shadow = True
        bench = Bench(loop, store, kind, lanes=[lane])
        assert [await bench.send("a") for _ in range(2)] == [Grant("a", waited=False)] * 2
        waiting = []
        for _ in range(2):
            waiting.append(bench.send("b"))
            await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        await bench.free("upstream/b/slots", 2)
        await asyncio.gather(*waiting)
        told = [(event.request.ticket, event.limit) for event in bench.observer.of(Shadowed)]
        assert told == [("t2", "upstream/a/slots"), ("t4", "lane/P1/max_requests")]
        await bench.stop()

    play(scenario)


def test_a_lanes_terms_hold_for_who_need_not_wait_too(kind: type[Ledger]) -> None:
    """With nobody in line a lane leaves free what it has to, and a smooth one takes no burst."""

    async def scenario(loop: VirtualLoop) -> None:
        lanes = [
            LANES[0],
            replace(LANES[1], keep_free=0.5),
            replace(LANES[2], pacing=Pacing.SMOOTH),
        ]
        store = slots(a=(99, 0)) | {f"upstream/a/{m}/total": bucket(loop, 10, 1000, 1000) for m in "mn"}
        bench = Bench(loop, store, kind, lanes=lanes)
        assert not (await bench.send(size=Size(400, 100))).waited
        held = bench.send(size=Size(90, 10))
        await asyncio.sleep(0.1)
        assert not held.done()
        assert not (await bench.send(lane="P0", size=Size(300, 100))).waited
        smooth = [bench.send(lane="P2", model="n") for _ in range(2)]
        await asyncio.sleep(1)
        assert [task.done() for task in smooth] == [True, False]
        assert (await smooth[1]).waited
        assert loop.time() == pytest.approx(1010.1, abs=0.3), "100 tokens at 10 a second"
        await _all_out(bench)

    play(scenario)


def test_a_lane_with_a_share_gets_it_from_a_better_one_that_never_ends(kind: type[Ledger]) -> None:
    """A fifth of what flows, while the better lane has all the rest."""

    async def scenario(loop: VirtualLoop) -> None:
        lanes = [replace(LANES[0], max_wait_s=999.0), replace(LANES[2], min_share=0.2, max_wait_s=999.0)]
        store = slots(a=(999, 0)) | {"upstream/a/m/total": bucket(loop, 100, 1000)}
        bench = Bench(loop, store, kind, lanes=lanes)
        for lane in ("P0", "P2"):
            for _ in range(80):
                bench.send(lane=lane, waits_s=999)
        await asyncio.sleep(50.5)
        got = Counter("P0" if int(ticket[1:]) <= 80 else "P2" for ticket in bench.order)
        assert (got["P0"], got["P2"]) == (pytest.approx(40, abs=1), pytest.approx(10, abs=1))
        await _all_out(bench)

    play(scenario)


def test_who_waits_for_a_full_cache_looks_again_at_random() -> None:
    """Within half a second, more and more seldom, though nothing is released and no reading comes."""

    async def scenario(loop: VirtualLoop) -> None:
        cache = Watermark(KvRules(tokens=1000, stale_s=60.0))
        cache.observe(Reading(0.9, running=3), loop.time())
        chances: list[float] = []
        bench = Bench(loop, slots(a=(9, 0)) | {"upstream/a/kv": cache}, chance=lambda: chances.append(1) or 0.5)
        waiting = bench.send()
        await asyncio.sleep(2)
        looks = len(chances)
        assert 8 <= looks <= 20
        await asyncio.sleep(2)
        assert len(chances) - looks == pytest.approx(8, abs=1), "every quarter of a second by then"
        cache.observe(Reading(0.1), loop.time())
        await waiting
        assert loop.time() == pytest.approx(1004.1, abs=0.25)
        await bench.stop()

    play(scenario)


def test_service_is_charged_as_estimated_and_corrected_as_used() -> None:
    """A tenant that uses half of what it reserved goes twice as often as one that uses all."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(1, 1)))
        sent = {}
        for tenant in ("half", "whole"):
            for _ in range(40):
                task = bench.send(tenant=tenant, waits_s=900, size=Size(0, 100))
                sent[f"t{bench.tickets}"] = tenant
                task.add_done_callback(lambda _: None)
        await asyncio.sleep(0.1)
        for turn in range(45):
            await bench.free("upstream/a/slots")
            await asyncio.sleep(1)
            ticket = bench.order[turn]
            used = Size(0, 50 if sent[ticket] == "half" else 100)
            bench.limiter.settled(request(ticket=ticket, tenant=sent[ticket], size=Size(0, 100)), used)
        assert Counter(sent[ticket] for ticket in bench.order) == {"half": 30, "whole": 15}
        await _all_out(bench)

    play(scenario)


def test_upstreams_work_off_a_line_together() -> None:
    """A lane that spills counts the rates of all that may serve it, one that holds only the first's."""

    async def scenario(loop: VirtualLoop) -> None:
        store = {
            f"upstream/{name}/m/total": bucket(loop, rate, 9999) for name, rate in (("a", 10), ("b", 30), ("c", 0))
        }
        bench = Bench(loop, store)
        for lane, names, predicted in [("P1", "abc", 10), ("P2", "abc", 40), ("P1", "c", inf), ("P1", "cd", 0)]:
            one = asking(loop, "x", lane=lane, size=Size(300, 100))
            assert bench.limiter.prospects.predicted_s(one, wants(one, names, store)) == pytest.approx(predicted)
        await bench.stop()

    play(scenario)


async def _all_out(bench: Bench) -> None:
    """Cancel whoever still waits."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(bench.lanes) == 0


class Watched(Limiter):
    """Compares every pass of immediate capacity with a naive one that grants one by one, and keeps who was granted."""

    def __init__(self, *arguments: Any, **rules: Any) -> None:
        super().__init__(*arguments, **rules)
        self.granted: Counter[str] = Counter()
        self.on_grant: Callable[[Request], None] = lambda _: None
        self._latest: dict[str, str] = {}
        self._really_grant = self.granting._grant
        self.granting._grant = self._grant  # type: ignore[method-assign]

    def would_go(self) -> dict[str, str]:
        """Who could be granted now, and where: the whole line is asked in order until one goes, and so on."""
        line, found = Naive(self.lanes), {}
        store, now, terms = deepcopy(self._capacity.levels()), self._clock.time(), self.granting._terms
        while True:
            waiters = line.in_order()
            asks = [
                Ask(w.request.ticket, self.granting.options(w), followed=True, terms=terms[w.request.lane])
                for w in waiters
            ]
            answers = answer(store, asks, now)
            granted = [(w, a.option) for w, a in zip(waiters, answers, strict=True) if a.option is not None]
            if not granted:
                return found
            waiter, option = granted[0]
            found[waiter.request.ticket] = option.name
            line.serve(waiter)

    async def _pass(self) -> None:
        if not self._capacity.immediate:
            return await super()._pass()
        expected = {} if self.draining else self.would_go()
        self._latest = {}
        await super()._pass()
        assert self._latest == expected
        return None

    def _grant(self, head: Waiter, answer: Answer) -> None:
        self._really_grant(head, answer)
        self.granted[head.request.ticket] += 1
        self._latest[head.request.ticket] = answer.option.name
        if self._capacity.immediate:
            assert not self.draining
            names, name = turn_of(head).wants.names, answer.option.name
            allows, slow = self._reach._allows, self._reach._slow
            assert allows(name) or (slow(name) and not any(map(allows, names)))
        self.on_grant(head.request)


class Naive:
    """Lanes as a plain list that is sorted anew for every grant."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.waiters = list(lanes.waiters())
        self.counters = {(q.rule.name, t.name): t.counter for q in lanes.queues.values() for t in q.tenants.values()}
        self.debts = {name: queue.debt for name, queue in lanes.queues.items()}
        self.lifo = {name: queue.lifo for name, queue in lanes.queues.items()}

    def in_order(self) -> list[Waiter]:
        return sorted(self.waiters, key=self._claim)

    def serve(self, waiter: Waiter) -> None:
        one = waiter.request
        rule, inside = self.lanes.rules[one.lane], [w.request for w in self.waiters if w.request.lane == one.lane]
        if len({other.vip for other in inside}) > 1:
            self.debts[one.lane] = toll(self.debts[one.lane], cost(one.size), rule.vip_share, vip=one.vip)
        self.counters[one.lane, one.tenant] += cost(one.size) / one.weight
        self.waiters.remove(waiter)
        inside.remove(one)
        if rule.lifo_above is not None:
            fill = max(
                len(inside) / rule.max_requests,
                sum(other.size.total for other in inside) / rule.max_tokens,
                sum(other.bytes for other in inside) / rule.max_bytes,
            )
            self.lifo[one.lane] = fill > rule.lifo_above * (0.5 if self.lifo[one.lane] else 1.0)

    def _claim(self, waiter: Waiter) -> tuple[float, ...]:
        one, rule = waiter.request, self.lanes.rules[waiter.request.lane]
        place = one.wait_until if rule.order is Order.EDF else waiter.since
        place = -waiter.seq if self.lifo[one.lane] else place
        number = self.lanes.queues[one.lane].tenants[one.tenant].number
        later = not one.vip or self.debts[one.lane] > 0
        return rule.rank, later, self.counters[one.lane, one.tenant], number, place, waiter.seq


class Race:
    """One random schedule: clients come, wait, leave, are cancelled, shed, come back; breakers and engines move."""

    def __init__(self, loop: VirtualLoop, seed: int, kind: type[Ledger]) -> None:
        self.loop = loop
        self.rng = rng = random.Random(seed)
        self.names = "abc"[: rng.randint(1, 3)]
        self.tenants = [
            {"tenant": name, "weight": rng.choice([1.0, 1.0, 3.0]), "vip": rng.random() < 0.3}
            for name in "xyz"[: rng.choice([1, 1, 2, 3])]
        ]
        lanes = [self._lane(rank) for rank in range(rng.randint(1, 3))]
        bounds = Bounds(rng.choice([4, 1000]), 10**6, 10**6)
        self.slow: set[str] = set()
        rules = {"bounds": bounds, "chance": rng.random, "slow": self.slow.__contains__}
        self.bench = Bench(loop, self._store(), kind, lanes, Watched, **rules)
        assert isinstance(self.bench.limiter, Watched)
        self.limiter, self.capacity = self.bench.limiter, self.bench.capacity
        if isinstance(self.capacity, Suspending):
            self.capacity._rng = rng
            self.capacity.on_call = lambda: self._maybe_cancel(0.02)
        self.limiter.on_grant = self._on_grant
        self.observing = rng.choice([0.0, 0.0, 0.3])
        self.clients: dict[str, asyncio.Task[None]] = {}
        self.kept: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.tries = 0
        self.slack_s = 0.0 if self.capacity.immediate else 0.2

    def _lane(self, rank: int) -> Lane:
        rng = self.rng
        return Lane(
            f"P{rank}",
            rank,
            10,
            rng.choice(list(WhenBusy)),
            rng.choice([0.0, 0.2, 3.0]),
            rng.choice([3, 50]),
            10**5,
            300,
            min_share=rng.choice([0.0, 0.0, 0.3]),
            keep_free=rng.choice([0.0, 0.0, 0.3]) if rank else 0.0,
            pacing=rng.choice([Pacing.BURST, Pacing.BURST, Pacing.SMOOTH]),
            order=rng.choice(list(Order)),
            vip_share=rng.choice([0.0, 0.5, 1.0]),
            lifo_above=rng.choice([None, None, 0.5]),
            shadow=frozenset(rng.choice([(), (), ("max_requests",)])),
        )

    def _store(self) -> Store:
        rng, store = self.rng, {}
        for name in self.names:
            if rng.random() < 0.8:
                store[f"upstream/{name}/slots"] = Slots(rng.randint(1, 3))
            if rng.random() < 0.2:
                store[f"upstream/{name}/kv"] = Watermark(KvRules(tokens=1000, stale_s=2.0))
            for model in "mn":
                if rng.random() < 0.6:
                    capacity = rng.choice([100, 400])
                    level = rng.uniform(-50, capacity)
                    store[f"upstream/{name}/{model}/total"] = bucket(self.loop, rng.choice([30, 200]), capacity, level)
        return store

    async def run(self) -> None:
        rng = self.rng
        for i in range(rng.randint(3, 14)):
            self.clients[f"t{i}"] = asyncio.ensure_future(self._client(f"t{i}"))
        work = (self._breakers(), self._canceller(), self._auditor(), self._engines())
        helpers = [asyncio.ensure_future(helper) for helper in work]
        if rng.random() < 0.2:
            helpers.append(asyncio.ensure_future(self._drain()))
        await asyncio.gather(*self.clients.values(), return_exceptions=True)
        for helper in helpers:
            helper.cancel()
        done = await asyncio.gather(*helpers, return_exceptions=True)
        await asyncio.sleep(1)  # for what shielded returns are still on their way
        await self._check(done)

    async def _client(self, ticket: str) -> None:
        rng = self.rng
        await asyncio.sleep(rng.choice([0.0, 0.5, rng.uniform(0, 3)]))
        one = request(
            lane=rng.choice(list(self.bench.lanes.rules)),
            model=rng.choice("mn"),
            size=Size(rng.choice([5, 50, 300]), rng.choice([5, 200])),
            bytes=rng.choice([1, 90]),
            fingerprint=rng.choice(["", ticket, "same"]),
            fresh=rng.random() < 0.3,
            observed=rng.random() < self.observing,
            **rng.choice(self.tenants),
        )
        names = "".join(rng.sample(self.names, rng.randint(1, len(self.names))))
        for attempt in range(rng.choice([1, 1, 3])):
            told = await self._try(replace(one, ticket=f"{ticket}/{attempt}", retries=attempt), names)
            if told is None:
                return
            await asyncio.sleep(min(told, 20.0) * rng.choice([0.5, 1.0, 1.25]))

    async def _try(self, one: Request, names: str) -> float | None:
        """None when that was all, else the seconds after which to come back."""
        rng, loop = self.rng, self.loop
        one = replace(one, arrived=loop.time(), wait_until=loop.time() + rng.choice([0.0, 0.5, 3.0, 10.0]))
        what = wants(one, names, self.bench.store)
        exchange = FakeExchange(
            stays_s=rng.choice([0.0, 0.5, 1.0, rng.uniform(0, 2)]),
            hold_s=rng.choice([0.0, 0.0, 0.01, 1.0]),
            leaves_when_held=rng.random() < 0.1,
        )
        since = rng.choice([None, None, None, one.arrived - 1.0])
        end, grant, told = "cancelled", None, None
        self.tries += 1
        try:
            grant = await self.limiter.acquire(one, what, exchange.hold, since)
            end = grant.upstream
        except Rejected as refused:
            end, told = refused.reason, refused.retry_after
            assert not self.limiter.granted[one.ticket]
            assert self.limiter.draining or end is not Reason.DRAINING
            assert end is Reason.DRAINING or not one.observed
            assert end is Reason.DEADLINE_PASSED or told >= 1.0
        except Gone:
            end = "gone"
        finally:
            self.ends[end] += 1
            if end != "cancelled":
                assert loop.time() <= one.wait_until + self.slack_s + 1e-6
        if grant is not None:
            await self._fly(one, what.prices[grant.upstream], exchange)
        return told

    async def _fly(self, one: Request, taken: tuple[Claim, ...], exchange: FakeExchange) -> None:
        back, used = [], self.rng.choice([0.2, 1.0, 1.3])
        for claim in taken:
            kept = 0.0 if claim.key.endswith(("/slots", "/kv")) else claim.amount * used
            self.kept[claim.key] += kept
            back.append(Change(claim.key, claim.amount - kept))
        try:
            await exchange.ended()
        finally:
            self.limiter.settled(one, Size(round(one.size.input * used), round(one.size.output * used)))
            await asyncio.shield(self._land(back))

    async def _land(self, back: list[Change]) -> None:
        await self.capacity.change(back)
        self.limiter.kick()

    def _on_grant(self, one: Request) -> None:
        if self.rng.random() < 0.1:
            self._cancel(one.ticket.partition("/")[0])

    def _maybe_cancel(self, chance: float) -> None:
        if self.clients and self.rng.random() < chance:
            self._cancel(self.rng.choice(list(self.clients)))

    def _cancel(self, ticket: str) -> None:
        """Now, and perhaps again a moment later, while it is still busy with leaving."""
        task = self.clients[ticket]
        task.cancel()
        if self.rng.random() < 0.5:
            self.loop.call_later(self.rng.choice([0.0, 0.001, 0.003]), task.cancel)

    async def _canceller(self) -> None:
        for _ in range(self.rng.choice([0, 1, 4])):
            await asyncio.sleep(self.rng.uniform(0, 2))
            self._maybe_cancel(1.0)

    async def _breakers(self) -> None:
        while self.rng.random() < 0.7:
            await asyncio.sleep(self.rng.uniform(0, 2))
            name = self.rng.choice(self.names)
            self.bench.sick ^= {name}
            self.slow.discard(name)
            if name in self.bench.sick and self.rng.random() < 0.5:
                self.slow.add(name)
            self.bench.probe_at = self.loop.time() + self.rng.choice([0.5, 20.0])
            self.limiter.kick()

    async def _engines(self) -> None:
        """Readings of whatever has a cache, now and then."""
        caches = [key for key in self.bench.store if key.endswith("/kv")]
        while caches:
            await asyncio.sleep(self.rng.uniform(0.2, 3))
            reading = Reading(self.rng.choice([0.0, 0.5, 0.95]), running=self.rng.choice([0, 2]))
            await asyncio.shield(self.capacity.tune([Gauge(self.rng.choice(caches), reading)]))
            self.limiter.kick()

    async def _drain(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, 3))
        self.limiter.drain()

    async def _auditor(self) -> None:
        """Whoever could go at every one of many looks in a row has been forgotten."""
        shares = any(rule.min_share for rule in self.bench.lanes.rules.values())
        slow = shares or any(key.endswith("/kv") for key in self.bench.store)  # looked at again within a second
        while True:
            await asyncio.sleep(self.rng.uniform(0.05, 0.5))
            forgotten = None
            for _ in range(20 if slow else 3 if self.capacity.immediate else 12):
                ready = set(self.limiter.would_go())
                forgotten = ready if forgotten is None else forgotten & ready
                await asyncio.sleep(0.06 if slow else 2 * TICK_S if self.capacity.immediate else 0.02)
            assert self.limiter.draining or not forgotten, forgotten
            for counter in self.bench.store.values():
                assert self.observing or not isinstance(counter, Slots) or counter.used <= counter.limit

    async def _check(self, helpers: list[Any]) -> None:
        bench = self.bench
        for helper in helpers:
            assert helper is None or isinstance(helper, asyncio.CancelledError), helper
        for task in self.clients.values():
            assert task.cancelled() or task.exception() is None, task.exception()
        assert not bench.running.done()
        assert len(bench.lanes) == 0
        assert bench.lanes.heads() == list(bench.lanes.waiters()) == []
        assert [bench.lanes.total, *bench.lanes.backlogs.values()] == [Backlog()] * (1 + len(bench.lanes.rules))
        assert not any(queue.tenants or queue.lines for queue in bench.lanes.queues.values())
        assert all(count == 1 for count in self.limiter.granted.values())
        assert sum(self.ends.values()) == self.tries
        assert self.capacity.held() == {key: round(v, 6) for key, v in self.kept.items() if round(v, 6)}
        assert all(not isinstance(c, Slots) or c.used == 0 for c in bench.store.values())
        assert all(not isinstance(c, Watermark) or (c.booked, c.held) == (0, 0) for c in bench.store.values())
        assert not isinstance(self.capacity, Suspending) or not self.capacity.broken_off
        assert self.capacity.takes <= 40 * self.tries + 100
        own = self.limiter.granting._timer
        assert [timer for timer in self.loop.timers() if timer is not own] == []
        await bench.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}


SCHEDULES = int(os.environ.get("TIDEGATE_SCHEDULES", "1000"))
"""Of each kind of capacity; `make schedules` plays 10,000."""
PER_TEST = 100


@pytest.mark.parametrize("first", range(0, SCHEDULES, PER_TEST))
def test_random_schedules_keep_every_promise(kind: type[Ledger], first: int) -> None:
    """2,000 schedules in all; the seed of one that fails is told.

    In the end: everything is back, everybody ended once, nobody was granted twice, every wait ended in time, the lanes
    are empty, no timer is left. On the way: each pass grants what granting one by one would, with everybody sorted anew
    (so better lanes and the least served first, nobody waits while a fitting upstream idles), nobody who could go is
    forgotten, calls are few.
    """
    for seed in range(first, first + PER_TEST):
        try:
            play(lambda loop, seed=seed: Race(loop, seed, kind).run())
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


# Dollars of upstreams.


def purse(loop: VirtualLoop, limit: float, **more: Any) -> dict[str, Budget]:
    return {"upstream/a/usd_hour": Budget(limit, Period.HOUR, epoch_offset=-loop.time(), at=loop.time(), **more)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lane", ["P0", "P2"])
def test_spent_dollars_steer_to_what_is_free_and_let_go(kind: type[Ledger], lane: str) -> None:
    """At once, though another paid one idles and whether the lane spills or holds; until the hour is over, or what was
    reserved comes back.
    """

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, {**slots(a=(9, 0), b=(9, 0), z=(9, 0)), **purse(loop, 2.5)}, kind)
        went = [(await bench.send("abz", lane=lane)).upstream for _ in range(4)]
        assert went == ["a", "a", "z", "z"]
        await bench.free("upstream/a/usd_hour", 0.5)
        assert [(await bench.send("abz", lane=lane)).upstream for _ in range(2)] == ["a", "z"]
        await asyncio.sleep(3600)
        assert (await bench.send("abz", lane=lane)).upstream == "a"
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_who_comes_before_a_spent_one_goes_on(kind: type[Ledger]) -> None:
    """Its own dollars are not spent; only what stands behind in the chain is left out."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, {**slots(a=(9, 0), b=(1, 0), c=(9, 0), z=(9, 0)), **purse(loop, 0.5)}, kind)
        assert [(await bench.send("bacz", lane="P0")).upstream for _ in range(2)] == ["b", "z"]
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_is_free_spent_dollars_refuse(kind: type[Ledger]) -> None:
    """Newcomers at once, and those in line as soon as it is so, without a time to come back; others are not touched."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, {**slots(a=(1, 1), b=(1, 1), c=(1, 1)), **purse(loop, 10.0)}, kind)
        waiting = [bench.send("ab", lane=lane) for lane in ("P1", "P1", "P2")]
        other = bench.send("c")
        await asyncio.sleep(0.5)
        await bench.free("upstream/a/usd_hour", -9.5)
        assert [await reason_of(task) for task in waiting] == [Reason.SPEND_BUDGET] * 3
        with pytest.raises(Rejected) as refused:
            await bench.send("ab")
        assert (refused.value.reason, refused.value.retry_after) == (Reason.SPEND_BUDGET, None)
        assert not other.done()
        await bench.free("upstream/c/slots")
        assert (await other).upstream == "c"
        assert not bench.lanes.total.requests
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_waits_for_the_breaker_of_one_whose_dollars_are_spent(kind: type[Ledger]) -> None:
    """It could not be asked then; who waits for what is free is told when that may be tried."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, {**slots(a=(9, 0), z=(9, 0)), **purse(loop, 0.5)}, kind, owned=frozenset())
        bench.sick |= {"a", "z"}
        bench.rests_s = {"a": 5.0, "z": 900.0}
        began = loop.time()
        with pytest.raises(Rejected) as refused:
            await bench.send("az")
        assert (refused.value.reason, loop.time() - began < 1) == (Reason.NO_UPSTREAM, True)
        assert refused.value.retry_after == pytest.approx(900, abs=1)
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_spent_dollars_that_are_only_watched_steer_nobody(kind: type[Ledger]) -> None:
    """What would have been refused is told; who is only observed goes though there is nothing left."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, {**slots(a=(9, 0), z=(9, 0)), **purse(loop, 0.5, shadow=True)}, kind)
        assert (await bench.send("az")).upstream == "a"
        assert [event.limit for event in bench.observer.of(Shadowed)] == ["upstream/a/usd_hour"]
        await bench.stop()
        bench = Bench(loop, {**slots(a=(9, 0)), **purse(loop, 0.5)}, kind)
        assert (await bench.send("a", observed=True)).upstream == "a"
        assert [event.reason for event in bench.observer.of(Observed)] == [Reason.SPEND_BUDGET]
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_owned_serves_though_sick_when_all_others_are_spent(kind: type[Ledger]) -> None:
    """Nobody is sent to a healthy one whose dollars are gone; who can wait for the probe does."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, {**slots(a=(9, 0), z=(9, 0)), **purse(loop, 0.5)}, kind)
        bench.sick.add("z")
        assert (await bench.send("az")).upstream == "z"
        bench.probe_at = loop.time() + 5
        waiting = bench.send("az")
        await asyncio.sleep(1)
        assert not waiting.done()
        bench.sick.clear()
        bench.limiter.kick()
        assert (await waiting).upstream == "z"
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_reserved_for_the_best_lane_makes_others_spill_or_hold(kind: type[Ledger]) -> None:
    """Below 15 % of a bucket of tokens; the best lane goes on, and it lets go when the bucket has refilled."""

    async def scenario(loop: VirtualLoop) -> None:
        full = TokenBucket(10.0, 2000.0, 450.0, loop.time(), reserve=0.15)
        bench = Bench(loop, {**slots(a=(99, 0), b=(99, 0)), "upstream/a/m/total": full}, kind)
        assert (await bench.send("ab", lane="P1")).upstream == "a"
        assert (await bench.send("ab", lane="P1")).upstream == "b"
        holding = bench.send("ab", lane="P2")
        await asyncio.sleep(2)
        assert not holding.done()
        assert (await bench.send("ab", lane="P0")).upstream == "a"
        began = loop.time()
        assert (await holding).upstream == "a"
        assert loop.time() - began == pytest.approx((300 + 100 - (350 + 20 - 100)) / 10, abs=1.5)
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_dollars_that_others_of_a_batch_have_taken_move_nobody_to_a_paid_one(kind: type[Ledger]) -> None:
    """Two are asked for at once, what is left covers one: the other waits for what is free."""

    async def scenario(loop: VirtualLoop) -> None:
        store = {**slots(a=(2, 2), b=(1, 1), z=(1, 1)), **purse(loop, 1.5)}
        bench = Bench(loop, store, kind)
        best, other = [bench.send("abz", lane=lane) for lane in ("P0", "P1")]
        await asyncio.sleep(2)
        await bench.capacity.change([Change("upstream/a/slots", 2.0), Change("upstream/b/slots", 1.0)])
        bench.limiter.kick()
        await asyncio.sleep(1)
        assert (best.result().upstream, other.done()) == ("a", False)
        await bench.free("upstream/z/slots")
        assert (await other).upstream == "z"
        left = {key: bench.store[key].free_at(loop.time()) for key in store}
        assert left == {"upstream/a/slots": 1, "upstream/b/slots": 1, "upstream/z/slots": 0, "upstream/a/usd_hour": 0.5}
        await bench.stop()

    play(scenario)
