"""The last hour in steps of ten seconds, and what the last minutes were like: what charts and rates are made of.

It hears a few kinds of events (who stands in line, how long who was let go had waited, who was refused, when an answer
began) and reads the rest off the counts that are kept anyway, once a step. Everything is bounded: names are those of
the config and of the closed list of reasons, a step's waits are a histogram whose bounds grow by a tenth each, so that
a percentile is wrong by no more than that, and of refusals a few ids are kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from time import monotonic, time
from typing import Any

from extproc.core import events
from extproc.core.breaker import State
from extproc.core.refusal import Reason
from extproc.shapes import Hour, LaneHour, UpstreamHour
from extproc.telemetry.keys import parts_of

__all__ = ["RATE_S", "RECENT_S", "STEP_S", "Counts", "History", "percentile"]

STEP_S, STEPS = 10.0, 360
RECENT_S = 300.0
"""What percentiles of waits, and counts of refusals, are about."""
RATE_S = STEP_S
"""Rates are those of the time since a step that is at least so old."""
GROWTH = 1.1
BOUNDS_S = tuple(0.001 * GROWTH**i for i in range(150))
"""Upper ends of a histogram's classes, in seconds: from a thousandth to 25 minutes."""
KEPT_IDS = 5
MOST_NAMES = 200
"""So many tenants of a step are told apart by whom a limit of their own refused."""

OWN = frozenset({Reason.TENANT_QUOTA, Reason.TENANT_CONCURRENCY, Reason.SESSION_BUDGET, Reason.SPEND_BUDGET})
"""Reasons that are a limit of the caller's own."""
CALLERS = OWN | {
    Reason.TOO_LARGE, Reason.UNAUTHENTICATED, Reason.FORBIDDEN, Reason.UNKNOWN_MODEL, Reason.BAD_REQUEST,
    Reason.NOT_FOUND,
}  # fmt: skip
"""Reasons that the caller itself brought about: they say nothing of how a lane is served."""

LaneStep = tuple[int, float, float, float | None]
"""Waiting, admitted, refused, 95th percentile of waits in seconds."""
UpstreamStep = tuple[float, float, float | None, State]
"""Tokens per second, failed attempts, level of the emptiest bucket (0..1), state of the breaker."""
Classes = dict[int, int]
"""How many fell into each class of `BOUNDS_S`."""


@dataclass(slots=True)
class Counts:
    """What only grows, as the tally has it: by lane, upstream or reason. at: on the clock."""

    at: float
    admitted: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, float] = field(default_factory=dict)
    served: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    paced: Mapping[str, float] = field(default_factory=dict)
    usd: Mapping[str, float] = field(default_factory=dict)
    refused_of: Mapping[str, float] = field(default_factory=dict)
    missed: Mapping[str, float] = field(default_factory=dict)
    """Those of a lane that were refused for what is not their callers' own doing."""

    def rate(self, before: Counts, what: str, name: str) -> float | None:
        """Per second since `before`; None where no time went by."""
        seconds = self.at - before.at
        if seconds <= 0:
            return None
        grown: float = getattr(self, what).get(name, 0) - getattr(before, what).get(name, 0)
        return max(0.0, grown) / seconds


@dataclass(slots=True)
class Refusals:
    """The last refusals for one reason: when, in epoch seconds and on the clock, and ids of requests, newest last."""

    at: float = 0.0
    heard: float = 0.0
    ids: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_IDS))


@dataclass(slots=True)
class Heard:
    """What events told within one step: waits by lane, seconds to first tokens by upstream; who was refused.

    estimated, reported: prompt tokens of those whose usage is known, and how many they are.
    """

    waits: dict[str, Classes] = field(default_factory=dict)
    firsts: dict[str, Classes] = field(default_factory=dict)
    own: Counter[tuple[str, str]] = field(default_factory=Counter)
    estimated: int = 0
    reported: int = 0
    compared: int = 0


@dataclass(slots=True)
class Step:
    """What a chart shows of one step. at: its end, on the clock."""

    at: float
    lanes: dict[str, LaneStep]
    upstreams: dict[str, UpstreamStep]
    refused: dict[str, float]


