"""How an admitted request leaves: whose priority each engine of its order gets, and who may stand behind the first."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from extproc import dialects
from extproc.breakers import Breakers
from extproc.core.breaker import Evidence, Outcome, Signal
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget
from extproc.core.capacity import Claim
from extproc.core.events import Why
from extproc.core.flight import Flight
from extproc.core.identity import Caller
from extproc.core.orders import cutter
from extproc.core.policy import (
    BreakerRules,
    Kind,
    KvRules,
    Lane,
    Limit,
    Policy,
    RetryRules,
    Route,
    Tenant,
    Upstream,
    WhenBusy,
)
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Dialect, Endpoint, Request, Size
from extproc.core.retries import RetryBudget
from extproc.core.routing import claims
from extproc.core.watermark import Reading, Watermark
from extproc.dispatch import Dispatch, Outlook, Timing
from extproc.ports import Departure, Head
from extproc.reception import Greeting
from extproc.settings import PROVIDERS
from extproc.shared.memory import MemoryCapacity
from extproc.turn import Wants
from extproc.wording import Wording
from tests.doubles import HandClock, Observer, request

BOTH = frozenset(Dialect)
LANES = {
    name: Lane(name, rank, 30.0, WhenBusy.SPILL, 1.0, 10, 10**6, 10**6) for rank, name in enumerate(("P0", "P1", "P2"))
}


def engine(name: str, provider: str, *, told: bool = True, **rules: Any) -> Upstream:
    sign = PROVIDERS[provider].priority_sign if told else None
    return Upstream(name=name, provider=provider, dialects=BOTH, engine_priority=sign, **rules)


class Gate:
    """Dispatch over some upstreams, in the order of their chain."""

    def __init__(
        self,
        *upstreams: Upstream,
        lanes: dict[str, Lane] = LANES,
        retries: RetryBudget | None = None,
        last_resort: str | None = None,
        unasked: bool = False,
        first_token_s: float | None = None,
        **more: Any,
    ) -> None:
        self.upstreams = {upstream.name: upstream for upstream in upstreams}
        self.clock = HandClock()
        counters: dict[str, Any] = {f"upstream/{name}/slots": Slots(inf) for name in self.upstreams}
        counters |= {f"upstream/{u.name}/kv": Watermark(u.kv) for u in upstreams if u.kv}
        self.capacity = MemoryCapacity(self.clock, counters)
        chain = tuple(self.upstreams)
        route = Route("0:m", ("m",), chain, last_resort=last_resort, unasked=unasked, first_token_s=first_token_s)
        policy = Policy(self.upstreams, (route,), lanes, {})
        wording = Wording(lambda _: 503, lambda: 0.5)
        self.unfit: set[str] = set()
        self.flights: list[Flight] = []
        timing = Timing(10, 5000, 60, 900)
        self.breakers = Breakers(upstreams, self.clock, Observer(), chance=lambda: 0.0)
        self.waits: dict[str, float] = {}
        self.forecasts: list[tuple[str, str]] = []
        outlook = Outlook(self.breakers.rest_s, self.breakers.earliest_probe, self._wait_s)
        health: tuple[Any, Any] = self.breakers.allows, (lambda name, _: name not in self.unfit)
        slow = self.breakers.slow
        self.dispatch = Dispatch(
            policy, self.capacity, self.clock, timing, wording, *health, retries, outlook=outlook, slow=slow, **more
        )

    def _wait_s(self, asked: Request, wants: Wants) -> float:
        [name] = wants.names
        self.forecasts.append((asked.lane, name))
        return self.waits.get(name, 0.0)

    def depart(
        self,
        body: bytes,
        lane: str = "P0",
        endpoint: Endpoint = Endpoint.CHAT,
        costless: str | None = None,
        **asks: Any,
    ) -> Departure:
        """Let a request with this body go to the first of the chain. costless: those that are, or None, as in Wants."""
        asked = request(lane=lane, endpoint=endpoint, **asks)
        names = tuple(self.upstreams)
        prices = {name: claims(upstream, "m", asked.size, endpoint) for name, upstream in self.upstreams.items()}
        free = None if costless is None else frozenset(costless)
        for name in self.upstreams if free is not None else ():
            prices[name] += () if name in free else (Claim(f"upstream/{name}/usd_day", 1.0),)
        wants, document = Wants(names, prices, costless=free), dialects.read(endpoint, body)
        self.flights.append(Flight(asked))
        return self.dispatch.depart(self.flights[-1], wants, names[0], greeting(endpoint, lane), document)

    def priorities(self, departure: Departure) -> list[Any]:
        """What each upstream of the order will read as `priority`."""
        body = departure.body
        assert body is not None
        heads = departure.heads or dict.fromkeys(departure.order, body[: departure.width].decode())
        bodies = [heads[name].encode() + body[departure.width :] for name in departure.order]
        return [json.loads(each).get("priority") for each in bodies]


def greeting(endpoint: Endpoint = Endpoint.CHAT, lane: str = "P0") -> Greeting:
    """What is known before a body is read."""
    caller = Caller(Tenant("default", ("P0",), "P0"), "")
    return Greeting(Head({}, bodiless=False), endpoint, caller, lane, "/v1/x", 1000.0, None)


BODY = b'{"model":"m","priority":-999,"messages":[{"role":"user","content":"hi"}]}'


@pytest.mark.parametrize(
    ("lane", "expected"), [("P0", [-200, 200, None]), ("P1", [-100, 100, None]), ("P2", [0, 0, None])]
)
def test_each_engine_of_an_order_gets_the_lanes_priority_in_its_own_sign(lane: str, expected: list[Any]) -> None:
    """In one body with a head for each; an engine that is not configured for it gets none, whatever the client said."""
    gate = Gate(engine("v", "vllm"), engine("s", "sglang"), engine("plain", "vllm", told=False))
    departure = gate.depart(BODY, lane)
    assert departure.order == ("v", "s", "plain")
    assert gate.priorities(departure) == expected


def test_a_client_cannot_rank_itself_before_an_engine_that_is_not_configured() -> None:
    """Its own priority is taken out, and nothing else."""
    gate = Gate(engine("v", "vllm", told=False))
    departure = gate.depart(BODY)
    assert json.loads(departure.body or b"") == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_a_provider_that_knows_no_priority_gets_the_clients_own_bytes() -> None:
    """Where nobody in the order could be an engine nothing is rewritten."""
    gate = Gate(engine("o", "openai", told=False), engine("a", "azure", told=False))
    assert gate.depart(BODY).body is None


def test_callers_of_anthropics_api_carry_no_priority() -> None:
    """No engine reads one there."""
    gate = Gate(engine("v", "vllm"))
    body = b'{"model":"m","max_tokens":5,"priority":-999,"messages":[{"role":"user","content":"hi"}]}'
    assert gate.priorities(gate.depart(body, endpoint=Endpoint.MESSAGES)) == [None]


def test_a_departure_says_what_may_make_its_answer_short() -> None:
    """The cap that the caller named for each choice, that it named words to stop at, and that it brought results."""
    gate = Gate(engine("v", "vllm"))
    assert not gate.depart(BODY).facts.keys() & {"cap", "stops", "results"}
    asked = {"capped": True, "stops": True, "results": True, "choices": 4, "size": Size(10, 4000)}
    facts = gate.depart(BODY, **asked).facts
    assert (facts["cap"], facts["stops"], facts["results"]) == (1000.0, 1.0, 1.0)


def test_an_order_ends_before_an_engine_that_is_full_for_the_lane() -> None:
    """A failover takes on its lane's terms: what P0 may still use is not there for P2."""
    rules = KvRules(high=0.9, low=0.8, lanes={"P2": (0.7, 0.6)})
    gate = Gate(engine("o", "openai", told=False), engine("v", "vllm", kv=rules))
    watermark = gate.capacity.levels()["upstream/v/kv"]
    assert isinstance(watermark, Watermark)
    watermark.observe(Reading(0.75, running=3.0, tokens=100_000.0), gate.clock.time())
    assert gate.depart(BODY, "P0").order == ("o", "v")
    assert gate.depart(BODY, "P2").order == ("o",)


