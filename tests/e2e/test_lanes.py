"""Who gets what there is when there is less than all want, through a real Envoy: shares of lanes, what lanes leave
free, fair tenants, orders, bounds and who makes room, sessions, what is only observed, forecasts and promised times.

Nearly all upstreams of the module's gateway are one fake provider under several names; what was sent where is told by
the model's name. So no test gets in another's way, and little has to be started.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from itertools import count
from typing import Any

import anthropic
import openai
import pytest

from extproc.stack import Stack, free_ports
from tests.e2e.conftest import PATIENCE_S, books_balance, chat
from tests.e2e.doubles import NEVER_OPENS, PATIENT, Crowd, Result, crowd, running

QUICK = {"first_token_s": 0.005, "output_tokens_per_s": 20_000}
STRICT = {"limits": [{"tpm": 120_000, "burst_s": 2}], "fake": {**QUICK, "burst_s": 3}}
"""An account of 1900 tokens a second after headroom, kept by the provider, too."""
LANES: dict[str, dict[str, Any]] = {
    "gold": {"max_wait_s": 30},
    "silver": {"max_wait_s": 60},
    "bronze": {"max_wait_s": 60, "when_busy": "hold", "min_share": 0.25},
    "dust": {"max_wait_s": 60, "when_busy": "hold", "keep_free": 0.5},
    "dated": {"max_wait_s": 60, "order": "edf"},
    "upside": {"max_wait_s": 60, "max_requests": 10, "lifo_above": 0.5},
    "small": {"max_wait_s": 60, "max_requests": 6},
    "talk": {"max_wait_s": 60, "max_requests": 6},
    "ghost": {"max_wait_s": 60, "max_requests": 2, "shadow": ["max_requests"]},
    "steady": {"max_wait_s": 3},
    "patient": {"max_wait_s": 30},
    "brief": {"max_wait_s": 2},
}
TENANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "triple": {"weight": 3},
    "vip": {"vip": True},
    "tokens": {"tpm": 50, "shadow": ["tpm"]},
    "calls": {"rpm": 1, "shadow": ["rpm"]},
    "places": {"concurrency": 1, "shadow": ["concurrency"]},
    "agent": {"sessions": {"max_tokens": 1, "shadow": ["max_tokens"]}},
    "*": {},
}
ONE = ("edf", "lifo", "heavy", "full-openai", "full-anthropic", "again", "bounded")
FEW = {"any": 5, "held": 2, "watched": 2, "partly": 2, "fair": 4, "weighed": 4, "vips": 4, "steady": 4, "told": 4}
SLOTS = {"shared": 8, "engine": 10, **FEW, **dict.fromkeys(ONE, 1)}
"""Upstreams with so many places; each serves the model of its name."""


def compatible(url: str, **rules: Any) -> dict[str, Any]:
    """One name more for the provider at `url`."""
    return {
        "provider": "compatible", "url": url, "dialects": ["openai", "anthropic"], "breaker": NEVER_OPENS,
        "follow_headers": False, **rules,
    }  # fmt: skip


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """All lanes and all upstreams of this module."""
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    upstreams: dict[str, Any] = {
        "sink": {"concurrency": 1000, "url": url, "fake": QUICK},
        "metered": {**STRICT, "follow_headers": False},
        "account": STRICT,
        "spoken": {"limits": [{"tpm": 120_000, "burst_s": 2}], "fake": {**QUICK, "burst_s": 3}},
        **{name: compatible(url, concurrency=places) for name, places in SLOTS.items()},
        "soft-limit": compatible(url, limits=[{"tpm": 60, "burst_s": 1, "shadow": True}], concurrency=1000),
        "soft-places": compatible(url, concurrency=1, shadow=["concurrency"]),
        "soft-cache": {
            "kv": {"tokens": 50, "shadow": True, "scrape_s": 0.1, "stale_s": 2},
            "fake": {**QUICK, "kv_tokens": 100_000},
        },
    }
    observed = {"watched": 1.0, "partly": 0.5}
    with running(
        tmp_path_factory.mktemp("lanes"),
        upstreams=upstreams,
        routes=[
            {"models": [name], "chain": [name], "acknowledge_unowned": True, "observe": observed.get(name, 0)}
            for name in upstreams
        ],
        other_endpoints="sink",
        gateway=PATIENT,
        lanes=LANES,
        tenants=TENANTS,
        identity={"tenant": "header:x-team"},
        queue={"max_tokens": 200_000},
        tokens={"calibrate": False},
        timeouts={"first_token_s": 120, "stall_s": 120},
    ) as one:
        yield one


@pytest.fixture(autouse=True)
def clean(stack: Stack) -> Iterator[None]:
    """Every test ends with balanced books."""
    yield
    books_balance(stack)


def show(capsys: pytest.CaptureFixture[str], line: str) -> None:
    """Print a figure past pytest's capture."""
    with capsys.disabled():
        print(f"\n  {line}")  # noqa: T201 - a figure for people


