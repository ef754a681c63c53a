"""Alert rules and dashboard: queries ask for what is told, alerts fire for their cause and for nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import promql_parser
import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from extproc import cli
from extproc.core.refusal import Reason
from extproc.core.runbook import Runbook
from extproc.render.monitoring import alerts, alerts_yaml, dashboard, dashboard_json
from extproc.render.monitoring.alerts import OWN, SOON_S, soon_s
from extproc.settings import Settings, load, parse
from extproc.telemetry.catalog import BY_NAME, METRICS, Kind

ROOT = Path(__file__).parents[2]
SCRAPED = {"job", "instance", "namespace", "pod"}
"""Labels that a Prometheus adds to everything."""
OTHERS = {"up": set(), "envoy_cluster_membership_healthy": {"envoy_cluster_name"}}
"""Names that are not ours, and their labels."""
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None and os.environ.get("TIDEGATE_PROMETHEUS") != "required",
    reason="there is no promtool here: it is part of Prometheus",
)


def settings() -> Settings:
    """The built-in demo's."""
    return load(None, {})


def rules() -> list[dict[str, Any]]:
    """All rules."""
    return [rule for group in alerts(settings())["groups"] for rule in group["rules"]]


def alerting() -> list[dict[str, Any]]:
    """Those that alert."""
    return [rule for rule in rules() if "alert" in rule]


def panels() -> list[dict[str, Any]]:
    """All panels of the dashboard that show something."""
    return [panel for panel in dashboard(settings())["panels"] if panel["type"] != "row"]


def plain(expr: str) -> str:
    """A query of the dashboard as Grafana would send it."""
    return expr.replace("$__rate_interval", "1m").replace("$job", "x").replace("$instance", "y")


def asked() -> list[str]:
    """Every query of both."""
    board = dashboard(settings())
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    notes = [note["expr"] for note in board["annotations"]["list"]]
    return [rule["expr"] for rule in rules()] + [plain(expr) for expr in (*shown, *notes)]


def known() -> dict[str, set[str]]:
    """Series that a Prometheus may have, and their labels."""
    found = {}
    for metric in METRICS:
        for series in metric.series:
            found[series] = {*metric.prometheus_labels, *(["le"] if series.endswith("_bucket") else [])}
    recorded = {rule["record"]: {"upstream", "counter", "kind"} for rule in rules() if "record" in rule}
    return found | recorded | OTHERS


def selectors(node: Any) -> Iterator[Any]:
    """Every selector below a node of a parsed query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "args", "param"):
        below = getattr(node, name, None)
        for each in below if isinstance(below, list) else [below]:
            if each is not None and type(each).__module__.startswith("promql_parser"):
                yield from selectors(each)


# ------------------------------------------------------------------------------------------------ names


def test_every_query_asks_for_metrics_that_are_told_by_labels_that_they_have() -> None:
    """Names, labels in selectors and those that are grouped by; and counters are asked for their rate."""
    there = known()
    seen = set()
    for query in asked():
        found = list(selectors(promql_parser.parse(query)))
        assert found, query
        labels: set[str] = set()
        for selector in found:
            assert selector.name in there, f"{selector.name} in {query}"
            for matcher in selector.matchers.matchers:
                assert matcher.name in there[selector.name] | SCRAPED, f"{matcher.name} in {query}"
            labels |= there[selector.name]
            seen.add(selector.name)
        for names in re.findall(r"\b(?:by|on|without) \(([^)]*)\)", query):
            assert set(re.split(r",\s*", names)) <= labels | SCRAPED, query
        for counter in (s.name for s in found if s.name.endswith(("_total", "_bucket", "_count"))):
            assert re.search(rf"(rate|increase)\({counter}\b", query), f"{counter} only grows: {query}"
    ours = {s for s in seen if s.startswith(("tidegate_", "gen_ai"))}
    assert len(ours) > 40, "the walk through parsed queries finds few"


def test_a_query_of_something_else_is_noticed() -> None:
    """The walk sees selectors wherever they stand."""
    query = 'sum(rate(a[1m])) / on (x) histogram_quantile(0.9, b{c="d"}) or topk(3, max_over_time((e > 1)[5m:1m])) - -f'
    assert {s.name for s in selectors(promql_parser.parse(query))} == {"a", "b", "e", "f"}


def test_what_is_shown_beside_a_number_is_a_label_that_is_left() -> None:
    """Legends and alerts name labels that the query's result still has."""
    there = known()
    told = [(plain(t["expr"]), t["legendFormat"]) for panel in panels() for t in panel["targets"]]
    told += [(rule["expr"], " ".join(rule["annotations"].values())) for rule in alerting()]
    for query, words in told:
        wanted = set(re.findall(r"\{\{ ?(?:\$labels\.)?([a-z_]+) ?\}\}", words))
        grouped = [set(re.split(r",\s*", names)) for names in re.findall(r"\bby \(([^)]*)\)", query)]
        left = set.intersection(*grouped) if grouped else set.union(
            SCRAPED, *(there[s.name] for s in selectors(promql_parser.parse(query)))
        )  # fmt: skip
        assert wanted <= left, (query, words)


