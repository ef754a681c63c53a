"""What those in line wait for, as plain data for an operator: read off the lanes, and off what the last pass was told.

A line's first waiter tells for all of it, because they want the same. It waits for the upstream at which its turn comes
first, and there for the counter that lacks longest; where better lanes wait for that counter, too, it is behind them.

Deliberately not here: what that means to an operator, and what would help (telemetry.overview).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import inf, isfinite
from typing import Any

from extproc.core.capacity import Option, Store
from extproc.core.lanes import Lanes, Queue, terms_of
from extproc.core.lines import Flow, Line, Waiter
from extproc.core.routing import breaker_key
from extproc.core.shares import Terms
from extproc.limiter import Limiter

__all__ = ["oldest_s", "standing"]

MOST_TENANTS = 2000
"""Of so many tenants of a lane, those that wait longest, the oldest request and the largest backlog are looked for."""
MOST_LINES, FORECAST = 200, 20
"""So many lines are told, the largest, and of so many of them a forecast, which takes longest."""


def standing(limiter: Limiter, store: Store, now: float, rests_until: Mapping[str, float]) -> dict[str, Any]:
    """Lines and tenants as plain data. Times are seconds from now, None where nobody can know.

    rests_until: of upstreams whose breaker, or an operator, keeps users away, when that ends, on the clock.
    """
    return {
        "lines": _lines(limiter, store, now, rests_until),
        "tenants": _tenants(limiter.lanes),
    }


def oldest_s(queue: Queue, now: float) -> float | None:
    """For how many seconds the oldest of a lane has been here; None where nobody waits."""
    arrivals = [
        flow.first(lifo=False).request.arrived
        for tenant in islice(queue.tenants.values(), MOST_TENANTS)
        for flow in tenant.flows.values()
    ]
    return round(now - min(arrivals), 3) if arrivals else None


def _lines(limiter: Limiter, store: Store, now: float, rests_until: Mapping[str, float]) -> list[dict[str, Any]]:
    heads = [(waiter, waiter.flow.line) for waiter, _ in limiter.lanes.heads() if waiter.flow is not None]
    heads.sort(key=lambda head: head[1].backlog.requests, reverse=True)
    return [
        _line(limiter, waiter, line, store, now, rests_until, forecast=number < FORECAST)
        for number, (waiter, line) in enumerate(heads[:MOST_LINES])
    ]


def _line(
    limiter: Limiter,
    waiter: Waiter,
    line: Line,
    store: Store,
    now: float,
    rests_until: Mapping[str, float],
    *,
    forecast: bool,
) -> dict[str, Any]:
    request, heaviest = waiter.request, _heaviest(line)
    chain, options = limiter.seeks(waiter)
    key, free_s = _binding(options, line.lacking, store, now, terms_of(limiter.lanes.rules[request.lane]))
    if not options:
        key, free_s = _away(chain, rests_until, now)
    return {
        "lane": request.lane,
        "model": request.model,
        "route": request.route,
        "chain": list(chain),
        "asked": [option.name for option in options],
        "key": key,
        "behind": bool(options) and free_s == 0.0,
        "next_s": _next_s(limiter.until_turn_s(waiter) if forecast else 0.0, free_s),
        "newcomer_s": _next_s(limiter.newcomer_s(heaviest.first(lifo=False)), free_s) if forecast else None,
        "requests": line.backlog.requests,
        "tokens": line.backlog.tokens,
        "needs": _needs(options, key),
        "tenants": len(line.flows),
        "tenant": heaviest.tenant.name,
        "tenant_share": round(heaviest.backlog.requests / line.backlog.requests, 4),
    }


def _next_s(turn_s: float, free_s: float) -> float | None:
    """Seconds until somebody of a line goes: the forecast, and not before the counter has enough.

    Where only a release can help the forecast alone is known, and of that no wait means that nobody knows.
    """
    if isfinite(free_s):
        return _known(max(turn_s, free_s))
    return _known(turn_s) if turn_s > 0 else None


def _binding(
    options: Iterable[Option], lacking: Sequence[str], store: Store, now: float, terms: Terms
) -> tuple[str, float]:
    """The counter that lacks longest at the upstream where that is shortest, and for how long: 0 behind others."""
    found: list[tuple[float, str]] = []
    for option in options:
        waits = [
            (counter.wait_for(claim.amount, now, terms), claim.key)
            for claim in option.claims
            if claim.key in lacking and (counter := store.get(claim.key)) is not None
        ]
        if waits:
            found.append(max(waits))
    wait, key = min(found, default=(0.0, ""))
    return key, wait


def _away(chain: Iterable[str], rests_until: Mapping[str, float], now: float) -> tuple[str, float]:
    """Nobody may be asked: the breaker that lets somebody try first; the first of the chain where nobody knows."""
    until = {name: rests_until.get(name, inf) for name in chain}
    name = min(until, key=lambda one: until[one], default="")
    return breaker_key(name) if name else "", max(0.0, until.get(name, inf) - now)


def _needs(options: Iterable[Option], key: str) -> float | None:
    """What the first of a line claims of the counter it waits for."""
    return next((claim.amount for option in options for claim in option.claims if claim.key == key), None)


def _heaviest(line: Line) -> Flow:
    """What the tenant has there that has most of the line."""
    return max(islice(line.flows.values(), MOST_TENANTS), key=lambda one: one.backlog.requests)


def _tenants(lanes: Lanes) -> dict[str, int]:
    """How many requests of each tenant are in line; of very many tenants, of those that wait longest."""
    found: dict[str, int] = {}
    for queue in lanes.queues.values():
        for name, tenant in islice(queue.tenants.items(), MOST_TENANTS):
            found[name] = found.get(name, 0) + tenant.backlog.requests
    return found


def _known(seconds: float) -> float | None:
    return round(seconds, 3) if isfinite(seconds) else None
