"""What the history keeps of the last hour, and of the last minutes."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from extproc.core.events import Admitted, Left, Queued, Refused, Settled
from extproc.core.refusal import Reason
from extproc.core.request import Request
from extproc.telemetry.history import BOUNDS_S, KEPT_IDS, MOST_NAMES, STEP_S, STEPS, History, percentile
from extproc.telemetry.tally import Tally
from tests.doubles import HandClock, request


class World:
    """A history and a tally that hear the same, and a state made of them."""

    def __init__(self) -> None:
        self.clock = HandClock(5000.0)
        self.ahead_s = 0.0
        self.history, self.tally = History(self.clock.time, lambda: self.clock.now + self.ahead_s), Tally()
        self.waiting = {"P0": 0, "P1": 0}
        self.level = 50.0

    def hear(self, *events: Any) -> None:
        for event in events:
            self.history(event)
            self.tally(event)

    def state(self) -> dict[str, Any]:
        return {
            "waiting": {name: {"requests": many} for name, many in self.waiting.items()},
            "counters": {
                "upstream/a/*/total": {"level": self.level, "capacity": 100.0, "per_second": 1.0},
                "upstream/a/slots": {"used": 1, "limit": None},
                "tenant/a/total": {"level": 0.0, "capacity": 100.0, "per_second": 1.0},
            },
            "breakers": {"a": {"state": "closed"}},
            "tally": self.tally.snapshot(),
        }

    def step(self) -> None:
        self.clock.now += STEP_S
        self.history.step(self.state())


@pytest.fixture
def world() -> World:
    return World()


def admitted(waited_s: float, lane: str = "P1") -> Admitted:
    return Admitted(request(lane=lane), ("a",), waited_s)


def admitted_of(one: Request) -> Admitted:
    return Admitted(one, ("a",), 1.0)


def refused(reason: Reason, waited_s: float, one: Request) -> Refused:
    return Refused(reason, 503, "t", one.lane, waited_s, one.id, one)


def test_a_step_is_what_happened_in_it(world: World) -> None:
    """Counts are of the step alone; what stands is as it stands at its end."""
    world.hear(admitted(0.0), admitted(2.0))
    world.waiting["P1"] = 3
    world.step()
    world.hear(admitted(1.0), Refused(Reason.LANE_FULL, 503, "t", "P1"))
    world.level = -10.0
    world.step()
    told = world.history.told()
    assert told["step_s"] == STEP_S
    assert told["at"] == [5010.0, 5020.0]
    assert told["lanes"]["P1"]["admitted"] == [2, 1]
    assert told["lanes"]["P1"]["waiting"] == [3, 3]
    assert told["lanes"]["P1"]["refused"] == [0, 1]
    assert told["lanes"]["P0"]["wait_p95_s"] == [None, None]
    assert told["upstreams"]["a"]["level"] == [0.5, 0.0]
    assert told["upstreams"]["a"]["state"] == ["closed", "closed"]
    assert told["refused"] == {"lane_full": [0, 1]}
    json.dumps(told, allow_nan=False)


def test_an_hour_is_kept(world: World) -> None:
    """No more than that, however long it runs; what came later has gaps before it."""
    for _ in range(STEPS + 5):
        world.step()
    world.waiting["P2"] = 0
    world.step()
    told = world.history.told()
    assert len(told["at"]) == STEPS == len(told["lanes"]["P2"]["waiting"])
    assert told["lanes"]["P2"]["waiting"][-2:] == [None, 0]


def test_percentiles_are_those_of_five_minutes(world: World) -> None:
    """Within a tenth of the truth; what is older is forgotten."""
    world.hear(*(admitted(100.0) for _ in range(50)))
    for _ in range(31):
        world.step()
    assert world.history.waits("P1") == {}
    world.hear(*(admitted(i / 10) for i in range(1, 101)))
    world.step()
    waits = world.history.waits("P1")
    for share, true in ((0.5, 5.0), (0.95, 9.5), (0.99, 9.9)):
        assert percentile(waits, share) == pytest.approx(true, rel=0.1)
    assert world.history.waits("P0") == {}
    assert percentile({}, 0.5) is None


def test_who_waited_in_vain_has_waited(world: World) -> None:
    """A refusal after a wait counts among the waits of its lane; one at once does not, though it takes a moment."""
    waiting, hopeless = request(id="w", ticket="w", lane="P1"), request(id="h", ticket="h", lane="P1")
    world.hear(Queued(waiting, 5.0), *(refused(Reason.DEADLINE_UNMEETABLE, 0.011, hopeless) for _ in range(500)))
    assert world.history.waits("P1") == {}
    world.hear(refused(Reason.QUEUE_TIMEOUT, 30.0, waiting), Refused(Reason.UNAUTHENTICATED, 401, "t", "P1", 0.01))
    assert percentile(world.history.waits("P1"), 0.01) == pytest.approx(30.0, rel=0.1)


def test_nobody_is_in_line_for_ever(world: World) -> None:
    """Who was let go, was refused or has left is forgotten."""
    for number, ends in enumerate((admitted_of, partial(refused, Reason.EVICTED, 1.0), lambda one: Left(one, 1.0))):
        one = request(id=f"r{number}", ticket=f"t{number}", lane="P1")
        world.hear(Queued(one, 1.0))
        assert world.history._in_line == {one.ticket}
        world.hear(ends(one))
        assert world.history._in_line == set()


@pytest.mark.parametrize("seconds", [0.0, 0.0005, 0.002, 1.0, 899.0, 10_000.0])
def test_any_wait_has_its_class(world: World, seconds: float) -> None:
    """The shortest count as none, and the longest as long as there are classes."""
    world.hear(admitted(seconds))
    told = percentile(world.history.waits("P1"), 0.5)
    assert told is not None
    if seconds <= BOUNDS_S[0]:
        assert told == 0
    elif seconds < BOUNDS_S[-1]:
        assert told == pytest.approx(seconds, rel=0.1, abs=0.001)
    else:
        assert told == pytest.approx(BOUNDS_S[-1], rel=0.1)


def test_rates_are_of_the_last_ten_seconds(world: World) -> None:
    """Since a step that is at least so old; from the start until there is one."""
    world.hear(*(admitted(0.0) for _ in range(20)))
    world.clock.now += 2.0
    counts = world.history.counts(world.state())
    assert counts.rate(world.history.before(), "admitted", "P1") == 10
    world.step()
    world.step()
    world.hear(*(admitted(0.0) for _ in range(30)))
    world.clock.now += 5.0
    counts = world.history.counts(world.state())
    assert counts.rate(world.history.before(), "admitted", "P1") == 2
    assert counts.rate(counts, "admitted", "P1") is None


def test_refusals_keep_a_few_ids(world: World) -> None:
    """The newest, cut short: an id comes from outside."""
    world.hear(*(Refused(Reason.LANE_FULL, 503, "t", "P1", 0.0, f"r{i}" * 100) for i in range(20)))
    world.hear(Refused(Reason.UNKNOWN_MODEL, 404))
    last = world.history.refusals[Reason.LANE_FULL]
    assert last.at == 5000.0
    assert [name[:3] for name in last.ids] == ["r15", "r16", "r17", "r18", "r19"]
    assert len(last.ids) == KEPT_IDS
    assert max(map(len, last.ids)) == 100
    assert list(world.history.refusals[Reason.UNKNOWN_MODEL].ids) == []


def test_own_limits_are_told_by_tenant(world: World) -> None:
    """Of any number of tenants some by name and the rest as one, and no longer than five minutes."""
    world.hear(*(Refused(Reason.TENANT_QUOTA, 429, "loud", "P1") for _ in range(9)))
    world.hear(*(Refused(Reason.TENANT_QUOTA, 429, f"t{i}", "P1") for i in range(3 * MOST_NAMES)))
    world.hear(Refused(Reason.TENANT_QUOTA, 429, "loud", "P1"))
    own = world.history.own_limits()
    assert own[Reason.TENANT_QUOTA, "loud"] == 10
    assert len(own) == MOST_NAMES + 1
    assert sum(own.values()) == 10 + 3 * MOST_NAMES
    for _ in range(31):
        world.step()
    assert not world.history.own_limits()


@pytest.mark.parametrize("by_s", [-3600.0, 3600.0])
def test_a_wall_clock_that_is_set_bends_no_chart(world: World, by_s: float) -> None:
    """Steps stay ten seconds apart and in order, and end now."""
    world.step()
    world.ahead_s = by_s
    world.step()
    assert world.history.told()["at"] == [5010.0 + by_s, 5020.0 + by_s]


def test_first_tokens_by_upstream(world: World) -> None:
    """Of those that streamed and were served."""
    world.hear(Settled(request(), "a", 1, 200, None, 0.0, first_token_s=0.5))
    whole = Settled(request(stream=False), "a", 1, 200, None, 0.0, first_token_s=9.0)  # its first byte is its last
    world.hear(*[whole] * 9)
    world.hear(Settled(request(), "", 1, 503, None, 0.0), Settled(request(), "a", 1, 200, None, 0.0))
    assert percentile(world.history.firsts("a"), 0.5) == pytest.approx(0.5, rel=0.1)
    assert world.history.firsts("") == {}
