"""Whose turn it is, against a naive model that looks at everybody each time. The seed is in the test's name."""

from __future__ import annotations

import random
from itertools import groupby
from typing import Any

import pytest

from extproc.core.fairness import cost
from extproc.core.lanes import Lanes
from extproc.core.lines import Flow, Group, Line, Waiter
from extproc.core.policy import Lane, Order, WhenBusy
from extproc.core.request import Size
from tests.doubles import request

GROUPS = [Group((name,), frozenset({f"{name}/slots"})) for name in "abc"]
WEIGHTS = {"t0": 1.0, "t1": 2.0, "t2": 0.5, "t3": 1.0, "v0": 1.0, "v1": 2.0}
"""Tenants and their weights; powers of two, so that the model's sums are exact. Those with a v are VIPs."""
SEEDS = range(12)


def lane(name: str = "P1", rank: int = 1, **changes: Any) -> Lane:
    """A lane that holds much, but for `changes`."""
    bounds = {"max_requests": 100_000, "max_tokens": 10**9, "max_bytes": 10**9}
    return Lane(name, rank, 30, WhenBusy.HOLD, 1, **(bounds | changes))


class Naive:
    """Lanes as their rules say it, without any index. See `Lanes` for what the methods do."""

    def __init__(self, rules: list[Lane]) -> None:
        self.queues = [NaiveQueue(rule) for rule in sorted(rules, key=lambda rule: rule.rank)]

    def of(self, name: str) -> NaiveQueue:
        return next(queue for queue in self.queues if queue.rule.name == name)


class NaiveQueue:
    """One lane: a list of waiters, and a counter for each tenant that ever came."""

    def __init__(self, rule: Lane) -> None:
        self.rule = rule
        self.waiting: list[Waiter] = []
        self.counters: dict[str, float] = {}
        self.absent: dict[str, float] = {}
        self.charged: dict[str, float] = {}
        self.floor = self.vip_floor = self.debt = 0.0
        self.lifo = False

    def join(self, waiter: Waiter) -> None:
        tenant, vip = waiter.request.tenant, waiter.request.vip
        if tenant not in self.counters:
            counter = max(self.absent.pop(tenant, 0.0), min(self.counters.values(), default=self.floor))
            if vip:
                counter = max(counter, min(self._vip_counters(), default=self.vip_floor))
            self.counters[tenant] = counter
        self.waiting.append(waiter)
        self._fill()

    def leave(self, waiter: Waiter) -> None:
        self.waiting.remove(waiter)
        tenant = waiter.request.tenant
        if tenant not in self._tenants():
            counter = self.counters.pop(tenant)
            self.floor = max(self.floor, min(self.counters.values(), default=counter))
            if waiter.request.vip:
                self.vip_floor = max(self.vip_floor, min(self._vip_counters(), default=counter))
            self._remember(tenant, counter)
        self._fill()

    def serve(self, waiter: Waiter) -> None:
        service, tenant = cost(waiter.request.size), waiter.request.tenant
        self.debt = self._debt_after(self.debt, waiter, service)
        self.counters[tenant] += service / waiter.request.weight
        self.charged[waiter.request.ticket] = service
        self.leave(waiter)

    def settle(self, gone: Waiter, service: float) -> None:
        tenant = gone.request.tenant
        by = (service - self.charged.pop(gone.request.ticket)) / gone.request.weight
        if tenant in self.counters:
            self.counters[tenant] += by
        elif by > 0 or (by < 0 and tenant in self.absent):
            self._remember(tenant, self.absent.get(tenant, self.floor) + by)

    def check(self, heads: list[tuple[Waiter, bool]], depths: dict[Group, int] | None) -> None:
        """Each of `heads` has the best claim of those who were to be asked for then, as far as no other equals it.

        depths: of the lines that are asked for more than once, None when everybody is asked for singly.
        """
        left = {waiter.group: (depths or {}).get(waiter.group, 1) for waiter in self.waiting}
        rest, counters, debt = list(self.waiting), dict(self.counters), self.debt
        for head, followed in heads:
            asked = [waiter for waiter in rest if left[waiter.group]]
            assert head in asked
            alike = [one for one in asked if (one.group, one.request.tenant) == (head.group, head.request.tenant)]
            assert head is min(alike, key=self._turn)
            assert _claim(head, counters, debt) == min(_claim(one, counters, debt) for one in asked)
            assert followed is (left[head.group] == 1 and self._followed(head.group, depths))
            left[head.group] -= 1
            rest.remove(head)
            if depths is not None:
                service = cost(head.request.size)
                counters[head.request.tenant] += service / head.request.weight
                debt = self._debt_after(debt, head, service)
        assert not any(left[waiter.group] for waiter in rest)

    def _turn(self, one: Waiter) -> tuple[float, int]:
        if self.lifo:
            return -one.seq, one.seq
        return (one.request.wait_until if self.rule.order is Order.EDF else one.since), one.seq

    def _followed(self, group: Group, depths: dict[Group, int] | None) -> bool:
        alike = sum(waiter.group == group for waiter in self.waiting)
        if depths is None:
            return alike > 1 or len(self._tenants()) > 1
        return alike > depths.get(group, 1)

    def _debt_after(self, debt: float, head: Waiter, service: float) -> float:
        kinds = {waiter.request.vip for waiter in self.waiting}
        if len(kinds) < 2:
            return debt
        share = self.rule.vip_share
        if head.request.vip:
            return max(debt, min(debt + service * (1 - share), service))
        return min(debt, max(debt - service * share, -service))

    def _remember(self, tenant: str, counter: float) -> None:
        self.absent[tenant] = counter
        self.absent = {name: claim for name, claim in self.absent.items() if claim > self.floor}

    def _fill(self) -> None:
        requests = [waiter.request for waiter in self.waiting]
        above = self.rule.lifo_above
        if above is not None:
            fill = max(
                len(requests) / self.rule.max_requests,
                sum(one.size.total for one in requests) / self.rule.max_tokens,
                sum(one.bytes for one in requests) / self.rule.max_bytes,
            )
            self.lifo = fill > (above / 2 if self.lifo else above)

    def _tenants(self) -> set[str]:
        return {waiter.request.tenant for waiter in self.waiting}

    def _vip_counters(self) -> list[float]:
        return [counter for name, counter in self.counters.items() if name.startswith("v")]


