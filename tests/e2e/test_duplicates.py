"""A request that is sent again is served once: clients that leave and come back, and connections that outlive them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

import aiohttp
import anthropic
import httpx
import openai
import pytest

from extproc.stack import Stack
from tests.e2e.conftest import PATIENCE_S, books_balance, chat
from tests.e2e.doubles import CHAT, MESSAGES, NEVER_OPENS, crowd, forget, running, until, waiting

FRESH = ("fresh-0", "fresh-1", "fresh-2", "fresh-3", "fresh-4")
QUICK = {"first_token_s": 0.01, "output_tokens_per_s": 2000}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Upstreams that serve one request at a time, and one that serves many.

    Some tests need an upstream of which nothing is known, or they would be refused by a forecast and not wait.
    """
    with running(
        tmp_path_factory.mktemp("one"),
        upstreams={
            **{name: {"concurrency": 1, "breaker": NEVER_OPENS, "fake": QUICK} for name in ("one", *FRESH)},
            "many": {"concurrency": 50, "breaker": NEVER_OPENS, "fake": QUICK},
        },
        routes=[
            *({"models": [name], "chain": [name], "acknowledge_unowned": True} for name in ("many", *FRESH)),
            {"models": ["*"], "chain": ["one"], "acknowledge_unowned": True},
        ],
        lanes={"P0": {"max_wait_s": 4.0}, "P1": {"max_wait_s": 30.0}, "short": {"max_wait_s": 1.0}},
        tenants={"default": {"lanes": ["P0", "P1", "short"]}, "team": {"lanes": ["P1", "short"]}},
        identity={"tenant": "header:x-team"},
        retries={"share": 0.1, "least_per_s": 0.2},
    ) as stack:
        yield stack


@pytest.fixture(autouse=True)
def clean(one: Stack) -> Iterator[None]:
    """Every test begins and ends with an idle gateway and empty records."""
    forget(one)
    yield
    books_balance(one)


@contextlib.contextmanager
def busy(stack: Stack, name: str) -> Iterator[None]:
    """The one place is taken until the block ends."""
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        fault = {"x-fake-fault": EARLY}
        with http.stream("POST", CHAT, json=chat("busy", stream=True, model=name), headers=fault) as answer:
            assert answer.status_code == 200
            yield


def counted(stack: Stack, name: str) -> int:
    """A count of the tally, of all together."""
    return int(sum(stack.state()["tally"][name].values()))


def overlaps(requests: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """Where a copy of a request began before the one before it had ended, by the provider's clock."""
    found = []
    for body in {each["body_sha256"] for each in requests}:
        same = [each for each in requests if each["body_sha256"] == body and each["admitted"] is not None]
        spans = sorted((each["admitted"], each["finished"] or inf) for each in same)
        found += [(begun, ended, later) for (begun, ended), (later, _) in pairwise(spans) if ended > later]
    return found


def show(capsys: pytest.CaptureFixture[str], line: str) -> None:
    """Print a figure past pytest's capture."""
    with capsys.disabled():
        print(f"\n  {line}")  # noqa: T201 - a figure for people


@pytest.mark.parametrize(("name", "stream"), [("fresh-0", False), ("fresh-1", True)])
def test_the_openai_sdk_gets_its_answer_after_it_lost_patience(one: Stack, name: str, *, stream: bool) -> None:
    """Its first attempt is held and times out; the second stands where the first stood, before who came between."""
    client = openai.OpenAI(base_url=f"{one.url}/v1", api_key="sk-a", max_retries=3, timeout=2)
    other = openai.OpenAI(base_url=f"{one.url}/v1", api_key="sk-b", max_retries=0, timeout=60)
    retried = counted(one, "retried")

    def ask() -> Any:
        answer = client.chat.completions.create(**chat("impatient" * 99, model=name), stream=stream)  # type: ignore[call-overload]
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer) if stream else answer.choices

    with client, other, ThreadPoolExecutor(2) as pool:
        with busy(one, name):
            asked = pool.submit(ask)
            until(lambda: waiting(one) == 1)
            between_them = pool.submit(other.chat.completions.create, **chat("between", model=name))
            until(lambda: counted(one, "retried") > retried and waiting(one) == 2)
        assert asked.result(60)
        assert between_them.result(60).choices
    _, copy, between = sorted(one.record(name)["requests"], key=lambda each: each["admitted"])
    assert copy["body_bytes"] > between["body_bytes"]
    assert int(copy["headers"]["x-stainless-retry-count"]) >= 1


