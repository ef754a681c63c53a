"""Which sessions are known: by tenant, bounded, forgotten when silent, never while one of their calls is under way."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.budget import Budget
from extproc.core.capacity import Claim
from extproc.core.policy import SessionLimits
from extproc.core.session import DROP, LOOK, Known, Sessions

LIMITS = SessionLimits(max_tokens=1000, max_usd=2.0, idle_s=60.0)


def known_in(sessions: Sessions, *names: str, now: float = 0.0) -> set[str]:
    """Which of these, as tenant:id, are known."""
    return {name for name in names if sessions.find(*name.split(":"), now)}


def test_a_session_belongs_to_its_tenant() -> None:
    """The same id under another tenant is another session, with counters of its own."""
    sessions = Sessions(10)
    mine, _ = sessions.hear("a", "s", LIMITS, 0.0)
    theirs, _ = sessions.hear("b", "s", LIMITS, 0.0)
    assert mine is not theirs
    assert not set(mine.keys) & set(theirs.keys)
    assert sessions.hear("a", "s", LIMITS, 1.0) == (mine, [])
    assert len(sessions) == 2


@given(st.text(), st.text(), st.text(), st.text())
def test_no_two_sessions_share_a_counter(tenant: str, session: str, other_tenant: str, other: str) -> None:
    """Whatever slashes their names hold."""
    one, two = (Known(t, s, LIMITS, 0.0) for t, s in ((tenant, session), (other_tenant, other)))
    same = (tenant, session) == (other_tenant, other)
    assert (one.tokens_key == two.tokens_key) == (one.usd_key == two.usd_key) == same
    assert all(key.count("/") == 3 for key in one.keys)


@pytest.mark.parametrize(
    ("most", "keys", "claims"),
    [
        ((None, None), (), []),
        ((1000, None), ("session/a/s/tokens",), [Claim("session/a/s/tokens", 100.0)]),
        ((None, 2.0), ("session/a/s/usd",), [Claim("session/a/s/usd", 0.5)]),
    ],
)
def test_only_what_is_limited_is_counted(
    most: tuple[int | None, float | None], keys: tuple[str, ...], claims: list[Claim]
) -> None:
    """A session without limits has no counters. A call whose cost nobody knows yet still needs a budget that is left;
    one that is free needs none.
    """
    known = Known("a", "s", SessionLimits(*most), 0.0)
    assert known.keys == tuple(known.counters(0.0)) == keys
    assert known.claims(100.0, 0.5) == claims
    assert [claim.amount for claim in known.claims(0.0, 0.0)] == [0.0] * len(claims)
    assert not any(claim.key.endswith("usd") for claim in known.claims(100.0, None))


def test_a_sessions_counters_are_budgets_for_good() -> None:
    """Nothing of them comes back by itself; those in shadow mode only count."""
    for shadow in ((), ("max_tokens",), ("max_usd",)):
        limits = SessionLimits(max_tokens=1000, max_usd=2.0, shadow=frozenset(shadow))
        known, _ = Sessions(1).hear("a", "s", limits, 5.0)
        counters = known.counters(5.0)
        assert counters == {
            "session/a/s/tokens": Budget(1000, at=5.0, shadow="max_tokens" in shadow),
            "session/a/s/usd": Budget(2.0, at=5.0, shadow="max_usd" in shadow),
        }
        assert {counter.wait_for(5000.0, 1e9) for counter in counters.values()} == {inf}


def test_a_session_is_fresh_until_it_was_served() -> None:
    """Having called is not enough; another tenant's session of that name does not count."""
    sessions = Sessions(10)
    assert sessions.fresh("a", "s")
    known, _ = sessions.hear("a", "s", LIMITS, 0.0)
    assert sessions.fresh("a", "s")
    known.served = True
    assert not sessions.fresh("a", "s")
    assert sessions.fresh("a", "t")
    assert sessions.fresh("b", "s")


def test_a_silent_session_is_forgotten_with_all_it_used() -> None:
    """After its time without a call; a call of that name begins a new one, and names the old one as gone."""
    sessions = Sessions(10)
    old, _ = sessions.hear("a", "s", LIMITS, 0.0)
    assert sessions.hear("a", "s", LIMITS, 60.0) == (old, [])
    assert sessions.find("a", "s", 120.0) is old
    assert sessions.find("a", "s", 120.1) is None
    new, gone = sessions.hear("a", "s", LIMITS, 120.1)
    assert new is not old
    assert gone == [old]
    assert len(sessions) == 1


def test_a_session_under_way_is_not_silent() -> None:
    """However long its call takes; its time begins when that has ended."""
    sessions = Sessions(10)
    known, _ = sessions.hear("a", "s", LIMITS, 0.0)
    known.pins += 1
    assert sessions.find("a", "s", 1000.0) is known
    assert sessions.forget_silent(1000.0) == []
    known.ended(1000.0)
    assert sessions.forget_silent(1060.0) == []
    assert sessions.forget_silent(1060.1) == [known]
    assert len(sessions) == 0


