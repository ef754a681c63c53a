"""Streams of answers made at random, and a plain reference of what the response tail should make of them.

The reference has the whole stream and a real JSON parser; it is as slow and as simple as the filter is not.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from typing import Any

from extproc.dialects.errors import words_about_us

Data = dict[str, Any]

HOSTILE = [
    'said "usage":{"prompt_tokens":999} and "finish_reason":"stop"',
    "data: [DONE]",
    "[DONE]",
    '\\"error\\":{\\"type\\":\\"x\\"}',
    'a\\\\"usage": {"completion_tokens": 1}',
    "ends with a backslash \\",
    '"',
    "\n\ndata: x\n\n",
    "\r\n\r\n",
    "漢字 é 🙂 \u2028 ",
    '{"type":"message_stop"}',
    '"response":{"status":"completed"}',
    "plain words",
    "",
]
LIMIT = 1 << 20
MARK = "\ufeff".encode()
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}


@dataclass
class Stream:
    """A stream of bytes and how it is to be treated."""

    dialect: str
    hide: bool
    data: bytes
    chunks: list[bytes] = field(default_factory=list)
    cap: int | None = None
    """Output tokens that the caller allowed."""
    path: str = "/v1/chat/completions"
    stops: bool = False
    """The caller named words at which the answer ends."""
    results: bool = False
    """The last message brought what tools answered."""


def make(chance: random.Random) -> Stream:
    """A stream of one of the dialects, whole or cut, in one of the many ways that servers write them."""
    kind = chance.choice(["chat", "chat", "responses", "anthropic"])
    events = {"chat": _chat, "responses": _responses, "anthropic": _anthropic}[kind](chance)
    writer = _Writer(chance)
    written = [writer.event(name, payload) for name, payload in events]
    if chance.random() < 0.1 and written:
        place = chance.randrange(len(written))
        written[place] = _broken(written[place])
    data = b"".join(written)
    roll = chance.random()
    if roll < 0.15:
        data = data[: chance.randrange(len(data) + 1)]
    elif roll < 0.3:
        data = re.sub(rb"[\r\n]+\Z", chance.choice([b"", b"\n", b"\r\n"]), data)
    dialect = "anthropic" if kind == "anthropic" else "openai"
    data = MARK + data if chance.random() < 0.1 else data
    stream = Stream(dialect, kind == "chat" and chance.random() < 0.6, data)
    stream.path = PATHS[kind]
    stream.cap = chance.choice([None, 10, 100, 10_000])
    stream.stops = chance.random() < 0.3
    stream.results = chance.random() < 0.3
    stream.chunks = _cut(chance, data)
    return stream


def _broken(event: bytes) -> bytes:
    """An event whose JSON was cut, not exactly behind a brace."""
    body = event.rstrip()
    end = event[len(body) :]
    while body.endswith(b"}"):
        body = body[:-1].rstrip()
    return body.rstrip(b"\\") + end


def _cut(chance: random.Random, data: bytes) -> list[bytes]:
    if chance.random() < 0.3:
        chunks = re.findall(rb".*?\n\r?\n|.+\Z", data, re.DOTALL)
    else:
        places = sorted(chance.randrange(len(data) + 1) for _ in range(chance.choice([0, 1, 3, 10, 40, 200])))
        chunks = [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
    if chance.random() < 0.5:
        chunks = [chunk for chunk in chunks if chunk]
    return [*chunks, b""] if chance.random() < 0.5 or not chunks else chunks


class _Writer:
    """One server's habits."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.end = chance.choice([b"\n", b"\n", b"\r\n"])
        self.mixed = chance.random() < 0.05
        self.space = b"" if chance.random() < 0.2 else b" "
        self.separators = chance.choice([(",", ":"), (", ", ": "), (" , ", " : ")])
        self.ascii = chance.random() < 0.5
        self.lines = chance.random() < 0.1

    def event(self, name: str | None, payload: Data | str) -> bytes:
        lines = []
        if self.chance.random() < 0.05:
            lines.append(b": keep-alive")
            if self.chance.random() < 0.5:
                lines.append(b"")
        if name:
            lines.append(b"event:" + self.space + name.encode())
        if self.chance.random() < 0.03:
            lines.append(b"id: 7")
        text = payload if isinstance(payload, str) else self._json(payload)
        lines += [b"data:" + self.space + line for line in text.encode("utf-8", "surrogatepass").split(b"\n")]
        lines.append(b"")
        return b"".join(line + self._end() for line in lines)

    def _end(self) -> bytes:
        return self.chance.choice([b"\n", b"\r\n"]) if self.mixed else self.end

    def _json(self, payload: Data) -> str:
        items = list(payload.items())
        if self.chance.random() < 0.3:
            self.chance.shuffle(items)
        indent = 1 if self.lines else None
        return json.dumps(dict(items), separators=self.separators, ensure_ascii=self.ascii, indent=indent)


