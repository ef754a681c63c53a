"""The OpenAI dialect, as the real SDK reads it."""

import asyncio
import io
import math
from typing import Any

import openai
import pytest
from conftest import Fake, StartFake, events

from extproc.fakes import count_tokens, text_of_tokens

HI: Any = [{"role": "user", "content": "hi"}]


async def test_chat(fake: Fake) -> None:
    """An answer as long as the cap, with usage, the model asked for, and who served."""
    answer = await fake.openai.chat.completions.create(model="gpt-x", messages=HI, max_completion_tokens=12)
    assert answer.model == "gpt-x"
    assert answer.system_fingerprint == "primary"
    assert answer.choices[0].finish_reason == "stop"
    assert count_tokens(answer.choices[0].message.content or "") == 12
    assert answer.usage is not None
    # 3 for the prompt, 4 for the message, 1 for "hi".
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (8, 12, 20)


async def test_chat_stream(fake: Fake) -> None:
    """The same answer in pieces; no usage unless it is asked for."""
    whole = await fake.openai.chat.completions.create(model="gpt-x", messages=HI, max_tokens=30)
    stream = await fake.openai.chat.completions.create(model="gpt-x", messages=HI, max_tokens=30, stream=True)
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert len(chunks) == 32


async def test_chat_stream_with_usage(fake: Fake) -> None:
    """The usage comes last, in an event without choices."""
    stream = await fake.openai.chat.completions.create(
        model="gpt-x", messages=HI, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.choices and chunk.usage is None for chunk in chunks[:-1])


