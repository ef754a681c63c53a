"""`tidegate check` about TLS and addresses: what would keep Envoy and Tidegate apart, what ends soon, who is let in."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from extproc import rehearsal
from extproc.check import advice, validate
from extproc.settings import ServiceTlsSettings, Settings, SettingsError, parse
from tests.certificates import Mounted, soon, tls_of, write

NAME = "localhost"


@pytest.fixture
def files(tmp_path: Path) -> Mounted:
    """Certificates that fit."""
    return Mounted(tmp_path / "mounted")


def settings(upstream: dict[str, Any] | None = None, gateway: dict[str, Any] | None = None, **service: Any) -> Settings:
    """Settings with this `service`, this `gateway` and this upstream."""
    raw = {
        "gateway": gateway or {},
        "service": {"state_file": "/levels", **service},
        "upstreams": {"a": {"provider": "vllm", "url": "https://vllm:8443", "concurrency": 9, "owned": True}},
        "routes": [{"models": ["m"], "chain": ["a"]}],
    }
    raw["upstreams"]["a"] |= upstream or {}
    return parse(yaml.safe_dump(raw), "test", {})


def found(tls: dict[str, str], name: str = NAME) -> list[str]:
    """What is wrong with them, without folders' names."""
    told = rehearsal.problems(ServiceTlsSettings(**tls), name)
    return [line.replace(str(Path(tls["cert_file"]).parent) + "/", "") for line in told]


def test_what_fits_is_not_spoken_of(files: Mounted) -> None:
    """With and without certificates of clients."""
    tls = tls_of(files)
    assert found(tls) == []
    assert found({key: path for key, path in tls.items() if not key.startswith("client")}) == []


def test_what_does_not_fit_is_named(files: Mounted, tmp_path: Path) -> None:
    """Name, authority of either side, key, and a file that is something else."""
    tls, other = tls_of(files), Mounted(tmp_path / "other")
    server, client, mismatch = "service.tls.cert_file", "service.tls.client_cert_file", "Hostname mismatch"
    assert found(tls, "tidegate.svc") == [
        f"{server}: server.pem: {mismatch}, certificate is not valid for 'tidegate.svc'."
    ]
    assert found(tls, "127.0.0.1") == [
        f"{server}: server.pem: IP address mismatch, certificate is not valid for '127.0.0.1'."
    ]
    assert found({**tls, "ca_file": other.path("ca.pem")}) == [
        f"{server}: server.pem: not issued by the CA in {other.path('ca.pem')}"
    ]
    assert found({**tls, "client_ca_file": other.path("ca.pem")}) == [
        f"{client}: client.pem: not issued by the CA in {other.path('ca.pem')}"
    ]
    assert found({**tls, "key_file": files.path("client.key")}) == [
        f"{server}: server.pem does not belong to client.key"
    ]
    assert found({**tls, "client_ca_file": files.path("client.key"), "ca_file": files.path("server.pem")}) == [
        "service.tls.ca_file: server.pem: no certificate of a CA",
        "service.tls.client_ca_file: client.key: no certificate of a CA",
    ]


def test_what_has_ended_and_what_ends_soon(files: Mounted, tmp_path: Path) -> None:
    """The one is a mistake, the other a note."""
    over = write(files.ca.issue_cert(NAME, not_after=soon(-1)), tmp_path, "over")
    near = write(files.ca.issue_cert("envoy.example", not_after=soon(3.05)), tmp_path, "near")
    tls = tls_of(files)
    ended = {**tls, "cert_file": over[0], "key_file": over[1]}
    assert found(ended) == ["service.tls.cert_file: over.pem: certificate has expired"]
    ends = {**tls, "client_cert_file": near[0], "client_key_file": near[1]}
    assert found(ends) == []
    told = list(rehearsal.soon_over(ServiceTlsSettings(**ends), NAME, time.time()))
    assert [line.partition(": ")[0] for line in told] == ["service.tls.client_cert_file"]
    assert told[0].endswith("near.pem ends in 3.0 days")
    assert list(rehearsal.soon_over(ServiceTlsSettings(**tls), NAME, time.time())) == []
    years_later = time.time() + 1000 * 365 * 86_400
    all_of_them = {
        line.partition(": ")[0] for line in rehearsal.soon_over(ServiceTlsSettings(**tls), NAME, years_later)
    }
    assert {"service.tls.ca_file", "service.tls.client_ca_file"} <= all_of_them


def test_a_chain_with_an_authority_between_is_whole(tmp_path: Path) -> None:
    """It stands in `cert_file`, and when it ends is told, too."""
    root = trustme.CA()
    between = root.create_child_ca()
    files = Mounted(tmp_path / "m")
    chain, key = write(between.issue_cert(NAME), tmp_path, "chained")
    root.cert_pem.write_to_path(tmp_path / "root.pem")
    tls = {"cert_file": chain, "key_file": key, "ca_file": str(tmp_path / "root.pem")}
    assert found(tls) == []
    Path(chain).write_bytes(files.ca.issue_cert(NAME).cert_chain_pems[0].bytes())
    assert found(tls) != []


