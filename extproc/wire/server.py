"""The gRPC server that Envoy talks to: ext_proc, access log and health, on one address.

Method paths are Envoy's and gRPC's published ones; messages are our own subset (protos/). Streams are read and written
with context.read()/write(), which costs a third less than async generators. A stream that ends early, half-closed, or
with a message out of turn ends its handler quietly; whatever it held comes back by leaving the handler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from extproc.ports import Exchange, Gone, Record, RecordKind
from extproc.settings import ServiceTlsSettings
from extproc.wire import codec
from extproc.wire.classic import ClassicExchange, Silence
from extproc.wire.doubts import Doubts
from extproc.wire.exchange import Read, StreamExchange, Write
from extproc.wire.pb.access_log_pb2 import StreamAccessLogsMessage, StreamAccessLogsResponse
from extproc.wire.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.wire.sockets import SocketError, UnixSocket
from extproc.wire.tls import server_credentials

__all__ = ["Server"]

log = logging.getLogger(__name__)

OPTIONS = (
    # Envoy's keepalive pings on a quiet connection would otherwise count as abuse and close it, with all it carries.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
)
GRPC_LOG = "grpc._cython.cygrpc"
PEER_LEFT = "ExecuteBatchError raised in core by servicer method"
"""How gRPC begins its word that what it had to write reached nobody. It has others for errors of ours."""
LAST_S = 0.9
"""So long what ends is told to Envoy, and records of what ended just before are heard. A server that stops closes its
connections as soon as its last stream is done, and may take the word that it was all right with it."""
GRACE_S = 0.5
"""And so much longer the end waits for streams that do not end."""
MARGIN_BYTES = 256 * 1024
"""Room for headers and framing above the largest body that Envoy buffers."""


class Server:
    """Serves until `stop`. `handle` gets every ext_proc stream, `learn` every access log record."""

    def __init__(
        self,
        address: str,
        handle: Callable[[Exchange], Awaitable[None]],
        learn: Callable[[Record], Awaitable[None]],
        *,
        max_body_bytes: int,
        classic: Silence | None = None,
        tls: ServiceTlsSettings | None = None,
        socket: UnixSocket | None = None,
        health: str | None = None,
        traced: bool = False,
    ) -> None:
        """`address` is host:port, which is not looked at where there is a `socket`.

        classic: Envoy shows answers, and logs no outcomes of requests; when it ends those that say no more. health:
        host:port of a second server, without TLS, which only tells health. traced: requests join spans of Envoy (see
        `_parent`). SocketError where an address cannot be had.
        """
        credentials = server_credentials(tls) if tls else None
        if socket is not None:
            socket.claim()
        self._handle = handle
        self._learn = learn
        self._classic = classic
        self._traced = traced
        self._doubts = Doubts(learn)
        self._leaving = False
        self._exchanges: set[StreamExchange] = set()
        self._logs: set[asyncio.Task[Any]] = set()
        options = (*OPTIONS, ("grpc.max_receive_message_length", max_body_bytes + MARGIN_BYTES))
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers((*_services(self), _health(self)))
        self._socket = socket
        self.port = 0
        if socket is not None:
            socket.open(self._server.add_insecure_port)
        elif credentials is not None:
            self.port = _listening(address, partial(self._server.add_secure_port, address, credentials))
        else:
            self.port = _listening(address, partial(self._server.add_insecure_port, address))
        self._health = grpc.aio.server(options=OPTIONS) if health else None
        self.health_port = 0
        if self._health is not None and health:
            self._health.add_generic_rpc_handlers((_health(self),))
            self.health_port = _listening(health, partial(self._health.add_insecure_port, health))

    async def start(self) -> None:
        """Begin to serve."""
        logging.getLogger(GRPC_LOG).addFilter(_is_news)
        await self._server.start()
        if self._health is not None:
            await self._health.start()

    async def stop(self) -> None:
        """Let go of responses that are under way (they go on without us), then end.

        The caller has refused newcomers before.
        """
        for exchange in list(self._exchanges):
            exchange.release()
        await asyncio.sleep(LAST_S)
        ended = [*self._logs]
        for stream in ended:
            stream.cancel()
        if ended:
            await asyncio.wait(ended, timeout=GRACE_S)
        if self._socket is not None:
            self._socket.remove()
        await self._server.stop(grace=GRACE_S)
        await self._doubts.close()
        if self._health is not None:
            await self._health.stop(grace=None)

    async def process(self, _: object, context: Any) -> None:
        """Envoy's ext_proc: one stream per HTTP request."""
        exchange = self._exchange(_reader(context), _writer(context))
        if self._traced:
            exchange.trace = _parent(context.invocation_metadata())
        self._exchanges.add(exchange)
        try:
            await self._handle(exchange)
        except asyncio.CancelledError:
            raise
        except Exception:
            # Envoy fails open without an answer, onto the route that refuses: nothing slips through.
            log.exception("a request was not handled")
            await context.abort(grpc.StatusCode.INTERNAL)
        finally:
            self._exchanges.discard(exchange)
            record = exchange.final()
            if record is not None:
                self._doubts.tell(record, exchange.doubt)

    def _exchange(self, read: Read, write: Write) -> StreamExchange:
        if self._classic is None:
            return StreamExchange(read, write)
        return ClassicExchange(read, write, asyncio.get_running_loop().time, self._classic, self._doubts.tell)

    async def stream_access_logs(self, messages: AsyncIterator[bytes], _: object) -> StreamAccessLogsResponse:
        """Envoy's access log: a stream per Envoy worker and log. Envoy never ends one; `stop` does, by cancellation."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - gRPC runs every stream in a task
        self._logs.add(task)
        try:
            async for data in messages:
                for entry in StreamAccessLogsMessage.FromString(data).http_logs.log_entry:
                    await self._learn_one(entry)
        except asyncio.CancelledError:
            pass  # gRPC would report it as a failure
        finally:
            self._logs.discard(task)
        return StreamAccessLogsResponse()

    async def check(self, _: HealthCheckRequest, __: object) -> HealthCheckResponse:
        """grpc.health.v1: that this answers at all is the whole message, unless it leaves."""
        return HealthCheckResponse(
            status=HealthCheckResponse.NOT_SERVING if self._leaving else HealthCheckResponse.SERVING
        )

    def leave(self) -> None:
        """Have Envoy ask others from now on. Whoever asks here all the same is served."""
        self._leaving = True

    def stay(self) -> None:
        """Have Envoy ask here again."""
        self._leaving = False

    async def _learn_one(self, entry: Any) -> None:
        try:
            record = codec.record(entry)
            if record is not None:
                await self._learn(record)
                if self._classic is not None and record.kind is RecordKind.ATTEMPT:
                    self._doubts.hear(record)
        except Exception:
            log.exception("an access log record was not understood")


def _listening(address: str, bind: Callable[[], int]) -> int:
    """The port. gRPC does not tell why it cannot be had."""
    try:
        return bind()
    except RuntimeError:
        why = "another process listens there (a Tidegate that still drains?), or it is no address of this machine"
        raise SocketError(f"{address}: {why}") from None


def _services(server: Server) -> list[grpc.GenericRpcHandler[Any, Any]]:
    streams = grpc.stream_stream_rpc_method_handler(server.process)
    logs = grpc.stream_unary_rpc_method_handler(
        server.stream_access_logs, response_serializer=StreamAccessLogsResponse.SerializeToString
    )
    return [
        grpc.method_handlers_generic_handler("envoy.service.ext_proc.v3.ExternalProcessor", {"Process": streams}),
        grpc.method_handlers_generic_handler("envoy.service.accesslog.v3.AccessLogService", {"StreamAccessLogs": logs}),
    ]


def _health(server: Server) -> grpc.GenericRpcHandler[Any, Any]:
    check = grpc.unary_unary_rpc_method_handler(
        server.check,
        request_deserializer=HealthCheckRequest.FromString,
        response_serializer=HealthCheckResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})


def _is_news(record: logging.LogRecord) -> bool:
    """Whether gRPC's own word is worth a line: that a peer had left when its last status was written is not."""
    return not str(record.msg).startswith(PEER_LEFT)


def _parent(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """`traceparent` of the span that Envoy has for asking us: the nearest to join.

    Where Envoy traces (1.40, OpenTelemetry tracer, both profiles), the request that it shows still has its caller's
    header, or none: its own is put into what goes to upstreams only. The stream itself tells of a child of its span for
    the request, with Envoy's decision in its flags: 00 where it drops what its caller had sampled, too. Without tracing
    there is nothing here, and neither where the caller's header is no valid one: such a request Envoy does not trace.
    """
    return next((str(value) for name, value in metadata or () if name == codec.TRACE), "")


def _reader(context: Any) -> Callable[[], Awaitable[bytes | None]]:
    async def read() -> bytes | None:
        try:
            data = await context.read()
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise Gone from error
        return None if data is EOF else data

    return read


def _writer(context: Any) -> Callable[[bytes], Awaitable[None]]:
    async def write(data: bytes) -> None:
        try:
            await context.write(data)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise Gone from error

    return write
