"""What a request costs in the end, for every way it can end: at its upstream, at its tenant, exactly once.

Levels are read from the state page before and after; buckets refill so slowly that what was taken can be told exactly.
Two upstreams differ only in when their provider charges: `upfront` keeps what it charged on arrival, `actual` settles.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import httpx
import pytest

from extproc import dialects, tokens
from extproc.core.request import Endpoint
from extproc.fakes.prompt import messages_tokens
from extproc.stack import Stack, free_ports
from extproc.wire.pb.access_log_pb2 import AccessLogType, StreamAccessLogsMessage
from tests.e2e.conftest import books_balance, chat
from tests.e2e.doubles import CHAT, MESSAGES, NEVER_OPENS, connect, forget, running, until, written
from tests.e2e.test_failover import Meter

HTTP = httpx.Client(timeout=30)
HELLO = chat()
MORE_THAN_COUNTED = chat("你好世界" * 20)
"""A prompt in which the fake counts more tokens than we do."""
CAP = 16
TENANTS = [f"team-{i}" for i in range(60)]
UNUSED = iter(TENANTS)
FIRST_TOKEN_S = 0.4


def counted(body: Mapping[str, Any]) -> int:
    """Input tokens as we estimate them."""
    return tokens.estimate(dialects.read(Endpoint.CHAT, json.dumps(body).encode()).call.prompt, "actual")


def told(body: Mapping[str, Any]) -> int:
    """Input tokens as the fake reports them."""
    return messages_tokens(body["messages"])


INPUT, PRICE = counted(HELLO), counted(HELLO) + CAP


@pytest.fixture(scope="module")
def odd() -> Iterator[Odd]:
    """A provider with habits that the fakes do not have."""
    with Odd().listening() as one:
        yield one


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, odd: Odd) -> Iterator[Stack]:
    """The stack of this file."""
    folder = tmp_path_factory.mktemp("settlement")
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
    upstreams = {name: upstream(accounting=name) for name in ("actual", "upfront")}
    upstreams |= {
        "split": upstream(accounting="actual", limits=[{"itpm": 120, "otpm": 120, "burst_s": 50_000}]),
        "odd": upstream(accounting="actual", provider="compatible", url=odd.url),
        "nobody-actual": upstream(accounting="actual", provider="compatible", url=nobody),
        "nobody-upfront": upstream(accounting="upfront", provider="compatible", url=nobody),
        "other": upstream(accounting="actual", concurrency=2),
    }
    routes = [[name, name] for name in upstreams] + [["pair", "upfront", "actual"]]
    tenants = {name: {"tpm": 120, "rpm": 60, "concurrency": 5} for name in TENANTS}
    half_full(folder / "levels.json", upstreams)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TIDEGATE_LOG", "INFO")
        with running(
            folder,
            full=False,
            upstreams=upstreams,
            routes=[{"models": [model], "chain": chain, "acknowledge_unowned": True} for model, *chain in routes],
            other_endpoints="other",
            identity={"tenant": "header:x-team"},
            tenants={**tenants, "narrow": {"concurrency": 1}},
            lanes={"P1": {"max_wait_s": 0.5}, "patient": {"max_wait_s": 30}},
            timeouts={"first_token_s": FIRST_TOKEN_S},
            tokens={"calibrate": False},
        ) as stack:
            yield stack


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    """The shared stack with empty records; nothing may stay open when a test ends."""
    forget(shared)
    yield shared
    books_balance(shared)


def upstream(**more: Any) -> dict[str, Any]:
    """An upstream whose buckets gain two units a second, and whose breaker never opens."""
    return {
        "limits": [{"tpm": 120, "rpm": 120, "burst_s": 50_000}],
        "headroom": 0,
        "follow_headers": False,
        "breaker": NEVER_OPENS,
    } | ({"fake": FAST, **more} if "provider" not in more else more)


FAST = {"first_token_s": 0.01, "output_tokens_per_s": 2000, "burst_s": 100_000, "tokens_per_event": 1}


def test_the_log_begins_with_where_it_serves(shared: Stack) -> None:
    """And by which config."""
    service = shared.settings.service
    lines = [json.loads(line) for line in (shared.workdir / "service.log").read_text("utf-8").splitlines()]
    told = next(line for line in lines if line["message"] == "serves")
    assert (told["level"], told["address"], told["console"]) == ("info", service.address, service.console)
    assert (told["profile"], told["config"]) == (shared.settings.gateway.profile, shared.state()["config"]["version"])


def half_full(file: Any, upstreams: Mapping[str, Any]) -> None:
    """Let the service find all buckets half full."""
    kinds = ("total", "input", "output", "requests")
    levels = {f"upstream/{name}/*/{kind}": 50_000 for name in upstreams for kind in kinds}
    file.write_text(json.dumps({"at": time.time(), "levels": levels}), "utf-8")


@dataclass(frozen=True, slots=True)
class Way:
    """A way for a request to end: its fault, and what it costs where nothing is charged up front.

    cost: tokens at an `actual` upstream; an `upfront` one keeps everything unless there is nothing to pay at all.
    tenant: tokens of the tenant, where they differ. gone_after: the client leaves when its request is at the upstream,
    and it has got so many events.
    """

    fault: str
    cost: int
    stream: bool = False
    tenant: int | None = None
    gone_after: int | None = None
    deadline_ms: int | None = None
    requests: int = 1


OUTCOMES = {
    "everything used": Way("", told(HELLO) + CAP),
    "everything used, streamed": Way("", told(HELLO) + CAP, stream=True),
    "less used": Way("truncated", told(HELLO) + 1),
    "less used, streamed": Way("truncated", told(HELLO) + 1, stream=True),
    "nothing generated": Way("empty", told(HELLO)),
    "refused as bad": Way("content-filter", 0),
    "too long": Way("context-length", 0),
    "refused for pace": Way("429", 0),
    "refused for credit": Way("billing", 0),
    "refused as overloaded, twice": Way("503", 0, stream=True, requests=2),
    "failed": Way("500", 0),
    "an error under 200": Way("error-200", 0),
    "reset, twice": Way("reset", 2 * INPUT, tenant=0, requests=2),
    "no first token, twice": Way("silence", 2 * INPUT, stream=True, tenant=0, requests=2),
    "deadline passed": Way("silence", INPUT, deadline_ms=1000),
    "gone before the first token": Way("silence", INPUT, gone_after=0),
    "gone before the first token, streamed": Way("silence", INPUT, stream=True, gone_after=0),
    # Four tokens were seen, each in an event; the opening event is counted like one.
    "gone after four tokens": Way("stall;s=60;at=4", INPUT + 5, stream=True, gone_after=5),
    "cut after four tokens": Way("cut;at=4", INPUT + 5, stream=True),
    "ended early after four tokens": Way("early-end;at=4", INPUT + 5, stream=True),
    "an error after four tokens": Way("error-later;at=4", INPUT + 6, stream=True),
}


@pytest.mark.parametrize("accounting", ["actual", "upfront"])
@pytest.mark.parametrize("name", list(OUTCOMES))
def test_every_end_has_its_price(stack: Stack, name: str, accounting: str) -> None:
    """What is refused costs nothing; what was accepted and did not get far costs its input, and the output seen; what
    was served costs what the upstream reports. One that charges up front gives nothing back of what it accepted. A
    tenant pays what was really used. The request itself counts in all cases.
    """
    way = OUTCOMES[name]
    team = new_tenant(stack)
    meter = Meter(stack)
    end(stack, way, {**HELLO, "model": accounting, "stream": way.stream}, team)
    books_balance(stack)
    cost = way.cost if accounting == "actual" or not way.cost else way.requests * PRICE
    assert meter.spent(f"upstream/{accounting}/*/total") == pytest.approx(cost, abs=0.4)
    assert meter.spent(f"upstream/{accounting}/*/requests") == pytest.approx(way.requests, abs=0.4)
    assert meter.counted("settled") == 1
    assert spent_by_tenant(meter, team) == pytest.approx(way.cost if way.tenant is None else way.tenant, abs=0.4)


def end(stack: Stack, way: Way, body: Mapping[str, Any], team: str) -> None:
    """Send one request and let it end that way."""
    headers = {"x-team": team} | ({"x-fake-fault": way.fault} if way.fault else {})
    if way.deadline_ms:
        headers["x-request-timeout-ms"] = str(way.deadline_ms)
    if way.gone_after is None:
        with suppress(httpx.RemoteProtocolError):
            HTTP.post(stack.url + CHAT, json=body, headers=headers)
        return
    with connect(stack) as connection:
        sent = {"content-type": "application/json", **headers}
        connection.sendall(written(body=json.dumps(body).encode(), headers=sent))
        until(lambda: stack.record(str(body["model"]))["in_flight"] == 1)
        received = b""
        while received.count(b"data: ") < way.gone_after:
            piece = connection.recv(65536)
            assert piece, received
            received += piece


def new_tenant(stack: Stack) -> str:
    """A tenant that has spent a little, so that its bucket is not full and its refill can be told."""
    team = next(UNUSED)
    assert HTTP.post(stack.url + CHAT, json={**HELLO, "model": "odd"}, headers={"x-team": team}).status_code == 200
    books_balance(stack)
    return team


def spent_by_tenant(meter: Meter, team: str) -> float:
    """Tokens of a tenant's allowance that are gone."""
    return meter.spent(f"tenant/{team}/total")


