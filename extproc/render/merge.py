"""Tidegate's parts put into an Envoy configuration that is there already.

    merged = merge(load(text, "envoy.yaml"), settings)      dump(merged.config, HEADER), and notes for whoever runs it

What is there stays, in its order: own filters, routes, logs, clusters. The parts go where they have to:

- Filters right before the router. So whatever authenticates (jwt_authn, ext_authz, rbac, ...) is asked first, what
  limits rates counts first, and on the way back our filters read an answer before a compressor changes it.
- Routes before the first route of the virtual host that takes every request for an LLM path; those for other paths that
  stand before it go on standing before it.
- Mappers of local replies before those that are there, logs behind them.

Merging begins with taking out what an earlier merge put in. So it can be repeated, also with changed settings, and the
same input gives the same text.

RenderError where a configuration cannot be merged into; it says what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from extproc.render.envoy import RenderError
from extproc.render.existing import Kept, KeptList, dig
from extproc.render.names import SERVICE_CLUSTER
from extproc.render.parts import FLUSH, OURS, OWNER, Parts, parts
from extproc.render.shape import Data
from extproc.render.surroundings import about_manager, about_routes, first_to_take, named
from extproc.render.tracing import is_ours
from extproc.settings import Settings

__all__ = ["HEADER", "Merged", "merge"]

HEADER = """\
# Merged by `tidegate merge`: an Envoy configuration and the parts of Tidegate, whose names begin with "tidegate".
# Change the original and the settings of Tidegate, and merge again; merging into this file works, too.
# Comments of the original are not here, and its anchors are written out.
"""

_MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = "envoy.extensions.filters.http.router.v3.Router"
_ENDS_ONLY: Data = {"log_type_filter": {"types": ["DownstreamPeriodic"], "exclude": True}}
"""Keeps a log at one line for each request, as it was before running answers were reported."""
_ANYWHERE = frozenset({"0.0.0.0", "::", "127.0.0.1", "::1", "localhost"})
_BY_HAND = "put in what `tidegate render --part all` prints where it is made"


_NODE = (
    "warning: node: has no id and cluster, without which Envoy follows no keys (gateway.secrets_dir); add "
    "node: {id: ..., cluster: ...}, or start Envoy with --service-node and --service-cluster"
)


@dataclass(frozen=True, slots=True)
class Merged:
    """The whole configuration, and what whoever merged should know."""

    config: Kept
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Manager:
    """An HTTP connection manager and where it stands."""

    place: str
    config: Data


@dataclass(frozen=True, slots=True)
class _Target:
    """A virtual host to put routes into, and the manager it belongs to."""

    manager: _Manager
    place: str
    host: Data


def merge(existing: Kept, settings: Settings, listener: str | None = None, virtual_host: str | None = None) -> Merged:
    """Put the parts for `settings` into `existing`, which is changed. Names choose where there is a choice."""
    static = _static(existing)
    emptied = list(_take_out(static))
    targets, notes = _targets(existing, static, listener, virtual_host)
    ours = parts(settings)
    if clashes := [*_same_names(static, ours), *_same_ports(existing, static, settings)]:
        raise RenderError("\n".join(clashes))
    for manager in {id(target.manager): target.manager for target in targets}.values():
        notes += _fill_manager(manager, ours)
        notes += about_manager(manager.place, manager.config, settings)
    for target in targets:
        notes += _fill_host(target, ours, settings)
    for key in ("clusters", "secrets", "listeners"):
        if added := getattr(ours, key):
            static[key] = _list(static, key, "static_resources") + added
    if settings.gateway.secrets_dir and not (dig(existing, "node", "id") and dig(existing, "node", "cluster")):
        notes.append(_NODE)
    for container, key in emptied:
        if not container.get(key):
            container.pop(key, None)
    return Merged(existing, tuple(notes))


# ---------------------------------------------------------------------------------------------- finding


def _static(existing: Data) -> Data:
    if camel := next(_in_camel_case(existing), None):
        raise RenderError(
            f"{camel}: Envoy reads lowerCamelCase, too, but only snake_case can be merged into; write it so everywhere"
        )
    static = existing.get("static_resources")
    if not isinstance(static, dict):
        raise RenderError(_without_static(existing))
    return static


_CAMEL = frozenset({
    "staticResources", "dynamicResources", "filterChains", "defaultFilterChain", "typedConfig", "httpFilters",
    "upstreamLog", "accessLog", "accessLogOptions", "localReplyConfig", "routeConfig", "scopedRoutes", "virtualHosts",
    "streamIdleTimeout", "delayedCloseTimeout", "requestTimeout", "caseSensitive", "pathSeparatedPrefix", "safeRegex",
})  # fmt: skip
"""Fields that are read or written here, as JSON has their names."""


def _in_camel_case(value: Any, place: str = "") -> Iterator[str]:
    """Places of such fields. One that is not seen would be written a second time, or a route of it passed over."""
    if isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _in_camel_case(inner, f"{place}[{i}]")
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key in _CAMEL:
                yield f"{place}.{key}".lstrip(".")
            yield from _in_camel_case(inner, f"{place}.{key}")


def _targets(
    existing: Data, static: Data, listener: str | None, virtual_host: str | None
) -> tuple[list[_Target], list[str]]:
    """Where to put the parts, and what to say of places that were passed over."""
    every = {label: list(_managers(label, one)) for label, one in _listeners(static)}
    serving = {label: managers for label, managers in every.items() if managers}
    if not serving:
        raise RenderError(_without_http(existing))
    if listener is not None and listener not in serving:
        raise RenderError(f"--listener {listener}: no such listener that serves HTTP; there is {', '.join(serving)}")
    hosts = {label: list(_hosts(managers)) for label, managers in serving.items() if listener in {None, label}}
    if listener is None and virtual_host is not None:
        hosts = {label: found for label, found in hosts.items() if virtual_host in _names(found)}
    if not hosts:
        there = dict.fromkeys(name for managers in serving.values() for name in _names(_hosts(managers)))
        raise RenderError(f"--virtual-host {virtual_host}: there is none; there is {', '.join(there) or 'none at all'}")
    if len(hosts) > 1:
        raise RenderError(f"several listeners serve HTTP: {', '.join(hosts)}; choose one with --listener")
    ((label, found),) = hosts.items()
    if not found:
        raise RenderError("\n".join(_why_no_hosts(manager) for manager in serving[label]))
    names = _names(found)
    if virtual_host is None and len(names) > 1:
        raise RenderError(
            f"listener {label} has several virtual hosts: {', '.join(names)}; choose one with --virtual-host"
        )
    chosen = [target for target in found if target.host.get("name") == (virtual_host or names[0])]
    if not chosen:
        raise RenderError(f"--virtual-host {virtual_host}: listener {label} has none; it has {', '.join(names)}")
    taken = {target.manager.place for target in chosen}
    passed = [m.place for m in serving[label] if m.place not in taken]
    return chosen, [
        f"note: {place}: has no virtual host {chosen[0].host['name']}, nothing put there" for place in passed
    ]


def _listeners(static: Data) -> Iterator[tuple[str, Data]]:
    for i, listener in enumerate(_list(static, "listeners", "static_resources")):
        yield str(dig(listener, "name") or f"listeners[{i}]"), listener


def _managers(label: str, listener: Data) -> Iterator[_Manager]:
    chains = [(f"filter_chains[{i}]", chain) for i, chain in enumerate(dig(listener, "filter_chains") or [])]
    chains += [("default_filter_chain", chain) for chain in [dig(listener, "default_filter_chain")] if chain]
    for where, chain in chains:
        for item in dig(chain, "filters") or []:
            config = dig(item, "typed_config")
            kind = str(dig(config, "@type") or "")
            if kind.endswith(f"/{_MANAGER}"):
                yield _Manager(f"listener {label}, {where}", config)
            elif "http_connection_manager" in f"{dig(item, 'name')} {kind}":
                raise RenderError(
                    f"listener {label}, {where}: an HTTP connection manager without the type "
                    f"type.googleapis.com/{_MANAGER}; only that one can be merged into"
                )


def _hosts(managers: list[_Manager]) -> Iterator[_Target]:
    for manager in managers:
        for host in dig(manager.config, "route_config", "virtual_hosts") or []:
            yield _Target(manager, f"{manager.place}, virtual host {dig(host, 'name')}", host)


def _names(targets: Iterator[_Target] | list[_Target]) -> list[str]:
    return list(dict.fromkeys(str(target.host.get("name")) for target in targets))


def _why_no_hosts(manager: _Manager) -> str:
    config = manager.config
    if "rds" in config:
        name = dig(config, "rds", "route_config_name")
        return (
            f"{manager.place}: its routes come from RDS ({name}) and are not in this file; {_BY_HAND}: "
            f"routes and clusters at the control plane, the rest in this file"
        )
    if "scoped_routes" in config:
        return f"{manager.place}: scoped_routes choose among many route tables, none can be picked here; {_BY_HAND}"
    if dig(config, "route_config", "vhds"):
        return f"{manager.place}: its virtual hosts come from VHDS and are not in this file; {_BY_HAND}"
    return f"{manager.place}: route_config has no virtual_hosts to put routes into"


def _without_static(existing: Data) -> str:
    if "resources" in existing:
        return f"this is a file of xDS resources, not a bootstrap with static_resources; {_BY_HAND}"
    return "no static_resources: not an Envoy bootstrap, or one that gets everything from a control plane; " + _BY_HAND


def _without_http(existing: Data) -> str:
    if dig(existing, "dynamic_resources", "lds_config") is not None:
        return f"the listeners come from LDS and are not in this file; {_BY_HAND}"
    return "static_resources.listeners: none of them has an HTTP connection manager"


# -------------------------------------------------------------------------------------------- taking out


def _take_out(static: Data) -> Iterator[tuple[Data, str]]:
    """Remove what an earlier merge put in; the fields that may be empty now, and were not before."""
    for label, listener in _listeners(static):
        for manager in _managers(label, listener):
            yield from _take_out_of_manager(manager)
    yield from _drop(static, "clusters", _is_our_cluster)
    yield from _drop(static, "secrets", lambda secret: str(dig(secret, "name")).startswith(f"{OWNER}:"))
    yield from _drop(static, "listeners", _is_named_ours)


def _take_out_of_manager(found: _Manager) -> Iterator[tuple[Data, str]]:
    manager = found.config
    if is_ours(dig(manager, "tracing")):
        del manager["tracing"]
    yield from _drop(manager, "http_filters", _is_named_ours)
    for item in dig(manager, "http_filters") or []:
        if isinstance(inner := dig(item, "typed_config"), dict):
            yield from _drop(inner, "upstream_log", _is_named_ours)
    for host in _list(dig(manager, "route_config") or {}, "virtual_hosts", f"{found.place}.route_config"):
        yield from _drop(host, "routes", _is_named_ours)
    if dropped := list(_drop(dig(manager, "local_reply_config") or {}, "mappers", _is_our_mapper)):
        yield from (*dropped, (manager, "local_reply_config"))
    if dropped := list(_drop(manager, "access_log", _is_named_ours)):
        yield from dropped
        yield from _report_ends_only(manager)


def _drop(container: Data, key: str, ours: Any) -> Iterator[tuple[Data, str]]:
    items = container.get(key)
    if isinstance(items, list) and any(map(ours, items)):
        items[:] = [item for item in items if not ours(item)]
        yield container, key


def _report_ends_only(manager: Data) -> Iterator[tuple[Data, str]]:
    """Undo what `_report_running` does, where it was done."""
    options, logs = dig(manager, "access_log_options") or {}, manager["access_log"]
    if options.get("access_log_flush_interval") == FLUSH and all(map(_tells_ends_only, logs)):
        del options["access_log_flush_interval"]
        logs[:] = map(_as_it_was, logs)
        yield manager, "access_log_options"


def _tells_ends_only(log: Data) -> bool:
    return _is_ends_only(dig(log, "filter")) or _is_ends_only(dig(log, "filter", "and_filter", "filters", 1))


def _is_ends_only(condition: Any) -> bool:
    asked = dig(condition, "log_type_filter")
    return dig(asked, "types") == ["DownstreamPeriodic"] and str(dig(asked, "exclude")).lower() == "true"


def _as_it_was(log: Data) -> Any:
    if _is_ends_only(log["filter"]):
        return _like(log, {key: value for key, value in log.items() if key != "filter"})
    return _like(log, {**log, "filter": log["filter"]["and_filter"]["filters"][0]})


def _is_named_ours(item: Any) -> bool:
    return str(dig(item, "name")).startswith(OURS)


def _is_our_cluster(cluster: Any) -> bool:
    return dig(cluster, "name") == SERVICE_CLUSTER or dig(cluster, "metadata", "filter_metadata", OWNER) is not None


def _is_our_mapper(mapper: Any) -> bool:
    first = dig(mapper, "filter", "and_filter", "filters", 0)
    return str(dig(first, "metadata_filter", "matcher", "filter")) == OWNER


# ----------------------------------------------------------------------------------------------- clashes


def _same_names(static: Data, ours: Parts) -> Iterator[str]:
    there = {dig(one, "name"): i for i, one in enumerate(_list(static, "clusters", "static_resources"))}
    for cluster in ours.clusters:
        if (i := there.get(cluster["name"])) is not None:
            name = cluster["name"]
            yield (
                f"static_resources.clusters[{i}] and upstreams.{name} of Tidegate's settings are both called {name!r}; "
                f"rename the upstream"
            )


def _same_ports(existing: Data, static: Data, settings: Settings) -> Iterator[str]:
    taken = dict(_ports("admin", dig(existing, "admin", "address")))
    for label, listener in _listeners(static):
        more = [dig(one, "address") for one in dig(listener, "additional_addresses") or []]
        for address in (dig(listener, "address"), *more):
            taken |= dict(_ports(f"listener {label}", address))
    host, _, port = settings.service.address.rpartition(":")
    wanted = {"gateway.probe_port": str(settings.gateway.probe_port)}
    if host.strip("[]") in _ANYWHERE:
        wanted["service.address"] = port
    for setting, port in wanted.items():
        if port in taken:
            yield f"{setting} of Tidegate's settings and {taken[port]} both want port {port}; change the setting"


def _ports(place: str, address: Any) -> Iterator[tuple[str, str]]:
    if dig(address, "socket_address", "address") in _ANYWHERE:
        yield str(dig(address, "socket_address", "port_value")), place


# -------------------------------------------------------------------------------------------- putting in


def _fill_manager(manager: _Manager, ours: Parts) -> list[str]:
    config, place = manager.config, manager.place
    filters = _list(config, "http_filters", place)
    kinds = [str(dig(item, "typed_config", "@type")) for item in filters]
    if not kinds or not kinds[-1].endswith(f"/{_ROUTER}"):
        raise RenderError(
            f"{place}.http_filters: the last one is not a router, so Tidegate's routes would not be taken"
        )
    router = filters[-1]["typed_config"]
    router["upstream_log"] = _list(router, "upstream_log", place) + ours.upstream_log
    config["http_filters"] = _like(filters, [*filters[:-1], *ours.http_filters, filters[-1]])
    if ours.access_log:
        _report_running(config, place)
        config["access_log"] += ours.access_log
    replies = config["local_reply_config"] = dig(config, "local_reply_config") or {}
    replies["mappers"] = _like(replies.get("mappers"), [*ours.mappers, *_list(replies, "mappers", place)])
    before = [named(item) for item in filters[:-1]]
    asked = f"behind {', '.join(before)}, which are asked first, and before" if before else "before"
    return [
        f"note: {place}: Tidegate's filters stand {asked} the router; only its own routes switch them on",
        *_trace(place, config, ours),
    ]


def _trace(place: str, config: Data, ours: Parts) -> Iterator[str]:
    """Tells the collector of requests, unless somebody is told already: there is one tracing for all routes."""
    if not ours.tracing:
        return
    if dig(config, "tracing") is not None:
        yield f"note: {place}: its tracing stays as it is; Tidegate's spans join it if its tracer tells a traceparent"
        return
    config.update(ours.tracing)
    share = "telemetry.trace_sample is the share of requests that come without a trace"
    yield f"note: {place}: all of its routes are traced now, for telemetry.otlp; {share}"


def _report_running(manager: Data, place: str) -> None:
    """Have running answers reported to Tidegate, and no line more in the logs that are there."""
    logs = _list(manager, "access_log", place)
    options = dig(manager, "access_log_options") or {}
    if not {"access_log_flush_interval"} & (options.keys() | manager.keys()):
        options["access_log_flush_interval"] = FLUSH
        logs = _like(logs, [_like(log, {**log, "filter": _ends_only(dig(log, "filter"))}) for log in logs])
    manager["access_log"] = logs
    manager["access_log_options"] = options


def _ends_only(condition: Data | None) -> Data:
    return {"and_filter": {"filters": [condition, _ENDS_ONLY]}} if condition else _ENDS_ONLY


def _fill_host(target: _Target, ours: Parts, settings: Settings) -> Iterator[str]:
    if "matcher" in target.host:
        raise RenderError(
            f"{target.place}: its routes are a matcher tree, which has no order to put routes into; {_BY_HAND}"
        )
    routes = _list(target.host, "routes", target.place)
    at = first_to_take(routes)
    target.host["routes"] = _like(routes, [*routes[:at], *ours.routes, *routes[at:]])
    return about_routes(target.place, target.manager.config, target.host, routes, at, settings)


def _list(container: Data, key: str, place: str) -> list[Any]:
    """A field that is a list of mappings, or absent."""
    found = dig(container, key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise RenderError(f"{place}.{key}: expected a list of mappings")
    return found


def _like(old: Any, new: Any) -> Any:
    """`new` written the way `old` was."""
    if isinstance(old, Kept | KeptList):
        kept = type(old)(new)
        kept.inline = old.inline
        return kept
    return new
