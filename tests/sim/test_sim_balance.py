"""Conservation: whatever comes and goes, everything is given back and every request has one end.

`TIDEGATE_SCHEDULES=10000` plays that many random schedules instead of the usual few hundred; `TIDEGATE_FIRST_SEED` says
where to begin.
"""

import os

import pytest

from extproc.core.flight import Flight
from extproc.sim.outcome import Outcome
from extproc.sim.policies import PolicyName
from extproc.sim.run import simulate
from tests.sim.worlds import setup

SCHEDULES = int(os.environ.get("TIDEGATE_SCHEDULES", "500"))
FIRST = int(os.environ.get("TIDEGATE_FIRST_SEED", "0"))
BATCH = 25


def balanced(seed: int) -> Outcome:
    """The outcome of a random schedule, if it balances."""
    made = setup(seed)
    outcome = simulate(made)
    assert outcome.broken == [], f"seed {seed}, {made.policy}: {outcome.broken}"
    ends = outcome.all
    told = ends.served + sum(map(sum, (ends.shed.values(), ends.expired.values(), ends.failed.values())))
    assert told + ends.gone + ends.waiting == ends.offered == len(made.jobs), f"seed {seed}"
    assert ends.waiting == 0, f"seed {seed}"
    for name, seen in outcome.upstreams.items():
        assert seen.served <= seen.begun, f"seed {seed}, {name}"
    served = sum(seen.served for seen in outcome.upstreams.values())
    assert served >= ends.served, f"seed {seed}: {ends.served} answers were given, upstreams made {served}"
    return outcome


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("batch", range(-(-SCHEDULES // BATCH)))
def test_random_schedules_with_cancellations_balance(batch):
    """Arrivals, retries, departures, lingering connections, outages, blindness: nothing is lost or held in the end."""
    first = FIRST + batch * BATCH
    print(f"seeds {first} to {first + BATCH - 1}")  # noqa: T201 - so that a failure can be repeated
    for seed in range(first, first + BATCH):
        balanced(seed)


def seeds_of(policy: PolicyName, count: int) -> list[int]:
    """The first seeds whose schedule runs under a policy."""
    return [seed for seed in range(count * 20) if setup(seed).policy is policy][:count]


def test_a_permit_that_is_not_given_back_is_noticed(monkeypatch):
    """The check has teeth: flights that keep their slots."""
    monkeypatch.setattr(Flight, "land", lambda self, now: setattr(self, "landed", now) or [])
    outcomes = [simulate(setup(seed)) for seed in seeds_of(PolicyName.TIDEGATE, 5)]
    assert any("still held" in line for outcome in outcomes for line in outcome.broken)


def test_books_that_are_not_closed_are_noticed(monkeypatch):
    """The check has teeth: outcomes that settle nothing."""
    monkeypatch.setattr(Flight, "served", lambda *_, **__: [])
    outcomes = [simulate(setup(seed)) for seed in seeds_of(PolicyName.TIDEGATE, 5)]
    assert any("settled" in line for outcome in outcomes for line in outcome.broken)
