"""What is kept of requests, for how long, and under which names."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from extproc.core.breaker import Outcome
from extproc.core.events import (
    Admitted,
    AttemptFailed,
    BreakerMoved,
    Event,
    Left,
    Observed,
    Overshot,
    Queued,
    Refused,
    Retried,
    Settled,
    Shadowed,
    Waited,
)
from extproc.core.refusal import Reason
from extproc.core.request import Request
from extproc.telemetry.dossiers import MOST_EVENTS, Dossiers, name_of
from tests.doubles import HandClock, request


def made(number: int, name: str | None = None, **more: Any) -> Request:
    """A request of its own ticket."""
    return replace(
        request(tenant=more.pop("tenant", "t"), lane=more.pop("lane", "P1")),
        ticket=f"p-{number}",
        id=f"r{number}" if name is None else name,
        **more,
    )


def served(one: Request, upstream: str = "a", status: int = 200, **more: Any) -> Settled:
    return Settled(one, upstream, 1, status, None, 0.0, **more)


@pytest.fixture
def clock() -> HandClock:
    return HandClock(50.0)


@pytest.fixture
def kept(clock: HandClock) -> Dossiers:
    return Dossiers(3, clock.time, lambda: 1_000_000.0)


def test_events_of_a_request_are_kept_with_the_time_they_were_heard(kept: Dossiers, clock: HandClock) -> None:
    """Found by id and by ticket, running or over."""
    one = made(1, arrived=49.0)
    kept(Queued(one, 2.0, 3))
    clock.now = 52.0
    kept(Admitted(one, ("a",), 3.0))
    dossier = kept.of("r1")
    assert dossier is not None
    assert dossier is kept.of("p-1")
    assert (dossier.state, dossier.ended, dossier.upstream) == ("running", None, "a")
    clock.now = 60.0
    kept(served(one))
    assert [(at, type(event)) for at, event in dossier.events] == [(50.0, Queued), (52.0, Admitted), (60.0, Settled)]
    assert (dossier.state, dossier.began, dossier.ended, dossier.heard) == ("served", 49.0, 60.0, 60.0)
    assert dossier.epoch_s(dossier.began) == 1_000_000.0 - 1.0
    assert kept.of("r1") is dossier
    assert (len(kept), kept.open) == (1, 0)


def test_of_those_that_are_over_a_ring_is_kept(kept: Dossiers) -> None:
    """The oldest goes, also from among the names; who is here stays, however many."""
    for number in range(5):
        kept(Queued(made(number), 0.0))
    assert (kept.open, len(kept)) == (5, 5)
    for number in range(5):
        kept(Left(made(number), 1.0))
    assert (kept.open, len(kept)) == (0, 3)
    assert [kept.of(f"r{number}") is None for number in range(5)] == [True, True, False, False, False]
    assert [kept.of(f"p-{number}") is None for number in range(5)] == [True, True, False, False, False]


def test_the_newest_of_a_name_is_found_and_tells_how_many_came_before(kept: Dossiers) -> None:
    """Each is found by its ticket; one that is forgotten takes no other's name with it."""
    for number in range(3):
        kept(Queued(made(number, "same"), 0.0))
        kept(Left(made(number, "same"), 0.0))
    newest = kept.of("same")
    assert newest is not None
    assert (newest.ticket, newest.earlier) == ("p-2", 2)
    first = kept.of("p-0")
    assert first is not None
    assert (first.ticket, first.earlier) == ("p-0", 0)
    kept(Queued(made(3), 0.0))
    kept(Left(made(3), 0.0))
    assert kept.of("p-0") is None
    assert kept.of("same") is newest
    for number in range(4, 7):
        kept(Queued(made(number), 0.0))
        kept(Left(made(number), 0.0))
    assert kept.of("same") is None


def test_a_clients_name_never_stands_for_anothers_ticket(kept: Dossiers) -> None:
    """Tickets are ours: they are looked for first."""
    kept(Queued(made(1), 0.0))
    kept(Queued(made(2, "p-1"), 0.0))
    found = kept.of("p-1")
    assert found is not None
    assert found.id == "r1"


