"""Whole simulations: the same again by the same seed, sane under overload, and honest."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from extproc.settings import SettingsError, parse
from extproc.sim.capacity import capacities
from extproc.sim.compare import Options, compare
from extproc.sim.outcome import Outcome
from extproc.sim.policies import PolicyName, policy_of
from extproc.sim.scenario import Behaviour, Scenario, changed, read_fault
from extproc.sim.table import data
from extproc.sim.trace import TraceError
from tests.sim.worlds import BOTH, ENGINE, PROVIDER, job, trace

ALL = tuple(PolicyName)
LEARNING = """
upstreams: {a: {provider: openai, learn: true}}
routes: [{models: [m], chain: [a], acknowledge_unowned: true}]
"""


def quiet(_: str) -> None:
    """Nobody watches."""


def run(
    tmp_path, config: str, scenario: Scenario | None = None, count: int = 800, **changes
) -> dict[PolicyName, Outcome]:
    """The outcome of each policy at one load of a generated trace."""
    options = {"trace": trace(tmp_path / "trace.csv", count=count), "loads": (2.0,), "policies": ALL}
    scenario = scenario or Scenario(upstreams={"openai": Behaviour(burst_s=10)} if "openai" in config else {})
    comparison = compare(Options(parse(config, "test"), scenario, **options | changes), quiet)
    assert comparison.broken == []
    return {outcome.policy: outcome for outcome in comparison.outcomes}


@pytest.fixture(scope="module")
def provider(tmp_path_factory) -> dict[PolicyName, Outcome]:
    """A provider at twice its limit."""
    return run(tmp_path_factory.mktemp("provider"), PROVIDER)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> dict[PolicyName, Outcome]:
    """An engine at twice what it can take."""
    return run(tmp_path_factory.mktemp("engine"), ENGINE, count=1600)


def test_the_gateway_never_passes_a_providers_limit(provider):
    """Where clients alone pass it all the time; the provider counts, not the gateway."""
    assert provider[PolicyName.NONE].over > 100_000
    for policy in (PolicyName.FIFO, PolicyName.PRIORITY, PolicyName.TIDEGATE):
        assert provider[policy].over == 0, policy


def test_the_best_lane_is_served_at_twice_the_limit(provider):
    """And nobody else's way of doing it is as good to it."""
    best = {policy: outcome.lanes["P0"].attainment for policy, outcome in provider.items()}
    assert best[PolicyName.TIDEGATE] >= 0.99
    assert best[PolicyName.TIDEGATE] > max(best[PolicyName.NONE], best[PolicyName.FIFO])
    assert best[PolicyName.PRIORITY] >= 0.95


def test_lower_lanes_are_served_all_the_time_and_promises_are_kept(provider):
    """Their shares are small, and never nothing."""
    ours = provider[PolicyName.TIDEGATE]
    assert ours.lanes["P1"].attainment >= 0.5
    assert ours.lanes["P2"].attainment >= 0.3
    assert ours.lanes["P2"].silence_s < 60
    assert ours.promises.told > 0
    assert ours.promises.share >= 0.9


def test_an_overloaded_engine_is_kept_from_thrashing(engine):
    """Clients alone fill its line and its cache; behind the gateway nothing is thrown out, and the first is first."""
    alone, ours = engine[PolicyName.NONE], engine[PolicyName.TIDEGATE]
    assert alone.preempted > 0
    assert ours.preempted == 0
    assert ours.wasted < alone.wasted / 10
    assert ours.lanes["P0"].attainment >= 0.93


def test_one_queue_lets_everybody_wait_alike(engine):
    """No lane is better off, where strict priority serves the first before all others."""
    waits = {lane: seen.first_token_s.p50 for lane, seen in engine[PolicyName.FIFO].lanes.items()}
    assert max(waits.values()) < 2 * min(waits.values())
    strict = engine[PolicyName.PRIORITY].lanes
    assert strict["P0"].attainment > 3 * strict["P2"].attainment


