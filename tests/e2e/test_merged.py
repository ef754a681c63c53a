"""Tidegate merged into an Envoy with filters, routes and a log of its own: those work as before, LLM traffic is kept.

The original runs first, alone, and what its routes do then is what they have to do afterwards, to the header.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from extproc.stack import Stack, envoy_binary
from tests.e2e.conftest import PATIENCE_S, books_balance, chat, fill_buckets, settings_for
from tests.e2e.doubles import ANSWER, CHAT, MESSAGES, NEVER_OPENS, Received, Upstream, forget, until

EXISTING = Path(__file__).parents[1] / "render" / "existing" / "plain.yaml"
TIDEGATE = str(Path(sys.executable).with_name("tidegate"))
HTTP = httpx.Client(timeout=30)
MEGABYTES = b"x" * 3_000_000


@dataclass
class Beside(Stack):
    """A stack whose Envoy runs what `tidegate merge` makes of a configuration."""

    notes: str = ""

    def start_envoy(self) -> None:
        """Merge first."""
        command = [TIDEGATE, "merge", self.workdir / "existing.yaml", "--config", self.workdir / "tidegate.yaml"]
        done = subprocess.run(
            [*command, "--output", self.workdir / "envoy.yaml", "--validate"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        self.notes = done.stderr
        command = [envoy_binary(), "-c", self.workdir / "envoy.yaml", "--use-dynamic-base-id", "--log-level", "warning"]
        command += ["--concurrency", str(self.workers), "--file-flush-interval-msec", "200"]
        self._spawn("envoy", [str(word) for word in command])
        self._await_envoy()


@dataclass
class Stage:
    """What the tests share."""

    stack: Beside
    shop: Upstream
    vendor: Upstream
    log: Path
    before: list[tuple[Any, ...]]
    logged_before: list[str]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The original has answered, is gone, and the merged one runs."""
    folder = tmp_path_factory.mktemp("merged")
    upstreams: dict[str, Any] = {
        "primary": {"limits": [{"tpm": 60_000_000, "rpm": 600_000}], "breaker": NEVER_OPENS},
        "backup": {"limits": [{"tpm": 60_000_000, "rpm": 600_000}], "breaker": NEVER_OPENS},
    }
    with ExitStack() as open_ones:
        shop = open_ones.enter_context(Upstream().listening())
        vendor = open_ones.enter_context(Upstream().listening())
        url = f"http://127.0.0.1:{vendor.port}"
        upstreams["vendor"] = {"provider": "compatible", "url": url, "concurrency": 9, "breaker": NEVER_OPENS}
        chains = {"gpt-5": ["primary", "backup"], "claude": ["primary", "backup"], "vendors": ["vendor"]}
        settings = settings_for(
            service={"state_file": str(folder / "levels.json")},
            upstreams=upstreams,
            routes=[{"models": [m], "chain": chain, "acknowledge_unowned": True} for m, chain in chains.items()],
            other_endpoints=None,
        )
        fill_buckets(settings)
        log = folder / "shop.log"
        ports = {9901: settings.gateway.admin_port, 9000: settings.gateway.port, 9001: shop.port}
        text = EXISTING.read_text().replace("path: /dev/null", f"path: {log}")
        for old, new in ports.items():
            text = text.replace(f"port_value: {old}", f"port_value: {new}")
        (folder / "existing.yaml").write_text(text)
        stack = Beside(settings, folder, workers=1, patience_s=PATIENCE_S)
        before = alone(folder, stack, shop)
        logged = until(lambda: lines(log, len(before)))
        log.write_text("")
        stack = open_ones.enter_context(stack)
        yield Stage(stack, shop, vendor, log, before, logged)
        books_balance(stack)


