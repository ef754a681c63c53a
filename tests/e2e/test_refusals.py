"""Refusals as a caller sees them: bare HTTP and both SDKs, both dialects, two languages.

Those of budgets are in `test_quotas`, `evicted` is in `test_lanes`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anthropic
import httpx
import openai
import pytest

from extproc.stack import Stack, free_ports
from tests.e2e.conftest import chat
from tests.e2e.doubles import CHAT, MESSAGES, NEVER_OPENS, connect, forget, running, until, waiting, written

HTTP = httpx.Client(timeout=60)
CHINESE = "zh-CN,zh;q=0.9,en;q=0.8"
JITTER = 1.25
LANES = {
    "P0": {"max_wait_s": 1.0},
    "P1": {"max_wait_s": 20.0},
    "P2": {"max_wait_s": 20.0, "when_busy": "hold", "max_requests": 1},
}


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True)
class Case:
    """A request that is refused. retry: whether a retry can help. wait_s: bounds of the wait before jitter."""

    reason: str
    status: int
    openai_type: str
    anthropic_type: str
    openai_error: type[openai.APIStatusError]
    anthropic_error: type[anthropic.APIStatusError]
    wait_s: tuple[float, float] | None = None
    key: str = "sk-open"
    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    path: str = ""

    @property
    def code(self) -> str:
        return {429: "RATE_LIMIT_EXCEEDED", 503: "SERVER_OVERLOADED"}.get(self.status, self.reason.upper())


BUSY_429 = ("server_busy", "rate_limit_error", openai.RateLimitError, anthropic.RateLimitError)
BUSY_503 = ("server_busy", "overloaded_error", openai.InternalServerError, anthropic.InternalServerError)
FORBIDDEN = ("permission_error", "permission_error", openai.PermissionDeniedError, anthropic.PermissionDeniedError)
NOT_FOUND = ("invalid_request_error", "not_found_error", openai.NotFoundError, anthropic.NotFoundError)
BAD = ("invalid_request_error", "invalid_request_error", openai.BadRequestError, anthropic.BadRequestError)
LARGE = ("invalid_request_error", "invalid_request_error", openai.APIStatusError, anthropic.APIStatusError)
LATE = ("server_error", "timeout_error", openai.InternalServerError, anthropic.InternalServerError)
UNKNOWN = ("authentication_error", "authentication_error", openai.AuthenticationError, anthropic.AuthenticationError)

BY_ENVOY = {"upstream_failed", "admission_unavailable"}
"""These have whole seconds, and a jitter of less than one."""

P0, P2 = {"x-tidegate-priority": "P0"}, {"x-tidegate-priority": "P2"}

CASES = [
    Case("tenant_quota", 429, *BUSY_429, wait_s=(25.0, 30.0), key="sk-quota"),
    Case("tenant_concurrency", 429, *BUSY_429, wait_s=(1.0, 60.0), key="sk-slots"),
    Case("queue_timeout", 429, *BUSY_429, wait_s=(1.0, 1.0), body={"model": "tight"}, headers=P0),
    Case("lane_full", 503, *BUSY_503, wait_s=(1.0, 1.0), body={"model": "tight"}, headers=P2),
    Case("deadline_unmeetable", 503, *BUSY_503, wait_s=(20.0, 50.0), body={"model": "metered"}, headers=P0),
    Case("deadline_passed", 504, *LATE, headers={"x-request-timeout-ms": "0"}),
    Case("too_large", 413, *LARGE, body={"model": "metered", "max_tokens": 5701}),
    Case("no_upstream", 503, *BUSY_503, wait_s=(20.0, 55.0), body={"model": "dead"}, headers=P0),
    Case("unauthenticated", 401, *UNKNOWN, key="sk-nobody"),
    Case("forbidden", 403, *FORBIDDEN, key="sk-narrow", body={"model": "metered"}),
    Case("forbidden", 403, *FORBIDDEN, key="sk-narrow", headers=P0),
    Case("unknown_model", 404, *NOT_FOUND, body={"model": "gpt-99"}),
    Case("bad_request", 400, *BAD, body={"max_tokens": -1}),
    Case("not_found", 404, *NOT_FOUND, path=";no"),
    Case("upstream_failed", 503, *BUSY_503, wait_s=(5.0, 5.0), headers={"x-fake-fault": "503"}),
]


def named(case: Case) -> str:
    return f"{case.reason}-{case.key.removeprefix('sk-')}" if case.reason == "forbidden" else case.reason


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """All that refuses at once: a full lane, a busy upstream, a dead one, one in debt, tenants at their end."""
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"
    both = ["openai", "anthropic"]
    metered = {"first_token_s": 0.01, "output_tokens_per_s": 1e6}
    with running(
        tmp_path_factory.mktemp("refusing"),
        identity={"tenant": "api_key", "unknown": "reject"},
        tenants={
            "open": {"key_sha256": [sha256("sk-open")]},
            "quota": {"key_sha256": [sha256("sk-quota")], "rpm": 2, "tpm": 6000},
            "slots": {"key_sha256": [sha256("sk-slots")], "concurrency": 1},
            "narrow": {"key_sha256": [sha256("sk-narrow")], "models": ["gpt-*", "claude"], "lanes": ["P1", "P2"]},
        },
        upstreams={
            "main": {"limits": [{"tpm": 60_000_000, "rpm": 600_000}], "breaker": NEVER_OPENS, "follow_headers": False},
            "tight": {"concurrency": 1},
            "metered": {"limits": [{"tpm": 6000}], "fake": metered},
            "owing": {"limits": [{"tpm": 6000}], "fake": metered},
            "dead": {
                "provider": "compatible", "url": dead, "dialects": both, "concurrency": 9,
                "breaker": {"failures": 1, "cool_down_s": 50, "cool_down_max_s": 50},
            },
            "weak": {"concurrency": 50, "breaker": {**NEVER_OPENS, "cool_down_s": 600, "cool_down_max_s": 600}},
            "deaf": {"provider": "compatible", "url": dead, "dialects": ["openai"], "concurrency": 9},
        },
        routes=[
            {"models": ["gpt-5", "claude"], "chain": ["main"], "acknowledge_unowned": True},
            {"models": ["tight"], "chain": ["tight"], "acknowledge_unowned": True},
            {"models": ["metered"], "chain": ["metered"], "acknowledge_unowned": True},
            {"models": ["owing"], "chain": ["owing"], "acknowledge_unowned": True},
            {"models": ["dead"], "chain": ["dead"], "acknowledge_unowned": True},
            {"models": ["deaf"], "chain": ["deaf"], "acknowledge_unowned": True},
            {"models": ["weak"], "chain": ["weak"], "acknowledge_unowned": True},
            {"models": ["weak-or-dead"], "chain": ["weak", "dead"], "acknowledge_unowned": True},
            {"models": ["weak-or-owing"], "chain": ["weak", "owing"], "acknowledge_unowned": True},
        ],
        lanes=LANES,
    ) as stack, pressed(stack):  # fmt: skip
        yield stack


@contextlib.contextmanager
def pressed(stack: Stack) -> Iterator[None]:
    """Bring the stack into that state, and let go of it at the end."""
    with held(stack, key="sk-slots"), held(stack, model="tight"), held(stack, model="tight", headers=P2):
        until(lambda: waiting(stack) == 1)
        for _ in range(2):
            assert openai_raw(stack, Case("", 200, *BAD, key="sk-quota")).status_code == 200
        for model in ("metered", "owing"):
            debt = Case("", 200, *BAD, body={"model": model, "max_tokens": 5000})
            assert openai_raw(stack, debt).status_code == 200
        assert openai_raw(stack, Case("", 503, *BAD, body={"model": "dead"})).status_code == 503
        until(lambda: stack.state()["breakers"]["dead"]["state"] == "open")
        yield


def press_again(stack: Stack, case: Case) -> None:
    """What was pressed is at rest again by and by: nobody would be refused, or be told to wait for as long."""
    if case.reason == "tenant_quota":
        spend_quota(stack)
    elif case.reason == "deadline_unmeetable":
        indebt(stack, str(case.body["model"]))
    elif case.body.get("model") == "dead":
        until(lambda: float(stack.state()["breakers"]["dead"].get("rests_s", 0)) > 25, within_s=90)


def spend_quota(stack: Stack, most: float = 0.15) -> None:
    """Ask until the tenant has no more than this part of a request left."""

    def left() -> float:
        return float(stack.state()["counters"]["tenant/quota/requests"]["level"])

    while left() > most:
        until(lambda: left() >= 1, within_s=60)
        assert openai_raw(stack, Case("", 200, *BAD, key="sk-quota")).status_code == 200


def indebt(stack: Stack, model: str) -> None:
    """Let a bucket owe for half a minute: a large request may go when it is full."""

    def bucket() -> dict[str, Any]:
        return dict(stack.state()["counters"][f"upstream/{model}/*/total"])

    if bucket()["level"] > -2500:
        until(lambda: (now := bucket())["level"] >= now["capacity"], within_s=90)
        debt = Case("", 200, *BAD, body={"model": model, "max_tokens": 5000})
        assert openai_raw(stack, debt).status_code == 200
        until(lambda: bucket()["level"] < -2500)


class held:  # noqa: N801 - reads as the sentence it is
    """A request that stays where it is until the block ends; its client leaves then."""

    def __init__(
        self, stack: Stack, key: str = "sk-open", model: str = "gpt-5", headers: Mapping[str, str] = {}
    ) -> None:
        body = json.dumps(chat(model=model)).encode()
        given = {"x-api-key": key, "x-fake-fault": "slow-first-token;s=100", **headers}
        before = self._in(stack)
        self._connection = connect(stack)
        self._connection.sendall(written(body=body, headers=given))
        until(lambda: self._in(stack) == before + 1)

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    @staticmethod
    def _in(stack: Stack) -> int:
        return int(stack.state()["unsettled"])


def openai_raw(stack: Stack, case: Case, language: str = "") -> httpx.Response:
    return _post(stack, case, CHAT, {"authorization": f"Bearer {case.key}"}, language)


def anthropic_raw(stack: Stack, case: Case, language: str = "") -> httpx.Response:
    return _post(stack, case, MESSAGES, {"x-api-key": case.key, "anthropic-version": "2023-06-01"}, language)


def _post(stack: Stack, case: Case, path: str, headers: dict[str, str], language: str) -> httpx.Response:
    headers = {**headers, **case.headers, **({"accept-language": language} if language else {})}
    return HTTP.post(stack.url + path + case.path, json=chat(**case.body), headers=headers)


def openai_sdk(stack: Stack, case: Case, retries: int = 0) -> Exception:
    options: Any = {"headers": dict(case.headers), "timeout": 20.0}
    with (
        openai.OpenAI(base_url=f"{stack.url}/v1", api_key=case.key, max_retries=retries) as client,
        pytest.raises(openai.APIError) as caught,
    ):
        client.post(f"/chat/completions{case.path}", body=chat(**case.body), cast_to=object, options=options)
    return caught.value


def anthropic_sdk(stack: Stack, case: Case, retries: int = 0) -> Exception:
    options: Any = {"headers": dict(case.headers), "timeout": 20.0}
    with (
        anthropic.Anthropic(base_url=stack.url, api_key=case.key, max_retries=retries) as client,
        pytest.raises(anthropic.APIError) as caught,
    ):
        client.post(f"/v1/messages{case.path}", body=chat(**case.body), cast_to=object, options=options)
    return caught.value


@dataclass(frozen=True)
class Seen:
    """One refusal asked for in every way."""

    openai: httpx.Response
    anthropic: httpx.Response
    openai_chinese: httpx.Response
    anthropic_chinese: httpx.Response
    openai_error: openai.APIStatusError
    anthropic_error: anthropic.APIStatusError


def see(stack: Stack, case: Case) -> Seen:
    """Ask six times at once, because some refusals take their time."""
    asks: list[Callable[[], Any]] = [
        lambda: openai_raw(stack, case),
        lambda: anthropic_raw(stack, case),
        lambda: openai_raw(stack, case, CHINESE),
        lambda: anthropic_raw(stack, case, CHINESE),
        lambda: openai_sdk(stack, case),
        lambda: anthropic_sdk(stack, case),
    ]
    with ThreadPoolExecutor(len(asks)) as pool:
        return Seen(*pool.map(lambda ask: ask(), asks))


def check_headers(case: Case, response: httpx.Response) -> None:
    """The headers say why, and when a retry can help."""
    headers = response.headers
    assert response.status_code == case.status
    assert headers["x-tidegate-reason"] == case.reason
    assert headers["content-type"] == "application/json"
    if case.wait_s is None:
        assert headers["x-should-retry"] == "false"
        assert "retry-after" not in headers
        assert "retry-after-ms" not in headers
        return
    least, most = case.wait_s
    wait_ms, wait_s = int(headers["retry-after-ms"]), int(headers["retry-after"])
    assert headers["x-should-retry"] == "true"
    if case.reason in BY_ENVOY:
        assert (least, wait_s) == (wait_s, wait_ms // 1000)
        return
    assert least * 1000 <= wait_ms <= min(60_000, most * JITTER * 1000) + 1
    assert wait_s == math.ceil(wait_ms / 1000)


def check_bodies(case: Case, seen: Seen, *, identified: bool = True) -> None:
    """The bodies are of the caller's dialect, in its language, and name the reason; Anthropic's the request, too."""
    error = seen.openai.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "reason"}
    assert (error["type"], error["param"], error["code"]) == (case.openai_type, None, case.code)
    assert error["reason"] == case.reason
    body = seen.anthropic.json()
    assert set(body) == {"type", "error"} | ({"request_id"} if identified else set())
    assert body["type"] == "error"
    assert body.get("request_id", "none") != ""
    assert set(body["error"]) == {"type", "message", "reason"}
    assert (body["error"]["type"], body["error"]["reason"]) == (case.anthropic_type, case.reason)
    for english in (error["message"], body["error"]["message"]):
        assert english.isascii()
        assert english[0].isupper()
    for chinese in (seen.openai_chinese.json()["error"]["message"], seen.anthropic_chinese.json()["error"]["message"]):
        assert "。" in chinese


def check_errors(case: Case, seen: Seen) -> None:
    """The SDKs raise what their users catch, and what the refusal says can be read from it."""
    assert isinstance(seen.openai_error, case.openai_error)
    assert seen.openai_error.status_code == case.status
    assert seen.openai_error.code == case.code
    assert isinstance(seen.openai_error.body, dict)
    assert seen.openai_error.body["reason"] == case.reason
    assert isinstance(seen.anthropic_error, case.anthropic_error)
    assert seen.anthropic_error.status_code == case.status
    assert isinstance(seen.anthropic_error.body, dict)
    assert seen.anthropic_error.body["error"]["reason"] == case.reason


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_refusal_says_why_and_when_in_every_way_of_asking(stack: Stack, case: Case) -> None:
    """Status, headers, body and SDK exception are those of the table, in both dialects and both languages."""
    press_again(stack, case)
    seen = see(stack, case)
    for response in (seen.openai, seen.anthropic, seen.openai_chinese, seen.anthropic_chinese):
        check_headers(case, response)
    check_bodies(case, seen)
    check_errors(case, seen)


@pytest.mark.parametrize("case", [c for c in CASES if c.wait_s is None], ids=named)
def test_the_sdks_do_not_repeat_what_cannot_succeed(stack: Stack, case: Case) -> None:
    """With `x-should-retry: false` an SDK that would try three times tries once, whatever the status."""
    refused = stack.state()["tally"]["refused"].get(case.reason, 0)
    openai_sdk(stack, case, retries=2)
    anthropic_sdk(stack, case, retries=2)
    assert stack.state()["tally"]["refused"][case.reason] == refused + 2


def test_the_sdks_come_back_when_they_were_told_to(stack: Stack) -> None:
    """A refusal that names a second is repeated after that second and not before."""
    case = next(case for case in CASES if case.reason == "tenant_concurrency")
    refused = stack.state()["tally"]["refused"]["tenant_concurrency"]
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        asks = [pool.submit(openai_sdk, stack, case, 1), pool.submit(anthropic_sdk, stack, case, 1)]
        assert isinstance(asks[0].result(), openai.RateLimitError)
        assert isinstance(asks[1].result(), anthropic.RateLimitError)
    assert time.monotonic() - began >= 0.75  # the SDKs take up to a quarter off
    assert stack.state()["tally"]["refused"]["tenant_concurrency"] == refused + 4


def test_a_quota_refusal_shows_the_limits_of_its_tenant(stack: Stack) -> None:
    """The rate-limit headers are the tenant's own: size, what is left, and when it is full again in epoch seconds."""
    spend_quota(stack, most=0.9)
    headers = openai_raw(stack, next(case for case in CASES if case.reason == "tenant_quota")).headers
    now = time.time()
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert now + 25 <= int(headers["x-ratelimit-reset-requests"]) <= now + 61
    assert headers["x-ratelimit-limit-tokens"] == "6000"
    assert 5900 <= int(headers["x-ratelimit-remaining-tokens"]) <= 6000
    assert now - 1 <= int(headers["x-ratelimit-reset-tokens"]) <= now + 2
    for plain in ("limit", "remaining", "reset"):  # the tighter of the two
        assert headers[f"x-ratelimit-{plain}"] == headers[f"x-ratelimit-{plain}-requests"]


