"""The books of one request: what is held back exactly once, tokens by the refund rules, dollars by who billed them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.capacity import Change
from extproc.core.flight import Flight, Refund
from extproc.core.policy import Accounting, Prices
from extproc.core.request import Size, Usage
from extproc.core.spend import cost, dearest
from tests.doubles import claims, request

RATES = {"a": Prices(1e4, 2e4), "b": Prices(3e4, 6e4, cached=0, cache_write=4e4, reasoning=7e4), "d": Prices(0, 0)}
"""Cents a token, so that amounts are easy to read; at C nobody knows."""
ESTIMATE = Size(60, 40)
NOW = 1002.0
RESERVED = dearest(RATES, ESTIMATE)
ALLOWANCE = claims(
    tenant__t__slots=1,
    tenant__t__requests=1,
    tenant__t__total=100,
    tenant__t__usd_hour=RESERVED,
    tenant__t__usd_day=RESERVED,
    session__t__s__tokens=100,
    session__t__s__usd=RESERVED,
)
PRICES = {
    "a": claims(upstream__a__slots=1, upstream__a__m__total=100, upstream__a__m__requests=1, upstream__a__kv=70),
    "b": claims(upstream__b__slots=1, upstream__b__m__input=60, upstream__b__m__output=40, upstream__b__m__requests=1),
    "c": claims(upstream__c__slots=1, upstream__c__kv=90),
    "d": claims(upstream__d__slots=1, upstream__d__m__requests=1),
}
PURSES = {name: cost(RATES[name], ESTIMATE) for name in "ab"}
"""What the request is estimated to cost at upstreams whose own dollars are limited."""
PRICES |= {name: PRICES[name] + claims(**{f"upstream__{name}__usd_hour": PURSES[name]}) for name in PURSES}


@dataclass
class Book:
    """A flight and what it holds, per key, as its changes say."""

    order: tuple[str, ...] = ("a", "b", "c")
    upfront: frozenset[str] = frozenset()
    held: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.flight = Flight(request(size=ESTIMATE), ALLOWANCE, RATES)
        self.take(ALLOWANCE)

    def take(self, what: tuple) -> None:
        for claim in what:
            self.held[claim.key] += claim.amount

    def depart(self) -> None:
        self.take(PRICES[self.order[0]])
        self.flight.depart(self.order, PRICES, 1001.0)
        kinds = {name: Accounting.UPFRONT if name in self.upfront else Accounting.ACTUAL for name in PRICES}
        self.flight.accounting = kinds

    def apply(self, changes: list[Change]) -> bool:
        """Whether anything changed. Never more is given back than is held, and no key is named twice."""
        assert len({change.key for change in changes}) == len(changes)
        for change in changes:
            assert change.amount != 0
            self.held[change.key] = round(self.held[change.key] - change.amount, 9)
            assert self.held[change.key] >= 0
        return bool(changes)

    def at(self, place: str) -> dict[str, float]:
        """What is held at an upstream, or but for dollars of the tenant, by kind."""
        return {
            key.rpartition("/")[2]: amount
            for key, amount in self.held.items()
            if amount and key.split("/")[1] == place and not key.startswith("session") and "usd" not in key
        }  # fmt: skip

    def of_session(self) -> float:
        """Tokens that are held of its session."""
        return self.held["session/t/s/tokens"]

    def dollars(self) -> float:
        """What is held of every budget in dollars, which is the same."""
        amounts = {self.held[key] for key in ("tenant/t/usd_hour", "tenant/t/usd_day", "session/t/s/usd")}
        assert len(amounts) == 1
        return amounts.pop()

    def purse(self, name: str) -> float:
        """What is held of an upstream's own dollars."""
        return self.held[f"upstream/{name}/usd_hour"]


def departed(*order: str, upfront: str = "") -> Book:
    book = Book(order or ("a", "b", "c"), frozenset(upfront))
    book.depart()
    return book


OWN = Size(90, 40)
"""What it is at B where that counts otherwise."""


def departed_where_b_counts_more(*order: str) -> Book:
    book = Book(order)
    own = {f"upstream__b__{key}": amount for key, amount in {"m__input": 90, "m__output": 40, "slots": 1}.items()}
    prices = PRICES | {"b": claims(**own, upstream__b__usd_hour=cost(RATES["b"], OWN))}
    book.flight = Flight(request(size=ESTIMATE, sizes={"b": OWN}), ALLOWANCE, RATES)
    book.take(prices[order[0]])
    book.flight.depart(order, prices, 1001.0)
    return book


