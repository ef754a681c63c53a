"""A circuit breaker per upstream: a table, and the counting that leads to it.

Theory. A sick upstream costs every request sent to it a timeout, and every retry keeps it sick. So nothing is sent
there for a while (OPEN); then one call of our own, never a user's, tries it (HALF_OPEN); if that works traffic returns,
if not it rests twice as long, up to a cap, with jitter so that many gateways do not probe in step. A call of a few
tokens proves little, and everything at once would fell again what has just stood up. So traffic returns by and by
(RAMPING): a window of requests that may run there at once, which doubles five times in `ramp_s` and grows by one with
each success; before anything has gone well it doubles twice and no more. A failure takes back what ten successes gave,
and begins it anew where there were not so many: an upstream at which one in twenty always fails would otherwise return
for ever. It is over (CLOSED) after that time, once the window is twice what runs and most of what returned was not
late.

What counts as sick are so many failures in a row, so many 429s in a row, a share of failed attempts, first tokens that
take much longer than is usual there (baseline). Each can be turned off. That our account has no credit, or that our key
is refused, needs no second sign. No credit rests long at once, for it does not come back by itself. A refused key rests
long when the probe is refused, too: a single request might ask for a model that the key may not use, and must not keep
everybody away.

An answer under 200 that is none (invalid, empty, truncated) hits large prompts first. So it counts against its class of
prompt sizes, and only that class is kept away for a while (`Sizes`); only with prompts of the smallest class, that of
our own calls, is it a failure like others. But one that came to an end of its own, and is merely empty, short or
broken off as its finish says, may be what its caller asked for: of these no more than one counts in a row, and for the
rest they keep away the smallest class, too, which costs nobody an answer. Otherwise three small calls could close every
upstream of a chain to everybody.

One that is slow answers its canaries all the same, so that users have to find out, a few at a time, whether it is
better; and each time an operator is told. So the trials become rarer: it rests for a quarter of the time since it was
so first, ten minutes at most. A few good answers in between do not end that, for chance brings them; to be closed for
ten minutes does. Still, who is merely slow is not sick (`merely_slow`), and whoever chooses may prefer it to nobody.
What users then get there moves nothing; but a sign of anything else ends that, and lets a canary try it soon.

A result counts only if its request began after the last transition: answers to questions asked in another state say
nothing about this one. So nothing that comes late or out of order can move it back. A client's own error says nothing
about the upstream at all.

The table is the whole behaviour: a missing entry is a bug and raises. Opening again never shortens a rest.

Deliberately not here: what counts as a failure (dialects classify), budgets (they steer but declare nobody sick).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp2, inf

from extproc.core.baseline import SIZES, Share, Tempo, size_class
from extproc.core.policy import BreakerRules
from extproc.core.request import Endpoint
from extproc.core.value import value

__all__ = ["NOTHING", "TABLE", "Breaker", "Evidence", "Outcome", "Sign", "Signal", "Sizes", "State", "Verdict"]

DOUBLINGS = 5
"""How often the window of a ramp doubles in its time."""
UNPROVEN = 2
"""So often it does before anything that returned has gone well."""
BORNE = 10
"""So many successes of a ramp make up for a failure."""
MOST_DOUBLINGS = 30
SLOW_SHARE, SLOW_REST_S = 0.25, 600.0
"""What is slow rests for this share of the time since it was so first, but no longer than that."""
WELL_S = 600.0
"""It is slow anew, not still, when it has been closed for so long."""
KEPT_REQUESTS = 10
"""So many requests are remembered as those that led to a transition."""


class State(StrEnum):
    """CLOSED lets traffic through, OPEN does not, HALF_OPEN waits for a probe, RAMPING lets in more and more."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    RAMPING = "ramping"


class Outcome(StrEnum):
    """What one attempt said about its upstream. PACED is a 429: it works, but wants less.

    TERMINAL: the account has no credit. CREDENTIAL: our key was refused.
    """

    SUCCESS = "success"
    FAILURE = "failure"
    PACED = "paced"
    IGNORED = "ignored"
    TERMINAL = "terminal"
    CREDENTIAL = "credential"


