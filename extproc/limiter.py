"""The only code that waits: who comes stands in line until it is handed capacity, best claim first, or refused.

Every request joins its lane, and a pass over the heads of all lines (granting) asks capacity for each. A request
that gets its turn in the pass of its own arrival never waits. Otherwise it stays in line until a pass grants it (after
a release, a refill, a breaker's move), until it has waited its max, until it has to make room for others, or until its
client leaves.

Who cannot make it in time, or finds no room, is refused at once and told when to come back, and has a place then (see
prospects). Who is only observed is decided upon like others and then let go all the same.

Taken means handed over or handed back, exactly once. A waiter that leaves while a pass is asking for it is only marked;
the pass sees the mark when the answer is there and gives back what nobody wants any more. A waiter that was granted and
is cancelled before it could notice gives back itself.

When capacity lives in this process a pass is one synchronous step and runs at once in the arriving request's own task.
When it suspends, passes run in one task of their own, which nobody cancels half-way; a newcomer is granted by one, or
learns from the first whole answer after its arrival that it has to wait.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import field, replace
from itertools import count, islice
from math import inf
from operator import itemgetter

from extproc.core.capacity import Absent, Change, Option
from extproc.core.events import Observed, Queued, Shadowed, Spell, Waited
from extproc.core.forecast import Forecast, Pace
from extproc.core.lanes import Lanes
from extproc.core.lines import Waiter
from extproc.core.policy import Bounds, Lane, SessionLimits, Tenant, WhenBusy
from extproc.core.promises import Promises
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Request, Size
from extproc.core.routing import paused_key
from extproc.core.value import value
from extproc.granting import Granting
from extproc.ports import Capacity, Clock, Observer
from extproc.prospects import Prospects
from extproc.reach import LEAST_RETRY_S, NOBODY, OUT, Reach
from extproc.turn import Turn, Wants, group_of, line_of, regroup, turn_away, turn_of

__all__ = ["Grant", "Limiter", "Standing"]

AT_ONCE = 500
"""So many who wait are let go in one step of a bypass; then the loop has a turn for others."""


@value
class Grant:
    """The upstream that serves first; its claims are taken and belong to the caller now.

    waited: whether it queued. predicted_s: the forecast of its wait then, None when it did not queue. bypassed: it was
    let go by a bypass.
    """

    upstream: str
    waited: bool
    predicted_s: float | None = field(default=None, compare=False)
    bypassed: bool = False


@value
class Standing:
    """A place in line, 1 for the first, the forecast of the rest of its wait, and for want of what it is held."""

    position: int
    predicted_s: float
    lacking: tuple[str, ...]


class Limiter:
    """See the head of this file. `allows` says whether an upstream's breaker lets users' requests through."""

    def __init__(
        self,
        lanes: Lanes,
        capacity: Capacity,
        clock: Clock,
        allows: Callable[[str], bool],
        pace: Pace,
        observer: Observer,
        earliest_probe: Callable[[tuple[str, ...]], float],
        owned: frozenset[str] = frozenset(),
        *,
        fits: Callable[[str, int], bool] = lambda _name, _prompt: True,
        slow: Callable[[str], bool] = lambda _: False,
        room: Callable[[str], float] = lambda _: inf,
        patience: Callable[[Request], float] = lambda _: 0.0,
        bounds: Bounds | None = None,
        new_share: Callable[[str], float] = lambda _: SessionLimits().new_share,
        chance: Callable[[], float] = random.random,
        out: Mapping[str, float] = NOBODY,
    ) -> None:
        """`earliest_probe` tells when the first of some upstreams may be tried again, on the clock.

        owned: upstreams that serve when nobody else can be waited for. fits: whether an upstream answers prompts of so
        many tokens well. slow: whether its breaker keeps users away merely because first tokens are late; that is
        better than nobody. room: how many more may go there, where its breaker lets some through. patience: asked of a
        client's retry that would have to wait and was not told to come now: 0 when it may, else the seconds after which
        it may come again.
        bounds: of all lanes together. new_share: which share of a lane's room and patience a tenant's new sessions may
        use. `chance` is in [0, 1). out: by name, upstreams to which nobody is sent, whatever their breakers say.
        """
        self.lanes = lanes
        self.draining = self.bypassing = False
        self.promises = Promises()
        self.forecast = Forecast(lanes, self.promises, pace, allows, slow)
        self._capacity = capacity
        self._clock = clock
        self._reach = Reach(capacity, clock, allows, earliest_probe, owned, fits=fits, slow=slow, out=out)
        self._observe = observer
        self._seq = count()
        self.prospects = Prospects(
            lanes,
            self.promises,
            self.forecast,
            self._reach,
            capacity,
            clock,
            bounds or Bounds(),
            patience=patience,
            new_share=new_share,
            numbers=self._seq,
        )
        self.granting = Granting(
            lanes,
            self.promises,
            self.forecast,
            self._reach,
            capacity,
            clock,
            observer,
            room=room,
            chance=chance,
            halted=lambda: self.draining or self.bypassing,
        )

    def follow(
        self, rules: Iterable[Lane], bounds: Bounds, owned: frozenset[str], tenant_of: Callable[[str], Tenant | None]
    ) -> None:
        """Go by other rules from now on; see Lanes.follow. Who waits keeps its place, and what it wants."""
        self.lanes.follow(rules, bounds, tenant_of)
        self.prospects.bounds, self._reach.owned = bounds, owned
        self.granting.follow()
        self.forecast.follow()
        for waiter in list(self.lanes.waiters()):
            self._heed(turn_of(waiter))
        self.kick()

    async def run(self) -> None:
        """Passes whenever something changed. Runs until cancelled."""
        while True:
            await self.granting.wake.wait()
            self.granting.wake.clear()
            await self._pass()
            if self.granting.wake.is_set():
                await asyncio.sleep(0)  # whatever else the loop has to do comes in between

    def kick(self) -> None:
        """Something changed that may let a waiter go: capacity came back, a breaker moved, a limit grew."""
        self.granting.kick()

    def drain(self) -> None:
        """Refuse newcomers and everybody in line, from now on."""
        self.draining = True
        for waiter in self.lanes.waiters():
            turn_of(waiter).event.set()
        self.granting.wake.set()

    def undrain(self) -> None:
        """Take in again. Who was refused meanwhile has been refused."""
        self.draining = False
        self.granting.wake.set()

    def pause(self, lane: str, until: float = inf) -> None:
        """Let nobody of a lane go until then, on the clock; infinite where that is not known. KeyError for no lane.

        Who comes waits as long as its lane lets it. See `disown`, too.
        """
        rule = self.lanes.rules[lane]
        self.lanes.paused[lane] = until
        for line in self.lanes.queues[lane].lines.values():
            line.refused((paused_key(lane),), self._clock.time())
        self.forecast.demand.forget(rule.rank)
        self.kick()

    async def disown(self, lane: str) -> None:
        """Keep nothing free any more for a lane that was paused, whatever it asked for before."""
        rule = self.lanes.rules[lane]
        keys = [key for key in self._capacity.levels() if key.startswith("upstream/")]
        await self._capacity.tune([Absent(key, lane, rule.rank) for key in keys])
        self.kick()

    def resume(self, lane: str) -> None:
        """Let them go again, at once where there is room."""
        if self.lanes.paused.pop(lane, None) is None:
            return
        now = self._clock.time()
        for line in self.lanes.queues[lane].lines.values():
            line.refused((), now)
        self.kick()

    def bypass(self) -> None:
        """Let everybody go at once from now on, into debt where there is no room, also whom a paused lane holds.

        Only who may be sent nowhere, because all is taken out, is refused.
        """
        self.bypassing = True
        self.kick()

    def no_bypass(self) -> None:
        """Decide again. What went meanwhile is owed."""
        self.bypassing = False
        self.kick()

    def look_around(self) -> None:
        """Upstreams were taken out: who can be served by nobody else in time is refused now, not when it has waited.

        Where all its upstreams only rest it goes on waiting, as ever.
        """
        for turn in list(map(turn_of, self.lanes.waiters())):
            if turn.wants.forced and turn.wants.names[0] in self._reach.out:
                turn.wants = turn.whole
                turn.fitting = self._reach.fitting(turn.wants)
                regroup(self.lanes, turn, group_of(turn, first_only=not turn.spilled), self._clock.time())
            names = self._reach.affordable(turn.wants)
            gone = all(name in self._reach.out for name in names)
            if gone and self._reach.earliest_probe(names) > turn.request.wait_until:
                turn_away(self.lanes, turn, Rejected(Reason.NO_UPSTREAM, OUT, retry_after=self._reach.back_s(names)))
        self.kick()

    async def acquire(
        self, request: Request, wants: Wants, queued: Callable[[float], Awaitable[None]], since: float | None = None
    ) -> Grant:
        """The capacity of one upstream, taken. Rejected when it cannot be had in time; `queued` hears of a real wait.

        since: the arrival whose place in line it has, if not its own. Cancellation at any await leaves nothing taken.
        """
        if self.draining:
            raise Rejected(Reason.DRAINING, retry_after=LEAST_RETRY_S)
        if self.bypassing:
            return Grant(await self._pass_through(request, wants), waited=False, bypassed=True)
        whole, wants = wants, self._reach.with_owned(request, wants)
        if self._capacity.immediate and self._nobody_waits(request.lane):
            option = await self.granting.at_once(request, wants)
            if option is not None:
                return Grant(option.name, waited=False)
        turn = self._join(request, wants, since)
        turn.whole = whole
        try:
            await self._first_look(turn)
            if turn.granted is not None:
                return Grant(turn.granted.name, waited=False, bypassed=turn.bypassed)
            if request.observed:
                return Grant(await self._let_go(turn), waited=False)
            await self._wait(turn, queued)
            return Grant(self._granted(turn), waited=True, predicted_s=turn.predicted_s, bypassed=turn.bypassed)
        except BaseException:
            await self._leave(turn)
            raise

    def settled(self, request: Request, size: Size) -> None:
        """What a granted request really used, as far as it is known: its tenant is charged that, not the estimate."""
        self.lanes.settle(request, size)

    def standing(self, request: Request) -> Standing | None:
        """How a request stands in line now; None where it does not. It looks at everybody: for those who ask seldom."""
        turn = next((one for one in map(turn_of, self.lanes.waiters()) if one.request.ticket == request.ticket), None)
        if turn is None or turn.flow is None:
            return None
        place = self.forecast.place(turn, turn.wants.names, self._clock.time())
        return Standing(place, self.prospects.until_turn_s(turn), turn.flow.line.lacking)

    def _heed(self, turn: Turn) -> None:
        """Whether somebody in line may pass over its first choice is another question by its lane's new rule."""
        rule = self.lanes.rules[turn.request.lane]
        if rule.when_busy is WhenBusy.HOLD:
            self._forget_timer(turn)
            turn.spilled = False
        elif not turn.spilled and turn.timer is None and len(turn.wants.names) > 1:
            self._spill_later(turn, rule.spill_after_s)
        first_only = not (turn.spilled or turn.wants.forced)
        if first_only is not turn.group.first_only:
            regroup(self.lanes, turn, group_of(turn, first_only=first_only), self._clock.time())

    def _spill_later(self, turn: Turn, after_s: float) -> None:
        turn.timer = asyncio.get_running_loop().call_at(self._clock.time() + after_s, self._spill, turn)

    def seeks(self, waiter: Waiter) -> tuple[tuple[str, ...], tuple[Option, ...]]:
        """The upstreams that somebody in line could go to, and what it would take now; nothing where all are away."""
        return turn_of(waiter).wants.names, self.granting.options(waiter)

    def until_turn_s(self, waiter: Waiter) -> float:
        """Forecast in seconds of what is left of the wait of somebody in line."""
        return self.prospects.until_turn_s(turn_of(waiter))

    def newcomer_s(self, waiter: Waiter) -> float:
        """Forecast of the wait of one who comes now and is otherwise like somebody in line."""
        return self.prospects.predicted_s(replace(waiter.request, arrived=self._clock.time()), turn_of(waiter).wants)

    def _nobody_waits(self, lane: str) -> bool:
        """Whether one that comes to this lane may go at once where there is room."""
        if not self.lanes.paused:
            return not self.lanes.total.requests
        return lane not in self.lanes.paused and not self.lanes.moving

    def _join(self, request: Request, wants: Wants, since: float | None) -> Turn:
        now = self._clock.time()
        place, before = (request.arrived, inf) if since is None else (min(since, request.arrived), now)
        promise = self.promises.claim(request, now) if len(self.promises) else None
        if promise is not None and promise.kept_at(now):
            place, before = min(place, promise.since), promise.second
        turn = Turn(request, next(self._seq), wants, place, before)
        self.granting.come(turn)
        turn.promise = promise
        rule = self.lanes.rules[request.lane]
        if rule.when_busy is WhenBusy.SPILL and len(wants.names) > 1:
            turn.spilled = self.prospects.passes_first(turn, rule.spill_after_s)
        turn.fitting = self._reach.fitting(wants)
        turn.group = group_of(turn, first_only=not (turn.spilled or wants.forced))
        self.lanes.join(turn)
        return turn

    async def _first_look(self, turn: Turn) -> None:
        """Return when who just joined was granted, or a pass has come by without granting it."""
        if self._capacity.immediate:
            if not (self.granting.looked and self.lanes.behind(turn) and turn.wants.costless is None):
                await self._pass()
        else:
            self.granting.wake_for(turn)
            await turn.event.wait()
            if turn.granted is None and turn.verdict is None:
                turn.event.clear()

    async def _let_go(self, turn: Turn) -> str:
        """What is only observed goes to its first choice now, whatever is free there."""
        if self.draining:
            raise Rejected(Reason.DRAINING, retry_after=LEAST_RETRY_S)
        name = next(iter(self._reach.open(turn.wants)), None) or self._reach.first_in_use(turn.wants)
        reason, predicted = self.prospects.would_be(turn)
        if turn.flow is not None:
            self.lanes.serve(turn)
        self._observe(Observed(turn.request, reason, predicted))
        return await self._send(turn, name)

    async def _send(self, turn: Turn, name: str) -> str:
        """Let it go there, whatever is free."""
        turn.gone, turn.granted = True, Option(name, turn.wants.prices[name])
        self.granting.note(turn.request, turn.granted)
        charging = self._charge([turn])
        await (charging if self._capacity.immediate else asyncio.shield(charging))
        self.kick()
        return name

    async def _pass_through(self, request: Request, wants: Wants) -> str:
        """Let a newcomer go without asking anybody: to whom a breaker lets it, else to the first there is."""
        turn = Turn(request, next(self._seq), wants, request.arrived, inf)
        if len(self.promises):
            self.promises.claim(request, self._clock.time())
        name = self._reach.bypassed_to(wants)
        try:
            return await self._send(turn, name)
        except BaseException:
            await self._leave(turn)
            raise

    async def _release(self) -> None:
        """Let some of those go who wait, in a bypass. Who waits in more than one step is let go in the next."""
        turns = []
        for turn in list(map(turn_of, islice(self.lanes.waiters(), AT_ONCE))):
            try:
                name = self._reach.bypassed_to(turn.whole)
            except Rejected as rejected:
                turn_away(self.lanes, turn, rejected)
                continue
            self.lanes.serve(turn)
            turn.gone, turn.granted, turn.wants = True, Option(name, turn.whole.prices[name]), turn.whole
            turn.bypassed = True
            self.granting.note(turn.request, turn.granted)
            turns.append(turn)
        await self._charge(turns)
        for turn in turns:
            turn.event.set()
        self.kick()

    async def _charge(self, turns: list[Turn]) -> None:
        """Take what each is let go for, whether it is there or not, and give back for whoever has left meanwhile."""
        charged = [(turn, turn.granted) for turn in turns if turn.granted is not None]
        for turn, _ in charged:
            turn.charging = True
        changes = [Change(claim.key, -claim.amount) for _, option in charged for claim in option.claims]
        await self._capacity.change(changes)
        for turn, option in charged:
            turn.charging = False
            if turn.granted is None:
                await self.granting.give_back(option)

    async def _wait(self, turn: Turn, queued: Callable[[float], Awaitable[None]]) -> None:
        request = turn.request
        if self.draining or turn.verdict:
            return
        self._admit(turn)
        now = self._clock.time()
        rule = self.lanes.rules[request.lane]
        if rule.when_busy is WhenBusy.SPILL and not turn.spilled and turn.timer is None and len(turn.wants.names) > 1:
            self._spill_later(turn, rule.spill_after_s)
        try:
            async with asyncio.timeout_at(request.wait_until):
                await queued(max(0.0, request.wait_until - now))
                await turn.event.wait()
        except TimeoutError:
            if turn.granted is None and turn.verdict is None:
                raise self.prospects.waited_too_long(turn) from None
        finally:
            self._tell_wait(turn, now)

    def _tell_wait(self, turn: Turn, since: float) -> None:
        """Its wait is over: what it was for, the longest first."""
        now = self._clock.time()
        turn.stands(None, now)
        spells = sorted(turn.spells.items(), key=itemgetter(1), reverse=True)
        self._observe(Waited(turn.request, now - since, tuple(Spell(*spell) for spell in spells)))

    def _granted(self, turn: Turn) -> str:
        if turn.granted is None:
            raise turn.verdict or Rejected(Reason.DRAINING, retry_after=LEAST_RETRY_S)
        self._forget_timer(turn)
        return turn.granted.name

    def _admit(self, turn: Turn) -> None:
        """Let who just came stand in line, others making room where they must. Rejected when it is the one to go."""
        request, lane = turn.request, turn.request.lane
        turn.predicted_s = predicted = self.prospects.until_turn_s(turn)
        self.prospects.spend_patience(turn, predicted)
        reason = self.prospects.hopeless(turn, predicted)
        while reason is None and (victim := self.prospects.shed(turn, predicted)):
            if victim is turn:
                reason = Reason.LANE_FULL
            else:
                self._evict(turn_of(victim))
        refusal = None
        if reason is not None:
            refusal = self.prospects.refusal(turn, reason, predicted if self._reach.open(turn.wants) else None)
        now = self._clock.time()
        if turn.promise is None or not turn.promise.kept_at(now):
            self.forecast.asked(request, self.prospects.in_view(request, turn.wants), turn.wants.prices, now)
        if refusal is not None:
            raise refusal
        for bound in self.lanes.over(lane, shadow=True):
            self._observe(Shadowed(request, f"lane/{lane}/{bound}"))
        line = line_of(self.lanes, turn, now)
        turn.stands(line, now)
        place = self.forecast.place(turn, turn.wants.names, now)
        self._observe(Queued(request, predicted, place, line.lacking if line else (), self._waiting(lane)))

    def _waiting(self, lane: str) -> dict[str, int]:
        """Requests in line in this lane and in better ones."""
        rules, rank = self.lanes.rules, self.lanes.rules[lane].rank
        backlogs = self.lanes.backlogs.items()
        return {name: backlog.requests for name, backlog in backlogs if rules[name].rank <= rank}

    def _evict(self, turn: Turn) -> None:
        observed = turn.request.observed  # it goes all the same
        verdict = Rejected(Reason.EVICTED) if observed else self.prospects.refusal(turn, Reason.EVICTED)
        turn_away(self.lanes, turn, verdict)

    async def _leave(self, turn: Turn) -> None:
        self._forget_timer(turn)
        if turn.granted is None:
            turn.gone = True
            if turn.flow is not None:
                self.lanes.leave(turn)
                self.kick()
        else:
            option, turn.granted = turn.granted, None
            self.lanes.settle(turn.request, None)
            if not turn.charging:
                await asyncio.shield(self.granting.give_back(option))

    def _forget_timer(self, turn: Turn) -> None:
        if turn.timer is not None:
            turn.timer.cancel()
            turn.timer = None

    async def _pass(self) -> None:
        """Let go whoever may, as far as that can be done before others should have a turn of the loop."""
        await (self._release() if self.bypassing else self.granting.ask_for_all())

    def _spill(self, turn: Turn) -> None:
        turn.timer = None
        if turn.granted is None and not turn.gone and not turn.spilled:
            turn.spilled = True
            regroup(self.lanes, turn, group_of(turn, first_only=False), self._clock.time())
            self.kick()
