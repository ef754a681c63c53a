"""Other settings while requests wait and fly: what holds at once, what stays, and that nothing is lost or held."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import weakref
from collections import Counter
from copy import deepcopy
from typing import Any

import pytest

from extproc.app import Service
from extproc.core.breaker import Signal, State
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget
from extproc.core.capacity import Forget
from extproc.core.identity import quoted
from extproc.ports import Head, Record, RecordKind
from extproc.settings import Settings
from extproc.settings.changes import follow
from tests.doubles import FakeExchange, VirtualLoop, play

RAW: dict[str, Any] = {
    "upstreams": {
        "a": {"provider": "compatible", "url": "http://a", "concurrency": 2, "breaker": {"failures": 3}},
        "b": {"provider": "openai", "url": "http://b", "limits": [{"tpm": 60_000, "rpm": 60, "burst_s": 60}]},
    },
    "routes": [{"models": ["m"], "chain": ["a"], "acknowledge_unowned": True}],
    "lanes": {"P0": {"max_wait_s": 60}, "P1": {"max_wait_s": 60}, "P2": {"max_wait_s": 60, "when_busy": "hold"}},
    "identity": {"tenant": ["header:x-team"]},
    "tenants": {"one": {}, "two": {}},
    "service": {"restart_ramp_s": 0, "record_grace_s": 5},
}
SCHEDULES = int(os.environ.get("TIDEGATE_SCHEDULES", "20"))


class NoServer:
    """Nobody calls from outside."""

    def __init__(self, *_: object, **__: object) -> None:
        self.port = 0


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.app.Server", NoServer)


def changed(place: str = "", value: Any = None, raw: dict[str, Any] = RAW) -> dict[str, Any]:
    """The raw settings with one place changed; None takes it away."""
    raw = deepcopy(raw)
    *above, last = place.split(".")
    section = raw
    for key in above:
        section = section.setdefault(key, {})
    if value is None:
        section.pop(last, None)
    else:
        section[last] = value
    return raw


def settings(raw: dict[str, Any]) -> Settings:
    found = Settings.model_validate(raw)
    assert list(found.problems()) == []
    return found


class Bench:
    """A service that nobody reaches from outside, and what callers do to it. `went`: who was let go, in order."""

    def __init__(self, raw: dict[str, Any] = RAW) -> None:
        self.started = settings(raw)
        self.service = Service(self.started)
        self.tasks: list[asyncio.Task[None]] = []
        self.went: list[str] = []
        self.duties = [asyncio.create_task(work) for work in (self.service.limiter.run(), self.sweep())]

    async def sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self.service.admission.sweep()

    async def reload(self, raw: dict[str, Any]) -> None:
        held, _ = follow(self.started, settings(raw))
        await self.service._follow(held)
        self.balance()

    def send(self, name: str, *, team: str = "one", lane: str = "P1", stays_s: float = 1.0, **more: Any) -> Caller:
        caller = Caller(self, name, team, lane, stays_s, **more)
        self.tasks.append(caller.task)
        return caller

    def balance(self) -> None:
        """Every permit that is taken is held by somebody who is here."""
        held: Counter[str] = Counter()
        for flight in self.service.flights._flights.values():
            if flight.landed is None and not (flight.departed is None and flight.settled):
                held.update(claim.key for claim in flight.allowance if claim.key.endswith("/slots"))
                if flight.departed is not None:
                    held.update(c.key for c in flight.prices.get(flight.at, ()) if c.key.endswith("/slots"))
        levels = self.service.capacity.levels()
        taken = {key: counter.used for key, counter in levels.items() if isinstance(counter, Slots)}
        assert taken == {key: held[key] for key in taken}

    async def stop(self) -> None:
        for duty in self.duties:
            duty.cancel()
        await asyncio.gather(*self.duties, return_exceptions=True)
        self.service._executor.shutdown(wait=False)


class Caller:
    """One request and what became of it. told: when its record comes after it ended, None for never."""

    def __init__(
        self, bench: Bench, name: str, team: str, lane: str, stays_s: float, *, told_s: float | None = 0.1,
        output: int = 20, **headers: str,
    ) -> None:  # fmt: skip
        self.bench, self.name, self.told_s, self.output = bench, name, told_s, output
        path = {":path": "/v1/chat/completions", ":method": "POST", "x-team": team, "x-request-id": name}
        head = Head(
            {**path, "x-tidegate-priority": lane, "content-type": "application/json", **headers}, bodiless=False
        )
        body = {"model": "m", "max_tokens": 40, "messages": [{"role": "user", "content": f"hello {name}"}]}
        self.exchange = FakeExchange(head, json.dumps(body).encode(), stays_s=stays_s)
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        forward = self.exchange.forward

        async def forwarded(departure: Any) -> None:
            self.bench.went.append(self.name)
            await forward(departure)

        self.exchange.forward = forwarded  # type: ignore[method-assign]
        try:
            await self.bench.service.handler(self.exchange)
        finally:
            if self.exchange.departures and self.told_s is not None:
                asyncio.get_running_loop().call_later(self.told_s, lambda: self.bench.tasks.append(self.tell()))

    def tell(self, **more: Any) -> asyncio.Task[None]:
        [departure] = self.exchange.departures
        tail = {"in": 30, "out": self.output, "finish": "stop", "done": "1"}
        about: dict[str, Any] = {"flags": frozenset(), "details": "", "attempt": 1, "duration_s": 1.0}
        record = Record(
            RecordKind.FINAL, departure.ticket, departure.order[0], 200, first_token_s=None, request_id=self.name,
            tail=tail, **{**about, **more},
        )  # fmt: skip
        return asyncio.ensure_future(self.bench.service.admission.hear(record))

    @property
    def refused(self) -> str:
        """For what reason; empty when it was not."""
        return json.loads(self.exchange.answers[0][2])["error"]["reason"] if self.exchange.answers else ""


async def a_moment(seconds: float = 0.01) -> None:
    await asyncio.sleep(seconds)


def test_who_is_held_goes_by_the_new_limit_and_in_the_old_order() -> None:
    """More slots are there at once; nobody who came first is passed."""

    async def scenario(_: VirtualLoop) -> None:
        bench = Bench()
        for number in range(6):
            bench.send(f"{number}", stays_s=20)
            await a_moment()
        assert bench.went == ["0", "1"]
        await bench.reload(changed("upstreams.a.concurrency", 4))
        await a_moment()
        assert bench.went == ["0", "1", "2", "3"]
        await bench.reload(changed("upstreams.a.concurrency", 1))
        await a_moment(21)
        assert bench.went == ["0", "1", "2", "3", "4"], "fewer slots: who runs goes on, nobody else begins"
        await a_moment(20)
        assert bench.went == ["0", "1", "2", "3", "4", "5"]
        await asyncio.gather(*bench.tasks)
        bench.balance()
        await bench.stop()

    play(scenario)


def test_a_bucket_keeps_what_is_in_it_as_far_as_it_fits() -> None:
    """And what others took of it: a larger limit fills up faster, a smaller one holds less, a debt stays."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench()
        key = "upstream/b/*/total"
        bucket = bench.service.capacity.levels()[key]
        assert isinstance(bucket, TokenBucket)
        bucket.level, bucket.at = 50_000, loop.time()
        limits = [{"tpm": 6_000, "rpm": 60, "burst_s": 60}]
        await bench.reload(changed("upstreams.b.limits", limits))
        assert (bucket.level, bucket.capacity, bucket.rate) == pytest.approx((5_700, 5_700, 95))
        bucket.level = -1_000
        await bench.reload(changed("upstreams.b.limits", [{"tpm": 600_000, "rpm": 60, "burst_s": 60, "shadow": True}]))
        assert (bucket.level, bucket.capacity, bucket.shadow) == (-1_000, pytest.approx(570_000), True)
        await bench.stop()

    play(scenario)


