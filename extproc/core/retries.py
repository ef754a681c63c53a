"""Clients' retries: how many may wait, and the places of those who left.

A retry that can go at once costs nobody anything. One that would have to wait stands in the way of those who come for
the first time, and when something is slow there are many: a storm. So each tenant has a budget of retries that may
wait, a share of its first-time traffic and a few per second in any case; beyond it they are refused at once. What was
not used for `TAU_S` is forgotten, so that a quiet tenant does not save up for a storm. Those who are refused are told
times one after another, at the rate at which the budget grows.

A client whose patience ends leaves its place in line, and comes back a moment later with the same request. Its place is
kept for it (`Places`). So that a retry is not taken for that of another request with the same body, those who were
refused or failed are remembered, too, without a place.

A second attempt at the same upstream comes out of the same budget. Whether one is needed shows only later, when nobody
can be asked any more, so a request is lent one when it is let go. What counts is what is used: one that was lent keeps
others from it for `LENT_S`, within which most failures show, and no longer, or long answers that go well would use the
budget up. So more may be used than there is: that is owed, and nothing is lent or let wait until what comes in has paid
for it. Debts are not forgotten. In an outage that takes `d` seconds to show, no more is used beyond the budget than
what it holds at once, for each `LENT_S` of `d`.

Deliberately not here: copies that are still there when their retry comes (copies).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from math import exp, inf

from extproc.core.policy import RetryRules

__all__ = ["KEYED", "Places", "RetryBudget"]

KEYED = "key/"
"""How the fingerprint of a request begins whose client named it, so that it is the same request beyond doubt."""
TAU_S = 10.0
LENT_S = 2.0
"""For so long one that was lent is kept for who may need it."""
LONGEST_WAIT_S = 60.0
"""No refused retry is told to wait longer than the clients' SDKs would."""
KEPT_S = 75.0
"""How long a place is kept: the longest wait that an SDK obeys, and some more."""
MOST_ALIKE = 64
"""Places that are kept for requests with one fingerprint."""


