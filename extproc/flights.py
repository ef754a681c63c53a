"""Everything that was let go and is not yet accounted for: opens the books on a request and closes them exactly once.

`board` takes the caller's own on the way in (its tenant's allowance, its session's and its route's, all at once)
and gives back, on the way out, what the request still holds. Outcomes arrive beside it, as records of Envoy's access
log: before the stream's end, after it, in any order, or never. They are learned from here: tokens and dollars are
settled, breakers told, forecasts fed. A record that never comes is replaced after a grace period by the estimate.
Records of requests that a former process let go keep their slots counted until they end.

A request that is only observed is told as refused and goes all the same, into debt.

Deliberately not here: the arithmetic of what comes back (core.flight), what a request takes of its caller's own
(allowances), what a record says of its upstream (judge), and the meaning of usage (dialects).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Protocol

from extproc.allowances import NOTHING, Allowance, Allowances
from extproc.breakers import Breakers
from extproc.core.affinity import Affinity
from extproc.core.bucket import TokenBucket
from extproc.core.capacity import Answer, Ask, Change, Option
from extproc.core.events import AttemptFailed, Observed, Overshot, Settled, Shadowed
from extproc.core.flight import Flight, Refund
from extproc.core.forecast import Pace
from extproc.core.identity import place_of
from extproc.core.policy import Policy, Prices
from extproc.core.quota import PERIODS
from extproc.core.refusal import Reason, Rejected, Window
from extproc.core.request import Request, Size, Usage
from extproc.core.retries import RetryBudget
from extproc.core.routing import slots_key
from extproc.dialects import usage_of
from extproc.judge import CLIENT_LEFT, CUT, OVERLOADED, STALLED, UNSENT, Judge, fault_of, is_none
from extproc.ports import Capacity, Clock, Observer, Record, RecordKind

__all__ = ["Flights"]

LEASE_S = 15.0
"""A former process's request that has not been heard of for this long is taken to have ended."""

MOST_CLOSED = 1024
"""So many requests are still known, after their books were closed, whose attempts no record has told of yet."""

TIMED_OUT = "response_timeout"
"""Flag and details of a request that Envoy ended by itself: no record of an attempt tells of that."""
EVICTED = f"tidegate_{Reason.EVICTED}"
"""Details of a request that was ended here while it ran, because its client had sent it again."""


class Learned(Protocol):
    """Hears what an upstream reported of a request; complete: of a whole answer."""

    def __call__(self, flight: Flight, upstream: str, usage: Usage, *, complete: bool) -> None:
        """Learn from it."""


