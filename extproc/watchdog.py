"""Ends a process whose event loop hangs, because a hung gate is worse than none: Envoy refuses cleanly without it.

A thread looks for the loop's heartbeat. It counts its own ticks instead of comparing clocks, so a process that was
suspended as a whole, and wakes up with a large jump of the clock, is not taken for hung.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
from collections.abc import Callable

__all__ = ["Watchdog"]

TICK_S = 0.25
EXIT_CODE = 70


def _die() -> None:
    faulthandler.dump_traceback(sys.stderr)
    os._exit(EXIT_CODE)


class Watchdog:
    """`hung` is called in the watching thread when the loop has not run for `limit_s` seconds."""

    def __init__(self, limit_s: float, hung: Callable[[], None] = _die) -> None:
        """Nothing is watched before `start`."""
        self._ticks_allowed = max(2, round(limit_s / TICK_S))
        self._hung = hung
        self._beats = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End watching."""
        self._stopped.set()

    async def beat(self) -> None:
        """The loop's side: show that it runs, until cancelled."""
        while True:
            self._beats += 1
            await asyncio.sleep(TICK_S)

    def _watch(self) -> None:
        seen, missed = self._beats, 0
        while not self._stopped.wait(TICK_S):
            missed = 0 if self._beats != seen else missed + 1
            seen = self._beats
            if missed >= self._ticks_allowed:
                self._hung()
                return
