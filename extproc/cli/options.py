"""Options that many commands have, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from extproc.settings import Settings, load

__all__ = ["Config", "loads_of", "place_of", "settings_of"]

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The config file; tidegate.yaml here if there is one, else the built-in demo."),
]


def settings_of(config: Path | None) -> Settings:
    """What the file says. SettingsError names each mistake in it."""
    return load(place_of(config))


def place_of(config: Path | None) -> Path | None:
    """The file to read, None for the built-in demo."""
    return Path("tidegate.yaml") if config is None and Path("tidegate.yaml").exists() else config


def loads_of(text: str) -> tuple[float, ...]:
    """Of `--load`: how many times what upstreams can take, in rising order, each once."""
    try:
        loads = tuple(sorted({float(word) for word in text.split(",")}))
    except ValueError:
        loads = ()
    if not loads or not all(0.01 <= load <= 100 for load in loads):  # noqa: PLR2004 - what makes sense
        raise typer.BadParameter(f"{text!r} is not numbers from 0.01 to 100, with commas between", param_hint="--load")
    return loads
