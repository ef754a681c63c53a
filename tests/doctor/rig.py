"""A gateway that is none: it answers as Envoy and Tidegate would, but for what a test lets it do wrong."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

from extproc.core.refusal import RULES, Reason, Refusal
from extproc.core.request import Dialect
from extproc.dialects import examination, refuse
from extproc.doctor import asking

USAGE = {"prompt_tokens": 12, "completion_tokens": 30, "total_tokens": 42}
PAUSE_S = 0.008


class SlowTime:
    """Time that only a sham lets pass: however busy the machine is, the doctor measures what was meant."""

    def __init__(self) -> None:
        """It begins anywhere."""
        self._now, self._looks = 1000.0, 0
        self._looked = threading.Condition()

    def monotonic(self) -> float:
        """Whoever measures looks here, also at the arrival of each piece of an answer."""
        with self._looked:
            self._looks += 1
            self._looked.notify_all()
            return self._now

    def sleep(self, seconds: float) -> None:
        """So much passes, at once."""
        with self._looked:
            self._now += seconds

    @contextmanager
    def seen(self) -> Iterator[None]:
        """What is sent meanwhile has arrived at its end."""
        with self._looked:
            before = self._looks
        yield
        with self._looked:
            self._looked.wait_for(lambda: self._looks > before, 60)


@dataclass
class Sham:
    """What it does.

    prefix: of all paths. models: that are listed. certificate: file of the key and certificate of its TLS.
    filtered: Tidegate is in the path; past, absent, unread: but not on these, where a provider answers, or nobody does,
    or Tidegate is not shown the body. away: Envoy cannot reach it; away_when_large: with bodies that are too large.
    message_timeout_s, max_message_timeout_s: Envoy's. old: it answers no questions. busy: others ask. largest: bytes of
    body that pass; shut: more are refused before they were read.
    partial: only these are shown. opens: fails open. bare: what is refused when Tidegate is silent has no words.
    spoil: changes status, headers and data of refusals. upstreams: the chain; each answers after `first_token_s`, in
    `events` events. retries: the next is asked. internal: answers tell who served. buffered: streams come at once.
    newer: the cap has to be named so. others: "route", "tidegate" or "away" answers what is no LLM path.
    """

    prefix: str = ""
    models: tuple[str, ...] = ("gpt-5",)
    certificate: Path | None = None
    filtered: bool = True
    past: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    shut: bool = False
    away: bool = False
    away_when_large: bool = False
    message_timeout_s: float = 0.1
    max_message_timeout_s: float = 60.0
    old: bool = False
    busy: bool = False
    barred: bool = False
    largest: int = 8_000_000
    largest_upstream: int = 8_000_000
    partial: int | None = None
    opens: bool = False
    bare: bool = False
    spoil: Any = None
    upstreams: tuple[str, ...] = ("primary", "backup")
    first_token_s: float = 0.1
    events: int = 20
    retries: bool = True
    internal: bool = True
    buffered: bool = False
    newer: bool = False
    refuses_models: Reason | None = None
    breaks: bool = False
    others: str = "route"
    time: SlowTime = field(default_factory=SlowTime)
    asked: list[dict[str, Any]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *args: Any) -> None:
        """Silence."""

    def do_GET(self) -> None:
        sham = self.server.sham
        self.path = self.path.removeprefix(sham.prefix)
        if self.path == "/v1/models":
            self._send(200, {}, {"data": [{"id": model} for model in sham.models]} if sham.filtered else [])
        elif sham.others == "route":
            self._send(404, {"server": "others"}, {})
        else:
            self._refuse(Reason.NOT_FOUND if sham.others == "tidegate" else Reason.ADMISSION_UNAVAILABLE)

    def do_POST(self) -> None:
        sham = self.server.sham
        assert self.path.startswith(sham.prefix)
        self.path = self.path.removeprefix(sham.prefix)
        size = int(self.headers["content-length"])
        if size > sham.largest and sham.shut:
            self.close_connection = True
            self._refuse(Reason.TOO_LARGE)
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            while self.connection.recv(65536):
                pass
            return
        body = self.rfile.read(size)
        if size > sham.largest:
            self._refuse(Reason.ADMISSION_UNAVAILABLE if sham.away_when_large else Reason.TOO_LARGE)
        elif not sham.filtered or self.path in sham.past:
            self._send(400, {"server": "provider"}, {"error": {"message": "messages are missing"}})
        elif self.path in sham.absent:
            self._send(404, {"server": "envoy"}, None)
        elif sham.away or self.path in sham.unread:
            self._refuse(Reason.ADMISSION_UNAVAILABLE)
        elif sham.barred:
            self._refuse(Reason.UNAUTHENTICATED)
        else:
            self._decide(body[: sham.partial])

    def _decide(self, body: bytes) -> None:
        sham, question = self.server.sham, examination.asked(body)
        if question is None and not body.startswith(examination.PREFIX):
            self._model(body)
        elif question is None or sham.old:
            self._refuse(Reason.BAD_REQUEST, "model is missing")
        elif sham.busy and question.ms:
            self._refuse(Reason.BAD_REQUEST, examination.busy(len(body)))
        else:
            waits_s = sham.message_timeout_s
            if question.hold and sham.max_message_timeout_s >= 34:
                waits_s = sham.max_message_timeout_s
            sham.time.sleep(min(waits_s, question.ms / 1000))
            if waits_s >= question.ms / 1000:
                self._refuse(Reason.BAD_REQUEST, examination.tell(len(body), question))
            elif sham.opens:
                self._send(400, {"server": "provider"}, {"error": {"message": "messages are missing"}})
            elif sham.bare:
                self._send(504, {"server": "envoy"}, None)
            else:
                self._refuse(Reason.ADMISSION_UNAVAILABLE, retry_after=2.0)

    def _model(self, body: bytes) -> None:
        sham, asked = self.server.sham, json.loads(body)
        sham.asked.append(asked)
        if sham.refuses_models is not None:
            self._refuse(sham.refuses_models, retry_after=2.0)
            return
        if sham.newer and "max_tokens" in asked:
            self._send(400, {}, {"error": {"message": "use max_completion_tokens instead of max_tokens"}})
            return
        if len(body) > sham.largest_upstream:
            if sham.breaks:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                self._send(413, {"server": "upstream"}, {})
            return
        limit_ms = self.headers.get("x-request-timeout-ms")
        number = 1
        if limit_ms is not None and int(limit_ms) / 1000 / len(sham.upstreams) < sham.first_token_s:
            number = len(sham.upstreams) if sham.retries else 1
            self._refuse(Reason.DEADLINE_PASSED, served=number)
        elif asked.get("stream"):
            self._stream(number)
        else:
            self._send(200, self._served(number), {"choices": [], "usage": USAGE})

    def _stream(self, number: int) -> None:
        sham = self.server.sham
        event = b'data: {"choices":[{"delta":{"content":"one"}}]}\n\n'
        events = [event] * sham.events + [
            b'data: {"usage":' + json.dumps(USAGE).encode() + b"}\n\n",
            b"data: [DONE]\n\n",
        ]
        self.send_response(200)
        for name, value in {**self._served(number), "transfer-encoding": "chunked"}.items():
            self.send_header(name, value)
        self.end_headers()
        sham.time.sleep(sham.first_token_s)
        if sham.buffered:
            sham.time.sleep(PAUSE_S * len(events))
            events = [b"".join(events)]
        for piece in events:
            with sham.time.seen():
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                self.wfile.flush()
            sham.time.sleep(0 if sham.buffered else PAUSE_S)
        self.wfile.write(b"0\r\n\r\n")

    def _served(self, number: int) -> dict[str, str]:
        sham = self.server.sham
        if not sham.internal:
            return {}
        return {"x-tidegate-upstream": sham.upstreams[number - 1], "x-tidegate-attempts": str(number)}

    def _refuse(self, reason: Reason, detail: str = "", *, served: int = 0, retry_after: float | None = None) -> None:
        dialect = Dialect.ANTHROPIC if self.path.startswith("/v1/messages") else Dialect.OPENAI
        told = Refusal(reason, RULES[reason].status, retry_after, detail)
        headers, body = refuse(dialect, told, now=0.0, jitter=0.0)
        status, named, data = told.status, dict(headers) | (self._served(served) if served else {}), json.loads(body)
        if self.server.sham.spoil is not None:
            status, named, data = self.server.sham.spoil(status, named, data)
        self._send(status, named, data)

    def _send(self, status: int, headers: dict[str, str], data: Any) -> None:
        body = b"" if data is None else json.dumps(data).encode()
        self.send_response_only(status)
        for name, value in {"content-type": "application/json", **headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    sham: Sham

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may leave."""


@contextmanager
def listening(sham: Sham) -> Iterator[str]:
    """Its URL, while it serves; the doctor's time is its own meanwhile."""
    server, scheme = _Server(("127.0.0.1", 0), _Handler), "http"
    server.sham = sham
    if sham.certificate is not None:
        context, scheme = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "https"
        context.load_cert_chain(sham.certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        with patch.object(asking, "time", sham.time):
            yield f"{scheme}://127.0.0.1:{server.server_address[1]}{sham.prefix}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
