"""Capacity that is counted: a token bucket for what flows, slots for what is held.

A bucket holds `level` units (LLM tokens or requests), refills at `rate` units per second up to `capacity`, and may go
into debt: usage that turned out larger than its estimate is charged all the same, and nothing is taken while in debt.
Over any window of w seconds at most `capacity + rate * w` units are taken, plus what was given back in that window.

A request larger than the bucket takes a full bucket into debt, otherwise it could never go; by what it is larger, the
window may be passed once. Units stay floats; a thousandth of a token is never worth a wait, so comparisons allow
`EPSILON`.

A lane with a guaranteed share that waits at a bucket is owed units as they flow in (see shares): its set-aside. Others
see the level without it. A set-aside is a claim on what comes in, not a purse of its own: the level has to hold what is
taken from it, and where others put the bucket into debt it outlasts the debt. While nobody is due, a full bucket serves
whoever comes, so that nothing overflows; what this takes from set-asides is made good by the next that flows in. A lane
is due when it is owed what its first waiter needs, and then comes before everybody who has no set-aside to draw on.

A smooth lane takes its next request when the former one's amount has flowed in, or the bucket is full again because
much was given back.

At slots a waiting lane is owed its share of every grant, and when it is due all others leave it one place.

Deliberately not here: who is asked first (lanes), and which counters belong together (capacity).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf, isinf

from extproc.core import shares
from extproc.core.shares import EPSILON, LAPSE_S, PLAIN, Standing, Terms

__all__ = ["EPSILON", "Slots", "TokenBucket"]


@dataclass(slots=True)
class TokenBucket:
    """`level` units as it was at time `at` (seconds, any monotonic clock); `rate` in units per second.

    shadow: it never refuses, and its debt stops at a bucket's worth. reserve: share of the capacity that only the best
    lane takes. closed_until: nothing is taken before. lanes: what waiting lanes are owed, as of `at`. paced: units that
    smooth lanes have to let flow in, as of `at`.
    """

    rate: float
    capacity: float
    level: float
    at: float
    shadow: bool = False
    reserve: float = 0.0
    closed_until: float = -inf
    retired: bool = False
    lanes: dict[str, Standing] = field(default_factory=dict, compare=False)
    paced: dict[str, float] = field(default_factory=dict, compare=False)

    def level_at(self, now: float) -> float:
        """Units in the bucket at `now`; negative is debt. A clock that went back refills nothing."""
        level = self.level
        if now > self.at:
            level += self.rate * (now - self.at)
        return level if level < self.capacity else self.capacity  # noqa: FURB136 - asked thrice per request

    def wait_for(self, amount: float, now: float, terms: Terms = PLAIN) -> float:
        """Seconds until `amount` can be taken on these terms: 0 when now, infinite when it never refills.

        Where others wait it holds as long as they go on waiting; sooner, when they are served or leave.
        """
        if self.lanes or terms.keep_free or terms.smooth or (self.reserve and terms.yields):
            wait = self._wait_beside(amount, now, terms)
        else:
            missing = min(amount, self.capacity) - self.level_at(now)
            wait = 0.0 if missing <= EPSILON else self._time(missing, self.rate)
        return wait if self.closed_until <= now else max(wait, self.closed_until - now)

    def due_in(self, amount: float, now: float, terms: Terms) -> float:
        """Seconds until `amount` is the lane's own, whatever others want; infinite when it is owed nothing."""
        standing = self.lanes.get(terms.lane)
        if standing is None or not standing.waits(now):
            return inf
        need = min(amount, self.capacity)
        growing = self._time(need - self._owed_at(standing, now), standing.share * self.rate)
        flowing = self._time(need - self.level_at(now), self.rate)
        return max(growing, flowing, self._paced_s(now, terms), self.closed_until - now, 0.0)

    def free_at(self, now: float, terms: Terms = PLAIN) -> float:
        """Units that may be taken now on these terms, pauses and pacing apart; negative: so many lack to take any."""
        level = self.level_at(now)
        free = level - self.kept(terms) - self._set_aside(terms.lane, now)[0]
        standing = self.lanes.get(terms.lane)
        if standing is None or not standing.waits(now):
            return free
        return max(free, min(level, self._owed_at(standing, now)))

    def kept(self, terms: Terms) -> float:
        """Units that are left to better lanes."""
        share = max(terms.keep_free, self.reserve) if terms.yields else terms.keep_free
        return share * self.capacity

    def rate_for(self, terms: Terms, now: float) -> float:
        """Units per second that a lane can count on, beside others that wait with a share of their own."""
        others = sum(s.share for name, s in self.lanes.items() if name != terms.lane and s.waits(now))
        return self.rate * max(terms.share, 1.0 - others)

    def owed(self, now: float) -> dict[str, float]:
        """Units that lanes which wait are owed."""
        return {name: self._owed_at(standing, now) for name, standing in self.lanes.items() if standing.waits(now)}

    def take(self, amount: float, now: float, terms: Terms = PLAIN, *, passing: bool = False) -> None:
        """Take `amount`, whether it is there or not. passing: others who come first could not get theirs."""
        if self.lanes:
            self._pay(amount, now, terms, passing=passing)
        self.change(-amount, now)
        if terms.smooth:
            self.paced[terms.lane] = amount

    def change(self, amount: float, now: float) -> None:
        """Give `amount` back, or charge it when negative, into debt if need be."""
        if self.lanes or self.paced:
            self._settle(now)
        self.level = min(self.capacity, self.level_at(now) + amount)
        if now > self.at:  # noqa: PLR1730 - as above
            self.at = now
        if self.shadow:
            self.level = max(self.level, -self.capacity)

    def refused(self, amount: float, now: float, terms: Terms, *, short: bool) -> None:
        """The first waiter of a lane was refused `amount`; `short` when for want of this bucket."""
        if terms.share > 0:
            self._settle(now)
            shares.register(self.lanes, terms, min(amount, self.capacity), now, short=short)

    def closes(self, amount: float, now: float, terms: Terms) -> bool:
        """Whether those behind must not take what `amount` could not be had of: not when only its own pace held it."""
        if not terms.smooth:
            return True
        return self.closed_until > now or self._beyond(amount, now, terms) > EPSILON

    def resize(self, rate: float, capacity: float, now: float) -> None:
        """Follow a new limit. What is in the bucket stays, as far as it fits."""
        self._settle(now)
        if capacity < self.capacity:
            for standing in self.lanes.values():
                standing.need = min(standing.need, capacity)
                standing.owed = min(standing.owed, capacity)
        self.rate, self.capacity = rate, capacity
        self.level = min(capacity, self.level)

    def adopt(self, rules: TokenBucket, now: float) -> None:
        """Go by the rules of another. What is in the bucket, and owed to lanes, stays, as far as it fits."""
        self.resize(rules.rate, rules.capacity, now)
        self.shadow, self.reserve = rules.shadow, rules.reserve

    def clamp(self, least: float, most: float, now: float) -> None:
        """What is in the bucket is at least `least`, at most `most` (which goes first), and never above capacity."""
        self._settle(now)
        self.level = min(self.capacity, most, max(least, self.level))

    def _wait_beside(self, amount: float, now: float, terms: Terms) -> float:
        alone, others, growth, due = self._lacking(amount, now, terms)
        wait = self._time(alone, self.rate)
        if others + growth > 0 and alone + others > EPSILON:
            beside = self._time(alone + others, self.rate - growth)
            full = inf if due else self._time(self.capacity - self.level_at(now), self.rate)
            wait = max(wait, min(beside, full, LAPSE_S))
        if terms.smooth:
            wait = max(wait, self._paced_s(now, terms))
        return min(wait, self.due_in(amount, now, terms)) if wait > 0 and terms.share else wait

    def _pay(self, amount: float, now: float, terms: Terms, *, passing: bool) -> None:
        """Lower what the lane is owed: below nothing only when it went first with more than a bucket holds."""
        self._settle(now)
        standing = self.lanes.get(terms.lane)
        if standing is not None:
            early = passing or self._beyond(amount, now, terms) > EPSILON
            least = min(0.0, self.capacity - amount) if early else 0.0
            standing.owed = min(standing.owed, max(standing.owed - amount, least))

    def _beyond(self, amount: float, now: float, terms: Terms) -> float:
        """Units that lack for `amount` in the ordinary course: what others are owed is left to them.

        Unless none of them is due and the bucket is full.
        """
        alone, others, _, due = self._lacking(amount, now, terms)
        return alone + others if due else min(alone + others, self.capacity - self.level_at(now))

    def _lacking(self, amount: float, now: float, terms: Terms) -> tuple[float, float, float, bool]:
        """Units that lack for `amount` alone, and what all others are owed: units, their growth, whether one is due."""
        keep = self.kept(terms)
        alone = min(amount, self.capacity - keep) + keep - self.level_at(now)
        return alone, *self._set_aside(terms.lane, now)

    def _set_aside(self, lane: str, now: float) -> tuple[float, float, bool]:
        total, growth, due = 0.0, 0.0, False
        for name, standing in self.lanes.items():
            if name == lane:
                continue
            owed = self._owed_at(standing, now)
            total += max(0.0, owed)
            if owed < standing.need - EPSILON:
                growth += standing.share * self.rate if standing.waits(now) else 0.0
            else:
                due = True
        return total, growth, due

    def _owed_at(self, standing: Standing, now: float) -> float:
        """It grows up to the need, and beyond only while the level does not hold that yet."""
        owed = standing.owed
        if now > self.at:
            most = max(standing.need, owed + standing.share * max(0.0, standing.need - self.level))
            owed = min(most, owed + standing.share * self.rate * (now - self.at))
        return owed if standing.waits(now) else min(0.0, owed)

    def _paced_s(self, now: float, terms: Terms) -> float:
        if not terms.smooth or terms.lane not in self.paced:
            return 0.0
        flowing = self.paced[terms.lane] - self.rate * max(0.0, now - self.at)
        return self._time(min(flowing, self.capacity - self.level_at(now)), self.rate)

    def _time(self, missing: float, rate: float) -> float:
        if missing <= EPSILON:
            return 0.0
        return missing / rate if rate > 0 else inf

    def _settle(self, now: float) -> None:
        """Bring level, set-asides and paces to `now`, and forget what is over."""
        if now <= self.at:
            return
        for name, standing in list(self.lanes.items()):
            standing.owed = self._owed_at(standing, now)
            if standing.owed >= 0 and not standing.waits(now):
                del self.lanes[name]
        flowed = self.rate * (now - self.at)
        if self.paced:
            self.paced = {lane: units - flowed for lane, units in self.paced.items() if units - flowed > EPSILON}
        self.level = min(self.capacity, self.level + flowed)
        self.at = now