RULES = {
    "plain": [lane("P0", 0), lane("P2", 2), lane("P1", 1)],
    "by deadline": [lane("P0", 0, order=Order.EDF), lane("P1", 1, order=Order.EDF, vip_share=0.25)],
    "newest first when full": [lane("P0", 0, lifo_above=0.5, max_requests=24), lane("P1", 1, vip_share=0.25)],
    "newest first by tokens": [lane("P1", 1, lifo_above=0.25, max_tokens=4000, order=Order.EDF)],
    "newest first by bytes": [lane("P1", 1, lifo_above=0.25, max_bytes=256)],
    "VIPs always": [lane("P1", 1, vip_share=1.0)],
    "VIPs never": [lane("P1", 1, vip_share=0.0)],
}


class Schedule:
    """Random joins, leaves, changes of group, grants and settlements, done to the lanes and to the model."""

    def __init__(self, rules: list[Lane], seed: int) -> None:
        self.chance = random.Random(seed)
        self.lanes, self.naive = Lanes(rules), Naive(rules)
        self.names = [rule.name for rule in rules]
        self.waiting: list[Waiter] = []
        self.flying: list[Waiter] = []
        self.seq = 0

    def step(self) -> None:
        grow = 0.8 if self.seq // 60 % 2 else 0.35
        act = self.chance.random()
        if act < grow or not self.waiting:
            self._join()
        elif act < grow + 0.1:
            one = self._pick(self.waiting)
            self.lanes.leave(one)
            self.naive.of(one.request.lane).leave(one)
        elif act < grow + 0.15:
            self._regroup(self.chance.choice(self.waiting))
        else:
            self._serve()
        if self.flying and self.chance.random() < 0.4:
            self._settle(self._pick(self.flying))

    def newcomer(self) -> Waiter:
        self.seq += 1
        tenant, now = self.chance.choice(list(WEIGHTS)), float(self.seq)
        one = request(
            tenant=tenant,
            ticket=str(self.seq),
            lane=self.chance.choice(self.names),
            size=self.size(),
            arrived=now,
            wait_until=now + self.chance.randrange(50),
            weight=WEIGHTS[tenant],
            vip=tenant.startswith("v"),
            fresh=self.chance.random() < 0.3,
            bytes=self.chance.randrange(16),
        )
        since = now - self.chance.randrange(20) if self.chance.random() < 0.2 else now
        return Waiter(one, self.chance.choice(GROUPS), self.seq, since)

    def size(self) -> Size:
        return Size(self.chance.randrange(200), self.chance.randrange(100))

    def check(self) -> None:
        """Singly, and with some lines at some depths; those of one lane count in all of them."""
        self._check(self.lanes.heads(), {})
        deep = {line: self.chance.choice([1, 2, 3, 64]) for line in self.lines() if self.chance.random() < 0.7}
        self._check(self.lanes.heads(deep), deep)
        assert len(self.lanes) == len(self.waiting)
        assert sorted(one.seq for one in self.lanes.waiters()) == sorted(one.seq for one in self.waiting)

    def _check(self, heads: list[tuple[Waiter, bool]], deep: dict[Line, int]) -> None:
        lanes = [name for name, _ in groupby(heads, key=lambda head: head[0].request.lane)]
        assert lanes == [queue.rule.name for queue in self.naive.queues if queue.waiting]
        for queue in self.naive.queues:
            lines = self.lanes.queues[queue.rule.name].lines
            depths = {group: deep[line] for group, line in lines.items() if line in deep} if deep else None
            queue.check([head for head in heads if head[0].request.lane == queue.rule.name], depths)

    def lines(self) -> list[Line]:
        return [line for queue in self.lanes.queues.values() for line in queue.lines.values()]

    def _join(self) -> None:
        one = self.newcomer()
        self.lanes.join(one)
        self.naive.of(one.request.lane).join(one)
        self.waiting.append(one)

    def _regroup(self, one: Waiter) -> None:
        queue = self.naive.of(one.request.lane)
        queue.leave(one)
        self.lanes.regroup(one, self.chance.choice(GROUPS))
        queue.join(one)

    def _serve(self) -> None:
        """Mostly the best, sometimes one that fits where better ones do not."""
        heads = [head for head, _ in self.lanes.heads()]
        one = heads[0] if self.chance.random() < 0.7 else self.chance.choice(heads)
        self.lanes.serve(one)
        self.naive.of(one.request.lane).serve(one)
        self.waiting.remove(one)
        self.flying.append(one)

    def _settle(self, one: Waiter) -> None:
        size = self.chance.choice([None, self.size(), one.request.size])
        self.lanes.settle(one.request, size)
        self.naive.of(one.request.lane).settle(one, 0.0 if size is None else cost(size))

    def _pick(self, some: list[Waiter]) -> Waiter:
        return some.pop(self.chance.randrange(len(some)))


