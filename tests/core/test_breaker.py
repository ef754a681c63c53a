"""The breaker as its table, and the counting that leads to it."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from math import inf
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.breaker import TABLE, Breaker, Evidence, Outcome, Sign, Signal, State
from extproc.core.policy import BreakerRules, RatioRules, SlowRules

C, O, H, R = State  # noqa: E741 - a table is read by its columns
SICK, RESTED, PROBE_OK, PROBE_FAILED, RAMPED, TRIP, RESET = Signal
SUCCESS, FAILURE, PACED, IGNORED, TERMINAL, CREDENTIAL = Outcome
HALF_BAD = RatioRules(share=0.5, window_s=30.0, volume=10)
NEVER = BreakerRules(failures=None, paced=None, errors=None, slow=None, malformed=None, quarantine_s=None)

EXPECTED = {
    SICK:         {C: O,             R: O},
    RESTED:       {      O: H},
    PROBE_OK:     {            H: R},
    PROBE_FAILED: {            H: O},
    RAMPED:       {                  R: C},
    TRIP:         {C: O, O: O, H: O, R: O},
    RESET:        {C: C, O: C, H: C, R: C},
}  # fmt: skip


def in_state(state: State, rules: BreakerRules | None = None) -> Breaker:
    """A breaker that was moved to `state` at time 0 just now."""
    breaker = Breaker(rules or BreakerRules())
    for signal in {C: (RESET,), O: (SICK,), H: (SICK, RESTED), R: (SICK, RESTED, PROBE_OK)}[state]:
        breaker.move(signal, now=0.0, chance=0.0)
    return breaker


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("signal", Signal)
def test_the_table_is_the_whole_behaviour(state: State, signal: Signal) -> None:
    """Each state and signal leads where the table says; a missing entry raises and changes nothing."""
    breaker = in_state(state)
    before = copy(breaker)
    if (after := EXPECTED[signal].get(state)) is None:
        assert (state, signal) not in TABLE
        with pytest.raises(KeyError):
            breaker.move(signal, now=1.0, chance=0.0)
        assert breaker == before
    else:
        breaker.move(signal, now=1.0, chance=0.0)
        assert (breaker.state, breaker.since) == (after, 1.0)
        assert breaker.allows(0, 1.0) == (after in (C, R))
        assert breaker.allows(1000, 1.0) == (after is C)
        assert (breaker.rests_until == inf) == (after is C)


def test_the_table_knows_no_other_words() -> None:
    """Every entry of the table is in the one above."""
    assert {(state, signal): after for signal, row in EXPECTED.items() for state, after in row.items()} == TABLE


@pytest.mark.parametrize(
    ("outcomes", "opens"),
    [
        ([FAILURE] * 2, False),
        ([FAILURE] * 3, True),
        ([FAILURE, FAILURE, SUCCESS, FAILURE, FAILURE], False),
        ([FAILURE, IGNORED, FAILURE, IGNORED, FAILURE], True),
        ([PACED] * 4, False),
        ([PACED] * 5, True),
        ([PACED] * 4 + [SUCCESS] + [PACED] * 4, False),
        ([PACED, FAILURE, PACED, FAILURE, PACED, PACED], False),
        ([IGNORED] * 100, False),
        ([TERMINAL], True),
        ([CREDENTIAL], True),
    ],
)
def test_it_opens_after_so_many_in_a_row(outcomes: list[Outcome], opens: bool) -> None:  # noqa: FBT001
    """Three failures or five 429s without a success between them; what says nothing neither counts nor resets."""
    breaker = Breaker(BreakerRules(failures=3, paced=5))
    moved = [breaker.record(outcome, began=1.0, now=2.0, chance=0.0) for outcome in outcomes]
    assert moved == [False] * (len(outcomes) - 1) + [opens]
    assert breaker.state is (O if opens else C)


def test_the_rest_doubles_up_to_the_cap_and_a_success_forgets_it() -> None:
    """Each opening without a success in between rests twice as long; after a success the first rest is short again."""
    breaker, rests, now = Breaker(BreakerRules(cool_down_s=5, cool_down_max_s=60)), [], 0.0
    breaker.move(SICK, now=now, chance=0.0)
    for _ in range(6):
        rests.append(breaker.rests_until - now)
        assert not breaker.due(breaker.rests_until - 0.001)
        now = breaker.rests_until
        assert breaker.due(now)
        breaker.move(RESTED, now=now, chance=0.0)
        assert not breaker.due(now + 1000)
        breaker.move(PROBE_FAILED, now=now, chance=0.0)
    assert rests == [5, 10, 20, 40, 60, 60]
    breaker.move(RESET, now=now, chance=0.0)
    breaker.record(SUCCESS, began=now, now=now, chance=0.0)
    breaker.move(SICK, now=now, chance=0.0)
    assert breaker.rests_until - now == 5


def test_a_probe_that_works_is_no_success_of_users() -> None:
    """An upstream that only answers probes rests twice as long each time, so it does not flap."""
    breaker, now = Breaker(BreakerRules(failures=1, cool_down_s=5)), 0.0
    for expected in (5, 10, 20, 20):
        breaker.record(FAILURE, began=now, now=now, chance=0.0)
        assert breaker.rests_until - now == expected
        now = breaker.rests_until
        for signal in (RESTED, PROBE_OK, RAMPED):
            breaker.move(signal, now=now, chance=0.0)


@given(st.floats(0, 1, exclude_max=True), st.floats(0, 2), st.integers(0, 100))
def test_jitter_only_lengthens_a_rest(chance: float, jitter: float, openings: int) -> None:
    """The rest is at least the cool-down and at most `jitter` more, however often it opened before."""
    rules = BreakerRules(cool_down_s=5, cool_down_max_s=120, jitter=jitter)
    breaker = Breaker(rules, openings=min(openings, 30))
    breaker.move(SICK, now=100.0, chance=chance)
    rest = min(120.0, 5 * 2.0 ** min(openings, 30))
    assert rest <= breaker.rests_until - 100 <= rest * (1 + jitter) + 1e-9


@given(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True), st.floats(0, 4))
def test_reopening_never_shortens_a_rest(first: float, second: float, later: float) -> None:
    """Tripped again while open, it keeps the later of the two times."""
    breaker = Breaker(BreakerRules(cool_down_s=5, jitter=3.0))
    breaker.move(SICK, now=0.0, chance=first)
    until = breaker.rests_until
    breaker.move(TRIP, now=later, chance=second)
    assert breaker.rests_until >= until
    assert breaker.rests_until >= later + 10


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("outcome", Outcome)
def test_a_result_that_began_before_the_last_transition_counts_nothing(state: State, outcome: Outcome) -> None:
    """In any state, answers to questions that were asked in another one change nothing at all."""
    breaker = in_state(state)
    before = copy(breaker)
    for _ in range(10):
        assert not breaker.record(outcome, began=-0.001, now=50.0, chance=0.0)
    assert breaker == before


@pytest.mark.parametrize("state", [O, H])
@pytest.mark.parametrize("outcome", Outcome)
def test_users_results_never_move_one_that_is_open_or_tried(state: State, outcome: Outcome) -> None:
    """While open or being tried only probes and operators decide, even if a user's request began meanwhile."""
    breaker = in_state(state)
    before = copy(breaker)
    assert not breaker.record(outcome, began=1.0, now=2.0, chance=0.0)
    assert breaker == before


