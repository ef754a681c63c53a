"""What providers say reaches the right counters: by model, by kind, by what kind of refusal it was."""

from __future__ import annotations

import asyncio
import random
from math import inf
from typing import Any

import pytest

from extproc.core.breaker import Outcome
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.capacity import Store
from extproc.core.events import Admitted, AttemptFailed, LimitsMoved, Queued, Settled
from extproc.core.flight import Flight
from extproc.core.policy import Accounting, Kind, Limit, Policy, Upstream
from extproc.core.request import Dialect, Endpoint, Size, Usage
from extproc.pacing import LATE, TOLD_S, Pacing
from extproc.ports import Record, RecordKind
from extproc.shared.memory import MemoryCapacity
from tests.doubles import HandClock, Observer, request

BOTH = frozenset(Dialect)
T = 1000.0


def limit(model: str, kind: Kind, per_minute: float, *, shadow: bool = False) -> Limit:
    return Limit(model, kind, per_minute, per_minute / 6, shadow=shadow)


def upstream(name: str, provider: str, *limits: Limit, **more: Any) -> Upstream:
    return Upstream(name, provider, BOTH, limits=limits, headroom=0.0, **more)


UPSTREAMS = {
    one.name: one
    for one in (
        upstream(
            "a", "openai", limit("m", Kind.TOTAL, 6000), limit("m", Kind.REQUESTS, 600), limit("n", Kind.TOTAL, 6000)
        ),
        upstream(
            "b", "anthropic", limit("*", Kind.INPUT, 6000), limit("*", Kind.OUTPUT, 6000),
            accounting=Accounting.ACTUAL,
        ),
        upstream("gem", "gemini", concurrency=10),
        upstream("learn", "openai", *(Limit("*", kind, inf, inf) for kind in Kind), learn=True),
        upstream("few", "groq", *(Limit("*", kind, inf, inf) for kind in Kind), learn=True, concurrency=7),
        upstream("shadow", "openai", limit("*", Kind.TOTAL, 6000, shadow=True)),
        upstream("groq", "groq", limit("*", Kind.TOTAL, 6000), limit("*", Kind.REQUESTS, 600)),
        upstream("cer", "cerebras", limit("*", Kind.TOTAL, 6000), limit("*", Kind.REQUESTS, 600)),
        upstream("mis", "mistral", limit("*", Kind.TOTAL, 6000), accounting=Accounting.ACTUAL),
        upstream("deaf", "openai", limit("*", Kind.TOTAL, 6000), follow=False),
        upstream("engine", "vllm", limit("*", Kind.TOTAL, 6000)),
        upstream("ramp", "openai", limit("*", Kind.TOTAL, 6e9), ramp=True),
        upstream("sun", "openai", limit("*", Kind.TOTAL, 6e9)),
    )
}  # fmt: skip
POLICY = Policy(upstreams=UPSTREAMS, routes=(), lanes={}, tenants={})


def counters() -> Store:
    store: Store = {}
    for one in UPSTREAMS.values():
        store[f"upstream/{one.name}/slots"] = Slots(one.concurrency or (4 if one.learn else inf))
        for its in one.limits:
            if its.per_minute < inf:
                key = f"upstream/{one.name}/{its.model}/{its.kind}"
                store[key] = TokenBucket(its.per_minute / 60, its.capacity, its.capacity, T, shadow=its.shadow)
    return store


