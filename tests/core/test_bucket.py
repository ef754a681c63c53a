"""Counting what flows and what is held."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.bucket import EPSILON, Slots, TokenBucket
from extproc.core.shares import LAPSE_S, SEEN_S, Standing, Terms

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


BEST, BATCH = Terms("P0", 0), Terms("P2", 2, share=0.1)


def waiting(level: float = 0.0, need: float = 20.0) -> TokenBucket:
    """A bucket of 100 that refills at 10 per second, where P2 has been refused `need` at time 0."""
    bucket = TokenBucket(10, 100, level, 0.0)
    bucket.refused(need, 0.0, BATCH, short=True)
    return bucket


def test_a_set_aside_grows_with_what_flows_in_while_its_lane_waits() -> None:
    """At the lane's share of the rate, up to what its first waiter needs; others see the level without it."""
    bucket = waiting()
    assert [bucket.owed(float(t))["P2"] for t in (0, 1)] == [0, 1]
    assert (bucket.free_at(1.0, BEST), bucket.free_at(1.0)) == (9, 9)
    for t in range(1, 31):
        bucket.refused(20, float(t), BATCH, short=True)
    assert bucket.owed(30.0)["P2"] == 20
    assert bucket.free_at(30.0, BEST) == 80
    assert bucket.wait_for(80, 30.0, BEST) == 0
    assert bucket.wait_for(81, 30.0, BEST) == pytest.approx(0.1)


def test_who_is_due_takes_whatever_it_would_keep_free() -> None:
    """The guaranteed share is had in spite of keep_free, and the wait for it is exact."""
    bucket, batch = waiting(), Terms("P2", 2, share=0.1, keep_free=0.9)
    assert bucket.wait_for(5, 0.0, batch) == pytest.approx(5.0)
    bucket.refused(5, 1.9, batch, short=True)
    bucket.refused(5, 3.8, batch, short=True)
    assert bucket.due_in(5, 3.8, batch) == pytest.approx(1.2)
    assert bucket.due_in(5, 5.0, batch) == 0
    assert bucket.wait_for(5, 5.0, batch) == 0
    assert bucket.wait_for(5, 5.0, Terms("P2", 2, keep_free=0.9)) > 0
    assert bucket.free_at(5.0, batch) == 5


def test_a_set_aside_is_a_claim_on_what_is_there_not_a_purse() -> None:
    """Charges of others may leave less than it in the bucket; it is taken when the level holds it."""
    bucket = waiting(level=100)
    bucket.refused(20, 1.9, BATCH, short=True)
    bucket.change(-300, 1.9)
    assert bucket.level_at(1.9) == -200
    assert bucket.owed(1.9)["P2"] == pytest.approx(1.9)
    assert bucket.due_in(1, 1.9, BATCH) == pytest.approx(20.1)
    assert bucket.free_at(1.9, BATCH) == -200


def test_a_set_aside_outlasts_the_debt_of_others() -> None:
    """While what others took too much flows in again, the lane goes on being owed its share of that."""
    bucket = waiting(level=-100)
    for t in range(1, 13):
        bucket.refused(20, float(t), BATCH, short=True)
    assert bucket.owed(12.0)["P2"] == 12
    bucket = waiting(level=-400)
    for t in range(1, 60):
        bucket.refused(20, float(t), BATCH, short=True)
    assert bucket.level_at(59.0) == 100
    assert bucket.owed(59.0)["P2"] == pytest.approx(42)  # 42 s until the level held the 20 that it needs


def test_what_a_lane_gets_is_paid_from_its_set_aside() -> None:
    """A minimum, not an extra: also when there would have been enough for everybody."""
    bucket = waiting(level=50)
    bucket.refused(20, 1.9, BATCH, short=True)
    bucket.take(1.5, 1.9, BATCH)
    assert bucket.owed(1.9)["P2"] == pytest.approx(0.4)
    bucket.take(30, 1.9, BATCH)
    assert bucket.owed(1.9)["P2"] == 0
    bucket.take(10, 1.9, BEST)
    assert bucket.owed(1.9)["P2"] == 0


