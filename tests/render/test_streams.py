"""Streamed answers through a real Envoy: the same fuzz, cut streams, and what the SDKs make of them."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.render.rig import Envoy, Reply, Upstream, admitted, event, sse
from tests.render.streams import MARK, Reference, make
from tests.render.test_tail import words

pytestmark = pytest.mark.e2e

Ups = dict[str, Upstream]

CASES = 150
STREAM = {"content-type": "text/event-stream"}
WORD = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}], "usage": None}
FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def test_random_streams_come_out_as_the_reference_says(gateway: Envoy, ups: Ups) -> None:
    """Through sockets and Envoy's own buffers, chunk boundaries wherever they fall."""
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - to find it again
    for case in range(CASES):
        stream = make(random.Random(seed + case))
        chunks = [chunk for chunk in stream.chunks if chunk]
        ups["a"].reply = Reply(headers=STREAM, chunks=chunks, pause_s=random.choice([0, 0, 0.0005]))
        got = gateway.call(
            headers=admitted("a", dialect=stream.dialect, path=stream.path, hide_usage=stream.hide or None)
        )
        reference = Reference(stream, words(stream.dialect))
        expected = reference.feed(stream.data) + reference.end()
        at = expected.find(words(stream.dialect))
        # How much of an error went on before it was known for one depends on where Envoy cut.
        assert got.body == expected if at < 0 else words(stream.dialect) in got.body, (seed, case)
        assert got.body.startswith(expected[: max(0, at)].rstrip()), (seed, case)
        assert got.whole, (seed, case)


def test_tokens_pass_as_they_come(gateway: Envoy, ups: Ups) -> None:
    """Nothing waits for more, also while usage is hidden."""
    ups["a"].reply = Reply(headers=STREAM, chunks=[event(WORD)] * 4 + [event("[DONE]")], pause_s=0.4)
    seen: list[float] = []
    client = openai.OpenAI(base_url=_url(gateway), api_key="k", max_retries=0)
    headers = admitted("a", hide_usage=True)
    began = time.monotonic()
    with client.chat.completions.create(model="m", messages=[], stream=True, extra_headers=headers) as stream:
        seen.extend(time.monotonic() - began for _ in stream)
    assert len(seen) == 4
    assert all(0.4 * (i + 1) <= at < 0.4 * (i + 2) for i, at in enumerate(seen)), seen


def test_failover_to_a_stream(gateway: Envoy, ups: Ups) -> None:
    ups["a"].reply = Reply(529)
    ups["b"].reply = sse(WORD, FINISH, USAGE, "[DONE]")
    got = gateway.call(headers=admitted("a", "b", hide_usage=True, stream=True))
    assert got.body == event(WORD) + event(FINISH) + event("[DONE]")


def test_a_reset_stream_is_a_broken_connection_at_once(gateway: Envoy, ups: Ups) -> None:
    """Decision 9: the caller gets what there was, is not left waiting, and never takes it for the end."""
    ups["a"].reply = Reply(headers=STREAM, chunks=[event(WORD)], cut=True)
    client = openai.OpenAI(base_url=_url(gateway), api_key="k", max_retries=0)
    began = time.monotonic()
    words: list[Any] = []
    stream = client.chat.completions.create(model="m", messages=[], stream=True, extra_headers=admitted("a"))
    with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)), stream:
        words.extend(stream)
    assert len(words) == 1
    assert time.monotonic() - began < 0.5


def test_a_silent_stream_is_ended(gateway: Envoy, ups: Ups) -> None:
    """Here after 0.5 s."""
    ups["a"].reply = Reply(headers=STREAM, chunks=[event(WORD), event(WORD), event("[DONE]")], pause_s=1.0)
    began = time.monotonic()
    assert not gateway.call(headers=admitted("a", stream=True)).whole
    assert time.monotonic() - began < 2.5


# ------------------------------------------------------------------------------------------------ SDKs


def _url(gateway: Envoy, tail: str = "/v1") -> str:
    return f"http://127.0.0.1:{gateway.settings.gateway.port}{tail}"


def _read_all(stream: Any) -> list[Any]:
    with stream:
        return list(stream)


@pytest.fixture
def cut(ups: Ups) -> None:
    """An upstream that stops in the middle and says nothing of it."""

    def half(seen: Any) -> Reply:
        if seen.path.endswith("/messages"):
            usage = {"input_tokens": 3, "output_tokens": 1}
            message = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "m", "usage": usage}
            start = {"type": "message_start", "message": {**message, "stop_reason": None, "stop_sequence": None}}
            return Reply(
                headers=STREAM, chunks=[b"event: message_start\ndata: " + json.dumps(start).encode() + b"\n\n"]
            )
        if seen.path.endswith("/responses"):
            delta = {"type": "response.output_text.delta", "delta": "a", "sequence_number": 1}
            return Reply(headers=STREAM, chunks=[b"event: response.output_text.delta\n" + event(delta)])
        return sse(WORD, WORD)

    for server in ups.values():
        server.reply = half


