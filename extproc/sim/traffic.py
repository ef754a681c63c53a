"""What callers want: a trace and generated bursts, with everything that neither says drawn by a seed.

Every request draws from a source of its own, made of the seed and its number, so that the same seed gives the same
traffic whatever policy meets it. Prompts are as long as the upstream counts them; `counted` is what our own tokenizer
would say, which is off by the scenario's `miscount` and differs from prompt to prompt.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from extproc.core.policy import Policy
from extproc.sim.scenario import Burst, Clients, Scenario
from extproc.sim.trace import Arrival

__all__ = ["Job", "Mixes", "bursts", "compressed", "from_trace", "merged"]

SHARES = (0.3, 0.4, 0.3)
"""Of the best lane, the next, and all others together, where the scenario does not say."""
LEAST_CAP = 256
AT_A_TIME = 24
"""Sessions under way at any time, shared out among lanes and tenants; each job draws one."""


@dataclass(frozen=True, slots=True)
class Job:
    """One thing that a caller wants; its retries are the same job. Sizes in tokens.

    at_s: seconds after the start. cap: None where the caller names none. counted: what our tokenizer says of the
    prompt. burst: whether it belongs to a generated burst.
    """

    number: int
    at_s: float
    prompt: int
    output: int
    cap: int | None
    counted: int
    lane: str
    tenant: str
    session: str
    stream: bool
    clients: Clients
    burst: bool = False


class Mixes:
    """How lanes and tenants are drawn for `scenario`, when all of them are in `policy`."""

    def __init__(self, scenario: Scenario, policy: Policy) -> None:
        """Work out the weights once."""
        lanes = sorted(policy.lanes.values(), key=lambda lane: lane.rank)
        usual = [*SHARES[: len(lanes)], *[SHARES[-1]] * (len(lanes) - len(SHARES))]
        weights = scenario.lanes or {lane.name: weight for lane, weight in zip(lanes, usual, strict=True)}
        self._lanes = _Urn(weights)
        named = scenario.tenants or dict.fromkeys(_listed(policy), 1.0)
        self._tenants = {
            lane.name: _Urn(
                {name: weight for name, weight in named.items() if _may(policy, name, lane.name)} or {"default": 1.0}
            )
            for lane in lanes
        }

    @property
    def groups(self) -> int:
        """How many pairs of a lane and a tenant there are."""
        return sum(map(len, self._tenants.values()))

    def lane(self, chance: float) -> str:
        """The lane that `chance`, in [0, 1), falls on."""
        return self._lanes.draw(chance)

    def tenant(self, lane: str, chance: float) -> str:
        """The tenant, among those that may use the lane."""
        return self._tenants[lane].draw(chance)


def from_trace(arrivals: Iterable[Arrival], scenario: Scenario, mixes: Mixes, seed: int) -> list[Job]:
    """The jobs of a trace, at its own pace."""
    return [_job(number, arrival, scenario, mixes, seed) for number, arrival in enumerate(arrivals)]


def bursts(found: Sequence[Burst], scenario: Scenario, mixes: Mixes, capacity_rps: float, seed: int) -> list[Job]:
    """The jobs of generated bursts. `capacity_rps`: requests of the burst's sizes per second that count as load 1."""
    jobs = []
    for index, burst in enumerate(found):
        rng = random.Random(f"{seed}/burst/{index}")  # noqa: S311 - a draw, not a secret
        rate = burst.rps or (burst.load or 0.0) * capacity_rps
        jobs += list(_of_burst(burst, rate, rng, (scenario, mixes, f"{seed}/burst/{index}")))
    return jobs


def compressed(jobs: Sequence[Job], speed: float) -> list[Job]:
    """The same jobs, arriving `speed` times as fast."""
    return [replace(job, at_s=job.at_s / speed) for job in jobs]


def merged(*flows: Sequence[Job]) -> list[Job]:
    """All flows in order of time, numbered anew."""
    jobs = sorted((job for flow in flows for job in flow), key=lambda job: job.at_s)
    return [replace(job, number=number) for number, job in enumerate(jobs)]


def _job(number: int, arrival: Arrival, scenario: Scenario, mixes: Mixes, seed: int | str) -> Job:
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - a draw, not a secret
    lane, prompt, output = arrival.lane or mixes.lane(rng.random()), arrival.prompt_tokens, arrival.output_tokens
    tenant = arrival.tenant or mixes.tenant(lane, rng.random())
    off = 1.0 + scenario.miscount + scenario.miscount_spread * (2.0 * rng.random() - 1.0)
    prompt, output = max(1, prompt), max(1, output)
    return Job(
        number=number,
        at_s=arrival.at_s,
        prompt=prompt,
        output=output,
        cap=None if rng.random() < scenario.uncapped else max(LEAST_CAP, 1 << (output - 1).bit_length()),
        counted=max(1, round(prompt * off)),
        lane=lane,
        tenant=tenant,
        session=_session(number, f"{tenant}-{lane}", mixes.groups, scenario.calls_per_session, rng),
        stream=rng.random() >= scenario.json_share,
        clients=scenario.clients_of.get(lane, scenario.clients),
    )


def _session(number: int, group: str, groups: int, calls: float, rng: random.Random) -> str:
    """One of those under way in its group, until each has had its calls."""
    slots = max(1, AT_A_TIME // groups)
    return f"{group}-{int(number / (slots * groups * calls))}-{rng.randrange(slots)}"


def _of_burst(burst: Burst, rate: float, rng: random.Random, made: tuple[Scenario, Mixes, str]) -> Iterator[Job]:
    at_s, number, (scenario, mixes, seed) = burst.at_s, 0, made
    changes = {"timeout_s": burst.patience_s, "tells_timeout": False} if burst.patience_s else {}
    changes |= {} if burst.retries is None else {"retries": burst.retries}
    while (at_s := at_s + rng.expovariate(rate)) < burst.at_s + burst.for_s:
        arrival = Arrival(at_s, rng.randint(*burst.prompt), rng.randint(*burst.output), burst.lane, burst.tenant)
        job = _job(number, arrival, scenario, mixes, seed)
        yield replace(job, clients=job.clients.model_copy(update=changes), burst=True)
        number += 1


class _Urn:
    """Names and how often each is drawn."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._names = list(weights)
        self._edges = list(accumulate(weights.values()))

    def __len__(self) -> int:
        return len(self._names)

    def draw(self, chance: float) -> str:
        return self._names[min(bisect_right(self._edges, chance * self._edges[-1]), len(self._names) - 1)]


def _listed(policy: Policy) -> list[str]:
    """Every tenant of the config; the one of callers that nobody knows only where it is alone."""
    return [name for name in policy.tenants if name != "default"] or ["default"]


def _may(policy: Policy, tenant: str, lane: str) -> bool:
    rules = policy.tenants.get(tenant) or policy.any_tenant
    return rules is not None and lane in rules.lanes
