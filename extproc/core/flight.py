"""One request from the moment its caller's own was taken until its books are closed: the only mutable request object.

What a flight holds, and how each comes back, exactly once:

* what is held while it runs (a slot and room in a KV cache at the upstream, one of the tenant's concurrency): when the
  stream ends, whatever ended it; on a failover each upstream's own moves to the next;
* tokens at an upstream (`reserved`): when its attempt failed (by how it failed), or when it served (by reported usage);
  with them the upstream's own dollars, at its own prices;
* tokens of the tenant and of the session: when the outcome is known;
* dollars of both, and of the route: then too, by the prices of who served. The dearest upstream it could go to was
  reserved.

Records come late, in any order, twice or never, so every step takes what it settles out of the books first; a step that
finds nothing changes nothing. Each returns the changes to apply and does no I/O.

Refunds by how an attempt ended: refused or never reached gives all tokens back; cut after it was accepted keeps the
input and the output seen; unknown keeps the estimate, also of an answer that came whole and was none. A provider that
charges up front keeps what it charged. A request that was sent counts against requests per minute whatever became of
it.

Dollars follow what a provider bills: nothing for an attempt that it refused or never got, the input of one that was cut
after it was accepted, the estimate of an answer that was none, whoever served in the end; and what served by its usage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from math import inf

from extproc.core import spend
from extproc.core.capacity import Change, Claim
from extproc.core.policy import Accounting, Kind, Prices
from extproc.core.quota import PERIODS
from extproc.core.request import Request, Size, Usage

__all__ = ["Flight", "Refund"]

HELD = frozenset({"slots", "kv"})
"""Kinds that are held while a request runs."""
DOLLARS = frozenset({"usd", *PERIODS})


class Refund(StrEnum):
    """How much of a reservation comes back after an attempt that did not serve."""

    UNSENT = "unsent"
    ALL = "all"
    INPUT_KEPT = "input_kept"
    KEPT = "kept"


@dataclass(slots=True, eq=False)
class Flight:
    """See the head of this file. Times are seconds on the event loop's clock.

    allowance: what it took of its tenant, session and route. rates: dollars per upstream, where they are known. heard:
    the failed attempts that were told (upstream, number, and seconds where one upstream may be asked twice). given_s:
    seconds that each attempt gets, and all of them together where the answer comes as a whole; limit_s: what it would
    get if its caller set no limit; first_token_s: what of that is the first token's. again: its only upstream may be
    asked a second time; tried: it was. used: tokens that it really used, once that is settled. cost: dollars that it
    has cost so far; None as long as no price was known. timed: how long its first token took was told. cut: its answer
    broke off, which its attempt tells, too. blamed: what was told against upstreams: each, and which breaker's outcome.
    at, came: where it is, empty for nowhere, and since when. taken: when what it needs was first taken at each
    upstream, but for those that were learned of by their answer. lent: since when it has a second attempt of which it
    is not yet known whether it is used. lost: no record told how it ended, so that its estimate was kept. Before
    `depart` only `cancel` changes anything.

    _paid: what its end took for an attempt whose own record had not come, by upstream.
    """

    request: Request
    allowance: tuple[Claim, ...] = ()
    rates: Mapping[str, Prices] = field(default_factory=dict)
    prices: Mapping[str, tuple[Claim, ...]] = field(default_factory=dict)
    accounting: Mapping[str, Accounting] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    departed: float | None = None
    at: str = ""
    came: float = inf
    landed: float | None = None
    attempts: int = 0
    heard: set[tuple[str, int, float]] = field(default_factory=set)
    timed: bool = False
    cut: bool = False
    blamed: tuple[tuple[str, str], ...] = ()
    given_s: float = inf
    limit_s: float = inf
    first_token_s: float = inf
    again: bool = False
    tried: bool = False
    lent: float | None = None
    settled: bool = False
    lost: bool = False
    used: Size | None = None
    cost: float | None = None
    taken: dict[str, float] = field(default_factory=dict)
    _reserved: dict[str, tuple[Claim, ...]] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)
    _failed: set[str] = field(default_factory=set)
    _paid: dict[str, Size] = field(default_factory=dict)
    _served: str = ""

    @property
    def waited_s(self) -> float:
        """Seconds from arrival to departure, 0 before it departed."""
        return max(0.0, (self.departed or self.request.arrived) - self.request.arrived)

    @property
    def open_books(self) -> bool:
        """Whether a record could still change anything."""
        return not self.settled or bool(self._reserved) or (self.again and not self._paid and self.unheard > 0)

    @property
    def unheard(self) -> int:
        """Failed attempts that were made, as far as that is known, and have not been told."""
        return self.attempts - len(self.heard) - bool(self._served)

    def depart(self, order: tuple[str, ...], prices: Mapping[str, tuple[Claim, ...]], now: float) -> None:
        """It goes to order[0], whose claims the limiter has taken."""
        self.order, self.prices, self.departed = order, prices, now
        self.at, self.came = order[0], now
        self.taken[order[0]] = now
        self._reserved[order[0]] = _tokens(self.prices[order[0]])
        self._asked.add(order[0])

    def cancel(self) -> list[Change]:
        """It never departed: all that it took of its tenant and session comes back."""
        if self.settled or self.departed is not None:
            return []
        self.settled = True
        return [Change(claim.key, claim.amount) for claim in self.allowance]

    def land(self, now: float) -> list[Change]:
        """Its stream ended: what it held while it ran comes back. Once."""
        if self.departed is None or self.landed is not None:
            return []
        changes = self._hold(self.at, 1.0)
        self.landed = now
        return changes + [Change(c.key, c.amount) for c in self.allowance if _kind(c.key) in HELD]

    def attempt_failed(self, upstream: str, refund: Refund, now: float, *, last: bool = False) -> list[Change]:
        """`upstream` did not serve. What it held comes back, and moves to the next in order while the request runs.

        now: when the changes are made. last: nobody is asked after it.
        """
        if upstream not in self.order or upstream in self._failed:
            return []
        if upstream == self._served:
            return self._failed_before(upstream, refund)
        was_the_only_one = self.settled and self.attempts == 1  # its client left at it
        if self.again and not self.tried and not last and not was_the_only_one:
            return self._try_again(upstream, refund)
        self._failed.add(upstream)
        changes = self._ask(upstream) + self._end_attempt(upstream, refund, self._paid.get(upstream))
        if upstream == self.at:
            changes += self._hold(upstream, 1.0)
            self.at = ""
            behind = () if last else self.order[self.order.index(upstream) + 1 :]
            following = next((name for name in behind if name not in self._failed), None)
            if following is not None:
                changes += self._move_to(following, now)
        return _net(changes)

    def served(self, upstream: str, usage: Usage | None, seen_output: int | None = None) -> list[Change]:
        """`upstream` answered. usage None is unknown. seen_output: of an answer that was cut, where it is known; what
        was reported in the middle of such a one may be less.
        """
        if self.departed is None or self.settled:
            return []
        self.settled = True
        self._served = upstream
        actual = _actual(self.request.size_at(upstream), usage, seen_output)
        # Not reserved means that the failure of the one before it is not known yet.
        changes = [] if upstream in self._reserved else self._reserve(upstream)
        dollars = self._bill(upstream, actual, usage)
        changes += _settled(self._reserved.pop(upstream), actual, dollars, upfront=self._is_upfront(upstream))
        return _net(changes + self._settle_own(actual, dollars))

    def unserved(self, left_at: str = "") -> list[Change]:
        """No upstream answered. left_at: where it was when the client gave up on it, who still pays for the input."""
        if self.departed is None or self.settled:
            return []
        self.settled = True
        if left_at not in self.order:
            return _net(self._settle_own(Size(0, 0), 0.0))
        prompt, dollars, changes = self._prompt(left_at), 0.0, []
        if left_at not in self._failed:
            changes = [] if left_at in self._reserved else self._reserve(left_at)
            dollars = self._bill(left_at, prompt)
            changes += self._give_back(left_at, Refund.INPUT_KEPT, prompt, dollars)
            self._paid[left_at] = prompt
        return _net(changes + self._settle_own(prompt, dollars))

    def expire(self) -> list[Change]:
        """No record will come any more. Failed attempts get their tokens back; what is unknown keeps the estimate."""
        if self.departed is None:
            return []
        known, self.settled = self.settled, True
        if not known:
            self.lost, self.used = True, self.request.size
            self._paid = {name: self.request.size_at(name) for name in self._reserved}
            self._reserved.clear()
            return []
        return [change for name in list(self._reserved) for change in self._give_back(name, Refund.ALL)]

    def _try_again(self, upstream: str, refund: Refund) -> list[Change]:
        """The same upstream is asked once more: what it holds while it runs stays, tokens and requests anew."""
        self.tried = True
        changes = self._end_attempt(upstream, refund)
        self._asked.discard(upstream)
        if not self.settled:
            return _net(changes + self._reserve(upstream))
        self.attempts = max(self.attempts, 2)  # the books stay open for its second failure
        return _net(changes + self._ask(upstream))

    def _failed_before(self, upstream: str, refund: Refund) -> list[Change]:
        """It served at the second go, and that the first one failed is told after it."""
        if not self.again or self.tried:
            return []
        self.tried = True
        self._asked.discard(upstream)
        return _net(self._ask(upstream) + self._end_attempt(upstream, refund))

    def _move_to(self, upstream: str, now: float) -> list[Change]:
        self.at, self.came = upstream, now
        self.taken.setdefault(upstream, now)
        changes = self._hold(upstream, -1.0)
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

    def _end_attempt(self, upstream: str, refund: Refund, paid: Size | None = None) -> list[Change]:
        """It did not serve: what it has used is billed, and all else comes back of what was reserved for it.

        Where the outcome or a later failure was told first, nothing is reserved, and what it has used is taken now.
        paid: what its request's end took for it.
        """
        kept = self._kept(upstream, refund)
        if kept is None:
            return self._give_back(upstream, refund)
        owed = kept if paid is None else Size(max(0, kept.input - paid.input), max(0, kept.output - paid.output))
        dollars = self._bill(upstream, kept if self.lost else owed)  # the estimate pays who served, which was not told
        if upstream in self._reserved:
            return self._give_back(upstream, refund, kept, dollars) + self._charge(dollars)
        if self._is_upfront(upstream):
            owed = Size(0, 0) if paid else self.request.size_at(upstream)
        nothing = [Claim(claim.key, 0.0) for claim in _tokens(self.prices.get(upstream, ()))]
        return _settled(nothing, owed, dollars, upfront=False) + self._charge(dollars)

    def _give_back(self, upstream: str, refund: Refund, kept: Size | None = None, usd: float = 0.0) -> list[Change]:
        """What is reserved at `upstream`, but for what was `kept`; of its dollars all but `usd`."""
        reserved = self._reserved.pop(upstream, ())
        if kept is not None:
            left = _settled(reserved, kept, usd, upfront=self._is_upfront(upstream))
            changes = [c if _kind(c.key) in DOLLARS else Change(c.key, max(0.0, c.amount)) for c in left]
        else:
            changes = [Change(c.key, c.amount) for c in reserved]
        if refund is Refund.UNSENT and upstream in self._asked:
            self._asked.discard(upstream)
            changes += [Change(c.key, c.amount) for c in self._requests(upstream)]
        return changes

    def _settle_own(self, actual: Size, dollars: float) -> list[Change]:
        """The tenant's and the session's: what was taken comes back but for what was used."""
        self.used = actual
        return _settled(_tokens(self.allowance), actual, dollars, upfront=False)

    def _charge(self, dollars: float) -> list[Change]:
        return [Change(c.key, -dollars) for c in self.allowance if _kind(c.key) in DOLLARS] if dollars else []

    def _kept(self, upstream: str, refund: Refund) -> Size | None:
        """What an attempt that ended so has used at `upstream`; None for nothing."""
        if refund is Refund.KEPT:
            return self.request.size_at(upstream)
        return self._prompt(upstream) if refund is Refund.INPUT_KEPT else None

    def _is_upfront(self, upstream: str) -> bool:
        return self.accounting.get(upstream) is Accounting.UPFRONT

    def _prompt(self, upstream: str) -> Size:
        """The input alone, as `upstream` counts it."""
        return Size(self.request.size_at(upstream).input, 0)

    def _bill(self, upstream: str, size: Size, usage: Usage | None = None) -> float:
        prices = self.rates.get(upstream)
        if prices is None:
            return 0.0
        dollars = spend.cost(prices, size, usage)
        self.cost = (self.cost or 0.0) + dollars
        return dollars

    def _hold(self, upstream: str, sign: float) -> list[Change]:
        """Give back what is held at `upstream` while it runs, or hold it with sign -1."""
        if self.landed is not None:
            return []
        return [Change(c.key, sign * c.amount) for c in self.prices.get(upstream, ()) if _kind(c.key) in HELD]


def _net(changes: list[Change]) -> list[Change]:
    """One change per key, and none that changes nothing."""
    total: dict[str, float] = {}
    for change in changes:
        total[change.key] = total.get(change.key, 0.0) + change.amount
    return [Change(key, amount) for key, amount in total.items() if amount]


@lru_cache(maxsize=4096)
def _kind(key: str) -> str:
    return key.rpartition("/")[2]


def _tokens(claims: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """What is settled by usage: tokens, and of the caller's own dollars too."""
    return tuple(claim for claim in claims if (kind := _kind(claim.key)) not in HELD and kind != Kind.REQUESTS)


def _amount(key: str, size: Size) -> int:
    kind = _kind(key)
    return size.input if kind == Kind.INPUT else size.output if kind == Kind.OUTPUT else size.total


def _settled(claims: Iterable[Claim], actual: Size, dollars: float, *, upfront: bool) -> list[Change]:
    """What comes back of `claims` when so much was used. upfront: tokens that were reserved stay charged."""
    return [
        Change(claim.key, claim.amount - dollars)
        if _kind(claim.key) in DOLLARS
        else _settle(claim, actual, upfront=upfront)
        for claim in claims
    ]


def _settle(claim: Claim, actual: Size, *, upfront: bool) -> Change:
    left = claim.amount - _amount(claim.key, actual)
    return Change(claim.key, min(0.0, left) if upfront else left)


def _actual(estimate: Size, usage: Usage | None, seen_output: int | None) -> Size:
    if usage is not None and usage.input is not None:
        if usage.output is not None:
            return Size(usage.input, max(usage.output, min(seen_output or 0, estimate.output)))
        return Size(usage.input, estimate.output if seen_output is None else min(seen_output, estimate.output))
    if seen_output is not None:
        return Size(estimate.input, min(seen_output, estimate.output))
    return estimate
