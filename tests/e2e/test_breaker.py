"""Breakers on a real Envoy: what opens one, what never does, and the canary that closes it again.

Faults that come with a request strike only that request, so canaries succeed; faults that are put up at a fake strike
canaries, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from extproc.fakes.record import fingerprint
from extproc.stack import Stack
from tests.e2e.conftest import Gate, books_balance, chat
from tests.e2e.doubles import CHAT, MESSAGES, Upstream, connect, crowd, forget, running, tell, until, written

CHAIN = ("primary", "backup", "local")
COOL_DOWN_S = 0.3
COOL_DOWN_MAX_S = 1.2
QUICK = {
    "failures": 3, "paced": 3, "cool_down_s": COOL_DOWN_S, "cool_down_max_s": COOL_DOWN_MAX_S,
    "quarantine_s": COOL_DOWN_MAX_S, "quarantine_max_s": COOL_DOWN_MAX_S, "ramp_s": 0.5,
}  # fmt: skip
EMBEDDINGS = "/v1/embeddings"
MANY = tuple(f"many-{i}" for i in range(8))
HTTP = httpx.Client(timeout=30)
LISTENING = "0A"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1 as the kernel's tables write it, as IPv4 and as IPv6."""


@pytest.fixture(scope="module")
def crowded() -> Iterator[Upstream]:
    """One place that many upstreams lead to."""
    with Upstream().listening() as one:
        yield one


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, crowded: Upstream) -> Iterator[Stack]:
    """Three fakes whose breakers move quickly, and lanes for the patient and the impatient."""
    folder = tmp_path_factory.mktemp("breaker")
    upstreams = {name: fake(folder, name) for name in CHAIN}
    upstreams["claude"] = fake(folder, "claude", dialects=["anthropic"], models={"claude": "claude-own"})
    url = f"http://127.0.0.1:{crowded.port}"
    upstreams |= {name: {"provider": "compatible", "url": url, "concurrency": 9, "breaker": QUICK} for name in MANY}
    upstreams["engine"] = {"provider": "vllm", "url": url, "concurrency": 9, "breaker": QUICK}
    slowly = {"first_token_s": 0.4, "output_tokens_per_s": 100}
    upstreams["gentle"] = fake(folder, "gentle", breaker={**QUICK, "ramp_s": 6}, fake=slowly)
    upstreams["embedder"] = fake(folder, "embedder", models={"embedder": "embedder-own"})
    upstreams["sized"] = fake(folder, "sized", breaker={**QUICK, "cool_down_s": 60, "cool_down_max_s": 60})
    spare = [[name, name, "backup"] for name in ("gentle", "sized")]
    routes = [["gpt-5", *CHAIN], ["rented", "primary", "backup"], *([name, name] for name in upstreams)]
    routes = [*spare, *(route for route in routes if route[0] not in ("gentle", "sized"))]
    with running(
        folder,
        upstreams=upstreams,
        routes=[{"models": [model], "chain": chain, "acknowledge_unowned": True} for model, *chain in routes],
        lanes={"patient": {"max_wait_s": 30}, "P1": {"max_wait_s": 0.2}},
        timeouts={"first_token_s": 0.5, "stall_s": 2},
    ) as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    """The shared stack in good health: no faults, every breaker closed and without a past."""
    for upstream in shared.fakes.values():
        HTTP.delete(f"{upstream.where}/admin/fault").raise_for_status()
    until(lambda: all(breaker["state"] == "closed" for breaker in shared.state()["breakers"].values()))
    until(lambda: not paused(shared), within_s=30)
    for name in shared.fakes:
        path = MESSAGES if name == "claude" else CHAT
        assert HTTP.post(shared.url + path, json={**chat(), "model": name}).status_code == 200
    books_balance(shared)
    forget(shared)
    shared.began_at = time.time()  # type: ignore[attr-defined]
    yield shared
    books_balance(shared)


