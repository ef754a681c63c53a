"""Print what others read: Envoy's configuration and its parts, objects of Kubernetes, alerts, the table of metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from extproc.cli.options import Config, settings_of
from extproc.settings import Settings

__all__ = ["k8s", "merge", "metrics", "render"]

render = typer.Typer(invoke_without_command=True)

Part = Annotated[
    str | None, typer.Option(help="Only this, to put into an Envoy by hand: http_filters, routes, ..., or all.")
]
WriteSecrets = Annotated[bool, typer.Option(help="Write the files of gateway.secrets_dir, too.")]


@render.callback()
def by_default(
    context: typer.Context, config: Config = None, *, part: Part = None, write_secrets: WriteSecrets = False
) -> None:
    """Print what belongs to the config: for Envoy unless a command says for what."""
    if context.invoked_subcommand is None:
        render_envoy(config, part=part, write_secrets=write_secrets)
    elif config or part or write_secrets:
        raise typer.BadParameter(f"options of `render {context.invoked_subcommand}` come behind it")


@render.command("envoy")
def render_envoy(config: Config = None, *, part: Part = None, write_secrets: WriteSecrets = False) -> None:
    """Print the Envoy configuration that belongs to the config, or a part for an Envoy that is there already."""
    from extproc.render import envoy  # noqa: PLC0415
    from extproc.render.fragments import FRAGMENTS, fragment  # noqa: PLC0415

    if part is not None and part not in FRAGMENTS:
        raise typer.BadParameter(f"unknown part {part!r}; known: {', '.join(FRAGMENTS)}", param_hint="--part")
    settings = settings_of(config)
    if write_secrets:
        envoy.write_secrets(settings)
    typer.echo(envoy.to_yaml(envoy.bootstrap(settings)) if part is None else fragment(part, settings), nl=False)


@render.command("istio")
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
        settings_of(config),
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

    text, notes = merged(existing, settings_of(config), listener, virtual_host, check=validate)
    for line in notes:
        typer.echo(line, err=True)
    if output is None:
        typer.echo(text, nl=False)
    else:
        save(text, output)


@render.command("k8s")
def k8s(
    config: Config = None,
    *,
    sidecar: Annotated[bool, typer.Option(help="What an application's pod needs, instead of a gateway.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write a kustomize tree into this folder instead.")] = None,
) -> None:
    """Print the Kubernetes objects that belong to the config: Envoy and Tidegate in one pod, and what is around it."""
    from extproc.render import k8s  # noqa: PLC0415

    settings = settings_of(config)
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


@render.command("alerts")
def render_alerts(
    config: Config = None,
    *,
    job: Annotated[str, typer.Option(help="Jobs of the Prometheus that scrape Tidegate, a regular expression.")] = "",
    runbooks: Annotated[str, typer.Option(help="Where this README is, for the links of alerts.")] = "",
) -> None:
    """Print alert rules for a Prometheus."""
    from extproc.render import monitoring  # noqa: PLC0415

    job, runbooks = job or monitoring.JOB, runbooks or monitoring.RUNBOOKS
    typer.echo(monitoring.alerts_yaml(settings_of(config), job, runbooks), nl=False)


@render.command("dashboard")
def render_dashboard(config: Config = None) -> None:
    """Print a dashboard for a Grafana."""
    from extproc.render import monitoring  # noqa: PLC0415

    typer.echo(monitoring.dashboard_json(settings_of(config)), nl=False)


@render.command("envoy-gateway")
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
    settings = settings_of(config)
    typer.echo(k8s.envoy_gateway_yaml(settings, target, _fakes(settings)), nl=False)


def metrics() -> None:
    """Print every metric of Tidegate with its type, unit and labels, as a table."""
    from extproc.telemetry.catalog import told  # noqa: PLC0415

    for line in told():
        typer.echo(line)


def _fakes(settings: Settings) -> dict[str, list[str]]:
    """The demo's providers that run in Tidegate's pod, and their arguments."""
    from extproc.stack import fake_arguments  # noqa: PLC0415

    return {
        name: fake_arguments(name, upstream)
        for name, upstream in settings.upstreams.items()
        if upstream.provider == "fake" and upstream.host in ("127.0.0.1", "localhost")
    }