@pytest.mark.parametrize("accounting", ["actual", "upfront"])
def test_more_than_reserved_is_charged_all_the_same(stack: Stack, accounting: str) -> None:
    """A prompt that is larger than estimated: the difference is charged, however the provider accounts."""
    body = {**MORE_THAN_COUNTED, "model": accounting}
    assert told(body) > counted(body)
    meter = Meter(stack)
    assert HTTP.post(stack.url + CHAT, json=body).status_code == 200
    books_balance(stack)
    assert meter.spent(f"upstream/{accounting}/*/total") == pytest.approx(told(body) + CAP, abs=0.4)


@pytest.mark.parametrize("accounting", ["actual", "upfront"])
def test_a_request_that_was_never_sent_costs_nothing(stack: Stack, accounting: str) -> None:
    """Nobody accepts the connection: tokens come back, and the request is not counted either."""
    meter = Meter(stack)
    assert HTTP.post(stack.url + CHAT, json={**HELLO, "model": f"nobody-{accounting}"}).status_code == 503
    books_balance(stack)
    assert meter.spent(f"upstream/nobody-{accounting}/*/total") == pytest.approx(0, abs=0.4)
    assert meter.spent(f"upstream/nobody-{accounting}/*/requests") == pytest.approx(0, abs=0.4)


