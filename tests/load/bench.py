"""What Tidegate costs: Envoy alone, Envoy with a server that decides nothing, and Tidegate; in one run on one machine.

    python -m tests.load.bench [--seconds 150] [--rounds 5] [--quick]

The three take turns in every round, so that whatever else the machine does hits all of them. Each round tells how much
CPU others used meanwhile; figures are medians over the rounds in which they used little. CPU per request is what
carries over to another machine; requests per second and latencies are of everything on these cores together, load
generator and upstream included, and the load generator is our own, so that nothing has to be installed.

A server that is given more to do at a time does each thing cheaper. So CPU is compared at one and the same rate of
requests; at full speed, where the cheaper server also has more to do, it is told as well.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
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
from load_client import Shot, fire, pace  # noqa: E402
from load_machine import Reading  # noqa: E402
from load_stacks import Noop, Plain, answer_of, settings_for, upstream  # noqa: E402

from extproc.sim.figures import percentile  # noqa: E402
from extproc.stack import Stack  # noqa: E402

VARIANTS = ("plain", "noop", "tidegate")
LIGHT, FULL = 1, 16
SHARES = (0.25, 0.35, 0.4)
"""Of a slot of time: one connection, a given rate, many connections."""
RATE_OF_FULL = 0.5
"""The given rate, as a share of what Tidegate does with many connections; the same for all variants."""
SETTLE_S = 0.1
"""Records of the last answers arrive this much later at most."""
WARM_S = 1.0
CPU_GOAL, LATENCY_GOAL = 1.5, 1.3
NOISE = 0.1
"""A round in which others use more of the machine than this does not count, unless there is no better one."""
ENOUGH = 100
"""So many answers make a 99th percentile."""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0, help="time of measuring, all in all")
    parser.add_argument("--rounds", type=int, default=5)
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


@dataclass(frozen=True, slots=True)
class Phase:
    """One way of sending: answers, and CPU in microseconds for each. foreign: share of the machine others used."""

    shot: Shot
    python_us: float
    envoy_us: float
    own_us: float
    messages: float
    records: float
    foreign: float

    def first_s(self, share: float) -> float:
        """Time to the first byte of the body."""
        return percentile(sorted(self.shot.first_s), share) or 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One variant, one case, one round."""

    light: Phase
    paced: Phase
    full: Phase

    @property
    def phases(self) -> tuple[Phase, Phase, Phase]:
        """All three."""
        return self.light, self.paced, self.full


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
        answers = {case.length: answer_of(service, case) for case in self.cases}
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
        rates = {case.name: await self._warm_up(case) for case in self.cases}
        measured: dict[tuple[str, str], list[Measured]] = {(c.name, v): [] for c in self.cases for v in VARIANTS}
        for number in range(rounds):
            for case in self.cases:
                for variant in VARIANTS if number % 2 == 0 else reversed(VARIANTS):
                    found = await self._measure(variant, case, slot, rates[case.name])
                    measured[case.name, variant].append(found)
            self._tell_round(number, measured)
        for case in self.cases:
            self._tell_case(case, rates[case.name], {variant: measured[case.name, variant] for variant in VARIANTS})
        self._tell_messages({key: values[-1] for key, values in measured.items()})

    async def _warm_up(self, case: Case) -> float:
        """Let everybody see the case once; the rate to send it at."""
        shots = {}
        for variant in VARIANTS:
            shots[variant] = await fire(self._port(variant), case.requests, FULL, WARM_S)
        return max(1.0, RATE_OF_FULL * shots["tidegate"].answers / shots["tidegate"].seconds)

    async def _measure(self, variant: str, case: Case, slot: float, rate: float) -> Measured:
        port, requests = self._port(variant), case.requests
        light, paced, full = (slot * share for share in SHARES)
        return Measured(
            await self._phase(variant, fire(port, requests, LIGHT, light)),
            await self._phase(variant, pace(port, requests, rate, paced)),
            await self._phase(variant, fire(port, requests, FULL, full)),
        )

    async def _phase(self, variant: str, sending: Awaitable[Shot]) -> Phase:
        loop = asyncio.get_running_loop()
        seen, before, began = await self._messages(variant), Reading.now(self.pids), loop.time()
        shot = await sending
        await asyncio.sleep(SETTLE_S)
        used, lasted = Reading.now(self.pids) - before, loop.time() - began
        messages, records = (now - then for now, then in zip(await self._messages(variant), seen, strict=True))
        count = max(1, shot.answers)

        def each(*names: str) -> float:
            return sum(used.of.get(name, 0.0) for name in names) / count * 1e6

        return Phase(
            shot,
            python_us=each(f"{variant}/service"),
            envoy_us=each(f"{variant}/envoy"),
            own_us=each("client", "upstream"),
            messages=messages / count,
            records=records / count,
            foreign=used.foreign / lasted / (os.cpu_count() or 1),
        )

    def _port(self, variant: str) -> int:
        return self.stacks[variant].settings.gateway.port

    async def _messages(self, variant: str) -> tuple[int, int]:
        """Messages that Envoy has sent to ext_proc, and log records, since its start."""
        admin = self.stacks[variant].settings.gateway.admin_port
        url = f"http://127.0.0.1:{admin}/stats?filter=stream_msgs_sent|logs_written"
        async with aiohttp.ClientSession() as session:
            text = await (await session.get(url)).text()
        found = [0, 0]
        for line in text.splitlines():
            name, _, number = line.partition(": ")
            found[name.endswith("logs_written")] += int(number)
        return found[0], found[1]

    def _greet(self, seconds: float, rounds: int) -> None:
        self.console.print(
            f"{os.cpu_count()} cores, Python {platform.python_version()}, one Envoy worker; {rounds} rounds, "
            f"{seconds:g} s in all; c: connections, each sends when it has its answer; times: first byte of the body"
        )

    def _tell_round(self, number: int, measured: dict[tuple[str, str], list[Measured]]) -> None:
        last = {key: values[-1].phases for key, values in measured.items()}
        words = []
        for variant in VARIANTS:
            worst = (max(phase.foreign for phase in last[case.name, variant]) for case in self.cases)
            words.append(f"{variant} {' '.join(f'{share:.0%}' for share in worst)}")
        self.console.print(f"round {number + 1}: CPU that others used at most, case by case: {'; '.join(words)}")
        for (case, variant), phases in last.items():
            failed = sum((phase.shot.failed for phase in phases), Counter[str]())
            if failed:
                told = ", ".join(f"{number} x {what}" for what, number in failed.items())
                self.console.print(f"[bold red]{case}, {variant}: {told}: these figures mean nothing[/]")
        if any(phase.foreign > NOISE for phases in last.values() for phase in phases):
            self.console.print(
                f"[yellow]  more than {NOISE:.0%} in some: those count only where there is nothing better[/]"
            )

    def _tell_case(self, case: Case, rate: float, by: dict[str, list[Measured]]) -> None:
        table = Table(title=case.name, title_justify="left", title_style="bold", pad_edge=False)
        table.add_column("")
        for variant in (*VARIANTS, "noop / plain", "tidegate / noop"):
            table.add_column(variant, justify="right")
        for name, phase, value, form in _rows(rate):
            a, b, c = (middle(by, variant, phase, value) for variant in VARIANTS)
            table.add_row(name, form(a), form(b), form(c), _ratio(b, a), _ratio(c, b))
        self.console.print(table)
        for line in _verdicts(by):
            self.console.print(line)

    def _tell_messages(self, last: dict[tuple[str, str], Measured]) -> None:
        streamed = next(case for case in self.cases if case.events)
        plain = next(case for case in self.cases if not case.events)
        for variant in VARIANTS[1:]:
            sse, one = last[streamed.name, variant].full, last[plain.name, variant].full
            more = (sse.messages + sse.records - one.messages - one.records) / streamed.events
            self.console.print(
                f"{variant}: Python gets {sse.messages:.2f} messages and {sse.records:.2f} log records for a stream of "
                f"{streamed.events} events, {one.messages:.2f} and {one.records:.2f} for a JSON answer: "
                f"{more:.3f} for each token"
            )


