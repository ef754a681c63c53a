"""One trace of a request: its caller's span, Envoy's, ours and what upstreams are told, each below the right one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from extproc.stack import Stack
from tests.collector import Collector, Received
from tests.e2e.conftest import chat
from tests.e2e.doubles import CHAT, NEVER_OPENS, Upstream, running, until

CALLER = "00f067aa0ba902b7"
KEY = "Bearer collectors-key"
EVENTS = (
    "".join(
        f"data: {json.dumps(event)}\n\n"
        for event in (
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "yes"}, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}},
        )
    )
    + "data: [DONE]\n\n"
)
STREAM = (200, {"content-type": "text/event-stream"}, EVENTS.encode())
BROKEN = (503, {}, b"{}")
SERVER = 2
"""Kind of a span, as the protocol has it."""


@dataclass
class World:
    """What every test looks at. A trace's id is made of one letter."""

    stack: Stack
    collector: Collector
    outside: Upstream
    engine: Upstream

    def ask(self, letter: str, flags: str = "01", body: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
        """One request in the trace of that letter; without one where it is empty."""
        if letter:
            headers |= {"traceparent": f"00-{letter * 32}-{CALLER}-{flags}", "baggage": "user=joe"}
        return httpx.post(
            f"{self.stack.url}{CHAT}?key=sk-in-the-query", json=body or chat(), headers=headers, timeout=30
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A provider that is not ours, an engine that is, one that serves one at a time; everything is sampled."""
    folder, outside, engine = tmp_path_factory.mktemp("traces"), Upstream(), Upstream()
    headers = tmp_path_factory.mktemp("key") / "headers"
    headers.write_text(f"Authorization: {KEY}\n", "utf-8")
    with ExitStack() as open_:
        collector = open_.enter_context(Collector().listening())
        for upstream in (outside, engine):
            open_.enter_context(upstream.listening())
        where = {name: f"http://127.0.0.1:{u.port}" for name, u in (("outside", outside), ("engine", engine))}
        plain = {"concurrency": 50, "breaker": NEVER_OPENS}
        slow = {"first_token_s": 1.0, "output_tokens_per_s": 2000}
        upstreams = {
            "outside": {"provider": "compatible", "url": where["outside"], **plain},
            "engine": {"provider": "vllm", "url": where["engine"], "owned": True, **plain},
            "narrow": {"owned": True, "concurrency": 1, "fake": slow},
        }
        routes = [{"models": ["narrow"], "chain": ["narrow"]}, {"models": ["gpt-5"], "chain": ["outside", "engine"]}]
        otlp = {"endpoint": collector.url, "headers_file": str(headers), "metrics": False}
        telemetry = {"trace_sample": 1.0, "otlp": otlp}
        settings = {"upstreams": upstreams, "routes": routes, "telemetry": telemetry, "other_endpoints": "narrow"}
        stack = open_.enter_context(running(folder, **settings))
        world = World(stack, collector, outside, engine)
        _happen(world)
        yield world


def _happen(world: World) -> None:
    """All of it at once, since Envoy sends its spans every five seconds."""
    world.outside.answers.append(BROKEN)
    assert world.ask("a").status_code == 200
    world.outside.answers.append(STREAM)
    assert world.ask("b", body=chat(stream=True)).status_code == 200
    assert world.ask("c", body=chat(model="unknown")).status_code == 404
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(world.ask, letter, body=chat(model="narrow")) for letter in "de"]
        assert [each.result().status_code for each in asked] == [200, 200]
    assert world.ask("f", flags="00").status_code == 200
    assert world.ask("", traceparent="00-nonsense").status_code == 200
    assert world.ask("").status_code == 200


def _of(spans: list[Received], service: str) -> list[Received]:
    return [span for span in spans if span.service == service]


def _inside(span: Received, other: Received) -> bool:
    return other.began <= span.began <= span.ended <= other.ended


def test_one_that_failed_over_is_one_trace(world: World) -> None:
    """Caller, Envoy, ours, attempts; the engine's spans would join, and the provider learns of nothing."""
    spans = world.collector.trace("a" * 32, at_least=7)
    envoys, ours = _of(spans, "tidegate-envoy"), _of(spans, "tidegate")
    (ingress,) = [span for span in envoys if span.parent == CALLER]
    (asking,) = [span for span in envoys if "ExternalProcessor" in span.name]
    attempts = [span for span in envoys if span.name.startswith("router")]
    assert {span.parent for span in (asking, *attempts)} == {ingress.span}
    root, first, second = ours
    assert (root.name, root.parent) == ("chat gpt-5", asking.span)
    assert [(span.name, span.parent, span.failed) for span in (first, second)] == [
        ("attempt outside", root.span, True), ("attempt engine", root.span, False),
    ]  # fmt: skip
    assert (first.attributes["http.response.status_code"], second.attributes["tidegate.attempt"]) == (503, 2)
    assert not root.failed
    assert _inside(first, root)
    assert _inside(second, root)
    assert first.ended <= second.began + 1e-6
    assert abs(root.began - ingress.began) < 1.0, "times are those of the calendar"
    told = (world.engine.received[0].get("traceparent") or b"").decode().split("-")
    assert (told[1], told[3]) == ("a" * 32, "01")
    assert told[2] == max(attempts, key=lambda span: span.began).span
    for header in ("traceparent", "tracestate", "baggage"):
        assert not any(asked.get(header) for asked in world.outside.received)
    told_of = json.dumps([span.attributes for span in spans])
    assert "joe" not in told_of
    assert "sk-in-the-query" not in told_of


def test_a_stream_tells_its_usage_and_first_token(world: World) -> None:
    """As the answer said it."""
    root, attempt = _of(world.collector.trace("b" * 32, at_least=5), "tidegate")
    told = root.attributes
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (11, 7)
    assert (told["gen_ai.request.stream"], told["gen_ai.response.finish_reasons"]) == (True, ["stop"])
    assert told["gen_ai.response.time_to_first_chunk"] == attempt.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert (told["tidegate.upstream"], told["gen_ai.operation.name"]) == ("outside", "chat")


def test_a_refused_one_is_a_trace_too(world: World) -> None:
    """Its reason is the type of its error; and its query, where some callers have their key, is in no span."""
    spans = world.collector.trace("c" * 32, at_least=3)
    (root,) = _of(spans, "tidegate")
    (url,) = {span.attributes["http.url"] for span in spans if "http.url" in span.attributes}
    path = "" if world.stack.settings.gateway.profile == "classic" else CHAT
    assert url == f"{world.stack.url}{path}"
    assert "sk-in-the-query" not in json.dumps([span.attributes for span in spans])
    assert (root.attributes["error.type"], root.attributes["tidegate.decision"]) == ("unknown_model", "refused")
    assert not root.failed


def test_one_that_waited_shows_for_how_long_and_for_what(world: World) -> None:
    """Between arrival and its turn."""
    spans = until(lambda: _of_two(world))
    (wait,) = [span for span in spans if span.name == "wait"]
    (root,) = [span for span in spans if span.span == wait.parent]
    (attempt,) = [span for span in spans if span.parent == root.span and span is not wait]
    assert 0.0 < wait.ended - wait.began <= root.attributes["tidegate.wait_s"] + 0.05
    assert wait.ended <= attempt.began + 0.05
    assert wait.attributes["tidegate.binding"] == ["upstream/narrow/slots"]


def _of_two(world: World) -> list[Received]:
    """Our spans of the two that were there at once, when all are there: only one of them waited."""
    found = [span for span in _of(world.collector.spans, "tidegate") if span.trace in ("d" * 32, "e" * 32)]
    return found if len(found) == 5 else []


def test_who_decides_what_is_kept(world: World) -> None:
    """The caller, where it comes with a trace; what is no trace gets one of ours, as what comes without any does."""
    own = until(lambda: _both(world), within_s=30)
    plain, nonsense = sorted(own, key=lambda span: span.began, reverse=True)
    (asking,) = [span for span in world.collector.trace(plain.trace, at_least=5) if span.span == plain.parent]
    assert (asking.service, nonsense.parent) == ("tidegate-envoy", "")
    assert nonsense.trace == nonsense.attributes["tidegate.request_id"].replace("-", "")
    assert not [span for span in world.collector.spans if span.trace == "f" * 32]


def _both(world: World) -> list[Received]:
    """Requests in no trace of a caller, once there are two."""
    known = {letter * 32 for letter in "abcdef"}
    found = [span for span in _of(world.collector.spans, "tidegate") if span.kind == SERVER and span.trace not in known]
    return found if len(found) == 2 else []


def test_collectors_get_their_key(world: World) -> None:
    """From both, and it is in nothing that was rendered or written."""
    assert {call["authorization"] for call in world.collector.headers} == {KEY}
    agents = " ".join(call["user-agent"] for call in world.collector.headers)
    assert "Envoy" in agents
    assert "Python" in agents
    folder = world.stack.workdir
    assert not [file for file in folder.rglob("*.*") if KEY.encode() in file.read_bytes()]