def test_what_an_upstream_served_is_by_its_own_count() -> None:
    """Where nobody reported what it was: at the upstream, for its tenant, in tokens and in dollars."""
    book = departed_where_b_counts_more("a", "b")
    book.apply(book.flight.attempt_failed("a", Refund.INPUT_KEPT, NOW))
    assert (book.at("a")["total"], book.at("b")) == (60, {"slots": 1, "input": 90, "output": 40})
    book.apply(book.flight.served("b", None))
    assert (book.at("b"), book.flight.used) == ({"slots": 1, "input": 90, "output": 40}, OWN)
    assert book.at("t")["total"] == book.of_session() == OWN.total
    assert book.purse("b") == pytest.approx(cost(RATES["b"], OWN))
    assert book.dollars() == pytest.approx(cost(RATES["a"], Size(60, 0)) + cost(RATES["b"], OWN))


def test_what_was_cut_at_an_upstream_is_by_its_own_count() -> None:
    """The input and the output seen."""
    book = departed_where_b_counts_more("b", "a")
    book.apply(book.flight.served("b", None, 7))
    assert (book.at("b")["input"], book.at("b")["output"], book.flight.used) == (90, 7, Size(90, 7))


@pytest.mark.parametrize("left", [True, False])
def test_an_upstream_that_did_not_serve_keeps_the_input_by_its_own_count(left: bool) -> None:  # noqa: FBT001
    """Whether its caller left, or it was cut."""
    book = departed_where_b_counts_more("b", "a")
    if left:
        book.apply(book.flight.unserved("b"))
        assert (book.at("t")["total"], book.flight.used) == (90, Size(90, 0))
    else:
        book.apply(book.flight.attempt_failed("b", Refund.INPUT_KEPT, NOW))
        assert book.at("a")["total"] == 100
    assert (book.at("b")["input"], book.at("b").get("output")) == (90, None)
    assert book.purse("b") == pytest.approx(cost(RATES["b"], Size(90, 0)))


def _keys(changes: list[Change]) -> set[str]:
    return {change.key for change in changes}


def test_never_departed_gives_the_tenant_everything_back_once() -> None:
    """A refused request costs its tenant nothing; nothing that comes later changes that."""
    book = Book()
    assert book.apply(book.flight.cancel())
    assert not any(book.held.values())
    assert not book.apply(book.flight.cancel())


def test_landing_gives_slots_back_and_keeps_tokens() -> None:
    """The stream's end releases the slot at the upstream and the tenant's; tokens stay until the outcome is known."""
    book = departed()
    book.apply(book.flight.land(1002.0))
    assert book.at("a") == {"total": 100, "requests": 1}
    assert book.at("t") == {"total": 100, "requests": 1}
    assert (book.of_session(), book.dollars()) == (100, RESERVED)
    assert not book.apply(book.flight.land(1003.0))
    assert book.flight.landed == 1002.0


@pytest.mark.parametrize(
    ("usage", "seen", "upfront", "kept", "tenant"),
    [
        (Usage(50, 10), None, "", 60, 60),
        (Usage(50, 10), None, "a", 100, 60),
        (Usage(80, 40), None, "", 120, 120),
        (Usage(80, 40), None, "a", 120, 120),
        (Usage(0, 0), None, "", 0, 0),
        (None, None, "", 100, 100),
        (None, 7, "", 67, 67),
        (None, 700, "", 100, 100),
        (Usage(50, None), None, "", 90, 90),
        (Usage(50, None), 7, "", 57, 57),
        (Usage(None, 10), None, "", 100, 100),
    ],
)
def test_who_served_keeps_what_was_used(
    usage: Usage | None, seen: int | None, upfront: str, kept: float, tenant: float
) -> None:
    """Reported usage settles both; unknown keeps the estimate, of a cut answer at most what was seen of its output.

    A provider that charges up front keeps the estimate for good. Explicit zero is not unknown.
    """
    book = departed("a", upfront=upfront)
    book.apply(book.flight.served("a", usage, seen))
    book.apply(book.flight.land(1002.0))
    assert book.at("a").get("total", 0) == kept
    assert book.at("t").get("total", 0) == book.of_session() == tenant
    assert book.flight.used is not None
    assert book.flight.used.total == tenant
    assert not book.flight.open_books


@pytest.mark.parametrize(
    ("refund", "upfront", "kept"),
    [
        (Refund.ALL, "", {"requests": 1}),
        (Refund.ALL, "b", {"requests": 1}),
        (Refund.UNSENT, "", {}),
        (Refund.INPUT_KEPT, "", {"input": 60, "requests": 1}),
        (Refund.INPUT_KEPT, "b", {"input": 60, "output": 40, "requests": 1}),
    ],
)
def test_a_failed_attempt_gives_back_by_how_it_failed(refund: Refund, upfront: str, kept: dict[str, float]) -> None:
    """Refused: all tokens; never sent: its request too; cut: all but the input. Charged up front stays charged."""
    book = departed("b", "a", upfront=upfront)
    book.apply(book.flight.attempt_failed("b", refund, NOW))
    assert book.at("b") == kept
    assert book.at("a") == {"slots": 1, "total": 100, "requests": 1, "kv": 70}


