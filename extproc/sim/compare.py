"""`tidegate simulate`: the same traffic under several policies and loads, side by side.

    compare(options, say) -> Comparison     every simulation, each in a process of its own where there is more than one
    run(options, ...) -> int                the command: simulate, print, write; the exit code

A load of k means that a trace arrives so fast that its requests per second are k times what the chain's upstreams can
take (see `capacity`); generated bursts state their own load, which k multiplies where there is no trace.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from extproc.core.policy import Policy
from extproc.core.refusal import Rejected
from extproc.core.routing import route_of
from extproc.settings import Settings, SettingsError
from extproc.sim import trace, traffic
from extproc.sim.capacity import capacities
from extproc.sim.outcome import Outcome
from extproc.sim.policies import PolicyName
from extproc.sim.run import Setup, simulate, slos_of
from extproc.sim.scenario import Burst, Scenario
from extproc.sim.traffic import Job, Mixes

__all__ = ["Comparison", "Options", "Prepared", "compare", "play_all", "prepare"]

RARELY = 200_000
TYPICAL = 400
"""Requests that are drawn to find out what a burst's sizes cost."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to simulate. trace None: only the scenario's bursts. requests: of the trace, at most. workers: processes."""

    settings: Settings
    scenario: Scenario = field(default_factory=Scenario)
    trace: Path | None = None
    requests: int | None = None
    loads: tuple[float, ...] = (0.5, 1.0, 2.0, 3.0)
    policies: tuple[PolicyName, ...] = tuple(PolicyName)
    model: str | None = None
    seed: int = 1
    workers: int = 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """All outcomes, loads in order and policies in order within each; and what was assumed.

    capacity_rps: by upstream, at the sizes of the traffic. took_s: CPU time of each simulation, by policy and load.
    """

    assumed: Sequence[str]
    slo_s: Mapping[str, float]
    capacity_rps: Mapping[str, float]
    outcomes: Sequence[Outcome]
    faults: Sequence[Mapping[str, object]]
    took_s: Mapping[str, float]

    @property
    def broken(self) -> list[str]:
        """Every invariant that did not hold, with where."""
        return [
            f"{outcome.policy} at load {outcome.load:g}: {line}" for outcome in self.outcomes for line in outcome.broken
        ]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Simulations to play, loads in order and policies in order within each; the rest as in `Comparison`."""

    setups: Sequence[Setup]
    capacity_rps: Mapping[str, float]
    assumed: Sequence[str]


def compare(options: Options, say: Callable[[str], None]) -> Comparison:
    """Run every policy at every load. `say` gets a line as each ends.

    SettingsError, TraceError as they are.
    """
    prepared = prepare(options)
    outcomes, took_s = play_all(prepared.setups, options.workers, say)
    return Comparison(
        assumed=prepared.assumed,
        slo_s=slos_of(options.scenario, options.settings.policy()),
        capacity_rps=prepared.capacity_rps,
        outcomes=outcomes,
        faults=[fault.model_dump(mode="json") | {"by": fault.factor} for fault in options.scenario.faults],
        took_s=took_s,
    )


def prepare(options: Options) -> Prepared:
    """What `compare` plays. SettingsError, TraceError as they are."""
    policy, model = options.settings.policy(), _model(options)
    if problems := list(options.scenario.problems(options.settings)):
        raise SettingsError([f"scenario: {problem}" for problem in problems])
    mixes = Mixes(options.scenario, policy)
    recorded = _recorded(options, mixes)
    capacity = capacities(options.settings, options.scenario, model, recorded or _typical(options, mixes))
    setups = [
        Setup(options.settings, options.scenario, jobs, name, model, load, options.seed, capacity)
        for load in options.loads
        for jobs in [_at(load, options, recorded, mixes, model, capacity)]
        for name in options.policies
    ]
    if problems := sorted({problem for setup in setups for problem in _beyond_the_end(setup)}):
        raise SettingsError([f"scenario: {problem}" for problem in problems])
    return Prepared(setups, capacity, list(_assumed(options, model, recorded, capacity)))


def _beyond_the_end(setup: Setup) -> Iterator[str]:
    """Faults that nobody would notice."""
    end_s = max(job.at_s for job in setup.jobs)
    for fault in setup.scenario.faults:
        if fault.at_s > end_s:
            load = "" if setup.load is None else f" at load {setup.load:g}"
            yield f"fault {fault.kind} {fault.upstream} at {fault.at_s:g}: the traffic{load} ends at {end_s:,.0f} s"


def _model(options: Options) -> str:
    policy = options.settings.policy()
    model = options.model or next((m for route in policy.routes for m in route.models if "*" not in m), "simulated")
    try:
        route_of(policy, model)
    except Rejected as rejected:
        raise SettingsError([f"--model: {rejected.detail}"]) from None
    return model


def _recorded(options: Options, mixes: Mixes) -> list[Job]:
    """The trace's jobs, at its own pace."""
    if options.trace is None:
        if not options.scenario.bursts:
            raise SettingsError(["nothing to simulate: give a trace or a burst"])
        return []
    arrivals: list[trace.Arrival] = []
    for arrival in trace.read(options.trace):
        if options.requests is not None and len(arrivals) >= options.requests:
            break
        arrivals.append(arrival)
    if len(arrivals) < 2 or arrivals[-1].at_s <= arrivals[0].at_s:  # noqa: PLR2004 - a pace needs two
        raise trace.TraceError(f"{options.trace}: has no two requests at different times")
    _must_fit(arrivals, options.settings.policy())
    first = arrivals[0].at_s
    return traffic.from_trace(
        [replace(a, at_s=a.at_s - first) for a in arrivals], options.scenario, mixes, options.seed
    )


