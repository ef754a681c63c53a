"""Every fault, in the dialects it has a wording in, as a client meets it."""

import asyncio
import json
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
import uvloop
from conftest import Fake, StartFake, events

from extproc.fakes import FakeSettings, count_tokens, running
from extproc.fakes.faults import FAULTS, FaultBoard, parse_fault
from extproc.fakes.refusal import Refused

HI: Any = [{"role": "user", "content": "hi"}]


def fault(spelled: str) -> dict[str, str]:
    """Return the header for a fault."""
    return {"x-fake-fault": spelled}


def text_of(datas: list[Any]) -> str:
    """Return the text in the events of a chat stream."""
    deltas = [data["choices"][0]["delta"] for data in datas if isinstance(data, dict) and data.get("choices")]
    return "".join(delta.get("content") or "" for delta in deltas)


# Refusals.


@pytest.mark.parametrize(
    ("name", "status", "kind", "code"),
    [
        ("500", 500, "server_error", None),
        ("503", 503, "server_error", "server_is_overloaded"),
        ("529", 529, "server_error", "server_is_overloaded"),
        ("429", 429, "tokens", "rate_limit_exceeded"),
        ("429-bare", 429, "tokens", "rate_limit_exceeded"),
        ("401", 401, "invalid_request_error", "invalid_api_key"),
        ("403", 403, "invalid_request_error", "model_not_allowed"),
        ("402", 402, "unknown_error", "invalid_request_error"),
        ("404", 404, "invalid_request_error", "model_not_found"),
        ("413", 413, "invalid_request_error", "request_too_large"),
        ("slow-down", 429, "rate_limit_error", "slow_down"),
        ("billing", 429, "insufficient_quota", "insufficient_quota"),
        ("spend-limit", 429, "insufficient_quota", "organization_spend_limit_exceeded"),
        ("context-length", 400, "invalid_request_error", "context_length_exceeded"),
        ("content-filter", 400, "invalid_request_error", "content_filter"),
        ("error-200", 200, "server_error", None),
        ("error-200;billing", 200, "insufficient_quota", "insufficient_quota"),
        ("error-200;filter", 200, "invalid_request_error", "content_filter"),
    ],
)
async def test_refusals_in_openai_words(fake: Fake, name: str, status: int, kind: str, code: str | None) -> None:
    """Status and body are the provider's, streamed or not; nothing is charged."""
    for stream in (False, True):
        async with fake.chat(headers=fault(name), stream=stream) as response:
            assert response.status == status
            error = (await response.json())["error"]
        assert (error["type"], error["code"]) == (kind, code)
    seen = fake.record.requests[-1]
    assert (seen.fault, seen.status, seen.charged) == (name.partition(";")[0], status, 0)


@pytest.mark.parametrize(
    ("name", "status", "kind"),
    [
        ("500", 500, "api_error"),
        ("503", 503, "api_error"),
        ("529", 529, "overloaded_error"),
        ("429", 429, "rate_limit_error"),
        ("429-bare", 429, "rate_limit_error"),
        ("401", 401, "authentication_error"),
        ("403", 403, "permission_error"),
        ("402", 402, "billing_error"),
        ("404", 404, "not_found_error"),
        ("413", 413, "request_too_large"),
        ("slow-down", 429, "rate_limit_error"),
        ("billing", 400, "invalid_request_error"),
        ("spend-limit", 429, "rate_limit_error"),
        ("context-length", 400, "invalid_request_error"),
        ("error-200", 200, "api_error"),
    ],
)
async def test_refusals_in_anthropic_words(fake: Fake, name: str, status: int, kind: str) -> None:
    """The same refusals in the other dialect."""
    for stream in (False, True):
        async with fake.message(headers=fault(name), stream=stream) as response:
            assert response.status == status
            assert (await response.json())["error"]["type"] == kind


