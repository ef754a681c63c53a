"""From headers and body to a priced request: who calls, for what, until when, what it costs, who could serve it.

Everything here is cheap and decides nothing about capacity. Only counting a long prompt leaves the event loop, for a
worker thread.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import count

from extproc import dialects, tokens
from extproc.core import routing
from extproc.core.affinity import Affinity
from extproc.core.forecast import Pace
from extproc.core.identity import Caller, Directory, lane_of, session_of
from extproc.core.policy import Policy, Route
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Call, Endpoint, Request, Size
from extproc.core.value import value
from extproc.limiter import Wants
from extproc.ports import Clock, Head

__all__ = ["Greeting", "Reception", "SessionRules"]


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
        clock: Clock,
        *,
        process: str,
        sessions: SessionRules,
        executor: Executor,
    ) -> None:
        """`executor` counts long prompts."""
        self._policy = policy
        self._directory = directory
        self._calibration = calibration
        self._affinity = affinity
        self._pace = pace
        self._clock = clock
        self._process = process
        self._sessions = sessions
        self._executor = executor
        self._numbers = count(1)

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
        counted = await self._count(call)
        return self.offer(greeting, call, route, counted, document.body if document else b"")

    def offer(
        self, greeting: Greeting, call: Call, route: Route, counted: int, body: bytes = b""
    ) -> tuple[Request, Wants]:
        """The same once its prompt is counted: `counted` tokens, before the learned correction."""
        size = self._size(call, counted, self._policy.upstreams[route.chain[0]].own_name(call.model))
        size = routing.fitting(self._policy, route, size, capped=call.output_cap is not None, model=call.model)
        pin = self._pin(call.state, route)
        names = routing.eligible(self._policy, route, greeting.endpoint.dialect, call.model, size, pin)
        prices = {
            name: routing.claims(self._policy.upstreams[name], call.model, size, greeting.endpoint) for name in names
        }
        return self._request(greeting, call, route.name, size, counted, len(body)), Wants(names, prices)

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

    async def _count(self, call: Call) -> int:
        if call.endpoint in (Endpoint.OTHER, Endpoint.COUNT_TOKENS):
            return 0
        if tokens.is_long(call.prompt):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, tokens.estimate, call.prompt, call.model)
        return tokens.estimate(call.prompt, call.model)

    def _size(self, call: Call, counted: int, own_name: str) -> Size:
        cap = self._policy.default_output_tokens * call.choices if call.output_cap is None else call.output_cap
        return Size(self._calibration.correct(own_name, counted), cap if call.endpoint.generates else 0)

    def _request(
        self, greeting: Greeting, call: Call, route: str, size: Size, counted: int, held_bytes: int
    ) -> Request:
        headers = greeting.head.headers
        named = [headers.get(name, "") for name in self._sessions.headers]
        named += [*dialects.header_sessions(headers), *call.sessions]
        wait_until = greeting.arrived + self._policy.lanes[greeting.lane].max_wait_s
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
            session=session_of(named, greeting.caller, time.time(), self._sessions.window_s),
            arrived=greeting.arrived,
            deadline=greeting.deadline,
            wait_until=wait_until,
            counted=counted,
            bytes=held_bytes,
        )
