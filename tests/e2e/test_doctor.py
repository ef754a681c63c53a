"""`tidegate doctor` against the real Envoy: all is well as rendered, and what is crippled is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.doctor import command
from extproc.doctor.asking import Gateway
from extproc.doctor.visit import Expected, Result, Verdict, Visit
from extproc.render.filters import ADMISSION, processing_mode
from extproc.stack import Stack
from tests.e2e.conftest import settings_for
from tests.e2e.doubles import Upstream, running
from tests.e2e.test_merged import EXISTING, Beside

Envoy = dict[str, Any]
OFF = {
    ADMISSION: {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
        "disabled": True,
    }
}
"""A route's own word that it has nothing to do with Tidegate."""
SLOW = {"first_token_s": 0.3, "output_tokens_per_s": 100}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two upstreams that take their time, behind an Envoy that is started anew for each test."""
    upstreams: dict[str, Any] = {
        "primary": {"limits": [{"tpm": 60_000_000}], "concurrency": 50, "models": {"gpt-5": "another"}, "fake": SLOW},
        "local": {"owned": True, "concurrency": 50, "fake": SLOW},
    }
    folder = tmp_path_factory.mktemp("doctor")
    routes = [{"models": ["gpt-5", "claude"], "chain": ["primary", "local"]}]
    with running(folder, upstreams=upstreams, routes=routes, gateway={"message_timeout_s": 1.0}) as found:
        yield found


def examined(stack: Stack, cripple: Callable[[Envoy], None] | None = None, **visit: Any) -> dict[str, Result]:
    """What all checks find, once Envoy's configuration was changed like this."""
    file = stack.workdir / "envoy.yaml"
    whole = file.read_text("utf-8")
    try:
        if cripple is not None:
            changed = yaml.safe_load(whole)
            cripple(changed)
            file.write_text(yaml.safe_dump(changed), "utf-8")
            stack.kill("envoy")
            stack.start_envoy()
        results = command.examine(Visit(Gateway(stack.url), Expected.of(stack.settings, fails_open=False), **visit))
    finally:
        file.write_text(whole, "utf-8")
        if cripple is not None:
            stack.kill("envoy")
            stack.start_envoy()
    return {check.name: result for check, result in zip(command.CHECKS, results, strict=True)}


def wrong(seen: dict[str, Result]) -> set[str]:
    """Names of the checks that found something wrong."""
    return {name for name, result in seen.items() if result.verdict is Verdict.WRONG}


