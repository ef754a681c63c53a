"""Things in the order of a number of theirs that changes all the time, smallest first.

A heap that is told when a number fell; that one rose it notices by itself when the thing comes to the top. So a change
costs nothing or O(log n), and so does finding the first. What was removed stays in the heap until it surfaces, or until
half of the heap is such waste.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

__all__ = ["Ranking", "ascending"]

T = TypeVar("T")
E = TypeVar("E", bound="tuple[float, int, *tuple[object, ...]]")

Entry = tuple[float, int, int, T]
"""A number, the rank among equal numbers, and which entering it was: things themselves are never compared."""


class Ranking(Generic[T]):
    """`value` tells a thing's number. Things of equal numbers rank by their entering, or by what `add` says."""

    __slots__ = ("_entries", "_heap", "_numbers", "_value")

    def __init__(self, value: Callable[[T], float]) -> None:
        """Start empty."""
        self._value = value
        self._heap: list[Entry[T]] = []
        self._entries: dict[T, Entry[T]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        """How many are ranked."""
        return len(self._entries)

    def add(self, thing: T, among_equals: int | None = None) -> None:
        """Rank it from now on. among_equals: its rank among things of equal numbers."""
        number = next(self._numbers)
        self._enter((self._value(thing), number if among_equals is None else among_equals, number, thing))

    def discard(self, thing: T) -> None:
        """Rank it no longer. KeyError when it was not ranked."""
        del self._entries[thing]
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def fell(self, thing: T) -> None:
        """Its number may have become smaller. KeyError when it is not ranked."""
        known, rank, number, _ = self._entries[thing]
        if (value := self._value(thing)) < known:
            self._enter((value, rank, number, thing))

    def first(self) -> T | None:
        """The thing with the smallest number; None when there is none."""
        heap = self._heap
        while heap:
            known, rank, number, thing = heap[0]
            if self._entries.get(thing) is not heap[0]:
                heappop(heap)
            elif (value := self._value(thing)) > known:
                self._entries[thing] = entry = (value, rank, number, thing)
                heapreplace(heap, entry)
            else:
                return thing
        return None

    def lowest_first(self) -> Iterator[tuple[float, T]]:
        """All of them, each with a number that it is not below, those numbers ascending. Change nothing meanwhile."""
        if self.first() is not None:
            yield from ((known, thing) for known, _, _, thing in filter(self._counts, ascending(self._heap)))

    def _counts(self, entry: Entry[T]) -> bool:
        return self._entries.get(entry[3]) is entry

    def _enter(self, entry: Entry[T]) -> None:
        self._entries[entry[3]] = entry
        heappush(self._heap, entry)


def ascending(heap: list[E]) -> Iterator[E]:
    """Everything in a heap, smallest first; the first k of it cost O(k log k). Change nothing meanwhile."""
    frontier = [(heap[0], 0)] if heap else []
    while frontier:
        entry, place = heappop(frontier)
        yield entry
        for below in range(2 * place + 1, min(2 * place + 3, len(heap))):
            heappush(frontier, (heap[below], below))
