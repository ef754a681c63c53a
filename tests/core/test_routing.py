"""Which upstreams may serve, what each would cost, and the order they are tried in."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.budget import Budget
from extproc.core.capacity import Claim, Store
from extproc.core.events import PassedOver, Why
from extproc.core.policy import Kind, KvRules, Limit, Policy, Route, Upstream, WhenBusy
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Ability, Dialect, Endpoint, Size
from extproc.core.routing import (
    able,
    affordable,
    askable,
    breaker_key,
    claims,
    dollars_lack,
    eligible,
    fitting,
    is_callers_word,
    kv_key,
    limits_of,
    matches,
    options,
    order,
    out_key,
    paused_key,
    priorities,
    reserve_of,
    route_of,
    unable,
)

BOTH = frozenset(Dialect)
OPENAI = frozenset({Dialect.OPENAI})


def upstream(name: str, **rules: object) -> Upstream:
    return Upstream(**{"name": name, "provider": "fake", "dialects": BOTH, **rules})


def policy(*upstreams: Upstream, routes: tuple[Route, ...] = ()) -> Policy:
    route = Route("all", ("*",), tuple(u.name for u in upstreams))
    return Policy({u.name: u for u in upstreams}, routes or (route,), {}, {})


def total(per_minute: float, model: str = "*") -> Limit:
    return Limit(model, Kind.TOTAL, per_minute, per_minute / 6)


def test_a_model_named_exactly_goes_before_any_pattern() -> None:
    """Exact names win over patterns whatever the order; among patterns the first wins; else it is unknown."""
    routes = tuple(
        Route(name, models, ("a",))
        for name, models in [("0", ("gpt-*",)), ("1", ("gpt-5*", "gpt-4")), ("2", ("*-x", "o3"))]
    )
    rules = policy(upstream("a"), routes=routes)
    assert [route_of(rules, model).name for model in ("gpt-4", "gpt-5", "gpt-4o", "o3", "q-x")] == [
        "1",
        "0",
        "0",
        "2",
        "2",
    ]
    with pytest.raises(Rejected) as refused:
        route_of(rules, "m" * 200)
    assert refused.value.reason is Reason.UNKNOWN_MODEL
    assert len(refused.value.detail) < 150


def test_patterns_are_case_sensitive_shell_patterns() -> None:
    """Model names differ by case, so patterns do too."""
    assert [matches("gpt-5", [pattern]) for pattern in ("gpt-?", "gpt-[45]", "GPT-5", "gpt-5-*")] == [
        True,
        True,
        False,
        False,
    ]
    assert not matches("gpt-5", [])


@pytest.mark.parametrize(
    ("models", "own", "invented"),
    [
        (("*",), {}, True),
        (("m",), {}, False),
        (("*",), {"m": "own"}, False),
        (("x-*",), {}, False),
        (("x-*", "m"), {}, False),
    ],
)
def test_a_name_that_only_a_pattern_lets_pass_is_the_callers(
    models: tuple[str, ...],
    own: dict[str, str],
    invented: bool,  # noqa: FBT001
) -> None:
    """What is written in a route, or translated for the upstream, is the operator's."""
    rules = policy(upstream("a", models=own), routes=(Route("r", models, ("a",)),))
    assert is_callers_word(rules, rules.upstreams["a"], "m") is invented


def test_only_upstreams_that_speak_the_dialect_are_able() -> None:
    """The chain is filtered to those that speak it; when none does no retry can help."""
    rules = policy(upstream("a", dialects=OPENAI), upstream("b"))
    assert able(rules, rules.routes[0], Dialect.ANTHROPIC, None) == ("b",)
    assert able(rules, rules.routes[0], Dialect.OPENAI, None) == ("a", "b")
    with pytest.raises(Rejected) as refused:
        able(rules, rules.routes[0], Dialect.ANTHROPIC, "a")
    assert (refused.value.reason, refused.value.retry_after) == (Reason.NO_UPSTREAM, inf)


