"""What is the caller's own: dollars, sessions and tenants that nobody listed; taken at once, settled once, bounded."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from extproc.admission import Admission
from extproc.core.bucket import Slots
from extproc.core.budget import Budget
from extproc.core.capacity import Claim
from extproc.core.events import BudgetUsed, Observed, Overshot, Settled, Shadowed
from extproc.core.policy import Dollars, KvRules, Policy, Prices, Route, SessionLimits, Tenant
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Endpoint, Session, Size
from extproc.core.watermark import Watermark
from tests.doubles import Ledger, Observer, Suspending, VirtualLoop, claims, play
from tests.test_flights import DONE, GRACE_S, LEFT, POLICY, PRICES, REFUSED, TIMEOUT, A, B, Desk, Trip

KINDS = [Ledger, Suspending]
USED = 50 * 0.01 + 10 * 0.02
"""Dollars of an answer as DONE tells of it, at A."""
AT_B = 50 * 0.03 + 10 * 0.06


@pytest.fixture(params=KINDS, ids=["memory", "suspending"])
def kind(request: pytest.FixtureRequest) -> type[Ledger]:
    """Capacity that answers at once, and capacity that suspends."""
    return request.param


def with_tenant(policy: Policy = POLICY, name: str = "agent", **changes: Any) -> Policy:
    """The policy with one tenant changed."""
    return replace(policy, tenants={**policy.tenants, name: replace(policy.tenants[name], **changes)})


def with_anybody(**limits: Any) -> Policy:
    """The policy with these limits for every tenant that nobody listed."""
    return replace(POLICY, any_tenant=Tenant("*", ("P1",), "P1", **limits))


async def refused(trip: Coroutine[Any, Any, Trip]) -> Rejected:
    """Why it was refused."""
    with pytest.raises(Rejected) as caught:
        await trip
    return caught.value


async def fly(desk: Desk, order: str = "a", **changes: Any) -> None:
    """A whole flight, served by the first of its order."""
    trip = await desk.take_off(order, **changes)
    await trip.final(order[0], tail=DONE)
    await trip.land()


# Dollars.


@pytest.mark.parametrize(("served", "used"), [("a", USED), ("b", AT_B)])
def test_the_dearest_is_reserved_and_who_served_is_paid(kind: type[Ledger], served: str, used: float) -> None:
    """The hour, the day and the session pay the same; the outcome tells the cost."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ab", tenant="agent")
        budgets = {"tenant/agent/usd_hour": 50, "tenant/agent/usd_day": 60, "session/agent/s/usd": 30}
        assert {key: desk.left(key) for key in budgets} == {key: limit - B for key, limit in budgets.items()}
        if served == "b":
            await trip.failed("a", 503)
        await trip.final(served, tail=DONE)
        await trip.land()
        assert {key: desk.left(key) for key in budgets} == {key: limit - used for key, limit in budgets.items()}
        assert desk.left("session/agent/s/tokens") == 1000 - 60
        assert desk.observer.of(Settled)[0].cost_usd == pytest.approx(used)

    play(scenario)


def test_who_counts_more_tokens_may_be_the_dearest(kind: type[Ledger]) -> None:
    """Each of its upstreams is priced by its own count."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ab", tenant="agent", sizes={"a": Size(400, 40)})
        reserved = 400 * 0.01 + 40 * 0.02
        assert reserved > B
        assert desk.left("tenant/agent/usd_day") == pytest.approx(60 - reserved)
        await trip.final("a", tail=DONE)
        await trip.land()
        assert desk.left("tenant/agent/usd_day") == pytest.approx(60 - USED)

    play(scenario)


def test_an_attempt_that_was_cut_is_paid_for_beside_the_one_that_served(kind: type[Ledger]) -> None:
    """Its input, at its own prices; one that was refused costs nothing."""

    async def scenario(loop: VirtualLoop) -> None:
        for how, cost in (({"status": 0, "flags": TIMEOUT}, 60 * 0.03), ({"status": 429}, 0.0)):
            desk = Desk(loop, kind)
            trip = await desk.take_off("ba", tenant="agent")
            await trip.failed("b", **how)
            await trip.final("a", attempt=2, tail=DONE)
            await trip.land()
            assert desk.left("tenant/agent/usd_day") == pytest.approx(60 - USED - cost)
            assert desk.observer.of(Settled)[0].cost_usd == pytest.approx(USED + cost)

    play(scenario)


def test_a_cut_attempt_told_after_the_outcome_is_paid_for_all_the_same(kind: type[Ledger]) -> None:
    """Records come in any order."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ba", tenant="agent")
        await trip.final("a", attempt=2, tail=DONE)
        await trip.land()
        for _ in range(2):
            await trip.failed("b", 0, flags=TIMEOUT)
        assert desk.left("tenant/agent/usd_day") == pytest.approx(60 - USED - 60 * 0.03)

    play(scenario)


@pytest.mark.parametrize(
    ("tail", "cost"),
    [
        ({"events": 7}, 60 * 0.01 + 7 * 0.02),
        ({}, A),
        (DONE | {"in": 0, "out": 0}, 0.0),
        (DONE | {"cached": 20, "cache_write": 10, "reasoning": 5}, USED),
        (DONE | {"in": 900}, 9 + 10 * 0.02),
    ],
)
def test_dollars_follow_what_is_known_of_the_answer(kind: type[Ledger], tail: dict[str, Any], cost: float) -> None:
    """A stream that its client left: input and what was seen. Unknown: the estimate. Zero is zero. More is more."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("a", tenant="agent")
        await trip.final("a", 200, flags=LEFT, tail=tail)
        await trip.land()
        assert desk.left("tenant/agent/usd_hour") == pytest.approx(50 - cost)
        assert desk.observer.of(Settled)[0].cost_usd == pytest.approx(cost)

    play(scenario)


def test_an_outcome_that_never_comes_keeps_what_was_reserved(kind: type[Ledger]) -> None:
    """The dearest, because nobody knows who served; the fairness of lanes hears of the estimate."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ab", tenant="agent")
        await trip.land()
        await asyncio.sleep(GRACE_S + 1)
        await desk.flights.sweep()
        assert desk.left("tenant/agent/usd_day") == pytest.approx(60 - B)
        assert desk.left("session/agent/s/tokens") == 900
        assert desk.used == [("t1", Size(60, 40))]
        assert desk.observer.of(Settled)[0].cost_usd is None
        assert not desk.allowances.sessions.fresh("agent", "s")

    play(scenario)


