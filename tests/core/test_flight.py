"""The books of one request: every slot back exactly once, tokens by the refund rules, never more than was taken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.capacity import Change
from extproc.core.flight import Flight, Refund
from extproc.core.policy import Accounting
from extproc.core.request import Size, Usage
from tests.doubles import claims, request

KINDS = ("slots", "total", "input", "output", "requests")
ALLOWANCE = claims(tenant__t__slots=1, tenant__t__requests=1, tenant__t__total=100)
PRICES = {
    "a": claims(upstream__a__slots=1, upstream__a__m__total=100, upstream__a__m__requests=1),
    "b": claims(upstream__b__slots=1, upstream__b__m__input=60, upstream__b__m__output=40, upstream__b__m__requests=1),
    "c": claims(upstream__c__slots=1),
    "d": claims(upstream__d__slots=1, upstream__d__m__requests=1),
}
ESTIMATE = Size(60, 40)


@dataclass
class Book:
    """A flight and what it holds, per key, as its changes say."""

    order: tuple[str, ...] = ("a", "b", "c")
    upfront: frozenset[str] = frozenset()
    held: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.flight = Flight(request(size=ESTIMATE), ALLOWANCE)
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
            self.held[change.key] -= change.amount
            assert self.held[change.key] >= 0
        return bool(changes)

    def at(self, place: str) -> dict[str, float]:
        """What is held at an upstream or of the tenant, by kind."""
        return {
            key.rpartition("/")[2]: amount
            for key, amount in self.held.items()
            if amount and key.split("/")[1] == place
        }  # fmt: skip


def departed(*order: str, upfront: str = "") -> Book:
    book = Book(order or ("a", "b", "c"), frozenset(upfront))
    book.depart()
    return book


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
    assert book.at("t").get("total", 0) == tenant
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
    book.apply(book.flight.attempt_failed("b", refund))
    assert book.at("b") == kept
    assert book.at("a") == {"slots": 1, "total": 100, "requests": 1}


def test_an_upstream_with_a_limit_on_requests_only_gets_the_unsent_one_back() -> None:
    """No tokens reserved is not the same as nothing taken."""
    book = departed("d", "a")
    book.apply(book.flight.attempt_failed("d", Refund.UNSENT))
    assert book.at("d") == {}


def test_a_failed_attempt_that_is_told_twice_is_settled_once() -> None:
    """The second record finds nothing, whatever it says."""
    book = departed()
    book.apply(book.flight.attempt_failed("a", Refund.INPUT_KEPT))
    for refund in Refund:
        assert not book.apply(book.flight.attempt_failed("a", refund))


def test_failover_moves_slot_and_reservation_down_the_order() -> None:
    """Each failure moves both to the next; after the last nothing is held there any more."""
    book = departed("a", "b", "c")
    places = []
    for name in "abc":
        places.append([place for place in "abc" if "slots" in book.at(place)])
        book.apply(book.flight.attempt_failed(name, Refund.ALL))
    assert places == [["a"], ["b"], ["c"]]
    assert not any("slots" in book.at(place) for place in "abc")
    book.apply(book.flight.land(1002.0))
    assert book.at("t") == {"total": 100, "requests": 1}


def test_the_last_attempt_moves_nothing_on() -> None:
    """When its answer went to the caller nobody is asked after it."""
    book = departed("a", "b")
    book.apply(book.flight.attempt_failed("a", Refund.ALL, last=True))
    assert (book.at("a"), book.at("b")) == ({"requests": 1}, {})


def test_who_served_did_not_fail() -> None:
    """A record that says so afterwards changes nothing."""
    book = departed("a")
    book.apply(book.flight.served("a", None))
    assert not book.apply(book.flight.attempt_failed("a", Refund.UNSENT))


def test_a_failure_told_out_of_order_is_passed_over_later() -> None:
    """When B's failure is known before A's, A's moves slot and tokens to C, not to B."""
    book = departed("a", "b", "c")
    book.apply(book.flight.attempt_failed("b", Refund.ALL))
    assert "slots" in book.at("a")
    book.apply(book.flight.attempt_failed("a", Refund.ALL))
    assert book.at("b") == {"requests": 1}
    assert book.at("c") == {"slots": 1}


def test_who_served_after_a_failure_not_yet_told_is_charged() -> None:
    """The final record may come first: B pays what it served and its request; then A gets its tokens back."""
    book = departed("a", "b")
    book.apply(book.flight.served("b", Usage(50, 10)))
    assert book.at("b") == {"input": 50, "output": 10, "requests": 1}
    book.apply(book.flight.attempt_failed("a", Refund.ALL))
    assert book.at("b") == {"input": 50, "output": 10, "requests": 1, "slots": 1}
    book.apply(book.flight.land(1002.0))
    assert book.at("a") == {"requests": 1}
    assert book.at("b") == {"input": 50, "output": 10, "requests": 1}


