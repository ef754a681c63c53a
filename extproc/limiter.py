"""The only code that waits: it hands out capacity to waiting requests, best claim first.

Every request joins its lane, and a pass over the heads of all lanes asks capacity for what each would take. A request
that gets its turn in the pass of its own arrival never waits. Otherwise it stays in line until a pass grants it (after
a release, a refill, a breaker's move), until it has waited its max, or until its client leaves.

Taken means handed over or handed back, exactly once. A waiter that leaves while a pass is asking for it is only marked;
the pass sees the mark when the answer is there and gives back what nobody wants any more. A waiter that was granted and
is cancelled before it could notice gives back itself.

When capacity lives in this process a pass is one synchronous step and runs at once in the arriving request's own task.
When it suspends, passes run in one task of their own, which nobody cancels half-way; a newcomer is granted by one, or
learns from the first whole answer after its arrival that it has to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import field
from itertools import count
from math import inf, isfinite

from extproc.core import forecast
from extproc.core.capacity import Ask, Change, Claim, Option
from extproc.core.events import Queued
from extproc.core.lanes import Backlog, Group, Lanes, Waiter
from extproc.core.policy import WhenBusy
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Request
from extproc.core.routing import options
from extproc.core.value import value
from extproc.ports import Capacity, Clock, Observer

__all__ = ["Grant", "Limiter", "Wants"]

TICK_S = 0.001
"""No pass is scheduled sooner than this after another, so that rounding never makes a busy loop."""
MAX_DEPTH = 64
"""At most so many of each group are asked for at once."""


@value
class Wants:
    """What one request could take: upstreams in order of preference, and what each costs it.

    forced: whatever their breakers say.
    """

    names: tuple[str, ...]
    prices: dict[str, tuple[Claim, ...]]
    forced: bool = False


@value
class Grant:
    """The upstream that serves first; its claims are taken and belong to the caller now.

    waited: whether it queued. predicted_s: the forecast of its wait then, None when it did not queue.
    """

    upstream: str
    waited: bool
    predicted_s: float | None = field(default=None, compare=False)


class _Turn(Waiter):
    """A waiter with the means to wake it."""

    __slots__ = ("event", "inherits", "predicted_s", "timer", "wants")

    def __init__(self, request: Request, seq: float, wants: Wants, *, inherits: bool = False) -> None:
        super().__init__(request, Group(), seq)
        self.event = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None
        self.wants = wants
        self.inherits = inherits
        self.predicted_s = 0.0


class Limiter:
    """See the head of this file. `allows` says whether an upstream's breaker lets users' requests through."""

    def __init__(
        self,
        lanes: Lanes,
        capacity: Capacity,
        clock: Clock,
        allows: Callable[[str], bool],
        pace: forecast.Pace,
        observer: Observer,
        earliest_probe: Callable[[tuple[str, ...]], float],
        owned: frozenset[str] = frozenset(),
        *,
        patience: Callable[[Request], float] = lambda _: 0.0,
    ) -> None:
        """`earliest_probe` tells when the first of some upstreams may be tried again, on the clock.

        owned: upstreams that serve when nobody else can be waited for. patience: asked of a client's retry that would
        have to wait, in a place of its own: 0 when it may, else the seconds after which it may come again.
        """
        self.lanes = lanes
        self.draining = False
        self._capacity = capacity
        self._clock = clock
        self._allows = allows
        self._pace = pace
        self._observe = observer
        self._earliest_probe = earliest_probe
        self._owned = owned
        self._patience = patience
        self._demand = forecast.Demand()
        self._seq = count()
        self._wake = asyncio.Event()
        self._newcomers: list[_Turn] = []
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Passes whenever something changed. Runs until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._pass()

    def kick(self) -> None:
        """Something changed that may let a waiter go: capacity came back, a breaker moved, a limit grew."""
        if len(self.lanes):
            self._wake.set()

    def drain(self) -> None:
        """Refuse newcomers and everybody in line, from now on."""
        self.draining = True
        for waiter in self.lanes.waiters():
            assert isinstance(waiter, _Turn)  # noqa: S101 - only this class fills the lanes
            waiter.event.set()
        self._wake.set()

    async def acquire(
        self, request: Request, wants: Wants, queued: Callable[[float], Awaitable[None]], since: float | None = None
    ) -> Grant:
        """The capacity of one upstream, taken. Rejected when it cannot be had in time; `queued` hears of a real wait.

        since: the arrival whose place in line it has, if not its own. Cancellation at any await leaves nothing taken.
        """
        if self.draining:
            raise Rejected(Reason.DRAINING, retry_after=1.0)
        wants = self._in_reach(request, wants)
        if self._capacity.immediate and not len(self.lanes):
            option = await self._at_once(request, wants)
            if option is not None:
                return Grant(option.name, waited=False)
        turn = self._join(request, wants, since)
        try:
            await self._first_look(turn)
            if turn.granted is None:
                await self._wait(turn, queued)
                return Grant(self._granted(turn), waited=True, predicted_s=turn.predicted_s)
            return Grant(turn.granted.name, waited=False)
        except BaseException:
            await self._leave(turn)
            raise

    def predicted_s(self, request: Request, wants: Wants, turn: Waiter | None = None) -> float:
        """Forecast in seconds of the wait of `request` as the newest of its lane; `turn` when it stands in line.

        Upstreams that it may all use work off the line together; infinite when no breaker lets it through.
        """
        names = self._open(wants)
        if self.lanes.rules[request.lane].when_busy is WhenBusy.HOLD:
            names = names[:1]
        waiter = turn or Waiter(request, Group(), -1)
        waits = [self._wait_at(name, waiter, wants) for name in names]
        if 0.0 in waits:
            return 0.0
        rate = sum(1.0 / wait for wait in waits)
        return 1.0 / rate if rate else inf

    def retry_after_s(self, request: Request, wants: Wants, turn: Waiter | None = None) -> float:
        """Seconds after which the same request would get its turn within half its lane's wait, as things stand."""
        predicted = self.predicted_s(request, wants, turn)
        if not isfinite(predicted):
            return max(1.0, self._earliest_probe(wants.names) - self._clock.time())
        return max(1.0, predicted - 0.5 * self._max_wait_s(request))

    def _max_wait_s(self, request: Request) -> float:
        return self.lanes.rules[request.lane].max_wait_s

    def _in_reach(self, request: Request, wants: Wants) -> Wants:
        """Where every breaker rests for longer than the request can wait, what is owned serves all the same."""
        if any(map(self._allows, wants.names)) or self._earliest_probe(wants.names) <= request.wait_until:
            return wants
        owned = next((name for name in wants.names if name in self._owned), None)
        return wants if owned is None else Wants((owned,), wants.prices, forced=True)

    def _open(self, wants: Wants) -> list[str]:
        """The upstreams that may be asked now."""
        return [name for name in wants.names if wants.forced or self._allows(name)]

    async def _at_once(self, request: Request, wants: Wants) -> Option | None:
        """The first choice, taken, when it has room: nobody waits, so nobody is passed."""
        first = next(iter(self._open(wants)), None)
        if first is None:
            return None
        ask = Ask(request.ticket, (Option(first, wants.prices[first]),))
        option = (await self._capacity.take((ask,)))[0].option
        if option is not None:
            self._note(request, option)
        return option

    def _note(self, request: Request, option: Option) -> None:
        self._demand.note(self.lanes.rules[request.lane].rank, option.claims, self._clock.time())

    def _join(self, request: Request, wants: Wants, since: float | None) -> _Turn:
        turn = _Turn(request, self._place(since), wants, inherits=since is not None)
        rule = self.lanes.rules[request.lane]
        turn.spilled = rule.when_busy is WhenBusy.SPILL and self._passes_first(turn, rule.spill_after_s)
        turn.group = _group(turn)
        self.lanes.join(turn)
        return turn

    def _place(self, since: float | None) -> float:
        """The place of a newcomer, or that of one who arrived at `since`: before all that came later."""
        later = [] if since is None else [w.seq for w in self.lanes.waiters() if w.request.arrived > since]
        return min(later) - 0.5 if later else next(self._seq)

    async def _first_look(self, turn: _Turn) -> None:
        """Return when who just joined was granted, or a pass has come by without granting it."""
        if self._capacity.immediate:
            await self._pass()
        else:
            self._newcomers.append(turn)
            self._wake.set()
            await turn.event.wait()
            if turn.granted is None:
                turn.event.clear()

    async def _wait(self, turn: _Turn, queued: Callable[[float], Awaitable[None]]) -> None:
        request = turn.request
        if self.draining:
            return
        self._refuse_hopeless(turn)
        now = self._clock.time()
        rule = self.lanes.rules[request.lane]
        if rule.when_busy is WhenBusy.SPILL and not turn.spilled:
            turn.timer = asyncio.get_running_loop().call_at(now + rule.spill_after_s, self._spill, turn)
        try:
            async with asyncio.timeout_at(request.wait_until):
                await queued(max(0.0, request.wait_until - now))
                await turn.event.wait()
        except TimeoutError:
            if turn.granted is None:
                raise self._waited_too_long(turn) from None

    def _granted(self, turn: _Turn) -> str:
        if turn.granted is None:
            raise Rejected(Reason.DRAINING, retry_after=1.0)
        self._forget_timer(turn)
        return turn.granted.name

    def _refuse_hopeless(self, turn: _Turn) -> None:
        request, wants = turn.request, turn.wants
        if request.retries and not turn.inherits and (again := self._patience(request)):
            again = max(again, self.retry_after_s(request, wants, turn))
            raise Rejected(Reason.LANE_FULL, "the retry budget of this tenant is spent", retry_after=again)
        if self.lanes.full(request.lane):
            raise Rejected(Reason.LANE_FULL, retry_after=self.retry_after_s(request, wants, turn))
        left = request.wait_until - self._clock.time()
        if not self._open(wants):
            probe_in = self._earliest_probe(wants.names) - self._clock.time()
            if probe_in > left:
                raise Rejected(Reason.NO_UPSTREAM, retry_after=max(1.0, probe_in))
            predicted = max(0.0, probe_in)
        else:
            predicted = self.predicted_s(request, wants, turn)
        if predicted > left:
            raise Rejected(Reason.DEADLINE_UNMEETABLE, retry_after=self.retry_after_s(request, wants, turn))
        turn.predicted_s = predicted
        self._observe(Queued(request, predicted))

    def _waited_too_long(self, turn: _Turn) -> Rejected:
        request, wants = turn.request, turn.wants
        if not self._open(wants):
            return Rejected(Reason.NO_UPSTREAM, retry_after=self.retry_after_s(request, wants, turn))
        if request.deadline is not None and request.wait_until < request.arrived + self._max_wait_s(request):
            return Rejected(Reason.DEADLINE_PASSED)
        return Rejected(Reason.QUEUE_TIMEOUT, retry_after=self.retry_after_s(request, wants, turn))

    async def _leave(self, turn: _Turn) -> None:
        self._forget_timer(turn)
        if turn.granted is None:
            turn.gone = True
            self.lanes.leave(turn)
            self.kick()
        else:
            option, turn.granted = turn.granted, None
            await asyncio.shield(self._give_back(option))

    def _forget_timer(self, turn: _Turn) -> None:
        if turn.timer is not None:
            turn.timer.cancel()
            turn.timer = None

    async def _pass(self) -> None:
        """Ask for every head until nobody is granted any more; for ever more at once while that goes on."""
        depth = 1
        while not self.draining and (heads := self.lanes.heads(depth)):
            newcomers, self._newcomers = self._newcomers, []
            asks = [Ask(head.request.ticket, self._options(head), followed) for head, followed in heads]
            answers = await self._capacity.take(asks)
            progress, whole, soonest = False, True, inf
            for (head, followed), answer in zip(heads, answers, strict=True):
                whole = whole and not (followed and answer.option)
                if answer.option is None:
                    soonest = min(soonest, answer.retry_after)
                elif head.gone:
                    await self._give_back(answer.option)
                    progress = True
                else:
                    self._grant(head, answer.option)
                    progress = True
            self._tell(newcomers, whole=whole)
            if not progress:
                self._schedule(soonest)
                return
            depth = depth if whole else min(2 * depth, MAX_DEPTH)

    def _tell(self, newcomers: list[_Turn], *, whole: bool) -> None:
        """Whoever was in line for a whole batch, and was not granted, knows now that it has to wait."""
        if whole:
            for turn in newcomers:
                turn.event.set()
        else:
            self._newcomers = newcomers + self._newcomers

    def _grant(self, head: Waiter, option: Option) -> None:
        assert isinstance(head, _Turn)  # noqa: S101 - only this class fills the lanes
        self.lanes.leave(head)
        self._note(head.request, option)
        head.granted = option
        head.event.set()

    async def _give_back(self, option: Option) -> None:
        await self._capacity.change([Change(claim.key, claim.amount) for claim in option.claims])
        self.kick()

    def _schedule(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if isfinite(seconds):
            self._timer = asyncio.get_running_loop().call_later(max(TICK_S, seconds), self.kick)

    def _options(self, waiter: Waiter) -> tuple[Option, ...]:
        assert isinstance(waiter, _Turn)  # noqa: S101 - only this class fills the lanes
        rule = self.lanes.rules[waiter.request.lane]
        wants = waiter.wants
        return options(self._open(wants), wants.prices.__getitem__, rule.when_busy, spilled=waiter.spilled)

    def _spill(self, turn: _Turn) -> None:
        turn.timer = None
        if turn.granted is None and not turn.gone and not turn.spilled:
            turn.spilled = True
            self.lanes.regroup(turn, _group(turn))
            self.kick()

    def _passes_first(self, turn: _Turn, after_s: float) -> bool:
        """Whether not to wait for the first choice: it would take too long, or the upstream asked for a pause."""
        first = next(iter(self._open(turn.wants)), None)
        if first is None:
            return False
        levels, now = self._capacity.levels(), self._clock.time()
        counters = (levels.get(claim.key) for claim in turn.wants.prices[first])
        paused = any(counter is not None and counter.closed_until > now for counter in counters)
        return paused or self._wait_at(first, turn, turn.wants) > after_s

    def _wait_at(self, name: str, waiter: Waiter, wants: Wants) -> float:
        def ahead(key: str) -> Backlog:
            return self.lanes.ahead(waiter, name, key, self._allows)

        def above(key: str) -> float:
            return self._demand.above(key, rank, now)

        levels, now, rank = self._capacity.levels(), self._clock.time(), self.lanes.rules[waiter.request.lane].rank
        return forecast.wait_s(levels, wants.prices[name], ahead, above, self._pace.hold_s(name), now)


def _group(turn: _Turn) -> Group:
    wants = turn.wants
    keys = frozenset(claim.key for name in wants.names for claim in wants.prices[name])
    return Group(wants.names, keys, first_only=not (turn.spilled or wants.forced))
