"""What every implementation of ports.Capacity must do, whatever is behind it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from math import inf

import pytest

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget, Period
from extproc.core.capacity import (
    Ask,
    Change,
    Claim,
    Declare,
    Forget,
    Gauge,
    Level,
    Option,
    Pause,
    Resize,
    Seats,
    Store,
)
from extproc.core.policy import KvRules
from extproc.core.shares import LAPSE_S, PLAIN, Terms
from extproc.core.watermark import Reading, Watermark
from extproc.ports import Capacity, Clock
from extproc.shared.memory import MemoryCapacity
from tests.doubles import Suspending, VirtualLoop, play

Make = Callable[[Clock, Store], Capacity]


@pytest.fixture(params=[MemoryCapacity, Suspending])
def make(request: pytest.FixtureRequest) -> Make:
    """One implementation after the other; a new one is added here."""
    return request.param


P0, P2 = Terms("P0", 0), Terms("P2", 2, share=0.25)


def ask(*claims: tuple[str, float], followed: bool = False, terms: Terms = PLAIN) -> Ask:
    return Ask("t", (Option("x", tuple(Claim(*claim) for claim in claims)),), followed, terms)


async def granted(capacity: Capacity, *asks: Ask) -> list[bool]:
    return [answer.option is not None for answer in await capacity.take(asks)]


def test_a_batch_is_answered_in_order_one_answer_each(make: Make) -> None:
    """As many answers as asks, each with the option that was taken or when to ask again."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity = make(loop, {"s": Slots(1), "b": TokenBucket(10, 100, 40, loop.time())})
        answers = await capacity.take([ask(("s", 1)), ask(("s", 1)), ask(("b", 30)), ask(("b", 30)), ask()])
        assert [a.option is not None for a in answers] == [True, False, True, False, True]
        assert (answers[1].retry_after, answers[1].short) == (inf, ("s",))
        assert answers[3].retry_after == pytest.approx(2, abs=0.1)
        assert await capacity.take([]) == []

    play(scenario)


def test_an_option_is_taken_whole_or_not_at_all(make: Make) -> None:
    """What is refused leaves no trace, and is closed to the rest of its batch but not to the next."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity = make(loop, {"s": Slots(1), "full": Slots(1, 1.0)})
        both, one = ask(("s", 1), ("full", 1)), ask(("s", 1))
        assert [a.option is not None for a in await capacity.take([both, one])] == [False, True]
        await capacity.change([Change("s", 1), Change("full", 1)])
        assert [a.option is not None for a in await capacity.take([both])] == [True]

    play(scenario)


def test_a_batch_ends_behind_a_followed_grant(make: Make) -> None:
    """Later asks of the batch are to be asked again at once."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity = make(loop, {"s": Slots(9)})
        answers = await capacity.take([ask(("s", 1)), ask(("s", 1), followed=True), ask(("s", 1)), ask()])
        assert [a.option is not None for a in answers] == [True, True, False, False]
        assert [a.retry_after for a in answers[2:]] == [0, 0]

    play(scenario)


def test_concurrent_callers_never_share_what_is_there_once(make: Make) -> None:
    """Twenty callers, seven slots: seven get one; a pair of keys is never split between two callers."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity = make(loop, {"s": Slots(7), "left": Slots(1), "right": Slots(1)})
        singles = await asyncio.gather(*(capacity.take([ask(("s", 1))]) for _ in range(20)))
        assert sum(answer.option is not None for [answer] in singles) == 7
        pairs = [(("left", 1.0), ("right", 1.0)), (("right", 1.0), ("left", 1.0))]
        doubles = await asyncio.gather(*(capacity.take([ask(*pairs[i % 2])]) for i in range(20)))
        assert sum(answer.option is not None for [answer] in doubles) == 1

    play(scenario)


def test_a_change_is_never_refused(make: Make) -> None:
    """It charges into debt, releases, holds beyond the limit, and ignores keys that nobody declared."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity = make(loop, {"s": Slots(1), "b": TokenBucket(10, 100, 40, loop.time())})
        await capacity.change([Change("b", -140), Change("s", -1), Change("s", -1), Change("?", 5), Change("?", -5)])
        bucket, slots = capacity.levels()["b"], capacity.levels()["s"]
        assert isinstance(bucket, TokenBucket)
        assert isinstance(slots, Slots)
        assert bucket.level_at(loop.time()) == pytest.approx(-100, abs=1)
        assert slots.used == 2
        assert "?" not in capacity.levels()
        await capacity.change([])

    play(scenario)


