"""Fairness between tenants: bounds that hold over any stretch of time, whoever else comes and goes."""

from __future__ import annotations

from collections import Counter, deque
from itertools import accumulate, count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.fairness import Account, Counters, cost, toll
from extproc.core.lanes import Lanes
from extproc.core.lines import Group, Waiter
from extproc.core.policy import Lane, WhenBusy
from extproc.core.request import Request, Size
from tests.doubles import request

GROUP = Group(("a",), frozenset({"a/slots"}))
WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 3.0])
SIZES = st.builds(Size, st.integers(1, 300), st.integers(0, 200))
EPSILON = 1e-6


class Market:
    """One line whose tenants always want more; keeps book of what each got, in cost per weight."""

    def __init__(self, vip_share: float = 0.5) -> None:
        self.lanes = Lanes([Lane("P1", 1, 30, WhenBusy.HOLD, 1, 10**6, 10**12, 10**12, vip_share=vip_share)])
        self.weights: dict[str, float] = {}
        self.got: Counter[str] = Counter()
        self.largest: Counter[str] = Counter()
        self.history: list[Counter[str]] = [Counter()]
        self._tickets = count()

    def want(self, tenant: str, size: Size, weight: float = 1.0) -> Waiter:
        """Tenants with a v are VIPs."""
        seq = next(self._tickets)
        self.weights[tenant] = weight
        wish = request(tenant=tenant, vip="v" in tenant, weight=weight, ticket=str(seq), size=size)
        waiter = Waiter(wish, GROUP, seq)
        self.lanes.join(waiter)
        return waiter

    def serve(self) -> Request:
        served = self.lanes.heads()[0][0]
        self.lanes.serve(served)
        one = served.request
        self.book(one.tenant, cost(one.size))
        self.largest[one.tenant] = max(self.largest[one.tenant], cost(one.size))  # type: ignore[assignment]
        return one

    def book(self, tenant: str, service: float) -> None:
        self.got[tenant] += service / self.weights[tenant]  # type: ignore[assignment]
        self.history.append(Counter(self.got))

    def swing(self, one: str, other: str, since: int = 0) -> float:
        """By how much the two differ in any stretch of time since then, at most."""
        apart = [got[one] - got[other] for got in self.history[since:]]
        return max(apart) - min(apart)

    def bound(self, one: str, other: str) -> float:
        """A request of each, per unit of weight."""
        return sum(self.largest[name] / self.weights[name] for name in (one, other)) + EPSILON


@settings(max_examples=40)
@given(
    weights=st.lists(WEIGHTS, min_size=2, max_size=4),
    sizes=st.lists(st.lists(SIZES, min_size=1, max_size=5), min_size=4, max_size=4),
    deep=st.integers(2, 4),
)
def test_tenants_that_wait_all_the_time_get_their_weights(
    weights: list[float], sizes: list[list[Size]], deep: int
) -> None:
    """In no stretch of time do two differ by more than a request of each per weight, whatever their sizes."""
    market = Market()
    wishes = {f"t{nr}": (deque(own), weight) for nr, (own, weight) in enumerate(zip(sizes, weights, strict=False))}
    for tenant, (own, weight) in wishes.items():
        for _ in range(deep):
            market.want(tenant, _next(own), weight)
    for _ in range(120):
        tenant = market.serve().tenant
        own, weight = wishes[tenant]
        market.want(tenant, _next(own), weight)
    for one, other in [(a, b) for a in wishes for b in wishes if a < b]:
        assert market.swing(one, other) <= market.bound(one, other)
    assert all(market.got[tenant] > 0 for tenant in wishes)


