"""The clusters: one for each upstream, named like it, and the service itself; in the classic profile see also `gates`.

Envoy's own limits are set out of the way: how much an upstream gets is admission's decision, and a breaker of Envoy's
would turn an admitted request away. The default of three parallel retries would lose most failovers of an outage.
"""

from __future__ import annotations

from extproc.render.gates import gate_clusters
from extproc.render.names import SERVICE_CLUSTER, one_service
from extproc.render.shape import HTTP_PROTOCOLS, Data, address, breakers, seconds, typed
from extproc.render.tls import is_address, service_tls, upstream_tls
from extproc.render.upstream import upstream_filters
from extproc.settings import Settings, UpstreamSettings

__all__ = ["clusters"]

_NOBODY = ("127.0.0.1", 1)
"""Where a name that has no address leads, with the lowest priority: a refused connection lets the router go on to the
next upstream, while a cluster without any host would end the request."""


def clusters(settings: Settings) -> list[Data]:
    """Every cluster, upstreams first."""
    return [
        *(_upstream(settings, name) for name in settings.upstreams),
        *(gate_clusters(settings) if settings.gateway.profile == "classic" else []),
        *_services(settings),
    ]


def _upstream(settings: Settings, name: str) -> Data:
    upstream = settings.upstreams[name]
    own = {} if settings.gateway.profile == "classic" else {"http_filters": upstream_filters(settings, name)}
    return {
        "name": name,
        "connect_timeout": seconds(upstream.connect_timeout_s),
        **_upstream_address(name, upstream),
        "lb_policy": "LEAST_REQUEST",
        "per_connection_buffer_limit_bytes": settings.gateway.max_answer_bytes,
        "circuit_breakers": breakers(),
        **({"transport_socket": upstream_tls(settings, name)} if upstream.tls else {}),
        "typed_extension_protocol_options": {
            HTTP_PROTOCOLS: typed(HTTP_PROTOCOLS, **_protocol(upstream), **own),
        },
    }


def _upstream_address(name: str, upstream: UpstreamSettings) -> Data:
    endpoint = {"hostname": _host_header(upstream), "address": address(upstream.host, upstream.port)}
    reserve = [] if is_address(upstream.host) else [{"address": address(*_NOBODY)}]
    return _where(upstream.host, _endpoints(name, endpoint, *reserve))


def _protocol(upstream: UpstreamSettings) -> Data:
    """HTTP/2 where TLS negotiates it; HTTP/1.1 on plain connections."""
    if upstream.tls:
        return {"auto_config": {"http_protocol_options": {}, "http2_protocol_options": {}}}
    return {"explicit_http_config": {"http_protocol_options": {}}}


def _host_header(upstream: UpstreamSettings) -> str:
    host = f"[{upstream.host}]" if ":" in upstream.host else upstream.host
    return host if upstream.port == (443 if upstream.tls else 80) else f"{host}:{upstream.port}"


def _services(settings: Settings) -> list[Data]:
    """All Tidegates together, for admission; and each by itself where there are several."""
    service = settings.service
    each = [_service(settings, one_service(rank), where) for rank, where in enumerate(service.addresses)]
    return [_service(settings, SERVICE_CLUSTER, *(service.addresses or (service.address,))), *each]


def _service(settings: Settings, name: str, *addresses: str) -> Data:
    """Tidegate itself: admission, access logs and health on one connection.

    Nobody may wait for a hung service. New requests are refused after two failed checks: a lone unhealthy host is not
    tried all the same. Requests that are held end with their connection, and only unanswered pings end that: failed
    checks do not close HTTP/2 connections, not even with `close_connections_on_host_health_failure`. Running answers go
    on. A gRPC server answers pings from a thread of its own, so that a busy service stays connected; it has to be told
    not to mind them (`grpc.http2.max_ping_strikes=0`), or it ends quiet connections, and with them what is held.
    """
    return {
        "name": name,
        "connect_timeout": "1s",
        **_service_address(name, addresses),
        **service_tls(settings),
        "lb_policy": "LEAST_REQUEST",
        "circuit_breakers": breakers(),
        **(_health() if name == SERVICE_CLUSTER else {}),
        "typed_extension_protocol_options": {
            HTTP_PROTOCOLS: typed(
                HTTP_PROTOCOLS,
                explicit_http_config={
                    "http2_protocol_options": {"connection_keepalive": {"interval": "1.5s", "timeout": "3s"}}
                },
            )
        },
    }


def _health() -> Data:
    """Who is asked. One of several is told what it has let go whether it is known to be well again or not."""
    check = {
        "interval": "1s",
        "timeout": "1s",
        "no_traffic_interval": "1s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "grpc_health_check": {},
    }
    return {"common_lb_config": {"healthy_panic_threshold": {"value": 0}}, "health_checks": [check]}


def _service_address(name: str, addresses: tuple[str, ...]) -> Data:
    if addresses[0].startswith("unix:"):
        pipe = {"pipe": {"path": addresses[0].removeprefix("unix:")}}
        return {"type": "STATIC", "load_assignment": _endpoints(name, {"address": pipe})}
    places = [(host.strip("[]"), int(port)) for host, _, port in (one.rpartition(":") for one in addresses)]
    ends = [{"endpoint": {"address": address(host, port)}} for host, port in places]
    named = next((host for host, _ in places if not is_address(host)), places[0][0])
    return _where(named, {"cluster_name": name, "endpoints": [{"lb_endpoints": ends}]})


def _where(host: str, assignment: Data) -> Data:
    """An address is taken as it is; a name is looked up, and looked up again."""
    if is_address(host):
        return {"type": "STATIC", "load_assignment": assignment}
    return {"type": "STRICT_DNS", "dns_lookup_family": "V4_PREFERRED", "load_assignment": assignment}


def _endpoints(name: str, *by_priority: Data) -> Data:
    places = [
        {**({"priority": rank} if rank else {}), "lb_endpoints": [{"endpoint": endpoint}]}
        for rank, endpoint in enumerate(by_priority)
    ]
    return {"cluster_name": name, "endpoints": places}
