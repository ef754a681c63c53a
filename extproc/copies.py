"""At most one copy of a request runs: a retry takes over the place of the copy before it.

A client that loses patience sends its request again, and mostly leaves the first copy first: then the first has landed
already, and its place was kept (core.retries). Where it is still here, because something between it and us keeps its
connection open, it is ended: a copy that is held is interrupted at once, a copy that runs is ended in Envoy, and its
upstream with it. The retry goes on when the earlier copies have let go of all they held, in the line at their place.

Which copy a retry belongs to is beyond doubt where the client named the request (an idempotency key). Otherwise it is
told by tenant, key and body, and people do send the same prompt several times at once: then only a copy that is the
only one of its kind is ended, and only if no other one has left, failed or been refused lately whose retry this may be.

A copy is interrupted by cancelling its task, which its client's leaving does, too, and maybe at the same moment: so it
is done as asyncio.timeout does it, and a real cancellation stays one.

Deliberately not here: how much a tenant's retries may wait (core.retries), and how a copy is ended (handler).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from math import inf
from types import TracebackType
from typing import Any, Self

from extproc.core.events import Retried, Settled
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Request
from extproc.core.retries import KEYED, Places, RetryBudget
from extproc.ports import Clock, Observer

__all__ = ["REPLACED", "Copies", "Copy"]

LET_GO_S = 1.0
"""How long a retry waits until the copies that it replaces are gone. Well within Envoy's own patience."""
REPLACED = "a retry of this request has taken its place"
"""What the client of a copy is told that was ended for the next one."""


class Copies:
    """All requests that are here, by fingerprint. A request without one has no copies."""

    def __init__(self, clock: Clock, observer: Observer, budget: RetryBudget) -> None:
        """`budget` hears of everybody who comes for the first time."""
        self._clock = clock
        self._observe = observer
        self._budget = budget
        self._here: dict[str, list[Copy]] = {}
        self._places = Places()
        self._ending: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        """Requests that are here, of those that could have copies."""
        return sum(map(len, self._here.values()))

    def sole(self, request: Request) -> Copy:
        """To be held with `async with` while `request` is here.

        Entering ends the copies that it replaces and waits until they are gone; Rejected when they are not in time.
        Leaving raises Rejected when it was itself replaced.
        """
        return Copy(self, request)

    def settled(self, event: Settled) -> None:
        """A request's outcome is known: who was served does not come back, whose client left has its place kept.

        One that was evicted has given its place to the copy that it was evicted for.
        """
        request = event.request
        if not request.fingerprint:
            return
        served = event.answered and not event.given_up
        for copy in self._here.get(request.fingerprint, ()):
            if copy.request is request:
                copy.served, copy.left = served, event.client_gone
                return
        if event.client_gone:
            self._places.give(request.fingerprint, request.ticket)
        elif served:
            self._places.forget(request.fingerprint, request.ticket)

    def patience(self, request: Request) -> float:
        """Whether a retry may wait: 0, or the seconds after which it may come again.

        One that has replaced a copy adds nothing to the load, and is free. One whose copy had left is paid for by its
        tenant's budget, though it keeps the place: those who come again and again would fill the line before everybody
        who comes for the first time.
        """
        if any(copy.request is request and copy.replaces for copy in self._here.get(request.fingerprint, ())):
            return 0.0
        return self._budget.spend(request.tenant, self._clock.time())

    def enter(self, copy: Copy) -> None:
        """Count `copy` in, and let it replace what it may."""
        request = copy.request
        if not request.retries:
            self._budget.came(request.tenant, self._clock.time())
        took = ""
        if request.fingerprint:
            here = self._here.setdefault(request.fingerprint, [])
            if request.retries or request.fingerprint.startswith(KEYED):
                took = self._replace(copy, here)
            here.append(copy)
        if request.retries or took:
            self._observe(Retried(request, took))

    def leave(self, copy: Copy, error: BaseException | None) -> None:
        """Count `copy` out, keep its place where it has one, and tell who waited for its end. error: how it ended."""
        request = copy.request
        if not request.fingerprint:
            return
        here = self._here[request.fingerprint]
        here.remove(copy)
        if not here:
            del self._here[request.fingerprint]
        if not (copy.replaced or copy.served):
            holds = copy.left if copy.running else not isinstance(error, Rejected) or _lost_patience(error)
            self._places.keep(request.fingerprint, request.ticket, copy.place, self._clock.time(), holds=holds)
        for follower in copy.followers:
            follower.precursor_left()

    def _replace(self, copy: Copy, here: list[Copy]) -> str:
        """Let `copy` inherit a place, and end who had it. Returns how that copy was: running, held, left; or empty."""
        request = copy.request
        left, copy.since = self._places.claim(request.fingerprint, self._clock.time())
        found = _replaceable(request, here, left=left)
        took = "left" if copy.since is not None else ""
        if found:
            copy.since, copy.replaces = found[0].place, True
            took = "running" if any(other.running for other in found) else "held"
        if not request.observed:
            for other in here:
                if other.replaced or other in found:
                    copy.follow(other)
            for other in found:
                self._end(other)
        return took

    def _end(self, copy: Copy) -> None:
        ending = copy.end()
        if ending is not None:  # in a task of its own: it has to be seen through even if the retry leaves
            task = asyncio.ensure_future(ending)
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)


