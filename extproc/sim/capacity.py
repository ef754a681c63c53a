"""What upstreams can take: requests per second of given sizes, the unit in which load is stated.

An account takes what its tightest limit allows at the mean request. An engine's throughput depends on everything, so it
is measured: the model is given as many of the requests at a time as its KV cache can hold to their ends, and what it
finishes per second is what it can take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from statistics import fmean

from extproc.core.policy import Accounting
from extproc.core.routing import route_of
from extproc.settings import Settings, SettingsError
from extproc.sim.account import AccountRules
from extproc.sim.engine import Pool
from extproc.sim.scenario import Scenario
from extproc.sim.traffic import Job
from extproc.sim.virtual import VirtualLoop, play
from extproc.sim.work import Work

__all__ = ["capacities"]

SAMPLE = 1500


def capacities(settings: Settings, scenario: Scenario, model: str, jobs: Sequence[Job]) -> dict[str, float]:
    """Requests per second that each upstream of the model's chain can take, of the sizes of `jobs`.

    SettingsError when nothing limits one.
    """
    sample = jobs[:: max(1, len(jobs) // SAMPLE)][:SAMPLE]
    found = {}
    for name in route_of(settings.policy(), model).chain:
        engine = scenario.engine_of(settings, name)
        if engine is None:
            found[name] = min(_account_rps(scenario.account_rules(settings, name, model), sample))
        else:
            found[name] = _engine_rps(scenario, settings, name, sample)
        if found[name] == inf:
            raise SettingsError([f"upstreams.{name}: nothing limits it; say its limits in the scenario"])
    return found


def _account_rps(rules: AccountRules, jobs: Sequence[Job]) -> Iterator[float]:
    """What each limit allows."""

    def generated(job: Job) -> int:
        return job.output if job.cap is None or rules.accounting is Accounting.ACTUAL else job.cap

    prompt, output = fmean(job.prompt for job in jobs), fmean(map(generated, jobs))
    each = {rules.tpm: prompt + output, rules.input_tpm: prompt, rules.output_tpm: output, rules.rpm: 1.0}
    yield from (limit / 60.0 / size for limit, size in each.items() if limit is not None)
    if rules.concurrency is not None:
        hold_s = rules.first_token_s + prompt / rules.prompt_tokens_per_s
        hold_s += fmean(job.output for job in jobs) / rules.output_tokens_per_s
        yield rules.concurrency / hold_s
    yield inf


def _engine_rps(scenario: Scenario, settings: Settings, name: str, jobs: Sequence[Job]) -> float:
    engine = scenario.engine_of(settings, name)
    assert engine is not None  # noqa: S101 - asked for engines only
    rules = scenario.engine_rules(settings, name, engine)

    async def flood(loop: VirtualLoop) -> float:
        pool, began, turn = Pool(rules, engine.instances, loop), loop.time(), asyncio.Event()
        free, places = rules.kv_tokens * engine.instances, rules.max_running * engine.instances

        def end(size: int, _: asyncio.Future[bool]) -> None:
            nonlocal free, places
            free, places = free + size, places + 1
            turn.set()

        for job in jobs:
            size = min(job.prompt + job.output, rules.kv_tokens)
            while free < size or not places:
                turn.clear()
                await turn.wait()
            work = Work(job.number, job.prompt, job.output, job.cap, 0, loop)
            work.ended.add_done_callback(partial(end, size))
            free, places = free - size, places - 1
            pool.begin(work)
        if loop.time() == began:  # too few to fill it
            await work.ended
        return pool.books.served / (loop.time() - began)

    return play(flood)