def test_only_upstreams_that_can_do_what_is_needed_are_able() -> None:
    """The others are passed over; when all are, no retry can help, and it is told what was needed."""
    needs = frozenset({Ability.TOOLS, Ability.IMAGES})
    rules = policy(upstream("a", lacks=frozenset({Ability.IMAGES, Ability.JSON})), upstream("b"))
    chain = (rules, rules.routes[0], Dialect.OPENAI, None)
    assert able(*chain, needs) == ("b",)
    assert able(*chain, frozenset({Ability.TOOLS})) == ("a", "b")
    rules = policy(upstream("a", lacks=needs))
    with pytest.raises(Rejected) as refused:
        able(rules, rules.routes[0], Dialect.OPENAI, None, needs)
    assert (refused.value.reason, refused.value.retry_after) == (Reason.NO_UPSTREAM, inf)
    assert refused.value.detail.endswith("needs: images, tools")


def test_state_pins_the_request_to_one_upstream() -> None:
    """A pinned request can be served there or nowhere."""
    rules = policy(upstream("a"), upstream("b"))
    assert able(rules, rules.routes[0], Dialect.OPENAI, "b") == ("b",)


@pytest.mark.parametrize(
    ("rules", "fits"),
    [
        ({}, True),
        ({"window": 100}, True),
        ({"window": 99}, False),
        ({"limits": (total(100),)}, True),
        ({"limits": (total(99),)}, False),
        ({"limits": (total(99, "m"), total(1000))}, False),
        ({"limits": (total(99, "other"), total(1000))}, True),
        ({"limits": (total(99, "own"),), "models": {"m": "own"}}, False),
        ({"limits": (Limit("*", Kind.INPUT, 69, 10),)}, False),
        ({"limits": (Limit("*", Kind.OUTPUT, 29, 10),)}, False),
        ({"limits": (Limit("*", Kind.INPUT, 70, 10), Limit("*", Kind.OUTPUT, 30, 10))}, True),
        ({"limits": (Limit("*", Kind.REQUESTS, 0.5, 0.1),)}, True),
        ({"limits": (total(inf),)}, True),
        ({"limits": (Limit("*", Kind.TOTAL, 99, 10, shadow=True),)}, True),
        ({"limits": (Limit("*", Kind.OUTPUT, 29, 10, shadow=True), total(99))}, False),
    ],
)
def test_too_large_is_beyond_every_window_and_limit_of_the_chain(rules: dict[str, object], fits: bool) -> None:  # noqa: FBT001
    """70 + 30 tokens: an upstream that could never hold them is passed over; when all are, it is too large."""
    small = policy(upstream("a", **rules))
    wide = policy(upstream("a", **rules), upstream("b"))
    assert eligible(wide, ("a", "b"), "m", Size(70, 30)) == (("a", "b") if fits else ("b",))
    if not fits:
        with pytest.raises(Rejected) as refused:
            eligible(small, ("a",), "m", Size(70, 30))
        assert refused.value.reason is Reason.TOO_LARGE


def test_each_upstream_is_held_against_its_own_count() -> None:
    """A prompt may fit where it is counted small, and not where it is counted large, whatever the windows."""
    rules = policy(upstream("a", window=100), upstream("b", window=100), upstream("c", limits=(total(100),)))
    chain = (rules, ("a", "b", "c"), "m", Size(70, 30))
    assert eligible(*chain, {"b": Size(71, 30)}) == ("a", "c")
    assert eligible(*chain, {"a": Size(71, 30), "b": Size(60, 30), "c": Size(200, 30)}) == ("b",)
    with pytest.raises(Rejected) as refused:
        eligible(*chain, {"a": Size(90, 30), "b": Size(72, 30), "c": Size(71, 30)})
    assert (refused.value.reason, refused.value.detail.partition(" ")[0]) == (Reason.TOO_LARGE, "101")


@pytest.mark.parametrize(
    ("chain", "output"),
    [
        ([{}], 512),
        ([{"window": 300}], 200),
        ([{"window": 300}, {"window": 400}], 300),
        ([{"window": 300}, {}], 512),
        ([{"window": 50}], 1),
        ([{"limits": (total(400),)}], 300),
        ([{"limits": (total(400, "m"), total(200))}], 300),
        ([{"limits": (total(400),), "window": 350}], 250),
        ([{"limits": (Limit("*", Kind.INPUT, 150, 1), Limit("*", Kind.OUTPUT, 80.5, 1))}], 80),
        ([{"limits": (Limit("*", Kind.REQUESTS, 9, 1),)}], 512),
        ([{"limits": (total(inf),)}], 512),
    ],
)
def test_a_reservation_nobody_named_is_cut_to_what_fits(chain: list[dict[str, object]], output: int) -> None:
    """A prompt of 100 without a cap reserves 512, or what the widest upstream's window and limits leave; never none."""
    rules = policy(*(upstream(str(i), **each) for i, each in enumerate(chain)))
    assert fitting(rules, dict.fromkeys(rules.upstreams, 100), 512, "m") == output


