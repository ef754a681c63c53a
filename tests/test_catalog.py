"""The table of metrics: names as OpenTelemetry's rule makes them for Prometheus, and nothing told twice."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from extproc.cli import app
from extproc.telemetry.catalog import BY_NAME, METRICS, Kind


def test_names_follow_the_rule_from_opentelemetry_to_prometheus() -> None:
    """Dots become underscores, the unit is behind, and `_total` behind what only grows."""
    names = {otel: BY_NAME[otel].name for otel in BY_NAME}
    assert names["tidegate.refused"] == "tidegate_refused_total"
    assert names["tidegate.waited"] == "tidegate_waited_seconds_total"
    assert names["tidegate.queue"] == "tidegate_queue_bytes"
    assert names["tidegate.bucket.refill"] == "tidegate_bucket_refill_per_second"
    assert names["tidegate.kv.saturation"] == "tidegate_kv_saturation_ratio"
    assert names["tidegate.forecast.ratio"] == "tidegate_forecast_ratio"
    assert names["process.cpu"] == "process_cpu_seconds_total"
    assert names["gen_ai.server.request.duration"] == "gen_ai_server_request_duration_seconds"
    assert names["gen_ai.client.token.usage"] == "gen_ai_client_token_usage"
    assert BY_NAME["tidegate.wait"].series == tuple(
        f"tidegate_wait_seconds_{one}" for one in ("bucket", "sum", "count")
    )


def test_every_metric_is_sound() -> None:
    """Nothing stored by Prometheus has two sources, names and labels are valid, and each says what it is."""
    stored = [series for metric in METRICS for series in metric.series]
    assert len(set(stored)) == len(stored)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name), metric
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in metric.prometheus_labels), metric
        assert metric.help.endswith("."), metric
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets), metric
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric


def test_the_command_prints_it() -> None:
    """One line for each."""
    lines = CliRunner().invoke(app, ["metrics"]).output.splitlines()
    assert len(lines) == len(METRICS) + 2
    assert any(
        line.startswith("| `tidegate_wait_seconds` | histogram | seconds | `lane`, `outcome` |") for line in lines
    )


def test_metrics_that_the_readme_names_are_there_with_their_labels() -> None:
    """Whoever copies one from it finds it."""
    text = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    labels = {name: metric.prometheus_labels for metric in METRICS for name in (metric.name, *metric.series)}
    named = re.findall(r"\b((?:tidegate|gen_ai|process)_[a-z_]*[a-z])(?![a-z_*\"])(?:\{([^}\"]*)\})?", text)
    assert len(named) > 20
    for name, with_labels in named:
        assert name in labels, name
        assert {*filter(None, with_labels.split(","))} <= {*labels[name]}, name
