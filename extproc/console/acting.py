"""What is done: every route here needs a proof of who asks, and leaves its mark in the audit log."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from extproc.console import sessions
from extproc.console.desk import Denied, Desk
from extproc.console.schemas import LogChange, LogSettings, Raise, Session, responses
from extproc.console.sources import Data

__all__ = ["routes"]

PROOFS: dict[str, Any] = {"security": [{"token": []}, {"certificate": []}]}
USUAL = (400, 401, 403, 408, 413, 415, 422, 503)
"""What may be wrong with any action."""


def routes(desk: Desk) -> APIRouter:
    """All that can be done with what there is."""
    router = APIRouter()
    if desk.sources.sessions is not None:
        _sessions(router, desk)
    if desk.sources.set_log is not None:
        _log(router, desk)
    return router


def _sessions(router: APIRouter, desk: Desk) -> None:
    known = desk.sources.sessions
    assert known is not None  # noqa: S101 - else there are no such routes

    async def raise_session(request: Request, tenant: str, session: str) -> Response:
        """Let an agent session use more, from now on."""
        who = await desk.may_act(request)
        try:
            tokens, usd, reason = sessions.wanted(await request.body())
        except ValueError as error:
            raise Denied(400, str(error)) from None

        async def work() -> Data:
            found = await known.add(tenant, session, tokens, usd)
            if found is None:
                raise LookupError("no such session is known")
            return found

        old = request.scope["path"].startswith("/sessions/")
        return await desk.do(
            request, who, work, {"add_tokens": tokens, "add_usd": usd}, reason, wrong=400 if old else 409
        )

    extra = {
        **PROOFS,
        "requestBody": {"required": True, "content": {"application/json": {"schema": Raise.model_json_schema()}}},
    }
    for path, name, codes in (
        ("/sessions/{tenant:name}/{session:name}", "raise_session", (404,)),
        ("/api/v1/sessions/{tenant:name}/{session:name}", "raise_session_v1", (404, 409)),
    ):
        router.add_api_route(
            path,
            raise_session,
            methods=["POST"],
            operation_id=name,
            tags=["act"],
            openapi_extra=extra,
            response_class=Response,
            responses=responses(*USUAL, *codes, model=Session, description="The session as it is now"),
        )


def _log(router: APIRouter, desk: Desk) -> None:
    sources = desk.sources

    async def set_log(request: Request, wanted: LogChange, who: str = Depends(desk.may_act)) -> Response:
        """Change what is written to the log, until the next reload or start."""
        changed = wanted.model_dump(exclude={"reason"}, exclude_none=True)

        async def work() -> Data:
            assert sources.set_log is not None  # noqa: S101 - else there is no such route
            assert sources.log is not None  # noqa: S101 - same
            sources.set_log(**changed)
            return sources.log()

        return await desk.do(request, who, work, changed, wanted.reason)

    router.add_api_route(
        "/api/v1/log",
        set_log,
        methods=["PUT"],
        operation_id="set_log",
        tags=["act"],
        openapi_extra=PROOFS,
        response_class=Response,
        responses=responses(*USUAL, model=LogSettings, description="The settings as they are now"),
    )
