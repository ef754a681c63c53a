"""Following limits that change while they are in use."""

from __future__ import annotations

from extproc.core.bucket import Slots, TokenBucket
from extproc.shared.memory import MemoryCapacity
from tests.doubles import HandClock


def test_a_learned_bucket_starts_empty() -> None:
    """What the last minute used is not known, so a burst on top of it would be a risk."""
    clock = HandClock()
    capacity = MemoryCapacity(clock, {})
    capacity.resize("b", 10, 100)
    bucket = capacity.levels()["b"]
    assert isinstance(bucket, TokenBucket)
    assert bucket.level_at(clock.now) == 0
    clock.now += 3
    assert bucket.level_at(clock.now) == 30


def test_a_known_bucket_keeps_its_level_as_far_as_it_fits() -> None:
    """It is the same bucket with another rate and size."""
    clock = HandClock()
    capacity = MemoryCapacity(clock, {"b": TokenBucket(10, 100, 80, clock.now)})
    capacity.resize("b", 1, 50)
    assert capacity.levels()["b"] == TokenBucket(1, 50, 50, clock.now)


def test_slots_follow_a_new_limit_and_stay_held() -> None:
    """A smaller limit cuts nobody off; lifting it forgets the counter; a new one starts with nothing held."""
    capacity = MemoryCapacity(HandClock(), {"s": Slots(4, 3.0)})
    capacity.resize_slots("s", 2)
    assert capacity.levels()["s"] == Slots(2, 3.0)
    capacity.resize_slots("s", None)
    capacity.resize_slots("unknown", None)
    assert capacity.levels() == {}
    capacity.resize_slots("s", 5)
    assert capacity.levels()["s"] == Slots(5)
