"""The product in virtual time: the handler and everything that decides, the very objects that serve in the service.

    Gateway(stage, settings, policy, ...)    Admission, Reception, Dispatch, Handler, canaries, scrapes
    Direct(stage, ...)                       no gateway: each caller talks to one upstream
    await service.call(job, attempt, first)  one HTTP request of a client, and what it got

The body of a request is a few bytes that name its job, so that a retry is a repetition; only how long its prompt is
comes from the job and not from the tokenizer. A client that leaves cancels the handler, wherever it is.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import aiohttp

from extproc.admission import Admission
from extproc.core.identity import Directory
from extproc.core.policy import Policy, Route
from extproc.core.request import Call, Dialect
from extproc.core.routing import bucket_key, route_of
from extproc.dispatch import Dispatch, Outlook, Timing
from extproc.handler import Handler
from extproc.ports import Head, Observer, Record
from extproc.probes.canary import Canary, Finding, Question, Target
from extproc.probes.engines import Pool as Watched
from extproc.probes.engines import Rounds
from extproc.probes.exposition import Sample, Unreadable
from extproc.reception import Reception, SessionRules
from extproc.settings import Settings
from extproc.sim.engine import Pool
from extproc.sim.envoy import TIMED_OUT, Reply, SimulatedExchange, Stage, work_of
from extproc.sim.traffic import Job
from extproc.sim.work import CANARY, SUCCESS, Work
from extproc.sizes import Counted
from extproc.wording import Wording

__all__ = ["Direct", "Gateway", "Service"]

RECORDS_S = 0.02
"""Envoy gathers access-log records this long."""
TENANT_HEADER = "x-simulated-tenant"
SWEEP_S = 1.0
LATE = 4_102_444_800.0
"""The calendar's time at the start, in epoch seconds: a month begins, and whatever prices are known have begun."""
CANARY_S = 5.0


class Service(Protocol):
    """Whatever a client sends its requests to."""

    async def call(self, job: Job, attempt: int, first: Callable[[], None]) -> Reply:
        """Serve one request; `first` is called when its answer begins to be generated."""
        ...


class Direct:
    """No gateway: a job goes to the upstream that `place` gives it, every time."""

    def __init__(self, stage: Stage, place: Callable[[Job], str]) -> None:
        """Nothing is kept."""
        self._stage = stage
        self._place = place

    async def call(self, job: Job, attempt: int, first: Callable[[], None]) -> Reply:
        """See Service."""
        del attempt
        name = self._place(job)
        model, work = self._stage.models[name], work_of(self._stage, job, 0)
        model.begin(work)
        try:
            told = await work.told
            if told.status != SUCCESS:
                return Reply(told.status, told.headers, upstream=name)
            first()
            return Reply(SUCCESS, told.headers, whole=await work.ended, upstream=name)
        finally:
            model.abandon(work)


