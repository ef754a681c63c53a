"""How an admitted request leaves: the order of upstreams, its rewritten body, its time limits, its last words.

Called right after the limiter granted the first upstream, and synchronous, so that between a grant and its flight there
is no point at which anything could be cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, inf

from extproc import dialects
from extproc.core import routing
from extproc.core.events import PassedOver, Why
from extproc.core.flight import Flight
from extproc.core.policy import Policy, WhenBusy
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Endpoint, Request
from extproc.core.retries import RetryBudget
from extproc.core.shares import Terms
from extproc.ports import Capacity, Clock, Departure
from extproc.reception import Greeting
from extproc.turn import Wants
from extproc.wording import Wording

__all__ = ["Dispatch", "Outlook", "Timing"]

LAST_RESORT = "x-tidegate-last-resort"
"""Header of an answer that stands in where no upstream answered."""
CONTENT_TYPES = {"json": "application/json", "events": "text/event-stream"}
LEAST_RETRY_S = 1
"""Nobody is told to come back sooner."""
FORECAST_S = 1.0
"""For so long a forecast of waits counts."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Limits on an upstream's answer, in seconds; see settings.TimeoutSettings. A route's first_token_s comes first."""

    first_token_s: float
    prompt_tokens_per_s: float
    stall_s: float
    answer_s: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """When an upstream may be asked, for those who will have been told that nobody answered.

    rest_s: seconds until the first of some may be tried, if their breakers opened now. earliest_probe: when the first
    of some may be tried whose breakers let nobody through, on the clock. wait_s: forecast of a request's wait, in
    seconds. standing: in which state a breaker is.
    """

    rest_s: Callable[[tuple[str, ...]], float]
    earliest_probe: Callable[[tuple[str, ...]], float]
    wait_s: Callable[[Request, Wants], float]
    standing: Callable[[str], str] = lambda _: ""


