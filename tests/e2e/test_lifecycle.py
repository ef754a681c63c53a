"""What the others notice when one of the processes is killed, stopped, hung, drained or started again.

The fakes stall in the middle of an answer for as long as a test needs it to run. Every test leaves the stack at work.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from extproc.stack import Stack
from tests.e2e.conftest import PATIENCE_S, books_balance, chat, fill_buckets, settings_for
from tests.e2e.doubles import CHAT, MESSAGES, forget, running, until, waiting

DRAIN_S = 3.0
GRACE_S = 4
RATE, CAPACITY = 10.0, 10_000.0
"""Tokens per second and at most in the bucket of the wide upstream."""
UPSTREAMS: dict[str, dict[str, Any]] = {
    "wide": {"limits": [{"tpm": 600, "burst_s": 1000}], "concurrency": 100, "headroom": 0},
    "narrow": {"concurrency": 1},
}
FAST = {"first_token_s": 0.01, "output_tokens_per_s": 2000, "burst_s": 100_000}
HTTP = httpx.Client(timeout=120)
HANG_ON_USR1 = """
import signal, time
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(60))
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One upstream with room for many and one for a single request, and lanes for the patient."""
    with running(tmp_path_factory.mktemp("lifecycle"), **settings(), settled=False) as stack:
        yield stack


def settings(**service: Any) -> dict[str, Any]:
    """Settings of this file's stacks."""
    return {
        "upstreams": {name: {"owned": True, "fake": FAST, **upstream} for name, upstream in UPSTREAMS.items()},
        "routes": [{"models": [name], "chain": [name]} for name in UPSTREAMS],
        "lanes": {"P1": {"max_wait_s": 100}},
        "timeouts": {"stall_s": 100},
        "service": {"drain_s": DRAIN_S, "record_grace_s": GRACE_S, **service},
    }


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    """The shared stack at work, before and after."""
    works(shared)
    books_balance(shared)
    forget(shared)
    yield shared
    works(shared)
    books_balance(shared)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for the clients that wait."""
    with ThreadPoolExecutor(16) as threads:
        yield threads


def post(stack: Stack, model: str = "wide", path: str = CHAT, **headers: str) -> httpx.Response:
    """One small request."""
    return HTTP.post(stack.url + path, json={**chat(), "model": model}, headers=headers)


def works(stack: Stack) -> None:
    """Wait until requests are served. Records of the first may be lost: their books close after the grace period."""
    until(lambda: post(stack).status_code == 200, within_s=60, every_s=0.05)


def answering(pool: ThreadPoolExecutor, stack: Stack, seconds: float, model: str = "wide") -> Future[str]:
    """A streamed answer that takes so long, once it has begun."""
    before = stack.record(model)["in_flight"]
    headers = {"x-fake-fault": f"stall;s={seconds};at=4"}
    body = {**chat(stream=True), "model": model}
    answer = pool.submit(lambda: HTTP.post(stack.url + CHAT, json=body, headers=headers).text)
    until(lambda: stack.record(model)["in_flight"] == before + 1)
    return answer


def queued(pool: ThreadPoolExecutor, stack: Stack, path: str = CHAT, **headers: str) -> Future[httpx.Response]:
    """A request that waits for the one slot, once it waits."""
    before = waiting(stack)
    held = pool.submit(post, stack, "narrow", path, **headers)
    until(lambda: waiting(stack) == before + 1)
    return held


def whole(answer: Future[str]) -> bool:
    """Whether a streamed answer came to its end."""
    return answer.result(timeout=60).endswith("data: [DONE]\n\n")


def is_classic(stack: Stack) -> bool:
    """Whether Envoy logs no outcomes, and tells nothing of what runs."""
    return stack.settings.gateway.profile == "classic"


def slots(stack: Stack, name: str = "wide") -> int:
    """Slots in use at an upstream."""
    return int(stack.state()["counters"][f"upstream/{name}/slots"]["used"])


def refused_as_away(answer: httpx.Response, path: str = CHAT) -> None:
    """Envoy's own refusal, worded like any other."""
    assert (answer.status_code, answer.headers["x-tidegate-reason"]) == (503, "admission_unavailable")
    assert (answer.headers["retry-after"], answer.headers["x-should-retry"]) == ("2", "true")
    error = answer.json()["error"]
    assert error["reason"] == "admission_unavailable"
    if path == CHAT:
        assert (error["type"], error["code"], error["param"]) == ("server_busy", "SERVER_OVERLOADED", None)
    else:
        assert (answer.json()["type"], error["type"]) == ("error", "overloaded_error")