class History:
    """An Observer. `step` is to be called every `STEP_S` seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic, wall: Callable[[], float] = time) -> None:
        """Nothing happened yet. `wall` tells epoch seconds, and may jump; `clock` does not."""
        self.refusals: dict[str, Refusals] = {}
        self._lanes: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._in_line: set[str] = set()
        self._now = Heard()
        self._heard: deque[Heard] = deque(maxlen=round(RECENT_S / STEP_S))
        self._counts: deque[Counts] = deque([Counts(clock())], maxlen=round(RECENT_S / STEP_S) + 1)
        self._steps: deque[Step] = deque(maxlen=STEPS)
        self._clock = clock
        self._wall = wall
        self._hears = {
            events.Queued: self._queued,
            events.Admitted: self._admitted,
            events.Left: self._left,
            events.Settled: self._settled,
            events.Refused: self._refused,
        }

    def __call__(self, event: events.Event) -> None:
        """Hear one event."""
        hear = self._hears.get(type(event))
        if hear is not None:
            hear(event)  # type: ignore[operator]

    def counts(self, state: Mapping[str, Any]) -> Counts:
        """What has been counted up to now; `state` is the service's state as plain data."""
        tally = state["tally"]
        return Counts(
            self._clock(),
            admitted=tally["admitted"],
            refused=tally["refused"],
            failed=tally["failed"],
            served=tally["served"],
            tokens=tally["tokens"],
            errors=tally["failed_attempts"],
            paced=tally["paced"],
            usd=tally["spent_usd"],
            refused_of=dict(self._lanes),
            missed=dict(self._missed),
        )

    def step(self, state: Mapping[str, Any]) -> None:
        """Ten seconds are over: keep what they were like."""
        counts, before, heard = self.counts(state), self._counts[-1], self._now
        self._counts.append(counts)
        self._heard.append(heard)
        self._now = Heard()
        lanes = {
            name: (
                backlog["requests"],
                _grown(counts.admitted, before.admitted, name),
                _grown(counts.refused_of, before.refused_of, name),
                percentile(heard.waits.get(name, {}), 0.95),
            )
            for name, backlog in state["waiting"].items()
        }
        fills = _fills(state["counters"])
        upstreams = {
            name: (
                round(counts.rate(before, "tokens", name) or 0.0, 3),
                _grown(counts.errors, before.errors, name),
                fills.get(name),
                State(breaker["state"]),
            )
            for name, breaker in state["breakers"].items()
        }
        refused = {str(reason): _grown(counts.refused, before.refused, reason) for reason in counts.refused}
        self._steps.append(Step(counts.at, lanes, upstreams, {name: many for name, many in refused.items() if many}))

    def before(self, seconds: float = RATE_S) -> Counts:
        """What had been counted at least so long ago, or at the very start."""
        now = self._clock()
        return next((one for one in reversed(self._counts) if now - one.at >= seconds), self._counts[0])

    def refused_within(self, reason: str, seconds: float) -> bool:
        """Whether somebody was refused for `reason` in the last so many seconds."""
        last = self.refusals.get(reason)
        return last is not None and self._clock() - last.heard <= seconds

    def waits(self, lane: str) -> Classes:
        """How long those had waited who left this lane in the last minutes, let go or refused after a wait."""
        return _sum(heard.waits.get(lane) for heard in (*self._heard, self._now))

    def firsts(self, upstream: str) -> Classes:
        """How long first tokens of this upstream's streams took in the last minutes."""
        return _sum(heard.firsts.get(upstream) for heard in (*self._heard, self._now))

    def drift(self, least: int = 1) -> float | None:
        """Prompt tokens as estimated by those reported, of the last minutes; None where too few are known."""
        heard = (*self._heard, self._now)
        reported = sum(one.reported for one in heard)
        if not reported or sum(one.compared for one in heard) < least:
            return None
        return sum(one.estimated for one in heard) / reported

    def own_limits(self) -> Counter[tuple[str, str]]:
        """Of the last minutes: how many requests of which tenant were refused for what reason."""
        total: Counter[tuple[str, str]] = Counter()
        for heard in (*self._heard, self._now):
            total.update(heard.own)
        return total

    def told(self) -> Hour:
        """The last hour as columns, for charts. Gaps are None: what was not there yet.

        Times go by what the wall says now: one that was set back or forth in this hour bends no chart.
        """
        steps, epoch = list(self._steps), self._wall() - self._clock()
        lanes = dict.fromkeys(name for step in steps for name in step.lanes)
        upstreams = dict.fromkeys(name for step in steps for name in step.upstreams)
        reasons = dict.fromkeys(name for step in steps for name in step.refused)
        return {
            "step_s": STEP_S,
            "at": [round(step.at + epoch, 3) for step in steps],
            "lanes": {name: _lane([step.lanes.get(name) for step in steps]) for name in lanes},
            "upstreams": {name: _upstream([step.upstreams.get(name) for step in steps]) for name in upstreams},
            "refused": {name: [step.refused.get(name, 0) for step in steps] for name in reasons},
        }

    def _queued(self, event: events.Queued) -> None:
        self._in_line.add(event.request.ticket)

    def _left(self, event: events.Left) -> None:
        self._in_line.discard(event.request.ticket)

    def _admitted(self, event: events.Admitted) -> None:
        self._in_line.discard(event.request.ticket)
        _note(self._now.waits, event.request.lane, event.waited_s)

    def _settled(self, event: events.Settled) -> None:
        if event.request.stream and event.first_token_s is not None and event.upstream:
            _note(self._now.firsts, event.upstream, event.first_token_s)
        if event.usage is not None and event.usage.input:
            self._now.estimated += event.request.size_at(event.upstream).input
            self._now.reported += event.usage.input
            self._now.compared += 1

    def _refused(self, event: events.Refused) -> None:
        waited = event.request is not None and event.request.ticket in self._in_line
        if event.request is not None:
            self._in_line.discard(event.request.ticket)
        last = self.refusals.setdefault(event.reason, Refusals())
        last.at, last.heard = self._wall(), self._clock()
        if event.request_id:
            last.ids.append(event.request_id[:100])
        if event.lane:
            self._lanes[event.lane] += 1
            self._missed[event.lane] += event.reason not in CALLERS
            if waited:
                _note(self._now.waits, event.lane, event.waited_s)
        if event.reason in OWN:
            own, who = self._now.own, (str(event.reason), event.tenant)
            own[who if who in own or len(own) < MOST_NAMES else (who[0], "")] += 1


