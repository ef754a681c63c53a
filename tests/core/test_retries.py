"""Retries: how many of them may wait, when the others may come back, and the places of those who left."""

from __future__ import annotations

import random
from collections import deque
from math import ceil, exp, inf, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.policy import RetryRules
from extproc.core.retries import KEPT_S, LENT_S, LONGEST_WAIT_S, MOST_ALIKE, TAU_S, Places, RetryBudget

NOTHING = RetryRules(share=0.0, least_per_s=0.0)


def waiting(budget: RetryBudget, tenant: str, now: float, count: int) -> int:
    """How many of so many retries at once may wait."""
    return sum(budget.spend(tenant, now) == 0.0 for _ in range(count))


def test_a_tenant_that_only_now_came_has_a_little_to_begin_with() -> None:
    """Ten seconds of what it is given in any case, and one where that is less."""
    assert waiting(RetryBudget(RetryRules(share=0.1, least_per_s=2.0)), "t", 0.0, 100) == 20
    assert waiting(RetryBudget(NOTHING), "t", 0.0, 100) == 1


@pytest.mark.parametrize(("share", "least"), [(0.1, 1.0), (0.1, 0.0), (0.0, 1.0), (0.5, 0.2)])
def test_in_a_storm_a_share_of_the_traffic_may_wait(share: float, least: float) -> None:
    """100 requests per second and five times as many retries: their share of the traffic and the least, not more."""
    budget, granted, seconds = RetryBudget(RetryRules(share, least)), 0, 300
    for tick in range(seconds * 100):
        now = tick / 100
        budget.came("t", now)
        granted += waiting(budget, "t", now, 5)
    allowed = seconds * (100 * share + least)
    assert allowed * 0.98 - 1 <= granted <= allowed + TAU_S * least + 1


def test_what_was_not_used_is_forgotten() -> None:
    """An hour of traffic without a retry allows no more at once than ten seconds of it would."""
    budget = RetryBudget(RetryRules(share=0.1, least_per_s=1.0))
    for tick in range(36_000):
        budget.came("t", tick / 10)
    assert waiting(budget, "t", 3600.0, 1000) == pytest.approx(TAU_S * (0.1 * 10 + 1.0), abs=1)


def test_tenants_do_not_pay_for_each_other() -> None:
    """A storm of one leaves the budget of another as it was."""
    budget = RetryBudget(RetryRules(share=0.1, least_per_s=1.0))
    waiting(budget, "stormy", 0.0, 1000)
    assert budget.spend("stormy", 0.0) > 0.0
    assert budget.spend("calm", 0.0) == 0.0


def test_the_refused_come_back_one_after_another() -> None:
    """At the rate at which the budget grows: at the time that each is told, there is enough for it."""
    budget = RetryBudget(RetryRules(share=0.0, least_per_s=2.0))
    waiting(budget, "t", 100.0, 20)
    told = [budget.spend("t", 100.0) for _ in range(10)]
    assert told == pytest.approx([0.5 * (place + 1) for place in range(10)])
    for wait in told:
        assert budget.spend("t", 100.0 + wait) == 0.0


def test_nobody_is_told_to_wait_longer_than_the_sdks_would() -> None:
    """However many are refused; and the line is worked off as time passes."""
    budget = RetryBudget(RetryRules(share=0.0, least_per_s=1.0))
    told = [budget.spend("t", 0.0) for _ in range(1000)]
    assert max(told) == LONGEST_WAIT_S
    waiting(budget, "t", 200.0, 10)
    assert budget.spend("t", 200.0) == pytest.approx(1.0)


def test_the_told_time_knows_how_much_traffic_there_is() -> None:
    """With traffic, the budget grows faster than by the least alone."""
    budget = RetryBudget(RetryRules(share=0.1, least_per_s=1.0))
    for tick in range(10_000):
        budget.came("t", tick / 100)
    assert waiting(budget, "t", 100.0, 110) > 50
    told = [wait for _ in range(110) if (wait := budget.spend("t", 100.0))]
    assert told[0] < 0.2
    assert told[20] - told[0] < 3.0


def test_where_nothing_is_allowed_no_time_helps() -> None:
    """A budget that never grows says so."""
    budget = RetryBudget(NOTHING)
    budget.spend("t", 0.0)
    assert budget.spend("t", 0.0) == inf


def test_accounts_are_bounded() -> None:
    """The tenant that was heard of least recently is forgotten first."""
    budget = RetryBudget(RetryRules(share=0.1, least_per_s=1.0, limit=10))
    waiting(budget, "storm", 0.0, 100)
    for number in range(1000):
        budget.came(f"t{number}", 0.0)
        assert budget.spend("storm", 0.0) > 0.0
    assert len(budget) == 10


