"""A bucket in step with the provider: tightened at once, loosened slowly, never beyond what is reported."""

from __future__ import annotations

import math
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core import pacing
from extproc.core.bucket import TokenBucket
from extproc.core.capacity import Declare, Level, Pause, Resize, Seats, tune
from extproc.core.pacing import Brakes, Pacer, Reported, Reset, Rules, shortage_s
from extproc.core.ramp import Ramp
from tests.core.pacing_world import World

T = 1000.0
KEY = "upstream/a/m/total"
RULES = Rules(rate=95.0, capacity=950.0, headroom=0.05)
"""Of a limit of 6,000 per minute, 100 per second."""


class Desk:
    """A pacer, its bucket, and how the two are brought together."""

    def __init__(self, rules: Rules = RULES, level: float = 950.0, ramp: Ramp | None = None) -> None:
        self.pacer = Pacer(KEY, rules, ramp)
        known = math.isfinite(rules.rate)
        self.store = {KEY: TokenBucket(rules.rate, rules.capacity, level, T)} if known else {}
        self.now = T

    @property
    def bucket(self) -> TokenBucket:
        return self.store[KEY]

    def level(self) -> float | None:
        return self.store[KEY].level_at(self.now) if KEY in self.store else None

    def spend(self, amount: float, later: float = 0.0) -> None:
        self.bucket.take(amount + later, self.now)
        self.pacer.sent(amount, later, self.now)

    def apply(self, moves):
        tune(self.store, [move.tuning for move in moves], self.now)
        return [move.tuning for move in moves]

    def told(self, limit=6000.0, remaining=None, *, age=0.0, ago=None, window_s=60.0, reset_s=None, reset=Reset.FULL):
        """A reply of now whose first byte came `age` ago, to a request that departed `ago`."""
        seen = Reported("tokens", limit, remaining, reset_s, window_s, reset)
        departed = self.now - (age + 1.0 if ago is None else ago)
        return self.apply(self.pacer.told(seen, departed, self.now - age, self.level(), self.now))

    def after(self, seconds: float) -> Desk:
        self.now += seconds
        return self


# The limit.


def test_a_smaller_limit_is_followed_by_the_first_reply():
    """Headroom is left below it; the bucket shrinks with it."""
    desk = Desk()
    (resized,) = desk.told(3000.0)
    assert resized == Resize(KEY, pytest.approx(47.5), pytest.approx(475.0))
    assert desk.told(3000.0) == []


def test_a_larger_limit_is_believed_after_three_replies_in_a_row():
    """The smallest of the three; one in between that says otherwise starts it anew."""
    desk = Desk()
    desk.told(600.0)
    assert desk.after(1).told(1200.0) == []
    assert desk.after(1).told(1200.0) == []
    assert desk.after(1).told(600.0) == []
    assert desk.after(1).told(1500.0) == []
    assert desk.after(1).told(1200.0) == []
    assert desk.after(1).told(1800.0) == [Resize(KEY, pytest.approx(19.0), pytest.approx(190.0))]


def test_replies_of_the_same_moment_are_one():
    """Three at once prove no more than one."""
    desk = Desk()
    desk.told(600.0)
    desk.after(1)
    assert [desk.after(0.01).told(1200.0) for _ in range(9)] == [[]] * 9
    assert desk.after(0.1).told(1200.0) == []
    assert desk.after(0.1).told(1200.0) != []


def test_nothing_grows_beyond_what_is_configured():
    """However large the limit that is reported, however often."""
    desk = Desk()
    assert [desk.after(1).told(60_000.0, 60_000.0) for _ in range(9)] == [[]] * 9
    desk.told(600.0)
    for _ in range(9):
        desk.after(1).told(60_000.0)
    assert (desk.bucket.rate, desk.bucket.capacity) == (pytest.approx(95.0), pytest.approx(950.0))


def test_a_limit_per_second_makes_a_small_bucket():
    """A second's worth, not ten."""
    desk = Desk()
    (resized,) = desk.told(100.0, window_s=1.0)
    assert resized == Resize(KEY, pytest.approx(95.0), pytest.approx(95.0))


