"""The way of one request with everything that decides behind it: duplicates, and random lives of clients."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from extproc import admission as wiring
from extproc.admission import Admission
from extproc.core.events import Admitted, Refused, Retried, Settled
from extproc.core.identity import Directory
from extproc.core.refusal import RULES
from extproc.dispatch import Dispatch, Outlook, Timing
from extproc.examination import Examination
from extproc.handler import Handler
from extproc.ports import Departure, Gone, Head, Record, RecordKind
from extproc.reception import Reception, SessionRules
from extproc.settings import parse
from extproc.wording import Wording
from tests.doubles import FakeExchange, Ledger, Observer, Suspending, VirtualLoop, play

CONFIG = """
upstreams:
  a: {provider: openai, limits: [{tpm: 6_000_000, rpm: 60_000}], concurrency: 1}
  b: {provider: openai, limits: [{tpm: 6_000_000, rpm: 60_000}], concurrency: 2}
  c: {provider: openai, limits: [{tpm: 6_000_000, rpm: 60_000}], concurrency: 2, models: {c: own}}
routes:
  - {models: [a], chain: [a], acknowledge_unowned: true}
  - {models: [b], chain: [b, a], acknowledge_unowned: true}
  - {models: [c], chain: [a, c], acknowledge_unowned: true}
tenants:
  default: {lanes: [P1], tpm: 5_000_000, rpm: 50_000, concurrency: 40, usd_per_day: 1000}
lanes:
  P1: {max_wait_s: 20, spill_after_s: 1}