class Step(NamedTuple):
    """Something that happens `jump` seconds later (or earlier), about a request that began `age` seconds before."""

    what: Outcome | Signal
    jump: float
    age: float
    chance: float


STEP = st.builds(
    Step,
    st.sampled_from([*Outcome, *Outcome, *Signal]),
    st.one_of(st.floats(0, 10), st.floats(-100, 100), st.just(1e5)),
    st.floats(0, 60),
    st.floats(0, 1, exclude_max=True),
)
steps = st.lists(STEP, max_size=60)


@given(steps)
def test_random_histories_with_clock_jumps_keep_its_promises(history: list[Step]) -> None:
    """Whatever comes in whatever order: it moves only by the table, opens only when full, never flaps on old news."""
    breaker, now, row, paced = Breaker(BreakerRules(errors=None)), 0.0, 0, 0
    for what, jump, age, chance in history:
        now += jump
        before = copy(breaker)
        if isinstance(what, Outcome):
            moved = breaker.record(what, began=now - age, now=now, chance=chance)
            counts = before.state in (C, R) and now - age >= before.since
            row = 0 if counts and what is SUCCESS else row + (counts and what is FAILURE)
            paced = 0 if counts and what is SUCCESS else paced + (counts and what is PACED)
            sick = (what is FAILURE and row >= 3) or (what is PACED and paced >= 5)
            assert moved == (counts and (sick or what in {TERMINAL, CREDENTIAL}))
            assert breaker.state is (O if moved else before.state)
            moved_at = now if moved else before.since
        elif (before.state, what) in TABLE:
            breaker.move(what, now=now, chance=chance)
            assert breaker.state is TABLE[before.state, what]
            moved_at = now
        else:
            continue
        assert breaker.since == moved_at
        if breaker.since != before.since or breaker.state is not before.state:
            row = paced = 0
        assert (breaker.state is C) == (breaker.rests_until == inf)
        assert breaker.allows(0, now) == (breaker.state in (C, R))
        assert breaker.allows(1e12, now) == (breaker.state is C)
        if breaker.state is O:
            assert breaker.rests_until >= breaker.since + 5
            if before.state is O:
                assert breaker.rests_until >= before.rests_until
        assert breaker.due(now) == (breaker.state is O and now >= breaker.rests_until)


