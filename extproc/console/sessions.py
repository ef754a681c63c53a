"""Look at one agent session and let it use more: over the loopback console, and from the command line.

    GET  /sessions/{tenant}/{id}
    POST /sessions/{tenant}/{id}    {"add_tokens": 50000, "add_usd": 2.5}

Both answer with what the session used, may use and has left. Names are quoted as in any URL, their slashes as %2F.

There is no password: whoever reaches the console may do this. A web page in the operator's browser can reach it, too,
so what a page can send without being asked first is refused: other media types than JSON, requests that the browser
marks as another site's, and host names that are neither this machine's nor the console's own (a name that was made to
point here).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from http.client import HTTPException
from ipaddress import ip_address
from math import isfinite
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from aiohttp import web

from extproc.allowances import Allowances

__all__ = ["ConsoleError", "ask", "routes", "told"]

MOST_TOKENS, MOST_USD = 10**12, 10**9
TIMEOUT_S = 5.0

Handler = Callable[[web.Request], Awaitable[web.Response]]


class ConsoleError(Exception):
    """Why the console of a running Tidegate did not do what was asked, in words for who asked."""


def routes(allowances: Allowances, console: str) -> list[web.RouteDef]:
    """What the console serves of sessions; `console` is its own address, host:port."""

    async def look(request: web.Request) -> web.Response:
        return _told(allowances.look(*_names(request)))

    async def add(request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            return _problem(415, "content-type must be application/json")
        try:
            tokens, usd = _wanted(await request.read())
            return _told(await allowances.add(*_names(request), tokens, usd))
        except ValueError as error:
            return _problem(400, str(error))

    def guarded(handler: Handler) -> Handler:
        async def guard(request: web.Request) -> web.Response:
            return _problem(403, "not for web pages") if _from_a_page(request, console) else await handler(request)

        return guard

    path = "/sessions/{tenant}/{id}"
    return [web.get(path, guarded(look), allow_head=False), web.post(path, guarded(add))]


def ask(console: str, tenant: str, session: str, *, tokens: int = 0, usd: float = 0.0) -> dict[str, Any]:
    """A session as the Tidegate at `console` (host:port) knows it, after adding so much. ConsoleError tells why not."""
    wanted = {name: amount for name, amount in (("add_tokens", tokens), ("add_usd", usd)) if amount}
    place = f"127.0.0.1{console}" if console.startswith(":") else console
    url = f"http://{place}/sessions/{quote(tenant, safe='')}/{quote(session, safe='')}"
    request = Request(url, json.dumps(wanted).encode() if wanted else None, {"content-type": "application/json"})
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as response:
            return dict(json.loads(response.read()))
    except HTTPError as error:
        raise ConsoleError(_said(error)) from None
    except (URLError, OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConsoleError(f"no Tidegate answers at {console}: {reason}") from None


def told(session: dict[str, Any]) -> str:
    """A session as `ask` gives it, in words."""
    served = "served" if session["served"] else "never served"
    recency = f"{session['running']} running, silent for {session['silent_s']:g} s"
    lines = [f"session {session['session']} of tenant {session['tenant']}: {served}, {recency}"]
    for name, digits in (("tokens", 0), ("usd", 6)):
        budget = session[name]
        if budget is None:
            lines.append(f"  {name:<7}no limit")
        else:
            used, limit, left = (f"{budget[key]:,.{digits}f}" for key in ("used", "limit", "left"))
            lines.append(f"  {name:<7}{used} of {limit} used, {left} left")
    return "\n".join(lines)


def _names(request: web.Request) -> tuple[str, str]:
    return request.match_info["tenant"], request.match_info["id"]


def _told(session: dict[str, Any] | None) -> web.Response:
    return _problem(404, "no such session is known") if session is None else web.json_response(session)


def _problem(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)


def _wanted(body: bytes) -> tuple[int, float]:
    """Tokens and dollars to add. ValueError says what is wrong with the body."""
    try:
        wanted = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise ValueError("the body is not JSON") from None
    if not isinstance(wanted, dict) or not wanted or wanted.keys() - {"add_tokens", "add_usd"}:
        raise ValueError("the body must be an object with add_tokens, add_usd or both, and nothing else")
    tokens, usd = wanted.get("add_tokens", 0), wanted.get("add_usd", 0.0)
    if "add_tokens" in wanted and (type(tokens) is not int or not 0 < tokens <= MOST_TOKENS):
        raise ValueError(f"add_tokens must be a whole number from 1 to {MOST_TOKENS}")
    if "add_usd" in wanted and (type(usd) not in (int, float) or not 0 < usd <= MOST_USD or not isfinite(usd)):
        raise ValueError(f"add_usd must be a number of dollars above 0, up to {MOST_USD}")
    return tokens, float(usd)


def _no_number(constant: str) -> float:
    raise ValueError(constant)


def _from_a_page(request: web.Request, console: str) -> bool:
    """Whether a browser sends this for a page of another site, or to a name that was made to point here."""
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    host, origin = _host(f"//{request.headers.get('host', '')}"), request.headers.get("origin")
    if origin is not None and _host(origin) != host:
        return True
    return host not in ("localhost", _host(f"//{console}")) and not _is_address(host)


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


def _said(error: HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"the console answered {error.code}"