@settings(max_examples=40)
@given(
    weights=st.tuples(WEIGHTS, WEIGHTS),
    sizes=st.lists(SIZES, min_size=1, max_size=9),
    guests=st.lists(st.tuples(st.sampled_from("abc"), SIZES, st.integers(0, 3)), max_size=40),
)
def test_guests_who_come_and_go_change_nothing_between_two_who_stay(
    weights: tuple[float, float], sizes: list[Size], guests: list[tuple[str, Size, int]]
) -> None:
    """The bound holds between the two, and no guest gets ahead of them by leaving and coming back."""
    market = Market()
    own = deque(sizes)
    for tenant, weight in [*zip("fg", weights, strict=True)] * 2:
        market.want(tenant, _next(own), weight)
    for guest, size, often in guests:
        market.want(guest, size)
        for _ in range(often):
            tenant = market.serve().tenant
            if tenant in "fg":
                market.want(tenant, _next(own), market.weights[tenant])
    assert market.swing("f", "g") <= market.bound("f", "g")
    for guest in set(market.got) - {"f", "g"}:
        gains = [got[guest] - got["f"] for got in market.history]
        lead = max(later - least for later, least in zip(gains, accumulate(gains, min), strict=True))
        assert lead <= market.bound(guest, "f")


@settings(max_examples=40)
@given(
    weights=st.tuples(WEIGHTS, WEIGHTS),
    used=st.tuples(st.integers(0, 400), st.integers(0, 400)),
    late=st.integers(0, 4),
)
def test_estimates_are_corrected_once_the_real_usage_is_known(
    weights: tuple[float, float], used: tuple[int, int], late: int
) -> None:
    """Whatever the estimates of each tenant are worth, what they really use stays within the bound.

    To the bound is added what is not known yet: at most `late` requests of each are under way, each off by so much.
    """
    market, flying = Market(), deque[Request]()
    names = dict(zip(("f", "g"), used, strict=True))
    estimate = Size(100, 50)
    for tenant, weight in [*zip(names, weights, strict=True)] * 2:
        market.want(tenant, estimate, weight)
    for _ in range(150):
        one = market.serve()
        market.want(one.tenant, estimate, one.weight)
        flying.append(one)
        market.book(one.tenant, names[one.tenant] - cost(estimate))
        if len(flying) > late:
            oldest = flying.popleft()
            market.lanes.settle(oldest, Size(names[oldest.tenant], 0) if names[oldest.tenant] else None)
    real = {name: market.got[name] for name in names}
    error = sum(abs(names[name] - cost(estimate)) / market.weights[name] for name in names)
    bound = market.bound("f", "g") + 2 * (late + 1) * error
    largest = max(names.values()) / min(weights)
    assert abs(real["f"] - real["g"]) <= bound + 2 * largest


def test_a_refund_in_time_gives_the_turn_back() -> None:
    """A tenant that was charged a thousand and used ten is next again, in whichever line it waits; once only."""
    market = Market()
    for tenant in "fg":
        for _ in range(4):
            market.want(tenant, Size(1000, 0))
    dear, other = market.serve(), market.serve()
    assert [dear.tenant, other.tenant] == ["f", "g"]
    market.lanes.settle(other, Size(10, 0))
    assert market.serve().tenant == "g"
    assert market.serve().tenant == "f"
    market.lanes.settle(other, Size(0, 1))
    market.lanes.settle(dear, None)
    assert market.serve().tenant == "f"


def test_usage_beyond_the_estimate_is_paid_for_also_by_who_left() -> None:
    """Who used far more than estimated and comes back later waits until the others had as much."""
    market = Market()
    for _ in range(20):
        market.want("g", Size(100, 0))
    market.want("f", Size(100, 0))
    while (one := market.serve()).tenant != "f":
        pass
    market.lanes.settle(one, Size(600, 0))
    for _ in range(3):
        market.want("f", Size(100, 0))
    assert [market.serve().tenant for _ in range(7)] == ["g"] * 6 + ["f"]
    assert market.lanes.queues["P1"].tenants["f"].counter == 700


def test_weight_counts_for_corrections_as_it_does_for_charges() -> None:
    """With weight two, two hundred more is one hundred more of its counter."""
    market = Market()
    market.want("f", Size(100, 0), weight=2.0)
    market.want("f", Size(100, 0), weight=2.0)
    one = market.serve()
    assert market.lanes.queues["P1"].tenants["f"].counter == 50
    market.lanes.settle(one, Size(300, 0))
    assert market.lanes.queues["P1"].tenants["f"].counter == 150


