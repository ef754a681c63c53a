"""A JSON body and the places of its top-level members, so that it can be rewritten without being parsed twice.

A parsed body cannot be written back faithfully: numbers such as 1e400 and lone surrogates do not survive, spacing
changes, and it costs more than the parse. So a body is read member by member with the C scanner, which says where each
value ends, and a rewrite copies every member that it keeps byte for byte.

The rewritten body starts with a *head* of fixed width: the members that differ between upstreams (`model`,
`stream_options`, `priority`), padded with spaces to one width for the whole order of upstreams. When Envoy moves on to
the next upstream, that upstream's head is laid over the first bytes; the length of the body never changes.

A top-level key that occurs twice is read as its last occurrence, as every JSON reader of note does by default, and any
rewrite drops the earlier ones: otherwise a caller could be priced on one value and served on another.

Deliberately not here: what the members mean (`openai`, `anthropic`), and repeated keys deeper in the body.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from extproc.core.refusal import Reason, Rejected
from extproc.core.value import value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from extproc.core.request import Call

__all__ = ["Body", "Document", "Rewrite", "Span", "parse", "rewrite"]

MAX_MEMBERS = 1_000
MAX_STRINGS = 300_000
MAX_WORK = 650_000
"""How much a body may hold, whatever its length: parsing more would hold up everybody for some 100 ms."""

_SPACE = r"[ \t\n\r]*"
_OPEN = re.compile(_SPACE + r"\{" + _SPACE)
_KEY = re.compile(r'"([^"\\\x00-\x1f]*)"' + _SPACE + ":" + _SPACE)
_COLON = re.compile(_SPACE + ":" + _SPACE)
_AFTER = re.compile(_SPACE + "([,}])" + _SPACE)
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_STATIC_OPTIONS = '{"include_usage":true}'


class Span(NamedTuple):
    """One top-level member: its key, and the bytes from its key's quote to its value's end."""

    key: str
    start: int
    end: int


@value
class Document:
    """A request body that was read once: what it asks for, and where its members are.

    repeated: some top-level key occurs more than once. options: `stream_options` as the upstream shall see them, as
    ASCII JSON, or "" where they stay as they are.
    """

    call: Call
    body: bytes = b""
    members: tuple[Span, ...] = ()
    repeated: bool = False
    options: str = ""


@value
class Rewrite:
    """A body for the first upstream, and the head of each upstream where they differ.

    width: bytes at the start of the body that a head replaces; every head is ASCII and exactly that long.
    heads: None where one head serves the whole order.
    """

    body: bytes
    heads: Mapping[str, str] | None
    width: int


def rewrite(
    document: Document,
    names: Mapping[str, str],
    order: Sequence[str],
    *,
    priorities: Mapping[str, int] | None = None,
) -> Rewrite | None:
    """Give the body that the upstreams of `order` need, or None where the client's own bytes may pass.

    names: upstream -> its own name for the model; absent means the name the client used.
    priorities: upstream -> engine priority to set. None leaves the client's `priority` alone; a mapping, even an empty
    one, makes the key ours, and the client's is dropped.
    """
    call = document.call
    if not call.model:
        return None
    given = priorities is not None and any(span.key == "priority" for span in document.members)
    plain = not (document.options or document.repeated or priorities or given)
    if plain and all(names.get(upstream, call.model) == call.model for upstream in order):
        return None
    models = tuple([names.get(upstream, call.model) for upstream in order]) or (call.model,)
    ours = tuple([(priorities or {}).get(upstream) for upstream in order]) or (None,)
    heads = _heads(models, document.options, ours)
    body = b"".join([heads[0].encode("ascii"), *_rest(document, drop_priority=priorities is not None), b"}"])
    same = heads.count(heads[0]) == len(heads)
    return Rewrite(body, None if same else dict(zip(order, heads, strict=True)), len(heads[0]))


@lru_cache(maxsize=1_024)
def _heads(models: tuple[str, ...], options: str, priorities: tuple[int | None, ...]) -> tuple[str, ...]:
    """The head of each upstream of an order, all of one width."""
    heads = [_head(model, options, priority) for model, priority in zip(models, priorities, strict=True)]
    width = max(map(len, heads))
    return tuple(head.ljust(width) for head in heads)


def _head(model: str, options: str, priority: int | None) -> str:
    head = '{"model":' + json.dumps(model)
    if options:
        head += ',"stream_options":' + options
    return head if priority is None else f'{head},"priority":{priority}'


def _rest(document: Document, *, drop_priority: bool) -> Iterator[bytes]:
    """Copy the members that the head does not hold, each preceded by its comma."""
    owned = {"model"}
    if document.options:
        owned.add("stream_options")
    if drop_priority:
        owned.add("priority")
    members, body = document.members, document.body
    if document.repeated:
        members = tuple({span.key: span for span in members}.values())
    for key, start, end in members:
        if key not in owned:
            yield b","
            yield body[start:end]


class Body:
    """A JSON object while it is being read: the values of its members, and their text as the client wrote it."""

    __slots__ = ("_places", "_text", "repeated", "values")

    def __init__(self, text: str, places: list[tuple[str, int, int, int]], values: dict[str, Any]) -> None:
        """Keep the last occurrence of each key."""
        self._text = text
        self._places = places
        self.values = values
        self.repeated = len(values) < len(places)

    def json_text(self, key: str) -> str:
        """Return the text of a member's value as compact JSON, the way a model would be shown it."""
        at, end = next((at, end) for name, _, at, end in reversed(self._places) if name == key)
        text = self._text[at:end]
        # Escapes and indentation are an encoder's habit; the provider renders the schema in its own way.
        return compact(self.values[key]) if "\\u" in text or "\n" in text else text

    def spans(self) -> tuple[Span, ...]:
        """Return where the members are, in bytes of the UTF-8 body."""
        text = self._text
        if text.isascii():
            return tuple(Span(key, start, end) for key, start, _, end in self._places)
        spans, here, offset = [], 0, 0
        for key, start, _, end in self._places:
            first = offset + len(text[here:start].encode())
            here, offset = end, first + len(text[start:end].encode())
            spans.append(Span(key, first, offset))
        return tuple(spans)


