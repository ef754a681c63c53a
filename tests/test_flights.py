"""Open books: what is taken comes back exactly once, whatever is reported, in whatever order, or never."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from extproc.allowances import Allowances
from extproc.breakers import Breakers
from extproc.core.affinity import Affinity
from extproc.core.breaker import Outcome, Signal, State
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget
from extproc.core.capacity import Ask, Claim, Option, Store
from extproc.core.events import AttemptFailed, Overshot, Settled, SizesMoved
from extproc.core.flight import Flight
from extproc.core.forecast import Pace
from extproc.core.policy import (
    Accounting,
    BreakerRules,
    Dollars,
    Policy,
    Prices,
    RetryRules,
    Route,
    SessionLimits,
    Tenant,
    Upstream,
)
from extproc.core.quota import account_of, purse, route_place, upstream_place
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Dialect, Request, Size, Usage
from extproc.core.retries import RetryBudget
from extproc.core.spend import PriceList
from extproc.flights import EVICTED, LEASE_S, MOST_CLOSED, Flights
from extproc.ports import Record, RecordKind
from tests.doubles import Ledger, Observer, Suspending, VirtualLoop, claims, play, request

KINDS = [Ledger, Suspending]
GRACE_S = 15.0
BUCKET = 10_000
PRICES = {
    "a": claims(upstream__a__slots=1, upstream__a__m__total=100, upstream__a__m__requests=1),
    "b": claims(upstream__b__slots=1, upstream__b__m__total=100, upstream__b__m__requests=1),
}
CENT = 10_000.0
"""A price of a cent a token, in dollars per million."""
RATES = {"a": Prices(1 * CENT, 2 * CENT), "b": Prices(3 * CENT, 6 * CENT)}
A, B = 1.4, 4.2
"""Dollars that the usual request of 60 + 40 tokens costs at each."""
POLICY = Policy(
    upstreams={
        name: Upstream(
            name, "openai", frozenset(Dialect), breaker=BreakerRules(failures=3, paced=5), prices={"m": (RATES[name],)}
        )
        for name in "ab"
    },
    routes=(),
    lanes={},
    tenants={
        "default": Tenant("default", ("P1",), "P1"),
        "vip": Tenant("vip", ("P1",), "P1", tpm=1000, rpm=4, concurrency=2),
        "agent": Tenant(
            "agent",
            ("P1",),
            "P1",
            dollars=Dollars(50.0, 60.0),
            sessions=SessionLimits(max_tokens=1000, max_usd=30.0, idle_s=600.0),
        ),
    },
    any_tenant=Tenant("*", ("P1",), "P1", tpm=1000, concurrency=2, dollars=Dollars(20.0)),
)
DONE = {"finish": "stop", "done": "1", "in": 50, "out": 10}
USUAL_QUOTA = {"slots": 1, "requests": 1, "total": 100}
LEFT = frozenset({"downstream_remote_reset"})
TIMEOUT = frozenset({"upstream_request_timeout"})
REFUSED = frozenset({"upstream_connection_failure"})


def served_by(provider: str, *models: str) -> Policy:
    """Both upstreams are of `provider`, and `a` serves what fits `models`."""
    upstreams = {name: replace(upstream, provider=provider) for name, upstream in POLICY.upstreams.items()}
    return replace(POLICY, upstreams=upstreams, routes=(Route("any", models, ("a",)),))


@pytest.fixture(params=KINDS, ids=["memory", "suspending"])
def kind(request: pytest.FixtureRequest) -> type[Ledger]:
    """Capacity that answers at once, and capacity that suspends."""
    return request.param


class Desk:
    """Flights with everything around them, and the limiter's part played by `taken`."""

    def __init__(
        self, loop: VirtualLoop, kind: type[Ledger] = Ledger, policy: Policy = POLICY, *, most: int = 50_000
    ) -> None:
        self.loop = loop
        self.policy = policy
        self.store: Store = {
            **{f"upstream/{name}/slots": Slots(99) for name in "ab"},
            **{f"upstream/{name}/m/total": TokenBucket(1e-9, BUCKET, BUCKET, loop.time()) for name in "ab"},
            **{f"upstream/{name}/m/requests": TokenBucket(1e-9, BUCKET, BUCKET, loop.time()) for name in "ab"},
        }
        for tenant in policy.tenants.values():
            self.store |= account_of(tenant).counters(loop.time(), 0.0)
        for place, dollars in (
            *((route_place(route), route.dollars) for route in policy.routes),
            *((upstream_place(upstream), upstream.dollars) for upstream in policy.upstreams.values()),
        ):
            self.store |= purse(place, dollars, frozenset(), loop.time(), 0.0)
        self.prices = PRICES
        self.capacity = kind(loop, self.store)
        self.observer = Observer()
        self.breakers = Breakers(policy.upstreams.values(), loop, self.observer, chance=lambda: 0.0)
        self.pace = Pace()
        self.affinity = Affinity()
        self.retries = RetryBudget(RetryRules(share=0.0, least_per_s=0.1))
        self.freed = 0
        self.learned: list[tuple[str, Usage]] = []
        self.used: list[tuple[str, Size]] = []
        self.price_list = PriceList(policy.upstreams)
        self.allowances = Allowances(policy, self.capacity, loop, most=most)
        self.flights = Flights(
            policy,
            self.capacity,
            self.allowances,
            self.breakers,
            loop,
            self.pace,
            self.observer,
            grace_s=GRACE_S,
            affinity=self.affinity,
            rates=self._rates,
            freed=self._freed,
            learned=lambda _, upstream, usage, *, complete: self.learned.append((upstream, usage)),  # noqa: ARG005
            settled=lambda request, used: self.used.append((request.ticket, used)),
            retries=self.retries,
        )
        self.tickets = 0

    def _rates(self, names: tuple[str, ...], model: str) -> Mapping[str, Prices]:
        return self.price_list.rates(names, model, self.loop.time())

    def _freed(self) -> None:
        self.freed += 1

    def asking(self, **changes: Any) -> Request:
        self.tickets += 1
        return request(id=f"id-{self.tickets}", ticket=f"t{self.tickets}", arrived=self.loop.time(), **changes)

    async def take_off(self, order: str = "ab", *, upfront: str = "", **changes: Any) -> Trip:
        """A request that has departed, and whose stream stays open until `land`."""
        return await Trip(self, self.asking(**changes), order, upfront).start()

    async def settle_down(self) -> None:
        """Time for what is on its way."""
        await asyncio.sleep(0.1)

    def left(self, key: str) -> float:
        """What is left of a budget."""
        budget = self.store[key]
        assert isinstance(budget, Budget)
        return round(budget.free_at(self.loop.time()), 6)

    def held(self, place: str = "upstream") -> dict[str, float]:
        """What is out, by key; the tenant's rate limits refill, so only the book tells."""
        return {key: amount for key, amount in self.capacity.held().items() if key.startswith(place)}


