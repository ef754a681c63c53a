"""From headers and body to a priced request: what is reserved, and how a request and its retries are told."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from extproc import dialects, tokens
from extproc.core.affinity import Affinity
from extproc.core.forecast import Pace
from extproc.core.identity import Directory
from extproc.core.outputs import ENOUGH, Outputs
from extproc.core.policy import KvRules, Policy, SessionLimits
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Request, Size
from extproc.core.retries import KEYED
from extproc.core.spend import PriceList
from extproc.ports import Head
from extproc.reception import Reception, SessionRules
from extproc.settings import parse
from extproc.turn import Wants
from tests.doubles import HandClock

CONFIG = """
upstreams:
  a: {provider: openai, limits: [{tpm: 20_000, rpm: 100}], concurrency: 10}
  pool: {provider: vllm, url: http://v:8000, owned: true, concurrency: 9}
routes:
  - {models: [m, n], chain: [a], acknowledge_unowned: true}
  - {models: [k], chain: [pool]}
  - {models: [gpt-5], chain: [a], acknowledge_unowned: true}
tenants:
  default: {lanes: [P1]}
  team: {lanes: [P0, P1], weight: 3, vip: true}
  small: {lanes: [P1], tpm: 1000}
identity: {tenant: "header:x-team"}
lanes:
  P0: {max_wait_s: 4}
  P1: {max_wait_s: 30}
"""
POLICY = parse(CONFIG, "test").policy()


class Desk:
    """A reception of which everything around can be seen. served: sessions that were served before."""

    def __init__(self, policy: Policy = POLICY, chance: float = 0.5) -> None:
        self.clock = HandClock()
        self.outputs = Outputs(policy.output_percentile, policy.default_output_tokens)
        self.served: set[tuple[str, str]] = set()
        self.executor = ThreadPoolExecutor(1)
        self.calibration = tokens.Calibration()
        self.price_list = PriceList(policy.upstreams)
        self.reception = Reception(
            policy,
            Directory(policy.tenants, ("header:x-team",), reject_unknown=False),
            self.calibration,
            Affinity(),
            Pace(),
            self.outputs,
            lambda tenant, session: (tenant, session) not in self.served,
            self.clock,
            process="p",
            sessions=SessionRules(("x-session",), 600.0),
            executor=self.executor,
            chance=lambda: chance,
            rates=lambda names, model: self.price_list.rates(names, model, 0.0),
        )

    def priced(self, body: Any = None, path: str = "/v1/chat/completions", **headers: str) -> tuple[Request, Wants]:
        """What becomes of a body (None: there is none, of an endpoint that nobody reads)."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        greeting = self.reception.greet(Head({":method": "POST", ":path": path, **named}, bodiless=body is None))
        if body is None:
            return asyncio.run(self.reception.price(greeting, None))
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return asyncio.run(self.reception.price(greeting, dialects.read(greeting.endpoint, data)))

    def request(self, body: Any = None, **headers: str) -> Request:
        """The request alone."""
        return self.priced(body, **headers)[0]

    def learn(self, tokens: int, tenant: str = "default", *, capped: bool = False) -> None:
        """Enough answers of this length."""
        for _ in range(ENOUGH):
            self.outputs.learn(tenant, "m", tokens, capped=capped)


@pytest.fixture
def desk() -> Iterator[Desk]:
    """A reception under the usual rules."""
    made = Desk()
    yield made
    made.executor.shutdown()


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


# What is reserved.


def test_what_others_taught_makes_no_prompt_too_large_for_its_tenant(desk: Desk) -> None:
    """Where its own count is within what the tenant may use in a minute, it holds; elsewhere what was learned does."""
    for _ in range(10):
        desk.calibration.learn(("gpt-5", "gpt-5"), 1000, 2500)
    asked = {**chat("word " * 600), "model": "gpt-5"}
    small, default = desk.request(asked, x_team="small"), desk.request(asked)
    assert small.size.input == small.counted == default.counted < 1000
    assert small.size.total <= 1000
    assert default.size.input == ceil(2.5 * default.counted)


def test_without_a_cap_the_usual_answer_is_reserved(desk: Desk) -> None:
    """The prior first, then what the tenant's answers really are, times the choices."""
    assert desk.request(chat()).size.output == 512
    desk.learn(900)
    assert desk.request(chat()).size.output == 900
    assert desk.request(chat(n=3)).size.output == 2700
    assert (desk.request(chat(n=3)).choices, desk.request(chat(n=3)).capped) == (3, False)


def test_a_cap_is_reserved_whole(desk: Desk) -> None:
    """A provider charges for it, whatever is usual."""
    desk.learn(900)
    request = desk.request(chat(max_tokens=4000))
    assert (request.size.output, request.capped) == (4000, True)


def test_words_that_end_an_answer_are_kept_in_mind(desk: Desk) -> None:
    """Since it may then be empty."""
    assert [desk.request(chat(**more)).stops for more in ({}, {"stop": "x"})] == [False, True]


def test_what_tools_answered_is_kept_in_mind() -> None:
    """Since the answer may then be empty."""
    desk = Desk(parse(CONFIG.replace("provider: openai", "provider: anthropic"), "test").policy())
    told = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "4"}]}]
    requests = [desk.priced(body, "/v1/messages")[0] for body in (chat(messages=told), chat())]
    desk.executor.shutdown()
    assert [request.results for request in requests] == [True, False]


