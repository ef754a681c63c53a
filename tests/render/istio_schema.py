"""What Istio takes: the fields of its objects as documented, and what its webhook says beyond them.

    problems(document) -> [str]     empty when the object would be accepted

Only kinds that are rendered, but those with all of their documented fields down to where the rendered ones are.
"""

from __future__ import annotations

import re
from typing import Any

import jsonschema

Data = dict[str, Any]

MANAGER = "envoy.filters.network.http_connection_manager"
_LISTENER_CLASS = ("LISTENER", "FILTER_CHAIN", "NETWORK_FILTER", "HTTP_FILTER", "LISTENER_FILTER")
_ROUTE_CLASS = ("ROUTE_CONFIGURATION", "VIRTUAL_HOST", "HTTP_ROUTE")


def _object(required: tuple[str, ...] = (), /, **fields: Any) -> Data:
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def _list(of: Data) -> Data:
    return {"type": "array", "items": of}


def _one_of(*words: str) -> Data:
    return {"enum": list(words)}


_TEXT: Data = {"type": "string"}
_PORT: Data = {"type": "integer", "minimum": 0, "maximum": 4294967295}
_INT: Data = {"type": "integer"}
_ANY: Data = {}
_LABELS: Data = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}

_FILTER = _object(name=_TEXT, subFilter=_object(name=_TEXT))
_CHAIN = _object(
    name=_TEXT, sni=_TEXT, transportProtocol=_TEXT, applicationProtocols=_TEXT, destinationPort=_PORT, filter=_FILTER
)
_LISTENER = _object(name=_TEXT, portName=_TEXT, portNumber=_PORT, listenerFilter=_TEXT, filterChain=_CHAIN)
_ROUTE = _object(name=_TEXT, action=_one_of("ANY", "ROUTE", "REDIRECT", "DIRECT_RESPONSE"))
_VHOST = _object(name=_TEXT, domainName=_TEXT, route=_ROUTE)
_TABLE = _object(name=_TEXT, portName=_TEXT, portNumber=_PORT, gateway=_TEXT, vhost=_VHOST)
_CLUSTER = _object(name=_TEXT, service=_TEXT, subset=_TEXT, portNumber=_PORT)
_MATCH = {
    **_object(
        context=_one_of("ANY", "SIDECAR_INBOUND", "SIDECAR_OUTBOUND", "GATEWAY"),
        proxy=_object(proxyVersion=_TEXT, metadata={"type": "object", "additionalProperties": _TEXT}),
        listener=_LISTENER,
        routeConfiguration=_TABLE,
        cluster=_CLUSTER,
    ),
    "not": {"anyOf": [{"required": [a, b]} for a, b in (
        ("listener", "routeConfiguration"), ("listener", "cluster"), ("routeConfiguration", "cluster"))]},
}  # fmt: skip
_PATCH = _object(
    operation=_one_of("MERGE", "ADD", "REMOVE", "INSERT_BEFORE", "INSERT_AFTER", "INSERT_FIRST", "REPLACE"),
    value={"type": "object"},
    filterClass=_one_of("UNSPECIFIED", "AUTHN", "AUTHZ", "STATS"),
)
_APPLY_TO = _one_of(*_LISTENER_CLASS, *_ROUTE_CLASS, "CLUSTER", "EXTENSION_CONFIG", "BOOTSTRAP")
_ENVOY_FILTER = _object(
    workloadSelector=_object(labels=_LABELS),
    targetRefs=_list(_ANY),
    configPatches=_list(_object(applyTo=_APPLY_TO, match=_MATCH, patch=_PATCH)),
    priority=_INT,
)

