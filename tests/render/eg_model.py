"""What Envoy Gateway makes of Gateway API objects and its own policies, as far as these tests need it, and its patches.

Written after the xDS that its own tests show, and after its documentation; no controller of it runs here. `generate`
gives listener, routes and clusters with the names and shapes of its first naming scheme; `patched` applies
EnvoyPatchPolicies as its translator does: in the order of priority, by type and name, JSON Patch with missing parents
made, `path: ""` for whole resources, and a jsonPath turned into pointers before anything is changed.

A patch that cannot be applied is an error here. Envoy Gateway would say so in the policy's status, and go on.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jsonpath

Data = dict[str, Any]
LISTENER = "type.googleapis.com/envoy.config.listener.v3.Listener"
ROUTES = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration"
CLUSTER = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
SECRET = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
_HCM = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_PROTOCOLS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_BODY = {"Buffered": "BUFFERED", "BufferedPartial": "BUFFERED_PARTIAL", "Streamed": "STREAMED"}


class NotAppliedError(Exception):
    """Envoy Gateway would not set `Programmed`."""


@dataclass
class Xds:
    """Resources by type and name."""

    found: dict[str, dict[str, Data]] = field(
        default_factory=lambda: {LISTENER: {}, ROUTES: {}, CLUSTER: {}, SECRET: {}}
    )


def of_kind(documents: list[Data], kind: str) -> list[Data]:
    return [each for each in documents if each["kind"] == kind]


# ------------------------------------------------------------------------------------------ generating


def generate(documents: list[Data], services: dict[str, int]) -> Xds:
    """services: `name:port` of Kubernetes -> port on this machine, which is where each has its one endpoint."""
    made = Xds()
    (gateway,) = of_kind(documents, "Gateway")
    extensions = list(_extensions(documents))
    for listener in gateway["spec"]["listeners"]:
        name = "/".join((gateway["metadata"]["namespace"], gateway["metadata"]["name"], listener["name"]))
        made.found[LISTENER][name] = _listener(name, documents, [one for _, one in extensions])
        made.found[ROUTES][name] = _route_config(name, documents, extensions)
    for route in of_kind(documents, "HTTPRoute"):
        for i, rule in enumerate(route["spec"]["rules"]):
            for backend in rule.get("backendRefs", []):
                cluster = _cluster(f"{_rule(route)}/{i}", services[f"{backend['name']}:{backend['port']}"])
                made.found[CLUSTER][cluster["name"]] = _settled(cluster, documents, route)
    for policy in of_kind(documents, "EnvoyExtensionPolicy"):
        for i, asked in enumerate(policy["spec"]["extProc"]):
            (backend,) = asked["backendRefs"]
            name = f"{_full(policy, 'envoyextensionpolicy')}/extproc/{i}"
            cluster = _cluster(name, services[f"{backend['name']}:{backend['port']}"])
            kind = f"type.googleapis.com/{_PROTOCOLS}"
            explicit = {"@type": kind, "explicit_http_config": {"http2_protocol_options": {}}}
            made.found[CLUSTER][name] = {**cluster, "typed_extension_protocol_options": {_PROTOCOLS: explicit}}
    return made


def _seconds(duration: str) -> str:
    """Gateway API's durations (1m30s, 500ms) as Envoy's."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    return f"{sum(float(n) * units[unit] for n, unit in re.findall(r'([0-9]+)(ms|h|m|s)', duration)):g}s"


def _full(each: Data, kind: str) -> str:
    return f"{kind}/{each['metadata']['namespace']}/{each['metadata']['name']}"


def _rule(route: Data) -> str:
    return f"{_full(route, 'httproute')}/rule"


def _extensions(documents: list[Data]) -> Iterator[tuple[Data, Data]]:
    """Each policy with the filter it makes: disabled in the chain, enabled by the routes that it is for."""
    for policy in of_kind(documents, "EnvoyExtensionPolicy"):
        for i, asked in enumerate(policy["spec"]["extProc"]):
            mode = asked.get("processingMode", {})
            name = f"{_full(policy, 'envoyextensionpolicy')}/extproc/{i}"
            spaces = asked.get("metadata", {})
            options = {
                "forwarding_namespaces": {"untyped": spaces.get("accessibleNamespaces", [])},
                "receiving_namespaces": {"untyped": spaces.get("writableNamespaces", [])},
            }
            config = {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
                "failure_mode_allow": asked.get("failOpen", False),
                "grpc_service": {"envoy_grpc": {"cluster_name": name}, "timeout": "10s"},
                "message_timeout": _seconds(asked.get("messageTimeout", "200ms")),
                "metadata_options": options,
                "processing_mode": {
                    "request_header_mode": "SEND" if "request" in mode else "SKIP",
                    "request_body_mode": _BODY.get(mode.get("request", {}).get("body"), "NONE"),
                    "response_header_mode": "SEND" if "response" in mode else "SKIP",
                    "response_body_mode": _BODY.get(mode.get("response", {}).get("body"), "NONE"),
                    "request_trailer_mode": "SKIP",
                    "response_trailer_mode": "SKIP",
                },
            }
            yield policy, {"name": f"envoy.filters.http.ext_proc/{name}", "disabled": True, "typed_config": config}