def test_the_widest_is_who_has_most_room_for_its_own_count() -> None:
    """A prompt that is larger at the wider one leaves less there."""
    rules = policy(upstream("a", window=300), upstream("b", window=400))
    assert [fitting(rules, {"a": a, "b": b}, 512) for a, b in [(100, 350), (299, 350), (300, 400)]] == [200, 50, 1]


@given(st.integers(0, 2000), st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 2000))
def test_a_small_limit_never_refuses_who_named_no_cap(prompt: int, window: int, tpm: int, otpm: int) -> None:
    """Whatever the limits: if the prompt and one token fit, the cut request is eligible."""
    one = upstream("a", window=window, limits=(total(tpm), Limit("*", Kind.OUTPUT, otpm, 1)))
    rules = policy(one)
    size = Size(prompt, fitting(rules, {"a": prompt}, 512))
    if prompt + 1 <= min(window, tpm):
        assert eligible(rules, ("a",), "m", size) == ("a",)


def test_an_embedding_reserves_no_output() -> None:
    """What generates nothing stays so."""
    rules = policy(upstream("a", window=50))
    assert fitting(rules, {"a": 40}, 0) == 0


def test_a_request_claims_a_slot_and_each_limit_of_its_model() -> None:
    """One slot always; tokens by kind; one request; limits of other models are left alone."""
    kinds = tuple(Limit("m", kind, 1000, 100) for kind in Kind)
    one = upstream("a", limits=(*kinds, total(5, "other"), total(7)))
    assert claims(one, "m", Size(70, 30), Endpoint.CHAT) == (
        Claim("upstream/a/slots", 1.0),
        Claim("upstream/a/m/total", 100.0),
        Claim("upstream/a/m/input", 70.0),
        Claim("upstream/a/m/output", 30.0),
        Claim("upstream/a/m/requests", 1.0),
    )
    assert claims(one, "new", Size(70, 30), Endpoint.CHAT) == (
        Claim("upstream/a/slots", 1.0),
        Claim("upstream/a/*/total", 100.0),
    )


@pytest.mark.parametrize("endpoint", [Endpoint.OTHER, Endpoint.COUNT_TOKENS])
def test_what_is_not_priced_in_tokens_claims_requests_only(endpoint: Endpoint) -> None:
    """Images, audio and token counting take a slot and a request."""
    one = upstream("a", limits=(total(1000), Limit("*", Kind.REQUESTS, 10, 1)))
    assert [c.key for c in claims(one, "m", Size(0, 0), endpoint)] == ["upstream/a/slots", "upstream/a/*/requests"]


def test_limits_follow_the_upstreams_own_name_of_a_model() -> None:
    """A limit may name the model as clients do or as the upstream does."""
    one = upstream("a", models={"gpt-5": "prod5"}, limits=(total(1, "prod5"), total(2)))
    assert [limit.per_minute for limit in limits_of(one, "gpt-5")] == [1]
    assert [limit.per_minute for limit in limits_of(one, "gpt-4")] == [2]


@pytest.mark.parametrize(
    ("when_busy", "spilled", "sick", "asked"),
    [
        (WhenBusy.SPILL, True, "", "abc"),
        (WhenBusy.SPILL, True, "b", "ac"),
        (WhenBusy.SPILL, False, "", "a"),
        (WhenBusy.SPILL, False, "a", "b"),
        (WhenBusy.HOLD, True, "", "a"),
        (WhenBusy.HOLD, False, "ab", "c"),
        (WhenBusy.SPILL, True, "abc", ""),
        (WhenBusy.HOLD, False, "abc", ""),
    ],
)
def test_options_are_the_healthy_ones_or_the_first_of_them(
    when_busy: WhenBusy,
    spilled: bool,  # noqa: FBT001
    sick: str,
    asked: str,
) -> None:
    """`spill` asks for all once it has spilled; `hold` and who has not spilled yet only for the first healthy one."""
    found = options(
        [name for name in "abc" if name not in sick], lambda name: (Claim(name, 1.0),), when_busy, spilled=spilled
    )
    assert [option.name for option in found] == list(asked)
    assert all(option.claims == (Claim(option.name, 1.0),) for option in found)


