"""Requests of every fate, and that each is told as it was."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import pytest

from extproc import admission as wiring
from extproc.core.breaker import Outcome, Signal
from extproc.core.events import Admitted, AttemptFailed, Event, PassedOver, Settled, Waited, Why
from extproc.core.refusal import Reason
from extproc.core.spells import MOST
from extproc.ports import Record, RecordKind
from extproc.telemetry.dossiers import Dossier, Dossiers
from extproc.telemetry.explain import explain, summary, told
from extproc.telemetry.tally import Tally
from extproc.telemetry.words import key_words, keys_words, plain, seconds, why_not
from tests.desk import LEFT, Desk, Wire, chat
from tests.doubles import Ledger, Suspending, VirtualLoop, play, request

CONFIG = """
upstreams:
  one: {provider: openai, limits: [{tpm: 6_000_000, rpm: 60_000}], concurrency: 1}
  two: {provider: openai, limits: [{tpm: 6_000_000, rpm: 60_000}], concurrency: 1}
  claude: {provider: anthropic, limits: [{tpm: 6_000_000, rpm: 60_000}]}
  narrow: {provider: openai, limits: [{tpm: 6_000_000, rpm: 60_000}], window: 30}
  thin: {provider: openai, limits: [{tpm: 600, rpm: 60_000}]}
routes:
  - {models: [solo], chain: [one], acknowledge_unowned: true}
  - {models: [pair], chain: [one, two], acknowledge_unowned: true}
  - {models: [mixed], chain: [claude, narrow, one], acknowledge_unowned: true}
  - {models: [thin], chain: [thin], acknowledge_unowned: true}
  - {models: [watched], chain: [one], acknowledge_unowned: true, observe: 1.0}
tenants:
  default: {lanes: [P1, P0, P2]}
  poor: {lanes: [P1], rpm: 1}
  busy: {lanes: [P1], concurrency: 1}
  broke: {lanes: [P1], usd_per_day: 0.000001}
  agent: {lanes: [P1], sessions: {max_tokens: 100}}
  vague: {lanes: [P1], models: [pair]}
lanes:
  P0: {max_wait_s: 5, spill_after_s: 0}
  P1: {max_wait_s: 20, spill_after_s: 1, max_requests: 4}
  P2: {max_wait_s: 60, when_busy: hold}
