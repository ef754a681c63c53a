"""How full an engine may be: tokens in its KV cache, watched through its metrics.

Two things are known. What the engine said last, which is late and tells of everybody's requests; and what was let go
from here, which is exact and tells of nobody else's. A lane's way is open while the fuller of the two, with the request
that asks, stays below the lane's high mark; once the high mark is reached it opens again at the low one.

    measured   usage of the fullest instance, plus what was admitted since the metrics were asked for
    booked     tokens (prompt and expected output) of everything held from here, over all instances' caches

How an engine's instances share what is admitted is not known. However they balance, as long as none gets more while
another has less, the fullest has at most the mean plus one request, so that is what is assumed.

Requests in the engine's own queue count like usage: `waiting` of them are a full one. Where nobody knows how large the
cache is, a few requests may go per reading. Preemptions mean that a mark was too high: until the next reading only the
best lane goes. Without a reading that is fresh enough a trickle goes, so many per second and no more of them at once
than there were when the engine was last heard of. A pool that runs nothing takes one request, whatever its size.

Deliberately not here: reading metrics, and how the pool chooses an instance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor, inf

from extproc.core import shares
from extproc.core.policy import KvRules
from extproc.core.shares import EPSILON, LAPSE_S, PLAIN, Standing, Terms
from extproc.core.value import value

__all__ = ["Reading", "Watermark", "recheck_s"]

FEW = 4
"""Requests per reading and instance where the size of the cache is unknown; and held without a reading, at least."""
LAG_S = 0.1
"""What was admitted this shortly before the metrics were asked for may not have reached the cache yet."""


@value
class Reading:
    """The metrics of one pool of engine instances at one moment, the fullest instance counting.

    usage: used share of the KV cache, 0..1. waiting, running: requests in the fullest instance's queue, and running in
    all. tokens: KV cache of one instance in tokens, None when not told. instances: how many answered. preemptions:
    since the reading before. age_s: how long ago the metrics were asked for.
    """

    usage: float
    waiting: float = 0.0
    running: float = 0.0
    tokens: float | None = None
    instances: int = 1
    preemptions: float = 0.0
    age_s: float = 0.0


def recheck_s(n: int, chance: float) -> float:
    """Seconds until the `n`-th look (from 0) of somebody who waits for an engine; `chance` in [0, 1): full jitter."""
    return chance * min(0.5, 0.05 * 1.5 ** min(n, 10))


@dataclass(slots=True)
class Watermark:
    """`booked` tokens of `held` requests. reading: the last one, asked for at time `asked` (any monotonic clock).

    cache, instances: tokens that one instance's cache holds, 0 when nobody knows, and how many instances there are.
    recent: time and tokens of admissions that the reading may not show; since, largest: their sum and the largest of
    them. held_then: requests held when the reading came. trickle_at: when the next may go without a reading. shut: the
    marks that were reached. shadow: it never refuses. closed_until: nothing is taken before. lanes: what waiting lanes
    are owed, in tokens. seen: by rank, when a lane of it last asked.
    """

    rules: KvRules
    booked: float = 0.0
    held: int = 0
    shadow: bool = False
    closed_until: float = -inf
    retired: bool = False
    reading: Reading = Reading(0.0)  # noqa: RUF009 - a value
    asked: float = -inf
    cache: float = 0.0
    instances: int = 1
    held_then: int = 0
    since: float = 0.0
    largest: float = 0.0
    trickle_at: float = -inf
    recent: list[tuple[float, float]] = field(default_factory=list)
    shut: set[tuple[float, float]] = field(default_factory=set)
    lanes: dict[str, Standing] = field(default_factory=dict, compare=False)
    seen: dict[int, float] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """The rules may say that it only counts, and how large the cache is."""
        self.shadow = self.shadow or self.rules.shadow
        self.cache = self.cache or float(self.rules.tokens or 0.0)

    def wait_for(self, amount: float, now: float, terms: Terms = PLAIN) -> float:
        """0 when `amount` tokens may go; else until a trickle may, at the latest. Releases and readings come sooner."""
        wait = self._wait(amount, now, terms)
        return wait if self.closed_until <= now else max(wait, self.closed_until - now)

    def due_in(self, amount: float, now: float, terms: Terms) -> float:
        """As `wait_for` when the lane is due, whatever others want; infinite when it is not."""
        return self.wait_for(amount, now, terms) if shares.is_due(self.lanes, terms.lane, amount, now) else inf

    def free_at(self, now: float, terms: Terms = PLAIN) -> float:
        """Tokens that may go now on these terms, pauses apart; negative when the mark is passed.

        Where the size of the cache is unknown: infinite when one more may go, else 0.
        """
        if not self.cache:
            return inf if self._wait(0.0, now, terms) <= 0 else 0.0
        marks = self._marks(terms.lane)
        free = (marks[0] - self._kept(terms, now) - self.fill(now)) * self.cache * self.instances
        free -= self._left(terms, now)
        return min(free, 0.0) if marks in self.shut and self.fresh(now) else free

    def fresh(self, now: float) -> bool:
        """Whether the last reading still says something."""
        return now - self.asked < self.rules.stale_s

    def fill(self, now: float) -> float:
        """Used share of the fullest instance's cache, as far as it is known at `now`."""
        return self._seen() if self.fresh(now) else self._booked()

    def saturation(self, now: float, lane: str = "") -> float | None:
        """How near the lane's high mark is: 1 and above is shut. None without a fresh reading."""
        if not self.fresh(now):
            return None
        return max(self._seen() / self._marks(lane)[0], self._queue())

    def owed(self, now: float) -> dict[str, float]:
        """Tokens that lanes which wait are owed."""
        return shares.owed(self.lanes, now)

    def take(self, amount: float, now: float, terms: Terms = PLAIN) -> None:
        """Hold `amount` tokens, whether there is room or not."""
        self._hold(amount, now)
        if terms.lane:
            self.seen[terms.rank] = now
        if self.lanes:
            shares.charge(self.lanes, terms.lane, amount, now)

    def change(self, amount: float, now: float) -> None:
        """Release `amount`, all that one request held, or hold it when negative. What nobody held is not released."""
        if amount <= 0:
            self._hold(-amount, now)
        else:
            self.held = max(0, self.held - 1)
            self.booked = max(0.0, self.booked - amount) if self.held else 0.0
            self._mark()

    def observe(self, reading: Reading | None, now: float) -> None:
        """Follow the engine's metrics. Older ones than those known are passed over, and so is that there are none."""
        if reading is None or now - reading.age_s < self.asked:
            return
        self.reading, self.asked, self.held_then = reading, now - reading.age_s, self.held
        self.cache = float(self.rules.tokens or reading.tokens or 0.0)
        self.instances = max(1, reading.instances)
        self._recount(self.asked - LAG_S)
        self._mark()

    def adopt(self, other: Watermark) -> None:
        """Go by the rules of another. What is held, and what the engine said last, stays."""
        self.rules, self.shadow = other.rules, other.shadow
        self.cache = float(self.rules.tokens or self.reading.tokens or 0.0)
        self.shut.intersection_update(self._all_marks())
        self._mark()

    def refused(self, amount: float, now: float, terms: Terms, *, short: bool) -> None:
        """The first waiter of a lane was refused `amount`; `short` when for want of cache."""
        self.seen[terms.rank] = now
        if terms.share > 0:
            shares.register(self.lanes, terms, amount, now, short=short)

    def closes(self, amount: float, now: float, terms: Terms) -> bool:  # noqa: ARG002 - one shape for all
        """Who did not fit closes it to those behind."""
        return True

    def _wait(self, amount: float, now: float, terms: Terms) -> float:
        due, left = False, 0.0
        if self.lanes:
            due = shares.is_due(self.lanes, terms.lane, amount, now)
            left = 0.0 if due else self._left(terms, now)
        fresh_s = self.asked + self.rules.stale_s - now
        if fresh_s <= 0:
            return self._trickle_s(amount, left, now)
        kept = 0.0 if due else self._kept(terms, now)
        return 0.0 if self._open(amount, left, kept, terms, due=due) else min(fresh_s, LAPSE_S)

    def _open(self, amount: float, left: float, kept: float, terms: Terms, *, due: bool) -> bool:
        """Whether the reading lets `amount` go, when `left` tokens and a share `kept` are to be left to others."""
        if not self.held and self.reading.running <= 0 and not left:
            return True
        if self.reading.preemptions > 0 and terms.rank > 0:
            return False
        marks = max(self._all_marks()) if due else self._marks(terms.lane)
        if marks in self.shut:
            return False
        if not self.cache:
            few = FEW * self.instances
            return len(self.recent) + (left > 0) < few - floor(kept * few)
        most = (marks[1] - kept) * self.cache  # one that alone is more goes when there is next to nothing else
        return self._seen(min(amount, most) + min(left, most)) + kept <= marks[0] + EPSILON / self.cache

    def _left(self, terms: Terms, now: float) -> float:
        """Tokens to leave to others that are due; none while preemptions keep those from going."""
        return 0.0 if self.reading.preemptions > 0 else shares.held_back(self.lanes, terms.lane, now)

    def _kept(self, terms: Terms, now: float) -> float:
        """Share of the cache that stays free for better lanes; own marks of a lane say that already."""
        if not terms.keep_free or terms.lane in self.rules.lanes:
            return 0.0
        return terms.keep_free * self.rules.low if shares.better_seen(self.seen, terms.rank, now) else 0.0

    def _trickle_s(self, amount: float, left: float, now: float) -> float:
        """Seconds until `amount` may go without a reading; infinite when something has to be released first."""
        if self.held >= max(FEW * self.instances, self.held_then):
            return inf
        if self.held and self._booked(amount) > max(self._all_marks())[0]:
            return inf
        return max(self.trickle_at - now, self._gap_s() if left else 0.0, 0.0)

    def _hold(self, amount: float, now: float) -> None:
        if amount <= 0:
            return
        if not self.fresh(now):
            self.trickle_at = now + self._gap_s()
            self._recount(now - self.rules.stale_s)
        self.held += 1
        self.booked += amount
        self.recent.append((now, amount))
        self.since += amount
        self.largest = max(self.largest, amount)
        self._mark()

    def _recount(self, after: float) -> None:
        self.recent = [(at, tokens) for at, tokens in self.recent if at > after]
        self.since = sum(tokens for _, tokens in self.recent)
        self.largest = max((tokens for _, tokens in self.recent), default=0.0)

    def _mark(self) -> None:
        """Shut at the high mark, open again at the low one."""
        fill, queue = self._seen(), self._queue()
        for high, low in self._all_marks():
            if fill >= high or queue >= 1.0:
                self.shut.add((high, low))
            elif fill <= low and queue <= low / high:
                self.shut.discard((high, low))

    def _seen(self, amount: float = 0.0) -> float:
        """Fill by the reading and by what is held from here, were `amount` tokens more admitted."""
        if not self.cache:
            return self.reading.usage
        landed = self.since + amount
        if self.instances > 1:
            landed = min(landed, landed / self.instances + max(self.largest, amount))
        return max(self.reading.usage + landed / self.cache, self._booked(amount))

    def _booked(self, amount: float = 0.0) -> float:
        """Fill by what is held from here alone, 0 when nobody knows."""
        return (self.booked + amount) / (self.cache * self.instances) if self.cache else 0.0

    def _queue(self) -> float:
        return self.reading.waiting / max(1, self.rules.waiting)

    def _gap_s(self) -> float:
        """Seconds between two that go without a reading."""
        return 1.0 / self.rules.trickle_rps if self.rules.trickle_rps > 0 else inf

    def _marks(self, lane: str) -> tuple[float, float]:
        return self.rules.lanes.get(lane) or (self.rules.high, self.rules.low)

    def _all_marks(self) -> list[tuple[float, float]]:
        return [(self.rules.high, self.rules.low), *self.rules.lanes.values()]
