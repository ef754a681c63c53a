"""The overview, made once for everybody who watches it, and sent to each once a second as server-sent events.

It is made only while somebody watches or asks. A watcher gets the newest one and never an old one: who reads too slowly
misses some, and who does not read at all is dropped by the server (see server).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from math import inf

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from extproc.console.answers import encoded
from extproc.console.sources import Data

__all__ = ["Overviews", "Watching"]

log = logging.getLogger("tidegate")

EVERY_S = 1.0
MOST_WATCHERS = 50
NOTHING_NEW = b": nothing new\n\n"


class Overviews:
    """The newest overview, as JSON."""

    def __init__(self, make: Callable[[], Awaitable[Data]], every_s: float = EVERY_S) -> None:
        """make: a new one."""
        self._make = make
        self._every_s = every_s
        self._one = asyncio.Lock()
        self._newest, self._at = b"", -inf
        self._news = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None
        self.watchers = 0
        self.made = 0
        self.closed = False

    async def newest(self) -> bytes:
        """One that is less than a second old."""
        async with self._one:
            if time.monotonic() - self._at >= self._every_s:
                await self._renew()
            return self._newest

    def close(self) -> None:
        """Whoever watches is told that it is over, and nobody may any more."""
        self.closed = True
        self._news.set()
        if self._ticking is not None:
            self._ticking.cancel()

    @property
    def full(self) -> bool:
        """Whether nobody else may watch."""
        return self.closed or self.watchers >= MOST_WATCHERS

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While somebody watches."""
        self.watchers += 1
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            self.watchers -= 1
            if not self.watchers and self._ticking is not None:
                self._ticking.cancel()
                self._ticking = None

    async def events(self) -> AsyncIterator[bytes]:
        """The newest at once, then every new one, until it is over."""
        yield _event(await self.newest())
        while not self.closed:
            seen = self._at
            try:
                async with asyncio.timeout(5 * self._every_s):
                    await self._news.wait()
            except TimeoutError:
                yield NOTHING_NEW
                continue
            if self._at != seen:
                yield _event(self._newest)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                async with self._one:
                    await self._renew()
            except Exception:
                log.exception("the overview could not be made")

    async def _renew(self) -> None:
        made = await self._make()
        self._newest = await asyncio.to_thread(encoded, made)
        self._at = time.monotonic()
        self.made += 1
        news, self._news = self._news, asyncio.Event()
        news.set()


def _event(overview: bytes) -> bytes:
    return b"event: overview\ndata: " + overview + b"\n\n"


class Watching(Response):
    """The answer to somebody who watches. proven: whether it still may, asked before each overview."""

    media_type = "text/event-stream"

    def __init__(self, overviews: Overviews, proven: Callable[[], bool]) -> None:
        """Nothing is sent before the server asks for it."""
        super().__init__()
        del self.headers["content-length"]
        self._overviews, self._proven = overviews, proven

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send until one of both has enough."""
        gone = asyncio.create_task(_left(receive))
        try:
            async with self._overviews.watched():
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for event in self._overviews.events():
                    if gone.done() or not self._proven():
                        break
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
