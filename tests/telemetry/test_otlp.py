"""Metrics sent to a collector: what arrives, and what one that is away or slow does to the service."""

from __future__ import annotations

import asyncio
import gzip
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from requests import RequestException

from extproc.settings import OtlpSettings, load
from extproc.stack import free_ports
from extproc.telemetry.catalog import BY_NAME, Kind
from extproc.telemetry.meter import Meter
from extproc.telemetry.otlp import AGAIN_S, Heard, OtlpError, Session, headers_of
from tests.doubles import HandClock
from tests.telemetry.metrics_world import HEARD, TRACE, told

SECRET = "not-to-be-told"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """One that still sends would tell of it in the log of another test."""
    yield
    for thread in threading.enumerate():
        if thread.name == "otlp-metrics":
            thread.join()


class Collector:
    """Takes what is posted, after `slow_s` or when it ends, and answers with `status`."""

    def __init__(self) -> None:
        self.status, self.slow_s, self.headers = 200, 0.0, {"content-length": "0"}
        self.over = threading.Event()
        self.calls = 0
        """Connections."""
        self.endless = False
        self.heard: Queue[tuple[str, dict[str, str], ExportMetricsServiceRequest]] = Queue()
        self.endpoint = ""

    def next(self) -> tuple[str, dict[str, str], ExportMetricsServiceRequest]:
        return self.heard.get(timeout=30)


@contextmanager
def collector() -> Iterator[Collector]:
    """One that listens somewhere."""
    here = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            here.calls += 1

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            told = ExportMetricsServiceRequest.FromString(gzip.decompress(body))
            here.over.wait(here.slow_s)
            self.send_response(here.status)
            for name, value in here.headers.items():
                self.send_header(name, value)
            self.end_headers()
            here.heard.put((self.path, {k.lower(): v for k, v in self.headers.items()}, told))
            with suppress(OSError):
                while here.endless:
                    self.wfile.write(b"x")
                    time.sleep(0.05)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield here
    finally:
        here.over.set()
        server.shutdown()
        server.server_close()


def meter(endpoint: str, headers: Path | None = None, every_s: float = 0.05) -> Meter:
    """One that sends there, and heard of everything."""
    otlp = {"endpoint": endpoint, "headers_file": str(headers) if headers else None, "every_s": every_s}
    settings = load(None, {}).model_copy(update={"telemetry": load(None, {}).telemetry.model_copy()})
    settings = settings.model_copy(
        update={"telemetry": settings.telemetry.model_copy(update={"otlp": OtlpSettings(**otlp)})}
    )
    found = Meter(settings, HandClock().time, "here", lambda _: TRACE)
    found.process.late(0.003)
    for event in HEARD:
        found(event)
    return found


async def test_all_of_the_catalog_arrives_with_its_types_and_units(tmp_path: Path) -> None:
    """With the headers that the collector asks for; sums are cumulative, and begin when the process did."""
    headers = tmp_path / "headers"
    headers.write_text(f"Authorization: Bearer {SECRET}:x\n\nx-scope : team\n")
    with collector() as here:
        one = meter(here.endpoint + "/", headers)
        one.start(lambda: told(one))
        try:
            path, sent, request = await asyncio.to_thread(here.next)
            _, _, later = await asyncio.to_thread(here.next)
        finally:
            await one.stop()
    assert path == "/v1/metrics"
    assert (sent["authorization"], sent["x-scope"]) == (f"Bearer {SECRET}:x", "team")
    [resource] = request.resource_metrics
    about = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert about.items() >= {"service.name": "tidegate", "service.instance.id": "here"}.items()
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    assert metrics.keys() == BY_NAME.keys()
    shapes = {Kind.COUNTER: "sum", Kind.GAUGE: "gauge", Kind.HISTOGRAM: "histogram"}
    for name, metric in metrics.items():
        said = BY_NAME[name]
        assert (metric.WhichOneof("data"), metric.unit) == (shapes[said.kind], said.unit)
        points = getattr(metric, shapes[said.kind]).data_points
        assert {attribute.key for point in points for attribute in point.attributes} <= {*said.labels}
    refused = metrics["tidegate.refused"].sum
    assert refused.is_monotonic
    assert refused.aggregation_temporality == 2, "cumulative"
    assert sum(point.as_int for point in refused.data_points) == 3
    wait = metrics["tidegate.wait"].histogram.data_points[0]
    assert wait.count == sum(wait.bucket_counts) == 1
    assert not wait.HasField("min")
    assert wait.exemplars[0].trace_id == bytes.fromhex(TRACE)
    again = {metric.name: metric for metric in later.resource_metrics[0].scope_metrics[0].metrics}["tidegate.refused"]
    assert again.sum.data_points[0].start_time_unix_nano == refused.data_points[0].start_time_unix_nano
    assert again.sum.data_points[0].time_unix_nano > refused.data_points[0].time_unix_nano


