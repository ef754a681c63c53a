"""The rules an operator wrote, as the core reads them: lanes, tenants, upstreams and routes.

Built once from the validated settings and frozen; every unit is in its name. Nothing here knows YAML or Envoy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import translate
from math import inf

from extproc.core.request import Ability, Dialect

__all__ = [
    "Accounting",
    "Bounds",
    "BreakerRules",
    "Dollars",
    "Kind",
    "KvRules",
    "Lane",
    "Limit",
    "Order",
    "Pacing",
    "Policy",
    "Prices",
    "RatioRules",
    "RetryRules",
    "Route",
    "SessionLimits",
    "SlowRules",
    "Tenant",
    "Upstream",
    "WhenBusy",
]  # fmt: skip

_WILD = frozenset("*?[")


class WhenBusy(StrEnum):
    """What a lane does when the first upstream of a chain is only busy."""

    SPILL = "spill"
    HOLD = "hold"


class Pacing(StrEnum):
    """How a lane takes from a bucket: as much as is in it (token bucket), or evenly at its rate (leaky bucket)."""

    BURST = "burst"
    SMOOTH = "smooth"


class Order(StrEnum):
    """Whose turn it is inside a tenant: first come first served, or earliest deadline first."""

    FIFO = "fifo"
    EDF = "edf"


class Kind(StrEnum):
    """What a limit counts. A provider's limits of one account and model are independent buckets."""

    TOTAL = "total"
    INPUT = "input"
    OUTPUT = "output"
    REQUESTS = "requests"


class Accounting(StrEnum):
    """When a provider charges its token limit: the estimate up front for good, or what was really used."""

    UPFRONT = "upfront"
    ACTUAL = "actual"