class Trip:
    """One request between board and landing."""

    def __init__(self, desk: Desk, one: Request, order: str, upfront: str = "") -> None:
        self.desk = desk
        self.request = one
        self.order = tuple(order)
        self.upfront = upfront
        self.flight: Flight
        self._over = asyncio.Event()
        self._away = asyncio.Event()
        self.task = asyncio.ensure_future(self._fly())

    async def start(self) -> Trip:
        waiting = asyncio.ensure_future(self._away.wait())
        await asyncio.wait([waiting, self.task], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.task.done():
            self.task.result()
        return self

    async def _fly(self) -> None:
        async with self.desk.flights.board(self.request, self.order) as self.flight:
            first = self.order[0]
            asks = [Ask(self.request.ticket, (Option(first, self.desk.prices[first]),))]
            [answer] = await Ledger.take(self.desk.capacity, asks)  # the limiter sees its calls through
            assert answer.option is not None
            self.flight.depart(self.order, self.desk.prices, self.desk.loop.time())
            kinds = {name: Accounting.UPFRONT if name in self.upfront else Accounting.ACTUAL for name in "ab"}
            self.flight.accounting = kinds
            self._away.set()
            await self._over.wait()

    async def land(self) -> None:
        self._over.set()
        await self.task

    def about(self, kind: RecordKind, upstream: str, status: int, **more: Any) -> Record:
        return record(kind, self.request.ticket, upstream, status, **more)

    async def final(self, upstream: str, status: int = 200, **more: Any) -> None:
        await self.desk.flights.record(self.about(RecordKind.FINAL, upstream, status, **more))

    async def failed(self, upstream: str, status: int = 503, **more: Any) -> None:
        """An attempt's record knows the request's id only."""
        about = record(RecordKind.ATTEMPT, "", upstream, status, request_id=self.request.id, **more)
        await self.desk.flights.record(about)


def record(kind: RecordKind, ticket: str, upstream: str, status: int, **more: Any) -> Record:
    usual = {"flags": frozenset(), "details": "", "attempt": 1, "duration_s": 2.0, "first_token_s": 0.5}
    return Record(kind, ticket, upstream, status, **{**usual, **more})


def running(ticket: str, upstream: str) -> Record:
    return record(RecordKind.RUNNING, ticket, upstream, 200)


@pytest.mark.parametrize("order", ["record first", "end first"])
def test_record_and_end_may_come_in_any_order(kind: type[Ledger], order: str) -> None:
    """Either way: slots back at the stream's end, tokens by usage, one Settled, the books closed."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off(tenant="vip")
        assert (len(desk.flights), desk.flights.unsettled) == (1, 1)
        if order == "record first":
            await trip.final("a", tail=DONE)
            assert desk.held() == {"upstream/a/slots": 1, "upstream/a/m/total": 60, "upstream/a/m/requests": 1}
            await trip.land()
        else:
            await trip.land()
            assert desk.held() == {"upstream/a/m/total": 100, "upstream/a/m/requests": 1}
            assert (len(desk.flights), desk.flights.unsettled) == (0, 1)
            await trip.final("a", tail=DONE)
        assert desk.held() == {"upstream/a/m/total": 60, "upstream/a/m/requests": 1}
        assert desk.held("tenant") == {"tenant/vip/requests": 1, "tenant/vip/total": 60}
        [settled] = desk.observer.of(Settled)
        assert (settled.upstream, settled.status, settled.attempts, settled.finish) == ("a", 200, 1, "stop")
        assert (settled.usage, settled.first_token_s, settled.client_gone) == (Usage(50, 10), 0.5, False)
        assert desk.flights.unsettled == 0
        assert desk.learned == [("a", Usage(50, 10))]

    play(scenario)


def test_a_record_that_comes_twice_counts_once(kind: type[Ledger]) -> None:
    """While the books are open and after; even if it says something else the second time."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off()
        for out in (10, 10, 900):
            await trip.final("a", tail=DONE | {"out": out})
        await trip.land()
        await trip.final("a", tail=DONE)
        assert desk.held() == {"upstream/a/m/total": 60, "upstream/a/m/requests": 1}
        assert len(desk.observer.of(Settled)) == len(desk.learned) == 1

    play(scenario)


def test_a_record_that_never_comes_is_replaced_by_the_estimate(kind: type[Ledger]) -> None:
    """After the grace period, marked unknown; until then the books stay open."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off(tenant="vip")
        await trip.land()
        await asyncio.sleep(GRACE_S - 1)
        await desk.flights.sweep()
        assert (desk.flights.unsettled, desk.observer.of(Settled)) == (1, [])
        await asyncio.sleep(1.5)
        await desk.flights.sweep()
        await desk.flights.sweep()
        [settled] = desk.observer.of(Settled)
        assert (settled.upstream, settled.status, settled.usage) == ("", 0, None)
        assert desk.flights.unsettled == 0
        assert desk.held() == {"upstream/a/m/total": 100, "upstream/a/m/requests": 1}
        assert desk.held("tenant") == {"tenant/vip/requests": 1, "tenant/vip/total": 100}
        await trip.final("a", tail=DONE)
        assert len(desk.observer.of(Settled)) == 1

    play(scenario)


def test_a_running_request_is_never_swept(kind: type[Ledger]) -> None:
    """However long it takes."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off()
        await asyncio.sleep(3600)
        await desk.flights.sweep()
        assert (desk.flights.unsettled, desk.observer.of(Settled)) == (1, [])
        await trip.land()

    play(scenario)


def test_breakers_hear_what_has_left_an_upstream_and_since_when_it_was_there(kind: type[Ledger]) -> None:
    """Whether it ended or moved on; each once, whatever is told later."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        told: list[tuple[str, float]] = []
        desk.breakers.ended = lambda *left: told.append(left)  # type: ignore[method-assign]
        start = loop.time()
        trip = await desk.take_off("ab")
        await asyncio.sleep(1)
        await trip.failed("a", 503)
        assert told == [("a", start)]
        await trip.failed("a", 503)
        await asyncio.sleep(1)
        await trip.land()
        await trip.failed("b", 503)
        assert told == [("a", start), ("b", pytest.approx(start + 1))]

    play(scenario)


def test_failover_moves_slot_and_reservation(kind: type[Ledger]) -> None:
    """At once, as soon as the failed attempt is told; the first upstream keeps only its request."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ab")
        await trip.failed("a", 503, error="server_error/-")
        assert desk.held() == {
            "upstream/a/m/requests": 1,
            "upstream/b/slots": 1,
            "upstream/b/m/total": 100,
            "upstream/b/m/requests": 1,
        }
        [failed] = desk.observer.of(AttemptFailed)
        assert (failed.upstream, failed.status, failed.error, failed.ticket) == ("a", 503, "server_error/-", "t1")
        await trip.final("b", attempt=2, tail=DONE)
        await trip.land()
        assert desk.held() == {"upstream/a/m/requests": 1, "upstream/b/m/total": 60, "upstream/b/m/requests": 1}
        assert desk.observer.of(Settled)[0].attempts == 2

    play(scenario)


def test_a_failover_into_debt_is_told(kind: type[Ledger]) -> None:
    """By how much it is in debt: the upstream is charged all the same, and nothing new is taken there."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ab")
        await desk.capacity.take([Ask("x", (Option("b", (Claim("upstream/b/m/total", BUCKET - 30.0),)),))])
        await trip.failed("a")
        [overshot] = desk.observer.of(Overshot)
        assert (overshot.key, overshot.amount) == ("upstream/b/m/total", pytest.approx(70))
        await trip.land()

    play(scenario)


def test_usage_beyond_its_estimate_is_no_overshoot_while_there_is_room(kind: type[Ledger]) -> None:
    """Only what goes into debt was admitted above a limit."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("a")
        await trip.final("a", tail=DONE | {"in": 500})
        await trip.land()
        assert desk.held()["upstream/a/m/total"] == 510
        assert not desk.observer.of(Overshot)

    play(scenario)


@pytest.mark.parametrize("landed", [False, True])
def test_a_failed_attempt_told_after_the_outcome_is_still_settled(kind: type[Ledger], landed: bool) -> None:  # noqa: FBT001
    """The final record came first: the failed upstream gets its tokens back when its own record comes."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ab")
        await trip.final("b", attempt=2, tail=DONE)
        if landed:
            await trip.land()
        assert desk.held()["upstream/a/m/total"] == 100
        assert desk.flights.unsettled == 1
        await trip.failed("a", 503)
        await trip.land()
        assert desk.held() == {"upstream/a/m/requests": 1, "upstream/b/m/total": 60, "upstream/b/m/requests": 1}
        assert desk.flights.unsettled == 0

    play(scenario)


def test_a_failed_attempt_that_is_never_told_gets_its_tokens_back(kind: type[Ledger]) -> None:
    """After the grace period, because it is known who served."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ab")
        await trip.final("b", tail=DONE)
        await trip.land()
        await asyncio.sleep(GRACE_S + 1)
        await desk.flights.sweep()
        assert desk.held() == {"upstream/a/m/requests": 1, "upstream/b/m/total": 60, "upstream/b/m/requests": 1}
        assert len(desk.observer.of(Settled)) == 1

    play(scenario)


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"status": 429}, {"requests": 1}),
        ({"status": 400}, {"requests": 1}),
        ({"status": 0, "flags": REFUSED}, {}),
        ({"status": 503, "flags": REFUSED}, {}),
        ({"status": 0, "flags": TIMEOUT}, {"total": 60, "requests": 1}),
        ({"status": 504, "flags": TIMEOUT}, {"total": 60, "requests": 1}),
        ({"status": 0, "flags": frozenset({"upstream_remote_reset"})}, {"total": 60, "requests": 1}),
        ({"status": 0, "flags": LEFT}, {"slots": 1, "total": 100, "requests": 1}),
        ({"status": 200, "flags": TIMEOUT}, {"slots": 1, "total": 100, "requests": 1}),
    ],
)
def test_a_failed_attempt_gives_back_by_how_it_ended(
    kind: type[Ledger], more: dict[str, Any], kept: dict[str, float]
) -> None:
    """Refused: all tokens; never sent: its request too; cut: all but the input. A client's leaving is no failure."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ab")
        await trip.failed("a", **more)
        held = {key.rpartition("/")[2]: amount for key, amount in desk.held("upstream/a").items()}
        assert held == kept
        await trip.land()

    play(scenario)


def test_a_client_that_leaves_before_the_first_byte_pays_for_the_input(kind: type[Ledger]) -> None:
    """At the upstream and of its quota."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ab", tenant="vip")
        await trip.land()
        await trip.final("a", 0, flags=LEFT)
        assert desk.held() == {"upstream/a/m/total": 60, "upstream/a/m/requests": 1}
        assert desk.held("tenant") == {"tenant/vip/total": 60, "tenant/vip/requests": 1}
        [settled] = desk.observer.of(Settled)
        assert (settled.client_gone, settled.status, settled.upstream) == (True, 0, "a")
        assert desk.breakers.by_name["a"].failures == 0

    play(scenario)


