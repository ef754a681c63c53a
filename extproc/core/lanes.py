"""Who waits, and whose turn it is: bounded lanes of strict priority, first come first served inside.

Inside a lane, waiters that want the same upstreams form one group; only a group's first waiter can be next, so finding
whose turn it is costs as much as there are groups, not as there are waiters, and a head that fits nowhere holds up only
those who want the same. Between lanes the better one is asked first and closes what it could not get (see capacity).

A full lane sheds its newest. Bounds are requests, tokens and bytes, because each of them has filled a queue somewhere.

Deliberately not here: waiting itself (the limiter waits), shares between lanes and fairness between tenants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from extproc.core.capacity import Option
from extproc.core.policy import Lane
from extproc.core.request import Request

__all__ = ["FIRST_ONLY", "Backlog", "Lanes", "Waiter"]

Group = tuple[str, ...]

FIRST_ONLY = ""
"""Stands first in the group of those who would take only the first healthy of its upstreams."""


@dataclass(slots=True, eq=False)
class Waiter:
    """One request in line. group: the upstreams it would take now, empty when not in line. seq: order of arrival."""

    request: Request
    group: Group
    seq: int
    spilled: bool = False
    gone: bool = False
    granted: Option | None = None


@dataclass(slots=True)
class Backlog:
    """Sum of what waits: requests, tokens and bytes."""

    requests: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, request: Request, sign: int = 1) -> None:
        """Count one request in, or out with sign -1."""
        self.requests += sign
        self.tokens += sign * request.size.total
        self.bytes += sign * request.bytes


@dataclass(slots=True)
class _Group:
    waiters: deque[Waiter] = field(default_factory=deque)
    backlog: Backlog = field(default_factory=Backlog)


class Lanes:
    """All lanes of one process, best first."""

    def __init__(self, rules: Iterable[Lane]) -> None:
        """One empty lane per rule."""
        self.rules: dict[str, Lane] = {rule.name: rule for rule in sorted(rules, key=lambda rule: rule.rank)}
        self._groups: dict[str, dict[Group, _Group]] = {name: {} for name in self.rules}
        self.backlogs: dict[str, Backlog] = {name: Backlog() for name in self.rules}

    def __len__(self) -> int:
        """Number of waiting requests."""
        return sum(backlog.requests for backlog in self.backlogs.values())

    def join(self, waiter: Waiter) -> None:
        """Stand in line, at the place that the arrival gives (after a change of group, too)."""
        group = self._groups[waiter.request.lane].setdefault(waiter.group, _Group())
        line = group.waiters
        if line and line[-1].seq > waiter.seq:
            place = next(i for i, other in enumerate(line) if other.seq > waiter.seq)
            line.insert(place, waiter)
        else:
            line.append(waiter)
        group.backlog.add(waiter.request)
        self.backlogs[waiter.request.lane].add(waiter.request)

    def leave(self, waiter: Waiter) -> None:
        """Step out of line, wherever one stands. ValueError when not in line."""
        groups = self._groups[waiter.request.lane]
        group = groups[waiter.group]
        if group.waiters[0] is waiter:
            group.waiters.popleft()
        else:
            group.waiters.remove(waiter)
        group.backlog.add(waiter.request, -1)
        self.backlogs[waiter.request.lane].add(waiter.request, -1)
        if not group.waiters:
            del groups[waiter.group]

    def regroup(self, waiter: Waiter, group: Group) -> None:
        """Want other upstreams from now on, without losing one's place."""
        self.leave(waiter)
        waiter.group = group
        self.join(waiter)

    def heads(self) -> list[Waiter]:
        """Whose turn it may be, in the order to ask: lanes by rank, inside a lane by arrival."""
        found: list[Waiter] = []
        for groups in self._groups.values():
            found += sorted((group.waiters[0] for group in groups.values()), key=_seq)
        return found

    def full(self, lane: str) -> bool:
        """Whether the lane is over one of its bounds."""
        rule, backlog = self.rules[lane], self.backlogs[lane]
        return (
            backlog.requests > rule.max_requests
            or backlog.tokens > rule.max_tokens
            or backlog.bytes > rule.max_bytes
        )  # fmt: skip

    def ahead(self, waiter: Waiter, upstream: str, allows: Callable[[str], bool]) -> Backlog:
        """What goes to `upstream` before `waiter`, taken as the newest of its lane."""
        total = Backlog()
        for name, groups in self._groups.items():
            for group, line in groups.items():
                if _goes_to(group, upstream, allows):
                    total.requests += line.backlog.requests
                    total.tokens += line.backlog.tokens
            if name == waiter.request.lane:
                break
        if _goes_to(waiter.group, upstream, allows):
            total.add(waiter.request, -1)
        return total

    def waiters(self) -> Iterator[Waiter]:
        """Everybody in line, for shutdown and for the state page."""
        for groups in self._groups.values():
            for group in groups.values():
                yield from list(group.waiters)


def _goes_to(group: Group, upstream: str, allows: Callable[[str], bool]) -> bool:
    if group[:1] == (FIRST_ONLY,):
        return upstream == next(filter(allows, group[1:]), None)
    return upstream in group


def _seq(waiter: Waiter) -> int:
    return waiter.seq
