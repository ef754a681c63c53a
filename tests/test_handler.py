"""The way of one request with everything that decides behind it: duplicates, and random lives of clients."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import pytest

from extproc import admission as wiring
from extproc.core.events import Admitted, Refused, Retried, Settled
from extproc.ports import Gone
from tests.desk import WHOLE, Desk, Wire, chat
from tests.doubles import Ledger, Suspending, VirtualLoop, play


@pytest.fixture(params=[Ledger, Suspending], ids=["memory", "suspending"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Ledger]:
    """Capacity that answers at once, and capacity that suspends."""
    monkeypatch.setattr(wiring, "MemoryCapacity", request.param)
    return request.param


@pytest.mark.usefixtures("kind")
def test_a_request_is_told_when_it_goes_and_when_it_is_settled() -> None:
    """Admitted with its wait; settled once its record is there."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        first = desk.send(chat("one"), lasts_s=3.0)
        await asyncio.sleep(0.1)
        second = desk.send(chat("two"))
        await second.task
        waited = [event.waited_s for event in desk.observer.of(Admitted)]
        assert waited == [pytest.approx(0.0, abs=0.1), pytest.approx(3.0, abs=0.2)]
        assert [event.predicted_s is None for event in desk.observer.of(Admitted)] == [True, False]
        assert len(first.departures) == len(second.departures) == 1
        await desk.settle_down()
        assert [event.client_gone for event in desk.observer.of(Settled)] == [False, False]

    play(scenario)


@pytest.mark.usefixtures("kind")
def test_what_an_upstream_reports_teaches_how_its_own_model_counts() -> None:
    """Once a few answers have said so; the model that it stands behind goes on counting as it did."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        text = "as many words as it takes to weigh more than the frame of a message " * 2
        for n in range(6):
            wire = desk.send(chat(f"{text}{n}", "c"), lasts_s=0.1)
            wire.tail = WHOLE | {"in": 20}
            await wire.task
            await asyncio.sleep(1)
        plain = desk.observer.of(Admitted)[0].request
        assert plain.sizes == {}
        busy = desk.send(chat("busy"), lasts_s=20.0)
        for n in range(6):
            wire = desk.send(chat(f"{text}{n} there", "c"), lasts_s=0.1)
            wire.tail = WHOLE | {"in": 2 * plain.counted}
            await wire.task
            await asyncio.sleep(1)
        found = [(event.request, event.order[0]) for event in desk.observer.of(Admitted)[7:]]
        assert {name for _, name in found} == {"c"}
        learned = found[-1][0]
        assert learned.size.input < learned.counted < 1.9 * learned.counted < learned.size_at("c").input
        assert not busy.aborts
        await desk.settle_down()

    play(scenario)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize(
    ("stream", "patience_s", "learned", "seen"),
    [
        (False, 30, False, True),
        (False, 5, False, False),
        (False, 5, True, True),
        (False, 2, True, False),
        (True, 30, False, True),
        (True, 4, False, False),
        (True, 4, True, True),
        (True, 0.8, True, False),
    ],
)
def test_an_upstream_that_is_silent_is_seen_by_callers_with_deadlines(
    patience_s: float,
    *,
    stream: bool,
    learned: bool,
    seen: bool,
) -> None:
    """By all who gave it clearly more than what is usual there, or is assumed while nothing is known of it."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        for n in range(25 if learned else 0):
            await desk.send(chat(f"well {n}"), lasts_s=0.5).task
        await asyncio.sleep(1)
        for n in range(50):
            asked = {**chat(f"silence {n}"), "stream": stream}
            wire = desk.send(asked, lasts_s=patience_s, x_request_timeout_ms=str(int(patience_s * 1000)))
            wire.silent = True
            await wire.task
            await asyncio.sleep(0.1)
        state = desk.admission.breakers.by_name["a"]
        assert (str(state.state), state.failures) == ("open" if seen else "closed", 0)
        await desk.settle_down()

    play(scenario)


