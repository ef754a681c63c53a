"""The answer of last resort: a text that the operator wrote, worded as an answer of the API that was called.

It stands in where no upstream could answer, so it costs nothing, and says so: its usage is zero, and its model is
`last-resort`, which no upstream has. Only endpoints that answer with text have one.

Written once for many requests: what differs between them is put in with `signed`.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from extproc.core.request import Endpoint

__all__ = ["MODEL", "signed", "stand_in"]

MODEL = "last-resort"
_ID, _CREATED = "{request-id}", 1_000_000_001
"""Stand for a request's id and for the time, in seconds since the epoch."""


@lru_cache(maxsize=256)
def stand_in(endpoint: Endpoint, text: str, *, stream: bool, wants_usage: bool = False) -> str | None:
    """The body of such an answer, JSON or server-sent events; None where the endpoint does not answer with text."""
    if endpoint is Endpoint.CHAT:
        return _chat(text, stream=stream, wants_usage=wants_usage)
    if endpoint is Endpoint.COMPLETIONS:
        return _completion(text, stream=stream, wants_usage=wants_usage)
    if endpoint is Endpoint.RESPONSES:
        return _response_stream(text) if stream else _json(_response(text, "completed"))
    if endpoint is Endpoint.MESSAGES:
        return _message_stream(text) if stream else _json(_message(text))
    return None


def signed(body: str, request_id: str, now: float) -> str:
    """`body` of `stand_in` for one request. now: seconds since the epoch."""
    body = body.replace(_ID, json.dumps(request_id)[1:-1])
    for key in ("created", "created_at"):  # with their quotes, which no text has without a backslash
        body = body.replace(f'"{key}": {_CREATED}', f'"{key}": {int(now)}')
    return body


# OpenAI.

_NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def _chat(text: str, *, stream: bool, wants_usage: bool) -> str:
    head = {"id": f"chatcmpl-{_ID}", "created": _CREATED, "model": MODEL}
    if not stream:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        return _json({**head, "object": "chat.completion", "choices": [choice], "usage": _NO_USAGE})
    head["object"] = "chat.completion.chunk"
    said = {"index": 0, "delta": {"role": "assistant", "content": text}, "logprobs": None, "finish_reason": None}
    return _chunks(head, said, {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}, wants_usage)


def _completion(text: str, *, stream: bool, wants_usage: bool) -> str:
    head = {"id": f"cmpl-{_ID}", "object": "text_completion", "created": _CREATED, "model": MODEL}
    whole = {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}
    if not stream:
        return _json({**head, "choices": [whole], "usage": _NO_USAGE})
    return _chunks(head, {**whole, "finish_reason": None}, {**whole, "text": ""}, wants_usage)


def _chunks(head: dict[str, Any], said: Any, finish: Any, wants_usage: bool) -> str:  # noqa: FBT001 - passed on
    chunks = [{**head, "choices": [choice]} for choice in (said, finish)]
    chunks += [{**head, "choices": [], "usage": _NO_USAGE}] if wants_usage else []
    return "".join(f"data: {_json(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


# The Responses API.


def _response(text: str, status: str) -> dict[str, Any]:
    done = status == "completed"
    return {
        "id": f"resp_{_ID}",
        "object": "response",
        "created_at": _CREATED,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": MODEL,
        "output": [_item([_part(text)], status)] if done else [],
        "parallel_tool_calls": False,
        "temperature": None,
        "tool_choice": "none",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 0,
        }
        if done
        else None,
    }


def _item(content: list[Any], status: str) -> dict[str, Any]:
    return {"id": f"msg_{_ID}", "type": "message", "status": status, "role": "assistant", "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _response_stream(text: str) -> str:
    place = {"item_id": f"msg_{_ID}", "output_index": 0, "content_index": 0}
    begun, whole = _item([], "in_progress"), _item([_part(text)], "completed")
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": _response("", "in_progress")}),
        ("response.in_progress", {"response": _response("", "in_progress")}),
        ("response.output_item.added", {"output_index": 0, "item": begun}),
        ("response.content_part.added", {**place, "part": _part("")}),
        ("response.output_text.delta", {**place, "delta": text, "logprobs": []}),
        ("response.output_text.done", {**place, "text": text, "logprobs": []}),
        ("response.content_part.done", {**place, "part": _part(text)}),
        ("response.output_item.done", {"output_index": 0, "item": whole}),
        ("response.completed", {"response": _response(text, "completed")}),
    ]
    return "".join(_event(kind, {"sequence_number": i, **members}) for i, (kind, members) in enumerate(events))


# Anthropic.


def _message(text: str | None) -> dict[str, Any]:
    return {
        "id": f"msg_{_ID}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [] if text is None else [{"type": "text", "text": text}],
        "stop_reason": None if text is None else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def _message_stream(text: str) -> str:
    events: list[tuple[str, dict[str, Any]]] = [
        ("message_start", {"message": _message(None)}),
        ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
        ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}}),
        ("content_block_stop", {"index": 0}),
        (
            "message_delta",
            {"delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": 0}},
        ),
        ("message_stop", {}),
    ]
    return "".join(_event(kind, members) for kind, members in events)


def _event(kind: str, members: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {_json({'type': kind, **members})}\n\n"


def _json(members: dict[str, Any]) -> str:
    return json.dumps(members, ensure_ascii=False)
