"""The containers of a pod, and how one starts and ends.

Start: Tidegate, then Envoy, then (as a sidecar) the application, each when the one before answers. End: Kubernetes runs
Envoy's hook, which lets answers come to their end (`tidegate drain`), then ends Envoy, and Tidegate last, which has
heard of every outcome by then. A sidecar needs no hook: it is ended when its application, the only caller, has ended.

Whether Tidegate answers decides where its pod gets requests only if there are other replicas. A single one stays in its
Service while Tidegate starts anew, because Envoy's clean refusal with a time to retry says more than no connection.

Everything is done from one image, which holds Envoy, too: its hook needs a program to run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from extproc.render.k8s.placed import (
    ADMIN_DIR,
    COLLECTOR_DIR,
    COLLECTOR_FILE,
    CONFIG_DIR,
    HEADERS,
    NAME,
    PACKED,
    SECRET,
    SECRETS_DIR,
    STATE_DIR,
    TLS_DIR,
    admin_items,
    checksum,
    config_items,
    config_map,
    is_tidegates,
    needed_files,
    placed,
    tls_items,
)
from extproc.render.shape import Data
from extproc.settings import Settings

__all__ = [
    "CHECKSUM", "GRPC", "HTTP", "IMAGE", "LABELS", "METRICS", "STATE_VOLUME", "USER",
    "Fakes", "Sidecar", "pod_template", "sidecar",
]  # fmt: skip

Fakes = Mapping[str, Sequence[str]]
"""Arguments of the fake providers that run in the pod, by upstream."""

IMAGE = f"{NAME}:{version('tidegate')}"
LABELS = {"app.kubernetes.io/name": NAME}
CHECKSUM = "checksum/config"
USER = 65532
HTTP, GRPC, METRICS = "http", "grpc", "metrics"
"""Names of ports."""
SIDECAR_CONFIG = f"{NAME}-sidecar"

_MARGIN_S = 10
"""What ends need besides waiting: hooks start, records arrive, levels are written."""
_WORKERS = 2
_FIRST_FREE_PORT = 1024
_MIB = 1024 * 1024
_CONFIG = ["--config", f"{CONFIG_DIR}/tidegate.yaml"]
_UNPACKED_DIR = "/etc/tidegate/envoy"
_MOUNTS = {
    "config": CONFIG_DIR,
    "files": SECRETS_DIR,
    "state": STATE_DIR,
    "envoy": _UNPACKED_DIR,
    "tls": TLS_DIR,
    "collector": COLLECTOR_DIR,
    "admin": ADMIN_DIR,
}
_VOLUME = "tidegate-{}"
STATE_VOLUME = _VOLUME.format("state")


@dataclass(frozen=True)
class Sidecar:
    """What an application's pod needs: the ConfigMap, and a strategic merge patch of its Deployment."""

    config: Data
    patch: Data


def sidecar(settings: Settings, fakes: Fakes | None = None) -> Sidecar:
    """Tidegate and Envoy beside an application, which calls `http://127.0.0.1:PORT`. Nothing else can reach them."""
    there = placed(settings, sidecar=True)
    config = config_map(there, SIDECAR_CONFIG)
    ready = {"failureThreshold": 60, "periodSeconds": 2, "timeoutSeconds": 10}
    service = {**_service(there), "startupProbe": {"exec": {"command": ["tidegate", "ready", *_CONFIG]}, **ready}}
    envoy = {
        **_envoy(there, config),
        "restartPolicy": "Always",
        "startupProbe": {"exec": {"command": ["tidegate", "ready", "--envoy", *_CONFIG]}, **ready},
    }
    template = {
        "metadata": {"annotations": {CHECKSUM: checksum(config)}},
        "spec": {
            "initContainers": [*_fakes(fakes or {}), service, *_unpacking(there, config), envoy],
            "volumes": _volumes(settings, config),
        },
    }
    patch = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "any"}, "spec": {"template": template}}
    return Sidecar(config, patch)