def test_a_larger_rate_over_a_smaller_window_holds_less_at_once():
    """60 a minute, then 2 a second: more waits for others to agree, but only a window's worth fits."""
    desk = Desk()
    desk.told(60.0)
    assert (desk.bucket.rate, desk.bucket.capacity) == (pytest.approx(0.95), pytest.approx(9.5))
    assert desk.after(1).told(2.0, window_s=1.0) == [Resize(KEY, pytest.approx(0.95), pytest.approx(1.9))]
    assert desk.after(1).told(2.0, window_s=1.0) == []


@pytest.mark.parametrize(
    ("limit", "remaining"),
    [
        (0.0, 0.0), (-1.0, 0.0), (-1.0, None), (math.nan, 5.0), (inf, 5.0), (6000.0, -1.0), (6000.0, 6001.0),
        (6000.0, math.nan), (5.0, 5.0), (None, None), (None, -1.0), (None, math.nan),
    ],
)  # fmt: skip
def test_nonsense_changes_nothing(limit, remaining):
    """What contradicts itself, is no number, or is a thousandth of what is configured."""
    desk = Desk()
    assert desk.told(limit, remaining) == []
    assert (desk.bucket.rate, desk.level()) == (95.0, 950.0)


def test_older_news_than_what_is_known_says_nothing():
    """Answers end in another order than they began."""
    desk = Desk()
    desk.told(600.0, 100.0)
    desk.after(1)
    assert desk.told(300.0, 0.0, age=1.0) == []
    assert desk.told(300.0, 0.0, age=2.0) == []


def test_a_limit_is_learned_from_nothing():
    """The first reply declares the bucket, with what is there of it; without a word of what is there it is empty."""
    rules = Rules(headroom=0.05, burst_s=10.0)
    desk = Desk(rules)
    assert not desk.pacer.known
    assert desk.pacer.due(T) == []
    (declared,) = desk.told(6000.0, 500.0)
    assert declared == Declare(KEY, TokenBucket(95.0, 950.0, 475.0, T))
    assert desk.pacer.known
    (declared,) = Desk(rules).told(6000.0)
    assert declared.counter.level == 0.0
    assert Desk(rules).told(None, 500.0) == []


def test_what_is_configured_is_not_declared_anew():
    """Where its counter is not known here, there is nothing to do."""
    desk = Desk()
    desk.store.clear()
    assert desk.told(6000.0, 0.0) == []


# The level.


def test_the_level_falls_at_once_to_what_remains():
    """Less headroom."""
    desk = Desk()
    assert desk.told(remaining=200.0) == [Level(KEY, most=pytest.approx(190.0))]
    assert desk.level() == pytest.approx(190.0)


def test_what_remained_is_rolled_forward():
    """By the refill since its first byte, and by what was sent since; that of the request itself is in it."""
    desk = Desk(level=950.0)
    desk.spend(100.0)
    desk.after(2.0).spend(80.0)
    desk.after(3.0)
    (level,) = desk.told(remaining=100.0, age=4.0, ago=5.0)
    assert level.most == pytest.approx((100.0 + 4 * 100.0) * 0.95 - 80.0)


def test_what_was_sent_just_before_may_not_have_been_counted():
    """A request may be on its way for a tenth of a second."""
    desk = Desk()
    desk.after(1.0).spend(50.0)
    desk.after(0.05)
    (level,) = desk.told(remaining=200.0, ago=5.0)
    assert level.most == pytest.approx(190.0 - 50.0)
    desk = Desk()
    desk.after(1.0).spend(50.0)
    desk.after(0.05)
    (level,) = desk.told(remaining=200.0, ago=0.05)
    assert level.most == pytest.approx(190.0)


