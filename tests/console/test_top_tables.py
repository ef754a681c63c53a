"""What the terminal view writes into its tables, and `tidegate top --once`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from extproc.console.top.actions import body_of, bypass, of_row
from extproc.console.top.plain import page
from extproc.console.top.tables import (
    LANES,
    REQUESTS,
    UPSTREAMS,
    VIEWS,
    binding_lines,
    fitted,
    row_name,
    short,
    sorted_rows,
    span,
    status_line,
    widths,
)

OVERVIEWS = Path(__file__).parent / "overviews"
HOSTILE = "\x1b[2J<b>[red]x[/red]\u202egnp\r\n\u0007表表"


def recorded(name: str) -> dict[str, Any]:
    return dict(json.loads((OVERVIEWS / f"{name}.json").read_text()))


def texts(node: Any) -> Any:
    """The same with every name that comes from outside made hostile."""
    if isinstance(node, dict):
        names = {"tenant", "model", "id", "ticket", "text", "help"}
        return {
            key: HOSTILE * 3 if key in names and isinstance(value, str) else texts(value) for key, value in node.items()
        }
    return [texts(one) for one in node] if isinstance(node, list) else node


@pytest.mark.parametrize("name", ["calm", "overload", "outage"])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_page_fits_its_width(name: str, width: int) -> None:
    """Tables are as wide as they may be; every lane and upstream is there, and the state in a word."""
    overview = recorded(name)
    text = page(overview, width)
    lines = text.splitlines()
    assert str(overview["status"]).upper() in lines[0]
    tables = lines[lines.index("") :]
    if width >= 80:
        assert max(map(cell_len, tables)) <= width
    for row in (*overview["lanes"], *overview["upstreams"]):
        assert any(line.startswith(row["name"]) for line in tables)
    for one in overview["binding"]:
        assert one["text"] in text
    assert all(line.isprintable() for line in lines)


def test_long_tables_are_cut_and_counted() -> None:
    """Lanes and upstreams are all there, of anything else the first ten."""
    overview = recorded("calm")
    many = {"upstreams": [{**overview["upstreams"][0], "name": f"u{i}"} for i in range(30)]}
    tenants = [{"name": f"t{i}", "requests": 1, "tokens": 1, "usd": 0.1, "refused": 0, "waiting": 0} for i in range(50)]
    text = page(overview | many | {"tenants": tenants}, 100)
    assert "\nu29 " in text
    assert "\nt9 " in text
    assert "\nt10 " not in text
    assert "\nand 40 more\n" in text


@pytest.mark.parametrize("name", ["calm", "overload", "outage"])
def test_hostile_names_do_no_harm(name: str) -> None:
    """No controls, no change of direction, and no line that is wider for it."""
    lines = page(texts(recorded(name)), 100).splitlines()
    assert all(line.isprintable() for line in lines)
    assert max(cell_len(line) for line in lines[lines.index("") :]) <= 100


@pytest.mark.parametrize("width", range(12))
def test_a_text_takes_its_cells(width: int) -> None:
    """Whatever is in it: letters of two cells, too, are never cut in half."""
    for text in ("", "a", "表表表表表表表", HOSTILE, "abcdefghijklmnop"):
        for left in (True, False):
            assert cell_len(fitted(text, width, left=left)) == width
            assert fitted(text, width, left=left).isprintable()


def test_numbers_and_times_are_short() -> None:
    """At most five cells, or six with a sign."""
    assert [span(s) for s in (None, 0.0, 9.94, 10.0, 599.0, 600.0, 7200.0, 86_400.0, 9e6)] == [
        "-", "0.0s", "9.9s", "10s", "599s", "10m", "120m", "24h", "104d",
    ]  # fmt: skip
    assert [short(n) for n in (None, 0, 999, 9999, 10_000, 1_234_567, 98_765_432)] == [
        "-", "0", "999", "9999", "10k", "1235k", "99M",
    ]  # fmt: skip
    assert short(0.123, 1) == "0.1"


def test_rows_are_sorted_and_what_is_unknown_comes_last() -> None:
    """By any column, both ways."""
    overview = recorded("overload")
    assert [row["name"] for row in sorted_rows(LANES, overview, None)] == ["P0", "P1", "P2"]
    for number in range(len(UPSTREAMS.columns)):
        for backwards in (False, True):
            rows = sorted_rows(UPSTREAMS, overview, number, backwards=backwards)
            assert len(rows) == 3
            assert UPSTREAMS.columns[number].order(rows[0]) is not None or all(
                UPSTREAMS.columns[number].order(row) is None for row in rows
            )
    by_name = sorted_rows(UPSTREAMS, overview, 0, backwards=True)
    assert [row["name"] for row in by_name] == ["primary", "local", "backup"]
    usd = sorted_rows(UPSTREAMS, overview, 9)
    assert usd[-1]["name"] == "local", "which has no price"


def test_every_row_has_a_name() -> None:
    """By which the cursor finds it again."""
    overview = recorded("overload") | {"tenants": [{"name": "t"}], "sessions": [{"tenant": "t", "id": "s"}]}
    for view in VIEWS:
        for table in view.tables:
            rows = table.rows(overview)
            assert rows
            assert len({row_name(table, row) for row in rows}) == len(rows)


def test_what_there_is_no_room_for_is_counted() -> None:
    """Errors before what binds, before warnings."""
    notices = [{"level": level, "text": level * 2} for level in ("warning", "error", "info")]
    binding = [{"text": f"b{i}", "help": "h" if i else ""} for i in range(4)]
    told = {"notices": notices, "binding": binding}
    assert binding_lines(told, 4) == ["! errorerror", "> b0", "> b1  [h]", "  and 3 more, see 6"]
    assert len(binding_lines(told, 6)) == 6
    assert binding_lines({"notices": [], "binding": []}) == []


def test_the_state_of_lanes_and_upstreams_in_a_cell() -> None:
    """Paused, taken out, resting, full."""
    overview = recorded("outage")
    lane, upstream = overview["lanes"][0] | {"paused": True}, overview["upstreams"][0]
    assert LANES.columns[0].cell(lane) == "P0 (paused)"
    state = UPSTREAMS.columns[1].cell
    assert state(upstream | {"out": True}) == "OUT"
    assert state(upstream | {"state": "open", "rests_s": 4.0}) == "OPEN 4.0s"
    assert state(upstream | {"state": "half_open", "rests_s": None}) == "TRYING"
    assert state(upstream | {"state": "closed", "rests_s": None}) == "closed"
    running = UPSTREAMS.columns[2].cell
    assert running(upstream | {"in_flight": 3, "slots_limit": None}) == "3"
    assert running(upstream | {"in_flight": 3, "slots_limit": 4}) == "3/4"
    free = UPSTREAMS.columns[3].cell
    buckets = [{"level": -5.0, "capacity": 10.0}, {"level": 5.0, "capacity": 10.0}]
    assert free(upstream | {"buckets": buckets}) == "0%"
    assert free(upstream | {"buckets": []}) == "-"
    assert UPSTREAMS.columns[4].cell(upstream | {"kv": {"fill": 0.835}}) == "84%"


def test_the_process_in_the_first_line() -> None:
    """Where it is known."""
    line = status_line(recorded("calm") | {"process": {"memory_bytes": 123_456_789, "loop_lag_s": 0.012}})
    assert "123 MB" in line
    assert "loop 12 ms late" in line
    assert "MB" not in status_line(recorded("calm") | {"process": None})


def test_columns_take_the_room_there_is() -> None:
    """One cell between two, and whoever is wide gets the rest, or eight."""
    assert sum(widths(REQUESTS.columns, 100)) + len(REQUESTS.columns) - 1 == 100
    assert min(widths(REQUESTS.columns, 20)) == 5
    assert widths(REQUESTS.columns, 20)[3] == 8


@pytest.mark.parametrize(
    ("kind", "what", "row", "path"),
    [
        ("lanes", "pause", {"name": "P1", "paused": False}, "lanes/P1/pause"),
        ("lanes", "pause", {"name": "P1", "paused": True}, "lanes/P1/resume"),
        ("upstreams", "trip", {"name": "a/b"}, "upstreams/a%2Fb/trip"),
        ("upstreams", "reset", {"name": "a"}, "upstreams/a/reset"),
        ("upstreams", "out", {"name": "a", "out": None}, "upstreams/a/out"),
        ("upstreams", "out", {"name": "a", "out": True}, "upstreams/a/in"),
    ],
)
def test_what_keys_ask_for(kind: str, what: str, row: dict[str, Any], path: str) -> None:
    """A path of the admin API."""
    action = of_row(kind, what, row)
    assert action is not None
    assert (action.method, action.path) == ("POST", path)


def test_keys_do_nothing_elsewhere() -> None:
    """A tenant cannot be tripped."""
    assert of_row("tenants", "trip", {"name": "t"}) is None
    assert of_row("lanes", "trip", {"name": "P0"}) is None


def test_bypass_begins_and_ends() -> None:
    """By what holds now."""
    assert bypass({"levers": None}).method == "POST"
    assert bypass({"levers": {"bypass": {"until": None}}}).method == "DELETE"


def test_what_is_sent_along() -> None:
    """A time where it may be for a while, and why."""
    pause, trip = of_row("lanes", "pause", {"name": "P1", "paused": False}), of_row("upstreams", "trip", {"name": "a"})
    assert pause is not None
    assert trip is not None
    assert body_of(pause, " 60 ", " too much ") == {"reason": "too much", "for_s": 60.0}
    assert body_of(pause, "", "") == {}
    assert body_of(trip, "60", "") == {}
    assert body_of(bypass({"levers": {"bypass": {}}}), "", "") is None
    for wrong in ("x", "-1", "0", "nan", "inf", "1e99"):
        with pytest.raises(ValueError, match="seconds"):
            body_of(pause, wrong, "")


def test_nobody_else_loads_a_terminal() -> None:
    """It takes a while; other commands, and scripts that want plain text, do without."""
    code = "import sys, extproc.cli, extproc.console.top.plain; sys.exit('textual' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("upstream/primary/*/total", "primary: tokens/min"),
        ("upstream/primary/a/b/requests", "primary: requests/min"),
        ("upstream/local/slots", "local: slots"),
        ("upstream/local/kv", "local: KV cache"),
        ("lane/P2/paused", "lane/P2/paused"),
        (None, ""),
    ],
)
def test_what_a_lane_waits_for_is_said_as_on_the_page(key: str | None, told: str) -> None:
    """What is no counter of an upstream stays as it is."""
    [column] = [column for column in LANES.columns if column.title == "WAITS FOR"]
    assert column.cell({"binding": key}) == told