class Desk:
    """Pacing with counters and a clock; records and events by short names."""

    def __init__(self) -> None:
        self.clock = HandClock(T)
        self.capacity = MemoryCapacity(self.clock, counters())
        self.observer = Observer()
        self.freed = 0
        self.pacing = Pacing(
            POLICY,
            self.capacity,
            self.clock,
            self.observer,
            freed=self._freed,
            chance=lambda: 0.5,
            wall=lambda: self.clock.now + 1.79e9,
            ramp_floor=60_000.0,
        )
        self.tickets = 0

    def _freed(self) -> None:
        self.freed += 1

    def after(self, seconds: float) -> Desk:
        self.clock.now += seconds
        return self

    def counter(self, key: str) -> Any:
        return self.capacity.levels()[f"upstream/{key}"]

    def level(self, key: str) -> float:
        return self.counter(key).level_at(self.clock.now)

    def wait(self, key: str) -> float:
        return self.counter(key).wait_for(1.0, self.clock.now)

    def paused(self) -> dict[str, float]:
        """What is paused, and for how long."""
        now = self.clock.now
        found = {k.removeprefix("upstream/"): c.closed_until - now for k, c in self.capacity.levels().items()}
        return {key: round(seconds, 3) for key, seconds in found.items() if seconds > 0}

    def depart(self, *order: str, **changes: Any) -> Flight:
        """A request that was let go now."""
        self.tickets += 1
        flight = Flight(request(**{"ticket": f"t{self.tickets}", "arrived": self.clock.now, **changes}))
        flight.departed = self.clock.now
        self.pacing.observe(Admitted(flight.request, order, 0.0))
        return flight

    def settle(self, flight: Flight, name: str, output: int | None = None, attempts: int = 1) -> None:
        usage = None if output is None else Usage(flight.request.size.input, output)
        self.pacing.observe(Settled(flight.request, name, attempts, 200 if name else 0, usage, 0.0))

    def fail(self, flight: Flight, name: str, following: str = "", *, charged: bool = False) -> None:
        about = name, Outcome.FAILURE, 503, "", flight.request.ticket
        self.pacing.observe(AttemptFailed(*about, following=following, charged=charged))

    def hear(self, name: str, flight: Flight | None, status: int = 200, **more: Any) -> None:
        """A record of now; the answer began just now unless told otherwise."""
        headers = {key.replace("_", "-"): str(value) for key, value in more.pop("headers", {}).items()}
        kind = more.pop("kind", RecordKind.FINAL if status < 400 else RecordKind.ATTEMPT)
        answered_s = self.clock.now - flight.request.arrived if flight else more.get("duration_s", 0.0)
        usual = {"flags": frozenset(), "details": "", "attempt": 1, "duration_s": 0.0, "first_token_s": None}
        usual |= {"answered_s": answered_s}
        asyncio.run(self.pacing.hear(Record(kind, "", name, status, headers=headers, **{**usual, **more}), flight))

    def tick(self) -> None:
        asyncio.run(self.pacing.tick())

    def told(self) -> list[LimitsMoved]:
        return self.observer.of(LimitsMoved)


def tokens(remaining: float | None = None, limit: float | None = 6000) -> dict[str, Any]:
    found = {"x_ratelimit_limit_tokens": limit, "x_ratelimit_remaining_tokens": remaining}
    return {name: int(value) for name, value in found.items() if value is not None}


# Which counter it is about.


def test_headers_speak_of_the_model_that_was_asked() -> None:
    """Each kind of its own bucket; another model's is left alone, and so are other upstreams."""
    desk = Desk()
    flight = desk.depart("a")
    desk.after(1.0)
    headers = tokens(300) | {"x_ratelimit_limit_requests": 600, "x_ratelimit_remaining_requests": 20}
    desk.hear("a", flight, headers=headers)
    assert (desk.level("a/m/total"), desk.level("a/m/requests")) == (300.0, 20.0)
    assert desk.level("a/n/total") == 1000.0
    assert desk.level("b/*/input") == 1000.0
    assert desk.freed == 1


def test_a_provider_that_splits_tokens_has_two_buckets() -> None:
    """And a limit that nobody configured is nobody's."""
    desk = Desk()
    flight = desk.depart("b")
    desk.after(1.0)
    headers = {
        "anthropic_ratelimit_input_tokens_limit": 6000,
        "anthropic_ratelimit_input_tokens_remaining": 200,
        "anthropic_ratelimit_output_tokens_limit": 3000,
        "anthropic_ratelimit_tokens_limit": 60,
        "anthropic_ratelimit_requests_limit": 1,
    }
    desk.hear("b", flight, headers=headers)
    assert desk.level("b/*/input") == 200.0
    assert desk.counter("b/*/output").rate == pytest.approx(50.0)


