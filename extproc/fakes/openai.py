"""The OpenAI dialect: chat completions, completions, embeddings, refusals and rate-limit headers.

`responses.py` has the Responses API, which shares the refusals and headers but none of the shapes.
"""

from __future__ import annotations

import base64
import math
import struct
from functools import cache
from typing import TYPE_CHECKING, Any

from extproc.fakes.answer import Answer, Ask, Finish, Script
from extproc.fakes.dialect import Dialect, Endpoint, Worded
from extproc.fakes.jsonbytes import dumps
from extproc.fakes.prompt import asks_for_ok, content_tokens, engine_priority, integer, json_tokens, messages_tokens
from extproc.fakes.refusal import Refusal, bad_request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from extproc.fakes.limits import Kind, Level, Shortage

_FINISH: Mapping[Finish, str] = {"stop": "stop", "length": "length", "filter": "content_filter"}
_DONE = b"data: [DONE]\n\n"
_EMBEDDING_SIZE = 1536
_MOST_CHOICES = 128
_MOST_DIMENSIONS = 8192
_SECOND_MS = 1000


# Requests.


def read_model(body: Mapping[str, Any]) -> str:
    """Return the model asked for. Raises `Refused` if there is none."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise bad_request("you must provide a model parameter", "model")
    return model


def _read_chat(body: dict[str, Any]) -> Ask:
    if "messages" not in body:
        raise bad_request("Missing required parameter: 'messages'.", "messages")
    messages = body["messages"]
    return Ask(
        model=read_model(body),
        prompt_tokens=messages_tokens(messages) + json_tokens(body.get("tools")),
        cap=integer(body, "max_completion_tokens") or integer(body, "max_tokens"),
        choices=integer(body, "n", most=_MOST_CHOICES) or 1,
        stream=body.get("stream") is True,
        include_usage=_include_usage(body),
        priority=engine_priority(body),
        says_ok=asks_for_ok(messages),
        body=body,
    )


def _read_completion(body: dict[str, Any]) -> Ask:
    prompts = _inputs(body, "prompt")
    return Ask(
        model=read_model(body),
        prompt_tokens=sum(map(_input_tokens, prompts)),
        cap=integer(body, "max_tokens"),
        choices=(integer(body, "n", most=_MOST_CHOICES) or 1) * len(prompts),
        stream=body.get("stream") is True,
        include_usage=_include_usage(body),
        priority=engine_priority(body),
        says_ok=asks_for_ok(prompts[-1]),
        body=body,
    )


def _read_embeddings(body: dict[str, Any]) -> Ask:
    inputs = _inputs(body, "input")
    integer(body, "dimensions", most=_MOST_DIMENSIONS)
    tokens = sum(map(_input_tokens, inputs))
    return Ask(model=read_model(body), prompt_tokens=tokens, talks=False, choices=len(inputs), body=body)


def _include_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _inputs(body: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return the inputs of a body that may hold one text, one list of token numbers, or a list of either."""
    value = body.get(name)
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        return [value]
    if not isinstance(value, list) or not value:
        raise bad_request(f"Missing required parameter: '{name}'.", name)
    return value


def _input_tokens(text: Any) -> int:
    if isinstance(text, list) and all(isinstance(token, int) for token in text):
        return len(text)
    return content_tokens(text)


# Answers.


def _write_chat(answer: Answer) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text(), "refusal": None, "annotations": []}
    choice = {"message": message, "logprobs": None, "finish_reason": _FINISH[answer.finish]}
    choices = [{"index": index, **choice} for index in range(answer.ask.choices)]
    return dumps({**_head(answer, "chatcmpl", "chat.completion"), "choices": choices, "usage": _usage(answer)})


def _write_completion(answer: Answer) -> bytes:
    choice = {"text": answer.text(), "logprobs": None, "finish_reason": _FINISH[answer.finish]}
    choices = [{"index": index, **choice} for index in range(answer.ask.choices)]
    return dumps({**_head(answer, "cmpl", "text_completion"), "choices": choices, "usage": _usage(answer)})