def pod_template(settings: Settings, config: Data, fakes: Fakes) -> Data:
    """The pod of a gateway of its own, of settings that are `placed`; config: its ConfigMap."""
    return {
        "metadata": {"labels": LABELS, "annotations": {CHECKSUM: checksum(config)}},
        "spec": {
            "serviceAccountName": NAME,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": _grace_s(settings),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                **_low_ports(settings),
            },
            **({"topologySpreadConstraints": [_apart()]} if settings.service.replicas > 1 else {}),
            "initContainers": [*_fakes(fakes), _probed_service(settings), *_unpacking(settings, config)],
            "containers": [_probed_envoy(settings, config)],
            "volumes": _volumes(settings, config),
        },
    }


def _low_ports(settings: Settings) -> Data:
    """Leave for a gateway's port below 1024 to who is not root; a setting that Kubernetes counts as safe."""
    port = settings.gateway.port
    if port >= _FIRST_FREE_PORT:
        return {}
    return {"sysctls": [{"name": "net.ipv4.ip_unprivileged_port_start", "value": str(port)}]}


def _apart() -> Data:
    """Not all on one node, where there are others."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": LABELS},
    }


def _grace_s(settings: Settings) -> int:
    """Envoy's drain, then Tidegate's, which finds nothing left to wait for unless Envoy's was too short."""
    return math.ceil(settings.gateway.drain_s + settings.service.drain_s) + _MARGIN_S


def _probed_service(settings: Settings) -> Data:
    """Tidegate, asked by Kubernetes itself, which comes by the pod's address: it listens there, too."""
    service, port = settings.service, _port(settings.service.address)
    health = _port(service.health) if service.health else port
    asked = {"grpc": {"port": health}, "timeoutSeconds": 3}
    alone = service.replicas == 1
    container = _service(settings)
    listens = [{"name": "TIDEGATE__SERVICE__ADDRESS", "value": f"0.0.0.0:{port}"}]
    listens += [{"name": "TIDEGATE__SERVICE__HEALTH", "value": f"0.0.0.0:{health}"}] if health != port else []
    return {
        **container,
        "env": [*container["env"], *listens],
        "ports": [{"name": GRPC, "containerPort": port}],
        "startupProbe": {**asked, "periodSeconds": 1, "failureThreshold": 120},
        "livenessProbe": {**asked, "periodSeconds": 5, "failureThreshold": 6},
        **({} if alone else {"readinessProbe": {**asked, "periodSeconds": 2, "failureThreshold": 2}}),
    }


def _probed_envoy(settings: Settings, config: Data) -> Data:
    """Envoy, which opens its port when it is ready. Its hook is run before it is told to end."""
    asked = {"tcpSocket": {"port": settings.gateway.port}, "timeoutSeconds": 3}
    return {
        **_envoy(settings, config),
        "ports": [
            {"name": HTTP, "containerPort": settings.gateway.port},
            {"name": METRICS, "containerPort": settings.gateway.metrics_port},
        ],
        "startupProbe": {**asked, "periodSeconds": 1, "failureThreshold": 60},
        "readinessProbe": {**asked, "periodSeconds": 2, "failureThreshold": 2},
        "lifecycle": {"preStop": {"exec": {"command": ["tidegate", "drain", *_CONFIG]}}},
    }


def _service(settings: Settings) -> Data:
    memory = 1024 + math.ceil(settings.queue.max_bytes / _MIB)
    return {
        **_container(settings, "tidegate", ["tidegate", "serve", *_CONFIG], memory),
        "restartPolicy": "Always",
        "volumeMounts": [
            *_mounts("config", read_only=True),
            *(_mounts("tls", read_only=True) if settings.service.tls else []),
            *(_mounts("collector", read_only=True) if HEADERS in needed_files(settings) else []),
            *(_mounts("admin", read_only=True) if admin_items(settings.admin) else []),
            *_mounts("state", read_only=False),
        ],
    }


def _unpacking(settings: Settings, config: Data) -> list[Data]:
    """Unpacks what is too large for a ConfigMap, before Envoy starts."""
    if not _is_packed(config):
        return []
    script = f"gunzip -c {CONFIG_DIR}/{PACKED} > {_UNPACKED_DIR}/envoy.yaml"
    mounts = [*_mounts("config", read_only=True), *_mounts("envoy", read_only=False)]
    return [{**_container(settings, "unpack", ["sh", "-ec", script], 128), "volumeMounts": mounts}]


