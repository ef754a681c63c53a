"""Ids of agent sessions and tasks that clients already send, so that a session budget needs no new header.

Ordered by how surely an id means one session for its whole length. `conversation` and the metadata ids do. A prompt
cache key does for coding agents, but some callers share one among many users. `previous_response_id` names only the
step before, so a chain of responses changes it at every call: it is the last resort. Ids of users
(`safety_identifier`, `user`, a plain `metadata.user_id`) are no sessions and are left out.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from extproc.dialects.fields import is_name

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["named_in_body", "named_in_headers"]

_MEMBERS = ("session_id", "litellm_session_id")
_METADATA = (
    "session_id",
    "sessionId",
    "conversation_id",
    "conversationId",
    "thread_id",
    "threadId",
    "chat_id",
    "langfuse_session_id",
    "trace_id",
    "traceId",
    "langfuse_trace_id",
)
_HEADERS = (
    "x-claude-code-session-id",  # Claude Code
    "x-opencode-session",  # opencode
    "session_id",  # Codex
    "session-id",
    "x-session-id",
    "conversation_id",
    "x-conversation-id",
    "x-thread-id",
    "thread-id",
    "x-litellm-session-id",
    "helicone-session-id",
    "x-litellm-trace-id",
)
_LAST = ("prompt_cache_key", "previous_response_id")
_IN_BODY = frozenset({"conversation", "metadata", *_MEMBERS, *_LAST})
_IN_HEADERS = frozenset(_HEADERS)
_CLAUDE_CODE = re.compile(r"_session_([A-Za-z0-9-]{8,64})\Z")
_MAX_USER_ID = 2_048


def named_in_body(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the session ids in a request body, best first, each once."""
    if _IN_BODY.isdisjoint(values):
        return ()
    found: list[object] = []
    conversation = values.get("conversation")
    found.append(conversation.get("id") if isinstance(conversation, dict) else conversation)
    found += [values.get(key) for key in _MEMBERS]
    metadata = values.get("metadata")
    if isinstance(metadata, dict):
        found += [metadata.get(key) for key in _METADATA]
        found.append(_of_claude_code(metadata.get("user_id")))
    found += [values.get(key) for key in _LAST]
    return _names(found)


def named_in_headers(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the session ids in request headers (names in lower case), best first, each once."""
    if _IN_HEADERS.isdisjoint(headers):
        return ()
    return _names([headers.get(key) for key in _HEADERS])


def _names(found: list[object]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(value) for value in found if value is not None and is_name(value)))


def _of_claude_code(user_id: object) -> str | None:
    """Take the session out of the user id that Claude Code sends: `..._session_<uuid>`, or a JSON object."""
    if not isinstance(user_id, str) or len(user_id) > _MAX_USER_ID:
        return None
    ending = _CLAUDE_CODE.search(user_id)
    if ending is not None:
        return ending[1]
    if not user_id.startswith("{"):
        return None
    try:
        session = json.loads(user_id).get("session_id")
    except (ValueError, RecursionError):
        return None
    return session if isinstance(session, str) else None
