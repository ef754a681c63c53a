"""The end of a streamed answer, seen on its way to the client, as `render/lua/tail.lua` sees it inside Envoy.

Usage, finish reason, [DONE] and errors are noted; the usage chunk is taken out where the client did not ask for it; a
stream that just stops gets a word of why, and so does one that ends with an error about our account, or with one that
the caller's SDK would read past, in place of that. What is done, what is not, and why: see the Lua. A test plays both
the same streams, cut anywhere; whoever changes one changes the other.

Never more is held than one event of at most 1 MiB.
"""

from __future__ import annotations

import re

from extproc.dialects.errors import words_about_us
from extproc.dialects.noting import (
    ENDS,
    Notes,
    code_of,
    flat_error,
    note,
    note_members,
    note_usage,
    words_of,
)
from extproc.dialects.scan import At, is_object, is_string, members, word
from extproc.dialects.substance import event_says, fault_of

__all__ = ["Tail"]

LIMIT = 1 << 20
MARK = "\ufeff".encode()
CUT = {
    "openai": b'data: {"error": {"message": "The upstream ended its answer early. Please try again.", '
    b'"type": "server_busy", "param": null, "code": "SERVER_OVERLOADED", "reason": "upstream_failed"}}\n\n',
    "anthropic": b'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error", '
    b'"message": "The upstream ended its answer early. Please try again.", "reason": "upstream_failed"}}\n\n',
}
OURS = frozenset(words_about_us())

_BOUNDARY = re.compile(rb"\n\r?\n")
_ENDS_WHOLE = re.compile(rb"\n\r?\n\Z")
_BARE_CR = re.compile(rb"\r[^\n]")
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"|"usage"\s*:\s*\{')
_MATTERS = (b"error", b'"stop_reason"', b'"response"', b"[DONE]", b'"message', b'"detail"')
_LINE = re.compile(rb"[^\r\n]+")
_DATA = re.compile(rb"data: ?")
_BARE = re.compile(rb"\s*\[?\s*\{")
_NAMED_ERROR = re.compile(rb"[\r\n]event: ?error[\r\n]")
_LIST = re.compile(rb"\[\s*(?=\{)")
_LIST_END = re.compile(rb"\s*\]")
_NO_CHOICES = re.compile(rb"\[\s*\]")
_SOLID = re.compile(rb"\S")
_ENDED = re.compile(r"response\.([a-z]+)")
_ERROR_EVENT = re.compile(rb"event: ?error")
_FIRST_KEY = re.compile(rb'data: ?\{\s*"([A-Za-z]+)"')
_ERROR_KEYS = frozenset({b"code", b"detail", b"message", b"status", b"statusCode"})
"""What an error begins with where it has no member `error`."""