async def test_retry_after(fake: Fake) -> None:
    """A 429 says when to come back, unless it is bare."""
    async with fake.chat(headers=fault("429")) as response:
        assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("1", "1000")
    async with fake.chat(headers=fault("429;retry-after=2.5")) as response:
        assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2500")
        assert "Please try again in 2.5s." in (await response.json())["error"]["message"]
    async with fake.message(headers=fault("429;retry-after=7")) as response:
        assert response.headers["retry-after"] == "7"
        assert "retry-after-ms" not in response.headers
    async with fake.chat(headers=fault("429-bare")) as response:
        assert "retry-after" not in response.headers


async def test_the_sdks_raise_what_they_raise_for_the_real_thing(fake: Fake) -> None:
    """The errors are recognised by type."""
    for name, expected in [
        ("429", openai.RateLimitError), ("billing", openai.RateLimitError), ("503", openai.InternalServerError),
        ("context-length", openai.BadRequestError), ("403", openai.PermissionDeniedError),
    ]:  # fmt: skip
        with pytest.raises(expected):
            await fake.openai.chat.completions.create(model="gpt-x", messages=HI, extra_headers=fault(name))
    with pytest.raises(anthropic.InternalServerError, match="Overloaded"):
        await fake.anthropic.messages.create(model="c", messages=HI, max_tokens=5, extra_headers=fault("529"))
    with pytest.raises(anthropic.BadRequestError, match="credit balance"):
        await fake.anthropic.messages.create(model="c", messages=HI, max_tokens=5, extra_headers=fault("billing"))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await fake.anthropic.messages.create(
            model="c", messages=HI, max_tokens=5, extra_headers=fault("context-length")
        )


async def test_a_refusal_may_take_its_time(fake: Fake) -> None:
    """`after` delays it."""
    started = asyncio.get_running_loop().time()
    async with fake.chat(headers=fault("503;after=0.1")) as response:
        assert response.status == 503
    assert asyncio.get_running_loop().time() - started >= 0.099


# No answer.


async def test_reset(fake: Fake) -> None:
    """The connection is reset before any header."""
    with pytest.raises(aiohttp.ClientError):
        await fake.chat(headers=fault("reset"))
    with pytest.raises(openai.APIConnectionError):
        await fake.openai.chat.completions.create(model="gpt-x", messages=HI, extra_headers=fault("reset"))
    assert fake.record.requests[-1].status is None


async def test_silence(fake: Fake) -> None:
    """The request is taken, charged, and never answered; the client's patience ends it."""
    silent = asyncio.create_task(fake.http.post(**request_of(fake, "silence")))
    await fake.record.until(lambda record: record.in_flight == 1)
    silent.cancel()
    await fake.record.until(lambda record: record.in_flight == 0)
    seen = fake.record.requests[-1]
    assert (seen.aborted, seen.status, seen.charged, seen.output_tokens) == (True, None, 28, 0)


def request_of(fake: Fake, spelled: str) -> dict[str, Any]:
    """Return the arguments of a post with a fault."""
    body = {"model": "gpt-x", "max_tokens": 20, "messages": HI}
    return {"url": f"{fake.url}/v1/chat/completions", "json": body, "headers": fault(spelled)}


# Answers that go wrong.


async def test_slow_first_token(fake: Fake) -> None:
    """Headers wait for the token, unless they are early."""
    loop = asyncio.get_running_loop()
    for spelled, headers_wait in [("slow-first-token;s=0.2", True), ("slow-first-token;s=0.2;early-headers", False)]:
        started = loop.time()
        async with fake.chat(headers=fault(spelled), stream=True) as response:
            assert loop.time() - started >= 0.199 or not headers_wait
            assert count_tokens(text_of(events(await response.text()))) == 20
        assert loop.time() - started >= 0.199
    early = fake.chat(headers=fault("slow-first-token;s=600;early-headers"), stream=True)
    async with asyncio.timeout(60), early as response:
        assert response.status == 200
    started = loop.time()
    async with fake.chat(headers=fault("slow-first-token;s=0.2")) as response:
        assert response.status == 200
    assert loop.time() - started >= 0.199