@pytest.mark.parametrize(
    ("name", "usage", "seen", "dollars"),
    [
        ("a", Usage(50, 10), None, 0.5 + 0.2),
        ("a", Usage(0, 0), None, 0),
        ("a", None, None, 0.6 + 0.8),
        ("a", None, 7, 0.6 + 0.14),
        ("a", Usage(50, None), 7, 0.5 + 0.14),
        ("b", Usage(50, 10, cached=20, cache_write=10, reasoning=4), None, 20 * 0.03 + 10 * 0.04 + 6 * 0.06 + 4 * 0.07),
        ("b", Usage(500, 100), None, 15 + 6),
        ("c", Usage(50, 10), None, 0),
        ("d", Usage(50, 10), None, 0),
    ],
)
def test_who_served_is_paid_by_its_own_prices(name: str, usage: Usage | None, seen: int | None, dollars: float) -> None:
    """Reserved was the dearest; the hour, the day and the session pay what was used, also beyond what was reserved.

    Where no price is known nothing is paid, which is not the same as a price of zero.
    """
    book = departed(name)
    book.apply(book.flight.served(name, usage, seen))
    assert book.dollars() == pytest.approx(dollars)
    assert book.flight.cost == (None if name == "c" else pytest.approx(dollars))


@pytest.mark.parametrize(
    ("refund", "paid"), [(Refund.ALL, 0), (Refund.UNSENT, 0), (Refund.INPUT_KEPT, 1.8), (Refund.KEPT, 4.2)]
)
@pytest.mark.parametrize("late", [False, True])
def test_a_failed_attempt_is_paid_for_only_where_it_was_begun(refund: Refund, paid: float, late: bool) -> None:  # noqa: FBT001
    """Refused or never sent: nothing. Cut: its input, beside what served in the end, once, in whatever order told."""
    book = departed("b", "a")
    if not late:
        book.apply(book.flight.attempt_failed("b", refund, NOW))
        assert book.dollars() == pytest.approx(RESERVED + paid)
    book.apply(book.flight.served("a", Usage(50, 10)))
    for _ in range(2):
        book.apply(book.flight.attempt_failed("b", refund, NOW))
    assert book.dollars() == pytest.approx(0.7 + paid)
    assert book.flight.cost == pytest.approx(0.7 + paid)


@pytest.mark.parametrize("first", ["cut", "left"])
def test_a_client_that_left_an_attempt_that_was_cut_pays_its_input_once(first: str) -> None:
    """Both records tell of the same prompt."""
    book = departed("b", "a")
    steps = [
        lambda: book.flight.attempt_failed("b", Refund.INPUT_KEPT, NOW, last=True),
        lambda: book.flight.unserved("b"),
    ]
    for step in steps if first == "cut" else reversed(steps):
        book.apply(step())
    assert book.dollars() == pytest.approx(1.8)


def test_a_client_that_left_where_it_had_been_refused_pays_no_dollars() -> None:
    """Nothing was begun there; its tokens are still those of its prompt."""
    book = departed("b", "a")
    book.apply(book.flight.attempt_failed("b", Refund.ALL, NOW, last=True))
    book.apply(book.flight.unserved("b"))
    assert (book.dollars(), book.of_session(), book.flight.cost) == (0, 60, None)


def test_an_upstreams_own_dollars_are_what_it_bills() -> None:
    """Reserved where it goes first, moved to the next on failure, settled at its own prices by what was used."""
    book = departed("b", "a")
    assert (book.purse("b"), book.purse("a")) == (PURSES["b"], 0)
    book.apply(book.flight.attempt_failed("b", Refund.ALL, NOW))
    assert (book.purse("b"), book.purse("a")) == (0, PURSES["a"])
    book.apply(book.flight.served("a", Usage(50, 10)))
    assert (book.purse("b"), book.purse("a")) == (0, pytest.approx(0.7))


def test_up_front_is_what_limits_are_charged_and_not_what_is_billed() -> None:
    """Of dollars only what was used is paid, whether it served or was cut."""
    book = departed("b", "a", upfront="ab")
    book.apply(book.flight.attempt_failed("b", Refund.INPUT_KEPT, NOW))
    book.apply(book.flight.served("a", Usage(50, 10)))
    assert (book.purse("b"), book.purse("a")) == (pytest.approx(1.8), pytest.approx(0.7))


