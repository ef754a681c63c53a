"""A circuit breaker per upstream: a table, and the counting that leads to it.

Theory. A sick upstream costs every request sent to it a timeout, and every retry keeps it sick. So after a few
failures in a row nothing is sent there for a while (OPEN); then one call of our own, never a user's, tries it
(HALF_OPEN); if that works traffic returns (CLOSED), if not it rests twice as long, up to a cap, with jitter so that
many gateways do not probe in step. A result counts only if its request began after the last transition: answers to
questions asked in another state say nothing about this one. A client's own error says nothing about the upstream at
all.

The table is the whole behaviour: a missing entry is a bug and raises. Opening again never shortens a rest.

Deliberately not here: what counts as a failure (dialects classify), budgets (they steer but declare nobody sick).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from extproc.core.policy import BreakerRules

__all__ = ["TABLE", "Breaker", "Outcome", "Signal", "State"]


class State(StrEnum):
    """CLOSED lets traffic through, OPEN does not, HALF_OPEN waits for the result of a probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Outcome(StrEnum):
    """What one attempt said about its upstream. PACED is a 429: it works, but wants less."""

    SUCCESS = "success"
    FAILURE = "failure"
    PACED = "paced"
    IGNORED = "ignored"


class Signal(StrEnum):
    """What moves the breaker. TRIP and RESET are an operator's."""

    SICK = "sick"
    RESTED = "rested"
    PROBE_OK = "probe_ok"
    PROBE_FAILED = "probe_failed"
    TRIP = "trip"
    RESET = "reset"


TABLE: dict[tuple[State, Signal], State] = {
    (State.CLOSED, Signal.SICK): State.OPEN,
    (State.CLOSED, Signal.TRIP): State.OPEN,
    (State.CLOSED, Signal.RESET): State.CLOSED,
    (State.OPEN, Signal.RESTED): State.HALF_OPEN,
    (State.OPEN, Signal.TRIP): State.OPEN,
    (State.OPEN, Signal.RESET): State.CLOSED,
    (State.HALF_OPEN, Signal.PROBE_OK): State.CLOSED,
    (State.HALF_OPEN, Signal.PROBE_FAILED): State.OPEN,
    (State.HALF_OPEN, Signal.TRIP): State.OPEN,
    (State.HALF_OPEN, Signal.RESET): State.CLOSED,
}


@dataclass(slots=True)
class Breaker:
    """The state of one upstream. All times are seconds on the caller's clock; `chance` is in [0, 1).

    since: time of the last transition. rests_until: when a probe may be sent, infinite while CLOSED.
    """

    rules: BreakerRules = field(default_factory=BreakerRules)
    state: State = State.CLOSED
    since: float = -inf
    rests_until: float = inf
    openings: int = 0
    failures: int = 0
    paced: int = 0

    @property
    def allows(self) -> bool:
        """Whether users' requests may go there."""
        return self.state is State.CLOSED

    def record(self, outcome: Outcome, *, began: float, now: float, chance: float) -> bool:
        """Count one attempt that began at `began`. True when this moved the breaker."""
        if began < self.since or outcome is Outcome.IGNORED or self.state is not State.CLOSED:
            return False
        if outcome is Outcome.SUCCESS:
            self.failures = self.paced = self.openings = 0
            return False
        self.failures += outcome is Outcome.FAILURE
        self.paced += outcome is Outcome.PACED
        if self.failures < self.rules.failures and self.paced < self.rules.paced:
            return False
        self.move(Signal.SICK, now=now, chance=chance)
        return True

    def due(self, now: float) -> bool:
        """Whether it has rested and wants a probe."""
        return self.state is State.OPEN and now >= self.rests_until

    def move(self, signal: Signal, *, now: float, chance: float) -> None:
        """Follow the table. KeyError when the table has no such entry."""
        state = TABLE[self.state, signal]
        if state is State.OPEN:
            self._open(now, chance)
        elif state is State.CLOSED:
            self.rests_until = inf
        self.failures = self.paced = 0
        self.state, self.since = state, now

    def _open(self, now: float, chance: float) -> None:
        rest = min(self.rules.cool_down_max_s, self.rules.cool_down_s * 2.0**self.openings)
        until = now + rest * (1.0 + self.rules.jitter * chance)
        self.rests_until = max(until, self.rests_until) if self.state is State.OPEN else until
        self.openings = min(self.openings + 1, 30)
