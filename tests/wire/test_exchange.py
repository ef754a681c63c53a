"""One ext_proc stream: order of messages, early ends, and what Envoy is told."""

from __future__ import annotations

import asyncio

import pytest

from extproc.ports import Departure, Gone
from extproc.wire.exchange import StreamExchange
from extproc.wire.pb.ext_proc_pb2 import ProcessingRequest, ProcessingResponse

DEPARTURE = Departure(
    ticket="p-1",
    order=("a", "b"),
    path="/v1/x",
    dialect="openai",
    stream=False,
    queue_ms=7,
    fail_body="{}",
    fail_retry_s=5,
)


def headers_message(*pairs: tuple[str, bytes], end: bool = False) -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_headers.end_of_stream = end
    for name, value in pairs:
        header = message.request_headers.headers.headers.add()
        header.key, header.raw_value = name, value
    return message


def body_message(body: bytes) -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = body, True
    return message


class Envoy:
    """The other side: gives messages one by one and keeps the answers."""

    def __init__(self, *messages: ProcessingRequest | bytes) -> None:
        self._messages = [m if isinstance(m, bytes) else m.SerializeToString() for m in messages]
        self.answers: list[ProcessingResponse] = []
        self.closed = asyncio.Event()
        self.closed.set()
        self.writable = asyncio.Event()
        self.writable.set()
        self.exchange = StreamExchange(self._read, self._write)

    async def _read(self) -> bytes | None:
        if self._messages:
            return self._messages.pop(0)
        await self.closed.wait()
        return None

    async def _write(self, data: bytes) -> None:
        await self.writable.wait()
        self.answers.append(ProcessingResponse.FromString(data))


async def test_headers_then_body_then_departure() -> None:
    """Each question gets one answer; the departure carries route, retries and replaced body."""
    envoy = Envoy(headers_message((":path", b"/v1/x"), ("x-a", b"1")), body_message(b"{}"))
    head = await envoy.exchange.head()
    assert head.headers == {":path": "/v1/x", "x-a": "1"}
    assert await envoy.exchange.body() == b"{}"
    going = Departure(**{**vars_of(DEPARTURE), "body": b'{"model":"m"}', "per_try_s": 0.25, "removed": ("x-b",)})
    await envoy.exchange.forward(going)
    await envoy.exchange.ended()
    first, second = envoy.answers
    assert first.WhichOneof("response") == "request_headers"
    common = second.request_body.response
    assert common.clear_route_cache
    assert common.body_mutation.body == b'{"model":"m"}'
    sent = {option.header.key: option.header.raw_value for option in common.header_mutation.set_headers}
    assert sent == {
        "x-envoy-max-retries": b"1",
        "x-envoy-upstream-rq-per-try-timeout-ms": b"250",
        "content-length": b"13",
    }
    assert list(common.header_mutation.remove_headers) == ["x-b"]
    route = second.dynamic_metadata.fields["llm.route"].struct_value.fields
    assert route["ticket"].string_value == "p-1"
    order = [v.struct_value.fields["name"].string_value for v in route["priority_groups"].list_value.values]
    assert order == ["a", "b"]


def vars_of(departure: Departure) -> dict[str, object]:
    return {name: getattr(departure, name) for name in departure.__slots__}


async def test_a_request_without_body_is_answered_at_its_headers() -> None:
    """GET and empty POST: no body message comes, none is waited for."""
    envoy = Envoy(headers_message((":method", b"GET"), end=True))
    await envoy.exchange.head()
    assert await envoy.exchange.body() == b""
    await envoy.exchange.forward(DEPARTURE)
    assert envoy.answers[0].WhichOneof("response") == "request_headers"


async def test_hold_asks_for_patience_beyond_the_wait() -> None:
    """Envoy's timer must outlast the wait, or it would cut it."""
    envoy = Envoy(headers_message(), body_message(b"{}"))
    await envoy.exchange.head()
    await envoy.exchange.body()
    await envoy.exchange.hold(29.5)
    assert envoy.answers[-1].override_message_timeout.seconds >= 30
    assert envoy.answers[-1].WhichOneof("response") is None


@pytest.mark.parametrize(
    "messages",
    [
        (),
        (body_message(b"{}"),),
        (b"\xff\xff\xff",),
        (ProcessingRequest(),),
    ],
    ids=["nothing", "body first", "garbage", "empty message"],
)
async def test_what_is_out_of_turn_ends_the_exchange(messages: tuple[ProcessingRequest | bytes, ...]) -> None:
    """Half-closed, out of order, or not a message: there is nobody to answer, and nothing is answered."""
    envoy = Envoy(*messages)
    with pytest.raises(Gone):
        await envoy.exchange.head()
    await envoy.exchange.answer(503, [], b"", "late")
    assert envoy.answers == []


