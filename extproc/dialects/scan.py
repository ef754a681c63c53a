"""Reading single members of JSON text without decoding the rest, as `render/lua/json.lua` does in Envoy.

Positions are byte positions; None where the text is cut short or is no JSON. Keys are compared as written: providers do
not escape theirs.
"""

from __future__ import annotations

import re

__all__ = ["At", "first_item", "is_object", "is_string", "members", "next_item", "number", "string_at", "word"]

At = dict[bytes, int]
"""Where each member's value starts, by key."""

LONGEST_WORD, LONGEST_TEXT = 64, 1024

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.DOTALL)
_PLAIN = re.compile(rb"[A-Za-z0-9.+-]+")
_OPENED = re.compile(rb"\{\s*")
_COLON = re.compile(rb"\s*:\s*")
_NEXT = re.compile(rb"\s*([,}])\s*")
_FIRST_ITEM = re.compile(rb"\[\s*")
_NEXT_ITEM = re.compile(rb"\s*,\s*")
_ODD = re.compile(rb"[^A-Za-z0-9_.-]")
_NUMERAL = re.compile(rb"-?[0-9][0-9.]*")
_WHOLE = re.compile(rb"[0-9]+")


def members(s: bytes, i: int) -> tuple[At, int | None]:
    """The members of the object opened at `i`, and the position after the object.

    Of a key written twice the last counts. An object that is cut short gives the members that were read.
    """
    at: At = {}
    opened = _OPENED.match(s, i)
    if opened is None:
        return at, None
    j = opened.end()
    if s[j : j + 1] == b"}":
        return at, j + 1
    while s[j : j + 1] == b'"':
        key = _STRING.match(s, j)
        colon = _COLON.match(s, key.end()) if key else None
        stop = _past(s, colon.end()) if colon else None
        if key is None or colon is None or stop is None:
            return at, None
        at[key.group()[1:-1]] = colon.end()
        following = _NEXT.match(s, stop)
        if following is None:
            return at, None
        if following[1] == b"}":
            return at, following.end()
        j = following.end()
    return at, None


def is_object(s: bytes, i: int | None) -> bool:
    """Whether an object is opened at `i`."""
    return i is not None and s[i : i + 1] == b"{"


def is_string(s: bytes, i: int | None) -> bool:
    """Whether a string is opened at `i`."""
    return i is not None and s[i : i + 1] == b'"'


def first_item(s: bytes, i: int | None) -> int | None:
    """Where the first item of the list opened at `i` would be."""
    found = None if i is None else _FIRST_ITEM.match(s, i)
    return found.end() if found else None


def next_item(s: bytes, stop: int | None) -> int | None:
    """Where the item behind one that ends at `stop` is."""
    found = None if stop is None else _NEXT_ITEM.match(s, stop)
    return found.end() if found else None


def word(s: bytes, i: int | None) -> str | None:
    """The string at `i` as a word that fits in a header or a label: at most 64 of letters, digits, dot, dash,
    underscore. A number is taken as it is written, cut to the same length; anything else is None.
    """
    if i is None:
        return None
    if is_string(s, i):
        found = _STRING.match(s, i)
        if found is None or found.end() == i + 2:
            return None
        return _ODD.sub(b"_", s[i + 1 : min(found.end() - 1, i + 1 + LONGEST_WORD)]).decode("ascii")
    digits = _NUMERAL.match(s, i)
    return digits.group()[:LONGEST_WORD].decode("ascii") if digits else None


def number(s: bytes, i: int | None) -> float | None:
    """The whole number at `i`."""
    found = None if i is None else _WHOLE.match(s, i)
    return float(found.group()) if found else None


def string_at(s: bytes, i: int | None) -> bytes:
    """The string at `i`, cut to a length in which a message says what it has to say; empty where there is none."""
    found = _STRING.match(s, i) if i is not None and is_string(s, i) else None
    return s[i + 1 : min(found.end() - 1, i + 1 + LONGEST_TEXT)] if found and i is not None else b""


def _past(s: bytes, i: int) -> int | None:
    """Position after the value that starts at `i`."""
    first = s[i : i + 1]
    if first in (b"{", b"["):
        return _past_container(s, i)
    found = _STRING.match(s, i) if first == b'"' else _PLAIN.match(s, i)
    return found.end() if found else None


def _past_container(s: bytes, i: int) -> int | None:
    """Position after the object or list opened at `i`. Which kind of bracket closes it is not looked at."""
    depth, j = 0, i
    while True:
        found = _MARK.search(s, j)
        if found is None:
            return None
        first, j = found.group(), found.end()
        if first in (b"{", b"["):
            depth += 1
        elif first in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return j
        elif first == b'"':
            return None
