"""Who waits, and whose turn it is: bounded lanes of strict priority, fair between tenants inside.

Inside a lane, waiters that want the same of the same upstreams stand in one line; only a line's first waiter can be
next, so finding whose turn it is costs as much as there are lines, not as there are waiters, and a head that fits
nowhere holds up only those who want the same: a model whose tokens are gone does not hold up another at the same
upstream. A line's first waiter is one of the tenant whose turn it is (see fairness): VIPs up to their share, then the
least served. Between lines and lanes the better claim is asked first and closes what it could not get (see capacity).
Several of a line may be asked for at once, which saves calls where a call takes time; the order is then the one that
follows if all of them are granted, and fair only by and large where some are not.

A full lane sheds the newest of the tenant that takes most room for its weight, so that a flood never takes another
tenant's room; calls of new sessions before calls of running ones. Bounds are requests, tokens and bytes, because each
of them has filled a queue somewhere.

Deliberately not here: waiting itself (the limiter waits), and guaranteed shares of lanes (shares, at the counters).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import count

from extproc.core.fairness import Counters, cost, toll
from extproc.core.lines import Backlog, Flow, Group, Line, Place, Tenant, Waiter
from extproc.core.policy import Bounds, Lane, Pacing
from extproc.core.policy import Tenant as Rules
from extproc.core.ranking import Ranking
from extproc.core.request import Request, Size
from extproc.core.shares import Terms

__all__ = ["Lanes", "Queue", "terms_of"]

BOUNDS = {"max_requests": "requests", "max_tokens": "tokens", "max_bytes": "bytes"}
"""Bounds by name, and what of a backlog they limit."""
LIFO_ENDS = 0.5
"""The newest go first until the lane is emptier than this share of the fill at which that began."""
NOTHING = Backlog()


def terms_of(rule: Lane) -> Terms:
    """On what terms the requests of a lane take."""
    even = rule.pacing is Pacing.SMOOTH
    return Terms(rule.name, rule.rank, rule.min_share, rule.keep_free, smooth=even, yields=rule.rank > 0)


class Lanes:
    """All lanes of one process, best first.

    paused: by name, lanes of which nobody is let go, and until when on the clock (infinite where that is not known).
    """

    def __init__(self, rules: Iterable[Lane]) -> None:
        """One empty lane per rule."""
        self.rules: dict[str, Lane] = {rule.name: rule for rule in sorted(rules, key=lambda rule: rule.rank)}
        self.queues = {name: Queue(rule) for name, rule in self.rules.items()}
        self.backlogs = {name: queue.backlog for name, queue in self.queues.items()}
        self.total = Backlog()
        self.spared: dict[str, int] = {}
        self.paused: dict[str, float] = {}

    def follow(self, rules: Iterable[Lane], bounds: Bounds, tenant_of: Callable[[str], Rules | None]) -> None:
        """Go by other rules from now on; every lane in which somebody may wait or be settled has to be among them.

        Who waits keeps its place, also beyond bounds that were larger: those hold for who comes. tenant_of: a tenant's
        rules by its name, None where it has none any more.
        """
        self.rules = {rule.name: rule for rule in sorted(rules, key=lambda rule: rule.rank)}
        for name, rule in self.rules.items():
            if name in self.queues:
                self.queues[name].follow(rule, tenant_of)
            else:
                self.queues[name] = Queue(rule)
        self.queues = {name: self.queues[name] for name in self.rules}
        self.backlogs = {name: queue.backlog for name, queue in self.queues.items()}
        self.spared = _beyond(self.total, bounds)
        self.paused = {name: until for name, until in self.paused.items() if name in self.rules}

    def __len__(self) -> int:
        """Number of waiting requests."""
        return self.total.requests

    @property
    def moving(self) -> int:
        """Number of those who wait in lanes that are not paused."""
        return self.total.requests - sum(self.backlogs[name].requests for name in self.paused)

    def join(self, waiter: Waiter) -> None:
        """Stand in line, at the place that arrival or deadline gives (after a change of group, too)."""
        self.queues[waiter.request.lane].join(waiter)
        self.total.add(waiter.request)

    def leave(self, waiter: Waiter) -> None:
        """Step out of line, wherever one stands. KeyError when not in line."""
        self.queues[waiter.request.lane].leave(waiter)
        self.total.add(waiter.request, -1)
        if self.spared:
            _shrink(self.spared, self.total)

    def serve(self, waiter: Waiter) -> None:
        """Step out of line to be dispatched, and be charged for it. KeyError when not in line."""
        self.queues[waiter.request.lane].charge(waiter)
        self.leave(waiter)

    def settle(self, request: Request, size: Size | None) -> None:
        """Charge what a dispatched request really used instead of its estimate; None for nothing. Only once."""
        self.queues[request.lane].settle(request, 0.0 if size is None else cost(size))

    def regroup(self, waiter: Waiter, group: Group) -> None:
        """Want other upstreams from now on, without losing one's place."""
        queue = self.queues[waiter.request.lane]
        spared = dict(self.spared), dict(queue.spared)
        self.leave(waiter)
        waiter.group = group
        self.join(waiter)
        self.spared, queue.spared = spared

    def heads(self, deep: Mapping[Line, int] | None = None) -> list[tuple[Waiter, bool]]:
        """Whose turn it may be, in the order to ask: the first of each line, or as many as `deep` says.

        With each, whether those behind it are to be asked for anew when it is granted.
        """
        found: list[tuple[Waiter, bool]] = []
        for name, queue in self.queues.items():
            if queue.lines and name not in self.paused:
                found += _Draw(queue, deep or {})
        return found

    def behind(self, waiter: Waiter) -> bool:
        """Whether somebody of its own tenant, who wants the same, goes before it."""
        flow = waiter.flow
        return flow is not None and flow.first(lifo=self.queues[waiter.request.lane].lifo) is not waiter

    def over(self, lane: str, *, shadow: bool = False) -> list[str]:
        """The bounds that the lane is over: those that hold, or those in shadow mode."""
        queue = self.queues[lane]
        return [bound for bound in queue.over(queue.backlog) if (bound in queue.rule.shadow) is shadow]

    def room(self, lane: str, promised: Backlog) -> float:
        """Which share of what waits and of what is promised the lane can hold; 1 when all of it."""
        queue = self.queues[lane]
        sums: dict[str, int] = {b: getattr(queue.backlog, u) + getattr(promised, u) for b, u in BOUNDS.items()}
        shares: list[float] = [getattr(queue.rule, bound) / total for bound, total in sums.items() if total]
        return min([1.0, *shares])

    def shed(self, newcomer: Waiter, bounds: Bounds, new_share: float, promised: Backlog = NOTHING) -> Waiter | None:
        """Who has to go now that `newcomer` stands in line; None when there is room for all. Ask again until then.

        new_share: share of its lane that a new session may use. promised: what will come back before its turn, for
        which room is kept. Neither touches a tenant that uses less than its part of the lane, nor a place inherited.
        """
        queue, request = self.queues[newcomer.request.lane], newcomer.request
        if newcomer.since >= request.arrived and (request.fresh or promised.requests):
            share = new_share if request.fresh else 1.0
            if any(queue.above_part(newcomer, bound) for bound in queue.over(queue.backlog, promised, share)):
                return newcomer
        for bound in self.over(request.lane):
            return queue.victim(BOUNDS[bound], newcomer)
        for bound, unit in BOUNDS.items():
            if getattr(self.total, unit) > max(getattr(bounds, bound), self.spared.get(bound, 0)):
                lowest = next(queue for queue in reversed(self.queues.values()) if queue.lines)
                return lowest.victim(unit, newcomer)
        return None

    def waiters(self) -> Iterator[Waiter]:
        """Everybody in line, for shutdown and for the state page."""
        for queue in self.queues.values():
            for line in queue.lines.values():
                yield from list(line.waiters())


