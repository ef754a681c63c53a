"""Heaps that forget lazily, against sorted lists; and that they stay cheap, in operations counted, not in time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from extproc.core import lines as lines_of
from extproc.core import ranking as ranking_of
from extproc.core.fairness import cost
from extproc.core.lines import Backlog, Flow, Group, Line, Place, Tenant, Waiter
from extproc.core.policy import Order
from extproc.core.ranking import Ranking, ascending
from extproc.core.request import Size
from tests.doubles import request

GROUP = Group(("a",), frozenset({"a/slots"}))


class Thing:
    """Anything with a number that changes."""

    def __init__(self, name: int, number: float) -> None:
        self.name = name
        self.number = number


class RankingMachine(RuleBasedStateMachine):
    """Numbers rise silently and fall with notice; the model sorts everything anew each time.

    Things of equal numbers rank by their entering, but for one whose number rose: it may rank by either.
    """

    @initialize()
    def start(self) -> None:
        self.ranking: Ranking[Thing] = Ranking(lambda thing: thing.number)
        self.model: list[Thing] = []
        self.names = 0

    @rule(number=st.integers(-5, 5))
    def add(self, number: int) -> None:
        self.names += 1
        thing = Thing(self.names, number)
        self.ranking.add(thing)
        self.model.append(thing)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        thing = data.draw(st.sampled_from(self.model))
        self.ranking.discard(thing)
        self.model.remove(thing)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), by=st.integers(-5, 5))
    def change(self, data: st.DataObject, by: int) -> None:
        """Told of a rise, a ranking does not mind either."""
        thing = data.draw(st.sampled_from(self.model))
        thing.number += by
        if by < 0 or data.draw(st.booleans()):
            self.ranking.fell(thing)

    @precondition(lambda self: self.model)
    @rule()
    def ask(self) -> None:
        expected = min(self.model, key=lambda thing: (thing.number, thing.name))
        assert self.ranking.first() is expected

    @invariant()
    def nobody_is_lost(self) -> None:
        assert len(self.ranking) == len(self.model)
        if not self.model:
            assert self.ranking.first() is None
        found = list(self.ranking.lowest_first())
        assert sorted(thing.name for _, thing in found) == sorted(thing.name for thing in self.model)
        known = [number for number, _ in found]
        assert known == sorted(known)
        assert all(number <= thing.number for number, thing in found)
        if found:
            assert found[0][0] == found[0][1].number == min(thing.number for thing in self.model)


RankingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestRankingAgainstAList = RankingMachine.TestCase


def test_equal_numbers_rank_by_their_entering_whatever_happened_to_them() -> None:
    """Also who rose to a number that another had before, and who fell to it: entering is what counts."""
    ranking: Ranking[Thing] = Ranking(lambda thing: thing.number)
    first, second, third = (Thing(name, number) for name, number in enumerate((0, 1, 5)))
    for thing in (first, second, third):
        ranking.add(thing)
    first.number = 1
    third.number = 1
    ranking.fell(third)
    order = []
    for _ in range(3):
        order.append(ranking.first())
        ranking.discard(order[-1])
    assert order == [first, second, third]
    assert ranking.first() is None


def test_what_is_not_ranked_cannot_be_taken_away_or_move() -> None:
    """Both are bugs of the caller, and raise; also after it has left."""
    ranking: Ranking[Thing] = Ranking(lambda thing: thing.number)
    thing = Thing(0, 0)
    ranking.add(thing)
    ranking.discard(thing)
    for call in (ranking.discard, ranking.fell):
        with pytest.raises(KeyError):
            call(thing)


def test_what_left_and_came_back_counts_once() -> None:
    """With its new number, though its old place is still in the heap; and it ranks behind its equals now."""
    ranking: Ranking[Thing] = Ranking(lambda thing: thing.number)
    one, other = Thing(0, 1), Thing(1, 3)
    ranking.add(one)
    ranking.add(other)
    ranking.discard(one)
    one.number = 3
    ranking.add(one)
    assert [thing for _, thing in ranking.lowest_first()] == [other, one]


def test_who_comes_again_with_an_old_rank_and_number_is_not_compared_with_what_it_left_behind() -> None:
    """A new thing in the place of an old one, whose entry is still in the heap: things have no order of their own."""
    ranking: Ranking[Thing] = Ranking(lambda thing: thing.number)
    for _ in range(5):
        things = [Thing(0, 1), Thing(1, 1), Thing(2, 1)]
        for thing in things:
            ranking.add(thing, among_equals=-thing.name)
        assert [thing for _, thing in ranking.lowest_first()] == things[::-1]
        for thing in things:
            ranking.discard(thing)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 10, 100])
def test_a_heap_can_be_read_in_order_without_taking_it_apart(size: int) -> None:
    """Any heap, everything in it once."""
    chance = random.Random(size)
    heap = [(float(chance.randrange(50)), number) for number in range(size)]
    ranking_of.heapify(heap)
    before = list(heap)
    assert list(ascending(heap)) == sorted(heap)
    assert heap == before


def test_the_first_few_of_a_large_heap_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten of 100,000: some tens of steps, not 100,000."""
    heap = [(float(number), number) for number in range(100_000)]
    pushed = _count(monkeypatch, ranking_of, "heappush")
    assert list(islice(ascending(heap), 10)) == heap[:10]
    assert pushed.calls <= 20


