"""Alert rules for a Prometheus: what is worth a look, what is worth a night.

critical    callers feel it now, and nobody else will mend it
warning     it will be felt, or a reserve is used up; today will do
info        somebody did this, and it is still so

Each names what it is about, and the section of the runbook that says what to do. Expressions keep the labels of the
one who was scraped (`job`, `instance`, and what Kubernetes adds); only the objective is counted over all replicas.

An objective is missed slowly or fast. The first lane's is that requests go within a second or two, 99 in 100; it is
burnt when so many in an hour miss it that a month's allowance would be used up within two days (or six hours: five),
and still do in the last minutes, so that an alert ends soon after what it tells of.

Deliberately not here: routes of alerts, and silences; they are the Alertmanager's.
"""

from __future__ import annotations

from collections.abc import Iterator

from extproc.core.refusal import Reason
from extproc.core.runbook import Runbook
from extproc.render.shape import Data
from extproc.render.text import plain
from extproc.settings import Settings

__all__ = ["JOB", "OBJECTIVE", "RUNBOOKS", "SOON_S", "alerts", "alerts_yaml"]

JOB = ".*tidegate.*"
"""Which jobs of a Prometheus scrape Tidegate, as a regular expression; what the ServiceMonitor makes is one."""
RUNBOOKS = "README.md"
"""Where the runbook is; with what goes before it, a link."""
OBJECTIVE = 0.99
"""Share of the first lane's requests that are to go soon."""
LEAST = 20
"""Of fewer requests nobody is woken: one that is late would be a large share of them."""
SOON_S = (1.0, 2.5, 5.0, 10.0, 30.0)
"""What is soon, in seconds: the longest of these that is at most half of what the lane may wait. All end a bucket."""
OWN = (
    Reason.TENANT_QUOTA, Reason.TENANT_CONCURRENCY, Reason.SESSION_BUDGET, Reason.SPEND_BUDGET, Reason.TOO_LARGE,
    Reason.UNAUTHENTICATED, Reason.FORBIDDEN, Reason.UNKNOWN_MODEL, Reason.BAD_REQUEST, Reason.NOT_FOUND,
)  # fmt: skip
"""Refusals that the caller brought about: they miss no objective."""
WINDOWS = ("5m", "30m", "1h", "6h")
_ALL = "namespace, job"
_ONE = f"{_ALL}, pod, instance"
_HEADER = """\
# Rendered by Tidegate from its settings (tidegate render alerts); change those, not this file.
# For a Prometheus: rule_files: [alerts.yaml]
"""


def alerts(settings: Settings, job: str = JOB, runbooks: str = RUNBOOKS) -> Data:
    """Groups of rules. job: as JOB; runbooks: what stands before the `#` of each link."""
    lane = next(iter(settings.lanes))
    groups = {
        "tidegate-objective": [*_recorded(settings), *_burning(lane)],
        "tidegate-itself": list(_itself(job)),
        "tidegate-upstreams": list(_upstreams()),
        "tidegate-lanes": list(_lanes()),
        "tidegate-operators": list(_operators()),
    }
    linked = {name: [_linked(rule, runbooks) for rule in rules] for name, rules in groups.items()}
    return {"groups": [{"name": name, "rules": rules} for name, rules in linked.items()]}


def alerts_yaml(settings: Settings, job: str = JOB, runbooks: str = RUNBOOKS) -> str:
    """The rules as a file that a Prometheus reads."""
    return _HEADER + plain(alerts(settings, job, runbooks))


def soon_s(settings: Settings) -> float:
    """Within so many seconds requests of the first lane are to go."""
    longest = next(iter(settings.lanes.values())).max_wait_s
    return max((edge for edge in SOON_S if edge <= longest / 2), default=SOON_S[0])


def _linked(rule: Data, runbooks: str) -> Data:
    if "alert" not in rule:
        return rule
    annotations = {**rule["annotations"], "runbook_url": f"{runbooks}#{rule['annotations']['runbook_url']}"}
    return {**rule, "annotations": annotations}