class Signal(StrEnum):
    """What moves the breaker. TRIP and RESET are an operator's."""

    SICK = "sick"
    RESTED = "rested"
    PROBE_OK = "probe_ok"
    PROBE_FAILED = "probe_failed"
    RAMPED = "ramped"
    TRIP = "trip"
    RESET = "reset"


class Sign(StrEnum):
    """Why it counts as sick."""

    FAILURES = "failures"
    PACED = "paced"
    ERRORS = "errors"
    SLOW = "slow"
    MALFORMED = "malformed"
    TERMINAL = "terminal"
    CREDENTIAL = "credential"


TABLE: dict[tuple[State, Signal], State] = {
    (State.CLOSED, Signal.SICK): State.OPEN,
    (State.CLOSED, Signal.TRIP): State.OPEN,
    (State.CLOSED, Signal.RESET): State.CLOSED,
    (State.OPEN, Signal.RESTED): State.HALF_OPEN,
    (State.OPEN, Signal.TRIP): State.OPEN,
    (State.OPEN, Signal.RESET): State.CLOSED,
    (State.HALF_OPEN, Signal.PROBE_OK): State.RAMPING,
    (State.HALF_OPEN, Signal.PROBE_FAILED): State.OPEN,
    (State.HALF_OPEN, Signal.TRIP): State.OPEN,
    (State.HALF_OPEN, Signal.RESET): State.CLOSED,
    (State.RAMPING, Signal.SICK): State.OPEN,
    (State.RAMPING, Signal.RAMPED): State.CLOSED,
    (State.RAMPING, Signal.TRIP): State.OPEN,
    (State.RAMPING, Signal.RESET): State.CLOSED,
}


@value
class Evidence:
    """What is known of one attempt. request: its id. first_token_s: None where it does not stream.

    malformed: an answer under 200 that is none: invalid, empty, truncated. hollow: it has its end all the same (it is
    empty, short, or broken off as its finish says), so that the caller may have brought it about. gave_up: the client
    left after first_token_s, and there was no token yet. endpoint: what was asked for.
    """

    request: str = ""
    prompt: int = 0
    first_token_s: float | None = None
    malformed: bool = False
    model: str = ""
    gave_up: bool = False
    hollow: bool = False
    endpoint: Endpoint = Endpoint.OTHER


NOTHING = Evidence()


@value
class Verdict:
    """Why a breaker, or one of its size classes, moved: the sign, its numbers, and ids of requests that led to it."""

    sign: Sign | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    requests: tuple[str, ...] = ()


