"""Retry-After as a promise: whoever is told to come back at a time has a place then.

A refusal with a time books what the request wants at that time, so newcomers' forecasts count it as work ahead, and
those who are refused after it are told later times. Who comes back at its time or later inherits the place that its
first arrival gave it, and its booking is dropped. Who comes sooner is a newcomer; if it has to be refused again, it is
told the same time. A booking lapses when its client could have come and did not.

Not everybody comes back: SDKs take a wait of more than a minute for none, and lanes differ, for so do their clients.
Which part of a lane's promises is taken up is learned, for waits up to a minute and for longer ones, and its bookings
count for that much. At first those up to a minute count whole, and longer ones not at all: what is booked for a crowd
that never comes would keep a lane empty for as long as it takes to find that out.

Deliberately not here: which time is told (forecast).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from extproc.core.curve import Curve
from extproc.core.fairness import cost
from extproc.core.lines import Backlog, Group
from extproc.core.request import Request
from extproc.core.value import value

__all__ = ["Book", "Promise", "Promised", "Promises", "Slot"]

JITTER = 0.25
"""Clients come up to this share of their wait later, see dialects.refusal."""
GRACE_S = 5.0
"""And so much later than that, before a promise lapses."""
EARLY_S = 0.05
"""Who comes sooner by no more than this is on time."""
LONG_S = 60.0
"""The longest wait that SDKs obey."""
NEAR_S, FAR_S = 8.0, 4
"""What is due later than `NEAR_S` from now is booked by so many seconds together."""
WEIGHT = 0.02
"""Weight of the newest promise in the share that is taken up."""
FIRST = 5
"""What is taken for that share at first weighs as much as so many promises."""
MOST_ALIKE = 64
"""Promises for requests with one fingerprint."""


@value
class Promise:
    """since: the first arrival, which gives its place. group: what it will want. due, late: between these it comes.

    second: of its turn, where it is booked. long: whether clients may not wait for it. All times on the clock.
    """

    number: int
    request: Request
    group: Group
    since: float
    due: float
    late: float
    second: int
    long: bool

    def kept_at(self, now: float) -> bool:
        """Whether who comes now comes at its time."""
        return now >= self.due - EARLY_S


class Promises:
    """See the head of this file. limit: promises that are remembered; beyond, the one that lapses first is dropped."""

    def __init__(self, limit: int = 20_000) -> None:
        """Nothing is promised."""
        self._limit = limit
        self._open: dict[int, Promise] = {}
        self._alike: dict[str, list[Promise]] = {}
        self._books: dict[tuple[str, bool], Book] = {}
        self._lapsing: list[tuple[float, int]] = []
        self._numbers = count()

    def __len__(self) -> int:
        """How many are outstanding."""
        return len(self._open)

    def make(self, request: Request, group: Group, since: float, now: float, seconds: float, turn_s: float) -> None:
        """`request`, which has a fingerprint, was told to come back in `seconds`, when its turn is in `turn_s`.

        group: what it will want then.
        """
        self._expire(now)
        due, second = now + seconds, int(now + turn_s)
        if turn_s > NEAR_S:
            second -= second % FAR_S
        late = due + JITTER * seconds
        promise = Promise(next(self._numbers), request, group, since, due, late, second, seconds > LONG_S)
        self._open[promise.number] = promise
        heappush(self._lapsing, (late + GRACE_S, promise.number))
        alike = self._alike.setdefault(request.fingerprint, [])
        insort(alike, promise, key=_due)
        if (key := (request.lane, promise.long)) not in self._books:
            self._books[key] = Book(kept=0.0 if promise.long else 1.0)
        self._books[key].add(promise, 1)
        if len(alike) > MOST_ALIKE:
            self._remove(alike[0])
        elif len(self._open) > self._limit:
            self._remove(self._open[self._lapsing[0][1]])  # who lapses first is there, or `_expire` had passed it over

    def claim(self, request: Request, now: float) -> Promise | None:
        """Take up the promise made to an earlier copy of `request`, by tenant and lane; None when there is none.

        One that is not due yet is given to an announced retry only: another request may have the same body.
        """
        self._expire(now)
        for promise in self._alike.get(request.fingerprint, ()):
            if _same_place(promise.request, request) and (promise.kept_at(now) or request.retries):
                self._remove(promise)
                if promise.kept_at(now):
                    self._learn(promise, 1.0)
                return promise
        return None

    def booked(self, lane: str, now: float) -> list[tuple[Book, float]]:
        """The books of a lane, each with the share of its promises that is taken up; those that count for nothing."""
        self._expire(now)
        books = (self._books.get((lane, long)) for long in (False, True))
        return [(book, book.kept) for book in books if book is not None and book.slots and book.kept > WEIGHT]

    def _expire(self, now: float) -> None:
        while self._lapsing and (self._lapsing[0][0] <= now or self._lapsing[0][1] not in self._open):
            promise = self._open.get(heappop(self._lapsing)[1])
            if promise is not None:
                self._remove(promise)
                self._learn(promise, 0.0)

    def _learn(self, promise: Promise, kept: float) -> None:
        book = self._books[promise.request.lane, promise.long]
        book.heard += 1
        book.kept += max(WEIGHT, 1 / (FIRST + book.heard)) * (kept - book.kept)

    def _remove(self, promise: Promise) -> None:
        del self._open[promise.number]
        alike = self._alike[promise.request.fingerprint]
        alike.remove(promise)
        if not alike:
            del self._alike[promise.request.fingerprint]
        self._books[promise.request.lane, promise.long].add(promise, -1)
        if len(self._lapsing) > 2 * len(self._open) + 64:
            self._lapsing = [entry for entry in self._lapsing if entry[1] in self._open]
            heapify(self._lapsing)


class Slot:
    """All that is booked in a lane within one second, in all and by tenant. due, late: sums of when it comes."""

    __slots__ = ("by_tenant", "due", "groups", "late", "total")

    def __init__(self) -> None:
        """Nothing."""
        self.due = self.late = 0.0
        self.total = Backlog()
        self.groups: dict[Group, Backlog] = {}
        self.by_tenant: dict[str, dict[Group, Backlog]] = {}

    def back_within(self, seconds: float, now: float) -> float:
        """Which share of those who are not back yet come within so many seconds: evenly until they are late."""
        due, late = self.due / self.total.requests, self.late / self.total.requests
        if now >= late:
            return 0.0
        return min(1.0, max(0.0, now + seconds - max(now, due)) / (late - max(now, due)))

    def add(self, promise: Promise, sign: int) -> None:
        """Count one in, or out with sign -1."""
        request = promise.request
        self.total.add(request, sign)
        self.due += sign * promise.due
        self.late += sign * promise.late
        own = self.by_tenant.setdefault(request.tenant, {})
        for backlogs in (self.groups, own):
            backlog = backlogs.setdefault(promise.group, Backlog())
            backlog.add(request, sign)
            if not backlog.requests:
                del backlogs[promise.group]
        if not own:
            del self.by_tenant[request.tenant]


@dataclass(slots=True)
class Promised:
    """What one tenant was promised: requests, and their cost (see fairness). weight: the tenant's."""

    weight: float
    requests: int = 0
    cost: float = 0.0


