"""One simulation: one policy against one stretch of traffic, in virtual time, to the end of the last client.

    simulate(setup) -> Outcome

Afterwards everything must balance: each job has an end, each request that the gateway let go was settled once, no
permit is held, no line is occupied, and every bucket fills up again. What does not is in `Outcome.broken`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from math import inf

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.policy import Policy
from extproc.core.routing import route_of
from extproc.core.watermark import Watermark
from extproc.settings import Settings
from extproc.sim.account import Account
from extproc.sim.callers import Caller, Story
from extproc.sim.ears import Ears, Watch
from extproc.sim.engine import Pool
from extproc.sim.envoy import Stage
from extproc.sim.gateway import Direct, Gateway, Service
from extproc.sim.outcome import Outcome, outcome_of
from extproc.sim.policies import PolicyName, policy_of
from extproc.sim.scenario import Fault, FaultKind, Scenario
from extproc.sim.traffic import Job
from extproc.sim.virtual import VirtualLoop, play
from extproc.sim.work import MINUTE_S, Model

__all__ = ["Setup", "models_of", "simulate", "slos_of"]

FIRST_TOKEN_S = (5.0, 60.0, 3600.0)
"""SLOs where the scenario does not say: somebody watches, a program waits, batch work; lanes below as the last."""
FILL_UP_S = 3600.0
LOOK_S = 10.0


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything one simulation needs, as plain data. shares: of the upstreams in policy `none`, by name."""

    settings: Settings
    scenario: Scenario
    jobs: Sequence[Job]
    policy: PolicyName
    model: str
    load: float | None = None
    seed: int = 1
    shares: Mapping[str, float] | None = None


def simulate(setup: Setup) -> Outcome:
    """Run it. Stuck when the simulated world stands still, and whatever the deciding code raises."""
    with _quiet_log():
        return play(lambda loop: _Run(setup, loop).all())


def slos_of(scenario: Scenario, policy: Policy) -> dict[str, float]:
    """First token within so many seconds, by lane."""
    lanes = sorted(policy.lanes.values(), key=lambda lane: lane.rank)
    usual = zip(lanes, chain(FIRST_TOKEN_S, repeat(FIRST_TOKEN_S[-1])), strict=False)
    return {lane.name: scenario.slo_s.get(lane.name, slo_s) for lane, slo_s in usual}


def models_of(settings: Settings, scenario: Scenario, model: str, loop: VirtualLoop, seed: int) -> dict[str, Model]:
    """The models of all upstreams."""
    found: dict[str, Model] = {}
    for name in settings.upstreams:
        engine = scenario.engine_of(settings, name)
        if engine is not None:
            found[name] = Pool(scenario.engine_rules(settings, name, engine), engine.instances, loop)
        else:
            rng = random.Random(f"{seed}/{name}")  # noqa: S311 - a draw, not a secret
            found[name] = Account(scenario.account_rules(settings, name, model), loop, rng)
    return found


