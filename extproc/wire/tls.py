"""TLS of the gRPC server and of those who ask it: from files that may be replaced while everything runs.

gRPC asks for the certificates with every handshake. Files are read anew when one of them has become another, be it by
a rename or by the link that Kubernetes swaps. What does not belong together, as in the midst of a renewal, is not
taken: the one before stays, until the next handshake finds better. Connections that are open stay as they are.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import grpc

from extproc.settings import ServiceTlsSettings
from extproc.settings.files import Mark, mark_of

__all__ = ["CertificateError", "channel", "server_credentials"]

log = logging.getLogger(__name__)


class CertificateError(Exception):
    """Certificates that cannot be used. The message says which and why."""


def server_credentials(tls: ServiceTlsSettings) -> grpc.ServerCredentials:
    """Credentials that follow the files. CertificateError when what is there at first cannot be used."""
    followed = _Followed(tls)
    first = followed.newest()
    changed = cast("Callable[[], grpc.ServerCertificateConfiguration]", followed.changed)  # None: go on as before
    return grpc.dynamic_ssl_server_credentials(first, changed, bool(tls.client_ca_file))


_DIRECT = ("grpc.enable_http_proxy", 0)
"""Envoy asks no proxy either; `http_proxy` in the environment is for what is outside."""


def channel(address: str, tls: ServiceTlsSettings | None, server_name: str) -> grpc.Channel:
    """A channel to a Tidegate as Envoy makes one. CertificateError when its files cannot be read."""
    if tls is None:
        return grpc.insecure_channel(address, [_DIRECT])
    read = _read({"ca": tls.ca_file, "cert": tls.client_cert_file, "key": tls.client_key_file})
    trusted = grpc.ssl_channel_credentials(read["ca"], read.get("key"), read.get("cert"))
    return grpc.secure_channel(address, trusted, [_DIRECT, ("grpc.ssl_target_name_override", server_name)])


class _Followed:
    """What the files hold, read again when they are others."""

    def __init__(self, tls: ServiceTlsSettings) -> None:
        """Nothing is read before `newest`."""
        self._files = {"cert": tls.cert_file, "key": tls.key_file, "ca": tls.client_ca_file}
        self._seen: Any = None

    def newest(self) -> grpc.ServerCertificateConfiguration:
        """What is there now. CertificateError when it cannot be used."""
        self._seen = self._marks()
        read = _read(self._files)
        self._belongs_together()
        return grpc.ssl_server_certificate_configuration([(read["key"], read["cert"])], read.get("ca"))

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What is there now if it is something new; None: go on with what you have. Called by gRPC's own threads."""
        if self._marks() == self._seen:
            return None
        try:
            found = self.newest()
        except CertificateError as error:
            log.warning("the certificates of before stay in use: %s", error)
            return None
        log.warning("new certificates are in use")
        return found

    def _marks(self) -> list[Mark]:
        return [mark_of(path) for path in self._files.values() if path]

    def _belongs_together(self) -> None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._files["cert"] or "", self._files["key"])
            if self._files["ca"]:
                context.load_verify_locations(self._files["ca"])
        except (OSError, ValueError) as error:
            raise CertificateError(f"service.tls: {', '.join(filter(None, self._files.values()))}: {error}") from None


def _read(files: Mapping[str, str | None]) -> dict[str, bytes]:
    try:
        return {name: Path(path).read_bytes() for name, path in files.items() if path}
    except OSError as error:
        raise CertificateError(f"service.tls: {error.filename}: {error.strerror}") from None
