"""All that measures, joined: the listener, the process, the pages, and what is sent to a collector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from extproc.core.events import Event
from extproc.core.request import Request
from extproc.settings import Settings
from extproc.shapes import Metered, Use
from extproc.telemetry.conventions import Conventions
from extproc.telemetry.heaviest import Row
from extproc.telemetry.measures import Measures
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.otlp import Push, headers_of
from extproc.telemetry.process import Process

__all__ = ["Meter"]

GATHER_S = 5.0
"""The state has to be told to the sending thread in this time, or is not sent."""
LAST_S = 2.0
"""So long a service that ends waits until its last numbers are sent."""


class Meter:
    """An Observer. Ask `watch` to run as a task, and `follow` after each reload."""

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float],
        instance: str,
        trace: Callable[[Request], str] = lambda _: "",
    ) -> None:
        """instance: tells this process from others. trace: see Measures. OtlpError for an unusable headers_file."""
        self.measures = Measures(Conventions.of(settings), clock, settings.telemetry.tenants, trace)
        self.process = Process()
        self._metrics = Metrics(self.measures, self.process, instance)
        self.kind, self.page, self.data = self._metrics.kind, self._metrics.page, self._metrics.data
        otlp = settings.telemetry.otlp
        self._otlp = otlp if otlp is not None and otlp.metrics else None
        self._headers = {} if self._otlp is None else headers_of(self._otlp)
        self._push: Push | None = None

    def __call__(self, event: Event) -> None:
        """Measure what it tells."""
        self.measures(event)

    def follow(self, settings: Settings) -> None:
        """Go by other settings from now on: models may have come or gone."""
        self.measures.follow(Conventions.of(settings))

    def state(self) -> Metered:
        """How the process does; the tenants and sessions that used most of late, and all others; as plain data."""
        tenants, sessions = self.measures.tenants.told(), self.measures.sessions.told()
        return {
            "process": self.process.state(),
            "tenants": [{"name": name, **_plain(row)} for name, row in tenants],
            "sessions": [{"tenant": tenant, "id": session, **_plain(row)} for (tenant, session), row in sessions],
            "rest": {
                "tenants": _plain(self.measures.tenants.rest(tenants)),
                "sessions": _plain(self.measures.sessions.rest(sessions)),
            },
        }

    def start(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Begin to send, where there is a collector. state: of the service; it is asked in this loop alone."""
        if self._otlp is None:
            return
        loop = asyncio.get_running_loop()

        def ask(asked: Future[Mapping[str, Any]]) -> None:
            try:
                asked.set_result(state())
            except Exception as error:  # noqa: BLE001 - who asked is told
                asked.set_exception(error)

        def told() -> Mapping[str, Any]:
            asked: Future[Mapping[str, Any]] = Future()
            loop.call_soon_threadsafe(ask, asked)  # a coroutine would be left behind by a loop that ends
            return asked.result(GATHER_S)

        self._push = Push(self._otlp, self._headers, lambda: self.data(told()))

    async def watch(self) -> None:
        """See whether the loop is late, until cancelled."""
        await self.process.watch()

    async def stop(self) -> None:
        """Send the last numbers, and send no more. Returns in a few seconds, whatever the collector does."""
        if self._push is not None:
            push, self._push = self._push, None
            await asyncio.to_thread(push.shutdown, LAST_S)


def _plain(row: Row) -> Use:
    return {"requests": row.requests, "tokens": row.tokens, "usd": round(row.usd, 6), "refused": row.refused}