def test_the_anthropic_sdk_gets_its_answer_too(one: Stack) -> None:
    """The same in its dialect."""
    client = anthropic.Anthropic(base_url=one.url, api_key="sk-a", max_retries=3, timeout=1.5)
    ask: dict[str, Any] = {"model": "fresh-2", "max_tokens": 16, "messages": [{"role": "user", "content": "impatient"}]}
    retried = counted(one, "retried")
    with client, ThreadPoolExecutor(1) as pool:
        with busy(one, "fresh-2"):
            asked = pool.submit(lambda: [event.type for event in client.messages.create(**ask, stream=True)])
            until(lambda: counted(one, "retried") > retried and waiting(one) == 1)
        assert asked.result(60)[-1] == "message_stop"
    _, copy = one.record("fresh-2")["requests"]
    assert copy["path"] == MESSAGES
    assert int(copy["headers"]["x-stainless-retry-count"]) >= 1


# Connections that outlive their clients, as some proxies keep them: the first copy is still here.


class Copies:
    """Bare requests whose connections stay open."""

    def __init__(self, session: aiohttp.ClientSession, stack: Stack) -> None:
        self._session = session
        self._stack = stack

    def send(
        self, body: Mapping[str, Any], path: str = CHAT, answer: Answer | None = None, **headers: str
    ) -> asyncio.Task[Answer]:
        """Begin a request. answer: where to keep what comes, to be looked at meanwhile."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return asyncio.create_task(self._send(json.dumps(body).encode(), path, named, answer or Answer()))

    async def _send(self, body: bytes, path: str, headers: Mapping[str, str], answer: Answer) -> Answer:
        headers = {"content-type": "application/json", **headers}
        try:
            async with self._session.post(self._stack.url + path, data=body, headers=headers) as got:
                answer.status, answer.headers = got.status, dict(got.headers)
                async for chunk in got.content.iter_any():
                    answer.body += chunk
                answer.whole = True
        except aiohttp.ClientError:
            pass
        answer.ended = time.monotonic()
        return answer


class Answer:
    """What came back. status 0: nothing; whole: to its end."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.body = b""
        self.whole = False
        self.ended = 0.0


