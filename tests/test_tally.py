"""What the live line and the state page count."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from extproc.core.events import Settled
from extproc.core.request import Usage
from extproc.telemetry.tally import Tally
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
