"""TLS on both sides of the gateway: mutual to Tidegate, whose certificates are renewed meanwhile, and to providers.

Providers are played by one more Envoy, which speaks TLS as they do and hands on to a fake one.
"""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import yaml

from extproc import lifecycle
from extproc.lifecycle import NotReadyError
from extproc.stack import Stack, envoy_binary, free_ports
from tests.certificates import Mounted, tls_of, write
from tests.e2e.conftest import books_balance, chat
from tests.e2e.doubles import CHAT, running, until

HTTP = httpx.Client(timeout=60)
TYPES = "type.googleapis.com/envoy.extensions"
COOL_DOWN_S = 600
FRONTS = {
    "h2": ("localhost", ["h2", "http/1.1"]),
    "h1": ("localhost", ["http/1.1"]),
    "wild": ("*.localhost", ["h2"]),
    "numbered": ("127.0.0.1", ["h2"]),
    "misnamed": ("provider.example", ["h2"]),
    "strange": ("localhost", ["h2"]),
    "mutual": ("localhost", ["h2"]),
    "unproven": ("localhost", ["h2"]),
}
"""Providers: what their certificates name, and the protocols that they offer. The last two ask for a certificate."""
REFUSED = ("misnamed", "strange", "unproven")


def where(name: str, port: int) -> str:
    """The URL of a provider, by the host that it is reached by."""
    host = {"wild": "api.localhost", "numbered": "127.0.0.1"}.get(name, "localhost")
    return f"https://{host}:{port}"


def front(name: str, port: int, files: tuple[str, str], ca: str) -> dict[str, Any]:
    """A listener that plays a provider's TLS."""
    common: dict[str, Any] = {
        "alpn_protocols": FRONTS[name][1],
        "tls_certificates": [{"certificate_chain": {"filename": files[0]}, "private_key": {"filename": files[1]}}],
    }
    asks = name in ("mutual", "unproven")
    if asks:
        common["validation_context"] = {"trusted_ca": {"filename": ca}}
    context = {
        "@type": f"{TYPES}.transport_sockets.tls.v3.DownstreamTlsContext",
        "require_client_certificate": asks,
        "common_tls_context": common,
    }
    told = {"header": {"key": "x-front", "value": "%PROTOCOL% %REQUESTED_SERVER_NAME% %DOWNSTREAM_PEER_SUBJECT%"}}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "vendor", "timeout": "0s"}}
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "route_config": {
            "virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [route], "response_headers_to_add": [told]}]
        },
        "http_filters": [{"name": "router", "typed_config": {"@type": f"{TYPES}.filters.http.router.v3.Router"}}],
    }
    inspector = {"@type": f"{TYPES}.filters.listener.tls_inspector.v3.TlsInspector"}
    return {
        "name": name,
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "listener_filters": [{"name": "inspector", "typed_config": inspector}],
        "filter_chains": [
            {
                "transport_socket": {"name": "tls", "typed_config": context},
                "filters": [{"name": "manager", "typed_config": manager}],
            }
        ],
    }


def fronts(folder: Path, ports: dict[str, int], vendor: int, ca: trustme.CA) -> Path:
    """The configuration of the Envoy that plays the providers' TLS."""
    ca.cert_pem.write_to_path(folder / "provider-ca.pem")
    trusted = str(folder / "provider-ca.pem")
    stranger = trustme.CA()
    issued = {
        name: write((stranger if name == "strange" else ca).issue_cert(FRONTS[name][0]), folder, name)
        for name in FRONTS
    }
    endpoint = {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": vendor}}}}
    assignment = {"cluster_name": "vendor", "endpoints": [{"lb_endpoints": [endpoint]}]}
    config = {
        "static_resources": {
            "listeners": [front(name, port, issued[name], trusted) for name, port in ports.items()],
            "clusters": [{"name": "vendor", "type": "STATIC", "load_assignment": assignment}],
        }
    }
    file = folder / "fronts.yaml"
    file.write_text(yaml.safe_dump(config), "utf-8")
    return file


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mounted:
    """Certificates of Tidegate and of its Envoy."""
    return Mounted(tmp_path_factory.mktemp("service") / "mounted")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, files: Mounted) -> Iterator[Stack]:
    """Tidegate by mutual TLS, and a provider of each kind before the fake one, which is the last of every chain."""
    folder = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    vendor, address, *rest = free_ports(2 + len(FRONTS))
    ports = dict(zip(FRONTS, rest, strict=True))
    trusted = str(folder / "provider-ca.pem")
    shown = dict(zip(("client_cert_file", "client_key_file"), write(ca.issue_cert("us"), folder, "us"), strict=True))
    upstreams: dict[str, Any] = {
        name: {
            "provider": "compatible", "url": where(name, port), "ca_file": trusted, "concurrency": 50,
            "breaker": {"cool_down_s": COOL_DOWN_S, "cool_down_max_s": COOL_DOWN_S},
            **(shown if name == "mutual" else {}),
        }
        for name, port in ports.items()
    }  # fmt: skip
    upstreams["vendor"] = {"url": f"http://127.0.0.1:{vendor}", "owned": True, "concurrency": 50}
    routes = [{"models": [name], "chain": [name, "vendor"]} for name in FRONTS]
    config = fronts(folder, ports, vendor, ca)
    with ExitStack() as ending:
        command = [envoy_binary(), "-c", str(config), "--use-dynamic-base-id", "--concurrency", "1", "-l", "warning"]
        log = ending.enter_context((folder / "fronts.log").open("ab"))
        provider = subprocess.Popen(command, stdout=log, stderr=log)
        ending.callback(provider.wait)
        ending.callback(provider.kill)
        service = {"address": f"localhost:{address}", "tls": tls_of(files)}
        yield ending.enter_context(running(folder, upstreams=upstreams, routes=routes, service=service))


