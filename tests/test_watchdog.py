"""A hung loop is noticed, a suspended process is not taken for one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from extproc import watchdog
from extproc.watchdog import EXIT_CODE, TICK_S, Watchdog
from tests.doubles import VirtualLoop, play


class Ticks:
    """Stands for the event that the watching thread waits on: each wait is a tick, and runs what happened meanwhile."""

    def __init__(self, happenings: Iterator[Callable[[], None]]) -> None:
        self._happenings = happenings
        self.waited: list[float] = []

    def wait(self, seconds: float) -> bool:
        """True at the end, as if stopped."""
        self.waited.append(seconds)
        happening = next(self._happenings, None)
        if happening is None:
            return True
        happening()
        return False


def watch(limit_s: float, story: str) -> tuple[int, int]:
    """Play a story, a letter per tick (`b` the loop beat, `.` it did not): times it was found hung, ticks used."""
    hung = 0

    def found() -> None:
        nonlocal hung
        hung += 1

    dog = Watchdog(limit_s, found)

    def beat() -> None:
        dog._beats += 1

    ticks = Ticks(beat if letter == "b" else (lambda: None) for letter in story)
    dog._stopped = ticks  # type: ignore[assignment]
    dog._watch()
    assert set(ticks.waited) == {TICK_S}
    return hung, len(ticks.waited)


def test_a_loop_that_does_not_beat_for_the_limit_is_hung() -> None:
    """After as many ticks as the limit has, once, and then the watch is over."""
    assert watch(2.0, "bbb" + "." * 50) == (1, 3 + 8)


@pytest.mark.parametrize("story", ["b" * 50, "b......." * 10, "." * 7 + "b" + "." * 7, ""])
def test_a_loop_that_beats_now_and_then_is_not(story: str) -> None:
    """A pause shorter than the limit is forgiven, however often."""
    assert watch(2.0, story)[0] == 0


def test_a_limit_of_next_to_nothing_still_allows_two_ticks() -> None:
    """A loop that is a little late for one beat is not hung."""
    assert watch(0.01, "b." * 20)[0] == 0
    assert watch(0.01, "b..")[0] == 1


def test_a_suspended_process_is_not_hung() -> None:
    """Ticks are counted, not seconds: while all is suspended none passes, and the first after it finds a beat soon."""
    assert watch(2.0, "bb" + "......" + "b" * 10)[0] == 0


def test_the_loop_beats_every_tick_until_it_is_cancelled() -> None:
    """Beating is the loop's own work, so that only a loop that runs beats."""

    async def scenario(loop: VirtualLoop) -> None:
        dog = Watchdog(2.0)
        beating = asyncio.ensure_future(dog.beat())
        await asyncio.sleep(10 * TICK_S + 0.01)
        assert dog._beats == 11
        beating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beating
        assert loop.timers() == []

    play(scenario)


def test_stopping_ends_the_thread() -> None:
    """At once, and nobody is found hung by the shutdown."""
    dog = Watchdog(2.0, lambda: pytest.fail("hung"))
    dog.start()
    assert dog._thread.daemon
    dog.stop()
    dog._thread.join(60)
    assert not dog._thread.is_alive()


def test_its_thread_finds_a_hung_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thread, with ticks of a millisecond: nobody beats, so it is called."""
    monkeypatch.setattr(watchdog, "TICK_S", 0.001)
    hung = threading.Event()
    dog = Watchdog(0.003, hung.set)
    dog.start()
    assert hung.wait(60)
    dog._thread.join(60)
    assert not dog._thread.is_alive()


def test_a_hung_process_tells_where_it_hangs_and_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All threads' tracebacks go to stderr, then it ends with a status of its own, whatever still runs."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with (tmp_path / "stderr").open("w+") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        watchdog._die()
        stderr.seek(0)
        assert "test_watchdog.py" in stderr.read()
    assert codes == [EXIT_CODE]