def test_a_client_that_leaves_before_anything_was_sent_pays_nothing(kind: type[Ledger]) -> None:
    """No upstream was chosen yet: its tokens come back, those of the upstream after the grace period."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ab", tenant="vip")
        await trip.land()
        await trip.final("", 0, flags=LEFT, attempt=0)
        assert desk.held("tenant") == {"tenant/vip/requests": 1}
        await asyncio.sleep(GRACE_S + 1)
        await desk.flights.sweep()
        assert desk.held() == {"upstream/a/m/requests": 1}

    play(scenario)


@pytest.mark.parametrize(
    ("tail", "kept"),
    [({"events": 7}, 67), ({"events": -3}, 60), ({"events": "many"}, 100), ({}, 100), (DONE | {"events": 7}, 60)],
)
def test_a_client_that_leaves_in_the_middle_pays_what_it_saw(
    kind: type[Ledger], tail: dict[str, Any], kept: float
) -> None:
    """Of a stream the output seen, unless usage or nothing is known. Its leaving says nothing about the upstream."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("a")
        await trip.final("a", 200, flags=LEFT, tail=tail)
        await trip.land()
        assert desk.held()["upstream/a/m/total"] == kept
        assert desk.observer.of(Settled)[0].client_gone
        assert desk.breakers.by_name["a"].failures == 0

    play(scenario)


def test_an_answer_without_a_stream_is_not_priced_by_events(kind: type[Ledger]) -> None:
    """Events are counted of streams only; a JSON answer without usage keeps the estimate."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("a", stream=False)
        await trip.final("a", 200, tail={"events": 1})
        await trip.land()
        assert desk.held()["upstream/a/m/total"] == 100

    play(scenario)


def test_an_answer_that_never_began_in_time_costs_the_input_and_counts(kind: type[Ledger]) -> None:
    """Envoy gave up on it by itself and no attempt's record tells of that, so the final one does."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("a", tenant="vip")
        await trip.final("a", 504, details="response_timeout", flags=TIMEOUT)
        await trip.land()
        assert desk.held() == {"upstream/a/m/total": 60, "upstream/a/m/requests": 1}
        assert desk.held("tenant") == {"tenant/vip/total": 60, "tenant/vip/requests": 1}
        assert desk.breakers.by_name["a"].failures == 1

    play(scenario)


@pytest.mark.parametrize(
    ("given_s", "status", "flags", "failures"),
    [
        (0.2, 0, TIMEOUT, 0),
        (4.9, 0, TIMEOUT, 0),
        (5.0, 0, TIMEOUT, 1),
        (0.2, 0, REFUSED, 1),
        (0.2, 200, TIMEOUT, 1),
    ],
)
def test_a_caller_in_a_hurry_declares_nobody_sick(
    given_s: float, status: int, flags: frozenset[str], failures: int
) -> None:
    """A timeout that was the caller's own says nothing about the upstream, where that was not enough. Other failures
    do, as does a silence behind the first token, which no caller limits.
    """

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        trip = await desk.take_off("ab", stream=True)
        limited(trip, given_s, 10.0)
        await trip.failed("a", status, flags=flags)
        assert desk.breakers.by_name["a"].failures == failures
        await trip.land()

    play(scenario)


def limited(trip: Trip, given_s: float, limit_s: float) -> None:
    """Its time limits, as dispatch tells them: the caller's, and that of the settings; 10 s for a first token."""
    trip.flight.given_s, trip.flight.limit_s, trip.flight.first_token_s = given_s, limit_s, 10.0


@pytest.mark.parametrize(("moves_after_s", "told", "failures"), [(5, True, 1), (26, True, 0), (5, False, 0)])
def test_a_limit_of_all_attempts_is_what_the_ones_before_have_left_of_it(
    moves_after_s: float,
    failures: int,
    *,
    told: bool,
) -> None:
    """An upstream that was asked late may have had no time; where nobody knows how much it had, it says nothing."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        trip = await desk.take_off("ab", stream=False)
        limited(trip, 30.0, 900.0)
        await asyncio.sleep(moves_after_s)
        if told:
            await trip.failed("a", 503)
        await trip.final("b", 504, attempt=2, details="response_timeout", flags=TIMEOUT)
        assert desk.breakers.by_name["b"].failures == failures
        await trip.land()

    play(scenario)


@pytest.mark.parametrize(("shown", "moved"), [(400, False), (404, False), (429, True), (503, True), (0, True)])
def test_an_attempt_whose_answer_went_to_the_caller_moves_nothing_on(
    kind: type[Ledger],
    shown: int,
    moved: bool,  # noqa: FBT001
) -> None:
    """The router shows a client's own error to the client; anything else it tries at the next upstream."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ab")
        await trip.failed("a", 429, shown=shown)
        assert ("upstream/b/slots" in desk.held()) == moved
        await trip.land()

    play(scenario)


def test_who_keeps_an_answers_state_is_remembered() -> None:
    """So that a request that builds on it can be sent there."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        trip = await desk.take_off("ab")
        await trip.final("b", tail=DONE | {"state": "resp_1"})
        await trip.land()
        assert desk.affinity.upstream_of("resp_1") == "b"

    play(scenario)


def test_every_attempt_failed_costs_the_tenant_a_request(kind: type[Ledger]) -> None:
    """Tokens come back everywhere; nobody is named as having served."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ab", tenant="vip")
        await trip.failed("a", 503)
        await trip.failed("b", 503, attempt=2)
        await trip.final("b", 503)
        await trip.land()
        assert desk.held() == {"upstream/a/m/requests": 1, "upstream/b/m/requests": 1}
        assert desk.held("tenant") == {"tenant/vip/requests": 1}
        assert desk.flights.unsettled == 0

    play(scenario)


def test_a_refused_request_costs_its_tenant_nothing(kind: type[Ledger]) -> None:
    """Refused or gone before departure: all of the quota comes back, and nothing is settled."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        with pytest.raises(Rejected):  # noqa: PT012 - what is raised inside is the point
            async with desk.flights.board(desk.asking(tenant="vip")):
                assert desk.held("tenant") == {f"tenant/vip/{of}": n for of, n in USUAL_QUOTA.items()}
                raise Rejected(Reason.LANE_FULL)
        assert not desk.held("tenant")
        assert desk.flights.unsettled == 0
        assert not desk.observer.events

    play(scenario)


def test_refused_by_concurrency_burns_no_requests_per_minute(kind: type[Ledger]) -> None:
    """The quota is taken whole or not at all; the time told is how long its requests usually take."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trips = [await desk.take_off("a", tenant="vip") for _ in range(2)]
        with pytest.raises(Rejected) as refused:
            await desk.take_off("a", tenant="vip")
        assert (refused.value.reason, refused.value.retry_after) == (Reason.TENANT_CONCURRENCY, 1.0)
        assert desk.held("tenant") == {"tenant/vip/slots": 2, "tenant/vip/requests": 2, "tenant/vip/total": 200}
        await asyncio.sleep(10)
        for trip in trips:
            await trip.land()
        trips = [await desk.take_off("a", tenant="vip") for _ in range(2)]
        with pytest.raises(Rejected) as refused:
            await desk.take_off("a", tenant="vip")
        assert refused.value.retry_after == pytest.approx(10, abs=0.1)
        for trip in trips:
            await trip.land()

    play(scenario)


def test_a_spent_quota_is_refused_with_what_is_left_of_it(kind: type[Ledger]) -> None:
    """And with the time after which the same request would be let in; other tenants do not notice."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("a", tenant="vip")
        await desk.capacity.take([Ask("x", (Option("x", (Claim("tenant/vip/total", 850.0),)),))])
        with pytest.raises(Rejected) as refused:
            await desk.take_off("a", tenant="vip")
        assert refused.value.reason is Reason.TENANT_QUOTA
        assert refused.value.retry_after == pytest.approx(3, abs=0.1)
        tokens, requests = refused.value.tokens, refused.value.requests
        assert tokens is not None
        assert requests is not None
        assert (tokens.limit, requests.limit, requests.remaining) == (1000, 4, 3)
        assert tokens.remaining == pytest.approx(50, abs=1)
        assert tokens.reset_s == pytest.approx(57, abs=1)
        await asyncio.sleep(refused.value.retry_after)
        await (await desk.take_off("a", tenant="vip")).land()
        await (await desk.take_off("a")).land()
        await trip.land()

    play(scenario)


def test_a_tenant_without_token_limits_is_shown_none() -> None:
    """What is not limited has no window."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        assert desk.flights._window("tenant/vip/slots") is None
        assert desk.flights._window("?") is None

    play(scenario)


