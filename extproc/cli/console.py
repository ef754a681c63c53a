"""What a running Tidegate tells through its console: who waits, what happened to a request, a session, all of it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from extproc.cli.reaching import AsJson, Reached, reaching, show

__all__ = ["bundle", "explain", "session", "top"]


@reaching
def session(
    reached: Reached,
    tenant: str,
    session_id: Annotated[str, typer.Argument(metavar="ID")],
    *,
    add_tokens: Annotated[int, typer.Option(min=0, help="Let it use so many tokens more, from now on.")] = 0,
    add_usd: Annotated[float, typer.Option(min=0, help="Let it use so many dollars more, from now on.")] = 0.0,
) -> None:
    """Show what an agent session has used, and raise what it may use. Tidegate must be running."""
    from extproc.console import sessions  # noqa: PLC0415

    typer.echo(sessions.told(sessions.ask(reached.access, tenant, session_id, tokens=add_tokens, usd=add_usd)))


@reaching
def explain(
    reached: Reached,
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="What x-tidegate-request-id of its answer says, or the ticket that it got here."
        ),
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Tell what happened to a request: what it waited for, why it went where it went, or was refused."""
    from extproc.console.asking import ask, quoted  # noqa: PLC0415
    from extproc.telemetry.story import told  # noqa: PLC0415

    known = ask(reached.access, "GET", f"/api/v1/requests/{quoted(request_id)}")
    show(known, told, as_json=as_json)


@reaching
def top(
    reached: Reached,
    *,
    once: Annotated[bool, typer.Option("--once", help="Print all of it once, as plain text.")] = False,
) -> None:
    """Watch a running Tidegate: who waits, for what, and what would help; pause, trip, explain."""
    from extproc.console.top.remote import Remote  # noqa: PLC0415

    remote = Remote(reached.access)
    if once:
        from extproc.console.top.plain import page  # noqa: PLC0415

        typer.echo(page(remote.overview(), shutil.get_terminal_size((100, 24)).columns), nl=False)
        return
    from extproc.console.top.screen import Top  # noqa: PLC0415
    from extproc.telemetry.story import told  # noqa: PLC0415

    Top(remote, told).run()


@reaching
def bundle(
    reached: Reached,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to; tidegate-bundle-TIME.tar.gz.")
    ] = None,
    envoy: Annotated[
        str | None, typer.Option(help="URL of Envoy's admin page; that of the config on loopback.")
    ] = None,
) -> None:
    """Pack into one file what helps others to help: config, decisions, metrics, Envoy's state; no secrets."""
    from extproc.bundle import BundleError, collect, save  # noqa: PLC0415

    path = output or Path(time.strftime("tidegate-bundle-%Y%m%d-%H%M%S.tar.gz"))
    try:
        found = collect(reached.settings, reached.access, envoy)
        save(found, path)
    except BundleError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from None
    for name, why in found.missing.items():
        typer.echo(f"without {name}: {why}", err=True)
    typer.echo(path)
