"""What a client can send, and what Envoy refuses by itself, on a real Envoy."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h2.connection
import h2.events
import pytest

from extproc.render.envoy import bootstrap
from extproc.render.filters import ADMISSION
from tests.render.rig import (
    Data,
    Envoy,
    Got,
    Reply,
    Upstream,
    admit_by_header,
    admitted,
    answer,
    manager_of,
    raw,
    read,
    settings_of,
    upstream,
)

pytestmark = pytest.mark.e2e

Ups = dict[str, Upstream]


def refused(got: Got, status: int, reason: str, *, retry: bool, anthropic: bool = False) -> None:
    """Every refusal has the same parts, in the caller's dialect."""
    body = got.json()
    assert (got.status, got.get("content-type")) == (status, "application/json")
    assert (got.get("x-tidegate-reason"), body["error"]["reason"]) == (reason, reason)
    assert got.get("x-should-retry") == ("true" if retry else "false")
    assert (got.get("retry-after") is not None) == retry
    assert body["error"]["message"]
    ids = {got.get(name) for name in ("x-tidegate-request-id", "x-request-id", "request-id")}
    assert len(ids) == 1
    if anthropic:
        assert ids == {body["request_id"]}
        assert body.keys() == {"type", "error", "request_id"}
        assert body["type"] == "error"
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code", "reason"}


# ----------------------------------------------------------------------------------- refusals of Envoy


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/files", "/", "/v1/messagesx", "/x"])
def test_nothing_passes_without_admission(gateway: Envoy, path: str) -> None:
    """Decision 3 and 5: fail closed by routing, for every path."""
    refused(gateway.call(path), 503, "admission_unavailable", retry=True)


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/messages?beta=true", "/v1/messages/count_tokens", "/v1/messages/batches"]
)
def test_nor_in_the_other_dialect(gateway: Envoy, path: str) -> None:
    got = gateway.call(path)
    refused(got, 503, "admission_unavailable", retry=True, anthropic=True)
    assert got.json()["error"]["type"] == "overloaded_error"


MALFORMED = [
    b"POST /v1/x HTTP/1.1\r\ncontent-length: 2\r\n\r\nhi",
    b"POST /v1/x HTTP/1.1\r\nhost: a\r\nno colon\r\n\r\n",
    b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1%2fchat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
    b"POST /v1/..%5c..%2Fadmin HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
    b"NO\x00NSENSE\r\n\r\n",
]


@pytest.mark.parametrize("data", MALFORMED)
def test_malformed_requests_are_refused_in_json(gateway: Envoy, data: bytes) -> None:
    refused(read(raw(gateway.settings.gateway.port, data)), 400, "bad_request", retry=False)


def test_upgrades_are_not_served(gateway: Envoy) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket"}
    data = "GET /v1/realtime HTTP/1.1\r\nhost: a\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n"
    refused(read(raw(gateway.settings.gateway.port, data.encode())), 403, "forbidden", retry=False)


def test_admission_and_routes_see_the_same_path(gateway: Envoy, ups: Ups) -> None:
    """Dots and double slashes are resolved before anything looks at the path."""
    for path in ("/v1/./chat//completions", "/x/../v1/chat/completions", "//v1/chat/completions"):
        gateway.call(path, headers=admitted("b", path=None))
    assert [seen.path for seen in ups["b"].seen] == ["/v1/chat/completions"] * 3


# ---------------------------------------------------------------------------------- headers of clients


@pytest.fixture
def open_gate(ups: Ups, folder: Path) -> Iterator[Envoy]:
    """An Envoy that shows an upstream what admission is shown: whatever survives the cleaning."""

    def change(config: Data) -> Data:
        admit_by_header(config)
        manager = manager_of(config)
        kind = "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua"
        show = """function envoy_on_request(h)
          local found = {}
          for name, value in pairs(h:headers()) do found[#found + 1] = name .. "=" .. value end
          h:respond({[":status"] = "200"}, table.concat(found, "\\n"))
        end"""
        manager["http_filters"].insert(
            0, {"name": "show", "typed_config": {"@type": kind, "default_source_code": {"inline_string": show}}}
        )
        return config

    tenant = "tenant: ['header:x-tidegate-tenant', 'header:x-team']"
    identity = f"identity: {{{tenant}, session_headers: [x-tidegate-session, x-sid]}}"
    with Envoy(settings_of(identity, a=ups["a"].port), folder, change) as envoy:
        yield envoy


