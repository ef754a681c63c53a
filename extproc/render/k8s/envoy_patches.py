"""Our parts of an Envoy as operations on what Envoy Gateway generates: JSON Patch, as its EnvoyPatchPolicy takes it.

    patches(parts(settings), names, "llm.example.com", None) -> (name of a policy, its operations), ...

One policy for each thing that is changed or added, so that none becomes larger than Kubernetes takes, and each has a
status of its own. What is looked for is looked for by what it is (a router, a connection manager, the virtual host of a
domain), wherever Envoy Gateway has put it: places and most names change from version to version.

Envoy Gateway reads each value with its own idea of Envoy's types. One that is older than a type refuses that policy.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from extproc.render.parts import FLUSH, OURS, Parts
from extproc.render.shape import Data

__all__ = ["patches"]

_LISTENER = "type.googleapis.com/envoy.config.listener.v3.Listener"
_ROUTES = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration"
_CLUSTER = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
_SECRET = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"  # noqa: S105 - the name of a type

_MANAGER = "$..filters[?(@.name == 'envoy.filters.network.http_connection_manager')]"
_FILTER = "$..http_filters[?(@.name == '{}')]"
_ROUTER = "envoy.filters.http.router"
_ADMISSION = f"{OURS}admission"
_PROBE = f"{OURS}probe"
_SAID_BY_POLICY = frozenset({"@type", "failure_mode_allow", "message_timeout", "metadata_options"})
"""Fields of ext_proc that an EnvoyExtensionPolicy has set already."""


def patches(
    ours: Parts, names: tuple[str, str], domain: str | None, admission: str | None
) -> Iterator[tuple[str, list[Data]]]:
    """names: Envoy Gateway's for the listener and for its routes. domain: of the virtual host; any where it is None.
    admission: name of an ext_proc filter that a policy has made; None where it is to be added.
    """
    listener_name, routes_name = names
    yield "tidegate-listener", [_patch(_LISTENER, listener_name, each) for each in _listener(ours, admission)]
    yield "tidegate-routes", [_patch(_ROUTES, routes_name, each) for each in _routes(ours, domain or "*", admission)]
    for cluster in ours.clusters:
        yield f"tidegate-cluster-{_plain(cluster['name'])}", [_whole(_CLUSTER, cluster)]
    for listener in ours.listeners:
        if listener["name"] != _PROBE:
            yield f"tidegate-listener-{_plain(listener['name'])}", [_whole(_LISTENER, listener)]
    for secret in ours.secrets:
        yield f"tidegate-secret-{_plain(secret['name'])}", [_whole(_SECRET, secret)]


def _listener(ours: Parts, admission: str | None) -> Iterator[Data]:
    """Filters right before the router, one after another, so that they stand as they are listed; and logs."""
    router = _FILTER.format(_ROUTER)
    before = _FILTER.format(admission or _ROUTER)
    for item in ours.http_filters:
        if item["name"] != _ADMISSION or admission is None:
            yield {"op": "add", "jsonPath": before, "value": item}
            continue
        for field, value in item["typed_config"].items():
            if field not in _SAID_BY_POLICY:
                yield {"op": "add", "jsonPath": before, "path": f"/typed_config/{field}", "value": value}
    yield from _each(router, "/typed_config/upstream_log/-", ours.upstream_log)
    yield from _each(_MANAGER, "/typed_config/access_log/-", ours.access_log)
    manager = {
        "access_log_options": {"access_log_flush_interval": FLUSH},
        "local_reply_config": {"mappers": ours.mappers},
        "delayed_close_timeout": "0s",
    }
    for field, value in manager.items():
        yield {"op": "add", "jsonPath": _MANAGER, "path": f"/typed_config/{field}", "value": value}


def _each(where: str, path: str, values: list[Data]) -> Iterator[Data]:
    for value in values:
        yield {"op": "add", "jsonPath": where, "path": path, "value": value}


def _routes(ours: Parts, domain: str, admission: str | None) -> Iterator[Data]:
    """Before all other routes; the last one first, for each is put before those that are there."""
    host = f"$.virtual_hosts[?(@.domains[0] == '{domain}')]"
    for route in reversed(ours.routes):
        switched = {
            (admission if admission and key == _ADMISSION else key): value
            for key, value in route["typed_per_filter_config"].items()
        }
        yield {
            "op": "add",
            "jsonPath": host,
            "path": "/routes/0",
            "value": {**route, "typed_per_filter_config": switched},
        }


def _whole(kind: str, resource: Data) -> Data:
    """A resource that Envoy Gateway does not have."""
    return _patch(kind, resource["name"], {"op": "add", "path": "", "value": resource})


def _patch(kind: str, name: str, operation: Data) -> Data:
    return {"type": kind, "name": name, "operation": operation}


def _plain(name: str) -> str:
    """As the name of an object in Kubernetes may be; upstreams whose names differ in case or signs stay apart."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("tidegate:").removeprefix(OURS)).strip("-")
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
