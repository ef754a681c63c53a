"""Refusals as clients get them, and what the SDKs make of them."""

import json

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.refusal import RULES, Reason, Refusal, Window
from extproc.core.request import Dialect
from extproc.dialects import message_of, refuse

NOW = 1_800_000_000.0
RETRYABLE = [reason for reason, rule in RULES.items() if rule.retry]
FINAL = [reason for reason, rule in RULES.items() if not rule.retry]


def written(reason, retry_after=None, dialect=Dialect.OPENAI, jitter=0.0, status=None, **more):
    """Write a refusal; return its headers and its parsed body."""
    refusal = Refusal(reason, status or RULES[reason].status, retry_after, **more)
    headers, body = refuse(dialect, refusal, now=NOW, jitter=jitter, request_id="req_1")
    assert len(dict(headers)) == len(headers)
    return dict(headers), json.loads(body)


def test_an_openai_refusal():
    """Type, code and reason say what happened, and the message says it to a person."""
    headers, body = written(Reason.QUEUE_TIMEOUT, 12.0, detail="waited 30 s in P1")
    assert body == {
        "error": {
            "message": "The service is busy and your request has waited as long as it may; "
            "please try again in 12 seconds. (waited 30 s in P1)",
            "type": "server_busy",
            "param": None,
            "code": "RATE_LIMIT_EXCEEDED",
            "reason": "queue_timeout",
        }
    }
    assert headers == {
        "content-type": "application/json",
        "x-tidegate-reason": "queue_timeout",
        "retry-after": "12",
        "retry-after-ms": "12000",
        "x-should-retry": "true",
        "x-request-id": "req_1",
        "x-tidegate-request-id": "req_1",
    }


@pytest.mark.parametrize("name", ["", "x" * 129, "a\r\nset-cookie: b", "名", "\ud800", "\x7f"])
def test_an_id_that_is_no_id_is_not_sent_back(name):
    """Headers are for plain words."""
    refusal = Refusal(Reason.LANE_FULL, 503, 1.0)
    headers, _ = refuse(Dialect.OPENAI, refusal, now=NOW, jitter=0.0, request_id=name)
    assert not {"x-request-id", "x-tidegate-request-id"} & dict(headers).keys()


@pytest.mark.parametrize("dialect", Dialect)
def test_an_sdk_finds_the_id_where_it_looks(dialect):
    """OpenAI's by `x-request-id`, Anthropic's by `request-id`."""
    headers, _ = written(Reason.LANE_FULL, 1.0, dialect)
    assert headers["x-request-id"] == "req_1"
    assert headers.get("request-id") == ("req_1" if dialect is Dialect.ANTHROPIC else None)


def test_an_anthropic_refusal():
    """The shape that Anthropic's SDK expects, with our reason in it."""
    _, body = written(Reason.TENANT_QUOTA, 2.0, Dialect.ANTHROPIC)
    assert body == {
        "type": "error",
        "error": {
            "type": "rate_limit_error",
            "message": "Your quota is used up for the moment; please try again in 2 seconds.",
            "reason": "tenant_quota",
        },
        "request_id": "req_1",
    }


