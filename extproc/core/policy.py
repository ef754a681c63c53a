"""The rules an operator wrote, as the core reads them: lanes, tenants, upstreams and routes.

Built once from the validated settings and frozen; every unit is in its name. Nothing here knows YAML or Envoy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from extproc.core.request import Dialect

__all__ = ["Accounting", "BreakerRules", "Kind", "Lane", "Limit", "Policy", "Route", "Tenant", "Upstream", "WhenBusy"]


class WhenBusy(StrEnum):
    """What a lane does when the first upstream of a chain is only busy."""

    SPILL = "spill"
    HOLD = "hold"


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


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """When an upstream counts as sick, and how long it rests. Times in seconds."""

    failures: int = 3
    paced: int = 5
    cool_down_s: float = 5.0
    cool_down_max_s: float = 120.0
    jitter: float = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Upstream:
    """A place to send to, with one capacity. `models` maps public model names to the upstream's own.

    window: largest prompt plus output, in tokens, it accepts; None when unknown.
    learn: its limits are taken from the provider's headers; until known at most `learn_concurrency` requests fly.
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
    window: int | None = None
    accounting: Accounting = Accounting.UPFRONT
    breaker: BreakerRules = field(default_factory=BreakerRules)

    def own_name(self, model: str) -> str:
        """The upstream's name for a public model."""
        return self.models.get(model, model)


@dataclass(frozen=True, slots=True)
class Lane:
    """The bounded queue of one priority; rank 0 goes first."""

    name: str
    rank: int
    max_wait_s: float
    when_busy: WhenBusy
    spill_after_s: float
    max_requests: int
    max_tokens: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Tenant:
    """What one tenant may use. `lanes` best first: the first is its default; empty `models` means any."""

    name: str
    lanes: tuple[str, ...]
    default_lane: str
    models: tuple[str, ...] = ()
    tpm: int | None = None
    rpm: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """A model pattern (shell-style wildcards) and its chain of upstreams, first choice first."""

    name: str
    models: tuple[str, ...]
    chain: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """All the rules together. Routes are tried in order; `other` serves endpoints that are not priced in tokens."""

    upstreams: Mapping[str, Upstream]
    routes: tuple[Route, ...]
    lanes: Mapping[str, Lane]
    tenants: Mapping[str, Tenant]
    other: Route | None = None
    default_output_tokens: int = 512
