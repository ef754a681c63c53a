"""A world of endless lanes before a few counters, for what shares promise. No loop, no clock: time jumps.

`Flood.run` asks for the head of every lane in the order of rank, as long as anything is granted, then jumps to when the
answers said that asking again may help, or to the next end of what is held.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from extproc.core.capacity import Answer, Ask, Claim, Option, Store, answer
from extproc.core.shares import Terms

TICK_S = 1e-4


@dataclass
class Flood:
    """draw: the claims of a lane's next request. hold_s: how long it holds what is given back. each: after passes."""

    store: Store
    lanes: Sequence[Terms]
    draw: Callable[[Terms], tuple[Claim, ...]]
    hold_s: Callable[[], float] = lambda: 0.0
    held: frozenset[str] = frozenset()
    each: Callable[[float, dict[str, tuple[Claim, ...]]], None] = lambda _now, _heads: None
    now: float = 0.0
    grants: Counter[str] = field(default_factory=Counter)
    got: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    passes: int = 0
    gap_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _ends: list[tuple[float, int, tuple[Claim, ...]]] = field(default_factory=list)
    _heads: dict[str, tuple[Claim, ...]] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)

    def run(self, seconds: float) -> Flood:
        """Go on for so long."""
        until = self.now + seconds
        self._heads = self._heads or {terms.lane: self.draw(terms) for terms in self.lanes}
        while self.now < until:
            self._end()
            answers = self._pass()
            while any(a.option for a in answers):
                answers = self._pass()
            self.each(self.now, self._heads)
            step = min(a.retry_after for a in answers)
            if self._ends:
                step = min(step, self._ends[0][0] - self.now)
            self.now += max(TICK_S, min(step, 1.0))
        return self

    def drain(self) -> None:
        """Let all that is held end."""
        while self._ends:
            self.now = max(self.now, self._ends[0][0])
            self._end()

    def share(self, lane: str, key: str) -> float:
        """What part of all that was granted of `key` the lane got."""
        return self.got[lane, key] / sum(got for (_, k), got in self.got.items() if k == key)

    def _pass(self) -> list[Answer]:
        self.passes += 1
        asks = [Ask("t", (Option("x", self._heads[terms.lane]),), followed=True, terms=terms) for terms in self.lanes]
        answers = answer(self.store, asks, self.now)
        for terms, found in zip(self.lanes, answers, strict=True):
            if found.option is not None:
                self._granted(terms, found.option.claims)
        return answers

    def _granted(self, terms: Terms, claims: tuple[Claim, ...]) -> None:
        self.grants[terms.lane] += 1
        for claim in claims:
            self.got[terms.lane, claim.key] += claim.amount
        heapq.heappush(self._ends, (self.now + self.hold_s(), sum(self.grants.values()), claims))
        self.gap_s[terms.lane] = max(self.gap_s[terms.lane], self.now - self._last.get(terms.lane, 0.0))
        self._last[terms.lane] = self.now
        self._heads[terms.lane] = self.draw(terms)

    def _end(self) -> None:
        while self._ends and self._ends[0][0] <= self.now:
            for claim in heapq.heappop(self._ends)[2]:
                if claim.key in self.held:
                    self.store[claim.key].change(claim.amount, self.now)
