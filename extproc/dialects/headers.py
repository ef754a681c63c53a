"""What request headers say: how long the client will wait, whether it tries again, its session, its language.

Headers are the client's to write, so nothing here raises: what cannot be understood is taken as absent. Names are
expected in lower case, as HTTP/2 and Envoy have them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from extproc.dialects.sessions import named_in_headers

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["header_sessions", "idempotency_key", "language", "retry_count", "timeouts"]

MAX_TIMEOUT_S = 7 * 86_400.0
MAX_RETRIES = 100
SDK_MARGIN_S = 0.25
"""An SDK's timeout is that of one attempt: it gives up by itself, and tries again. It has so much longer here, because
being told in that very moment that its time is over would keep it from trying."""

_SDK_TIMEOUTS = ("x-stainless-timeout", "x-stainless-read-timeout")
_TIMEOUTS = frozenset({"x-request-timeout-ms", "grpc-timeout", *_SDK_TIMEOUTS})
_DECIMAL = re.compile(r"\s*(-?[0-9]{1,12}(?:\.[0-9]{0,9})?)\s*", re.ASCII)
_GRPC = re.compile(r"([0-9]{1,8})([HMSmun])", re.ASCII)
_GRPC_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_QUALITY = re.compile(r"\s*q\s*=\s*([01](?:\.[0-9]{0,3})?)\s*", re.ASCII)
_LANGUAGES = ("en", "zh")
_MAX_LANGUAGE_HEADER = 500


def timeouts(headers: Mapping[str, str]) -> float | None:
    """Return the shortest time in seconds that the client will wait for a first byte, None when it does not say.

    0.0 means that the time is over: `x-request-timeout-ms` or `grpc-timeout` said so. The SDKs' own headers do not mean
    that, because one of them rounds half a second down to 0. More than a week is as good as no limit.
    """
    if _TIMEOUTS.isdisjoint(headers):
        return None
    limits = []
    milliseconds = _number(headers.get("x-request-timeout-ms"))
    if milliseconds is not None:
        limits.append(max(0.0, milliseconds / 1000))
    grpc = _GRPC.fullmatch(headers.get("grpc-timeout") or "")
    if grpc is not None:
        limits.append(int(grpc[1]) * _GRPC_UNITS[grpc[2]])
    for key in _SDK_TIMEOUTS:
        seconds = _number(headers.get(key))
        if seconds is not None and seconds > 0:
            limits.append(seconds + SDK_MARGIN_S)
    return min((limit for limit in limits if limit <= MAX_TIMEOUT_S), default=None)


def retry_count(headers: Mapping[str, str]) -> int:
    """Return how often the SDK says it has tried already: 0 for a first attempt or for nonsense."""
    count = _number(headers.get("x-stainless-retry-count"))
    return min(int(count), MAX_RETRIES) if count is not None and count >= 0 else 0


def idempotency_key(headers: Mapping[str, str]) -> str:
    """Return the name that the client gave to this request and to every retry of it, empty when it gave none."""
    return headers.get("idempotency-key", "").strip()


def header_sessions(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the agent session ids in the headers, best first."""
    return named_in_headers(headers)


def language(accept_language: str | None) -> str:
    """Choose "en" or "zh" from an Accept-Language header; English unless Chinese is asked for."""
    best, best_quality = "en", 0.0
    if not accept_language:
        return best
    for entry in accept_language[:_MAX_LANGUAGE_HEADER].split(","):
        tag, _, parameter = entry.partition(";")
        base = tag.strip().lower().replace("_", "-").partition("-")[0]
        given = _QUALITY.fullmatch(parameter)
        quality = 1.0 if not parameter.strip() else float(given[1]) if given else 0.0
        if base in _LANGUAGES and quality > best_quality:
            best, best_quality = base, quality
    return best


def _number(text: str | None) -> float | None:
    match = _DECIMAL.fullmatch(text) if text else None
    return float(match[1]) if match else None
