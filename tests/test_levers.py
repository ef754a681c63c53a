"""What an operator does to a running service by hand, with callers, reloads and time going on meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.admission import FORMER_S
from extproc.core.breaker import State
from extproc.core.bucket import Slots
from extproc.core.events import Event, LeverMoved
from extproc.levers import LONGEST_S, MOST_CHANGES
from tests.doubles import VirtualLoop, play
from tests.test_reload import RAW, Bench, NoServer, a_moment, changed

SCHEDULES = int(os.environ.get("TIDEGATE_SCHEDULES", "15"))


class Server(NoServer):
    """Nobody calls from outside; says whether Envoy is told to ask others."""

    leaving = False

    def leave(self) -> None:
        self.leaving = True

    def stay(self) -> None:
        self.leaving = False


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.app.Server", Server)


class Hall(Bench):
    """A service, its levers, what was told of them, and the file that it follows where there is one."""

    def __init__(self, raw: dict[str, Any] = RAW, folder: Path | None = None) -> None:
        super().__init__(raw)
        self.told: list[LeverMoved] = []
        self.levers = self.service.levers
        self.levers._observe = self.hear
        self.service.reloading._aside = aside
        self.path = folder and folder / "tidegate.yaml"

    def hear(self, event: Event) -> None:
        assert isinstance(event, LeverMoved)
        self.told.append(event)
        self.service.observe(event)

    def said(self) -> list[tuple[str, str, str]]:
        """What was told since the last look."""
        told, self.told = self.told, []
        return [(one.action, one.name, one.by) for one in told]

    async def write(self, raw: dict[str, Any]) -> bool:
        """The file says this from now on; False when it is refused."""
        assert self.path
        self.path.write_text(yaml.safe_dump(raw))
        return await self.service.reloading.reload(self.path)

    def slots(self, name: str = "a") -> Slots:
        found = self.service.capacity.levels()[f"upstream/{name}/slots"]
        assert isinstance(found, Slots)
        return found

    async def stop(self) -> None:
        await self.levers.stop()
        await super().stop()


async def aside(work: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """In place of a thread, which a clock that jumps does not see: others have their turn in between."""
    await asyncio.sleep(0.01)
    found = work(*args, **more)
    await asyncio.sleep(0.01)
    return found


TWO = changed("upstreams.b", {"provider": "compatible", "url": "http://b", "concurrency": 9})
TWO["routes"][0]["chain"] = ["a", "b"]
RAW_WITHOUT_B = changed("upstreams.b")


def test_a_lane_that_is_paused_goes_on_by_itself() -> None:
    """Once the time is over that was said last; or by hand, and only once."""

    async def scenario(_: VirtualLoop) -> None:
        hall = Hall()
        await hall.levers.pause("P1", 30)
        began = time.time()
        await hall.levers.pause("P1", 10, by="ann")
        hall.send("held")
        hall.send("other", lane="P0")
        await a_moment(9.9)
        until = hall.levers.state()["lanes"]["P1"]["until"]
        assert began + 10 <= until <= time.time() + 10
        assert (hall.went, hall.said()) == (["other"], [("pause", "P1", "operator"), ("pause", "P1", "ann")])
        await a_moment(0.2)
        assert (hall.went, hall.said()) == (["other", "held"], [("resume", "P1", "time")])
        await hall.levers.pause("P2")
        await hall.levers.pause("P2")
        assert hall.levers.state()["lanes"]["P2"] == {"paused": True, "until": None}
        await hall.levers.resume("P2", by="bob")
        await hall.levers.resume("P2")
        assert hall.said() == [("pause", "P2", "operator"), ("resume", "P2", "bob")]
        assert hall.levers.state()["lanes"]["P2"] == {"paused": False, "until": None}
        await asyncio.gather(*hall.tasks)
        await hall.stop()

    play(scenario)


def test_breakers_are_tripped_and_reset() -> None:
    """One that is tripped rests, and is due then; tripped again the rest begins anew. One that is reset is closed."""

    async def scenario(loop: VirtualLoop) -> None:
        hall = Hall(TWO)
        breaker = hall.service.breakers.by_name["a"]
        await hall.levers.trip("a")
        rest = breaker.rests_until - loop.time()
        await a_moment(1)
        await hall.levers.trip("a", by="ann")
        assert breaker.rests_until - loop.time() == pytest.approx(rest, rel=0.2)
        assert breaker.openings == 1
        one = hall.send("x", stays_s=0)
        await a_moment()
        assert one.exchange.departures[0].order == ("b",)
        await a_moment(20)
        assert hall.service.breakers.due() == ["a"]
        await hall.levers.reset("a")
        await hall.levers.reset("a")
        assert (breaker.state, breaker.openings) == (State.CLOSED, 0)
        assert hall.said() == [
            ("trip", "a", "operator"), ("trip", "a", "ann"), ("reset", "a", "operator"), ("reset", "a", "operator"),
        ]  # fmt: skip
        await hall.stop()

    play(scenario)


def test_an_upstream_that_is_taken_out_is_asked_by_nobody() -> None:
    """No user, no failover, no probe; it comes back by itself, and its breaker goes on from where it is."""

    async def scenario(_: VirtualLoop) -> None:
        hall = Hall(TWO)
        await hall.levers.take_out("b", 50)
        first = hall.send("first", stays_s=0)
        await a_moment()
        assert first.exchange.departures[0].order == ("a",)
        await hall.levers.take_out("a")
        refused = hall.send("refused")
        await a_moment()
        assert refused.refused == ""
        assert refused.exchange.holds, "b comes back in time"
        await hall.levers.trip("b")
        await a_moment(40)
        assert hall.service.breakers.due() == []
        await a_moment(10)
        assert hall.service.breakers.due() == ["b"]
        await hall.levers.reset("b")
        await a_moment()
        assert refused.exchange.departures[0].order == ("b",)
        assert hall.levers.state()["upstreams"] == {
            "a": {"out": True, "until": None},
            "b": {"out": False, "until": None},
        }
        await hall.levers.put_back("a")
        await hall.levers.put_back("a")
        assert hall.said()[-3:] == [
            ("put_back", "b", "time"),
            ("reset", "b", "operator"),
            ("put_back", "a", "operator"),
        ]
        await asyncio.gather(*hall.tasks)
        await hall.stop()

    play(scenario)


def test_a_limit_is_another_for_a_while() -> None:
    """The newest counts; what ends uncovers what lies beneath it; the version and the state tell."""

    async def scenario(_: VirtualLoop) -> None:
        hall = Hall()
        told, place = hall.service.reloading.told, "upstreams.a.concurrency"
        first = told.version
        low = await hall.levers.change(place, 5, 20)
        high = await hall.levers.change(place, 9, 40, by="ann")
        assert hall.slots().limit == 9
        assert told.version != first
        assert told.state()["changed"] == ["upstreams.a.concurrency: 2 -> 9"]
        state = hall.levers.state()["changes"]
        assert [(one["id"], one["place"], one["value"], one["was"]) for one in state] == [
            (low, place, 5, 2), (high, place, 9, 5),
        ]  # fmt: skip
        await a_moment(21)
        assert hall.slots().limit == 9
        assert hall.levers.state()["changes"][0]["was"] == 2
        again = await hall.levers.change(place, 4)
        await a_moment(21)
        assert hall.slots().limit == 4
        for _ in range(2):
            await hall.levers.revert(again)
        assert (hall.slots().limit, told.version, told.state()["changed"]) == (2, first, [])
        assert hall.levers.state()["changes"] == []
        assert hall.said() == [
            ("change", place, "operator"), ("change", place, "ann"), ("revert", place, "time"),
            ("change", place, "operator"), ("revert", place, "time"), ("revert", place, "operator"),
        ]  # fmt: skip
        await hall.stop()

    play(scenario)


def test_changes_lie_over_whatever_the_file_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A reload neither ends them nor makes them last; one that makes no sense with it any more ends."""

    async def scenario(_: VirtualLoop) -> None:
        hall = Hall(folder=tmp_path)
        await hall.levers.change("upstreams.a.concurrency", 5)
        share = await hall.levers.change("lanes.P2.min_share", 0.6, 100)
        assert await hall.write(changed("upstreams.a.concurrency", 3, changed("lanes.P1.max_requests", 7)))
        assert (hall.slots().limit, hall.service.policy.lanes["P1"].max_requests) == (5, 7)
        assert hall.levers.state()["changes"][0]["was"] == 3
        assert hall.service.policy.lanes["P2"].min_share == 0.6
        assert not await hall.write({"nonsense": 1})
        assert hall.slots().limit == 5
        hall.said()
        assert await hall.write(changed("lanes.P1.min_share", 0.5, changed("upstreams.a.concurrency", 4)))
        assert [one["place"] for one in hall.levers.state()["changes"]] == ["upstreams.a.concurrency"]
        assert hall.said() == [("revert", "lanes.P2.min_share", "reload")]
        assert "lanes.P2.min_share to 0.6 ends: lanes: the min_shares add up to 1.1" in caplog.text
        await hall.levers.revert(share)
        for change in hall.levers.state()["changes"]:
            await hall.levers.revert(change["id"])
        assert hall.slots().limit == 4
        await hall.stop()

    play(scenario)


