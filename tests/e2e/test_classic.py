"""The classic profile on whatever Envoy there is: what makes it differ in the way, and must not differ for anybody.

`make test-classic` runs all other files in it; here is what shows first where it is broken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from extproc.stack import Stack
from tests.e2e.conftest import chat
from tests.e2e.doubles import CHAT, MESSAGES, NEVER_OPENS, Upstream, connect, emptied, forget, running, until, written

HTTP = httpx.Client(timeout=30)
LARGEST = 1 << 20
FAILS: tuple[int, dict[str, str], bytes] = (503, {}, b"{}")
LIMITS = {"x-ratelimit-limit-tokens": "777", "x-ratelimit-remaining-tokens": "700"}


@pytest.fixture(scope="module")
def vendors() -> Iterator[dict[str, Upstream]]:
    """Upstreams that keep every byte they get."""
    with ExitStack() as open_ones:
        yield {name: open_ones.enter_context(Upstream().listening()) for name in ("azure", "groq", "vllm")}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, vendors: dict[str, Upstream]) -> Iterator[Stack]:
    """Three fakes in one chain, three vendors in another, and a breaker that opens at once."""
    folder = tmp_path_factory.mktemp("classic")
    fakes: dict[str, Any] = {
        name: {"owned": name == "local", "concurrency": 100, "models": {"gpt-5": f"{name}-5"}, "breaker": NEVER_OPENS}
        for name in ("primary", "backup", "local")
    }
    fakes["fragile"] = {"concurrency": 100, "owned": True, "breaker": {"failures": 1, "cool_down_s": 0.5}}
    for name in ("azure", "groq"):
        (folder / name).write_text(f"sk-{name}", "utf-8")
    others: dict[str, Any] = {
        name: {
            "provider": name,
            "url": f"http://127.0.0.1:{one.port}",
            "concurrency": 100,
            "models": {"vendors": f"{name}-model"},
            "breaker": NEVER_OPENS,
            **({"owned": True} if name == "vllm" else {"key_file": str(folder / name)}),
        }
        for name, one in vendors.items()
    }
    with running(
        folder,
        gateway={"profile": "classic", "max_body_bytes": LARGEST, "max_answer_bytes": LARGEST},
        upstreams={**fakes, **others},
        routes=[
            {"models": ["gpt-5", "claude"], "chain": ["primary", "backup", "local"]},
            {"models": ["vendors"], "chain": ["azure", "groq", "vllm"]},
            {"models": ["frail"], "chain": ["fragile"]},
        ],
        other_endpoints="primary",
        timeouts={"stall_s": 2},
    ) as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack, vendors: dict[str, Upstream]) -> Iterator[Stack]:
    """The shared stack with empty records; whatever a test took is given back when it ends."""
    with emptied(shared, vendors) as stack:
        yield stack


def counted(stack: Stack, name: str, label: str) -> float:
    """A counter of the state page."""
    return float(stack.state()["tally"][name].get(label, 0))


def way(headers: Mapping[str, str]) -> tuple[str, str]:
    """Who answered, and at which attempt."""
    return headers["x-tidegate-upstream"], headers["x-tidegate-attempts"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["503", "reset", "malformed"])
def test_a_failure_moves_on_in_its_order(stack: Stack, fault: str, stream: bool) -> None:  # noqa: FBT001
    """Twice: a refusal, a lost connection, an answer that is none. Each upstream is asked once, by its own name."""
    if stream and fault == "malformed":
        fault = "503"
    for path, model in ((CHAT, "gpt-5"), (MESSAGES, "claude")):
        forget(stack)
        wrong = {"x-fake-fault": fault + ";provider=primary"}
        answer = HTTP.post(stack.url + path, json={**chat(), "model": model, "stream": stream}, headers=wrong)
        assert (answer.status_code, way(answer.headers)) == (200, ("backup", "2"))
        assert not [name for name in answer.headers if name.startswith("x-tg-")]
    assert stack.record("backup")["requests"][0]["model"] == "claude"


def test_each_attempt_has_its_own_path_model_and_key(stack: Stack, vendors: dict[str, Upstream]) -> None:
    """What one upstream is told no other gets to see, nor anything of what goes on inside."""
    for name in ("azure", "groq"):
        vendors[name].answers.append((503, {}, b"{}"))
    sent = {"authorization": "Bearer sk-caller", "x-tidegate-cluster": "tidegate:gate:groq", "x-tidegate-route": "{}"}
    answer = HTTP.post(stack.url + CHAT, json={**chat(), "model": "vendors"}, headers=sent)
    assert (answer.status_code, way(answer.headers)) == (200, ("vllm", "3"))
    azure, groq, vllm = (vendors[name].last() for name in ("azure", "groq", "vllm"))
    assert (azure.get("api-key"), azure.get("authorization")) == (b"sk-azure", None)
    assert (groq.get("api-key"), groq.get("authorization")) == (None, b"Bearer sk-groq")
    assert (vllm.get("api-key"), vllm.get("authorization")) == (None, None)
    assert azure.path == "/openai/v1/chat/completions"
    assert [seen.json()["model"] for seen in (azure, groq, vllm)] == ["azure-model", "groq-model", "vllm-model"]
    for name, seen in (("azure", azure), ("groq", groq), ("vllm", vllm)):
        assert seen.get("host") == f"127.0.0.1:{vendors[name].port}".encode()
        ours = [
            key for key, _ in seen.headers if key.lower().startswith(("x-tidegate", "x-tg", "x-envoy", "x-forwarded"))
        ]
        assert ours == []
    assert len({seen.get("x-request-id") for seen in (azure, groq, vllm)}) == 1


def test_limits_of_our_account_are_learned_and_not_passed_on(stack: Stack, vendors: dict[str, Upstream]) -> None:
    body = json.dumps({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}).encode()
    vendors["azure"].answers.append((200, LIMITS, body))
    answer = HTTP.post(stack.url + CHAT, json={**chat(), "model": "vendors"})
    assert (answer.status_code, way(answer.headers)) == (200, ("azure", "1"))
    assert not [name for name in answer.headers if "ratelimit" in name]


def test_failures_are_worded_the_same_wherever_they_come_from(stack: Stack, vendors: dict[str, Upstream]) -> None:
    """An answer that is too large to be read is ended by its gate: no other is paid for as much."""
    large = json.dumps({"choices": [{"message": {"content": "a" * 2 * LARGEST}, "finish_reason": "stop"}]}).encode()
    for answers, last in (
        ({"azure": (200, {}, large)}, ("azure", "1")),
        (dict.fromkeys(vendors, FAILS), ("vllm", "3")),
    ):
        for name, one in answers.items():
            vendors[name].answers.append(one)
        answer = HTTP.post(stack.url + CHAT, json={**chat(), "model": "vendors"})
        assert (answer.status_code, answer.headers["x-tidegate-reason"]) == (503, "upstream_failed")
        assert answer.json()["error"]["reason"] == "upstream_failed"
        assert way(answer.headers) == last
        assert not [name for name in answer.headers if name.startswith(("x-tg-", "x-tidegate-gate"))]


def test_long_headers_of_callers_fit(stack: Stack, vendors: dict[str, Upstream]) -> None:
    """What gates are told stands beside them, and Envoy takes 60 KiB of them all."""
    path = f"{CHAT}?a={'b' * 50_000}"
    answer = HTTP.post(stack.url + path, json={**chat(), "model": "vendors"})
    assert (answer.status_code, way(answer.headers)) == (200, ("azure", "1"))
    assert vendors["azure"].last().path.endswith(path.removeprefix("/v1"))


@pytest.mark.parametrize("asked", [False, True])
def test_usage_of_a_stream_is_read_and_hidden_where_nobody_asked(stack: Stack, asked: bool) -> None:  # noqa: FBT001
    options = {"stream_options": {"include_usage": True}} if asked else {}
    answer = HTTP.post(stack.url + CHAT, json={**chat(), "stream": True, **options})
    assert answer.text.rstrip().endswith("data: [DONE]")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert any(event.get("usage") for event in events) is asked
    assert all(event["choices"] for event in events if not event.get("usage"))
    until(lambda: stack.state()["unsettled"] == 0)
    assert stack.record("primary")["requests"][-1]["model"] == "primary-5"


def test_a_stream_that_breaks_off_breaks_for_its_caller(stack: Stack) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        HTTP.post(stack.url + CHAT, json={**chat(), "stream": True}, headers={"x-fake-fault": "cut;provider=primary"})


def test_who_leaves_gives_its_slot_back(stack: Stack) -> None:
    """While its first token is awaited, and while it reads; its upstream is let go of."""
    for fault in ("slow-first-token;s=100", "stall;s=100;at=4"):
        body = json.dumps({**chat(), "stream": True}).encode()
        with connect(stack) as caller:
            caller.sendall(written(body=body, headers={"x-fake-fault": fault}))
            until(lambda: stack.record("primary")["in_flight"] == 1)
        until(lambda: stack.record("primary")["in_flight"] == 0)
        until(lambda: stack.state()["flying"] == 0)


def test_a_breaker_closes_by_a_canary(stack: Stack) -> None:
    """Canaries go through gates, too: they reach an upstream by its own path and key."""
    wrong = {"x-fake-fault": "500;provider=fragile"}
    body = {**chat(), "model": "frail"}
    assert HTTP.post(stack.url + CHAT, json=body, headers=wrong).status_code == 503
    until(lambda: stack.state()["breakers"]["fragile"]["state"] != "closed")
    until(lambda: stack.state()["breakers"]["fragile"]["state"] == "closed", within_s=30)
    assert HTTP.post(stack.url + CHAT, json=body).status_code == 200


def test_other_endpoints_pass_through(stack: Stack) -> None:
    answer = HTTP.post(stack.url + "/v1/audio/speech", json={"input": "a"})
    assert way(answer.headers) == ("primary", "1")


def test_who_did_not_answer_in_time_is_told(stack: Stack) -> None:
    """Each attempt has its part of the deadline; the answer is Envoy's own, and names who was asked last."""
    late = {"x-fake-fault": "slow-first-token;s=100", "x-request-timeout-ms": "600"}
    answer = HTTP.post(stack.url + CHAT, json={**chat(), "stream": True}, headers=late)
    assert (answer.status_code, answer.headers["x-tidegate-reason"]) == (504, "deadline_passed")
    assert way(answer.headers) == ("local", "3")


def test_nothing_passes_while_tidegate_is_away(shared: Stack) -> None:
    """Last of all: it ends the service."""
    shared.kill("service")
    for path in (CHAT, MESSAGES, "/v1/models"):
        answer = HTTP.post(shared.url + path, json=chat(), headers={"x-tidegate-cluster": "tidegate:gate:primary"})
        assert (answer.status_code, answer.headers["x-tidegate-reason"]) == (503, "admission_unavailable")
        assert answer.json()["error"]["reason"] == "admission_unavailable"
    shared.start_service()
    until(lambda: HTTP.post(shared.url + CHAT, json=chat()).status_code == 200, within_s=30)
