"""Reading requests of the Anthropic family: messages, and the counting of their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Call, Endpoint
from extproc.dialects import fields
from extproc.dialects.openai import names_stops, needs, output_cap, schema_texts, tool_texts
from extproc.dialects.parts import MAX_ITEMS, Tally, content
from extproc.dialects.sessions import named_in_body

if TYPE_CHECKING:
    from extproc.dialects.document import Body

__all__ = ["read_anthropic"]

_SCHEMAS = ("output_format", "output_config")


def read_anthropic(endpoint: Endpoint, body: Body) -> Call:
    """Read what a client asked for, with its prompt taken apart for pricing.

    A missing `max_tokens` is the upstream's to refuse: some engines that speak this dialect do without.
    """
    values = body.values
    tally = Tally()
    _messages(tally, values)
    tool_texts(tally, body, ("tools",))
    schema_texts(tally, body, _SCHEMAS)
    generates = endpoint.generates
    return Call(
        endpoint=endpoint,
        model=fields.model(values),
        stream=generates and fields.flag(values, "stream"),
        prompt=tally.prompt(),
        output_cap=output_cap(values) if generates else None,
        state=tally.stored,
        sessions=named_in_body(values),
        needs=needs(tally, values, _SCHEMAS),
        stops=generates and names_stops(values),
        results=generates and _brings_results(values["messages"]),
    )


def _brings_results(messages: list[dict[str, Any]]) -> bool:
    """Tell whether the last message has what a tool answered; the model may have nothing to add to that."""
    last = messages[-1].get("content")
    return isinstance(last, list) and any(isinstance(p, dict) and p.get("type") == "tool_result" for p in last)


def _messages(tally: Tally, values: dict[str, Any]) -> None:
    system = values.get("system")
    content(tally, system, "system")
    messages = fields.listed(values, "messages", MAX_ITEMS)
    tally.messages = len(messages) + (system is not None)
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise Rejected(Reason.BAD_REQUEST, f"messages[{index}] must be an object")
        content(tally, message.get("content"), f"messages[{index}].content")