def test_what_is_usual_never_makes_a_request_too_large(desk: Desk) -> None:
    """A small limit of the upstream or of the tenant is no reason to refuse who named no cap: it reserves less."""
    desk.learn(1_000_000)
    request = desk.request(chat())
    assert 0 < request.size.total <= 20_000
    desk.learn(1_000_000, "small")
    request = desk.request(chat(), x_team="small")
    assert 0 < request.size.total <= 1000
    with pytest.raises(Rejected) as refusal:
        desk.request(chat("word " * 30_000))
    assert refusal.value.reason is Reason.TOO_LARGE


def test_who_cannot_serve_it_is_no_reason_to_reserve_more_than_others_hold() -> None:
    """A wide upstream that lacks what it needs, or speaks another API, does not make it too large for a narrow one."""
    rules = CONFIG.replace("chain: [a]", "chain: [wide, narrow]").replace(
        "upstreams:",
        """upstreams:
  wide: {provider: vllm, url: http://v:8000, concurrency: 9, lacks: [json]}
  narrow: {provider: vllm, url: http://v:8000, concurrency: 9, window: 300, dialects: [openai, anthropic]}""",
    )
    desk = Desk(parse(rules, "test").policy())
    request, wants = desk.priced(chat(response_format={"type": "json_object"}))
    assert (wants.names, request.size.total) == (("narrow",), 300)
    request, wants = desk.priced(chat(), path="/v1/messages")
    assert (wants.names, request.size.total) == (("narrow",), 300)
    assert desk.priced(chat())[1].names == ("wide",)


def test_a_small_limit_serves_small_requests_from_the_start() -> None:
    """Before anything is learned, a limit below the prior refuses nobody."""
    desk = Desk(parse(CONFIG.replace("20_000", "300"), "test").policy())
    size = desk.request(chat()).size
    assert size.input < 20
    assert 250 < size.total <= 300
    desk.executor.shutdown()


def test_what_is_not_generated_is_not_reserved(desk: Desk) -> None:
    """Embeddings have no output, and endpoints that nobody reads have no tokens."""
    desk.learn(900)
    assert desk.request({"model": "m", "input": "hello"}, path="/v1/embeddings").size.output == 0


def test_room_in_a_cache_is_claimed_for_what_will_probably_run() -> None:
    """The cap where it is less, else what answers usually are; a provider's limits are charged for the cap."""
    pool = replace(POLICY.upstreams["pool"], kv=KvRules(tokens=100_000))
    desk = Desk(replace(POLICY, upstreams={**POLICY.upstreams, "pool": pool}))
    for _ in range(ENOUGH):
        desk.outputs.learn("default", "k", 700, capped=True)
    for cap, expected in ((4000, 700), (50, 50)):
        request, wants = desk.priced(chat(max_tokens=cap) | {"model": "k"})
        [room] = [claim.amount for claim in wants.prices["pool"] if claim.key == "upstream/pool/kv"]
        assert room == request.size.input + expected
        assert request.size.output == cap
    desk.executor.shutdown()


