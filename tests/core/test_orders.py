"""Orders that an Envoy has clusters for: enough of them, not too many, and any other is cut, never changed."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from extproc.core.orders import MOST, cutter, name_of, orders_of, short_of
from extproc.core.routing import order as usual

CHAINS = st.lists(st.sampled_from("ABCDEFGH"), min_size=1, max_size=8, unique=True).map(tuple)


def test_a_chain_of_three_has_every_order() -> None:
    every = {order for count in (2, 3) for order in permutations("ABC", count)}
    assert set(orders_of(["ABC"])) == every
    assert not orders_of(["A"])


def test_chains_that_share_upstreams_share_orders() -> None:
    assert orders_of([("A", "B"), ("B", "A"), ("A", "B")]) == (("A", "B"), ("B", "A"))


@given(CHAINS)
def test_there_are_not_too_many(chain: tuple[str, ...]) -> None:
    assert len(orders_of([chain])) <= len(chain) ** 3


@given(CHAINS, st.data())
def test_what_dispatch_usually_makes_is_kept_as_far_as_three(chain: tuple[str, ...], data: st.DataObject) -> None:
    first = data.draw(st.sampled_from(chain))
    well = data.draw(st.sets(st.sampled_from(chain)))
    made = usual(first, chain, lambda name: name in well, lambda _: True)
    kept = cutter([chain])(made)
    assert kept == made[: len(kept)]
    assert len(kept) >= min(3, len(made))
    if well >= set(chain):
        assert kept == made


@given(CHAINS, st.data())
def test_whatever_is_made_begins_as_it_did(chain: tuple[str, ...], data: st.DataObject) -> None:
    made = tuple(data.draw(st.permutations(chain)))[: data.draw(st.integers(1, len(chain)))]
    kept = cutter([chain])(made)
    assert kept == made[: max(1, len(kept))]
    assert len(kept) == 1 or kept in orders_of([chain])


def test_many_chains_have_less_each() -> None:
    """Whole chains as long as there is room for them, then the next two, at last neighbours."""
    some = [tuple(f"{n}{x}" for x in "ABCDEF") for n in range(25)]
    assert len(some) * 108 > MOST >= len(orders_of(some))
    assert all(chain in orders_of(some) for chain in some)
    more = [tuple(f"{n}{x}" for x in "ABCDEF") for n in range(50)]
    assert len(orders_of(more)) <= MOST
    assert cutter(more)(more[7]) == more[7][:3]
    assert cutter(more)((more[7][0], more[7][5])) == (more[7][0], more[7][5])
    assert not short_of(more)
    most = [tuple(f"{n}{x}" for x in "ABCDEF") for n in range(500)]
    assert short_of(most) == tuple(most)
    assert cutter(most)(most[7]) == most[7][:3]
    assert cutter(most)((most[7][0], most[7][5])) == most[7][:1]


def test_a_long_chain_takes_nothing_from_short_ones() -> None:
    names = tuple(f"u{n:02}" for n in range(60))
    chains = [names, *(names[n : n + 3] for n in range(50))]
    assert short_of(chains) == (names,)
    assert len(orders_of(chains)) <= MOST
    assert all(order in orders_of(chains) for order in permutations(("u07", "u08", "u09"), 3))
    assert cutter(chains)(names[20:] + names[:20]) == names[20:23]


def test_an_upstream_of_no_chain_stays_alone() -> None:
    assert cutter([("A", "B")])(("C",)) == ("C",)
    assert cutter([("A", "B")])(("C", "A")) == ("C",)


def test_names() -> None:
    assert name_of(("A",)) == "tidegate:gate:A"
    assert name_of(("A", "B.1", "C_2")) == "tidegate:chain:A+B.1+C_2"
