"""The console's server: what it bears from its clients, what it leaves alone, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from extproc.console import guard, server, stream
from extproc.console.server import serve
from extproc.settings import AdminSettings
from extproc.stack import free_ports
from tests.console.world import PROOF, Pages, World, by_token, client, served

LONG = 100_000


@asynccontextmanager
async def raw(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that says what it likes."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    try:
        yield reader, writer
    finally:
        writer.close()


def head(path: str = "/healthz", method: str = "GET", **headers: str) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: localhost",
        *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


async def event(lines: AsyncIterator[str]) -> Any:
    """The next one's data."""
    async for line in lines:
        if line.startswith("data: "):
            return json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has ended")


async def test_signals_and_logs_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Neither start, nor a request, nor nonsense, nor the end is heard of; handlers of signals stay who they were."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    root = logging.getLogger().handlers[:]
    with caplog.at_level(logging.DEBUG, "uvicorn"):
        async with served(World(), AdminSettings()) as (address, _):
            assert before == {each: signal.getsignal(each) for each in before}
            async with raw(address) as (reader, writer):
                writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
                assert (await reader.read(100)).startswith(b"HTTP/1.1 400")
            async with client(f"http://{address}") as http:
                answer = await http.get("/healthz")
    assert before == {each: signal.getsignal(each) for each in before}
    assert logging.getLogger().handlers == root
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []
    assert "server" not in answer.headers


async def test_a_taken_address_is_told(tmp_path: Path) -> None:
    """By its number, so that whoever starts it can say whose it is; nothing stays open."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match="already in use") as caught:
            await serve(address, World().sources(), by_token(tmp_path))
        assert address in str(caught.value.strerror)
    for nowhere in ("192.0.2.1:1", "no.such.host.invalid:1"):
        with pytest.raises(OSError, match=r".") as caught:
            await serve(nowhere, World().sources())
        assert caught.value.strerror
    gc.collect()


async def test_an_address_without_a_host_is_loopback() -> None:
    """Of IPv4; one of IPv6 is written in brackets."""
    port = free_ports(1)[0]
    console = await serve(f":{port}", World().sources())
    async with client(f"http://127.0.0.1:{port}") as http:
        assert (await http.get("/state")).status_code == 200
    await console.close()
    console = await serve(f"[::1]:{port}", World().sources())
    async with client(f"http://[::1]:{port}") as http:
        assert (await http.get("/state")).status_code == 200
    await console.close()


async def test_it_ends_within_a_second_whoever_watches(tmp_path: Path) -> None:
    """Watchers are told, others cut off: idle ones, some in the midst of a request, some that do not read."""
    async with served(World(), by_token(tmp_path)) as (address, console), client(f"http://{address}") as http:
        watching = [await http.send(http.build_request("GET", "/api/v1/stream"), stream=True) for _ in range(20)]
        lines = [each.aiter_lines() for each in watching]
        assert {(await event(each))["status"] for each in lines} == {"ok"}
        await http.get("/healthz")
        async with raw(address) as (_, half), raw(address), raw(address) as (_, deaf):
            half.write(head("/api/v1/drain", "POST", content_length="100", **PROOF) + b"{")
            deaf.write(head("/api/v1/stream"))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            await console.close()
            took = time.monotonic() - began
        for each in lines:
            await _read_on(each)  # one that is cut off raises
        with pytest.raises(httpx.TransportError):
            await http.get("/healthz")
    assert took < 5 * 1.0  # a second, on a machine five times as slow


async def test_endless_heads_and_bodies_are_not_read(tmp_path: Path) -> None:
    """Too long, whether its length is told or not; a lie about it; a body where none belongs."""
    world = World()
    async with served(world, by_token(tmp_path)) as (address, _), client(f"http://{address}", headers=PROOF) as http:

        async def pieces(count: int) -> AsyncIterator[bytes]:
            for _ in range(count):
                yield b" " * 1000

        asked = {"headers": {"content-type": "application/json"}}
        for content in (b" " * LONG, pieces(100), b" " * (guard.MOST_BODY + 1), b" " * (2 * guard.MOST_DISCARDED)):
            try:
                assert (await http.post("/api/v1/drain", content=content, **asked)).status_code == 413
            except httpx.TransportError:  # who sends so much may be cut off before it reads
                assert len(content) > guard.MOST_DISCARDED
        assert (await http.request("GET", "/healthz", content=b"x" * 50_000)).status_code == 200
        assert (await http.get("/healthz", headers={"x": "x" * LONG})).status_code in (400, 431)
        assert (await http.get("/healthz", headers={"x": "x" * guard.MOST_HEAD})).status_code == 431
        assert (await http.post("/api/v1/drain", content=pieces(5), **asked)).status_code == 400
        fits = b'{"reason": "x"}'.ljust(guard.MOST_BODY)
        assert (await http.post("/api/v1/drain", content=fits, **asked)).status_code == 200
    assert [what[1] for what in world.levers.done] == ["drain"]


async def test_slow_and_half_closed_clients_are_let_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who says nothing, who goes on saying a little, who sends half a body; who says all and then closes its half."""
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 1)
    monkeypatch.setattr(server, "HEAD_S", 0.5)
    monkeypatch.setattr(guard, "BODY_S", 0.5)
    async with served(World(), by_token(tmp_path)) as (address, console), asyncio.timeout(60):
        async with raw(address) as (reader, _):
            assert await reader.read() == b""
        async with raw(address) as (reader, writer):
            writer.write(head() + head()[:10])
            assert b"ok\n" in await reader.read()
        async with raw(address) as (reader, writer):
            dripping = asyncio.create_task(_drip(writer))
            assert await _all_of(reader) == b""
            dripping.cancel()
        async with raw(address) as (reader, writer):
            writer.write(head("/api/v1/drain", "POST", content_length="100", content_type="application/json", **PROOF))
            assert (await reader.read(100)).startswith(b"HTTP/1.1 408")
        async with raw(address) as (reader, writer):
            writer.write(head())
            writer.write_eof()
            await reader.read()
        await _until(lambda: not console._server.server_state.connections)