def test_the_silent_are_forgotten_bit_by_bit() -> None:
    """However many there are at once, one step forgets some, and in the end all are gone."""
    sessions = Sessions(5000)
    for i in range(2 * DROP):
        sessions.hear("many", str(i), LIMITS, 0.0)
    for i in range(2 * LOOK):
        sessions.hear(f"tenant-{i}", "s", LIMITS, 0.0)
    sessions.hear("awake", "s", LIMITS, 90.0)
    steps = []
    while len(sessions) > 1:
        steps.append(len(sessions.forget_silent(100.0)))
        assert len(steps) < 50
    assert max(steps) <= DROP
    assert sum(steps) == 2 * DROP + 2 * LOOK
    assert sessions.forget_silent(100.0) == []
    assert known_in(sessions, "awake:s", now=100.0) == {"awake:s"}


def test_a_tenant_that_went_since_the_round_began_is_passed_over() -> None:
    """Its sessions may all have been pushed out between two steps."""
    sessions = Sessions(LOOK + 1)
    for i in range(LOOK + 1):
        sessions.hear(f"tenant-{i}", "s", LIMITS, 0.0)
    sessions.forget_silent(0.0)
    sessions.hear("newcomer", "s", LIMITS, 0.0)
    sessions.hear("newcomer", "t", LIMITS, 0.0)
    assert len(sessions) == LOOK + 1
    assert sessions.forget_silent(0.0) == []


def test_a_flood_of_sessions_pushes_out_its_own() -> None:
    """The oldest first; those of other tenants stay, and so do those that are used meanwhile."""
    sessions = Sessions(10)
    quiet = [f"quiet:{i}" for i in range(5)]
    for name in quiet:
        sessions.hear(*name.split(":"), LIMITS, 0.0)
    gone: list[Known] = []
    for i in range(100):
        gone += sessions.hear("loud", str(i), LIMITS, float(i))[1]
        sessions.hear("loud", "0", LIMITS, float(i))
        assert len(sessions) <= 10
    assert known_in(sessions, *quiet) == set(quiet)
    assert {each.tenant for each in gone} == {"loud"}
    assert known_in(sessions, "loud:0", "loud:99", "loud:1") == {"loud:0", "loud:99"}


def test_a_tenant_with_less_than_its_part_gets_room() -> None:
    """From the one that has the most: its oldest."""
    sessions = Sessions(10)
    for i in range(10):
        sessions.hear("loud", str(i), LIMITS, 0.0)
    _, [gone] = sessions.hear("new", "s", LIMITS, 1.0)
    assert (gone.tenant, gone.id) == ("loud", "0")
    _, [gone] = sessions.hear("newer", "s", LIMITS, 2.0)
    assert (gone.tenant, gone.id) == ("loud", "1")
    assert known_in(sessions, "new:s", "newer:s") == {"new:s", "newer:s"}


def test_who_is_under_way_is_never_forgotten() -> None:
    """The bound gives way; with the newcomers after they have ended it holds again."""
    sessions = Sessions(3)
    running = [sessions.hear("a", str(i), LIMITS, 0.0)[0] for i in range(3)]
    for each in running:
        each.pins += 1
    extra, gone = sessions.hear("a", "extra", LIMITS, 0.0)
    assert (gone, len(sessions)) == ([], 4)
    assert sessions.hear("b", "s", LIMITS, 0.0)[1] == [extra]
    for each in running:
        each.pins -= 1
    counts = [(sessions.hear("a", f"later-{i}", LIMITS, 0.0), len(sessions))[1] for i in range(3)]
    assert counts == [3, 3, 3]


calls = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(0, 5).map(str),
        st.sampled_from(["call", "begin", "end", "sweep"]),
        st.floats(0, 50),
    ),
    max_size=60,
)


@given(st.integers(1, 8), calls)
def test_whatever_is_called_the_books_of_sessions_agree(limit: int, history: list[tuple]) -> None:
    """What is told as gone was known and is so no more; nobody under way goes; the bound holds but for those."""
    sessions, alive, open_calls, now = Sessions(limit), {}, Counter(), 0.0
    for tenant, name, what, seconds in history:
        now += seconds
        before, room = len(sessions), any(not known.pins for known in alive.values())
        if what == "sweep":
            gone = sessions.forget_silent(now)
            assert all(each.silent(now) for each in gone)
        elif what == "end":
            gone = []
            if open_calls[tenant, name]:
                open_calls[tenant, name] -= 1
                alive[tenant, name].ended(now)
        else:
            known, gone = sessions.hear(tenant, name, LIMITS, now)
            assert all(each is not known for each in gone)
        for each in gone:
            assert not each.pins
            assert alive.pop((each.tenant, each.id)) is each
        if what in ("call", "begin"):
            assert alive.setdefault((tenant, name), known) is known
            open_calls[tenant, name] += what == "begin"
            known.pins += what == "begin"
        assert len(sessions) == len(alive)
        assert len(sessions) <= max(limit, before + (not room))
        for (of, each), known in alive.items():
            assert (sessions.find(of, each, now) is known) == (not known.silent(now))
