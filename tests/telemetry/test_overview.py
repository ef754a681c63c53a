"""What one picture of everything says, from plain data."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from extproc.core.breaker import Outcome, State
from extproc.core.events import Admitted, AttemptFailed, BreakerMoved, Refused, Settled
from extproc.core.policy import Kind, KvRules, Lane, Limit, Pacing, Policy, Route, Upstream, WhenBusy
from extproc.core.refusal import Reason
from extproc.core.request import Dialect, Usage
from extproc.core.runbook import Runbook
from extproc.telemetry.history import STEP_S, History
from extproc.telemetry.keys import Parts, parts_of
from extproc.telemetry.overview import Seen, overview
from extproc.telemetry.tally import Tally
from tests.doubles import HandClock, request

KEY = "upstream/a/*/total"


def lane(name: str, rank: int, **changes: Any) -> Lane:
    rule = Lane(name, rank, 30.0, WhenBusy.SPILL, 0.0, 100, 10_000, 1_000_000)
    return replace(rule, **changes)


def upstream(name: str, **changes: Any) -> Upstream:
    limits = (Limit("*", Kind.TOTAL, 6000.0, 1000.0),)
    return replace(Upstream(name, "openai", frozenset({Dialect.OPENAI}), limits), **changes)


class World:
    """A state as plain data that a test changes, and what is told of it."""

    def __init__(self) -> None:
        self.clock = HandClock(10_000.0)
        self.history, self.tally = History(self.clock.time, self.clock.time), Tally()
        lanes = {"P0": lane("P0", 0), "P1": lane("P1", 1)}
        self.policy = Policy({"a": upstream("a"), "b": upstream("b")}, (Route("0:m", ("m",), ("a", "b")),), lanes, {})
        self.waiting = {name: {"requests": 0, "tokens": 0, "bytes": 0} for name in lanes}
        self.counters: dict[str, dict[str, Any]] = {
            KEY: {"level": 500.0, "capacity": 1000.0, "per_second": 100.0},
            "upstream/a/slots": {"used": 2.0, "limit": None},
            "upstream/b/*/total": {"level": 900.0, "capacity": 1000.0, "per_second": 100.0},
            "upstream/b/slots": {"used": 0.0, "limit": 8},
        }
        self.breakers: dict[str, dict[str, Any]] = {name: {"state": "closed"} for name in ("a", "b")}
        self.config: dict[str, Any] = {"version": "v", "problems": [], "waiting": [], "reloaded_at": None}
        self.more: dict[str, Any] = {}
        self.lines: list[dict[str, Any]] = []

    def hear(self, *events: Any) -> None:
        for event in events:
            self.history(event)
            self.tally(event)

    def line(self, **changes: Any) -> None:
        """Somebody waits."""
        line = {
            "lane": "P1", "model": "m", "route": "0:m", "chain": ["a", "b"], "asked": ["a"], "key": KEY,
            "behind": False, "next_s": 3.2, "newcomer_s": 9.0, "requests": 62, "tokens": 6200, "needs": 600.0,
            "tenants": 1, "tenant": "chat", "tenant_share": 1.0,
        } | changes  # fmt: skip
        self.lines.append(line)
        for unit in ("requests", "tokens"):
            self.waiting[line["lane"]][unit] += line[unit]

    def told(self, recent: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        lanes = {name: {"oldest_s": 12.0 if backlog["requests"] else None} for name, backlog in self.waiting.items()}
        state = {
            "lanes": lanes, "waiting": self.waiting, "counters": self.counters, "breakers": self.breakers, "pacing": {},
            "draining": False, "config": self.config, "tally": self.tally.snapshot(),
        } | self.more  # fmt: skip
        standing = {"lines": self.lines, "tenants": {"chat": 62}}
        before = copy.deepcopy((state, standing))
        found = overview(Seen(self.clock.now, "1.2", 60.0, state, standing, self.policy, self.history, recent))
        assert (state, standing) == before
        json.dumps(found, allow_nan=False)
        return found

    def binding(self) -> dict[str, Any]:
        return dict(self.told()["binding"][0])

    def runbooks(self) -> list[str]:
        return [notice["runbook"] for notice in self.told()["notices"]]

    def levers(self, **moved: Any) -> None:
        nothing = {"bypass": None, "draining": False, "lanes": {}, "upstreams": {}, "changes": []}
        self.more["levers"] = nothing | moved

    def pass_by(self, seconds: float) -> None:
        """Time goes by, and the history takes its steps."""
        for _ in range(round(seconds / STEP_S)):
            self.clock.now += STEP_S
            plain = {"waiting": self.waiting, "counters": self.counters, "breakers": self.breakers}
            self.history.step(plain | {"tally": self.tally.snapshot()})


@pytest.fixture
def world() -> World:
    return World()


def test_what_has_no_source_is_none(world: World) -> None:
    """A quiet service of which nothing more is known: nothing is made up."""
    told = world.told()
    assert told["status"] == "ok"
    assert told["notices"] == told["binding"] == told["refusals"] == told["alerts"] == []
    for field in ("tenants", "sessions", "recent", "levers", "process"):
        assert told[field] is None
    first = told["lanes"][0]
    assert [first[name] for name in ("wait_p50_s", "oldest_s", "paused", "binding")] == [None] * 4
    assert first["predicted_s"] == 0.0
    assert told["upstreams"][0]["out"] is told["upstreams"][0]["kv"] is told["upstreams"][0]["usd_per_hour"] is None


def test_lanes_and_upstreams(world: World) -> None:
    """What they hold, how fast they go, and how they are bounded."""
    world.hear(*(Admitted(request(), ("a",), 1.0) for _ in range(20)), Refused(Reason.LANE_FULL, 503, "t", "P1"))
    world.hear(Settled(request(), "a", 1, 200, Usage(100, 100), 1.0, first_token_s=0.5))
    world.line()
    world.clock.now += 10
    told = world.told()
    first = told["lanes"][1]
    assert (first["requests"], first["max_requests"], first["rank"], first["oldest_s"]) == (62, 100, 1, 12.0)
    assert (first["admitted_per_s"], first["refused_per_s"]) == (2.0, 0.1)
    assert first["wait_p50_s"] == pytest.approx(1.0, rel=0.1)
    assert first["predicted_s"] == 9.0
    assert first["binding"] == KEY
    a, b = told["upstreams"]
    assert (a["in_flight"], a["slots_limit"], b["slots_limit"]) == (2.0, None, 8)
    assert (a["tokens_per_s"], a["requests_per_s"]) == (20.0, 0.1)
    bucket = {"key": KEY, "kind": "total", "level": 500.0, "capacity": 1000.0, "per_second": 100.0}
    assert a["buckets"] == [bucket | {"closed_s": None, "shadow": False}]


def test_the_status_is_the_gravest_that_is_true(world: World) -> None:
    """From ok to draining, each over the one before."""
    assert world.told()["status"] == "ok"
    world.line()
    assert world.told()["status"] == "waiting"
    world.hear(Refused(Reason.TENANT_QUOTA, 429, "t", "P1"))
    assert world.told()["status"] == "waiting", "a caller's own limit is no pressure"
    world.hear(Refused(Reason.QUEUE_TIMEOUT, 429, "t", "P1", 30.0))
    assert world.told()["status"] == "shedding"
    world.breakers["a"] = {"state": "open", "sign": "failures", "rests_s": 3.0}
    assert world.told()["status"] == "shedding", "b still serves"
    world.breakers["b"] = {"state": "half_open", "sign": "errors"}
    assert world.told()["status"] == "outage"
    world.levers(bypass={"until": None})
    assert world.told()["status"] == "bypassed"
    world.more["draining"] = True
    assert world.told()["status"] == "draining"


def test_shedding_is_over_when_nobody_was_refused_for_a_while(world: World) -> None:
    """It is told of the last half minute."""
    world.hear(Refused(Reason.LANE_FULL, 503, "t", "P1"))
    assert world.told()["status"] == "shedding"
    world.pass_by(40)
    assert world.told()["status"] == "ok"


def test_slow_upstreams_and_those_to_which_traffic_returns_serve(world: World) -> None:
    """So that is no outage."""
    world.breakers = {"a": {"state": "open", "sign": "slow"}, "b": {"state": "closed"}}
    world.levers(upstreams={"b": {"out": True, "until": None}})
    assert world.told()["status"] == "ok"
    world.breakers["a"] = {"state": "ramping", "sign": "failures"}
    assert world.told()["status"] == "ok"
    world.levers(upstreams={name: {"out": True, "until": None} for name in "ab"})
    assert world.told()["status"] == "outage"


def test_what_binds_in_words(world: World) -> None:
    """Who waits, for what, how many, and when the next goes; lines that wait for the same are one."""
    world.line(requests=60)
    world.line(model="n", requests=2, next_s=None)
    binding = world.binding()
    assert binding["text"] == "P1 waits for tokens a minute of a: 62 waiting, next in 3 s"
    assert (binding["lane"], binding["key"], binding["waiting"], binding["next_s"]) == ("P1", KEY, 62, 3.2)


def hint(world: World, **line: Any) -> str:
    world.line(**line)
    return str(world.binding()["help"])


def test_hint_more_tokens(world: World) -> None:
    """Where a bucket is empty more of it helps; or who else could be asked."""
    world.counters[KEY]["level"] = 10.0
    assert hint(world, chain=["a"]) == (
        "more tpm at a, if its provider allows it; or another upstream in the chain of m"
    )


def test_hint_all_are_asked(world: World) -> None:
    """Then the others have no room either."""
    world.counters[KEY]["level"] = 10.0
    assert hint(world, asked=["a", "b"]).endswith("b has no room either")


def test_hint_of_whom_it_is(world: World) -> None:
    """A tenant is named that has most of what waits, among several."""
    assert "tenant chat has 80% of what waits" in hint(world, tenants=3, tenant_share=0.8)
    world.lines.clear()
    assert "tenant" not in hint(world, tenants=3, tenant_share=0.4)


def with_lane(world: World, **changes: Any) -> None:
    world.policy = replace(world.policy, lanes={"P0": lane("P0", 0), "P1": lane("P1", 1, **changes)})


def test_hint_what_is_kept_free(world: World) -> None:
    """There is enough, but it is for others."""
    world.counters[KEY]["level"] = 700.0
    with_lane(world, keep_free=0.2)
    assert "the last 20% stay free for better lanes (lanes.P1.keep_free)" in hint(world)
    burning = {"a": upstream("a", burn=0.7), "b": upstream("b")}
    world.policy = replace(world.policy, upstreams=burning)
    assert "the last 30% stay free for better lanes (upstreams.a.burn)" in hint(world)


def test_hint_a_share_and_an_even_pace(world: World) -> None:
    """What is there may be owed, or be taken evenly."""
    world.counters[KEY] |= {"level": 900.0, "owed": {"P2": 800.0}}
    assert "owed to P2 (min_share)" in hint(world)
    del world.counters[KEY]["owed"]
    with_lane(world, pacing=Pacing.SMOOTH)
    assert "P1 takes no more than flows in (pacing: smooth)" in hint(world)
    with_lane(world)
    world.lines.clear()
    assert "for others whose turn is before" in hint(world, behind=True)


def test_hint_of_the_provider(world: World) -> None:
    """A pause that it asked for, a rate that it refused, others on the same account."""
    world.more["pacing"] = {KEY: {"share": 0.6, "others_per_s": 50.0}}
    assert "others use 3,000 a minute of the same account" in hint(world)
    world.more["pacing"] = {KEY: {"share": 0.6}}
    assert "only 60% of the rate of a is used" in world.binding()["help"]
    world.counters[KEY]["closed_s"] = 4.0
    assert world.binding()["text"].startswith("P1 waits for the pause that a asked for")
    assert "a 429 or a header of a asked for this pause" in world.binding()["help"]


def test_hint_hold_and_what_is_away(world: World) -> None:
    """A lane that holds could go on; or those behind are away."""
    with_lane(world, when_busy=WhenBusy.HOLD)
    assert "P1 holds for its first choice; when_busy: spill would let it go to b" in hint(world)
    world.breakers["b"] = {"state": "open", "sign": "failures"}
    assert "b of its chain is away" in world.binding()["help"]


def test_hint_slots(world: World) -> None:
    """All places are taken, or fewer are given than there are."""
    world.counters["upstream/b/slots"] = {"used": 8.0, "limit": 8}
    world.policy = replace(world.policy, upstreams={"a": upstream("a"), "b": upstream("b", concurrency=8)})
    key = "upstream/b/slots"
    assert "8 of 8 run there: raise its concurrency, if it can do more" in hint(world, key=key, asked=["b"])
    world.counters[key]["limit"] = 4
    assert "b is held back to 4 of 8 at a time" in world.binding()["help"]


def test_hint_cache(world: World) -> None:
    """An engine is full, or nobody knows."""
    key = "upstream/b/kv"
    world.policy = replace(world.policy, upstreams={"a": upstream("a"), "b": upstream("b", kv=KvRules())})
    world.counters[key] = {"fill": 0.83, "saturation": 1.01}
    told = hint(world, key=key, asked=["b"])
    assert world.binding()["text"].startswith("P1 waits for room in the KV cache at b: ")
    assert "its cache is 83% full" in told
    assert world.told()["upstreams"][1]["kv"] == {"saturation": 1.01, "fill": 0.83, "stale_s": None}
    world.counters[key]["saturation"] = None
    assert "metrics of b cannot be read" in world.binding()["help"]
    assert world.runbooks() == [Runbook.KV_STALE]


def test_hint_breaker(world: World) -> None:
    """Nobody may be asked: why, and until when."""
    world.breakers["a"] = {"state": "open", "sign": "failures", "rests_s": 4.2}
    told = hint(world, key="upstream/a/breaker", asked=[], chain=["a"])
    assert "the breaker of a is open because of failures in a row, tried again in 4 s" in told
    assert "no other upstream serves m: one more in its chain would" in told
    world.levers(upstreams={"a": {"out": True, "until": None}})
    assert "a was taken out by an operator: put it back" in world.binding()["help"]
    assert world.binding()["text"].startswith("P1 waits for a, which is out: ")


def test_paused_lanes_bind(world: World) -> None:
    """Who waits there waits for an operator."""
    world.waiting["P1"]["requests"] = 5
    world.levers(lanes={"P1": {"paused": True, "until": 10_060.0}, "P0": {"paused": False, "until": None}})
    binding = world.binding()
    assert binding["text"] == "P1 is paused by an operator: 5 waiting"
    assert (binding["next_s"], binding["help"]) == (60.0, "resume P1")
    assert world.told()["lanes"][1]["paused"] is True
    assert world.told()["lanes"][0]["paused"] is False
    assert world.runbooks() == [Runbook.LEVERS]


def test_own_limits_bind(world: World) -> None:
    """A tenant's own quota refuses it: that is told behind what others wait for."""
    world.hear(*(Refused(Reason.TENANT_QUOTA, 429, "loud", "P1") for _ in range(7)))
    world.line()
    first, second = world.told()["binding"]
    assert first["lane"] == "P1"
    assert second["text"] == "tenant loud reached its tpm or rpm: 7 refused in 5 minutes"
    assert second["key"] == "tenant/loud/tenant_quota"