identity: {tenant: "header:x-team", session_headers: [x-session]}
"""
SLOTS = "upstream/one/slots"


class Told(Desk):
    """A desk whose requests are kept."""

    def __init__(self, loop: VirtualLoop, config: str = CONFIG, limit: int = 500) -> None:
        super().__init__(loop, config)
        self.dossiers = Dossiers(limit, loop.time, lambda: 1_700_000_000.0 + loop.time())
        self.admission._listener = self._tell

    def _tell(self, event: Event) -> None:
        self.observer(event)
        self.dossiers(event)

    def dossier(self, wire: Wire) -> Dossier:
        found = self.dossiers.of(wire.request_id)
        assert found is not None
        return found

    def explain(self, wire: Wire) -> dict[str, Any]:
        """As the service does; what is told can be told as JSON, too."""
        dossier = self.dossier(wire)
        request = dossier.request if dossier.state == "waiting" else None
        standing = self.admission.limiter.standing(request) if request else None
        known = explain(dossier, asdict(standing) if standing else None, self.loop.time())
        assert json.loads(json.dumps(known, allow_nan=False)) == known
        return known

    def story(self, wire: Wire) -> str:
        return told(self.explain(wire))

    def fill(self, name: str = "one") -> Wire:
        """Somebody else has the only place of an upstream."""
        return self.send(chat("busy", {"one": "solo", "two": "pair"}[name]), lasts_s=10.0)


def tell(scenario: Any, config: str = CONFIG) -> None:
    """Play a scenario at a desk, until all is over; then every dossier is closed."""

    async def run(loop: VirtualLoop) -> None:
        desk = Told(loop, config)
        await scenario(desk)
        await desk.settle_down()
        assert desk.dossiers.open == 0

    play(run)


def checks(known: dict[str, Any]) -> dict[str, bool]:
    return {check["check"]: check["passed"] for check in known["checks"]}


def test_one_that_went_at_once() -> None:
    """Size, choice, and what was reserved and used; no queue."""

    async def scenario(desk: Told) -> None:
        wire = desk.send(chat("hello", "solo"), x_session="s-1", traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
        await asyncio.sleep(0.5)
        running = desk.explain(wire)
        assert (running["state"], running["choice"]["upstream"], running["lasted_s"]) == ("running", "one", 0.5)
        assert "settlement" not in running
        await wire.task
        await asyncio.sleep(1)
        known = desk.explain(wire)
        assert (known["state"], known["trace_id"]) == ("served", "ab" * 16)
        assert known["caller"]["tenant"] == "default"
        assert (known["caller"]["session"], known["caller"]["session_was_named"]) == ("s-1", True)
        assert known["size"]["output"] == 50
        assert "its client's cap" in known["size"]["words"]
        assert list(checks(known).values()) == [True] * 5
        assert known["choice"] == {"upstream": "one", "order": ["one"], "waited_s": 0.0, "others": []}
        settled = known["settlement"]
        assert (settled["status"], settled["used"]["total"], settled["beyond_reserved"]) == (200, 42, 0)
        assert settled["reserved"]["total"] == known["size"]["total"] == known["size"]["input"] + 50
        assert "queue" not in known
        assert "served by one in 1.0 s" in desk.story(wire).splitlines()[0]

    tell(scenario)


def test_one_that_waited_and_went() -> None:
    """Its place, what it waited for and how long, while it does and after; the forecast against what came."""

    async def scenario(desk: Told) -> None:
        desk.fill()
        await asyncio.sleep(0.1)
        first, second = (desk.send(chat(text, "solo")) for text in ("first", "second"))
        await asyncio.sleep(2)
        known = desk.explain(second)
        assert (known["state"], known["queue"]["position"], known["queue"]["in_line"]) == (
            "waiting",
            2,
            {"P0": 0, "P1": 2},
        )
        assert known["queue"]["binding"] == [{"key": SLOTS, "words": "a free slot at one"}]
        assert known["queue"]["now"]["position"] == 2
        assert known["queue"]["now"]["lacking"] == [SLOTS]
        assert "now number 2, held by a free slot at one" in desk.story(second)
        await first.task
        await second.task
        await asyncio.sleep(1)
        known = desk.explain(second)
        [spell] = known["queue"]["waited_for"]
        assert spell["keys"] == [SLOTS]
        assert spell["seconds"] == pytest.approx(known["queue"]["waited_s"], abs=0.1)
        assert known["queue"]["waited_s"] == pytest.approx(10.9, abs=0.2)
        assert known["queue"]["forecast"] == "too short"
        assert known["state"] == "served"
        assert "went after 10.9 s, of which for a free slot at one (10.9 s)" in desk.story(second)

    tell(scenario)


def test_what_it_waited_for_changes_with_what_holds_it() -> None:
    """Each thing with its time, the longest first; a pause of its lane is one of them, and so are breakers."""

    async def scenario(desk: Told) -> None:
        breakers, limiter = desk.admission.breakers, desk.admission.limiter
        busy = desk.send(chat("busy", "solo"), lasts_s=3.0)
        await asyncio.sleep(0.1)
        wire = desk.send(chat("waits", "solo"))
        await asyncio.sleep(1.9)
        breakers.trip("one", "by hand")
        await busy.task
        await asyncio.sleep(4)
        limiter.pause("P1")
        breakers.reset("one", "by hand")
        await asyncio.sleep(2)
        limiter.resume("P1")
        await wire.task
        await asyncio.sleep(1)
        spells = desk.explain(wire)["queue"]["waited_for"]
        assert [spell["keys"] for spell in spells] == [["upstream/one/breaker"], ["lane/P1/paused"], [SLOTS]]
        assert [spell["seconds"] for spell in spells] == pytest.approx([5.0, 2.0, 1.9], abs=0.2)
        assert "the end of the pause of lane P1 (2.0 s)" in desk.story(wire)

    tell(scenario)


def test_of_very_many_things_in_turn_the_last_are_told_and_the_others_together() -> None:
    """Their seconds are all there."""

    async def scenario(desk: Told) -> None:
        desk.fill()
        await asyncio.sleep(0.1)
        wire = desk.send(chat("waits", "solo"))
        await asyncio.sleep(0.1)
        [line] = desk.admission.lanes.queues["P1"].lines.values()
        for number in range(5 * MOST):
            line.refused((f"upstream/one/m{number}/total",), desk.loop.time())
            await asyncio.sleep(0.1)
        await wire.task
        await asyncio.sleep(1)
        queue = desk.explain(wire)["queue"]
        spells = queue["waited_for"]
        assert sum(spell["seconds"] for spell in spells) == pytest.approx(queue["waited_s"], abs=0.01)
        assert len(spells) == MOST + 1
        assert spells[0]["keys"] == []
        assert spells[0]["seconds"] > 5
        assert "many other things in turn (" in desk.story(wire)

    tell(scenario)


def test_a_pause_holds_one_that_might_spill_all_the_same() -> None:
    """It is counted for as long as it lasts, in whatever line the request stands meanwhile."""

    async def scenario(desk: Told) -> None:
        limiter = desk.admission.limiter
        limiter.pause("P1")
        wire = desk.send(chat("on", "pair"))
        await asyncio.sleep(20)
        limiter.resume("P1")
        await wire.task
        await asyncio.sleep(1)
        [spell] = desk.explain(wire)["queue"]["waited_for"]
        assert spell["keys"] == ["lane/P1/paused"]
        assert spell["seconds"] == pytest.approx(20.0, abs=0.1)

    tell(scenario)


def test_one_that_spilled() -> None:
    """Why not the first of its chain: for want of what, of which one was in the way."""

    async def scenario(desk: Told) -> None:
        desk.fill()
        await asyncio.sleep(0.1)
        wire = desk.send(chat("on", "pair"))
        await wire.task
        await asyncio.sleep(1)
        known = desk.explain(wire)
        assert (known["choice"]["upstream"], known["choice"]["order"]) == ("two", ["two"])
        [other] = known["choice"]["others"]
        assert (other["upstream"], other["why"], other["keys"]) == ("one", "no_room", [SLOTS])
        assert "one had no room: a free slot at one" in desk.story(wire)

    tell(scenario)


def test_upstreams_that_could_not_serve_it_are_told_with_why() -> None:
    """Their API, and their size."""

    async def scenario(desk: Told) -> None:
        wire = desk.send(chat("hello", "mixed"))
        await wire.task
        await asyncio.sleep(1)
        known = desk.explain(wire)
        assert {one["upstream"]: one["why"] for one in known["choice"]["others"]} == {
            "claude": "dialect", "narrow": "too_large",
        }  # fmt: skip
        assert "does not speak the API of the request" in desk.story(wire)

    tell(scenario)


def test_an_upstream_that_rests_and_one_that_is_out_are_told_apart() -> None:
    """With the time when they may be asked again, as far as it is known."""

    async def scenario(desk: Told) -> None:
        desk.admission.breakers.signal("one", Signal.TRIP, "sick")
        wire = desk.send(chat("hello", "pair"))
        await wire.task
        desk.admission.breakers.take_out("one", desk.loop.time() + 60)
        later = desk.send(chat("hello again", "pair"))
        await later.task
        await asyncio.sleep(1)
        rests, out = (desk.explain(one)["choice"]["others"][0] for one in (wire, later))
        assert (rests["why"], rests["breaker"]) == ("breaker", "open")
        assert rests["wait_s"] > 1
        assert (out["why"], out["breaker"]) == ("breaker", "out")
        assert "one rests: its breaker is open; it may be tried in" in desk.story(wire)
        assert "one was taken out of use by an operator; it may be asked again in" in desk.story(later)

    tell(scenario)


def test_one_that_failed_everywhere_of_which_its_attempts_told_last() -> None:
    """Its outcome came in another log, before: they are told and counted all the same, each once."""

    async def scenario(desk: Told) -> None:
        desk.report = lambda _wire: None  # type: ignore[method-assign]
        wire = desk.send(chat("hello", "pair"), lasts_s=1.0)
        await wire.task
        about = {"status": 503, "flags": frozenset(), "details": "via_upstream", "first_token_s": None}
        final = Record(RecordKind.FINAL, wire.departures[0].ticket, "two", attempt=2, duration_s=1.0, **about)
        await desk.admission.hear(final)
        named = about | {"request_id": wire.request_id}
        for name in ("one", "two", "two", "one"):
            await desk.admission.hear(Record(RecordKind.ATTEMPT, "", name, attempt=0, duration_s=0.3, **named))
        known = desk.explain(wire)
        assert [(one["upstream"], one["then"]) for one in known["attempts"]] == [("one", "two"), ("two", "")]
        assert (known["state"], known["settlement"]["attempts"], "notes" in known) == ("failed", 2, False)
        tally = Tally()
        for event in desk.observer.events:
            tally(event)
        assert tally.failed_attempts == {"one": 1, "two": 1}

    tell(scenario)


@pytest.mark.parametrize("told_after_s", [0.5, 2.0])
def test_one_that_failed_over(told_after_s: float) -> None:
    """The attempt that failed, and who was asked next; also when it is told after the answer."""

    async def scenario(desk: Told) -> None:
        wire = desk.send(chat("hello", "pair"), lasts_s=1.0)
        wire.served_by = "two"
        await asyncio.sleep(told_after_s)
        failed = {"status": 500, "flags": frozenset(), "details": "", "attempt": 1, "duration_s": 0.25}
        told_of = {"request_id": wire.request_id, "first_token_s": None, "error": "server_error/overloaded"}
        await desk.admission.hear(Record(RecordKind.ATTEMPT, "", "one", **failed, **told_of))
        assert desk.explain(wire)["state"] == ("running" if told_after_s < 1 else "served")
        assert summary(desk.dossier(wire))["upstream"] == "two"
        await asyncio.sleep(2)
        known = desk.explain(wire)
        broken, good = known["attempts"]
        assert (broken["upstream"], broken["status"], broken["seconds"]) == ("one", 500, 0.25)
        assert (broken["error"], broken["then"]) == ("server_error/overloaded", "two")
        assert (good["upstream"], good["status"], good["first_token_s"]) == ("two", 200, 0.1)
        assert known["settlement"]["upstream"] == "two"
        assert "one failed after 250 ms: status 500: server_error/overloaded; two was asked" in desk.story(wire)

    tell(scenario)


@pytest.mark.parametrize("tail", [{"cut": 1.0}, {"bad": "truncated"}, {"error": "server_error/-"}])
def test_an_answer_that_was_none_is_not_told_as_served(tail: dict[str, Any]) -> None:
    """Its caller got a status of success and no answer; the breaker counts that, and so it is told."""

    async def scenario(desk: Told) -> None:
        wire = desk.send(chat("hello", "pair"))
        wire.tail = tail
        await wire.task
        await asyncio.sleep(1)
        known = desk.explain(wire)
        assert (known["state"], known["settlement"]["status"]) == ("failed", 200)
        [attempt] = known["attempts"]
        assert (attempt["upstream"], attempt["ok"], attempt["cause"]) == ("one", False, known["settlement"]["fault"])
        assert attempt["cause"].startswith("answer ")
        assert f"went to one, and failed after {seconds(known['lasted_s'])}" in desk.story(wire)
        assert f"one answered 200: {attempt['cause']}" in desk.story(wire)
        assert "its estimate was kept" in desk.story(wire)

    tell(scenario)


def test_one_that_made_room_for_a_later_copy_did_not_leave_by_itself() -> None:
    """That is told; and it has lasted until its end, not until its record came."""
    now = iter((0.0, 0.0, 5.0, 5.0, 5.0, 5.0))
    dossiers, one = Dossiers(5, lambda: next(now)), replace(request(), arrived=0.0)
    gone = Settled(one, "a", 1, 0, None, 0.0, duration_s=0.3, evicted=True, details="tidegate_evicted")
    for event in (Admitted(one, ("a", "b"), 0.0), gone):
        dossiers(event)
    dossier = dossiers.of(one.ticket)
    assert dossier is not None
    known = explain(dossier)
    assert (known["state"], known["reason"], dossier.reason) == ("evicted", "evicted", "evicted")
    assert (known["settlement"]["evicted"], known["settlement"]["client_gone"]) == (True, False)
    assert known["attempts"][0]["cause"] == "a later copy of it took its place"
    assert "evicted at a after 300 ms: a later copy of it took its place" in told(known)
    assert known["lasted_s"] == 0.3


def test_attempts_of_which_no_record_came_in_time_are_counted() -> None:
    """Envoy may tell of them when all is over."""
    dossiers, one = Dossiers(5), request()
    failed = AttemptFailed("a", Outcome.IGNORED, 400, "", one.ticket, "b")
    for event in (Admitted(one, ("a", "b", "c"), 0.0), Settled(one, "", 3, 400, None, 0.0), failed):
        dossiers(event)
    dossier = dossiers.of(one.ticket)
    assert dossier is not None
    [note] = explain(dossier)["notes"]
    assert note.startswith("asked 2 times more, in vain")
    for name in "bc":
        dossiers(AttemptFailed(name, Outcome.IGNORED, 400, "", one.ticket))
    assert "notes" not in explain(dossier)


def test_one_whose_client_left_in_line_or_later() -> None:
    """What it had waited for; and at whom it was."""

    async def scenario(desk: Told) -> None:
        desk.fill()
        await asyncio.sleep(0.1)
        waiting = desk.send(chat("waits", "solo"))
        running = desk.send(chat("runs", "pair"), lasts_s=50.0)
        await asyncio.sleep(3)
        waits = summary(desk.dossier(waiting), asyncio.get_running_loop().time())
        assert (waits["state"], waits["waited_s"]) == ("waiting", pytest.approx(3.0, abs=0.1))
        waiting.task.cancel()
        running.task.cancel()
        await asyncio.sleep(1)
        known = desk.explain(waiting)
        assert (known["state"], "choice" in known) == ("left", False)
        assert known["queue"]["waited_for"][0]["keys"] == [SLOTS]
        assert "its client left after 3.0 s" in desk.story(waiting)
        assert summary(desk.dossier(waiting))["waited_s"] == pytest.approx(3.0, abs=0.1)
        known = desk.explain(running)
        assert (known["state"], known["settlement"]["client_gone"], known["choice"]["upstream"]) == (
            "left",
            True,
            "two",
        )
        assert known["attempts"][-1]["cause"] == "its client left"
        assert known["settlement"]["flags"] == sorted(LEFT)

    tell(scenario)


async def _of_the_headers(desk: Told) -> Wire:
    return desk.send(chat("x"), x_tidegate_priority="P9")


async def _of_the_body(desk: Told) -> Wire:
    return desk.send({"model": "solo"})


async def _of_the_model(desk: Told) -> Wire:
    return desk.send(chat("x", "nobodys"))


async def _of_the_tenants_models(desk: Told) -> Wire:
    return desk.send(chat("x", "solo"), x_team="vague")


async def _of_size(desk: Told) -> Wire:
    return desk.send(chat("word " * 2000, "thin"))


async def _of_quota(desk: Told) -> Wire:
    await desk.send(chat("x", "thin"), x_team="poor").task
    return desk.send(chat("y", "thin"), x_team="poor")


async def _of_concurrency(desk: Told) -> Wire:
    desk.send(chat("x", "pair"), x_team="busy")
    await asyncio.sleep(0.1)
    return desk.send(chat("y", "pair"), x_team="busy")


async def _of_session(desk: Told) -> Wire:
    await desk.send(chat("x", "pair"), x_team="agent", x_session="s").task
    await asyncio.sleep(1)
    await desk.send(chat("y", "pair"), x_team="agent", x_session="s").task
    await asyncio.sleep(1)
    return desk.send(chat("z", "pair"), x_team="agent", x_session="s")


async def _of_waiting(desk: Told) -> Wire:
    desk.send(chat("busy", "solo"), lasts_s=50.0)
    await asyncio.sleep(0.1)
    return desk.send(chat("x", "solo"))


async def _of_a_full_lane(desk: Told) -> Wire:
    wire = await _of_waiting(desk)
    for number in range(4):
        wire = desk.send(chat(f"{number}", "solo"))
    return wire


async def _of_forecast(desk: Told) -> Wire:
    desk.admission.capacity.levels()["upstream/thin/*/total"].level = -3000.0  # type: ignore[union-attr]
    return desk.send(chat("x", "thin"))


async def _of_breakers(desk: Told) -> Wire:
    for name in ("one", "two"):
        desk.admission.breakers.take_out(name, desk.loop.time() + 1000)
    return desk.send(chat("x", "pair"))


async def _of_deadline(desk: Told) -> Wire:
    desk.send(chat("busy", "solo"), lasts_s=50.0)
    await asyncio.sleep(0.1)
    return desk.send(chat("x", "solo"), x_request_timeout_ms="2000")


async def _of_draining(desk: Told) -> Wire:
    desk.admission.limiter.drain()
    wire = desk.send(chat("x", "solo"))
    await asyncio.sleep(0)
    await wire.task
    desk.admission.limiter.undrain()
    return wire


@pytest.mark.parametrize(
    ("sent", "reason", "passed", "failed", "word"),
    [
        (_of_the_headers, Reason.BAD_REQUEST, 0, "headers", "there is no lane 'P9'"),
        (_of_the_body, Reason.BAD_REQUEST, 1, "body", "messages is missing"),
        (_of_the_model, Reason.UNKNOWN_MODEL, 1, "body", "no route serves model 'nobodys'"),
        (_of_the_tenants_models, Reason.FORBIDDEN, 1, "body", "its tenant may not use this model or lane"),
        (_of_size, Reason.TOO_LARGE, 1, "body", "exceed every upstream's window or per-minute limit"),
        (_of_quota, Reason.TENANT_QUOTA, 2, "allowance", "its tenant has used what it may use in a minute"),
        (_of_concurrency, Reason.TENANT_CONCURRENCY, 2, "allowance", "as many requests here as it may have"),
        (_of_session, Reason.SESSION_BUDGET, 2, "allowance", "its session has used what it may use"),
        (_of_waiting, Reason.QUEUE_TIMEOUT, 4, "turn", "20.0 s, of which for a free slot at one (20.0 s)"),
        (_of_a_full_lane, Reason.LANE_FULL, 3, "line", "one had no room: a free slot at one"),
        (_of_forecast, Reason.DEADLINE_UNMEETABLE, 3, "line", "thin had no room: tokens a minute of thin in"),
        (_of_breakers, Reason.NO_UPSTREAM, 3, "line", "two was taken out of use by an operator; it may be asked again"),
        (_of_deadline, Reason.DEADLINE_PASSED, 4, "turn", "its deadline had passed"),
        (_of_draining, Reason.DRAINING, 0, "headers", "Tidegate was about to stop"),
    ],
)
def test_one_that_was_refused(sent: Any, reason: Reason, passed: int, failed: str, word: str) -> None:
    """For every kind of reason: how far it came, what stopped it, and what its client was told."""

    async def scenario(desk: Told) -> None:
        wire = await sent(desk)
        await wire.task
        known = desk.explain(wire)
        assert (known["state"], known["reason"]) == ("refused", reason)
        assert checks(known) == dict.fromkeys(list(CHECKS)[:passed], True) | {failed: False}
        assert known["refusal"]["status"] == wire.answers[0][0]
        assert word in desk.story(wire)

    tell(scenario)


CHECKS = ("headers", "body", "allowance", "line", "turn")


def test_one_that_made_room_for_others() -> None:
    """Evicted from the line, after it had stood there."""

    async def scenario(desk: Told) -> None:
        desk.fill()
        await asyncio.sleep(0.1)
        heavy = [desk.send(chat(f"{number}", "solo"), x_team="default") for number in range(4)]
        await asyncio.sleep(1)
        desk.send(chat("light", "solo"), x_team="busy")
        await asyncio.sleep(0.1)
        known = desk.explain(heavy[-1])
        assert (known["state"], known["reason"]) == ("refused", "evicted")
        assert known["queue"]["waited_s"] == pytest.approx(1.0, abs=0.1)
        assert "it had to make room in line for others" in desk.story(heavy[-1])

    tell(scenario)


def test_a_retry_that_took_the_place_of_its_first_copy() -> None:
    """Both are told, under their own tickets; the newest is found by the id that they share."""

    async def scenario(desk: Told) -> None:
        desk.fill()
        await asyncio.sleep(0.1)
        first = desk.send(chat("same", "solo"), x_request_id="mine", x_stainless_retry_count="0")
        await asyncio.sleep(2)
        second = desk.send(chat("same", "solo"), x_request_id="mine", x_stainless_retry_count="1")
        await second.task
        await asyncio.sleep(1)
        known = desk.explain(second)
        assert (known["state"], known["earlier_of_this_id"], known["asked"]["retries"]) == ("served", 1, 1)
        assert "sent again by its client; took the place of a copy that waited" in known["notes"]
        assert "1 with the same id came before it" in desk.story(second)
        [older] = desk.dossiers.newest(5, reason="evicted")
        assert explain(older)["refusal"]["detail"] == "a retry of this request has taken its place"
        assert first.answers

    tell(scenario)


def test_one_that_is_only_observed() -> None:
    """What would have become of it, and what did."""

    async def scenario(desk: Told) -> None:
        desk.fill()
        await asyncio.sleep(0.1)
        wire = desk.send(chat("hello", "watched"))
        await wire.task
        await asyncio.sleep(1)
        known = desk.explain(wire)
        assert (known["state"], known["asked"]["observed"]) == ("served", True)
        assert known["notes"] == ["only observed: it would have been held"]

    tell(scenario)


def test_one_that_a_bypass_let_go() -> None:
    """Whatever was free."""

    async def scenario(desk: Told) -> None:
        desk.fill()
        await asyncio.sleep(0.1)
        waits = desk.send(chat("waits", "solo"))
        await asyncio.sleep(1)
        desk.admission.limiter.bypass()
        comes = desk.send(chat("comes", "solo"))
        await asyncio.sleep(2)
        desk.admission.limiter.no_bypass()
        for wire in (waits, comes):
            assert "let go by a bypass, whatever was free" in desk.story(wire)
        assert desk.explain(waits)["queue"]["waited_s"] == pytest.approx(1.0, abs=0.1)

    tell(scenario)


def test_a_bypass_is_told_of_those_whom_it_let_go() -> None:
    """Also where it ends, or begins, just as somebody goes."""

    async def scenario(desk: Told) -> None:
        limiter, observe, busy = desk.admission.limiter, desk.admission.limiter._observe, desk.fill()
        moves = [limiter.bypass, limiter.no_bypass]

        def then(event: Event) -> None:
            observe(event)
            if isinstance(event, Waited):
                moves.pop(0)()

        limiter._observe = then
        await asyncio.sleep(0.1)
        first, second = desk.send(chat("first", "solo")), desk.send(chat("second", "solo"))
        await busy.task
        await asyncio.gather(first.task, second.task)
        assert not moves
        assert ["let go by a bypass" in desk.story(wire) for wire in (first, second)] == [False, True]

    tell(scenario)


def test_one_of_which_no_record_came() -> None:
    """It is not claimed to be served."""

    async def scenario(desk: Told) -> None:
        desk.report = lambda _wire: None  # type: ignore[method-assign]
        wire = desk.send(chat("hello", "solo"))
        await wire.task
        await asyncio.sleep(30)
        await desk.admission.sweep()
        known = desk.explain(wire)
        assert (known["state"], known["settlement"]["record"]) == ("unknown", False)
        assert "no record of it came" in desk.story(wire)
        assert "went to one; what became of it is not known" in desk.story(wire)

    tell(scenario)


def test_what_was_used_beyond_what_was_reserved_is_told() -> None:
    """Also where it put a counter into debt."""

    async def scenario(desk: Told) -> None:
        wire = desk.send(chat("hello", "thin"))
        wire.tail = {"finish": "stop", "done": "1", "in": 700, "out": 50}
        await wire.task
        await asyncio.sleep(1)
        settled = desk.explain(wire)["settlement"]
        assert settled["beyond_reserved"] == 750 - settled["reserved"]["total"]
        [debt] = settled["into_debt"]
        assert (debt["key"], debt["words"]) == ("upstream/thin/*/total", "tokens a minute of thin")
        assert debt["amount"] > 0
        assert "of tokens a minute of thin were taken into debt" in desk.story(wire)

    tell(scenario)


def test_hostile_words_are_told_harmlessly() -> None:
    """A story is printed in somebody's terminal."""

    async def scenario(desk: Told) -> None:
        wire = desk.send(chat("x", "\x1b]0;owned\x07"), x_request_id="\x1b[2J\r\nfake: line", x_team="\u202eevil")
        await wire.task
        story = desk.story(wire)
        assert all(line.isprintable() for line in story.splitlines())
        assert "?[2J??fake: line" in story.splitlines()[0]

    tell(scenario)


