"""What each upstream is sent and what its answer leads to, in any order of upstreams, on a real Envoy."""

from __future__ import annotations

import itertools
import json
import threading
import time
from typing import Any

import pytest

from tests.render.rig import Envoy, Got, Reply, Seen, Upstream, admitted, answer

pytestmark = pytest.mark.e2e

Ups = dict[str, Upstream]

WIDTH = 40
HEADS = {"a": '{"model":"gpt-5 \\" \\\\ quoted"', "b": '{"model":"claude"', "c": '{"mod\\u0065l":"qwen","priority":3'}
REST = b',"messages":[{"model":"nested","content":"\\"model\\":\\"x\\" \xe6\xbc\xa2"}],"model2":1}'
FAILED = answer({"error": {"type": "server_error", "code": "oops"}}, 503)
FAIL: dict[str, Any] = {"fail_body": '{"said": "at dispatch, 漢"}', "fail_retry": "9"}


def body_of(name: str) -> bytes:
    return HEADS[name].encode().ljust(WIDTH) + REST


def send(gateway: Envoy, *order: str, headers: dict[str, str] | None = None, body: bytes = b"{}", **words: Any) -> Got:
    return gateway.call(body=body, headers={**admitted(*order, **words), **(headers or {})})


@pytest.mark.parametrize("order", list(itertools.permutations("abc")), ids="".join)
def test_every_upstream_sees_only_its_own(gateway: Envoy, ups: Ups, order: tuple[str, ...]) -> None:
    """Decision 11: path, host, key and model of each upstream, whichever came before it; the caller's keys never."""
    for name in order[:-1]:
        ups[name].reply = FAILED
    theirs = {"authorization": "Bearer theirs", "x-api-key": "theirs", "api-key": "theirs", "cookie": "theirs=1"}
    more = {"x-goog-api-key": "theirs", "openai-organization": "theirs", "x-request-timeout-ms": "1"}
    got = send(
        gateway, *order, headers={**theirs, **more}, body=body_of(order[0]), heads=HEADS, width=WIDTH, deadline_ms=4500
    )
    assert got.status == 200
    for name in order:
        (seen,) = ups[name].seen
        assert seen.body == body_of(name)
        assert seen.get("content-length") == str(len(seen.body))
        assert seen.get("host") == f"127.0.0.1:{ups[name].port}"
        assert "theirs" not in str(seen.headers)
    a, b, c = (ups[name].seen[0] for name in "abc")
    assert (a.path, a.get("authorization"), a.get("x-api-key")) == ("/openai/v1/chat/completions", "Bearer sk-a", None)
    assert (b.path, b.get("authorization"), b.get("x-api-key")) == ("/v1/chat/completions", None, "sk-b")
    assert (c.path, c.get("authorization"), c.get("x-api-key")) == ("/v1/chat/completions", None, None)
    assert [x.get("x-request-timeout-ms") for x in (a, b)] == [None, None]
    assert 3000 < int(c.get("x-request-timeout-ms") or 0) <= 4500  # what is left of it when its turn comes


def test_nothing_of_the_gateway_is_told_to_upstreams(gateway: Envoy, ups: Ups) -> None:
    """Neither who the caller is, nor Envoy's own headers, nor an encoding that nobody could read."""
    send(gateway, "a", headers={"x-forwarded-for": "9.9.9.9", "accept-encoding": "gzip", "x-own": "1"})
    names = {name for name, _ in ups["a"].seen[0].headers}
    assert names == {"host", "content-length", "x-request-id", "authorization", "x-own"}


def test_the_anthropic_version_of_the_caller_survives_and_has_a_default(gateway: Envoy, ups: Ups) -> None:
    ups["a"].reply = FAILED
    send(gateway, "a", "b", headers={"anthropic-version": "2099-01-01"})
    assert ups["b"].seen[0].get("anthropic-version") == "2099-01-01"
    send(gateway, "b")
    assert ups["b"].seen[1].get("anthropic-version") == "2023-06-01"


