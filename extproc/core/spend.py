"""What a request costs in US dollars: prices per million tokens, the estimate before it ran, the usage afterwards.

Every token is paid for once, as what it was. The prompt is what was written to the provider's cache, what was read from
it, and the rest; the output is the model's reasoning, and the rest:

    cost = uncached input * input + cache write * cache_write + cache read * cached
         + visible output * output + reasoning * reasoning

Usage is normalised (core.request): the prompt includes its cached parts and the output its reasoning, so the rest is a
difference, never a sum. A part that is larger than its whole is paid for as reported, and leaves no rest. A part that
is unknown is paid for as part of the rest; a whole that is unknown keeps its estimate. Zero is a number like any other.

Prices that nobody gave cost nothing, which is not the same as free: the caller gets None and can count it.

Deliberately not here: who pays, and when what was reserved comes back (flight).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from extproc.core.policy import Prices, Upstream
from extproc.core.request import Size, Usage

__all__ = ["cost", "dearest", "is_free", "prices_of", "rates_of"]

MILLION = 1_000_000


def prices_of(upstream: Upstream, model: str) -> Prices | None:
    """Prices of the public `model` at `upstream`: by the upstream's own name, else of any model, else None."""
    prices = upstream.prices
    return (prices.get(upstream.own_name(model)) or prices.get("*")) if prices else None


def rates_of(upstreams: Mapping[str, Upstream], names: Sequence[str], model: str) -> dict[str, Prices]:
    """Prices of `model` at each of `names` where they are known."""
    return {name: prices for name in names if (prices := prices_of(upstreams[name], model)) is not None}


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


def dearest(rates: Mapping[str, Prices], size: Size) -> float:
    """Dollars that `size` tokens cost at most, wherever of `rates` they are used; 0 where no price is known."""
    return max([cost(prices, size) for prices in rates.values()], default=0.0)


def is_free(prices: Prices) -> bool:
    """Whether nothing costs anything at these prices."""
    return not (prices.input or prices.output or prices.cached or prices.cache_write or prices.reasoning)
