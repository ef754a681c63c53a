"""What is written to a terminal, for whoever writes to one."""

from __future__ import annotations

__all__ = ["harmless"]


def harmless(text: str) -> str:
    """What came from outside, for a terminal: nothing in it moves the cursor, or changes the order of what is read."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