@settings(max_examples=40)
@given(away=st.integers(1, 60), sizes=st.lists(SIZES, min_size=1, max_size=5))
def test_nobody_saves_up_a_claim_while_away(away: int, sizes: list[Size]) -> None:
    """Who comes, for the first time or again, shares from then on: the bound holds from its coming."""
    market, own = Market(), deque(sizes)
    market.want("g", _next(own))
    market.want("f", _next(own))
    first = market.serve().tenant
    stays = "g" if first == "f" else "f"
    for _ in range(away):
        market.want(stays, _next(own))
        market.serve()
    since = len(market.history) - 1
    for tenant in (stays, stays, first, first):
        market.want(tenant, _next(own))
    for _ in range(60):
        market.want(market.serve().tenant, _next(own))
    assert market.swing("f", "g", since) <= market.bound("f", "g")


def test_who_had_more_keeps_its_counter_while_away() -> None:
    """Leaving and coming back washes nothing off."""
    market = Market()
    for _ in range(30):
        market.want("g", Size(100, 0))
    market.want("f", Size(1000, 0))
    assert market.serve().tenant == "g"
    assert market.serve().tenant == "f"
    market.want("f", Size(1000, 0))
    assert [market.serve().tenant for _ in range(11)] == ["g"] * 10 + ["f"]


@settings(max_examples=60)
@given(
    share=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0]),
    vips=st.integers(1, 3),
    others=st.integers(1, 4),
    sizes=st.lists(SIZES, min_size=1, max_size=7),
)
def test_vips_get_their_share_and_no_more_than_that_or_their_part(
    share: float, vips: int, others: int, sizes: list[Size]
) -> None:
    """While both kinds wait, VIPs get at least their share, and not more than it or their part by counters.

    Up to a request or two, and for the upper bound one per tenant; in any stretch of time for the lower.
    """
    market, own = Market(share), deque(sizes)
    names = [f"v{nr}" for nr in range(vips)] + [f"t{nr}" for nr in range(others)]
    for name in names * 2:
        market.want(name, _next(own))
    for _ in range(120):
        market.want(market.serve().tenant, _next(own))
    largest = max(cost(size) for size in sizes)
    behind = [share * sum(got.values()) - _vips(got) for got in market.history]
    lag = max(now - least for now, least in zip(behind, accumulate(behind, min), strict=True))
    part = max(share, vips / (vips + others))
    assert behind[-1] <= 2 * largest
    assert lag <= 2 * largest or share < vips / (vips + others)
    assert _vips(market.got) <= part * sum(market.got.values()) + 2 * largest * len(names)
    for one, other in [*pairwise(names[:vips]), *pairwise(names[vips:])]:
        assert market.swing(one, other) <= market.bound(one, other)


@pytest.mark.parametrize("absence", [False, True])
def test_vips_share_among_themselves_however_long_one_of_them_was_served(absence: bool) -> None:  # noqa: FBT001
    """A second VIP does not go before the first for as long as that had been served ahead of the others."""
    market, size = Market(0.5), Size(100, 0)
    for name in ("v0", "t0", "t1", "t2", "t3") * 2:
        market.want(name, size)
    for _ in range(200):
        market.want(market.serve().tenant, size)
    if absence:
        for own in [one for one in market.lanes.waiters() if one.request.tenant == "v0"]:
            market.lanes.leave(own)
    since = len(market.history) - 1
    for name in ("v1", "v1"):
        market.want(name, size)
    for _ in range(10):
        market.want(market.serve().tenant, size)
    if absence:
        since = len(market.history) - 1
        for name in ("v0", "v0"):
            market.want(name, size)
    for _ in range(100):
        market.want(market.serve().tenant, size)
    assert market.swing("v0", "v1", since) <= market.bound("v0", "v1")
    part = [_vips(got) for got in (market.history[since], market.got)]
    assert part[1] - part[0] == pytest.approx(
        0.5 * (sum(market.got.values()) - sum(market.history[since].values())), abs=200
    )


