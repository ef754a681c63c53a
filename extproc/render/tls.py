"""TLS that Envoy speaks as a client: to upstreams, and to Tidegate.

Certificates, keys and CAs are files that Envoy reads at its start. With `gateway.secrets_dir` it follows them, too: a
file there for each (`tls_secret_files`) tells where it is, and Envoy watches the folder for renames, by which files are
replaced, or the link that Kubernetes swaps. Open connections stay as they are; new ones are made with what is there.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from extproc.render.shape import Data, extension
from extproc.settings import Settings, UpstreamSettings

__all__ = ["BUNDLES", "collector_tls", "is_address", "own_tls", "service_tls", "tls_secret_files", "upstream_tls"]

_CONTEXT = "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
_SECRET = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"  # noqa: S105 - a type
_SERVICE = "_service"
"""No upstream can be called so."""

BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""Where systems keep the certificates they trust; the first is Debian's and that of Envoy's own images."""


def own_tls() -> Data:
    """The transport socket to what is on this loopback and ours: whatever its certificate names is right."""
    return extension("envoy.transport_sockets.tls", _CONTEXT, common_tls_context={"alpn_protocols": ["http/1.1"]})


@dataclass(frozen=True, slots=True)
class _Client:
    """One who is connected to: whom to trust under which name, and what to show.

    name: of its secrets. followed: their folder, None where files are read once.
    """

    name: str
    peer: str
    ca_file: str
    cert_file: str | None
    key_file: str | None
    followed: str | None

    def context(self, alpn: list[str]) -> Data:
        """The transport socket. An address has no name to send, so its certificate must name it."""
        named = {} if is_address(self.peer) else {"sni": self.peer}
        common = {"alpn_protocols": alpn, **self._shown(), **self._trusted()}
        return extension("envoy.transport_sockets.tls", _CONTEXT, **named, common_tls_context=common)

    def secrets(self) -> Iterator[tuple[str, Data]]:
        """What each followed secret holds, by its name."""
        if self.cert_file and self.key_file:
            chain = _pair(self.cert_file, self.key_file)
            yield self._certificate, {"tls_certificate": {**chain, "watched_directory": _folder(self.cert_file)}}
        trusted = {"trusted_ca": {"filename": self.ca_file}, "watched_directory": _folder(self.ca_file)}
        yield self._authority, {"validation_context": trusted}

    @property
    def _certificate(self) -> str:
        return f"{self.name}.certificate"

    @property
    def _authority(self) -> str:
        return f"{self.name}.ca"

    def _shown(self) -> Data:
        if not (self.cert_file and self.key_file):
            return {}
        if self.followed:
            return {"tls_certificate_sds_secret_configs": [self._told(self._certificate)]}
        return {"tls_certificates": [_pair(self.cert_file, self.key_file)]}

    def _trusted(self) -> Data:
        kind = "IP_ADDRESS" if is_address(self.peer) else "DNS"
        named = {"match_typed_subject_alt_names": [{"san_type": kind, "matcher": {"exact": self.peer}}]}
        if not self.followed:
            return {"validation_context": {"trusted_ca": {"filename": self.ca_file}, **named}}
        told = self._told(self._authority)
        return {
            "combined_validation_context": {
                "default_validation_context": named,
                "validation_context_sds_secret_config": told,
            }
        }

    def _told(self, secret: str) -> Data:
        return {"name": secret, "sds_config": {"path_config_source": {"path": f"{self.followed}/{_file(secret)}"}}}


def upstream_tls(settings: Settings, name: str) -> Data:
    """To an upstream: HTTP/2 where it is offered."""
    return _to_upstream(settings, name, settings.upstreams[name]).context(["h2", "http/1.1"])


def service_tls(settings: Settings) -> Data:
    """To Tidegate, where `service.tls` is set: `{transport_socket: ...}`, or nothing."""
    service = _to_service(settings)
    return {"transport_socket": service.context(["h2"])} if service else {}


def collector_tls(host: str) -> Data:
    """To a collector of telemetry, by what the system trusts."""
    return _Client("_collector", host, _system_bundle(), None, None, None).context(["http/1.1"])


def tls_secret_files(settings: Settings) -> dict[str, Data]:
    """What has to be in `gateway.secrets_dir`: file name -> what Envoy reads there."""
    if not settings.gateway.secrets_dir:
        return {}
    clients = [_to_upstream(settings, name, upstream) for name, upstream in settings.upstreams.items() if upstream.tls]
    clients = [client for client in clients if client.followed]
    if (service := _to_service(settings)) is not None:
        clients.append(service)
    return {
        _file(name): {"resources": [{"@type": _SECRET, "name": name, **secret}]}
        for client in clients
        for name, secret in client.secrets()
    }


def is_address(host: str) -> bool:
    """Whether it is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _to_upstream(settings: Settings, name: str, upstream: UpstreamSettings) -> _Client:
    """The system's own bundle is not followed: it changes with the system."""
    own = upstream.ca_file is not None
    return _Client(
        name=f"_tls-{name}",
        peer=upstream.host,
        ca_file=upstream.ca_file or _system_bundle(),
        cert_file=upstream.client_cert_file,
        key_file=upstream.client_key_file,
        followed=settings.gateway.secrets_dir if own or upstream.client_cert_file else None,
    )


def _to_service(settings: Settings) -> _Client | None:
    tls = settings.service.tls
    if tls is None:
        return None
    return _Client(
        name=_SERVICE,
        peer=settings.service.server_name,
        ca_file=tls.ca_file,
        cert_file=tls.client_cert_file,
        key_file=tls.client_key_file,
        followed=settings.gateway.secrets_dir,
    )


def _pair(cert_file: str, key_file: str) -> Data:
    return {"certificate_chain": {"filename": cert_file}, "private_key": {"filename": key_file}}


def _folder(file: str) -> Data:
    return {"path": str(Path(file).parent)}


def _file(secret: str) -> str:
    return f"{secret}.json"


def _system_bundle() -> str:
    return next((path for path in BUNDLES if Path(path).exists()), BUNDLES[0])