async def test_several_choices(fake: Fake) -> None:
    """`n` multiplies the output and the charge."""
    answer = await fake.openai.chat.completions.create(model="gpt-x", messages=HI, max_tokens=7, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 21
    assert fake.record.requests[-1].charged == 8 + 21
    stream = await fake.openai.chat.completions.create(model="gpt-x", messages=HI, max_tokens=7, n=3, stream=True)
    texts = ["", "", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [count_tokens(text) for text in texts] == [7, 7, 7]


async def test_events_may_carry_several_tokens(start_fake: StartFake) -> None:
    """Fewer events, the same text."""
    fake = await start_fake(tokens_per_event=8)
    async with fake.chat(max_tokens=20, stream=True) as response:
        pieces = [event["choices"][0]["delta"].get("content") for event in events(await response.text())[:-1]]
    assert [count_tokens(piece) for piece in pieces if piece] == [8, 8, 4]


async def test_long_streams_are_whole(start_fake: StartFake) -> None:
    """An answer of many events leaves in several writes."""
    fake = await start_fake(tokens_per_event=3)
    async with fake.chat(max_tokens=5000, stream=True) as response:
        pieces = [event["choices"][0]["delta"].get("content") or "" for event in events(await response.text())[:-1]]
    assert len(pieces) == 2 + math.ceil(5000 / 3)
    assert count_tokens("".join(pieces)) == 5000


async def test_health_check_is_answered_ok(fake: Fake) -> None:
    """Reply OK, in any case, in either form of content."""
    for content in ("reply OK", "Reply ok.", [{"type": "text", "text": "Reply OK"}]):
        answer = await fake.openai.chat.completions.create(
            model="gpt-x",
            messages=[{"role": "user", "content": content}],  # type: ignore[misc,list-item]
            max_tokens=5,
        )
        assert answer.choices[0].message.content == "OK"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1


async def test_a_model_may_talk_less_or_more_than_the_cap(start_fake: StartFake) -> None:
    """`length` only if the cap cut it off."""
    fake = await start_fake(output_tokens=10, default_output_tokens=99)
    short = await fake.openai.chat.completions.create(model="gpt-x", messages=HI)
    assert short.usage is not None
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (10, "stop")
    assert fake.record.requests[-1].charged == 8 + 99
    cut = await fake.openai.chat.completions.create(model="gpt-x", messages=HI, max_tokens=4)
    assert cut.usage is not None
    assert (cut.usage.completion_tokens, cut.choices[0].finish_reason) == (4, "length")


async def test_reasoning_and_cached_tokens(start_fake: StartFake) -> None:
    """Reasoning is inside the completion, cached tokens are inside the prompt."""
    fake = await start_fake(reasoning_tokens=6, cached_share=0.5)
    answer = await fake.openai.chat.completions.create(
        model="gpt-x", messages=[{"role": "user", "content": text_of_tokens(93)}], max_tokens=10
    )
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.completion_tokens_details is not None
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (100, 50)
    assert (usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens) == (10, 6)
    assert count_tokens(answer.choices[0].message.content or "") == 4


async def test_completions(fake: Fake) -> None:
    """Texts, lists of texts and token numbers; whole and streamed."""
    answer = await fake.openai.completions.create(model="gpt-x", prompt=["one two", "three"], max_tokens=3)
    assert len(answer.choices) == 2
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
    numbers = await fake.openai.completions.create(model="gpt-x", prompt=[[1, 2, 3]], max_tokens=3)
    assert numbers.usage is not None
    assert numbers.usage.prompt_tokens == 3
    stream = await fake.openai.completions.create(model="gpt-x", prompt="one", max_tokens=9, stream=True)
    chunks = [chunk async for chunk in stream]
    assert count_tokens("".join(chunk.choices[0].text for chunk in chunks)) == 9
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_embeddings(fake: Fake) -> None:
    """One vector per input, in both encodings; no output is charged."""
    by_default = await fake.openai.embeddings.create(model="embed-x", input=["one two", "three"])
    assert [len(item.embedding) for item in by_default.data] == [1536, 1536]
    assert by_default.usage.prompt_tokens == 3
    small = await fake.openai.embeddings.create(model="embed-x", input="one", dimensions=4, encoding_format="float")
    assert small.data[0].embedding == pytest.approx([0.5] * 4)
    assert [seen.charged for seen in fake.record.requests] == [3, 1]


async def test_responses(fake: Fake) -> None:
    """The Responses API, for a text and for messages."""
    for prompt in ("hi", HI):
        answer = await fake.openai.responses.create(model="gpt-x", input=prompt, max_output_tokens=11)
        assert answer.status == "completed"
        assert count_tokens(answer.output_text) == 11
        assert answer.usage is not None
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (8, 11)
    canary = await fake.openai.responses.create(model="gpt-x", input="reply OK", max_output_tokens=16)
    assert canary.output_text == "OK"


async def test_responses_stream(fake: Fake) -> None:
    """Typed events, numbered without a gap, with the usage in the last one."""
    stream = await fake.openai.responses.create(model="gpt-x", input="hi", max_output_tokens=11, stream=True)
    seen: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    kinds = [event.type for event in seen]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") == 11
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert seen[-1].response.output_text == text
    assert seen[-1].response.usage.output_tokens == 11


async def test_responses_stream_helper(fake: Fake) -> None:
    """The SDK's own accumulator accepts the events."""
    async with fake.openai.responses.stream(model="gpt-x", input="hi", max_output_tokens=11) as stream:
        final = await stream.get_final_response()
    assert count_tokens(final.output_text) == 11


async def test_incomplete_response(start_fake: StartFake) -> None:
    """Cut off by the cap."""
    fake = await start_fake(output_tokens=100)
    answer = await fake.openai.responses.create(model="gpt-x", input="hi", max_output_tokens=11)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    stream = await fake.openai.responses.create(model="gpt-x", input="hi", max_output_tokens=11, stream=True)
    assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_models(start_fake: StartFake) -> None:
    """Only configured models are listed and served."""
    fake = await start_fake(models=("gpt-x", "gpt-y"))
    assert [model.id async for model in await fake.openai.models.list()] == ["gpt-x", "gpt-y"]
    assert (await fake.openai.models.retrieve("gpt-y")).owned_by == "primary"
    with pytest.raises(openai.NotFoundError):
        await fake.openai.models.retrieve("gpt-z")
    with pytest.raises(openai.NotFoundError) as caught:
        await fake.openai.chat.completions.create(model="gpt-z", messages=HI)
    assert caught.value.code == "model_not_found"


async def test_the_rest_of_the_api(fake: Fake) -> None:
    """Small valid answers that cost no tokens."""
    image = await fake.openai.images.generate(model="image-x", prompt="a cat")
    assert image.data
    assert image.data[0].b64_json
    speech = await fake.openai.audio.speech.create(model="tts-x", voice="alloy", input="hi")
    assert speech.content.startswith(b"\xff\xfb")
    assert (await fake.openai.audio.transcriptions.create(model="whisper-x", file=("a.mp3", b"x"))).text == "OK"
    moderated = await fake.openai.moderations.create(model="mod-x", input="hi")
    assert not moderated.results[0].flagged
    file = await fake.openai.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    assert file.status == "processed"
    assert [seen.charged for seen in fake.record.requests] == [0] * 5


async def test_bad_requests_are_refused_in_the_dialect(fake: Fake) -> None:
    """Broken JSON, missing and wrong members, unknown paths."""
    url = f"{fake.url}/v1/chat/completions"
    bad: list[bytes] = [
        b"{", b"[]", b"[" * 100_000, b'{"model":"m"}', b'{"messages":[{"content":"x"}]}',
        b'{"model":"m","messages":[]}', b'{"model":"m","messages":["x"]}', b'{"model":"m","messages":[{"content":5}]}',
        b'{"model":"m","messages":[{"content":"x"}],"max_tokens":"9"}',
        b'{"model":"m","messages":[{"content":"x"}],"n":0}',
        b'{"model":"m","messages":[{"content":"x"}],"max_tokens":99999999}',
    ]  # fmt: skip
    for body in bad:
        async with fake.http.post(url, data=body) as response:
            assert response.status == 400, body[:50]
            assert (await response.json())["error"]["type"] == "invalid_request_error"
    for path in ("completions", "embeddings", "responses"):
        async with fake.http.post(f"{fake.url}/v1/{path}", json={"model": "m"}) as response:
            assert response.status == 400
    async with fake.http.get(f"{fake.url}/v2/nothing") as response:
        assert response.status == 404
        assert "GET /v2/nothing" in (await response.json())["error"]["message"]


async def test_large_bodies(fake: Fake) -> None:
    """32 MiB are taken, more is refused."""
    limit = 32 * 1024 * 1024
    head, tail = b'{"model":"m","max_tokens":1,"messages":[{"content":"', b'"}]}'
    url = f"{fake.url}/v1/chat/completions"
    async with fake.http.post(url, data=io.BytesIO(head + b"x" * (limit - len(head) - len(tail)) + tail)) as response:
        assert response.status == 200
    async with fake.http.post(url, data=io.BytesIO(head + b"x" * limit + tail)) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"


async def test_keys(start_fake: StartFake) -> None:
    """With a key in the settings, requests must carry it, in one of the usual headers."""
    fake = await start_fake(key="sk-right")
    for headers, status in [
        ({"authorization": "Bearer sk-right"}, 200), ({"api-key": "sk-right"}, 200), ({"x-api-key": "sk-right"}, 200),
        ({"authorization": "Bearer sk-wrong"}, 401), ({}, 401),
    ]:  # fmt: skip
        async with fake.chat(headers=headers) as response:
            assert response.status == status
    with pytest.raises(openai.AuthenticationError):
        await fake.openai.with_options(api_key="sk-wrong").chat.completions.create(model="gpt-x", messages=HI)


async def test_pace(start_fake: StartFake) -> None:
    """The first token takes base latency and prompt, the others their speed; headers come with the first token."""
    fake = await start_fake(base_latency_s=0.05, prompt_tokens_per_s=1000, output_tokens_per_s=200)
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with fake.chat(text_of_tokens(43), stream=True, max_tokens=21) as response:
        opened = loop.time() - started
        await response.read()
    ended = loop.time() - started
    # 50 ms, 50 tokens of prompt, then 20 tokens after the first.
    assert 0.099 <= opened < ended
    assert ended >= 0.199
    started = loop.time()
    async with fake.chat(text_of_tokens(43), max_tokens=21) as response:
        await response.read()
    assert loop.time() - started >= 0.199


async def test_early_headers(start_fake: StartFake) -> None:
    """Some providers send the headers at once, which defeats timeouts on headers."""
    fake = await start_fake(early_headers=True, base_latency_s=0.2)
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with fake.chat(stream=True) as response:
        await response.read()
    assert loop.time() - started >= 0.199
    fake = await start_fake(early_headers=True, base_latency_s=600.0)
    async with asyncio.timeout(60), fake.chat(stream=True) as response:
        assert response.status == 200


async def test_prompt_parts_are_priced(fake: Fake) -> None:
    """Texts, images, tool calls and tools all count."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    parts = [{"type": "text", "text": "one two"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    sizes = []
    for members in (
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"messages": HI, "tools": tools},
    ):
        async with fake.chat(**members) as response:
            sizes.append((await response.json())["usage"]["prompt_tokens"])
    assert sizes[0] == 7 + 2 + 85
    assert sizes[1] > 7 + 10
    assert sizes[2] > 8 + 10
