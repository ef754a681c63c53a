"""What stands before everything that the console serves: no endless bodies, no pages of other sites, safe headers.

A web page in an operator's browser can reach what is on loopback. So what a browser marks as another site's is refused,
and on loopback also what is asked by a host name that is neither this machine's nor the console's own (a name that was
made to point here). Elsewhere whoever reads has to prove who it is, which a page of another site cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from extproc.console.answers import problem

__all__ = ["HEADERS", "Guard", "from_a_page", "unread"]

MOST_BODY = 16_384
"""Bytes of a request's body."""
MOST_HEAD = 16_384
"""Bytes of its headers."""
STREAM = "/api/v1/stream"
"""What is asked for here without its body would have no end, and nothing to show for it."""
MOST_DISCARDED = 1_048_576
"""So much of a body that is too long is read and thrown away: who still sends does not see the answer."""
BODY_S = 5.0
"""So long a body may take to come."""
LAST = "last"
"""Where it is noted, in a request's state, that the connection must not be used again."""
UNREAD = "unread"
"""Where it is noted why a body was not taken."""
WORDS = {
    400: "the body did not come whole",
    408: "the body took too long",
    413: f"a body has at most {MOST_BODY} bytes",
}
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    b"content-security-policy": CSP.encode(),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-store",
}

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: App) -> None:
        """Everything that it lets pass goes to `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Its path is left as it was quoted, so that a slash in a name stays one of the name."""
        if scope["type"] != "http":
            return
        headers = {name: given for name, given in scope["headers"] if name in (b"content-length", b"transfer-encoding")}
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        last = LAST in scope.get("state", {})
        scope = {**scope, "path": _ascii(scope.get("raw_path") or scope["path"].encode())}
        if sum(len(name) + len(given) for name, given in scope["headers"]) > MOST_HEAD:
            await problem(431, f"a head has at most {MOST_HEAD} bytes")(scope, receive, _with_headers(send, last=True))
            return
        if scope["method"] == "HEAD" and scope["path"] != STREAM:
            scope["method"] = "GET"  # the server leaves the body out
        if scope["method"] == "GET":
            await self._app(scope, receive, _with_headers(send, last=last or has_body))
            return
        body = await _body(headers.get(b"content-length"), receive) if has_body else b""
        if isinstance(body, int):
            scope["state"] = {**scope.get("state", {}), UNREAD: body}
            await self._app(scope, _replayed(b"", receive), _with_headers(send, last=True))
            return
        await self._app(scope, _replayed(body, receive), _with_headers(send, last=last))


def unread(state: Mapping[str, Any]) -> tuple[int, str] | None:
    """Status and words for a request whose body was not taken; to be told to whoever has proven that it may act.

    state: of its scope.
    """
    status = state.get(UNREAD)
    if status is None:
        return None
    return status, WORDS[status]


def from_a_page(headers: Mapping[str, str], console: str, *, loopback: bool) -> bool:
    """Whether a browser sends this for a page of another site, or to a name that was made to point here.

    console: host:port that is listened on; loopback: nobody from outside reaches it.
    """
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    host, origin = _host(f"//{headers.get('host', '')}"), headers.get("origin")
    if origin is not None and _host(origin) != host:
        return True
    return loopback and host not in ("localhost", _host(f"//{console}")) and not _is_address(host)


def _ascii(path: bytes) -> str:
    return path.decode("ascii", "replace")


async def _body(length: bytes | None, receive: Receive) -> bytes | int:
    """A whole body, or the status of the answer to one that is too long, too slow, or ends before its end.

    What came of that last one may say another thing than what was meant: no body at all, that something has no end.
    """
    if length is not None and length.isdigit() and int(length[:12]) > MOST_DISCARDED:
        return 413
    read, kept = 0, bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return 400
                piece = message.get("body", b"")
                read += len(piece)
                if read <= MOST_BODY:
                    kept += piece
                if not message.get("more_body") or read > MOST_DISCARDED:
                    break
    except TimeoutError:
        return 408
    return 413 if read > MOST_BODY else bytes(kept)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body at once; then whatever else comes, which is that the client leaves."""
    told = False

    async def replay() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _with_headers(send: Send, *, last: bool) -> Send:
    """Add what every answer has, unless it has its own. last: the connection cannot be used again."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", ()))
            names = {name for name, _ in given}
            given += [(name, told) for name, told in HEADERS.items() if name not in names]
            message["headers"] = [*given, (b"connection", b"close")] if last else given
        await send(message)

    return sending


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
