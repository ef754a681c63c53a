"""How long a wait would be: work ahead divided by the rate at which it goes.

For a bucket the rate is known (its refill), so the forecast is a bound that only refunds beat. For slots it is
learned: the moving average of how long a request holds one. What has not been learned counts as no wait: an unknown
never refuses anybody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.capacity import Claim, Store
from extproc.core.lanes import Backlog
from extproc.core.policy import Kind

__all__ = ["Pace", "wait_s"]

WEIGHT = 0.1
"""Weight of the newest value in a moving average."""


@dataclass(slots=True)
class Pace:
    """Learned per name (an upstream or a model): seconds a slot is held, and seconds per output token."""

    limit: int = 1000
    _held: OrderedDict[str, float] = field(default_factory=OrderedDict)
    _per_token: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def learn_hold(self, name: str, seconds: float) -> None:
        """A request held a slot of `name` this long."""
        self._learn(self._held, name, seconds)

    def learn_output(self, name: str, seconds: float, tokens: int) -> None:
        """`name` generated `tokens` in `seconds`."""
        if tokens > 0 and seconds > 0:
            self._learn(self._per_token, name, seconds / tokens)

    def hold_s(self, name: str) -> float:
        """Seconds a slot of `name` is usually held, 0 when unknown."""
        return self._held.get(name, 0.0)

    def output_s(self, name: str, tokens: int) -> float:
        """Seconds that `tokens` of output usually take at `name`, 0 when unknown."""
        return self._per_token.get(name, 0.0) * tokens

    def _learn(self, known: OrderedDict[str, float], name: str, value: float) -> None:
        known[name] = known.get(name, value) * (1.0 - WEIGHT) + value * WEIGHT
        known.move_to_end(name)
        if len(known) > self.limit:
            known.popitem(last=False)


def wait_s(store: Store, claims: Sequence[Claim], ahead: Callable[[str], Backlog], hold_s: float, now: float) -> float:
    """Seconds until `claims` can be met when everything `ahead` of them, by key, is served first."""
    longest = 0.0
    for claim in claims:
        counter = store.get(claim.key)
        if isinstance(counter, TokenBucket):
            longest = max(longest, _bucket_wait(counter, claim, ahead(claim.key), now))
        elif isinstance(counter, Slots):
            longest = max(longest, _slot_wait(counter, claim, ahead(claim.key), hold_s))
    return longest


def _bucket_wait(bucket: TokenBucket, claim: Claim, ahead: Backlog, now: float) -> float:
    missing = _queued(claim.key, ahead) + min(claim.amount, bucket.capacity) - bucket.level_at(now)
    if missing <= 0:
        return 0.0
    return missing / bucket.rate if bucket.rate > 0 else inf


def _queued(key: str, ahead: Backlog) -> int:
    match key.rpartition("/")[2]:
        case Kind.REQUESTS:
            return ahead.requests
        case Kind.INPUT:
            return ahead.input
        case Kind.OUTPUT:
            return ahead.tokens - ahead.input
        case _:
            return ahead.tokens


def _slot_wait(slots: Slots, claim: Claim, ahead: Backlog, hold_s: float) -> float:
    free = slots.limit - slots.used - ahead.requests
    if free >= claim.amount or slots.limit <= 0:
        return 0.0
    return (claim.amount - free) * hold_s / slots.limit
