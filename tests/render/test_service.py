"""Envoy and the service: admission asked and answered, the service slow, hung or gone, and what is reported to it.

The service here is played by `service.py`, which speaks the real protocols.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.render.rig import Envoy, Got, Reply, Upstream, answer, event, settings_of, upstream
from tests.render.service import Service

pytestmark = pytest.mark.e2e

Ups = dict[str, Upstream]

GATEWAY = "gateway: {max_body_bytes: 1000000, max_answer_bytes: 4000000, message_timeout_s: 0.5}\n"


@pytest.fixture(scope="module")
def stage(servers: Ups, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Envoy, Service]]:
    """Envoy and a service in this process."""
    text = GATEWAY + "other_endpoints: a"
    settings = settings_of(text, a=servers["a"].port, b=servers["b"].port, dead=upstream(1))
    service = Service(_port(settings.service.address))
    with Envoy(settings, tmp_path_factory.mktemp("envoy")) as envoy:
        _until_healthy(envoy)
        yield envoy, service
    service.stop()


@pytest.fixture
def envoy(stage: tuple[Envoy, Service], ups: Ups) -> Envoy:  # noqa: ARG001 - made new
    return stage[0]


@pytest.fixture
def service(stage: tuple[Envoy, Service]) -> Service:
    """The service with nothing remembered."""
    service = stage[1]
    until = time.monotonic() + 5
    while service.open and time.monotonic() < until:
        time.sleep(0.01)
    service.streams.clear()
    service.records.clear()
    service.route = {}
    return service


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _until_healthy(envoy: Envoy) -> None:
    until = time.monotonic() + 10
    while envoy.stat("cluster.tidegate_service.membership_healthy") < 1:
        assert time.monotonic() < until
        time.sleep(0.05)


def ask(envoy: Envoy, what: str = "go", order: str = "a", path: str = "/v1/chat/completions", **more: Any) -> Got:
    headers = {"x-test-do": what, "x-test-order": order, **more.pop("headers", {})}
    return envoy.call(path, headers=headers, **more)


def kinds(service: Service) -> list[str]:
    return [str(message.WhichOneof("request")) for message in service.streams[-1]]


# ------------------------------------------------------------------------------------------- admission


def test_one_question_with_the_whole_body(envoy: Envoy, service: Service) -> None:
    """Headers, then the body in one piece; nothing of the answer is shown, and the stream lives as long as it."""
    assert ask(envoy, body=b"x" * 300_000).status == 200
    assert kinds(service) == ["request_headers", "request_body"]
    assert len(service.streams[0][1].request_body.body) == 300_000


@pytest.mark.parametrize(("path", "at"), [("/v1/chat/completions", "request_body"), ("/v1/files", "request_headers")])
def test_the_stream_ends_with_the_answer(envoy: Envoy, service: Service, ups: Ups, path: str, at: str) -> None:
    """That is how a slot is given back; also where admission saw no body."""
    ups["a"].reply = Reply(headers={"content-type": "text/event-stream"}, chunks=[event("[DONE]")] * 4, pause_s=0.15)
    thread = threading.Thread(target=ask, args=(envoy,), kwargs={"path": path, "headers": {"x-test-at": at}})
    thread.start()
    time.sleep(0.4)
    assert service.open == 1
    thread.join()
    time.sleep(0.1)
    assert service.open == 0


@pytest.mark.usefixtures("service")
def test_bodies_of_priced_requests_are_bounded(envoy: Envoy, ups: Ups) -> None:
    """And the refusal is in the caller's dialect; the limit of answers is another one."""
    assert ask(envoy, body=b"x" * 990_000).status == 200
    for path, kind in (("/v1/chat/completions", None), ("/v1/messages", "error")):
        got = ask(envoy, path=path, body=b"x" * 1_100_000)
        assert (got.status, got.get("x-tidegate-reason"), got.get("x-should-retry")) == (413, "too_large", "false")
        assert (got.json().get("type"), got.json()["error"]["reason"]) == (kind, "too_large")
    ups["a"].reply = answer({"choices": [], "filling": "x" * 3_000_000})
    assert len(ask(envoy).body) > 3_000_000


