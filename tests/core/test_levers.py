"""What an operator does by hand, as far as the core has a part in it: pauses, breakers moved, forecasts meanwhile."""

from __future__ import annotations

from math import inf

import pytest

from extproc.core.breaker import Breaker, Evidence, Signal
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget
from extproc.core.capacity import Absent, Claim, Store, tune
from extproc.core.forecast import Demand
from extproc.core.policy import Bounds, BreakerRules, KvRules, RatioRules
from extproc.core.request import Size
from extproc.core.shares import Standing, Terms
from extproc.core.watermark import Watermark
from tests.core.test_forecast import Scene, lane

MINE = Terms("P2", 2, share=0.5)
OTHER = Terms("P1", 1)


def owed_to_p2() -> Store:
    """Counters at which P2 is owed something, and was refused just now."""
    store: Store = {
        "bucket": TokenBucket(10, 100, 50, 0.0),
        "slots": Slots(4, 0.0),
        "kv": Watermark(KvRules()),
        "usd": Budget(5.0),
    }
    for key in ("bucket", "slots", "kv"):
        store[key].refused(40, 0.0, MINE, short=True)  # type: ignore[union-attr]
        store[key].lanes["P2"].owed = 40.0  # type: ignore[union-attr]
    return store


def test_nothing_is_kept_for_a_lane_that_an_operator_holds() -> None:
    """What it was owed is free for others at once, not when it is found to be silent; it may come back."""
    store = owed_to_p2()
    bucket, slots = store["bucket"], store["slots"]
    assert isinstance(bucket, TokenBucket)
    assert isinstance(slots, Slots)
    assert (bucket.free_at(0.0, OTHER), slots.free_at(0.0, OTHER)) == (10, -36)
    tune(store, [Absent(key, "P2", 2) for key in (*store, "unknown")], 0.0)
    assert (bucket.free_at(0.0, OTHER), slots.free_at(0.0, OTHER)) == (50, 4)
    assert [store[key].owed(0.0) for key in ("bucket", "slots", "kv")] == [{}, {}, {}]  # type: ignore[union-attr]
    assert (slots.seen, store["kv"].seen) == ({}, {})  # type: ignore[union-attr]
    bucket.refused(40, 1.0, MINE, short=True)
    assert bucket.owed(1.0) == {"P2": 0.0}


def test_what_a_lane_took_too_much_it_still_owes() -> None:
    """A lane that is paused does not get rid of that."""
    bucket = TokenBucket(10, 100, 50, 0.0, lanes={"P2": Standing(0.5, 40, 0.0, owed=-30.0)})
    tune({"bucket": bucket}, [Absent("bucket", "P2", 2), Absent("bucket", "P1", 1)], 0.0)
    assert bucket.lanes["P2"].owed == -30.0
    assert not bucket.lanes["P2"].waits(0.0)


def test_nobody_of_a_paused_lane_is_asked_for() -> None:
    """Whoever waits in others is; and only those count as moving."""
    scene = Scene()
    scene.join(Size(80, 20), lane="P0")
    scene.join(Size(80, 20), Size(80, 20), lane="P1")
    scene.lanes.paused["P0"] = inf
    assert [waiter.request.lane for waiter, _ in scene.lanes.heads()] == ["P1"]
    assert (scene.lanes.moving, len(scene.lanes)) == (2, 3)
    del scene.lanes.paused["P0"]
    assert [waiter.request.lane for waiter, _ in scene.lanes.heads()] == ["P0", "P1"]


def test_a_pause_is_forgotten_with_its_lane() -> None:
    """Rules without it leave nothing of it behind."""
    scene = Scene()
    scene.lanes.paused |= {"P0": inf, "P2": 50.0}
    scene.lanes.follow([lane(0), lane(1)], Bounds(), lambda _: None)
    assert scene.lanes.paused == {"P0": inf}


