"""What Tidegate costs: Envoy alone, Envoy with a server that decides nothing, and Tidegate; in one run on one machine.

    python -m tests.load.bench [--seconds 150] [--quick]

The three take turns in every round, so that whatever else the machine does hits all of them; figures are medians over
the rounds, and each round tells how much CPU others used meanwhile. CPU per request is what carries over to another
machine; requests per second and latencies are of everything on these cores together, load generator and upstream
included, and the load generator is our own, so that nothing has to be installed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
import uvloop
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

from load_cases import Case, cases  # noqa: E402
from load_client import Shot, fire  # noqa: E402
from load_machine import Reading  # noqa: E402
from load_stacks import Noop, Plain, answer_of, settings_for, upstream  # noqa: E402

from extproc.sim.figures import percentile  # noqa: E402
from extproc.stack import Stack  # noqa: E402

VARIANTS = ("plain", "noop", "tidegate")
LIGHT, FULL = 1, 16
LIGHT_SHARE = 0.4
SETTLE_S = 0.1
"""Records of the last answers arrive this much later at most."""
WARM_S = 0.6
CPU_GOAL, LATENCY_GOAL = 1.5, 1.3


@dataclass(frozen=True, slots=True)
class Measured:
    """One variant, one case, one round. CPU in microseconds for each request; foreign: share of the machine."""

    rps: float
    light_p50_s: float
    light_p99_s: float
    p50_s: float
    p99_s: float
    python_us: float
    envoy_us: float
    client_us: float
    upstream_us: float
    messages: float
    records: float
    foreign: float
    failed: int


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0, help="time of measuring, all in all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round in 25 s: for a first look")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.rounds = 25.0, 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=150, highlight=False)
    try:
        with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder, ExitStack() as running:
            bench = Bench(running, Path(folder), console)
            uvloop.run(bench.run(options.seconds, options.rounds))
    except KeyboardInterrupt:
        sys.exit(130)


class Bench:
    """All variants, started once and measured in turns."""

    def __init__(self, running: ExitStack, folder: Path, console: Console) -> None:
        """Start everything; `running` stops it."""
        self.cases = cases()
        self.console = console
        port, upstream_pid = running.enter_context(upstream(self.cases, folder))
        self.stacks: dict[str, Stack] = {}
        self.stacks["tidegate"] = running.enter_context(Stack(settings_for(port), folder / "tidegate", workers=1))
        service = self.stacks["tidegate"].settings.service.address
        answers = {len(case.body): answer_of(service, case) for case in self.cases}
        noop = Noop(settings_for(port), folder / "noop", workers=1, answers=answers)
        self.stacks["noop"] = running.enter_context(noop)
        self.stacks["plain"] = running.enter_context(Plain(settings_for(port), folder / "plain", workers=1))
        self.pids = {"client": os.getpid(), "upstream": upstream_pid}
        for name, stack in self.stacks.items():
            self.pids |= {f"{name}/{part}": process.pid for part, process in stack.processes.items()}

    async def run(self, seconds: float, rounds: int) -> None:
        """Measure everything and print it."""
        self._greet(seconds, rounds)
        slot = seconds / (rounds * len(self.cases) * len(VARIANTS))
        measured: dict[tuple[str, str], list[Measured]] = {(c.name, v): [] for c in self.cases for v in VARIANTS}
        for case in self.cases:
            for variant in VARIANTS:
                await fire(self.stacks[variant].settings.gateway.port, case.request, FULL, WARM_S)
        for number in range(rounds):
            for case in self.cases:
                for variant in VARIANTS if number % 2 == 0 else reversed(VARIANTS):
                    measured[case.name, variant].append(await self._measure(variant, case, slot))
            self._tell_round(number, measured)
        for case in self.cases:
            self._tell_case(case, {variant: measured[case.name, variant] for variant in VARIANTS})
        self._tell_messages({key: values[-1] for key, values in measured.items()})

    async def _measure(self, variant: str, case: Case, slot: float) -> Measured:
        port = self.stacks[variant].settings.gateway.port
        light = await fire(port, case.request, LIGHT, slot * LIGHT_SHARE)
        await asyncio.sleep(SETTLE_S)
        seen, before = await self._messages(variant), Reading.now(self.pids)
        began = asyncio.get_running_loop().time()
        full = await fire(port, case.request, FULL, slot * (1 - LIGHT_SHARE))
        await asyncio.sleep(SETTLE_S)
        used = Reading.now(self.pids) - before
        lasted = asyncio.get_running_loop().time() - began
        messages, records = (now - then for now, then in zip(await self._messages(variant), seen, strict=True))
        count = max(1, full.answers)

        def per_request(name: str) -> float:
            return used.of.get(name, 0.0) / count * 1e6

        return Measured(
            rps=full.answers / full.seconds,
            light_p50_s=_first(light, 0.5),
            light_p99_s=_first(light, 0.99),
            p50_s=_first(full, 0.5),
            p99_s=_first(full, 0.99),
            python_us=per_request(f"{variant}/service"),
            envoy_us=per_request(f"{variant}/envoy"),
            client_us=per_request("client"),
            upstream_us=per_request("upstream"),
            messages=messages / count,
            records=records / count,
            foreign=used.foreign / lasted / (os.cpu_count() or 1),
            failed=light.failed + full.failed,
        )

    async def _messages(self, variant: str) -> tuple[int, int]:
        """Messages that Envoy has sent to ext_proc, and log records, since its start."""
        admin = self.stacks[variant].settings.gateway.admin_port
        async with aiohttp.ClientSession() as session:
            text = await (
                await session.get(f"http://127.0.0.1:{admin}/stats?filter=stream_msgs_sent|logs_written")
            ).text()
        found = [0, 0]
        for line in text.splitlines():
            name, _, number = line.partition(": ")
            found[name.endswith("logs_written")] += int(number)
        return found[0], found[1]

    def _greet(self, seconds: float, rounds: int) -> None:
        self.console.print(
            f"{os.cpu_count()} cores, Python {platform.python_version()}, one Envoy worker; {rounds} rounds, "
            f"{seconds:g} s in all; c: connections, each sends when it has its answer; times are to the first byte of the body"
        )

    def _tell_round(self, number: int, measured: dict[tuple[str, str], list[Measured]]) -> None:
        words = []
        for variant in VARIANTS:
            shares = (f"{measured[case.name, variant][-1].foreign:.0%}" for case in self.cases)
            words.append(f"{variant} {' '.join(shares)}")
        self.console.print(f"round {number + 1}: CPU that others used, case by case: {'; '.join(words)}")
        failed = sum(values[-1].failed for values in measured.values())
        if failed:
            self.console.print(f"[bold red]{failed} requests failed: these figures mean nothing[/]")

    def _tell_case(self, case: Case, by: dict[str, list[Measured]]) -> None:
        table = Table(title=case.name, title_justify="left", title_style="bold", pad_edge=False)
        table.add_column("")
        for variant in (*VARIANTS, "noop / plain", "tidegate / noop"):
            table.add_column(variant, justify="right")
        for name, value, form in _rows():
            a, b, c = (median(value(m) for m in by[variant]) for variant in VARIANTS)
            table.add_row(name, form(a), form(b), form(c), _ratio(b, a), _ratio(c, b))
        self.console.print(table)
        for line in _verdicts(by):
            self.console.print(line)

    def _tell_messages(self, last: dict[tuple[str, str], Measured]) -> None:
        streamed = next(case for case in self.cases if case.events)
        plain = next(case for case in self.cases if not case.events)
        for variant in VARIANTS[1:]:
            sse, one = last[streamed.name, variant], last[plain.name, variant]
            extra = (sse.messages + sse.records - one.messages - one.records) / streamed.events
            self.console.print(
                f"{variant}: Python gets {sse.messages:.2f} messages and {sse.records:.2f} log records for a stream of "
                f"{streamed.events} events ({one.messages:.2f} and {one.records:.2f} for a JSON answer): "
                f"{extra:.3f} more for each token, {(sse.messages + sse.records) / streamed.events:.3f} in all"
            )


def _rows() -> Iterator[tuple[str, Callable[[Measured], float], Callable[[float], str]]]:
    def ms(value: float) -> str:
        return f"{value * 1000:.2f} ms"

    def us(value: float) -> str:
        return f"{value:,.0f} us"

    yield f"requests/s, c={FULL}", lambda m: m.rps, lambda value: f"{value:,.0f}"
    yield f"p50, c={LIGHT}", lambda m: m.light_p50_s, ms
    yield f"p99, c={LIGHT}", lambda m: m.light_p99_s, ms
    yield f"p50, c={FULL}", lambda m: m.p50_s, ms
    yield f"p99, c={FULL}", lambda m: m.p99_s, ms
    yield "Python CPU/request", lambda m: m.python_us, us
    yield "Envoy CPU/request", lambda m: m.envoy_us, us
    yield "client and upstream CPU/request", lambda m: m.client_us + m.upstream_us, us


def _verdicts(by: dict[str, list[Measured]]) -> Iterator[str]:
    def middle(value: Callable[[Measured], float], variant: str) -> float:
        return median(value(m) for m in by[variant])

    cpu = middle(lambda m: m.python_us, "tidegate") / middle(lambda m: m.python_us, "noop")
    yield f"  Python CPU against the no-op: {cpu:.2f}x {_goal(cpu, CPU_GOAL)}"
    plain, noop, tidegate = (middle(lambda m: m.light_p99_s, variant) for variant in VARIANTS)
    added = (tidegate - plain) / max(1e-6, noop - plain)
    yield (
        f"  p99 added to Envoy's own at c={LIGHT}: {(tidegate - plain) * 1000:.2f} ms against "
        f"{(noop - plain) * 1000:.2f} ms of the no-op, {added:.2f}x {_goal(added, LATENCY_GOAL)}"
    )


def _goal(value: float, goal: float) -> str:
    return f"(goal {goal:g}x: {'reached' if value <= goal else 'NOT reached'})"


def _first(shot: Shot, share: float) -> float:
    return percentile(sorted(shot.first_s), share) or 0.0


def _ratio(value: float, of: float) -> str:
    return f"{value / of:.2f}x" if of else "-"


if __name__ == "__main__":
    main()
