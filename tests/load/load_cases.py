"""What is sent and what the upstream answers: three cases, as an SDK would send them.

The answers are prebuilt bytes, so that the upstream costs next to nothing. Its usage agrees with the prompt, or the
gateway would learn nonsense about its own counting.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from extproc.fakes import count_tokens, text_of_tokens

EVENTS = 64
"""Events with a token in them, in a streamed answer."""
PACE_S = 0.002
OUTPUT_TOKENS = 64
TEXTS = 64

SDK_HEADERS = {
    "accept": "application/json",
    "accept-encoding": "gzip, deflate",
    "authorization": "Bearer sk-bench-0123456789abcdefghijklmnopqrstuvwxyz",
    "content-type": "application/json",
    "user-agent": "OpenAI/Python 2.8.1",
    "x-stainless-arch": "x64",
    "x-stainless-async": "async:asyncio",
    "x-stainless-lang": "python",
    "x-stainless-os": "Linux",
    "x-stainless-package-version": "2.8.1",
    "x-stainless-read-timeout": "600",
    "x-stainless-retry-count": "0",
    "x-stainless-runtime": "CPython",
    "x-stainless-runtime-version": "3.11.7",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request: bodies of one length and different texts, so that nobody can remember the last one.

    pieces: what the upstream writes, one every PACE_S. events: tokens streamed.
    """

    name: str
    bodies: tuple[bytes, ...]
    pieces: tuple[bytes, ...]
    events: int = 0

    @property
    def requests(self) -> list[bytes]:
        """The whole HTTP requests."""
        own = {"host": "gateway.example", "x-bench": self.name, "content-length": str(self.length)}
        lines = [f"{name}: {value}" for name, value in (own | SDK_HEADERS).items()]
        head = "\r\n".join(["POST /v1/chat/completions HTTP/1.1", *lines, "", ""]).encode()
        return [head + body for body in self.bodies]

    @property
    def length(self) -> int:
        """Of each body, in bytes."""
        return len(self.bodies[0])

    @property
    def data(self) -> dict[str, object]:
        """As the upstream is told of it."""
        return {"name": self.name, "pieces": [piece.decode() for piece in self.pieces]}


def cases() -> list[Case]:
    """2 KB and 100 KB of JSON with a JSON answer; 2 KB with a stream of 64 events."""
    return [
        _json_case("2 KB JSON", 2 * 1024),
        _json_case("100 KB JSON", 100 * 1024),
        _stream_case("64-event SSE", 2 * 1024 + 1),  # the comparator tells bodies apart by their length
    ]


def _json_case(name: str, size: int) -> Case:
    bodies, prompt_tokens = _bodies(size, stream=False)
    message = {"role": "assistant", "content": text_of_tokens(OUTPUT_TOKENS), "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    answer = json.dumps({**_answer("chat.completion"), "choices": [choice], "usage": _usage(prompt_tokens)}).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(answer)}\r\n\r\n"
    return Case(name, bodies, (head.encode() + answer,))


def _stream_case(name: str, size: int) -> Case:
    bodies, prompt_tokens = _bodies(size, stream=True)
    words = text_of_tokens(EVENTS).split(" ")
    deltas = [_event(delta={"content": f"{words[i % len(words)]} "}, finish_reason=None) for i in range(EVENTS)]
    closing = _event(delta={}, finish_reason="stop") + _chunk({"choices": [], "usage": _usage(prompt_tokens)})
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    opening = head + _framed(_event(delta={"role": "assistant", "content": ""}, finish_reason=None) + deltas[0])
    end = _framed(closing + b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return Case(name, bodies, (opening, *map(_framed, deltas[1:]), end), EVENTS)


def _bodies(size: int, *, stream: bool) -> tuple[tuple[bytes, ...], int]:
    """Bodies of exactly `size` bytes, and their prompt in tokens, more or less, by the fake provider's count."""

    def built(text: str) -> bytes:
        messages = [
            {"role": "system", "content": "You are a helpful assistant. Answer briefly."},
            {"role": "user", "content": "What is this about?"},
            {"role": "assistant", "content": "It depends on what you send me."},
            {"role": "user", "content": text},
        ]
        members = {"model": "gpt-5", "messages": messages, "temperature": 0.2, "max_tokens": OUTPUT_TOKENS}
        return json.dumps({**members, **({"stream": True} if stream else {})}).encode()

    texts = [text_of_tokens(size, seed)[: size - len(built(""))] for seed in range(TEXTS)]
    bodies = tuple(map(built, texts))
    assert {len(body) for body in bodies} == {size}
    return bodies, count_tokens(texts[0]) + 40


def _answer(kind: str) -> dict[str, object]:
    return {"id": "chatcmpl-0123456789abcdef01234567", "object": kind, "created": 1_760_000_000, "model": "gpt-5"}


def _usage(prompt_tokens: int) -> dict[str, int]:
    total = prompt_tokens + OUTPUT_TOKENS
    return {"prompt_tokens": prompt_tokens, "completion_tokens": OUTPUT_TOKENS, "total_tokens": total}


def _event(**choice: object) -> bytes:
    return _chunk({"choices": [{"index": 0, "logprobs": None, **choice}]})


def _chunk(members: dict[str, object]) -> bytes:
    return b"data: " + json.dumps({**_answer("chat.completion.chunk"), **members}).encode() + b"\n\n"


def _framed(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)
