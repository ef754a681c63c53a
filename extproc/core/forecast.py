"""How long a wait would be: work ahead divided by the rate at which it goes.

For a bucket the rate is known (its refill), so the forecast is a bound that only refunds beat. For slots it is
learned: the moving average of how long a request holds one. What has not been learned counts as no wait: an unknown
never refuses anybody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, inf

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.capacity import Claim, Store
from extproc.core.lanes import Backlog
from extproc.core.policy import Kind

__all__ = ["Demand", "Pace", "wait_s"]

WEIGHT = 0.1
"""Weight of the newest value in a moving average."""
SHORT_S, LONG_S = 5.0, 60.0
"""How long a lane's demand is remembered: until a silence is noticed, and until it counts as lasting."""
LEAST_SHARE = 0.05
"""However much better lanes take, a forecast counts on this share of the rate."""


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


@dataclass(slots=True)
class Demand:
    """How fast each lane takes of each counter, in units per second: what better lanes take, others do not get.

    Two decaying sums, a short and a long one, of which the smaller rate counts: a burst is not taken for a habit, and a
    lane that falls silent is forgotten soon.
    """

    _taken: dict[tuple[str, int], tuple[float, float, float]] = field(default_factory=dict)

    def note(self, rank: int, claims: Sequence[Claim], now: float) -> None:
        """The lane of this rank was granted `claims`."""
        for claim in claims:
            short, long = self._sums(claim.key, rank, now)
            self._taken[claim.key, rank] = (short + claim.amount, long + claim.amount, now)

    def above(self, key: str, rank: int, now: float) -> float:
        """Units per second of `key` that lanes better than `rank` take."""
        sums = (self._sums(key, better, now) for better in range(rank))
        return sum(min(short / SHORT_S, long / LONG_S) for short, long in sums)

    def _sums(self, key: str, rank: int, now: float) -> tuple[float, float]:
        short, long, at = self._taken.get((key, rank), (0.0, 0.0, now))
        return short * exp((at - now) / SHORT_S), long * exp((at - now) / LONG_S)


def wait_s(
    store: Store,
    claims: Sequence[Claim],
    ahead: Callable[[str], Backlog],
    above: Callable[[str], float],
    hold_s: float,
    now: float,
) -> float:
    """Seconds until `claims` can be met when everything `ahead` of them is served first, and better lanes go on.

    ahead, above: by key, what waits in front, and the units per second that better lanes take.
    """
    longest = 0.0
    for claim in claims:
        counter = store.get(claim.key)
        if isinstance(counter, TokenBucket):
            missing = _bucket_missing(counter, claim, ahead(claim.key), now)
            rate = counter.rate
        elif isinstance(counter, Slots):
            missing = claim.amount + ahead(claim.key).requests + counter.used - counter.limit
            rate = counter.limit / hold_s if hold_s > 0 else inf
        else:
            continue
        longest = max(longest, counter.closed_until - now)
        if missing > 0:
            longest = max(longest, _time(missing, rate, above(claim.key)))
    return longest


def _time(missing: float, rate: float, above: float) -> float:
    left = max(rate - above, LEAST_SHARE * rate)
    return missing / left if left > 0 else inf


def _bucket_missing(bucket: TokenBucket, claim: Claim, ahead: Backlog, now: float) -> float:
    return _queued(claim.key, ahead) + min(claim.amount, bucket.capacity) - bucket.level_at(now)


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
