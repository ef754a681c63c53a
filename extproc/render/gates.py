"""The classic profile's way to an upstream, for Envoys before 1.40.

Those cannot change the cluster of a retry. What they can is an aggregate cluster whose next priority a retry takes; but
an aggregate's members lose their own filters, so that no attempt would have its own path, key and model. So before each
upstream stands a *gate*: a listener on an abstract unix socket of this Envoy, whose HTTP filters are the upstream's,
with one route to its cluster. Gates are what the aggregates consist of:

    listener -> cluster `tidegate:chain:A+B` -> gate of A -> cluster `A`
                                    (a retry) -> gate of B -> cluster `B`

There is an aggregate for each order in `core.orders`. Admission names it in a header, and writes into another what
would be metadata in the native profile; the first filter of a gate turns that into metadata again.

What a gate answers by itself (no connection, a connection lost) looks like the upstream's answer to the router before
it. So it carries Envoy's flags in a header, for the log of attempts. No upstream can send that header, nor any other
with which gates tell of its answers.

Whoever may open sockets in Envoy's network namespace can ask at a gate, as at the canaries' listener.
"""

from __future__ import annotations

from collections.abc import Iterator

from extproc.core.orders import name_of, orders_of
from extproc.render.filters import router
from extproc.render.lua import gate_script
from extproc.render.names import (
    ERROR_HEADER,
    FLAGS_HEADER,
    GATE_HEADER,
    HIDDEN_FROM_UPSTREAMS,
    HOST,
    ORDER_HEADER,
    ROUTE_HEADER,
    STATUS_HEADER,
    TAIL_HEADER,
    UNDELIVERED,
    WAIT_HEADER,
)
from extproc.render.refusals import cel
from extproc.render.shape import HTTP_PROTOCOLS, Data, breakers, extension, set_header, source, typed
from extproc.render.upstream import attempt_filters
from extproc.settings import Settings

__all__ = ["gate_clusters", "gate_listeners"]

_MOST_HEADERS = 1000
"""Of a request or an answer: the router before a gate counts them, a gate need not."""
_HEADERS_KB = 8192
"""The most that Envoy can be told. What dispatch writes for the next upstreams comes in a header."""
_LAST_BYTES = "0.200s"
"""Time for what came before an upstream broke off: without any it is dropped, as if there had been no answer. So much
later callers learn of it. While Envoy drains, the end of an answer has it, too, from one byte that is read to the next.
"""
_NO_ANSWER = ("UF", "UH", "UO", "DF", "UR", "UC", "UT", "LR", "UPE")
_ROUTERS_OWN = ("x-envoy-expected-rq-timeout-ms", "x-envoy-decorator-operation")
"""What the router before a gate tells upstreams, where it is not told otherwise."""


def gate_listeners(settings: Settings) -> list[Data]:
    """One for each upstream."""
    return [_listener(settings, name) for name in settings.upstreams]


def gate_clusters(settings: Settings) -> list[Data]:
    """The gates, and the orders of them."""
    chains = [route.chain for route in settings.routes]
    return [*(_gate(settings, name) for name in settings.upstreams), *map(_order, orders_of(chains))]


def _place(settings: Settings, name: str) -> Data:
    return {"pipe": {"path": f"@tidegate/{settings.gateway.port}/{name}"}}


def _listener(settings: Settings, name: str) -> Data:
    manager = extension(
        "envoy.filters.network.http_connection_manager",
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="gate",
        codec_type="HTTP1",
        generate_request_id=False,
        preserve_external_request_id=True,
        skip_xff_append=True,
        server_header_transformation="PASS_THROUGH",
        max_request_headers_kb=_HEADERS_KB,
        common_http_protocol_options={"max_headers_count": _MOST_HEADERS, "idle_timeout": "0s"},
        stream_idle_timeout="0s",
        delayed_close_timeout=_LAST_BYTES,
        local_reply_config={"mappers": list(_told(name))},
        route_config={"name": "gate", "virtual_hosts": [_host(settings, name)]},
        http_filters=[*_filters(settings, name), router()],
    )
    return {
        "name": f"tidegate.gate.{name}",
        "address": _place(settings, name),
        "per_connection_buffer_limit_bytes": _largest(settings),
        "filter_chains": [{"filters": [manager]}],
    }


