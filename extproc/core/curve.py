"""How much of many tenants' work is done by the time a counter is reached (see forecast)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

__all__ = ["Curve"]


class Curve:
    """Which share of the work of several tenants goes before a given counter.

    Each is a line from the counter where it starts to the one where all its work is done.
    """

    __slots__ = ("_done", "_slopes", "_starts", "total")

    def __init__(self, tenants: Iterable[tuple[float, float, float]]) -> None:
        """Of each: where it starts, where it ends, and its work in between."""
        bends: list[tuple[float, float]] = []
        self.total = 0.0
        for start, end, work in tenants:
            slope = work / max(end - start, 1e-9)
            bends += ((start, slope), (end, -slope))
            self.total += work
        bends.sort()
        self._starts = [at for at, _ in bends]
        self._slopes = list(accumulate(slope for _, slope in bends))
        widths = (after - before for before, after in zip(self._starts, self._starts[1:], strict=False))
        self._done = list(accumulate((s * w for s, w in zip(self._slopes, widths, strict=False)), initial=0.0))

    def share(self, counter: float) -> float:
        """0 to 1."""
        at = bisect_right(self._starts, counter) - 1
        if at < 0 or not self.total:
            return 0.0
        return min(1.0, (self._done[at] + self._slopes[at] * (counter - self._starts[at])) / self.total)
