"""What happened to each request of late, so that it can be told why: the events about it, as they were announced.

A dossier is opened by the first event about a request and closed by the one that ends it. Events are kept as they are,
with the time at which each was heard; nothing is computed before somebody asks (see explain), because nobody asks about
most requests. Open dossiers are as many as requests that are here or whose books are open; of closed ones a ring is
kept.

A request may have been refused before anything was known of it but its headers: it has a dossier all the same. What a
client names a request is its own affair: the name may be missing, used again, or of any length. Dossiers are found by
the name, shortened where it is long, and the newest of that name is found; the ticket, which is ours, finds each.

Everything here is of one event loop; ask in it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from extproc.core import events
from extproc.core.refusal import Reason
from extproc.core.request import Request
from extproc.shapes import RequestState

__all__ = ["Dossier", "Dossiers", "failed_for", "name_of"]

T = TypeVar("T")
E = TypeVar("E", events.Queued, events.Waited, events.Admitted, events.Refused, events.Left, events.Settled, Any)

LONGEST_ID = 128
"""Characters of a name that are kept."""
MOST_EVENTS = 64
"""So many events of one request are kept."""


class Dossier:
    """One request. Times are on the clock of `Request.arrived`; `epoch_s` makes them times of the calendar.

    ticket: a name of ours that no other has. id: what its client called it, shortened; may be empty. request: None when
    it was refused before it was priced. events: what was heard, and when. began, ended: its arrival, and when nothing
    was left to come but stragglers; None while it is open. earlier: how many of the same id came before, as far as they
    were still known. dropped: events that were not kept.
    """

    __slots__ = ("began", "dropped", "earlier", "ended", "events", "id", "offset_s", "request", "sent", "ticket")

    def __init__(self, ticket: str, name: str, request: Request | None, began: float, offset_s: float) -> None:
        """Nothing was heard yet."""
        self.ticket = ticket
        self.id = name
        self.request = request
        self.began = began
        self.offset_s = offset_s
        self.events: list[tuple[float, events.Event]] = []
        self.ended: float | None = None
        self.earlier = 0
        self.dropped = 0
        self.sent = False

    def epoch_s(self, at: float) -> float:
        """The calendar's time (epoch seconds) of a time of this dossier."""
        return at + self.offset_s

    def last(self, kind: type[T]) -> T | None:
        """The last event of a kind; None when there was none."""
        return next((event for _, event in reversed(self.events) if isinstance(event, kind)), None)

    @property
    def heard(self) -> float:
        """When something was heard last."""
        return self.events[-1][0] if self.events else self.began

    @property
    def trace(self) -> str:
        """The `traceparent` header of the request, as it came, or empty."""
        if self.request is not None:
            return self.request.trace
        refused = self.last(events.Refused)
        return refused.trace if refused else ""

    @property
    def tenant(self) -> str:
        """Name of its tenant, empty when it was refused before that was known."""
        return self.request.tenant if self.request else getattr(self.last(events.Refused), "tenant", "")

    @property
    def lane(self) -> str:
        """Name of its lane, empty when it was refused before that was known."""
        return self.request.lane if self.request else getattr(self.last(events.Refused), "lane", "")

    @property
    def model(self) -> str:
        """The model it asked for, empty when it was refused before that was known."""
        return self.request.model if self.request else ""

    @property
    def refused(self) -> events.Refused | None:
        """Its refusal; None when it was not refused."""
        return self.last(events.Refused)

    @property
    def reason(self) -> str:
        """Why it was refused or evicted, or let go and not answered; empty when it was not, or its client had left."""
        refused, settled = self.refused, self.last(events.Settled)
        if refused is not None or settled is None or settled.client_gone:
            return str(refused.reason) if refused else ""
        return str(Reason.EVICTED if settled.evicted else failed_for(settled) or "")

    @property
    def upstream(self) -> str:
        """Who served it, or has it now, as far as that is known; empty for nobody."""
        settled, admitted = self.last(events.Settled), self.last(events.Admitted)
        if settled is not None:
            return settled.upstream
        if admitted is None:
            return ""
        failed = self.last(events.AttemptFailed)
        return failed.following if failed else admitted.order[0]

    @property
    def state(self) -> RequestState:
        """How it stands."""
        settled = self.last(events.Settled)
        if settled is not None:
            return _outcome(settled)
        if self.sent:
            return "running"
        if self.last(events.Refused) is not None:
            return "refused"
        if self.last(events.Left) is not None:
            return "left"
        return "waiting" if self.last(events.Queued) is not None else "arriving"