def test_who_was_refused_unread_has_a_dossier_too(kept: Dossiers, clock: HandClock) -> None:
    """By the name its client gave it; without one it is in the list all the same."""
    clock.now = 100.0
    kept(Refused(Reason.DRAINING, 503, request_id="early", trace="00-x", waited_s=0.5))
    kept(Refused(Reason.BAD_REQUEST, 400, "team", "P0", request_id=""))
    early = kept.of("early")
    assert early is not None
    assert (early.state, early.reason, early.tenant, early.lane, early.began) == ("refused", "draining", "", "", 99.5)
    assert (early.trace, early.model, early.upstream, early.request) == ("00-x", "", "", None)
    nameless, _ = kept.newest(5)
    assert (nameless.id, nameless.tenant, nameless.lane, nameless.reason) == ("", "team", "P0", "bad_request")
    assert kept.of(nameless.ticket) is nameless
    assert kept.of("") is None


def test_one_that_was_replaced_while_it_went_ends_with_its_books(kept: Dossiers) -> None:
    """Its client is told that it was refused, but an upstream has it."""
    one = made(1)
    kept(Admitted(one, ("a", "b"), 0.0))
    kept(Refused(Reason.EVICTED, 503, "t", "P1", request_id="r1", request=one))
    dossier = kept.of("r1")
    assert dossier is not None
    assert (dossier.ended, dossier.state, dossier.reason) == (None, "running", "evicted")
    kept(AttemptFailed("a", Outcome.FAILURE, 500, "", "p-1", following="b"))
    assert dossier.upstream == "b"
    kept(served(one, "b", 0, client_gone=True))
    assert (dossier.ended is None, dossier.state, kept.open) == (False, "left", 0)


def test_what_is_told_late_is_added_as_long_as_the_request_is_known(kept: Dossiers) -> None:
    """Records of attempts may come after the last of all; of who was forgotten nothing is kept."""
    one = made(1)
    kept(Admitted(one, ("a", "b"), 0.0))
    kept(served(one, "b"))
    kept(AttemptFailed("a", Outcome.FAILURE, 500, "", "p-1"))
    kept(Overshot("upstream/b/*/total", 5.0, "p-1"))
    dossier = kept.of("p-1")
    assert dossier is not None
    assert [type(event) for _, event in dossier.events] == [Admitted, Settled, AttemptFailed, Overshot]
    kept(AttemptFailed("a", Outcome.FAILURE, 500, "", "nobody's"))
    kept(Overshot("upstream/b/*/total", 5.0))
    kept(BreakerMoved("a", "closed", "open", "why"))  # type: ignore[arg-type]
    assert len(kept) == 1


@pytest.mark.parametrize(
    ("settled", "state"),
    [
        ({"status": 200}, "served"),
        ({"status": 200, "client_gone": True}, "left"),
        ({"status": 200, "evicted": True}, "evicted"),
        ({"status": 0, "evicted": True}, "evicted"),
        ({"status": 503}, "failed"),
        ({"status": 404}, "failed"),
        ({"status": 0, "lost": True}, "unknown"),
    ],
)
def test_how_a_request_ended(kept: Dossiers, settled: dict[str, Any], state: str) -> None:
    """By what its record said, if there was any."""
    one = made(1)
    kept(Admitted(one, ("a",), 0.0))
    kept(served(one, **settled))
    assert kept.newest(1)[0].state == state


def test_a_list_can_be_of_some_only(kept: Dossiers, clock: HandClock) -> None:
    """By tenant, lane, reason, upstream and state; those first that were heard of last, over or not."""
    kept(Queued(made(1, tenant="x", lane="P0"), 0.0))
    clock.now += 1
    kept(Admitted(made(2, tenant="x"), ("a",), 0.0))
    clock.now += 1
    kept(Admitted(made(3, tenant="y"), ("b",), 0.0))
    kept(served(made(3, tenant="y"), "b"))
    clock.now += 1
    kept(Refused(Reason.LANE_FULL, 503, "y", "P2", request=made(4, tenant="y", lane="P2")))

    def found(limit: int = 9, **how: str) -> list[str]:
        return [one.id for one in kept.newest(limit, **how)]

    assert found() == ["r4", "r3", "r2", "r1"]
    assert found(2) == ["r4", "r3"]
    assert found(tenant="x") == ["r2", "r1"]
    assert found(lane="P0") == ["r1"]
    assert found(reason="lane_full") == ["r4"]
    assert found(upstream="b") == ["r3"]
    assert found(upstream="a", state="running") == ["r2"]
    assert found(state="waiting") == ["r1"]
    assert found(tenant="nobody") == []


