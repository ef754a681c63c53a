"""What a request costs in US dollars: prices per million tokens, the estimate before it ran, the usage afterwards.

Every token is paid for once, as what it was. The prompt is what was written to the provider's cache, what was read from
it, and the rest; the output is the model's reasoning, and the rest:

    cost = uncached input * input + cache write * cache_write + cache read * cached
         + visible output * output + reasoning * reasoning

Usage is normalised (core.request): the prompt includes its cached parts and the output its reasoning, so the rest is a
difference, never a sum. A part that is larger than its whole is paid for as reported, and leaves no rest. A part that
is unknown is paid for as part of the rest; a whole that is unknown keeps its estimate. Zero is a number like any other.

Prices that nobody gave cost nothing, which is not the same as free: the caller gets None and can count it.

Prices may change at a time that is known before: of those of a model the last that have begun hold, and before the
first there are none. A request is charged for by the prices of its arrival, however long it runs.

Deliberately not here: who pays, and when what was reserved comes back (flight).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from math import inf

from extproc.core.capacity import Claim
from extproc.core.policy import Prices, Upstream
from extproc.core.quota import purse_keys, upstream_place
from extproc.core.request import Endpoint, Size, Usage

__all__ = ["PriceList", "bill", "cost", "dearest", "is_costless", "is_free", "needed", "prices_of"]

MILLION = 1_000_000
REMEMBERED = 4096
"""Most models and chains whose prices are remembered together."""


def prices_of(upstream: Upstream, model: str, at: float) -> Prices | None:
    """Prices of the public `model` at `upstream` at a time in epoch seconds.

    By the upstream's own name, else of any model, else None.
    """
    prices = upstream.prices
    listed = (prices.get(upstream.own_name(model)) or prices.get("*")) if prices else None
    return next((one for one in reversed(listed) if one.since <= at), None) if listed else None


class PriceList:
    """The prices of all upstreams. What was looked up is remembered until the next ones begin."""

    def __init__(self, upstreams: Mapping[str, Upstream]) -> None:
        """`upstreams` by name."""
        listed = (one for upstream in upstreams.values() for prices in upstream.prices.values() for one in prices)
        self._upstreams = upstreams
        self._changes = sorted({one.since for one in listed})
        self._look_up = lru_cache(REMEMBERED)(self._rates)

    def rates(self, names: tuple[str, ...], model: str, at: float) -> dict[str, Prices]:
        """Prices of `model` at each of `names` where they are known, at a time in epoch seconds."""
        return self._look_up(names, model, bisect_right(self._changes, at)) if self._changes else {}

    def _rates(self, names: tuple[str, ...], model: str, changes: int) -> dict[str, Prices]:
        at = self._changes[changes - 1] if changes else -inf
        found = {name: prices_of(self._upstreams[name], model, at) for name in names}
        return {name: prices for name, prices in found.items() if prices is not None}


def needed(
    rates: Mapping[str, Prices], size: Size, endpoint: Endpoint, sizes: Mapping[str, Size] | None = None
) -> float | None:
    """Dollars to reserve for a request that may go to any of `rates`; None where it costs nothing.

    That is free and unpriced models, and counting tokens. What an endpoint costs whose requests cannot be read is only
    known afterwards, so it needs a budget that is left. sizes: what it is at upstreams that count otherwise.
    """
    if not rates or endpoint is Endpoint.COUNT_TOKENS:
        return None
    usd = dearest(rates, size, sizes)
    if usd > 0:
        return usd
    return 0.0 if endpoint is Endpoint.OTHER and not all(map(is_free, rates.values())) else None


def bill(upstream: Upstream, rates: Mapping[str, Prices], size: Size, endpoint: Endpoint) -> tuple[Claim, ...]:
    """What a request takes of an upstream's own dollars, where those are limited and it costs any."""
    name = upstream.name
    if not upstream.dollars.limited or name not in rates:
        return ()
    usd = needed({name: rates[name]}, size, endpoint)
    keys = purse_keys(upstream_place(upstream), upstream.dollars)
    return () if usd is None else tuple(Claim(key, usd) for key in keys)


def cost(prices: Prices, size: Size, usage: Usage | None = None) -> float:
    """Dollars for `size` tokens; `usage` tells which of them were read from cache, written to it, or reasoning."""
    cached = (usage and usage.cached) or 0
    written = (usage and usage.cache_write) or 0
    reasoning = (usage and usage.reasoning) or 0
    dollars = max(0, size.input - cached - written) * prices.input + max(0, size.output - reasoning) * prices.output
    if cached:
        dollars += cached * (prices.input if prices.cached is None else prices.cached)
    if written:
        dollars += written * (prices.input if prices.cache_write is None else prices.cache_write)
    if reasoning:
        dollars += reasoning * (prices.output if prices.reasoning is None else prices.reasoning)
    return dollars / MILLION


def dearest(rates: Mapping[str, Prices], size: Size, sizes: Mapping[str, Size] | None = None) -> float:
    """Dollars that `size` tokens cost at most, wherever of `rates` they are used; 0 where no price is known.

    sizes: how many they are at upstreams that count otherwise.
    """
    others = sizes or {}
    return max([cost(prices, others.get(name, size)) for name, prices in rates.items()], default=0.0)


def is_costless(upstream: Upstream, rates: Mapping[str, Prices]) -> bool:
    """Whether nobody has to pay for what `upstream` serves at `rates`: it is owned, or free. Unpriced is neither."""
    return upstream.owned or (upstream.name in rates and is_free(rates[upstream.name]))


def is_free(prices: Prices) -> bool:
    """Whether nothing costs anything at these prices."""
    return not (prices.input or prices.output or prices.cached or prices.cache_write or prices.reasoning)
