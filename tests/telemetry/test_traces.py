"""What a trace tells of each kind of request, from its dossier to the library's spans."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from extproc.core.breaker import Outcome
from extproc.core.events import (
    Admitted,
    AttemptFailed,
    Event,
    Left,
    Observed,
    PassedOver,
    Queued,
    Refused,
    Settled,
    Shadowed,
    Spell,
    Waited,
    Why,
)
from extproc.core.refusal import Reason
from extproc.core.request import Endpoint, Request, Size, Usage
from extproc.telemetry.conventions import Conventions
from extproc.telemetry.dossiers import Dossiers
from extproc.telemetry.sampling import Sampling
from extproc.telemetry.traces import MOST_DUE, SETTLE_S, Traces
from tests.doubles import request

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
EPOCH_S = 1_800_000_000.0
PLACES = Conventions(
    {
        "a": {"gen_ai.provider.name": "openai", "server.address": "api.openai.com", "server.port": 443},
        "b": {"gen_ai.provider.name": "vllm", "server.address": "vllm", "server.port": 8000},
    },
    frozenset({"gpt-5"}),
)


class World:
    """Dossiers and traces on a clock that stands until it is moved."""

    def __init__(self, share: float = 1.0) -> None:
        self.now = 100.0
        self.spans = InMemorySpanExporter()
        self.dossiers = Dossiers(100, lambda: self.now, lambda: self.now + EPOCH_S)
        where = SimpleSpanProcessor(self.spans)
        self.traces = Traces(Sampling(share), PLACES, where, lambda: self.now, "one")
        self.dossiers.ended.append(self.traces.hear)

    def hear(self, *story: tuple[float, Event]) -> None:
        """Events, each at its time after 100."""
        for at, event in story:
            self.now = 100.0 + at
            self.dossiers(event)

    async def told(self) -> list[ReadableSpan]:
        """What came of it, the request's own span first, the others as they began."""
        await self.traces.close()
        found = sorted(self.spans.get_finished_spans(), key=lambda span: (span.start_time, span.kind.name))
        return sorted(found, key=lambda span: span.kind is not SpanKind.SERVER)


def asked(**changes: Any) -> Request:
    """A request that came at 100 s of the clock with a sampled trace."""
    plain = {
        "arrived": 100.0, "trace": f"00-{TRACE}-{SPAN}-01", "model": "gpt-5", "lane": "P1", "tenant": "chat",
        "endpoint": Endpoint.CHAT, "size": Size(30, 20), "id": str(uuid4()), "stream": False,
    }  # fmt: skip
    return request(**plain | changes)


def times(span: ReadableSpan) -> tuple[float, float]:
    """Seconds after its request came."""
    begin = round((EPOCH_S + 100.0) * 1e9)
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.start_time - begin) / 1e9, (span.end_time - begin) / 1e9


def said(span: ReadableSpan) -> Mapping[str, Any]:
    """Its attributes."""
    return dict(span.attributes or {})


async def test_one_that_went_at_once_and_was_served() -> None:
    """The request below its caller, an attempt below it; words of the conventions, and ours."""
    world, one = World(), asked(stream=True)
    world.hear(
        (0.0, Admitted(one, ("a", "b"), 0.0)),
        (1.1, Settled(one, "a", 1, 200, Usage(28, 9), 0.0, 0.25, 1.0, finish="stop", cost_usd=0.002)),
    )
    root, attempt = await world.told()
    assert (root.name, root.kind, times(root)) == ("chat gpt-5", SpanKind.SERVER, (0.0, 1.0))
    assert root.parent is not None
    assert f"{root.parent.trace_id:032x}-{root.parent.span_id:016x}" == f"{TRACE}-{SPAN}"
    assert root.parent.is_remote
    assert root.status.status_code is StatusCode.UNSET
    assert said(root) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "gpt-5",
        "gen_ai.request.stream": True,
        "gen_ai.provider.name": "openai",
        "gen_ai.usage.input_tokens": 28,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 0.25,
        "http.response.status_code": 200,
        "tidegate.decision": "admitted",
        "tidegate.request_id": one.id,
        "tidegate.ticket": one.ticket,
        "tidegate.tenant": "chat",
        "tidegate.lane": "P1",
        "tidegate.route": one.route,
        "tidegate.counted_tokens": one.counted,
        "tidegate.reserved.input_tokens": 30,
        "tidegate.reserved.output_tokens": 20,
        "tidegate.wait_s": 0.0,
        "tidegate.order": ("a", "b"),
        "tidegate.upstream": "a",
        "tidegate.attempts": 1,
        "tidegate.cost_usd": 0.002,
    }
    assert (attempt.name, attempt.kind, times(attempt)) == ("attempt a", SpanKind.CLIENT, (0.0, 1.0))
    assert attempt.parent is not None
    assert root.context is not None
    assert attempt.parent.span_id == root.context.span_id
    assert said(attempt)["server.address"] == "api.openai.com"
    about = root.resource.attributes
    assert (about["service.name"], about["service.instance.id"]) == ("tidegate", "one")