def test_keys_nobody_declared_are_unlimited(make: Make) -> None:
    """A claim on one is always met."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity = make(loop, {})
        [answer] = await capacity.take([ask(("?", 1e12))])
        assert answer.option is not None

    play(scenario)


def test_asking_again_after_the_time_told_helps(make: Make) -> None:
    """If nobody else takes anything meanwhile."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity = make(loop, {"b": TokenBucket(10, 100, 0, loop.time())})
        [refused] = await capacity.take([ask(("b", 50))])
        await asyncio.sleep(refused.retry_after)
        [answer] = await capacity.take([ask(("b", 50))])
        assert answer.option is not None

    play(scenario)


def test_immediate_means_that_a_call_never_suspends(make: Make) -> None:
    """Only then may a caller rely on not being cancelled in the middle of one."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity = make(loop, {"s": Slots(100)})
        suspended = 0
        for call in [capacity.take([ask(("s", 1))]) for _ in range(20)] + [capacity.change([Change("s", 1)])]:
            task = asyncio.ensure_future(call)
            await asyncio.sleep(0)
            suspended += not task.done()
            await task
        assert (suspended == 0) == capacity.immediate

    play(scenario)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_callers_do_what_they_return_is_there_again(make: Make, seed: int) -> None:
    """Takes and returns in any order and at the same time: never more are held than there are, in the end none."""

    async def scenario(loop: VirtualLoop) -> None:
        rng = random.Random(seed)
        store: Store = {key: Slots(rng.randint(1, 3)) for key in "abc"}
        capacity = make(loop, store)

        async def caller() -> None:
            for _ in range(rng.randint(1, 5)):
                keys = rng.sample("abc", rng.randint(1, 3))
                [answer] = await capacity.take([ask(*((key, 1.0) for key in keys))])
                await asyncio.sleep(rng.random())
                assert all(
                    slots.used <= slots.limit for slots in capacity.levels().values() if isinstance(slots, Slots)
                )
                if answer.option is not None:
                    await capacity.change([Change(claim.key, claim.amount) for claim in answer.option.claims])

        await asyncio.gather(*(caller() for _ in range(10)))
        assert [slots.used for slots in capacity.levels().values() if isinstance(slots, Slots)] == [0, 0, 0]

    play(scenario)


def test_counters_are_declared_and_forgotten_in_use(make: Make) -> None:
    """A key counts from its declaration on, once; forgotten it is unlimited again."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity = make(loop, {})
        await capacity.tune([Declare("s", Slots(1)), Declare("s", Slots(9)), Forget("?")])
        assert await granted(capacity, ask(("s", 1)), ask(("s", 1))) == [True, False]
        await capacity.tune([Declare("s", Slots(9))])
        assert await granted(capacity, ask(("s", 1))) == [False]
        await capacity.tune([Forget("s")])
        assert await granted(capacity, ask(("s", 1)), ask(("s", 1))) == [True, True]
        assert "s" not in capacity.levels()
        await capacity.tune([])

    play(scenario)


def test_a_bucket_follows_a_new_rate_size_and_level(make: Make) -> None:
    """What is in it stays as far as it fits, unless it is known better."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity = make(loop, {"b": TokenBucket(0, 100, 80, loop.time())})
        await capacity.tune([Resize("b", 0, 50), Resize("b", 0, 200)])
        assert await granted(capacity, ask(("b", 51)), ask(("?", 1))) == [False, True]
        await capacity.tune([Level("b", most=30), Level("b", least=20)])
        assert await granted(capacity, ask(("b", 31))) == [False]
        assert await granted(capacity, ask(("b", 30))) == [True]
        await capacity.tune([Level("b", least=20), Resize("b", 10, 200)])
        [answer] = await capacity.take([ask(("b", 30))])
        assert answer.retry_after == pytest.approx(1, abs=0.1)
        bucket = capacity.levels()["b"]
        assert isinstance(bucket, TokenBucket)
        assert (bucket.rate, bucket.capacity) == (10, 200)

    play(scenario)


def test_slots_and_budgets_follow_a_new_limit(make: Make) -> None:
    """What is held stays held, what was used stays used."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity = make(loop, {"s": Slots(3), "usd": Budget(5.0, at=loop.time())})
        assert await granted(capacity, *[ask(("s", 1), ("usd", 2))] * 2) == [True, True]
        await capacity.tune([Seats("s", 2), Seats("usd", 7)])
        assert await granted(capacity, ask(("s", 1)), ask(("usd", 3))) == [False, True]
        await capacity.change([Change("s", 1)])
        await capacity.tune([Seats("s", inf)])
        assert await granted(capacity, *[ask(("s", 1))] * 50) == [True] * 50

    play(scenario)