def test_input_and_output_are_settled_apart(stack: Stack) -> None:
    """A provider with a limit for each: each bucket gets back what it has too much."""
    meter = Meter(stack)
    assert HTTP.post(
        stack.url + CHAT, json={**HELLO, "model": "split"}, headers={"x-fake-fault": "truncated"}
    ).is_success
    books_balance(stack)
    assert meter.spent("upstream/split/*/input") == pytest.approx(told(HELLO), abs=0.4)
    assert meter.spent("upstream/split/*/output") == pytest.approx(1, abs=0.4)


def test_after_a_failover_each_pays_for_what_it_did(stack: Stack) -> None:
    """The first accepted the request, charged up front and was reset; the second served. The tenant pays once."""
    team = new_tenant(stack)
    meter = Meter(stack)
    headers = {"x-team": team, "x-fake-fault": "reset;provider=upfront"}
    assert HTTP.post(stack.url + CHAT, json={**HELLO, "model": "pair"}, headers=headers).status_code == 200
    books_balance(stack)
    assert meter.spent("upstream/upfront/*/total") == pytest.approx(PRICE, abs=0.4)
    assert meter.spent("upstream/actual/*/total") == pytest.approx(told(HELLO) + CAP, abs=0.4)
    assert meter.spent("upstream/upfront/*/requests") == pytest.approx(1, abs=0.4)
    assert meter.spent("upstream/actual/*/requests") == pytest.approx(1, abs=0.4)
    assert spent_by_tenant(meter, team) == pytest.approx(told(HELLO) + CAP, abs=0.4)


