"""The only code that waits: what it promises, and then random schedules that try to break it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from copy import copy
from math import inf
from typing import Any

import pytest

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.capacity import Ask, Change, Claim, Option, Store, answer
from extproc.core.events import Queued
from extproc.core.forecast import Pace
from extproc.core.lanes import Lanes, Waiter
from extproc.core.policy import Lane, WhenBusy
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Request, Size
from extproc.limiter import MAX_DEPTH, TICK_S, Grant, Limiter, Wants
from extproc.ports import Gone
from tests.doubles import FakeExchange, Ledger, Observer, Suspending, VirtualLoop, play, request

KINDS = [Ledger, Suspending]
LANES = [
    Lane("P0", 0, 4, WhenBusy.SPILL, 1, max_requests=100, max_tokens=100_000, max_bytes=1000),
    Lane("P1", 1, 30, WhenBusy.SPILL, 1, max_requests=100, max_tokens=100_000, max_bytes=1000),
    Lane("P2", 2, 110, WhenBusy.HOLD, 1, max_requests=100, max_tokens=100_000, max_bytes=1000),
]


class Bench:
    """A limiter with everything around it; `sick` are the upstreams whose breaker is open until `probe_at`."""

    def __init__(
        self,
        loop: VirtualLoop,
        store: Store,
        kind: type[Ledger] = Ledger,
        lanes: list[Lane] = LANES,
        make: type[Limiter] = Limiter,
    ) -> None:
        self.loop = loop
        self.store = store
        self.capacity = kind(loop, store)
        self.lanes = Lanes(lanes)
        self.pace = Pace()
        self.observer = Observer()
        self.sick: set[str] = set()
        self.probe_at = inf
        self.limiter = make(
            self.lanes,
            self.capacity,
            loop,
            lambda name: name not in self.sick,
            self.pace,
            self.observer,
            lambda _: self.probe_at,
            frozenset("z"),
        )
        self.running = asyncio.ensure_future(self.limiter.run())
        self.tickets = 0
        self.order: list[str] = []

    def send(self, names: str = "a", exchange: FakeExchange | None = None, **changes: Any) -> asyncio.Task[Grant]:
        """A request's wait for a permit, as a task. `order` tells who was granted, in order."""
        self.tickets += 1
        one = asking(self.loop, f"t{self.tickets}", **changes)
        return asyncio.ensure_future(self._acquire(one, wants(one, names, self.store), exchange or FakeExchange()))

    async def _acquire(self, one: Request, what: Wants, exchange: FakeExchange) -> Grant:
        grant = await self.limiter.acquire(one, what, exchange.hold)
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
    """At each upstream a slot, and tokens of its own model where the store counts them."""
    prices = {}
    for name in names:
        tokens = f"upstream/{name}/{one.model}/total"
        price = [Claim(f"upstream/{name}/slots", 1.0)]
        price += [Claim(tokens, float(one.size.total))] if tokens in store else []
        prices[name] = tuple(price)
    return Wants(tuple(names), prices)


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
        grant = bench.limiter._grant

        def grant_and_cancel(head: Waiter, option: Option) -> None:
            grant(head, option)
            if head.request.ticket == "t1":
                first.cancel()
                for turn in range(again):
                    loop.call_later(turn * 0.001, first.cancel)

        bench.limiter._grant = grant_and_cancel  # type: ignore[method-assign]
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


