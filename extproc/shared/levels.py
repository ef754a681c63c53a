"""Bucket levels, and what was used of budgets, kept over a restart in one small JSON file.

Without it a new process would have to start every bucket empty, or risk sending a second burst on top of the one its
predecessor just sent. Levels are stored with wall-clock time and refilled for the time since, never beyond capacity;
what was used of a budget counts until its period ends. Budgets without a period, those of sessions, are too many to be
written every second and are not kept.

A file that is missing, unreadable or from the future counts as no file: buckets start empty. But a clock that went back
takes nothing from what was used of budgets: an empty budget is the whole of it, which may have been spent already.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from extproc.core.bucket import TokenBucket
from extproc.core.budget import Budget, Period
from extproc.core.capacity import Counter, Store
from extproc.core.quota import PERIODS

__all__ = ["load", "save"]


def load(path: Path, now: float) -> Mapping[str, tuple[float, float]]:
    """Per key the level it had, or what was used of it, and how many seconds ago; `now` in epoch seconds."""
    try:
        raw = json.loads(path.read_text("utf-8"))
        age = now - float(raw["at"])
        levels = {str(key): float(level) for key, level in raw["levels"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
    if not math.isfinite(age):
        return {}
    known = {key: (level, max(0.0, age)) for key, level in levels.items() if math.isfinite(level)}
    return known if age >= 0 else {key: each for key, each in known.items() if key.rpartition("/")[2] in PERIODS}


def save(path: Path, store: Store, *, now: float, clock_now: float) -> None:
    """Write all levels, whole or not at all. `now` in epoch seconds, `clock_now` on the counters' clock."""
    levels = {key: level for key, c in store.items() if (level := _level(c, clock_now)) is not None}
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(json.dumps({"at": now, "levels": levels}), "utf-8")
    draft.replace(path)


def _level(counter: Counter, now: float) -> float | None:
    if isinstance(counter, TokenBucket):
        return counter.level_at(now)
    if isinstance(counter, Budget) and counter.period is not Period.EVER:
        return counter.used_at(now)
    return None
