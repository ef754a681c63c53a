"""The `tidegate` command line."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from extproc.console.command import CaFile, ClientCertFile, ClientKeyFile, Console, TokenFile, admin
from extproc.settings import Settings, SettingsError, load

if TYPE_CHECKING:
    from extproc.console.asking import Access
    from extproc.sim.policies import PolicyName

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The config file; tidegate.yaml here if there is one, else the built-in demo."),
]

app.add_typer(admin, name="admin")


def main() -> None:
    """Run the command line; a known mistake is a message, not a traceback."""
    from extproc.against.dump import AdminError  # noqa: PLC0415
    from extproc.doctor.asking import BadUrl, NoAnswer  # noqa: PLC0415
    from extproc.lifecycle import NotReadyError  # noqa: PLC0415
    from extproc.render.envoy import RenderError  # noqa: PLC0415
    from extproc.sim.plan import MixError  # noqa: PLC0415
    from extproc.stack import StackError  # noqa: PLC0415

    try:
        app()
    except (SettingsError, StackError, RenderError, MixError, NotReadyError, BadUrl, NoAnswer, AdminError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        sys.exit(2)


@app.command()
def up(config: Config = None, *, workdir: Annotated[Path, typer.Option(help="Where logs go.")] = Path("run")) -> None:
    """Start Envoy, Tidegate and (for `provider: fake`) fake providers; show a line per second until Ctrl-C."""
    from extproc.up import run  # noqa: PLC0415

    run(_settings(config), workdir, _place(config))


@app.command()
def serve(config: Config = None) -> None:
    """Run only Tidegate's own process, for an Envoy that is already there."""
    from extproc.app import run  # noqa: PLC0415
    from extproc.telemetry.otlp import OtlpError  # noqa: PLC0415
    from extproc.wire.sockets import SocketError  # noqa: PLC0415
    from extproc.wire.tls import CertificateError  # noqa: PLC0415

    try:
        run(_settings(config), _place(config))
    except (SocketError, CertificateError, OtlpError) as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None


@app.command()
def check(
    config: Config = None,
    *,
    show: Annotated[bool, typer.Option(help="Print every value in force.")] = False,
    ask: Annotated[bool, typer.Option(help="Ask inference engines that can be reached how they run.")] = True,
    against: Annotated[
        str | None, typer.Option(help="Admin URL of a running Envoy: compare what it runs with the config, instead.")
    ] = None,
) -> None:
    """Check the config, that Envoy accepts what is rendered from it, and that engines do what it counts on."""
    from extproc.check import advice, validate  # noqa: PLC0415
    from extproc.check import ask as ask_engines  # noqa: PLC0415

    settings = _settings(config)
    if show:
        typer.echo(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False), nl=False)
    if against is not None:
        raise typer.Exit(_against(against, settings))
    validate(settings)
    for line in advice(settings):
        typer.echo(line, err=True)
    for line in ask_engines(settings) if ask else ():
        typer.echo(line, err=True)
    typer.echo("ok", err=True)


def _against(url: str, settings: Settings) -> int:
    """Print each disagreement with the Envoy at `url`; whether there is any."""
    from extproc.against.command import compare  # noqa: PLC0415

    findings = compare(url, settings)
    for finding in findings:
        typer.echo(str(finding))
    if not findings:
        typer.echo(f"ok: the Envoy at {url} runs what the config says", err=True)
    return int(bool(findings))


renders = typer.Typer(invoke_without_command=True)
app.add_typer(renders, name="render")

Part = Annotated[
    str | None, typer.Option(help="Only this, to put into an Envoy by hand: http_filters, routes, ..., or all.")
]
WriteSecrets = Annotated[bool, typer.Option(help="Write the files of gateway.secrets_dir, too.")]


@renders.callback()
def render(
    context: typer.Context, config: Config = None, *, part: Part = None, write_secrets: WriteSecrets = False
) -> None:
    """Print what belongs to the config: for Envoy unless a command says for what."""
    if context.invoked_subcommand is None:
        render_envoy(config, part=part, write_secrets=write_secrets)
    elif config or part or write_secrets:
        raise typer.BadParameter(f"options of `render {context.invoked_subcommand}` come behind it")


