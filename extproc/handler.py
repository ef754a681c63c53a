"""The way of one request, top to bottom.

greet -> read -> price -> the caller's own quota -> wait for a turn -> forward -> until its response has ended.

What was taken on the way is given back by leaving `async with`, whatever the end. Every refusal is raised where its
reason is known and answered here, once. What the request really cost is learned later, from records (see flights).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import count
from math import ceil

from extproc import dialects, tokens
from extproc.core import routing
from extproc.core.events import Admitted, Refused
from extproc.core.flight import Flight
from extproc.core.forecast import Pace
from extproc.core.identity import Caller, Directory, lane_of, session_of
from extproc.core.policy import Policy, Route
from extproc.core.refusal import RULES, Reason, Refusal, Rejected
from extproc.core.request import Call, Dialect, Endpoint, Request, Size
from extproc.flights import Flights, facts_of
from extproc.limiter import Limiter, Wants
from extproc.ports import Capacity, Clock, Departure, Exchange, Gone, Head, Observer

__all__ = ["Handler", "Timing"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Limits on an upstream's answer, in seconds; see settings.TimeoutSettings."""

    first_token_s: float
    prompt_tokens_per_s: float
    answer_s: float


@dataclass(frozen=True, slots=True)
class Greeting:
    """What the headers of a request say: who, what, how urgent, until when (`deadline` on the clock)."""

    head: Head
    endpoint: Endpoint
    caller: Caller
    lane: str
    path: str
    arrived: float
    deadline: float | None


