"""Keeping a bucket in step with what the provider says of it.

A reply tells a limit, and what remained of it when its first byte was sent. By the time we hear of it (at its end) that
moment is past, so `remaining` is rolled forward: refill is added, and what the provider has counted since is taken off,
and what it has yet to count of the answers that run. A provider that charges up front counts all of a request when it
arrives; one that charges what was used counts the input then and the output as it is written. The outcome is compared
with what our bucket holds, as a level that must not be passed, never as a difference, so errors do not add up. News
older than what is known says nothing; news that is too old to be rolled forward teaches the limit alone.

Tighten at once, loosen slowly. A smaller limit or a lower level is followed by the next reply. A larger limit is
believed after `AGREE` replies in a row, the smallest of them; a bucket that holds less than is there, because the
provider counts less than we do, is filled after as many. Rate and capacity are never above the reported limit less
headroom, nor above the configured one. What is filled up may use the headroom, which is for what cannot be seen, but
nothing more: a bucket of the configured limit, headroom included, is charged all that is sent, and is the ceiling.

Others may use the same account. What drains away that we did not send, seen over seconds, is taken off the rate, so
that we do not run into the wall again between any two replies.

A pacer decides for one bucket; what hears records and moves counters is outside. Windows of hours and more are not
followed (a day's limit says nothing of a minute), only their end is waited for: see `shortage_s` and the brake.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite
from typing import Any

from extproc.core.brake import Brake
from extproc.core.bucket import TokenBucket
from extproc.core.capacity import Adopt, Declare, Level, Pause, Resize, Seats, Tuning
from extproc.core.ramp import Ramp
from extproc.core.timeline import Timeline
from extproc.core.value import value

__all__ = [
    "DAY_S", "HOUR_S", "MINUTE_S", "Brakes", "Move", "Pacer", "Reported", "Reset", "Rules", "shortage_s",
]  # fmt: skip

MINUTE_S, HOUR_S, DAY_S = 60.0, 3_600.0, 86_400.0

AGREE = 3
"""Replies in a row that have to agree before anything grows."""
AGREE_S = 1.0
"""Over how long they have to, before a bucket is filled."""
ABSURD = 1e-3
"""A limit below this share of the configured one is a mistake."""
STALE_S = 60.0
"""News older than this is not rolled forward."""
MARGIN_S = 0.1
"""A request may be this long on its way: sent, but not counted."""
NOTABLE = 0.005
"""Share of a bucket below which a difference is noise."""
WORTH_FILLING = 0.1
"""Share of a bucket that must be missing before it is filled up."""
APART_S = 0.1
"""Replies from the same moment are one."""
ROUNDING = 1e-9
LITTLE = 0.9
"""A rate that is cut to less than this share of itself has something wrong with it."""
SLACK = 4.0
"""So many times what was yielded, as a share of a bucket, is left to others when it is filled."""
RESIZED = 0.02
"""Changes of the rate smaller than this wait for more, but for those of the limit."""
OTHERS_S, OTHERS_MAX_S = 5.0, 30.0
"""Over how long what others use is measured."""
OTHERS_WEIGHT = 0.3
OTHERS_LEAST = 0.03
"""Share of the limit below which others' use is an error of measurement."""
LEAST_RATE = 0.05
"""Whatever others use, this share of the limit is asked for."""


class Reset(StrEnum):
    """What a reported reset is the time of: a full bucket, room for such a request, or the end of a fixed window."""

    FULL = "full"
    FITS = "fits"
    WINDOW = "window"


@value
class Reported:
    """One limit as a provider reported it.

    kind: what is counted: "tokens" (input and output together), "input", "output", "requests", or "share" (limit and
    remaining are shares of all that may be used). reset_s: seconds from then, 0 when it is past; reset: what it means.
    window_s: seconds in which `limit` may be used.
    """

    kind: str
    limit: float | None = None
    remaining: float | None = None
    reset_s: float | None = None
    window_s: float = MINUTE_S
    reset: Reset = Reset.FULL


