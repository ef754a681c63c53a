"""Virtual time: an event loop whose clock jumps to the next timer instead of waiting for it.

`play(scenario)` runs a coroutine in a loop of its own, so an hour takes as long as its events take. Nothing is read
from the machine's clock and nothing from the network, so the same program with the same seeds does the same thing at
the same times, always. When every task waits for something that no timer will bring, it raises `Stuck`.

Deliberately not here: threads. What one hands back is only seen when a timer or another task turns the loop.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["Stuck", "VirtualLoop", "play"]

T = TypeVar("T")

START_S = 1000.0
SPINS_MAX = 100_000
"""More turns of the loop than this without a step in time are a program that will never end."""
_NOTHING: list[Any] = []


class Stuck(Exception):  # noqa: N818 - what it says, not what went wrong
    """Nothing will ever happen any more, or so much at once that time stands still."""


class _Jumping(selectors.SelectSelector):
    """Never waits: moves the loop's time to its next timer instead."""

    loop: VirtualLoop
    spins = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck
        if timeout > 0:
            self.loop.jump()
            self.spins = 0
            return _NOTHING
        self.spins += 1
        if self.spins > SPINS_MAX:
            self.spins = 0  # what is left can still be wound up
            raise Stuck
        return _NOTHING


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when there is nothing else to do."""

    def __init__(self) -> None:
        """Start at a time that is nobody's zero."""
        selector = _Jumping()
        selector.loop = self
        self.now = START_S
        super().__init__(selector)

    def time(self) -> float:
        """Seconds; see asyncio."""
        return self.now

    def jump(self) -> None:
        """To the next timer."""
        self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined] # noqa: SLF001

    def timers(self) -> list[asyncio.TimerHandle]:
        """What is still scheduled."""
        return [timer for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]


def play(scenario: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `scenario` in a virtual loop of its own, and return what it returns."""

    async def main() -> T:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)  # noqa: S101 - the factory below makes it
        return await scenario(loop)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