@renders.command("envoy")
def render_envoy(config: Config = None, *, part: Part = None, write_secrets: WriteSecrets = False) -> None:
    """Print the Envoy configuration that belongs to the config, or a part for an Envoy that is there already."""
    from extproc.render import envoy  # noqa: PLC0415
    from extproc.render.fragments import FRAGMENTS, fragment  # noqa: PLC0415

    if part is not None and part not in FRAGMENTS:
        raise typer.BadParameter(f"unknown part {part!r}; known: {', '.join(FRAGMENTS)}", param_hint="--part")
    settings = _settings(config)
    if write_secrets:
        envoy.write_secrets(settings)
    typer.echo(envoy.to_yaml(envoy.bootstrap(settings)) if part is None else fragment(part, settings), nl=False)


@renders.command("istio")
def render_istio(
    config: Config = None,
    *,
    gateway: Annotated[
        bool | None,
        typer.Option(
            "--gateway/--sidecar", help="Patch an ingress or egress gateway, or callers' sidecars; say which."
        ),
    ] = None,
    label: Annotated[list[str], typer.Option(help="Of the pods to patch: app=chat. Several must all be there.")],
    namespace: Annotated[str, typer.Option(help="Of those pods; a mesh's root namespace stands for all.")],
    host: Annotated[
        str | None,
        typer.Option(
            help="host:port whose LLM paths are taken, as `istioctl proxy-config routes` shows it; Tidegate's own."
        ),
    ] = None,
    service: Annotated[
        str | None, typer.Option(help="host:port of Tidegate for those pods; as `tidegate k8s` has it.")
    ] = None,
    listener_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Only listeners on this port of the pod; that of --host for sidecars, else all.",
        ),
    ] = None,
    attach: Annotated[
        str | None, typer.Option(help="namespace/name of an Istio Gateway to serve the host from.")
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="These listeners serve LLM paths only: set their timeouts, too.")
    ] = False,
    proxy_version: Annotated[str | None, typer.Option(help="Only proxies of a version like this expression.")] = None,
) -> None:
    """Print EnvoyFilters that put Tidegate into Envoys of an Istio mesh, and what belongs to them."""
    from extproc.render.mesh import for_istio  # noqa: PLC0415

    if gateway is None:
        raise typer.BadParameter("say whose Envoys these are: --gateway or --sidecar")
    text = for_istio(
        _settings(config),
        gateway=gateway,
        namespace=namespace,
        labels=label,
        host=host,
        service=service,
        listener_port=listener_port,
        attach=attach,
        alone=alone,
        proxy_version=proxy_version,
    )
    typer.echo(text, nl=False)


@app.command()
def merge(
    existing: Annotated[Path, typer.Argument(help="The Envoy configuration that is there: YAML or JSON.")],
    config: Config = None,
    *,
    listener: Annotated[
        str | None, typer.Option(help="The listener that callers reach, where several serve HTTP.")
    ] = None,
    virtual_host: Annotated[
        str | None, typer.Option(help="The virtual host for LLM paths, where it has several.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of printing.")] = None,
    validate: Annotated[
        bool, typer.Option(help="Have Envoy check the result; files that it names must be here.")
    ] = False,
) -> None:
    """Put Tidegate into an Envoy configuration that has filters and routes of its own; what is there goes on."""
    from extproc.render.command import merged, save  # noqa: PLC0415

    text, notes = merged(existing, _settings(config), listener, virtual_host, check=validate)
    for line in notes:
        typer.echo(line, err=True)
    if output is None:
        typer.echo(text, nl=False)
    else:
        save(text, output)


