"""What real Envoys say they run: the whole bootstrap, and Tidegate merged into each configuration of others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.against.command import compare
from extproc.render.existing import dump, load
from extproc.render.merge import merge
from extproc.settings import Settings
from tests.render.rig import Data, Envoy, free_port, settings_of

EXISTING = Path(__file__).parents[1] / "render" / "existing"
CHOICES: dict[str, tuple[str | None, str | None]] = {
    "plain.yaml": (None, None),
    "anchors.yaml": ("secure", "api"),
    "tls.yaml": (None, "shop"),
}
"""File, and the listener and virtual host to merge into."""
FITTING: dict[str, str] = {
    "plain.yaml": "{}",
    "anchors.yaml": "lanes: {P0: {max_wait_s: 4}, P1: {max_wait_s: 20}}",  # its stream_idle_timeout is 30 s
    "tls.yaml": "gateway: {max_body_bytes: 65536}\nqueue: {max_bytes: 1000000}",  # its buffer takes no more
}
"""Settings that go together with what the connection manager of each says for all of its routes."""


@dataclass
class Dumped:
    """An Envoy that ran: its settings, what it said, and what the command found while it ran."""

    settings: Settings
    version: str
    dump: str
    found: list[str]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a key set."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "key").write_text("sk-secret")
    keys = {"keys": [{"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0", "alg": "HS256"}]}
    (folder / "jwks").write_text(json.dumps(keys))
    return folder


def settings_with(files: Path, more: str = "{}", *, upstreams: Data | None = None) -> Settings:
    """A provider with a key and TLS, one without, tokens of callers, other endpoints."""
    raw: Data = {
        "identity": {"tenant": ["jwt:team", "api_key"], "jwt": {"jwks_file": str(files / "jwks")}},
        "other_endpoints": "keyed",
        **yaml.safe_load(more),
    }
    keyed = {"provider": "compatible", "key_file": str(files / "key"), "ca_file": "/etc/ssl/certs/ca-certificates.crt"}
    both = {
        "keyed": {**keyed, "url": "https://localhost:9", "limits": [{"tpm": 1000, "rpm": 10}]},
        "mine": 1,
        **(upstreams or {}),
    }
    return settings_of(json.dumps(raw), **both)


def run(settings: Settings, folder: Path, text: str | None = None) -> Dumped:
    """Start Envoy with the bootstrap, or with `text`, and ask it."""
    change = (lambda config: config) if text is None else lambda _config: yaml.safe_load(text)
    with Envoy(settings, folder, change) as envoy:
        version = json.loads(envoy.admin("/server_info"))["version"]
        found = compare(f"http://127.0.0.1:{settings.gateway.admin_port}", settings)
        said = json.loads(envoy.admin("/config_dump?include_eds"))
    del said["configs"][0]["bootstrap"]["static_resources"]  # all of it is there once more, where it is in use
    return Dumped(settings, version, json.dumps(said), list(map(str, found)))


def merged_text(name: str, settings: Settings) -> str:
    """Tidegate merged into one of the configurations, on ports that are free."""
    listener, host = CHOICES[name]
    existing: Any = load((EXISTING / name).read_text(), name)
    existing["admin"] = {"address": at("127.0.0.1", settings.gateway.admin_port)}
    for i, one in enumerate(existing["static_resources"]["listeners"]):
        one["address"] = at("127.0.0.1", free_port() if i else settings.gateway.port)
    return dump(merge(existing, settings, listener, host).config, "# merged\n")


def at(host: str, port: int) -> Data:
    return {"socket_address": {"address": host, "port_value": port}}


@pytest.fixture(scope="session")
def alone(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Dumped:
    """The whole bootstrap."""
    return run(settings_with(files), tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="session")
def among_others(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Dumped:
    """Merged into an Envoy with a compressor and three filters that authenticate."""
    settings = settings_with(files, FITTING["tls.yaml"])
    return run(settings, tmp_path_factory.mktemp("tls"), merged_text("tls.yaml", settings))
