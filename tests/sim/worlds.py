"""Traffic and worlds for tests of the simulator: small, made by a seed, never from a file."""

from __future__ import annotations

import random
from pathlib import Path

from extproc.settings import Settings, parse
from extproc.sim.policies import PolicyName
from extproc.sim.run import Setup
from extproc.sim.scenario import Clients, Scenario
from extproc.sim.traffic import Job

PROVIDER = """
upstreams:
  openai: {provider: openai, limits: [{model: m, tpm: 300_000, rpm: 3000}]}
routes: [{models: [m], chain: [openai], acknowledge_unowned: true}]
"""
ENGINE = """
upstreams:
  pool: {provider: vllm, url: http://v:8000, owned: true, kv: {tokens: 40_000}}
routes: [{models: [m], chain: [pool]}]
"""
BOTH = """
upstreams:
  openai: {provider: openai, limits: [{model: m, tpm: 300_000, rpm: 3000}]}
  pool: {provider: vllm, url: http://v:8000, owned: true, kv: {tokens: 40_000}}
routes: [{models: [m], chain: [openai, pool]}]
"""
UPSTREAMS = (
    "{{provider: openai, limits: [{{model: m, tpm: {tpm}, rpm: {rpm}}}]}}",
    "{{provider: groq, limits: [{{model: m, tpm: {tpm}}}], concurrency: {seats}}}",
    "{{provider: compatible, url: 'http://c:1', limits: [{{itpm: {tpm}, otpm: {tpm}}}]}}",
    "{{provider: fake, url: 'http://f:1', concurrency: {seats}}}",
    "{{provider: vllm, url: 'http://v:1', kv: {{tokens: {kv}}}, engine_priority: true}}",
    "{{provider: sglang, url: 'http://s:1', kv: {{tokens: {kv}, scrape_s: 1, stale_s: 3}}, concurrency: {seats}}}",
)
FAULTS = ("outage", "slow", "limit", "blind")


def trace(path: Path, *, count: int = 400, rps: float = 2.0, seed: int = 1) -> Path:
    """A CSV of `count` requests at random times."""
    rng, at_s, rows = random.Random(seed), 0.0, ["seconds,prompt_tokens,output_tokens"]
    for _ in range(count):
        rows.append(f"{at_s:.3f},{round(rng.lognormvariate(6.5, 1.0))},{round(rng.lognormvariate(5, 0.7))}")
        at_s += rng.expovariate(rps)
    path.write_text("\n".join(rows))
    return path


def setup(seed: int) -> Setup:
    """A random world: upstreams, limits, tenants, clients of all kinds, faults, under a random policy."""
    rng = random.Random(seed)
    settings = world(rng)
    scenario = troubles(rng, settings)
    jobs = [job(rng, number, settings) for number in range(rng.randint(5, 60))]
    jobs.sort(key=lambda job: job.at_s)
    policy = rng.choice([PolicyName.TIDEGATE, PolicyName.TIDEGATE, *PolicyName])
    return Setup(settings, scenario, jobs, policy, "m", 1.0, seed)


def world(rng: random.Random) -> Settings:
    """One to three upstreams, none to three tenants with allowances of all kinds."""
    names = [f"u{number}" for number in range(rng.randint(1, 3))]
    upstreams = "\n".join(
        f"  {name}: "
        + rng.choice(UPSTREAMS).format(
            tpm=rng.choice([8000, 30_000, 200_000]),
            rpm=rng.choice([20, 100, 1000]),
            seats=rng.randint(1, 8),
            kv=rng.choice([6000, 20_000, 100_000]),
        )
        for name in names
    )
    tenants = "\n".join(f"  t{number}: {{{allowance(rng)}}}" for number in range(rng.randint(0, 3)))
    return parse(
        f"upstreams:\n{upstreams}\n"
        f"routes: [{{models: [m], chain: [{', '.join(names)}], acknowledge_unowned: true}}]\n"
        f"lanes: {{P0: {{max_wait_s: {rng.choice([1, 4])}, spill_after_s: {rng.choice([0, 1])}}}, "
        f"P1: {{max_wait_s: {rng.choice([5, 30])}, min_share: 0.2, max_requests: {rng.choice([3, 1000])}}}, "
        f"P2: {{max_wait_s: {rng.choice([20, 110])}, when_busy: hold, min_share: 0.05, pacing: smooth}}}}\n"
        + (f"tenants:\n{tenants}\n" if tenants else ""),
        f"world {rng.random()}",
    )


def allowance(rng: random.Random) -> str:
    """What one tenant may use."""
    each = {
        "tpm": rng.choice([3000, 50_000]),
        "rpm": rng.choice([5, 100]),
        "concurrency": rng.randint(1, 5),
        "weight": rng.choice([1, 3]),
        "vip": rng.choice(["true", "false"]),
    }
    return ", ".join(f"{name}: {each[name]}" for name in each if rng.random() < 0.4)


def troubles(rng: random.Random, settings: Settings) -> Scenario:
    """Up to three faults that fit, and assumptions of all kinds."""
    scenario = Scenario(
        json_share=0.2,
        uncapped=rng.choice([0.0, 0.5]),
        miscount=rng.choice([-0.2, 0.0, 0.1]),
    )
    faults = []
    for _ in range(rng.randint(0, 3)):
        name = rng.choice(list(settings.upstreams))
        engine = scenario.engine_of(settings, name) is not None
        kind = rng.choice([kind for kind in FAULTS if kind != ("limit" if engine else "blind")])
        faults.append({"kind": kind, "upstream": name, "at_s": rng.uniform(0, 30), "for_s": rng.uniform(1, 30)})
    return Scenario.model_validate(scenario.model_dump() | {"faults": faults})


def job(rng: random.Random, number: int, settings: Settings) -> Job:
    """A request of a client that may be patient or not, and may linger."""
    prompt, output = round(rng.lognormvariate(5.5, 1.2)) + 1, round(rng.lognormvariate(4, 1)) + 1
    impatient = rng.random() < 0.4
    clients = Clients(
        retries=rng.randint(0, 3),
        timeout_s=rng.uniform(0.2, 6) if impatient else 600.0,
        tells_timeout=rng.random() < 0.5,
        lingers_s=rng.uniform(0.1, 5) if impatient and rng.random() < 0.3 else 0.0,
    )
    tenant = rng.choice([*settings.tenants, "default"])
    return Job(
        number=number,
        at_s=rng.choice([0.0, rng.uniform(0, 30)]),
        prompt=prompt,
        output=output,
        cap=None if rng.random() < 0.3 else output + rng.randint(0, 200),
        counted=max(1, round(prompt * rng.uniform(0.8, 1.1))),
        lane=rng.choice(["P0", "P1", "P2"]),
        tenant=tenant,
        session=f"{tenant}-{rng.randint(0, 5)}",
        stream=rng.random() < 0.8,
        clients=clients,
    )
