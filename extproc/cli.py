"""The `tidegate` command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml

from extproc.settings import Settings, SettingsError, load

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The config file; tidegate.yaml here if there is one, else the built-in demo."),
]


def main() -> None:
    """Run the command line; a known mistake is a message, not a traceback."""
    from extproc.render.envoy import RenderError  # noqa: PLC0415
    from extproc.stack import StackError  # noqa: PLC0415

    try:
        app()
    except (SettingsError, StackError, RenderError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        sys.exit(2)


@app.command()
def up(config: Config = None, *, workdir: Annotated[Path, typer.Option(help="Where logs go.")] = Path("run")) -> None:
    """Start Envoy, Tidegate and (for `provider: fake`) fake providers; show a line per second until Ctrl-C."""
    from extproc.up import run  # noqa: PLC0415

    run(_settings(config), workdir)


@app.command()
def serve(config: Config = None) -> None:
    """Run only Tidegate's own process, for an Envoy that is already there."""
    from extproc.app import run  # noqa: PLC0415

    run(_settings(config))


@app.command()
def check(
    config: Config = None, *, show: Annotated[bool, typer.Option(help="Print every value in force.")] = False
) -> None:
    """Check the config, and that Envoy accepts what is rendered from it."""
    from extproc.check import advice, validate  # noqa: PLC0415

    settings = _settings(config)
    if show:
        typer.echo(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False), nl=False)
    validate(settings)
    for line in advice(settings):
        typer.echo(line, err=True)
    typer.echo("ok", err=True)


@app.command()
def render(config: Config = None) -> None:
    """Print the Envoy configuration that belongs to the config."""
    from extproc.render.envoy import bootstrap, to_yaml  # noqa: PLC0415

    typer.echo(to_yaml(bootstrap(_settings(config))), nl=False)


@app.command("fake-provider")
def fake_provider(
    *,
    name: str = "fake",
    port: int = 10011,
    tpm: int | None = None,
    rpm: int | None = None,
    burst_s: float = 60.0,
    first_token_s: float = 0.05,
    prompt_tokens_per_s: float = 20000.0,
    output_tokens_per_s: float = 400.0,
    tokens_per_event: int = 4,
    key: Annotated[str | None, typer.Option(help="Require this API key.")] = None,
) -> None:
    """Run a provider that only pretends: OpenAI and Anthropic APIs with real limits, latency and faults on demand."""
    from extproc.fakes import FakeSettings, run  # noqa: PLC0415

    run(
        FakeSettings(
            name=name,
            port=port,
            tpm=tpm,
            rpm=rpm,
            burst_s=burst_s,
            base_latency_s=first_token_s,
            prompt_tokens_per_s=prompt_tokens_per_s,
            output_tokens_per_s=output_tokens_per_s,
            tokens_per_event=tokens_per_event,
            key=key,
        )
    )


def _settings(config: Path | None) -> Settings:
    if config is None and Path("tidegate.yaml").exists():
        config = Path("tidegate.yaml")
    return load(config)