class Flights:
    """All open books of this process. Call `sweep` about once a second."""

    def __init__(
        self,
        policy: Policy,
        capacity: Capacity,
        allowances: Allowances,
        breakers: Breakers,
        clock: Clock,
        pace: Pace,
        observer: Observer,
        *,
        grace_s: float,
        affinity: Affinity,
        rates: Callable[[tuple[str, ...], str], Mapping[str, Prices]],
        freed: Callable[[], None],
        learned: Learned,
        settled: Callable[[Request, Size], None] = lambda _request, _used: None,
        retries: RetryBudget | None = None,
        lenient: Callable[[], bool] = lambda: False,
    ) -> None:
        """`rates` tells the prices of a model at some upstreams that hold now, where they are known.

        `freed` is called after capacity came back; `learned` hears of every usage that an upstream reported, and
        `settled` of what every request that departed really used, once. `retries` lent what flights try `again` with.
        lenient: whether nobody is refused at the moment, for want of what is its own.
        """
        self._retries = retries
        self._lenient = lenient
        self._policy = policy
        self._capacity = capacity
        self._allowances = allowances
        self._breakers = breakers
        self._clock = clock
        self._pace = pace
        self._observe = observer
        self._grace_s = grace_s
        self._affinity = affinity
        self._freed = freed
        self._learned = learned
        self._tell_used = settled
        self._rates = rates
        self._judge = Judge(policy, breakers, clock, pace)
        self._own: dict[Flight, Allowance] = {}
        self._flights: dict[str, Flight] = {}
        self._by_id: dict[str, Flight] = {}
        self._closed: OrderedDict[str, Flight] = OrderedDict()
        self._adopted: dict[str, tuple[str, float]] = {}
        self._returning: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        """Requests whose stream is open."""
        return sum(flight.landed is None for flight in self._flights.values())

    @property
    def unsettled(self) -> int:
        """Requests whose books are open, ended or not."""
        return len(self._flights)

    def follow(self, policy: Policy, grace_s: float) -> None:
        """Go by other rules from now on. Whoever flies is settled by what it took."""
        self._policy, self._grace_s = policy, grace_s
        self._judge.follow(policy)

    def oldest(self) -> float:
        """When the oldest of those arrived whose books are open; infinite when there is none."""
        return min((flight.request.arrived for flight in self._flights.values()), default=inf)

    def board(self, request: Request, names: tuple[str, ...] = ()) -> Boarding:
        """To be held with `async with` while `request` is here: take what is the caller's own and give back on leaving
        what is still held. Entering raises Rejected when that is spent.

        names: the upstreams that may serve it; of their prices the dearest is reserved.
        """
        return Boarding(self, request, names)

    async def enter(self, request: Request, names: tuple[str, ...]) -> Flight:
        """See `board`."""
        rates = self._rates(names, request.model)
        allowance = self._allowances.of(request, rates)
        if allowance is not NOTHING:
            await self._take_own(request, allowance)
        flight = self._flights[request.ticket] = self._by_id[request.id] = Flight(request, allowance.claims, rates)
        if allowance is not NOTHING:
            self._own[flight] = allowance
        return flight

    async def record(self, record: Record) -> None:
        """Learn from one record. Records of unknown requests teach the breakers only; a failed attempt whose request's
        books are closed is told and paid for all the same.

        One that still runs though its stream has ended here (Envoy had given up on us) holds its slot again.
        """
        flight = self.of(record)
        if record.kind is RecordKind.FINAL:
            await self._let_go(record.ticket)
        if flight is None or (record.kind is RecordKind.RUNNING and flight.landed is not None):
            await self._record_of_another(record)
        elif record.kind is RecordKind.ATTEMPT:
            await self._attempt_failed(flight, record)
        elif record.kind is RecordKind.RUNNING:
            self._judge.first_token(flight, record)
        elif not flight.settled:
            await self._final(flight, record)
        if flight is not None:
            self._forget_if_closed(flight)

    async def sweep(self) -> None:
        """Close the books whose record did not come, and let go of silent requests of a former process."""
        now = self._clock.time()
        for flight in [f for f in self._flights.values() if f.landed is not None and now - f.landed > self._grace_s]:
            allowance, unheard = self._own.get(flight), not flight.settled
            changes = flight.expire()
            self._forget(flight)
            if unheard:
                self._close(flight, Settled(flight.request, "", flight.attempts, 0, None, flight.waited_s, lost=True))
                await self._allowances.tune(self._allowances.served(flight.request))
            await self._apply(changes, allowance, flight.taken, flight.request.ticket)
        await self._allowances.sweep()
        for ticket in [t for t, (_, heard) in self._adopted.items() if now - heard > LEASE_S]:
            await self._let_go(ticket)

    def of(self, record: Record) -> Flight | None:
        """The request that a record is about; None once its books are closed, and for those of another process."""
        if record.ticket:
            return self._flights.get(record.ticket)
        return self._by_id.get(record.request_id) if record.request_id else None

    async def leave(self, flight: Flight) -> None:
        """Its stream has ended, or it never left. See `board`."""
        allowance, now = self._own.get(flight), self._clock.time()
        if flight.departed is None:
            changes = flight.cancel()
        else:
            self._breakers.ended(flight.at, flight.came)
            changes = flight.land(now)
            self._pace.learn_hold(flight.order[0], now - flight.departed)
            if allowance is not None:
                self._pace.learn_hold(place_of(flight.request.tenant), now - flight.departed)
        self._forget_if_closed(flight)
        await self._apply(changes, allowance, flight.taken, flight.request.ticket)

    async def _take_own(self, request: Request, allowance: Allowance) -> None:
        """Take the allowance. When this raises, nothing is taken and its books are closed."""
        rejected, goes = self._too_large(request, allowance), request.observed or self._lenient()
        if rejected is None or goes:
            take = self._ask if self._capacity.immediate else self._take
            answer = await take(request, allowance, goes=goes)
            for key in answer.shadowed:
                self._observe(Shadowed(request, _limit(key)))
            if rejected is None and answer.option is None:
                rejected = self._spent(request, answer)
        if rejected is None:
            return
        if not goes:
            self._allowances.close(allowance)
            raise rejected
        self._observe(Observed(request, rejected.reason))

    async def _take(self, request: Request, allowance: Allowance, *, goes: bool) -> Answer:
        """The answer, seen through: what it brings to somebody who was cancelled meanwhile goes back."""
        asking = asyncio.ensure_future(self._ask(request, allowance, goes=goes))
        try:
            return await asyncio.shield(asking)
        except BaseException:
            asking.add_done_callback(partial(self._return_unwanted, allowance, goes=goes))
            raise

    async def _ask(self, request: Request, allowance: Allowance, *, goes: bool) -> Answer:
        """goes: it goes all the same, into debt."""
        if allowance.first:
            await self._allowances.prepare(allowance)
        [answer] = await self._capacity.take([Ask(request.ticket, (Option(request.tenant, allowance.claims),))])
        if answer.option is None and goes:
            await self._capacity.change([Change(claim.key, -claim.amount) for claim in allowance.claims])
        return answer

    def _return_unwanted(self, allowance: Allowance, asking: asyncio.Future[Answer], *, goes: bool) -> None:
        failed = asking.cancelled() or asking.exception() is not None
        if failed or (asking.result().option is None and not goes):
            self._allowances.close(allowance)
            return
        returning = asyncio.ensure_future(self._return(allowance))
        self._returning.add(returning)
        returning.add_done_callback(self._returning.discard)

    async def _return(self, allowance: Allowance) -> None:
        changes = [Change(claim.key, claim.amount) for claim in allowance.claims]
        await self._apply(changes, allowance)
        self._allowances.close(allowance)

    def _too_large(self, request: Request, allowance: Allowance) -> Rejected | None:
        tpm = allowance.rules.tpm
        if tpm is None or request.size.total <= tpm:
            return None
        if "tpm" in allowance.rules.shadow:
            self._observe(Shadowed(request, f"{place_of(request.tenant)}/total"))
            return None
        return Rejected(Reason.TOO_LARGE, f"{request.size.total} tokens exceed what this tenant may use in a minute")

    def _spent(self, request: Request, answer: Answer) -> Rejected:
        """Why it is refused: for good before for a while, since who waits for the one would run into the other."""
        lacking = set(map(_kind, answer.short))
        place = place_of(request.tenant)
        if any(key.startswith("session/") for key in answer.short):
            what = "tokens" if "tokens" in lacking else "dollars"
            return Rejected(Reason.SESSION_BUDGET, f"what is left of this session's {what} does not cover this request")
        if not lacking.isdisjoint(PERIODS):
            longest = max((key for key in answer.short if _kind(key) in PERIODS), key=_lasts)
            whose = "tenant" if longest.startswith(place) else "model"
            spent = f"what is left of this {whose}'s dollars per {PERIODS[_kind(longest)]} does not cover this request"
            return Rejected(Reason.SPEND_BUDGET, spent)
        if "slots" in lacking:
            return Rejected(Reason.TENANT_CONCURRENCY, retry_after=max(1.0, self._pace.hold_s(place)))
        tokens, requests = self._window(f"{place}/total"), self._window(f"{place}/requests")
        return Rejected(Reason.TENANT_QUOTA, retry_after=answer.retry_after, tokens=tokens, requests=requests)

    def _window(self, key: str) -> Window | None:
        bucket = self._capacity.levels().get(key)
        if not isinstance(bucket, TokenBucket):
            return None
        now = self._clock.time()
        return Window(int(bucket.rate * 60), max(0, int(bucket.level_at(now))), bucket.wait_for(bucket.capacity, now))

    async def _attempt_failed(self, flight: Flight, record: Record) -> None:
        if not _is_news(flight, record):
            return
        flight.attempts = max(flight.attempts, record.attempt)
        outcome, cause = self._judge.attempt(record, flight)
        if record.flags & CLIENT_LEFT or 0 < record.status < 400:  # noqa: PLR2004 - the answer had begun
            return
        refund, last = _refund(record), _passed_on(record) or (flight.again and not _asked_again(record))
        at, came = flight.at, flight.came
        changes = flight.attempt_failed(record.upstream, refund, self._clock.time(), last=last)
        about = record.upstream, outcome, record.status, record.error, flight.request.ticket
        told = refund is Refund.KEPT, record.attempt, record.duration_s, cause
        self._observe(AttemptFailed(*about, flight.at, *told))
        if flight.tried:
            self._settle_lent(flight, used=True)
        if flight.landed is None and flight.at != at:
            self._breakers.ended(at, came)
        await self._apply(changes, self._own.get(flight), flight.taken, flight.request.ticket)

    async def _final(self, flight: Flight, record: Record) -> None:
        flight.attempts = max(flight.attempts, record.attempt)
        given_up = bool(record.flags & CLIENT_LEFT) or record.status == 0 or record.details == EVICTED
        usage: Usage | None = None
        if 0 < record.status < 400:  # noqa: PLR2004 - an answer was begun
            usage = self._usage(flight, record)
            complete = bool(record.tail.get("finish") or record.tail.get("done"))
            seen = None if complete or not flight.request.stream else _number(record.tail.get("events"))
            changes = flight.served(record.upstream, usage, seen)
            self._learn(flight, record, usage, complete=complete, given_up=given_up)
            if tunings := self._allowances.served(flight.request):
                await self._allowances.tune(tunings)
        else:
            timed_out = record.details == TIMED_OUT
            if timed_out:
                self._judge.attempt(record, flight)
            elif given_up:
                self._judge.first_token(flight, record)
            changes = flight.unserved(record.upstream if given_up or timed_out else "")
        self._close(flight, _settled(flight, record, usage, given_up=given_up))
        await self._apply(changes, self._own.get(flight), flight.taken, flight.request.ticket)

    def _close(self, flight: Flight, event: Settled) -> None:
        """Its outcome is known, or never will be."""
        self._observe(event)
        self._settle_lent(flight, used=flight.attempts > 1)
        if flight.used is not None:
            self._tell_used(flight.request, flight.used)

    def _settle_lent(self, flight: Flight, *, used: bool) -> None:
        """Whether its second attempt is needed is known: told once, at the first's failure if that is heard of."""
        if flight.lent is None or self._retries is None:
            return
        self._retries.settle(flight.request.tenant, self._clock.time(), used=used, lent=flight.lent)
        flight.lent = None

    def _usage(self, flight: Flight, record: Record) -> Usage | None:
        usage = usage_of(flight.request.dialect, record.tail)
        return usage if usage.input is not None or usage.output is not None else None

    def _learn(self, flight: Flight, record: Record, usage: Usage | None, *, complete: bool, given_up: bool) -> None:
        if state := record.tail.get("state"):
            self._affinity.learn(str(state), record.upstream)
        if usage is not None:
            self._learned(flight, record.upstream, usage, complete=complete)
            if usage.output and record.duration_s and complete:
                generating = record.duration_s - flight.waited_s - (record.first_token_s or 0.0)
                self._pace.learn_output(flight.request.model, generating, usage.output)
        flight.cut = bool(record.flags & (CUT - {STALLED}))
        if given_up or flight.cut:  # its attempt's record counts it, sooner or later
            self._judge.first_token(flight, record)
            return
        self._judge.answer(flight, record)

    async def _record_of_another(self, record: Record) -> None:
        if record.kind is RecordKind.ATTEMPT:
            closed = self._closed.get(record.request_id)
            if closed is None:
                self._judge.attempt(record)
            else:
                await self._attempt_failed(closed, record)
        elif record.kind is RecordKind.RUNNING and record.upstream in self._policy.upstreams:
            before, _ = self._adopted.get(record.ticket, ("", 0.0))
            self._adopted[record.ticket] = (record.upstream, self._clock.time())
            if before != record.upstream:
                moved = [Change(slots_key(before), 1.0)] if before else []
                await self._apply([*moved, Change(slots_key(record.upstream), -1.0)])

    async def _let_go(self, ticket: str) -> None:
        upstream, _ = self._adopted.pop(ticket, ("", 0.0))
        if upstream:
            await self._apply([Change(slots_key(upstream), 1.0)])

    def _forget_if_closed(self, flight: Flight) -> None:
        never_left = flight.departed is None and flight.settled
        if never_left or (flight.landed is not None and not flight.open_books):
            self._forget(flight)

    def _forget(self, flight: Flight) -> None:
        allowance = self._own.pop(flight, None)
        if allowance is not None:
            self._allowances.close(allowance)
        self._flights.pop(flight.request.ticket, None)
        if self._by_id.get(flight.request.id) is flight:
            del self._by_id[flight.request.id]
            if (flight.lost or flight.unheard + flight.cut > 0) and flight.request.id:
                self._closed[flight.request.id] = flight
                if len(self._closed) > MOST_CLOSED:
                    self._closed.popitem(last=False)

    async def _apply(
        self,
        changes: Sequence[Change],
        allowance: Allowance | None = None,
        taken: Mapping[str, float] | None = None,
        ticket: str = "",
    ) -> None:
        """allowance: of whom they are the changes; its counters stay until they are made. taken: see `Flight`. ticket:
        of the request whose changes they are.
        """
        if allowance is not None or taken:
            changes = self._allowances.due(changes, allowance or NOTHING, taken or {})
        if not changes:
            return
        levels, now = self._capacity.levels(), self._clock.time()
        for change in changes:
            bucket = levels.get(change.key)
            if isinstance(bucket, TokenBucket) and change.amount < min(0.0, -bucket.level_at(now)):
                self._observe(Overshot(change.key, -change.amount - max(0.0, bucket.level_at(now)), ticket))
        if self._capacity.immediate:
            await self._change(changes)
        else:
            self._allowances.pin(allowance or NOTHING)
            await asyncio.shield(self._change_pinned(changes, allowance or NOTHING))

    async def _change_pinned(self, changes: Sequence[Change], allowance: Allowance) -> None:
        try:
            await self._change(changes)
        finally:
            self._allowances.close(allowance)

    async def _change(self, changes: Sequence[Change]) -> None:
        await self._capacity.change(changes)
        self._freed()


