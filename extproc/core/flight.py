"""One request from the moment its tenant's quota was taken until its books are closed: the only mutable request object.

What a flight holds, and how each comes back, exactly once:

* slots (one at the upstream, one of the tenant's concurrency): when the stream ends, whatever ended it;
* tokens at an upstream (`reserved`): when its attempt failed (by how it failed), or when it served (by reported usage);
* tokens of the tenant: when the outcome is known.

Records come late, in any order, twice or never, so every step takes what it settles out of the books first; a step that
finds nothing changes nothing. Each returns the changes to apply and does no I/O.

Refunds by how an attempt ended: refused or never reached gives all tokens back; cut after it was accepted keeps the
input and the output seen; unknown keeps the estimate. A provider that charges up front keeps what it charged. A request
that was sent counts against requests per minute whatever became of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from extproc.core.capacity import Change, Claim
from extproc.core.policy import Accounting, Kind
from extproc.core.request import Request, Size, Usage

__all__ = ["Flight", "Refund"]


class Refund(StrEnum):
    """How much of a reservation comes back after an attempt that did not serve."""

    UNSENT = "unsent"
    ALL = "all"
    INPUT_KEPT = "input_kept"


@dataclass(slots=True, eq=False)
class Flight:
    """See the head of this file. Times are seconds on the event loop's clock.

    heard: the failed attempts (upstream and number) that were reported. hurried: its time limits are the caller's own,
    so that a timeout says nothing about an upstream. Before `depart` only `cancel` changes anything.
    """

    request: Request
    allowance: tuple[Claim, ...] = ()
    prices: Mapping[str, tuple[Claim, ...]] = field(default_factory=dict)
    accounting: Mapping[str, Accounting] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    departed: float | None = None
    landed: float | None = None
    attempts: int = 0
    heard: set[tuple[str, int]] = field(default_factory=set)
    hurried: bool = False
    settled: bool = False
    _reserved: dict[str, tuple[Claim, ...]] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)
    _failed: set[str] = field(default_factory=set)
    _served: str = ""
    _at: str = ""

    @property
    def waited_s(self) -> float:
        """Seconds from arrival to departure, 0 before it departed."""
        return max(0.0, (self.departed or self.request.arrived) - self.request.arrived)

    @property
    def open_books(self) -> bool:
        """Whether a record could still change anything."""
        return not self.settled or bool(self._reserved)

    def depart(self, order: tuple[str, ...], prices: Mapping[str, tuple[Claim, ...]], now: float) -> None:
        """It goes to order[0], whose claims the limiter has taken."""
        self.order, self.prices, self.departed = order, prices, now
        self._at = order[0]
        self._reserved[order[0]] = _tokens(self.prices[order[0]])
        self._asked.add(order[0])

    def cancel(self) -> list[Change]:
        """It never departed: all of the tenant's quota comes back."""
        if self.settled or self.departed is not None:
            return []
        self.settled = True
        return [Change(claim.key, claim.amount) for claim in self.allowance]

    def land(self, now: float) -> list[Change]:
        """Its stream ended: slots come back. Once."""
        if self.departed is None or self.landed is not None:
            return []
        changes = self._slot(self._at, 1.0)
        self.landed = now
        return changes + [Change(c.key, c.amount) for c in self.allowance if _kind(c.key) == "slots"]

    def attempt_failed(self, upstream: str, refund: Refund, *, last: bool = False) -> list[Change]:
        """`upstream` did not serve. What it held comes back, and moves to the next in order while the request runs.

        last: nobody is asked after it.
        """
        if upstream not in self.order or upstream in self._failed or upstream == self._served:
            return []
        self._failed.add(upstream)
        changes = self._ask(upstream) + self._give_back(upstream, refund)
        if upstream == self._at:
            changes += self._slot(upstream, 1.0)
            self._at = ""
            behind = () if last else self.order[self.order.index(upstream) + 1 :]
            following = next((name for name in behind if name not in self._failed), None)
            if following is not None:
                changes += self._move_to(following)
        return _net(changes)

    def served(self, upstream: str, usage: Usage | None, seen_output: int | None = None) -> list[Change]:
        """`upstream` answered. usage None is unknown; then seen_output, if known, bounds the output of a cut answer."""
        if self.departed is None or self.settled:
            return []
        self.settled = True
        self._served = upstream
        actual = _actual(self.request.size, usage, seen_output)
        # Not reserved means that the failure of the one before it is not known yet.
        changes = [] if upstream in self._reserved else self._reserve(upstream)
        upfront = self.accounting.get(upstream) is Accounting.UPFRONT
        changes += [_settle(claim, actual, upfront=upfront) for claim in self._reserved.pop(upstream)]
        return _net(changes + self._settle_tenant(actual))

    def unserved(self, left_at: str = "") -> list[Change]:
        """No upstream answered. left_at: where it was when the client gave up on it, who still pays for the input."""
        if self.departed is None or self.settled:
            return []
        self.settled = True
        if left_at not in self.order:
            return _net(self._settle_tenant(Size(0, 0)))
        changes = [] if left_at in self._reserved or left_at in self._failed else self._reserve(left_at)
        changes += self._give_back(left_at, Refund.INPUT_KEPT)
        return _net(changes + self._settle_tenant(Size(self.request.size.input, 0)))

    def expire(self) -> list[Change]:
        """No record will come any more. Failed attempts get their tokens back; what is unknown keeps the estimate."""
        if self.departed is None:
            return []
        known, self.settled = self.settled, True
        if not known:
            self._reserved.clear()
            return []
        return [change for name in list(self._reserved) for change in self._give_back(name, Refund.ALL)]

    def _move_to(self, upstream: str) -> list[Change]:
        self._at = upstream
        changes = self._slot(upstream, -1.0)
        if self.settled:
            return changes + self._ask(upstream)
        return changes if upstream in self._reserved else changes + self._reserve(upstream)

    def _reserve(self, upstream: str) -> list[Change]:
        self._reserved[upstream] = _tokens(self.prices.get(upstream, ()))
        return [Change(c.key, -c.amount) for c in self._reserved[upstream]] + self._ask(upstream)

    def _ask(self, upstream: str) -> list[Change]:
        if upstream in self._asked:
            return []
        self._asked.add(upstream)
        return [Change(c.key, -c.amount) for c in self._requests(upstream)]

    def _requests(self, upstream: str) -> list[Claim]:
        return [claim for claim in self.prices.get(upstream, ()) if _kind(claim.key) == Kind.REQUESTS]

    def _give_back(self, upstream: str, refund: Refund) -> list[Change]:
        reserved = self._reserved.pop(upstream, ())
        changes = []
        if refund is Refund.INPUT_KEPT:
            if self.accounting.get(upstream) is not Accounting.UPFRONT:
                kept = Size(self.request.size.input, 0)
                changes = [Change(c.key, max(0.0, c.amount - _amount(c.key, kept))) for c in reserved]
        else:
            changes = [Change(c.key, c.amount) for c in reserved]
        if refund is Refund.UNSENT and upstream in self._asked:
            self._asked.discard(upstream)
            changes += [Change(c.key, c.amount) for c in self._requests(upstream)]
        return changes

    def _settle_tenant(self, actual: Size) -> list[Change]:
        return [_settle(claim, actual, upfront=False) for claim in _tokens(self.allowance)]

    def _slot(self, upstream: str, amount: float) -> list[Change]:
        if self.landed is not None:
            return []
        return [Change(c.key, amount) for c in self.prices.get(upstream, ()) if _kind(c.key) == "slots"]


