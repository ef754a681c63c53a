"""Token buckets as a provider keeps them. Time is an argument: nothing waits here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.fakes.anthropic import ANTHROPIC
from extproc.fakes.limits import Bucket, Cost, Kind, Level, Limits
from extproc.fakes.openai import OPENAI, go_duration
from extproc.fakes.settings import FakeSettings


def limits(**settings: object) -> Limits:
    """Return full buckets at time 0."""
    return Limits(FakeSettings(name="p", port=0, **settings), 0.0)  # type: ignore[arg-type]


def test_a_request_is_charged_with_its_prompt_and_all_it_may_produce() -> None:
    """Upfront accounting never gives anything back."""
    account = limits(tpm=6000, rpm=60)
    assert account.take(Cost(input=100, output=500), 0.0) is None
    assert account.levels(0.0)["tokens"].remaining == 5400
    assert account.settle(Cost(100, 500), Cost(100, 20), 0.0) == 0
    assert account.levels(0.0)["tokens"].remaining == 5400
    assert account.levels(0.0)["requests"] == Level(limit=60, remaining=59, reset_s=1.0)


def test_actual_accounting_settles_to_the_real_output() -> None:
    """What was not produced comes back at the end."""
    account = limits(tpm=6000, accounting="actual")
    account.take(Cost(100, 500), 0.0)
    assert account.settle(Cost(100, 500), Cost(100, 20), 0.0) == 480
    assert account.levels(0.0)["tokens"].remaining == 5880


def test_a_short_account_says_what_is_missing_and_when_it_will_be_there() -> None:
    """The shortage has everything a 429 tells; a refused request has cost one request."""
    account = limits(tpm=6000, rpm=60)
    account.take(Cost(0, 5000), 0.0)
    shortage = account.take(Cost(1000, 500), 0.0)
    assert shortage is not None
    assert (shortage.kind, shortage.limit, shortage.used, shortage.requested) == ("tokens", 6000, 5000, 1500)
    assert shortage.wait_s == pytest.approx(5.0)
    assert account.take(Cost(1000, 500), 4.99) is not None
    assert account.take(Cost(1000, 500), 5.0) is None
    assert account.levels(5.0)["requests"].remaining == 58


def test_requests_run_out_too() -> None:
    """The bucket of requests is one like the others."""
    account = limits(rpm=60, burst_s=2)
    assert [account.take(Cost(1, 1), 0.0) is None for _ in range(3)] == [True, True, False]
    assert account.take(Cost(1, 1), 1.0) is None


def test_input_and_output_can_be_limited_apart() -> None:
    """The shortage names the bucket that is short."""
    account = limits(input_tpm=1000, output_tpm=100)
    shortage = account.take(Cost(10, 101), 0.0)
    assert shortage is not None
    assert (shortage.kind, shortage.wait_s) == ("output-tokens", None)
    assert account.take(Cost(1000, 100), 0.0) is None


def test_a_request_larger_than_the_bucket_waits_for_a_full_one_and_leaves_a_debt() -> None:
    """Within the limit of a minute everything passes at some time; beyond it nothing ever does."""
    account = limits(tpm=6000, burst_s=10)
    account.take(Cost(0, 500), 0.0)
    shortage = account.take(Cost(0, 3000), 0.0)
    assert shortage is not None
    assert shortage.wait_s == pytest.approx(5.0)
    assert account.take(Cost(0, 3000), 5.0) is None
    assert account.levels(5.0)["tokens"] == Level(limit=6000, remaining=0, reset_s=30.0)
    too_large = account.take(Cost(0, 6001), 60.0)
    assert too_large is not None
    assert too_large.wait_s is None


def test_changed_limits_keep_what_was_used() -> None:
    """A lowered limit is felt at once; a raised one fills at its new speed."""
    account = limits(tpm=6000)
    account.take(Cost(0, 1000), 0.0)
    account.change(FakeSettings(name="p", port=0, tpm=600), 0.0)
    assert account.levels(0.0)["tokens"].remaining == 600
    account.change(FakeSettings(name="p", port=0, tpm=60_000, rpm=5), 0.0)
    assert account.levels(1.0)["tokens"].remaining == 1600
    assert account.levels(1.0)["requests"].remaining == 5


@given(
    st.integers(1, 100_000),
    st.floats(1, 120),
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 5000)), max_size=60),
)
def test_no_bucket_gives_more_than_its_size_and_its_refill(
    per_minute: int, burst_s: float, steps: list[tuple[float, int]]
) -> None:
    """Whatever is asked and when: what passed is at most one bucket and what flowed in, plus one debt."""
    bucket, now, passed, largest = Bucket(per_minute, burst_s, 0.0), 0.0, 0, 0
    for pause, amount in steps:
        now += pause
        if bucket.wait_s(amount, now) == 0.0:
            bucket.take(amount, now)
            passed, largest = passed + amount, max(largest, amount)
        debt = max(0.0, largest - bucket.capacity)
        assert passed <= bucket.capacity + now * bucket.rate + debt + 0.01


def test_waiting_as_long_as_told_is_enough() -> None:
    """After the wait that a shortage names, the same request passes."""
    bucket = Bucket(700, 60.0, 0.0)
    bucket.take(699, 0.0)
    wait_s = bucket.wait_s(333, 0.0)
    assert wait_s is not None
    assert bucket.wait_s(333, wait_s) == 0.0


@pytest.mark.parametrize(
    ("seconds", "spelled"),
    [
        (0, "0s"), (-3, "0s"), (0.0121, "13ms"), (0.012, "12ms"), (1, "1s"), (7.66, "7.66s"), (60, "1m0s"),
        (360, "6m0s"), (3602, "1h0m2s"), (179.56, "2m59.56s"), (0.9999, "1s"),
    ],
)  # fmt: skip
def test_durations_are_spelled_as_go_spells_them(seconds: float, spelled: str) -> None:
    """Milliseconds below a second, rounded up: never promise too early."""
    assert go_duration(seconds) == spelled


def test_openai_headers() -> None:
    """Durations to a full bucket; a kind without a bucket has no headers."""
    headers = OPENAI.limit_headers({"requests": Level(500, 499, 0.12), "tokens": Level(30_000, 100, 59.8)}, 0.0)
    assert headers == {
        "x-ratelimit-limit-requests": "500",
        "x-ratelimit-remaining-requests": "499",
        "x-ratelimit-reset-requests": "120ms",
        "x-ratelimit-limit-tokens": "30000",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "59.8s",
    }
    assert OPENAI.limit_headers({}, 0.0) == {}
    split = OPENAI.limit_headers({"input-tokens": Level(10, 9, 1), "output-tokens": Level(20, 3, 2)}, 0.0)
    assert split["x-ratelimit-limit-tokens"] == "20"


def test_anthropic_headers() -> None:
    """Dates; tokens rounded to thousands; `tokens` tells the tightest bucket."""
    levels: dict[Kind, Level] = {
        "requests": Level(50, 49, 1.2),
        "input-tokens": Level(40_000, 39_400, 0.9),
        "output-tokens": Level(8000, 2600, 40),
    }
    headers = ANTHROPIC.limit_headers(levels, 1_700_000_000.0)
    assert headers["anthropic-ratelimit-requests-remaining"] == "49"
    assert headers["anthropic-ratelimit-requests-reset"] == "2023-11-14T22:13:22Z"
    assert headers["anthropic-ratelimit-input-tokens-limit"] == "40000"
    assert headers["anthropic-ratelimit-input-tokens-remaining"] == "39000"
    assert headers["anthropic-ratelimit-output-tokens-remaining"] == "3000"
    assert headers["anthropic-ratelimit-tokens-limit"] == "8000"
    assert headers["anthropic-ratelimit-tokens-reset"] == "2023-11-14T22:14:00Z"
    one = ANTHROPIC.limit_headers({"tokens": Level(9000, 9000, 0)}, 0.0)
    assert one["anthropic-ratelimit-output-tokens-limit"] == "9000"
    assert ANTHROPIC.limit_headers({}, 0.0) == {}