def test_who_is_merely_slow_stands_behind_all_others() -> None:
    """A late answer is better than none; one that is sick is not asked."""
    gate = Gate(*(engine(name, "openai", told=False) for name in "abcd"))
    for n in range(320):
        late = Evidence(prompt=10, first_token_s=2.0 if n < 300 else 20.0)
        gate.breakers.record("b", Outcome.SUCCESS, began=gate.clock.now, cause="", evidence=late)
    for _ in range(3):
        gate.breakers.record("c", Outcome.FAILURE, began=gate.clock.now, cause="")
    assert gate.depart(BODY).order == ("a", "d", "b")


def test_an_order_that_envoy_cannot_be_told_is_cut() -> None:
    """What it leaves for is what Envoy is told: books, names and models are of these alone."""
    gate = Gate(*(engine(name, "openai", told=False) for name in "abcd"), cut=cutter(["ab"]))
    departure = gate.depart(BODY)
    assert departure.order == ("a", "b")
    assert gate.flights[-1].order == ("a", "b")
    assert set(departure.heads or ()) <= {"a", "b"}


def test_a_failover_may_use_what_its_lane_keeps_free() -> None:
    """It has been let go already, and would fail otherwise; but it never goes where there is not enough for it."""
    limit = Limit("*", Kind.TOTAL, 6000.0, 1000.0)
    lanes = {"P2": replace(LANES["P2"], rank=0, keep_free=0.3)}
    gate = Gate(engine("a", "openai", told=False), engine("b", "openai", told=False, limits=(limit,)), lanes=lanes)
    for level, order in [(250.0, ("a", "b")), (1.0, ("a",))]:
        gate.capacity.levels()["upstream/b/*/total"] = TokenBucket(100.0, 1000.0, level, gate.clock.time())
        assert gate.depart(BODY, "P2").order == order