def test_without_heads_the_body_stays(gateway: Envoy, ups: Ups) -> None:
    send(gateway, "a", body=b"no head here at all, and it is not even JSON")
    send(gateway, "a", body=b"short", heads=HEADS, width=WIDTH)
    assert [seen.body for seen in ups["a"].seen] == [b"no head here at all, and it is not even JSON", b"short"]


def test_a_large_body_fails_over_whole(gateway: Envoy, ups: Ups) -> None:
    """Envoy gives up retries of a body beyond its buffer limit without a word."""
    ups["a"].reply = FAILED
    body = body_of("a") + b"x" * 900_000
    assert send(gateway, "a", "b", body=body, heads=HEADS, width=WIDTH).status == 200
    assert ups["b"].seen[0].body == body_of("b") + b"x" * 900_000


def test_queries_are_kept_and_only_the_gateways_own_prefix_is_replaced(gateway: Envoy, ups: Ups) -> None:
    for path in ("/v1/responses?x=%2Fv1/y", "/v1?z", "/v1", "/v1x/y"):
        send(gateway, "a", path=path)
    assert [seen.path for seen in ups["a"].seen] == [
        "/openai/v1/responses?x=%2Fv1/y",
        "/openai/v1?z",
        "/openai/v1",
        "/v1x/y",
    ]


# -------------------------------------------------------------------------------------------- failover


@pytest.mark.parametrize(
    "reply",
    [
        FAILED,
        answer({}, 500),
        answer({}, 529),
        answer({}, 429),
        Reply(reset=True),
        Reply(503, {"content-type": "text/html"}, b"<p>"),
    ],
)
def test_pace_overload_and_broken_connections_go_on(gateway: Envoy, ups: Ups, reply: Reply) -> None:
    """And the caller of internal headers is told who served, after how many attempts (decision 6)."""
    ups["a"].reply = reply
    got = send(gateway, "a", "b", queue_ms="12")
    assert (got.status, got.get("x-tidegate-upstream"), got.get("x-tidegate-attempts")) == (200, "b", "2")
    assert got.get("x-tidegate-queue-ms") == "12"


@pytest.mark.parametrize("gone", ["dead", "lost"])
def test_an_upstream_that_is_not_there_is_passed_over(gateway: Envoy, ups: Ups, gone: str) -> None:
    """Also one whose name has no address: a cluster without hosts would end the request."""
    assert send(gateway, gone, "c").get("x-tidegate-upstream") == "c"
    assert ups["c"].seen


def test_a_crowd_of_failovers_all_succeed(gateway: Envoy, ups: Ups) -> None:
    """Decision 2: Envoy's default of three retries at a time would lose most of them."""
    ups["a"].reply = Reply(503, {}, b"", delay_s=0.2)
    ups["b"].reply = Reply(200, {}, b"", delay_s=0.2)
    found: list[int] = []
    crowd = [threading.Thread(target=lambda: found.append(send(gateway, "a", "b").status)) for _ in range(40)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert found == [200] * 40


def test_the_order_ends_where_admission_said(gateway: Envoy, ups: Ups) -> None:
    ups["a"].reply = FAILED
    assert send(gateway, "a", **FAIL).status == 503
    assert not ups["b"].seen
    assert not ups["c"].seen


@pytest.mark.parametrize("order", [("a",), ("a", "b", "c"), ("dead",), ("b", "dead")])
def test_when_all_failed_the_caller_reads_what_dispatch_wrote(gateway: Envoy, ups: Ups, order: tuple[str, ...]) -> None:
    """Decision 6, for failures of upstreams and for those that Envoy itself answers."""
    for name in "abc":
        ups[name].reply = FAILED
    got = send(gateway, *order, **FAIL)
    assert (got.status, got.json(), got.get("content-type")) == (503, {"said": "at dispatch, 漢"}, "application/json")
    assert (got.get("retry-after"), got.get("x-should-retry")) == ("9", "true")
    assert got.get("x-tidegate-reason") == "upstream_failed"
    assert got.get("x-tidegate-upstream") == order[-1]


@pytest.mark.parametrize(("path", "kind"), [("/v1/chat/completions", None), ("/v1/messages", "error")])
def test_all_failed_is_sensible_without_words_from_dispatch(
    gateway: Envoy, ups: Ups, path: str, kind: str | None
) -> None:
    """Although an attempt leaves its own upstream's path behind."""
    ups["a"].reply = FAILED
    dialect = "anthropic" if kind else "openai"
    got = gateway.call(path, headers=admitted("a", path=path, dialect=dialect))
    assert (got.status, got.get("retry-after")) == (503, "2")
    assert (got.json().get("type"), got.json()["error"]["reason"]) == (kind, "upstream_failed")


# --------------------------------------------------------------------------------------- error classes

OPENAI_CREDIT = {
    "error": {"message": "You exceeded your current quota", "type": "insufficient_quota", "code": "insufficient_quota"}
}
ANTHROPIC_CREDIT = {
    "type": "error",
    "error": {"type": "invalid_request_error", "message": "Your credit balance is too low to access the API."},
}
LONG_PROMPT = {
    "type": "error",
    "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8"},
}
GEMINI_KEY = [{"error": {"code": 400, "message": "API key not valid. Please pass one.", "status": "INVALID_ARGUMENT"}}]