async def test_cut_stream(fake: Fake) -> None:
    """The connection breaks after as many tokens as asked for."""
    async with fake.chat(headers=fault("cut;at=3"), stream=True) as response:
        got, broken = await read_until_it_breaks(response)
    assert broken
    assert count_tokens(text_of(events(got))) == 3
    assert fake.record.requests[-1].output_tokens == 3
    stream = await fake.openai.chat.completions.create(
        model="gpt-x", messages=HI, stream=True, extra_headers=fault("cut")
    )
    with pytest.raises(openai.APIConnectionError):
        _ = [chunk async for chunk in stream]
    seen = fake.record.requests[-1]
    assert (seen.aborted, seen.fault, seen.status) == (False, "cut", 200)


async def read_until_it_breaks(response: aiohttp.ClientResponse) -> tuple[str, bool]:
    """Return what came, and whether the connection broke."""
    got = b""
    try:
        async for piece in response.content.iter_any():
            got += piece
    except aiohttp.ClientError:
        return got.decode(), True
    return got.decode(), False


async def test_cut_json(fake: Fake) -> None:
    """Half of the announced body, then nothing."""
    async with fake.chat(headers=fault("cut")) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_early_end(fake: Fake) -> None:
    """The stream ends as if all were well, but nothing says that it is complete."""
    async with fake.chat(headers=fault("early-end;at=4"), stream=True) as response:
        datas = events(await response.text())
    assert count_tokens(text_of(datas)) == 4
    assert datas[-1] != "[DONE]"
    assert all(data["choices"][0]["finish_reason"] is None for data in datas)
    async with fake.message(headers=fault("early-end"), stream=True) as response:
        assert {"message_delta", "message_stop"}.isdisjoint(kinds_of(events(await response.text())))


def kinds_of(datas: list[Any]) -> set[str]:
    """Return the types of the events of an Anthropic stream."""
    return {data["type"] for data in datas}


async def test_stall(fake: Fake) -> None:
    """A pause in the middle, in streams and in JSON bodies."""
    loop = asyncio.get_running_loop()
    for stream in (True, False):
        started = loop.time()
        async with fake.chat(headers=fault("stall;s=0.2;at=5"), stream=stream) as response:
            first = await response.content.readany()
            rest = await response.read()
        assert loop.time() - started >= 0.199
        async with asyncio.timeout(60), fake.chat(headers=fault("stall;s=600;at=5"), stream=stream) as response:
            assert await response.content.readany(), "what comes before the pause does not wait for its end"
        if stream:
            assert count_tokens(text_of(events(first.decode()))) == 5
            assert count_tokens(text_of(events((first + rest).decode()))) == 20
        else:
            assert json.loads(first + rest)["usage"]["completion_tokens"] == 20


async def test_malformed(fake: Fake) -> None:
    """One event, or the whole body, is not JSON."""
    for post in (fake.chat, fake.message):
        async with post(headers=fault("malformed"), stream=True) as response:
            text = await response.text()
        bad = [line for line in text.splitlines() if line.startswith("data: {") and not is_json(line[6:])]
        assert len(bad) == 1
        assert "message_stop" in text or "[DONE]" in text
        async with post(headers=fault("malformed")) as response:
            assert response.status == 200
            assert not is_json(await response.text())
    stream = await fake.openai.chat.completions.create(
        model="gpt-x", messages=HI, stream=True, extra_headers=fault("malformed")
    )
    with pytest.raises(json.JSONDecodeError):
        _ = [chunk async for chunk in stream]


