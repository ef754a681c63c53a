"""The service as Envoy sees it, played by a test: admission, access logs and health on one port.

Run as a program it is a process of its own, so that a test can stop it in its tracks: `service.py PORT`. What a request
shall meet is said in its `x-test-do` header: `go` (the default; upstreams in `x-test-order`), `hold`, `refuse`,
`silent`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict

from extproc.wire.pb.access_log_pb2 import StreamAccessLogsMessage, StreamAccessLogsResponse
from extproc.wire.pb.ext_proc_pb2 import HeaderValueOption, ProcessingRequest, ProcessingResponse

Data = dict[str, Any]

OVERWRITE = HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
SERVING = b"\x08\x01"


class Service:
    """A grpc server on `port`. `streams` has what each ext_proc stream was told, `open` how many
    are open, `records` what the logs said.
    """

    def __init__(self, port: int) -> None:
        self.streams: list[list[ProcessingRequest]] = []
        self.open = 0
        self.records: list[tuple[str, Data]] = []
        self.route: Data = {}
        self._lock = threading.Lock()
        pool = ThreadPoolExecutor(64)
        self._server = grpc.server(
            pool, options=[("grpc.max_receive_message_length", -1), ("grpc.http2.max_ping_strikes", 0)]
        )
        self._server.add_generic_rpc_handlers((_Handlers(self),))
        self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    def stop(self) -> None:
        """End at once."""
        self._server.stop(0).wait(5)

    def wait_for(self, log: str, count: int = 1, seconds: float = 5.0) -> list[Data]:
        """The records of a log, once there are `count`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = [record for name, record in self.records if name == log]
            if len(found) >= count:
                return found
            time.sleep(0.02)
        raise AssertionError((log, count, self.records))

    def process(self, requests: Iterator[ProcessingRequest], _: grpc.ServicerContext) -> Iterator[ProcessingResponse]:
        """One ext_proc stream."""
        seen: list[ProcessingRequest] = []
        self.streams.append(seen)
        with self._lock:
            self.open += 1
        try:
            headers: dict[str, str] = {}
            for request in requests:
                seen.append(request)
                asked = str(request.WhichOneof("request"))
                if asked == "request_headers":
                    pairs = request.request_headers.headers.headers
                    headers = {pair.key: (pair.raw_value or pair.value.encode()).decode("latin-1") for pair in pairs}
                yield from self._answer(asked, headers, last=request.request_headers.end_of_stream)
        finally:
            with self._lock:
                self.open -= 1

    def _answer(self, asked: str, headers: dict[str, str], *, last: bool) -> Iterator[ProcessingResponse]:
        response = ProcessingResponse()
        what, at = headers.get("x-test-do", "go"), headers.get("x-test-at", "request_body")
        if asked != at and not (asked == "request_headers" and last):
            getattr(response, asked).SetInParent()
            yield response
            return
        if what == "refuse":
            response.immediate_response.status.code = 429
            response.immediate_response.body = b'{"mine": true}'
            _set(response.immediate_response.headers, "x-tidegate-reason", "queue_timeout")
            _set(response.immediate_response.headers, "x-ratelimit-limit", "5")
            yield response
        elif what == "silent":
            time.sleep(float(headers.get("x-test-for", "5")))
        elif what == "hold":
            response.override_message_timeout.FromSeconds(60)
            yield response
            time.sleep(float(headers.get("x-test-for", "1")))
            yield self._go(asked, headers)
        else:
            yield self._go(asked, headers)

    def _go(self, asked: str, headers: dict[str, str]) -> ProcessingResponse:
        order = headers.get("x-test-order", "").split(",")
        response = ProcessingResponse()
        common = getattr(response, asked).response
        common.clear_route_cache = True
        _set(common.header_mutation, "x-envoy-max-retries", str(len(order) - 1))
        if "x-test-per-try-ms" in headers:
            _set(common.header_mutation, "x-envoy-upstream-rq-per-try-timeout-ms", headers["x-test-per-try-ms"])
        common.header_mutation.remove_headers.extend(name for name in headers if name.startswith("x-test-"))
        route = {"ticket": "t-9", "dialect": "openai", "queue_ms": "0", "path": headers[":path"], **self.route}
        groups = [{"name": name} for name in order]
        ParseDict({"llm.route": {**route, "priority_groups": groups}}, response.dynamic_metadata)
        return response

    def log(self, messages: Iterator[StreamAccessLogsMessage], _: grpc.ServicerContext) -> StreamAccessLogsResponse:
        """One access log stream."""
        name = ""
        for message in messages:
            name = message.identifier.log_name or name
            entries = message.http_logs.log_entry
            self.records += [(name, MessageToDict(entry, preserving_proto_field_name=True)) for entry in entries]
        return StreamAccessLogsResponse()


def _set(mutation: Any, name: str, value: str) -> None:
    option = mutation.set_headers.add()
    option.append_action = OVERWRITE
    option.header.key = name
    option.header.raw_value = value.encode()


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def __init__(self, service: Service) -> None:
        read, write = ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        take, thank = StreamAccessLogsMessage.FromString, StreamAccessLogsResponse.SerializeToString
        self._methods = {
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process": grpc.stream_stream_rpc_method_handler(
                service.process, read, write
            ),
            "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs": grpc.stream_unary_rpc_method_handler(
                service.log, take, thank
            ),
            "/grpc.health.v1.Health/Check": grpc.unary_unary_rpc_method_handler(lambda _, __: SERVING),
        }

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method."""
        return self._methods.get(details.method)


if __name__ == "__main__":
    service = Service(int(sys.argv[1]))
    service.route = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    threading.Event().wait()
