"""The limiter under an operator's hands: lanes that are paused, upstreams that are taken out, everybody let go."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from extproc.core.bucket import Slots
from extproc.core.events import Observed, Queued, Waited
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Size
from tests.doubles import FakeExchange, Ledger, VirtualLoop, play
from tests.test_limiter import KINDS, Bench, bucket, reason_of, slots

SCHEDULES = int(os.environ.get("TIDEGATE_SCHEDULES", "20"))


@pytest.fixture(params=KINDS, ids=["memory", "suspending"])
def kind(request: pytest.FixtureRequest) -> type[Ledger]:
    """Capacity that answers at once, and capacity that suspends."""
    return request.param


class Hands(Bench):
    """A limiter whose upstreams can be taken out, by name and until when."""

    def __init__(self, loop: VirtualLoop, *args: Any, **rules: Any) -> None:
        self.out: dict[str, float] = {}
        super().__init__(loop, *args, out=self.out, **rules)
        self.sick = _Sick(self.out)  # type: ignore[assignment]

    def _earliest_probe(self, names: tuple[str, ...]) -> float:
        return min((self.out.get(name, inf) for name in names), default=inf)

    def take_out(self, name: str, until: float = inf) -> None:
        self.out[name] = until
        self.limiter.look_around()

    def put_back(self, name: str) -> None:
        del self.out[name]
        self.limiter.kick()


class _Sick(set[str]):
    """Whoever is out lets nobody through, either."""

    def __init__(self, out: dict[str, float]) -> None:
        super().__init__()
        self._out = out

    def __contains__(self, name: object) -> bool:
        return name in self._out or super().__contains__(name)


def test_nobody_of_a_paused_lane_goes_and_others_are_not_held_up(kind: type[Ledger]) -> None:
    """Newcomers to it are told that they wait; `resume` lets them go at once, the first come first."""

    async def scenario(loop: VirtualLoop) -> None:
        bench, exchange = Hands(loop, slots(a=(2, 0)), kind), FakeExchange()
        bench.limiter.pause("P0")
        held = [bench.send(exchange=exchange, lane="P0") for _ in range(3)]
        await asyncio.sleep(1)
        assert not any(task.done() for task in held)
        assert exchange.holds
        assert await bench.send() == await bench.send()
        await bench.free("upstream/a/slots")
        await bench.free("upstream/a/slots")
        await asyncio.sleep(1)
        assert not any(task.done() for task in held), "whatever comes free"
        assert [event.binding for event in bench.observer.of(Queued)] == [("lane/P0/paused",)] * 3
        bench.limiter.resume("P0")
        bench.limiter.resume("P0")
        await asyncio.sleep(0.1)
        assert [task.done() for task in held] == [True, True, False]
        await bench.free("upstream/a/slots")
        await asyncio.gather(*held)
        await bench.stop()

    play(scenario)


def test_where_the_end_of_a_pause_is_known_who_cannot_wait_for_it_is_refused_and_told(kind: type[Ledger]) -> None:
    """Retry-After is the end of the pause; where nobody knows it, everybody waits as long as it may."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Hands(loop, slots(a=(2, 0)), kind)
        bench.limiter.pause("P1", loop.time() + 20)
        patient = bench.send()
        with pytest.raises(Rejected) as refused:
            await bench.send(waits_s=10)
        assert refused.value.reason is Reason.DEADLINE_UNMEETABLE
        assert refused.value.retry_after == pytest.approx(20 - 0.35 * 10, abs=1)
        await asyncio.sleep(1)
        bench.limiter.pause("P1")
        late = bench.send(waits_s=10)
        assert await reason_of(late) is Reason.QUEUE_TIMEOUT
        assert loop.time() == pytest.approx(1011, abs=0.1)
        bench.limiter.resume("P1")
        assert (await patient).predicted_s == pytest.approx(20, abs=0.1)
        await bench.stop()

    play(scenario)