def test_an_exhausted_chain_tells_when_the_first_of_it_may_be_asked(stack: Stack) -> None:
    """Once the one that failed has rested as it would now, or sooner: when another one's rest is over, or its bucket
    holds enough.
    """

    def told(model: str) -> int:
        answer = openai_raw(stack, Case("", 503, *BAD, body={"model": model}, headers={**P0, "x-fake-fault": "503"}))
        assert answer.headers["x-tidegate-reason"] == "upstream_failed"
        return int(answer.headers["retry-after"])

    def rests_s() -> float:
        return float(stack.state()["breakers"]["dead"].get("rests_s", 0))

    assert told("weak") == 600
    indebt(stack, "owing")
    before = until(lambda: (now := rests_s()) > 20 and now, within_s=90)
    while_it_rests = told("weak-or-dead")
    assert rests_s() <= while_it_rests <= before + 1
    bucket = stack.state()["counters"]["upstream/owing/*/total"]
    computed = (16 + 10 - bucket["level"]) / bucket["per_second"]
    assert computed - 3 < told("weak-or-owing") < computed + 3


def test_a_wait_that_has_a_bucket_behind_it_is_computed_from_it(stack: Stack) -> None:
    """The time told is when the bucket will hold enough, later by a quarter at most, and not always the same."""
    case = next(case for case in CASES if case.reason == "deadline_unmeetable")
    case = replace(case, body={"model": "owing"})
    indebt(stack, "owing")
    bucket = stack.state()["counters"]["upstream/owing/*/total"]
    told = [int(openai_raw(stack, case).headers["retry-after-ms"]) / 1000 for _ in range(5)]
    size = 16 + 10  # max_tokens, and about as much prompt
    computed = (size - bucket["level"]) / bucket["per_second"] - LANES["P0"]["max_wait_s"] / 2
    others = 4 * size / bucket["per_second"]  # those who were told before the last of them have their turn first
    assert computed - 2 < min(told) <= max(told) < (computed + others) * JITTER + 1
    assert len(set(told)) > 1