def _alert(
    name: str, severity: str, runbook: Runbook, expr: str, held: str, summary: str, description: str, **labels: str
) -> Data:
    """held: how long it has to be so, empty for not at all."""
    return {
        "alert": f"Tidegate{name}",
        "expr": " ".join(expr.split()),
        **({"for": held} if held else {}),
        "labels": {"severity": severity, **labels},
        "annotations": {"summary": summary, "description": description, "runbook_url": runbook.value},
    }


# --------------------------------------------------------------------------------------- the objective


def _recorded(settings: Settings) -> Iterator[Data]:
    """Share of the first lane's requests that did not go soon, or were refused for what is not their own fault."""
    lane = next(iter(settings.lanes))
    yield from (
        {"record": f"tidegate:missed:ratio_rate{window}", "expr": _missed(lane, soon_s(settings), window)}
        for window in WINDOWS
    )
    yield {
        "record": "tidegate:bucket_fill:ratio",
        "expr": 'tidegate_bucket_level{upstream!=""} / tidegate_bucket_capacity{upstream!=""}',
    }


def _missed(lane: str, soon: float, window: str) -> str:
    """Those who left before are in neither. What did not happen yet has no series, so there are zeros beside it."""
    waits = f'lane="{lane}",outcome'
    edge = f"{soon:g}".replace(".", "[.]") + ("" if soon % 1 else "([.]0)?")  # as one Prometheus or another spells it
    reasons = "|".join(OWN)
    every = f'sum by ({_ALL}) (rate(tidegate_wait_seconds_count{{{waits}=~"admitted|refused"}}[{window}]))'
    soon_gone = f'sum by ({_ALL}) (rate(tidegate_wait_seconds_bucket{{{waits}="admitted",le=~"{edge}"}}[{window}]))'
    own = f'sum by ({_ALL}) (rate(tidegate_refused_total{{lane="{lane}",reason=~"{reasons}"}}[{window}]))'
    return f"1 - (({soon_gone} or 0 * {every}) + ({own} or 0 * {every})) / {every}"


def _came(lane: str, window: str) -> str:
    """How many requests of a lane were let go or refused."""
    waits = f'lane="{lane}",outcome=~"admitted|refused"'
    return f"sum by ({_ALL}) (increase(tidegate_wait_seconds_count{{{waits}}}[{window}]))"


def _burning(lane: str) -> Iterator[Data]:
    allowed = 1 - OBJECTIVE
    for name, severity, speed, long, short, words in (
        ("Fast", "critical", 14.4, "1h", "5m", "2 % of a month's allowance went in an hour"),
        ("Slowly", "warning", 6, "6h", "30m", "5 % of a month's allowance went in six hours"),
    ):
        limit = f"{speed * allowed:g}"
        yield _alert(
            f"ObjectiveBurns{name}",
            severity,
            Runbook.SLO_BURN,
            f"tidegate:missed:ratio_rate{long} > {limit} and tidegate:missed:ratio_rate{short} > {limit} "
            f"and {_came(lane, long)} >= {LEAST}",
            "2m" if name == "Fast" else "15m",
            f"{lane} misses its objective: {{{{ $value | humanizePercentage }}}} of its requests wait too long or are "
            "refused",
            f"Of {lane}'s requests {OBJECTIVE:.0%} are to go at once or soon; in the last {long} so many did not. "
            f"{words}.",
            lane=lane,
        )


# -------------------------------------------------------------------------------------------- Tidegate