def is_json(text: str) -> bool:
    """Return whether a text can be parsed."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


async def test_no_done(fake: Fake) -> None:
    """The finish reason comes, the end marker does not."""
    async with fake.chat(headers=fault("no-done"), stream=True) as response:
        datas = events(await response.text())
    assert datas[-1]["choices"][0]["finish_reason"] == "stop"
    async with fake.message(headers=fault("no-done"), stream=True) as response:
        kinds = kinds_of(events(await response.text()))
    assert "message_delta" in kinds
    assert "message_stop" not in kinds


async def test_error_first(fake: Fake) -> None:
    """A stream that begins, and ends, with an error."""
    async with fake.chat(headers=fault("error-first"), stream=True) as response:
        assert response.status == 200
        datas = events(await response.text())
    assert [data["error"]["type"] for data in datas] == ["server_error"]
    async with fake.message(headers=fault("error-first"), stream=True) as response:
        assert kinds_of(events(await response.text())) == {"error"}
    stream = await fake.openai.chat.completions.create(
        model="gpt-x", messages=HI, stream=True, extra_headers=fault("error-first")
    )
    with pytest.raises(openai.APIError):
        _ = [chunk async for chunk in stream]


async def test_error_later(fake: Fake) -> None:
    """The error comes in the middle; JSON answers have no middle and are all error."""
    async with fake.chat(headers=fault("error-later;at=6"), stream=True) as response:
        datas = events(await response.text())
    assert count_tokens(text_of(datas)) == 6
    assert "error" in datas[-1]
    stream = await fake.anthropic.messages.create(
        model="c", messages=HI, max_tokens=9, stream=True, extra_headers=fault("error-later")
    )
    with pytest.raises(anthropic.APIStatusError, match="Overloaded"):
        _ = [event async for event in stream]
    responses = await fake.openai.responses.create(
        model="gpt-x", input="hi", max_output_tokens=20, stream=True, extra_headers=fault("error-later;at=6")
    )
    kinds: list[Any] = [event async for event in responses]
    assert [event.sequence_number for event in kinds] == list(range(11))
    assert kinds[-1].type == "error"
    async with fake.chat(headers=fault("error-later")) as response:
        assert response.status == 200
        assert "error" in await response.json()


async def test_truncated(fake: Fake) -> None:
    """`length`, far below the cap."""
    answer = await fake.openai.chat.completions.create(
        model="gpt-x", messages=HI, max_tokens=200, extra_headers=fault("truncated")
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    message = await fake.anthropic.messages.create(
        model="c", messages=HI, max_tokens=200, extra_headers=fault("truncated")
    )
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 20)


async def test_content_filter_as_a_finish_reason(fake: Fake) -> None:
    """OpenAI with `finish`, Anthropic always."""
    answer = await fake.openai.chat.completions.create(
        model="gpt-x", messages=HI, max_tokens=20, extra_headers=fault("content-filter;finish")
    )
    assert answer.choices[0].finish_reason == "content_filter"
    response = await fake.openai.responses.create(
        model="gpt-x", input="hi", extra_headers=fault("content-filter;finish")
    )
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "content_filter"
    message = await fake.anthropic.messages.create(
        model="c", messages=HI, max_tokens=20, extra_headers=fault("content-filter")
    )
    assert message.stop_reason == "refusal"


async def test_empty(fake: Fake) -> None:
    """A valid answer without a word."""
    for stream in (False, True):
        async with fake.chat(headers=fault("empty"), stream=stream) as response:
            text = await response.text()
        assert '"finish_reason":"stop"' in text
        if stream:
            assert text_of(events(text)) == ""
    answer = await fake.openai.chat.completions.create(model="gpt-x", messages=HI, extra_headers=fault("empty"))
    assert answer.choices[0].message.content == ""
    message = await fake.anthropic.messages.create(model="c", messages=HI, max_tokens=9, extra_headers=fault("empty"))
    assert message.content == []


async def test_spend_limits_name_themselves(fake: Fake) -> None:
    """Anthropic's under 429 has a code in its details, and no time to retry."""
    async with fake.message(headers=fault("spend-limit")) as response:
        assert (await response.json())["error"]["details"] == {"error_code": "enforced_spend_limit_reached"}
        assert "retry-after" not in response.headers


