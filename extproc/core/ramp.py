"""How fast traffic may grow where a provider wants it to grow slowly.

The rule (OpenAI's, behind its error `slow_down`): above a floor, tokens per minute may grow by at most a half within 15
minutes. So a minute may hold what the highest of the last 15 held, for that was allowed, or half more than the highest
of the 15 before those; never more than half above the highest of the last 15. Growth compounds every quarter of an
hour, not every minute. For 15 minutes after a `slow_down` a minute may hold what was usual before the growth it
complains of, and no more.
"""

from __future__ import annotations

from collections import deque
from math import inf

__all__ = ["FLOOR_PER_MINUTE", "Ramp"]

FLOOR_PER_MINUTE = 1_000_000.0
"""Tokens per minute up to which the rule says nothing; also what an upstream may start with."""
GROWTH = 1.5
MINUTES = 15
KEPT = 48


class Ramp:
    """Tokens granted per minute at one account and model, and what the minute at hand may hold."""

    __slots__ = ("_minutes", "_slowed", "_tokens", "active", "floor")

    def __init__(self, floor: float = FLOOR_PER_MINUTE, *, active: bool = True) -> None:
        """`active` from the start, or only once a `slow_down` is seen."""
        self.floor = floor
        self.active = active
        self._minutes: deque[int] = deque([0], KEPT)
        self._tokens: deque[float] = deque([0.0], KEPT)
        self._slowed = -KEPT

    def add(self, tokens: float, now: float) -> None:
        """Tokens were granted."""
        minute = int(now // 60)
        if minute > self._minutes[-1]:
            self._minutes.append(minute)
            self._tokens.append(0.0)
        self._tokens[-1] += tokens

    def slow_down(self, now: float) -> None:
        """The provider complained. Complaints within the same 15 minutes are one."""
        self.active = True
        if now // 60 - self._slowed >= MINUTES:
            self._slowed = int(now // 60)

    def per_minute(self, now: float) -> float:
        """Tokens that the minute of `now` may hold, infinite when the rule is not in force."""
        if not self.active:
            return inf
        minute = int(now // 60)
        if minute - self._slowed < MINUTES:
            usual = self._highest(self._slowed - 2 * MINUTES, self._slowed - MINUTES)
            return max(self.floor, usual, self._highest(self._slowed + 1, minute))
        lately = self._highest(minute - MINUTES, minute)
        before = self._highest(minute - 2 * MINUTES, minute - MINUTES)
        return max(self.floor, min(max(lately, GROWTH * before), GROWTH * lately))

    def _highest(self, first: int, end: int) -> float:
        minutes = zip(self._minutes, self._tokens, strict=True)
        return max((tokens for minute, tokens in minutes if first <= minute < end), default=0.0)