def test_a_lane_that_shrinks_below_what_waits_turns_away_who_comes() -> None:
    """And nobody who waits; once there are fewer the new bound holds."""

    async def scenario(_: VirtualLoop) -> None:
        bench = Bench(changed("upstreams.a.concurrency", 1))
        callers = [bench.send(f"{number}", stays_s=2) for number in range(8)]
        await a_moment()
        smaller = changed("lanes.P1.max_requests", 2, changed("upstreams.a.concurrency", 1))
        await bench.reload(smaller)
        late = bench.send("late")
        await a_moment()
        assert late.refused == "lane_full"
        assert [caller.refused for caller in callers] == [""] * 8
        await a_moment(12)
        assert len(bench.service.lanes) == 1
        again = [bench.send(name, stays_s=0) for name in ("fits", "over")]
        await a_moment()
        assert [caller.refused for caller in again] == ["", "lane_full"]
        await asyncio.gather(*bench.tasks)
        assert bench.went == [*map(str, range(8)), "fits"]
        await bench.stop()

    play(scenario)


def test_a_lane_that_is_gone_lets_its_people_go_after_all_others() -> None:
    """Nobody may ask for it any more; it may come back."""

    async def scenario(_: VirtualLoop) -> None:
        bench = Bench(changed("upstreams.a.concurrency", 1))
        bench.send("first", stays_s=2)
        await a_moment()
        bench.send("was better", lane="P0")
        bench.send("was worse", lane="P2")
        await a_moment()
        less = changed("lanes.P0", None, changed("upstreams.a.concurrency", 1))
        await bench.reload(less)
        refused = bench.send("nobody", lane="P0")
        await a_moment(10)
        assert refused.refused == "forbidden"
        assert bench.went == ["first", "was worse", "was better"]
        await bench.reload(changed("upstreams.a.concurrency", 1))
        bench.send("back", lane="P0")
        await a_moment(5)
        assert bench.went[-1] == "back"
        await asyncio.gather(*bench.tasks)
        await bench.stop()

    play(scenario)


