"""`tidegate top` as an application: what is shown, which keys there are, and what they do.

It asks the console for the overview once a second, in a thread, and draws what came; while no answer comes it keeps the
last one and says how old it is. Everything that comes from outside is drawn as plain text, never as markup. Nothing is
told by colour alone, so that it reads the same without any.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any, ClassVar

from rich.text import Text
from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer, Static

from extproc.console.asking import ConsoleError
from extproc.console.top.actions import Action, bypass, of_row
from extproc.console.top.dialogs import AskAction, AskId, Reading
from extproc.console.top.grid import Grid
from extproc.console.top.remote import Console
from extproc.console.top.tables import VIEWS, binding_lines, fitted, span, status_line

__all__ = ["Top"]

EVERY_S = 1.0
LOST_S = 3.0
"""So old a picture is told to be."""
HELP = """\
1-6, v      another view: lanes and upstreams, tenants, sessions, refusals, requests, notices
arrows      move; Tab: from the lanes to the upstreams and back
s, S        sort by the next column; turn the order round
Space       hold the picture still; again: go on
Enter, e    explain the request under the cursor (views 4 and 5)
/           explain a request by its id
p           pause or resume the lane under the cursor
t, r        trip, or reset, the breaker of the upstream under the cursor
o           take the upstream under the cursor out, or put it back
b           bypass: let everybody go at once, or end that
q           leave

