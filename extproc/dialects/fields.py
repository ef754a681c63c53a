"""Members of a request that every family has, read with their type checked.

Absent and null are the same, as both SDKs treat them. A detail names the member and never repeats its value, because it
is shown to the caller and written to logs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from extproc.core.refusal import Reason, Rejected

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["flag", "integer", "is_name", "listed", "mapping", "model", "name"]

MAX_NAME = 256
MAX_ID = 1_024


def model(values: Mapping[str, Any]) -> str:
    """Return the model's name, which ends up in metrics and headers and so has to be plain text."""
    value = values.get("model")
    if value is None:
        raise Rejected(Reason.BAD_REQUEST, "model is missing")
    if not is_name(value):
        raise Rejected(Reason.BAD_REQUEST, f"model must be a printable string of 1 to {MAX_NAME} characters")
    return str(value)


def is_name(value: object) -> bool:
    """Tell whether a value is a short printable string; control characters and lone surrogates are not printable."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def flag(values: Mapping[str, Any], key: str) -> bool:
    """Return a boolean member, False where it is absent."""
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise Rejected(Reason.BAD_REQUEST, f"{key} must be a boolean")
    return bool(value)


def integer(values: Mapping[str, Any], key: str, least: int, most: int) -> int | None:
    """Return a whole number in its range, None where it is absent. A boolean or 1.0 is no whole number."""
    value = values.get(key)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        raise Rejected(Reason.BAD_REQUEST, f"{key} must be a whole number from {least} to {most}")
    return value


def listed(values: Mapping[str, Any], key: str, most: int) -> list[Any]:
    """Return a list that must be there and hold something."""
    value = values.get(key)
    if value is None:
        raise Rejected(Reason.BAD_REQUEST, f"{key} is missing")
    if not isinstance(value, list):
        raise Rejected(Reason.BAD_REQUEST, f"{key} must be a list")
    if not 0 < len(value) <= most:
        raise Rejected(Reason.BAD_REQUEST, f"{key} must hold from 1 to {most} items")
    return value


def mapping(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object member, empty where it is absent."""
    value = values.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Rejected(Reason.BAD_REQUEST, f"{key} must be an object")
    return value


def name(values: Mapping[str, Any], key: str) -> str | None:
    """Return an id of state kept at the provider, None where it is absent."""
    value = values.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID or not value.isprintable():
        raise Rejected(Reason.BAD_REQUEST, f"{key} must be a printable string of 1 to {MAX_ID} characters")
    return value
