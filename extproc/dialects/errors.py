"""What a provider's error means for the breaker and for routing: a table of what providers really send.

Classified by provider first, because the same words mean different things: "insufficient quota" is an empty account at
one provider and a per-minute limit at another. Rows are tried from top to bottom, the provider's own before the
`generic` ones; a row matches when each of its fields does. `kind` and `code` are patterns (`*` for anything), so that
a quota id such as `...PerDay...` can be told from `...PerMinute...`.

An error may come under status 200, in an event of a stream: then its kind decides, and a code that is a status counts
as that. The same rows are rendered into Envoy's filter (`render/lua/upstream.lua`), which finds kind and code in a body
and decides whether a caller may see it. Deliberately not here: what is done about a class.
"""

from __future__ import annotations

from enum import StrEnum
from fnmatch import fnmatchcase
from typing import NamedTuple

__all__ = ["TABLE", "ErrorClass", "Row", "classify", "rows_of", "words_about_us"]


class ErrorClass(StrEnum):
    """What an upstream's error says about whom."""

    PACE = "pace"  # we sent too fast: wait
    OVERLOAD = "overload"  # it cannot serve anybody well: breaker and next upstream
    TERMINAL = "terminal"  # no credit or no quota for long: quarantine and alert
    CREDENTIAL = "credential"  # our key: take it out, alert, never show the body
    FORBIDDEN = "forbidden"  # our key may not do this, perhaps for what was asked: a failure; never show the body
    MISSING = "missing"  # what a model is called here names none: a failure, and the caller's to read
    CLIENT = "client"  # the request itself: pass on, counts against nobody
    NONE = "none"  # no error


class Row(NamedTuple):
    """One rule. status 0 is any; a kind or code of "*" is any, present or not."""

    status: int
    kind: str
    code: str
    means: ErrorClass

    def matches(self, status: int, kind: str, code: str) -> bool:
        """Tell whether this rule is about such an error."""
        return self.status in (0, status) and fnmatchcase(kind, self.kind) and fnmatchcase(code, self.code)


_PACE, _OVERLOAD, _TERMINAL = ErrorClass.PACE, ErrorClass.OVERLOAD, ErrorClass.TERMINAL
_CREDENTIAL, _FORBIDDEN = ErrorClass.CREDENTIAL, ErrorClass.FORBIDDEN
_MISSING, _CLIENT = ErrorClass.MISSING, ErrorClass.CLIENT

_OPENAI = (
    Row(0, "insufficient_quota", "*", _TERMINAL),
    Row(0, "*", "insufficient_quota", _TERMINAL),
    Row(0, "*", "credit_balance_exhausted", _TERMINAL),
    Row(0, "*", "organization_spend_limit_exceeded", _TERMINAL),
    Row(0, "*", "project_spend_limit_exceeded", _TERMINAL),
    Row(0, "*", "organization_usage_limit_exceeded", _TERMINAL),
    Row(0, "*", "billing_hard_limit_reached", _TERMINAL),
    Row(0, "*", "billing_not_active", _TERMINAL),
    Row(0, "*", "account_deactivated", _CREDENTIAL),
    Row(0, "*", "slow_down", _PACE),
    Row(0, "*", "rate_limit_exceeded", _PACE),
    Row(0, "*", "server_is_overloaded", _OVERLOAD),
    Row(0, "*", "invalid_api_key", _CREDENTIAL),
    Row(0, "*", "unsupported_country_region_territory", _CREDENTIAL),
    Row(0, "*", "invalid_organization", _CREDENTIAL),
    Row(0, "*", "ip_not_authorized", _CREDENTIAL),
)