@renders.command("k8s")
@app.command()
def k8s(
    config: Config = None,
    *,
    sidecar: Annotated[bool, typer.Option(help="What an application's pod needs, instead of a gateway.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write a kustomize tree into this folder instead.")] = None,
) -> None:
    """Print the Kubernetes objects that belong to the config: Envoy and Tidegate in one pod, and what is around it."""
    from extproc.render import k8s  # noqa: PLC0415

    settings = _settings(config)
    fakes = _fakes(settings)
    for remark in k8s.remarks(settings, fakes, tree=write is not None):
        typer.echo(f"note: {remark}", err=True)
    if write is None:
        beside = k8s.sidecar(settings, fakes) if sidecar else None
        documents = [beside.config, beside.patch] if beside else k8s.objects(settings, fakes)
        typer.echo(k8s.to_yaml(documents, settings), nl=False)
        return
    for path, text in k8s.files(settings, fakes).items():
        file = write / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")


@renders.command("alerts")
def render_alerts(
    config: Config = None,
    *,
    job: Annotated[str, typer.Option(help="Jobs of the Prometheus that scrape Tidegate, a regular expression.")] = "",
    runbooks: Annotated[str, typer.Option(help="Where this README is, for the links of alerts.")] = "",
) -> None:
    """Print alert rules for a Prometheus."""
    from extproc.render import monitoring  # noqa: PLC0415

    job, runbooks = job or monitoring.JOB, runbooks or monitoring.RUNBOOKS
    typer.echo(monitoring.alerts_yaml(_settings(config), job, runbooks), nl=False)


@renders.command("dashboard")
def render_dashboard(config: Config = None) -> None:
    """Print a dashboard for a Grafana."""
    from extproc.render import monitoring  # noqa: PLC0415

    typer.echo(monitoring.dashboard_json(_settings(config)), nl=False)


@renders.command("envoy-gateway")
def render_envoy_gateway(
    config: Config = None,
    *,
    namespace: Annotated[str, typer.Option(help="Of the Gateway, and of what is printed.")] = "tidegate",
    gateway: Annotated[
        str | None, typer.Option(help="A Gateway that is there; otherwise one is printed, called tidegate.")
    ] = None,
    listener: Annotated[str, typer.Option(help="The Gateway's listener that callers reach.")] = "http",
    hostname: Annotated[str | None, typer.Option(help="Host name whose LLM paths are taken; any without.")] = None,
    gateway_class: Annotated[str, typer.Option(help="Class of a Gateway that is printed.")] = "eg",
    tidegate: Annotated[str, typer.Option(help="Namespace of Tidegate.")] = "tidegate",
    system: Annotated[
        str, typer.Option(help="Namespace in which Envoy Gateway runs its Envoys.")
    ] = "envoy-gateway-system",
    extension_policy: Annotated[
        bool, typer.Option("--extension-policy", help="Let an EnvoyExtensionPolicy make the ext_proc filter.")
    ] = False,
    xds_listener: Annotated[
        str | None, typer.Option(help="Envoy Gateway's name for the listener: namespace/gateway/listener without.")
    ] = None,
    xds_routes: Annotated[str | None, typer.Option(help="Its name for the listener's routes: the same.")] = None,
) -> None:
    """Print what lets the Envoys of an Envoy Gateway ask Tidegate: a Gateway, a route, policies and patches."""
    from extproc.render import k8s  # noqa: PLC0415

    target = k8s.Target(
        namespace=namespace,
        gateway=gateway or "tidegate",
        listener=listener,
        hostname=hostname,
        existing=gateway is not None,
        gateway_class=gateway_class,
        tidegate=tidegate,
        system=system,
        extension_policy=extension_policy,
        xds_listener=xds_listener,
        xds_routes=xds_routes,
    )
    settings = _settings(config)
    typer.echo(k8s.envoy_gateway_yaml(settings, target, _fakes(settings)), nl=False)


@app.command()
def ready(
    config: Config = None, *, envoy: Annotated[bool, typer.Option(help="Ask Envoy rather than Tidegate.")] = False
) -> None:
    """Succeed when Tidegate's health service, or Envoy, answers: a probe for orchestrators that run commands."""
    from extproc.lifecycle import envoy_ready, service_ready  # noqa: PLC0415

    (envoy_ready if envoy else service_ready)(_settings(config))


