"""Reading prompts: what all dialects share about messages, their parts and their size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from extproc.fakes.jsonbytes import dumps
from extproc.fakes.refusal import bad_request
from extproc.fakes.text import count_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

# What chat templates add around every message, and once per prompt.
MESSAGE_TOKENS = 4
PRIMING_TOKENS = 3
MOST_TOKENS = 1 << 20
"""No model writes more, and nobody should make us do it."""
# Longer texts are not looked at: it is done for every request.
_LONGEST_OK = 40
IMAGE_TOKENS = 85
"""Every image costs the same, as with low detail."""


def messages_tokens(messages: Any, param: str = "messages") -> int:
    """Return the size of a list of messages as the template lays them out. Raises `Refused` if it is none."""
    if not isinstance(messages, list) or not messages:
        raise bad_request(f"Invalid '{param}': expected a list with at least one message.", param)
    return PRIMING_TOKENS + sum(_message_tokens(message, param) for message in messages)


def content_tokens(content: Any) -> int:
    """Return the size of a content: a string, or parts of text, images, tool calls and tool results."""
    if content is None:
        return 0
    if isinstance(content, str):
        return count_tokens(content)
    if isinstance(content, list):
        return sum(content_tokens(part) for part in content)
    if isinstance(content, dict):
        return _part_tokens(content)
    raise bad_request("Invalid content: expected a string or a list of parts.", "messages")


def json_tokens(value: Any) -> int:
    """Return the size of something the template shows the model as JSON, such as tools; nothing costs nothing."""
    return count_tokens(dumps(value).decode()) if value else 0


def asks_for_ok(messages: Any) -> bool:
    """Return whether the last message is the health check's: reply OK, in any case."""
    last = messages[-1] if isinstance(messages, list) and messages else messages
    if isinstance(last, dict):
        last = last.get("content")
    if isinstance(last, list) and last and isinstance(last[-1], dict):
        last = last[-1].get("text")
    if not isinstance(last, str) or len(last) > _LONGEST_OK:
        return False
    return last.strip(" \n.!\"'").casefold() == "reply ok"


def integer(body: Mapping[str, Any], name: str, least: int = 1, most: int = MOST_TOKENS) -> int | None:
    """Return a whole number of the body, None if it is absent. Raises `Refused` if it is something else."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise bad_request(f"Invalid '{name}': expected an integer from {least} to {most}.", name)
    return value


def engine_priority(body: Mapping[str, Any]) -> int:
    """Return vLLM's `priority`: lower goes first, 0 if absent."""
    return integer(body, "priority", least=-(1 << 31), most=1 << 31) or 0


def _message_tokens(message: Any, param: str) -> int:
    if not isinstance(message, dict):
        raise bad_request(f"Invalid '{param}': expected objects.", param)
    return MESSAGE_TOKENS + content_tokens(message.get("content")) + json_tokens(message.get("tool_calls"))


def _part_tokens(part: dict[str, Any]) -> int:
    kind = part.get("type")
    if isinstance(text := part.get("text"), str):
        return count_tokens(text)
    if isinstance(kind, str) and "image" in kind:
        return IMAGE_TOKENS
    if kind in ("tool_result", "message"):
        return content_tokens(part.get("content"))
    return json_tokens(part)
