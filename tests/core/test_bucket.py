"""Counting what flows and what is held."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.bucket import EPSILON, Slots, TokenBucket

rates = st.floats(0.01, 100_000)
capacities = st.floats(1, 1_000_000)
amounts = st.floats(0, 2_000_000)
steps = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "take", "give"]),
        amounts,
        st.one_of(st.just(0.0), st.floats(0, 100)),
    ),
    max_size=40,
)


@given(rates, capacities, steps)
def test_any_window_takes_at_most_capacity_and_refill(
    rate: float, capacity: float, steps: list[tuple[str, float, float]]
) -> None:
    """Between any two moments no more is taken than a full bucket, its refill and what was given back meanwhile."""
    bucket = TokenBucket(rate, capacity, capacity, 0.0)
    now, largest = 0.0, 0.0
    moments = [(now, 0.0, 0.0)]  # time, taken and given so far
    for kind, amount, pause in steps:
        now += pause
        _, taken, given_back = moments[-1]
        if kind == "give":
            bucket.change(amount, now)
            given_back += amount
        elif bucket.wait_for(amount, now) == 0:
            bucket.change(-amount, now)
            taken += amount
            largest = max(largest, amount)
        moments.append((now, taken, given_back))
    beyond = max(0.0, largest - capacity)
    for i, (start, taken_before, given_before) in enumerate(moments):
        for end, taken, given_back in moments[i + 1 :]:
            allowed = capacity + rate * (end - start) + given_back - given_before + beyond
            assert taken - taken_before <= allowed + EPSILON + 1e-9 * allowed


@given(rates, capacities, amounts, st.floats(-1_000_000, 1_000_000))
def test_waiting_as_long_as_told_is_enough_and_needed(
    rate: float, capacity: float, amount: float, level: float
) -> None:
    """After `wait_for` seconds the amount is there; a tenth earlier it is not."""
    bucket = TokenBucket(rate, capacity, min(level, capacity), 0.0)
    wait = bucket.wait_for(amount, 0.0)
    assert bucket.wait_for(amount, wait) <= 1e-9 * max(1.0, wait)
    if wait * rate > 1:
        assert bucket.wait_for(amount, wait * 0.9) > 0


@given(rates, capacities, st.lists(st.tuples(st.floats(-100, 100), st.floats(-1000, 1000)), max_size=30))
def test_a_clock_that_goes_back_neither_refills_nor_takes(
    rate: float, capacity: float, steps: list[tuple[float, float]]
) -> None:
    """Time that is passed twice refills once: the level is the one that a clock without jumps back would give."""
    bucket, now, latest = TokenBucket(rate, capacity, 0.0, 0.0), 0.0, 0.0
    level = 0.0
    for jump, amount in steps:
        now += jump
        level = min(capacity, level + rate * max(0.0, now - latest))
        latest = max(latest, now)
        assert bucket.level_at(now) == pytest.approx(level, abs=1e-6, rel=1e-9)
        bucket.change(amount, now)
        level = min(capacity, level + amount)


def test_debt_is_paid_before_anything_is_taken() -> None:
    """Usage beyond its estimate is charged below zero, and the wait grows by it."""
    bucket = TokenBucket(10, 100, 100, 0.0)
    bucket.change(-150, 0.0)
    assert bucket.level_at(0.0) == -50
    assert bucket.wait_for(0, 0.0) == 5
    assert bucket.wait_for(20, 0.0) == 7
    assert bucket.wait_for(20, 7.0) == 0


def test_a_request_larger_than_the_bucket_takes_a_full_one_into_debt() -> None:
    """It waits for a full bucket, no longer, and leaves the difference as debt."""
    bucket = TokenBucket(10, 100, 90, 0.0)
    assert bucket.wait_for(1000, 0.0) == 1
    assert bucket.wait_for(1000, 1.0) == 0
    bucket.change(-1000, 1.0)
    assert bucket.level_at(1.0) == -900
    assert bucket.wait_for(1000, 1.0) == 100


def test_what_is_given_back_never_overfills() -> None:
    """Refunds stop at capacity."""
    bucket = TokenBucket(10, 100, 90, 0.0)
    bucket.change(500, 0.0)
    assert bucket.level_at(0.0) == 100


def test_a_bucket_that_never_refills_is_waited_for_forever() -> None:
    """Rate 0: what is there can be taken, what is not never comes."""
    bucket = TokenBucket(0, 100, 50, 0.0)
    assert bucket.wait_for(50, 0.0) == 0
    assert bucket.wait_for(51, 0.0) == inf


def test_a_thousandth_of_a_token_is_not_waited_for() -> None:
    """Rounding never makes a wait."""
    assert TokenBucket(10, 100, 100 - EPSILON / 2, 0.0).wait_for(100, 0.0) == 0


def test_resize_keeps_the_level_as_far_as_it_fits() -> None:
    """A new limit changes rate and capacity from now on; it neither fills the bucket nor forgives debt."""
    bucket = TokenBucket(10, 100, 0.0, 0.0)
    bucket.resize(1, 30, 5.0)
    assert (bucket.rate, bucket.capacity, bucket.level_at(5.0), bucket.level_at(6.0)) == (1, 30, 30, 30)
    bucket.resize(2, 500, 4.0)
    assert (bucket.level_at(4.0), bucket.level_at(5.0), bucket.level_at(6.0)) == (30, 30, 32)
    bucket.change(-100, 6.0)
    bucket.resize(2, 10, 6.0)
    assert bucket.level_at(6.0) == -68


@given(st.integers(0, 20), st.lists(st.sampled_from([1.0, -1.0]), max_size=60))
def test_slots_are_held_up_to_the_limit(limit: int, wishes: list[float]) -> None:
    """A slot is free while fewer than `limit` are held, and a released one is free again."""
    slots, held = Slots(limit), 0
    for wish in wishes:
        assert slots.wait_for(1, 0.0) == (0.0 if held < limit else inf)
        if wish < 0 and slots.wait_for(1, 0.0) == 0:
            slots.change(-1, 0.0)
            held += 1
        elif wish > 0 and held:
            slots.change(1, 0.0)
            held -= 1
    assert slots.used == held <= limit


def test_slots_pass_their_limit_only_by_being_told() -> None:
    """A running request that moves in is counted above the limit; nothing is free until that many have left."""
    slots = Slots(1, 1.0)
    slots.change(-1, 0.0)
    waits = []
    for _ in range(3):
        waits.append(slots.wait_for(1, 0.0))
        slots.change(1, 0.0)
    assert waits == [inf, inf, 0.0]


def test_steady_taking_goes_on_for_ever() -> None:
    """Steady taking: each second's worth can be taken each second, for ever."""
    bucket = TokenBucket(10, 10, 10, 0.0)
    for before, now in pairwise(range(100)):
        assert bucket.wait_for(10, before) == 0
        bucket.change(-10, before)
        assert bucket.wait_for(10, now - 0.5) == pytest.approx(0.5)