@pytest.mark.parametrize(
    ("first", "sick", "full", "expected"),
    [
        ("a", "", "", "abc"),
        ("b", "", "", "bca"),
        ("a", "b", "", "ac"),
        ("a", "", "b", "a"),
        ("a", "", "c", "ab"),
        ("b", "", "a", "bc"),
        ("a", "b", "b", "ac"),
        ("a", "", "a", "abc"),
        ("a", "a", "", "abc"),
    ],
)
def test_the_order_ends_before_a_full_upstream(first: str, sick: str, full: str, expected: str) -> None:
    """First choice, then those behind it, then those before it; sick ones are left out, a full one ends it."""
    found = order(first, "abc", lambda name: name not in sick, lambda name: name not in full)
    assert "".join(found) == expected


@pytest.mark.parametrize(
    ("first", "sick", "slow", "unfit", "full", "expected"),
    [
        ("a", "", "", "b", "", "acdb"),
        ("a", "", "", "bc", "", "adbc"),
        ("a", "", "", "a", "", "abcd"),
        ("a", "", "", "b", "b", "acd"),
        ("a", "", "", "bd", "b", "ac"),
        ("a", "", "", "b", "c", "a"),
        ("a", "b", "", "b", "", "acd"),
        ("a", "c", "c", "b", "", "adcb"),
        ("a", "b", "b", "b", "", "acdb"),
    ],
)
def test_whom_it_does_not_fit_is_the_last(
    first: str, sick: str, slow: str, unfit: str, full: str, expected: str
) -> None:
    """Behind those that are merely slow; and as everybody it needs room."""
    found = order(
        first,
        "abcd",
        lambda name: name not in sick,
        lambda name: name not in full,
        lambda name: name in slow,
        lambda name: name not in unfit,
    )
    assert "".join(found) == expected


@pytest.mark.parametrize(
    ("first", "sick", "slow", "full", "expected"),
    [
        ("b", "a", "a", "", "bca"),
        ("b", "a", "", "", "bc"),
        ("c", "ab", "ab", "", "cab"),
        ("c", "ab", "ab", "b", "ca"),
        ("b", "a", "a", "c", "b"),
        ("a", "abc", "a", "", "a"),
        ("b", "", "a", "", "bca"),
    ],
)
def test_who_is_merely_slow_stands_behind_all_others(
    first: str, sick: str, slow: str, full: str, expected: str
) -> None:
    """Slow beats failed. One that is slow and lets this one in, because traffic returns there, has its own place."""
    found = order(first, "abc", lambda name: name not in sick, lambda name: name not in full, slow.__contains__)
    assert "".join(found) == expected


@pytest.mark.parametrize(
    ("sick", "slow", "expected"),
    [("", "", "abc"), ("a", "a", "bc"), ("abc", "", ""), ("abc", "b", "b"), ("abc", "abc", "abc"), ("ab", "ab", "c")],
)
def test_who_is_merely_slow_is_asked_where_nobody_else_may_be(sick: str, slow: str, expected: str) -> None:
    """Slow beats refused."""
    assert "".join(askable("abc", lambda name: name not in sick, slow.__contains__)) == expected


def engine(name: str, sign: int | None, provider: str = "vllm") -> Upstream:
    return upstream(name, provider=provider, engine_priority=sign)


