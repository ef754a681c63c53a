"""One request of a replay, against a server that answers in every way a gateway may."""

import asyncio
import json
import time

import aiohttp
import pytest
from aiohttp import web

from extproc.fakes import FakeSettings, count_tokens, running
from extproc.sim.client import Client, body_of
from extproc.sim.figures import End
from extproc.sim.plan import Planned

CHUNK = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"details":{"x":1}}}\n\n'
DONE = b"data: [DONE]\n\n"


def planned(*, stream=True, tenant=None, prompt_tokens=50):
    return Planned(3, 0.0, prompt_tokens, 20, "P0", tenant, stream)


@pytest.fixture
async def ask():
    """Send one request to a handler, and give what came of it."""
    runners = []

    async def send(handler, request=None, key=None, timeout_s=60.0):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions"
        request = request or planned()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(timeout_s)) as session:
            client = Client(session, url, key, "x-tenant")
            return await client.send(request, body_of(request, "gpt-5"), time.monotonic() - 0.25)

    yield send
    for runner in runners:
        await runner.cleanup()


def stream(*pieces, status=200, end=True, **headers):
    async def handler(request):
        response = web.StreamResponse(status=status, headers={"content-type": "text/event-stream", **headers})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.01)
        if not end:
            request.transport.close()
        return response

    return handler


def refusal(status, **headers):
    async def handler(_):
        return web.json_response({"error": {}}, status=status, headers=headers)

    return handler


async def test_a_stream_is_read_to_its_end(ask):
    """First word, usage, what the gateway tells in headers, and how late it was sent."""
    opening = CHUNK.replace(b"%b", b"")
    headers = {"x-tidegate-queue-ms": "1250", "x-tidegate-upstream": "primary"}
    began = time.monotonic()
    result = await ask(stream(opening, CHUNK % b"one", CHUNK % b"two", USAGE + DONE, **headers))
    took_s = time.monotonic() - began
    assert (result.end, result.word, result.status, result.upstream) == (End.SERVED, "", 200, "primary")
    assert (result.waited_s, result.prompt_tokens, result.output_tokens) == (1.25, 7, 3)
    assert 0.01 <= result.first_token_s < result.total_s
    assert 0.249 <= result.lag_s <= 0.25 + took_s - result.total_s


async def test_the_first_word_and_the_end_may_be_cut_anywhere(ask):
    """Chunks of a network are not events."""
    whole = CHUNK.replace(b"%b", b"") + CHUNK % b"one" * 100 + USAGE + DONE
    result = await ask(stream(*(whole[i : i + 61] for i in range(0, len(whole), 61))))
    assert result.end is End.SERVED
    assert result.first_token_s is not None
    assert result.output_tokens == 3


@pytest.mark.parametrize(
    ("handler", "word"),
    [
        (stream(CHUNK % b"one"), "cut"),
        (stream(CHUNK % b"one", end=False), "cut"),
        (stream(CHUNK % b"one", b'data: {"error":{"message":"sorry"}}\n\n'), "error event"),
        (refusal(429), "http 429"),
        (refusal(503, **{"x-tidegate-reason": "upstream_failed"}), "upstream_failed"),
        (refusal(503, **{"x-tidegate-reason": "admission_unavailable"}), "admission_unavailable"),
    ],
)
async def test_what_is_no_whole_answer_and_no_shedding_failed(ask, handler, word):
    """A provider's own 429 that comes through is a failure, not a decision of the gateway."""
    result = await ask(handler)
    assert (result.end, result.word) == (End.FAILED, word)


async def test_a_refusal_of_ours_is_shed_by_its_reason(ask):
    """Whatever its status."""
    result = await ask(refusal(503, **{"x-tidegate-reason": "lane_full"}))
    assert (result.end, result.word, result.status) == (End.SHED, "lane_full", 503)


async def test_an_answer_that_does_not_come_is_given_up(ask):
    """After the session's own limit."""

    async def never(_):
        await asyncio.sleep(60)

    result = await ask(never, timeout_s=0.1)
    assert (result.end, result.word) == (End.FAILED, "timeout")


async def test_nobody_there():
    """Is told apart from a connection that broke."""
    async with aiohttp.ClientSession() as session:
        client = Client(session, "http://127.0.0.1:9/v1", None, "x-tenant")
        result = await client.send(planned(), b"", time.monotonic())
    assert (result.end, result.word) == (End.FAILED, "not connected")


async def test_a_json_answer_has_usage_but_no_first_token(ask):
    """It comes whole."""

    async def handler(_):
        return web.json_response({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}})

    result = await ask(handler, planned(stream=False))
    assert (result.end, result.first_token_s, result.prompt_tokens, result.output_tokens) == (End.SERVED, None, 4, 2)


async def test_headers_name_lane_tenant_and_key(ask):
    """The tenant only where there is one."""
    seen = []

    async def handler(request):
        seen.append(request.headers)
        return web.json_response({})

    await ask(handler, planned(tenant="chat"), key="sk-1")
    await ask(handler, planned())
    assert (seen[0]["x-tidegate-priority"], seen[0]["x-tenant"], seen[0]["authorization"]) == (
        "P0",
        "chat",
        "Bearer sk-1",
    )
    assert "x-tenant" not in seen[1]
    assert "authorization" not in seen[1]


async def test_prompts_are_as_long_as_the_trace_says():
    """By the count of the fake provider, chat template included; every request has a text of its own."""
    async with running(FakeSettings(name="fake", port=0)) as fake, aiohttp.ClientSession() as session:
        client = Client(session, f"{fake.url}/v1/chat/completions", None, "x-tenant")
        for request in (planned(prompt_tokens=500), planned(prompt_tokens=8), planned(stream=False)):
            result = await client.send(request, body_of(request, "gpt-5"), time.monotonic())
            assert (result.prompt_tokens, result.output_tokens) == (request.prompt_tokens, 20)
    bodies = [body_of(Planned(i, 0, 100, 1, "P0", None, stream=True), "m") for i in range(50)]
    texts = {json.loads(body)["messages"][0]["content"] for body in bodies}
    assert len(texts) == 50
    assert {count_tokens(text) for text in texts} == {93}
