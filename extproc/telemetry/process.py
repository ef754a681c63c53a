"""How this process itself is doing: whether its event loop is late, its CPU time, memory and open files."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from math import inf
from pathlib import Path
from time import monotonic

from extproc import shapes
from extproc.telemetry.catalog import BY_NAME
from extproc.telemetry.distribution import Distribution

__all__ = ["Process"]

LOOK_S = 0.1
"""How often the loop is asked whether it is late. It costs about ten microseconds."""
RECENT_S = 60.0
"""The worst of so long is told."""
COUNTED_S = 5.0
"""For so long a number of open files counts: there may be very many to look through."""
STATM, FILES = "/proc/self/statm", "/proc/self/fd"


class Process:
    """Ask `watch` to run as a task; `state` tells."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self.lag = Distribution(BY_NAME["tidegate.loop.lag"].buckets)
        self._worst, self._worst_before = 0.0, 0.0
        self._began = monotonic()
        self._files: tuple[float, int | None] = (-inf, None)

    async def watch(self) -> None:
        """Sleep, and see how much later than asked for that ends, until cancelled."""
        while True:
            due = monotonic() + LOOK_S  # the loop's own clock may tell whole milliseconds only
            await asyncio.sleep(LOOK_S)
            self.late(max(0.0, monotonic() - due))

    def late(self, seconds: float) -> None:
        """The loop was late by so much."""
        self.lag.record(seconds)
        now = monotonic()
        if now - self._began >= RECENT_S:
            self._began, self._worst_before, self._worst = now, self._worst, 0.0
        self._worst = max(self._worst, seconds)

    def state(self) -> shapes.Process:
        """All of it as plain data, in seconds, bytes and numbers. What cannot be read is None.

        loop_lag_s: the worst of the last minute or two.
        """
        used = resource.getrusage(resource.RUSAGE_SELF)
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return {
            "pid": os.getpid(),
            "started_at": STARTED_AT,
            "cpu_s": round(used.ru_utime + used.ru_stime, 3),
            "memory_bytes": _resident(),
            "open_files": self._open_files(),
            "max_files": None if most == resource.RLIM_INFINITY else most,
            "loop_lag_s": round(max(self._worst, self._worst_before), 4),
        }

    def _open_files(self) -> int | None:
        now = monotonic()
        if now - self._files[0] >= COUNTED_S:
            self._files = now, _open_files()
        return self._files[1]


def _resident() -> int | None:
    """Bytes in RAM. Only Linux tells."""
    try:
        return int(Path(STATM).read_bytes().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None


def _open_files() -> int | None:
    try:
        return len(os.listdir(FILES)) - 1  # noqa: PTH208 - but for the one that is listed
    except OSError:
        return None


def _started_at() -> float:
    """When this process started, in epoch seconds: as Linux tells, else when this was loaded."""
    try:
        ticks = int(Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()[19])
        return round(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK"), 2)
    except (OSError, ValueError, IndexError, AttributeError):
        return round(time.time(), 2)


STARTED_AT = _started_at()
