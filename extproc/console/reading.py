"""What is shown: nothing here changes anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from extproc.console import assets
from extproc.console.answers import problem, shown
from extproc.console.clerk import Clerk, Denied
from extproc.console.schemas import (
    AuditPage,
    Filter,
    LogSettings,
    RequestId,
    RequestPage,
    Session,
    SessionId,
    Tenant,
    responses,
)
from extproc.console.sources import Data, Pages, Sessions
from extproc.console.stream import Overviews, Watching
from extproc.ports import Operations
from extproc.shapes import Hour, Levers, Overview, ServiceState

__all__ = ["routes"]

FRESH_S = 0.5
"""So long a page of metrics serves whoever asks."""
NO_REQUEST = (
    "no such request is known, or it was too long ago (an id is what x-tidegate-request-id of an answer says; "
    "a provider's own x-request-id is not known here)"
)
EVENTS: dict[str, Any] = {
    "text/event-stream": {
        "schema": {"type": "string"},
        "itemSchema": {  # as OpenAPI 3.2 has it, and FastAPI before that
            "type": "object",
            "properties": {
                "event": {"const": "overview"},
                "data": {
                    "type": "string",
                    "contentMediaType": "application/json",
                    "contentSchema": {"$ref": "#/components/schemas/Overview"},
                },
            },
            "required": ["event", "data"],
        },
    }
}
ANYTHING: dict[str, Any] = {"model": dict[str, Any], "description": "Plain data"}

Show = Callable[..., Awaitable[Response]]


def routes(clerk: Clerk) -> APIRouter:
    """All that can be read of what there is."""
    router, sources = APIRouter(), clerk.sources
    adding = _Routes(router, clerk)
    _always(adding, clerk)
    if sources.metrics is not None:
        _metrics(adding, sources.metrics, sources.state)
    if clerk.overviews is not None:
        _overviews(adding, clerk.overviews, clerk)
    given: tuple[tuple[Callable[..., None], Any], ...] = (
        (_sessions, sources.sessions),
        (_levers, sources.operations),
        (_history, sources.history),
        (_requests, sources.requests),
        (_explain, sources.explain),
        (_config, sources.config),
        (_log, sources.log),
    )
    for add, source in given:
        if source is not None:
            add(adding, source)
    _page(router)
    return router


class _Routes:
    """Adds routes of which not everybody may see the data."""

    def __init__(self, router: APIRouter, clerk: Clerk) -> None:
        self._router, self._clerk = router, clerk
        proofs: list[dict[str, list[str]]] = [{"token": []}, {"certificate": []}]
        self._security = [{}, *proofs] if clerk.loopback else proofs
        self._guarded = [Depends(_reader(clerk))]

    def add(self, path: str, name: str, show: Show, *codes: int, **good: Any) -> None:
        """codes: what else may go wrong. good: what the answer is, plain data unless it is told."""
        self._clerk.methods.setdefault(path, set()).add("GET")
        self._router.add_api_route(
            path,
            show,
            dependencies=self._guarded,
            openapi_extra={"security": self._security},
            operation_id=name,
            tags=["look"],
            response_class=Response,
            responses=responses(401, 403, *codes, **(good or ANYTHING)),
        )

    def open(self, path: str, name: str, show: Show, *, to_pages: bool = False, **good: Any) -> None:
        """Whoever reaches the console may see it. to_pages: pages of other sites, too."""
        self._clerk.methods.setdefault(path, set()).add("GET")
        self._router.add_api_route(
            path,
            show,
            dependencies=[] if to_pages else [Depends(_no_page(self._clerk))],
            openapi_extra={"security": []},
            operation_id=name,
            tags=["look"],
            response_class=Response,
            responses=responses(*([] if to_pages else [403]), **good),
        )


def _no_page(clerk: Clerk) -> Callable[[Request], Awaitable[None]]:
    async def no_page(request: Request) -> None:
        clerk.no_page(request)

    return no_page


def _reader(clerk: Clerk) -> Callable[[Request], Awaitable[None]]:
    async def may_read(request: Request) -> None:
        clerk.may_read(request)

    return may_read


def _always(routes: _Routes, clerk: Clerk) -> None:
    async def state() -> Response:
        """Lanes, counters, breakers and whatever else there is, as it is now."""
        return shown(clerk.sources.state())

    async def healthy() -> Response:
        """That it runs."""
        return Response("ok\n", media_type="text/plain")

    async def audit(limit: Annotated[int, Query(ge=1, le=500)] = 500) -> Response:
        """The last actions and refused attempts, the newest first."""
        return shown({"actions": clerk.audit.newest(limit)})

    text = {"text/plain": {"schema": {"type": "string"}}}
    routes.open("/healthz", "healthy", healthy, to_pages=True, description="ok", content=text)
    for path, name in (("/state", "state"), ("/api/v1/state", "state_v1")):
        routes.add(path, name, state, model=ServiceState, description="The state")
    routes.add("/api/v1/audit", "audit", audit, 422, model=AuditPage, description="Actions")


def _metrics(routes: _Routes, pages: Pages, state: Callable[[], Data]) -> None:
    kinds = {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")}
    routes.open("/metrics", "metrics", _Metrics(pages, state).show, description="For Prometheus", content=kinds)


def _sessions(routes: _Routes, known: Sessions) -> None:
    async def session(tenant: Tenant, session: SessionId) -> Response:
        """What an agent session has used, and what it may use."""
        return _found(known.look(tenant, session), "no such session is known")

    for path, name in (("/sessions", "session"), ("/api/v1/sessions", "session_v1")):
        whole = f"{path}/{{tenant:name}}/{{session:name}}"
        routes.add(whole, name, session, 404, model=Session, description="The session")


def _overviews(routes: _Routes, overviews: Overviews, clerk: Clerk) -> None:
    async def overview() -> Response:
        """Everything at a glance; at most a second old."""
        return Response(await overviews.newest(), media_type="application/json")

    async def stream(request: Request) -> Response:
        """The overview, whenever there is a new one: server-sent events called `overview`, one a second."""
        if overviews.full:
            return problem(503, "too many watch already", {"retry-after": "10"})
        return Watching(overviews, lambda: clerk.still_reads(request))

    routes.add("/api/v1/overview", "overview", overview, model=Overview, description="The overview")
    routes.add("/api/v1/stream", "stream", stream, 503, description="Events", content=EVENTS)


def _levers(routes: _Routes, levers: Operations) -> None:
    async def moved() -> Response:
        """What operators have moved."""
        return shown(levers.state())

    routes.add("/api/v1/levers", "levers", moved, model=Levers, description="The levers")


def _history(routes: _Routes, history: Callable[[], Data]) -> None:
    async def last_hour() -> Response:
        """The last hour, in steps."""
        return shown(history())

    routes.add("/api/v1/history", "history", last_hour, model=Hour, description="The hour")


def _requests(routes: _Routes, newest: Callable[..., Sequence[Data]]) -> None:
    async def requests(wanted: Annotated[Filter, Query()]) -> Response:
        """The newest requests, and what became of them."""
        return shown({"requests": list(newest(**wanted.model_dump()))})

    routes.add("/api/v1/requests", "requests", requests, 422, model=RequestPage, description="Requests")


def _explain(routes: _Routes, explain: Callable[[str], Data | None]) -> None:
    async def request(id: RequestId) -> Response:  # noqa: A002 - so the path has it
        """Everything that is known of one request, by its id or its ticket."""
        return _found(explain(id), NO_REQUEST)

    routes.add("/api/v1/requests/{id:name}", "request", request, 404)


def _config(routes: _Routes, config: Callable[[], Data]) -> None:
    async def values() -> Response:
        """Every value in force, without secrets."""
        return shown(config())

    routes.add("/api/v1/config", "config", values)


def _log(routes: _Routes, log: Callable[[], Data]) -> None:
    async def logged() -> Response:
        """What is written to the log."""
        return shown(log())

    routes.add("/api/v1/log", "log", logged, model=LogSettings, description="The settings")


def _page(router: APIRouter) -> None:
    files = assets.page()
    if assets.INDEX not in files:
        return

    async def index(request: Request) -> Response:
        return _file(request, files[assets.INDEX])

    async def asset(request: Request, path: str) -> Response:
        if path not in files:
            raise Denied(404, "there is no such page")
        return _file(request, files[path])

    router.add_api_route("/", index, include_in_schema=False)
    router.add_api_route("/assets/{path:path}", asset, include_in_schema=False)


def _file(request: Request, asset: assets.Asset) -> Response:
    """Kept by the browser, which asks each time whether there is another."""
    headers = {"etag": asset.tag, "cache-control": "no-cache"}
    if asset.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(asset.content, headers={**headers, "content-type": asset.media_type})


def _found(data: Data | None, why: str) -> Response:
    return problem(404, why) if data is None else shown(data)


class _Metrics:
    """Pages of metrics, asked for in a thread, one at a time, and seldom: whoever may read them from outside must not
    keep those from their work who decide on requests.
    """

    def __init__(self, pages: Pages, state: Callable[[], Data]) -> None:
        self._pages, self._state = pages, state
        self._one = asyncio.Lock()
        self._kept: dict[str, tuple[float, bytes, str]] = {}

    async def show(self, request: Request) -> Response:
        """For Prometheus, as text or as OpenMetrics."""
        wanted = self._pages.kind(", ".join(request.headers.getlist("accept")))
        async with self._one:
            at, page, kind = self._kept.get(wanted, (-inf, b"", wanted))
            if time.monotonic() - at >= FRESH_S:
                page, kind = await asyncio.to_thread(self._pages.page, self._state(), wanted)
                self._kept[wanted] = (time.monotonic(), page, kind)
        return Response(page, headers={"content-type": kind, "vary": "accept"})