@given(
    st.lists(st.tuples(st.floats(0.0, 20.0), st.booleans()), max_size=300),
    st.floats(0.0, 1.0),
    st.floats(0.0, 5.0),
)
def test_more_than_its_share_never_waits(steps: list[tuple[float, bool]], share: float, least: float) -> None:
    """Whatever the order: granted <= what is given at first + share x first-time requests + least x time."""
    budget, now, came, granted = RetryBudget(RetryRules(share, least)), 0.0, 0, 0
    for passed, first in steps:
        now += passed
        if first:
            budget.came("t", now)
            came += 1
        else:
            told = budget.spend("t", now)
            assert told >= 0.0
            assert told <= LONGEST_WAIT_S or not isfinite(told)
            granted += told == 0.0
    assert granted <= max(1.0, TAU_S * least) + share * came + least * now + 1e-6


# Places of those who left.


def test_a_place_is_kept_and_claimed_once() -> None:
    """The retry gets it; a second one finds nothing."""
    places = Places()
    places.keep("f", "p-1", 100.0, 105.0, holds=True)
    assert places.claim("f", 106.0) == (True, 100.0)
    assert places.claim("f", 106.0) == (False, None)
    assert len(places) == 0


def test_who_was_refused_is_remembered_without_a_place() -> None:
    """Its retry is told from that of another with the same body, but has to stand in line like everybody."""
    places = Places()
    places.keep("f", "p-1", 100.0, 105.0, holds=False)
    assert places.claim("f", 106.0) == (True, None)


def test_the_earliest_place_goes_first() -> None:
    """Several requests with one body left: the longest wait is rewarded first, and those without a place last."""
    places = Places()
    for ticket, arrived, holds in (("p-1", 1.0, False), ("p-2", 3.0, True), ("p-3", 2.0, True)):
        places.keep("f", ticket, arrived, 10.0, holds=holds)
    assert [places.claim("f", 11.0) for _ in range(4)] == [(True, 2.0), (True, 3.0), (True, None), (False, None)]


def test_a_place_is_not_kept_for_ever() -> None:
    """A little longer than the longest wait that an SDK obeys."""
    places = Places()
    places.keep("f", "p-1", 0.0, 0.0, holds=True)
    assert places.claim("f", KEPT_S - 0.1)[0]
    places.keep("f", "p-1", 0.0, 0.0, holds=True)
    assert not places.claim("f", KEPT_S)[0]
    assert len(places) == 0


def test_an_outcome_that_comes_late_changes_what_is_remembered() -> None:
    """Served: forgotten. The client had left: its place is kept after all. Unknown copies change nothing."""
    places = Places()
    places.keep("f", "p-1", 1.0, 10.0, holds=False)
    places.keep("f", "p-2", 2.0, 10.0, holds=False)
    places.forget("f", "p-1")
    places.give("f", "p-2")
    for ticket in ("p-1", "p-9"):
        places.forget("f", ticket)
        places.give("f", ticket)
        places.forget("g", ticket)
        places.give("g", ticket)
    assert places.claim("f", 11.0) == (True, 2.0)
    assert len(places) == 0


def test_places_are_bounded() -> None:
    """In fingerprints, and in copies of one; the oldest are forgotten first."""
    places = Places(limit=10)
    for number in range(100):
        places.keep(f"f{number}", "p", 0.0, 1.0, holds=True)
    assert len(places) == 10
    assert places.claim("f99", 1.0)[0]
    assert not places.claim("f0", 1.0)[0]
    for number in range(1000):
        places.keep("f95", f"p-{number}", float(number), 1.0, holds=True)
    assert len(places) == 9
    claimed = [places.claim("f95", 1.0) for _ in range(MOST_ALIKE + 1)]
    assert claimed[0] == (True, 1000.0 - MOST_ALIKE)
    assert claimed[-1] == (False, None)


