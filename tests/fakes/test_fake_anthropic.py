"""The Anthropic dialect, as the real SDK reads it."""

from typing import Any

import anthropic
import pytest
from conftest import Fake, StartFake

from extproc.fakes import count_tokens, text_of_tokens

HI: Any = [{"role": "user", "content": "hi"}]


async def test_message(fake: Fake) -> None:
    """An answer as long as the cap, with usage and the model asked for."""
    answer = await fake.anthropic.messages.create(model="claude-x", messages=HI, max_tokens=12)
    assert answer.model == "claude-x"
    assert answer.stop_reason == "end_turn"
    assert answer.content[0].type == "text"
    assert count_tokens(answer.content[0].text) == 12
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (8, 12)
    assert answer.to_dict()["system_fingerprint"] == "primary"


async def test_cached_tokens_are_not_input_tokens(start_fake: StartFake) -> None:
    """Three numbers that add up to the prompt."""
    fake = await start_fake(cached_share=0.5)
    answer = await fake.anthropic.messages.create(
        model="claude-x", messages=[{"role": "user", "content": text_of_tokens(93)}], max_tokens=1
    )
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (50, 0, 50)


async def test_stream(fake: Fake) -> None:
    """All events in order; the usage at the end is cumulative."""
    stream = await fake.anthropic.messages.create(model="claude-x", messages=HI, max_tokens=12, stream=True)
    seen: list[Any] = [event async for event in stream]
    kinds = [event.type for event in seen]
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * 12, "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert (seen[0].message.usage.input_tokens, seen[0].message.usage.output_tokens) == (8, 1)
    assert (seen[-2].usage.output_tokens, seen[-2].delta.stop_reason) == (12, "end_turn")
    text = "".join(event.delta.text for event in seen if event.type == "content_block_delta")
    assert count_tokens(text) == 12


async def test_stream_helper(fake: Fake) -> None:
    """The SDK's own accumulator accepts the events; a ping is among them."""
    async with fake.anthropic.messages.stream(model="claude-x", messages=HI, max_tokens=12) as stream:
        final = await stream.get_final_message()
    assert final.usage.output_tokens == 12
    async with fake.message(stream=True) as response:
        assert "event: ping\n" in await response.text()


async def test_health_check_is_answered_ok(fake: Fake) -> None:
    """Reply OK, in any case."""
    answer = await fake.anthropic.messages.create(
        model="claude-x", messages=[{"role": "user", "content": "Reply OK"}], max_tokens=5
    )
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "OK"


async def test_count_tokens_is_free(fake: Fake) -> None:
    """System prompt, tools and messages are counted, nothing is charged."""
    counted = await fake.anthropic.messages.count_tokens(
        model="claude-x", system="one two", messages=[{"role": "user", "content": text_of_tokens(100)}]
    )
    assert counted.input_tokens == 7 + 2 + 100
    assert fake.record.requests[-1].charged == 0


async def test_tool_results_are_priced(fake: Fake) -> None:
    """Blocks in blocks count."""
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "one two three"}]}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {"where": "here"}}
    counted = await fake.anthropic.messages.count_tokens(
        model="claude-x",
        messages=[{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}],  # type: ignore[list-item,misc]
    )
    assert counted.input_tokens > 3 + 8 + 3 + 5


async def test_models(start_fake: StartFake) -> None:
    """The list has Anthropic's shape for Anthropic's clients."""
    fake = await start_fake(models=("claude-x",))
    assert [model.id async for model in fake.anthropic.models.list()] == ["claude-x"]
    with pytest.raises(anthropic.NotFoundError):
        await fake.anthropic.models.retrieve("claude-z")
    with pytest.raises(anthropic.NotFoundError):
        await fake.anthropic.messages.create(model="claude-z", messages=HI, max_tokens=1)


async def test_bad_requests_are_refused_in_the_dialect(fake: Fake) -> None:
    """Broken JSON, missing members; the request id is in the body and in a header."""
    for body in (
        b"{",
        b'{"model":"m","messages":[{"content":"x"}]}',
        b'{"model":"m","max_tokens":1}',
        b'{"max_tokens":1}',
    ):
        async with fake.http.post(f"{fake.url}/v1/messages", data=body) as response:
            assert response.status == 400
            wrong = await response.json()
        assert (wrong["type"], wrong["error"]["type"]) == ("error", "invalid_request_error")
        assert wrong["request_id"] == response.headers["request-id"]
    async with fake.http.get(f"{fake.url}/nothing", headers={"anthropic-version": "2023-06-01"}) as response:
        assert response.status == 404
        assert (await response.json())["error"]["type"] == "not_found_error"


async def test_keys(start_fake: StartFake) -> None:
    """A wrong key is an authentication error."""
    fake = await start_fake(key="sk-right")
    await fake.anthropic.messages.create(model="claude-x", messages=HI, max_tokens=1)
    with pytest.raises(anthropic.AuthenticationError):
        await fake.anthropic.with_options(api_key="sk-wrong").messages.create(model="c", messages=HI, max_tokens=1)


async def test_empty_limits_lead_to_rate_limit_errors(start_fake: StartFake) -> None:
    """429 with whole seconds to wait; headers on every answer."""
    fake = await start_fake(tpm=6000, rpm=100)
    async with fake.message(max_tokens=5000) as response:
        assert response.status == 200
        assert response.headers["anthropic-ratelimit-tokens-remaining"] == "1000"
        assert response.headers["anthropic-ratelimit-requests-remaining"] == "99"
    with pytest.raises(anthropic.RateLimitError) as caught:
        await fake.anthropic.messages.create(model="claude-x", messages=HI, max_tokens=2000)
    assert caught.value.response.headers["retry-after"] in ("9", "10", "11")
    assert caught.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