def test_a_ranking_wastes_no_more_than_it_holds() -> None:
    """However many leave from the middle: what is left in the heap is at most twice what is ranked, and a few."""
    ranking: Ranking[Thing] = Ranking(lambda thing: thing.number)
    chance = random.Random(1)
    things = [Thing(name, number) for name, number in enumerate(chance.sample(range(1000), 1000))]
    for thing in things:
        ranking.add(thing)
    chance.shuffle(things)
    while things:
        ranking.discard(things.pop())
        assert len(ranking._heap) <= 2 * len(things) + 16
        if len(things) % 50 == 1:
            assert ranking.first() is min(things, key=lambda thing: thing.number)
    assert ranking.first() is None


def test_100_000_changes_of_1_000_numbers_cost_a_step_or_two_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in pushes, pops and rebuilt entries, while numbers rise, are corrected, and things come and go."""
    pushed, popped = (_count(monkeypatch, ranking_of, name) for name in ("heappush", "heappop"))
    raised, rebuilt = (_count(monkeypatch, ranking_of, name) for name in ("heapreplace", "heapify"))
    ranking: Ranking[Thing] = Ranking(lambda thing: thing.number)
    things = [Thing(name, 0) for name in range(1000)]
    chance = random.Random(2)
    for thing in things:
        ranking.add(thing)
    for _ in range(100_000):
        first = ranking.first()
        assert first is not None
        first.number += chance.randrange(100, 200)
        corrected = chance.choice(things)
        corrected.number -= chance.randrange(50)
        ranking.fell(corrected)
        if not chance.randrange(10):
            ranking.discard(corrected)
            ranking.add(corrected)
    steps = pushed.calls + popped.calls + raised.calls + rebuilt.sizes
    assert steps <= 500_000, steps
    assert len(ranking._heap) <= 5_000, len(ranking._heap)


ORDERS = ["fifo", "edf", "lifo"]


class FlowMachine(RuleBasedStateMachine):
    """A flow against a plain list: whose turn it is in each order, and who is the newest."""

    @initialize(order=st.sampled_from(ORDERS))
    def start(self, order: str) -> None:
        self.lifo = order == "lifo"
        self.line = Line(GROUP)
        tenant = Tenant(request(), 0)
        self.edf = order == "edf"
        self.flow = Flow(tenant, self.line, Order.EDF if self.edf else Order.FIFO, lifo=self.lifo)
        self.model: list[Waiter] = []
        self.left: list[Waiter] = []
        self.seq = 0

    @rule(since=st.integers(0, 9), until=st.integers(10, 19), fresh=st.booleans(), often=st.sampled_from([1, 1, 40]))
    def add(self, since: int, until: int, fresh: bool, often: int) -> None:  # noqa: FBT001 - drawn
        for _ in range(often):
            self.seq += 1
            one = Waiter(request(arrived=float(since), wait_until=float(until), fresh=fresh), GROUP, self.seq)
            self.flow.add(one)
            self.model.append(one)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), often=st.sampled_from([1, 1, 30]))
    def remove(self, data: st.DataObject, often: int) -> None:
        for _ in range(min(often, len(self.model))):
            one = data.draw(st.sampled_from(self.model)) if often == 1 else self.model[len(self.model) // 2]
            self.flow.remove(one)
            self.model.remove(one)
            self.left.append(one)

    @precondition(lambda self: self.model)
    @rule(often=st.integers(1, 20))
    def serve(self, often: int) -> None:
        """The first ones go, as they do all the time."""
        for _ in range(min(often, len(self.model))):
            one = next(self.flow.in_turn(lifo=self.lifo))[3]
            self.flow.remove(one)
            self.model.remove(one)
            if not self.model:
                break

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """The very same waiter again, after a change of group: its old place must not count for the new one."""
        one = data.draw(st.sampled_from(self.left))
        self.left.remove(one)
        self.flow.add(one)
        self.model.append(one)

    @invariant()
    def the_order_is_that_of_the_list(self) -> None:
        if not self.model:
            return

        def turn(one: Waiter) -> tuple[float, int]:
            return (one.request.wait_until if self.edf else one.since), one.seq

        places = list(self.flow.in_turn(lifo=False))
        assert [place[3] for place in places] == sorted(self.model, key=turn)
        assert [place[:2] for place in places] == sorted(turn(one) for one in self.model)
        newest_first = [place[3] for place in self.flow.in_turn(lifo=True)]
        expected = sorted(self.model, key=lambda one: -one.seq) if self.lifo else sorted(self.model, key=turn)
        assert newest_first == expected

    @invariant()
    def the_newest_is_that_of_the_list(self) -> None:
        for fresh in (False, True):
            alike = [one for one in self.model if one.request.fresh is fresh]
            expected = max(alike, key=lambda one: (one.since, one.seq)) if alike else None
            assert self.flow.newest(fresh=fresh) is expected

    @invariant()
    def waste_is_bounded_and_sums_are_right(self) -> None:
        assert self.flow.backlog == _sum(self.model)
        for held in _heaps(self.flow):
            assert len(held) <= 2 * len(self.model) + 64
        assert all(one.flow is self.flow for one in self.model)
        assert all(one.flow is None for one in self.left)


FlowMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestFlowAgainstAList = FlowMachine.TestCase


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("leave", ["first", "newest", "middle"])
def test_a_flow_that_never_empties_remembers_only_who_stands_in_it(order: str, leave: str) -> None:
    """One joins and one leaves, 5,000 times over: nothing of those who left stays behind, whoever they were."""
    flow = _flow(order)
    standing = [_join(flow, seq) for seq in range(3)]
    for seq in range(3, 5_000):
        standing.append(_join(flow, seq))
        next(flow.in_turn(lifo=order == "lifo"))
        flow.newest(fresh=False)
        gone = standing.pop({"first": 0, "newest": -1, "middle": 1}[leave])
        flow.remove(gone)
        assert all(len(held) <= 2 * len(standing) + 18 for held in _heaps(flow))


def test_nothing_stays_behind_where_the_newest_is_also_the_most_urgent() -> None:
    """It is first by deadline and last by arrival, and so only in the list for newest first it would stay."""
    flow = Flow(Tenant(request(), 0), Line(GROUP), Order.EDF, lifo=True)
    _join(flow, 0)
    for seq in range(1, 500):
        newest = Waiter(request(arrived=float(seq), wait_until=-float(seq)), GROUP, seq)
        flow.add(newest)
        flow.remove(newest)
        assert next(flow.in_turn(lifo=False))[3] is flow.newest(fresh=False)
    assert all(len(held) <= 2 + 16 for held in _heaps(flow))


@pytest.mark.parametrize(("order", "many"), [("fifo", 100_000), ("edf", 20_000), ("lifo", 20_000)])
def test_100_000_who_join_and_leave_from_the_middle_cost_a_few_steps_each(
    order: str, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: heap operations, places looked at, and places rebuilt; the first is asked for after each."""
    looked = _count(monkeypatch, Flow, "_stands")
    pushed, popped, rebuilt = (_count(monkeypatch, lines_of, name) for name in ("heappush", "heappop", "heapify"))
    flow, chance = _flow(order), random.Random(3)
    standing = [_join(flow, seq) for seq in range(many)]
    chance.shuffle(standing)
    while len(standing) > 1:
        flow.remove(standing.pop())
        next(flow.in_turn(lifo=order == "lifo"))
        flow.newest(fresh=False)
    steps = looked.calls + pushed.calls + popped.calls + rebuilt.sizes
    assert steps <= 20 * many, steps
    assert next(flow.in_turn(lifo=False))[3] is standing[0]