class Boarding:
    """See Flights.board. Every request comes this way, and a generator would cost more than what it manages."""

    __slots__ = ("_flight", "_flights", "_names", "_request")

    def __init__(self, flights: Flights, request: Request, names: tuple[str, ...]) -> None:
        self._flights, self._request, self._names = flights, request, names

    async def __aenter__(self) -> Flight:
        """Open its books."""
        self._flight = await self._flights.enter(self._request, self._names)
        return self._flight

    async def __aexit__(self, *_: object) -> None:
        """Give back."""
        await self._flights.leave(self._flight)


def _kind(key: str) -> str:
    return key.rpartition("/")[2]


def _lasts(key: str) -> int:
    """Rank of a budget by how long it lasts."""
    return list(PERIODS).index(_kind(key))


def _limit(key: str) -> str:
    """Name of a counter, without the session's: there are too many."""
    kind, _, rest = key.partition("/")
    return f"session/{rest.partition('/')[0]}/{rest.rpartition('/')[2]}" if kind == "session" else key


def _is_news(flight: Flight, record: Record) -> bool:
    """Whether a failed attempt was not told before.

    The records carry no number: two at one upstream differ by how long they took.
    """
    told = record.upstream, record.attempt, record.duration_s if flight.again else 0.0
    if told in flight.heard:
        return False
    flight.heard.add(told)
    return True


