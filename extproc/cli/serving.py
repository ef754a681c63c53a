"""Run Tidegate, with an Envoy or beside one, and what an orchestrator asks of one that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from extproc.cli.options import Config, place_of, settings_of

__all__ = ["drain", "ready", "serve", "up"]


def up(config: Config = None, *, workdir: Annotated[Path, typer.Option(help="Where logs go.")] = Path("run")) -> None:
    """Start Envoy, Tidegate and (for `provider: fake`) fake providers; show a line per second until Ctrl-C."""
    from extproc.up import run  # noqa: PLC0415

    run(settings_of(config), workdir, place_of(config))


def serve(config: Config = None) -> None:
    """Run only Tidegate's own process, for an Envoy that is already there."""
    from extproc.app import run  # noqa: PLC0415
    from extproc.telemetry.otlp import OtlpError  # noqa: PLC0415
    from extproc.wire.sockets import SocketError  # noqa: PLC0415
    from extproc.wire.tls import CertificateError  # noqa: PLC0415

    try:
        run(settings_of(config), place_of(config))
    except (SocketError, CertificateError, OtlpError) as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None


def ready(
    config: Config = None, *, envoy: Annotated[bool, typer.Option(help="Ask Envoy rather than Tidegate.")] = False
) -> None:
    """Succeed when Tidegate's health service, or Envoy, answers: a probe for orchestrators that run commands."""
    from extproc.lifecycle import envoy_ready, service_ready  # noqa: PLC0415

    (envoy_ready if envoy else service_ready)(settings_of(config))


def drain(
    config: Config = None,
    *,
    settle_s: Annotated[float, typer.Option(min=0, help="How long new callers may still come.")] = 5.0,
) -> None:
    """Take Envoy out of use and wait until nobody is being answered any more: a hook to run before it is ended."""
    from extproc.lifecycle import drain as drain_envoy  # noqa: PLC0415

    settings = settings_of(config)
    if not drain_envoy(settings, settle_s):
        typer.echo(f"not everybody was done after gateway.drain_s ({settings.gateway.drain_s:g} s)", err=True)
        raise typer.Exit(1)
