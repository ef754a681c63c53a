"""Following the config file while the service runs: when it has changed, what of it holds, and what became of it.

A file counts as changed when its content is another, however it came there: written in place, renamed over, or by the
swap of a link somewhere above it, as Kubernetes does for a ConfigMap. It is looked at once a second, and read when it
has held still for a second, so that half a file is never taken for one. SIGHUP has it read at once.

What an operator changed by hand for a while (settings.overlay) lies over what the file says, whatever that is by then.
Should both together make no sense any more, the file counts, and what does not go with it ends.

A file with a mistake is refused as `tidegate check` would, and what holds goes on holding; so is what is no file but a
pipe or a folder, for nobody waits for what may never come. What cannot be followed keeps its old value and is told by
name, on the log and on the state page, with what it needs.

Deliberately not here: which settings can be followed (settings.changes), and how that is done (app).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

from extproc.settings import Settings, SettingsError, load
from extproc.settings.changes import Difference, differences, follow, version_of
from extproc.settings.files import mark_of
from extproc.settings.loading import MOST_BYTES
from extproc.settings.overlay import Change, by_name, overlaid, value_at
from extproc.shapes import Config

__all__ = ["Reloading", "Told", "Watch"]

log = logging.getLogger("tidegate")

LOOK_S = 1.0
"""Between two looks at the file."""
YIELD_S = 0.0005
"""Whoever reads settings in a thread lets others go on after so long: Python's usual 5 ms would be added to each turn
of the loop that serves requests, and large settings are read for seconds."""
MOST_TOLD = 50
"""So many changes are written to the log by name."""


class Watch:
    """Tells when the content of a file has changed and has held still since the look before."""

    def __init__(self, path: Path) -> None:
        """What is there now is known."""
        self.path = path
        self._seen = self._known = mark_of(path)
        self._content = _content(path)

    def changed(self) -> bool:
        """Look. True once for each new content."""
        before, self._seen = self._seen, mark_of(self.path)
        if self._seen is None or self._seen == self._known or self._seen != before:
            return False
        self._known = self._seen
        return self.read()

    def read(self) -> bool:
        """Take note of what is there now. True when it is something else than before."""
        before, self._content = self._content, _content(self.path)
        return self._content != before


def _content(path: Path) -> bytes:
    """A digest; of what is no file, or too large, its kind and size alone."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is not waited for
    except OSError:
        return b""
    try:
        told = os.fstat(opened)
        if not S_ISREG(told.st_mode) or told.st_size > MOST_BYTES:
            return f"{told.st_mode}:{told.st_size}".encode()
        with open(opened, "rb", closefd=False) as file:
            return hashlib.sha256(file.read(MOST_BYTES)).digest()
    except OSError:
        return b""
    finally:
        os.close(opened)


@dataclass(slots=True)
class Told:
    """What became of reloads. at: when the last one ended, in epoch seconds, None before any. problems: of the last
    one, if it was refused. waiting: what of the file does not hold yet. changed: what holds that the file does not say.
    """

    version: str
    applied: int = 0
    refused: int = 0
    at: float | None = None
    problems: list[str] = field(default_factory=list)
    waiting: list[Difference] = field(default_factory=list)
    changed: list[Difference] = field(default_factory=list)

    def state(self) -> Config:
        """For the state page."""
        return {
            "version": self.version,
            "reloads": {"applied": self.applied, "refused": self.refused},
            "reloaded_at": self.at,
            "problems": list(self.problems),
            "waiting": [{"change": str(one), "needs": one.need} for one in self.waiting],
            "changed": [str(one) for one in self.changed],
        }


