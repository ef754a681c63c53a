"""The pages for a Prometheus and the data for a collector, against the catalog, both ways."""

from __future__ import annotations

import math
import subprocess
from dataclasses import replace
from shutil import which

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import Histogram, Sum
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from extproc.core import events
from extproc.core.refusal import Reason
from extproc.core.request import Endpoint, Usage
from extproc.telemetry.catalog import BY_NAME, METRICS, Kind
from extproc.telemetry.formats import OPEN_TYPE, TEXT_TYPE
from extproc.telemetry.measures import MOST_MOVED
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.readings import READINGS
from extproc.telemetry.tally import Tally
from tests.doubles import HandClock
from tests.telemetry.metrics_world import TRACE, meter, streamed, told

OPEN = "application/openmetrics-text"
BY_FAMILY = {metric.family: metric for metric in METRICS}
SCRAPER = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5,*/*;q=0.1"
)
"""As a Prometheus of today asks."""


def families(page: bytes, *, openly: bool = False) -> dict[str, Metric]:
    parse = open_families if openly else text_string_to_metric_families
    return {family.name: family for family in parse(page.decode())}


def values(family: Metric) -> dict[tuple[tuple[str, str], ...], float]:
    """By labels, those that are empty left out, as Prometheus does."""
    return {tuple(sorted((k, v) for k, v in one.labels.items() if v)): one.value for one in family.samples}


@pytest.mark.parametrize("accept", ["", OPEN])
def test_a_page_has_all_of_the_catalog_and_nothing_else(accept: str) -> None:
    """Each with its type, its unit where the format tells one, exactly its labels, and its words."""
    beside = meter(TRACE)
    page, kind = beside.page(told(beside), accept)
    assert kind == (OPEN_TYPE if accept else TEXT_TYPE)
    found = families(page, openly=bool(accept))
    assert found.keys() == BY_FAMILY.keys()
    for name, family in found.items():
        metric = BY_FAMILY[name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        if accept:
            assert family.unit == metric.suffix
        assert {one.name for one in family.samples} == {*metric.series}
        own = {"le"} if metric.kind is Kind.HISTOGRAM else set()
        for one in family.samples:
            assert {*one.labels} - own == {*metric.prometheus_labels}, name
            assert math.isfinite(one.value), name
            assert metric.kind is not Kind.COUNTER or one.value >= 0, name


def test_a_collector_is_told_the_same_under_the_names_of_opentelemetry() -> None:
    """Same metrics, same values: sums that only grow, levels, and distributions; all can be encoded."""
    beside = meter(TRACE)
    state = told(beside)
    shown = families(beside.page(state)[0])
    [resource] = beside.data(state).resource_metrics
    assert resource.resource.attributes["service.name"] == "tidegate"
    assert resource.resource.attributes["service.instance.id"] == "here"
    [scope] = resource.scope_metrics
    assert {metric.name for metric in scope.metrics} == BY_NAME.keys()
    for metric in scope.metrics:
        said = BY_NAME[metric.name]
        assert (metric.unit, metric.description) == (said.unit, said.help)
        points = list(metric.data.data_points)
        if isinstance(metric.data, Histogram):
            assert said.kind is Kind.HISTOGRAM
            counts = [one.value for one in shown[said.family].samples if one.name.endswith("_count")]
            assert [point.count for point in points] == counts
            assert all(point.explicit_bounds == said.buckets for point in points)
        else:
            assert isinstance(metric.data, Sum) == (said.kind is Kind.COUNTER)
            assert [point.value for point in points] == [one.value for one in shown[said.family].samples]
        for point in points:
            assert {*point.attributes} <= {*said.labels}
            assert all(word not in ("", None) for word in point.attributes.values())
    assert len(encode_metrics(beside.data(state)).SerializeToString()) > 1000


@pytest.mark.skipif(which("promtool") is None, reason="promtool of the package `prometheus` is not installed")
def test_prometheus_own_linter_finds_nothing() -> None:
    """Neither in names and units nor in the text."""
    page, _ = meter().page(told())
    linted = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    assert (linted.returncode, linted.stdout, linted.stderr) == (0, b"", b"")


def test_every_metric_is_read_somewhere_and_nothing_is_read_in_vain() -> None:
    assert READINGS.keys() == BY_NAME.keys()


def test_counts_and_levels_are_those_of_the_state() -> None:
    """A bucket in debt is below nothing; what has no limit tells none; sessions' own counters are not told."""
    found = families(meter().page(told())[0])

    def of(name: str) -> dict[tuple[tuple[str, str], ...], float]:
        return values(found[name])

    bucket = (("counter", "upstream/primary/*/total"), ("kind", "total"), ("upstream", "primary"))
    assert of("tidegate_bucket_level") == {bucket: -5}
    assert of("tidegate_bucket_capacity") == {bucket: 1000}
    assert of("tidegate_bucket_refill_per_second") == {bucket: 10}
    assert of("tidegate_bucket_closed_seconds") == {bucket: 2}
    assert of("tidegate_overshot") == {bucket: 120}
    slots = {key[-1][1]: value for key, value in of("tidegate_slots_used").items()}
    assert slots == {"primary": 3, "local": 2}
    assert [key[-1][1] for key in of("tidegate_slots_limit")] == ["primary"]
    budget = (("counter", "tenant/x%2Fy/usd_day"), ("kind", "usd_day"))
    assert of("tidegate_budget_spent") == {budget: 1.25}
    local = (("upstream", "local"),)
    assert of("tidegate_kv_stale_seconds") == {local: 1.5}
    assert of("tidegate_kv_instances") == {local: 2}
    assert of("tidegate_kv_preemptions") == {local: 2}
    assert of("tidegate_queue_limit_bytes") == {(("lane", "P0"),): 9000, (("lane", "P1"),): 9000}
    assert of("tidegate_queue_oldest_seconds") == {(("lane", "P0"),): 0, (("lane", "P1"),): 2.5}
    assert of("tidegate_lane_paused") == {(("lane", "P0"),): 0, (("lane", "P1"),): 1}
    assert of("tidegate_in_flight") == {(): 7}
    assert (of("tidegate_bypass"), of("tidegate_changes"), of("tidegate_draining")) == ({(): 1}, {(): 1}, {(): 0})
    assert of("tidegate_config_last_reload_timestamp_seconds") == {(): 1700000000.5}
    open_, states = of("tidegate_breaker_open"), of("tidegate_breaker_state")
    assert {key[0][1]: value for key, value in open_.items()} == {"primary": 1, "backup": 0, "local": 0}
    assert [key for key, value in states.items() if value and key[1] == ("upstream", "primary")] == [
        (("state", "open"), ("upstream", "primary"))
    ]
    assert len(states) == 12, "each state of each breaker has its series all the time"
    assert of("tidegate_breaker_sign")[("sign", "paced"), ("upstream", "primary")] == 1
    assert of("tidegate_breaker_moves") == {(("sign", "paced"), ("state", "open"), ("upstream", "primary")): 1}
    assert of("tidegate_failovers") == {(("following", "backup"), ("upstream", "primary")): 1}
    assert of("tidegate_refused") == {
        (("lane", "P1"), ("reason", "lane_full")): 2,
        (("reason", "unauthenticated"),): 1,
    }
    assert of("tidegate_reserved_tokens") == {(("upstream", "backup"),): 100}
    assert of("tidegate_tokens") == {(("upstream", "backup"),): 121}


