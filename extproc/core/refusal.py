"""Why a request was refused: one closed vocabulary, used in code, metrics, logs, headers and records alike.

The table below gives each reason's default status and whether a retry can help; both come from the product's refusal
table. Deliberately not here: how a refusal is worded, which is the dialects' business.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["RULES", "Reason", "Refusal", "Rejected", "Rule", "Window"]


class Reason(StrEnum):
    """The closed list of reasons."""

    TENANT_QUOTA = "tenant_quota"
    TENANT_CONCURRENCY = "tenant_concurrency"
    QUEUE_TIMEOUT = "queue_timeout"
    LANE_FULL = "lane_full"
    EVICTED = "evicted"
    DEADLINE_UNMEETABLE = "deadline_unmeetable"
    DEADLINE_PASSED = "deadline_passed"
    SESSION_BUDGET = "session_budget"
    SPEND_BUDGET = "spend_budget"
    TOO_LARGE = "too_large"
    NO_UPSTREAM = "no_upstream"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    UNKNOWN_MODEL = "unknown_model"
    DRAINING = "draining"
    BAD_REQUEST = "bad_request"
    NOT_FOUND = "not_found"
    UPSTREAM_FAILED = "upstream_failed"
    ADMISSION_UNAVAILABLE = "admission_unavailable"


@dataclass(frozen=True, slots=True)
class Rule:
    """Default HTTP status of a reason, and whether the same request can succeed later."""

    status: int
    retry: bool


RULES: dict[Reason, Rule] = {
    Reason.TENANT_QUOTA: Rule(429, retry=True),
    Reason.TENANT_CONCURRENCY: Rule(429, retry=True),
    Reason.QUEUE_TIMEOUT: Rule(429, retry=True),
    Reason.LANE_FULL: Rule(503, retry=True),
    Reason.EVICTED: Rule(503, retry=True),
    Reason.DEADLINE_UNMEETABLE: Rule(503, retry=True),
    Reason.DEADLINE_PASSED: Rule(504, retry=False),
    Reason.SESSION_BUDGET: Rule(403, retry=False),
    Reason.SPEND_BUDGET: Rule(403, retry=False),
    Reason.TOO_LARGE: Rule(413, retry=False),
    Reason.NO_UPSTREAM: Rule(503, retry=True),
    Reason.UNAUTHENTICATED: Rule(401, retry=False),
    Reason.FORBIDDEN: Rule(403, retry=False),
    Reason.UNKNOWN_MODEL: Rule(404, retry=False),
    Reason.DRAINING: Rule(503, retry=True),
    Reason.BAD_REQUEST: Rule(400, retry=False),
    Reason.NOT_FOUND: Rule(404, retry=False),
    Reason.UPSTREAM_FAILED: Rule(503, retry=True),
    Reason.ADMISSION_UNAVAILABLE: Rule(503, retry=True),
}


@dataclass(frozen=True, slots=True)
class Window:
    """One limit as shown to a refused caller: its size, what is left, and seconds until it is full again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal with everything a dialect needs to word it.

    status: HTTP status. retry_after: seconds until a retry may succeed, None when none can.
    detail: one technical half-sentence for the developer, may be empty; never contains secrets or prompt text.
    tokens, requests: the limits that apply to this caller, where known.
    """

    reason: Reason
    status: int
    retry_after: float | None = None
    detail: str = ""
    tokens: Window | None = None
    requests: Window | None = None


class Rejected(Exception):  # noqa: N818 - a decision, not an error
    """Raised where the reason is known, caught once by the handler.

    retry_after: seconds, infinite where no retry can help, None where the reason says so or the time is not known.
    """

    def __init__(
        self,
        reason: Reason,
        detail: str = "",
        *,
        retry_after: float | None = None,
        tokens: Window | None = None,
        requests: Window | None = None,
    ) -> None:
        """Name the reason; the rest is what the caller is told."""
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail
        self.retry_after = retry_after
        self.tokens = tokens
        self.requests = requests