async def test_one_that_waited_and_failed_over() -> None:
    """Wait and attempts follow each other, and tell what was waited for, and what failed. Records may come late."""
    world, one = World(), asked()
    lacking = ("upstream/a/*/total",)
    passed = (PassedOver("c", Why.BREAKER, state="open"),)
    failed = AttemptFailed("a", Outcome.FAILURE, 503, "x/y", one.ticket, "b", number=1, seconds=0.5, cause="status 503")
    world.hear(
        (0.1, Queued(one, 2.5, 3, lacking)),
        (2.0, Waited(one, 1.9, (Spell(lacking, 1.5), Spell(("upstream/a/slots",), 0.4)))),
        (2.0, Admitted(one, ("a", "b"), 2.0, 2.5, passed)),
        (4.0, Settled(one, "b", 2, 200, None, 2.0, None, 3.9)),
        (4.2, failed),
    )
    root, wait, first, second = await world.told()
    assert [span.name for span in (root, wait, first, second)] == ["chat gpt-5", "wait", "attempt a", "attempt b"]
    assert [times(span) for span in (root, wait, first, second)] == [(0, 3.9), (0.1, 2.0), (2.0, 2.5), (2.5, 3.9)]
    assert wait.kind is SpanKind.INTERNAL
    assert said(wait) == {
        "tidegate.lane": "P1",
        "tidegate.position": 3,
        "tidegate.predicted_wait_s": 2.5,
        "tidegate.binding": ("upstream/a/*/total", "upstream/a/slots"),
    }
    assert said(root)["tidegate.passed_over"] == ("c: breaker",)
    assert said(root)["tidegate.predicted_wait_s"] == 2.5
    assert (first.status.status_code, first.status.description) == (StatusCode.ERROR, "status 503")
    assert said(first)["error.type"] == "503"
    assert said(first)["tidegate.following"] == "b"
    assert (said(second)["tidegate.attempt"], said(second)["gen_ai.provider.name"]) == (2, "vllm")
    assert {span.status.status_code for span in (root, wait, second)} == {StatusCode.UNSET}


@pytest.mark.parametrize(
    ("reason", "status", "error"),
    [
        (Reason.QUEUE_TIMEOUT, 429, StatusCode.ERROR),
        (Reason.LANE_FULL, 503, StatusCode.ERROR),
        (Reason.DEADLINE_PASSED, 504, StatusCode.ERROR),
        (Reason.SESSION_BUDGET, 403, StatusCode.UNSET),
        (Reason.TOO_LARGE, 413, StatusCode.UNSET),
    ],
)
async def test_one_that_was_refused_is_a_trace_too(reason: Reason, status: int, error: StatusCode) -> None:
    """With the reason as the type of its error; for the caller's own mistakes the status is none, as in HTTP."""
    world, one = World(), asked()
    refused = Refused(reason, status, "chat", "P1", 3.0, one.id, one, "why", 7.5, one.trace, "/v1/chat/completions")
    world.hear((0.1, Queued(one, 1.0)), (3.0, Waited(one, 2.9)), (3.0, refused))
    root, wait = await world.told()
    assert (times(root), times(wait)) == ((0.0, 3.0), (0.1, 3.0))
    assert root.status.status_code is error
    told = said(root)
    assert (told["error.type"], told["tidegate.reason"], told["tidegate.decision"]) == (reason, reason, "refused")
    assert (told["http.response.status_code"], told["tidegate.retry_after_s"]) == (status, 7.5)
    assert told["url.path"] == "/v1/chat/completions"


async def test_one_of_which_nothing_but_its_headers_was_known() -> None:
    """It has a trace of its own where it came without, by the name that Envoy gave it."""
    world, name = World(), str(uuid4())
    world.hear((0.2, Refused(Reason.DRAINING, 503, waited_s=0.2, request_id=name)))
    [root] = await world.told()
    assert (root.name, root.parent, times(root)) == ("request", None, (0.0, 0.2))
    assert root.context is not None
    assert f"{root.context.trace_id:032x}" == name.replace("-", "")


