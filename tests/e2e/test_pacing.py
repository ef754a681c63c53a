"""Pacing from what the provider says, through a real Envoy: limits smaller than configured, others on the same account,
refusals with a word how long, limits learned from nothing, and lanes that send evenly.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from extproc.stack import Stack
from tests.e2e.conftest import Gate, books_balance, chat
from tests.e2e.doubles import ANSWER, CHAT, Crowd, Upstream, crowd, forget, running, tell, until

HTTP = httpx.Client(timeout=30)
TPM, BURST_S = 60_000, 10.0
STRICT = {"first_token_s": 0.02, "output_tokens_per_s": 5000, "burst_s": BURST_S}
ONE = {"limits": [{"tpm": TPM, "burst_s": BURST_S}], "burn": None, "fake": STRICT}
"""Nothing of it is reserved for the best lane: what can be used is all that there is."""
LANES = {
    "P0": {"max_wait_s": 1.0},
    "P1": {"max_wait_s": 20.0},
    "P2": {"max_wait_s": 60.0, "when_busy": "hold", "pacing": "smooth"},
}


@pytest.fixture(scope="module")
def metered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One account of 60,000 tokens per minute, as configured."""
    with running(
        tmp_path_factory.mktemp("metered"),
        upstreams={"one": copy.deepcopy(ONE)},
        lanes=LANES,
        other_endpoints=None,
    ) as stack:
        yield stack


@pytest.fixture
def alone(metered: Stack) -> Iterator[Stack]:
    """The same with a provider that has forgotten everything, and room for a new start."""
    tell(metered, "one", tpm=TPM, burst_s=BURST_S)
    forget(metered)
    yield metered
    tell(metered, "one", tpm=TPM, burst_s=BURST_S)


def show(capsys: pytest.CaptureFixture[str], line: str) -> None:
    """Print a figure past pytest's capture."""
    with capsys.disabled():
        print(f"\n  {line}")  # noqa: T201 - a figure for people


def counter(stack: Stack, key: str) -> dict[str, Any]:
    """A counter of an upstream, as the state page has it."""
    return dict(stack.state()["counters"].get(f"upstream/{key}", {}))


def ours(record: dict[str, Any], status: int = 200) -> list[dict[str, Any]]:
    """What came through the gateway; the direct client has a user agent of its own."""
    seen = [one for one in record["requests"] if one["headers"].get("user-agent") != "somebody-else"]
    return [one for one in seen if one["status"] == status]