@pytest.mark.parametrize(
    ("reason", "status", "kind", "code", "anthropic_kind"),
    [
        (Reason.TENANT_QUOTA, 429, "server_busy", "RATE_LIMIT_EXCEEDED", "rate_limit_error"),
        (Reason.LANE_FULL, 503, "server_busy", "SERVER_OVERLOADED", "overloaded_error"),
        (Reason.LANE_FULL, 529, "server_busy", "SERVER_OVERLOADED", "overloaded_error"),
        (Reason.DEADLINE_PASSED, 504, "server_error", "DEADLINE_PASSED", "timeout_error"),
        (Reason.SESSION_BUDGET, 403, "insufficient_quota", "BUDGET_EXHAUSTED", "permission_error"),
        (Reason.SPEND_BUDGET, 402, "insufficient_quota", "BUDGET_EXHAUSTED", "billing_error"),
        (Reason.TOO_LARGE, 413, "invalid_request_error", "TOO_LARGE", "invalid_request_error"),
        (Reason.UNAUTHENTICATED, 401, "authentication_error", "UNAUTHENTICATED", "authentication_error"),
        (Reason.FORBIDDEN, 403, "permission_error", "FORBIDDEN", "permission_error"),
        (Reason.UNKNOWN_MODEL, 404, "invalid_request_error", "UNKNOWN_MODEL", "not_found_error"),
        (Reason.BAD_REQUEST, 400, "invalid_request_error", "BAD_REQUEST", "invalid_request_error"),
        (Reason.UPSTREAM_FAILED, 502, "server_error", "UPSTREAM_FAILED", "api_error"),
    ],
)
def test_types_and_codes(reason, status, kind, code, anthropic_kind):
    """They follow the status, which settings may change; a spent budget stays a spent budget."""
    _, body = written(reason, status=status)
    assert (body["error"]["type"], body["error"]["code"]) == (kind, code)
    assert written(reason, None, Dialect.ANTHROPIC, status=status)[1]["error"]["type"] == anthropic_kind


@pytest.mark.parametrize(
    ("wait", "jitter", "seconds", "milliseconds", "again"),
    [
        (0.0, 0.0, "1", "1", "true"),
        (0.2, 0.0, "1", "200", "true"),
        (10.0, 0.0, "10", "10000", "true"),
        (10.0, 0.5, "12", "11250", "true"),
        (10.0001, 0.0, "11", "10001", "true"),
        (59.0, 0.99, "60", "60000", "true"),
        (60.0, 0.99, "60", "60000", "true"),
        (61.0, 0.0, "61", "61000", "false"),
        (100.0, 0.5, "113", "112500", "false"),
        (-5.0, 0.0, "1", "1", "true"),
    ],
)
def test_waiting_times(wait, jitter, seconds, milliseconds, again):
    """Never earlier than computed, never across the minute by jitter alone, never obeyed beyond it."""
    headers, _ = written(Reason.LANE_FULL, wait, jitter=jitter)
    assert (headers["retry-after"], headers["retry-after-ms"], headers["x-should-retry"]) == (
        seconds,
        milliseconds,
        again,
    )


@pytest.mark.parametrize("wait", [None, float("nan"), float("inf"), 1e305])
@pytest.mark.parametrize("reason", RETRYABLE)
def test_no_known_time_means_no_retry(reason, wait):
    """Without a time to come back at, coming back is guesswork."""
    headers, body = written(reason, wait)
    assert headers["x-should-retry"] == "false"
    assert "retry-after" not in headers
    assert "try again" not in body["error"]["message"]


@pytest.mark.parametrize("reason", FINAL)
def test_what_no_retry_can_help_says_so(reason):
    """Even if a time was given."""
    headers, body = written(reason, 5.0)
    assert headers["x-should-retry"] == "false"
    assert "retry-after" not in headers
    assert "try again" not in body["error"]["message"]


def test_limits_are_shown_where_known():
    """The plain names show the tighter limit; resets are epoch seconds."""
    tokens, requests = Window(10_000, 0, 6.5), Window(100, 40, 60.0)
    headers, _ = written(Reason.TENANT_QUOTA, 7.0, tokens=tokens, requests=requests)
    assert {name: value for name, value in headers.items() if name.startswith("x-ratelimit")} == {
        "x-ratelimit-limit": "10000",
        "x-ratelimit-remaining": "0",
        "x-ratelimit-reset": "1800000007",
        "x-ratelimit-limit-tokens": "10000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1800000007",
        "x-ratelimit-limit-requests": "100",
        "x-ratelimit-remaining-requests": "40",
        "x-ratelimit-reset-requests": "1800000060",
    }
    alone, _ = written(Reason.TENANT_QUOTA, 7.0, requests=Window(0, -3, float("inf")))
    assert alone["x-ratelimit-limit"] == alone["x-ratelimit-limit-requests"] == "0"
    assert alone["x-ratelimit-remaining"] == "0"
    assert alone["x-ratelimit-reset"] == "1800000000"
    assert "x-ratelimit-limit-tokens" not in alone


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_sentence_in_both_languages(reason):
    """One sentence each, friendly, ended once, with the time where a retry helps."""
    for tongue, stop in (("en", "."), ("zh", "。")):
        plain, timed = message_of(reason, tongue, None), message_of(reason, tongue, 12)
        assert plain.endswith(stop)
        assert plain.count(stop) == timed.count(stop) == 1
        assert ("12" in timed) is RULES[reason].retry
        assert plain.isascii() is (tongue == "en")


