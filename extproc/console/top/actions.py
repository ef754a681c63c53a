"""What can be done from the terminal: each action in words, and how the console is asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from extproc.console.asking import quoted

__all__ = ["Action", "body_of", "bypass", "of_row"]

LONGEST_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class Action:
    """words: what will be done, as a question has it. lasts: whether it may be for a while."""

    words: str
    method: str
    path: str
    lasts: bool = False


def of_row(kind: str, what: str, row: Mapping[str, Any]) -> Action | None:
    """What a key does to the row of a table; None where it does nothing there."""
    name = str(row.get("name", ""))
    match kind, what:
        case "lanes", "pause":
            word = "resume" if row["paused"] else "pause"
            return Action(f"{word} lane {name}", "POST", f"lanes/{quoted(name)}/{word}", lasts=word == "pause")
        case "upstreams", "trip":
            return Action(f"trip the breaker of {name}", "POST", f"upstreams/{quoted(name)}/trip")
        case "upstreams", "reset":
            return Action(f"reset the breaker of {name}", "POST", f"upstreams/{quoted(name)}/reset")
        case "upstreams", "out":
            if row["out"]:
                return Action(f"put {name} back", "POST", f"upstreams/{quoted(name)}/in")
            return Action(f"take {name} out", "POST", f"upstreams/{quoted(name)}/out", lasts=True)
        case _:
            return None


def bypass(overview: Mapping[str, Any]) -> Action:
    """Let everybody go at once, or end that."""
    if (overview.get("levers") or {}).get("bypass") is not None:
        return Action("end the bypass: limits are kept again", "DELETE", "bypass")
    return Action("let EVERYBODY go at once, whatever the limits say (bypass)", "POST", "bypass", lasts=True)


def body_of(action: Action, for_s: str, reason: str) -> dict[str, Any] | None:
    """What is sent along. ValueError, in words, for a time that is none. None: nothing is."""
    found: dict[str, Any] = {"reason": reason.strip()} if reason.strip() else {}
    if action.lasts and for_s.strip():
        try:
            seconds = float(for_s)
        except ValueError:
            raise ValueError(f"{for_s.strip()[:20]!r} is no number of seconds") from None
        if not (isfinite(seconds) and 0 < seconds <= LONGEST_S):
            raise ValueError(f"a time is between 0 and {LONGEST_S:.0f} seconds")
        found["for_s"] = seconds
    return found if action.method != "DELETE" else found or None