def test_a_pause_ends_with_its_lane_and_not_before(tmp_path: Path) -> None:
    """A reload that takes the lane away holds whoever is there; should it come back it is paused as it was.

    Once nobody can be in it any more the pause is over: a lane of that name that comes later is another one.
    """

    async def scenario(_: VirtualLoop) -> None:
        hall = Hall(TWO, tmp_path)
        less = changed("lanes.P2", None, TWO)

        def told() -> Any:
            return hall.levers.state()["lanes"].get("P2")

        await hall.levers.pause("P2", 3 * FORMER_S)
        paused = told()
        for until in (3 * FORMER_S, 30):
            await hall.levers.pause("P2", until)
            assert await hall.write(less)
            assert told()["paused"]
            assert await hall.write(TWO)
            assert told()["until"] == pytest.approx(time.time() + until, abs=5)
        assert paused["until"] > told()["until"]
        held = hall.send("held", lane="P2")
        await a_moment(31)
        assert (hall.went, told()) == (["held"], {"paused": False, "until": None})
        await hall.levers.pause("P2", 3 * FORMER_S)
        assert await hall.write(less)
        hall.said()
        await a_moment(FORMER_S + 10)
        assert (told()["paused"], hall.said()) == (True, [])
        assert await hall.write(changed("lanes.P1.max_requests", 77, less))
        assert (told(), hall.said()) == (None, [("resume", "P2", "reload")])
        assert await hall.write(TWO)
        assert told() == {"paused": False, "until": None}
        hall.send("goes", lane="P2", stays_s=0)
        await hall.levers.pause("P2")
        await a_moment(3 * FORMER_S)
        assert (told(), hall.said()) == ({"paused": True, "until": None}, [("pause", "P2", "operator")])
        assert not held.refused
        await asyncio.gather(*hall.tasks)
        await hall.stop()

    play(scenario)