def _itself(job: str) -> Iterator[Data]:
    yield _alert(
        "Down",
        "critical",
        Runbook.DOWN,
        f'up{{job=~"{job}"}} == 0',
        "2m",
        "{{ $labels.instance }} of {{ $labels.job }} does not answer",
        "Its metrics could not be read for two minutes. Without Tidegate Envoy refuses all LLM requests with 503.",
    )
    yield _alert(
        "Absent",
        "critical",
        Runbook.DOWN,
        "absent(tidegate_in_flight)",
        "5m",
        "Nobody tells any metrics of Tidegate",
        "Either no Tidegate runs, or this Prometheus does not scrape it any more: then no other alert of it can fire.",
    )
    yield _alert(
        "Unreached",
        "critical",
        Runbook.UNREACHED,
        'envoy_cluster_membership_healthy{envoy_cluster_name=~"tidegate.service"} == 0',
        "1m",
        "The Envoy {{ $labels.instance }} does not reach Tidegate",
        "Envoy's health checks of Tidegate fail: it answers LLM requests with 503 admission_unavailable.",
    )
    yield _alert(
        "LoopLags",
        "warning",
        Runbook.NO_TIME,
        f"histogram_quantile(0.99, sum by ({_ONE}, le) (rate(tidegate_loop_lag_seconds_bucket[5m]))) > 0.1",
        "5m",
        "{{ $labels.instance }} is late by {{ $value | humanizeDuration }} (p99)",
        "Tidegate's event loop does not keep up: every request waits so much longer, and health checks may fail.",
    )
    yield _alert(
        "NoTimeLeft",
        "warning",
        Runbook.NO_TIME,
        "rate(process_cpu_seconds_total[5m]) > 0.9 and on (job, instance) tidegate_in_flight",
        "10m",
        "{{ $labels.instance }} uses {{ $value | humanizePercentage }} of the one core that it can use",
        "One process decides on one core. What comes beyond it waits unseen, before it is counted in any lane.",
    )
    yield _alert(
        "ConfigRefused",
        "warning",
        Runbook.CONFIG,
        'increase(tidegate_config_reloads_total{result="refused"}[15m]) > 0',
        "",
        "{{ $labels.instance }} refused a changed config",
        "The file has a fault; the config before it is still in force. The log says where.",
    )
    yield _alert(
        "ConfigWaits",
        "info",
        Runbook.CONFIG,
        "tidegate_config_waiting > 0",
        "1h",
        "{{ $value }} changes of the config are not in force in {{ $labels.instance }}",
        "They hold only after a restart, or after Envoy's configuration was rendered anew.",
    )


# ------------------------------------------------------------------------------------------- upstreams


def _upstreams() -> Iterator[Data]:
    yield _alert(
        "BreakerOpen",
        "warning",
        Runbook.BREAKER_OPEN,
        "tidegate_breaker_open == 1",
        "1m",
        "{{ $labels.upstream }} is taken for sick and gets no requests of users",
        "Its breaker is open or half open. Requests go to others of their chain, where there are any with room.",
    )
    yield _alert(
        "AllBreakersOpen",
        "critical",
        Runbook.BREAKER_OPEN,
        f"min by ({_ONE}) (tidegate_breaker_open) == 1",
        "30s",
        "No upstream of {{ $labels.instance }} takes requests",
        "All breakers are open: requests wait for the first probe that goes well, and then are refused.",
    )
    yield _alert(
        "RequestsFail",
        "critical",
        Runbook.REQUESTS_FAIL,
        f"""
        sum by ({_ONE}) (rate(tidegate_failed_total[5m]))
        / sum by ({_ONE}) (rate(tidegate_settled_total[5m])) > 0.02
        """,
        "5m",
        "{{ $value | humanizePercentage }} of the requests that went were answered by no upstream",
        "Everybody in their chains failed, or the time they had was over. Their callers got 503 or 504.",
    )
    yield _alert(
        "ProviderNearLimit",
        "warning",
        Runbook.NEAR_LIMIT,
        "avg_over_time(tidegate:bucket_fill:ratio[10m]) < 0.1",
        "10m",
        "{{ $labels.upstream }} is used up to its limit ({{ $labels.kind }})",
        "{{ $labels.counter }} was nearly empty for twenty minutes: what is asked for is all that the provider allows.",
    )
    yield _alert(
        "ProviderRefuses",
        "warning",
        Runbook.PROVIDER_REFUSES,
        "increase(tidegate_paced_total[10m]) > 10",
        "",
        "{{ $labels.upstream }} refused {{ $value | humanize }} requests for their speed (429) in ten minutes",
        "The limit in the config is more than what the provider allows, or somebody else uses the same account.",
    )
    yield _alert(
        "EngineSaturated",
        "warning",
        Runbook.KV_SATURATED,
        "tidegate_kv_saturation_ratio > 0.95",
        "5m",
        "{{ $labels.upstream }} is as full as its KV cache may be",
        "Its fullest instance is at {{ $value | humanizePercentage }} of its high mark. Requests wait or go elsewhere.",
    )
    yield _alert(
        "EngineStale",
        "warning",
        Runbook.KV_STALE,
        "tidegate_kv_stale_seconds > 15",
        "1m",
        "The metrics of {{ $labels.upstream }} were not read for {{ $value | humanizeDuration }}",
        "Nobody knows how full the engine is: a trickle goes to it, whatever room there is.",
    )
    yield _alert(
        "EstimatesDrift",
        "warning",
        Runbook.ESTIMATOR_DRIFT,
        f"""
        (histogram_quantile(0.5, sum by ({_ALL}, model, le) (rate(tidegate_estimate_ratio_bucket[30m]))) > 1.25
        or histogram_quantile(0.5, sum by ({_ALL}, model, le) (rate(tidegate_estimate_ratio_bucket[30m]))) < 0.8)
        and sum by ({_ALL}, model) (increase(tidegate_estimate_ratio_count[30m])) > 50
        """,
        "15m",
        "Prompts for {{ $labels.model }} are estimated at {{ $value | humanizePercentage }} of what they are",
        "The median of estimated by reported tokens is off. Too high wastes a limit, too low passes it.",
    )


