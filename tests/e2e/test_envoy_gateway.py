"""What is rendered for Envoy Gateway, on the real Envoy: as a model of Envoy Gateway generates and patches it.

No Envoy Gateway runs: `tests/render/eg_model.py` stands for it. Its Envoys run beside a whole Tidegate with an Envoy of
its own, which is what is in Tidegate's pod; names of Services lead to this machine.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from extproc.render import k8s
from extproc.stack import Stack, envoy_binary, free_ports
from tests.e2e.conftest import PATIENCE_S, books_balance, chat, fill_buckets, settings_for
from tests.e2e.doubles import CHAT, MESSAGES, NEVER_OPENS, Upstream, forget, until
from tests.render import eg_model
from tests.render.eg_model import Data

HTTP = httpx.Client(timeout=30)
FORMS = ["patches", "extension_policy"]
MESSAGE_TIMEOUT_S = 1.0


@dataclass
class Stage:
    """What the tests share. urls: of each Envoy that stands for one of Envoy Gateway's, by how it was made."""

    stack: Stack
    app: Upstream
    urls: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Tidegate's pod, and three Envoys: patched in both forms, and one whose patches were not taken."""
    folder = tmp_path_factory.mktemp("eg")
    upstreams: dict[str, Any] = {
        name: {"limits": [{"tpm": 60_000_000, "rpm": 600_000}], "breaker": NEVER_OPENS}
        for name in ("primary", "backup")
    }
    upstreams["narrow"] = {"concurrency": 1, "breaker": NEVER_OPENS, "fake": {"first_token_s": 2.5 * MESSAGE_TIMEOUT_S}}
    chains = {"gpt-5": ["primary", "backup"], "claude": ["primary"], "slow": ["narrow"]}
    settings = settings_for(
        service={"state_file": str(folder / "levels.json")},
        gateway={"message_timeout_s": MESSAGE_TIMEOUT_S},
        upstreams=upstreams,
        routes=[{"models": [m], "chain": chain, "acknowledge_unowned": True} for m, chain in chains.items()],
    )
    fill_buckets(settings)
    with ExitStack() as open_ones:
        app = open_ones.enter_context(Upstream().listening())
        stage = Stage(Stack(settings, folder, workers=1, patience_s=PATIENCE_S), app)
        open_ones.enter_context(stage.stack)
        for form in [*FORMS, "unpatched"]:
            port, admin = free_ports(2)
            (folder / f"{form}.yaml").write_text(configuration(stage, form, port, admin))
            open_ones.enter_context(running(folder / f"{form}.yaml", admin))
            stage.urls[form] = f"http://127.0.0.1:{port}"
        yield stage
        books_balance(stage.stack)


def configuration(stage: Stage, form: str, port: int, admin: int) -> str:
    """What Envoy Gateway would give to its Envoy: our objects, and the HTTPRoute of an application."""
    settings = stage.stack.settings
    target = k8s.Target(extension_policy=form == "extension_policy")
    documents = [*k8s.envoy_gateway(settings, target, dict.fromkeys(settings.upstreams, ())), APP]
    grpc = int(settings.service.address.rpartition(":")[2])
    services = {
        f"tidegate:{settings.gateway.port}": settings.gateway.port,
        f"tidegate-headless:{grpc}": grpc,
        "app:80": stage.app.port,
    }
    made = eg_model.generate(documents, services)
    if form != "unpatched":
        made = eg_model.patched(made, eg_model.of_kind(documents, "EnvoyPatchPolicy"))
    text = yaml.safe_dump(eg_model.bootstrap(made, port, admin))
    text = text.replace(f"@tidegate/{settings.gateway.port}/", f"@tidegate/{port}/")  # pods share no sockets
    return text.replace("tidegate-headless.tidegate.svc.cluster.local", "127.0.0.1")


APP: Data = {
    "apiVersion": "gateway.networking.k8s.io/v1",
    "kind": "HTTPRoute",
    "metadata": {"name": "app", "namespace": "tidegate"},
    "spec": {
        "parentRefs": [{"name": "tidegate"}],
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                "backendRefs": [{"name": "app", "port": 80}],
            }
        ],
    },
}


@contextmanager
def running(file: Path, admin: int) -> Iterator[None]:
    """An Envoy with a configuration."""
    command = [envoy_binary(), "-c", str(file), "--use-dynamic-base-id", "--concurrency", "1", "-l", "warning"]
    log = file.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        until(lambda: ready(admin) or process.poll() is not None, within_s=60)
        assert process.poll() is None, log.read_text()[-2000:]
        yield
    finally:
        process.terminate()
        process.wait(20)


