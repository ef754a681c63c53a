"""Whose turn it is inside a lane: virtual token counters, and a capped preference for VIP tenants.

Each tenant that waits has a counter of the service it got, input tokens once and output tokens twice, divided by its
weight; the smallest counter goes next (VTC, OSDI 2024). A request is charged with its estimate when it is dispatched,
and corrected when its real usage is known. Who comes back after a pause is lifted to the least of those who wait, so
that nobody saves up a claim while away; who has had more than that keeps its counter, and is forgotten when it has no
more. So two tenants that wait all the time never differ by more than one request of each, per unit of weight, plus
what is estimated but not yet known of requests under way.

VIP tenants go first as long as they had no more than their share of the lane, counted while both kinds wait; from then
on the counters alone decide. `toll` keeps that account: it is positive when VIPs are ahead of their share. Their
counters run ahead of the others' so, for which reason a VIP that comes is lifted to the least of the VIPs: otherwise
it would go before the older ones for as long as those had been served.

Deliberately not here: who waits for what, and the order inside a tenant (lanes).
"""

from __future__ import annotations

from dataclasses import dataclass

from extproc.core.ranking import Ranking
from extproc.core.request import Size

__all__ = ["Account", "Counters", "cost", "toll"]

INPUT, OUTPUT = 1.0, 2.0
"""What a token costs: generating one takes more than reading one."""
UNCOUNTED = 100.0
"""Cost of a request whose tokens nobody counts, so that it takes a turn like others."""


def cost(size: Size) -> float:
    """Service that a request of this size is, in input tokens."""
    return INPUT * size.input + OUTPUT * size.output or UNCOUNTED


def toll(debt: float, service: float, share: float, *, vip: bool) -> float:
    """The VIPs' account after `service` while both kinds waited: `debt` before, positive when above their `share`.

    It never leaves the range of one request, so that nobody is owed for a time in which it could not use its turn.
    """
    if vip:
        return min(debt + service * (1.0 - share), max(debt, service))
    return max(debt - service * share, min(debt, -service))


@dataclass(slots=True, eq=False)
class Account:
    """A tenant that waits in a lane. counter: its service in cost per weight."""

    name: str
    weight: float = 1.0
    vip: bool = False
    counter: float = 0.0


class Counters:
    """The accounts of one lane. limit: most absent tenants, and most requests under way, that are remembered."""

    def __init__(self, limit: int = 50_000) -> None:
        """Nobody waits."""
        self.waiting: Ranking[Account] = Ranking(_counter)
        self.vips: Ranking[Account] = Ranking(_counter)
        self._floor = self._vip_floor = 0.0
        self._absent: dict[str, float] = {}
        self._by_claim: Ranking[str] = Ranking(self._absent.__getitem__)
        self._charged: dict[str, float] = {}
        self._limit = limit

    def __len__(self) -> int:
        """How many absent tenants are remembered."""
        return len(self._absent)

    def entry(self, name: str, *, vip: bool = False) -> float:
        """The counter that an absent tenant would have if it came to wait now."""
        least = self.waiting.first()
        counter = max(self._absent.get(name, 0.0), self._floor if least is None else least.counter)
        if vip:
            least = self.vips.first()
            counter = max(counter, self._vip_floor if least is None else least.counter)
        return counter

    def enter(self, account: Account) -> None:
        """A tenant comes to wait."""
        account.counter = self.entry(account.name, vip=account.vip)
        if self._absent.pop(account.name, None) is not None:
            self._by_claim.discard(account.name)
        self.waiting.add(account)
        if account.vip:
            self.vips.add(account)

    def leave(self, account: Account) -> None:
        """A tenant waits no longer."""
        self.waiting.discard(account)
        least = self.waiting.first() or account
        self._floor = max(self._floor, least.counter)
        if account.vip:
            self.vips.discard(account)
            self._vip_floor = max(self._vip_floor, (self.vips.first() or account).counter)
        self._remember(account.name, account.counter)

    def charge(self, account: Account, ticket: str, service: float) -> None:
        """A request of a tenant that waits is dispatched: `service` is its estimated cost."""
        self._charged[ticket] = service
        if len(self._charged) > self._limit:
            del self._charged[next(iter(self._charged))]
        account.counter += service / account.weight

    def surplus(self, ticket: str, service: float) -> float:
        """What a dispatched request really cost, less what it was charged; 0 when it was not charged. Only once."""
        return service - self._charged.pop(ticket, service)

    def correct(self, name: str, by: float, account: Account | None) -> None:
        """Correct a tenant's counter by so much cost per weight; `account` when it waits."""
        if account is not None:
            account.counter += by
            self.waiting.fell(account)
            if account.vip:
                self.vips.fell(account)
        elif by > 0 or name in self._absent:
            self._remember(name, self._absent.get(name, self._floor) + by)

    def _remember(self, name: str, counter: float) -> None:
        """Keep an absent tenant's counter, and forget those that are no more than the least of the others."""
        known = name in self._absent
        self._absent[name] = counter
        if known:
            self._by_claim.fell(name)
        else:
            self._by_claim.add(name)
        while (least := self._by_claim.first()) is not None:
            if self._absent[least] > self._floor and len(self._absent) <= self._limit:
                break
            self._by_claim.discard(least)
            del self._absent[least]


def _counter(account: Account) -> float:
    return account.counter
