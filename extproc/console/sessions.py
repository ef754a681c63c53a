"""One agent session: what may be added to it, and how the command line asks and tells.

    GET  /sessions/{tenant}/{id}
    POST /sessions/{tenant}/{id}    {"add_tokens": 50000, "add_usd": 2.5}

Both answer with what the session used, may use and has left. Names are quoted as in any URL, their slashes as %2F.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

from extproc.console.asking import Access, quoted
from extproc.console.asking import ask as ask_console
from extproc.console.audit import MOST_REASON
from extproc.console.terminal import harmless

__all__ = ["MOST_TOKENS", "MOST_USD", "ask", "told", "wanted"]

MOST_TOKENS, MOST_USD = 10**12, 10**9


def ask(access: Access, tenant: str, session: str, *, tokens: int = 0, usd: float = 0.0) -> dict[str, Any]:
    """A session as a running Tidegate knows it, after adding so much. ConsoleError tells why not."""
    wanted = {name: amount for name, amount in (("add_tokens", tokens), ("add_usd", usd)) if amount}
    path = f"/sessions/{quoted(tenant)}/{quoted(session)}"
    return dict(ask_console(access, "POST" if wanted else "GET", path, wanted or None))


def told(session: dict[str, Any]) -> str:
    """A session as `ask` gives it, in words."""
    served = "served" if session["served"] else "never served"
    recency = f"{session['running']} running, silent for {session['silent_s']:g} s"
    lines = [harmless(f"session {session['session']} of tenant {session['tenant']}: {served}, {recency}")]
    for name, digits in (("tokens", 0), ("usd", 6)):
        budget = session[name]
        if budget is None:
            lines.append(f"  {name:<7}no limit")
        else:
            used, limit, left = (f"{budget[key]:,.{digits}f}" for key in ("used", "limit", "left"))
            lines.append(f"  {name:<7}{used} of {limit} used, {left} left")
    return "\n".join(lines)


def wanted(body: bytes) -> tuple[int, float, str]:
    """Tokens and dollars to add, and why. ValueError says what is wrong with the body."""
    try:
        given = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise ValueError("the body is not JSON") from None
    if not isinstance(given, dict) or not given or given.keys() - {"add_tokens", "add_usd", "reason"}:
        raise ValueError("the body must be an object with add_tokens, add_usd or both, and nothing else but a reason")
    tokens, usd, reason = given.get("add_tokens", 0), given.get("add_usd", 0.0), given.get("reason", "")
    if type(tokens) is float and tokens.is_integer():
        tokens = int(tokens)  # JSON makes no difference
    if "add_tokens" in given and (type(tokens) is not int or not 0 < tokens <= MOST_TOKENS):
        raise ValueError(f"add_tokens must be a whole number from 1 to {MOST_TOKENS}")
    if "add_usd" in given and (type(usd) not in (int, float) or not 0 < usd <= MOST_USD or not isfinite(usd)):
        raise ValueError(f"add_usd must be a number of dollars above 0, up to {MOST_USD}")
    if type(reason) is not str or len(reason) > MOST_REASON:
        raise ValueError(f"reason must be a text of at most {MOST_REASON} characters")
    if not (tokens or usd):
        raise ValueError("the body must have add_tokens, add_usd or both")
    return tokens, float(usd), reason


def _no_number(constant: str) -> float:
    raise ValueError(constant)