# Each sign can be turned off, and has its threshold, window and least volume.


def test_with_every_sign_off_only_an_operator_opens_it() -> None:
    """Hundreds of bad results of every kind; they are counted all the same."""
    breaker = Breaker(NEVER)
    for n in range(600):
        outcome = list(Outcome)[n % len(Outcome)]
        evidence = Evidence(prompt=5000, first_token_s=99.0, malformed=outcome is FAILURE)
        assert not breaker.record(outcome, began=n, now=n, chance=0.0, evidence=evidence)
    assert breaker.state is C
    assert breaker.paced > 0
    breaker.move(TRIP, now=600.0, chance=0.0)
    assert breaker.state is O


@pytest.mark.parametrize(("bad", "good", "opens"), [(10, 10, True), (9, 11, False), (4, 4, False), (9, 0, False)])
def test_a_share_of_failed_attempts_opens_it(bad: int, good: int, opens: bool) -> None:  # noqa: FBT001
    """Half of them, of ten at least, however they are mixed."""
    breaker = Breaker(replace(NEVER, errors=HALF_BAD))
    for n in range(good):
        breaker.record(SUCCESS, began=n / 10, now=n / 10, chance=0.0)
    moved = [breaker.record(FAILURE, began=2.0, now=2.0, chance=0.0) for _ in range(bad)]
    assert moved.count(True) == opens
    assert breaker.verdict.sign is (Sign.ERRORS if opens else None)


def test_failed_attempts_are_forgotten_with_their_window() -> None:
    """A failure every four seconds is never half of ten within thirty; pace is no error."""
    breaker = Breaker(replace(NEVER, errors=HALF_BAD))
    for n in range(200):
        assert not breaker.record(FAILURE, began=n * 4.0, now=n * 4.0, chance=0.0)
        assert not breaker.record(PACED, began=n * 4.0, now=n * 4.0, chance=0.0)
    assert breaker.numbers(800.0)["attempts"] <= 8


def test_a_verdict_tells_sign_numbers_and_requests() -> None:
    """The last in the row, not those that a success has forgiven; at most ten."""
    breaker = Breaker()
    for n, outcome in enumerate([FAILURE, SUCCESS, FAILURE, FAILURE, FAILURE]):
        breaker.record(outcome, began=1.0, now=1.0, chance=0.0, evidence=Evidence(request=f"r{n}"))
    assert breaker.verdict.sign is Sign.FAILURES
    assert breaker.verdict.requests == ("r2", "r3", "r4")
    assert breaker.verdict.numbers["failures"] == 3
    many = Breaker(BreakerRules(failures=50, errors=None))
    for n in range(50):
        many.record(FAILURE, began=1.0, now=1.0, chance=0.0, evidence=Evidence(request=f"r{n}"))
    assert many.verdict.requests == tuple(f"r{n}" for n in range(40, 50))


# Our credit and our key.


def test_no_credit_rests_long_and_twice_as_long_each_time() -> None:
    """From a quarter of an hour to two hours; users who are served well end that."""
    breaker, now = Breaker(BreakerRules(quarantine_s=900, quarantine_max_s=3000)), 0.0
    rests = []
    for _ in range(4):
        breaker.record(TERMINAL, began=now, now=now, chance=0.0)
        rests.append(breaker.rests_until - now)
        now = breaker.rests_until
        for signal in (RESTED, PROBE_OK, RAMPED):
            breaker.move(signal, now=now, chance=0.0)
    assert rests == [900, 1800, 3000, 3000]
    breaker.record(SUCCESS, began=now, now=now, chance=0.0)
    breaker.record(TERMINAL, began=now, now=now, chance=0.0)
    assert breaker.rests_until - now == 900
    assert breaker.verdict.sign is Sign.TERMINAL


def test_a_refused_key_is_tried_soon_and_rests_long_when_the_probe_is_refused_too() -> None:
    """One request may ask for what the key may not do; a probe that works lets everybody return."""
    breaker = Breaker(BreakerRules(cool_down_s=5, quarantine_s=900))
    breaker.record(CREDENTIAL, began=0.0, now=0.0, chance=0.0)
    assert (breaker.verdict.sign, breaker.rests_until) == (Sign.CREDENTIAL, 5.0)
    breaker.move(RESTED, now=5.0, chance=0.0)
    breaker.move(PROBE_FAILED, now=5.0, chance=0.0, grave=True)
    assert breaker.rests_until == 905.0


def test_without_a_quarantine_both_are_failures_like_others() -> None:
    """Three in a row, and a rest like any."""
    breaker = Breaker(BreakerRules(quarantine_s=None))
    moved = [breaker.record(what, began=0.0, now=0.0, chance=0.0) for what in (TERMINAL, CREDENTIAL, TERMINAL)]
    assert moved == [False, False, True]
    breaker.move(TRIP, now=0.0, chance=0.0, grave=True)
    assert breaker.rests_until <= 20