def alone(folder: Path, stack: Stack, shop: Upstream) -> list[tuple[Any, ...]]:
    """What the original's own routes do without Tidegate."""
    command = [envoy_binary(), "-c", str(folder / "existing.yaml"), "--use-dynamic-base-id", "--concurrency", "1"]
    with (folder / "alone.log").open("wb") as output:
        process = subprocess.Popen([*command, "-l", "warning"], stdout=output, stderr=output)
    try:
        until(lambda: listening(stack.settings.gateway.port), within_s=30)
        return own_traffic(stack, shop)
    finally:
        process.terminate()
        process.wait(20)


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def own_traffic(stack: Stack, shop: Upstream) -> list[tuple[Any, ...]]:
    """Requests for the shop's own routes: each answer, and each request as its upstream got it."""
    given = {
        "x-request-id": "mine",
        "x-envoy-force-trace": "1",
        "x-tidegate-priority": "P9",
        "x-tg-err": "a",
        "cookie": "a=b",
    }
    asked: list[tuple[str, str, bytes]] = [
        ("GET", "/", b""),
        ("GET", "/teapot", b""),
        ("POST", "/v1/users", b"{}"),
        ("POST", "/upload", MEGABYTES),
        ("HEAD", "/v1/chat/completions/", b""),
        ("POST", "/V1/chat/completions", b"{}"),
        ("DELETE", "/v1/files/1", b""),
        ("OPTIONS", "/v1/chat/completions", b""),
        ("OPTIONS", "/v1/models", b""),
    ]
    found: list[tuple[Any, ...]] = []
    for method, path, body in asked:
        shop.received.clear()
        got = HTTP.request(method, stack.url + path, content=body, headers=given)
        headers = {n: v for n, v in got.headers.items() if n not in ("date", "x-envoy-upstream-service-time")}
        found.append((method, path, got.status_code, headers, got.content, [seen(one) for one in shop.received]))
    shop.received.clear()
    shop.answers[:] = [(503, {}, b"{}")] * 2
    got = HTTP.get(stack.url + "/again")
    return [*found, ("GET", "/again", got.status_code, len(shop.received))]


def seen(one: Received) -> tuple[Any, ...]:
    return one.method, one.path, sorted(one.headers), one.body


def lines(log: Path, count: int) -> list[str]:
    """The log, once it has so many lines."""
    found = log.read_text().splitlines() if log.exists() else []
    return found if len(found) >= count else []


def test_own_routes_work_as_before(stage: Stage) -> None:
    """Answers, what the upstream sees, retries, local replies, and the lines of the log."""
    stage.log.write_text("")
    after = own_traffic(stage.stack, stage.shop)
    for one, other in zip(stage.before, after, strict=True):
        assert other == one
    assert {one[2] for one in after} == {200, 418}
    assert until(lambda: lines(stage.log, len(after))) == stage.logged_before
    assert stage.stack.state()["flying"] == 0