def test_an_upstream_stays_out_whatever_a_reload_says_of_it(tmp_path: Path) -> None:
    """It cannot leave while this runs; so it comes back when that was said, and not before."""

    async def scenario(_: VirtualLoop) -> None:
        hall = Hall(TWO, tmp_path)
        await hall.levers.take_out("b", 100)
        out = hall.levers.state()["upstreams"]["b"]
        assert out["out"]
        for raw in (RAW_WITHOUT_B, TWO, RAW_WITHOUT_B):
            assert await hall.write(raw)
            assert hall.levers.state()["upstreams"]["b"] == out
        await a_moment(101)
        assert hall.levers.state()["upstreams"]["b"] == {"out": False, "until": None}
        assert hall.said() == [("take_out", "b", "operator"), ("put_back", "b", "time")]
        await hall.stop()

    play(scenario)


def test_a_change_ends_with_its_place(tmp_path: Path) -> None:
    """It is not there any more when the place comes back, and its time is not told a second time."""

    async def scenario(_: VirtualLoop) -> None:
        hall = Hall(TWO, tmp_path)
        place = "lanes.P2.max_requests"
        usual = hall.service.policy.lanes["P2"].max_requests
        await hall.levers.change(place, 5, 50)
        assert await hall.write(changed("lanes.P2", None, TWO))
        assert hall.said() == [("change", place, "operator"), ("revert", place, "reload")]
        assert await hall.write(TWO)
        assert hall.service.policy.lanes["P2"].max_requests == usual
        await a_moment(60)
        assert (hall.said(), hall.levers.state()["changes"]) == ([], [])
        await hall.stop()

    play(scenario)


