"""What one tenant may use, and how many dollars may go where, as counters; and what a request takes of them.

Listed tenants are counted from the start. Tenants that a trusted source names but nobody listed are counted from their
first request on, and at most so many at once. When there are more, one is forgotten that was not heard of for long: of
the oldest one that would lose nothing by it (its buckets are full again, nothing is held, its budgets are untouched in
this period), else the oldest with all that it had used. Nobody is forgotten whose requests have open books; the bound
gives way to them, and is reached again with the newcomers after them.

Dollars are limited per hour, day and month of the calendar (`Dollars`), the same way for a tenant, a route and an
upstream.

Deliberately not here: sessions (session), prices (spend), and what comes back when (flight).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

from extproc.core.bucket import EPSILON, Slots, TokenBucket
from extproc.core.budget import Budget, Period, period_ends
from extproc.core.capacity import Claim, Counter, Store
from extproc.core.identity import place_of, quoted
from extproc.core.policy import Dollars, Kind, Route, Tenant, Upstream

__all__ = [
    "PERIODS", "Account", "Accounts", "account_of", "begins_anew", "hour_ends", "purse", "purse_keys", "rests",
    "route_place", "upstream_place",
]  # fmt: skip

PERIODS = {"usd_hour": Period.HOUR, "usd_day": Period.DAY, "usd_month": Period.MONTH}
"""Kinds of counters of dollars that are whole again when a period of the calendar begins."""
LOOK = 32
"""Among so many of the oldest one is looked for that loses nothing by being forgotten."""
YIELD = 2
"""At most so many are forgotten for one newcomer, so that what is above the bound goes down again."""


@dataclass(slots=True, eq=False)
class Account:
    """The counters of one tenant by name, and what every request takes of them.

    fixed: what is the same for all requests. total, usd: names of the counters of tokens (empty for none) and dollars.
    declared: they are counted. pins: how many of its requests have open books.
    """

    rules: Tenant
    fixed: tuple[Claim, ...]
    total: str
    usd: tuple[str, ...]
    declared: bool = False
    pins: int = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of all its counters."""
        return (*(claim.key for claim in self.fixed), *((self.total,) if self.total else ()), *self.usd)

    def follow(self, rules: Tenant) -> None:
        """Go by other rules from now on. Its counters are to be counted by them (`counters`)."""
        other = account_of(rules)
        self.rules, self.fixed, self.total, self.usd = rules, other.fixed, other.total, other.usd

    def claims(self, tokens: float, usd: float | None) -> list[Claim]:
        """What a request takes that may use so much; usd None: it costs nothing, whatever it uses."""
        found = list(self.fixed)
        if self.total:
            found.append(Claim(self.total, tokens))
        if usd is not None:
            found += [Claim(key, usd) for key in self.usd]
        return found

    def counters(self, now: float, epoch_offset: float) -> Store:
        """What counts it, as long as nothing was used. Periods are the calendar's, at `now` + `epoch_offset`."""
        rules, place, found = self.rules, place_of(self.rules.name), Store()
        for kind, name, per_minute in ((Kind.TOTAL, "tpm", rules.tpm), (Kind.REQUESTS, "rpm", rules.rpm)):
            if per_minute is not None:
                most, shadow = float(per_minute), name in rules.shadow
                found[f"{place}/{kind}"] = TokenBucket(most / 60, most, most, now, shadow=shadow)
        if rules.concurrency is not None:
            found[f"{place}/slots"] = Slots(rules.concurrency, shadow="concurrency" in rules.shadow)
        return found | purse(place, rules.dollars, rules.shadow, now, epoch_offset)

    def ended(self, now: float) -> None:  # noqa: ARG002 - one shape with sessions
        """The books of one of its requests are closed."""
        self.pins -= 1


def account_of(rules: Tenant, *, declared: bool = False) -> Account:
    """The account of one tenant; declared: its counters are counted already."""
    place = place_of(rules.name)
    fixed = []
    if rules.concurrency is not None:
        fixed.append(Claim(f"{place}/slots", 1.0))
    if rules.rpm is not None:
        fixed.append(Claim(f"{place}/{Kind.REQUESTS}", 1.0))
    total = "" if rules.tpm is None else f"{place}/{Kind.TOTAL}"
    return Account(rules, tuple(fixed), total, purse_keys(place, rules.dollars), declared)


def upstream_place(upstream: Upstream) -> str:
    """Where the counters of an upstream's dollars are, among all that is counted."""
    return f"upstream/{upstream.name}"


