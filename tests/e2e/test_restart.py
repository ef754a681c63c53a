"""Envoy with several workers, HTTP/2 clients without TLS, Tidegate on a unix socket, a hot restart; and who listens.

Limits hold exactly across workers and across two generations of Envoy, because one Tidegate counts for all of them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import psutil
import pycurl
import pytest
from aiohttp import web

from extproc import lifecycle
from extproc.stack import Stack, envoy_binary, free_ports
from tests.e2e.conftest import PATIENCE_S, books_balance, chat, fill_buckets, settings_for
from tests.e2e.doubles import CHAT, until, waiting

WORKERS = 4
SLOTS = 3
CROWD = 60
DRAIN_S, SHUTDOWN_S = 2, 12
"""How long the old Envoy goes on taking connections while it tells callers to leave, and when it is gone."""
UPSTREAMS: dict[str, Any] = {
    name: {"owned": True, "concurrency": slots, "fake": {"first_token_s": 0.02, "output_tokens_per_s": 2000}}
    for name, slots in (("wide", 200), ("narrow", SLOTS))
}


@dataclass
class Generations(Stack):
    """A stack whose Envoy can be replaced while it runs. epoch: of the newest."""

    base_id: int = field(default_factory=lambda: secrets.randbelow(1_000_000) + 1000)
    epoch: int = 0

    def start_envoy(self) -> None:
        """Start the Envoy of this epoch; the one before goes on as `envoy before`."""
        if "envoy" in self.processes:
            self.epoch += 1
            self.processes["envoy before"] = self.processes.pop("envoy")
        command = [envoy_binary(), "-c", str(self.workdir / "envoy.yaml"), "--concurrency", str(self.workers)]
        command += ["--base-id", str(self.base_id), "--restart-epoch", str(self.epoch), "--log-level", "warning"]
        command += ["--drain-time-s", str(DRAIN_S), "--parent-shutdown-time-s", str(SHUTDOWN_S)]
        self._spawn("envoy", command)
        until(lambda: self.generation() == self.epoch, within_s=60, every_s=0.05)
        self._await_envoy()

    def generation(self) -> int:
        """The epoch of the Envoy that has the admin page; -1 where none has."""
        if self.processes["envoy"].poll() is not None:
            pytest.fail((self.workdir / "envoy.log").read_text("utf-8", "replace")[-3000:])
        try:
            told = json.loads(self.admin("server_info"))
        except httpx.TransportError:
            return -1
        live = told["state"] == "LIVE"
        return int(told["command_line_options"].get("restart_epoch", 0)) if live else -1

    def admin(self, path: str) -> str:
        """What the newest Envoy's admin page tells: a connection that was open stays with the one before."""
        return httpx.get(f"http://127.0.0.1:{self.settings.gateway.admin_port}/{path}", timeout=60).text


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generations]:
    """Two upstreams, one of them narrow; Tidegate on a socket that only we may use."""
    folder = tmp_path_factory.mktemp("restart")
    patient = {"provider": "compatible", "url": f"http://127.0.0.1:{free_ports(1)[0]}", "concurrency": SLOTS}
    upstreams = {**UPSTREAMS, "patient": {**patient, "owned": True}}
    settings = settings_for(
        upstreams=upstreams,
        routes=[{"models": [name], "chain": [name]} for name in upstreams],
        lanes={"P1": {"max_wait_s": 100}},
        timeouts={"stall_s": 60},
        service={
            "address": f"unix:{folder}/tidegate.sock", "socket_mode": "0600", "state_file": str(folder / "levels.json"),
        },
    )  # fmt: skip
    fill_buckets(settings)
    with Generations(settings, folder, workers=WORKERS, patience_s=PATIENCE_S) as running:
        yield running
        books_balance(running)
    assert not Path(f"{folder}/tidegate.sock").exists()


def h2() -> httpx.AsyncClient:
    """A client that speaks HTTP/2 at once, without TLS and without asking first."""
    return httpx.AsyncClient(http1=False, http2=True, timeout=120)


async def ask(client: httpx.AsyncClient, stack: Stack, model: str, **more: Any) -> httpx.Response:
    """One small request."""
    return await client.post(stack.url + CHAT, json={**chat(), "model": model, **more})


def test_nothing_listens_where_others_can_reach_it(stack: Generations) -> None:
    """Of all that the parts listen on, as the system knows it, there is no address but loopback."""
    known = stack.settings.gateway
    pids = [process.pid for process in stack.processes.values()]
    found = {connection.laddr for pid in pids for connection in listening(pid)}
    assert {known.port, known.admin_port, known.probe_port} <= {place.port for place in found}
    assert {ipaddress.ip_address(place.ip).is_loopback for place in found} == {True}


def listening(pid: int) -> Iterator[Any]:
    """TCP sockets that a process listens on."""
    for connection in psutil.Process(pid).net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            yield connection


def test_tidegate_is_on_its_socket_alone(stack: Generations) -> None:
    """With the rights of the settings; `tidegate ready` asks there, too, and a second one does not take it away."""
    path = stack.settings.service.socket_path
    assert path is not None
    assert Path(path).stat().st_mode & 0o777 == 0o600
    lifecycle.service_ready(stack.settings)
    first = stack.processes["service"]
    stack._spawn("second", [*_tidegate(), "serve", "--config", str(stack.workdir / "tidegate.yaml")])
    second = stack.processes.pop("second")
    assert second.wait(60) == 2
    assert "another process listens there" in (stack.workdir / "second.log").read_text("utf-8")
    lifecycle.service_ready(stack.settings)
    assert first.poll() is None


def _tidegate() -> list[str]:

    return [sys.executable, "-m", "extproc"]


