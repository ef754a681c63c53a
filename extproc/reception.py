"""From headers and body to a priced request: who calls, for what, until when, what it costs, who could serve it.

Everything here is cheap and decides nothing about capacity. Only counting a long prompt leaves the event loop, for a
worker thread.

A request and its retries have one fingerprint, by which they are told to be the same: the name that the client gave it
(an idempotency key), else its body, in both cases together with who sends it. It is a keyed hash that the interpreter
makes without letting go of its lock (0.5 us for 2 KB, 21 us for 100 KB; SHA-1 takes three times that), so it holds in
this process only, and no client can make one that is another request's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import count
from zlib import crc32

from extproc import dialects, tokens
from extproc.core import routing, spend
from extproc.core.affinity import Affinity
from extproc.core.capacity import Claim
from extproc.core.events import PassedOver
from extproc.core.forecast import Pace
from extproc.core.identity import Caller, Directory, lane_of, session_of
from extproc.core.outputs import Outputs
from extproc.core.policy import Policy, Prices, Route, Tenant
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Call, Endpoint, Request, Session, Size
from extproc.core.retries import KEYED
from extproc.core.value import value
from extproc.ports import Clock, Head
from extproc.sizes import Counted, Sizes
from extproc.turn import Wants

__all__ = ["Greeting", "Reception", "SessionRules", "trace_of"]

HASH_BITS = 2**64 - 1
CRC_VALUES = 2**32
LONGEST_TRACE = 128
"""Characters of a `traceparent`: 55 now, later versions may add to them."""


@dataclass(frozen=True, slots=True)
class SessionRules:
    """Where a session's name is looked for, and how long a derived one lasts (seconds)."""

    headers: tuple[str, ...]
    window_s: float


@value
class Greeting:
    """What the headers of a request say: who, what, how urgent, until when (`deadline` on the clock)."""

    head: Head
    endpoint: Endpoint
    caller: Caller
    lane: str
    path: str
    arrived: float
    deadline: float | None


