"""What a refused caller is told: status, headers and body, in its own dialect and language."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import lru_cache

from extproc import dialects
from extproc.core.refusal import RULES, Reason, Refusal, Rejected
from extproc.core.request import Call, Dialect
from extproc.ports import Head

__all__ = ["Wording"]

_REQUEST_ID = "{request-id}"
"""Stands for a request's id in a body that is worded once for many."""

KINDS = {False: "json", True: "events"}
"""What an answer consists of: one JSON document, or server-sent events."""

UNKNOWN_RETRY_S = 1.0
"""When a retry can help but nobody knows when."""


class Wording:
    """`statuses` gives the HTTP status of a reason; `chance` the jitter of retry times, in [0, 1)."""

    def __init__(self, statuses: Callable[[Reason], int], chance: Callable[[], float]) -> None:
        """Keep both."""
        self._statuses = statuses
        self._chance = chance

    def refusal(self, rejected: Rejected) -> Refusal:
        """The refusal that a rejection amounts to."""
        return Refusal(
            reason=rejected.reason,
            status=self._statuses(rejected.reason),
            retry_after=(rejected.retry_after or UNKNOWN_RETRY_S) if RULES[rejected.reason].retry else None,
            detail=rejected.detail,
            tokens=rejected.tokens,
            requests=rejected.requests,
        )

    def answer(self, head: Head, refusal: Refusal) -> tuple[list[tuple[str, str]], bytes]:
        """Headers and body for the caller that sent `head`."""
        return dialects.refuse(
            _dialect(head.headers),
            refusal,
            language=dialects.language(head.headers.get("accept-language")),
            request_id=head.headers.get("x-request-id", ""),
            now=time.time(),
            jitter=self._chance(),
        )

    def last_resort(self, head: Head, call: Call, text: str) -> tuple[str, str] | None:
        """The answer that stands in for one, and whether it is "json" or "events"; None where `call` wants no text."""
        body = dialects.stand_in(call.endpoint, text, stream=call.stream, wants_usage=call.wants_usage)
        if body is None:
            return None
        return dialects.signed(body, head.headers.get("x-request-id", ""), time.time()), KINDS[call.stream]

    def exhausted(self, head: Head, dialect: Dialect, retry_s: int) -> str:
        """The body, ready beforehand, for the case that every upstream of the order fails."""
        language = dialects.language(head.headers.get("accept-language"))
        body = _exhausted(dialect, language, retry_s, self._statuses(Reason.UPSTREAM_FAILED))
        if _REQUEST_ID not in body:
            return body
        return body.replace(_REQUEST_ID, json.dumps(head.headers.get("x-request-id", ""))[1:-1])


@lru_cache(maxsize=256)
def _exhausted(dialect: Dialect, language: str, retry_s: int, status: int) -> str:
    """It knows no object that knows settings, or it would keep those of reloads that are long over."""
    refusal = Refusal(Reason.UPSTREAM_FAILED, status, retry_s)
    body = dialects.refuse(dialect, refusal, language=language, request_id=_REQUEST_ID, now=0.0, jitter=0.0)[1]
    return body.decode()


def _dialect(headers: Mapping[str, str]) -> Dialect:
    """Tell the family where the endpoint may not be known: by path, else by the SDK's own header."""
    if headers.get(":path", "").startswith("/v1/messages") or "anthropic-version" in headers:
        return Dialect.ANTHROPIC
    return Dialect.OPENAI