def test_a_vips_refund_counts_among_the_vips() -> None:
    """Who comes next is lifted to the least of them as it is after the refund."""
    counters = Counters()
    vip, second, other = Account("v0", vip=True), Account("v2", vip=True), Account("t0")
    for account in (vip, second, other):
        counters.enter(account)
    counters.charge(vip, "1", 500.0)
    counters.charge(second, "2", 600.0)
    assert counters.entry("v1", vip=True) == 500
    assert counters.entry("t1") == 0
    counters.correct("v2", -500.0, second)
    assert counters.entry("v1", vip=True) == 100
    for account in (vip, second):
        counters.leave(account)
    assert counters.entry("v1", vip=True) == 100
    counters.charge(other, "3", 700.0)
    assert counters.entry("v1", vip=True) == 700


@pytest.mark.parametrize(
    ("size", "expected"), [(Size(10, 0), 10), (Size(0, 10), 20), (Size(3, 4), 11), (Size(0, 0), 100)]
)
def test_output_costs_twice_and_what_nobody_counts_a_turn(size: Size, expected: float) -> None:
    """In input tokens."""
    assert cost(size) == expected


@given(
    share=st.floats(0, 1),
    turns=st.lists(st.tuples(st.booleans(), st.floats(0.1, 1000)), min_size=1, max_size=50),
)
def test_the_vips_account_never_leaves_the_range_of_one_request(share: float, turns: list[tuple[bool, float]]) -> None:
    """And each turn moves it by that turn's part, or not at all, never against its sense."""
    debt = 0.0
    for vip, service in turns:
        after = toll(debt, service, share, vip=vip)
        part = service * (1 - share) if vip else -service * share
        assert min(0.0, part) - EPSILON <= after - debt <= max(0.0, part) + EPSILON
        debt = after
        assert abs(debt) <= max(service for _, service in turns) + EPSILON


@pytest.mark.parametrize(
    ("debt", "vip", "expected"),
    [(0, True, 75), (0, False, -25), (-25, True, 50), (75, False, 50), (90, True, 100), (150, True, 150),
     (-90, False, -100), (-150, False, -150), (-150, True, -75)],
)  # fmt: skip
def test_a_turn_of_a_hundred_on_the_account_of_vips_with_a_quarter(debt: float, vip: bool, expected: float) -> None:  # noqa: FBT001
    """Three quarters up for a VIP's, a quarter down for another's, up to a whole turn and no further."""
    assert toll(debt, 100, 0.25, vip=vip) == expected


def test_what_is_remembered_of_absent_tenants_is_bounded_and_the_largest_claims_stay() -> None:
    """Of 1,000 tenants that left with ever other counters, the five that had most are remembered."""
    counters = Counters(limit=5)
    stays = Account("stays")
    counters.enter(stays)
    had = {f"t{nr}": float(nr * 7919 % 1000 + 1) for nr in range(1000)}
    for name, service in had.items():
        _visit(counters, name, service)
        assert len(counters) <= 5
    most = sorted(had, key=had.__getitem__)[-5:]
    assert {name for name in had if counters.entry(name) > 0} == set(most)
    assert all(counters.entry(name) == had[name] for name in most)


def test_a_correction_changes_who_is_forgotten_first() -> None:
    """Who got most of its charge back has the smallest claim then."""
    counters = Counters(limit=2)
    counters.enter(Account("stays"))
    _visit(counters, "a", 100.0)
    _visit(counters, "b", 200.0)
    counters.correct("b", -150.0, None)
    _visit(counters, "c", 300.0)
    assert [counters.entry(name) for name in "abc"] == [100, 0, 300]


def test_the_floor_of_vips_never_falls() -> None:
    """Nor does a refund to the last of them lower it for those who come later."""
    counters = Counters()
    counters.enter(Account("stays"))
    for refund in (0.0, -400.0):
        vip = Account("v", vip=True)
        counters.enter(vip)
        counters.charge(vip, "x", 500.0 if not refund else 0.0)
        counters.correct("v", refund, vip)
        counters.leave(vip)
    assert counters.entry("v1", vip=True) == 500
    assert counters.entry("t1") == 0