def test_a_lane_that_went_before_its_turn_with_more_than_a_bucket_owes_it() -> None:
    """So that its share stays a share; the debt is paid by waiting, also by not being there."""
    bucket = TokenBucket(10, 100, 100, 0.0, lanes={"P2": Standing(0.1, 100, kept=0.0, owed=100.0)})
    bucket.take(300, 0.0, BATCH, passing=True)
    assert bucket.owed(0.0)["P2"] == -200
    assert bucket.free_at(0.0, BEST) == -200
    assert bucket.owed(1.0)["P2"] == -199
    assert bucket.lanes["P2"].owed == -200
    bucket.change(0, 150.0)
    assert bucket.lanes["P2"].owed == -50
    bucket.take(10, 150.0, BATCH)
    assert bucket.lanes["P2"].owed == -50
    bucket.change(0, 250.0)
    assert bucket.lanes == {}


def test_in_its_own_turn_a_lane_owes_nothing_whatever_it_takes() -> None:
    """Borrowing what others leave idle is free."""
    bucket = TokenBucket(10, 100, 100, 0.0, lanes={"P2": Standing(0.1, 100, kept=0.0, owed=10.0)})
    bucket.take(300, 0.0, BATCH)
    assert bucket.owed(0.0)["P2"] == 0


def test_a_lane_that_stopped_asking_keeps_nothing() -> None:
    """Two seconds after it last asked, others have everything, and when it asks again it begins anew."""
    bucket = waiting(level=50)
    assert bucket.free_at(LAPSE_S - 0.1, BEST) == pytest.approx(50 + 9 * (LAPSE_S - 0.1))
    assert bucket.free_at(LAPSE_S, BEST) == 50 + 10 * LAPSE_S
    assert bucket.due_in(1, LAPSE_S, BATCH) == inf
    assert bucket.owed(LAPSE_S) == {}
    bucket.refused(20, LAPSE_S, BATCH, short=True)
    assert bucket.owed(LAPSE_S)["P2"] == 0


def test_a_wait_for_what_others_are_owed_is_short_because_they_may_leave() -> None:
    """Nobody waits for hours beside a set-aside whose lane may be gone; a wait of its own is told in full."""
    bucket = TokenBucket(0.001, 100, 100, 0.0, lanes={"P2": Standing(0.1, 100, kept=0.0, owed=100.0)})
    assert bucket.wait_for(50, 0.0, BEST) == LAPSE_S
    bucket.change(-100, 0.0)
    assert bucket.wait_for(50, 0.0, BEST) == pytest.approx(50_000)
    still = TokenBucket(0, 100, 40, 0.0, lanes={"P2": Standing(0.1, 100, kept=0.0, owed=10.0)})
    assert (still.wait_for(30, 0.0, BEST), still.wait_for(35, 0.0, BEST), still.wait_for(41, 0.0, BEST)) == (0, 2, inf)


def test_a_full_bucket_serves_whoever_comes_while_nobody_is_due() -> None:
    """Else it would overflow, and a large request would wait for a set-aside to be used. Who is due goes first."""
    standings = {name: Standing(0.1, 90, kept=0.0, owed=60.0) for name in ("P1", "P2")}
    bucket = TokenBucket(10, 100, 99, 0.0, lanes=standings)
    assert bucket.wait_for(50, 0.0, BEST) == pytest.approx(0.1)
    assert bucket.wait_for(50, 0.1, BEST) == 0
    standings["P2"].owed = 90.0
    assert bucket.wait_for(50, 0.1, BEST) == LAPSE_S


def test_a_wait_beside_a_growing_set_aside_counts_with_its_growth() -> None:
    """What flows in is shared, so a request of the best lane needs 1 / (1 - share) of the time."""
    bucket = waiting(level=0, need=50)
    assert bucket.wait_for(9, 0.0, BEST) == pytest.approx(1.0)
    assert bucket.wait_for(9, 1.0, BEST) == 0


def test_what_is_kept_free_is_left_by_the_lane_that_keeps_it() -> None:
    """Others may take it. A request larger than the rest waits for a full bucket, no longer."""
    bucket, batch = TokenBucket(10, 100, 50, 0.0), Terms("P2", 2, keep_free=0.4)
    assert (bucket.free_at(0.0, batch), bucket.free_at(0.0, BEST)) == (pytest.approx(10), 50)
    assert bucket.wait_for(10, 0.0, batch) == 0
    assert bucket.wait_for(30, 0.0, batch) == pytest.approx(2.0)
    assert bucket.wait_for(70, 0.0, batch) == bucket.wait_for(1000, 0.0, batch) == pytest.approx(5.0)
    assert bucket.wait_for(1000, 5.0, batch) == 0


