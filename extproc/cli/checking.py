"""Is it right? The config by itself, against a running Envoy, from outside, and beside another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
import yaml

from extproc.cli.options import Config, loads_of, settings_of
from extproc.settings import Settings, load

__all__ = ["check", "diff", "doctor"]


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

    settings = settings_of(config)
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
    settings = settings_of(config) if config or Path("tidegate.yaml").exists() else None
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


def _headers(lines: list[str]) -> dict[str, str]:
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if any(not name or not value or not (name + value).isprintable() for name, value in headers.items()):
        raise typer.BadParameter('must be like "x-team: search"', param_hint="--header")
    return headers


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
        settings=before, trace=trace, requests=requests, loads=loads_of(load_), model=model, seed=seed, workers=jobs
    )
    raise typer.Exit(run(options, before, after))
