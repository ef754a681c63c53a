"""Envoys of an Istio mesh with Tidegate's EnvoyFilters applied by Istio's rules: a gateway, and a caller's sidecar.

There is no istiod: its rules are those of `tests/render/istiod.py`, and filters that only its own Envoy has are not in
the chain.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from extproc.against.command import compare
from extproc.stack import Stack
from tests.e2e.conftest import PATIENCE_S, books_balance, chat, fill_buckets, settings_for
from tests.e2e.doubles import CHAT, NEVER_OPENS, Upstream, forget, until, waiting
from tests.render.istio_schema import problems
from tests.render.istiod import Proxy, patched

MESHES = Path(__file__).parents[1] / "render" / "meshes"
TIDEGATE = str(Path(sys.executable).with_name("tidegate"))
LABELS = {"app": "any", "tidegate/envoy": "true"}
HOSTS = {"gateway": "llm.example.com", "sidecar": "tidegate.tidegate.svc.cluster.local"}
SHOPS = {"gateway": "shop.example.com", "sidecar": "shop.apps.svc.cluster.local"}
OPTIONS = {"gateway": ["--gateway", "--host", "llm.example.com:80"], "sidecar": ["--sidecar"]}
PORTS = {"gateway": 8080, "sidecar": 10000}
"""Of the bootstraps: the listener's."""


@dataclass
class InMesh(Stack):
    """A stack whose Envoy runs what istiod would make of its own configuration and ours."""

    kind: str = "gateway"
    shop_port: int = 0
    idle: list[Any] = field(default_factory=list)

    def start_envoy(self) -> None:
        """Render as a user does, apply, and start."""
        port = str(self.settings.gateway.port)
        asked = [TIDEGATE, "render", "istio", "--config", self.workdir / "tidegate.yaml", *OPTIONS[self.kind]]
        asked += ["--namespace", "any", "--label", "tidegate/envoy=true", "--service", self.settings.service.address]
        if self.kind == "sidecar":
            asked += ["--host", f"{HOSTS['sidecar']}:10000", "--listener-port", port]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        documents = list(yaml.safe_load_all(done.stdout))
        assert [said for each in documents for said in problems(each)] == []
        text = (MESHES / f"{self.kind}.yaml").read_text("utf-8")
        ports = {15000: self.settings.gateway.admin_port, PORTS[self.kind]: port, 9001: self.shop_port}
        for old, new in ports.items():
            text = text.replace(f"port_value: {old} ", f"port_value: {new} ")
        filters = [each for each in documents if each["kind"] == "EnvoyFilter"]
        result = patched(yaml.safe_load(text), filters, Proxy("any", LABELS, gateway=self.kind == "gateway"))
        assert result.idle == []
        (self.workdir / "envoy.yaml").write_text(yaml.safe_dump(result.config, sort_keys=False), "utf-8")
        super().start_envoy()