def test_an_engine_with_a_watched_cache_claims_room_in_it() -> None:
    """Prompt and output, as long as the request runs; of the output only what is expected, never more than the cap."""
    one = upstream("a", kv=KvRules(), limits=(total(1000),))

    def room(endpoint: Endpoint, expected: int | None = None) -> list[float]:
        return [c.amount for c in claims(one, "m", Size(70, 30), endpoint, expected) if c.key == kv_key("a")]

    assert kv_key("a") == "upstream/a/kv"
    assert [room(Endpoint.CHAT, expected) for expected in (None, 10, 99)] == [[100.0], [80.0], [100.0]]
    assert [room(endpoint) for endpoint in (Endpoint.OTHER, Endpoint.COUNT_TOKENS)] == [[], []]
    reserved = [c.amount for c in claims(one, "m", Size(70, 30), Endpoint.CHAT, 10) if c.key.endswith("/total")]
    assert reserved == [100.0]
    assert all(c.key != kv_key("a") for c in claims(upstream("a"), "m", Size(70, 30), Endpoint.CHAT))


def test_a_better_lane_goes_first_in_every_engine_of_an_order() -> None:
    """Lower numbers go first in vLLM, higher ones in SGLang; the worst lane has 0 in both."""
    engines = {"v": engine("v", -1), "s": engine("s", 1, "sglang"), "plain": engine("plain", None)}
    by_lane = [priorities(engines, ("v", "s", "plain"), Endpoint.CHAT, below) for below in (2, 1, 0)]
    assert by_lane == [{"v": -200, "s": 200}, {"v": -100, "s": 100}, {"v": 0, "s": 0}]


@given(st.integers(1, 8), st.sampled_from([-1, 1]))
def test_neighbouring_lanes_are_far_enough_apart_for_preemption(lanes: int, sign: int) -> None:
    """SGLang preempts only across more than 10; every step has to be larger, in the direction of the engine."""
    only = {"e": engine("e", sign)}
    told = [priorities(only, ("e",), Endpoint.CHAT, below)["e"] for below in range(lanes)]
    assert all(sign * (better - worse) > 10 for worse, better in pairwise(told))


@pytest.mark.parametrize(
    ("providers", "endpoint", "expected"),
    [
        (["openai", "azure"], Endpoint.CHAT, None),
        (["openai", "vllm"], Endpoint.CHAT, {}),
        (["compatible"], Endpoint.COMPLETIONS, {}),
        (["fake"], Endpoint.CHAT, {}),
        (["openai", "anthropic"], Endpoint.MESSAGES, None),
        (["anthropic", "sglang"], Endpoint.MESSAGES, {}),
    ],
)
def test_a_client_cannot_rank_itself_in_an_engine(
    providers: list[str], endpoint: Endpoint, expected: dict[str, int] | None
) -> None:
    """Where an upstream of the order may be an engine the client's priority goes, else the body is left alone."""
    upstreams = {str(i): engine(str(i), None, provider) for i, provider in enumerate(providers)}
    assert priorities(upstreams, tuple(upstreams), endpoint, 2) == expected


def test_anthropic_callers_get_no_priority() -> None:
    """Engines read none from that API; whoever speaks it goes as if it had said nothing."""
    assert priorities({"v": engine("v", -1)}, ("v",), Endpoint.MESSAGES, 2) == {}


@pytest.mark.parametrize(
    ("spent", "costless", "chosen"),
    [
        ("", "", "abcd"),
        ("", "d", "abcd"),
        ("a", "d", "d"),
        ("a", "bd", "bd"),
        ("b", "d", "ad"),
        ("c", "d", "abd"),
        ("ac", "d", "d"),
        ("a", "", ""),
    ],
)
def test_spent_dollars_steer_to_what_costs_nothing(spent: str, costless: str, chosen: str) -> None:
    """Never to another that is paid: the cost would only move there. Who comes before it in the chain goes on."""
    assert affordable(tuple("abcd"), frozenset(costless), lambda name: name in spent) == tuple(chosen)


def test_dollars_are_spent_when_they_do_not_cover_the_request() -> None:
    """Of any period that is limited. What is not counted, or only watched, covers all; tokens are not dollars."""
    store: Store = {
        "upstream/a/usd_hour": Budget(5.0, used=4.0),
        "upstream/a/usd_day": Budget(50.0, used=48.0),
        "upstream/b/usd_day": Budget(50.0, used=50.0, shadow=True),
        "upstream/a/m/total": Budget(0.0),
    }

    def price(usd: float) -> tuple[Claim, ...]:
        keys = ("upstream/a/m/total", "upstream/a/usd_hour", "upstream/a/usd_day", "upstream/a/usd_month")
        return tuple(Claim(key, usd) for key in keys)

    assert [dollars_lack(price(usd), store, 0.0) for usd in (1.0, 1.5, 2.5)] == [False, True, True]
    assert not dollars_lack((Claim("upstream/b/usd_day", 9.0),), store, 0.0)