def _write_embeddings(answer: Answer) -> bytes:
    size = integer(answer.ask.body, "dimensions", most=_MOST_DIMENSIONS) or _EMBEDDING_SIZE
    vector = _vector_base64(size) if answer.ask.body.get("encoding_format") == "base64" else _vector_json(size)
    items = [
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, vector) for index in range(answer.ask.choices)
    ]
    tokens = answer.ask.prompt_tokens
    rest = dumps(
        {
            "model": answer.ask.model,
            "system_fingerprint": answer.provider,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )
    return b'{"object":"list","data":[%b],%b' % (b",".join(items), rest[1:])


def _head(answer: Answer, prefix: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{answer.serial}",
        "object": kind,
        "created": answer.created,
        "model": answer.ask.model,
        "system_fingerprint": answer.provider,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    prompt, completion = answer.ask.prompt_tokens, answer.completion_tokens
    reasoning = answer.reasoning_tokens * answer.ask.choices
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


@cache
def _vector(size: int) -> tuple[float, ...]:
    """Return a vector of length one, the same for every text."""
    return (1.0 / math.sqrt(size),) * size


@cache
def _vector_json(size: int) -> bytes:
    return dumps(_vector(size))


@cache
def _vector_base64(size: int) -> bytes:
    return b'"%b"' % base64.b64encode(struct.pack(f"<{size}f", *_vector(size)))


# Streams.


def _script_chat(answer: Answer) -> Script:
    frames = _Frames(answer, "chatcmpl", "chat.completion.chunk")
    before, after = frames.around(b'"delta":{"content":"', b'"},"logprobs":null,"finish_reason":null}')
    finish = b'"delta":{},"logprobs":null,"finish_reason":"%b"}' % frames.finish
    return Script(
        opening=frames.all(b'"delta":{"role":"assistant","content":"","refusal":null},"finish_reason":null}'),
        delta=_delta(answer, before, after),
        closing=lambda: frames.all(finish) + frames.usage(),
        end=lambda: _DONE,
        error=lambda: _STREAM_ERROR,
    )


def _script_completion(answer: Answer) -> Script:
    frames = _Frames(answer, "cmpl", "text_completion")
    before, after = frames.around(b'"text":"', b'","logprobs":null,"finish_reason":null}')
    finish = b'"text":"","logprobs":null,"finish_reason":"%b"}' % frames.finish
    return Script(
        opening=b"",
        delta=_delta(answer, before, after),
        closing=lambda: frames.all(finish) + frames.usage(),
        end=lambda: _DONE,
        error=lambda: _STREAM_ERROR,
    )


class _Frames:
    """The bytes around the changing part of every event of one answer."""

    def __init__(self, answer: Answer, prefix: str, kind: str) -> None:
        self._answer = answer
        self._head = b"data: " + dumps(_head(answer, prefix, kind))[:-1]
        # With `include_usage`, every event but the last says that it has none.
        none_yet = b'"usage":null,' if answer.ask.include_usage else b""
        self._choice = self._head + b"," + none_yet + b'"choices":[{"index":'
        self.finish = _FINISH[answer.finish].encode()

    def around(self, start: bytes, stop: bytes) -> tuple[list[bytes], bytes]:
        """Return what comes before the text, per choice, and what comes after it."""
        return [self._of(index) + start for index in range(self._answer.ask.choices)], stop + b"]}\n\n"

    def all(self, content: bytes) -> bytes:
        """Return one event per choice, all with the same content."""
        return b"".join(self._of(index) + content + b"]}\n\n" for index in range(self._answer.ask.choices))

    def usage(self) -> bytes:
        """Return the event with the usage, if it was asked for."""
        if not self._answer.ask.include_usage:
            return b""
        return self._head + b',"choices":[],"usage":' + dumps(_usage(self._answer)) + b"}\n\n"

    def _of(self, index: int) -> bytes:
        return self._choice + str(index).encode() + b","


def _delta(answer: Answer, before: list[bytes], after: bytes) -> Callable[[int, int], bytes]:
    if len(before) == 1:
        head = before[0]
        return lambda start, end: head + answer.text(start, end).encode() + after

    def delta(start: int, end: int) -> bytes:
        text = answer.text(start, end).encode()
        return b"".join(head + text + after for head in before)

    return delta


# Refusals.


def word(refusal: Refusal, request_id: str) -> Worded:
    """Word a refusal as OpenAI does."""
    del request_id  # only in the headers
    if refusal.shortage is not None:
        return _rate(refusal.shortage)
    status, kind, code, message = _WORDS[refusal.reason]
    return Worded(status, _error(message.format(refusal.detail), kind, code, refusal.param), {})


def _rate(shortage: Shortage) -> Worded:
    kind = "requests" if shortage.kind == "requests" else "tokens"
    body = _error(_rate_message(shortage, kind), kind, "rate_limit_exceeded", None)
    return Worded(429, body, _retry_headers(shortage.wait_s))


def _rate_message(shortage: Shortage, kind: str) -> str:
    unit = "requests per min (RPM)" if kind == "requests" else "tokens per min (TPM)"
    sizes = f"Limit {shortage.limit}, Used {shortage.used}, Requested {shortage.requested}."
    if shortage.wait_s is None and shortage.requested > shortage.limit:
        return (
            f"Request too large in organization org-fake on {unit}: Limit {shortage.limit}, "
            f"Requested {shortage.requested}. The input or output tokens must be reduced in order to run successfully."
        )
    again = "" if shortage.wait_s is None else f" Please try again in {go_duration(shortage.wait_s)}."
    return f"Rate limit reached in organization org-fake on {unit}: {sizes}{again}"


def _retry_headers(wait_s: float | None) -> dict[str, str]:
    if wait_s is None:
        return {}
    return {"retry-after": str(math.ceil(wait_s)), "retry-after-ms": str(math.ceil(wait_s * 1000))}


def _error(message: str, kind: str, code: str | None, param: str | None) -> bytes:
    return dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


_NO_KEY = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer auth."
)
_NO_ACCESS = "Your project does not have access to this model."
_NO_MODEL = "The model `{}` does not exist or you do not have access to it."
_NO_CREDIT = "You exceeded your current quota, please check your plan and billing details."
_SPENT = "Your organization has reached its spend limit for this month."
_SLOW_DOWN = "Your traffic grows too quickly. Please slow down and raise it gradually."
_NO_PREFILL = "This model does not support a conversation that ends with an assistant message."
_TOO_LONG = (
    "This model's maximum context length is 8192 tokens. However, your messages resulted in more tokens. "
    "Please reduce the length of the messages."
)
_FILTERED = (
    "The response was filtered due to the prompt triggering the content management policy. "
    "Please modify your prompt and retry."
)
_OVERLOADED = "The server is overloaded or not ready yet."
_QUEUE_FULL = "The request queue is full. Please try again later."
_SERVER_ERROR = "The server had an error while processing your request. Sorry about that!"
_INVALID = "invalid_request_error"

# Reason -> status, type, code, message.
_WORDS: Mapping[str, tuple[int, str, str | None, str]] = {
    "bad_request": (400, _INVALID, None, "{}"),
    "no_key": (401, _INVALID, None, _NO_KEY),
    "wrong_key": (401, _INVALID, "invalid_api_key", "Incorrect API key provided."),
    "forbidden": (403, _INVALID, "model_not_allowed", _NO_ACCESS),
    "unknown_model": (404, _INVALID, "model_not_found", _NO_MODEL),
    "unknown_path": (404, _INVALID, None, "Invalid URL ({})"),
    "too_large_body": (413, _INVALID, "request_too_large", "The request body is too large."),
    "context_length": (400, _INVALID, "context_length_exceeded", _TOO_LONG),
    "content_filter": (400, _INVALID, "content_filter", _FILTERED),
    "billing": (429, "insufficient_quota", "insufficient_quota", _NO_CREDIT),
    "payment": (402, "unknown_error", "invalid_request_error", "Insufficient Balance"),
    "spend_limit": (429, "insufficient_quota", "organization_spend_limit_exceeded", _SPENT),
    "slow_down": (429, "rate_limit_error", "slow_down", _SLOW_DOWN),
    "prefill": (400, _INVALID, None, _NO_PREFILL),
    "overloaded": (529, "server_error", "server_is_overloaded", _OVERLOADED),
    "unavailable": (503, "server_error", "server_is_overloaded", _OVERLOADED),
    "queue_full": (503, "server_error", "server_is_overloaded", _QUEUE_FULL),
    "server_error": (500, "server_error", None, _SERVER_ERROR),
}

_STREAM_ERROR = b"data: %b\n\n" % _error(_SERVER_ERROR, "server_error", None, None)


# Rate-limit headers.


def limit_headers(levels: Mapping[Kind, Level], wall_s: float) -> dict[str, str]:
    """Return the headers for the buckets of requests and tokens. The reset is the time to a full bucket."""
    del wall_s  # durations, not dates
    headers: dict[str, str] = {}
    for kind in ("requests", "tokens"):
        level = levels.get(kind) or (_tightest(levels) if kind == "tokens" else None)
        if level is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(level.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(level.remaining)
            headers[f"x-ratelimit-reset-{kind}"] = go_duration(level.reset_s)
    return headers


def go_duration(seconds: float) -> str:
    """Write a time as Go does, in milliseconds below a second: `12ms`, `7.66s`, `6m0s`, `1h0m2s`."""
    millis = math.ceil(max(0.0, seconds) * 1000 - 1e-6)
    if millis < _SECOND_MS:
        return f"{millis}ms" if millis else "0s"
    minutes, rest = divmod(millis, 60_000)
    hours, minutes = divmod(minutes, 60)
    lead = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{lead}{rest / 1000:g}s"


def _tightest(levels: Mapping[Kind, Level]) -> Level | None:
    tokens = [levels[kind] for kind in ("input-tokens", "output-tokens") if kind in levels]
    return min(tokens, key=lambda level: level.remaining, default=None)


OPENAI = Dialect(
    name="openai",
    request_id_header="x-request-id",
    word=word,
    limit_headers=limit_headers,
    filters_in_answer=False,
)

ENDPOINTS = (
    Endpoint("/v1/chat/completions", OPENAI, _read_chat, _write_chat, _script_chat),
    Endpoint("/v1/completions", OPENAI, _read_completion, _write_completion, _script_completion),
    Endpoint("/v1/embeddings", OPENAI, _read_embeddings, _write_embeddings),
)