@pytest.mark.parametrize(("budget", "left", "word"), [("usd_hour", 50.0, "hour"), ("usd_day", 60.0, "day")])
def test_a_spent_budget_is_refused_for_good(kind: type[Ledger], budget: str, left: float, word: str) -> None:
    """No retry is offered; the next calendar period begins anew, and other tenants do not notice."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        await desk.capacity.take([_ask(f"tenant/agent/{budget}", left - 1.0)])
        caught = await refused(desk.take_off("a", tenant="agent"))
        assert (caught.reason, caught.retry_after) == (Reason.SPEND_BUDGET, None)
        assert word in caught.detail
        assert desk.held("session") == {}
        await fly(desk, tenant="vip")
        await fly(desk)
        await asyncio.sleep(3600 if budget == "usd_hour" else 86_400)
        await fly(desk, tenant="agent")

    play(scenario)


def test_a_period_that_is_over_gives_nothing_back_to_the_next(kind: type[Ledger]) -> None:
    """What was reserved in one hour and not used does not make room in the hour after it; what was used beyond its
    estimate is paid there.
    """

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        small, large, unsent = [await desk.take_off("a", tenant="agent") for _ in range(3)]
        waiting = desk.flights.board(desk.asking(tenant="agent"), "a")
        await waiting.__aenter__()
        await asyncio.sleep(3600)
        await desk.capacity.take([_ask("tenant/agent/usd_hour", 10.0)])
        await small.final("a", tail=DONE)
        await unsent.final("", 503)
        await waiting.__aexit__(None, None, None)
        assert desk.left("tenant/agent/usd_hour") == 40
        await large.final("a", tail=DONE | {"in": 260})
        assert desk.left("tenant/agent/usd_hour") == pytest.approx(40 - (2.6 + 0.2 - A))
        for trip in (small, large, unsent):
            await trip.land()
        assert desk.left("tenant/agent/usd_day") == pytest.approx(60 - USED - 2.8)
        assert desk.left("session/agent/s/usd") == pytest.approx(30 - USED - 2.8)

    play(scenario)


def test_free_and_unpriced_models_need_no_budget(kind: type[Ledger]) -> None:
    """A spent budget in dollars does not stop them; that nobody knows a price can be told from a price of zero."""
    upstreams = {
        name: replace(POLICY.upstreams[name], prices=prices)
        for name, prices in (("a", {"*": (Prices(0.0, 0.0),)}), ("b", {"other": (Prices(1.0, 1.0),)}))
    }

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind, replace(POLICY, upstreams=upstreams))
        await desk.capacity.change([_back("tenant/agent/usd_hour", -51.0)])
        for order in ("a", "b", "ab"):
            await fly(desk, order, tenant="agent")
        assert [event.cost_usd for event in desk.observer.of(Settled)] == [0.0, None, 0.0]
        assert desk.left("tenant/agent/usd_hour") == -1

    play(scenario)


def test_what_cannot_be_read_beforehand_needs_a_budget_that_is_left(kind: type[Ledger]) -> None:
    """Images and files cost what is reported afterwards. Counting tokens is free."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        nothing = {"tenant": "agent", "size": Size(0, 0)}
        trip = await desk.take_off("a", endpoint=Endpoint.OTHER, **nothing)
        await trip.final("a", tail=DONE | {"in": 6000})
        await trip.land()
        assert desk.left("tenant/agent/usd_hour") < 0
        caught = await refused(desk.take_off("a", endpoint=Endpoint.OTHER, **nothing, session=Session("t")))
        assert caught.reason is Reason.SPEND_BUDGET
        await fly(desk, endpoint=Endpoint.COUNT_TOKENS, **nothing, session=Session("t"))

    play(scenario)


def with_route(**dollars: float) -> Policy:
    """The policy with a route of these dollars, and one without."""
    routes = (Route("0:m", ("m",), ("a", "b"), dollars=Dollars(**dollars)), Route("1:n", ("n",), ("a", "b")))
    return replace(POLICY, routes=routes)