def test_check_refuses_what_cannot_work(files: Mounted, tmp_path: Path) -> None:
    """All of it, before Envoy is asked."""
    tls = tls_of(files)
    gone = {**tls, "client_key_file": str(tmp_path / "gone.key")}
    with pytest.raises(
        SettingsError, match=r"^service\.tls\.client_key_file: .*gone\.key cannot be read, or is empty$"
    ):
        validate(settings(tls=gone, address="localhost:10003"))
    with pytest.raises(SettingsError, match=r"^service\.tls\.cert_file: .*certificate is not valid for '127\.0\.0\.1'"):
        validate(settings(tls=tls))
    mixed = {"client_cert_file": files.path("client.pem"), "client_key_file": files.path("server.key")}
    with pytest.raises(SettingsError, match=r"^upstreams\.a\.client_cert_file: .*client\.pem does not belong to"):
        validate(settings(mixed))


def test_advice_names_what_others_can_reach(files: Mounted) -> None:
    """Console and Tidegate's own port. Nothing is said of loopback, a unix socket, or a port with TLS for both."""
    assert list(advice(settings())) == list(advice(settings(address="unix:/run/tidegate.sock", console="[::1]:1")))
    for console in ("0.0.0.0:10004", "[::]:10004", "10.1.2.3:10004", "gateway.example:10004"):
        assert any(f"service.console: {console} can be reached" in line for line in advice(settings(console=console)))
    seen = settings(gateway={"address": "0.0.0.0", "metrics_port": 10005})
    assert any("gateway.metrics_port: 10005 can be reached" in line for line in advice(seen))
    told = list(advice(settings(address="0.0.0.0:10003")))
    assert "note: service.address: 0.0.0.0:10003 can be reached from outside, without service.tls" in told
    tls = tls_of(files)
    told = list(advice(settings(address="0.0.0.0:10003", tls={**tls, "server_name": NAME})))
    assert not [line for line in told if "service.address" in line or "client_ca_file" in line]
    assert any("Envoy reads its certificates only when it starts" in line for line in told)
    one_sided = {key: path for key, path in tls.items() if not key.startswith("client")}
    told = list(advice(settings(address=f"{NAME}:10003", tls=one_sided)))
    assert any("everybody who reaches the port may play Envoy" in line for line in told)


@pytest.mark.parametrize(
    ("service", "said"),
    [
        ({"tls": {"cert_file": "c", "key_file": "k"}}, "service.tls.ca_file: is required"),
        (
            {"tls": {"cert_file": "c", "key_file": "k", "ca_file": "a", "client_ca_file": "a"}},
            "service.tls.client_ca_file: goes with client_cert_file and client_key_file",
        ),
        (
            {"address": "unix:/s", "tls": {"cert_file": "c", "key_file": "k", "ca_file": "a"}},
            "service.tls: not on a unix socket",
        ),
        ({"address": f"unix:/{'x' * 99}"}, "service.address: the path of a unix socket has at most 99 bytes"),
        ({"socket_mode": 660}, "service.socket_mode: "),
        ({"socket_mode": "rw"}, "service.socket_mode: "),
    ],
)
def test_settings_that_do_not_go_together(service: dict[str, Any], said: str) -> None:
    """Each with its place."""
    with pytest.raises(SettingsError, match=said.replace(".", r"\.")):
        settings(**service)


@pytest.mark.parametrize("written", ["0660", "0o660", '"0660"', "432"])
def test_rights_are_octal(written: str) -> None:
    """As people write them, and shown as such."""
    text = f"service: {{socket_mode: {written}}}\nupstreams: {{}}\nroutes: []\n"
    raw = yaml.safe_load(text)["service"]
    known = settings(**raw)
    assert known.service.socket_mode == 0o660
    assert known.model_dump(mode="json")["service"]["socket_mode"] == "0660"
    again = parse(yaml.safe_dump(known.model_dump(mode="json")), "again", {})
    assert again == known


@pytest.mark.parametrize(
    ("upstream", "said"),
    [
        ({"client_cert_file": "c"}, r"upstreams\.a\.client_cert_file: goes with client_key_file"),
        ({"url": "http://vllm:80", "ca_file": "c"}, r"upstreams\.a\.ca_file: is for a url that begins with https"),
    ],
)
def test_tls_of_an_upstream_that_does_not_go_together(upstream: dict[str, Any], said: str) -> None:
    """The same of upstreams."""
    with pytest.raises(SettingsError, match=said):
        settings(upstream)