OURS = [
    answer({"error": {"message": "Incorrect API key provided: sk-a", "code": "invalid_api_key"}}, 401),
    answer({"detail": "no"}, 403),
    Reply(401, {"content-type": "text/plain"}, b"go away"),
    answer({"error": {"message": "Insufficient Balance"}}, 402),
    answer(OPENAI_CREDIT, 429),
    answer(OPENAI_CREDIT, 400),
    answer(ANTHROPIC_CREDIT, 400),
    answer(GEMINI_KEY, 400),
]
ELSEWHERE = [
    answer({"error": {"message": "no such model", "type": "invalid_request_error", "code": "model_not_found"}}, 404),
    answer({"error": {"code": "context_length_exceeded", "type": "invalid_request_error"}}, 400),
    answer(
        {
            "object": "error",
            "message": "This model's maximum context length is 8",
            "type": "BadRequestError",
            "code": 400,
        },
        400,
    ),
    answer(LONG_PROMPT, 400),
    answer({"type": "error", "error": {"type": "request_too_large", "message": "big"}}, 413),
]
HONEST = [
    answer({"error": {"message": "messages is missing", "type": "invalid_request_error", "code": None}}, 400),
    answer({"error": {"message": "unsupported", "code": "unsupported_value"}}, 422),
    answer({}, 409),
]


@pytest.mark.parametrize("reply", [*OURS, *ELSEWHERE])
def test_errors_that_another_upstream_need_not_have_go_on(gateway: Envoy, ups: Ups, reply: Reply) -> None:
    """Decision 8."""
    ups["a"].reply = reply
    assert send(gateway, "a", "b").get("x-tidegate-upstream") == "b"


@pytest.mark.parametrize("reply", OURS)
def test_what_speaks_of_our_account_never_reaches_a_caller(gateway: Envoy, ups: Ups, reply: Reply) -> None:
    ups["a"].reply = reply
    got = send(gateway, "a", **FAIL)
    assert (got.status, got.json()) == (503, {"said": "at dispatch, 漢"})


@pytest.mark.parametrize("reply", [*ELSEWHERE, *HONEST])
def test_the_last_upstreams_honest_error_reaches_the_caller(gateway: Envoy, ups: Ups, reply: Reply) -> None:
    """Unchanged, and without our own notes on it."""
    ups["a"].reply = reply
    got = send(gateway, "a", **FAIL)
    assert (got.status, got.body) == (reply.status, reply.body)
    assert got.get("x-tg-err") is got.get("x-tg-status") is got.get("x-tidegate-reason") is None


