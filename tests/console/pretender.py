"""A console that only pretends: it serves the page, and whatever overview, history and explanations a test gives it."""

from __future__ import annotations

import json
import mimetypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import extproc.console

PAGE = Path(extproc.console.__file__).parent / "page"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


@dataclass
class Pretender:
    """What it says, and what it was asked. A test changes either at any time."""

    overview: dict[str, Any]
    history: dict[str, Any] = field(default_factory=dict)
    explained: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    found: list[dict[str, Any]] = field(default_factory=list)
    token: str = "open-sesame"
    reading_needs_token: bool = False
    silent: bool = False
    """The stream opens and says nothing, as behind a proxy that holds it back."""
    away: bool = False
    """Streams end, and everything is answered by 503."""
    refuse: tuple[int, str] | None = None
    """How every action ends, if not well."""
    asked: list[tuple[str, str, Any, str]] = field(default_factory=list)
    """Method, path with query, body, authorization."""
    every_s: float = 0.1
    url: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    def actions(self) -> list[tuple[str, str, Any]]:
        return [(method, path, body) for method, path, body, _ in self.asked if method != "GET"]


@contextmanager
def pretend(overview: dict[str, Any], **more: Any) -> Iterator[Pretender]:
    """Serve on a free port of loopback."""
    pretender = Pretender(overview, **more)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(pretender))
    server.daemon_threads = True
    pretender.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield pretender
    finally:
        pretender.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(pretender: Pretender) -> type[_Handler]:
    return type("Handler", (_Handler,), {"pretender": pretender})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    pretender: Pretender

    def handle(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the page was left
            super().handle()

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path.startswith("/api/v1/"):
            self._hear(None)
            self._read(unquote(path.removeprefix("/api/v1/")))
        else:
            self._file("index.html" if path == "/" else path.removeprefix("/assets/"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "null")
        self._hear(body)
        if not self._proven():
            self._json({"error": "who are you?"}, 401)
        elif self.pretender.refuse:
            self._json({"error": self.pretender.refuse[1]}, self.pretender.refuse[0])
        else:
            self._json(self.pretender.overview["levers"])

    def do_DELETE(self) -> None:
        self.do_POST()

    def _hear(self, body: Any) -> None:
        self.pretender.asked.append((self.command, self.path, body, self.headers.get("authorization", "")))

    def _read(self, what: str) -> None:
        if self.pretender.away:
            self._json({"error": "away"}, 503)
        elif self.pretender.reading_needs_token and not self._proven():
            self._json({"error": "a token is needed"}, 401)
        elif what == "stream":
            self._stream()
        else:
            self._found(self._look_up(what))

    def _look_up(self, what: str) -> Any:
        """What there is at a path below /api/v1/; None for nothing."""
        if what == "requests":
            wanted = dict(parse_qsl(urlsplit(self.path).query))
            wanted.pop("limit")
            return {"requests": [one for one in self.pretender.found if wanted.items() <= one.items()]}
        if what.startswith("requests/"):
            return self.pretender.explained.get(what.removeprefix("requests/"))
        if what == "overview":
            return {**self.pretender.overview, "at": time.time()}
        return {"history": self.pretender.history, "config": self.pretender.config}.get(what)

    def _found(self, data: Any) -> None:
        if data is None:
            self._json({"error": "no such thing"}, 404)
        else:
            self._json(data)

    def _proven(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {self.pretender.token}"

    def _stream(self) -> None:
        self._head(200, "text/event-stream", {"connection": "close"})
        while not self.pretender.over.is_set() and not self.pretender.away:
            if not self.pretender.silent:
                told = json.dumps({**self.pretender.overview, "at": time.time()})
                self.wfile.write(f"event: overview\ndata: {told}\n\n".encode())
            self.pretender.over.wait(self.pretender.every_s)
        self.close_connection = True

    def _file(self, name: str) -> None:
        file = PAGE / name
        if file.is_file():
            self._whole(file.read_bytes(), mimetypes.guess_type(name)[0] or "application/octet-stream")
        else:
            self._json({"error": "not found"}, 404)

    def _json(self, data: Any, status: int = 200) -> None:
        self._whole(json.dumps(data).encode(), "application/json", status)

    def _whole(self, body: bytes, kind: str, status: int = 200) -> None:
        self._head(status, kind, {"content-length": str(len(body))})
        self.wfile.write(body)

    def _head(self, status: int, kind: str, more: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-type": kind, "content-security-policy": CSP, **more}.items():
            self.send_header(name, value)
        self.end_headers()