@pytest.mark.parametrize("name", ["error-first;flat", "error-later;flat"])
async def test_an_error_without_a_member_error(fake: Fake, name: str) -> None:
    """In both dialects, streamed or not: its members stand at the top, and no event has a name."""
    for send in (fake.chat, fake.message):
        async with send(headers=fault(name), stream=True) as response:
            text = (await response.text()).rstrip().rpartition("\n")[2]
        said = json.loads(text.removeprefix("data: "))
        async with send(headers=fault(name)) as response:
            assert (response.status, await response.json()) == (200, said)
        assert (said["object"], "error" in said) == ("error", False)
        assert said["message"]


@pytest.mark.parametrize("name", ["error-first;billing", "error-later;billing"])
async def test_errors_in_a_stream_may_be_about_the_account(fake: Fake, name: str) -> None:
    """In both dialects, streamed or not."""
    for post, kind in ((fake.chat, "insufficient_quota"), (fake.message, "invalid_request_error")):
        for stream in (True, False):
            async with post(headers=fault(name), stream=stream) as response:
                assert response.status == 200
                said = events(await response.text())[-1] if stream else await response.json()
            assert said["error"]["type"] == kind


async def test_a_page_in_place_of_an_answer(fake: Fake) -> None:
    """As a proxy in between may send one, under 200."""
    async with fake.chat(headers=fault("html-200")) as response:
        assert (response.status, response.content_type) == (200, "text/html")


async def test_reasoning_only(fake: Fake) -> None:
    """Nothing to read, and all tokens spent on thinking."""
    answer = await fake.openai.chat.completions.create(
        model="gpt-x", messages=HI, max_tokens=20, extra_headers=fault("reasoning-only")
    )
    assert answer.choices[0].message.content == ""
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 20
    asked: Any = {"model": "c", "messages": HI, "max_tokens": 9, "extra_headers": fault("reasoning-only")}
    assert [block.type for block in (await fake.anthropic.messages.create(**asked)).content] == ["thinking"]
    async with fake.anthropic.messages.stream(**asked) as stream:
        assert [block.type for block in (await stream.get_final_message()).content] == ["thinking"]


async def test_prefill_is_refused_where_there_is_one(fake: Fake) -> None:
    """A request whose last message is the assistant's; any other is served."""
    begun: Any = [*HI, {"role": "assistant", "content": "{"}]
    for create, errors in (
        (fake.openai.chat.completions.create, openai.BadRequestError),
        (fake.anthropic.messages.create, anthropic.BadRequestError),
    ):
        asked: Any = {"model": "m", "max_tokens": 5, "extra_headers": fault("prefill")}
        with pytest.raises(errors, match="does not support"):
            await create(**asked, messages=begun)
        await create(**asked, messages=HI)