class Dispatch:
    """See the head of this file. `allows` says whether an upstream's breaker lets users' requests through."""

    def __init__(
        self,
        policy: Policy,
        capacity: Capacity,
        clock: Clock,
        timing: Timing,
        wording: Wording,
        allows: Callable[[str], bool],
        fits: Callable[[str, int], bool] = lambda _name, _prompt: True,
        retries: RetryBudget | None = None,
        *,
        outlook: Outlook,
        slow: Callable[[str], bool] = lambda _: False,
        cut: Callable[[tuple[str, ...]], tuple[str, ...]] | None = None,
        lenient: Callable[[], bool] = lambda: False,
    ) -> None:
        """Keep them. `fits`: whether an upstream answers prompts of so many tokens well. `retries` lends second
        attempts at an only upstream; None for never. slow: whether a breaker keeps users away merely because first
        tokens are late. cut: the beginning of an order that Envoy can be told (see core.orders); None where any can.
        lenient: whether at the moment nobody is too full to stand behind another.
        """
        self._retries = retries
        self._policy = policy
        self._capacity = capacity
        self._clock = clock
        self._timing = timing
        self._wording = wording
        self._allows = allows
        self._fits = fits
        self._slow = slow
        self._cut = cut
        self._lenient = lenient
        self._outlook = outlook
        self._waits: dict[tuple[str, str, str], tuple[float, float]] = {}
        """By lane, route and upstream: when a wait was forecast, and for when."""
        self._texts = {route.name: route.last_resort for route in policy.routes if route.last_resort}
        self._chains = {route.name: route.chain for route in policy.routes}
        self._first_token_s = {r.name: r.first_token_s for r in policy.routes if r.first_token_s is not None}
        self._below = {lane.name: len(policy.lanes) - 1 - lane.rank for lane in policy.lanes.values()}
        """How many lanes rank below each."""
        self._holding = {lane.name for lane in policy.lanes.values() if lane.when_busy is WhenBusy.HOLD}
        """Lanes whose requests wait for their first choice alone."""
        self._terms = {lane.name: Terms(lane.name, lane.rank, lane.min_share) for lane in policy.lanes.values()}
        """On what terms a failover takes: as any request of its lane, but for a pace that it could not keep, and for
        what its lane keeps free: that spares better lanes a wait, and is no reason to fail somebody who was let go."""

    def depart(
        self, flight: Flight, wants: Wants, first: str, greeting: Greeting, document: dialects.Document | None
    ) -> Departure:
        """Let `flight` go to `first`, whose claims are taken and belong to it from here on."""
        request, now = flight.request, self._clock.time()
        flight.depart((first,), wants.prices, now)
        terms = self._terms[request.lane]
        names = self._affordable(wants, first)
        order = routing.order(
            first,
            names,
            self._allows,
            lambda name: self._has_room(wants, name, terms),
            self._slow,
            lambda name: self._fits(name, wants.prompt),
        )
        flight.order = order = order if self._cut is None else self._cut(order)
        flight.accounting = {name: self._policy.upstreams[name].accounting for name in order}
        rewrite = self._rewrite(request, order, document)
        last_resort = self._last_resort(request.route, greeting, document)
        flight.again = len(order) == 1 and self._may_try_again(request, now)
        flight.lent = now if flight.again else None
        attempts = len(order) + flight.again
        per_try_s, total_s = self._limits(request, attempts, now)
        flight.given_s = min(per_try_s, total_s or per_try_s)
        flight.limit_s, flight.first_token_s = self._usual_s(request), self._first_s(request)
        retry_s = self._comeback_s(request, wants, names, order)
        return Departure(
            ticket=request.ticket,
            order=order,
            path=dialects.without_keys(greeting.path),
            dialect=request.dialect,
            # First tokens that may all together take longer than a stall must not be ended as one.
            stream=request.stream and per_try_s * attempts <= self._timing.stall_s,
            queue_ms=round(flight.waited_s * 1000),
            fail_body=last_resort[0] if last_resort else self._exhausted(greeting, request, retry_s),
            fail_retry_s=retry_s,
            last_resort=last_resort[1] if last_resort else "",
            again=flight.again,
            body=rewrite.body if rewrite else None,
            heads=rewrite.heads if rewrite else None,
            width=rewrite.width if rewrite else 0,
            hide_usage=document is not None and dialects.hides_usage(document.call),
            per_try_s=per_try_s,
            total_s=total_s,
            deadline_ms=None if request.deadline is None else max(1, int((request.deadline - now) * 1000)),
            removed=tuple([name for name in greeting.head.headers if name.startswith("x-tidegate-")]),
            facts=_facts(request),
        )

    def passed_over(self, request: Request, wants: Wants, order: tuple[str, ...]) -> tuple[PassedOver, ...]:
        """Why it does not go to the upstreams of its chain that `order` begins without. order: empty for nowhere.

        To be asked when it was let go or refused, in the same step: nobody can tell later.
        """
        chain = self._chains.get(request.route, order)
        if chain == order:
            return ()
        unable = {one.upstream: one for one in wants.unable}
        ahead = chain[: chain.index(order[0])] if order and order[0] in chain else chain
        found = [
            unable.get(name) or self._why_not(request, wants, name, order, ahead)
            for name in chain
            if name in ahead or name not in order
        ]
        if self._cut is not None and not any(one.why is Why.NO_ROOM for one in found):
            found = [replace(one, why=Why.ORDER) if one.why is Why.BEHIND else one for one in found]
        return tuple(found)

    def _why_not(
        self, request: Request, wants: Wants, name: str, order: tuple[str, ...], ahead: tuple[str, ...]
    ) -> PassedOver:
        now, levels, terms = self._clock.time(), self._capacity.levels(), self._terms[request.lane]
        behind, lacking = name in order, []
        if not self._allows(name):
            due_s = max(0.0, self._outlook.earliest_probe((name,)) - now)
            why = Why.SLOW if self._slow(name) else Why.BREAKER
            return PassedOver(name, why, (), due_s, self._outlook.standing(name), behind)
        for claim in wants.prices.get(name, ()):
            counter = levels.get(claim.key)
            if counter is not None and not counter.shadow and (wait := counter.wait_for(claim.amount, now, terms)) > 0:
                lacking.append((wait, claim.key))
        if not self._fits(name, wants.prompt):
            return PassedOver(name, Why.SIZES, behind=behind)
        if name not in wants.names:
            return PassedOver(name, Why.TOO_LARGE, behind=behind)
        keys = tuple(key for _, key in lacking)
        wait_s = max(lacking)[0] if lacking else None
        if name not in self._affordable(wants, order[0] if order else ""):
            return PassedOver(name, Why.DOLLARS, keys, wait_s, behind=behind)
        if lacking:
            return PassedOver(name, Why.NO_ROOM, keys, wait_s, behind=behind)
        if order:
            why = Why.BUSY if name in ahead else Why.BEHIND
        else:
            first = next(filter(self._allows, wants.names), name)
            why = Why.HOLD if request.lane in self._holding and name != first else Why.TURN
        return PassedOver(name, why, behind=behind)

    def instead(
        self, rejected: Rejected, greeting: Greeting | None, document: dialects.Document | None
    ) -> tuple[list[tuple[str, str]], bytes] | None:
        """Headers and body of the answer that stands in for a refusal; None where the refusal stands."""
        if rejected.reason is not Reason.NO_UPSTREAM or greeting is None or document is None:
            return None
        route = routing.route_of(self._policy, document.call.model)
        found = self._last_resort(route.name, greeting, document) if route.unasked else None
        if found is None:
            return None
        body, kind = found
        return [("content-type", CONTENT_TYPES[kind]), (LAST_RESORT, "true")], body.encode()

    def _may_try_again(self, request: Request, now: float) -> bool:
        """Whether an only upstream may have a second go. What it is asked for must be kept by the router."""
        if self._retries is None or request.endpoint is Endpoint.OTHER:
            return False
        return self._retries.lend(request.tenant, now)

    def _comeback_s(self, request: Request, wants: Wants, names: tuple[str, ...], order: tuple[str, ...]) -> int:
        """Seconds until the first of `names` may be asked, should all of `order` fail and rest for that."""
        soonest = self._outlook.rest_s(order)
        if len(order) < len(names):
            now = self._clock.time()
            unasked = (name for name in names if name not in order)
            soonest = min(soonest, *(self._due(request, wants, name, now) - now for name in unasked))
        return max(LEAST_RETRY_S, ceil(soonest))

    def _due(self, request: Request, wants: Wants, name: str, now: float) -> float:
        """When, on the clock, one that nobody asks now may be asked: it rests, is full, or stands behind a full one.

        A forecast takes as long as all the rest, so it is made anew once a second, and for all of a lane.
        """
        if not self._allows(name):
            return self._outlook.earliest_probe((name,))
        made, due = self._waits.get(key := (request.lane, request.route, name), (-inf, 0.0))
        if now - made >= FORECAST_S:
            due = now + self._outlook.wait_s(request, Wants((name,), wants.prices))
            self._waits[key] = now, due
        return due

    def _exhausted(self, greeting: Greeting, request: Request, retry_s: int) -> str:
        return self._wording.exhausted(greeting.head, request.dialect, retry_s)

    def _last_resort(
        self, route: str, greeting: Greeting, document: dialects.Document | None
    ) -> tuple[str, str] | None:
        """Text and kind of the answer that the operator wrote for this route; None where an error is told."""
        text = self._texts.get(route)
        if text is None or document is None:
            return None
        return self._wording.last_resort(greeting.head, document.call, text)

    def _rewrite(
        self, request: Request, order: tuple[str, ...], document: dialects.Document | None
    ) -> dialects.Rewrite | None:
        if document is None:
            return None
        upstreams = self._policy.upstreams
        names = {name: upstreams[name].own_name(request.model) for name in order}
        priorities = routing.priorities(upstreams, order, request.endpoint, self._below[request.lane])
        return dialects.rewrite(document, names, order, priorities=priorities)

    def _limits(self, request: Request, attempts: int, now: float) -> tuple[float, float | None]:
        """Seconds for each attempt's first byte, and for the whole answer."""
        usual, left = self._usual_s(request), None
        if request.deadline is not None:
            left = max(0.001, request.deadline - now)
        if request.stream:
            return (usual if left is None else min(usual, left / attempts)), None
        return usual, left or usual

    def _usual_s(self, request: Request) -> float:
        """Seconds that an attempt's first byte may take where the caller sets no limit."""
        return self._first_s(request) if request.stream else self._timing.answer_s

    def _first_s(self, request: Request) -> float:
        """Seconds that the settings give a first token. What is not generated by tokens may take all of an answer's."""
        if request.endpoint is Endpoint.OTHER and not request.stream:
            return self._timing.answer_s
        first_token_s = self._first_token_s.get(request.route, self._timing.first_token_s)
        return first_token_s + request.size.input / self._timing.prompt_tokens_per_s

    def _affordable(self, wants: Wants, first: str) -> tuple[str, ...]:
        """Where it may go for money's sake, `first` included: what that costs it has been paid for."""
        if wants.costless is None:
            return wants.names
        store, now = self._capacity.levels(), self._clock.time()
        return routing.affordable(
            wants.names,
            wants.costless | {first},
            lambda name: name != first and routing.dollars_lack(wants.prices[name], store, now),
        )

    def _has_room(self, wants: Wants, name: str, terms: Terms) -> bool:
        if self._lenient():
            return True
        levels, now = self._capacity.levels(), self._clock.time()
        for claim in wants.prices[name]:
            counter = levels.get(claim.key)
            if counter is not None and not counter.shadow and counter.wait_for(claim.amount, now, terms) > 0:
                return False
        return True


def _facts(request: Request) -> Mapping[str, str | float]:
    """What a departure says of itself for later records."""
    facts: dict[str, str | float] = {
        "tenant": request.tenant,
        "lane": request.lane,
        "model": request.model,
        "session": request.session.id,
        "reserved": float(request.size.total),
    }
    if request.capped:
        facts["cap"] = float(request.size.output // request.choices)  # of one choice: each may end at its own
    if request.stops:
        facts["stops"] = 1.0
    if request.results:
        facts["results"] = 1.0
    return facts