def manager(envoy: Envoy) -> Envoy:
    """The main listener's connection manager."""
    (found,) = envoy["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    config: Envoy = found["typed_config"]
    return config


def admission(envoy: Envoy) -> Envoy:
    """Its ext_proc filter."""
    (found,) = [one for one in manager(envoy)["http_filters"] if one["name"] == ADMISSION]
    config: Envoy = found["typed_config"]
    return config


def routes(envoy: Envoy) -> list[Envoy]:
    """Its routes."""
    found: list[Envoy] = manager(envoy)["route_config"]["virtual_hosts"][0]["routes"]
    return found


def test_everything_is_ok_as_rendered(stack: Stack, tmp_path: Path) -> None:
    """The command, with the config it is held against: every check is ok but one, which is told to be right."""
    found = tmp_path / "found.json"
    config = stack.workdir / "tidegate.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "extproc", "doctor", stack.url, "--config", config, "--json", found],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads(found.read_text("utf-8"))["checks"]
    told = {check["name"]: check["why"] for check in checks if check["verdict"] != "ok"}
    assert set(told) == {"other paths"}, done.stdout
    assert "listener of Tidegate's own" in told["other paths"]
    assert "10 ok, 1 not told" in done.stdout
    breakers = stack.state()["breakers"]
    assert all(breaker["state"] == "closed" and not breaker["failures"] for breaker in breakers.values()), breakers


def test_the_large_body_was_large_at_the_upstream(stack: Stack) -> None:
    """Though the body is rewritten, because this upstream has a name of its own for the model."""
    before = len(stack.record("primary")["requests"])
    assert not wrong(examined(stack, anthropic=False))
    sizes = [int(one["headers"].get("content-length", 0)) for one in stack.record("primary")["requests"][before:]]
    assert max(sizes) > 1_200_000, sizes
    assert sum(one.get("prompt_tokens", 0) for one in stack.record("primary")["requests"][before:]) < 1_000


def short_patience(envoy: Envoy) -> None:
    admission(envoy)["message_timeout"] = "0.4s"


def no_patience(envoy: Envoy) -> None:
    del admission(envoy)["max_message_timeout"]


def body_unread(envoy: Envoy) -> None:
    admission(envoy)["processing_mode"] = processing_mode("NONE")


def body_in_part(envoy: Envoy) -> None:
    admission(envoy)["processing_mode"] = processing_mode("BUFFERED_PARTIAL")
    small_buffer(envoy)


def small_buffer(envoy: Envoy) -> None:
    del envoy["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"]
    del manager(envoy)["route_config"]["virtual_hosts"][0]["request_body_buffer_limit"]


def no_filter(envoy: Envoy) -> None:
    """A plain proxy to one upstream."""
    filters = manager(envoy)["http_filters"]
    filters[:] = [one for one in filters if one["name"] != ADMISSION]
    open_door(envoy)


def open_door(envoy: Envoy) -> None:
    """What carries no ticket goes to an upstream all the same."""
    routes(envoy).append({"match": {"prefix": "/"}, "route": {"cluster": "local"}})
    routes(envoy)[:] = [one for one in routes(envoy) if not one.get("name", "").startswith("away")]


def one_path_past(envoy: Envoy) -> None:
    past = {"match": {"path": "/v1/completions"}, "route": {"cluster": "local"}, "typed_per_filter_config": OFF}
    routes(envoy).insert(0, past)


def reworded(envoy: Envoy) -> None:
    manager(envoy)["local_reply_config"] = {"body_format": {"text_format_source": {"inline_string": "sorry"}}}


def whole_answers(envoy: Envoy) -> None:
    code = "function envoy_on_response(handle) handle:body() end"
    kind = "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua"
    lua = {"@type": kind, "default_source_code": {"inline_string": code}}
    manager(envoy)["http_filters"].insert(0, {"name": "whole_answers", "typed_config": lua})


def no_retries(envoy: Envoy) -> None:
    for route in routes(envoy):
        route.get("route", {}).pop("retry_policy", None)


def one_upstream(envoy: Envoy) -> None:
    """Retries go where the first attempt went."""
    for route in routes(envoy):
        policy = route.get("route", {}).get("retry_policy", {})
        policy.pop("refresh_cluster_on_retry", policy.pop("retry_priority", None))


CRIPPLED: list[tuple[Callable[[Envoy], None], set[str], str]] = [
    (short_patience, {"slow answers"}, "message_timeout"),
    (no_patience, {"holds"}, "max_message_timeout"),
    (body_unread, {"in the path"}, "request_body_mode: BUFFERED"),
    (small_buffer, {"reads 1 MB", "passes 1 MB"}, "per_connection_buffer_limit_bytes"),
    (body_in_part, {"reads 1 MB"}, "request_body_mode: BUFFERED"),
    (no_filter, {"in the path"}, "envoy.filters.http.ext_proc"),
    (one_path_past, {"all LLM paths"}, "envoy.filters.http.ext_proc"),
    (reworded, {"refuses"}, "body_format"),
    (whole_answers, {"streams"}, "response_body_mode"),
    (no_retries, {"moves on"}, "retry_policy"),
    (one_upstream, {"moves on"}, "refresh_cluster_on_retry"),
    (open_door, {"without Tidegate"}, "failure_mode_allow"),
]


ASKED_FOR = {body_unread, body_in_part}
"""What admission asks for itself, request by request, in the classic profile."""


@pytest.mark.parametrize(
    ("cripple", "names", "change"),
    [
        pytest.param(
            *one,
            id=one[0].__name__,
            marks=[pytest.mark.native("whatever request_body_mode says")] if one[0] in ASKED_FOR else [],
        )
        for one in CRIPPLED
    ],
)
def test_what_is_crippled_is_named(
    stack: Stack, cripple: Callable[[Envoy], None], names: set[str], change: str
) -> None:
    """These checks, and no others, say wrong, and the setting is named."""
    seen = examined(stack, cripple)
    assert wrong(seen) == names, seen
    assert any(change in seen[name].change for name in names), seen


def test_streams_that_are_cut_at_a_restart_are_told(stack: Stack) -> None:
    """`failure_mode_allow: false` is closed, but without a word, and not only for new requests."""

    def bare(envoy: Envoy) -> None:
        admission(envoy)["failure_mode_allow"] = False

    result = examined(stack, bare)["without Tidegate"]
    assert "failure_mode_allow" in result.change, result


def test_a_neighbour_is_left_alone_or_not(stack: Stack) -> None:
    """Another service's path is Tidegate's 404 as rendered, and its own once it has a route without ext_proc."""

    def neighbour(envoy: Envoy) -> None:
        answer = {"status": 200, "body": {"inline_string": "[]"}}
        orders = {"match": {"prefix": "/orders"}, "direct_response": answer, "typed_per_filter_config": OFF}
        routes(envoy).insert(0, orders)

    assert wrong(examined(stack, other="/orders", tokens=False)) == {"other paths"}
    assert not wrong(examined(stack, neighbour, other="/orders", tokens=False))


def test_beside_other_services_every_check_is_ok(tmp_path: Path) -> None:
    """Merged into an Envoy that had filters and routes before: one of those is left alone, and so nothing is untold."""
    upstreams: dict[str, Any] = {
        "primary": {"concurrency": 50, "fake": SLOW},
        "local": {"owned": True, "concurrency": 50, "fake": SLOW},
    }
    settings = settings_for(
        upstreams=upstreams, routes=[{"models": ["gpt-5"], "chain": ["primary", "local"]}], other_endpoints=None
    )
    with Upstream().listening() as shop:
        text = EXISTING.read_text("utf-8")
        for old, new in {9901: settings.gateway.admin_port, 9000: settings.gateway.port, 9001: shop.port}.items():
            text = text.replace(f"port_value: {old}", f"port_value: {new}")
        (tmp_path / "existing.yaml").write_text(text, "utf-8")
        with Beside(settings, tmp_path, workers=1) as beside:
            expected = Expected.of(settings, fails_open=False)
            results = command.examine(Visit(Gateway(beside.url), expected, other="/teapot"))
    assert {result.verdict for result in results} == {Verdict.OK}, results


def test_a_dead_service_is_told(stack: Stack) -> None:
    """Envoy is there, and Tidegate is not."""
    stack.kill("service")
    try:
        seen = examined(stack)
    finally:
        stack.start_service()
    assert wrong(seen) >= {"in the path"}
    assert "grpc_service" in seen["in the path"].change
