"""The comparator: an ext_proc server that decides nothing.

    python load_noop.py HOST:PORT HOST:PORT_OF_COUNTS < answers.json

What any Python server must do at least for the same conversation: grpc.aio on uvloop with context.read() and write(),
raw bytes, messages parsed and built by upb, one answer for each message, the access log parsed and counted. It answers
headers with CONTINUE, and a body with what Tidegate answered to the very same body, with a ticket of its own.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from itertools import count

import grpc
import uvloop
from grpc.aio import EOF

from extproc.wire.codec import CONTINUE, ROUTE, TRAILERS_PASS
from extproc.wire.pb.access_log_pb2 import StreamAccessLogsMessage, StreamAccessLogsResponse
from extproc.wire.pb.ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from extproc.wire.pb.health_pb2 import HealthCheckResponse
from extproc.wire.server import OPTIONS

_SERVING = HealthCheckResponse(status=HealthCheckResponse.SERVING).SerializeToString()
_MAX_BYTES = 16 * 1024 * 1024


class Noop:
    """answers: by the length of the request's body."""

    def __init__(self, answers: dict[int, ProcessingResponse]) -> None:
        self._answers = answers
        self._tickets = count(1)
        self.streams = self.messages = self.log_messages = self.log_entries = 0

    async def process(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """One request."""
        self.streams += 1
        try:
            while (data := await context.read()) is not EOF:
                self.messages += 1
                message = ProcessingRequest.FromString(data)
                kind = message.WhichOneof("request")
                if kind == "request_headers":
                    await context.write(CONTINUE)
                elif kind == "request_body":
                    await context.write(self._answer(len(message.request_body.body)))
                else:
                    await context.write(TRAILERS_PASS)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            return

    def _answer(self, length: int) -> bytes:
        answer = ProcessingResponse()
        answer.CopyFrom(self._answers[length])
        answer.dynamic_metadata.fields[ROUTE].struct_value.fields["ticket"].string_value = f"n-{next(self._tickets)}"
        return answer.SerializeToString()

    async def logs(self, messages: object, _: object) -> bytes:
        """The access log."""
        async for data in messages:  # type: ignore[attr-defined]
            self.log_messages += 1
            self.log_entries += len(StreamAccessLogsMessage.FromString(data).http_logs.log_entry)
        return StreamAccessLogsResponse().SerializeToString()

    async def check(self, _: object, __: object) -> bytes:
        """Envoy's health check."""
        return _SERVING

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """The three services that Envoy calls."""
        kinds = {
            "envoy.service.ext_proc.v3.ExternalProcessor": {
                "Process": grpc.stream_stream_rpc_method_handler(self.process)
            },
            "envoy.service.accesslog.v3.AccessLogService": {
                "StreamAccessLogs": grpc.stream_unary_rpc_method_handler(self.logs)
            },
            "grpc.health.v1.Health": {"Check": grpc.unary_unary_rpc_method_handler(self.check)},
        }
        return [grpc.method_handlers_generic_handler(name, methods) for name, methods in kinds.items()]


async def main(address: str, counts: str, answers: dict[int, ProcessingResponse]) -> None:
    """Serve for ever."""
    noop = Noop(answers)
    server = grpc.aio.server(options=(*OPTIONS, ("grpc.max_receive_message_length", _MAX_BYTES)))
    server.add_generic_rpc_handlers(tuple(noop.handlers()))
    server.add_insecure_port(address)
    await server.start()

    async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        names = ("streams", "messages", "log_messages", "log_entries")
        body = json.dumps({name: getattr(noop, name) for name in names}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    host, _, port = counts.rpartition(":")
    async with await asyncio.start_server(tell, host, int(port)) as listening:
        await listening.serve_forever()


if __name__ == "__main__":
    told = {int(n): ProcessingResponse.FromString(base64.b64decode(data)) for n, data in json.load(sys.stdin).items()}
    uvloop.run(main(sys.argv[1], sys.argv[2], told))