@dataclass(frozen=True, slots=True)
class Rules:
    """What one bucket may be, whatever the provider says.

    rate, capacity: as configured, headroom off, in units per second and units; infinite when they are to be learned.
    headroom: share of what the provider reports that is left alone. burst_s: size of a learned bucket in seconds of its
    refill. shadow: it only counts what it would have stopped. reserve: share of the bucket for the best lane alone.
    """

    rate: float = inf
    capacity: float = inf
    headroom: float = 0.05
    burst_s: float = 10.0
    shadow: bool = False
    reserve: float = 0.0


@value
class Move:
    """A counter to change. what: limit, level, others, rate, pause or ramp; cause: a few words with numbers."""

    tuning: Tuning
    what: str
    cause: str


def shortage_s(seen: Reported, need: float) -> float | None:
    """Seconds until `need` fits into what is reported, from then; 0 when it does, None when nothing tells."""
    if seen.remaining is None or (seen.remaining >= need and seen.remaining > 0):
        return 0.0
    if seen.reset is Reset.FULL and seen.limit is not None:
        return max(0.0, min(need, seen.limit) - seen.remaining) * seen.window_s / seen.limit
    return seen.reset_s or None


class Brakes:
    """Pauses and cuts of an upstream whose tokens are not counted here: by its slots."""

    def __init__(self, key: str, limit: float) -> None:
        """`limit`: slots when nothing is wrong, infinite for any number."""
        self.key = key
        self.limit = limit
        self.brake = Brake()
        self._set = limit
        self._share = 1.0

    def pause(self, seconds: float, cause: str) -> list[Move]:
        """Take nothing for so long, and no more than the brake allows afterwards."""
        paused = [Move(Pause(self.key, seconds), "pause", f"paused {seconds:.3g} s: {cause}")] if seconds > 0 else []
        return paused + self.due(cause)

    def due(self, cause: str = "recovering") -> list[Move]:
        """Slots as the brake allows them now."""
        share = min(self._share, self.brake.factor)
        limit = max(1.0, float(int(self.limit * share))) if isfinite(self.limit) else self.limit
        if limit == self._set:
            return []
        before, self._set = self._set, limit
        return [Move(Seats(self.key, limit), "rate", f"{limit:g} slots instead of {before:g}: {cause}")]

    def lift(self, limit: float, cause: str) -> list[Move]:
        """Another number of slots when nothing is wrong."""
        self.limit = limit
        return self.due(cause)

    def follow(self, limit: float) -> Tuning:
        """Go by another number of slots from now on; what is wrong stays so."""
        self.limit = limit
        self._set = -inf
        [move] = self.due()
        return move.tuning

    def hold_back(self, share: float, cause: str) -> list[Move]:
        """Use no more than this share of them, whatever else is right."""
        self._share = share
        return self.due(cause)

    def state(self, now: float) -> dict[str, Any]:
        """For the state page."""
        return _braked(self.brake, now)