@pytest.mark.parametrize(
    "more",
    [
        {"answered_s": 6.0, "duration_s": 99.0},
        {"answered_s": None, "duration_s": 10.0, "first_token_s": 1.0},
    ],
)
def test_headers_are_as_old_as_the_answers_first_byte(more: dict[str, Any]) -> None:
    """As the record tells, or as its times do: what was sent since is taken off, and refill added."""
    desk = Desk()
    flight = desk.depart("a", arrived=T - 5.0)  # waited for 5 s
    desk.after(2.0).depart("a")
    desk.after(3.0).hear("a", flight, headers=tokens(100), **more)
    expected = 100.0 + 4.0 * 100.0 - 100.0
    assert desk.level("a/m/total") == pytest.approx(expected)


def test_what_was_sent_since_is_by_the_upstreams_own_count() -> None:
    """As it was taken from the bucket."""
    desk = Desk()
    flight = desk.depart("a")
    desk.after(2.0).depart("a", sizes={"a": Size(110, 40), "b": Size(500, 40)})
    desk.after(3.0).hear("a", flight, headers=tokens(100), answered_s=1.0)
    assert desk.level("a/m/total") == pytest.approx(100.0 + 4.0 * 100.0 - 150.0)


def test_a_running_answer_tells_it_too() -> None:
    """Every few seconds; its end adds nothing."""
    desk = Desk()
    flight = desk.depart("a")
    desk.after(6.0).hear("a", flight, headers=tokens(100), kind=RecordKind.RUNNING, answered_s=1.0)
    assert desk.level("a/m/total") == pytest.approx(600.0)
    moved = len(desk.told())
    desk.after(1.0).hear("a", flight, headers=tokens(100), answered_s=1.0)
    assert len(desk.told()) == moved


def test_answers_of_the_same_moment_are_heard_once() -> None:
    """At hundreds a second, reading every one would tell nothing more."""
    desk = Desk()
    flights = [desk.depart("a") for _ in range(3)]
    desk.after(1.0).hear("a", flights[0], headers=tokens(500))
    desk.after(0.005).hear("a", flights[1], headers=tokens(100))
    assert desk.level("a/m/total") == pytest.approx(500.0, abs=1.0)
    desk.after(0.006).hear("a", flights[2], headers=tokens(100))
    assert desk.level("a/m/total") == pytest.approx(100.0)


def test_a_stranger_is_heard_where_it_can_only_be_about_one_model() -> None:
    """A request of a former process: its model is not known."""
    desk = Desk()
    desk.hear("a", None, headers=tokens(100), duration_s=1.0)
    assert desk.level("a/m/total") == 1000.0
    desk.hear("groq", None, headers=tokens(100), duration_s=1.0)
    assert desk.level("groq/*/total") == 100.0
    desk.hear("nobody", None, headers=tokens(100))
    desk.hear("gem", None, 429, duration_s=1.0, headers={"retry_after": 3})
    assert desk.paused() == {"gem/slots": 3.0}


def test_what_is_not_an_answer_of_the_provider_says_nothing() -> None:
    """No headers, no status, or an error that went to the caller: its attempt was reported."""
    desk = Desk()
    flight = desk.depart("a")
    desk.hear("a", flight)
    desk.hear("a", flight, 0, headers=tokens(0))
    desk.hear("a", flight, 429, headers={"retry_after": 5}, kind=RecordKind.FINAL)
    desk.hear("a", flight, 200, headers=tokens(0), kind=RecordKind.ATTEMPT)
    desk.hear("a", flight, 0, headers=tokens(0), kind=RecordKind.ATTEMPT)
    assert (desk.paused(), desk.told()) == ({}, [])


def test_many_names_of_models_are_not_remembered_for_ever() -> None:
    """Callers choose them."""
    desk = Desk()
    for i in range(10_000):
        desk.settle(desk.depart("groq", model=f"m{i}"), "groq", 1)
    assert len(desk.pacing._lines) <= 4096


# What was sent.


