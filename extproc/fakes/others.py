"""The rest of OpenAI's API, as far as a gateway has to let it through: small valid answers, no tokens charged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from extproc.fakes.answer import Answer, Ask
from extproc.fakes.dialect import Endpoint
from extproc.fakes.jsonbytes import dumps
from extproc.fakes.openai import OPENAI

if TYPE_CHECKING:
    from collections.abc import Iterable

# One transparent pixel.
_PNG_BASE64 = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
# The header of an MPEG audio frame, and silence.
_MP3 = b"\xff\xfb\x90\x00" + bytes(413)
_MODERATED = (
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/instructions",
    "self-harm/intent",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)


def models_body(models: Iterable[str], provider: str, *, anthropic: bool) -> bytes:
    """Return the list of models in OpenAI's shape, or in Anthropic's."""
    items = [model_members(model, provider, anthropic=anthropic) for model in models]
    if not anthropic:
        return dumps({"object": "list", "data": items})
    return dumps(
        {"data": items, "has_more": False, "first_id": items[0]["id"], "last_id": items[-1]["id"]},
    )


def model_members(model: str, provider: str, *, anthropic: bool) -> dict[str, Any]:
    """Return one model in OpenAI's shape, or in Anthropic's."""
    name = "fake-model" if model == "*" else model
    if not anthropic:
        return {"id": name, "object": "model", "created": 1_700_000_000, "owned_by": provider}
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "2025-01-01T00:00:00Z",
        "lifecycle": "active",
    }


def _read_small(body: dict[str, Any]) -> Ask:
    model = body.get("model")
    return Ask(model=model if isinstance(model, str) else "", talks=False, body=body)


def _write_image(answer: Answer) -> bytes:
    return dumps({"created": answer.created, "data": [{"b64_json": _PNG_BASE64}]})


def _write_speech(_answer: Answer) -> bytes:
    return _MP3


def _write_transcription(_answer: Answer) -> bytes:
    return b'{"text":"OK"}'


def _write_moderation(answer: Answer) -> bytes:
    result = {
        "flagged": False,
        "categories": dict.fromkeys(_MODERATED, False),
        "category_scores": dict.fromkeys(_MODERATED, 0.0),
        "category_applied_input_types": {name: ["text"] for name in _MODERATED},
    }
    return dumps({"id": f"modr-{answer.serial}", "model": answer.ask.model, "results": [result]})


def _write_file(answer: Answer) -> bytes:
    return dumps(
        {
            "id": f"file-{answer.serial}",
            "object": "file",
            "bytes": 0,
            "created_at": answer.created,
            "filename": "fake.jsonl",
            "purpose": "batch",
            "status": "processed",
        },
    )


ENDPOINTS = (
    Endpoint("/v1/images/generations", OPENAI, _read_small, _write_image),
    Endpoint("/v1/audio/speech", OPENAI, _read_small, _write_speech, content_type="audio/mpeg"),
    Endpoint("/v1/audio/transcriptions", OPENAI, None, _write_transcription),
    Endpoint("/v1/moderations", OPENAI, _read_small, _write_moderation),
    Endpoint("/v1/files", OPENAI, None, _write_file),
)
