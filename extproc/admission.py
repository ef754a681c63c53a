"""Everything that decides, wired together from the rules: the same objects in the service and in the simulator.

Time and chance are arguments, so an hour of it runs in virtual time as it would run by the clock. What brings requests
and records in (Envoy, or a simulated client) and what listens to events stands outside.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from math import ceil, inf, isfinite

from extproc import tokens
from extproc.allowances import Allowances
from extproc.breakers import Breakers
from extproc.copies import Copies
from extproc.core.affinity import Affinity
from extproc.core.alarms import Alarms
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget
from extproc.core.capacity import Adopt, Forget, Retire, Store, Tuning
from extproc.core.events import BudgetUsed, Event, Settled
from extproc.core.flight import Flight
from extproc.core.forecast import Pace
from extproc.core.lanes import Lanes
from extproc.core.outputs import Outputs
from extproc.core.policy import Kind, Lane, Limit, Policy, Prices, Tenant
from extproc.core.quota import account_of, purse, route_place, upstream_place
from extproc.core.request import Usage
from extproc.core.retries import RetryBudget
from extproc.core.routing import bucket_key, kv_key, reserve_of, slots_key
from extproc.core.spend import PriceList
from extproc.core.watermark import Watermark
from extproc.flights import Flights
from extproc.limiter import Limiter
from extproc.pacing import Pacing
from extproc.ports import Clock, Observer, Record
from extproc.shared.memory import MemoryCapacity
from extproc.sizes import may_teach

__all__ = ["Admission"]

PRICING_S = 60.0
"""No request takes longer from its arrival to its books."""
AT_ONCE, FORGOTTEN_AT_ONCE = 100, 500
"""So many follow other rules, or so many counters are forgotten, in one step."""
FORMER_S = 1800.0
"""Nor does one that asked for a lane, to be in line there, however slowly it is sent."""


class Admission:
    """See the head of this file. `clock` is an event loop's; make it inside that loop."""

    def __init__(
        self,
        policy: Policy,
        clock: Clock,
        observe: Observer,
        *,
        grace_s: float = 15.0,
        calibrate: bool = True,
        levels: Mapping[str, tuple[float, float]] | None = None,
        chance: Callable[[], float] = random.random,
        epoch_offset: float = 0.0,
    ) -> None:
        """`levels`: what was in the buckets, and how many seconds ago (shared.levels); `chance` is in [0, 1).

        epoch_offset: seconds from the clock to the calendar's time, in which hours, days, months and prices begin. What
        happens to requests outside is to be announced to `observe` of this object, which passes it on.
        """
        self._listener = observe
        observe = self.observe
        self._calibrate = calibrate
        self._heed(policy)
        self.breakers = Breakers(policy.upstreams.values(), clock, observe, chance)
        self._clock = clock
        self._epoch_offset = epoch_offset
        self._retired: dict[str, float] = {}
        self._former: dict[str, float] = {}
        """Lanes that are not among the rules any more, and since when."""
        store = _store(policy, levels or {}, clock.time(), epoch_offset)
        self._durable = (*store, *_learned_keys(policy))
        self._alarms = Alarms(_budget_keys(store))
        self.capacity = MemoryCapacity(clock, store)
        self.allowances = Allowances(policy, self.capacity, clock, epoch_offset=epoch_offset)
        self.lanes = Lanes(policy.lanes.values())
        self.pace = Pace()
        self.calibration = tokens.Calibration()
        self.affinity = Affinity()
        self.outputs = Outputs(policy.output_percentile, policy.default_output_tokens)
        self.retries = RetryBudget(policy.retries)
        self.copies = Copies(clock, observe, self.retries)
        self.limiter = Limiter(
            self.lanes,
            self.capacity,
            clock,
            self.breakers.allows,
            self.pace,
            observe,
            self.breakers.earliest_probe,
            _owned(policy),
            bounds=policy.bounds,
            new_share=self._new_share,
            fits=self.breakers.fits,
            slow=self.breakers.slow,
            room=self.breakers.room,
            patience=self.copies.patience,
            chance=chance,
            out=self.breakers.out,
        )
        self.breakers.moved = self.limiter.kick
        self.breakers.flying = self._flying
        self.flights = Flights(
            policy,
            self.capacity,
            self.allowances,
            self.breakers,
            clock,
            self.pace,
            observe,
            grace_s=grace_s,
            affinity=self.affinity,
            rates=self.rates,
            freed=self.limiter.kick,
            learned=self._learn_size,
            settled=self.limiter.settled,
            retries=self.retries,
            lenient=self.bypassing,
        )

        self.pacing = Pacing(
            policy,
            self.capacity,
            clock,
            observe,
            freed=self.limiter.kick,
            chance=chance,
            wall=lambda: clock.time() + epoch_offset,
        )

    async def reload(self, policy: Policy, *, grace_s: float = 15.0, calibrate: bool = True) -> Policy:
        """Go by other rules from now on, for the same upstreams. Returns them as they are to be read everywhere else.

        Nothing is lost: who waits keeps its place, what is held, used and owed stays, and so does what was learned.
        Where counting does not suspend this is one synchronous step, so nobody sees half of it; `catch_up` is to be
        called after it. A lane that is not among the rules any more lets those go who wait there, after all others.
        ValueError for other upstreams.
        """
        if policy.upstreams.keys() != self.policy.upstreams.keys():
            raise ValueError("upstreams cannot come or go while this runs")
        now, former = self._clock.time(), self._durable
        policy = replace(policy, lanes=_with_former_lanes(policy.lanes, self._former_lanes(policy, now)))
        store = _store(policy, {}, now, self._epoch_offset)
        own, gone = self.allowances.follow(policy)
        self._durable = (*store, *_learned_keys(policy))
        self._calibrate = calibrate
        self._heed(policy)
        self._alarms.follow(_budget_keys(store))
        self.outputs.follow(policy.output_percentile, policy.default_output_tokens)
        self.retries.follow(policy.retries)
        self.flights.follow(policy, grace_s)
        self.limiter.follow(policy.lanes.values(), policy.bounds, _owned(policy), self._tenant)
        self.breakers.follow(policy.upstreams.values())
        await self._recount(store | own, {*former} | gone, self.pacing.follow(policy))
        self.limiter.kick()
        return policy

    async def catch_up(self) -> None:
        """Have tenants that nobody listed, and sessions, follow, so many in one step that nobody has to wait for it."""
        while self.allowances.behind:
            await self._recount(*self.allowances.follow_some(AT_ONCE))
            if self.allowances.behind:
                await asyncio.sleep(0)

    def rates(self, names: tuple[str, ...], model: str) -> Mapping[str, Prices]:
        """Prices of `model` that hold now at each of the upstreams `names`, where they are known."""
        return self._prices.rates(names, model, self._clock.time() + self._epoch_offset)

    def bypassing(self) -> bool:
        """Whether everybody is let go at once."""
        return self.limiter.bypassing

    def observe(self, event: Event) -> None:
        """Hear an event, and pass it on."""
        self.pacing.observe(event)
        if isinstance(event, Settled):
            self.copies.settled(event)
        self._listener(event)

    async def hear(self, record: Record) -> None:
        """Learn from one record."""
        flight = self.flights.of(record)
        await self.flights.record(record)
        await self.pacing.hear(record, flight)

    async def sweep(self) -> None:
        """Do what time asks for. Call about once a second."""
        await self.flights.sweep()
        await self.pacing.tick()
        now = self._clock.time()
        if self._retired:
            await self._forget_retired(now)
        for key, budget in self._alarms.look(self.capacity.levels(), now):
            self.observe(BudgetUsed(key, round(budget.used_at(now), 6), budget.limit, round(budget.ends_in(now), 3)))

    def durable(self) -> Store:
        """The counters to keep over a restart: all but those that came into being with a tenant's or session's call."""
        store = self.capacity.levels()
        return {key: store[key] for key in self._durable if key in store}

    def _flying(self, upstream: str) -> float:
        """How many requests run there."""
        slots = self.capacity.levels().get(slots_key(upstream))
        return slots.used if isinstance(slots, Slots) else 0.0

    def _heed(self, policy: Policy) -> None:
        self.policy = policy
        self._firsts = {route.name: policy.upstreams[route.chain[0]] for route in policy.routes}
        self._prices = PriceList(policy.upstreams)

    async def _forget_retired(self, now: float) -> None:
        """Counters that no rule names any more are kept until nobody can give anything back to them."""
        oldest = min(self.flights.oldest(), now - PRICING_S)
        over = list(takewhile(lambda key: self._retired[key] < oldest, islice(self._retired, FORGOTTEN_AT_ONCE)))
        for key in over:
            del self._retired[key]
        await self.capacity.tune([Forget(key, retired=True) for key in over])

    async def _recount(self, counters: Store, gone: Iterable[str], told: Sequence[Tuning] = ()) -> None:
        """Count by `counters`, and as is `told`; refuse nobody any more for want of what is `gone` beside that."""
        levels, now = self.capacity.levels(), self._clock.time()
        kept = counters.keys() | {tuning.key for tuning in told if isinstance(tuning, Adopt)}
        retired = [key for key in gone if key in levels and key not in kept]
        for key in (*kept, *retired):
            self._retired.pop(key, None)
        self._retired |= dict.fromkeys(retired, now)
        adopted: list[Tuning] = [Adopt(key, counter) for key, counter in counters.items()]
        await self.capacity.tune([*adopted, *map(Retire, retired), *told])

    def _former_lanes(self, policy: Policy, now: float) -> dict[str, Lane]:
        """The lanes that others than these rules name, as long as somebody may be on the way to one or have been in."""
        oldest = min(self.flights.oldest(), now - FORMER_S)
        gone = {name: self._former.get(name, now) for name in self.policy.lanes if name not in policy.lanes}
        self._former = {name: at for name, at in gone.items() if at >= oldest or self.lanes.backlogs[name].requests}
        return {name: self.policy.lanes[name] for name in self._former}

    def _tenant(self, name: str) -> Tenant | None:
        """The rules of a tenant, listed or not."""
        return self.policy.tenants.get(name) or self.policy.any_tenant

    def _new_share(self, tenant: str) -> float:
        """Which share of a lane's room and patience new sessions of a tenant may use."""
        rules = self._tenant(tenant)
        return ((rules and rules.sessions) or self.policy.sessions).new_share

    def _learn_size(self, flight: Flight, upstream: str, usage: Usage, *, complete: bool) -> None:
        request = flight.request
        if complete and usage.output:
            each = ceil(usage.output / request.choices)
            self.outputs.learn(request.tenant, request.model, each, capped=request.capped)
        if usage.input and self._calibrate and upstream in self.policy.upstreams:
            own = self.policy.upstreams[upstream].own_name(request.model)
            first = self._firsts.get(request.route)
            if first is None or may_teach(first, own, request.model):
                self.calibration.learn((own, request.model), request.counted, usage.input)