# A minute in which nothing happens. It begins first and is looked at last, so that nobody waits for it.

QUIET_S = 60.0


@dataclass(frozen=True)
class Quiet:
    """An answer that stalls for longer than that, and a request that waits behind it. since: when both were there."""

    stack: Stack
    answer: Future[str]
    held: Future[httpx.Response]
    since: float


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quiet]:
    """Both, at a stack of their own, whose Envoy tells nothing of what runs."""
    with (
        ThreadPoolExecutor(2) as threads,
        running(tmp_path_factory.mktemp("quiet"), **settings(), settled=False) as stack,
    ):
        config = stack.workdir / "envoy.yaml"
        text = config.read_text("utf-8")
        assert is_classic(stack) or "access_log_flush_interval: 5s" in text
        config.write_text(text.replace("access_log_flush_interval: 5s", "access_log_flush_interval: 500s"), "utf-8")
        stack.kill("envoy")
        stack.start_envoy()
        works(stack)
        answer = answering(threads, stack, QUIET_S + 3, "narrow")
        yield Quiet(stack, answer, queued(threads, stack), time.monotonic())


def test_a_minute_of_quiet_has_begun(quiet: Quiet) -> None:
    """The slot is held, and the other waits for it."""
    assert slots(quiet.stack, "narrow") == waiting(quiet.stack) == 1


def test_a_killed_service_cuts_no_answer_and_knows_of_them_again(stack: Stack, pool: ThreadPoolExecutor) -> None:
    """SIGKILL: running answers go on to their end; who was held and who comes gets a clean 503 at once, in its dialect.
    Back again it works, and counts the answers that its predecessor let go, from Envoy's periodic records until they
    end: an upstream with one slot does not get a second request.
    """
    answers = [answering(pool, stack, 15.0, "narrow"), answering(pool, stack, 15.0)]
    held = [queued(pool, stack), queued(pool, stack, MESSAGES)]
    stack.kill("service")
    killed = time.monotonic()
    for one, path in zip(held, (CHAT, MESSAGES), strict=True):
        refused_as_away(one.result(timeout=60), path)
    for path in (CHAT, MESSAGES):
        refused_as_away(post(stack, path=path), path)
    assert "暂时无法" in post(stack, **{"accept-language": "zh"}).json()["error"]["message"]
    assert time.monotonic() - killed < 10
    stack.start_service()
    works(stack)
    if is_classic(stack):  # nobody tells it of them
        assert all(map(whole, answers))
        return
    assert not any(answer.done() for answer in answers)
    until(lambda: slots(stack) == slots(stack, "narrow") == 1)
    waited = queued(pool, stack)
    assert all(map(whole, answers))
    assert waited.result(timeout=60).status_code == 200
    assert int(waited.result().headers["x-tidegate-queue-ms"]) > 0
    until(lambda: slots(stack) == slots(stack, "narrow") == 0)
    assert stack.record("narrow")["max_in_flight"] == 1


def test_a_stopped_service_is_gone_and_comes_back(stack: Stack, pool: ThreadPoolExecutor) -> None:
    """SIGSTOP: who is held and who comes is refused within 5 s, answers go on. After SIGCONT the same process works: it
    is not taken for hung, though it stood still for longer than its watchdog allows. What still runs holds its slot
    again as soon as Envoy tells of it, though Envoy had given up on the stream that held it.
    """
    process = stack.processes["service"]
    answers = [answering(pool, stack, 20.0, "narrow"), answering(pool, stack, 4.0)]
    held = queued(pool, stack)
    stack.kill("service", signal.SIGSTOP)
    stopped = time.monotonic()
    newcomers = [pool.submit(post, stack) for _ in range(3)]
    for one in (held, *newcomers):
        refused_as_away(one.result(timeout=60))
    assert time.monotonic() - stopped < 10
    until(lambda: quickly_refused(stack))
    assert whole(answers[1])
    until(lambda: time.monotonic() > stopped + 6)
    stack.kill("service", signal.SIGCONT)
    works(stack)
    assert process.poll() is None
    if not is_classic(stack):
        until(lambda: slots(stack, "narrow") == 1)
        assert not answers[0].done()
    assert whole(answers[0])
    until(lambda: slots(stack, "narrow") == 0)