def _must_fit(arrivals: Sequence[trace.Arrival], policy: Policy) -> None:
    known = (*policy.lanes, None)
    if unknown := sorted({str(arrival.lane) for arrival in arrivals if arrival.lane not in known}):
        raise SettingsError([f"trace: lane {unknown[0]!r} is not in the config; known: {', '.join(policy.lanes)}"])


def _typical(options: Options, mixes: Mixes) -> list[Job]:
    """Jobs of the bursts' sizes, as many of each."""
    return [job for burst in options.scenario.bursts for job in _draws(options, mixes, burst)]


def _draws(options: Options, mixes: Mixes, burst: Burst) -> list[Job]:
    steady = burst.model_copy(update={"at_s": 0.0, "for_s": float(TYPICAL), "rps": 1.0, "load": None})
    return traffic.bursts([steady], options.scenario, mixes, 1.0, options.seed)


def _at(
    load: float,
    options: Options,
    recorded: Sequence[Job],
    mixes: Mixes,
    model: str,
    capacity: Mapping[str, float],
) -> list[Job]:
    """The jobs of one load."""
    flows = []
    if recorded:
        native_rps = (len(recorded) - 1) / recorded[-1].at_s
        flows.append(traffic.compressed(recorded, load * sum(capacity.values()) / native_rps))
    for index, burst in enumerate(options.scenario.bursts):
        own = sum(capacities(options.settings, options.scenario, model, _draws(options, mixes, burst)).values())
        scaled = own if recorded else own * load
        flows.append(traffic.bursts([burst], options.scenario, mixes, scaled, options.seed + index))
    return traffic.merged(*flows)


def play_all(
    setups: Sequence[Setup], workers: int, say: Callable[[str], None]
) -> tuple[list[Outcome], dict[str, float]]:
    """Play them, in processes of their own where there are more than one: their outcomes, and seconds of CPU by name.

    `say` gets a line as each ends.
    """
    found: dict[int, tuple[Outcome, float]] = {}
    for number, outcome, took_s in _ended(setups, workers):
        found[number] = outcome, took_s
        say(f"{len(found)} of {len(setups)}: {outcome.policy} at load {outcome.load:g} took {took_s:.1f} s of CPU")
    outcomes = [found[number][0] for number in range(len(setups))]
    return outcomes, {f"{outcome.policy}@{outcome.load:g}": round(took_s, 2) for outcome, took_s in found.values()}


def _ended(setups: Sequence[Setup], workers: int) -> Iterator[tuple[int, Outcome, float]]:
    if workers <= 1 or len(setups) == 1:
        for number, setup in enumerate(setups):
            yield number, *_timed(setup)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(setups), os.cpu_count() or 1), spawn) as pool:
        numbers = {pool.submit(_timed, setup): number for number, setup in enumerate(setups)}
        for done in as_completed(numbers):
            yield numbers[done], *done.result()


def _timed(setup: Setup) -> tuple[Outcome, float]:
    began = time.process_time()
    with _rare_collections():
        outcome = simulate(setup)
    return outcome, time.process_time() - began


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Looking for garbage in a hundred thousand stories takes longer than the stories."""
    before = gc.get_threshold()
    gc.set_threshold(RARELY, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _assumed(options: Options, model: str, recorded: Sequence[Job], capacity: Mapping[str, float]) -> Iterator[str]:
    """A line for each thing that a reader of the figures must know."""
    scenario = options.scenario
    if recorded and options.trace is not None:
        yield (
            f"{options.trace.name}: {len(recorded):,} requests in {recorded[-1].at_s:,.0f} s, sped up or slowed down "
            f"to each load; model {model}, seed {options.seed}"
        )
    for burst in scenario.bursts:
        pace = f"{burst.rps:g} requests/s" if burst.rps else f"load {burst.load:g}"
        yield (
            f"burst in {burst.lane}: {pace} for {burst.for_s:g} s from {burst.at_s:g} s, prompts of "
            f"{burst.prompt[0]:,}-{burst.prompt[1]:,} tokens, answers of {burst.output[0]:,}-{burst.output[1]:,}"
            + (f", clients leave after {burst.patience_s:g} s" if burst.patience_s else "")
        )
    taken = ", ".join(f"{name} {rps:.2f}" for name, rps in capacity.items())
    yield f"load 1 is {sum(capacity.values()):.2f} requests/s of these sizes ({taken})"
    clients = scenario.clients
    yield (
        f"clients try again up to {clients.retries} times as the SDKs do, and leave after {clients.timeout_s:g} s; "
        f"{scenario.json_share:.0%} do not stream; "
        + (f"{scenario.uncapped:.0%} name no max_tokens, the others" if scenario.uncapped else "all name max_tokens,")
        + " their answer's length up to the next power of two"
    )
    yield (
        f"our tokenizer counts {scenario.miscount:+.0%} of what the upstream does, give or take "
        f"{scenario.miscount_spread:.0%} from prompt to prompt"
    )