def test_nothing_is_left_of_random_traffic() -> None:
    """However copies come, go and are settled: what is remembered expires, and a claim never invents a place."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - to repeat it
    rng = random.Random(seed)
    places, now, given = Places(limit=50), 0.0, set()
    for number in range(5000):
        now += rng.expovariate(1.0)
        fingerprint = f"f{rng.randrange(100)}"
        match rng.randrange(4):
            case 0:
                places.keep(fingerprint, f"p-{number}", now, now, holds=rng.random() < 0.5)
                given.add(now)
            case 1:
                places.forget(fingerprint, f"p-{rng.randrange(number + 1)}")
            case 2:
                places.give(fingerprint, f"p-{rng.randrange(number + 1)}")
            case _:
                _, place = places.claim(fingerprint, now)
                assert place is None or (place in given and now - place < KEPT_S)
                given.discard(place)
        assert len(places) <= 50
    places.claim("f0", now + KEPT_S)
    assert len(places) == 0


def test_what_is_lent_is_there_only_once() -> None:
    """Requests that may be tried again borrow from what may wait; what they did not use is there for others."""
    budget = RetryBudget(RetryRules(share=0.0, least_per_s=0.2))
    assert [budget.lend("t", 0.0) for _ in range(3)] == [True, True, False]
    budget.settle("t", 0.0, used=False, lent=0.0)
    assert budget.lend("t", 0.0)
    budget.settle("t", 0.0, used=True, lent=0.0)
    budget.settle("t", 0.0, used=True, lent=0.0)
    assert not budget.lend("t", 0.0)
    assert budget.spend("t", 0.0) > 0
    assert not budget.lend("t", 4.9)
    assert budget.lend("t", 5.1)


def test_what_was_lent_long_ago_keeps_nobody_from_it() -> None:
    """Its end gives nothing back a second time, and that of a request whose account was forgotten meanwhile neither."""
    budget = RetryBudget(RetryRules(share=0.0, least_per_s=0.2))
    assert [budget.lend("t", 0.0) for _ in range(3)] == [True, True, False]
    assert [budget.lend("t", LENT_S) for _ in range(3)] == [True, True, False]
    budget.settle("t", LENT_S, used=False, lent=0.0)
    budget.settle("t", LENT_S, used=False)
    assert not budget.lend("t", LENT_S)
    budget.settle("new", LENT_S, used=False, lent=LENT_S)
    assert [budget.lend("new", LENT_S) for _ in range(3)] == [True, True, False]


def test_what_was_used_beyond_the_budget_is_owed() -> None:
    """Until what comes in has paid for it, be it traffic or time; it is not forgotten."""
    for share in (0.0, 0.5):
        budget = RetryBudget(RetryRules(share=share, least_per_s=0.2))
        for lent in (0.0, 0.0, LENT_S, LENT_S):
            assert budget.lend("t", lent)
        for _ in range(4):
            budget.settle("t", 4.0, used=True)
        now = 4.0
        while not budget.lend("t", now):
            now += 0.1
            if share:
                budget.came("t", now)
        owed, next_one = 2.0, 1.0  # ten seconds of `least_per_s` were there, and four were used
        assert now - 4.0 == pytest.approx((owed + next_one) / (0.2 + share / 0.1), abs=0.2)


def test_answers_that_go_well_use_nothing_up() -> None:
    """However long they take: of 20 a second that run for 20 s most may be tried again, and none is."""
    budget, lent, running = RetryBudget(RetryRules()), 0, deque[tuple[float, bool]]()
    for tick in range(60 * 20):
        now = tick / 20
        while running and running[0][0] <= now - 20.0:
            began, may = running.popleft()
            if may:
                budget.settle("t", now, used=False, lent=began)
        budget.came("t", now)
        running.append((now, budget.lend("t", now)))
        lent += running[-1][1]
    assert lent > 0.6 * 60 * 20


def test_second_attempts_are_a_share_of_the_traffic() -> None:
    """All fail, each borrows, each uses it: a tenth is tried again, and what is given in any case."""
    budget, again, seconds = RetryBudget(RetryRules(share=0.1, least_per_s=1.0)), 0, 100
    for tick in range(seconds * 50):
        now = tick / 50
        budget.came("t", now)
        if budget.lend("t", now):
            again += 1
            budget.settle("t", now, used=True, lent=now)
    assert again == pytest.approx(seconds * (0.1 * 50 + 1.0), rel=0.1)


@pytest.mark.parametrize("shows_after_s", [0.5, 2.0, 5.0, 10.0])
def test_in_a_bad_minute_little_more_is_used_than_there_is(shows_after_s: float) -> None:
    """After a quiet one, every request fails after the same time: at first those that were lent one meanwhile use it,
    and that is all beyond the budget.
    """
    rules, rate = RetryRules(share=0.1, least_per_s=1.0), 20
    budget, used, running = RetryBudget(rules), 0, deque[float]()
    for tick in range(120 * rate):
        now = tick / rate
        while running and running[0] <= now - shows_after_s:
            bad = now >= 60.0
            used += bad
            budget.settle("t", now, used=bad, lent=running.popleft())
        budget.came("t", now)
        if budget.lend("t", now):
            running.append(now)
    at_once = TAU_S * (rules.share * rate + rules.least_per_s)
    promised = at_once + 60 * (rules.share * rate + rules.least_per_s)
    assert 0.8 * (promised - at_once) <= used <= promised + at_once * ceil(shows_after_s / LENT_S)


@given(
    st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 10.0), st.booleans()), max_size=200),
    st.floats(0.0, 1.0),
    st.floats(0.0, 5.0),
)
def test_more_than_the_budget_and_what_was_lent_meanwhile_is_never_used(
    requests: list[tuple[float, float, bool]], share: float, least: float
) -> None:
    """Whatever the order: used <= what is given + what it holds at once for each `LENT_S` that a failure takes to show.

    Each request comes some time after the one before it, and its need shows after some time, if it has any.
    """
    budget, now, used, traffic, most = RetryBudget(RetryRules(share, least)), 0.0, 0, 0.0, 0.0
    first, ends = max(1.0, TAU_S * least), list[tuple[float, float, bool]]()
    for came, (passed, takes, needs) in enumerate(requests, 1):
        now += passed
        traffic = traffic * exp(-passed / TAU_S) + share
        most = max(most, first + traffic)
        for end in sorted(one for one in ends if one[0] <= now):
            ends.remove(end)
            used += end[2]
            budget.settle("t", end[0], used=end[2], lent=end[1])
        budget.came("t", now)
        if budget.lend("t", now):
            ends.append((now + takes, now, needs))
        outstanding = used + sum(needs for _, _, needs in ends)
        assert outstanding <= first + share * came + least * now + most * (ceil(10.0 / LENT_S) + 1) + 1e-6
