"""Buckets count as those of OpenTelemetry's SDK do."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Histogram, InMemoryMetricReader

from extproc.telemetry.distribution import Distribution

BOUNDS = (0.0, 0.5, 1.0, 2.5, 10.0)
VALUES = st.one_of(st.sampled_from([*BOUNDS, 0.1, 99.0]), st.floats(0, 50))


@given(st.lists(VALUES, min_size=1, max_size=50))
def test_it_counts_as_an_instrument_of_the_sdk_does(values: list[float]) -> None:
    """Also what lies exactly on a bound."""
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    instrument = provider.get_meter("test").create_histogram("h", explicit_bucket_boundaries_advisory=BOUNDS)
    ours = Distribution(BOUNDS)
    for value in values:
        instrument.record(value)
        ours.record(value)
    data = reader.get_metrics_data()
    assert data is not None
    [metric] = data.resource_metrics[0].scope_metrics[0].metrics
    assert isinstance(metric.data, Histogram)
    [theirs] = metric.data.data_points
    shown = ours.shown()
    assert (shown.counts, shown.count, shown.bounds) == (tuple(theirs.bucket_counts), theirs.count, BOUNDS)
    assert abs(shown.sum - theirs.sum) < 1e-9


def test_each_bucket_keeps_its_newest_example() -> None:
    one = Distribution((1.0, 2.0))
    for value, trace in ((0.5, "a"), (0.7, "b"), (0.6, ""), (9.0, "c")):
        one.record(value, trace)
    first, second, last = one.shown().examples
    assert first is not None
    assert last is not None
    assert (first.trace, first.value, second, last.trace) == ("b", 0.7, None, "c")


def test_what_is_read_in_a_thread_meanwhile_is_never_more_or_less_than_was_recorded() -> None:
    """The count is always that of the buckets."""
    one, over = Distribution((1.0,)), threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not over.is_set():
            seen.append(one.shown().count)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50_000):
        one.record(0.5)
    over.set()
    reader.join()
    assert seen == sorted(seen)
    assert one.shown().count == 50_000