def test_distributions_of_a_request_that_went_by_two_upstreams() -> None:
    """Our wait is in our own numbers and not in its upstream's; time per token is that after the first."""
    found = families(meter().page(told())[0])

    def sums(name: str) -> dict[tuple[tuple[str, str], ...], float]:
        return {
            tuple(sorted((k, v) for k, v in one.labels.items() if v)): one.value
            for one in found[name].samples
            if one.name.endswith("_sum")
        }

    assert sums("tidegate_wait_seconds") == {
        (("lane", "P1"), ("outcome", "admitted")): 0.7,
        (("lane", "P1"), ("outcome", "refused")): 0.25,
        (("lane", "P1"), ("outcome", "left")): 1.5,
    }
    assert sums("tidegate_forecast_ratio") == {(("lane", "P1"),): 0.7}
    assert sums("tidegate_estimate_ratio") == {(("model", "gpt-5"),): 0.6}
    assert sums("tidegate_reservation_ratio") == {(("lane", "P1"),): 1.21}
    durations = sums("tidegate_request_duration_seconds")
    assert {key[1][1]: value for key, value in durations.items()} == {"answered": 3.2, "failed": 1, "client_gone": 1}
    about = {
        "gen_ai_operation_name": "chat", "gen_ai_request_model": "gpt-5", "gen_ai_provider_name": "fake",
        "server_address": "127.0.0.1", "upstream": "backup",
    }  # fmt: skip
    took = found["gen_ai_server_request_duration_seconds"].samples
    took_by_error = {one.labels["error_type"]: one for one in took if one.name.endswith("_sum")}
    assert {error: one.value for error, one in took_by_error.items()} == pytest.approx(
        {"": 2.5, "canceled": 1, "503": 1}
    )
    assert about.items() <= took_by_error[""].labels.items()
    assert took_by_error["503"].labels["upstream"] == "primary"
    [each] = sums("gen_ai_server_time_per_output_token_seconds").values()
    assert each == pytest.approx((3.2 - 0.7 - 0.5) / 20)
    [first] = sums("gen_ai_server_time_to_first_token_seconds").values()
    assert first == 0.5
    usage = found["gen_ai_client_token_usage"].samples
    by_type = {one.labels["gen_ai_token_type"]: one.value for one in usage if one.name.endswith("_sum")}
    assert by_type == {"input": 100, "output": 21}


