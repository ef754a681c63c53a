"""What a provider says about its limits in response headers, as a table of the names that each one uses.

The same prefix means different things, so the table says three things besides the names. The window in which a limit
may be used: a second, a minute, an hour, a day; where the provider tells the period itself, that counts. What a reset
is: the time until the bucket is full again (OpenAI), until a request of this size fits (DigitalOcean), or until a
window ends and everything is there again. And whether a window has to be guessed: OpenAI's requests are per minute in
some tiers and per day in others, under the same name, and only the time to full tells which. The form of a time (Go
duration, seconds, epoch, date) is recognised by itself.

Nonsense is left out: what is negative or no number; a limit of zero or less (Azure sends -1 and 0 when it does not
know), and with it the row; nothing remaining of an unknown limit; more remaining than there is. Providers without
rate headers have no row (Bedrock, Gemini, DeepSeek).
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, NamedTuple

from extproc.core.pacing import DAY_S, HOUR_S, MINUTE_S, Reported, Reset

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["NAMES", "TABLE", "Reported", "Reset", "charged", "reported", "retry_after_s"]

MONTH_S = 30 * DAY_S
MAX_WAIT_S = 366 * DAY_S
MAX_COUNT = 1e15

_EPOCH_S = 1e9  # numbers from here on are a moment, not a duration of thirty years
_EPOCH_MS = 1e11
_MAX_TEXT = 64
_LONGEST_PLAIN = 15  # digits that surely stay below MAX_COUNT
_GUESSED_FROM_S = 0.1  # a shorter reset is rounded too much to tell a window
_DAYLIKE = 5.0  # times the usual window
_NUMBER = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]{0,20})?", re.ASCII)
_DURATION = re.compile(r"(?:[0-9]{1,12}(?:\.[0-9]{0,12})?(?:ns|us|µs|ms|h|m|s|d))+", re.ASCII)
_PIECE = re.compile(r"([0-9.]+)(ns|us|µs|ms|h|m|s|d)", re.ASCII)
_UNITS = {"d": DAY_S, "h": HOUR_S, "m": MINUTE_S, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII)


class Names(NamedTuple):
    """The header names of one limit; empty where there is none.

    kind: as in Reported. means: what the reset is. period: a header with the window in seconds. used: a header with the
    used share (0..1) instead of counts. status: a header that says `rejected` when all is used. guess: whether the
    window may be longer than it seems.
    """

    kind: str
    limit: str = ""
    remaining: str = ""
    reset: str = ""
    window_s: float = MINUTE_S
    means: Reset = Reset.FULL
    period: str = ""
    used: str = ""
    status: str = ""
    guess: bool = False


def _plain(
    kind: str, suffix: str, window_s: float = MINUTE_S, means: Reset = Reset.FULL, *, guess: bool = False
) -> Names:
    limit, remaining, reset = (f"x-ratelimit-{word}-{suffix}" for word in ("limit", "remaining", "reset"))
    return Names(kind, limit, remaining, reset, window_s, means, guess=guess)


def _azure(kind: str) -> Names:
    return _plain(kind, kind)._replace(period=f"x-ratelimit-renewalperiod-{kind}")


def _anthropic(kind: str, middle: str) -> Names:
    prefix = f"anthropic-ratelimit-{middle}"
    return Names(kind, f"{prefix}-limit", f"{prefix}-remaining", f"{prefix}-reset")


def _unified(middle: str, window_s: float) -> Names:
    prefix = f"anthropic-ratelimit-unified{middle}"
    return Names(
        "share",
        used=f"{prefix}-utilization",
        status=f"{prefix}-status",
        reset=f"{prefix}-reset",
        window_s=window_s,
        means=Reset.WINDOW,
    )


def _together(kind: str, prefix: str, suffix: str = "") -> Names:
    limit, remaining, reset = (f"{prefix}-{word}{suffix}" for word in ("limit", "remaining", "reset"))
    return Names(kind, limit, remaining, reset, 1.0, Reset.WINDOW)


_COMMON = (_plain("tokens", "tokens"), _plain("requests", "requests"))
_OPENAI = (
    _plain("tokens", "tokens"),
    _plain("requests", "requests", guess=True),
    _plain("tokens", "tokens_usage_based"),
)
_ANTHROPIC = (
    _anthropic("tokens", "tokens"),
    _anthropic("input", "input-tokens"),
    _anthropic("output", "output-tokens"),
    _anthropic("requests", "requests"),
    _unified("", 5 * HOUR_S),
    _unified("-5h", 5 * HOUR_S),
    _unified("-7d", 7 * DAY_S),
)
_MISTRAL = (
    _plain("tokens", "tokens-minute"),
    _plain("requests", "req-minute"),
    _plain("tokens", "tokens-month", MONTH_S, Reset.WINDOW),
    _plain("requests", "req-month", MONTH_S, Reset.WINDOW),
)
_CEREBRAS = (
    _plain("tokens", "tokens-minute", MINUTE_S, Reset.WINDOW),
    _plain("requests", "requests-minute", MINUTE_S, Reset.WINDOW),
    _plain("tokens", "tokens-hour", HOUR_S, Reset.WINDOW),
    _plain("requests", "requests-hour", HOUR_S, Reset.WINDOW),
    _plain("tokens", "tokens-day", DAY_S, Reset.WINDOW),
    _plain("requests", "requests-day", DAY_S, Reset.WINDOW),
)
_DIGITALOCEAN = (
    _plain("requests", "requests", MINUTE_S, Reset.FITS),
    _plain("tokens", "tokens-per-minute", MINUTE_S, Reset.FITS),
    _plain("tokens", "tokens-per-day", DAY_S, Reset.FITS),
)
_HOURLY = (
    _plain("tokens", "tokens-1h", HOUR_S, Reset.WINDOW),
    _plain("requests", "requests-1h", HOUR_S, Reset.WINDOW),
)

TABLE: dict[str, tuple[Names, ...]] = {
    "openai": _OPENAI,
    "azure": (_azure("tokens"), _azure("requests")),
    "anthropic": _ANTHROPIC,
    "mistral": _MISTRAL,
    "groq": (_plain("tokens", "tokens"), _plain("requests", "requests", DAY_S)),
    "together": (
        _together("tokens", "x-tokenlimit"),
        _together("requests", "x-ratelimit"),
        _together("tokens", "x-tokenlimit", "-dynamic"),
        _together("requests", "x-ratelimit", "-dynamic"),
    ),
    "cerebras": _CEREBRAS,
    "digitalocean": _DIGITALOCEAN,
    "nous": (*_COMMON, *_HOURLY),
    "openrouter": (*_COMMON, *_HOURLY),
    "xai": _COMMON,
    "bedrock": (),
    "gemini": (),
    "deepseek": (),
    "vllm": (),
    "sglang": (),
    "fake": (*_COMMON, *_ANTHROPIC),
    # Somebody who is not named above: every name that has one meaning only.
    "generic": (*_COMMON, *_MISTRAL, *_DIGITALOCEAN[1:], *_CEREBRAS[1:], *_HOURLY),
}

_CHARGED = "x-ratelimit-tokens-query-cost"
_REJECTED = "rejected"

NAMES = frozenset(
    {"retry-after", "retry-after-ms", "x-ms-retry-after-ms", _CHARGED}
    | {
        name
        for rows in TABLE.values()
        for row in rows
        for name in (row.limit, row.remaining, row.reset, row.period, row.used, row.status)
        if name
    }
)
"""Every header that is read here."""


def reported(provider: str, headers: Mapping[str, str], now_epoch: float) -> tuple[Reported, ...]:
    """Read the limits in a provider's response headers (names in lower case); unknown providers as `generic`.

    At most one for each kind and window, the tighter where there are two.
    """
    found: dict[tuple[str, float], Reported] = {}
    for names in TABLE.get(provider, TABLE["generic"]):
        for one in _share(names, headers, now_epoch) if names.used else _counts(names, headers, now_epoch):
            other = found.get((one.kind, one.window_s))
            found[one.kind, one.window_s] = one if other is None else _tighter(one, other)
    return tuple(found.values())


def charged(headers: Mapping[str, str]) -> float | None:
    """Tokens that the provider says it charged for the request (Mistral), None when it does not say."""
    cost = _count(headers.get(_CHARGED))
    return cost if cost is not None and cost >= 0 else None


def retry_after_s(headers: Mapping[str, str], now_epoch: float) -> float | None:
    """Return how many seconds the provider wants us to wait, None when it does not say or makes no sense."""
    for name in ("retry-after-ms", "x-ms-retry-after-ms"):
        milliseconds = headers.get(name)
        if milliseconds is not None and _NUMBER.fullmatch(milliseconds.strip()[:_MAX_TEXT]):
            wait = float(milliseconds) / 1000
            if 0 <= wait <= MAX_WAIT_S:
                return wait
    return _seconds(headers.get("retry-after"), now_epoch)


def _counts(names: Names, headers: Mapping[str, str], now_epoch: float) -> Iterator[Reported]:
    told = headers.get(names.limit), headers.get(names.remaining)
    if told == (None, None):
        return
    limit, remaining = _count(told[0]), _count(told[1])
    if remaining is not None and remaining < 0:
        remaining = None
    if limit is None:
        if remaining:
            yield Reported(names.kind, None, remaining, _seconds(headers.get(names.reset), now_epoch), *_window(names))
        return
    if limit <= 0 or (remaining is not None and remaining > limit):
        return
    reset = headers.get(names.reset)
    reset_s = _seconds(reset, now_epoch)
    window_s = names.window_s
    if names.period:
        window_s = _period(headers.get(names.period)) or window_s
    elif names.guess and reset and reset[-1:] == "s":
        window_s = _guessed(window_s, limit, remaining, reset_s)
    yield Reported(names.kind, limit, remaining, reset_s, window_s, names.means)


def _window(names: Names) -> tuple[float, Reset]:
    return names.window_s, names.means


def _share(names: Names, headers: Mapping[str, str], now_epoch: float) -> Iterator[Reported]:
    status, used = headers.get(names.status), _count(headers.get(names.used))
    if status is None and (used is None or used < 0):
        return
    if status is None:
        left = max(0.0, 1.0 - (used or 0.0))
    else:  # what is used beyond its share may be paid for: the status has the last word
        left = 0.0 if status.strip().lower() == _REJECTED else max(1e-9, 1.0 - (used or 0.0))
    yield Reported("share", 1.0, left, _seconds(headers.get(names.reset), now_epoch), *_window(names))


def _tighter(one: Reported, other: Reported) -> Reported:
    if one.limit is None or other.limit is None:
        return one if other.limit is None else other
    tight, loose = (one, other) if _left(one) <= _left(other) else (other, one)
    return Reported(one.kind, min(one.limit, other.limit), tight.remaining, tight.reset_s, loose.window_s, tight.reset)


def _left(one: Reported) -> float:
    return math.inf if one.remaining is None else one.remaining


def _period(text: str | None) -> float | None:
    seconds = _count(text)
    return seconds if seconds is not None and 1 <= seconds <= MONTH_S else None


def _guessed(window_s: float, limit: float, remaining: float | None, reset_s: float | None) -> float:
    """The window in which a bucket that lacks (limit - remaining) is full again after `reset_s`."""
    if remaining is None or reset_s is None or reset_s < _GUESSED_FROM_S or remaining >= limit:
        return window_s
    return DAY_S if reset_s * limit / (limit - remaining) > _DAYLIKE * window_s else window_s


def _count(text: str | None) -> float | None:
    """Read a number of tokens or requests; a second value after a comma or semicolon is some gateway's policy."""
    if text is None:
        return None
    if text.isdecimal() and text.isascii() and len(text) <= _LONGEST_PLAIN:
        return float(text)
    text = re.split("[,;]", text[:_MAX_TEXT], maxsplit=1)[0].strip()
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
