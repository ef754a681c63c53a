"""What telemetry costs: Tidegate with all of it on, and with all of it off, in one run.

    python -m tests.load.overhead [--pairs 20] [--slot 2]

Two whole stacks, each with an Envoy of its own, before one upstream. They take turns in short slots at one and the same
rate of requests, so that whatever else the machine does hits both; the figure is the median of neighbours' ratios.

On: metrics, exemplars, top-N, explanations, lines of decisions, history, all exported to a collector (that only takes
it), traces of the share of requests that is traced by default, and a Prometheus that reads the page every few seconds.
Off: TIDEGATE_TELEMETRY=off, which keeps the counts that the state page always had. What a watched page costs a second
is told beside it: it does not depend on requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from statistics import median

import aiohttp
import uvloop
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

from load_cases import cases  # noqa: E402
from load_client import fire, pace  # noqa: E402
from load_collector import Collector  # noqa: E402
from load_machine import cpu_s  # noqa: E402
from load_stacks import settings_for, upstream  # noqa: E402

from extproc.settings import OtlpSettings, Settings  # noqa: E402
from extproc.stack import Stack, free_ports  # noqa: E402

GOAL = 1.10
SCRAPED_S = 5.0
CONNECTIONS, WARM_S, SETTLE_S, IDLE_S = 16, 2.0, 0.2, 4.0
RATE_OF_FULL = 0.4
"""The rate of requests, as a share of what the stack with telemetry does with many connections."""


class Overhead:
    """The run."""

    def __init__(self, pairs: int, slot_s: float, console: Console) -> None:
        """Use `run`."""
        self._pairs, self._slot_s, self._console = pairs, slot_s, console

    async def run(self, folder: Path) -> bool:
        """Measure and print; whether the goal is reached."""
        case = cases()[0]
        (collector_port,) = free_ports(1)
        collector = Collector()
        async with AsyncExitStack() as running:
            runner = await collector.listen(collector_port)
            running.push_async_callback(runner.cleanup)
            port, _ = running.enter_context(upstream([case], folder))
            stacks = {
                "on": Stack(told(settings_for(port), collector_port), folder / "on", workers=1),
                "off": Stack(settings_for(port), folder / "off", workers=1, environ={"TIDEGATE_TELEMETRY": "off"}),
            }
            loop = asyncio.get_running_loop()
            for stack in stacks.values():
                running.callback(stack.stop)
                await loop.run_in_executor(None, stack.start)  # the collector is needed meanwhile
            scraping = asyncio.create_task(scrape(stacks["on"]))
            running.callback(scraping.cancel)
            shots = {
                name: await fire(where(stack), case.requests, CONNECTIONS, WARM_S) for name, stack in stacks.items()
            }
            rate = max(1.0, RATE_OF_FULL * shots["on"].answers / shots["on"].seconds)
            self._console.print(
                f"{self._pairs} pairs of {self._slot_s:g} s, {case.name} at {rate:,.0f} requests a second"
            )
            measured: dict[str, list[float]] = {"on": [], "off": []}
            for number in range(self._pairs):
                for name in ("on", "off") if number % 2 else ("off", "on"):
                    measured[name].append(await self._measure(stacks[name], case.requests, rate))
            idle = {name: await idle_ms(stack) for name, stack in stacks.items()}
            async with aiohttp.ClientSession() as session:
                watching = asyncio.create_task(watch(session, stacks["on"]))
                await asyncio.sleep(1.0)
                watched = await idle_ms(stacks["on"])
                watching.cancel()
        return self._tell(measured, idle, watched, collector.taken)

    async def _measure(self, stack: Stack, requests: list[bytes], rate: float) -> float:
        """Microseconds of the service's CPU for each request."""
        pid = stack.processes["service"].pid
        before = cpu_s(pid)
        shot = await pace(where(stack), requests, rate, self._slot_s)
        await asyncio.sleep(SETTLE_S)
        assert not shot.failed, shot.failed
        return (cpu_s(pid) - before) / max(1, shot.answers) * 1e6

    def _tell(self, measured: dict[str, list[float]], idle: dict[str, float], watched: float, taken: int) -> bool:
        ratios = sorted(on / off for on, off in zip(measured["on"], measured["off"], strict=True))
        ratio, on, off = median(ratios), median(measured["on"]), median(measured["off"])
        half = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        self._console.print(f"CPU of the service per request: {on:,.0f} us with all telemetry, {off:,.0f} us without")
        self._console.print(
            f"  idle: {idle['on']:.1f} and {idle['off']:.1f} ms a second; with the page watched {watched:.1f}; "
            f"{taken / 1024:,.0f} KiB were exported"
        )
        assert taken, "nothing was exported: not all of it was on"
        reached = "reached" if ratio <= GOAL else "NOT reached"
        self._console.print(
            f"  on / off: {ratio:.3f}x, half of all pairs within {half[0]:.3f} to {half[1]:.3f} "
            f"(goal {GOAL:g}x: {reached})"
        )
        return ratio <= GOAL


def told(settings: Settings, collector: int) -> Settings:
    """The settings with everything on that is off by default."""
    otlp = OtlpSettings(endpoint=f"http://127.0.0.1:{collector}", every_s=SCRAPED_S)
    return settings.model_copy(update={"telemetry": settings.telemetry.model_copy(update={"otlp": otlp})})


def where(stack: Stack) -> int:
    """The gateway's port."""
    return stack.settings.gateway.port


async def scrape(stack: Stack) -> None:
    """As a Prometheus does that knows OpenMetrics."""
    async with aiohttp.ClientSession() as session:
        while True:
            accept = {"accept": "application/openmetrics-text; version=1.0.0"}
            async with session.get(f"http://{stack.settings.service.console}/metrics", headers=accept) as response:
                assert response.status == 200
                await response.read()
            await asyncio.sleep(SCRAPED_S)


async def watch(session: aiohttp.ClientSession, stack: Stack) -> None:
    """As somebody who has the page open."""
    with suppress(aiohttp.ClientError):
        async with session.get(f"http://{stack.settings.service.console}/api/v1/stream") as response:
            assert response.status == 200, response.status
            async for _ in response.content:
                pass


async def idle_ms(stack: Stack) -> float:
    """Milliseconds of CPU a second without any request."""
    pid = stack.processes["service"].pid
    before = cpu_s(pid)
    await asyncio.sleep(IDLE_S)
    return (cpu_s(pid) - before) / IDLE_S * 1000


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--slot", type=float, default=2.0, help="seconds of each measurement")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="tidegate-overhead-") as folder:
            uvloop.run(Overhead(options.pairs, options.slot, Console(width=150, highlight=False)).run(Path(folder)))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