@dataclass(frozen=True, slots=True)
class Limit:
    """One bucket of an upstream's account: `per_minute` tokens or requests of `kind` for `model` ("*" is any)."""

    model: str
    kind: Kind
    per_minute: float
    capacity: float
    shadow: bool = False


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per million tokens. What is None costs what input (or, for reasoning, output) does.

    since: from when they hold, in epoch seconds.
    """

    input: float
    output: float
    cached: float | None = None
    cache_write: float | None = None
    reasoning: float | None = None
    since: float = -inf


@dataclass(frozen=True, slots=True)
class Dollars:
    """How many US dollars may be spent per period of the calendar; None is no limit."""

    per_hour: float | None = None
    per_day: float | None = None
    per_month: float | None = None

    @property
    def limited(self) -> bool:
        """Whether there is any limit."""
        return self != UNLIMITED


UNLIMITED = Dollars()


@dataclass(frozen=True, slots=True)
class KvRules:
    """When an engine's KV cache is full enough that requests wait.

    high, low: watermarks in used shares of the fullest instance's cache; shut at `high`, open again at `low`. lanes:
    other marks (high, low) per lane. waiting: requests in an instance's own queue that count as saturated. tokens: the
    cache of one instance in tokens; None when the engine tells it, or nobody knows. stale_s: age from which a reading
    says nothing. trickle_rps: requests per second that are let through on no reading at all.
    """

    high: float = 0.82
    low: float = 0.75
    lanes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    waiting: int = 4
    tokens: int | None = None
    stale_s: float = 5.0
    trickle_rps: float = 1.0
    shadow: bool = False


@dataclass(frozen=True, slots=True)
class RatioRules:
    """Sick when at least `share` of the results of `window_s` seconds are bad, and there are at least `volume`."""

    share: float
    window_s: float
    volume: int


@dataclass(frozen=True, slots=True)
class SlowRules:
    """Sick when first tokens take too long against what is usual there (see core.baseline).

    Their P95 within `window_s` seconds, which is to say more than `share` of them, above `times` the usual P95; or the
    median of the last `volume` above `median_times` the usual one and above the usual P95, None for never. At least
    `volume` are needed, and what comes within `least_s` seconds is never slow.
    """

    times: float = 3.0
    median_times: float | None = 2.0
    share: float = 0.05
    window_s: float = 30.0
    volume: int = 20
    least_s: float = 1.0


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """When an upstream counts as sick, how long it rests, and how traffic returns. Times in seconds; None is never.

    failures, paced: so many failures, or 429s, in a row. errors: share of failed attempts. slow: first tokens.
    malformed: share of answers that are none, of each prompt-size class; only that class is kept away. cool_down_s: the
    first rest, doubled after each failed probe up to cool_down_max_s, and up to `jitter` of it longer by chance.
    quarantine_s, quarantine_max_s: the same where the account has no credit, or the key was refused a probe, too.
    ramp_s: how long traffic takes to return, 0 for at once; it begins with `ramp_from` requests at a time.
    """

    failures: int | None = 3
    paced: int | None = 5
    errors: RatioRules | None = RatioRules(share=0.5, window_s=30.0, volume=20)
    slow: SlowRules | None = SlowRules()
    malformed: RatioRules | None = RatioRules(share=0.3, window_s=300.0, volume=5)
    cool_down_s: float = 5.0
    cool_down_max_s: float = 20.0
    jitter: float = 0.1
    quarantine_s: float | None = 900.0
    quarantine_max_s: float = 7200.0
    ramp_s: float = 10.0
    ramp_from: int = 2


@dataclass(frozen=True, slots=True, eq=False)
class Upstream:
    """A place to send to, with one capacity. `models` maps public model names to the upstream's own.

    window: largest prompt plus output, in tokens, it accepts; None when unknown. lacks: what its models cannot do.
    learn: its limits are taken from the provider's headers; until known at most `learn_concurrency` requests fly.
    follow: what it says of limits and speed counts; headroom: the share of a reported limit that is left alone.
    ramp: the provider wants traffic to grow by at most half within 15 minutes. prices: by own model name, "*" for any,
    those that hold first coming first. dollars: once they are spent, only what costs nothing is used in its stead.
    burn: used share of a bucket of tokens from which on the rest belongs to the best lane; None for never.
    kv: set where an engine's metrics are watched. engine_priority: None, or what a better lane's priority is multiplied
    with: 1 where the engine serves higher numbers first, -1 where lower ones. shadow: names of limits that only count.
    """

    name: str
    provider: str
    dialects: frozenset[Dialect]
    limits: tuple[Limit, ...] = ()
    concurrency: int | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    owned: bool = False
    learn: bool = False
    learn_concurrency: int = 4
    follow: bool = True
    headroom: float = 0.05
    window: int | None = None
    lacks: frozenset[Ability] = frozenset()
    accounting: Accounting = Accounting.UPFRONT
    breaker: BreakerRules = field(default_factory=BreakerRules)
    ramp: bool = False
    prices: Mapping[str, tuple[Prices, ...]] = field(default_factory=dict)
    dollars: Dollars = UNLIMITED
    burn: float | None = None
    kv: KvRules | None = None
    engine_priority: int | None = None
    shadow: frozenset[str] = frozenset()

    def own_name(self, model: str) -> str:
        """The upstream's name for a public model."""
        return self.models.get(model, model)


