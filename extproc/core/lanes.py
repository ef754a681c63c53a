"""Who waits, and whose turn it is: bounded lanes of strict priority, first come first served inside.

Inside a lane, waiters that want the same of the same upstreams form one group; only a group's first waiter can be next,
so finding whose turn it is costs as much as there are groups, not as there are waiters, and a head that fits nowhere
holds up only those who want the same: a model whose tokens are gone does not hold up another at the same upstream.
Between groups and lanes the better claim is asked first and closes what it could not get (see capacity).

A full lane sheds its newest. Bounds are requests, tokens and bytes, because each of them has filled a queue somewhere.

Deliberately not here: waiting itself (the limiter waits), shares between lanes and fairness between tenants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from extproc.core.capacity import Option
from extproc.core.policy import Lane
from extproc.core.request import Request
from extproc.core.value import value

__all__ = ["Backlog", "Group", "Lanes", "Waiter"]


@value
class Group:
    """What a waiter would take now: of these upstreams, counted under these keys.

    first_only: only the first healthy one of them, because its lane holds.
    """

    names: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()
    first_only: bool = False

    def takes(self, upstream: str, allows: Callable[[str], bool]) -> bool:
        """Whether its waiters would go to `upstream` now."""
        if self.first_only:
            return upstream == next(filter(allows, self.names), None)
        return upstream in self.names


@dataclass(slots=True, eq=False)
class Waiter:
    """One request in line. group: an empty one when not in line. seq: order of arrival."""

    request: Request
    group: Group
    seq: float
    spilled: bool = False
    gone: bool = False
    granted: Option | None = None


@dataclass(slots=True)
class Backlog:
    """Sum of what waits: requests, tokens (and those of them that are input) and bytes."""

    requests: int = 0
    tokens: int = 0
    input: int = 0
    bytes: int = 0

    def add(self, request: Request, sign: int = 1) -> None:
        """Count one request in, or out with sign -1."""
        self.requests += sign
        self.tokens += sign * request.size.total
        self.input += sign * request.size.input
        self.bytes += sign * request.bytes

    def merge(self, other: Backlog) -> None:
        """Count all of another in."""
        self.requests += other.requests
        self.tokens += other.tokens
        self.input += other.input
        self.bytes += other.bytes


@dataclass(slots=True)
class _Group:
    waiters: deque[Waiter] = field(default_factory=deque)
    backlog: Backlog = field(default_factory=Backlog)

    def heads(self, depth: int) -> Iterator[tuple[Waiter, bool]]:
        for place, waiter in enumerate(islice(self.waiters, depth), 1):
            yield waiter, place == depth < len(self.waiters)


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
        """Step out of line, wherever one stands. KeyError or ValueError when not in line."""
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

    def heads(self, depth: int = 1) -> list[tuple[Waiter, bool]]:
        """Whose turn it may be, in the order to ask: lanes by rank, inside a lane by arrival; `depth` of each group.

        With each, whether it is the last that was taken of a group that has more.
        """
        found: list[tuple[Waiter, bool]] = []
        for groups in self._groups.values():
            heads = [head for group in groups.values() for head in group.heads(depth)]
            found += sorted(heads, key=_seq)
        return found

    def full(self, lane: str) -> bool:
        """Whether the lane is over one of its bounds."""
        rule, backlog = self.rules[lane], self.backlogs[lane]
        return (
            backlog.requests > rule.max_requests
            or backlog.tokens > rule.max_tokens
            or backlog.bytes > rule.max_bytes
        )  # fmt: skip

    def ahead(self, waiter: Waiter, upstream: str, key: str, allows: Callable[[str], bool]) -> Backlog:
        """What goes to `upstream`, counts under `key` and comes before `waiter`, taken as the newest of its lane."""
        total, rank = Backlog(), self.rules[waiter.request.lane].rank
        for name, groups in self._groups.items():
            if self.rules[name].rank > rank:
                break
            for group, line in groups.items():
                if key in group.keys and group.takes(upstream, allows):
                    total.merge(line.backlog)
        if key in waiter.group.keys and waiter.group.takes(upstream, allows):
            total.add(waiter.request, -1)
        return total

    def waiters(self) -> Iterator[Waiter]:
        """Everybody in line, for shutdown and for the state page."""
        for groups in self._groups.values():
            for group in groups.values():
                yield from list(group.waiters)


def _seq(head: tuple[Waiter, bool]) -> float:
    return head[0].seq