@pytest.mark.parametrize("period", ["hour", "day", "month"])
def test_what_a_route_may_cost_is_a_hard_stop_for_everybody(kind: type[Ledger], period: str) -> None:
    """Whoever calls; no other route notices. It is settled by what was really used, and whole again with its period."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind, with_route(**{f"per_{period}": 2 * A}))
        key = f"route/m/usd_{period}"
        for tenant in ("default", "agent", "stranger"):
            await fly(desk, tenant=tenant)
        assert desk.left(key) == pytest.approx(2 * A - 3 * USED)
        caught = await refused(desk.take_off("a"))
        assert (caught.reason, caught.retry_after) == (Reason.SPEND_BUDGET, None)
        assert f"this model's dollars per {period}" in caught.detail
        await fly(desk, route="1:n")
        await asyncio.sleep({"hour": 3600, "day": 86_400, "month": 31 * 86_400}[period])
        trip = await desk.take_off("a")
        assert desk.left(key) == pytest.approx(A)
        await asyncio.sleep({"hour": 3600, "day": 86_400, "month": 31 * 86_400}[period])
        await trip.final("a", tail=DONE)
        await trip.land()
        assert desk.left(key) == pytest.approx(2 * A)

    play(scenario)


def test_a_request_on_its_way_pays_its_route_wherever_that_stands_by_now(kind: type[Ledger]) -> None:
    """Other routes may have come before it since it was named."""

    async def scenario(loop: VirtualLoop) -> None:
        policy = with_route(per_hour=2 * A)
        desk = Desk(loop, kind, policy)
        [limited, other] = policy.routes
        desk.allowances.follow(replace(policy, routes=(replace(other, name="0:n"), replace(limited, name="1:m"))))
        await fly(desk, route="0:m")
        assert desk.left("route/m/usd_hour") == pytest.approx(2 * A - USED)
        await fly(desk, route="1:n")
        assert desk.left("route/m/usd_hour") == pytest.approx(2 * A - USED)

    play(scenario)


def test_of_a_tenants_and_a_routes_dollars_the_longer_is_told(kind: type[Ledger]) -> None:
    """Who waits for the one would run into the other."""

    async def scenario(loop: VirtualLoop) -> None:
        for route, told in (({"per_month": 1.0}, "this model's dollars per month"), ({"per_hour": 1.0}, "tenant's")):
            desk = Desk(loop, kind, with_route(**route))
            await desk.capacity.change([_back("tenant/agent/usd_day", -60.0)])
            assert told in (await refused(desk.take_off("a", tenant="agent"))).detail

    play(scenario)


def with_purses(loop: VirtualLoop, kind: type[Ledger]) -> Desk:
    """Twenty dollars an hour for each upstream."""
    limited = {name: replace(each, dollars=Dollars(per_hour=20.0)) for name, each in POLICY.upstreams.items()}
    desk = Desk(loop, kind, replace(POLICY, upstreams=limited))
    desk.prices = {
        name: (*PRICES[name], Claim(f"upstream/{name}/usd_hour", dollars)) for name, dollars in (("a", A), ("b", B))
    }
    return desk


def test_an_upstreams_own_dollars_are_settled_with_who_served(kind: type[Ledger]) -> None:
    """At its own prices, once; the one that failed gets its own back. No period gives back what another was charged."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = with_purses(loop, kind)
        trip = await desk.take_off("ab")
        assert (desk.left("upstream/a/usd_hour"), desk.left("upstream/b/usd_hour")) == (20 - A, 20)
        await trip.failed("a", 503)
        for _ in range(2):
            await trip.final("b", attempt=2, tail=DONE)
        await trip.land()
        assert (desk.left("upstream/a/usd_hour"), desk.left("upstream/b/usd_hour")) == (20, 20 - AT_B)
        small, large = [await desk.take_off("a", tenant=tenant) for tenant in ("default", "agent")]
        await asyncio.sleep(3600)
        await fly(desk)
        await small.final("a", tail=DONE)
        assert desk.left("upstream/a/usd_hour") == 20 - USED
        await large.final("a", tail=DONE | {"in": 260})
        assert desk.left("upstream/a/usd_hour") == pytest.approx(20 - USED - (2.6 + 0.2 - A))
        for each in (small, large):
            await each.land()

    play(scenario)


def test_what_a_failover_took_in_a_later_hour_comes_back_in_that(kind: type[Ledger]) -> None:
    """The backup's dollars were reserved when it was asked, not when the request was let go."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = with_purses(loop, kind)
        served, failed = await desk.take_off("ab"), await desk.take_off("ab")
        await asyncio.sleep(3600)
        for trip in (served, failed):
            await trip.failed("a", 503)
        assert (desk.left("upstream/a/usd_hour"), desk.left("upstream/b/usd_hour")) == (20, 20 - 2 * B)
        await served.final("b", attempt=2, tail=DONE)
        await failed.failed("b", 503, attempt=2)
        assert desk.left("upstream/b/usd_hour") == pytest.approx(20 - AT_B)
        await failed.final("", 503)
        for trip in (served, failed):
            await trip.land()

    play(scenario)


def test_prices_change_while_it_runs(kind: type[Ledger]) -> None:
    """Who came before pays what held then; no restart is needed."""
    dear = replace(POLICY.upstreams["a"].prices["m"][0], input=9e4, output=9e4, since=2000.0)
    prices = {"m": (*POLICY.upstreams["a"].prices["m"], dear)}
    upstreams = {**POLICY.upstreams, "a": replace(POLICY.upstreams["a"], prices=prices)}

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind, replace(POLICY, upstreams=upstreams))
        before = await desk.take_off("a")
        await asyncio.sleep(2000.0 - loop.time())
        after = await desk.take_off("a")
        for trip in (before, after):
            await trip.final("a", tail=DONE)
            await trip.land()
        assert [event.cost_usd for event in desk.observer.of(Settled)] == [
            pytest.approx(USED),
            pytest.approx(60 * 0.09),
        ]

    play(scenario)


def test_what_was_spent_is_known_after_a_restart() -> None:
    """Of tenants, upstreams and routes, in the period it was spent in; what is counted anew begins with nothing."""
    limited = {name: replace(each, dollars=Dollars(per_day=20.0)) for name, each in POLICY.upstreams.items()}
    policy = replace(with_route(per_month=9.0), upstreams=limited, lanes={})

    async def scenario(loop: VirtualLoop) -> None:
        known = {
            "upstream/a/usd_day": (5.0, 60.0),
            "route/m/usd_month": (3.0, 60.0),
            "tenant/agent/usd_hour": (1.0, 7200.0),
        }
        admission = Admission(policy, loop, lambda _: None, levels=known)
        store, now = admission.durable(), loop.time()
        used = {key: c.used_at(now) for key, c in store.items() if isinstance(c, Budget)}
        assert used == {
            "upstream/a/usd_day": 5.0, "upstream/b/usd_day": 0.0, "route/m/usd_month": 3.0,
            "tenant/agent/usd_hour": 0.0, "tenant/agent/usd_day": 0.0,
        }  # fmt: skip

    play(scenario)


def test_a_budget_that_runs_out_is_told() -> None:
    """Of a tenant, an upstream or a route, once, by the sweep; nobody is told of one that is hardly used."""
    observer = Observer()

    async def scenario(loop: VirtualLoop) -> None:
        admission = Admission(replace(with_route(per_day=10.0), lanes={}), loop, observer)
        await admission.capacity.change([_back("route/m/usd_day", -8.5), _back("tenant/agent/usd_hour", -5.0)])
        for _ in range(2):
            await admission.sweep()
        [told] = observer.of(BudgetUsed)
        assert (told.key, told.used, told.limit) == ("route/m/usd_day", 8.5, 10.0)
        assert 0 < told.ends_in_s <= 86_400

    play(scenario)


# Sessions.


def test_a_spent_session_is_stopped_for_good_and_raised_at_once(kind: type[Ledger]) -> None:
    """Its own calls only; not those of another session, nor of another tenant's session of that name."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind, with_tenant(name="default", sessions=SessionLimits(max_tokens=1000)))
        for _ in range(16):
            with suppress(Rejected):
                await fly(desk, tenant="agent")
        caught = await refused(desk.take_off("a", tenant="agent"))
        assert (caught.reason, caught.retry_after) == (Reason.SESSION_BUDGET, None)
        assert "tokens" in caught.detail
        assert desk.left("session/agent/s/tokens") == 40
        await fly(desk, tenant="agent", session=Session("another"))
        await fly(desk, tenant="default")
        raised = await desk.allowances.add("agent", "s", 60, 0.0)
        assert raised is not None
        assert raised["tokens"] == {"limit": 1060, "used": 960, "left": 100}
        await fly(desk, tenant="agent")
        assert (await refused(desk.take_off("a", tenant="agent"))).reason is Reason.SESSION_BUDGET

    play(scenario)