def quickly_refused(stack: Stack) -> bool:
    """Whether Envoy has noticed, and asks no more."""
    began = time.monotonic()
    refused_as_away(post(stack))
    return time.monotonic() - began < 0.5


def test_draining_refuses_newcomers_and_lets_answers_end(stack: Stack, pool: ThreadPoolExecutor) -> None:
    """SIGTERM: newcomers and those in line are told to come back in a moment, in their dialect; short answers end while
    the service waits for them; it ends with 0 when its time is over, and a longer answer goes on without it.
    """
    process = stack.processes["service"]
    answers = [answering(pool, stack, 12.0, "narrow"), answering(pool, stack, 1.5)]
    held = [queued(pool, stack), queued(pool, stack, MESSAGES)]
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    for one, path in zip(held, (CHAT, MESSAGES), strict=True):
        refused_as_draining(one.result(timeout=60), path)
    for path in (CHAT, MESSAGES):
        refused_as_draining(post(stack, path=path), path)
    assert whole(answers[1])
    assert process.poll() is None
    assert process.wait(timeout=DRAIN_S + PATIENCE_S) == 0
    assert time.monotonic() - began >= DRAIN_S
    refused_as_away(post(stack))
    assert not answers[0].done()
    assert whole(answers[0])
    stack.start_service()


def refused_as_draining(answer: httpx.Response, path: str = CHAT) -> None:
    """The service's own refusal while it drains."""
    assert (answer.status_code, answer.headers["x-tidegate-reason"]) == (503, "draining")
    assert answer.json()["error"]["type"] == ("server_busy" if path == CHAT else "overloaded_error")
    assert answer.headers["x-should-retry"] == "true"
    assert 1 <= int(answer.headers["retry-after"]) <= 2


def test_a_drain_without_work_is_over_at_once(stack: Stack) -> None:
    """Nothing runs: it does not wait for its time to be over."""
    books_balance(stack)
    process = stack.processes["service"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=DRAIN_S) == 0
    stack.start_service()


def test_a_killed_envoy_frees_everything_at_once(stack: Stack, pool: ThreadPoolExecutor) -> None:
    """Envoy dies with answers under way and requests in line: slots and places are free at once. No record will come,
    so the estimate is kept, and counted as unknown, when the grace period is over. One in line may have been let go in
    the moment when the slot was free and its own end not noticed yet.
    """
    answers = [answering(pool, stack, 60.0, "narrow"), answering(pool, stack, 60.0)]
    held = [queued(pool, stack) for _ in range(3)]
    before, at = stack.state(), time.monotonic()
    stack.kill("envoy")
    until(lambda: slots(stack) == slots(stack, "narrow") == waiting(stack) == stack.state()["flying"] == 0)
    assert time.monotonic() - at < GRACE_S or is_classic(stack), "before any book is closed"
    for one in (*answers, *held):
        assert isinstance(one.exception(timeout=60), httpx.TransportError)
    until(lambda: stack.state()["unsettled"] == 0)
    now = stack.state()
    assert is_classic(stack) or time.monotonic() - at > GRACE_S  # there each ends as one whose client left
    sent = 2 + sum(now["tally"]["admitted"].values()) - sum(before["tally"]["admitted"].values())
    assert now["tally"]["unknown_usage"] - before["tally"]["unknown_usage"] == sent
    assert now["tally"]["settled"] - before["tally"]["settled"] == sent
    stack.start_envoy()


def test_a_hung_service_ends_itself(stack: Stack, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    """Its event loop stands still: the process ends with 70 after `watchdog_s`, answers go on, and a new one works."""
    (tmp_path / "sitecustomize.py").write_text(HANG_ON_USR1, "utf-8")
    restart(stack, {"PYTHONPATH": str(tmp_path), "TIDEGATE__SERVICE__WATCHDOG_S": "2"})
    answer = answering(pool, stack, 5.0)
    process = stack.processes["service"]
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=PATIENCE_S) == 70
    refused_as_away(post(stack))
    assert whole(answer)
    assert "sitecustomize.py" in (stack.workdir / "service.log").read_text("utf-8"), "where it hung is told"
    restart(stack, {})