def test_the_best_lane_comes_first(world: World) -> None:
    """Then who has more waiting."""
    world.line(requests=50)
    world.line(key="upstream/b/slots", requests=70)
    world.line(lane="P0", requests=1)
    assert [(one["lane"], one["waiting"]) for one in world.told()["binding"]] == [("P0", 1), ("P1", 70), ("P1", 50)]


def test_breakers_are_told_with_their_time(world: World) -> None:
    """Since when it has not been closed; our own account and key are worse than a sick upstream."""
    world.clock.now = 20_000.0
    world.hear(BreakerMoved("a", State.CLOSED, State.OPEN, "x", "failures"))
    world.breakers["a"] = {"state": "open", "sign": "failures", "rests_s": 4.0}
    world.breakers["b"] = {"state": "half_open", "sign": "terminal"}
    first, second = (one for one in world.told()["notices"] if one["runbook"] == Runbook.BREAKER_OPEN)
    assert (first["level"], first["text"]) == ("error", "b: breaker half open (its account has no credit)")
    assert (second["level"], second["text"]) == (
        "warning",
        "a: breaker open (sign: failures), tried again in 4 s",
    )
    assert second["since"] == world.told()["alerts"][0]["at"]
    assert first["since"] is None


def test_lanes_that_are_nearly_full(world: World) -> None:
    """By any of their bounds."""
    world.waiting["P1"] |= {"requests": 95, "tokens": 100}
    notice = next(one for one in world.told()["notices"])
    assert notice["text"] == "lane P1 is nearly full: 95 of 100 requests"
    assert notice["runbook"] == Runbook.QUEUE_FULL


