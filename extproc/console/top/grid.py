"""One table on the screen: it keeps its cursor on the same row while rows come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text
from textual.widgets import DataTable

from extproc.console.top.tables import Row, Table, fitted, row_name, sorted_rows, widths

__all__ = ["Grid"]

GAP = 1
"""Cells between two columns."""


class Grid(DataTable[Text]):
    """Shows a `Table` of an overview."""

    def __init__(self, place: str) -> None:
        """Nothing is shown yet. place: its id."""
        super().__init__(id=place, cursor_type="row", cell_padding=0)
        self.table: Table | None = None
        self.sorting: dict[str, tuple[int | None, bool]] = {}
        """By table: the number of the column that it is sorted by, and whether backwards."""
        self._rows: list[Row] = []

    @property
    def under(self) -> Row | None:
        """The row under the cursor."""
        return self._rows[self.cursor_row] if 0 <= self.cursor_row < len(self._rows) else None

    def tell(self, table: Table | None, overview: Mapping[str, Any]) -> None:
        """Show this table of an overview; None for nothing."""
        self.display = table is not None
        before = self._name_under() if table is self.table else None
        self.table = table
        if table is None:
            self._rows = []
            return
        at, top = self.cursor_row, self.scroll_y
        by, backwards = self.sorting.get(table.kind, (None, False))
        self._rows = sorted_rows(table, overview, by, backwards=backwards)
        self.clear(columns=True)
        if self._rows:
            self._write(table, by, backwards=backwards)
        else:
            self.add_column(Text(table.empty))
        names = [row_name(table, row) for row in self._rows]
        self.move_cursor(row=names.index(before) if before in names else max(0, min(at, len(names) - 1)))
        self.scroll_to(y=top, animate=False)

    def sort_next(self) -> None:
        """By the next column; after the last, as rows come."""
        if self.table is not None:
            by, _ = self.sorting.get(self.table.kind, (None, False))
            following = 0 if by is None else by + 1
            self.sorting[self.table.kind] = (following if following < len(self.table.columns) else None, False)

    def turn(self) -> None:
        """The other way round."""
        if self.table is not None:
            by, backwards = self.sorting.get(self.table.kind, (None, False))
            self.sorting[self.table.kind] = (by, not backwards)

    def _write(self, table: Table, by: int | None, *, backwards: bool) -> None:
        cells = list(zip(table.columns, widths(table.columns, self.app.size.width - GAP), strict=True))
        for number, (column, width) in enumerate(cells):
            sign = ("^" if backwards else "v") if number == by else ""
            title = column.title[: width - len(sign)] + sign
            self.add_column(Text(fitted(title, width, left=column.left)), width=width + GAP)
        for row in self._rows:
            self.add_row(*(Text(fitted(column.cell(row), width, left=column.left)) for column, width in cells))

    def _name_under(self) -> str | None:
        row = self.under
        return None if row is None or self.table is None else row_name(self.table, row)
