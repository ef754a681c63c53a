"""Clients that come back, as the OpenAI and Anthropic SDKs do.

A request is tried again after 408, 409, 429, a server error, or a timeout, unless `x-should-retry` says otherwise. The
pause is what `retry-after-ms` or `retry-after` say, where that is more than nothing and at most a minute; else it is
half a second, doubled with each retry up to eight seconds, less up to a quarter. An answer that broke off is an error
that no SDK repairs. What each client got, and when, counted from its first try, is its `Story`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from extproc.sim.envoy import Reply
from extproc.sim.gateway import Service
from extproc.sim.traffic import Job

__all__ = ["Caller", "Fate", "Return", "Story", "pause_s"]

FIRST_PAUSE_S, LONGEST_PAUSE_S, JITTER = 0.5, 8.0, 0.25
OBEYED_S = 60.0
SUCCESS, SERVER_ERROR = 200, 500
AGAIN = frozenset({408, 409, 429})
ENVOYS_OWN = frozenset({"upstream_failed", "admission_unavailable"})
"""Reasons that are no shedding: the request was let go and nobody served it."""
EXPIRY = frozenset({"queue_timeout", "deadline_passed"})


class Fate(StrEnum):
    """How a job ended. EXPIRED: refused because its time was over. GONE: its client gave up waiting."""

    SERVED = "served"
    SHED = "shed"
    EXPIRED = "expired"
    GONE = "gone"
    FAILED = "failed"


@dataclass(slots=True)
class Return:
    """A retry that came when it was told to, `after_s` seconds after a refusal. went: it was let go this time."""

    after_s: float
    reason: str
    went: bool = False


@dataclass(slots=True)
class Story:
    """What one job met with; times in seconds from its first sending, None where there is none.

    word: why it was not served. tries: requests sent. returns: those of them that came when told to. over: it is told
    to its end.
    """

    job: Job
    fate: Fate = Fate.FAILED
    word: str = ""
    tries: int = 0
    first_s: float | None = None
    total_s: float = 0.0
    upstream: str = ""
    returns: list[Return] = field(default_factory=list)
    over: bool = False


class Caller:
    """Sends jobs to `service`; `chance` draws the jitter of pauses."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop, chance: random.Random) -> None:
        """Keep them."""
        self._service = service
        self._loop = loop
        self._chance = chance
        self._lingering: set[asyncio.Future[Reply]] = set()

    async def want(self, job: Job, story: Story) -> None:
        """Try until it is served, or not worth another try."""
        began, told = self._loop.time(), None
        for attempt in range(job.clients.retries + 1):
            story.tries += 1
            reply = await self._send(job, attempt, story, began)
            story.total_s = self._loop.time() - began
            if told is not None:
                told.went = reply is not None and (reply.admitted or reply.status == SUCCESS)
            _judge(story, reply)
            if attempt == job.clients.retries or not _worth_another(reply):
                break
            pause, told = self._told(reply, attempt, story)
            await asyncio.sleep(pause)
        story.over = True

    async def quiet(self) -> None:
        """Return when no connection of a client that has left is open any more."""
        while self._lingering:
            await asyncio.wait(self._lingering)

    def _told(self, reply: Reply | None, attempt: int, story: Story) -> tuple[float, Return | None]:
        """How long to pause, and the promise that this is worth it, where the gateway made one."""
        headers = reply.headers if reply else {}
        pause, obeyed = pause_s(headers, attempt, self._chance.random())
        if not obeyed or reply is None or not reply.reason:
            return pause, None
        story.returns.append(Return(pause, reply.reason))
        return pause, story.returns[-1]

    async def _send(self, job: Job, attempt: int, story: Story, began: float) -> Reply | None:
        """One try; None when the client left because it took too long."""

        def first() -> None:
            if not patience.expired():
                story.first_s = self._loop.time() - began
                if job.stream:
                    patience.reschedule(None)

        try:
            async with asyncio.timeout(job.clients.timeout_s) as patience:
                return await self._sent(job, attempt, first)
        except TimeoutError:
            return None

    async def _sent(self, job: Job, attempt: int, first: Callable[[], None]) -> Reply:
        if not job.clients.lingers_s:
            return await self._service.call(job, attempt, first)
        call = asyncio.ensure_future(self._service.call(job, attempt, first))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            self._lingering.add(call)
            call.add_done_callback(self._lingering.discard)
            self._loop.call_later(job.clients.lingers_s, call.cancel)
            raise


def pause_s(headers: Mapping[str, str], attempt: int, chance: float) -> tuple[float, bool]:
    """Seconds before the next try, `attempt` being the number of retries so far; and whether the server said so."""
    told = _number(headers.get("retry-after-ms"), 0.001) or _number(headers.get("retry-after"), 1.0)
    if 0.0 < told <= OBEYED_S:
        return told, True
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**attempt) * (1.0 - JITTER * chance), False


def _worth_another(reply: Reply | None) -> bool:
    if reply is None:
        return True
    if reply.status == SUCCESS:
        return False
    should = reply.headers.get("x-should-retry")
    if should is not None:
        return should == "true"
    return reply.status in AGAIN or reply.status >= SERVER_ERROR


def _judge(story: Story, reply: Reply | None) -> None:
    """What the story would be if this were its end."""
    if reply is None:
        story.fate, story.word = Fate.GONE, "gave up"
    elif reply.whole:
        story.fate, story.word, story.upstream = Fate.SERVED, "", reply.upstream
    elif reply.reason and reply.reason not in ENVOYS_OWN:
        story.fate, story.word = (Fate.EXPIRED if reply.reason in EXPIRY else Fate.SHED), reply.reason
    else:
        cut = reply.status == SUCCESS
        story.fate, story.word = Fate.FAILED, reply.reason or ("cut" if cut else f"http {reply.status}")
    if story.fate is not Fate.SERVED:
        story.first_s = None


def _number(text: str | None, unit: float) -> float:
    try:
        return float(text) * unit if text is not None else 0.0
    except ValueError:
        return 0.0