async def test_the_last_numbers_are_sent_when_it_ends() -> None:
    with collector() as here:
        one = meter(here.endpoint, every_s=3600)
        one.start(lambda: told(one))
        assert here.heard.empty()
        await one.stop()
        assert here.next()[0] == "/v1/metrics"
        await one.stop()  # a second time is nothing


async def test_a_collector_that_is_away_is_told_once_and_holds_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own log of each failure is not heard; and the service ends at once."""
    monkeypatch.setattr("extproc.telemetry.otlp.TIMEOUT_S", 0.2)
    [port] = free_ports(1)
    one = meter(f"http://127.0.0.1:{port}")
    with caplog.at_level(logging.WARNING):
        one.start(lambda: told(one))
        push = one._push
        assert push is not None
        while push._to.heard.failed < 3:  # noqa: ASYNC110 - a thread will
            await asyncio.sleep(0.05)
        await one.stop()
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("metrics cannot be sent to the collector")
    assert "Failed to export metrics batch" in line, "and why, in the library's words"


async def test_a_collector_that_says_no_is_told_with_its_word(caplog: pytest.LogCaptureFixture) -> None:
    """And never what it was sent as a key."""
    with collector() as here, caplog.at_level(logging.WARNING):
        here.status = 401
        one = meter(here.endpoint)
        one._headers = {"authorization": SECRET}
        one.start(lambda: told(one))
        await asyncio.to_thread(here.next)
        push = one._push
        assert push is not None
        while not push._to.heard.failed:  # noqa: ASYNC110 - a thread will
            await asyncio.sleep(0.01)
        here.status = 200
        while push._to.heard.failing:  # noqa: ASYNC110 - same
            await asyncio.sleep(0.01)
        await one.stop()
    first, last = [record.getMessage() for record in caplog.records]
    assert "401" in first
    assert last == "metrics are sent to the collector again"
    assert SECRET not in caplog.text


async def test_a_collector_that_hangs_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service does not wait for it in the end, for longer than it says, however long it may take."""
    monkeypatch.setattr("extproc.telemetry.meter.LAST_S", 0.2)
    monkeypatch.setattr("extproc.telemetry.otlp.TIMEOUT_S", 600.0)
    with collector() as here:
        here.slow_s = 600.0
        one = meter(here.endpoint)
        one.start(lambda: told(one))
        push = one._push
        assert push is not None
        while not here.calls:  # noqa: ASYNC110 - a thread will
            await asyncio.sleep(0.01)
        await one.stop()
        assert not here.over.is_set()
        assert push._thread.is_alive(), "it hangs still"


async def test_an_answer_without_end_holds_nobody() -> None:
    """Not a byte of it is waited for: only its head counts. And an answer of nothing leaves the connection open."""
    with collector() as here:
        one = meter(here.endpoint)
        one.start(lambda: told(one))
        for _ in range(3):
            await asyncio.to_thread(here.next)
        assert here.calls == 1
        here.headers, here.endless = {"content-length": "1000000000"}, True
        for _ in range(3):
            await asyncio.to_thread(here.next)
        here.endless = False
        await one.stop()


