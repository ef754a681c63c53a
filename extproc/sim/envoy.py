"""Envoy's part, played as Envoy plays it: one request's conversation, its way to the upstreams, and what is logged.

It forwards in the order it was told, ends an attempt that has no first token in time, asks the next upstream after a
failure, words an exhausted chain with what dispatch left it, and reports each failed attempt and each end in access-log
records. A client that leaves cancels whatever is under way.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from extproc.core.policy import Policy
from extproc.core.value import value
from extproc.ports import Departure, Head, Record, RecordKind
from extproc.sim.traffic import Job
from extproc.sim.work import SUCCESS, Model, Told, Work

__all__ = ["REASON", "TIMED_OUT", "Listener", "Reply", "SimulatedExchange", "Stage", "work_of"]

REASON = "x-tidegate-reason"
UNAVAILABLE, LATE = 503, 504
TIMED_OUT = Told(LATE)
ABORTED = Told(0)
FOREVER_S = 1e9
LEFT = frozenset({"downstream_remote_reset"})
OVERDUE = frozenset({"upstream_request_timeout"})
CUT = frozenset({"upstream_remote_reset"})

_PRIORITY = re.compile(rb'"priority":(-?[0-9]+)')


@value
class Reply:
    """What a client got. status 0: nothing. whole: an answer, to its end. admitted: it was let go by the gateway."""

    status: int
    headers: Mapping[str, str]
    whole: bool = False
    admitted: bool = False
    upstream: str = ""

    @property
    def reason(self) -> str:
        """Why the gateway refused it; empty when it did not."""
        return self.headers.get(REASON, "")


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a simulation plays: its loop, and the models of its upstreams by name.

    model: what callers ask for. blind: engines whose metrics are lost at the moment.
    """

    loop: asyncio.AbstractEventLoop
    models: Mapping[str, Model]
    model: str
    blind: set[str] = field(default_factory=set)


class Listener(Protocol):
    """What one request needs of the gateway that it came to."""

    stage: Stage
    policy: Policy

    def head(self, job: Job, attempt: int) -> Head:
        """The headers that the client sends."""
        ...

    def body(self, job: Job) -> bytes:
        """The body that it sends."""
        ...

    def report(self, record: Record) -> None:
        """Log a record."""
        ...