def test_the_time_told_to_a_refused_client_is_when_it_would_get_its_turn() -> None:
    """Half the lane's wait before its predicted turn, at least a second; with every breaker open, when one is tried."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(loop, slots(a=(9, 0)) | {"upstream/a/m/total": bucket(loop, 10, 1000)})
        one = asking(loop, "x", size=Size(300, 100))
        what = wants(one, "a", bench.store)
        assert bench.limiter.predicted_s(one, what) == pytest.approx(40)
        assert bench.limiter.retry_after_s(one, what) == pytest.approx(25)
        small = asking(loop, "y", size=Size(3, 2))
        assert bench.limiter.retry_after_s(small, wants(small, "a", bench.store)) == 1
        bench.sick, bench.probe_at = {"a"}, loop.time() + 12
        assert bench.limiter.predicted_s(one, what) == inf
        assert bench.limiter.retry_after_s(one, what) == pytest.approx(12)
        await bench.stop()

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
            assert bench.limiter.predicted_s(one, wants(one, names, store)) == pytest.approx(predicted)
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
    """Compares every pass of immediate capacity with the whole line asked one by one, and keeps who was granted."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.granted: Counter[str] = Counter()
        self.on_grant: Callable[[Request], None] = lambda _: None
        self._latest: dict[str, str] = {}

    def line(self) -> list[Ask]:
        """Everybody in line, best claim first."""
        waiters = sorted(self.lanes.waiters(), key=lambda w: (self.lanes.rules[w.request.lane].rank, w.seq))
        return [Ask(waiter.request.ticket, self._options(waiter)) for waiter in waiters]

    def would_go(self) -> dict[str, str]:
        """Who could be granted now, and where, if everybody in line were asked in order."""
        line = self.line()
        store = {key: copy(counter) for key, counter in self._capacity.levels().items()}
        answers = answer(store, line, self._clock.time())
        return {ask.ticket: a.option.name for ask, a in zip(line, answers, strict=True) if a.option is not None}

    async def _pass(self) -> None:
        if not self._capacity.immediate:
            return await super()._pass()
        expected = {} if self.draining else self.would_go()
        self._latest = {}
        await super()._pass()
        assert self._latest == expected
        return None

    def _grant(self, head: Waiter, option: Option) -> None:
        super()._grant(head, option)
        self.granted[head.request.ticket] += 1
        self._latest[head.request.ticket] = option.name
        if self._capacity.immediate:
            assert not self.draining
            assert self._allows(option.name)
        self.on_grant(head.request)