def test_only_declared_names_of_ours_come_in(open_gate: Envoy) -> None:
    """Decision 3: not a ticket, not a retry count, not in capitals, not twice, not by our own spare names."""
    sent = [
        ("X-Tidegate-Priority", "P0"),
        ("x-tidegate-priority", "P1"),
        ("x-tidegate-tenant", "acme"),
        ("X-TIDEGATE-SESSION", "s-1"),
        ("x-tidegate-ticket", "t"),
        ("X-TideGate-Ticket", "u"),
        ("x-tidegate-probe", "a"),
        ("X-Envoy-Max-Retries", "9"),
        ("x-envoy-max-retries", "8"),
        ("x-envoy-upstream-rq-timeout-ms", "1"),
        ("x-envoy-original-path", "/x"),
        ("X-Envoy-Anything", "1"),
        ("x-request-id", "mine"),
        ("x-tg-in-0", "P9"),
        ("X-TG-IN-1", "evil"),
        ("x-team", "blue"),
        ("x-sid", "s-2"),
    ]
    lines = open_gate.call(headers=sent).body.decode().splitlines()
    ours = {line for line in lines if line.startswith(("x-t", "x-s", "x-envoy-")) and "address" not in line}
    assert ours == {
        "x-tidegate-priority=P0",
        "x-tidegate-tenant=acme",
        "x-tidegate-session=s-1",
        "x-team=blue",
        "x-sid=s-2",
    }
    (request_id,) = [line for line in lines if line.startswith("x-request-id=")]
    assert request_id != "x-request-id=mine"


def test_names_that_nobody_declared_are_nothing_special(gateway: Envoy, ups: Ups, open_gate: Envoy) -> None:
    """An undeclared `x-tidegate-` name is removed, any other header is the client's own business."""
    lines = open_gate.call(headers={"x-tidegate-user": "root", "x-user": "root"}).body.decode().splitlines()
    assert "x-user=root" in lines
    assert "x-tidegate-user=root" not in lines
    assert not [line for line in lines if line.endswith("=-")]
    gateway.call(headers={**admitted("a"), "x-tidegate-tenant": "acme", "x-tidegate-priority": "P0"})
    assert ups["a"].seen[0].get("x-tidegate-tenant") is None


# ----------------------------------------------------------------------------------------------- flood


@pytest.fixture
def guarded(ups: Ups, folder: Path) -> Iterator[Envoy]:
    flood = "flood: {per_key_rps: 3, per_address_rps: 60, burst_s: 1, max_keys: 4}"
    with Envoy(settings_of(flood, a=ups["a"].port), folder, admit_by_header) as envoy:
        yield envoy


def test_a_flood_by_one_key_is_stopped_and_others_are_not(guarded: Envoy) -> None:
    """Whichever header the key comes in, each key has its own allowance; so has each address."""
    for header in ("authorization", "x-api-key", "api-key"):
        time.sleep(1.1)
        found = [guarded.call(headers={header: "one", **admitted("a")}) for _ in range(12)]
        assert [got.status for got in found[:3]] == [200, 200, 200]
        assert [got.status for got in found].count(429) >= 6
        found = [got for got in found if got.status == 429]
        refused(found[-1], 429, "tenant_quota", retry=True)
        assert found[-1].get("retry-after") == "1"
        assert guarded.call(headers={header: "two", **admitted("a")}).status == 200
    time.sleep(1.1)
    found = [guarded.call("/v1/messages", headers={"x-api-key": f"key {i}"}) for i in range(150)]
    assert [got.status for got in found[:60]] == [503] * 60
    found = [got for got in found if got.status == 429]
    assert len(found) >= 40
    refused(found[-1], 429, "tenant_quota", retry=True, anthropic=True)


def test_only_so_many_keys_are_remembered(guarded: Envoy) -> None:
    """The least recently seen is forgotten: memory is bounded, and each address has its own limit all the same."""
    time.sleep(1.1)
    assert 429 in [guarded.call(headers={"api-key": "old"}).status for _ in range(9)]
    for i in range(4):
        guarded.call(headers={"api-key": f"new {i}"})
    assert guarded.call(headers={"api-key": "old"}).status == 503


def test_a_flood_is_stopped_before_its_bodies_are_read(guarded: Envoy) -> None:
    """The refusal comes while the body is still to come."""
    time.sleep(1.1)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\napi-key: slow\r\ncontent-length: 900000\r\n\r\n"
    for _ in range(9):
        guarded.call(headers={"api-key": "slow", **admitted("a")})
    assert read(raw(guarded.settings.gateway.port, head, 3)).status == 429


# -------------------------------------------------------------------------------------------- identity