def test_a_deadline_that_passes_in_line_is_a_deadline_passed(stack: Stack) -> None:
    """Who names its own deadline and waits until then is told that, not that the queue was slow; retrying is vain."""
    case = Case("deadline_passed", 504, *LATE, body={"model": "tight"}, headers={"x-request-timeout-ms": "300"})
    began = time.monotonic()
    check_headers(case, openai_raw(stack, case))
    assert 0.25 < time.monotonic() - began < LANES["P1"]["max_wait_s"] / 2


def test_a_dialect_that_no_upstream_speaks_is_refused_for_good(stack: Stack) -> None:
    """No retry can help where the whole chain speaks another API: nobody is told to come back."""
    case = Case("no_upstream", 503, *BUSY_503, body={"model": "deaf"})
    check_headers(case, anthropic_raw(stack, case))


def test_a_refusal_is_told_in_anthropics_words_on_paths_that_are_not_priced(stack: Stack) -> None:
    """A caller of the Anthropic API gets its dialect on every path under /v1/messages, exhausted chains included."""
    headers = {"x-api-key": "sk-open", "anthropic-version": "2023-06-01", "x-fake-fault": "503"}
    for path in (f"{MESSAGES}/batches", f"{MESSAGES}/nothing", f"{MESSAGES}/count_tokens"):
        answer = HTTP.post(stack.url + path, json=chat(), headers=headers)
        assert answer.json()["type"] == "error", path


