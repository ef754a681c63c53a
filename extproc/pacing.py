"""What providers say about speed, brought to the counters: hears events and records, tunes capacity.

Events tell what was sent and what became of it (`observe`), records tell what the provider answered (`hear`), and once
a second time itself is asked (`tick`). What a word of the provider means for one bucket is decided in core.pacing; here
is only which bucket it is about: the one of its kind among those that the request was priced with, because limits are
those of the model that was asked for.

A refusal for speed (429) pauses the buckets of that model, or, where none is counted, the slots of the upstream: at
once, and for as long as the provider says. The request itself is at the next upstream by then. A limit in shadow mode
stops nothing, so it cannot pause anything either. An upstream that is not to be followed is not listened to at all.

Deliberately not here: what a failed attempt means for the breaker, and who may serve instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from extproc import dialects
from extproc.core.bucket import TokenBucket
from extproc.core.capacity import Change, Tuning
from extproc.core.events import Admitted, AttemptFailed, Event, LimitsMoved, Settled
from extproc.core.flight import Flight
from extproc.core.pacing import HOUR_S, Brakes, Move, Pacer, Reported, Rules, shortage_s
from extproc.core.policy import Accounting, Kind, Limit, Policy, Upstream
from extproc.core.ramp import FLOOR_PER_MINUTE, Ramp
from extproc.core.request import Request, Size
from extproc.core.routing import UNMETERED, bucket_key, limits_of, reserve_of, slots_key
from extproc.dialects import ErrorClass
from extproc.ports import Capacity, Clock, Observer, Record, RecordKind
from extproc.shapes import Pace

__all__ = ["Pacing"]

KINDS = {"tokens": Kind.TOTAL, "input": Kind.INPUT, "output": Kind.OUTPUT, "requests": Kind.REQUESTS}
SAME_S = 0.01
"""Answers that began this close to each other say the same; one of them is listened to."""
TOLD_S = 10.0
"""The same counter is announced at most this often for the same kind of reason."""
NEARLY_SPENT = 0.01
"""What remains of a long window counts as spent below this share of it, when it is too little for such a request."""
MODELS = 4096
"""Most names of models that are remembered; callers choose them where a route has a wildcard."""
TRIPS = 100_000
"""Most requests that are followed at a time."""
LATE = 1_024
"""So many whose outcome was told before a failed attempt are remembered."""
PER_DAY = "PerDay"
SLOW_DOWN = "slow_down"
FIRST_ERROR = 400

Lines = tuple[tuple[Kind, Pacer], ...]


@dataclass(slots=True)
class _Trip:
    """A request on its way. at: where it is, empty for nowhere. sent: when it was sent to each upstream.

    failed: how many attempts were told to have.
    """

    request: Request
    at: str = ""
    sent: dict[str, float] = field(default_factory=dict)
    failed: int = 0


@dataclass(frozen=True, slots=True)
class _Reply:
    """What one record is about. lines: the buckets that its request was priced with; size None: unknown.

    departed, told_at: when the request was sent, and when the answer's first byte came, on the clock.
    """

    upstream: Upstream
    lines: Lines
    departed: float
    told_at: float
    now: float
    size: Size | None = None

    def need(self, kind: str) -> float:
        """Units of a reported kind that such a request takes, 0 when unknown."""
        if kind == "requests":
            return 1.0
        return _amount(KINDS[kind], self.size) if self.size is not None and kind in KINDS else 0.0

    def pacer(self, kind: str) -> Pacer | None:
        """The pacer of a reported kind."""
        wanted = KINDS.get(kind)
        return next((pacer for its, pacer in self.lines if its is wanted), None)


class Pacing:
    """See the head of this file. `wall` tells the time of day in epoch seconds, `chance` is in [0, 1)."""

    def __init__(
        self,
        policy: Policy,
        capacity: Capacity,
        clock: Clock,
        observer: Observer,
        *,
        freed: Callable[[], None],
        chance: Callable[[], float],
        wall: Callable[[], float],
        ramp_floor: float = FLOOR_PER_MINUTE,
    ) -> None:
        """`freed` is called when more may be taken; ramp_floor: tokens per minute that may always be reached."""
        self._policy = policy
        self._capacity = capacity
        self._clock = clock
        self._announce = observer
        self._freed = freed
        self._chance = chance
        self._wall = wall
        self._pacers: dict[str, Pacer] = {}
        self._slots: dict[str, Brakes] = {}
        self._ramp_floor = ramp_floor
        for name, upstream in policy.upstreams.items():
            slots = upstream.concurrency or (upstream.learn_concurrency if upstream.learn else inf)
            self._slots[name] = Brakes(slots_key(name), slots)
            for limit in upstream.limits:
                self._pacers[bucket_key(name, limit)] = _pacer(upstream, limit, ramp_floor)
        self._lines: dict[tuple[str, str], Lines] = {}
        self._trips: dict[str, _Trip] = {}
        self._late: dict[str, _Trip] = {}
        self._heard: dict[tuple[str, str], float] = {}
        self._told: dict[tuple[str, str], float] = {}

    def follow(self, policy: Policy) -> list[Tuning]:
        """Go by other rules from now on, of the same upstreams. Returns how counters are to be.

        What providers said of them goes on counting.
        """
        now, former, pacers = self._clock.time(), self._policy, dict[str, Pacer]()
        self._policy, tunings = policy, list[Tuning]()
        for name, upstream in policy.upstreams.items():
            for limit in upstream.limits:
                key = bucket_key(name, limit)
                if (pacer := self._pacers.get(key)) is None:
                    pacers[key] = _pacer(upstream, limit, self._ramp_floor)
                    continue
                pacers[key] = pacer
                tunings += pacer.follow(_rules(upstream, limit), now)
                if pacer.ramp is not None and upstream.ramp is not former.upstreams[name].ramp:
                    pacer.ramp.active = upstream.ramp
            unknown = not any(pacers[bucket_key(name, limit)].known for limit in upstream.limits)
            usual = float(upstream.concurrency or (upstream.learn_concurrency if upstream.learn and unknown else inf))
            tunings.append(self._slots[name].follow(usual))
        self._pacers = pacers
        self._lines.clear()
        return tunings

    def observe(self, event: Event) -> None:
        """Hear what was sent where, and what came of it."""
        if isinstance(event, Admitted):
            name = event.order[0]
            if len(self._trips) >= TRIPS:  # whose end was never told
                self._over(self._trips.pop(next(iter(self._trips))), 0)
            trip = self._trips[event.request.ticket] = _Trip(event.request)
            self._send(trip, name)
        elif isinstance(event, Settled):
            self._settled(event)
        elif isinstance(event, AttemptFailed):
            self._failed(event)

    async def hear(self, record: Record, flight: Flight | None) -> None:
        """Learn from one record, of a request whose `flight` is known or not, after its books were seen to."""
        upstream = self._policy.upstreams.get(record.upstream)
        if upstream is None or not upstream.follow:
            return
        if record.kind is RecordKind.ATTEMPT:
            if record.status >= FIRST_ERROR:
                await self._apply(upstream.name, self._refusal(self._reply(upstream, record, flight), record))
        elif record.headers and 0 < record.status < FIRST_ERROR:
            reply = self._reply(upstream, record, flight)
            place = upstream.name, flight.request.model if flight is not None else ""
            if reply.told_at - self._heard.get(place, -inf) >= SAME_S:
                self._heard[place] = reply.told_at
                await self._apply(upstream.name, self._answer(reply, record))
            await self._correct(reply, record, flight)

    async def tick(self) -> None:
        """What time alone changes. Call about once a second."""
        now = self._clock.time()
        for name, slots in self._slots.items():
            slots.brake.recover(now)
            await self._apply(name, slots.due())
        for key, pacer in self._pacers.items():
            await self._apply(key.split("/")[1], pacer.due(now))

    async def hold_back(self, share: float, cause: str) -> None:
        """Use only this share of all slots until told otherwise; what providers want of them goes on counting."""
        for name, slots in self._slots.items():
            await self._apply(name, slots.hold_back(share, cause))

    def state(self) -> dict[str, Pace]:
        """What was heard of every counter, for the state page."""
        now = self._clock.time()
        found: Any = {key: pacer.state(now) for key, pacer in self._pacers.items()}
        found |= {slots.key: slots.state(now) for slots in self._slots.values() if not slots.brake.calm}
        paces: dict[str, Pace] = found
        return paces

    # What was sent.

    def _send(self, trip: _Trip, name: str) -> None:
        now = self._clock.time()
        trip.at, trip.sent[name] = name, now
        upfront, size = self._upfront(name), trip.request.size_at(name)
        for kind, pacer in self._priced(name, trip.request):
            later = 0.0 if upfront else _written_later(kind, size)
            pacer.sent(_amount(kind, size) - later, later, now)

    def _settled(self, event: Settled) -> None:
        trip = self._trips.pop(event.request.ticket, None)
        if trip is None:
            return
        if event.upstream and event.upstream != trip.at:  # that the one before it failed is reported later
            self._over(trip, 0)
            self._send(trip, event.upstream)
        known = event.usage.output if event.usage is not None else None
        served = trip.request.size.output if known is None else known
        self._over(trip, served if event.upstream else 0)
        if trip.failed < event.attempts - bool(event.upstream):  # some of that is reported later
            self._late[event.request.ticket] = trip
            if len(self._late) > LATE:
                del self._late[next(iter(self._late))]

    def _failed(self, event: AttemptFailed) -> None:
        trip = self._trips.get(event.ticket) or self._late.get(event.ticket)
        if trip is None:
            return
        trip.failed += 1
        if trip.at == event.upstream:
            self._over(trip, trip.request.size_at(trip.at).output if event.charged else 0)
        if event.status >= FIRST_ERROR and not event.charged:
            self._turned_away(trip, event.upstream)
        if not trip.at and event.following and event.ticket in self._trips:
            self._send(trip, event.following)

    def _turned_away(self, trip: _Trip, name: str) -> None:
        sent = trip.sent.pop(name, None)
        if sent is None:
            return
        now, upfront, size = self._clock.time(), self._upfront(name), trip.request.size_at(name)
        for kind, pacer in self._priced(name, trip.request):
            first = _amount(kind, size) - (0.0 if upfront else _written_later(kind, size))
            pacer.turned_away(first, sent, now)

    def _over(self, trip: _Trip, output: int) -> None:
        name, trip.at = trip.at, ""
        if not name or self._upfront(name):
            return
        now = self._clock.time()
        for kind, pacer in self._priced(name, trip.request):
            if later := _written_later(kind, trip.request.size_at(name)):
                pacer.over(later, float(output), now)

    def _upfront(self, name: str) -> bool:
        return self._policy.upstreams[name].accounting is Accounting.UPFRONT

    def _priced(self, name: str, request: Request) -> Lines:
        """The buckets that a request is counted in at an upstream."""
        lines = self._lines_of(name, request.model)
        if request.endpoint in UNMETERED:
            return tuple(line for line in lines if line[0] is Kind.REQUESTS)
        return lines

    def _lines_of(self, name: str, model: str) -> Lines:
        lines = self._lines.get((name, model))
        if lines is None:
            if len(self._lines) >= MODELS:
                self._lines.clear()
                self._heard.clear()
            limits = limits_of(self._policy.upstreams[name], model)
            lines = tuple((limit.kind, self._pacers[bucket_key(name, limit)]) for limit in limits)
            self._lines[name, model] = lines
        return lines

    # What was answered.

    def _reply(self, upstream: Upstream, record: Record, flight: Flight | None) -> _Reply:
        now = self._clock.time()
        if flight is None:
            same = len({limit.model for limit in upstream.limits}) == 1
            lines = self._lines_of(upstream.name, upstream.limits[0].model) if same else ()
            began = now - record.duration_s
            return _Reply(upstream, lines, began, _told_at(record, began, began, now), now)
        departed = now if flight.departed is None else flight.departed
        told_at, request = _told_at(record, flight.request.arrived, departed, now), flight.request
        size = request.size_at(upstream.name)
        return _Reply(upstream, self._priced(upstream.name, request), departed, told_at, now, size)

    def _answer(self, reply: _Reply, record: Record) -> list[Move]:
        moves, spent = self._follow(reply, record, served=True)
        if not spent:
            for _, pacer in reply.lines:
                moves += pacer.served(reply.departed, reply.now)
            slots = self._slots[reply.upstream.name]
            if not slots.brake.calm:
                slots.brake.served(reply.departed)
                moves += slots.due("served again")
        return moves

    def _follow(self, reply: _Reply, record: Record, *, served: bool) -> tuple[list[Move], list[Reported]]:
        """What the headers say: counters to change, and what of it is too little for such a request."""
        moves: list[Move] = []
        spent: list[Reported] = []
        levels = self._capacity.levels()
        for seen in dialects.reported(reply.upstream.provider, record.headers, self._wall()):
            need = reply.need(seen.kind)
            if seen.window_s >= HOUR_S or seen.kind == "share":
                if _spent(seen, need, served=served):
                    spent.append(seen)
                    moves += self._exhausted(reply, seen, need) if served else []
            elif pacer := reply.pacer(seen.kind):
                bucket = levels.get(pacer.key)
                level = bucket.level_at(reply.now) if isinstance(bucket, TokenBucket) else None
                moves += pacer.told(seen, reply.departed, reply.told_at, level, reply.now)
                if not served and _spent(seen, need, served=False):
                    spent.append(seen)
        if reply.upstream.learn:
            moves += self._lifted(reply)
        return moves, spent

    def _lifted(self, reply: _Reply) -> list[Move]:
        """Once limits are known, the few slots that stood for them are not needed."""
        slots, usual = self._slots[reply.upstream.name], float(reply.upstream.concurrency or inf)
        if slots.limit == usual or not any(pacer.known for _, pacer in reply.lines):
            return []
        return slots.lift(usual, "limits are known")

    async def _correct(self, reply: _Reply, record: Record, flight: Flight | None) -> None:
        """Charge what the provider says it charged, where usage was not told and an estimate was kept."""
        used = flight.used if flight is not None else None
        if record.kind is not RecordKind.FINAL or "in" in record.tail or used is None:
            return
        cost, pacer = dialects.charged(record.headers), reply.pacer("tokens")
        if cost is not None and pacer is not None and reply.upstream.accounting is Accounting.ACTUAL:
            await self._capacity.change([Change(pacer.key, used.total - cost)])
            self._freed()

    # What was refused.

    def _refusal(self, reply: _Reply, record: Record) -> list[Move]:
        moves, spent = self._follow(reply, record, served=False)
        kind, _, code = record.error.partition("/")
        if PER_DAY in record.error:
            return moves + self._exhausted(reply, None, 0.0)
        if dialects.classify(reply.upstream.provider, record.status, kind, code) is not ErrorClass.PACE:
            return moves
        if SLOW_DOWN in (kind, code):
            moves += [move for _, pacer in reply.lines for move in pacer.slow_down(reply.now)]
        wait_s = dialects.retry_after_s(record.headers, self._wall()) or None
        for seen in spent:
            if seen.window_s >= HOUR_S or seen.kind == "share":
                return moves + self._exhausted(reply, seen, reply.need(seen.kind), wait_s)
        if wait_s is None and any(seen.limit is not None and seen.limit < reply.need(seen.kind) for seen in spent):
            return moves  # it asked for more than there ever is: that says nothing of our speed
        told = [seconds for seen in spent if (seconds := shortage_s(seen, reply.need(seen.kind)))]
        return moves + self._refused(reply, wait_s or max(told, default=None), explained=bool(spent), record=record)

    def _refused(self, reply: _Reply, wait_s: float | None, *, explained: bool, record: Record) -> list[Move]:
        word = record.error if record.error not in ("", "-/-") else f"status {record.status}"
        cause = f"{word}, {'no word how long' if wait_s is None else f'wait {wait_s:.3g} s'}"
        if wait_s is not None and wait_s >= HOUR_S:
            return self._braked(reply, wait_s, cause)
        chance, began, now = self._chance(), reply.departed, reply.now
        pacers = self._pausable(reply)
        moves = [
            move
            for pacer in pacers
            for move in pacer.refused(began, now, wait_s, explained=explained, chance=chance, cause=cause)
        ]
        if not pacers:
            slots = self._slots[reply.upstream.name]
            seconds = slots.brake.refused(began, now, wait_s, explained=explained, chance=chance)
            moves += slots.pause(seconds, cause)
        return moves

    def _exhausted(self, reply: _Reply, seen: Reported | None, need: float, wait_s: float | None = None) -> list[Move]:
        """A window of hours is spent, or an error says that a day's is."""
        if seen is None:
            return self._braked(reply, None, "the day's quota is spent")
        if wait_s is None and (left := shortage_s(seen, max(need, 1.0))):
            wait_s = max(1.0, left - (reply.now - reply.told_at))
        what = "share" if seen.kind == "share" else f"{seen.remaining:g} {seen.kind}"
        return self._braked(reply, wait_s, f"{what} left for the rest of {seen.window_s / HOUR_S:g} h")

    def _braked(self, reply: _Reply, wait_s: float | None, cause: str) -> list[Move]:
        pacers, began, now = self._pausable(reply), reply.departed, reply.now
        if pacers:
            return [move for pacer in pacers for move in pacer.exhausted(began, now, wait_s, cause)]
        slots = self._slots[reply.upstream.name]
        return slots.pause(slots.brake.exhausted(began, now, wait_s), cause)

    def _pausable(self, reply: _Reply) -> list[Pacer]:
        """The counters by which this model can be paused."""
        return [pacer for _, pacer in reply.lines if pacer.known and not pacer.rules.shadow]

    async def _apply(self, upstream: str, moves: Sequence[Move]) -> None:
        if not moves:
            return
        await self._capacity.tune([move.tuning for move in moves])
        now = self._clock.time()
        for move in moves:
            place = move.tuning.key, move.what
            if now - self._told.get(place, -inf) >= TOLD_S:
                self._told[place] = now
                self._announce(LimitsMoved(upstream, move.tuning.key, move.cause))
        self._freed()


