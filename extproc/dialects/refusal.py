"""Wording a refusal: headers and a JSON body in the caller's dialect and language.

The SDKs obey these headers, so they are written with care. `retry-after-ms` carries up to 25 % of jitter, never less
than was computed, so that clients refused together do not come back together. Many versions of the SDKs take a wait of
more than a minute for none and come back after a short pause of their own: beyond a minute, and where no retry can
help, `x-should-retry` says false. `x-tidegate-reason` and the body's `reason` tell a refusal from a provider's own 429.

Deliberately not here: which status a reason has, which settings may change.
"""

# ruff: noqa: RUF001 - Chinese has its own comma

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from extproc.core.refusal import RULES, Reason
from extproc.core.request import Dialect

if TYPE_CHECKING:
    from extproc.core.refusal import Refusal, Window

__all__ = ["message_of", "refuse"]

JITTER = 0.25
LONGEST_SDK_WAIT_S = 60.0
FOREVER_S = 366 * 86_400.0  # a wait of more than a year is none that helps
MAX_DETAIL = 500
MAX_ID = 128
"""Characters of a request's id that are sent back; a longer one is not."""

_BUDGETS = frozenset({Reason.SESSION_BUDGET, Reason.SPEND_BUDGET})
_SERVER_ERROR = 500

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "server_busy", 503: "server_busy"}
_OPENAI_TYPES |= {529: "server_busy", 402: "insufficient_quota"}
_ANTHROPIC_TYPES = {401: "authentication_error", 402: "billing_error", 403: "permission_error", 404: "not_found_error"}
_ANTHROPIC_TYPES |= {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error"}
_CODES = {429: "RATE_LIMIT_EXCEEDED", 503: "SERVER_OVERLOADED", 529: "SERVER_OVERLOADED"}

_WORDS: dict[Reason, tuple[str, str]] = {
    Reason.TENANT_QUOTA: (
        "Your quota is used up for the moment",
        "您的配额暂时已用完",
    ),
    Reason.TENANT_CONCURRENCY: (
        "Too many of your requests are running at the same time",
        "您同时运行的请求过多",
    ),
    Reason.QUEUE_TIMEOUT: (
        "The service is busy and your request has waited as long as it may",
        "服务繁忙，您的请求已达到最长等待时间",
    ),
    Reason.LANE_FULL: (
        "The service is busy and its queue is full",
        "服务繁忙，等待队列已满",
    ),
    Reason.EVICTED: (
        "The service is busy and your request gave up its place to a more urgent one",
        "服务繁忙，您的请求已让位给更紧急的请求",
    ),
    Reason.DEADLINE_UNMEETABLE: (
        "The service is too busy to start your request in time",
        "服务繁忙，无法及时开始处理您的请求",
    ),
    Reason.DEADLINE_PASSED: (
        "The deadline of your request has passed before it could be answered",
        "请求尚未得到回答，其截止时间已过",
    ),
    Reason.SESSION_BUDGET: (
        "This session has spent its whole budget and cannot go on until the budget is raised",
        "本次会话的预算已用完，提高预算后才能继续",
    ),
    Reason.SPEND_BUDGET: (
        "The spending limit has been reached, so no more requests are accepted for now",
        "已达到费用上限，暂不接受新的请求",
    ),
    Reason.TOO_LARGE: (
        "Your request is larger than any available model can take; please shorten the prompt or ask for less output",
        "您的请求超出了所有可用模型的上限，请缩短提示词或减少输出长度",
    ),
    Reason.NO_UPSTREAM: (
        "No model is available to answer right now",
        "目前没有可用的模型",
    ),
    Reason.UNAUTHENTICATED: (
        "Your credentials are missing or not valid",
        "缺少身份凭证或凭证无效",
    ),
    Reason.FORBIDDEN: (
        "You are not allowed to use this model or this priority",
        "您无权使用该模型或该优先级",
    ),
    Reason.UNKNOWN_MODEL: (
        "There is no model of this name here",
        "没有该名称的模型",
    ),
    Reason.DRAINING: (
        "The service is restarting",
        "服务正在重启",
    ),
    Reason.BAD_REQUEST: (
        "Your request could not be understood",
        "无法识别您的请求",
    ),
    Reason.NOT_FOUND: (
        "There is nothing at this address",
        "请求的地址不存在",
    ),
    Reason.UPSTREAM_FAILED: (
        "Every model that was asked failed to answer",
        "所有尝试过的模型均未能回答",
    ),
    Reason.ADMISSION_UNAVAILABLE: (
        "The service cannot accept requests at the moment",
        "服务暂时无法接受请求",
    ),
}
_UNITS = ((5_400, 3_600, "hour", "小时"), (90, 60, "minute", "分钟"), (0, 1, "second", "秒"))


def refuse(
    dialect: Dialect,
    refusal: Refusal,
    *,
    language: str = "en",
    request_id: str = "",
    now: float,
    jitter: float,
) -> tuple[list[tuple[str, str]], bytes]:
    """Write the headers and the JSON body of a refusal.

    request_id: what the client may ask about; SDKs show it with the error. now: seconds since the epoch. jitter: a
    random number from 0 to 1. language: "en" or "zh".
    """
    wait = _wait(refusal, jitter)
    headers = [("content-type", "application/json"), ("x-tidegate-reason", str(refusal.reason))]
    if wait is not None:
        headers.append(("retry-after", str(_whole(wait))))
        headers.append(("retry-after-ms", str(max(1, math.ceil(wait * 1000)))))
    again = wait is not None and wait <= LONGEST_SDK_WAIT_S
    headers.append(("x-should-retry", "true" if again else "false"))
    headers += _limits(refusal, now)
    if request_id and len(request_id) <= MAX_ID and request_id.isascii() and request_id.isprintable():
        names = ("x-request-id", "x-tidegate-request-id") + (("request-id",) if dialect is Dialect.ANTHROPIC else ())
        headers += [(name, request_id) for name in names]  # an SDK of Anthropic's looks at the last
    message = message_of(refusal.reason, language, wait)
    if refusal.detail:
        message += f" ({refusal.detail[:MAX_DETAIL]})"
    body = _openai(refusal, message) if dialect is Dialect.OPENAI else _anthropic(refusal, message, request_id)
    return headers, json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


def message_of(reason: Reason, language: str, retry_after: float | None) -> str:
    """Say in one friendly sentence what happened and, where it helps, when to try again."""
    english, chinese = _WORDS[reason]
    when = _helps(reason, retry_after)
    seconds = _whole(retry_after or 0.0) if when else 0
    _, size, unit, chinese_unit = next(row for row in _UNITS if seconds >= row[0])
    count = math.ceil(seconds / size)
    if language == "zh":
        return f"{chinese}，请在 {count} {chinese_unit}后重试。" if when else f"{chinese}。"
    return f"{english}; please try again in {count} {unit}{'s' * (count != 1)}." if when else f"{english}."


def _wait(refusal: Refusal, jitter: float) -> float | None:
    """Return the seconds to wait, jittered but not across the minute that the SDKs obey; None when waiting is vain."""
    if not _helps(refusal.reason, refusal.retry_after):
        return None
    wait = max(0.0, refusal.retry_after or 0.0)
    late = wait * (1 + JITTER * jitter)
    return min(late, LONGEST_SDK_WAIT_S) if wait <= LONGEST_SDK_WAIT_S else late


def _helps(reason: Reason, wait: float | None) -> bool:
    return wait is not None and RULES[reason].retry and wait < FOREVER_S  # false for NaN


def _whole(seconds: float) -> int:
    return max(1, math.ceil(seconds))


def _limits(refusal: Refusal, now: float) -> list[tuple[str, str]]:
    """Show the limits that are known; the plain names show the one with the smaller share left."""
    known = {name: window for name in ("tokens", "requests") if (window := getattr(refusal, name)) is not None}
    if not known:
        return []
    tightest = min(known.values(), key=lambda window: window.remaining / max(1, window.limit))
    headers = _window("", tightest, now)
    for name, window in known.items():
        headers += _window(f"-{name}", window, now)
    return headers


def _window(suffix: str, window: Window, now: float) -> list[tuple[str, str]]:
    reset = window.reset_s if window.reset_s < FOREVER_S else 0.0
    return [
        (f"x-ratelimit-limit{suffix}", str(window.limit)),
        (f"x-ratelimit-remaining{suffix}", str(max(0, window.remaining))),
        (f"x-ratelimit-reset{suffix}", str(math.ceil(now + max(0.0, reset)))),
    ]


def _openai(refusal: Refusal, message: str) -> dict[str, object]:
    status, reason = refusal.status, refusal.reason
    fallback = "server_error" if status >= _SERVER_ERROR else "invalid_request_error"
    kind = "insufficient_quota" if reason in _BUDGETS else _OPENAI_TYPES.get(status, fallback)
    code = "BUDGET_EXHAUSTED" if reason in _BUDGETS else _CODES.get(status, reason.upper())
    return {"error": {"message": message, "type": kind, "param": None, "code": code, "reason": str(reason)}}


def _anthropic(refusal: Refusal, message: str, request_id: str) -> dict[str, object]:
    fallback = "api_error" if refusal.status >= _SERVER_ERROR else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(refusal.status, fallback)
    error = {"type": kind, "message": message, "reason": str(refusal.reason)}
    return {"type": "error", "error": error, "request_id": request_id}