PRIVATE = ("org-fake", "api key", "api_key", "x-api-key", "quota", "credit", "billing", "does not have access")


@pytest.mark.parametrize(
    "fault", ["401", "403", "billing", "429;retry-after=37", "429-bare", "529", "500", "error-200"]
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_what_a_provider_says_of_our_account_stays_inside(stack: Stack, fault: str, path: str) -> None:
    """Our key, our credit and our rate limit are ours: the caller reads that every upstream failed, in our words."""
    headers = {"x-api-key": "sk-open", "x-fake-fault": fault}
    answer = HTTP.post(stack.url + path, json=chat(), headers=headers)
    assert answer.status_code == 503
    assert answer.headers["x-tidegate-reason"] == "upstream_failed"
    assert answer.headers["retry-after"] == "5"
    said = (str(answer.headers.multi_items()) + answer.text).lower()
    assert not [word for word in PRIVATE if word in said]
    assert not foreign(answer)


def foreign(answer: httpx.Response) -> list[str]:
    """Headers of an answer that tell of a provider's limits."""
    words = ("ratelimit", "retry-after", "tokenlimit", "x-tg-")
    ours = {"retry-after", "retry-after-ms"} if "x-tidegate-reason" in answer.headers else set()
    return [name for name in answer.headers if any(word in name for word in words) and name not in ours]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["json", "stream"])