def _text(chance: random.Random) -> str:
    return "".join(chance.choice(HOSTILE) for _ in range(chance.choice([1, 1, 2, 3])))


def _deep(chance: random.Random) -> Any:
    """Structure under the model's control, with the names that matter in the wrong places."""
    return {
        "usage": {"prompt_tokens": 77},
        "error": {"type": _text(chance)},
        "finish_reason": "length",
        "x": [_text(chance)],
    }


def _chat(chance: random.Random) -> list[tuple[str | None, Data | str]]:
    nulls = chance.random() < 0.5
    base: Data = {"id": "c", "object": "chat.completion.chunk", "model": "m", "system_fingerprint": None}
    more: Data = {"usage": None} if nulls else {}
    running = chance.random() < 0.1
    events: list[tuple[str | None, Data | str]] = []
    for i in range(chance.choice([0, 1, 3, 12])):
        delta: Data = {"role": "assistant", "content": _text(chance)}
        if chance.random() < 0.1:
            delta = {chance.choice(["reasoning_content", "refusal"]): _text(chance), "content": None}
        if chance.random() < 0.1:
            delta["tool_calls"] = [{"index": 0, "function": {"arguments": json.dumps(_deep(chance))}}]
        if chance.random() < 0.05:
            delta["extra"] = _deep(chance)
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        usage = {"usage": _openai_usage(chance, i)} if running else more
        events.append((None, {**base, "choices": [choice], **usage}))
    last = chance.random()
    if last < 0.8:
        finish: list[Data] = [
            {"index": n, "delta": {}, "finish_reason": chance.choice(["stop", "length", "tool_calls"])} for n in (0, 1)
        ]
        with_choices = {"usage": _openai_usage(chance, 50)} if chance.random() < 0.2 else more
        events.append((None, {**base, "choices": finish[: chance.choice([1, 2])], **with_choices}))
    elif last < 0.9:
        error = {
            "message": _text(chance),
            "type": chance.choice(["server_error", "server_error", "insufficient_quota"]),
            "param": None,
            "code": chance.choice([None, 502, "oops"]),
        }
        named = chance.choice(["overloaded", "authentication_error"])
        events.append((None, {"error": error if chance.random() < 0.8 else named}))
    elif last < 0.95:
        events.append(_flat(chance))
    if chance.random() < 0.7:
        events.append((None, {**base, "choices": [], "usage": _openai_usage(chance, 60)}))
    if chance.random() < 0.7:
        events.append((None, "[DONE]"))
    return events


def _flat(chance: random.Random) -> tuple[str | None, Data | str]:
    """An error that has no member `error`."""
    code = chance.choice([None, 400, "oops", "insufficient_quota"])
    error: Data = {"object": "error", "message": _text(chance), "type": "BadRequestError", "param": None, "code": code}
    code = chance.choice([7, 500, "oops"])
    said: Data = {"message": "no " + _text(chance)}
    return chance.choice(
        [
            (None, error),
            (None, {"detail": "no " + _text(chance)}),
            (None, {"code": code if code != 7 else 1007, **said}),
            (None, said),
            ("error", {**said, "progress": 1}),
            ("error", "no JSON"),
        ]
    )


FLAT = ({"detail"}, {"message"}, {"code", "message"})


def _openai_usage(chance: random.Random, out: int) -> Data:
    usage: Data = {"prompt_tokens": chance.randrange(1000), "completion_tokens": out}
    if chance.random() < 0.7:
        usage["total_tokens"] = usage["prompt_tokens"] + out + chance.choice([0, 0, 7])
    if chance.random() < 0.5:
        usage["prompt_tokens_details"] = {"cached_tokens": chance.randrange(100), "audio_tokens": 0}
        usage["completion_tokens_details"] = {"reasoning_tokens": chance.randrange(100)}
    elif chance.random() < 0.5:
        usage["prompt_tokens_details"] = None
    return usage