def test_below_capacity_nobody_is_refused_and_policies_do_not_matter(tmp_path):
    """A quarter of the load: everything is served, in time."""
    for outcome in run(tmp_path, BOTH, loads=(0.25,)).values():
        assert outcome.all.attainment > 0.99, outcome.policy


def test_series_are_as_long_as_the_simulation(provider):
    """One look a second, and the gateway's and the provider's buckets beside each other."""
    series = provider[PolicyName.TIDEGATE].series
    assert len(series.at_s) == pytest.approx(provider[PolicyName.TIDEGATE].lasted_s, abs=2)
    for rows in (series.bucket, series.account, series.running):
        assert len(rows["openai"]) == len(series.at_s)
    assert min(series.bucket["openai"]) < 0.5
    assert set(series.waiting) == {"P0", "P1", "P2"}


def test_a_gateway_that_is_told_the_wrong_limit_is_found_out(tmp_path):
    """The simulator cannot flatter: the provider keeps its own limit, and counts what is above."""
    scenario = Scenario(upstreams={"openai": Behaviour(tpm=100_000, burst_s=5)})
    outcome = run(tmp_path, PROVIDER, scenario, policies=(PolicyName.FIFO,))[PolicyName.FIFO]
    assert outcome.over > 0
    assert outcome.upstreams["openai"].refused[429] > 0
    assert outcome.upstreams["openai"].busiest_minute <= outcome.upstreams["openai"].allowed


def test_an_outage_is_passed_over_to_the_next_upstream(tmp_path):
    """Half of it: a minute without the first upstream, and nobody sees an error."""
    scenario = changed(Scenario(), faults=["outage openai at 60 for 60"])
    both = run(tmp_path, BOTH, scenario, loads=(0.25,), policies=(PolicyName.NONE, PolicyName.TIDEGATE))
    assert sum(both[PolicyName.NONE].all.failed.values()) > 0
    ours = both[PolicyName.TIDEGATE]
    assert sum(ours.all.failed.values()) == 0
    assert any("open" in move for move in ours.breaker_moves)


def test_ten_minutes_without_the_first_upstream_are_not_noticed(tmp_path):
    """Without a gateway a third of all calls fail. Here none does: a few attempts, then one canary at most every 22 s;
    and when it is back traffic returns by and by, and it does not open again.
    """
    scenario = changed(
        Scenario(),
        faults=["outage openai at 120 for 600"],
        bursts=["P1 for 900 rps 1.5 prompt 200-1500 output 50-200"],
    )
    policies = (PolicyName.NONE, PolicyName.TIDEGATE)
    both = run(tmp_path, BOTH, scenario, trace=None, loads=(1.0,), policies=policies)
    alone, ours = both[PolicyName.NONE], both[PolicyName.TIDEGATE]
    assert sum(alone.all.failed.values()) > 0.2 * alone.all.offered
    assert (ours.all.served, sum(ours.all.failed.values())) == (ours.all.offered, 0)
    assert 600 / 22 - 2 <= ours.probes["openai failed"] <= 40
    assert ours.probes["openai answered"] == 1
    states = [move.partition(":")[0].split()[1:] for move in ours.breaker_moves]
    assert [after for _, _, after in states[-3:]] == ["half_open", "ramping", "closed"]
    assert [before for before, _, _ in states].count("ramping") == 1
    back = ours.upstreams["openai"].served
    assert back > 0.2 * ours.all.offered


def test_an_upstream_that_is_slow_without_any_error_is_left_until_it_is_well(tmp_path):
    """Its canaries are answered all the time; a few requests at a time find out that it is as slow as before."""
    scenario = changed(
        Scenario(),
        faults=["slow openai at 120 for 200 by 5"],
        bursts=["P1 for 450 rps 1.5 prompt 200-1500 output 50-200"],
    )
    policies = (PolicyName.NONE, PolicyName.TIDEGATE)
    both = run(tmp_path, BOTH, scenario, trace=None, loads=(1.0,), policies=policies)
    ours = both[PolicyName.TIDEGATE]
    assert (ours.all.served, sum(ours.all.failed.values())) == (ours.all.offered, 0)
    states = [tuple(move.partition(":")[0].split()[1::2]) for move in ours.breaker_moves]
    assert states[0] == ("closed", "open")
    assert states[-1] == ("ramping", "closed")
    assert [state for state in states if "closed" in state] == [states[0], states[-1]]
    assert ours.breaker_moves[0].endswith("first tokens are late")


