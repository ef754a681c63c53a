"""The breakers of all upstreams: who is told when one moves."""

from __future__ import annotations

from math import inf

import pytest

from extproc.breakers import Breakers
from extproc.core.breaker import Evidence, Outcome, Sign, Signal, State
from extproc.core.events import BreakerMoved, SizesMoved
from extproc.core.policy import BreakerRules, Upstream
from extproc.core.request import Dialect
from tests.doubles import HandClock, Observer


class Board:
    """Two upstreams, `a` with quick rules, and what was heard of them."""

    def __init__(self) -> None:
        rules = {"a": BreakerRules(failures=2, cool_down_s=5, jitter=0.5), "b": BreakerRules()}
        self.clock, self.observer, self.moves = HandClock(), Observer(), 0
        upstreams = [Upstream(name, "fake", frozenset(Dialect), breaker=rule) for name, rule in rules.items()]
        self.breakers = Breakers(upstreams, self.clock, self.observer, chance=lambda: 0.5)
        self.breakers.moved = self._moved

    def _moved(self) -> None:
        self.moves += 1

    def fail(self, upstream: str = "a", times: int = 1) -> None:
        for _ in range(times):
            self.breakers.record(upstream, Outcome.FAILURE, began=self.clock.now, cause="status 503")


@pytest.fixture
def board() -> Board:
    """All closed."""
    return Board()


def test_each_upstream_has_its_own_rules_and_its_own_state(board: Board) -> None:
    """Two failures open the one, not the other."""
    board.fail("a", 2)
    board.fail("b", 2)
    assert [board.breakers.allows(name) for name in "ab"] == [False, True]


def test_every_move_is_announced_with_its_cause_and_waiters_are_looked_at(board: Board) -> None:
    """Once per transition, after it; what moves nothing is not announced."""
    board.fail("a")
    assert (board.observer.events, board.moves) == ([], 0)
    board.fail("a")
    for signal in (Signal.RESTED, Signal.PROBE_OK, Signal.RAMPED):
        board.breakers.signal("a", signal, signal.value)
    assert [(e.upstream, e.before, e.after, e.cause) for e in board.observer.of(BreakerMoved)] == [
        ("a", State.CLOSED, State.OPEN, "status 503"),
        ("a", State.OPEN, State.HALF_OPEN, "rested"),
        ("a", State.HALF_OPEN, State.RAMPING, "probe_ok"),
        ("a", State.RAMPING, State.CLOSED, "ramped"),
    ]
    assert board.moves == 4


def test_waiters_see_the_new_state(board: Board) -> None:
    """`moved` is called when the breaker has moved already."""
    seen = []
    board.breakers.moved = lambda: seen.append(board.breakers.allows("a"))
    board.fail("a", 2)
    board.breakers.signal("a", Signal.RESET, "operator")
    assert seen == [False, True]


def test_an_upstream_is_due_for_a_probe_when_it_has_rested(board: Board) -> None:
    """Rest and jitter over, and not a second time while it is being tried."""
    board.fail("a", 2)
    assert board.breakers.earliest_probe(("a", "b")) == board.clock.now + 6.25
    board.clock.now += 6.2
    assert board.breakers.due() == []
    board.clock.now += 0.1
    assert board.breakers.due() == ["a"]
    board.breakers.signal("a", Signal.RESTED, "rested")
    assert board.breakers.due() == []


def test_the_earliest_probe_is_never_where_nothing_is_to_be_tried(board: Board) -> None:
    """Closed ones are not tried; one that is being tried may be through any moment, so its time is over."""
    assert board.breakers.earliest_probe(("a", "b")) == inf
    assert board.breakers.earliest_probe(()) == inf
    board.fail("a", 2)
    board.clock.now += 10
    board.breakers.signal("a", Signal.RESTED, "rested")
    assert board.breakers.earliest_probe(("a",)) <= board.clock.now


def test_who_is_merely_slow_is_told_apart_from_who_is_sick(board: Board) -> None:
    """From its opening until a canary fails."""
    for n in range(400):
        late = Evidence(prompt=10, first_token_s=2.0 if n < 300 else 20.0)
        board.breakers.record("b", Outcome.SUCCESS, began=board.clock.now, cause="", evidence=late)
    board.fail("a", 2)
    assert [board.breakers.allows(name) for name in "ab"] == [False, False]
    assert [board.breakers.slow(name) for name in "ab"] == [False, True]
    board.breakers.signal("b", Signal.RESTED, "rested")
    board.breakers.signal("b", Signal.PROBE_FAILED, "canary got status 503")
    assert not board.breakers.slow("b")


def test_results_of_unknown_upstreams_are_ignored(board: Board) -> None:
    """A record may name a cluster that is not ours."""
    board.fail("elsewhere", 10)
    assert board.moves == 0


def test_a_signal_without_an_entry_in_the_table_raises_and_tells_nobody(board: Board) -> None:
    """It is a bug of the caller."""
    with pytest.raises(KeyError):
        board.breakers.signal("a", Signal.PROBE_OK, "?")
    assert (board.observer.events, board.moves) == ([], 0)


def returning(board: Board) -> None:
    """Upstream `a` has rested, and its canary was answered."""
    board.fail("a", 2)
    for signal in (Signal.RESTED, Signal.PROBE_OK):
        board.breakers.signal("a", signal, signal.value)


