"""What an overview is made from: the service's state as plain data, its rules, and the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from extproc.core.policy import Policy
from extproc.core.refusal import Reason
from extproc.shapes import Row
from extproc.telemetry.history import RECENT_S, Counts, History

__all__ = ["PRESSURE", "Seen"]

PRESSURE = Reason.LANE_FULL, Reason.EVICTED, Reason.QUEUE_TIMEOUT, Reason.DEADLINE_UNMEETABLE, Reason.NO_UPSTREAM
"""Reasons that are no caller's own fault or limit: there was more to do than could be done."""


@dataclass(frozen=True, slots=True)
class Seen:
    """`at`: now, in epoch seconds. state: `Service.state()`. standing: see extproc.waiting.

    recent: the newest requests, newest first, None where nobody keeps them.
    """

    at: float
    version: str
    uptime_s: float
    state: Mapping[str, Any]
    standing: Mapping[str, Any]
    policy: Policy
    history: History
    recent: Sequence[Row] | None = None
    now: Counts = field(init=False)
    lately: Counts = field(init=False)
    """Counted some ten seconds ago."""
    minutes: Counts = field(init=False)
    """Counted five minutes ago, or at the start."""

    def __post_init__(self) -> None:
        """Look up the counts that rates are told from."""
        set_ = object.__setattr__
        set_(self, "now", self.history.counts(self.state))
        set_(self, "lately", self.history.before())
        set_(self, "minutes", self.history.before(RECENT_S))

    @property
    def levers(self) -> Mapping[str, Any]:
        """What an operator has moved; empty where nobody can."""
        return self.state.get("levers") or {}

    @property
    def draining(self) -> bool:
        """Whether nobody is let in any more, or soon will not be."""
        return bool(self.state["draining"] or self.levers.get("draining"))

    def lever(self, kind: str, name: str, field_: str) -> bool | None:
        """Whether a lane is paused, or an upstream out; None where nobody can do that."""
        moved = self.levers.get(kind)
        return None if moved is None else bool((moved.get(name) or {}).get(field_))

    def serves(self, upstream: str) -> bool:
        """Whether users' requests go there now, be it slowly or a few at a time."""
        breaker = self.state["breakers"].get(upstream, {})
        shut = breaker.get("state") in ("open", "half_open") and breaker.get("sign") != "slow"
        return not shut and not self.lever("upstreams", upstream, "out")