@pytest.mark.parametrize("kind", [Ledger, Suspending])
def test_any_request_has_exactly_one_dossier_that_is_closed_in_the_end(
    kind: type[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of random requests of random fates, some of which break off anywhere; explained at any moment."""
    monkeypatch.setattr(wiring, "MemoryCapacity", kind)
    seed = random.randrange(2**32)
    print("seed", seed)  # noqa: T201
    rng = random.Random(seed)
    closed, fates = Counter[str](), Counter[str]()

    async def run(loop: VirtualLoop) -> None:
        desk = Told(loop, limit=100)
        desk.dossiers.ended.append(lambda dossier: closed.update([dossier.ticket]))
        desk.dossiers.ended.append(lambda dossier: fates.update([dossier.state]))
        for number in range(1200):
            await asyncio.sleep(rng.expovariate(2.0))
            wire = _sends(desk, rng, number)
            if rng.random() < 0.15:
                desk.duties.append(asyncio.ensure_future(_leaves(wire, rng.expovariate(0.3))))
            if rng.random() < 0.02:
                _upset(desk, rng)
            if rng.random() < 0.1:
                for dossier in desk.dossiers.newest(3):
                    told(plain(explain(dossier, now=loop.time())))
                    summary(dossier)
            assert len(desk.dossiers) - desk.dossiers.open <= 100
        desk.admission.limiter.no_bypass()
        desk.admission.limiter.resume("P1")
        await desk.settle_down()
        assert desk.dossiers.open == 0
        assert len(desk.dossiers) == 100
        assert len(closed) == 1200
        assert set(closed.values()) == {1}
        fates.pop("unknown", None)  # who leaves while it is let go, of whom no record tells
        fates.pop("evicted", None)  # whose retry came while it ran, seldom
        assert fates.keys() == {"served", "failed", "refused", "left"}

    play(run)


def _sends(desk: Told, rng: random.Random, number: int) -> Wire:
    if rng.random() < 0.05:
        return desk.send({"model": rng.choice(["solo", "nobodys"])})
    model = rng.choice(["solo", "pair", "pair", "mixed", "thin", "watched", "nobodys"])
    how = {
        "x_team": rng.choice(["default", "poor", "busy", "agent", "vague", "broke"]),
        "x_session": rng.choice("abcdef"),
    }
    if rng.random() < 0.2:
        how |= {"x_request_id": "same", "x_stainless_retry_count": str(rng.randrange(3))}
    if rng.random() < 0.1:
        how["x_request_timeout_ms"] = str(rng.randrange(1, 9000))
    text = "again" if rng.random() < 0.3 else f"{number}"
    wire = desk.send(chat(text, model), lasts_s=rng.expovariate(0.7), slow=rng.choice([0.0, 0.01]), **how)
    wire.silent = rng.random() < 0.1
    return wire


async def _leaves(wire: Wire, after_s: float) -> None:
    await asyncio.sleep(after_s)
    wire.task.cancel()


def _upset(desk: Told, rng: random.Random) -> None:
    limiter, breakers = desk.admission.limiter, desk.admission.breakers
    rng.choice(
        [
            limiter.bypass, limiter.no_bypass, lambda: limiter.pause("P1", desk.loop.time() + 5),
            lambda: limiter.resume("P1"), lambda: breakers.trip("one", "x"), lambda: breakers.reset("one", "x"),
            lambda: breakers.take_out("two", desk.loop.time() + 9), lambda: breakers.put_back("two"),
            limiter.drain, limiter.undrain, limiter.undrain,
        ]
    )()  # fmt: skip


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("upstream/primary/*/total", "tokens a minute of primary"),
        ("upstream/primary/meta/llama-3/input", "input tokens a minute of primary for meta/llama-3"),
        ("upstream/primary/slots", "a free slot at primary"),
        ("upstream/primary/kv", "room in the KV cache at primary"),
        ("upstream/primary/usd_day", "dollars a day of primary"),
        ("upstream/primary/breaker", "the breaker of primary"),
        ("tenant/a%2Fb/total", "tokens a minute of tenant a/b"),
        ("tenant/a/slots", "requests at a time of tenant a"),
        ("tenant/%1B%5B2J/requests", "requests a minute of tenant ?[2J"),
        ("session/a/s-1/tokens", "tokens of a session of tenant a"),
        ("session/a/usd", "dollars of a session of tenant a"),
        ("route/gpt-%2A/usd_month", "dollars a month of the route of gpt-*"),
        ("lane/P1/max_requests", "requests in line of lane P1"),
        ("lane/P1/paused", "the end of the pause of lane P1"),
        ("what else", "what else"),
    ],
)
def test_counters_in_words(key: str, words: str) -> None:
    """As an operator calls them."""
    assert key_words(key) == words


def test_several_counters_in_words() -> None:
    """With commas between, and an "and"."""
    assert keys_words(()) == ""
    assert keys_words(("upstream/a/slots",)) == "a free slot at a"
    keys = ("upstream/a/slots", "upstream/b/slots", "upstream/b/kv")
    assert keys_words(keys) == "a free slot at a, a free slot at b and room in the KV cache at b"


@pytest.mark.parametrize(
    ("number", "words"),
    [(0.0, "0 ms"), (0.2504, "250 ms"), (3.44, "3.4 s"), (119.0, "119.0 s"), (320.0, "5 min 20 s"),
     (3660.0, "1 h 1 min"), (float("inf"), "nobody knows how long")],
)  # fmt: skip
def test_times_in_words(number: float, words: str) -> None:
    """As people say them."""
    assert seconds(number) == words


@pytest.mark.parametrize("why", list(Why))
def test_every_reason_not_to_ask_somebody_has_words(why: Why) -> None:
    """Also where nothing more is known."""
    for state in ("", "open", "half_open", "ramping", "out"):
        for keys in ((), ("upstream/a/slots",)):
            for wait_s in (None, 2.0, float("inf")):
                words = why_not(PassedOver("a", why, keys, wait_s, state))
                assert words.isprintable()
                assert len(words) > 8
                assert ("2.0 s" in words) <= (wait_s == 2.0)


def test_every_reason_has_words() -> None:
    """And each is another."""
    from extproc.telemetry.explain import REASON_WORDS  # noqa: PLC0415

    assert set(REASON_WORDS) == set(Reason) - {Reason.UPSTREAM_FAILED, Reason.ADMISSION_UNAVAILABLE}
    assert len(set(REASON_WORDS.values())) == len(REASON_WORDS)