def test_an_attempt_that_was_cut_where_nothing_was_reserved_owes_its_input() -> None:
    """Its failure is known before that of the one before it, which is what would have reserved there."""
    book = departed("a", "b", "c")
    book.apply(book.flight.attempt_failed("b", Refund.INPUT_KEPT, NOW))
    book.apply(book.flight.attempt_failed("a", Refund.ALL, NOW))
    book.apply(book.flight.served("c", Usage(50, 10)))
    assert (book.purse("a"), book.purse("b"), book.dollars()) == (0, pytest.approx(1.8), pytest.approx(1.8))


def test_two_attempts_that_were_cut_at_one_upstream_owe_two_prompts() -> None:
    """Each was accepted; told again, neither is paid for once more."""
    book = departed("a")
    book.flight.again = True
    for _ in range(3):
        book.apply(book.flight.attempt_failed("a", Refund.INPUT_KEPT, NOW))
    book.apply(book.flight.unserved())
    assert (book.purse("a"), book.dollars()) == (pytest.approx(1.2), pytest.approx(1.2))


def test_what_is_held_in_a_cache_moves_with_the_slot() -> None:
    """Each upstream has its own claim, or none; what the last one holds comes back when the stream ends."""
    book = departed("a", "b", "c")
    held = []
    for name in "ab":
        held.append({key: amount for key, amount in book.held.items() if key.endswith("/kv") and amount})
        book.apply(book.flight.attempt_failed(name, Refund.ALL, NOW))
    held.append({key: amount for key, amount in book.held.items() if key.endswith("/kv") and amount})
    assert held == [{"upstream/a/kv": 70}, {}, {"upstream/c/kv": 90}]
    book.apply(book.flight.served("c", Usage(5, 5)))
    assert book.held["upstream/c/kv"] == 90
    book.apply(book.flight.land(1002.0))
    assert not any(amount for key, amount in book.held.items() if key.endswith("/kv"))


def test_an_upstream_with_a_limit_on_requests_only_gets_the_unsent_one_back() -> None:
    """No tokens reserved is not the same as nothing taken."""
    book = departed("d", "a")
    book.apply(book.flight.attempt_failed("d", Refund.UNSENT, NOW))
    assert book.at("d") == {}


def test_a_failed_attempt_that_is_told_twice_is_settled_once() -> None:
    """The second record finds nothing, whatever it says."""
    book = departed()
    book.apply(book.flight.attempt_failed("a", Refund.INPUT_KEPT, NOW))
    for refund in Refund:
        assert not book.apply(book.flight.attempt_failed("a", refund, NOW))


def test_failover_moves_slot_and_reservation_down_the_order() -> None:
    """Each failure moves both to the next; after the last nothing is held there any more."""
    book = departed("a", "b", "c")
    places = []
    for name in "abc":
        places.append([place for place in "abc" if "slots" in book.at(place)])
        book.apply(book.flight.attempt_failed(name, Refund.ALL, NOW))
    assert places == [["a"], ["b"], ["c"]]
    assert not any("slots" in book.at(place) for place in "abc")
    book.apply(book.flight.land(1002.0))
    assert book.at("t") == {"total": 100, "requests": 1}


def test_the_last_attempt_moves_nothing_on() -> None:
    """When its answer went to the caller nobody is asked after it."""
    book = departed("a", "b")
    book.apply(book.flight.attempt_failed("a", Refund.ALL, NOW, last=True))
    assert (book.at("a"), book.at("b")) == ({"requests": 1}, {})


def test_who_served_did_not_fail() -> None:
    """A record that says so afterwards changes nothing."""
    book = departed("a")
    book.apply(book.flight.served("a", None))
    assert not book.apply(book.flight.attempt_failed("a", Refund.UNSENT, NOW))


def test_a_failure_told_out_of_order_is_passed_over_later() -> None:
    """When B's failure is known before A's, A's moves slot and tokens to C, not to B."""
    book = departed("a", "b", "c")
    book.apply(book.flight.attempt_failed("b", Refund.ALL, NOW))
    assert "slots" in book.at("a")
    book.apply(book.flight.attempt_failed("a", Refund.ALL, NOW))
    assert book.at("b") == {"requests": 1}
    assert book.at("c") == {"slots": 1, "kv": 90}


def test_who_served_after_a_failure_not_yet_told_is_charged() -> None:
    """The final record may come first: B pays what it served and its request; then A gets its tokens back."""
    book = departed("a", "b")
    book.apply(book.flight.served("b", Usage(50, 10)))
    assert book.at("b") == {"input": 50, "output": 10, "requests": 1}
    book.apply(book.flight.attempt_failed("a", Refund.ALL, NOW))
    assert book.at("b") == {"input": 50, "output": 10, "requests": 1, "slots": 1}
    book.apply(book.flight.land(1002.0))
    assert book.at("a") == {"requests": 1}
    assert book.at("b") == {"input": 50, "output": 10, "requests": 1}