@pytest.mark.parametrize("status", [0, 200])
def test_one_that_was_evicted_while_it_ran_is_counted_as_that(status: int) -> None:
    """Whether its answer had begun or not: its client did not leave it, and its upstream did not fail."""
    beside, tally = meter(), Tally()
    evicted = events.Settled(streamed(), "backup", 1, status, None, 0.0, None, 2.0, evicted=True, asked="backup")
    beside(evicted)
    tally(evicted)
    assert (tally.client_gone, tally.failed, tally.settled) == (0, {}, 1)
    found = families(beside.page(told(beside, tally=tally.snapshot()))[0])

    def sums(name: str, label: str) -> dict[str, float]:
        return {one.labels[label]: one.value for one in found[name].samples if one.name.endswith("_sum")}

    assert [one.value for one in found["tidegate_evicted"].samples] == [1]
    assert sums("tidegate_request_duration_seconds", "outcome")["evicted"] == 2.0
    assert sums("gen_ai_server_request_duration_seconds", "error_type")["evicted"] == 2.0


def test_what_attempts_took_that_failed_is_in_the_first_token() -> None:
    """As far as it was heard before the end; and never more than all of it took."""
    clock = HandClock(1000.0)
    beside = meter(clock=clock)
    one = streamed(arrived=1000.0, ticket="late")
    beside(events.Admitted(one, ("primary", "backup"), 0.0))
    clock.now = 1004.0
    beside(events.AttemptFailed("primary", events.Outcome.FAILURE, 503, "", "late", following="backup"))
    before = beside.measures.first_tokens["P1"].shown().sum
    beside(events.Settled(one, "backup", 2, 200, None, 0.0, 0.5, 9.0, asked="backup"))
    assert beside.measures.first_tokens["P1"].shown().sum - before == pytest.approx(4.5)
    beside(events.Settled(replace(one, ticket="other"), "backup", 1, 200, None, 0.0, 0.5, 9.0, asked="backup"))
    assert beside.measures.first_tokens["P1"].shown().sum - before == pytest.approx(5.0)


def test_an_upstream_that_came_second_is_not_blamed_for_the_first() -> None:
    """Its time, and that for each token, begin when it was asked."""
    clock = HandClock(1000.0)
    beside = meter(clock=clock)
    one = streamed(arrived=1000.0, ticket="late")
    clock.now = 1004.0
    beside(events.AttemptFailed("primary", events.Outcome.FAILURE, 503, "", "late", following="local"))
    beside(events.Settled(one, "local", 2, 200, Usage(10, 11), 0.0, 0.5, 9.5, asked="local"))
    [served] = [of for (upstream, *_), of in beside.measures.served.items() if upstream == "local"]
    assert served.durations[""].shown().sum == pytest.approx(5.5)
    assert served.each.shown().sum == pytest.approx(0.5)


