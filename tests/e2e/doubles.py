"""What the hostile and the overload tests need besides the SDKs: a stack for many tests, bare sockets, an upstream that
keeps every byte, and crowds of clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from extproc.stack import Stack
from tests.e2e.conftest import PATIENCE_S, books_balance, fill_buckets, settings_for

NEVER_OPENS: dict[str, Any] = {
    "failures": 100_000, "paced": 100_000, "errors": None, "slow": None, "malformed": None, "quarantine_s": None,
}  # fmt: skip
"""A breaker that only counts."""
PATIENT: dict[str, Any] = {"message_timeout_s": 10}
"""An Envoy before which a machine may be slow: under a crowd, what is held is to be seen, not who is given up."""
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"


@contextlib.contextmanager
def running(folder: Path, *, full: bool = True, settled: bool = True, **overrides: Any) -> Iterator[Stack]:
    """A stack that several tests share; its books are checked when the last of them is done."""
    service = {"state_file": str(folder / "levels.json"), **overrides.pop("service", {})}
    settings = settings_for(service=service, **overrides)
    if full:
        fill_buckets(settings)
    with Stack(settings, folder, workers=1, patience_s=PATIENCE_S) as stack:
        yield stack
        if settled:
            books_balance(stack)
    _, found, traceback = (folder / "service.log").read_text("utf-8", "replace").rpartition("Traceback")
    assert not found, traceback


def until(holds: Callable[[], Any], within_s: float = PATIENCE_S, every_s: float = 0.005) -> Any:
    """Poll until something is true, and return it."""
    end = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < end, f"not within {within_s} s: {holds}"
        time.sleep(every_s)
    return found


def waiting(stack: Stack) -> int:
    """How many requests stand in line."""
    return sum(lane["requests"] for lane in stack.state()["waiting"].values())


def forget(stack: Stack) -> None:
    """Empty the records of all fakes, once they have noticed who has left: what is in flight stays in a record."""
    for name, upstream in stack.fakes.items():
        until(lambda name=name: stack.record(name)["in_flight"] == 0)  # type: ignore[misc]
        httpx.delete(f"{upstream.where}/admin/record", timeout=PATIENCE_S).raise_for_status()


@contextlib.contextmanager
def emptied(stack: Stack, vendors: Mapping[str, Upstream]) -> Iterator[Stack]:
    """A shared stack and other upstreams with empty records; whatever was taken is given back in the end."""
    forget(stack)
    for one in vendors.values():
        one.received.clear()
        one.answers.clear()
    yield stack
    books_balance(stack)


def tell(stack: Stack, name: str, **changes: Any) -> None:
    """Change a fake's settings while it runs."""
    where = f"{stack.fakes[name].where}/admin/settings"
    httpx.post(where, json=changes, timeout=PATIENCE_S).raise_for_status()


# Bare HTTP/1.1, for what no library will send.


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer as it came off the wire."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, read as JSON."""
        return json.loads(self.body)


def connect(stack: Stack, timeout_s: float = PATIENCE_S) -> socket.socket:
    """A bare connection to the gateway."""
    return socket.create_connection((stack.settings.gateway.address, stack.settings.gateway.port), timeout_s)


def written(
    method: str = "POST", path: str = CHAT, body: bytes | None = None, headers: Mapping[str, str | bytes] = {}
) -> bytes:
    """The bytes of a request. `content-length` is added unless given or chunked."""
    given = {"host": "gateway", **headers}
    if body is not None and not {"content-length", "transfer-encoding"} & given.keys():
        given["content-length"] = str(len(body))
    lines = [f"{method} {path} HTTP/1.1".encode("utf-8", "surrogateescape")]
    lines += [f"{name}: ".encode() + (v if isinstance(v, bytes) else v.encode()) for name, v in given.items()]
    return b"\r\n".join(lines) + b"\r\n\r\n" + (body or b"")


