"""What a service lets others see of itself, joined here: who listens to its events, and what is told when asked.

`Listeners` is made before those who announce anything, `Sight` when all is there that something can be told of.

Deliberately not here: who may look and act (console), and what an overview says (telemetry).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from extproc.admission import Admission
from extproc.console import state
from extproc.console.sources import Sources
from extproc.core.events import Event
from extproc.core.lanes import Queue
from extproc.levers import Levers
from extproc.ports import Observer
from extproc.reloading import Reloading
from extproc.settings import Settings
from extproc.settings.public import public
from extproc.shapes import LaneBounds, Overview, Row, ServiceState
from extproc.telemetry.conventions import Conventions
from extproc.telemetry.dossiers import Dossiers
from extproc.telemetry.explain import explain, summary
from extproc.telemetry.history import STEP_S, History
from extproc.telemetry.log import Logging, level_of
from extproc.telemetry.meter import Meter
from extproc.telemetry.overview import MOST_RECENT, Seen, overview
from extproc.telemetry.sampling import NONE, Sampling
from extproc.telemetry.tally import Tally
from extproc.waiting import oldest_s, standing

if TYPE_CHECKING:
    from extproc.telemetry.traces import Traces

__all__ = ["Listeners", "Sight", "traced"]

VERSION = metadata.version("tidegate")


class Listeners:
    """All who listen to the events of one service; see `observe`."""

    def __init__(self, settings: Settings, clock: Callable[[], float], process: str, *, telemetry: bool = True) -> None:
        """process: tells this one from others. OtlpError where the collector's headers cannot be read.

        telemetry: whether requests are measured, remembered and logged at all; without it only counts are kept, so that
        what it costs can be measured.
        """
        self._clock = clock
        self._process = process
        self.dossiers = Dossiers(settings.telemetry.requests, clock)
        self.sampled = Sampling(settings.telemetry.trace_sample) if traced(settings) else NONE
        level = level_of(os.environ)
        self.logging = Logging(settings.telemetry.log, self.dossiers, override=level, trace=self.sampled)
        self.tally, self.history = Tally(), History(clock)
        self.meter = Meter(settings, clock, process, self.sampled)
        listeners: tuple[Observer, ...] = (self.dossiers, self.meter, self.logging, self.history) if telemetry else ()
        self._all: tuple[Observer, ...] = (self.tally, *listeners)
        self._traces = self._tracing(settings, self.sampled) if isinstance(self.sampled, Sampling) else None

    def observe(self, event: Event) -> None:
        """Tell every listener."""
        for hear in self._all:
            hear(event)

    def follow(self, settings: Settings) -> None:
        """Go by other settings from now on."""
        self.logging.follow(settings.telemetry.log)
        self.meter.follow(settings)
        if self._traces is not None:
            self._traces.follow(Conventions.of(settings))

    def duties(self) -> list[Coroutine[Any, Any, None]]:
        """What they have to do beside listening, until cancelled."""
        return [self.meter.watch(), *([self._traces.run()] if self._traces else [])]

    async def stop(self) -> None:
        """Send what is still to be sent. Takes a few seconds at most."""
        await asyncio.gather(self.meter.stop(), *([self._traces.close()] if self._traces else []))

    def _tracing(self, settings: Settings, sampling: Sampling) -> Traces:
        """Spans are made from here on. Their library is loaded only where they are. OtlpError for unusable headers."""
        from extproc.telemetry.traces import Sending, Traces  # noqa: PLC0415 - see there

        otlp = settings.telemetry.otlp
        assert otlp is not None  # noqa: S101 - who asks has looked
        traces = Traces(sampling, Conventions.of(settings), Sending(otlp), self._clock, self._process)
        self.dossiers.ended.append(traces.hear)
        return traces


class Sight:
    """What a service tells of itself, as plain data."""

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float],
        listeners: Listeners,
        admission: Admission,
        reloading: Reloading,
        levers: Levers,
    ) -> None:
        """The service began at this moment."""
        self._settings = settings
        self._clock = clock
        self._began = clock()
        self._listeners = listeners
        self._admission = admission
        self._reloading = reloading
        self._levers = levers

    def follow(self, settings: Settings) -> None:
        """Other settings hold from now on."""
        self._settings = settings

    def state(self) -> ServiceState:
        """Everything an operator or a test may want to see."""
        admission, now = self._admission, self._clock()
        return {
            **state.describe(admission.lanes, admission.capacity.levels(), now, admission.durable()),
            "breakers": admission.breakers.state(),
            "pacing": admission.pacing.state(),
            "flying": len(admission.flights),
            "unsettled": admission.flights.unsettled,
            "draining": admission.limiter.draining,
            "config": self._reloading.told.state(),
            "callers": admission.allowances.state(),
            "tally": self._listeners.tally.snapshot(),
            "lanes": {name: _lane(queue, now) for name, queue in admission.lanes.queues.items()},
            **self._listeners.meter.state(),
            "levers": self._levers.state(),
        }

    def explain(self, name: str) -> dict[str, Any] | None:
        """All that is known of a request, by its id or ticket; None when nothing is, or nothing any more."""
        dossier = self._listeners.dossiers.of(name)
        if dossier is None:
            return None
        request = dossier.request
        waits = dossier.state == "waiting" and request is not None
        place = self._admission.limiter.standing(request) if request and waits else None
        trace = self._listeners.sampled(request) if request else ""
        return explain(dossier, asdict(place) if place else None, self._clock(), trace)

    async def overview(self) -> Overview:
        """What page, terminal and bundle show. The console asks for it at most once a second, while somebody looks."""
        admission, now = self._admission, self._clock()
        rests = {name: admission.breakers.rests_until(name) for name in admission.breakers.by_name}
        in_line = standing(admission.limiter, admission.capacity.levels(), now, rests)
        history, at, newest = self._listeners.history, time.time(), self._newest(limit=MOST_RECENT)
        uptime_s = now - self._began
        return overview(Seen(at, VERSION, uptime_s, self.state(), in_line, admission.policy, history, newest))

    def sources(self) -> Sources:
        """What the console shows and has done."""
        listeners = self._listeners
        return Sources(
            state=self.state,
            metrics=listeners.meter,
            sessions=self._admission.allowances,
            operations=self._levers,
            explain=self.explain,
            requests=self._newest,
            log=listeners.logging.state,
            set_log=listeners.logging.set_log,
            overview=self.overview,
            history=listeners.history.told,
            config=lambda: public(self._settings),
        )

    async def remember(self) -> None:
        """Keep what the last seconds were like, for charts and rates, until cancelled."""
        admission, listeners = self._admission, self._listeners
        while True:
            await asyncio.sleep(STEP_S)
            counted = state.describe(admission.lanes, admission.durable(), self._clock())
            more = {"breakers": admission.breakers.state(), "tally": listeners.tally.snapshot()}
            listeners.history.step(counted | more)

    def _newest(self, **wanted: Any) -> list[Row]:
        """A line for each; see Dossiers.newest."""
        now = self._clock()
        return [summary(one, now) for one in self._listeners.dossiers.newest(**wanted)]


def traced(settings: Settings) -> bool:
    """Whether anybody takes traces."""
    return settings.telemetry.otlp is not None and settings.telemetry.otlp.traces


def _lane(queue: Queue, now: float) -> LaneBounds:
    rule, oldest = queue.rule, oldest_s(queue, now)
    return {
        "max_requests": rule.max_requests,
        "max_tokens": rule.max_tokens,
        "max_bytes": rule.max_bytes,
        "oldest_s": oldest,
    }
