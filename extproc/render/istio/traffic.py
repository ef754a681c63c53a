"""What Istio's own objects have to say about Tidegate: no second try, no limits, no proxy in between.

A sidecar tries a request again unless it is told not to, and takes what fails out of use where a rule of the mesh says
so. Both are wrong for a gateway whose refusals are answers: a retry makes an overload worse, and a breaker before it
makes it an outage.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from extproc.render.istio.target import Target
from extproc.render.shape import Data
from extproc.render.tracing import collector_port
from extproc.settings import Settings

__all__ = ["destination_rule", "ports_left_out", "virtual_service", "virtual_services"]

_NETWORKING = "networking.istio.io/v1"


def virtual_service(host: str, namespace: str | None, to: str, gateway: str | None = None) -> Data:
    """All of `host` goes to `to`, and once. host, to: host:port; gateway: instead of sidecars.

    Without a timeout, which is Istio's default: one of `0s`, as Envoy writes it, would be refused.
    """
    name, (there, _, port) = host.rpartition(":")[0], to.rpartition(":")
    destination = {"host": there, "port": {"number": int(port)}}
    spec = {
        "hosts": [name],
        **({"gateways": [gateway]} if gateway else {}),
        "http": [{"route": [{"destination": destination}], "retries": {"attempts": 0}}],
    }
    return _of("VirtualService", name, namespace, spec)


def virtual_services(target: Target) -> list[Data]:
    """Tidegate's own host has its object where Tidegate is deployed. A gateway's host has one already, as a rule, else
    `attach` says to which Gateway it belongs; its route for what our routes leave is Tidegate's own Envoy.
    """
    if target.attach:
        return [virtual_service(target.host, target.namespace, target.own_host, target.attach)]
    if target.gateway or target.host == target.own_host:
        return []
    return [virtual_service(target.host, target.namespace, target.host)]


def destination_rule(host: str, namespace: str | None = None) -> Data:
    """Plain connections to Tidegate's pods, which have no sidecar, whatever rule there is for all hosts of the mesh.
    host: host:port.
    """
    name = host.rpartition(":")[0]
    return _of("DestinationRule", name, namespace, {"host": name, "trafficPolicy": {"tls": {"mode": "DISABLE"}}})


def ports_left_out(settings: Settings) -> dict[str, str]:
    """Annotations of Tidegate's own pod, should it get a sidecar: who asks it by gRPC are Envoys without an identity of
    the mesh, callers come by plain connections, and what goes out is Envoy's, which has its own TLS and its own limits.
    """
    addresses = [at for at in (settings.service.address, settings.service.health) if at]
    inside = {settings.gateway.port, *(int(at.rpartition(":")[2]) for at in addresses)}
    inside |= {settings.gateway.metrics_port} if settings.gateway.metrics_port else set()
    out = {upstream.port for upstream in settings.upstreams.values()}
    for upstream in settings.upstreams.values():
        if upstream.kv and upstream.kv.prometheus:
            url = urlsplit(upstream.kv.prometheus)
            out.add(url.port or (443 if url.scheme == "https" else 80))
    if (port := collector_port(settings)) is not None:
        out.add(port)
    return {
        "traffic.sidecar.istio.io/excludeInboundPorts": ",".join(map(str, sorted(inside))),
        "traffic.sidecar.istio.io/excludeOutboundPorts": ",".join(map(str, sorted(out))),
    }


def _of(kind: str, host: str, namespace: str | None, spec: Data) -> Data:
    name = "tidegate-" + host.replace("*", "all").replace(".", "-")
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {"apiVersion": _NETWORKING, "kind": kind, "metadata": metadata, "spec": spec}
