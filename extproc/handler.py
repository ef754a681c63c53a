"""The way of one request, top to bottom.

greet -> read -> price -> the only copy -> the caller's own quota -> wait for a turn -> depart -> until its response has
ended.

What was taken on the way is given back by leaving `async with`, whatever the end. Every refusal is raised where its
reason is known and answered here, once. What the request really cost is learned later, from records (see flights).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf

from extproc import dialects
from extproc.copies import REPLACED, Copies
from extproc.core.events import Admitted, Left, Observed, Refused
from extproc.core.flight import Flight
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Endpoint, Request
from extproc.dispatch import Dispatch
from extproc.examination import Examination
from extproc.flights import Flights
from extproc.limiter import Grant, Limiter
from extproc.ports import Clock, Departure, Exchange, Gone, Head, Observer
from extproc.reception import Greeting, Reception, trace_of
from extproc.turn import Wants
from extproc.wording import Wording

__all__ = ["Handler"]

JSON = [("content-type", "application/json")]
FOR_WANT = frozenset(
    {
        Reason.QUEUE_TIMEOUT, Reason.LANE_FULL, Reason.EVICTED, Reason.DEADLINE_UNMEETABLE, Reason.DEADLINE_PASSED,
        Reason.NO_UPSTREAM, Reason.SPEND_BUDGET,
    }
)  # fmt: skip
"""Reasons of those whom an upstream could not take."""
LONGEST = 256
"""Characters of what a client said of a request that was refused, as they are told."""
WORTH_FREEING = 16_384
"""Bytes of body from which on the text of a counted prompt is let go, so that a waiting request is held only once."""


@dataclass(frozen=True, slots=True)
class Desk:
    """What a request is served by that is made of the rules alone and remembers nothing of requests."""

    reception: Reception
    dispatch: Dispatch
    wording: Wording
    examination: Examination | None


class Handler:
    """See the head of this file. One object for all requests; calling it serves one."""

    def __init__(
        self,
        reception: Reception,
        copies: Copies,
        flights: Flights,
        limiter: Limiter,
        dispatch: Dispatch,
        wording: Wording,
        clock: Clock,
        observer: Observer,
        examination: Examination | None = None,
    ) -> None:
        """Keep them."""
        self._copies = copies
        self._flights = flights
        self._limiter = limiter
        self._clock = clock
        self._observe = observer
        self.follow(reception, dispatch, wording, examination)

    def follow(
        self, reception: Reception, dispatch: Dispatch, wording: Wording, examination: Examination | None = None
    ) -> None:
        """Serve who comes from now on by other rules. Who is here already goes by those that it came to."""
        self._desk = Desk(reception, dispatch, wording, examination)

    async def __call__(self, exchange: Exchange) -> None:
        """Serve one request to its end. Raises only what is a bug, or cancellation."""
        head, greeting, document, desk = Head({}, bodiless=True), None, None, self._desk
        request, wants, undecided = None, None, False
        try:
            head = await exchange.head()
            desk = self._desk  # other rules may hold since its stream began
            greeting = self._greet(desk, head)
            if greeting.endpoint is Endpoint.MODELS:
                await exchange.answer(200, JSON, desk.reception.models(greeting), "models")
                return
            document = await self._read(desk, exchange, greeting)
            request, wants = await desk.reception.price(greeting, document)
            undecided = True
            if wants.too_large:
                self._observe(Observed(request, Reason.TOO_LARGE))
            if request.bytes > WORTH_FREEING:
                document = document and dialects.without_prompt(document)
            async with self._copies.sole(request) as copy, self._flights.board(request, wants.names) as flight:
                grant = await self._limiter.acquire(request, wants, exchange.hold, copy.since)
                departure = desk.dispatch.depart(flight, wants, grant.upstream, greeting, document)
                copy.departs(partial(self._abort, desk, exchange, head))
                undecided = False
                self._observe(self._admitted(desk, flight, wants, grant, departure))
                await exchange.forward(departure)
                document = None  # a long answer need not keep its question in memory
                del departure
                await exchange.ended()
        except Rejected as rejected:
            undecided = False
            await self._refuse(desk, exchange, head, greeting, rejected, document, request, wants)
        except Gone:
            return
        finally:
            if undecided and request is not None:
                self._observe(Left(request, self._clock.time() - request.arrived))

    def _greet(self, desk: Desk, head: Head) -> Greeting:
        if self._limiter.draining:
            raise Rejected(Reason.DRAINING, retry_after=1.0)
        return desk.reception.greet(head)

    async def _read(self, desk: Desk, exchange: Exchange, greeting: Greeting) -> dialects.Document | None:
        if greeting.endpoint is Endpoint.OTHER:
            return None
        body = await exchange.body()
        if desk.examination is not None:
            await desk.examination.attend(exchange, body)
        return dialects.read(greeting.endpoint, body)

    def _admitted(self, desk: Desk, flight: Flight, wants: Wants, grant: Grant, departure: Departure) -> Admitted:
        """Told at the moment of its departure: later nobody could say why it does not go elsewhere."""
        request, order = flight.request, departure.order
        why_not = desk.dispatch.passed_over(request, wants, order)
        return Admitted(request, order, flight.waited_s, grant.predicted_s, why_not, grant.bypassed)

    async def _refuse(
        self,
        desk: Desk,
        exchange: Exchange,
        head: Head,
        greeting: Greeting | None,
        rejected: Rejected,
        document: dialects.Document | None,
        request: Request | None,
        wants: Wants | None,
    ) -> None:
        refusal = desk.wording.refusal(rejected)
        instead = desk.dispatch.instead(rejected, greeting, document)
        why_not = request and wants and refusal.reason in FOR_WANT and desk.dispatch.passed_over(request, wants, ())
        self._observe(
            Refused(
                refusal.reason,
                refusal.status,
                tenant=greeting.caller.tenant.name if greeting else "",
                lane=greeting.lane if greeting else "",
                waited_s=self._clock.time() - greeting.arrived if greeting else 0.0,
                request_id=head.headers.get("x-request-id", "")[:LONGEST],
                request=request,
                detail=refusal.detail,
                retry_after=refusal.retry_after,
                trace=trace_of(head.headers),
                path=head.headers.get(":path", "").partition("?")[0][:LONGEST],
                instead=instead is not None,
                passed_over=why_not or (),
            )
        )
        headers, body = instead or desk.wording.answer(head, refusal)
        with suppress(Gone):
            await exchange.answer(200 if instead else refusal.status, headers, body, f"tidegate_{refusal.reason}")

    async def _abort(self, desk: Desk, exchange: Exchange, head: Head) -> None:
        """End a request that runs, because its retry has come. Its client has nearly always left."""
        refusal = desk.wording.refusal(Rejected(Reason.EVICTED, REPLACED, retry_after=inf))
        headers, body = desk.wording.answer(head, refusal)
        with suppress(Gone):
            await exchange.abort(refusal.status, headers, body, f"tidegate_{refusal.reason}")
