"""Traces for an OpenTelemetry collector: the spans of a request are made when it has ended, from its dossier.

While a request is here it costs nothing but the question whether it is sampled (see `sampling`), asked when it ends.
A moment later, when the records of its attempts have come too, `spans` tells what happened, and the library's spans are
made with the times at which it did. A thread of the library sends them in batches.

What is to be joined. Where Envoy traces (1.40, OpenTelemetry tracer, both profiles), it puts its own `traceparent` into
what goes to upstreams only: the request headers that it shows us still have the caller's, or none. Its span for asking
us is named in the metadata of the gRPC stream, with its decision in the flags, and `wire` puts that in the header's
place. So our spans stand below `async envoy.service.ext_proc.v3.ExternalProcessor.Process egress`, which stands beside
the spans of the attempts. Where Envoy does not trace, they stand below the caller's; without a caller they begin a
trace. An Envoy does not trace at all what comes with an invalid `traceparent`: there, too, ours begin one.

A collector that is slow or away harms nobody: what it does not take is dropped once the queue is full, and the end of
the service waits for it no longer than `LAST_S`. Deliberately not here: spans while a request runs, for nobody could
see them before it has ended; and a trace for each canary.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import count
from math import inf

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)

from extproc.settings import OtlpSettings
from extproc.telemetry import spans
from extproc.telemetry.conventions import Conventions
from extproc.telemetry.dossiers import Dossier
from extproc.telemetry.otlp import Heard, Session, headers_of
from extproc.telemetry.sampling import Sampling, parent_of

__all__ = ["Sending", "Traces"]

log = logging.getLogger("tidegate")

VERSION = version("tidegate")
SETTLE_S = 1.0
"""So long after the end of a request the records of its attempts may come."""
EVERY_S = 0.5
AT_ONCE = 8
"""So many requests are told of before others get their turn."""
MOST_DUE = 4096
"""So many ended requests wait to be told of; the oldest are dropped."""
QUEUE, BATCH, DELAY_S = 4096, 512, 2.0
"""Spans that wait to be sent, and how many at a time, and how often."""
TIMEOUT_S = 5.0
LAST_S = 2.0
"""So long the end of the service waits for the last spans to be sent."""
KINDS = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT}
QUEUES = "opentelemetry.sdk._shared_internal"
"""Logger of the library that tells of each span that finds the queue full: the collector's silence was told then."""


