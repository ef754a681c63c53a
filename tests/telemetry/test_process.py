"""How the process itself does."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress

import psutil
import pytest

from extproc.telemetry import process
from extproc.telemetry.process import LOOK_S, RECENT_S, Process


def test_memory_cpu_and_files_are_those_of_the_process() -> None:
    """As another program counts them, about."""
    told, other = Process().state(), psutil.Process()
    assert told["pid"] == os.getpid()
    assert told["memory_bytes"] == pytest.approx(other.memory_info().rss, rel=0.2)
    assert 0 < told["cpu_s"] <= sum(other.cpu_times()[:2]) + 0.1
    assert told["open_files"] == pytest.approx(other.num_fds(), abs=2)
    assert told["max_files"] >= told["open_files"]
    assert told["started_at"] == pytest.approx(other.create_time(), abs=2.0)


def test_what_cannot_be_read_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on Linux."""
    monkeypatch.setattr(process, "STATM", "/nowhere/statm")
    monkeypatch.setattr(process, "FILES", "/nowhere/fd")
    told = Process().state()
    assert told["memory_bytes"] is told["open_files"] is None


def test_a_loop_that_is_late_is_noticed() -> None:
    """The time that somebody keeps it is told, in a bucket and as the worst."""

    async def keep_it(one: Process) -> None:
        watching = asyncio.create_task(one.watch())
        await asyncio.sleep(0)
        time.sleep(LOOK_S + 0.3)  # noqa: ASYNC251 - that is what is noticed
        while not one.lag.shown().count:  # noqa: ASYNC110 - a look now and then will do
            await asyncio.sleep(0.01)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

    one = Process()
    asyncio.run(keep_it(one))
    assert one.lag.shown().sum >= 0.29
    assert one.state()["loop_lag_s"] >= 0.29


def test_the_worst_is_forgotten_after_two_minutes_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(process, "monotonic", lambda: now)
    one = Process()
    one.late(2.0)
    now += RECENT_S
    one.late(0.1)
    assert one.state()["loop_lag_s"] == 2.0, "it was not longer ago than a minute"
    now += RECENT_S
    one.late(0.05)
    assert one.state()["loop_lag_s"] == 0.1
    assert one.lag.shown().count == 3