def _is_packed(config: Data) -> bool:
    return "binaryData" in config


def _envoy(settings: Settings, config: Data) -> Data:
    packed = _is_packed(config)
    file = f"{_UNPACKED_DIR if packed else CONFIG_DIR}/envoy.yaml"
    command = ["envoy", "-c", file, "--disable-hot-restart", "--log-level", "warning"]
    command += ["--concurrency", str(settings.gateway.workers or _WORKERS)]
    collector = HEADERS in needed_files(settings)
    told = {"files": _files(settings), "tls": settings.service.tls, "collector": collector, "envoy": packed}
    more = [name for name, there in told.items() if there]
    mounts = [mount for name in ("config", *more) for mount in _mounts(name, read_only=True)]
    return {
        **_container(settings, "envoy", command, 1024 + math.ceil(settings.queue.max_bytes / _MIB)),
        "volumeMounts": mounts,
    }


def _container(settings: Settings, name: str, command: list[str], memory: int) -> Data:
    """memory: most MiB. TIDEGATE_PORT is ours, though Kubernetes writes one for a Service that is called tidegate."""
    return {
        "name": name,
        "image": IMAGE,
        "command": command,
        "env": [{"name": "TIDEGATE_PORT", "value": str(settings.gateway.port)}],
        "resources": {
            "requests": {"cpu": "500m", "memory": f"{min(512, memory)}Mi"},
            "limits": {"memory": f"{memory}Mi"},
        },
        "securityContext": _locked(),
    }


def _fakes(fakes: Fakes) -> list[Data]:
    """The demo's providers, so that it can be tried. Names that differ go on differing where only letters are left."""
    plain = [re.sub(r"[^a-z0-9]+", "-", name.lower())[:50].strip("-") for name in fakes]
    return [
        {
            "name": f"fake-{plain[i]}" if plain.count(plain[i]) == 1 else f"fake-{i}-{plain[i]}",
            "image": IMAGE,
            "restartPolicy": "Always",
            "command": ["tidegate", "fake-provider", *arguments],
            "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
            "securityContext": _locked(),
        }
        for i, arguments in enumerate(fakes.values())
    ]


def _locked() -> Data:
    """Also in a pod that is not ours."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _mounts(what: str, *, read_only: bool) -> list[Data]:
    path = _MOUNTS[what]
    return [{"name": _VOLUME.format(what), "mountPath": path, **({"readOnly": True} if read_only else {})}]


def _volumes(settings: Settings, config: Data) -> list[Data]:
    named = {"name": config["metadata"]["name"], "items": config_items(config)}
    tls, files, collector = tls_items(settings.service), _files(settings), HEADERS in needed_files(settings)
    whole, told = {"secretName": SECRET}, [{"key": HEADERS, "path": COLLECTOR_FILE}]
    admin = admin_items(settings.admin)
    some = _items(files) if tls or collector or admin else {}
    return [
        {"name": _VOLUME.format("config"), "configMap": named},
        *([{"name": _VOLUME.format("files"), "secret": {**whole, **some}}] if files else []),
        *([{"name": _VOLUME.format("tls"), "secret": {**whole, "items": tls}}] if tls else []),
        *([{"name": _VOLUME.format("collector"), "secret": {**whole, "items": told}}] if collector else []),
        *(
            [{"name": _VOLUME.format("admin"), "secret": {**whole, "items": admin, "defaultMode": 0o440}}]
            if admin
            else []
        ),
        *([{"name": _VOLUME.format("envoy"), "emptyDir": {"sizeLimit": "64Mi"}}] if _is_packed(config) else []),
        {"name": STATE_VOLUME, "emptyDir": {"sizeLimit": "64Mi"}},
    ]


def _files(settings: Settings) -> list[str]:
    """Entries of the Secret that only Envoy reads."""
    others = {item["key"] for item in tls_items(settings.service)}
    return sorted(entry for entry in needed_files(settings).keys() - others if not is_tidegates(entry))


def _items(entries: list[str]) -> Data:
    return {"items": [{"key": entry, "path": entry} for entry in entries]}


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
