"""How many decisions a second the queue makes, by how many requests wait and of how many tenants.

    python -m tests.load.dispatch [--seconds 1]

Each figure is the real limiter with capacity in memory. `granted`: a slot comes back, whose turn it is gets it and is
woken, and a newcomer takes its place at the end of the line and is told that it has to wait. `refused`: somebody comes
and is told by the forecast that it cannot make it. `left`: somebody leaves from the middle of the line, and a newcomer
takes its place.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from rich.console import Console
from rich.table import Table

from extproc.core.bucket import Slots
from extproc.core.capacity import Change, Claim
from extproc.core.forecast import Pace
from extproc.core.lanes import Lanes
from extproc.core.policy import Bounds, Lane, WhenBusy
from extproc.core.refusal import Rejected
from extproc.core.request import Size
from extproc.limiter import Limiter
from extproc.shared.memory import MemoryCapacity
from extproc.turn import Wants
from tests.doubles import request

QUEUED = (10, 1_000, 100_000)
TENANTS = (1, 1_000)
SLOTS = "upstream/a/slots"
WANTS = Wants(("a",), {"a": (Claim(SLOTS, 1.0),)})


class Line:
    """A lane with so many requests of so many tenants in it, and one slot that is taken."""

    def __init__(self, queued: int, tenants: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(1)
        self._tenants = tenants
        self._number = 0
        lane = Lane("P1", 0, 1e6, WhenBusy.SPILL, 1, 10**6, 10**12, 10**12)
        self.capacity = MemoryCapacity(self._loop, {SLOTS: Slots(1, 1.0)})
        pace = Pace()
        self.limiter = Limiter(
            Lanes([lane]),
            self.capacity,
            self._loop,
            lambda _: True,
            pace,
            lambda _: None,
            lambda _: 0.0,
            bounds=Bounds(10**6, 10**12, 10**12),
        )
        pace.learn_hold("a", 1e-9)
        self.running = asyncio.ensure_future(self.limiter.run())
        self.granted: asyncio.Queue[int] = asyncio.Queue()
        self.waiting = {number: asyncio.ensure_future(self.come()) for number in range(queued)}

    async def come(self, waits_s: float = 1e6) -> None:
        """One request, until it is granted."""
        self._number += 1
        number, now = self._number, self._loop.time()
        one = request(
            ticket=str(number),
            tenant=f"t{number % self._tenants}",
            lane="P1",
            size=Size(self._rng.randint(10, 2000), self._rng.randint(10, 500)),
            arrived=now,
            wait_until=now + waits_s,
        )
        await self.limiter.acquire(one, WANTS, _quiet)
        self.granted.put_nowait(number - 1)

    async def grant(self) -> None:
        """Free the slot, wait until somebody has it, and let a newcomer take its place in line."""
        await self.capacity.change((Change(SLOTS, 1.0),))
        self.limiter.kick()
        del self.waiting[await self.granted.get()]
        self.waiting[self._number] = asyncio.ensure_future(self.come())

    async def refuse(self) -> None:
        """Somebody comes who has no time."""
        try:
            await self.come(waits_s=-1.0)
        except Rejected:
            return
        raise AssertionError("it was not refused")

    async def leave(self) -> None:
        """Somebody leaves, from anywhere, and a newcomer takes its place."""
        number = self._rng.choice(list(self.waiting)) if len(self.waiting) < 1000 else self._anybody()
        task = self.waiting.pop(number)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.waiting[self._number] = asyncio.ensure_future(self.come())
        await asyncio.sleep(0)

    def _anybody(self) -> int:
        while True:
            number = self._rng.randrange(self._number)
            if number in self.waiting:
                return number

    async def stop(self) -> None:
        """Everybody leaves."""
        for task in (*self.waiting.values(), self.running):
            task.cancel()
        await asyncio.gather(*self.waiting.values(), self.running, return_exceptions=True)


async def _quiet(_: float) -> None:
    return


async def rate(step: Callable[[], Awaitable[None]], seconds: float) -> float:
    """Steps per second of CPU time, in the best of three times."""
    best = 0.0
    for _ in range(3):
        began, steps = time.process_time(), 0
        while (spent := time.process_time() - began) < seconds / 3 or not steps:
            for _ in range(20):
                await step()
            steps += 20
        best = max(best, steps / spent if spent else 0.0)
    return best


async def measure(queued: int, tenants: int, seconds: float) -> tuple[float, float, float]:
    """Grants, refusals and departures per second."""
    line = Line(queued, tenants)
    await asyncio.sleep(0)  # everybody comes and stands in line in the first turn of the loop
    assert len(line.limiter.lanes) == queued
    try:
        return await rate(line.grant, seconds), await rate(line.refuse, seconds), await rate(line.leave, seconds)
    finally:
        await line.stop()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU time per figure")
    options = parser.parse_args()
    table = Table("queued", "tenants", "granted/s", "refused/s", "left/s", title="decisions per second of CPU time")
    for tenants in TENANTS:
        for queued in QUEUED:
            found = asyncio.run(measure(queued, tenants, options.seconds))
            table.add_row(f"{queued:,}", f"{tenants:,}", *(f"{round(figure, -2):,.0f}" for figure in found))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
