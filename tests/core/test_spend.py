"""What an answer costs: each token once, as what it was; unknown is not zero, zero is not unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.capacity import Claim
from extproc.core.policy import Dollars, Prices, Upstream
from extproc.core.request import Dialect, Endpoint, Size, Usage
from extproc.core.spend import PriceList, bill, cost, dearest, is_costless, is_free, needed, prices_of

PRICES = Prices(input=3.0, output=15.0, cached=0.3, cache_write=3.75, reasoning=20.0)
PLAIN = Prices(input=3.0, output=15.0)
MILLION = 1_000_000


def upstream(name: str = "a", **prices: Prices | tuple[Prices, ...]) -> Upstream:
    given = {
        {"any": "*"}.get(model, model): price if isinstance(price, tuple) else (price,)
        for model, price in prices.items()
    }
    return Upstream(name, "openai", frozenset(Dialect), models={"gpt-5": "prod5"}, prices=given)


@pytest.mark.parametrize(
    ("usage", "dollars"),
    [
        (None, 18.0),
        (Usage(MILLION, MILLION), 18.0),
        (Usage(MILLION, MILLION, cached=0, cache_write=0, reasoning=0), 18.0),
        (Usage(MILLION, MILLION, cached=MILLION), 0.3 + 15.0),
        (Usage(MILLION, MILLION, cache_write=MILLION), 3.75 + 15.0),
        (Usage(MILLION, MILLION, reasoning=MILLION), 3.0 + 20.0),
        (Usage(MILLION, MILLION, 600_000, 300_000, 400_000), 0.1 * 3 + 0.6 * 0.3 + 0.3 * 3.75 + 0.6 * 15 + 0.4 * 20),
    ],
)
def test_every_part_has_its_price(usage: Usage | None, dollars: float) -> None:
    """Cached and written tokens are part of the prompt and reasoning is part of the output: none is paid for twice."""
    assert cost(PRICES, Size(MILLION, MILLION), usage) == pytest.approx(dollars)


def test_a_part_without_a_price_of_its_own_costs_what_its_whole_does() -> None:
    """Cache reads and writes cost as input, reasoning as output."""
    parts = Usage(MILLION, MILLION, cached=600_000, cache_write=300_000, reasoning=400_000)
    assert cost(PLAIN, Size(MILLION, MILLION), parts) == pytest.approx(18.0)


def test_a_price_of_zero_is_a_price() -> None:
    """Cache reads that are free are not paid for as input, and a free model costs nothing at all."""
    assert cost(Prices(3.0, 15.0, cached=0.0), Size(MILLION, 0), Usage(MILLION, 0, cached=MILLION)) == 0
    assert cost(Prices(3.0, 15.0, reasoning=0.0), Size(0, 9), Usage(0, 9, reasoning=9)) == 0
    assert cost(Prices(0.0, 0.0), Size(MILLION, MILLION), Usage(MILLION, MILLION, 5, 5, 5)) == 0


def test_a_part_larger_than_its_whole_is_paid_for_and_leaves_no_rest() -> None:
    """Some providers count reasoning beside the output; what they reported is paid for, never less than nothing."""
    odd = Usage(10, 10, cached=MILLION, reasoning=MILLION)
    assert cost(PRICES, Size(10, 10), odd) == pytest.approx(0.3 + 20.0)


def test_prices_are_those_of_the_upstreams_own_model_else_of_any() -> None:
    """The public name says nothing about the price; where neither is given nothing is known."""
    dear, cheap = Prices(9.0, 9.0), Prices(1.0, 1.0)
    assert prices_of(upstream(prod5=dear, any=cheap), "gpt-5", 0.0) is dear
    assert prices_of(upstream(prod5=dear, any=cheap), "other", 0.0) is cheap
    assert prices_of(upstream(**{"gpt-5": dear}), "gpt-5", 0.0) is None
    assert prices_of(upstream(), "gpt-5", 0.0) is None


def test_rates_name_only_who_has_prices() -> None:
    """An upstream without prices is absent, so that it can be told from a free one."""
    known = PriceList({"a": upstream(any=PLAIN), "b": upstream("b"), "c": upstream("c", any=PRICES)})
    assert known.rates(("a", "b"), "m", 0.0) == {"a": PLAIN}
    assert known.rates(("b",), "m", 0.0) == {}
    assert PriceList({"b": upstream("b")}).rates(("b",), "m", 0.0) == {}


def test_the_last_prices_that_have_begun_hold() -> None:
    """Before the first there are none; a clock that goes back finds what held then."""
    old, new, newest = Prices(1.0, 1.0), Prices(2.0, 2.0, since=100.0), Prices(3.0, 3.0, since=200.0)
    changing = upstream(any=(old, new, newest))
    held = {99.9: old, 100.0: new, 199.0: new, 200.0: newest, 1e9: newest, 0.0: old}
    assert {at: prices_of(changing, "m", at) for at in held} == held
    known = PriceList({"a": changing, "b": upstream("b", prod5=replace(PLAIN, since=150.0))})
    assert {at: known.rates(("a",), "m", at)["a"] for at in held} == held
    assert [sorted(known.rates(("a", "b"), "gpt-5", at)) for at in (149.0, 150.0, 149.0)] == [["a"], ["a", "b"], ["a"]]
    assert PriceList({"a": upstream(any=new)}).rates(("a",), "m", 99.0) == {}


@pytest.mark.parametrize(
    ("rates", "endpoint", "usd"),
    [
        ({"a": Prices(1.0, 0.0), "b": Prices(5.0, 0.0)}, Endpoint.CHAT, 5.0),
        ({}, Endpoint.CHAT, None),
        ({"a": Prices(0.0, 0.0)}, Endpoint.CHAT, None),
        ({"a": Prices(1.0, 0.0)}, Endpoint.COUNT_TOKENS, None),
    ],
)
def test_what_has_to_be_left(rates: dict[str, Prices], endpoint: Endpoint, usd: float | None) -> None:
    """The dearest; None where it costs nothing, whatever is left."""
    assert needed(rates, Size(MILLION, 0), endpoint) == usd


def test_what_cannot_be_read_needs_something_that_is_left() -> None:
    """Unless it is free."""
    nothing = Size(0, 0)
    assert needed({"a": Prices(1.0, 0.0)}, nothing, Endpoint.OTHER) == 0
    assert needed({"a": Prices(0.0, 0.0)}, nothing, Endpoint.OTHER) is None


def test_an_upstreams_own_dollars_are_taken_at_its_own_prices() -> None:
    """Of every period that is limited; nothing where nothing is, where no price is known, or it costs nothing."""
    limited = replace(upstream(), dollars=Dollars(5.0, per_month=50.0))
    size, rates = Size(MILLION, 0), {"a": Prices(2.0, 0.0), "b": Prices(9.0, 0.0)}
    keys = ("upstream/a/usd_hour", "upstream/a/usd_month")
    assert bill(limited, rates, size, Endpoint.CHAT) == tuple(Claim(key, 2.0) for key in keys)
    assert bill(limited, rates, size, Endpoint.COUNT_TOKENS) == ()
    assert bill(limited, {"a": Prices(0.0, 0.0)}, size, Endpoint.CHAT) == ()
    assert bill(limited, {"b": Prices(9.0, 0.0)}, size, Endpoint.CHAT) == ()
    assert bill(upstream(), rates, size, Endpoint.CHAT) == ()


def test_what_is_owned_or_free_costs_nothing() -> None:
    """What nobody knows a price of may."""
    assert is_costless(replace(upstream(), owned=True), {"a": PLAIN})
    assert is_costless(upstream(), {"a": Prices(0.0, 0.0)})
    assert not is_costless(upstream(), {"a": PLAIN})
    assert not is_costless(upstream(), {})


def test_before_it_ran_the_dearest_of_its_upstreams_counts() -> None:
    """Whoever will serve, no more than that is owed; nobody's price known costs nothing."""
    rates = {"a": Prices(1.0, 100.0), "b": Prices(10.0, 1.0)}
    assert dearest(rates, Size(1000, 10)) == pytest.approx(0.01 + 0.00001)
    assert dearest(rates, Size(10, 1000)) == pytest.approx(0.1 + 0.00001)
    assert dearest({}, Size(10, 1000)) == 0


