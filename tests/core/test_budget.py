"""What may be used within a calendar period, or for good."""

from __future__ import annotations

from datetime import UTC, datetime
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.budget import Budget, Period, period_ends
from extproc.core.shares import Terms

HOUR, DAY = 3600.0, 86_400.0


def _epoch(year: int, month: int, day: int = 1, hour: int = 0) -> float:
    return datetime(year, month, day, hour, tzinfo=UTC).timestamp()


def test_it_is_used_up_and_whole_again_when_a_period_begins() -> None:
    """What does not fit waits for that; the hour is the calendar's, not one after the first use."""
    budget = Budget(10, Period.HOUR, epoch_offset=1_700_000_000.0, at=0.0)  # 800 s into an hour
    assert (budget.wait_for(10, 0.0), budget.ends_in(0.0)) == (0, 2800)
    budget.take(7.5, 0.0)
    assert (budget.free_at(0.0), budget.wait_for(2.5, 0.0), budget.wait_for(2.6, 0.0)) == (2.5, 0, 2800)
    assert (budget.used_at(2799.0), budget.used_at(2800.0)) == (7.5, 0)
    assert (budget.wait_for(10, 2800.0), budget.ends_in(2800.0)) == (0, HOUR)


def test_without_a_period_it_ends_for_good() -> None:
    """Only a higher limit helps."""
    budget = Budget(100)
    budget.take(100, 0.0, Terms("P0"))
    assert (budget.wait_for(1, 1e9), budget.ends_in(1e9), budget.free_at(1e9)) == (inf, inf, 0)
    budget.limit = 150
    assert budget.wait_for(50, 1e9) == 0


def test_what_is_larger_than_the_whole_never_fits() -> None:
    """No period helps; so nobody is told to come again for nothing."""
    budget = Budget(10, Period.HOUR)
    assert (budget.wait_for(11, 0.0), budget.wait_for(10, 0.0)) == (inf, 0)
    budget.take(1, 0.0)
    assert (budget.wait_for(11, 0.0), budget.wait_for(10, 0.0), budget.wait_for(9, 0.0)) == (inf, HOUR, 0)


def test_what_was_used_is_corrected_afterwards() -> None:
    """It may pass the limit; nothing fits then. What comes back never makes more than the whole."""
    budget = Budget(10, Period.HOUR)
    budget.take(2, 0.0)
    budget.change(-9, 1.0)
    assert (budget.used_at(1.0), budget.free_at(1.0), budget.wait_for(0, 1.0)) == (11, -1, HOUR - 1)
    budget.change(50, 2.0)
    assert budget.used_at(2.0) == 0


def test_what_a_former_period_gives_back_is_not_given_twice() -> None:
    """A period begins with nothing used, however much was reserved before."""
    budget = Budget(10, Period.HOUR)
    budget.take(8, 3599.0)
    budget.change(5, 3601.0)
    assert budget.used_at(3601.0) == 0
    budget.change(-3, 3602.0)
    assert budget.used_at(3602.0) == 3


def test_a_pause_holds_until_it_ends() -> None:
    """Or until the next period, when that is later."""
    budget = Budget(10, Period.HOUR, closed_until=100.0)
    assert (budget.wait_for(1, 40.0), budget.wait_for(1, 100.0)) == (60, 0)
    budget.take(10, 40.0)
    assert budget.wait_for(1, 40.0) == HOUR - 40
    budget.closed_until = 2 * HOUR
    assert budget.wait_for(1, 40.0) == 2 * HOUR - 40


def test_a_clock_that_goes_back_begins_no_period() -> None:
    """And its end is where it was."""
    budget = Budget(10, Period.HOUR, used=4, at=4000.0)
    assert (budget.used_at(100.0), budget.ends_in(100.0)) == (4, 2 * HOUR - 100)
    budget.change(-1, 100.0)
    assert (budget.used_at(4000.0), budget.used_at(2 * HOUR)) == (5, 0)


def test_nobody_is_owed_a_part_of_it() -> None:
    """A budget belongs to one tenant or session: lanes have no shares of it, and who does not fit closes it."""
    budget, batch = Budget(10, used=10), Terms("P2", 2, share=0.5)
    budget.refused(1, 0.0, batch, short=True)
    assert (budget.due_in(1, 0.0, batch), budget.closes(1, 0.0, batch), budget) == (inf, True, Budget(10, used=10))


def test_what_was_known_of_it_is_restored() -> None:
    """In the period it was used in, which may be over; never less than nothing."""
    budget = Budget(10, Period.HOUR, at=7300.0)
    budget.restore(4, 7250.0)
    assert (budget.used_at(7300.0), budget.used_at(3 * HOUR)) == (4, 0)
    budget.restore(4, 7199.0)
    assert budget.used_at(7300.0) == 0
    budget.restore(-1, 7250.0)
    assert budget.used_at(7300.0) == 0


@pytest.mark.parametrize(
    ("at", "ends"),
    [
        (_epoch(2025, 12, 31, 23), _epoch(2026, 1)),
        (_epoch(2026, 1), _epoch(2026, 2)),
        (_epoch(2026, 2, 28, 23), _epoch(2026, 3)),
        (_epoch(2028, 2, 28, 23), _epoch(2028, 3)),
        (_epoch(2028, 2, 29, 23), _epoch(2028, 3)),
        (_epoch(2100, 2, 28, 23), _epoch(2100, 3)),
        (_epoch(2026, 4, 30, 23) + 3599.5, _epoch(2026, 5)),
        (_epoch(1969, 12, 31, 23), 0.0),
    ],
)
def test_months_are_the_calendars(at: float, ends: float) -> None:
    """However long they are; hours and days end where theirs do, and what has no period never ends."""
    assert period_ends(Period.MONTH, at) == ends
    assert period_ends(Period.DAY, at) == (at // DAY + 1) * DAY
    assert period_ends(Period.HOUR, at) == (at // HOUR + 1) * HOUR
    assert period_ends(Period.EVER, at) == inf


@given(st.floats(-1e9, 5e9))
def test_every_period_ends_after_it_began(at: float) -> None:
    """Within its length, and where it ends the next one begins."""
    for period, longest in ((Period.HOUR, HOUR), (Period.DAY, DAY), (Period.MONTH, 31 * DAY)):
        end = period_ends(period, at)
        assert at < end <= at + longest
        assert end < period_ends(period, end) <= end + longest


@given(
    st.floats(1, 1e6),
    st.sampled_from(Period),
    st.floats(0, 2e9),
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 2000)), max_size=40),
)
def test_no_period_uses_more_than_its_budget(
    limit: float, period: Period, offset: float, steps: list[tuple[float, float]]
) -> None:
    """Whatever is asked when; and who is told a time to wait fits then, if nobody else comes."""
    budget, now, used = Budget(limit, period, epoch_offset=offset), 0.0, {}
    for amount, pause in steps:
        now += pause
        wait = budget.wait_for(amount, now)
        if wait == 0:
            budget.take(amount, now)
            end = budget.until
            used[end] = used.get(end, 0.0) + amount
        elif wait < inf:
            assert budget.wait_for(amount, now + wait + 1e-3) == pytest.approx(0.0, abs=1e-3)
    assert all(amount <= limit * (1 + 1e-9) + 1e-6 for amount in used.values())
