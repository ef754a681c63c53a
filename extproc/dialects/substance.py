"""Whether an answer holds anything for its reader, and whether it stopped long before it had to, or says that it broke
off. The same as `render/lua/content.lua`, which does so in Envoy.

A refusal, a tool call, reasoning or an image is as good as text. Where the shape is not known, or a filter stopped the
model, nothing is concluded: an answer that is wrongly called empty would be paid for twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from extproc.dialects.noting import Notes
from extproc.dialects.scan import At, first_item, is_object, members, next_item, word

__all__ = ["event_says", "fault_of"]

STOPS = frozenset({"stop", "end_turn", "completed"})
"""Reasons to stop after which something should have been said; a filter's is none of them."""
BROKEN = frozenset({"abort", "error", "insufficient_system_resource", "network_error"})
"""Words of engines and providers for an answer that they broke off."""
CAPPED = frozenset({"length", "max_tokens", "max_output_tokens"})
SMALLEST_CAP = 4096
"""Upstreams quietly lower a cap to what the model can write, and that is never less than this many tokens."""
MANNERS = frozenset({b"role", b"type", b"name", b"id", b"signature"})
"""Members that say how rather than what."""

_EMPTY = re.compile(rb"\[\s*\]|\{\s*\}")
_CONTENT = re.compile(rb'"content"\s*:\s*"[^"]')
_TEXT = re.compile(rb'"text"\s*:\s*"[^"]')


def event_says(s: bytes, at: At) -> bool:
    """Whether the event with members `at` says anything: in Anthropic's and the Responses API's envelopes, and in whole
    answers.
    """
    if b"choices" in at:
        return _any(s, at[b"choices"], _choice_says)
    kind = word(s, at.get(b"type")) or ""
    if kind == "content_block_delta":
        return _holds(s, at.get(b"delta"))
    inner = next((at[name] for name in (b"content_block", b"item") if is_object(s, at.get(name))), None)
    if inner is not None:
        return _item_says(s, members(s, inner)[0])
    if is_object(s, at.get(b"response")):
        return _answer_says(s, members(s, at[b"response"])[0])
    return kind.startswith("response.") and _filled(s, at.get(b"delta"))


def fault_of(notes: Notes, *, says: bool, cap: float | None, stops: bool, results: bool) -> str | None:
    """What is wrong with an answer that has its end and reports no error: "broken", "empty", "short", or None.

    What the caller did: it named `cap`, the most output tokens of one choice, or `stops`, or brought `results`.
    """
    finish, out = notes.get("finish"), notes.get("out")
    if finish in BROKEN:
        return "broken"
    # A word at which it was to end may be the first of it, and Claude may have nothing to add to what tools answered.
    may_say_nothing = stops or (results and finish == "end_turn")
    hollow = finish is None or (finish in STOPS and not may_say_nothing)
    if hollow and not says and not notes.get("reasoning"):
        return "empty"
    if finish in CAPPED and cap is not None and isinstance(out, float) and out < SMALLEST_CAP and out * 2 < cap:
        return "short"
    return None


def _filled(s: bytes, i: int | None) -> bool:
    """Whether the value at `i` is a string, a list or an object with something in it."""
    first = b"" if i is None else s[i : i + 1]
    if i is None or first not in (b'"', b"[", b"{"):
        return False
    return s[i + 1 : i + 2] != b'"' if first == b'"' else _EMPTY.match(s, i) is None


def _holds(s: bytes, i: int | None) -> bool:
    """Whether the object at `i` holds more than manners."""
    if i is None or not is_object(s, i):
        return False
    return any(key not in MANNERS and _filled(s, place) for key, place in members(s, i)[0].items())


def _any(s: bytes, i: int | None, says: Callable[[bytes, At], bool]) -> bool:
    """Whether one of the objects in the list at `i` is something to `says`, which is given its members."""
    j = first_item(s, i)
    while j is not None and is_object(s, j):
        at, stop = members(s, j)
        if says(s, at):
            return True
        j = next_item(s, stop)
    return False


def _choice_says(s: bytes, at: At) -> bool:
    return _holds(s, at.get(b"message")) or _holds(s, at.get(b"delta")) or _filled(s, at.get(b"text"))


def _item_says(s: bytes, at: At) -> bool:
    """One block of Anthropic's content, one item of a Responses output, or one part of that."""
    kind = word(s, at.get(b"type"))
    if kind == "message":
        return _any(s, at.get(b"content"), _item_says)
    return kind not in ("text", "output_text") or _filled(s, at.get(b"text"))


def _answer_says(s: bytes, at: At) -> bool:
    """Whether the answer with members `at` says anything. Nearly all show it at the first look; a key is never found
    inside a string, whose quotes are escaped.
    """
    choices, blocks = at.get(b"choices"), at.get(b"content", at.get(b"output"))
    if choices is not None and _CONTENT.search(s, choices):
        return True
    if blocks is not None and _TEXT.search(s, blocks):
        return True
    return (
        _any(s, choices, _choice_says)
        or _any(s, at.get(b"content"), _item_says)
        or _any(s, at.get(b"output"), _item_says)
    )
