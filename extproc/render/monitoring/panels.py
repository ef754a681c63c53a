"""Panels of the dashboard: what a row shows, as queries with units. Where they stand is the dashboard's business."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ROWS", "Panel", "Query", "Row"]

S = '{job=~"$job",instance=~"$instance"'
"""Begins every selector; `}` ends it."""
ANY = S + "}"
RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Query:
    """expr: PromQL. name: legend, in which labels stand in double braces."""

    expr: str
    name: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. unit: as Grafana calls it. kind: its plugin. width of 24, height in Grafana's units.

    stacked: lines are piled up. words: meanings of values. steps: colours from a value on. top: the axis
    reaches at least so far.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    help: str = ""
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    stacked: bool = False
    words: tuple[tuple[int, str, str], ...] = ()
    steps: tuple[tuple[float | None, str], ...] = ()
    top: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def _rate(metric: str, by: str, more: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{S}{more}}}{RATE}))"


def _quantile(share: float, metric: str, by: str, more: str = "") -> str:
    return f"histogram_quantile({share:g}, sum by ({by}, le) (rate({metric}_bucket{S}{more}}}{RATE})))"


def _of(metric: str, by: str, how: str = "sum") -> str:
    return f"{how} by ({by}) ({metric}{ANY})"


def _stat(title: str, unit: str, expr: str, *steps: tuple[float | None, str], help_: str = "") -> Panel:
    return Panel(title, unit, (Query(expr, title),), help_, "stat", 3, 4, steps=steps or ((None, "text"),))


GOOD, WARN, BAD = "green", "orange", "red"
ON_OFF = ((0, "no", GOOD), (1, "YES", BAD))

_OVERVIEW = Row(
    "Now",
    (
        _stat("Let go", "reqps", f"sum(rate(tidegate_admitted_total{ANY}{RATE}))"),
        _stat("Refused", "reqps", f"sum(rate(tidegate_refused_total{ANY}{RATE}))", (None, GOOD), (0.1, WARN)),
        _stat("In line", "short", f"sum(tidegate_queue_requests{ANY})", (None, GOOD), (1, WARN)),
        _stat("Breakers open", "short", f"sum(tidegate_breaker_open{ANY})", (None, GOOD), (1, BAD)),
        _stat(
            "Objective missed",
            "percentunit",
            'max(tidegate:missed:ratio_rate1h{job=~"$job"})',
            (None, GOOD), (0.01, WARN), (0.144, BAD),
            help_="Share of the first lane's requests in the last hour that waited too long or were refused.",
        ),
        Panel("Bypass", "short", (Query(f"max(tidegate_bypass{ANY})", "bypass"),), kind="stat", width=3, height=4,
              words=ON_OFF, steps=((None, GOOD), (1, BAD))),
        _stat("Dollars an hour", "currencyUSD", f"3600 * sum(rate(tidegate_spent_usd_total{ANY}{RATE}))"),
        _stat("Replicas", "short", f"count(tidegate_in_flight{ANY})"),
    ),
)  # fmt: skip
_WAITING = Row(
    "Who waits",
    (
        Panel("Requests in line", "short", (Query(_of("tidegate_queue_requests", "lane"), "{{lane}}"),), stacked=True),
        Panel("Tokens in line", "short", (Query(_of("tidegate_queue_tokens", "lane"), "{{lane}}"),), stacked=True),
        Panel("Oldest in line", "s", (Query(_of("tidegate_queue_oldest_seconds", "lane", "max"), "{{lane}}"),)),
        Panel(
            "Lanes, how full",
            "percentunit",
            (
                Query(f"max by (lane) (tidegate_queue_requests{ANY} / tidegate_queue_limit_requests{ANY})",
                      "{{lane}} requests"),
                Query(f"max by (lane) (tidegate_queue_tokens{ANY} / tidegate_queue_limit_tokens{ANY})",
                      "{{lane}} tokens"),
                Query(f"max by (lane) (tidegate_queue_bytes{ANY} / tidegate_queue_limit_bytes{ANY})", "{{lane}} bytes"),
            ),
            "At 100 % newcomers are refused (lane_full).",
            top=1,
        ),
        Panel(
            "Wait of those who went",
            "s",
            tuple(
                Query(_quantile(share, "tidegate_wait_seconds", "lane", ',outcome="admitted"'), f"{{{{lane}}}} {name}")
                for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
            ),
        ),
        Panel(
            "Wait by its forecast",
            "none",
            tuple(
                Query(_quantile(share, "tidegate_forecast_ratio", "lane"), f"{{{{lane}}}} {name}")
                for share, name in ((0.1, "p10"), (0.5, "p50"), (0.9, "p90"))
            ),
            "1 is a forecast that came true; above it the wait was longer.",
        ),
        Panel(
            "First token, wait included",
            "s",
            tuple(
                Query(_quantile(share, "tidegate_first_token_seconds", "lane"), f"{{{{lane}}}} {name}")
                for share, name in ((0.5, "p50"), (0.99, "p99"))
            ),
        ),
    ),
)  # fmt: skip
_DECISIONS = Row(
    "What was decided",
    (
        Panel("Let go", "reqps", (Query(_rate("tidegate_admitted_total", "lane"), "{{lane}}"),), stacked=True),
        Panel(
            "Refused, by reason",
            "reqps",
            (Query(_rate("tidegate_refused_total", "reason, lane"), "{{lane}} {{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Not answered, left by clients, and evicted",
            "reqps",
            (
                Query(_rate("tidegate_failed_total", "reason"), "{{reason}}"),
                Query(f"sum(rate(tidegate_client_gone_total{ANY}{RATE}))", "client left"),
                Query(f"sum(rate(tidegate_evicted_total{ANY}{RATE}))", "evicted by a later copy"),
            ),
        ),
        Panel(
            "Objective missed",
            "percentunit",
            tuple(
                Query(f'max(tidegate:missed:ratio_rate{window}{{job=~"$job"}})', window)
                for window in ("5m", "1h", "6h")
            ),
            "Share of the first lane's requests that waited too long or were refused; needs the rules of alerts.yaml.",
        ),
        Panel("Would have been held or refused", "reqps",
              (Query(_rate("tidegate_observed_total", "reason"), "{{reason}}"),
               Query(_rate("tidegate_shadowed_total", "limit"), "{{limit}}")),
              "In observe mode, and by limits in shadow mode."),
        Panel("Retries of clients", "reqps", (Query(f"sum(rate(tidegate_retried_total{ANY}{RATE}))", "retries"),)),
    ),
)  # fmt: skip
_UPSTREAMS = Row(
    "Upstreams",
    (
        Panel("Answers", "reqps", (Query(_rate("tidegate_served_total", "upstream"), "{{upstream}}"),), stacked=True),
        Panel("Tokens", "short", (Query(_rate("tidegate_tokens_total", "upstream"), "{{upstream}}"),),
              "A second, as reported.", stacked=True),
        Panel(
            "Failed attempts",
            "reqps",
            (
                Query(_rate("tidegate_failed_attempts_total", "upstream, outcome"), "{{upstream}} {{outcome}}"),
                Query(_rate("tidegate_paced_total", "upstream"), "{{upstream}} 429"),
            ),
        ),
        Panel(
            "Breakers",
            "short",
            (Query(_of("tidegate_breaker_open", "upstream", "max"), "{{upstream}}"),),
            kind="state-timeline",
            words=((0, "closed", GOOD), (1, "open", BAD)),
        ),
        Panel("Went on to another", "reqps",
              (Query(_rate("tidegate_failovers_total", "upstream, following"), "{{upstream}} to {{following}}"),)),
        Panel(
            "What breakers count",
            "percentunit",
            (
                Query(_of("tidegate_breaker_error_ratio", "upstream", "max"), "{{upstream}} errors"),
                Query(_of("tidegate_breaker_slow_ratio", "upstream", "max"), "{{upstream}} late first tokens"),
            ),
            top=1,
        ),
        Panel(
            "First token of upstreams",
            "s",
            tuple(
                Query(_quantile(share, "gen_ai_server_time_to_first_token_seconds", "upstream"),
                      f"{{{{upstream}}}} {name}")
                for share, name in ((0.5, "p50"), (0.95, "p95"))
            ),
        ),
        Panel(
            "Time for each output token",
            "s",
            (Query(_quantile(0.5, "gen_ai_server_time_per_output_token_seconds", "upstream"), "{{upstream}} p50"),),
        ),
        Panel("Dollars an hour", "currencyUSD",
              (Query(f"3600 * {_rate('tidegate_spent_usd_total', 'upstream')}", "{{upstream}}"),), stacked=True),
    ),
)  # fmt: skip
_LIMITS = Row(
    "Limits",
    (
        Panel(
            "Buckets, how full",
            "percentunit",
            (
                Query(
                    f'tidegate_bucket_level{S},upstream!=""}} / tidegate_bucket_capacity{S},upstream!=""}}',
                    "{{upstream}} {{kind}}",
                ),
            ),
            "Below 0 is debt.",
            top=1,
        ),
        Panel("Closed by the provider", "s", (Query(f"tidegate_bucket_closed_seconds{ANY}", "{{counter}}"),)),
        Panel("Slots, how full", "percentunit",
              (Query(f"tidegate_slots_used{ANY} / tidegate_slots_limit{ANY}", "{{counter}}"),), top=1),
        Panel("Taken above a limit", "short", (Query(_rate("tidegate_overshot_total", "counter"), "{{counter}}"),)),
        Panel("Budgets, how far used", "percentunit",
              (Query(f"tidegate_budget_spent{ANY} / tidegate_budget_limit{ANY}", "{{counter}}"),), top=1),
        Panel(
            "Estimates and reservations",
            "none",
            (
                Query(_quantile(0.5, "tidegate_estimate_ratio", "model"), "{{model}} estimated by reported, p50"),
                Query(_quantile(0.5, "tidegate_reservation_ratio", "lane"), "{{lane}} used by reserved, p50"),
                Query(_quantile(0.95, "tidegate_reservation_ratio", "lane"), "{{lane}} used by reserved, p95"),
            ),
            "1 is exact.",
        ),
    ),
)  # fmt: skip
_ENGINES = Row(
    "Engines",
    (
        Panel("KV cache", "percentunit",
              (Query(_of("tidegate_kv_saturation_ratio", "upstream", "max"), "{{upstream}} with its queue"),
               Query(_of("tidegate_kv_fill_ratio", "upstream", "max"), "{{upstream}} cache"))),
        Panel("Metrics last read", "s", (Query(_of("tidegate_kv_stale_seconds", "upstream", "max"), "{{upstream}}"),)),
        Panel("Preemptions", "cps", (Query(_rate("tidegate_kv_preemptions_total", "upstream"), "{{upstream}}"),)),
    ),
)  # fmt: skip
_CALLERS = Row(
    "Callers",
    (
        Panel("Tokens of tenants", "short",
              (Query(f"topk(10, {_rate('tidegate_tenant_tokens_total', 'tenant')})", "{{tenant}}"),), "A second."),
        Panel("Refused, by tenant", "reqps",
              (Query(f"topk(10, {_rate('tidegate_tenant_refused_total', 'tenant')})", "{{tenant}}"),)),
        Panel("Tokens of sessions", "short",
              (Query(f"topk(10, {_rate('tidegate_session_tokens_total', 'tenant, session')})",
                     "{{tenant}} {{session}}"),),
              "A second."),
    ),
)  # fmt: skip
_ITSELF = Row(
    "Tidegate itself",
    (
        Panel("Event loop late", "s",
              (Query(_quantile(0.99, "tidegate_loop_lag_seconds", "instance"), "{{instance}} p99"),)),
        Panel("CPU", "percentunit", (Query(f"rate(process_cpu_seconds_total{ANY}{RATE})", "{{instance}}"),),
              "Of one core; it uses one.", top=1),
        Panel("Memory", "bytes", (Query(f"process_resident_memory_bytes{ANY}", "{{instance}}"),)),
        Panel("Streams and open books", "short",
              (Query(_of("tidegate_in_flight", "instance"), "{{instance}} streams"),
               Query(_of("tidegate_unsettled", "instance"), "{{instance}} not settled"))),
        Panel("Reloads", "short",
              (Query(f"sum by (result) (increase(tidegate_config_reloads_total{ANY}{RATE}))", "{{result}}"),
               Query(_of("tidegate_config_waiting", "instance"), "{{instance}} waits for a restart"))),
        Panel("Levers", "short",
              (Query(_of("tidegate_draining", "instance"), "{{instance}} drains"),
               Query(_of("tidegate_lane_paused", "lane", "max"), "{{lane}} paused"),
               Query(_of("tidegate_upstream_out", "upstream", "max"), "{{upstream}} out"),
               Query(_of("tidegate_changes", "instance"), "{{instance}} changed limits"))),
    ),
)  # fmt: skip
ROWS = (_OVERVIEW, _WAITING, _DECISIONS, _UPSTREAMS, _LIMITS, _ENGINES, _CALLERS, _ITSELF)
