"""Traces that no collector takes harm nobody: not requests, not the end of the service, and hardly the log."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path

import pytest

from extproc.core.events import Refused
from extproc.core.refusal import Reason
from extproc.settings import OtlpSettings
from extproc.telemetry.conventions import Conventions
from extproc.telemetry.dossiers import Dossiers
from extproc.telemetry.otlp import OtlpError
from extproc.telemetry.sampling import Sampling
from extproc.telemetry.traces import LAST_S, QUEUE, Sending, Traces
from tests.collector import Collector


def sent(otlp: OtlpSettings, requests: int) -> Traces:
    """Traces with as many requests in them."""
    dossiers = Dossiers(10, time.monotonic, time.time)
    traces = Traces(Sampling(1.0), Conventions({}, frozenset()), Sending(otlp), time.monotonic, "one")
    dossiers.ended.append(traces.hear)
    for n in range(requests):
        dossiers(Refused(Reason.LANE_FULL, 503, request_id=f"r-{n}"))
    return traces


async def test_the_last_spans_are_sent_with_the_headers_of_the_file(tmp_path: Path) -> None:
    """Under `/v1/traces`, whatever stands before it, by which process they are."""
    file = tmp_path / "headers"
    file.write_text("X-Key: one\n", "utf-8")
    with Collector().listening() as collector:
        await sent(OtlpSettings(endpoint=f"{collector.url}/base/", headers_file=str(file)), 3).close()
        assert [span.attributes["tidegate.reason"] for span in collector.spans] == ["lane_full"] * 3
        assert {(span.service, span.name, span.error) for span in collector.spans} == {
            ("tidegate", "request", "refused: lane_full")
        }
        assert collector.headers[0][":path"] == "/base/v1/traces"
        assert collector.headers[0]["x-key"] == "one"


@pytest.mark.parametrize("how", ["silent", "away", "no"])
async def test_the_end_does_not_wait_long_for_a_collector(
    how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never answers, is not there, or says no: what is left of the batch is lost, and that is told once."""
    monkeypatch.setattr("extproc.telemetry.traces.TIMEOUT_S", 600.0)
    collector = Collector(silent=threading.Event() if how == "silent" else None, status=500 if how == "no" else 200)
    with caplog.at_level(logging.INFO):
        with collector.listening():
            url = "http://127.0.0.1:1" if how == "away" else collector.url
            traces = sent(OtlpSettings(endpoint=url), 5)
            began, beats = time.monotonic(), 0

            async def beat() -> None:
                nonlocal beats
                while True:
                    await asyncio.sleep(0.01)
                    beats += 1

            beating = asyncio.create_task(beat())
            await traces.close()
            took = time.monotonic() - began
            beating.cancel()
        await _threads_end()
    assert took < LAST_S + 60.0
    if how == "silent":
        assert took >= LAST_S - 0.1
        assert beats > 10, "the loop goes on meanwhile"
    (told,) = _about_traces(caplog)
    assert told.startswith("traces cannot be sent to the collector")


async def test_requests_go_on_while_a_collector_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """More spans than are kept for it are dropped, without a word for each, and take no longer than others."""
    with caplog.at_level(logging.WARNING):
        with Collector(silent=threading.Event()).listening() as collector:
            traces = sent(OtlpSettings(endpoint=collector.url), 0)
            dossiers = Dossiers(10, time.monotonic, time.time)
            dossiers(Refused(Reason.LANE_FULL, 503, request_id="one"))
            (one,) = dossiers.newest(1)
            for _ in range(QUEUE + 2000):
                traces.tell(one)
            await traces.close()
        await _threads_end()
    assert len(_about_traces(caplog)) == 1


def _about_traces(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, but for what others' threads may still have to say of metrics."""
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record.getMessage() for record in records if "metrics" not in record.getMessage()]


async def _threads_end() -> None:
    """What sends has noticed that nobody is there any more."""
    async with asyncio.timeout(120):
        while any("RecordProcessor" in one.name or one.name == "last-spans" for one in threading.enumerate()):  # noqa: ASYNC110 - threads
            await asyncio.sleep(0.02)


def test_headers_that_cannot_be_had_are_an_error_without_their_values(tmp_path: Path) -> None:
    """At the start, before anything is sent."""
    file = tmp_path / "headers"
    with pytest.raises(OtlpError, match="headers_file"):
        Sending(OtlpSettings(endpoint="http://127.0.0.1:1", headers_file=str(file)))
    file.write_text("a secret without a name\n", "utf-8")
    with pytest.raises(OtlpError) as told:
        Sending(OtlpSettings(endpoint="http://127.0.0.1:1", headers_file=str(file)))
    assert "secret" not in str(told.value)
