"""An overview as tables of short texts: which columns, how wide, and how a cell is written.

Names come from outside. Whatever could move a cursor, turn the direction of writing or change a colour is a question
mark here, and nothing is wider than its column.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size

__all__ = ["VIEWS", "Column", "Table", "View", "binding_lines", "fitted", "row_name", "sorted_rows", "status_line"]

Row = Mapping[str, Any]
Overview = Mapping[str, Any]
NONE = "-"
K, M = 1_000, 1_000_000
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
KINDS = {
    "total": "tokens/min", "input": "input tokens/min", "output": "output tokens/min", "requests": "requests/min",
    "kv": "KV cache",
}  # fmt: skip
"""What a counter of an upstream counts, where its key says it otherwise."""


@dataclass(frozen=True, slots=True)
class Column:
    """width: in cells; 0 takes what is left. left: written from the left, as words are."""

    title: str
    width: int
    cell: Callable[[Row], str]
    order: Callable[[Row], Any]
    left: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """rows: of an overview. name: what a row is called, for the cursor."""

    kind: str
    columns: tuple[Column, ...]
    rows: Callable[[Overview], Sequence[Row]]
    empty: str


@dataclass(frozen=True, slots=True)
class View:
    """What is shown at a time: one table or two."""

    key: str
    title: str
    tables: tuple[Table, ...]


def fitted(text: str, width: int, *, left: bool = True) -> str:
    """Exactly so many cells of a text, harmless in a terminal; what is too long ends in a dot less than it has."""
    tame = text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
    if cell_len(tame) > width:
        return set_cell_size(tame, max(0, width - 1)) + "~" if width else ""
    return set_cell_size(tame, width) if left else " " * (width - cell_len(tame)) + tame


def sorted_rows(table: Table, overview: Overview, by: int | None, *, backwards: bool = False) -> list[Row]:
    """As they come, or by a column; what has no value comes last."""
    rows = list(table.rows(overview))
    if by is None or by >= len(table.columns):
        return rows[::-1] if backwards else rows
    order = table.columns[by].order
    known = [row for row in rows if order(row) is not None]
    unknown = [row for row in rows if order(row) is None]
    return [*sorted(known, key=order, reverse=backwards), *unknown]


def row_name(table: Table, row: Row) -> str:
    """What a row is about, the same from one overview to the next."""
    match table.kind:
        case "sessions":
            return f"{row['tenant']}/{row['id']}"
        case "refusals":
            return str(row["reason"])
        case "requests":
            return str(row.get("ticket") or row["id"])
        case "notices":
            return str(row["text"])
        case _:
            return str(row["name"])


def status_line(overview: Overview) -> str:
    """The first line: how it stands, since when it runs, by which config, and how the process does."""
    process = overview.get("process") or {}
    parts = [
        f"Tidegate {overview['version']}",
        str(overview["status"]).upper(),
        f"up {span(overview['uptime_s'])}",
        f"config {overview['config']['version']}",
    ]
    if process.get("memory_bytes"):
        parts.append(f"{process['memory_bytes'] / M:.0f} MB")
    if process.get("loop_lag_s") is not None:
        parts.append(f"loop {process['loop_lag_s'] * 1000:.0f} ms late")
    parts.append(time.strftime("%H:%M:%S", time.localtime(overview["at"])))
    return "  ".join(parts)


def binding_lines(overview: Overview, most: int = 4) -> list[str]:
    """Errors, then what binds and what would help, then what else there is to know; the worst first."""
    errors = [f"! {notice['text']}" for notice in overview["notices"] if notice["level"] == "error"]
    binds = [f"> {one['text']}" + (f"  [{one['help']}]" if one["help"] else "") for one in overview["binding"]]
    warnings = [f"* {notice['text']}" for notice in overview["notices"] if notice["level"] == "warning"]
    lines = [*errors, *binds, *warnings]
    more = len(lines) - most
    return [*lines[: most - 1], f"  and {more + 1} more, see 6"] if more > 0 else lines


def span(seconds: float | None) -> str:
    """A time in at most five cells."""
    if seconds is None:
        return NONE
    if seconds < 10:  # noqa: PLR2004 - digits
        return f"{seconds:.1f}s"
    if seconds < 10 * MINUTE_S:
        return f"{seconds:.0f}s"
    if seconds < 10 * HOUR_S:
        return f"{seconds / MINUTE_S:.0f}m"
    return f"{seconds / HOUR_S:.0f}h" if seconds < 10 * DAY_S else f"{seconds / DAY_S:.0f}d"


def short(number: float | None, digits: int = 0) -> str:
    """A number in at most five cells or so."""
    if number is None:
        return NONE
    if abs(number) >= 10 * M:
        return f"{number / M:.0f}M"
    if abs(number) >= 10 * K:
        return f"{number / K:.0f}k"
    return f"{number:.{digits}f}" if abs(number) < K else f"{number:.0f}"


def _of(name: str) -> Callable[[Row], Any]:
    return lambda row: row.get(name)


def _text(title: str, width: int, name: str) -> Column:
    return Column(title, width, lambda row: str(row.get(name) or ""), lambda row: str(row.get(name) or ""), left=True)


def _number(title: str, width: int, name: str, digits: int = 0) -> Column:
    return Column(title, width, lambda row: short(row.get(name), digits), _of(name))


def _span(title: str, width: int, name: str) -> Column:
    return Column(title, width, lambda row: span(row.get(name)), _of(name))


def _clock(title: str, name: str) -> Column:
    return Column(title, 8, lambda row: time.strftime("%H:%M:%S", time.localtime(row[name])), _of(name))


def _lane_name(row: Row) -> str:
    return f"{row['name']}{' (paused)' if row['paused'] else ''}"


def _key(row: Row) -> str:
    """The counter that binds, in the page's words: `upstream/primary/*/total` is "primary: tokens/min"."""
    key = str(row["binding"] or "")
    place, _, rest = key.partition("/")
    name, _, kind = rest.partition("/")
    kind = kind.rpartition("/")[2]
    return f"{name}: {KINDS.get(kind, kind)}" if place == "upstream" and kind else key