async def test_what_does_not_come_whole_is_not_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Cut off before or within its body, or no HTTP any more: half of an action may mean another thing."""
    about = {"content_type": "application/json", **PROOF}
    chunked = head("/api/v1/bypass", "POST", transfer_encoding="chunked", **about)
    counted = head("/api/v1/bypass", "POST", content_length="20", **about)
    world = World()
    async with served(world, by_token(tmp_path)) as (address, console), asyncio.timeout(60):
        for sent in (counted, counted + b"{}", chunked, chunked + b"2\r\n{}\r\n"):
            async with raw(address) as (_, writer):
                writer.write(sent)
        for sent in (chunked + b"zz\r\n\r\n", chunked + b"2\r\n{}\r\n-5\r\n", b"\0\r\n\r\n"):
            async with raw(address) as (reader, writer):
                writer.write(sent)
                told = await reader.read()
                assert told.startswith(b"HTTP/1.1 400")
                assert told.count(b"content-security-policy") == 1
                assert told.endswith(b'{"error":"Invalid HTTP request received."}')
        async with raw(address) as (reader, writer):
            writer.write(head("/api/v1/stream", transfer_encoding="chunked"))
            assert (await reader.read(1000)).startswith(b"HTTP/1.1 200")
            writer.write(b"zz\r\n\r\n")
            await _all_of(reader)
        await _until(lambda: not console._server.server_state.connections)
    assert world.levers.done == []
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]


async def test_who_keeps_many_connections_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Silent ones, halves of heads, bodies that never come: the oldest goes, and whoever asks is answered."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 20)
    body = head("/api/v1/drain", "POST", content_length="100", content_type="application/json")
    async with AsyncExitStack() as stack:
        address, console = await stack.enter_async_context(served(World(), by_token(tmp_path)))
        watching = await stack.enter_async_context(client(f"http://{address}"))
        lines = (await stack.enter_async_context(watching.stream("GET", "/api/v1/stream"))).aiter_lines()
        assert (await event(lines))["status"] == "ok"
        crowd = [await stack.enter_async_context(raw(address)) for _ in range(60)]
        for at, (_, writer) in enumerate(crowd):
            writer.write((b"", head()[:10], body)[at % 3])
        for _ in range(3):
            async with client(f"http://{address}") as http:
                assert (await http.get("/healthz")).text == "ok\n"
        assert len(console._server.server_state.connections) <= 20
        assert (await event(lines))["status"] == "ok", "who is being answered stays"


async def _drip(writer: asyncio.StreamWriter) -> None:
    for byte in head() * 100:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.1)


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def _until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)


async def test_one_overview_serves_all_and_only_while_somebody_watches() -> None:
    """Once a second for however many; the first sees one at once; nobody looks, none is made."""
    world = World()
    async with served(world, AdminSettings()) as (address, console), client(f"http://{address}") as http:
        await http.get("/state")
        assert world.overviews == 0
        began = time.monotonic()
        opened = [await http.send(http.build_request("GET", "/api/v1/stream"), stream=True) for _ in range(10)]
        assert {each.headers["content-type"] for each in opened} == {"text/event-stream; charset=utf-8"}
        lines = [each.aiter_lines() for each in opened]
        first = [(await event(each))["uptime_s"] for each in lines]
        assert first[0] == 1
        seen = [(await event(each))["uptime_s"] for each in lines]
        assert all(was < now for was, now in zip(first, seen, strict=True))
        assert max(*first, *seen) <= world.overviews <= 2 + 2 * (time.monotonic() - began) / stream.EVERY_S
        assert (await http.get("/api/v1/overview")).json()["uptime_s"] <= world.overviews
        for each in opened:
            await each.aclose()
        assert console._overviews is not None
        await _until(lambda: console._overviews.watchers == 0)
        before = world.overviews
        await asyncio.sleep(2.5 * stream.EVERY_S)
        assert world.overviews == before


async def test_an_overview_that_fails_ends_nobodys_watch(caplog: pytest.LogCaptureFixture) -> None:
    """It is told once; who watches gets the next good one."""
    world = World()
    async with served(world, AdminSettings()) as (address, _), client(f"http://{address}") as http:
        watched = await http.send(http.build_request("GET", "/api/v1/stream"), stream=True)
        lines = watched.aiter_lines()
        await event(lines)
        world.broken = True
        await _until(lambda: world.failed)
        world.broken = False
        assert (await event(lines))["status"] == "ok"
        await watched.aclose()
    assert "the overview could not be made" in caplog.text


async def test_only_so_many_may_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next is told so, and may when another has gone."""
    monkeypatch.setattr(stream, "MOST_WATCHERS", 3)
    async with served(World(), AdminSettings()) as (address, console), client(f"http://{address}") as http:
        opened = [await http.send(http.build_request("GET", "/api/v1/stream"), stream=True) for _ in range(3)]
        await _until(lambda: console._overviews and console._overviews.watchers == 3)
        refused = await http.get("/api/v1/stream")
        assert (refused.status_code, refused.json()["error"]) == (503, "too many watch already")
        assert int(refused.headers["retry-after"]) > 0
        await opened[0].aclose()
        await _until(lambda: console._overviews and console._overviews.watchers == 2)
        async with http.stream("GET", "/api/v1/stream") as watched:
            assert watched.status_code == 200
        for each in opened:
            await each.aclose()