def test_output_that_is_not_yet_written_is_not_yet_counted():
    """Where what was used is charged: running answers count in full, ended ones by what they wrote since."""
    desk = Desk(level=950.0)
    desk.spend(10.0, 200.0)
    desk.spend(10.0, 100.0)
    desk.after(1.0)
    told_at = desk.now
    desk.after(1.0)
    desk.pacer.over(100.0, 40.0, desk.now)
    (level,) = desk.told(remaining=400.0, age=desk.now - told_at, ago=2.0)
    assert level.most == pytest.approx(500.0 * 0.95 - 200.0 - 40.0)


def test_news_too_old_to_be_rolled_forward_teach_the_limit_alone():
    """After a minute, or where what was sent since is no longer known."""
    desk = Desk()
    assert desk.told(3000.0, 0.0, age=61.0) == [Resize(KEY, pytest.approx(47.5), pytest.approx(475.0))]
    desk = Desk()
    for _ in range(9000):
        desk.after(0.011).pacer.sent(1.0, 0.0, desk.now)
    assert desk.told(6000.0, 0.0, age=59.0) == []
    assert desk.told(6000.0, 0.0, age=1.0) != []


def test_a_debt_has_an_end():
    """However much was sent since: the provider may have refused it."""
    desk = Desk()
    for _ in range(50):
        desk.spend(100.0)
    desk.bucket.level = 0.0
    desk.after(0.01)
    assert desk.told(remaining=0.0, age=0.01, ago=0.5) == [Level(KEY, most=-950.0)]


def test_what_was_refused_is_no_debt():
    """A burst that the provider turned away costs nothing, however it is told, but for what it did count."""
    desk = Desk()
    for _ in range(9):
        desk.spend(100.0)
    departed = desk.now
    desk.after(0.05)
    for _ in range(8):
        desk.bucket.change(100.0, desk.now)
        desk.pacer.turned_away(100.0, departed, desk.now)
    desk.after(1.0)
    assert desk.told(remaining=1000.0, age=0.9, ago=1.1) == []
    assert desk.level() == pytest.approx(850.0 + 95.0 * 1.05)


def test_an_unknown_limit_still_tells_what_remains():
    """Some providers send nothing else."""
    desk = Desk()
    (level,) = desk.told(None, 100.0, age=2.0)
    assert level.most == pytest.approx((100.0 + 2 * 95.0) * 0.95)


@pytest.mark.parametrize(
    ("age", "reset_s", "most"), [(2.0, 5.0, 95.0), (5.0, 4.0, None), (2.0, None, 285.0), (2.0, 0.0, 285.0)]
)
def test_a_fixed_window_refills_when_it_ends(age, reset_s, most):
    """And not before; where its end is not told, or is past, it is taken for a bucket."""
    desk = Desk()
    found = desk.told(remaining=100.0, age=age, reset_s=reset_s, reset=Reset.WINDOW)
    assert found == ([] if most is None else [Level(KEY, most=pytest.approx(most))])
    assert Desk().told(None, 100.0, age=9.0, reset_s=4.0, reset=Reset.WINDOW) == [Level(KEY, most=pytest.approx(95.0))]


def test_small_differences_are_noise():
    """Half a hundredth of the bucket."""
    desk = Desk(level=500.0)
    assert desk.told(remaining=(500.0 - 4.0) / 0.95) == []
    assert desk.after(1).told(remaining=(500.0 - 6.0) / 0.95) != []


def test_a_bucket_that_holds_too_little_is_filled_after_three_replies():
    """By the smallest gap of the three, over a second at least: the provider counts less than we do."""
    desk = Desk(level=0.0)
    desk.bucket.rate = 0.0
    assert desk.told(remaining=500.0) == []
    assert desk.after(0.4).told(remaining=300.0) == []
    assert desk.after(0.4).told(remaining=500.0) == []
    assert desk.after(0.4).told(remaining=500.0) == [Level(KEY, least=pytest.approx(300.0 * 0.95))]


def test_it_is_filled_no_further_than_its_size():
    """Whatever remains at the provider."""
    desk = Desk(level=100.0)
    desk.bucket.rate = 0.0
    for _ in range(3):
        moves = desk.after(0.6).told(remaining=6000.0)
    assert moves == [Level(KEY, least=pytest.approx(950.0))]