class Dossiers:
    """An Observer; see the head of this file. ended: called with every dossier that was closed; must not raise."""

    def __init__(
        self, limit: int, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        """limit: so many closed ones are kept. `clock` is that of `Request.arrived`, `wall` tells epoch seconds."""
        self.ended: list[Callable[[Dossier], None]] = []
        self._limit = limit
        self._clock = clock
        self._wall = wall
        self._open: dict[str, Dossier] = {}
        self._closed: OrderedDict[str, Dossier] = OrderedDict()
        self._named: dict[str, Dossier] = {}
        self._strangers = 0
        self._hear: dict[type[Any], Callable[[Any, float], None]] = {
            events.Queued: self._about,
            events.Waited: self._about,
            events.Admitted: self._admitted,
            events.Retried: self._about,
            events.Observed: self._about,
            events.Shadowed: self._about,
            events.Refused: self._refused,
            events.Left: self._ends,
            events.Settled: self._ends,
            events.AttemptFailed: self._afterwards,
            events.Overshot: self._afterwards,
        }

    def __call__(self, event: events.Event) -> None:
        """Keep the event, if it is about a request."""
        hear = self._hear.get(type(event))
        if hear is not None:
            hear(event, self._clock())

    def __len__(self) -> int:
        """How many are kept, open and closed."""
        return len(self._open) + len(self._closed)

    @property
    def open(self) -> int:
        """How many are open."""
        return len(self._open)

    def of(self, name: str) -> Dossier | None:
        """The dossier of this ticket, or the newest of this id; None when there is none, or none any more."""
        return self._open.get(name) or self._closed.get(name) or self._named.get(name_of(name))

    def newest(
        self,
        limit: int,
        *,
        tenant: str | None = None,
        lane: str | None = None,
        reason: str | None = None,
        upstream: str | None = None,
        state: str | None = None,
    ) -> list[Dossier]:
        """At most `limit` dossiers that are as asked for, those first of which something was heard last.

        Of open ones the newest are taken, of closed ones those that ended last.
        """
        wanted = {"tenant": tenant, "lane": lane, "reason": reason, "upstream": upstream, "state": state}
        asked = [(name, value) for name, value in wanted.items() if value is not None]

        def fitting(dossiers: Iterable[Dossier]) -> Iterator[Dossier]:
            return (one for one in dossiers if all(getattr(one, name) == value for name, value in asked))

        found = [one for some in (self._open, self._closed) for one in islice(fitting(reversed(some.values())), limit)]
        return sorted(found, key=lambda one: one.heard, reverse=True)[:limit]

    def _about(self, event: Any, now: float) -> None:
        """Something about a request that is here."""
        dossier = self._dossier(event.request)
        self._keep(dossier, _fitted(event, dossier.request), now)

    def _admitted(self, event: events.Admitted, now: float) -> None:
        dossier = self._dossier(event.request)
        dossier.sent = True
        self._keep(dossier, _fitted(event, dossier.request), now)

    def _ends(self, event: events.Settled | events.Left, now: float) -> None:
        dossier = self._dossier(event.request)
        self._keep(dossier, _fitted(event, dossier.request), now)
        self._close(dossier, now)

    def _refused(self, event: events.Refused, now: float) -> None:
        request = event.request
        if request is None:
            self._strangers += 1
            ticket = f"refused-{self._strangers}"
            dossier = self._enter(ticket, event.request_id, None, now - event.waited_s)
        else:
            dossier = self._dossier(request)
        self._keep(dossier, _fitted(event, dossier.request), now)
        if not dossier.sent:  # else its books tell how it ended
            self._close(dossier, now)

    def _afterwards(self, event: events.AttemptFailed | events.Overshot, now: float) -> None:
        """What is known by the ticket alone; it may come when all is over, and then later than anybody remembers."""
        dossier = self._open.get(event.ticket) or self._closed.get(event.ticket)
        if dossier is not None:
            self._keep(dossier, event, now)

    def _dossier(self, request: Request) -> Dossier:
        dossier = self._open.get(request.ticket)
        if dossier is None:
            if len(request.id) > LONGEST_ID:
                request = replace(request, id=name_of(request.id))
            dossier = self._enter(request.ticket, request.id, request, request.arrived)
        return dossier

    def _enter(self, ticket: str, name: str, request: Request | None, began: float) -> Dossier:
        offset_s = self._wall() - self._clock()
        dossier = self._open[ticket] = Dossier(ticket, name_of(name), request, began, offset_s)
        if dossier.id:
            before = self._named.get(dossier.id)
            if before is not None:
                dossier.earlier = before.earlier + 1
            self._named[dossier.id] = dossier
        return dossier

    def _keep(self, dossier: Dossier, event: Any, now: float) -> None:
        if len(dossier.events) < MOST_EVENTS or isinstance(event, (events.Settled, events.Refused, events.Left)):
            dossier.events.append((now, event))
        else:
            dossier.dropped += 1

    def _close(self, dossier: Dossier, now: float) -> None:
        dossier.ended = now
        del self._open[dossier.ticket]
        self._closed[dossier.ticket] = dossier
        if len(self._closed) > self._limit:
            _, oldest = self._closed.popitem(last=False)
            if self._named.get(oldest.id) is oldest:
                del self._named[oldest.id]
        for hear in self.ended:
            hear(dossier)


def failed_for(settled: events.Settled) -> Reason | None:
    """What its caller was told when no upstream answered; None where one did, and for its own error passed on."""
    if settled.status < 500:  # noqa: PLR2004 - HTTP
        return None
    return Reason.DEADLINE_PASSED if settled.status == 504 else Reason.UPSTREAM_FAILED  # noqa: PLR2004


def name_of(text: str) -> str:
    """A client's name for a request as it is kept: short, and without what is no text."""
    if len(text) <= LONGEST_ID and text.isprintable():
        return text
    return "".join(char if char.isprintable() else "?" for char in text[:LONGEST_ID])


def _fitted(event: E, request: Request | None) -> E:
    """The event with the request as it is kept: nothing else that a client made holds on to anything large."""
    return event if request is None or event.request is request else replace(event, request=request)


def _outcome(settled: events.Settled) -> RequestState:
    if settled.lost:
        return "unknown"
    if settled.given_up:
        return "evicted" if settled.evicted else "left"
    return "served" if settled.answered and not settled.fault else "failed"
