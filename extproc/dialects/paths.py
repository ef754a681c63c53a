"""Which paths are LLM endpoints. A path is taken literally: one that could mean something else is none of ours.

Envoy forwards the path as it came, and servers differ in what they make of `//`, `%2e`, `..;` or a trailing slash. A
path that is not spelled exactly as below is therefore unknown, never "close enough": nothing gets past the metering of
an endpoint by spelling it differently.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_plus

from extproc.core.request import Endpoint

__all__ = ["FAMILIES", "endpoint_of", "without_keys"]

_EXACT = {
    ("POST", "/v1/chat/completions"): Endpoint.CHAT,
    ("POST", "/v1/completions"): Endpoint.COMPLETIONS,
    ("POST", "/v1/embeddings"): Endpoint.EMBEDDINGS,
    ("POST", "/v1/responses"): Endpoint.RESPONSES,
    ("POST", "/v1/messages"): Endpoint.MESSAGES,
    ("POST", "/v1/messages/count_tokens"): Endpoint.COUNT_TOKENS,
    ("GET", "/v1/models"): Endpoint.MODELS,
}
_PRICED = frozenset(path for _, path in _EXACT)

# Segments are what ids are made of, and never "." or "..". The only escapes are those that an SDK writes into a model's
# name: "/", ":" and "@".
_SEGMENT = r"/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._~:@+-]+"
_PIECE = r"(?!\.{1,2}(?:/|%2[Ff]|\Z))(?:[A-Za-z0-9._~:@+-]|%3[Aa]|%40)+"
_MODEL = re.compile(rf"/v1/models/{_PIECE}(?:(?:/|%2[Ff]){_PIECE})*\Z")
FAMILIES = (
    "chat/completions", "messages/batches", "responses",
    "assistants", "audio", "batches", "chatkit", "classify", "complete", "containers", "conversations", "edits",
    "engines", "evals", "files", "fine_tuning", "fine-tunes", "images", "models", "moderations", "pooling", "realtime",
    "rerank", "score", "skills", "threads", "uploads", "vector_stores", "videos",
)  # fmt: skip
"""Beginnings, behind `/v1/`, of the paths of endpoints that are not counted in tokens."""
_OTHER = re.compile(rf"/v1/(?:{'|'.join(FAMILIES)})(?:{_SEGMENT})*\Z")
_KEYS = frozenset({"key", "api_key", "api-key", "apikey", "access_token", "token", "subscription-key"})
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})


def endpoint_of(method: str, path: str) -> Endpoint | None:
    """Say which endpoint a request is for; None when it is no LLM endpoint, or a priced one with a wrong method."""
    path = path.partition("?")[0]
    exact = _EXACT.get((method, path))
    if exact is not None:
        return exact
    if path in _PRICED or method not in _METHODS:
        return None
    if method == "GET" and _MODEL.match(path):
        return Endpoint.MODELS
    return Endpoint.OTHER if _OTHER.match(path) else None


def without_keys(path: str) -> str:
    """Take out of a query what callers prove themselves with; the rest stays as it was written."""
    bare, mark, query = path.partition("?")
    if not mark:
        return path
    kept = [pair for pair in query.split("&") if unquote_plus(pair.partition("=")[0]).strip().lower() not in _KEYS]
    return bare + mark + "&".join(kept) if kept else bare