def test_lanes_that_are_gone_are_forgotten_in_the_end() -> None:
    """Not while somebody may come to stand there, or has books that are open; then whatever names they had."""

    async def scenario(_: VirtualLoop) -> None:
        bench = Bench()
        long = bench.send("long", lane="P2", stays_s=9_000)
        await a_moment()
        for number in range(30):
            await bench.reload(changed("lanes", {f"L{number}": {"max_wait_s": 60}}))
            await a_moment(300)
        assert "P2" in bench.service.lanes.queues, "its books are open"
        await a_moment(600)
        assert long.task.done()
        await bench.reload(RAW)
        assert list(bench.service.lanes.queues)[:3] == ["P0", "P1", "P2"]
        assert len(bench.service.lanes.queues) < 12
        await a_moment(2_000)
        await bench.reload(RAW)
        assert list(bench.service.lanes.queues) == ["P0", "P1", "P2"]
        await asyncio.gather(*bench.tasks)
        await bench.stop()

    play(scenario)


def test_other_rules_of_a_lane_hold_for_those_who_wait() -> None:
    """Spill instead of hold, another order, other weights: without anybody losing its place."""

    async def scenario(_: VirtualLoop) -> None:
        raw = changed("upstreams.a.concurrency", 1)
        raw["upstreams"]["b"] = {"provider": "compatible", "url": "http://b", "concurrency": 1}
        raw["routes"][0]["chain"] = ["a", "b"]
        bench = Bench(raw)
        bench.send("runs", lane="P2", stays_s=50)
        await a_moment()
        held = bench.send("held", lane="P2")
        await a_moment(5)
        assert bench.went == ["runs"], "its lane holds, though the second is idle"
        await bench.reload(changed("lanes.P2", {"max_wait_s": 60, "when_busy": "spill", "spill_after_s": 2}, raw))
        await a_moment(1)
        assert bench.went == ["runs"]
        await a_moment(1.5)
        assert (bench.went, held.exchange.departures[0].order[0]) == (["runs", "held"], "b")
        await asyncio.gather(*bench.tasks)
        await bench.stop()

    play(scenario)