def test_an_engine_whose_metrics_are_lost_is_neither_stopped_nor_flooded(tmp_path):
    """A trickle goes on."""
    scenario = changed(Scenario(), faults=["blind pool at 0 for 3600"])
    ours = run(tmp_path, ENGINE, scenario, policies=(PolicyName.TIDEGATE,))[PolicyName.TIDEGATE]
    assert 0.05 < ours.all.served / ours.all.offered < 0.9
    assert ours.preempted == 0


def test_the_same_seed_is_the_same_simulation(tmp_path):
    """To the last figure; another seed is another one."""
    options = Options(parse(BOTH, "test"), Scenario(), trace(tmp_path / "t.csv", count=150), loads=(1.5,), policies=ALL)
    once, again = (json.dumps(data(compare(options, quiet))) for _ in range(2))
    assert once == again
    other = Options(options.settings, options.scenario, options.trace, loads=(1.5,), policies=ALL, seed=2)
    assert json.dumps(data(compare(other, quiet))) != once


def test_the_order_of_hashes_does_not_matter(tmp_path):
    """Two interpreters with other hash seeds, one in several processes."""
    (tmp_path / "tidegate.yaml").write_text(BOTH)
    path, found = trace(tmp_path / "t.csv", count=120), []
    for seed, workers in (("1", "1"), ("77", "2")):
        out = tmp_path / f"{seed}.json"
        words = ["simulate", "--trace", path.name, "--load", "2", "--jobs", workers, "--json", str(out)]
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path.cwd())}
        done = subprocess.run(
            [sys.executable, "-m", "extproc", *words],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(out.read_text())
    assert found[0] == found[1]


def test_bursts_are_apart_from_the_trace(tmp_path):
    """Their own sizes, patience and load; figures of both are told apart."""
    scenario = changed(Scenario(), bursts=["P1 at 20 for 20 load 3 prompt 500-900 output 20-40 patience 2 retries 3"])
    ours = run(tmp_path, ENGINE, scenario, loads=(0.5,), policies=(PolicyName.TIDEGATE,))[PolicyName.TIDEGATE]
    assert set(ours.parts) == {"P0 trace", "P1 trace", "P1 burst", "P2 trace"}
    assert ours.parts["P1 burst"].offered > 20
    assert sum(part.offered for part in ours.parts.values()) == ours.all.offered


def test_bursts_alone_are_multiplied_by_the_load(tmp_path):
    """There is no trace to speed up."""
    scenario = changed(Scenario(), bursts=["P0 for 60 load 0.2"])
    counts = [
        run(tmp_path, ENGINE, scenario, trace=None, loads=(load,), policies=(PolicyName.NONE,))[PolicyName.NONE]
        for load in (1.0, 2.0)
    ]
    assert counts[1].all.offered == pytest.approx(2 * counts[0].all.offered, rel=0.3)


def test_capacity_is_that_of_the_tightest_limit():
    """Tokens, requests, or places; an engine is tried out."""
    settings = parse(
        """
upstreams:
  tokens: {provider: openai, limits: [{model: m, tpm: 60000, rpm: 6000}]}
  requests: {provider: openai, limits: [{model: m, tpm: 60000, rpm: 6}]}
  places: {provider: fake, url: http://f:1, concurrency: 4}
  pool: {provider: vllm, url: http://v:1, owned: true, kv: {tokens: 40000}}
routes: [{models: [m], chain: [tokens, requests, places, pool]}]
""",
        "test",
    )
    jobs = [replace(job(random.Random(n), n, settings), prompt=900, output=100, cap=100) for n in range(50)]
    found = capacities(settings, Scenario(), "m", jobs)
    assert found["tokens"] == pytest.approx(1.0)
    assert found["requests"] == pytest.approx(0.1)
    assert 1.5 < found["places"] < 15
    assert 1.0 < found["pool"] < 20


def test_policies_differ_from_the_config_only_in_what_they_are_about():
    """Upstreams stay what they are, but for what they reserve for the best lane; lanes and tenants go."""
    rules = parse(BOTH + "tenants: {a: {tpm: 5, vip: true}}\n", "test").policy()
    assert policy_of(PolicyName.TIDEGATE, rules) is rules
    one = policy_of(PolicyName.FIFO, rules)
    assert [lane.max_wait_s for lane in one.lanes.values()] == [110.0]
    assert set(one.tenants) == {"default"}
    strict = policy_of(PolicyName.PRIORITY, rules)
    assert list(strict.lanes) == list(rules.lanes)
    assert not any(lane.min_share or lane.keep_free for lane in strict.lanes.values())
    for other in (one, strict):
        assert other.routes == rules.routes
        asked, given = other.upstreams["openai"], rules.upstreams["openai"]
        assert (asked.burn, given.burn) == (None, 0.85)
        assert (asked.limits, asked.breaker, asked.headroom) == (given.limits, given.breaker, given.headroom)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trace": None}, "nothing to simulate"),
        ({"model": "unknown"}, "--model"),
        ({"scenario": Scenario(slo_s={"P9": 1})}, "scenario: slo_s: lane 'P9'"),
        (
            {"scenario": Scenario(faults=[read_fault("outage openai at 9999 for 1")])},
            "fault outage openai at 9999: the",
        ),
    ],
)
def test_what_cannot_be_simulated_is_said(tmp_path, changes, said):
    """Before anything is run."""
    options = {"trace": trace(tmp_path / "t.csv", count=10)} | changes
    with pytest.raises(SettingsError) as caught:
        compare(Options(parse(PROVIDER, "test"), **options), quiet)
    assert said in str(caught.value)