def test_a_failure_told_after_landing_holds_no_slot_anywhere() -> None:
    """Tokens move on to the next, because it may have served; slots are back already."""
    book = departed("a", "b")
    book.apply(book.flight.land(1002.0))
    book.apply(book.flight.attempt_failed("a", Refund.ALL, NOW))
    assert book.at("b") == {"input": 60, "output": 40, "requests": 1}
    book.apply(book.flight.served("b", None))
    assert book.at("b") == {"input": 60, "output": 40, "requests": 1}
    assert not book.flight.open_books


@pytest.mark.parametrize("name", ["", "elsewhere"])
@pytest.mark.parametrize("landed", [False, True])
def test_records_of_upstreams_it_never_went_to_change_nothing(name: str, landed: bool) -> None:  # noqa: FBT001
    """An empty or a foreign name is nobody's failure, before and after landing."""
    book = departed("a", "b")
    if landed:
        book.apply(book.flight.land(1002.0))
    assert not book.apply(book.flight.attempt_failed(name, Refund.ALL, NOW))
    assert not any(key.startswith("upstream") for key in _keys(book.flight.unserved(name)))


def test_a_client_that_left_pays_for_the_input() -> None:
    """At the upstream that was at it, and of its own quota."""
    book = departed("b", "a")
    book.apply(book.flight.unserved("b"))
    book.apply(book.flight.land(1002.0))
    assert book.at("b") == {"input": 60, "requests": 1}
    assert book.at("t") == {"total": 60, "requests": 1}
    assert (book.of_session(), book.dollars()) == (60, pytest.approx(1.8))
    assert book.flight.used == Size(60, 0)
    assert not book.apply(book.flight.unserved())


def test_a_client_that_left_during_a_failover_not_yet_told() -> None:
    """B keeps the input though nothing was reserved there yet; A, whose record is overdue, gets all back."""
    book = departed("a", "b")
    book.apply(book.flight.unserved("b"))
    book.apply(book.flight.land(1002.0))
    book.apply(book.flight.expire())
    assert book.at("b") == {"input": 60, "requests": 1}
    assert book.at("a") == {"requests": 1}


def test_leaving_an_upstream_that_had_failed_before_costs_nothing_more() -> None:
    """Its failure has settled it already."""
    book = departed("b", "a")
    book.apply(book.flight.attempt_failed("b", Refund.INPUT_KEPT, NOW))
    assert book.dollars() == pytest.approx(RESERVED + 1.8)
    book.apply(book.flight.unserved("b"))
    assert book.at("b") == {"input": 60, "requests": 1}
    assert book.dollars() == pytest.approx(1.8)


def test_an_answer_that_was_none_is_paid_whole_though_its_client_had_left_before_that_was_told() -> None:
    """The input is billed once, the output of the estimate on top."""
    book = departed("a")
    book.apply(book.flight.unserved("a"))
    assert book.dollars() == pytest.approx(cost(RATES["a"], Size(ESTIMATE.input, 0)))
    book.apply(book.flight.attempt_failed("a", Refund.KEPT, NOW))
    assert book.dollars() == pytest.approx(cost(RATES["a"], ESTIMATE))
    assert book.flight.cost == pytest.approx(cost(RATES["a"], ESTIMATE))


def test_served_by_nobody_costs_the_tenant_nothing_but_a_request() -> None:
    """Every attempt failed: all of its tokens come back."""
    book = departed("a")
    book.apply(book.flight.attempt_failed("a", Refund.ALL, NOW))
    book.apply(book.flight.unserved())
    book.apply(book.flight.land(1002.0))
    assert book.at("t") == {"requests": 1}
    assert (book.of_session(), book.dollars()) == (0, 0)
    assert book.flight.used == Size(0, 0)
    assert not book.flight.open_books


def test_an_outcome_that_never_comes_keeps_the_estimate() -> None:
    """Unknown: reservation and tenant's tokens stay taken, and the books are closed."""
    book = departed("a", "b")
    book.apply(book.flight.land(1002.0))
    assert not book.apply(book.flight.expire())
    assert book.at("a") == {"total": 100, "requests": 1}
    assert book.at("t") == {"total": 100, "requests": 1}
    assert (book.of_session(), book.dollars()) == (100, RESERVED)
    assert book.flight.used == ESTIMATE
    assert book.flight.lost
    assert not book.flight.open_books


def test_waiting_is_from_arrival_to_departure() -> None:
    """0 before it departed, and never negative."""
    flight = Flight(request(arrived=1000.0))
    assert flight.waited_s == 0
    flight.depart(("a",), PRICES, 1000.5)
    assert flight.waited_s == 0.5
    early = Flight(request(arrived=1000.0))
    early.depart(("a",), PRICES, 999.0)
    assert early.waited_s == 0