def test_a_change_by_number_never_slips_to_another_limit(tmp_path: Path) -> None:
    """It goes by the model that had this number then, however it was said, wherever that stands by now."""

    async def scenario(_: VirtualLoop) -> None:
        def limits(*models: str) -> dict[str, Any]:
            return changed("upstreams.a.limits", [{"model": model, "rpm": 100} for model in models], TWO)

        def rpm() -> dict[str, int]:
            return {one.model: round(one.per_minute / 0.95) for one in hall.service.policy.upstreams["a"].limits}

        hall = Hall(TWO, tmp_path)
        assert await hall.write(limits("x", "y"))
        place = "upstreams.a.limits.x.rpm"
        await hall.levers.change("upstreams.a.limits.0.rpm", 50)
        high = await hall.levers.change(place, 60)
        assert [(one["place"], one["was"]) for one in hall.levers.state()["changes"]] == [(place, 100), (place, 50)]
        assert await hall.write(limits("y", "x"))
        assert rpm() == {"y": 100, "x": 60}
        await hall.levers.revert(high)
        assert rpm() == {"y": 100, "x": 50}
        hall.said()
        assert await hall.write(limits("y"))
        assert (rpm(), hall.said()) == ({"y": 100}, [("revert", place, "reload")])
        await hall.stop()

    play(scenario)


def test_changes_are_seen_through_whoever_leaves() -> None:
    """Settings never follow by half; what does not hold in the end is not said to."""

    async def scenario(_: VirtualLoop) -> None:
        hall = Hall()
        asking = asyncio.ensure_future(hall.levers.change("upstreams.a.concurrency", 5))
        await a_moment(0.005)
        asking.cancel()
        bad = asyncio.ensure_future(hall.levers.change("upstreams.a.concurrency", -1))
        await a_moment(0.005)
        bad.cancel()
        await a_moment(1)
        assert (hall.slots().limit, len(hall.levers.state()["changes"])) == (5, 1)
        await hall.stop()
        assert hall.levers._tasks == set()

    play(scenario)


def test_what_cannot_be_is_refused_in_words() -> None:
    """Names that there are not, times and values that make no sense: nothing is moved."""

    async def scenario(_: VirtualLoop) -> None:
        hall = Hall()
        levers, place = hall.levers, "upstreams.a.concurrency"
        unknown = [
            levers.pause("P9"), levers.resume("P9"), levers.trip("z"), levers.reset("z"), levers.take_out("z" * 200),
            levers.put_back("z"), *map(levers.revert, ("", "x", "1", f"1-{levers._salt}", f"0-{levers._salt}")),
        ]  # fmt: skip
        for one in unknown:
            with pytest.raises(LookupError, match="there is no"):
                await one
        seconds: list[Any] = [0, -1, LONGEST_S + 1, float("nan"), float("inf"), True, "5"]
        for for_s in seconds:
            for one in (levers.pause("P1", for_s), levers.take_out("a", for_s), levers.bypass(for_s),
                        levers.change(place, 5, for_s)):  # fmt: skip
                with pytest.raises(ValueError, match="for_s: must be above 0"):
                    await one
        values: list[Any] = [True, "5", None, float("nan"), float("inf"), 10**400]
        for value in values:
            with pytest.raises(ValueError, match=place):
                await levers.change(place, value)
        with pytest.raises(ValueError, match=r"upstreams\.a\.concurrency: Input should be"):
            await levers.change(place, -1)
        levers._reloading.changes = (object(),) * MOST_CHANGES  # type: ignore[assignment]
        with pytest.raises(ValueError, match="end some of them first"):
            await levers.change(place, 5)
        levers._reloading.changes = ()
        assert hall.said() == []
        state = levers.state()
        assert (state["bypass"], state["draining"], state["changes"]) == (None, False, [])
        await hall.stop()

    play(scenario)


