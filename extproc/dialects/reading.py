"""Reading a request body: the one door from bytes to a `Document`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Call, Dialect, Endpoint, Prompt
from extproc.dialects.anthropic import read_anthropic
from extproc.dialects.document import Document, parse
from extproc.dialects.fields import is_name
from extproc.dialects.openai import read_openai, stream_options

if TYPE_CHECKING:
    from extproc.dialects.document import Body

__all__ = ["hides_usage", "read", "without_prompt"]


def read(endpoint: Endpoint, body: bytes) -> Document:
    """Read a request once, so that it can be priced now and rewritten later.

    Raises `Rejected(bad_request)` with a detail that is safe to show. The bodies of `OTHER` endpoints may be anything,
    a form with a sound file for one: they are never refused here, and their model is "" unless a JSON object names it.
    The document keeps the text of the prompt for counting; `without_prompt` lets go of it.
    """
    if endpoint is Endpoint.MODELS:
        return Document(Call(endpoint, ""), body)
    try:
        return _read_other(body) if endpoint is Endpoint.OTHER else _read_priced(endpoint, body)
    except RecursionError as error:
        raise Rejected(Reason.BAD_REQUEST, "the body is nested too deeply") from error


def hides_usage(call: Call) -> bool:
    """Tell whether the usage chunk of the answer must be kept from a client that did not ask for it."""
    return call.stream and call.endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS) and not call.wants_usage


def without_prompt(document: Document) -> Document:
    """Let go of the prompt's text once it is counted, so that a waiting request holds its body only once."""
    return replace(document, call=replace(document.call, prompt=Prompt()))


def _read_priced(endpoint: Endpoint, body: bytes) -> Document:
    parsed = parse(body)
    if endpoint.dialect is Dialect.ANTHROPIC:
        return _document(read_anthropic(endpoint, parsed), body, parsed, "")
    call = read_openai(endpoint, parsed)
    return _document(call, body, parsed, stream_options(call, parsed))


def _read_other(body: bytes) -> Document:
    try:
        parsed = parse(body)
    except (Rejected, RecursionError):
        return Document(Call(Endpoint.OTHER, ""), body)
    model = parsed.values.get("model")
    return _document(Call(Endpoint.OTHER, str(model) if is_name(model) else ""), body, parsed, "")


def _document(call: Call, body: bytes, parsed: Body, options: str) -> Document:
    return Document(call, body, parsed.spans(), parsed.repeated, options)
