"""What a replay sends: the trace, squeezed in time, with everything a trace does not say drawn by a seed.

A trace has no lanes, tenants or streaming flags. They are drawn from a stated mix, each request independently and from
its own number, so that the same seed gives the same plan whatever else changes.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite

from extproc.sim.trace import Arrival

__all__ = ["Mix", "MixError", "Planned", "offered_tokens_per_s", "plan"]


class MixError(Exception):
    """A mix cannot be read; one line says why."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Names and how often each is drawn; `shares` add up to one."""

    names: tuple[str, ...]
    shares: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Mix:
        """Read `P0=0.3,P1=0.7`; the numbers are weights, `name` alone weighs one. MixError on a mistake."""
        names, weights = [], []
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, number = part.partition("=")
            names.append(name.strip())
            weights.append(_weight(part, number or "1"))
        if not names or not all(names) or sum(weights) <= 0:
            raise MixError(f"{text!r} is not a mix such as P0=0.3,P1=0.7")
        if len(set(names)) < len(names):
            raise MixError(f"{text!r} names something twice")
        return cls(tuple(names), tuple(weight / sum(weights) for weight in weights))

    def pick(self, chance: float) -> str:
        """The name that `chance`, in [0, 1), falls on."""
        at = bisect_right(list(accumulate(self.shares)), chance)
        return self.names[min(at, len(self.names) - 1)]

    def __str__(self) -> str:
        return ", ".join(f"{name} {share:.0%}" for name, share in zip(self.names, self.shares, strict=True))


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to send. at_s: seconds after the start of the replay, wall time. tenant None: say nothing of it."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    lane: str
    tenant: str | None
    stream: bool


def plan(
    arrivals: Iterable[Arrival],
    *,
    speed: float,
    seconds: float,
    lanes: Mix,
    tenants: Mix | None = None,
    json_share: float = 0.0,
    seed: int = 1,
) -> list[Planned]:
    """Squeeze the first `seconds` x `speed` seconds of a trace into `seconds`; `json_share` of it does not stream."""
    return list(_planned(arrivals, speed, seconds, lanes, tenants, json_share, seed))


def offered_tokens_per_s(requests: Iterable[Planned], seconds: float) -> float:
    """Prompt and answer tokens per second of wall time."""
    return sum(request.prompt_tokens + request.output_tokens for request in requests) / seconds


def _planned(
    arrivals: Iterable[Arrival],
    speed: float,
    seconds: float,
    lanes: Mix,
    tenants: Mix | None,
    json_share: float,
    seed: int,
) -> Iterator[Planned]:
    for number, arrival in enumerate(arrivals):
        at_s = arrival.at_s / speed
        if at_s >= seconds:
            return
        chance = random.Random(f"{seed}/{number}")  # noqa: S311 - a draw, not a secret
        lane, tenant, streams = chance.random(), chance.random(), chance.random() >= json_share
        yield Planned(
            number=number,
            at_s=at_s,
            prompt_tokens=max(1, arrival.prompt_tokens),
            output_tokens=max(1, arrival.output_tokens),
            lane=arrival.lane or lanes.pick(lane),
            tenant=arrival.tenant or (tenants.pick(tenant) if tenants else None),
            stream=streams,
        )


def _weight(part: str, number: str) -> float:
    try:
        weight = float(number)
    except ValueError:
        weight = -1.0
    if not isfinite(weight) or weight < 0:
        raise MixError(f"{part!r} is not name=number")
    return weight