def test_the_newest_go_first_as_soon_as_that_is_said() -> None:
    """And again the oldest, once it is not said any more; the deadline, where that is."""

    async def scenario(_: VirtualLoop) -> None:
        raw = changed("upstreams.a.concurrency", 1)
        bench = Bench(raw)
        for name in ("runs", *"abcdef"):
            bench.send(name, stays_s=1, **({"x-stainless-read-timeout": "30"} if name == "d" else {}))
            await a_moment()
        await bench.reload(changed("lanes.P1", {"max_wait_s": 60, "max_requests": 5, "lifo_above": 0.5}, raw))
        await a_moment(1)
        assert bench.went == ["runs", "f"]
        await bench.reload(raw)
        await a_moment(1)
        assert bench.went == ["runs", "f", "a"]
        await bench.reload(changed("lanes.P1", {"max_wait_s": 60, "order": "edf"}, raw))
        await asyncio.gather(*bench.tasks)
        assert bench.went == ["runs", "f", "a", "d", "b", "c", "e"]
        await bench.stop()

    play(scenario)


@pytest.mark.parametrize("rules", [{"weight": 50}, {"vip": True}], ids=str)
def test_a_tenant_in_line_gets_another_rank(rules: dict[str, Any]) -> None:
    """Its next turns come by its new weight, or before all who are no VIPs."""

    async def scenario(_: VirtualLoop) -> None:
        raw = changed("upstreams.a.concurrency", 1)
        bench = Bench(raw)
        bench.send("runs", team="default")
        await a_moment()
        for number in range(8):
            bench.send(f"x{number}", team="one")
            bench.send(f"y{number}", team="two")
        await a_moment(2)
        assert sorted(name[0] for name in bench.went) == ["r", "x", "y"]
        await bench.reload(changed("tenants.two", rules, changed("lanes.P1", {"max_wait_s": 60, "vip_share": 1}, raw)))
        await asyncio.sleep(5)
        assert [name[0] for name in bench.went[-4:]] == ["y"] * 4
        assert bench.went[-4:] == sorted(bench.went[-4:]), "each in its own order"
        await bench.reload(raw)
        await asyncio.gather(*bench.tasks)
        assert sorted(bench.went) == sorted(["runs", *(f"{team}{number}" for team in "xy" for number in range(8))])
        await bench.stop()

    play(scenario)


def test_permits_of_a_tenant_that_is_taken_off_the_list_come_back() -> None:
    """Also when it is listed again before they do: then they count at once. In the end nothing of it is counted."""

    async def scenario(_: VirtualLoop) -> None:
        raw = changed("upstreams.a.concurrency", 9, changed("tenants.one.concurrency", 2))
        bench = Bench(raw)
        for name, stays_s in {"long": 30, "short": 5}.items():
            bench.send(name, stays_s=stays_s)
        await a_moment()
        levels = bench.service.capacity.levels()
        assert levels["tenant/one/slots"].used == 2  # type: ignore[union-attr]
        await bench.reload(changed("tenants.one", None, raw))
        bench.send("now anybody", stays_s=1)
        await a_moment(10)
        assert levels["tenant/one/slots"].used == 1  # type: ignore[union-attr]
        await bench.reload(raw)
        bench.send("second", stays_s=30)
        await a_moment()
        third = bench.send("third")
        await a_moment()
        assert third.refused == "tenant_concurrency"
        await bench.reload(changed("tenants.one", None, raw))
        await asyncio.gather(*bench.tasks)
        await a_moment(100)
        assert "tenant/one/slots" not in levels
        assert bench.went == ["long", "short", "now anybody", "second"]
        await bench.stop()

    play(scenario)


def test_tenants_move_between_the_list_and_the_star_with_what_they_used() -> None:
    """Whoever names the rules, a minute's requests are counted on."""

    async def scenario(_: VirtualLoop) -> None:
        raw = changed("upstreams.a.concurrency", 9, changed("tenants", {"*": {"rpm": 3}}))
        bench = Bench(raw)
        listed = changed("tenants", {"*": {"rpm": 3}, "one": {"rpm": 4}}, raw)
        for number, rules in enumerate((raw, listed, raw, raw)):
            await bench.reload(rules)
            bench.send(f"{number}")
            await a_moment()
        assert bench.went == ["0", "1", "2"], "three a minute, wherever it stood"
        await bench.reload(changed("tenants", {"*": {}}, raw))
        bench.send("free")
        await a_moment()
        await bench.reload(changed("tenants", {"one": {"rpm": 3}}, raw))
        await a_moment(100)
        assert bench.went[-1] == "free"
        assert [key for key in bench.service.capacity.levels() if key.startswith("tenant/")] == ["tenant/one/requests"]
        await asyncio.gather(*bench.tasks)
        await bench.stop()

    play(scenario)


