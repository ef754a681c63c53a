"""Reading requests of the OpenAI family: chat completions, completions, embeddings and responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Ability, Call, Endpoint
from extproc.dialects import fields
from extproc.dialects.document import with_usage
from extproc.dialects.parts import MAX_ITEMS, Tally, content, item
from extproc.dialects.sessions import named_in_body

if TYPE_CHECKING:
    from extproc.dialects.document import Body

__all__ = ["read_openai", "stream_options"]

# One of these with room to spare is longer than any context window; a larger number is a mistake or an attack.
MAX_TOKENS = 100_000_000
MAX_CHOICES = 10_000
MAX_OPTIONS = 1_024

_CAPS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_tokens_to_sample")
# Words, tokens or patterns that end the answer; the last two are vLLM's and SGLang's.
_STOPS = frozenset({"stop", "stop_sequences", "stop_token_ids", "stop_regex"})
_TOOLS = ("tools", "functions")
_SCHEMAS = ("response_format", "text")
_BARE_SCHEMA = 64  # characters; anything shorter names a format or a verbosity and holds no schema
# Members outside the messages whose text an engine puts into the prompt.
_ALSO_READ = frozenset({"documents", "chat_template", "chat_template_kwargs", "suffix"})
_PLAIN_MESSAGE = frozenset({"role", "content"})


def read_openai(endpoint: Endpoint, body: Body) -> Call:
    """Read what a client asked for, with its prompt taken apart for pricing."""
    values = body.values
    tally = Tally()
    prompts = _PROMPTS[endpoint](tally, values)
    tool_texts(tally, body, _TOOLS)
    schema_texts(tally, body, _SCHEMAS)
    for key in _ALSO_READ & values.keys():
        tally.words(values[key])
    choices = prompts * _choices(endpoint, values)
    cap = output_cap(values) if endpoint.generates else None
    return Call(
        endpoint=endpoint,
        model=fields.model(values),
        stream=endpoint.generates and fields.flag(values, "stream"),
        prompt=tally.prompt(),
        choices=choices,
        output_cap=None if cap is None else cap * choices,
        wants_usage=_chat_like(endpoint) and fields.flag(fields.mapping(values, "stream_options"), "include_usage"),
        state=fields.name(values, "previous_response_id") or _conversation(values) or tally.stored,
        sessions=named_in_body(values),
        needs=needs(tally, values, _SCHEMAS),
        stops=endpoint.generates and names_stops(values),
    )


def stream_options(call: Call, body: Body) -> str:
    """Return the stream options that make an upstream report usage, "" where it does so already or cannot."""
    if not (call.stream and _chat_like(call.endpoint)) or call.wants_usage:
        return ""
    options = with_usage(fields.mapping(body.values, "stream_options"))
    if len(options) > MAX_OPTIONS:
        raise Rejected(Reason.BAD_REQUEST, "stream_options is too long")
    return options


def output_cap(values: dict[str, Any]) -> int | None:
    """Return the largest output cap of one choice: an upstream may obey any of them."""
    caps = [cap for key in _CAPS if (cap := fields.integer(values, key, 0, MAX_TOKENS)) is not None]
    return max(caps, default=None)


def names_stops(values: dict[str, Any]) -> bool:
    """Tell whether the client says where the answer is to end; it may then end before its first word."""
    return any(values[key] for key in _STOPS & values.keys())


def tool_texts(tally: Tally, body: Body, keys: tuple[str, ...]) -> None:
    """Count tool definitions as the JSON text that the client wrote."""
    for key in keys:
        tools = body.values.get(key)
        if tools:
            tally.tools += len(tools) if isinstance(tools, list) else 1
            tally.texts.append(body.json_text(key))


def schema_texts(tally: Tally, body: Body, keys: tuple[str, ...]) -> None:
    """Count the schema of a structured answer as its JSON text."""
    for key in keys:
        if isinstance(body.values.get(key), dict):
            text = body.json_text(key)
            if len(text) > _BARE_SCHEMA:
                tally.texts.append(text)


def needs(tally: Tally, values: dict[str, Any], schemas: tuple[str, ...]) -> frozenset[Ability]:
    """What the model must be able to do. `schemas`: members that may say what form the answer has."""
    messages = values.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    found = [Ability.TOOLS] if tally.tools > 0 else []
    if tally.sees:
        found.append(Ability.IMAGES)
    if any(_is_json(values[key]) for key in schemas if key in values):
        found.append(Ability.JSON)
    if isinstance(last, dict) and last.get("role") == "assistant":
        found.append(Ability.PREFILL)
    return frozenset(found)


def _is_json(form: object) -> bool:
    """Whether a form asks for JSON; the Responses API has it one level down."""
    forms = (form, form.get("format")) if isinstance(form, dict) else ()
    return any(isinstance(one, dict) and one.get("type") in ("json_object", "json_schema") for one in forms)


def _chat_like(endpoint: Endpoint) -> bool:
    """Tell whether usage in a stream has to be asked for."""
    return endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS)


def _choices(endpoint: Endpoint, values: dict[str, Any]) -> int:
    """Return how many answers are generated per prompt: `best_of` are generated even though `n` come back."""
    if not _chat_like(endpoint) or not ("n" in values or "best_of" in values):
        return 1
    return max(fields.integer(values, key, 1, MAX_CHOICES) or 1 for key in ("n", "best_of"))


def _conversation(values: dict[str, Any]) -> str | None:
    conversation = values.get("conversation")
    if isinstance(conversation, dict):
        return fields.name(conversation, "id")
    return fields.name(values, "conversation")


def _chat(tally: Tally, values: dict[str, Any]) -> int:
    messages = fields.listed(values, "messages", MAX_ITEMS)
    tally.messages = len(messages)
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise Rejected(Reason.BAD_REQUEST, f"messages[{index}] must be an object")
        text = message.get("content")
        if isinstance(text, str):
            tally.texts.append(text)
        elif text is not None:
            content(tally, text, f"messages[{index}].content")
        if not message.keys() <= _PLAIN_MESSAGE:
            _beside_content(tally, message)
    return 1


def _beside_content(tally: Tally, message: dict[str, Any]) -> None:
    for key in ("name", "refusal", "reasoning_content", "reasoning"):
        if key in message:
            tally.words(message[key])
    for key in ("tool_calls", "reasoning_details"):
        calls = message.get(key)
        for call in calls if isinstance(calls, list) else ():
            item(tally, call) if isinstance(call, dict) else tally.words(call)
    called = message.get("function_call")
    if isinstance(called, dict):
        item(tally, {"type": "function_call", **called})


def _responses(tally: Tally, values: dict[str, Any]) -> int:
    tally.words(values.get("instructions"))
    tally.messages = "instructions" in values
    given = values.get("input")
    template = values.get("prompt")
    if isinstance(given, list):
        _items(tally, given)
    elif isinstance(given, str):
        tally.texts.append(given)
        tally.messages += 1
    elif given is not None:
        raise Rejected(Reason.BAD_REQUEST, "input must be a string or a list of items")
    elif template is None and values.get("previous_response_id") is None and values.get("conversation") is None:
        raise Rejected(Reason.BAD_REQUEST, "input is missing")
    if isinstance(template, dict) and template.get("variables") is not None:
        tally.words(template["variables"])
    return 1


def _items(tally: Tally, items: list[Any]) -> None:
    if len(items) > MAX_ITEMS:
        raise Rejected(Reason.BAD_REQUEST, f"input must hold at most {MAX_ITEMS} items")
    tally.messages += len(items)
    for index, one in enumerate(items):
        if not isinstance(one, dict):
            raise Rejected(Reason.BAD_REQUEST, f"input[{index}] must be an object")
        if one.get("type", "message") == "message":
            content(tally, one.get("content"), f"input[{index}].content")
        else:
            item(tally, one)


def _completions(tally: Tally, values: dict[str, Any]) -> int:
    return _bare_prompts(tally, values.get("prompt"), "prompt")


def _embeddings(tally: Tally, values: dict[str, Any]) -> int:
    if values.get("input") is None and isinstance(values.get("messages"), list):
        return _chat(tally, values)  # engines embed chats, too
    return _bare_prompts(tally, values.get("input"), "input")


def _bare_prompts(tally: Tally, given: object, key: str) -> int:
    """Count one prompt or many, each as text or as token ids; return how many there are."""
    if given is None:
        raise Rejected(Reason.BAD_REQUEST, f"{key} is missing")
    if isinstance(given, str):
        tally.texts.append(given)
        return 1
    if not isinstance(given, list) or not given:
        raise Rejected(Reason.BAD_REQUEST, f"{key} must be a string or a list that is not empty")
    kinds = set(map(type, given))
    if kinds == {int}:
        tally.tokens += len(given)
        return 1
    if kinds == {str}:
        tally.texts += given
    elif kinds == {list} and all(set(map(type, one)) == {int} for one in given):
        tally.tokens += sum(map(len, given))
    elif kinds == {dict} and key == "input":
        for one in given:
            item(tally, one)
    else:
        raise Rejected(Reason.BAD_REQUEST, f"{key} must hold only strings, only token ids, or only lists of token ids")
    return len(given)


_PROMPTS = {
    Endpoint.CHAT: _chat,
    Endpoint.COMPLETIONS: _completions,
    Endpoint.EMBEDDINGS: _embeddings,
    Endpoint.RESPONSES: _responses,
}