@dataclass(slots=True)
class Breaker:
    """The state of one upstream. All times are seconds on the caller's clock; `chance` is in [0, 1).

    since: time of the last transition. rests_until: when a probe may be sent, infinite while CLOSED. openings, graves:
    how often it opened, and was quarantined, since users were last served well. merely_slow: whether that first tokens
    are late is all that keeps users away; slow_since: when they were first, infinite when that is over. hollow: whether
    one of the failures in this row was. grown: successes of this ramp, but for those that failures took back; proven:
    whether anything went well in it; fresh: when it began, or began anew. verdict: why it opened last.
    """

    rules: BreakerRules = field(default_factory=BreakerRules)
    state: State = State.CLOSED
    since: float = -inf
    rests_until: float = inf
    openings: int = 0
    graves: int = 0
    failures: int = 0
    paced: int = 0
    merely_slow: bool = False
    slow_since: float = inf
    hollow: bool = False
    grown: int = 0
    proven: bool = False
    fresh: float = -inf
    verdict: Verdict = field(default_factory=Verdict)
    sizes: Sizes = field(init=False, compare=False)
    tempo: Tempo | None = field(init=False, compare=False)
    errors: Share | None = field(init=False, compare=False)
    _blamed: deque[str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Nothing was counted."""
        rules = self.rules
        self.sizes = Sizes(rules)
        self.tempo = None if rules.slow is None else Tempo(rules.slow)
        self.errors = None if rules.errors is None else Share(rules.errors.window_s)
        self._blamed = deque(maxlen=KEPT_REQUESTS)

    def follow(self, rules: BreakerRules) -> None:
        """Go by other rules from now on. Its state, a rest that has begun, and what was learned stay."""
        self.rules = rules
        self.sizes.follow(rules)
        if rules.slow is None:
            self.tempo = None
        elif self.tempo is None:
            self.tempo = Tempo(rules.slow)
        else:
            self.tempo.follow(rules.slow)
        if rules.errors is None:
            self.errors = None
        else:
            self.errors = (self.errors or Share(rules.errors.window_s)).over(rules.errors.window_s)

    def allows(self, flying: float, now: float) -> bool:
        """Whether one more of users' requests may go there, where `flying` run already."""
        return self.state is State.CLOSED or (self.state is State.RAMPING and flying < self.window(now))

    def window(self, now: float) -> float:
        """How many requests may run there at once, whatever its limits are."""
        if self.state is not State.RAMPING:
            return inf if self.state is State.CLOSED else 0.0
        if self.rules.ramp_s <= 0:
            return inf
        doublings = DOUBLINGS * max(0.0, now - self.fresh) / self.rules.ramp_s
        doublings = doublings if self.proven else min(doublings, UNPROVEN)
        return (self.rules.ramp_from + self.grown) * exp2(min(MOST_DOUBLINGS, doublings))

    def record(
        self, outcome: Outcome, *, began: float, now: float, chance: float, evidence: Evidence = NOTHING
    ) -> bool:
        """Count one attempt that began at `began`. True when this moved the breaker."""
        if began < self.since or self.state not in (State.CLOSED, State.RAMPING):
            self._overhear(outcome, evidence, began, now)
            return False
        by_size = evidence.malformed and self.rules.malformed is not None
        hollow = by_size and evidence.hollow
        if by_size and (size_class(evidence.prompt) or (hollow and self.hollow)):
            outcome = Outcome.IGNORED
        self.hollow = self.hollow or (hollow and outcome is not Outcome.IGNORED)
        late = self._timed(evidence, now)
        sign = self._sign(outcome, now, hollow=hollow)
        if outcome is Outcome.SUCCESS:
            self._served(now, late=late)
        elif outcome is not Outcome.IGNORED:
            self._set_back(now)
        elif evidence.first_token_s is not None and not (late or evidence.gave_up):
            self._prove(now)
        if evidence.request and (late or outcome not in HARMLESS):
            self._blamed.append(evidence.request)
        if sign is None and late and self._is_slow():
            sign = Sign.SLOW
        if sign is None:
            return False
        self.verdict, self.merely_slow = self._verdict(sign, evidence, now), sign is Sign.SLOW
        self.move(Signal.SICK, now=now, chance=chance, grave=sign is Sign.TERMINAL)
        return True

    def due(self, now: float) -> bool:
        """Whether it has rested and wants a probe."""
        return self.state is State.OPEN and now >= self.rests_until

    def rest_s(self, now: float) -> float:
        """Seconds, but for jitter, until it may be tried: what is left of its rest, or all of it if it opened now.

        One that is merely slow opens anew, as it were, should it fail.
        """
        resting = self.state is State.OPEN and not self.merely_slow
        return max(0.0, self.rests_until - now) if resting else self._next_s()

    def ramped(self, flying: float, now: float) -> bool:
        """Whether its ramp is over, where `flying` requests run.

        It is not before something has gone well, if there is traffic, nor while what returns is mostly late.
        """
        if self.state is not State.RAMPING or now - self.fresh < self.rules.ramp_s or 2 * flying > self.window(now):
            return False
        if flying and not self.proven and self.rules.ramp_s > 0:
            return False
        return self.tempo is None or not self.tempo.mostly_late(now)

    def move(self, signal: Signal, *, now: float, chance: float, grave: bool = False) -> None:
        """Follow the table. KeyError when the table has no such entry. grave: if it opens, it rests long.

        A RESET forgets what was usual there, too, which sizes are kept away, and how often it has rested.
        """
        state = TABLE[self.state, signal]
        if signal not in STILL_SLOW:
            self.merely_slow = False
        if signal is Signal.RESET:
            self.slow_since, self.openings, self.graves = inf, 0, 0
            self.sizes.reset(now)
        if state is State.OPEN:
            self._open(now, chance, grave=grave and self.rules.quarantine_s is not None)
        else:
            self.rests_until = inf if state is State.CLOSED else min(self.rests_until, now)
        self._forget(anew=signal is Signal.RESET)
        self.state, self.since, self.fresh = state, now, now

    def rest_anew(self, now: float, chance: float) -> None:
        """One that is open begins its rest once more: as long as a rest was when it opened, and never shorter than it
        would be.
        """
        rest = _doubled(self.rules.cool_down_s, self.rules.cool_down_max_s, max(0, self.openings - 1))
        self.rests_until = max(self.rests_until, now + rest * (1.0 + self.rules.jitter * chance))

    def numbers(self, now: float) -> dict[str, float]:
        """What is counted at the moment, as far as it is."""
        told: dict[str, float] = {"failures": self.failures, "paced": self.paced}
        if self.errors is not None and self.errors.total:
            told |= {"attempts": self.errors.total, "error_share": round(self.errors.share, 4)}
        if self.tempo is not None and self.tempo.tail.total:
            tail = self.tempo.tail
            told |= {"timed": tail.total, "slow_share": round(tail.share, 4), "late_of_last": self.tempo.late}
        if self.state is State.RAMPING and self.window(now) < inf:
            told["window"] = round(self.window(now), 1)
        return told

    def _next_s(self) -> float:
        """Seconds, but for jitter, for which it rests when it opens next, unless that is grave."""
        if not self.openings:  # asked for each request
            return self.rules.cool_down_s
        return _doubled(self.rules.cool_down_s, self.rules.cool_down_max_s, self.openings)

    def _overhear(self, outcome: Outcome, evidence: Evidence, began: float, now: float) -> None:
        """What does not count may tell what is usual by now, or that it is not merely slow."""
        if self.tempo is not None and evidence.first_token_s is not None and not evidence.gave_up:
            self.tempo.overhear(evidence.first_token_s, evidence.model, evidence.prompt, now)
        if not self.merely_slow or began < self.since or evidence.malformed:
            return
        if outcome is Outcome.SUCCESS:
            self.failures = self.paced = 0
        if self._sign(outcome, now, hollow=False) is not None:
            self.merely_slow = False
            self.rests_until = min(self.rests_until, now + self._next_s())  # the long rest was for being slow

    def _timed(self, evidence: Evidence, now: float) -> bool:
        """Whether its first token came late."""
        if self.tempo is None or evidence.first_token_s is None:
            return False
        seen = evidence.first_token_s, evidence.model, evidence.prompt
        return self.tempo.note(*seen, now, at_least=evidence.gave_up)

    def _is_slow(self) -> bool:
        return self.tempo is not None and self.tempo.slow(ramping=self.state is State.RAMPING)

    def _sign(self, outcome: Outcome, now: float, *, hollow: bool) -> Sign | None:
        """Count it, and say what it is the last sign of. hollow: it counts in the row alone."""
        rules, failed = self.rules, outcome in FAILED
        if outcome in GRAVE and rules.quarantine_s is not None:
            self.failures += 1
            return GRAVE[outcome]
        self.failures += failed
        self.paced += outcome is Outcome.PACED
        if self.errors is not None and not hollow and (failed or outcome is Outcome.SUCCESS):
            self.errors.note(bad=failed, now=now)
        if failed and rules.failures is not None and self.failures >= rules.failures:
            return Sign.FAILURES
        if outcome is Outcome.PACED and rules.paced is not None and self.paced >= rules.paced:
            return Sign.PACED
        return Sign.ERRORS if failed and self._errors_many() else None

    def _errors_many(self) -> bool:
        rules, errors = self.rules.errors, self.errors
        if rules is None or errors is None:
            return False
        return errors.total >= rules.volume and errors.bad >= rules.share * errors.total

    def _served(self, now: float, *, late: bool) -> None:
        self.failures = self.paced = 0
        self.hollow = False
        if late:
            return
        if self.state is State.CLOSED:
            self.graves = 0
            if self._slow_no_more(now):
                self.openings, self.slow_since = 0, inf
        else:
            self.grown += 1
            self._prove(now)

    def _set_back(self, now: float) -> None:
        if self.grown >= BORNE:
            self.grown -= BORNE
        else:
            self.grown, self.proven, self.fresh = 0, False, now

    def _prove(self, now: float) -> None:
        """Something went well: the window grows on from where it is."""
        if not self.proven:
            self.proven, self.fresh = True, max(self.fresh, now - UNPROVEN * self.rules.ramp_s / DOUBLINGS)

    def _verdict(self, sign: Sign, evidence: Evidence, now: float) -> Verdict:
        numbers, blamed = self.numbers(now), list(self._blamed)
        if sign is Sign.SLOW and self.tempo is not None and evidence.first_token_s is not None:
            usual = self.tempo.baseline(evidence.model, evidence.prompt)
            numbers["first_token_s"] = round(evidence.first_token_s, 3)
            numbers |= {"usual_median_s": round(usual.median_s, 3), "usual_p95_s": round(usual.p95_s, 3)}
        row = {Sign.FAILURES: self.failures, Sign.PACED: self.paced}.get(sign, 1 if sign in QUARANTINED else None)
        return Verdict(sign, numbers, tuple(blamed if row is None else blamed[-row:]))

    def _open(self, now: float, chance: float, *, grave: bool) -> None:
        rules = self.rules
        if grave:
            rest = _doubled(rules.quarantine_s or 0.0, rules.quarantine_max_s, self.graves)
            self.graves = min(self.graves + 1, MOST_DOUBLINGS)
        else:
            rest = max(self._next_s(), self._slow_s(now)) if self.merely_slow else self._next_s()
            self.openings = min(self.openings + 1, MOST_DOUBLINGS)
        until = now + rest * (1.0 + rules.jitter * chance)
        self.rests_until = max(until, self.rests_until) if self.state is State.OPEN else until

    def _slow_s(self, now: float) -> float:
        """Seconds for which it rests for being slow, if no other reason makes it more."""
        if self._slow_no_more(now):
            self.slow_since = now
        return min(SLOW_REST_S, SLOW_SHARE * (now - self.slow_since))

    def _slow_no_more(self, now: float) -> bool:
        return self.slow_since == inf or (self.state is State.CLOSED and now - self.since >= WELL_S)

    def _forget(self, *, anew: bool) -> None:
        """What was counted in one state says nothing in the next. anew: nor does what was usual."""
        self.failures = self.paced = self.grown = 0
        self.proven = self.hollow = False
        self._blamed.clear()
        if self.errors is not None:
            self.errors.clear()
        if self.rules.slow is not None and anew:
            self.tempo = Tempo(self.rules.slow)
        elif self.tempo is not None:
            self.tempo.clear()


FAILED = frozenset({Outcome.FAILURE, Outcome.TERMINAL, Outcome.CREDENTIAL})
HARMLESS = frozenset({Outcome.SUCCESS, Outcome.IGNORED})
GRAVE = {Outcome.TERMINAL: Sign.TERMINAL, Outcome.CREDENTIAL: Sign.CREDENTIAL}
QUARANTINED = frozenset(GRAVE.values())
STILL_SLOW = frozenset({Signal.SICK, Signal.RESTED, Signal.PROBE_OK})
"""What moves one that is merely slow and says nothing else of it."""


class _SizeClass:
    """The answers to prompts of one size class. since: when it was kept away last, or returned; until: its rest."""

    __slots__ = ("answers", "blamed", "openings", "since", "until")

    def __init__(self, window_s: float) -> None:
        self.answers = Share(window_s)
        self.blamed: deque[str] = deque(maxlen=KEPT_REQUESTS)
        self.since = self.until = -inf
        self.openings = 0


class Sizes:
    """Which sizes of prompts an upstream answers badly. Those are kept away for a while, and the others are not.

    Whether large prompts work again cannot be tried with a call of our own, which would cost as much as theirs. So they
    just return after their rest, and are kept away twice as long when it is no better.
    """

    __slots__ = ("_classes", "_rules", "_shut", "verdict")

    def __init__(self, rules: BreakerRules) -> None:
        """All is well."""
        self._rules = rules
        ratio = rules.malformed
        self._classes = [_SizeClass(ratio.window_s) for _ in range(len(SIZES) + 1)] if ratio else []
        self._shut: set[int] = set()
        self.verdict = Verdict()

    @property
    def shut(self) -> list[str]:
        """The classes that are kept away, as `from-to` in tokens."""
        return [span(number) for number in sorted(self._shut)]

    def follow(self, rules: BreakerRules) -> None:
        """Go by other rules from now on. What rests goes on resting, unless nothing is to be kept away any more."""
        self._rules = rules
        ratio = rules.malformed
        if ratio is None:
            self._classes, self._shut = [], set()
            return
        self._classes = self._classes or [_SizeClass(ratio.window_s) for _ in range(len(SIZES) + 1)]
        for each in self._classes:
            each.answers = each.answers.over(ratio.window_s)

    def reset(self, now: float) -> None:
        """All is well, whatever was asked before."""
        for each in self._classes:
            each.answers.clear()
            each.blamed.clear()
            each.since, each.until, each.openings = now, -inf, 0
        self._shut.clear()

    def fits(self, prompt: int) -> bool:
        """Whether prompts of so many tokens are not kept away."""
        return not self._shut or size_class(prompt) not in self._shut

    def record(self, evidence: Evidence, *, began: float, now: float, chance: float) -> str:
        """Count one answer under 200 that began at `began`. The class that it shut, else an empty word.

        What is wrong in the smallest class counts with the breaker itself, unless it is hollow.
        """
        ratio, number = self._rules.malformed, size_class(evidence.prompt)
        if ratio is None or number in self._shut or began < self._classes[number].since:
            return ""
        if not number and evidence.malformed and not evidence.hollow:
            return ""
        seen = self._classes[number]
        seen.answers.note(bad=evidence.malformed, now=now)
        if not evidence.malformed:
            if seen.answers.total >= ratio.volume:
                seen.openings = 0
            return ""
        if evidence.request:
            seen.blamed.append(evidence.request)
        if seen.answers.total < ratio.volume or seen.answers.bad < ratio.share * seen.answers.total:
            return ""
        rest = _doubled(self._rules.cool_down_s, self._rules.quarantine_max_s, seen.openings)
        seen.since, seen.until = now, now + rest * (1.0 + self._rules.jitter * chance)
        seen.openings = min(seen.openings + 1, MOST_DOUBLINGS)
        told = {
            "answers": seen.answers.total,
            "malformed_share": round(seen.answers.share, 4),
            "rest_s": round(rest, 3),
        }
        self.verdict = Verdict(Sign.MALFORMED, told, tuple(seen.blamed))
        seen.answers.clear()
        seen.blamed.clear()
        self._shut.add(number)
        return span(number)

    def rested(self, now: float) -> list[str]:
        """Let those return whose rest is over; the classes."""
        over = [number for number in sorted(self._shut) if now >= self._classes[number].until]
        self._shut.difference_update(over)
        for number in over:
            self._classes[number].since = now
        return [span(number) for number in over]


def span(number: int) -> str:
    """The sizes of one class in words."""
    low = SIZES[number - 1] if number else 0
    return f"{low}-{SIZES[number] - 1}" if number < len(SIZES) else f"{low}-"


def _doubled(first_s: float, most_s: float, times: int) -> float:
    return min(most_s, first_s * exp2(times))