def _listener(name: str, documents: list[Data], extensions: list[Data]) -> Data:
    (policy,) = of_kind(documents, "ClientTrafficPolicy")
    spec = policy["spec"]
    http, http2, path = spec["timeout"]["http"], spec["http2"], spec["path"]
    log = {
        "name": "envoy.access_loggers.file",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
            "path": "/dev/stdout",
            "log_format": {"json_format": {"method": "%REQ(:METHOD)%", "response_code": "%RESPONSE_CODE%"}},
        },
    }
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router",
            "suppress_envoy_headers": not spec["headers"]["enableEnvoyHeaders"],
        },
    }
    manager = {
        "@type": f"type.googleapis.com/{_HCM}",
        "access_log": [log],
        "common_http_protocol_options": {"headers_with_underscores_action": "REJECT_REQUEST"},
        "http2_protocol_options": {
            "initial_connection_window_size": 1048576,
            "initial_stream_window_size": int(http2["initialStreamWindowSize"]),
            "max_concurrent_streams": http2["maxConcurrentStreams"],
        },
        "http_filters": [*extensions, router],
        "merge_slashes": not path["disableMergeSlashes"],
        "normalize_path": True,
        "path_with_escaped_slashes_action": {"RejectRequest": "REJECT_REQUEST"}[path["escapedSlashesAction"]],
        "rds": {
            "config_source": {"ads": {}, "initial_fetch_timeout": "0s", "resource_api_version": "V3"},
            "route_config_name": name,
        },
        "request_timeout": _seconds(http["requestReceivedTimeout"]),
        "server_header_transformation": "PASS_THROUGH",
        "stat_prefix": "http-10080",
        "stream_idle_timeout": _seconds(http["streamIdleTimeout"]),
        "use_remote_address": True,
    }
    item = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    return {
        "name": name,
        "access_log": [{**log, "filter": {"response_flag_filter": {"flags": ["NR"]}}}],
        "address": {"socket_address": {"address": "0.0.0.0", "port_value": 10080}},
        "default_filter_chain": {"name": name, "filters": [item]},
        "max_connections_to_accept_per_socket_event": 1,
        "per_connection_buffer_limit_bytes": int(spec["connection"]["bufferLimit"]),
    }


def _route_config(name: str, documents: list[Data], extensions: list[tuple[Data, Data]]) -> Data:
    by_domain: dict[str, list[Data]] = {}
    for route in of_kind(documents, "HTTPRoute"):
        for domain in route["spec"].get("hostnames", ["*"]):
            by_domain.setdefault(domain, []).extend(_routes(route, domain, documents, extensions))
    hosts = [
        {"name": f"{name}/{domain.replace('.', '_')}", "domains": [domain], "routes": sorted(routes, key=_order)}
        for domain, routes in by_domain.items()
    ]
    return {"name": name, "ignore_port_in_host_matching": True, "virtual_hosts": hosts}


def _order(route: Data) -> tuple[bool, int]:
    """Exact paths first, then the longest prefix."""
    match = route["match"]
    return "path" not in match, -len(match.get("path") or match.get("path_separated_prefix") or match["prefix"])


def _routes(route: Data, domain: str, documents: list[Data], extensions: list[tuple[Data, Data]]) -> Iterator[Data]:
    for i, rule in enumerate(route["spec"]["rules"]):
        for j, match in enumerate(rule["matches"]):
            value = match["path"]["value"]
            path = {"prefix": value} if value == "/" else {"path_separated_prefix": value}
            made: Data = {
                "name": f"{_rule(route)}/{i}/match/{j}/{domain.replace('.', '_')}",
                "match": {"path": value} if match["path"]["type"] == "Exact" else path,
            }
            if rule.get("backendRefs"):
                upgrade = [{"upgrade_type": "websocket"}]
                made["route"] = {"cluster": f"{_rule(route)}/{i}", "upgrade_configs": upgrade}
                for policy in _for(documents, "BackendTrafficPolicy", route):
                    made["route"] |= {"timeout": _seconds(policy["spec"]["timeout"]["http"]["requestTimeout"])}
            else:
                (extension,) = rule["filters"]
                (told,) = [
                    each
                    for each in of_kind(documents, extension["extensionRef"]["kind"])
                    if each["metadata"]["name"] == extension["extensionRef"]["name"]
                ]
                made["direct_response"] = {"status": told["spec"]["directResponse"]["statusCode"]}
            switched_on = [
                one["name"] for policy, one in extensions if policy in _for(documents, policy["kind"], route)
            ]
            kind = "type.googleapis.com/envoy.config.route.v3.FilterConfig"
            yield {**made, "typed_per_filter_config": {one: {"@type": kind, "config": {}} for one in switched_on}}