def test_a_providers_limits_are_not_the_callers(stack: Stack, path: str, more: dict[str, Any]) -> None:
    """Rate-limit headers, on good answers and on honest errors, are about our account and do not reach the caller."""
    headers = {"x-api-key": "sk-open"}
    good = HTTP.post(stack.url + path, json=chat(**more), headers=headers)
    assert good.status_code == 200
    assert not foreign(good)
    honest = HTTP.post(stack.url + path, json=chat(**more), headers={**headers, "x-fake-fault": "context-length"})
    assert honest.status_code == 400
    assert "x-tidegate-reason" not in honest.headers
    assert not foreign(honest)


def test_an_honest_error_of_a_provider_is_not_dressed_up_as_ours(stack: Stack) -> None:
    """A prompt that is too long for the model is the caller's to know, in the provider's own words and status."""
    answer = openai_raw(stack, Case("", 400, *BAD, headers={"x-fake-fault": "context-length"}))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "reason" not in answer.json()["error"]


# A stack that goes away, with statuses of its own.

STATUSES = {
    "draining": 529, "not_found": 410, "upstream_failed": 502, "admission_unavailable": 599, "too_large": 422,
    "bad_request": 422, "deadline_passed": 408,
}  # fmt: skip


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Other statuses than the table's."""
    with running(
        tmp_path_factory.mktemp("changed"),
        upstreams={"main": {"concurrency": 50, "breaker": NEVER_OPENS}},
        statuses=STATUSES,
        flood={"per_key_rps": 3, "burst_s": 6},
        gateway={"max_body_bytes": 10_000},
    ) as stack:
        yield stack


