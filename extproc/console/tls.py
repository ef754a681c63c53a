"""TLS of the console: from files that may be replaced while it runs, with client certificates for those who have one.

Each handshake looks whether the files have changed. What does not belong together, as in the midst of a renewal, is not
taken: what was there before stays in use, until the next handshake finds better. A certificate proves something only
while the file of the CA is the one that it was shown under; then whoever shows it has to shake hands again.
"""

from __future__ import annotations

import logging
import ssl
from typing import Any

from extproc.settings import AdminSettings
from extproc.settings.files import Mark, mark_of

__all__ = ["ca_mark", "context_of", "subject_of"]

log = logging.getLogger("tidegate")


def context_of(admin: AdminSettings) -> ssl.SSLContext | None:
    """What the console shakes hands with; None without TLS. The files are taken to be good (proof.problems)."""
    if admin.cert_file is None or admin.key_file is None:
        return None
    seen, newest = _marks(admin), _read(admin)

    def follow(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        nonlocal seen, newest
        if (marks := _marks(admin)) != seen:
            seen = marks
            try:
                newest = _read(admin)
                log.warning("the console's new certificates are in use")
            except (OSError, ValueError) as error:
                log.warning("the console's certificates of before stay in use: %s", error)
        connection.context = newest

    first = newest
    first.sni_callback = follow
    return first


def ca_mark(admin: AdminSettings) -> Mark:
    """Another one for another file of the CA whose clients may act."""
    return mark_of(admin.client_ca_file) if admin.client_ca_file else None


def subject_of(certificate: dict[str, Any]) -> str:
    """Who a verified certificate says that its owner is: its subject, or its first name where that is empty."""
    named = [f"{_short(key)}={each}" for part in certificate.get("subject", ()) for key, each in part]
    names = [f"{kind}:{name}" for kind, name in certificate.get("subjectAltName", ())]
    return ",".join(named) or (names[0] if names else "a certificate without a name")


def _short(key: str) -> str:
    return {"commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU"}.get(key, key)


def _read(admin: AdminSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(admin.cert_file or "", admin.key_file)
    if admin.client_ca_file is not None:
        context.load_verify_locations(admin.client_ca_file)
        context.verify_mode = ssl.CERT_OPTIONAL  # health and metrics, and a page that asks for the token, need none
        # Nobody comes back by a session of before without its certificate being looked at: by then that of another CA
        # may count. Before TLS 1.3 there is no way to forbid that.
        context.minimum_version, context.num_tickets = ssl.TLSVersion.TLSv1_3, 0
    return context


def _marks(admin: AdminSettings) -> list[Mark]:
    return [mark_of(path) for path in (admin.cert_file, admin.key_file, admin.client_ca_file) if path]
