"""The listener for metrics, on a real Envoy: two pages, and nothing else of what is behind them."""

from __future__ import annotations

import http.client
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme

from extproc.render.envoy import bootstrap, find_envoy, to_yaml
from extproc.settings import Settings, load
from tests.render.rig import free_port


class Console(BaseHTTPRequestHandler):
    """Says what it was asked, like a console that has metrics among other things."""

    def do_GET(self) -> None:
        text = f"{self.path} for {self.headers['host']} as {self.headers['accept']}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET  # noqa: N815 - as the base class wants it

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Where metrics are shown."""
    with showing(tmp_path_factory.mktemp("metrics")) as port:
        yield port


@contextmanager
def showing(folder: Path, tls: trustme.LeafCert | None = None) -> Iterator[int]:
    """Where metrics are shown of a console, which speaks TLS where it has a certificate."""
    console = HTTPServer(("127.0.0.1", 0), Console)
    environ = {}
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.configure_cert(context)
        console.socket = context.wrap_socket(console.socket, server_side=True)
        environ = {"TIDEGATE__ADMIN__CERT_FILE": "/its/cert", "TIDEGATE__ADMIN__KEY_FILE": "/its/key"}
    threading.Thread(target=console.serve_forever, daemon=True).start()
    port = free_port()
    ports = {"port": free_port(), "admin_port": free_port(), "probe_port": free_port(), "metrics_port": port}
    environ |= {f"TIDEGATE__GATEWAY__{name.upper()}": str(number) for name, number in ports.items()}
    settings = load(None, {**environ, "TIDEGATE__SERVICE__CONSOLE": f"127.0.0.1:{console.server_port}"})
    file = folder / "envoy.yaml"
    file.write_text(to_yaml(bootstrap(settings)), "utf-8")
    envoy = started(file)
    try:
        end = time.monotonic() + 60
        while asked(port, "GET", "/metrics")[0] != 200:
            assert time.monotonic() < end
            assert envoy.poll() is None, file.with_suffix(".log").read_text()
            time.sleep(0.05)
        yield port
    finally:
        envoy.terminate()
        envoy.wait(20)
        console.shutdown()
        console.server_close()


def test_of_a_console_that_speaks_tls_too(tmp_path: Path) -> None:
    """Whatever its certificate names: it is on the same loopback."""
    with showing(tmp_path, trustme.CA().issue_cert("console.example")) as port:
        assert asked(port, "GET", "/metrics") == (200, "/metrics for localhost as application/openmetrics-text")


def started(file: Path) -> subprocess.Popen[bytes]:
    command = [find_envoy(), "-c", str(file), "--use-dynamic-base-id", "--concurrency", "1", "-l", "warning"]
    with file.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def asked(port: int, method: str, path: str) -> tuple[int, str]:
    """Status and text of an answer; 0 where there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(
            method, path, headers={"host": "prometheus.made.up", "accept": "application/openmetrics-text"}
        )
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except OSError:
        return 0, ""
    finally:
        connection.close()


def test_both_pages_are_shown(port: int) -> None:
    assert asked(port, "GET", "/metrics") == (200, "/metrics for localhost as application/openmetrics-text")
    status, text = asked(port, "GET", "/stats/prometheus")
    assert status == 200
    assert "# TYPE envoy_server_live gauge" in text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"), ("GET", "/state"), ("GET", "/sessions/a/b"), ("POST", "/metrics"), ("GET", "/metrics/"),
        ("GET", "/metrics/../state"), ("GET", "/metrics%2f..%2fstate"), ("GET", "/config_dump"), ("GET", "/stats"),
        ("POST", "/quitquitquit"), ("POST", "/stats/prometheus"),
    ],
)  # fmt: skip
def test_nothing_else_is(port: int, method: str, path: str) -> None:
    status, text = asked(port, method, path)
    assert status in (400, 404), text


def test_there_is_none_unless_it_is_asked_for() -> None:
    names = {each["name"] for each in bootstrap(settings())["static_resources"]["listeners"]}
    assert "metrics" not in names


def settings() -> Settings:
    return load(None, {})
