"""What an operator may do to a running Tidegate by hand, and what each of it means exactly.

`pause(lane)`: nobody of the lane is let go. Who is in line stays there, and who comes waits, too, each as long as the
lane lets it; where the end of the pause is known, forecasts and Retry-After count on it, so that who could not be
served in time is refused at once. Other lanes go on as if the paused one were empty: nothing is kept free for it, nor
counted as ahead of them. `resume` has an effect at once. What is only observed (observe mode) is never held. A lane
that a reload takes away stays paused for whoever is there, and should it come back meanwhile; the first reload without
it at which nobody can be in it any more ends its pause, told as the reload's.

`trip(upstream)`: its breaker opens as if it had become sick now; it rests, is probed, and comes back by itself. Of one
that is open the rest begins anew. `reset`: its breaker is closed at once; what was counted, how often it rested, and
which sizes of prompts were kept away is forgotten.

`take_out(upstream)`: nobody is sent there, whatever its breaker says: no user, no probe, no failover behind another
upstream. What runs there goes on; a request that was let go before may still fail over to it, because Envoy has its
order. Who waits goes elsewhere; who could only be served there is refused as if its breaker were open, and is told the
end of it where there is one within reach or not. No reload ends it: upstreams neither come nor go while this runs.

`change(place, value)`: one number of the settings is another for a while, by the same road as a reload of the file and
checked like that. Several may lie over each other: the newest counts, and when one ends what lies beneath it does. A
reload changes what lies beneath them all; should a change make no sense with the new file, or its place be gone, it
ends, told as an error. What stands in a list is known by its name from then on, so that it never slips to another one.

`bypass`: everybody is let go at once, to the first upstream of its chain that is not taken out and whose breaker lets
it, else to the first that is not taken out; also who waits, and whom a paused lane holds. No lane, limit or quota
refuses anybody; but all of it is counted, into debt, so that afterwards the counters tell the truth, and who comes then
waits until what is owed has flowed in. Who may not use the service, or that model, and what cannot be read is refused
as ever. It is told as an error when it begins, every minute, and when it ends.

`drain`: as at SIGTERM, but the process stays. Where Envoy may ask others it is told to, and who comes here all the same
is served until nobody is left; then, and elsewhere at once, newcomers and everybody in line are refused. What runs goes
on. `undrain` takes in again; not once the process was told to end.

All are of this process alone, and nothing of them outlives it. What has an end of its own returns by itself. Whoever
moves one is named in the event, see core.events.LeverMoved.

Deliberately not here: who may do it (console), and how it is done (limiter, breakers, reloading, app).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Container, Coroutine
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from extproc import shapes
from extproc.admission import Admission
from extproc.core.events import LeverMoved
from extproc.ports import Observer
from extproc.reloading import Reloading
from extproc.settings import SettingsError
from extproc.settings.overlay import Change

__all__ = ["Drainage", "Levers"]

log = logging.getLogger("tidegate")

LONGEST_S = 30 * 86_400.0
MOST_CHANGES = 100
"""So many changes may lie over the file at once."""
MOST = 1e15
REMIND_S = 60.0
"""Between two lines that tell that everybody passes."""
TIME = "time"
Key = tuple[str, str]
BYPASS: Key = ("bypass", "")


@dataclass(frozen=True, slots=True)
class Drainage:
    """How the service is drained, and how that is undone. drain returns when nothing is under way."""

    drain: Callable[[], Awaitable[None]]
    undrain: Callable[[], None]


@dataclass(slots=True)
class _Moved:
    """A lever that is moved. until: when it returns by itself, in epoch seconds; None for never."""

    until: float | None
    timer: asyncio.TimerHandle | None


class Levers:
    """See the head of this file, and ports.Operations. Make it inside the event loop, and `stop` it in the end."""

    def __init__(self, admission: Admission, reloading: Reloading, drainage: Drainage, observe: Observer) -> None:
        """Nothing is moved."""
        self._admission = admission
        self._reloading = reloading
        self._drainage = drainage
        self._observe = observe
        self._clock = asyncio.get_running_loop()
        self._moved: dict[Key, _Moved] = {}
        self._made = 0
        self._coming = 0
        """Changes that are about to hold."""
        self._salt = secrets.token_hex(3)
        self._reminder: asyncio.TimerHandle | None = None
        self._draining: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._by: dict[str, str] = {}
        self._ending = False
        reloading.dropped, reloading.followed = self._dropped, self._followed

    def state(self) -> shapes.Levers:
        """See ports.Operations."""
        limiter, breakers = self._admission.limiter, self._admission.breakers
        return {
            "bypass": {"until": self._until(BYPASS)} if limiter.bypassing else None,
            "draining": limiter.draining or self._draining is not None or self._ending,
            "lanes": {
                lane: {"paused": lane in limiter.lanes.paused, "until": self._until(("lane", lane))}
                for lane in limiter.lanes.rules
            },
            "upstreams": {
                name: {"out": name in breakers.out, "until": self._until(("upstream", name))}
                for name in breakers.by_name
            },
            "changes": [
                {
                    "id": change.id,
                    "place": change.place,
                    "value": change.value,
                    "was": self._reloading.beneath[change.id],
                    "until": self._until(("change", change.id)),
                }
                for change in self._reloading.changes
            ],
        }

    async def pause(self, lane: str, for_s: float | None = None, *, by: str = "operator") -> None:
        """See the head of this file. LookupError for no such lane, ValueError for such seconds."""
        lanes = self._admission.limiter.lanes
        _known("lane", lane, lanes.rules)
        ends = self._ends(for_s)
        again = lane in lanes.paused
        self._admission.limiter.pause(lane, ends)
        self._keep(("lane", lane), "pause", for_s, partial(self._resume, lane, TIME), by=by, again=again)
        await self._admission.limiter.disown(lane)

    async def resume(self, lane: str, *, by: str = "operator") -> None:
        """Let a lane's people go again."""
        _known("lane", lane, self._admission.limiter.lanes.rules)
        self._resume(lane, by)

    async def trip(self, upstream: str, *, by: str = "operator") -> None:
        """Open an upstream's breaker."""
        _known("upstream", upstream, self._admission.breakers.by_name)
        self._admission.breakers.trip(upstream, "tripped by hand")
        self._observe(LeverMoved("trip", upstream, by))

    async def reset(self, upstream: str, *, by: str = "operator") -> None:
        """Close an upstream's breaker."""
        _known("upstream", upstream, self._admission.breakers.by_name)
        self._admission.breakers.reset(upstream, "reset by hand")
        self._observe(LeverMoved("reset", upstream, by))

    async def take_out(self, upstream: str, for_s: float | None = None, *, by: str = "operator") -> None:
        """Send nobody to an upstream."""
        breakers = self._admission.breakers
        _known("upstream", upstream, breakers.by_name)
        ends = self._ends(for_s)
        again = upstream in breakers.out
        breakers.take_out(upstream, ends)
        self._keep(
            ("upstream", upstream), "take_out", for_s, partial(self._put_back, upstream, TIME), by=by, again=again
        )
        self._admission.limiter.look_around()

    async def put_back(self, upstream: str, *, by: str = "operator") -> None:
        """Send to an upstream again."""
        _known("upstream", upstream, self._admission.breakers.by_name)
        self._put_back(upstream, by)

    async def change(self, place: str, value: float, for_s: float | None = None, *, by: str = "operator") -> str:
        """Lay a value over what the file says; the id of the change. ValueError with the place where that cannot be."""
        self._ends(for_s)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -MOST < value < MOST:
            raise ValueError(f"{place}: the value is no number, or too large a one")
        if len(self._reloading.changes) + self._coming >= MOST_CHANGES:
            raise ValueError(f"{MOST_CHANGES} changes are in force; end some of them first")
        self._made += 1
        change = Change(f"{self._made}-{self._salt}", place, value)
        self._coming += 1
        try:
            await asyncio.shield(self._begun(self._change(change, for_s, by)))
        except SettingsError as error:
            raise ValueError("; ".join(error.problems)) from None
        return change.id

    async def revert(self, change: str, *, by: str = "operator") -> None:
        """End a change; one that has ended stays so. LookupError for one that never was."""
        number, _, salt = change.partition("-")
        known = salt == self._salt and number.isascii() and number.isdecimal() and 0 < int(number) <= self._made
        if not known:
            raise LookupError(f"there is no change {change[:100]!r}")
        await asyncio.shield(self._begun(self._revert(change, by)))

    async def bypass(self, for_s: float | None = None, *, by: str = "operator") -> None:
        """Let everybody go at once."""
        self._ends(for_s)
        again = self._admission.limiter.bypassing
        self._admission.limiter.bypass()
        self._keep(BYPASS, "bypass", for_s, partial(self._no_bypass, TIME), by=by, again=again)
        if not again:
            self._remind_later()

    async def no_bypass(self, *, by: str = "operator") -> None:
        """Decide again."""
        self._no_bypass(by)

    async def drain(self, *, by: str = "operator") -> None:
        """Take nobody in any more; returns at once."""
        if self._draining is None and not self._ending:
            self._draining = asyncio.create_task(self._drain())
            self._observe(LeverMoved("drain", by=by))

    async def undrain(self, *, by: str = "operator") -> None:
        """Take in again. ValueError once the process was told to end."""
        if self._ending:
            raise ValueError("this process was told to end, and does")
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None
            self._drainage.undrain()
            self._observe(LeverMoved("undrain", by=by))

    def end(self) -> None:
        """The process was told to end: it drains for good, whatever was moved by hand."""
        self._ending = True
        if self._draining is not None:
            self._draining.cancel()

    async def stop(self) -> None:
        """Forget all timers. What is moved stays so, for what little is left."""
        self.end()
        timers = [self._reminder, *(moved.timer for moved in self._moved.values())]
        for timer in timers:
            if timer is not None:
                timer.cancel()
        tasks = [*self._tasks, *([self._draining] if self._draining else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self) -> None:
        await self._drainage.drain()

    def _resume(self, lane: str, by: str) -> None:
        self._admission.limiter.resume(lane)
        self._forget(("lane", lane), "resume", by)

    def _put_back(self, upstream: str, by: str) -> None:
        self._admission.breakers.put_back(upstream)
        self._forget(("upstream", upstream), "put_back", by)

    def _no_bypass(self, by: str) -> None:
        self._admission.limiter.no_bypass()
        if self._reminder is not None:
            self._reminder.cancel()
            self._reminder = None
        self._forget(BYPASS, "no_bypass", by)

    def _begun(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """In a task of its own: settings have to follow as a whole, also if who asked for it leaves."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, SettingsError):
            log.error("a change of settings broke", exc_info=error)

    async def _change(self, change: Change, for_s: float | None, by: str) -> None:
        try:
            place = await self._reloading.change(change)
        finally:
            self._coming -= 1
        key, back = ("change", change.id), partial(self._over, change.id)
        self._keep(key, "change", for_s, back, by=by, name=place)

    def _over(self, change: str) -> None:
        self._begun(self._revert(change, TIME))

    async def _revert(self, change: str, by: str) -> None:
        self._by[change] = by
        try:
            await self._reloading.revert(change)
        finally:
            self._by.pop(change, None)

    def _dropped(self, change: Change) -> None:
        """It is over: reverted, or a reload, or the end of another change, is one that it does not go with."""
        self._forget(("change", change.id), "revert", self._by.get(change.id, "reload"), name=change.place)

    def _followed(self) -> None:
        """Lanes that nobody can be in any more have no pause."""
        lanes = self._admission.limiter.lanes.rules
        for kind, name in list(self._moved):
            if kind == "lane" and name not in lanes:
                self._forget((kind, name), "resume", "reload")

    def _remind_later(self) -> None:
        self._reminder = self._clock.call_later(REMIND_S, self._remind)

    def _remind(self) -> None:
        log.error("bypass: everybody passes, and no limit is kept")
        self._remind_later()

    def _ends(self, for_s: float | None) -> float:
        """When that is, on the clock."""
        if for_s is None:
            return inf
        if isinstance(for_s, bool) or not isinstance(for_s, (int, float)) or not 0 < for_s <= LONGEST_S:
            raise ValueError(f"for_s: must be above 0 and at most {LONGEST_S:g} seconds (30 days)")
        return self._clock.time() + for_s

    def _until(self, key: Key) -> float | None:
        moved = self._moved.get(key)
        return None if moved is None else moved.until

    def _keep(
        self, key: Key, action: str, for_s: float | None, back: Callable[[], None], *, by: str, again: bool = False,
        name: str | None = None,
    ) -> None:  # fmt: skip
        """A lever is moved, and returns by itself if that was said. again: it was before."""
        former = self._moved.get(key)
        if former is not None and former.timer is not None:
            former.timer.cancel()
        until = None if for_s is None else time.time() + for_s
        timer = None if for_s is None else self._clock.call_later(for_s, back)
        self._moved[key] = _Moved(until, timer)
        if not again or former is None or (former.until, until) != (None, None):
            self._observe(LeverMoved(action, key[1] if name is None else name, by, until))

    def _forget(self, key: Key, action: str, by: str, name: str | None = None) -> None:
        moved = self._moved.pop(key, None)
        if moved is not None:
            if moved.timer is not None:
                moved.timer.cancel()
            self._observe(LeverMoved(action, key[1] if name is None else name, by))


def _known(kind: str, name: str, names: Container[str]) -> None:
    if name not in names:
        raise LookupError(f"there is no {kind} {name[:100]!r}")