def _claim(one: Waiter, counters: dict[str, float], debt: float) -> tuple[bool, float]:
    """VIPs before all others while they owe nothing, then the smaller counter."""
    return debt <= 0 and not one.request.vip, counters[one.request.tenant]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_every_look_at_a_random_schedule_is_that_of_the_model(rules: list[Lane], seed: int) -> None:
    """Order, depths and what is followed, after each of 250 steps; nobody is lost."""
    schedule = Schedule(rules, seed)
    for _ in range(250):
        schedule.step()
        schedule.check()
    for queue in schedule.lanes.queues.values():
        model = schedule.naive.of(queue.rule.name)
        assert queue.debt == model.debt
        assert queue.lifo is model.lifo
        assert {name: tenant.counter for name, tenant in queue.tenants.items()} == model.counters


@pytest.mark.parametrize("seed", SEEDS)
def test_asking_for_several_of_a_line_is_asking_for_one_after_the_other(seed: int) -> None:
    """What a deep look tells is who goes if each is granted before the next is looked for."""
    twins = [Schedule([lane(vip_share=0.25)], seed) for _ in range(2)]
    for twin in twins:
        for _ in range(150):
            twin.step()
    deep, single = (twin.lanes for twin in twins)
    depth = dict(zip((line.group for line in deep.queues["P1"].lines.values()), (3, 1, 7), strict=False))
    told = [head.seq for head, _ in deep.heads({line: depth[line.group] for line in twins[0].lines()})]
    granted = []
    while heads := [head for head, _ in single.heads() if depth[head.group]]:
        depth[heads[0].group] -= 1
        granted.append(heads[0].seq)
        single.serve(heads[0])
    assert told == granted
    assert len(told) > 3