async def test_an_answer_of_last_resort_is_no_error() -> None:
    """Its caller got 200."""
    world, one = World(), asked()
    world.hear((1.0, Refused(Reason.NO_UPSTREAM, 503, request=one, trace=one.trace, instead=True)))
    [root] = await world.told()
    assert root.status.status_code is StatusCode.UNSET
    assert said(root)["http.response.status_code"] == 200
    assert said(root)["tidegate.reason"] == "no_upstream"


async def test_one_that_no_upstream_answered() -> None:
    """All of its attempts failed, and so did it; there is no other attempt."""
    world, one = World(), asked()
    world.hear(
        (0.0, Admitted(one, ("a", "b"), 0.0)),
        (0.5, AttemptFailed("a", Outcome.PACED, 429, "", one.ticket, "b", number=1, seconds=0.5)),
        (0.9, AttemptFailed("b", Outcome.FAILURE, 0, "", one.ticket, number=2, seconds=0.3)),
        (1.0, Settled(one, "", 2, 503, None, 0.0, duration_s=0.85)),
    )
    root, first, second = await world.told()
    assert [times(span) for span in (root, first, second)] == [(0.0, 0.85), (0.0, 0.5), (0.5, 0.8)]
    assert {span.status.status_code for span in (root, first, second)} == {StatusCode.ERROR}
    assert [said(span)["error.type"] for span in (root, first, second)] == ["503", "429", Outcome.FAILURE]


async def test_what_the_caller_did_wrong_at_the_upstream_is_no_error_of_ours() -> None:
    """A 400 that is passed on."""
    world, one = World(), asked()
    world.hear(
        (0.0, Admitted(one, ("a",), 0.0)),
        (0.3, AttemptFailed("a", Outcome.IGNORED, 400, "", one.ticket, number=1, seconds=0.3)),
        (0.4, Settled(one, "", 1, 400, None, 0.0, duration_s=0.3)),
    )
    root, attempt = await world.told()
    assert (root.status.status_code, said(root)["error.type"]) == (StatusCode.UNSET, "400")
    assert attempt.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(
    ("settled", "error", "word"),
    [
        ({"client_gone": True}, StatusCode.UNSET, "tidegate.client_gone"),
        ({"evicted": True}, StatusCode.UNSET, "error.type"),
        ({"evicted": True}, StatusCode.UNSET, "tidegate.reason"),
        ({"flags": frozenset({"upstream_remote_reset"})}, StatusCode.ERROR, "error.type"),
        ({"fault": "answer is none: truncated"}, StatusCode.ERROR, "error.type"),
    ],
)
async def test_an_answer_that_did_not_come_to_its_end(settled: dict[str, Any], error: StatusCode, word: str) -> None:
    """An upstream that broke off has failed; that a client left, or sent it again, is nobody's error."""
    world, one = World(), asked()
    world.hear(
        (0.0, Admitted(one, ("a",), 0.0)), (1.0, Settled(one, "a", 1, 200, None, 0.0, duration_s=0.9, **settled))
    )
    root, attempt = await world.told()
    assert (root.status.status_code, attempt.status.status_code) == (error, error)
    assert said(root)[word]
    assert times(attempt) == (0.0, 0.9)


async def test_what_would_have_been_done_in_observe_mode_is_told() -> None:
    """And which limits in shadow mode would have held it; a model is named where the settings have it by then."""
    world, one = World(), asked(observed=True, model="new")
    world.traces.follow(Conventions(PLACES.upstreams, frozenset({"new"})))
    world.hear(
        (0.0, Observed(one, Reason.TENANT_QUOTA)),
        (0.0, Shadowed(one, "lane/P1/max_requests")),
        (0.0, Admitted(one, ("a",), 0.0)),
        (1.0, Settled(one, "a", 1, 200, None, 0.0, duration_s=0.5)),
    )
    root, _ = await world.told()
    told = said(root)
    assert (root.name, told["tidegate.observed"], told["tidegate.observed_reason"]) == (
        "chat new",
        True,
        "tenant_quota",
    )
    assert told["tidegate.shadowed"] == ("lane/P1/max_requests",)