class Tail:
    """One stream. `take` each chunk, `last_words` at its end; what they give goes on."""

    def __init__(
        self,
        dialect: str,
        path: str = "",
        *,
        hide: bool = False,
        cap: float | None = None,
        stops: bool = False,
        results: bool = False,
    ) -> None:
        """hide: the client did not ask for usage. cap, stops, results: as in `substance.fault_of`."""
        self.notes: Notes = {}
        """In the words of `llm.tail`."""
        self._dialect = dialect
        self._responses = path.startswith("/v1/responses")
        self._hide = hide
        self._cap, self._stops, self._results = cap, stops, results
        self._now: Notes = {}
        self._says = False
        self._fresh = True
        self._carry = b""
        self._sent = 0
        self._edge: bytes | None = None
        self._unread = False
        self._blind = False
        self._events = 0
        self._due = 1

    @property
    def holds(self) -> bool:
        """Whether bytes are held back."""
        return len(self._carry) > self._sent

    def take(self, chunk: bytes) -> bytes:
        """Take a chunk in and return the bytes to send on in its place."""
        if self._blind:
            return chunk
        sent = self._read_chunk(chunk)
        self.notes |= self._now
        return sent

    def last_words(self) -> bytes:
        """What is still to be sent when the stream has ended: the held rest, and an error where the answer is not
        complete.
        """
        if self._blind:
            return b""
        sent = self._end()
        self.notes |= self._now
        return sent

    def let_go(self) -> bytes:
        """What is held, as it came. Nothing is read from here on."""
        held, self._blind, self._carry = self._carry[self._sent :], True, b""
        return held

    def _read_chunk(self, chunk: bytes) -> bytes:
        passed = b""
        if self._fresh:
            begun = self._begun(chunk)
            if begun is None:
                return b""
            chunk = begun
        if self._edge is not None:
            passed, after = self._pass_long(self._edge, chunk)
            if after is None:
                return passed
            chunk = after
        if self._all_dull(chunk):
            return passed + chunk
        kept, rest = self._read_events(self._carry + chunk, len(self._carry))
        # Of what was held before, only its last byte may be one now.
        long, bare = len(rest) > LIMIT, _BARE_CR.search(rest, max(0, len(rest) - len(chunk) - 1)) is not None
        if long or bare:
            self._unread, self._blind, self._edge = True, bare, rest[-2:] if long else None
            kept, rest = kept + rest, b""
        self._carry = rest
        return passed + self._release(kept, rest)

    def _begun(self, chunk: bytes) -> bytes | None:
        """The start of a stream without the mark of its byte order, behind which clients read past the first event;
        None where it is held because it may be half of that.
        """
        s = self._carry + chunk
        self._fresh = len(s) < len(MARK) and MARK.startswith(s)
        self._carry = s if self._fresh else b""
        return None if self._fresh else s.removeprefix(MARK)

    def _pass_long(self, edge: bytes, chunk: bytes) -> tuple[bytes, bytes | None]:
        """Pass an event that is too long to read. What goes on, and what follows the event, if that came."""
        end = _BOUNDARY.search(edge + chunk)
        if end is None:
            self._edge = (edge + chunk)[-2:]
            return chunk, None
        self._edge = None
        at = end.end() - len(edge)
        return chunk[:at], chunk[at:]

    def _all_dull(self, chunk: bytes) -> bool:
        """Whether nothing in a chunk matters, and it ends where an event does. Its events are counted if so."""
        if not self._says or self._carry or not _ENDS_WHOLE.search(chunk[-3:]) or not _dull(chunk):
            return False
        pos, events = 0, 0
        while pos < len(chunk):
            end = _BOUNDARY.search(chunk, pos)
            if end is None or not _braced(chunk, end.start()):
                return False
            events += chunk[pos : pos + 1] != b":"
            pos = end.end()
        self._count(events)
        return True

    def _read_events(self, s: bytes, known: int) -> tuple[bytes, bytes]:
        """Read the whole events of `s`, of which the first `known` bytes are known to have no boundary.

        What may go on of them, and the unfinished rest.
        """
        kept: list[bytes] = []
        start = pos = 0
        end = _BOUNDARY.search(s, max(0, known - 2))
        while end is not None:
            event = s[pos : end.end()]
            if not event.startswith(b":"):
                self._count(1)
            matters = not self._says or not _braced(s, end.start()) or not _dull(event)
            verdict = self._read(event, ended=True) if matters else None
            if verdict == "error" or (verdict and self._hide):
                kept += s[start:pos], self._instead(verdict, s[: self._sent] if pos == 0 else b"")
                start = end.end()
            pos = end.end()
            end = _BOUNDARY.search(s, pos)
        kept.append(s[start:pos])
        return b"".join(kept), s[pos:]

    def _release(self, kept: bytes, rest: bytes) -> bytes:
        """What goes on now of `kept`, which may, and of `rest`, an event that is not complete; of that, as far as it
        came before, `sent` bytes have gone on already.
        """
        sent = self._sent
        if self._hide or _may_be_error(rest):
            if kept:
                self._sent = 0
            return kept[sent:]
        self._sent = len(rest)
        return (kept + rest)[sent:]

    def _end(self) -> bytes:
        notes, rest, cut = self._now, self._carry, CUT.get(self._dialect)
        verdict = self._read(rest, ended=False) if rest else None
        out = rest[self._sent :]
        if verdict == "error":
            out = self._instead(verdict, rest[: self._sent])[self._sent :]
        elif (verdict == "usage" and self._hide) or (verdict == "torn" and _may_be_error(rest)):
            out = b""
        if self._events:
            notes["events"] = float(self._events)
        if self._unread or "error" in notes or cut is None:
            return out
        if "finish" in notes or "done" in notes:
            bad = fault_of(notes, says=self._says, cap=self._cap, stops=self._stops, results=self._results)
            if bad is not None:
                notes.setdefault("bad", bad)
            return out
        notes["cut"] = "1"
        return out + (b"\n\n" if out or self._sent else b"") + cut

    def _instead(self, verdict: str, begun: bytes) -> bytes:
        """What goes on in place of an event that may not; `begun`: its first bytes that have gone on already."""
        if verdict != "error":
            return b""
        return begun + (b"\n\n" if begun else b"") + CUT.get(self._dialect, b"")

    def _count(self, events: int) -> None:
        """Count events. The number is told in steps of an eighth."""
        self._events += events
        if self._events >= self._due:
            self._now["events"] = float(self._events)
            self._due = self._events + max(1, self._events // 8)

    def _read(self, event: bytes, *, ended: bool) -> str | None:
        """Note what an event says, and return what may not go on of it: "usage" where it is the chunk that has usage
        and nothing else, "error" where it speaks of our account or is one that the client would not raise, "torn" where
        it is not there to its end. ended: the event is whole, so that it has to be JSON.
        """
        s, bare = _payload(event)
        found = None if s is None else _SOLID.search(s)
        if s is None or found is None:
            return None
        start, named = found.start(), _NAMED_ERROR.search(b"\n" + event) is not None
        if s.startswith(b"[DONE]", start):
            self._now["done"] = "1"
            return None
        listed = _LIST.match(s, start)
        at, stop = members(s, listed.end() if listed else start)
        if listed and stop is not None:
            closed = _LIST_END.match(s, stop) if b"error" in at else None
            stop = closed.end() if closed else None
        if bare and b"error" not in at and not flat_error(s, at):
            return None if ended or stop is not None else "torn"
        if stop is None or _SOLID.search(s, stop):
            return self._broken(s[start : start + 1025], named=named) if ended else "torn"
        error = self._note(s, at, named=named)
        if error and (bare or listed or _about_us(error) or not self._is_raised(s, at, named=named)):
            return "error"
        self._says = self._says or event_says(s, at)
        choices = at.get(b"choices")
        only_usage = is_object(s, at.get(b"usage")) and choices is not None and _NO_CHOICES.match(s, choices)
        return "usage" if only_usage else None

    def _broken(self, start: bytes, *, named: bool) -> str | None:
        """A whole event that is no JSON. `start`: what it begins with."""
        if not named:
            self._now["bad"] = "json"
            return None
        self._now["error"] = f"-/{code_of(start) or '-'}"
        return "error"

    def _note(self, s: bytes, at: At, *, named: bool) -> str | None:
        """Note what the event with members `at` says, and return the error in it."""
        notes = self._now
        before = notes.pop("error", None)
        note_members(s, at, notes)
        _note_envelope(s, at, notes)
        error = str(notes["error"]) if "error" in notes else None
        if error is None and (named or flat_error(s, at)):
            error = words_of(s, at)
        known = error or before
        if known is not None:
            notes["error"] = known
        return error

    def _is_raised(self, s: bytes, at: At, *, named: bool) -> bool:
        """Whether the caller's SDK raises the error in the event with members `at`. OpenAI's looks for its member
        `error` alone, or hands the event on in the Responses API; Anthropic's for the event's name.
        """
        if self._dialect == "anthropic":
            return named
        error = at.get(b"error")
        if self._dialect != "openai" or is_object(s, error) or word(s, error) or b"response" in at:
            return True
        return self._responses and word(s, at.get(b"type")) == "error"


def _dull(s: bytes) -> bool:
    """Whether nothing in `s` can be of interest. Quotes inside JSON strings are escaped, so that a quoted key only
    matches where it is one; a false alarm costs time, nothing else.
    """
    return not any(part in s for part in _MATTERS) and _FINISH.search(s) is None


def _braced(s: bytes, i: int) -> bool:
    """Whether the line that ends before `i` ends in a brace."""
    return s[max(0, i - 1) : i] == b"}" or s[max(0, i - 2) : i] == b"}\r"


def _payload(event: bytes) -> tuple[bytes | None, bool]:
    """The data lines of an event as one text. Gemini's errors come as bare JSON in place of an event: then that, and
    True.
    """
    lines = [line[mark.end() :] for line in _LINE.findall(event) if (mark := _DATA.match(line))]
    if lines:
        return b"\n".join(lines), False
    return (event, True) if _BARE.match(event) else (None, False)


def _note_envelope(s: bytes, at: At, notes: Notes) -> None:
    """What only events say: Anthropic's and the Responses API's envelopes around the shapes of whole answers."""
    kind = word(s, at.get(b"type"))
    if is_object(s, at.get(b"message")):
        note_usage(s, members(s, at[b"message"])[0].get(b"usage"), notes)
    if is_object(s, at.get(b"delta")):
        reason = members(s, at[b"delta"])[0].get(b"stop_reason")
        if is_string(s, reason):
            note(notes, "finish", word(s, reason))
    if is_object(s, at.get(b"response")):
        note_members(s, members(s, at[b"response"])[0], notes)
    if kind == "message_stop":
        notes["done"] = "1"
    ended = _ENDED.fullmatch(kind) if kind else None
    if ended and ended[1] in ENDS:
        notes["done"] = "1"
        notes.setdefault("finish", ended[1])


def _about_us(error: str) -> bool:
    """Whether an error speaks of our account."""
    kind, _, code = error.partition("/")
    return kind in OURS or code in OURS


def _may_be_error(rest: bytes) -> bool:
    if b'"error"' in rest or _ERROR_EVENT.match(rest):
        return True
    first = _FIRST_KEY.match(rest)
    return first is not None and first[1] in _ERROR_KEYS
