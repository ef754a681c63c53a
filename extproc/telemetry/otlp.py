"""Metrics sent to an OpenTelemetry collector, now and then, from a thread of their own.

A collector that is away, slow or says no costs the service nothing but that thread's time, and is told in the log when
that begins, every ten minutes while it lasts, and when it is over. What was not sent is not kept: counters only grow,
so the next that arrives has it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData

from extproc.settings import OtlpSettings

__all__ = ["Heard", "OtlpError", "Push", "Session", "headers_of"]

log = logging.getLogger("tidegate")

TIMEOUT_S = 10.0
"""For one attempt to send, those included that are made again after an error that may pass."""
AGAIN_S = 600.0
"""While it fails it is told so often."""
LIBRARY = "opentelemetry.exporter.otlp.proto.http"
"""Above the loggers of the exporters, which tell of every failure; that is told here, seldom."""
EXPORTERS = {"metrics": "metric_exporter", "traces": "trace_exporter"}
LONGEST = 300
"""Characters of their words that are told."""


class OtlpError(Exception):
    """The file with the collector's headers cannot be used. The message has no header's value."""


def headers_of(settings: OtlpSettings) -> dict[str, str]:
    """The headers that a collector asks for, by name; of `name: value`, one a line. OtlpError says what is wrong."""
    if settings.headers_file is None:
        return {}
    where = f"telemetry.otlp.headers_file {settings.headers_file}"
    try:
        lines = Path(settings.headers_file).read_text("ascii").splitlines()
    except OSError as error:
        raise OtlpError(f"{where}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OtlpError(f"{where}: is not plain ASCII text") from None
    return dict(_header(line, f"{where}, line {number}") for number, line in enumerate(lines, 1) if line.strip())


def _header(line: str, where: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip().replace("-", "").replace("_", "").isalnum() or not value.strip():
        raise OtlpError(f"{where}: is not `name: value`")
    return name.strip().lower(), value.strip()


class Session(requests.Session):
    """Looks at the head of an answer and no further: what has no end, or comes a byte at a time, holds nobody.

    An answer that leads elsewhere is an error: nothing is sent there, and it would pass for taken.
    """

    def send(self, request: requests.PreparedRequest, **how: Any) -> requests.Response:
        """As the library asks."""
        answer = super().send(request, **{**how, "stream": True, "allow_redirects": False})
        if answer.headers.get("content-length") == "0":
            _ = answer.content  # so that the connection can be used again
        else:
            answer.close()
            answer._content = b""  # noqa: SLF001 - what is set is not read any more
        if answer.is_redirect or 300 <= answer.status_code < 400:  # noqa: PLR2004 - whatever else sends elsewhere
            raise requests.RequestException(f"the answer is {answer.status_code} and leads elsewhere")
        return answer


class Words(logging.Filter):
    """Keeps the first that a library has to say of an attempt, and lets nothing of it be written."""

    first = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """As the logging library asks."""
        self.first = self.first or record.getMessage()[:LONGEST]
        return False


class Heard:
    """Tells the log whether a collector takes what it is sent, seldom. Used by one thread."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """what: metrics or traces."""
        self._what = what
        self._clock = clock
        self._since: float | None = None
        self._told = 0.0
        self.failed = 0
        self._words = Words()
        library = logging.getLogger(f"{LIBRARY}.{EXPORTERS[what]}")
        for former in [one for one in library.filters if isinstance(one, Words)]:
            library.removeFilter(former)
        library.addFilter(self._words)

    @property
    def failing(self) -> bool:
        """Whether the last was not taken."""
        return self._since is not None

    def failure(self, why: str) -> None:
        """It was not taken. why: is told where the library has said nothing."""
        now, said = self._clock(), self._words.first or why
        self._words.first = ""
        self.failed += 1
        if self._since is None:
            self._since = now
        elif now - self._told < AGAIN_S:
            return
        self._told = now
        log.warning("%s cannot be sent to the collector, for %.0f s now: %s", self._what, now - self._since, said)

    def success(self) -> None:
        """It was."""
        self._words.first = ""
        if self._since is not None:
            log.warning("%s are sent to the collector again", self._what)
            self._since = None


class Exporter(OTLPMetricExporter):
    """The SDK's, which tells what becomes of it."""

    def __init__(self, settings: OtlpSettings, headers: Mapping[str, str]) -> None:
        """headers: see `headers_of`."""
        self.heard = Heard("metrics")
        endpoint = f"{settings.endpoint.rstrip('/')}/v1/metrics"
        super().__init__(endpoint, headers=headers, timeout=TIMEOUT_S, compression=Compression.Gzip, session=Session())

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """Send it."""
        result = super().export(metrics_data, timeout_millis, **kwargs)
        if result is MetricExportResult.SUCCESS:
            self.heard.success()
        else:
            self.heard.failure("it is not reached, or refuses them")
        return result


class Push:
    """Sends what `gather` returns every `every_s`, from a thread of its own, until `shutdown`; gather: is called there.

    The SDK's periodic reader does the same with what its own instruments have counted, and with nothing else.
    """

    def __init__(self, settings: OtlpSettings, headers: Mapping[str, str], gather: Callable[[], MetricsData]) -> None:
        """Begins at once."""
        self._gather = gather
        self._every_s = settings.every_s
        self._to = Exporter(settings, headers)
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="otlp-metrics", daemon=True)
        self._thread.start()

    def shutdown(self, timeout_s: float) -> None:
        """Send once more, and no more after that; wait for it so long at most, and not at all while sending fails."""
        self._stopping.set()
        if not self._to.heard.failing:
            self._thread.join(timeout_s)
        self._to.shutdown()

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            self._send()
        if not self._to.heard.failing:
            self._send()

    def _send(self) -> None:
        """Whatever goes wrong is told, and the next is tried in its time."""
        try:
            self._to.export(self._gather())
        except Exception as error:  # noqa: BLE001 - nothing of this may end the thread
            self._to.heard.failure(f"{type(error).__name__}: {error}")
