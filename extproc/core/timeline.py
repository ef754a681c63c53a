"""What was spent, and when: how much a provider has counted since any recent moment.

Sums are kept by time, so that a moment is found by bisection. What is spent within `QUANTUM_S` shares one entry, and
the oldest half is dropped when there are too many: memory is bounded whatever the traffic, and `reaches` tells how far
back the answer is known.
"""

from __future__ import annotations

from bisect import bisect_right
from math import inf

__all__ = ["Timeline"]

QUANTUM_S = 0.01


class Timeline:
    """Units spent over time. Times are seconds on one clock; one that goes back counts as standing still."""

    __slots__ = ("_limit", "_sums", "_times")

    def __init__(self, limit: int = 4096) -> None:
        """Nothing spent yet; at most `limit` moments are kept apart."""
        self._limit = limit
        self._times = [-inf]
        self._sums = [0.0]

    def add(self, amount: float, now: float) -> None:
        """Spend `amount` at `now`."""
        if now - self._times[-1] < QUANTUM_S:
            self._sums[-1] += amount
            return
        self._times.append(now)
        self._sums.append(self._sums[-1] + amount)
        if len(self._times) > self._limit:
            del self._times[: self._limit // 2], self._sums[: self._limit // 2]

    def take_back(self, amount: float, spent_at: float) -> None:
        """Of what was spent at `spent_at`, that much was not. Costs as many steps as moments are kept since then."""
        first = max(0, bisect_right(self._times, spent_at) - 1)
        for later in range(first, len(self._sums)):
            self._sums[later] -= amount

    def reaches(self, moment: float) -> bool:
        """Whether what was spent since `moment` is still known."""
        return moment >= self._times[0]

    def since(self, moment: float) -> float:
        """Units spent after `moment`, which must be within reach."""
        return self._sums[-1] - self._sums[bisect_right(self._times, moment) - 1]