@pytest.mark.usefixtures("kind")
def test_the_retry_of_a_held_request_goes_in_its_place() -> None:
    """Before who came between; the first copy gets its refusal, and nobody is asked twice."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        desk.send(chat("busy"), lasts_s=5.0)
        await asyncio.sleep(0.1)
        first = desk.send(chat("mine"))
        await asyncio.sleep(0.1)
        between = desk.send(chat("between"))
        await asyncio.sleep(1)
        retry = desk.send(chat("mine"), x_stainless_retry_count="1")
        await first.task
        [(status, headers, _, details)] = first.answers
        assert (status, details, headers["x-should-retry"]) == (503, "tidegate_evicted", "false")
        await asyncio.gather(retry.task, between.task)
        order = [event.request.ticket for event in desk.observer.of(Admitted)]
        assert order[1:] == [retry.departures[0].ticket, between.departures[0].ticket]
        assert [event.reason for event in desk.observer.of(Refused)] == ["evicted"]
        await desk.settle_down()

    play(scenario)


@pytest.mark.usefixtures("kind")
def test_the_retry_of_a_running_request_gets_the_freed_slot() -> None:
    """The first is ended in Envoy and booked as one whose client left; then the second goes at the head of the line."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        first = desk.send(chat("mine"), lasts_s=60.0)
        await asyncio.sleep(1)
        waiting = desk.send(chat("waiting"), lasts_s=0.5)
        await asyncio.sleep(1)
        retry = desk.send(chat("mine"), x_stainless_retry_count="1")
        await asyncio.gather(first.task, waiting.task, retry.task)
        [(status, headers, _, details)] = first.aborts
        assert (status, details, headers["x-should-retry"]) == (503, "tidegate_evicted", "false")
        assert first.answers == []
        assert desk.most[first.name] == 1
        await desk.settle_down()
        assert not any(event.client_gone for event in desk.observer.of(Settled))
        ends = {event.request.ticket: event.evicted for event in desk.observer.of(Settled)}
        assert ends == {
            first.departures[0].ticket: True,
            waiting.departures[0].ticket: False,
            retry.departures[0].ticket: False,
        }
        assert desk.observer.of(Refused) == []
        assert [event.took for event in desk.observer.of(Retried)] == ["running"]

    play(scenario)


@pytest.mark.usefixtures("kind")
def test_who_left_a_running_request_comes_back_to_its_place() -> None:
    """Its turn had come and it was not served: the retry goes before those who came after the first."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        first = desk.send(chat("mine"), lasts_s=60.0)
        await asyncio.sleep(1)
        desk.send(chat("next"), lasts_s=5.0)
        await asyncio.sleep(0.1)
        between = desk.send(chat("between"))
        await asyncio.sleep(1)
        first.task.cancel()
        await asyncio.sleep(1)
        retry = desk.send(chat("mine"), x_stainless_retry_count="1")
        await asyncio.gather(retry.task, between.task)
        order = [event.request.ticket for event in desk.observer.of(Admitted)]
        assert order.index(retry.departures[0].ticket) < order.index(between.departures[0].ticket)
        assert [event.took for event in desk.observer.of(Retried)] == ["left"]
        await desk.settle_down()

    play(scenario)


@pytest.mark.usefixtures("kind")
def test_retries_that_would_wait_have_a_budget() -> None:
    """Beyond it they are refused at once, each with a later time; who came for the first time waits, or goes."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        desk.send(chat("busy"), lasts_s=10.0)
        await asyncio.sleep(0.1)
        storm = [desk.send(chat(f"storm {n}"), lasts_s=0.01, x_stainless_retry_count="1") for n in range(20)]
        first = desk.send(chat("first"), lasts_s=0.01)
        free = desk.send(chat("free", "b"), lasts_s=0.01, x_stainless_retry_count="1")
        await asyncio.sleep(1)
        refused = [wire for wire in storm if wire.answers]
        assert 12 <= len(refused) <= 16
        assert {wire.answers[0][0] for wire in refused} == {503}
        assert all(b"retry budget" in wire.answers[0][2] for wire in refused)
        waits = [int(wire.answers[0][1]["retry-after-ms"]) for wire in refused]
        assert max(waits) > 2 * min(waits)
        assert len(free.departures) == 1
        assert not first.answers
        await desk.settle_down()
        assert len(first.departures) == 1

    play(scenario)