class Queue:
    """One lane's waiters. debt: the VIPs' account (see fairness). lifo: whether the newest go first now.

    spared: what waited beyond a bound when that became smaller, and still does: so much may wait.
    """

    def __init__(self, rule: Lane) -> None:
        """Nobody waits."""
        self.rule = rule
        self.backlog = Backlog()
        self.lines: dict[Group, Line] = {}
        self.tenants: dict[str, Tenant] = {}
        self.counters = Counters()
        self.vips = Backlog()
        self.debt = 0.0
        self.lifo = False
        self.changes = 0
        self.spared: dict[str, int] = {}
        self._weights = 0.0
        self._numbers = count()
        self._heaviest: dict[str, Ranking[Tenant]] = {}

    def follow(self, rule: Lane, tenant_of: Callable[[str], Rules | None]) -> None:
        """See Lanes.follow."""
        before, self.rule = self.rule, rule
        self.spared = _beyond(self.backlog, rule)
        lifo = rule.lifo_above is not None
        if (rule.order, lifo) != (before.order, before.lifo_above is not None):
            for line in self.lines.values():
                for flow in line.flows.values():
                    flow.reorder(rule.order, lifo=lifo)
        for tenant in self.tenants.values():
            rules = tenant_of(tenant.name)
            if rules is not None and (rules.weight, rules.vip) != (tenant.weight, tenant.vip):
                self._reseat(tenant, rules)
        self._heaviest.clear()
        self.changes += 1
        self._turn_round()

    def join(self, waiter: Waiter) -> None:
        """See Lanes.join."""
        request = waiter.request
        tenant = self.tenants.get(request.tenant) or self._enter(request)
        line = self.lines.get(waiter.group)
        if line is None:
            line = self.lines[waiter.group] = Line(waiter.group)
        flow = line.flows.get(tenant.name)
        if flow is None:
            flow = Flow(tenant, line, self.rule.order, lifo=self.rule.lifo_above is not None)
            line.flows[tenant.name] = tenant.flows[line.group] = flow
            line.ranking(flow).add(flow, tenant.number)
        flow.add(waiter)
        self._count(flow, request, 1)
        for ranking in self._heaviest.values():
            ranking.fell(tenant)

    def leave(self, waiter: Waiter) -> None:
        """See Lanes.leave."""
        flow = waiter.flow
        if flow is None:
            raise KeyError(waiter.request.ticket)
        line, tenant = flow.line, flow.tenant
        flow.remove(waiter)
        self._count(flow, waiter.request, -1)
        if not flow.backlog.requests:
            line.ranking(flow).discard(flow)
            del line.flows[tenant.name], tenant.flows[line.group]
            if not line.flows:
                del self.lines[line.group]
            if not tenant.flows:
                self._exit(tenant)

    def charge(self, waiter: Waiter) -> None:
        """Charge who is about to leave because it is dispatched. KeyError when not in line."""
        request, flow = waiter.request, waiter.flow
        if flow is None:
            raise KeyError(request.ticket)
        service = cost(request.size)
        if self.mixed:
            self.debt = toll(self.debt, service, self.rule.vip_share, vip=flow.tenant.vip)
        self.counters.charge(flow.tenant, request.ticket, service)

    def settle(self, request: Request, service: float) -> None:
        """See Lanes.settle."""
        by = self.counters.surplus(request.ticket, service) / request.weight
        if by:
            tenant = self.tenants.get(request.tenant)
            self.counters.correct(request.tenant, by, tenant)
            for flow in tenant.flows.values() if tenant else ():
                flow.line.ranking(flow).fell(flow)

    @property
    def mixed(self) -> bool:
        """Whether VIPs and others wait."""
        return 0 < self.vips.requests < self.backlog.requests

    def over(self, backlog: Backlog, promised: Backlog = NOTHING, share: float = 1.0) -> list[str]:
        """The bounds that such a backlog is over, when only this share of them may be used."""
        return [
            bound
            for bound, unit in BOUNDS.items()
            if getattr(backlog, unit) + getattr(promised, unit)
            > share * max(getattr(self.rule, bound), self.spared.get(bound, 0))
        ]

    def above_part(self, waiter: Waiter, bound: str) -> bool:
        """Whether the bound holds, and the waiter's tenant has its part of what waits, by weight, or more."""
        if bound in self.rule.shadow:
            return False
        tenant, unit = self.tenants[waiter.request.tenant], BOUNDS[bound]
        return bool(getattr(tenant.backlog, unit) * self._weights >= getattr(self.backlog, unit) * tenant.weight)

    def victim(self, unit: str, newcomer: Waiter) -> Waiter:
        """Who is shed of this lane: of the tenant that takes most room for its weight, of the newcomer's if equal."""
        ranking = self._heaviest.get(unit)
        if ranking is None:
            ranking = self._heaviest[unit] = Ranking(lambda tenant: -getattr(tenant.backlog, unit) / tenant.weight)
            for tenant in self.tenants.values():
                ranking.add(tenant)
        heaviest, own = ranking.first(), self.tenants.get(newcomer.request.tenant)
        assert heaviest is not None  # noqa: S101 - somebody waits here, or nobody would have to go
        if own and getattr(own.backlog, unit) / own.weight >= getattr(heaviest.backlog, unit) / heaviest.weight:
            heaviest = own
        return heaviest.newest()

    def _enter(self, request: Request) -> Tenant:
        tenant = self.tenants[request.tenant] = Tenant(request, next(self._numbers))
        self.counters.enter(tenant)
        self._weights += tenant.weight
        for ranking in self._heaviest.values():
            ranking.add(tenant)
        return tenant

    def _exit(self, tenant: Tenant) -> None:
        del self.tenants[tenant.name]
        self.counters.leave(tenant)
        self._weights = self._weights - tenant.weight if self.tenants else 0.0
        for ranking in self._heaviest.values():
            ranking.discard(tenant)
        if not self.tenants:
            self._heaviest.clear()

    def _count(self, flow: Flow, request: Request, sign: int) -> None:
        self.changes += 1
        for backlog in (self.backlog, flow.tenant.backlog, flow.line.backlog):
            backlog.add(request, sign)
        if flow.tenant.vip:
            self.vips.add(request, sign)
        if self.spared and sign < 0:
            _shrink(self.spared, self.backlog)
        self._turn_round()

    def _reseat(self, tenant: Tenant, rules: Rules) -> None:
        """Another weight, or another rank, for a tenant that waits; its counter stays."""
        self._weights += rules.weight - tenant.weight
        for flow in tenant.flows.values():
            flow.line.ranking(flow).discard(flow)
        if tenant.vip:
            self.counters.vips.discard(tenant)
            self.vips.merge(tenant.backlog, -1.0)
        tenant.weight, tenant.vip = rules.weight, rules.vip
        if tenant.vip:
            self.counters.vips.add(tenant)
            self.vips.merge(tenant.backlog)
        for flow in tenant.flows.values():
            flow.line.ranking(flow).add(flow, tenant.number)

    def _turn_round(self) -> None:
        """Whether the newest go first from now on."""
        above = self.rule.lifo_above
        if above is None:
            self.lifo = False
        else:
            fill = max(getattr(self.backlog, unit) / getattr(self.rule, bound) for bound, unit in BOUNDS.items())
            self.lifo = fill > (above * LIFO_ENDS if self.lifo else above)


