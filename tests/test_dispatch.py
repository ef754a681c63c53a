"""How an admitted request leaves: whose priority each engine of its order gets, and who may stand behind the first."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from extproc import dialects
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget
from extproc.core.capacity import Claim
from extproc.core.flight import Flight
from extproc.core.identity import Caller
from extproc.core.policy import Kind, KvRules, Lane, Limit, Policy, Route, Tenant, Upstream, WhenBusy
from extproc.core.request import Dialect, Endpoint
from extproc.core.routing import claims
from extproc.core.watermark import Reading, Watermark
from extproc.dispatch import Dispatch, Timing
from extproc.limiter import Wants
from extproc.ports import Departure, Head
from extproc.reception import Greeting
from extproc.settings import PROVIDERS
from extproc.shared.memory import MemoryCapacity
from extproc.wording import Wording
from tests.doubles import HandClock, request

BOTH = frozenset(Dialect)
LANES = {
    name: Lane(name, rank, 30.0, WhenBusy.SPILL, 1.0, 10, 10**6, 10**6) for rank, name in enumerate(("P0", "P1", "P2"))
}


def engine(name: str, provider: str, *, told: bool = True, **rules: Any) -> Upstream:
    sign = PROVIDERS[provider].priority_sign if told else None
    return Upstream(name=name, provider=provider, dialects=BOTH, engine_priority=sign, **rules)


class Gate:
    """Dispatch over some upstreams, in the order of their chain."""

    def __init__(self, *upstreams: Upstream, lanes: dict[str, Lane] = LANES) -> None:
        self.upstreams = {upstream.name: upstream for upstream in upstreams}
        self.clock = HandClock()
        counters: dict[str, Any] = {f"upstream/{name}/slots": Slots(inf) for name in self.upstreams}
        counters |= {f"upstream/{u.name}/kv": Watermark(u.kv) for u in upstreams if u.kv}
        self.capacity = MemoryCapacity(self.clock, counters)
        policy = Policy(self.upstreams, (Route("0:m", ("m",), tuple(self.upstreams)),), lanes, {})
        wording = Wording(lambda _: 503, lambda: 0.5)
        self.unfit: set[str] = set()
        timing = Timing(10, 5000, 60, 900)
        self._dispatch = Dispatch(
            policy, self.capacity, self.clock, timing, wording, lambda _: True, lambda name, _: name not in self.unfit
        )

    def depart(
        self, body: bytes, lane: str = "P0", endpoint: Endpoint = Endpoint.CHAT, costless: str | None = None
    ) -> Departure:
        """Let a request with this body go to the first of the chain. costless: those that are, or None, as in Wants."""
        asked = request(lane=lane, endpoint=endpoint)
        names = tuple(self.upstreams)
        prices = {name: claims(upstream, "m", asked.size, endpoint) for name, upstream in self.upstreams.items()}
        free = None if costless is None else frozenset(costless)
        for name in self.upstreams if free is not None else ():
            prices[name] += () if name in free else (Claim(f"upstream/{name}/usd_day", 1.0),)
        tenant = Tenant("default", ("P0",), "P0")
        greeting = Greeting(Head({}, bodiless=False), endpoint, Caller(tenant, ""), lane, "/v1/x", 1000.0, None)
        document = dialects.read(endpoint, body)
        return self._dispatch.depart(Flight(asked), Wants(names, prices, costless=free), names[0], greeting, document)

    def priorities(self, departure: Departure) -> list[Any]:
        """What each upstream of the order will read as `priority`."""
        body = departure.body
        assert body is not None
        heads = departure.heads or dict.fromkeys(departure.order, body[: departure.width].decode())
        bodies = [heads[name].encode() + body[departure.width :] for name in departure.order]
        return [json.loads(each).get("priority") for each in bodies]


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


def test_an_order_ends_before_an_engine_that_is_full_for_the_lane() -> None:
    """A failover takes on its lane's terms: what P0 may still use is not there for P2."""
    rules = KvRules(high=0.9, low=0.8, lanes={"P2": (0.7, 0.6)})
    gate = Gate(engine("o", "openai", told=False), engine("v", "vllm", kv=rules))
    watermark = gate.capacity.levels()["upstream/v/kv"]
    assert isinstance(watermark, Watermark)
    watermark.observe(Reading(0.75, running=3.0, tokens=100_000.0), gate.clock.time())
    assert gate.depart(BODY, "P0").order == ("o", "v")
    assert gate.depart(BODY, "P2").order == ("o",)


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


def test_a_failover_never_leads_to_who_answers_such_prompts_badly() -> None:
    """An answer that is none would not be tried anew. Who was granted stays the first."""
    gate = Gate(*(engine(name, "vllm") for name in "abc"))
    gate.unfit = {"a", "b"}
    assert gate.depart(BODY).order == ("a", "c")
