"""When an operator is told that a budget runs out: when most of it is used, and when little is left, once a period.

What was reserved counts as used, and part of it comes back; that it falls and rises again is nothing new. Deliberately
not here: budgets of sessions and of tenants that nobody listed, there may be any number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from extproc.core.budget import Budget
from extproc.core.capacity import Store

__all__ = ["MARKS", "Alarms"]

MARKS = (0.8, 0.95)
"""Used shares of a budget that are told."""


class Alarms:
    """Watches the budgets among `keys`."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Nothing was told yet."""
        self._told = dict.fromkeys(keys, (0, 0.0))

    def follow(self, keys: Iterable[str]) -> None:
        """Watch these from now on; of those that are watched already nothing is told twice."""
        self._told = {key: self._told.get(key, (0, 0.0)) for key in keys}

    def look(self, store: Store, now: float) -> list[tuple[str, Budget]]:
        """Those that have passed a mark since the last look, in this period."""
        found = []
        for key, (told, until) in self._told.items():
            budget = store.get(key)
            if not isinstance(budget, Budget):
                continue
            passed = bisect_right(MARKS, budget.used_at(now) / budget.limit)
            before = told if budget.until == until else 0
            if passed > before:
                self._told[key] = (passed, budget.until)
                found.append((key, budget))
        return found