def test_uploads_to_other_endpoints_stream_through(envoy: Envoy, service: Service, ups: Ups) -> None:
    """Larger than anything may be kept: admission is asked by headers alone."""
    got = ask(envoy, path="/v1/files", body=b"x" * 5_000_000, headers={"x-test-at": "request_headers"})
    assert got.status == 200
    assert kinds(service) == ["request_headers"]
    assert len(ups["a"].seen[0].body) == 5_000_000


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/messages/batches", "/v1/messages/count_tokens", "/v1/responses/r/cancel"]
)
def test_which_paths_are_read(envoy: Envoy, service: Service, path: str) -> None:
    read = path == "/v1/messages/count_tokens"
    ask(envoy, path=path, headers={"x-test-at": "request_body" if read else "request_headers"})
    assert ("request_body" in kinds(service)) == read


def test_requests_without_a_body_are_asked_once(envoy: Envoy, service: Service) -> None:
    got = envoy.call("/v1/models", b"", method="GET", headers={"x-test-order": "a"})
    assert got.status == 200
    assert kinds(service) == ["request_headers"]


@pytest.mark.usefixtures("service")
def test_a_refusal_of_the_service_is_not_touched(envoy: Envoy) -> None:
    """Decision 6: status, body and headers are its own, its own rate limit headers included."""
    for at in ("request_headers", "request_body"):
        got = ask(envoy, "refuse", headers={"x-test-at": at})
        assert (got.status, got.json(), got.get("x-tidegate-reason")) == (429, {"mine": True}, "queue_timeout")
        assert got.get("x-ratelimit-limit") == "5"


@pytest.mark.usefixtures("service")
def test_the_order_is_the_services(envoy: Envoy, ups: Ups) -> None:
    """Decision 3: metadata and the retry count that comes with it, which reaches no upstream."""
    ups["b"].reply = Reply(503)
    assert ask(envoy, order="b,a").get("x-tidegate-upstream") == "a"
    ups["b"].seen.clear()
    assert ask(envoy, order="b").status == 503
    assert len(ups["b"].seen) == 1
    assert ask(envoy, order="dead,b,a").get("x-tidegate-attempts") == "3"
    assert not [
        name for seen in ups["a"].seen for name, _ in seen.headers if name.startswith(("x-envoy", "x-tidegate"))
    ]


@pytest.mark.usefixtures("service")
def test_the_time_for_headers_is_the_services(envoy: Envoy, ups: Ups) -> None:
    """Decision 10: it ends at the headers and does not cut the stream that follows."""
    ups["b"].reply = Reply(delay_s=1.0, body=b'{"choices": []}')
    ups["a"].reply = Reply(headers={"content-type": "text/event-stream"}, chunks=[event("[DONE]")] * 3, pause_s=0.2)
    got = ask(envoy, order="b,a", headers={"x-test-per-try-ms": "150"})
    assert (got.get("x-tidegate-upstream"), got.whole) == ("a", True)


# --------------------------------------------------------------------------------- slow, hung and gone


@pytest.mark.usefixtures("service")
def test_a_queued_request_is_held_beyond_the_message_timeout(envoy: Envoy) -> None:
    """Decision 4: the message timeout here is 0.5 s."""
    began = time.monotonic()
    assert ask(envoy, "hold", headers={"x-test-for": "1.2"}).status == 200
    assert time.monotonic() - began >= 1.2


@pytest.mark.usefixtures("service")
def test_a_silent_service_is_given_up_after_the_message_timeout(envoy: Envoy) -> None:
    began = time.monotonic()
    got = ask(envoy, "silent", headers={"x-test-for": "0.9"})
    assert (got.status, got.get("x-tidegate-reason")) == (503, "admission_unavailable")
    assert 0.4 < time.monotonic() - began < 0.9


@pytest.fixture
def apart(ups: Ups, folder: Path) -> Iterator[tuple[Envoy, subprocess.Popen[bytes]]]:
    """Envoy and a service that is a process of its own."""
    settings = settings_of(GATEWAY, a=ups["a"].port)
    command = [sys.executable, "-m", "tests.render.service", str(_port(settings.service.address))]
    process = subprocess.Popen(command)
    try:
        with Envoy(settings, folder) as envoy:
            _until_healthy(envoy)
            yield envoy, process
    finally:
        process.kill()
        process.wait()


