"""What is sent to the console and what it answers, as its OpenAPI document describes it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from extproc.console.audit import MOST_REASON

__all__ = [
    "ANSWERS", "MOST_TOKENS", "MOST_USD", "AuditEntry", "AuditPage", "Budget", "Filter", "LogChange", "LogSettings",
    "Problem", "Raise", "RequestPage", "Session", "responses",
]  # fmt: skip

MOST_TOKENS, MOST_USD = 10**12, 10**9
MOST_LISTED = 500


class _Sent(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Told(BaseModel):
    model_config = ConfigDict(extra="forbid")


Reason = Annotated[str, Field(max_length=MOST_REASON, description="Why, for the audit log.")]


class Problem(_Told):
    """Why not."""

    error: str = Field(description="In words, for who asked.", examples=["no such session is known"])


class Raise(_Sent):
    """How much more a session may use."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"minProperties": 1, "examples": [{"add_tokens": 50000}]}
    )

    add_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 0
    add_usd: Annotated[float, Field(gt=0, le=MOST_USD)] = 0.0
    reason: Reason = ""


class Budget(_Told):
    """Of a session, in tokens or dollars."""

    limit: float
    used: float
    left: float


class Session(_Told):
    """An agent session. silent_s: since it was last heard of. A budget is null where there is no limit."""

    tenant: str
    session: str
    served: bool
    running: int
    silent_s: float
    tokens: Budget | None
    usd: Budget | None


class AuditEntry(_Told):
    """One action, or an attempt at one. at: epoch seconds."""

    id: int
    at: float
    who: str
    from_: str = Field(alias="from")
    action: str
    arguments: dict[str, Any]
    reason: str
    result: str
    why: str = ""
    unlisted: int = 0


class AuditPage(_Told):
    """The newest first."""

    actions: list[AuditEntry]


class LogSettings(_Told):
    """What is written to the log."""

    level: str
    slow_s: float
    sample: float


class LogChange(_Sent):
    """What of it is to be changed, until the next reload or start."""

    level: Annotated[str | None, Field(pattern="^(debug|info|warning|error)$")] = None
    slow_s: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    sample: Annotated[float | None, Field(ge=0, le=1, allow_inf_nan=False)] = None
    reason: Reason = ""


class Filter(BaseModel):
    """Which requests."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=MOST_LISTED)] = 50
    tenant: Annotated[str | None, Field(max_length=256)] = None
    lane: Annotated[str | None, Field(max_length=256)] = None
    reason: Annotated[str | None, Field(max_length=256)] = None
    upstream: Annotated[str | None, Field(max_length=256)] = None
    state: Annotated[str | None, Field(max_length=256)] = None


class RequestPage(_Told):
    """The newest first."""

    requests: list[dict[str, Any]]


ANSWERS = {
    400: "The body is not JSON, or makes no sense to whom it is for",
    401: "Not proven who this is",
    403: "Not allowed to anybody here, or to web pages of others",
    404: "No such thing is known",
    408: "The body took too long to come",
    409: "What is there does not allow it",
    413: "The body is too long",
    415: "The body is no JSON",
    422: "The body or the query is not what it must be",
    503: "Nothing was done: it could not be written down, or too many watch already",
}
_CHALLENGE = {"WWW-Authenticate": {"description": "What would do.", "schema": {"type": "string"}}}


def responses(*codes: int, **ok: Any) -> dict[int | str, dict[str, Any]]:
    """For a route: errors by code, and what its good answer is (`model`, `content`, `description`)."""
    found: dict[int | str, dict[str, Any]] = {
        code: {"model": Problem, "description": ANSWERS[code], **({"headers": _CHALLENGE} if code == 401 else {})}  # noqa: PLR2004
        for code in codes
    }
    return {200: ok, **found} if ok else found
