"""How long somebody will wait for a turn, whether that is any use, and what those are told for whom it is none.

A forecast is asked of what waits, of what flows back and of how long a lane is paused (core.forecast). Who cannot be
served in time, or finds no room, is refused with the time at which it would have had its turn, and has a place then
(core.promises): so a retry that comes when it was told goes before newcomers, and never waits twice.

Deliberately not here: waiting, whose turn it is, and taking anything (limiter).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf, isfinite

from extproc.core.forecast import Forecast
from extproc.core.lanes import Lanes
from extproc.core.lines import Backlog, Group, Waiter
from extproc.core.policy import Bounds, WhenBusy
from extproc.core.promises import LONG_S, Promises
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Request
from extproc.ports import Capacity, Clock
from extproc.reach import LEAST_RETRY_S, Reach
from extproc.turn import Turn, Wants, group_of

__all__ = ["Prospects"]


class Prospects:
    """See the head of this file. bounds: of all lanes together; others from a reload on."""

    def __init__(
        self,
        lanes: Lanes,
        promises: Promises,
        forecast: Forecast,
        reach: Reach,
        capacity: Capacity,
        clock: Clock,
        bounds: Bounds,
        *,
        patience: Callable[[Request], float],
        new_share: Callable[[str], float],
        numbers: Iterator[int],
    ) -> None:
        """Keep them; see Limiter for `patience` and `new_share`. numbers: the next of those that waiters come by."""
        self.bounds = bounds
        self._lanes = lanes
        self._promises = promises
        self._forecast = forecast
        self._reach = reach
        self._capacity = capacity
        self._clock = clock
        self._patience = patience
        self._new_share = new_share
        self._numbers = numbers

    def predicted_s(self, request: Request, wants: Wants) -> float:
        """Forecast in seconds of the wait of `request` if it came now; infinite when no breaker lets it through."""
        return self._predicted_s(Waiter(request, Group(), next(self._numbers)), wants)

    def until_turn_s(self, turn: Turn) -> float:
        """Forecast of its wait; with every breaker open, until the first may be tried."""
        if self._reach.open(turn.wants):
            return self._predicted_s(turn, turn.wants)
        return max(0.0, self._reach.earliest_probe(self._reach.affordable(turn.wants)) - self._clock.time())

    def would_be(self, turn: Turn) -> tuple[Reason | None, float]:
        """For what reason it would be refused, None when it would wait, and the forecast."""
        if turn.verdict is not None:
            return turn.verdict.reason, 0.0
        predicted = self.until_turn_s(turn)
        reason = self.hopeless(turn, predicted)
        if reason is None and self.shed(turn, predicted) is turn:
            reason = Reason.LANE_FULL
        return reason, predicted

    def spend_patience(self, turn: Turn, predicted: float) -> None:
        """A retry that nobody told to come now, and that has to wait, is paid from its tenant's budget of retries."""
        request = turn.request
        told = turn.promise is not None and turn.promise.kept_at(self._clock.time())
        if request.retries and not told and (again := self._patience(request)):
            again = max(again, LEAST_RETRY_S, predicted if isfinite(predicted) else 0.0)
            raise Rejected(Reason.LANE_FULL, "the retry budget of this tenant is spent", retry_after=again)

    def hopeless(self, turn: Turn, predicted: float) -> Reason | None:
        """Why it is no use to wait. A new session has only a part of the patience, unless its place is inherited."""
        request = turn.request
        left = request.wait_until - self._clock.time()
        if predicted > left and not self._reach.open(turn.wants):
            return Reason.NO_UPSTREAM
        if request.fresh and turn.since >= request.arrived:
            left *= self._new_share(request.tenant)
        return Reason.DEADLINE_UNMEETABLE if predicted > left else None

    def shed(self, turn: Turn, predicted: float) -> Waiter | None:
        """Who has to make room now that it stands in line; None when there is room for all."""
        promised = self._promised(turn, predicted)
        return self._lanes.shed(turn, self.bounds, self._new_share(turn.request.tenant), promised)

    def waited_too_long(self, turn: Turn) -> Rejected:
        """What it is told when it has waited its max."""
        request = turn.request
        if not self._reach.open(turn.wants):
            return self.refusal(turn, Reason.NO_UPSTREAM)
        lane_waits_s = self._lanes.rules[request.lane].max_wait_s
        if request.deadline is not None and request.wait_until < request.arrived + lane_waits_s:
            return Rejected(Reason.DEADLINE_PASSED)
        return self.refusal(turn, Reason.QUEUE_TIMEOUT)

    def refusal(self, turn: Turn, reason: Reason, predicted: float | None = None) -> Rejected:
        """With the time of its turn, and a place then; with every breaker open, the time when one is tried."""
        request, promise, now = turn.request, turn.promise, self._clock.time()
        predicted = self._predicted_s(turn, turn.wants) if predicted is None else predicted
        if not isfinite(predicted):
            names = self._reach.affordable(turn.wants)
            if any(name in self._reach.out for name in names):
                return Rejected(reason, retry_after=self._reach.back_s(names))
            return Rejected(reason, retry_after=max(LEAST_RETRY_S, self._reach.earliest_probe(names) - now))
        if promise is not None and promise.due > now:
            since, seconds, turn_s = promise.since, promise.due - now, promise.second - now
        else:
            room = self._lanes.room(request.lane, self._promised(turn, predicted))
            since, turn_s = turn.since, predicted
            seconds = self._forecast.comeback_s(request, predicted, room)
        seconds = max(LEAST_RETRY_S, seconds)
        late_s = now + turn_s - since - self._reach.paused_s(turn.wants) - self._held_s(request.lane)
        if late_s > self._lanes.rules[request.lane].max_wait_s and self._overrun(turn):
            seconds = max(seconds, LONG_S + LEAST_RETRY_S)
        elif request.fingerprint:
            holds = self._lanes.rules[request.lane].when_busy is WhenBusy.HOLD
            self._promises.make(request, group_of(turn, first_only=holds), since, now, seconds, turn_s)
        return Rejected(reason, retry_after=seconds)

    def passes_first(self, turn: Turn, after_s: float) -> bool:
        """Whether not to wait for the first choice: it would take too long, or the upstream asked for a pause."""
        first, prices = self._reach.open(turn.wants)[:1], turn.wants.prices
        if not first:
            return False
        levels, now = self._capacity.levels(), self._clock.time()
        paused = self._reach.pause_at(first[0], turn.wants) > 0
        return paused or self._forecast.wait_s(turn, first, prices, levels, now) > after_s

    def in_view(self, request: Request, wants: Wants) -> list[str]:
        """Those of its upstreams that may be asked now and that it waits for."""
        names = self._reach.open(wants)
        return names[:1] if self._lanes.rules[request.lane].when_busy is WhenBusy.HOLD else names

    def _held_s(self, lane: str) -> float:
        """Seconds for which a lane is paused, as far as its end is known; 0 where it is not, or not paused."""
        until = self._lanes.paused.get(lane, -inf)
        return max(0.0, until - self._clock.time()) if isfinite(until) else 0.0

    def _predicted_s(self, waiter: Waiter, wants: Wants) -> float:
        names, held_s = self.in_view(waiter.request, wants), self._held_s(waiter.request.lane)
        levels, now = self._capacity.levels(), self._clock.time()
        return held_s + self._forecast.wait_s(waiter, names, wants.prices, levels, now, held_s)

    def _promised(self, turn: Turn, within_s: float) -> Backlog:
        """What will come back to this lane within so many seconds, all of it before a newcomer."""
        total, now = Backlog(), self._clock.time()
        for book, kept in self._promises.booked(turn.request.lane, now) if len(self._promises) else ():
            total.merge(book.before(now + within_s), kept)
        return total

    def _overrun(self, turn: Turn) -> bool:
        """Whether a late turn for one would only make others late.

        Under lasting overload all would be served at last, and every one of them too late.
        """
        names, levels, now = self.in_view(turn.request, turn.wants), self._capacity.levels(), self._clock.time()
        return self._forecast.overrun(turn.request, names, turn.wants.prices, levels, now)