async def test_half_closed_before_the_body() -> None:
    """A client that leaves between headers and body is gone."""
    envoy = Envoy(headers_message())
    await envoy.exchange.head()
    with pytest.raises(Gone):
        await envoy.exchange.body()


async def test_headers_twice_are_out_of_turn() -> None:
    """A second header message where the body should be ends the exchange."""
    envoy = Envoy(headers_message(), headers_message())
    await envoy.exchange.head()
    with pytest.raises(Gone):
        await envoy.exchange.body()


async def test_an_immediate_answer_carries_status_headers_and_body() -> None:
    """A refusal goes out whole, with details for the access log."""
    envoy = Envoy(headers_message())
    await envoy.exchange.head()
    await envoy.exchange.answer(429, [("retry-after", "3")], b"{}", "tidegate_lane_full")
    answer = envoy.answers[0].immediate_response
    assert (answer.status.code, answer.body, answer.details) == (429, b"{}", "tidegate_lane_full")
    assert answer.headers.set_headers[0].header.raw_value == b"3"


async def test_trailers_pass_and_the_end_is_noticed() -> None:
    """HTTP/2 upstreams send trailers: they pass, and the exchange goes on to its end."""
    trailers = ProcessingRequest()
    trailers.response_trailers.trailers.headers.add().key = "x"
    envoy = Envoy(headers_message(end=True), trailers)
    await envoy.exchange.head()
    await envoy.exchange.forward(DEPARTURE)
    await envoy.exchange.ended()
    assert envoy.answers[-1].WhichOneof("response") == "response_trailers"


async def test_release_ends_the_watch_without_an_error() -> None:
    """At shutdown a running answer is let go: the stream closes in order, the answer is not touched."""
    envoy = Envoy(headers_message(end=True))
    await envoy.exchange.head()
    assert not envoy.exchange.release()
    await envoy.exchange.forward(DEPARTURE)
    envoy.closed.clear()
    watching = asyncio.create_task(envoy.exchange.ended())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert envoy.exchange.release()
    await watching


async def test_release_before_the_watch_has_begun_holds() -> None:
    """What left a moment ago and is still being told of to Envoy is let go as well; nobody waits for its end."""
    envoy = Envoy(headers_message(end=True))
    await envoy.exchange.head()
    envoy.closed.clear()
    envoy.writable.clear()

    async def leave() -> None:
        await envoy.exchange.forward(DEPARTURE)
        await envoy.exchange.ended()

    leaving = asyncio.create_task(leave())
    await asyncio.sleep(0)
    assert envoy.exchange.release()
    envoy.writable.set()
    await asyncio.wait_for(leaving, 60)


async def test_cancellation_of_a_watch_stays_a_cancellation() -> None:
    """A client that leaves cancels the watch; that must not look like an orderly end."""
    envoy = Envoy(headers_message(end=True))
    await envoy.exchange.head()
    await envoy.exchange.forward(DEPARTURE)
    envoy.closed.clear()
    watching = asyncio.create_task(envoy.exchange.ended())
    await asyncio.sleep(0)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


async def test_header_values_that_are_not_utf8_survive() -> None:
    """A hostile header value neither breaks the stream nor loses its bytes."""
    envoy = Envoy(headers_message(("x-a", b"\xff\xfe"), end=True))
    head = await envoy.exchange.head()
    assert head.headers["x-a"].encode("utf-8", "surrogateescape") == b"\xff\xfe"


async def test_a_running_request_is_ended_by_an_answer() -> None:
    """While the response is watched, the answer goes out at once, and the watch goes on to the end of the stream."""
    envoy = Envoy(headers_message(end=True))
    await envoy.exchange.head()
    await envoy.exchange.forward(DEPARTURE)
    envoy.closed.clear()
    watching = asyncio.create_task(envoy.exchange.ended())
    await asyncio.sleep(0)
    await envoy.exchange.abort(503, [("x-should-retry", "false")], b"{}", "tidegate_evicted")
    answer = envoy.answers[-1].immediate_response
    assert (answer.status.code, answer.body, answer.details) == (503, b"{}", "tidegate_evicted")
    assert not watching.done()
    envoy.closed.set()
    await watching


async def test_an_abort_does_not_disturb_a_departure() -> None:
    """Two writes at once would break the stream: an abort during a departure goes out after it."""
    envoy = Envoy(headers_message(end=True))
    await envoy.exchange.head()
    envoy.writable.clear()
    leaving = asyncio.create_task(envoy.exchange.forward(DEPARTURE))
    await asyncio.sleep(0)
    await envoy.exchange.abort(503, [], b"{}", "tidegate_evicted")
    assert envoy.answers == []
    envoy.writable.set()
    await leaving
    await envoy.exchange.ended()
    assert [answer.WhichOneof("response") for answer in envoy.answers] == ["request_headers", "immediate_response"]