def test_what_is_not_priced_in_tokens_counts_as_a_request() -> None:
    """Counting tokens, images and the like."""
    desk = Desk()
    flight = desk.depart("a")
    desk.after(1.0).depart("a", endpoint=Endpoint.COUNT_TOKENS)
    desk.after(1.0)
    desk.hear("a", flight, headers=tokens(100) | {"x_ratelimit_remaining_requests": 30}, answered_s=0.0)
    assert desk.level("a/m/total") == pytest.approx(300.0)
    assert desk.level("a/m/requests") == pytest.approx(30.0 + 2 * 10.0 - 1.0)


def test_output_of_running_answers_is_held_until_they_end() -> None:
    """Where what was used is charged."""
    desk = Desk()
    first, second = desk.depart("b"), desk.depart("b", size=Size(60, 100))
    desk.after(2.0)
    headers = {
        "anthropic_ratelimit_output_tokens_limit": 6000,
        "anthropic_ratelimit_output_tokens_remaining": 400,
    }
    desk.hear("b", first, headers=headers, answered_s=1.0)
    assert desk.level("b/*/output") == pytest.approx(500.0 - 140.0)
    desk.settle(first, "b", 10)
    desk.settle(second, "b")
    third = desk.depart("b")
    desk.after(0.5).hear("b", third, headers=headers)
    assert desk.level("b/*/output") == pytest.approx(360.0)  # 400 - 40 again


def test_a_failover_takes_what_is_held_along() -> None:
    """It is counted where the request is, and nowhere when nobody serves it."""
    desk = Desk()
    pacers = desk.pacing._pacers
    flight = desk.depart("b", "mis", "a")
    assert pacers["upstream/b/*/output"]._unwritten == 40.0
    desk.fail(flight, "b", "mis")
    desk.fail(flight, "b", "mis")
    assert (pacers["upstream/b/*/output"]._unwritten, pacers["upstream/mis/*/total"]._unwritten) == (0.0, 40.0)
    desk.settle(flight, "a", 5)  # that the second failed is reported later, if at all
    desk.fail(flight, "mis", "a")
    assert pacers["upstream/mis/*/total"]._unwritten == 0.0
    assert pacers["upstream/a/m/total"]._counted.since(0.0) == 100.0
    assert pacers["upstream/b/*/input"]._counted.since(0.0) == 0.0
    lost = desk.depart("b")
    desk.pacing.observe(AttemptFailed("b", Outcome.FAILURE, 0, "", lost.request.ticket))  # it may have been counted
    assert pacers["upstream/b/*/input"]._counted.since(0.0) == 60.0
    desk.pacing.observe(Queued(lost.request, 1.0))
    desk.settle(lost, "")
    unknown = desk.depart("b")
    desk.settle(unknown, "")
    desk.settle(unknown, "b", 9)
    assert pacers["upstream/b/*/output"]._unwritten == 0.0
    assert not desk.pacing._trips


@pytest.mark.parametrize("order", ["attempt first", "outcome first"])
@pytest.mark.parametrize(("following", "charged", "counted"), [("", False, 0.0), ("b", False, 0.0), ("b", True, 100.0)])
def test_what_was_refused_is_counted_nowhere(order: str, following: str, charged: bool, counted: float) -> None:  # noqa: FBT001
    """Neither where it was refused nor behind it, where nobody was asked; but an answer that was none was counted."""
    desk = Desk()
    flight = desk.depart("a", "b")
    steps = [
        lambda: desk.fail(flight, "a", following, charged=charged),
        lambda: desk.settle(flight, following, 40 if following else None, attempts=1 + bool(following)),
    ]
    for step in steps if order == "attempt first" else reversed(steps):
        desk.after(0.1)
        step()
    pacers = desk.pacing._pacers
    assert pacers["upstream/a/m/total"]._counted.since(0.0) == counted
    assert pacers["upstream/b/*/input"]._counted.since(0.0) == (60.0 if following else 0.0)
    assert not desk.pacing._trips


def test_those_whose_failures_are_never_told_are_forgotten() -> None:
    """A few are remembered."""
    desk = Desk()
    for _ in range(LATE + 5):
        desk.settle(desk.depart("a", "b"), "b", 1, attempts=2)
    assert (len(desk.pacing._trips), len(desk.pacing._late)) == (0, LATE)