def test_the_reserve_is_for_lanes_that_do_not_yield() -> None:
    """What they keep free counts if it is more. It lets go as the bucket refills; a share is had all the same."""
    bucket = TokenBucket(10, 100, 30, 0.0, reserve=0.15)
    low, lower = Terms("P1", 1, yields=True), Terms("P2", 2, keep_free=0.4, yields=True)
    assert [bucket.free_at(0.0, terms) for terms in (BEST, Terms("P1", 1), low, lower)] == pytest.approx(
        [30, 30, 15, -10]
    )
    assert [bucket.wait_for(20, 0.0, terms) for terms in (BEST, low, lower)] == pytest.approx([0, 0.5, 3])
    assert bucket.wait_for(20, 0.5, low) == 0
    sharing, owed = Terms("P1", 1, share=0.5, yields=True), {"P1": Standing(0.5, 30, kept=0.0, owed=30.0)}
    bucket = TokenBucket(10, 100, 30, 0.0, reserve=0.15, lanes=owed)
    assert (bucket.wait_for(30, 0.0, sharing), bucket.free_at(0.0, sharing)) == (0, 30)


def test_a_smooth_lane_takes_evenly() -> None:
    """After what it took has flowed in, whatever else is in the bucket; others are not paced."""
    bucket, even = TokenBucket(10, 1000, 500, 0.0), Terms("P2", 2, smooth=True)
    times, now = [], 0.0
    for amount in (50, 20, 30, 10):
        now += bucket.wait_for(amount, now, even)
        assert bucket.wait_for(amount, now, even) == 0
        bucket.take(amount, now, even)
        times.append(now)
    assert times == pytest.approx([0, 5, 7, 10])
    assert bucket.wait_for(50, now, BEST) == 0
    assert bucket.due_in(5, now, even) == inf


def test_a_smooth_lane_in_a_full_bucket_need_not_wait() -> None:
    """When much of what it took came back, nothing is gained by waiting."""
    bucket, even = TokenBucket(10, 100, 100, 0.0), Terms("P2", 2, smooth=True)
    bucket.take(80, 0.0, even)
    assert bucket.wait_for(10, 0.0, even) == pytest.approx(8.0)
    bucket.change(70, 1.0)
    assert bucket.wait_for(10, 1.0, even) == 0


def test_a_smooth_lane_that_waits_only_for_its_pace_closes_nothing() -> None:
    """Those behind may have what it leaves; not so when the bucket lacks, or is paused."""
    bucket, even = TokenBucket(10, 100, 50, 0.0), Terms("P1", 1, share=0.5, smooth=True)
    bucket.take(20, 0.0, even)
    assert bucket.wait_for(20, 0.0, even) == pytest.approx(2.0)
    assert not bucket.closes(20, 0.0, even)
    assert bucket.closes(31, 0.0, even)
    assert bucket.closes(20, 0.0, BEST)
    bucket.closed_until = 1.0
    assert bucket.closes(20, 0.0, even)
    bucket.refused(20, 0.0, even, short=True)
    assert bucket.due_in(1, 1.0, even) == pytest.approx(1.0)


def test_a_pace_follows_a_new_rate() -> None:
    """A bucket that stood still does not stop the lane for ever."""
    bucket, even = TokenBucket(0, 100, 50, 0.0), Terms("P2", 2, smooth=True)
    bucket.take(20, 0.0, even)
    assert bucket.wait_for(20, 5.0, even) == inf
    bucket.resize(10, 100, 5.0)
    assert bucket.wait_for(20, 5.0, even) == pytest.approx(2.0)
    bucket.change(0, 6.0)
    assert bucket.paced == {"P2": pytest.approx(10)}
    bucket.change(0, 8.0)
    assert bucket.paced == {}


def test_nothing_is_taken_in_a_pause() -> None:
    """Whoever is due waits, too; what flows in meanwhile stays."""
    bucket = TokenBucket(10, 100, 50, 0.0, closed_until=3.0, lanes={"P2": Standing(0.1, 5, kept=0.0, owed=5.0)})
    assert bucket.wait_for(1, 0.0) == bucket.wait_for(5, 0.0, BATCH) == bucket.due_in(5, 0.0, BATCH) == 3
    assert bucket.wait_for(100, 0.0) == 5.0
    assert bucket.wait_for(1, 3.0) == 0
    assert bucket.level_at(3.0) == 80


