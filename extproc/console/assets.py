"""The files of the live page, read once: what is not among them cannot be asked for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Asset", "page"]

HERE = Path(__file__).parent / "page"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
    "": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file. tag: another one for another content."""

    content: bytes
    media_type: str
    tag: str


def page(folder: Path = HERE) -> dict[str, Asset]:
    """By path below /assets/, with "/" between folders; the page itself is `index.html`."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix in TYPES)
    return {file.relative_to(folder).as_posix(): _asset(file) for file in files}


def _asset(file: Path) -> Asset:
    content = file.read_bytes()
    return Asset(content, TYPES[file.suffix], f'"{hashlib.sha256(content).hexdigest()[:24]}"')
