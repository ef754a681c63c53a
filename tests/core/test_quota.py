"""What a tenant may use: its counters, and which tenants that nobody listed are counted."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget, Period
from extproc.core.capacity import Claim, Counter
from extproc.core.policy import Dollars, KvRules, Route, Tenant, Upstream
from extproc.core.quota import (
    LOOK,
    Account,
    Accounts,
    account_of,
    begins_anew,
    hour_ends,
    purse,
    purse_keys,
    rests,
    route_place,
    upstream_place,
)
from extproc.core.request import Dialect
from extproc.core.watermark import Watermark

FULL = Tenant("t", ("P1",), "P1", tpm=600, rpm=60, concurrency=3, dollars=Dollars(2.0, 9.0, 70.0))
ANYBODY = Tenant("*", ("P1",), "P1", rpm=60)
HOUR_S, DAY_S = 3600.0, 86_400.0


def always(_: Account) -> bool:
    return True


def never(_: Account) -> bool:
    return False


def test_a_request_takes_of_everything_that_is_limited() -> None:
    """A slot, a request, its tokens, and its dollars of the hour, the day and the month."""
    assert set(account_of(FULL).claims(100.0, 0.5)) == {
        Claim("tenant/t/slots", 1.0),
        Claim("tenant/t/requests", 1.0),
        Claim("tenant/t/total", 100.0),
        Claim("tenant/t/usd_hour", 0.5),
        Claim("tenant/t/usd_day", 0.5),
        Claim("tenant/t/usd_month", 0.5),
    }


def test_what_costs_nothing_needs_no_budget() -> None:
    """None is free: a spent budget does not stop it. Zero is unknown yet: it needs one that is left."""
    account = account_of(Tenant("t", (), "", dollars=Dollars(per_day=9.0)))
    assert account.claims(100.0, None) == []
    assert account.claims(100.0, 0.0) == [Claim("tenant/t/usd_day", 0.0)]


def test_a_tenant_without_limits_takes_nothing() -> None:
    """And has no counters."""
    account = account_of(Tenant("t", (), ""))
    assert (account.claims(100.0, 0.5), account.keys, account.counters(0.0, 0.0)) == ([], (), {})


def test_the_counters_are_those_that_are_taken_of() -> None:
    """Buckets are full, slots free, budgets untouched; hours, days and months are the calendar's."""
    account, offset = account_of(FULL), 1_000_000.0
    counters = account.counters(7.0, offset)
    assert set(counters) == set(account.keys)
    assert counters["tenant/t/total"] == TokenBucket(10.0, 600.0, 600.0, 7.0)
    assert counters["tenant/t/requests"] == TokenBucket(1.0, 60.0, 60.0, 7.0)
    assert counters["tenant/t/slots"] == Slots(3)
    assert counters["tenant/t/usd_hour"] == Budget(2.0, Period.HOUR, epoch_offset=offset, at=7.0)
    assert counters["tenant/t/usd_day"] == Budget(9.0, Period.DAY, epoch_offset=offset, at=7.0)
    assert counters["tenant/t/usd_month"] == Budget(70.0, Period.MONTH, epoch_offset=offset, at=7.0)
    assert all(rests(counter, 7.0) for counter in counters.values())


@pytest.mark.parametrize(
    ("limit", "key"),
    [
        ("tpm", "total"),
        ("rpm", "requests"),
        ("concurrency", "slots"),
        ("usd_per_hour", "usd_hour"),
        ("usd_per_day", "usd_day"),
        ("usd_per_month", "usd_month"),
    ],
)
def test_a_limit_in_shadow_mode_only_counts(limit: str, key: str) -> None:
    """That one, and no other."""
    rules = Tenant("t", (), "", (), 600, 60, 3, Dollars(2.0, 9.0, 70.0), shadow=frozenset({limit}))
    counters = account_of(rules).counters(0.0, 0.0)
    assert {name for name, counter in counters.items() if counter.shadow} == {f"tenant/t/{key}"}


@pytest.mark.parametrize(
    ("counter", "resting"),
    [
        (TokenBucket(1.0, 10.0, 5.0, 0.0), False),
        (TokenBucket(1.0, 10.0, 5.0, -5.0), True),
        (Slots(3, 1.0), False),
        (Slots(3), True),
        (Budget(5.0, Period.HOUR, used=1.0), False),
        (Budget(5.0, Period.HOUR, used=1.0, at=-1.0), True),
        (Budget(5.0, used=1.0), False),
        (Watermark(KvRules()), True),
        (None, True),
    ],
)
def test_a_counter_rests_when_it_would_be_no_different_anew(counter: Counter | None, resting: bool) -> None:  # noqa: FBT001
    """Full, free or untouched in this period. What is not counted rests."""
    assert rests(counter, 0.0) is resting


def test_upstreams_and_routes_have_purses() -> None:
    """Of the periods that are limited, under a name of their own; a limit in shadow mode only counts."""
    dollars = Dollars(per_hour=2.0, per_month=70.0)
    upstream, route = Upstream("a", "openai", frozenset(Dialect)), Route("0:m/x", ("m/x", "m/y"), ("a",))
    assert purse_keys(upstream_place(upstream), dollars) == ("upstream/a/usd_hour", "upstream/a/usd_month")
    assert purse_keys(route_place(route), dollars) == ("route/m%2Fx/usd_hour", "route/m%2Fx/usd_month")
    assert purse("p", dollars, frozenset({"usd_per_month"}), 7.0, 100.0) == {
        "p/usd_hour": Budget(2.0, Period.HOUR, epoch_offset=100.0, at=7.0),
        "p/usd_month": Budget(70.0, Period.MONTH, epoch_offset=100.0, at=7.0, shadow=True),
    }
    assert purse("p", Dollars(), frozenset(), 7.0, 100.0) == {}