async def test_an_answer_that_leads_elsewhere_is_not_taken_for_a_good_one(caplog: pytest.LogCaptureFixture) -> None:
    """What is sent has a key with it, that nobody else is to see."""
    with collector() as here, collector() as other, caplog.at_level(logging.WARNING):
        here.status, here.headers = 307, {"location": f"{other.endpoint}/v1/metrics", "content-length": "0"}
        one = meter(here.endpoint)
        one.start(lambda: told(one))
        await asyncio.to_thread(here.next)
        await asyncio.to_thread(here.next)
        await one.stop()
        assert other.heard.empty()
    assert "the answer is 307 and leads elsewhere" in caplog.text


async def test_the_key_is_sent_nowhere_else_whatever_the_library_asks_for() -> None:
    """A session that may follow sends all headers along, to any host."""
    with collector() as here, collector() as other, Session() as session:
        here.status, here.headers = 307, {"location": f"{other.endpoint}/v1/metrics", "content-length": "0"}
        with pytest.raises(RequestException, match="leads elsewhere"):
            await asyncio.to_thread(session.post, here.endpoint, b"", headers={"api-key": "secret"})
        assert other.heard.empty()


async def test_a_state_that_breaks_does_not_end_the_sending() -> None:
    """It is sent when it is well again."""
    broken, asked = True, 0

    def state() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if broken:
            raise RuntimeError("broken")
        return told(one)

    with collector() as here:
        one = meter(here.endpoint)
        one.start(state)
        while asked < 3:  # noqa: ASYNC110 - a thread will ask
            await asyncio.sleep(0.01)
        assert here.heard.empty()
        broken = False
        assert (await asyncio.to_thread(here.next))[0] == "/v1/metrics"
        await one.stop()


async def test_nothing_is_sent_where_nobody_wants_metrics() -> None:
    """There is no collector, or it is for traces alone."""
    settings = load(None, {})
    telemetry = settings.telemetry.model_copy(
        update={"otlp": OtlpSettings(endpoint="http://127.0.0.1:1", headers_file="/nowhere", metrics=False)}
    )
    for one in (settings, settings.model_copy(update={"telemetry": telemetry})):
        meter = Meter(one, HandClock().time, "here")
        meter.start(dict)
        assert meter._push is None
        await meter.stop()


def test_failures_are_told_seldom_and_the_end_of_them_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    heard = Heard("metrics", clock.time)
    with caplog.at_level(logging.WARNING):
        for _ in range(4 * round(AGAIN_S)):
            heard.failure("refused")
            clock.now += 1.0
        heard.success()
        heard.success()
        heard.failure("refused")
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(",")[0] for line in said] == [
        *["metrics cannot be sent to the collector"] * 4,
        "metrics are sent to the collector again",
        "metrics cannot be sent to the collector",
    ]
    assert "for 600 s now" in said[1]


@pytest.mark.parametrize("text", [f"{SECRET}\n", f"a b: {SECRET}", "name:\n", f": {SECRET}", f"ä: {SECRET}"])
def test_a_file_of_headers_with_a_mistake_is_refused_without_telling_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "headers"
    path.write_text(text, "utf-8")
    with pytest.raises(
        OtlpError, match=r"telemetry\.otlp\.headers_file .*(line 1: is not `name: value`|ASCII)"
    ) as caught:
        headers_of(OtlpSettings(endpoint="http://127.0.0.1:1", headers_file=str(path)))
    assert SECRET not in str(caught.value)


def test_a_file_of_headers_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OtlpError, match="No such file"):
        headers_of(OtlpSettings(endpoint="http://127.0.0.1:1", headers_file=str(tmp_path / "none")))
    assert headers_of(OtlpSettings(endpoint="http://127.0.0.1:1")) == {}