def test_of_tokens_a_part_is_for_the_best_lane() -> None:
    """Not of requests, and nothing where `burn` is off."""
    burning = upstream("a", burn=0.85)
    assert {kind: round(reserve_of(burning, kind), 9) for kind in Kind} == {
        Kind.TOTAL: 0.15, Kind.INPUT: 0.15, Kind.OUTPUT: 0.15, Kind.REQUESTS: 0.0
    }  # fmt: skip
    assert reserve_of(upstream("a", burn=None), Kind.TOTAL) == 0


def test_who_cannot_serve_is_told_with_the_first_of_its_reasons() -> None:
    """Those that could are not told; sizes are each upstream's own."""
    small = upstream("small", window=100)
    names = upstream("openai", dialects=OPENAI), upstream("plain", lacks=frozenset({Ability.TOOLS})), small
    rules = policy(*names, upstream("wide", window=1000))
    route = rules.routes[0]
    about = Dialect.ANTHROPIC, "m", Size(80, 21)
    needs = frozenset({Ability.TOOLS, Ability.IMAGES})
    found = unable(rules, route, *about, None, needs)
    assert found == (
        PassedOver("openai", Why.DIALECT), PassedOver("plain", Why.ABILITY), PassedOver("small", Why.TOO_LARGE),
    )  # fmt: skip
    assert unable(rules, route, *about, None, needs, {"small": Size(79, 21)}) == found[:2]
    assert unable(rules, route, Dialect.OPENAI, "m", Size(1, 1), None) == ()
    pinned = unable(rules, route, Dialect.OPENAI, "m", Size(1, 1), "wide")
    assert pinned == tuple(PassedOver(name, Why.PINNED) for name in ("openai", "plain", "small"))
    assert eligible(rules, able(rules, route, Dialect.ANTHROPIC, None, needs), "m", Size(80, 21)) == ("wide",)


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from([None, 99, 100])), min_size=1, max_size=4),
    st.sampled_from([None, "0", "1"]),
    st.sampled_from([frozenset(), frozenset({Ability.TOOLS})]),
)
def test_each_of_a_chain_could_serve_or_is_told_why_not(
    about: list[tuple[bool, bool, int | None]], pin: str | None, needs: frozenset[Ability]
) -> None:
    """Never both, in the order of the chain; where nobody could, it is refused for the best that is left of them."""
    lacks = frozenset({Ability.TOOLS})
    rules = policy(
        *(
            upstream(f"{at}", dialects=BOTH if speaks else OPENAI, lacks=frozenset() if can else lacks, window=window)
            for at, (speaks, can, window) in enumerate(about)
        )
    )
    asked = rules, rules.routes[0], Dialect.ANTHROPIC, "m", Size(80, 20), pin, needs
    found = unable(*asked)
    names = [one.upstream for one in found]
    serve = tuple(name for name in rules.upstreams if name not in names)
    assert names == [name for name in rules.upstreams if name in names]

    def could_serve() -> tuple[str, ...]:
        return eligible(rules, able(rules, rules.routes[0], Dialect.ANTHROPIC, pin, needs), "m", Size(80, 20))

    if serve:
        assert could_serve() == serve
        return
    with pytest.raises(Rejected) as refused:
        could_serve()
    reasons = {one.why for one in found}
    assert (refused.value.reason is Reason.TOO_LARGE) is (Why.TOO_LARGE in reasons)
    assert (" do all " in refused.value.detail) is (Why.ABILITY in reasons and Why.TOO_LARGE not in reasons)


def test_what_is_no_counter_has_a_name_beside_them() -> None:
    """So that a request can be told to wait for it."""
    assert [breaker_key("a"), out_key("a"), paused_key("P1")] == [
        "upstream/a/breaker",
        "upstream/a/out",
        "lane/P1/paused",
    ]