def _state(row: Row) -> str:
    if row["out"]:
        return "OUT"
    state = str(row["state"]).replace("half_open", "trying")
    return (
        f"{state.upper()} {span(row['rests_s'])}" if row["rests_s"] else state if state == "closed" else state.upper()
    )


def _running(row: Row) -> str:
    return short(row["in_flight"]) + (f"/{short(row['slots_limit'])}" if row["slots_limit"] is not None else "")


def _fill(row: Row) -> float | None:
    """How full the emptiest bucket is."""
    fills = [max(0.0, one["level"] / one["capacity"]) for one in row["buckets"] if one["capacity"]]
    return min(fills) if fills else None


def _kv(row: Row) -> float | None:
    return None if row["kv"] is None else row["kv"]["fill"]


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


LANES = Table(
    "lanes",
    (
        Column("LANE", 8, _lane_name, _of("rank"), left=True),
        _number("WAIT", 5, "requests"),
        _number("TOKENS", 6, "tokens"),
        _span("OLDEST", 6, "oldest_s"),
        _span("NEW", 5, "predicted_s"),
        _span("P50", 5, "wait_p50_s"),
        _span("P95", 5, "wait_p95_s"),
        _number("IN/S", 5, "admitted_per_s", 1),
        _number("REF/S", 5, "refused_per_s", 1),
        Column("WAITS FOR", 0, _key, _key, left=True),
    ),
    lambda overview: overview["lanes"],
    "no lanes",
)
UPSTREAMS = Table(
    "upstreams",
    (
        _text("UPSTREAM", 0, "name"),
        Column("STATE", 10, _state, _state, left=True),
        Column("RUN", 7, _running, _of("in_flight")),
        Column("FREE", 5, lambda row: _share(_fill(row)), _fill),
        Column("CACHE", 5, lambda row: _share(_kv(row)), _kv),
        _number("REQ/S", 5, "requests_per_s", 1),
        _number("TOK/S", 5, "tokens_per_s"),
        _number("ERR/S", 5, "errors_per_s", 1),
        _number("429/S", 5, "paced_per_s", 1),
        _number("$/H", 5, "usd_per_hour", 2),
        _span("FIRST", 5, "first_token_p50_s"),
    ),
    lambda overview: overview["upstreams"],
    "no upstreams",
)
_USED = (
    _number("REQUESTS", 8, "requests"),
    _number("TOKENS", 7, "tokens"),
    _number("DOLLARS", 8, "usd", 2),
)
TENANTS = Table(
    "tenants",
    (_text("TENANT", 0, "name"), *_USED, _number("REFUSED", 7, "refused"), _number("WAITING", 7, "waiting")),
    lambda overview: overview["tenants"] or (),
    "no tenant was heard of",
)
SESSIONS = Table(
    "sessions",
    (_text("TENANT", 20, "tenant"), _text("SESSION", 0, "id"), *_USED),
    lambda overview: overview["sessions"] or (),
    "no session was heard of",
)
REFUSALS = Table(
    "refusals",
    (
        _text("REASON", 22, "reason"),
        _number("5 MIN", 6, "count_5m"),
        _clock("LAST", "last_at"),
        Column("REQUESTS", 0, lambda row: " ".join(row["ids"]), lambda row: len(row["ids"]), left=True),
    ),
    lambda overview: overview["refusals"],
    "nobody was refused",
)
REQUESTS = Table(
    "requests",
    (
        _clock("AT", "at"),
        _text("LANE", 5, "lane"),
        _text("TENANT", 12, "tenant"),
        _text("MODEL", 0, "model"),
        Column(
            "STATE",
            18,
            lambda row: str(row["reason"] or row["state"]),
            lambda row: row["reason"] or row["state"],
            left=True,
        ),
        _text("UPSTREAM", 10, "upstream"),
        _span("WAITED", 6, "waited_s"),
        _number("TOKENS", 6, "tokens"),
    ),
    lambda overview: overview["recent"] or (),
    "no request was heard of",
)
NOTICES = Table(
    "notices",
    (_text("LEVEL", 8, "level"), _text("WHAT", 0, "text"), _text("RUNBOOK", 24, "runbook")),
    lambda overview: [*overview["notices"], *map(_binding_notice, overview["binding"])],
    "nothing to tell",
)


def _binding_notice(one: Row) -> Row:
    return {"level": "binds", "text": f"{one['text']}: {one['help']}" if one["help"] else one["text"], "runbook": ""}


VIEWS: tuple[View, ...] = (
    View("1", "lanes", (LANES, UPSTREAMS)),
    View("2", "tenants", (TENANTS,)),
    View("3", "sessions", (SESSIONS,)),
    View("4", "refusals", (REFUSALS,)),
    View("5", "requests", (REQUESTS,)),
    View("6", "notices", (NOTICES,)),
)


def widths(columns: Iterable[Column], width: int) -> list[int]:
    """The cells of each column, one between two of them; who takes what is left gets eight at least."""
    taken = [column.width for column in columns]
    left = max(8, width - sum(taken) - len(taken) + 1)
    return [each or left for each in taken]