def test_who_had_no_more_than_the_least_of_the_others_is_forgotten_at_once() -> None:
    """Nothing has to be known of it: it would be lifted to that anyway; also once the others have caught up."""
    counters = Counters()
    stays = Account("stays")
    counters.enter(stays)
    _visit(counters, "idle", 0.0)
    assert len(counters) == 0
    _visit(counters, "busy", 100.0)
    assert len(counters) == 1
    counters.charge(stays, "x", 100.0)
    _visit(counters, "idle", 0.0)
    assert len(counters) == 0
    assert counters.entry("busy") == 100


def test_the_floor_stays_when_the_last_one_leaves() -> None:
    """In an empty lane a newcomer and the one who left last are equals."""
    counters = Counters()
    _visit(counters, "last", 100.0)
    assert counters.entry("last") == counters.entry("new") == 100
    again = Account("last")
    counters.enter(again)
    assert again.counter == 100
    counters.leave(again)
    assert counters.entry("new") == 100


def test_a_dispatched_request_is_settled_once_and_the_oldest_are_forgotten() -> None:
    """Of more than the limit under way the first is settled as if the estimate had been right."""
    counters, account = Counters(limit=2), Account("a", weight=2.0)
    counters.enter(account)
    for ticket in "123":
        counters.charge(account, ticket, 10.0)
    assert account.counter == 15
    assert counters.surplus("1", 99.0) == 0
    assert [counters.surplus("2", 25.0), counters.surplus("2", 25.0)] == [15, 0]
    assert counters.surplus("3", 4.0) == -6
    assert counters.surplus("never charged", 50.0) == 0


@pytest.mark.parametrize(("by", "expected"), [(-30.0, 70.0), (-200.0, 10.0), (50.0, 150.0)])
def test_an_absent_tenant_is_corrected_too(by: float, expected: float) -> None:
    """Down to what everybody has, and up from what it had."""
    counters, stays = Counters(), Account("stays", counter=0.0)
    counters.enter(stays)
    counters.charge(stays, "x", 10.0)
    visitor = Account("f")
    counters.enter(visitor)
    counters.charge(visitor, "y", 90.0)
    counters.leave(visitor)
    counters.correct("f", by, None)
    assert counters.entry("f") == expected


@pytest.mark.parametrize(("by", "expected"), [(-5.0, 100.0), (5.0, 105.0)])
def test_a_forgotten_tenant_owes_what_it_used_beyond_its_estimate_and_is_owed_nothing(
    by: float, expected: float
) -> None:
    """From the floor on, which it had at least when it was forgotten."""
    counters = Counters()
    _visit(counters, "last", 100.0)
    assert len(counters) == 0
    counters.correct("last", by, None)
    assert counters.entry("last") == expected
    assert counters.entry("other") == 100


def test_who_comes_back_is_remembered_no_longer() -> None:
    """Its counter is its own again, and what it leaves with then is what counts."""
    counters, stays = Counters(), Account("stays")
    counters.enter(stays)
    _visit(counters, "f", 100.0)
    back = Account("f")
    counters.enter(back)
    assert (back.counter, len(counters)) == (100, 0)
    counters.correct("f", -60.0, back)
    assert counters.waiting.first() is stays
    counters.charge(stays, "x", 50.0)
    assert counters.waiting.first() is back
    counters.leave(back)
    assert counters.entry("f") == 50


def _visit(counters: Counters, name: str, service: float) -> None:
    account = Account(name)
    counters.enter(account)
    counters.charge(account, f"of {name}", service)
    counters.leave(account)


def _vips(got: Counter[str]) -> float:
    return sum(service for name, service in got.items() if "v" in name)


def _next(sizes: deque[Size]) -> Size:
    sizes.rotate(-1)
    return sizes[-1]
