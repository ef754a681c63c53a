"""The load generator: keep-alive HTTP/1.1 connections, in a closed loop (`fire`) or at a given rate (`pace`).

A bare asyncio protocol, for the generator shares the cores with what it measures. It reads just enough of an answer to
know its status, when its first byte came, and where it ends.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_END = b"0\r\n\r\n"


@dataclass(slots=True)
class Shot:
    """What one measurement saw: seconds to the first byte of each answer, to its end, and what was no whole 200."""

    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def answers(self) -> int:
        """How many there were."""
        return len(self.total_s)


class _Connection(asyncio.Protocol):
    """Sends when told to; `idle` is called with itself after every answer."""

    def __init__(self, requests: Iterator[bytes], shot: Shot, idle: Callable[[_Connection], None]) -> None:
        self._requests = requests
        self._shot = shot
        self._idle = idle
        self._tail = b""
        self._left = -1
        self._first = 0.0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        if not self.closed.done():
            self._shot.failed["closed"] += 1
            self.closed.set_result(None)

    def send(self) -> None:
        """The next request."""
        self._tail, self._first = b"", 0.0
        self._began = time.perf_counter()
        self._transport.write(next(self._requests))

    def close(self) -> None:
        """For good."""
        if not self.closed.done():
            self.closed.set_result(None)
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        if not self._first:
            self._tail += data
            if not self._head():
                return
        elif self._left >= 0:
            self._left -= len(data)
        else:
            self._tail = (self._tail + data)[-len(_END) :]
        if self._left == 0 or (self._left < 0 and self._tail.endswith(_END)):
            self._answered()

    def _head(self) -> bool:
        head = self._tail.find(b"\r\n\r\n")
        if head < 0 or len(self._tail) == head + 4:
            return False
        self._first = time.perf_counter()
        if not self._tail.startswith(b"HTTP/1.1 200"):
            self._shot.failed[self._tail.partition(b"\r\n")[0].decode("latin-1")] += 1
        length = _LENGTH.search(self._tail, 0, head + 2)
        self._left = int(length[1]) - (len(self._tail) - head - 4) if length else -1
        self._tail = self._tail[-len(_END) :]
        return True

    def _answered(self) -> None:
        self._shot.first_s.append(self._first - self._began)
        self._shot.total_s.append(time.perf_counter() - self._began)
        self._idle(self)


async def fire(port: int, requests: Sequence[bytes], connections: int, seconds: float) -> Shot:
    """Send over `connections`, each as soon as it has its answer; returns when the last answer is there."""
    shot, bodies = Shot(), cycle(requests)
    began = time.perf_counter()

    def idle(connection: _Connection) -> None:
        if time.perf_counter() < began + seconds:
            connection.send()
        else:
            connection.close()

    opened = [await _connect(port, bodies, shot, idle) for _ in range(connections)]
    for connection in opened:
        connection.send()
    await asyncio.gather(*(connection.closed for connection in opened))
    shot.seconds = time.perf_counter() - began
    return shot


async def pace(port: int, requests: Sequence[bytes], rate: float, seconds: float) -> Shot:
    """Send `rate` a second at random times, over as many connections as it takes; the same times in every call."""
    shot, bodies, chance = Shot(), cycle(requests), random.Random(1)
    free: list[_Connection] = []
    opened: list[_Connection] = []
    began = due = time.perf_counter()
    while (due := due + chance.expovariate(rate)) < began + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if not free:
            opened.append(await _connect(port, bodies, shot, free.append))
            free.append(opened[-1])
        free.pop().send()
    while len(free) < len(opened) and not shot.failed:  # noqa: ASYNC110 - a look now and then costs the least
        await asyncio.sleep(0.01)
    for connection in opened:
        connection.close()
    shot.seconds = time.perf_counter() - began
    return shot


async def _connect(port: int, bodies: Iterator[bytes], shot: Shot, idle: Callable[[_Connection], None]) -> _Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: _Connection(bodies, shot, idle), "127.0.0.1", port)
    return connection