def test_a_request_that_is_refused_while_it_waits_costs_its_tenant_nothing(stack: Stack) -> None:
    """It waited its max for a slot: tokens, requests and concurrency of its tenant are back."""
    team = new_tenant(stack)
    with held(stack, "images/generations"), held(stack, "images/generations"):
        meter = Meter(stack)
        refused = HTTP.post(f"{stack.url}/v1/images/generations", json={"model": "x"}, headers={"x-team": team})
        assert (refused.status_code, refused.headers["x-tidegate-reason"]) == (429, "queue_timeout")
        assert meter.spent(f"tenant/{team}/requests") == pytest.approx(0, abs=0.4)
        assert stack.state()["counters"][f"tenant/{team}/slots"]["used"] == 0
        assert meter.spent("upstream/other/*/requests") == pytest.approx(0, abs=0.4)


def test_tenants_concurrency_comes_back_whatever_the_end(stack: Stack) -> None:
    """One request at a time: the second is refused while the first runs, and none is refused after any kind of end."""
    headers = {"x-team": "narrow"}
    stalled = {**headers, "x-fake-fault": "stall;s=20;at=2"}
    with HTTP.stream("POST", stack.url + CHAT, json={**chat(stream=True), "model": "actual"}, headers=stalled):
        refused = HTTP.post(stack.url + CHAT, json={**HELLO, "model": "actual"}, headers=headers)
        assert (refused.status_code, refused.headers["x-tidegate-reason"]) == (429, "tenant_concurrency")
    for way in OUTCOMES.values():
        until(lambda: stack.state()["counters"]["tenant/narrow/slots"]["used"] == 0)
        end(stack, way, {**HELLO, "model": "actual", "stream": way.stream}, "narrow")


# Usage that is not where it belongs.


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_usage_keeps_the_estimate(stack: Stack, odd: Odd, *, stream: bool) -> None:
    """A whole answer that says nothing of usage: what was reserved stays charged, and it is counted as unknown."""
    odd.answer = EVENTS_WITHOUT_USAGE if stream else JSON_WITHOUT_USAGE
    meter = Meter(stack)
    assert HTTP.post(stack.url + CHAT, json={**HELLO, "model": "odd", "stream": stream}).status_code == 200
    books_balance(stack)
    assert meter.spent("upstream/odd/*/total") == pytest.approx(PRICE, abs=0.4)
    assert meter.counted("unknown_usage") == 1


def test_the_usage_that_clients_do_not_see_is_learned(stack: Stack) -> None:
    """A client that did not ask for usage gets no chunk of it; the books have it all the same."""
    meter = Meter(stack)
    answer = HTTP.post(stack.url + CHAT, json={**HELLO, "model": "actual", "stream": True})
    assert "prompt_tokens" not in answer.text
    assert "data: [DONE]" in answer.text
    books_balance(stack)
    assert meter.counted("tokens", "actual") == told(HELLO) + CAP
    assert meter.counted("unknown_usage") == 0


def test_a_client_that_hangs_up_after_done_loses_nobody_the_usage(stack: Stack, odd: Odd) -> None:
    """The SDKs close the connection as soon as they have read [DONE], whatever the upstream still does."""
    odd.answer, odd.lingers_s = EVENTS, 1.0
    meter = Meter(stack)
    with connect(stack) as connection:
        body = json.dumps({**HELLO, "model": "odd", "stream": True}).encode()
        connection.sendall(written(body=body, headers={"content-type": "application/json"}))
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(65536)
    books_balance(stack)
    assert meter.spent("upstream/odd/*/total") == pytest.approx(7 + 3, abs=0.4)
    assert meter.counted("unknown_usage") == 0
    # The classic profile takes an answer for whole once its last word is read.
    assert meter.counted("client_gone") == (stack.settings.gateway.profile == "native")