def test_limits_that_are_taken_away_and_come_back_hold_again() -> None:
    """Also of tenants that nobody listed, soon after, and with what they took before."""

    async def scenario(_: VirtualLoop) -> None:
        limited, free = changed("tenants", {"*": {"concurrency": 2}}), changed("tenants", {"*": {}})
        limited, free = (changed("upstreams.a.concurrency", 99, raw) for raw in (limited, free))
        bench = Bench(limited)
        bench.send("long", stays_s=500)
        await a_moment()
        await bench.reload(free)
        await a_moment(1)
        await bench.reload(limited)
        for wave in ("soon", "later"):
            callers = [bench.send(f"{wave} {number}", stays_s=1) for number in range(3)]
            await a_moment(2)
            assert [caller.refused for caller in callers] == ["", "tenant_concurrency", "tenant_concurrency"], wave
            await a_moment(600)
            bench.send("long again", stays_s=500)
            await a_moment()
        await asyncio.gather(*bench.tasks)
        bench.balance()
        await bench.stop()

    play(scenario)


def test_a_request_on_its_way_goes_on_though_its_tenant_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its headers and its books; it is counted as one of the others."""

    async def scenario(_: VirtualLoop) -> None:
        bench = Bench(changed("tenants.default.concurrency", 5))
        caller = bench.send("slow body")
        body = caller.exchange.body

        async def slowly() -> bytes:
            await asyncio.sleep(1)
            return await body()

        monkeypatch.setattr(caller.exchange, "body", slowly)
        await a_moment()
        await bench.reload(changed("tenants", {"default": {"concurrency": 5}}))
        await a_moment(1.5)
        assert bench.went == ["slow body"]
        assert bench.service.capacity.levels()["tenant/default/slots"].used == 1  # type: ignore[union-attr]
        await asyncio.gather(*bench.tasks)
        bench.balance()
        await bench.stop()

    play(scenario)


def test_sessions_follow_their_limits_with_what_they_used_and_were_given() -> None:
    """A raised one stays raised by as much; without a limit nothing is counted any more."""

    async def scenario(_: VirtualLoop) -> None:
        raw = changed("upstreams.a.concurrency", 9, changed("sessions.max_tokens", 1000))
        bench = Bench(raw)
        bench.send("call", **{"x-tidegate-session": "s"})
        await a_moment(3)
        allowances = bench.service.admission.allowances
        await allowances.add("one", "s", 500, 0.0)
        await bench.reload(changed("sessions.max_tokens", 200, raw))
        assert allowances.look("one", "s")["tokens"] == {"limit": 700, "used": 50, "left": 650}  # type: ignore[index]
        await bench.reload(changed("sessions.max_tokens", None, raw))
        assert allowances.look("one", "s")["tokens"] is None  # type: ignore[index]
        await a_moment(100)
        assert not [key for key in bench.service.capacity.levels() if key.startswith("session/")]
        await bench.reload(raw)
        assert allowances.look("one", "s")["tokens"]["used"] == 0  # type: ignore[index]
        await asyncio.gather(*bench.tasks)
        await bench.stop()

    play(scenario)


def test_settings_that_hold_no_more_are_forgotten() -> None:
    """Whatever was served by them: nothing keeps them but what they hold for."""

    async def scenario(_: VirtualLoop) -> None:
        bench = Bench()
        former: list[weakref.ref[Settings]] = []
        for number in range(5):
            await bench.reload(changed("observe", number / 10))
            former.append(weakref.ref(bench.service.settings))
            bench.send(f"{number}", stays_s=0.1)
            await a_moment(30)
        await asyncio.gather(*bench.tasks)
        gc.collect()
        assert [each() is None for each in former] == [True, True, True, True, False]
        await bench.stop()

    play(scenario)


def test_crowds_follow_a_few_at_a_time() -> None:
    """Others go on meanwhile. Who has not followed yet goes by its former rules, and who is forgotten never does."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(changed("sessions.max_tokens", 1_000, changed("tenants", {"*": {"concurrency": 1}})))
        allowances, levels = bench.service.admission.allowances, bench.service.capacity.levels()
        for number in range(1_000):
            for pin in (
                allowances._unlisted(f"t{number}", []),
                allowances.sessions.hear(f"t{number}", "s", bench.service.policy.sessions, loop.time())[0],
            ):
                await allowances.tune(allowances._declarations(pin, loop.time()))
                pin.declared = True
        seen: list[int] = []

        async def look() -> None:
            while True:
                seen.append(sum(c.limit == 3 for k, c in levels.items() if isinstance(c, Slots) and k[:6] == "tenant"))
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        await asyncio.sleep(0)
        last = allowances.sessions.find("t999", "s", loop.time())
        assert last is not None
        loop.call_soon(allowances.sessions._drop, last)
        more = changed("sessions.max_tokens", 2_000, changed("tenants", {"*": {"concurrency": 3}}))
        await bench.reload(more)
        steps = [after - before for before, after in itertools.pairwise(seen)]
        assert (max(steps), allowances.behind) == (100, 0)
        assert sum(c.limit == 3 for c in levels.values() if isinstance(c, Slots)) == 1_000
        assert sum(c.limit == 2_000 for c in levels.values() if isinstance(c, Budget)) == 999
        await bench.reload(changed("sessions.max_tokens", 2_000, changed("tenants", {"one": {}})))
        looking.cancel()
        left: list[int] = []
        for _ in range(100):
            left.append(sum(key[:6] == "tenant" for key in levels))
            await a_moment(1)
        assert (left[0], max(before - after for before, after in itertools.pairwise(left)), left[-1]) == (1_000, 500, 0)
        await bench.stop()

    play(scenario)


