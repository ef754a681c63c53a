"""What the state page says of every counter."""

from __future__ import annotations

import json
from math import inf

from extproc.console.state import describe
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget, Period
from extproc.core.capacity import Counter
from extproc.core.lanes import Lanes
from extproc.core.policy import KvRules
from extproc.core.shares import Standing
from extproc.core.watermark import Reading, Watermark


def told(counter: Counter, now: float = 0.0) -> dict[str, object]:
    """As plain data that JSON knows."""
    found = describe(Lanes([]), {"k": counter}, now)["counters"]["k"]
    return json.loads(json.dumps(found, allow_nan=False))  # type: ignore[no-any-return]


def test_buckets_and_slots() -> None:
    """An endless number of slots has no limit to tell."""
    assert told(TokenBucket(10, 100, 50, 0.0), 1.0) == {"level": 60, "capacity": 100, "per_second": 10}
    assert told(Slots(3, 2.0)) == {"used": 2, "limit": 3}
    assert told(Slots(inf, 2.0)) == {"used": 2, "limit": None}


def test_gates() -> None:
    """How full, by what is known; without a reading there is no saturation."""
    gate = Watermark(KvRules(high=0.8, low=0.6, tokens=1000))
    gate.take(100, 0.0)
    blind = {"used": 100, "requests": 1, "fill": 0.1, "cache": 1000, "saturation": None, "instances": 1}
    blind |= {"unseen": 100, "stale_s": None}
    assert told(gate) == blind
    gate.observe(Reading(0.4, instances=2, age_s=0.25), 1.0)
    seen = {"fill": 0.4, "saturation": 0.5, "instances": 2, "unseen": 0, "stale_s": 0.25}
    assert told(gate, 1.0) == blind | seen


def test_budgets() -> None:
    """What was spent of how much, and for how long it has to do."""
    assert told(Budget(5, Period.HOUR, used=2), 20.0) == {"spent": 2, "budget": 5, "ends_in_s": 3580}
    assert told(Budget(5, used=2)) == {"spent": 2, "budget": 5, "ends_in_s": None}


def test_what_does_not_apply_is_left_out() -> None:
    """Set-asides while somebody waits, pauses while they last, shadow where it is on."""
    standings = {"P2": Standing(0.1, 5.0, kept=0.0, owed=1.23456)}
    bucket = TokenBucket(10, 100, 50, 0.0, shadow=True, closed_until=2.0, lanes=standings)
    assert told(bucket).items() >= {"closed_s": 2, "shadow": True}.items()
    assert told(bucket)["owed"] == {"P2": 1.235}
    assert told(bucket, 5.0).keys() == {"level", "capacity", "per_second", "shadow"}
    for counter in (Slots(1, lanes=standings), Watermark(KvRules(), lanes=standings)):
        assert told(counter)["owed"] == {"P2": 1.235}
