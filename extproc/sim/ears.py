"""Hears what the gateway announces and looks at everything once a second: the raw material of a simulation's figures.

Counts of requests come from the gateway's own events; how jobs ended comes from their callers, and what upstreams did
from their books. That the three agree is checked in `balance`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from extproc.core.bucket import TokenBucket
from extproc.core.events import Admitted, AttemptFailed, BreakerMoved, Event, Overshot, Probed, Queued, Refused, Settled
from extproc.core.watermark import Watermark
from extproc.sim.account import Account
from extproc.sim.engine import Pool
from extproc.sim.gateway import Gateway
from extproc.sim.work import Model

__all__ = ["Ears", "Series", "Watch"]

LOOK_S = 1.0


class Ears:
    """Hears every event; see ports.Observer.

    waits: forecast and real wait of those who queued and were let go. vain: forecasts of those who waited in vain.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.admitted: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.settled = 0
        self.queued = 0
        self.failed_attempts: Counter[str] = Counter()
        self.overshot: Counter[str] = Counter()
        self.moves: list[str] = []
        self.probes: Counter[str] = Counter()
        self.waits: list[tuple[float, float]] = []
        self.vain: list[float] = []
        self._forecast: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        """See ports.Observer."""
        match event:
            case Queued():
                self.queued += 1
                self._forecast[event.request.id] = event.predicted_s
            case Admitted():
                self.admitted[event.request.lane] += 1
                predicted = self._forecast.pop(event.request.id, None)
                if predicted is not None:
                    self.waits.append((predicted, event.waited_s))
            case Refused():
                self.refused[str(event.reason)] += 1
                predicted = self._forecast.pop(event.request_id, None)
                if predicted is not None:
                    self.vain.append(predicted)
            case Settled():
                self.settled += 1
            case AttemptFailed():
                self.failed_attempts[event.upstream] += 1
            case Overshot():
                self.overshot[event.key] += round(event.amount)
            case _:
                self._of_breakers(event)

    def _of_breakers(self, event: Event) -> None:
        if isinstance(event, BreakerMoved):
            self.moves.append(f"{event.upstream} {event.before} -> {event.after}: {event.cause}")
        elif isinstance(event, Probed):
            self.probes[f"{event.upstream} {'answered' if event.ok else 'failed'}"] += 1


@dataclass(slots=True)
class Series:
    """What was seen every `every_s` seconds, as lists of equal length.

    waiting: requests by lane; running: works by upstream; queued: in an engine's own line; bucket: the gateway's
    emptiest token bucket of each upstream as a share of its size; account: the provider's own; kv: used share of an
    engine's fullest cache; known: the gateway's idea of it.
    """

    every_s: float = LOOK_S
    at_s: list[float] = field(default_factory=list)
    waiting: dict[str, list[float]] = field(default_factory=dict)
    running: dict[str, list[float]] = field(default_factory=dict)
    queued: dict[str, list[float]] = field(default_factory=dict)
    bucket: dict[str, list[float]] = field(default_factory=dict)
    account: dict[str, list[float]] = field(default_factory=dict)
    kv: dict[str, list[float]] = field(default_factory=dict)
    known: dict[str, list[float]] = field(default_factory=dict)


class Watch:
    """Looks once a second, from when `run` is begun. silence_s: by lane, the longest time somebody stood in line
    there and nobody was let go.
    """

    def __init__(self, models: Mapping[str, Model], gateway: Gateway | None, ears: Ears) -> None:
        """`gateway` None: there is none."""
        self.series = Series()
        self.silence_s: dict[str, float] = {}
        self._models = models
        self._gateway = gateway
        self._ears = ears
        self._silent: dict[str, float] = {}
        self._seen: Counter[str] = Counter()

    async def run(self) -> None:
        """Look until cancelled."""
        began = asyncio.get_running_loop().time()
        while True:
            now = asyncio.get_running_loop().time()
            self.series.at_s.append(now - began)
            for name, model in self._models.items():
                self._look_at(name, model)
            if self._gateway is not None:
                self._look_inside(self._gateway, now)
            await asyncio.sleep(LOOK_S)

    def _look_at(self, name: str, model: Model) -> None:
        series = self.series
        _put(series.running, name, model.books.running)
        if isinstance(model, Account) and (level := model.level()) is not None:
            _put(series.account, name, level)
        if isinstance(model, Pool):
            seen = model.scrape()
            _put(series.kv, name, max(one.usage for one in seen))
            _put(series.queued, name, sum(one.waiting for one in seen))

    def _look_inside(self, gateway: Gateway, now: float) -> None:
        levels: dict[str, float] = {}
        for key, counter in gateway.admission.capacity.levels().items():
            match key.split("/"), counter:
                case ["upstream", name, _, kind], TokenBucket() if kind != "requests" and counter.capacity > 0:
                    levels[name] = min(levels.get(name, 1.0), counter.level_at(now) / counter.capacity)
                case ["upstream", name, "kv"], Watermark():
                    _put(self.series.known, name, counter.fill(now))
                case _:
                    pass
        for name, level in levels.items():
            _put(self.series.bucket, name, max(-1.0, level))
        for lane, backlog in gateway.admission.lanes.backlogs.items():
            _put(self.series.waiting, lane, backlog.requests)
            went, self._seen[lane] = self._ears.admitted[lane] > self._seen[lane], self._ears.admitted[lane]
            self._silent[lane] = 0.0 if went or not backlog.requests else self._silent.get(lane, 0.0) + LOOK_S
            self.silence_s[lane] = max(self.silence_s.get(lane, 0.0), self._silent[lane])


def _put(rows: dict[str, list[float]], name: str, number: float) -> None:
    rows.setdefault(name, []).append(round(number, 4))