@app.command()
def drain(
    config: Config = None,
    *,
    settle_s: Annotated[float, typer.Option(min=0, help="How long new callers may still come.")] = 5.0,
) -> None:
    """Take Envoy out of use and wait until nobody is being answered any more: a hook to run before it is ended."""
    from extproc.lifecycle import drain as drain_envoy  # noqa: PLC0415

    settings = _settings(config)
    if not drain_envoy(settings, settle_s):
        typer.echo(f"not everybody was done after gateway.drain_s ({settings.gateway.drain_s:g} s)", err=True)
        raise typer.Exit(1)


@app.command()
def doctor(
    url: Annotated[str, typer.Argument(help="The gateway as clients reach it, like https://llm.example.com.")],
    *,
    model: Annotated[str, typer.Option(help="Model to ask; the first that Tidegate lists.")] = "",
    key: Annotated[str | None, typer.Option(help="API key to send.", envvar="TIDEGATE_DOCTOR_KEY")] = None,
    header: Annotated[list[str] | None, typer.Option(help='Sent along: "x-team: search".')] = None,
    api: Annotated[str | None, typer.Option(help="openai or anthropic; by the model's name.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The gateway's config; tidegate.yaml here if there is one.")
    ] = None,
    fails_open: Annotated[bool, typer.Option("--open", help="Without Tidegate, requests are to pass.")] = False,
    other: Annotated[str, typer.Option(help="Path of another service behind the same URL, for a GET.")] = "",
    spend: Annotated[bool, typer.Option(help="Ask the model, which takes some 250 tokens.")] = True,
    ca_file: Annotated[str | None, typer.Option(help="Certificates to trust, instead of the system's.")] = None,
    timeout: Annotated[float, typer.Option(min=1.0, max=3600.0, help="Seconds for each answer.")] = 60.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all findings here, too; - instead.")] = None,
) -> None:
    """Prove from outside that a gateway does what it is there for, and tell what to change where it does not."""
    from rich.console import Console  # noqa: PLC0415

    from extproc.doctor import command  # noqa: PLC0415
    from extproc.doctor.asking import Gateway  # noqa: PLC0415
    from extproc.doctor.visit import Expected, Visit  # noqa: PLC0415

    if api not in (None, "openai", "anthropic"):
        raise typer.BadParameter("must be openai or anthropic", param_hint="--api")
    if other and not other.startswith("/"):
        raise typer.BadParameter("must begin with /", param_hint="--other")
    if json_file and not json_file.parent.is_dir():
        raise typer.BadParameter("there is no such folder", param_hint="--json")
    settings = _settings(config) if config or Path("tidegate.yaml").exists() else None
    visit = Visit(
        Gateway(url, key, timeout, _headers(header or []), ca_file),
        Expected.of(settings, fails_open=fails_open),
        model,
        anthropic=None if api is None else api == "anthropic",
        tokens=spend,
        other=other,
    )
    console = Console()
    raise typer.Exit(
        command.run(visit, console if console.is_terminal else Console(width=command.PLAIN_WIDTH), json_file)
    )


@app.command()
def metrics() -> None:
    """Print every metric of Tidegate with its type, unit and labels, as a table."""
    from extproc.telemetry.catalog import told  # noqa: PLC0415

    for line in told():
        typer.echo(line)


@app.command("fake-provider")
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


@app.command()
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
    known = ("P0", "P1", "P2") if overload else None if gateway else tuple(_settings(config).lanes)
    if unknown := [name for name in mix.names if known and name not in known]:
        raise typer.BadParameter(f"unknown lane {unknown[0]!r}; known: {', '.join(known or ())}", param_hint="--lanes")
    options = Options(
        trace=trace,
        speed=speed,
        seconds=minutes * 60,
        target=Target(gateway) if gateway else target_of(_settings(config)),
        stage=None if overload is None else Scene(overload=overload, chain=tuple(chain.split(","))),
        model=model,
        lanes=mix,
        tenants=None if tenants is None else Mix.parse(tenants),
        key=key,
        seed=seed,
    )
    raise typer.Exit(run(options, json_file))


