"""The state page: what waits, what flies, how full every bucket is, which breaker is open. Loopback, read-only JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.capacity import Store
from extproc.core.lanes import Lanes

__all__ = ["describe", "serve"]


def describe(lanes: Lanes, store: Store, now: float) -> dict[str, Any]:
    """Lanes, buckets and slots as plain data. Units: requests, tokens, bytes, seconds."""
    counters: dict[str, Any] = {}
    for key, counter in store.items():
        if isinstance(counter, TokenBucket):
            level = round(counter.level_at(now), 3)
            counters[key] = {"level": level, "capacity": counter.capacity, "per_second": counter.rate}
        elif isinstance(counter, Slots):
            counters[key] = {"used": counter.used, "limit": counter.limit}
    waiting = {
        name: {"requests": backlog.requests, "tokens": backlog.tokens, "bytes": backlog.bytes}
        for name, backlog in lanes.backlogs.items()
    }
    return {"waiting": waiting, "counters": counters}


async def serve(address: str, state: Callable[[], dict[str, Any]]) -> web.AppRunner:
    """Serve `GET /state` and `GET /healthz` on host:port; returns the runner to clean up."""

    async def show(_: web.Request) -> web.Response:
        return web.json_response(state(), dumps=lambda data: json.dumps(data, default=str))

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/state", show)
    app.router.add_get("/healthz", healthy)
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    host, _, port = address.rpartition(":")
    await web.TCPSite(runner, host or "127.0.0.1", int(port)).start()
    return runner