def ask(stack: Stack, model: str, **more: Any) -> httpx.Response:
    """One small request."""
    return HTTP.post(stack.url + CHAT, json={**chat(), "model": model, **more})


def health_address(stack: Stack) -> tuple[str, int]:
    """Where Tidegate listens."""
    host, _, port = stack.settings.service.address.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("h2", "HTTP/2 localhost"),
        ("h1", "HTTP/1.1 localhost"),
        ("wild", "HTTP/2 api.localhost"),
        ("numbered", "HTTP/2"),
        ("mutual", "HTTP/2 localhost OU="),
    ],
)
def test_providers_with_a_ca_of_their_own(stack: Stack, name: str, told: str) -> None:
    """HTTP/2 where it is offered, the name sent, an address or a wildcard in a certificate understood, and our own
    certificate shown where it is asked for; the stream comes whole.
    """
    answer = ask(stack, name, stream=True)
    assert (answer.status_code, answer.headers["x-tidegate-upstream"]) == (200, name)
    front = " ".join(answer.headers["x-front"].split())
    assert front == told if name != "mutual" else front.startswith(told)
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("name", REFUSED)
def test_a_provider_that_is_not_who_it_says_gets_nothing(stack: Stack, name: str) -> None:
    """Another name, another CA, or one that does not take us: the next serves, and the breaker rests it."""
    before = len(stack.record("vendor")["requests"])
    for _ in range(3):
        answer = ask(stack, name)
        assert (answer.status_code, answer.headers["x-tidegate-upstream"]) == (200, "vendor")
    until(lambda: stack.state()["breakers"][name]["state"] == "open")
    answer = ask(stack, name)
    assert (answer.headers["x-tidegate-upstream"], answer.headers["x-tidegate-attempts"]) == ("vendor", "1")
    assert len(stack.record("vendor")["requests"]) == before + 4


def test_the_service_lets_envoy_in_and_nobody_else(stack: Stack, files: Mounted) -> None:
    """Admission, health and records go by mutual TLS: the books balance. `tidegate ready` shows its certificate."""
    assert ask(stack, "h2").status_code == 200
    books_balance(stack)
    lifecycle.service_ready(stack.settings)
    without = stack.settings.service.model_copy(update={"tls": None})
    with pytest.raises(NotReadyError, match="UNAVAILABLE"):
        lifecycle.service_ready(stack.settings.model_copy(update={"service": without}))
    context = ssl.create_default_context(cafile=files.path("ca.pem"))
    assert serial_of(stack, context) is None
    assert serial_of(stack, client(files))


def serial_of(stack: Stack, context: ssl.SSLContext) -> str | None:
    """The serial number of the certificate that Tidegate shows to whom it lets in; None to others, or if it is bad."""
    context.set_alpn_protocols(["h2"])
    raw = socket.create_connection(health_address(stack), timeout=10)
    try:
        with context.wrap_socket(raw, server_hostname="localhost") as wire:
            wire.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
            return str(wire.getpeercert()["serialNumber"]) if wire.recv(1) else None  # type: ignore[index]
    except (ssl.SSLError, ConnectionError):
        return None


def client(files: Mounted) -> ssl.SSLContext:
    """One that trusts the newest authority and shows what it issued."""
    context = ssl.create_default_context(cafile=files.path("ca.pem"))
    context.load_cert_chain(files.path("client.pem"), files.path("client.key"))
    return context


def test_renewed_certificates_of_a_new_authority_are_in_use_without_a_restart(stack: Stack, files: Mounted) -> None:
    """Everything is replaced at once, as a Secret is: what is connected stays, Tidegate shows the new one to the next,
    and when Tidegate starts anew Envoy comes back with the new one, too: those of before would be refused.
    """
    old = client(files)
    shown = serial_of(stack, old)
    files.renew()
    assert ask(stack, "h2").status_code == 200
    assert serial_of(stack, client(files)) not in (None, shown)
    assert serial_of(stack, old) is None
    books_balance(stack)
    stack.kill("service")
    assert ask(stack, "h2").headers["x-tidegate-reason"] == "admission_unavailable"
    stack.start_service()
    until(lambda: ask(stack, "h2").status_code == 200, within_s=30, every_s=0.1)
    lifecycle.service_ready(stack.settings)