def slow(seconds: float) -> str:
    """The fault that makes a provider take so long."""
    return f"slow-first-token;s={seconds}"


def tally(stack: Stack) -> dict[str, Any]:
    """What was counted so far."""
    return dict(stack.state()["tally"])


def seen(stack: Stack, model: str, name: str = "sink") -> list[dict[str, Any]]:
    """What a provider got for a model, in its order."""
    found = [one for one in stack.record(name)["requests"] if one["model"] == model and one["admitted"] is not None]
    return sorted(found, key=lambda one: one["admitted"])


def order(stack: Stack, model: str, name: str = "sink") -> list[str]:
    """The marks of requests in the order in which they were served."""
    return [one["headers"]["x-mark"] for one in seen(stack, model, name) if "x-mark" in one["headers"]]


def most_at_once(requests: Sequence[dict[str, Any]]) -> int:
    """How many ran at the same time."""
    ends = [(one["finished"], -1) for one in requests if one["finished"] is not None]
    running_now = most = 0
    for _, step in sorted([(one["admitted"], 1) for one in requests] + ends):
        running_now += step
        most = max(most, running_now)
    return most


def queue_ms(answers: Sequence[Result]) -> list[int]:
    """How long each of them waited for its turn."""
    return [int(answer.headers["x-tidegate-queue-ms"]) for answer in answers]


async def reached(stack: Stack, holds: Callable[[dict[str, Any]], Any], within_s: float = PATIENCE_S) -> dict[str, Any]:
    """The first state of the service that fits."""
    end = time.monotonic() + within_s
    while True:
        state = await asyncio.to_thread(stack.state)
        if holds(state):
            return state
        assert time.monotonic() < end, state["waiting"]
        await asyncio.sleep(0.01)


def in_line(lane: str, number: int) -> Callable[[dict[str, Any]], bool]:
    """That so many wait in a lane."""
    return lambda state: state["waiting"][lane]["requests"] == number


@contextlib.asynccontextmanager
async def taken(stack: Stack, clients: Crowd, model: str, number: int = 1) -> AsyncIterator[None]:
    """All places of an upstream are in use while the block runs."""
    before = len(await asyncio.to_thread(seen, stack, model))
    asks = [clients.ask(chat(model=model), x_fake_fault=slow(100), x_tidegate_priority="gold") for _ in range(number)]
    holders = [asyncio.create_task(ask) for ask in asks]
    try:
        end = time.monotonic() + PATIENCE_S
        while len(await asyncio.to_thread(seen, stack, model)) < before + number:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        yield
    finally:
        await gone(holders)