@dataclass
class Stage:
    """What the tests share."""

    stack: InMesh
    shop: Upstream
    vendor: Upstream
    http: httpx.Client

    def ask(self, path: str = CHAT, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return self.http.post(self.stack.url + path, json=chat(**body), headers=headers or {})


@pytest.fixture(scope="module", params=["gateway", "sidecar"])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Two fakes and an upstream that keeps what it gets; the mesh's own clusters lead to the shop."""
    folder = tmp_path_factory.mktemp(request.param)
    room = {"limits": [{"tpm": 60_000_000, "rpm": 600_000}], "breaker": NEVER_OPENS}
    with ExitStack() as open_ones:
        shop = open_ones.enter_context(Upstream().listening())
        vendor = open_ones.enter_context(Upstream().listening())
        url = f"http://127.0.0.1:{vendor.port}"
        one = {"concurrency": 1, "breaker": NEVER_OPENS}
        upstreams: dict[str, Any] = {
            "primary": dict(room),
            "backup": dict(room),
            "narrow": {**one, "fake": {"first_token_s": 0.01, "output_tokens_per_s": 2000}},
            "vendor": {"provider": "compatible", "url": url, **one},
        }
        chains = {"gpt-5": ["primary", "backup"], "one": ["narrow"], "vendors": ["primary", "vendor"]}
        settings = settings_for(
            service={"state_file": str(folder / "levels.json")},
            upstreams=upstreams,
            routes=[{"models": [m], "chain": chain, "acknowledge_unowned": True} for m, chain in chains.items()],
            other_endpoints=None,
        )
        fill_buckets(settings)
        stack = InMesh(settings, folder, workers=1, patience_s=PATIENCE_S, kind=request.param, shop_port=shop.port)
        open_ones.enter_context(stack)
        http = open_ones.enter_context(httpx.Client(timeout=30, headers={"host": HOSTS[request.param]}))
        yield Stage(stack, shop, vendor, http)
        books_balance(stack)


def test_the_sdk_is_answered_by_the_upstreams_of_tidegate(stage: Stage) -> None:
    """Whole and streamed; the host's own route gets nothing of it."""
    client = openai.OpenAI(base_url=f"{stage.stack.url}/v1", api_key="any", max_retries=0, http_client=stage.http)
    messages: Any = [{"role": "user", "content": "hello"}]
    raw = client.chat.completions.with_raw_response.create(model="gpt-5", messages=messages, max_tokens=16)
    assert raw.headers["x-tidegate-upstream"] == "primary"
    whole = raw.parse().choices[0].message.content
    stream = client.chat.completions.create(model="gpt-5", messages=messages, max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole
    assert stage.shop.received == []
    books_balance(stage.stack)
    assert stage.stack.state()["tally"]["unknown_usage"] == 0, "the log told how they ended"


def test_the_next_upstream_answers_and_sees_nothing_of_the_mesh(stage: Stage) -> None:
    """After a failure of the first; Tidegate is told of the attempt."""
    forget(stage.stack)
    failed = stage.stack.state()["tally"]["failed_attempts"].get("primary", 0)
    given = {"x-forwarded-client-cert": "By=spiffe://cluster.local/ns/apps", "authorization": "Bearer sk-client"}
    given |= {"x-envoy-peer-metadata": "e30=", "x-envoy-peer-metadata-id": "sidecar~10.0.0.8"}
    got = stage.ask(model="vendors", headers={"x-fake-fault": "503;provider=primary", **given})
    assert (got.status_code, got.headers["x-tidegate-upstream"], got.headers["x-tidegate-attempts"]) == (
        200,
        "vendor",
        "2",
    )
    names = {name.lower() for name, _ in stage.vendor.last().headers}
    assert not [name for name in names if name.startswith(("x-envoy", "x-tg", "x-tidegate", "x-forwarded"))]
    assert "authorization" not in names
    books_balance(stage.stack)
    assert stage.stack.state()["tally"]["failed_attempts"]["primary"] == failed + 1


def test_a_request_is_held_until_there_is_room(stage: Stage) -> None:
    answers: list[httpx.Response] = []
    slow = {"headers": {"x-fake-fault": "stall;s=4;at=2"}}
    first = threading.Thread(target=lambda: answers.append(stage.ask(model="one", stream=True, **slow)))
    first.start()
    until(lambda: stage.stack.state()["flying"])
    second = threading.Thread(target=lambda: answers.append(stage.ask(model="one")))
    second.start()
    until(lambda: waiting(stage.stack) == 1)
    first.join(60)
    second.join(60)
    assert [got.status_code for got in answers] == [200, 200]
    assert int(answers[1].headers["x-tidegate-queue-ms"]) > 0


def test_refusals_are_tidegates(stage: Stage) -> None:
    """By itself, by Envoy for it, and when every upstream failed; a retry of the mesh would be seen."""
    forget(stage.stack)
    got = stage.ask(model="nobody-has-it")
    assert (got.status_code, got.json()["error"]["reason"]) == (404, "unknown_model")
    got = stage.ask(headers={"x-fake-fault": "503"})
    assert (got.status_code, got.json()["error"]["reason"]) == (503, "upstream_failed")
    assert [len(stage.stack.record(name)["requests"]) for name in ("primary", "backup")] == [1, 1]
    got = stage.ask(headers={"connection": "upgrade", "upgrade": "websocket"})
    assert (got.status_code, got.json()["error"]["reason"]) == (403, "forbidden"), "Istio's listeners take WebSockets"
    large = "x" * (stage.stack.settings.gateway.max_body_bytes + 1)
    got = stage.http.post(stage.stack.url + CHAT, content=large)
    assert (got.status_code, got.json()["error"]["reason"]) == (413, "too_large")


def test_other_paths_and_hosts_go_their_own_way(stage: Stage) -> None:
    """With nothing of Tidegate's in it; what the mesh's own filters refuse on LLM paths is worded by them."""
    kind = stage.stack.kind
    before = stage.stack.state()["tally"]["admitted"]
    for host, path in ((HOSTS[kind], "/"), (HOSTS[kind], "/v1/users"), (SHOPS[kind], CHAT)):
        stage.shop.received.clear()
        got = stage.ask(path, headers={"host": host, "x-tidegate-priority": "P9"})
        assert got.status_code == 200
        assert not [name for name in got.headers if name.startswith("x-tidegate")]
        assert stage.shop.last().get("x-tidegate-priority") == b"P9"
        assert stage.shop.last().get("x-envoy-attempt-count") == b"1"
    if kind == "gateway":
        got = stage.ask(headers={"x-banned": "1"})
        assert (got.status_code, got.text) == (403, "RBAC: access denied")
    assert stage.stack.state()["tally"]["admitted"] == before


def test_a_canary_comes_through_the_listener_that_was_added(stage: Stage) -> None:
    url = f"http://127.0.0.1:{stage.stack.settings.gateway.probe_port}{CHAT}"
    got = httpx.post(url, json=chat(max_tokens=5), headers={"x-tidegate-probe": "backup"}, timeout=30)
    assert got.status_code == 200


def test_without_the_service_llm_paths_are_refused_and_others_go_on(stage: Stage) -> None:
    stage.stack.kill("service", signal.SIGKILL)
    try:
        got = until(lambda: refused(stage), within_s=20)
        assert (got.status_code, got.json()["error"]["reason"]) == (503, "admission_unavailable")
        assert stage.ask("/").status_code == 200
    finally:
        stage.stack.start_service()
    until(lambda: stage.ask().status_code == 200, within_s=20, every_s=0.1)


def refused(stage: Stage) -> httpx.Response | None:
    got = stage.ask()
    return got if got.headers.get("x-tidegate-reason") == "admission_unavailable" else None


def test_the_running_envoy_agrees_with_the_config(stage: Stage) -> None:
    """Compared as `check --against` does."""
    settings = stage.stack.settings
    found = compare(f"http://127.0.0.1:{settings.gateway.admin_port}", settings)
    assert list(map(str, found)) == []