# How a request is told.


def test_a_retry_has_the_fingerprint_of_the_first(desk: Desk) -> None:
    """The same bytes from the same caller; the SDK's retry count is read, and changes nothing else."""
    first = desk.request(chat(), authorization="Bearer a", x_stainless_retry_count="0")
    again = desk.request(chat(), authorization="Bearer a", x_stainless_retry_count="2", x_request_id="other")
    assert first.fingerprint == again.fingerprint != ""
    assert (first.retries, again.retries) == (0, 2)
    assert first.ticket != again.ticket


def test_other_requests_have_other_fingerprints(desk: Desk) -> None:
    """Another tenant, key, path or body: another request."""
    body = chat()
    prints = [
        desk.request(body).fingerprint,
        desk.request(chat("ho")).fingerprint,
        desk.request(json.dumps(body, separators=(",", ":")).encode()).fingerprint,
        desk.request(body, x_team="team").fingerprint,
        desk.request(body, authorization="Bearer a").fingerprint,
        desk.request(body, authorization="Bearer b").fingerprint,
        desk.request(body, path="/v1/chat/completions?a=1").fingerprint,
    ]
    assert len(set(prints)) == len(prints)
    assert not any(each.startswith(KEYED) for each in prints)


def test_a_request_that_its_client_named_is_told_by_its_name(desk: Desk) -> None:
    """Whatever its body is; a name belongs to who gave it. An empty one is none."""
    named = [desk.request(chat(text), idempotency_key="n-1").fingerprint for text in ("hi", "ho")]
    assert named[0] == named[1]
    assert named[0].startswith(KEYED)
    others = [
        desk.request(chat(), idempotency_key="n-2"),
        desk.request(chat(), idempotency_key="n-1", x_team="team"),
        desk.request(chat(), idempotency_key="n-1", authorization="Bearer a"),
        desk.request(chat(), idempotency_key=""),
        desk.request(chat(), idempotency_key="n-1" * 20_000),
    ]
    prints = {named[0], *(each.fingerprint for each in others)}
    assert len(prints) == 6
    assert all(len(each) < 30 for each in prints)


def test_what_has_no_body_cannot_be_told(desk: Desk) -> None:
    """An upload that is not read, unless its client named it."""
    policy = replace(POLICY, other=replace(POLICY.routes[0], name="other", models=("*",)))
    desk = Desk(policy)
    assert desk.request(path="/v1/files").fingerprint == ""
    assert desk.request(path="/v1/files", idempotency_key="n").fingerprint.startswith(KEYED)
    desk.executor.shutdown()


# What else is known of it.


def test_a_request_has_its_tenants_standing(desk: Desk) -> None:
    """Weight and rank in its lane."""
    usual, vip = desk.request(chat()), desk.request(chat(), x_team="team")
    assert (usual.weight, usual.vip) == (1.0, False)
    assert (vip.weight, vip.vip) == (3.0, True)


def test_a_session_is_fresh_until_it_was_served(desk: Desk) -> None:
    """One that its client named. Who names none has no session that could be new."""
    desk.served.add(("default", "old"))
    assert desk.request(chat(), x_session="new").fresh
    assert not desk.request(chat(), x_session="old").fresh
    assert desk.request(chat(), x_session="old", x_team="team").fresh
    assert not desk.request(chat()).fresh


def test_where_unnamed_sessions_count_they_can_be_fresh() -> None:
    """They are remembered then."""
    desk = Desk(replace(POLICY, sessions=SessionLimits(max_tokens=10, derived=True)))
    assert desk.request(chat()).fresh
    desk.executor.shutdown()


def test_a_share_of_a_route_is_observed() -> None:
    """The same for every copy of a request; by chance where there is no body to go by."""
    route = replace(POLICY.routes[0], observe=0.3)
    desk = Desk(replace(POLICY, routes=(route, *POLICY.routes[1:]), other=replace(route, name="other")), chance=0.2)
    bodies = [chat(f"{random.random()}") for _ in range(400)]
    observed = [desk.request(body).observed for body in bodies]
    assert 0.2 < sum(observed) / len(observed) < 0.4
    assert [desk.request(body, x_stainless_retry_count="1").observed for body in bodies] == observed
    assert desk.request(path="/v1/files").observed
    desk.executor.shutdown()