def test_what_a_paused_lane_was_owed_goes_to_others(kind: type[Ledger]) -> None:
    """Its share of the slots is not kept for it, though it waits and has just asked."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Hands(loop, slots(a=(4, 4)), kind)
        low = [bench.send(lane="P2") for _ in range(4)]
        for _ in range(8):
            task = bench.send(lane="P1")
            await asyncio.sleep(0.1)
            await bench.free("upstream/a/slots")
            await asyncio.sleep(0.1)
            task.cancel()
        bench.limiter.pause("P2")
        await bench.limiter.disown("P2")
        assert all(not counter.owed(loop.time()) for counter in bench.capacity.levels().values())  # type: ignore[union-attr]
        done = sum(task.done() for task in low)
        for _ in range(4):
            task = bench.send(lane="P1")
            await asyncio.sleep(0.01)
            await bench.free("upstream/a/slots")
            await asyncio.sleep(0.01)
            assert task.done()
        assert sum(task.done() for task in low) == done
        for task in low:
            task.cancel()
        await asyncio.gather(*low, return_exceptions=True)
        await bench.stop()

    play(scenario)


def test_what_is_taken_out_gets_nobody_and_who_waits_goes_elsewhere(kind: type[Ledger]) -> None:
    """At once; who could go only there is refused, and told the end where there is one."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Hands(loop, slots(a=(1, 1), b=(9, 0)), kind)
        waits, alone = bench.send("ab", lane="P2"), bench.send("a")
        await asyncio.sleep(1)
        assert not waits.done()
        bench.take_out("a")
        assert (await waits).upstream == "b"
        with pytest.raises(Rejected) as refused:
            await alone
        assert (refused.value.reason, refused.value.retry_after) == (Reason.NO_UPSTREAM, None)
        assert (await bench.send("ab")).upstream == "b"
        with pytest.raises(Rejected) as refused:
            await bench.send("a")
        assert (refused.value.reason, refused.value.retry_after) == (Reason.NO_UPSTREAM, None)
        bench.take_out("a", loop.time() + 100)
        with pytest.raises(Rejected) as refused:
            await bench.send("a")
        assert refused.value.retry_after == pytest.approx(100, abs=1)
        bench.take_out("a", loop.time() + 5)
        within = bench.send("a")
        await bench.free("upstream/a/slots")
        await asyncio.sleep(4.9)
        assert not within.done()
        await asyncio.sleep(0.1)
        bench.put_back("a")
        assert await within == await within
        await bench.stop()

    play(scenario)