def test_lanes_rank_by_their_rank_not_by_how_they_are_given() -> None:
    """The best lane is asked first, whatever the order of arrival."""
    lanes = Lanes([lane("P1", 1), lane("P2", 2), lane("P0", 0)])
    for seq, name in enumerate(["P2", "P1", "P0", "P1"]):
        lanes.join(Waiter(request(lane=name), GROUPS[seq % 3], seq))
    order = [head.request.lane for head, _ in lanes.heads()]
    assert [name for name, _ in groupby(order)] == ["P0", "P1", "P2"]
    assert list(lanes.rules) == ["P0", "P1", "P2"]


def test_the_smallest_counter_goes_first_and_of_equals_who_came_first() -> None:
    """A tenant that was served waits until the others had as much, by weight; ties are by coming."""
    lanes = Lanes([lane()])
    for seq, (tenant, weight) in enumerate([("a", 1.0), ("b", 2.0)] * 6):
        lanes.join(Waiter(request(tenant=tenant, weight=weight, ticket=str(seq)), GROUPS[0], seq))
    assert _serve_all(lanes, 9) == list("abbabbabb")


def test_inside_a_tenant_the_first_to_arrive_goes_first_and_an_inherited_place_counts() -> None:
    """Whoever inherits an arrival stands where that arrival stood, ahead of those who came before its return."""
    lanes = Lanes([lane()])
    for seq, (arrived, since) in enumerate([(10.0, 10.0), (11.0, 11.0), (12.0, 3.0), (13.0, 10.5)]):
        lanes.join(Waiter(request(arrived=arrived, wait_until=50.0 - seq), GROUPS[0], seq, since, before=40.0))
    assert _serve_all(lanes, 4, by="seq") == [2, 0, 3, 1]


def test_by_deadline_the_most_urgent_goes_first_whenever_it_came() -> None:
    """Also before an inherited place; equal deadlines by their coming."""
    lanes = Lanes([lane(order=Order.EDF)])
    for seq, (until, since) in enumerate([(50.0, 0.0), (40.0, 9.0), (60.0, -5.0), (40.0, 1.0)]):
        lanes.join(Waiter(request(arrived=9.0, wait_until=until), GROUPS[0], seq, since))
    assert _serve_all(lanes, 4, by="seq") == [1, 3, 0, 2]


def test_the_newest_go_first_above_a_fill_until_it_has_halved() -> None:
    """Hysteresis: more than half full turns it on, a quarter turns it off, and in between it stays as it was."""
    lanes = Lanes([lane(max_requests=8, lifo_above=0.5)])
    for seq in range(4):
        lanes.join(Waiter(request(arrived=float(seq), ticket=str(seq)), GROUPS[0], seq))
        assert _first(lanes).seq == 0
    lanes.join(Waiter(request(arrived=4.0, ticket="4"), GROUPS[0], 4))
    assert _serve_all(lanes, 4, by="seq") == [4, 3, 2, 0]
    for seq in (5, 6, 7):
        lanes.join(Waiter(request(arrived=float(seq), ticket=str(seq)), GROUPS[0], seq))
    assert _first(lanes).seq == 1


@pytest.mark.parametrize("bound", ["max_requests", "max_tokens", "max_bytes"])
def test_the_fullest_bound_tells_whether_the_newest_go_first(bound: str) -> None:
    """Requests, tokens or bytes: three of the four that the lane holds are above 60 % of it."""
    most = {"max_requests": 4, "max_tokens": 400, "max_bytes": 40}[bound]
    lanes = Lanes([lane(lifo_above=0.6, **{bound: most})])
    for seq in range(3):
        assert not lanes.queues["P1"].lifo
        lanes.join(Waiter(request(bytes=10), GROUPS[0], seq))
    assert lanes.queues["P1"].lifo


def test_vips_go_first_up_to_their_share_then_counters_decide() -> None:
    """With a share of a quarter one in four is the VIP's, ahead of four tenants that would leave it one in five."""
    lanes = Lanes([lane(vip_share=0.25)])
    for seq in range(100):
        tenant = ["v", "a", "b", "c", "d"][seq % 5]
        lanes.join(Waiter(request(tenant=tenant, vip=tenant == "v", ticket=str(seq)), GROUPS[0], seq))
    served = _serve_all(lanes, 40)
    assert served[0] == "v"
    assert [served[at : at + 4].count("v") for at in range(0, 40, 4)] == [1] * 10
    assert {served.count(name) for name in "abcd"} <= {7, 8}