def test_each_is_as_dear_as_its_own_count_makes_it() -> None:
    """A cheap one that counts many tokens may be the dearest."""
    rates = {"a": Prices(3.0, 1.0), "b": Prices(2.0, 1.0)}
    assert dearest(rates, Size(MILLION, 0), {"b": Size(2 * MILLION, 0)}) == 4
    assert needed(rates, Size(MILLION, 0), Endpoint.CHAT, {"a": Size(2 * MILLION, 0)}) == 6
    assert needed(rates, Size(MILLION, 0), Endpoint.CHAT, {"c": Size(9 * MILLION, 0)}) == 3


def test_free_is_what_costs_nothing_in_any_case() -> None:
    """A model whose cache reads alone are free is not."""
    assert is_free(Prices(0.0, 0.0))
    assert is_free(Prices(0.0, 0.0, 0.0, 0.0, 0.0))
    assert not any(is_free(Prices(*(float(i == at) for i in range(5)))) for at in range(5))


tokens = st.integers(0, 10**7)
dollars = st.floats(0, 1000)
maybe = st.one_of(st.none(), dollars)
prices_given = st.builds(Prices, dollars, dollars, maybe, maybe, maybe)


@given(prices_given, tokens, tokens, st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_no_token_is_lost_or_paid_for_twice(prices: Prices, sent: int, made: int, shares: list[float]) -> None:
    """With all prices one dollar per million the cost is the number of tokens, however they are split; and between the
    cheapest and the dearest price of each whole otherwise.
    """
    cached = int(sent * shares[0])
    usage = Usage(sent, made, cached, int((sent - cached) * shares[1]), int(made * shares[2]))
    size = Size(sent, made)
    assert cost(Prices(1, 1, 1, 1, 1), size, usage) * MILLION == pytest.approx(size.total)
    inputs = [prices.input, *(p for p in (prices.cached, prices.cache_write) if p is not None)]
    outputs = [prices.output, *(p for p in (prices.reasoning,) if p is not None)]
    least = (sent * min(inputs) + made * min(outputs)) / MILLION
    most = (sent * max(inputs) + made * max(outputs)) / MILLION
    assert least * (1 - 1e-9) <= cost(prices, size, usage) <= most * (1 + 1e-9)


@given(prices_given, tokens, tokens)
def test_unknown_parts_are_the_rest(prices: Prices, sent: int, made: int) -> None:
    """What nobody reported is priced as input and output; an explicit zero says the same."""
    whole = cost(prices, Size(sent, made))
    assert cost(prices, Size(sent, made), Usage(sent, made)) == whole
    assert cost(prices, Size(sent, made), Usage(sent, made, 0, 0, 0)) == whole
