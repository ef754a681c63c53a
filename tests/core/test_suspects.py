"""Requests that fail wherever they are sent: from the second upstream on that says nothing."""

from __future__ import annotations

import pytest

from extproc.core.suspects import KEPT_S, Suspects


def test_a_request_counts_until_it_has_failed_at_two_upstreams() -> None:
    """At one upstream it counts however often it comes; after it failed at another one, nowhere any more."""
    suspects = Suspects()
    assert [suspects.failed("f", "error", "a", now) for now in (0, 1, 2)] == [False] * 3
    assert [suspects.failed("f", "error", name, 3) for name in "bcab"] == [True] * 4


def test_of_some_failures_a_request_has_one() -> None:
    """Wherever it comes, and as often as it comes."""
    suspects = Suspects()
    assert [suspects.failed("f", "error", name, 0, once=True) for name in "aaba"] == [False, True, True, True]
    assert not suspects.failed("g", "error", "a", 0, once=True)


def test_other_requests_count_all_the_same() -> None:
    """A real outage of several upstreams shows in them, wherever they come to first."""
    suspects = Suspects()
    for i in range(10):
        assert not suspects.failed(f"f{i}", "error", "ab"[i % 2], i)


@pytest.mark.parametrize(("later", "says_nothing"), [(KEPT_S - 1, True), (KEPT_S, False)])
def test_it_is_forgotten_after_a_while(later: float, *, says_nothing: bool) -> None:
    """Counted from its last failure at the other upstream."""
    suspects = Suspects()
    suspects.failed("f", "error", "a", 0)
    suspects.failed("f", "error", "a", 50)
    assert suspects.failed("f", "error", "b", 50 + later) == says_nothing


def test_what_fails_at_one_upstream_all_the_time_does_not_keep_the_other_in_memory() -> None:
    """Each has a time of its own."""
    suspects = Suspects()
    suspects.failed("f", "error", "b", 0)
    assert suspects.failed("f", "error", "a", KEPT_S - 1)
    assert not suspects.failed("f", "error", "a", KEPT_S)


def test_memory_is_bounded() -> None:
    """Of too many the one that failed longest ago goes, and those that are too old; who fails anew stays."""
    suspects = Suspects(limit=3)
    for i, name in enumerate("wxywz"):
        suspects.failed(name, "error", "a", i)
    assert len(suspects) == 3
    assert [suspects.failed(name, "error", "b", 5) for name in "xw"] == [False, True]
    suspects.failed("late", "error", "a", 5 + KEPT_S)
    assert len(suspects) == 1