# ------------------------------------------------------------------------- lanes, budgets and operators


def _lanes() -> Iterator[Data]:
    for unit in ("requests", "tokens", "bytes"):
        yield _alert(
            "QueueFull",
            "warning",
            Runbook.QUEUE_FULL,
            f"tidegate_queue_{unit} / tidegate_queue_limit_{unit} > 0.9",
            "1m",
            f"{{{{ $labels.lane }}}} is full: {{{{ $value | humanizePercentage }}}} of the {unit} that it may hold",
            "Newcomers of this lane are refused (lane_full), or push out those of lanes behind it.",
            bound=unit,
        )
    yield _alert(
        "BudgetNearlyUsed",
        "warning",
        Runbook.BUDGET,
        "tidegate_budget_spent / tidegate_budget_limit > 0.9",
        "5m",
        "{{ $value | humanizePercentage }} of {{ $labels.counter }} is used",
        "When all of it is, requests that draw on it are refused until its period ends.",
    )


def _operators() -> Iterator[Data]:
    yield _alert(
        "Bypassed",
        "critical",
        Runbook.BYPASSED,
        "tidegate_bypass == 1",
        "",
        "Everybody passes {{ $labels.instance }}: bypass is on",
        "Limits, lanes and budgets are only counted. Providers may refuse, and engines may be flooded.",
    )
    for name, metric, held, summary in (
        ("LanePaused", "tidegate_lane_paused", "30m", "{{ $labels.lane }} is paused"),
        ("UpstreamOut", "tidegate_upstream_out", "1h", "{{ $labels.upstream }} is taken out"),
        ("Draining", "tidegate_draining", "15m", "{{ $labels.instance }} lets nobody in"),
    ):
        yield _alert(
            name,
            "warning",
            Runbook.LEVERS,
            f"{metric} == 1",
            held,
            f"{summary}, and has been for more than {held}",
            "An operator did this. The audit log says who, when and why.",
        )
    yield _alert(
        "ChangesStand",
        "info",
        Runbook.LEVERS,
        "tidegate_changes > 0",
        "1d",
        "{{ $value }} limits of {{ $labels.instance }} are not those of its config",
        "They were changed for a while, and that was a day ago. What is to stay belongs into the config.",
    )