def test_a_session_is_stopped_by_dollars_too(kind: type[Ledger]) -> None:
    """And raised by dollars."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind, with_tenant(sessions=SessionLimits(max_usd=2.0)))
        await fly(desk, tenant="agent")
        caught = await refused(desk.take_off("a", tenant="agent"))
        assert caught.reason is Reason.SESSION_BUDGET
        assert "dollars" in caught.detail
        raised = await desk.allowances.add("agent", "s", 0, 0.1)
        assert raised is not None
        assert raised["usd"] == {"limit": 2.1, "used": 0.7, "left": 1.4}
        assert raised["tokens"] is None
        await fly(desk, tenant="agent")

    play(scenario)


def test_only_what_is_limited_and_known_can_be_raised() -> None:
    """A session that nobody heard of, or that has no such limit, is told apart."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, Ledger, with_tenant(sessions=SessionLimits(max_usd=2.0)))
        assert desk.allowances.look("agent", "s") is None
        assert await desk.allowances.add("agent", "s", 1, 1.0) is None
        await fly(desk, tenant="agent")
        with pytest.raises(ValueError, match="tokens"):
            await desk.allowances.add("agent", "s", 5, 1.0)
        await fly(desk, session=Session("free"))
        with pytest.raises(ValueError, match="dollars"):
            await desk.allowances.add("default", "free", 0, 1.0)
        seen = desk.allowances.look("agent", "s")
        assert seen is not None
        assert seen["usd"] == {"limit": 2.0, "used": 0.7, "left": 1.3}
        assert (seen["tenant"], seen["session"], seen["served"], seen["running"]) == ("agent", "s", True, 0)

    play(scenario)


def test_refused_calls_are_no_silence_and_silence_ends_a_session(kind: type[Ledger]) -> None:
    """A loop stays stopped for as long as it goes on; after its silence it begins anew, counters and all."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind, with_tenant(sessions=SessionLimits(max_tokens=100, idle_s=600.0)))
        await fly(desk, tenant="agent")
        for _ in range(10):
            await asyncio.sleep(500)
            await desk.flights.sweep()
            await refused(desk.take_off("a", tenant="agent"))
        await asyncio.sleep(601)
        await desk.flights.sweep()
        assert not [key for key in desk.store if key.startswith("session")]
        await fly(desk, tenant="agent")
        await asyncio.sleep(601)
        await fly(desk, tenant="agent")
        assert desk.left("session/agent/s/tokens") == 40

    play(scenario)


@pytest.mark.parametrize("counts", [True, False])
def test_sessions_that_nobody_named_count_only_where_they_should(kind: type[Ledger], counts: bool) -> None:  # noqa: FBT001
    """Where they do not, they are not remembered either."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind, with_tenant(sessions=SessionLimits(max_tokens=100, derived=counts)))
        derived = Session("agent/key/7", derived=True)
        await fly(desk, tenant="agent", session=derived)
        if counts:
            await refused(desk.take_off("a", tenant="agent", session=derived))
            assert desk.left("session/agent/agent%2Fkey%2F7/tokens") == 40
        else:
            await fly(desk, tenant="agent", session=derived)
        assert len(desk.allowances.sessions) == counts
        assert desk.allowances.sessions.fresh("agent", derived.id) is not counts

    play(scenario)


def test_a_session_is_fresh_until_it_was_answered(kind: type[Ledger]) -> None:
    """Refused, failed and running calls do not count; sessions without limits are remembered too."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        fresh = desk.allowances.sessions.fresh
        for tenant in ("agent", "default", "stranger"):
            trip = await desk.take_off("a", tenant=tenant)
            await trip.final("a", 503)
            await trip.land()
            running = await desk.take_off("a", tenant=tenant)
            assert fresh(tenant, "s")
            await running.final("a", tail=DONE)
            assert not fresh(tenant, "s")
            await running.land()
        assert not [key for key in desk.store if key.startswith("session/default")]

    play(scenario)


def test_remembering_a_session_makes_room_like_any_other(kind: type[Ledger]) -> None:
    """A session without limits may push out one with counters, and these go with it."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind, replace(POLICY, sessions=SessionLimits(limit=2)))
        for name in ("s1", "s2"):
            await fly(desk, tenant="agent", session=Session(name))
        await fly(desk, session=Session("other"))
        assert {key.split("/")[2] for key in desk.store if key.startswith("session")} == {"s2"}
        assert len(desk.allowances.sessions) == 2

    play(scenario)