def test_bounds_that_are_asked_for_end_buckets() -> None:
    """What is soon is a bound of the histogram of waits; who waits longest at all sets which."""
    assert set(SOON_S) <= set(BY_NAME["tidegate.wait"].buckets)
    assert BY_NAME["tidegate.wait"].kind is Kind.HISTOGRAM
    assert soon_s(settings()) == 1.0, "P0 of the demo waits at most 4 s"
    for longest, soon in ((0.5, 1.0), (5, 2.5), (60, 30.0), (900, 30.0)):
        raw = {
            "upstreams": {"a": {"provider": "openai", "limits": [{"tpm": 1}]}},
            "routes": [{"models": ["m"], "chain": ["a"], "acknowledge_unowned": True}],
            "lanes": {"fast": {"max_wait_s": longest}},
        }
        made = parse(yaml.safe_dump(raw), "file", {})
        assert soon_s(made) == soon
        assert 'lane="fast"' in alerts_yaml(made)
    edges = re.findall(r'le=~"([^"]+)"', alerts_yaml(settings()))
    assert edges
    assert all(re.fullmatch(edges[0], spelt) for spelt in ("1", "1.0"))
    assert not re.fullmatch(edges[0], "10")


def test_a_refusal_either_misses_the_objective_or_is_the_callers_own() -> None:
    """Whoever adds a reason decides which."""
    ours = {
        Reason.QUEUE_TIMEOUT, Reason.LANE_FULL, Reason.EVICTED, Reason.DEADLINE_UNMEETABLE, Reason.DEADLINE_PASSED,
        Reason.NO_UPSTREAM, Reason.DRAINING, Reason.UPSTREAM_FAILED, Reason.ADMISSION_UNAVAILABLE,
    }  # fmt: skip
    assert ours | set(OWN) == set(Reason)
    assert not ours & set(OWN)


# ---------------------------------------------------------------------------------------------- runbook


