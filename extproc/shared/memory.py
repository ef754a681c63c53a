"""Capacity in this process's own memory: every call is one synchronous step, so none can be interrupted."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.core.capacity import Answer, Ask, Change, Store, Tuning, answer, tune
from extproc.ports import Clock

__all__ = ["MemoryCapacity"]


class MemoryCapacity:
    """Counts in a dict. Keys that were never declared are unlimited."""

    immediate = True

    def __init__(self, clock: Clock, store: Store) -> None:
        """Start from `store`, which this object owns from now on."""
        self._clock = clock
        self._store = store

    async def take(self, asks: Sequence[Ask]) -> list[Answer]:
        """See ports.Capacity."""
        return answer(self._store, asks, self._clock.time())

    async def change(self, changes: Sequence[Change]) -> None:
        """See ports.Capacity."""
        now = self._clock.time()
        for change in changes:
            if counter := self._store.get(change.key):
                counter.change(change.amount, now)

    async def tune(self, tunings: Sequence[Tuning]) -> None:
        """See ports.Capacity."""
        tune(self._store, tunings, self._clock.time())

    def levels(self) -> Store:
        """See ports.Capacity."""
        return self._store