def compact(value: object) -> str:
    """Write a parsed value as JSON without spaces or escapes, for counting only."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def with_usage(options: dict[str, Any]) -> str:
    """Merge `include_usage` into the client's own stream options; the answer is ASCII JSON."""
    if not options:
        return _STATIC_OPTIONS
    try:
        return json.dumps({**options, "include_usage": True}, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise Rejected(Reason.BAD_REQUEST, "stream_options holds a number that is out of range") from error


def parse(body: bytes) -> Body:
    """Read a request body, or say in a safe sentence why it is not one JSON object."""
    if not body:
        raise Rejected(Reason.BAD_REQUEST, "the body is empty")
    if _takes_long(body):
        raise Rejected(Reason.BAD_REQUEST, "the body holds too many values")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise Rejected(Reason.BAD_REQUEST, f"the body is not UTF-8 at byte {error.start}") from error
    try:
        return _members(text)
    except json.JSONDecodeError as error:
        raise _not_json(error.pos, error.msg) from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise Rejected(Reason.BAD_REQUEST, "the body holds a number that is too long") from error


def _takes_long(body: bytes) -> bool:
    """Tell a body that is made of a million tiny values from a long one. What stands inside texts is free."""
    if 5 * len(body) < MAX_WORK:
        return False
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_STRINGS:
        return True
    return _work(body) > MAX_WORK and _work(_STRING.sub(b"", body)) > MAX_WORK


def _work(body: bytes) -> int:
    """Count values; a list, an object or a key takes as long as five numbers."""
    return body.count(b",") + 5 * (body.count(b"[") + body.count(b"{") + body.count(b":"))


def _members(text: str) -> Body:
    opened = _OPEN.match(text)
    if opened is None:
        raise Rejected(Reason.BAD_REQUEST, "the body is not a JSON object")
    at = opened.end()
    places: list[tuple[str, int, int, int]] = []
    values: dict[str, Any] = {}
    closed = text.startswith("}", at)
    at += closed
    while not closed:
        start = at
        named = _KEY.match(text, at)
        key, at = (named[1], named.end()) if named else _escaped_key(text, at)
        value, end = _DECODE(text, at)
        places.append((key, start, at, end))
        values[key] = value
        after = _AFTER.match(text, end)
        if after is None:
            raise _not_json(end, "Expecting ',' or '}'")
        at = after.end()
        closed = after[1] == "}"
        if len(places) > MAX_MEMBERS:
            raise Rejected(Reason.BAD_REQUEST, f"the body has more than {MAX_MEMBERS} members")
    if text[at:].strip(" \t\n\r"):
        raise _not_json(at, "Extra data")
    return Body(text, places, values)


def _escaped_key(text: str, at: int) -> tuple[str, int]:
    if not text.startswith('"', at):
        raise _not_json(at, "Expecting a key in double quotes")
    key, end = _DECODE(text, at)
    colon = _COLON.match(text, end)
    if colon is None:
        raise _not_json(end, "Expecting ':'")
    return key, colon.end()


def _not_json(at: int, what: str) -> Rejected:
    return Rejected(Reason.BAD_REQUEST, f"the body is not JSON: {what} (character {at})")


def _no_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity: they are not JSON, and providers refuse them too."""
    raise Rejected(Reason.BAD_REQUEST, f"the body is not JSON: {name} is not a number")


_DECODE = json.JSONDecoder(parse_constant=_no_constant).raw_decode