@pytest.mark.parametrize(("until", "expected"), [(inf, 10.0), (100.0, 10.0), (5.0, 30.0)])
def test_what_a_better_lane_holds_is_ahead_only_if_it_goes_before(until: float, expected: float) -> None:
    """Its pause ends within the wait: then all that is in line there comes first."""
    scene = Scene()
    scene.join(Size(80, 20), Size(80, 20), lane="P0")
    scene.lanes.paused["P0"] = until
    assert scene.wait(TokenBucket(10, 1000, 0.0, 0.0)) == pytest.approx(expected)


def test_promises_of_a_better_lane_that_is_paused_are_not_ahead() -> None:
    """Nor is what lower lanes are guaranteed that may not go."""
    scene = Scene(lane(0), lane(1), lane(2, min_share=0.5))
    scene.promise(3.0, lane="P0")
    scene.join(Size(80, 20), lane="P2")
    bucket = TokenBucket(10, 1000, 0.0, 0.0)
    assert scene.wait(bucket) == pytest.approx(40.0)
    scene.lanes.paused["P0"] = inf
    assert scene.wait(bucket) == pytest.approx(20.0)
    scene.lanes.paused["P2"] = inf
    assert scene.wait(bucket) == pytest.approx(10.0)


@pytest.mark.parametrize(("taken", "expected"), [(0.0, 0.0), (10_000.0, 10.0)])
def test_a_bucket_fills_up_while_the_lane_is_held_as_far_as_others_leave_that(taken: float, expected: float) -> None:
    """The forecast is of what comes after the pause, beside which it is counted by who asks."""
    scene = Scene()
    claim = Claim("k/total", 100.0)
    scene.forecast.demand.note(2, (Claim("k/total", taken),), 0.0)
    store: Store = {"k/total": TokenBucket(10, 1000, 0.0, 0.0)}
    wait = scene.forecast.wait_s(scene.waiter(), ["a"], {"a": (claim,)}, store, 0.0, 20.0)
    assert wait == pytest.approx(expected)


def test_what_a_paused_lane_took_is_no_habit_any_more() -> None:
    """Others' is, and their rates are told without its own."""
    demand = Demand()
    for rank in range(3):
        demand.note(rank, (Claim("k", 60.0),), 0.0)
    all_others = demand.beside("k", 1, 0.0)
    assert all_others == pytest.approx(2 * demand.above("k", 1, 0.0))
    demand.forget(0)
    assert demand.above("k", 1, 0.0) == 0.0
    assert demand.beside("k", 1, 0.0) == pytest.approx(all_others / 2)


def test_a_reset_forgets_how_often_it_rested_and_what_was_kept_away() -> None:
    """The next time it rests as if it were the first; answers to what was asked before say nothing."""
    rules = BreakerRules(failures=1, cool_down_s=5, jitter=0.0, malformed=RatioRules(0.3, 300.0, 2))
    breaker = Breaker(rules)
    for signal in (Signal.SICK, Signal.RESTED, Signal.PROBE_FAILED):
        breaker.move(signal, now=0.0, chance=0.0)
    bad = Evidence("r", 20_000, malformed=True)
    for _ in range(2):
        breaker.sizes.record(bad, began=0.0, now=1.0, chance=0.0)
    assert (breaker.openings, breaker.sizes.shut) == (2, ["16000-63999"])
    breaker.move(Signal.RESET, now=2.0, chance=0.0)
    assert (breaker.openings, breaker.graves, breaker.sizes.shut) == (0, 0, [])
    for _ in range(3):
        breaker.sizes.record(bad, began=1.5, now=3.0, chance=0.0)
    assert breaker.sizes.shut == []
    breaker.move(Signal.SICK, now=4.0, chance=0.0)
    assert breaker.rests_until == 9.0


def test_a_rest_that_begins_anew_is_as_long_as_it_was() -> None:
    """However often that is done; and never shorter than what was left."""
    breaker = Breaker(BreakerRules(cool_down_s=5, cool_down_max_s=100, jitter=1.0))
    breaker.move(Signal.SICK, now=0.0, chance=0.0)
    for now in (1.0, 2.0, 3.0):
        breaker.rest_anew(now, 0.0)
    assert (breaker.rests_until, breaker.openings) == (8.0, 1)
    breaker.rests_until = 50.0
    breaker.rest_anew(4.0, 0.5)
    assert breaker.rests_until == 50.0