@pytest.mark.parametrize("seed", range(20))
def test_books_balance_whatever_happens_in_whatever_order(seed: int) -> None:
    """Nothing is held when all is settled."""
    rng, desk = random.Random(seed), Desk()
    names, flying = ["a", "b", "mis", "groq"], []
    for _ in range(500):
        desk.after(rng.random())
        if rng.random() < 0.5:
            order = rng.sample(names, rng.randint(1, 4))
            size = Size(rng.randrange(500), rng.randrange(500))
            flying.append((desk.depart(*order, size=size, model=rng.choice("mn")), order))
        elif flying:
            flight, order = rng.choice(flying)
            if rng.random() < 0.5:
                desk.fail(flight, rng.choice(order))
            else:
                desk.settle(flight, rng.choice([*order, ""]), rng.choice([None, 0, 700]))
                flying = [one for one in flying if one[0] is not flight]
    for flight, order in flying:
        desk.settle(flight, order[-1])
    assert {key: p._unwritten for key, p in desk.pacing._pacers.items() if p._unwritten} == {}, f"seed {seed}"
    assert not desk.pacing._trips


def test_requests_whose_end_is_never_told_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest first, and with what was held for them."""
    monkeypatch.setattr("extproc.pacing.TRIPS", 3)
    desk = Desk()
    for _ in range(10):
        desk.depart("b")
    assert len(desk.pacing._trips) == 3
    assert desk.pacing._pacers["upstream/b/*/output"]._unwritten == 3 * 40.0


# Refusals.


def test_a_429_with_a_word_how_long_pauses_exactly_that_model() -> None:
    """All its buckets, until then; the slots and every other upstream and model go on."""
    desk = Desk()
    desk.hear("a", desk.depart("a"), 429, headers={"retry_after": 20}, error="rate_limit_error/-")
    assert desk.paused() == {"a/m/total": 20.0, "a/m/requests": 20.0}
    assert desk.wait("a/m/total") == pytest.approx(20.0)
    desk.after(19.0).hear("a", desk.depart("a"), 429, headers={"retry_after_ms": 500})
    assert desk.paused() == {"a/m/total": 1.0, "a/m/requests": 1.0}
    desk.after(1.1)
    assert desk.paused() == {}


def test_headers_that_explain_a_429_are_followed_besides() -> None:
    """The level is what remains; the rate yields a little, for the model only."""
    desk = Desk()
    desk.hear("a", desk.depart("a"), 429, headers=tokens(50) | {"retry_after_ms": 1500})
    assert desk.paused() == {"a/m/total": 1.5, "a/m/requests": 1.5}
    assert desk.level("a/m/total") == 50.0
    assert desk.counter("a/m/total").rate == pytest.approx(95.0)
    assert desk.counter("a/n/total").rate == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("name", "headers", "seconds"),
    [
        ("a", tokens(None), 1.0),  # no word at all
        ("a", tokens(50), 0.5),  # (100 - 50) at 100 per second
        ("cer", {"x_ratelimit_limit_tokens_minute": 6000, "x_ratelimit_remaining_tokens_minute": 50,
                 "x_ratelimit_reset_tokens_minute": 11.38}, 11.38),
    ],
)  # fmt: skip
def test_without_retry_after_the_providers_own_words_tell(name: str, headers: dict[str, Any], seconds: float) -> None:
    """By what its reset means."""
    desk = Desk()
    desk.hear(name, desk.depart(name), 429, headers=headers)
    assert desk.paused() == dict.fromkeys(desk.paused(), seconds)
    assert len(desk.paused()) == 2


def test_without_any_word_the_pause_is_short_and_the_rate_is_cut() -> None:
    """A burst of refusals counts once; the rate comes back over minutes, never above the configured one."""
    desk = Desk()
    flights = [desk.depart("a") for _ in range(10)]
    desk.after(0.2)
    for flight in flights:
        desk.hear("a", flight, 429, headers={"retry_after": 0})
    assert desk.paused() == {"a/m/total": 1.0, "a/m/requests": 1.0}
    assert desk.level("a/m/total") == 0.0
    assert desk.counter("a/m/total").rate == pytest.approx(80.0)
    for _ in range(300):
        desk.after(1.0).tick()
    assert desk.counter("a/m/total").rate == pytest.approx(100.0)


def test_a_headerless_provider_is_paced_by_its_slots() -> None:
    """Where no tokens are counted: paused, cut, and back."""
    desk = Desk()
    desk.hear("gem", desk.depart("gem"), 429, error="RESOURCE_EXHAUSTED/PerMinute", headers={"retry_after": "22.5s"})
    assert desk.paused() == {"gem/slots": 22.5}
    assert desk.counter("gem/slots").limit == 8
    desk.after(30.0).hear("gem", desk.depart("gem"), headers={"server": "x"})
    for _ in range(200):
        desk.after(1.0).tick()
    assert desk.counter("gem/slots").limit == 10


def test_a_cut_of_slots_outlasts_the_first_seconds_of_a_process() -> None:
    """Half of them at first; afterwards what the provider wants still counts."""
    desk = Desk()
    asyncio.run(desk.pacing.hold_back(0.5, "just started"))
    assert desk.counter("gem/slots").limit == 5
    desk.hear("gem", desk.depart("gem"), 429, error="RESOURCE_EXHAUSTED/PerMinute", headers={"retry_after": "22.5s"})
    assert desk.counter("gem/slots").limit == 5
    asyncio.run(desk.pacing.hold_back(1.0, "no longer just started"))
    assert desk.counter("gem/slots").limit == 8


def test_a_day_that_is_spent_is_asked_again_after_minutes() -> None:
    """The wait that such an error tells is misleading; until an answer comes a single request tries it."""
    desk = Desk()
    error = "RESOURCE_EXHAUSTED/GenerateRequestsPerDayPerProjectPerModel-FreeTier"
    desk.hear("gem", desk.depart("gem"), 429, error=error, headers={"retry_after": "22s"})
    assert (desk.paused(), desk.counter("gem/slots").limit) == ({"gem/slots": 300.0}, 1)
    assert "gem/slots" in {key.removeprefix("upstream/") for key in desk.pacing.state()}
    desk.after(301.0).hear("gem", desk.depart("gem"), 429, error=error)
    assert desk.paused() == {"gem/slots": 600.0}
    desk.after(601.0).hear("gem", desk.depart("gem"), headers={"server": "x"})
    assert desk.counter("gem/slots").limit == 10


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("a", 429, "insufficient_quota/insufficient_quota"),  # no money: the breaker's business
        ("engine", 429, "-/-"),  # its queue is full: the breaker's, too
        ("a", 503, "server_error/server_is_overloaded"),
        ("a", 401, "invalid_request_error/invalid_api_key"),
    ],
)
def test_other_refusals_do_not_pause(name: str, status: int, error: str) -> None:
    """They say nothing of speed."""
    desk = Desk()
    desk.hear(name, desk.depart(name), status, error=error, headers={"retry_after": 9})
    assert desk.paused() == {}


def test_a_request_larger_than_the_limit_says_nothing_of_speed() -> None:
    """It would be refused for ever."""
    desk = Desk()
    huge = desk.depart("a", size=Size(7000, 100))
    desk.hear("a", huge, 429, headers=tokens(5900))
    assert (desk.paused(), desk.counter("a/m/total").rate) == ({}, pytest.approx(100.0))


def test_limits_in_shadow_mode_pause_nothing() -> None:
    """Then the slots do."""
    desk = Desk()
    desk.hear("shadow", desk.depart("shadow"), 429, headers={"retry_after": 5})
    assert desk.paused() == {"shadow/slots": 5.0}


def test_a_provider_may_be_ignored() -> None:
    """`follow_headers: false`."""
    desk = Desk()
    flight = desk.depart("deaf")
    desk.after(1.0).hear("deaf", flight, headers=tokens(0, 600))
    assert (desk.level("deaf/*/total"), desk.told()) == (1000.0, [])
    desk.hear("deaf", flight, 429, headers=tokens(0, 600) | {"retry_after": 5})
    assert (desk.paused(), desk.counter("deaf/*/total").rate) == ({}, 100.0)


def test_very_long_waits_are_asked_again() -> None:
    """Hours are a window that is spent."""
    desk = Desk()
    desk.hear("a", desk.depart("a"), 429, headers={"retry_after": 7200})
    assert set(desk.paused().values()) == {300.0}


# Long windows.


def test_a_long_window_never_shrinks_the_minutes() -> None:
    """A day's limit says nothing of a minute."""
    desk = Desk()
    flight = desk.depart("groq")
    desk.after(1.0)
    headers = tokens(5000) | {"x_ratelimit_limit_requests": 14_400, "x_ratelimit_remaining_requests": 300}
    desk.hear("groq", flight, headers=headers)
    assert (desk.level("groq/*/requests"), desk.counter("groq/*/requests").rate) == (100.0, 10.0)
    assert desk.paused() == {}