def test_the_best_lane_burns_what_it_is_promised(world: World) -> None:
    """More than one in a hundred refused, of twenty at least."""
    world.hear(*(Admitted(request(lane="P0"), ("a",), 0.0) for _ in range(50)))
    assert Runbook.SLO_BURN not in world.runbooks()
    world.hear(Refused(Reason.QUEUE_TIMEOUT, 429, "t", "P0", 4.0))
    assert Runbook.SLO_BURN in world.runbooks()
    world.pass_by(400)
    assert Runbook.SLO_BURN not in world.runbooks()


def test_what_callers_brought_about_burns_nothing(world: World) -> None:
    """A quota of their own, or a model that is not there, is nobody's miss."""
    world.hear(*(Admitted(request(lane="P0"), ("a",), 0.0) for _ in range(50)))
    world.hear(*(Refused(reason, 429, "t", "P0") for reason in (Reason.TENANT_QUOTA, Reason.TOO_LARGE)))
    assert world.runbooks() == []
    assert world.told()["lanes"][0]["refused_per_s"] is None, "no time went by"


def test_who_was_refused_or_failed(world: World) -> None:
    """By reason, as long as it is not long ago."""
    world.hear(Refused(Reason.EVICTED, 503, "t", "P1"), Settled(request(), "", 1, 503, None, 0.0))
    world.hear(Settled(request(), "", 1, 503, None, 0.0))
    first, second = world.told()["notices"]
    assert first["text"] == "1 request was refused in five minutes: evicted"
    assert (second["text"], second["runbook"]) == (
        "2 requests were let go and failed in five minutes: upstream_failed",
        Runbook.REQUESTS_FAIL,
    )
    world.pass_by(90)
    assert [one["text"] for one in world.told()["notices"]] == [second["text"]]