@dataclass(slots=True)
class Slots:
    """At most `limit` held at once. `used` may pass the limit when a running request moves here after a failure.

    shadow: it never refuses. closed_until: nothing is taken before. lanes: what waiting lanes are owed. seen: by rank,
    when a lane of it last asked.
    """

    limit: float
    used: float = 0.0
    shadow: bool = False
    closed_until: float = -inf
    retired: bool = False
    lanes: dict[str, Standing] = field(default_factory=dict, compare=False)
    seen: dict[int, float] = field(default_factory=dict, compare=False)

    def wait_for(self, amount: float, now: float, terms: Terms = PLAIN) -> float:
        """0 when `amount` is free on these terms, infinite when only a release can help.

        Seconds when it is paused, or left to others who may not come.
        """
        if self.used + amount > self.limit + EPSILON:
            return inf
        wait = 0.0
        if (self.lanes or terms.keep_free) and self.free_at(now, terms) < amount - EPSILON:
            wait = LAPSE_S
        return wait if self.closed_until <= now else max(wait, self.closed_until - now)

    def due_in(self, amount: float, now: float, terms: Terms) -> float:
        """0 when `amount` is free and the lane's own, whatever others want; else infinite, or until a pause ends."""
        if self.used + amount > self.limit + EPSILON or not shares.is_due(self.lanes, terms.lane, amount, now):
            return inf
        return max(0.0, self.closed_until - now)

    def free_at(self, now: float, terms: Terms = PLAIN) -> float:
        """Places that may be taken now on these terms, pauses apart; negative when more are held than there are."""
        free = self.limit - self.used
        if shares.is_due(self.lanes, terms.lane, 1.0, now):
            return free
        return free - self._kept(terms, now) - shares.held_back(self.lanes, terms.lane, now)

    def owed(self, now: float) -> dict[str, float]:
        """Slots, in parts, that lanes which wait are owed."""
        return shares.owed(self.lanes, now)

    def take(self, amount: float, now: float, terms: Terms = PLAIN) -> None:
        """Hold `amount`, whether it is free or not."""
        self.used += amount
        if terms.lane:
            self.seen[terms.rank] = now
        if self.lanes:
            shares.charge(self.lanes, terms.lane, amount, now)

    def change(self, amount: float, now: float) -> None:  # noqa: ARG002 - one shape for all
        """Release `amount`, or hold it when negative. What nobody held cannot be released."""
        self.used = max(0.0, self.used - amount)

    def adopt(self, rules: Slots) -> None:
        """Go by the rules of another. What is held stays held, also above the limit."""
        self.limit, self.shadow = rules.limit, rules.shadow

    def refused(self, amount: float, now: float, terms: Terms, *, short: bool) -> None:
        """The first waiter of a lane was refused `amount`; `short` when for want of a slot."""
        self.seen[terms.rank] = now
        if terms.share > 0:
            shares.register(self.lanes, terms, amount, now, short=short)

    def closes(self, amount: float, now: float, terms: Terms) -> bool:  # noqa: ARG002 - one shape for all
        """Who found no slot closes them to those behind."""
        return True

    def _kept(self, terms: Terms, now: float) -> float:
        """Places that stay free for better lanes that may come any moment; never all there are."""
        if not terms.keep_free or isinf(self.limit) or not shares.better_seen(self.seen, terms.rank, now):
            return 0.0
        return max(0.0, min(ceil(terms.keep_free * self.limit - EPSILON), self.limit - 1))
