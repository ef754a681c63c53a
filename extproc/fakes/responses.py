"""The OpenAI Responses API: one object, and a stream of typed and numbered events."""

from __future__ import annotations

from typing import Any

from extproc.fakes.answer import Answer, Ask, Script
from extproc.fakes.dialect import Endpoint
from extproc.fakes.jsonbytes import dumps
from extproc.fakes.openai import OPENAI, read_model
from extproc.fakes.prompt import asks_for_ok, content_tokens, engine_priority, integer, json_tokens, messages_tokens
from extproc.fakes.refusal import bad_request

# Events before the first delta; the deltas are numbered from here.
_OPENING_EVENTS = 4


def _read(body: dict[str, Any]) -> Ask:
    prompt = body.get("input")
    if not isinstance(prompt, str | list) or not prompt:
        raise bad_request("Missing required parameter: 'input'.", "input")
    return Ask(
        model=read_model(body),
        prompt_tokens=_prompt_tokens(prompt, body),
        cap=integer(body, "max_output_tokens"),
        stream=body.get("stream") is True,
        include_usage=True,
        priority=engine_priority(body),
        says_ok=asks_for_ok(prompt),
        body=body,
    )


def _prompt_tokens(prompt: str | list[Any], body: dict[str, Any]) -> int:
    messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
    around = content_tokens(body.get("instructions")) + json_tokens(body.get("tools"))
    return messages_tokens(messages, "input") + around


def _write(answer: Answer) -> bytes:
    return dumps(_response(answer, finished=True))


def _response(answer: Answer, *, finished: bool) -> dict[str, Any]:
    return {
        "id": f"resp_{answer.serial}",
        "object": "response",
        "created_at": answer.created,
        "status": _status(answer) if finished else "in_progress",
        "error": None,
        "incomplete_details": _incomplete(answer) if finished else None,
        "instructions": None,
        "max_output_tokens": answer.ask.cap,
        "model": answer.ask.model,
        "output": [_message(answer)] if finished else [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "system_fingerprint": answer.provider,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": _usage(answer) if finished else None,
        "user": None,
        "metadata": {},
    }


def _status(answer: Answer) -> str:
    return "completed" if answer.finish == "stop" else "incomplete"


def _incomplete(answer: Answer) -> dict[str, str] | None:
    if answer.finish == "stop":
        return None
    return {"reason": "max_output_tokens" if answer.finish == "length" else "content_filter"}


def _message(answer: Answer) -> dict[str, Any]:
    return {
        "id": _item_id(answer),
        "type": "message",
        "status": _status(answer),
        "role": "assistant",
        "content": [_part(answer.text())],
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item_id(answer: Answer) -> str:
    return f"msg_{answer.serial}"


def _usage(answer: Answer) -> dict[str, Any]:
    prompt, completion = answer.ask.prompt_tokens, answer.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": prompt + completion,
    }


# Streams.


def _script(answer: Answer) -> Script:
    deltas = _Deltas(answer)
    place = {"output_index": 0, "item_id": _item_id(answer), "content_index": 0}
    started = _response(answer, finished=False)
    item = {**_message(answer), "status": "in_progress", "content": []}
    opening = [
        _event("response.created", 0, {"response": started}),
        _event("response.in_progress", 1, {"response": started}),
        _event("response.output_item.added", 2, {"output_index": 0, "item": item}),
        _event("response.content_part.added", 3, {**place, "part": _part("")}),
    ]
    return Script(
        opening=b"".join(opening),
        delta=deltas.write,
        closing=lambda: _closing(answer, deltas.next_number, place),
        end=lambda: _end(answer, deltas.next_number + 3),
        error=lambda: _error(deltas.next_number),
    )


class _Deltas:
    """The text deltas, numbered in the order in which they are written."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._item_id = _item_id(answer).encode()
        self.next_number = _OPENING_EVENTS

    def write(self, start: int, end: int) -> bytes:
        number, self.next_number = self.next_number, self.next_number + 1
        return (
            b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":%d,'
            b'"item_id":"%b","output_index":0,"content_index":0,"delta":"%b","logprobs":[]}\n\n'
        ) % (number, self._item_id, self._answer.text(start, end).encode())


def _closing(answer: Answer, number: int, place: dict[str, Any]) -> bytes:
    text = answer.text()
    events = [
        _event("response.output_text.done", number, {**place, "text": text, "logprobs": []}),
        _event("response.content_part.done", number + 1, {**place, "part": _part(text)}),
        _event("response.output_item.done", number + 2, {"output_index": 0, "item": _message(answer)}),
    ]
    return b"".join(events)


def _end(answer: Answer, number: int) -> bytes:
    return _event(f"response.{_status(answer)}", number, {"response": _response(answer, finished=True)})


def _error(number: int) -> bytes:
    wrong = {"code": "server_error", "message": "The server had an error while processing your request.", "param": None}
    return _event("error", number, wrong)


def _event(kind: str, number: int, members: dict[str, Any]) -> bytes:
    data = dumps({"type": kind, "sequence_number": number, **members})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


ENDPOINTS = (Endpoint("/v1/responses", OPENAI, _read, _write, _script),)