Form = Callable[[float], str]
Value = Callable[[Phase], float]


def quiet(by: dict[str, list[Measured]], name: str) -> list[int]:
    """The rounds in which others used little while any variant went through the phase `name`."""
    rounds = zip(*by.values(), strict=True)
    loudest = (max(getattr(measured, name).foreign for measured in variants) for variants in rounds)
    return [number for number, foreign in enumerate(loudest) if foreign <= NOISE]


def middle(by: dict[str, list[Measured]], variant: str, name: str, value: Value) -> float:
    """Median of a value of a phase, over the quiet rounds; over all where none was quiet."""
    rounds = quiet(by, name) or range(len(by[variant]))
    return median(value(getattr(by[variant][number], name)) for number in rounds)


def _rows(rate: float) -> Iterator[tuple[str, str, Value, Form]]:
    def ms(value: float) -> str:
        return f"{value * 1000:.2f} ms"

    def us(value: float) -> str:
        return f"{value:,.0f} us"

    for name, at in (("light", f"c={LIGHT}"), ("paced", f"{rate:,.0f}/s"), ("full", f"c={FULL}")):
        yield f"p50, {at}", name, lambda phase: phase.first_s(0.5), ms
        yield f"p99, {at}", name, lambda phase: phase.first_s(0.99), ms
        if name == "full":
            yield f"requests/s, {at}", name, lambda phase: phase.shot.answers / phase.shot.seconds, "{:,.0f}".format
        yield f"Python CPU/request, {at}", name, lambda phase: phase.python_us, us
        yield f"Envoy CPU/request, {at}", name, lambda phase: phase.envoy_us, us
    yield "client and upstream", "full", lambda phase: phase.own_us, us


def _verdicts(by: dict[str, list[Measured]]) -> Iterator[str]:
    noop, tidegate = (middle(by, variant, "paced", lambda phase: phase.python_us) for variant in VARIANTS[1:])
    yield f"  Python CPU against the no-op, at the same rate: {tidegate / noop:.2f}x {_goal(tidegate / noop, CPU_GOAL)}"
    yield f"  p99 added to Envoy's own, c={LIGHT}: {_added(by)}"
    if not all(quiet(by, name) for name in ("light", "paced", "full")):
        yield "  [yellow](others were busy in every round: run it again on a quiet machine)[/]"


def _added(by: dict[str, list[Measured]]) -> str:
    answers = min(sum(m.light.shot.answers for m in by[variant]) for variant in VARIANTS)
    if answers < ENOUGH:
        return f"{answers} answers are too few to tell, give it more seconds"
    plain, noop, tidegate = (
        middle(by, variant, "light", lambda phase: phase.first_s(0.99) * 1000) for variant in VARIANTS
    )
    what = f"{tidegate - plain:.2f} ms, of the no-op {noop - plain:.2f} ms"
    if noop <= plain:
        return f"{what}: lost in the noise"
    added = (tidegate - plain) / (noop - plain)
    return f"{what}: {added:.2f}x {_goal(added, LATENCY_GOAL)}"


def _goal(value: float, goal: float) -> str:
    return f"(goal {goal:g}x: {'reached' if value <= goal else 'NOT reached'})"


def _ratio(value: float, of: float) -> str:
    return f"{value / of:.2f}x" if of else "-"


if __name__ == "__main__":
    main()
