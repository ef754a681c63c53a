"""One request inside a model of an upstream, and what every model counts in its own way.

    work = Work(...); model.begin(work)
    told = await work.told        headers: 200 with the first token, or a refusal
    whole = await work.ended      whether the answer was whole
    model.abandon(work)           whoever asked has left, or gave up

The books are the upstream's: they are kept from what it does, never from what the gateway believes.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from extproc.core.value import value

__all__ = ["CANARY", "MINUTE_S", "OK", "SUCCESS", "Books", "Model", "Told", "Work"]

CANARY = -1
"""The job of calls that the gateway makes itself."""
MINUTE_S = 60.0
SUCCESS = 200


@value
class Told:
    """Response headers: status, the provider's rate-limit words, and type/code of an error."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


OK = Told(SUCCESS)


class Work:
    """See the head of this file. Sizes in tokens as the upstream counts them; cap None where the caller named none."""

    __slots__ = (
        "accepted", "cap", "ended", "generated", "job", "output", "place", "priority", "prompt", "serial", "since",
        "state", "timer", "told",
    )  # fmt: skip

    def __init__(
        self,
        job: int,
        prompt: int,
        output: int,
        cap: int | None,
        priority: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`job` names the caller's request: its retries are other works of the same job. Lower priority goes first."""
        self.job = job
        self.prompt = prompt
        self.output = output
        self.cap = cap
        self.priority = priority
        self.told: asyncio.Future[Told] = loop.create_future()
        self.ended: asyncio.Future[bool] = loop.create_future()
        self.accepted = False
        self.generated = 0.0
        self.since = 0.0
        self.serial = 0
        self.place = 0
        self.state = ""
        self.timer: asyncio.TimerHandle | None = None

    def tell(self, told: Told) -> None:
        """Send response headers, unless they were sent."""
        if not self.told.done():
            self.told.set_result(told)

    def end(self, *, whole: bool) -> None:
        """End the answer, unless it has ended."""
        if not self.ended.done():
            self.ended.set_result(whole)


class Model(Protocol):
    """A model of an upstream."""

    books: Books

    def begin(self, work: Work) -> None:
        """Take a request in: sooner or later it is told, and if it is accepted it ends."""
        ...

    def abandon(self, work: Work) -> None:
        """Whoever asked is gone. Harmless after the end."""
        ...

    def fail(self, *, down: bool) -> None:
        """Refuse everything from now on, or serve again."""
        ...

    def slow(self, factor: float) -> None:
        """Take so many times as long from now on."""
        ...


@dataclass(slots=True)
class Books:
    """What an upstream saw. Tokens as it counts them.

    wasted: processed or generated for an answer that nobody got, or for the second time. over: tokens of requests that
    it refused because they were above its limit. copies: most works of one job at a time; doubled: works begun while
    another of the same job ran. busiest_minute: most that was charged within any minute, less what came back in it;
    largest: most that one request was charged on arrival; late: charged when the answer was there, past any limit.
    """

    begun: int = 0
    served: int = 0
    served_tokens: int = 0
    charged: float = 0.0
    refused: Counter[int] = field(default_factory=Counter)
    over: int = 0
    wasted: float = 0.0
    preempted: int = 0
    copies: int = 0
    doubled: int = 0
    most_running: int = 0
    busiest_minute: float = 0.0
    largest: float = 0.0
    late: float = 0.0
    _running: Counter[int] = field(default_factory=Counter)
    _minute: deque[tuple[float, float]] = field(default_factory=deque)
    _in_minute: float = 0.0

    @property
    def running(self) -> int:
        """Works of callers that were accepted and have not ended."""
        return sum(count for job, count in self._running.items() if job != CANARY)

    def accept(self, work: Work) -> None:
        """A work was let in."""
        work.accepted = True
        self.begun += 1
        running = self._running[work.job] = self._running[work.job] + 1
        self.copies = max(self.copies, running)
        self.doubled += running > 1

    def close(self, work: Work, *, whole: bool, processed: float) -> None:
        """An accepted work ended; `processed` tokens were spent on it, in vain unless it is whole."""
        work.accepted = False
        self._running[work.job] -= 1
        if not self._running[work.job]:
            del self._running[work.job]
        if whole:
            self.served += 1
            self.served_tokens += work.prompt + work.output
        else:
            self.wasted += processed

    def charge(self, tokens: float, now: float) -> None:
        """`tokens` were charged to the account; negative came back."""
        self.charged += tokens
        self._minute.append((now, tokens))
        self._in_minute += tokens
        while self._minute[0][0] <= now - MINUTE_S:
            self._in_minute -= self._minute.popleft()[1]
        self.busiest_minute = max(self.busiest_minute, self._in_minute)