def sections() -> dict[str, str]:
    """README's headings of the third level, as the anchors that they get, and what stands below them."""
    text = (ROOT / "README.md").read_text("utf-8")
    found = re.findall(r"^### (.+)\n((?:(?!^##).*\n)*)", text, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-"): body for title, body in found}


def test_every_alert_says_what_it_is_about_and_where_to_read_on() -> None:
    """The section is there and says what it means, what to look at, and what to do."""
    there = sections()
    for rule in alerting():
        told, labels = rule["annotations"], rule["labels"]
        assert labels["severity"] in ("critical", "warning", "info")
        assert len(told["summary"]) > 20
        assert len(told["description"]) > 40
        file, _, anchor = told["runbook_url"].partition("#")
        assert file == "README.md"
        assert anchor in there, f"{rule['alert']}: {anchor}"
    used = {rule["annotations"]["runbook_url"].partition("#")[2] for rule in alerting()}
    assert used == set(Runbook), "no section without an alert"
    for anchor in Runbook:
        assert {"**Look:**", "**Do:**"} <= set(re.findall(r"\*\*\w+:\*\*", there[anchor])), anchor


def test_commands_of_the_runbook_are_there() -> None:
    """With the options that it names."""
    text = "\n".join(sections()[anchor] for anchor in Runbook)
    commands = {" ".join(found.split()) for found in re.findall(r"`tidegate ([^`]+)`", text)}
    assert len(commands) > 10
    for command in commands:
        words, at = command.split(), cast("Any", get_command(cli.app))
        while words and hasattr(at, "commands"):
            name = words.pop(0)
            assert name in at.commands, command
            at = at.commands[name]
        known = {option for parameter in at.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, command


def test_links_and_jobs_can_be_others() -> None:
    """So that links lead somewhere, and Tidegate is found whatever its job is called."""
    asked = ["render", "alerts", "--job", "llm-gw", "--runbooks", "https://wiki/tidegate"]
    done = CliRunner().invoke(cli.app, asked)
    assert done.exit_code == 0
    made = yaml.safe_load(done.stdout)
    found = {rule["alert"]: rule for group in made["groups"] for rule in group["rules"] if "alert" in rule}
    assert found["TidegateDown"]["expr"] == 'up{job=~"llm-gw"} == 0'
    assert found["TidegateDown"]["annotations"]["runbook_url"] == f"https://wiki/tidegate#{Runbook.DOWN}"
    board = CliRunner().invoke(cli.app, ["render", "dashboard"])
    assert json.loads(board.stdout)["title"] == "Tidegate"


# -------------------------------------------------------------------------------------------- dashboard


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """Ids are unique, nothing overlaps, everything is inside its 24 columns, has a unit, and asks the chosen source."""
    board = dashboard(settings())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: dict[tuple[int, int], int] = {}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        for cell in ((x, y) for x in range(place["x"], place["x"] + place["w"])
                     for y in range(place["y"], place["y"] + place["h"])):  # fmt: skip
            assert taken.setdefault(cell, panel["id"]) == panel["id"], f"{panel['title']} overlaps another"
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0
        assert panel["type"] in ("timeseries", "stat", "state-timeline")
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance"]
    assert variables["datasource"]["type"] == "datasource"
    for name in ("job", "instance"):
        assert variables[name]["definition"].startswith("label_values(tidegate_in_flight{")
    assert all("$job" in target["expr"] for panel in panels() for target in panel["targets"])
    assert json.loads(dashboard_json(settings())) == board


def test_units_fit_what_is_asked_for() -> None:
    """Seconds are shown as seconds, shares as percent, rates of requests as such."""
    for panel in panels():
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            if "_seconds" in target["expr"] and "cpu" not in target["expr"]:
                assert unit == "s", panel["title"]
            if unit == "percentunit":
                assert re.search(r" / |_ratio|:ratio|cpu", target["expr"]), panel["title"]
            if unit == "reqps":
                assert "rate(" in target["expr"], panel["title"]


# --------------------------------------------------------------------------------- whether alerts alert

ONE = 'job="tidegate",instance="a:1"'
P0 = f'lane="P0",{ONE}'


def _waits(soon: str, refused: str) -> dict[str, str]:
    """Waits of the first lane: who went within a second, and who was refused."""
    return {
        f'tidegate_wait_seconds_bucket{{outcome="admitted",le="1.0",{P0}}}': soon,
        f'tidegate_wait_seconds_count{{outcome="admitted",{P0}}}': soon,
        f'tidegate_wait_seconds_count{{outcome="refused",{P0}}}': refused,
    }


def _estimates(ratio_bucket: str) -> dict[str, str]:
    """Estimates of one model that all fall below one bound."""
    bounds = [f"{bound:g}" for bound in BY_NAME["tidegate.estimate.ratio"].buckets]
    found = {}
    for bound in (*bounds, "+Inf"):
        above = float(bound) >= float(ratio_bucket)
        found[f'tidegate_estimate_ratio_bucket{{model="m",le="{bound}",{ONE}}}'] = "0+60x300" if above else "0x300"
    return found | {f'tidegate_estimate_ratio_count{{model="m",{ONE}}}': "0+60x300"}


U = f'upstream="u",{ONE}'
BUCKET = f'counter="upstream/u/*/total",kind="total",{U}'
CALM: dict[str, str] = {
    **_waits("0+60x300", "0x300"),
    **_estimates("1"),
    f"up{{{ONE}}}": "1x300",
    f"tidegate_in_flight{{{ONE}}}": "3x300",
    f'envoy_cluster_membership_healthy{{envoy_cluster_name="tidegate_service",{ONE}}}': "1x300",
    f"tidegate_breaker_open{{{U}}}": "0x300",
    f'tidegate_breaker_open{{upstream="v",{ONE}}}': "0x300",
    f'tidegate_failed_total{{reason="upstream_failed",{ONE}}}': "0x300",
    f"tidegate_settled_total{{{ONE}}}": "0+60x300",
    f"tidegate_paced_total{{{U}}}": "0x300",
    f"tidegate_bucket_level{{{BUCKET}}}": "80x300",
    f"tidegate_bucket_capacity{{{BUCKET}}}": "100x300",
    f"tidegate_kv_saturation_ratio{{{U}}}": "0.5x300",
    f"tidegate_kv_stale_seconds{{{U}}}": "0.4x300",
    f"tidegate_queue_requests{{{P0}}}": "0x300",
    f"tidegate_queue_limit_requests{{{P0}}}": "100x300",
    f"tidegate_queue_tokens{{{P0}}}": "0x300",
    f"tidegate_queue_limit_tokens{{{P0}}}": "100x300",
    f"tidegate_queue_bytes{{{P0}}}": "0x300",
    f"tidegate_queue_limit_bytes{{{P0}}}": "100x300",
    f'tidegate_budget_spent{{counter="tenant/t/usd_day",kind="usd_day",upstream="",{ONE}}}': "1x300",
    f'tidegate_budget_limit{{counter="tenant/t/usd_day",kind="usd_day",upstream="",{ONE}}}': "20x300",
    f"tidegate_bypass{{{ONE}}}": "0x300",
    f"tidegate_lane_paused{{{P0}}}": "0x300",
    f"tidegate_upstream_out{{{U}}}": "0x300",
    f"tidegate_draining{{{ONE}}}": "0x300",
    f"tidegate_changes{{{ONE}}}": "0x300",
    f"tidegate_config_waiting{{{ONE}}}": "0x300",
    f'tidegate_config_reloads_total{{result="refused",{ONE}}}': "0x300",
    f'tidegate_loop_lag_seconds_bucket{{le="0.001",{ONE}}}': "0+60x300",
    f'tidegate_loop_lag_seconds_bucket{{le="+Inf",{ONE}}}': "0+60x300",
    f"process_cpu_seconds_total{{{ONE}}}": "0+10x300",
    'process_cpu_seconds_total{job="other",instance="b:1"}': "0+60x300",
}  # fmt: skip
"""An hour like any other, a value a minute."""


def of(metric: str) -> str:
    """The series of the calm hour that begins so."""
    (found,) = [series for series in CALM if series.startswith(f"{metric}{{{''}") and 'upstream="v"' not in series
                and "other" not in series]  # fmt: skip
    return found


TROUBLE: dict[str, tuple[dict[str, str], int]] = {
    "TidegateObjectiveBurnsFast": (_waits("0+60x300", "0+20x300"), 90),
    "TidegateObjectiveBurnsSlowly": (_waits("0+60x300", "0+5x300"), 120),
    "TidegateDown": ({of("up"): "1x60 0x240"}, 64),
    "TidegateAbsent": ({of("tidegate_in_flight"): "3x60"}, 72),
    "TidegateUnreached": ({of("envoy_cluster_membership_healthy"): "1x60 0x240"}, 63),
    "TidegateLoopLags": (
        {f'tidegate_loop_lag_seconds_bucket{{le="{le}",{ONE}}}': value
         for le, value in (("0.001", "0x300"), ("0.25", "0+60x300"), ("0.5", "0+60x300"), ("+Inf", "0+60x300"))}, 30
    ),
    "TidegateNoTimeLeft": ({f"process_cpu_seconds_total{{{ONE}}}": "0+58x300"}, 30),
    "TidegateConfigRefused": ({of("tidegate_config_reloads_total"): "0x60 1x240"}, 63),
    "TidegateConfigWaits": ({of("tidegate_config_waiting"): "0x10 2x290"}, 80),
    "TidegateBreakerOpen": ({f"tidegate_breaker_open{{{U}}}": "0x60 1x240"}, 63),
    "TidegateAllBreakersOpen": (
        {f"tidegate_breaker_open{{{U}}}": "0x60 1x240", f'tidegate_breaker_open{{upstream="v",{ONE}}}': "0x60 1x240"},
        63,
    ),
    "TidegateRequestsFail": ({of("tidegate_failed_total"): "0+3x300"}, 30),
    "TidegateProviderNearLimit": ({of("tidegate_bucket_level"): "80x10 -5x290"}, 60),
    "TidegateProviderRefuses": ({of("tidegate_paced_total"): "0x60 0+5x240"}, 75),
    "TidegateEngineSaturated": ({of("tidegate_kv_saturation_ratio"): "0.5x10 1.2x290"}, 30),
    "TidegateEngineStale": ({of("tidegate_kv_stale_seconds"): "0.4x10 15+60x290"}, 20),
    "TidegateEstimatesDrift": (_estimates("2"), 90),
    "TidegateQueueFull": ({of("tidegate_queue_tokens"): "0x10 95x290"}, 30),
    "TidegateBudgetNearlyUsed": ({of("tidegate_budget_spent"): "1x10 19x290"}, 30),
    "TidegateBypassed": ({of("tidegate_bypass"): "0x60 1x240"}, 61),
    "TidegateLanePaused": ({of("tidegate_lane_paused"): "0x10 1x290"}, 60),
    "TidegateUpstreamOut": ({of("tidegate_upstream_out"): "0x10 1x290"}, 90),
    "TidegateDraining": ({of("tidegate_draining"): "0x10 1x290"}, 60),
    "TidegateChangesStand": (
        {of("tidegate_changes"): "0x10 1x2000", of("tidegate_in_flight"): "3x2000"}, 1500
    ),
}  # fmt: skip
"""What makes each alert fire, over the calm hour; and the minute in which it does."""
COMPANY = {
    "TidegateObjectiveBurnsFast": {"TidegateObjectiveBurnsSlowly"},
    "TidegateAllBreakersOpen": {"TidegateBreakerOpen"},
    "TidegateNoTimeLeft": set(),
}
"""Others that fire with it, because they are about the same."""


def test_there_is_a_case_for_every_alert() -> None:
    """None is left untested."""
    assert set(TROUBLE) == {rule["alert"] for rule in alerting()}


@needs_promtool
def test_every_alert_fires_for_its_cause_and_for_nothing_else(tmp_path: Path) -> None:
    """As a Prometheus evaluates the rules; in a calm hour none fires."""
    file, cases = tmp_path / "alerts.yaml", tmp_path / "cases.yaml"
    file.write_text(alerts_yaml(settings()), "utf-8")
    subprocess.run([str(PROMTOOL), "check", "rules", file], check=True, capture_output=True, timeout=200)
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'

    def case(name: str, series: dict[str, str], minute: int, names: set[str]) -> dict[str, Any]:
        samples = [{"labels": f'{{alertname="{each}"}}', "value": 1} for each in sorted(names)]
        if name == "TidegateAllBreakersOpen":
            samples[1]["value"] = 2  # of both upstreams
        return {
            "name": name,
            "interval": "1m",
            "input_series": [{"series": key, "values": values} for key, values in {**CALM, **series}.items()],
            "promql_expr_test": [{"expr": firing, "eval_time": f"{minute}m", "exp_samples": samples}],
        }

    tests = [case("calm", {}, minute, set()) for minute in (20, 200)]
    tests += [case("one of a few was late", _waits("0x60 1x240", "0x65 1x235"), minute, set()) for minute in (68, 69)]
    tests += [
        case(name, series, minute, {name} | COMPANY.get(name, set())) for name, (series, minute) in TROUBLE.items()
    ]
    cases.write_text(yaml.safe_dump({"rule_files": [str(file)], "tests": tests}), "utf-8")
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", cases], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_an_alert_is_worded_for_who_is_woken(tmp_path: Path) -> None:
    """Names of what it is about and numbers stand in its words, not templates."""
    file, cases = tmp_path / "alerts.yaml", tmp_path / "cases.yaml"
    file.write_text(alerts_yaml(settings()), "utf-8")
    told = {
        "TidegateBreakerOpen": "u is taken for sick and gets no requests of users",
        "TidegateObjectiveBurnsFast": "P0 misses its objective: 25% of its requests wait too long or are refused",
        "TidegateQueueFull": "P0 is full: 95% of the tokens that it may hold",
        "TidegateBudgetNearlyUsed": "95% of tenant/t/usd_day is used",
    }
    tests = []
    for rule in alerting():
        if rule["alert"] in told and rule["labels"].get("bound") in (None, "tokens"):
            series, minute = TROUBLE[rule["alert"]]
            labels = {**rule["labels"], **_labels_of(rule["alert"])}
            words = {**rule["annotations"], "summary": told[rule["alert"]]}
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [{"series": key, "values": values} for key, values in {**CALM, **series}.items()],
                    "alert_rule_test": [
                        {
                            "alertname": rule["alert"], "eval_time": f"{minute}m",
                            "exp_alerts": [{"exp_labels": labels, "exp_annotations": words}],
                        }
                    ],
                }
            )  # fmt: skip
    assert len(tests) == len(told)
    cases.write_text(yaml.safe_dump({"rule_files": [str(file)], "tests": tests}), "utf-8")
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", cases], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _labels_of(alert: str) -> dict[str, str]:
    """What the alert keeps of the labels of its series."""
    scraped = {"job": "tidegate", "instance": "a:1"}
    return {
        "TidegateBreakerOpen": {"upstream": "u", **scraped},
        "TidegateObjectiveBurnsFast": {"job": "tidegate"},
        "TidegateQueueFull": {"lane": "P0", **scraped},
        "TidegateBudgetNearlyUsed": {"counter": "tenant/t/usd_day", "kind": "usd_day", **scraped},
    }[alert]
