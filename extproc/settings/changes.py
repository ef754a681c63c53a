"""What two configurations differ in, setting by setting, and which of it a running Tidegate can follow.

    differences(old, new)     every change, and what it needs
    follow(started, new)      the settings that hold from now on, and what has to wait for a restart
    version_of(settings)      a short name of settings that is the same wherever they are the same

Most of the settings are Tidegate's own, and are followed at once (`Need.LIVE`). What is rendered into Envoy's config
holds there as it was rendered: until that is done again, Tidegate goes on with the old value, too, so that both keep
meaning the same. So there is nothing of which one half is new and the other old. A test renders each setting in turn
and compares, so the table here cannot lie.

A change that cannot be followed keeps back itself and nothing else, where the rest makes sense without it; where it
does not (a route to an upstream that is not there yet), nothing is followed at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from math import inf
from typing import Any

from pydantic import ValidationError

from extproc.core.orders import orders_of
from extproc.core.refusal import Reason
from extproc.core.request import Dialect
from extproc.settings.loading import SettingsError
from extproc.settings.whole import MARGIN_S, Settings

__all__ = ["ABSENT", "Difference", "Need", "differences", "follow", "version_of"]

VERSION_CHARS = 12
SHOWN_CHARS = 60
"""Longer values are cut where they are shown."""


class Need(StrEnum):
    """What it takes for a change to hold."""

    LIVE = "live"
    RESTART = "needs a restart"
    ENVOY = "needs Envoy's config rendered again"


class _Absent:
    """There is no such setting on this side."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that differs. path: its place in the file; a route is named by its first model."""

    path: Path
    old: Any
    new: Any
    need: Need

    @property
    def place(self) -> str:
        """The path as it is written for people."""
        return ".".join(self.path)

    def __str__(self) -> str:
        """As one line, without what it needs."""
        if self.old is ABSENT:
            return f"{self.place}: added"
        if self.new is ABSENT:
            return f"{self.place}: removed"
        if self.path[-1] == "key_sha256":  # what a key is made of does not belong into logs, not even as a digest
            return f"{self.place}: {len(self.old)} -> {len(self.new)}, other keys"
        return f"{self.place}: {_shown(self.old)} -> {_shown(self.new)}"


ORDER = "(order)"
"""Stands for the order of what is under a path."""
NAMED = {"routes": "models", "limits": "model"}
"""Lists of sections, and by which of their keys one is told from the others."""
IN_ENVOY = frozenset(
    {
        Reason.ADMISSION_UNAVAILABLE, Reason.UPSTREAM_FAILED, Reason.TENANT_QUOTA, Reason.TOO_LARGE, Reason.NOT_FOUND,
        Reason.DEADLINE_PASSED, Reason.FORBIDDEN, Reason.BAD_REQUEST,
    }
)  # fmt: skip
"""Refusals that Envoy words, too."""
NEEDS: dict[Path, Need] = {
    ("gateway", "drain_s"): Need.LIVE,  # whoever drains reads it then
    ("gateway", "workers"): Need.RESTART,  # of Envoy: it stands on its command line
    ("gateway", "*"): Need.ENVOY,
    ("service", "address"): Need.ENVOY,
    ("service", "addresses"): Need.ENVOY,
    ("service", "console"): Need.RESTART,
    **{("service", key): Need.RESTART for key in ("watchdog_s", "socket_mode", "socket_group", "health")},
    **{("service", "tls", key): Need.RESTART for key in ("cert_file", "key_file", "client_ca_file")},
    ("service", "tls"): Need.ENVOY,
    ("service", "tls", "*"): Need.ENVOY,
    ("identity", "jwt"): Need.ENVOY,
    ("identity", "jwt", "*"): Need.ENVOY,
    ("upstreams", "*"): Need.ENVOY,
    **{("upstreams", "*", key): Need.ENVOY for key in ("provider", "url", "key_file", "ca_file", "connect_timeout_s")},
    **{("upstreams", "*", key): Need.ENVOY for key in ("client_cert_file", "client_key_file", "hold_headers", "owned")},
    ("upstreams", "*", "fake"): Need.RESTART,
    ("upstreams", "*", "fake", "*"): Need.RESTART,
    ("flood", "*"): Need.ENVOY,
    ("timeouts", "stall_s"): Need.ENVOY,
    ("internal_headers",): Need.ENVOY,
    ("telemetry", "log", "*"): Need.LIVE,
    ("telemetry", "*"): Need.RESTART,
    ("telemetry", "otlp"): Need.RESTART,
    ("telemetry", "otlp", "*"): Need.RESTART,
    ("admin", "*"): Need.RESTART,
    **{("statuses", reason.value): Need.ENVOY for reason in IN_ENVOY},
}
"""What is not live, by path; "*" is any name. The first that fits counts. See `_need` for what depends on values."""
TRACED: frozenset[Path] = frozenset(
    {("telemetry", "trace_sample"), ("telemetry", "otlp")}
    | {("telemetry", "otlp", key) for key in ("endpoint", "headers_file", "traces")}
)
"""What Envoy knows, too, where it sends traces."""


