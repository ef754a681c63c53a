"""The record, the counters, live settings, metrics, limits on the wire, and clients that go away."""

import asyncio
import math
import random
import re
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import aiohttp
import openai
import pytest
import uvloop
from conftest import Fake, StartFake
from hypothesis import given
from hypothesis import strategies as st

from extproc.fakes import FakeSettings, make_app, running, serve
from extproc.fakes.record import Record, Seen, headers_seen, most_at_once

HI: Any = [{"role": "user", "content": "hi"}]


async def test_a_request_is_recorded(fake: Fake) -> None:
    """Everything a test wants to know, and no credential."""
    headers = {"authorization": "Bearer sk-secret", "x-tidegate-tenant": "acme", "x-goog-api-key": "g-secret"}
    async with fake.chat(headers=headers, stream=True, stream_options={"include_usage": True}, priority=-3) as response:
        await response.read()
    report = await fake.report()
    (seen,) = report["requests"]
    assert (seen["path"], seen["model"], seen["stream"]) == ("/v1/chat/completions", "gpt-x", True)
    assert (seen["prompt_tokens"], seen["max_tokens"], seen["charged"], seen["output_tokens"]) == (8, 20, 28, 20)
    assert (seen["status"], seen["fault"], seen["aborted"]) == (200, None, False)
    assert (seen["include_usage"], seen["priority"]) == (True, -3)
    assert seen["time"] <= seen["admitted"] <= seen["finished"] <= report["now"]
    assert seen["headers"]["x-tidegate-tenant"] == "acme"
    assert "authorization" not in seen["headers"]
    assert len(seen["key"]) == 8
    assert len(seen["body_sha256"]) == 64
    assert seen["body_bytes"] == int(seen["headers"]["content-length"])
    assert "secret" not in str(report)


async def test_counters(start_fake: StartFake) -> None:
    """Served, refused, charged; the list can be cut, and all of it can be reset."""
    fake = await start_fake(tpm=60)
    for _ in range(3):
        async with fake.chat() as response:
            await response.read()
    report = await fake.report()
    assert (report["served"], report["refused_429"], report["statuses"]) == (2, 1, {"200": 2, "429": 1})
    assert (report["charged_tokens"], report["busiest_minute_tokens"]) == (56, 56)
    assert (report["in_flight"], report["max_in_flight"]) == (0, 1)
    async with fake.http.get(f"{fake.url}/admin/record?last=1") as response:
        assert [seen["status"] for seen in (await response.json())["requests"]] == [429]
    async with fake.http.get(f"{fake.url}/admin/record?last=x") as response:
        assert response.status == 400
    await fake.admin("record", None, "DELETE")
    report = await fake.report()
    assert (report["served"], report["charged_tokens"], report["requests"]) == (0, 0, [])


async def test_rate_limits_on_the_wire(start_fake: StartFake) -> None:
    """Headers on every answer; a 429 worded like the real one, for tokens, for requests, and for what never fits."""
    fake = await start_fake(tpm=6000, rpm=60)
    async with fake.chat(max_tokens=4992) as response:
        assert response.headers["x-ratelimit-limit-tokens"] == "6000"
        assert 1000 <= int(response.headers["x-ratelimit-remaining-tokens"]) < 1500
        assert response.headers["x-ratelimit-remaining-requests"] == "59"
        assert 40 < float(response.headers["x-ratelimit-reset-tokens"].removesuffix("s")) <= 50
    with pytest.raises(openai.RateLimitError) as caught:
        await fake.openai.chat.completions.create(model="gpt-x", messages=HI, max_tokens=1992)
    assert caught.value.code == "rate_limit_exceeded"
    told = re.search(
        r"\(TPM\): Limit 6000, Used (\d+), Requested 2000\. Please try again in ([\d.]+)s\.", str(caught.value)
    )
    assert told is not None
    # The bucket refills while the requests travel.
    assert 4500 < int(told[1]) <= 5000
    wait_ms = int(caught.value.response.headers["retry-after-ms"])
    assert wait_ms / 1000 == float(told[2])
    assert 5000 < wait_ms <= 10_000
    assert int(caught.value.response.headers["retry-after"]) == math.ceil(wait_ms / 1000)
    assert "x-ratelimit-remaining-tokens" in caught.value.response.headers
    async with fake.chat(max_tokens=7000) as response:
        assert response.status == 429
        assert "retry-after" not in response.headers
        assert "Request too large" in (await response.json())["error"]["message"]
    few = await start_fake(rpm=6, burst_s=10)
    async with few.chat(), few.chat() as response:
        assert response.status == 429
        assert (await response.json())["error"]["type"] == "requests"