def test_a_record_that_comes_twice_counts_once(stack: Stack) -> None:
    """Outcomes of one request with other figures, at once and long after, and a failed attempt told twice: the first
    counts.
    """
    meter, before = Meter(stack), set(tickets(stack, "upfront"))
    headers = {"x-fake-fault": "reset;provider=upfront"}
    with ThreadPoolExecutor() as pool:
        body = {**chat(stream=True), "model": "pair"}
        HTTP.post(f"{stack.fakes['actual'].where}/admin/fault", json={"fault": "stall;s=4;at=4", "count": 1})
        running_one = pool.submit(HTTP.post, stack.url + CHAT, json=body, headers=headers)
        (ticket,) = until(lambda: set(tickets(stack, "upfront")) - before)
        tell(stack, ticket, "upfront", AccessLogType.UpstreamEnd, 503)
        tell(stack, ticket, "actual", AccessLogType.DownstreamEnd, 200, used=(100, 10))
        tell(stack, ticket, "actual", AccessLogType.DownstreamEnd, 200, used=(4000, 4000))
        assert running_one.result().status_code == 200
    books_balance(stack)
    assert meter.spent("upstream/actual/*/total") == pytest.approx(110, abs=4)
    assert meter.spent("upstream/upfront/*/total") == pytest.approx(PRICE, abs=4)
    tell(stack, ticket, "actual", AccessLogType.DownstreamEnd, 200, used=(4000, 4000))
    assert meter.spent("upstream/actual/*/total") == pytest.approx(110, abs=4)
    assert meter.counted("settled") == 1
    assert meter.counted("failed_attempts", "upfront") == 1


def tickets(stack: Stack, upstream: str) -> list[str]:
    """The tickets of all requests that failed at an upstream, as the service's log tells them."""
    log = (stack.workdir / "service.log").read_text("utf-8")
    return re.findall(rf'"AttemptFailed", "upstream": "{upstream}".*"ticket": "([^"]+)"', log)


def tell(
    stack: Stack, ticket: str, upstream: str, kind: AccessLogType, status: int, used: tuple[int, int] | None = None
) -> None:
    """Send the service a record, as Envoy would."""
    message = StreamAccessLogsMessage()
    entry = message.http_logs.log_entry.add()
    entry.common_properties.access_log_type = kind
    entry.common_properties.upstream_cluster = upstream
    entry.common_properties.custom_tags["ticket"] = ticket
    entry.response.response_code.value = status
    if used:
        told_of = {"in": used[0], "out": used[1], "done": "1", "finish": "stop"}
        entry.common_properties.metadata.filter_metadata["llm.tail"].update(told_of)
    with grpc.insecure_channel(stack.settings.service.address) as channel:
        path = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
        channel.stream_unary(path, request_serializer=StreamAccessLogsMessage.SerializeToString)(iter([message]))


# Endpoints that generate nothing.


def test_embeddings_are_priced_by_their_input(stack: Stack) -> None:
    """No output is reserved, and what is reported is what they cost."""
    meter = Meter(stack)
    answer = HTTP.post(f"{stack.url}/v1/embeddings", json={"model": "actual", "input": "hello " * 20}).json()
    books_balance(stack)
    assert meter.spent("upstream/actual/*/total") == pytest.approx(answer["usage"]["prompt_tokens"], abs=0.4)
    assert meter.spent("upstream/actual/*/requests") == pytest.approx(1, abs=0.4)
    assert meter.counted("unknown_usage") == 0


def test_counting_tokens_costs_a_request_and_no_tokens(stack: Stack) -> None:
    """`count_tokens` is limited by requests and concurrency only."""
    meter = Meter(stack)
    counted_there = HTTP.post(f"{stack.url}{MESSAGES}/count_tokens", json={**HELLO, "model": "actual"})
    assert counted_there.json() == {"input_tokens": told(HELLO)}
    books_balance(stack)
    assert meter.spent("upstream/actual/*/total") == pytest.approx(0, abs=0.4)
    assert meter.spent("upstream/actual/*/requests") == pytest.approx(1, abs=0.4)
    assert meter.counted("unknown_usage") == 0


