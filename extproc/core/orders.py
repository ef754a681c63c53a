"""Which orders of upstreams can be told to an Envoy that must have a cluster for each: the classic profile.

There, an order is the name of a group of clusters that has to be in Envoy's configuration beforehand. All that a chain
could have are too many from five upstreams on. So a chain has

- every order of up to three of its upstreams that dispatch usually makes: whoever is first, then those behind it, then
  those before it, each there or not;
- of chains of three or less, all orders;
- of longer ones, also whoever is first and then all others, ended anywhere.

Where many chains would together have more than MOST, each has less: pairs and whoever is first with all others, ended
anywhere; and should that be too many, too, pairs alone.

Any other order is cut to its longest beginning that there is: the request has fewer upstreams to go on to, and the
first is never another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, permutations

__all__ = ["MOST", "Order", "cutter", "name_of", "only_pairs", "orders_of"]

Order = tuple[str, ...]

MOST = 2000
"""Clusters that start in a few seconds, and take some 50 KiB each."""
_FEW = 3


def orders_of(chains: Iterable[Sequence[str]]) -> tuple[Order, ...]:
    """Every order of two or more upstreams that there is for these chains, each once."""
    every = tuple(dict.fromkeys(map(tuple, chains)))
    return _known(every)[0]


def only_pairs(chains: Iterable[Sequence[str]]) -> bool:
    """Whether there are so many chains that each has pairs alone."""
    every = tuple(dict.fromkeys(map(tuple, chains)))
    return _known(every)[1] is _pairs


def cutter(chains: Iterable[Sequence[str]]) -> Callable[[Order], Order]:
    """What makes of any order one that there is."""
    known = frozenset(orders_of(chains))

    def cut(order: Order) -> Order:
        return next((order[:n] for n in range(len(order), 1, -1) if order[:n] in known), order[:1])

    return cut


def name_of(order: Order) -> str:
    """The cluster by which Envoy goes through `order`; of one upstream that before which its filters stand."""
    return f"tidegate:chain:{'+'.join(order)}" if len(order) > 1 else f"tidegate:gate:{order[0]}"


Rule = Callable[[Order], Iterator[Order]]


def _known(chains: tuple[Order, ...]) -> tuple[tuple[Order, ...], Rule]:
    """The orders by the first rule that does not make too many, else by the last; and that rule."""
    for rule in (_usual, _whole):
        found = tuple(dict.fromkeys(order for chain in chains for order in rule(chain)))
        if len(found) <= MOST:
            return found, rule
    return tuple(dict.fromkeys(order for chain in chains for order in _pairs(chain))), _pairs


def _usual(chain: Order) -> Iterator[Order]:
    if len(chain) <= _FEW:
        for count in range(2, len(chain) + 1):
            yield from permutations(chain, count)
        return
    for first, *others in _turned(chain):
        for count in range(1, _FEW):
            yield from ((first, *some) for some in combinations(others, count))
    yield from _whole(chain)


def _whole(chain: Order) -> Iterator[Order]:
    yield from _pairs(chain)
    for turned in _turned(chain):
        yield from (turned[:count] for count in range(_FEW, len(chain) + 1))


def _pairs(chain: Order) -> Iterator[Order]:
    yield from permutations(chain, 2)


def _turned(chain: Order) -> Iterator[Order]:
    """The chain as it is for each of its upstreams, if that is first."""
    return (chain[at:] + chain[:at] for at in range(len(chain)))
