"""The gRPC server with a real client: health, streams that end early, records, oversized messages, shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from extproc.ports import Departure, Exchange, Gone, Head, Record, RecordKind
from extproc.wire.classic import Silence
from extproc.wire.pb.access_log_pb2 import AccessLogType, StreamAccessLogsMessage
from extproc.wire.pb.ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from extproc.wire.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.wire.server import GRPC_LOG, Server

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
LOGS = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
DEPARTURE = Departure(
    ticket="p-1", order=("a",), path="/v1/x", dialect="openai", stream=False, queue_ms=0, fail_body="{}", fail_retry_s=5
)


class Gate:
    """A server whose handler lets everything go, and what it noticed."""

    def __init__(self, *, traced: bool = False, classic: Silence | None = None) -> None:
        self.records: list[Record] = []
        self.heads: list[Head] = []
        self.inside = 0
        self.ends: asyncio.Queue[str] = asyncio.Queue()
        self.server = Server(
            "127.0.0.1:0", self.handle, self.learn, max_body_bytes=1024, traced=traced, classic=classic
        )
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}")

    async def handle(self, exchange: Exchange) -> None:
        self.inside += 1
        how = "ended"
        try:
            head = await exchange.head()
            self.heads.append(head)
            if ":bug" in head.headers:
                raise RuntimeError("bug")
            await exchange.body()
            await exchange.forward(DEPARTURE)
            await exchange.ended()
        except Gone:
            how = "gone"
        except asyncio.CancelledError:
            how = "cancelled"
            raise
        finally:
            self.inside -= 1
            self.ends.put_nowait(how)

    async def learn(self, record: Record) -> None:
        self.records.append(record)

    def stream(self, *metadata: tuple[str, str]) -> grpc.aio.StreamStreamCall:
        call = self.channel.stream_stream(
            PROCESS,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        return call(metadata=metadata)


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    one = Gate()
    await one.server.start()
    yield one
    await one.channel.close()
    await one.server.stop()


def headers(name: str = ":path") -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_headers.headers.headers.add(key=name, raw_value=b"/")
    return message


def body(data: bytes) -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_body.body = data
    return message


async def test_health_answers(gate: Gate) -> None:
    """Envoy's gRPC health check."""
    check = gate.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=HealthCheckRequest.SerializeToString,
        response_deserializer=HealthCheckResponse.FromString,
    )
    assert (await check(HealthCheckRequest())).status == HealthCheckResponse.SERVING


async def test_one_that_leaves_says_so_and_serves_who_comes_all_the_same(gate: Gate) -> None:
    """Envoy asks others then; what was on its way meanwhile is not refused."""
    check = gate.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=HealthCheckRequest.SerializeToString,
        response_deserializer=HealthCheckResponse.FromString,
    )
    gate.server.leave()
    assert (await check(HealthCheckRequest())).status == HealthCheckResponse.NOT_SERVING
    call = gate.stream()
    await call.write(headers())
    assert (await call.read()).HasField("request_headers")
    call.cancel()


async def test_a_whole_stream(gate: Gate) -> None:
    """Headers, body, departure; half-close at the end of the response ends the handler."""
    call = gate.stream()
    await call.write(headers())
    assert (await call.read()).WhichOneof("response") == "request_headers"
    await call.write(body(b"{}"))
    assert (await call.read()).WhichOneof("response") == "request_body"
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await gate.ends.get() == "ended"
    assert await call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize("after_headers", [False, True])
async def test_a_client_that_leaves_frees_the_handler(gate: Gate, *, after_headers: bool) -> None:
    """Cancelled by the other side at any point: the handler ends and nothing stays behind."""
    call = gate.stream()
    if after_headers:
        await call.write(headers())
        await call.read()
    else:
        await asyncio.wait_for(call.wait_for_connection(), 60)
    call.cancel()
    if after_headers or gate.inside:
        assert await asyncio.wait_for(gate.ends.get(), 60) in ("cancelled", "gone")
    assert gate.inside == 0


async def test_messages_out_of_order_end_quietly(gate: Gate) -> None:
    """A body before the headers: the stream is closed, without an answer."""
    call = gate.stream()
    await call.write(body(b"{}"))
    assert await call.read() is grpc.aio.EOF
    assert await gate.ends.get() == "gone"


async def test_an_oversized_message_ends_only_its_own_stream(gate: Gate) -> None:
    """A body beyond the limit is refused by the transport; the server goes on."""
    call = gate.stream()
    await call.write(headers())
    await call.read()
    await call.write(body(b"x" * (1024 * 1024)))
    assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await asyncio.wait_for(gate.ends.get(), 60) in ("cancelled", "gone")
    await test_a_whole_stream(gate)