# All or nothing.


def _ask(key: str, amount: float) -> Any:
    from extproc.core.capacity import Ask, Option  # noqa: PLC0415

    return Ask("x", (Option("x", (Claim(key, amount),)),))


LIMITS = {
    "tpm": ({"tpm": 1000}, Reason.TENANT_QUOTA),
    "rpm": ({"rpm": 10}, Reason.TENANT_QUOTA),
    "concurrency": ({"concurrency": 10}, Reason.TENANT_CONCURRENCY),
    "hour": ({"dollars": Dollars(per_hour=10 * A)}, Reason.SPEND_BUDGET),
    "day": ({"dollars": Dollars(per_day=10 * A)}, Reason.SPEND_BUDGET),
    "month": ({"dollars": Dollars(per_month=10 * A)}, Reason.SPEND_BUDGET),
    "session": ({"sessions": SessionLimits(max_tokens=1000)}, Reason.SESSION_BUDGET),
    "session_usd": ({"sessions": SessionLimits(max_usd=10 * A)}, Reason.SESSION_BUDGET),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("tenant", ["agent", "stranger"])
@pytest.mark.parametrize("seed", range(5))
def test_a_hundred_at_once_on_a_budget_of_ten(kind: type[Ledger], limit: str, tenant: str, seed: int) -> None:
    """Never more than ten are admitted at once, and all of them; the rest learn why. Nothing refused was used up.

    Also of a tenant that nobody listed and of a session that is new: its counters come into being with these calls.
    """
    given, reason = LIMITS[limit]
    policy = with_anybody(**given)
    policy = replace(policy, tenants={**policy.tenants, "agent": replace(POLICY.any_tenant, name="agent", tpm=None)})  # type: ignore[type-var]
    policy = with_tenant(policy, **{"concurrency": None, "dollars": Dollars(), **given})

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind, policy)
        if isinstance(desk.capacity, Suspending):
            desk.capacity._rng = random.Random(seed)
        trips = [desk.take_off("a", tenant=tenant) for _ in range(100)]
        outcomes = await asyncio.gather(*trips, return_exceptions=True)
        flying = [trip for trip in outcomes if isinstance(trip, Trip)]
        assert len(flying) == 10
        assert {each.reason for each in outcomes if isinstance(each, Rejected)} == {reason}
        for trip in flying:
            await trip.failed("a", 503)
            await trip.final("a", 503)
            await trip.land()
        await desk.settle_down()
        used = {key: amount for key, amount in desk.capacity.held().items() if not key.startswith("upstream")}
        assert used == ({f"tenant/{tenant}/requests": 10} if limit == "rpm" else {})
        assert all(not known.pins for known in _pinned(desk))

    play(scenario)


def _pinned(desk: Desk) -> list[Any]:
    """Everything that could be pinned."""
    allowances = desk.allowances
    accounts = [] if allowances._others is None else [*allowances._others._known.values(), allowances._others._anybody]
    return [*accounts, *(known for sessions in allowances.sessions._of.values() for known in sessions.values())]


def test_a_refused_request_uses_up_nothing(kind: type[Ledger]) -> None:
    """Whichever of its limits it lacked: all are taken, or none."""
    rest = {
        "tenant/agent/slots": 2, "tenant/agent/requests": 1, "tenant/agent/total": 100, "tenant/agent/usd_hour": A,
        "session/agent/s/tokens": 100,
    }  # fmt: skip
    policy = with_tenant(concurrency=2, rpm=2, tpm=200, dollars=Dollars(2 * A), sessions=SessionLimits(max_tokens=200))
    why = {
        "slots": Reason.TENANT_CONCURRENCY, "requests": Reason.TENANT_QUOTA, "total": Reason.TENANT_QUOTA,
        "usd_hour": Reason.SPEND_BUDGET, "tokens": Reason.SESSION_BUDGET,
    }  # fmt: skip

    async def scenario(loop: VirtualLoop) -> None:
        for lacking, amount in rest.items():
            desk = Desk(loop, kind, policy)
            await (await desk.take_off("a", tenant="agent")).land()
            before = desk.held("tenant") | desk.held("session")
            await desk.capacity.take([_ask(lacking, amount)])
            caught = await refused(desk.take_off("a", tenant="agent"))
            assert caught.reason is why[lacking.rpartition("/")[2]]
            after = desk.held("tenant") | desk.held("session")
            after[lacking] = round(after[lacking] - amount, 6)
            assert {key: value for key, value in after.items() if value} == before

    play(scenario)


def test_the_reason_that_lasts_longest_is_told() -> None:
    """Who waits for a slot would only run into the budget after that."""

    async def scenario(loop: VirtualLoop) -> None:
        policy = with_tenant(concurrency=1, rpm=1)
        desk = Desk(loop, Ledger, policy)
        order = [
            ("tenant/agent/requests", 1.0, Reason.TENANT_QUOTA),
            ("tenant/agent/slots", 1.0, Reason.TENANT_CONCURRENCY),
            ("tenant/agent/usd_hour", 49.0, Reason.SPEND_BUDGET),
            ("session/agent/s/usd", 29.0, Reason.SESSION_BUDGET),
        ]
        await fly(desk, "a", tenant="agent")
        for key, amount, reason in order:
            await desk.capacity.change([_back(key, -amount)])
            assert (await refused(desk.take_off("a", tenant="agent"))).reason is reason

    play(scenario)


def _back(key: str, amount: float) -> Any:
    from extproc.core.capacity import Change  # noqa: PLC0415

    return Change(key, amount)