class _Run:
    """One simulation under way."""

    def __init__(self, setup: Setup, loop: VirtualLoop) -> None:
        self._setup = setup
        self._loop = loop
        self._rules = setup.settings.policy()
        models = models_of(setup.settings, setup.scenario, setup.model, loop, setup.seed)
        self._stage = Stage(loop, models, setup.model)
        self._ears = Ears()
        self._gateway = self._made()
        service: Service = self._gateway or Direct(self._stage, self._place)
        self._caller = Caller(service, loop, self._rng("callers"))
        self._watch = Watch(models, self._gateway, self._ears)
        self._stories: list[Story] = []
        self._began = loop.time()

    async def all(self) -> Outcome:
        """Play the traffic and the faults, wait for the last client, let everything settle, and look."""
        if self._gateway is not None:
            self._gateway.start()
        watching = asyncio.ensure_future(self._watch.run())
        for fault in self._setup.scenario.faults:
            self._loop.call_at(self._began + fault.at_s, partial(self._strike, fault, begins=True))
            self._loop.call_at(self._began + fault.at_s + fault.for_s, partial(self._strike, fault, begins=False))
        await self._play()
        lasted_s = self._loop.time() - self._began
        watching.cancel()
        await self._settle()
        broken = list(self._broken())
        if self._gateway is not None:
            await self._gateway.stop()
        return self._outcome(lasted_s, broken)

    def _made(self) -> Gateway | None:
        setup = self._setup
        if setup.policy is PolicyName.NONE:
            return None
        rules = policy_of(setup.policy, self._rules)
        lanes = setup.policy is not PolicyName.FIFO
        return Gateway(self._stage, setup.settings, rules, self._ears, self._rng("gateway"), lanes=lanes)

    def _rng(self, what: str) -> random.Random:
        return random.Random(f"{self._setup.seed}/{what}")  # noqa: S311 - a draw, not a secret

    def _place(self, job: Job) -> str:
        """Where a job goes when there is no gateway: upstreams are shared out by what they can take."""
        chain = route_of(self._rules, self._setup.model).chain
        shares = self._setup.shares or {}
        return random.Random(f"{self._setup.seed}/place/{job.number}").choices(  # noqa: S311 - a draw, not a secret
            chain, [shares.get(name, 1.0) for name in chain]
        )[0]

    async def _play(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        for job in self._setup.jobs:
            wait = self._began + job.at_s - self._loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            story = Story(job)
            self._stories.append(story)
            task = asyncio.ensure_future(self._caller.want(job, story))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        while tasks:
            done, _ = await asyncio.wait(tasks)
            for task in done:
                task.result()
        await self._caller.quiet()

    def _strike(self, fault: Fault, *, begins: bool) -> None:
        model = self._stage.models[fault.upstream]
        match fault.kind:
            case FaultKind.OUTAGE:
                model.fail(down=begins)
            case FaultKind.SLOW:
                model.slow(fault.factor if begins else 1.0)
            case FaultKind.LIMIT if isinstance(model, Account):
                model.limit(fault.factor if begins else 1.0)
            case FaultKind.BLIND if begins:
                self._stage.blind.add(fault.upstream)
            case _:
                self._stage.blind.discard(fault.upstream)

    async def _settle(self) -> None:
        """Until every record is in and every bucket is full again, or an hour has passed."""
        until = self._loop.time() + FILL_UP_S
        await asyncio.sleep(self._setup.settings.service.record_grace_s + LOOK_S)
        gateway = self._gateway
        while gateway is not None and self._loop.time() < until and any(self._filling(gateway)):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    def _filling(self, gateway: Gateway) -> Iterator[str]:
        now = self._loop.time()
        for key, counter in gateway.admission.capacity.levels().items():
            if isinstance(counter, TokenBucket) and counter.rate > 0 and counter.capacity < inf:
                level = counter.level_at(now)
                if level < counter.capacity - 1.0:
                    yield f"{key} stays at {level:,.0f} of {counter.capacity:,.0f}"

    def _broken(self) -> Iterator[str]:
        """What does not balance; see the head of this file."""
        stories = self._stories
        if len(stories) != len(self._setup.jobs) or not all(story.over for story in stories):
            yield f"{sum(not story.over for story in stories)} jobs of {len(self._setup.jobs)} have no end"
        for name, model in self._stage.models.items():
            if model.books.running:
                yield f"{name} still runs {model.books.running}"
        if self._gateway is not None:
            yield from self._unbalanced(self._gateway)

    def _unbalanced(self, gateway: Gateway) -> Iterator[str]:
        admission, ears = gateway.admission, self._ears
        admitted, refused = sum(ears.admitted.values()), sum(ears.refused.values())
        sent = sum(story.tries for story in self._stories)
        if sent != admitted + refused + gateway.left:
            yield f"{sent} requests came, {admitted} were let go, {refused} refused, {gateway.left} left in line"
        if gateway.forwarded != admitted:
            yield f"{admitted} were let go, {gateway.forwarded} were forwarded"
        if ears.settled != admitted:
            yield f"{admitted} were let go, {ears.settled} were settled"
        if len(admission.lanes):
            yield f"{len(admission.lanes)} still stand in line"
        if len(admission.flights) or admission.flights.unsettled:
            yield f"{len(admission.flights)} still fly, {admission.flights.unsettled} have open books"
        for key, counter in admission.capacity.levels().items():
            if isinstance(counter, Slots) and abs(counter.used) > 1e-6:  # noqa: PLR2004 - rounding
                yield f"{key}: {counter.used:g} still held"
            elif isinstance(counter, Watermark) and (counter.held or abs(counter.booked) > 1e-6):  # noqa: PLR2004
                yield f"{key}: {counter.held} still held, {counter.booked:g} tokens booked"
        yield from self._filling(gateway)

    def _outcome(self, lasted_s: float, broken: Sequence[str]) -> Outcome:
        setup = self._setup
        books = {name: (model.books, _allowed(model)) for name, model in self._stage.models.items()}
        above = [
            f"{name} charged {book.busiest_minute:,.0f} tokens in a minute, {allowed:,.0f} are allowed"
            for name, (book, allowed) in books.items()
            if allowed is not None and book.busiest_minute > allowed * (1.0 + 1e-9) and not book.late
        ]
        return outcome_of(
            setup.policy, setup.load, self._stories, books, self._ears, self._watch.series,
            slo_s=slos_of(setup.scenario, self._rules), silence_s=self._watch.silence_s,
            lasted_s=lasted_s, broken=[*broken, *above],
        )  # fmt: skip


def _allowed(model: Model) -> float | None:
    """Tokens that a limit allows within any minute: a full bucket or what is larger, and a minute of refill."""
    if not isinstance(model, Account) or model.rules.tpm is None:
        return None
    bucket = model.rules.tpm * model.rules.burst_s / MINUTE_S
    return model.rules.tpm + max(bucket, model.books.largest)


@contextmanager
def _quiet_log() -> Iterator[None]:
    """What goes wrong on purpose is in the figures."""
    log = logging.getLogger("tidegate")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
