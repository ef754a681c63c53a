"""One ext_proc stream of the classic profile, which is shown the answer, too, and tells itself how the request ended.

Beside what StreamExchange does: the head of the answer comes with Envoy's attributes; of a stream, each piece comes and
is given back as the response tail leaves it; and when all is over there is one record, where the native profile has
Envoy's log. Whatever ends the stream, `final` makes that record of what is known then.

Deliberately not here: whether the caller left or the upstream broke off, which looks the same from here (see doubts),
and what the answer says (dialects.tail).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from extproc.core.request import Endpoint
from extproc.dialects.paths import endpoint_of
from extproc.dialects.tail import Tail
from extproc.ports import Departure, Gone, Head, Record, RecordKind
from extproc.wire import answers, codec
from extproc.wire.answers import Shown
from extproc.wire.exchange import Read, StreamExchange, Write
from extproc.wire.pb.ext_proc_pb2 import ProcessingRequest

__all__ = ["ClassicExchange", "Silence"]

log = logging.getLogger(__name__)

LAST_WORDS = frozenset({"done", "error"})
"""Notes of a stream behind which nothing need come, so that a reader may leave."""
EVENTS = "text/event-stream"
OK = 200
PACED, FAILED = 429, 500
EXHAUSTED = 503
"""Status under which the caller is told that every upstream failed."""
LEFT, STALLED, LATE = "downstream_remote_reset", "stream_idle_timeout", "upstream_request_timeout"
"""How a record says that the caller left; and that Envoy ended it, because nothing more came, or no answer in time."""
TIMED_OUT, TOO_LATE = "response_timeout", 504
"""Details and status of the latter."""
RUNNING_S = 5.0
"""So often it is told that a stream goes on, as in the native profile."""
ROUNDED_S = 0.002
"""Envoy is told whole milliseconds."""
NEARLY = 0.9
"""So much of a limit on silence counts as all of it: we hear of what Envoy saw a little later."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Seconds without a word after which Envoy ends an answer: of a stream that is to go on, and of any other."""

    stream_s: float
    other_s: float