def test_a_new_size_trims_needs_and_set_asides_to_it() -> None:
    """Growth up to then is at the former rate; nobody waits for more than there can be."""
    bucket = waiting(level=50, need=80)
    bucket.lanes["P2"].owed = 40.0
    bucket.resize(100, 30, 1.0)
    assert (bucket.lanes["P2"].need, bucket.lanes["P2"].owed) == (30, 30)
    bucket = waiting(level=50, need=80)
    bucket.lanes["P2"].owed = 110.0  # made good after a debt
    bucket.resize(20, 100, 0.0)
    assert bucket.lanes["P2"].owed == 110
    bucket = waiting(level=50, need=80)
    bucket.resize(100, 300, 1.0)
    assert (bucket.lanes["P2"].need, bucket.owed(1.0)["P2"], bucket.owed(1.5)["P2"]) == (80, 1, 6)


def test_what_is_known_of_the_level_moves_it() -> None:
    """Not above `most`, not below `least`, never above capacity; debt is found out like that, too."""
    bucket = TokenBucket(10, 100, 50, 0.0)
    for least, most, level in ((-inf, 20, 20), (30, inf, 30), (500, inf, 100), (-inf, -5, -5), (50, 40, 40)):
        bucket.clamp(least, most, 0.0)
        assert bucket.level_at(0.0) == level


def test_the_debt_of_a_bucket_that_only_counts_is_bounded() -> None:
    """What it would say now must not depend on what nobody stopped an hour ago."""
    bucket = TokenBucket(10, 100, 50, 0.0, shadow=True)
    bucket.take(1e6, 0.0)
    assert bucket.level_at(0.0) == -100


def test_the_rate_a_lane_can_count_on() -> None:
    """All that others who wait are not guaranteed, and in any case its own share."""
    bucket = waiting()
    bucket.refused(20, 0.0, Terms("P1", 1, share=0.7), short=True)
    rates = [bucket.rate_for(terms, 0.0) for terms in (BEST, BATCH, Terms("P1", 1, share=0.7))]
    assert rates == pytest.approx([2, 3, 9])
    assert bucket.rate_for(BEST, LAPSE_S) == 10


def test_waiting_without_a_share_leaves_no_trace() -> None:
    """Nobody is set anything aside for whom nothing was guaranteed."""
    bucket = TokenBucket(10, 100, 0, 0.0)
    bucket.refused(20, 0.0, BEST, short=True)
    assert bucket.lanes == {}


lanes = st.sampled_from(
    [Terms(), BEST, Terms("P1", 1, 0.3), Terms("P2", 2, 0.2, keep_free=0.5), Terms("P3", 3, 0.1, smooth=True)]
)


@given(
    st.floats(0.01, 1000),
    st.lists(
        st.tuples(lanes, st.sampled_from(["ask", "ask", "ask", "give"]), st.floats(0, 300), st.floats(-1, 5)),
        max_size=60,
    ),
)
def test_whatever_lanes_ask_any_window_takes_at_most_capacity_and_refill(
    rate: float, steps: list[tuple[Terms, str, float, float]]
) -> None:
    """Shares, set-asides and paces never make tokens, not even when the clock jumps back."""
    bucket, now, latest, largest = TokenBucket(rate, 100, 100, 0.0), 0.0, 0.0, 0.0
    moments = [(0.0, 0.0, 0.0)]
    for terms, kind, amount, pause in steps:
        now += pause
        latest = max(latest, now)
        _, taken, given_back = moments[-1]
        if kind == "give":
            bucket.change(amount, now)
            given_back += amount
        elif (wait := bucket.wait_for(amount, now, terms)) == 0:
            bucket.take(amount, now, terms)
            taken, largest = taken + amount, max(largest, amount)
        else:
            bucket.refused(amount, now, terms, short=True)
            assert wait > 0
        moments.append((latest, taken, given_back))
    beyond = max(0.0, largest - 100)
    for i, (start, before, given_before) in enumerate(moments):
        for end, taken, given_back in moments[i + 1 :]:
            allowed = 100 + rate * (end - start) + given_back - given_before + beyond
            assert taken - before <= allowed + EPSILON * 60 + 1e-9 * allowed


