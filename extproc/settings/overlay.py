"""Other values of single settings, laid over those of the file for a while.

A place is the path of a setting as it stands in the file: `lanes.P2.max_requests`, `tenants.chat.tpm`,
`upstreams.primary.limits.0.tpm`. What stands in a list of sections is named by its number, or as changes of the file
are told, by its model (`upstreams.primary.limits.gpt-5.tpm`); names that have dots in them are found all the same. A
number tells which one is meant now: what is to last goes by the model, which stays when others come or go (`by_name`).

Only what is a number can be changed so, and what a running Tidegate follows. All settings together have to make sense
with it, as if the file said it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from extproc.settings.changes import NAMED, follow
from extproc.settings.loading import SettingsError
from extproc.settings.whole import Settings

__all__ = ["Change", "by_name", "overlaid", "value_at"]

KNOWN_SHOWN = 20
"""So many names that there are instead are told."""

Key = str | int


@dataclass(frozen=True, slots=True)
class Change:
    """`value` instead of what the file says at `place`. id: tells it from others."""

    id: str
    place: str
    value: float


def overlaid(started: Settings, base: Settings, changes: Sequence[Change]) -> Settings:
    """`base` with these values over it, of which the last counts where several are of one place.

    started: the settings that the process began with, by which it is told what can be followed. SettingsError with the
    place where there is no such setting, where it is no number, where it cannot be followed, or where all of it makes
    no sense together.
    """
    if not changes:
        return base
    raw = base.model_dump(mode="json")
    for change in changes:
        *above, last = _found(raw, change.place)
        _at(raw, above)[last] = change.value
    try:
        settings = Settings.model_validate(raw)
    except ValidationError as error:
        told = (f"{_path(each['loc'])}: {str(each['msg']).removeprefix('Value error, ')}" for each in error.errors())
        raise SettingsError(list(told)) from None
    if problems := [*settings.problems()]:
        raise SettingsError(problems)
    for change in changes:
        value_at(settings, change.place)
    _, waiting = follow(started, settings)
    if waiting:
        raise SettingsError([f"{one.place}: {one.need}, so it cannot be changed for a while" for one in waiting])
    return settings


def by_name(settings: Settings, place: str) -> str:
    """The same place with names instead of numbers, where those lead there; SettingsError where there is none such."""
    raw = settings.model_dump(mode="json")
    path = _found(raw, place)
    section: Any = raw
    kind, names = "", list[str]()
    for key in path:
        section = section[key]
        names.append(_name(section[NAMED[kind]]) if isinstance(key, int) and kind in NAMED else str(key))
        kind = str(key)
    told = ".".join(names)
    return told if next(_paths(raw, told.split("."), ""), None) == path else place


def value_at(settings: Settings, place: str) -> float | None:
    """The number at a place, None where none is set. SettingsError where there is no such place, or it is no number."""
    raw = settings.model_dump(mode="json")
    told = _at(raw, _found(raw, place))
    if told is not None and (isinstance(told, bool) or not isinstance(told, (int, float))):
        raise SettingsError([f"{place}: is no number, and only numbers can be changed for a while"])
    return told


def _found(raw: dict[str, Any], place: str) -> list[Key]:
    """The keys that lead there."""
    names = place.split(".")
    path = next(_paths(raw, names, ""), None)
    if path is None:
        raise SettingsError([_unknown(raw, place, names)])
    return path


def _paths(section: Any, names: Sequence[str], kind: str) -> Iterator[list[Key]]:
    """All ways to read `names`, the longest name first. kind: how a list is called."""
    if not names:
        yield []
        return
    for length in range(len(names), 0, -1):
        name = ".".join(names[:length])
        for key, inside in _inside(section, name, kind):
            for rest in _paths(inside, names[length:], name):
                yield [key, *rest]


def _inside(section: Any, name: str, kind: str) -> Iterator[tuple[Key, Any]]:
    if isinstance(section, dict):
        if name in section:
            yield name, section[name]
    elif isinstance(section, list) and section and isinstance(section[0], dict):
        if name.isascii() and name.isdecimal() and int(name) < len(section):
            yield int(name), section[int(name)]
        for at, one in enumerate(section):
            if kind in NAMED and _name(one[NAMED[kind]]) == name:
                yield at, one


def _name(told: Any) -> str:
    return str(told[0] if isinstance(told, list) else told)


def _unknown(raw: dict[str, Any], place: str, names: Sequence[str]) -> str:
    """Where it goes wrong, and what there is."""
    for length in range(len(names) - 1, -1, -1):
        path = next(_paths(raw, names[:length], ""), None)
        if path is None:
            continue
        inside, where = _at(raw, path), ".".join(names[:length])
        if isinstance(inside, dict):
            known = ", ".join(map(str, _first(inside))) or "none"
        elif isinstance(inside, list):
            known = f"0 to {len(inside) - 1}" if inside else "none"
        else:
            return f"{place}: {where} is no section" if inside is not None else f"{place}: {where} is not set"
        return f"{place}: no such setting{f' in {where}' if where else ''}; there are {known}"
    return f"{place}: no such setting"


def _first(names: Iterable[str]) -> list[str]:
    found = list(names)
    return found if len(found) <= KNOWN_SHOWN else [*found[:KNOWN_SHOWN], "..."]


def _at(raw: Any, path: Sequence[Key]) -> Any:
    for key in path:
        raw = raw[key]
    return raw


def _path(place: Sequence[Key]) -> str:
    return ".".join(map(str, place))
