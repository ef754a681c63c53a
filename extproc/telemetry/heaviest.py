"""Who uses most, of any number of names, in memory that does not grow with them.

A row counts for one name. There are at most `kept` rows; when one more is needed the lighter half is dropped, and their
median weight is taken from the rest: the frequent-items sketch of Anderson et al. (2017). So a name that used more than
`2 / kept` of everything is among the rows, whatever else comes by, and what a flood of small names costs is spread over
those of it that were dropped. A row's numbers are exact from when it came among them; they never fall while it stays.

Weights halve with `half_life_s`, so that who used much this morning makes room for who does now. Its numbers do not.

Deliberately not here: what became of those that were dropped, beyond the sums of everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from heapq import nlargest
from operator import attrgetter
from typing import Generic, TypeVar

__all__ = ["Heaviest", "Row"]

KEPT = 20
"""So many rows are kept for each that is shown."""
LEAST_KEPT = 1000

N = TypeVar("N", bound=Hashable)
_weight = attrgetter("weight")


@dataclass(slots=True)
class Row:
    """What one name used: requests that were settled or refused, tokens, dollars, and how many were refused."""

    weight: float = 0.0
    requests: int = 0
    tokens: int = 0
    usd: float = 0.0
    refused: int = 0


class Heaviest(Generic[N]):
    """The `shown` names that used most of late, and the sums of everybody."""

    def __init__(self, shown: int, clock: Callable[[], float], half_life_s: float = 1800.0) -> None:
        """No names yet. clock: in seconds."""
        self.shown = shown
        self.kept = max(LEAST_KEPT, KEPT * shown)
        self.rows: dict[N, Row] = {}
        self.sum = Row()
        self._rest = Row()
        self._clock = clock
        self._half_life_s = half_life_s
        self._aged = clock()
        self._due = self._aged + half_life_s

    def used(self, name: N, tokens: int, usd: float) -> None:
        """A request of `name` was settled."""
        if self._clock() >= self._due:
            self._age()
        row = self.rows.get(name) or self._row(name)
        row.weight += tokens + 1
        row.requests += 1
        row.tokens += tokens
        row.usd += usd
        everybody = self.sum
        everybody.requests += 1
        everybody.tokens += tokens
        everybody.usd += usd

    def refused(self, name: N) -> None:
        """A request of `name` was refused. That weighs as much as a token, so nobody gets to the top by it alone."""
        if self._clock() >= self._due:
            self._age()
        row = self.rows.get(name) or self._row(name)
        row.weight += 1
        row.requests += 1
        row.refused += 1
        self.sum.requests += 1
        self.sum.refused += 1

    def told(self) -> list[tuple[N, Row]]:
        """Those who used most of late, most first."""
        if self._clock() >= self._due:
            self._age()
        return nlargest(self.shown, self.rows.items(), key=lambda one: one[1].weight)

    def rest(self, told: list[tuple[N, Row]]) -> Row:
        """All but those who were `told`. It never falls, though one of the rest may come to be told."""
        rest, everybody = self._rest, self.sum
        rest.requests = max(rest.requests, everybody.requests - sum(row.requests for _, row in told))
        rest.tokens = max(rest.tokens, everybody.tokens - sum(row.tokens for _, row in told))
        rest.usd = max(rest.usd, everybody.usd - sum(row.usd for _, row in told))
        rest.refused = max(rest.refused, everybody.refused - sum(row.refused for _, row in told))
        return rest

    def _row(self, name: N) -> Row:
        if len(self.rows) >= self.kept:
            self._drop()
        row = self.rows[name] = Row()
        return row

    def _drop(self) -> None:
        """The lighter half goes, and what the heaviest of it weighed is taken from all."""
        weights = sorted(map(_weight, self.rows.values()))
        middle = weights[len(weights) // 2]
        self.rows = {name: row for name, row in self.rows.items() if row.weight > middle}
        for row in self.rows.values():
            row.weight -= middle

    def _age(self) -> None:
        since = self._clock() - self._aged
        self._aged += since
        self._due = self._aged + self._half_life_s
        factor = 0.5 ** (since / self._half_life_s)
        for row in self.rows.values():
            row.weight *= factor
