"""Files that settings name, and that may be replaced while everything runs."""

from __future__ import annotations

from pathlib import Path

__all__ = ["Mark", "mark_of"]

Mark = tuple[int, ...] | None


def mark_of(path: str | Path) -> Mark:
    """What a look without reading tells of a file: another mark for another file. None while there is nothing.

    Links are followed: Kubernetes swaps one to replace all that a volume holds.
    """
    try:
        told = Path(path).stat()
    except OSError:
        return None
    return told.st_dev, told.st_ino, told.st_size, told.st_mtime_ns, told.st_ctime_ns