def test_what_is_owned_serves_nobody_either_while_it_is_out(kind: type[Ledger]) -> None:
    """Also not those who were left with it alone: they go back to what they wanted, or are refused."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Hands(loop, slots(a=(1, 0), z=(1, 1)), kind)
        bench.sick |= {"a", "z"}
        left = bench.send("az")
        assert (await bench.send("az", observed=True)).upstream == "z"
        await asyncio.sleep(1)
        assert not left.done()
        bench.sick -= {"a"}
        bench.take_out("z")
        await bench.free("upstream/a/slots")
        assert (await left).upstream == "a"
        bench.take_out("a")
        for more in ({}, {"observed": True}):
            assert await reason_of(bench.send("az", **more)) is Reason.NO_UPSTREAM
        await bench.stop()

    play(scenario)


def test_in_a_bypass_everybody_goes_whoever_waits_included(kind: type[Ledger], monkeypatch: pytest.MonkeyPatch) -> None:
    """Into debt, to the first that lets it, also of a paused lane; afterwards the counters tell the truth."""
    monkeypatch.setattr("extproc.limiter.AT_ONCE", 50)

    async def scenario(loop: VirtualLoop) -> None:
        store = slots(a=(1, 1), b=(1, 0)) | {"upstream/a/m/total": bucket(loop, 10_000, 10**6)}
        bench = Hands(loop, store, kind)
        bench.limiter.pause("P0")
        lined = [bench.send(lane=lane) for lane in ("P0", "P1", "P2") for _ in range(90)]
        await asyncio.sleep(1)
        assert not any(task.done() for task in lined)
        cancelled = lined.pop()
        cancelled.cancel()
        bench.limiter.bypass()
        since = loop.time()
        assert {grant.upstream for grant in await asyncio.gather(*lined)} == {"a"}
        assert loop.time() - since < 0.1
        newcomer = await bench.send("ab")
        assert not newcomer.waited
        bench.sick.add("a")
        assert (await bench.send("ab")).upstream == "b", "whose breaker is closed comes first"
        assert (await bench.send("a")).upstream == "a", "but nobody is refused for want of one"
        bench.take_out("a")
        assert (await bench.send("ab")).upstream == "b"
        assert await reason_of(bench.send("a")) is Reason.NO_UPSTREAM
        went = len(lined) + 2
        held = bench.capacity.levels()["upstream/a/slots"]
        assert isinstance(held, Slots)
        assert held.used == went + 1
        assert bench.capacity.levels()["upstream/a/m/total"].level_at(loop.time()) == pytest.approx(  # type: ignore[union-attr]
            10_000 * (loop.time() - 1000) - 100 * went, abs=1
        )
        bench.put_back("a")
        bench.sick.clear()
        bench.limiter.no_bypass()
        assert not bench.observer.of(Observed)
        assert await reason_of(bench.send("a", waits_s=5)) is Reason.QUEUE_TIMEOUT
        await bench.stop()

    play(scenario)


def test_whether_a_bypass_let_it_go_is_known_by_who_was_let_go(kind: type[Ledger]) -> None:
    """It was so when it was let go, whatever is moved before it notices."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Hands(loop, slots(a=(1, 1)), kind)

        def then(move: Callable[[], None]) -> None:
            """Once somebody who waited goes, before it goes on."""
            bench.limiter._observe = lambda event: move() if isinstance(event, Waited) else None

        waits = bench.send()
        await asyncio.sleep(1)
        then(bench.limiter.no_bypass)
        bench.limiter.bypass()
        assert (await waits).bypassed
        assert not bench.limiter.bypassing
        waits = bench.send()
        await asyncio.sleep(1)
        then(bench.limiter.bypass)
        await bench.free("upstream/a/slots", 2)
        assert not (await waits).bypassed
        assert bench.limiter.bypassing
        change = bench.capacity.change

        async def changed(changes: Any) -> None:
            bench.limiter.no_bypass()
            await change(changes)

        bench.capacity.change = changed  # type: ignore[method-assign]
        assert (await bench.send()).bypassed
        assert not bench.limiter.bypassing
        await bench.free("upstream/a/slots", 2)
        assert not (await bench.send()).bypassed
        await bench.stop()

    play(scenario)


def test_who_leaves_while_it_is_let_go_gives_back(kind: type[Ledger]) -> None:
    """A newcomer, or one in line, cancelled at any moment of a bypass: nothing stays taken."""

    async def scenario(loop: VirtualLoop) -> None:
        rng = random.Random(7)
        bench = Hands(loop, slots(a=(1, 1)), kind)
        for _ in range(60):
            tasks = [bench.send() for _ in range(5)]
            await asyncio.sleep(rng.uniform(0, 0.01))
            bench.limiter.bypass()
            tasks += [bench.send() for _ in range(5)]
            await asyncio.sleep(rng.uniform(0, 0.006))
            for task in tasks:
                task.cancel()
            got = [
                one
                for one in await asyncio.gather(*tasks, return_exceptions=True)
                if not isinstance(one, BaseException)
            ]
            await asyncio.sleep(0.1)
            for _ in got:
                await bench.free("upstream/a/slots")
            bench.limiter.no_bypass()
            await asyncio.sleep(0.1)
            assert bench.capacity.held() == {}
        await bench.stop()

    play(scenario)