class Race:
    """One random schedule: clients come, wait, leave, are cancelled; breakers move; capacity returns; maybe a drain."""

    def __init__(self, loop: VirtualLoop, seed: int, kind: type[Ledger]) -> None:
        self.loop = loop
        self.rng = rng = random.Random(seed)
        self.names = "abc"[: rng.randint(1, 3)]
        lanes = []
        for rank in range(rng.randint(1, 3)):
            when_busy, spill_after_s, most = (
                rng.choice(list(WhenBusy)),
                rng.choice([0.0, 0.2, 3.0]),
                rng.choice([3, 50]),
            )
            lanes.append(Lane(f"P{rank}", rank, 10, when_busy, spill_after_s, most, 10**5, 300))
        self.bench = Bench(loop, self._store(), kind, lanes, Watched)
        assert isinstance(self.bench.limiter, Watched)
        self.limiter, self.capacity = self.bench.limiter, self.bench.capacity
        if isinstance(self.capacity, Suspending):
            self.capacity._rng = rng
            self.capacity.on_call = lambda: self._maybe_cancel(0.02)
        self.limiter.on_grant = self._on_grant
        self.clients: dict[str, asyncio.Task[None]] = {}
        self.kept: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.slack_s = 0.0 if self.capacity.immediate else 0.2

    def _store(self) -> Store:
        rng, store = self.rng, {}
        for name in self.names:
            if rng.random() < 0.8:
                store[f"upstream/{name}/slots"] = Slots(rng.randint(1, 3))
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
        helpers = [asyncio.ensure_future(work) for work in (self._breakers(), self._canceller(), self._auditor())]
        if rng.random() < 0.2:
            helpers.append(asyncio.ensure_future(self._drain()))
        await asyncio.gather(*self.clients.values(), return_exceptions=True)
        for helper in helpers:
            helper.cancel()
        done = await asyncio.gather(*helpers, return_exceptions=True)
        await asyncio.sleep(1)  # for what shielded returns are still on their way
        await self._check(done)

    async def _client(self, ticket: str) -> None:
        rng, loop = self.rng, self.loop
        await asyncio.sleep(rng.choice([0.0, 0.5, rng.uniform(0, 3)]))
        lanes = list(self.bench.lanes.rules)
        one = request(
            ticket=ticket,
            lane=rng.choice(lanes),
            model=rng.choice("mn"),
            size=Size(rng.choice([5, 50, 300]), rng.choice([5, 200])),
            bytes=rng.choice([1, 90]),
            arrived=loop.time(),
            wait_until=loop.time() + rng.choice([0.0, 0.5, 3.0, 10.0]),
        )
        names = "".join(rng.sample(self.names, rng.randint(1, len(self.names))))
        what = wants(one, names, self.bench.store)
        exchange = FakeExchange(
            stays_s=rng.choice([0.0, 0.5, 1.0, rng.uniform(0, 2)]),
            hold_s=rng.choice([0.0, 0.0, 0.01, 1.0]),
            leaves_when_held=rng.random() < 0.1,
        )
        end, grant = "cancelled", None
        try:
            grant = await self.limiter.acquire(one, what, exchange.hold)
            end = grant.upstream
        except Rejected as refused:
            end = refused.reason
            assert not self.limiter.granted[ticket]
            assert self.limiter.draining or end is not Reason.DRAINING
        except Gone:
            end = "gone"
        finally:
            self.ends[end] += 1
            if end != "cancelled":
                assert loop.time() <= one.wait_until + self.slack_s + 1e-6
        if grant is not None:
            await self._fly(what.prices[grant.upstream], exchange)

    async def _fly(self, taken: tuple[Claim, ...], exchange: FakeExchange) -> None:
        back = []
        for claim in taken:
            used = 0.0 if claim.key.endswith("/slots") else claim.amount * self.rng.choice([0.2, 1.0, 1.3])
            self.kept[claim.key] += used
            back.append(Change(claim.key, claim.amount - used))
        try:
            await exchange.ended()
        finally:
            await asyncio.shield(self._land(back))

    async def _land(self, back: list[Change]) -> None:
        await self.capacity.change(back)
        self.limiter.kick()

    def _on_grant(self, one: Request) -> None:
        if self.rng.random() < 0.1:
            self._cancel(one.ticket)

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
            self.bench.sick ^= {self.rng.choice(self.names)}
            self.bench.probe_at = self.loop.time() + self.rng.choice([0.5, 20.0])
            self.limiter.kick()

    async def _drain(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, 3))
        self.limiter.drain()

    async def _auditor(self) -> None:
        """Whoever could go at every one of many looks in a row has been forgotten."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.05, 0.5))
            forgotten = None
            for _ in range(3 if self.capacity.immediate else 12):
                ready = set(self.limiter.would_go())
                forgotten = ready if forgotten is None else forgotten & ready
                await asyncio.sleep(2 * TICK_S if self.capacity.immediate else 0.02)
            assert self.limiter.draining or not forgotten
            for counter in self.bench.store.values():
                assert not isinstance(counter, Slots) or counter.used <= counter.limit

    async def _check(self, helpers: list[Any]) -> None:
        bench = self.bench
        for helper in helpers:
            assert helper is None or isinstance(helper, asyncio.CancelledError), helper
        for task in self.clients.values():
            assert task.cancelled() or task.exception() is None, task.exception()
        assert not bench.running.done()
        assert len(bench.lanes) == 0
        assert bench.lanes.heads(99) == list(bench.lanes.waiters()) == []
        assert not any(b.tokens or b.input or b.bytes for b in bench.lanes.backlogs.values())
        assert all(count == 1 for count in self.limiter.granted.values())
        assert self.capacity.held() == {key: round(v, 6) for key, v in self.kept.items() if round(v, 6)}
        assert all(not isinstance(c, Slots) or c.used == 0 for c in bench.store.values())
        assert not isinstance(self.capacity, Suspending) or not self.capacity.broken_off
        assert self.capacity.takes <= 25 * len(self.clients) + 40
        own = self.limiter._timer
        assert [timer for timer in self.loop.timers() if timer is not own] == []
        await bench.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}


ROUNDS, SEEDS_PER_ROUND = 20, 100


@pytest.mark.parametrize("rounds", range(ROUNDS))
def test_random_schedules_keep_every_promise(kind: type[Ledger], rounds: int) -> None:
    """2,000 schedules for each kind of capacity; the seed of one that fails is told.

    In the end: everything is back, nobody was granted twice, every wait ended in time, the lanes are empty, no timer is
    left. On the way: each pass grants what asking the whole line one by one would (so first come first served, better
    lanes first, nobody waits while a fitting upstream idles), nobody who could go is forgotten, calls are few.
    """
    for seed in range(rounds * SEEDS_PER_ROUND, (rounds + 1) * SEEDS_PER_ROUND):
        try:
            play(lambda loop, seed=seed: Race(loop, seed, kind).run())
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