class Handler:
    """See the head of this file. One object for all requests; calling it serves one."""

    def __init__(
        self,
        policy: Policy,
        directory: Directory,
        limiter: Limiter,
        flights: Flights,
        capacity: Capacity,
        calibration: tokens.Calibration,
        pace: Pace,
        clock: Clock,
        observer: Observer,
        *,
        process: str,
        timing: Timing,
        statuses: Callable[[Reason], int],
        session_headers: tuple[str, ...],
        session_window_s: float,
        allows: Callable[[str], bool],
        executor: Executor,
        chance: Callable[[], float],
    ) -> None:
        """`process` names this process in tickets; `chance` gives the jitter of retry times, in [0, 1)."""
        self._policy = policy
        self._directory = directory
        self._limiter = limiter
        self._flights = flights
        self._capacity = capacity
        self._calibration = calibration
        self._pace = pace
        self._clock = clock
        self._observe = observer
        self._process = process
        self._timing = timing
        self._statuses = statuses
        self._session_headers = session_headers
        self._session_window_s = session_window_s
        self._allows = allows
        self._executor = executor
        self._chance = chance
        self._numbers = count(1)

    async def __call__(self, exchange: Exchange) -> None:
        """Serve one request to its end. Raises only what is a bug, or cancellation."""
        head, greeting = Head({}, bodiless=True), None
        try:
            head = await exchange.head()
            greeting = self._greet(head)
            if greeting.endpoint is Endpoint.MODELS:
                await self._list_models(exchange, greeting)
                return
            document = await self._read(exchange, greeting)
            request, wants = await self._price(greeting, document)
            async with self._flights.board(request) as flight:
                grant = await self._limiter.acquire(request, wants, exchange.hold)
                departure = self._depart(flight, wants, grant.upstream, greeting, document)
                await exchange.forward(departure)
                await exchange.ended()
        except Rejected as rejected:
            await self._refuse(exchange, head, greeting, rejected)
        except Gone:
            return

    def _greet(self, head: Head) -> Greeting:
        if self._limiter.draining:
            raise Rejected(Reason.DRAINING, retry_after=1.0)
        headers = head.headers
        path = headers.get(":path", "")
        endpoint = dialects.endpoint_of(headers.get(":method", ""), path)
        if endpoint is None:
            raise Rejected(Reason.NOT_FOUND, "no LLM endpoint has this method and path")
        caller = self._directory.identify(headers, head.claims)
        lane = lane_of(caller.tenant, headers, self._policy.lanes)
        now, timeout = self._clock.time(), dialects.timeouts(headers)
        if timeout is not None and timeout <= 0:
            raise Rejected(Reason.DEADLINE_PASSED)
        return Greeting(head, endpoint, caller, lane, path, now, None if timeout is None else now + timeout)

    async def _read(self, exchange: Exchange, greeting: Greeting) -> dialects.Document | None:
        if greeting.endpoint is Endpoint.OTHER:
            return None
        return dialects.read(greeting.endpoint, await exchange.body())

    async def _price(self, greeting: Greeting, document: dialects.Document | None) -> tuple[Request, Wants]:
        call = document.call if document else Call(Endpoint.OTHER, "*")
        route = self._route(call, greeting.caller)
        size = await self._size(call)
        if greeting.endpoint is not Endpoint.OTHER:
            size = routing.fitting(self._policy, route, size, capped=call.output_cap is not None)
        pin = route.chain[0] if call.state and len(route.chain) > 1 else None
        names = routing.eligible(self._policy, route, greeting.endpoint.dialect, call.model, size, pin)
        prices = {
            name: routing.claims(self._policy.upstreams[name], call.model, size, greeting.endpoint) for name in names
        }
        return self._request(greeting, call, route.name, size, document), Wants(names, prices)

    def _route(self, call: Call, caller: Caller) -> Route:
        if call.endpoint is Endpoint.OTHER:
            if self._policy.other is None:
                raise Rejected(Reason.NOT_FOUND, "this gateway serves no endpoint of this kind")
            return self._policy.other
        models = caller.tenant.models
        if models and not routing.matches(call.model, models):
            raise Rejected(Reason.FORBIDDEN, f"this tenant may not use model {call.model[:100]!r}")
        return routing.route_of(self._policy, call.model)

    async def _size(self, call: Call) -> Size:
        if call.endpoint in (Endpoint.OTHER, Endpoint.COUNT_TOKENS):
            return Size(0, 0)
        if tokens.is_long(call.prompt):
            loop = asyncio.get_running_loop()
            estimate = await loop.run_in_executor(self._executor, tokens.estimate, call.prompt, call.model)
        else:
            estimate = tokens.estimate(call.prompt, call.model)
        cap = self._policy.default_output_tokens * call.choices if call.output_cap is None else call.output_cap
        return Size(self._calibration.correct(call.model, estimate), cap if call.endpoint.generates else 0)

    def _request(
        self, greeting: Greeting, call: Call, route: str, size: Size, document: dialects.Document | None
    ) -> Request:
        headers, lane = greeting.head.headers, self._policy.lanes[greeting.lane]
        named = [headers.get(name, "") for name in self._session_headers]
        named += [*dialects.header_sessions(headers), *call.sessions]
        wait_until = greeting.arrived + lane.max_wait_s
        if greeting.deadline is not None:
            generating = 0.0 if call.stream else self._pace.output_s(call.model, size.output)
            wait_until = min(wait_until, greeting.deadline - generating)
        return Request(
            id=headers.get("x-request-id", ""),
            ticket=f"{self._process}-{next(self._numbers)}",
            tenant=greeting.caller.tenant.name,
            lane=greeting.lane,
            route=route,
            model=call.model,
            endpoint=greeting.endpoint,
            stream=call.stream,
            size=size,
            session=session_of(named, greeting.caller, time.time(), self._session_window_s),
            arrived=greeting.arrived,
            deadline=greeting.deadline,
            wait_until=wait_until,
            bytes=len(document.body) if document else 0,
        )

    def _depart(
        self, flight: Flight, wants: Wants, first: str, greeting: Greeting, document: dialects.Document | None
    ) -> Departure:
        request, now = flight.request, self._clock.time()
        order = routing.order(first, wants.names, self._allows, lambda name: self._has_room(wants, name))
        flight.accounting = {name: self._policy.upstreams[name].accounting for name in order}
        flight.depart(order, wants.prices, now)
        self._observe(Admitted(request, order, flight.waited_s))
        rewrite = None
        if document is not None:
            names = {name: self._policy.upstreams[name].own_name(request.model) for name in order}
            rewrite = dialects.rewrite(document, names, order)
        per_try_s, total_s = self._limits(request, len(order), now)
        retry_s = ceil(self._policy.upstreams[first].breaker.cool_down_s)
        return Departure(
            ticket=request.ticket,
            order=order,
            path=greeting.path,
            dialect=request.dialect,
            queue_ms=round(flight.waited_s * 1000),
            fail_body=self._fail_body(greeting.head, request, retry_s),
            fail_retry_s=retry_s,
            body=rewrite.body if rewrite else None,
            heads=rewrite.heads if rewrite else None,
            width=rewrite.width if rewrite else 0,
            hide_usage=document is not None and dialects.hides_usage(document.call),
            per_try_s=per_try_s,
            total_s=total_s,
            deadline_ms=None if request.deadline is None else max(1, int((request.deadline - now) * 1000)),
            removed=tuple(name for name in greeting.head.headers if name.startswith("x-tidegate-")),
            facts=facts_of(flight),
        )

    def _limits(self, request: Request, attempts: int, now: float) -> tuple[float | None, float | None]:
        left = None if request.deadline is None else max(0.001, request.deadline - now)
        if request.stream:
            first_token = self._timing.first_token_s + request.size.input / self._timing.prompt_tokens_per_s
            return (first_token if left is None else min(first_token, left / attempts)), None
        return left or self._timing.answer_s, left or self._timing.answer_s

    def _has_room(self, wants: Wants, name: str) -> bool:
        levels, now = self._capacity.levels(), self._clock.time()
        return all(
            counter.wait_for(claim.amount, now) <= 0
            for claim in wants.prices[name]
            if (counter := levels.get(claim.key)) is not None
        )

    def _fail_body(self, head: Head, request: Request, retry_s: int) -> str:
        refusal = Refusal(Reason.UPSTREAM_FAILED, self._statuses(Reason.UPSTREAM_FAILED), retry_s)
        return self._word(head, request.dialect, refusal)[1].decode()

    async def _list_models(self, exchange: Exchange, greeting: Greeting) -> None:
        allowed = greeting.caller.tenant.models
        names = [m for route in self._policy.routes for m in route.models if "*" not in m]
        visible = [name for name in names if not allowed or routing.matches(name, allowed)]
        body = dialects.models_answer(visible, greeting.path)
        if body is None:
            raise Rejected(Reason.UNKNOWN_MODEL)
        await exchange.answer(200, [("content-type", "application/json")], body, "models")

    async def _refuse(self, exchange: Exchange, head: Head, greeting: Greeting | None, rejected: Rejected) -> None:
        now = self._clock.time()
        refusal = Refusal(
            reason=rejected.reason,
            status=self._statuses(rejected.reason),
            retry_after=(rejected.retry_after or 1.0) if RULES[rejected.reason].retry else None,
            detail=rejected.detail,
            tokens=rejected.tokens,
            requests=rejected.requests,
        )
        self._observe(
            Refused(
                refusal.reason,
                refusal.status,
                greeting.caller.tenant.name if greeting else "",
                greeting.lane if greeting else "",
                now - greeting.arrived if greeting else 0.0,
                head.headers.get("x-request-id", ""),
            )
        )
        headers, body = self._word(head, _dialect(head.headers), refusal)
        try:
            await exchange.answer(refusal.status, headers, body, f"tidegate_{refusal.reason}")
        except Gone:
            return

    def _word(self, head: Head, dialect: Dialect, refusal: Refusal) -> tuple[list[tuple[str, str]], bytes]:
        return dialects.refuse(
            dialect,
            refusal,
            language=dialects.language(head.headers.get("accept-language")),
            request_id=head.headers.get("x-request-id", ""),
            now=time.time(),
            jitter=self._chance(),
        )


def _dialect(headers: Mapping[str, str]) -> Dialect:
    """The family to answer in when the endpoint may not be known: by path, else by the SDK's own header."""
    if headers.get(":path", "").startswith("/v1/messages") or "anthropic-version" in headers:
        return Dialect.ANTHROPIC
    return Dialect.OPENAI