def _refund(record: Record) -> Refund:
    """What comes back after a failed attempt. A whole answer that was none, and was not passed on, is paid for."""
    if is_none(record.error):
        return Refund.KEPT
    return Refund.UNSENT if record.flags & UNSENT else Refund.INPUT_KEPT if record.flags & CUT else Refund.ALL


def _passed_on(record: Record) -> bool:
    """Whether the router gave this attempt's answer to the caller; else it asks the next upstream (render.routes)."""
    return 400 <= record.shown < 500 and record.shown != 429  # noqa: PLR2004 - HTTP


def _asked_again(record: Record) -> bool:
    """Whether the router asks the same upstream once more, where the request may (render.routes)."""
    return bool(record.flags & (UNSENT | CUT)) or record.shown == OVERLOADED


def _settled(flight: Flight, record: Record, usage: Usage | None, *, given_up: bool) -> Settled:
    """given_up: before its end, by its client or for a later copy."""
    evicted = record.details == EVICTED
    return Settled(
        request=flight.request,
        upstream=record.upstream if given_up or record.status < 400 else "",  # noqa: PLR2004 - HTTP
        attempts=max(1, flight.attempts),
        status=0 if evicted and record.status >= 400 else record.status,  # noqa: PLR2004 - HTTP
        usage=usage,
        waited_s=flight.waited_s,
        first_token_s=record.first_token_s,
        duration_s=record.duration_s,
        client_gone=given_up and not evicted,
        evicted=evicted,
        finish=str(record.tail.get("finish", "")),
        cost_usd=flight.cost,
        flags=record.flags,
        details=record.details,
        asked=record.upstream,
        fault="" if given_up or record.status >= 400 else fault_of(record),  # noqa: PLR2004 - HTTP
    )


def _number(word: str | float | None) -> int | None:
    try:
        return None if word is None else max(0, int(word))
    except (ValueError, OverflowError):
        return None