def test_a_spent_long_window_pauses_until_it_refills() -> None:
    """As the provider's reset tells: one at a time where it refills all the time, else at its end or a re-check."""
    desk = Desk()
    flight = desk.depart("groq")
    desk.after(1.0)
    spent = {"x_ratelimit_limit_requests": 14_400, "x_ratelimit_remaining_requests": 0}
    desk.hear("groq", flight, headers=spent)
    assert desk.paused() == {"groq/*/total": 6.0, "groq/*/requests": 6.0}
    desk = Desk()
    flight = desk.depart("cer")
    desk.after(1.0)
    day = {"x_ratelimit_limit_requests_day": 1440, "x_ratelimit_remaining_requests_day": 0}
    desk.hear("cer", flight, headers=day | {"x_ratelimit_reset_requests_day": 33_011.38})
    assert set(desk.paused().values()) == {300.0}
    assert desk.counter("cer/*/total").rate == pytest.approx(1.0)
    desk.after(301.0)
    served = desk.depart("cer")
    desk.after(1.0).hear("cer", served, headers=day | {"x_ratelimit_remaining_requests_day": 1400})
    assert desk.counter("cer/*/total").rate == pytest.approx(100.0)
    desk = Desk()
    flight = desk.depart("cer")
    desk.after(1.0).hear("cer", flight, headers=day | {"x_ratelimit_reset_requests_day": 41.0})
    assert set(desk.paused().values()) == {41.0}


