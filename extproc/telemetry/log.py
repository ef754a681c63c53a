"""One JSON line for each event worth an operator's attention, on the standard logger. Never prompts, never keys.

A line of a decision tells of one request that was refused, that no upstream answered, that a later copy of it took the
place of, or that waited for long, everything there is to explain it (see explain); it is written when the request's
books are closed. Of these lines a share may be taken. How much is written can be changed at any time; the environment's
TIDEGATE_LOG takes the place of the level in the config.

A crowd cannot fill a disk, nor keep the service busy with writing: of each kind so many lines a second are written, and
the next one tells how many were not (`unwritten`). What is worth a warning is always written.

Every line is ASCII, so that no name that a client made up can break it in two, and has `time` (epoch seconds), `level`
and `message`; lines about a request its `request_id`, and `trace_id` where it has one.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from pydantic import ValidationError

from extproc.core import events
from extproc.core.breaker import Sign
from extproc.core.request import Request
from extproc.settings.sections import LogSettings
from extproc.telemetry.dossiers import Dossier, Dossiers
from extproc.telemetry.explain import explain
from extproc.telemetry.sampling import parent_of
from extproc.telemetry.words import plain

__all__ = ["JsonLines", "LogSettings", "Logging", "level_of"]

log = logging.getLogger("tidegate")

LEVELS = {
    events.BreakerMoved: logging.WARNING,
    events.SizesMoved: logging.WARNING,
    events.BudgetUsed: logging.WARNING,
    events.LeverMoved: logging.WARNING,
    events.AttemptFailed: logging.INFO,
    events.Overshot: logging.DEBUG,
    events.Probed: logging.INFO,
    events.LimitsMoved: logging.INFO,
    events.Observed: logging.INFO,
    events.Shadowed: logging.INFO,
}
OURS = frozenset({Sign.TERMINAL, Sign.CREDENTIAL})
"""Signs of an upstream that is well: our credit and our key are an operator's business, now."""
LOUD = frozenset({"bypass", "no_bypass"})
"""What an operator does that nobody may overlook."""
PLAIN = frozenset({"decision"})
"""What is plain data already, of which there is much."""
DECISION = logging.INFO
"""Level of a decision's line."""
MOST_PER_S = 50
"""Lines of one kind in a second, below the level of warnings. Fifty decisions take some six milliseconds."""


