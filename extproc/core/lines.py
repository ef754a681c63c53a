"""Lines inside a lane: who wants the same of the same upstreams, each tenant in a flow of its own.

A flow gives its waiters by arrival, by deadline, or newest first; a line ranks the flows by their tenants' counters.
Places of those who left stay behind until they surface or are half of all, so joining and leaving cost O(log n).

Deliberately not here: whose turn it is between tenants, lines and lanes (lanes).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain
from math import ceil, inf

from extproc.core.capacity import Option
from extproc.core.curve import Curve
from extproc.core.fairness import Account, cost
from extproc.core.policy import Order
from extproc.core.ranking import Ranking, ascending
from extproc.core.request import Request
from extproc.core.spells import Keys, Spells, began
from extproc.core.value import value

__all__ = ["Backlog", "Flow", "Group", "Line", "Place", "Tenant", "Waiter"]

SAMPLE = 64
"""So many places of a flow are looked at to tell how many of it come first."""


@value
class Group:
    """What a waiter would take now: of these upstreams, counted under these keys.

    first_only: only the first healthy one of them, because its lane holds.
    """

    names: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()
    first_only: bool = False

    def takes(self, upstream: str, allows: Callable[[str], bool], slow: Callable[[str], bool]) -> bool:
        """Whether its waiters would go to `upstream` now (see routing.askable)."""
        if self.first_only:
            return upstream == next(chain(filter(allows, self.names), filter(slow, self.names)), None)
        return upstream in self.names


@dataclass(slots=True, eq=False)
class Waiter:
    """One request in line. group: an empty one when not in line. seq: order of arrival.

    since: arrival that gives it its place, which it may have inherited. before: turns that are promised for this moment
    or later do not come before its own. flow: where it stands, None when not in line. stand: counts its places, so that
    one it left is not taken for the one it has.
    """

    request: Request
    group: Group
    seq: int
    since: float = -inf
    before: float = inf
    spilled: bool = False
    gone: bool = False
    granted: Option | None = None
    flow: Flow | None = None
    stand: int = 0

    def __post_init__(self) -> None:
        """Without an inherited place its own arrival counts."""
        self.since = self.request.arrived if self.since == -inf else self.since


@dataclass(slots=True)
class Backlog:
    """Sum of what waits: requests, tokens (and those of them that are input), bytes, and cost (see fairness)."""

    requests: int = 0
    tokens: int = 0
    input: int = 0
    bytes: int = 0
    cost: float = 0.0

    def add(self, request: Request, sign: int = 1) -> None:
        """Count one request in, or out with sign -1."""
        size = request.size
        self.requests += sign
        self.tokens += sign * size.total
        self.input += sign * size.input
        self.bytes += sign * request.bytes
        self.cost += sign * cost(size)

    def merge(self, other: Backlog, share: float = 1.0) -> None:
        """Count so much of another in."""
        self.requests += ceil(share * other.requests)
        self.tokens += ceil(share * other.tokens)
        self.input += ceil(share * other.input)
        self.bytes += ceil(share * other.bytes)
        self.cost += share * other.cost


class Tenant(Account):
    """A tenant that waits in a lane: all it has there, and its flows by what they want. number: order of its coming."""

    __slots__ = ("backlog", "flows", "number")

    def __init__(self, request: Request, number: int) -> None:
        """Nothing waits yet; the rest is as `request` says."""
        super().__init__(request.tenant, request.weight, request.vip)
        self.number = number
        self.backlog = Backlog()
        self.flows: dict[Group, Flow] = {}

    def newest(self) -> Waiter:
        """Who is shed first: the newest call of a session that was never served, else the newest."""
        for fresh in (True, False):
            found = [waiter for flow in self.flows.values() if (waiter := flow.newest(fresh=fresh))]
            if found:
                return max(found, key=_place)
        raise AssertionError("a tenant in a lane has somebody waiting")


Place = tuple[float, int, int, Waiter]
"""A number to order by, seq and stand of a waiter, and itself. No two are equal in the first three."""


class Flow:
    """What one tenant has in one line."""

    __slots__ = ("_arrived", "_fresh", "_last", "_order", "_running", "_turns", "backlog", "line", "tenant")

    def __init__(self, tenant: Tenant, line: Line, order: Order, *, lifo: bool) -> None:
        """Nobody yet. lifo: it may be asked for the newest first."""
        self.tenant = tenant
        self.line = line
        self.backlog = Backlog()
        self._order = order
        self._turns: list[Place] = []
        self._last = (-inf, 0)
        self._fresh: list[Place] = []
        self._running: list[Place] = []
        self._arrived: list[Place] | None = [] if lifo else None

    def add(self, waiter: Waiter) -> None:
        """Take the place that arrival or deadline gives."""
        waiter.flow, waiter.stand = self, waiter.stand + 1
        self.backlog.add(waiter.request)
        turn = self._turn(waiter)
        heappush(self._turns, (*turn, waiter.stand, waiter))
        self._last = max(self._last, turn)
        _insert(self._fresh if waiter.request.fresh else self._running, waiter.since, waiter)
        if self._arrived is not None:
            _insert(self._arrived, waiter.seq, waiter)

    def reorder(self, order: Order, *, lifo: bool) -> None:
        """Take turns in another order from now on; see the constructor."""
        standing = [place[3] for place in self._turns if self._stands(place)]
        self._order = order
        self._turns = [(*self._turn(waiter), waiter.stand, waiter) for waiter in standing]
        self._last = max(place[:2] for place in self._turns)
        heapify(self._turns)
        self._arrived = sorted((one.seq, one.seq, one.stand, one) for one in standing) if lifo else None

    def remove(self, waiter: Waiter) -> None:
        """Step out, wherever it stands."""
        waiter.flow = None
        self.backlog.add(waiter.request, -1)
        kept = max(len(self._turns), len(self._fresh) + len(self._running), len(self._arrived or ()))
        if kept > 2 * self.backlog.requests + 16:
            self._turns = [place for place in self._turns if self._stands(place)]
            heapify(self._turns)
            for places in (self._fresh, self._running, self._arrived or []):
                places[:] = [place for place in places if self._stands(place)]

    def first(self, *, lifo: bool) -> Waiter:
        """Whose turn it is."""
        return next(self.in_turn(lifo=lifo))[3]

    def in_turn(self, *, lifo: bool) -> Iterator[Place]:
        """Everybody, first whose turn it is. Change nothing meanwhile."""
        if lifo and self._arrived is not None:
            while not self._stands(self._arrived[-1]):
                self._arrived.pop()
            return ((-seq, seq, stand, one) for _, seq, stand, one in filter(self._stands, reversed(self._arrived)))
        while not self._stands(self._turns[0]):
            heappop(self._turns)
        return filter(self._stands, ascending(self._turns))

    def newest(self, *, fresh: bool) -> Waiter | None:
        """The latest to arrive, of sessions never served before or of the others."""
        places = self._fresh if fresh else self._running
        while places and not self._stands(places[-1]):
            places.pop()
        return places[-1][3] if places else None

    def cost_before(self, waiter: Waiter) -> float:
        """Cost of those whose turn comes before `waiter`'s, by a sample where there are many."""
        turn = self._turn(waiter)
        if turn >= self._last:
            return self.backlog.cost - (cost(waiter.request.size) if waiter.flow is self else 0.0)
        sample = [place for place in self._turns[:: 1 + len(self._turns) // SAMPLE] if self._stands(place)]
        return self.backlog.cost * sum(place[:2] < turn for place in sample) / max(1, len(sample))

    def _turn(self, waiter: Waiter) -> tuple[float, int]:
        return (waiter.request.wait_until if self._order is Order.EDF else waiter.since), waiter.seq

    def _stands(self, place: Place) -> bool:
        waiter = place[3]
        return waiter.flow is self and waiter.stand == place[2]


class Line:
    """Everybody in a lane that wants the same.

    drawn: curves over its tenants, and after how many of the lane's changes they were drawn (see forecast). lacking:
    the keys for want of which its first waiter was refused last; who stands behind waits for the same.
    """

    __slots__ = ("_lacked", "_since", "backlog", "drawn", "flows", "group", "lacking", "others", "vips")

    def __init__(self, group: Group) -> None:
        """Nobody yet."""
        self.group = group
        self.backlog = Backlog()
        self.flows: dict[str, Flow] = {}
        self.others: Ranking[Flow] = Ranking(_counter)
        self.vips: Ranking[Flow] = Ranking(_counter)
        self.drawn: tuple[int, Curve, Curve] | None = None
        self.lacking: Keys = ()
        self._since = 0.0
        self._lacked: Spells = {}

    def refused(self, lacking: Keys, now: float) -> None:
        """Its first waiter was refused for want of these keys."""
        if lacking != self.lacking:
            lacked = self.lacked(now)
            self._lacked = began(lacked, lacking) if lacking else lacked
            self.lacking, self._since = lacking, now

    def lacked(self, now: float) -> Spells:
        """For how many seconds so far it was for want of which keys that its first waiter could not go (see spells)."""
        lacked = self._lacked.copy()
        if self.lacking:
            lacked[self.lacking] += now - self._since
        return lacked

    def ranking(self, flow: Flow) -> Ranking[Flow]:
        """The one that `flow` is ranked in."""
        return self.vips if flow.tenant.vip else self.others

    def waiters(self) -> Iterator[Waiter]:
        """Everybody, in no order."""
        return (place[3] for place in chain.from_iterable(flow.in_turn(lifo=False) for flow in self.flows.values()))


def _insert(places: list[Place], number: float, waiter: Waiter) -> None:
    """Keep `places` sorted; almost always it is the last."""
    place = (number, waiter.seq, waiter.stand, waiter)
    if places and place < places[-1]:
        insort(places, place)
    else:
        places.append(place)


def _place(waiter: Waiter) -> tuple[float, int]:
    return waiter.since, waiter.seq


def _counter(flow: Flow) -> float:
    return flow.tenant.counter
