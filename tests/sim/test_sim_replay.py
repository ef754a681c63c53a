"""A short replay for real: a private stack, twice as much as its first upstream can take."""

import json
from pathlib import Path

import pytest

from extproc.sim.gauges import Target
from extproc.sim.plan import Mix
from extproc.sim.replay import Options, ReplayError, replay
from extproc.sim.scene import Scene
from extproc.sim.trace import TraceError

SECONDS = 4
STAGE = Scene(overload=2, burst_s=2)


@pytest.fixture
def trace(tmp_path) -> Path:
    """Twenty requests a second of about 500 tokens, for a minute."""
    path = tmp_path / "trace.csv"
    rows = [f"{i / 20},{300 + 7 * (i % 50)},{20 + i % 30}" for i in range(1200)]
    path.write_text("\n".join(["seconds,prompt_tokens,output_tokens", *rows]))
    return path


@pytest.mark.e2e
@pytest.mark.slow
def test_twice_too_much_is_queued_and_never_refused_by_the_provider(trace, tmp_path):
    """Everybody gets an answer or a reason, urgent ones first; no limit is passed, and everything comes back."""
    lines = []
    options = Options(trace, speed=1, seconds=SECONDS, stage=STAGE, tenants=Mix.parse("a,b"), workdir=tmp_path / "run")
    report = replay(options, lines.append)
    assert report.all.offered == 20 * SECONDS
    assert report.all.served + sum(report.all.shed.values()) == report.all.offered, report.all
    primary = report.providers["primary"]
    assert primary.refused_429 == 0
    assert primary.busiest_minute <= primary.allowed
    assert report.providers["local"].most_in_flight <= 4
    assert report.held == report.filling == []
    assert report.lanes["P0"].waited_s.p95 < report.lanes["P2"].waited_s.p95
    assert report.all.tokens > 0
    told = [json.loads(line) for line in (tmp_path / "run" / "service.log").read_text().splitlines()]
    assert {line["level"] for line in told} <= {"info"}, told


def test_a_trace_that_cannot_be_read_starts_nothing(tmp_path):
    """No stack is started for a mistake."""
    with pytest.raises(TraceError, match="No such file"):
        replay(Options(tmp_path / "none.csv", stage=STAGE))


def test_an_empty_window_is_an_error(tmp_path):
    """There is nothing to send."""
    path = tmp_path / "late.csv"
    path.write_text("seconds,prompt_tokens,output_tokens\n100,1,1\n")
    with pytest.raises(ReplayError, match="no request in the first 10 s"):
        replay(Options(path, speed=1, seconds=10))


def test_a_private_stack_has_three_lanes(trace):
    """Another name is a mistake, not a load of refused requests."""
    with pytest.raises(ReplayError, match="lane 'P9': a private stack has P0, P1, P2"):
        replay(Options(trace, stage=STAGE, lanes=Mix.parse("P1,P9")))


def test_nobody_to_send_to_is_an_error(trace):
    """Told before anything is sent."""
    with pytest.raises(ReplayError, match="does not answer"):
        replay(Options(trace, target=Target("http://127.0.0.1:9")))
