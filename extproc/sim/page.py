"""The report of a simulation as one self-contained HTML page: nothing is fetched, so it can be mailed and kept.

Charts are drawn by Plotly, whose script comes with its Python package (`pip install tidegate[report]`) and is written
into the page beside our own (`page.js`, `page.css`). Series are thinned to as many points as a screen shows.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from statistics import fmean
from string import Template
from typing import Any

from extproc.sim.compare import Comparison
from extproc.sim.table import data

__all__ = ["PageError", "page", "plotly"]

POINTS = 300
PEAKS = frozenset({"kv", "known", "queued"})
"""Series of which the highest value counts."""


class PageError(Exception):
    """The page cannot be made; the message says what to install."""


def page(comparison: Comparison, title: str) -> str:
    """The whole page. PageError when Plotly is not there."""
    script = plotly()
    room = resources.files("extproc.sim")
    plain = data(comparison)
    plain["title"] = title
    plain["broken"] = comparison.broken
    for outcome in plain["outcomes"]:
        outcome["series"] = _thinned(outcome["series"])
    return Template(room.joinpath("page.html").read_text("utf-8")).substitute(
        title=_escaped(title),
        css=room.joinpath("page.css").read_text("utf-8"),
        plotly=script,
        data=json.dumps(plain, separators=(",", ":")).replace("<", "\\u003c"),
        js=room.joinpath("page.js").read_text("utf-8"),
    )


def plotly() -> str:
    """Plotly's script. PageError when it is not there."""
    try:
        found: str = importlib.import_module("plotly.offline").get_plotlyjs()
    except ImportError:
        raise PageError("the HTML report needs Plotly: pip install 'tidegate[report]'") from None
    return found


def _thinned(series: Mapping[str, Any]) -> dict[str, Any]:
    """The same in at most `POINTS` points."""
    step = max(1, -(-len(series["at_s"]) // POINTS))
    thin: dict[str, Any] = {"at_s": series["at_s"][::step]}
    for kind, rows in series.items():
        if isinstance(rows, Mapping):
            pick = max if kind in PEAKS else fmean
            thin[kind] = {name: _every(values, step, pick) for name, values in rows.items()}
    return thin


def _every(values: Sequence[float], step: int, pick: Any) -> list[float]:
    return [round(pick(values[start : start + step]), 3) for start in range(0, len(values), step)]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
