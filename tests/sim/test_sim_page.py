"""What a comparison shows: a table, plain data, and a page that needs nothing else."""

import builtins
import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from extproc.settings import parse
from extproc.sim.compare import Comparison, Options, compare
from extproc.sim.page import PageError, page
from extproc.sim.policies import PolicyName
from extproc.sim.scenario import Scenario, changed
from extproc.sim.table import data, shown
from tests.sim.worlds import BOTH, trace

POLICIES = (PolicyName.NONE, PolicyName.TIDEGATE)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> Comparison:
    """Two policies at two loads, with an outage."""
    path = trace(tmp_path_factory.mktemp("page") / "t.csv", count=150)
    scenario = changed(Scenario(), faults=["outage openai at 10 for 10"])
    return compare(Options(parse(BOTH, "test"), scenario, path, loads=(0.5, 2.0), policies=POLICIES), lambda _: None)


def printed(comparison: Comparison) -> str:
    console = Console(file=io.StringIO(), width=200)
    shown(comparison, console)
    return console.file.getvalue()


def test_the_table_has_every_policy_load_and_lane(comparison):
    """And says that everything balances."""
    text = printed(comparison)
    for word in ("load 0.5", "load 2", "none", "tidegate", "P0", "P1", "P2", "everything balances"):
        assert word in text
    assert "does not balance" not in text


def test_what_does_not_balance_is_said(comparison):
    """With policy and load."""
    first, *others = comparison.outcomes
    broken = replace(comparison, outcomes=[replace(first, broken=["2 still fly"]), *others])
    assert "does not balance: none at load 0.5: 2 still fly" in printed(broken)
    assert "everything balances" not in printed(broken)
    assert "none at load 0.5: 2 still fly" in page(broken, "title")


def test_plain_data_is_all_there_is(comparison):
    """Figures, derived ones too, and no wall time, which is never the same again."""
    plain = json.loads(json.dumps(data(comparison)))
    assert [(one["policy"], one["load"]) for one in plain["outcomes"]] == [
        ("none", 0.5), ("tidegate", 0.5), ("none", 2.0), ("tidegate", 2.0),
    ]  # fmt: skip
    ours = plain["outcomes"][3]
    assert ours["goodput"] == comparison.outcomes[3].goodput
    assert ours["lanes"]["P0"]["attainment"] == comparison.outcomes[3].lanes["P0"].attainment
    assert ours["upstreams"]["openai"]["served"] > 0
    assert plain["faults"][0]["kind"] == "outage"
    assert "took" not in json.dumps(plain)


def test_the_page_fetches_nothing(comparison):
    """No script, style, font or picture from elsewhere; the data and the charts' code are in it."""
    html = page(comparison, "a <title> & more")
    assert "<title>a &lt;title> &amp; more</title>" in html
    head, body = html.split("</head>")
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", html)
    assert "@import" not in head
    assert "Plotly" in body
    assert "$" not in re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert embedded is not None
    assert json.loads(embedded[1])["title"] == "a <title> & more"


def test_series_are_thinned_to_what_a_screen_shows(comparison):
    """Peaks of caches stay."""
    longer = comparison.outcomes[0]
    seconds = [float(at) for at in range(3000)]
    kv = [0.9 if at == 1234 else 0.1 for at in range(3000)]
    series = replace(longer.series, at_s=seconds, kv={"pool": kv}, waiting={"P0": seconds})
    html = page(replace(comparison, outcomes=[replace(longer, series=series)]), "long")
    embedded = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])["outcomes"][0]["series"]
    assert len(embedded["at_s"]) == len(embedded["kv"]["pool"]) == len(embedded["waiting"]["P0"]) == 300
    assert max(embedded["kv"]["pool"]) == 0.9


def test_without_plotly_the_page_says_what_to_install(comparison, monkeypatch):
    """An optional part that is not there."""
    real = builtins.__import__

    def missing(name, *args):
        if name.startswith("plotly"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr("extproc.sim.page.importlib.import_module", missing)
    with pytest.raises(PageError, match=r"pip install 'tidegate\[report\]'"):
        page(comparison, "none")