@pytest.mark.parametrize("moment_ms", [0, 0.5, 1, 2, 3, 4, 6, 8, 10])
@pytest.mark.parametrize("again", [False, True])
def test_cancelled_while_the_quota_is_asked_for_nothing_stays_taken(moment_ms: float, again: bool) -> None:  # noqa: FBT001
    """At any moment of the call, once or twice: the call is seen through and what it got is given back."""

    async def scenario(loop: VirtualLoop) -> None:
        for seed in range(20):
            desk = Desk(loop, Suspending)
            assert isinstance(desk.capacity, Suspending)
            desk.capacity._rng = random.Random(seed)
            trip = Trip(desk, desk.asking(tenant="vip"), "a")
            await asyncio.sleep(moment_ms / 1000)
            for _ in range(1 + again):
                trip.task.cancel()
                await asyncio.sleep(0)
            await asyncio.gather(trip.task, return_exceptions=True)
            await desk.settle_down()
            assert not {key for key in desk.held("tenant") if key.endswith("slots")}
            assert not desk.capacity.broken_off
            if desk.flights.unsettled == 0:
                assert not desk.held("tenant")

    play(scenario)


def test_a_quota_call_that_fails_after_its_caller_left_is_nobodys_trouble() -> None:
    """There is nothing to give back, and nothing is raised into the loop."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, Suspending)
        troubles: list[Any] = []
        loop.set_exception_handler(lambda _, context: troubles.append(context))

        async def broken(_: object) -> None:
            await asyncio.sleep(0.1)
            raise ConnectionError

        desk.capacity.take = broken  # type: ignore[method-assign, assignment]
        trip = Trip(desk, desk.asking(tenant="vip"), "a")
        await asyncio.sleep(0.05)
        trip.task.cancel()
        await asyncio.sleep(1)
        assert trip.task.cancelled()
        assert not troubles

    play(scenario)


def test_whoever_is_cancelled_while_giving_back_still_wakes_the_next() -> None:
    """A slot that comes back without a word would be a slot that nobody takes."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, Suspending)
        trip = await desk.take_off("a")
        before = desk.freed
        trip._over.set()
        await asyncio.sleep(0)
        trip.task.cancel()
        await asyncio.gather(trip.task, return_exceptions=True)
        await desk.settle_down()
        assert desk.held() == {"upstream/a/m/total": 100, "upstream/a/m/requests": 1}
        assert desk.freed == before + 1

    play(scenario)


def test_requests_of_a_former_process_hold_a_slot_until_they_end(kind: type[Ledger]) -> None:
    """Each is counted once, however often it is heard of, and let go at its end or when it falls silent."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        for _ in range(3):
            for ticket in ("old-1", "old-2"):
                await desk.flights.record(running(ticket, "a"))
            await asyncio.sleep(LEASE_S / 2)
            await desk.flights.sweep()
        assert desk.held() == {"upstream/a/slots": 2}
        for _ in range(2):
            await desk.flights.record(record(RecordKind.FINAL, "old-1", "a", 200))
        assert desk.held() == {"upstream/a/slots": 1}
        await asyncio.sleep(LEASE_S)
        await desk.flights.sweep()
        await desk.flights.sweep()
        assert not desk.held()
        assert not desk.observer.of(Settled)

    play(scenario)


def test_a_former_request_that_moves_takes_its_slot_along(kind: type[Ledger]) -> None:
    """Heard of at another upstream, it has failed over; none of the two counts it twice or for ever."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        await desk.flights.record(running("old", "a"))
        await desk.flights.record(running("old", "b"))
        assert desk.held() == {"upstream/b/slots": 1}
        await desk.flights.record(record(RecordKind.FINAL, "old", "b", 200))
        assert not desk.held()

    play(scenario)


def test_what_is_not_known_here_is_not_adopted(kind: type[Ledger]) -> None:
    """A foreign upstream has no slots to hold, and the end of an unknown request means nothing."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        await desk.flights.record(running("old", "elsewhere"))
        await desk.flights.record(record(RecordKind.FINAL, "older", "a", 200))
        await desk.flights.record(record(RecordKind.ATTEMPT, "", "a", 200))
        trip = await desk.take_off("a")
        await desk.flights.record(trip.about(RecordKind.RUNNING, "a", 200))
        assert desk.held("upstream/a/slots") == {"upstream/a/slots": 1}
        await trip.land()

    play(scenario)


def test_an_end_that_comes_while_silent_requests_are_swept_is_no_trouble() -> None:
    """The sweep suspends between them; whoever comes first lets go, once."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, Suspending)
        for i in range(10):
            await desk.flights.record(running(f"old-{i}", "a"))
        await asyncio.sleep(LEASE_S + 1)
        ends = [desk.flights.record(record(RecordKind.FINAL, f"old-{i}", "a", 200)) for i in reversed(range(10))]
        await asyncio.gather(desk.flights.sweep(), *ends)
        assert not desk.held()

    play(scenario)


@pytest.mark.parametrize(
    ("record", "state"),
    [
        ({"status": 503}, "failures"),
        ({"status": 500, "error": "server_error/-"}, "failures"),
        ({"status": 401, "error": "-/invalid_api_key"}, "credential"),
        ({"status": 429, "error": "-/insufficient_quota"}, "terminal"),
        ({"status": 403, "error": "-/invalid_api_key"}, "credential"),
        ({"status": 403}, "failures"),
        ({"status": 0, "flags": TIMEOUT}, "failures"),
        ({"status": 0, "flags": REFUSED}, "failures"),
        ({"status": 429}, "paced"),
        ({"status": 429, "error": "-/rate_limit_exceeded"}, "paced"),
        ({"status": 400, "error": "invalid_request_error/-"}, ""),
        ({"status": 404}, ""),
        ({"status": 0, "flags": LEFT}, ""),
        ({"status": 0, "flags": LEFT | TIMEOUT}, ""),
        ({"status": 200}, ""),
    ],
)
def test_what_a_failed_attempt_says_about_its_upstream(record: dict[str, Any], state: str) -> None:
    """A failure, that it wants less, or nothing: a request's own fault and a client that left count against nobody."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        trip = await desk.take_off("ab")
        await trip.failed("a", **record)
        breaker = desk.breakers.by_name["a"]
        assert {"failures": breaker.failures, "paced": breaker.paced} == {
            "failures": int(state == "failures"),
            "paced": int(state == "paced"),
        }
        assert (breaker.verdict.sign or "") == (state if state in ("terminal", "credential") else "")
        assert desk.breakers.allows("a") == (breaker.verdict.sign is None)
        await trip.land()

    play(scenario)


@pytest.mark.parametrize(
    ("status", "error", "kept"), [(400, "malformed_request/-", 0.0), (503, "malformed/json", 100.0)]
)
def test_only_an_answer_that_is_none_is_paid_and_not_what_a_provider_refuses_in_such_words(
    kind: type[Ledger], status: int, error: str, kept: float
) -> None:
    """A type of error of its own may begin alike."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ab")
        await trip.failed("a", status, error=error)
        assert desk.held().get("upstream/a/m/total", 0.0) == kept
        await trip.final("b", tail=DONE)
        await trip.land()
        assert desk.observer.of(AttemptFailed)[0].charged is (kept > 0)

    play(scenario)


