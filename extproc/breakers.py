"""The breakers of all upstreams, and who is told when one moves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from math import inf, isfinite
from typing import Any

from extproc import shapes
from extproc.core.breaker import NOTHING, Breaker, Evidence, Outcome, Sign, Signal, State, Verdict
from extproc.core.events import BreakerMoved, SizesMoved
from extproc.core.policy import Upstream
from extproc.core.request import Endpoint
from extproc.ports import Clock, Observer

__all__ = ["Breakers"]

LATE = "first tokens are late"


class Breakers:
    """One breaker per upstream. Call `tick` about four times a second.

    moved: called after every transition, and while a window grows, so that waiters can be looked at again. flying: how
    many requests run at an upstream. out: by name, upstreams that an operator has taken out, and until when on the
    clock (infinite where that is not known): nobody is sent there. served: by upstream and endpoint, the model of the
    last answer that was one; the endpoint of the newest comes last.
    """

    def __init__(
        self,
        upstreams: Iterable[Upstream],
        clock: Clock,
        observer: Observer,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """All closed."""
        self.by_name = {upstream.name: Breaker(upstream.breaker) for upstream in upstreams}
        self.moved: Callable[[], None] = lambda: None
        self.flying: Callable[[str], float] = lambda _: 0.0
        self.out: dict[str, float] = {}
        self.served: dict[str, dict[Endpoint, str]] = {}
        self._before: dict[str, float] = {}
        self._clock = clock
        self._observe = observer
        self._chance = chance

    def follow(self, upstreams: Iterable[Upstream]) -> None:
        """Go by other rules from now on; what is known of an upstream stays."""
        for upstream in upstreams:
            self.by_name[upstream.name].follow(upstream.breaker)
        self.moved()

    def allows(self, upstream: str) -> bool:
        """Whether users' requests may go there; while traffic returns, whether one more may."""
        if self.out and upstream in self.out:
            return False
        breaker = self.by_name[upstream]
        if breaker.state is not State.RAMPING:
            return breaker.state is State.CLOSED
        return breaker.allows(self._returned(upstream), self._clock.time())

    def standing(self, upstream: str) -> str:
        """In which state an upstream's breaker is, or "out" where an operator has taken it out."""
        return "out" if upstream in self.out else self.by_name[upstream].state

    def slow(self, upstream: str) -> bool:
        """Whether users are kept away from there, or return by and by, merely because first tokens are late."""
        return self.by_name[upstream].merely_slow and upstream not in self.out

    def take_out(self, upstream: str, until: float) -> None:
        """Send nobody there any more, not even a probe, until then on the clock (infinite: until it is put back)."""
        self.out[upstream] = until
        self.moved()

    def put_back(self, upstream: str) -> None:
        """It goes by its breaker again, which has done what time asked for, but for probes."""
        if self.out.pop(upstream, None) is not None:
            self.moved()

    def room(self, upstream: str) -> float:
        """How many more may go there while traffic returns; elsewhere any number."""
        breaker = self.by_name[upstream]
        if breaker.state is not State.RAMPING:
            return inf
        return breaker.window(self._clock.time()) - self._returned(upstream)

    def fits(self, upstream: str, prompt: int) -> bool:
        """Whether prompts of so many tokens are not kept away from there."""
        return self.by_name[upstream].sizes.fits(prompt)

    def usual_first_s(self, upstream: str, model: str, prompt: int) -> float:
        """The 95th percentile of first tokens there, in seconds; infinite where that is not known."""
        breaker = self.by_name.get(upstream)
        return inf if breaker is None or breaker.tempo is None else breaker.tempo.baseline(model, prompt).p95_s

    def earliest_probe(self, upstreams: tuple[str, ...]) -> float:
        """When the first of these may be tried, on the clock; infinite when all are closed, or out for good.

        It is past while one is tried, or takes traffic back by and by.
        """
        return min(map(self.rests_until, upstreams), default=inf)

    def rest_s(self, upstreams: tuple[str, ...]) -> float:
        """Seconds until the first of these may be tried: what is left of its rest, or all of it if it opened now."""
        now = self._clock.time()
        return min([self.by_name[name].rest_s(now) for name in upstreams])

    def record(
        self, upstream: str, outcome: Outcome, *, began: float, cause: str, evidence: Evidence | None = None
    ) -> None:
        """One attempt that began at `began` ended so. Unknown upstreams are ignored."""
        breaker = self.by_name.get(upstream)
        if breaker is None:
            return
        evidence, now, chance = evidence or NOTHING, self._clock.time(), self._chance()
        if evidence.malformed or outcome is Outcome.SUCCESS:
            self._note_size(upstream, evidence, cause, began=began, now=now, chance=chance)
        if outcome is Outcome.SUCCESS and evidence.model:
            answered = self.served.setdefault(upstream, {})
            answered.pop(evidence.endpoint, None)
            answered[evidence.endpoint] = evidence.model
        before, window = breaker.state, breaker.grown
        if breaker.record(outcome, began=began, now=now, chance=chance, evidence=evidence):
            slow = breaker.verdict.sign is Sign.SLOW
            self._announce(upstream, before, LATE if slow else cause, breaker.verdict)
        elif breaker.grown > window:
            self.moved()

    def ended(self, upstream: str, came: float) -> None:
        """A request that came there then does not run there any more. Unknown upstreams are ignored."""
        if upstream in self._before and came < self.by_name[upstream].since:
            self._before[upstream] = max(0.0, self._before[upstream] - 1.0)

    def due(self) -> list[str]:
        """Upstreams that have rested and want a probe."""
        now = self._clock.time()
        return [name for name, breaker in self.by_name.items() if breaker.due(now) and name not in self.out]

    def signal(self, upstream: str, signal: Signal, cause: str, *, grave: Sign | None = None) -> None:
        """Move one breaker by its table. KeyError when the table has no such entry.

        grave: where it is our credit or our key; then it rests long.
        """
        breaker = self.by_name[upstream]
        before, shut = breaker.state, breaker.sizes.shut
        breaker.move(signal, now=self._clock.time(), chance=self._chance(), grave=grave is not None)
        verdict = Verdict(grave)
        if grave is not None:
            breaker.verdict = verdict
        for sizes in shut if signal is Signal.RESET else ():
            self._observe(SizesMoved(upstream, sizes, shut=False, cause=cause))
        self._announce(upstream, before, cause, verdict)

    def trip(self, upstream: str, cause: str) -> None:
        """Open one by hand; of one that is open the rest begins anew, and grows no longer for it."""
        breaker = self.by_name[upstream]
        if breaker.state is State.OPEN:
            breaker.rest_anew(self._clock.time(), self._chance())
        else:
            self.signal(upstream, Signal.TRIP, cause)

    def reset(self, upstream: str, cause: str) -> None:
        """Close one by hand, and forget what was counted."""
        self.signal(upstream, Signal.RESET, cause)

    def tick(self) -> None:
        """Do what time asks for: windows grow, and what has rested or returned is told."""
        now = self._clock.time()
        for name, breaker in self.by_name.items():
            if breaker.state is State.RAMPING:
                if breaker.ramped(self._returned(name), now):
                    self.signal(name, Signal.RAMPED, "traffic has returned")
                else:
                    self.moved()
            for sizes in breaker.sizes.rested(now):
                self._observe(SizesMoved(name, sizes, shut=False, cause="rested"))
                self.moved()

    def state(self) -> dict[str, shapes.Breaker]:
        """All breakers as plain data, for the state page. Times in seconds from now."""
        now, told = self._clock.time(), {}
        for name, breaker in self.by_name.items():
            one: Any = {"state": breaker.state, **breaker.numbers(now)}
            if breaker.state is State.OPEN:
                one["rests_s"] = round(max(0.0, breaker.rests_until - now), 3)
            if breaker.state is not State.CLOSED and breaker.verdict.sign is not None:
                one["sign"] = breaker.verdict.sign
            if shut := breaker.sizes.shut:
                one["sizes_kept_away"] = shut
            told[name] = one
        return told

    def rests_until(self, upstream: str) -> float:
        """When it may be tried, on the clock; infinite while it is closed, or out for good."""
        breaker, out = self.by_name[upstream], self.out.get(upstream)
        if out is None:
            return breaker.rests_until
        return out if breaker.state is State.CLOSED else max(out, breaker.rests_until)

    def _note_size(
        self, upstream: str, evidence: Evidence, cause: str, *, began: float, now: float, chance: float
    ) -> None:
        sizes = self.by_name[upstream].sizes
        shut = sizes.record(evidence, began=began, now=now, chance=chance)
        if shut:
            told = sizes.verdict
            self._observe(
                SizesMoved(upstream, shut, shut=True, cause=cause, numbers=told.numbers, requests=told.requests)
            )
            self.moved()

    def _returned(self, upstream: str) -> float:
        """How many run there beyond what ran when traffic began to return, as far as that has not ended.

        Not all of those need be known here: there are never more of them than run at all.
        """
        running = self.flying(upstream)
        before = self._before[upstream] = min(self._before.get(upstream, 0.0), running)
        return running - before

    def _announce(self, upstream: str, before: State, cause: str, verdict: Verdict) -> None:
        breaker, numbers = self.by_name[upstream], dict(verdict.numbers)
        if breaker.state is State.RAMPING:
            self._before[upstream] = self.flying(upstream)
        if breaker.state is State.OPEN and isfinite(breaker.rests_until):
            numbers["rest_s"] = round(breaker.rests_until - self._clock.time(), 3)
        sign = verdict.sign or ""
        self._observe(BreakerMoved(upstream, before, breaker.state, cause, sign, numbers, verdict.requests))
        self.moved()