def test_nothing_is_taken_in_a_pause(make: Make) -> None:
    """Of any kind of counter; asking again when it ends helps; of two pauses the later end holds."""

    async def scenario(loop: VirtualLoop) -> None:
        store: Store = {
            "s": Slots(9),
            "b": TokenBucket(10, 100, 100, loop.time()),
            "usd": Budget(9.0, at=loop.time()),
            "kv": Watermark(KvRules()),
        }
        keys = list(store)
        capacity = make(loop, store)
        await capacity.tune([Pause(key, seconds) for key in keys for seconds in (3, 30, 5)])
        answers = [(await capacity.take([ask((key, 1))]))[0] for key in keys]
        assert all(answer.option is None for answer in answers)
        assert [answer.retry_after for answer in answers] == pytest.approx([30] * 4, abs=0.5)
        await asyncio.sleep(30)
        assert await granted(capacity, *(ask((key, 1)) for key in keys)) == [True] * 4

    play(scenario)


def test_tunings_of_what_is_not_counted_or_counts_otherwise_are_ignored(make: Make) -> None:
    """Whoever learned of a limit need not know what is counted here."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity = make(loop, {"s": Slots(1)})
        keys = ("?", "s")
        await capacity.tune([t for key in keys for t in (Resize(key, 1, 1), Level(key, 0, 0), Gauge(key, None))])
        await capacity.tune([Seats("?", 0), Pause("?", 9)])
        assert set(capacity.levels()) == {"s"}
        assert await granted(capacity, ask(("?", 1)), ask(("s", 1))) == [True, True]

    play(scenario)


def test_a_budget_is_whole_again_when_its_period_begins(make: Make) -> None:
    """And whoever did not fit is told when; what will never fit is told so."""

    async def scenario(loop: VirtualLoop) -> None:
        now = loop.time()
        capacity = make(loop, {"usd": Budget(5.0, Period.HOUR, epoch_offset=-now, at=now)})
        assert await granted(capacity, ask(("usd", 3)), ask(("usd", 2))) == [True, True]
        too_much, never = [(await capacity.take([ask(("usd", amount))]))[0] for amount in (1, 6)]
        assert (too_much.retry_after, never.retry_after) == (pytest.approx(3600, abs=0.5), inf)
        await asyncio.sleep(too_much.retry_after)
        assert await granted(capacity, ask(("usd", 5))) == [True]

    play(scenario)


def test_a_limit_in_shadow_mode_only_names_itself(make: Make) -> None:
    """What it would have refused goes, and is counted."""

    async def scenario(loop: VirtualLoop) -> None:
        store: Store = {"s": Slots(1, shadow=True), "b": TokenBucket(10, 100, 100, loop.time(), shadow=True)}
        capacity = make(loop, store)
        first, second = await capacity.take([ask(("s", 1), ("b", 100))] * 2)
        assert (first.option is not None, first.shadowed) == (True, ())
        assert (second.option is not None, set(second.shadowed)) == (True, {"s", "b"})
        slots = capacity.levels()["s"]
        assert isinstance(slots, Slots)
        assert slots.used == 2

    play(scenario)


def test_a_share_of_a_bucket_is_had_beside_an_endless_better_lane(make: Make) -> None:
    """A quarter of what flows in goes to the lane that has a quarter, everything else to the better one."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity, until = make(loop, {"b": TokenBucket(10, 100, 0, loop.time())}), loop.time() + 400
        got = [0.0, 0.0]
        while loop.time() < until:
            answers = await capacity.take(
                [ask(("b", 40), followed=True, terms=P0), ask(("b", 40), followed=True, terms=P2)]
            )
            for i, answer in enumerate(answers):
                got[i] += 40 if answer.option else 0
            await asyncio.sleep(max(0.01, min(answer.retry_after for answer in answers)))
        assert got == pytest.approx([3000, 1000], abs=120)

    play(scenario)


def test_a_share_of_slots_is_had_in_turns(make: Make) -> None:
    """Of four that are given, the lane that has a quarter gets one."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity, got = make(loop, {"s": Slots(1)}), [0, 0]
        for _ in range(200):
            for i, had in enumerate(await granted(capacity, ask(("s", 1), terms=P0), ask(("s", 1), terms=P2))):
                got[i] += had
            assert await granted(capacity, ask(("s", 1), terms=P0), ask(("s", 1), terms=P2)) == [False, False]
            await asyncio.sleep(0.5)
            await capacity.change([Change("s", 1)])
        assert got == pytest.approx([150, 50], abs=2)

    play(scenario)


def test_a_lane_that_does_not_ask_any_more_keeps_nothing(make: Make) -> None:
    """What it was owed is everybody's again."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity = make(loop, {"b": TokenBucket(10, 100, 0, loop.time())})
        for _ in range(10):
            await granted(capacity, ask(("b", 100), terms=P0), ask(("b", 40), terms=P2))
            await asyncio.sleep(0.5)
        assert await granted(capacity, ask(("b", 40), terms=P0)) == [False]
        await asyncio.sleep(LAPSE_S)
        assert await granted(capacity, ask(("b", 69), terms=P0)) == [True]

    play(scenario)


