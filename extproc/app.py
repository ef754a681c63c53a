"""The composition root: the only file that knows everybody. `run(settings)` is the whole service."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import uvloop

from extproc import tokens
from extproc.admission import Admission
from extproc.console import server as console
from extproc.core.identity import Directory
from extproc.core.orders import cutter
from extproc.dispatch import Dispatch, Outlook, Timing
from extproc.examination import Examination
from extproc.handler import Handler
from extproc.levers import Drainage, Levers
from extproc.ports import Exchange, Record
from extproc.probes.canary import Canary, Target
from extproc.probes.engines import Engines
from extproc.reception import Reception, SessionRules
from extproc.reloading import Reloading
from extproc.settings import Settings, SettingsError
from extproc.shared import levels
from extproc.sight import Listeners, Sight, traced
from extproc.telemetry.log import JsonLines, level_of
from extproc.watchdog import Watchdog
from extproc.wire.classic import Silence
from extproc.wire.server import Server
from extproc.wire.sockets import SocketError, UnixSocket
from extproc.wording import Wording

__all__ = ["Service", "run"]

log = logging.getLogger("tidegate")

LEAVE_S = 4.5
"""After so long Envoy asks nobody who says that it leaves: two checks, a second apart, may take two seconds each."""


def run(settings: Settings, path: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain; follow the file at `path`, and read it again on SIGHUP. Blocks."""
    try:
        level_of(os.environ)
    except ValueError as error:
        raise SettingsError([str(error)]) from None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    uvloop.run(_serve(settings, path))


async def _serve(settings: Settings, path: Path | None) -> None:
    service = Service(settings, path, telemetry=os.environ.get("TIDEGATE_TELEMETRY") != "off")
    stopping = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stopping.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, service.reloading.ask)
    await service.start()
    log.info("serves", extra={"event": service.about()})
    await stopping.wait()
    await service.drain()
    await service.stop()


