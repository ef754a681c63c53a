"""What every answer of the console is made of: plain data as JSON, and what is wrong in one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from starlette.responses import Response

__all__ = ["encoded", "problem", "shown"]


def shown(data: Any, status: int = 200) -> Response:
    """Plain data as JSON."""
    return Response(encoded(data), status, media_type="application/json")


def problem(status: int, why: str, headers: Mapping[str, str] | None = None) -> Response:
    """Why not, in words for who asked."""
    return Response(encoded({"error": why}), status, dict(headers or {}), "application/json")


def encoded(data: Any) -> bytes:
    """As JSON, which knows no infinity: that is null. What is no plain data is told as text."""
    try:
        return json.dumps(data, default=str, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(data), default=str, separators=(",", ":")).encode()


def _finite(data: Any) -> Any:
    match data:
        case dict():
            return {key: _finite(each) for key, each in data.items()}
        case list() | tuple():
            return [_finite(each) for each in data]
        case float() if not isfinite(data):
            return None
    return data
