"""How long a wait would be: work ahead divided by the rate at which it goes.

Ahead of a newcomer is what better lanes hold; in its own lane what fairness will serve before it, so that a light
tenant does not wait behind a heavy one's backlog; and whoever was promised a turn that comes before its own. Of each
tenant so much goes first as brings its counter up to where the newcomer's own will be at its turn. That is a curve over
counters per line (`Curve`), kept until an eighth of the line has changed.

The rate of a bucket is its refill, or what was really served while somebody waited, if that is more (estimates that
turn out too large come back). For slots it is what was served, or the limit over how long a request holds one; for an
engine's cache what was served. Better lanes go on taking what they took lately, and lower lanes that wait get the share
they are guaranteed; a lane can always count on its own share. What is not known counts as no wait: an unknown never
refuses anybody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, exp, inf, isinf

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget
from extproc.core.capacity import Claim, Counter, Store
from extproc.core.curve import Curve
from extproc.core.fairness import cost
from extproc.core.lanes import Lanes, Queue, terms_of
from extproc.core.lines import Backlog, Flow, Group, Line, Waiter
from extproc.core.policy import Kind, Lane
from extproc.core.promises import JITTER, Book, Promised, Promises
from extproc.core.request import Request
from extproc.core.shares import EPSILON
from extproc.core.value import value
from extproc.core.watermark import Watermark

__all__ = ["Demand", "Forecast", "Pace", "Served"]

WEIGHT = 0.1
"""Weight of the newest value in a moving average."""
SHORT_S, LONG_S = 5.0, 60.0
"""How long a lane's demand is remembered: until a silence is noticed, and until it counts as lasting."""
GRAIN_S = 0.05
"""What is taken within such a time counts as taken at once."""
LAPSING = 1.5
"""A lane takes less than it used to when it lately took less than that by this factor: chance alone is no silence."""
LEAST_SHARE = 0.05
"""However much better lanes take, a forecast counts on this share of the rate."""
SERVED_S, SERVED_LEAST_S = 30.0, 2.0
"""How long the observed rate of service is remembered, and how much of that has to be known before it counts."""
EARLY = 0.35
"""A refused request comes back this share of its patience before its turn."""
LASTING, LASTING_S = 2.0, 8.0
"""Newcomers are counted over so many times the longest wait of their lane, and so many seconds at least: what they want
all that time is no burst."""
ROUNDING = 0.01
"""So much of a request is none."""
STALE = 8
"""A curve is drawn anew when one in so many of its tenants has changed."""


@dataclass(slots=True)
class Pace:
    """Learned per name (an upstream or a model): seconds a slot is held, and seconds per output token."""

    limit: int = 1000
    _held: OrderedDict[str, float] = field(default_factory=OrderedDict)
    _per_token: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def learn_hold(self, name: str, seconds: float) -> None:
        """A request held a slot of `name` this long."""
        self._learn(self._held, name, seconds)

    def learn_output(self, name: str, seconds: float, tokens: int) -> None:
        """`name` generated `tokens` in `seconds`."""
        if tokens > 0 and seconds > 0:
            self._learn(self._per_token, name, seconds / tokens)

    def hold_s(self, name: str) -> float:
        """Seconds a slot of `name` is usually held, 0 when unknown."""
        return self._held.get(name, 0.0)

    def output_s(self, name: str, tokens: int) -> float:
        """Seconds that `tokens` of output usually take at `name`, 0 when unknown."""
        return self._per_token.get(name, 0.0) * tokens

    def _learn(self, known: OrderedDict[str, float], name: str, value: float) -> None:
        known[name] = known.get(name, value) * (1.0 - WEIGHT) + value * WEIGHT
        known.move_to_end(name)
        if len(known) > self.limit:
            known.popitem(last=False)