def test_a_missing_model_that_only_its_caller_named_says_nothing() -> None:
    """Or whoever asks for what does not exist would close an engine to everybody."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, policy=served_by("vllm", "*"))
        trip = await desk.take_off("ab")
        await trip.failed("a", status=404, error="NotFoundError/model_not_found")
        assert desk.breakers.by_name["a"].failures == 0
        await trip.land()
        trip = await desk.take_off("ab")
        await trip.failed("a", status=403, error="invalid_request_error/model_not_found")
        assert desk.breakers.by_name["a"].failures == 0
        await trip.land()

    play(scenario)


REQUESTS = ("one", "two", "three")


async def borne(desk: Desk, bodies: Sequence[str], status: int, error: str) -> int:
    """How many failures of `a` it bears, for requests with these bodies one after the other."""
    count = 0
    for body in bodies:
        trip = await desk.take_off("ab", model="m", fingerprint=body)
        await trip.failed("a", status=status, error=error)
        await trip.land()
        count += desk.breakers.allows("a")
    return count


@pytest.mark.parametrize("models", ["*", "m"])
@pytest.mark.parametrize(
    ("provider", "status", "error", "most"),
    [
        ("xai", 403, "-/permission-denied", 2),
        ("gemini", 403, "PERMISSION_DENIED/403", 2),
        ("anthropic", 403, "permission_error/-", 2),
        ("bedrock", 403, "AccessDeniedException/-", 2),
        ("compatible", 403, "-/-", 2),
        ("bedrock", 403, "ExpiredTokenException/-", 0),
        ("compatible", 403, "-/invalid_api_key", 0),
        ("compatible", 401, "-/-", 0),
        ("xai", 403, "-/content_policy_violation", 3),
    ],
)
def test_what_our_key_may_not_do_is_a_failure_like_others(
    provider: str, status: int, error: str, most: int, models: str
) -> None:
    """It may be for what was asked, so one says no more than any failure, whoever names the model; where nobody is
    known by that key, one is enough. A filter's refusal says nothing.
    """

    async def scenario(loop: VirtualLoop) -> None:
        assert await borne(Desk(loop, policy=served_by(provider, models)), REQUESTS, status, error) == most

    play(scenario)


def test_what_our_key_may_not_do_for_one_request_is_one_sign() -> None:
    """However often its client sends it, and wherever it goes: a single prompt closes nothing to everybody. Of others
    each is a sign.
    """

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, policy=served_by("gemini", "m"))
        assert await borne(desk, ["same"] * 9, 403, "PERMISSION_DENIED/403") == 9
        assert desk.breakers.by_name["a"].failures == 1
        trip = await desk.take_off("ab", model="m", fingerprint="same")
        await trip.failed("b", status=403, error="PERMISSION_DENIED/403")
        await trip.final("b", 200, attempt=2, tail={"error": "PERMISSION_DENIED/403"})
        await trip.land()
        assert desk.breakers.by_name["b"].failures == 0
        assert await borne(desk, REQUESTS, 403, "PERMISSION_DENIED/403") == 1

    play(scenario)


@pytest.mark.parametrize(
    ("error", "exact", "any_name"),
    [
        ("NotFoundError/model_not_found", 2, 3),
        ("invalid_request_error/404", 3, 3),
        ("-/-", 3, 3),
        ("NotFoundError/404", 3, 3),
    ],
)
@pytest.mark.parametrize("provider", ["vllm", "sglang"])
def test_only_a_model_that_an_engine_has_not_speaks_against_it(
    provider: str, error: str, exact: int, any_name: int
) -> None:
    """Where its name is written here. What else is not there (an endpoint, an answer to go on from) a caller chose."""

    async def scenario(loop: VirtualLoop) -> None:
        for models, most in (("m", exact), ("*", any_name)):
            assert await borne(Desk(loop, policy=served_by(provider, models)), REQUESTS, 404, error) == most

    play(scenario)


@pytest.mark.parametrize(("error", "models", "most"), [("-/403", "*", 2), ("-/403", "m", 2), ("-/404", "*", 3)])
def test_what_an_error_in_a_stream_says_of_a_name_is_what_its_status_would(error: str, models: str, most: int) -> None:
    """It comes under 200, and names its status itself."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, policy=replace(POLICY, routes=(Route("any", (models,), ("a",)),)))
        borne = 0
        for _ in range(3):
            trip = await desk.take_off("ab", model="m")
            await trip.final("a", 200, tail={"error": error})
            await trip.land()
            borne += desk.breakers.allows("a")
        assert borne == most

    play(scenario)


@pytest.mark.parametrize(("status", "tail", "kept"), [(503, {}, 60), (200, {"events": 7}, 67), (200, {}, 100)])
def test_one_that_was_evicted_while_it_ran_is_booked_as_if_its_client_had_left(
    kind: type[Ledger], status: int, tail: dict[str, Any], kept: float
) -> None:
    """A retry has taken its place: input and output seen are paid for, and nothing is held against the upstream. It is
    told as what it was.
    """

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        earlier, trip = await desk.take_off("a"), await desk.take_off("a")
        await earlier.failed("a", 503)
        await trip.final("a", status, details=EVICTED, tail=tail)
        await trip.land()
        assert desk.held()["upstream/a/m/total"] == kept
        [settled] = desk.observer.of(Settled)
        assert (settled.evicted, settled.client_gone, settled.given_up) == (True, False, True)
        assert (settled.upstream, settled.status, settled.fault) == ("a", 200 if status == 200 else 0, "")
        assert desk.breakers.by_name["a"].failures == 1
        await earlier.land()

    play(scenario)


@pytest.mark.parametrize(
    ("tail", "more", "stream", "failures"),
    [
        (DONE, {}, True, 0),
        ({"finish": "stop"}, {}, True, 0),
        ({"done": "1"}, {}, True, 0),
        ({"events": 3, "cut": "1"}, {}, True, 2),
        ({"events": 3}, {}, True, 0),
        ({}, {}, False, 0),
        (DONE | {"error": "overloaded_error/-"}, {}, True, 2),
        (DONE | {"error": "invalid_request_error/-"}, {}, True, 1),
        (DONE | {"bad": "empty"}, {}, True, 2),
        ({"error": "malformed/-"}, {}, False, 2),
        ({"error": "server_error/-"}, {}, False, 2),
        ({"events": 3}, {"flags": TIMEOUT}, True, 1),
        ({"events": 3}, {"flags": LEFT}, True, 1),
    ],
)
def test_what_an_answer_says_about_its_upstream(
    tail: dict[str, Any],
    more: dict[str, Any],
    stream: bool,  # noqa: FBT001
    failures: int,
) -> None:
    """A complete answer ends a row of failures; a stream cut short, or an error inside, is one more.

    A stream that the filters could not read says nothing against it.
    """

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        earlier, trip = await desk.take_off("a"), await desk.take_off("a", stream=stream)
        await earlier.failed("a", 503)
        await trip.final("a", 200, tail=tail, **more)
        assert desk.breakers.by_name["a"].failures == failures
        for each in (earlier, trip):
            await each.land()

    play(scenario)


@pytest.mark.parametrize(
    ("kind", "more", "stream", "told"),
    [
        (RecordKind.FINAL, {}, True, [0.5]),
        (RecordKind.FINAL, {}, False, []),
        (RecordKind.FINAL, {"attempt": 2}, True, []),
        (RecordKind.FINAL, {"first_token_s": None}, True, []),
        (RecordKind.FINAL, {"status": 503}, True, []),
        (RecordKind.FINAL, {"flags": LEFT}, True, [0.5]),
        (RecordKind.FINAL, {"status": 0, "flags": LEFT, "first_token_s": None}, True, [2.0]),
        (RecordKind.RUNNING, {}, True, [0.5]),
        (RecordKind.ATTEMPT, {"status": 503}, True, []),
    ],
)
def test_how_long_a_first_token_took_is_told_of_streams(
    kind: RecordKind,
    more: dict[str, Any],
    stream: bool,  # noqa: FBT001
    told: list[float],
) -> None:
    """Of the first upstream that was asked; by a client that gave up, how long it waited in vain."""

    async def scenario(loop: VirtualLoop) -> None:
        desk, seen = Desk(loop), []
        desk.breakers.record = lambda *_, evidence=None, **__: seen.append(evidence)  # type: ignore[method-assign]
        trip = await desk.take_off("a", stream=stream, model="m")
        about = trip.about(kind, "a", **{"status": 200, "tail": DONE, **more})
        await desk.flights.record(about)
        assert [one.first_token_s for one in seen if one.first_token_s is not None] == told
        assert all((one.request, one.prompt, one.model) == ("id-1", 60, "m") for one in seen)
        await trip.land()

    play(scenario)


def test_a_first_token_is_told_once() -> None:
    """While the answer runs, and not again when it has ended."""

    async def scenario(loop: VirtualLoop) -> None:
        desk, seen = Desk(loop), []
        desk.breakers.record = lambda *_, evidence=None, **__: seen.append(evidence)  # type: ignore[method-assign]
        trip = await desk.take_off("a")
        for _ in range(3):
            await desk.flights.record(trip.about(RecordKind.RUNNING, "a", 200))
        await trip.final("a", tail=DONE)
        assert [one.first_token_s for one in seen] == [0.5, None]
        await trip.land()

    play(scenario)


