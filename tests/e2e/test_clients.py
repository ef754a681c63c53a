"""The real SDKs and plain HTTP, streaming and not, against the whole stack."""

from __future__ import annotations

import anthropic
import httpx
import openai
import pytest

from tests.e2e.conftest import Gate, books_balance, chat


def test_openai_and_anthropic_sdks_work_unchanged(gate: Gate) -> None:
    """Streaming and not, the answers are what the SDKs expect, and nobody sees usage it did not ask for."""
    stack = gate()
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="sk-test", max_retries=0)
    answer = client.chat.completions.create(**chat())
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    chunks = list(client.chat.completions.create(**chat(), stream=True))
    assert all(chunk.choices for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length" or chunks[-1].choices[0].finish_reason == "stop"
    asked = list(client.chat.completions.create(**chat(), stream=True, stream_options={"include_usage": True}))
    assert asked[-1].usage is not None
    assert asked[-1].usage.completion_tokens == 16
    assert client.embeddings.create(model="gpt-5", input="hello").data
    assert client.completions.create(model="gpt-5", prompt="hello", max_tokens=5).choices
    assert client.responses.create(model="gpt-5", input="hello", max_output_tokens=8).usage

    claude = anthropic.Anthropic(base_url=stack.url, api_key="sk-test", max_retries=0)
    said = claude.messages.create(model="claude", max_tokens=16, messages=[{"role": "user", "content": "hi"}])
    assert said.usage.output_tokens == 16
    with claude.messages.stream(model="claude", max_tokens=16, messages=[{"role": "user", "content": "hi"}]) as stream:
        final = stream.get_final_message()
    assert final.stop_reason
    assert claude.messages.count_tokens(model="claude", messages=[{"role": "user", "content": "hi"}]).input_tokens > 0


def test_usage_is_learned_from_every_dialect_and_shape(gate: Gate) -> None:
    """Every answer, streamed or not, is settled with reported usage; none stays unknown."""
    stack = gate()
    with httpx.Client(base_url=stack.url, timeout=20) as http:
        for body in (chat(), chat(stream=True), chat(stream=True, stream_options={"include_usage": True})):
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        for stream in (False, True):
            message = {**chat(), "model": "claude", "stream": stream}
            assert (
                http.post("/v1/messages", json=message, headers={"anthropic-version": "2023-06-01"}).status_code == 200
            )
            body = {"model": "gpt-5", "input": "hello", "max_output_tokens": 8, "stream": stream}
            assert http.post("/v1/responses", json=body).status_code == 200
            body = {"model": "gpt-5", "prompt": "hello", "max_tokens": 8, "stream": stream}
            assert http.post("/v1/completions", json=body).status_code == 200
        assert http.post("/v1/embeddings", json={"model": "gpt-5", "input": "hello"}).status_code == 200
    books_balance(stack)
    tally = stack.state()["tally"]
    assert tally["settled"] == 10
    assert tally["unknown_usage"] == 0


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/gpt-5"])
def test_models_come_from_the_config(gate: Gate, path: str) -> None:
    """The list of models is the config's, and no upstream is asked."""
    stack = gate(routes=[{"models": ["gpt-5"], "chain": ["primary", "backup", "local"]}])
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="sk-test")
    assert [model.id for model in client.models.list()] == ["gpt-5"]
    assert httpx.get(f"{stack.url}{path}").status_code == 200
    assert httpx.get(f"{stack.url}/v1/models/nope").status_code == 404
    assert stack.record("primary")["requests"] == []