@pytest.mark.parametrize(
    "error",
    [
        event({"object": "error", "message": "no room", "type": "InternalServerError", "code": 500}),
        event({"detail": "no room"}),
        event({"code": 503, "message": "no room"}),
        b"event: error\ndata: no room\n\n",
        b'{"object": "error", "message": "no room", "code": 500}\n\n',
    ],
)
def test_the_openai_sdk_raises_an_error_that_it_would_not_see(gateway: Envoy, ups: Ups, error: bytes) -> None:
    """Although the stream says that all is well; behind words, or a mark of the byte order, and however it is cut."""
    client = openai.OpenAI(base_url=_url(gateway), api_key="k", max_retries=0)
    for before in (event(WORD), MARK, MARK + event(WORD)):
        whole = before + error + event(FINISH) + event("[DONE]")
        for chunks in ([whole], [whole[: len(before) + 12], whole[len(before) + 12 :]], [whole[:2], whole[2:]]):
            ups["c"].reply = Reply(headers=STREAM, chunks=chunks, pause_s=0.005)
            stream = client.chat.completions.create(model="m", messages=[], stream=True, extra_headers=admitted("c"))
            with pytest.raises(
                (openai.APIError, json.JSONDecodeError), match=r"ended its answer early|Expecting|Unterm"
            ):
                _read_all(stream)


def test_the_openai_sdk_reads_what_is_behind_a_byte_order_mark(gateway: Envoy, ups: Ups) -> None:
    """All of it; without the gateway it would read past the first event."""
    client = openai.OpenAI(base_url=_url(gateway), api_key="k", max_retries=0)
    for chunks in ([MARK + event(WORD), event(FINISH)], [MARK[:1], MARK[1:] + event(WORD), event(FINISH)]):
        ups["c"].reply = Reply(headers=STREAM, chunks=[*chunks, event("[DONE]")], pause_s=0.005)
        stream = client.chat.completions.create(model="m", messages=[], stream=True, extra_headers=admitted("c"))
        assert [chunk.choices[0].delta.content for chunk in _read_all(stream)] == ["a", None]
    ups["a"].reply = Reply(body=MARK + b'{"error": {"type": "server_error", "message": "x"}}')
    ups["c"].reply = Reply(body=MARK + json.dumps({"choices": [{"message": {"content": "a"}}]}).encode())
    answer = client.chat.completions.create(model="m", messages=[], extra_headers=admitted("a", "c"))
    assert answer.choices[0].message.content == "a"


@pytest.mark.usefixtures("cut")
def test_the_openai_sdk_raises_on_a_cut_chat(gateway: Envoy) -> None:
    client = openai.OpenAI(base_url=_url(gateway), api_key="k", max_retries=0)
    with pytest.raises(openai.APIError, match="ended its answer early"):
        _read_all(client.chat.completions.create(model="m", messages=[], stream=True, extra_headers=admitted("c")))


@pytest.mark.usefixtures("cut")
def test_the_openai_sdk_raises_on_a_cut_response(gateway: Envoy) -> None:
    client = openai.OpenAI(base_url=_url(gateway), api_key="k", max_retries=0)
    headers = admitted("c", path="/v1/responses")
    with pytest.raises(openai.APIError, match="ended its answer early"):
        _read_all(client.responses.create(model="m", input="x", stream=True, extra_headers=headers))


@pytest.mark.usefixtures("cut")
def test_the_anthropic_sdk_raises_on_a_cut_message(gateway: Envoy) -> None:
    client = anthropic.Anthropic(base_url=_url(gateway, ""), api_key="k", max_retries=0)
    headers = admitted("c", path="/v1/messages", dialect="anthropic")
    with pytest.raises(anthropic.APIError, match="ended its answer early"):
        _read_all(client.messages.create(model="m", max_tokens=9, messages=[], stream=True, extra_headers=headers))


def test_the_sdks_read_refusals(gateway: Envoy) -> None:
    """Where Tidegate is away, each SDK raises its own error for an overloaded server, with our reason in its body."""
    chat = openai.OpenAI(base_url=_url(gateway), api_key="k", max_retries=0)
    with pytest.raises(openai.InternalServerError, match=r"(?i)admission|accept") as refused:
        chat.chat.completions.create(model="m", messages=[])
    assert refused.value.code == "SERVER_OVERLOADED"
    claude = anthropic.Anthropic(base_url=_url(gateway, ""), api_key="k", max_retries=0)
    with pytest.raises(anthropic.APIStatusError) as overloaded:
        claude.messages.create(model="m", max_tokens=9, messages=[])
    body = overloaded.value.body
    assert isinstance(body, dict)
    assert (body["error"]["type"], body["error"]["reason"]) == ("overloaded_error", "admission_unavailable")
    assert re.fullmatch(r"[0-9a-f-]{36}", body["request_id"])


def test_streams_of_other_endpoints_are_left_alone(gateway: Envoy, ups: Ups) -> None:
    """How those end is not known here, so nothing is made of it."""
    ups["a"].reply = sse({"type": "audio.delta"}, USAGE)
    got = gateway.call("/v1/audio/speech", headers=admitted("a", path="/v1/audio/speech", hide_usage=True))
    assert got.body == event({"type": "audio.delta"}) + event(USAGE)