def test_an_abort_that_cannot_be_written_is_not_our_concern() -> None:
    """The connection to Envoy broke at the same time: the request has ended anyway."""

    async def scenario(loop: VirtualLoop) -> None:
        desk, broken = Desk(loop), []
        loop.set_exception_handler(lambda _, context: broken.append(context))

        class Broken(Wire):
            async def abort(self, *_: Any) -> None:
                self._aborted.set()
                raise Gone

        first = Broken(desk, chat("mine"), lasts_s=60.0)
        desk.wires.append(first)
        first.task = asyncio.ensure_future(desk.handler(first))
        await asyncio.sleep(1)
        retry = desk.send(chat("mine"), x_stainless_retry_count="1")
        await asyncio.gather(first.task, retry.task)
        assert len(retry.departures) == 1
        await desk.settle_down()
        gc.collect()
        assert broken == []

    play(scenario)


@pytest.mark.parametrize(
    ("tail", "choices", "reserved"),
    [(WHOLE, 1, 30), (WHOLE, 2, 30), (WHOLE | {"out": 31}, 2, 32), ({"in": 12, "out": 30, "events": 4}, 1, 512)],
)
def test_what_was_learned_of_answers_is_reserved(tail: dict[str, Any], choices: int, reserved: int) -> None:
    """What a tenant's answers usually are, each choice for itself; one that was cut short teaches nothing."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        for number in range(21):
            uncapped = chat(f"number {number}") | {"n": choices}
            del uncapped["max_tokens"]
            wire = desk.send(uncapped, lasts_s=0.1)
            wire.tail = tail
            await wire.task
            await asyncio.sleep(0.1)
        outputs = [event.request.size.output for event in desk.observer.of(Admitted)]
        assert outputs == [512 * choices] * 20 + [reserved]
        await desk.settle_down()

    play(scenario)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("kind")
def test_random_lives_of_clients_leave_nothing_behind(seed: int) -> None:
    """Clients wait, leave, stay on, retry, with and without a name, at any moment; every write and end takes time.

    No request is ever worked on twice at once, nothing stays taken, and nobody but a client that left is cut off
    without a word.
    """
    seed = seed * 1_000_003 + random.randrange(1_000_003)
    print(f"seed {seed}")  # noqa: T201 - to repeat it
    for part in range(8):
        play(lambda loop: _lives(loop, random.Random(seed + part)))  # noqa: B023 - played at once


async def _lives(loop: VirtualLoop, rng: random.Random) -> None:
    desk = Desk(loop)
    left: set[Wire] = set()
    await asyncio.gather(*(_client(desk, rng, number, left) for number in range(15)))
    await desk.settle_down()
    assert max(desk.most.values()) == 1, desk.most
    for wire in desk.wires:
        if wire.task.cancelled():
            assert wire in left
        else:
            wire.task.result()
            assert wire.answers or wire.aborts or wire.departures, "cut off without a word"


async def _client(desk: Desk, rng: random.Random, number: int, left: set[Wire]) -> None:
    await asyncio.sleep(rng.uniform(0, 5))
    name = {"idempotency_key": f"n{number}"} if rng.random() < 0.5 else {}
    body = chat(f"client {number}", rng.choice("ab"))
    for attempt in range(rng.randint(1, 5)):
        slow = rng.choice([0.0, 0.0, 0.001, 0.01])
        lasts_s = rng.choice([0.05, 0.5, 3.0])
        wire = desk.send(body, lasts_s=lasts_s, slow=slow, x_stainless_retry_count=str(attempt), **name)
        wire.lands_s = rng.choice([0.0, 0.002, 0.05])
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        done, _ = await asyncio.wait([wire.task], timeout=rng.choice([0.0, 0.001, 0.01, 0.5, 4.0, 30.0]))
        if done and not wire.answers and not wire.aborts:
            return
        if not done and rng.random() < 0.6:
            left.add(wire)
            wire.task.cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(rng.choice([0.0, 0.001, 0.6]))