def test_what_is_kept_free_is_there_for_better_lanes(make: Make) -> None:
    """Of buckets always; of slots while a better lane was seen."""

    async def scenario(loop: VirtualLoop) -> None:
        shy = Terms("P1", 1, keep_free=0.5)
        capacity = make(loop, {"b": TokenBucket(0, 100, 100, loop.time()), "s": Slots(4)})
        assert await granted(capacity, ask(("b", 50), terms=shy)) == [True]
        assert await granted(capacity, ask(("b", 1), terms=shy)) == [False]
        assert await granted(capacity, ask(("b", 50), ("s", 1), terms=P0)) == [True]
        assert await granted(capacity, *[ask(("s", 1), terms=shy)] * 2) == [True, False]
        assert await granted(capacity, *[ask(("s", 1), terms=P0)] * 2) == [True, True]

    play(scenario)


def test_a_smooth_lane_takes_evenly(make: Make) -> None:
    """Never two at once, though there is enough; others take what they like."""

    async def scenario(loop: VirtualLoop) -> None:
        even = Terms("P1", 1, smooth=True)
        capacity, start, times = make(loop, {"b": TokenBucket(10, 1000, 500, loop.time())}), loop.time(), []
        while len(times) < 4:
            [answer] = await capacity.take([ask(("b", 20), terms=even)])
            if answer.option:
                times.append(loop.time() - start)
            await asyncio.sleep(0.0 if answer.option else answer.retry_after)
        assert times == pytest.approx([0, 2, 4, 6], abs=0.2)
        assert await granted(capacity, *[ask(("b", 20), terms=P0)] * 3) == [True, True, True]

    play(scenario)


def test_a_gate_follows_the_metrics_of_its_engine(make: Make) -> None:
    """What fits below the mark goes, what was admitted since counts, and what is given back opens it again."""

    async def scenario(loop: VirtualLoop) -> None:
        capacity = make(loop, {"kv": Watermark(KvRules(high=0.8, low=0.6, tokens=1000))})
        await capacity.tune([Gauge("kv", Reading(0.3, running=1.0))])
        assert await granted(capacity, ask(("kv", 501))) == [False]
        assert await granted(capacity, ask(("kv", 300)), ask(("kv", 200)), ask(("kv", 1))) == [True, True, False]
        await capacity.tune([Gauge("kv", None)])
        await capacity.change([Change("kv", 300), Change("kv", 200)])
        await asyncio.sleep(0.2)
        await capacity.tune([Gauge("kv", Reading(0.2, running=1.0))])
        assert await granted(capacity, ask(("kv", 600))) == [True]
        await capacity.change([Change("kv", 600)])
        gate = capacity.levels()["kv"]
        assert isinstance(gate, Watermark)
        assert (gate.booked, gate.held) == (0, 0)

    play(scenario)


@pytest.mark.parametrize("seed", range(10))
def test_on_any_terms_and_in_any_order_what_is_taken_comes_back(make: Make, seed: int) -> None:
    """Lanes of all kinds at slots, a bucket and a gate, with pauses and new limits: all is there in the end."""

    async def scenario(loop: VirtualLoop) -> None:
        rng = random.Random(seed)
        bucket, gate = TokenBucket(1e6, 1e6, 0, loop.time()), Watermark(KvRules(tokens=1000))
        capacity = make(loop, {"s": Slots(3), "kv": gate, "b": bucket})
        lanes = [PLAIN, P0, P2, Terms("P1", 1, 0.3, keep_free=0.5), Terms("P3", 3, 0.2, smooth=True)]

        async def caller() -> None:
            claims = {"s": 1.0, "kv": float(rng.randint(1, 900)), "b": float(rng.randint(1, 100))}
            keys = rng.sample(sorted(claims), rng.randint(1, 3))
            wanted = ask(*((key, claims[key]) for key in keys), terms=rng.choice(lanes))
            while (await granted(capacity, wanted)) == [False]:  # noqa: ASYNC110 - as the limiter asks again
                await asyncio.sleep(rng.uniform(0.05, 0.5))
            await asyncio.sleep(rng.random())
            await capacity.change([Change(c.key, c.amount) for c in wanted.options[0].claims if c.key != "b"])

        async def engine() -> None:
            for _ in range(100):
                await capacity.tune([Gauge("kv", Reading(rng.random())), Pause("s", rng.uniform(0.0, 0.2))])
                await capacity.tune([Seats("s", rng.randint(1, 4)), Resize("b", rng.uniform(1e3, 1e6), 1e6)])
                await asyncio.sleep(rng.uniform(0.1, 0.5))

        await asyncio.gather(*(caller() for _ in range(30)), engine())
        slots, left = capacity.levels()["s"], capacity.levels()["kv"]
        assert isinstance(slots, Slots)
        assert isinstance(left, Watermark)
        assert (slots.used, left.booked, left.held) == (0, 0, 0)

    play(scenario)