def test_providers_that_refuse_for_speed(world: World) -> None:
    """One in twenty is worth a look; fewer are told."""
    world.hear(*(Settled(request(), "a", 1, 200, None, 0.0) for _ in range(38)))
    world.hear(AttemptFailed("a", Outcome.PACED, 429, "", "t"))
    (notice,) = world.told()["notices"]
    assert notice["text"] == "a refused 1 of 39 attempts for speed (429) in five minutes"
    assert (notice["level"], notice["runbook"]) == ("info", Runbook.PROVIDER_REFUSES)
    world.hear(AttemptFailed("a", Outcome.PACED, 429, "", "t"))
    assert world.told()["notices"][0]["level"] == "warning"


def test_estimates_that_drift(world: World) -> None:
    """Of twenty answers at least, in their sum."""
    for _ in range(19):
        world.hear(Settled(request(), "a", 1, 200, Usage(30, 10), 0.0))
    assert Runbook.ESTIMATOR_DRIFT not in world.runbooks()
    world.hear(Settled(request(), "a", 1, 200, Usage(30, 10), 0.0))
    notice = next(one for one in world.told()["notices"] if one["runbook"] == Runbook.ESTIMATOR_DRIFT)
    assert notice["text"] == "prompts are estimated at 200% of what upstreams report"
    world.hear(*(Settled(request(), "a", 1, 200, Usage(60, 10), 0.0) for _ in range(40)))
    assert Runbook.ESTIMATOR_DRIFT not in world.runbooks()


