"""Answers of last resort: the operator's words in the shape of each API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.core.request import Endpoint
from extproc.dialects import signed, stand_in

TEXT = 'Sorry, "nobody" can answer.\n请稍后再试。'
GENERATING = [endpoint for endpoint in Endpoint if endpoint.generates]


def events(body: str) -> list[Any]:
    """The data of each event, all but `[DONE]` as JSON."""
    assert body.endswith("\n\n")
    lines = [line for line in body.split("\n") if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def said(endpoint: Endpoint, *, stream: bool, wants_usage: bool = False) -> str:
    body = stand_in(endpoint, TEXT, stream=stream, wants_usage=wants_usage)
    assert body is not None
    return signed(body, "r-1", 1_234_567_890.5)


@pytest.mark.parametrize("endpoint", GENERATING)
@pytest.mark.parametrize("stream", [True, False])
def test_every_api_that_answers_with_text_has_one(endpoint: Endpoint, *, stream: bool) -> None:
    """The whole text, a model that no upstream has, the request's own id, and no stand-in left."""
    body = said(endpoint, stream=stream)
    assert json.dumps(TEXT, ensure_ascii=False) in body
    assert '"model": "last-resort"' in body
    assert "r-1" in body
    assert "{request-id}" not in body
    assert "1000000001" not in body
    assert bool(events(body)) == stream if stream else json.loads(body)


@pytest.mark.parametrize("endpoint", GENERATING)
@pytest.mark.parametrize("text", ["Call 1000000001.", '{"created": 1000000001}', '"created_at": 1000000001'])
def test_a_number_in_the_text_stays(endpoint: Endpoint, text: str) -> None:
    """Even one that stands for the time elsewhere."""
    body = stand_in(endpoint, text, stream=False)
    assert body is not None
    assert json.dumps(text) in signed(body, "r-1", 5.0)


@pytest.mark.parametrize("endpoint", [e for e in Endpoint if not e.generates])
def test_others_have_none(endpoint: Endpoint) -> None:
    """An embedding, say, is not a text."""
    assert stand_in(endpoint, TEXT, stream=False) is None


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
def test_usage_is_told_to_who_asked_for_it(endpoint: Endpoint) -> None:
    """It is zero: nobody is paid."""
    assert all(chunk["choices"] for chunk in events(said(endpoint, stream=True)))
    last = events(said(endpoint, stream=True, wants_usage=True))[-1]
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 0)


def test_an_id_cannot_break_out_of_its_string() -> None:
    """It comes from a header."""
    body = stand_in(Endpoint.MESSAGES, TEXT, stream=False)
    assert body is not None
    assert json.loads(signed(body, '"\\x', 1.0))["id"] == 'msg_"\\x'