WAIT, TOKENS  in line now                 OLDEST  how long the first has waited
NEW           what a newcomer would wait  P50, P95  waits that ended in the last five minutes
IN/S, REF/S   let go and refused          FREE    what is left of the emptiest limit
FIRST         median time to first tokens RUN     running, and how many may
"""


class Top(App[None]):
    """See the head of this file."""

    CSS = """
    Screen { layout: vertical; }
    #status { height: 1; text-style: bold reverse; }
    #lost { height: auto; text-style: bold; }
    #binding { height: auto; max-height: 35%; overflow: hidden; margin-bottom: 1; }
    DataTable { height: 1fr; background: $background; }
    #first.above { height: auto; max-height: 50%; margin-bottom: 1; }
    DataTable > .datatable--cursor { text-style: reverse; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(view.key, f"view('{view.key}')", view.title, show=False) for view in VIEWS),
        Binding("v", "next_view", "view"),
        Binding("space", "hold", "hold"),
        Binding("s", "sort", "sort"),
        Binding("S", "turn", "turn order", show=False),
        Binding("slash", "find", "find"),
        Binding("e", "explain", "explain", show=False),
        Binding("p", "act('pause')", "pause"),
        Binding("t", "act('trip')", "trip"),
        Binding("r", "act('reset')", "reset", show=False),
        Binding("o", "act('out')", "out"),
        Binding("b", "bypass", "bypass"),
        Binding("question_mark,h", "help", "help"),
        Binding("q", "quit", "leave"),
    ]
    ENABLE_COMMAND_PALETTE = False
    TITLE = "tidegate top"

    def __init__(
        self,
        console: Console,
        story: Callable[[Mapping[str, Any]], str],
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`story` tells in words what is known of a request."""
        super().__init__()
        self.console_of = console
        self.overview: dict[str, Any] | None = None
        self.lost = ""
        self.held = False
        self._story = story
        self._every_s = every_s
        self._clock = clock
        self._came_at = clock()
        self._view = VIEWS[0]

    def compose(self) -> ComposeResult:
        """One line of status, what binds, one table or two, and the keys."""
        yield Static(id="status")
        yield Static(id="lost")
        yield Static(id="binding")
        yield Grid("first")
        yield Grid("second")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Ask at once, and then every second."""
        self.draw()
        self.ask_console()
        self.set_interval(self._every_s, self.ask_console)

    def on_resize(self, _: events.Resize) -> None:
        """Columns are as wide as there is room."""
        self.draw()

    @work(exclusive=True, group="asking")
    async def ask_console(self) -> None:
        """Get the newest overview and draw it."""
        try:
            came = await asyncio.to_thread(self.console_of.overview)
        except ConsoleError as error:
            self.lost = str(error)
        else:
            self.lost, self._came_at = "", self._clock()
            if not self.held:
                self.overview = came
        self.draw()

    # What is drawn.

    def draw(self) -> None:
        """Draw what there is."""
        if not self.is_running or not self.query("#status"):
            return
        width = self.size.width
        self._say("#lost", self._missing())
        if self.overview is None:
            self._say("#status", fitted(f"Tidegate at {self.console_of.place}", width))
            return
        held = "HELD  " if self.held else ""
        self._say("#status", fitted(held + status_line(self.overview), width))
        self._say("#binding", "\n".join(fitted(line, max(width, len(line))).rstrip() for line in self._binding()))
        for place, table in zip_longest(("#first", "#second"), self._view.tables):
            grid = self.query_one(place, Grid)
            grid.tell(table, self.overview)
        self.query_one("#first").set_class(len(self._view.tables) > 1, "above")

    def _binding(self) -> list[str]:
        assert self.overview is not None  # noqa: S101 - nothing is drawn without one
        return binding_lines(self.overview) if self._view.key != "6" else []

    def _missing(self) -> str:
        if self.overview is None:
            return self.lost or "asking ..."
        age_s = self._clock() - self._came_at
        if self.lost and age_s >= LOST_S:
            return f"CONNECTION LOST: {self.lost}; this is how it was {span(age_s)} ago"
        return ""

    def _say(self, place: str, text: str) -> None:
        shown = self.query_one(place, Static)
        shown.display = bool(text)
        shown.update(Text(text))

    # What keys do.

    def action_view(self, key: str) -> None:
        """Show another view."""
        self._view = next(view for view in VIEWS if view.key == key)
        self.draw()
        self.query_one("#first", Grid).focus()

    def action_next_view(self) -> None:
        """Show the view behind this one."""
        self.action_view(VIEWS[(VIEWS.index(self._view) + 1) % len(VIEWS)].key)

    def action_hold(self) -> None:
        """Hold the picture still, or let it go on."""
        self.held = not self.held
        self.draw()

    def action_sort(self) -> None:
        """Sort the table in which the cursor is by its next column."""
        self._grid().sort_next()
        self.draw()

    def action_turn(self) -> None:
        """Turn its order round."""
        self._grid().turn()
        self.draw()

    def action_help(self) -> None:
        """Tell what keys and columns are."""
        self.push_screen(Reading(HELP))

    @work
    async def action_find(self) -> None:
        """Explain a request that is asked for by its id."""
        name = await self.push_screen_wait(AskId())
        if name:
            await self._explain(name)

    @work
    async def action_explain(self) -> None:
        """Explain the request under the cursor."""
        name = _request_of(self._grid())
        if name:
            await self._explain(name)

    def on_data_table_row_selected(self, _: Grid.RowSelected) -> None:
        """Enter on a row."""
        self.action_explain()

    @work
    async def action_act(self, what: str) -> None:
        """Do something to the row under the cursor, once it is confirmed."""
        grid = self._grid_for(what)
        row = grid.under
        action = of_row(grid.table.kind, what, row) if grid.table and row else None
        if action is not None:
            await self._do(action)

    @work
    async def action_bypass(self) -> None:
        """Let everybody go, or end that, once it is confirmed."""
        if self.overview is not None:
            await self._do(bypass(self.overview))

    async def _do(self, action: Action) -> None:
        if self.console_of.why_not:
            self.notify(self.console_of.why_not, severity="warning", markup=False)
            return
        body = await self.push_screen_wait(AskAction(action))
        if body is None:
            return
        sent = body or (None if action.method == "DELETE" else {})
        try:
            await asyncio.to_thread(self.console_of.act, action.method, action.path, sent)
        except ConsoleError as error:
            self.notify(f"not done: {error}", severity="error", markup=False)
        else:
            self.notify(f"done: {action.words}", markup=False)
        self.ask_console()

    async def _explain(self, name: str) -> None:
        try:
            known = await asyncio.to_thread(self.console_of.request, name)
        except ConsoleError as error:
            self.notify(str(error), severity="warning", markup=False)
        else:
            self.push_screen(Reading(self._story(known)))

    def _grid(self) -> Grid:
        """The table in which the cursor is."""
        return self.focused if isinstance(self.focused, Grid) else self.query_one("#first", Grid)

    def _grid_for(self, what: str) -> Grid:
        """The table that a key is about, wherever the cursor is: there is one of lanes and one of upstreams."""
        kind = "lanes" if what == "pause" else "upstreams"
        return next((grid for grid in self.query(Grid) if grid.table and grid.table.kind == kind), self._grid())


def _request_of(grid: Grid) -> str:
    """The request that a row is about, or its newest; empty for none."""
    row = grid.under
    match grid.table.kind if grid.table else "", row:
        case "requests", {"ticket": str(ticket)}:
            return ticket
        case "refusals", {"ids": [str(newest), *_]}:
            return newest
        case _:
            return ""