def test_engines_that_are_full(world: World) -> None:
    """That is how it is meant to be, but good to know."""
    world.policy = replace(world.policy, upstreams={"a": upstream("a"), "b": upstream("b", kv=KvRules())})
    world.counters["upstream/b/kv"] = {"fill": 0.9, "saturation": 1.1}
    assert world.runbooks() == [Runbook.KV_SATURATED]
    world.counters["upstream/b/kv"] = {"fill": 0.5, "saturation": 0.6}
    assert world.runbooks() == []


def test_levers_that_are_pulled(world: World) -> None:
    """Which, and for how long yet; bypass before all others."""
    world.levers(
        bypass={"until": 10_060.0},
        draining=True,
        lanes={"P0": {"paused": True, "until": None}, "P1": {"paused": False, "until": None}},
        upstreams={"a": {"out": True, "until": 10_005.0}, "b": {"out": False, "until": None}},
        changes=[{"id": "c", "place": "tenants.t.tpm", "value": 5, "was": 3, "until": 10_030.0}],
    )
    told = world.told()
    assert told["status"] == "draining"
    assert [one["text"] for one in told["notices"]] == [
        "bypass: everybody is let go at once, no limit is kept, for another 60.0 s",
        "draining: nobody is let in any more",
        "lane P0 is paused by an operator, until it is undone",
        "a was taken out by an operator, for another 5.0 s",
        "tenants.t.tpm is 5 instead of 3, for another 30.0 s",
    ]
    assert told["levers"]["bypass"] == {"until": 10_060.0}


