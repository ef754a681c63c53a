"""A provider with a limit of its own, others who use the same account, and us in front of it, in simulated time.

What we know of the provider is what it says: headers of the moment an answer's first byte is sent, heard when the
answer has ended and its record arrived, or after every five seconds of it; or a refusal, heard at once.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf

from extproc.core.bucket import TokenBucket
from extproc.core.capacity import tune
from extproc.core.pacing import Move, Pacer, Reported, Reset, Rules, shortage_s

KEY = "upstream/a/m/total"


@dataclass
class World:
    """Everything, with what came of it. Rates in tokens per second; `limit` per minute is what the provider allows.

    others: tokens per second that others ask for. upfront: charges estimates when a request arrives, else real output
    while it is written. told: whether answers carry headers; retry: whether refusals say how long to wait.
    """

    seed: int
    limit: float = 60_000.0
    configured: float | None = 60_000.0
    burst_s: float = 30.0
    others: float = 0.0
    upfront: bool = True
    told: bool = True
    retry: bool = True
    error: float = 0.05
    longest_s: float = 8.0
    mean: int = 600
    demand: float = 2.0

    now: float = 1000.0
    used: float = 0.0
    others_used: float = 0.0
    refused: list[float] = field(default_factory=list)
    replies: int = 0
    moves: list[tuple[float, Move]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.level, self.level_at = self.limit / 60 * self.burst_s, self.now
        rate = inf if self.configured is None else self.configured / 60 * 0.95
        self.pacer = Pacer(KEY, Rules(rate, rate * 10.0 if rate < inf else inf))
        self.store = {} if self.configured is None else {KEY: TokenBucket(rate, rate * 10.0, 0.0, self.now)}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._seq = count()
        self._queue: list[tuple[int, int]] = []
        self._flying = 0

    # The world.

    def run(self, seconds: float, tick_s: float = 1.0) -> None:
        end = self.now + seconds
        if not self._events:
            self._at(self.now, self._arrive)
            self._at(self.now, self._other)
        self._at(self.now + tick_s, lambda: self._tick(tick_s))
        while self._events and self._events[0][0] <= end:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = end

    def fresh(self) -> None:
        """Count anew from here."""
        self.used = self.others_used = 0.0
        self.refused.clear()
        self.began = self.now
        self.had = self.provider_level()

    def share_used(self) -> float:
        """Of what the provider had for us since `fresh`, the part we used."""
        there = self.had + self.limit / 60 * (self.now - self.began) - self.others_used
        return self.used / min(there, self.limit / 60 * (self.now - self.began) - self.others_used)

    def provider_level(self) -> float:
        cap = self.limit / 60 * self.burst_s
        self.level = min(cap, self.level + self.limit / 60 * (self.now - self.level_at))
        self.level_at = self.now
        return self.level

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._seq), act))

    def _tick(self, tick_s: float) -> None:
        self._apply(self.pacer.due(self.now))
        self._at(self.now + tick_s, lambda: self._tick(tick_s))

    # Others.

    def _other(self) -> None:
        if self.others:
            size = self.rng.randint(100, 1000)
            if self.provider_level() >= size:
                self.level -= size
                self.others_used += size
            self._at(self.now + self.rng.expovariate(self.others / 550), self._other)

    # We.

    def _arrive(self) -> None:
        size = self.rng.randint(self.mean // 3, self.mean * 5 // 3)
        self._queue.append((size // 2, size - size // 2))
        self._send()
        self._at(self.now + self.rng.expovariate(self.demand * self.limit / 60 / self.mean), self._arrive)

    def _send(self) -> None:
        """All that may go; beyond a queue of a hundred callers give up."""
        del self._queue[100:]
        bucket = self.store.get(KEY)
        while self._queue:
            first, later = self._queue[0]
            if bucket is None:
                if self._flying >= 4:
                    return
            elif wait := bucket.wait_for(first + later, self.now):
                self._at(self.now + wait + 0.001, self._send)
                return
            else:
                bucket.take(first + later, self.now)
            self._queue.pop(0)
            self._depart(first, later)

    def _depart(self, first: int, later: int) -> None:
        self._flying += 1
        if self.upfront:
            self.pacer.sent(first + later, 0.0, self.now)
        else:
            self.pacer.sent(first, later, self.now)
        departed = self.now
        self._at(self.now + self.rng.uniform(0.005, 0.04), lambda: self._reached(first, later, departed))

    def _reached(self, first: int, later: int, departed: float) -> None:
        err = 1.0 + self.rng.uniform(-self.error, self.error)
        need = (first + later) * err if self.upfront else first * err
        if self.provider_level() < need:
            self.refused.append(self.now)
            seen = self._seen()
            wait = shortage_s(Reported("tokens", self.limit, self.level, None), need)
            self._at(self.now + 0.03, lambda: self._refused(first, later, departed, seen, wait))
            return
        self.level -= need
        self.used += need
        ttft = self.rng.uniform(0.05, 1.0)
        lasts = self.rng.uniform(0.2, self.longest_s)
        written = later * self.rng.uniform(0.3, 1.0)

        def head() -> None:
            seen, told_at = self._seen(), self.now
            if not self.upfront:
                self._write(written, lasts)
            for seconds in range(5, int(lasts) + 1, 5):
                self._at(self.now + seconds, lambda: self._told(seen, departed, told_at))
            self._at(
                self.now + lasts + self.rng.uniform(0.01, 0.04),
                lambda: self._ended(later, written, departed, seen, told_at),
            )

        self._at(self.now + ttft, head)

    def _write(self, written: float, lasts: float) -> None:
        def some() -> None:
            self.provider_level()
            self.level -= written / 4
            self.used += written / 4

        for i in range(4):
            self._at(self.now + lasts * (i + 0.5) / 4, some)

    def _seen(self) -> Reported:
        return Reported("tokens", self.limit, max(0.0, float(int(self.provider_level()))), None, 60.0, Reset.FULL)

    def _ended(self, later: int, written: float, departed: float, seen: Reported, told_at: float) -> None:
        self._flying -= 1
        self.replies += 1
        bucket = self.store.get(KEY)
        if not self.upfront:
            self.pacer.over(later, written, self.now)
            if bucket is not None:
                bucket.change(later - written, self.now)
        self._told(seen, departed, told_at)
        self._apply(self.pacer.served(departed, self.now))
        self._send()

    def _told(self, seen: Reported, departed: float, told_at: float) -> None:
        """Records are late, so that the first byte seems to have come a little later than it did."""
        if self.told:
            bucket = self.store.get(KEY)
            level = None if bucket is None else bucket.level_at(self.now)
            self._apply(self.pacer.told(seen, departed, told_at + 0.02, level, self.now))

    def _refused(self, first: int, later: int, departed: float, seen: Reported, wait: float | None) -> None:
        self._flying -= 1
        bucket = self.store.get(KEY)
        if bucket is not None:
            bucket.change(first + later, self.now)
        self.pacer.over(0.0 if self.upfront else later, 0.0, self.now)
        self.pacer.turned_away(first + later if self.upfront else first, departed, self.now)
        self._told(seen, departed, self.now - 0.03)
        chance = self.rng.random()
        self._apply(
            self.pacer.refused(
                departed, self.now, wait if self.retry else None, explained=self.told, chance=chance, cause="429"
            )
        )
        self._queue.insert(0, (first, later))
        self._send()

    def _apply(self, moves: list[Move]) -> None:
        self.moves += [(self.now, move) for move in moves]
        tune(self.store, [move.tuning for move in moves], self.now)
        if moves:
            self._send()