def test_no_vip_waits_for_the_share_of_vips_while_nobody_else_does() -> None:
    """What is served while one kind waits alone is on nobody's account."""
    lanes = Lanes([lane(vip_share=0.25)])
    for seq in range(3):
        lanes.join(Waiter(request(tenant="v", vip=True, ticket=str(seq)), GROUPS[0], seq))
    _serve_all(lanes, 2)
    assert lanes.queues["P1"].debt == 0
    lanes.join(Waiter(request(tenant="a", ticket="a"), GROUPS[0], 9))
    assert _serve_all(lanes, 2) == ["v", "a"]
    assert lanes.queues["P1"].debt == 0.75 * cost(request().size)


def test_a_head_that_fits_nowhere_holds_up_only_those_who_want_the_same() -> None:
    """Every line has its first asked for, the better claim first."""
    lanes = Lanes([lane("P0", 0), lane("P1", 1)])
    wants = [("P1", 0), ("P1", 1), ("P1", 1), ("P0", 1), ("P1", 2)]
    for seq, (name, group) in enumerate(wants):
        lanes.join(Waiter(request(lane=name), GROUPS[group], seq))
    assert [(head.seq, followed) for head, followed in lanes.heads()] == [(3, False), (0, False), (1, True), (4, False)]


def test_regrouping_keeps_the_place_that_the_arrival_gave() -> None:
    """Whoever wants other upstreams stands among those who want the same as if it always had."""
    lanes = Lanes([lane()])
    early, *others = (Waiter(request(arrived=float(at)), GROUPS[min(at, 1)], at) for at in range(3))
    for one in (*others, early):
        lanes.join(one)
    lanes.regroup(early, GROUPS[1])
    assert _serve_all(lanes, 3, by="seq") == [0, 1, 2]
    assert not lanes.heads()
    assert not lanes.queues["P1"].lines


@pytest.mark.parametrize(("lifo_above", "last"), [(None, True), (0.0, False)])
def test_who_is_behind_its_own_is_told(lifo_above: float | None, last: bool) -> None:  # noqa: FBT001
    """Only somebody of its own tenant who wants the same is in the way; nobody is, of who does not stand in line."""
    lanes = Lanes([lane(lifo_above=lifo_above)])
    wants = [("a", 0), ("a", 0), ("a", 1), ("b", 0)]
    line = [Waiter(request(tenant=name), GROUPS[group], seq) for seq, (name, group) in enumerate(wants)]
    for one in line:
        lanes.join(one)
    assert [lanes.behind(one) for one in line] == [not last, last, False, False]
    for one in line[:2]:
        lanes.leave(one)
    assert not any(lanes.behind(one) for one in line)


@pytest.mark.parametrize("leave", ["leave", "serve"])
def test_only_who_stands_in_line_can_leave_it(leave: str) -> None:
    """Leaving twice, or without having joined, is a bug and raises, and changes nothing."""
    lanes = Lanes([lane()])
    gone, stays, stranger = (Waiter(request(ticket=str(seq)), GROUPS[0], seq) for seq in range(3))
    lanes.join(gone)
    lanes.join(stays)
    lanes.leave(gone)
    counter = lanes.queues["P1"].tenants["default"].counter
    for one in (gone, stranger):
        with pytest.raises(KeyError):
            getattr(lanes, leave)(one)
    assert len(lanes) == 1
    assert lanes.queues["P1"].tenants["default"].counter == counter


def test_a_look_costs_as_much_as_there_are_lines_not_tenants_or_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in flows that are opened: 1,000 tenants with 10 requests in each of 3 lines."""
    opened: list[Flow] = []
    in_turn = Flow.in_turn
    lanes = Lanes([lane()])
    for seq in range(3000):
        tenant = request(tenant=str(seq % 1000), ticket=str(seq))
        lanes.join(Waiter(tenant, GROUPS[seq % 3], seq))

    def counting(flow: Flow, *, lifo: bool) -> Any:
        opened.append(flow)
        return in_turn(flow, lifo=lifo)

    monkeypatch.setattr(Flow, "in_turn", counting)
    for _ in range(100):
        lanes.serve(_first(lanes))
    assert len(opened) <= 100 * 3 * 3, len(opened)


def _first(lanes: Lanes) -> Waiter:
    return lanes.heads()[0][0]


def _serve_all(lanes: Lanes, often: int, by: str = "tenant") -> list[Any]:
    served = []
    for _ in range(often):
        head = _first(lanes)
        lanes.serve(head)
        served.append(head.seq if by == "seq" else head.request.tenant)
    return served
