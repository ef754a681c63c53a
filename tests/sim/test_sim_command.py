"""`tidegate simulate` on the command line: what it writes, and what it says of mistakes."""

import json
import sys

import pytest
from typer.testing import CliRunner

from extproc.cli import app, main
from extproc.sim.virtual import Stuck
from tests.sim.worlds import PROVIDER, trace


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a config and a trace."""
    (tmp_path / "tidegate.yaml").write_text(PROVIDER)
    trace(tmp_path / "t.csv", count=60)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simulate(*words: str):
    return CliRunner().invoke(app, ["simulate", *words])


def test_figures_are_printed_and_written(here):
    """A table, the figures, and the page; exit code 0."""
    done = simulate(
        "--trace", "t.csv", "--load", "2,0.5", "--policy", "tidegate,none", "--jobs", "1", "--slo", "P0=3",
        "--json", "out.json", "--html", "out.html", "--fault", "outage openai at 5 for 5",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "everything balances" in done.output
    assert "4 of 4" in done.output
    written = json.loads((here / "out.json").read_text())
    assert [(one["policy"], one["load"]) for one in written["outcomes"]] == [
        ("none", 0.5), ("tidegate", 0.5), ("none", 2.0), ("tidegate", 2.0),
    ]  # fmt: skip
    assert written["slo_s"] == {"P0": 3.0, "P1": 60.0, "P2": 3600.0}
    assert "<title>t on openai</title>" in (here / "out.html").read_text()


def test_bursts_need_no_trace(here):
    """Load 1 unless told otherwise."""
    done = simulate("--burst", "P0 for 20 rps 1", "--policy", "none", "--json", "out.json")
    assert done.exit_code == 0, done.output
    assert [one["load"] for one in json.loads((here / "out.json").read_text())["outcomes"]] == [1.0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace", "none.csv"], "none.csv: No such file"),
        (["--trace", "t.csv", "--html", "no/where.html"], "no/where.html: No such file"),
        (["--trace", "t.csv", "--load", "much"], "'much' is not numbers"),
        (["--trace", "t.csv", "--load", "0"], "'0' is not numbers"),
        (["--trace", "t.csv", "--policy", "luck"], "unknown policy 'luck'; known: none, fifo"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_mistake_is_one_line_and_exit_code_2(words, said):
    """Before anything is run."""
    done = simulate(*words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to simulate: give a trace or a burst"),
        (["--trace", "t.csv", "--model", "x"], "--model"),
        (["--trace", "t.csv", "--fault", "outage nobody at 1 for 1"], "upstream 'nobody' is not in the config"),
        (["--burst", "P1 for 1"], "give either rps or load"),
        (["--trace", "t.csv", "--lanes", "P0=x"], "P0=x"),
        (["--trace", "t.csv", "--scenario", "none.yaml"], "none.yaml: No such file"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_mistake_in_the_settings_is_told_as_everywhere(monkeypatch, capsys, words, said):
    """By `main`, a line each."""
    monkeypatch.setattr(sys, "argv", ["tidegate", "simulate", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_what_does_not_balance_is_exit_code_1(monkeypatch):
    """Figures that cannot be trusted must not pass for good ones."""
    monkeypatch.setattr("extproc.sim.run._Run._broken", lambda _: iter(["something is held"]))
    done = simulate("--trace", "t.csv", "--load", "1", "--policy", "tidegate", "--jobs", "1")
    assert done.exit_code == 1
    assert "does not balance: tidegate at load 1: something is held" in done.output


@pytest.mark.usefixtures("here")
def test_a_world_that_stands_still_is_exit_code_2(monkeypatch):
    """And is called what it is."""

    def stuck(_):
        raise Stuck

    monkeypatch.setattr("extproc.sim.compare.simulate", stuck)
    done = simulate("--trace", "t.csv", "--load", "1", "--policy", "tidegate", "--jobs", "1")
    assert done.exit_code == 2
    assert "stands still" in done.output


def test_a_missing_part_is_told_before_the_long_run(here, monkeypatch):
    """No page without Plotly."""
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    done = simulate("--trace", "t.csv", "--html", "out.html")
    assert done.exit_code == 2
    assert "pip install 'tidegate[report]'" in done.output
    assert not (here / "out.html").exists()
