"""Which orders of upstreams can be told to an Envoy that must have a cluster for each: the classic profile.

There, an order is the name of a group of clusters that has to be in Envoy's configuration beforehand. All that a chain
could have are too many from five upstreams on. So a chain has

- every order of up to three of its upstreams that dispatch usually makes: whoever is first, then those behind it, then
  those before it, each there or not;
- of chains of three or less, all orders;
- of longer ones, also whoever is first and then all others, ended anywhere.

Any other order is cut to its longest beginning that there is: the request has fewer upstreams to go on to, and the
first is never another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, permutations

__all__ = ["Order", "cutter", "name_of", "orders_of"]

Order = tuple[str, ...]

_FEW = 3


def orders_of(chains: Iterable[Sequence[str]]) -> tuple[Order, ...]:
    """Every order of two or more upstreams that there is for these chains, each once."""
    return tuple(dict.fromkeys(order for chain in chains for order in _orders(tuple(chain))))


def cutter(chains: Iterable[Sequence[str]]) -> Callable[[Order], Order]:
    """What makes of any order one that there is."""
    known = frozenset(orders_of(chains))

    def cut(order: Order) -> Order:
        return next((order[:n] for n in range(len(order), 1, -1) if order[:n] in known), order[:1])

    return cut


def name_of(order: Order) -> str:
    """The cluster by which Envoy goes through `order`; of one upstream that before which its filters stand."""
    return f"tidegate:chain:{'+'.join(order)}" if len(order) > 1 else f"tidegate:gate:{order[0]}"


def _orders(chain: Order) -> Iterator[Order]:
    if len(chain) <= _FEW:
        for count in range(2, len(chain) + 1):
            yield from permutations(chain, count)
        return
    for at, first in enumerate(chain):
        others = chain[at + 1 :] + chain[:at]
        for count in range(1, _FEW):
            yield from ((first, *some) for some in combinations(others, count))
        yield from ((first, *others[:count]) for count in range(_FEW, len(others) + 1))
