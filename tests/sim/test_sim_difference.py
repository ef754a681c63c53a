"""What `tidegate diff` prints, and that both sides meet the same traffic."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from extproc.cli import app
from extproc.settings import Settings, SettingsError, load, parse
from extproc.sim.compare import Options
from extproc.sim.difference import played, told


def changed(**limit: int) -> Settings:
    """The demo with another limit of its first upstream."""
    raw = load(None, {}).model_dump(mode="json")
    raw["upstreams"]["primary"]["limits"][0] |= limit
    return parse(yaml.safe_dump(raw, sort_keys=False), "changed")


def traffic(folder: Path, count: int = 200, extra: str = "") -> Path:
    path = folder / "trace.csv"
    rows = [f"{i / 2},{200 + i * 37 % 700},{20 + i * 53 % 280}{extra}" for i in range(count)]
    path.write_text("\n".join(["seconds,prompt_tokens,output_tokens" + (",lane" if extra else ""), *rows]))
    return path


def test_every_change_is_a_line_with_what_it_needs() -> None:
    """And whether anything differs is told by the versions, too."""
    old = load(None, {})
    assert told(old, old)[0].startswith("nothing differs; version ")
    raw = old.model_dump(mode="json")
    raw["upstreams"]["primary"]["limits"][0]["tpm"] = 1
    raw["service"]["console"] = "127.0.0.1:1"
    raw["gateway"]["port"] = 1
    lines = told(old, parse(yaml.safe_dump(raw, sort_keys=False), "new"))
    assert [" ".join(line.split()) for line in lines[:3]] == [
        "needs Envoy's config rendered again gateway.port: 10000 -> 1",
        'needs a restart service.console: "127.0.0.1:10004" -> "127.0.0.1:1"',
        "live upstreams.primary.limits.*.tpm: 120000 -> 1",
    ]
    assert lines[3].startswith("3 settings differ; version ")


def test_both_sides_meet_the_same_traffic(tmp_path: Path) -> None:
    """The same config comes to the same end, and a smaller limit serves fewer of as many."""
    old, options = load(None, {}), Options(settings=load(None, {}), trace=traffic(tmp_path), loads=(2.0,))
    same = played(options, old, changed())[2.0]
    assert same["old"] == same["new"]
    less = played(options, old, changed(tpm=30_000))[2.0]
    assert less["old"] == same["old"]
    assert less["new"].all.offered == less["old"].all.offered == 200
    assert less["new"].all.served < less["old"].all.served
    assert not less["new"].broken


def test_what_the_new_config_cannot_be_asked_is_said(tmp_path: Path) -> None:
    """A lane of the traffic that it does not have."""
    old = load(None, {})
    new = parse(yaml.safe_dump({**old.model_dump(mode="json"), "lanes": {"P0": {}, "P1": {}}}, sort_keys=False), "new")
    options = Options(settings=old, trace=traffic(tmp_path, extra=",P2"))
    with pytest.raises(SettingsError, match="P2"):
        played(options, old, new)


def test_the_command_reads_both_files_and_the_trace(tmp_path: Path) -> None:
    """One table with a row for each side."""
    files = []
    for name, settings in {"old": load(None, {}), "new": changed(tpm=30_000)}.items():
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))
    trace = traffic(tmp_path, 60)
    result = CliRunner().invoke(app, ["diff", *map(str, files), "--trace", str(trace), "--jobs", "1"])
    assert result.exit_code == 0, result.output
    assert "upstreams.primary.limits.*.tpm: 120000 -> 30000" in result.output
    assert "│ old    │" in result.output
    assert "│ new    │" in result.output
    trace.write_text("nonsense")
    assert CliRunner().invoke(app, ["diff", *map(str, files), "--trace", str(trace)]).exit_code == 2
