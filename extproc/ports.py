"""What the inside needs of the outside, small and owned by those who call it.

Clock tells the time; Exchange is one request's conversation with Envoy; Capacity counts what is shared; Observer hears
what happened; Operations are what an operator may do meanwhile. Records are what Envoy reports about requests after the
fact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Any, Protocol

from extproc.core.capacity import Answer, Ask, Change, Store, Tuning
from extproc.core.events import Event
from extproc.core.value import value
from extproc.shapes import Levers

__all__ = [
    "Capacity",
    "Clock",
    "Departure",
    "Exchange",
    "Gone",
    "Head",
    "Observer",
    "Operations",
    "Record",
    "RecordKind",
]


class Clock(Protocol):
    """The event loop's own clock, in seconds."""

    def time(self) -> float:
        """Now."""
        ...


class Observer(Protocol):
    """Hears events. Must not raise and must not block."""

    def __call__(self, event: Event) -> None:
        """Something happened."""
        ...


class Capacity(Protocol):
    """Everything that is counted: buckets, slots, gates, budgets. One call decides a batch atomically, in order.

    immediate: calls never suspend, so a caller cannot be cancelled in the middle of one. Otherwise a caller must see
    `take` through even when it no longer wants the answer, and give back what it got.
    """

    immediate: bool

    async def take(self, asks: Sequence[Ask]) -> list[Answer]:
        """Take what each ask can get (see core.capacity); one answer per ask.

        Whoever was refused is to ask again after `retry_after`, or when something came back.
        """
        ...

    async def change(self, changes: Sequence[Change]) -> None:
        """Give back or charge. Never refused; unknown keys are ignored."""
        ...

    async def tune(self, tunings: Sequence[Tuning]) -> None:
        """Follow what became known of counters (see core.capacity). Never refused; unknown keys are ignored."""
        ...

    def levels(self) -> Store:
        """What is known here of every counter, for forecasts and the state page. Not to be written to."""
        ...


class Gone(Exception):  # noqa: N818 - an end, not an error
    """The other side left, or spoke out of turn; there is nobody to answer."""


@value
class Head:
    """Request headers (lower-case names, the last of repeated ones) and what Envoy verified about the caller.

    bodiless: no body follows. claims: JWT claims, empty when none were verified.
    """

    headers: Mapping[str, str]
    bodiless: bool
    claims: Mapping[str, Any] = field(default_factory=dict)


@value
class Departure:
    """The decision to let a request go.

    order: upstreams, first choice first. body: replacement of the body, None leaves it. heads, width: per upstream the
    head that stands in the first `width` bytes, None when all share it. per_try_s: limit on each attempt's response
    headers; total_s: limit on the whole answer; None for no limit. fail_body, fail_retry_s: what the client gets when
    every upstream of the order fails. last_resort: empty for an error; "json" or "events" where that is an answer.
    stream: a long silence, before or between tokens, ends the attempt. again: the only upstream of the order may be
    asked a second time. removed: request headers to take away. facts: further words for the record.
    """

    ticket: str
    order: tuple[str, ...]
    path: str
    dialect: str
    stream: bool
    queue_ms: int
    fail_body: str
    fail_retry_s: int
    last_resort: str = ""
    again: bool = False
    body: bytes | None = None
    heads: Mapping[str, str] | None = None
    width: int = 0
    hide_usage: bool = False
    per_try_s: float | None = None
    total_s: float | None = None
    deadline_ms: int | None = None
    removed: tuple[str, ...] = ()
    facts: Mapping[str, str | float] = field(default_factory=dict)


class Exchange(Protocol):
    """One request's conversation. Every method raises Gone when the other side is no longer there."""

    async def head(self) -> Head:
        """The request headers. First call of all."""
        ...

    async def body(self) -> bytes:
        """The whole request body."""
        ...

    async def hold(self, seconds: float) -> None:
        """Ask for `seconds` of patience, because this request is queued. At most once."""
        ...

    async def forward(self, departure: Departure) -> None:
        """Let it go."""
        ...

    async def answer(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> None:
        """Answer the client without any upstream; details go into Envoy's access log."""
        ...

    async def ended(self) -> None:
        """Returns when the client has its whole response, or has left."""
        ...

    async def abort(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> None:
        """End a request that was let go, and its upstream's work with it; `ended` returns soon after.

        The client gets this answer, or a broken connection where an answer has begun.
        """
        ...


class RecordKind(StrEnum):
    """What a record is about: the request as a whole, one failed attempt of it, or that it still runs."""

    FINAL = "final"
    ATTEMPT = "attempt"
    RUNNING = "running"


@value
class Record:
    """What Envoy reports of one request. status 0: no answer. flags: Envoy's response flags, by their field names.

    ticket: empty for an attempt, which only knows its request_id. duration_s: since its start, 0 while it still runs.
    answered_s: from its start to the answer's first byte, None without one. shown: its status as the router saw it,
    where status is what the upstream sent. headers: rate limits and the like that the upstream told. tail: raw words
    about the answer (usage, finish, done, error) as the response filters noted them. error: provider's type/code of a
    refusal.
    """

    kind: RecordKind
    ticket: str
    upstream: str
    status: int
    flags: frozenset[str]
    details: str
    attempt: int
    duration_s: float
    first_token_s: float | None
    answered_s: float | None = None
    request_id: str = ""
    shown: int = 0
    error: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    tail: Mapping[str, str | float] = field(default_factory=dict)


class Operations(Protocol):
    """What an operator may do to a running service; see levers, which says what each of them means.

    for_s: seconds after which it returns by itself, above 0 and at most 30 days; None: not before it is undone, or the
    process ends. by: who does it, for the log. Each may be repeated: what is so already stays so, and the newest for_s
    counts. LookupError, with words, where there is no such lane, upstream or change; ValueError, with words, for what
    cannot be.
    """

    def state(self) -> Levers:
        """What is moved at the moment."""
        ...

    async def pause(self, lane: str, for_s: float | None = None, *, by: str = "operator") -> None:
        """Let nobody of a lane go."""
        ...

    async def resume(self, lane: str, *, by: str = "operator") -> None:
        """Let them go again."""
        ...

    async def trip(self, upstream: str, *, by: str = "operator") -> None:
        """Open its breaker."""
        ...

    async def reset(self, upstream: str, *, by: str = "operator") -> None:
        """Close its breaker."""
        ...

    async def take_out(self, upstream: str, for_s: float | None = None, *, by: str = "operator") -> None:
        """Send nobody there."""
        ...

    async def put_back(self, upstream: str, *, by: str = "operator") -> None:
        """Send there again."""
        ...

    async def change(self, place: str, value: float, for_s: float | None = None, *, by: str = "operator") -> str:
        """Go by another value of one setting; the id of this change."""
        ...

    async def revert(self, change: str, *, by: str = "operator") -> None:
        """End a change."""
        ...

    async def bypass(self, for_s: float | None = None, *, by: str = "operator") -> None:
        """Let everybody go at once."""
        ...

    async def no_bypass(self, *, by: str = "operator") -> None:
        """Decide again."""
        ...

    async def drain(self, *, by: str = "operator") -> None:
        """Take nobody in any more."""
        ...

    async def undrain(self, *, by: str = "operator") -> None:
        """Take in again."""
        ...
