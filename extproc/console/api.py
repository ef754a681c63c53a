"""The console's FastAPI application: routes, errors in one shape, and the document that describes it all.

Routes of what nobody provides are not there. Names in a path are quoted as in any URL, their slashes as %2F.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from extproc.console import acting, reading
from extproc.console.answers import encoded, problem
from extproc.console.clerk import Clerk, Denied
from extproc.console.guard import App, Guard

__all__ = ["application", "build"]

log = logging.getLogger("tidegate")

SCHEMES = {
    "token": {"type": "http", "scheme": "bearer", "description": "What the file holds that admin.token_file names."},
    "certificate": {"type": "mutualTLS", "description": "A client certificate by the CA of admin.client_ca_file."},
}
DESCRIPTION = """Look at a running Tidegate, and act on it.

Every action needs a proof: the token of `admin.token_file`, or a client certificate by `admin.client_ca_file`. So does
reading, unless the console listens on loopback. Bodies are JSON objects of at most 16 KiB.
"""
THEIRS = ("HTTPValidationError", "ValidationError")
"""What FastAPI says of any route with a parameter."""
WORDS = {404: "there is no such page", 405: "that method does nothing here"}


class _Name(Convertor[str]):
    """A name as part of a path; `Guard` leaves paths as they were quoted."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return unquote(value, errors="replace")

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("name", _Name())


def build(clerk: Clerk) -> App:
    """All of it, with what stands before it."""
    return Guard(application(clerk))


def application(clerk: Clerk) -> FastAPI:
    """Only FastAPI's part."""
    app = FastAPI(
        title="Tidegate",
        version="1",
        description=DESCRIPTION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_exception_handler(Denied, _denied)
    app.add_exception_handler(HTTPException, _refusing(clerk.methods))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _broken)
    app.include_router(reading.routes(clerk))
    app.include_router(acting.routes(clerk))
    described = _Described(app, clerk)
    app.add_api_route("/api/openapi.json", described.show, include_in_schema=False)
    return app


class _Described:
    """The OpenAPI document, made when it is first asked for, in a thread: it takes a while."""

    def __init__(self, app: FastAPI, clerk: Clerk) -> None:
        self._app, self._clerk = app, clerk
        self._one = asyncio.Lock()
        self._made = b""

    async def show(self, request: Request) -> Response:
        """The document."""
        self._clerk.may_read(request)
        async with self._one:
            if not self._made:
                self._made = await asyncio.to_thread(self._make)
        return Response(self._made, media_type="application/json")

    def _make(self) -> bytes:
        document = self._app.openapi()
        parts = document.setdefault("components", {})
        parts["securitySchemes"] = SCHEMES
        for theirs in THEIRS:  # a name in a path is never invalid
            parts.get("schemas", {}).pop(theirs, None)
        for route in (route for path in document["paths"].values() for route in path.values()):
            if any(theirs in str(route["responses"].get("422")) for theirs in THEIRS):
                del route["responses"]["422"]
        return encoded(document)


async def _denied(_: Request, error: Exception) -> Response:
    return error.answer if isinstance(error, Denied) else problem(500, "")


def _refusing(methods: Mapping[str, set[str]]) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Tells what the framework refuses. methods: of each path."""

    async def refuse(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 400:  # noqa: PLR2004
            return problem(400, "the body is not JSON")
        path = getattr(request.scope.get("route"), "path", "")
        allowed = {"allow": ", ".join(sorted(methods.get(path, {"GET"})))} if status == 405 else {}  # noqa: PLR2004
        return problem(status, WORDS.get(status, "this cannot be done"), allowed)

    return refuse


async def _invalid(_: Request, error: Exception) -> Response:
    """A body or a query that is not what it must be; what was sent is not repeated."""
    errors: list[dict[str, Any]] = list(error.errors()) if isinstance(error, RequestValidationError) else []
    if any(each["type"] == "json_invalid" for each in errors):
        return problem(400, "the body is not JSON")
    told = [f"{'.'.join(str(part) for part in each['loc'][1:]) or each['loc'][0]}: {each['msg']}" for each in errors]
    return problem(422, "; ".join(told[:10]))


async def _broken(request: Request, error: Exception) -> Response:
    log.error("the console failed at %s %s", request.method, request.scope["path"], exc_info=error)
    return problem(500, "this failed; Tidegate's log tells more")