# The ramp.


def test_a_ramp_grows_with_time_and_with_each_success() -> None:
    """Two at first, and eight until something has gone well; then five doublings in its time, and one more with each
    success.
    """
    breaker = in_state(R, BreakerRules(ramp_s=10, ramp_from=2))
    assert [breaker.window(now) for now in (0.0, 2.0, 4.0, 10.0)] == [2, 4, 8, 8]
    for _ in range(3):
        assert not breaker.record(SUCCESS, began=0.0, now=0.0, chance=0.0)
    assert [breaker.window(now) for now in (0.0, 2.0, 10.0)] == [5, 10, 160]
    assert (breaker.allows(4, 0.0), breaker.allows(5, 0.0)) == (True, False)
    assert breaker.window(-50.0) == 5
    assert breaker.window(1e12) < inf
    assert (in_state(C).window(0.0), in_state(O).window(0.0), in_state(H).window(0.0)) == (inf, 0, 0)


@pytest.mark.parametrize(
    ("outcome", "evidence", "proves"),
    [
        (SUCCESS, Evidence(), True),
        (IGNORED, Evidence(first_token_s=0.1), True),
        (IGNORED, Evidence(first_token_s=0.1, gave_up=True), False),
        (IGNORED, Evidence(), False),
        (FAILURE, Evidence(), False),
    ],
)
def test_the_first_that_goes_well_lets_the_window_grow_on(outcome: Outcome, evidence: Evidence, proves: bool) -> None:  # noqa: FBT001
    """From where it is, however long that took: a success, or the first token of an answer that still runs."""
    breaker = in_state(R, BreakerRules(ramp_s=10, ramp_from=2))
    breaker.record(outcome, began=0.0, now=60.0, chance=0.0, evidence=evidence)
    assert breaker.proven is proves
    if proves:
        assert [breaker.window(now) for now in (60.0, 62.0)] == [8 + 4 * breaker.grown, 16 + 8 * breaker.grown]
        assert (breaker.ramped(5, 65.9), breaker.ramped(5, 66.0)) == (False, True)
    else:
        assert breaker.window(90.0) == 8
        assert (breaker.ramped(1, 90.0), breaker.ramped(0, 90.0)) == (False, True)


@pytest.mark.parametrize("outcome", [FAILURE, PACED])
def test_a_failure_begins_a_ramp_anew(outcome: Outcome) -> None:
    """And three in a row end it."""
    breaker = in_state(R, BreakerRules(failures=3, paced=3))
    breaker.record(SUCCESS, began=5.0, now=6.0, chance=0.0)
    breaker.record(outcome, began=5.0, now=8.0, chance=0.0)
    assert breaker.window(8.0) == 2
    assert not breaker.ramped(0, 17.9)
    assert breaker.ramped(0, 18.0)
    breaker.record(outcome, began=8.0, now=8.0, chance=0.0)
    assert breaker.record(outcome, began=8.0, now=8.0, chance=0.0)
    assert breaker.state is O


@pytest.mark.parametrize("outcome", [FAILURE, PACED])
def test_ten_successes_make_up_for_a_failure(outcome: Outcome) -> None:
    """A share of failures that is borne in good times does not hold a ramp up."""
    breaker = in_state(R, BreakerRules(ramp_s=10, ramp_from=2))
    for _ in range(11):
        breaker.record(SUCCESS, began=0.0, now=1.0, chance=0.0)
    breaker.record(outcome, began=0.0, now=9.0, chance=0.0)
    assert breaker.ramped(0, 10.0)
    breaker.record(outcome, began=0.0, now=9.5, chance=0.0)
    assert (breaker.ramped(0, 19.4), breaker.ramped(0, 19.5)) == (False, True)


def test_an_upstream_at_which_one_in_twenty_fails_returns_all_the_same() -> None:
    """Fifty at a time, two seconds each, and none of them later than the ramp's own time thrice."""
    breaker = in_state(R, BreakerRules(ramp_s=10, ramp_from=2))
    running: list[tuple[float, float]] = []
    ended, now = 0, 0.0
    while not breaker.ramped(len(running), now):
        now += 0.05
        while running and running[0][0] <= now:
            ended += 1
            _, began = running.pop(0)
            breaker.record(SUCCESS if ended % 20 else FAILURE, began=began, now=now, chance=0.0)
        while len(running) < 50 and breaker.allows(len(running), now):
            running.append((now + 2.0, now))
        assert now < 30


