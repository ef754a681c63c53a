"""What is done: every route here needs a proof of who asks, and leaves its mark in the audit log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from extproc.console import sessions
from extproc.console.clerk import Clerk, Denied
from extproc.console.schemas import (
    Asked,
    ForAWhile,
    LogChange,
    LogSettings,
    NewValue,
    Raise,
    Session,
    SessionId,
    Tenant,
    responses,
)
from extproc.console.sources import Data, Sessions
from extproc.ports import Operations
from extproc.shapes import Levers, Moved

__all__ = ["routes"]

USUAL = (400, 401, 403, 408, 409, 413, 415, 422, 503)
"""What may be wrong with any action."""
V1 = "/api/v1"

LaneName = Annotated[str, Path(examples=["P2"])]
UpstreamName = Annotated[str, Path(examples=["primary"])]


def routes(clerk: Clerk) -> APIRouter:
    """All that can be done with what there is."""
    router, sources = APIRouter(), clerk.sources
    adding = _Routes(router, clerk)
    if sources.sessions is not None:
        _sessions(adding, sources.sessions)
    if sources.set_log is not None and sources.log is not None:
        _log(adding, sources.set_log, sources.log)
    if sources.operations is not None:
        for add in (_service, _lanes, _upstreams, _changes):
            add(adding, sources.operations)
    return router


class _Routes:
    """Adds routes that act."""

    def __init__(self, router: APIRouter, clerk: Clerk) -> None:
        self._router, self.clerk, self._acting = router, clerk, clerk.acts()

    def add(self, method: str, path: str, act: Callable[..., Awaitable[Response]], *codes: int, **more: Any) -> None:
        """An action is called what its function is called. codes: what else may go wrong."""
        self.clerk.methods.setdefault(path, set()).add(method)
        extra = {"security": [{"token": []}, {"certificate": []}], **more.pop("extra", {})}
        self._router.add_api_route(
            path,
            act,
            methods=[method],
            openapi_extra=extra,
            operation_id=more.pop("name", act.__name__),
            tags=["act"],
            response_class=Response,
            responses=responses(
                *USUAL, *codes, **(more or {"model": Levers, "description": "The levers as they are now"})
            ),
            route_class_override=self._acting,
        )


def _sessions(routes: _Routes, known: Sessions) -> None:
    async def raise_session(request: Request, tenant: Tenant, session: SessionId) -> Response:
        """Let an agent session use more, from now on."""
        try:
            tokens, usd, reason = sessions.wanted(await request.body())
        except ValueError as error:
            raise Denied(400, str(error)) from None

        async def work() -> Data:
            found = await known.add(tenant, session, tokens, usd)
            if found is None:
                raise LookupError("no such session is known")
            return found

        wrong = 409 if request.scope["path"].startswith(V1) else 400
        more = {name: amount for name, amount in (("add_tokens", tokens), ("add_usd", usd)) if amount}
        return await routes.clerk.do(request, work, more, reason, wrong=wrong)

    body = {"required": True, "content": {"application/json": {"schema": Raise.model_json_schema()}}}
    good = {"extra": {"requestBody": body}, "model": Session, "description": "The session as it is now"}
    path = "/sessions/{tenant:name}/{session:name}"
    routes.add("POST", path, raise_session, 404, **good)
    routes.add("POST", V1 + path, raise_session, 404, **good, name="raise_session_v1")


def _log(routes: _Routes, set_log: Callable[..., None], log: Callable[[], Data]) -> None:
    async def set_log_(request: Request, asked: LogChange) -> Response:
        """Change what is written to the log, until the next reload or start."""
        changed = asked.model_dump(exclude={"reason"}, exclude_none=True)

        async def work() -> Data:
            set_log(**changed)
            return log()

        return await routes.clerk.do(request, work, changed, asked.reason)

    good = {"model": LogSettings, "description": "The settings as they are now"}
    routes.add("PUT", f"{V1}/log", set_log_, **good, name="set_log")


def _moving(routes: _Routes, levers: Operations) -> Callable[..., Awaitable[Response]]:
    async def moved(
        request: Request,
        asked: Asked | None,
        move: Callable[[str], Awaitable[Any]],
        more: Mapping[str, Any] | None = None,
    ) -> Response:
        async def work() -> Data:
            done = await move(request.state.who)
            return {**levers.state(), **({"id": done} if isinstance(done, str) else {})}

        arguments = asked.model_dump(exclude={"reason"}, exclude_none=True) if asked else {}
        return await routes.clerk.do(request, work, {**arguments, **(more or {})}, asked.reason if asked else "")

    return moved


def _for_s(asked: ForAWhile | None) -> float | None:
    return asked.for_s if asked else None


def _service(routes: _Routes, levers: Operations) -> None:
    moved = _moving(routes, levers)

    async def drain(request: Request, asked: Asked | None = None) -> Response:
        """Take no new requests; what waits or runs is finished."""
        return await moved(request, asked, lambda by: levers.drain(by=by))

    async def undrain(request: Request, asked: Asked | None = None) -> Response:
        """Take requests again."""
        return await moved(request, asked, lambda by: levers.undrain(by=by))

    async def bypass(request: Request, asked: ForAWhile | None = None) -> Response:
        """Let everybody go at once, also who waits: no limit holds anybody. Books are still kept."""
        return await moved(request, asked, lambda by: levers.bypass(_for_s(asked), by=by))

    async def no_bypass(request: Request, asked: Asked | None = None) -> Response:
        """Let limits hold again."""
        return await moved(request, asked, lambda by: levers.no_bypass(by=by))

    routes.add("POST", f"{V1}/drain", drain)
    routes.add("POST", f"{V1}/undrain", undrain)
    routes.add("POST", f"{V1}/bypass", bypass)
    routes.add("DELETE", f"{V1}/bypass", no_bypass)


def _lanes(routes: _Routes, levers: Operations) -> None:
    moved = _moving(routes, levers)

    async def pause_lane(request: Request, lane: LaneName, asked: ForAWhile | None = None) -> Response:
        """Let nobody of a lane go."""
        return await moved(request, asked, lambda by: levers.pause(lane, _for_s(asked), by=by))

    async def resume_lane(request: Request, lane: LaneName, asked: Asked | None = None) -> Response:
        """Let a lane go on."""
        return await moved(request, asked, lambda by: levers.resume(lane, by=by))

    routes.add("POST", f"{V1}/lanes/{{lane:name}}/pause", pause_lane, 404)
    routes.add("POST", f"{V1}/lanes/{{lane:name}}/resume", resume_lane, 404)


def _upstreams(routes: _Routes, levers: Operations) -> None:
    moved = _moving(routes, levers)

    async def trip_upstream(request: Request, name: UpstreamName, asked: Asked | None = None) -> Response:
        """Open the breaker of an upstream; it closes again by its own rules."""
        return await moved(request, asked, lambda by: levers.trip(name, by=by))

    async def reset_upstream(request: Request, name: UpstreamName, asked: Asked | None = None) -> Response:
        """Close the breaker of an upstream at once."""
        return await moved(request, asked, lambda by: levers.reset(name, by=by))

    async def take_upstream_out(request: Request, name: UpstreamName, asked: ForAWhile | None = None) -> Response:
        """Send nothing to an upstream."""
        return await moved(request, asked, lambda by: levers.take_out(name, _for_s(asked), by=by))

    async def put_upstream_back(request: Request, name: UpstreamName, asked: Asked | None = None) -> Response:
        """Let an upstream be asked again."""
        return await moved(request, asked, lambda by: levers.put_back(name, by=by))

    path = f"{V1}/upstreams/{{name:name}}"
    routes.add("POST", f"{path}/trip", trip_upstream, 404)
    routes.add("POST", f"{path}/reset", reset_upstream, 404)
    routes.add("POST", f"{path}/out", take_upstream_out, 404)
    routes.add("POST", f"{path}/in", put_upstream_back, 404)


def _changes(routes: _Routes, levers: Operations) -> None:
    moved = _moving(routes, levers)

    async def change_limit(request: Request, asked: NewValue) -> Response:
        """Give a setting that is a number another value, for a while or until it is reverted."""
        return await moved(request, asked, lambda by: levers.change(asked.place, asked.value, asked.for_s, by=by))

    async def revert_change(request: Request, id: str, asked: Asked | None = None) -> Response:  # noqa: A002 - the path's
        """Take a change of a limit back."""
        return await moved(request, asked, lambda by: levers.revert(id, by=by))

    routes.add("POST", f"{V1}/changes", change_limit, 404, model=Moved, description="The levers, and this change's id")
    routes.add("DELETE", f"{V1}/changes/{{id:name}}", revert_change, 404)