@dataclass(slots=True)
class Demand:
    """How fast each lane takes of each counter, in units per second: what those before it take, others do not get.

    VIPs count apart from the others of their lane. Of each there are two decaying sums, a short and a long one, of
    which the smaller rate counts: a burst is not taken for a habit, and who falls silent is forgotten soon.
    """

    _taken: dict[tuple[str, int], tuple[float, float, float]] = field(default_factory=dict)

    def note(self, rank: int, claims: Sequence[Claim], now: float, *, vip: bool = False) -> None:
        """The lane of this rank was granted `claims`."""
        level = 2 * rank + (not vip)
        for claim in claims:
            short, long, at = self._taken.get((claim.key, level), (0.0, 0.0, now))
            if now - at > GRAIN_S:
                short, long, at = short * exp((at - now) / SHORT_S), long * exp((at - now) / LONG_S), now
            self._taken[claim.key, level] = (short + claim.amount, long + claim.amount, at)

    def above(self, key: str, rank: int, now: float) -> float:
        """Units per second of `key` that lanes better than `rank` take."""
        return sum(self._rate(key, level, now) for level in range(2 * rank))

    def beside(self, key: str, rank: int, now: float) -> float:
        """Units per second of `key` that all lanes but this one take."""
        levels = [level for at, level in self._taken if at == key and level // 2 != rank]
        return sum(self._rate(key, level, now) for level in levels)

    def forget(self, rank: int) -> None:
        """The lane of this rank takes nothing for the time being."""
        for key, level in [taken for taken in self._taken if taken[1] // 2 == rank]:
            del self._taken[key, level]

    def of_vips(self, key: str, rank: int, now: float) -> float:
        """Units per second of `key` that VIPs of the lane take."""
        return self._rate(key, 2 * rank, now)

    def _rate(self, key: str, level: int, now: float) -> float:
        if (key, level) not in self._taken:
            return 0.0
        short, long, at = self._taken[key, level]
        return min(LAPSING * short * exp((at - now) / SHORT_S) / SHORT_S, long * exp((at - now) / LONG_S) / LONG_S)


@dataclass(slots=True)
class Newcomers:
    """How fast each lane's newcomers ask for each counter, served or not: units in a decaying sum, and its time."""

    _asked: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def note(self, rule: Lane, claims: Iterable[Claim], now: float) -> None:
        """Somebody came to this lane for the first time."""
        for claim in claims:
            self._asked[claim.key, rule.name] = (self._sum(rule, claim.key, now) + claim.amount, now)

    def rate(self, rule: Lane, key: str, now: float) -> float:
        """Units per second of `key`."""
        return self._sum(rule, key, now) / _lasting_s(rule)

    def _sum(self, rule: Lane, key: str, now: float) -> float:
        units, at = self._asked.get((key, rule.name), (0.0, now))
        return units * exp((at - now) / _lasting_s(rule))


@dataclass(slots=True)
class Served:
    """What each counter really gives while somebody waits for it, in units per second."""

    _sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    _since: dict[str, float] = field(default_factory=dict)

    def granted(self, claims: Sequence[Claim]) -> None:
        """Somebody who waited got this."""
        for claim in claims:
            if claim.key in self._since:
                amount, seconds = self._sums.get(claim.key, (0.0, 0.0))
                self._sums[claim.key] = (amount + claim.amount, seconds)

    def looked(self, short: Iterable[str], now: float) -> None:
        """Everybody was asked for; `short` is what lacks now."""
        for key, since in self._since.items():
            amount, seconds = self._sums.get(key, (0.0, 0.0))
            kept = exp((since - now) / SERVED_S)
            self._sums[key] = (amount * kept, (seconds + now - since) * kept)
        self._since = dict.fromkeys(short, now)

    def rate(self, key: str) -> float | None:
        """Units per second, None when not known."""
        amount, seconds = self._sums.get(key, (0.0, 0.0))
        return amount / seconds if seconds >= SERVED_LEAST_S and amount > 0 else None


class Forecast:
    """See the head of this file.

    allows: whether an upstream's breaker lets users' requests through. slow: whether it keeps them away merely because
    first tokens are late.
    """

    def __init__(
        self,
        lanes: Lanes,
        promises: Promises,
        pace: Pace,
        allows: Callable[[str], bool],
        slow: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Nothing was observed yet."""
        self.demand = Demand()
        self._newcomers = Newcomers()
        self.served = Served()
        self._lanes = lanes
        self._promises = promises
        self._pace = pace
        self._health = allows, slow
        self.follow()

    def follow(self) -> None:
        """The rules of the lanes are others from now on."""
        self._terms = {name: terms_of(rule) for name, rule in self._lanes.rules.items()}

    def wait_s(
        self,
        waiter: Waiter,
        names: Iterable[str],
        prices: Mapping[str, tuple[Claim, ...]],
        store: Store,
        now: float,
        held_s: float = 0.0,
    ) -> float:
        """Seconds until `waiter`, in line or not, gets its turn at one of the upstreams, which work off lines together.

        Infinite when there is none, or when it cannot be said that it ever will. held_s: its lane is paused for so
        long, which is not counted in.
        """
        ahead = _Ahead(self._lanes, self._promises, waiter, now, held_s)
        waits = [self._wait_at(name, prices[name], ahead, store, now) for name in names]
        if 0.0 in waits:
            return 0.0
        rate = sum(1.0 / wait for wait in waits)
        return 1.0 / rate if rate else inf

    def place(self, waiter: Waiter, names: Collection[str], now: float) -> int:
        """Which in line `waiter` is, 1 for the first, among those who want something of the same upstreams.

        As far as can be told: whose turn it is depends on who comes, and on what others turn out to have used.
        """
        parts = _Ahead(self._lanes, self._promises, waiter, now, 0.0).parts
        before = (p.share * p.backlog.requests for p in parts if any(name in names for name in p.group.names))
        return 1 + ceil(sum(before) - ROUNDING)

    def asked(
        self, request: Request, names: Iterable[str], prices: Mapping[str, tuple[Claim, ...]], now: float
    ) -> None:
        """`request`, which nobody told to come now, wanted what one of these upstreams could give."""
        rule = self._lanes.rules[request.lane]
        for name in names:
            self._newcomers.note(rule, prices[name], now)

    def overrun(
        self, request: Request, names: Iterable[str], prices: Mapping[str, tuple[Claim, ...]], store: Store, now: float
    ) -> bool:
        """Whether newcomers to the lane of `request` want all that these upstreams can give it.

        A burst leaves room for late turns when it is over; lasting overload leaves none.
        """
        rule, given = self._lanes.rules[request.lane], 0.0
        for name in names:
            parts = [inf]
            for claim in prices[name]:
                need = self._need(name, claim, store, request, now)
                if need is not None and (wanted := self._newcomers.rate(rule, claim.key, now)):
                    parts.append(need.rate / wanted)
            given += min(parts)
        return given < 1.0

    def comeback_s(self, request: Request, predicted_s: float, room: float) -> float:
        """Seconds after which a request that was refused should come back, when its turn is in `predicted_s`.

        room: the share of what will then be ahead of it that its lane can hold; it comes when there is room for it.
        Otherwise it comes shortly before its turn: clients come later than they are told.
        """
        early = EARLY * (request.wait_until - request.arrived)
        return max(predicted_s - early, predicted_s / (1.0 + 0.5 * JITTER) - 0.5 * early, predicted_s * (1.0 - room))

    def _wait_at(self, name: str, claims: tuple[Claim, ...], ahead: _Ahead, store: Store, now: float) -> float:
        found = (self._need(name, claim, store, ahead.request, now, ahead.held_s) for claim in claims)
        needs = [need for need in found if need is not None]
        if not needs:
            return 0.0
        for part in ahead.parts:
            _add(part, name, needs, *self._health)
        for part in ahead.promised(lambda: _longest(needs)):
            _add(part, name, needs, *self._health)
        for paused_s, part in ahead.paused:
            if paused_s < ahead.held_s + _longest(needs):
                _add(part, name, needs, *self._health)
        return _longest(needs)

    def _need(
        self, name: str, claim: Claim, store: Store, request: Request, now: float, held_s: float = 0.0
    ) -> _Need | None:
        """What lacks for a claim, and at which rate it comes; None where nothing is counted, or nobody is refused."""
        queue = self._lanes.queues[request.lane]
        counter = store.get(claim.key)
        if counter is None or counter.shadow or isinstance(counter, Budget):
            return None  # dollars do not come back with time: who lacks them goes elsewhere
        pause_s, rate = max(0.0, counter.closed_until - now - held_s), self._rate(name, claim.key, counter)
        if isinf(rate):
            return _Need(claim.key, 0.0, 0.0, rate, 0.0, pause_s)
        terms, amount = self._terms[queue.rule.name], claim.amount
        free = counter.free_at(now, terms)
        if isinstance(counter, TokenBucket):
            amount = min(amount, counter.capacity - counter.kept(terms))
            if held_s:  # it fills up meanwhile, as far as other lanes leave that
                taken = self.demand.beside(claim.key, terms.rank, now) * held_s
                free = max(free, counter.free_at(now + held_s, terms) - taken)
            free = min(free, amount) if terms.smooth else free
        left = rate * (1.0 - self._owed_below(claim.key, terms.rank)) - self.demand.above(claim.key, terms.rank, now)
        left = max(left, max(terms.share, LEAST_SHARE) * rate)
        kept = 1.0 if request.vip else self._not_vips(queue, claim.key, left, now)
        return _Need(claim.key, amount, free, kept * left, kept * terms.share * rate, pause_s)

    def _not_vips(self, queue: Queue, key: str, rate: float, now: float) -> float:
        """The share of a lane's rate that VIPs who are yet to come leave to others."""
        taken = self.demand.of_vips(key, queue.rule.rank, now)
        return 1.0 - min(queue.rule.vip_share, 1.0 - LEAST_SHARE, taken / rate) if taken and rate else 1.0

    def _rate(self, name: str, key: str, counter: Counter) -> float:
        """Units per second that a counter gives to all, infinite where that is not known."""
        served = self.served.rate(key)
        if isinstance(counter, TokenBucket):
            return counter.rate if served is None else max(counter.rate, served)
        if isinstance(counter, Slots) and served is None:
            hold_s = self._pace.hold_s(name)
            return counter.limit / hold_s if hold_s else inf
        if isinstance(counter, Watermark) and served is not None:
            # What we hold there comes back at this rate at least; full of others' work, it tells nothing of them.
            hold_s = self._pace.hold_s(name)
            return max(served, counter.booked / hold_s) if hold_s and counter.booked else inf
        return inf if served is None else served

    def _owed_below(self, key: str, rank: int) -> float:
        """The guaranteed shares of lower lanes that wait for `key`, and may go."""
        return sum(
            queue.rule.min_share
            for name, queue in self._lanes.queues.items()
            if queue.rule.rank > rank and queue.rule.min_share and any(key in group.keys for group in queue.lines)
            if name not in self._lanes.paused
        )


@value
class _Part:
    """Work that comes before a waiter: this share of the backlog. mine: of its own lane."""

    group: Group
    backlog: Backlog
    share: float
    mine: bool


class _Ahead:
    """All that comes before one waiter, as far as that is the same at every upstream.

    held_s: for so long its own lane is paused. paused: what better lanes hold that are, and for how many seconds.
    """

    def __init__(self, lanes: Lanes, promises: Promises, waiter: Waiter, now: float, held_s: float) -> None:
        self.held_s = held_s
        self.request = request = waiter.request
        self.queue = queue = lanes.queues[request.lane]
        self._waiter = waiter
        self._now = now
        ranked = [other for other in lanes.queues.values() if other.rule.rank <= queue.rule.rank]
        self._booked = [
            (book, kept, other is queue)
            for other in (ranked if len(promises) else ())
            if other is queue or other.rule.name not in lanes.paused
            for book, kept in promises.booked(other.rule.name, now)
        ]
        self._own_books = [(book, kept) for book, kept, mine in self._booked if mine]
        self._counter = self._counter_at_turn()
        shares = self._shares_with_vips() if queue.vips.requests or request.vip else self._shares()
        self.parts = [_Part(line.group, line.backlog, share, mine=True) for line, share in shares]
        self.paused: list[tuple[float, _Part]] = []
        for other in ranked[: ranked.index(queue)]:
            parts = [_Part(group, line.backlog, 1.0, mine=False) for group, line in other.lines.items()]
            until = lanes.paused.get(other.rule.name)
            if until is None:
                self.parts += parts
            else:
                self.paused += [(until - now, part) for part in parts]

    def promised(self, wait_s: Callable[[], float]) -> Iterator[_Part]:
        """What was promised a turn before that of the waiter, which is in `wait_s` by what was counted so far."""
        slots = [(second, *booked) for booked in self._booked for second in booked[0].seconds]
        for second, book, kept, mine in sorted(slots, key=_second):
            slot = book.slots[second]
            if self._waiter.before == inf:
                if second - self._now > wait_s():
                    return
                come = kept
            else:
                come = kept * slot.back_within(wait_s(), self._now)
            own = slot.by_tenant.get(self.request.tenant, {}) if mine else {}
            own_share = 0.0 if self.queue.lifo else come * self._sooner(second)
            if not mine:
                share = come
            else:
                share = own_share if own and len(slot.by_tenant) == 1 else come * self._share_of_book(book)
            for group, backlog in slot.groups.items():
                yield _Part(group, backlog, share, mine)
            for group, backlog in own.items() if share != own_share else ():
                yield _Part(group, backlog, own_share - share, mine=True)

    def _sooner(self, second: int) -> float:
        """Which share of the turns promised for one second come before the waiter's own."""
        before = self._waiter.before
        return 1.0 if second < before else 0.5 if second == before else 0.0

    def _counter_at_turn(self) -> float:
        """Where its tenant's counter will be when its turn comes."""
        request, queue = self.request, self.queue
        tenant = queue.tenants.get(request.tenant)
        counter = queue.counters.entry(request.tenant, vip=request.vip) if tenant is None else tenant.counter
        if queue.lifo:
            return counter
        before = sum(flow.cost_before(self._waiter) for flow in tenant.flows.values()) if tenant else 0.0
        if self._waiter.before == inf:
            before += self._promised_to(request.tenant)
        return counter + before / request.weight

    def _promised_to(self, tenant: str) -> float:
        """Cost of what a tenant was promised in this lane."""
        return sum(book.tenants[tenant].cost * kept for book, kept in self._own_books if tenant in book.tenants)

    def _shares(self) -> Iterator[tuple[Line, float]]:
        """Of each line of the lane the share that comes before the waiter."""
        for line in self.queue.lines.values():
            own = line.flows.get(self.request.tenant)
            if own is not None and len(line.flows) == 1:
                before = 0.0 if self.queue.lifo else own.cost_before(self._waiter)
                yield line, before / own.backlog.cost
            else:
                yield line, self._curves(line)[0].share(self._counter)

    def _shares_with_vips(self) -> Iterator[tuple[Line, float]]:
        """The same where VIPs go first up to their share of what is served."""
        curves = [(line, *self._curves(line)) for line in self.queue.lines.values()]
        done = [(o.share(self._counter) * o.total, v.share(self._counter) * v.total) for _, o, v in curves]
        others, vips = sum(o for o, _ in done), sum(v for _, v in done)
        all_vips, share = sum(v.total for _, _, v in curves), self.queue.rule.vip_share
        others_part = vips_part = 1.0
        if self.request.vip:
            others_part = min(1.0, vips * (1.0 - share) / (share * others)) if share * others else 1.0
        elif all_vips:
            first = share / (1.0 - share) * (others + cost(self.request.size)) if share < 1 else inf
            vips_part = min(all_vips, max(vips, first)) / all_vips
            done = [(o, v.total) for (o, _), (_, _, v) in zip(done, curves, strict=True)]
        for (line, o, v), (other, vip) in zip(curves, done, strict=True):
            yield line, (other * others_part + vip * vips_part) / (o.total + v.total)

    def _curves(self, line: Line) -> tuple[Curve, Curve]:
        """Of a line's other tenants, and of its VIPs."""
        drawn = line.drawn
        if drawn is None or self.queue.changes - drawn[0] > len(line.flows) // STALE:
            others = Curve(self._span(flow) for flow in line.flows.values() if not flow.tenant.vip)
            vips = Curve(self._span(flow) for flow in line.flows.values() if flow.tenant.vip)
            drawn = line.drawn = (self.queue.changes, others, vips)
        return drawn[1], drawn[2]

    def _span(self, flow: Flow) -> tuple[float, float, float]:
        """A tenant begins half a request early, because its last one before the waiter goes whole."""
        tenant, whole = flow.tenant, flow.tenant.backlog
        begin = tenant.counter - 0.5 * whole.cost / whole.requests / tenant.weight
        return begin, tenant.counter + whole.cost / tenant.weight, flow.backlog.cost

    def _share_of_book(self, book: Book) -> float:
        """Of what is promised in the lane the share that comes before the waiter."""
        if book.drawn is None or book.changes - book.drawn[0] > len(book.tenants) // STALE:
            book.drawn = (book.changes, Curve(self._promised_span(*of) for of in book.tenants.items()))
        return book.drawn[1].share(self._counter)

    def _promised_span(self, name: str, promised: Promised) -> tuple[float, float, float]:
        tenant = self.queue.tenants.get(name)
        begin = tenant.counter if tenant else self.queue.counters.entry(name)
        begin += tenant.backlog.cost / promised.weight if tenant else 0.0
        return begin, begin + self._promised_to(name) / promised.weight, promised.cost


class _Need:
    """What has to come of one key before a waiter has what it claims of it."""

    __slots__ = ("_amount", "_before", "_free", "_mine", "_own_rate", "_pause_s", "key", "kind", "rate")

    def __init__(self, key: str, amount: float, free: float, rate: float, own_rate: float, pause_s: float) -> None:
        """`free` is there now, the rest comes at `rate`; or all of the lane's own at `own_rate`, whoever else wants."""
        self.key = key
        self.kind = _kind(key)
        self._amount = amount
        self._before = self._mine = 0.0
        self._free = free
        self.rate = rate
        self._own_rate = own_rate
        self._pause_s = pause_s

    def add(self, part: _Part) -> None:
        """Count what comes first."""
        amount = part.share * _units(self.kind, part.backlog)
        self._before += amount
        if part.mine:
            self._mine += amount

    def wait_s(self) -> float:
        """Seconds until it has come."""
        missing = self._before + self._amount - self._free
        if missing <= EPSILON:
            return self._pause_s
        wait = missing / self.rate if self.rate > 0 else inf
        if self._own_rate > 0:
            owed = max(0.0, -self._free) / self.rate + (self._mine + self._amount) / self._own_rate
            wait = min(wait, owed)
        return max(wait, self._pause_s)


def _add(
    part: _Part, name: str, needs: list[_Need], allows: Callable[[str], bool], slow: Callable[[str], bool]
) -> None:
    """Count a part where it counts, if it goes to the upstream `name`."""
    if part.group.takes(name, allows, slow):
        for need in needs:
            if need.key in part.group.keys:
                need.add(part)


def _longest(needs: list[_Need]) -> float:
    return max(need.wait_s() for need in needs)


def _units(kind: str, backlog: Backlog) -> float:
    """What a backlog is of what a key counts."""
    match kind:
        case Kind.REQUESTS | "slots":
            return backlog.requests
        case Kind.INPUT:
            return backlog.input
        case Kind.OUTPUT:
            return backlog.tokens - backlog.input
        case _:
            return backlog.tokens


@lru_cache(maxsize=4096)
def _kind(key: str) -> str:
    return key.rpartition("/")[2]


def _lasting_s(rule: Lane) -> float:
    return max(LASTING_S, LASTING * rule.max_wait_s)


def _second(slot: tuple[int, Book, float, bool]) -> int:
    return slot[0]
