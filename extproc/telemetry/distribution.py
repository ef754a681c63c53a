"""How values are spread, in buckets, with a trace for some of them."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass

__all__ = ["Distribution", "Example", "Shown"]


@dataclass(frozen=True, slots=True)
class Example:
    """A value that was recorded, the trace it belongs to (32 hex digits), and when, in epoch seconds."""

    value: float
    trace: str
    at: float


@dataclass(frozen=True, slots=True)
class Shown:
    """A distribution at one moment. counts: per bucket, one more than there are bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    examples: tuple[Example | None, ...]

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)


class Distribution:
    """Counts values by upper bounds, which belong to their bucket. The last bucket is of what exceeds all.

    Recording costs less than a microsecond: the loop does it, while a thread may be reading. So it reads what is
    counted in one step each, and the count is the sum of the buckets; the sum of values may be one value behind.
    """

    __slots__ = ("_counts", "_examples", "_sum", "bounds")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Nothing yet."""
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._examples: list[Example | None] | None = None

    def record(self, value: float, trace: str = "") -> None:
        """Count a value; trace: of the request that it is of, empty where there is none."""
        place = bisect_left(self.bounds, value)
        self._counts[place] += 1
        self._sum += value
        if trace:
            if self._examples is None:
                self._examples = [None] * len(self._counts)
            self._examples[place] = Example(value, trace, time.time())

    def shown(self) -> Shown:
        """As it is now."""
        counts, examples = tuple(self._counts), self._examples
        return Shown(self.bounds, counts, self._sum, tuple(examples) if examples else (None,) * len(counts))