@contextlib.asynccontextmanager
async def copies(stack: Stack) -> AsyncIterator[Copies]:
    """Connections without number."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Copies(session, stack)


async def reached(stack: Stack, holds: Callable[[dict[str, Any]], bool], within_s: float = PATIENCE_S) -> None:
    """Wait for a state of the service."""
    end = time.monotonic() + within_s
    while not holds(state := await asyncio.to_thread(stack.state)):
        assert time.monotonic() < end, state
        await asyncio.sleep(0.01)


def lines(state: dict[str, Any]) -> int:
    return sum(lane["requests"] for lane in state["waiting"].values())


SLOW = "slow-first-token;s=60"
EARLY = "slow-first-token;s=60;early-headers"
SOON_S = 5.0
"""Long before any of these would have ended by itself, on whatever machine."""


@pytest.mark.parametrize("named", [False, True])
async def test_the_retry_of_a_held_request_takes_its_place(one: Stack, *, named: bool) -> None:
    """The first copy is refused at once and for good; the provider sees one request."""
    key = {"idempotency_key": "once"} if named else {}
    async with copies(one) as clients:
        blocker = clients.send(chat("blocker", stream=True), x_fake_fault=EARLY)
        await reached(one, lambda state: state["flying"] == 1)
        first = clients.send(chat("held" * 100), **key)
        await reached(one, lambda state: lines(state) == 1)
        second = clients.send(chat("held" * 100), x_stainless_retry_count="0" if named else "1", **key)
        began = time.monotonic()
        refused = await first
        assert refused.ended - began < SOON_S
        assert (refused.status, refused.headers["x-tidegate-reason"]) == (503, "evicted")
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers
        assert not second.done()
        blocker.cancel()
        assert (await second).status == 200
    assert len(one.record("one")["requests"]) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_the_retry_of_a_running_request_ends_it_first(
    one: Stack, capsys: pytest.CaptureFixture[str], *, stream: bool, begun: bool
) -> None:
    """Its upstream's work stops at once, and only then the retry goes, in the one place there is.

    The first copy's client, if it is still there, gets a refusal, or a broken connection where its answer has begun.
    """
    fault = "slow-first-token;s=0.05;early-headers" if begun else SLOW
    body = chat("running" * 200 + f"{stream}{begun}", stream=stream, max_tokens=20_000 if begun else 16)
    before, came = one.state()["tally"], Answer()
    async with copies(one) as clients:
        first = clients.send(body, answer=came, x_fake_fault=fault)
        await reached(one, lambda _: one.record("one")["in_flight"] == 1 and bool(came.body or not (begun and stream)))
        began = time.monotonic()
        second = clients.send(body, x_stainless_retry_count="1")
        answer = await first
        ended_s = answer.ended - began
        if begun and stream:
            assert (answer.status, answer.whole) == (200, False)
        else:
            assert (answer.status, answer.headers["x-tidegate-reason"]) == (503, "evicted")
            assert answer.headers["x-should-retry"] == "false"
        assert ((await second).status, (await second).whole) == (200, True)
        record = await asyncio.to_thread(one.record, "one")
    old, new = record["requests"]
    assert (old["aborted"], new["aborted"]) == (True, False)
    assert ended_s < SOON_S
    assert overlaps([old, new]) == []
    assert record["max_in_flight_with_aborted"] == 1
    books_balance(one)
    tally = one.state()["tally"]
    assert (tally["evicted"], tally["client_gone"]) == (before["evicted"] + 1, before["client_gone"])
    assert tally["failed_attempts"] == before["failed_attempts"]
    assert one.state()["breakers"]["one"]["failures"] == 0
    gap_ms = (new["admitted"] - old["finished"]) * 1000
    show(capsys, f"stream {stream}, begun {begun}: ended after {ended_s * 1000:.0f} ms, retried {gap_ms:.1f} ms later")


async def test_the_same_prompt_several_times_is_served_several_times(one: Stack) -> None:
    """Who asks for several answers to one question gets them, at once."""
    async with copies(one) as clients:
        asked = [clients.send(chat("sample", model="many"), x_fake_fault="slow-first-token;s=0.5") for _ in range(4)]
        assert [(await task).status for task in asked] == [200] * 4
    record = one.record("many")
    assert record["max_in_flight"] == 4
    assert record["served"] == 4


async def test_a_prompt_of_another_key_is_another_request(one: Stack) -> None:
    """The same body and a retry count, but from somebody else: nobody's request is ended."""
    async with copies(one) as clients:
        mine = clients.send(chat("same", model="many"), authorization="Bearer a", x_fake_fault="slow-first-token;s=0.5")
        await reached(one, lambda state: state["flying"] == 1)
        theirs = clients.send(chat("same", model="many"), authorization="Bearer b", x_stainless_retry_count="1")
        assert [(await mine).status, (await theirs).status] == [200, 200]