@pytest.mark.parametrize(
    ("seconds", "english", "chinese"),
    [
        (0, "1 second.", "1 秒后"),
        (1, "1 second.", "1 秒后"),
        (1.2, "2 seconds.", "2 秒后"),
        (89, "89 seconds.", "89 秒后"),
        (90, "2 minutes.", "2 分钟后"),
        (3_600, "60 minutes.", "60 分钟后"),
        (86_400, "24 hours.", "24 小时后"),
    ],
)
def test_times_are_said_the_way_people_say_them(seconds, english, chinese):
    """Rounded up, in the unit that is easiest to grasp."""
    assert message_of(Reason.DRAINING, "en", seconds).endswith(f"please try again in {english}")
    assert chinese in message_of(Reason.DRAINING, "zh", seconds)


def test_the_caller_is_answered_in_chinese():
    """Readable as it is, without escapes."""
    refusal = Refusal(Reason.LANE_FULL, 503, 3.0)
    _, body = refuse(Dialect.OPENAI, refusal, language="zh", now=NOW, jitter=0.0)
    assert "3 秒后重试" in body.decode()


@given(st.sampled_from(list(Reason)), st.text() | st.just('\ud800\x00\r\n"}'), st.text(), st.floats(), st.floats(0, 1))
def test_the_body_is_json_whatever_is_put_into_it(reason, detail, request_id, wait, jitter):
    """Details and ids may come from clients; headers never carry them."""
    refusal = Refusal(reason, RULES[reason].status, wait, detail)
    for dialect in Dialect:
        headers, body = refuse(dialect, refusal, request_id=request_id, now=NOW, jitter=jitter)
        assert json.loads(body)["error"]["reason"] == reason
        assert all(value.isascii() and value.isprintable() for _, value in headers)


class TestSdk:
    """The official SDKs, answered with our refusals."""

    def test_openai_comes_back_when_told(self, openai_answered):
        """A short wait is obeyed, and the error has our code."""
        refusal = Refusal(Reason.TENANT_QUOTA, 429, 0.001)
        headers, body = refuse(Dialect.OPENAI, refusal, now=NOW, jitter=0.0)
        asked = []
        with openai_answered(429, headers, body, asked=asked) as client, pytest.raises(openai.RateLimitError) as caught:
            client.models.list()
        assert len(asked) == 2
        assert (caught.value.code, caught.value.type) == ("RATE_LIMIT_EXCEEDED", "server_busy")

    def test_openai_stays_away_when_told(self, openai_answered):
        """A status that it would retry is not retried."""
        headers, body = refuse(Dialect.OPENAI, Refusal(Reason.NO_UPSTREAM, 503, 300.0), now=NOW, jitter=0.5)
        asked = []
        with openai_answered(503, headers, body, asked=asked) as client, pytest.raises(openai.InternalServerError):
            client.models.list()
        assert len(asked) == 1

    def test_anthropic_reads_our_errors(self, anthropic_answered):
        """Its own exception, with our message."""
        refusal = Refusal(Reason.SESSION_BUDGET, 403, None, "spent 1,000 of 1,000 tokens")
        headers, body = refuse(Dialect.ANTHROPIC, refusal, now=NOW, jitter=0.0)
        asked = []
        told = pytest.raises(anthropic.PermissionDeniedError, match="spent its whole budget")
        with anthropic_answered(403, headers, body, asked=asked) as client, told:
            client.models.list()
        assert len(asked) == 1
