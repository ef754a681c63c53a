"""Capacity in this process's own memory: every call is one synchronous step, so none can be interrupted."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.capacity import Answer, Ask, Change, Store, Tuning, answer
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
        raise AssertionError("the owner of this file writes this")

    def levels(self) -> Store:
        """See ports.Capacity."""
        return self._store

    def resize(self, key: str, per_second: float, capacity: float) -> None:
        """Follow a learned limit: an unknown bucket starts empty, a known one keeps its level as far as it fits."""
        now = self._clock.time()
        counter = self._store.get(key)
        if isinstance(counter, TokenBucket):
            counter.resize(per_second, capacity, now)
        else:
            self._store[key] = TokenBucket(per_second, capacity, 0.0, now)

    def resize_slots(self, key: str, limit: int | None) -> None:
        """Follow a new number of slots; None lifts the limit but goes on counting nothing."""
        counter = self._store.get(key)
        if limit is None:
            self._store.pop(key, None)
        elif isinstance(counter, Slots):
            counter.limit = limit
        else:
            self._store[key] = Slots(limit)
