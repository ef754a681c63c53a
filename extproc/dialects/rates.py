"""What a provider says about its limits in response headers, as a table of the names that each one uses.

The same prefix means different things: a reset may be a Go duration, seconds, a time of day, or a moment in epoch
seconds or milliseconds; a window may be a second, a minute, a day. The table says which window; the form of a time is
recognised by itself. At OpenAI a reset is the time until the bucket is full again, at DigitalOcean until a request of
this size fits: neither is a time to retry at, which only `retry_after_s` gives.

A field that is missing, negative or nonsense is None. A limit of zero or less makes the whole report nonsense (Azure
sends -1 and 0 when it does not know). Providers without rate headers have no row (Bedrock, Gemini, DeepSeek).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TABLE", "Reported", "reported", "retry_after_s"]

MINUTE, HOUR, DAY, MONTH = 60.0, 3_600.0, 86_400.0, 30 * 86_400.0
MAX_WAIT_S = 366 * DAY
MAX_COUNT = 1e15

_EPOCH_S = 1e9  # numbers from here on are a moment, not a duration of thirty years
_EPOCH_MS = 1e11
_MAX_TEXT = 64
_NUMBER = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]{0,20})?", re.ASCII)
_DURATION = re.compile(r"(?:[0-9]{1,12}(?:\.[0-9]{0,12})?(?:ns|us|µs|ms|h|m|s|d))+", re.ASCII)
_PIECE = re.compile(r"([0-9.]+)(ns|us|µs|ms|h|m|s|d)", re.ASCII)
_UNITS = {"d": DAY, "h": HOUR, "m": MINUTE, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reported:
    """One limit as a provider reported it.

    kind: what is counted: "tokens" (input and output together), "input", "output" or "requests". reset_s: seconds from
    now, 0 when it is past. window_s: seconds in which `limit` may be used.
    """

    kind: str
    limit: float | None = None
    remaining: float | None = None
    reset_s: float | None = None
    window_s: float = MINUTE


class Names(NamedTuple):
    """The header names of one limit, and its window in seconds."""

    kind: str
    limit: str
    remaining: str
    reset: str
    window_s: float = MINUTE


def _plain(kind: str, suffix: str, window_s: float = MINUTE) -> Names:
    return Names(
        kind, f"x-ratelimit-limit-{suffix}", f"x-ratelimit-remaining-{suffix}", f"x-ratelimit-reset-{suffix}", window_s
    )


def _anthropic(kind: str, middle: str) -> Names:
    prefix = f"anthropic-ratelimit-{middle}"
    return Names(kind, f"{prefix}-limit", f"{prefix}-remaining", f"{prefix}-reset")


_COMMON = (_plain("tokens", "tokens"), _plain("requests", "requests"))

TABLE: dict[str, tuple[Names, ...]] = {
    "openai": (*_COMMON, _plain("tokens", "tokens_usage_based")),
    "azure": _COMMON,
    "anthropic": (
        _anthropic("tokens", "tokens"),
        _anthropic("input", "input-tokens"),
        _anthropic("output", "output-tokens"),
        _anthropic("requests", "requests"),
    ),
    "mistral": (
        _plain("tokens", "tokens-minute"),
        _plain("requests", "req-minute"),
        _plain("tokens", "tokens-month", MONTH),
        _plain("requests", "req-month", MONTH),
    ),
    "groq": (_plain("tokens", "tokens"), _plain("requests", "requests", DAY)),
    "together": (
        Names("tokens", "x-tokenlimit-limit", "x-tokenlimit-remaining", "x-tokenlimit-reset", 1.0),
        Names("requests", "x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", 1.0),
    ),
    "cerebras": (_plain("tokens", "tokens-minute"), _plain("requests", "requests-day", DAY)),
    "digitalocean": (
        _plain("requests", "requests"),
        _plain("tokens", "tokens-per-minute"),
        _plain("tokens", "tokens-per-day", DAY),
    ),
    "nous": (
        *_COMMON,
        _plain("tokens", "tokens-1h", HOUR),
        _plain("requests", "requests-1h", HOUR),
    ),
    "bedrock": (),
    "gemini": (),
    "deepseek": (),
    "vllm": (),
    "sglang": (),
    "generic": _COMMON,
}


def reported(provider: str, headers: Mapping[str, str], now_epoch: float) -> tuple[Reported, ...]:
    """Read the limits in a provider's response headers (names in lower case); unknown providers as OpenAI's."""
    found = []
    for names in TABLE.get(provider, TABLE["generic"]):
        limit, remaining = _count(headers.get(names.limit)), _count(headers.get(names.remaining))
        if (limit is None and remaining is None) or (limit is not None and limit <= 0):
            continue
        remaining = None if remaining is None or remaining < 0 else remaining
        reset = _seconds(headers.get(names.reset), now_epoch)
        if limit is not None or remaining is not None:
            found.append(Reported(names.kind, limit, remaining, reset, names.window_s))
    return tuple(found)


def retry_after_s(headers: Mapping[str, str], now_epoch: float) -> float | None:
    """Return how many seconds the provider wants us to wait, None when it does not say or makes no sense."""
    milliseconds = headers.get("retry-after-ms")
    if milliseconds is not None and _NUMBER.fullmatch(milliseconds.strip()[:_MAX_TEXT]):
        wait = float(milliseconds) / 1000
        if 0 <= wait <= MAX_WAIT_S:
            return wait
    return _seconds(headers.get("retry-after"), now_epoch)


def _count(text: str | None) -> float | None:
    """Read a number of tokens or requests; a second value after a comma or semicolon is some gateway's policy."""
    text = re.split("[,;]", text[:_MAX_TEXT], maxsplit=1)[0].strip() if text else ""
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if abs(value) <= MAX_COUNT else None  # false for NaN


def _seconds(text: str | None, now_epoch: float) -> float | None:
    """Read a time in any of its forms as seconds from now."""
    text = text.strip() if text else ""
    if not text or len(text) > _MAX_TEXT:
        return None
    value = _relative(text)
    if value is None:
        moment = _moment(text)
        if moment is None:
            return None
        value = max(0.0, moment - now_epoch)
    return value if 0 <= value <= MAX_WAIT_S else None


def _relative(text: str) -> float | None:
    if _DURATION.fullmatch(text):
        pieces = _PIECE.findall(text)
        return sum(float(number) * _UNITS[unit] for number, unit in pieces)
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if value < _EPOCH_S else None  # false for NaN


def _moment(text: str) -> float | None:
    if _NUMBER.fullmatch(text):
        value = float(text)
        return value if value < _EPOCH_MS else value / 1000
    try:
        moment = datetime.fromisoformat(text.upper()) if _RFC_3339.fullmatch(text) else parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
