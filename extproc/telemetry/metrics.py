"""The metrics of one service: as pages for a Prometheus, and as data of OpenTelemetry's SDK for a collector.

Both are made of the same numbers, read when they are asked for (see readings), by the table of the catalog; so they say
the same in the names of each. Nothing is remembered between two pages: names of tenants and versions come and go, and
are gone from a page as they are from what it is made of. The SDK's instruments are not used, see measures for why; its
data and its exporter are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from opentelemetry.sdk.metrics import Exemplar as SdkExemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as SdkMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from extproc.telemetry.catalog import METRICS, Kind, Metric
from extproc.telemetry.distribution import Example, Shown
from extproc.telemetry.formats import OPEN_TYPE, preferred
from extproc.telemetry.measures import Measures
from extproc.telemetry.process import Process
from extproc.telemetry.readings import READINGS, VERSION, Labels, Sources

__all__ = ["Metrics"]

Points = dict[Labels, float | Shown]


@dataclass(frozen=True, slots=True)
class Read:
    """What there is to tell of one metric."""

    metric: Metric
    points: Points


class Metrics:
    """Metrics of one service. May be asked in any thread, with a state that nobody changes any more."""

    def __init__(self, measures: Measures | None = None, process: Process | None = None, instance: str = "") -> None:
        """measures, process: who measures, None where nobody does. instance: tells this process from others."""
        self._measures, self._process = measures, process
        about = {"service.name": "tidegate", "service.version": VERSION, "service.instance.id": instance}
        self._resource = Resource.create(about)
        self._since = time.time_ns()

    def page(self, state: Mapping[str, Any], accept: str = "") -> tuple[bytes, str]:
        """The state of a service (its state page, as plain data) as Prometheus reads it, and the type of that.

        accept: the header of that name of who asks; a content type that is offered is one, too.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Page([_family(read) for read in self.read(state)]))
        kind = preferred(accept)
        write: Callable[[CollectorRegistry], bytes] = (
            openmetrics.generate_latest if kind == OPEN_TYPE else generate_latest
        )
        return write(registry), kind

    @staticmethod
    def kind(accept: str) -> str:
        """The content type that a page has for whoever sends this header."""
        return preferred(accept)

    def data(self, state: Mapping[str, Any]) -> MetricsData:
        """The same for OpenTelemetry."""
        now = time.time_ns()
        scope = InstrumentationScope("tidegate", VERSION)
        told = [_sdk(read, self._since, now) for read in self.read(state)]
        return MetricsData([ResourceMetrics(self._resource, [ScopeMetrics(scope, told, "")], "")])

    def read(self, state: Mapping[str, Any]) -> Iterator[Read]:
        """All metrics of which there is something to tell."""
        sources = Sources(state, self._measures, self._process)
        for metric in METRICS:
            if points := _points(READINGS[metric.otel](sources)):
                yield Read(metric, points)


def _points(told: Iterable[tuple[Labels, float | Shown]]) -> Points:
    """What was told by its labels, each once: somebody may be called as the rest of them is."""
    points: Points = {}
    for labels, value in told:
        known = points.get(spelled := tuple(map(_spelled, labels)))
        if isinstance(known, float | int) and isinstance(value, float | int):
            points[spelled] = known + value
        else:
            points[spelled] = value
    return points


def _spelled(word: Any) -> Any:
    """A label that can be sent: what is no text in UTF-8, as half of a surrogate pair, is told as a question mark."""
    return str(word).encode("utf-8", "replace").decode("utf-8") if isinstance(word, str) else word


class _Page(Collector):
    """Families of metrics that are known already."""

    def __init__(self, families: Iterable[Family]) -> None:
        """Keep them."""
        self._families = families

    def collect(self) -> Iterable[Family]:
        """As the registry asks."""
        return self._families


def _family(read: Read) -> Family:
    metric = read.metric
    labels = metric.prometheus_labels
    if metric.kind is Kind.HISTOGRAM:
        family = HistogramMetricFamily(metric.family, metric.help, labels=labels, unit=metric.suffix)
        for words, shown in read.points.items():
            assert isinstance(shown, Shown)  # noqa: S101 - as the catalog says
            family.add_metric(_texts(words), list(_buckets(shown)), shown.sum)
        return family
    kind: Callable[..., CounterMetricFamily | GaugeMetricFamily]
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    told = kind(metric.family, metric.help, labels=labels, unit=metric.suffix)
    for words, number in read.points.items():
        assert not isinstance(number, Shown)  # noqa: S101 - same
        told.add_metric(_texts(words), number)
    return told


def _texts(words: Labels) -> list[str]:
    return ["" if word is None else str(word) for word in words]


def _buckets(shown: Shown) -> Iterator[tuple[str, float] | tuple[str, float, Exemplar]]:
    ends = [*map(floatToGoString, shown.bounds), "+Inf"]
    for end, count, example in zip(ends, accumulate(shown.counts), shown.examples, strict=True):
        if example is None:
            yield end, count
        else:
            yield end, count, Exemplar({"trace_id": example.trace}, example.value, example.at)


def _sdk(read: Read, since: int, now: int) -> SdkMetric:
    metric = read.metric
    points = ((_attributes(metric, words), value) for words, value in read.points.items())
    data: Sum | Gauge | Histogram
    if metric.kind is Kind.HISTOGRAM:
        spread = [_distribution(about, one, since, now) for about, one in points if isinstance(one, Shown)]
        data = Histogram(spread, AggregationTemporality.CUMULATIVE)
    elif metric.kind is Kind.COUNTER:
        counts = [NumberDataPoint(about, since, now, one) for about, one in points if not isinstance(one, Shown)]
        data = Sum(counts, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    else:
        levels = [NumberDataPoint(about, since, now, float(one)) for about, one in points if not isinstance(one, Shown)]
        data = Gauge(levels)
    return SdkMetric(metric.otel, metric.help, metric.unit, data)


def _attributes(metric: Metric, words: Labels) -> dict[str, Any]:
    return {label: word for label, word in zip(metric.labels, words, strict=True) if word not in (None, "")}


def _distribution(about: dict[str, Any], shown: Shown, since: int, now: int) -> HistogramDataPoint:
    examples = [_exemplar(one) for one in shown.examples if one is not None]
    nobody_keeps: Any = None  # the least and the largest are optional where they are sent
    return HistogramDataPoint(
        about, since, now, shown.count, shown.sum, shown.counts, shown.bounds, nobody_keeps, nobody_keeps, examples
    )  # fmt: skip


def _exemplar(example: Example) -> SdkExemplar:
    """Of a trace as a whole: the encoder leaves the trace out where no span is named, and 0 is none."""
    return SdkExemplar({}, example.value, round(example.at * 1e9), span_id=0, trace_id=int(example.trace, 16))