@pytest.mark.parametrize(
    ("reason", "case"),
    [
        ("not_found", Case("not_found", 410, *BAD, path=";no")),
        ("bad_request", Case("bad_request", 422, *BAD, body={"messages": "hello"})),
        ("deadline_passed", Case("deadline_passed", 408, *BAD, headers={"x-request-timeout-ms": "0"})),
        ("upstream_failed", Case("upstream_failed", 502, *BAD, headers={"x-fake-fault": "500"})),
        ("too_large", Case("too_large", 422, *BAD, body={"user": "x" * 20_000})),
    ],
)
def test_statuses_are_the_operators_to_choose(changed: Stack, reason: str, case: Case) -> None:
    """`statuses:` changes the status of a reason and nothing else, whether the service refuses or Envoy."""
    for answer in (openai_raw(changed, case), anthropic_raw(changed, case)):
        assert answer.status_code == STATUSES[reason]
        assert answer.headers["x-tidegate-reason"] == reason
        error = answer.json()["error"]
        assert error["reason"] == reason


def test_a_flood_is_stopped_at_the_door_in_the_callers_dialect(changed: Stack) -> None:
    """More requests a second than one key may send: Envoy says so by itself, before the service is asked."""
    flood = Case("", 200, *BAD, key="sk-flood")
    for ask in (openai_raw, anthropic_raw):
        with ThreadPoolExecutor(30) as pool:
            answers = list(pool.map(partial(ask, changed), [flood] * 100))
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["x-tidegate-reason"] == "tenant_quota"
        assert refused.json()["error"]["reason"] == "tenant_quota"
        assert (refused.headers["retry-after"], refused.headers["x-should-retry"]) == ("1", "true")
    assert openai_raw(changed, Case("", 200, *BAD)).status_code == 200
    assert "tenant_quota" not in changed.state()["tally"]["refused"]


