"""What every implementation of ports.Capacity must do, whatever is behind it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from math import inf

import pytest

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.capacity import Ask, Change, Claim, Option, Store
from extproc.ports import Capacity, Clock
from extproc.shared.memory import MemoryCapacity
from tests.doubles import Suspending, VirtualLoop, play

Make = Callable[[Clock, Store], Capacity]


@pytest.fixture(params=[MemoryCapacity, Suspending])
def make(request: pytest.FixtureRequest) -> Make:
    """One implementation after the other; a new one is added here."""
    return request.param


def ask(*claims: tuple[str, float], followed: bool = False) -> Ask:
    return Ask("t", (Option("x", tuple(Claim(*claim) for claim in claims)),), followed)


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