async def test_a_storm_of_impatient_clients_never_runs_two_copies(
    one: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients give up and retry, leaving or not leaving their first connection: no request is ever worked on twice."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    show(capsys, f"seed {seed}")

    async def impatient(clients: Copies, number: int) -> str:
        body, open_ones = chat(f"storm {number}", model="many", stream=bool(number % 2), max_tokens=400), []
        for attempt in range(4):
            fault = f"slow-first-token;s={rng.choice([0.05, 0.3, 1.5])}"
            task = clients.send(body, x_stainless_retry_count=str(attempt), x_fake_fault=fault)
            done, _ = await asyncio.wait([task], timeout=rng.uniform(0.2, 1.0))
            if done:
                return "served" if task.result().status == 200 and task.result().whole else "refused"
            if rng.random() < 0.5:
                task.cancel()
                await asyncio.sleep(0.05)
            open_ones.append(task)
        await asyncio.wait(open_ones)
        return "late"

    async with copies(one) as clients:
        ends = await asyncio.gather(*(impatient(clients, number) for number in range(60)))
    record = one.record("many")
    assert overlaps(record["requests"]) == []
    assert record["served"] > 10
    show(
        capsys,
        f"{len(record['requests'])} attempts of 60 requests, {record['aborted']} of them ended early, "
        f"{ends.count('served')} served before their clients lost patience",
    )


# Retries that are no copies: their budget, and their promised time.


async def test_retries_beyond_their_budget_are_refused_while_first_requests_wait(one: Stack) -> None:
    """A storm is shed first: at once, with a time to come again, and saying why."""
    async with copies(one) as clients, crowd(one) as others:
        blocker = clients.send(chat("blocker", stream=True, model="fresh-3"), x_fake_fault=EARLY)
        await reached(one, lambda state: state["flying"] == 1)
        again = {"x_stainless_retry_count": "1", "x_team": "team"}
        asks = [others.ask(chat(f"again {n}", model="fresh-3"), **again) for n in range(12)]
        retries = [asyncio.create_task(ask) for ask in asks]
        first = [clients.send(chat(f"first {n}", model="fresh-3"), x_team="team") for n in range(5)]
        await reached(
            one, lambda state: lines(state) + sum(task.done() for task in retries) == len(retries) + len(first)
        )
        done = [task for task in retries if task.done()]
        pending = [task for task in retries if not task.done()]
        assert not any(task.done() for task in first)
        assert 8 <= len(done) <= 11
        for task in done:
            answer = task.result()
            assert (answer.status, answer.reason) == (503, "lane_full")
            assert float(answer.headers["retry-after-ms"]) >= 1000
            assert "retry budget" in json.loads(answer.body)["error"]["message"]
        blocker.cancel()
        assert [(await task).status for task in first] == [200] * 5
        assert [(await task).status for task in pending] == [200] * len(pending)


def test_a_retry_at_the_promised_time_is_served(one: Stack) -> None:
    """The SDK obeys `retry-after-ms`; what was promised is kept, though the tenant's retries are used up."""
    client = openai.OpenAI(base_url=f"{one.url}/v1", api_key="sk-a", max_retries=4, timeout=30)
    refused = counted(one, "refused")
    ask = partial(
        client.chat.completions.create,
        **chat("promised" * 50, model="fresh-4"),
        extra_headers={"x-tidegate-priority": "short", "x-team": "team"},
    )
    with client, ThreadPoolExecutor(1) as pool:
        with busy(one, "fresh-4"):
            asked = pool.submit(ask)
            until(lambda: counted(one, "refused") > refused)
        assert asked.result(60).choices
    _, copy = one.record("fresh-4")["requests"]
    assert int(copy["headers"]["x-stainless-retry-count"]) >= 1


def test_a_retry_after_an_upstream_failed_is_a_new_request(one: Stack) -> None:
    """The provider fails, the SDK comes again and is served; nothing is left of the first."""
    upstream = one.fakes["one"]
    fault = {"fault": "503", "count": 1}
    httpx.post(f"http://{upstream.host}:{upstream.port}/admin/fault", json=fault).raise_for_status()
    with openai.OpenAI(base_url=f"{one.url}/v1", api_key="sk-a", max_retries=2, timeout=30) as client:
        assert client.chat.completions.create(**chat("fails once")).choices