# What only watches.


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("tenant", ["agent", "stranger"])
def test_a_limit_in_shadow_mode_stops_nobody_and_tells(kind: type[Ledger], limit: str, tenant: str) -> None:
    """It goes on counting; what it would have stopped is told by its name, without the session's."""
    given, _ = LIMITS[limit]
    names = frozenset({"tpm", "rpm", "concurrency", "usd_per_hour", "usd_per_day", "usd_per_month"})
    if "sessions" in given:
        given = {"sessions": replace(given["sessions"], shadow=frozenset({"max_tokens", "max_usd"}))}
    policy = with_anybody(**given, shadow=names)
    policy = replace(policy, tenants={**policy.tenants, "agent": Tenant("agent", (), "", **given, shadow=names)})

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind, policy)
        trips = [await desk.take_off("a", tenant=tenant) for _ in range(12)]
        told = Counter(event.limit for event in desk.observer.of(Shadowed))
        [(name, count)] = told.items()
        assert count == 2
        assert name in {
            *(f"tenant/{tenant}/{of}" for of in ("total", "requests", "slots", "usd_hour", "usd_day", "usd_month")),
            f"session/{tenant}/tokens",
            f"session/{tenant}/usd",
        }
        for trip in trips:
            await trip.final("a", tail=DONE)
            await trip.land()

    play(scenario)


def test_a_request_too_large_for_a_minute_is_refused_shadowed_or_observed() -> None:
    """By the rule of its tenant."""

    async def scenario(loop: VirtualLoop) -> None:
        large = {"size": Size(2000, 40), "tenant": "vip"}
        desk = Desk(loop)
        assert (await refused(desk.take_off("a", **large))).reason is Reason.TOO_LARGE
        await (await desk.take_off("a", **large, observed=True)).land()
        assert desk.held("tenant") == {"tenant/vip/total": 2040, "tenant/vip/requests": 1}
        assert [event.reason for event in desk.observer.of(Observed)] == [Reason.TOO_LARGE]
        desk = Desk(loop, Ledger, with_tenant(name="vip", shadow=frozenset({"tpm"})))
        await (await desk.take_off("a", **large)).land()
        assert [event.limit for event in desk.observer.of(Shadowed)] == ["tenant/vip/total"]

    play(scenario)


@pytest.mark.parametrize("limit", LIMITS)
def test_an_observed_request_goes_into_debt_and_is_told(kind: type[Ledger], limit: str) -> None:
    """What would have been its refusal is told; it pays like any other, so that the next is judged rightly."""
    given, reason = LIMITS[limit]
    policy = replace(POLICY, tenants={**POLICY.tenants, "agent": Tenant("agent", (), "", **given)})

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind, policy)
        trips = [await desk.take_off("a", tenant="agent", observed=True) for _ in range(12)]
        assert [event.reason for event in desk.observer.of(Observed)] == [reason] * 2
        assert not desk.observer.of(Overshot)
        assert (await refused(desk.take_off("a", tenant="agent"))).reason is reason
        for trip in trips:
            await trip.final("a", tail=DONE)
            await trip.land()
        own = {key: amount for key, amount in desk.capacity.held().items() if not key.startswith("upstream")}
        [amount] = own.values() or [0]
        assert amount == pytest.approx({"rpm": 12, "tpm": 720, "session": 720, "concurrency": 0}.get(limit, 12 * USED))

    play(scenario)


# Tenants that nobody listed.


def test_unlisted_tenants_do_not_notice_one_another(kind: type[Ledger]) -> None:
    """Each has the whole allowance, whatever slashes are in its name."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        for name in ("x", "y", "x/slots", "x%2Fslots", "vip/total"):
            trips = [await desk.take_off("a", tenant=name) for _ in range(2)]
            assert (await refused(desk.take_off("a", tenant=name))).reason is Reason.TENANT_CONCURRENCY
            for trip in trips:
                await trip.land()
        assert desk.allowances.unlisted == 5
        assert not desk.held("tenant/vip/")

    play(scenario)


def test_where_nothing_is_limited_nothing_is_taken() -> None:
    """A tenant without limits costs nothing at all, and nobody is remembered for it."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, Ledger, with_anybody())
        takes = desk.capacity.takes
        for name in ("default", "x", "y"):
            async with desk.flights.board(desk.asking(tenant=name), "a"):
                pass
        assert desk.capacity.takes == takes
        assert desk.allowances.unlisted == 0
        assert not desk.flights._own

    play(scenario)