def _replaceable(request: Request, here: list[Copy], *, left: bool) -> list[Copy]:
    """The copies that `request` replaces. left: one has left whose retry this may be; then only a name tells others."""
    others = [copy for copy in here if not copy.replaced]
    if request.fingerprint.startswith(KEYED):
        return others
    others = [copy for copy in others if copy.request.retries < request.retries]
    return others if len(others) == 1 and not left else []


def _lost_patience(rejected: Rejected) -> bool:
    """Whether its client left, so to speak: an SDK tells its timeout, and gives up when that is over here, too.

    Who has waited as long as its lane allows does not keep its place: it is told when to come again, and waiting has
    made it late already. A lane that served the late first would have nobody served in time.
    """
    return rejected.reason is Reason.DEADLINE_PASSED


class Copy:
    """One copy of a request while it is here.

    since: arrival of the copy whose place it has inherited, None for none. replaces: that copy was still here.
    replaced: a later copy has its place.
    served, left: what was learned of its outcome before its stream ended.
    """

    __slots__ = (
        "_abort", "_alone", "_cancelling", "_copies", "_interrupted", "_precursors", "_task",
        "followers", "left", "replaced", "replaces", "request", "served", "since",
    )  # fmt: skip

    def __init__(self, copies: Copies, request: Request) -> None:
        self.request = request
        self.since: float | None = None
        self.replaces = self.replaced = self.served = self.left = False
        self.followers: list[Copy] = []
        self._copies = copies
        self._abort: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._interrupted = False
        self._precursors = 0
        self._alone: asyncio.Event | None = None

    @property
    def place(self) -> float:
        """The arrival that gives its place in line."""
        return self.request.arrived if self.since is None else self.since

    @property
    def running(self) -> bool:
        """Whether it was let go to an upstream."""
        return self._abort is not None

    def departs(self, abort: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """From now on it runs. `abort` ends it in Envoy, so that it lands; it must not raise."""
        self._abort = abort

    async def __aenter__(self) -> Self:
        """See Copies.sole."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in a task
        self._task, self._cancelling = task, task.cancelling()
        self._copies.enter(self)
        if self._alone is not None:
            try:
                await self._until_alone(self._alone)
            except BaseException as error:
                self._close(error)
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See Copies.sole."""
        self._close(error)

    def end(self) -> Coroutine[Any, Any, None] | None:
        """A later copy replaces it: interrupt it, or return what ends it."""
        self.replaced = True
        if self._abort is not None:
            return self._abort()
        self._interrupted = True
        self._task.cancel()
        return None

    def follow(self, copy: Copy) -> None:
        """Wait for the end of `copy`."""
        self._alone = self._alone or asyncio.Event()
        self._precursors += 1
        copy.followers.append(self)

    def precursor_left(self) -> None:
        """One that it waits for is gone."""
        self._precursors -= 1
        if not self._precursors and self._alone is not None:
            self._alone.set()

    async def _until_alone(self, alone: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(LET_GO_S):
                await alone.wait()
        except TimeoutError:
            raise Rejected(Reason.LANE_FULL, "an earlier copy of this request has not ended yet") from None

    def _close(self, error: BaseException | None) -> None:
        self._copies.leave(self, error)
        if not self._interrupted:
            return
        if self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise Rejected(Reason.EVICTED, REPLACED, retry_after=inf) from None