class Pacer:
    """One bucket. Times are seconds on the caller's clock; levels are what is in the bucket, None: not counted yet."""

    def __init__(self, key: str, rules: Rules, ramp: Ramp | None = None) -> None:
        """`ramp`: for tokens whose growth may be limited."""
        self.key = key
        self.rules = rules
        self.brake = Brake()
        self.ramp = ramp
        self._counted, self._written, self._unwritten = Timeline(), Timeline(), 0.0
        self._bound = rules.rate
        self._window_cap = inf
        self._set = (rules.rate, rules.capacity)
        self._seen: Reported | None = None
        self._heard_at = -inf
        self._larger: list[tuple[float, float]] = []
        self._larger_at = -inf
        self._surplus: list[tuple[float, float]] = []
        self._news: deque[tuple[float, float]] = deque()
        self._full = 0.0
        self._drained = 0.0
        self._ceiling = TokenBucket(rules.rate / (1.0 - rules.headroom), rules.capacity, rules.capacity, -inf)

    @property
    def known(self) -> bool:
        """Whether there is a limit, configured or reported."""
        return isfinite(self._bound)

    @property
    def others(self) -> float:
        """Units per second that others use of the same limit, as far as can be told."""
        return self._drained if self._drained > OTHERS_LEAST * self._account_rate() else 0.0

    def follow(self, rules: Rules, now: float) -> list[Tuning]:
        """Go by other rules from now on. What the provider said, what others use and what is braked goes on counting.

        The counter is to be as this says, whatever it was.
        """
        told = self._bound if self._bound < self.rules.rate else inf
        if isfinite(self.rules.rate) and told == inf and self._seen is not None and self._seen.limit is not None:
            told = self._seen.limit / self._seen.window_s * (1.0 - rules.headroom)
        self.rules, self._bound = rules, min(rules.rate, told)
        self._ceiling.resize(rules.rate / (1.0 - rules.headroom), rules.capacity, now)
        self._larger.clear()
        self._surplus.clear()
        if not self.known:
            return []
        self._set = rate, capacity = self._size(now)
        bucket = TokenBucket(rate, capacity, 0.0, now, shadow=rules.shadow, reserve=rules.reserve)
        return [Adopt(self.key, bucket)]

    # What we spend.

    def sent(self, first: float, later: float, now: float) -> None:
        """A request departed: `first` is counted when it arrives, at most `later` while it is answered."""
        self._counted.add(first, now)
        self._unwritten += later
        self._ceiling.change(-(first + later), now)
        if self.ramp is not None:
            self.ramp.add(first + later, now)

    def over(self, later: float, written: float, now: float) -> None:
        """It ended: of the `later` that was held for it, `written` was used."""
        self._unwritten = max(0.0, self._unwritten - later)
        self._written.add(written, now)
        self._ceiling.change(later - written, now)

    def turned_away(self, first: float, departed: float, now: float) -> None:
        """One that departed at `departed` was refused: the `first` that it was sent with was not counted."""
        self._counted.take_back(first, departed)
        self._ceiling.change(first, now)

    # What we hear.

    def told(self, seen: Reported, departed: float, told_at: float, level: float | None, now: float) -> list[Move]:
        """A reply to a request that departed at `departed` reported this at `told_at`."""
        if told_at <= self._heard_at or self._absurd(seen):
            return []
        self._heard_at, self._seen = told_at, seen
        moves = self._follow_limit(seen, told_at, now)
        there = self._there(seen, max(departed, told_at - MARGIN_S), told_at, now)
        if level is None:
            return self._declared(there, now)
        if there is None:
            return moves
        if self._measure_others(seen, told_at):
            moves += self._resized("others", f"others use {self.others:.4g} per s", now)
        return moves + self._follow_level(seen, there, departed, level, now)

    def refused(
        self, began: float, now: float, wait_s: float | None, *, explained: bool, chance: float, cause: str
    ) -> list[Move]:
        """A request that departed at `began` was refused for its speed; see Brake.refused."""
        share = self.brake.share
        moves = self._paused(self.brake.refused(began, now, wait_s, explained=explained, chance=chance), cause)
        if self.brake.share < share:
            moves.append(Move(Level(self.key, most=0.0), "level", f"emptied: {cause}"))
        return moves + self._resized("rate", cause, now)

    def exhausted(self, began: float, now: float, wait_s: float | None, cause: str) -> list[Move]:
        """A window of hours is spent; see Brake.exhausted."""
        moves = self._paused(self.brake.exhausted(began, now, wait_s), cause)
        return moves + self._resized("rate", cause, now)

    def served(self, began: float, now: float) -> list[Move]:
        """A request that departed at `began` was served, and nothing is spent."""
        if self.brake.calm:
            return []
        self.brake.served(began)
        return self._resized("rate", "served again", now)

    def slow_down(self, now: float) -> list[Move]:
        """The provider wants slower growth."""
        if self.ramp is None:
            return []
        self.ramp.slow_down(now)
        return self._resized("ramp", f"slow_down: {self.ramp.per_minute(now):.6g} per minute", now)

    def due(self, now: float) -> list[Move]:
        """What time alone changes. About once a second."""
        self.brake.recover(now)
        if now - self._heard_at > OTHERS_MAX_S:
            self._drained = 0.0
        slow = self.ramp is not None and self.ramp.active
        return self._resized("ramp" if slow else "rate", "growing" if slow else "recovering", now)

    def state(self, now: float) -> dict[str, Any]:
        """For the state page: what was reported last, and what was made of it."""
        found = _braked(self.brake, now)
        if self._seen is not None:
            seen = self._seen
            found |= {"limit": seen.limit, "window_s": seen.window_s, "remaining": seen.remaining}
            found |= {"age_s": round(now - self._heard_at, 3), "others_per_s": round(self.others, 3)}
        if self.ramp is not None and self.ramp.active:
            found["ramp_per_minute"] = self.ramp.per_minute(now)
        return found

    # The limit.

    def _absurd(self, seen: Reported) -> bool:
        """Whether it contradicts itself, or is so far from what is configured that somebody is mistaken."""
        if seen.remaining is not None and not 0 <= seen.remaining <= (inf if seen.limit is None else seen.limit):
            return True
        if seen.limit is None:
            return seen.remaining is None
        if not 0 < seen.limit < inf:
            return True
        return isfinite(self.rules.rate) and seen.limit / seen.window_s < ABSURD * self.rules.rate

    def _follow_limit(self, seen: Reported, told_at: float, now: float) -> list[Move]:
        if seen.limit is None:
            return []
        left = 1.0 - self.rules.headroom
        bound, cap = min(self.rules.rate, seen.limit / seen.window_s * left), seen.limit * left
        if isfinite(self._bound) and bound > self._bound:
            if told_at - self._larger_at >= APART_S:
                self._larger.append((bound, cap))
                self._larger_at = told_at
            if len(self._larger) < AGREE:
                return self._capped(cap, now)
            bound, cap = min(self._larger)
        self._larger.clear()
        if (bound, cap) == (self._bound, self._window_cap):
            return []
        self._bound, self._window_cap = bound, cap
        self._full = min(self._full, seen.limit)
        self._news.clear()
        return self._resized("limit", f"the provider allows {seen.limit:.10g} per {seen.window_s:g} s", now, exact=True)

    def _capped(self, cap: float, now: float) -> list[Move]:
        """A larger rate waits for others to agree; a smaller window holds less at once."""
        if cap >= self._window_cap:
            return []
        self._window_cap = cap
        return self._resized("limit", f"the provider's window holds {cap:.10g}", now, exact=True)

    def _declared(self, there: float | None, now: float) -> list[Move]:
        """Start to count, with what is known to be there."""
        if not self.known or isfinite(self.rules.rate):
            return []
        self._set = rate, capacity = self._size(now)
        bucket = TokenBucket(rate, capacity, min(there or 0.0, capacity), now, reserve=self.rules.reserve)
        return [Move(Declare(self.key, bucket), "limit", f"learned: {rate * MINUTE_S:.6g} per minute")]

    # The rate.

    def _account_rate(self) -> float:
        """Units per second that the provider's limit refills with, as far as is known."""
        if self._seen is None or self._seen.limit is None:
            return self._set[0]
        return self._seen.limit / self._seen.window_s

    def _size(self, now: float) -> tuple[float, float]:
        """Rate and capacity as they should be now."""
        rules, rate = self.rules, self._bound * self.brake.factor
        if self.others:
            account = self._account_rate()
            rate = min(rate, max(LEAST_RATE * account, (account - self.others) * (1.0 - rules.headroom)))
        burst_s = rules.capacity / rules.rate if isfinite(rules.rate) else rules.burst_s
        capacity = min(self._bound * burst_s * self.brake.factor, self._window_cap)
        if self.ramp is not None and self.ramp.active:
            slow = self.ramp.per_minute(now) / (MINUTE_S + burst_s)  # a full bucket may be taken on top of a minute
            rate, capacity = min(rate, slow), min(capacity, slow * burst_s)
        return rate, capacity

    def _resized(self, what: str, cause: str, now: float, *, exact: bool = False) -> list[Move]:
        if not self.known:
            return []
        size = rate, capacity = self._size(now)
        before = self._set
        settled = self.brake.factor >= 1.0 and not self.others and not (self.ramp is not None and self.ramp.active)
        if _near(size, before, ROUNDING if exact or settled else RESIZED):
            return []
        self._set = size
        told = f"{rate * MINUTE_S:.6g} per minute instead of {before[0] * MINUTE_S:.6g}: {cause}"
        return [Move(Resize(self.key, rate, capacity), what, told)]

    def _measure_others(self, seen: Reported, told_at: float) -> bool:
        """Whether something was learned of what others use: what drained away that we did not send.

        Only while the bucket cannot have overflowed; where more than half of it is there, others do not matter.
        """
        if seen.limit is None or seen.remaining is None or seen.reset is Reset.WINDOW:
            return False
        self._full = max(self._full, seen.remaining, self._set[1])
        news, rate = self._news, seen.limit / seen.window_s
        if news and told_at - news[-1][0] < 1.0:
            return False
        while news and (told_at - news[0][0] > OTHERS_MAX_S or news[0][1] + rate * (told_at - news[0][0]) > self._full):
            news.popleft()
        news.append((told_at, seen.remaining))
        if seen.remaining > self._full / 2:
            drained = 0.0
        elif told_at - news[0][0] >= OTHERS_S and self._counted.reaches(news[0][0] - MARGIN_S):
            since, had = news[0]
            ours = self._counted.since(since - MARGIN_S) - self._counted.since(told_at)
            ours += self._written.since(since) - self._written.since(told_at)
            drained = min(rate, (had - seen.remaining - ours) / (told_at - since) + rate)
        else:
            return False
        self._drained += OTHERS_WEIGHT * (drained - self._drained)
        return True

    # The level.

    def _there(self, seen: Reported, sent_at: float, told_at: float, now: float) -> float | None:
        """What the bucket may hold now; None when the news is too old to tell."""
        known = self._counted.reaches(sent_at) and self._written.reaches(told_at) and now - told_at <= STALE_S
        if seen.remaining is None or not known:
            return None
        spent = self._counted.since(sent_at) + self._written.since(told_at) + self._unwritten
        return self._rolled(seen, seen.remaining, now - told_at) * (1.0 - self.rules.headroom) - spent

    def _rolled(self, seen: Reported, remaining: float, age_s: float) -> float:
        if seen.reset is Reset.WINDOW and seen.reset_s:
            return remaining if age_s < seen.reset_s or seen.limit is None else seen.limit
        there = remaining + max(0.0, self._account_rate() - self.others) * age_s
        return there if seen.limit is None else min(seen.limit, there)

    def _follow_level(self, seen: Reported, there: float, departed: float, level: float, now: float) -> list[Move]:
        capacity = self._set[1]
        level = min(level, capacity)
        if there < level - NOTABLE * capacity:
            self._surplus.clear()
            most = max(there, -capacity)
            return [Move(Level(self.key, most=most), "level", f"{most:.6g} left, not {level:.6g}")]
        early = self._there(seen, departed, departed, now) if self._may_fill(seen, now) else None
        slack = capacity * min(1.0, SLACK * (1.0 - self.brake.yielded))
        most = min(capacity, self._ceiling.level_at(now))
        gap = 0.0 if early is None else min(there - slack, early - slack, most) - level
        if gap < WORTH_FILLING * capacity:
            self._surplus.clear()
            return []
        self._surplus.append((gap, now))
        if len(self._surplus) < AGREE or now - self._surplus[0][1] < AGREE_S:
            return []
        least = level + min(gap for gap, _ in self._surplus)
        self._surplus.clear()
        return [Move(Level(self.key, least=least), "level", f"{least:.6g} left, not only {level:.6g}")]

    def _may_fill(self, seen: Reported, now: float) -> bool:
        """Whether the provider's own count is the one to go by: its limit is what holds us, and little is wrong."""
        braking = self.brake.share < LITTLE or self.brake.probation or now < self.brake.paused_until
        if seen.limit is None or braking or (self.ramp is not None and self.ramp.active):
            return False
        return seen.limit / seen.window_s * (1.0 - self.rules.headroom) <= self.rules.rate * (1.0 + RESIZED)

    def _paused(self, seconds: float, cause: str) -> list[Move]:
        return [Move(Pause(self.key, seconds), "pause", f"paused {seconds:.3g} s: {cause}")] if seconds > 0 else []


def _near(size: tuple[float, float], before: tuple[float, float], share: float) -> bool:
    return all(abs(new - old) <= share * old for new, old in zip(size, before, strict=True))


def _braked(brake: Brake, now: float) -> dict[str, Any]:
    found: dict[str, Any] = {"share": round(brake.factor, 3)}
    if brake.paused_until > now:
        found["paused_s"] = round(brake.paused_until - now, 3)
    return found
