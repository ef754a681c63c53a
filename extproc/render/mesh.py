"""`tidegate render istio`: from options to text."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable, Iterator

from extproc.render import istio, k8s
from extproc.render.shape import Data
from extproc.render.text import plain
from extproc.render.upstream import secret_files
from extproc.settings import Settings

__all__ = ["for_istio"]

_KEYS = "tidegate-sds"
"""The ConfigMap that tells Envoy where the keys are."""
_TIDEGATES = ("cert_file", "key_file", "client_ca_file")
_ABOUT = """\
# Rendered by Tidegate from its settings; change those, not this. {}
#   tidegate render istio ... | kubectl apply --server-side -f -      (it is too large for kubectl's own annotation)
# Tidegate itself: overlays/istio of `tidegate k8s --write`.
"""
_PROXIES = {
    "native": "It takes Envoy 1.40 or newer, and an istiod as new.",
    "classic": "It takes Envoys before 1.40, too.",
}
_LET_IN = """\
# Its NetworkPolicy lets in pods with the label {}: "true"; the patched pods need it.
"""
_MOUNTED = """\
# Mount these in the istio-proxy containers before this is applied. In a gateway's Deployment: volumes, and volumeMounts
# of its container istio-proxy. Where sidecars are injected, annotations of the pods:
#   sidecar.istio.io/userVolume: '{}'
#   sidecar.istio.io/userVolumeMount: '{}'
"""


def for_istio(
    settings: Settings,
    *,
    gateway: bool,
    namespace: str,
    labels: Iterable[str],
    host: str | None = None,
    service: str | None = None,
    listener_port: int | None = None,
    attach: str | None = None,
    alone: bool = False,
    proxy_version: str | None = None,
) -> str:
    """All objects for one workload's Envoys, as `kubectl apply` takes them. RenderError where options make no sense."""
    target = istio.target_of(
        settings,
        gateway=gateway,
        namespace=namespace,
        labels=labels,
        own_host=k8s.own_host(settings),
        service=service or _service(settings),
        host=host,
        listener_port=listener_port,
        attach=attach,
        alone=alone,
        proxy_version=proxy_version,
    )
    there = k8s.placed(settings, sidecar=True)
    keys = secret_files(there)
    config = {"name": _KEYS, "namespace": namespace}
    documents = [
        *([{"apiVersion": "v1", "kind": "ConfigMap", "metadata": config, "data": keys}] if keys else []),
        *istio.envoy_filters(there, target),
        *istio.virtual_services(target),
    ]
    about = _ABOUT.format(_PROXIES[settings.gateway.profile]) + (
        "" if target.beside else _LET_IN.format(k8s.CLIENT_LABEL)
    )
    needed = k8s.secret_hint(settings, namespace, _tidegates(settings)) + "".join(_mounted(settings, keys))
    return about + needed + "---\n".join(map(plain, documents))


def _tidegates(settings: Settings) -> frozenset[str]:
    """Entries of the Secret that only Tidegate reads: by what it proves itself, and by whom it knows Envoys."""
    items = k8s.tls_items(settings.service)
    return frozenset([k8s.HEADERS, *(item["key"] for item in items if item["path"] in _TIDEGATES)])


def _service(settings: Settings) -> str:
    """Where Tidegate is: as the settings say if that is a place for all, else as `tidegate k8s` puts it there."""
    host, _, port = settings.service.address.rpartition(":")
    return k8s.headless_host(settings) if _is_nowhere(host) or not port.isdigit() else settings.service.address


def _is_nowhere(host: str) -> bool:
    """Whether `host` is another place for everybody, or all addresses of one."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host in ("", "localhost")
    return address.is_loopback or address.is_unspecified


def _mounted(settings: Settings, keys: Data) -> Iterator[str]:
    there: list[tuple[str, Data, str]] = []
    tls = [item for item in k8s.tls_items(settings.service) if item["key"] not in _tidegates(settings)]
    if k8s.needed_files(settings).keys() - _tidegates(settings):
        there.append(("tidegate-files", {"secret": {"secretName": k8s.SECRET}}, k8s.SECRETS_DIR))
    if tls:
        there.append(("tidegate-tls", {"secret": {"secretName": k8s.SECRET, "items": tls}}, k8s.TLS_DIR))
    if keys:
        there.append((_KEYS, {"configMap": {"name": _KEYS}}, k8s.SDS_DIR))
    if there:
        volumes = [{"name": name, **volume} for name, volume, _ in there]
        mounts = [{"name": name, "mountPath": path, "readOnly": True} for name, _, path in there]
        yield _MOUNTED.format(json.dumps(volumes), json.dumps(mounts))