def differences(old: Settings, new: Settings) -> list[Difference]:
    """Every setting that differs, in the order of the file."""
    found = _walk((), _plain(old), _plain(new))
    return [Difference(path, was, will, _need(path, was, will, old, new)) for path, was, will in found]


def follow(started: Settings, new: Settings) -> tuple[Settings, list[Difference]]:
    """The settings that hold when a process that began with `started` is given `new`, and what of `new` has to wait.

    SettingsError when what is left of `new` makes no sense without that.
    """
    waiting = [one for one in differences(started, new) if one.need is not Need.LIVE]
    if not waiting:
        return new, []
    raw = deepcopy(_plain(new))
    for one in waiting:
        _put(raw, one.path, one.old)
    try:
        settings = Settings.model_validate(_as_file(raw))
        problems = list(settings.problems())
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    if problems:
        named = [f"{one.place}: {one.need}" for one in waiting]
        raise SettingsError(
            [*(f"{line} (as long as it runs with what it was started with)" for line in problems), *named]
        )
    return settings, waiting


def version_of(settings: Settings) -> str:
    """A short hash of every value in force. Only of lanes the order counts, and of lists."""
    told = json.dumps([_plain(settings), list(settings.lanes)], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:VERSION_CHARS]


def _need(path: Path, was: Any, will: Any, old: Settings, new: Settings) -> Need:
    if _is_envoys(path, was, will, old, new) or (path in TRACED and (_traces(old) or _traces(new))):
        return Need.ENVOY
    return next((need for pattern, need in NEEDS.items() if _fits(path, pattern)), Need.LIVE)


def _is_envoys(path: Path, was: Any, will: Any, old: Settings, new: Settings) -> bool:
    """Whether Envoy has to know of it, where that depends on the values."""
    match path:
        case ("lanes", *_):
            return _outlasts_envoy(path, old, new)
        case ("routes", name, *rest):
            stands_in = _stands_in(old) is not _stands_in(new) and _has_last_resort(path, was, will)
            return stands_in or (rest in ([], ["chain"]) and _needs_orders(name, old, new))
        case ("identity", "tenant" | "session_headers"):
            return _inbound(old) != _inbound(new)
        case ("upstreams", name, "dialects"):
            return _speaks_anthropic(old, name) is not _speaks_anthropic(new, name)
        case ("upstreams", name, "window"):
            return _wider(old, new, name)
        case _:
            speaks = path == ("admin", "cert_file") and (was is None) is not (will is None)  # TLS, or does no more
            return (speaks or path == ("service", "console")) and old.gateway.metrics_port is not None


def _fits(path: Path, pattern: Path) -> bool:
    return len(path) == len(pattern) and all(map(fnmatchcase, path, pattern))


def _outlasts_envoy(path: Path, old: Settings, new: Settings) -> bool:
    """Whether a lane would hold requests for longer than Envoy was told to let them be."""
    lane = new.lanes.get(path[1])
    if lane is None or (len(path) > 2 and path[2] != "max_wait_s"):  # noqa: PLR2004 - lanes, its name, the key
        return False
    return lane.max_wait_s + MARGIN_S > min(old.max_message_timeout_s, old.gateway.idle_timeout_s)


