"""What was spent since when."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from extproc.core.timeline import QUANTUM_S, Timeline


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 100.0)), max_size=60), st.floats(0.0, 1.0))
def test_it_knows_what_was_spent_since_any_moment(steps, share):
    """To within what shares an entry."""
    line, spends, now = Timeline(), [], 0.0
    for gap, amount in steps:
        now += gap
        line.add(amount, now)
        spends.append((now, amount))
    moment = now * share
    assert line.reaches(moment)
    told = line.since(moment)
    assert told >= sum(a for at, a in spends if at > moment + QUANTUM_S) - 1e-6
    assert told <= sum(a for at, a in spends if at > moment - QUANTUM_S) + 1e-6
    assert line.since(now + 1.0) == 0.0


def test_it_forgets_the_oldest_and_says_so():
    """Memory is bounded; what is out of reach is not told wrongly."""
    line = Timeline(limit=10)
    for i in range(1000):
        line.add(1.0, float(i))
    assert not line.reaches(900.0)
    reach = next(t for t in range(1000) if line.reaches(float(t)))
    assert 1000 - 10 <= reach <= 999 - 4
    for moment in range(reach, 1000):
        assert line.since(float(moment)) == 999 - moment


def test_much_in_a_moment_is_one_entry():
    """However many requests there are in a second, so many moments are kept apart and no more."""
    line, rng = Timeline(limit=100), random.Random(1)
    for _ in range(100_000):
        line.add(1.0, rng.random() * 0.009 + 5.0)
    assert line.reaches(-1.0)
    assert line.since(4.0) == 100_000


def test_a_clock_that_goes_back_stands_still():
    """Nothing is lost."""
    line = Timeline()
    line.add(1.0, 10.0)
    line.add(2.0, 5.0)
    assert line.since(9.0) == 3.0


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(0, 100), st.booleans()), max_size=60), st.floats(0.0, 1.0))
def test_what_was_taken_back_was_never_spent(steps, share):
    """Whenever it is told, and whatever was spent since."""
    line, kept, now, back = Timeline(), Timeline(), 0.0, []
    for gap, amount, stays in steps:
        now += gap
        line.add(float(amount), now)
        kept.add(float(amount) if stays else 0.0, now)
        back += [] if stays else [(float(amount), now)]
    for amount, spent_at in back:
        line.take_back(amount, spent_at)
    for moment in (now * share, -1.0, now + 1.0):
        assert line.since(moment) == kept.since(moment)


def test_taking_back_what_is_out_of_reach_changes_nothing():
    """It is not told any more either."""
    line = Timeline(limit=10)
    for i in range(100):
        line.add(1.0, float(i))
    reach = next(t for t in range(100) if line.reaches(float(t)))
    line.take_back(1.0, 3.0)
    assert [line.since(float(moment)) for moment in range(reach, 100)] == [99 - moment for moment in range(reach, 100)]
