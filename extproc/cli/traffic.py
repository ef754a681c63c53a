"""Traffic that nobody needs: a provider that only pretends, recorded requests sent again, and both in virtual time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from extproc.cli.options import Config, loads_of, settings_of

if TYPE_CHECKING:
    from extproc.sim.policies import PolicyName

__all__ = ["fake_provider", "replay", "simulate"]


def fake_provider(
    *,
    name: str = "fake",
    port: int = 10011,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    tpm: int | None = None,
    rpm: int | None = None,
    burst_s: float = 60.0,
    first_token_s: float = 0.05,
    prompt_tokens_per_s: float = 20000.0,
    output_tokens_per_s: float = 400.0,
    tokens_per_event: int = 4,
    engine: Annotated[str, typer.Option(help="Whose metrics and priorities: vllm or sglang.")] = "vllm",
    concurrency: Annotated[int | None, typer.Option(help="Requests that run at once.")] = None,
    queue: Annotated[int | None, typer.Option(help="Requests that may wait; any number when absent.")] = None,
    kv_tokens: Annotated[int | None, typer.Option(help="Size of the KV cache; when it overflows, it preempts.")] = None,
    key: Annotated[str | None, typer.Option(help="Require this API key.")] = None,
) -> None:
    """Run a provider that only pretends: OpenAI and Anthropic APIs with real limits, latency and faults on demand."""
    from extproc.fakes import FakeSettings, run  # noqa: PLC0415

    if engine not in ("vllm", "sglang"):
        raise typer.BadParameter("must be vllm or sglang", param_hint="--engine")
    run(
        FakeSettings(
            name=name,
            port=port,
            host=host,
            tpm=tpm,
            rpm=rpm,
            burst_s=burst_s,
            base_latency_s=first_token_s,
            prompt_tokens_per_s=prompt_tokens_per_s,
            output_tokens_per_s=output_tokens_per_s,
            tokens_per_event=tokens_per_event,
            engine="sglang" if engine == "sglang" else "vllm",
            concurrency=concurrency,
            queue=queue,
            kv_tokens=kv_tokens,
            key=key,
        )
    )


def replay(
    trace: Annotated[Path, typer.Option(help="CSV: an Azure LLM trace, or seconds,prompt_tokens,output_tokens.")],
    *,
    speed: Annotated[float, typer.Option(min=0.001, help="How many times faster than it was recorded.")] = 10.0,
    minutes: Annotated[float, typer.Option(min=0.01, help="Wall time of sending.")] = 3.0,
    overload: Annotated[
        float | None,
        typer.Option(min=0.01, help="Start a private stack whose primary allows the offered tokens/s over this."),
    ] = None,
    chain: Annotated[str, typer.Option(help="Upstreams of the private stack.")] = "primary,local",
    config: Config = None,
    gateway: Annotated[str | None, typer.Option(help="URL of a gateway that the config does not describe.")] = None,
    model: str = "gpt-5",
    lanes: Annotated[str, typer.Option(help="Share of each lane.")] = "P0=0.3,P1=0.4,P2=0.3",
    tenants: Annotated[str | None, typer.Option(help="Share of each tenant, as NAME=SHARE,...")] = None,
    key: Annotated[str | None, typer.Option(help="API key to send.", envvar="TIDEGATE_REPLAY_KEY")] = None,
    seed: int = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here, too.")] = None,
) -> None:
    """Send recorded traffic through the gateway and print, per lane, what came of it."""
    from extproc.sim.gauges import Target  # noqa: PLC0415
    from extproc.sim.plan import Mix  # noqa: PLC0415
    from extproc.sim.replay import Options, run, target_of  # noqa: PLC0415
    from extproc.sim.scene import Scene  # noqa: PLC0415

    mix = Mix.parse(lanes)
    known = ("P0", "P1", "P2") if overload else None if gateway else tuple(settings_of(config).lanes)
    if unknown := [name for name in mix.names if known and name not in known]:
        raise typer.BadParameter(f"unknown lane {unknown[0]!r}; known: {', '.join(known or ())}", param_hint="--lanes")
    options = Options(
        trace=trace,
        speed=speed,
        seconds=minutes * 60,
        target=Target(gateway) if gateway else target_of(settings_of(config)),
        stage=None if overload is None else Scene(overload=overload, chain=tuple(chain.split(","))),
        model=model,
        lanes=mix,
        tenants=None if tenants is None else Mix.parse(tenants),
        key=key,
        seed=seed,
    )
    raise typer.Exit(run(options, json_file))


def simulate(
    trace: Annotated[
        Path | None, typer.Option(help="CSV: an Azure LLM trace, or seconds,prompt_tokens,output_tokens.")
    ] = None,
    *,
    burst: Annotated[
        list[str] | None,
        typer.Option(help='Generated requests: "P1 at 60 for 30 load 5 prompt 8000-32000 output 100-400 patience 2".'),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(help='What goes wrong: "outage|slow|limit|blind UPSTREAM at 600 for 60 by 2".'),
    ] = None,
    scenario: Annotated[Path | None, typer.Option(help="YAML: everything else that is assumed.")] = None,
    load_: Annotated[
        str | None, typer.Option("--load", help="Times what the upstreams can take. [default: 0.5,1,2,3]")
    ] = None,
    policy: Annotated[str, typer.Option(help="What to compare.")] = "none,fifo,priority,tidegate",
    lanes: Annotated[str | None, typer.Option(help="Share of each lane, as P0=0.3,P1=0.7.")] = None,
    tenants: Annotated[str | None, typer.Option(help="Share of each tenant, as NAME=SHARE,...")] = None,
    slo: Annotated[str | None, typer.Option(help="First token within seconds, as P0=5,P1=30.")] = None,
    requests: Annotated[int | None, typer.Option(min=2, help="So many of the trace at most.")] = None,
    model: Annotated[str | None, typer.Option(help="Model that is asked for; the config's first.")] = None,
    config: Config = None,
    seed: int = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Simulations at a time.")] = os.cpu_count() or 1,
    html: Annotated[Path | None, typer.Option(help="Write a report with charts here.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Play traffic against the config in virtual time, by the same decisions, and compare policies."""
    from extproc.sim.command import run  # noqa: PLC0415
    from extproc.sim.compare import Options  # noqa: PLC0415
    from extproc.sim.scenario import changed, load_scenario  # noqa: PLC0415

    assumed = changed(
        load_scenario(scenario), faults=fault or (), bursts=burst or (), lanes=lanes, tenants=tenants, slo_s=slo
    )
    options = Options(
        settings=settings_of(config).alone(),
        scenario=assumed,
        trace=trace,
        requests=requests,
        loads=loads_of(load_) if load_ else (0.5, 1.0, 2.0, 3.0) if trace else (1.0,),
        policies=_policies(policy),
        model=model,
        seed=seed,
        workers=jobs,
    )
    raise typer.Exit(run(options, html=html, json_file=json_file))


def _policies(text: str) -> tuple[PolicyName, ...]:
    from extproc.sim.policies import PolicyName  # noqa: PLC0415

    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in list(PolicyName)]:
        known = ", ".join(PolicyName)
        raise typer.BadParameter(f"unknown policy {unknown[0]!r}; known: {known}", param_hint="--policy")
    return tuple(name for name in PolicyName if name in words)
