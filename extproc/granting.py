"""Letting go whoever may go now: passes over the heads of all lines, which ask capacity for what each would take.

A pass asks for every head until nobody gets anything any more, and then rests until somebody may: after a release, a
refill, a breaker's move (`kick`), or when the time has come for which a counter said so. Where a call takes time more
and more of a line are asked for at once. Who came meanwhile is told once it was in line for a whole batch.

Deliberately not here: coming, waiting and leaving (limiter), whose turn it is (core.lanes), and which upstreams one may
be sent to (reach).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf, isfinite

from extproc.core.capacity import Answer, Ask, Change, Option
from extproc.core.events import Shadowed
from extproc.core.forecast import Forecast
from extproc.core.lanes import Lanes, terms_of
from extproc.core.lines import Line, Waiter
from extproc.core.promises import Promises
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Request
from extproc.core.routing import options
from extproc.core.shares import RENEW_S
from extproc.core.watermark import recheck_s
from extproc.ports import Capacity, Clock, Observer
from extproc.reach import Reach
from extproc.turn import Turn, Wants, group_of, regroup, turn_away, turn_of

__all__ = ["Granting"]

TICK_S = 0.001
"""No pass is scheduled sooner than this after another, so that rounding never makes a busy loop."""
MAX_DEPTH = 64
"""At most so many of each line are asked for at once."""
MAX_LOOKS = 500
"""So many looks in one pass; then the loop has a turn for others. They take some ten milliseconds together."""
BROKE = "what may be spent on this model's upstreams does not cover this request, and none of them is free"


class Granting:
    """See the head of this file. wake: set when a pass is due."""

    def __init__(
        self,
        lanes: Lanes,
        promises: Promises,
        forecast: Forecast,
        reach: Reach,
        capacity: Capacity,
        clock: Clock,
        observer: Observer,
        *,
        room: Callable[[str], float],
        chance: Callable[[], float],
        halted: Callable[[], bool],
    ) -> None:
        """Keep them; see Limiter for `room` and `chance`. halted: whether nobody is to be asked for, not even now."""
        self.wake = asyncio.Event()
        self._lanes = lanes
        self._promises = promises
        self._forecast = forecast
        self._reach = reach
        self._capacity = capacity
        self._clock = clock
        self._observe = observer
        self._room = room
        self._chance = chance
        self._halted = halted
        self._newcomers: list[Turn] = []
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = -inf
        self._vain = 0
        self._budgeted = False
        """Whether anybody came so far whose upstreams' dollars are limited."""
        self.follow()

    @property
    def looked(self) -> bool:
        """Whether a pass has been, since when nothing has changed."""
        return self._clock.time() < self._look_at and not self.wake.is_set()

    def come(self, turn: Turn) -> None:
        """Somebody is about to stand in line."""
        self._budgeted = self._budgeted or turn.wants.costless is not None

    def wake_for(self, newcomer: Turn) -> None:
        """Have a pass come by, and wake who just came when it has, whether it is granted or not."""
        self._newcomers.append(newcomer)
        self.wake.set()

    def kick(self) -> None:
        """Something changed that may let a waiter go: capacity came back, a breaker moved, a limit grew."""
        if self._lanes.total.requests:
            self.wake.set()

    async def at_once(self, request: Request, wants: Wants) -> Option | None:
        """The first choice, taken, when it has room: nobody waits, so nobody is passed."""
        first = next(iter(self._reach.open(wants)), None)
        if first is None:
            return None
        terms = self._terms[request.lane]
        ask = Ask(request.ticket, (Option(first, wants.prices[first]),), terms=terms)
        answer = (await self._capacity.take((ask,)))[0]
        if answer.option is not None:
            self.note(request, answer.option, answer.shadowed)
            if len(self._promises):
                self._promises.claim(request, self._clock.time())
        return answer.option

    async def ask_for_all(self) -> None:
        """Ask for every head until nobody is granted any more, or until others should have a turn of the loop.

        Where a call takes time, for ever more of a line at once while that goes on.
        """
        deep: dict[Line, int] = {}
        for _ in range(MAX_LOOKS):
            heads = [] if self._halted() else self._heads(deep)
            newcomers, self._newcomers = self._newcomers, []
            if not heads:
                self._tell(newcomers, whole=True)  # nobody can be asked for: their lanes are paused
                self._forecast.served.looked((), self._clock.time())
                return
            answers, progress, whole = await self._ask(heads, deep)
            self._tell(newcomers, whole=whole)
            if not progress:
                self._rest(answers)
                return
        self.kick()

    def options(self, waiter: Waiter) -> tuple[Option, ...]:
        """What it would take now; nothing where all its upstreams are away."""
        turn = turn_of(waiter)
        rule = self._lanes.rules[turn.request.lane]
        names, price = self._reach.open(turn.wants), turn.wants.prices.__getitem__
        return options(names, price, rule.when_busy, spilled=turn.spilled)

    def note(self, request: Request, option: Option, shadowed: tuple[str, ...] = ()) -> None:
        """It is let go with this; shadowed: limits that would have kept it."""
        rank, now = self._terms[request.lane].rank, self._clock.time()
        self._forecast.demand.note(rank, option.claims, now, vip=request.vip)
        for key in shadowed:
            self._observe(Shadowed(request, key))

    async def give_back(self, option: Option) -> None:
        """Nobody wants any more what was taken."""
        await self._capacity.change([Change(claim.key, claim.amount) for claim in option.claims])
        self.kick()

    def follow(self) -> None:
        """Go by the lanes' rules as they are by now."""
        rules = self._lanes.rules
        self._terms = {name: terms_of(rule) for name, rule in rules.items()}
        self._renew_s = RENEW_S if any(rule.min_share for rule in rules.values()) else inf

    async def _ask(self, heads: list[tuple[Waiter, bool]], deep: dict[Line, int]) -> tuple[list[Answer], bool, bool]:
        """Ask for these at once, and let go who got something. `deep` is told of how many of a line to ask for next.

        Returns the answers, whether it is worth to ask for others, and whether everybody was asked for who could go.
        """
        lines = [head.flow.line for head, _ in heads if head.flow]
        asks = [Ask(h.request.ticket, self.options(h), f, self._terms[h.request.lane]) for h, f in heads]
        rooms = {name: self._room(name) for name in {option.name for ask in asks for option in ask.options}}
        answers = await self._capacity.take(asks)
        progress, whole, now = False, True, self._clock.time()
        for (head, followed), line, ask, answer in zip(heads, lines, asks, answers, strict=True):
            if answer.option is None:
                deep.pop(line, None)
                if answer.short or not ask.options:
                    line.refused(answer.short or self._reach.closed(turn_of(head).wants), now)
                continue
            whole = whole and not followed
            if not self._capacity.immediate:
                deep[line] = min(2 * deep.get(line, 1), MAX_DEPTH)
            progress = await self._hand_over(head, answer, answer.option, rooms) or progress
        return answers, progress, whole

    async def _hand_over(self, head: Waiter, answer: Answer, option: Option, rooms: dict[str, float]) -> bool:
        """Let it go with what it got, or give that back. False when others of its batch have filled the upstream.

        rooms: how many more may go to each, where its breaker lets some through.
        """
        wants, name = turn_of(head).wants, option.name
        crowded = rooms[name] <= 0 and self._reach.bound(wants, name)
        if head.gone or crowded or self._reach.strays(wants, name):
            await self.give_back(option)
        else:
            rooms[name] -= 1
            self._grant(head, answer)
        return not crowded

    def _heads(self, deep: dict[Line, int]) -> list[tuple[Waiter, bool]]:
        """Who may be asked for. Those are turned away for whom nothing is left that may be paid, nor anything free.

        Whom other upstreams answer well by now, or whom only what is owned can serve in time, stands in another line
        from now on.
        """
        while True:
            heads = self._lanes.heads(deep)
            if self._moved_on(heads):
                continue
            turns = (turn_of(head) for head, _ in heads) if self._budgeted else ()
            broke = [turn for turn in turns if not self._reach.affordable(turn.wants)]
            if not broke:
                return heads
            for turn in broke:
                turn_away(self._lanes, turn, Rejected(Reason.SPEND_BUDGET, BROKE))

    def _moved_on(self, heads: list[tuple[Waiter, bool]]) -> bool:
        moved = False
        for turn in (turn_of(head) for head, _ in heads):
            wants = self._reach.with_owned(turn.request, turn.wants)
            fitting = self._reach.fitting(wants)
            if fitting != turn.fitting or wants is not turn.wants:
                turn.wants, turn.fitting, moved = wants, fitting, True
                group = group_of(turn, first_only=turn.group.first_only and not wants.forced)
                regroup(self._lanes, turn, group, self._clock.time())
        return moved

    def _tell(self, newcomers: list[Turn], *, whole: bool) -> None:
        """Whoever was in line for a whole batch, and was not granted, knows now that it has to wait."""
        if whole:
            for turn in newcomers:
                turn.event.set()
        else:
            self._newcomers = newcomers + self._newcomers

    def _grant(self, head: Waiter, answer: Answer) -> None:
        assert answer.option is not None  # noqa: S101 - that is what makes it a grant
        turn = turn_of(head)
        self._lanes.serve(turn)
        self._vain = 0
        self.note(turn.request, answer.option, answer.shadowed)
        self._forecast.served.granted(answer.option.claims)
        turn.granted = answer.option
        turn.event.set()

    def _rest(self, answers: list[Answer]) -> None:
        """Nobody can go now: look again when somebody may; at an engine that is full at random, sooner or later.

        Lanes with a share have to ask often, and what is left to them may be free when they do not come.
        """
        now = self._clock.time()
        short = {key for answer in answers for key in answer.short}
        self._forecast.served.looked(short, now)
        seconds = min(self._renew_s, *(answer.retry_after for answer in answers))
        if any(key.endswith("/kv") for key in short):
            seconds = min(seconds, recheck_s(self._vain, self._chance()))
            self._vain += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._look_at = now + max(TICK_S, seconds)
        if isfinite(seconds):
            self._timer = asyncio.get_running_loop().call_at(self._look_at, self.kick)