def test_what_is_left_of_a_long_window_may_be_too_little_for_a_request() -> None:
    """When it was refused for it; one that was served shows only that little is left when hardly anything is."""
    left = {"x_ratelimit_limit_tokens_day": 1_000_000, "x_ratelimit_remaining_tokens_day": 50}
    desk = Desk()
    flight = desk.depart("cer")
    desk.after(1.0).hear("cer", flight, headers=left)
    assert set(desk.paused().values()) == {300.0}
    desk = Desk()
    flight = desk.depart("cer", size=Size(60_000, 0))
    desk.after(1.0).hear("cer", flight, headers=left | {"x_ratelimit_remaining_tokens_day": 20_000})
    assert desk.paused() == {}
    desk.hear("cer", flight, 429, headers=left | {"x_ratelimit_remaining_tokens_day": 20_000, "retry_after": 77})
    assert set(desk.paused().values()) == {77.0}


def test_a_subscriptions_share_that_is_spent_pauses_everything() -> None:
    """Until it resets."""
    desk = Desk()
    flight = desk.depart("b")
    prefix = "anthropic_ratelimit_unified_5h"
    desk.after(1.0)
    reset = int(desk.clock.now + 1.79e9) + 120
    desk.hear("b", flight, headers={f"{prefix}_status": "allowed", f"{prefix}_utilization": 0.99})
    assert desk.paused() == {}
    desk.after(1.0).hear("b", flight, headers={f"{prefix}_status": "rejected", f"{prefix}_reset": reset})
    assert set(desk.paused()) == {"b/*/input", "b/*/output"}
    assert desk.paused()["b/*/input"] == pytest.approx(119.0, abs=1.1)


# Learning, growing, settling, telling.