async def test_a_bug_in_the_handler_is_an_error_not_an_admission(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    """The stream fails, so that Envoy takes the route that refuses; the cause is logged."""
    call = gate.stream()
    await call.write(headers(":bug"))
    assert await call.code() == grpc.StatusCode.INTERNAL
    assert "a request was not handled" in caplog.text


async def test_records_arrive_and_bad_ones_are_survived(gate: Gate) -> None:
    """A record without a ticket is skipped; the others are learned, with status, flags and words."""
    message = StreamAccessLogsMessage()
    entries = message.http_logs.log_entry
    entries.add().response.response_code.value = 200
    entry = entries.add()
    common = entry.common_properties
    common.upstream_cluster, common.access_log_type = "a", AccessLogType.UpstreamEnd
    common.response_flags.upstream_remote_reset = True
    common.custom_tags["ttft_us"] = "1500"
    common.custom_tags["ticket"] = "p-1"
    common.metadata.filter_metadata["llm.tail"].update({"in": 3, "finish": "stop"})
    entry.response.response_code.value = 503
    send = gate.channel.stream_unary(LOGS, request_serializer=StreamAccessLogsMessage.SerializeToString)()
    await send.write(message)
    await send.done_writing()
    await send
    (record,) = gate.records
    assert record.kind is RecordKind.ATTEMPT
    assert (record.ticket, record.upstream, record.status) == ("p-1", "a", 503)
    assert record.flags == {"upstream_remote_reset"}
    assert record.first_token_s == pytest.approx(0.0015)
    assert record.tail == {"in": 3.0, "finish": "stop"}


async def test_stop_closes_running_streams_in_order(gate: Gate) -> None:
    """At shutdown a stream whose response is under way ends with OK, which leaves the response alone."""
    call = gate.stream()
    await call.write(headers())
    await call.read()
    await call.write(body(b"{}"))
    await call.read()
    await asyncio.sleep(0)
    await gate.server.stop()
    assert await call.code() == grpc.StatusCode.OK
    assert await gate.ends.get() == "ended"


async def test_stop_ends_the_access_log_without_a_word(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    """Envoy keeps these streams open for ever; those that gRPC has to cut it reports as failures."""

    async def forever() -> AsyncIterator[StreamAccessLogsMessage]:
        yield StreamAccessLogsMessage()
        await asyncio.sleep(600)

    send = gate.channel.stream_unary(LOGS, request_serializer=StreamAccessLogsMessage.SerializeToString)
    calls = [send(forever()) for _ in range(20)]
    async with asyncio.timeout(60):
        while len(gate.server._logs) < len(calls):  # noqa: ASYNC110 - gRPC tells nobody
            await asyncio.sleep(0.01)
    await gate.server.stop()
    assert not [task for task in asyncio.all_tasks() if "HandleExceptions" in task.get_name()]
    assert caplog.text == ""
    for call in calls:
        call.cancel()


@pytest.mark.usefixtures("gate")
def test_that_a_peer_left_before_the_last_word_is_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Anything else that gRPC has to say is."""
    grpc_log = logging.getLogger(GRPC_LOG)
    for message, error in (
        ("ExecuteBatchError raised in core by servicer method [%s]", grpc.aio.InternalError("Failed to send")),
        ("Unexpected [%s] raised by servicer method", grpc.aio.InternalError("a bug of ours")),
        ("Unexpected [%s] raised by servicer method", RuntimeError("bug")),
    ):
        grpc_log.error(message, "/a/b", exc_info=error)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a bug of ours", "bug"]


CALLERS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ENVOYS = "00-4bf92f3577b34da6a3ce929d0e0e4736-d6e02ad2fc9a4361-00"


@pytest.mark.parametrize("classic", [None, Silence(60.0, 900.0)])
@pytest.mark.parametrize(
    ("traced", "metadata", "seen"),
    [
        (True, [("traceparent", ENVOYS), ("tracestate", "")], ENVOYS),
        (True, [], CALLERS),
        (False, [("traceparent", ENVOYS)], CALLERS),
    ],
)
async def test_a_request_joins_the_span_that_envoy_has_for_asking_us(
    classic: Silence | None, metadata: list[tuple[str, str]], seen: str, *, traced: bool
) -> None:
    """It comes with the stream, in place of the caller's, which the headers still tell."""
    gate = Gate(traced=traced, classic=classic)
    await gate.server.start()
    call = gate.stream(*metadata)
    message = headers()
    message.request_headers.headers.headers.add(key="traceparent", raw_value=CALLERS.encode())
    await call.write(message)
    assert (await call.read()).HasField("request_headers")
    assert gate.heads[0].headers["traceparent"] == seen
    call.cancel()
    await gate.channel.close()
    await gate.server.stop()