@pytest.mark.parametrize("name", sorted(set(FAULTS) - {"silence", "reset", "cut"}))
@pytest.mark.parametrize(
    "path", ["chat/completions", "completions", "responses", "messages", "embeddings", "moderations"]
)
async def test_every_fault_is_survived_on_every_endpoint(fake: Fake, name: str, path: str) -> None:
    """Whatever the combination, the server answers, and nothing stays in flight."""
    body = {
        "model": "m", "max_tokens": 8, "messages": HI, "input": "hi", "prompt": "hi", "stream": True, "n": 2,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    spelled = f"{name};s=0.01" if "s" in FAULTS[name] else name
    async with fake.http.post(f"{fake.url}/v1/{path}", json=body, headers=fault(spelled)) as response:
        assert response.status < 600
        await response.read()
    assert fake.record.in_flight == 0


@pytest.mark.parametrize("spelled", ["nonsense", "503;s=1", "stall;s=soon", "stall;s=-1", "stall;s=nan"])
async def test_unknown_faults_are_loud(fake: Fake, spelled: str) -> None:
    """A misspelled fault must not pass as a good answer."""
    async with fake.chat(headers=fault(spelled)) as response:
        assert response.status == 400
        assert "fault" in (await response.json())["error"]["message"]


async def test_a_fault_may_name_its_provider(start_fake: StartFake) -> None:
    """A gateway sends the same headers to every upstream it tries."""
    primary, backup = await start_fake(name="primary"), await start_fake(name="backup")
    statuses = []
    for fake in (primary, backup):
        async with fake.chat(headers=fault("503;provider=primary")) as response:
            statuses.append(response.status)
    assert statuses == [503, 200]


async def test_faults_can_be_posted(fake: Fake) -> None:
    """For a number of requests, for some models, until they are deleted."""
    status, up = await fake.admin("fault", {"fault": "503", "count": 2, "match": "gpt"})
    assert (status, up) == (200, [{"fault": "503", "count": 2, "match": "gpt"}])
    statuses = []
    for model in ("gpt-x", "other", "gpt-y", "gpt-x"):
        async with fake.chat(model=model) as response:
            statuses.append(response.status)
    assert statuses == [503, 200, 503, 200]
    await fake.admin("fault", {"fault": "500"})
    for _ in range(3):
        async with fake.chat() as response:
            assert response.status == 500
    assert (await fake.admin("fault", None, "GET"))[1] == [{"fault": "500", "count": None, "match": None}]
    await fake.admin("fault", None, "DELETE")
    async with fake.chat() as response:
        assert response.status == 200


@pytest.mark.parametrize("order", [{}, {"fault": "503", "count": 0}, {"fault": "503", "match": 5}, {"fault": "x"}, []])
async def test_bad_orders_are_refused(fake: Fake, order: Any) -> None:
    """The error says what is wrong."""
    status, body = await fake.admin("fault", order)
    assert status == 400
    assert body["error"]


def test_parsed_faults() -> None:
    """Parameters have defaults; flags may be spelled as such."""
    stall = parse_fault("stall; s=2 ;at=3;provider=p")
    assert (stall.name, stall.seconds("s"), stall.at(10), stall.at(2), stall.provider) == ("stall", 2.0, 3, 2, "p")
    assert parse_fault("cut").at(9) == 4
    assert parse_fault("slow-first-token").seconds("s") == 20.0
    assert parse_fault("slow-first-token;early-headers=0").flag("early-headers") is False
    with pytest.raises(Refused, match="bad_request"):
        parse_fault("")


def test_the_oldest_posted_fault_applies() -> None:
    """A later one waits until it is used up."""
    board = FaultBoard()
    board.post({"fault": "503", "count": 1})
    board.post({"fault": "500", "count": 1})
    taken = [board.take("m", "p") for _ in range(3)]
    assert [one.name if one else None for one in taken] == ["503", "500", None]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_reset_is_a_tcp_reset(run: Any) -> None:
    """Not a polite end of the connection, on either event loop."""

    async def story() -> None:
        async with running(FakeSettings(name="p", port=0)) as fake:
            host, _, port = fake.url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            body = b'{"model":"m","messages":[{"content":"hi"}]}'
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-fake-fault: reset\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            with pytest.raises(ConnectionResetError):
                await reader.read()
            writer.close()

    run(story())


@pytest.mark.parametrize("spelled", ["reset", "cut;at=3", "cut"])
def test_connections_break_on_uvloop_too(spelled: str) -> None:
    """The server runs on uvloop, whose transports buffer in their own way."""

    async def story() -> str:
        async with running(FakeSettings(name="p", port=0)) as fake, aiohttp.ClientSession() as http:
            body = {"model": "m", "max_tokens": 8, "messages": HI, "stream": "at" in spelled}
            try:
                async with http.post(f"{fake.url}/v1/chat/completions", json=body, headers=fault(spelled)) as response:
                    got, broken = await read_until_it_breaks(response)
            except aiohttp.ClientConnectionError:
                return ""
            assert broken
            return got

    got = uvloop.run(story())
    if "at" in spelled:
        assert count_tokens(text_of(events(got))) == 3
    else:
        assert ('"choices"' in got) == (spelled == "cut")
