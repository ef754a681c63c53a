"""Two configurations as plain data, compared by what they mean to Envoy.

Envoy's dump is its own protobuf message as JSON. It leaves out plain fields that have their default, writes durations
with three digits or none, large numbers as text, and of a secret only that it is one. None of that is a difference.
A field that is there though nothing was asked for is one: Envoy never adds a field of its own accord.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Difference", "differences", "same", "short"]

_DURATION = re.compile(r"-?\d+(\.\d+)?s")
_REDACTED = frozenset({"[redacted]", "W3JlZGFjdGVkXQ=="})
_DEFAULTS: tuple[Any, ...] = ("AUTO", "STATIC", "NONE", "DEFAULT", "ROUND_ROBIN", "HUNDRED", False, 0, "", [], None)
"""Values of plain fields that a message leaves out: zeros, and the first names of the enumerations in use."""
_NEVER_LEFT_OUT = frozenset({"num_retries", "match_if_key_not_found", "always_consume_default_token_bucket"})
"""Fields whose zero says something else than their absence."""
_HARMLESS = frozenset({"@type", "stat_prefix", "alt_stat_name", "metadata", "decorator", "is_optional"})
"""What a control plane may add, which changes only what things are called."""
_UNTOLD = frozenset({"typed_config", "typed_extension_protocol_options", "load_assignment"})
"""Steps of a path that tell nobody anything."""
_LONGEST = 90


@dataclass(frozen=True, slots=True)
class Difference:
    """path: steps to a field. expected and found: its values, None for no such field."""

    path: tuple[str, ...]
    expected: Any
    found: Any

    @property
    def field(self) -> str:
        """The path as people read it."""
        told = [step for step in self.path if step not in _UNTOLD and not step.endswith("HttpProtocolOptions")]
        return ".".join(told).replace(".[", "[")


def same(expected: Any, found: Any) -> bool:
    """Whether there is no difference."""
    return bool(expected == found) or next(differences(expected, found), None) is None


def differences(expected: Any, found: Any, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Each place where `found` is not what `expected` means."""
    if isinstance(expected, dict) and isinstance(found, dict):
        yield from _fields(expected, found, path)
    elif isinstance(expected, list) and isinstance(found, list):
        yield from _items(expected, found, path)
    elif not _equal(expected, found):
        yield Difference(path, expected, found)


def short(value: Any) -> str:
    """A value on a part of a line."""
    if value is None:
        return "nothing"
    if isinstance(value, bool | dict | list):
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, str) and value.count("\n") > 1:
        mark = hashlib.sha256(value.encode()).hexdigest()[:6]
        return f"a text of {value.count(chr(10))} lines ({mark})"
    else:
        text = str(value).strip()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def _fields(expected: dict[str, Any], found: dict[str, Any], path: tuple[str, ...]) -> Iterator[Difference]:
    if (kind := expected.get("@type")) and kind != found.get("@type"):
        yield Difference((*path, "@type"), kind, found.get("@type"))
        return
    for key, wanted in expected.items():
        if key in found:
            yield from differences(wanted, found[key], (*path, key))
        elif key in _NEVER_LEFT_OUT or not _is_default(wanted):
            yield Difference((*path, key), wanted, None)
    for key, there in found.items():
        if key not in expected and key not in _HARMLESS and there != {}:
            yield Difference((*path, key), None, there)


def _items(expected: list[Any], found: list[Any], path: tuple[str, ...]) -> Iterator[Difference]:
    names, there = _names(expected), _names(found)
    if names and (there or not found):
        yield from _named(dict(zip(names, expected, strict=True)), dict(zip(there, found, strict=True)), path)
        return
    if len(expected) == len(found) and all(map(same, expected, found)):
        return
    missing = [one for one in expected if not any(same(one, other) for other in found)]
    more = [one for one in found if not any(same(other, one) for other in expected)]
    if len(missing) == len(more) == 1 and len(expected) == len(found):
        yield from differences(missing[0], more[0], (*path, f"[{expected.index(missing[0])}]"))
    elif missing or more or len(expected) != len(found):
        yield Difference(path, missing or None, more or None)
    else:
        yield Difference(path, expected, found)


def _named(expected: dict[str, Any], found: dict[str, Any], path: tuple[str, ...]) -> Iterator[Difference]:
    for name, item in expected.items():
        if name in found:
            yield from differences(item, found[name], (*path, f"[{name}]"))
        else:
            yield Difference((*path, f"[{name}]"), item, None)
    for name, item in found.items():
        if name not in expected:
            yield Difference((*path, f"[{name}]"), None, item)
    common = [name for name in expected if name in found]
    if common != (order := [name for name in found if name in expected]):
        yield Difference(path, common, order)


def _names(items: list[Any]) -> list[str]:
    """A name for each, or nothing where some have none, or the same."""
    names = [str(one["name"]) for one in items if isinstance(one, dict) and "name" in one]
    return names if len(set(names)) == len(items) else []


def _is_default(value: Any) -> bool:
    return any(value is one or (type(value) is type(one) and value == one) for one in _DEFAULTS)


def _equal(expected: Any, found: Any) -> bool:
    if expected == found or (isinstance(found, str) and found in _REDACTED):
        return True
    one, other = _number(expected), _number(found)
    return one is not None and one == other


def _number(value: Any) -> tuple[str, float] | None:
    """What a number, a number as text, or a duration is worth."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    text = str(value)
    unit = "s" if _DURATION.fullmatch(text) else ""
    try:
        return unit, float(text.removesuffix(unit))
    except ValueError:
        return None
