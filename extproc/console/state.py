"""The state page: what waits, what flies, how full every bucket is, which breaker is open, as plain data.

Counters of sessions are not shown, there may be 100,000: see sessions. Of tenants that nobody listed some are, after
all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import isfinite
from typing import Any

from extproc import shapes
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget
from extproc.core.capacity import Counter, Store
from extproc.core.lanes import Lanes
from extproc.core.watermark import Watermark
from extproc.shapes import Backlog, Counted

__all__ = ["describe"]

MOST_COUNTERS = 2000


def describe(lanes: Lanes, store: Store, now: float, first: Iterable[str] = ()) -> Counted:
    """Lanes, buckets and slots as plain data. Units: requests, tokens, bytes, seconds.

    first: counters that are shown before others, of which there may be too many.
    """
    others = (key for key in store if not key.startswith("session/"))
    named = dict.fromkeys((*(key for key in first if key in store), *islice(others, MOST_COUNTERS)))
    counters = {key: _counter(store[key], now) for key in islice(named, MOST_COUNTERS)}
    waiting: dict[str, Backlog] = {
        name: {"requests": backlog.requests, "tokens": backlog.tokens, "bytes": backlog.bytes}
        for name, backlog in lanes.backlogs.items()
    }
    return {"waiting": waiting, "counters": counters}


def _counter(counter: Counter, now: float) -> shapes.Counter:
    """One counter. What does not apply is left out: pauses that are over, lanes that are owed nothing, no shadow."""
    told: Any
    match counter:
        case TokenBucket(rate=rate, capacity=capacity):
            told = {"level": round(counter.level_at(now), 3), "capacity": capacity, "per_second": rate}
        case Slots(used=used, limit=limit):
            told = {"used": used, "limit": _finite(limit)}
        case Watermark(booked=booked, held=held):
            told = {"used": booked, "requests": held, "fill": round(counter.fill(now), 4), "cache": counter.cache}
            told |= {"saturation": _rounded(counter.saturation(now)), "instances": counter.instances}
            told["stale_s"] = _finite(round(now - counter.asked, 3))
            told["unseen"] = counter.since  # tokens let go that the last reading may not show
        case Budget(limit=limit):
            spent = round(counter.used_at(now), 6)
            told = {"spent": spent, "budget": limit, "ends_in_s": _finite(counter.ends_in(now))}
    owed = {} if isinstance(counter, Budget) else counter.owed(now)
    if owed:
        told["owed"] = {lane: round(units, 3) for lane, units in owed.items()}
    if counter.closed_until > now:
        told["closed_s"] = _finite(counter.closed_until - now)
    if counter.shadow:
        told["shadow"] = True
    found: shapes.Counter = told
    return found


def _finite(number: float) -> float | None:
    """JSON knows no infinity."""
    return number if isfinite(number) else None


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 4)
