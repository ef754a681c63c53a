"""What a replay shows at its end: a table of lanes, a table of providers, and what must hold whatever the load.

made(requests, results, ...) -> Report     all figures, computed once
shown(report, console)                     for people
report.data()                              for programs: plain data, times in seconds
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from extproc.sim.figures import Figures, Quantiles, Result, figures, quantiles
from extproc.sim.gauges import buckets, filling, held
from extproc.sim.plan import Planned

__all__ = ["Provider", "Report", "Sides", "made", "shown"]

LAG_LIMIT_S = 0.05
"""A load generator that is later than this measures itself."""


@dataclass(frozen=True, slots=True)
class Sides:
    """What the other side said: the service's state before and after, the fake providers' limits and records.

    offering: records when the last request had been sent. settled_s: how long `after` was waited for.
    """

    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    settled_s: float = 0.0
    limits: Mapping[str, Mapping[str, Any]] | None = None
    offering: Mapping[str, Mapping[str, Any]] | None = None
    records: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Provider:
    """What one fake provider saw. Tokens as it counts and charges them; rates while requests were being sent.

    gateway_per_s: the limit that the gateway keeps. allowed: most tokens in any minute, limit and burst together.
    """

    served: int
    refused_429: int
    most_in_flight: int
    slots: int | None
    tokens_per_s: float
    gateway_per_s: float | None
    provider_per_s: float | None
    busiest_minute: int
    allowed: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """All figures of a replay.

    held: what was not given back, None when nobody could be asked; filling: buckets that are not full yet. overshot:
    tokens charged into debt, by bucket. seconds: of sending; lasted_s: until the last answer.
    """

    assumed: Sequence[str]
    warnings: Sequence[str]
    seconds: float
    lasted_s: float
    interrupted: bool
    lanes: Mapping[str, Figures]
    all: Figures
    providers: Mapping[str, Provider]
    held: Sequence[str] | None
    filling: Sequence[str]
    settled_s: float
    overshot: Mapping[str, int]
    failed_attempts: Mapping[str, int]
    lag_s: Quantiles
    cpu_share: float

    def data(self) -> dict[str, Any]:
        """Everything as plain data."""
        return asdict(self)


def made(
    requests: Sequence[Planned],
    results: Sequence[Result],
    assumed: Sequence[str],
    sides: Sides,
    *,
    seconds: float,
    lasted_s: float,
    cpu_share: float,
    interrupted: bool,
) -> Report:
    """Compute the report of `requests` that were sent, of which `results` have ended."""
    lag = quantiles(result.lag_s for result in results)
    names = dict.fromkeys(sorted(request.lane for request in requests))
    return Report(
        assumed=assumed,
        warnings=list(_warnings(lag, interrupted=interrupted)),
        seconds=seconds,
        lasted_s=lasted_s,
        interrupted=interrupted,
        lanes={
            name: figures(
                sum(request.lane == name for request in requests), [result for result in results if result.lane == name]
            )
            for name in names
        },
        all=figures(len(requests), results),
        providers=_providers(sides, seconds),
        held=None if sides.after is None else held(sides.after),
        filling=[] if sides.after is None else filling(sides.after),
        settled_s=sides.settled_s,
        overshot=_grown(sides, "overshot"),
        failed_attempts=_grown(sides, "failed_attempts"),
        lag_s=lag,
        cpu_share=cpu_share,
    )


def _warnings(lag: Quantiles, *, interrupted: bool) -> Iterator[str]:
    if interrupted:
        yield "stopped early: figures are of what had been sent and had ended"
    if (lag.p99 or 0.0) > LAG_LIMIT_S:
        yield (
            f"the load generator was late: {_ms(lag.p99)} at p99, more than {_ms(LAG_LIMIT_S)}; times include its own "
            "delay, so lower the speed"
        )


def _providers(sides: Sides, seconds: float) -> dict[str, Provider]:
    records, offering, limits = sides.records or {}, sides.offering or {}, sides.limits or {}
    ours = buckets(sides.after or {"counters": {}})
    counters = (sides.after or {}).get("counters", {})
    found = {}
    for name, record in records.items():
        tpm = limits.get(name, {}).get("tpm")
        found[name] = Provider(
            served=record["served"],
            refused_429=record["refused_429"],
            most_in_flight=record["max_in_flight"],
            slots=counters.get(f"upstream/{name}/slots", {}).get("limit"),
            tokens_per_s=offering.get(name, record)["charged_tokens"] / seconds,
            gateway_per_s=ours[name].per_second if name in ours else None,
            provider_per_s=tpm / 60 if tpm else None,
            busiest_minute=record["busiest_minute_tokens"],
            allowed=tpm * (1 + limits[name]["burst_s"] / 60) if tpm else None,
        )
    return found


def _grown(sides: Sides, name: str) -> dict[str, int]:
    """How much a tally of the state page grew."""
    before = (sides.before or {}).get("tally", {}).get(name, {})
    after = (sides.after or {}).get("tally", {}).get(name, {})
    return {key: count - before.get(key, 0) for key, count in after.items() if count > before.get(key, 0)}


def shown(report: Report, console: Console) -> None:
    """Print it."""
    for line in report.assumed:
        console.print(Text(f"- {line}", style="dim"))
    console.print(_lanes(report))
    if report.providers:
        console.print(_provider_table(report))
    for line in _invariants(report):
        console.print(Text(line))
    for line in report.warnings:
        console.print(Text(f"warning: {line}", style="bold yellow"))


def _lanes(report: Report) -> Table:
    title = f"What callers met with: {report.seconds:.0f} s of requests, the last answer after {report.lasted_s:.0f} s"
    table = _table(title, "lane")
    for name in ("offered", "served", "shed", "why shed", "failed", "wait s", "first token s", "shed after s"):
        table.add_column(name, justify="left" if name == "why shed" else "right")
    for name, lane in [*report.lanes.items(), ("all", report.all)]:
        if name == "all":
            table.add_section()
        table.add_row(
            name,
            f"{lane.offered:,}",
            f"{lane.served:,}",
            f"{sum(lane.shed.values()):,}",
            _listed(lane.shed),
            _failures(lane),
            _triple(lane.waited_s),
            _triple(lane.first_token_s),
            _triple(lane.shed_after_s),
        )
    served = report.all.tokens / report.lasted_s if report.lasted_s else 0.0
    by = ", ".join(f"{name or 'unnamed'} {count:,}" for name, count in report.all.upstreams.items())
    table.caption = (
        "times are p50 / p95 / p99; wait and first token are of served requests, the latter from the sending of the "
        f"request, wait included, streams only; served by {by or 'nobody'}; {served:,.0f} tokens/s in all"
    )
    return table


def _provider_table(report: Report) -> Table:
    table = _table("What the providers saw", "provider")
    for name in (
        "served",
        "429s",
        "most in flight",
        "slots",
        "tokens/s",
        "our limit",
        "its limit",
        "busiest minute",
        "allowed",
    ):
        table.add_column(name, justify="right")
    for name, seen in report.providers.items():
        table.add_row(
            name,
            f"{seen.served:,}",
            f"{seen.refused_429:,}",
            f"{seen.most_in_flight:,}",
            _count(seen.slots),
            f"{seen.tokens_per_s:,.0f}",
            _count(seen.gateway_per_s),
            _count(seen.provider_per_s),
            f"{seen.busiest_minute:,}",
            _count(seen.allowed),
        )
    table.caption = (
        "tokens as the provider charges them; tokens/s while requests were being sent; allowed: limit + burst"
    )
    return table


def _invariants(report: Report) -> Iterator[str]:
    after = f"{report.settled_s:.1f} s after the last answer"
    if report.held is None:
        yield "given back: not known, the service's state page does not answer"
    else:
        what = f"NO, still held: {', '.join(report.held)}" if report.held else "every slot"
        full = f"not full yet: {', '.join(report.filling)}" if report.filling else "every bucket full again"
        yield f"given back: {what}; {full}, {after}"
        debt, attempts = _listed(report.overshot, ", "), _listed(report.failed_attempts, ", ")
        yield f"charged into debt: {debt or 'nothing'}; failed attempts: {attempts or 'none'}"
    if report.providers:
        above = [n for n, p in report.providers.items() if p.allowed is not None and p.busiest_minute > p.allowed]
        refused = sum(provider.refused_429 for provider in report.providers.values())
        yield f"above a provider's limit: {', '.join(above) or 'never'}; refused by providers: {refused}"
    late = f"{_ms(report.lag_s.p50)} late at p50, {_ms(report.lag_s.p99)} at p99"
    yield f"load generator: sent {late}; {report.cpu_share:.0%} of a core"


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", title_style="bold", pad_edge=False)
    table.add_column(first)
    return table


def _failures(lane: Figures) -> str:
    words = dict(lane.failed)
    if lane.unanswered:
        words["unanswered"] = lane.unanswered
    return _listed(words) or "0"


def _listed(counts: Mapping[str, int], between: str = "\n") -> str:
    return between.join(f"{name} {count:,}" for name, count in counts.items())


def _triple(values: Quantiles) -> str:
    found: Iterable[float | None] = (values.p50, values.p95, values.p99)
    return " / ".join("-" if value is None else f"{value:.2f}" for value in found) if values.count else "-"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
