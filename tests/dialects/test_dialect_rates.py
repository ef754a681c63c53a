"""Rate-limit headers as providers send them, and times in all their forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.dialects import Reported, reported, retry_after_s
from extproc.dialects.rates import TABLE

NOW = 1_790_000_000.0  # 2026-09-21 14:13:20 UTC

CASES = [
    (
        "openai",
        {
            "x-ratelimit-limit-requests": "10000",
            "x-ratelimit-remaining-requests": "9999",
            "x-ratelimit-reset-requests": "6ms",
            "x-ratelimit-limit-tokens": "2000000",
            "x-ratelimit-remaining-tokens": "1999000",
            "x-ratelimit-reset-tokens": "6m0s",
        },
        (Reported("tokens", 2e6, 1_999_000, 360.0), Reported("requests", 10_000, 9_999, 0.006)),
    ),
    (
        "openai",
        {"x-ratelimit-limit-tokens_usage_based": "100", "x-ratelimit-remaining-tokens_usage_based": "7"},
        (Reported("tokens", 100, 7),),
    ),
    (
        "azure",
        {
            "x-ratelimit-remaining-tokens": "900",
            "x-ratelimit-limit-tokens": "1000",
            "x-ratelimit-reset-tokens": "10",
            "x-ratelimit-remaining-requests": "-1",
            "x-ratelimit-limit-requests": "0",
        },
        (Reported("tokens", 1000, 900, 10.0),),
    ),
    ("azure", {"x-ratelimit-remaining-tokens": "-1"}, ()),
    ("azure", {"x-ratelimit-remaining-tokens": "0"}, (Reported("tokens", None, 0),)),
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
            Reported("tokens", 58_000, 57_000),
            Reported("input", 50_000, 49_000, 30.0),
            Reported("output", 8_000, 8_000, 0.0),
            Reported("requests", 50, 49, 1.5),
        ),
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
        },
        (
            Reported("tokens", 500_000, 499_000),
            Reported("requests", 60, 59),
            Reported("tokens", 4e6, 3_950_246, None, 2_592_000.0),
            Reported("requests", 1_000, 999, None, 2_592_000.0),
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
        (Reported("tokens", 18_000, 17_997, 7.66), Reported("requests", 14_400, 14_370, 179.56, 86_400.0)),
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
        (Reported("tokens", 3_000, 2_900, None, 1.0), Reported("requests", 10, 9, 1.0, 1.0)),
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
        (Reported("tokens", 60_000, 58_000, 11.38), Reported("requests", 1_440, 1_400, 33_011.382867097855, 86_400.0)),
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
            Reported("requests", 120, 119, 5.0),
            Reported("tokens", 100_000, 0, 20.0),
            Reported("tokens", 1e6, 5, 0.0, 86_400.0),
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
            Reported("tokens", 10),
            Reported("requests", 20),
            Reported("tokens", 30, None, None, 3_600.0),
            Reported("requests", 40, None, 1_800.0, 3_600.0),
        ),
    ),
    ("bedrock", {"x-ratelimit-limit-tokens": "10"}, ()),
    ("gemini", {"x-ratelimit-limit-tokens": "10"}, ()),
    ("deepseek", {"x-ratelimit-limit-tokens": "10"}, ()),
    ("vllm", {"x-ratelimit-limit-tokens": "10"}, ()),
    ("sglang", {"x-ratelimit-limit-tokens": "10"}, ()),
    ("generic", {"x-ratelimit-limit-tokens": "10, 10;w=60"}, (Reported("tokens", 10),)),
    ("somebody new", {"x-ratelimit-remaining-tokens": "10"}, (Reported("tokens", None, 10),)),
    ("openai", {}, ()),
    ("openai", {"x-ratelimit-reset-tokens": "1s"}, ()),
    ("openai", {"x-ratelimit-limit-tokens": "", "x-ratelimit-remaining-tokens": "NaN"}, ()),
    ("openai", {"x-ratelimit-limit-tokens": "inf", "x-ratelimit-remaining-tokens": "1e9"}, ()),
    ("openai", {"x-ratelimit-limit-tokens": "9" * 100}, ()),
    ("openai", {"x-ratelimit-limit-tokens": "5", "x-ratelimit-reset-tokens": "soon"}, (Reported("tokens", 5),)),
]


@pytest.mark.parametrize(("provider", "headers", "limits"), CASES)
def test_limits_as_providers_send_them(provider, headers, limits):
    """Each provider's names, windows and times; nonsense is left out."""
    found = reported(provider, headers, NOW)
    assert [(one.kind, one.limit, one.remaining, one.window_s) for one in found] == [
        (one.kind, one.limit, one.remaining, one.window_s) for one in limits
    ]
    for one, wanted in zip(found, limits, strict=True):
        assert one.reset_s == (None if wanted.reset_s is None else pytest.approx(wanted.reset_s, abs=1e-6))


@pytest.mark.parametrize("provider", sorted(TABLE))
def test_every_provider_has_a_fixture(provider):
    """And so has every name of its headers."""
    sent = {name for case, headers, _ in CASES if case == provider for name in headers}
    assert provider in [case for case, _, _ in CASES]
    if provider not in ("generic", "openai"):
        assert {names.limit for names in TABLE[provider]} <= sent


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
    ],
)
def test_milliseconds_come_first(headers, seconds):
    """They are the finer word, where they are one."""
    assert retry_after_s(headers, NOW) == seconds


@given(st.text(max_size=80), st.sampled_from(sorted(TABLE)), st.floats(0, 1e12))
def test_no_header_makes_it_raise(text, provider, now):
    """Whatever an upstream sends: finite numbers that are not negative, or nothing."""
    headers = {name: text for row in TABLE[provider] for name in row[1:4]} | {
        "retry-after": text,
        "retry-after-ms": text,
    }
    waited = retry_after_s(headers, now)
    assert waited is None or (math.isfinite(waited) and waited >= 0)
    for one in reported(provider, headers, now):
        for value in (one.limit, one.remaining, one.reset_s):
            assert value is None or (math.isfinite(value) and value >= 0)