TABLE: dict[str, tuple[Row, ...]] = {
    "openai": _OPENAI,
    "azure": (
        Row(429, "*", "insufficient_quota", _PACE),  # here a limit per minute of the deployment
        Row(429, "insufficient_quota", "*", _PACE),
        Row(0, "*", "429", _PACE),  # Azure writes the status as the code
        Row(0, "*", "too_many_requests", _PACE),
        Row(0, "*", "ServiceUnavailable", _OVERLOAD),
        Row(404, "*", "DeploymentNotFound", _MISSING),  # our deployment's name, not the client's model
        *_OPENAI,
    ),
    "anthropic": (
        Row(0, "*", "enforced_spend_limit_reached", _TERMINAL),
        Row(0, "billing_error", "*", _TERMINAL),
        Row(0, "*", "credit_balance_too_low", _TERMINAL),  # these two are what our filter reads in a message
        Row(0, "*", "spend_limit_reached", _TERMINAL),
        Row(0, "rate_limit_error", "*", _PACE),
        Row(0, "overloaded_error", "*", _OVERLOAD),
        Row(0, "api_error", "*", _OVERLOAD),
        Row(0, "timeout_error", "*", _OVERLOAD),
        Row(0, "authentication_error", "*", _CREDENTIAL),
        Row(0, "permission_error", "*", _FORBIDDEN),
        Row(0, "not_found_error", "*", _CLIENT),
        Row(0, "request_too_large", "*", _CLIENT),
        Row(0, "invalid_request_error", "*", _CLIENT),
    ),
    "gemini": (
        Row(0, "*", "*PerDay*", _TERMINAL),
        Row(0, "*PerDay*", "*", _TERMINAL),
        Row(429, "*", "credit_balance_too_low", _TERMINAL),  # what was paid in advance is used up
        Row(0, "RESOURCE_EXHAUSTED", "*", _PACE),
        Row(0, "UNAVAILABLE", "*", _OVERLOAD),
        Row(0, "INTERNAL", "*", _OVERLOAD),
        Row(0, "DEADLINE_EXCEEDED", "*", _OVERLOAD),
        Row(0, "*", "API_KEY_INVALID", _CREDENTIAL),
        Row(0, "UNAUTHENTICATED", "*", _CREDENTIAL),
        Row(0, "PERMISSION_DENIED", "*", _FORBIDDEN),  # also for a cache or a file that the caller named
        Row(0, "FAILED_PRECONDITION", "*", _TERMINAL),  # free tier not available here, or billing not enabled
        Row(0, "INVALID_ARGUMENT", "*", _CLIENT),
        Row(0, "NOT_FOUND", "*", _CLIENT),
    ),
    "vllm": (
        Row(429, "*", "*", _OVERLOAD),  # an engine has no rate limits: its queue is full
        # Our own name for the model is wrong, or its adapter is not loaded. Any other 404 is about what the caller
        # chose: an answer to go on from, or an endpoint, that this server has not.
        Row(0, "*", "model_not_found", _MISSING),  # in a message
    ),
    "sglang": (
        Row(429, "*", "*", _OVERLOAD),
        Row(0, "*", "model_not_found", _MISSING),
    ),
    "deepseek": (
        Row(402, "*", "*", _TERMINAL),
        Row(422, "*", "*", _CLIENT),
    ),
    "openrouter": (
        Row(402, "*", "*", _TERMINAL),
        Row(0, "*", "402", _TERMINAL),
        Row(0, "*", "401", _CREDENTIAL),
        Row(0, "*", "429", _PACE),
        Row(408, "*", "*", _OVERLOAD),
        Row(0, "*", "408", _OVERLOAD),
        Row(0, "*", "502", _OVERLOAD),
        Row(0, "*", "503", _OVERLOAD),
        Row(403, "*", "*", _CLIENT),  # moderation flagged the input
    ),
    "bedrock": (
        Row(0, "ThrottlingException", "*", _PACE),
        Row(0, "ServiceQuotaExceededException", "*", _PACE),
        Row(0, "ServiceUnavailableException", "*", _OVERLOAD),
        Row(0, "ModelNotReadyException", "*", _OVERLOAD),
        Row(0, "ModelTimeoutException", "*", _OVERLOAD),
        Row(0, "InternalServerException", "*", _OVERLOAD),
        Row(0, "ModelErrorException", "*", _OVERLOAD),
        Row(0, "ModelStreamErrorException", "*", _OVERLOAD),
        Row(0, "modelStreamErrorException", "*", _OVERLOAD),  # its name in a stream
        Row(0, "UnrecognizedClientException", "*", _CREDENTIAL),
        Row(0, "ExpiredTokenException", "*", _CREDENTIAL),
        Row(0, "AccessDeniedException", "*", _FORBIDDEN),
        Row(0, "ValidationException", "*", _CLIENT),
    ),
    "together": (
        Row(0, "dynamic_request_limited", "*", _PACE),
        Row(0, "dynamic_token_limited", "*", _PACE),
        Row(402, "*", "*", _TERMINAL),
    ),
    "groq": (
        Row(413, "*", "rate_limit_exceeded", _CLIENT),  # larger than a minute's tokens: waiting would not help
        Row(498, "*", "*", _OVERLOAD),  # no room on the flexible tier
        Row(0, "*", "blocked_api_access", _TERMINAL),  # our own spend limit
        Row(0, "*", "organization_restricted", _CREDENTIAL),
    ),
    "mistral": (
        Row(0, "service_tier_capacity_exceeded", "*", _OVERLOAD),  # under 429
    ),
    "cerebras": (
        Row(0, "*", "queue_exceeded", _OVERLOAD),  # under 429
    ),
    "xai": (
        Row(0, "*", "credit_balance_exhausted", _TERMINAL),  # both under 403, in a message
        Row(0, "*", "content_policy_violation", _CLIENT),
    ),
    "scaleway": (
        Row(429, "*", "*", _PACE),  # its "INSUFFICIENT QUOTA" is a limit per minute
    ),
    "generic": (
        Row(0, "*", "content_filter", _CLIENT),
        Row(0, "*", "content_policy_violation", _CLIENT),
        Row(0, "insufficient_quota", "*", _TERMINAL),
        Row(0, "*", "insufficient_quota", _TERMINAL),
        Row(402, "*", "*", _TERMINAL),
        Row(0, "billing_error", "*", _TERMINAL),
        Row(0, "*", "enforced_spend_limit_reached", _TERMINAL),
        Row(0, "*", "credit_balance_too_low", _TERMINAL),  # these four are what our filter read in a message
        Row(0, "*", "spend_limit_reached", _TERMINAL),
        Row(0, "*", "API_KEY_INVALID", _CREDENTIAL),
        Row(0, "*", "invalid_api_key", _CREDENTIAL),
        Row(0, "authentication_error", "*", _CREDENTIAL),
        Row(0, "permission_error", "*", _FORBIDDEN),
        Row(429, "*", "*", _PACE),
        Row(401, "*", "*", _CREDENTIAL),
        Row(403, "*", "*", _FORBIDDEN),
        Row(408, "*", "*", _OVERLOAD),
        Row(425, "*", "*", _OVERLOAD),
        Row(0, "rate_limit_error", "*", _PACE),
        Row(0, "rate_limit_exceeded", "*", _PACE),
        Row(0, "*", "rate_limit_exceeded", _PACE),
        Row(0, "overloaded_error", "*", _OVERLOAD),
        Row(0, "server_error", "*", _OVERLOAD),
        Row(0, "api_error", "*", _OVERLOAD),
        Row(0, "*", "server_is_overloaded", _OVERLOAD),
        Row(0, "invalid_request_error", "*", _CLIENT),
        Row(0, "*", "context_length_exceeded", _CLIENT),
    ),
}


