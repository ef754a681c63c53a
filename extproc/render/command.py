"""`tidegate merge`: from a file to the text of what it becomes."""

from __future__ import annotations

from pathlib import Path

from extproc.render.envoy import RenderError, validate
from extproc.render.existing import dump, load
from extproc.render.merge import HEADER, merge
from extproc.settings import Settings

__all__ = ["merged", "save"]


def merged(
    file: Path, settings: Settings, listener: str | None = None, virtual_host: str | None = None, *, check: bool = False
) -> tuple[str, tuple[str, ...]]:
    """The text, and notes for who merged. RenderError where that cannot be done, or Envoy says no (`check`)."""
    try:
        existing = load(file.read_text("utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise RenderError(f"{file}: {error}") from None
    try:
        done = merge(existing, settings, listener, virtual_host)
    except RenderError as error:
        raise RenderError("\n".join(f"{file}: {line}" for line in str(error).splitlines())) from None
    text = dump(done.config, HEADER)
    if check:
        try:
            validate(text)
        except RenderError as error:  # a note may well say why
            raise RenderError("\n".join([*done.notes, str(error)])) from None
    return text, done.notes


def save(text: str, file: Path) -> None:
    """Write it. RenderError where that cannot be done."""
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise RenderError(f"{file}: {error}") from None