@app.command()
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
        settings=_settings(config).alone(),
        scenario=assumed,
        trace=trace,
        requests=requests,
        loads=_loads(load_) if load_ else (0.5, 1.0, 2.0, 3.0) if trace else (1.0,),
        policies=_policies(policy),
        model=model,
        seed=seed,
        workers=jobs,
    )
    raise typer.Exit(run(options, html=html, json_file=json_file))


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(help="The config that runs.")],
    new: Annotated[Path, typer.Argument(help="The config that is to run.")],
    *,
    trace: Annotated[
        Path | None, typer.Option(help="CSV, as for simulate: what would have come of it under each.")
    ] = None,
    load_: Annotated[str, typer.Option("--load", help="Times what the old config's upstreams can take.")] = "1",
    requests: Annotated[int | None, typer.Option(min=2, help="So many of the trace at most.")] = None,
    model: Annotated[str | None, typer.Option(help="Model that is asked for; the old config's first.")] = None,
    seed: int = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Simulations at a time.")] = os.cpu_count() or 1,
) -> None:
    """Print what would change, setting by setting: live, or what else it needs; with a trace, what would come of it."""
    from extproc.sim.compare import Options  # noqa: PLC0415
    from extproc.sim.difference import run  # noqa: PLC0415

    before, after = load(old), load(new)
    options = Options(
        settings=before, trace=trace, requests=requests, loads=_loads(load_), model=model, seed=seed, workers=jobs
    )
    raise typer.Exit(run(options, before, after))


def _headers(lines: list[str]) -> dict[str, str]:
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if any(not name or not value or not (name + value).isprintable() for name, value in headers.items()):
        raise typer.BadParameter('must be like "x-team: search"', param_hint="--header")
    return headers


def _loads(text: str) -> tuple[float, ...]:
    try:
        loads = tuple(sorted({float(word) for word in text.split(",")}))
    except ValueError:
        loads = ()
    if not loads or not all(0.01 <= load <= 100 for load in loads):  # noqa: PLR2004 - what makes sense
        raise typer.BadParameter(f"{text!r} is not numbers from 0.01 to 100, with commas between", param_hint="--load")
    return loads


def _policies(text: str) -> tuple[PolicyName, ...]:
    from extproc.sim.policies import PolicyName  # noqa: PLC0415

    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in list(PolicyName)]:
        known = ", ".join(PolicyName)
        raise typer.BadParameter(f"unknown policy {unknown[0]!r}; known: {known}", param_hint="--policy")
    return tuple(name for name in PolicyName if name in words)


@app.command()
def session(
    tenant: str,
    session_id: Annotated[str, typer.Argument(metavar="ID")],
    *,
    add_tokens: Annotated[int, typer.Option(min=0, help="Let it use so many tokens more, from now on.")] = 0,
    add_usd: Annotated[float, typer.Option(min=0, help="Let it use so many dollars more, from now on.")] = 0.0,
    config: Config = None,
    console: Console = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    client_cert_file: ClientCertFile = None,
    client_key_file: ClientKeyFile = None,
) -> None:
    """Show what an agent session has used, and raise what it may use. Tidegate must be running."""
    from extproc.console import sessions  # noqa: PLC0415
    from extproc.console.asking import ConsoleError  # noqa: PLC0415
    from extproc.console.terminal import harmless  # noqa: PLC0415

    try:
        reached = _reached(_settings(config), console, token_file, ca_file, client_cert_file, client_key_file)
        known = sessions.ask(reached, tenant, session_id, tokens=add_tokens, usd=add_usd)
    except ConsoleError as error:
        typer.echo(harmless(str(error)), err=True)
        raise typer.Exit(1) from None
    typer.echo(sessions.told(known))


