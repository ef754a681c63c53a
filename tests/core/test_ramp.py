"""Slow growth, where a provider wants it."""

from __future__ import annotations

import random
from math import inf

import pytest

from extproc.core.ramp import FLOOR_PER_MINUTE, Ramp


def minutes(ramp: Ramp, wanted: list[float], start: int = 100) -> list[float]:
    """What each minute got of what it wanted."""
    granted = []
    for i, want in enumerate(wanted):
        now = (start + i) * 60.0
        granted.append(min(want, ramp.per_minute(now)))
        ramp.add(granted[-1] / 2, now)
        ramp.add(granted[-1] / 2, now + 59.0)
    return granted


def test_it_says_nothing_unless_it_is_in_force():
    """It counts all the same, for the day it is."""
    ramp = Ramp(active=False)
    minutes(ramp, [3e6] * 40)
    assert ramp.per_minute(140 * 60) == inf
    ramp.active = True
    assert ramp.per_minute(140 * 60) == 4.5e6


def test_it_starts_from_nothing_at_the_floor():
    """And grows by a half every quarter of an hour from there."""
    granted = minutes(Ramp(1000.0), [inf] * 60)
    assert granted[:15] == [1000.0] * 15
    assert granted[16] == 1500.0
    assert granted[45] <= 1000 * 1.5**3
    assert granted[59] >= 1000 * 1.5**2
    assert FLOOR_PER_MINUTE == 1e6


def test_growth_stays_below_a_half_in_every_quarter_of_an_hour():
    """Whatever is wanted, at any time, no minute passes the highest of the 15 before by more than a half, and no two
    minutes within 15 differ by more than a half unless the traffic had been there before.
    """
    for seed in range(100):
        rng = random.Random(seed)
        wanted = [rng.choice([0.0, 500.0, 5_000.0, 50_000.0]) * rng.random() for _ in range(200)]
        granted = minutes(Ramp(1000.0), wanted)
        for m, got in enumerate(granted):
            before = granted[max(0, m - 15) : m]
            assert got <= max(1000.0, 1.5 * max(before, default=0.0)) + 1e-6, f"seed {seed}"
            if m >= 31 and got > 1000.0:
                longer = max(*before, 1.5 * max(granted[m - 30 : m - 15]))
                assert got <= longer + 1e-6, f"seed {seed}"


def test_what_was_there_may_come_back_after_a_lull():
    """Up to the highest of the last 15 minutes at once; after longer silence it starts at the floor."""
    assert minutes(Ramp(1000.0), [1000.0] * 3 + [0.0] * 10 + [5000.0])[-1] == 1000.0
    grown = minutes(Ramp(1000.0), [inf] * 40 + [10.0] * 14 + [inf])
    assert grown[-1] == max(grown)
    assert minutes(Ramp(1000.0), [inf] * 40 + [0.0] * 16 + [inf])[-1] == 1000.0


def test_after_a_slow_down_what_was_usual_before_holds():
    """For 15 minutes: neither the growth that was complained of, nor any other; then it may grow again."""
    ramp = Ramp(1000.0, active=False)
    minutes(ramp, [4000.0] * 20 + [9000.0] * 3)
    ramp.slow_down(123 * 60.0)
    assert ramp.per_minute(123 * 60.0) == 4000.0
    ramp.slow_down(124 * 60.0)
    granted = minutes(ramp, [inf] * 40, 124)
    assert granted[:13] == [4000.0] * 13
    assert granted[-1] > 4000.0


@pytest.mark.parametrize("usual", [0.0, 400.0])
def test_a_slow_down_never_goes_below_the_floor(usual):
    """Not even from nothing."""
    ramp = Ramp(1000.0)
    minutes(ramp, [usual] * 20)
    ramp.slow_down(120 * 60.0)
    assert ramp.per_minute(121 * 60.0) == 1000.0
