"""Who is calling, in which lane, and in which session.

A client names itself by what it can prove: a key whose SHA-256 is on file, a JWT claim that Envoy verified, or a header
that only trusted proxies can set. It may ask for a lane its tenant may use, and for nothing better than that.

Keys are only ever kept as digests; the caller's fingerprint is the first part of one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from extproc.core.policy import Tenant
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Session

__all__ = ["Caller", "Directory", "lane_of", "session_of"]

LANE_HEADER = "x-tidegate-priority"
KEY_HEADERS = ("authorization", "x-api-key", "api-key")
FINGERPRINT_CHARS = 16
SESSION_CHARS = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant, and the fingerprint of the credential it came with (empty when it brought none)."""

    tenant: Tenant
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Directory:
    """How to tell who is calling. sources: as the settings name them, tried in order.

    reject_unknown: refuse a caller that no source names, instead of calling it the tenant `default`.
    """

    tenants: Mapping[str, Tenant]
    sources: Sequence[str]
    reject_unknown: bool
    keys: Mapping[str, str] = field(default_factory=dict)

    def identify(self, headers: Mapping[str, str], claims: Mapping[str, Any]) -> Caller:
        """The caller. Rejected as unauthenticated when it is unknown and that is not allowed."""
        digests = _digests(headers)
        known = next((digest for digest in digests if digest in self.keys), next(iter(digests), ""))
        fingerprint = known[:FINGERPRINT_CHARS]
        for source in self.sources:
            kind, _, name = source.partition(":")
            if kind == "api_key":
                tenant = self.keys.get(known, "")
            else:
                tenant = headers.get(name, "") if kind == "header" else str(claims.get(name, ""))
            if tenant in self.tenants:
                return Caller(self.tenants[tenant], fingerprint)
        if self.reject_unknown:
            raise Rejected(Reason.UNAUTHENTICATED, "the caller matches no tenant")
        return Caller(self.tenants["default"], fingerprint)


def lane_of(tenant: Tenant, headers: Mapping[str, str], lanes: Mapping[str, Any]) -> str:
    """The lane a request is in. Rejected when it asks for one that does not exist or that its tenant may not use."""
    asked = headers.get(LANE_HEADER, "").strip()
    if not asked:
        return tenant.default_lane
    lane = next((name for name in lanes if name.lower() == asked.lower()), None)
    if lane is None:
        raise Rejected(Reason.BAD_REQUEST, f"{LANE_HEADER}: there is no lane {asked[:40]!r}")
    if lane not in tenant.lanes:
        raise Rejected(Reason.FORBIDDEN, f"this tenant may not use lane {lane}")
    return lane


def session_of(named: Sequence[str], caller: Caller, now: float, window_s: float) -> Session:
    """The first name that is usable, else one derived from tenant and key in a window of time."""
    for name in named:
        if name and len(name) <= SESSION_CHARS and name.isprintable():
            return Session(name)
    return Session(f"{caller.tenant.name}/{caller.fingerprint or 'anonymous'}/{int(now // window_s)}", derived=True)


def _digests(headers: Mapping[str, str]) -> list[str]:
    """Of everything that may be a key: a token that proves nothing must not hide the key behind it."""
    digests = []
    for name in KEY_HEADERS:
        value = headers.get(name)
        if value:
            scheme, _, rest = value.partition(" ")
            key = rest.strip() if scheme.lower() == "bearer" and rest else value
            digests.append(hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest())
    return digests