@given(st.lists(st.tuples(st.floats(0.01, 3.0), st.floats(0.0, 1.0)), min_size=20, max_size=80))
def test_filling_never_passes_the_configured_limit(steps):
    """A provider that counts nothing, and a queue that takes all there is: the headroom is used, nothing beyond it."""
    desk = Desk()
    began, taken = [(T, 0.0)], 0.0
    for seconds, share in steps:
        desk.after(seconds)
        if (amount := desk.level()) > 0:
            later = amount / 2
            desk.spend(amount - later, later)
            desk.bucket.change(later * (1 - share), desk.now)
            desk.pacer.over(later, later * share, desk.now)
            taken += amount - later + later * share
        desk.told(remaining=6000.0, age=0.001)
        began.append((desk.now, taken))
        for since, before in began:
            assert taken - before <= 100.0 * (desk.now - since) + 950.0 + 1e-6


def test_one_reply_in_between_starts_filling_anew():
    """Consistent means in a row."""
    desk = Desk(level=100.0)
    desk.bucket.rate = 0.0
    desk.told(remaining=500.0)
    desk.after(0.6).told(remaining=500.0)
    desk.after(0.6).told(remaining=150.0)
    assert desk.after(0.6).told(remaining=500.0) == []


def test_it_is_not_filled_where_less_than_the_account_is_configured():
    """The rest is somebody else's; nor with anything wrong, nor on the word of a reply that came long after it left."""
    desk = Desk(level=100.0)
    assert [desk.after(1).told(12_000.0, 12_000.0) for _ in range(9)] == [[]] * 9
    desk = Desk(level=0.0)
    desk.bucket.rate = 0.0
    desk.apply(desk.pacer.refused(T, T, 1.0, explained=False, chance=0.5, cause="429"))
    assert not any(isinstance(move, Level) for _ in range(5) for move in desk.after(1).told(remaining=500.0))
    desk = Desk(level=0.0)
    desk.bucket.rate = 0.0
    assert [desk.after(1).told(remaining=500.0, ago=61.0) for _ in range(9)] == [[]] * 9
    desk = Desk(level=0.0, ramp=Ramp(1e6))
    desk.bucket.rate = 0.0
    assert [desk.after(1).told(remaining=500.0) for _ in range(9)] == [[]] * 9
    desk = Desk(level=0.0)
    desk.bucket.rate = 0.0
    assert [desk.after(1).told(None, 500.0) for _ in range(9)] == [[]] * 9


# Others.


def drained(desk: Desk, per_s: float, ours: float, seconds: int, start: float = 500.0) -> None:
    """Somebody uses `per_s` and we `ours`, of a bucket that is never full."""
    remaining = start
    for _ in range(seconds):
        desk.after(1.0).pacer.sent(ours, 0.0, desk.now)
        desk.after(0.2)
        remaining = max(0.0, min(900.0, remaining + 1.2 * 100.0 - ours - per_s * 1.2))
        desk.told(remaining=remaining, ago=0.2)


def test_what_others_use_is_taken_off_the_rate():
    """As it is seen to drain away; and given back when they stop, or nothing was heard for long."""
    desk = Desk()
    drained(desk, per_s=40.0, ours=72.0, seconds=30, start=200.0)
    assert desk.pacer.others == pytest.approx(40.0, abs=8.0)
    assert desk.bucket.rate == pytest.approx(55.0, abs=8.0)
    drained(desk, per_s=0.0, ours=60.0, seconds=30)
    assert desk.pacer.others == 0.0
    assert desk.bucket.rate == pytest.approx(95.0)
    drained(desk, per_s=40.0, ours=72.0, seconds=30, start=200.0)
    assert desk.pacer.others > 30.0
    desk.after(40.0)
    desk.apply(desk.pacer.due(desk.now))
    assert (desk.pacer.others, desk.bucket.rate) == (0.0, pytest.approx(95.0))