async def test_one_that_left_the_line() -> None:
    """Its wait ends where it left."""
    world, one = World(), asked()
    world.hear((0.1, Queued(one, 9.0)), (2.0, Waited(one, 1.9)), (2.0, Left(one, 2.0)))
    root, wait = await world.told()
    assert (times(root), times(wait), said(root)["tidegate.decision"]) == ((0.0, 2.0), (0.1, 2.0), "left")


async def test_one_of_which_no_record_came() -> None:
    """That is told; that it was sent is known."""
    world, one = World(), asked()
    world.hear((0.0, Admitted(one, ("a", "b"), 0.0)), (9.0, Settled(one, "", 0, 0, None, 0.0, lost=True)))
    root, attempt = await world.told()
    assert (root.status.status_code, said(root)["tidegate.outcome_unknown"]) == (StatusCode.UNSET, True)
    assert (attempt.name, times(attempt)) == ("attempt a", (0.0, 9.0))


@pytest.mark.parametrize(("share", "trace", "kept"), [(0.0, "", 0), (1.0, "", 1), (1.0, "00", 0), (0.0, "01", 1)])
async def test_only_what_is_sampled_is_told(share: float, trace: str, kept: int) -> None:
    """Whoever comes with a trace has decided, else a share is kept."""
    world = World(share)
    one = asked(trace=trace and f"00-{TRACE}-{SPAN}-{trace}")
    world.hear((0.0, Refused(Reason.LANE_FULL, 503, request=one, trace=one.trace)))
    assert len(await world.told()) == kept


async def test_hostile_names_are_cut_and_cost_no_other_span() -> None:
    """What is no text would lose the whole batch that it is sent with."""
    world = World()
    evil = "\ud800\x00<script>" + "m" * 10_000
    one = asked(model=evil, tenant=evil, trace="00-" + "f" * 40)
    world.hear(
        (0.0, Queued(one, 1.0, binding=(evil,))), (1.0, Refused(Reason.LANE_FULL, 503, detail=evil, request=one))
    )
    root, wait = await world.told()
    assert root.name == "chat"
    for span in (root, wait):
        for word in said(span).values():
            for text in word if isinstance(word, tuple) else (word,):
                assert not isinstance(text, str) or (text.encode() and len(text) <= 200)
    assert json.loads(root.to_json())["attributes"]["gen_ai.request.model"].startswith("?\x00<script>")


async def test_times_far_off_keep_their_order() -> None:
    """Whatever the records say: no span ends before it begins, or outlasts its request."""
    world, one = World(), asked()
    world.hear(
        (0.0, Admitted(one, ("a", "b"), 0.0)),
        (0.5, AttemptFailed("a", Outcome.FAILURE, 503, "", one.ticket, "b", number=1, seconds=50.0)),
        (1.0, Settled(one, "b", 2, 200, None, 0.0, duration_s=400.0)),
    )
    spans = await world.told()
    assert [times(span) for span in spans] == [(0.0, 1.0), (0.0, 1.0), (1.0, 1.0)]


async def test_the_records_of_attempts_are_waited_for_and_one_bad_dossier_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it runs, spans are made a moment after the end."""
    monkeypatch.setattr("extproc.telemetry.traces.EVERY_S", 0.001)
    world, bad, good = World(), asked(ticket="bad"), asked(ticket="good", trace="")
    for one in (bad, good):
        world.hear((0.0, Admitted(one, ("a",), 0.0)), (1.0, Settled(one, "a", 1, 200, None, 0.0, duration_s=0.1)))
    broken = world.dossiers.of("bad")
    assert broken is not None
    broken.began = float("nan")
    running = asyncio.create_task(world.traces.run())
    await asyncio.sleep(0.02)
    assert not world.spans.get_finished_spans()
    world.now += SETTLE_S
    with caplog.at_level(logging.ERROR):
        while len(world.spans.get_finished_spans()) < 2:  # noqa: ASYNC110 - a list of the library
            await asyncio.sleep(0.001)
    running.cancel()
    assert {f"{span.context.trace_id:032x}" for span in world.spans.get_finished_spans() if span.context} == {
        good.id.replace("-", "")
    }
    assert [record.message for record in caplog.records] == ["the trace of a request could not be told"]


async def test_what_is_to_be_told_does_not_grow_without_end() -> None:
    """The oldest are dropped, and counted."""
    world = World()
    for n in range(MOST_DUE + 5):
        world.hear((0.0, Refused(Reason.LANE_FULL, 503, request_id=f"r-{n}")))
    assert world.traces.dropped == 5
