"""The `tidegate` command line: every command, in the order in which `--help` lists them.

What a command needs is imported when it runs: `--help`, probes and hooks shall not wait for what they do not use.
"""

from __future__ import annotations

import sys

import typer

from extproc.cli import checking, console, rendering, serving, traffic
from extproc.cli.admin import admin

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="The `tidegate` command line.", pretty_exceptions_enable=False
)

app.command()(serving.up)
app.command()(serving.serve)
app.command()(checking.check)
app.command()(rendering.merge)
app.command()(rendering.k8s)
app.command()(serving.ready)
app.command()(serving.drain)
app.command()(checking.doctor)
app.command()(rendering.metrics)
app.command()(traffic.fake_provider)
app.command()(traffic.replay)
app.command()(traffic.simulate)
app.command()(checking.diff)
app.command()(console.session)
app.command()(console.explain)
app.command()(console.top)
app.command()(console.bundle)
app.add_typer(admin, name="admin")
app.add_typer(rendering.render, name="render")


def main() -> None:
    """Run the command line; a known mistake is a message, not a traceback."""
    try:
        app()
    except Exception as error:  # not SystemExit, by which every command ends: nobody should wait for the imports then
        if not isinstance(error, _mistakes()):
            raise
        print(error, file=sys.stderr)  # noqa: T201
        sys.exit(2)


def _mistakes() -> tuple[type[Exception], ...]:
    """What is raised for mistakes in what was asked for. To be called only when something was raised."""
    from extproc.against.dump import AdminError  # noqa: PLC0415
    from extproc.doctor.asking import BadUrl, NoAnswer  # noqa: PLC0415
    from extproc.lifecycle import NotReadyError  # noqa: PLC0415
    from extproc.render.envoy import RenderError  # noqa: PLC0415
    from extproc.settings import SettingsError  # noqa: PLC0415
    from extproc.sim.plan import MixError  # noqa: PLC0415
    from extproc.stack import StackError  # noqa: PLC0415

    return SettingsError, StackError, RenderError, MixError, NotReadyError, BadUrl, NoAnswer, AdminError