def test_every_provider_with_a_priority_is_known_to_have_one() -> None:
    """Or a client's own would slip through to it."""
    upstreams = {name: engine(name, name, told=False) for name, known in PROVIDERS.items() if known.priority_sign}
    for name, upstream in upstreams.items():
        assert Gate(upstream).priorities(Gate(upstream).depart(BODY)) == [None], name


@pytest.mark.parametrize(
    ("left", "costless", "order"),
    [
        ({"a": 0, "b": 5}, "z", "abz"),
        ({"a": 5, "b": 5}, "z", "abz"),
        ({"a": 5, "b": 0}, "z", "az"),
        ({"b": 0}, "", "a"),
        ({"b": 0}, None, "abz"),
    ],
)
def test_a_failover_goes_nowhere_that_its_dollars_do_not_allow(
    left: dict[str, float], costless: str | None, order: str
) -> None:
    """What its first choice costs is taken already, so that being spent by it is no matter; of those behind it, none
    that is spent, nor any paid one behind that.
    """
    gate = Gate(*(engine(name, "vllm") for name in "abz"))
    store = gate.capacity.levels()
    for name, dollars in left.items():
        store[f"upstream/{name}/usd_day"] = Budget(9.0, used=9.0 - dollars)
    assert gate.depart(BODY, costless=costless).order == tuple(order)


def test_who_answers_such_prompts_badly_is_asked_last() -> None:
    """It may answer this one, and nobody would otherwise. Who was granted stays the first."""
    gate = Gate(*(engine(name, "vllm") for name in "abc"))
    gate.unfit = {"a", "b"}
    assert gate.depart(BODY).order == ("a", "c", "b")


def test_empty_answers_take_nobody_out_of_a_failover() -> None:
    """A caller may have asked for them: whoever has nobody else is served all the same."""
    gate = Gate(engine("a", "vllm"), engine("b", "vllm"))
    gate.dispatch._fits = gate.breakers.fits
    for i in range(5):
        evidence = Evidence(f"r{i}", 60, malformed=True, model="m", hollow=True)
        gate.breakers.record("b", Outcome.FAILURE, began=gate.clock.now, cause="empty", evidence=evidence)
    assert not gate.breakers.fits("b", 60)
    assert gate.depart(BODY).order == ("a", "b")


