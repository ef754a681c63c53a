"""Reading the file and the environment; every mistake becomes one line with its place."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterator, Mapping
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from extproc.settings.whole import Settings

__all__ = ["SettingsError", "load", "parse"]


class SettingsError(Exception):
    """The configuration cannot be used. `problems` has one line for each mistake."""

    def __init__(self, problems: list[str]) -> None:
        """Keep the problems; the message is all of them, a line each."""
        super().__init__("\n".join(problems))
        self.problems = problems


def load(path: Path | None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from `path` (the built-in demo when None) under the environment. SettingsError on any mistake."""
    if path is None:
        return parse(resources.files("extproc").joinpath("default.yaml").read_text("utf-8"), "default", environ)
    return parse(_text(path), str(path), environ, folder=path.absolute().parent)


def parse(text: str, source: str, environ: Mapping[str, str] | None = None, *, folder: Path | None = None) -> Settings:
    """Settings from YAML text; `source` names it in errors. SettingsError lists every mistake found.

    folder: where relative paths of files start; None leaves them as they are.
    """
    raw = _overridden(_read_yaml(text, source), environ or {})
    try:
        settings = Settings.model_validate(raw if folder is None else _anchored(raw, folder))
    except ValidationError as error:
        lines = [f"{source}: {_one_line(e)}{_meant(e, environ or {})}" for e in _causes(error.errors())]
        raise SettingsError(lines) from None
    if problems := list(settings.problems()):
        raise SettingsError([f"{source}: {problem}" for problem in problems])
    return settings


MOST_BYTES = 16 * 1024 * 1024
"""Of a file. Whatever is larger is no config, and would be read for minutes."""
MOST_VALUES = 1_000_000
"""Where what an alias names is counted each time: few lines can say more than any memory holds."""


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            read = file.read(MOST_BYTES + 1)
        if len(read) > MOST_BYTES:
            raise SettingsError([f"{path}: has more than {MOST_BYTES:,} bytes"])
        return read.decode("utf-8")
    except OSError as error:
        raise SettingsError([f"{path}: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise SettingsError([f"{path}: is not UTF-8 text"]) from None


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice; plain YAML would silently keep the last."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge what `<<` names, unless that is more than there may be in all."""
        super().flatten_mapping(node)
        if len(node.value) > MOST_VALUES:
            raise yaml.constructor.ConstructorError(None, None, TOO_MANY, node.start_mark)


TOO_MANY = f"aliases make more than {MOST_VALUES:,} values of it"


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} is written twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _read_yaml(text: str, source: str) -> dict[str, Any]:
    raw = _value_of(text, source)
    if not isinstance(raw, dict):
        raise SettingsError([f"{source}: must be a mapping with at least upstreams and routes"])
    return raw


def _value_of(text: str, source: str) -> Any:
    try:
        value = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError([f"{source}{line}: {error.problem}"]) from None
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise SettingsError([f"{source}: not YAML: {reason[:200]}"]) from None
    if _values(value, {}) > MOST_VALUES:
        raise SettingsError([f"{source}: {TOO_MANY}"])
    return value


def _values(value: Any, known: dict[int, float]) -> float:
    """How many values of sections it has, those of an alias each time; infinite for what holds itself.

    Lists are not copied, and found wrong where one stands that is not to.
    """
    if not isinstance(value, dict):
        return 1
    if id(value) not in known:
        known[id(value)] = inf
        known[id(value)] = 1 + sum(_values(each, known) for each in value.values())
    return known[id(value)]


def _overridden(raw: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    for key, path in _places(environ).items():
        section = raw
        for name in path[:-1]:
            written = _as_written(section, name)
            inner = section.get(written, {})
            if not isinstance(inner, dict):
                raise SettingsError([f"environment {key}: {name} is not a section"])
            section[written] = section = dict(inner)  # a copy, because YAML shares what an alias names
        section[_as_written(section, path[-1])] = _value_of(environ[key], f"environment {key}")
    return raw


def _places(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """What each variable sets, in lower case."""
    places = {key: key[10:].lower().split("__") for key in environ if key.startswith("TIDEGATE__")}
    if "TIDEGATE_PORT" in environ:
        places["TIDEGATE_PORT"] = ["gateway", "port"]
    return places


def _meant(error: Any, environ: Mapping[str, str]) -> str:
    """Which variables brought a mistake about, or made a section that lacks what it must have."""
    place = [str(part).lower() for part in error["loc"]]
    whole = len(place) - (error["type"] == "missing")
    keys = [key for key, path in _places(environ).items() if path[:whole] == place[:whole] and len(path) <= len(place)]
    return f" (the environment has {', '.join(keys)})" if keys else ""


FILES = frozenset(
    {"key_file", "cert_file", "ca_file", "client_cert_file", "client_key_file", "client_ca_file"}
    | {"jwks_file", "secrets_dir", "state_file", "headers_file", "token_file", "audit_file"}
)


def _anchored(raw: Any, folder: Path) -> Any:
    """The same values with every relative path of a file made absolute, from where the config file is."""
    if not isinstance(raw, dict):
        return raw
    return {
        key: str(folder / value) if key in FILES and isinstance(value, str) and value else _anchored(value, folder)
        for key, value in raw.items()
    }


def _as_written(section: Mapping[Any, Any], name: str) -> str:
    """Environment names have no case; `p0` means the `P0` that the file has."""
    return next((key for key in section if isinstance(key, str) and key.lower() == name), name)


def _causes(errors: list[Any]) -> Iterator[Any]:
    """Without those that only say that a list is too short because its items are wrong, or that a name is not "*"."""
    for error in errors:
        place = error["loc"]
        inside = any(len(each["loc"]) > len(place) and each["loc"][: len(place)] == place for each in errors)
        literal = any(str(part).startswith("literal[") for part in place)
        if not literal and (error["type"] != "too_short" or not inside):
            yield error


def _one_line(error: Any) -> str:
    place = ""
    for part in error["loc"]:
        if part not in ("[key]", "constrained-str"):
            place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = "unknown key"
    elif error["type"] == "missing":
        message = "is required"
    elif error["type"] == "model_type":
        message = "is not a section"
    joint = "." if error["type"] == "value_error" and re.match(r"^[a-z_]+: ", message) and place else ": "
    return " ".join(f"{place}{joint}{message}".split()) if place else message
