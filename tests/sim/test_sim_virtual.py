"""Time that jumps: an hour takes as long as its events take, always in the same order."""

import asyncio
import random
import time

import pytest

from extproc.sim.virtual import Stuck, VirtualLoop, play


def test_an_hour_of_timers_takes_no_hour():
    """The clock goes where the timers are, and nowhere else."""

    async def hour(loop: VirtualLoop) -> float:
        began = loop.time()
        for _ in range(3600):
            await asyncio.sleep(1.0)
        return loop.time() - began

    began = time.perf_counter()
    assert play(hour) == pytest.approx(3600.0)
    assert time.perf_counter() - began < 30


def test_whoever_sleeps_shorter_wakes_first_whatever_began_first():
    """Timers fire in the order of their times."""

    async def race(loop: VirtualLoop) -> list[float]:
        rng, woke = random.Random(4), []

        async def nap(seconds: float) -> None:
            await asyncio.sleep(seconds)
            woke.append(round(loop.time() - 1000.0, 9))

        await asyncio.gather(*(nap(rng.uniform(0, 50)) for _ in range(200)))
        return woke

    woke = play(race)
    assert woke == sorted(woke)
    assert woke == play(race)


def test_waiting_for_what_never_comes_is_told():
    """No timer, no task: nothing will ever happen."""

    async def never(_: VirtualLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck):
        play(never)


def test_turning_in_circles_is_told():
    """Time that stands still while something is always ready."""

    async def circles(_: VirtualLoop) -> None:
        while True:  # noqa: ASYNC110 - what it is about
            await asyncio.sleep(0)

    with pytest.raises(Stuck):
        play(circles)


def test_what_is_scheduled_can_be_seen():
    """Cancelled timers are none."""

    async def two(loop: VirtualLoop) -> int:
        loop.call_later(5, print)
        loop.call_later(9, print).cancel()
        return len(loop.timers())

    assert play(two) == 1