async def test_limits_hold_exactly_over_workers_and_http2_connections(stack: Generations) -> None:
    """A crowd on a few HTTP/2 connections, which Envoy's workers share among them: all are served, and never more at a
    time than there are slots, of which none is left idle meanwhile.
    """
    clients = [h2() for _ in range(2 * WORKERS)]
    answers = await asyncio.gather(*(ask(clients[i % len(clients)], stack, "narrow") for i in range(CROWD)))
    assert {(answer.status_code, answer.http_version) for answer in answers} == {(200, "HTTP/2")}
    record = stack.record("narrow")
    assert (record["max_in_flight"], len(record["requests"])) == (SLOTS, CROWD)
    busy = [line for line in stack.admin("stats?filter=listener.*worker_.*downstream_cx_total").splitlines() if line]
    assert sum(int(line.rpartition(":")[2]) > 0 for line in busy) > 1
    for client in clients:
        await client.aclose()


class Caller:
    """A client on a connection of its own, by curl. Python's own HTTP/2 takes GOAWAY, by which Envoy asks to come on
    another connection next time, for the end of the one that it has.
    """

    def __init__(self, stack: Stack, version: int, threads: Executor) -> None:
        """version: one of pycurl's. threads: where it waits."""
        self._threads = threads
        self._curl = pycurl.Curl()
        self._curl.setopt(pycurl.URL, stack.url + CHAT)
        self._curl.setopt(pycurl.HTTP_VERSION, version)
        self._curl.setopt(pycurl.HTTPHEADER, ["content-type: application/json", "expect:"])
        self._curl.setopt(pycurl.TIMEOUT, 120)

    async def ask(self, model: str, **more: Any) -> tuple[int, str]:
        """One small request: status and body. pycurl.error when there is no answer."""
        body = {**chat(**more), "model": model}
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, body)

    def _ask(self, body: dict[str, Any]) -> tuple[int, str]:
        got = BytesIO()
        self._curl.setopt(pycurl.POSTFIELDS, json.dumps(body))
        self._curl.setopt(pycurl.WRITEDATA, got)
        self._curl.perform()
        return self._curl.getinfo(pycurl.RESPONSE_CODE), got.getvalue().decode()

    async def call_until(self, over: asyncio.Event) -> list[str]:
        """Call without a pause; what went wrong."""
        bad = []
        while not over.is_set():
            try:
                status, text = await self.ask("wide")
                bad += [] if status == 200 else [f"{status} {text}"]
            except pycurl.error as error:
                bad.append(repr(error))
            await asyncio.sleep(0.02)
        return bad


class Patient:
    """A provider whose streams go on until `go` is set."""

    def __init__(self) -> None:
        """Serve with `serving`."""
        self.go = asyncio.Event()
        self.in_flight = self.most = 0

    @asynccontextmanager
    async def serving(self, port: int) -> AsyncIterator[None]:
        """Listen while the block runs."""
        app = web.Application()
        app.router.add_post(CHAT, self._stream)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            yield
        finally:
            self.go.set()
            await runner.cleanup()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(event({"content": "a"}, None))
        await self.go.wait()
        self.in_flight -= 1
        await answer.write(event({}, "stop") + b"data: [DONE]\n\n")
        return answer


def event(delta: dict[str, str], finish: str | None) -> bytes:
    """One event of a stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({'id': 'c', 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n".encode()


async def test_a_hot_restart_of_envoy_loses_nobody(stack: Generations) -> None:
    """Callers of both protocols go on without a pause. What the old Envoy streams and holds comes to its end there, new
    requests go to the new one, the slots are those of both, and nothing is lost when the old one is gone.
    """
    patient = Patient()
    versions = pycurl.CURL_HTTP_VERSION_2_PRIOR_KNOWLEDGE, pycurl.CURL_HTTP_VERSION_1_1
    with ThreadPoolExecutor(16) as threads:
        one, two, three, *others = [Caller(stack, versions[i % 2], threads) for i in range(10)]
        async with patient.serving(stack.settings.upstreams["patient"].port):
            streams = [asyncio.create_task(caller.ask("patient", stream=True)) for caller in (one, two, three)]
            await meanwhile(lambda: patient.in_flight == SLOTS)
            held = [asyncio.create_task(others.pop().ask("patient", stream=True)) for _ in range(2)]
            await meanwhile(lambda: waiting(stack) == len(held))
            over = asyncio.Event()
            calling = [asyncio.create_task(others.pop().call_until(over)) for _ in range(4)]
            await asyncio.to_thread(stack.start_envoy)
            held.append(asyncio.create_task(others.pop().ask("patient", stream=True)))
            await meanwhile(lambda: waiting(stack) == len(held))
            assert not any(task.done() for task in (*streams, *held))
            assert patient.most == SLOTS
            assert stack.processes["envoy before"].poll() is None
            patient.go.set()
            answers = [await task for task in (*streams, *held)]
            assert [(status, text[-16:]) for status, text in answers] == [(200, "\n\ndata: [DONE]\n\n")] * (SLOTS + 3)
            gone = stack.processes.pop("envoy before")
            assert await asyncio.to_thread(gone.wait, 5 * SHUTDOWN_S) == 0
            before = served(stack)
            await meanwhile(lambda: served(stack) > before + 10)
            over.set()
            assert [await task for task in calling] == [[]] * len(calling)
    assert patient.most == SLOTS
    await asyncio.to_thread(books_balance, stack)


async def meanwhile(holds: Callable[[], Any]) -> None:
    """Wait until something is true while everything goes on."""
    await asyncio.to_thread(until, holds, 40, 0.02)


def served(stack: Generations) -> int:
    """Requests that the newest Envoy has served."""
    line = stack.admin("stats?filter=^http.tidegate.downstream_rq_2xx$")
    return int(line.rpartition(":")[2] or 0)
