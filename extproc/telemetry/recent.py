"""The newest requests as rows of a list: what became of each in a few words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from extproc.core import events
from extproc.telemetry.dossiers import Dossier

__all__ = ["rows"]


def rows(dossiers: Iterable[Dossier], now: float) -> list[dict[str, Any]]:
    """One row each; `now` is on the clock of `Request.arrived`. What is not known is None, or empty for a word."""
    return [_row(dossier, now) for dossier in dossiers]


def _row(dossier: Dossier, now: float) -> dict[str, Any]:
    return {
        "id": dossier.id or dossier.ticket,
        "ticket": dossier.ticket,
        "at": round(dossier.epoch_s(dossier.began), 3),
        "tenant": dossier.tenant,
        "lane": dossier.lane,
        "model": dossier.model[:100],
        "state": dossier.state,
        "reason": dossier.reason,
        "upstream": dossier.upstream,
        "waited_s": _waited_s(dossier, now),
        "tokens": _tokens(dossier),
    }


def _waited_s(dossier: Dossier, now: float) -> float | None:
    decided = dossier.last(events.Admitted) or dossier.last(events.Refused) or dossier.last(events.Left)
    if decided is not None:
        return round(decided.waited_s, 3)
    return round(now - dossier.began, 3) if dossier.state == "waiting" else None


def _tokens(dossier: Dossier) -> int | None:
    """What was used, where that is known, else what is reserved for it."""
    settled = dossier.last(events.Settled)
    if settled is not None and settled.usage is not None:
        return (settled.usage.input or 0) + (settled.usage.output or 0)
    return dossier.request.size.total if dossier.request is not None else None