def _net(changes: list[Change]) -> list[Change]:
    """One change per key, and none that changes nothing."""
    total: dict[str, float] = {}
    for change in changes:
        total[change.key] = total.get(change.key, 0.0) + change.amount
    return [Change(key, amount) for key, amount in total.items() if amount]


def _kind(key: str) -> str:
    return key.rpartition("/")[2]


def _tokens(claims: tuple[Claim, ...]) -> tuple[Claim, ...]:
    return tuple(claim for claim in claims if _kind(claim.key) not in ("slots", Kind.REQUESTS))


def _amount(key: str, size: Size) -> int:
    kind = _kind(key)
    return size.input if kind == Kind.INPUT else size.output if kind == Kind.OUTPUT else size.total


def _settle(claim: Claim, actual: Size, *, upfront: bool) -> Change:
    left = claim.amount - _amount(claim.key, actual)
    return Change(claim.key, min(0.0, left) if upfront else left)


def _actual(estimate: Size, usage: Usage | None, seen_output: int | None) -> Size:
    if usage is not None and usage.input is not None:
        if usage.output is not None:
            return Size(usage.input, usage.output)
        return Size(usage.input, estimate.output if seen_output is None else min(seen_output, estimate.output))
    if seen_output is not None:
        return Size(estimate.input, min(seen_output, estimate.output))
    return estimate