def test_answers_to_large_prompts_that_are_none_keep_only_those_away() -> None:
    """An upstream that truncates them goes on with others, and is told with the requests that showed it."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        for tail in [{"bad": "json"}, {"cut": "1"}, {"events": 3, "cut": "1"}, {"bad": "short"}, {"bad": "empty"}]:
            trip = await desk.take_off("a", size=Size(20_000, 40))
            await trip.final("a", tail=tail | {"in": 50, "out": 10})
            await trip.land()
        assert desk.breakers.allows("a")
        assert (desk.breakers.fits("a", 20_000), desk.breakers.fits("a", 100)) == (False, True)
        [moved] = desk.observer.of(SizesMoved)
        assert (moved.sizes, moved.shut, moved.requests) == ("16000-63999", True, tuple(f"id-{n}" for n in range(1, 6)))

    play(scenario)


@pytest.mark.parametrize("bad", ["broken", "empty", "short"])
def test_small_calls_whose_answers_are_complete_but_empty_close_no_upstream(bad: str) -> None:
    """Their caller may have asked for just that; whether it is noticed at the upstream or at the end."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        for _ in range(10):
            trip = await desk.take_off("ab")
            await trip.failed("a", 502, error=f"malformed/{bad}")
            await trip.final("b", 200, tail=DONE)
            await trip.land()
        for _ in range(10):
            trip = await desk.take_off("b")
            await trip.final("b", 200, tail=DONE | {"bad": bad})
            await trip.land()
        assert [desk.breakers.allows(name) for name in "ab"] == [True, True]
        assert [desk.breakers.by_name[name].failures for name in "ab"] == [1, 1]
        assert [desk.breakers.fits(name, 60) for name in "ab"] == [False, False]

    play(scenario)


def standing(desk: Desk) -> list[int]:
    """Failures in a row that stand against each upstream."""
    return [desk.breakers.by_name[name].failures for name in "ab"]


async def fail(desk: Desk, order: str = "ab", **about: Any) -> None:
    """A request that fails at every upstream of its order."""
    trip = await desk.take_off(order, fingerprint=about.pop("fingerprint", ""))
    for name in order:
        await trip.failed(name, **about)
    await trip.final("", 503)
    await trip.land()


@pytest.mark.parametrize(("fingerprint", "counted"), [("body/1", 1), ("", 2)])
def test_a_request_that_fails_everywhere_opens_no_breakers(fingerprint: str, counted: int) -> None:
    """However often its client sends it. One that cannot be known again counts at its first upstream each time."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        await fail(desk, status=500, fingerprint=fingerprint)
        assert standing(desk) == [1, 0]
        told = [event.outcome for event in desk.observer.of(AttemptFailed)]
        assert told == [Outcome.FAILURE, Outcome.IGNORED]
        await fail(desk, status=502, fingerprint=fingerprint)
        assert standing(desk) == [counted, 0]

    play(scenario)


def test_a_request_is_known_by_failures_that_are_told_after_its_books_were_closed() -> None:
    """Its outcome comes before its attempts, in another log: they say what they would have said, and once."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        for fingerprint in ("body/1", "body/1", "body/2"):
            trip = await desk.take_off("ab", fingerprint=fingerprint)
            await trip.final("", 503, attempt=2)
            await trip.land()
            await trip.failed("a", 500, attempt=0)
            assert not desk.flights.unsettled
            for _ in range(3):
                await trip.failed("b", 500, attempt=0)
        assert standing(desk) == [2, 0]

    play(scenario)


def attempts(desk: Desk) -> list[tuple[str, str]]:
    """The failed attempts that were told: at whom, and who was asked next."""
    return [(event.upstream, event.following) for event in desk.observer.of(AttemptFailed)]


def test_failed_attempts_are_told_once_though_their_request_was_settled_before(kind: type[Ledger]) -> None:
    """While its books are open and after; the second upstream was asked, too, and has been paid for if it took it."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ab", tenant="agent")
        await trip.final("", 503, attempt=2)
        await trip.land()
        await trip.failed("a", 500, attempt=0)
        assert (attempts(desk), desk.flights.unsettled) == ([("a", "b")], 0)
        for _ in range(2):
            await trip.failed("b", 0, attempt=0, flags=TIMEOUT)
            await trip.failed("a", 500, attempt=0)
        assert attempts(desk) == [("a", "b"), ("b", "")]
        assert len(desk.observer.of(Settled)) == 1
        assert desk.held() == {"upstream/a/m/requests": 1, "upstream/b/m/requests": 1, "upstream/b/m/total": 60}
        assert desk.left("tenant/agent/usd_hour") == pytest.approx(50 - 60 * 0.03)

    play(scenario)


FAILURES: dict[str, dict[str, Any]] = {
    "refused": {"status": 500, "shown": 503},
    "cut": {"status": 0, "flags": TIMEOUT},
    "never sent": {"status": 0, "flags": REFUSED},
}


@pytest.mark.parametrize("end", ["served", "left", "nobody is left"])
@pytest.mark.parametrize("tries", ["ab", "aa"])
@pytest.mark.parametrize("upfront", ["", "ab"])
def test_all_is_paid_for_alike_in_whichever_order_it_is_told(tries: str, end: str, upfront: str) -> None:
    """A request's own record before, between or after those of its failed attempts, and its stream's end whenever."""

    async def flown(loop: VirtualLoop, failures: Sequence[str], told: int, landed: int) -> object:
        desk = Desk(loop)
        trip = await desk.take_off("".join(dict.fromkeys(tries)), upfront=upfront, tenant="agent")
        trip.flight.again = tries == "aa"
        asked = len(failures) + (end != "nobody is left")
        final: dict[str, Any] = {"tail": DONE} if end == "served" else {"status": 0, "flags": LEFT}
        final = {"upstream": "", "status": 503} if end == "nobody is left" else {"upstream": tries[asked - 1], **final}
        steps = [
            partial(trip.failed, tries[number], **FAILURES[how], attempt=0, duration_s=1.0 + number)
            for number, how in enumerate(failures)
        ]
        steps.insert(told, partial(trip.final, **final, attempt=asked))
        steps.insert(landed, trip.land)
        for step in steps:
            await step()
        assert not desk.flights.unsettled
        return desk.held(), desk.left("tenant/agent/usd_hour"), attempts(desk)

    async def scenario(loop: VirtualLoop) -> None:
        most = len(tries) if end == "nobody is left" else len(tries) - 1
        for failures in product(FAILURES, repeat=most):
            usual = await flown(loop, failures, most, most + 1)
            for told, landed in product(range(most), range(most + 2)):
                assert await flown(loop, failures, told, landed) == usual, (failures, told, landed)

    play(scenario)


def test_a_failed_attempt_is_told_however_late_its_record_comes(kind: type[Ledger]) -> None:
    """Its tokens came back when it was given up, and do not come back again."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        left: list[str] = []
        desk.breakers.ended = lambda upstream, _: left.append(upstream)  # type: ignore[method-assign]
        trip = await desk.take_off("ab")
        await trip.final("b", attempt=2, tail=DONE)
        await trip.land()
        await asyncio.sleep(GRACE_S + 1)
        await desk.flights.sweep()
        held = desk.held()
        assert (attempts(desk), desk.flights.unsettled) == ([], 0)
        for _ in range(2):
            await trip.failed("a", 503, attempt=0)
        assert attempts(desk) == [("a", "b")]
        assert (desk.held(), left, standing(desk)) == (held, ["a"], [1, 0])

    play(scenario)


def test_failed_attempts_of_a_request_whose_end_was_never_told_are_told(kind: type[Ledger]) -> None:
    """Its estimate was kept, and stands; an attempt that was cut has cost its input as well, whenever that is told."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop, kind)
        trip = await desk.take_off("ab", tenant="agent")
        await trip.land()
        await asyncio.sleep(GRACE_S + 1)
        await desk.flights.sweep()
        held, left = desk.held(), desk.left("tenant/agent/usd_hour")
        assert held == {"upstream/a/m/total": 100, "upstream/a/m/requests": 1}
        for _ in range(2):
            await trip.failed("a", 0, flags=TIMEOUT, attempt=0)
            await trip.failed("b", 0, flags=REFUSED, attempt=0)
        assert attempts(desk) == [("a", "b"), ("b", "")]
        assert [event.lost for event in desk.observer.of(Settled)] == [True]
        assert (desk.held(), standing(desk)) == (held, [1, 1])
        assert desk.left("tenant/agent/usd_hour") == pytest.approx(left - 60 * 0.01)

    play(scenario)


def test_an_answer_that_was_cut_is_known_when_its_attempt_is_told_late() -> None:
    """It was served, and its attempt has failed all the same; one whose attempt was told before need not be kept."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        cut = frozenset({"upstream_protocol_error"})
        for name in "abb":
            trip = await desk.take_off(name, fingerprint="body/1", stream=True)
            await trip.final(name, 200, flags=cut)
            await trip.land()
            assert not desk.flights.unsettled
            await trip.failed(name, 200, flags=cut)
        assert standing(desk) == [1, 0]
        assert attempts(desk) == []  # its end told of it
        kept = len(desk.flights._closed)
        trip = await desk.take_off("a", stream=True)
        await trip.failed("a", 200, flags=cut)
        await trip.final("a", 200, flags=cut)
        await trip.land()
        assert len(desk.flights._closed) == kept

    play(scenario)