def test_a_ramp_is_over_when_its_window_no_longer_binds() -> None:
    """After its time, and once the window is twice what runs; never in another state."""
    breaker = in_state(R, BreakerRules(ramp_s=10, ramp_from=2))
    breaker.record(SUCCESS, began=0.0, now=0.0, chance=0.0)
    assert not breaker.ramped(0, 9.9)
    assert breaker.ramped(48, 10.0)
    assert not breaker.ramped(49, 10.0)
    assert breaker.ramped(49, 12.0)
    assert not any(in_state(state).ramped(0, 100.0) for state in (C, O, H))


def test_a_ramp_of_no_time_lets_everything_through() -> None:
    """It is over at once."""
    breaker = in_state(R, BreakerRules(ramp_s=0))
    assert breaker.window(0.0) == inf
    assert breaker.allows(1e9, 0.0)
    assert breaker.ramped(1e9, 0.0)
    assert "window" not in breaker.numbers(0.0)


def test_a_ramp_that_fails_rests_longer_than_before() -> None:
    """Only users' successes in the closed state forget the openings."""
    breaker = in_state(R, BreakerRules(cool_down_s=5))
    breaker.record(SUCCESS, began=0.0, now=0.0, chance=0.0)
    for _ in range(3):
        breaker.record(FAILURE, began=0.0, now=0.0, chance=0.0)
    assert breaker.rests_until == 10


# Slow first tokens.


def timed(breaker: Breaker, seconds: float, now: float, **more: Any) -> bool:
    """A stream that was sent at `now` less `seconds`, and whose first token took that long."""
    evidence = Evidence(request=f"r{now:g}", prompt=100, first_token_s=seconds, **more)
    return breaker.record(SUCCESS, began=now - seconds, now=now, chance=0.0, evidence=evidence)


def healthy(rules: BreakerRules | None = None, *, count: int = 300, seconds: float = 2.0) -> tuple[Breaker, float]:
    """A breaker that has seen `count` streams of 2 s, one a second, and the time then."""
    breaker = Breaker(rules or BreakerRules())
    for n in range(count):
        assert not timed(breaker, seconds, float(n))
    return breaker, float(count)


def test_the_p95_of_first_tokens_above_three_times_the_usual_opens_it() -> None:
    """More than one in twenty of the last thirty seconds, three at least."""
    breaker, now = healthy()
    moved = [timed(breaker, 9.0 if n % 5 == 0 else 2.0, now + n) for n in range(30)]
    assert moved.index(True) == 10
    assert breaker.verdict.sign is Sign.SLOW
    assert breaker.verdict.requests == ("r300", "r305", "r310")
    assert breaker.verdict.numbers["first_token_s"] == 9.0
    assert breaker.verdict.numbers["usual_p95_s"] == pytest.approx(2.0, rel=0.06)


@pytest.mark.parametrize(("every", "seconds"), [(30, 20.0), (3, 3.8), (1, 3.7)])
def test_a_few_late_ones_or_all_of_them_a_little_do_not(every: int, seconds: float) -> None:
    """One in thirty; or less than twice the usual."""
    breaker, now = healthy()
    assert not any(timed(breaker, seconds if n % every == 0 else 2.0, now + n) for n in range(300))


def test_times_that_differ_much_do_not_open_it_as_long_as_they_differ_as_usual() -> None:
    """As those of models that think first: every fifth takes more than twice the median, on a good day."""
    chance, breaker = Random(4), Breaker()
    assert not any(timed(breaker, 1.5 * chance.lognormvariate(0.0, 0.9), n / 5) for n in range(8000))


def test_fast_is_never_slow() -> None:
    """Ten times the usual, but within a second."""
    breaker, now = healthy(seconds=0.05)
    assert not any(timed(breaker, 0.9, now + n) for n in range(300))


@pytest.mark.parametrize("rps", [1.0, 4.0, 20.0])
def test_slow_degradation_opens_it_before_one_in_twenty_is_three_times_as_late(rps: float) -> None:
    """First tokens go from 2 s to 25 s within ten minutes, and nothing fails. Those on their way count, too."""
    breaker = Breaker(BreakerRules())
    ends: list[tuple[float, float]] = []
    for n in range(int(900 * rps)):
        at = n / rps
        seconds = 2.0 + max(0.0, at - 300.0) * 23.0 / 600.0
        ends.append((at + seconds, seconds))
    opened = next(end for end, seconds in sorted(ends) if timed(breaker, seconds, end))
    sent = [(end - seconds, seconds) for end, seconds in ends if end - seconds <= opened]
    minute = [seconds for at, seconds in sent if at > opened - 60]
    assert sum(seconds > 6.0 for seconds in minute) < 0.05 * len(minute)
    assert opened > 300


def test_slow_decay_cannot_teach_it_that_slow_is_normal() -> None:
    """From 2 s to 25 s within a day and a half, at one a minute: it opens all the same, well before the end."""
    breaker, now = healthy(BreakerRules(slow=SlowRules(window_s=3600.0)))
    seconds = 2.0
    while not timed(breaker, seconds, now):
        now += 60.0
        seconds += 23.0 / 2160
        assert seconds < 12.0


