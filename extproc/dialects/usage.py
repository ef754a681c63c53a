"""Usage that an upstream reported, in one shape for both families.

The raw fields are what the response filter noted, under flat names: `in`, `out`, `cached`, `cache_write`, `reasoning`.
OpenAI's prompt tokens include the cached ones. Anthropic's `input_tokens` leave out what was read from the cache and
what was written to it, so the three are added. Anthropic reports twice in a stream, cumulatively; `merge` keeps the
larger of each, because adding would count twice.

Unknown is not zero: a field that is missing or makes no sense is None, an explicit 0 stays 0.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from extproc.core.request import Dialect, Usage

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["merge", "usage_of"]

MAX_TOKENS = 10**12

_WHOLE = re.compile(r"\s*([0-9]{1,13})(?:\.0*)?\s*", re.ASCII)


def usage_of(dialect: Dialect, raw: Mapping[str, int | float | str]) -> Usage:
    """Normalise the usage fields that the response filter noted."""
    sent = _count(raw.get("in"))
    cached = _count(raw.get("cached"))
    cache_write = _count(raw.get("cache_write"))
    if sent is not None and dialect is Dialect.ANTHROPIC:
        sent += (cached or 0) + (cache_write or 0)
    return Usage(
        input=sent,
        output=_count(raw.get("out")),
        cached=cached,
        cache_write=cache_write,
        reasoning=_count(raw.get("reasoning")),
    )


def merge(a: Usage, b: Usage) -> Usage:
    """Join two reports about the same answer: the larger of each field, unknown only where both are."""
    return Usage(
        input=_larger(a.input, b.input),
        output=_larger(a.output, b.output),
        cached=_larger(a.cached, b.cached),
        cache_write=_larger(a.cache_write, b.cache_write),
        reasoning=_larger(a.reasoning, b.reasoning),
    )


def _larger(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)


def _count(value: object) -> int | None:
    """Read a number of tokens: a number, or digits in a string as Lua and metadata hand them on."""
    if isinstance(value, str):
        digits = _WHOLE.fullmatch(value)
        value = int(digits[1]) if digits else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value <= MAX_TOKENS else None  # false for NaN