@app.command("explain")
def explain_request(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="What x-tidegate-request-id of its answer says, or the ticket that it got here."
        ),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known as JSON.")] = False,
    config: Config = None,
    console: Console = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    client_cert_file: ClientCertFile = None,
    client_key_file: ClientKeyFile = None,
) -> None:
    """Tell what happened to a request: what it waited for, why it went where it went, or was refused."""
    from extproc.console.asking import ConsoleError, ask, quoted  # noqa: PLC0415
    from extproc.console.terminal import harmless  # noqa: PLC0415
    from extproc.telemetry.story import told  # noqa: PLC0415

    try:
        reached = _reached(_settings(config), console, token_file, ca_file, client_cert_file, client_key_file)
        known = ask(reached, "GET", f"/api/v1/requests/{quoted(request_id)}")
    except ConsoleError as error:
        typer.echo(harmless(str(error)), err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(known, indent=2) if as_json else told(known), nl=as_json)


@app.command()
def top(
    config: Config = None,
    *,
    console: Console = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    client_cert_file: ClientCertFile = None,
    client_key_file: ClientKeyFile = None,
    once: Annotated[bool, typer.Option("--once", help="Print all of it once, as plain text.")] = False,
) -> None:
    """Watch a running Tidegate: who waits, for what, and what would help; pause, trip, explain."""
    from extproc.console.asking import ConsoleError  # noqa: PLC0415
    from extproc.console.top.remote import Remote  # noqa: PLC0415
    from extproc.telemetry.story import told  # noqa: PLC0415

    try:
        reached = _reached(_settings(config), console, token_file, ca_file, client_cert_file, client_key_file)
        remote = Remote(reached)
        if once:
            from extproc.console.top.plain import page  # noqa: PLC0415

            typer.echo(page(remote.overview(), shutil.get_terminal_size((100, 24)).columns), nl=False)
            return
    except ConsoleError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from None
    from extproc.console.top.screen import Top  # noqa: PLC0415

    Top(remote, told).run()


@app.command()
def bundle(
    config: Config = None,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to; tidegate-bundle-TIME.tar.gz.")
    ] = None,
    console: Console = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    client_cert_file: ClientCertFile = None,
    client_key_file: ClientKeyFile = None,
    envoy: Annotated[
        str | None, typer.Option(help="URL of Envoy's admin page; that of the config on loopback.")
    ] = None,
) -> None:
    """Pack into one file what helps others to help: config, decisions, metrics, Envoy's state; no secrets."""
    from extproc.bundle import BundleError, collect, save  # noqa: PLC0415
    from extproc.console.asking import ConsoleError  # noqa: PLC0415

    settings = _settings(config)
    path = output or Path(time.strftime("tidegate-bundle-%Y%m%d-%H%M%S.tar.gz"))
    try:
        reached = _reached(settings, console, token_file, ca_file, client_cert_file, client_key_file)
        found = collect(settings, reached, envoy)
        save(found, path)
    except (BundleError, ConsoleError) as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from None
    for name, why in found.missing.items():
        typer.echo(f"without {name}: {why}", err=True)
    typer.echo(path)


def _reached(settings: Settings, console: str | None, *files: str | None) -> Access:
    """The console to ask. files: as of `access`, in its order. ConsoleError."""
    from extproc.console.asking import access  # noqa: PLC0415

    token, ca, cert, key = files
    return access(settings, console=console, token_file=token, ca_file=ca, client_cert_file=cert, client_key_file=key)


def _fakes(settings: Settings) -> dict[str, list[str]]:
    """The demo's providers that run in Tidegate's pod, and their arguments."""
    from extproc.stack import fake_arguments  # noqa: PLC0415

    return {
        name: fake_arguments(name, upstream)
        for name, upstream in settings.upstreams.items()
        if upstream.provider == "fake" and upstream.host in ("127.0.0.1", "localhost")
    }


def _settings(config: Path | None) -> Settings:
    return load(_place(config))


def _place(config: Path | None) -> Path | None:
    """The file to read, None for the built-in demo."""
    return Path("tidegate.yaml") if config is None and Path("tidegate.yaml").exists() else config
