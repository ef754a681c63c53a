"""The load generator: keep-alive HTTP/1.1 connections that each send the next request when they have their answer.

A bare asyncio protocol, for the generator shares the cores with what it measures. It reads just enough of an answer to
know its status, when its first byte came, and where it ends.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_END = b"0\r\n\r\n"


@dataclass(slots=True)
class Shot:
    """What one measurement saw: seconds to the first byte of each answer, to its end, and answers that were no 200."""

    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    failed: int = 0
    seconds: float = 0.0

    @property
    def answers(self) -> int:
        """How many there were."""
        return len(self.total_s)


class _Connection(asyncio.Protocol):
    def __init__(self, request: bytes, shot: Shot, until: float) -> None:
        self._request = request
        self._shot = shot
        self._until = until
        self._tail = b""
        self._left = -1
        self._first = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self._shot.failed += 1
            self.ended.set_result(None)

    def _send(self) -> None:
        self._tail, self._first = b"", 0.0
        self._began = time.perf_counter()
        self._transport.write(self._request)

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
            self._shot.failed += 1
        length = _LENGTH.search(self._tail, 0, head + 2)
        self._left = int(length[1]) - (len(self._tail) - head - 4) if length else -1
        self._tail = self._tail[-len(_END) :]
        return True

    def _answered(self) -> None:
        now = time.perf_counter()
        self._shot.first_s.append(self._first - self._began)
        self._shot.total_s.append(now - self._began)
        if now < self._until:
            self._send()
        else:
            self.ended.set_result(None)
            self._transport.close()


async def fire(port: int, request: bytes, connections: int, seconds: float) -> Shot:
    """Send `request` over `connections` for `seconds`; returns when the last answer is there."""
    shot = Shot()
    loop, began = asyncio.get_running_loop(), time.perf_counter()

    async def one() -> None:
        _, connection = await loop.create_connection(
            lambda: _Connection(request, shot, began + seconds), "127.0.0.1", port
        )
        await connection.ended

    await asyncio.gather(*(one() for _ in range(connections)))
    shot.seconds = time.perf_counter() - began
    return shot
