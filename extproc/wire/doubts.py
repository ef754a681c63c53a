"""Records of requests whose end was seen here, each told once.

An answer that broke off, or never came, is told from here as one whose caller left: the stream to Envoy ends in the
same way as where the upstream cut it. The record of its attempt knows. It comes before that end or soon after, so the
request's own waits a moment for it, and says the same.

What cannot be told: an attempt whose record does not come in time, or not at all, counts as left by the caller.
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
"""Of so many attempts that broke off it is remembered how, until their requests' ends are seen."""
LEFT = frozenset({"downstream_connection_termination", "downstream_remote_reset"})


class Doubts:
    """`learn` gets each record once. Nothing here waits for it but `close`."""

    def __init__(self, learn: Callable[[Record], Awaitable[None]]) -> None:
        """Must be made where a loop will run."""
        self._learn = learn
        self._broken: OrderedDict[str, Record] = OrderedDict()
        self._waiting: dict[str, tuple[Record, asyncio.TimerHandle]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def tell(self, record: Record, *, in_doubt: bool) -> None:
        """A request has ended. in_doubt: by whom is not known."""
        attempt = self._broken.pop(record.request_id, None)
        if not in_doubt or not record.request_id:
            self._tell(record)
        elif attempt is not None and _same(record, attempt):
            self._tell(_resolved(record, attempt))
        else:
            self._give_up(record.request_id)  # no two requests have one id; should they, each is told
            timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up, record.request_id)
            self._waiting[record.request_id] = record, timer

    def hear(self, attempt: Record) -> None:
        """An attempt's record has come."""
        if not attempt.flags or not attempt.request_id or attempt.status >= 400:  # noqa: PLR2004 - HTTP
            return
        waiting = self._waiting.get(attempt.request_id)
        if waiting is None:
            self._broken[attempt.request_id] = attempt
            if len(self._broken) > MOST_KEPT:
                self._broken.popitem(last=False)
        elif _same(waiting[0], attempt):
            waiting[1].cancel()
            del self._waiting[attempt.request_id]
            self._tell(_resolved(waiting[0], attempt))

    async def close(self) -> None:
        """Tell what still waits, and return once all is told."""
        for request_id in list(self._waiting):
            self._give_up(request_id)
        while self._telling:
            await asyncio.wait(self._telling)

    def _give_up(self, request_id: str) -> None:
        record, timer = self._waiting.pop(request_id, (None, None))
        if record is not None and timer is not None:
            timer.cancel()
            self._tell(record)

    def _tell(self, record: Record) -> None:
        task = asyncio.get_running_loop().create_task(self._learn_one(record))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _learn_one(self, record: Record) -> None:
        try:
            await self._learn(record)
        except Exception:
            log.exception("the end of a request was not understood")


def _same(record: Record, attempt: Record) -> bool:
    """Whether that attempt is the one that the request ended with: an earlier one may have broken off, too."""
    return bool(attempt.flags & LEFT) if not record.status else attempt.shown == record.shown


def _resolved(record: Record, attempt: Record) -> Record:
    return replace(record, upstream=attempt.upstream or record.upstream, flags=record.flags - LEFT | attempt.flags)
