"""What was done here and by whom: one entry for each action and for each attempt at one that was refused.

The newest are kept here; all are in the log (`tidegate.audit`), and in `admin.audit_file` where that is set. There an
action leaves a line before it is done, with the result "begun", and a second with the same id that tells what came of
it. An action whose first line cannot be written is not done: nothing must be changed here that nobody can find later.
The file is only ever appended to, and opened anew for each line, so that it can be moved away at any time.

Attempts that are refused come from whoever reaches the console, so of those only some a minute are told one by one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

__all__ = ["MOST_REASON", "Actor", "Audit", "Entry", "NotWrittenError"]

log = logging.getLogger("tidegate.audit")
log.setLevel(logging.INFO)  # whatever the level of the log is: it is to be found there, too

KEPT = 500
MOST_REASON = 500
"""Characters of what somebody says why."""
REFUSALS_A_MINUTE = 30
_MOST_WHO = 200


class NotWrittenError(Exception):
    """The audit file cannot be written. The message says why."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks, as it was proven, "" for nobody; and the address it asks from."""

    who: str
    address: str


@dataclass(slots=True)
class Entry:
    """One action. at: when it was asked for, epoch seconds. result: begun, done, refused or failed; why: in words."""

    id: int
    at: float
    who: str
    address: str
    action: str
    arguments: Mapping[str, Any]
    reason: str
    result: str
    why: str = ""
    unlisted: int = 0

    def told(self) -> dict[str, Any]:
        """As plain data. unlisted: so many refused attempts before this one are not told."""
        told = {
            "id": self.id,
            "at": round(self.at, 3),
            "who": self.who,
            "from": self.address,
            "action": self.action,
            "arguments": dict(self.arguments),
            "reason": self.reason,
            "result": self.result,
        }
        return told | {name: each for name, each in (("why", self.why), ("unlisted", self.unlisted)) if each}


@dataclass(slots=True)
class Audit:
    """See the head of this file. now: the time in epoch seconds."""

    path: str | None = None
    now: Callable[[], float] = time.time
    kept: deque[Entry] = field(default_factory=lambda: deque(maxlen=KEPT))
    _ids: count[int] = field(default_factory=lambda: count(1))
    _one: asyncio.Lock = field(default_factory=asyncio.Lock)
    _whole: bool = True
    _minute: int = 0
    _refused: int = 0
    _unlisted: int = 0

    async def begin(self, actor: Actor, action: str, arguments: Mapping[str, Any], reason: str) -> Entry:
        """An action that is about to be done. NotWrittenError: it must not be."""
        entry = self._entry(actor, action, arguments, reason, "begun")
        await self._write(entry)
        self.kept.append(entry)
        return entry

    async def end(self, entry: Entry, result: str, why: str = "") -> None:
        """What came of it."""
        entry.result, entry.why = result, why
        _to_log(entry)
        try:
            await self._write(entry)
        except NotWrittenError as error:
            log.error("%s; action %d is only told as begun there", error, entry.id)  # noqa: TRY400 - no bug of ours

    async def refuse(self, actor: Actor, action: str, arguments: Mapping[str, Any], why: str) -> None:
        """Somebody asked for an action and may not."""
        now = self.now()
        if int(now // 60) != self._minute:
            self._minute, self._refused = int(now // 60), 0
        self._refused += 1
        if self._refused > REFUSALS_A_MINUTE:
            self._unlisted += 1
            return
        entry = self._entry(actor, action, arguments, "", "refused", why)
        entry.unlisted, self._unlisted = self._unlisted, 0
        self.kept.append(entry)
        _to_log(entry)
        try:
            await self._write(entry)
        except NotWrittenError as error:
            log.error("%s", error)  # noqa: TRY400 - no bug of ours

    def newest(self, limit: int = KEPT) -> list[dict[str, Any]]:
        """The newest first."""
        return [entry.told() for entry in list(self.kept)[::-1][:limit]]

    def _entry(
        self, actor: Actor, action: str, arguments: Mapping[str, Any], reason: str, result: str, why: str = ""
    ) -> Entry:
        who = actor.who[:_MOST_WHO]
        return Entry(next(self._ids), self.now(), who, actor.address, action, arguments, reason, result, why)

    async def _write(self, entry: Entry) -> None:
        """In a thread, since disks may be slow; one after the other."""
        if self.path is not None:
            line = json.dumps(entry.told(), default=str) + "\n"
            async with self._one:
                await asyncio.to_thread(self._append, self.path, line if self._whole else f"\n{line}")

    def _append(self, path: str, line: str) -> None:
        data = line.encode()
        written = _appended(path, data)
        self._whole = written in (0, len(data))
        if written < len(data):
            raise NotWrittenError(f"admin.audit_file: {path}: no room left")


def _appended(path: str, data: bytes) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK  # a pipe that nobody reads is not waited for
    try:
        file = os.open(path, flags, 0o600)
        try:
            return os.write(file, data)
        finally:
            os.close(file)
    except OSError as error:
        raise NotWrittenError(f"admin.audit_file: {path}: {error.strerror}") from None


def _to_log(entry: Entry) -> None:
    log.info("%s %s", entry.action, entry.result, extra={"event": entry.told()})
