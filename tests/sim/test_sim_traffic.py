"""What callers want: the same by the same seed, and as the scenario says."""

import pytest

from extproc.settings import parse
from extproc.sim.scenario import Clients, Scenario, changed
from extproc.sim.trace import Arrival
from extproc.sim.traffic import Mixes, bursts, compressed, from_trace, merged
from tests.sim.worlds import BOTH

POLICY = parse(BOTH + "tenants: {chat: {lanes: [P0, P1]}, etl: {lanes: [P2]}}\n", "test").policy()
ARRIVALS = [Arrival(float(number), 100 + number, 1 + number % 600) for number in range(2000)]


def jobs(scenario: Scenario | None = None, seed: int = 1):
    scenario = scenario or Scenario()
    return from_trace(ARRIVALS, scenario, Mixes(scenario, POLICY), seed)


def test_the_same_seed_is_the_same_traffic():
    """And a request draws the same whatever comes before it."""
    assert jobs() == jobs()
    assert jobs() != jobs(seed=2)
    scenario = Scenario()
    assert from_trace(ARRIVALS[:100], scenario, Mixes(scenario, POLICY), 1) == jobs()[:100]


def test_lanes_and_tenants_are_drawn_as_often_as_said_and_fit_each_other():
    """Nobody is in a lane that its tenant may not use."""
    drawn = jobs(Scenario(lanes={"P0": 1.0, "P2": 3.0}))
    assert sum(job.lane == "P2" for job in drawn) / len(drawn) == pytest.approx(0.75, abs=0.03)
    assert all(job.tenant == ("etl" if job.lane == "P2" else "chat") for job in drawn)
    usual = jobs()
    assert [sum(job.lane == lane for job in usual) / len(usual) for lane in POLICY.lanes] == pytest.approx(
        [0.3, 0.4, 0.3], abs=0.04
    )


def test_what_the_trace_says_is_kept():
    """Its own lanes and tenants."""
    scenario = Scenario()
    job = from_trace([Arrival(0.0, 1, 1, "P1", "etl")], scenario, Mixes(scenario, POLICY), 1)[0]
    assert (job.lane, job.tenant) == ("P1", "etl")


def test_caps_are_powers_of_two_above_the_answer_where_named():
    """At least 256."""
    drawn = jobs(Scenario(uncapped=0.25))
    named = [job for job in drawn if job.cap is not None]
    assert len(named) / len(drawn) == pytest.approx(0.75, abs=0.03)
    assert all(job.cap >= max(256, job.output) and job.cap < 2 * max(256, job.output) for job in named)
    assert all(job.cap.bit_count() == 1 for job in named)


def test_our_own_count_is_off_as_said():
    """By the bias on the whole, and never by more than bias and spread together."""
    drawn = jobs(Scenario(miscount=0.1, miscount_spread=0.02))
    off = [job.counted / job.prompt - 1 for job in drawn]
    assert sum(off) / len(off) == pytest.approx(0.1, abs=0.01)
    assert max(abs(one - 0.1) for one in off) < 0.03


def test_sessions_have_as_many_calls_as_said():
    """On the whole."""
    drawn = jobs(Scenario(calls_per_session=5))
    assert len(drawn) / len({job.session for job in drawn}) == pytest.approx(5, rel=0.5)


def test_faster_is_the_same_closer_together():
    """Nothing but times changes."""
    fast = compressed(jobs(), 4.0)
    assert fast[100].at_s == 25.0
    assert [job.prompt for job in fast] == [job.prompt for job in jobs()]


def test_a_burst_is_random_within_its_bounds_and_has_clients_of_its_own():
    """Sizes, times, patience; the rest as everybody's."""
    scenario = changed(
        Scenario(clients=Clients(retries=1)),
        bursts=["P1 at 10 for 20 rps 50 prompt 5-9 output 2-3 patience 2 retries 4"],
    )
    burst = bursts(scenario.bursts, scenario, Mixes(scenario, POLICY), 1.0, 1)
    assert len(burst) == pytest.approx(1000, rel=0.15)
    assert all(10 <= job.at_s < 30 and 5 <= job.prompt <= 9 and 2 <= job.output <= 3 for job in burst)
    assert {(job.clients.timeout_s, job.clients.tells_timeout, job.clients.retries) for job in burst} == {
        (2.0, False, 4)
    }
    assert all(job.burst and job.lane == "P1" and job.tenant == "chat" for job in burst)
    loaded = changed(Scenario(), bursts=["P1 for 20 load 5"])
    assert len(bursts(loaded.bursts, loaded, Mixes(loaded, POLICY), 10.0, 1)) == pytest.approx(1000, rel=0.15)


def test_flows_are_merged_in_order_with_numbers_of_their_own():
    """A job's number is its name."""
    both = merged(jobs()[:50], compressed(jobs(), 3.0)[:50])
    assert [job.number for job in both] == list(range(100))
    assert [job.at_s for job in both] == sorted(job.at_s for job in both)