@pytest.mark.parametrize("answers", [2, 10, 40])
def test_a_decay_that_begins_before_what_is_usual_has_settled_opens_it(answers: int) -> None:
    """After the first twenty answers, with a tenth more after every few."""
    breaker, seconds = Breaker(), 2.0
    assert not any(timed(breaker, seconds, float(n)) for n in range(20))
    number = 20
    while not timed(breaker, seconds, float(number)):
        number += 1
        seconds = 2.0 * 1.1 ** ((number - 20) / answers)
        assert seconds < 8.0


def test_what_is_usual_follows_what_is_faster_at_once_and_what_is_slower_slowly() -> None:
    """It sinks as it is seen, and rises by no more than a tenth in an hour."""
    breaker, now = healthy()
    assert breaker.tempo is not None
    usual = breaker.tempo.baseline("", 100)
    for n in range(3600):
        timed(breaker, 2.8, now + n)
    assert usual.median_s == pytest.approx(2.2, rel=0.06)
    for n in range(9000):
        timed(breaker, 0.5, now + 3600 + n)
    assert usual.median_s == pytest.approx(0.5, rel=0.06)


def test_a_whole_day_of_it_is_usual_by_then() -> None:
    """Otherwise a change for good would keep an upstream away for good."""
    rules = SlowRules(times=50.0, median_times=None)
    breaker, now = healthy(BreakerRules(slow=rules))
    assert breaker.tempo is not None
    for hour in range(30):
        assert not timed(breaker, 20.0, now + hour * 3600.0)
    assert breaker.tempo.baseline("", 100).seen < 10
    for n in range(30):
        assert not timed(breaker, 20.0, now + 30 * 3600.0 + n)
    assert breaker.tempo.baseline("", 100).median_s == pytest.approx(20.0, rel=0.06)


def test_each_model_and_size_class_has_its_own_usual() -> None:
    """A long prompt is slow by nature; the number of baselines is bounded."""
    breaker, now = healthy()
    for n in range(100):
        evidence = Evidence(prompt=50_000, first_token_s=9.0)
        assert not breaker.record(SUCCESS, began=now, now=now + n, chance=0.0, evidence=evidence)
        assert not timed(breaker, 7.0, now + n, model="thinker")
    assert breaker.tempo is not None
    names = {id(breaker.tempo.baseline(f"m{n}", 100)) for n in range(1000)}
    assert len(names) < 300


def test_who_gave_up_late_says_as_much_as_a_late_token() -> None:
    """Who left soon says nothing, and nothing is learned of it."""
    breaker, now = healthy()
    told = [Evidence(first_token_s=s, gave_up=True) for s in (1.0, 3.0)]
    for n in range(100):
        assert not breaker.record(IGNORED, began=now, now=now + n, chance=0.0, evidence=told[n % 2])
    late = Evidence(first_token_s=10.0, gave_up=True)
    moved = [breaker.record(IGNORED, began=now, now=now + 100, chance=0.0, evidence=late) for _ in range(25)]
    assert moved.count(True) == 1


def test_while_traffic_returns_a_quarter_of_the_volume_will_do() -> None:
    """It was slow just now. What is late does not make the window grow."""
    breaker, now = healthy()
    for signal in (TRIP, RESTED, PROBE_OK):
        breaker.move(signal, now=now, chance=0.0)
    moved = [timed(breaker, 5.0, now + 10 + n) for n in range(10)]
    assert moved.index(True) == 4
    breaker.move(RESTED, now=now + 20, chance=0.0)
    breaker.move(PROBE_OK, now=now + 20, chance=0.0)
    timed(breaker, 5.0, now + 30)
    timed(breaker, 2.0, now + 30)
    assert breaker.grown == 1


def test_a_ramp_is_not_over_while_what_returns_is_late() -> None:
    """Most of it, however little it is; what is older than the window is forgotten."""
    breaker, now = healthy()
    for signal in (TRIP, RESTED, PROBE_OK):
        breaker.move(signal, now=now, chance=0.0)
    timed(breaker, 5.0, now + 6)
    assert not breaker.ramped(0, now + 12)
    timed(breaker, 2.0, now + 13)
    assert (breaker.ramped(0, now + 18.9), breaker.ramped(0, now + 19)) == (False, True)
    timed(breaker, 5.0, now + 20)
    assert not breaker.ramped(0, now + 21)
    assert breaker.ramped(0, now + 51)


def test_late_answers_do_not_make_the_next_rest_short_again() -> None:
    """An upstream that stays slow rests twice as long each time, so it does not flap."""
    breaker, now = healthy(BreakerRules(cool_down_s=5, cool_down_max_s=60))
    rests = []
    for _ in range(4):
        while not timed(breaker, 9.0, now + 10):
            now += 1
        rests.append(breaker.rests_until - now - 10)
        now = breaker.rests_until
        for signal in (RESTED, PROBE_OK, RAMPED):
            breaker.move(signal, now=now, chance=0.0)
    assert rests == [5, 10, 20, 40]


