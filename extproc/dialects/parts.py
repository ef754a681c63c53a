"""What a prompt is made of: pieces of content of every kind, and which of their strings a model reads.

The table names each kind of content part, tool call and conversation item of the OpenAI and Anthropic APIs once. Text
is kept for the tokenizer. What is not text is priced here, because its length in base64 says nothing about its tokens
until it is scaled; the scales are first guesses, stated beside each, and the learned calibration corrects the rest:

- an image counts as one image, or 85 tokens where the client asked for low detail (OpenAI's price);
- sound: one token per 1,000 base64 characters (mp3 at 64 kbit/s heard at ten tokens a second);
- a file: one token per 40 base64 characters (a PDF page of 60 KB at some 2,000 tokens), 3,000 when only its id or
  address is given;
- video: one token per 500 base64 characters, 10,000 when only its address is given;
- encrypted text that a client carries from turn to turn (reasoning, search results): one token per 6 characters.

A kind that is not in the table is counted as its JSON text: too much rather than nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Prompt
from extproc.dialects.document import compact

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_ITEMS", "Tally", "content", "item"]

MAX_ITEMS = 100_000

LOW_DETAIL_IMAGE = 85
AUDIO_CHARS_PER_TOKEN = 1_000
FILE_CHARS_PER_TOKEN = 40
REMOTE_FILE = 3_000
VIDEO_CHARS_PER_TOKEN = 500
REMOTE_VIDEO = 10_000
SEALED_CHARS_PER_TOKEN = 6


class Tally:
    """The prompt so far. `stored` is the first id of a file kept at the provider, which binds to one account.

    `sees`: it has an image, whatever that costs.
    """

    __slots__ = ("images", "items", "messages", "sees", "stored", "texts", "tokens", "tools")

    def __init__(self) -> None:
        """Start empty."""
        self.texts: list[str] = []
        self.items = 0
        self.messages = 0
        self.tools = 0
        self.images = 0
        self.tokens = 0
        self.sees = False
        self.stored: str | None = None

    def words(self, value: object) -> None:
        """Count a value that should be a string; anything else is counted as its JSON text."""
        if isinstance(value, str):
            self.texts.append(value)
        elif value is not None:
            self.texts.append(compact(value))

    def sealed(self, value: object) -> None:
        """Count text that only the provider can read."""
        if isinstance(value, str):
            self.tokens += len(value) // SEALED_CHARS_PER_TOKEN

    def prompt(self) -> Prompt:
        """Return what was counted."""
        return Prompt(tuple(self.texts), self.messages, self.tools, self.images, self.tokens)


class Shape(NamedTuple):
    """Where the parts of a content part are: strings, content inside content, JSON, and sealed text."""

    words: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()
    json: tuple[str, ...] = ()
    sealed: tuple[str, ...] = ()


def content(tally: Tally, value: object, where: str) -> None:
    """Count the content of a message: a string, a list of parts, or nothing."""
    if isinstance(value, str):
        tally.texts.append(value)
    elif isinstance(value, list):
        for part in value:
            if not isinstance(part, str | dict):
                raise Rejected(Reason.BAD_REQUEST, f"{where} has a part that is neither an object nor a string")
            _any(tally, part)
    elif value is not None:
        raise Rejected(Reason.BAD_REQUEST, f"{where} must be a string or a list of parts")


def item(tally: Tally, part: dict[str, Any]) -> None:
    """Count one content part, tool call or conversation item."""
    tally.items += 1
    if tally.items > MAX_ITEMS:
        raise Rejected(Reason.BAD_REQUEST, f"the prompt has more than {MAX_ITEMS} parts")
    kind = part.get("type")
    if kind is None:
        kind = next((key for key in part if key in _SHAPES or key in _HANDLERS), None)
    handler = _HANDLERS.get(kind) if isinstance(kind, str) else None
    shape = _SHAPES.get(kind) if isinstance(kind, str) else None
    if handler is not None:
        handler(tally, part)
    elif shape is not None:
        _shaped(tally, part, shape)
    else:
        tally.texts.append(compact(part))


def _shaped(tally: Tally, part: dict[str, Any], shape: Shape) -> None:
    for key in shape.words:
        tally.words(part.get(key))
    for key in shape.nested:
        _any(tally, part.get(key))
    for key in shape.json:
        if part.get(key) is not None:
            tally.texts.append(compact(part[key]))
    for key in shape.sealed:
        tally.sealed(part.get(key))


def _any(tally: Tally, value: object) -> None:
    """Count content inside content, which no API defines strictly enough to refuse."""
    if isinstance(value, dict):
        item(tally, value)
    elif isinstance(value, list):
        for one in value:
            _any(tally, one)
    else:
        tally.words(value)


def _called(tally: Tally, part: dict[str, Any]) -> None:
    """Count a tool call of a chat message, whose name and arguments are one level down."""
    inner = part.get("function") or part.get("custom")
    if isinstance(inner, dict):
        _shaped(tally, inner, _CALL)
    else:
        tally.words(inner)


def _image(tally: Tally, part: dict[str, Any]) -> None:
    tally.sees = True
    inner = part.get("image_url")
    detail = inner.get("detail") if isinstance(inner, dict) else part.get("detail")
    if detail == "low":
        tally.tokens += LOW_DETAIL_IMAGE
    else:
        tally.images += 1
    _note_stored(tally, part, part.get("source"))


def _drawn(tally: Tally, part: dict[str, Any]) -> None:
    """Count an image that the model drew in an earlier turn."""
    if part.get("result"):
        tally.sees = True
        tally.images += 1


def _audio(tally: Tally, part: dict[str, Any]) -> None:
    inner = part.get("input_audio") or part.get("audio_url") or part
    data = inner.get("data") or inner.get("url") if isinstance(inner, dict) else inner
    tally.tokens += _by_length(data, AUDIO_CHARS_PER_TOKEN, REMOTE_FILE)


def _video(tally: Tally, part: dict[str, Any]) -> None:
    inner = part.get("video_url") or part.get("input_video") or part
    data = inner.get("url") or inner.get("data") if isinstance(inner, dict) else inner
    tally.tokens += _by_length(data, VIDEO_CHARS_PER_TOKEN, REMOTE_VIDEO)


def _file(tally: Tally, part: dict[str, Any]) -> None:
    inner = part.get("file")
    inner = inner if isinstance(inner, dict) else part
    tally.words(inner.get("filename"))
    tally.tokens += _by_length(inner.get("file_data"), FILE_CHARS_PER_TOKEN, REMOTE_FILE)
    _note_stored(tally, inner)


def _document(tally: Tally, part: dict[str, Any]) -> None:
    """Count an Anthropic document: plain text, content blocks, or a file."""
    tally.words(part.get("title"))
    tally.words(part.get("context"))
    source = part.get("source")
    if not isinstance(source, dict):
        tally.words(source)
    elif source.get("type") == "text":
        tally.words(source.get("data"))
    elif source.get("type") == "content":
        _any(tally, source.get("content"))
    else:
        tally.tokens += _by_length(source.get("data"), FILE_CHARS_PER_TOKEN, REMOTE_FILE)
        _note_stored(tally, source)


def _by_length(data: object, chars_per_token: int, remote: int) -> int:
    if not isinstance(data, str) or data.startswith(("http://", "https://", "gs://", "s3://", "file://")):
        return remote
    return len(data) // chars_per_token


def _note_stored(tally: Tally, *holders: object) -> None:
    for holder in holders:
        if tally.stored is None and isinstance(holder, dict) and isinstance(holder.get("file_id"), str):
            tally.stored = holder["file_id"]


_TEXT = Shape(words=("text",))
_USE = Shape(words=("name",), json=("input",))
_RESULT = Shape(nested=("content",))
_OUTPUT = Shape(nested=("output",))
_ACTION = Shape(json=("action",))
_CALL = Shape(words=("name", "arguments", "input"))

_SHAPES: dict[str, Shape] = {
    # text, in messages of both families
    "text": _TEXT,
    "input_text": _TEXT,
    "output_text": _TEXT,
    "summary_text": _TEXT,
    "reasoning_text": _TEXT,
    "reasoning.text": _TEXT,
    "reasoning.summary": Shape(words=("summary",)),
    "reasoning.encrypted": Shape(sealed=("data",)),
    "refusal": Shape(words=("refusal",)),
    "thinking": Shape(words=("thinking",)),  # its signature is not shown to the model
    "redacted_thinking": Shape(sealed=("data",)),
    # tools of Anthropic
    "tool_use": _USE,
    "server_tool_use": _USE,
    "mcp_tool_use": _USE,
    "tool_result": _RESULT,
    "mcp_tool_result": _RESULT,
    "web_search_tool_result": _RESULT,
    "web_search_result": Shape(words=("title", "url"), sealed=("encrypted_content",)),
    "web_fetch_tool_result": _RESULT,
    "web_fetch_result": Shape(words=("url",), nested=("content",)),
    "search_result": Shape(words=("title", "source"), nested=("content",)),
    "tool_reference": Shape(words=("tool_name",)),
    # items of OpenAI's Responses
    "message": Shape(nested=("content",)),
    "function_call": _CALL,
    "function_call_output": _OUTPUT,
    "custom_tool_call": _CALL,
    "custom_tool_call_output": _OUTPUT,
    "mcp_call": Shape(words=("name", "arguments", "output", "error")),
    "mcp_list_tools": Shape(json=("tools",)),
    "mcp_approval_request": _CALL,
    "mcp_approval_response": Shape(words=("reason",)),
    "local_shell_call": _ACTION,
    "local_shell_call_output": _OUTPUT,
    "shell_call": _ACTION,
    "shell_call_output": Shape(json=("output",)),
    "apply_patch_call": Shape(json=("operation",)),
    "apply_patch_call_output": _OUTPUT,
    "computer_call": _ACTION,
    "computer_call_output": _OUTPUT,
    "web_search_call": _ACTION,
    "file_search_call": Shape(json=("queries", "results")),
    "code_interpreter_call": Shape(words=("code",), json=("outputs",)),
    "reasoning": Shape(nested=("summary", "content"), sealed=("encrypted_content",)),
    "compaction": Shape(nested=("content",), sealed=("encrypted_content",)),
    "item_reference": Shape(),
}

_HANDLERS: dict[str, Callable[[Tally, dict[str, Any]], None]] = {
    "image": _image,
    "image_url": _image,
    "input_image": _image,
    "computer_screenshot": _image,
    "image_generation_call": _drawn,
    "input_audio": _audio,
    "audio_url": _audio,
    "video_url": _video,
    "input_video": _video,
    "file": _file,
    "input_file": _file,
    "document": _document,
    "function": _called,
    "custom": _called,
}
