"""Who is calling, in which lane, and in which session.

A client names itself by what it can prove: a key whose SHA-256 is on file, a JWT claim that Envoy verified, or a header
that only trusted proxies can set. It may ask for a lane its tenant may use, and for nothing better than that.

A claim or a trusted header may name tenants that nobody listed, where the rules say so. Such a name comes from outside:
it has to be short and printable, and it is quoted where it becomes part of a key, so that no tenant's name reads as
another's. An API key never names an unlisted tenant: the one that is not on file proves nothing.

Keys are only ever kept as digests; the caller's fingerprint is the first part of one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from extproc.core.policy import Tenant
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Session

__all__ = ["Caller", "Directory", "lane_of", "place_of", "quoted", "session_of"]

LANE_HEADER = "x-tidegate-priority"
KEY_HEADERS = ("authorization", "x-api-key", "api-key")
FINGERPRINT_CHARS = 16
SESSION_CHARS = 256
TENANT_CHARS = 128
"""Longest name of a tenant that nobody listed."""
EXACT = 2**53
"""From here on different whole numbers become the same one on their way through a JWT."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant, and the fingerprint of the credential it came with (empty when it brought none)."""

    tenant: Tenant
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Directory:
    """How to tell who is calling. sources: as the settings name them, tried in order.

    reject_unknown: refuse a caller that no source names, instead of calling it the tenant `default`. any_tenant: rules
    of tenants that a source names but nobody listed; without it such a name is passed over.
    """

    tenants: Mapping[str, Tenant]
    sources: Sequence[str]
    reject_unknown: bool
    keys: Mapping[str, str] = field(default_factory=dict)
    any_tenant: Tenant | None = None

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
                tenant = headers.get(name, "") if kind == "header" else _claimed(claims.get(name))
            if tenant in self.tenants:
                return Caller(self.tenants[tenant], fingerprint)
            if self.any_tenant is not None and kind != "api_key" and _is_name(tenant):
                return Caller(_named(self.any_tenant, tenant), fingerprint)
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


def place_of(tenant: str) -> str:
    """Where the counters of a tenant's own allowance are, among all that is counted."""
    return f"tenant/{quoted(tenant)}"


def quoted(name: str) -> str:
    """`name` as one segment of a key: two different names never make the same one, whatever slashes they hold."""
    return name.replace("%", "%25").replace("/", "%2F") if "/" in name or "%" in name else name


@lru_cache(maxsize=8192)
def _named(rules: Tenant, name: str) -> Tenant:
    return replace(rules, name=name)


def _is_name(name: str) -> bool:
    """Whether a tenant that nobody listed may be called so. A star would read as the rules of all of them."""
    return 0 < len(name) <= TENANT_CHARS and name.isprintable() and name.strip() == name != "*"


def _claimed(claim: object) -> str:
    """A claim as a name: text, or a whole number that a JSON number tells from its neighbours. Nothing else is one."""
    if isinstance(claim, str):
        return claim
    if isinstance(claim, bool) or not isinstance(claim, int | float):
        return ""
    return str(int(claim)) if abs(claim) < EXACT and claim == claim // 1 else ""


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