def route_place(route: Route) -> str:
    """The same of a route's: they go by the first model of its patterns, which no other route may name."""
    return f"route/{quoted(route.models[0])}"


@lru_cache(maxsize=4096)
def purse_keys(place: str, dollars: Dollars) -> tuple[str, ...]:
    """Names of the counters of dollars of somebody who may spend so many."""
    limits = zip(PERIODS, (dollars.per_hour, dollars.per_day, dollars.per_month), strict=True)
    return tuple(f"{place}/{kind}" for kind, limit in limits if limit is not None)


def purse(place: str, dollars: Dollars, shadow: frozenset[str], now: float, epoch_offset: float) -> Store:
    """Those counters, untouched, as of `now` + `epoch_offset` in the calendar; shadow: limits that only count."""
    limits = zip(PERIODS.items(), (dollars.per_hour, dollars.per_day, dollars.per_month), strict=True)
    return {
        f"{place}/{kind}": Budget(
            limit, period, epoch_offset=epoch_offset, at=now, shadow=f"usd_per_{period}" in shadow
        )
        for (kind, period), limit in limits
        if limit is not None
    }


class Accounts:
    """Those of tenants that nobody listed, all with the rules of `anybody`: at most `limit` of them."""

    def __init__(self, anybody: Tenant, limit: int) -> None:
        """Nobody is counted at first."""
        self._anybody = account_of(anybody)
        self._limit = limit
        self._known: OrderedDict[str, Account] = OrderedDict()

    def __len__(self) -> int:
        """How many are counted."""
        return len(self._known)

    @property
    def accounts(self) -> list[Account]:
        """Those that are counted."""
        return list(self._known.values())

    def hear(self, name: str, resting: Callable[[Account], bool]) -> tuple[Account, list[Account]]:
        """A request of this tenant: its account from now on, and who had to be forgotten for that.

        resting: whether an account loses nothing by being forgotten. Where there are no limits all share one account.
        """
        if not self._anybody.keys:
            return self._anybody, []
        account = self._known.get(name)
        if account is not None:
            self._known.move_to_end(name)
            return account, []
        gone: list[Account] = []
        while len(self._known) >= self._limit and len(gone) < YIELD and (oldest := self._oldest(resting)):
            gone.append(self._known.pop(oldest))
        account = self._known[name] = account_of(replace(self._anybody.rules, name=name))
        return account, gone

    def knows(self, account: Account) -> bool:
        """Whether it is one of those that are counted."""
        return self._known.get(account.rules.name) is account

    def follow(self, anybody: Tenant, listed: Collection[str]) -> list[Account]:
        """Newcomers go by other rules from now on; who is listed by now is nobody of these.

        Returns those that have to follow yet (`Account.follow`), or are not counted any more: there may be very many.
        """
        for name in [name for name in listed if name in self._known]:
            del self._known[name]
        if anybody == self._anybody.rules:
            return []
        self._anybody = account_of(anybody)
        found = list(self._known.values())
        if not self._anybody.keys:
            self._known.clear()
        return found

    def _oldest(self, resting: Callable[[Account], bool]) -> str | None:
        """Who is forgotten next. Those with open books go to the end: they are in use."""
        for _ in range(0, len(self._known), LOOK):
            oldest = list(islice(self._known.items(), LOOK))
            idle = [(name, account) for name, account in oldest if not account.pins]
            if idle:
                return next((name for name, account in idle if resting(account)), idle[0][0])
            for name, _account in oldest:
                self._known.move_to_end(name)
        return None


def rests(counter: Counter | None, now: float) -> bool:
    """Whether a counter would be no different if it began anew."""
    match counter:
        case TokenBucket():
            return counter.level_at(now) >= counter.capacity - EPSILON
        case Slots():
            return counter.used <= 0
        case Budget():
            return counter.used_at(now) <= 0
        case _:
            return True


def hour_ends(now: float, epoch_offset: float) -> float:
    """When the calendar's hour ends, on the clock; days and months end with an hour."""
    return period_ends(Period.HOUR, now + epoch_offset) - epoch_offset


def begins_anew(key: str, before: float, now: float, epoch_offset: float) -> bool:
    """Whether the budget `key` was whole again between two times on the clock."""
    period = PERIODS.get(key.rpartition("/")[2])
    return period is not None and period_ends(period, before + epoch_offset) <= now + epoch_offset
