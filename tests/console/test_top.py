"""The terminal view: what it shows and what its keys do, against a console that keeps what it was asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from textual.pilot import Pilot

from extproc.console.asking import ConsoleError
from extproc.console.top.screen import Top
from tests.console.test_top_tables import recorded, texts

SIZE = (80, 24)


class FakeConsole:
    """Tells a recorded overview, and keeps what it was asked to do."""

    place = "127.0.0.1:10004"

    def __init__(self, overview: dict[str, Any]) -> None:
        self.told = overview
        self.why_not = ""
        self.error = ""
        self.acts: list[tuple[str, str, Any]] = []
        self.asked: list[str] = []
        self.looks = 0

    def overview(self) -> dict[str, Any]:
        self.looks += 1
        if self.error:
            raise ConsoleError(self.error)
        return self.told

    def request(self, name: str) -> dict[str, Any]:
        self.asked.append(name)
        if name == "unknown":
            raise ConsoleError("no such request is known")
        return {"id": name}

    def act(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        if self.error:
            raise ConsoleError(self.error)
        self.acts.append((method, path, body))
        return {}


async def settled(app: Top) -> bool:
    """All that stands on the screen has heard what it was told. False where the app has failed.

    The pilot's own wait hangs when something is taken off the screen meanwhile, as a word that was shown long enough.
    """
    hearing = [(each, asyncio.Event()) for each in (app, *app.screen.walk_children(with_self=True))]
    asked = [(each, heard) for each, heard in hearing if each.call_later(heard.set)]
    while any(each.is_running and each.is_attached and not heard.is_set() for each, heard in asked):
        if app._exception_event.is_set():
            return False
        await asyncio.sleep(0.005)
    return True


class Watched:
    """A running view, and what stands on its screen."""

    def __init__(self, console: FakeConsole, app: Top, pilot: Pilot[None], clock: list[float]) -> None:
        self.console, self.app, self.pilot, self.clock = console, app, pilot, clock

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.pilot.press(key)
            await self.pilot.pause()

    async def look(self) -> None:
        """Ask the console once, and draw."""
        await self.app.ask_console().wait()
        await self.pilot.pause()

    async def until(self, true: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not true():
            assert time.monotonic() < until, self.text
            await self.pilot.pause(0.02)

    @property
    def lines(self) -> list[str]:
        strips = self.app.screen._compositor.render_strips()
        return ["".join(segment.text for segment in strip).rstrip() for strip in strips]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@asynccontextmanager
async def watching(
    overview: dict[str, Any] | str = "overload", *, error: str = "", size: tuple[int, int] = SIZE
) -> AsyncIterator[Watched]:
    """The view on a terminal of this size. It asks by itself at the start alone."""
    console = FakeConsole(recorded(overview) if isinstance(overview, str) else overview)
    console.error = error
    clock = [100.0]
    app = Top(console, lambda known: f"the story of {known['id']}", every_s=3600.0, clock=lambda: clock[0])
    async with app.run_test(size=size, notifications=True) as pilot:
        pilot._wait_for_screen = partial(settled, app)
        watched = Watched(console, app, pilot, clock)
        await watched.until(lambda: console.looks > 0 and "asking ..." not in watched.text)
        yield watched


async def test_one_screen_tells_who_waits_and_for_what() -> None:
    """On eighty columns: the state, what binds, and every lane and upstream."""
    async with watching() as seen:
        overview = seen.console.told
        assert "SHEDDING" in seen.lines[0]
        assert f"> {overview['binding'][0]['text']}" in " ".join(seen.text.split())
        starts = [line.split()[0] for line in seen.lines if line]
        for row in (*overview["lanes"], *overview["upstreams"]):
            assert row["name"] in starts
        assert max(map(len, seen.lines)) <= 80
        await seen.until(lambda: "q leave" in seen.text)


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (200, 60)])
@pytest.mark.parametrize("name", ["calm", "overload", "outage"])
async def test_every_view_on_every_size(name: str, size: tuple[int, int]) -> None:
    """None of them breaks, and each shows what it is about."""
    async with watching(name, size=size) as seen:
        for key, title in {"2": "TENANT", "3": "SESSION", "4": "REASON", "5": "MODEL", "6": "LEVEL"}.items():
            await seen.press(key)
            table = seen.app.query_one("#first").table
            assert table.kind in ("tenants", "sessions", "refusals", "requests", "notices")
            if table.rows(seen.console.told) and size[0] >= 80:
                assert title in seen.text
            elif size[0] >= 80:
                assert table.empty in seen.text
        await seen.press("v")
        assert "LANE" in seen.text


async def test_hostile_names_are_plain_text() -> None:
    """Markup stays letters, and controls never reach the terminal."""
    async with watching(texts(recorded("overload"))) as seen:
        await seen.press("5")
        assert "[red]x" in seen.text
        assert all(line.isprintable() for line in seen.lines)
        await seen.press("6")
        assert all(line.isprintable() for line in seen.lines)


async def test_a_lost_connection_is_told_with_its_age() -> None:
    """The last picture stays, and goes on when the console is back."""
    async with watching() as seen:
        seen.console.error = "no Tidegate answers"
        seen.clock[0] += 12
        await seen.look()
        assert "CONNECTION LOST: no Tidegate answers; this is how it was 12s ago" in " ".join(seen.text.split())
        assert "P0" in seen.text
        seen.console.error = ""
        await seen.look()
        assert "LOST" not in seen.text


async def test_no_connection_at_the_start() -> None:
    """Why not, in words; and the picture comes as soon as there is one."""
    async with watching(error="no Tidegate answers at 127.0.0.1:10004: refused") as seen:
        assert "no Tidegate answers at 127.0.0.1:10004: refused" in seen.text
        await seen.press("p", "t", "b", "s", "S", "e", "space", "space")
        assert seen.console.acts == []
        seen.console.error = ""
        await seen.look()
        assert "SHEDDING" in seen.lines[0]


async def test_the_picture_can_be_held() -> None:
    """It stands still until it is let go on."""
    async with watching() as seen:
        await seen.press("space")
        seen.console.told = recorded("calm")
        await seen.look()
        assert "HELD" in seen.lines[0]
        assert "SHEDDING" in seen.lines[0]
        await seen.press("space")
        await seen.look()
        assert " OK " in seen.lines[0]


async def test_tables_are_sorted_by_keys() -> None:
    """The next column, and the other way round; the cursor stays on its row."""
    async with watching() as seen:
        await seen.press("tab")
        grid = seen.app.focused
        assert grid is not None
        assert grid.id == "second"
        await seen.press("down")
        under = grid.under["name"]
        await seen.press("s")
        names = [line.split()[0] for line in seen.lines if line.startswith(("primary", "backup", "local"))]
        assert names == sorted(names)
        assert grid.under["name"] == under
        await seen.press("S")
        names = [line.split()[0] for line in seen.lines if line.startswith(("primary", "backup", "local"))]
        assert names == sorted(names, reverse=True)
        assert "UPSTREAM^" in seen.text
        assert grid.under["name"] == under
        for _ in range(20):
            await seen.press("s")


async def test_requests_are_explained() -> None:
    """The one under the cursor, the newest of a refusal, or one that is asked for by its id."""
    async with watching() as seen:
        newest = seen.console.told["recent"][0]["ticket"]
        await seen.press("5", "enter")
        await seen.until(lambda: f"the story of {newest}"[:60] in seen.text)
        await seen.press("escape", "4", "e")
        refused = seen.console.told["refusals"][0]["ids"][0]
        await seen.until(lambda: f"the story of {refused}" in seen.text)
        await seen.press("escape", "1", "slash", *"abc", "enter")
        await seen.until(lambda: "the story of abc" in seen.text)
        await seen.press("escape", "slash", *"unknown", "enter")
        await seen.until(lambda: "no such request is known" in seen.text)
        await seen.press("slash", "escape", "1", "e")
        assert seen.console.asked == [newest, refused, "abc", "unknown"]


async def test_a_lane_is_paused_once_it_is_confirmed() -> None:
    """With a time and a reason; Escape does nothing."""
    async with watching() as seen:
        await seen.press("down", "p")
        await seen.until(lambda: "Really pause lane P1?" in seen.text)
        await seen.press("escape")
        await seen.until(lambda: "Really" not in seen.text)
        assert seen.console.acts == []
        await seen.press("p")
        await seen.until(lambda: "Really pause lane P1?" in seen.text)
        await seen.press(*"6x", "enter")
        await seen.until(lambda: "'6x' is no number of seconds" in seen.text)
        await seen.press("backspace", "0", "tab", *"jam", "enter")
        await seen.until(lambda: bool(seen.console.acts))
        assert seen.console.acts == [("POST", "lanes/P1/pause", {"for_s": 60.0, "reason": "jam"})]
        await seen.until(lambda: "done: pause lane P1" in seen.text)


async def test_upstreams_are_acted_on() -> None:
    """Trip, reset, take out, wherever the cursor of the lanes is."""
    async with watching() as seen:
        for key, question in (
            ("t", "trip the breaker of primary"),
            ("r", "reset the breaker"),
            ("o", "take primary out"),
        ):
            await seen.press(key)
            await seen.until(lambda question=question: f"Really {question}" in seen.text)
            await seen.press("enter")
            await seen.until(lambda: "Really" not in seen.text)
        await seen.until(lambda: len(seen.console.acts) == 3)
        assert [path for _, path, _ in seen.console.acts] == [
            "upstreams/primary/trip", "upstreams/primary/reset", "upstreams/primary/out",
        ]  # fmt: skip


async def test_bypass_is_asked_for_loudly() -> None:
    """And ended by the same key."""
    overview = recorded("overload")
    async with watching(overview) as seen:
        await seen.press("b")
        await seen.until(lambda: "Really let EVERYBODY go at once" in seen.text)
        await seen.press("enter")
        await seen.until(lambda: bool(seen.console.acts))
        seen.console.told = overview | {"levers": {"bypass": {"until": None}}}
        await seen.look()
        await seen.press("b")
        await seen.until(lambda: "Really end the bypass" in seen.text)
        await seen.press("enter")
        await seen.until(lambda: len(seen.console.acts) == 2)
        assert seen.console.acts == [("POST", "bypass", {}), ("DELETE", "bypass", None)]


async def test_without_a_token_nothing_is_asked() -> None:
    """It is said why, at once."""
    async with watching() as seen:
        seen.console.why_not = "nothing can be done without a token: give --token-file"
        await seen.press("p")
        await seen.until(lambda: "nothing can be done without a token" in " ".join(seen.text.split()))
        assert "Really" not in seen.text


async def test_what_the_console_refuses_is_told() -> None:
    """In its words."""
    async with watching() as seen:
        await seen.press("t")
        await seen.until(lambda: "Really" in seen.text)
        seen.console.error = "no such upstream"
        await seen.press("enter")
        await seen.until(lambda: "not done: no such upstream" in " ".join(seen.text.split()))
        assert seen.console.acts == []


async def test_keys_that_mean_nothing_here() -> None:
    """A tenant cannot be tripped, and a lane is not explained."""
    async with watching() as seen:
        await seen.press("e", "2", "p", "t", "o", "e")
        assert seen.console.acts == []
        assert "Really" not in seen.text


async def test_help() -> None:
    """Every key is told."""
    async with watching(size=(100, 40)) as seen:
        await seen.press("question_mark")
        await seen.until(lambda: "explain a request by its id" in seen.text)
        await seen.press("escape")
        await seen.until(lambda: "explain a request" not in seen.text)


async def test_no_colour_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR leaves shades of grey at most."""
    monkeypatch.setenv("NO_COLOR", "1")
    async with watching("outage") as seen:
        strips = seen.app.screen._compositor.render_strips()
        assert seen.app.no_color
        assert "OUTAGE" in seen.lines[0]
        assert strips