def test_in_a_drain_a_bypass_lets_nobody_go_and_who_comes_after_it_is_let_in(kind: type[Ledger]) -> None:
    """Draining comes before all else, and can be taken back: who was refused is refused, who comes next is not."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Hands(loop, slots(a=(1, 1)), kind)
        waits = bench.send()
        await asyncio.sleep(1)
        bench.limiter.drain()
        bench.limiter.bypass()
        assert await reason_of(waits) is Reason.DRAINING
        assert await reason_of(bench.send()) is Reason.DRAINING
        bench.limiter.no_bypass()
        bench.limiter.undrain()
        again = bench.send()
        await asyncio.sleep(1)
        assert not again.done()
        await bench.free("upstream/a/slots")
        assert (await again).waited
        await bench.stop()

    play(scenario)


class Schedule:
    """Callers that come, wait and leave, and what is moved by hand meanwhile, all by chance."""

    def __init__(self, loop: VirtualLoop, kind: type[Ledger], rng: random.Random) -> None:
        self.loop, self.rng = loop, rng
        self.bench = Hands(loop, slots(a=(2, 0), b=(1, 0), z=(1, 0)), kind, owned=frozenset("z"))
        limiter = self.bench.limiter
        self.moves: list[Callable[[], Any]] = [
            lambda: limiter.pause(self.lane(), loop.time() + rng.choice([0.5, 3.0, inf])),
            lambda: limiter.resume(self.lane()),
            lambda: self.bench.take_out(rng.choice("abz"), loop.time() + rng.choice([1.0, inf])),
            lambda: [self.bench.put_back(name) for name in list(self.bench.out)],
            limiter.bypass,
            limiter.no_bypass,
            limiter.drain,
            limiter.undrain,
        ]

    def lane(self) -> str:
        return self.rng.choice(["P0", "P1", "P2"])

    async def caller(self) -> None:
        rng, names = self.rng, self.rng.choice(["a", "ab", "ba", "abz", "z"])
        how = {"observed": rng.random() < 0.1, "tenant": rng.choice("xy"), "waits_s": rng.uniform(0.1, 9)}
        task = self.bench.send(names, size=Size(rng.randrange(1, 90), 10), lane=self.lane(), **how)
        if rng.random() < 0.3:
            self.loop.call_later(rng.uniform(0, 3), task.cancel)
        try:
            grant = await task
        except (Rejected, asyncio.CancelledError):
            return
        await asyncio.sleep(rng.uniform(0, 2))
        await self.bench.free(f"upstream/{grant.upstream}/slots")

    async def run(self) -> list[asyncio.Task[None]]:
        callers = []
        for _ in range(120):
            await asyncio.sleep(self.rng.expovariate(12))
            callers.append(asyncio.ensure_future(self.caller()))
            if self.rng.random() < 0.3:
                self.rng.choice(self.moves)()
            if self.rng.random() < 0.1:
                await self.bench.limiter.disown(self.lane())
        return callers

    def undo(self) -> None:
        for name in list(self.bench.out):
            self.bench.put_back(name)
        for lane in ("P0", "P1", "P2"):
            self.bench.limiter.resume(lane)
        self.bench.limiter.no_bypass()
        self.bench.limiter.undrain()


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_random_hands(kind: type[Ledger], seed: int) -> None:
    """In the end all is undone: everybody has gone, and nothing is held."""

    async def scenario(loop: VirtualLoop) -> None:
        schedule = Schedule(loop, kind, random.Random(f"{seed}/{kind.__name__}"))
        callers, bench = await schedule.run(), schedule.bench
        schedule.undo()
        callers.append(asyncio.ensure_future(schedule.caller()))
        await asyncio.sleep(6)
        assert list(bench.lanes.waiters()) == [], "nothing is held by hand, and everything has come back"
        await asyncio.gather(*callers)
        await asyncio.sleep(1)
        assert bench.capacity.held() == {}
        assert getattr(bench.capacity, "broken_off", 0) == 0
        await bench.stop()

    play(scenario)
