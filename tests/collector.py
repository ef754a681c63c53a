"""An OpenTelemetry collector that keeps what it is sent, over HTTP as the protocol has it."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

__all__ = ["Collector", "Received"]


@dataclass(frozen=True, slots=True)
class Received:
    """One span. Ids in hexadecimal, an absent parent empty; times in epoch seconds; error: what its status says."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    kind: int
    began: float
    ended: float
    attributes: dict[str, Any]
    failed: bool
    error: str


@dataclass
class Collector:
    """`headers` has those of every call; `silent`: calls get no answer, `status` another one than 200."""

    spans: list[Received] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200
    silent: threading.Event | None = None
    port: int = 0

    @property
    def url(self) -> str:
        """For `telemetry.otlp.endpoint`."""
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def listening(self) -> Iterator[Collector]:
        """Serve in threads of its own while the block runs."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                collector.take(self, self._body())

            def log_message(self, *_: Any) -> None:  # type: ignore[override]
                pass

            def _body(self) -> bytes:
                if "chunked" not in self.headers.get("transfer-encoding", ""):
                    return self.rfile.read(int(self.headers.get("content-length") or 0))
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.block_on_close = False
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            if self.silent is not None:
                self.silent.set()
            server.shutdown()
            server.server_close()
            thread.join(5)

    def take(self, call: BaseHTTPRequestHandler, body: bytes) -> None:
        """One call."""
        self.headers.append({name.lower(): value for name, value in call.headers.items()} | {":path": call.path})
        if self.silent is not None:
            self.silent.wait(60)
            call.close_connection = True
            return
        if call.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if self.status == 200 and call.path.endswith("/v1/traces"):
            self.spans += _spans(ExportTraceServiceRequest.FromString(body))
        call.send_response(self.status)
        call.send_header("content-length", "0")
        call.end_headers()

    def trace(self, trace: str, *, at_least: int, within_s: float = 30.0) -> list[Received]:
        """All spans of a trace once there are so many, in the order in which they began."""
        until = time.monotonic() + within_s
        while len(found := [span for span in self.spans if span.trace == trace]) < at_least:
            assert time.monotonic() < until, [(span.service, span.name) for span in found]
            time.sleep(0.05)
        return sorted(found, key=lambda span: span.began)


def _spans(sent: ExportTraceServiceRequest) -> Iterator[Received]:
    for resource in sent.resource_spans:
        about = {each.key: _value(each.value) for each in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Received(
                    service=str(about["service.name"]),
                    name=span.name,
                    trace=span.trace_id.hex(),
                    span=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    kind=span.kind,
                    began=span.start_time_unix_nano / 1e9,
                    ended=span.end_time_unix_nano / 1e9,
                    attributes={each.key: _value(each.value) for each in span.attributes},
                    failed=span.status.code == 2,
                    error=span.status.message,
                )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, str(kind)) if kind else None
