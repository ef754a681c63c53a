"""Lanes against a naive list."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from extproc.core.lanes import Backlog, Group, Lanes, Waiter
from extproc.core.policy import Lane, WhenBusy
from extproc.core.request import Size
from tests.doubles import request

LANES = [
    Lane("P1", 1, 30, WhenBusy.SPILL, 1, max_requests=4, max_tokens=10_000, max_bytes=10_000),
    Lane("P0", 0, 4, WhenBusy.SPILL, 1, max_requests=100, max_tokens=300, max_bytes=10_000),
    Lane("P2", 2, 110, WhenBusy.HOLD, 1, max_requests=100, max_tokens=10_000, max_bytes=50),
]
GROUPS = [
    Group(names, frozenset(f"{name}/{what}" for name in names for what in ("slots", model)), first_only)
    for names in [("a",), ("b",), ("a", "b")]
    for model in ("m", "n")
    for first_only in (False, True)
]
SICK = [frozenset(), frozenset("a"), frozenset("b"), frozenset("ab")]


USUAL = Size(60, 40)


def waiter(seq: int, group: Group = GROUPS[0], *, lane: str = "P1", size: Size = USUAL, held: int = 0) -> Waiter:
    return Waiter(request(lane=lane, size=size, bytes=held), group, seq)


class LanesMachine(RuleBasedStateMachine):
    """Random joining, leaving and regrouping; a plain list sorted by rank and arrival is the model."""

    @initialize()
    def start(self) -> None:
        self.lanes = Lanes(LANES)
        self.model: list[Waiter] = []
        self.seq = 0

    @rule(
        lane=st.sampled_from([lane.name for lane in LANES]),
        group=st.sampled_from(GROUPS),
        size=st.builds(Size, st.integers(0, 100), st.integers(0, 100)),
        held=st.integers(0, 20),
    )
    def join(self, lane: str, group: Group, size: Size, held: int) -> None:
        self.seq += 1
        newcomer = waiter(self.seq, group, lane=lane, size=size, held=held)
        self.lanes.join(newcomer)
        self.model.append(newcomer)
        self.model.sort(key=lambda w: (self.lanes.rules[w.request.lane].rank, w.seq))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.model))
        self.lanes.leave(gone)
        self.model.remove(gone)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), group=st.sampled_from(GROUPS))
    def regroup(self, data: st.DataObject, group: Group) -> None:
        self.lanes.regroup(data.draw(st.sampled_from(self.model)), group)

    @invariant()
    def heads_are_the_first_of_each_group(self) -> None:
        for depth in (1, 2, 3, 100):
            expected = []
            for one in self.model:
                alike = [w for w in self.model if (w.request.lane, w.group) == (one.request.lane, one.group)]
                if alike.index(one) < depth:
                    expected.append((one, alike.index(one) == depth - 1 and len(alike) > depth))
            assert self.lanes.heads(depth) == expected

    @invariant()
    def bounds_are_those_of_the_list(self) -> None:
        assert len(self.lanes) == len(self.model)
        assert sorted(w.seq for w in self.lanes.waiters()) == sorted(w.seq for w in self.model)
        for lane in LANES:
            inside = [w.request for w in self.model if w.request.lane == lane.name]
            backlog = _backlog(inside)
            assert self.lanes.backlogs[lane.name] == backlog
            assert self.lanes.full(lane.name) == (
                len(inside) > lane.max_requests
                or backlog.tokens > lane.max_tokens
                or backlog.bytes > lane.max_bytes
            )  # fmt: skip

    @invariant()
    def ahead_is_what_the_list_says(self) -> None:
        candidates = [*self.model[-2:], waiter(-1, Group(), lane="P1")]
        for one in candidates:
            for upstream, key, sick in [(u, f"{u}/{k}", s) for u in "ab" for k in ("slots", "m") for s in SICK]:
                rank = self.lanes.rules[one.request.lane].rank
                before = [w for w in self.model if self.lanes.rules[w.request.lane].rank <= rank and w is not one]
                goes = [w.request for w in before if key in w.group.keys and _goes(w.group, upstream, sick)]
                found = self.lanes.ahead(one, upstream, key, lambda name, sick=sick: name not in sick)
                assert found == _backlog(goes)


def _goes(group: Group, upstream: str, sick: frozenset[str]) -> bool:
    if not group.first_only:
        return upstream in group.names
    return [name for name in group.names if name not in sick][:1] == [upstream]


def _backlog(requests: list) -> Backlog:
    total = Backlog()
    for one in requests:
        total.add(one)
    return total


LanesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLanesAgainstAList = LanesMachine.TestCase


def test_lanes_rank_by_their_rank_not_by_how_they_are_given() -> None:
    """The best lane is asked first, whatever the order of arrival."""
    lanes = Lanes(LANES)
    for seq, lane in enumerate(["P2", "P1", "P0", "P1"]):
        lanes.join(waiter(seq, lane=lane))
    order = [head.request.lane for head, _ in lanes.heads(2)]
    assert [lane for lane, _ in groupby(order)] == ["P0", "P1", "P2"]


def test_regrouping_keeps_the_place_that_the_arrival_gave() -> None:
    """Whoever wants other upstreams stands among those who want the same as if it always had."""
    lanes = Lanes(LANES)
    a, b = GROUPS[0], GROUPS[4]
    early, *others = (waiter(0, a), waiter(1, b), waiter(2, b))
    for one in (*others, early):
        lanes.join(one)
    lanes.regroup(early, b)
    assert [head.seq for head, _ in lanes.heads(3)] == [0, 1, 2]
    assert [head.seq for head, _ in lanes.heads(1)] == [0]


@pytest.mark.parametrize("other", [waiter(1), waiter(2, GROUPS[4])])
def test_only_who_stands_in_line_can_leave_it(other: Waiter) -> None:
    """Leaving twice, or without having joined, is a bug and raises."""
    lanes = Lanes(LANES)
    lanes.join(waiter(0))
    with pytest.raises((KeyError, ValueError)):
        lanes.leave(other)
    assert len(lanes) == 1


def test_another_models_queue_is_not_ahead_for_tokens_but_for_slots() -> None:
    """Work ahead is counted per key: two models share an upstream's slots, not each other's token limits."""
    lanes = Lanes(LANES)
    for seq, keys in enumerate([{"a/slots", "a/m/total"}, {"a/slots", "a/n/total"}]):
        lanes.join(waiter(seq, Group(("a",), frozenset(keys)), size=Size(70, 30)))
    newest = waiter(2, Group())
    ahead = [lanes.ahead(newest, "a", key, lambda _: True) for key in ("a/slots", "a/n/total")]
    assert [(b.requests, b.tokens, b.input) for b in ahead] == [(2, 200, 140), (1, 100, 70)]
