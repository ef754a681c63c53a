"""What is said of upstreams and models in the words of OpenTelemetry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from extproc.core import events
from extproc.core.request import Endpoint, Usage
from extproc.settings import load
from extproc.telemetry.conventions import OTHER, Conventions
from extproc.telemetry.meter import Meter
from tests.doubles import HandClock
from tests.telemetry.metrics_world import streamed

CONFIG = """
upstreams:
  cloud: {provider: azure, url: "https://a.openai.azure.com", key_file: /k, concurrency: 4, models: {gpt-5: own-name}}
  search: {provider: gemini, key_file: /k, concurrency: 4}
  ours: {provider: vllm, url: "http://10.0.0.7:8000", concurrency: 4, owned: true}
  six: {provider: vllm, url: "http://[::1]:9000/base", concurrency: 4, owned: true}
routes:
  - {models: [gpt-5, "claude-*", "o[13]"], chain: [cloud, search, ours, six]}
"""


@pytest.fixture
def conventions(tmp_path: Path) -> Conventions:
    path = tmp_path / "tidegate.yaml"
    path.write_text(CONFIG)
    return Conventions.of(load(path, {}))


@pytest.mark.parametrize(
    ("upstream", "provider", "address", "port"),
    [
        ("cloud", "azure.ai.openai", "a.openai.azure.com", 443),
        ("search", "gcp.gemini", "generativelanguage.googleapis.com", 443),
        ("ours", "vllm", "10.0.0.7", 8000),
        ("six", "vllm", "::1", 9000),
    ],
)
def test_an_upstream_is_told_as_the_conventions_want_it(
    conventions: Conventions, upstream: str, provider: str, address: str, port: int
) -> None:
    assert conventions.attributes(upstream, "gpt-5", Endpoint.RESPONSES) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "gpt-5",
        "gen_ai.provider.name": provider,
        "server.address": address,
        "server.port": port,
        "upstream": upstream,
    }


def test_only_models_that_are_listed_are_named(conventions: Conventions) -> None:
    """Callers may invent any number that fit a pattern, and a pattern is no name."""
    assert conventions.models == {"gpt-5", "own-name"}
    assert [conventions.model(name) for name in ("gpt-5", "own-name", "claude-x", "claude-*", "")] == [
        "gpt-5", "own-name", OTHER, OTHER, OTHER,
    ]  # fmt: skip
    assert conventions.attributes("ours", OTHER, Endpoint.OTHER)["gen_ai.operation.name"] == OTHER


def test_a_model_is_named_from_the_reload_on_that_lists_it(tmp_path: Path) -> None:
    path = tmp_path / "tidegate.yaml"
    path.write_text(CONFIG)
    meter = Meter(load(path, {}), HandClock().time, "here")

    def settle() -> set[str]:
        for model in ("gpt-5", "gpt-6", "gpt-7"):
            one = replace(streamed(), model=model)
            meter(events.Settled(one, "ours", 1, 200, Usage(5, 5), 0.0, asked="ours"))
        return {model for _, model, _ in meter.measures.served}

    assert settle() == {"gpt-5", OTHER}
    path.write_text(CONFIG.replace("[gpt-5,", "[gpt-5, gpt-6,"))
    meter.follow(load(path, {}))
    assert settle() == {"gpt-5", "gpt-6", OTHER}