def _stands_in(settings: Settings) -> bool:
    return any(route.last_resort for route in settings.routes)


def _has_last_resort(path: Path, was: Any, will: Any) -> bool:
    """Whether the change of a route gives or takes a text of last resort."""
    if path[-1] == "last_resort":
        return True
    return any(isinstance(side, dict) and side.get("last_resort") is not None for side in (was, will))


def _needs_orders(name: str, old: Settings, new: Settings) -> bool:
    """Whether a route may name an order of upstreams that Envoy would have to know beforehand, and does not."""
    if old.gateway.profile != "classic":
        return False
    chains = [route.chain for route in new.routes if route.models[0] == name]
    return not {*orders_of(chains)} <= {*orders_of(route.chain for route in old.routes)}


def _inbound(settings: Settings) -> set[str]:
    """The headers of ours that callers may send: Envoy takes away all others."""
    named = [source.partition(":")[2] for source in settings.identity.tenant if source.startswith("header:")]
    return {name for name in (*named, *settings.identity.session_headers) if name.startswith("x-tidegate-")}


def _speaks_anthropic(settings: Settings, name: str) -> bool:
    upstream = settings.upstreams.get(name)
    return upstream is not None and Dialect.ANTHROPIC in upstream.rules(name).dialects


def _wider(old: Settings, new: Settings, name: str) -> bool:
    """Whether it changes who may take what is too long for whom: Envoy knows that."""
    others = [other for other in old.upstreams if other != name and other in new.upstreams]
    before, after = (
        [_rank(settings.upstreams[name].window, settings.upstreams[other].window) for other in others]
        for settings in (old, new)
    )
    return before != after


def _traces(settings: Settings) -> bool:
    """Whether Envoy sends traces, too."""
    return settings.telemetry.otlp is not None and settings.telemetry.otlp.traces


def _rank(own: int | None, other: int | None) -> tuple[bool, bool]:
    """Whether either may take what is too long for the other; where a window is not known, it may."""
    mine, its = inf if own is None else own, inf if other is None else other
    return mine > its or mine == inf, its > mine or its == inf


def _plain(settings: Settings) -> dict[str, Any]:
    """All values as plain data; lists of sections by name, and the order of the latter where it counts."""
    raw = settings.model_dump(mode="json")
    return {key: _named(key, each) for key, each in raw.items()}


def _named(key: str, each: Any) -> Any:
    if isinstance(each, dict):
        return {name: _named(name, one) for name, one in each.items()}
    if key in NAMED and isinstance(each, list):
        return {_name(one[NAMED[key]]): {name: _named(name, part) for name, part in one.items()} for one in each}
    return each


def _name(told: Any) -> str:
    return str(told[0] if isinstance(told, list) else told)


def _as_file(raw: dict[str, Any]) -> dict[str, Any]:
    """The other way round."""
    upstreams = {name: {**one, "limits": list(one["limits"].values())} for name, one in raw["upstreams"].items()}
    return {**raw, "routes": list(raw["routes"].values()), "upstreams": upstreams}


def _walk(path: Path, old: Any, new: Any) -> Iterator[tuple[Path, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            was, will = old.get(key, ABSENT), new.get(key, ABSENT)
            if was != will or (*path, key) in ORDERED:
                yield from _walk((*path, key), was, will)
        if path in ORDERED:
            yield from _moved(path, list(old), list(new))
    elif old != new:
        yield path, old, new


ORDERED = frozenset({("lanes",), ("routes",)})


def _moved(path: Path, old: list[str], new: list[str]) -> Iterator[tuple[Path, Any, Any]]:
    kept = [name for name in old if name in new]
    if kept != [name for name in new if name in old]:
        yield (*path, ORDER), old, new


def _put(raw: dict[str, Any], path: Path, old: Any) -> None:
    """Take one value back."""
    *above, last = path
    section = raw
    for key in above:
        section = section[key]
    if old is ABSENT:
        del section[last]
    else:
        section[last] = old


def _shown(told: Any) -> str:
    text = json.dumps(told, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