def read_reply(connection: socket.socket, rest: bytes = b"") -> tuple[Reply, bytes]:
    """One whole answer, and what came behind it. ConnectionError where there is none."""
    data = rest
    while b"\r\n\r\n" not in data:
        data += _more(connection)
    head, data = data.split(b"\r\n\r\n", 1)
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    status = int(lines[0].split()[1])
    if headers.get("transfer-encoding") == "chunked":
        body, data = _chunks(connection, data)
    else:
        length = int(headers.get("content-length", "0"))
        while len(data) < length:
            data += _more(connection)
        body, data = data[:length], data[length:]
    return Reply(status, headers, body), data


def talk(stack: Stack, request: bytes) -> Reply:
    """Send bytes on a connection of their own and read one answer."""
    with connect(stack) as connection:
        connection.sendall(request)
        return read_reply(connection)[0]


def _more(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise ConnectionError("closed without an answer")
    return data


def _chunks(connection: socket.socket, data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        while b"\r\n" not in data:
            data += _more(connection)
        size, data = data.split(b"\r\n", 1)
        length = int(size, 16)
        while len(data) < length + 2:
            data += _more(connection)
        body, data = body + data[:length], data[length + 2 :]
        if not length:
            return body, data


# An upstream that answers everything and forgets nothing.


@dataclass(frozen=True, slots=True)
class Received:
    """One request as an upstream saw it; header names as they came, values as bytes."""

    method: str
    path: str
    headers: list[tuple[str, bytes]]
    body: bytes

    def get(self, name: str) -> bytes | None:
        """The value of a header, None when it is absent."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def json(self) -> Any:
        """The body, read as JSON."""
        return json.loads(self.body)


@dataclass
class Upstream:
    """An OpenAI-like provider that keeps what it gets, byte for byte. `answers`: status, headers and body, in turn."""

    received: list[Received] = field(default_factory=list)
    answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    port: int = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[Upstream]:
        """Serve in a thread of its own while the block runs."""
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(_close(server), loop).result(5)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(5)
            loop.close()

    def last(self) -> Received:
        """The newest request."""
        return self.received[-1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                self.received.append(await _received(reader))
                status, headers, body = self.answers.pop(0) if self.answers else (200, {}, ANSWER)
                given = {"content-type": "application/json", **headers, "content-length": str(len(body))}
                lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
                writer.write(f"HTTP/1.1 {status} Said\r\n{lines}\r\n".encode() + body)
                await writer.drain()
        writer.close()


ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9},
    }
).encode()


async def _received(reader: asyncio.StreamReader) -> Received:
    lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    method, path, _ = lines[0].decode("latin-1").split(" ", 2)
    headers = [(n.decode("latin-1"), v.strip()) for n, _, v in (line.partition(b":") for line in lines[1:] if line)]
    lower = {name.lower(): value for name, value in headers}
    body = b""
    if lower.get("transfer-encoding") == b"chunked":
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    elif "content-length" in lower:
        body = await reader.readexactly(int(lower["content-length"]))
    return Received(method, path, headers, body)


async def _close(server: asyncio.Server) -> None:
    server.close()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)


# Crowds.


@dataclass(frozen=True, slots=True)
class Result:
    """How one client fared: status 0 is a broken connection. Times in seconds of the monotonic clock."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """From sending to the whole answer."""
        return self.ended - self.began

    @property
    def reason(self) -> str:
        """Why it was refused, empty when it was not."""
        return self.headers.get("x-tidegate-reason", "")


class Crowd:
    """Many clients at once, each on a connection of its own."""

    def __init__(self, session: aiohttp.ClientSession, stack: Stack) -> None:
        """Use `gather` and `ask`."""
        self._session = session
        self._stack = stack

    async def ask(self, body: Mapping[str, Any], path: str = CHAT, **headers: str) -> Result:
        """One request; underscores in header names stand for dashes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        began = time.monotonic()
        try:
            async with self._session.post(self._stack.url + path, json=body, headers=named) as response:
                data = await response.read()
                return Result(response.status, dict(response.headers), data, began, time.monotonic())
        except aiohttp.ClientError as error:
            return Result(0, {}, repr(error).encode(), began, time.monotonic())


@contextlib.asynccontextmanager
async def crowd(stack: Stack, timeout_s: float = 60.0) -> AsyncIterator[Crowd]:
    """Clients against `stack`, without any limit on their number."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Crowd(session, stack)


def rss_mb(pid: int) -> float:
    """Resident memory of a process in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)