def test_unlisted_tenants_have_accounts_of_their_own() -> None:
    """By name, with the rules of all of them; the same one at every request."""
    accounts = Accounts(ANYBODY, 10)
    a, _ = accounts.hear("a", always)
    b, _ = accounts.hear("b/x", always)
    assert (a.keys, b.keys) == (("tenant/a/requests",), ("tenant/b%2Fx/requests",))
    assert (a.rules.name, a.rules.rpm) == ("a", 60)
    assert accounts.hear("a", always) == (a, [])
    assert len(accounts) == 2


def test_where_nothing_is_limited_nobody_is_remembered() -> None:
    """However many tenants there are."""
    accounts = Accounts(Tenant("*", (), ""), 10)
    found = {id(accounts.hear(str(i), always)[0]) for i in range(100)}
    assert (len(found), len(accounts)) == (1, 0)


def test_of_the_oldest_one_that_rests_is_forgotten() -> None:
    """Though an older one was heard of before it; when none rests, the oldest of all."""
    accounts = Accounts(ANYBODY, 3)
    for name in "abcb":
        accounts.hear(name, always)
    assert [each.rules.name for each in accounts.hear("d", lambda account: account.rules.name == "c")[1]] == ["c"]
    assert [each.rules.name for each in accounts.hear("e", never)[1]] == ["a"]
    assert [each.rules.name for each in accounts.hear("f", always)[1]] == ["b"]


def test_whoever_has_open_books_is_not_forgotten() -> None:
    """The bound gives way, and is reached again with the newcomers after their end."""
    accounts = Accounts(ANYBODY, 3)
    running = [accounts.hear(name, always)[0] for name in "abc"]
    for each in running:
        each.pins += 1
    assert accounts.hear("d", always)[1] == []
    assert accounts.hear("e", always)[1] != []
    assert len(accounts) == 4
    for each in running:
        each.ended(0.0)
    assert len(accounts.hear("f", always)[1]) == 2
    assert len(accounts) == 3


def test_many_with_open_books_do_not_hide_the_one_without() -> None:
    """However far behind them it stands."""
    accounts = Accounts(ANYBODY, 3 * LOOK)
    for i in range(3 * LOOK - 1):
        accounts.hear(str(i), always)[0].pins += 1
    idle, _ = accounts.hear("idle", always)
    assert accounts.hear("newcomer", never)[1] == [idle]


names = st.sampled_from("abcdefgh")


@given(st.integers(1, 5), st.lists(st.tuples(names, st.sampled_from(["call", "begin", "end"]), st.sets(names))))
def test_whatever_comes_accounts_agree(limit: int, history: list[tuple[str, str, Iterable[str]]]) -> None:
    """What is told as gone was known and has no open books; a newcomer makes room for itself where that is possible."""
    accounts, alive = Accounts(ANYBODY, limit), {}
    for name, what, resting in history:
        if what == "end":
            if name in alive and alive[name].pins:
                alive[name].ended(0.0)
            continue
        before, room = len(accounts), any(not account.pins for account in alive.values())
        account, gone = accounts.hear(name, lambda account, resting=resting: account.rules.name in resting)
        for each in gone:
            assert not each.pins
            assert alive.pop(each.rules.name) is each
        assert alive.setdefault(name, account) is account
        account.pins += what == "begin"
        assert len(accounts) == len(alive) <= max(limit, before + (not room))


@pytest.mark.parametrize(
    ("key", "before", "now", "anew"),
    [
        ("tenant/t/usd_hour", 0.0, HOUR_S - 0.1, False),
        ("tenant/t/usd_hour", 0.0, HOUR_S, True),
        ("tenant/t/usd_day", 0.0, HOUR_S, False),
        ("tenant/t/usd_day", DAY_S - 1, DAY_S, True),
        ("tenant/t/usd_day", DAY_S, DAY_S - 1, False),
        ("tenant/t/usd_month", 0.0, 31 * DAY_S - 1, False),
        ("route/m/usd_month", 30 * DAY_S, 31 * DAY_S, True),
        ("session/t/s/usd", 0.0, inf, False),
        ("tenant/t/total", 0.0, 1e9, False),
    ],
)
def test_a_period_begins_with_the_calendars(key: str, before: float, now: float, anew: bool) -> None:  # noqa: FBT001
    """An hour with the hour, a day with the day; what has no period never begins anew, and no clock that went back."""
    assert begins_anew(key, before, now, 0.0) is anew
    if now < inf:
        assert begins_anew(key, before - 1800.0, now - 1800.0, 1800.0) is anew


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_no_period_ends_within_an_hour_of_the_calendar(now: float, offset: float) -> None:
    """Until its end every budget of an hour or a day is in the period it is in now; then the hour's is not."""
    end = hour_ends(now, offset)
    assert now - 1e-3 <= end <= now + HOUR_S + 1e-3
    for key in ("tenant/t/usd_hour", "tenant/t/usd_day", "tenant/t/usd_month"):
        assert not begins_anew(key, now, end - 1e-3, offset)
    assert begins_anew("tenant/t/usd_hour", now - 1e-3, end + 1e-3, offset)
