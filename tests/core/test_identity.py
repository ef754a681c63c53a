"""Who is calling, in which lane, in which session."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.identity import Caller, Directory, lane_of, place_of, quoted, session_of
from extproc.core.policy import Tenant
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Session

TENANTS = {name: Tenant(name, ("P0", "P1"), "P1") for name in ("default", "chat", "etl")}
LANES = dict.fromkeys(["P0", "P1", "P2"])


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def directory(*sources: str, reject: bool = False, anybody: Tenant | None = None) -> Directory:
    return Directory(TENANTS, sources, reject, {digest("sk-chat"): "chat", digest("sk-gone"): "deleted"}, anybody)


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


ANYBODY = Tenant("*", ("P1",), "P1", tpm=500)


@pytest.mark.parametrize("name", ["acme", "org/team", "70%", "租户", "a" * 128, "*x", "a b"])
def test_a_source_may_name_tenants_that_nobody_listed(name: str) -> None:
    """Each under its own name, with the rules of all of them; nobody else's name is taken for it."""
    who = directory("jwt:team", "header:x-tenant", anybody=ANYBODY)
    for caller in (who.identify({"x-tenant": name}, {}), who.identify({}, {"team": name})):
        assert (caller.tenant.name, caller.tenant.tpm, caller.tenant.lanes) == (name, 500, ("P1",))
    assert who.identify({"x-tenant": "etl"}, {}).tenant is TENANTS["etl"]


def test_who_is_named_first_is_the_tenant_listed_or_not() -> None:
    """The order of the sources decides, and a source that names nobody is passed over."""
    who = directory("jwt:team", "header:x-tenant", anybody=ANYBODY)
    assert who.identify({"x-tenant": "etl"}, {"team": "acme"}).tenant.name == "acme"
    assert who.identify({"x-tenant": "acme"}, {"team": "etl"}).tenant.name == "etl"
    assert who.identify({"x-tenant": "acme"}, {}).tenant.name == "acme"


@pytest.mark.parametrize(
    "name", ["", " ", "*", " acme", "acme ", "a" * 129, "a\nb", "a\x00", "a\u202eb", "\udcff", "a\tb", "a\u200bb"]
)
def test_a_name_that_is_none_is_passed_over(name: str) -> None:
    """Empty, overlong, unprintable or padded names, and the star, are an unknown caller: the default, or refused."""
    for who, headers, claims in (
        (directory("header:x-tenant", anybody=ANYBODY), {"x-tenant": name}, {}),
        (directory("jwt:team", anybody=ANYBODY), {}, {"team": name}),
    ):
        assert who.identify(headers, claims).tenant.name == "default"
    with pytest.raises(Rejected):
        directory("header:x-tenant", reject=True, anybody=ANYBODY).identify({"x-tenant": name}, {})


@pytest.mark.parametrize(
    ("claim", "tenant"),
    [
        ("acme", "acme"),
        (42.0, "42"),
        (42, "42"),
        (float(2**53), "default"),
        (1.5, "default"),
        (float("nan"), "default"),
        (float("inf"), "default"),
        (True, "default"),
        (None, "default"),
        (["acme"], "default"),
        ({"name": "acme"}, "default"),
    ],
)
def test_a_claim_is_a_name_when_it_is_text_or_a_whole_number(claim: object, tenant: str) -> None:
    """What a JWT's number can no longer tell apart, and anything with parts, names nobody."""
    assert directory("jwt:team", anybody=ANYBODY).identify({}, {"team": claim}).tenant.name == tenant


def test_an_unknown_key_never_names_a_tenant() -> None:
    """However many tenants are allowed: a key that is not on file proves nothing."""
    who = directory("api_key", anybody=ANYBODY)
    assert who.identify({"x-api-key": "sk-other"}, {}).tenant.name == "default"
    assert who.identify({"x-api-key": "sk-gone"}, {}).tenant.name == "default"


@given(st.text(), st.text())
def test_different_names_never_share_a_key(a: str, b: str) -> None:
    """A slash in a name is not the slash of a key."""
    assert (place_of(a) == place_of(b)) == (a == b)
    assert "/" not in quoted(a)
    assert quoted("team-a.b_c") == "team-a.b_c"


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
