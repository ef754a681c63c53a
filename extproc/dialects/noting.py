"""What an answer says of itself, in the OpenAI, Responses and Anthropic shapes, in the words of `llm.tail`.

The words, and how they are found, are those of `render/lua/usage.lua` and `words.lua`, which do the same in Envoy; a
test plays both the same streams.
"""

from __future__ import annotations

import re

from extproc.dialects.scan import (
    At,
    first_item,
    is_object,
    is_string,
    members,
    next_item,
    number,
    string_at,
    word,
)

__all__ = ["ENDS", "Notes", "code_of", "flat_error", "note", "note_members", "note_usage", "words_of"]

Notes = dict[str, str | float]

ENDS = frozenset({"completed", "incomplete", "failed", "cancelled"})
PARTS = (b"choices", b"content", b"content_block", b"delta", b"item", b"output", b"part", b"response")
"""Members of an answer, and of an event that carries a part of one."""
FAILS = 400

_NUMBERS = (
    ("in", b"prompt_tokens"),
    ("in", b"input_tokens"),
    ("out", b"completion_tokens"),
    ("out", b"output_tokens"),
    ("cached", b"cache_read_input_tokens"),
    ("cached", b"prompt_cache_hit_tokens"),
    ("cache_write", b"cache_creation_input_tokens"),
)
_DETAILS = (
    ("cached", b"prompt_tokens_details", b"cached_tokens"),
    ("cached", b"input_tokens_details", b"cached_tokens"),
    ("reasoning", b"completion_tokens_details", b"reasoning_tokens"),
    ("reasoning", b"output_tokens_details", b"reasoning_tokens"),
)
_TEXTS = tuple(
    (re.compile(pattern), code)
    for pattern, code in (
        (rb"your credit balance", "credit_balance_too_low"),
        (rb"your prepayment credits", "credit_balance_too_low"),
        (rb"your team [a-z0-9-]+ has [a-z ]*used all available credits", "credit_balance_exhausted"),
        (rb"[a-z' ]*spend limit", "spend_limit_reached"),
        (rb"you have reached your specified [a-z ]*usage limits", "spend_limit_reached"),
        (rb"api key not valid", "API_KEY_INVALID"),
        (rb"api key expired", "API_KEY_INVALID"),
        (rb"incorrect api key provided", "invalid_api_key"),
        (rb"content violates usage guidelines", "content_policy_violation"),
        (rb"the model [`'\"][^`'\"]+[`'\"] does not exist", "model_not_found"),
    )
)
"""What some providers say in the message of an error alone, and the code we give it.

Messages quote what a caller wrote: what we look for must stand at the start, in plain words, or any caller could have
an upstream taken out.
"""
_NUMERAL = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?", re.ASCII)
_HEX = re.compile(r"-?0[xX][0-9a-fA-F]+")
_STRUCTURED = re.compile(rb'["{\[]')


def note(notes: Notes, key: str, found: str | None) -> None:
    """Note a word; that there is none is noted, too."""
    if found is None:
        notes.pop(key, None)
    else:
        notes[key] = found


def note_members(s: bytes, at: At, notes: Notes) -> None:
    """Note what the answer or event with members `at` says."""
    note_usage(s, at.get(b"usage"), notes)
    if b"choices" in at:
        _note_choices(s, at[b"choices"], notes)
    error = at.get(b"error")
    if is_object(s, error) or word(s, error):
        notes["error"] = _error_word(s, error)
    if is_string(s, at.get(b"stop_reason")):
        note(notes, "finish", word(s, at[b"stop_reason"]))
    if b"output" in at and b"status" in at:
        _note_response(s, at, notes)


def note_usage(s: bytes, i: int | None, notes: Notes) -> None:
    """Note the usage object at `i`.

    Usage is cumulative wherever it is sent more than once, so the largest counts; adding it up would count twice.
    """
    if i is None or not is_object(s, i):
        return
    at, _ = members(s, i)
    for key, name in _NUMBERS:
        _most(notes, key, number(s, at.get(name)))
    # Gemini leaves its thinking out of `completion_tokens`, and bills it.
    sent, total = number(s, at.get(b"prompt_tokens")), number(s, at.get(b"total_tokens"))
    if sent is not None and total is not None and b"completion_tokens" in at:
        _most(notes, "out", total - sent)
    for key, outer, inner in _DETAILS:
        if is_object(s, at.get(outer)):
            _most(notes, key, number(s, members(s, at[outer])[0].get(inner)))