def _for(documents: list[Data], kind: str, route: Data) -> list[Data]:
    """Policies of a kind that are attached to a route."""
    meant = ("HTTPRoute", route["metadata"]["name"])
    return [
        each
        for each in of_kind(documents, kind)
        if meant in [(ref["kind"], ref["name"]) for ref in each["spec"]["targetRefs"]]
    ]


def _cluster(name: str, port: int) -> Data:
    endpoint = {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
    return {
        "name": name,
        "type": "STATIC",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
        "circuit_breakers": {"thresholds": [{"max_retries": 1024}]},
        "common_lb_config": {},
        "connect_timeout": "10s",
        "dns_lookup_family": "V4_PREFERRED",
        "ignore_health_on_host_removal": True,
        "lb_policy": "LEAST_REQUEST",
        "outlier_detection": {},
        "per_connection_buffer_limit_bytes": 32768,
    }


def _settled(cluster: Data, documents: list[Data], route: Data) -> Data:
    for policy in _for(documents, "BackendTrafficPolicy", route):
        spec = policy["spec"]
        breaker = spec["circuitBreaker"]
        limits = {
            "max_connections": breaker["maxConnections"],
            "max_pending_requests": breaker["maxPendingRequests"],
            "max_requests": breaker["maxParallelRequests"],
            "max_retries": breaker["maxParallelRetries"],
        }
        cluster |= {
            "circuit_breakers": {"thresholds": [limits]},
            "connect_timeout": _seconds(spec["timeout"]["tcp"]["connectTimeout"]),
            "outlier_detection": {"consecutive_5xx": spec["healthCheck"]["passive"]["consecutive5XxErrors"]},
            "per_connection_buffer_limit_bytes": int(spec["connection"]["bufferLimit"]),
        }
    return cluster


# -------------------------------------------------------------------------------------------- patching


def patched(made: Xds, policies: list[Data]) -> Xds:
    """What has become of it. NotAppliedError when a policy would not be `Programmed`."""
    done = copy.deepcopy(made)
    for policy in sorted(policies, key=lambda each: int(each["spec"].get("priority", 0))):
        for patch in policy["spec"]["jsonPatches"]:
            _patch(done.found[patch["type"]], patch["name"], copy.deepcopy(patch["operation"]))
    return done


def _patch(resources: dict[str, Data], name: str, operation: Data) -> None:
    path = operation.get("path")
    if path is None and "jsonPath" not in operation:
        raise NotAppliedError("a patch operation must have a path or a jsonPath")
    if operation["op"] == "add" and path == "" and "jsonPath" not in operation:
        if operation["value"]["name"] in resources:
            raise NotAppliedError(f"{name}: is there already")
        resources[operation["value"]["name"]] = operation["value"]
        return
    if name not in resources:
        raise NotAppliedError(f"unable to find xds resource {name}")
    pointers = [path]
    if "jsonPath" in operation:
        found = jsonpath.finditer(operation["jsonPath"], resources[name])
        pointers = [f"{match.pointer()}{path or ''}" for match in found]
        if not pointers:
            raise NotAppliedError(f"no jsonPointers were found for {operation['jsonPath']}")
    for pointer in pointers:
        _apply(resources[name], operation["op"], pointer, copy.deepcopy(operation.get("value")))


def _apply(document: Data, op: str, pointer: str, value: Any) -> None:
    """RFC 6902, of which `add`, `replace` and `remove` are used; parents that are not there are made by `add`."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    place: Any = document
    for part, following in zip(parents, [*parents[1:], last], strict=True):
        if isinstance(place, list):
            place = place[int(part)]
            continue
        if part not in place:
            if op != "add":
                raise NotAppliedError(f"{pointer}: there is no {part}")
            place[part] = [] if following == "-" or following.isdigit() else {}
        place = place[part]
    if isinstance(place, list):
        at = len(place) if last == "-" else int(last)
        if at > len(place) or (op != "add" and at == len(place)):
            raise NotAppliedError(f"{pointer}: index out of range")
        place[at : at + (op != "add")] = [] if op == "remove" else [value]
    elif op == "add" or last in place:
        place[last] = value
        if op == "remove":
            del place[last]
    else:
        raise NotAppliedError(f"{pointer}: there is no {last}")


# --------------------------------------------------------------------------------------------- running


def bootstrap(made: Xds, port: int, admin_port: int) -> Data:
    """The same resources in one file, for an Envoy without a control plane. The (one) listener is on `port`."""
    listeners = [copy.deepcopy(each) for each in made.found[LISTENER].values()]
    for listener in listeners:
        if "default_filter_chain" not in listener:
            continue
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
        manager = listener["default_filter_chain"]["filters"][0]["typed_config"]
        routes = made.found[ROUTES][manager.pop("rds")["route_config_name"]]
        manager["route_config"] = {**routes, "validate_clusters": False}  # as it is with RDS
    return {
        "node": {"id": "eg", "cluster": "eg"},
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin_port}}},
        "static_resources": {
            "listeners": listeners,
            "clusters": list(made.found[CLUSTER].values()),
            "secrets": list(made.found[SECRET].values()),
        },
    }
