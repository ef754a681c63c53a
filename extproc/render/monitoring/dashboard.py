"""The Grafana dashboard: the panels in rows, from left to right, with whom they are about to choose at the top.

It imports into any Grafana from 9 on: where the numbers are is a variable, not a name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count

from extproc.render.monitoring.panels import ROWS, Panel, Row
from extproc.render.shape import Data
from extproc.settings import Settings

__all__ = ["dashboard", "dashboard_json"]

UID = "tidegate"
SCHEMA = 39
WIDTH = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(settings: Settings) -> Data:
    """The dashboard in Grafana's JSON model."""
    first = next(iter(settings.lanes))
    return {
        "uid": UID,
        "title": "Tidegate",
        "description": f"Who waits, for what, why requests were refused, which limit binds. First lane: {first}.",
        "tags": ["tidegate", "llm"],
        "editable": True,
        "schemaVersion": SCHEMA,
        "version": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "graphTooltip": 1,
        "annotations": {"list": [_restarts(), _moves()]},
        "templating": {"list": [_datasource(), _variable("job"), _variable("instance", 'job=~"$job"')]},
        "links": [],
        "panels": list(_placed()),
    }


def dashboard_json(settings: Settings) -> str:
    """As a file to import."""
    return json.dumps(dashboard(settings), indent=1, ensure_ascii=False) + "\n"


def _placed() -> Iterator[Data]:
    ids, y = count(1), 0
    for row in ROWS:
        yield {
            "id": next(ids), "type": "row", "title": row.title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
        }  # fmt: skip
        y += 1
        for panel, x, top in _grid(row, y):
            yield _panel(panel, next(ids), {"x": x, "y": top, "w": panel.width, "h": panel.height})
            y = max(y, top + panel.height)


def _grid(row: Row, y: int) -> Iterator[tuple[Panel, int, int]]:
    """From left to right, in lines that are as high as their highest."""
    x = height = 0
    for panel in row.panels:
        if x + panel.width > WIDTH:
            x, y, height = 0, y + height, 0
        yield panel, x, y
        x, height = x + panel.width, max(height, panel.height)


def _panel(panel: Panel, number: int, place: Data) -> Data:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        **({"description": panel.help} if panel.help else {}),
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [
            {
                "refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": query.expr, "legendFormat": query.name,
                "range": panel.kind != "stat", "instant": panel.kind == "stat",
            }
            for i, query in enumerate(panel.queries)
        ],
    }  # fmt: skip


_OPTIONS: dict[str, Data] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value", "graphMode": "none", "justifyMode": "auto", "textMode": "value",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "state-timeline": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False},
        "mergeValues": True, "showValue": "auto", "rowHeight": 0.8,
    },
}  # fmt: skip


def _defaults(panel: Panel) -> Data:
    steps = [{"color": colour, "value": value} for value, colour in panel.steps or ((None, "green"),)]
    words = {str(value): {"text": text, "color": colour} for value, text, colour in panel.words}
    custom: Data = {"fillOpacity": 30 if panel.stacked else 5, "lineWidth": 1, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    if panel.top is not None:
        custom |= {"axisSoftMin": 0, "axisSoftMax": panel.top}
    return {
        "unit": panel.unit,
        "thresholds": {"mode": "absolute", "steps": steps},
        "mappings": [{"type": "value", "options": words}] if words else [],
        **({"custom": custom} if panel.kind == "timeseries" else {}),
    }


def _datasource() -> Data:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0}


def _variable(name: str, among: str = "") -> Data:
    asked = f"label_values(tidegate_in_flight{{{among}}}, {name})"
    return {
        "name": name, "type": "query", "datasource": _SOURCE, "query": {"query": asked, "refId": name},
        "definition": asked, "includeAll": True, "multi": True, "allValue": ".*", "refresh": 2, "sort": 1, "hide": 0,
        "current": {"text": ["All"], "value": ["$__all"]},
    }  # fmt: skip


def _restarts() -> Data:
    return _annotation("Restarts", "purple", 'changes(process_start_time_seconds{job=~"$job"}[1m]) > 0', "{{instance}}")


def _moves() -> Data:
    expr = 'increase(tidegate_breaker_moves_total{job=~"$job"}[1m]) > 0'
    return _annotation("Breakers", "red", expr, "{{upstream}} {{state}} {{sign}}")


def _annotation(name: str, colour: str, expr: str, title: str) -> Data:
    return {
        "name": name, "enable": True, "hide": False, "iconColor": colour, "datasource": _SOURCE,
        "expr": expr, "titleFormat": title, "step": "60s",
    }  # fmt: skip
