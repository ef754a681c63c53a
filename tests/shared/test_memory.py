"""Capacity in memory: what it starts from is what it counts in."""

from __future__ import annotations

from extproc.core.bucket import Slots
from extproc.core.capacity import Seats
from extproc.shared.memory import MemoryCapacity
from tests.doubles import HandClock


async def test_it_counts_in_the_store_it_was_given() -> None:
    """What `levels` shows is the store itself, at no cost."""
    store = {"s": Slots(4, 3.0)}
    capacity = MemoryCapacity(HandClock(), store)
    await capacity.tune([Seats("s", 2)])
    assert capacity.levels() is store
    assert store == {"s": Slots(2, 3.0)}