_DESTINATION = _object(("host",), host=_TEXT, subset=_TEXT, port=_object(number=_PORT))
_RETRIES = _object(
    attempts=_INT, perTryTimeout=_TEXT, retryOn=_TEXT, backoff=_TEXT, retryRemoteLocalities=_ANY,
    retryIgnorePreviousHosts=_ANY,
)  # fmt: skip
_HTTP = _object(
    name=_TEXT, match=_list(_ANY), timeout=_TEXT, retries=_RETRIES, fault=_ANY,
    route=_list(_object(("destination",), destination=_DESTINATION, weight=_INT, headers=_ANY)),
    redirect=_ANY, directResponse=_ANY, delegate=_ANY, rewrite=_ANY,
    mirror=_ANY, mirrors=_ANY, mirrorPercentage=_ANY, corsPolicy=_ANY, headers=_ANY,
)  # fmt: skip
_VIRTUAL_SERVICE = _object(
    hosts=_list(_TEXT), gateways=_list(_TEXT), http=_list(_HTTP), tls=_ANY, tcp=_ANY, exportTo=_list(_TEXT)
)
_TLS = _object(
    mode=_one_of("DISABLE", "SIMPLE", "MUTUAL", "ISTIO_MUTUAL"), clientCertificate=_TEXT, privateKey=_TEXT,
    caCertificates=_TEXT, credentialName=_TEXT, subjectAltNames=_list(_TEXT), sni=_TEXT, insecureSkipVerify=_ANY,
    caCrl=_TEXT,
)  # fmt: skip
_POLICY = _object(
    tls=_TLS, loadBalancer=_ANY, connectionPool=_ANY, outlierDetection=_ANY, portLevelSettings=_ANY, tunnel=_ANY,
    proxyProtocol=_ANY, retryBudget=_ANY,
)  # fmt: skip
_DESTINATION_RULE = _object(
    ("host",), host=_TEXT, trafficPolicy=_POLICY, subsets=_ANY, exportTo=_list(_TEXT), workloadSelector=_ANY
)

_KINDS = {
    ("networking.istio.io/v1alpha3", "EnvoyFilter"): _ENVOY_FILTER,
    ("networking.istio.io/v1", "VirtualService"): _VIRTUAL_SERVICE,
    ("networking.istio.io/v1", "DestinationRule"): _DESTINATION_RULE,
}


def problems(document: Data) -> list[str]:
    """What the API server and the webhook would say."""
    kind = document["kind"]
    schema = _KINDS.get((document["apiVersion"], kind))
    if schema is None:
        return [f"no kind {document['apiVersion']} {kind}"]
    found = [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document["spec"])]
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", document["metadata"]["name"]):
        found.append("metadata.name is no name")
    if found:
        return found
    if kind == "EnvoyFilter":
        return [said for patch in document["spec"].get("configPatches", ()) for said in _webhook(patch)]
    return [said for http in document["spec"].get("http", ()) for said in _http(http)]


def _webhook(patch: Data) -> list[str]:
    """Beyond the schema."""
    apply_to, match = patch.get("applyTo"), patch.get("match", {})
    change = patch.get("patch", {})
    if not apply_to or "operation" not in change:
        return ["missing applyTo or operation"]
    found = []
    if change["operation"] != "REMOVE" and "value" not in change:
        found.append("missing patch value for non-remove operation")
    wanted = (
        "listener" if apply_to in _LISTENER_CLASS else "routeConfiguration" if apply_to in _ROUTE_CLASS else "cluster"
    )
    if {"listener", "routeConfiguration", "cluster"} & match.keys() - {wanted}:
        found.append(f"applyTo {apply_to} cannot have another match than {wanted}")
    inner = match.get("listener", {}).get("filterChain", {}).get("filter")
    if inner is not None:
        if not inner.get("name"):
            found.append("filter match has no name to match on")
        if "subFilter" in inner and (apply_to != "HTTP_FILTER" or inner.get("name") != MANAGER):
            found.append("subfilter match can be used with applyTo HTTP_FILTER, in the connection manager only")
        if inner.get("subFilter", {"name": "some"}).get("name", "") == "":
            found.append("subfilter match has no name to match on")
    return found + _types(change.get("value", {}))


def _types(value: Any) -> list[str]:
    """Every extension says of what type it is."""
    if isinstance(value, list):
        return [said for one in value for said in _types(one)]
    if not isinstance(value, dict):
        return []
    found = [said for one in value.values() for said in _types(one)]
    if "typed_config" in value and not str(value["typed_config"].get("@type")).startswith("type.googleapis.com/envoy."):
        found.append(f"{value.get('name')}: typed_config without a type")
    return found


def _http(http: Data) -> list[str]:
    retries = http.get("retries", {})
    found = []
    if retries.get("attempts", 1) < 0:
        found.append("attempts cannot be negative")
    if retries.get("attempts") == 0 and len(retries) > 1:
        found.append("http retry policy configured when attempts are set to 0 (disabled)")
    times = [text for text in (http.get("timeout"), retries.get("perTryTimeout")) if text is not None]
    return found + ["duration must be greater than 1ms" for text in times if not re.search(r"[1-9]", text)]