@pytest.mark.parametrize("reply", HONEST)
def test_a_clients_own_error_is_not_tried_elsewhere(gateway: Envoy, ups: Ups, reply: Reply) -> None:
    ups["a"].reply = reply
    assert send(gateway, "a", "b").status == reply.status
    assert not ups["b"].seen


WRONG = [
    answer({"error": {"message": "upstream overloaded", "code": 502}}),
    answer({"error": "overloaded"}),
    Reply(body=b'{"choices": [{"message": {"content": "cut sho'),
    Reply(body=b""),
    Reply(body=b"<html>"),
]


@pytest.mark.parametrize("reply", WRONG)
def test_failures_that_look_like_success_go_on(gateway: Envoy, ups: Ups, reply: Reply) -> None:
    """An error object, half an answer or no answer under 200."""
    ups["a"].reply = reply
    assert send(gateway, "a", "b").get("x-tidegate-upstream") == "b"


@pytest.mark.parametrize("reply", WRONG[:2])
def test_an_error_under_200_is_an_error_to_the_caller(gateway: Envoy, ups: Ups, reply: Reply) -> None:
    ups["a"].reply = reply
    assert send(gateway, "a", **FAIL).status == 503


def test_an_answer_that_quotes_errors_is_an_answer(gateway: Envoy, ups: Ups) -> None:
    """Only the answer's own member counts, however often the text says error."""
    text = '{"error": {"code": "insufficient_quota"}} "error":{'
    for members in ({"error": None}, {"metadata": {"error": {"type": "x"}}}):
        ups["a"].reply = answer({**members, "choices": [{"message": {"content": text}, "finish_reason": "stop"}]})
        assert send(gateway, "a", "b").get("x-tidegate-upstream") == "a"


# ---------------------------------------------------------------------------------------------- timing


def test_an_attempt_without_headers_in_time_goes_on(gateway: Envoy, ups: Ups) -> None:
    """Decision 10: the header that admission sets is obeyed although such headers are suppressed elsewhere."""
    ups["a"].reply = Reply(delay_s=1.5)
    began = time.monotonic()
    assert send(gateway, "a", "b", per_try_ms=200).get("x-tidegate-upstream") == "b"
    assert 0.1 < time.monotonic() - began < 1.4


def test_whole_answers_may_be_silent(gateway: Envoy, ups: Ups) -> None:
    """A JSON answer is silent until it is there; the stall of streams, here 0.5 s, does not count for it."""
    ups["a"].reply = Reply(body=json.dumps({"choices": [{"text": "a"}]}).encode(), delay_s=1.2)
    assert send(gateway, "a", "b").get("x-tidegate-upstream") == "a"


def test_large_answers_pass_whole_up_to_the_limit(gateway: Envoy, ups: Ups) -> None:
    """Read whole by the upstream's filters, whose limit is not that of requests; and read slowly by the caller."""
    ups["a"].reply = answer({"choices": [], "filling": "x" * 3_900_000})
    got = send(gateway, "a")
    assert (got.status, got.whole) == (200, True)
    ups["a"].reply = answer({"choices": [], "filling": "x" * 4_100_000})
    assert send(gateway, "a").status == 503


def test_limits_of_our_account_are_kept_from_the_caller(gateway: Envoy, ups: Ups) -> None:
    limits = {
        "x_ratelimit_remaining_tokens": "9",
        "anthropic_ratelimit_tokens_limit": "8",
        "x_other": "7",
        "set_cookie": "a=b",
    }
    for status in (200, 400):
        ups["a"].reply = answer({"choices": []}, status, **limits)
        got = send(gateway, "a")
        names = {name.lower() for name, _ in got.headers}
        assert got.get("x-other") == "7"
        assert not {name for name in names if "ratelimit" in name or "cookie" in name}
    assert got.get("server") == "tidegate"


def test_seen_is_complete() -> None:
    """The rig itself: a header that is repeated does not hide."""
    seen = Seen("GET", "/", [("a", "1"), ("a", "2")], b"")
    with pytest.raises(AssertionError):
        seen.get("a")