def test_what_was_learned_stays() -> None:
    """Open breakers rest on, what the provider said of its limit holds, and so does what answers taught."""

    async def scenario(loop: VirtualLoop) -> None:
        bench = Bench(changed("routes", [{"models": ["m"], "chain": ["b", "a"], "acknowledge_unowned": True}]))
        admission = bench.service.admission
        bench.service.breakers.signal("a", Signal.TRIP, "test")
        rests = bench.service.breakers.by_name["a"].rests_until
        bucket = admission.capacity.levels()["upstream/b/*/total"]
        assert isinstance(bucket, TokenBucket)
        bucket.level = 50_000
        said = {"x-ratelimit-limit-tokens": "30000", "x-ratelimit-remaining-tokens": "29000"}
        caller = bench.send("told", told_s=None)
        await a_moment(2)
        await caller.tell(headers=said, answered_s=0.5)
        assert bucket.rate == pytest.approx(475)
        learned = admission.calibration, admission.pace, admission.outputs.usual("one", "m", capped=False)
        await bench.reload(
            changed("upstreams.a.breaker", {"failures": 9, "slow": None, "errors": None, "malformed": None})
        )
        breaker = bench.service.breakers.by_name["a"]
        assert (breaker.state, breaker.rests_until, breaker.rules.failures) == (State.OPEN, rests, 9)
        assert (bucket.rate, bucket.capacity) == pytest.approx((475, 28_500)), "the provider's word holds"
        assert (admission.calibration, admission.pace, admission.outputs.usual("one", "m", capped=False)) == learned
        await bench.reload(changed("upstreams.b.limits", [{"tpm": 12_000, "burst_s": 60}]))
        assert bucket.rate == pytest.approx(190), "a smaller one of ours holds, too"
        assert "upstream/b/*/requests" in admission.capacity.levels()
        await asyncio.gather(*bench.tasks)
        await asyncio.sleep(100)
        assert "upstream/b/*/requests" not in admission.capacity.levels()
        assert loop.time() > 0
        await bench.stop()

    play(scenario)


