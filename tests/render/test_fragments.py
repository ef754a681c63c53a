"""`tidegate render --part`: each part as text, the same as what `merge` puts in."""

from __future__ import annotations

import yaml
from typer.testing import CliRunner

from extproc.cli import app
from extproc.render.fragments import FRAGMENTS, fragment
from extproc.render.parts import parts
from extproc.render.tracing import tracing
from extproc.settings import OtlpSettings, TelemetrySettings, load

SETTINGS = load(None, {})
RUN = CliRunner()


def test_each_part_is_what_merge_puts_in_and_says_where_it_belongs() -> None:
    ours = parts(SETTINGS)
    for name in ("http_filters", "upstream_log", "routes", "clusters", "secrets", "listeners", "access_log"):
        text = fragment(name, SETTINGS)
        assert yaml.safe_load(text)[name] == getattr(ours, name)
        assert "\n# Into " in text
    assert yaml.safe_load(fragment("local_replies", SETTINGS))["local_reply_config"]["mappers"] == ours.mappers
    settings = yaml.safe_load(fragment("connection_manager", SETTINGS))
    assert settings == {"stream_idle_timeout": "960s", "request_timeout": "120s", "delayed_close_timeout": "0s"}


def test_all_parts_are_documents_of_their_own() -> None:
    documents = list(yaml.safe_load_all(fragment("all", SETTINGS)))
    each = [yaml.safe_load(fragment(name, SETTINGS)) for name in FRAGMENTS if name not in ("all", "tracing")]
    assert documents == each


def test_tracing_is_a_part_where_there_is_a_collector() -> None:
    telemetry = TelemetrySettings(otlp=OtlpSettings(endpoint="http://collector:4318"))
    traced = SETTINGS.model_copy(update={"telemetry": telemetry})
    told = yaml.safe_load(fragment("tracing", traced))
    assert told == tracing(traced)
    assert told in list(yaml.safe_load_all(fragment("all", traced)))
    assert yaml.safe_load(fragment("tracing", SETTINGS)) == {}


def test_every_route_of_llm_paths_is_small_enough_for_envoy() -> None:
    """Other endpoints have too many names for one expression; together the routes take each of them, and no more."""
    settings = SETTINGS.model_copy(update={"other_endpoints": "primary"})
    unread = [
        r["match"]["safe_regex"]["regex"] for r in parts(settings).routes if r["name"].startswith("tidegate.other")
    ]
    assert len(unread) > 1
    assert all(len(pattern) < 100 for pattern in unread)
    assert "|".join(unread).count("vector_stores") == 1


def test_the_command_line() -> None:
    done = RUN.invoke(app, ["render", "--part", "routes"])
    assert (done.exit_code, done.stdout) == (0, fragment("routes", load(None)))
    wrong = RUN.invoke(app, ["render", "--part", "route"])
    assert wrong.exit_code == 2
    assert "unknown part 'route'" in wrong.output