def test_killed_while_it_holds_a_request(apart: tuple[Envoy, subprocess.Popen[bytes]], ups: Ups) -> None:
    """Decision 5: the held one is refused at once; a running answer goes on to its end."""
    envoy, process = apart
    ups["a"].reply = Reply(headers={"content-type": "text/event-stream"}, chunks=[event("[DONE]")] * 12, pause_s=0.1)
    found: dict[str, tuple[Got, float]] = {}

    def run(name: str, what: str, **headers: str) -> None:
        found[name] = (ask(envoy, what, headers=headers), time.monotonic())

    threads = [
        threading.Thread(target=run, args=("held", "hold"), kwargs={"x-test-for": "30"}),
        threading.Thread(target=run, args=("running", "go")),
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    process.kill()
    killed = time.monotonic()
    for thread in threads:
        thread.join()
    held, at = found["held"]
    assert (held.status, held.get("x-tidegate-reason")) == (503, "admission_unavailable")
    assert at - killed < 0.5
    running, _ = found["running"]
    assert (running.status, running.whole, running.body) == (200, True, event("[DONE]") * 12)
    assert ask(envoy).get("x-tidegate-reason") == "admission_unavailable"


def test_nobody_waits_for_a_hung_service(apart: tuple[Envoy, subprocess.Popen[bytes]]) -> None:
    """Health checks end what it holds within five seconds, and what comes after is refused at once."""
    envoy, process = apart
    found: list[float] = []

    def hold() -> None:
        got = ask(envoy, "hold", headers={"x-test-for": "30"}, timeout_s=20)
        assert got.get("x-tidegate-reason") == "admission_unavailable"
        found.append(time.monotonic())

    thread = threading.Thread(target=hold)
    thread.start()
    time.sleep(0.4)
    process.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    thread.join()
    assert found[0] - stopped < 5
    began = time.monotonic()
    assert ask(envoy).status == 503
    assert time.monotonic() - began < 0.2
    process.send_signal(signal.SIGCONT)
    until = time.monotonic() + 6
    while ask(envoy).status != 200:
        assert time.monotonic() < until
        time.sleep(0.1)


# -------------------------------------------------------------------------------------------- reported


def test_an_outcome_says_everything_about_its_request(envoy: Envoy, service: Service, ups: Ups) -> None:
    """Metadata of admission and of the answer, the limits the caller does not see, the time of the first byte."""
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
    ups["a"].reply = answer(
        {"choices": [{"finish_reason": "length"}], "usage": usage}, x_ratelimit_remaining_tokens="77", retry_after="1"
    )
    service.route = {"fact": 5}
    got = ask(envoy)
    assert got.get("x-ratelimit-remaining-tokens") is None
    (record,) = service.wait_for("outcomes")
    common = record["common_properties"]
    metadata = common["metadata"]["filter_metadata"]
    assert (metadata["llm.route"]["ticket"], metadata["llm.route"]["fact"]) == ("t-9", 5)
    assert metadata["llm.tail"] == {"in": 9, "out": 4, "cached": 2, "finish": "length", "done": "1"}
    assert metadata["llm.limits"] == {"x-ratelimit-remaining-tokens": "77"}
    assert common["custom_tags"]["ticket"] == "t-9"
    assert int(common["custom_tags"]["ttft_us"]) > 0
    assert (common["upstream_cluster"], common["upstream_request_attempt_count"]) == ("a", 1)
    assert (common["access_log_type"], record["response"]["response_code"]) == ("DownstreamEnd", 200)
    assert record["response"]["response_headers"] == {"retry-after": "1"}


def test_each_failed_attempt_is_reported_and_joined_by_request_id(envoy: Envoy, service: Service, ups: Ups) -> None:
    """With its cluster, status, flags, error and limits; it has no metadata. Good attempts are not reported."""
    error = {"error": {"type": "invalid_request_error", "code": "invalid_api_key"}}
    ups["a"].reply = answer(error, 401, x_ratelimit_remaining_tokens="3", anthropic_ratelimit_tokens_limit="8")
    ask(envoy, order="dead,a,b")
    dead, refused = service.wait_for("attempts", 2)
    (outcome,) = service.wait_for("outcomes")
    assert {r["request"]["request_id"] for r in (dead, refused, outcome)} == {outcome["request"]["request_id"]}
    assert dead["common_properties"]["upstream_cluster"] == "dead"
    assert dead["common_properties"]["response_flags"] == {"upstream_connection_failure": True}
    assert refused["common_properties"]["access_log_type"] == "UpstreamEnd"
    assert refused["response"]["response_code"] == 503
    assert refused["response"]["response_headers"] == {
        "x-tg-err": "invalid_request_error/invalid_api_key",
        "x-tg-status": "401",
        "x-ratelimit-remaining-tokens": "3",
        "anthropic-ratelimit-tokens-limit": "8",
    }
    assert "metadata" not in refused["common_properties"]
    time.sleep(0.1)
    assert len(service.wait_for("attempts", 2)) == 2


def test_a_stream_that_the_client_leaves_is_reported(envoy: Envoy, service: Service, ups: Ups) -> None:
    """With what was seen so far."""
    word = {"choices": [{"delta": {"content": "a"}}], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}
    ups["a"].reply = Reply(headers={"content-type": "text/event-stream"}, chunks=[event(word)] * 50, pause_s=0.05)
    with socket.create_connection(("127.0.0.1", envoy.settings.gateway.port)) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx-test-order: a\r\ncontent-length: 2\r\n\r\n{}"
        )
        time.sleep(0.4)
    (record,) = service.wait_for("outcomes")
    common = record["common_properties"]
    assert common["response_flags"] == {"downstream_connection_termination": True}
    tail = common["metadata"]["filter_metadata"]["llm.tail"]
    assert (tail["in"], tail["out"]) == (5, 1)
    assert 2 <= tail["events"] <= 8
    assert "done" not in tail


