"""Where things are in a pod: the settings as both containers read them there, and the ConfigMap that carries them.

Files that the settings name (keys, certificates, key sets) are entries of one Secret, named after whose they are. What
stands in the ConfigMap holds no secret: it only says where the keys are. Envoy's configuration repeats much for each
upstream; where it is larger than a ConfigMap may be, it stands there compressed, and is unpacked in the pod.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from typing import Any

from extproc.render.envoy import RenderError, bootstrap, to_yaml
from extproc.render.shape import Data, is_loopback
from extproc.render.text import plain
from extproc.render.upstream import secret_files
from extproc.settings import AdminSettings, ServiceSettings, Settings, UpstreamSettings

__all__ = [
    "ADMIN_DIR", "COLLECTOR_DIR", "COLLECTOR_FILE", "CONFIG_DIR", "HEADERS", "METRICS_PORT", "NAME", "PACKED", "SDS",
    "SDS_DIR", "SECRET", "SECRETS_DIR", "STATE_DIR", "TLS_DIR", "admin_items", "checksum", "config_items",
    "config_map", "envoys_tls_items", "is_loopback", "is_tidegates", "needed_files", "placed", "tls_items",
]  # fmt: skip

NAME = "tidegate"
SECRET = "tidegate-files"  # noqa: S105 - the name of an object
CONFIG_DIR = "/etc/tidegate/config"
SECRETS_DIR = "/etc/tidegate/files"
TLS_DIR = "/etc/tidegate/tls"
"""What Envoy and Tidegate both read; keys of upstreams are not among it."""
COLLECTOR_DIR, COLLECTOR_FILE = "/etc/tidegate/collector", "headers"
"""What the collector of telemetry wants in headers; both read it."""
ADMIN_DIR = "/etc/tidegate/admin"
"""What proves who may act on the console, and its certificate; Tidegate alone reads them."""
STATE_DIR = "/var/lib/tidegate"
PACKED = "envoy.yaml.gz"
METRICS_PORT = 10005
"""In a gateway's pod, unless the settings name one, or this for something else."""
HEALTH_PORT = 10006
"""The same of the plain health service, where Tidegate speaks TLS."""
SDS = "sds"
SDS_DIR = f"{CONFIG_DIR}/{SDS}"
_MOST = 1_000_000
"""Bytes; Kubernetes takes 1 MiB of data, names and all."""


def placed(settings: Settings, *, sidecar: bool) -> Settings:
    """The settings as they are in a pod. A gateway of its own listens to the pod's network, a sidecar to its pod alone,
    whatever it listens to elsewhere: no policy of the network guards that. So does the console of both.

    RenderError where an address has no meaning in a pod.
    """
    gateway, service = settings.gateway, settings.service
    if service.address.startswith("unix:"):
        raise RenderError("service.address: in a pod it must be host:port; Kubernetes asks its health service by TCP")
    named = settings.model_copy(update={"gateway": gateway.model_copy(update={"secrets_dir": "."})})
    if sidecar:
        heard = gateway.address if is_loopback(gateway.address) else "127.0.0.1"
    else:
        heard = "0.0.0.0" if is_loopback(gateway.address) else gateway.address
    console = _at_home(service.console)
    measured = None if sidecar else gateway.metrics_port or _free(settings, METRICS_PORT)
    asked = service.health and _at_home(service.health) if sidecar else _health(settings, measured)
    moved: dict[str, Any] = {
        "gateway": gateway.model_copy(
            update={
                "address": heard,
                "secrets_dir": SDS_DIR if secret_files(named) else None,
                **({"metrics_port": measured} if measured != gateway.metrics_port else {}),
            }
        ),
        "service": service.model_copy(
            update={
                "address": _at_home(service.address),
                "state_file": _STATE_FILE,
                **({"addresses": ()} if service.addresses else {}),  # an Envoy of a pod asks the one beside it
                **({"console": console} if console != service.console else {}),
                **({"health": asked} if asked != service.health else {}),
                **_tls(service),
            }
        ),
        "upstreams": {name: _upstream(name, upstream) for name, upstream in settings.upstreams.items()},
    }
    if settings.identity.jwt:
        jwt = settings.identity.jwt.model_copy(update={"jwks_file": f"{SECRETS_DIR}/{_JWKS}"})
        moved["identity"] = settings.identity.model_copy(update={"jwt": jwt})
    if settings.telemetry.otlp and settings.telemetry.otlp.headers_file:
        otlp = settings.telemetry.otlp.model_copy(update={"headers_file": f"{COLLECTOR_DIR}/{COLLECTOR_FILE}"})
        moved["telemetry"] = settings.telemetry.model_copy(update={"otlp": otlp})
    if named_files := _admin(settings.admin):
        moved["admin"] = settings.admin.model_copy(update=named_files)
    return settings.model_copy(update=moved)


def _admin(admin: AdminSettings) -> dict[str, str]:
    """Where its files are in a pod; only the folder of what is kept can be written to."""
    moved = {item["path"]: f"{ADMIN_DIR}/{item['path']}" for item in admin_items(admin)}
    return {**moved, **({"audit_file": f"{STATE_DIR}/audit.jsonl"} if admin.audit_file else {})}


def admin_items(admin: AdminSettings) -> list[Data]:
    """Entries of the Secret that Tidegate alone reads, and under which path."""
    return [{"key": f"{_ADMIN}{key}", "path": key} for key in _OF_ADMIN if getattr(admin, key)]


def is_tidegates(entry: str) -> bool:
    """Whether an entry of the Secret is of no use to an Envoy of elsewhere."""
    return entry == HEADERS or entry.startswith(_ADMIN)


