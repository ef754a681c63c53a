"""How long answers usually are: what to reserve for a request whose client named no limit.

Per tenant and model, a high percentile of the last answers; until enough of them are known, that of the model, and
until then a prior. Answers whose length the client limited are kept apart from the others: they say nothing of how long
an answer is that nobody limits, and a reservation learned from them would be too small.

Cost: an answer is learned in O(log n) of a fixed window, a question is two look-ups. Memory is bounded: the names that
were learned of least recently are forgotten.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from math import ceil

__all__ = ["Outputs"]

WINDOW = 200
"""Answers remembered of each name."""
ENOUGH = 20
"""Answers from which on a name is believed."""
MOST_TOKENS = 2**31
ANYBODY = ""
"""Stands for all tenants together."""


class Outputs:
    """Output tokens per answer (each choice of a request counts as one). percentile: in (0, 1]; prior: tokens."""

    def __init__(self, percentile: float, prior: int, limit: int = 4096) -> None:
        """limit: pairs of tenant and model that are remembered."""
        self._percentile = percentile
        self._prior = prior
        self._limit = limit
        self._known: OrderedDict[tuple[str, str, bool], _Window] = OrderedDict()

    def __len__(self) -> int:
        """Names remembered."""
        return len(self._known)

    def follow(self, percentile: float, prior: int) -> None:
        """Go by other rules from now on; what was learned stays, and moves with the next answer of its kind."""
        self._percentile, self._prior = percentile, prior

    def learn(self, tenant: str, model: str, tokens: int, *, capped: bool) -> None:
        """An answer had so many tokens; capped: its client had named a limit. Empty answers teach nothing."""
        if tokens > 0:
            tokens = min(tokens, MOST_TOKENS)
            self._learn((tenant, model, capped), tokens)
            self._learn((ANYBODY, model, capped), tokens)

    def usual(self, tenant: str, model: str, *, capped: bool = False) -> int:
        """Tokens that an answer will hardly exceed. Until that is known, one with a limit is taken to use it all."""
        for name in ((tenant, model, capped), (ANYBODY, model, capped)):
            window = self._known.get(name)
            if window is not None and window.usual:
                return window.usual
        return MOST_TOKENS if capped else self._prior

    def _learn(self, name: tuple[str, str, bool], tokens: int) -> None:
        window = self._known.get(name)
        if window is None:
            window = self._known[name] = _Window()
            if len(self._known) > self._limit:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(name)
        window.add(tokens, self._percentile)


class _Window:
    """The last answers in order of arrival and in order of size. usual: their percentile, 0 until enough are known."""

    __slots__ = ("_arrived", "_sorted", "usual")

    def __init__(self) -> None:
        self._arrived: deque[int] = deque()
        self._sorted = array("I")
        self.usual = 0

    def add(self, tokens: int, percentile: float) -> None:
        self._arrived.append(tokens)
        insort(self._sorted, tokens)
        if len(self._arrived) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]
        if len(self._arrived) >= ENOUGH:
            self.usual = self._sorted[ceil(percentile * len(self._sorted)) - 1]
