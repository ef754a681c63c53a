"""The statistics of a replay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.figures import End, Result, figures, percentile, quantiles

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


def test_percentiles_are_values_that_occurred():
    """Nearest rank: of a hundred values the 99th is the 99th, of two the median is the first."""
    hundred = [float(i) for i in range(1, 101)]
    assert [percentile(hundred, share) for share in (0.0, 0.5, 0.95, 0.99, 1.0)] == [1, 50, 95, 99, 100]
    assert percentile([1.0, 2.0], 0.5) == 1.0
    assert percentile([], 0.5) is None


@given(VALUES, st.floats(0, 1))
def test_a_percentile_has_its_share_at_or_below_it(values, share):
    """And no smaller value has."""
    ordered = sorted(values)
    found = percentile(ordered, share)
    assert sum(value <= found for value in ordered) >= share * len(ordered) - 1e-6
    assert sum(value < found for value in ordered) < share * len(ordered) or found == ordered[0]


def test_values_that_are_not_there_do_not_count():
    """A JSON answer has no first token."""
    found = quantiles([None, 3.0, None, 1.0])
    assert (found.count, found.p50, found.p99) == (2, 1.0, 3.0)
    assert quantiles([]).p99 is None


def test_every_request_is_in_one_place():
    """Offered is served, shed, failed and unanswered together."""
    results = [
        Result(0, "P0", End.SERVED, upstream="a", waited_s=0.5, first_token_s=0.7, prompt_tokens=10, output_tokens=5),
        Result(1, "P0", End.SERVED, upstream="b", waited_s=1.5, prompt_tokens=1),
        Result(2, "P0", End.SHED, word="lane_full", total_s=0.1),
        Result(3, "P0", End.SHED, word="lane_full", total_s=0.2),
        Result(4, "P0", End.SHED, word="queue_timeout", total_s=4.0, waited_s=4.0),
        Result(5, "P0", End.FAILED, word="cut", waited_s=9.0, first_token_s=9.0),
    ]
    found = figures(8, results)
    assert found.served + sum(found.shed.values()) + sum(found.failed.values()) + found.unanswered == 8
    assert list(found.shed.items()) == [("lane_full", 2), ("queue_timeout", 1)]
    assert found.failed == {"cut": 1}
    assert found.upstreams == {"a": 1, "b": 1}
    assert found.tokens == 16
    assert found.waited_s.p99 == 1.5
    assert found.first_token_s.count == 1
    assert found.shed_after_s.p50 == pytest.approx(0.2)