def test_a_failure_told_after_landing_holds_no_slot_anywhere() -> None:
    """Tokens move on to the next, because it may have served; slots are back already."""
    book = departed("a", "b")
    book.apply(book.flight.land(1002.0))
    book.apply(book.flight.attempt_failed("a", Refund.ALL))
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
    assert not book.apply(book.flight.attempt_failed(name, Refund.ALL))
    assert not any(key.startswith("upstream") for key in _keys(book.flight.unserved(name)))


def test_a_client_that_left_pays_for_the_input() -> None:
    """At the upstream that was at it, and of its own quota."""
    book = departed("b", "a")
    book.apply(book.flight.unserved("b"))
    book.apply(book.flight.land(1002.0))
    assert book.at("b") == {"input": 60, "requests": 1}
    assert book.at("t") == {"total": 60, "requests": 1}
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
    book.apply(book.flight.attempt_failed("b", Refund.INPUT_KEPT))
    assert _keys(book.flight.unserved("b")) == {"tenant/t/total"}


def test_served_by_nobody_costs_the_tenant_nothing_but_a_request() -> None:
    """Every attempt failed: all of its tokens come back."""
    book = departed("a")
    book.apply(book.flight.attempt_failed("a", Refund.ALL))
    book.apply(book.flight.unserved())
    book.apply(book.flight.land(1002.0))
    assert book.at("t") == {"requests": 1}
    assert not book.flight.open_books


def test_an_outcome_that_never_comes_keeps_the_estimate() -> None:
    """Unknown: reservation and tenant's tokens stay taken, and the books are closed."""
    book = departed("a", "b")
    book.apply(book.flight.land(1002.0))
    assert not book.apply(book.flight.expire())
    assert book.at("a") == {"total": 100, "requests": 1}
    assert book.at("t") == {"total": 100, "requests": 1}
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
usages = st.one_of(st.none(), st.builds(Usage, *[st.one_of(st.none(), st.integers(0, 150))] * 2))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("attempt_failed"), names, refunds),
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

    Every slot is back exactly once; at most one was held at a time; each key ends at what the rules allow.
    """
    book = Book(order, upfront)
    done: list[tuple] = []
    for i, (step, *arguments) in enumerate([*history, ("land",), ("expire",), ("cancel",)]):
        flight = book.flight
        if i == min(early, len(history)) and not flight.settled:
            book.depart()
        settled = flight.settled
        flown = flight.departed is not None
        changed = book.apply(_do(flight, step, arguments))
        if flown and not settled:
            done.append((step, *arguments))
        assert flown or not changed or step == "cancel"
        assert sum(book.held[f"upstream/{name}/slots"] for name in PRICES) <= 1
        assert book.held["tenant/t/slots"] <= 1
    _check_end(book, done)


def _do(flight: Flight, step: str, arguments: list) -> list[Change]:
    if step == "land":
        return flight.land(1002.0)
    return getattr(flight, step)(*arguments)


def _check_end(book: Book, done: list[tuple]) -> None:
    assert not any(amount for key, amount in book.held.items() if key.endswith("/slots"))
    assert not book.flight.open_books
    if book.flight.departed is None:
        assert not any(book.held.values())
        return
    served = next(step for step in done if step[0] in ("served", "unserved", "expire"))
    actual = _actual(served[2], served[3]) if served[0] == "served" else None
    for name in PRICES:
        _check_upstream(book, name, actual if served[:2] == ("served", name) else None)
    kept = {"expire": ESTIMATE.total, "unserved": ESTIMATE.input if served[-1] in book.order else 0}
    assert book.at("t").get("total", 0) == (kept[served[0]] if actual is None else actual.total)
    assert book.at("t")["requests"] == 1


def _actual(usage: Usage | None, seen: int | None) -> Size:
    if usage is not None and usage.input is not None and usage.output is not None:
        return Size(usage.input, usage.output)
    prompt = ESTIMATE.input if usage is None or usage.input is None else usage.input
    return Size(prompt, ESTIMATE.output if seen is None else min(seen, ESTIMATE.output))


def _check_upstream(book: Book, name: str, actual: Size | None) -> None:
    """What served keeps its use, or the estimate where that was charged up front; others nothing, input or estimate."""
    held, own = book.at(name), {c.key.rpartition("/")[2]: c.amount for c in PRICES[name]}
    for kind in set(own) - {"slots"}:
        amount = held.get(kind, 0)
        if kind == "requests":
            assert amount == 1 if actual else amount in (0, 1)
        elif actual:
            used = getattr(actual, kind)
            assert amount == (max(own[kind], used) if name in book.upfront else used)
        else:
            assert amount in (0, getattr(Size(ESTIMATE.input, 0), kind), own[kind])