def test_a_reset_forgets_what_was_usual() -> None:
    """An operator knows better."""
    breaker, now = healthy()
    breaker.move(RESET, now=now, chance=0.0)
    assert not any(timed(breaker, 20.0, now + 20 + n) for n in range(100))


def test_times_beyond_all_measure_do_no_harm() -> None:
    """Zero, and hours."""
    breaker, now = healthy()
    for n, seconds in enumerate((0.0, 1e-9, 1e6)):
        timed(breaker, seconds, now + n)
    many, _ = healthy(count=9000)
    assert many.tempo is not None
    assert many.tempo.baseline("", 100).median_s == pytest.approx(2.0, rel=0.06)


# Answers under 200 that are none.

LARGE = Evidence(request="big", prompt=20_000)
BAD = Evidence(request="bad", prompt=20_000, malformed=True)


def answers(breaker: Breaker, *told: Evidence, now: float = 100.0, began: float | None = None) -> list[str]:
    """The classes that were shut by these answers."""
    began = now if began is None else began
    return [breaker.sizes.record(one, began=began, now=now, chance=0.0) for one in told]


def test_only_the_size_class_whose_answers_are_none_is_kept_away() -> None:
    """Three in ten, of five at least: that class rests, others go on, and the breaker stays closed."""
    breaker = Breaker()
    shut = answers(breaker, LARGE, LARGE, BAD, BAD, LARGE, BAD)
    assert shut == [""] * 5 + ["16000-63999"]
    for _ in range(10):
        assert not breaker.record(FAILURE, began=100.0, now=100.0, chance=0.0, evidence=BAD)
    assert breaker.state is C
    assert [breaker.sizes.fits(tokens) for tokens in (0, 15_999, 16_000, 63_999, 64_000)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    told = breaker.sizes.verdict
    assert (told.sign, told.requests) == (Sign.MALFORMED, ("bad", "bad", "bad"))
    assert told.numbers == {"answers": 6, "malformed_share": 0.5, "rest_s": 5.0}
    assert breaker.sizes.shut == ["16000-63999"]


def test_a_class_returns_after_its_rest_and_rests_twice_as_long_when_it_is_no_better() -> None:
    """What began before counts nothing; answers that are fine end that."""
    breaker = Breaker()
    answers(breaker, *[BAD] * 5)
    assert breaker.sizes.rested(104.9) == []
    assert breaker.sizes.rested(105.0) == ["16000-63999"]
    assert breaker.sizes.fits(20_000)
    assert answers(breaker, *[BAD] * 10, now=106.0, began=104.0) == [""] * 10
    assert answers(breaker, *[BAD] * 5, now=106.0)[-1]
    assert breaker.sizes.rested(115.9) == []
    assert breaker.sizes.rested(116.0)
    answers(breaker, *[LARGE] * 5, now=120.0)
    answers(breaker, *[BAD] * 5, now=130.0)
    assert breaker.sizes.verdict.numbers["rest_s"] == 5.0
    assert answers(breaker, *[BAD] * 5, now=130.0) == [""] * 5


def test_of_the_smallest_prompts_they_are_failures_like_others() -> None:
    """Our own calls are of that class, so they can tell."""
    breaker = Breaker()
    small = Evidence(prompt=10, malformed=True)
    assert answers(breaker, *[small] * 10) == [""] * 10
    moved = [breaker.record(FAILURE, began=1.0, now=1.0, chance=0.0, evidence=small) for _ in range(3)]
    assert moved == [False, False, True]


def test_what_a_caller_may_have_asked_for_counts_once_in_a_row() -> None:
    """Empty answers to small prompts keep small prompts away, and never close an upstream to everybody."""
    breaker = Breaker(BreakerRules(errors=HALF_BAD))
    hollow = Evidence(prompt=10, malformed=True, hollow=True)
    for _ in range(40):
        assert not breaker.record(FAILURE, began=1.0, now=1.0, chance=0.0, evidence=hollow)
        assert breaker.failures == 1
    assert not breaker.record(FAILURE, began=1.0, now=1.0, chance=0.0)
    assert breaker.record(FAILURE, began=1.0, now=1.0, chance=0.0), "with two others it is the third"
    breaker.move(RESET, now=2.0, chance=0.0)
    for _ in range(40):
        assert not breaker.record(FAILURE, began=2.0, now=2.0, chance=0.0, evidence=hollow)
        assert breaker.failures == 1
        breaker.record(SUCCESS, began=2.0, now=2.0, chance=0.0)
    assert "error_share" not in breaker.numbers(2.0) or breaker.numbers(2.0)["error_share"] == 0
    good = Evidence(prompt=10)
    assert answers(breaker, *[good] * 8, *[hollow] * 4)[-1] == "0-999"
    assert (breaker.sizes.fits(10), breaker.sizes.fits(1000)) == (False, True)


def test_with_that_sign_off_what_is_hollow_is_a_failure_like_others() -> None:
    """Nothing else would count it."""
    breaker = Breaker(BreakerRules(malformed=None))
    hollow = Evidence(prompt=10, malformed=True, hollow=True)
    moved = [breaker.record(FAILURE, began=1.0, now=1.0, chance=0.0, evidence=hollow) for _ in range(3)]
    assert moved == [False, False, True]


def test_with_that_sign_off_they_are_failures_of_any_size() -> None:
    """No class is kept away."""
    breaker = Breaker(BreakerRules(malformed=None))
    assert answers(breaker, *[BAD] * 10) == [""] * 10
    moved = [breaker.record(FAILURE, began=1.0, now=1.0, chance=0.0, evidence=BAD) for _ in range(3)]
    assert moved == [False, False, True]
    assert breaker.sizes.fits(20_000)


def test_the_largest_class_has_no_end() -> None:
    """And who has no name is not named."""
    breaker = Breaker()
    shut = answers(breaker, *[Evidence(prompt=1_000_000, malformed=True)] * 5)
    assert shut[-1] == "64000-"
    assert breaker.sizes.verdict.requests == ()


# Whatever happens.

EVIDENCE = st.builds(
    Evidence,
    request=st.sampled_from(["", "r1", "r2"]),
    prompt=st.sampled_from([0, 999, 1_000, 20_000, 70_000]),
    first_token_s=st.none() | st.floats(0, 100),
    malformed=st.booleans(),
    hollow=st.booleans(),
    model=st.sampled_from(["m", "n"]),
    gave_up=st.booleans(),
)
TOUCHY = BreakerRules(
    errors=RatioRules(0.5, 10.0, 4), slow=SlowRules(volume=4, window_s=10.0), malformed=RatioRules(0.3, 10.0, 2)
)


@given(st.lists(st.tuples(STEP, EVIDENCE), max_size=120))
def test_with_every_sign_on_it_moves_only_by_its_table_and_never_on_old_news(
    history: list[tuple[Step, Evidence]],
) -> None:
    """With clocks that jump, results out of order, and every kind of evidence; a window is never less than its start,
    a rest never in the past, and a class that is kept away is shut once.
    """
    breaker, now = Breaker(TOUCHY), 0.0
    for (what, jump, age, chance), evidence in history:
        now += jump
        before, shut = copy(breaker), breaker.sizes.shut
        if isinstance(what, Outcome):
            told = breaker.sizes.record(evidence, began=now - age, now=now, chance=chance)
            assert not told or (told not in shut and told in breaker.sizes.shut)
            moved = breaker.record(what, began=now - age, now=now, chance=chance, evidence=evidence)
            assert breaker.state is (TABLE[before.state, SICK] if moved else before.state)
            assert not moved or (breaker.verdict.sign and now - age >= before.since and before.state in (C, R))
        elif (before.state, what) in TABLE:
            breaker.move(what, now=now, chance=chance)
            assert breaker.state is TABLE[before.state, what]
        breaker.sizes.rested(now)
        if breaker.state is R:
            assert breaker.window(now) >= TOUCHY.ramp_from
        if breaker.state is O and before.state is not O:
            assert breaker.rests_until >= now + TOUCHY.cool_down_s


@given(st.floats(0, 600), st.floats(0, 5), st.floats(0, 1, exclude_max=True))
def test_a_healthy_upstream_is_used_again_within_half_a_minute(outage_s: float, probe_s: float, chance: float) -> None:
    """However long it was down, whatever the jitter, and though every failed probe took its five seconds."""
    breaker, now = Breaker(), 0.0
    breaker.move(SICK, now=now, chance=chance)
    while breaker.state is not R:
        now = breaker.rests_until
        breaker.move(RESTED, now=now, chance=chance)
        answered = now >= outage_s
        now += 0.1 if answered else probe_s
        breaker.move(PROBE_OK if answered else PROBE_FAILED, now=now, chance=chance)
    assert breaker.allows(0, now)
    assert now - outage_s <= 30


@pytest.mark.parametrize(("state", "rest_s"), [(C, 5), (O, 3), (H, 10), (R, 10)])
def test_it_tells_how_long_it_would_rest(state: State, rest_s: float) -> None:
    """While it rests what is left of that; else all of the rest that would begin now."""
    breaker = in_state(state, BreakerRules(cool_down_s=5))
    assert breaker.rest_s(2.0) == rest_s
    assert breaker.rest_s(100.0) == (0 if state is O else rest_s)