def test_one_operation_that_is_asked_for_at_several_endpoints_is_counted_whole() -> None:
    """Chat completions, responses and messages are all `chat` of one model at one upstream: one distribution."""
    beside = meter()
    before = beside.measures.served["backup", "gpt-5", "chat"].input.shown()
    for endpoint in (Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES, Endpoint.COUNT_TOKENS, Endpoint.OTHER):
        one = streamed(endpoint=endpoint)
        beside(events.Settled(one, "backup", 1, 200, Usage(7, 2), 0.0, 0.5, 1.5, asked="backup"))
    usage = families(beside.page(told())[0])["gen_ai_client_token_usage"].samples
    inputs = [one for one in usage if one.labels["gen_ai_token_type"] == "input" and one.name.endswith("_sum")]
    assert {one.labels["gen_ai_operation_name"]: one.value for one in inputs} == {
        "chat": before.sum + 21,
        "count_tokens": 7,
        "other": 7,
    }


def test_requests_that_went_on_and_never_end_are_forgotten() -> None:
    """A record of an attempt may come after its request was settled: the newest count."""
    beside = meter()
    for number in range(MOST_MOVED + 10):
        beside(events.AttemptFailed("primary", events.Outcome.FAILURE, 503, "", f"t{number}", following="backup"))
    assert len(beside.measures._moved) == MOST_MOVED
    assert f"t{MOST_MOVED + 9}" in beside.measures._moved


def test_a_request_of_which_nothing_was_heard_counts_as_estimated() -> None:
    """As it does everywhere; one that no upstream served counts as a request alone."""
    beside = meter()
    beside(events.Settled(streamed("lost"), "", 1, 0, None, 0.0, lost=True))
    beside(events.Settled(streamed("failed"), "", 1, 503, None, 0.0, asked="primary"))
    beside(events.Settled(streamed("strange"), "", 1, 503, None, 0.0, asked="nobody's cluster"))
    tokens = {name: (row.requests, row.tokens) for name, row in beside.measures.tenants.rows.items()}
    assert tokens == {"acme": (5, 221), "lost": (1, 100), "failed": (1, 0), "strange": (1, 0)}
    assert {upstream for upstream, *_ in beside.measures.served} == {"primary", "backup"}


def test_examples_lead_to_traces_where_the_format_has_them() -> None:
    """Short waits have none: there is nothing to explain. Text has none at all, and none where no trace is kept."""
    beside = meter(TRACE)
    beside(events.Admitted(streamed(), ("primary",), 0.002))
    state = told(beside)
    found = families(beside.page(state, SCRAPER)[0], openly=True)
    examples = {one.exemplar.labels["trace_id"] for one in found["tidegate_wait_seconds"].samples if one.exemplar}
    assert examples == {TRACE}
    [long] = [one.exemplar for one in found["tidegate_wait_seconds"].samples if one.exemplar]
    assert long.value == 0.7
    with_some = {name for name, family in found.items() if any(one.exemplar for one in family.samples)}
    assert with_some >= {"tidegate_first_token_seconds", "gen_ai_server_request_duration_seconds"}
    assert TRACE.encode() not in beside.page(state)[0]
    assert b"trace_id" not in meter().page(told(), OPEN)[0]
    encoded = encode_metrics(beside.data(state)).SerializeToString()
    assert bytes.fromhex(TRACE) in encoded


def test_names_that_come_and_go_are_not_remembered_and_hide_nobody() -> None:
    """Versions, and counters of tenants that nobody listed, for as long as the process runs."""
    metrics = Metrics()
    for number in range(4):
        counters = {f"tenant/{number}.{i}/slots": {"used": 1, "limit": 2} for i in range(900)}
        state = told(counters=counters) | {"config": told()["config"] | {"version": f"v{number}"}}
        page, _ = metrics.page(state)
        data = metrics.data(state)
    found = families(page)
    assert values(found["tidegate_config_info"]) == {(("version", "v3"),): 1}
    assert [one.labels["counter"] for one in found["tidegate_slots_used"].samples] == list(counters)
    [sent] = [one for one in data.resource_metrics[0].scope_metrics[0].metrics if one.name == "tidegate.slots.used"]
    assert [point.attributes["counter"] for point in sent.data.data_points] == list(counters)