async def test_actual_accounting_gives_back(start_fake: StartFake) -> None:
    """What was charged for output that never came is returned before the answer ends."""
    fake = await start_fake(tpm=6000, accounting="actual", output_tokens=10)
    async with fake.chat(max_tokens=5000) as response:
        await response.read()
    assert fake.record.requests[-1].charged == 18
    assert (await fake.report())["charged_tokens"] == 18
    async with fake.chat(max_tokens=5000) as response:
        assert response.status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_is_noticed_at_once(start_fake: StartFake, *, stream: bool) -> None:
    """In the middle of a stream, and while a JSON answer is prepared; what was generated is known."""
    fake = await start_fake(output_tokens_per_s=1)
    loop = asyncio.get_running_loop()
    if stream:
        response = await fake.chat(max_tokens=1000, stream=True)
        await response.content.readany()
        response.close()
    else:
        task = asyncio.create_task(fake.http.post(f"{fake.url}/v1/completions", json={"model": "m", "prompt": "hi"}))
        await fake.record.until(lambda record: record.in_flight == 1)
        task.cancel()
    started = loop.time()
    await fake.record.until(lambda record: record.in_flight == 0)
    assert loop.time() - started < 60
    seen = fake.record.requests[-1]
    assert seen.aborted
    assert 1 <= seen.output_tokens < 50
    report = await fake.report()
    assert (report["aborted"], report["served"], report["max_in_flight"]) == (1, 0, 0)
    assert report["max_in_flight_with_aborted"] == 1


async def test_the_slot_is_free_when_the_client_has_the_answer(start_fake: StartFake) -> None:
    """A gateway that sends the next request on the end of the last one never sees two in flight."""
    fake = await start_fake(concurrency=1)
    for stream in (False, True) * 10:
        async with fake.chat(stream=stream) as response:
            assert response.status == 200
            await response.read()
    assert (await fake.report())["max_in_flight"] == 1


async def test_concurrency(start_fake: StartFake) -> None:
    """Above it 503, unless there is a queue."""
    fake = await start_fake(concurrency=2, base_latency_s=0.05)
    assert sorted(await statuses_at_once(fake, 4)) == [200, 200, 503, 503]
    assert (await fake.report())["max_in_flight"] == 2
    patient = await start_fake(concurrency=2, queue=None, base_latency_s=0.02)
    assert await statuses_at_once(patient, 6) == [200] * 6
    assert patient.record.in_flight == 0


async def statuses_at_once(fake: Fake, n: int) -> list[int]:
    """Send some requests together; return their statuses."""

    async def one() -> int:
        async with fake.chat() as response:
            await response.read()
            return int(response.status)

    return list(await asyncio.gather(*(one() for _ in range(n))))


async def test_a_waiter_that_leaves_frees_its_place(start_fake: StartFake) -> None:
    """Whoever goes away while waiting is forgotten."""
    fake = await start_fake(concurrency=1, queue=1, base_latency_s=0.1)
    running_one = asyncio.create_task(statuses_at_once(fake, 1))
    await fake.record.until(lambda record: record.in_flight == 1)
    waiter = asyncio.create_task(statuses_at_once(fake, 1))
    await fake.record.until(lambda record: record.in_flight == 2)
    waiter.cancel()
    await fake.record.until(lambda record: record.in_flight == 1)
    assert await statuses_at_once(fake, 1) == [200]
    assert await running_one == [200]


