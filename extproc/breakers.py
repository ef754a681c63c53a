"""The breakers of all upstreams, and who is told when one moves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from math import inf

from extproc.core.breaker import Breaker, Outcome, Signal, State
from extproc.core.events import BreakerMoved
from extproc.core.policy import Upstream
from extproc.ports import Clock, Observer

__all__ = ["Breakers"]


class Breakers:
    """One breaker per upstream. `moved` is called after every transition, so that waiters can be looked at again."""

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
        self._clock = clock
        self._observe = observer
        self._chance = chance

    def allows(self, upstream: str) -> bool:
        """Whether users' requests may go there."""
        return self.by_name[upstream].allows

    def earliest_probe(self, upstreams: tuple[str, ...]) -> float:
        """When the first of these may be tried, on the clock; past while one is tried, infinite when all are closed."""
        return min((self.by_name[name].rests_until for name in upstreams), default=inf)

    def record(self, upstream: str, outcome: Outcome, *, began: float, cause: str) -> None:
        """One attempt that began at `began` ended so. Unknown upstreams are ignored."""
        breaker = self.by_name.get(upstream)
        if breaker is None:
            return
        before = breaker.state
        if breaker.record(outcome, began=began, now=self._clock.time(), chance=self._chance()):
            self._announce(upstream, before, cause)

    def due(self) -> list[str]:
        """Upstreams that have rested and want a probe."""
        now = self._clock.time()
        return [name for name, breaker in self.by_name.items() if breaker.due(now)]

    def signal(self, upstream: str, signal: Signal, cause: str) -> None:
        """Move one breaker by its table. KeyError when the table has no such entry."""
        breaker = self.by_name[upstream]
        before = breaker.state
        breaker.move(signal, now=self._clock.time(), chance=self._chance())
        self._announce(upstream, before, cause)

    def _announce(self, upstream: str, before: State, cause: str) -> None:
        self._observe(BreakerMoved(upstream, before, self.by_name[upstream].state, cause))
        self.moved()
