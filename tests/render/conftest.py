"""Upstreams for every test, and one real Envoy for each module that asks for `gateway`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from extproc.settings import Settings
from tests.render.rig import Envoy, Loop, Upstream, admit_by_header, answer, settings_of, upstream

COMPLETE = {
    "choices": [{"message": {"content": "a"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4},
}


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    """Where the upstreams run."""
    loop = Loop()
    yield loop
    loop.stop()


@pytest.fixture(scope="session")
def servers(loop: Loop) -> Iterator[dict[str, Upstream]]:
    """The upstreams a, b and c."""
    servers = {name: Upstream(loop) for name in "abc"}
    yield servers
    for server in servers.values():
        server.close()


@pytest.fixture
def ups(servers: dict[str, Upstream]) -> dict[str, Upstream]:
    """The upstreams as new: they have seen nothing, and answer well."""
    for server in servers.values():
        server.seen.clear()
        server.reply = answer(COMPLETE)
    return servers


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Key files, written as people write them: with a line end."""
    folder = tmp_path_factory.mktemp("keys")
    files = {name: folder / f"{name}.key" for name in "ab"}
    for name, file in files.items():
        file.write_text(f"sk-{name}\n")
    return {name: str(file) for name, file in files.items()}


@pytest.fixture(scope="module")
def gateway(
    servers: dict[str, Upstream], keys: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Envoy]:
    """Three upstreams of three kinds, and `dead`, which refuses connections. Admission is by header."""
    with Envoy(_settings(servers, keys), tmp_path_factory.mktemp("envoy"), admit_by_header) as envoy:
        yield envoy


def _settings(servers: dict[str, Upstream], keys: dict[str, str]) -> Settings:
    port = {name: server.port for name, server in servers.items()}
    return settings_of(
        "gateway: {max_body_bytes: 1000000, max_answer_bytes: 4000000}\ntimeouts: {stall_s: 0.5, answer_s: 5}",
        a=upstream(port["a"], provider="openai", url=f"http://127.0.0.1:{port['a']}/openai/v1", key_file=keys["a"]),
        b=upstream(port["b"], provider="anthropic", key_file=keys["b"]),
        c=upstream(port["c"], provider="vllm", owned=True),
        dead=upstream(1),
        lost=upstream(1, url="http://no-such-host.invalid"),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where an Envoy of a test's own may write."""
    return tmp_path
