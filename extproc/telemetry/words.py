"""Names of counters, and other short facts, in the words of an operator. Nothing here can do harm in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from extproc.core.events import PassedOver, Why
from extproc.telemetry.keys import parts_of

__all__ = ["clean", "key_words", "keys_words", "plain", "seconds", "why_not"]

AT_UPSTREAM = {
    "total": "tokens a minute",
    "input": "input tokens a minute",
    "output": "output tokens a minute",
    "requests": "requests a minute",
    "slots": "a free slot",
    "kv": "room in the KV cache",
    "breaker": "the breaker",
    "out": "an operator's leave",
}
DOLLARS = {
    "usd_hour": "dollars an hour",
    "usd_day": "dollars a day",
    "usd_month": "dollars a month",
    "usd": "dollars",
    "tokens": "tokens",
}
OF_TENANT = {**AT_UPSTREAM, "slots": "requests at a time"}
BOUNDS = {
    "paused": "the end of the pause",
    "max_requests": "requests in line",
    "max_tokens": "tokens in line",
    "max_bytes": "bytes in line",
}
WHY_NOT = {
    Why.DIALECT: "does not speak the API of the request",
    Why.ABILITY: "cannot do all that the request needs",
    Why.PINNED: "does not have the state that the request goes on from",
    Why.TOO_LARGE: "is too small for the request: its context window or a limit per minute",
    Why.SIZES: "answers prompts of this size badly of late",
    Why.BUSY: "had no room when the request's turn came, and has some again",
    Why.BEHIND: "comes after one without room",
    Why.ORDER: "is in none of the orders that Envoy was told",
    Why.HOLD: "had no part in it: the lane holds for its first choice (when_busy: hold)",
    Why.TURN: "had room, but others came first",
}
LONGEST = 300
"""Characters of one text that are shown."""
DIGITS = 6
"""A microsecond, or a millionth of a dollar, is shown."""


def key_words(key: str) -> str:
    """What a counter counts and whose it is: `upstream/primary/*/total` is "tokens a minute of primary"."""
    parts = parts_of(key)
    name, kind, words = parts.name, parts.kind, DOLLARS.get(parts.kind, parts.kind)
    match parts.of:
        case "upstream":
            at = "to use" if kind == "out" else "at" if kind in ("slots", "kv") else "of"
            found = f"{AT_UPSTREAM.get(kind, words)} {at} {name}" + (f" for {parts.model}" if parts.model else "")
        case "tenant":
            found = f"{OF_TENANT.get(kind, words)} of tenant {name}"
        case "session":
            found = f"{words} of a session of tenant {name}"
        case "route":
            found = f"{words} of the route of {name}"
        case "lane":
            found = f"{BOUNDS.get(kind, kind)} of lane {name}"
        case _:
            found = key
    return clean(found)


def keys_words(keys: Iterable[str]) -> str:
    """The same of several: "a, b and c"."""
    *first, last = [key_words(key) for key in keys] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def why_not(passed: PassedOver) -> str:
    """Why an upstream was passed over, as half a sentence about it."""
    lacking = keys_words(passed.keys)
    due = "" if passed.wait_s is None or not isfinite(passed.wait_s) else f" in {seconds(passed.wait_s)}"
    match passed.why:
        case Why.DOLLARS:
            return f"costs dollars that are spent{f': {lacking}' if lacking else ''}"
        case Why.BREAKER | Why.SLOW:
            return _breaker(passed, due)
        case Why.NO_ROOM:
            return f"had no room: {lacking}{due}"
        case why:
            return WHY_NOT[why]


def _breaker(passed: PassedOver, due: str) -> str:
    late = ", for its first tokens are late" if passed.why is Why.SLOW else ""
    match passed.state:
        case "out":
            return "was taken out of use by an operator" + (f"; it may be asked again{due}" if due else "")
        case "half_open":
            return f"is being tried after a rest{late}"
        case "ramping":
            return f"takes traffic back by and by, and had enough of it{late}"
        case _:
            return f"rests: its breaker is {passed.state or 'open'}{late}" + (f"; it may be tried{due}" if due else "")


def seconds(number: float) -> str:
    """A time as people say it: "12 ms", "3.4 s", "5 min 20 s"."""
    if not isfinite(number):
        return "nobody knows how long"
    if number < 1.0:
        return f"{number * 1000:.0f} ms"
    if number < 120.0:  # noqa: PLR2004 - two minutes
        return f"{number:.1f} s"
    minutes, rest = divmod(round(number), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def clean(text: str) -> str:
    """The text without what a terminal may obey, and not longer than fits into a line or two."""
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def plain(value: Any) -> Any:
    """The same as data that JSON knows: no infinite numbers, no objects; texts are `clean`."""
    match value:
        case None | bool() | int():
            return value
        case float():
            return round(value, DIGITS) if isfinite(value) else None
        case str():
            return clean(str(value))
        case dict() | Mapping():
            return {clean(str(key)): plain(one) for key, one in value.items()}
        case list() | tuple() | set() | frozenset():
            found = [plain(one) for one in value]
            return sorted(found, key=str) if isinstance(value, (set, frozenset)) else found
        case _:
            return clean(str(value))