def test_an_only_upstream_gets_a_second_attempt_while_the_budget_lasts() -> None:
    """Not where others stand behind it, nor for uploads, which the router does not keep; and each attempt of a stream
    gets its part of the deadline.
    """
    rules = RetryRules(share=0.0, least_per_s=0.1)
    both = Gate(engine("a", "openai"), engine("b", "openai"), retries=RetryBudget(rules))
    assert not both.depart(BODY).again
    alone = Gate(engine("a", "openai"), retries=RetryBudget(rules))
    assert not alone.depart(b"{}", endpoint=Endpoint.OTHER).again
    departure = alone.depart(BODY, stream=True, deadline=alone.clock.time() + 8.0)
    assert (departure.again, departure.per_try_s) == (True, 4.0)
    departure = alone.depart(BODY, stream=True, deadline=alone.clock.time() + 8.0)
    assert (departure.again, departure.per_try_s) == (False, 8.0)
    assert [flight.lent for flight in alone.flights[-2:]] == [alone.clock.time(), None]
    assert not Gate(engine("a", "openai")).depart(BODY).again


@pytest.mark.parametrize(
    ("route_s", "patience_s", "per_try_s", "stalls"),
    [
        (None, None, 11.0, True),
        (25.0, None, 26.0, True),
        (29.0, None, 30.0, True),
        (29.5, None, 30.5, False),
        (90.0, None, 91.0, False),
        (90.0, 100.0, 50.0, False),
        (90.0, 40.0, 20.0, True),
        (2.0, 100.0, 3.0, True),
    ],
)
def test_a_route_has_its_own_time_for_a_first_token(
    route_s: float | None,
    patience_s: float | None,
    per_try_s: float,
    stalls: bool,  # noqa: FBT001
) -> None:
    """And the time to read the prompt besides, as everywhere; a caller's deadline shortens it. First tokens that may
    take longer than a stall all together are not ended as one.
    """
    gate = Gate(engine("a", "openai"), engine("b", "openai"), first_token_s=route_s)
    deadline = None if patience_s is None else gate.clock.time() + patience_s
    departure = gate.depart(BODY, stream=True, size=Size(5000, 40), deadline=deadline)
    assert (departure.per_try_s, departure.stream) == (per_try_s, stalls)


def test_a_routes_time_for_a_first_token_is_of_streams_only() -> None:
    """A JSON answer sends its first byte when it is complete."""
    departure = Gate(engine("a", "openai"), first_token_s=2.0).depart(BODY, stream=False)
    assert (departure.per_try_s, departure.total_s) == (900, 900)


def test_a_last_resort_stands_in_for_the_error() -> None:
    """Where the route has one and the API answers with text."""
    gate = Gate(engine("a", "openai"), last_resort="Sorry.")
    assert gate.depart(BODY).last_resort == "json"
    departure = gate.depart(BODY.replace(b"{", b'{"stream":true,', 1))
    assert departure.last_resort == "events"
    assert '"content": "Sorry."' in departure.fail_body
    for other in (gate.depart(BODY, endpoint=Endpoint.COUNT_TOKENS), Gate(engine("a", "openai")).depart(BODY)):
        assert (other.last_resort, "upstream_failed" in other.fail_body) == ("", True)


@pytest.mark.parametrize("unasked", [False, True])
def test_a_last_resort_stands_in_for_a_refusal_only_where_the_route_says_so(*, unasked: bool) -> None:
    """And only where nobody may be asked: who is over its quota, say, is told."""
    gate = Gate(engine("a", "openai"), last_resort="Sorry.", unasked=unasked)
    document = dialects.read(Endpoint.CHAT, BODY)
    instead = gate.dispatch.instead(Rejected(Reason.NO_UPSTREAM), greeting(), document)
    assert (instead is not None) == unasked
    if instead is not None:
        assert dict(instead[0]) == {"content-type": "application/json", "x-tidegate-last-resort": "true"}
        assert json.loads(instead[1])["choices"][0]["message"]["content"] == "Sorry."
    assert gate.dispatch.instead(Rejected(Reason.TENANT_QUOTA), greeting(), document) is None
    assert gate.dispatch.instead(Rejected(Reason.NO_UPSTREAM), greeting(), None) is None


def resting(name: str, cool_down_s: float) -> Upstream:
    """An upstream that rests so long, the first time."""
    return engine(name, "openai", breaker=BreakerRules(cool_down_s=cool_down_s, cool_down_max_s=100.0))