class Gateway:
    """See the head of this file. `observe` hears every event; `rng` is all the chance there is.

    forwarded: requests that went on to an upstream. left: requests whose client left before that.
    """

    def __init__(
        self,
        stage: Stage,
        settings: Settings,
        policy: Policy,
        observe: Observer,
        rng: random.Random,
        *,
        lanes: bool = True,
    ) -> None:
        """lanes: callers say which lane they are in; else each is in its tenant's."""
        self.stage = stage
        self.policy = policy
        self._lanes = lanes
        self._settings = settings
        self._observe = observe
        self._rng = rng
        self.admission = Admission(
            policy,
            stage.loop,
            observe,
            grace_s=settings.service.record_grace_s,
            calibrate=settings.tokens.calibrate,
            levels=_full(policy),
            chance=rng.random,
            epoch_offset=LATE,
        )
        self.forwarded = 0
        self.left = 0
        self._path = _path(policy, stage.model)
        self._handler = self._wired()
        self._records: list[Record] = []
        self._recorded = asyncio.Event()
        self._tasks: list[asyncio.Future[Any]] = []

    def start(self) -> None:
        """Begin all duties that run beside the requests."""
        duties = [self.admission.limiter.run(), self._sweep(), self._learn(), self._canary().run()]
        duties += [pool.run() for pool in self._watched()]
        self._tasks = [asyncio.ensure_future(duty) for duty in duties]

    async def stop(self) -> None:
        """End them; a duty that broke is raised."""
        for task in self._tasks:
            task.cancel()
        for end in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(end, Exception):
                raise end

    async def call(self, job: Job, attempt: int, first: Callable[[], None]) -> Reply:
        """See Service."""
        exchange = SimulatedExchange(self, job, attempt, first)
        try:
            await self._handler(exchange)
        except asyncio.CancelledError:
            self.left += not exchange.forwarded
            raise
        finally:
            self.forwarded += exchange.forwarded
        return exchange.reply

    def head(self, job: Job, attempt: int) -> Head:
        """The headers that a client of this kind sends."""
        headers = {
            ":method": "POST",
            ":path": self._path,
            "content-type": "application/json",
            "x-request-id": f"{job.number}-{attempt}",
            "x-session-id": job.session,
            "x-stainless-retry-count": str(attempt),
            TENANT_HEADER: job.tenant,
        }
        if self._lanes:
            headers["x-tidegate-priority"] = job.lane
        if job.clients.tells_timeout:
            headers["x-stainless-read-timeout"] = f"{job.clients.timeout_s:g}"
        return Head(headers, bodiless=False)

    def body(self, job: Job) -> bytes:
        """A body that says whose it is and how long its prompt is, the same for every retry."""
        fields: dict[str, Any] = {"model": self.stage.model, "stream": job.stream}
        if job.cap is not None:
            fields["max_tokens"] = job.cap
        fields["messages"] = [{"role": "user", "content": f"{job.number}:{job.counted}"}]
        return json.dumps(fields, separators=(",", ":")).encode()

    def report(self, record: Record) -> None:
        """A record that will be read a little later."""
        self._records.append(record)
        if len(self._records) == 1:
            self.stage.loop.call_later(RECORDS_S, self._recorded.set)

    def _wired(self) -> Handler:
        policy, settings, admission, loop = self.policy, self._settings, self.admission, self.stage.loop
        wording = Wording(settings.status_of, self._rng.random)
        reception = _Reception(
            policy,
            Directory(policy.tenants, (f"header:{TENANT_HEADER}",), reject_unknown=False, any_tenant=policy.any_tenant),
            admission.calibration,
            admission.affinity,
            admission.pace,
            admission.outputs,
            admission.allowances.sessions.fresh,
            loop,
            process="simulated",
            sessions=SessionRules(settings.identity.session_headers, settings.identity.session_window_s),
            executor=ThreadPoolExecutor(max_workers=1),
            chance=self._rng.random,
            rates=admission.rates,
        )
        limits = settings.timeouts
        timing = Timing(limits.first_token_s, limits.prompt_tokens_per_s, limits.stall_s, limits.answer_s)
        health = admission.breakers.allows, admission.breakers.fits
        flights, limiter = admission.flights, admission.limiter
        outlook = Outlook(admission.breakers.rest_s, admission.breakers.earliest_probe, limiter.prospects.predicted_s)
        slow = admission.breakers.slow
        dispatch = Dispatch(policy, admission.capacity, loop, timing, wording, *health, outlook=outlook, slow=slow)
        return Handler(reception, admission.copies, flights, limiter, dispatch, wording, loop, admission.observe)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.admission.sweep()

    async def _learn(self) -> None:
        while True:
            await self._recorded.wait()
            self._recorded.clear()
            records, self._records = self._records, []
            for record in records:
                await self.admission.hear(record)

    def _canary(self) -> Canary:
        targets = {name: Target(upstream, self.stage.model) for name, upstream in self.policy.upstreams.items()}
        return _Probe(self.stage, self.admission, targets, self._observe)

    def _watched(self) -> Iterator[Watched]:
        admission, loop = self.admission, self.stage.loop
        for name, upstream in self._settings.upstreams.items():
            kv, pool = upstream.kv, self.stage.models[name]
            if kv is not None and isinstance(pool, Pool):
                yield Watched(
                    name,
                    kv.rules(),
                    _Metrics(name, pool, self.stage.blind),
                    Rounds(kv.scrape_s),
                    admission.capacity,
                    loop,
                    self._observe,
                    admission.limiter.kick,
                    self._rng.random,
                )


class _Reception(Reception):
    """Takes the length of a prompt from the job, instead of reading it."""

    async def _count(self, call: Call, route: Route, usual: int, tpm: int | None) -> Counted:
        del route, usual, tpm
        return Counted(int(call.prompt.texts[0].rpartition(":")[2]))


class _Probe(Canary):
    """Sends its canaries to the models."""

    def __init__(self, stage: Stage, admission: Admission, targets: Mapping[str, Target], observe: Observer) -> None:
        super().__init__("", targets, admission.breakers, admission.capacity, stage.loop, observe, admission.rates)
        self._stage = stage

    async def _call(self, session: aiohttp.ClientSession, question: Question) -> Finding:
        del session
        loop, size = self._stage.loop, question.form.size
        model = self._stage.models[question.upstream.name]
        work = Work(CANARY, size.input, size.output, size.output, 0, loop)
        timer = loop.call_later(CANARY_S, work.tell, TIMED_OUT)
        model.begin(work)
        try:
            told = await work.told
            if told.status != SUCCESS:
                return Finding(f"canary got status {told.status}")
            return Finding(used=size) if await work.ended else Finding("canary was cut")
        finally:
            timer.cancel()
            model.abandon(work)


class _Metrics:
    """An engine's metrics, as a source for the scraper."""

    def __init__(self, name: str, pool: Pool, blind: Collection[str]) -> None:
        self._name = name
        self._pool = pool
        self._blind = blind

    async def addresses(self) -> Collection[str]:
        return [str(number) for number in range(len(self._pool.scrape()))]

    async def ask(self, address: str) -> Sample:
        if self._name in self._blind:
            raise Unreadable("no answer")
        seen = self._pool.scrape()[int(address)]
        return Sample(seen.usage, seen.waiting, seen.running, seen.preemptions, float(self._pool.rules.kv_tokens))


def _path(policy: Policy, model: str) -> str:
    """Where callers of this model send to: OpenAI's API wherever somebody speaks it."""
    spoken = {dialect for name in route_of(policy, model).chain for dialect in policy.upstreams[name].dialects}
    return "/v1/chat/completions" if Dialect.OPENAI in spoken else "/v1/messages"


def _full(policy: Policy) -> Mapping[str, tuple[float, float]]:
    """Levels of a service that has stood idle for a while."""
    return {
        bucket_key(upstream.name, limit): (limit.capacity, 0.0)
        for upstream in policy.upstreams.values()
        for limit in upstream.limits
    }
