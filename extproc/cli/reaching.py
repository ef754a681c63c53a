"""Commands that ask the console of a running Tidegate: the options that say which and how, and how failure is told.

`admin` moves its levers, `console` has all others.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from extproc.cli.options import settings_of
from extproc.console.terminal import harmless
from extproc.settings import Settings

if TYPE_CHECKING:
    from extproc.console.asking import Access

__all__ = ["CODES", "AsJson", "Reached", "reaching", "show"]

CODES = (
    "Ends with 0 when it is done, 1 when it was refused and not done, 2 when the command makes no sense, 3 when no "
    "Tidegate answers and nothing was done, 4 when it may have been done but nobody told: see `audit` and `show` then."
)
"""Exit statuses, as told to who asks for help; see console.asking."""
AsJson = Annotated[bool, typer.Option("--json", help="Print all of the answer, as JSON.")]


@dataclass(frozen=True, slots=True)
class Reached:
    """A console, and the settings by which it was found."""

    settings: Settings
    access: Access


def _reached(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="Of the Tidegate that runs: its console and its token. tidegate.yaml here, else the built-in demo.",
        ),
    ] = None,
    console: Annotated[
        str | None, typer.Option(help="host:port or URL of its console, where the config does not say it.")
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option(
            help="The token that proves who asks; "
            "else TIDEGATE_TOKEN, that of the config, or what `tidegate up` made here."
        ),
    ] = None,
    ca_file: Annotated[str | None, typer.Option(help="Whose certificates to trust, for https.")] = None,
    client_cert_file: Annotated[str | None, typer.Option(help="Certificate that proves who asks.")] = None,
    client_key_file: Annotated[str | None, typer.Option(help="The key that belongs to it.")] = None,
) -> Reached:
    """The console to ask. ConsoleError where a file that was named cannot be used."""
    from extproc.console.asking import access  # noqa: PLC0415

    settings = settings_of(config)
    return Reached(
        settings,
        access(
            settings,
            console=console,
            token_file=token_file,
            ca_file=ca_file,
            client_cert_file=client_cert_file,
            client_key_file=client_key_file,
        ),
    )


def reaching(function: Callable[..., None]) -> Callable[..., None]:
    """A command that has the options of `_reached` behind its own; the function gets what they lead to, first.

    Why the console did not do what was asked is told on stderr; for its exit status see CODES.
    """
    shared = inspect.signature(_reached, eval_str=True).parameters
    own = [*inspect.signature(function, eval_str=True).parameters.values()][1:]

    @wraps(function)
    def command(**given: Any) -> None:
        from extproc.console.asking import ConsoleError  # noqa: PLC0415

        try:
            function(_reached(**{name: given.pop(name) for name in shared}), **given)
        except ConsoleError as error:
            typer.echo(harmless(str(error)), err=True)
            raise typer.Exit(error.code) from None

    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *shared.values())]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def show(answer: Any, told: Callable[[Any], str], *, as_json: bool) -> None:
    """Print what the console answered: as it is, or in words."""
    typer.echo(json.dumps(answer, indent=2) if as_json else told(answer).removesuffix("\n"))