def words_of(s: bytes, at: At) -> str:
    """`type/code` of the error with members `at`; a dash stands for what it does not name."""
    message = string_at(s, at.get(b"message")) or string_at(s, at.get(b"detail"))
    code = code_of(message) or _first_word(s, at, b"code", b"statusCode", b"status_code")
    return f"{_first_word(s, at, b'type', b'__type', b'error_type', b'status') or '-'}/{code or '-'}"


def code_of(message: bytes) -> str | None:
    """The code of a message."""
    message = message.lower()
    return next((code for text, code in _TEXTS if text.match(message)), None)


def flat_error(s: bytes, at: At) -> bool:
    """Whether the object with members `at` is an error that has no member `error`: vLLM's `object`, a type, FastAPI's
    `detail`, or a message with a code or a status of failure, or all alone. Progress is told in messages, too.
    """
    if any(name in at for name in PARTS):
        return False
    kind = word(s, at.get(b"type")) or word(s, at.get(b"object")) or ""
    if "error" in (kind, word(s, at.get(b"object"))):
        return True
    if kind.startswith("response."):
        return False
    if b"detail" in at and _STRUCTURED.match(s, at[b"detail"]):
        return True
    return string_at(s, at.get(b"message")) != b"" and (_says_error(kind, at) or _is_failure(s, at) or len(at) == 1)


def _says_error(kind: str, at: At) -> bool:
    return "error" in kind or "Error" in kind or kind.endswith("Exception") or b"__type" in at or b"error_type" in at


def _is_failure(s: bytes, at: At) -> bool:
    """Whether its code, or the first status that it has, is none of success."""
    numbers = (number(s, at.get(name)) for name in (b"status", b"statusCode", b"status_code"))
    status = next((one for one in numbers if one is not None), None)
    return _is_wrong(word(s, at.get(b"code"))) or (status is not None and not 0 <= status < FAILS)


def _most(notes: Notes, key: str, found: float | None) -> None:
    known = notes.get(key, -1.0)
    if found is not None and isinstance(known, float) and found > known:
        notes[key] = found


def _first_word(s: bytes, at: At, *names: bytes) -> str | None:
    return next((found for name in names if (found := word(s, at.get(name)))), None)


def _error_word(s: bytes, i: int | None) -> str:
    """The same as `words_of`, of the error object or bare error word at `i`."""
    if i is not None and is_object(s, i):
        return words_of(s, members(s, i)[0])
    return f"{word(s, i) or '-'}/{code_of(string_at(s, i)) or '-'}"


def _is_wrong(code: str | None) -> bool:
    """Whether `code` is no status of success."""
    if code is None:
        return False
    status = float(code) if _NUMERAL.fullmatch(code) else float(int(code, 16)) if _HEX.fullmatch(code) else None
    return status is None or not 0 <= status < FAILS


def _note_choices(s: bytes, i: int, notes: Notes) -> None:
    j = first_item(s, i)
    while j is not None and is_object(s, j):
        at, stop = members(s, j)
        reason = at.get(b"finish_reason")
        if is_string(s, reason) and (finish := word(s, reason)):
            notes["finish"] = finish
        j = next_item(s, stop)


def _note_response(s: bytes, at: At, notes: Notes) -> None:
    """A Responses API object, alone or inside an event."""
    status = word(s, at[b"status"])
    if status not in ENDS:
        return
    details, reason = at.get(b"incomplete_details"), None
    if details is not None and is_object(s, details):
        reason = word(s, members(s, details)[0].get(b"reason"))
    note(notes, "finish", reason or status)
    notes["done"] = "1"
    note(notes, "state", word(s, at.get(b"id")))