def restart(stack: Stack, environ: dict[str, str]) -> None:
    """Start the service anew with these in its environment."""
    process = stack.processes["service"]
    if process.poll() is None:
        process.terminate()
        process.wait(timeout=DRAIN_S + PATIENCE_S)
    stack.environ = environ
    stack.start_service()
    works(stack)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_bucket_levels_survive_a_restart(stack: Stack, how: signal.Signals) -> None:
    """A successor finds the level that its predecessor left, and what has been refilled since; killed, it may be that
    of a second before.
    """
    for _ in range(10):
        post(stack)
    books_balance(stack)
    spent_by, before = time.monotonic(), level(stack)
    until(lambda: time.monotonic() > spent_by + 1.5 * (how is signal.SIGKILL))
    process = stack.processes["service"]
    process.send_signal(how)
    process.wait(timeout=DRAIN_S + PATIENCE_S)
    stack.start_service()
    after, elapsed = level(stack), time.monotonic() - spent_by
    assert before < CAPACITY - 100
    assert after == pytest.approx(before + RATE * elapsed, abs=2 * RATE)


def test_without_a_state_file_buckets_start_empty(stack: Stack) -> None:
    """Nobody knows what the predecessor sent: the successor begins with nothing, and with half the slots while answers
    of the predecessor may still run. A file found later is good again.
    """
    stack.kill("service")
    stack.environ = {"TIDEGATE__SERVICE__STATE_FILE": "null", "TIDEGATE__SERVICE__RESTART_RAMP_S": "4"}
    began = time.monotonic()
    stack.start_service()
    assert 0 <= level(stack) <= RATE * (time.monotonic() - began)
    assert limits(stack) == [50, 1]
    until(lambda: limits(stack) == [100, 1])
    assert time.monotonic() - began >= 4
    stack.environ = {}
    stack.kill("service")
    stack.start_service()
    assert level(stack) > CAPACITY / 2


def limits(stack: Stack) -> list[int]:
    """Slots that there are at each upstream."""
    return [stack.state()["counters"][f"upstream/{name}/slots"]["limit"] for name in UPSTREAMS]


def level(stack: Stack) -> float:
    """Tokens in the wide upstream's bucket."""
    return float(stack.state()["counters"]["upstream/wide/*/total"]["level"])


def test_a_unix_socket_and_two_workers(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """The service behind a unix socket and Envoy with two threads: all is served and accounted for over many
    connections, the one slot is never held twice, and a killed service's leftover socket is no trouble to the next.
    """
    configured = settings_for(**settings(address=f"unix:{tmp_path}/s", state_file=str(tmp_path / "levels.json")))
    fill_buckets(configured)
    with Stack(configured, tmp_path / "run", workers=2, patience_s=PATIENCE_S) as stack:
        several_connections(stack, pool)
        answer = answering(pool, stack, 6.0)
        held_by = answering(pool, stack, 6.0, "narrow")
        held = queued(pool, stack)
        stack.kill("service")
        refused_as_away(held.result(timeout=60))
        stack.start_service()
        works(stack)
        assert whole(answer)
        assert whole(held_by)
        books_balance(stack)
        several_connections(stack, pool)
        assert stack.record("narrow")["max_in_flight"] == 1
        books_balance(stack)


def several_connections(stack: Stack, pool: ThreadPoolExecutor) -> None:
    """Forty requests, each on a connection of its own."""
    before = stack.state()["tally"]

    def one(number: int) -> int:
        body = {**chat(stream=number % 2 == 0), "model": "narrow" if number % 4 == 0 else "wide"}
        with httpx.Client(timeout=30, verify=False) as client:  # noqa: S501 - there is no TLS here
            return client.post(stack.url + CHAT, json=body).status_code

    assert list(pool.map(one, range(40))) == [200] * 40
    books_balance(stack)
    now = stack.state()["tally"]
    assert now["settled"] - before["settled"] == 40
    assert now["unknown_usage"] == before["unknown_usage"]


@pytest.mark.slow
def test_a_minute_of_quiet_ends_nothing(quiet: Quiet) -> None:
    """One answer that stalls and one request that waits behind it, nothing else on the connection for a minute, without
    Envoy's periodic records: neither is cut.
    """
    assert not threading.Event().wait(max(0.0, quiet.since + QUIET_S - time.monotonic()))
    if time.monotonic() < quiet.since + QUIET_S + 1:
        assert not quiet.answer.done()
        assert not quiet.held.done()
        assert slots(quiet.stack, "narrow") == 1
    assert whole(quiet.answer)
    assert quiet.held.result(timeout=60).status_code == 200
    assert int(quiet.held.result().headers["x-tidegate-queue-ms"]) > QUIET_S * 1000
    books_balance(quiet.stack)
