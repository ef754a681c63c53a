"""What a pod's hooks and probes do to Envoy's admin page and to the health service, and when they give up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from extproc import lifecycle
from extproc.settings import Settings, load
from extproc.stack import free_ports
from extproc.wire.server import Server


class Admin(ThreadingHTTPServer):
    """Envoy's admin page as far as it is used. active: requests under way, told in turn, the last for ever."""

    def __init__(self, active: list[int]) -> None:
        """Listen on a free port."""
        super().__init__(("127.0.0.1", 0), Page)
        self.active = active
        self.asked: list[str] = []


class Page(BaseHTTPRequestHandler):
    """One call."""

    server: Admin

    def do_POST(self) -> None:
        """A change."""
        self.server.asked.append(f"POST {self.path}")
        self._say("OK\n")

    def do_GET(self) -> None:
        """A look."""
        self.server.asked.append(f"GET {self.path}")
        active = self.server.active
        self._say(f"{lifecycle.ACTIVE}: {active.pop(0) if len(active) > 1 else active[0]}\n")

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def _say(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def admin() -> Iterator[Admin]:
    """It says that one request is under way, three times, then none."""
    with Admin([1, 0, 1, 1, 0]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def settings(port: int, **gateway: object) -> Settings:
    """The demo's, with this admin port."""
    known = load(None, {})
    return known.model_copy(update={"gateway": known.gateway.model_copy(update={"admin_port": port, **gateway})})


def test_a_drain_tells_first_and_closes_later(admin: Admin) -> None:
    """It waits until nothing has been under way for a while: a moment without any is not the end."""
    began = time.monotonic()
    assert lifecycle.drain(settings(admin.server_port), settle_s=0.2)
    assert time.monotonic() - began >= 0.2 + lifecycle.QUIET_S
    assert admin.asked[:2] == ["POST /healthcheck/fail", "POST /drain_listeners"]
    assert set(admin.asked[2:]) == {f"GET /stats?filter=^{lifecycle.ACTIVE}$"}
    assert len(admin.asked) > 7


def test_a_drain_leaves_gates_open(admin: Admin) -> None:
    """In the classic profile requests that wait, and their retries, have yet to pass them."""
    assert lifecycle.drain(settings(admin.server_port, profile="classic"), settle_s=0.0)
    assert admin.asked[1] == "POST /drain_listeners?inboundonly"


def test_a_drain_gives_up(admin: Admin) -> None:
    """When its time is over, which newcomers' seconds are part of."""
    admin.active = [3]
    began = time.monotonic()
    assert not lifecycle.drain(settings(admin.server_port, drain_s=0.5), settle_s=30)
    assert time.monotonic() - began < 25


def test_without_an_envoy_that_is_said() -> None:
    """Not ready, and nothing to drain."""
    nobody = settings(free_ports(1)[0])
    for call in (lambda: lifecycle.envoy_ready(nobody), lambda: lifecycle.drain(nobody, 0)):
        with pytest.raises(lifecycle.NotReadyError, match=r"^http://127\.0\.0\.1:\d+/\w+"):
            call()


def test_an_envoy_that_answers_is_ready(admin: Admin) -> None:
    """It is asked nothing else."""
    lifecycle.envoy_ready(settings(admin.server_port))
    assert admin.asked == ["GET /ready"]


async def test_the_service_is_ready_when_its_health_service_says_so() -> None:
    """And is not when nobody is there."""
    known = load(None, {})
    server = Server(f"127.0.0.1:{free_ports(1)[0]}", None, None, max_body_bytes=1024)  # type: ignore[arg-type]
    service = known.service.model_copy(update={"address": f"127.0.0.1:{server.port}"})
    there = known.model_copy(update={"service": service})
    await server.start()
    await asyncio.to_thread(lifecycle.service_ready, there)
    await server.stop()
    with pytest.raises(lifecycle.NotReadyError, match="UNAVAILABLE"):
        await asyncio.to_thread(lifecycle.service_ready, there)


@pytest.mark.parametrize("name", ["http_proxy", "grpc_proxy"])
async def test_a_proxy_for_what_is_outside_is_not_asked(
    admin: Admin, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A pod's environment may name one, and it does not know what is in the pod."""
    for exempt in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(exempt, raising=False)
    monkeypatch.setenv(name, f"http://127.0.0.1:{free_ports(1)[0]}")
    lifecycle.envoy_ready(settings(admin.server_port))
    assert admin.asked == ["GET /ready"]
    known = load(None, {})
    server = Server(f"127.0.0.1:{free_ports(1)[0]}", None, None, max_body_bytes=1024)  # type: ignore[arg-type]
    service = known.service.model_copy(update={"address": f"127.0.0.1:{server.port}"})
    await server.start()
    await asyncio.to_thread(lifecycle.service_ready, known.model_copy(update={"service": service}))
    await server.stop()