def test_memory_for_tenants_is_bounded(kind: type[Ledger]) -> None:
    """Of those not heard of for long, one that is whole again goes first; what it lost is counted, if it had to be."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind, with_anybody(tpm=600, dollars=Dollars(20.0)), most=3)
        await fly(desk, tenant="spender")
        for name in ("free", "quiet"):
            await fly(desk, tenant=name, endpoint=Endpoint.COUNT_TOKENS, size=Size(0, 0))
        await asyncio.sleep(60)
        await fly(desk, tenant="newcomer")
        assert _tenants(desk) == {"spender", "quiet", "newcomer"}
        assert desk.allowances.forgotten_in_use == 0
        held = await desk.take_off("a", tenant="quiet")
        await fly(desk, tenant="another")
        assert _tenants(desk) == {"quiet", "newcomer", "another"}
        assert desk.allowances.forgotten_in_use == 1
        await held.land()

    play(scenario)


def _tenants(desk: Desk) -> set[str]:
    """Unlisted tenants that are counted."""
    found = {key.split("/")[1] for key in desk.store if key.startswith("tenant")}
    return found - desk.policy.tenants.keys()


def test_whoever_is_told_of_later_finds_the_counter_it_took_from(kind: type[Ledger]) -> None:
    """Books that are open keep their tenant and session, however many come meanwhile."""

    async def scenario(loop: VirtualLoop) -> None:
        policy = replace(with_anybody(concurrency=2), sessions=SessionLimits(max_tokens=1000, limit=2))
        desk = Desk(loop, kind, policy, most=2)
        trip = await desk.take_off("a", tenant="x")
        await trip.land()
        for i in range(20):
            await fly(desk, tenant=f"t{i}", session=Session(f"s{i}"))
        await trip.final("a", tail=DONE)
        assert desk.left("session/x/s/tokens") == 940
        assert desk.allowances.unlisted <= 3
        for i in range(5):
            await fly(desk, tenant=f"t{i}", session=Session(f"s{i}"))
        assert "x" not in _tenants(desk)
        assert (desk.allowances.unlisted, len(desk.allowances.sessions)) == (2, 2)

    play(scenario)


@pytest.mark.parametrize("seed", range(20))
def test_who_is_declared_anew_is_not_forgotten_by_an_earlier_word(seed: int) -> None:
    """Forgotten for a newcomer and back at the same moment: whichever call is faster, both are counted."""

    async def scenario(loop: VirtualLoop) -> None:
        policy = replace(with_anybody(concurrency=1), sessions=SessionLimits(max_tokens=1000, limit=1))
        desk = Desk(loop, Suspending, policy, most=1)
        assert isinstance(desk.capacity, Suspending)
        desk.capacity._rng = random.Random(seed)
        await fly(desk, tenant="x")
        await desk.settle_down()
        trips = await asyncio.gather(desk.take_off("a", tenant="y"), desk.take_off("a", tenant="x"))
        counted = {key for key in desk.store if key.split("/")[1] in ("x", "y")}
        assert counted == {f"{of}" for name in "xy" for of in (f"tenant/{name}/slots", f"session/{name}/s/tokens")}
        assert (await refused(desk.take_off("a", tenant="x"))).reason is Reason.TENANT_CONCURRENCY
        for trip in trips:
            await trip.land()

    play(scenario)


# What an engine's cache holds.


def test_room_in_a_cache_moves_and_comes_back(kind: type[Ledger], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the slot: at most one upstream holds it, and none when the stream has ended."""
    for name, tokens in (("a", 90), ("b", 70)):
        monkeypatch.setitem(PRICES, name, PRICES[name] + claims(**{f"upstream__{name}__kv": tokens}))

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        desk.store |= {f"upstream/{name}/kv": Watermark(KvRules()) for name in "ab"}
        trip = await desk.take_off("ab")
        held = [desk.held("upstream/a/kv") | desk.held("upstream/b/kv")]
        await trip.failed("a", 503)
        held.append(desk.held("upstream/a/kv") | desk.held("upstream/b/kv"))
        await trip.final("b", tail=DONE)
        await trip.land()
        held.append(desk.held("upstream/a/kv") | desk.held("upstream/b/kv"))
        assert held == [{"upstream/a/kv": 90}, {"upstream/b/kv": 70}, {}]

    play(scenario)


# What was really used.


