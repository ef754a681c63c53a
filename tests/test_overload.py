"""Twice as much as there is, for minutes, by clients that come back: what they are told is true.

A crowd against the real limiter in virtual time. Figures are printed with the seed; run with `-s` to see them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.capacity import Store
from extproc.core.policy import Lane, WhenBusy
from tests.crowd import Client, Crowd, Figures
from tests.doubles import VirtualLoop, play

SECONDS, WARM_S = 400.0, 120.0
TOKENS_PER_S = 4000.0
"""Requests are of 800 tokens in the mean, so this is five of them a second."""


def bucket(loop: VirtualLoop) -> Store:
    """A provider's tokens per minute."""
    return {"upstream/a/m/total": TokenBucket(TOKENS_PER_S, 10 * TOKENS_PER_S, 0.0, loop.time())}


def slots(loop: VirtualLoop) -> Store:  # noqa: ARG001 - one shape for both
    """Sixteen at a time, each for 2.75 s in the mean: nearly six a second."""
    return {"upstream/a/slots": Slots(16)}


def both(loop: VirtualLoop) -> Store:
    return bucket(loop) | slots(loop)


def lanes(*, bound: int = 10_000, share: float = 0.0) -> list[Lane]:
    return [
        Lane("P0", 0, 4, WhenBusy.SPILL, 1, bound, 10**9, 10**9),
        Lane("P1", 1, 30, WhenBusy.SPILL, 1, bound, 10**9, 10**9),
        Lane("P2", 2, 110, WhenBusy.HOLD, 1, bound, 10**9, 10**9, min_share=share),
    ]


def client(lane: str, **more: Any) -> Client:
    """One that comes back twice, and not when told to wait for more than a minute."""
    return Client(lane, persists=False, **more)


def crowd(
    clients: list[Client], store: Callable[[VirtualLoop], Store], seed: int, rules: list[Lane] | None = None
) -> Figures:
    async def scenario(loop: VirtualLoop) -> Figures:
        return await Crowd(loop, seed, rules or lanes(), store(loop)).run(clients, SECONDS, WARM_S)

    found = play(scenario)
    print(f"seed {seed}: {found.line()}")  # noqa: T201 - the figures are what this is for
    return found


STEADY = {
    "tokens": (bucket, [client("P1", per_s=10)]),
    "slots": (slots, [client("P1", per_s=11)]),
    "refunds": (both, [client("P1", per_s=11, used=(0.0, 1.0))]),
    "impatient": (bucket, [client("P0", per_s=10)]),
    "tenants": (bucket, [client("P1", tenant=name, per_s=rate) for name, rate in (("light", 0.5), ("x", 5), ("y", 5))]),
    "vips": (bucket, [client("P1", tenant="vip", vip=True, per_s=2), client("P1", tenant="x", per_s=8)]),
}
MIXED = [client("P0", per_s=1), client("P1", per_s=20, bursts=(12, 60)), client("P2", per_s=3)]


@pytest.mark.parametrize("case", STEADY)
@pytest.mark.parametrize("seed", [1])
def test_under_steady_overload_forecasts_are_right_and_nobody_is_promised_a_late_turn(case: str, seed: int) -> None:
    """Half of the waits are foretold within a tenth, nothing lies idle, and whoever is refused is gone for good."""
    store, clients = STEADY[case]
    found = crowd(clients, store, seed)
    assert len(found.told) < 10
    assert len(found.errors()) > 300
    assert found.error() < 0.1
    assert store is not bucket or busy(found) >= 0.96


LONG, SHORT = (15, 75), (2, 13)
BURSTS = {
    "tokens": (bucket, [client("P1", per_s=20, bursts=LONG)]),
    "slots": (slots, [client("P1", per_s=24, bursts=LONG)]),
    "refunds": (both, [client("P1", per_s=20, bursts=LONG, used=(0.0, 1.0))]),
    "impatient": (slots, [client("P0", per_s=20, bursts=SHORT)]),
    "tenants": (bucket, [client("P1", tenant=name, per_s=10, bursts=LONG) for name in ("x", "y")]),
    "vips": (
        bucket,
        [client("P1", tenant="vip", vip=True, per_s=4, bursts=LONG), client("P1", tenant="x", per_s=16, bursts=LONG)],
    ),
}


@pytest.mark.parametrize("case", BURSTS)
@pytest.mark.parametrize("seed", [1])
def test_who_is_refused_in_a_burst_has_its_turn_when_it_is_over(case: str, seed: int) -> None:
    """Nine in ten who come when told are served. Clients come up to a quarter of the time later than they are told."""
    store, clients = BURSTS[case]
    found = crowd(clients, store, seed)
    assert len(found.told) > 50
    assert found.kept() >= 0.9


@pytest.mark.parametrize("rules", [{}, {"share": 0.1}, {"bound": 40}], ids=["strict", "share", "bound"])
def test_promises_hold_beside_better_lanes_and_in_full_ones(rules: dict[str, Any]) -> None:
    """Whatever better lanes take meanwhile, what lower ones are guaranteed, or how few may wait."""
    found = crowd(MIXED, bucket, 1, lanes(**rules))
    assert len(found.told) > 50
    assert found.kept() >= 0.9
    assert busy(found) >= 0.96


def test_a_light_tenant_goes_on_as_if_there_were_no_flood() -> None:
    """Its requests wait for a request of the others or two, and none is refused."""
    _, clients = STEADY["tenants"]
    found = crowd(clients, bucket, 2)
    mine = found.of["light"]
    assert mine["served"] > 100
    assert sum(mine.values()) == mine["served"]
    assert found.longest["light"] < 6
    others = [found.served[name] for name in ("x", "y")]
    assert max(others) < 1.1 * min(others), "both are in line all the time"


def busy(found: Figures) -> float:
    """Which part of the bucket was used."""
    return sum(found.served.values()) / (TOKENS_PER_S * (SECONDS - WARM_S))