def test_of_requests_whose_failures_are_never_told_only_some_are_kept() -> None:
    """And none that was served at once, or whose every failure was told."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        for told in ("", "a"):
            trip = await desk.take_off("ab")
            for name in told:
                await trip.failed(name, 500)
            await trip.final("b" if told else "a", attempt=1 + len(told), tail=DONE)
            await trip.land()
        assert (desk.flights.unsettled, len(desk.flights._closed)) == (0, 0)
        for _ in range(MOST_CLOSED + 10):
            trip = await desk.take_off("ab")
            await trip.final("", 503, attempt=2)
            await trip.land()
            await trip.failed("a", 500)
        assert (desk.flights.unsettled, len(desk.flights._closed)) == (0, MOST_CLOSED)

    play(scenario)


def test_different_requests_that_fail_everywhere_open_all_breakers() -> None:
    """Each counts at the upstream that it comes to first."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        for name, order in (("a", "ab"), ("b", "ba")):
            for i in range(3):
                assert desk.breakers.allows(name)
                await fail(desk, order, status=500, fingerprint=f"body/{name}{i}")
            assert not desk.breakers.allows(name)

    play(scenario)


def test_a_request_that_fails_at_one_upstream_counts_there_each_time() -> None:
    """The other one answers it."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        for _ in range(3):
            assert desk.breakers.allows("a")
            trip = await desk.take_off("ab", fingerprint="body/1")
            await trip.failed("a", 500)
            await trip.final("b", tail=DONE)
            await trip.land()
        assert not desk.breakers.allows("a")

    play(scenario)


@pytest.mark.parametrize(
    "about",
    [
        {"status": 503},
        {"status": 529},
        {"status": 504},
        {"status": 500, "error": "-/server_is_overloaded"},
        {"status": 500, "error": "-/ServiceUnavailable"},
        {"status": 0, "flags": REFUSED},
        {"status": 0, "flags": frozenset({"no_healthy_upstream"})},
    ],
)
def test_what_no_prompt_brings_about_counts_at_every_upstream(about: dict[str, Any]) -> None:
    """An overload, or a connection that could not be had."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        await fail(desk, fingerprint="body/1", **about)
        assert standing(desk) == [1, 1]

    play(scenario)


SILENCE, CUT_OFF, RESET = ({"status": 0, "flags": frozenset({flag})} for flag in (
    "upstream_request_timeout", "upstream_connection_termination", "upstream_remote_reset"
))  # fmt: skip


@pytest.mark.parametrize(
    "about", [SILENCE, CUT_OFF, RESET, {"status": 502, "error": "malformed/json"}, {"status": 500}]
)
def test_a_prompt_that_is_never_answered_counts_at_its_first_upstream(about: dict[str, Any]) -> None:
    """In whichever way it fails there. Others that fail so open one breaker after the other: that is an outage."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        for _ in range(9):
            await fail(desk, fingerprint="body/1", **about)
        assert standing(desk) == [1, 0]
        for name, order in (("a", "ab"), ("b", "b")):
            for i in range(3):
                await fail(desk, order, fingerprint=f"body/{name}{i}", **about)
            assert not desk.breakers.allows(name)

    play(scenario)


STREAMED = [
    {"error": "InternalServerError/500", "done": "1"},
    {"error": "server_error/-", "done": "1"},
    {"cut": "1"},
    {"bad": "json", "done": "1"},
]


async def stream(desk: Desk, name: str, fingerprint: str, tail: Mapping[str, Any], **more: Any) -> None:
    """A stream that breaks after it has begun."""
    trip = await desk.take_off(name, fingerprint=fingerprint, stream=True)
    await trip.final(name, 200, tail=tail, **more)
    await trip.land()


@pytest.mark.parametrize("tail", STREAMED)
def test_a_prompt_that_breaks_every_stream_opens_one_breaker_at_most(tail: dict[str, Any]) -> None:
    """It counts where it breaks first, until it breaks at another upstream. Others that break so open both."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        for name in "aab" * 5:
            await stream(desk, name, "body/1", tail)
        assert standing(desk) == [2, 0]
        for name in "ab":
            for i in range(3):
                await stream(desk, name, f"body/{name}{i}", tail)
            assert not desk.breakers.allows(name)

    play(scenario)


def test_a_prompt_that_stalls_every_stream_opens_one_breaker_at_most() -> None:
    """Silence is one way to fail, before the first token and behind it."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        await fail(desk, "a", fingerprint="body/1", **SILENCE)
        for _ in range(5):
            await stream(desk, "b", "body/1", {}, flags=frozenset({"stream_idle_timeout"}))
        assert standing(desk) == [1, 0]

    play(scenario)


@pytest.mark.parametrize(
    "tail", [{"error": "overloaded_error/-"}, {"error": "-/503"}, {"error": "UNAVAILABLE/-"}, {"error": "-/529"}]
)
def test_an_overload_in_a_stream_counts_at_every_upstream(tail: dict[str, Any]) -> None:
    """Whoever asks."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        for name in "abab":
            await stream(desk, name, "body/1", tail)
        assert standing(desk) == [2, 2]

    play(scenario)


def test_a_prompt_that_fails_in_another_way_elsewhere_counts_there() -> None:
    """That it is slow at one says nothing of its error at the other."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        await fail(desk, "a", fingerprint="body/1", **SILENCE)
        await fail(desk, "b", fingerprint="body/1", status=500)
        assert standing(desk) == [1, 1]

    play(scenario)


@pytest.mark.parametrize("tail", [{"bad": "json", "in": 5, "out": 1}, {"cut": "1", "in": 5, "out": 1}])
def test_a_large_prompt_that_breaks_everywhere_keeps_its_size_away_from_one_upstream_at_most(
    tail: dict[str, Any],
) -> None:
    """As with breakers: different ones keep it away from both."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        for fingerprints in (["body/1"] * 5, [f"body/b{n}" for n in range(5)]):
            for fingerprint in fingerprints:
                for name in "ab":
                    trip = await desk.take_off(name, size=Size(20_000, 40), fingerprint=fingerprint, stream=True)
                    await trip.final(name, 200, tail=tail)
                    await trip.land()
            assert desk.breakers.fits("b", 20_000)
        for n in range(5):
            trip = await desk.take_off("b", size=Size(20_000, 40), fingerprint=f"body/c{n}", stream=True)
            await trip.final("b", 200, tail=tail)
            await trip.land()
        assert not desk.breakers.fits("a", 20_000)
        assert not desk.breakers.fits("b", 20_000)

    play(scenario)


def test_a_failure_that_is_told_twice_counts_once() -> None:
    """One request that failed once never opens a breaker."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        trip = await desk.take_off("ab")
        for _ in range(10):
            await trip.failed("a", 503)
        assert desk.breakers.by_name["a"].failures == 1
        assert len(desk.observer.of(AttemptFailed)) == 1
        await trip.land()

    play(scenario)


def test_results_of_requests_that_left_before_a_transition_are_ignored() -> None:
    """A breaker that was closed again is not opened by what was sent before."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        trips = [await desk.take_off("ab") for _ in range(5)]
        await asyncio.sleep(1)
        for signal in (Signal.TRIP, Signal.RESTED, Signal.PROBE_OK, Signal.RAMPED):
            desk.breakers.signal("a", signal, "test")
        for trip in trips:
            await trip.failed("a", 503)
            await trip.land()
        assert desk.breakers.by_name["a"].state is State.CLOSED
        assert desk.breakers.by_name["a"].failures == 0

    play(scenario)


def test_failed_attempts_of_unknown_requests_teach_the_breakers() -> None:
    """A former process's requests fail too; of those without any name nobody is charged."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        loop.now += 100
        nameless = await desk.take_off("a", tenant="default")
        for i in range(3):
            await desk.flights.record(record(RecordKind.ATTEMPT, "", "a", 503, request_id=f"gone-{i}" if i else ""))
        assert desk.breakers.by_name["a"].state is State.OPEN
        assert desk.held() == {"upstream/a/slots": 1, "upstream/a/m/total": 100, "upstream/a/m/requests": 1}
        await nameless.land()

    play(scenario)


def test_a_record_without_any_name_belongs_to_nobody() -> None:
    """Not even to a request that came without an id."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        trip = await Trip(desk, request(id="", ticket="t", arrived=loop.time()), "ab").start()
        await desk.flights.record(record(RecordKind.ATTEMPT, "", "a", 503))
        assert desk.held()["upstream/a/slots"] == 1
        await trip.land()

    play(scenario)


