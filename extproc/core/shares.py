"""PLACEHOLDER for the owner of this file."""

from __future__ import annotations

from extproc.core.value import value

__all__ = ["PLAIN", "Terms"]


@value
class Terms:
    """On what terms a lane takes, beside others who wait.

    share: of every counter it is guaranteed this much while it waits. keep_free: of every counter it leaves this much
    to better lanes. smooth: it takes evenly, never a burst.
    """

    lane: str = ""
    rank: int = 0
    share: float = 0.0
    keep_free: float = 0.0
    smooth: bool = False


PLAIN = Terms()
"""Terms of whoever has no lane."""