identity: {tenant: "header:x-team"}
retries: {share: 0.2, least_per_s: 0.5}
"""
WHOLE: dict[str, Any] = {"finish": "stop", "done": "1", "in": 12, "out": 30}
LEFT = frozenset({"downstream_connection_termination"})
TIMEOUT = frozenset({"upstream_request_timeout"})


class Wire(FakeExchange):
    """A client's connection, with Envoy and an upstream behind it. runs: the upstream works on it.

    slow: how long each write takes. lands_s: how long Envoy takes to end what it is told to end. tail: what its record
    will say of a whole answer. silent: there is none, and Envoy's patience runs out. served_by: who answers; the first
    of the order where that is empty.
    """

    def __init__(self, desk: Desk, body: dict[str, Any], *, lasts_s: float = 1.0, slow: float = 0.0, **headers: str):
        named = {":method": "POST", ":path": "/v1/chat/completions", "x-request-id": f"r{len(desk.wires)}"}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        self.request_id = named["x-request-id"]
        super().__init__(Head(named, bodiless=False), json.dumps(body).encode(), stays_s=lasts_s, hold_s=slow)
        self.desk = desk
        self.slow = slow
        self.lands_s = 0.002
        self.tail = WHOLE
        self.served_by = ""
        self.runs = self.silent = False
        self.name = headers.get("idempotency_key") or json.dumps(body)
        self.task: asyncio.Task[None]

    async def forward(self, departure: Departure) -> None:
        await asyncio.sleep(self.slow)
        await super().forward(departure)
        self.runs = True
        self.desk.most[self.name] = max(self.desk.most[self.name], self.desk.running(self.name))

    async def ended(self) -> None:
        try:
            await super().ended()
        finally:
            self.runs = False
            self.desk.report(self)

    async def answer(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> None:
        await asyncio.sleep(self.slow)
        await super().answer(status, headers, body, details)

    async def abort(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> None:
        await asyncio.sleep(self.lands_s)
        await super().abort(status, headers, body, details)


class Desk:
    """A handler and all that it needs, in virtual time. most: how many copies of a request ever ran at once."""

    def __init__(self, loop: VirtualLoop, config: str = CONFIG) -> None:
        settings = parse(config, "test")
        policy = settings.policy()
        self.loop = loop
        self.observer = Observer()
        self.admission = admission = Admission(policy, loop, self.observer, grace_s=5.0, chance=lambda: 0.5)
        for counter in admission.capacity.levels().values():
            if hasattr(counter, "level"):
                counter.level = counter.capacity
        wording = Wording(lambda reason: RULES[reason].status, lambda: 0.0)
        self.executor = ThreadPoolExecutor(1)
        reception = Reception(
            policy,
            Directory(policy.tenants, ("header:x-team",), reject_unknown=False),
            admission.calibration,
            admission.affinity,
            admission.pace,
            admission.outputs,
            admission.allowances.sessions.fresh,
            loop,
            process="p",
            sessions=SessionRules((), 600.0),
            executor=self.executor,
            chance=lambda: 0.5,
            rates=admission.rates,
        )
        breakers, timing = admission.breakers, Timing(10, 1e4, 60, 600)
        outlook = Outlook(breakers.rest_s, breakers.earliest_probe, admission.limiter.predicted_s, breakers.standing)
        desk = policy, admission.capacity, loop, timing, wording, breakers.allows, breakers.fits
        dispatch = Dispatch(*desk, outlook=outlook, slow=breakers.slow)
        self.handler = Handler(
            reception,
            admission.copies,
            admission.flights,
            admission.limiter,
            dispatch,
            wording,
            loop,
            admission.observe,
            Examination(settings.longest_wait_s),
        )
        self.wires: list[Wire] = []
        self.most: Counter[str] = Counter()
        self.duties = [asyncio.ensure_future(admission.limiter.run())]

    def send(self, body: dict[str, Any], **how: Any) -> Wire:
        """A request arrives."""
        wire = Wire(self, body, **how)
        self.wires.append(wire)
        wire.task = asyncio.ensure_future(self.handler(wire))
        return wire

    def running(self, name: str) -> int:
        """Copies of a request that an upstream works on."""
        return sum(wire.runs for wire in self.wires if wire.name == name)

    def report(self, wire: Wire) -> None:
        """Its record will be there a little later, whatever became of its handler."""
        self.duties.append(asyncio.ensure_future(self._report(wire)))

    async def _report(self, wire: Wire) -> None:
        departure = wire.departures[0]
        how: dict[str, Any] = {"status": 200, "flags": frozenset(), "details": "via_upstream", "tail": wire.tail}
        if wire.aborts:
            how |= {"status": 503, "details": wire.aborts[0][3], "tail": {}}
        elif wire.task.cancelling():
            how |= {"status": 0, "flags": LEFT, "tail": {}}
        more = {"attempt": 1, "duration_s": 1.0, "first_token_s": 0.1}
        first = departure.order[0]
        if wire.silent:
            more["first_token_s"] = None
            how |= {"status": 504, "flags": TIMEOUT, "details": "response_timeout", "tail": {}}
        await asyncio.sleep(0.02)
        if wire.silent and departure.total_s is None:
            known = {"request_id": wire.request_id, "flags": TIMEOUT, "details": ""}
            await self.admission.hear(Record(RecordKind.ATTEMPT, "", first, 0, **known, **more))
            how["details"] = "upstream_per_try_timeout"
        await self.admission.hear(Record(RecordKind.FINAL, departure.ticket, wire.served_by or first, **how, **more))

    async def settle_down(self) -> None:
        """Until everything has come to its end, however that is; then nothing may be left."""
        await asyncio.gather(*(wire.task for wire in self.wires), return_exceptions=True)
        await asyncio.sleep(10)
        for _ in range(3):
            await self.admission.sweep()
        admission = self.admission
        assert (len(admission.flights), admission.flights.unsettled, len(admission.copies)) == (0, 0, 0)
        slots = {key: counter.used for key, counter in admission.capacity.levels().items() if key.endswith("/slots")}
        assert not any(slots.values()), slots
        assert not list(admission.lanes.waiters())
        if isinstance(admission.capacity, Suspending):
            assert admission.capacity.broken_off == 0
        for duty in self.duties:
            duty.cancel()
        await asyncio.gather(*self.duties, return_exceptions=True)
        self.executor.shutdown()
        assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture(params=[Ledger, Suspending], ids=["memory", "suspending"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Ledger]:
    """Capacity that answers at once, and capacity that suspends."""
    monkeypatch.setattr(wiring, "MemoryCapacity", request.param)
    return request.param


def chat(text: str = "hi", model: str = "a") -> dict[str, Any]:
    return {"model": model, "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": text}]}


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
        ends = {event.request.ticket: event.client_gone for event in desk.observer.of(Settled)}
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