def test_an_id_that_is_used_again_belongs_to_the_later_request() -> None:
    """A record by id finds the one that runs, after the earlier one is closed too."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        first, second = [
            await Trip(desk, request(id="same", ticket=ticket, arrived=loop.time()), "ab").start() for ticket in "xy"
        ]
        await first.final("a", tail=DONE)
        await first.land()
        await second.failed("a")
        assert desk.held("upstream/b/slots") == {"upstream/b/slots": 1}
        await second.land()

    play(scenario)


def test_what_answers_take_is_learned() -> None:
    """How long a slot is held, by upstream and tenant, and how fast a model writes a whole answer."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        trip = await desk.take_off("a", tenant="vip")
        await asyncio.sleep(7)
        await trip.final("a", tail=DONE, duration_s=7.0, first_token_s=2.0)
        await trip.land()
        assert (desk.pace.hold_s("a"), desk.pace.hold_s("tenant/vip")) == (7, 7)
        assert desk.pace.output_s("m", 10) == pytest.approx(5)
        cut = await desk.take_off("a")
        await cut.final("a", tail={"out": 10}, duration_s=70.0)
        await cut.land()
        assert desk.pace.output_s("m", 10) == pytest.approx(5)

    play(scenario)


class Traffic:
    """One random day: requests fly, fail over, are cut, their records come in any order, twice, late or never."""

    def __init__(self, loop: VirtualLoop, seed: int, kind: type[Ledger]) -> None:
        self.rng = random.Random(seed)
        self.desk = Desk(loop, kind)
        if isinstance(self.desk.capacity, Suspending):
            self.desk.capacity._rng = self.rng
        self.departed = 0
        self.failed: set[tuple[str, str]] = set()

    async def run(self) -> None:
        desk = self.desk
        sweeping = asyncio.ensure_future(self._sweep())
        flying = [asyncio.ensure_future(self._one()) for _ in range(self.rng.randint(1, 8))]
        flying += [asyncio.ensure_future(self._former(i)) for i in range(self.rng.randint(0, 3))]
        await asyncio.gather(*flying)
        await asyncio.sleep(GRACE_S + LEASE_S + 2)
        assert not sweeping.done()
        sweeping.cancel()
        assert (len(desk.flights), desk.flights.unsettled, desk.flights._by_id, desk.flights._adopted) == (0, 0, {}, {})
        held = desk.capacity.held()
        assert not any(key.endswith("/slots") for key in held)
        assert all(amount > 0 for amount in held.values())
        settled = Counter(event.request.ticket for event in desk.observer.of(Settled))
        assert len(settled) == self.departed
        assert set(settled.values()) <= {1}
        told = Counter((event.ticket, event.upstream) for event in desk.observer.of(AttemptFailed))
        assert told == dict.fromkeys(self.failed, 1)
        assert not isinstance(desk.capacity, Suspending) or not desk.capacity.broken_off

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1)
            await self.desk.flights.sweep()

    async def _one(self) -> None:
        rng = self.rng
        await asyncio.sleep(rng.uniform(0, 5))
        order = rng.choice(["a", "b", "ab", "ba"])
        trip = Trip(self.desk, self.desk.asking(tenant=rng.choice(["vip", "default"])), order, rng.choice(["", "a"]))
        if rng.random() < 0.2:
            await asyncio.sleep(rng.choice([0, 0.001, 0.003, 0.01]))
            trip.task.cancel()
        try:
            await trip.start()
        except (Rejected, asyncio.CancelledError):
            self.departed += trip._away.is_set()
            return
        await self._report(trip)
        self.departed += 1

    async def _report(self, trip: Trip) -> None:
        rng = self.rng
        served = rng.choice([*trip.order, ""])
        records = []
        for number, name in enumerate(trip.order, 1):
            if name == served:
                break
            how = {"attempt": number, "flags": rng.choice([frozenset(), TIMEOUT, REFUSED, LEFT])}
            records.append(partial(trip.failed, name, rng.choice([0, 429, 503]), **how))
        asked = len(records) + bool(served)
        tail = rng.choice([DONE, {}, {"events": 5}, DONE | {"in": 400}])
        status = rng.choice([200, 200, 0]) if served else rng.choice([503, 429, 0])
        flags = rng.choice([frozenset(), LEFT])
        records.append(partial(trip.final, served, status, tail=tail, flags=flags, attempt=asked))
        records.append(partial(self._end, trip))
        if rng.random() < 0.5:
            records.append(rng.choice(records[:-1]))
        if rng.random() < 0.3:
            records.remove(rng.choice(records[:-1]))
        if rng.random() < 0.5:
            rng.shuffle(records)
        for each in records:
            await asyncio.sleep(rng.choice([0, 0.001, 1, GRACE_S + 2]))
            await each()
            if each.func == trip.failed and each.keywords["flags"] != LEFT:
                self.failed.add((trip.request.ticket, each.args[0]))
        await self._end(trip)

    async def _end(self, trip: Trip) -> None:
        trip._over.set()
        if self.rng.random() < 0.3:
            trip.task.cancel()
        await asyncio.gather(trip.task, return_exceptions=True)

    async def _former(self, number: int) -> None:
        rng, ticket = self.rng, f"old-{number}"
        for _ in range(rng.randint(1, 6)):
            await asyncio.sleep(rng.choice([0.5, LEASE_S - 0.01, LEASE_S + 1]))
            kind = rng.choice([RecordKind.RUNNING, RecordKind.RUNNING, RecordKind.FINAL])
            await self.desk.flights.record(record(kind, ticket, rng.choice("ab"), 200))


@pytest.mark.parametrize("rounds", range(10))
def test_random_days_close_every_book(kind: type[Ledger], rounds: int) -> None:
    """500 of them for each kind of capacity; the seed of one that fails is told.

    In the end no slot is held, nothing was returned that was not taken, no book is open, each request that departed was
    settled exactly once, and each failed attempt of which a record came was told exactly once.
    """
    for seed in range(rounds * 50, (rounds + 1) * 50):
        try:
            play(lambda loop, seed=seed: Traffic(loop, seed, kind).run())
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


async def test_two_failures_at_an_only_upstream_are_two() -> None:
    """Envoy's records of attempts carry no number: two of them differ by how long they took."""
    desk = Desk(asyncio.get_running_loop())  # type: ignore[arg-type]
    async with desk.flights.board(request(ticket="t", id="r")) as flight:
        flight.depart(("a",), PRICES, desk.loop.time())
        flight.again = True
        for duration in (0.1, 0.2, 0.2):
            failed = Record(
                kind=RecordKind.ATTEMPT, ticket="", request_id="r", upstream="a", status=503, flags=frozenset(),
                details="", attempt=0, duration_s=duration, first_token_s=None, shown=503,
            )  # fmt: skip
            await desk.flights.record(failed)
    assert len([event for event in desk.observer.events if isinstance(event, AttemptFailed)]) == 2


@pytest.mark.parametrize(
    ("second", "failures", "paced"), [({"status": 503}, 1, 0), ({"flags": TIMEOUT}, 1, 0), ({"status": 429}, 1, 1)]
)
def test_a_request_that_fails_twice_at_an_only_upstream_counts_once(
    second: dict[str, Any], failures: int, paced: int
) -> None:
    """Where the two say different things each counts."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        for times in (1, 2):
            trip = await desk.take_off("a")
            trip.flight.again = True
            await trip.failed("a", 503, duration_s=0.1, shown=503)
            await trip.failed("a", **{"duration_s": 0.2, **second})
            breaker = desk.breakers.by_name["a"]
            assert (breaker.failures, breaker.paced) == (times * failures, times * paced)
            await trip.final("a", 503, attempt=2)
            await trip.land()

    play(scenario)


def test_an_only_upstream_that_fails_and_then_gives_no_answer_has_failed_once() -> None:
    """Whichever way the second attempt went wrong; one that went well is a success, and another request a new sign."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        for failures, tail in ((1, {"bad": "json"}), (2, {"events": 3, "cut": "1"}), (0, DONE)):
            trip = await desk.take_off("a")
            trip.flight.again = True
            await trip.failed("a", 503, shown=503)
            await trip.final("a", tail=tail, attempt=2)
            await trip.land()
            assert desk.breakers.by_name["a"].failures == failures

    play(scenario)


def test_a_second_attempt_is_counted_once_and_as_soon_as_it_begins() -> None:
    """Not at its end: others would borrow meanwhile what is used already. Who does not need it frees it then."""

    async def scenario(loop: VirtualLoop) -> None:
        desk = Desk(loop)
        for fails in (True, False):
            now = loop.time()
            assert desk.retries.lend("default", now)
            assert not desk.retries.lend("default", now)
            trip = await desk.take_off("a")
            trip.flight.again, trip.flight.lent = True, now
            if fails:
                await trip.failed("a", 503, shown=503)
                await asyncio.sleep(9.9)
                assert not desk.retries.lend("default", loop.time())
                await asyncio.sleep(0.2)
            await trip.final("a", tail=DONE, attempt=1 + fails)
            assert desk.retries.lend("default", loop.time())
            await trip.land()
            await asyncio.sleep(30.0)

    play(scenario)
