"""A deadline that the caller set is kept, told as what it is, and says nothing against the upstream."""

from __future__ import annotations

import httpx
import pytest

from extproc.stack import Stack
from tests.e2e.conftest import Gate, chat

SLOW = {"x-fake-fault": "slow-first-token;s=3", "x-request-timeout-ms": "200"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "model"), [("/v1/chat/completions", "gpt-5"), ("/v1/messages", "claude")])
def test_an_answer_that_is_late_is_refused_as_late(gate: Gate, path: str, model: str, *, stream: bool) -> None:
    """504 `deadline_passed` in the caller's dialect, no retry, and no breaker counts it however often it happens."""
    stack = gate()
    for _ in range(4):
        answer = httpx.post(f"{stack.url}{path}", json=chat(model=model, stream=stream), headers=SLOW, timeout=10)
        assert (answer.status_code, answer.headers["x-tidegate-reason"]) == (504, "deadline_passed")
        assert answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["reason"] == "deadline_passed"
        assert answer.elapsed.total_seconds() < 2
    assert {name: breaker["failures"] for name, breaker in stack.state()["breakers"].items()} == {
        "primary": 0,
        "backup": 0,
        "local": 0,
    }


def test_a_stream_has_all_its_attempts_before_the_deadline(gate: Gate) -> None:
    """Every upstream of the order gets its share of the time, and a silent one is passed in time for the next."""
    stack = gate()
    headers = {"x-fake-fault": "silence;provider=primary", "x-request-timeout-ms": "1500"}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=chat(stream=True), headers=headers, timeout=10)
    assert answer.status_code == 200
    assert answer.headers["x-tidegate-upstream"] == "backup"
    assert answer.headers["x-tidegate-attempts"] == "2"


def test_time_left_is_told_to_upstreams_that_are_owned_only(gate: Gate) -> None:
    """What remains of the deadline goes on to our own engines; a provider does not hear of it."""
    stack = gate()
    headers = {"x-request-timeout-ms": "9000"}
    assert httpx.post(f"{stack.url}/v1/chat/completions", json=chat(), headers=headers).status_code == 200
    faults = headers | {"x-fake-fault": "503;provider=primary"}
    assert httpx.post(f"{stack.url}/v1/chat/completions", json=chat(), headers=faults).status_code == 200
    for name in ("primary", "backup"):
        for seen in stack.record(name)["requests"]:
            assert "x-request-timeout-ms" not in seen["headers"]
    stack.kill("backup")
    assert httpx.post(f"{stack.url}/v1/chat/completions", json=chat(), headers=faults).status_code == 200
    (seen,) = stack.record("local")["requests"]
    assert 1 <= int(seen["headers"]["x-request-timeout-ms"]) <= 9000


@pytest.mark.native(
    "whether the last attempt ends with the deadline is reckoned as if those before had taken their share"
)
def test_a_stream_that_fails_before_its_deadline_is_not_late(gate: Gate) -> None:
    """Its last attempt was refused, or had only its share of the time, when others had failed at once: that is told as
    what it is, and may be tried again.
    """
    stack = gate()
    for fault in ("503", "silence;provider=local"):
        stack.kill("backup") if fault != "503" else None
        headers = {"x-fake-fault": fault, "x-request-timeout-ms": "1500"}
        post_fault(stack, "primary")
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json=chat(stream=True), headers=headers, timeout=10)
        assert (answer.status_code, answer.headers["x-tidegate-reason"]) == (503, "upstream_failed")
        assert answer.headers["x-should-retry"] == "true"
        assert answer.headers["x-tidegate-attempts"] == "3"
        assert answer.elapsed.total_seconds() < 1.4


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_that_has_all_but_passed_is_told_as_one(gate: Gate, *, stream: bool) -> None:
    """However few milliseconds are left for its attempts, or none: nothing else is told, or held against anybody."""
    upstream = {"limits": [{"tpm": 60_000_000, "rpm": 600_000}], "fake": {"first_token_s": 0.5}}
    stack = gate(upstreams={"only": upstream}, retries={"share": 1, "least_per_s": 100})
    reasons = set()
    for number in range(120):
        headers = {"x-request-timeout-ms": str(1 + number % 12)}
        body = chat(str(number), stream=stream)
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=headers, timeout=10)
        reasons.add((answer.status_code, answer.headers["x-tidegate-reason"]))
    assert (504, "deadline_passed") in reasons
    assert {reason for _, reason in reasons} <= {"deadline_passed", "deadline_unmeetable"}
    assert stack.state()["breakers"]["only"]["failures"] == 0


def post_fault(stack: Stack, name: str) -> None:
    """Let the next request at a fake be refused."""
    httpx.post(f"{stack.fakes[name].where}/admin/fault", json={"fault": "503", "count": 1}).raise_for_status()
