"""Rate-limit headers as providers send them, and times in all their forms."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.dialects import Reported, charged, reported, retry_after_s
from extproc.dialects.rates import NAMES, TABLE, Reset

NOW = 1_790_000_000.0  # 2026-09-21 14:13:20 UTC

W, F = Reset.WINDOW, Reset.FITS
MINUTE, HOUR, DAY, MONTH = 60.0, 3_600.0, 86_400.0, 2_592_000.0


def limit(kind, limit=None, remaining=None, reset_s=None, window_s=MINUTE, reset=Reset.FULL):
    return Reported(kind, limit, remaining, reset_s, window_s, reset)


CASES = [
    (
        "openai",
        {
            "x-ratelimit-limit-requests": "10000",
            "x-ratelimit-remaining-requests": "9999",
            "x-ratelimit-reset-requests": "6ms",
            "x-ratelimit-limit-tokens": "2000000",
            "x-ratelimit-remaining-tokens": "1999000",
            "x-ratelimit-reset-tokens": "30ms",
        },
        (limit("tokens", 2e6, 1_999_000, 0.03), limit("requests", 10_000, 9_999, 0.006)),
    ),
    # Two counts of the same tokens: the tighter one holds.
    (
        "openai",
        {
            "x-ratelimit-limit-tokens": "160000",
            "x-ratelimit-remaining-tokens": "158866",
            "x-ratelimit-reset-tokens": "425ms",
            "x-ratelimit-limit-tokens_usage_based": "150000",
            "x-ratelimit-remaining-tokens_usage_based": "158",
            "x-ratelimit-reset-tokens_usage_based": "59.9s",
        },
        (limit("tokens", 150_000, 158, 59.9),),
    ),
    (
        "openai",
        {"x-ratelimit-limit-tokens_usage_based": "100", "x-ratelimit-remaining-tokens_usage_based": "7"},
        (limit("tokens", 100, 7),),
    ),
    # Requests of a day under the name of those of a minute: only the time to a full bucket tells.
    (
        "openai",
        {
            "x-ratelimit-limit-requests": "10000",
            "x-ratelimit-remaining-requests": "9999",
            "x-ratelimit-reset-requests": "8.64s",
        },
        (limit("requests", 10_000, 9_999, 8.64, DAY),),
    ),
    (
        "openai",
        {
            "x-ratelimit-limit-requests": "200",
            "x-ratelimit-remaining-requests": "197",
            "x-ratelimit-reset-requests": "16m17.764s",
        },
        (limit("requests", 200, 197, 977.764, DAY),),
    ),
    (
        "openai",
        {
            "x-ratelimit-limit-requests": "500",
            "x-ratelimit-remaining-requests": "100",
            "x-ratelimit-reset-requests": "48s",
        },
        (limit("requests", 500, 100, 48.0),),
    ),
    (
        "openai",
        {"x-ratelimit-limit-requests": "500", "x-ratelimit-reset-requests": "8.64s"},
        (limit("requests", 500, None, 8.64),),
    ),
    (
        "azure",
        {
            "x-ratelimit-remaining-tokens": "900",
            "x-ratelimit-limit-tokens": "1000",
            "x-ratelimit-reset-tokens": "10",
            "x-ratelimit-renewalperiod-tokens": "10",
            "x-ratelimit-remaining-requests": "-1",
            "x-ratelimit-limit-requests": "0",
            "x-ratelimit-renewalperiod-requests": "60",
        },
        (limit("tokens", 1000, 900, 10.0, 10.0),),
    ),
    (
        "azure",
        {
            "x-ratelimit-limit-requests": "1000",
            "x-ratelimit-remaining-requests": "999",
            "x-ratelimit-renewalperiod-requests": "60",
            "x-ratelimit-limit-tokens": "1000000",
            "x-ratelimit-remaining-tokens": "999992",
            "x-ratelimit-reset-tokens": "1",
            "x-ratelimit-renewalperiod-tokens": "0",
        },
        (limit("tokens", 1e6, 999_992, 1.0), limit("requests", 1000, 999)),
    ),
    ("azure", {"x-ratelimit-remaining-tokens": "-1"}, ()),
    ("azure", {"x-ratelimit-remaining-tokens": "0"}, ()),
    ("azure", {"x-ratelimit-remaining-tokens": "70"}, (limit("tokens", None, 70),)),
    (
        "anthropic",
        {
            "anthropic-ratelimit-input-tokens-limit": "50000",
            "anthropic-ratelimit-input-tokens-remaining": "49000",
            "anthropic-ratelimit-input-tokens-reset": "2026-09-21T14:13:50Z",
            "anthropic-ratelimit-output-tokens-limit": "8000",
            "anthropic-ratelimit-output-tokens-remaining": "8000",
            "anthropic-ratelimit-output-tokens-reset": "2026-09-21T14:00:00Z",
            "anthropic-ratelimit-tokens-limit": "58000",
            "anthropic-ratelimit-tokens-remaining": "57000",
            "anthropic-ratelimit-requests-limit": "50",
            "anthropic-ratelimit-requests-remaining": "49",
            "anthropic-ratelimit-requests-reset": "2026-09-21T14:13:21.5Z",
        },
        (
            limit("tokens", 58_000, 57_000),
            limit("input", 50_000, 49_000, 30.0),
            limit("output", 8_000, 8_000, 0.0),
            limit("requests", 50, 49, 1.5),
        ),
    ),
    # A subscription: shares of windows, and a word that says more than the share.
    (
        "anthropic",
        {
            "anthropic-ratelimit-unified-status": "allowed",
            "anthropic-ratelimit-unified-reset": "1790003600",
            "anthropic-ratelimit-unified-5h-status": "allowed_warning",
            "anthropic-ratelimit-unified-5h-utilization": "0.75",
            "anthropic-ratelimit-unified-5h-reset": "1790003600",
            "anthropic-ratelimit-unified-7d-utilization": "1.02",
            "anthropic-ratelimit-unified-7d-reset": "2026-09-22T14:13:20Z",
        },
        (limit("share", 1.0, 0.25, 3_600.0, 5 * HOUR, W), limit("share", 1.0, 0.0, 86_400.0, 7 * DAY, W)),
    ),
    (
        "anthropic",
        {
            "anthropic-ratelimit-unified-5h-status": "Rejected",
            "anthropic-ratelimit-unified-5h-utilization": "0.2",
            "anthropic-ratelimit-unified-7d-status": "allowed",
            "anthropic-ratelimit-unified-7d-utilization": "1.5",
        },
        (limit("share", 1.0, 0.0, None, 5 * HOUR, W), limit("share", 1.0, 1e-9, None, 7 * DAY, W)),
    ),
    (
        "anthropic",
        {
            "anthropic-ratelimit-unified-status": "rejected",
            "anthropic-ratelimit-unified-utilization": "",
            "anthropic-ratelimit-unified-7d-utilization": "-1",
        },
        (limit("share", 1.0, 0.0, None, 5 * HOUR, W),),
    ),
    (
        "mistral",
        {
            "x-ratelimit-limit-tokens-minute": "500000",
            "x-ratelimit-remaining-tokens-minute": "499000",
            "x-ratelimit-limit-req-minute": "60",
            "x-ratelimit-remaining-req-minute": "59",
            "x-ratelimit-limit-tokens-month": "4000000",
            "x-ratelimit-remaining-tokens-month": "3950246",
            "x-ratelimit-limit-req-month": "1000",
            "x-ratelimit-remaining-req-month": "999",
            "x-ratelimit-tokens-query-cost": "12",
        },
        (
            limit("tokens", 500_000, 499_000),
            limit("requests", 60, 59),
            limit("tokens", 4e6, 3_950_246, None, MONTH, W),
            limit("requests", 1_000, 999, None, MONTH, W),
        ),
    ),
    (
        "groq",
        {
            "x-ratelimit-limit-requests": "14400",
            "x-ratelimit-remaining-requests": "14370",
            "x-ratelimit-reset-requests": "2m59.56s",
            "x-ratelimit-limit-tokens": "18000",
            "x-ratelimit-remaining-tokens": "17997",
            "x-ratelimit-reset-tokens": "7.66s",
        },
        (limit("tokens", 18_000, 17_997, 7.66), limit("requests", 14_400, 14_370, 179.56, DAY)),
    ),
    (
        "together",
        {
            "x-ratelimit-limit": "10",
            "x-ratelimit-remaining": "9",
            "x-ratelimit-reset": "1",
            "x-tokenlimit-limit": "3000",
            "x-tokenlimit-remaining": "2900",
        },
        (limit("tokens", 3_000, 2_900, None, 1.0, W), limit("requests", 10, 9, 1.0, 1.0, W)),
    ),
    (
        "together",
        {
            "x-ratelimit-limit": "10",
            "x-ratelimit-remaining": "9",
            "x-ratelimit-reset": "1",
            "x-ratelimit-limit-dynamic": "4",
            "x-ratelimit-remaining-dynamic": "0",
            "x-ratelimit-reset-dynamic": "0.5",
            "x-tokenlimit-limit-dynamic": "2000",
            "x-tokenlimit-remaining-dynamic": "1000",
        },
        (limit("requests", 4, 0, 0.5, 1.0, W), limit("tokens", 2_000, 1_000, None, 1.0, W)),
    ),
    (
        "cerebras",
        {
            "x-ratelimit-limit-requests-day": "1440",
            "x-ratelimit-remaining-requests-day": "1400",
            "x-ratelimit-reset-requests-day": "33011.382867097855",
            "x-ratelimit-limit-tokens-minute": "60000",
            "x-ratelimit-remaining-tokens-minute": "58000",
            "x-ratelimit-reset-tokens-minute": "11.38",
        },
        (
            limit("tokens", 60_000, 58_000, 11.38, MINUTE, W),
            limit("requests", 1_440, 1_400, 33_011.382867097855, DAY, W),
        ),
    ),
    (
        "cerebras",
        {
            "x-ratelimit-limit-requests-minute": "120",
            "x-ratelimit-remaining-requests-minute": "115",
            "x-ratelimit-reset-requests-minute": "45.5",
            "x-ratelimit-limit-tokens-hour": "1000000",
            "x-ratelimit-limit-requests-hour": "900",
            "x-ratelimit-limit-tokens-day": "1000000",
        },
        (
            limit("requests", 120, 115, 45.5, MINUTE, W),
            limit("tokens", 1e6, None, None, HOUR, W),
            limit("requests", 900, None, None, HOUR, W),
            limit("tokens", 1e6, None, None, DAY, W),
        ),
    ),
    (
        "digitalocean",
        {
            "x-ratelimit-limit-requests": "120",
            "x-ratelimit-remaining-requests": "119",
            "x-ratelimit-reset-requests": "1790000005",
            "x-ratelimit-limit-tokens-per-minute": "100000",
            "x-ratelimit-remaining-tokens-per-minute": "0",
            "x-ratelimit-reset-tokens-per-minute": "1790000020",
            "x-ratelimit-limit-tokens-per-day": "1000000",
            "x-ratelimit-remaining-tokens-per-day": "5",
            "x-ratelimit-reset-tokens-per-day": "1790000000",
        },
        (
            limit("requests", 120, 119, 5.0, MINUTE, F),
            limit("tokens", 100_000, 0, 20.0, MINUTE, F),
            limit("tokens", 1e6, 5, 0.0, DAY, F),
        ),
    ),
    (
        "nous",
        {
            "x-ratelimit-limit-tokens": "10",
            "x-ratelimit-limit-requests": "20",
            "x-ratelimit-limit-tokens-1h": "30",
            "x-ratelimit-limit-requests-1h": "40",
            "x-ratelimit-reset-requests-1h": "1800",
        },
        (
            limit("tokens", 10),
            limit("requests", 20),
            limit("tokens", 30, None, None, HOUR, W),
            limit("requests", 40, None, 1_800.0, HOUR, W),
        ),
    ),
    (
        "openrouter",
        {
            "x-ratelimit-limit-tokens": "10",
            "x-ratelimit-limit-requests": "20",
            "x-ratelimit-limit-tokens-1h": "30",
            "x-ratelimit-limit-requests-1h": "40",
        },
        (
            limit("tokens", 10),
            limit("requests", 20),
            limit("tokens", 30, None, None, HOUR, W),
            limit("requests", 40, None, None, HOUR, W),
        ),
    ),
    (
        "xai",
        {"x-ratelimit-limit-tokens": "10", "x-ratelimit-limit-requests": "20"},
        (limit("tokens", 10), limit("requests", 20)),
    ),
    (
        "fake",
        {"x-ratelimit-limit-tokens": "10", "anthropic-ratelimit-input-tokens-limit": "20"},
        (limit("tokens", 10), limit("input", 20)),
    ),
    ("bedrock", {"x-ratelimit-limit-tokens": "10"}, ()),
    ("gemini", {"x-ratelimit-limit-tokens": "10"}, ()),
    ("deepseek", {"x-ratelimit-limit-tokens": "10"}, ()),
    ("vllm", {"x-ratelimit-limit-tokens": "10"}, ()),
    ("sglang", {"x-ratelimit-limit-tokens": "10"}, ()),
    ("generic", {"x-ratelimit-limit-tokens": "10, 10;w=60"}, (limit("tokens", 10),)),
    (
        "generic",
        {"x-ratelimit-limit-tokens-per-day": "10", "x-ratelimit-limit-tokens-minute": "3"},
        (limit("tokens", 3), limit("tokens", 10, None, None, DAY, F)),
    ),
    ("somebody new", {"x-ratelimit-remaining-tokens": "10"}, (limit("tokens", None, 10),)),
    # Nonsense.
    ("openai", {}, ()),
    ("openai", {"x-ratelimit-reset-tokens": "1s"}, ()),
    ("openai", {"x-ratelimit-limit-tokens": "", "x-ratelimit-remaining-tokens": "NaN"}, ()),
    ("openai", {"x-ratelimit-limit-tokens": "inf", "x-ratelimit-remaining-tokens": "1e9"}, ()),
    ("openai", {"x-ratelimit-limit-tokens": "9" * 100}, ()),
    ("openai", {"x-ratelimit-limit-tokens": "9" * 16}, ()),
    ("openai", {"x-ratelimit-limit-tokens": "5", "x-ratelimit-reset-tokens": "soon"}, (limit("tokens", 5),)),
    ("openai", {"x-ratelimit-limit-tokens": "5", "x-ratelimit-remaining-tokens": "6"}, ()),
    ("openai", {"x-ratelimit-limit-tokens": "5", "x-ratelimit-remaining-tokens": "-6"}, (limit("tokens", 5),)),
    ("openai", {"x-ratelimit-limit-tokens": "-5", "x-ratelimit-remaining-tokens": "3"}, ()),
    # One count of a pair without a limit: the one that has it is followed.
    (
        "openai",
        {"x-ratelimit-limit-tokens": "50", "x-ratelimit-remaining-tokens_usage_based": "3"},
        (limit("tokens", 50),),
    ),
    (
        "openai",
        {"x-ratelimit-remaining-tokens": "3", "x-ratelimit-limit-tokens_usage_based": "50"},
        (limit("tokens", 50),),
    ),
]


@pytest.mark.parametrize(("provider", "headers", "limits"), CASES)
def test_limits_as_providers_send_them(provider, headers, limits):
    """Each provider's names, windows and times; nonsense is left out."""
    found = reported(provider, headers, NOW)
    assert [replace(one, reset_s=None) for one in found] == [replace(one, reset_s=None) for one in limits]
    for one, wanted in zip(found, limits, strict=True):
        assert one.reset_s == (None if wanted.reset_s is None else pytest.approx(wanted.reset_s, abs=1e-6))


