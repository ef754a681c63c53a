"""What a whole service tells of itself while callers come, wait, and are refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from extproc.telemetry.history import STEP_S
from tests.doubles import VirtualLoop, play
from tests.published import as_described
from tests.test_reload import Bench, NoServer, changed

ONE_AT_A_TIME = changed("upstreams.a.concurrency", 1)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.app.Server", NoServer)


class Watched(Bench):
    """A service whose history is kept."""

    def __init__(self, raw: dict[str, Any] = ONE_AT_A_TIME) -> None:
        super().__init__(raw)
        self.duties.append(asyncio.create_task(self.service.sight.remember()))

    async def look(self) -> dict[str, Any]:
        """The overview, as a client reads it."""
        told: dict[str, Any] = json.loads(json.dumps(await self.service.sight.overview(), allow_nan=False))
        as_described("Overview", told)
        return told


def lane(told: dict[str, Any], name: str = "P1") -> dict[str, Any]:
    return next(dict(one) for one in told["lanes"] if one["name"] == name)


def test_who_waits_and_for_what() -> None:
    """One runs, three wait for its place; when all have gone it is quiet again."""

    async def scenario(_: VirtualLoop) -> None:
        bench = Watched()
        first = bench.send("first", stays_s=25.0)
        await asyncio.sleep(0.5)
        others = [bench.send(f"r{i}", stays_s=0.1) for i in range(3)]
        await asyncio.sleep(4.0)
        told = await bench.look()
        assert told["status"] == "waiting"
        assert (lane(told)["requests"], lane(told)["binding"]) == (3, "upstream/a/slots")
        assert 3.9 < lane(told)["oldest_s"] < 4.2
        (binding,) = told["binding"]
        assert binding["text"].startswith("P1 waits for a free slot at a: 3 waiting")
        assert "1 of 1 run there: raise its concurrency" in binding["help"]
        assert told["upstreams"][0]["in_flight"] == 1
        rows = {row["id"]: row for row in told["recent"]}
        assert (rows["first"]["state"], rows["r0"]["state"]) == ("running", "waiting")
        await asyncio.gather(first.task, *(one.task for one in others))
        await asyncio.sleep(1.0)
        told = await bench.look()
        assert (told["status"], told["binding"]) == ("ok", [])
        assert {row["state"] for row in told["recent"]} == {"served"}
        assert {one["name"]: one["requests"] for one in told["tenants"]} == {"one": 4}
        assert 19 < lane(told)["wait_p95_s"] < 27
        await bench.stop()

    play(scenario)


def test_where_all_are_out_that_is_told_which_comes_back_first() -> None:
    """Not the first by name: nobody knows when one comes back that is out until it is undone."""
    both = changed("routes", [{"models": ["m"], "chain": ["a", "b"], "acknowledge_unowned": True}])

    async def scenario(_: VirtualLoop) -> None:
        bench = Watched(both)
        await bench.service.levers.take_out("a")
        await bench.service.levers.take_out("b", 10.0)
        waiting = bench.send("w", stays_s=0.1)
        await asyncio.sleep(1.0)
        (binding,) = (await bench.look())["binding"]
        assert (binding["key"], binding["text"]) == (
            "upstream/b/breaker",
            "P1 waits for b, which is out: 1 waiting, next in 9 s",
        )
        assert "b was taken out by an operator: put it back" in binding["help"]
        await asyncio.sleep(10.0)
        assert (await bench.look())["status"] == "ok"
        await waiting.task
        await bench.stop()

    play(scenario)


def test_the_last_hour_is_kept() -> None:
    """In steps, whether somebody looks or not."""

    async def scenario(_: VirtualLoop) -> None:
        bench = Watched()
        await asyncio.sleep(0.1)
        await bench.send("a", stays_s=0.1).task
        await asyncio.sleep(STEP_S)
        await bench.send("b", stays_s=0.1).task
        await bench.send("c", stays_s=0.1).task
        await asyncio.sleep(STEP_S)
        told = bench.service.listeners.history.told()
        assert told["lanes"]["P1"]["admitted"] == [1, 2]
        assert told["upstreams"]["a"]["state"] == ["closed", "closed"]
        await bench.stop()

    play(scenario)


def test_levers_are_seen_at_once() -> None:
    """A paused lane, an upstream that is out, a bypass."""

    async def scenario(_: VirtualLoop) -> None:
        bench = Watched()
        await bench.service.levers.pause("P1", 60.0)
        waiting = bench.send("w", stays_s=0.1)
        await asyncio.sleep(1.0)
        told = await bench.look()
        assert lane(told)["paused"] is True
        (binding,) = told["binding"]
        assert (binding["key"], binding["waiting"]) == ("lane/P1/paused", 1)
        assert 0 < binding["next_s"] <= 60
        for name in bench.started.upstreams:
            await bench.service.levers.take_out(name)
        told = await bench.look()
        assert told["status"] == "outage"
        assert all(one["out"] for one in told["upstreams"])
        for name in bench.started.upstreams:
            await bench.service.levers.put_back(name)
        await bench.service.levers.bypass(60.0)
        await waiting.task
        told = await bench.look()
        assert told["status"] == "bypassed"
        assert told["notices"][0]["text"].startswith("bypass: everybody is let go at once")
        await bench.service.levers.no_bypass()
        await bench.service.levers.resume("P1")
        assert (await bench.look())["status"] == "shedding", "who waited was refused while nobody could serve"
        await asyncio.sleep(60.0)
        assert (await bench.look())["status"] == "ok"
        await bench.service.levers.stop()
        await bench.stop()

    play(scenario)


def test_names_that_nobody_listed_do_no_harm() -> None:
    """A tenant's and a request's name from outside are told as names, and texts are harmless."""

    async def scenario(_: VirtualLoop) -> None:
        bench = Watched(changed("upstreams.a.concurrency", 1, changed("tenants.*", {})))
        first = bench.send("<img src=x>", team="<script>", stays_s=5.0)
        await asyncio.sleep(0.1)
        others = [bench.send(f"{i}\u202e", team="<script>", stays_s=0.1) for i in range(3)]
        others.append(bench.send("x", stays_s=0.1))
        await asyncio.sleep(0.1)
        told = await bench.look()
        assert all(one["text"].isprintable() and one["help"].isprintable() for one in told["binding"])
        assert {row["tenant"] for row in told["recent"]} == {"<script>", "one"}
        assert all(row["id"].isprintable() for row in told["recent"])
        await asyncio.gather(first.task, *(one.task for one in others))
        await bench.stop()

    play(scenario)