def test_however_much_others_use_a_little_is_asked_for():
    """Else we would never learn that they stopped."""
    desk = Desk()
    drained(desk, per_s=100.0, ours=0.0, seconds=60, start=100.0)
    assert desk.bucket.rate == pytest.approx(0.05 * 100.0, abs=1.0)


def test_alone_nobody_else_is_seen():
    """Not with bursts either, nor where a full bucket overflows."""
    desk = Desk()
    remaining = 1000.0
    for i in range(200):
        desk.after(1.0)
        burst = 700.0 if i % 20 == 0 else 30.0
        desk.pacer.sent(burst, 0.0, desk.now)
        remaining = min(1000.0, remaining + 100.0) - burst
        desk.told(remaining=max(0.0, remaining), ago=0.0)
        assert desk.pacer.others == 0.0


def test_fixed_windows_tell_nothing_of_others():
    """They do not refill as they drain."""
    desk = Desk()
    for i in range(40):
        desk.after(1.0).told(remaining=400.0 - 10 * i, reset_s=60.0 - i, reset=Reset.WINDOW)
    assert desk.pacer.others == 0.0


# Refusals.


def test_a_refusal_pauses_and_an_unexplained_one_empties_and_slows():
    """With the word how long; the rate comes back by the minute."""
    desk = Desk()
    moves = desk.apply(desk.pacer.refused(T - 1, T, 20.0, explained=False, chance=0.5, cause="status 429"))
    assert moves == [Pause(KEY, 20.0), Level(KEY, most=0.0), Resize(KEY, pytest.approx(76.0), pytest.approx(760.0))]
    assert desk.bucket.wait_for(1.0, T) == pytest.approx(20.0)
    desk.after(20.0 + 240.0)
    desk.apply(desk.pacer.due(desk.now))
    assert desk.bucket.rate == pytest.approx(95.0)


def test_an_explained_refusal_keeps_the_level_that_headers_tell():
    """It slows a little."""
    desk = Desk(level=300.0)
    moves = desk.apply(desk.pacer.refused(T - 1, T, 5.0, explained=True, chance=0.5, cause="429"))
    assert moves == [Pause(KEY, 5.0), Resize(KEY, pytest.approx(95 * 0.95), pytest.approx(950 * 0.95))]


def test_an_echo_of_a_refusal_changes_nothing():
    """Neither level nor rate, nor a pause."""
    desk = Desk()
    desk.apply(desk.pacer.refused(T - 1, T, None, explained=False, chance=0.5, cause="429"))
    assert desk.pacer.refused(T - 1, T + 0.1, None, explained=False, chance=0.5, cause="429") == []


def test_a_spent_window_leaves_a_trickle_until_it_is_served_again():
    """However long the day: it is asked again after minutes."""
    desk = Desk()
    moves = desk.apply(desk.pacer.exhausted(T - 1, T, 40_000.0, "0 requests left"))
    assert moves == [Pause(KEY, 300.0), Resize(KEY, pytest.approx(0.95), pytest.approx(9.5))]
    assert desk.pacer.exhausted(T - 1, T + 1, 40_000.0, "0 requests left") == []
    assert desk.pacer.served(T - 1, T + 2) == []
    desk.after(301.0)
    assert desk.apply(desk.pacer.served(desk.now - 1, desk.now)) == [Resize(KEY, 95.0, 950.0)]
    assert desk.pacer.served(desk.now - 1, desk.now) == []


# Growth.


def test_growth_is_held_where_the_provider_wants_it():
    """A minute may hold no more than the ramp says, a full bucket included; from a slow_down on."""
    desk = Desk(Rules(rate=1e6, capacity=1e7), ramp=Ramp(60_000.0, active=False))
    assert desk.pacer.due(T) == []
    (resized,) = desk.apply(desk.pacer.slow_down(T))
    assert resized.rate * 60 + resized.capacity == pytest.approx(60_000.0)
    for minute in range(60):
        now = T + 60 * minute
        desk.now = now
        desk.apply(desk.pacer.due(now))
        allowed = desk.pacer.ramp.per_minute(now)
        assert desk.bucket.rate * 60 + desk.bucket.capacity <= allowed * 1.001
        desk.pacer.sent(allowed, 0.0, now)
    assert desk.bucket.rate > 1400.0
    assert desk.pacer.state(desk.now)["ramp_per_minute"] == desk.pacer.ramp.per_minute(desk.now)
    assert Pacer(KEY, RULES).slow_down(T) == []