def test_what_is_only_observed_is_told_to_be_too_large_and_goes() -> None:
    """To all that speak its dialect, for what it really is; nothing else is too large."""
    desk = Desk(replace(POLICY, routes=(replace(POLICY.routes[0], observe=1.0),)))
    request, wants = desk.priced(chat("word " * 30_000))
    assert (wants.names, wants.too_large) == (("a",), True)
    assert any(claim.amount == request.size.total > 20_000 for claim in wants.prices["a"])
    assert not desk.priced(chat())[1].too_large
    with pytest.raises(Rejected) as refusal:
        desk.priced(chat(max_tokens=5), path="/v1/messages")
    assert refusal.value.reason is Reason.NO_UPSTREAM
    desk.executor.shutdown()


DIGITS = "0123456789" * 30
"""A hundred tokens to GPT, three hundred to Qwen."""


@pytest.mark.parametrize(
    ("primary", "backup", "names"),
    [
        (300, 300, ("primary",)),
        (117, 318, ("primary", "backup")),
        (117, 317, ("primary",)),
        (116, 318, ("backup",)),
        (116, 317, None),
    ],
)
def test_each_upstream_is_held_against_its_own_tokenizer(
    primary: int, backup: int, names: tuple[str, ...] | None
) -> None:
    """The same prompt fits into a window here, and not into the same one there."""
    text = f"""
upstreams:
  primary: {{provider: openai, dialects: [openai], window: {primary}, limits: [{{tpm: 6000}}]}}
  backup:
    {{provider: vllm, url: "http://v:8000", limits: [{{tpm: 6000}}], window: {backup}, models: {{gpt-5: qwen3-32b}}}}
routes:
  - {{models: [gpt-5], chain: [primary, backup], acknowledge_unowned: true}}
"""
    desk = Desk(parse(text, "test").policy())
    body = chat(DIGITS, max_tokens=10) | {"model": "gpt-5"}
    if names is None:
        with pytest.raises(Rejected) as refusal:
            desk.priced(body)
        assert refusal.value.reason is Reason.TOO_LARGE
    else:
        request, wants = desk.priced(body)
        assert wants.names == names
        assert (request.size.input, request.size_at("primary").input, request.counted) == (107, 107, 107)
        assert request.size_at("backup") == Size(308, 10)
        total = {claim.key: claim.amount for price in wants.prices.values() for claim in price if "total" in claim.key}
        assert total == {f"upstream/{name}/*/total": {"primary": 117, "backup": 318}[name] for name in names}
    desk.executor.shutdown()


@pytest.mark.parametrize(("share", "observed"), [(0.0, False), (1.0, True)])
def test_none_or_all_of_a_route_is_observed(share: float, *, observed: bool) -> None:
    """At its ends, a share means none and all."""
    desk = Desk(replace(POLICY, routes=(replace(POLICY.routes[0], observe=share),)), chance=0.0)
    assert all(desk.request(chat(f"{n}")).observed is observed for n in range(200))
    desk.executor.shutdown()


def test_where_an_upstreams_dollars_are_limited_it_is_told_who_costs_nothing() -> None:
    """Each is asked for what the request costs at its own prices; what costs nothing needs nothing that is left."""
    text = CONFIG.replace(
        "a: {provider: openai,",
        "a: {provider: openai, dialects: [openai, anthropic], usd_per_day: 5, prices: {'*': {input: 1, output: 2}},",
    )
    made = Desk(parse(text.replace("chain: [a], acknowledge_unowned: true", "chain: [a, pool]"), "test").policy())
    try:
        body = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
        request, wants = made.priced(body)
        dollars = {c.key: c.amount for price in wants.prices.values() for c in price if "usd" in c.key}
        assert dollars == {"upstream/a/usd_day": pytest.approx((request.size.input + 200) / 1e6)}
        assert wants.costless == {"pool"}
        assert made.priced(body | {"model": "k"})[1].costless is None
        counting = {"model": "m", "messages": body["messages"]}
        assert made.priced(counting, "/v1/messages/count_tokens")[1].costless is None
    finally:
        made.executor.shutdown()
