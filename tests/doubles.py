"""Stand-ins for tests: a clock that jumps instead of waiting, a client, capacity that suspends, an observer that keeps.

`play(scenario)` runs a coroutine in virtual time, see extproc.sim.virtual.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from extproc.core.capacity import Answer, Ask, Change, Claim, Store, Tuning
from extproc.core.events import Event
from extproc.core.request import Endpoint, Request, Session, Size
from extproc.ports import Clock, Departure, Gone, Head
from extproc.shared.memory import MemoryCapacity
from extproc.sim.virtual import Stuck, VirtualLoop, play

__all__ = [
    "FakeExchange", "HandClock", "Ledger", "Observer", "Stuck", "Suspending", "VirtualLoop", "claims", "play",
    "request",
]  # fmt: skip

T = TypeVar("T")


class HandClock:
    """A clock that stands still until it is moved, backwards too."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def time(self) -> float:
        return self.now


class Observer:
    """Keeps every event it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[T]) -> list[T]:
        """Events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]


class Ledger(MemoryCapacity):
    """Capacity in memory that keeps book: per key what was taken and never given back."""

    def __init__(self, clock: Clock, store: Store) -> None:
        super().__init__(clock, store)
        self.out: Counter[str] = Counter()
        self.takes = 0

    async def take(self, asks: Sequence[Ask]) -> list[Answer]:
        answers = await super().take(asks)
        self.takes += 1
        for answer in answers:
            for claim in answer.option.claims if answer.option else ():
                self.out[claim.key] += claim.amount
        return answers

    async def change(self, changes: Sequence[Change]) -> None:
        await super().change(changes)
        for change in changes:
            self.out[change.key] -= change.amount

    def held(self) -> dict[str, float]:
        """What is out, without what is zero but for rounding."""
        return {key: round(amount, 6) for key, amount in self.out.items() if round(amount, 6)}


class Suspending(Ledger):
    """The same across a network: every call suspends before and after its decision.

    broken_off: calls that were cancelled in the middle, so that nobody heard of what they took. Must stay zero.
    """

    immediate = False

    def __init__(self, clock: Clock, store: Store, rng: random.Random | None = None, slowest_s: float = 0.004) -> None:
        super().__init__(clock, store)
        self._rng = rng or random.Random(0)
        self._slowest_s = slowest_s
        self.broken_off = 0
        self.on_call: Callable[[], None] = lambda: None

    async def take(self, asks: Sequence[Ask]) -> list[Answer]:
        async with self._far():
            return await super().take(asks)

    async def change(self, changes: Sequence[Change]) -> None:
        async with self._far():
            await super().change(changes)

    async def tune(self, tunings: Sequence[Tuning]) -> None:
        async with self._far():
            await super().tune(tunings)

    @asynccontextmanager
    async def _far(self) -> AsyncIterator[None]:
        try:
            await self._on_its_way()
            yield
            await self._on_its_way()
        except asyncio.CancelledError:
            self.broken_off += 1
            raise

    async def _on_its_way(self) -> None:
        self.on_call()
        for _ in range(self._rng.randrange(3)):
            await asyncio.sleep(0)
        if self._rng.random() < 0.7:
            await asyncio.sleep(self._rng.uniform(0.0, self._slowest_s))


class FakeExchange:
    """A client's side of one request: says its head and body, and stays `stays_s` after it was let go.

    hold_s: how long it takes to tell it to wait. leaves_when_held: it is gone by then.
    """

    def __init__(
        self,
        head: Head | None = None,
        body: bytes = b"",
        *,
        stays_s: float = 0.0,
        hold_s: float = 0.0,
        leaves_when_held: bool = False,
    ) -> None:
        self._head = head or Head({}, bodiless=not body)
        self._body = body
        self._stays_s = stays_s
        self._hold_s = hold_s
        self._leaves_when_held = leaves_when_held
        self.holds: list[float] = []
        self.departures: list[Departure] = []
        self.answers: list[tuple[int, Mapping[str, str], bytes, str]] = []
        self.aborts: list[tuple[int, Mapping[str, str], bytes, str]] = []
        self._aborted = asyncio.Event()

    async def head(self) -> Head:
        return self._head

    async def body(self) -> bytes:
        return self._body

    async def hold(self, seconds: float) -> None:
        self.holds.append(seconds)
        await asyncio.sleep(self._hold_s)
        if self._leaves_when_held:
            raise Gone

    async def forward(self, departure: Departure) -> None:
        self.departures.append(departure)

    async def answer(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> None:
        self.answers.append((status, dict(headers), body, details))

    async def ended(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._stays_s):
                await self._aborted.wait()

    async def abort(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> None:
        self.aborts.append((status, dict(headers), body, details))
        self._aborted.set()


REQUEST = Request(
    id="r-1",
    ticket="p-1",
    tenant="default",
    lane="P1",
    route="0:m",
    model="m",
    endpoint=Endpoint.CHAT,
    stream=True,
    size=Size(60, 40),
    session=Session("s"),
    arrived=1000.0,
    deadline=None,
    wait_until=1030.0,
)


def request(**changes: Any) -> Request:
    """A chat request of 60 + 40 tokens in P1 that arrived at 1000 and waits for 30 s, but for `changes`."""
    return replace(REQUEST, **changes)


def claims(**amounts: float) -> tuple[Claim, ...]:
    """Claims by keyword, with `__` for each slash: `claims(upstream__a__slots=1)`."""
    return tuple(Claim(key.replace("__", "/"), float(amount)) for key, amount in amounts.items())