@pytest.mark.parametrize("provider", sorted(TABLE.keys() - {"generic", "fake"}))
def test_every_provider_has_a_fixture(provider):
    """And so has every name of its headers."""
    sent = {name for case, headers, _ in CASES if case == provider for name in headers}
    assert provider in [case for case, _, _ in CASES]
    for names in TABLE[provider]:
        assert sent & {names.limit, names.used, names.status}
        assert names.period in sent | {""}


def test_every_name_is_logged():
    """What is read is what the log of failed attempts is asked for, and nothing empty."""
    assert "" not in NAMES
    assert {"retry-after", "retry-after-ms", "x-ms-retry-after-ms", "x-ratelimit-tokens-query-cost"} <= NAMES
    assert {header for case, headers, _ in CASES if case in TABLE for header in headers} <= NAMES


@pytest.mark.parametrize(
    ("text", "tokens"), [(None, None), ("12", 12.0), ("0", 0.0), ("-1", None), ("x", None), ("12.5", 12.5)]
)
def test_what_was_charged(text, tokens):
    """Mistral tells it, of answers that are not streamed."""
    assert charged({} if text is None else {"x-ratelimit-tokens-query-cost": text}) == tokens


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20", 20.0),
        ("0", 0.0),
        ("1.5", 1.5),
        (" 7 ", 7.0),
        ("12ms", 0.012),
        ("1s", 1.0),
        ("6m0s", 360.0),
        ("1h2m3.5s", 3723.5),
        ("250us", 0.00025),
        ("250µs", 0.00025),
        ("5ns", 5e-9),
        ("1d", 86_400.0),
        ("1790000030", 30.0),
        ("1790000030.5", 30.5),
        ("1790000030500", 30.5),
        ("1789999999", 0.0),
        ("2026-09-21T14:13:50Z", 30.0),
        ("2026-09-21t14:13:50.25z", 30.25),
        ("2026-09-21T16:13:50+02:00", 30.0),
        ("2020-01-01T00:00:00Z", 0.0),
        ("Mon, 21 Sep 2026 14:13:50 GMT", 30.0),
        ("Mon, 21 Sep 2026 14:00:00 GMT", 0.0),
        ("Mon, 21 Sep 2026 14:13:50 -0000", 30.0),
        ("", None),
        ("-5", None),
        ("-1s", None),
        ("nan", None),
        ("NaN", None),
        ("inf", None),
        ("Infinity", None),
        ("1e3", None),
        ("1_000", None),
        ("5 s", None),
        ("1.2.3s", None),
        ("s", None),
        (".", None),
        ("soon", None),
        ("2026-13-45T99:00:00Z", None),
        ("9999-12-31T23:59:59Z", None),
        ("0001-01-01T00:00:00Z", 0.0),
        ("Mon, 99 Sep 2026 99:99:99 GMT", None),
        ("Mon, 21 Sep 99999999999999 14:00:00 GMT", None),
        ("99999999h", None),
        ("9" * 20, None),
        ("9" * 1000, None),
        ("١٢", None),
        ("\x00", None),
        ("\ud800", None),
    ],
)
def test_retry_after_in_every_form(text, seconds):
    """Seconds from now, 0 for what is past, None for what makes no sense."""
    waited = retry_after_s({"retry-after": text}, NOW)
    assert waited == (None if seconds is None else pytest.approx(seconds, abs=1e-6))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after-ms": "250.5"}, 0.2505),
        ({"retry-after-ms": "-1", "retry-after": "1"}, 1.0),
        ({"retry-after-ms": "nan", "retry-after": "1"}, 1.0),
        ({"retry-after-ms": "", "retry-after": "1"}, 1.0),
        ({"retry-after-ms": "9" * 20, "retry-after": "1"}, 1.0),
        ({"x-ms-retry-after-ms": "1500", "retry-after": "2"}, 1.5),
        ({"retry-after-ms": "250", "x-ms-retry-after-ms": "1500"}, 0.25),
    ],
)
def test_milliseconds_come_first(headers, seconds):
    """They are the finer word, where they are one."""
    assert retry_after_s(headers, NOW) == seconds


@given(st.text(max_size=80), st.sampled_from(sorted(TABLE)), st.floats(0, 1e12))
def test_no_header_makes_it_raise(text, provider, now):
    """Whatever an upstream sends: finite numbers that are not negative, or nothing."""
    headers = dict.fromkeys(NAMES, text)
    waited = retry_after_s(headers, now)
    assert waited is None or (math.isfinite(waited) and waited >= 0)
    for one in reported(provider, headers, now):
        for value in (one.limit, one.remaining, one.reset_s):
            assert value is None or (math.isfinite(value) and value >= 0)
