"""Reported usage in one shape."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.request import Dialect, Usage
from extproc.dialects import merge, usage_of


def test_openai_input_includes_the_cached_tokens():
    """Nothing is added."""
    raw = {"in": 100, "out": 20, "cached": 60, "reasoning": 5}
    assert usage_of(Dialect.OPENAI, raw) == Usage(input=100, output=20, cached=60, reasoning=5)


def test_anthropic_input_leaves_the_cache_out():
    """What was read from the cache and written to it is part of the prompt."""
    raw = {"in": 10, "out": 20, "cached": 60, "cache_write": 30}
    assert usage_of(Dialect.ANTHROPIC, raw) == Usage(input=100, output=20, cached=60, cache_write=30)
    assert usage_of(Dialect.ANTHROPIC, {"in": 10}) == Usage(input=10)


def test_unknown_is_not_zero():
    """A missing field is None, an explicit zero stays zero."""
    assert usage_of(Dialect.OPENAI, {}) == Usage()
    assert usage_of(Dialect.OPENAI, {"in": 0, "out": "0"}) == Usage(input=0, output=0)
    assert usage_of(Dialect.ANTHROPIC, {"cached": 60}) == Usage(cached=60)


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("12", 12),
        (" 12 ", 12),
        ("12.0", 12),
        (12.0, 12),
        (12.9, 12),
        ("", None),
        ("12.5", None),
        ("-1", None),
        (-1, None),
        ("1e3", None),
        ("nan", None),
        (float("nan"), None),
        (float("inf"), None),
        (10**13, None),
        ("9" * 14, None),
        ("9" * 13, None),
        (True, None),
        (None, None),
        ([], None),
        ("١٢", None),
    ],
)
def test_numbers_as_filters_note_them(value, count):
    """Numbers and digits in strings count; nonsense is unknown."""
    assert usage_of(Dialect.OPENAI, {"out": value}).output == count


def test_cumulative_reports_are_not_added():
    """Anthropic says it at the start and again at the end of a stream."""
    start = usage_of(Dialect.ANTHROPIC, {"in": 10, "cached": 90, "out": 1})
    end = usage_of(Dialect.ANTHROPIC, {"in": 10, "cached": 90, "out": 42})
    assert merge(start, end) == Usage(input=100, output=42, cached=90)
    assert merge(start, usage_of(Dialect.ANTHROPIC, {"out": 42})) == Usage(input=100, output=42, cached=90)


COUNTS = st.none() | st.integers(0, 10**9)
USAGES = st.builds(Usage, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)


@given(USAGES, USAGES, USAGES)
def test_merging_has_no_order(a, b, c):
    """Reports may come in any order, and twice."""
    assert merge(a, b) == merge(b, a)
    assert merge(a, merge(b, c)) == merge(merge(a, b), c)
    assert merge(a, a) == a
    assert merge(a, Usage()) == a