def test_limits_of_ours_give_way_to_learned_ones_and_come_back() -> None:
    """Nothing is enforced that nobody says any more; what the provider then says is."""

    async def scenario(_: VirtualLoop) -> None:
        raw = changed("routes", [{"models": ["m"], "chain": ["b"], "acknowledge_unowned": True}])
        bench = Bench(raw)
        levels, key = bench.service.capacity.levels(), "upstream/b/*/total"
        learning = changed("upstreams.b", {"provider": "openai", "url": "http://b", "learn": True}, raw)
        await bench.reload(learning)
        assert levels[key].shadow
        caller = bench.send("told", told_s=None)
        await a_moment(2)
        assert bench.went == ["told"]
        said = {"x-ratelimit-limit-tokens": "30000", "x-ratelimit-remaining-tokens": "29000"}
        await caller.tell(headers=said, answered_s=0.5)
        await a_moment(100)
        assert key not in levels
        caller = bench.send("again", told_s=None)
        await a_moment(2)
        await caller.tell(headers=said, answered_s=0.5)
        bucket = levels[key]
        assert isinstance(bucket, TokenBucket)
        assert (bucket.rate, bucket.shadow) == (pytest.approx(475), False)
        await bench.reload(learning)
        assert (levels[key], bucket.rate, bucket.shadow) == (bucket, pytest.approx(475), False)
        await bench.reload(raw)
        assert (levels[key], bucket.rate) == (bucket, pytest.approx(475)), "ours is larger"
        await a_moment(100)
        assert levels[key] is bucket
        await asyncio.gather(*bench.tasks)
        await bench.stop()

    play(scenario)


def test_other_upstreams_are_not_followed() -> None:
    """Whoever calls for that has a bug."""

    async def scenario(_: VirtualLoop) -> None:
        bench = Bench()
        raw = changed("upstreams.c", {"provider": "groq", "concurrency": 1})
        with pytest.raises(ValueError, match="upstreams"):
            await bench.service.admission.reload(settings(raw).policy())
        await bench.stop()

    play(scenario)