def classify(provider: str, status: int, kind: str = "", code: str = "") -> ErrorClass:
    """Class an upstream's answer. kind and code: the error's own words, "-" where it had none; both "": no error."""
    if status < 400 and not kind and not code:  # noqa: PLR2004
        return ErrorClass.NONE
    status = _named_status(status, code)
    kind, code = kind.removeprefix("-"), code.removeprefix("-")
    for row in rows_of(provider):
        if row.matches(status, kind, code):
            return row.means
    return _CLIENT if 400 <= status < 500 else _OVERLOAD  # noqa: PLR2004


def _named_status(status: int, code: str) -> int:
    """The status that counts: under one of success that which an error names itself, as its code."""
    named = int(code) if status < 400 and len(code) == 3 and code.isdecimal() else 0  # noqa: PLR2004
    return named if 400 <= named < 600 else status  # noqa: PLR2004


def rows_of(provider: str) -> tuple[Row, ...]:
    """The rows that are tried for a provider, in their order. An unknown one has the generic rows only."""
    own = TABLE.get(provider, ()) if provider != "generic" else ()
    return (*own, *TABLE["generic"])


def words_about_us() -> list[str]:
    """Types and codes by which any provider speaks of our key or our credit, whatever the status."""
    ours = (
        row
        for rows in TABLE.values()
        for row in rows
        if row.means in (_TERMINAL, _CREDENTIAL, _FORBIDDEN) and not row.status
    )
    return sorted({word for row in ours for word in (row.kind, row.code) if "*" not in word})
