"""On what terms a lane takes, and what a lane that waits is owed where it waits.

Lanes are asked in the order of their rank, so a better lane that never ends would leave nothing to those behind it. A
lane with a guaranteed share is therefore owed part of what is given while it waits. What it is owed grows in a bucket
with time (`share x rate`), elsewhere with what is granted (`share x amount`); when it covers what the lane's first
waiter needs the lane is due, and all others leave that much alone. What is granted to the lane is paid from what it is
owed, whoever's turn it was: a share is a minimum, not an extra. A lane that has not asked for `LAPSE_S` is owed nothing
any more, so idle lanes keep nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, inf

from extproc.core.value import value

__all__ = [
    "AHEAD", "EPSILON", "LAPSE_S", "PLAIN", "RENEW_S", "TURNS", "Standing", "Terms", "better_seen", "charge",
    "held_back", "is_due", "leave", "owed", "register",
]  # fmt: skip

EPSILON = 1e-3
"""Units that are never worth a wait: amounts stay floats."""
LAPSE_S = 2.0
"""A lane that was not refused anything for so long does not wait any more."""
SEEN_S = 60.0
"""Where things are held, capacity is kept free for better lanes that were seen within this time."""
TURNS = 100
"""Most turns that a lane may have in hand, when much became free at once."""
AHEAD = 2
"""The same while it waits for something else."""
RENEW_S = 1.0
"""A waiting lane with a share should ask again at least this often, or it counts as gone."""


@value
class Terms:
    """On what terms a lane takes, beside others who wait.

    share: of every counter it is guaranteed this much while it waits. keep_free: of every counter it leaves this much
    to better lanes. smooth: it takes evenly, never a burst. yields: what a bucket reserves for the best lane it leaves.
    """

    lane: str = ""
    rank: int = 0
    share: float = 0.0
    keep_free: float = 0.0
    smooth: bool = False
    yields: bool = False


PLAIN = Terms()
"""Terms of whoever has no lane."""


@dataclass(slots=True)
class Standing:
    """A waiting lane at one counter: its first waiter needs `need` units, `owed` of which are its own by now.

    Negative `owed`: it took more than it was owed, in one request. kept: when it was last refused, here or elsewhere.
    short: whether it was this counter that lacked.
    """

    share: float
    need: float
    kept: float
    owed: float = 0.0
    short: bool = True

    def waits(self, now: float) -> bool:
        """Whether it asked lately."""
        return now - self.kept < LAPSE_S

    def covers(self, amount: float) -> bool:
        """Whether so much is its own."""
        return self.owed >= amount - EPSILON


def register(standings: dict[str, Standing], terms: Terms, need: float, now: float, *, short: bool) -> None:
    """Note that a lane with a share was refused; `short` when for want of this counter. Elsewhere it only stays."""
    standing = standings.get(terms.lane)
    if short and standing is None:
        standings[terms.lane] = Standing(terms.share, need, now)
    elif standing is not None:
        if not standing.waits(now):
            standing.owed = min(0.0, standing.owed)
        if short:
            standing.need = need
        standing.share, standing.kept, standing.short = terms.share, now, short


def leave(standings: dict[str, Standing], lane: str) -> None:
    """A lane does not wait any more, and is owed nothing; what it took too much it still owes."""
    standing = standings.get(lane)
    if standing is not None:
        standing.kept, standing.owed = -inf, min(0.0, standing.owed)


def charge(standings: dict[str, Standing], lane: str, amount: float, now: float) -> None:
    """`amount` was granted to `lane`: who waits is owed its share; the lane pays from what it is owed.

    Who is due and waits for something else meanwhile is owed a turn or two, not one for every grant it watches.
    """
    for name, standing in list(standings.items()):
        if not standing.waits(now):
            del standings[name]
            continue
        part = standing.share * amount
        most = (TURNS if standing.short else AHEAD) * (standing.need + part)
        standing.owed = max(standing.owed, min(standing.owed + part, most))
        if name == lane:
            standing.owed = max(0.0, standing.owed - amount)


def is_due(standings: dict[str, Standing], lane: str, amount: float, now: float) -> bool:
    """Whether `amount` is this lane's own."""
    standing = standings.get(lane)
    return standing is not None and standing.waits(now) and standing.covers(amount)


def held_back(standings: dict[str, Standing], lane: str, now: float) -> float:
    """Units that `lane` has to leave to others that are due and lack just this: what they are owed, in whole turns."""
    return sum(
        standing.need * max(1, floor(standing.owed / max(standing.need, EPSILON)))
        for name, standing in standings.items()
        if name != lane and standing.short and standing.waits(now) and standing.covers(standing.need)
    )


def better_seen(seen: dict[int, float], rank: int, now: float) -> bool:
    """Whether a lane better than `rank` asked lately; `seen` tells when lanes did, by rank."""
    return any(other < rank and now - at < SEEN_S for other, at in seen.items())


def owed(standings: dict[str, Standing], now: float) -> dict[str, float]:
    """Units that lanes which wait are owed."""
    return {name: standing.owed for name, standing in standings.items() if standing.waits(now)}