def ready(admin: int) -> bool:
    """Whether it serves, and has found Tidegate well where it asks for that."""
    try:
        url = f"http://127.0.0.1:{admin}"
        if HTTP.get(f"{url}/ready").status_code != 200:
            return False
        return "failed_active_hc" not in HTTP.get(f"{url}/clusters").text
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("form", FORMS)
def test_requests_are_admitted_answered_and_settled(stage: Stage, form: str) -> None:
    """JSON, a stream, both dialects; the application's own route is as it was, and large bodies pass there."""
    forget(stage.stack)
    client = openai.OpenAI(base_url=f"{stage.urls[form]}/v1", api_key="any", max_retries=0)
    messages: Any = [{"role": "user", "content": "hello"}]
    raw = client.chat.completions.with_raw_response.create(model="gpt-5", messages=messages, max_tokens=16)
    assert raw.headers["x-tidegate-upstream"] == "primary"
    whole = raw.parse().choices[0].message.content
    stream = client.chat.completions.create(model="gpt-5", messages=messages, max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole
    got = HTTP.post(stage.urls[form] + MESSAGES, json=chat(model="claude"))
    assert (got.status_code, got.headers["x-tidegate-upstream"]) == (200, "primary"), got.text
    assert HTTP.get(f"{stage.urls[form]}/v1/models").json()["data"]
    books_balance(stage.stack)
    assert stage.stack.state()["tally"]["unknown_usage"] == 0
    stage.app.received.clear()
    got = HTTP.post(f"{stage.urls[form]}/upload", content=b"x" * 9_000_000, headers={"x-tidegate-priority": "P9"})
    assert got.status_code == 200
    (one,) = stage.app.received
    assert (len(one.body), one.get("x-tidegate-priority")) == (9_000_000, b"P9")


@pytest.mark.parametrize("form", FORMS)
def test_a_request_waits_longer_than_a_message_may(stage: Stage, form: str) -> None:
    """One slot, which the other has for much longer."""
    with ThreadPoolExecutor(2) as both:
        answers = list(both.map(lambda _: HTTP.post(stage.urls[form] + CHAT, json=chat(model="slow")), range(2)))
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
    waited = max(float(answer.headers["x-tidegate-queue-ms"]) for answer in answers)
    assert waited > 1000 * MESSAGE_TIMEOUT_S


@pytest.mark.parametrize("form", FORMS)
def test_the_next_upstream_answers_when_the_first_fails(stage: Stage, form: str) -> None:
    forget(stage.stack)
    got = HTTP.post(stage.urls[form] + CHAT, json=chat(), headers={"x-fake-fault": "503;provider=primary"})
    assert (got.status_code, got.headers["x-tidegate-upstream"]) == (200, "backup")
    assert got.headers["x-tidegate-attempts"] == "2"
    assert len(stage.stack.record("backup")["requests"]) == 1


@pytest.mark.parametrize("form", FORMS)
def test_refusals_are_worded_as_everywhere(stage: Stage, form: str) -> None:
    """By Tidegate, by Envoy for it, and when every upstream failed."""
    too_large = b"x" * (stage.stack.settings.gateway.max_body_bytes + 1)
    for status, reason, asked in (
        (404, "unknown_model", {"json": chat(model="nobody-has-it")}),
        (413, "too_large", {"content": too_large}),
        (503, "upstream_failed", {"json": chat(), "headers": {"x-fake-fault": "503"}}),
    ):
        got = HTTP.post(stage.urls[form] + CHAT, **asked)
        assert (got.status_code, got.headers.get("x-tidegate-reason")) == (status, reason), got.text
        assert got.json()["error"]["reason"] == reason


def test_without_patches_requests_go_by_way_of_tidegates_own_envoy(stage: Stage) -> None:
    """Nobody passes unprotected, and nothing is admitted twice."""
    admitted = sum(stage.stack.state()["tally"]["admitted"].values())
    got = HTTP.post(stage.urls["unpatched"] + CHAT, json=chat(), headers={"x-fake-fault": "503;provider=primary"})
    assert (got.status_code, got.headers["x-tidegate-upstream"]) == (200, "backup")
    books_balance(stage.stack)
    assert sum(stage.stack.state()["tally"]["admitted"].values()) == admitted + 1
    for _ in range(10):
        got = HTTP.post(stage.urls["unpatched"] + CHAT, json=chat(), headers={"x-fake-fault": "503"})
        assert got.headers["x-tidegate-reason"] == "upstream_failed", "its refusals do not make it an ill host"
    got = HTTP.post(stage.urls["unpatched"] + CHAT, json=chat(model="nobody-has-it"))
    assert got.headers["x-tidegate-reason"] == "unknown_model"


def test_without_tidegate_llm_paths_are_refused_and_others_go_on(stage: Stage) -> None:
    """In all three; a running answer is not cut."""
    stream = chat(model="slow", stream=True, max_tokens=64)
    with HTTP.stream("POST", stage.urls["patches"] + CHAT, json=stream) as answer:
        pieces = answer.iter_text()
        read = next(pieces)
        stage.stack.kill("service", signal.SIGKILL)
        try:
            read += "".join(pieces)
            assert "[DONE]" in read
            for url in stage.urls.values():
                until(lambda url=url: refused(url), within_s=30)  # type: ignore[misc]
                assert HTTP.get(url).status_code == 200
        finally:
            stage.stack.start_service()
    for url in stage.urls.values():
        until(lambda url=url: HTTP.post(url + CHAT, json=chat()).status_code == 200, within_s=30)  # type: ignore[misc]


def refused(url: str) -> bool:
    got = HTTP.post(url + CHAT, json=chat())
    time.sleep(0.1)
    return got.status_code == 503 and json.loads(got.text)["error"]["reason"] == "admission_unavailable"
