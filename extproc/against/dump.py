"""What a running Envoy says it runs: `/server_info` and `/config_dump` of its admin interface, as plain data.

Whether a listener, route table or cluster stood in Envoy's file or came from a control plane makes no difference here.
What extension discovery delivers stands where it is used. Types that nobody here knows are passed over.

    running = read("http://127.0.0.1:9901")     AdminError when that is no admin interface, or cannot be read

Deliberately not here: deltas and history; a dump is one moment, and Envoy may be changing while it is made.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from extproc.render.existing import dig
from extproc.render.shape import Data

__all__ = ["AdminError", "Manager", "Running", "managers", "read", "understand"]

_LARGEST = 256 * 1024 * 1024
"""Bytes of a dump. Two hundred routes and fifty upstreams take some eight million."""
_TIMEOUT_S = 30.0
_VERSION = re.compile(r"/(\d+)\.(\d+)\.(\d+)")
_MANAGER = ".HttpConnectionManager"
_WRAPPED = ".TypedStruct"


class AdminError(Exception):
    """No admin interface of an Envoy answers there, or what it says cannot be understood."""


@dataclass(frozen=True, slots=True)
class Running:
    """What Envoy has, by name. refused: what it was sent and did not take, with its reason."""

    version: tuple[int, int, int] | None
    listeners: list[Data]
    clusters: dict[str, Data]
    routes: dict[str, Data]
    endpoints: dict[str, list[Data]]
    secrets: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    refused: tuple[str, ...] = ()
    from_control_plane: frozenset[str] = frozenset()
    """Names of listeners that came by LDS."""
    admin: Any = None
    """The address of the admin interface."""


@dataclass(frozen=True, slots=True)
class Manager:
    """An HTTP connection manager, where it stands, and its route tables."""

    place: str
    listener: Data
    config: Data
    tables: list[Data] = field(default_factory=list)
    awaited: str | None = None
    """Name of a route table that did not arrive."""


def read(url: str) -> Running:
    """Ask the admin interface at `url`. AdminError."""
    info = _get(url, "/server_info")
    if not isinstance(version := info.get("version"), str):
        raise AdminError(f"{url}: answers, but /server_info tells no version: not the admin interface of an Envoy")
    dump = _get(url, "/config_dump?include_eds")
    try:
        return understand(version, dump)
    except AdminError as error:
        raise AdminError(f"{url}/config_dump: {error}") from None


def understand(version: str, dump: Data) -> Running:
    """What a dump says. AdminError when it is none."""
    configs = dump.get("configs")
    if not isinstance(configs, list) or not any(_kind(one).endswith("ConfigDump") for one in configs):
        raise AdminError("no configs in it: not a config dump of Envoy")
    parts: dict[str, Data] = {}
    for one in map(_plain, configs):
        if isinstance(one, dict):
            parts.setdefault(_kind(one), one)
    filters = {str(dig(one, "name")): one for one in _each(parts, "EcdsConfigDump", "ecds_filters", "ecds_filter")}
    known = _VERSION.search(version)
    dynamic = _dynamic_listeners(parts)
    secrets = parts.get("SecretsConfigDump", {})
    return Running(
        version=(int(known[1]), int(known[2]), int(known[3])) if known else None,
        listeners=[
            _with_delivered(one, filters)
            for one in [*_each(parts, "ListenersConfigDump", "static_listeners", "listener"), *dynamic]
        ],
        clusters={
            str(dig(one, "name")): one
            for key in ("static_clusters", "dynamic_active_clusters")
            for one in _each(parts, "ClustersConfigDump", key, "cluster")
        },
        routes={
            str(dig(one, "name")): one
            for key in ("static_route_configs", "dynamic_route_configs")
            for one in _each(parts, "RoutesConfigDump", key, "route_config")
        },
        endpoints={
            str(dig(one, "cluster_name")): _endpoints(one)
            for key in ("static_endpoint_configs", "dynamic_endpoint_configs")
            for one in _each(parts, "EndpointsConfigDump", key, "endpoint_config")
        },
        secrets=frozenset(_named(secrets, "static_secrets", "dynamic_active_secrets")),
        waiting=frozenset(_named(secrets, "dynamic_warming_secrets")),
        refused=tuple(_refused(parts)),
        from_control_plane=frozenset(str(dig(one, "name")) for one in dynamic),
        admin=dig(parts.get("BootstrapConfigDump"), "bootstrap", "admin", "address"),
    )


def managers(running: Running) -> Iterator[Manager]:
    """Every HTTP connection manager of every listener."""
    for listener in running.listeners:
        chains = [(f"filter_chains[{i}]", one) for i, one in enumerate(_list(listener, "filter_chains"))]
        chains += [("default_filter_chain", one) for one in [listener.get("default_filter_chain")] if one]
        for where, chain in chains:
            for item in _list(chain, "filters"):
                config = dig(item, "typed_config")
                if isinstance(config, dict) and _kind(config).endswith(_MANAGER[1:]):
                    yield _manager(running, listener, f"listener {dig(listener, 'name')}, {where}", config)


def _manager(running: Running, listener: Data, place: str, config: Data) -> Manager:
    if isinstance(table := config.get("route_config"), dict):
        return Manager(place, listener, config, [table])
    if "rds" in config:
        name = str(dig(config, "rds", "route_config_name"))
        there = running.routes.get(name)
        return Manager(place, listener, config, [there] if there else [], None if there else name)
    return Manager(place, listener, config, list(running.routes.values()))  # scoped: any of them may be meant


# --------------------------------------------------------------------------------------------- reading


def _get(url: str, path: str) -> Data:
    try:
        known = urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
    except ValueError:
        known = False
    if not known:
        raise AdminError(f"{url!r} is no URL of an admin interface; it has to be like http://127.0.0.1:9901")
    try:
        with urllib.request.urlopen(url.rstrip("/") + path, timeout=_TIMEOUT_S) as response:  # noqa: S310 - checked
            body = response.read(_LARGEST + 1)
    except urllib.error.HTTPError as error:
        raise AdminError(f"{url}{path}: {error.code} {error.reason}: not the admin interface of an Envoy") from None
    except (OSError, HTTPException, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise AdminError(f"{url}: nobody answers as the admin interface of an Envoy would: {why}") from None
    if len(body) > _LARGEST:
        raise AdminError(f"{url}{path}: more than {_LARGEST // 1024**2} MB; that is too much to read")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        start = body[:40].decode("utf-8", "replace").strip()
        raise AdminError(f"{url}{path}: not JSON ({error}); it begins with {start!r}") from None
    if not isinstance(found, dict):
        raise AdminError(f"{url}{path}: not what an Envoy says: {body[:40].decode('utf-8', 'replace')!r}")
    return found


def _plain(value: Any) -> Any:
    """Messages that were sent as a struct and a type, as if they had been sent as that type."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    if _kind(value).endswith(_WRAPPED[1:]) and isinstance(value.get("value", {}), dict):
        return _plain({"@type": str(value.get("type_url", "")), **value.get("value", {})})
    return {key: _plain(one) for key, one in value.items()}