# What is short, slots, the state page.


@pytest.mark.parametrize(
    ("seen", "need", "seconds"),
    [
        (Reported("tokens", 6000, 100), 50, 0.0),
        (Reported("tokens", 6000, None), 50, 0.0),
        (Reported("tokens", 6000, 100), 400, 3.0),
        (Reported("tokens", 6000, 0), 0, 0.0),
        (Reported("tokens", 6000, 0), 12_000, 60.0),
        (Reported("requests", 14_400, 0, 86_400.0, 86_400.0), 1, 6.0),
        (Reported("tokens", 6000, 10, 20.0, 60.0, Reset.FITS), 400, 20.0),
        (Reported("tokens", 6000, 10, 0.0, 60.0, Reset.FITS), 400, None),
        (Reported("tokens", 6000, 0, 30.0, 60.0, Reset.WINDOW), 400, 30.0),
        (Reported("tokens", None, 10, 30.0), 400, 30.0),
        (Reported("tokens", None, 10), 400, None),
    ],
)
def test_how_long_until_it_fits(seen, need, seconds):
    """By what the reset means, where the time can be told."""
    assert shortage_s(seen, need) == (seconds if seconds is None else pytest.approx(seconds))


def test_slots_are_paused_and_cut_where_no_tokens_are_counted():
    """Never below one; unlimited slots are only paused."""
    brakes = Brakes("upstream/a/slots", 10.0)
    seconds = brakes.brake.refused(T - 1, T, None, explained=False, chance=0.0)
    moves = [move.tuning for move in brakes.pause(seconds, "429")]
    assert moves == [Pause("upstream/a/slots", 0.5), Seats("upstream/a/slots", 8.0)]
    assert brakes.due() == []
    assert brakes.state(T) == {"share": 0.8, "paused_s": 0.5}
    brakes.brake.recover(T + 600.0)
    assert [move.tuning for move in brakes.due()] == [Seats("upstream/a/slots", 10.0)]
    brakes.brake.exhausted(T, T, None)
    assert [move.tuning for move in brakes.pause(0.0, "day")] == [Seats("upstream/a/slots", 1.0)]
    free = Brakes("upstream/a/slots", inf)
    free.brake.refused(T - 1, T, 3.0, explained=False, chance=0.0)
    assert [move.tuning for move in free.pause(3.0, "429")] == [Pause("upstream/a/slots", 3.0)]


def test_slots_that_are_held_back_stay_cut_where_they_are_cut_further():
    """Of two shares the smaller counts."""
    brakes = Brakes("upstream/a/slots", 10.0)
    assert [move.tuning for move in brakes.hold_back(0.5, "just started")] == [Seats("upstream/a/slots", 5.0)]
    brakes.brake.exhausted(T, T, None)
    assert [move.tuning for move in brakes.pause(0.0, "day")] == [Seats("upstream/a/slots", 1.0)]
    assert brakes.hold_back(1.0, "later") == []


def test_slots_that_stood_for_unknown_limits_are_lifted():
    """Once limits are known."""
    brakes = Brakes("upstream/a/slots", 4.0)
    assert [move.tuning for move in brakes.lift(inf, "limits are known")] == [Seats("upstream/a/slots", inf)]


def test_the_state_tells_what_was_heard():
    """Plain data; nothing of what was not heard."""
    desk = Desk()
    assert desk.pacer.state(T) == {"share": 1.0}
    desk.told(remaining=200.0, age=1.0)
    desk.after(2.0)
    assert desk.pacer.state(desk.now) == {
        "share": 1.0, "limit": 6000.0, "window_s": 60.0, "remaining": 200.0, "age_s": 3.0, "others_per_s": 0.0,
    }  # fmt: skip


