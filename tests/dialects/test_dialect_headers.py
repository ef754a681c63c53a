"""What request headers say, and that hostile ones never raise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.dialects import header_sessions, idempotency_key, language, retry_count, timeouts
from extproc.dialects.headers import SDK_MARGIN_S


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"x-request-timeout-ms": "1500"}, 1.5),
        ({"x-request-timeout-ms": " 250.5 "}, 0.2505),
        ({"x-request-timeout-ms": "0"}, 0.0),
        ({"x-request-timeout-ms": "-1"}, 0.0),
        ({"grpc-timeout": "250m"}, 0.25),
        ({"grpc-timeout": "10S"}, 10.0),
        ({"grpc-timeout": "1M"}, 60.0),
        ({"grpc-timeout": "2H"}, 7200.0),
        ({"grpc-timeout": "500000u"}, 0.5),
        ({"grpc-timeout": "0S"}, 0.0),
        # an SDK gives up a moment before we tell it to
        ({"x-stainless-timeout": "600"}, 600.0 + SDK_MARGIN_S),
        ({"x-stainless-read-timeout": "5.0"}, 5.0 + SDK_MARGIN_S),
        ({"x-stainless-timeout": "600", "x-stainless-read-timeout": "5"}, 5.0 + SDK_MARGIN_S),
        ({"x-stainless-timeout": "600", "grpc-timeout": "1S", "x-request-timeout-ms": "2000"}, 1.0),
        # half a second, rounded down by an SDK, is no deadline in the past
        ({"x-stainless-timeout": "0"}, None),
        ({"x-stainless-timeout": "-5"}, None),
        ({"x-stainless-timeout": "0", "x-request-timeout-ms": "100"}, 0.1),
        # a week and more is as good as none
        ({"grpc-timeout": "99999999H"}, None),
        ({"x-request-timeout-ms": "999999999999"}, None),
    ],
)
def test_the_shortest_timeout_counts(headers, seconds):
    """Seconds until the client gives up, from whichever header says so first."""
    assert timeouts(headers) == (pytest.approx(seconds) if seconds is not None else None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "nan",
        "inf",
        "-inf",
        "1e3",
        "1_000",
        "0x10",
        "ten",
        "5s",
        "١٢",
        "1" * 400,
        "--1",
        "1,5",
        "\x00",
        "\ud800",
    ],
)
def test_nonsense_is_no_timeout(text):
    """What is no plain decimal is ignored, wherever it stands."""
    for name in ("x-request-timeout-ms", "grpc-timeout", "x-stainless-timeout", "x-stainless-read-timeout"):
        assert timeouts({name: text}) is None


@pytest.mark.parametrize(
    ("text", "count"), [("0", 0), ("2", 2), ("-1", 0), ("x", 0), ("", 0), ("nan", 0), ("999999", 100), ("1.9", 1)]
)
def test_retry_count_is_bounded(text, count):
    """How often the SDK has tried; nonsense is a first attempt."""
    assert retry_count({"x-stainless-retry-count": text}) == count
    assert retry_count({}) == 0


@pytest.mark.parametrize(
    ("headers", "sessions"),
    [
        ({}, ()),
        ({"session_id": "a", "x-claude-code-session-id": "b"}, ("b", "a")),
        ({"x-session-id": "a", "x-conversation-id": "a", "x-thread-id": "c"}, ("a", "c")),
        ({"x-session-id": ""}, ()),
        ({"x-session-id": "a\x00b"}, ()),
        ({"x-session-id": "a\nb"}, ()),
        ({"x-session-id": "x" * 257}, ()),
        ({"x-session-id": "x" * 256}, ("x" * 256,)),
    ],
)
def test_sessions_of_known_agents(headers, sessions):
    """Best first, each once; what is long or not printable is left out."""
    assert header_sessions(headers) == sessions


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({}, ""),
        ({"idempotency-key": ""}, ""),
        ({"idempotency-key": " a-1 "}, "a-1"),
        ({"idempotency-key": "stainless-python-retry-0a", "x-stainless-retry-count": "0"}, "stainless-python-retry-0a"),
    ],
)
def test_a_request_is_named_by_its_idempotency_key(headers, name):
    """All copies of a request carry the same one; blanks around it are not part of it."""
    assert idempotency_key(headers) == name


@pytest.mark.parametrize(
    ("header", "tongue"),
    [
        (None, "en"),
        ("", "en"),
        ("*", "en"),
        ("de, fr;q=0.5", "en"),
        ("zh", "zh"),
        ("zh-CN,zh;q=0.9,en;q=0.8", "zh"),
        ("ZH_TW", "zh"),
        ("en-US,en;q=0.9,zh;q=0.8", "en"),
        ("en;q=0.3, zh;q=0.7", "zh"),
        ("de, zh;q=0.1", "zh"),
        ("zh;q=0", "en"),
        ("zh;q=0.000, en;q=0", "en"),
        ("zh ; q = 0.5 , en;q=0.5", "zh"),
        ("zh;q=nan", "en"),
        ("zh;q=2", "en"),
        (",,,;;;q=,zh", "zh"),
        ("x," * 10_000 + "zh", "en"),
    ],
)
def test_language_follows_the_weights(header, tongue):
    """English or Chinese, whichever weighs more; English where neither is asked for."""
    assert language(header) == tongue


@given(st.text(max_size=100))
def test_no_header_makes_it_raise(text):
    """Headers are the client's to write."""
    names = ["x-request-timeout-ms", "grpc-timeout", "x-stainless-timeout", "x-stainless-retry-count", "session_id"]
    headers = dict.fromkeys(names, text)
    assert timeouts(headers) is None or timeouts(headers) >= 0
    assert 0 <= retry_count(headers) <= 100
    assert all(session.isprintable() for session in header_sessions(headers))
    assert language(text) in ("en", "zh")
