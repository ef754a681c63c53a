"""Times to come back at, and the places that are kept for them."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from extproc.core.lines import Backlog, Group
from extproc.core.promises import EARLY_S, FAR_S, GRACE_S, JITTER, MOST_ALIKE, NEAR_S, WEIGHT, Book, Promise, Promises
from extproc.core.request import Request, Size
from tests.doubles import request

NUMBERS = count()
WANTS = Group(("a",), frozenset({"k"}))


def one(fingerprint: str = "f", **changes: Any) -> Request:
    return request(**{"fingerprint": fingerprint, "ticket": str(next(NUMBERS)), "size": Size(60, 40), **changes})


def make(
    promises: Promises, now: float = 1000.0, seconds: float = 10.0, turn_s: float | None = None, **changes: Any
) -> Request:
    """A request that arrived at 990 is told to come back, a second before its turn if nothing else is said."""
    asked = one(**changes)
    promises.make(asked, WANTS, 990.0, now, seconds, seconds + 1 if turn_s is None else turn_s)
    return asked


def kept(promises: Promises, lane: str = "P1", *, long: bool = False) -> float:
    """The share of them that is taken up."""
    return promises._books[lane, long].kept


def test_who_comes_back_at_its_time_is_recognised_once() -> None:
    """By fingerprint, tenant and lane; its first arrival comes with it, and its booking is gone."""
    promises = Promises()
    make(promises)
    for other in ({"fingerprint": "g"}, {"tenant": "else"}, {"lane": "P0"}, {"fingerprint": ""}):
        assert promises.claim(one(**other), 1011.0) is None
    assert promises.booked("P1", 1005.0)
    promise = promises.claim(one(), 1011.0)
    assert promise is not None
    assert (promise.since, promise.due, promise.kept_at(1011.0)) == (990.0, 1010.0, True)
    assert len(promises) == 0
    assert not promises.booked("P1", 1011.0)
    assert promises.claim(one(), 1011.0) is None


@pytest.mark.parametrize(("early_s", "on_time"), [(0.0, True), (0.5 * EARLY_S, True), (2 * EARLY_S, False)])
def test_who_comes_too_early_has_no_place_but_its_promise_still(early_s: float, on_time: bool) -> None:  # noqa: FBT001
    """An announced retry gets it to be told the same time again; a request that may be another one does not."""
    promises = Promises()
    make(promises)
    now = 1010.0 - early_s
    assert (promises.claim(one(), now) is None) is not on_time
    if not on_time:
        promise = promises.claim(one(retries=1), now)
        assert promise is not None
        assert not promise.kept_at(now)
        assert kept(promises) == 1.0, "that is no sign that it would have come in time"


def test_of_promises_to_equal_requests_the_one_that_is_due_first_is_taken_up() -> None:
    """And no more of them are remembered than a few."""
    promises = Promises()
    for seconds in (30, 10, 20):
        make(promises, seconds=seconds)
    taken = [promises.claim(one(), 1010.0 + late) for late in (6.0, 6.0, 10.0)]
    assert [promise and promise.due for promise in taken] == [1010.0, None, 1020.0]
    for seconds in range(1, MOST_ALIKE + 5):
        make(promises, seconds=seconds)
    assert len(promises) == MOST_ALIKE


def test_a_promise_lapses_when_its_client_could_have_come_and_did_not() -> None:
    """A quarter of the wait after its time, and some seconds more."""
    promises = Promises()
    make(promises, seconds=20)
    late = 1020 + 20 * JITTER + GRACE_S
    assert promises.booked("P1", late - 0.1)
    assert not promises.booked("P1", late + 0.1)
    assert promises.claim(one(), late + 0.1) is None
    assert len(promises) == 0


def test_promises_count_for_as_much_as_is_taken_up() -> None:
    """Whole at first, longer than a minute not at all; then as it turns out. Next to nothing is nothing."""
    promises = Promises()
    make(promises, seconds=60)
    make(promises, seconds=61, fingerprint="long")
    assert [share for _, share in promises.booked("P1", 1000.0)] == [1.0]
    for number in range(250):
        make(promises, now=2000.0, seconds=61, fingerprint=f"long{number}")
        make(promises, now=2000.0, seconds=10, fingerprint=f"short{number}")
    for number in range(200):
        promises.claim(one(f"short{number}"), 2011.0)
    for number in range(100):
        promises.claim(one(f"long{number}"), 2062.0)
    make(promises, now=3000.0, seconds=99)
    make(promises, now=3000.0, seconds=9)
    assert 0.2 < kept(promises) < 0.6
    assert WEIGHT < kept(promises, long=True) < 0.1
    assert [share for _, share in promises.booked("P1", 3000.0)] == [kept(promises), kept(promises, long=True)]


def test_that_nobody_comes_back_is_soon_believed() -> None:
    """Or a crowd that asks something else each time would keep its lane empty for itself."""
    promises = Promises()
    for number in range(20):
        make(promises, seconds=6, fingerprint=f"{number}")
    assert [share for _, share in promises.booked("P1", 1012.0)] == [1.0]
    make(promises, now=1013.0, seconds=6)
    assert 0.1 < kept(promises) < 0.25


def test_a_lane_whose_clients_never_come_back_says_nothing_of_another() -> None:
    """Each lane has clients of its own."""
    promises = Promises()
    for number in range(200):
        make(promises, seconds=10, fingerprint=f"{number}", lane="P2")
    make(promises, now=2000.0, seconds=9)
    make(promises, now=2000.0, seconds=9, lane="P2")
    assert kept(promises, "P2") < WEIGHT
    assert not promises.booked("P2", 2000.0)
    assert [share for _, share in promises.booked("P1", 2000.0)] == [1.0]


def test_when_its_memory_is_full_the_promise_that_would_lapse_first_is_dropped() -> None:
    """That is no sign that it would not have been taken up. Those that were taken up already do not count."""
    promises = Promises(limit=3)
    for seconds in (20, 10, 30, 40):
        make(promises, seconds=seconds, fingerprint=str(seconds))
    assert len(promises) == 3
    assert promises.claim(one("10", retries=1), 1001.0) is None
    make(promises, seconds=5, fingerprint="5", now=1001.0)
    assert promises.claim(one("20", retries=1), 1001.0), "who was told 5 s lapses first, and is dropped as it comes"
    make(promises, seconds=25, fingerprint="25", now=1001.0)
    make(promises, seconds=50, fingerprint="50", now=1001.0)
    left = [name for name in ("25", "30", "40", "50") if promises.claim(one(name, retries=1), 1001.0)]
    assert left == ["30", "40", "50"]
    assert kept(promises) == 1.0


def test_what_was_taken_up_does_not_stay_behind() -> None:
    """However long the one that lapses first stays."""
    promises = Promises()
    make(promises, seconds=20, fingerprint="stays")
    for number in range(500):
        make(promises, seconds=21, fingerprint=f"f{number}")
        assert promises.claim(one(f"f{number}", retries=1), 1005.0)
        assert len(promises._lapsing) <= 70


def test_near_turns_are_booked_by_the_second_and_far_ones_by_a_few() -> None:
    """So that a forecast does not look at hundreds of them."""
    promises = Promises()
    for turn_s in (0.5, NEAR_S, NEAR_S + 1, 33.0):
        make(promises, seconds=0.5, turn_s=turn_s)
    ((book, _),) = promises.booked("P1", 1000.0)
    assert book.seconds == [1000, 1000 + NEAR_S, 1032]
    assert all(second % FAR_S == 0 for second in book.seconds[1:])
    assert book.before(1000.0).requests == 1
    assert book.before(1010.0).requests == 3
    assert book.before(9999.0) == Backlog(4, 400, 240, 0, 4 * 140.0)


def test_those_who_are_not_back_yet_come_evenly_until_they_are_late() -> None:
    """Nobody before its time; half of those who are still away in half of the time that is left; nobody at the end."""
    promises = Promises()
    make(promises, seconds=20)
    ((book, _),) = promises.booked("P1", 1000.0)
    (slot,) = book.slots.values()
    assert slot.back_within(20, 1000.0) == 0
    assert slot.back_within(22.5, 1000.0) == pytest.approx(0.5)
    assert slot.back_within(1, 1023.0) == pytest.approx(0.5)
    assert slot.back_within(100, 1000.0) == 1
    assert slot.back_within(100, 1025.0) == 0


class PromisesMachine(RuleBasedStateMachine):
    """Promises come and go in any order; a plain list of them is the model of the books."""

    def __init__(self) -> None:
        super().__init__()
        self.promises = Promises(limit=8)
        self.now = 1000.0
        self.made: dict[str, Promise] = {}
        self.books: dict[tuple[str, bool], Book] = {}

    @rule(
        seconds=st.sampled_from([1.0, 5.0, 59.0, 70.0]),
        tenant=st.sampled_from(["x", "y"]),
        lane=st.sampled_from(["P0", "P1"]),
        alike=st.booleans(),
        names=st.sampled_from(["a", "b"]),
    )
    def promise(self, seconds: float, tenant: str, lane: str, alike: bool, names: str) -> None:  # noqa: FBT001
        fingerprint = "same" if alike else str(next(NUMBERS))
        asked = one(fingerprint, tenant=tenant, lane=lane, weight=2.0)
        self.promises.make(asked, Group((names,)), 1.0, self.now, seconds, seconds)

    @rule(seconds=st.sampled_from([0.5, 3.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: len(self.promises))
    @rule(data=st.data(), retries=st.integers(0, 1))
    def come_back(self, data: st.DataObject, retries: int) -> None:
        asked = data.draw(st.sampled_from([promise.request for promise in self.promises._open.values()]))
        again = one(asked.fingerprint, tenant=asked.tenant, lane=asked.lane, retries=retries)
        found = self.promises.claim(again, self.now)
        assert found is None or found.request.tenant == asked.tenant

    @invariant()
    def books_are_the_sums_of_what_is_promised(self) -> None:
        self.promises.booked("P1", self.now)
        assert len(self.promises) <= 8
        for lane in ("P0", "P1"):
            for long in (False, True):
                inside = [p for p in self.promises._open.values() if (p.request.lane, p.long) == (lane, long)]
                book = self.promises._books.get((lane, long), Book(1.0))
                assert book.seconds == sorted({promise.second for promise in inside}) == sorted(book.slots)
                for second, slot in book.slots.items():
                    here = [promise for promise in inside if promise.second == second]
                    assert slot.total == _sum(here)
                    assert slot.groups == {g: _sum(p for p in here if p.group == g) for g in {p.group for p in here}}
                    tenants = {promise.request.tenant for promise in here}
                    assert {tenant: sum(b.requests for b in slot.by_tenant[tenant].values()) for tenant in tenants} == {
                        tenant: sum(p.request.tenant == tenant for p in here) for tenant in tenants
                    }
                    assert slot.by_tenant.keys() == tenants
                for tenant in {promise.request.tenant for promise in inside}:
                    promised = book.tenants[tenant]
                    assert promised.requests == sum(p.request.tenant == tenant for p in inside)
                    assert (promised.cost, promised.weight) == (140.0 * promised.requests, 2.0)
                assert len(book.tenants) == len({promise.request.tenant for promise in inside})


def _sum(promises: Any) -> Backlog:
    total = Backlog()
    for promise in promises:
        total.add(promise.request)
    return total


PromisesMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestBooksAgainstAList = PromisesMachine.TestCase


def test_a_hundred_thousand_promises_stay_cheap() -> None:
    """However they come and go, what is remembered is bounded."""
    promises, rng = Promises(limit=1000), random.Random(3)
    for number in range(20_000):
        now = 1000.0 + 0.01 * number
        make(promises, now=now, seconds=rng.uniform(1, 90), fingerprint=str(number % 5000), tenant=str(number % 50))
        if rng.random() < 0.5:
            promises.claim(one(str(rng.randrange(5000)), tenant=str(rng.randrange(50)), retries=1), now)
    assert len(promises) <= 1000
    assert len(promises._alike) <= 1000
    assert len(promises._lapsing) <= 2 * 1000 + 66
    assert sum(len(book.slots) for book in promises._books.values()) < 100