_ADMIN = "_admin."
_OF_ADMIN = ("token_file", "cert_file", "key_file", "client_ca_file")
_STATE_FILE = f"{STATE_DIR}/levels.json"
_JWKS = "jwks.json"
HEADERS = "_collector.headers"
"""Of the collector of telemetry. No upstream's name begins so."""
_OF_UPSTREAM = {"key_file": "key", "ca_file": "ca", "client_cert_file": "client.crt", "client_key_file": "client.key"}


def needed_files(settings: Settings) -> dict[str, str]:
    """Entries that the Secret must have -> the file that the settings name."""
    found: dict[str, str] = {}
    for name, upstream in settings.upstreams.items():
        found |= {f"{name}.{entry}": path for key, entry in _OF_UPSTREAM.items() if (path := getattr(upstream, key))}
    if settings.service.tls:
        found |= {_tls_entry(key): path for key, path in settings.service.tls.files.items()}
    if settings.identity.jwt:
        found[_JWKS] = settings.identity.jwt.jwks_file
    if settings.telemetry.otlp and settings.telemetry.otlp.headers_file:
        found[HEADERS] = settings.telemetry.otlp.headers_file
    found |= {item["key"]: getattr(settings.admin, item["path"]) for item in admin_items(settings.admin)}
    return found


def config_map(settings: Settings, name: str = NAME) -> Data:
    """The ConfigMap of settings that are `placed`. RenderError when it is larger than Kubernetes takes."""
    envoy = to_yaml(bootstrap(settings))
    data = {
        "tidegate.yaml": plain(settings.model_dump(mode="json", exclude_unset=True)),
        "envoy.yaml": envoy,
        **{f"{SDS}-{file}": text for file, text in secret_files(settings).items()},
    }
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}
    if _size(config) > _MOST:
        del data["envoy.yaml"]
        config["binaryData"] = {PACKED: base64.b64encode(gzip.compress(envoy.encode(), mtime=0)).decode()}
    if (size := _size(config)) > _MOST:
        raise RenderError(f"the configuration has {size:,} bytes even when compressed, more than a ConfigMap may hold")
    return config


def _size(config: Data) -> int:
    return sum(len(key) + len(text.encode()) for key, text in _entries(config).items())


def _entries(config: Data) -> dict[str, str]:
    return {**config["data"], **config.get("binaryData", {})}


def config_items(config: Data) -> list[Data]:
    """Under which path each entry is mounted."""
    sds = f"{SDS}-"
    return [
        {"key": key, "path": f"{SDS}/{key.removeprefix(sds)}" if key.startswith(sds) else key}
        for key in _entries(config)
    ]


def checksum(config: Data) -> str:
    """Another one for another ConfigMap: as an annotation of a pod it rolls the pods."""
    told = hashlib.sha256()
    for key, text in sorted(_entries(config).items()):
        told.update(f"{len(key)}:{key}{len(text)}:{text}".encode())
    return told.hexdigest()


def _health(settings: Settings, measured: int | None) -> str | None:
    """Where Kubernetes asks a Tidegate that speaks TLS, which its probes cannot; measured: the port of the metrics."""
    service = settings.service
    if service.health:
        return _at_home(service.health)
    return f"127.0.0.1:{_free(settings, HEALTH_PORT, measured)}" if service.tls else None


def _free(settings: Settings, first: int, other: int | None = None) -> int:
    """The first port from `first` on that nothing else in the pod has, such as `other`."""
    gateway, service = settings.gateway, settings.service
    addresses = [address for address in (service.address, service.console, service.health) if address]
    taken = {gateway.port, gateway.admin_port, gateway.probe_port, *(int(a.rpartition(":")[2]) for a in addresses)}
    taken |= {upstream.port for upstream in settings.upstreams.values()}
    return next(port for port in range(first, 65536) if port not in taken | {other})


def _upstream(name: str, upstream: UpstreamSettings) -> UpstreamSettings:
    """Only what is set is changed, so that the file stays as short as it was."""
    moved = {key: f"{SECRETS_DIR}/{name}.{entry}" for key, entry in _OF_UPSTREAM.items() if getattr(upstream, key)}
    return upstream.model_copy(update=moved) if moved else upstream


def _tls(service: ServiceSettings) -> dict[str, Any]:
    """The certificates where they are in a pod. They name Tidegate as they did, though it is on the pod's loopback."""
    if service.tls is None:
        return {}
    moved = {key: f"{TLS_DIR}/{item['path']}" for key, item in zip(service.tls.files, tls_items(service), strict=True)}
    return {"tls": service.tls.model_copy(update={**moved, "server_name": service.server_name})}


def tls_items(service: ServiceSettings) -> list[Data]:
    """Entries of the Secret that are mounted for both, and under which path."""
    return [{"key": _tls_entry(key), "path": key} for key in service.tls.files] if service.tls else []


def envoys_tls_items(service: ServiceSettings) -> list[Data]:
    """Those of them that Envoys of elsewhere read."""
    return [item for item in tls_items(service) if item["path"] in _ENVOYS]


_ENVOYS = frozenset({"ca_file", "client_cert_file", "client_key_file"})


def _tls_entry(key: str) -> str:
    """No upstream's name begins so."""
    return f"_service.{key}"


def _at_home(address: str) -> str:
    """Where Envoy reaches Tidegate, whatever Tidegate listens to: they share the pod's loopback."""
    return f"127.0.0.1:{address.rpartition(':')[2]}"
