"""JSON from and to bytes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any


def dumps(value: Any) -> bytes:
    """Write a value as compact JSON; dataclasses become objects."""
    return _ENCODER.encode(value).encode("utf-8", "surrogatepass")


def loads(text: bytes) -> Any:
    """Read a value. Raises ValueError for anything that is not JSON in UTF-8."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("too deeply nested") from error


def _plain(value: Any) -> Any:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, default=_plain)