class Logging:
    """Writes lines of events (as an Observer) and of decisions; one of it follows `dossiers`.

    settings: what is in force. override: a level that comes before the config's, or empty (`level_of`). trace: the id
    of the trace of a request, or empty. chance: in [0, 1), draws the share. clock: seconds, of any beginning.
    """

    def __init__(
        self,
        settings: LogSettings,
        dossiers: Dossiers,
        *,
        override: str = "",
        trace: Callable[[Request], str] = lambda _: "",
        chance: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write what the settings say, from now on."""
        self._dossiers = dossiers
        self._override = override
        self._trace = trace
        self._chance = chance
        self._clock = clock
        self._written: dict[str, _Written] = {}
        self._file = settings
        self.settings = settings
        self._take(settings)
        dossiers.ended.append(self.ended)

    def state(self) -> dict[str, Any]:
        """What is in force, as plain data."""
        return self.settings.model_dump()

    def set_log(self, *, level: str | None = None, slow_s: float | None = None, sample: float | None = None) -> None:
        """Write more or less from now on, until the config says something else; None leaves as it is. ValueError."""
        asked = {"level": level, "slow_s": slow_s, "sample": sample}
        changed = {name: value for name, value in asked.items() if value is not None}
        self.settings = _checked(self.settings.model_dump() | changed, "log")
        log.setLevel(self.settings.level.upper())

    def follow(self, settings: LogSettings) -> None:
        """Go by the config, where it says something else than before."""
        if settings != self._file:
            self._file = settings
            self._take(settings)

    def __call__(self, event: events.Event) -> None:
        """Observer: write the event if its kind is worth a line."""
        level = LEVELS.get(type(event))
        if isinstance(event, events.BreakerMoved) and event.sign in OURS:
            level = logging.ERROR
        if isinstance(event, events.LeverMoved) and event.action in LOUD:
            level = logging.ERROR
        if level is not None and log.isEnabledFor(level):
            self._write(level, type(event).__name__, lambda: _words(event) | self._about(event))

    def ended(self, dossier: Dossier) -> None:
        """Write the line of a decision, if it is one that is asked about."""
        if not log.isEnabledFor(DECISION):
            return
        end, waited_s = dossier.events[-1][1], 0.0
        if not isinstance(end, events.Refused):
            waited_s = getattr(end, "waited_s", 0.0)
        settled = dossier.last(events.Settled)
        failed = "evicted" if settled is not None and settled.evicted else "failed"
        what = "refused" if dossier.refused else failed if dossier.reason else "slow"
        if what == "slow" and waited_s < self.settings.slow_s:
            return
        if self._chance() < self.settings.sample:
            self._write(DECISION, what, lambda: self._decision(dossier))

    def _write(self, level: int, kind: str, words: Callable[[], dict[str, Any]]) -> None:
        """One line, unless there were many of its kind in this second."""
        written = self._written.setdefault(kind, _Written())
        if level < logging.WARNING and not written.may(self._clock()):
            return
        unwritten, written.unwritten = written.unwritten, 0
        log.log(level, kind, extra={"event": words() | ({"unwritten": unwritten} if unwritten else {})})

    def _decision(self, dossier: Dossier) -> dict[str, Any]:
        about = self._named(dossier.id, dossier.request, dossier.trace)
        return about | {"decision": explain(dossier, trace=about.get("trace_id", ""))}

    def _take(self, settings: LogSettings) -> None:
        level = {"level": self._override} if self._override else {}
        self.settings = settings.model_copy(update=level)
        log.setLevel(self.settings.level.upper())

    def _about(self, event: Any) -> dict[str, Any]:
        """Which request an event is about."""
        request = getattr(event, "request", None)
        if request is None and (ticket := getattr(event, "ticket", "")):
            dossier = self._dossiers.of(ticket)
            request = None if dossier is None else dossier.request
        if request is None:
            return {}
        return self._named(request.id, request, request.trace) | {
            "ticket": request.ticket,
            "tenant": request.tenant,
            "lane": request.lane,
            "model": request.model,
        }

    def _named(self, name: str, request: Request | None, traceparent: str) -> dict[str, Any]:
        parent = parent_of(traceparent)
        trace = (request and self._trace(request)) or (parent.trace if parent else "")
        return {"request_id": name} | ({"trace_id": trace} if trace else {})


def level_of(environment: Mapping[str, str]) -> str:
    """The level that TIDEGATE_LOG asks for; empty where it asks for none. ValueError when there is no such level."""
    level = environment.get("TIDEGATE_LOG", "").lower()
    if level:
        _checked({"level": level}, "TIDEGATE_LOG")
    return level


@dataclass(slots=True)
class _Written:
    """Lines of one kind: how many in the second that began at `since`, and how many were not written since the last."""

    since: float = -inf
    lines: int = 0
    unwritten: int = 0

    def may(self, now: float) -> bool:
        if now - self.since >= 1.0:
            self.since, self.lines = now, 0
        self.lines += 1
        self.unwritten += self.lines > MOST_PER_S
        return self.lines <= MOST_PER_S


class JsonLines(logging.Formatter):
    """Formats records as one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line for one record."""
        line = {"time": round(record.created, 3), "level": record.levelname.lower(), "message": record.getMessage()}
        told = getattr(record, "event", {})
        line |= {name: told[name] if name in PLAIN else plain(told[name]) for name in told if name not in line}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _words(event: events.Event) -> dict[str, Any]:
    return {field.name: getattr(event, field.name) for field in fields(event) if field.name != "request"}


def _checked(values: dict[str, Any], where: str) -> LogSettings:
    try:
        return LogSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = where if where.isupper() else ".".join(map(str, (where, *first["loc"])))
        raise ValueError(f"{place}: {first['msg']}") from None