class Service:
    """One process's Tidegate, wired together from settings. Must be made inside a running event loop."""

    def __init__(self, settings: Settings, path: Path | None = None, *, telemetry: bool = True) -> None:
        """Build everything; nothing is served before `start`. path: the file that the settings are from.

        telemetry: see Listeners. OtlpError where the collector's headers cannot be read.
        """
        self.settings = settings
        self.policy = policy = settings.policy()
        self.clock = clock = asyncio.get_running_loop()
        rank = settings.service.rank
        self.process = secrets.token_hex(6) if rank is None else f"{rank}-{secrets.token_hex(6)}"
        self.listeners = Listeners(settings, clock.time, self.process, telemetry=telemetry)
        self.observe = self.listeners.observe
        self.admission = admission = Admission(
            policy,
            clock,
            self.observe,
            grace_s=settings.service.record_grace_s,
            calibrate=settings.tokens.calibrate,
            levels=_known_levels(settings),
            epoch_offset=time.time() - clock.time(),
        )
        self.breakers, self.capacity = admission.breakers, admission.capacity
        self.lanes, self.limiter, self.flights = admission.lanes, admission.limiter, admission.flights
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokens")
        self._tickets = count(1)
        chains = [route.chain for route in settings.routes]
        # Envoy knows the orders of these chains until it starts anew, and so do we, whatever is reloaded.
        self._cut = cutter(chains) if settings.gateway.profile == "classic" else None
        self.handler = self._handler()
        self.reloading = Reloading(settings, path, _preload, self._follow)
        self.levers = Levers(admission, self.reloading, Drainage(self._drain, self._undrain), self.observe)
        self.sight = Sight(settings, clock.time, self.listeners, admission, self.reloading, self.levers)
        self.server = _server(settings, self.handler, admission.hear)
        self._watchdog = Watchdog(settings.service.watchdog_s)
        self._tasks: list[asyncio.Task[Any]] = []
        self._engines: asyncio.Task[Any] | None = None
        self._canary: Canary | None = None
        self._console: console.Console | None = None

    async def start(self) -> None:
        """Load vocabularies, then serve.

        SocketError where the console's address cannot be had, SettingsError where a file of `admin` cannot be used.
        """
        settings = self.settings
        await self.clock.run_in_executor(self._executor, _preload, settings)
        try:
            self._console = await console.serve(settings.service.console, self.sight.sources(), settings.admin)
        except OSError as error:
            raise SocketError(f"service.console: {error.strerror}") from None
        await self.server.start()
        gc.freeze()  # what has been loaded stays: no collection need look at it again
        self._watchdog.start()
        self._canary = Canary(
            f"http://127.0.0.1:{settings.gateway.probe_port}",
            self._targets(),
            self.breakers,
            self.capacity,
            self.clock,
            self.observe,
            self.admission.rates,
        )
        duties = (self.limiter.run(), self._sweep(), self._canary.run(), self._watchdog.beat(), self._ramp())
        watching = (self.reloading.run(), self.sight.remember(), *self.listeners.duties())
        self._tasks = [_duty(work) for work in (*duties, *watching)]
        self.listeners.meter.start(self.sight.state)
        self._engines = self._watch_engines()

    async def drain(self) -> None:
        """Refuse newcomers and everybody in line; wait for running answers, at most drain_s.

        Where there are others, Envoy is told first to ask them, and who came here before is served as ever, but for
        whom a paused lane holds.
        """
        self.levers.end()
        await self._drain()

    async def _drain(self) -> None:
        until = self.clock.time() + self.settings.service.drain_s
        if self.settings.service.addresses:
            self.server.leave()
            await asyncio.sleep(min(LEAVE_S, self.settings.service.drain_s))
            while (len(self.flights) or self.lanes.moving) and self.clock.time() < until:  # noqa: ASYNC110 - same
                await asyncio.sleep(0.05)
        self.limiter.drain()
        while len(self.flights) and self.clock.time() < until:  # noqa: ASYNC110 - a look now and then will do
            await asyncio.sleep(0.05)

    def _undrain(self) -> None:
        self.server.stay()
        self.limiter.undrain()

    async def stop(self) -> None:
        """Let go of what still runs, write the levels, end."""
        await self.levers.stop()
        await self.server.stop()
        tasks = [*self._tasks, *([self._engines] if self._engines else [])]
        for task in tasks:
            task.remove_done_callback(_end_if_broken)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watchdog.stop()
        self._save_levels()
        await self.listeners.stop()
        if self._console is not None:
            await self._console.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def about(self) -> dict[str, Any]:
        """Where it serves, and by which config."""
        service, gateway = self.settings.service, self.settings.gateway
        config = self.reloading.told.state()["version"]
        address = service.socket_path or service.address
        return {"address": address, "console": service.console, "profile": gateway.profile, "config": config}

    async def _follow(self, settings: Settings) -> None:
        """Go by other settings from now on, in one step: nobody sees half of it. Crowds follow one after the other."""
        watched = {name: upstream.kv for name, upstream in self.settings.upstreams.items()}
        self.policy = await self.admission.reload(
            settings.policy(), grace_s=settings.service.record_grace_s, calibrate=settings.tokens.calibrate
        )
        self.settings = settings
        self.listeners.follow(settings)
        self.sight.follow(settings)
        self.handler.follow(*self._desk())
        if self._canary is not None:
            self._canary.follow(self._targets())
        if self._engines and watched != {name: upstream.kv for name, upstream in settings.upstreams.items()}:
            self._engines.cancel()
            self._engines = self._watch_engines()
        await self.admission.catch_up()

    def _targets(self) -> dict[str, Target]:
        settings = self.settings
        return {
            name: Target(upstream, settings.model_of(name), own=settings.upstreams[name].canary_model is not None)
            for name, upstream in self.policy.upstreams.items()
        }

    def _watch_engines(self) -> asyncio.Task[Any]:
        engines = Engines(self.settings.upstreams, self.capacity, self.clock, self.observe, self.limiter.kick)
        return _duty(engines.run())

    def _handler(self) -> Handler:
        reception, dispatch, wording, examination = self._desk()
        admission, clock = self.admission, self.clock
        seen = admission.copies, self.flights, self.limiter
        return Handler(reception, *seen, dispatch, wording, clock, admission.observe, examination)

    def _desk(self) -> tuple[Reception, Dispatch, Wording, Examination]:
        """What is made of the settings alone."""
        settings, identity = self.settings, self.settings.identity
        keys = {digest: name for name, tenant in settings.tenants.items() for digest in tenant.key_sha256}
        timeouts = settings.timeouts
        wording = Wording(settings.status_of, random.random)
        reception = Reception(
            self.policy,
            Directory(self.policy.tenants, identity.tenant, identity.unknown == "reject", keys, self.policy.any_tenant),
            self.admission.calibration,
            self.admission.affinity,
            self.admission.pace,
            self.admission.outputs,
            self.admission.allowances.sessions.fresh,
            self.clock,
            process=self.process,
            sessions=SessionRules(identity.session_headers, identity.session_window_s),
            executor=self._executor,
            chance=random.random,
            rates=self.admission.rates,
            numbers=self._tickets,
            lenient=self.admission.bypassing,
        )
        timing = Timing(timeouts.first_token_s, timeouts.prompt_tokens_per_s, timeouts.stall_s, timeouts.answer_s)
        health = self.breakers.allows, self.breakers.fits
        breakers = self.breakers
        outlook = Outlook(
            breakers.rest_s, breakers.earliest_probe, self.limiter.prospects.predicted_s, breakers.standing
        )
        retries = self.admission.retries
        dispatch = Dispatch(
            self.policy,
            self.capacity,
            self.clock,
            timing,
            wording,
            *health,
            retries=retries,
            outlook=outlook,
            slow=self.breakers.slow,
            cut=self._cut,
            lenient=self.admission.bypassing,
        )
        return reception, dispatch, wording, Examination(settings.longest_wait_s)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self.admission.sweep()
            self._save_levels()

    async def _ramp(self) -> None:
        """Half the slots at first: answers that a former process let go may still be running, not yet heard of."""
        ramp_s = self.settings.service.restart_ramp_s
        if ramp_s > 0:
            await self.admission.pacing.hold_back(0.5, "just started")
            await asyncio.sleep(ramp_s)
            await self.admission.pacing.hold_back(1.0, "no longer just started")
        await asyncio.Event().wait()

    def _save_levels(self) -> None:
        path = self.settings.service.state_file
        if path is not None:
            try:
                levels.save(Path(path), self.admission.durable(), now=time.time(), clock_now=self.clock.time())
            except OSError as error:
                log.warning("bucket levels could not be written: %s", error)