class Book:
    """What is promised in one lane: slots by the second (on the clock) in which they are due, and sums by tenant.

    drawn: a curve over its tenants, and after how many changes it was drawn (forecast). kept: the share of them that is
    taken up. heard: of how many it is known whether they were.
    """

    __slots__ = ("changes", "drawn", "heard", "kept", "seconds", "slots", "tenants")

    def __init__(self, kept: float) -> None:
        """Nothing."""
        self.slots: dict[int, Slot] = {}
        self.seconds: list[int] = []
        self.tenants: dict[str, Promised] = {}
        self.changes = 0
        self.drawn: tuple[int, Curve] | None = None
        self.kept = kept
        self.heard = 0

    def before(self, moment: float) -> Backlog:
        """The sum of what is due until then."""
        total = Backlog()
        for second in self.seconds:
            if second > moment:
                break
            total.merge(self.slots[second].total)
        return total

    def add(self, promise: Promise, sign: int) -> None:
        """Count one in, or out with sign -1."""
        second, request = promise.second, promise.request
        slot = self.slots.get(second)
        if slot is None:
            slot = self.slots[second] = Slot()
            insort(self.seconds, second)
        slot.add(promise, sign)
        tenant = self.tenants.setdefault(request.tenant, Promised(request.weight))
        tenant.requests += sign
        tenant.cost += sign * cost(request.size)
        if not tenant.requests:
            del self.tenants[request.tenant]
        if not slot.groups:
            del self.slots[second]
            self.seconds.remove(second)
        self.changes += 1


def _same_place(one: Request, other: Request) -> bool:
    return (one.tenant, one.lane) == (other.tenant, other.lane)


def _due(promise: Promise) -> float:
    return promise.due
