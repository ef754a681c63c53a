"""TLS between Envoy and Tidegate as it will go, played in memory: `tidegate check` finds out before anybody starts.

Both ends are made from the files of `service.tls` and shake hands. What a certificate is worth is decided by OpenSSL,
which sees every step that matters: the chain up to the CA, the name, the dates, what a certificate may be used for.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from extproc.settings import ServiceTlsSettings

__all__ = ["SOON_DAYS", "pair_problem", "problems", "soon_over"]

SOON_DAYS = 14
_DAY_S = 86_400.0
_STEPS = 10
"""More than a handshake has."""

_STRANGERS = frozenset({18, 19, 20, 21})
"""What OpenSSL calls chains that lead to nobody who is trusted, by their form."""

Certificate = dict[str, Any]
"""As the standard library tells it."""


class _BrokenOffError(Exception):
    """A handshake that failed. Its text says where and why."""


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a handshake: whom it trusts, and what it shows."""

    trusted: str | None
    cert: str | None
    key: str | None

    def context(self, kind: int) -> ssl.SSLContext:
        """OSError (ssl.SSLError is one) when a file cannot be used."""
        context = ssl.SSLContext(kind)
        if self.cert and self.key:
            context.load_cert_chain(self.cert, self.key)
        if self.trusted:
            context.load_verify_locations(self.trusted)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def problems(tls: ServiceTlsSettings, name: str) -> list[str]:
    """What keeps Envoy and Tidegate from talking, a line each; `name` is what Tidegate's certificate must name."""
    if unusable := list(_unusable(tls)):
        return unusable
    try:
        _handshake(tls, name)
    except _BrokenOffError as error:
        return [str(error)]
    return []


def soon_over(tls: ServiceTlsSettings, name: str, now: float) -> Iterator[str]:
    """Which certificates end within SOON_DAYS of `now` (seconds since the epoch), a line each. Without `problems`."""
    shown = _handshake(tls, name)
    for what, path in tls.files.items():
        certificates = [*shown.get(what, ()), *(() if what.endswith("key_file") else _authorities(path))]
        left_s = min((_ends(each) - now for each in certificates), default=SOON_DAYS * _DAY_S)
        if left_s < SOON_DAYS * _DAY_S:
            yield f"service.tls.{what}: {path} ends in {left_s / _DAY_S:.1f} days"


def pair_problem(cert: str, key: str) -> str | None:
    """Why a certificate and a key are none, or do not belong together."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except ssl.SSLError as error:
        mismatch = error.reason == "KEY_VALUES_MISMATCH"
        return f"{cert} does not belong to {key}" if mismatch else f"{cert}, {key}: {_said(error)}"
    except OSError as error:
        return f"{cert}, {key}: {error.strerror}"
    return None


def _unusable(tls: ServiceTlsSettings) -> Iterator[str]:
    pairs = {"cert_file": (tls.cert_file, tls.key_file)}
    if tls.client_cert_file and tls.client_key_file:
        pairs["client_cert_file"] = tls.client_cert_file, tls.client_key_file
    for what, (cert, key) in pairs.items():
        if problem := pair_problem(cert, key):
            yield f"service.tls.{what}: {problem}"
    for what in ("ca_file", "client_ca_file"):
        if (path := tls.files.get(what)) and not _authorities(path):
            yield f"service.tls.{what}: {path}: no certificate of a CA"


def _handshake(tls: ServiceTlsSettings, name: str) -> dict[str, list[Certificate]]:
    """What each end shows, by where it is named. _BrokenOffError when they do not come to terms."""
    server = _End(tls.client_ca_file, tls.cert_file, tls.key_file).context(ssl.PROTOCOL_TLS_SERVER)
    client = _End(tls.ca_file, tls.client_cert_file, tls.client_key_file).context(ssl.PROTOCOL_TLS_CLIENT)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    judges = {
        "cert_file": client.wrap_bio(to_client, to_server, server_hostname=name),
        "client_cert_file": server.wrap_bio(to_server, to_client, server_side=True),
    }
    for _ in range(_STEPS):
        for judged, end in judges.items():
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                why = error.verify_message
                if error.verify_code in _STRANGERS:
                    why = f"not issued by the CA in {tls.files[judged.replace('cert', 'ca')]}"
                raise _BrokenOffError(f"service.tls.{judged}: {tls.files[judged]}: {why}") from None
            except ssl.SSLError as error:
                raise _BrokenOffError(f"service.tls: {_said(error)}") from None
    return {judged: [peer] for judged, end in judges.items() if (peer := end.getpeercert())}


def _authorities(path: str) -> list[Certificate]:
    """The certificates of CAs in a file, none where it cannot be read as such."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except OSError:
        return []
    return context.get_ca_certs()


def _ends(cert: Certificate) -> float:
    return float(ssl.cert_time_to_seconds(cert["notAfter"]))


def _said(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
