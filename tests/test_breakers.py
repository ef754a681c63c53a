"""The breakers of all upstreams: who is told when one moves."""

from __future__ import annotations

from math import inf

import pytest

from extproc.breakers import Breakers
from extproc.core.breaker import Outcome, Signal, State
from extproc.core.events import BreakerMoved
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
    for signal in (Signal.RESTED, Signal.PROBE_OK):
        board.breakers.signal("a", signal, signal.value)
    assert [(e.upstream, e.before, e.after, e.cause) for e in board.observer.of(BreakerMoved)] == [
        ("a", State.CLOSED, State.OPEN, "status 503"),
        ("a", State.OPEN, State.HALF_OPEN, "rested"),
        ("a", State.HALF_OPEN, State.CLOSED, "probe_ok"),
    ]
    assert board.moves == 3


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


def test_results_of_unknown_upstreams_are_ignored(board: Board) -> None:
    """A record may name a cluster that is not ours."""
    board.fail("elsewhere", 10)
    assert board.moves == 0


def test_a_signal_without_an_entry_in_the_table_raises_and_tells_nobody(board: Board) -> None:
    """It is a bug of the caller."""
    with pytest.raises(KeyError):
        board.breakers.signal("a", Signal.PROBE_OK, "?")
    assert (board.observer.events, board.moves) == ([], 0)