def _responses(chance: random.Random) -> list[tuple[str | None, Data | str]]:
    tools = [{"type": "function", "name": "f", "parameters": {"properties": _deep(chance)}}]
    shell: Data = {"id": "r", "object": "response", "error": None, "output": [], "tools": tools, "usage": None}
    kinds: list[tuple[str, Data]] = [("response.created", {"response": {**shell, "status": "in_progress"}})]
    kinds += [("response.output_text.delta", {"delta": _text(chance)}) for _ in range(chance.choice([0, 2, 8]))]
    usage = {
        "input_tokens": chance.randrange(1000),
        "input_tokens_details": {"cached_tokens": chance.randrange(50)},
        "output_tokens": chance.randrange(1000),
        "output_tokens_details": {"reasoning_tokens": chance.randrange(50)},
    }
    roll = chance.random()
    if roll < 0.5:
        kinds.append(("response.completed", {"response": {**shell, "status": "completed", "usage": usage}}))
    elif roll < 0.7:
        reason = {"incomplete_details": {"reason": "max_output_tokens"}}
        kinds.append(("response.incomplete", {"response": {**shell, "status": "incomplete", "usage": usage, **reason}}))
    elif roll < 0.8:
        error = {"code": "server_error", "message": _text(chance)}
        kinds.append(("response.failed", {"response": {**shell, "status": "failed", "error": error}}))
    elif roll < 0.9:
        kinds.append(("error", {"code": chance.choice(["E1", None]), "message": _text(chance)}))
    return [(name, {"type": name, "sequence_number": 1, **data}) for name, data in kinds]


def _anthropic(chance: random.Random) -> list[tuple[str | None, Data | str]]:
    first = {"input_tokens": chance.randrange(1000), "output_tokens": 1}
    if chance.random() < 0.5:
        first |= {
            "cache_creation_input_tokens": chance.randrange(100),
            "cache_read_input_tokens": chance.randrange(100),
        }
    message: Data = {"id": "m", "role": "assistant", "content": [], "stop_reason": None, "usage": first}
    kinds: list[tuple[str, Data]] = [("message_start", {"message": message})]
    for _ in range(chance.choice([0, 2, 8])):
        delta: Data = chance.choice(
            [{"type": "text_delta", "text": _text(chance)}, {"partial_json": json.dumps(_deep(chance))}]
        )
        kinds.append(("content_block_delta", {"index": 0, "delta": delta}))
        if chance.random() < 0.1:
            kinds.append(("ping", {}))
    if chance.random() < 0.1:
        kinds.append(
            (
                "error",
                {"error": {"type": chance.choice(["overloaded_error", "billing_error"]), "message": _text(chance)}},
            )
        )
    if chance.random() < 0.8:
        delta = {"stop_reason": chance.choice(["end_turn", "max_tokens"]), "stop_sequence": None}
        kinds.append(("message_delta", {"delta": delta, "usage": {"output_tokens": chance.randrange(1000)}}))
    if chance.random() < 0.7:
        kinds.append(("message_stop", {}))
    return [(name, {"type": name, **data}) for name, data in kinds]


# ------------------------------------------------------------------------------------------- reference


OURS = frozenset(words_about_us())