def test_limits_are_learned_and_slots_lifted() -> None:
    """Few slots stand for unknown limits; then the buckets do."""
    desk = Desk()
    assert desk.counter("learn/slots").limit == 4
    flight = desk.depart("learn")
    desk.after(1.0).hear("learn", flight, headers={"x_ratelimit_remaining_tokens": 50})
    assert desk.counter("learn/slots").limit == 4
    desk.after(1.0).hear("learn", flight, headers=tokens(500))
    assert desk.counter("learn/slots").limit == inf
    assert (desk.counter("learn/*/total").rate, desk.level("learn/*/total")) == (100.0, 500.0)
    assert "upstream/learn/*/requests" not in desk.capacity.levels()
    desk.after(1.0).hear("learn", flight, headers=tokens(500, 3000))
    assert desk.counter("learn/*/total").rate == 50.0
    flight = desk.depart("few")
    desk.after(1.0).hear("few", flight, headers=tokens(500))
    assert desk.counter("few/slots").limit == 7


def test_what_is_not_learned_yet_is_paused_by_its_slots() -> None:
    """There is nothing else."""
    desk = Desk()
    desk.hear("learn", desk.depart("learn"), 429, headers={"retry_after": 5})
    assert desk.paused() == {"learn/slots": 5.0}


def test_growth_is_slow_where_settings_or_the_provider_say_so() -> None:
    """From the start, or from the first `slow_down`."""
    desk = Desk()
    desk.tick()
    slow = desk.counter("ramp/*/total")
    assert slow.rate * 60 + slow.capacity == pytest.approx(60_000.0)
    assert desk.counter("sun/*/total").rate == 1e8
    desk.hear("sun", desk.depart("sun"), 429, error="rate_limit_error/slow_down", headers={"retry_after": 1})
    slow = desk.counter("sun/*/total")
    assert slow.rate * 60 + slow.capacity <= 60_000.0


def test_what_the_provider_charged_settles_what_nobody_reported() -> None:
    """Usage was lost, so that the estimate was kept: the exact cost replaces it."""
    desk = Desk()

    def kept(prompt: int, output: int) -> Flight:
        flight = desk.depart("mis")
        flight.used = Size(prompt, output)
        return flight

    desk.counter("mis/*/total").change(-500.0, T)
    cost = {"x_ratelimit_tokens_query_cost": 30}
    desk.hear("mis", desk.depart("mis"), headers=cost, tail={"in": 60})
    desk.hear("mis", desk.depart("mis"), headers=cost, kind=RecordKind.RUNNING)
    desk.hear("mis", None, headers=cost)
    desk.hear("groq", desk.depart("groq"), headers=cost)
    desk.hear("gem", desk.depart("gem"), headers=cost)
    desk.hear("mis", kept(60, 40), headers={"x_ratelimit_tokens_query_cost": "?"})
    assert desk.level("mis/*/total") == 500.0
    desk.hear("mis", kept(60, 40), headers=cost)
    assert desk.level("mis/*/total") == 500.0 + 100.0 - 30.0
    desk.hear("mis", kept(60, 5), headers=cost)
    assert desk.level("mis/*/total") == 570.0 + 65.0 - 30.0, "it was cut, and what was not seen has come back already"


def test_what_moves_is_told_but_not_with_every_reply() -> None:
    """Once in a while for the same counter and reason."""
    desk = Desk()
    for i in range(50):
        flight = desk.depart("a", size=Size(1, 0))
        desk.after(0.1).hear("a", flight, headers=tokens(900 - 10 * i))
    assert len(desk.told()) == 1
    event = desk.told()[0]
    assert (event.upstream, event.key) == ("a", "upstream/a/m/total")
    assert "left, not" in event.cause
    flight = desk.depart("a")
    desk.after(TOLD_S).hear("a", flight, headers=tokens(10, 600))
    assert [event.cause for event in desk.told()[1:]] == [
        "600 per minute instead of 6000: the provider allows 600 per 60 s", "10 left, not 100",
    ]  # fmt: skip


def test_the_state_page_has_every_counter() -> None:
    """With what was reported last."""
    desk = Desk()
    flight = desk.depart("a")
    desk.after(1.0).hear("a", flight, headers=tokens(300))
    state = desk.pacing.state()
    assert state["upstream/a/m/total"]["remaining"] == 300.0
    assert set(state) == set(desk.pacing._pacers)
