"""Traces of LLM traffic: when each request arrived, how long its prompt was, how long its answer.

Two forms, told apart by their first line:

    TIMESTAMP,ContextTokens,GeneratedTokens              the Azure LLM inference traces; dates
    seconds,prompt_tokens,output_tokens[,lane[,tenant]]  our own; seconds from the start of the trace

Rows are read one by one, so that a trace of any size can be cut to a window without reading the rest. They must be in
order of time: a replay that sorted them would have to read all of them first, and a trace out of order is more often a
broken one. Every mistake names its line.

Deliberately not here: what a trace does not say (`plan` makes up lanes, tenants and streaming, and says so).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path

__all__ = ["Arrival", "TraceError", "parse", "read"]

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
OWN = ("seconds", "prompt_tokens", "output_tokens")
OPTIONAL = ("lane", "tenant")
MAX_TOKENS = 100_000_000
"""More tokens than this in one request is a mistake in the file."""


class TraceError(Exception):
    """The trace cannot be used. The message is one line: file, line number, what is wrong."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. at_s: seconds since the trace began. lane, tenant: None where the trace names none."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    lane: str | None = None
    tenant: str | None = None


def read(path: Path) -> Iterator[Arrival]:
    """The requests of the file `path`, in order. TraceError at the first row that cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            yield from parse(lines, str(path))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: is not UTF-8 text") from None


def parse(lines: Iterable[str], source: str) -> Iterator[Arrival]:
    """The requests that `lines` describe; `source` names them in errors. Blank lines are skipped."""
    rows = csv.reader(lines, strict=True)
    try:
        yield from _arrivals(rows)
    except _Wrong as wrong:
        raise TraceError(f"{source}:{max(1, rows.line_num)}: {wrong}") from None
    except csv.Error as error:
        raise TraceError(f"{source}:{rows.line_num}: not CSV: {error}") from None


class _Wrong(Exception):  # noqa: N818 - becomes a TraceError where the line is known
    """What is wrong with the row at hand."""


def _arrivals(rows: Iterable[list[str]]) -> Iterator[Arrival]:
    filled = (row for row in rows if any(row))
    names = [name.strip() for name in next(filled, [])]
    arrival = _reader(names)
    before = 0.0
    for row in filled:
        if len(row) != len(names):
            raise _Wrong(f"{len(row)} fields, expected {len(names)} ({','.join(names)})")
        found = arrival(row)
        if found.at_s < before:
            raise _Wrong(f"time goes back by {before - found.at_s:.3f} s; sort the trace by time")
        before = found.at_s
        yield found


def _reader(names: list[str]) -> Callable[[Sequence[str]], Arrival]:
    if tuple(names) == AZURE:
        return _Azure()
    if tuple(names[:3]) == OWN and tuple(names[3:]) in (OPTIONAL[:0], OPTIONAL[:1], OPTIONAL):
        return _own
    found = f"unknown header {','.join(names)[:80]!r}" if names else "is empty"
    raise _Wrong(f"{found}; expected {','.join(AZURE)} or {','.join(OWN)}[,lane[,tenant]]")


class _Azure:
    """Reads dates, and counts them from the first."""

    def __init__(self) -> None:
        self._first: datetime | None = None

    def __call__(self, row: Sequence[str]) -> Arrival:
        at = _date(row[0])
        if self._first is None:
            self._first = at
        return Arrival((at - self._first).total_seconds(), _tokens(AZURE[1], row[1]), _tokens(AZURE[2], row[2]))


def _own(row: Sequence[str]) -> Arrival:
    try:
        at_s = float(row[0])
    except ValueError:
        at_s = -1.0
    if not isfinite(at_s) or at_s < 0:
        raise _Wrong(f"seconds: {_shown(row[0])} is not a number of at least 0")
    words = [word.strip() or None for word in row[3:]]
    return Arrival(at_s, _tokens(OWN[1], row[1]), _tokens(OWN[2], row[2]), *words)


def _date(text: str) -> datetime:
    """A date without a zone is taken as UTC; more than six decimals of a second are cut."""
    try:
        date = datetime.fromisoformat(text.strip())
    except ValueError:
        raise _Wrong(f"TIMESTAMP: {_shown(text)} is not a date and time") from None
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def _tokens(name: str, text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and int(text[:12]) <= MAX_TOKENS):
        raise _Wrong(f"{name}: {_shown(text)} is not a whole number of tokens")
    return int(text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")  # noqa: PLR2004 - as much as a line has room for