HOSTILE = 'x"} 1\n# HELP \\x{y="\u202e\x00'


def test_hostile_names_are_only_names() -> None:
    """In both formats, and for a collector; also what cannot be written in UTF-8, and one called as the rest is."""
    beside = meter()
    names = [HOSTILE, "half \ud800 pair", "other", ""]
    for name in names:
        beside(events.Settled(streamed(name, name), "backup", 1, 200, Usage(10, 10), 0.0, cost_usd=0.5, asked="backup"))
    state = told(beside)
    for accept in ("", OPEN):
        found = families(beside.page(state, accept)[0], openly=bool(accept))
        tokens = {one.labels["tenant"]: one.value for one in found["tidegate_tenant_tokens"].samples}
        assert tokens == {HOSTILE: 20, "half ? pair": 20, "other": 20, "acme": 221, "": 20}
    assert b"half ? pair" in encode_metrics(beside.data(state)).SerializeToString()


def test_fifty_thousand_tenants_and_models_fold_nothing_that_is_shown() -> None:
    """Those with the most tokens are named, with all that they used; the sum of all is right."""
    beside = meter()
    heavy = {f"heavy-{number}": 0 for number in range(40)}
    for number in range(50_000):
        one = streamed(f"small-{number}", f"s-{number}")
        usage = Usage(2, 1)
        if number % 10 == 0:
            tenant = f"heavy-{number // 10 % 40}"
            one, usage = streamed(tenant, "agent"), Usage(900, 100)
            heavy[tenant] += 1000
        beside(events.Settled(replace(one, model=f"model-{number}"), "backup", 1, 200, usage, 0.0, asked="backup"))
        if number % 100 == 0:
            beside(events.Refused(Reason.TENANT_QUOTA, 429, f"small-{number}", "P1"))
    state = told(beside)
    found = families(beside.page(state)[0])
    tokens = {one.labels["tenant"]: one.value for one in found["tidegate_tenant_tokens"].samples}
    assert len(tokens) == 51
    assert {name: tokens[name] for name in heavy} == heavy
    assert sum(tokens.values()) == 5000 * 1000 + 45_000 * 3 + 221
    assert len({one.labels["tenant"] for one in found["tidegate_session_tokens"].samples}) <= 51
    assert {one.labels["gen_ai_request_model"] for one in found["gen_ai_client_token_usage"].samples} == {
        "gpt-5",
        "other",
    }
    for metric in beside.data(state).resource_metrics[0].scope_metrics[0].metrics:
        assert len(metric.data.data_points) < 200, metric.name
        assert not any("otel.metric.overflow" in point.attributes for point in metric.data.data_points)
    assert len(beside.measures.tenants.rows) <= 1000


def test_what_the_rest_used_never_falls() -> None:
    """Though one of the rest comes to be named: a counter that fell would be taken for a restart."""
    beside = meter()
    told_of_rest = []
    for number in range(400):
        beside(events.Settled(streamed(f"t{number}", "s"), "backup", 1, 200, Usage(number, 0), 0.0, asked="backup"))
        told_of_rest.append(beside.state()["rest"]["tenants"]["tokens"])
    assert told_of_rest == sorted(told_of_rest)
    assert told_of_rest[-1] > 0


def test_without_anybody_who_measures_counts_are_told_all_the_same() -> None:
    """As where telemetry is off, to measure what it costs."""
    found = families(Metrics().page(told())[0])
    assert "tidegate_served" in found
    assert "tidegate_wait_seconds" not in found


@pytest.mark.parametrize("gone", ["tally", "config", "counters", "breakers"])
def test_a_state_that_lacks_something_is_a_bug_that_shows(gone: str) -> None:
    """Not a page that silently tells less."""
    broken = told()
    del broken[gone]
    with pytest.raises(KeyError):
        Metrics().page(broken)
