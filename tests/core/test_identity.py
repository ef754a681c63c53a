"""Who is calling, in which lane, in which session."""

from __future__ import annotations

import hashlib

import pytest

from extproc.core.identity import Caller, Directory, lane_of, session_of
from extproc.core.policy import Tenant
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Session

TENANTS = {name: Tenant(name, ("P0", "P1"), "P1") for name in ("default", "chat", "etl")}
LANES = dict.fromkeys(["P0", "P1", "P2"])


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def directory(*sources: str, reject: bool = False) -> Directory:
    return Directory(TENANTS, sources, reject, {digest("sk-chat"): "chat", digest("sk-gone"): "deleted"})


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ({"authorization": "Bearer sk-chat"}, "chat"),
        ({"authorization": "bearer   sk-chat "}, "chat"),
        ({"authorization": "sk-chat"}, "chat"),
        ({"x-api-key": "sk-chat"}, "chat"),
        ({"api-key": "sk-chat"}, "chat"),
        ({"authorization": "", "x-api-key": "sk-chat"}, "chat"),
        ({"authorization": "Basic sk-chat"}, "default"),
        ({"authorization": "Bearer sk-other"}, "default"),
        ({"authorization": "Bearer sk-gone"}, "default"),
        ({"authorization": "Bearer"}, "default"),
        ({"authorization": "Bearer "}, "default"),
        ({"authorization": "Bearer \udcff"}, "default"),
        ({}, "default"),
    ],
)
def test_a_key_names_its_tenant_in_any_of_the_usual_headers(headers: dict[str, str], tenant: str) -> None:
    """The key's digest is looked up; an unknown key, or one of a tenant that is gone, is an unknown caller."""
    assert directory("api_key").identify(headers, {}).tenant.name == tenant


def test_sources_are_tried_in_order_and_only_known_tenants_count() -> None:
    """The first source that names a known tenant wins; one that names an unknown tenant is passed over."""
    who = directory("jwt:team", "header:x-tenant", "api_key")
    headers = {"x-tenant": "etl", "authorization": "Bearer sk-chat"}
    assert who.identify(headers, {"team": "chat"}).tenant.name == "chat"
    assert who.identify(headers, {"team": "nobody"}).tenant.name == "etl"
    assert who.identify(headers, {"team": ["etl"]}).tenant.name == "etl"
    assert who.identify({"authorization": "Bearer sk-chat"}, {}).tenant.name == "chat"


def test_a_source_that_is_not_configured_is_never_believed() -> None:
    """A tenant header counts only where the settings name it as trusted."""
    assert directory("api_key").identify({"x-tenant": "etl"}, {"team": "etl"}).tenant.name == "default"


def test_an_unknown_caller_is_the_default_tenant_or_refused() -> None:
    """As configured; and a caller that is named is never refused."""
    with pytest.raises(Rejected) as refused:
        directory("api_key", reject=True).identify({"authorization": "Bearer nope"}, {})
    assert refused.value.reason is Reason.UNAUTHENTICATED
    assert "nope" not in str(refused.value)
    assert directory("api_key", reject=True).identify({"x-api-key": "sk-chat"}, {}).tenant.name == "chat"


def test_the_fingerprint_is_the_beginning_of_a_digest() -> None:
    """It tells keys apart without keeping one; who brings no key has none."""
    who = directory("api_key")
    assert who.identify({"x-api-key": "sk-chat"}, {}).fingerprint == digest("sk-chat")[:16]
    assert who.identify({}, {}).fingerprint == ""


@pytest.mark.parametrize(
    ("asked", "lane"),
    [(None, "P1"), ("", "P1"), ("  ", "P1"), ("P0", "P0"), ("p0", "P0"), (" P1 ", "P1")],
)
def test_a_lane_is_asked_for_by_name(asked: str | None, lane: str) -> None:
    """The tenant's default when none is asked for; case and blanks do not matter."""
    assert lane_of(TENANTS["chat"], {} if asked is None else {"x-tidegate-priority": asked}, LANES) == lane


@pytest.mark.parametrize(("asked", "reason"), [("P2", Reason.FORBIDDEN), ("P9", Reason.BAD_REQUEST)])
def test_a_lane_that_is_not_ones_own_is_refused(asked: str, reason: Reason) -> None:
    """A lane the tenant may not use is forbidden; one that does not exist is a bad request."""
    with pytest.raises(Rejected) as refused:
        lane_of(TENANTS["chat"], {"x-tidegate-priority": asked}, LANES)
    assert refused.value.reason is reason


def test_the_first_usable_name_is_the_session() -> None:
    """Empty, overlong and unprintable names are passed over."""
    caller = Caller(TENANTS["chat"], "abc")
    assert session_of(["", "x" * 257, "a\nb", "task-7", "later"], caller, 0.0, 60) == Session("task-7")


@pytest.mark.parametrize(("fingerprint", "who"), [("abc", "chat/abc"), ("", "chat/anonymous")])
def test_without_a_name_the_session_is_tenant_and_key_in_a_window(fingerprint: str, who: str) -> None:
    """Derived sessions are marked as such and change with the window."""
    caller = Caller(TENANTS["chat"], fingerprint)
    early, late = (session_of([], caller, now, 60) for now in (119.9, 120.0))
    assert (early, late) == (Session(f"{who}/1", derived=True), Session(f"{who}/2", derived=True))