class Race:
    """A random schedule of arrivals, ends, people who leave, failures, and reloads."""

    TEAMS, LANES = ("one", "two", "three", "four"), ("P0", "P1", "P2", "P3")

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bench = Bench(self.draw(start=True))
        self.used: Counter[str] = Counter()
        told = self.bench.service.flights._tell_used

        def tell(request: Any, used: Any) -> None:
            self.used[f"session/{quoted(request.tenant)}/{quoted(request.session.id)}/tokens"] += used.total
            told(request, used)

        self.bench.service.flights._tell_used = tell

    def draw(self, *, start: bool = False) -> dict[str, Any]:
        """Settings that could be anybody's. What everybody's begin with can never be more than live."""
        rng = self.rng
        raw = deepcopy(RAW)
        upstreams = raw["upstreams"] = {}
        for name in "abc":
            limits = [
                {"tpm": rng.choice([3_000, 30_000]), "rpm": rng.choice([20, 300]), "burst_s": rng.choice([10, 60])}
            ]
            limits += [{"model": "m", "tpm": 9_000}] if rng.random() < 0.3 else []
            upstreams[name] = {"provider": "compatible", "url": f"http://{name}", "concurrency": rng.choice([1, 2, 20])}
            upstreams[name] |= {"limits": limits} if rng.random() < 0.5 else {}
            upstreams[name] |= (
                {"usd_per_day": 10, "prices": {"*": {"input": 1, "output": 1}}} if rng.random() < 0.3 else {}
            )
            upstreams[name]["breaker"] = rng.choice(
                [{}, {"failures": 1}, {"slow": None, "malformed": None, "errors": None}]
            )
        chain = rng.sample("abc", rng.randint(1, 3))
        raw["routes"] = [
            {"models": ["m"], "chain": chain, "acknowledge_unowned": True, "observe": rng.choice([0, 0, 0.3])}
        ]
        names = list(self.LANES) if start else rng.sample(self.LANES, rng.randint(1, 4))
        raw["lanes"] = {
            name: {
                "max_wait_s": 40 if start else rng.choice([5, 40]),
                "when_busy": rng.choice(["spill", "hold"]),
                "spill_after_s": rng.choice([0, 1, 5]),
                "max_requests": rng.choice([1, 4, 100]),
                "min_share": rng.choice([0, 0.2]),
                "keep_free": rng.choice([0, 0.2]),
                "order": (order := rng.choice(["fifo", "edf"])),
                "lifo_above": rng.choice([None, 0.5]) if order == "fifo" else None,
                "vip_share": rng.choice([0.2, 0.8]),
                "pacing": rng.choice(["burst", "smooth"]),
            }
            for name in names
        }
        raw["tenants"] = {name: self.tenant() for name in rng.sample([*self.TEAMS, "*"], rng.randint(0, 5))}
        raw["queue"] = {"max_requests": rng.choice([3, 200])}
        raw["sessions"] = {"max_tokens": rng.choice([500, 10**6]), "derived": True}
        raw["retries"] = {"share": rng.random(), "least_per_s": rng.random()}
        return raw

    def tenant(self) -> dict[str, Any]:
        rng = self.rng
        limits = {
            "tpm": 3_000,
            "rpm": 30,
            "concurrency": rng.randint(1, 3),
            "usd_per_hour": 1,
            "vip": True,
            "weight": 3,
        }
        return dict(rng.sample(sorted(limits.items()), rng.randint(0, len(limits))))

    async def run(self) -> None:
        rng, bench = self.rng, self.bench
        ends = asyncio.get_running_loop().time() + 40
        number = 0
        while asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(rng.expovariate(4))
            if rng.random() < 0.15:
                await bench.reload(self.draw())
                continue
            number += 1
            caller = bench.send(
                f"{number}",
                team=rng.choice([*self.TEAMS, ""]),
                lane=rng.choice(["", *self.LANES]),
                stays_s=rng.choice([0, 1, 20]),
                told_s=rng.choice([0, 1, 10, None]),
                output=rng.choice([1, 20, 200]),
            )
            if rng.random() < 0.2:
                asyncio.get_running_loop().call_later(rng.choice([0, 0.01, 3]), caller.task.cancel)
            if rng.random() < 0.1:
                asyncio.get_running_loop().call_later(rng.random() * 5, self.fail, caller)
            bench.balance()
        await self.end()

    def fail(self, caller: Caller) -> None:
        """Its first upstream did not serve."""
        if caller.exchange.departures:
            order = caller.exchange.departures[0].order
            record = Record(
                RecordKind.ATTEMPT, "", order[0], 503, frozenset(), "", 1, 0.5, None, request_id=caller.name
            )
            self.bench.tasks.append(asyncio.ensure_future(self.bench.service.admission.hear(record)))

    async def end(self) -> None:
        bench, service = self.bench, self.bench.service
        await asyncio.sleep(200)
        for end in await asyncio.gather(*bench.tasks, return_exceptions=True):
            assert not isinstance(end, Exception), end
        assert (len(service.lanes), service.flights.unsettled) == (0, 0)
        bench.balance()
        levels, now = service.capacity.levels(), asyncio.get_running_loop().time()
        for key, counter in levels.items():
            match counter:
                case Slots():
                    assert counter.used == 0, key
                case TokenBucket():
                    assert counter.level_at(now) == pytest.approx(counter.capacity), key
                case Budget() if key.startswith("session/"):
                    assert counter.used == pytest.approx(self.used[key]), key
        assert service.admission._retired == {}
        named = {*service.admission._durable}
        assert {key for key in levels if not key.startswith(("session/", "tenant/"))} <= named
        assert len({*bench.went}) == len(bench.went)
        await bench.stop()


BATCH = 10


@pytest.mark.parametrize("first", range(0, SCHEDULES, BATCH))
def test_random_schedules_balance(first: int) -> None:
    """Whatever is changed while they wait and fly: permits, tokens and books balance, on the way and in the end."""
    for seed in range(first, first + BATCH):
        try:
            play(lambda _, seed=seed: Race(seed).run())
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_a_counter_that_is_forgotten_too_soon_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has teeth: permits of a counter that no rule names are lost with it."""
    monkeypatch.setattr("extproc.admission.Retire", Forget)

    def play_some() -> None:
        for seed in range(BATCH):
            play(lambda _, seed=seed: Race(seed).run())

    with pytest.raises(AssertionError):
        play_some()