async def test_a_watcher_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others go on; nothing is kept for it."""
    monkeypatch.setattr(server, "STUCK_S", 2.0)
    world = World()
    async with served(world, AdminSettings()) as (address, console), client(f"http://{address}") as http:
        assert console._overviews is not None
        console._overviews._every_s = 0.02
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.settimeout(0)
            host, port = address.split(":")
            await asyncio.get_running_loop().sock_connect(deaf, (host, int(port)))
            await asyncio.get_running_loop().sock_sendall(deaf, head("/api/v1/stream"))
            async with http.stream("GET", "/api/v1/stream") as watched:
                lines = watched.aiter_lines()
                await event(lines)
                await _until(lambda: console._overviews.watchers == 2)
                world.told["much"] = "x" * 500_000
                reading = asyncio.create_task(_read_on(lines))
                await _until(lambda: console._overviews.watchers == 1)
                assert not reading.done()
                reading.cancel()


async def _read_on(lines: AsyncIterator[str]) -> None:
    async for _ in lines:
        pass


async def test_every_answer_has_safe_headers(tmp_path: Path) -> None:
    """Nothing from elsewhere is run, framed, guessed at or kept; the page's files are asked for anew each time."""
    async with served(World(), by_token(tmp_path)) as (address, _), client(f"http://{address}") as http:
        for path in ("/", "/assets/app.js", "/state", "/metrics", "/nowhere", "/api/v1/overview", "/healthz"):
            answer = await http.get(path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            kept = path == "/" or path.startswith("/assets")
            assert answer.headers["cache-control"] == ("no-cache" if kept else "no-store")
        again = await http.get(
            "/assets/app.js", headers={"if-none-match": (await http.get("/assets/app.js")).headers["etag"]}
        )
        assert (again.status_code, again.content) == (304, b"")
        assert (await http.get("/assets/app.js")).headers["content-type"].startswith("text/javascript")
        assert (await http.get("/")).headers["content-type"] == "text/html; charset=utf-8"
        for out in (
            "/assets/../server.py",
            "/assets/%2e%2e/server.py",
            "/assets/..%2fserver.py",
            "/assets/",
            "/assets//etc/passwd",
        ):
            async with raw(address) as (reader, writer):
                writer.write(head(out, connection="close"))
                assert (await reader.read()).startswith(b"HTTP/1.1 404")
        assert (await http.head("/state")).content == b""
        assert (await http.head("/api/v1/stream")).status_code == 405


async def test_metrics_are_made_in_a_thread_and_seldom() -> None:
    """One page for everybody who asks within half a second, of each kind."""
    made: list[str] = []

    class Counted(Pages):
        def page(self, state: Any, accept: str) -> tuple[bytes, str]:  # noqa: ARG002 - as pages are asked for
            made.append(accept)
            return b"# EOF\n", f"{accept}; version=1"

    sources = World().sources()
    address = f"127.0.0.1:{free_ports(1)[0]}"
    console = await serve(address, type(sources)(state=sources.state, metrics=Counted()))
    async with client(f"http://{address}") as http:
        wanted = ["text/plain", "application/openmetrics-text;version=1.0.0", "*/*", "x" * 300] * 10
        answers = await asyncio.gather(*(http.get("/metrics", headers={"accept": each}) for each in wanted))
    await console.close()
    kinds = {each.headers["content-type"] for each in answers}
    assert kinds == {"text/plain; version=1", "application/openmetrics-text; version=1"}
    assert set(made) == {"text/plain", "application/openmetrics-text"}
    assert len(made) < len(wanted) / 2


async def test_what_is_not_provided_is_not_there() -> None:
    """No route, no word of it in the document, and no answer made up."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    console = await serve(address, type(World().sources())(state=dict))
    async with client(f"http://{address}") as http:
        paths = (await http.get("/api/openapi.json")).json()["paths"]
        assert paths.keys() == {"/healthz", "/state", "/api/v1/state", "/api/v1/audit"}
        for path in ("/metrics", "/api/v1/overview", "/api/v1/stream", "/api/v1/levers", "/sessions/a/b"):
            assert (await http.get(path)).json() == {"error": "there is no such page"}
    await console.close()


async def test_a_failure_is_told_without_its_inside(caplog: pytest.LogCaptureFixture) -> None:
    """The log has it all; infinity is no JSON."""
    world = World()
    sources = world.sources()

    def broken() -> dict[str, Any]:
        raise RuntimeError("secret")

    address = f"127.0.0.1:{free_ports(1)[0]}"
    infinite = {"a": float("inf"), "b": [float("nan"), {"c": 1}], "d": {1: "x"}, "e": Path("/x")}
    console = await serve(address, type(sources)(state=broken, history=lambda: infinite))
    async with client(f"http://{address}") as http:
        answer = await http.get("/state")
        assert (answer.status_code, answer.json()) == (500, {"error": "this failed; Tidegate's log tells more"})
        assert (await http.get("/api/v1/history")).json() == {
            "a": None,
            "b": [None, {"c": 1}],
            "d": {"1": "x"},
            "e": "/x",
        }
    await console.close()
    assert "RuntimeError: secret" in caplog.text