def test_budgets_and_rates_that_are_nearly_used(world: World) -> None:
    """Dollars, and tokens a minute, at nine tenths."""
    world.counters["tenant/chat/usd_day"] = {"spent": 4.6, "budget": 5.0}
    world.counters["tenant/etl/usd_day"] = {"spent": 9.0, "budget": 5.0, "shadow": True}
    (notice,) = world.told()["notices"]
    assert notice["text"] == "92% used of dollars a day of tenant chat ($5.00)"
    assert notice["runbook"] == Runbook.BUDGET
    del world.counters["tenant/chat/usd_day"]
    world.hear(Settled(request(), "a", 1, 200, Usage(900, 100), 1.0))
    world.pass_by(10)
    (notice,) = world.told()["notices"]
    assert (notice["text"], notice["runbook"]) == ("a is at 100% of its tokens a minute", Runbook.NEAR_LIMIT)


def test_the_config_and_the_loop(world: World) -> None:
    """A refused file, changes that wait, a loop that is late."""
    world.config |= {"problems": ["lanes.P0: is wrong"], "waiting": [{"change": "gateway.port: 1 -> 2", "needs": "x"}]}
    world.more["process"] = {"loop_lag_s": 0.5}
    assert [one["level"] for one in world.told()["notices"]] == ["warning", "warning", "info"]
    assert world.runbooks() == [Runbook.CONFIG, Runbook.NO_TIME, Runbook.CONFIG]