def test_what_was_really_used_is_told_once(kind: type[Ledger]) -> None:
    """By usage; nothing where nobody served; the input where its client left before an answer."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        served, failed, left = [await desk.take_off("a") for _ in range(3)]
        for _ in range(2):
            await served.final("a", tail=DONE)
            await failed.final("", 503)
            await left.final("a", 0, flags=LEFT)
        for trip in (served, failed, left):
            await trip.land()
        with suppress(Rejected):
            async with desk.flights.board(desk.asking(), "a"):
                raise Rejected(Reason.LANE_FULL)
        assert desk.used == [("t1", Size(50, 10)), ("t2", Size(0, 0)), ("t3", Size(60, 0))]

    play(scenario)


# Cancellation, failure, and days like any other.


@pytest.mark.parametrize("moment_ms", [0, 0.5, 1, 2, 3, 4, 6, 8, 10, 15])
@pytest.mark.parametrize("observed", [False, True])
def test_cancelled_at_any_moment_nothing_stays_taken_or_pinned(moment_ms: float, observed: bool) -> None:  # noqa: FBT001
    """While its counters come into being, while they are taken, while it is charged into debt, while it gives back."""

    async def scenario(loop: VirtualLoop) -> None:
        for seed in range(20):
            desk = Desk(loop, Suspending, replace(POLICY, sessions=SessionLimits(max_tokens=150)))
            assert isinstance(desk.capacity, Suspending)
            desk.capacity._rng = random.Random(seed)
            trips = [Trip(desk, desk.asking(tenant="x", observed=observed), "a") for _ in range(3)]
            await asyncio.sleep(moment_ms / 1000)
            for trip in trips:
                trip.task.cancel()
            await asyncio.gather(*(trip.task for trip in trips), return_exceptions=True)
            await desk.settle_down()
            await asyncio.sleep(GRACE_S + 1)
            await desk.flights.sweep()
            await desk.settle_down()
            assert not desk.capacity.broken_off
            assert all(not known.pins for known in _pinned(desk))
            gone = [trip for trip in trips if not trip._away.is_set()]
            used = {key: amount for key, amount in desk.capacity.held().items() if "/x/" in key}
            kept = 100 * (3 - len(gone))
            assert used.get("session/x/s/tokens", 0) == kept
            assert used.get("tenant/x/slots", 0) == 0

    play(scenario)


def test_a_call_that_fails_leaves_nothing_open() -> None:
    """Capacity that is away raises; what was pinned is let go, and the next call declares anew."""

    async def scenario(loop: VirtualLoop) -> None:
        for name in ("tune", "take"):
            desk = Desk(loop, Suspending)
            working = getattr(desk.capacity, name)

            async def broken(_: object) -> None:
                await asyncio.sleep(0.1)
                raise ConnectionError

            setattr(desk.capacity, name, broken)
            for _ in range(2):
                with pytest.raises(ConnectionError):
                    await desk.take_off("a", tenant="x")
            assert all(not known.pins for known in _pinned(desk))
            setattr(desk.capacity, name, working)
            trips = [await desk.take_off("a", tenant="x") for _ in range(2)]
            await refused(desk.take_off("a", tenant="x"))
            for trip in trips:
                await trip.land()

    play(scenario)


class Day:
    """One random day of a few tenants and sessions, listed and not: failovers, cuts, cancellations, late records.

    tight: so little memory that tenants and sessions are forgotten all the time.
    """

    def __init__(self, loop: VirtualLoop, seed: int, kind: type[Ledger], *, tight: bool) -> None:
        self.rng = random.Random(seed)
        self.tight = tight
        sessions = SessionLimits(max_tokens=900, max_usd=20.0, idle_s=20.0 if tight else 1e6, limit=2 if tight else 99)
        policy = replace(with_anybody(tpm=900, rpm=60, concurrency=2, dollars=Dollars(15.0)), sessions=sessions)
        policy = with_tenant(policy, concurrency=3, tpm=5000, rpm=60, sessions=None)
        self.desk = Desk(loop, kind, policy, most=2 if tight else 99)
        if isinstance(self.desk.capacity, Suspending):
            self.desk.capacity._rng = self.rng
        self.trips: list[Trip] = []
        self.refused = 0

    async def run(self) -> None:
        desk = self.desk
        sweeping = asyncio.ensure_future(self._sweep())
        await asyncio.gather(*(self._one() for _ in range(self.rng.randint(1, 14))))
        await asyncio.sleep(GRACE_S + 2)
        assert not sweeping.done()
        sweeping.cancel()
        await desk.settle_down()
        self._check()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1)
            await self.desk.flights.sweep()

    async def _one(self) -> None:
        rng, desk = self.rng, self.desk
        await asyncio.sleep(rng.uniform(0, 5))
        tenant = rng.choice(["agent", "x", "y", "z/y"])
        more = {"session": Session(rng.choice(["s", "t"]), derived=rng.random() < 0.2), "observed": rng.random() < 0.2}
        trip = Trip(desk, desk.asking(tenant=tenant, **more), rng.choice(["a", "b", "ab", "ba"]))
        self.trips.append(trip)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.choice([0, 0.001, 0.003, 0.01]))
            trip.task.cancel()
        try:
            await trip.start()
        except (Rejected, asyncio.CancelledError):
            return
        await self._report(trip)

    async def _report(self, trip: Trip) -> None:
        rng = self.rng
        served = rng.choice([*trip.order, ""])
        steps: list[Any] = []
        for number, name in enumerate(trip.order, 1):
            if name == served:
                break
            flags = rng.choice([frozenset(), TIMEOUT, REFUSED, LEFT])
            steps.append((trip.failed, (name, rng.choice([0, 429, 503])), {"attempt": number, "flags": flags}))
        tail = rng.choice([DONE, {}, {"events": 5}, DONE | {"in": 400}, DONE | {"cached": 30, "reasoning": 4}])
        status, flags = rng.choice([200, 200, 0]) if served else 503, rng.choice([frozenset(), LEFT])
        steps.append((trip.final, (served, status), {"tail": tail, "flags": flags}))
        steps.append((self._end, (trip,), {}))
        steps += rng.sample(steps[:-1], k=rng.choice([0, 0, 1]))
        if rng.random() < 0.3:
            steps.remove(rng.choice(steps[:-1]))
        if rng.random() < 0.5:
            rng.shuffle(steps)
        for step, arguments, more in steps:
            await asyncio.sleep(rng.choice([0, 0.001, 1, GRACE_S + 2]))
            await step(*arguments, **more)
        await self._end(trip)

    async def _end(self, trip: Trip) -> None:
        trip._over.set()
        if self.rng.random() < 0.3:
            trip.task.cancel()
        await asyncio.gather(trip.task, return_exceptions=True)

    def _check(self) -> None:
        desk = self.desk
        assert (desk.flights.unsettled, desk.flights._own) == (0, {})
        assert not isinstance(desk.capacity, Suspending) or not desk.capacity.broken_off
        assert all(not known.pins for known in _pinned(desk))
        known = {key for each in _pinned(desk) if each.declared for key in each.keys if "*" not in key}
        unlisted = {key for key in desk.store if key.split("/")[0] == "session" or key.split("/")[1] in _tenants(desk)}
        assert unlisted == known
        assert all(counter.used >= 0 for counter in desk.store.values() if isinstance(counter, Slots | Budget))
        assert not any(counter.used for counter in desk.store.values() if isinstance(counter, Slots))
        flown = [trip.flight for trip in self.trips if trip._away.is_set()]
        assert sorted(ticket for ticket, _ in desk.used) == sorted(flight.request.ticket for flight in flown)
        if not self.tight:
            self._check_used(flown)

    def _check_used(self, flown: Sequence[Any]) -> None:
        """What was taken of every key and not given back is what was used of it."""
        expected: Counter[str] = Counter()
        for flight in flown:
            assert flight.used is not None
            unknown = flight._served == "" and flight.used == flight.request.size and flight.used.output
            dollars = (flight.cost or 0.0) + (
                max(c.amount for c in flight.allowance if "usd" in c.key) if unknown else 0
            )
            for claim in flight.allowance:
                kind = claim.key.rpartition("/")[2]
                used = {"slots": 0, "requests": 1, "total": flight.used.total, "tokens": flight.used.total}
                expected[claim.key] += used.get(kind, dollars)
        held = {key: amount for key, amount in self.desk.capacity.held().items() if not key.startswith("upstream")}
        assert held == pytest.approx({key: amount for key, amount in expected.items() if amount})
        for key, amount in held.items():
            counter = self.desk.store[key]
            if isinstance(counter, Budget):
                assert counter.used == pytest.approx(amount)


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("rounds", range(5))
def test_random_days_of_tenants_and_sessions_balance(kind: type[Ledger], rounds: int, tight: bool) -> None:  # noqa: FBT001
    """100 of them for each; the seed of one that fails is told.

    What was taken of every key is given back or equals what was used, every counter belongs to somebody who is known,
    nothing is pinned, and each request that departed was settled once.
    """
    for seed in range(rounds * 100, (rounds + 1) * 100):
        try:
            play(lambda loop, seed=seed: Day(loop, seed, kind, tight=tight).run())
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
