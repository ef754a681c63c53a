"""What is sent to the console and what it answers, as its OpenAPI document describes it; see shapes for the rest."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field

from extproc.console.audit import MOST_REASON
from extproc.console.sessions import MOST_TOKENS, MOST_USD
from extproc.shapes import Row

__all__ = [
    "ANSWERS", "Asked", "AuditEntry", "AuditPage", "Budget", "Filter", "ForAWhile", "LogChange",
    "LogSettings", "NewValue", "Problem", "Raise", "RequestId", "RequestPage", "Session", "SessionId",
    "Tenant", "responses",
]  # fmt: skip

MOST_LISTED = 500
MOST_S = 30 * 86_400.0


class _Sent(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Told(BaseModel):
    model_config = ConfigDict(extra="forbid")


Tenant = Annotated[str, Path(examples=["agents"])]
RequestId = Annotated[str, Path(examples=["5f0c1a9e-7c0b-4b7e-9d52-0d4c2f9b6a11"])]
SessionId = Annotated[str, Path(examples=["a/b"])]
Reason = Annotated[str, Field(max_length=MOST_REASON, description="Why, for the audit log.")]


class Problem(_Told):
    """Why not."""

    error: str = Field(description="In words, for who asked.", examples=["no such session is known"])


class Asked(_Sent):
    """What any action may be told."""

    reason: Reason = ""


class ForAWhile(Asked):
    """An action that may end by itself."""

    for_s: Annotated[
        float | None, Field(gt=0, le=MOST_S, allow_inf_nan=False, description="Seconds; absent: until undone.")
    ] = None


class NewValue(ForAWhile):
    """Another value of a setting."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"place": "lanes.P2.max_requests", "value": 100, "for_s": 900}]},
    )

    place: Annotated[str, Field(min_length=1, max_length=500, description="As upstreams.primary.limits.0.tpm.")]
    value: int | Annotated[float, Field(allow_inf_nan=False)]


class Raise(_Sent):
    """How much more a session may use."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "anyOf": [{"required": ["add_tokens"]}, {"required": ["add_usd"]}],
            "examples": [{"add_tokens": 50000, "reason": "a long migration"}],
        },
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

    requests: list[Row]


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