def _server(
    settings: Settings, handle: Callable[[Exchange], Awaitable[None]], learn: Callable[[Record], Awaitable[None]]
) -> Server:
    service, path = settings.service, settings.service.socket_path
    return Server(
        service.address,
        handle,
        learn,
        max_body_bytes=settings.gateway.max_body_bytes,
        classic=_silence(settings) if settings.gateway.profile == "classic" else None,
        tls=service.tls,
        socket=UnixSocket(path, service.socket_mode, service.socket_group) if path else None,
        health=service.health,
        traced=traced(settings),
    )


def _known_levels(settings: Settings) -> Mapping[str, tuple[float, float]]:
    path = settings.service.state_file
    return levels.load(Path(path), time.time()) if path else {}


def _silence(settings: Settings) -> Silence:
    return Silence(settings.timeouts.stall_s, settings.gateway.idle_timeout_s)


def _preload(settings: Settings) -> None:
    """Load the vocabularies of all models that it names."""
    models = [model for route in settings.routes for model in route.models]
    models += [own for upstream in settings.upstreams.values() for own in upstream.models.values()]
    tokens.preload(models)


def _duty(work: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
    task = asyncio.create_task(work)
    task.add_done_callback(_end_if_broken)
    return task


def _end_if_broken(task: asyncio.Task[Any]) -> None:
    """A background duty that dies would leave a service that only looks alive: end it, something will restart it."""
    if not task.cancelled() and task.exception() is not None:
        log.critical("a background task broke", exc_info=task.exception())
        os._exit(70)