# Whatever is said.

numbers = st.one_of(st.none(), st.floats(), st.floats(0.0, 20_000.0))


@given(
    st.lists(
        st.tuples(
            numbers, numbers, numbers, st.sampled_from([1.0, 60.0]), st.sampled_from(Reset), st.floats(0, 70),
            st.floats(0, 300), st.floats(0, 5),
        ),
        max_size=40,
    ),
    st.booleans(),
)  # fmt: skip
def test_nothing_that_is_said_leaves_the_bounds(words, learned):
    """Finite, never above what is configured, and never above the last limit that made sense, less headroom."""
    desk = Desk(Rules() if learned else RULES)
    for limit, remaining, reset_s, window_s, reset, age, spent, gap in words:
        desk.after(gap)
        if KEY in desk.store:
            desk.spend(spent)
        desk.told(limit, remaining, age=age, window_s=window_s, reset_s=reset_s, reset=reset)
        if KEY not in desk.store:
            continue
        bucket = desk.bucket
        assert all(map(math.isfinite, (bucket.rate, bucket.capacity, bucket.level)))
        assert 0 < bucket.rate <= RULES.rate * (1 + 1e-9) or learned
        seen = desk.pacer._seen
        if seen is not None and seen.limit is not None:
            assert bucket.rate <= seen.limit / seen.window_s * 0.95 * (1 + 1e-9)
            assert bucket.capacity <= seen.limit * 0.95 * (1 + 1e-9)


# A provider of its own.

CASES = {
    "as configured": ({}, 0),
    "a small bucket": ({"burst_s": 10.0}, 0),
    "less than configured": ({"limit": 30_000.0}, 1),
    "not configured": ({"configured": None}, 0),
    "others use a third": ({"others": 350.0}, 12),
    "others use most": ({"others": 700.0, "burst_s": 60.0}, 18),
    "others use some of less": ({"others": 150.0, "limit": 30_000.0}, 12),
    "charged by use": ({"upfront": False}, 1),
    "charged by use, with others": ({"upfront": False, "others": 300.0}, 4),
    # Of thirty seeds the worst had 12, and it had them before what a provider refused was no debt, too.
    "long answers and others": ({"longest_s": 40.0, "others": 400.0}, 12),
    "counted otherwise": ({"error": 0.3}, 8),
    "no headers": ({"told": False, "retry": False, "limit": 30_000.0}, 6),
    "no headers, but a word how long": ({"told": False, "limit": 30_000.0}, 6),
}


@pytest.mark.parametrize(("case", "seed"), [(case, seed) for seed, case in enumerate(CASES)])
def test_what_is_there_is_used_and_refusals_stay_rare(case, seed):
    """Nine tenths of what others leave, and so many refusals in three minutes, whatever the provider's limit is."""
    changes, most = CASES[case]
    world = World(seed, **changes)
    world.run(60.0)
    world.fresh()
    world.run(180.0)
    assert len(world.refused) <= most, f"seed {seed}"
    assert world.share_used() >= 0.9, f"seed {seed}"


def test_a_limit_that_changes_is_followed():
    """Halved: with the next reply. Doubled back: after three, and used."""
    world = World(5, burst_s=10.0)
    world.run(60.0)
    world.limit = 30_000.0
    heard = world.replies
    while world.store[KEY].rate > 600.0:
        world.run(0.05)
    resized_after = world.replies - heard
    begun_before = 15  # answers that began before, and end after
    assert resized_after <= begun_before + 1
    world.run(60.0)
    world.fresh()
    world.run(60.0)
    assert (len(world.refused), world.share_used() >= 0.9) == (0, True)
    world.limit = 60_000.0
    world.run(30.0)
    world.fresh()
    world.run(60.0)
    assert (len(world.refused), world.share_used() >= 0.9) == (0, True)
    assert pacing.AGREE == 3