def test_there_are_never_more_changes_than_there_may_be(tmp_path: Path) -> None:
    """Also when all are asked for at once; a refused one leaves its place to others."""

    async def scenario(_: VirtualLoop) -> None:
        hall = Hall(TWO, tmp_path)
        levers, place = hall.levers, "lanes.P1.max_requests"
        asked = [levers.change(place, -1), *(levers.change(place, n + 1, 50) for n in range(MOST_CHANGES + 20))]
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert len(levers.state()["changes"]) == MOST_CHANGES - 1
        assert sum(isinstance(one, ValueError) for one in told) == 22
        await levers.change(place, 7, 50)
        with pytest.raises(ValueError, match="end some of them first"):
            await levers.change(place, 8)
        await a_moment(60)
        assert levers.state()["changes"] == []
        await hall.stop()

    play(scenario)


def test_a_bypass_lets_go_a_full_queue_and_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    """No lane, limit or quota counts; who may not use it, or asks in a way that cannot be read, stays out."""

    async def scenario(loop: VirtualLoop) -> None:
        raw = changed("tenants.one", {"rpm": 4, "models": ["m"]}, changed("tenants.two", {"models": ["other"]}))
        raw["identity"]["unknown"] = "reject"
        hall = Hall(changed("lanes.P1", {"max_wait_s": 60, "max_requests": 1}, raw))
        callers = [hall.send(f"{n}", stays_s=500) for n in range(6)]
        await a_moment()
        assert hall.went == ["0", "1"]
        assert [caller.refused for caller in callers] == ["", "", "", *["lane_full"] * 3]
        began = time.time()
        await hall.levers.bypass(130)
        more = [hall.send(f"b{n}", stays_s=500) for n in range(30)]
        shut = [hall.send("s", team="nobody"), hall.send("t", team="two")]
        await a_moment()
        assert sorted(hall.went) == sorted(["0", "1", "2", *(f"b{n}" for n in range(30))])
        assert [one.refused for one in (*more, *shut)] == [""] * 30 + ["unauthenticated", "forbidden"]
        assert hall.slots().used == 33
        hall.balance()
        bucket = hall.service.capacity.levels()["tenant/one/requests"]
        assert bucket.level_at(loop.time()) < -28  # type: ignore[union-attr]
        assert began + 130 <= hall.levers.state()["bypass"]["until"] <= time.time() + 130
        await a_moment(125)
        loud = [one.message for one in caplog.records if one.levelno == logging.ERROR]
        assert loud == ["LeverMoved", *["bypass: everybody passes, and no limit is kept"] * 2]
        await a_moment(10)
        assert hall.levers.state()["bypass"] is None
        assert hall.said()[-1] == ("no_bypass", "", "time")
        after = hall.send("after")
        await a_moment()
        assert after.refused == "tenant_quota"
        await asyncio.gather(*hall.tasks)
        hall.balance()
        await hall.stop()
        assert [timer for timer in loop.timers() if "levers" in repr(timer)] == []

    play(scenario)


@pytest.mark.parametrize("others", [False, True], ids=["alone", "among others"])
def test_a_drain_can_be_taken_back(others: bool) -> None:  # noqa: FBT001
    """Who comes is refused, at once or when nobody is left; Envoy asks others only where there are some."""

    async def scenario(_: VirtualLoop) -> None:
        both = {"addresses": ["127.0.0.1:10003", "127.0.0.1:10004"], "replicas": 2}
        raw = changed("service", {**RAW["service"], **both}) if others else RAW
        hall = Hall(raw)
        server: Any = hall.service.server
        runs = hall.send("runs", stays_s=8)
        await a_moment()
        for _ in range(2):
            await hall.levers.drain()
        await a_moment()
        assert (server.leaving, hall.levers.state()["draining"]) == (others, True)
        early = hall.send("early", stays_s=0)
        await a_moment(1)
        assert early.refused == ("" if others else "draining")
        await a_moment(15)
        late = hall.send("late")
        await a_moment()
        assert (late.refused, runs.refused) == ("draining", "")
        for _ in range(2):
            await hall.levers.undrain()
        assert (server.leaving, hall.levers.state()["draining"]) == (False, False)
        again = hall.send("again", stays_s=0)
        await a_moment()
        assert again.refused == ""
        assert hall.said() == [("drain", "", "operator"), ("undrain", "", "operator")]
        await hall.levers.drain()
        await hall.levers.bypass()
        await hall.levers.pause("P0")
        hall.send("held", lane="P0")
        await hall.service.drain()
        assert hall.service.limiter.draining
        with pytest.raises(ValueError, match="told to end"):
            await hall.levers.undrain()
        await hall.levers.drain()
        assert hall.levers.state()["draining"]
        await asyncio.gather(*hall.tasks)
        await hall.stop()

    play(scenario)


