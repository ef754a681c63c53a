"""Counts of what happened since the start, for the live summary and the state page."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, fields
from math import inf
from time import time
from typing import Any

from extproc import shapes
from extproc.core import events
from extproc.core.breaker import Outcome
from extproc.telemetry.dossiers import failed_for

__all__ = ["SHORTEST_S", "Tally"]

RECENT = 50
ERRORS = ((0.5, "under half"), (0.8, "0.5-0.8"), (1.25, "0.8-1.25"), (2.0, "1.25-2"), (inf, "over twice"))
"""How a wait compared with its forecast: upper ends of the ratio, and their names."""
MAX_NAMES = 1000
SHORTEST_S = 0.1
"""Forecasts of less than this are not compared: their ratio says nothing."""


@dataclass(slots=True)
class Tally:
    """An Observer that only counts. Token counts are of settled requests."""

    admitted: Counter[str] = field(default_factory=Counter)
    queued: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    failed_attempts: Counter[str] = field(default_factory=Counter)
    paced: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    overshot: Counter[str] = field(default_factory=Counter)
    settled: int = 0
    spent_usd: Counter[str] = field(default_factory=Counter)
    unknown_usage: int = 0
    unpriced: int = 0
    client_gone: int = 0
    evicted: int = 0
    waited_s: float = 0.0
    probes: Counter[str] = field(default_factory=Counter)
    probe_tokens: Counter[str] = field(default_factory=Counter)
    probe_usd: Counter[str] = field(default_factory=Counter)
    observed: Counter[str] = field(default_factory=Counter)
    shadowed: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    limits_moved: Counter[str] = field(default_factory=Counter)
    preemptions: Counter[str] = field(default_factory=Counter)
    forecasts: dict[str, Counter[str]] = field(default_factory=dict)
    alerts: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __call__(self, event: events.Event) -> None:
        """Count one event."""
        match event:
            case events.Admitted():
                self._admitted(event)
            case events.Queued():
                self.queued[event.request.lane] += 1
            case events.Refused():
                self.refused[event.reason] += 1
            case events.Settled():
                self._settled(event)
            case events.AttemptFailed():
                self.failed_attempts[event.upstream] += 1
                self.paced[event.upstream] += event.outcome is Outcome.PACED
            case events.Overshot():
                self._count_bounded(self.overshot, event.key, round(event.amount))
            case events.BreakerMoved() | events.SizesMoved() | events.BudgetUsed():
                self._alert(event)
            case events.Probed():
                self.probes[f"{event.upstream}:{'ok' if event.ok else 'failed'}"] += 1
                self.probe_tokens[event.upstream] += event.tokens
                self.probe_usd[event.upstream] += event.cost_usd or 0.0  # type: ignore[assignment]
            case _:
                self._of_limits(event)

    def snapshot(self) -> shapes.Tally:
        """All counts as plain data."""
        names = (
            "admitted", "queued", "refused", "failed", "served", "failed_attempts", "paced", "tokens", "overshot",
            "probes", "observed", "shadowed", "limits_moved", "preemptions",
            "spent_usd", "retried", "probe_tokens", "probe_usd",
        )  # fmt: skip
        counts: dict[str, Any] = {name: dict(getattr(self, name)) for name in names}
        counts["forecasts"] = {lane: dict(ratios) for lane, ratios in self.forecasts.items()}
        totals = ("settled", "unknown_usage", "unpriced", "client_gone", "evicted", "waited_s")
        told: Any = counts | {name: getattr(self, name) for name in totals} | {"alerts": list(self.alerts)}
        snapshot: shapes.Tally = told
        return snapshot

    def _alert(self, event: events.BreakerMoved | events.SizesMoved | events.BudgetUsed) -> None:
        """Every transition of late, and what of budgets is used, as it was told, newest last."""
        told = {one.name: getattr(event, one.name) for one in fields(event)}
        self.alerts.append({"at": round(time(), 3), **{name: word for name, word in told.items() if word != ""}})

    def _admitted(self, event: events.Admitted) -> None:
        lane = event.request.lane
        self.admitted[lane] += 1
        self.waited_s += event.waited_s
        if event.predicted_s is not None and event.predicted_s >= SHORTEST_S:
            ratio = event.waited_s / event.predicted_s
            name = next(name for end, name in ERRORS if ratio <= end)
            self.forecasts.setdefault(lane, Counter())[name] += 1

    def _of_limits(self, event: events.Event) -> None:
        match event:
            case events.Observed():
                self.observed[event.reason or "held"] += 1
            case events.Shadowed():
                self._count_bounded(self.shadowed, event.limit)
            case events.Retried():
                self._count_bounded(self.retried, event.request.tenant)
            case events.LimitsMoved():
                self.limits_moved[event.upstream] += 1
            case events.Scraped():
                self.preemptions[event.upstream] += round(event.preemptions)

    @staticmethod
    def _count_bounded(counts: Counter[str], name: str, amount: int = 1) -> None:
        """Names that come from outside (tenants, sessions) must not grow without end."""
        counts[name if name in counts or len(counts) < MAX_NAMES else "other"] += amount

    def _settled(self, event: events.Settled) -> None:
        self.settled += 1
        self.client_gone += event.client_gone
        self.evicted += event.evicted
        answered = event.answered
        unheard = not event.status and not event.given_up
        if answered:
            self.served[event.upstream] += 1
            self.unpriced += event.cost_usd is None
            self.spent_usd[event.upstream] += event.cost_usd or 0.0  # type: ignore[assignment]
        elif reason := failed_for(event):
            self.failed[reason] += 1
        if answered or unheard:
            self.unknown_usage += event.usage is None and event.request.size.total > 0
        if event.usage is not None:
            self.tokens[event.upstream] += event.usage.total
