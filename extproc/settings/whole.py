"""The whole configuration: all sections together, what only shows when they are read together, and the core's rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from extproc.core import policy as core
from extproc.core.refusal import RULES, Reason
from extproc.settings.replicas import Division, divided
from extproc.settings.sections import (
    AdminSettings,
    FloodSettings,
    GatewaySettings,
    IdentitySettings,
    LaneSettings,
    Name,
    QueueSettings,
    RetrySettings,
    RouteSettings,
    Section,
    ServiceSettings,
    SessionSettings,
    Share,
    TelemetrySettings,
    TenantSettings,
    TimeoutSettings,
    TokenSettings,
    UpstreamSettings,
)

__all__ = ["Settings"]

MAX_SYNCHRONOUS_WAIT_S = 900.0
MARGIN_S = 5.0
"""A held request must be answered this much before Envoy gives up on it."""


def _lanes() -> dict[str, LaneSettings]:
    return {
        "P0": LaneSettings(max_wait_s=4.0),
        "P1": LaneSettings(max_wait_s=30.0, min_share=0.1, keep_free=0.2),
        "P2": LaneSettings(
            max_wait_s=110.0,
            when_busy=core.WhenBusy.HOLD,
            min_share=0.05,
            keep_free=0.4,
            pacing=core.Pacing.SMOOTH,
        ),
    }


class Settings(Section):
    """The whole configuration."""

    gateway: GatewaySettings = GatewaySettings()
    service: ServiceSettings = ServiceSettings()
    identity: IdentitySettings = IdentitySettings()
    upstreams: Annotated[dict[Name, UpstreamSettings], Field(min_length=1)]
    routes: Annotated[tuple[RouteSettings, ...], Field(min_length=1)]
    other_endpoints: str | None = None
    """Upstream of LLM endpoints that are not priced in tokens (images, audio, files, batches); refused when absent."""
    lanes: Annotated[dict[Name, LaneSettings], Field(min_length=1)] = Field(default_factory=_lanes)
    queue: QueueSettings = QueueSettings()
    tenants: dict[Name | Literal["*"], TenantSettings] = Field(default_factory=dict)
    """By name; "*" is every other tenant that identity names, each with allowances of its own."""
    sessions: SessionSettings = SessionSettings()
    retries: RetrySettings = RetrySettings()
    observe: Share = 0.0
    """Share of all requests that are decided upon, counted and reported, but neither held nor refused; 1 is all."""
    flood: FloodSettings = FloodSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    tokens: TokenSettings = TokenSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    admin: AdminSettings = AdminSettings()
    internal_headers: bool = True
    """Whether answers tell `x-tidegate-upstream` and `x-tidegate-attempts`."""
    statuses: dict[Reason, Annotated[int, Field(ge=400, le=599)]] = Field(default_factory=dict)
    """HTTP status per refusal reason, where the default does not suit."""

    @property
    def longest_wait_s(self) -> float:
        """The longest that any lane lets a request wait."""
        return max(lane.max_wait_s for lane in self.lanes.values())

    @property
    def max_message_timeout_s(self) -> float:
        """How long Envoy is told to let a held request be."""
        return self.gateway.max_message_timeout_s or self.longest_wait_s + MARGIN_S

    def status_of(self, reason: Reason) -> int:
        """The HTTP status that `reason` has here."""
        return self.statuses.get(reason, RULES[reason].status)

    def model_of(self, upstream: str) -> str:
        """The upstream's own name of a model that it serves, the cheapest one where that is told; empty: none is."""
        rules = self.upstreams[upstream]
        named = rules.canary_model or next(iter(rules.models.values()), None)
        served = (m for route in self.routes if upstream in route.chain for m in route.models if "*" not in m)
        return named or next(served, "")

    def first_token_s_of(self, route: RouteSettings) -> float:
        """How long a stream of `route` may take to begin at one upstream, its prompt's reading not counted."""
        return self.timeouts.first_token_s if route.first_token_s is None else route.first_token_s

    def policy(self) -> core.Policy:
        """The rules as the core reads them, of one replica."""
        return divided(self._policy(), self.service.replicas)

    @property
    def division(self) -> Division:
        """What replicas divide."""
        return Division(self.service.replicas, self.upstreams, self.tenants, self.sessions)

    def alone(self) -> Settings:
        """The same with one replica, which has the whole of every limit."""
        return self.model_copy(update={"service": self.service.model_copy(update={"replicas": 1})})

    def _policy(self) -> core.Policy:
        names = tuple(self.lanes)
        return core.Policy(
            upstreams={name: upstream.rules(name) for name, upstream in self.upstreams.items()},
            routes=tuple(r.rules(_route_name(i, r), self.observe) for i, r in enumerate(self.routes)),
            lanes={name: _lane(name, rank, lane) for rank, (name, lane) in enumerate(self.lanes.items())},
            tenants={
                name: _tenant(name, t, names)
                for name, t in {"default": TenantSettings(), **self.tenants}.items()
                if name != "*"
            },
            any_tenant=_tenant("*", self.tenants["*"], names) if "*" in self.tenants else None,
            other=(
                core.Route("other", ("*",), (self.other_endpoints,), self.observe) if self.other_endpoints else None
            ),
            default_output_tokens=self.tokens.default_output,
            output_percentile=self.tokens.output_percentile,
            bounds=core.Bounds(**self.queue.model_dump()),
            sessions=self.sessions.rules(),
            retries=core.RetryRules(**self.retries.model_dump()),
        )

    def problems(self) -> Iterator[str]:
        """What only shows when sections are read together; a line each, path first."""
        yield from self._route_problems()
        yield from self._tenant_problems()
        yield from self._anybody_problems()
        yield from self._lane_problems()
        yield from self._turn_problems()
        yield from self._wait_problems()
        yield from self._first_token_problems()
        yield from self.division.problems()
        if self.other_endpoints and self.other_endpoints not in self.upstreams:
            yield f"other_endpoints: unknown upstream {self.other_endpoints!r}"
        elif self.other_endpoints and not _limits_requests(self.upstreams[self.other_endpoints]):
            yield (
                f"other_endpoints: nothing limits them at {self.other_endpoints!r}; give it concurrency, or a limit "
                'with rpm for model "*"'
            )
        ports = [self.gateway.port, self.gateway.admin_port, self.gateway.probe_port]
        ports += [self.gateway.metrics_port] if self.gateway.metrics_port else []
        if len(set(ports)) < len(ports):
            yield "gateway: port, admin_port, probe_port and metrics_port must differ"

    def _route_problems(self) -> Iterator[str]:
        claimed: dict[str, int] = {}
        for i, route in enumerate(self.routes):
            for name in route.chain:
                if name not in self.upstreams:
                    yield f"routes[{i}].chain: unknown upstream {name!r}; known: {', '.join(self.upstreams)}"
            if len(set(route.chain)) < len(route.chain):
                yield f"routes[{i}].chain: names an upstream twice"
            last = self.upstreams.get(route.chain[-1])
            if last is not None and not (last.owned or route.last_resort or route.acknowledge_unowned):
                yield (
                    f"routes[{i}].chain: ends on {route.chain[-1]!r}, which is not owned; end on an upstream with "
                    "owned: true, or set last_resort or acknowledge_unowned: true on this route"
                )
            yield from self._unlimited(i, route)
            for limit in route.shadow:
                if not getattr(route, limit):
                    yield f"routes[{i}].shadow: {limit} is not set, so there is nothing to watch"
            for model in route.models:
                if model in claimed:
                    yield f"routes[{i}].models: {model!r} is already served by routes[{claimed[model]}]"
                claimed.setdefault(model, i)

    def _unlimited(self, i: int, route: RouteSettings) -> Iterator[str]:
        for name in route.chain:
            upstream = self.upstreams.get(name)
            if upstream is None or upstream.learn or upstream.concurrency or upstream.kv:
                continue
            for model in route.models:
                named = {"*", model, upstream.models.get(model, model)}
                if not any(limit.model in named for limit in upstream.limits):
                    yield f"upstreams.{name}.limits: nothing limits {model!r}, which routes[{i}] sends there"

    def _tenant_problems(self) -> Iterator[str]:
        if self.identity.unknown == "reject" and not self.tenants:
            yield "identity.unknown: reject refuses everybody, because there are no tenants"
        owner: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            for lane in (*tenant.lanes, *((tenant.default_lane,) if tenant.default_lane else ())):
                if lane not in self.lanes:
                    yield f"tenants.{name}.lanes: unknown lane {lane!r}; known: {', '.join(self.lanes)}"
            for limit in tenant.shadow:
                if not getattr(tenant, limit):
                    yield f"tenants.{name}.shadow: {limit} is not set, so there is nothing to watch"
            if tenant.default_lane and tenant.lanes and tenant.default_lane not in tenant.lanes:
                yield f"tenants.{name}.default_lane: {tenant.default_lane!r} is not among its lanes"
            for digest in tenant.key_sha256:
                if digest in owner:
                    yield f"tenants.{name}.key_sha256: a key is already owned by tenant {owner[digest]!r}"
                owner.setdefault(digest, name)

    def _anybody_problems(self) -> Iterator[str]:
        anybody = self.tenants.get("*")
        if anybody is not None and anybody.key_sha256:
            yield "tenants.*.key_sha256: a key belongs to one tenant; list that by its name"
        if anybody is not None and set(self.identity.tenant) <= {"api_key"}:
            yield "tenants.*: identity.tenant names no header and no claim, so nobody is named who is not listed"

    def _lane_problems(self) -> Iterator[str]:
        promised = sum(lane.min_share for lane in self.lanes.values())
        if promised > 1:
            yield f"lanes: the min_shares add up to {promised:g}, which is more than there is"
        for name, upstream in self.upstreams.items():
            for lane in upstream.kv.lanes if upstream.kv else ():
                if lane not in self.lanes:
                    yield f"upstreams.{name}.kv.lanes: unknown lane {lane!r}; known: {', '.join(self.lanes)}"

    def _turn_problems(self) -> Iterator[str]:
        for name, lane in self.lanes.items():
            if lane.order is core.Order.EDF and lane.lifo_above is not None:
                yield f"lanes.{name}: order edf and lifo_above say two things of whose turn it is"
            if lane.keep_free + lane.min_share > 1:
                yield f"lanes.{name}: min_share {lane.min_share:g} cannot be had while keep_free is {lane.keep_free:g}"

    def _wait_problems(self) -> Iterator[str]:
        for name, lane in self.lanes.items():
            where = f"lanes.{name}.max_wait_s: {lane.max_wait_s:g} s"
            if lane.max_wait_s > MAX_SYNCHRONOUS_WAIT_S:
                yield f"{where} is longer than a synchronous wait may be (900 s); longer work belongs in a batch queue"
            elif lane.max_wait_s + MARGIN_S > self.max_message_timeout_s:
                yield (
                    f"{where} + {MARGIN_S:g} s exceeds gateway.max_message_timeout_s "
                    f"({self.max_message_timeout_s:g}): Envoy would cut the wait"
                )
            elif lane.max_wait_s + MARGIN_S >= self.gateway.idle_timeout_s:
                yield f"{where} + {MARGIN_S:g} s reaches gateway.idle_timeout_s ({self.gateway.idle_timeout_s:g})"

    def _first_token_problems(self) -> Iterator[str]:
        limits = {f"routes[{i}].first_token_s": route.first_token_s for i, route in enumerate(self.routes)}
        idle_s = self.gateway.idle_timeout_s
        for where, limit in {"timeouts.first_token_s": self.timeouts.first_token_s, **limits}.items():
            if limit is not None and limit >= idle_s:
                yield f"{where}: {limit:g} s reaches gateway.idle_timeout_s ({idle_s:g}), where Envoy ends it for good"


def _route_name(index: int, route: RouteSettings) -> str:
    return f"{index}:{route.models[0]}"


def _limits_requests(upstream: UpstreamSettings) -> bool:
    return bool(
        upstream.concurrency or upstream.learn or any(limit.model == "*" and limit.rpm for limit in upstream.limits)
    )


def _lane(name: str, rank: int, lane: LaneSettings) -> core.Lane:
    return core.Lane(name=name, rank=rank, **lane.model_dump(exclude={"shadow"}), shadow=frozenset(lane.shadow))


def _tenant(name: str, tenant: TenantSettings, lanes: tuple[str, ...]) -> core.Tenant:
    allowed = tuple(lane for lane in lanes if lane in tenant.lanes) if tenant.lanes else lanes
    default = tenant.default_lane or ("P1" if "P1" in allowed else (tenant.lanes or allowed[-1:])[0])
    return core.Tenant(
        name,
        allowed,
        default,
        tenant.models,
        dollars=tenant.dollars,
        sessions=tenant.sessions.rules() if tenant.sessions else None,
        shadow=frozenset(tenant.shadow),
        **tenant.model_dump(include={"tpm", "rpm", "concurrency", "weight", "vip"}),
    )
