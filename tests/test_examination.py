"""Questions of the doctor are held as they ask, within bounds, and are refused whatever they ask."""

from __future__ import annotations

import asyncio
import json

import pytest

from extproc.core.events import Refused
from extproc.core.refusal import Reason, Rejected
from extproc.dialects import examination
from extproc.examination import MOST, Examination
from tests.doubles import FakeExchange, VirtualLoop, play
from tests.test_handler import Desk, chat


async def answered(attend: Examination, exchange: FakeExchange, body: bytes) -> str:
    with pytest.raises(Rejected) as rejected:
        await attend.attend(exchange, body)
    assert rejected.value.reason is Reason.BAD_REQUEST
    return rejected.value.detail


def test_a_held_question_asks_envoy_for_the_longest_wait_of_all() -> None:
    """However soon it is answered: so whether Envoy heeds that is seen."""

    async def scenario(loop: VirtualLoop) -> None:
        exchange, began = FakeExchange(), loop.time()
        detail = await answered(Examination(110.0), exchange, examination.question(hold_ms=3000, size=5000))
        assert (exchange.holds, loop.time() - began) == ([110.0], pytest.approx(3.0))
        assert examination.told(detail) == examination.Told(5000, examination.Question(hold=True, ms=3000))

    play(scenario)


def test_a_silent_question_says_nothing_at_all() -> None:
    """As if Tidegate hung, but for this one stream."""

    async def scenario(loop: VirtualLoop) -> None:
        exchange, began = FakeExchange(), loop.time()
        detail = await answered(Examination(110.0), exchange, examination.question(silence_ms=700))
        assert (exchange.holds, loop.time() - began) == ([], pytest.approx(0.7))
        assert "silence of 700 ms" in detail

    play(scenario)


def test_nobody_is_kept_waiting_for_long() -> None:
    """Whatever is asked for."""

    async def scenario(loop: VirtualLoop) -> None:
        began = loop.time()
        await answered(Examination(110.0), FakeExchange(), examination.question(hold_ms=99_999))
        assert loop.time() - began == pytest.approx(5.0)

    play(scenario)


def test_few_wait_at_the_same_time_and_one_more_is_answered_at_once() -> None:
    """So nobody can fill memory with questions; who leaves, or was answered, makes room."""

    async def scenario(loop: VirtualLoop) -> None:
        attend, body = Examination(110.0), examination.question(silence_ms=2000)
        asking = [asyncio.ensure_future(answered(attend, FakeExchange(), body)) for _ in range(MOST)]
        await asyncio.sleep(0.1)
        assert examination.told(await answered(attend, FakeExchange(), body)) == examination.Told(len(body), None)
        assert "hold of 0 ms" in await answered(attend, FakeExchange(), examination.question())
        assert loop.time() < 1000 + 2 or not asking[0].done()
        asking[0].cancel()
        await asyncio.sleep(0)
        assert "silence of 2000 ms" in await answered(attend, FakeExchange(), body)
        assert all("2000" in detail for detail in await asyncio.gather(*asking[1:]))

    play(scenario)


def test_on_its_way_a_question_takes_nothing_and_reaches_nobody() -> None:
    """The whole handler: held as asked, refused, and counted as what it is."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        body = json.loads(examination.question(hold_ms=1000))
        wire = desk.send(body)
        wire._body = examination.question(hold_ms=1000, size=70_000)
        await wire.task
        (status, headers, told, details) = wire.answers[0]
        assert (status, headers["x-tidegate-reason"], details) == (400, "bad_request", "tidegate_bad_request")
        assert "70000 bytes read, hold of 1000 ms" in json.loads(told)["error"]["message"]
        assert wire.holds == [20.0]
        assert not wire.departures
        assert [event.reason for event in desk.observer.of(Refused)] == [Reason.BAD_REQUEST]
        served = desk.send(chat())
        await served.task
        assert served.departures
        await desk.settle_down()

    play(scenario)
