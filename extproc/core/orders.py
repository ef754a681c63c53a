"""Which orders of upstreams can be told to an Envoy that must have a cluster for each: the classic profile.

There, an order is the name of a group of clusters that has to be in Envoy's configuration beforehand. All that a chain
could have are too many from five upstreams on. So a chain has

- every order of up to three of its upstreams that dispatch usually makes: whoever is first, then those behind it, then
  those before it, each there or not;
- of chains of three or less, all orders;
- of longer ones, also whoever is first and then all others, ended anywhere.

Where that is too much, because there are many chains or long ones, a chain has less: pairs, and whoever is first with
all others, ended anywhere; or pairs, and whoever is first with the next two; or, however many there are, whoever is
first with the next one, and with the next two. Short chains come first, and each may take its part of what is left.

Any other order is cut to its longest beginning that there is: the request has fewer upstreams to go on to, and the
first is never another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, islice, permutations

__all__ = ["MOST", "Order", "cutter", "name_of", "orders_of", "short_of"]

Order = tuple[str, ...]

MOST = 2000
"""Clusters that start in a few seconds, and take some 50 KiB each."""
_FEW = 3


def orders_of(chains: Iterable[Sequence[str]]) -> tuple[Order, ...]:
    """Every order of two or more upstreams that there is for these chains, each once."""
    return tuple(_known(chains)[0])


def short_of(chains: Iterable[Sequence[str]]) -> tuple[Order, ...]:
    """The chains that do not even have all pairs."""
    return _known(chains)[1]


def cutter(chains: Iterable[Sequence[str]]) -> Callable[[Order], Order]:
    """What makes of any order one that there is."""
    known = frozenset(orders_of(chains))

    def cut(order: Order) -> Order:
        return next((order[:n] for n in range(len(order), 1, -1) if order[:n] in known), order[:1])

    return cut


def name_of(order: Order) -> str:
    """The cluster by which Envoy goes through `order`; of one upstream that before which its filters stand."""
    return f"tidegate:chain:{'+'.join(order)}" if len(order) > 1 else f"tidegate:gate:{order[0]}"


def _known(chains: Iterable[Sequence[str]]) -> tuple[dict[Order, None], tuple[Order, ...]]:
    """The orders, in the order of their making, and the chains that have the least."""
    waiting = sorted(dict.fromkeys(map(tuple, chains)), key=len)
    found: dict[Order, None] = {}
    short: list[Order] = []
    for at, chain in enumerate(waiting):
        part = max(0, MOST - len(found)) // (len(waiting) - at)
        for rule in (_usual, _whole, _pairs):
            # One more than its part is enough to know; of a long chain there may be millions.
            made = list(islice((order for order in rule(chain) if order not in found), part + 1))
            if len(made) <= part:
                break
        else:
            made = list(_following(chain))
            short.append(chain)
        found |= dict.fromkeys(made)
    return found, tuple(short)


def _usual(chain: Order) -> Iterator[Order]:
    if len(chain) <= _FEW:
        for count in range(2, len(chain) + 1):
            yield from permutations(chain, count)
        return
    for first, *others in _turned(chain):
        yield from ((first, *two) for two in combinations(others, 2))
    yield from _whole(chain)


def _whole(chain: Order) -> Iterator[Order]:
    yield from permutations(chain, 2)
    for turned in _turned(chain):
        yield from (turned[:count] for count in range(_FEW, len(chain) + 1))


def _pairs(chain: Order) -> Iterator[Order]:
    yield from permutations(chain, 2)
    yield from (turned[:_FEW] for turned in _turned(chain))


def _following(chain: Order) -> Iterator[Order]:
    yield from (turned[:count] for turned in _turned(chain) for count in range(2, min(_FEW, len(chain)) + 1))


def _turned(chain: Order) -> Iterator[Order]:
    """The chain as it is for each of its upstreams, if that is first."""
    return (chain[at:] + chain[:at] for at in range(len(chain)))
