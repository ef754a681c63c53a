"""Records of requests whose end was seen here, each told once.

Where no answer came, or one broke off, the stream to Envoy ends in the same way whether the caller left, the upstream
cut it, or Envoy answered by itself because every attempt had failed. The records of its attempts know. They come before
that end or soon after, so the request's own waits a moment for them.

What cannot be told: where an attempt's record does not come in time, or not at all, the caller counts as having left.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from extproc.ports import Record

__all__ = ["Doubts"]

log = logging.getLogger(__name__)

PATIENCE_S = 0.5
"""So long an attempt's record may take: Envoy gathers them for 20 ms."""
MOST_KEPT = 1024
"""Of so many requests it is remembered which attempts failed, until their ends are seen."""
LEFT = frozenset({"downstream_connection_termination", "downstream_remote_reset"})
FAILED = 400
EXHAUSTED = 503
"""Status under which the caller is told that every upstream failed."""


class Doubts:
    """`learn` gets each record once. Nothing here waits for it but `close`."""

    def __init__(self, learn: Callable[[Record], Awaitable[None]]) -> None:
        """Must be made where a loop will run."""
        self._learn = learn
        self._heard: OrderedDict[str, tuple[Record, ...]] = OrderedDict()
        self._waiting: dict[str, tuple[Record, tuple[str, ...], asyncio.TimerHandle]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def tell(self, record: Record, tries: tuple[str, ...] = ()) -> None:
        """A request has ended. tries: whom it could ask, one after the other, where it is in doubt how it ended."""
        heard = self._heard.pop(record.request_id, ())
        if not tries or not record.request_id:
            self._tell(record)
        elif (known := _resolved(record, tries, heard)) is not None:
            self._tell(known)
        else:
            self._give_up(record.request_id)  # no two requests have one id; should they, each is told
            timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up, record.request_id)
            self._heard[record.request_id] = heard
            self._waiting[record.request_id] = record, tries, timer

    def hear(self, attempt: Record) -> None:
        """An attempt's record has come."""
        request_id = attempt.request_id
        heard = self._heard.get(request_id, ())
        if not request_id or any(_same(attempt, other) for other in heard):
            return
        self._heard[request_id] = heard = (*heard, attempt)
        record, tries, timer = self._waiting.get(request_id, (None, (), None))
        if record is None or timer is None:
            if len(self._heard) > MOST_KEPT:
                self._heard.popitem(last=False)
        elif (known := _resolved(record, tries, heard)) is not None:
            timer.cancel()
            del self._waiting[request_id], self._heard[request_id]
            self._tell(known)

    async def close(self) -> None:
        """Tell what still waits, and return once all is told."""
        for request_id in list(self._waiting):
            self._give_up(request_id)
        while self._telling:
            await asyncio.wait(self._telling)

    def _give_up(self, request_id: str) -> None:
        record, tries, timer = self._waiting.pop(request_id, (None, (), None))
        if record is not None and timer is not None:
            timer.cancel()
            self._tell(_at(record, tries, self._heard.pop(request_id, ())))

    def _tell(self, record: Record) -> None:
        task = asyncio.get_running_loop().create_task(self._learn_one(record))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _learn_one(self, record: Record) -> None:
        try:
            await self._learn(record)
        except Exception:
            log.exception("the end of a request was not understood")


def _same(attempt: Record, other: Record) -> bool:
    """Whether two records are of one attempt: they carry no number, and differ by how long they took."""
    return (attempt.upstream, attempt.duration_s) == (other.upstream, other.duration_s)


def _resolved(record: Record, tries: tuple[str, ...], heard: tuple[Record, ...]) -> Record | None:
    """The record as it is known by what was heard of its attempts; None where it is not yet."""
    if record.status >= FAILED:
        return _at(record, tries, heard)
    for attempt in heard:
        if attempt.flags & LEFT:
            return replace(record, upstream=attempt.upstream or record.upstream, flags=attempt.flags)
        if attempt.flags and 0 < attempt.status < FAILED and record.shown in (0, attempt.shown):
            begun = {"status": attempt.status, "shown": attempt.shown, "flags": attempt.flags}
            return replace(record, upstream=attempt.upstream or record.upstream, **begun)  # type: ignore[arg-type]
    if not record.status and len(heard) >= len(tries):
        return replace(_at(record, tries, heard), status=EXHAUSTED, flags=record.flags - LEFT)
    return None


def _at(record: Record, tries: tuple[str, ...], heard: tuple[Record, ...]) -> Record:
    """With whom it was when it ended, where no answer shows that."""
    if record.shown:
        return record
    failed = min(len(heard), len(tries) - 1)
    return replace(record, upstream=tries[failed], attempt=failed + 1)