class Reference:
    """Reads a stream event by event, as the specification of server-sent events says.

    word: what stands in place of what may not go on, or of what is missing at the end.
    """

    def __init__(self, stream: Stream, word: bytes) -> None:
        self.stream = stream
        self.word = word
        self.notes: Data = {}
        self.events = 0
        self.says = False
        self._rest = b""
        self._begun = 0
        self._fresh = True

    def feed(self, data: bytes) -> bytes:
        """What goes on of some more bytes: at once, but for an unfinished event while usage is hidden, or an error."""
        self._rest += data
        out = b""
        if self._fresh and len(self._rest) < len(MARK) and MARK.startswith(self._rest):
            return out
        self._rest = self._rest.removeprefix(MARK) if self._fresh else self._rest
        self._fresh = False
        while boundary := re.search(rb"\n\r?\n", self._rest):
            event, self._rest = self._rest[: boundary.end()], self._rest[boundary.end() :]
            self.events += not event.startswith(b":")
            verdict = self._read(event, ended=True)
            if verdict == "error":
                out += self._instead()
            elif not (verdict and self.stream.hide):
                out += event[self._begun :]
            self._begun = 0
        if not self.stream.hide and not self._may_be_error():
            out, self._begun = out + self._rest[self._begun :], len(self._rest)
        return out

    def end(self) -> bytes:
        """What follows after the end."""
        verdict = self._read(self._rest, ended=False) if self._rest else None
        out = self._rest[self._begun :]
        if verdict == "error":
            out = self._instead()
        elif (verdict == "usage" and self.stream.hide) or (verdict == "torn" and self._may_be_error()):
            out = b""
        if self.events:
            self.notes["events"] = self.events
        if self.notes.keys() & {"finish", "done", "error"}:
            if "error" not in self.notes and (bad := self._fault()):
                self.notes.setdefault("bad", bad)
            return out
        self.notes["cut"] = "1"
        return out + (b"\n\n" if out or self._begun else b"") + self.word

    def _may_be_error(self) -> bool:
        first = rb'event: ?error|data: ?\{\s*"(code|detail|message|status|statusCode)"'
        return b'"error"' in self._rest or re.match(first, self._rest) is not None

    def _instead(self) -> bytes:
        return (b"\n\n" if self._begun else b"") + self.word

    def _fault(self) -> str | None:
        finish, out = self.notes.get("finish"), self.notes.get("out")
        ends = {None} if self.stream.stops else {None, "stop", "end_turn", "completed"}
        ends -= {"end_turn"} if self.stream.results else set()
        if not self.says and finish in ends and not self.notes.get("reasoning"):
            return "empty"
        capped = finish in ("length", "max_tokens", "max_output_tokens") and self.stream.cap and out is not None
        return "short" if capped and out < 4096 and out * 2 < self.stream.cap else None

    def _read(self, event: bytes, *, ended: bool) -> str | None:
        """Notes an event; "usage" where it has nothing else, "error" where it is about us, "torn" where it is cut."""
        lines = [line[5:].removeprefix(b" ") for line in re.split(rb"[\r\n]+", event) if line.startswith(b"data:")]
        text = b"\n".join(lines)
        named = re.search(rb"^event: ?error\r?$", event, re.MULTILINE) is not None
        if text.strip().startswith(b"[DONE]"):
            self.notes["done"] = "1"
            return None
        if not text.strip():
            return None
        try:
            data = json.loads(text)
        except ValueError:
            if ended and named:
                self.notes["error"] = "-/-"
                return "error"
            if ended:
                self.notes["bad"] = "json"
            return None if ended else "torn"
        before = self.notes.pop("error", None)
        self._note(data, named=named)
        error = self.notes.get("error", "/")
        if before and "error" not in self.notes:
            self.notes["error"] = before
        raised = named or self.stream.dialect != "anthropic"
        if self.stream.dialect == "openai":
            raised = bool(data.get("error") or data.get("response") or self.stream.path == PATHS["responses"])
        if OURS & set(error.split("/")) or (error != "/" and not raised):
            return "error"
        self.says = self.says or _says(data)
        usage_only = isinstance(data.get("usage"), dict) and data.get("choices") == []
        return "usage" if usage_only else None

    def _note(self, data: Data, *, named: bool) -> None:
        self._usage(data.get("usage"))
        for choice in data.get("choices") or ():
            if choice.get("finish_reason"):
                self.notes["finish"] = choice["finish_reason"]
        kind, error = data.get("type"), data.get("error")
        if isinstance(data.get("message"), dict):
            self._usage(data["message"].get("usage"))
        if isinstance(data.get("delta"), dict) and data["delta"].get("stop_reason"):
            self.notes["finish"] = data["delta"]["stop_reason"]
        if isinstance(data.get("response"), dict):
            self._response(data["response"])
            error = error or data["response"]["error"]
        if kind == "message_stop":
            self.notes["done"] = "1"
        if isinstance(error, dict):
            self.notes["error"] = f"{error.get('type') or '-'}/{error.get('code') or '-'}"
        elif isinstance(error, str):
            self.notes["error"] = f"{error}/-"
        elif named or "error" in (kind, data.get("object")) or set(data) in FLAT:
            self.notes.setdefault("error", f"{kind or '-'}/{data.get('code') or '-'}")

    def _response(self, response: Data) -> None:
        self._usage(response["usage"])
        if response["status"] in ("completed", "incomplete", "failed"):
            self.notes["done"] = "1"
            self.notes["finish"] = (response.get("incomplete_details") or {}).get("reason", response["status"])
            if "id" in response:
                self.notes["state"] = response["id"]

    def _usage(self, usage: Data | None) -> None:
        def most(key: str, value: int | None) -> None:
            if value is not None:
                self.notes[key] = max(self.notes.get(key, 0), value)

        if not isinstance(usage, dict):
            return
        for name, key in NAMES.items():
            most(key, usage.get(name))
        if "total_tokens" in usage and "prompt_tokens" in usage:
            most("out", usage["total_tokens"] - usage["prompt_tokens"])
        for name, inner, key in INNER:
            most(key, (usage.get(name) or {}).get(inner))


def _says(data: Data) -> bool:
    """Whether an event has something for a reader: anything in a delta but its role and type."""
    for choice in data.get("choices") or ():
        if any(value for key, value in choice["delta"].items() if key != "role"):
            return True
    delta, kind = data.get("delta"), data.get("type", "")
    if kind == "content_block_delta":
        return any(value for key, value in delta.items() if key != "type")
    if kind.startswith("response.") and isinstance(delta, str):
        return bool(delta)
    return False


NAMES = {
    "prompt_tokens": "in",
    "input_tokens": "in",
    "completion_tokens": "out",
    "output_tokens": "out",
    "cache_read_input_tokens": "cached",
    "cache_creation_input_tokens": "cache_write",
}
INNER = (
    ("prompt_tokens_details", "cached_tokens", "cached"),
    ("input_tokens_details", "cached_tokens", "cached"),
    ("completion_tokens_details", "reasoning_tokens", "reasoning"),
    ("output_tokens_details", "reasoning_tokens", "reasoning"),
)
