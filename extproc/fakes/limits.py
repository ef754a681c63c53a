"""The account's limits: token buckets for requests and tokens, as a provider keeps them.

A request is charged when it arrives: one request, its prompt, and all the output it may produce. With `upfront`
accounting that is final; with `actual` the difference to what was really produced comes back at the end.

A request larger than a bucket, but within the limit of a minute, passes when the bucket is full and leaves a debt.
A request larger than the limit of a minute never passes. A request that is refused for its tokens has still cost one
request, because unsuccessful requests count against the real limit too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from extproc.fakes.settings import FakeSettings

Kind = Literal["requests", "tokens", "input-tokens", "output-tokens"]

_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Cost:
    """What one request takes from the buckets."""

    input: int
    output: int

    @property
    def tokens(self) -> int:
        """Input and output together."""
        return self.input + self.output

    def of(self, kind: Kind) -> int:
        """Return the part that bucket `kind` is charged."""
        parts = {"requests": 1, "tokens": self.tokens, "input-tokens": self.input, "output-tokens": self.output}
        return parts[kind]


@dataclass(frozen=True, slots=True)
class Level:
    """The state of one bucket, as rate-limit headers tell it."""

    limit: int
    """Per minute."""
    remaining: int
    reset_s: float
    """Time until the bucket is full again."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a request does not fit now."""

    kind: Kind
    limit: int
    used: int
    requested: int
    wait_s: float | None
    """Time until it would fit; None: never."""


class Bucket:
    """A bucket that refills at `per_minute` / 60 units a second up to `burst_s` seconds of that. Starts full."""

    def __init__(self, per_minute: int, burst_s: float, now: float) -> None:
        """Make a full bucket. `now` is in seconds of any steady clock, here and everywhere below."""
        self.per_minute = per_minute
        self.rate = per_minute / 60
        self.capacity = self.rate * burst_s
        self._level = self.capacity
        self._at = now

    def level(self, now: float) -> float:
        """Return what is in the bucket; below zero after a request that was larger than the bucket."""
        self._level = min(self.capacity, self._level + (now - self._at) * self.rate)
        self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take (or, with a negative amount, give back) without asking."""
        self._level = min(self.capacity, self.level(now) - amount)

    def wait_s(self, amount: int, now: float) -> float | None:
        """Return the seconds until `amount` fits; 0 if it fits now, None if it never does."""
        if amount > max(self.per_minute, self.capacity):
            return None
        missing = min(amount, self.capacity) - self.level(now)
        return missing / self.rate if missing > _ROUNDING else 0.0

    def state(self, now: float) -> Level:
        """Return the state for the headers."""
        level = self.level(now)
        remaining = max(0, math.floor(level + _ROUNDING))
        return Level(limit=self.per_minute, remaining=remaining, reset_s=(self.capacity - level) / self.rate)


class Limits:
    """All buckets of one account."""

    def __init__(self, settings: FakeSettings, now: float) -> None:
        """Make full buckets for the limits that are set."""
        self._settings = settings
        self._buckets = _buckets(settings, now)

    def take(self, cost: Cost, now: float) -> Shortage | None:
        """Charge one request, or return why it does not fit; then nothing but the request itself is charged."""
        for kind, bucket in self._buckets.items():
            if (wait_s := bucket.wait_s(cost.of(kind), now)) != 0.0:
                self._charge_attempt(kind, now)
                return _shortage(kind, bucket, cost, wait_s, now)
        for kind, bucket in self._buckets.items():
            bucket.take(cost.of(kind), now)
        return None

    def settle(self, reserved: Cost, real: Cost, now: float) -> int:
        """Give back what was reserved but not used, where the accounting allows it; return the tokens given back."""
        if self._settings.accounting == "upfront":
            return 0
        for kind, bucket in self._buckets.items():
            bucket.take(real.of(kind) - reserved.of(kind), now)
        return reserved.tokens - real.tokens

    def levels(self, now: float) -> dict[Kind, Level]:
        """Return the state of every bucket."""
        return {kind: bucket.state(now) for kind, bucket in self._buckets.items()}

    def change(self, settings: FakeSettings, now: float) -> None:
        """Apply new limits. What was used stays used: a changed bucket keeps its level, cut to its new capacity."""
        before, self._settings, self._buckets = self._buckets, settings, _buckets(settings, now)
        for kind, bucket in self._buckets.items():
            if kind in before:
                bucket.take(max(0.0, bucket.capacity - before[kind].level(now)), now)

    def _charge_attempt(self, short_of: Kind, now: float) -> None:
        if short_of != "requests" and "requests" in self._buckets:
            self._buckets["requests"].take(1, now)


def _buckets(settings: FakeSettings, now: float) -> dict[Kind, Bucket]:
    limits: dict[Kind, int | None] = {
        "requests": settings.rpm,
        "tokens": settings.tpm,
        "input-tokens": settings.input_tpm,
        "output-tokens": settings.output_tpm,
    }
    return {kind: Bucket(limit, settings.burst_s, now) for kind, limit in limits.items() if limit is not None}


def _shortage(kind: Kind, bucket: Bucket, cost: Cost, wait_s: float | None, now: float) -> Shortage:
    state = bucket.state(now)
    used = state.limit - state.remaining
    return Shortage(kind=kind, limit=state.limit, used=used, requested=cost.of(kind), wait_s=wait_s)