refunds = st.sampled_from(Refund)
names = st.sampled_from(["a", "b", "c", "d", "", "elsewhere"])
usages = st.one_of(st.none(), st.builds(Usage, *[st.one_of(st.none(), st.integers(0, 150))] * 5))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("attempt_failed"), names, refunds, st.just(NOW)),
        st.tuples(st.just("served"), names, usages, st.one_of(st.none(), st.integers(0, 150))),
        st.tuples(st.just("unserved"), names),
        st.tuples(st.just("land")),
        st.tuples(st.just("expire")),
        st.tuples(st.just("cancel")),
    ),
    max_size=12,
)
orders = st.permutations("abcd").flatmap(lambda order: st.integers(1, 4).map(lambda n: tuple(order[:n])))


@given(orders, st.frozensets(st.sampled_from("abcd")), st.integers(0, 3), steps)
def test_any_history_ends_with_closed_books(
    order: tuple[str, ...], upfront: frozenset[str], early: int, history: list[tuple]
) -> None:
    """Steps in any order, repeated and missing, before and after departure; then it lands and its time is over.

    What is held while it runs is back exactly once and was held at one place at a time; each key ends at what the rules
    allow: what was taken of it came back, but for what was used.
    """
    book = Book(order, upfront)
    done: list[tuple] = []
    for i, (step, *arguments) in enumerate([*history, ("land",), ("expire",), ("cancel",)]):
        flight = book.flight
        if i == min(early, len(history)) and not flight.settled:
            book.depart()
        flown = flight.departed is not None
        changed = book.apply(_do(flight, step, arguments))
        if flown:
            done.append((step, *arguments))
        assert flown or not changed or step == "cancel"
        for kind in ("slots", "kv"):
            assert sum(book.held[f"upstream/{name}/{kind}"] > 0 for name in PRICES) <= 1
        assert book.held["tenant/t/slots"] <= 1
    _check_end(book, done)


KEPT = {Refund.INPUT_KEPT: Size(ESTIMATE.input, 0), Refund.KEPT: ESTIMATE}


def _do(flight: Flight, step: str, arguments: list) -> list[Change]:
    if step == "land":
        return flight.land(1002.0)
    return getattr(flight, step)(*arguments)


def _check_end(book: Book, done: list[tuple]) -> None:
    assert not any(amount for key, amount in book.held.items() if key.rpartition("/")[2] in ("slots", "kv"))
    assert not book.flight.open_books
    if book.flight.departed is None:
        assert not any(book.held.values())
        return
    outcome = next(step for step in done if step[0] in ("served", "unserved", "expire"))
    actual = _actual(outcome[2], outcome[3]) if outcome[0] == "served" else None
    for name in PRICES:
        _check_upstream(book, name, actual if outcome[:2] == ("served", name) else None, _cut_before(done, name))
    kept = {"expire": ESTIMATE.total, "unserved": ESTIMATE.input if outcome[-1] in book.order else 0}
    used = kept[outcome[0]] if actual is None else actual.total
    assert book.at("t").get("total", 0) == book.of_session() == used
    assert book.flight.used is not None
    assert book.flight.used.total == used
    assert book.at("t")["requests"] == 1
    billed = _billed(book.order, done)
    if outcome[0] == "expire":
        assert book.dollars() == pytest.approx(RESERVED + sum(billed.values()))
    else:
        assert book.dollars() == pytest.approx(sum(billed.values()))
        for name in PURSES:
            assert book.purse(name) == pytest.approx(billed.get(name, 0.0))


def _billed(order: tuple[str, ...], done: list[tuple]) -> dict[str, float]:
    """What each provider bills: what served by usage, the input of each attempt that was cut or left, the estimate of
    an answer that was none, else nothing.
    """
    inputs: dict[str, Size] = {}
    failed: set[str] = set()
    outcome, dollars = "", {}
    for step, *arguments in done:
        name = arguments[0] if arguments else ""
        if step == "attempt_failed" and name in order and name not in failed and outcome != f"served {name}":
            failed.add(name)
            inputs |= {name: KEPT[arguments[1]]} if arguments[1] in KEPT else {}
        elif step in ("served", "unserved", "expire") and not outcome:
            outcome = f"{step} {name}"
            if step == "served" and name in RATES:
                dollars = {name: cost(RATES[name], _actual(*arguments[1:]), arguments[1])}
            elif step == "unserved" and name in order and name not in failed:
                inputs[name] = Size(ESTIMATE.input, 0)
    for name in inputs.keys() & RATES.keys():
        dollars[name] = dollars.get(name, 0.0) + cost(RATES[name], inputs[name])
    return dollars


def _actual(usage: Usage | None, seen: int | None) -> Size:
    if usage is not None and usage.input is not None and usage.output is not None:
        return Size(usage.input, max(usage.output, min(seen or 0, ESTIMATE.output)))
    prompt = ESTIMATE.input if usage is None or usage.input is None else usage.input
    return Size(prompt, ESTIMATE.output if seen is None else min(seen, ESTIMATE.output))


