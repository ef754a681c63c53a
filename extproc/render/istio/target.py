"""Which Envoys of a mesh are patched, and where in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from extproc.render.envoy import RenderError
from extproc.render.shape import is_loopback
from extproc.settings import Settings

__all__ = ["Target", "target_of"]

_LABEL_KEY = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_HOST = re.compile(r"(\*|(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?):([0-9]{1,5})")
_SERVICE = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?:([0-9]{1,5})")
_PORTS = range(1, 65536)


@dataclass(frozen=True, slots=True)
class Target:
    """Envoys of one workload. `host` and `service` are host:port."""

    gateway: bool
    """A gateway's listeners, else those for what a caller's sidecar sends out."""
    namespace: str
    labels: Mapping[str, str]
    """Of the workload's pods."""
    host: str
    """Name of the virtual host whose LLM paths are taken, as `istioctl proxy-config routes` shows it."""
    own_host: str
    """Tidegate's own Envoy, as callers in the mesh reach it."""
    service: str
    """Where the patched Envoys reach Tidegate."""
    listener_port: int | None = None
    """Only listeners on this port of the pod; all when absent."""
    attach: str | None = None
    """namespace/name of an Istio Gateway that is to serve `host`."""
    alone: bool = False
    """The listeners serve nothing but LLM paths, so that what holds for a whole listener may be set, too."""
    proxy_version: str | None = None
    """Regular expression: only proxies of such an Istio version."""

    @property
    def context(self) -> str:
        """Istio's word for it."""
        return "GATEWAY" if self.gateway else "SIDECAR_OUTBOUND"

    @property
    def beside(self) -> bool:
        """Whether Tidegate is in the same pod as the patched Envoy."""
        return is_loopback(self.service.rpartition(":")[0])


def target_of(
    settings: Settings,
    *,
    gateway: bool,
    namespace: str,
    labels: Iterable[str],
    own_host: str,
    service: str,
    host: str | None = None,
    listener_port: int | None = None,
    attach: str | None = None,
    alone: bool = False,
    proxy_version: str | None = None,
) -> Target:
    """The target that options name; labels are `key=value`. RenderError where they make no sense."""
    if host is None and gateway:
        raise RenderError("--host: which host of the gateway? As `istioctl proxy-config routes` shows it: host:port")
    host = host or own_host
    if not (found := _HOST.fullmatch(host)) or int(found[4]) not in _PORTS:
        raise RenderError(f"--host {host}: must be host:port, as `istioctl proxy-config routes` shows virtual hosts")
    if not (told := _SERVICE.fullmatch(service)) or int(told[2]) not in _PORTS:
        raise RenderError(f"--service {service}: must be host:port")
    if not _NAMESPACE.fullmatch(namespace):
        raise RenderError(f"--namespace {namespace}: no name of a namespace")
    if attach and (not gateway or not re.fullmatch(r"[a-z0-9.-]+/[a-z0-9.-]+", attach)):
        raise RenderError(f"--attach {attach}: must be namespace/name of an Istio Gateway, and goes with --gateway")
    target = Target(
        gateway=gateway,
        namespace=namespace,
        labels=_labels(labels),
        host=host,
        own_host=own_host,
        service=service,
        listener_port=listener_port or (None if gateway else int(found[4])),
        attach=attach,
        alone=alone,
        proxy_version=_expression(proxy_version),
    )
    _reachable(settings, target)
    return target


def _labels(given: Iterable[str]) -> dict[str, str]:
    """Without any, Istio would patch every proxy of the namespace, and of the whole mesh in its root namespace."""
    found: dict[str, str] = {}
    for one in given:
        key, is_there, value = one.partition("=")
        if not (is_there and _LABEL_KEY.fullmatch(key) and _LABEL_VALUE.fullmatch(value)):
            raise RenderError(f"--label {one}: must be key=value, a label of the pods to patch")
        found[key] = value
    if not found:
        raise RenderError("--label: which pods? Without a label every proxy of the namespace would be patched")
    return found


def _expression(pattern: str | None) -> str | None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise RenderError(f"--proxy-version {pattern}: {error}") from None
    return pattern


def _reachable(settings: Settings, target: Target) -> None:
    """RenderError for what would be somebody else there."""
    if target.beside:
        return
    lost = [name for name, upstream in settings.upstreams.items() if is_loopback(upstream.host)]
    if lost:
        raise RenderError(
            f"upstreams.{lost[0]}.url: {settings.upstreams[lost[0]].url} is another place in every pod of the mesh; "
            "name one that all can reach, or put Tidegate and it beside the Envoy (--service 127.0.0.1:PORT)"
        )
    if settings.service.replicas > 1:
        raise RenderError(
            "service.replicas: an Envoy asks one replica and tells another how it ended; with Envoys of a mesh there "
            "is one replica, or each stands beside its gateway (--service 127.0.0.1:PORT)"
        )
