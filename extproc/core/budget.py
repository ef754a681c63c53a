"""A budget: what may be used in all within one calendar period, or for good.

Where a bucket refills all the time, a budget is whole again when a period begins: an hour or a day of the calendar, in
the time zone that `epoch_offset` puts it in. Amounts are whatever it counts: US dollars or LLM tokens.

A claim passes when it fits into what is left. One larger than the whole budget never does. What was used is corrected
afterwards and may pass the limit by what an estimate was too low; nothing passes any more then.

Deliberately not here: set-asides (a budget belongs to one tenant or session, not to lanes), and prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, inf, isinf

from extproc.core.shares import PLAIN, Terms

__all__ = ["Budget"]

EPSILON = 1e-9
"""Budgets count dollars, too: a billionth is rounding."""
TICK_S = 1e-3
"""Times of the calendar are so large that less of a second is rounding."""


@dataclass(slots=True)
class Budget:
    """`used` of `limit` as of time `at` (seconds, any monotonic clock) within a period of `period_s` seconds.

    epoch_offset: seconds from that clock to the calendar's, so that periods begin at multiples of `period_s` there.
    shadow: it never refuses. closed_until: nothing is taken before.
    """

    limit: float
    period_s: float = inf
    used: float = 0.0
    epoch_offset: float = 0.0
    at: float = 0.0
    shadow: bool = False
    closed_until: float = -inf

    def used_at(self, now: float) -> float:
        """What was used in the period of `now`. A clock that went back begins no period."""
        return self.used if self._period(now) <= self._period(self.at) else 0.0

    def ends_in(self, now: float) -> float:
        """Seconds until the next period, never 0; infinite when there is none."""
        if isinf(self.period_s):
            return inf
        begins = (max(self._period(now), self._period(self.at)) + 1) * self.period_s - self.epoch_offset
        return max(TICK_S, begins - now)

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
        self.at = max(self.at, now)

    def refused(self, amount: float, now: float, terms: Terms, *, short: bool) -> None:
        """Nobody is owed anything for waiting here."""

    def closes(self, amount: float, now: float, terms: Terms) -> bool:  # noqa: ARG002 - one shape for all
        """Who did not fit closes it to those behind."""
        return True

    def _period(self, now: float) -> float:
        return 0.0 if isinf(self.period_s) else floor((now + self.epoch_offset) / self.period_s)