@contextmanager
def _yielding() -> Iterator[None]:
    """Let others go on more often meanwhile. Only one thread at a time reads settings."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(YIELD_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


@dataclass(frozen=True, slots=True)
class _Made:
    """Settings that are to hold, and the changes in them. news: how they differ from what held before."""

    held: Settings
    changes: tuple[Change, ...]
    beneath: dict[str, float | None]
    news: list[Difference]
    changed: list[Difference]
    version: str


def _listed(changes: list[Difference]) -> str:
    told = [str(one) for one in changes[:MOST_TOLD]]
    return "; ".join([*told, f"and {len(changes) - len(told)} more"] if len(changes) > len(told) else told)


class Reloading:
    """See the head of this file. `apply` makes settings hold, in one step; `started` are those of the start.

    changes: what lies over the file, oldest first; beneath: by their ids, what each of them covers (None: nothing set).
    dropped: told of changes that end because the file does not go with them. followed: called when other settings hold.
    """

    def __init__(
        self,
        started: Settings,
        path: Path | None,
        prepare: Callable[[Settings], Any],
        apply: Callable[[Settings], Awaitable[None]],
        look_s: float = LOOK_S,
        *,
        aside: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        """`prepare` does beforehand whatever would take long. path None: there is no file. aside: runs such things."""
        self.told = Told(version_of(started))
        self.changes: tuple[Change, ...] = ()
        self.beneath: dict[str, float | None] = {}
        self.dropped: Callable[[Change], None] = lambda _: None
        self.followed: Callable[[], None] = lambda: None
        self._aside = aside
        self._turn = asyncio.Lock()
        self._started = self._says = self._holds = started
        self._path = path
        self._prepare = prepare
        self._apply = apply
        self._look_s = look_s
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Read the file soon, whether it has changed or not."""
        self._asked.set()

    async def run(self) -> None:
        """Follow the file until cancelled."""
        watch = None if self._path is None else await asyncio.to_thread(Watch, self._path)
        if self._path is not None and await asyncio.to_thread(self._is_other, self._path):
            await self.reload(self._path)  # it changed while we started
        while True:
            asked = await self._wait()
            if watch is None or self._path is None:
                if asked:
                    log.warning("there is no config file to read again")
            elif asked:
                await asyncio.to_thread(watch.read)
                await self.reload(self._path)
            elif await asyncio.to_thread(watch.changed):
                await self.reload(self._path)

    async def reload(self, path: Path) -> bool:
        """Read the file and let it hold as far as that can be. False when it was refused."""
        async with self._turn:
            try:
                says, waiting, made = await self._aside(self._read, path)
            except SettingsError as error:
                self._refuse(error.problems)
                return False
            except Exception as error:
                log.exception("config could not be prepared")
                self._refuse([f"{path}: cannot be prepared: {type(error).__name__}: {error}"])
                return False
            await self._hold(says, made)
            told, news = self.told, [one for one in waiting if one not in self.told.waiting]
            told.waiting, told.problems = waiting, []
            told.applied, told.at = told.applied + 1, time.time()
            log.warning("config %s holds: %s", told.version, _listed(made.news) or "nothing differs from what held")
            for one in news:
                log.warning("config: %s is kept back, it %s", one, one.need)
            return True

    async def change(self, change: Change) -> str:
        """Lay a value over what the file says. Returns the place by names. SettingsError where that cannot be."""
        async with self._turn:
            made: _Made = await self._aside(self._made_with, change)
            await self._hold(self._says, made)
            log.warning(
                "config %s holds, changed for a while: %s", self.told.version, _listed(made.news) or "as it was"
            )
            return made.changes[-1].place

    async def revert(self, change: str) -> None:
        """Go by what lies beneath it again. Nothing happens where there is no such change (any more)."""
        async with self._turn:
            left = tuple(one for one in self.changes if one.id != change)
            if len(left) < len(self.changes):
                made = await self._aside(self._make, self._says, left, strict=False)
                await self._hold(self._says, made)
                log.warning(
                    "config %s holds, a change is over: %s", self.told.version, _listed(made.news) or "as it was"
                )

    def _is_other(self, path: Path) -> bool:
        """Not if it was a pipe, which can be read once."""
        try:
            return path.is_file() and load(path) != self._started
        except SettingsError:
            return True

    async def _wait(self) -> bool:
        """Until the next look, or sooner when asked."""
        try:
            async with asyncio.timeout(self._look_s):
                await self._asked.wait()
        except TimeoutError:
            return False
        self._asked.clear()
        return True

    def _read(self, path: Path) -> tuple[Settings, list[Difference], _Made]:
        """What the file says as far as it can hold, what has to wait, and what is to hold."""
        if path.exists() and not path.is_file():
            raise SettingsError([f"{path}: is not a file"])
        with _yielding():
            says, waiting = follow(self._started, load(path))
        return says, waiting, self._make(says, self.changes, strict=False)

    def _made_with(self, change: Change) -> _Made:
        with _yielding():
            change = replace(change, place=by_name(self._says, change.place))
        return self._make(self._says, (*self.changes, change), strict=True)

    def _make(self, says: Settings, changes: tuple[Change, ...], *, strict: bool) -> _Made:
        """What is to hold. strict: SettingsError where changes do not go with it, instead of leaving those out."""
        with _yielding():
            try:
                held = overlaid(self._started, says, changes)
            except SettingsError:
                if strict:
                    raise
                held, changes = self._without_misfits(says, changes)
            self._prepare(held)
            beneath: dict[str, float | None] = {}
            known: dict[str, float | None] = {}
            for change in changes:
                place = change.place
                beneath[change.id] = known[place] if place in known else value_at(says, place)
                known[place] = change.value
            news = differences(self._holds, held)
            changed = differences(says, held) if changes else []
            return _Made(held, changes, beneath, news, changed, version_of(held))

    def _without_misfits(self, says: Settings, changes: tuple[Change, ...]) -> tuple[Settings, tuple[Change, ...]]:
        """Those of the changes that can be laid over it, one after the other."""
        held, kept = says, tuple[Change, ...]()
        for change in changes:
            try:
                held = overlaid(self._started, says, (*kept, change))
            except SettingsError as error:
                why = "; ".join(error.problems)
                log.error("config: the change of %s to %g ends: %s", change.place, change.value, why)  # noqa: TRY400
            else:
                kept = (*kept, change)
        return held, kept

    async def _hold(self, says: Settings, made: _Made) -> None:
        if made.news:
            await self._apply(made.held)
        former, self.changes, self.beneath = self.changes, made.changes, made.beneath
        self._says, self._holds = says, made.held
        self.told.version, self.told.changed = made.version, made.changed
        for change in former:
            if change not in self.changes:
                self.dropped(change)
        self.followed()

    def _refuse(self, problems: list[str]) -> None:
        self.told.refused, self.told.at, self.told.problems = self.told.refused + 1, time.time(), problems
        log.error("config refused, version %s goes on: %s", self.told.version, "; ".join(problems))