def test_a_due_lane_is_left_a_place() -> None:
    """By all others, whatever it keeps free itself; and not for longer than it asks for it."""
    slots = Slots(2, 1.0, lanes={"P2": Standing(0.1, 1.0, kept=0.0, owed=1.0)})
    shy = Terms("P2", 2, share=0.1, keep_free=0.9)
    assert (slots.wait_for(1, 0.0, BEST), slots.wait_for(1, 0.0), slots.wait_for(1, 0.0, shy)) == (2, 2, 0)
    assert (slots.free_at(0.0, BEST), slots.free_at(0.0, shy)) == (0, 1)
    assert (slots.due_in(1, 0.0, shy), slots.due_in(1, 0.0, BEST)) == (0, inf)
    assert slots.wait_for(1, LAPSE_S, BEST) == 0
    slots.used = 2.0
    assert (slots.wait_for(1, 0.0, BEST), slots.due_in(1, 0.0, shy)) == (inf, inf)


def test_turns_are_counted_in_grants() -> None:
    """Every grant at the key adds the share of it; one's own turn is paid for, and never below nothing."""
    slots = Slots(9)
    slots.refused(1, 0.0, Terms("P2", 2, share=0.4), short=True)
    credit = []
    for terms in (BEST, BEST, BEST, BATCH, BATCH, Terms()):
        slots.take(1, 0.0, terms)
        credit.append(slots.owed(0.0)["P2"])
    assert credit == pytest.approx([0.4, 0.8, 1.2, 0.6, 0.0, 0.4])


def test_slots_are_kept_free_for_better_lanes_that_were_seen() -> None:
    """So many of a hundred, rounded up, never all; not for a lane that has not come for a minute, nor a lower one."""
    shy = Terms("P1", 1, keep_free=0.25)
    slots = Slots(9)
    assert slots.free_at(0.0, shy) == 9
    slots.refused(1, 0.0, Terms("P2", 2), short=True)
    slots.refused(1, 0.0, shy, short=True)
    assert slots.free_at(0.0, shy) == 9
    slots.take(1, 0.0, BEST)
    assert slots.free_at(0.0, shy) == 9 - 1 - 3
    assert slots.wait_for(1, 0.0, shy) == 0
    slots.used = 6.0
    assert (slots.wait_for(1, 0.0, shy), slots.wait_for(1, 0.0, BEST)) == (LAPSE_S, 0)
    assert slots.wait_for(1, SEEN_S, shy) == 0
    slots.refused(1, 500.0, BEST, short=True)
    assert (slots.free_at(510.0, shy), slots.free_at(500.0 + SEEN_S, shy)) == (0, 3)
    assert Slots(8, seen={0: 0.0}).free_at(0.0, shy) == 6
    one, none, endless = (Slots(limit, seen={0: 0.0}) for limit in (1, 0, inf))
    assert (one.wait_for(1, 0.0, shy), none.wait_for(1, 0.0, shy), endless.wait_for(1, 0.0, shy)) == (0, inf, 0)


def test_slots_in_a_pause_are_not_given() -> None:
    """Who is due waits, too. That all are held comes first: then only a release can help."""
    slots = Slots(1, closed_until=5.0, lanes={"P2": Standing(0.1, 1.0, kept=0.0, owed=1.0)})
    assert (slots.wait_for(1, 0.0), slots.wait_for(1, 0.0, BATCH), slots.due_in(1, 1.0, BATCH)) == (5, 5, 4)
    assert slots.wait_for(1, 4.5) == 0.5
    slots.take(1, 0.0)
    assert slots.wait_for(1, 0.0) == inf


def test_what_nobody_holds_cannot_be_released() -> None:
    """A release too many does not make a slot."""
    slots = Slots(1, 1.0)
    slots.change(1, 0.0)
    slots.change(1, 0.0)
    slots.change(-1, 0.0)
    assert slots.used == 1
    assert slots.wait_for(1, 0.0) == inf


def test_endless_slots_count_what_is_held() -> None:
    """An upstream without a limit can be paused, and shows how much runs there."""
    slots = Slots(inf)
    slots.take(1, 0.0, BEST)
    assert (slots.wait_for(1, 0.0, BATCH), slots.used, slots.closes(1, 0.0, BATCH)) == (0, 1, True)
