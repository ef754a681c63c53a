"""The state page: what waits, what flies, how full every bucket is, which breaker is open, as JSON, on loopback.

Counters of sessions are not shown, there may be 100,000: see sessions. Of tenants that nobody listed some are, after
all others.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from math import inf, isfinite
from typing import Any

from aiohttp import web

from extproc.allowances import Allowances
from extproc.console import sessions
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget
from extproc.core.capacity import Counter, Store
from extproc.core.lanes import Lanes
from extproc.core.watermark import Watermark

__all__ = ["describe", "serve"]

MOST_COUNTERS = 2000
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_BODY = 16_384
"""Bytes of a request's body."""
FRESH_S = 0.5
"""So long a page of metrics serves whoever asks."""


@dataclass(slots=True)
class Page:
    """The newest page of metrics, and when it was made, on the clock of `time.monotonic`."""

    text: bytes = b""
    at: float = -inf


def describe(lanes: Lanes, store: Store, now: float, first: Iterable[str] = ()) -> dict[str, Any]:
    """Lanes, buckets and slots as plain data. Units: requests, tokens, bytes, seconds.

    first: counters that are shown before others, of which there may be too many.
    """
    others = (key for key in store if not key.startswith("session/"))
    named = dict.fromkeys((*(key for key in first if key in store), *islice(others, MOST_COUNTERS)))
    counters = {key: _counter(store[key], now) for key in islice(named, MOST_COUNTERS)}
    waiting = {
        name: {"requests": backlog.requests, "tokens": backlog.tokens, "bytes": backlog.bytes}
        for name, backlog in lanes.backlogs.items()
    }
    return {"waiting": waiting, "counters": counters}


def _counter(counter: Counter, now: float) -> dict[str, Any]:
    """One counter. What does not apply is left out: pauses that are over, lanes that are owed nothing, no shadow."""
    told: dict[str, Any]
    match counter:
        case TokenBucket(rate=rate, capacity=capacity):
            told = {"level": round(counter.level_at(now), 3), "capacity": capacity, "per_second": rate}
        case Slots(used=used, limit=limit):
            told = {"used": used, "limit": _finite(limit)}
        case Watermark(booked=booked, held=held):
            told = {"used": booked, "requests": held, "fill": round(counter.fill(now), 4), "cache": counter.cache}
            told |= {"saturation": _rounded(counter.saturation(now)), "instances": counter.instances}
            told["unseen"] = counter.since  # tokens let go that the last reading may not show
        case Budget(limit=limit):
            spent = round(counter.used_at(now), 6)
            told = {"spent": spent, "budget": limit, "ends_in_s": _finite(counter.ends_in(now))}
    owed = {} if isinstance(counter, Budget) else counter.owed(now)
    if owed:
        told["owed"] = {lane: round(units, 3) for lane, units in owed.items()}
    if counter.closed_until > now:
        told["closed_s"] = _finite(counter.closed_until - now)
    if counter.shadow:
        told["shadow"] = True
    return told


def _finite(number: float) -> float | None:
    """JSON knows no infinity."""
    return number if isfinite(number) else None


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 4)


async def serve(
    address: str,
    state: Callable[[], dict[str, Any]],
    allowances: Allowances | None = None,
    *,
    metrics: Callable[[dict[str, Any]], bytes] | None = None,
) -> web.AppRunner:
    """Serve `GET /state`, `/metrics`, `/healthz` and `/sessions` on host:port; returns the runner to clean up.

    metrics: a state as text for Prometheus. It is asked in a thread, for one page at a time, and seldom: whoever may
    read the page from outside must not keep those from their work who decide on requests. OSError where the address
    cannot be had.
    """
    one_page, kept = asyncio.Lock(), Page()

    async def show(_: web.Request) -> web.Response:
        return web.json_response(state(), dumps=lambda data: json.dumps(data, default=str))

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def measure(_: web.Request) -> web.Response:
        assert metrics is not None  # noqa: S101 - else there is no such page
        async with one_page:
            if time.monotonic() - kept.at >= FRESH_S:
                kept.text = await asyncio.to_thread(metrics, state())
                kept.at = time.monotonic()
        return web.Response(body=kept.text, headers={"content-type": METRICS_TYPE})

    app = web.Application(client_max_size=MOST_BODY)
    app.router.add_get("/state", show)
    app.router.add_get("/healthz", healthy)
    if metrics is not None:
        app.router.add_get("/metrics", measure)
    if allowances is not None:
        app.router.add_routes(sessions.routes(allowances, address))
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    host, _, port = address.rpartition(":")
    await web.TCPSite(runner, host.strip("[]") or "127.0.0.1", int(port)).start()
    return runner
