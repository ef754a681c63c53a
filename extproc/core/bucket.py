"""Capacity that is counted: a token bucket for what flows, slots for what is held.

A bucket holds `level` units (LLM tokens or requests), refills at `rate` units per second up to `capacity`, and may go
into debt: usage that turned out larger than its estimate is charged all the same, and nothing is taken while in debt.
Over any window of w seconds at most `capacity + rate * w` units are taken, plus what was given back in that window.

A request larger than the bucket takes a full bucket into debt, otherwise it could never go; by what it is larger, the
window may be passed once. Units stay floats; a
thousandth of a token is never worth a wait, so comparisons allow `EPSILON`.

Deliberately not here: who may take, and in what order (lanes), and which buckets belong together (capacity).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

__all__ = ["Slots", "TokenBucket"]

EPSILON = 1e-3


@dataclass(slots=True)
class TokenBucket:
    """`level` units as it was at time `at` (seconds, any monotonic clock); `rate` in units per second."""

    rate: float
    capacity: float
    level: float
    at: float

    def level_at(self, now: float) -> float:
        """Units in the bucket at `now`; negative is debt. A clock that went back refills nothing."""
        return min(self.capacity, self.level + self.rate * max(0.0, now - self.at))

    def wait_for(self, amount: float, now: float) -> float:
        """Seconds until `amount` can be taken: 0 when now, infinite when it never refills."""
        missing = min(amount, self.capacity) - self.level_at(now)
        if missing <= EPSILON:
            return 0.0
        return missing / self.rate if self.rate > 0 else inf

    def change(self, amount: float, now: float) -> None:
        """Give `amount` back, or charge it when negative, into debt if need be."""
        self.level = min(self.capacity, self.level_at(now) + amount)
        self.at = max(self.at, now)

    def resize(self, rate: float, capacity: float, now: float) -> None:
        """Follow a new limit. What is in the bucket stays, as far as it fits."""
        self.level = min(capacity, self.level_at(now))
        self.at = max(self.at, now)
        self.rate, self.capacity = rate, capacity


@dataclass(slots=True)
class Slots:
    """At most `limit` held at once. `used` may pass the limit when a running request moves here after a failure."""

    limit: int
    used: float = 0.0

    def wait_for(self, amount: float, now: float) -> float:  # noqa: ARG002 - one shape with TokenBucket
        """0 when `amount` is free, else infinite: only a release can help."""
        return 0.0 if self.used + amount <= self.limit + EPSILON else inf

    def change(self, amount: float, now: float) -> None:  # noqa: ARG002 - one shape with TokenBucket
        """Release `amount`, or hold it when negative."""
        self.used -= amount