def _beyond(backlog: Backlog, rules: Lane | Bounds) -> dict[str, int]:
    """What is more than the bounds allow, by bound."""
    found = {bound: getattr(backlog, unit) for bound, unit in BOUNDS.items()}
    return {bound: waits for bound, waits in found.items() if waits > getattr(rules, bound)}


def _shrink(spared: dict[str, int], backlog: Backlog) -> None:
    """Less waits now."""
    for bound in list(spared):
        spared[bound] = min(spared[bound], getattr(backlog, BOUNDS[bound]))
        if not spared[bound]:
            del spared[bound]


class _Draw:
    """One look at a queue in its order, with `deep` of a line as if all before them had been granted."""

    def __init__(self, queue: Queue, deep: Mapping[Line, int]) -> None:
        self._queue = queue
        self._deep = deep
        self._debt = queue.debt
        self._spent: dict[Tenant, float] = {}
        self._left = {line: deep.get(line, 1) for line in queue.lines.values()}
        self._others: list[_Candidate] = []
        self._vips: list[_Candidate] = []
        for line in self._left:
            for ranking in (line.others, line.vips):
                self._next_flow(ranking.lowest_first())

    def __iter__(self) -> Iterator[tuple[Waiter, bool]]:
        while self._others or self._vips:
            counter, number, place, flow, places, flows = heappop(self._preferred())
            left = self._left[flow.line]
            if not left:
                continue
            if flows is not None:
                self._next_flow(flows)
            following: Place | None = place
            now_at = flow.tenant.counter + self._spent.get(flow.tenant, 0.0)
            if now_at <= counter:
                self._left[flow.line] = left - 1
                yield place[3], left == 1 and self._followed(flow.line)
                now_at += self._pay(flow.tenant, place[3].request)
                following = next(places, None) if left > 1 else None
            if following is not None:
                heappush(self._heap(flow), (now_at, number, following, flow, places, None))

    def _preferred(self) -> list[_Candidate]:
        """VIPs as long as they are not above their share, then who has the smaller counter."""
        if not self._others or (self._vips and self._debt <= 0):
            return self._vips
        return self._vips if self._vips and self._vips[0][:2] < self._others[0][:2] else self._others

    def _next_flow(self, flows: Iterator[tuple[float, Flow]]) -> None:
        """The next of a line's flows has a chance: none behind it has a smaller counter than `known`."""
        for known, flow in flows:
            places = flow.in_turn(lifo=self._queue.lifo)
            heappush(self._heap(flow), (known, flow.tenant.number, next(places), flow, places, flows))
            return

    def _followed(self, line: Line) -> bool:
        """Whether others have to be asked anew once a line's last is granted: it has more, or the order changes."""
        if self._deep:
            return line.backlog.requests > self._deep.get(line, 1)
        return line.backlog.requests > 1 or len(self._queue.tenants) > 1

    def _pay(self, tenant: Tenant, request: Request) -> float:
        """Charge as if it were granted, where several of a line are asked for; else the next look does it."""
        if not self._deep:
            return 0.0
        service = cost(request.size)
        self._spent[tenant] = self._spent.get(tenant, 0.0) + service / tenant.weight
        if self._queue.mixed:
            self._debt = toll(self._debt, service, self._queue.rule.vip_share, vip=tenant.vip)
        return service / tenant.weight

    def _heap(self, flow: Flow) -> list[_Candidate]:
        return self._vips if flow.tenant.vip else self._others


_Candidate = tuple[float, int, Place, Flow, Iterator[Place], Iterator[tuple[float, Flow]] | None]
"""A counter, the tenant's number, its first waiter there, and where its next and the line's next tenant come from."""
