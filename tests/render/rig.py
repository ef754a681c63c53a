"""What the tests of the rendered configuration run it with: a real Envoy, upstreams that send given bytes, a service.

Admission is played in one of two ways. `admit_by_header` puts a small Lua filter in the place of ext_proc: the test
says in a request header what the service would have written. `Service` speaks the real protocols, for tests of those.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from extproc.render.envoy import bootstrap, find_envoy, to_yaml
from extproc.render.filters import ADMISSION
from extproc.settings import Settings, parse
from extproc.stack import free_ports

Data = dict[str, Any]

ADMIT_HEADER = "x-test-route"
_ADMIT = f"""
function envoy_on_request(handle)
  local text = handle:headers():get("{ADMIT_HEADER}")
  if not text then return end
  handle:headers():remove("{ADMIT_HEADER}")
  local metadata = handle:streamInfo():dynamicMetadata()
  local words = assert(loadstring("return " .. text))()
  for key, value in pairs(words) do metadata:set("llm.route", key, value) end
  handle:headers():replace("x-envoy-max-retries", tostring(#words.priority_groups - 1))
  if words.per_try_ms then
    handle:headers():replace("x-envoy-upstream-rq-per-try-timeout-ms", tostring(words.per_try_ms))
  end
  handle:clearRouteCache()
end
"""


def free_port() -> int:
    """A port that nobody listens on right now, and that no other call was given of late."""
    return free_ports(1)[0]


# ------------------------------------------------------------------------------------------- upstreams


@dataclass
class Seen:
    """A request as an upstream got it; header names in lower case, a list where they were repeated."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def all(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key == name]

    def get(self, name: str) -> str | None:
        """The only value of a header."""
        values = self.all(name)
        assert len(values) < 2, (name, values)
        return values[0] if values else None


@dataclass
class Reply:
    """What an upstream answers: `body` with its length, or `chunks`, each written on its own."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    body: bytes = b""
    chunks: Sequence[bytes] | None = None
    pause_s: float = 0.0
    """Before each chunk."""
    delay_s: float = 0.0
    """Before the headers."""
    cut: bool = False
    """Close the connection instead of ending the answer."""
    reset: bool = False
    """Close the connection without any answer."""


def sse(*events: Any) -> Reply:
    """A stream of events, each given as JSON data, text, or bytes."""
    return Reply(headers={"content-type": "text/event-stream"}, chunks=[event(e) for e in events])


def event(data: Any) -> bytes:
    """One event: bytes as they are, text as its data, anything else as JSON."""
    if isinstance(data, bytes):
        return data
    return b"data: " + (data if isinstance(data, str) else json.dumps(data)).encode() + b"\n\n"


def answer(data: Any, status: int = 200, **headers: str) -> Reply:
    """A JSON answer."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, {"content-type": "application/json", **names}, json.dumps(data).encode())


class Upstream:
    """An HTTP/1.1 server that keeps what it saw and answers as it is told."""

    def __init__(self, loop: Loop) -> None:
        self.seen: list[Seen] = []
        self.reply: Reply | Callable[[Seen], Reply] = answer({"choices": []})
        self._loop = loop
        self._server = loop.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Listen no more."""
        self._loop.call(self._server.close)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    seen = await _read_request(reader)
                    self.seen.append(seen)
                    reply = self.reply(seen) if callable(self.reply) else self.reply
                    if not await _write_reply(writer, reply):
                        break
        finally:
            writer.close()


async def _read_request(reader: asyncio.StreamReader) -> Seen:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines[1:] if line)]
    found = dict(headers)
    if "content-length" in found:
        return Seen(method, path, headers, await reader.readexactly(int(found["content-length"])))
    body = b""
    while "transfer-encoding" in found:
        size = int(await reader.readline(), 16)
        body += (await reader.readexactly(size + 2))[:size]
        if not size:
            break
    return Seen(method, path, headers, body)


async def _write_reply(writer: asyncio.StreamWriter, reply: Reply) -> bool:
    """False where the connection is to be closed."""
    await asyncio.sleep(reply.delay_s)
    if reply.reset:
        return False
    framing = {"transfer-encoding": "chunked"} if reply.chunks is not None else {"content-length": str(len(reply.body))}
    head = f"HTTP/1.1 {reply.status} X\r\n" + "".join(f"{k}: {v}\r\n" for k, v in {**reply.headers, **framing}.items())
    writer.write(head.encode("latin-1") + b"\r\n" + reply.body)
    await writer.drain()
    for chunk in reply.chunks or ():
        await asyncio.sleep(reply.pause_s)
        writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        await writer.drain()
    if reply.cut:
        return False
    if reply.chunks is not None:
        await asyncio.sleep(reply.pause_s)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    return True


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Any) -> Any:
        """Wait for a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def call(self, work: Callable[[], object]) -> None:
        """Call a plain function."""

        async def later() -> None:
            work()

        self.run(later())

    def stop(self) -> None:
        """End what runs, and the thread."""
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


# ----------------------------------------------------------------------------------------------- Envoy


def settings_of(text: str = "", **upstreams: Data | int) -> Settings:
    """Settings on free ports. Upstreams: their settings, or the port of one that speaks both dialects."""
    raw: Data = {
        "gateway": {"port": free_port(), "admin_port": free_port(), "probe_port": free_port()},
        "service": {"address": f"127.0.0.1:{free_port()}"},
        "upstreams": {name: upstream(u) if isinstance(u, int) else u for name, u in upstreams.items()},
        "routes": [{"models": ["*"], "chain": list(upstreams), "acknowledge_unowned": True}],
    }
    for key, value in (yaml.safe_load(text) or {}).items():
        raw[key] = {**raw[key], **value} if key in raw and isinstance(value, dict) else value
    return parse(json.dumps(raw), "test")


def upstream(port: int, **more: Any) -> Data:
    """Settings of a local upstream."""
    return {"provider": "fake", "url": f"http://127.0.0.1:{port}", "concurrency": 8, **more}


def manager_of(config: Data, listener: int = 0) -> Data:
    """The HTTP connection manager of a rendered listener."""
    chain = config["static_resources"]["listeners"][listener]["filter_chains"][0]
    return dict(chain["filters"][0]["typed_config"])


def admit_by_header(config: Data) -> Data:
    """Puts what `admitted` writes into the place of the service's decision."""
    filters = manager_of(config)["http_filters"]
    at = next(i for i, item in enumerate(filters) if item["name"] == ADMISSION)
    kind = "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua"
    filters[at] = {"name": "test", "typed_config": {"@type": kind, "default_source_code": {"inline_string": _ADMIT}}}
    return config


def admitted(*order: str, **words: Any) -> dict[str, str]:
    """The header that lets a request go to these upstreams, in this order."""
    route = {"ticket": "t-1", "dialect": "openai", "path": "/v1/chat/completions", "queue_ms": "7", **words}
    route["priority_groups"] = [{"name": name} for name in order]
    return {ADMIT_HEADER: _lua({key: value for key, value in route.items() if value is not None})}


def _lua(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"[{_lua(k)}] = {_lua(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "{" + ", ".join(map(_lua, value)) + "}"
    if isinstance(value, str):
        return '"' + "".join(f"\\{byte:03d}" for byte in value.encode()) + '"'
    return json.dumps(value)


class Envoy:
    """A real Envoy with a rendered configuration; ended with the `with` block."""

    def __init__(
        self, settings: Settings, folder: Path, change: Callable[[Data], Data] = lambda config: config
    ) -> None:
        self.settings = settings
        self.log = folder / "envoy.log"
        self._file = folder / "envoy.yaml"
        self._file.write_text(to_yaml(change(bootstrap(settings))), "utf-8")

    def __enter__(self) -> Self:
        command = [find_envoy(), "-c", str(self._file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + 15
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > until:
                self.process.kill()
                raise AssertionError(self.log.read_text()[-3000:])
            time.sleep(0.03)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)

    def admin(self, path: str) -> str:
        """What the admin page says."""
        url = f"http://127.0.0.1:{self.settings.gateway.admin_port}{path}"
        with urllib.request.urlopen(url, timeout=2) as response:
            return str(response.read().decode())

    def stat(self, name: str) -> int:
        """One counter."""
        return int(self.admin(f"/stats?filter=^{name}$").rpartition(":")[2] or 0)

    def _ready(self) -> bool:
        try:
            return self.admin("/ready").startswith("LIVE")
        except (urllib.error.URLError, OSError):
            return False

    def call(self, path: str = "/v1/chat/completions", body: bytes = b"{}", **more: Any) -> Got:
        """Send a request to the main listener."""
        return call(self.settings.gateway.port, path, body, **more)

    def probe(self, path: str, body: bytes = b"{}", **more: Any) -> Got:
        """Send a request to the canaries' listener."""
        return call(self.settings.gateway.probe_port, path, body, **more)


# ---------------------------------------------------------------------------------------------- client


@dataclass
class Got:
    """An answer as it came."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    whole: bool
    """False where the connection broke before the answer's end."""

    def get(self, name: str) -> str | None:
        """The only value of a header."""
        values = [value for key, value in self.headers if key.lower() == name]
        assert len(values) < 2, (name, values)
        return values[0] if values else None

    def json(self) -> Any:
        """The body as data."""
        return json.loads(self.body)


def call(
    port: int,
    path: str,
    body: bytes = b"{}",
    *,
    method: str = "POST",
    headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    timeout_s: float = 10.0,
) -> Got:
    """One HTTP/1.1 request, written and read by hand so that nothing is tidied up on the way."""
    items = list(headers.items() if isinstance(headers, Mapping) else headers)
    lines = [f"{method} {path} HTTP/1.1", "host: gateway", f"content-length: {len(body)}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in items]
    return read(raw(port, "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body, timeout_s))


def raw(port: int, data: bytes, timeout_s: float = 10.0) -> bytes:
    """Send bytes; everything that comes back until the other side closes."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        connection.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(1 << 16):
                found += chunk
    return found


def read(data: bytes) -> Got:
    """Take an HTTP/1.1 answer apart."""
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    status = int(first.split(" ")[1]) if first else 0
    lower = {name.lower(): value for name, value in headers}
    if lower.get("transfer-encoding") != "chunked":
        return Got(status, headers, rest, whole=len(rest) == int(lower.get("content-length", 0)))
    body, whole = b"", False
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size or b"0", 16)]
        whole = size == b"0"
        rest = rest[int(size or b"0", 16) + 2 :]
    return Got(status, headers, body, whole)