@pytest.mark.parametrize("order", ORDERS)
def test_a_long_line_served_in_its_order_costs_a_few_steps_each(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 20,000 are served; the newest first as cheaply as the oldest first."""
    looked = _count(monkeypatch, Flow, "_stands")
    flow = _flow(order)
    for seq in range(20_000):
        _join(flow, seq)
    for _ in range(10_000):
        flow.remove(next(flow.in_turn(lifo=order == "lifo"))[3])
    assert looked.calls <= 100_000, looked.calls


def test_who_comes_late_with_an_early_place_is_inserted_among_the_others() -> None:
    """An inherited arrival, and a change of group, put it where its arrival belongs, for shedding, too."""
    flow = _flow("lifo")
    for seq, since in ((5, 10.0), (7, 30.0), (3, 20.0)):
        flow.add(Waiter(request(arrived=99.0), GROUP, seq, since=since))
    assert [place[3].seq for place in flow.in_turn(lifo=False)] == [5, 3, 7]
    assert [place[3].seq for place in flow.in_turn(lifo=True)] == [7, 5, 3]
    newest = flow.newest(fresh=False)
    assert newest is not None
    assert newest.seq == 7


def test_the_newest_of_a_tenant_is_of_a_session_never_served_if_there_is_one() -> None:
    """Whatever flow it stands in, and however old it is; else the newest of all, by arrival and then by coming."""
    tenant = Tenant(request(), 0)
    flows = [Flow(tenant, Line(Group((name,))), Order.FIFO, lifo=False) for name in "ab"]
    for flow in flows:
        tenant.flows[flow.line.group] = flow
    places = [(flows[0], 5.0, False), (flows[1], 1.0, True), (flows[0], 0.5, True), (flows[1], 5.0, False)]
    for seq, (flow, since, fresh) in enumerate(places):
        flow.add(Waiter(request(arrived=since, fresh=fresh), flow.line.group, seq))
    shed = []
    for _ in places:
        shed.append(tenant.newest())
        assert shed[-1].flow is not None
        shed[-1].flow.remove(shed[-1])
    assert [one.seq for one in shed] == [1, 2, 3, 0]
    with pytest.raises(AssertionError):
        tenant.newest()


@pytest.mark.parametrize("seed", range(5))
def test_the_cost_before_a_waiter_is_that_of_the_list_by_a_sample_where_there_are_many(seed: int) -> None:
    """The last one's is exact: all but its own; in between it is right within a quarter of the whole."""
    flow, chance = _flow("edf"), random.Random(seed)
    for seq in range(1000):
        until = float(chance.randrange(10_000))
        flow.add(Waiter(request(arrived=0.0, wait_until=until), GROUP, seq))
        if not chance.randrange(3) and flow.backlog.requests > 1:
            flow.remove(chance.choice(list(flow.in_turn(lifo=False)))[3])
    standing = [place[3] for place in flow.in_turn(lifo=False)]
    total = flow.backlog.cost
    for rank, one in enumerate(standing):
        exact = rank * cost(one.request.size)
        assert flow.cost_before(one) == pytest.approx(exact, abs=0.25 * total), f"seed {seed}"
    stranger = Waiter(request(arrived=0.0, wait_until=inf), GROUP, 9999)
    assert flow.cost_before(stranger) == total
    flow.add(stranger)
    assert flow.cost_before(stranger) == pytest.approx(total)
    flow.remove(stranger)
    assert flow.cost_before(Waiter(request(arrived=0.0, wait_until=-1.0), GROUP, 9999)) == 0


def test_the_cost_before_a_waiter_is_exact_in_a_short_line() -> None:
    """Up to the size of the sample every place is looked at; who left does not count, nor does one's own turn."""
    flow = _flow("fifo")
    standing = [_join(flow, seq) for seq in range(60)]
    for gone in standing[10:20]:
        flow.remove(gone)
    each = cost(standing[0].request.size)
    assert flow.cost_before(standing[9]) == pytest.approx(9 * each)
    assert flow.cost_before(standing[30]) == pytest.approx(20 * each)
    assert flow.cost_before(standing[59]) == pytest.approx(49 * each)


def test_a_line_keeps_vips_and_others_apart_and_tells_everybody() -> None:
    """Each tenant's flow is ranked with its like."""
    line = Line(GROUP)
    for seq, (name, vip) in enumerate([("plain", False), ("star", True)]):
        flow = Flow(Tenant(request(tenant=name, vip=vip), seq), line, Order.FIFO, lifo=False)
        line.flows[name] = flow
        line.ranking(flow).add(flow)
        flow.add(Waiter(request(tenant=name, vip=vip), GROUP, seq))
    assert [ranking.first().tenant.name for ranking in (line.others, line.vips)] == ["plain", "star"]
    assert sorted(one.seq for one in line.waiters()) == [0, 1]


def test_a_waiter_has_the_place_of_its_arrival_unless_it_inherits_one() -> None:
    """Zero is a time like others."""
    own = request(arrived=7.0)
    assert [Waiter(own, GROUP, 0).since, Waiter(own, GROUP, 0, since=0.0).since] == [7.0, 0.0]


def test_a_group_that_holds_takes_only_its_first_healthy_upstream() -> None:
    """Or, where none is, the first that is merely slow. Others take any of theirs, whatever its health; nobody takes
    what it did not ask for.
    """
    spills, holds = (Group(("a", "b"), first_only=first_only) for first_only in (False, True))
    for sick, expected in (("", "a"), ("a", "b"), ("ab", "")):

        def allows(name: str, sick: str = sick) -> bool:
            return name not in sick

        assert [name for name in "abc" if holds.takes(name, allows, slow=lambda _: False)] == list(expected)
        assert [name for name in "abc" if spills.takes(name, allows, slow=lambda _: False)] == ["a", "b"]
        assert [name for name in "abc" if holds.takes(name, allows, slow="b".__eq__)] == list(expected or "b")


def test_a_backlog_counts_in_and_out_and_takes_a_share_of_another() -> None:
    """Parts of requests, tokens and bytes count whole, so that a kept part never rounds to nothing."""
    backlog, one = Backlog(), request(size=Size(7, 4), bytes=9)
    backlog.add(one)
    assert backlog == Backlog(requests=1, tokens=11, input=7, bytes=9, cost=15.0)
    half = Backlog()
    half.merge(backlog, 0.5)
    assert half == Backlog(requests=1, tokens=6, input=4, bytes=5, cost=7.5)
    half.merge(backlog)
    assert half == Backlog(requests=2, tokens=17, input=11, bytes=14, cost=22.5)
    backlog.add(one, -1)
    assert backlog == Backlog()


class _Calls:
    """How often something was called, and the sum of the lengths of its first arguments that have one."""

    def __init__(self) -> None:
        self.calls = 0
        self.sizes = 0


def _count(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> _Calls:
    counted, real = _Calls(), getattr(owner, name)

    def counting(first: object, *rest: object) -> object:
        counted.calls += 1
        counted.sizes += len(first) if isinstance(first, list) else 0
        return real(first, *rest)

    monkeypatch.setattr(owner, name, counting)
    return counted


def _flow(order: str) -> Flow:
    kind = Order.EDF if order == "edf" else Order.FIFO
    return Flow(Tenant(request(), 0), Line(GROUP), kind, lifo=order == "lifo")


def _join(flow: Flow, seq: int) -> Waiter:
    one = Waiter(request(arrived=float(seq), wait_until=seq + 30.0), GROUP, seq)
    flow.add(one)
    return one


def _heaps(flow: Flow) -> Iterator[list[Place]]:
    yield from (flow._turns, flow._fresh, flow._running, flow._arrived or [])


def _sum(waiters: list[Waiter]) -> Backlog:
    total = Backlog()
    for one in waiters:
        total.add(one.request)
    return total


def test_a_line_knows_for_want_of_what_its_first_was_refused_and_how_long() -> None:
    """Who comes later takes the difference; what holds it now counts up to now."""
    line = Line(GROUP)
    assert (line.lacking, line.lacked(5.0)) == ((), {})
    line.refused(("a/slots",), 10.0)
    line.refused(("a/slots",), 11.0)
    assert (line.lacking, line.lacked(12.0)) == (("a/slots",), {("a/slots",): 2.0})
    line.refused(("a/total", "b/total"), 13.0)
    assert line.lacked(14.0) == {("a/slots",): 3.0, ("a/total", "b/total"): 1.0}
    line.refused(("a/slots",), 15.0)
    assert line.lacked(20.0) == {("a/slots",): 8.0, ("a/total", "b/total"): 2.0}