def test_the_sdks_are_answered_by_the_upstreams_of_tidegate(stage: Stage) -> None:
    """Both dialects, JSON and streams; the shop's own filters see that traffic, too, its upstream does not."""
    forget(stage.stack)
    stage.shop.received.clear()
    client = openai.OpenAI(base_url=f"{stage.stack.url}/v1", api_key="any", max_retries=0)
    messages: Any = [{"role": "user", "content": "hello"}]
    raw = client.chat.completions.with_raw_response.create(model="gpt-5", messages=messages, max_tokens=16)
    assert raw.headers["x-tidegate-upstream"] == "primary"
    assert raw.headers["x-shop"] == "1"
    assert not [name for name in raw.headers if name.startswith(("x-envoy", "x-tg"))]
    whole = raw.parse().choices[0].message.content
    stream = client.chat.completions.create(model="gpt-5", messages=messages, max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole
    other = anthropic.Anthropic(base_url=stage.stack.url, api_key="any", max_retries=0)
    told = other.messages.create(model="claude", messages=messages, max_tokens=16)
    assert told.content
    with other.messages.stream(model="claude", messages=messages, max_tokens=16) as running:
        assert "".join(running.text_stream)
    assert stage.shop.received == []
    books_balance(stage.stack)


def test_upstreams_see_nothing_of_envoys_or_the_callers(stage: Stage) -> None:
    """What is the shop's to add is seen: its filter does so for all of its routes."""
    given = {"x-envoy-max-retries": "9", "x-tidegate-ticket": "1", "x-tg-a": "1", "x-request-id": "mine"}
    headers = {**given, "authorization": "Bearer sk-client", "cookie": "a=b", "x-forwarded-for": "1.2.3.4"}
    got = HTTP.post(stage.stack.url + CHAT, json=chat(model="vendors"), headers=headers)
    assert got.status_code == 200
    (one,) = stage.vendor.received
    names = {name.lower() for name, _ in one.headers}
    assert not [name for name in names if name.startswith(("x-envoy", "x-tg", "x-tidegate", "x-forwarded"))]
    assert not names & {"authorization", "cookie"}
    assert one.get("host") == f"127.0.0.1:{stage.vendor.port}".encode()
    assert one.get("x-shop-seen") == b"lua"
    assert one.get("x-request-id") not in (None, b"mine")


def test_the_next_upstream_answers_when_the_first_fails(stage: Stage) -> None:
    """And Tidegate is told of the attempt."""
    forget(stage.stack)
    failed = stage.stack.state()["tally"]["failed_attempts"].get("primary", 0)
    for more in ({}, {"stream": True}):
        got = HTTP.post(stage.stack.url + CHAT, json=chat(**more), headers={"x-fake-fault": "503;provider=primary"})
        assert (got.status_code, got.headers["x-tidegate-upstream"]) == (200, "backup")
        assert got.headers["x-tidegate-attempts"] == "2"
    assert len(stage.stack.record("backup")["requests"]) == 2
    books_balance(stage.stack)
    assert stage.stack.state()["tally"]["failed_attempts"]["primary"] == failed + 2


def test_refusals_are_in_the_callers_dialect_and_not_in_the_shops(stage: Stage) -> None:
    """By Tidegate, by Envoy for it, and when every upstream failed."""
    got = HTTP.post(stage.stack.url + CHAT, json=chat(model="nobody-has-it"))
    assert_refused(got, 404, "unknown_model")
    got = HTTP.post(stage.stack.url + CHAT, content=b"x" * (stage.stack.settings.gateway.max_body_bytes + 1))
    assert_refused(got, 413, "too_large")
    got = HTTP.post(stage.stack.url + CHAT, json=chat(), headers={"x-fake-fault": "503"})
    assert_refused(got, 503, "upstream_failed")
    got = HTTP.post(stage.stack.url + MESSAGES, json=chat(model="nobody-has-it"))
    assert_refused(got, 404, "unknown_model", anthropic_type="not_found_error")


def test_what_tidegate_answers_itself_is_not_put_into_the_shops_format(stage: Stage) -> None:
    got = HTTP.get(f"{stage.stack.url}/v1/models")
    assert (got.status_code, got.headers["content-type"]) == (200, "application/json")
    assert [model["id"] for model in got.json()["data"]] == ["gpt-5", "claude", "vendors"]


def assert_refused(got: httpx.Response, status: int, reason: str, anthropic_type: str | None = None) -> None:
    assert (got.status_code, got.headers["x-tidegate-reason"]) == (status, reason), got.text
    assert got.headers["content-type"] == "application/json"
    assert "x-shop-error" not in got.headers
    body = got.json()
    assert body["error"]["reason"] == reason
    if anthropic_type:
        assert (body["type"], body["error"]["type"]) == ("error", anthropic_type)


def test_what_the_shops_filters_refuse_is_worded_by_the_shop(stage: Stage) -> None:
    """They are asked first, for LLM paths as well, and nothing of it reaches Tidegate."""
    before = stage.stack.state()["tally"]["admitted"]
    for path in (CHAT, "/"):
        got = HTTP.post(stage.stack.url + path, json=chat(), headers={"x-banned": "1"})
        assert (got.status_code, got.headers["x-shop-error"]) == (403, "yes")
        assert got.json() == {"shop_says": "RBAC: access denied", "status": 403}
        assert "x-tidegate-reason" not in got.headers
    assert stage.stack.state()["tally"]["admitted"] == before


def test_tidegate_is_told_of_its_own_traffic_only(stage: Stage) -> None:
    """One record for each request, one for each attempt that failed; none for what went to the shop."""
    books_balance(stage.stack)
    before = told(stage)
    own_traffic(stage.stack, stage.shop)
    got = HTTP.post(stage.stack.url + CHAT, json=chat(), headers={"x-fake-fault": "503;provider=primary"})
    assert got.headers["x-tidegate-upstream"] == "backup"
    records = 1 if stage.stack.settings.gateway.profile == "classic" else 2  # there no log tells of requests
    until(lambda: told(stage) == before + records)
    books_balance(stage.stack)
    assert told(stage) == before + records


def told(stage: Stage) -> int:
    """How many records Envoy has written to Tidegate."""
    admin = f"http://127.0.0.1:{stage.stack.settings.gateway.admin_port}"
    text = HTTP.get(f"{admin}/stats?filter=^access_logs.grpc_access_log.logs_written$").text
    return int(text.rpartition(":")[2])


@pytest.mark.parametrize("size", [7_000_000, 9_000_000, 12_000_000])
def test_bodies_are_bounded_for_http2_clients_too(stage: Stage, size: int) -> None:
    """Whatever the window that the listener gives them."""
    with httpx.Client(http1=False, http2=True, base_url=stage.stack.url, timeout=30) as http:
        try:
            got = http.post(CHAT, json=chat("word " * (size // 5), model="vendors"))
        except httpx.LocalProtocolError:
            got = None  # refused while it was still sending, which this client does not read
    if size < stage.stack.settings.gateway.max_body_bytes:
        assert got is not None
        assert got.status_code == 200, got.text
    elif got is not None:
        assert_refused(got, 413, "too_large")


def test_bodies_are_kept_up_to_tidegates_limit_not_the_listeners(stage: Stage) -> None:
    """The listener's own limit is Envoy's 1 MiB."""
    long = "word " * 600_000
    got = HTTP.post(stage.stack.url + CHAT, json=chat(long, model="vendors"))
    assert got.status_code == 200, got.text
    assert stage.vendor.last().json()["messages"][0]["content"] == long


def test_answers_may_be_larger_than_the_listeners_limit(stage: Stage) -> None:
    """A JSON answer is read whole on its way, up to `gateway.max_answer_bytes`."""
    answer = json.loads(ANSWER)
    answer["choices"][0]["message"]["content"] = "word " * 600_000
    stage.vendor.answers[:] = [(200, {}, json.dumps(answer).encode())]
    got = HTTP.post(stage.stack.url + CHAT, json=chat(model="vendors"))
    assert got.status_code == 200, got.text
    assert got.json() == answer
    books_balance(stage.stack)
    assert stage.stack.state()["tally"]["unknown_usage"] == 0, "what it said of its usage was read"


def test_a_long_answer_is_one_line_of_the_log(stage: Stage) -> None:
    """Though it is reported to Tidegate every five seconds."""
    with HTTP.stream(
        "POST", f"{stage.stack.url}{CHAT}?long", json=chat(stream=True), headers={"x-fake-fault": "stall;s=7;at=4"}
    ) as answer:
        assert answer.read()
    told = until(lambda: [line for line in lines(stage.log, 1) if "?long" in line])
    assert told == ["POST /v1/chat/completions?long 200 DownstreamEnd"]


def test_without_the_service_llm_paths_are_refused_and_others_go_on(stage: Stage) -> None:
    stage.stack.kill("service", signal.SIGKILL)
    try:
        got = until(lambda: refused_by_envoy(stage.stack), within_s=20)
        assert_refused(got, 503, "admission_unavailable")
        assert HTTP.get(stage.stack.url + "/").status_code == 200
    finally:
        stage.stack.start_service()
    until(lambda: HTTP.post(stage.stack.url + CHAT, json=chat()).status_code == 200, within_s=20, every_s=0.1)


def refused_by_envoy(stack: Stack) -> httpx.Response | None:
    got = HTTP.post(stack.url + CHAT, json=chat())
    return got if got.headers.get("x-tidegate-reason") == "admission_unavailable" else None


def test_what_was_done_is_told(stage: Stage) -> None:
    assert "Tidegate's filters stand behind shop.lua, header_mutation, rbac, which are asked first" in stage.stack.notes
    assert json.dumps(stage.stack.notes).count("delayed_close_timeout is 1 s") == 1
