"""One who waits for a turn: what it could take, where it stands, and what it has been held by.

Deliberately not here: whose turn it is (core.lanes), and how turns are given (limiter).
"""

from __future__ import annotations

import asyncio

from extproc.core.capacity import Claim
from extproc.core.events import PassedOver
from extproc.core.lanes import Lanes
from extproc.core.lines import Group, Line, Waiter
from extproc.core.promises import Promise
from extproc.core.refusal import Rejected
from extproc.core.request import Request
from extproc.core.routing import paused_key
from extproc.core.spells import Spells, added_since, merged
from extproc.core.value import value

__all__ = ["Turn", "Wants", "group_of", "line_of", "regroup", "turn_away", "turn_of"]


@value
class Wants:
    """What one request could take: upstreams in order of preference, and what each costs it.

    forced: whatever their breakers say. too_large: none of them could ever hold it; it goes because it is observed.
    costless: those that cost nothing, where an upstream's own dollars are limited; None where no limit is to be kept.
    prompt: its tokens. unable: the others of its chain, which could not serve it.
    """

    names: tuple[str, ...]
    prices: dict[str, tuple[Claim, ...]]
    forced: bool = False
    too_large: bool = False
    prompt: int = 0
    costless: frozenset[str] | None = None
    unable: tuple[PassedOver, ...] = ()


class Turn(Waiter):
    """A waiter with the means to wake it.

    fitting: the upstreams that answer such prompts well, by which it was put in line. promise: one that it came too
    early for. verdict: why it had to make room for others. bypassed: a bypass let it go. charging: what it was let go
    for is being taken. stood: the line it stands in, since when, and for want of what that had been held by then.
    spells: the same of lines it left. whole: what it wanted when it came, before it was left with what is owned alone.
    """

    __slots__ = (
        "bypassed", "charging", "event", "fitting", "predicted_s", "promise", "spells", "stood", "timer", "verdict",
        "wants", "whole",
    )  # fmt: skip

    def __init__(self, request: Request, seq: int, wants: Wants, since: float, before: float) -> None:
        super().__init__(request, Group(), seq, since, before)
        self.event = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None
        self.wants = self.whole = wants
        self.fitting = wants.names
        self.promise: Promise | None = None
        self.bypassed = self.charging = False
        self.verdict: Rejected | None = None
        self.predicted_s = 0.0
        self.stood: tuple[Line, Spells] | None = None
        self.spells: Spells = {}

    def stands(self, line: Line | None, now: float) -> None:
        """It stands in this line from now on; None for none. What the one before was held by is kept."""
        if self.stood is not None:
            before, known = self.stood
            self.spells = merged(self.spells, added_since(before.lacked(now), known))
        self.stood = None if line is None else (line, line.lacked(now))


def turn_of(waiter: Waiter) -> Turn:
    """The turn that a waiter of the lanes is."""
    assert isinstance(waiter, Turn)  # noqa: S101 - only the limiter fills the lanes
    return waiter


def group_of(turn: Turn, *, first_only: bool) -> Group:
    """What a turn would take as things stand. first_only: because its lane holds."""
    keys = frozenset(claim.key for name in turn.fitting for claim in turn.wants.prices[name])
    return Group(turn.fitting, keys, first_only)


def regroup(lanes: Lanes, turn: Turn, group: Group, now: float) -> None:
    """It wants other upstreams from now on."""
    lanes.regroup(turn, group)
    if turn.stood is not None:
        turn.stands(line_of(lanes, turn, now), now)


def line_of(lanes: Lanes, turn: Turn, now: float) -> Line | None:
    """Where it stands; of a paused lane nobody is tried, so that nobody else tells the line why it does not go."""
    line = turn.flow.line if turn.flow else None
    if line and turn.request.lane in lanes.paused:
        line.refused((paused_key(turn.request.lane),), now)
    return line


def turn_away(lanes: Lanes, turn: Turn, verdict: Rejected) -> None:
    """Have it leave its line, refused."""
    turn.verdict = verdict
    turn.gone = True
    lanes.leave(turn)
    turn.event.set()
