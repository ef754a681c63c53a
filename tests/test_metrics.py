"""How the console tells metrics: in the format that is asked for, and seldom anew."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from extproc.console import reading, state
from extproc.console.server import serve
from extproc.console.sources import Sources
from extproc.core.bucket import Slots
from extproc.core.capacity import Store
from extproc.core.lanes import Lanes
from extproc.settings import AdminSettings
from extproc.stack import free_ports
from extproc.telemetry.formats import OPEN_TYPE, TEXT_TYPE
from extproc.telemetry.metrics import Metrics
from tests.telemetry.metrics_world import LANES, told


def test_what_the_rules_name_is_told_before_the_crowd() -> None:
    """Also when it came later, as a limit does that a reload brings, or that is learned."""
    store: Store = {f"tenant/{number}/slots": Slots(1.0) for number in range(state.MOST_COUNTERS)}
    store["upstream/a/slots"] = Slots(8.0, 3.0)
    shown = state.describe(Lanes(LANES), store, 50.0, ["upstream/gone/slots", "upstream/a/slots"])["counters"]
    assert (next(iter(shown)), len(shown)) == ("upstream/a/slots", state.MOST_COUNTERS)


async def test_the_console_shows_it_as_text() -> None:
    """With the type that says which text it is, each to those who accept it."""
    [port] = free_ports(1)
    served = await serve(f"127.0.0.1:{port}", Sources(told, metrics=Metrics()), AdminSettings())
    try:
        for accept, expected in (("*/*", TEXT_TYPE), (OPEN_TYPE, OPEN_TYPE), ("text/plain", TEXT_TYPE)):
            async with (
                aiohttp.ClientSession(headers={"accept": accept}) as http,
                http.get(f"http://127.0.0.1:{port}/metrics") as answer,
            ):
                assert (answer.status, answer.headers["content-type"]) == (200, expected)
                page = (await answer.read()).decode()
                assert "tidegate_unsettled 8" in page
                assert page.endswith("# EOF\n") == (expected == OPEN_TYPE)
    finally:
        await served.close()


async def test_whoever_reads_metrics_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many who ask at once get one page; later there is another."""
    made: list[Mapping[str, Any]] = []

    class Counting(Metrics):
        def page(self, state: Mapping[str, Any], accept: str = "") -> tuple[bytes, str]:
            made.append(state)
            return str(len(made)).encode(), accept

    monkeypatch.setattr(reading, "FRESH_S", 600.0)
    [port] = free_ports(1)
    served = await serve(f"127.0.0.1:{port}", Sources(told, metrics=Counting()), AdminSettings())
    try:
        async with aiohttp.ClientSession() as http:

            async def read_one() -> bytes:
                async with http.get(f"http://127.0.0.1:{port}/metrics") as answer:
                    return await answer.read()

            assert {*await asyncio.gather(*(read_one() for _ in range(20)))} == {b"1"}
            monkeypatch.setattr(reading, "FRESH_S", 0.0)
            assert await read_one() == b"2"
    finally:
        await served.close()