class Traces:
    """See the head of this file. Everything but the sending is of one event loop."""

    def __init__(
        self,
        sampling: Sampling,
        conventions: Conventions,
        processor: SpanProcessor,
        clock: Callable[[], float],
        instance: str,
    ) -> None:
        """`processor` gets the spans; `clock` is that of the dossiers; instance: tells this process from others."""
        about = {"service.name": "tidegate", "service.version": VERSION, "service.instance.id": instance}
        self.dropped = 0
        self._sampling = sampling
        self._conventions = conventions
        self._clock = clock
        self._ids = _Ids()
        self._due: deque[tuple[float, Dossier]] = deque()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # whoever comes here has been chosen
            resource=Resource.create(about),
            shutdown_on_exit=False,
            id_generator=self._ids,
            span_limits=SpanLimits(max_attribute_length=spans.LONGEST),
        )
        self._processor = processor
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tidegate", VERSION)

    def follow(self, conventions: Conventions) -> None:
        """Name upstreams and models so from now on."""
        self._conventions = conventions

    def hear(self, dossier: Dossier) -> None:
        """A request has ended."""
        if self._sampling.of(dossier.trace, dossier.id, dossier.ticket):
            self._due.append((self._clock() + SETTLE_S, dossier))
            if len(self._due) > MOST_DUE:
                self._due.popleft()
                self.dropped += 1

    async def run(self) -> None:
        """Tell of those that ended a moment ago, for ever."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self._tell(self._clock())

    async def close(self) -> None:
        """Tell of all, and send what can be sent in a short time."""
        await self._tell(inf)
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        until = time.monotonic() + LAST_S
        while sending.is_alive() and time.monotonic() < until:  # noqa: ASYNC110 - it is a thread
            await asyncio.sleep(0.02)
        if sending.is_alive() and isinstance(self._processor, Sending):
            self._processor.give_up()

    async def _tell(self, now: float) -> None:
        """Make the spans of those that are due; others get their turn in between."""
        for told in count(1):
            if not self._due or self._due[0][0] > now:
                return
            _, dossier = self._due.popleft()
            try:
                self.tell(dossier)
            except Exception:
                log.exception("the trace of a request could not be told")
            if told % AT_ONCE == 0:
                await asyncio.sleep(0)

    def tell(self, dossier: Dossier) -> None:
        """Make the spans of one."""
        parent, own = parent_of(dossier.trace), self._sampling.of(dossier.trace, dossier.id, dossier.ticket)
        context = Context()  # not that of whoever runs this
        if parent is not None:
            above = SpanContext(int(parent.trace, 16), int(parent.span, 16), is_remote=True, trace_flags=_SAMPLED)
            context = set_span_in_context(NonRecordingSpan(above), context)
        self._ids.next_trace = int(own, 16)
        root, children = spans.tree(dossier, self._conventions)
        offset = round(dossier.offset_s * 1e9)
        span = _begin(self._tracer, root, context, offset)
        below = set_span_in_context(span, context)
        for child in children:
            _end(_begin(self._tracer, child, below, offset), child, offset)
        _end(span, root, offset)


_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class _Ids(RandomIdGenerator):
    """Begins a trace under the id that it was told."""

    next_trace = 0

    def generate_trace_id(self) -> int:
        """As it was told."""
        return self.next_trace or super().generate_trace_id()


def _begin(tracer: Tracer, told: spans.Told, context: Context, offset: int) -> Span:
    """offset: nanoseconds from the loop's clock to the calendar's."""
    return tracer.start_span(
        told.name, context, KINDS[told.kind], told.attributes, start_time=offset + round(told.began * 1e9)
    )


def _end(span: Span, told: spans.Told, offset: int) -> None:
    if told.error:
        span.set_status(Status(StatusCode.ERROR, told.error))
    span.end(offset + round(told.ended * 1e9))


# ------------------------------------------------------------------------------------------------- sending


class Sending(BatchSpanProcessor):
    """Sends spans to a collector, from a thread of its own."""

    def __init__(self, otlp: OtlpSettings) -> None:
        """OtlpError where the collector's headers cannot be had."""
        logging.getLogger(QUEUES).setLevel(logging.ERROR)
        self._to = Exporter(otlp, headers_of(otlp))
        super().__init__(
            self._to, max_queue_size=QUEUE, schedule_delay_millis=DELAY_S * 1000, max_export_batch_size=BATCH
        )

    def shutdown(self) -> None:
        """Send what is left, unless nothing could be sent of late."""
        if self._to.heard.failing:
            self.give_up()
        super().shutdown()  # type: ignore[no-untyped-call]

    def give_up(self) -> None:
        """Send nothing more, and try nothing again."""
        self._to.shutdown()  # type: ignore[no-untyped-call]


class Exporter(OTLPSpanExporter):
    """The library's, which tells what becomes of what it sends, seldom."""

    def __init__(self, otlp: OtlpSettings, headers: Mapping[str, str]) -> None:
        """headers: see `headers_of`."""
        self.heard = Heard("traces")
        endpoint = f"{otlp.endpoint.rstrip('/')}/v1/traces"
        super().__init__(endpoint, headers=headers, timeout=TIMEOUT_S, compression=Compression.Gzip, session=Session())

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send them. Whatever goes wrong costs no more than these."""
        try:
            result = super().export(spans)
        except Exception as error:  # noqa: BLE001 - the thread that sends must go on
            self.heard.failure(type(error).__name__)
            return SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self.heard.success()
        else:
            self.heard.failure("it is not reached, or refuses them")
        return result