def fill(gate: Gate, *names: str) -> None:
    """No more goes there."""
    for name in names:
        gate.capacity.levels()[f"upstream/{name}/slots"] = Slots(1, used=1.0)


@pytest.mark.parametrize(("rests", "told"), [((7.0, 3.2), 4), ((3.0, 7.0), 3), ((0.2, 50.0), 1)])
def test_an_exhausted_chain_is_to_be_asked_again_when_the_first_of_it_has_rested(
    rests: tuple[float, ...], told: int
) -> None:
    """Whichever that is, in whole seconds and at least one; the body says what the header does."""
    departure = Gate(*map(resting, "ab", rests)).depart(BODY)
    assert departure.order == ("a", "b")
    assert departure.fail_retry_s == told
    assert f" {told} s" in departure.fail_body


def test_an_upstream_that_opens_again_and_again_rests_longer() -> None:
    """As it would if it opened now; a success makes that short again."""
    gate = Gate(resting("a", 5.0))
    for signal in (Signal.TRIP, Signal.RESTED, Signal.PROBE_FAILED, Signal.RESTED, Signal.PROBE_OK, Signal.RAMPED):
        gate.breakers.signal("a", signal, "test")
    assert gate.depart(BODY).fail_retry_s == 20
    gate.breakers.record("a", Outcome.SUCCESS, began=gate.clock.now, cause="")
    assert gate.depart(BODY).fail_retry_s == 5


def test_an_upstream_that_rests_already_may_be_the_first_to_be_tried() -> None:
    """What is left of its rest counts; while it is tried, or traffic returns, it may be soon."""
    gate = Gate(resting("a", 50.0), resting("b", 8.0))
    gate.breakers.signal("b", Signal.TRIP, "test")
    gate.clock.now += 4.5
    departure = gate.depart(BODY)
    assert (departure.order, departure.fail_retry_s) == (("a",), 4)
    gate.clock.now += 5
    assert gate.depart(BODY).fail_retry_s == 1
    gate.breakers.signal("b", Signal.RESTED, "test")
    assert gate.depart(BODY).fail_retry_s == 1


def test_an_upstream_that_serves_whatever_its_breaker_says_may_be_tried_when_it_has_rested() -> None:
    """One that is owned is asked while it rests; that it fails then does not lengthen its rest."""
    gate = Gate(resting("a", 8.0))
    gate.breakers.signal("a", Signal.TRIP, "test")
    gate.clock.now += 3
    assert gate.depart(BODY).fail_retry_s == 5


@pytest.mark.parametrize(
    ("waits", "told"), [((12.5, 40.0), 13), ((40.0, 12.0), 12), ((40.0, 0.0), 1), ((inf, 60.0), 50)]
)
def test_upstreams_that_are_full_may_be_asked_after_the_wait_that_is_forecast(
    waits: tuple[float, float], told: int
) -> None:
    """And those that stand behind a full one; unless the ones that were asked have rested before."""
    gate = Gate(*map(resting, "abc", (50.0, 1.0, 1.0)))
    fill(gate, "b")
    gate.waits = dict(zip("bc", waits, strict=True))
    departure = gate.depart(BODY)
    assert (departure.order, departure.fail_retry_s) == (("a",), told)


def test_a_wait_is_forecast_once_a_second_for_a_whole_lane() -> None:
    """Meanwhile it grows shorter by itself."""
    gate = Gate(*map(resting, "ab", (50.0, 1.0)))
    fill(gate, "b")
    gate.waits = {"b": 12.2}
    told = []
    for lane, later in (("P0", 0.0), ("P0", 0.5), ("P1", 0.0), ("P0", 0.5)):
        gate.clock.now += later
        told.append(gate.depart(BODY, lane).fail_retry_s)
    assert told == [13, 12, 13, 13]
    assert gate.forecasts == [("P0", "b"), ("P1", "b"), ("P0", "b")]