@pytest.fixture(scope="module")
def leaving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A small stack whose service comes and goes."""
    upstreams, service = {"main": {"concurrency": 1}}, {"drain_s": 30}
    with running(tmp_path_factory.mktemp("leaving"), upstreams=upstreams, lanes=LANES, service=service) as stack:
        yield stack


def test_a_service_that_drains_sends_newcomers_away_for_a_second(leaving: Stack) -> None:
    """SIGTERM: running answers end well, newcomers and waiters are told to come back after a second."""
    case = Case("draining", 503, *BUSY_503, wait_s=(1.0, 1.0))
    service = leaving.processes["service"]
    with ThreadPoolExecutor(2) as pool:
        slow = Case("", 200, *BAD, headers={"x-fake-fault": "slow-first-token;s=5"})
        running_answer = pool.submit(openai_raw, leaving, slow)
        until(lambda: leaving.state()["unsettled"] == 1)
        waiter = pool.submit(openai_raw, leaving, case)
        until(lambda: waiting(leaving) == 1)
        leaving.kill("service", signal.SIGTERM)
        until(lambda: leaving.state()["draining"])
        seen = see(leaving, case)
        for response in (waiter.result(), seen.openai, seen.anthropic, seen.openai_chinese, seen.anthropic_chinese):
            check_headers(case, response)
        check_bodies(case, seen)
        check_errors(case, seen)
        assert running_answer.result().status_code == 200
    assert service.wait(60) == 0
    leaving.start_service()
    served(leaving)


def test_without_the_service_envoy_refuses_in_the_callers_dialect(leaving: Stack) -> None:
    """A killed service is `admission_unavailable` from Envoy itself, nothing passes unmetered, and it heals."""
    leaving.kill("service")
    forget(leaving)
    case = Case("admission_unavailable", 503, *BUSY_503, wait_s=(2.0, 2.0))
    seen = see(leaving, case)
    for response in (seen.openai, seen.anthropic, seen.openai_chinese, seen.anthropic_chinese):
        check_headers(case, response)
    # Older Envoys put nothing into the body of a route's own answer.
    check_bodies(case, seen, identified=leaving.settings.gateway.profile != "classic")
    check_errors(case, seen)
    for path in ("/v1/models", "/v1/files", "/v1/messages/batches"):
        assert HTTP.get(leaving.url + path).headers["x-tidegate-reason"] == "admission_unavailable"
    assert leaving.record("main")["requests"] == []
    leaving.start_service()
    served(leaving)


def served(stack: Stack) -> None:
    """Envoy has noticed that the service is back."""
    until(lambda: openai_raw(stack, Case("", 200, *BAD)).status_code == 200, every_s=0.1)