async def gone(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """All these clients leave."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def again_and_again(ask: Callable[[], Awaitable[Result]], end: float, answers: list[Result]) -> None:
    """A client that asks anew as soon as it is answered."""
    while time.monotonic() < end:
        answers.append(await ask())
        if answers[-1].status != 200:
            await asyncio.sleep(0.2)


def flood(
    number: int, ask: Callable[[], Awaitable[Result]], end: float, answers: list[Result]
) -> list[asyncio.Task[None]]:
    """So many clients at once that never rest."""
    return [asyncio.create_task(again_and_again(ask, end, answers)) for _ in range(number)]


# Shares of lanes, and what they leave free.


async def test_a_lane_gets_its_share_of_tokens_under_an_endless_flood(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quarter for the lower lane, the rest for the better one, all that there is for both, and no 429."""
    answers: list[Result] = []
    body = chat(model="metered", max_tokens=80)
    async with crowd(stack) as clients:

        def ask(lane: str) -> Awaitable[Result]:
            return clients.ask(body, x_tidegate_priority=lane, x_mark=lane)

        start, end = time.monotonic(), time.monotonic() + 7.5
        tasks = flood(20, lambda: ask("gold"), end, answers) + flood(20, lambda: ask("bronze"), end, answers)
        await asyncio.gather(*tasks)
    assert {answer.status for answer in answers} == {200}
    record = stack.record("metered")
    assert record["refused_429"] == 0
    lanes = Counter(order(stack, "metered", name="metered")[60:125])  # what was saved up is gone by then
    share = lanes["bronze"] / lanes.total()
    assert 0.19 < share < 0.31, lanes
    seconds, used = max(one.ended for one in answers) - start, record["charged_tokens"]
    assert 0.8 * 1900 * seconds < used < 1900 * (seconds + 2.2)
    show(capsys, f"share of tokens: {share:.2f} of 0.25 promised; {used / seconds:.0f} of 1900 tokens/s used")


async def test_a_lane_gets_its_share_of_places_under_an_endless_flood(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same of slots."""
    gold: list[Result] = []
    bronze: list[Result] = []
    async with crowd(stack) as clients:

        def ask(lane: str) -> Awaitable[Result]:
            return clients.ask(chat(model="shared"), x_tidegate_priority=lane, x_fake_fault=slow(0.1))

        start, end = time.monotonic(), time.monotonic() + 4
        tasks = flood(40, lambda: ask("gold"), end, gold) + flood(40, lambda: ask("bronze"), end, bronze)
        await asyncio.gather(*tasks)
    assert {answer.status for answer in gold + bronze} == {200}
    within = [[one for one in lane if start + 1 < one.ended < end] for lane in (gold, bronze)]
    share = len(within[1]) / len(within[0] + within[1])
    assert 0.17 < share < 0.33, (len(within[0]), len(within[1]))
    assert 6 <= most_at_once(seen(stack, "shared")) <= 8
    show(capsys, f"share of places: {share:.2f} of 0.25 promised")


@pytest.mark.parametrize(("model", "fake"), [("engine", "sink"), ("account", "account")])
async def test_urgent_work_does_not_wait_for_what_a_flood_leaves_free(
    stack: Stack, capsys: pytest.CaptureFixture[str], model: str, fake: str
) -> None:
    """Three hundred jobs of a lane that keeps half free; at an engine with places, and over a limit of tokens."""
    async with crowd(stack) as clients:

        def urgent() -> Awaitable[Result]:
            return clients.ask(chat("now", model=model, max_tokens=60), x_tidegate_priority="gold")

        first = await urgent()
        jobs = [
            asyncio.create_task(
                clients.ask(
                    chat(f"job {i}", model=model, max_tokens=100), x_tidegate_priority="dust", x_fake_fault=slow(0.4)
                )
            )
            for i in range(300)
        ]
        await reached(stack, lambda state: state["waiting"]["dust"]["requests"] > 200)
        answers = [first]
        for _ in range(20):
            answers.append(await urgent())
            await asyncio.sleep(0.1)
        still = (await asyncio.to_thread(stack.state))["waiting"]["dust"]["requests"]
        await gone(jobs)
    assert {answer.status for answer in answers} == {200}
    waits = queue_ms(answers)
    assert statistics.median(waits) < 20, waits
    assert max(waits) < 250, waits
    assert still > 150
    assert stack.record(fake)["refused_429"] == 0
    show(capsys, f"{model}: beside {still} jobs in line waited {statistics.median(waits):.0f} ms, {max(waits)} at most")


# Tenants.


async def test_a_light_tenant_is_served_promptly_beside_a_heavy_one(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two hundred wait, who comes now and then waits for a place or two."""
    async with crowd(stack) as clients:

        def ask(team: str, mark: int) -> Coroutine[Any, Any, Result]:
            body = chat(f"{team} {mark}", model="fair")
            return clients.ask(body, x_team=team, x_tidegate_priority="silver", x_fake_fault=slow(0.1))

        heavy = [asyncio.create_task(ask("heavy", i)) for i in range(200)]
        await reached(stack, lambda state: state["waiting"]["silver"]["requests"] > 150)
        light = []
        for i in range(12):
            light.append(await ask("light", i))
            await asyncio.sleep(0.05)
        behind = (await asyncio.to_thread(stack.state))["waiting"]["silver"]["requests"]
        await gone(heavy)
    assert [answer.status for answer in light] == [200] * 12
    assert behind > 50
    assert statistics.median(queue_ms(light)) < 150, queue_ms(light)
    assert max(queue_ms(light)) < 800, queue_ms(light)
    show(capsys, f"light tenant beside {behind}: waited {statistics.median(queue_ms(light)):.0f} ms")


def backlog_of(
    clients: Crowd, model: str, lane: str, teams: dict[str, int], seconds: float = 0.02
) -> list[asyncio.Task[Result]]:
    """Requests of several tenants stand in line, mixed, each marked with its tenant."""
    names = [team for team, number in teams.items() for _ in range(number)]
    random.Random(7).shuffle(names)
    return [
        asyncio.create_task(
            clients.ask(
                chat(f"{team} {i}", model=model),
                x_team=team,
                x_mark=team,
                x_tidegate_priority=lane,
                x_fake_fault=slow(seconds),
            )
        )
        for i, team in enumerate(names)
    ]


async def test_weights_show_in_what_is_served(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """Three of a tenant with weight 3 for one of another, as long as both wait."""
    async with crowd(stack) as clients:
        async with taken(stack, clients, "weighed", 4):
            tasks = backlog_of(clients, "weighed", "silver", {"triple": 90, "single": 90})
            await reached(stack, in_line("silver", 180))
        answers = await asyncio.gather(*tasks)
    assert {answer.status for answer in answers} == {200}
    first = Counter(order(stack, "weighed")[:100])
    assert 70 <= first["triple"] <= 80, first
    show(capsys, f"weights 3 : 1 of the first hundred: {first['triple']} : {first['single']}")


async def test_vips_go_first_up_to_their_share(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the lane, though they are one tenant of four; and one that comes alone is the next to go."""
    async with crowd(stack) as clients:
        async with taken(stack, clients, "vips", 4):
            teams = {"vip": 40, "a": 30, "b": 30, "c": 30}
            tasks = backlog_of(clients, "vips", "silver", teams)
            await reached(stack, in_line("silver", 130))
        answers = await asyncio.gather(*tasks)
        first = Counter(order(stack, "vips")[:60])
        async with taken(stack, clients, "vips", 4):
            tasks = backlog_of(clients, "vips", "silver", {"a": 20, "b": 20})
            await reached(stack, in_line("silver", 40))
            tasks += backlog_of(clients, "vips", "silver", {"vip": 1})
            await reached(stack, in_line("silver", 41))
        answers += await asyncio.gather(*tasks)
    assert {answer.status for answer in answers} == {200}
    assert 27 <= first["vip"] <= 33, first
    assert order(stack, "vips")[130:].index("vip") <= 4
    show(capsys, f"VIPs among the first sixty: {first['vip']}")


# Orders.


async def test_the_earliest_deadline_goes_first(stack: Stack) -> None:
    """In a lane with that order; who names none comes last."""
    deadlines = [55, 30, 45, 25, 50, 35, 40]
    async with crowd(stack) as clients:
        async with taken(stack, clients, "edf"):
            tasks = []
            for number, seconds in enumerate([None, *deadlines], 1):
                timeout = {} if seconds is None else {"x_request_timeout_ms": str(seconds * 1000)}
                ask = clients.ask(
                    chat(f"by {seconds}", model="edf"), x_tidegate_priority="dated", x_mark=str(seconds), **timeout
                )
                tasks.append(asyncio.create_task(ask))
                await reached(stack, in_line("dated", number))
        answers = await asyncio.gather(*tasks)
    assert {answer.status for answer in answers} == {200}
    assert order(stack, "edf") == [*map(str, sorted(deadlines)), "None"]


async def test_the_newest_goes_first_while_a_lane_is_full(stack: Stack) -> None:
    """Until it is emptier than half of what began that; then the oldest again."""
    async with crowd(stack) as clients:
        async with taken(stack, clients, "lifo"):
            tasks = []
            for number in range(1, 9):
                ask = clients.ask(chat(f"{number}", model="lifo"), x_tidegate_priority="upside", x_mark=str(number))
                tasks.append(asyncio.create_task(ask))
                await reached(stack, in_line("upside", number))
        answers = await asyncio.gather(*tasks)
    assert {answer.status for answer in answers} == {200}
    assert order(stack, "lifo") == ["8", "7", "6", "5", "4", "3", "1", "2"]


# Bounds.


async def test_a_full_lane_sheds_the_newest_of_the_heaviest_tenant(stack: Stack) -> None:
    """One that takes less room gets in, the other's newest makes room for it; the heavy one itself does not get in."""
    async with crowd(stack) as clients:

        def ask(team: str, mark: str) -> asyncio.Task[Result]:
            body = chat(mark, model="heavy")
            return asyncio.create_task(clients.ask(body, x_team=team, x_tidegate_priority="small", x_mark=mark))

        async with taken(stack, clients, "heavy"):
            inside = []
            for number in range(6):
                inside.append(ask("heavy", f"heavy {number}"))
                await reached(stack, in_line("small", number + 1))
            refused = await ask("heavy", "heavy 6")
            newcomer = ask("light", "light 0")
            victim = await inside.pop()
            assert not any(task.done() for task in [*inside, newcomer])
        answers = await asyncio.gather(*inside, newcomer)
    assert (refused.status, refused.reason) == (503, "lane_full")
    assert (victim.status, victim.reason) == (503, "evicted")
    assert {answer.status for answer in answers} == {200}
    assert order(stack, "heavy")[:2] in (["heavy 0", "light 0"], ["light 0", "heavy 0"])
    for each in (refused, victim):
        assert int(each.headers["Retry-After"]) >= 1
        assert int(each.headers["retry-after-ms"]) >= 1000


BIG = 18_000


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
async def test_a_better_lane_pushes_out_a_lower_one_when_all_are_full(stack: Stack, sdk: str) -> None:
    """The victim's client is told in its dialect, and its SDK raises what it raises for an overloaded server."""
    async with crowd(stack) as clients:

        def ask(lane: str, mark: str) -> asyncio.Task[Result]:
            body = chat(mark, model=f"full-{sdk}", max_tokens=BIG)
            return asyncio.create_task(clients.ask(body, x_tidegate_priority=lane, x_mark=mark))

        async with taken(stack, clients, f"full-{sdk}"):
            tasks = []
            for number in range(10):
                tasks.append(ask("silver", f"{sdk} silver {number}"))
                await reached(stack, in_line("silver", number + 1))
            victim = asyncio.create_task(_victim(stack, sdk))
            await reached(stack, in_line("dust", 1))
            refused = await ask("dust", f"{sdk} dust")
            best = ask("gold", f"{sdk} gold")
            error = await asyncio.wait_for(victim, 10)
            assert not any(task.done() for task in [*tasks, best])
        # they are let go by their clients: each would talk for seconds
        await gone([*tasks, best])
    assert (refused.status, refused.reason) == (503, "lane_full")
    assert error.status_code == 503
    known = openai.InternalServerError, anthropic.InternalServerError
    assert isinstance(error, known), type(error)
    headers = error.response.headers
    assert headers["x-tidegate-reason"] == "evicted"
    assert int(headers["retry-after"]) >= 1
    assert int(headers["retry-after-ms"]) >= 1000
    body: Any = error.body if sdk == "openai" else error.body["error"]  # type: ignore[index]
    assert body["type"] == ("server_busy" if sdk == "openai" else "overloaded_error")
    assert body.get("code") == ("SERVER_OVERLOADED" if sdk == "openai" else None)
    assert body["reason"] == "evicted"


async def _victim(stack: Stack, sdk: str) -> openai.APIStatusError | anthropic.APIStatusError:
    """A call in the lowest lane by an SDK that does not try again: the error that it gets."""
    ask: dict[str, Any] = {"model": f"full-{sdk}", "max_tokens": BIG, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"x-tidegate-priority": "dust"}
    options: dict[str, Any] = {"api_key": "sk", "default_headers": headers, "max_retries": 0, "timeout": 30}
    try:
        if sdk == "openai":
            async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", **options) as client:
                await client.chat.completions.create(**ask)
        async with anthropic.AsyncAnthropic(base_url=stack.url, **options) as other:
            await other.messages.create(**ask)
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        return error
    raise AssertionError("it was served")


# Sessions.


async def test_a_running_session_gets_in_where_a_new_one_does_not(stack: Stack) -> None:
    """At saturation: a call of a session that was served before has the part of the lane that new ones may not use."""
    async with crowd(stack) as clients:

        def ask(session: str) -> asyncio.Task[Result]:
            body = chat(f"of {session}", model="again")
            headers = {"x_tidegate_session": session} if session else {}
            return asyncio.create_task(clients.ask(body, x_tidegate_priority="talk", **headers))

        assert (await ask("running")).status == 200
        await reached(stack, lambda state: not state["flying"] and not state["unsettled"])
        async with taken(stack, clients, "again"):
            inside = []
            for number in range(4):
                inside.append(ask(f"early {number}"))
                await reached(stack, in_line("talk", number + 1))
            new = await ask("new")
            inside.append(ask("running"))
            await reached(stack, in_line("talk", 5))
        answers = await asyncio.gather(*inside)
    assert (new.status, new.reason) == (503, "lane_full")
    assert {answer.status for answer in answers} == {200}


# What is only observed.


async def test_a_route_that_is_observed_holds_and_refuses_nobody(stack: Stack) -> None:
    """Beside one that holds. What would have been is counted; the provider sees everything at once."""
    before, queued = Counter(tally(stack)["observed"]), Counter(tally(stack)["queued"])
    async with crowd(stack) as clients:

        def ask(model: str, i: int, seconds: float, **headers: str) -> Awaitable[Result]:
            return clients.ask(chat(f"{i}", model=model), x_fake_fault=slow(seconds), **headers)

        watched = asyncio.gather(*(ask("watched", i, 2.0, x_tidegate_priority="small") for i in range(30)))
        held = asyncio.gather(*(ask("held", i, 0.7, x_tidegate_priority="silver") for i in range(6)))
        answers = [*await watched, *await held]
    assert {answer.status for answer in answers} == {200}
    assert most_at_once(seen(stack, "watched")) > 15
    assert most_at_once(seen(stack, "held")) == 2
    assert Counter(tally(stack)["queued"]) - queued == {"silver": 4}
    observed = Counter(tally(stack)["observed"]) - before
    assert 20 <= observed.total() <= 28, observed
    assert observed["lane_full"] == 0, "nobody stood in line who could have filled it"


async def test_a_share_of_a_route_is_observed(stack: Stack) -> None:
    """About half of the requests go at once, the others wait; the same body always fares alike."""
    async with crowd(stack) as clients:

        def ask(i: int) -> Coroutine[Any, Any, Result]:
            body = chat(f"question {i}", model="partly")
            return clients.ask(body, x_tidegate_priority="silver", x_fake_fault=slow(0.15))

        async with taken(stack, clients, "partly", 2):
            tasks = [asyncio.create_task(ask(i)) for i in range(60)]
            done, held = await _those_done(tasks, stack)
            again = [asyncio.create_task(ask(i)) for i in done]
            await asyncio.wait_for(asyncio.gather(*again), 10)
        answers = await asyncio.gather(*tasks)
    assert {answer.status for answer in answers} == {200}
    assert 15 <= len(done) <= 45
    assert len(held) == 60 - len(done)


async def _those_done(tasks: list[asyncio.Task[Result]], stack: Stack) -> tuple[list[int], list[int]]:
    """Which were served, when all others wait."""
    await reached(
        stack,
        lambda state: sum(lane["requests"] for lane in state["waiting"].values()) + sum(t.done() for t in tasks) == 60,
    )
    done = [i for i, task in enumerate(tasks) if task.done()]
    return done, [i for i, task in enumerate(tasks) if not task.done()]


def test_all_is_observed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Limits of tokens and places, tenants' allowances, bounds: nothing stops anybody but a key or a body that is
    wrong. Whatever would have happened is in the tally, and the books balance after it.
    """
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with running(
        tmp_path_factory.mktemp("all"),
        upstreams={
            "sink": {"concurrency": 1000, "url": url, "fake": QUICK},
            "main": compatible(url, concurrency=2, limits=[{"tpm": 600, "burst_s": 10}], owned=True),
        },
        routes=[{"models": ["*"], "chain": ["main"]}],
        other_endpoints="sink",
        lanes={"P0": {"max_wait_s": 4}, "P1": {"max_wait_s": 20, "max_requests": 1}},
        tenants={"known": {}, "poor": {"rpm": 1}, "narrow": {"concurrency": 1}},
        identity={"tenant": "header:x-team", "unknown": "reject"},
        observe=1.0,
    ) as stack:

        async def scenario() -> list[Result]:
            async with crowd(stack) as clients:
                asks = [
                    clients.ask(
                        chat(f"{i}", max_tokens=50),
                        x_team=("known", "poor", "narrow")[i % 3],
                        x_fake_fault=slow(2.0),
                        x_request_timeout_ms="15000",
                    )
                    for i in range(60)
                ]
                answers = await asyncio.gather(*asks)
                asks = [
                    clients.ask(chat(max_tokens=5000), x_team="known"),
                    clients.ask(chat(), x_team="stranger"),
                    clients.ask({"model": "gpt-5"}, x_team="known"),
                    clients.ask(chat(), path="/v2/nothing", x_team="known"),
                ]
                return [*answers, *await asyncio.gather(*asks)]

        *answers, large, stranger, wrong, lost = asyncio.run(scenario())
        assert {answer.status for answer in answers} == {200}
        assert tally(stack)["queued"] == {}
        assert large.status == 200
        assert (stranger.status, wrong.status, lost.status) == (401, 400, 404)
        assert stack.record("sink")["max_in_flight"] > 30
        observed = tally(stack)["observed"]
        assert observed["tenant_quota"] == 19
        assert observed["too_large"] == 1
        assert observed["tenant_concurrency"] >= 10
        assert observed["deadline_unmeetable"] + observed.get("held", 0) + observed.get("lane_full", 0) >= 30
        refused = tally(stack)["refused"]
        assert refused == {"unauthenticated": 1, "bad_request": 1, "not_found": 1}
        books_balance(stack)


# Shadow mode.


@pytest.mark.parametrize(
    ("team", "model", "key"),
    [
        ("tokens", "sink", "tenant/tokens/total"),
        ("calls", "sink", "tenant/calls/requests"),
        ("places", "sink", "tenant/places/slots"),
        ("agent", "sink", "session/agent/tokens"),
        ("default", "soft-limit", "upstream/soft-limit/*/total"),
        ("default", "soft-places", "upstream/soft-places/slots"),
        ("default", "soft-cache", "upstream/soft-cache/kv"),
        ("default", "bounded", "lane/ghost/max_requests"),
    ],
)
async def test_a_limit_in_shadow_mode_stops_nobody_and_is_named(stack: Stack, team: str, model: str, key: str) -> None:
    """Of a tenant, a session, an upstream, an engine's cache, and a lane."""
    before, queued = tally(stack)["shadowed"].get(key, 0), tally(stack)["queued"]
    async with crowd(stack) as clients:
        asks = [
            clients.ask(
                chat(f"{i}", model=model, max_tokens=60),
                x_team=team,
                x_tidegate_priority="ghost",
                x_tidegate_session="s",
                x_fake_fault=slow(0.1),
            )
            for i in range(8)
        ]
        answers = await asyncio.gather(*asks)
    assert {answer.status for answer in answers} == {200}
    if model != "bounded":
        assert tally(stack)["queued"] == queued
    assert tally(stack)["shadowed"].get(key, 0) - before >= 4, tally(stack)["shadowed"]


# Forecasts and promises.


async def test_a_wait_is_forecast(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """Under steady overload most waits are within half and twice their forecast; who cannot be in time is told at once
    and never after a wait.
    """
    chance, numbers = random.Random(3), count()
    async with crowd(stack) as clients:

        def ask(lane: str, **headers: str) -> asyncio.Task[Result]:
            body, took = chat(f"{next(numbers)}", model="steady"), slow(chance.uniform(0.05, 0.15))
            return asyncio.create_task(clients.ask(body, x_tidegate_priority=lane, x_fake_fault=took, **headers))

        await asyncio.gather(*(ask("steady") for _ in range(12)))  # so that it knows how long a place is held
        tasks, hasty = [], []
        end = time.monotonic() + 8.0
        while time.monotonic() < end:
            tasks.append(ask("steady"))
            if len(tasks) % 8 == 0:
                hasty.append(ask("steady", x_request_timeout_ms="700"))
            await asyncio.sleep(chance.expovariate(50))
        answers, hurried = await asyncio.gather(*tasks), await asyncio.gather(*hasty)
    ratios = tally(stack)["forecasts"]["steady"]
    near = sum(ratios.get(name, 0) for name in ("0.5-0.8", "0.8-1.25", "1.25-2"))
    assert sum(ratios.values()) > 60, ratios
    assert near >= 0.75 * sum(ratios.values()), ratios
    unmeetable = [one for one in answers + hurried if one.reason == "deadline_unmeetable"]
    assert len(unmeetable) > 10
    assert {one.reason for one in answers if one.status != 200} <= {"deadline_unmeetable"}
    assert statistics.median(one.seconds for one in unmeetable) < 0.35, "half of what the hasty would have waited"
    assert max(one.seconds for one in unmeetable) < LANES["steady"]["max_wait_s"] / 2
    show(capsys, f"forecasts: {near} of {sum(ratios.values())} within half and twice; {len(unmeetable)} told at once")


@pytest.mark.parametrize(("model", "rate", "seconds"), [("told", 80.0, 0.1), ("spoken", 60.0, 0.01)])
async def test_who_comes_back_when_told_gets_in(
    stack: Stack, capsys: pytest.CaptureFixture[str], model: str, rate: float, seconds: float
) -> None:
    """A place then, at an upstream without a free place and at one without tokens: the promise holds nearly always."""
    chance, numbers = random.Random(5), count()
    told: list[float] = []
    first: Counter[str] = Counter()
    returns: Counter[str] = Counter()

    async def client(clients: Crowd) -> None:
        body = chat(f"{next(numbers)}", model=model, max_tokens=90)
        for attempt in range(8):
            extra = {"x_stainless_retry_count": str(attempt)} if attempt else {}
            answer = await clients.ask(body, x_tidegate_priority="brief", x_fake_fault=slow(seconds), **extra)
            outcome = answer.reason or str(answer.status)
            if attempt == 0:
                first[outcome] += 1
            else:
                returns[outcome] += 1
            if answer.status == 200:
                return
            told.append(int(answer.headers["retry-after-ms"]) / 1000)
            await asyncio.sleep(told[-1])
        raise AssertionError("never served")

    async def later(coming: Awaitable[None]) -> None:
        await asyncio.sleep(chance.uniform(0, 3))
        await coming

    start = time.monotonic()
    async with crowd(stack) as clients:
        await asyncio.gather(*(later(client(clients)) for _ in range(round(3 * rate))))
    took = time.monotonic() - start
    show(
        capsys,
        f"{model}: at first {dict(first)}, when they came back {dict(returns)}, "
        f"told {max(told, default=0):.1f} s at most, all done in {took:.1f} s",
    )
    assert returns.total() >= 15
    assert returns["200"] >= 0.9 * returns.total()


# All of it at once.


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_crowds_break_nothing(stack: Stack, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    """Any lane, tenant, session and deadline, streamed or not, and clients that leave: who is answered is served or
    told why not, and when to come back; no place is taken twice, and none is lost.
    """
    chance, before = random.Random(seed), len(seen(stack, "any"))

    async def client(clients: Crowd, number: int) -> Result | None:
        await asyncio.sleep(chance.uniform(0, 3))
        headers = {
            "x_tidegate_priority": chance.choice(list(LANES)),
            "x_team": chance.choice([*TENANTS, "unlisted", "another"]).replace("*", "third"),
            "x_tidegate_session": chance.choice(["", "a", f"new {number}"]),
            "x_fake_fault": slow(chance.choice([0.01, 0.1, 0.4])),
        }
        if chance.random() < 0.3:
            headers["x_request_timeout_ms"] = chance.choice(["300", "1500", "8000"])
        body = chat(f"{seed} {number}", model="any", stream=chance.random() < 0.4)
        try:
            async with asyncio.timeout(chance.uniform(0.01, 2) if chance.random() < 0.3 else 60):
                return await clients.ask(body, **headers)
        except TimeoutError:
            return None

    async with crowd(stack) as clients:
        answers = await asyncio.gather(*(client(clients, number) for number in range(350)))
    told = [answer for answer in answers if answer is not None]
    left = len(answers) - len(told)
    outcomes = Counter(answer.reason or str(answer.status) for answer in told)
    show(capsys, f"seed {seed}: {dict(outcomes)}, {left} left")
    late = {"504", "deadline_passed"}
    assert set(outcomes) <= {"200", "lane_full", "evicted", "deadline_unmeetable", "queue_timeout", *late}
    for answer in told:
        if answer.status not in (200, 504):
            assert int(answer.headers["Retry-After"]) >= 1
    served = seen(stack, "any")[before:]
    assert most_at_once(served) <= 5
    assert outcomes["200"] <= len(served) <= outcomes["200"] + sum(outcomes[reason] for reason in late) + left
