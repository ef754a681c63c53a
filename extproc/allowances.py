"""What a request takes of its caller's own: its tenant's allowance, its session's and its route's, counted in capacity.

Counters of unlisted tenants and of sessions come into being with their first request, and are forgotten when there are
too many (core.quota, core.session). Where counting suspends, declaring and forgetting keep the order in which they were
decided, so that a counter that is declared anew is never forgotten by an earlier word; and whose books are open is not
forgotten, so that what comes back finds the counter that it was taken from.

Deliberately not here: what comes back, and when (core.flight); what is told to who is refused (flights).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from extproc.core import spend
from extproc.core.budget import Budget
from extproc.core.capacity import Change, Claim, Declare, Forget, Seats, Store, Tuning
from extproc.core.policy import Policy, Prices, SessionLimits, Tenant
from extproc.core.quota import Account, Accounts, account_of, begins_anew, hour_ends, purse_keys, rests, route_place
from extproc.core.request import Request
from extproc.core.session import Known, Sessions
from extproc.core.value import value
from extproc.ports import Capacity, Clock
from extproc.shapes import Callers

__all__ = ["NOTHING", "Allowance", "Allowances"]

MOST_TENANTS = 50_000
"""So many tenants that nobody listed are counted at once."""


@value
class Allowance:
    """What one request takes of its tenant, session and route, all or nothing, and when (`at`, on the clock).

    rules: its tenant's. first: what has to be declared or forgotten before. pins: whose counters stay until `close`.
    until: before this no period of its budgets ends.
    """

    rules: Tenant
    claims: tuple[Claim, ...] = ()
    first: tuple[Tuning, ...] = ()
    pins: tuple[Account | Known, ...] = ()
    at: float = 0.0
    until: float = inf


NOTHING = Allowance(Tenant("", (), ""))
"""What a request takes where nothing is limited."""


class Allowances:
    """See the head of this file. Call `sweep` about once a second.

    forgotten_in_use: unlisted tenants that had to be forgotten with what they had used.
    """

    def __init__(
        self, policy: Policy, capacity: Capacity, clock: Clock, *, epoch_offset: float = 0.0, most: int = MOST_TENANTS
    ) -> None:
        """epoch_offset: seconds from the clock to the calendar's time; most: unlisted tenants counted at once."""
        self.sessions = Sessions(policy.sessions.limit)
        self.forgotten_in_use = 0
        self._capacity = capacity
        self._clock = clock
        self._epoch_offset = epoch_offset
        self._most = most
        self._purses = False
        self._others = None if policy.any_tenant is None else Accounts(policy.any_tenant, most)
        self._tuning: asyncio.Future[None] | None = None
        self._behind: deque[tuple[Account | Known, Tenant | SessionLimits | None]] = deque()
        """Who has to follow to which rules yet; None: it is not counted any more."""
        self._heed(policy)

    def follow(self, policy: Policy) -> tuple[Store, set[str]]:
        """Go by other rules from now on: counters as they are to be, and names of those that count no more.

        Those that the rules themselves name are not among them. Who is not listed any more goes on with what it used,
        as one of the others where there are any. Of those there may be very many: they and sessions go by their former
        rules until `follow_some` comes to them.
        """
        now, former = self._clock.time(), self._listed
        counters, gone = self.follow_some(len(self._behind))
        self._follow_others(policy)
        routes = {route.models[0]: route.name for route in policy.routes}
        former_names = [(route.name, routes.get(route.models[0], "")) for route in self._policy.routes]
        self._heed(policy)
        for name, by_now in former_names:  # of requests on their way: a route is named by its place in the list, too
            if by_now in self._routes:
                self._routes.setdefault(name, self._routes[by_now])
        if self._others is not None:
            for name in former.keys() - self._listed.keys():
                account, forgotten = self._others.hear(name, self._resting)
                account.declared = True
                counters |= account.counters(now, self._epoch_offset) if account.rules.name == name else {}
                gone.update(key for each in forgotten for key in each.keys)
        self._behind += self.sessions.follow(policy.sessions.limit, self._session_limits)
        return counters, gone - counters.keys()

    @property
    def behind(self) -> int:
        """How many have to follow yet."""
        return len(self._behind)

    def follow_some(self, most: int) -> tuple[Store, set[str]]:
        """As `follow`, for so many of those that are behind."""
        counters, gone, now = Store(), set[str](), self._clock.time()
        for _ in range(min(most, len(self._behind))):
            one, rules = self._behind.popleft()
            if rules is None:
                gone.update(one.keys)
                continue
            before = one.keys
            if isinstance(one, Known) and isinstance(rules, SessionLimits) and self.sessions.knows(one):
                one.follow(rules)
                counters |= one.counters(now)
            elif isinstance(one, Account) and isinstance(rules, Tenant) and self._others and self._others.knows(one):
                one.follow(replace(rules, name=one.rules.name))
                counters |= one.counters(now, self._epoch_offset)
            else:  # it was forgotten meanwhile, and its counters with it
                continue
            gone.update(before)
            one.declared = True
        return counters, gone - counters.keys()

    def _heed(self, policy: Policy) -> None:
        self._policy = policy
        self._listed = {name: account_of(tenant, declared=True) for name, tenant in policy.tenants.items()}
        self._routes = {
            route.name: purse_keys(route_place(route), route.dollars)
            for route in policy.routes
            if route.dollars.limited
        }
        self._purses = self._purses or any(upstream.dollars.limited for upstream in policy.upstreams.values())

    def _follow_others(self, policy: Policy) -> None:
        """Other rules for tenants that nobody listed."""
        others, rules = self._others, policy.any_tenant
        if rules is None:
            self._behind += ((account, None) for account in (others.accounts if others else ()))
            self._others = None
        elif others is None:
            self._others = Accounts(rules, self._most)
        else:
            changed = others.follow(rules, policy.tenants)
            self._behind += ((account, rules if others.knows(account) else None) for account in changed)

    def _session_limits(self, tenant: str) -> SessionLimits:
        rules = self._policy.tenants.get(tenant) or self._policy.any_tenant
        return (rules and rules.sessions) or self._policy.sessions

    def state(self) -> Callers:
        """How many are counted; and how many unlisted tenants had to be forgotten with what they had used."""
        return {
            "unlisted_tenants": self.unlisted,
            "sessions": len(self.sessions),
            "forgotten_in_use": self.forgotten_in_use,
        }

    @property
    def unlisted(self) -> int:
        """How many tenants are counted that nobody listed."""
        return 0 if self._others is None else len(self._others)

    def of(self, request: Request, rates: Mapping[str, Prices]) -> Allowance:
        """What `request` takes. rates: prices of the upstreams that may serve it. To be closed once in the end."""
        first: list[Tuning] = []
        pins: list[Account | Known] = []
        account = self._listed.get(request.tenant)
        if account is None and self._others is None:  # it was taken off the list while this request was on its way
            account = self._listed["default"]
        if account is None:
            account = self._unlisted(request.tenant, first)
            pins.append(account)
        limits = account.rules.sessions or self._policy.sessions
        counted = _limited(limits) and (limits.derived or not request.session.derived)
        shared = self._routes.get(request.route, ())
        if not (counted or account.fixed or account.total or account.usd or shared):
            return NOTHING
        now, tokens = self._clock.time(), float(request.size.total)
        budgeted = account.usd or shared or (counted and limits.max_usd is not None)
        usd = spend.needed(rates, request.size, request.endpoint, request.sizes) if budgeted else None
        claims = account.claims(tokens, usd)
        if usd is not None:
            claims += [Claim(key, usd) for key in shared]
        if counted:
            known, gone = self.sessions.hear(request.tenant, request.session.id, limits, now)
            first += _forgotten(gone)
            claims += known.claims(tokens, usd)
            pins.append(known)
        for pin in pins:
            pin.pins += 1
            if not pin.declared:
                first += self._declarations(pin, now)
        until = hour_ends(now, self._epoch_offset) if account.usd or shared else inf
        return Allowance(account.rules, tuple(claims), tuple(first), tuple(pins), now, until)

    async def prepare(self, allowance: Allowance) -> None:
        """Have counted what it takes of. To be seen through, also by who is cancelled meanwhile."""
        await self.tune(allowance.first)
        for pin in allowance.pins:
            pin.declared = True

    def pin(self, allowance: Allowance) -> None:
        """Keep its counters for one more `close`."""
        for pin in allowance.pins:
            pin.pins += 1

    def close(self, allowance: Allowance) -> None:
        """Its books are closed, or nothing was taken."""
        now = self._clock.time()
        for pin in allowance.pins:
            pin.ended(now)

    def due(self, changes: Sequence[Change], allowance: Allowance, taken: Mapping[str, float]) -> Sequence[Change]:
        """`changes` without what a budget whose period is over would give back: the new one was never charged it.

        taken: when it took of each upstream's own.
        """
        now, until = self._clock.time(), allowance.until
        if self._purses and taken:
            until = min(until, hour_ends(min(taken.values()), self._epoch_offset))
        if now < until:
            return changes

        def stale(change: Change) -> bool:
            place, _, rest = change.key.partition("/")
            at = taken.get(rest.partition("/")[0], allowance.at) if place == "upstream" else allowance.at
            return change.amount > 0 and begins_anew(change.key, at, now, self._epoch_offset)

        return [change for change in changes if not stale(change)]

    def served(self, request: Request) -> Sequence[Tuning]:
        """Its session was answered, so it is fresh no more. Returns what has to be tuned for that, seldom anything.

        Sessions that nobody named are remembered only where they count.
        """
        limits = self._session_limits(request.tenant)
        if request.session.derived and not limits.derived:
            return ()
        known, gone = self.sessions.hear(request.tenant, request.session.id, limits, self._clock.time())
        known.served = True
        return _forgotten(gone)

    async def sweep(self) -> None:
        """Forget sessions that have been silent for too long, a few at a time."""
        await self.tune(_forgotten(self.sessions.forget_silent(self._clock.time())))

    async def tune(self, tunings: Sequence[Tuning]) -> None:
        """Declare, forget or raise, after what was decided before."""
        if not tunings:
            return
        if self._capacity.immediate:
            await self._capacity.tune(tunings)
            return
        self._tuning = asyncio.ensure_future(self._tune_after(self._tuning, tunings))
        await asyncio.shield(self._tuning)

    def look(self, tenant: str, session_id: str) -> dict[str, Any] | None:
        """A session as plain data: what it used of what it may, in tokens and dollars. None when it is not known."""
        now = self._clock.time()
        known = self.sessions.find(tenant, session_id, now)
        return None if known is None else self._described(known, now)

    async def add(self, tenant: str, session_id: str, tokens: int, usd: float) -> dict[str, Any] | None:
        """Let a session use so much more from now on, also when it is spent; then as `look`.

        ValueError when it has no such limit, so that there is nothing to raise.
        """
        now = self._clock.time()
        known = self.sessions.find(tenant, session_id, now)
        if known is None:
            return None
        if tokens and known.max_tokens is None:
            raise ValueError("this session has no limit on its tokens")
        if usd and known.max_usd is None:
            raise ValueError("this session has no limit on its dollars")
        known.heard = now
        raised: list[Tuning] = []
        if known.max_tokens is not None:
            known.max_tokens += tokens
            raised.append(Seats(known.tokens_key, known.max_tokens))
        if known.max_usd is not None:
            known.max_usd += usd
            raised.append(Seats(known.usd_key, known.max_usd))
        await self.tune(raised)
        return self._described(known, now)

    def _unlisted(self, name: str, first: list[Tuning]) -> Account:
        assert self._others is not None  # noqa: S101 - identity lets no other tenant pass
        account, gone = self._others.hear(name, self._resting)
        for each in gone:
            self.forgotten_in_use += not self._resting(each)
            first += map(Forget, each.keys)
        return account

    def _resting(self, account: Account) -> bool:
        levels, now = self._capacity.levels(), self._clock.time()
        return all(rests(levels.get(key), now) for key in account.keys)

    def _declarations(self, pin: Account | Known, now: float) -> list[Tuning]:
        found = pin.counters(now) if isinstance(pin, Known) else pin.counters(now, self._epoch_offset)
        return [Declare(key, counter) for key, counter in found.items()]

    async def _tune_after(self, former: asyncio.Future[None] | None, tunings: Sequence[Tuning]) -> None:
        if former is not None:
            await asyncio.wait([former])
        await self._capacity.tune(tunings)

    def _described(self, known: Known, now: float) -> dict[str, Any]:
        levels = self._capacity.levels()

        def budget(key: str, limit: float | None) -> dict[str, float] | None:
            if limit is None:
                return None
            counter = levels.get(key)
            used = round(counter.used_at(now), 9) if isinstance(counter, Budget) else 0.0
            return {"limit": limit, "used": used, "left": max(0.0, round(limit - used, 9))}

        return {
            "tenant": known.tenant,
            "session": known.id,
            "served": known.served,
            "running": known.pins,
            "silent_s": round(max(0.0, now - known.heard), 3),
            "tokens": budget(known.tokens_key, known.max_tokens),
            "usd": budget(known.usd_key, known.max_usd),
        }


def _forgotten(sessions: Sequence[Known]) -> list[Tuning]:
    return [Forget(key) for known in sessions for key in known.keys]


def _limited(limits: SessionLimits) -> bool:
    return limits.max_tokens is not None or limits.max_usd is not None