@dataclass(frozen=True, slots=True)
class Lane:
    """The bounded queue of one priority; rank 0 goes first.

    min_share: share of every capacity that it gets while it waits, whatever better lanes want. keep_free: share of
    every capacity that it leaves free for better lanes. vip_share: up to this share of the lane's service VIP tenants
    go first. lifo_above: fill of the lane (0..1, by its fullest bound) from which the newest goes first; None for
    never. shadow: names of bounds that only count.
    """

    name: str
    rank: int
    max_wait_s: float
    when_busy: WhenBusy
    spill_after_s: float
    max_requests: int
    max_tokens: int
    max_bytes: int
    min_share: float = 0.0
    keep_free: float = 0.0
    pacing: Pacing = Pacing.BURST
    order: Order = Order.FIFO
    vip_share: float = 0.5
    lifo_above: float | None = None
    shadow: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Bounds:
    """What all lanes may hold together; beyond it a better lane's newcomer pushes out a lower lane's newest."""

    max_requests: int = 20_000
    max_tokens: int = 100_000_000
    max_bytes: int = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What one agent session may use in all; a hard stop. None is no limit.

    idle_s: a session that was silent this long is forgotten. derived: whether sessions that no client named count, too.
    new_share: share of a lane's bounds, and of its patience, that calls of sessions never served before may use.
    limit: most sessions that are remembered.
    """

    max_tokens: int | None = None
    max_usd: float | None = None
    idle_s: float = 86_400.0
    derived: bool = False
    new_share: float = 0.8
    limit: int = 100_000
    shadow: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RetryRules:
    """Clients' retries that may wait: `share` of a tenant's traffic, and `least_per_s` in any case."""

    share: float = 0.1
    least_per_s: float = 1.0
    limit: int = 10_000


@dataclass(frozen=True, slots=True)
class Tenant:
    """What one tenant may use. `lanes` best first: the first is its default; empty `models` means any.

    weight: its share of a lane against other tenants'. vip: ranks first in its lane, up to the lane's vip_share.
    sessions: limits of its sessions where they differ from the policy's. shadow: names of limits that only count.
    """

    name: str
    lanes: tuple[str, ...]
    default_lane: str
    models: tuple[str, ...] = ()
    tpm: int | None = None
    rpm: int | None = None
    concurrency: int | None = None
    dollars: Dollars = UNLIMITED
    weight: float = 1.0
    vip: bool = False
    sessions: SessionLimits | None = None
    shadow: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Route:
    """A model pattern (shell-style wildcards) and its chain of upstreams, first choice first.

    observe: share of its requests (0..1) that are decided upon but not held or refused. dollars: what all of them may
    cost; a hard stop. shadow: names of limits that only count. last_resort: text that answers where every upstream
    failed, None for an error; unasked: also where none may even be asked. first_token_s: how long its streams may take
    to begin, None for as long as any.
    """

    name: str
    models: tuple[str, ...]
    chain: tuple[str, ...]
    observe: float = 0.0
    dollars: Dollars = UNLIMITED
    shadow: frozenset[str] = frozenset()
    last_resort: str | None = None
    unasked: bool = False
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """All the rules together. Routes are tried in order; `other` serves endpoints that are not priced in tokens.

    any_tenant: the rules of every tenant that is named by a trusted source but not listed; None when there are none.
    """

    upstreams: Mapping[str, Upstream]
    routes: tuple[Route, ...]
    lanes: Mapping[str, Lane]
    tenants: Mapping[str, Tenant]
    other: Route | None = None
    default_output_tokens: int = 512
    output_percentile: float = 0.95
    any_tenant: Tenant | None = None
    bounds: Bounds = field(default_factory=Bounds)
    sessions: SessionLimits = field(default_factory=SessionLimits)
    retries: RetryRules = field(default_factory=RetryRules)
    _named: Mapping[str, Route] = field(init=False, repr=False, compare=False)
    _patterns: tuple[tuple[re.Pattern[str], Route], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Sort the routes by what they name, once: every request asks, and there may be hundreds."""
        pairs = [(name, route) for route in self.routes for name in route.models]
        patterns = [(re.compile(translate(name)), route) for name, route in pairs if not _WILD.isdisjoint(name)]
        object.__setattr__(self, "_named", dict(reversed(pairs)))
        object.__setattr__(self, "_patterns", tuple(patterns))

    def naming(self, model: str) -> Route | None:
        """The first route that names `model` exactly."""
        return self._named.get(model)

    def patterned(self, model: str) -> Route | None:
        """The first route that has a pattern which `model` fits."""
        return next((route for pattern, route in self._patterns if pattern.match(model)), None)