async def push(clients: Crowd) -> None:
    """One client after another, as fast as it is served."""
    while True:
        answer = await clients.ask(chat("word " * 20, model="m", max_tokens=170))
        if answer.status != 200:
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def pushing(stack: Stack, callers: int) -> AsyncIterator[None]:
    """Many such clients at once while the block runs; those who wait then leave."""
    async with crowd(stack) as clients:
        tasks = [asyncio.create_task(push(clients)) for _ in range(callers)]
        try:
            yield
        finally:
            ended = [task for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()
    await asyncio.to_thread(books_balance, stack)


async def pushed(stack: Stack, callers: int, seconds: float) -> float:
    """The same for so long. In what time they really asked, in seconds."""
    began = time.monotonic()
    async with pushing(stack, callers):
        await asyncio.sleep(seconds)
        return time.monotonic() - began


def spent(record: dict[str, Any]) -> int:
    """Tokens charged to us."""
    return sum(int(one["charged"]) for one in ours(record))


async def test_a_limit_smaller_than_configured_is_followed(alone: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """The provider allows a fifth of what is configured: after the first replies hardly anything is refused, and what
    there is is used; when it allows more again, that is used too, but for what is yielded for minutes after refusals.
    """
    tell(alone, "one", tpm=TPM // 5)
    took = await pushed(alone, 30, 15.0)
    record = alone.record("one")
    allowed = TPM / 5 / 60 * (BURST_S + took)
    assert counter(alone, "one/*/total")["per_second"] <= TPM / 5 / 60 * 0.95 + 1e-6
    show(
        capsys,
        f"a fifth of the limit: {record['refused_429']} refused, {spent(record) / allowed:.0%} of what there was used",
    )
    assert record["refused_429"] <= 30  # what was on its way when the first reply came
    assert spent(record) >= 0.8 * allowed
    forget(alone)
    await pushed(alone, 30, 10.0)
    assert alone.record("one")["refused_429"] <= 2
    tell(alone, "one", tpm=TPM)
    async with pushing(alone, 30):
        await asyncio.to_thread(until, lambda: _has_all(alone.state()))


def _has_all(state: dict[str, Any]) -> bool:
    """Whether the rate is all that the whole limit and the brake allow; steps of less than 2 % are not taken."""
    share = float(state["pacing"]["upstream/one/*/total"]["share"])
    return bool(state["counters"]["upstream/one/*/total"]["per_second"] >= TPM / 60 * 0.95 * share * 0.98 - 1)


@contextlib.asynccontextmanager
async def somebody_else(stack: Stack, tokens_per_s: float) -> AsyncIterator[None]:
    """Another client of the same account, past the gateway."""
    upstream = stack.fakes["one"]
    url = f"http://{upstream.host}:{upstream.port}{CHAT}"

    async def ask(session: aiohttp.ClientSession) -> None:
        body = chat(model="m", max_tokens=90)
        async with session.post(url, json=body, headers={"user-agent": "somebody-else"}) as response:
            await response.read()

    async def flood() -> None:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            while True:
                group.create_task(ask(session))
                await asyncio.sleep(100 / tokens_per_s)

    task = asyncio.create_task(flood())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_others_on_the_same_account_leave_us_the_rest(alone: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody else uses half: we use the rest, and are refused now and then only."""
    async with somebody_else(alone, TPM / 60 / 2), pushing(alone, 20):
        await asyncio.sleep(15.0)
        before = await asyncio.to_thread(alone.record, "one")
        await asyncio.sleep(20.0)
        after = await asyncio.to_thread(alone.record, "one")
    span = after["now"] - before["now"]
    used, theirs = spent(after) - spent(before), after["charged_tokens"] - before["charged_tokens"]
    theirs -= used
    refused = len(ours(after, 429)) - len(ours(before, 429))
    there = TPM / 60 * span - theirs
    show(
        capsys,
        f"others use {theirs / span:.0f} of {TPM / 60:.0f} tokens/s: we used {used / there:.0%} of the rest, "
        f"refused {refused} of {len(ours(after)) - len(ours(before))}",
    )
    assert used >= 0.85 * there
    assert refused <= 0.1 * (len(ours(after)) - len(ours(before)))


def test_what_headers_say_is_dated_by_the_answers_first_byte(alone: Stack) -> None:
    """While a long answer runs it is heard, and neither then nor at its end is it taken for news of that moment."""
    tell(alone, "one", output_tokens_per_s=16, early_headers=True)
    try:
        began = time.monotonic()
        body = chat(model="m", max_tokens=140, stream=True)
        with httpx.stream("POST", alone.url + CHAT, json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            first = time.monotonic()
            until(lambda: (age := _age(alone)) is not None and age <= time.monotonic() - began)
            _is_of_between(alone, began, first)
            for _ in lines:
                pass
        took = time.monotonic() - began
        assert took > 6.5
        books_balance(alone)
        _is_of_between(alone, began, first)
    finally:
        tell(alone, "one", output_tokens_per_s=5000, early_headers=False)


def _is_of_between(stack: Stack, began: float, first: float) -> None:
    """What the headers said is as old as an answer that began between these moments."""
    asked = time.monotonic()
    age = _age(stack)
    assert age is not None
    assert asked - first - 0.1 <= age <= time.monotonic() - began + 0.1


def _age(stack: Stack) -> float | None:
    age = stack.state()["pacing"]["upstream/one/*/total"].get("age_s")
    return None if age is None else float(age)


async def test_a_smooth_lane_sends_evenly_and_another_in_a_burst(
    gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forty requests at once at a full bucket: P1 sends them all, P2 one after another at the bucket's rate."""
    fullest: dict[str, list[float]] = {}
    for lane in ("P1", "P2"):
        stack = gate(upstreams={"one": copy.deepcopy(ONE)}, lanes=LANES, other_endpoints=None)
        async with crowd(stack) as clients:
            body = chat("word " * 20, model="m", max_tokens=170)
            answers = await asyncio.gather(*(clients.ask(body, x_tidegate_priority=lane) for _ in range(40)))
        assert [answer.status for answer in answers] == [200] * 40
        charges = [(one["admitted"], one["charged"]) for one in ours(stack.record("one"))]
        fullest[lane] = [_fullest(charges, seconds) / (TPM / 60 * 0.95 * seconds) for seconds in (1.0, 3.0)]
    show(capsys, f"fullest second: burst {fullest['P1'][0]:.1f}, smooth {fullest['P2'][0]:.1f} times the rate")
    assert fullest["P1"][0] >= 5
    # In one second there may be what a busy machine kept back in the one before.
    assert fullest["P2"][0] <= 2
    assert fullest["P2"][1] <= 1.35


def _fullest(charges: Sequence[tuple[float, int]], window_s: float) -> int:
    """The most that was admitted in any window of this length."""
    return max(sum(tokens for at, tokens in charges if start <= at < start + window_s) for start, _ in charges)


# Refusals.

ROUTES = [{"models": ["m", "n"], "chain": ["first"], "acknowledge_unowned": True}]
TWO = {
    "first": {"limits": [{"model": "m", "tpm": 6_000_000}, {"model": "n", "tpm": 6_000_000}], "fake": STRICT},
    "second": {"limits": [{"tpm": 6_000_000}], "fake": STRICT},
}


def post_fault(stack: Stack, name: str, fault: str, count: int = 1) -> None:
    """Let an upstream fail so the next `count` times."""
    upstream = stack.fakes[name]
    order = {"fault": fault, "count": count}
    httpx.post(f"http://{upstream.host}:{upstream.port}/admin/fault", json=order).raise_for_status()


def served_by(stack: Stack, model: str = "m", **headers: str) -> str:
    """Who answers a request."""
    reply = HTTP.post(stack.url + CHAT, json=chat(model=model), headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.headers["x-tidegate-upstream"]


def test_a_429_pauses_that_model_there_until_then_and_the_next_takes_over(gate: Gate) -> None:
    """At once: the refused request itself fails over, those after it never go there; another model still does."""
    routes = [{**ROUTES[0], "chain": ["first", "second"]}]
    stack = gate(upstreams=copy.deepcopy(TWO), routes=routes, other_endpoints=None, lanes=LANES)
    assert served_by(stack) == "first"
    post_fault(stack, "first", "429;retry-after=5")
    began = time.monotonic()
    assert served_by(stack) == "second"
    until(lambda: "paused_s" in stack.state()["pacing"]["upstream/first/m/total"])
    forget(stack)
    others = [served_by(stack)]
    while len(others) < 10 and time.monotonic() - began < 4:
        others.append(served_by(stack))
    assert set(others) == {"second"}
    assert served_by(stack, "n") == "first"
    if time.monotonic() - began < 5:
        assert [one["model"] for one in stack.record("first")["requests"]] == ["n"]
    until(lambda: served_by(stack) == "first", every_s=0.2)
    assert 4.9 < time.monotonic() - began < 10


def test_who_waits_for_a_paused_upstream_goes_when_the_pause_ends(gate: Gate) -> None:
    """A lane that holds waits exactly so long; one that cannot wait so long is told when to come back."""
    stack = gate(
        upstreams={"first": copy.deepcopy(TWO["first"])},
        routes=ROUTES,
        other_endpoints=None,
        lanes={"P0": {"max_wait_s": 1.0}, "P1": {"max_wait_s": 20.0}, "P2": {"max_wait_s": 60.0, "when_busy": "hold"}},
    )
    assert served_by(stack) == "first"
    post_fault(stack, "first", "429;retry-after=4")
    began = time.monotonic()
    refused = httpx.post(stack.url + CHAT, json=chat(model="m"), timeout=30)
    assert refused.status_code in (429, 503)
    until(lambda: "paused_s" in stack.state()["pacing"]["upstream/first/m/total"])
    hasty = httpx.post(stack.url + CHAT, json=chat(model="m"), headers={"x-tidegate-priority": "P0"}, timeout=30)
    assert (hasty.status_code, hasty.headers["x-tidegate-reason"]) == (503, "deadline_unmeetable")
    least_s = 4.0 - (time.monotonic() - began) - LANES["P0"]["max_wait_s"]
    assert max(1.0, least_s) <= int(hasty.headers["retry-after-ms"]) / 1000 <= 5.0
    patient = httpx.post(stack.url + CHAT, json=chat(model="m"), headers={"x-tidegate-priority": "P2"}, timeout=30)
    assert patient.status_code == 200
    assert int(patient.headers["x-tidegate-queue-ms"]) > 0
    seen = stack.record("first")["requests"]
    assert [one["status"] for one in seen] == [200, 429, 200]
    assert 3.9 < seen[2]["time"] - seen[1]["time"] < 8


def test_a_day_that_is_spent_is_waited_for_and_minutes_are_not_shrunk(tmp_path: Path) -> None:
    """Told by the headers of a good answer: the model's buckets are paused, and no request is sent in vain."""
    with Upstream().listening() as provider:
        provider.answers = [
            (200, {"x-ratelimit-limit-requests": "14400", "x-ratelimit-remaining-requests": "5000"}, ANSWER),
            (200, {"x-ratelimit-limit-requests": "14400", "x-ratelimit-remaining-requests": "0"}, ANSWER),
        ]
        upstreams = {
            "groq": {"provider": "groq", "url": f"http://127.0.0.1:{provider.port}/v1", "limits": [{"rpm": 6000}]},
            "second": copy.deepcopy(TWO["second"]),
        }
        with running(tmp_path, upstreams=upstreams, lanes=LANES, other_endpoints=None) as stack:
            assert served_by(stack) == "groq"
            books_balance(stack)
            assert counter(stack, "groq/*/requests")["per_second"] == pytest.approx(95.0)
            assert served_by(stack) == "groq"
            until(lambda: "paused_s" in stack.state()["pacing"]["upstream/groq/*/requests"])
            assert [served_by(stack) for _ in range(5)] == ["second"] * 5
            assert len(provider.received) == 2


async def test_limits_are_learned_from_nothing(gate: Gate, capsys: pytest.CaptureFixture[str]) -> None:
    """At first few requests fly; the first replies tell the limit, and from then on it is kept and used."""
    one = {"learn": True, "burn": None, "fake": {**STRICT, "first_token_s": 0.3}}
    stack = gate(full=False, upstreams={"one": one}, lanes=LANES)
    tell(stack, "one", tpm=TPM, rpm=6000)
    assert counter(stack, "one/slots")["limit"] == 4
    await pushed(stack, 4, 1.0)
    until(lambda: counter(stack, "one/*/total"))
    assert counter(stack, "one/*/total")["per_second"] == pytest.approx(TPM / 60 * 0.95)
    assert counter(stack, "one/*/requests")["per_second"] == pytest.approx(100 * 0.95)
    forget(stack)
    took = await pushed(stack, 40, 14.0)
    record = stack.record("one")
    there = TPM / 60 * (took + BURST_S)
    used = spent(record) / there
    show(capsys, f"learned: {record['max_in_flight']} at once, {used:.0%} used, {record['refused_429']} refused")
    assert record["refused_429"] == 0
    assert record["max_in_flight"] > 4
    assert spent(record) >= 0.85 * there