def moves(hall: Hall, rng: random.Random) -> list[Callable[[], Any]]:
    """All that may be moved, each for a while, and what the file may say."""
    levers = hall.levers

    def lane() -> str:
        return rng.choice(["P0", "P1", "P2"])

    def for_s() -> float:
        return rng.uniform(0.1, 5)

    places = {
        "upstreams.a.concurrency": [1, 4], "upstreams.b.concurrency": [1, 3], "lanes.P1.max_requests": [1, 50],
        "lanes.P2.min_share": [0.2, 0.6], "tenants.one.rpm": [5, 5000], "lanes.P0.max_wait_s": [1, 50],
    }  # fmt: skip
    files = [TWO, changed("upstreams.a.concurrency", 3, TWO), changed("lanes.P1.min_share", 0.5, TWO)]

    async def change() -> None:
        place = rng.choice(list(places))
        await levers.change(place, rng.choice(places[place]), for_s())

    async def revert() -> None:
        for one in levers.state()["changes"][:1]:
            await levers.revert(one["id"])

    return [
        lambda: levers.pause(lane(), for_s()), lambda: levers.resume(lane()),
        lambda: levers.take_out(rng.choice("ab"), for_s()), lambda: levers.put_back(rng.choice("ab")),
        lambda: levers.trip(rng.choice("ab")), lambda: levers.reset(rng.choice("ab")),
        change, change, revert, lambda: levers.bypass(for_s()), levers.no_bypass, levers.drain, levers.undrain,
        levers.undrain, lambda: hall.write(rng.choice(files)),
    ]  # fmt: skip


async def pulled(move: Any) -> None:
    """Whatever it is: it may only be refused in words."""
    with suppress(ValueError):
        await move


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_random_schedules(seed: int, tmp_path: Path) -> None:
    """Callers of all kinds, levers and reloads at random: each returns in time, and the books balance."""
    rng = random.Random(seed)

    async def scenario(loop: VirtualLoop) -> None:
        hall = Hall(TWO, tmp_path)
        pulls, work = moves(hall, rng), []
        for n in range(80):
            await a_moment(rng.expovariate(10))
            how: dict[str, Any] = {"team": rng.choice(["one", "two"]), "lane": rng.choice(["P0", "P1", "P2"])}
            if rng.random() < 0.3:
                how["x-stainless-read-timeout"] = str(rng.randrange(1, 9))
            caller = hall.send(f"{n}", stays_s=rng.uniform(0, 2), **how)
            if rng.random() < 0.2:
                loop.call_later(rng.uniform(0, 2), caller.task.cancel)
            if rng.random() < 0.5:
                work.append(asyncio.ensure_future(pulled(rng.choice(pulls)())))
        await asyncio.gather(*work)
        await hall.levers.undrain()
        await a_moment(6)
        state = hall.levers.state()
        assert (state["bypass"], state["draining"], state["changes"]) == (None, False, [])
        assert not any(one["paused"] for one in state["lanes"].values())
        assert not any(one["out"] for one in state["upstreams"].values())
        assert hall.service.settings == hall.service.reloading._says
        for name in "ab":
            await hall.levers.reset(name)
        await a_moment(15)
        assert [waiter.request.id for waiter in hall.service.lanes.waiters()] == []
        last = hall.send("last", lane="P0", stays_s=0)
        await asyncio.gather(*hall.tasks, return_exceptions=True)
        await a_moment(20)
        assert last.refused in ("", "tenant_quota")
        hall.balance()
        assert not any(hall.slots(name).used for name in "ab")
        await hall.stop()
        assert not [
            task for task in asyncio.all_tasks() if task is not asyncio.current_task() and "levers" in repr(task)
        ]

    play(scenario)
