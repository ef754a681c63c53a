"""Does memory stay flat? Requests of very many tenants and sessions, through everything that decides and remembers.

    python -m tests.load.soak [--requests 200000] [--names 50000] [--trace]

Each request has a tenant and a session that it shares with few others, a prompt of its own, and an id. Most are served
and settled; some fail over, some are refused, some clients leave in the middle or never have a record. All of it goes
through the service as it is wired for serving (handler, limiter, flights, records, metrics, traces, explanations), its
background duties run, metrics and traces go to a collector that takes them, and its pages are read now and then, as a
Prometheus and an operator would. Envoy and gRPC are left out: they hold nothing for longer than one request, and would
make this four times as long.

The first round over all names is warm-up: everything that is bounded fills up to its bound or to the number of names.
From then on neither resident memory nor the number of objects may grow. --trace tells what grew, line by line, and
takes several times as long.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import aiohttp
import uvloop
from rich.console import Console

from extproc.app import Service
from extproc.ports import Departure, Gone, Head, Record, RecordKind
from extproc.settings import Settings
from extproc.stack import free_ports
from tests.load.load_collector import Collector

AT_ONCE = 32
SAMPLES = 40
GROWTH, SLACK_MB = 0.02, 4.0
"""How much more the last quarter may hold than the one before it, as a share of all and in MiB: the larger counts."""
OBJECTS = 0.01
PAGES = ("/metrics", "/state", "/api/v1/overview", "/api/v1/history", "/api/v1/requests?limit=200")
TRACED = 0.1
"""Share of requests whose caller wants a trace."""
HOSTILE = ('"} 1\n# x', "<script>alert(1)</script>", "../../etc", "%s%n", "\u202egnp.exe", "x" * 120)
"""Parts of names that come from outside."""
LEFT = frozenset({"downstream_remote_reset"})


@dataclass(frozen=True, slots=True)
class Sample:
    """How much there was after so many requests. objects: that the garbage collector knows of."""

    requests: int
    rss_mb: float
    objects: int


def settings(collector: int) -> Settings:
    """Two providers with room, one of which fails now and then, and any tenant. collector: a port."""
    address, console = (f"127.0.0.1:{port}" for port in free_ports(2))
    far = [{"tpm": 10**12, "rpm": 10**10}]
    raw = {
        "service": {"address": address, "console": console, "restart_ramp_s": 0, "record_grace_s": 1},
        "upstreams": {
            "a": {"provider": "openai", "limits": far, "breaker": {"failures": 100_000, "errors": None, "slow": None}},
            "b": {"provider": "openai", "limits": far, "models": {"m": "m-b"}},
        },
        "routes": [{"models": ["m"], "chain": ["a", "b"], "acknowledge_unowned": True}],
        "identity": {"tenant": ["header:x-team"]},
        "tenants": {"*": {"tpm": 1_000_000, "rpm": 100_000, "usd_per_day": 100, "concurrency": 4}, "poor": {"rpm": 1}},
        "telemetry": {"otlp": {"endpoint": f"http://127.0.0.1:{collector}", "every_s": 5}},
        "sessions": {"max_tokens": 10**9},
    }
    found = Settings.model_validate(raw)
    assert not list(found.problems()), list(found.problems())
    return found


class Caller:
    """One request of a client as the service's exchange, and what Envoy will report of it."""

    def __init__(self, service: Service, number: int, name: int, rng: random.Random) -> None:
        """`name` stands for the tenant and its session."""
        self._service, self._rng, self._kind = service, rng, rng.random()
        odd = HOSTILE[name % len(HOSTILE)] if name % 50 == 0 else ""
        tenant = "poor" if self._kind > 0.97 else f"team-{name}{odd}".replace("\n", "")
        self.id = f"{number:08x}-0000-4000-8000-{rng.getrandbits(48):012x}"
        self._head = Head(
            {
                ":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json",
                "x-request-id": self.id, "x-team": tenant, "x-tidegate-session": f"session-{name}{odd}",
                "x-tidegate-priority": f"P{number % 3}",
                "traceparent": f"00-{rng.getrandbits(128):032x}-{name + 1:016x}-0{int(rng.random() < TRACED)}",
            },
            bodiless=False,
        )  # fmt: skip
        words = " ".join(f"{rng.getrandbits(30):x}" for _ in range(20))
        body = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": f"{number} {words}"}]}
        self._body = json.dumps(body).encode()
        self.departure: Departure | None = None
        self.refused = ""

    async def head(self) -> Head:
        """As the exchange."""
        return self._head

    async def body(self) -> bytes:
        """As the exchange."""
        return self._body

    async def hold(self, seconds: float) -> None:
        """As the exchange."""

    async def forward(self, departure: Departure) -> None:
        """As the exchange; some are gone by then."""
        if self._kind < 0.01:
            raise Gone
        self.departure = departure

    async def ended(self) -> None:
        """Its answer takes a turn of the loop; then its record comes, nearly always."""
        await asyncio.sleep(0)
        departure = self.departure
        assert departure is not None
        if self._kind < 0.05 and len(departure.order) > 1:
            first, served = departure.order[:2]
            failed = self._record(RecordKind.ATTEMPT, "", first, 503)
            await self._service.admission.hear(failed)
        else:
            served = departure.order[0]
        if self._kind < 0.96:
            gone = 0.05 < self._kind < 0.08
            tail = {} if gone else {"in": 30, "out": self._rng.randrange(1, 64), "finish": "stop", "done": "1"}
            final = self._record(RecordKind.FINAL, departure.ticket, served, 200, LEFT if gone else frozenset(), tail)
            await self._service.admission.hear(final)

    def _record(
        self,
        kind: RecordKind,
        ticket: str,
        upstream: str,
        status: int,
        flags: frozenset[str] = frozenset(),
        tail: dict[str, Any] | None = None,
    ) -> Record:
        lasted, first, attempt = 0.5, 0.1, 1 if kind is RecordKind.ATTEMPT else 2
        return Record(
            kind, ticket, upstream, status, flags, "", attempt, lasted, first,
            answered_s=first, request_id=self.id, tail=tail or {},
        )  # fmt: skip

    async def answer(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> None:
        """As the exchange."""
        del status, headers, body
        self.refused = details

    async def abort(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> None:
        """As the exchange."""
        del status, headers, body, details


class Soak:
    """The run. `tell` gets lines to print."""

    def __init__(
        self,
        requests: int,
        names: int,
        tell: Callable[[str], None],
        *,
        trace: bool = False,
        samples: int = SAMPLES,
    ) -> None:
        """Use `run`."""
        self._requests, self._names, self._tell, self._trace = requests, names, tell, trace
        self._parts = samples
        self._rng = random.Random(7)
        self._order = list(range(names))
        self._next = 0
        self.ends: Counter[str] = Counter()
        self.collector = Collector()
        self.samples: list[Sample] = []

    async def run(self) -> list[str]:
        """What grew, in words; nothing where memory is flat."""
        (port,) = free_ports(1)
        taking = await self.collector.listen(port)
        service = Service(settings(port))
        await service.start()
        gc.unfreeze()  # so that everything is counted that there is
        before: tracemalloc.Snapshot | None = None
        try:
            for part in range(1, self._parts + 1):
                await self._until(service, self._requests * part // self._parts)
                await self._read(service)
                self._sample()
                if self._trace and part == self._parts // 2:
                    tracemalloc.start(8)
                    await self._until(service, self._requests * part // self._parts + 500)
                    before = tracemalloc.take_snapshot()
            if before is not None:
                self._tell_grown(before)
            await self._settle(service)
        finally:
            await service.stop()
            await taking.cleanup()
        assert self.collector.taken, "nothing was exported"
        return [*verdicts(self.samples)]

    async def _until(self, service: Service, end: int) -> None:
        async def work() -> None:
            while self._next < end:
                await self._one(service)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    async def _one(self, service: Service) -> None:
        number, self._next = self._next, self._next + 1
        if number % self._names == 0:
            self._rng.shuffle(self._order)
        caller = Caller(service, number, self._order[number % self._names], self._rng)
        await service.handler(caller)
        self.ends[caller.refused or ("went" if caller.departure else "left")] += 1

    async def _read(self, service: Service) -> None:
        """The pages, as whoever looks at them does."""
        async with aiohttp.ClientSession() as session:
            for page in PAGES:
                async with session.get(f"http://{service.settings.service.console}{page}") as response:
                    assert response.status == 200, (page, response.status)
                    await response.read()

    def _sample(self) -> None:
        gc.collect()
        sample = Sample(self._next, rss_mb(), len(gc.get_objects()))
        self.samples.append(sample)
        self._tell(f"{sample.requests:>8,} requests  {sample.rss_mb:7.1f} MiB  {sample.objects:>9,} objects")

    async def _settle(self, service: Service) -> None:
        """Nothing is held when all is over: also those without a record are settled, after their grace."""
        until = time.monotonic() + 60
        while service.flights.unsettled or len(service.flights):
            assert time.monotonic() < until, f"{service.flights.unsettled} unsettled"
            await asyncio.sleep(0.1)

    def _tell_grown(self, before: tracemalloc.Snapshot) -> None:
        gc.collect()
        own = (tracemalloc.Filter(inclusive=False, filename_pattern=tracemalloc.__file__),)
        grown = tracemalloc.take_snapshot().filter_traces(own).compare_to(before.filter_traces(own), "traceback")
        for each in grown[:12]:
            self._tell(f"{each.size_diff / 1024:+10.1f} KiB {each.count_diff:+8,} blocks")
            for line in each.traceback.format()[-6:]:
                self._tell(f"    {line}")


def verdicts(samples: Sequence[Sample]) -> list[str]:
    """What grew from the third quarter of a run to its last; nothing where memory is flat."""
    quarter = len(samples) // 4
    third, last = samples[-2 * quarter : -quarter], samples[-quarter:]
    found = []
    was, is_ = (mean(sample.rss_mb for sample in part) for part in (third, last))
    if is_ - was > max(GROWTH * was, SLACK_MB):
        found.append(f"resident memory grew from {was:.1f} to {is_:.1f} MiB")
    had, has = (mean(sample.objects for sample in part) for part in (third, last))
    if has - had > OBJECTS * had:
        found.append(f"objects grew from {had:,.0f} to {has:,.0f}")
    return found


def rss_mb() -> float:
    """Resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Run it; the exit code says whether memory is flat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--names", type=int, default=50_000, help="distinct tenants, and as many sessions")
    parser.add_argument("--trace", action="store_true", help="tell what grew in the second half")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    console = Console(highlight=False, width=150)
    soak = Soak(options.requests, options.names, console.print, trace=options.trace)
    began = time.monotonic()
    grew = uvloop.run(soak.run())
    ends = ", ".join(f"{number:,} {what}" for what, number in soak.ends.most_common())
    console.print(f"{ends}; {soak.collector.taken / 2**20:.1f} MiB exported; {time.monotonic() - began:.0f} s")
    quarter = len(soak.samples) // 4
    warm, last = soak.samples[quarter - 1], soak.samples[-1]
    console.print(
        f"after {warm.requests:,}: {warm.rss_mb:.1f} MiB, {warm.objects:,} objects; "
        f"after {last.requests:,}: {last.rss_mb:.1f} MiB, {last.objects:,} objects"
    )
    console.print("NOT flat: " + "; ".join(grew) if grew else "flat")
    sys.exit(bool(grew))


if __name__ == "__main__":
    main()