def test_names_of_any_length_cost_no_more_than_others() -> None:
    """A hostile client's names are shortened, and what they were is let go."""
    kept = Dossiers(200)
    huge = "x" * 60_000
    gc.collect()
    tracemalloc.start()
    for number in range(400):
        one = made(number, f"{number}{huge}")
        for event in (Queued(one, 0.0), Waited(one, 1.0), Admitted(one, ("a",), 1.0), served(one)):
            kept(event)
    del one, event
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 2_000_000
    found = kept.of(f"399{huge}")
    assert found is not None
    assert (found.ticket, len(found.id)) == ("p-399", 128)


def test_a_name_is_kept_without_what_is_no_text() -> None:
    """It is looked for in the same way."""
    assert name_of("7f3c-a") == "7f3c-a"
    assert name_of("\x1b[31mred\u202e\ud800") == "?[31mred??"
    kept = Dossiers(5)
    kept(Queued(made(1, "a\x00b"), 0.0))
    found = kept.of("a\x00b")
    assert found is not None
    assert found.id == "a?b"


def test_one_request_cannot_be_told_of_without_end(kept: Dossiers) -> None:
    """What is too much is counted; how it ended is kept all the same."""
    one = made(1)
    for _ in range(2 * MOST_EVENTS):
        kept(Shadowed(one, "tenant/t/total"))
    kept(Retried(one, ""))
    kept(Left(one, 1.0))
    dossier = kept.of("r1")
    assert dossier is not None
    assert (len(dossier.events), dossier.dropped, dossier.state) == (MOST_EVENTS + 1, MOST_EVENTS + 1, "left")


def test_who_listens_hears_of_each_that_is_over_once(kept: Dossiers) -> None:
    """With all that was heard until then."""
    heard: list[tuple[str, int]] = []
    kept.ended.append(lambda dossier: heard.append((dossier.ticket, len(dossier.events))))
    one = made(1)
    kept(Observed(one, None))
    kept(Admitted(one, ("a",), 0.0))
    assert heard == []
    kept(served(one))
    kept(AttemptFailed("a", Outcome.FAILURE, 500, "", "p-1"))
    assert heard == [("p-1", 3)]


def test_random_lives_leave_nothing_open() -> None:
    """Thousands of requests, with names that come again: each has one dossier, and the ring keeps its size."""
    seed = random.randrange(2**32)
    print("seed", seed)  # noqa: T201
    rng = random.Random(seed)
    kept, closed = Dossiers(100), Counter[str]()
    kept.ended.append(lambda dossier: closed.update([dossier.ticket]))
    lives: list[list[Event]] = []
    for number in range(3000):
        one = made(number, rng.choice(["", "same", f"r{number}", "y" * 500]))
        lives.append(_life(rng, one))
    here = lives[:50]
    del lives[:50]
    while here:
        life = rng.choice(here)
        kept(life.pop(0))
        if not life:
            here.remove(life)
            if lives:
                here.append(lives.pop())
        assert kept.open <= 50
        assert len(kept) <= 150
    assert (kept.open, len(kept)) == (0, 100)
    assert len(closed) == 3000
    assert set(closed.values()) == {1}
    assert len(kept._named) <= 100


def _life(rng: random.Random, one: Request) -> list[Event]:
    """Events of one request, as they may come."""
    life: list[Event] = [Retried(one, "")] if rng.random() < 0.1 else []
    if rng.random() < 0.2:
        return [Refused(rng.choice(list(Reason)), 503, request_id=one.id)]
    if rng.random() < 0.5:
        life += [Queued(one, 1.0, 1), Waited(one, 1.0)]
    fate = rng.random()
    if fate < 0.2:
        return [*life, Refused(rng.choice(list(Reason)), 503, request=one, request_id=one.id)]
    if fate < 0.3:
        return [*life, Left(one, 1.0)]
    life.append(Admitted(one, ("a", "b"), 1.0))
    if rng.random() < 0.1:
        life.append(Refused(Reason.EVICTED, 503, request=one, request_id=one.id))
    failed = AttemptFailed("a", Outcome.FAILURE, 500, "", one.ticket, following="b")
    ends: list[Event] = [served(one, status=rng.choice([200, 0, 503]))]
    if rng.random() < 0.3:
        ends.insert(rng.randrange(2), failed)
    return life + ends