def _kind(value: Any) -> str:
    return str(dig(value, "@type") or "").rsplit(".", 1)[-1]


def _list(container: Any, key: str) -> list[Any]:
    found = dig(container, key)
    return found if isinstance(found, list) else []


def _each(parts: dict[str, Data], part: str, key: str, inner: str) -> Iterator[Data]:
    for one in _list(parts.get(part), key):
        found = dig(one, inner)
        if isinstance(found, dict):
            yield found


def _named(secrets: Data, *keys: str) -> Iterator[str]:
    return (str(dig(one, "name")) for key in keys for one in _list(secrets, key))


def _dynamic_listeners(parts: dict[str, Data]) -> list[Data]:
    states = [dig(one, "active_state", "listener") for one in _dynamic(parts)]
    return [one for one in states if isinstance(one, dict)]


def _dynamic(parts: dict[str, Data]) -> list[Any]:
    return _list(parts.get("ListenersConfigDump"), "dynamic_listeners")


def _refused(parts: dict[str, Data]) -> Iterator[str]:
    lists = [("listener", one) for one in _dynamic(parts)]
    for part, key, what in (
        ("ClustersConfigDump", "dynamic_active_clusters", "cluster"),
        ("ClustersConfigDump", "dynamic_warming_clusters", "cluster"),
        ("RoutesConfigDump", "dynamic_route_configs", "route table"),
    ):
        lists += [(what, one) for one in _list(parts.get(part), key)]
    for what, one in lists:
        if details := dig(one, "error_state", "details"):
            inner = dig(one, "name") or dig(one, "cluster", "name") or dig(one, "route_config", "name")
            yield f"{what} {inner}: {str(details).strip()}"


def _endpoints(assignment: Data) -> list[Data]:
    return [
        endpoint
        for place in _list(assignment, "endpoints")
        for one in _list(place, "lb_endpoints")
        if isinstance(endpoint := dig(one, "endpoint"), dict)
    ]


def _with_delivered(value: Any, filters: dict[str, Data]) -> Any:
    """Filters that were only named, as they were delivered."""
    if isinstance(value, list):
        return [_with_delivered(one, filters) for one in value]
    if not isinstance(value, dict):
        return value
    if "config_discovery" in value and (found := filters.get(str(value.get("name")))):
        rest = {key: one for key, one in value.items() if key != "config_discovery"}
        return {**rest, "typed_config": dig(found, "typed_config")}
    return {key: _with_delivered(one, filters) for key, one in value.items()}