def test_an_upstream_that_it_must_not_go_to_is_none_to_wait_for() -> None:
    """Its dollars are spent. One that answers such prompts badly is the last to go to, and counts."""
    gate = Gate(*map(resting, "abc", (50.0, 9.0, 1.0)))
    gate.unfit = {"b"}
    gate.capacity.levels()["upstream/c/usd_day"] = Budget(9.0, used=9.0)
    departure = gate.depart(BODY, costless="ab")
    assert (departure.order, departure.fail_retry_s) == (("a", "b"), 9)
    gate.capacity.levels()["upstream/b/usd_day"] = Budget(9.0, used=9.0)
    departure = gate.depart(BODY, costless="a")
    assert (departure.order, departure.fail_retry_s) == (("a",), 50)


def why_not(gate: Gate, order: str, costless: str | None = None, **asks: Any) -> dict[str, tuple[Any, ...]]:
    """Of each upstream that was passed over, why, for want of what, and whether it stands behind."""
    asked = request(lane="P0", route="0:m", **asks)
    prices = {name: claims(upstream, "m", asked.size, Endpoint.CHAT) for name, upstream in gate.upstreams.items()}
    for name in gate.upstreams if costless is not None else ():
        prices[name] += () if name in costless else (Claim(f"upstream/{name}/usd_day", 1.0),)
    wants = Wants(tuple(gate.upstreams), prices, costless=None if costless is None else frozenset(costless))
    found = gate.dispatch.passed_over(asked, wants, tuple(order))
    return {one.upstream: (one.why, one.keys, one.behind) for one in found}


def test_why_others_were_passed_over_is_told_as_it_was_at_that_moment() -> None:
    """For want of room; because one before it had none; because it answers such prompts badly; and who had room by
    then. Nothing is told where the whole chain stands in its order.
    """
    gate = Gate(*(engine(name, "vllm", told=False) for name in "abcd"))
    levels = gate.capacity.levels()
    assert why_not(gate, "abcd") == {}
    levels["upstream/c/slots"] = Slots(1, used=1)
    full = (Why.NO_ROOM, ("upstream/c/slots",), False)
    assert why_not(gate, "ab") == {"c": full, "d": (Why.BEHIND, (), False)}
    gate.unfit = {"a"}
    assert why_not(gate, "bd") == {"a": (Why.SIZES, (), False), "c": full}
    assert why_not(gate, "bda") == {"a": (Why.SIZES, (), True), "c": full}
    gate.unfit = set()
    assert why_not(gate, "bd") == {"a": (Why.BUSY, (), False), "c": full}
    assert why_not(gate, "") == dict.fromkeys("abd", (Why.TURN, (), False)) | {"c": full}
    gate.breakers.trip("b", "sick")
    assert why_not(gate, "a")["b"] == (Why.BREAKER, (), False)
    levels["upstream/d/usd_day"] = Budget(0.5)
    assert why_not(gate, "a", costless="abc")["d"] == (Why.DOLLARS, ("upstream/d/usd_day",), False)


def test_who_holds_for_its_first_choice_is_told_so() -> None:
    """Others have room, but its lane does not look at them; the first choice is the first that lets anybody through."""
    lanes = {"P0": Lane("P0", 0, 30.0, WhenBusy.HOLD, 1.0, 10, 10**6, 10**6)}
    gate = Gate(*(engine(name, "vllm", told=False) for name in "abc"), lanes=lanes)
    gate.capacity.levels()["upstream/a/slots"] = Slots(1, used=1)
    full = (Why.NO_ROOM, ("upstream/a/slots",), False)
    assert why_not(gate, "") == {"a": full} | dict.fromkeys("bc", (Why.HOLD, (), False))
    gate.breakers.trip("a", "sick")
    assert [why_not(gate, "")[name][0] for name in "abc"] == [Why.BREAKER, Why.TURN, Why.HOLD]


def test_an_order_that_envoy_was_not_told_is_why_others_do_not_stand_in_it() -> None:
    """Where nobody lacks room."""
    gate = Gate(*(engine(name, "vllm", told=False) for name in "abc"), cut=lambda order: order[:1])
    assert why_not(gate, "a") == {"b": (Why.ORDER, (), False), "c": (Why.ORDER, (), False)}
    gate.capacity.levels()["upstream/b/slots"] = Slots(1, used=1)
    assert why_not(gate, "a")["c"] == (Why.BEHIND, (), False)