OTHERS: dict[str, dict[str, Any]] = {
    "images/generations": {"json": {"model": "gpt-image-1", "prompt": "a tide gate"}},
    "audio/speech": {"json": {"model": "tts-1", "input": "hello", "voice": "alloy"}},
    "audio/transcriptions": {"files": {"file": ("a.mp3", b"\xff\xfb" * 50_000)}, "data": {"model": "whisper-1"}},
    "files": {"files": {"file": ("batch.jsonl", b"{}\n" * 100_000)}, "data": {"purpose": "batch"}},
    "moderations": {"json": {"input": "hello"}},
}


@pytest.mark.parametrize("path", OTHERS)
def test_other_endpoints_are_limited_by_requests_and_slots(stack: Stack, path: str) -> None:
    """Images, audio, files: no tokens are counted, but each is one request; two at a time run and the third waits."""
    meter = Meter(stack)
    slow = {"x-fake-fault": "slow-first-token;s=1", "x-tidegate-priority": "patient"}
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(HTTP.post, f"{stack.url}/v1/{path}", headers=slow, **OTHERS[path]) for _ in range(3)]
        answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert {answer.headers["x-tidegate-upstream"] for answer in answers} == {"other"}
    assert meter.counted("queued", "patient") == 1
    books_balance(stack)
    record = stack.record("other")
    assert record["max_in_flight"] == 2
    *first, last = sorted(record["requests"], key=lambda one: one["admitted"])
    assert last["admitted"] >= min(one["finished"] for one in first)
    assert meter.spent("upstream/other/*/requests") == pytest.approx(3, abs=0.4)
    assert meter.spent("upstream/other/*/total") == pytest.approx(0, abs=0.4)
    assert meter.counted("unknown_usage") == 0


@contextmanager
def held(stack: Stack, path: str) -> Iterator[None]:
    """A request to another endpoint that holds its slot while the block runs."""
    headers = {"content-type": "application/json", "x-fake-fault": "slow-first-token;s=20"}
    before = stack.state()["counters"]["upstream/other/slots"]["used"]
    with connect(stack) as connection:
        body = json.dumps(OTHERS[path]["json"]).encode()
        connection.sendall(written(path=f"/v1/{path}", body=body, headers=headers))
        until(lambda: stack.state()["counters"]["upstream/other/slots"]["used"] == before + 1)
        yield


# A provider with habits that the fakes do not have.

CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
SAID = {**CHUNK, "choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": None}]}
STOPPED = {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USED = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
WHOLE = {
    **CHUNK,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
}


def events(*parts: Mapping[str, Any]) -> bytes:
    """A stream of events up to [DONE]."""
    return b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n"


JSON = json.dumps({**WHOLE, "usage": USED}).encode()
JSON_WITHOUT_USAGE = json.dumps(WHOLE).encode()
EVENTS = events(SAID, STOPPED, {**CHUNK, "choices": [], "usage": USED})
EVENTS_WITHOUT_USAGE = events(SAID, STOPPED)


class Odd:
    """Answers with what it was given, once; then with a whole JSON answer. `lingers_s`: how late it ends a stream."""

    def __init__(self) -> None:
        """Not listening yet."""
        self.url = ""
        self.answer = b""
        self.lingers_s = 0.0

    @contextmanager
    def listening(self) -> Iterator[Odd]:
        """Serve in threads while the block runs."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (OddHandler,), {"odd": self}))
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class OddHandler(BaseHTTPRequestHandler):
    """One connection to it."""

    odd: Odd
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer, and end the answer late where that is wanted."""
        self.rfile.read(int(self.headers["content-length"]))
        answer, lingers_s = self.odd.answer or JSON, self.odd.lingers_s
        self.odd.answer, self.odd.lingers_s = b"", 0.0
        streamed = answer.startswith(b"data:")
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if streamed else "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(answer), answer))
            self.wfile.flush()
            time.sleep(lingers_s)
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Say nothing."""
