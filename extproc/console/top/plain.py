"""The overview as plain lines, for scripts and for who has no terminal: `tidegate top --once`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from extproc.console.top.tables import VIEWS, Table, binding_lines, fitted, sorted_rows, status_line, widths

__all__ = ["page"]

LEAST_WIDTH = 60
MOST_BINDING = 12
MOST_ROWS = 10
"""Of tables that may have any number of rows."""


def page(overview: Mapping[str, Any], width: int = 100) -> str:
    """All tables that have rows, one below the other, in lines of at most `width` cells. No colours, no controls."""
    width = max(LEAST_WIDTH, width)
    lines = [status_line(overview), *binding_lines(overview, MOST_BINDING)]
    told = [fitted(line, max(width, len(line))).rstrip() for line in lines]
    for view in VIEWS[:-1]:
        for table in view.tables:
            told += _table(table, overview, width)
    return "\n".join(told) + "\n"


def _table(table: Table, overview: Mapping[str, Any], width: int) -> Iterator[str]:
    rows = sorted_rows(table, overview, None)
    if not rows:
        return
    cells = widths(table.columns, width)
    yield ""
    yield " ".join(
        fitted(column.title, each, left=column.left) for column, each in zip(table.columns, cells, strict=True)
    ).rstrip()
    most = len(rows) if table.kind in ("lanes", "upstreams") else MOST_ROWS
    for row in rows[:most]:
        yield " ".join(
            fitted(column.cell(row), each, left=column.left) for column, each in zip(table.columns, cells, strict=True)
        ).rstrip()
    if len(rows) > most:
        yield f"and {len(rows) - most} more"
