"""The breaker as its table, and the counting that leads to it."""

from __future__ import annotations

from copy import copy
from math import inf
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.breaker import TABLE, Breaker, Outcome, Signal, State
from extproc.core.policy import BreakerRules

C, O, H = State.CLOSED, State.OPEN, State.HALF_OPEN  # noqa: E741 - a table is read by its columns
SICK, RESTED, PROBE_OK, PROBE_FAILED, TRIP, RESET = Signal
SUCCESS, FAILURE, PACED, IGNORED = Outcome

EXPECTED = {
    SICK:         {C: O},
    RESTED:       {O: H},
    PROBE_OK:     {H: C},
    PROBE_FAILED: {H: O},
    TRIP:         {C: O, O: O, H: O},
    RESET:        {C: C, O: C, H: C},
}  # fmt: skip


def in_state(state: State) -> Breaker:
    """A breaker that was moved to `state` at time 0 just now."""
    breaker = Breaker()
    for signal in {C: (RESET,), O: (SICK,), H: (SICK, RESTED)}[state]:
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
        assert breaker.allows == (after is C)
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
    for expected in (5, 10, 20):
        breaker.record(FAILURE, began=now, now=now, chance=0.0)
        assert breaker.rests_until - now == expected
        now = breaker.rests_until
        breaker.move(RESTED, now=now, chance=0.0)
        breaker.move(PROBE_OK, now=now, chance=0.0)


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
def test_users_results_move_only_a_closed_breaker(state: State, outcome: Outcome) -> None:
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


steps = st.lists(
    st.builds(
        Step,
        st.sampled_from([*Outcome, *Outcome, *Signal]),
        st.one_of(st.floats(0, 10), st.floats(-100, 100)),
        st.floats(0, 60),
        st.floats(0, 1, exclude_max=True),
    ),
    max_size=60,
)


@given(steps)
def test_random_histories_with_clock_jumps_keep_its_promises(history: list[Step]) -> None:
    """Whatever comes in whatever order: it moves only by the table, opens only when full, never flaps on old news."""
    breaker, now, row, paced = Breaker(), 0.0, 0, 0
    for what, jump, age, chance in history:
        now += jump
        before = copy(breaker)
        if isinstance(what, Outcome):
            moved = breaker.record(what, began=now - age, now=now, chance=chance)
            counts = before.state is C and now - age >= before.since
            row = 0 if counts and what is SUCCESS else row + (counts and what is FAILURE)
            paced = 0 if counts and what is SUCCESS else paced + (counts and what is PACED)
            assert moved == (counts and what in {FAILURE, PACED} and (row >= 3 or paced >= 5))
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
        assert breaker.allows == (breaker.state is C) == (breaker.rests_until == inf)
        if breaker.state is O:
            assert breaker.rests_until >= breaker.since + 5
            if before.state is O:
                assert breaker.rests_until >= before.rests_until
        assert breaker.due(now) == (breaker.state is O and now >= breaker.rests_until)
