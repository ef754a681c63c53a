"""A budget: what may be used in all within one calendar period, or for good.

Where a bucket refills all the time, a budget is whole again when a period begins: an hour, a day or a month of the
calendar, in the time zone that `epoch_offset` puts it in. Amounts are whatever it counts: US dollars or LLM tokens.

A claim passes when it fits into what is left. One larger than the whole budget never does. What was used is corrected
afterwards and may pass the limit by what an estimate was too low; nothing passes any more then.

Deliberately not here: set-asides (a budget belongs to one tenant or session, not to lanes), and prices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, timedelta
from enum import StrEnum
from math import floor, inf

from extproc.core.shares import PLAIN, Terms

__all__ = ["Budget", "Period", "period_ends"]

EPSILON = 1e-9
"""Budgets count dollars, too: a billionth is rounding."""
TICK_S = 1e-3
"""Times of the calendar are so large that less of a second is rounding."""
HOUR_S, DAY_S = 3600, 86_400
DAY_ONE = date(1970, 1, 1).toordinal()
LONGER_THAN_A_MONTH = timedelta(days=32)


class Period(StrEnum):
    """How long a budget lasts. Months are as long as the calendar's."""

    EVER = "ever"
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"


def period_ends(period: Period, at: float) -> float:
    """When the period of the calendar ends in which `at` lies, both in epoch seconds; infinite for what has no end."""
    match period:
        case Period.HOUR:
            return (floor(at / HOUR_S) + 1.0) * HOUR_S
        case Period.DAY:
            return (floor(at / DAY_S) + 1.0) * DAY_S
        case Period.MONTH:
            return _next_month(floor(at / DAY_S)) * float(DAY_S)
        case _:
            return inf


@dataclass(slots=True)
class Budget:
    """`used` of `limit` as of time `at` (seconds, any monotonic clock), within the calendar's `period` of that time.

    epoch_offset: seconds from that clock to the calendar's. shadow: it never refuses. closed_until: nothing is taken
    before. until: when the period of `at` ends, on the clock.
    """

    limit: float
    period: Period = Period.EVER
    used: float = 0.0
    epoch_offset: float = 0.0
    at: float = 0.0
    shadow: bool = False
    closed_until: float = -inf
    retired: bool = False
    until: float = field(init=False)

    def __post_init__(self) -> None:
        """The period that it is in follows from the time."""
        self.until = self._end_after(self.at)

    def restore(self, used: float, at: float) -> None:
        """So much was used in the period of `at`."""
        self.used, self.at, self.until = max(0.0, used), at, self._end_after(at)

    def used_at(self, now: float) -> float:
        """What was used in the period of `now`. A clock that went back begins no period."""
        return self.used if now < self.until else 0.0

    def ends_in(self, now: float) -> float:
        """Seconds until the next period, never 0; infinite when there is none."""
        return max(TICK_S, (self.until if now < self.until else self._end_after(now)) - now)

    def wait_for(self, amount: float, now: float, terms: Terms = PLAIN) -> float:  # noqa: ARG002 - one shape for all
        """Seconds until `amount` fits: 0 when now, infinite when no new period will help."""
        if self.used_at(now) + amount <= self.limit + EPSILON:
            return max(0.0, self.closed_until - now)
        return max(self.ends_in(now), self.closed_until - now) if amount <= self.limit else inf

    def due_in(self, amount: float, now: float, terms: Terms) -> float:  # noqa: ARG002 - one shape for all
        """No lane has a share of a budget."""
        return inf

    def free_at(self, now: float, terms: Terms = PLAIN) -> float:  # noqa: ARG002 - one shape for all
        """What is left; negative when more was used than there was."""
        return self.limit - self.used_at(now)

    def take(self, amount: float, now: float, terms: Terms = PLAIN) -> None:  # noqa: ARG002 - one shape for all
        """Use `amount`."""
        self.change(-amount, now)

    def change(self, amount: float, now: float) -> None:
        """Give `amount` back, or charge it when negative. What a former period used up comes back as nothing."""
        self.used = max(0.0, self.used_at(now) - amount)
        if now >= self.until:
            self.until = self._end_after(now)
        self.at = max(self.at, now)

    def adopt(self, rules: Budget) -> None:
        """Go by the limit of another of the same period. What was used was used."""
        self.limit, self.shadow = rules.limit, rules.shadow

    def refused(self, amount: float, now: float, terms: Terms, *, short: bool) -> None:
        """Nobody is owed anything for waiting here."""

    def closes(self, amount: float, now: float, terms: Terms) -> bool:  # noqa: ARG002 - one shape for all
        """Who did not fit closes it to those behind."""
        return True

    def _end_after(self, now: float) -> float:
        end = period_ends(self.period, now + self.epoch_offset) - self.epoch_offset
        return max(end, now + TICK_S)  # at the very end of a period rounding must not put it before now


def _next_month(day: int) -> int:
    """The day on which the month after that of `day` begins, in days since 1970."""
    first = date.fromordinal(DAY_ONE + day).replace(day=1)
    return (first + LONGER_THAN_A_MONTH).replace(day=1).toordinal() - DAY_ONE