def percentile(classes: Classes, share: float) -> float | None:
    """The value below which this share of them lies, in seconds; None where there are none."""
    total = sum(classes.values())
    if not total:
        return None
    below = 0
    for index in sorted(classes):
        below += classes[index]
        if below >= share * total:
            return 0.0 if index == 0 else round(BOUNDS_S[min(index, len(BOUNDS_S) - 1)] / sqrt(GROWTH), 3)
    raise AssertionError("all of them are below the last class")


def _note(into: dict[str, Classes], name: str, seconds: float) -> None:
    classes = into.get(name)
    if classes is None:
        classes = into[name] = {}
    index = bisect_left(BOUNDS_S, seconds)
    classes[index] = classes.get(index, 0) + 1


def _sum(parts: Iterable[Classes | None]) -> Classes:
    total: Classes = {}
    for part in parts:
        for index, many in (part or {}).items():
            total[index] = total.get(index, 0) + many
    return total


def _grown(now: Mapping[str, float], before: Mapping[str, float], name: str) -> float:
    return now.get(name, 0) - before.get(name, 0)


def _fills(counters: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """How full the emptiest bucket of each upstream is, 0..1; debt is empty."""
    found: dict[str, float] = {}
    for key, counter in counters.items():
        if key.startswith("upstream/") and counter.get("capacity"):
            fill = round(min(1.0, max(0.0, counter["level"] / counter["capacity"])), 4)
            name = parts_of(key).name
            found[name] = min(fill, found.get(name, 1.0))
    return found


def _lane(rows: Sequence[LaneStep | None]) -> LaneHour:
    return {
        "waiting": [row and row[0] for row in rows],
        "admitted": [row and row[1] for row in rows],
        "refused": [row and row[2] for row in rows],
        "wait_p95_s": [row and row[3] for row in rows],
    }


def _upstream(rows: Sequence[UpstreamStep | None]) -> UpstreamHour:
    return {
        "tokens_per_s": [row and row[0] for row in rows],
        "errors": [row and row[1] for row in rows],
        "level": [row and row[2] for row in rows],
        "state": [row and row[3] for row in rows],
    }
