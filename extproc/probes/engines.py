"""Watches inference engines: how full their KV caches are, told to capacity several times a second.

For each upstream with `kv`, a round every `scrape_s`: each instance behind its name (a headless service has many) is
asked for its metrics page, or one Prometheus is asked one query. The fullest instance counts, because nobody chooses
which instance the router takes. A slow instance holds up nobody: a round waits for it half an interval at most, it is
asked once at a time, and what it said last counts until it is stale; it may be the very one that is overloaded.

A reading is never made up, nor is it older than it says. A page that stands still though requests run is as old as its
last movement: an engine that hangs goes on serving the page of its last moment. When nothing is known that is younger
than `stale_s`, capacity has no reading left, and lets a trickle through.

Deliberately not here: how pages come here (sources) and what they say (exposition), and who has to wait because of it
(core.watermark).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import aiohttp

from extproc.core.bucket import Slots
from extproc.core.capacity import Gauge
from extproc.core.events import Scraped
from extproc.core.policy import KvRules
from extproc.core.routing import kv_key, slots_key
from extproc.core.watermark import Reading
from extproc.ports import Capacity, Clock, Observer
from extproc.probes.exposition import Sample, Unreadable
from extproc.probes.sources import Instances, Prometheus, Source
from extproc.settings import EngineMetrics, UpstreamSettings

__all__ = ["Engines", "Pool", "Rounds"]

PATIENCE = 0.5
"""Share of the interval that a round waits for the slowest instance."""
JITTER = 0.1
"""Share of the interval by which rounds are spread, and the instances of one."""

log = logging.getLogger("tidegate")


class Engines:
    """Watches every upstream that has `kv`."""

    def __init__(
        self,
        upstreams: Mapping[str, UpstreamSettings],
        capacity: Capacity,
        clock: Clock,
        observer: Observer,
        moved: Callable[[], None],
    ) -> None:
        """`moved` is called after capacity was told something."""
        self._watched = {name: upstream for name, upstream in upstreams.items() if upstream.kv}
        self._capacity = capacity
        self._clock = clock
        self._observe = observer
        self._moved = moved

    async def run(self) -> None:
        """Ask until cancelled; returns at once when there is nothing to watch."""
        if not self._watched:
            return
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            asyncio.TaskGroup() as group,
        ):
            for name, upstream in self._watched.items():
                group.create_task(self._pool(session, name, upstream).run())

    def _pool(self, session: aiohttp.ClientSession, name: str, upstream: UpstreamSettings) -> Pool:
        kv, names = upstream.kv, upstream.engine_metrics or EngineMetrics(())
        assert kv is not None  # noqa: S101 - those without are not watched
        source: Source
        if kv.prometheus:
            source, pulse = Prometheus(session, kv), False
        else:
            source, pulse = Instances(session, upstream, kv, names, self._clock), bool(names.pulse)
        rounds = Rounds(every_s=kv.scrape_s, lag_s=kv.lag_s, pulse=pulse)
        return Pool(name, kv.rules(), source, rounds, self._capacity, self._clock, self._observe, self._moved)


@dataclass(frozen=True, slots=True)
class Rounds:
    """How a pool is watched. lag_s: how much older than its answer what a source tells may be. pulse: its numbers move
    whenever an engine works, so that standing still means something.
    """

    every_s: float
    lag_s: float = 0.0
    pulse: bool = False


@dataclass(slots=True)
class _Instance:
    """What is known of one instance. asked: when the question behind `sample` left; moved: when its numbers last
    changed; known: as of when `sample` says anything. preempted: since capacity was last told; untold: capacity has not
    heard of this sample.
    """

    sample: Sample | None = None
    asked: float = 0.0
    moved: float = 0.0
    known: float = 0.0
    preempted: float = 0.0
    untold: bool = False
    trouble: str = ""
    asking: asyncio.Task[None] | None = None

    def learn(self, sample: Sample, asked: float) -> None:
        """It answered."""
        before = self.sample
        if before is None or before.pulse != sample.pulse:
            self.moved = asked
        if before is not None:  # a smaller count is that of an engine that has begun anew
            begun = before.preemptions if sample.preemptions >= before.preemptions else 0.0
            self.preempted += sample.preemptions - begun
        self.sample, self.asked, self.trouble, self.untold = sample, asked, "", True


class Pool:
    """The instances of one upstream, and what capacity was told of them."""

    def __init__(
        self,
        name: str,
        rules: KvRules,
        source: Source,
        rounds: Rounds,
        capacity: Capacity,
        clock: Clock,
        observer: Observer,
        moved: Callable[[], None],
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`moved` is called after capacity was told something; `chance` is in [0, 1)."""
        self._name = name
        self._rules = rules
        self._source = source
        self._rounds = rounds
        self._capacity = capacity
        self._clock = clock
        self._observe = observer
        self._moved = moved
        self._chance = chance
        self._instances: dict[str, _Instance] = {}
        self._lost = False
        self._said: set[str] = set()
        self._quiet = clock.time()
        """When nothing of ours was there last."""

    async def run(self) -> None:
        """Round after round, until cancelled."""
        every_s = self._rounds.every_s
        try:
            while True:
                due = self._clock.time() + every_s * (1.0 + JITTER * (self._chance() - 0.5))
                await self._round()
                await asyncio.sleep(max(0.0, due - self._clock.time()))
        finally:
            await self._let_go(self._instances.values())

    async def _round(self) -> None:
        addresses = await self._source.addresses()
        await self._let_go([self._instances.pop(gone) for gone in self._instances.keys() - set(addresses)])
        for address in addresses:
            instance = self._instances.setdefault(address, _Instance())
            if instance.asking is None:
                instance.asking = asyncio.create_task(self._ask(address, instance))
        await self._wait()
        now = self._clock.time()
        if not self._ours():
            self._quiet = now
        for one in self._instances.values():
            one.known = min(one.asked, self._still_since(one, now))
        usable = [one for one in self._instances.values() if one.sample and now - one.known <= self._rules.stale_s]
        self._say(len(usable), now)
        await self._tell(usable, now)

    async def _ask(self, address: str, instance: _Instance) -> None:
        await asyncio.sleep(self._rounds.every_s * JITTER * self._chance())
        asked = self._clock.time()
        try:
            instance.learn(await self._source.ask(address), asked - self._rounds.lag_s)
        except Unreadable as error:
            instance.trouble = str(error)

    async def _wait(self) -> None:
        """Until all have answered, or long enough. A bug in asking is raised here."""
        asking = [one.asking for one in self._instances.values() if one.asking is not None]
        if asking:
            await asyncio.wait(asking, timeout=self._rounds.every_s * PATIENCE)
        for one in self._instances.values():
            asked = one.asking
            if asked is not None and asked.done():
                one.asking = None
                asked.result()

    async def _tell(self, usable: list[_Instance], now: float) -> None:
        """Tell capacity what is new: a reading, or that there is none."""
        if usable and (self._lost or any(one.untold for one in usable)):
            reading = _merged(usable, now, self._rules.tokens)
            for one in usable:
                one.untold, one.preempted = False, 0.0
            self._lost = False
            await self._capacity.tune([Gauge(kv_key(self._name), reading)])
            saturation = max(reading.usage / self._rules.high, reading.waiting / self._rules.waiting)
            self._observe(Scraped(self._name, saturation, reading.preemptions))
            self._moved()
        elif not usable and not self._lost:
            self._lost = True
            await self._capacity.tune([Gauge(kv_key(self._name), None)])
            self._observe(Scraped(self._name, None))
            self._moved()

    def _still_since(self, one: _Instance, now: float) -> float:
        """Since when it works and does not show it: it runs something, or we have there what no instance admits to."""
        if not self._rounds.pulse or one.sample is None:
            return now
        if one.sample.running > 0:
            return one.moved
        idle = all(other.sample is None or other.sample.running <= 0 for other in self._instances.values())
        return max(one.moved, self._quiet) if idle else now

    def _ours(self) -> bool:
        """Whether requests of ours are there."""
        slots = self._capacity.levels().get(slots_key(self._name))
        return isinstance(slots, Slots) and slots.used > 0

    def _say(self, usable: int, now: float) -> None:
        """Once for each kind of trouble, and once when all of it is over."""
        troubles = {one.trouble for one in self._instances.values() if one.trouble}
        still = any(one.known + self._rules.stale_s < min(one.asked, now) for one in self._instances.values())
        if still and self._quiet < now:  # some engines show their last moment while they rest: that wakes nobody
            troubles.add("numbers stand still though requests run")
        if not self._instances:
            troubles.add("its name has no address")
        if troubles - self._said:
            count = f"{usable} of {len(self._instances)} instances tell"
            log.warning("metrics of %s: %s (%s)", self._name, "; ".join(sorted(troubles)), count)
        elif self._said and not troubles:
            log.warning("metrics of %s: all instances tell again", self._name)
        self._said = self._said | troubles if troubles else set()

    @staticmethod
    async def _let_go(instances: Iterable[_Instance]) -> None:
        asking = [one.asking for one in instances if one.asking is not None]
        for asked in asking:
            asked.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


def _merged(usable: list[_Instance], now: float, tokens: float | None) -> Reading:
    """The fullest instance counts, and its age. `tokens`: size of one cache where it is configured."""
    samples = [one.sample for one in usable if one.sample is not None]
    told = [sample.tokens for sample in samples if sample.tokens is not None]
    usage = max(sample.usage for sample in samples)
    return Reading(
        usage=usage,
        waiting=max(sample.waiting for sample in samples),
        running=sum(sample.running for sample in samples),
        tokens=tokens or (sum(told) / len(told) if told else None),
        instances=len(samples),
        preemptions=sum(one.preempted for one in usable),
        age_s=now - min(one.known for one in usable if one.sample and one.sample.usage == usage),
    )