def test_a_trace_that_is_none_is_said(tmp_path):
    """No file, no two requests, an unknown lane, nothing that limits."""
    settings = parse(PROVIDER, "test")
    path = tmp_path / "t.csv"
    with pytest.raises(TraceError, match="No such file"):
        compare(Options(settings, trace=path), quiet)
    path.write_text("seconds,prompt_tokens,output_tokens\n1,1,1\n")
    with pytest.raises(TraceError, match="no two requests"):
        compare(Options(settings, trace=path), quiet)
    path.write_text("seconds,prompt_tokens,output_tokens,lane\n1,1,1,P0\n2,1,1,P9\n")
    with pytest.raises(SettingsError, match="lane 'P9' is not in the config"):
        compare(Options(settings, trace=path), quiet)
    path.write_text("seconds,prompt_tokens,output_tokens\n1,1,1\n2,1,1\n")
    with pytest.raises(SettingsError, match="nothing limits it"):
        compare(Options(parse(LEARNING, "test"), trace=path), quiet)


def test_dollars_that_are_spent_steer_in_the_simulator_too(tmp_path):
    """Prices that hold from a day are known there: its calendar is later than any."""
    dated = "prices: {m: [{from: 2026-01-01, input: 10, output: 10}]}, usd_per_month: 1"
    limited = BOTH.replace("provider: openai,", f"provider: openai, {dated},")
    calm = {"loads": (0.3,), "policies": (PolicyName.TIDEGATE,), "count": 300}
    [free, steered] = [run(tmp_path, config, **calm)[PolicyName.TIDEGATE] for config in (BOTH, limited)]
    assert free.upstreams["openai"].served_tokens > 300_000
    assert 80_000 < steered.upstreams["openai"].served_tokens <= 100_000
    assert steered.upstreams["pool"].served_tokens > 200_000
    assert "spend_budget" not in steered.refusals