class ClassicExchange(StreamExchange):
    """See the head of this file. `clock` gives seconds."""

    _go_on = answers.CONTINUE

    def __init__(
        self,
        read: Read,
        write: Write,
        clock: Callable[[], float],
        silence: Silence,
        running: Callable[[Record], None] = lambda _: None,
    ) -> None:
        """Nothing is read before `head` is asked for. running: hears now and then of a stream that goes on."""
        super().__init__(read, write)
        self._clock, self._silence, self._running = clock, silence, running
        self._request_id = ""
        self._arrived = self._left = self._heard = self._told = clock()
        self._going: Departure | None = None
        self._shown: Shown | None = None
        self._answered: float | None = None
        self._first: float | None = None
        self._tail: Tail | None = None
        self._whole = False
        self._said = (0, "")

    async def head(self) -> Head:
        """See ports.Exchange."""
        head = await super().head()
        self._arrived = self._clock()
        self._request_id = head.headers.get("x-request-id", "")
        return head

    async def forward(self, departure: Departure) -> None:
        """See ports.Exchange."""
        self._going, self._left = departure, self._clock()
        self._told = self._left
        await self._write(answers.departure(departure, self._asked, int(time.time() * 1000)))
        self._asked = ""

    async def abort(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> None:
        """See ports.Exchange."""
        self._said = (status, details)
        await super().abort(status, headers, body, details)

    def release(self) -> bool:
        """Stop watching a response that is under way. What is held of it goes on with its next piece, and then we go.

        False when there is none.
        """
        if self._going is None:
            return False
        self._released = True
        if self._waiting is not None and self._may_end():
            self._waiting.cancel()
        return True

    @property
    def doubt(self) -> tuple[str, ...]:
        """See StreamExchange: what ended this was the caller, the upstream or Envoy."""
        begun = self._shown is not None
        if self._going is None or self._is_over() or self._stalled() or (begun and self._said[1]):
            return ()
        return self._going.order + self._going.order[: self._going.again]

    def final(self) -> Record | None:
        """How it ended; None for what never left, and for an answer that goes on without us."""
        going = self._going
        if going is None or (self._released and not self._whole):
            return None
        flags = self._ended_by()
        if self._tail is not None and not self._whole and self._is_over():
            self._tail.last_words()  # what it is lacking is noted at its end
        return self._record(RecordKind.FINAL, going, flags, self._clock() - self._arrived)

    def _record(self, kind: RecordKind, going: Departure, flags: set[str], duration_s: float) -> Record:
        head = self._shown
        return Record(
            kind=kind,
            ticket=going.ticket,
            upstream=(head.upstream if head else "") or going.order[0],
            status=self._status(),
            flags=(head.flags if head else frozenset()) | flags,
            details=self._said[1] or (head.details if head else TIMED_OUT if self._timed_out() else ""),
            attempt=head.attempt if head else 0,
            duration_s=duration_s,
            first_token_s=None if self._first is None else max(0.0, self._first - self._left),
            answered_s=None if self._answered is None else self._answered - self._arrived,
            request_id=self._request_id,
            shown=head.status if head else 0,
            headers=head.limits if head else {},
            tail=dict(self._tail.notes) if self._tail else head.tail if head else {},
        )

    def _ended_by(self) -> set[str]:
        """Flags, as far as they are known from here."""
        if self._is_over() or self._said[1]:
            return set()
        return {STALLED} if self._stalled() else {LATE} if self._timed_out() else {LEFT}

    def _timed_out(self) -> bool:
        """Whether there was no answer in the time that it had: then Envoy ended it."""
        total_s = self._going.total_s if self._going else None
        return self._shown is None and total_s is not None and self._clock() - self._left >= total_s - ROUNDED_S

    def _is_over(self) -> bool:
        """Whether the answer has come to its end, be it that its reader left at its last words."""
        return self._whole or (self._tail is not None and not self._tail.notes.keys().isdisjoint(LAST_WORDS))

    def _stalled(self) -> bool:
        """Whether an answer that has begun, and is not over, has said nothing for so long that Envoy ended it."""
        if self._going is None or self._shown is None:
            return False
        limit = self._silence.stream_s if self._going.stream else self._silence.other_s
        return self._clock() - self._heard >= NEARLY * limit

    def _status(self) -> int:
        """As the caller saw it: what the last upstream failed with becomes Envoy's own word."""
        if self._shown is None:
            return self._said[0] or (self._late() if self._timed_out() else 0)
        head, status = self._shown, self._shown.status
        failed = head.instead or (not head.own and (head.silent or status >= FAILED or status == PACED))
        return EXHAUSTED if failed else status

    def _late(self) -> int:
        """Status of an answer that did not come in time: in the caller's, or in ours; or where another stands in."""
        going = self._going
        told = going is not None and going.deadline_ms is not None and not going.last_resort
        return TOO_LATE if told else EXHAUSTED

    def _may_end(self) -> bool:
        return self._released and not (self._tail and self._tail.holds)

    def _heed(self, message: ProcessingRequest) -> bytes:
        self._heard = self._clock()
        match message.WhichOneof("request"):
            case "response_headers":
                return self._begin(message)
            case "response_body":
                return self._continue(message.response_body.body, ended=message.response_body.end_of_stream)
            case "response_trailers":
                self._end()
                return codec.TRAILERS_PASS
            case _:
                raise Gone

    def _begin(self, message: ProcessingRequest) -> bytes:
        """An answer that is not a stream is whole once it begins: its gate has read it to its end.

        What is not counted in tokens is not read: its events have no such end.
        """
        assert self._going is not None  # noqa: S101 - an answer comes after its departure
        self._answered = self._clock()
        self._shown = head = answers.shown(message)
        priced = endpoint_of("POST", self._going.path) not in (None, Endpoint.OTHER)
        begun = not (head.own or head.whole or self._released)
        read = priced and begun and head.status == OK and EVENTS in head.kind
        if read:
            self._tail = _tail_of(self._going)
        else:
            self._whole = True
            self._first = None if head.own or head.silent or head.whole else self._answered
        return answers.pass_head(head, read=read)

    def _continue(self, chunk: bytes, *, ended: bool) -> bytes:
        if self._tail is None:
            return answers.BODY_PASSES
        if chunk and self._first is None:
            self._first = self._clock()
        if self._released:
            return answers.body(self._tail.let_go() + chunk)
        sent = self._read_piece(self._tail, chunk)
        if ended:
            self._whole = True
            sent += self._tail.last_words()
        elif self._going is not None and self._heard - self._told >= RUNNING_S:
            self._told = self._heard
            self._running(self._record(RecordKind.RUNNING, self._going, set(), 0.0))
        return answers.BODY_PASSES if sent == chunk else answers.body(sent)

    def _read_piece(self, tail: Tail, chunk: bytes) -> bytes:
        """Whatever fails in reading, every byte goes on; the rest of the stream does so unread."""
        try:
            return tail.take(chunk)
        except Exception:
            log.exception("a piece of an answer was not understood")
            return tail.let_go() + chunk

    def _end(self) -> None:
        """Trailers: nothing can be added to the answer any more."""
        if self._tail is not None and not self._whole:
            self._tail.last_words()
        self._whole = True


def _tail_of(going: Departure) -> Tail:
    cap = going.facts.get("cap")
    return Tail(
        going.dialect,
        going.path,
        hide=going.hide_usage,
        cap=None if cap is None else float(cap),
        stops="stops" in going.facts,
        results="results" in going.facts,
    )
