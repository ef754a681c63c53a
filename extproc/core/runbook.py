"""Where an operator reads what to do: one closed list of sections, used by alerts, notices and pages alike."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Runbook"]


class Runbook(StrEnum):
    """Anchors of the sections in README."""

    DOWN = "tidegate-is-down"
    UNREACHED = "envoy-does-not-reach-tidegate"
    BREAKER_OPEN = "breaker-open"
    REQUESTS_FAIL = "requests-fail"
    SLO_BURN = "the-first-lane-misses-its-objective"
    QUEUE_FULL = "queue-full"
    NEAR_LIMIT = "provider-near-its-limit"
    PROVIDER_REFUSES = "provider-refuses-for-speed"
    ESTIMATOR_DRIFT = "estimates-drift"
    BYPASSED = "bypass-is-on"
    LEVERS = "levers-left-pulled"
    CONFIG = "config-not-in-force"
    KV_SATURATED = "engine-saturated"
    KV_STALE = "engine-not-heard-of"
    NO_TIME = "the-event-loop-lags"
    BUDGET = "budget-nearly-used"