class Reception:
    """See the head of this file. `process` names this process in tickets, so that records can find their owner."""

    def __init__(
        self,
        policy: Policy,
        directory: Directory,
        calibration: tokens.Calibration,
        affinity: Affinity,
        pace: Pace,
        outputs: Outputs,
        fresh: Callable[[str, str], bool],
        clock: Clock,
        *,
        process: str,
        sessions: SessionRules,
        executor: Executor,
        chance: Callable[[], float],
        rates: Callable[[tuple[str, ...], str], Mapping[str, Prices]],
        numbers: Iterator[int] | None = None,
        lenient: Callable[[], bool] = lambda: False,
    ) -> None:
        """`rates` tells the prices of a model at some upstreams that hold now, where they are known.

        `fresh` says of a tenant's session that it was never served. `executor` counts long prompts.

        `chance` is in [0, 1). numbers: of tickets, never the same twice; its own where none are given.
        lenient: whether everybody is only observed at the moment.
        """
        self._policy = policy
        self._directory = directory
        self._sizes = Sizes(policy, calibration, executor)
        self._affinity = affinity
        self._pace = pace
        self._outputs = outputs
        self._fresh = fresh
        self._clock = clock
        self._process = process
        self._sessions = sessions
        self._chance = chance
        self._rates = rates
        self._lenient = lenient
        self._numbers = count(1) if numbers is None else numbers
        self._purses = any(upstream.dollars.limited for upstream in policy.upstreams.values())

    def greet(self, head: Head) -> Greeting:
        """Read the headers. Rejected when path, caller, lane or deadline do not allow it."""
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

    def models(self, greeting: Greeting) -> bytes:
        """Body of the list of models this caller may use, or of one of them. Rejected when there is no such model."""
        allowed = greeting.caller.tenant.models
        names = [model for route in self._policy.routes for model in route.models if "*" not in model]
        visible = [name for name in names if not allowed or routing.matches(name, allowed)]
        body = dialects.models_answer(visible, greeting.path)
        if body is None:
            raise Rejected(Reason.UNKNOWN_MODEL)
        return body

    async def price(self, greeting: Greeting, document: dialects.Document | None) -> tuple[Request, Wants]:
        """The request as admission knows it, and what each upstream would charge. `document` None: unread endpoint."""
        call = document.call if document else Call(Endpoint.OTHER, "*")
        route = self._route(call, greeting.caller)
        tenant, capped = greeting.caller.tenant, call.output_cap is not None
        usual = self._outputs.usual(tenant.name, call.model, capped=capped) * call.choices
        counted = await self._count(call, route, usual, tenant.tpm)
        return self.offer(greeting, call, route, counted, usual, document.body if document else b"")

    def offer(
        self, greeting: Greeting, call: Call, route: Route, counted: Counted, usual: int, body: bytes = b""
    ) -> tuple[Request, Wants]:
        """The same once its prompt is counted. usual: tokens of output that such an answer probably has."""
        policy, tenant = self._policy, greeting.caller.tenant
        pin = self._pin(call.state, route)
        able = routing.able(policy, route, greeting.endpoint.dialect, pin, call.needs)
        inputs = self._sizes.inputs(call, able, counted)
        size = Size(inputs[able[0]], self._output(call, inputs, tenant, usual))
        others = {name: Size(prompt, size.output) for name, prompt in inputs.items() if prompt != size.input}
        request = self._request(greeting, call, route, size, others, counted.tokens, body)
        names, too_large = self._eligible(request, able)
        prices = {
            name: routing.claims(policy.upstreams[name], call.model, request.size_at(name), greeting.endpoint, usual)
            for name in names
        }
        costless = self._bill(request, names, prices) if self._purses else None
        unable: tuple[PassedOver, ...] = ()
        if len(names) < len(route.chain):
            about = request.dialect, call.model, size, pin, call.needs, others
            unable = routing.unable(policy, route, *about)
        return request, Wants(names, prices, too_large=too_large, prompt=size.input, costless=costless, unable=unable)

    def _bill(
        self, request: Request, names: tuple[str, ...], prices: dict[str, tuple[Claim, ...]]
    ) -> frozenset[str] | None:
        """Add to `prices` what it takes of upstreams' own dollars, and tell which of them cost nothing at all.

        None where it takes none of any.
        """
        upstreams, rates, limited = self._policy.upstreams, self._rates(names, request.model), False
        for name in names:
            if claims := spend.bill(upstreams[name], rates, request.size_at(name), request.endpoint):
                prices[name] += claims
                limited = True
        return frozenset(n for n in names if spend.is_costless(upstreams[n], rates)) if limited else None

    def _eligible(self, request: Request, able: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
        """The upstreams that could serve it, and whether it is too large for them: then it goes if it is observed."""
        try:
            return routing.eligible(self._policy, able, request.model, request.size, request.sizes), False
        except Rejected:
            if not request.observed:
                raise
            return routing.eligible(self._policy, able, request.model, Size(0, 0)), True

    def _pin(self, state: str | None, route: Route) -> str | None:
        """The only upstream that knows the state this request builds on; None when it builds on none."""
        if state is None:
            return None
        known = self._affinity.upstream_of(state)
        return known if known in route.chain else route.chain[0]

    def _route(self, call: Call, caller: Caller) -> Route:
        if call.endpoint is Endpoint.OTHER:
            if self._policy.other is None:
                raise Rejected(Reason.NOT_FOUND, "this gateway serves no endpoint of this kind")
            return self._policy.other
        models = caller.tenant.models
        if models and not routing.matches(call.model, models):
            raise Rejected(Reason.FORBIDDEN, f"this tenant may not use model {call.model[:100]!r}")
        return routing.route_of(self._policy, call.model)

    async def _count(self, call: Call, route: Route, usual: int, tpm: int | None) -> Counted:
        return await self._sizes.count(call, route.chain, usual, tpm)

    def _output(self, call: Call, inputs: Mapping[str, int], tenant: Tenant, usual: int) -> int:
        """What to reserve. An output that the client did not limit never makes a request too large that could fit.

        inputs: prompt tokens at the upstreams that could serve it if it is small enough.
        """
        if not call.endpoint.generates:
            return 0
        if call.output_cap is not None:
            return call.output_cap
        if tenant.tpm is not None:
            usual = min(usual, max(1, tenant.tpm - next(iter(inputs.values()))))
        return routing.fitting(self._policy, inputs, usual, call.model)

    def _request(
        self,
        greeting: Greeting,
        call: Call,
        route: Route,
        size: Size,
        others: Mapping[str, Size],
        counted: int,
        body: bytes,
    ) -> Request:
        headers, tenant = greeting.head.headers, greeting.caller.tenant
        session = self._session(greeting, call)
        return Request(
            id=headers.get("x-request-id", ""),
            ticket=f"{self._process}-{next(self._numbers)}",
            tenant=tenant.name,
            lane=greeting.lane,
            route=route.name,
            model=call.model,
            endpoint=greeting.endpoint,
            stream=call.stream,
            size=size,
            sizes=others,
            session=session,
            arrived=greeting.arrived,
            deadline=greeting.deadline,
            wait_until=self._wait_until(greeting, call, size),
            counted=counted,
            bytes=len(body),
            weight=tenant.weight,
            vip=tenant.vip,
            fingerprint=_fingerprint(greeting, body),
            retries=dialects.retry_count(headers),
            fresh=self._is_fresh(tenant, session),
            observed=self._lenient() or (route.observe > 0.0 and self._draw(body) < route.observe),
            choices=call.choices,
            capped=call.output_cap is not None,
            stops=call.stops,
            results=call.results,
            trace=trace_of(headers),
        )

    def _session(self, greeting: Greeting, call: Call) -> Session:
        headers = greeting.head.headers
        named = [headers.get(name, "") for name in self._sessions.headers]
        named += [*dialects.header_sessions(headers), *call.sessions]
        return session_of(named, greeting.caller, time.time(), self._sessions.window_s)

    def _is_fresh(self, tenant: Tenant, session: Session) -> bool:
        """Whether its session was never served. One that nobody named and nobody counts is none, so it is not new."""
        if session.derived and not (tenant.sessions or self._policy.sessions).derived:
            return False
        return self._fresh(tenant.name, session.id)

    def _wait_until(self, greeting: Greeting, call: Call, size: Size) -> float:
        until = greeting.arrived + self._policy.lanes[greeting.lane].max_wait_s
        if greeting.deadline is None:
            return until
        generating = 0.0 if call.stream else self._pace.output_s(call.model, size.output)
        return min(until, greeting.deadline - generating)

    def _draw(self, body: bytes) -> float:
        """A number in [0, 1), the same for all copies of a body."""
        return crc32(body) / CRC_VALUES if body else self._chance()


def trace_of(headers: Mapping[str, str]) -> str:
    """The `traceparent` header, where there is one that may be one; whether it is, is for those who use it."""
    trace = headers.get("traceparent", "")
    return trace if len(trace) <= LONGEST_TRACE else ""


def _fingerprint(greeting: Greeting, body: bytes) -> str:
    """See the head of this file. Empty for a request without a body that nobody named."""
    caller = greeting.caller
    key = dialects.idempotency_key(greeting.head.headers)
    if key:
        return f"{KEYED}{hash((caller.tenant.name, caller.fingerprint, key)) & HASH_BITS:016x}"
    if not body:
        return ""
    return f"body/{hash((caller.tenant.name, caller.fingerprint, greeting.path, body)) & HASH_BITS:016x}"