class RetryBudget:
    """See the head of this file. Times are in seconds on any clock that never goes back."""

    def __init__(self, rules: RetryRules) -> None:
        """Every tenant begins with what ten seconds of `least_per_s` give it, at least one."""
        self._rules = rules
        self._most_spare = max(1.0, TAU_S * rules.least_per_s)
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def __len__(self) -> int:
        """Tenants remembered."""
        return len(self._accounts)

    def follow(self, rules: RetryRules) -> None:
        """Go by other rules from now on; what tenants have, and owe, stays."""
        self._rules = rules
        self._most_spare = max(1.0, TAU_S * rules.least_per_s)

    def came(self, tenant: str, now: float) -> None:
        """A request came for the first time."""
        account = self._account(tenant, now)
        account.traffic += 1.0
        account.earned += account.repay(self._rules.share)

    def spend(self, tenant: str, now: float) -> float:
        """Let one retry wait: 0. Or, where nothing is left, the seconds after which this one may come back."""
        account = self._account(tenant, now)
        if account.earned + account.spare >= 1.0:
            self._take(account)
            return 0.0
        rate = self._rules.least_per_s + self._rules.share * account.traffic / TAU_S
        if rate <= 0.0:
            return inf
        account.due = min(max(account.due, now) + 1.0 / rate, now + LONGEST_WAIT_S)
        return min(account.due - now, LONGEST_WAIT_S)

    def lend(self, tenant: str, now: float) -> bool:
        """Let a request have a retry that it may need, and tell whether it used it (`settle`). False: none is left."""
        account = self._account(tenant, now)
        lent = account.lent
        while lent and lent[0] <= now - LENT_S:
            lent.popleft()
        if account.earned + account.spare - len(lent) < 1.0:
            return False
        lent.append(now)
        return True

    def settle(self, tenant: str, now: float, *, used: bool, lent: float = -inf) -> None:
        """The request that had one since `lent` needs it, or will not need it any more. Call it once."""
        account = self._account(tenant, now)
        if account.lent and lent > now - LENT_S:
            account.lent.popleft()  # any will do: those that stay are younger
        if used:
            self._take(account)

    def _take(self, account: _Account) -> None:
        missing = max(0.0, 1.0 - account.earned)
        account.earned = max(0.0, account.earned - 1.0)
        account.owed += max(0.0, missing - account.spare)
        account.spare = max(0.0, account.spare - missing)

    def _account(self, tenant: str, now: float) -> _Account:
        """The account as it is now; a new one pushes out the one that was used least recently."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(now, self._most_spare)
            if len(self._accounts) > self._rules.limit:
                self._accounts.popitem(last=False)
            return account
        self._accounts.move_to_end(tenant)
        passed = now - account.at
        if passed > 0.0:
            kept = exp(-passed / TAU_S)
            account.at = now
            account.earned *= kept
            account.traffic *= kept
            account.spare = min(self._most_spare, account.spare + account.repay(passed * self._rules.least_per_s))
        return account


class Places:
    """See the head of this file. limit: fingerprints that are remembered."""

    def __init__(self, limit: int = 10_000) -> None:
        """Nobody has left yet."""
        self._limit = limit
        self._left: OrderedDict[str, dict[str, _Left]] = OrderedDict()

    def __len__(self) -> int:
        """Fingerprints remembered."""
        return len(self._left)

    def keep(self, fingerprint: str, ticket: str, arrived: float, now: float, *, holds: bool) -> None:
        """This copy is gone, and its retry may come. arrived: the first of its copies; holds: it has a place there."""
        left = self._left.get(fingerprint)
        if left is None:
            left = self._left[fingerprint] = {}
        else:
            self._left.move_to_end(fingerprint)
        left[ticket] = _Left(arrived, now + KEPT_S, holds)
        if len(left) > MOST_ALIKE:
            del left[next(iter(left))]
        self._expire(now)

    def give(self, fingerprint: str, ticket: str) -> None:
        """This copy turns out to have had a place. Nothing, if it is not remembered."""
        left = self._left.get(fingerprint)
        if left is not None and ticket in left:
            left[ticket].holds = True

    def forget(self, fingerprint: str, ticket: str) -> None:
        """This copy was served after all: no retry of it will come. Nothing, if it is not remembered."""
        left = self._left.get(fingerprint)
        if left is not None and left.pop(ticket, None) is not None and not left:
            del self._left[fingerprint]

    def claim(self, fingerprint: str, now: float) -> tuple[bool, float | None]:
        """A retry came: whether one before it may have left, and the place of that one. The earliest goes first."""
        self._expire(now)
        left = self._left.get(fingerprint, {})
        kept = [(not copy.holds, copy.arrived, ticket) for ticket, copy in left.items() if copy.until > now]
        if not kept:
            return False, None
        without, arrived, ticket = min(kept)
        self.forget(fingerprint, ticket)
        return True, None if without else arrived

    def _expire(self, now: float) -> None:
        """Forget fingerprints whose newest copy is too old, and the oldest of too many."""
        while self._left:
            fingerprint, left = next(iter(self._left.items()))
            if left[next(reversed(left))].until > now and len(self._left) <= self._limit:
                return
            del self._left[fingerprint]


@dataclass(slots=True)
class _Account:
    """spare: what `least_per_s` gave. earned: what traffic gave. due: when the last one that was refused may come.
    lent: when those were lent that are still kept. owed: used beyond what there was.
    """

    at: float
    spare: float
    earned: float = 0.0
    traffic: float = 0.0
    due: float = 0.0
    owed: float = 0.0
    lent: deque[float] = field(default_factory=deque)

    def repay(self, gained: float) -> float:
        """What is left of it."""
        if not self.owed:
            return gained
        paid = min(self.owed, gained)
        self.owed -= paid
        return gained - paid


@dataclass(slots=True)
class _Left:
    """A copy that is gone. arrived: the first of its copies; until: it is remembered; holds: its place is kept, too."""

    arrived: float
    until: float
    holds: bool