class SimulatedExchange:
    """One request's conversation; see ports.Exchange. `first` is called when its answer begins to be generated."""

    __slots__ = ("_attempt", "_first", "_job", "_listener", "_router", "reply")

    def __init__(self, listener: Listener, job: Job, attempt: int, first: Callable[[], None]) -> None:
        """Nothing is sent before `head` is asked for."""
        self._listener = listener
        self._job = job
        self._attempt = attempt
        self._first = first
        self._router: _Router | None = None
        self.reply = Reply(0, {})

    @property
    def forwarded(self) -> bool:
        """Whether it was let go."""
        return self._router is not None

    async def head(self) -> Head:
        """See ports.Exchange."""
        return self._listener.head(self._job, self._attempt)

    async def body(self) -> bytes:
        """See ports.Exchange."""
        return self._listener.body(self._job)

    async def hold(self, seconds: float) -> None:
        """See ports.Exchange. Envoy is patient."""

    async def forward(self, departure: Departure) -> None:
        """See ports.Exchange."""
        self._router = _Router(self._listener, self._job, self._attempt, departure, self._first)

    async def answer(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> None:
        """See ports.Exchange."""
        del body, details
        self.reply = Reply(status, dict(headers))

    async def ended(self) -> None:
        """See ports.Exchange. Everything that happens to the request happens while this waits."""
        if self._router is not None:
            self.reply = await self._router.serve()

    async def abort(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> None:
        """See ports.Exchange."""
        del body
        if self._router is not None:
            self._router.abort(Reply(status, dict(headers), admitted=True), details)


class _Router:
    """What Envoy does with one request that was let go."""

    __slots__ = (
        "_aborted", "_attempt", "_began", "_departure", "_details", "_first", "_id", "_job", "_listener", "_loop",
        "_model", "_tried", "_work",
    )  # fmt: skip

    def __init__(
        self, listener: Listener, job: Job, attempt: int, departure: Departure, first: Callable[[], None]
    ) -> None:
        self._listener = listener
        self._loop = listener.stage.loop
        self._job = job
        self._attempt = attempt
        self._id = listener.head(job, attempt).headers["x-request-id"]
        self._departure = departure
        self._first = first
        self._tried = 0
        self._began = self._loop.time() - departure.queue_ms / 1000
        self._aborted: Reply | None = None
        self._details = ""
        self._details = ""
        self._model: Model | None = None
        self._work: Work | None = None

    async def serve(self) -> Reply:
        """Try each upstream of the order until one answers."""
        for name in self._departure.order:
            if self._aborted is None:
                self._tried += 1
                reply = await self._try(name)
                if reply is not None:
                    return reply
        last = self._departure.order[max(0, self._tried - 1)]
        if self._aborted is not None:
            self._final(last, self._aborted.status)
            return self._aborted
        self._final(last, UNAVAILABLE)
        retry = str(self._departure.fail_retry_s)
        headers = {REASON: "upstream_failed", "x-should-retry": "true", "retry-after": retry}
        return Reply(UNAVAILABLE, headers, admitted=True)

    def abort(self, reply: Reply, details: str) -> None:
        """End it from here: the upstream's work is ended, and this is what the client gets."""
        self._aborted, self._details = reply, details
        if self._work is not None and self._model is not None:
            self._work.tell(ABORTED)
            self._model.abandon(self._work)

    async def _try(self, name: str) -> Reply | None:
        """The answer of one upstream; None when it failed and the next may be asked."""
        sent = self._loop.time()
        self._model = model = self._listener.stage.models[name]
        self._work = work = work_of(self._listener.stage, self._job, self._priority(name))
        timer = self._loop.call_later(self._departure.per_try_s or FOREVER_S, work.tell, TIMED_OUT)
        model.begin(work)
        try:
            told = await work.told
            if told.status == SUCCESS:
                return await self._answered(name, work, told, sent)
        except asyncio.CancelledError:
            model.abandon(work)
            self._left(name, work)
            raise
        finally:
            timer.cancel()
            model.abandon(work)
        if told is not ABORTED:
            self._failed(name, told, sent)
        return None

    async def _answered(self, name: str, work: Work, told: Told, sent: float) -> Reply:
        self._first()
        first_s = self._loop.time() - sent
        whole = await work.ended
        if not self._job.stream:
            first_s = self._loop.time() - sent
        if self._aborted is not None:
            self._final(name, self._aborted.status)
            return self._aborted
        self._served(name, work, told, first_s=first_s, whole=whole)
        return Reply(SUCCESS, told.headers, whole=whole, admitted=True, upstream=name)

    def _priority(self, name: str) -> int:
        """What the rewritten body tells the engine; here the lower goes first."""
        departure = self._departure
        head = (departure.heads or {}).get(name)
        found = _PRIORITY.search(head.encode() if head else (departure.body or b"")[: departure.width])
        sign = self._listener.policy.upstreams[name].engine_priority
        return 0 if found is None or sign is None else -sign * int(found[1])

    def _failed(self, name: str, told: Told, sent: float) -> None:
        self._report(
            RecordKind.ATTEMPT, name, told.status,
            flags=OVERDUE if told is TIMED_OUT else frozenset(),
            duration_s=self._loop.time() - sent, error=told.error, headers=told.headers,
        )  # fmt: skip

    def _served(self, name: str, work: Work, told: Told, *, first_s: float, whole: bool) -> None:
        tail: dict[str, str | float] = {"events": int(work.generated)}
        if whole:
            tail |= {"in": work.prompt, "out": work.output, "finish": "stop", "done": "1"}
        else:
            tail["cut"] = "1"
        flags = frozenset() if whole else CUT
        self._final(name, SUCCESS, tail=tail, flags=flags, headers=told.headers, first_s=first_s)

    def _left(self, name: str, work: Work) -> None:
        """The client has left."""
        begun = self._job.stream and work.told.done() and work.told.result().status == SUCCESS
        tail: dict[str, str | float] = {"events": int(work.generated)} if begun else {}
        self._final(name, SUCCESS if begun else 0, flags=LEFT, tail=tail)

    def _final(
        self,
        name: str,
        status: int,
        *,
        flags: frozenset[str] = frozenset(),
        tail: Mapping[str, str | float] | None = None,
        headers: Mapping[str, str] | None = None,
        first_s: float | None = None,
    ) -> None:
        self._report(
            RecordKind.FINAL, name, status, flags=flags, tail=tail, headers=headers, first_s=first_s,
            duration_s=self._loop.time() - self._began,
        )  # fmt: skip

    def _report(
        self,
        kind: RecordKind,
        name: str,
        status: int,
        *,
        flags: frozenset[str],
        duration_s: float,
        tail: Mapping[str, str | float] | None = None,
        headers: Mapping[str, str] | None = None,
        error: str = "",
        first_s: float | None = None,
    ) -> None:
        """An attempt's record knows neither its ticket nor its number."""
        final = kind is RecordKind.FINAL
        self._listener.report(
            Record(
                kind=kind,
                ticket=self._departure.ticket if final else "",
                upstream=name,
                status=status,
                flags=flags,
                details=self._details if final else "",
                attempt=self._tried if final else 0,
                duration_s=duration_s,
                first_token_s=first_s,
                request_id=self._id,
                shown=status,
                error=error,
                headers=headers or {},
                tail=tail or {},
            )
        )


def work_of(stage: Stage, job: Job, priority: int) -> Work:
    """The job as an upstream sees it."""
    return Work(job.number, job.prompt, job.output, job.cap, priority, stage.loop)
