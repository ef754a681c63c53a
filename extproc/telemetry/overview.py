"""One picture of everything, as plain data: what page, terminal and bundle show. Pure: the same seen, the same told.

What has no source is None; nothing is made up. Names of tenants, models and requests come from outside: whoever shows
them has to see to it that they are harmless there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.core import policy
from extproc.core.refusal import Reason
from extproc.shapes import Binding, Bucket, Kv, Lane, Overview, Refusal, Row, Status, Tenant, TenantUse, Upstream
from extproc.telemetry.binding import bindings
from extproc.telemetry.history import percentile
from extproc.telemetry.keys import parts_of
from extproc.telemetry.notices import notices
from extproc.telemetry.seen import PRESSURE, Seen

__all__ = ["MOST_RECENT", "Seen", "overview"]

SHED_S = 30.0
"""Whoever refused somebody for want of room within so many seconds is shedding."""
MOST_RECENT = 30


def overview(seen: Seen) -> Overview:
    """Times in seconds, `at` and `since` in epoch seconds. Rates of the last ten seconds; of dollars, five minutes."""
    state = seen.state
    binding, buckets = bindings(seen), _buckets(state["counters"])
    return {
        "at": round(seen.at, 3),
        "version": seen.version,
        "uptime_s": round(seen.uptime_s, 1),
        "config": state["config"],
        "status": status(seen),
        "notices": notices(seen),
        "binding": binding,
        "lanes": [_lane(seen, name, binding) for name in state["waiting"]],
        "upstreams": [
            _upstream(seen, upstream, buckets.get(upstream.name, [])) for upstream in seen.policy.upstreams.values()
        ],
        "tenants": _tenants(seen),
        "sessions": state.get("sessions"),
        "refusals": _refusals(seen),
        "recent": None if seen.recent is None else [_request(seen, row) for row in seen.recent[:MOST_RECENT]],
        "alerts": list(reversed(state["tally"]["alerts"])),
        "levers": state.get("levers"),
        "process": state.get("process"),
    }


def status(seen: Seen) -> Status:
    """The one word for it, the gravest that is true."""
    routes = seen.policy.routes
    if seen.draining:
        return "draining"
    if seen.levers.get("bypass"):
        return "bypassed"
    if any(not any(map(seen.serves, route.chain)) for route in routes):
        return "outage"
    if any(seen.history.refused_within(reason, SHED_S) for reason in PRESSURE):
        return "shedding"
    return "waiting" if any(backlog["requests"] for backlog in seen.state["waiting"].values()) else "ok"


def _lane(seen: Seen, name: str, binding: list[Binding]) -> Lane:
    backlog, rule, waits = seen.state["waiting"][name], seen.policy.lanes.get(name), seen.history.waits(name)
    lines = [line for line in seen.standing["lines"] if line["lane"] == name]
    longest = max(lines, key=lambda line: line["requests"], default=None)
    return {
        "name": name,
        "rank": rule.rank if rule else None,
        "requests": backlog["requests"],
        "tokens": backlog["tokens"],
        "bytes": backlog["bytes"],
        "oldest_s": seen.state["lanes"].get(name, {}).get("oldest_s"),
        "predicted_s": 0.0 if longest is None and not backlog["requests"] else longest and longest["newcomer_s"],
        "wait_p50_s": percentile(waits, 0.5),
        "wait_p95_s": percentile(waits, 0.95),
        "wait_p99_s": percentile(waits, 0.99),
        "admitted_per_s": _per_s(seen, "admitted", name),
        "refused_per_s": _per_s(seen, "refused_of", name),
        "binding": next((one["key"] for one in binding if one["lane"] == name), None),
        "paused": seen.lever("lanes", name, "paused"),
        "max_wait_s": rule.max_wait_s if rule else None,
        "max_requests": rule.max_requests if rule else None,
    }


def _upstream(seen: Seen, upstream: policy.Upstream, buckets: list[Bucket]) -> Upstream:
    name, counters = upstream.name, seen.state["counters"]
    breaker, slots = seen.state["breakers"].get(name, {}), counters.get(f"upstream/{name}/slots", {})
    usd = seen.now.rate(seen.minutes, "usd", name)
    return {
        "name": name,
        "provider": upstream.provider,
        "owned": upstream.owned,
        "state": breaker.get("state"),
        "sign": breaker.get("sign"),
        "rests_s": breaker.get("rests_s"),
        "out": seen.lever("upstreams", name, "out"),
        "in_flight": slots.get("used"),
        "slots_limit": slots.get("limit"),
        "buckets": buckets,
        "kv": _kv(counters.get(f"upstream/{name}/kv")),
        "requests_per_s": _per_s(seen, "served", name),
        "tokens_per_s": _per_s(seen, "tokens", name),
        "errors_per_s": _per_s(seen, "errors", name),
        "paced_per_s": _per_s(seen, "paced", name),
        "usd_per_hour": None if usd is None or not upstream.prices else round(usd * 3600, 6),
        "first_token_p50_s": percentile(seen.history.firsts(name), 0.5),
    }


def _per_s(seen: Seen, what: str, name: str) -> float | None:
    rate = seen.now.rate(seen.lately, what, name)
    return None if rate is None else round(rate, 3)


def _buckets(counters: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Bucket]]:
    """Those of each upstream."""
    found: dict[str, list[Bucket]] = {}
    for key, counter in counters.items():
        if "capacity" in counter and key.startswith("upstream/"):
            found.setdefault(parts_of(key).name, []).append(_bucket(key, counter))
    return found


def _bucket(key: str, counter: Mapping[str, Any]) -> Bucket:
    return {
        "key": key,
        "kind": parts_of(key).kind,
        "level": counter["level"],
        "capacity": counter["capacity"],
        "per_second": counter["per_second"],
        "closed_s": counter.get("closed_s"),
        "shadow": counter.get("shadow", False),
    }


def _kv(counter: Mapping[str, Any] | None) -> Kv | None:
    if counter is None:
        return None
    return {"saturation": counter["saturation"], "fill": counter["fill"], "stale_s": counter.get("stale_s")}


def _tenants(seen: Seen) -> list[Tenant] | None:
    known: list[TenantUse] | None = seen.state.get("tenants")
    if known is None:
        return None
    return [{**one, "waiting": seen.standing["tenants"].get(one["name"], 0)} for one in known]


def _request(seen: Seen, row: Row) -> Row:
    """Who waits has waited until now."""
    return {**row, "waited_s": round(seen.at - row["at"], 3)} if row["state"] == "waiting" else row


def _refusals(seen: Seen) -> list[Refusal]:
    """By reason, the most frequent of the last five minutes first."""
    now, then = seen.now.refused, seen.minutes.refused
    found: list[Refusal] = [
        {
            "reason": Reason(reason),
            "count_5m": int(now.get(reason, 0) - then.get(reason, 0)),
            "last_at": round(last.at, 3),
            "ids": list(reversed(last.ids)),
        }
        for reason, last in seen.history.refusals.items()
    ]
    return sorted(found, key=lambda one: (-one["count_5m"], -one["last_at"]))