def _filters(settings: Settings, name: str) -> Iterator[Data]:
    kind = "envoy.extensions.filters.http.header_mutation.v3.HeaderMutation"
    named = {"response_mutations": [{"append": set_header(GATE_HEADER, name)}]}
    yield extension("tidegate.name", kind, mutations=named)
    script = source(gate_script(ROUTE_HEADER))
    yield extension("tidegate.told", "envoy.extensions.filters.http.lua.v3.Lua", default_source_code=script)
    yield from attempt_filters(settings, name)


def _host(settings: Settings, name: str) -> Data:
    hidden = [*HIDDEN_FROM_UPSTREAMS, *_ROUTERS_OWN, ORDER_HEADER, ROUTE_HEADER]
    return {
        "name": "gate",
        "domains": ["*"],
        "request_body_buffer_limit": _largest(settings),
        "routes": [
            {
                "name": name,
                "match": {"prefix": "/"},
                "route": {"cluster": name, "timeout": "0s", "idle_timeout": "0s", "auto_host_rewrite": True},
                "request_headers_to_remove": hidden,
                "response_headers_to_remove": [ERROR_HEADER, FLAGS_HEADER, STATUS_HEADER, TAIL_HEADER, WAIT_HEADER],
            }
        ],
    }


def _told(name: str) -> Iterator[Data]:
    """What a gate says of the answers that it makes itself. Some pass its filters after this, as its upstream's answers
    do, and some pass none: those in whose place an answer had begun to come, but was not whole.

    An answer that is larger than `gateway.max_answer_bytes` is not the fault of who gave it, and the next would be paid
    for as much: its status is one that no router retries, and that the main listener words like all failures.
    """
    mine = set_header(GATE_HEADER, name)
    silent = [{"response_flag_filter": {"flags": list(_NO_ANSWER)}}, cel("response.code >= 400")]
    yield {
        "filter": cel("response.code_details == 'response_payload_too_large'"),
        "status_code": UNDELIVERED,
        "headers_to_add": [mine, set_header(FLAGS_HEADER, "TL")],
    }
    yield {
        "filter": {"and_filter": {"filters": silent}},
        "headers_to_add": [mine, set_header(FLAGS_HEADER, "%RESPONSE_FLAGS%")],
    }
    yield {"filter": cel("response.code >= 400"), "headers_to_add": [mine]}


def _gate(settings: Settings, name: str) -> Data:
    options = {
        "common_http_protocol_options": {"max_headers_count": _MOST_HEADERS, "max_response_headers_kb": _HEADERS_KB},
        "explicit_http_config": {"http_protocol_options": {}},
    }
    cluster = name_of((name,))
    place = {
        "endpoint": {"address": _place(settings, name)},
        "metadata": {"filter_metadata": {HOST: {"upstream": name}}},
    }
    return {
        "name": cluster,
        "type": "STATIC",
        "connect_timeout": "5s",
        "per_connection_buffer_limit_bytes": settings.gateway.max_answer_bytes,
        "circuit_breakers": breakers(),
        "load_assignment": {
            "cluster_name": cluster,
            "endpoints": [{"lb_endpoints": [place]}],
        },
        "typed_extension_protocol_options": {HTTP_PROTOCOLS: typed(HTTP_PROTOCOLS, **options)},
    }


def _order(order: tuple[str, ...]) -> Data:
    kind = "envoy.extensions.clusters.aggregate.v3.ClusterConfig"
    members = [name_of((name,)) for name in order]
    return {
        "name": name_of(order),
        "connect_timeout": "5s",
        "lb_policy": "CLUSTER_PROVIDED",
        "cluster_type": extension("envoy.clusters.aggregate", kind, clusters=members),
        "circuit_breakers": breakers(),
    }


def _largest(settings: Settings) -> int:
    return max(settings.gateway.max_body_bytes, settings.gateway.max_answer_bytes)