def test_a_transition_is_told_with_its_numbers_and_the_requests_that_led_to_it(board: Board) -> None:
    """What was counted, how long it rests, and whose requests they were."""
    for n in range(2):
        evidence = Evidence(request=f"r{n}")
        board.breakers.record("a", Outcome.FAILURE, began=board.clock.now, cause="status 503", evidence=evidence)
    [moved] = board.observer.of(BreakerMoved)
    assert (moved.sign, moved.requests) == (Sign.FAILURES, ("r0", "r1"))
    assert moved.numbers == {"failures": 2, "paced": 0, "attempts": 2, "error_share": 1.0, "rest_s": 6.25}


def test_a_probe_that_is_refused_our_key_is_told_as_that(board: Board) -> None:
    """And it rests for long."""
    board.fail("a", 2)
    board.breakers.signal("a", Signal.RESTED, "rested")
    board.breakers.signal("a", Signal.PROBE_FAILED, "canary got status 401", grave=Sign.CREDENTIAL)
    moved = board.observer.of(BreakerMoved)[-1]
    assert (moved.sign, moved.numbers["rest_s"]) == (Sign.CREDENTIAL, 1125.0)
    assert board.breakers.state()["a"] == {
        "state": "open", "failures": 0, "paced": 0, "rests_s": 1125.0, "sign": "credential",
    }  # fmt: skip


def test_while_traffic_returns_so_many_may_run_as_its_window_says(board: Board) -> None:
    """What runs is counted by others; each success makes room for one more, and waiters are looked at."""
    running = 0
    board.breakers.flying = lambda _: running
    returning(board)
    assert board.breakers.allows("a")
    assert (board.breakers.room("a"), board.breakers.room("b")) == (2.0, inf)
    running = 2
    assert not board.breakers.allows("a")
    assert board.breakers.room("a") == 0.0
    assert board.breakers.earliest_probe(("a",)) <= board.clock.now
    moves = board.moves
    board.breakers.record("a", Outcome.SUCCESS, began=board.clock.now, cause="")
    assert board.breakers.allows("a")
    assert board.moves == moves + 1
    assert board.breakers.state()["a"]["window"] == 3.0


def test_what_ran_before_traffic_returned_takes_no_room_of_its_window(board: Board) -> None:
    """Long answers of the time before keep nobody away, nor the ramp from its end."""
    running = 50
    board.breakers.flying = lambda _: running
    returning(board)
    assert board.breakers.allows("a")
    running = 52
    assert not board.breakers.allows("a")
    running = 10
    assert board.breakers.allows("a")
    running = 12
    assert not board.breakers.allows("a")
    running = 10
    board.clock.now += 10
    board.breakers.tick()
    assert board.breakers.by_name["a"].state is State.CLOSED


def test_for_each_that_ran_before_and_ends_no_other_may_come(board: Board) -> None:
    """Or as many as ran before would be let in beside the window."""
    running = 10
    board.breakers.flying = lambda _: running
    board.breakers.ended("a", 0.0)
    returning(board)
    running = 12
    assert not board.breakers.allows("a")
    for _ in range(10):
        board.breakers.ended("a", came=0.0)
        running -= 1
        assert not board.breakers.allows("a")
    board.breakers.ended("a", came=board.clock.now)
    board.breakers.ended("no such", came=0.0)
    running -= 1
    assert board.breakers.allows("a")
    running += 1
    assert not board.breakers.allows("a")


def test_time_widens_the_window_and_ends_the_ramp(board: Board) -> None:
    """Waiters are looked at while it grows; at its end it is closed like any other."""
    returning(board)
    moves = board.moves
    board.clock.now += 5
    board.breakers.tick()
    assert (board.moves, board.breakers.by_name["a"].state) == (moves + 1, State.RAMPING)
    board.clock.now += 5
    board.breakers.tick()
    assert board.breakers.by_name["a"].state is State.CLOSED
    assert board.observer.of(BreakerMoved)[-1].cause == "traffic has returned"
    moves = board.moves
    board.breakers.tick()
    assert board.moves == moves


def test_a_size_class_that_is_kept_away_is_told_when_it_goes_and_when_it_returns(board: Board) -> None:
    """With its numbers and requests; what failed otherwise says nothing of sizes."""
    bad = Evidence(request="r", prompt=20_000, malformed=True)
    for _ in range(20):
        board.breakers.record("b", Outcome.IGNORED, began=0.0, cause="", evidence=Evidence(prompt=20_000))
    for _ in range(5):
        board.breakers.record("b", Outcome.FAILURE, began=board.clock.now, cause="answer ended early", evidence=bad)
    assert (board.breakers.fits("b", 20_000), board.breakers.fits("a", 20_000)) == (False, True)
    assert board.breakers.allows("b")
    assert board.breakers.state()["b"]["sizes_kept_away"] == ["16000-63999"]
    board.clock.now += 6
    board.breakers.tick()
    gone, back = board.observer.of(SizesMoved)
    assert (gone.sizes, gone.shut, gone.cause, gone.requests) == ("16000-63999", True, "answer ended early", ("r",) * 5)
    assert gone.numbers["malformed_share"] == 1.0
    assert (back.sizes, back.shut) == ("16000-63999", False)
    assert board.breakers.fits("b", 20_000)
    assert board.moves == 2