def test_classes_of_errors_in_the_attempts_log(envoy: Envoy, service: Service, ups: Ups) -> None:
    """Type and code as the provider names them, or the code that we give to what it only says in words."""
    cases = [
        ({"type": "error", "error": {"type": "invalid_request_error", "message": "Your credit balance is low"}}, 400,
         "invalid_request_error/credit_balance_too_low"),
        ({"error": {"type": "insufficient_quota", "code": "insufficient_quota"}}, 429,
         "insufficient_quota/insufficient_quota"),
        ([{"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "details": [{"quotaId": "PerDay-Free"}]}}], 429,
         "RESOURCE_EXHAUSTED/PerDay-Free"),
        ({"error": {"type": "rate_limit_error", "details": {"error_code": "enforced_spend_limit_reached"}}}, 429,
         "rate_limit_error/enforced_spend_limit_reached"),
        ({"object": "error", "message": "maximum context length is 8", "type": "BadRequestError", "code": 400}, 400,
         "BadRequestError/context_length_exceeded"),
        ({"detail": "what?"}, 500, "-/-"),
        ({"error": {"type": 'a"\r\nx: y', "code": "é" * 99}}, 500, None),
    ]  # fmt: skip
    for body, status, expected in cases:
        service.records.clear()
        ups["a"].reply = answer(body, status)
        ask(envoy)
        (record,) = service.wait_for("attempts")
        word = record["response"]["response_headers"]["x-tg-err"]
        assert word == expected or (expected is None and len(word) < 130 and word.isascii()), (body, word)


def test_how_long_to_wait_is_read_in_a_body_that_alone_says_it(envoy: Envoy, service: Service, ups: Ups) -> None:
    """In Gemini's form, OpenAI's and Azure's words; of refusals for speed only, and never in the caller's sight."""
    retry = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "22.5s"}
    cases = [
        ([{"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "details": [retry]}}], 429, "22.5s"),
        ({"error": {"message": "Limit 10, Used 9. Please try again in 1m7.66s. Visit us"}}, 429, "1m7.66s"),
        ({"error": {"message": "Please try again in 12ms."}}, 429, "12ms"),
        ({"error": {"message": "Exceeded the limit. Please retry after 26 seconds."}}, 429, "26s"),
        ({"error": {"message": "Slow down"}}, 429, None),
        ({"error": {"message": "Please try again in 5s"}}, 500, None),
    ]
    for body, status, expected in cases:
        service.records.clear()
        ups["a"].reply = answer(body, status, x_tg_wait="9s")
        reply = ask(envoy)
        (record,) = service.wait_for("attempts")
        assert record["response"]["response_headers"].get("x-tg-wait") == expected, body
        assert "x-tg-wait" not in reply.headers


def test_long_answers_report_while_they_run(envoy: Envoy) -> None:
    """Every five seconds, so that a slot stays taken over a restart; seen in the configuration, not waited for."""
    dump = json.loads(envoy.admin("/config_dump?resource=static_listeners"))
    assert '"access_log_flush_interval": "5s"' in json.dumps(dump)
