"""One JSON line for each event worth an operator's attention, on the standard logger. Never prompts, never keys."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import fields

from extproc.core import events
from extproc.core.breaker import Sign

__all__ = ["JsonLines", "log_event"]

log = logging.getLogger("tidegate")

LEVELS = {
    events.BreakerMoved: logging.WARNING,
    events.SizesMoved: logging.WARNING,
    events.BudgetUsed: logging.WARNING,
    events.AttemptFailed: logging.INFO,
    events.Overshot: logging.DEBUG,
    events.Refused: logging.INFO,
    events.Probed: logging.INFO,
    events.LimitsMoved: logging.INFO,
    events.Observed: logging.INFO,
    events.Shadowed: logging.INFO,
}
OURS = frozenset({Sign.TERMINAL, Sign.CREDENTIAL})
"""Signs of an upstream that is well: our credit and our key are an operator's business, now."""


def log_event(event: events.Event) -> None:
    """Observer: write the event if its kind is worth a line."""
    level = LEVELS.get(type(event))
    if isinstance(event, events.BreakerMoved) and event.sign in OURS:
        level = logging.ERROR
    if level is not None and log.isEnabledFor(level):
        words = {field.name: getattr(event, field.name) for field in fields(event)}
        log.log(level, type(event).__name__, extra={"event": words})


class JsonLines(logging.Formatter):
    """Formats records as one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line for one record."""
        line = {"time": round(time.time(), 3), "level": record.levelname.lower(), "message": record.getMessage()}
        line |= getattr(record, "event", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
