"""What one of several replicas may use, as long as they do not know of each other: its part of every limit.

Replicas that each held the whole limits would together pass them. Divided, they never do; the price is that what one of
them does not use is nobody's, so uneven load wastes some. Divided is what a provider, a tenant, a session or a purse
has in all. Not divided: shares and times, which are the same for each; bounds of lanes and of the queue, which are the
memory of one process; and Envoy's flood guard, which is each Envoy's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from extproc.core.policy import Dollars, Limit, Policy, Route, SessionLimits, Tenant, Upstream
from extproc.settings.sections import SessionSettings, TenantSettings, UpstreamSettings

__all__ = ["Division", "divided"]


def divided(policy: Policy, replicas: int) -> Policy:
    """The rules of one of so many replicas. Whole numbers are rounded down (see `Division.problems`)."""
    if replicas == 1:
        return policy
    return replace(
        policy,
        upstreams={name: _upstream(upstream, replicas) for name, upstream in policy.upstreams.items()},
        routes=tuple(_route(route, replicas) for route in policy.routes),
        tenants={name: _tenant(tenant, replicas) for name, tenant in policy.tenants.items()},
        any_tenant=_tenant(policy.any_tenant, replicas) if policy.any_tenant else None,
        other=_route(policy.other, replicas) if policy.other else None,
        sessions=_sessions(policy.sessions, replicas),
        retries=replace(policy.retries, least_per_s=policy.retries.least_per_s / replicas),
    )


@dataclass(frozen=True)
class Division:
    """What the settings say that is divided, among how many."""

    replicas: int
    upstreams: Mapping[str, UpstreamSettings]
    tenants: Mapping[str, TenantSettings]
    sessions: SessionSettings

    def problems(self) -> Iterator[str]:
        """What cannot be divided; a line each, path first."""
        if self.replicas == 1:
            return
        for name, upstream in self.upstreams.items():
            if upstream.learn:
                yield f"upstreams.{name}.learn: each of {self.replicas} replicas would learn the whole; give limits"
        for place, number in self._whole_numbers():
            if number is not None and number < self.replicas:
                yield f"{place}: {number} cannot be divided among service.replicas ({self.replicas})"

    def notes(self) -> Iterator[str]:
        """What it means to have replicas; a line each."""
        if self.replicas == 1:
            return
        here = "note: service.replicas"
        yield f"{here}: each of {self.replicas} has its part of every limit; what one does not use is nobody's"
        largest = [limit.tpm for upstream in self.upstreams.values() for limit in upstream.limits if limit.tpm]
        if largest:
            most = max(largest) // self.replicas
            yield f"{here}: a request above {most:,} tokens, the largest tpm divided, fits no upstream that has one"
        for name, upstream in self.upstreams.items():
            if upstream.kv:
                yield f"note: upstreams.{name}.kv: a replica does not see what others let go between two looks"
        each = [self.sessions, *(tenant.sessions for tenant in self.tenants.values())]
        if any(one is not None and (one.max_tokens or one.max_usd) for one in each):
            yield "note: sessions: one that meets the same replica every time has only that replica's part"

    def _whole_numbers(self) -> Iterator[tuple[str, int | None]]:
        for name, upstream in self.upstreams.items():
            yield f"upstreams.{name}.concurrency", upstream.concurrency
        for name, tenant in self.tenants.items():
            for limit in ("tpm", "rpm", "concurrency"):
                yield f"tenants.{name}.{limit}", getattr(tenant, limit)
            if tenant.sessions:
                yield f"tenants.{name}.sessions.max_tokens", tenant.sessions.max_tokens
        yield "sessions.max_tokens", self.sessions.max_tokens


def _upstream(upstream: Upstream, replicas: int) -> Upstream:
    """Watermarks are of the engine's own reading, which all replicas see alike; only what goes blindly is divided."""
    kv = upstream.kv
    return replace(
        upstream,
        limits=tuple(_limit(limit, replicas) for limit in upstream.limits),
        concurrency=_whole(upstream.concurrency, replicas),
        dollars=_dollars(upstream.dollars, replicas),
        kv=replace(kv, trickle_rps=kv.trickle_rps / replicas) if kv else None,
    )


def _limit(limit: Limit, replicas: int) -> Limit:
    return replace(limit, per_minute=limit.per_minute / replicas, capacity=limit.capacity / replicas)


def _route(route: Route, replicas: int) -> Route:
    return replace(route, dollars=_dollars(route.dollars, replicas))


def _tenant(tenant: Tenant, replicas: int) -> Tenant:
    return replace(
        tenant,
        tpm=_whole(tenant.tpm, replicas),
        rpm=_whole(tenant.rpm, replicas),
        concurrency=_whole(tenant.concurrency, replicas),
        dollars=_dollars(tenant.dollars, replicas),
        sessions=_sessions(tenant.sessions, replicas) if tenant.sessions else None,
    )


def _sessions(limits: SessionLimits, replicas: int) -> SessionLimits:
    return replace(limits, max_tokens=_whole(limits.max_tokens, replicas), max_usd=_part(limits.max_usd, replicas))


def _dollars(dollars: Dollars, replicas: int) -> Dollars:
    return Dollars(
        _part(dollars.per_hour, replicas), _part(dollars.per_day, replicas), _part(dollars.per_month, replicas)
    )


def _part(number: float | None, replicas: int) -> float | None:
    return None if number is None else number / replicas


def _whole(number: int | None, replicas: int) -> int | None:
    return None if number is None else number // replicas
