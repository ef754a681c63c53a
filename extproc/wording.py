"""What a refused caller is told: status, headers and body, in its own dialect and language."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from extproc import dialects
from extproc.core.refusal import RULES, Reason, Refusal, Rejected
from extproc.core.request import Dialect
from extproc.ports import Head

__all__ = ["Wording"]

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
        return self._word(head, _dialect(head.headers), refusal)

    def exhausted(self, head: Head, dialect: Dialect, retry_s: int) -> str:
        """The body, ready beforehand, for the case that every upstream of the order fails."""
        refusal = Refusal(Reason.UPSTREAM_FAILED, self._statuses(Reason.UPSTREAM_FAILED), retry_s)
        return self._word(head, dialect, refusal)[1].decode()

    def _word(self, head: Head, dialect: Dialect, refusal: Refusal) -> tuple[list[tuple[str, str]], bytes]:
        return dialects.refuse(
            dialect,
            refusal,
            language=dialects.language(head.headers.get("accept-language")),
            request_id=head.headers.get("x-request-id", ""),
            now=time.time(),
            jitter=self._chance(),
        )


def _dialect(headers: Mapping[str, str]) -> Dialect:
    """Tell the family where the endpoint may not be known: by path, else by the SDK's own header."""
    if headers.get(":path", "").startswith("/v1/messages") or "anthropic-version" in headers:
        return Dialect.ANTHROPIC
    return Dialect.OPENAI