def _token(key: bytes, **claims: Any) -> str:
    def part(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    text = part(b'{"alg":"HS256","kid":"k"}') + "." + part(json.dumps({"iss": "me", "exp": 2**31, **claims}).encode())
    return text + "." + part(hmac.new(key, text.encode(), hashlib.sha256).digest())


def test_a_token_is_verified_and_its_claims_are_noted(ups: Ups, folder: Path) -> None:
    """Missing, foreign and expired tokens pass without claims, so that admission can decide; no upstream sees any."""
    secret = b"a secret of at least thirty-two bytes"
    k = base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    jwks = folder / "jwks.json"
    jwks.write_text(json.dumps({"keys": [{"kty": "oct", "alg": "HS256", "kid": "k", "k": k}]}))

    def change(config: Data) -> Data:
        filters = manager_of(admit_by_header(config))["http_filters"]
        show = """function envoy_on_request(h)
          local claims = (h:streamInfo():dynamicMetadata():get("envoy.filters.http.jwt_authn") or {})["claims"]
          h:headers():replace("x-claims", claims and claims.team or "none")
        end"""
        kind = "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua"
        at = next(i for i, item in enumerate(filters) if item["name"] == "test")
        filters.insert(
            at, {"name": "s", "typed_config": {"@type": kind, "default_source_code": {"inline_string": show}}}
        )
        return config

    identity = {"tenant": ["jwt:team", "api_key"], "jwt": {"issuer": "me", "jwks_file": str(jwks), "header": "x-token"}}
    with Envoy(settings_of(json.dumps({"identity": identity}), a=ups["a"].port), folder, change) as envoy:
        good = _token(secret, team="blue")
        for token in (
            good,
            _token(b"wrong" * 8, team="blue"),
            _token(secret, team="b", exp=1),
            _token(secret, team="b", iss="x"),
            "junk",
        ):
            assert envoy.call(headers={"x-token": token, **admitted("a")}).status == 200
        assert envoy.call(headers=admitted("a")).status == 200
    assert [seen.get("x-claims") for seen in ups["a"].seen] == ["blue", "none", "none", "none", "none", "none"]
    assert not any(seen.get("x-token") for seen in ups["a"].seen)


def test_admission_is_given_the_claims_of_verified_tokens() -> None:
    identity = "identity: {tenant: 'jwt:team', jwt: {jwks_file: x}}"
    filters = manager_of(bootstrap(settings_of(identity, a=1)))["http_filters"]
    options = next(item for item in filters if item["name"] == ADMISSION)["typed_config"]["metadata_options"]
    assert options["forwarding_namespaces"] == {"untyped": ["envoy.filters.http.jwt_authn"]}


# -------------------------------------------------------------------------------------------- canaries


def test_a_canary_uses_the_real_key_and_path_of_one_upstream(gateway: Envoy, ups: Ups) -> None:
    for name in "abc":
        assert (
            gateway.probe("/v1/chat/completions", headers={"x-tidegate-probe": name, "authorization": "x"}).status
            == 200
        )
    a, b, c = (ups[name].seen[0] for name in "abc")
    assert (a.path, a.get("authorization")) == ("/openai/v1/chat/completions", "Bearer sk-a")
    assert (b.path, b.get("x-api-key"), b.get("authorization")) == ("/v1/chat/completions", "sk-b", None)
    assert (c.path, c.get("authorization")) == ("/v1/chat/completions", None)
    assert not any(seen.get("x-tidegate-probe") for seen in (a, b, c))


def test_a_canary_hears_the_plain_truth(gateway: Envoy, ups: Ups) -> None:
    """A refused key is told as it is, and nothing is tried elsewhere."""
    time.sleep(1.1)
    ups["a"].reply = answer({"error": {"code": "invalid_api_key"}}, 401, x_ratelimit_remaining_tokens="5")
    got = gateway.probe("/v1/chat/completions", headers={"x-tidegate-probe": "a"})
    assert (got.status, got.json(), got.get("x-ratelimit-remaining-tokens")) == (
        401,
        {"error": {"code": "invalid_api_key"}},
        "5",
    )
    assert not ups["b"].seen


def test_the_canaries_door_is_narrow(gateway: Envoy, ups: Ups) -> None:
    """Only named upstreams, small bodies, a few per second; the service cannot be named."""
    time.sleep(1.1)
    assert gateway.probe("/v1/x").status == 404
    assert gateway.probe("/v1/x", headers={"x-tidegate-probe": "tidegate:service"}).status == 404
    assert gateway.probe("/v1/x", body=b"x" * 5000, headers={"x-tidegate-probe": "a"}).status == 413
    assert not ups["a"].seen
    found = [gateway.probe("/v1/x", headers={"x-tidegate-probe": "a"}).status for _ in range(20)]
    assert found.count(429) >= 3


# ---------------------------------------------------------------------------------------------- HTTP/2


def test_http2_without_tls_is_spoken(gateway: Envoy, ups: Ups) -> None:
    ups["c"].reply = Reply(headers={"content-type": "text/event-stream"}, chunks=[b"data: [DONE]\n\n"])
    link = h2.connection.H2Connection()
    link.initiate_connection()
    head = {":method": "POST", ":path": "/v1/chat/completions", ":scheme": "http", ":authority": "a", **admitted("c")}
    link.send_headers(1, list(head.items()), end_stream=True)
    data, ended = b"", False
    with socket.create_connection(("127.0.0.1", gateway.settings.gateway.port), timeout=5) as wire:
        wire.sendall(link.data_to_send())
        while not ended:
            for happened in link.receive_data(wire.recv(65536)):
                data += happened.data if isinstance(happened, h2.events.DataReceived) else b""
                ended = ended or isinstance(happened, h2.events.StreamEnded)
            wire.sendall(link.data_to_send())
    assert data == b"data: [DONE]\n\n"


# ------------------------------------------------------------------------------------ TLS to upstreams


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Certificate and key of `localhost`, by itself."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@pytest.mark.parametrize("alpn", [["h2", "http/1.1"], ["http/1.1"], []], ids=str)
def test_upstreams_over_tls(ups: Ups, folder: Path, certificate: tuple[str, str], alpn: list[str]) -> None:
    """HTTP/2 where it is offered; body, path and answer are worked on all the same. A wrong name is not trusted."""
    front = settings_of("", a=ups["a"].port).gateway.port
    settings = settings_of(
        "",
        tls=upstream(1, url=f"https://localhost:{front}", ca_file=certificate[0]),
        misnamed=upstream(1, url=f"https://127.0.0.1:{front}", ca_file=certificate[0]),
        untrusted=upstream(1, url=f"https://localhost:{front}"),
        a=ups["a"].port,
    )
    with Envoy(
        settings, folder, lambda config: _with_front(admit_by_header(config), front, ups["b"].port, certificate, alpn)
    ) as envoy:
        words = {"heads": {"tls": '{"model":"own"'}, "width": 20, "hide_usage": True}
        ups["b"].reply = Reply(
            headers={"content-type": "text/event-stream"},
            chunks=[b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n', b"data: [DONE]\n\n"],
        )
        got = envoy.call(headers=admitted("tls", **words), body=b'{"model":"x"'.ljust(20) + b"z" * 200_000)
        assert got.body == b"data: [DONE]\n\n"
        (seen,) = ups["b"].seen
        assert seen.body == b'{"model":"own"'.ljust(20) + b"z" * 200_000
        assert seen.get("x-front") == ("HTTP/2" if "h2" in alpn else "HTTP/1.1") + " localhost"
        ups["b"].reply = answer({"error": {}}, 401)
        for name in ("tls", "misnamed", "untrusted"):
            assert envoy.call(headers=admitted(name, "a")).get("x-tidegate-upstream") == "a"
        assert len(ups["b"].seen) == 2


def _with_front(config: Data, port: int, to: int, certificate: tuple[str, str], alpn: list[str]) -> Data:
    """Adds a listener that plays a provider's TLS and hands on to a plain upstream."""
    types = "type.googleapis.com/envoy.extensions"
    chain = {"certificate_chain": {"filename": certificate[0]}, "private_key": {"filename": certificate[1]}}
    context = {
        "@type": f"{types}.transport_sockets.tls.v3.DownstreamTlsContext",
        "common_tls_context": {"alpn_protocols": alpn, "tls_certificates": [chain]},
    }
    shown = {"header": {"key": "x-front", "value": "%PROTOCOL% %REQUESTED_SERVER_NAME%"}}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "behind"}, "request_headers_to_add": [shown]}
    manager = {
        "@type": f"{types}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "route_config": {"virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "r", "typed_config": {"@type": f"{types}.filters.http.router.v3.Router"}}],
    }
    place = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    config["static_resources"]["listeners"].append(
        {
            "name": "front",
            "address": place,
            "listener_filters": [
                {"name": "sni", "typed_config": {"@type": f"{types}.filters.listener.tls_inspector.v3.TlsInspector"}}
            ],
            "filter_chains": [
                {
                    "transport_socket": {"name": "tls", "typed_config": context},
                    "filters": [{"name": "hcm", "typed_config": manager}],
                }
            ],
        }
    )
    endpoint = {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": to}}}}
    assignment = {"cluster_name": "behind", "endpoints": [{"lb_endpoints": [endpoint]}]}
    config["static_resources"]["clusters"].append({"name": "behind", "type": "STATIC", "load_assignment": assignment})
    return config
