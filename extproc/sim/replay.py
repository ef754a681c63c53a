"""`tidegate replay`: a recorded hour of LLM traffic against a running gateway, at its own pace or a multiple of it.

    run(options, json_file) -> int     the command: replay, print, write; the exit code
    replay(options, say) -> Report     sends, waits for the last answer, and says what came of it

Requests leave at the trace's times divided by `speed`, whatever becomes of earlier ones: an open loop, as real callers
are. How late they left is measured and told, for a late load generator flatters whoever it measures. With a
`stage` a private stack is started and stopped around it, whose first upstream is too small for the trace by a factor.

Deliberately not here: clients that come back after a refusal, and virtual time.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import uvloop
from rich.console import Console

from extproc.settings import Settings
from extproc.sim import scene, trace
from extproc.sim.client import Client, body_of
from extproc.sim.figures import End, Result
from extproc.sim.gauges import Gauges, Target
from extproc.sim.plan import Mix, Planned, offered_tokens_per_s, plan
from extproc.sim.report import Report, Sides, made, shown
from extproc.stack import Stack, free_ports

__all__ = ["Options", "ReplayError", "replay", "run", "target_of"]

REACH_S = 5.0
PROGRESS_S = 5.0
POLL_S = 0.05
PLAIN_WIDTH = 150
ENDS_EARLY = 0.9
MIN_SPAN_S = 0.1
SETTLE_S = 30.0
SETTLE_INTERRUPTED_S = 3.0


class ReplayError(Exception):
    """Nothing could be sent; one line says why."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to replay, how fast, and where to. seconds: wall time of sending.

    stage: start a private stack of this kind and ignore `target`. tenants: None says nothing of tenants. timeout_s: an
    answer that takes longer is given up. workdir: where a private stack keeps its logs.
    """

    trace: Path
    speed: float = 10.0
    seconds: float = 60.0
    target: Target = field(default_factory=lambda: Target("http://127.0.0.1:10000"))
    stage: scene.Scene | None = None
    model: str = "gpt-5"
    lanes: Mix = field(default_factory=lambda: Mix.parse("P0=0.3,P1=0.4,P2=0.3"))
    tenants: Mix | None = None
    tenant_header: str = scene.TENANT_HEADER
    json_share: float = 0.1
    key: str | None = None
    seed: int = 1
    timeout_s: float = 300.0
    workdir: Path | None = None


def _say(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201 - the progress of a command


def replay(options: Options, say: Callable[[str], None] = _say) -> Report:
    """Run it. `say` gets a line every few seconds. Ctrl-C ends it early and reports what there is.

    ReplayError when there is nothing to send or nobody to send to; TraceError, SettingsError, StackError as they are.
    """
    requests = _requests(options)
    assumed = list(_assumed(options, requests))
    options = replace(options, seconds=_span_s(options, requests))
    offered = offered_tokens_per_s(requests, options.seconds)
    if options.stage is None:
        return uvloop.run(_Run(options, options.target, requests, assumed, say).all())
    named = {request.tenant for request in requests if request.tenant}
    settings = scene.settings_of(options.stage, offered, options.model, sorted(named), free_ports(scene.PORTS))
    if unknown := {request.lane for request in requests} - settings.lanes.keys():
        raise ReplayError(f"lane {min(unknown)!r}: a private stack has {', '.join(settings.lanes)}")
    assumed += scene.told(options.stage, settings, offered)
    with _folder(options.workdir) as folder, _stops_on_sigterm(), Stack(settings, folder):
        return uvloop.run(_Run(options, target_of(settings), requests, assumed, say).all())


def run(options: Options, json_file: Path | None = None) -> int:
    """Replay and print the report; all figures go to `json_file` too. The exit code: not 0 when nothing was sent."""
    try:
        report = replay(options)
    except (ReplayError, trace.TraceError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:  # before anything was sent
        return 130
    console = Console()
    shown(report, console if console.is_terminal else Console(width=PLAIN_WIDTH))
    if json_file is not None:
        json_file.write_text(json.dumps(report.data(), indent=1), "utf-8")
    return 0


def target_of(settings: Settings) -> Target:
    """Where a stack of these settings is reached, on this machine."""
    fakes = {name: u.where.rstrip("/") for name, u in settings.upstreams.items() if u.provider == "fake"}
    gateway = settings.gateway
    return Target(f"http://{gateway.address}:{gateway.port}", f"http://{settings.service.console}/state", fakes)


def _requests(options: Options) -> list[Planned]:
    requests = plan(
        trace.read(options.trace),
        speed=options.speed,
        seconds=options.seconds,
        lanes=options.lanes,
        tenants=options.tenants,
        json_share=options.json_share,
        seed=options.seed,
    )
    if not requests:
        raise ReplayError(
            f"{options.trace}: no request in the first {options.seconds * options.speed:g} s of the trace"
        )
    return requests


def _span_s(options: Options, requests: list[Planned]) -> float:
    """How long there is something to send: less than asked for where the trace ends early."""
    last = requests[-1].at_s
    return options.seconds if last > ENDS_EARLY * options.seconds else max(MIN_SPAN_S, last)


def _assumed(options: Options, requests: list[Planned]) -> Iterator[str]:
    yield (
        f"{options.trace.name} at {options.speed:g}x: {len(requests):,} requests in {options.seconds:g} s of wall "
        f"time, prompts and max_tokens as long as in the trace, model {options.model}"
    )
    if (span := _span_s(options, requests)) < options.seconds:
        yield f"the trace ends after {span:.1f} s of it"
    tenants = f"tenants {options.tenants}" if options.tenants else "no tenants"
    drawn = f"lanes {options.lanes}; {tenants}; {options.json_share:.0%} do not stream"
    yield f"not in the trace, drawn with seed {options.seed}: {drawn}"
    yield f"no client retries; an answer is given up after {options.timeout_s:g} s"


@contextmanager
def _folder(workdir: Path | None) -> Iterator[Path]:
    if workdir is not None:
        yield workdir
        return
    with tempfile.TemporaryDirectory(prefix="tidegate-replay-") as folder:
        yield Path(folder)


@contextmanager
def _stops_on_sigterm() -> Iterator[None]:
    """So that a private stack is stopped with us, however we are asked to end."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not the main thread: whoever owns that stops us
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Run:
    """One replay under way."""

    def __init__(
        self, options: Options, target: Target, requests: list[Planned], assumed: list[str], say: Callable[[str], None]
    ) -> None:
        self._options = options
        self._target = target
        self._requests = requests
        self._assumed = assumed
        self._say = say
        self._results: list[Result] = []
        self._sent = 0
        self._open: set[asyncio.Task[None]] = set()

    async def all(self) -> Report:
        """Send everything, wait for the last answer, look at what the other side says."""
        stop, options = _stop_event(), self._options
        _allow_many_connections()
        async with _session(options.timeout_s) as session, _session(options.timeout_s) as aside:
            gauges = Gauges(aside, self._target)
            await self._reach(session)
            await gauges.forget()
            limits, before, cpu = await gauges.limits(), await gauges.state(), time.process_time()
            began = time.monotonic()
            progress = asyncio.create_task(self._progress(began))
            await self._send_all(session, stop, began)
            seconds, offering = time.monotonic() - began, await gauges.records()
            await self._until_answered(stop)
            lasted, cpu = time.monotonic() - began, time.process_time() - cpu
            progress.cancel()
            after, settled_s = await gauges.settle(SETTLE_INTERRUPTED_S if stop.is_set() else SETTLE_S)
            sides = Sides(before, after, settled_s, limits, offering, await gauges.records())
        self._must_have_reached(stop)
        return made(
            self._requests[: self._sent],
            self._results,
            self._assumed,
            sides,
            seconds=seconds,
            lasted_s=lasted,
            cpu_share=cpu / lasted,
            interrupted=stop.is_set(),
        )

    async def _reach(self, session: aiohttp.ClientSession) -> None:
        try:
            async with session.get(f"{self._target.gateway}/v1/models", timeout=aiohttp.ClientTimeout(REACH_S)):
                return
        except (aiohttp.ClientError, OSError, TimeoutError):
            raise ReplayError(f"{self._target.gateway} does not answer; is `tidegate up` running?") from None

    async def _send_all(self, session: aiohttp.ClientSession, stop: asyncio.Event, began: float) -> None:
        """Send each request at its time, and wait for the end of the time of sending."""
        options = self._options
        client = Client(session, f"{self._target.gateway}/v1/chat/completions", options.key, options.tenant_header)
        for request in self._requests:
            body = body_of(request, options.model)
            due = began + request.at_s
            if await _stopped_before(stop, due):
                return
            self._sent += 1
            task = asyncio.create_task(self._keep(client.send(request, body, due)))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        await _stopped_before(stop, began + options.seconds)

    async def _keep(self, sending: Awaitable[Result]) -> None:
        self._results.append(await sending)

    async def _until_answered(self, stop: asyncio.Event) -> None:
        while self._open and not await _stopped_before(stop, time.monotonic() + POLL_S):
            pass
        unanswered = list(self._open)
        for task in unanswered:
            task.cancel()
        await asyncio.gather(*unanswered, return_exceptions=True)

    async def _progress(self, began: float) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            ends = Counter(result.end for result in self._results)
            self._say(
                f"{time.monotonic() - began:4.0f} s  sent {self._sent}  served {ends[End.SERVED]}  "
                f"shed {ends[End.SHED]}  failed {ends[End.FAILED]}  open {len(self._open)}"
            )

    def _must_have_reached(self, stop: asyncio.Event) -> None:
        if self._results and not stop.is_set() and not any(result.status for result in self._results):
            raise ReplayError(f"{self._target.gateway} answered no request: {self._results[0].word}")


def _session(timeout_s: float) -> aiohttp.ClientSession:
    """Connections without number: every waiting request holds one."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def _stopped_before(stop: asyncio.Event, until: float) -> bool:
    """Sleep until `until`, or return True as soon as `stop` is set."""
    left = until - time.monotonic()
    if left > 0 and not stop.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), left)
    return stop.is_set()


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    with suppress(RuntimeError, ValueError):  # not the main thread: whoever owns that stops us
        for name in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(name, stop.set)
    return stop


def _allow_many_connections() -> None:
    """Every waiting request is a connection: take as many file descriptors as we may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
