"""A listener for those who collect metrics: two pages, and nothing else of what those who serve them can do.

Tidegate's console also changes things, and so does Envoy's admin page; both stay on the loopback. What is reached here
is `GET /metrics` of the one and `GET /stats/prometheus` of the other. There only with `gateway.metrics_port`.
"""

from __future__ import annotations

from extproc.render.filters import router
from extproc.render.listener import connection_manager
from extproc.render.shape import Data, address
from extproc.render.tls import own_tls
from extproc.settings import Settings

__all__ = ["PAGES", "metrics_clusters", "metrics_listeners"]

PAGES = {"/metrics": "tidegate:console", "/stats/prometheus": "tidegate:envoy"}
"""Path -> cluster. No upstream can have such a name: a colon is not allowed in theirs."""


def metrics_listeners(settings: Settings) -> list[Data]:
    """The listener, where there is to be one."""
    gateway = settings.gateway
    if gateway.metrics_port is None:
        return []
    hosts = [{"name": "metrics", "domains": ["*"], "routes": [*map(_page, PAGES), _nothing()]}]
    manager = connection_manager(
        stat_prefix="metrics",
        stream_idle_timeout="15s",
        route_config={"name": "metrics", "virtual_hosts": hosts},
        http_filters=[router()],
    )
    return [
        {
            "name": "metrics",
            "address": address(gateway.address, gateway.metrics_port),
            "filter_chains": [{"filters": [manager]}],
        }
    ]


def metrics_clusters(settings: Settings) -> list[Data]:
    """Where the pages are: both on the loopback, whatever else the console listens to."""
    if settings.gateway.metrics_port is None:
        return []
    console = int(settings.service.console.rpartition(":")[2])
    ports = {"tidegate:console": console, "tidegate:envoy": settings.gateway.admin_port}
    encrypted = {"tidegate:console"} if settings.admin.cert_file else set()
    return [_cluster(name, port, tls=name in encrypted) for name, port in ports.items()]


def _page(path: str) -> Data:
    get = {"name": ":method", "string_match": {"exact": "GET"}}
    return {
        "name": PAGES[path],
        "match": {"path": path, "headers": [get]},
        "route": {"cluster": PAGES[path], "timeout": "15s", "host_rewrite_literal": "localhost"},
    }


def _nothing() -> Data:
    return {"name": "nothing", "match": {"prefix": "/"}, "direct_response": {"status": 404}}


def _cluster(name: str, port: int, *, tls: bool) -> Data:
    endpoint = {"endpoint": {"address": address("127.0.0.1", port)}}
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]}
    cluster = {"name": name, "type": "STATIC", "connect_timeout": "1s", "load_assignment": assignment}
    return {**cluster, "transport_socket": own_tls()} if tls else cluster