def fake(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    """Settings of one fake with a key of its own."""
    file = folder / f"{name}.key"
    file.write_text(f"sk-{name}-secret", "utf-8")
    return {
        "key_file": str(file),
        "concurrency": 100,
        "owned": name == "local",
        "models": {"gpt-5": f"{name}-own"},
        "breaker": QUICK,
        "fake": {"first_token_s": 0.01, "output_tokens_per_s": 2000},
    } | more


def post(stack: Stack, fault: str = "", body: Mapping[str, Any] | None = None, **headers: str) -> httpx.Response:
    """One request with a fault for the primary unless it names another; underscores in header names are dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if fault:
        named["x-fake-fault"] = fault if "provider=" in fault or fault.endswith("!") else f"{fault};provider=primary"
    named = {name: value.rstrip("!") for name, value in named.items()}
    return HTTP.post(stack.url + CHAT, json=body or chat(), headers=named)


def alerts(stack: Stack, name: str = "primary") -> list[dict[str, Any]]:
    """The transitions of one breaker since the test began."""
    told = [one for one in stack.state()["tally"]["alerts"] if one["upstream"] == name]
    return [one for one in told if one["at"] >= getattr(stack, "began_at", 0.0)]


def blameless(stack: Stack, *names: str) -> bool:
    """Whether these are closed, and nothing in a row stands against them."""
    found = [breaker(stack, name) for name in names]
    return all((one["state"], one["failures"], one["paced"]) == ("closed", 0, 0) for one in found)


def put_up(stack: Stack, name: str, fault: str) -> None:
    """A fault for every request at one fake, canaries included."""
    HTTP.post(f"{stack.fakes[name].where}/admin/fault", json={"fault": fault}).raise_for_status()


def breaker(stack: Stack, name: str = "primary") -> dict[str, Any]:
    """The state of one breaker."""
    return dict(stack.state()["breakers"][name])


def state_of(stack: Stack, name: str = "primary") -> str:
    """Closed, open or half open."""
    return str(breaker(stack, name)["state"])


def seen(stack: Stack, name: str = "primary") -> list[dict[str, Any]]:
    """What a fake got."""
    return list(stack.record(name)["requests"])


def paused(stack: Stack) -> bool:
    """Whether a refusal for pace still keeps requests away from some upstream."""
    return any("paused_s" in told for told in stack.state()["pacing"].values())


def canaries(stack: Stack, name: str = "primary") -> list[dict[str, Any]]:
    """The canaries among it."""
    return [one for one in seen(stack, name) if one["max_tokens"] == 5]


def opened(stack: Stack, name: str = "primary") -> bool:
    """Whether a breaker has opened since the test began; it may have closed again by now."""
    return state_of(stack, name) != "closed" or bool(canaries(stack, name))


def open_it(stack: Stack, *names: str) -> None:
    """Open breakers with faults that canaries do not meet."""
    for name in names:
        for _ in range(3):
            post(stack, f"503;provider={name}", {**chat(), "model": name})
        until(lambda name=name: opened(stack, name))


FAULTS = ["500", "503", "529", "reset", "error-200", "malformed", "429;retry-after=0.1"]


@pytest.mark.parametrize("fault", [*FAULTS, "429-bare"])
def test_three_failures_in_a_row_open_it(stack: Stack, fault: str) -> None:
    """Overload, a broken connection, answers that are none, pace: two in a row are forgotten after a success, three
    open the breaker; and each of those requests was answered by the backup. Where it asks for a pause
    nothing is sent there meanwhile.
    """
    kind = "paced" if fault.startswith("429") else "failures"
    for failed in (1, 2):
        assert post(stack, fault).headers["x-tidegate-upstream"] == "backup"
        until(lambda failed=failed: breaker(stack)[kind] == failed)
        until(lambda: not paused(stack), within_s=30)
    assert post(stack).headers["x-tidegate-upstream"] == "primary"
    until(lambda: breaker(stack)[kind] == 0)
    for _ in range(3):
        assert not opened(stack)
        assert post(stack, fault).headers["x-tidegate-upstream"] == "backup"
        books_balance(stack)
        until(lambda: not paused(stack), within_s=30)
    until(lambda: opened(stack))


def test_a_prompt_that_fails_everywhere_opens_no_breaker(stack: Stack) -> None:
    """Its client sends it again and again, each time through the whole chain: that counts once, at the first. Different
    prompts that fail so open the first as ever.
    """
    for _ in range(6):
        answer = post(stack, "500!", chat("poison"))
        assert (answer.status_code, answer.headers["x-tidegate-attempts"]) == (503, "3")
        books_balance(stack)
    assert [breaker(stack, name)["failures"] for name in CHAIN] == [1, 0, 0]
    for i in range(2):
        assert not opened(stack)
        post(stack, "500", chat(f"other {i}"))
        books_balance(stack)
    until(lambda: opened(stack))


@pytest.mark.parametrize("fault", ["silence", "early-end", "cut", "error-later;flat"])
def test_a_prompt_that_breaks_every_stream_opens_one_breaker_at_most(stack: Stack, fault: str) -> None:
    """Whether it is silence, which goes through the whole chain at once, or comes when it is too late for others: then
    the next upstream is asked when the first rests.
    """

    def ask(_: int) -> None:
        with contextlib.suppress(httpx.RemoteProtocolError):
            post(stack, f"{fault}!", chat(f"poison {fault}", stream=True))

    with ThreadPoolExecutor(5) as pool:
        for _ in range(60):
            if len(seen(stack, "backup")) >= 5:
                break
            at_once = 5 if breaker(stack, "primary")["state"] == "open" else 1  # it does not rest for long
            list(pool.map(ask, range(at_once)))
            books_balance(stack)
    assert len(seen(stack, "backup")) >= 5
    assert opened(stack) == (fault != "silence")
    assert blameless(stack, "backup", "local")
    assert not opened(stack, "backup")
    assert not opened(stack, "local")


def test_a_request_that_fails_twice_at_an_only_upstream_counts_once(stack: Stack, crowded: Upstream) -> None:
    """The router asked it a second time by itself."""
    only = {**chat(), "model": "many-0"}
    for failures in (1, 2):
        crowded.answers += [(503, {}, b"{}")] * 2
        answer = post(stack, body=only)
        assert (answer.status_code, answer.headers["x-tidegate-attempts"]) == (503, "2")
        books_balance(stack)
        until(lambda failures=failures: breaker(stack, "many-0")["failures"] == failures)
    assert post(stack, body=only).status_code == 200
    until(lambda: breaker(stack, "many-0")["failures"] == 0)


@pytest.mark.parametrize("fault", ["silence", "early-end", "cut", "stall", "error-first", "error-later;flat"])
def test_streams_that_fail_open_it_too(stack: Stack, fault: str) -> None:
    """No first token in time, or a stream that began and did not end well: each counts once, the third opens it."""
    for _ in range(3):
        assert not opened(stack)
        try:
            post(stack, fault, chat(stream=True))
        except httpx.RemoteProtocolError:
            assert fault in ("cut", "stall")
        books_balance(stack)
    until(lambda: opened(stack))


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize(("fault", "sign"), [("401", "credential"), ("billing", "terminal")])
def test_our_key_and_our_credit_open_it_at_once(stack: Stack, path: str, fault: str, sign: str) -> None:
    """One answer that says so, in either dialect, also where it is a 400. The caller gets the backup's; it is told with
    the request that it came to, and the canary is tried: it works, so traffic returns.
    """
    named = {"x-fake-fault": f"{fault};provider=primary"}
    answer = HTTP.post(stack.url + path, json=chat(), headers=named)
    assert (answer.status_code, answer.headers["x-tidegate-upstream"]) == (200, "backup")
    told = until(lambda: [one for one in alerts(stack) if one["after"] == "open"])
    assert [(one["sign"], len(one["requests"])) for one in told] == [(sign, 1)]
    assert told[0]["numbers"]["rest_s"] > 0
    until(lambda: canaries(stack))
    until(lambda: state_of(stack) == "closed")


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_what_our_key_may_not_do_is_a_failure_like_others(stack: Stack, path: str) -> None:
    """It may be for what was asked: the same request sent again and again is one sign, and the third other one opens
    it. Its caller gets the backup's answer each time.
    """
    named = {"x-fake-fault": "403;provider=primary"}
    for i, text in enumerate(["a", "a", "a", "b", "c"]):
        assert not opened(stack)
        answer = HTTP.post(stack.url + path, json=chat(text), headers=named)
        assert (answer.status_code, answer.headers["x-tidegate-upstream"]) == (200, "backup")
        books_balance(stack)
        assert breaker(stack)["failures"] == max(1, i - 1) or i == 4
    told = until(lambda: [one for one in alerts(stack) if one["after"] == "open"])
    assert (told[0]["sign"], len(told[0]["requests"])) == ("failures", 3)


def test_a_key_that_is_refused_for_everybody_rests_long(stack: Stack) -> None:
    """The canary is refused, too, and that is told; nobody hears of it, and a new key ends it."""
    put_up(stack, "primary", "401")
    assert post(stack).headers["x-tidegate-upstream"] == "backup"
    told = until(lambda: (found := [one for one in alerts(stack) if one["after"] == "open"])[1:] and found)
    assert {one["sign"] for one in told} == {"credential"}
    first, second = (one["numbers"]["rest_s"] for one in told[:2])
    assert first <= 1.1 * COOL_DOWN_S < COOL_DOWN_MAX_S <= second + 0.1
    assert breaker(stack)["sign"] == "credential"
    answer = post(stack)
    assert (answer.status_code, answer.headers["x-tidegate-upstream"]) == (200, "backup")
    assert answer.headers["x-tidegate-attempts"] == "1"
    HTTP.delete(f"{stack.fakes['primary'].where}/admin/fault")
    until(lambda: state_of(stack) == "closed")


def test_every_transition_is_told(stack: Stack) -> None:
    """On the state page, with cause, numbers, and the requests that led to it."""
    asked = [post(stack, "503", x_request_id=f"told-{n}") for n in range(3)]
    assert {answer.status_code for answer in asked} == {200}
    until(lambda: len(alerts(stack)) == 4)
    states = [(one["before"], one["after"]) for one in alerts(stack)]
    assert states == list(pairwise(["closed", "open", "half_open", "ramping", "closed"]))
    tripped = alerts(stack)[0]
    assert (tripped["sign"], tripped["numbers"]["failures"], len(set(tripped["requests"]))) == ("failures", 3, 3)
    assert tripped["cause"].startswith("status 503")


async def test_traffic_returns_by_and_by(stack: Stack) -> None:
    """After an outage few requests at a time go to the recovered upstream, then more, then all; nobody sees an error,
    and it does not open again.
    """
    open_it(stack, "gentle")
    await asyncio.to_thread(until, lambda: state_of(stack, "gentle") == "ramping")
    async with crowd(stack) as clients:
        answers = await asyncio.gather(*(clients.ask({**chat(), "model": "gentle"}) for _ in range(60)))
    assert {answer.status for answer in answers} == {200}
    served = [answer.headers["x-tidegate-upstream"] for answer in answers]
    assert 0 < served.count("gentle") < 40
    await asyncio.to_thread(until, lambda: state_of(stack, "gentle") == "closed", within_s=30)
    async with crowd(stack) as clients:
        answers = await asyncio.gather(*(clients.ask({**chat(), "model": "gentle"}) for _ in range(60)))
    assert {answer.headers["x-tidegate-upstream"] for answer in answers} == {"gentle"}
    assert [one["after"] for one in alerts(stack, "gentle")] == ["open", "half_open", "ramping", "closed"]


def test_only_large_prompts_are_kept_away_where_only_they_go_wrong(stack: Stack) -> None:
    """An upstream that truncates its answers to them still serves the small ones, and they go to the backup."""
    large = {**chat("word " * 18_000), "model": "sized"}
    for _ in range(5):
        cut = post(stack, "early-end;provider=sized", {**large, "stream": True})
        assert cut.headers["x-tidegate-upstream"] == "sized"
        books_balance(stack)
    [told] = until(lambda: alerts(stack, "sized"))
    assert (told["sizes"], told["shut"], len(told["requests"])) == ("16000-63999", True, 5)
    assert breaker(stack, "sized")["sizes_kept_away"] == ["16000-63999"]
    assert post(stack, body=large).headers["x-tidegate-upstream"] == "backup"
    assert post(stack, body={**chat(), "model": "sized"}).headers["x-tidegate-upstream"] == "sized"
    assert state_of(stack, "sized") == "closed"


async def test_slow_first_tokens_open_it_without_any_error(gate: Gate) -> None:
    """Three times what is usual there: the backup serves before more than a few had to wait."""
    slow = {"slow": {"least_s": 0.3, "volume": 10}}
    upstreams = {name: {"concurrency": 100, "breaker": slow} for name in ("primary", "backup")}
    stack = gate(upstreams=upstreams)
    for _ in range(25):
        assert post(stack, body=chat(stream=True)).status_code == 200
    async with crowd(stack) as clients:
        late = {"x_fake_fault": "slow-first-token;s=3;provider=primary"}
        first = await asyncio.gather(*(clients.ask(chat(stream=True), **late) for _ in range(10)))
        await asyncio.to_thread(until, lambda: [one for one in alerts(stack) if one["after"] == "open"])
        assert {answer.status for answer in first} == {200}
        then = await asyncio.gather(*(clients.ask(chat(stream=True), **late) for _ in range(20)))
    assert {answer.status for answer in then} == {200}
    assert [answer.headers["x-tidegate-upstream"] for answer in then].count("backup") >= 10
    told = alerts(stack)[0]
    assert (told["sign"], told["numbers"]["first_token_s"] > 2) == ("slow", True)


async def test_who_is_merely_slow_serves_on_where_nobody_else_may_be_asked(gate: Gate) -> None:
    """Though its breaker is open, and rests for long; until it fails, too, and is sick like any other."""
    rules = {"slow": {"least_s": 0.3, "volume": 10}, "cool_down_s": 120, "cool_down_max_s": 120}
    stack = gate(
        upstreams={"primary": {"concurrency": 100, "breaker": rules}},
        routes=[{"models": ["*"], "chain": ["primary"], "acknowledge_unowned": True}],
    )
    for _ in range(25):
        assert post(stack, body=chat(stream=True)).status_code == 200
    async with crowd(stack) as clients:
        late = {"x_fake_fault": "slow-first-token;s=2"}
        first = await asyncio.gather(*(clients.ask(chat(stream=True), **late) for _ in range(12)))
        await asyncio.to_thread(until, lambda: state_of(stack) == "open")
        then = await asyncio.gather(*(clients.ask(chat(f"{n}", stream=True), **late) for n in range(12)))
    assert {answer.status for answer in (*first, *then)} == {200}
    assert state_of(stack) == "open"
    assert [(one["after"], one["sign"]) for one in alerts(stack)] == [("open", "slow")]
    until(lambda: post(stack, "503").headers.get("x-tidegate-reason") == "no_upstream")
    assert state_of(stack) == "open"
    books_balance(stack)


USUAL_S, SLOWEST_S, STEP = 0.1, 1.5, 1.25
"""Seconds to the first token on a good day and at the end of a slow decay, and how much each step adds to it."""


async def test_slow_decay_opens_it_and_good_times_bring_traffic_back(gate: Gate) -> None:
    """First tokens come later by and by, up to fifteen times what is usual, and never with an error. It opens on the
    way: what is usual was not learned anew. Users are served throughout, most of them by the backup from then on; when
    the upstream is well again a canary brings its traffic back, and it still knows what is usual.
    """
    slow = {"least_s": 4 * USUAL_S, "volume": 20, "window_s": 20}
    rules = {**QUICK, "slow": slow}
    fakes = {"primary": {"first_token_s": USUAL_S, "output_tokens_per_s": 2000}, "backup": {"first_token_s": 0.01}}
    stack = gate(
        upstreams={name: {"concurrency": 100, "breaker": rules, "fake": one} for name, one in fakes.items()},
        routes=[{"models": ["*"], "chain": list(fakes), "acknowledge_unowned": True}],
    )
    async with crowd(stack) as clients:

        async def ask(count: int) -> list[str]:
            """Who answered so many requests at once."""
            answers = await asyncio.gather(*(clients.ask(chat(stream=True)) for _ in range(count)))
            assert {answer.status for answer in answers} == {200}
            assert all(b"[DONE]" in answer.body for answer in answers)
            return [answer.headers["x-tidegate-upstream"] for answer in answers]

        for _ in range(44):  # enough for what is usual to be settled
            assert set(await ask(5)) == {"primary"}
        await asyncio.to_thread(books_balance, stack)
        assert not alerts(stack)
        seconds = USUAL_S
        while seconds < SLOWEST_S and not opened(stack):
            seconds = min(SLOWEST_S, seconds * STEP)
            await asyncio.to_thread(tell, stack, "primary", base_latency_s=seconds)
            assert set(await ask(6)) <= set(fakes)
            await asyncio.to_thread(books_balance, stack)
        told = alerts(stack)[0]
        assert (told["after"], told["sign"]) == ("open", "slow")
        assert seconds < SLOWEST_S
        assert told["numbers"]["usual_median_s"] < 0.6 * told["numbers"]["first_token_s"]
        assert told["requests"]

        await asyncio.to_thread(tell, stack, "primary", base_latency_s=SLOWEST_S)
        served = [name for _ in range(4) for name in await ask(10)]
        assert served.count("backup") > 0.6 * len(served)
        assert {one["sign"] for one in alerts(stack) if one["after"] == "open"} == {"slow"}

        await asyncio.to_thread(tell, stack, "primary", base_latency_s=USUAL_S)
        await asyncio.to_thread(until, lambda: state_of(stack) == "closed", within_s=30)
        assert canaries(stack)
        assert "primary" in await ask(4)
        again = len(alerts(stack))
        await asyncio.to_thread(tell, stack, "primary", base_latency_s=6 * USUAL_S)
        await ask(25)
        worse = await asyncio.to_thread(until, lambda: alerts(stack)[again:])
        assert (worse[0]["after"], worse[0]["sign"]) == ("open", "slow")
        assert worse[0]["numbers"]["usual_median_s"] < 3 * USUAL_S


def test_a_first_token_is_known_while_its_answer_still_runs(gate: Gate) -> None:
    """A long answer does not hide for long that it began late."""
    stack = gate(upstreams={"primary": {"concurrency": 100, "fake": {"first_token_s": 0.01}}})
    for _ in range(22):
        assert post(stack, body=chat(stream=True)).status_code == 200
    books_balance(stack)
    timed = until(lambda: breaker(stack).get("timed"))
    HTTP.post(f"{stack.fakes['primary'].where}/admin/settings", json={"output_tokens_per_s": 1}).raise_for_status()
    with HTTP.stream("POST", stack.url + CHAT, json={**chat(stream=True), "max_tokens": 400}) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        until(lambda: breaker(stack)["timed"] > timed, within_s=15)
        assert stack.state()["flying"] == 1


def test_an_engine_is_asked_for_its_health_first(stack: Stack, crowded: Upstream) -> None:
    """Through Envoy, with the upstream forced; then the same call as any."""
    crowded.answers += [(503, {}, b"{}")] * 500
    until(lambda: post(stack, body={**chat(), "model": "engine"}).status_code == 503 and alerts(stack, "engine"))
    crowded.answers.clear()
    until(lambda: state_of(stack, "engine") == "closed")
    asked = [(one.method, one.path) for one in crowded.received[-2:]]
    assert asked == [("GET", "/health"), ("POST", CHAT)]
    assert crowded.last().json()["messages"] == [{"role": "user", "content": "reply OK"}]


def test_canaries_are_booked_apart(stack: Stack) -> None:
    """Their tokens are in nobody's count but their own."""
    before = stack.state()["tally"]
    open_it(stack, "primary")
    until(lambda: state_of(stack) == "closed")
    after = stack.state()["tally"]
    spent = after["probe_tokens"]["primary"] - before["probe_tokens"].get("primary", 0)
    assert 5 <= spent <= 40
    assert after["tokens"].get("primary", 0) == before["tokens"].get("primary", 0)


def test_nobodys_request_goes_to_a_sick_upstream(stack: Stack) -> None:
    """While it is open every request starts at the backup, as its first attempt; the primary hears canaries only."""
    put_up(stack, "primary", "503")
    for _ in range(3):
        assert post(stack).headers["x-tidegate-upstream"] == "backup"
        books_balance(stack)
    until(lambda: canaries(stack))
    for _ in range(10):
        answer = post(stack)
        assert (answer.headers["x-tidegate-upstream"], answer.headers["x-tidegate-attempts"]) == ("backup", "1")
    assert len(seen(stack)) - len(canaries(stack)) == 3


def test_a_canary_closes_it(stack: Stack) -> None:
    """After its rest one call of our own tries the upstream, through Envoy: its path, key and own model name, the words
    "reply OK", five tokens. It works, so users' requests return.
    """
    open_it(stack, "primary")
    until(lambda: state_of(stack) == "closed")
    (canary,) = canaries(stack)
    body = {"model": "primary-own", "messages": [{"role": "user", "content": "reply OK"}], "max_tokens": 5}
    assert canary["body_sha256"] == hashlib.sha256(json.dumps(body).encode()).hexdigest()
    assert (canary["path"], canary["key"]) == (CHAT, fingerprint("sk-primary-secret"))
    assert not [name for name in canary["headers"] if name.startswith(("x-tidegate", "x-tg", "x-envoy"))]
    assert canary["time"] - seen(stack)[2]["time"] >= COOL_DOWN_S
    assert post(stack).headers["x-tidegate-upstream"] == "primary"
    assert stack.state()["tally"]["probes"]["primary:ok"] >= 1


def test_a_canary_speaks_the_upstreams_dialect(stack: Stack) -> None:
    """An upstream that only has the Anthropic API is asked in it."""
    for _ in range(3):
        headers = {"x-fake-fault": "529"}
        assert HTTP.post(stack.url + MESSAGES, json={**chat(), "model": "claude"}, headers=headers).status_code == 503
    until(lambda: canaries(stack, "claude"))
    (canary,) = canaries(stack, "claude")
    assert (canary["path"], canary["model"]) == (MESSAGES, "claude-own")
    until(lambda: state_of(stack, "claude") == "closed")


def test_a_failing_canary_doubles_the_rest(stack: Stack) -> None:
    """Each canary that fails doubles the rest up to the cap, one canary at a time; when one works it closes."""
    put_up(stack, "primary", "503")
    for _ in range(3):
        post(stack)
    until(lambda: len(canaries(stack)) >= 4, within_s=20)
    times = [one["time"] for one in canaries(stack)]
    rests = [later - earlier for earlier, later in pairwise(times)]
    assert rests[0] >= 2 * COOL_DOWN_S
    assert rests[1] >= COOL_DOWN_MAX_S
    assert COOL_DOWN_MAX_S <= rests[2] < 2 * COOL_DOWN_MAX_S
    assert stack.state()["tally"]["probes"]["primary:failed"] >= 3
    HTTP.delete(f"{stack.fakes['primary'].where}/admin/fault")
    until(lambda: state_of(stack) == "closed")


@pytest.mark.parametrize("fault", [pytest.param("silence", marks=pytest.mark.slow), "malformed", "error-200"])
def test_a_canary_that_gets_no_proper_answer_has_failed(stack: Stack, fault: str) -> None:
    """Half a JSON document or an error under 200 do not close it; silence does not within its five seconds."""
    put_up(stack, "primary", fault)
    open_it(stack, "primary")
    until(lambda: canaries(stack))
    if fault == "silence":
        assert state_of(stack) == "half_open"
    else:
        until(lambda: len(canaries(stack)) >= 2)
    HTTP.delete(f"{stack.fakes['primary'].where}/admin/fault")
    until(lambda: state_of(stack) == "closed", within_s=15)


def all_rest(stack: Stack, seconds: float) -> bool:
    """Whether no breaker of the chain will let a canary go for so long."""
    told = stack.state()["breakers"]
    return all(told[name].get("rests_s", 0) > seconds for name in CHAIN)


def all_resting(stack: Stack) -> None:
    """Every breaker is open, and rests for longer than the impatient may wait."""
    for name in CHAIN:
        put_up(stack, name, "503")
    open_it(stack, *CHAIN)
    until(lambda: all(len(canaries(stack, name)) >= 3 for name in CHAIN))
    until(lambda: all_rest(stack, COOL_DOWN_MAX_S / 2))
    for upstream in stack.fakes.values():
        HTTP.delete(f"{upstream.where}/admin/fault")


def test_what_is_owned_serves_when_all_are_open(stack: Stack) -> None:
    """Nobody else can be waited for: the upstream that the user owns gets the request, whatever its breaker says."""
    all_resting(stack)
    answer = post(stack)
    assert (answer.status_code, answer.headers["x-tidegate-upstream"]) == (200, "local")


def test_all_open_says_when_to_come_back(stack: Stack) -> None:
    """No upstream may be asked: `no_upstream` at once in the caller's dialect; after the retry-after it works again."""
    all_resting(stack)
    rented = {**chat(), "model": "rented"}
    refused = post(stack, body=rented)
    back_at = time.monotonic() + int(refused.headers["retry-after"])
    assert (refused.status_code, refused.headers["x-tidegate-reason"]) == (503, "no_upstream")
    assert refused.json()["error"]["reason"] == "no_upstream"
    assert refused.headers["x-should-retry"] == "true"
    assert 1 <= int(refused.headers["retry-after"]) <= 1.25 * 1.1 * COOL_DOWN_MAX_S + 1
    claude = HTTP.post(stack.url + MESSAGES, json=rented)
    assert (claude.status_code, claude.json()["error"]["type"]) == (503, "overloaded_error")
    time.sleep(max(0.0, back_at - time.monotonic()))
    assert post(stack, body=rented, x_tidegate_priority="patient").status_code == 200


def test_the_patient_wait_for_the_canary(stack: Stack) -> None:
    """All open, but one rests for less than the lane may wait: the request is held and served after the canary."""
    for name in CHAIN:
        put_up(stack, name, "503")
    open_it(stack, *CHAIN)
    until(lambda: all_rest(stack, COOL_DOWN_S))
    for upstream in stack.fakes.values():
        HTTP.delete(f"{upstream.where}/admin/fault")
    served = post(stack, x_tidegate_priority="patient")
    assert served.status_code == 200
    assert int(served.headers["x-tidegate-queue-ms"]) > 0


def test_a_clients_own_errors_never_open_it(stack: Stack) -> None:
    """However many requests the provider refuses as bad, too long or filtered: nothing is counted."""
    for fault in ("content-filter", "context-length!"):
        for _ in range(5):
            assert post(stack, fault).status_code == 400
    books_balance(stack)
    assert blameless(stack, "primary", "backup")


@pytest.mark.parametrize("fault", ["silence", "slow-first-token;s=20;early-headers", "stall;s=20"])
@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_never_open_it(stack: Stack, fault: str, *, stream: bool) -> None:
    """Gone before the first token or in the middle of the answer: that says nothing about the upstream."""
    gone = stack.state()["tally"]["client_gone"]
    sent = written(body=json.dumps(chat(stream=stream)).encode(), headers={"x-fake-fault": f"{fault};provider=primary"})
    for number in range(1, 5):
        with connect(stack) as client:
            client.sendall(sent)
            until(lambda number=number: len(seen(stack)) == number)
            if stream and fault != "silence":
                assert client.recv(65536)
    books_balance(stack)
    assert blameless(stack, "primary")
    assert stack.state()["tally"]["client_gone"] == gone + 4


@pytest.mark.parametrize("stream", [False, True])
def test_hurried_clients_never_open_it(stack: Stack, *, stream: bool) -> None:
    """A deadline shorter than an upstream needs is the caller's own: its timeouts are not counted as failures."""
    for _ in range(4):
        answer = post(stack, "slow-first-token;s=5!", chat(stream=stream), x_request_timeout_ms="200")
        assert (answer.status_code, answer.headers["x-tidegate-reason"]) == (504, "deadline_passed")
    books_balance(stack)
    for name in CHAIN:
        assert blameless(stack, name)


def test_one_that_only_embeds_returns(stack: Stack) -> None:
    """The canary asks it for an embedding, as its callers do: it would refuse to chat for ever."""
    tell(stack, "embedder", embeds_only=True)
    try:
        assert post(stack, body={**chat(), "model": "embedder"}).status_code == 400
        asked = {"model": "embedder", "input": "hi"}
        assert HTTP.post(stack.url + EMBEDDINGS, json=asked).status_code == 200
        books_balance(stack)
        fails = {"x-fake-fault": "503;provider=embedder"}
        until(lambda: HTTP.post(stack.url + EMBEDDINGS, json=asked, headers=fails) and alerts(stack, "embedder"))
        until(lambda: state_of(stack, "embedder") == "closed", within_s=30)
        assert {one["sign"] for one in alerts(stack, "embedder") if one["after"] == "open"} == {"failures"}
        assert "canary answered" in {one["cause"] for one in alerts(stack, "embedder")}
        assert stack.state()["tally"]["probes"].get("embedder:failed", 0) == 0
        assert HTTP.post(stack.url + EMBEDDINGS, json=asked).status_code == 200
        assert [one["path"] for one in seen(stack, "embedder")].count(CHAT) == 1
    finally:
        tell(stack, "embedder", embeds_only=False)


def test_a_silent_upstream_is_seen_by_json_callers_with_deadlines(stack: Stack) -> None:
    """They gave it much more than it usually takes: three of them open it, and the next is served by the backup."""
    for i in range(3):
        assert not opened(stack)
        answer = post(stack, "silence", chat(f"quiet {i}"), x_request_timeout_ms="4000")
        assert (answer.status_code, answer.headers["x-tidegate-reason"]) == (504, "deadline_passed")
        books_balance(stack)
    until(lambda: opened(stack))


async def test_results_of_the_time_before_are_ignored(stack: Stack) -> None:
    """Requests that began before it opened and fail after it closed again do not open it a second time."""
    async with crowd(stack) as clients:
        slow = [asyncio.create_task(clients.ask(chat(), x_fake_fault="503;after=5;provider=primary")) for _ in range(3)]
        await asyncio.to_thread(until, lambda: len(seen(stack)) == 3)
        await asyncio.to_thread(open_it, stack, "primary")
        await asyncio.to_thread(until, lambda: state_of(stack) == "closed")
        assert not any(one.done() for one in slow)
        assert {(await one).status for one in slow} == {200}
    await asyncio.to_thread(books_balance, stack)
    assert blameless(stack, "primary")


async def test_many_canaries_at_once_do_not_stand_in_each_others_way(stack: Stack, crowded: Upstream) -> None:
    """An outage that opened many breakers is over: every canary gets through, though Envoy lets few pass per second."""
    crowded.answers += [(503, {}, b"{}")] * 500
    async with crowd(stack) as clients:
        asked = [clients.ask({**chat(), "model": name}) for name in MANY for _ in range(3)]
        assert {answer.status for answer in await asyncio.gather(*asked)} == {503}
    crowded.answers.clear()
    await asyncio.to_thread(until, lambda: all(f"{name}:ok" in probes_of(stack) for name in MANY), within_s=20)
    causes = [one["cause"] for name in MANY for one in alerts(stack, name)]
    assert causes.count("canary answered") >= len(MANY)
    assert "canary got status 429" not in causes


def probes_of(stack: Stack) -> dict[str, int]:
    """How often the canaries of the many had which result."""
    return {key: count for key, count in stack.state()["tally"]["probes"].items() if key.startswith("many")}


# The private listener that canaries use.


def test_the_probe_listener_serves_nobody_else(stack: Stack) -> None:
    """Without the name of an upstream there is nothing; large bodies are refused; nothing of it reaches a fake."""
    assert probed(stack, chat()) == 404
    assert probed(stack, chat(), "nobody") == 404
    assert probed(stack, chat("x" * 5000), "primary") == 413
    assert [seen(stack, name) for name in CHAIN] == [[], [], []]


def probed(stack: Stack, body: Mapping[str, Any], upstream: str | None = None) -> int:
    """Status of a call to the probe listener, once it lets one pass."""
    url = f"http://127.0.0.1:{stack.settings.gateway.probe_port}{CHAT}"
    headers = {"x-tidegate-probe": upstream} if upstream else {}
    return int(until(lambda: (s := HTTP.post(url, json=body, headers=headers).status_code) != 429 and s))


async def test_the_probe_listener_is_slow_on_purpose(stack: Stack) -> None:
    """Whoever reaches it cannot spend much."""
    url = f"http://127.0.0.1:{stack.settings.gateway.probe_port}"
    headers = {"x-tidegate-probe": "local"}
    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=100)) as client:
        answers = await asyncio.gather(*(client.post(url + CHAT, json=chat(), headers=headers) for _ in range(100)))
    assert [answer.status_code for answer in answers].count(429) >= 8


def test_private_ports_listen_on_loopback_only(stack: Stack) -> None:
    """Canaries' listener, Envoy's admin page, the service and its state page cannot be reached from outside."""
    service = stack.settings.service
    ports = [stack.settings.gateway.probe_port, stack.settings.gateway.admin_port]
    ports += [int(address.rpartition(":")[2]) for address in (service.address, service.console)]
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    places = [line[1].split(":") for line in lines if line[3] == LISTENING]
    for port in ports:
        addresses = {address for address, at in places if int(at, 16) == port}
        assert addresses
        assert addresses <= LOOPBACK