def _cut_before(done: list[tuple], name: str) -> Size | None:
    """What an attempt there kept that ended before the outcome was known."""
    before = list(takewhile(lambda step: step[0] not in ("served", "unserved", "expire"), done))
    failures = [step[2] for step in before if step[:2] == ("attempt_failed", name)]
    return KEPT.get(failures[0]) if failures else None


def _check_upstream(book: Book, name: str, actual: Size | None, cut: Size | None) -> None:
    """What served keeps its use, or the estimate where that was charged up front; others nothing, input or estimate.

    cut: what an attempt before the one that served had used there: it may be kept, too.
    """
    held, own = book.at(name), {c.key.rpartition("/")[2]: c.amount for c in PRICES[name]}
    for kind in set(own) - {"slots", "kv", "usd_hour"}:
        amount = held.get(kind, 0)
        if kind == "requests":
            assert amount == 1 if actual else amount in (0, 1)
        elif actual:
            upfront, used = name in book.upfront, getattr(actual, kind)
            before = own[kind] if upfront else getattr(cut or Size(0, 0), kind)
            once = max(own[kind], used) if upfront else used
            assert amount in ((once, once + before) if cut else (once,))
        else:
            assert amount in (0, getattr(Size(ESTIMATE.input, 0), kind), own[kind])


@pytest.mark.parametrize(("refund", "paid"), [(Refund.ALL, 0), (Refund.UNSENT, 0), (Refund.INPUT_KEPT, 60)])
def test_an_only_upstream_may_be_asked_a_second_time(refund: Refund, paid: int) -> None:
    """Its slot stays taken; tokens of the first attempt come back by how it failed, and the second is charged anew."""
    book = departed("a")
    book.flight.again = True
    assert book.apply(book.flight.attempt_failed("a", refund, NOW)) == (refund is not Refund.UNSENT)
    sent = 1 if refund is Refund.UNSENT else 2
    assert book.at("a") == {"slots": 1, "kv": 70, "total": 100 + paid, "requests": sent}
    book.apply(book.flight.served("a", Usage(input=50, output=10)))
    book.apply(book.flight.land(1002.0))
    assert book.at("a") == {"total": 60 + paid, "requests": sent}
    assert book.dollars() == pytest.approx(cost(RATES["a"], Size(paid, 0)) + cost(RATES["a"], Size(50, 10)))
    assert not book.flight.open_books


@pytest.mark.parametrize("refund", Refund)
@pytest.mark.parametrize("upfront", ["", "a"])
def test_it_is_the_same_whether_the_first_go_or_the_outcome_is_told_first(refund: Refund, upfront: str) -> None:
    """Of an only upstream that failed and then served: the books stay open until both are known."""
    ends = []
    for late in (False, True):
        book = departed("a", upfront=upfront)
        book.flight.again, book.flight.attempts = True, 2
        steps = [
            lambda book=book: book.flight.attempt_failed("a", refund, NOW),
            lambda book=book: book.flight.served("a", Usage(input=50, output=10)),
        ]
        for step in reversed(steps) if late else steps:
            assert book.flight.open_books
            book.apply(step())
        book.flight.heard.add(("a", 1, 2.0))
        book.apply(book.flight.attempt_failed("a", refund, NOW) if late else [])
        book.apply(book.flight.land(1002.0))
        assert not book.flight.open_books
        ends.append((book.at("a"), pytest.approx(book.dollars()), pytest.approx(book.flight.cost)))
    assert ends[0] == ends[1]


def test_a_second_attempt_that_fails_ends_it() -> None:
    """There is no third, and all that the upstream does not bill comes back."""
    book = departed("a")
    book.flight.again = True
    for _ in range(2):
        assert book.apply(book.flight.attempt_failed("a", Refund.ALL, NOW))
    assert not book.apply(book.flight.attempt_failed("a", Refund.ALL, NOW))
    book.apply(book.flight.unserved())
    book.apply(book.flight.land(1002.0))
    assert book.at("a") == {"requests": 2}
    assert not book.flight.open_books


def test_an_attempt_that_is_not_made_again_is_the_last() -> None:
    """It failed in a way that the router does not try again."""
    book = departed("a")
    book.flight.again = True
    book.apply(book.flight.attempt_failed("a", Refund.ALL, NOW, last=True))
    assert book.at("a") == {"requests": 1}


def test_a_first_attempt_that_is_heard_of_late_only_counts_as_a_request() -> None:
    """The outcome was known before: nobody was served, and nothing is reserved any more for a second time."""
    book = departed("a")
    book.flight.again = True
    book.apply(book.flight.unserved())
    book.apply(book.flight.attempt_failed("a", Refund.ALL, NOW))
    assert book.at("a") == {"slots": 1, "kv": 70, "requests": 2}
    book.apply(book.flight.land(1002.0))
    assert book.at("a") == {"requests": 2}