async def test_preemptions_delay_and_are_counted(start_fake: StartFake) -> None:
    """A cache that overflows costs time; all answers come in the end."""
    fake = await start_fake(kv_tokens=100, queue=None, output_tokens_per_s=400, prompt_tokens_per_s=10_000)

    async def one() -> str:
        async with fake.chat(max_tokens=80, stream=True) as response:
            return str(await response.text())

    texts = await asyncio.gather(*(one() for _ in range(4)))
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert metric(await metrics(fake), "num_preemptions_total") > 0


async def metrics(fake: Fake) -> str:
    """Return the metrics page."""
    async with fake.http.get(f"{fake.url}/metrics") as response:
        return str(await response.text())


def metric(page: str, name: str) -> float:
    """Return one value of the page."""
    (line,) = (line for line in page.splitlines() if line.startswith(f"vllm:{name}{{"))
    return float(line.rpartition(" ")[2])


async def test_metrics(start_fake: StartFake) -> None:
    """The page looks like vLLM's."""
    fake = await start_fake(kv_tokens=1000, models=("qwen",))
    async with fake.chat(model="qwen") as response:
        await response.read()
    silent = asyncio.create_task(fake.http.post(f"{fake.url}/v1/chat/completions", **silence("qwen")))
    await fake.record.until(lambda record: record.in_flight == 1)
    page = await metrics(fake)
    assert 'vllm:num_requests_running{engine="0",model_name="qwen"} 1.0' in page
    assert metric(page, "num_requests_waiting") == 0
    assert metric(page, "kv_cache_usage_perc") == pytest.approx(0.008)
    assert (metric(page, "prompt_tokens_total"), metric(page, "generation_tokens_total")) == (16, 20)
    await fake.admin("settings", {"kv_usage": 0.9})
    assert metric(await metrics(fake), "kv_cache_usage_perc") == 0.9
    silent.cancel()
    async with fake.http.get(f"{fake.url}/health") as response:
        assert response.status == 200


def silence(model: str) -> dict[str, Any]:
    """Return a request that is never answered."""
    return {
        "json": {"model": model, "max_tokens": 20, "messages": HI},
        "headers": {"x-fake-fault": "silence"},
    }


async def test_live_settings(start_fake: StartFake) -> None:
    """Limits, speed and models change while the server runs; nonsense changes nothing."""
    fake = await start_fake(key="sk-secret")
    status, now = await fake.admin("settings", {"tpm": 60_000, "output_tokens": 3, "models": ["gpt-x"]})
    assert (status, now["tpm"], now["key"], now["models"]) == (200, 60_000, "(set)", ["gpt-x"])
    answer = await fake.openai.chat.completions.create(model="gpt-x", messages=HI)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    with pytest.raises(openai.NotFoundError):
        await fake.openai.chat.completions.create(model="other", messages=HI)
    wrong: list[Any] = [
        {"name": "x"}, {"nonsense": 1}, {"tpm": 0}, {"tpm": "many"}, {"accounting": "none"}, [],
    ]  # fmt: skip
    for bad in wrong:
        status, error = await fake.admin("settings", bad)
        assert status == 400
        assert error["error"]
    assert (await fake.admin("settings", None, "GET"))[1]["tpm"] == 60_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""}, {"port": -1}, {"port": 70_000}, {"models": ()}, {"models": "gpt"}, {"rpm": 0}, {"burst_s": 0},
        {"tokens_per_event": 0}, {"cached_share": 1.5}, {"kv_usage": 2}, {"output_tokens_per_s": 0}, {"queue": -1},
        {"base_latency_s": -1},
    ],
)  # fmt: skip
def test_settings_fail_at_birth(wrong: dict[str, Any]) -> None:
    """What cannot be served is refused with the name of the setting."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FakeSettings(**{"name": "p", "port": 0, **wrong})


async def test_serve_tells_its_url_and_ends_when_cancelled() -> None:
    """`serve` runs until it is stopped."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(FakeSettings(name="p", port=0), url.set_result))
    async with aiohttp.ClientSession() as http, http.get(f"{await url}/health") as response:
        assert response.status == 200
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_run_ends_when_it_is_told_to() -> None:
    """`run` serves until SIGTERM, then stops cleanly."""
    code = (
        "from extproc.fakes import FakeSettings, run\n"
        "run(FakeSettings(name='p', port=0), lambda url: print(url, flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with urllib.request.urlopen(f"{url}/health") as response:  # noqa: S310
            assert response.status == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=120) == 0