def _owned(policy: Policy) -> frozenset[str]:
    return frozenset(name for name, upstream in policy.upstreams.items() if upstream.owned)


def _budget_keys(store: Store) -> list[str]:
    return [key for key, counter in store.items() if isinstance(counter, Budget)]


def _with_former_lanes(lanes: Mapping[str, Lane], former: Mapping[str, Lane]) -> dict[str, Lane]:
    """Lanes that are not among the rules any more rank behind all others; nobody may ask for them."""
    found = dict(lanes)
    for name, lane in sorted(former.items(), key=lambda item: item[1].rank):
        if name not in found:
            found[name] = replace(lane, rank=len(found), min_share=0.0)
    return found


def _store(policy: Policy, known: Mapping[str, tuple[float, float]], now: float, epoch_offset: float) -> Store:
    store: Store = {}

    for upstream in policy.upstreams.values():
        for limit in (limit for limit in upstream.limits if isfinite(limit.per_minute)):
            key = bucket_key(upstream.name, limit)
            level, age = known.get(key, (0.0, 0.0))
            rate, reserve = limit.per_minute / 60, reserve_of(upstream, limit.kind)
            store[key] = TokenBucket(rate, limit.capacity, min(level, limit.capacity), now - age, limit.shadow, reserve)
        slots = upstream.concurrency or (upstream.learn_concurrency if upstream.learn else inf)
        store[slots_key(upstream.name)] = Slots(slots, shadow="concurrency" in upstream.shadow)
        if upstream.kv is not None:
            store[kv_key(upstream.name)] = Watermark(upstream.kv)
    for key, counter in _budgets(policy, now, epoch_offset).items():
        store[key] = counter
        level, age = known.get(key, (0.0, inf))
        if key in known and isinstance(counter, TokenBucket):
            counter.level, counter.at = min(level, counter.capacity), now - age
        elif key in known and isinstance(counter, Budget):
            counter.restore(level, now - age)
    return store


def _budgets(policy: Policy, now: float, epoch_offset: float) -> Store:
    """What tenants may use, and how many dollars upstreams and routes may cost."""
    found: Store = {}
    for upstream in policy.upstreams.values():
        found |= purse(upstream_place(upstream), upstream.dollars, upstream.shadow, now, epoch_offset)
    for route in policy.routes:
        found |= purse(route_place(route), route.dollars, route.shadow, now, epoch_offset)
    for tenant in policy.tenants.values():
        found |= account_of(tenant).counters(now, epoch_offset)
    return found


def _learned_keys(policy: Policy) -> list[str]:
    """Names of the buckets that an upstream may yet get from what its provider tells."""
    learning = [upstream.name for upstream in policy.upstreams.values() if upstream.learn]
    return [bucket_key(name, Limit("*", kind, inf, inf)) for name in learning for kind in Kind]
