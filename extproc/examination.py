"""Answers the questions of `tidegate doctor` (see dialects.examination), and keeps them from becoming a burden.

A question takes no place in a lane, no permit and no token, and none reaches an upstream. It holds a stream open for a
few seconds at most, and few are held at the same time; one more is answered at once.
"""

from __future__ import annotations

import asyncio

from extproc.core.refusal import Reason, Rejected
from extproc.dialects import examination
from extproc.ports import Exchange

__all__ = ["Examination"]

MOST = 4
"""Questions that wait at the same time."""


class Examination:
    """longest_wait_s: how long the most patient lane lets a request wait."""

    def __init__(self, longest_wait_s: float) -> None:
        """Nobody asks yet."""
        self._longest_wait_s = longest_wait_s
        self._waiting = 0

    async def attend(self, exchange: Exchange, body: bytes) -> None:
        """Wait as a question asks, then raise the refusal that answers it. Nothing happens for any other body.

        Envoy is asked for as much patience as the most patient lane may need, however soon the answer comes: it heeds
        no request for more than it was configured for.
        """
        question = examination.asked(body)
        if question is None:
            return
        if question.ms and self._waiting >= MOST:
            raise Rejected(Reason.BAD_REQUEST, examination.busy(len(body)))
        self._waiting += 1
        try:
            if question.hold and question.ms:
                await exchange.hold(self._longest_wait_s)
            await asyncio.sleep(question.ms / 1000)
        finally:
            self._waiting -= 1
        raise Rejected(Reason.BAD_REQUEST, examination.tell(len(body), question))
