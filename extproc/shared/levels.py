"""Bucket levels, and what was used of budgets, kept over a restart in one small JSON file.

Without it a new process would have to start every bucket empty, or risk sending a second burst on top of the one its
predecessor just sent. Levels are stored with wall-clock time and refilled for the time since, never beyond capacity.
A file that is missing, unreadable or from the future counts as no file: buckets start empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from extproc.core.bucket import TokenBucket
from extproc.core.budget import Budget
from extproc.core.capacity import Store

__all__ = ["load", "save"]


def load(path: Path, now: float) -> Mapping[str, tuple[float, float]]:
    """Per key the level it had, or what was used of it, and how many seconds ago; `now` in epoch seconds."""
    try:
        raw = json.loads(path.read_text("utf-8"))
        age = now - float(raw["at"])
        levels = {str(key): float(level) for key, level in raw["levels"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
    if not 0 <= age < math.inf:
        return {}
    return {key: (level, age) for key, level in levels.items() if math.isfinite(level)}


def save(path: Path, store: Store, *, now: float, clock_now: float) -> None:
    """Write all levels, whole or not at all. `now` in epoch seconds, `clock_now` on the buckets' clock."""
    levels = {key: c.level_at(clock_now) for key, c in store.items() if isinstance(c, TokenBucket)}
    levels |= {key: c.used_at(clock_now) for key, c in store.items() if isinstance(c, Budget)}
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(json.dumps({"at": now, "levels": levels}), "utf-8")
    draft.replace(path)
