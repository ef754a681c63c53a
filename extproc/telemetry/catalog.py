"""Every metric that Tidegate tells: what it is called, its type, unit and labels, and what it says.

The table is the whole: what is not in it is not told, and a test reads the pages and compares. Names and units are
those of OpenTelemetry; what Prometheus shows follows from them by OpenTelemetry's own rule (`name`), so that whoever
scrapes and whoever goes by way of a collector see the same.

Labels are bounded. Upstreams, lanes, reasons and the like are few; `model` is a name that the settings list, or
"other"; of tenants and sessions those with the most tokens are named (`telemetry.tenants` of them), and the rest is
"other"; of counters at most 1,000 are told, those of upstreams and listed tenants first. Where a label does not apply
it is empty, which is to Prometheus as if it were not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["BY_NAME", "METRICS", "Kind", "Metric", "told"]


class Kind(StrEnum):
    """Types of metrics. A counter only grows while the process runs."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


UNITS = {"s": "seconds", "By": "bytes", "1/s": "per_second", "/s": "per_second"}
"""How Prometheus spells the units that are used here; words in braces say what is counted, and are left out."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. otel: its name to OpenTelemetry. unit: in UCUM. buckets: upper bounds, of a histogram."""

    otel: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def suffix(self) -> str:
        """Its unit as Prometheus spells it, empty for what is merely counted."""
        plain = self.unit.partition("}")[2] if self.unit.startswith("{") else self.unit
        if plain == "1":
            return "ratio" if self.kind is Kind.GAUGE else ""
        return UNITS[plain] if plain else ""

    @property
    def family(self) -> str:
        """Its name to Prometheus, without the `_total` of counters."""
        name = self.otel.replace(".", "_")
        return f"{name}_{self.suffix}" if self.suffix and not name.endswith(f"_{self.suffix}") else name

    @property
    def name(self) -> str:
        """Its name to Prometheus, as it is asked for; a histogram's has `_bucket`, `_sum` and `_count` behind it."""
        return f"{self.family}_total" if self.kind is Kind.COUNTER else self.family

    @property
    def series(self) -> tuple[str, ...]:
        """Names of the series that Prometheus stores of it."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.family}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)

    @property
    def prometheus_labels(self) -> tuple[str, ...]:
        """Its labels as Prometheus spells them."""
        return tuple(label.replace(".", "_") for label in self.labels)


SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 900.0)
"""Of waits: from what nobody notices to the longest that a caller may be held."""
LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
GEN_AI_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
GEN_AI_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
GEN_AI_EACH = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
GEN_AI_TOKENS = tuple(float(4**n) for n in range(14))
"""These four as the semantic conventions advise."""

GEN_AI = ("gen_ai.operation.name", "gen_ai.request.model", "gen_ai.provider.name", "server.address", "server.port")
GEN_AI_SERVED = (*GEN_AI, "upstream")
COUNTED = ("counter", "upstream", "kind")
"""The key of a counter; the upstream that it is of, empty for a tenant's; and what it counts, the key's last part."""


def _counter(otel: str, unit: str, labels: tuple[str, ...], words: str) -> Metric:
    return Metric(otel, Kind.COUNTER, unit, labels, words)


def _gauge(otel: str, unit: str, labels: tuple[str, ...], words: str) -> Metric:
    return Metric(otel, Kind.GAUGE, unit, labels, words)


def _histogram(otel: str, unit: str, labels: tuple[str, ...], buckets: tuple[float, ...], words: str) -> Metric:
    return Metric(otel, Kind.HISTOGRAM, unit, labels, words, buckets)


_REQUESTS = (
    _counter("tidegate.admitted", "{request}", ("lane",), "Requests that were let go."),
    _counter("tidegate.queued", "{request}", ("lane",), "Requests that had to wait."),
    _counter(
        "tidegate.refused", "{request}", ("reason", "lane"), "Requests that were refused; no lane: before it was known."
    ),
    _counter(
        "tidegate.observed", "{request}", ("reason",), "Requests in observe mode that would not have gone at once."
    ),
    _counter("tidegate.shadowed", "{request}", ("limit",), "Requests that a limit in shadow mode would have held."),
    _counter("tidegate.retried", "{request}", (), "Requests that their client had sent before."),
    _counter("tidegate.served", "{request}", ("upstream",), "Answers."),
    _counter("tidegate.failed", "{request}", ("reason",), "Requests that were let go and that no upstream answered."),
    _counter("tidegate.settled", "{request}", (), "Requests whose outcome is known."),
    _counter("tidegate.client.gone", "{request}", (), "Requests whose client left before the end."),
    _counter(
        "tidegate.evicted", "{request}", (), "Requests that ran and were ended, because a later copy of them had come."
    ),
    _counter(
        "tidegate.unknown_usage", "{request}", (), "Answers of which nobody told the usage; the estimate was kept."
    ),
    _counter("tidegate.waited", "s", (), "Time that requests which were let go had waited."),
    _gauge("tidegate.in_flight", "{request}", (), "Requests whose stream is open, those in line included."),
    _gauge("tidegate.unsettled", "{request}", (), "Requests whose outcome is not known yet."),
    _histogram(
        "tidegate.wait",
        "s",
        ("lane", "outcome"),
        SECONDS,
        "Time until a request was let go, was refused or left; outcome: admitted, refused or left.",
    ),
    _histogram(
        "tidegate.forecast.ratio",
        "1",
        ("lane",),
        RATIOS,
        "Wait by the wait that was predicted, of forecasts of 0.1 s and more.",
    ),
    _histogram(
        "tidegate.first_token", "s", ("lane",), SECONDS, "From arrival to the first token of streams, wait included."
    ),
    _histogram(
        "tidegate.request.duration",
        "s",
        ("lane", "outcome"),
        SECONDS,
        "From arrival to the end, wait included; outcome: answered, failed, client_gone or evicted.",
    ),
)
_QUEUE = (
    _gauge("tidegate.queue.requests", "{request}", ("lane",), "Requests in line."),
    _gauge("tidegate.queue.tokens", "{token}", ("lane",), "Tokens of the requests in line."),
    _gauge("tidegate.queue", "By", ("lane",), "Bytes of the bodies in line."),
    _gauge(
        "tidegate.queue.oldest", "s", ("lane",), "For how long the oldest in line has been here; 0 where nobody waits."
    ),
    _gauge("tidegate.queue.limit.requests", "{request}", ("lane",), "Requests that a lane may hold."),
    _gauge("tidegate.queue.limit.tokens", "{token}", ("lane",), "Tokens that a lane may hold."),
    _gauge("tidegate.queue.limit", "By", ("lane",), "Bytes that a lane may hold."),
    _gauge("tidegate.lane.paused", "", ("lane",), "1 while an operator has paused the lane."),
)
_LIMITS = (
    _gauge("tidegate.bucket.level", "", COUNTED, "What is in a bucket, in tokens or requests; below 0 is debt."),
    _gauge("tidegate.bucket.capacity", "", COUNTED, "What a bucket holds."),
    _gauge("tidegate.bucket.refill", "/s", COUNTED, "What flows into a bucket."),
    _gauge("tidegate.bucket.closed", "s", COUNTED, "For so long nothing is taken from a bucket."),
    _gauge("tidegate.slots.used", "{request}", COUNTED, "Places that are taken."),
    _gauge("tidegate.slots.limit", "{request}", COUNTED, "Places that there are."),
    _gauge("tidegate.budget.spent", "", COUNTED, "What was used of a budget in this period, in dollars or tokens."),
    _gauge("tidegate.budget.limit", "", COUNTED, "What may be used in a period."),
    _counter("tidegate.overshot", "", COUNTED, "Taken above a limit: by failovers, or where an estimate was wrong."),
    _counter("tidegate.limits.moved", "{change}", ("upstream",), "Counters that were moved by what a provider said."),
)
_UPSTREAMS = (
    _counter(
        "tidegate.failed_attempts",
        "{attempt}",
        ("upstream", "outcome"),
        "Attempts that failed, by what they say of the upstream.",
    ),
    _counter(
        "tidegate.failovers",
        "{attempt}",
        ("upstream", "following"),
        "Requests that went on to another upstream after one had failed.",
    ),
    _counter("tidegate.paced", "{attempt}", ("upstream",), "Attempts that were refused for their speed (429)."),
    _counter("tidegate.tokens", "{token}", ("upstream",), "Tokens that upstreams reported as used."),
    _counter(
        "tidegate.reserved.tokens",
        "{token}",
        ("upstream",),
        "Tokens that had been reserved for the requests whose usage was reported.",
    ),
    _counter("tidegate.spent.usd", "{USD}", ("upstream",), "Dollars for answers."),
    _counter("tidegate.unpriced", "{request}", (), "Answers of which nobody knows the price."),
    _counter("tidegate.probes", "{probe}", ("upstream", "result"), "Canary calls, by ok or failed."),
    _counter("tidegate.probe.tokens", "{token}", ("upstream",), "Tokens of canary calls."),
    _counter("tidegate.probe.usd", "{USD}", ("upstream",), "Dollars for canary calls."),
    _histogram("tidegate.estimate.ratio", "1", ("model",), RATIOS, "Estimated by reported tokens of prompts."),
    _histogram("tidegate.reservation.ratio", "1", ("lane",), RATIOS, "Used by reserved tokens."),
    _gauge("tidegate.upstream.out", "", ("upstream",), "1 while an operator has taken the upstream out."),
    _gauge(
        "tidegate.kv.saturation",
        "1",
        ("upstream",),
        "Of an engine's fullest instance, its queue included; absent while nobody knows.",
    ),
    _gauge(
        "tidegate.kv.fill", "1", ("upstream",), "Used share of an engine's fullest KV cache, as booked or measured."
    ),
    _gauge("tidegate.kv.stale", "s", ("upstream",), "Since an engine's metrics were read last."),
    _gauge("tidegate.kv.instances", "{instance}", ("upstream",), "Instances of an engine that answered."),
    _counter(
        "tidegate.kv.preemptions", "{preemption}", ("upstream",), "Requests that an engine threw out of its cache."
    ),
)
_BREAKERS = (
    _gauge("tidegate.breaker.open", "", ("upstream",), "1 while users are kept away (open, or half open)."),
    _gauge(
        "tidegate.breaker.state", "", ("upstream", "state"), "1 for the state that the breaker is in, 0 for the others."
    ),
    _gauge(
        "tidegate.breaker.sign",
        "",
        ("upstream", "sign"),
        "1 for what it was taken for sick of, while it is not closed.",
    ),
    _gauge("tidegate.breaker.rest", "s", ("upstream",), "Until it may be tried again."),
    _gauge("tidegate.breaker.failures", "{attempt}", ("upstream",), "Failures in a row."),
    _gauge("tidegate.breaker.paced", "{attempt}", ("upstream",), "Refusals for speed (429) in a row."),
    _gauge("tidegate.breaker.error", "1", ("upstream",), "Share of failed attempts in the window that counts."),
    _gauge("tidegate.breaker.slow", "1", ("upstream",), "Share of first tokens that were late."),
    _gauge("tidegate.breaker.sizes_kept_away", "{class}", ("upstream",), "Classes of prompt sizes that are kept away."),
    _counter(
        "tidegate.breaker.moves",
        "{transition}",
        ("upstream", "state", "sign"),
        "Transitions of a breaker, by the state it went to and what it was taken for sick of.",
    ),
)
_CALLERS = (
    _counter("tidegate.tenant.requests", "{request}", ("tenant",), "Requests of tenants, settled or refused."),
    _counter("tidegate.tenant.refused", "{request}", ("tenant",), "Refused requests of tenants."),
    _counter("tidegate.tenant.tokens", "{token}", ("tenant",), "Tokens that tenants used."),
    _counter("tidegate.tenant.usd", "{USD}", ("tenant",), "Dollars that tenants spent."),
    _counter("tidegate.session.requests", "{request}", ("tenant", "session"), "Requests of sessions."),
    _counter("tidegate.session.refused", "{request}", ("tenant", "session"), "Refused requests of sessions."),
    _counter("tidegate.session.tokens", "{token}", ("tenant", "session"), "Tokens that sessions used."),
    _counter("tidegate.session.usd", "{USD}", ("tenant", "session"), "Dollars that sessions spent."),
    _gauge("tidegate.sessions", "{session}", (), "Sessions that are remembered."),
    _gauge("tidegate.unlisted_tenants", "{tenant}", (), "Tenants that are counted and that nobody listed."),
)
_ITSELF = (
    _gauge("tidegate.build.info", "", ("version",), "The version that runs."),
    _gauge("tidegate.config.info", "", ("version",), "The config in force, by a short hash of its values."),
    _gauge("tidegate.config.last_reload_timestamp", "s", (), "When a reload ended last, in epoch seconds."),
    _gauge("tidegate.config.waiting", "{change}", (), "Changes that hold only after a restart or a rendering."),
    _counter("tidegate.config.reloads", "{reload}", ("result",), "Reloads of the config, by applied or refused."),
    _gauge("tidegate.draining", "", (), "1 while nobody is let in any more."),
    _gauge("tidegate.bypass", "", (), "1 while everybody is let go at once, by an operator's word."),
    _gauge("tidegate.changes", "{change}", (), "Limits that an operator has changed for a while."),
    _histogram("tidegate.loop.lag", "s", (), LAGS, "By how much the event loop was late."),
    _counter("process.cpu", "s", (), "CPU time of this process, user and system."),
    _gauge("process.resident_memory", "By", (), "Memory of this process that is in RAM."),
    _gauge("process.start_time", "s", (), "When this process started, in epoch seconds."),
    _gauge("process.open_fds", "{file}", (), "Open files and sockets of this process."),
    _gauge("process.max_fds", "{file}", (), "Files and sockets that it may open."),
)
_GEN_AI = (
    _histogram(
        "gen_ai.server.request.duration",
        "s",
        (*GEN_AI_SERVED, "error.type"),
        GEN_AI_DURATION,
        "Upstreams' time for a request, to its last byte; our own wait is not in it.",
    ),
    _histogram(
        "gen_ai.server.time_to_first_token",
        "s",
        GEN_AI_SERVED,
        GEN_AI_FIRST,
        "Upstreams' time to the first token of streams that were answered.",
    ),
    _histogram(
        "gen_ai.server.time_per_output_token",
        "s",
        GEN_AI_SERVED,
        GEN_AI_EACH,
        "Upstreams' time for each output token after the first, of streams that were answered.",
    ),
    _histogram(
        "gen_ai.client.token.usage",
        "{token}",
        (*GEN_AI_SERVED, "gen_ai.token.type"),
        GEN_AI_TOKENS,
        "Tokens of a request, as its upstream reported them; of type input or output.",
    ),
)

METRICS: tuple[Metric, ...] = (
    *_REQUESTS,
    *_QUEUE,
    *_LIMITS,
    *_UPSTREAMS,
    *_BREAKERS,
    *_CALLERS,
    *_ITSELF,
    *_GEN_AI,
)
BY_NAME = {metric.otel: metric for metric in METRICS}
"""By its name to OpenTelemetry."""


def told() -> Iterator[str]:
    """The table as lines of Markdown."""
    yield "| Metric | Type | Unit | Labels | What it says |"
    yield "|---|---|---|---|---|"
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.prometheus_labels)
        yield f"| `{metric.name}` | {metric.kind} | {metric.suffix} | {labels} | {metric.help} |"