@pytest.mark.parametrize(("refund", "paid"), [(Refund.UNSENT, 0), (Refund.INPUT_KEPT, 1)])
def test_two_attempts_that_are_both_heard_of_late_are_both_settled(refund: Refund, paid: int) -> None:
    """The books stay open for the second of them, though the outcome is known and the stream has ended."""
    book = departed("a")
    book.flight.again = True
    book.apply(book.flight.unserved())
    book.apply(book.flight.land(1002.0))
    for number in (1, 2):
        assert book.flight.open_books
        book.flight.heard.add(("a", number, 2.0))
        book.apply(book.flight.attempt_failed("a", refund, NOW))
        assert book.flight.open_books == (number == 1)
    assert book.at("a") == ({"requests": 2, "total": 120} if paid else {})
    assert book.dollars() == pytest.approx(2 * paid * cost(RATES["a"], Size(60, 0)))


def test_of_a_broken_answer_what_was_seen_counts_where_less_was_reported() -> None:
    """Anthropic's first event reports one token of output, however many follow."""
    book = departed("a")
    book.apply(book.flight.served("a", Usage(input=60, output=1), seen_output=30))
    assert book.at("a")["total"] == 90


def test_it_knows_how_many_failures_are_yet_to_be_told() -> None:
    """Whoever served did not fail; what is not known to have been tried is not missed."""
    flight = departed("a", "b").flight
    assert flight.unheard == 0
    flight.attempts = 2
    assert flight.unheard == 2
    flight.served("b", None)
    assert flight.unheard == 1
    flight.heard.add(("a", 1, 0.0))
    assert flight.unheard == 0


@dataclass(frozen=True)
class Journey:
    """What really happened to a request. failed: how each attempt ended that did not serve. end: what its own record
    says: who served, or where it was when its client left it, or that nobody is left.
    """

    order: tuple[str, ...]
    again: bool
    failed: tuple[Refund, ...]
    end: str
    upfront: frozenset[str]

    @property
    def tries(self) -> tuple[str, ...]:
        """Who is asked, one after the other."""
        return self.order * 2 if self.again else self.order

    def fly(self, told_at: int, landed_at: int) -> Book:
        """The books when all is told: its own record after so many of its attempts', its stream's end after so many of
        all records.
        """
        book = Book(self.order, self.upfront)
        book.depart()
        book.flight.again = self.again
        steps = [partial(self._fail, book, number) for number in range(len(self.failed))]
        steps.insert(told_at, partial(self._end, book))
        steps.insert(landed_at, lambda: book.flight.land(NOW))
        for step in steps:
            book.apply(step())
        return book

    def _fail(self, book: Book, number: int) -> list[Change]:
        name, last = self.tries[number], number + 1 == len(self.tries)
        book.flight.attempts = max(book.flight.attempts, number + 1)
        book.flight.heard.add((name, number + 1, float(number)))
        return book.flight.attempt_failed(name, self.failed[number], NOW, last=last)

    def _end(self, book: Book) -> list[Change]:
        asked = len(self.failed) + (self.end != "nobody")
        book.flight.attempts = asked
        if self.end == "served":
            return book.flight.served(self.tries[asked - 1], Usage(input=50, output=10))
        return book.flight.unserved(self.tries[asked - 1] if self.end == "left" else "")


@st.composite
def journeys(draw: st.DrawFn) -> Journey:
    """What can happen on Envoy: attempts one after the other, until one serves, its client leaves, or none is left."""
    order = draw(orders)
    again = draw(st.booleans()) if len(order) == 1 else False
    most = len(order) * (1 + again)
    failed = tuple(draw(st.lists(refunds, max_size=most)))
    end = "nobody" if len(failed) == most else draw(st.sampled_from(["served", "left"]))
    return Journey(order, again, failed, end, draw(st.frozensets(st.sampled_from("abcd"))))


@given(journeys(), st.data())
def test_when_it_is_told_how_a_request_ended_changes_nothing(journey: Journey, data: st.DataObject) -> None:
    """Before or after its attempts, and whenever its stream ends: each upstream keeps the same in the end, and so do
    its tenant and its session.
    """
    records = len(journey.failed) + 1
    usual = journey.fly(records - 1, records)
    told_at = data.draw(st.integers(0, records - 1), "told after")
    book = journey.fly(told_at, data.draw(st.integers(0, records), "landed after"))
    assert {key: pytest.approx(amount) for key, amount in usual.held.items() if amount} == +book.held
    assert book.flight.cost == pytest.approx(usual.flight.cost)
    assert book.flight.used == usual.flight.used
    assert not book.flight.open_books
