"""The Anthropic dialect: messages, token counts, refusals and rate-limit headers."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from extproc.fakes.answer import Answer, Ask, Finish, Script
from extproc.fakes.dialect import Dialect, Endpoint, Worded
from extproc.fakes.jsonbytes import dumps
from extproc.fakes.prompt import asks_for_ok, content_tokens, engine_priority, integer, json_tokens, messages_tokens
from extproc.fakes.refusal import Refusal, bad_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.fakes.limits import Kind, Level, Shortage

_FINISH: Mapping[Finish, str] = {"stop": "end_turn", "length": "max_tokens", "filter": "refusal"}
_ROUNDED_TO = 1000


# Requests.


def _read_message(body: dict[str, Any]) -> Ask:
    cap = integer(body, "max_tokens")
    if cap is None:
        raise bad_request("max_tokens: Field required", "max_tokens")
    return Ask(
        model=_model(body),
        prompt_tokens=_prompt_tokens(body),
        cap=cap,
        stream=body.get("stream") is True,
        include_usage=True,
        priority=engine_priority(body),
        says_ok=asks_for_ok(body["messages"]),
        body=body,
    )


def _read_count(body: dict[str, Any]) -> Ask:
    tokens = _prompt_tokens(body)
    # Counting is free: the size is kept for the answer, not for the account.
    return Ask(model=_model(body), talks=False, body={"input_tokens": tokens})


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise bad_request("model: Field required", "model")
    return model


def _prompt_tokens(body: Mapping[str, Any]) -> int:
    if "messages" not in body:
        raise bad_request("messages: Field required", "messages")
    return messages_tokens(body["messages"]) + content_tokens(body.get("system")) + json_tokens(body.get("tools"))


# Answers.


def _write_message(answer: Answer) -> bytes:
    text = answer.text()
    content = [{"type": "text", "text": text}] if text else []
    if _only_thinks(answer):
        content = [{"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}]
    return dumps(_message(answer, content, _FINISH[answer.finish], answer.completion_tokens))


def _only_thinks(answer: Answer) -> bool:
    """Tell whether thoughts are all there is; where there is text they are not shown."""
    return bool(answer.reasoning_tokens) and not answer.visible_tokens


def _write_count(answer: Answer) -> bytes:
    return dumps({"input_tokens": answer.ask.body["input_tokens"]})


def _message(answer: Answer, content: list[Any], stop_reason: str | None, output_tokens: int) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.serial}",
        "type": "message",
        "role": "assistant",
        "model": answer.ask.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": {**_usage(answer, output_tokens), "service_tier": "standard"},
        "system_fingerprint": answer.provider,
    }


def _usage(answer: Answer, output_tokens: int) -> dict[str, Any]:
    return {
        # Without what was read from the cache.
        "input_tokens": answer.ask.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": output_tokens,
    }


# Streams.


def _script_message(answer: Answer) -> Script:
    # The first usage tells the input, and an output of one token at most; the last one is cumulative.
    start = _message(answer, [], None, min(1, answer.completion_tokens))
    block = {"index": 0, "content_block": {"type": "text", "text": ""}}
    opening = _event("message_start", {"message": start})
    if _only_thinks(answer):
        block = {"index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}}
    opening += _event("content_block_start", block) + _event("ping", {})
    if _only_thinks(answer):
        opening += _event("content_block_delta", {"index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}})
    before = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta",'
    delta = {"stop_reason": _FINISH[answer.finish], "stop_sequence": None}
    usage = _usage(answer, answer.completion_tokens)
    closing = _event("content_block_stop", {"index": 0}) + _event("message_delta", {"delta": delta, "usage": usage})
    return Script(
        opening=opening,
        delta=lambda start, end: before + b'"text":"%b"}}\n\n' % answer.text(start, end).encode(),
        closing=lambda: closing,
        end=lambda: _event("message_stop", {}),
        error=lambda: _event("error", {"error": {"type": "overloaded_error", "message": "Overloaded"}}),
    )


def _event(kind: str, members: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dumps({"type": kind, **members}))


# Refusals.


def _word(refusal: Refusal, request_id: str) -> Worded:
    if refusal.shortage is not None:
        status, kind, message = 429, "rate_limit_error", _rate_message(refusal.shortage)
        headers = _retry_headers(refusal.shortage.wait_s)
    else:
        status, kind, message = _WORDS[refusal.reason]
        message, headers = message.format(refusal.detail), {}
    error: dict[str, Any] = {"type": kind, "message": message}
    if refusal.reason == "spend_limit":
        error["details"] = {"error_code": "enforced_spend_limit_reached"}
    return Worded(status, dumps({"type": "error", "error": error, "request_id": request_id}), headers)


def _retry_headers(wait_s: float | None) -> dict[str, str]:
    return {} if wait_s is None else {"retry-after": str(math.ceil(wait_s))}


def _rate_message(shortage: Shortage) -> str:
    unit = shortage.kind.replace("-", " ")
    return (
        f"This request would exceed your organization's rate limit of {shortage.limit:,} {unit} per minute. Please "
        "reduce the prompt length or the maximum tokens requested, or try again later."
    )


_NO_CREDIT = (
    "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade or purchase "
    "credits."
)

# Reason -> status, type, message.
_WORDS: Mapping[str, tuple[int, str, str]] = {
    "bad_request": (400, "invalid_request_error", "{}"),
    "no_key": (401, "authentication_error", "x-api-key header is required"),
    "wrong_key": (401, "authentication_error", "invalid x-api-key"),
    "forbidden": (403, "permission_error", "Your API key does not have permission to use the specified resource."),
    "unknown_model": (404, "not_found_error", "model: {}"),
    "unknown_path": (404, "not_found_error", "Not Found"),
    "too_large_body": (413, "request_too_large", "Request exceeds the maximum size"),
    "context_length": (400, "invalid_request_error", "prompt is too long: 208310 tokens > 200000 maximum"),
    "content_filter": (400, "invalid_request_error", "Output blocked by content filtering policy"),
    "billing": (400, "invalid_request_error", _NO_CREDIT),
    "payment": (402, "billing_error", "Your payment method has failed."),
    "spend_limit": (429, "rate_limit_error", "Your organization has reached its spend limit."),
    "slow_down": (429, "rate_limit_error", "Your traffic grows too quickly."),
    "prefill": (400, "invalid_request_error", "This model does not support assistant message prefill."),
    "overloaded": (529, "overloaded_error", "Overloaded"),
    "unavailable": (503, "api_error", "Service unavailable"),
    "queue_full": (503, "overloaded_error", "Overloaded"),
    "server_error": (500, "api_error", "Internal server error"),
}


# Rate-limit headers.


def _limit_headers(levels: Mapping[Kind, Level], wall_s: float) -> dict[str, str]:
    """Return the headers for every kind of bucket.

    `tokens` tells the most restrictive bucket of tokens; a kind without a bucket of its own repeats it. What remains
    of tokens is rounded to thousands, so it can say more than there is.
    """
    token_levels = [level for kind, level in levels.items() if kind != "requests"]
    headers: dict[str, str] = {}
    if (requests := levels.get("requests")) is not None:
        headers |= _kind_headers("requests", requests, requests.remaining, wall_s)
    if not token_levels:
        return headers
    tightest = min(token_levels, key=lambda level: level.remaining)
    shown: dict[str, Level] = {
        "tokens": tightest,
        "input-tokens": levels.get("input-tokens", tightest),
        "output-tokens": levels.get("output-tokens", tightest),
    }
    for kind, level in shown.items():
        headers |= _kind_headers(kind, level, _rounded(level), wall_s)
    return headers


def _kind_headers(kind: str, level: Level, remaining: int, wall_s: float) -> dict[str, str]:
    reset = datetime.fromtimestamp(math.ceil(wall_s + level.reset_s), UTC)
    return {
        f"anthropic-ratelimit-{kind}-limit": str(level.limit),
        f"anthropic-ratelimit-{kind}-remaining": str(remaining),
        f"anthropic-ratelimit-{kind}-reset": reset.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _rounded(level: Level) -> int:
    return min(level.limit, (level.remaining + _ROUNDED_TO // 2) // _ROUNDED_TO * _ROUNDED_TO)


ANTHROPIC = Dialect(
    name="anthropic",
    request_id_header="request-id",
    word=_word,
    limit_headers=_limit_headers,
    filters_in_answer=True,
)

ENDPOINTS = (
    Endpoint("/v1/messages", ANTHROPIC, _read_message, _write_message, _script_message),
    Endpoint("/v1/messages/count_tokens", ANTHROPIC, _read_count, _write_count),
)