def _pacer(upstream: Upstream, limit: Limit, ramp_floor: float) -> Pacer:
    grows = limit.kind in (Kind.TOTAL, Kind.INPUT)
    ramp = Ramp(ramp_floor, active=upstream.ramp) if grows else None
    return Pacer(bucket_key(upstream.name, limit), _rules(upstream, limit), ramp)


def _rules(upstream: Upstream, limit: Limit) -> Rules:
    return Rules(
        rate=limit.per_minute / 60.0,
        capacity=limit.capacity,
        headroom=upstream.headroom,
        shadow=limit.shadow,
        reserve=reserve_of(upstream, limit.kind),
    )


def _told_at(record: Record, arrived: float, departed: float, now: float) -> float:
    """When the first byte of an answer came, by the time since its request's start; a failed attempt ended just now."""
    if record.kind is RecordKind.ATTEMPT:
        return now
    if record.answered_s is not None:
        return min(now, max(departed, arrived + record.answered_s))
    return min(now, departed + (record.first_token_s or 0.0))


def _amount(kind: Kind, size: Size) -> float:
    match kind:
        case Kind.TOTAL:
            return float(size.total)
        case Kind.INPUT:
            return float(size.input)
        case Kind.OUTPUT:
            return float(size.output)
        case Kind.REQUESTS:
            return 1.0


def _written_later(kind: Kind, size: Size) -> float:
    """What a provider that charges what was used counts only while the answer is written."""
    return float(size.output) if kind in (Kind.TOTAL, Kind.OUTPUT) else 0.0


def _spent(seen: Reported, need: float, *, served: bool) -> bool:
    """Whether what remains is too little for such a request; after one that was served, only if hardly any is left."""
    if seen.remaining is None:
        return False
    if served and seen.limit is not None:
        need = min(need, NEARLY_SPENT * seen.limit)
    return seen.remaining <= 0 or seen.remaining < need