def test_make_app_needs_no_loop() -> None:
    """The application can be made anywhere and run by anyone."""
    assert make_app(FakeSettings(name="p", port=0)).router.routes()


def test_aborts_are_noticed_on_uvloop_too() -> None:
    """The server runs on uvloop."""

    async def story() -> None:
        async with (
            running(FakeSettings(name="p", port=0, output_tokens_per_s=50)) as fake,
            aiohttp.ClientSession() as http,
        ):
            body = {"model": "m", "max_tokens": 1000, "messages": HI, "stream": True}
            response = await http.post(f"{fake.url}/v1/chat/completions", json=body)
            await response.content.readany()
            response.close()
            await asyncio.wait_for(fake.provider.record.until(lambda record: record.in_flight == 0), 60)
            assert fake.provider.record.requests[-1].aborted

    uvloop.run(story())


def test_the_busiest_minute_slides() -> None:
    """Charges are summed over any 60 seconds, not over minutes of the clock."""
    record = Record(10)
    for now, tokens in [(0.0, 10), (30.0, 20), (59.0, 5), (61.0, 40), (200.0, 1)]:
        seen = Seen(now, now, "1", "/", {}, None)
        record.arrived(seen)
        record.admitted(seen, tokens, now)
        record.finished(seen, now)
        record.ended(seen, now)
    assert record.report(200.0)["busiest_minute_tokens"] == 65


def test_the_record_is_bounded_and_a_reset_keeps_what_flies() -> None:
    """Old requests fall out; a request in flight is still there after a reset."""
    record = Record(2)
    seen = [Seen(now, now, str(now), "/", {}, None) for now in range(3)]
    for one in seen:
        record.arrived(one)
    assert record.requests == seen[1:]
    record.admitted(seen[2], 1, 3.0)
    record.reset()
    assert record.requests == [seen[2]]
    assert record.report(4.0)["max_in_flight"] == 1


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=30))
def test_most_at_once_agrees_with_counting(spans: list[tuple[int, int]]) -> None:
    """The sweep finds the same as looking at every moment."""
    ends = [(float(start), float(start + length)) for start, length in spans]
    by_counting = max((sum(start <= at < end for start, end in ends) for at in range(41)), default=0)
    assert most_at_once(ends) == by_counting


@pytest.mark.parametrize("seed", range(20))
def test_the_proof_of_concurrency_forgets_nothing(seed: int) -> None:
    """Over thousands of requests, some of them aborted, the number is the one that all spans together would give."""
    chance = random.Random(seed)
    record, now = Record(10), 0.0
    flying: list[Seen] = []
    spans: list[tuple[float, float]] = []
    for number in range(6000):
        now += chance.random()
        seen = Seen(now, now, str(number), "/", {}, None)
        record.admitted(seen, 1, now)
        flying.append(seen)
        while len(flying) > chance.choice((0, 5, 9)):
            ended = flying.pop(chance.randrange(len(flying)))
            ended.aborted = chance.random() < 0.2
            now += chance.random()
            record.ended(ended, now)
            if not ended.aborted:
                spans.append((ended.admitted or 0.0, now))
    running = [(seen.admitted or 0.0, now) for seen in flying]
    assert record.report(now)["max_in_flight"] == most_at_once([*spans, *running])


def test_credentials_are_not_recorded() -> None:
    """Secrets in headers become fingerprints; idempotency keys are none."""
    kept = headers_seen({"X-Auth-Token": "s3cret", "x-idempotency-key": "abc", "Cookie": "s3cret", "Api-Key": "s3cret"})
    assert kept == {"x-auth-token": kept["x-auth-token"], "x-idempotency-key": "abc"}
    assert kept["x-auth-token"].startswith("sha256:")
