"""What the live line and the state page count."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from extproc.core.breaker import Sign, State
from extproc.core.events import (
    Admitted,
    BreakerMoved,
    BudgetUsed,
    LimitsMoved,
    Observed,
    Probed,
    Retried,
    Scraped,
    Settled,
    Shadowed,
    SizesMoved,
)
from extproc.core.refusal import Reason
from extproc.core.request import Usage
from extproc.telemetry.tally import MAX_NAMES, Tally
from extproc.up import summary
from tests.doubles import request


def settled(status: int, usage: Usage | None = None) -> Settled:
    return Settled(request(), "a", 1, status, usage, 0.0)


def state(tally: Tally) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "waiting": {"P0": {"requests": 2}, "P1": {"requests": 0}},
            "counters": {
                "upstream/a/*/total": {"level": 25.0, "capacity": 100.0},
                "upstream/a/*/requests": {"level": 1.0, "capacity": 4.0},
                "upstream/b/slots": {"used": 3.0, "limit": 8},
            },
            "flying": 7,
            "breakers": {"a": {"state": "open"}, "b": {"state": "closed"}},
            "tally": tally.snapshot(),
        }
    )


@pytest.mark.parametrize(
    ("status", "failed"), [(503, {"upstream_failed": 1}), (504, {"deadline_passed": 1}), (400, {}), (200, {}), (0, {})]
)
def test_answers_that_failed_are_counted_by_reason(status: int, failed: dict[str, int]) -> None:
    """Every upstream failed, or too late; a client's own error and a client that left are neither."""
    tally = Tally()
    tally(settled(status))
    assert tally.snapshot()["failed"] == failed


def test_usage_that_nobody_reported_is_counted_as_unknown() -> None:
    """Unknown is not zero: an answer without usage shows, one that used nothing does not."""
    tally = Tally()
    tally(settled(200))
    tally(settled(200, Usage(0, 0)))
    assert (tally.snapshot()["unknown_usage"], tally.snapshot()["served"]) == (1, {"a": 2})


def test_the_line_tells_what_a_second_brought_and_what_is_left() -> None:
    """Waiting apart from running, failures by reason, free room of buckets and slots, and who is sick."""
    tally = Tally()
    before = state(tally)
    tally(settled(200, Usage(1, 1)))
    tally(settled(503))
    line = summary(before, state(tally))
    for part in (
        "waiting P0 2 P1 0",
        "running 5",
        "served a 1",
        "failed upstream_failed 1",
        "free a 25% b 5/8 slots",
        "breakers a open",
    ):
        assert part in line


def test_forecasts_are_compared_with_what_came() -> None:
    """By ratio and lane; a forecast of next to nothing is not compared."""
    tally = Tally()
    for waited_s, predicted_s in ((4.0, 10.0), (10.0, 10.0), (30.0, 10.0), (5.0, 0.01), (0.0, None)):
        tally(Admitted(request(lane="P1"), ("a",), waited_s, predicted_s))
    assert tally.snapshot()["forecasts"] == {"P1": {"under half": 1, "0.8-1.25": 1, "over twice": 1}}
    assert tally.snapshot()["admitted"] == {"P1": 5}


def test_what_only_watches_is_counted_apart() -> None:
    """Observe mode by reason, shadow limits by name, limits that moved, engines; names from outside stay bounded."""
    tally = Tally()
    tally(Observed(request(), None))
    tally(Observed(request(), Reason.QUEUE_TIMEOUT))
    tally(LimitsMoved("a", "upstream/a/*/total", "limit 100 -> 50"))
    tally(Retried(request(tenant="t"), took="held"))
    tally(Scraped("a", 0.5, preemptions=2))
    for n in range(MAX_NAMES + 5):
        tally(Shadowed(request(), f"tenant/{n}/total"))
    seen = tally.snapshot()
    assert seen["observed"] == {"held": 1, "queue_timeout": 1}
    assert (seen["limits_moved"], seen["preemptions"]) == ({"a": 1}, {"a": 2})
    assert seen["retried"] == {"t": 1}
    assert (len(seen["shadowed"]), seen["shadowed"]["other"]) == (MAX_NAMES + 1, 5)


def test_money_is_summed_where_it_was_spent_and_unknown_prices_are_told() -> None:
    """Unpriced is not free."""
    tally = Tally()
    for cost_usd in (0.25, 0.5, None, 0.0):
        tally(Settled(request(), "a", 1, 200, Usage(1, 1), 0.0, cost_usd=cost_usd))
    assert (tally.snapshot()["spent_usd"], tally.snapshot()["unpriced"]) == ({"a": 0.75}, 1)


def test_canaries_are_booked_apart() -> None:
    """Their tokens and dollars are nobody's, and none of what was served."""
    tally = Tally()
    tally(Probed("a", ok=True, seconds=0.1, tokens=14, cost_usd=0.002))
    tally(Probed("a", ok=True, seconds=0.1, tokens=14, cost_usd=0.002))
    tally(Probed("a", ok=False, seconds=5.0))
    seen = tally.snapshot()
    assert (seen["probes"], seen["probe_tokens"], seen["probe_usd"]) == (
        {"a:ok": 2, "a:failed": 1},
        {"a": 28},
        {"a": 0.004},
    )
    assert (seen["tokens"], seen["spent_usd"]) == ({}, {})


def test_every_transition_is_kept_as_it_was_told() -> None:
    """With cause, numbers and requests, newest last; so many of them and no more."""
    tally = Tally()
    for _ in range(99):
        tally(BreakerMoved("b", State.CLOSED, State.OPEN, "again"))
    tally(BreakerMoved("a", State.CLOSED, State.OPEN, "status 402", Sign.TERMINAL, {"rest_s": 900.0}, ("r1",)))
    tally(SizesMoved("a", "16000-63999", shut=False, cause="rested"))
    *_, moved, sizes = alerts = tally.snapshot()["alerts"]
    assert len(alerts) == 50
    told = {"upstream": "a", "before": "closed", "after": "open", "cause": "status 402", "sign": "terminal"}
    assert moved == told | {"at": moved["at"], "numbers": {"rest_s": 900.0}, "requests": ("r1",)}
    assert (sizes["sizes"], sizes["shut"]) == ("16000-63999", False)


def test_a_budget_that_runs_out_is_an_alert() -> None:
    """On the state page, with its numbers."""
    tally, used = Tally(), BudgetUsed("upstream/a/usd_day", 8.1, 10.0, 3600.0)
    tally(used)
    [alert] = tally.snapshot()["alerts"]
    told = {"key": "upstream/a/usd_day", "used": 8.1, "limit": 10.0, "ends_in_s": 3600.0}
    assert alert == told | {"at": alert["at"]}