def test_many_of_a_kind_are_a_few_and_a_number(world: World) -> None:
    """A page of notices is read by nobody."""
    names = [f"u{i}" for i in range(30)]
    world.policy = replace(world.policy, upstreams={name: upstream(name) for name in names}, routes=())
    world.breakers = {name: {"state": "open", "sign": "failures"} for name in names}
    told = [one["text"] for one in world.told()["notices"]]
    assert len(told) == 6
    assert told[-1] == "and 25 more like these"


def test_tenants_tell_how_many_of_them_wait(world: World) -> None:
    """Where somebody keeps who uses most."""
    world.more["tenants"] = [{"name": "chat", "requests": 3}, {"name": "etl", "requests": 1}]
    assert [one["waiting"] for one in world.told()["tenants"]] == [62, 0]


def test_refusals_by_reason(world: World) -> None:
    """The most frequent first, with the newest ids."""
    world.hear(*(Refused(Reason.LANE_FULL, 503, "t", "P1", 0.0, f"r{i}") for i in range(3)))
    world.hear(Refused(Reason.UNKNOWN_MODEL, 404, request_id="q"))
    told = [(one["reason"], one["count_5m"], one["ids"]) for one in world.told()["refusals"]]
    assert told == [("lane_full", 3, ["r2", "r1", "r0"]), ("unknown_model", 1, ["q"])]


def test_hostile_names_stay_names(world: World) -> None:
    """They are passed on as they are, inside JSON."""
    bad = "<script>alert(1)</script>\n\x1b[31m"
    world.line(tenant=bad, tenants=2, model=bad * 50)
    world.hear(*(Refused(Reason.TENANT_QUOTA, 429, bad, "P1", 0.0, bad) for _ in range(2)))
    told = world.told()
    texts = [one[field] for one in told["binding"] for field in ("text", "help")]
    assert all(text.isprintable() and len(text) < 500 for text in texts)
    assert json.loads(json.dumps(told)) == told


def test_who_waits_has_waited_until_now(world: World) -> None:
    """Of others it is told how long they had waited when they were decided upon."""
    rows = [{"at": 9_990.0, "state": state, "waited_s": 1.0} for state in ("waiting", "served")]
    assert [one["waited_s"] for one in world.told(rows)["recent"]] == [10.0, 1.0]
    assert len(world.told(rows * 100)["recent"]) == 30


def test_when_the_next_goes(world: World) -> None:
    """In half a second is now; where nobody knows nothing is said."""
    world.line(next_s=0.3)
    assert world.binding()["text"].endswith("62 waiting, next now")
    world.lines[0]["next_s"] = None
    assert world.binding()["text"].endswith("62 waiting")
    world.lines[0]["key"] = ""
    assert world.told()["binding"] == [], "its turn is being looked for"


def test_sizes_that_are_kept_away(world: World) -> None:
    """Only prompts of these go elsewhere."""
    world.breakers["a"]["sizes_kept_away"] = ["4096-16384"]
    (notice,) = world.told()["notices"]
    assert notice["text"] == "a: prompts of 4096-16384 tokens are kept away from it"


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("upstream/a/*/total", Parts("upstream", "a", "total")),
        ("upstream/a/meta/llama/x/requests", Parts("upstream", "a", "requests", "meta/llama/x")),
        ("upstream/a/slots", Parts("upstream", "a", "slots")),
        ("tenant/a%2Fb/usd_day", Parts("tenant", "a/b", "usd_day")),
        ("session/t%2F1/s/tokens", Parts("session", "t/1", "tokens")),
        ("lane/P1/paused", Parts("lane", "P1", "paused")),
        ("other", Parts("other", "", "other")),
    ],
)
def test_keys_of_counters_are_taken_apart(key: str, parts: Parts) -> None:
    """Models may have slashes, and names of tenants are quoted."""
    assert parts_of(key) == parts
