"""What a simulation shows in a terminal: per load a table of policies, a table of lanes, and what must hold.

shown(comparison, console)     for people
versus(outcomes, console)      the same of two configurations
data(comparison)               for programs: plain data, times in seconds, sizes in tokens
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from extproc.sim.compare import Comparison
from extproc.sim.figures import Quantiles
from extproc.sim.outcome import LaneOutcome, Outcome
from extproc.sim.policies import PolicyName

__all__ = ["data", "shown", "versus"]

WORDS = 3
"""Reasons that are told in a row; the others are summed up."""
COLUMNS = ("goodput/min", "against none", "tokens/s in SLO", "tokens wasted", "above limits", "preempted", "doubled",
           "kept promises", "forecast off s")  # fmt: skip


def shown(comparison: Comparison, console: Console) -> None:
    """Print it."""
    for line in comparison.assumed:
        console.print(Text(f"- {line}", style="dim"))
    for load in dict.fromkeys(outcome.load for outcome in comparison.outcomes):
        outcomes = [outcome for outcome in comparison.outcomes if outcome.load == load]
        console.print(_policies(load, outcomes))
        console.print(_lanes(f"lanes at load {load:g}", [(str(outcome.policy), outcome) for outcome in outcomes]))
        for outcome in outcomes:
            if outcome.breaker_moves:
                console.print(Text(_breakers(outcome), style="dim"))
    broken = comparison.broken
    for line in broken:
        console.print(Text(f"does not balance: {line}", style="bold red"))
    if not broken:
        console.print("everything balances: every job has one end, every request was settled once, nothing is held")


def data(comparison: Comparison) -> dict[str, Any]:
    """Everything as plain data, the figures that are derived included; no wall times, so that it is the same again."""
    return {
        "assumed": list(comparison.assumed),
        "slo_s": dict(comparison.slo_s),
        "capacity_rps": dict(comparison.capacity_rps),
        "faults": [dict(fault) for fault in comparison.faults],
        "outcomes": [_plain(outcome) for outcome in comparison.outcomes],
    }


def _plain(outcome: Outcome) -> dict[str, Any]:
    plain = asdict(outcome)
    plain["policy"] = str(outcome.policy)
    for name in ("goodput", "good_tokens_per_s", "wasted", "over", "preempted", "doubled"):
        plain[name] = getattr(outcome, name)
    for rows, lanes in ((plain["lanes"], outcome.lanes), (plain["parts"], outcome.parts)):
        for name, lane in lanes.items():
            rows[name]["attainment"] = lane.attainment
    plain["all"]["attainment"] = outcome.all.attainment
    plain["promises"]["share"] = outcome.promises.share
    return plain


def _policies(load: float | None, outcomes: Sequence[Outcome]) -> Table:
    table = _table(f"load {load:g}", "policy")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    alone = next((outcome for outcome in outcomes if outcome.policy is PolicyName.NONE), None)
    for outcome in outcomes:
        share, off = outcome.promises.share, outcome.forecasts.off_s
        table.add_row(
            outcome.policy,
            f"{outcome.goodput * 60:,.1f}",
            f"{outcome.goodput / alone.goodput:.2f}x" if alone and alone.goodput else "-",
            f"{outcome.good_tokens_per_s:,.0f}",
            f"{outcome.wasted:,.0f}",
            f"{outcome.over:,}",
            f"{outcome.preempted:,}",
            f"{outcome.doubled:,}",
            "-" if share is None else f"{share:.1%} of {outcome.promises.told:,}",
            f"{_number(off.p50)} / {_number(off.p95)}",
        )
    table.caption = (
        "goodput: whole answers whose first token came within the lane's SLO, counted from the first try; wasted: "
        "spent for answers nobody got; above limits: of requests the provider refused; doubled: begun while a copy "
        "ran; kept promises: retries at the time they were told that were let go; forecast: of waits, p50 / p95"
    )
    return table


def versus(outcomes: Mapping[str, Outcome], console: Console) -> None:
    """Print what came of the same traffic under configurations of these names, lane by lane."""
    console.print(_lanes("lanes", list(outcomes.items()), "config"))
    for name, outcome in outcomes.items():
        lines = [f"{name}: {outcome.goodput * 60:,.1f} good answers/min, {outcome.wasted:,.0f} tokens wasted"]
        lines += [f"{name}: {_breakers(outcome)}"] if outcome.breaker_moves else []
        lines += [f"{name} does not balance: {line}" for line in outcome.broken]
        for line in lines:
            console.print(Text(line, style="dim"))


def _lanes(title: str, rows: Sequence[tuple[str, Outcome]], kind: str = "policy") -> Table:
    table = _table(title, "lane")
    for name in ("SLO s", kind, "offered", "in SLO", "served", "first token s", "silence s", "not served"):
        table.add_column(name, justify="left" if name in (kind, "not served") else "right")
    for what in ("lanes", "parts"):
        for lane in dict.fromkeys(lane for _, outcome in rows for lane in getattr(outcome, what)):
            table.add_section()
            for name, outcome in rows:
                if (seen := getattr(outcome, what).get(lane)) is not None:
                    _add(table, lane, name, seen)
    table.caption = (
        "first token of what was served: p50 / p95 / p99; silence: longest that somebody waited and nobody went"
    )
    return table


def _add(table: Table, name: str, policy: str, lane: LaneOutcome) -> None:
    table.add_row(
        name,
        f"{lane.slo_s:g}",
        policy,
        f"{lane.offered:,}",
        f"{lane.attainment:.1%}",
        f"{lane.served / lane.offered:.1%}" if lane.offered else "-",
        _triple(lane.first_token_s),
        f"{lane.silence_s:.0f}",
        _listed(_ends(lane)),
    )


def _breakers(outcome: Outcome) -> str:
    """How often breakers opened, and what their canaries found."""
    opened = Counter(move.split()[0] for move in outcome.breaker_moves if "closed -> open" in move)
    again = sum("ramping -> open" in move for move in outcome.breaker_moves)
    told = [f"breakers of {outcome.policy} opened: {_listed(opened)}", f"canaries: {_listed(outcome.probes) or 'none'}"]
    return "; ".join([*told, f"opened again while traffic returned: {again}"])


def _ends(lane: LaneOutcome) -> Mapping[str, int]:
    found = {**lane.shed, **lane.expired, **lane.failed}
    return found | {"gave up": lane.gone} if lane.gone else found


def _listed(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    words = [f"{name} {count:,}" for name, count in ordered[:WORDS]]
    rest = sum(count for _, count in ordered[WORDS:])
    return ", ".join([*words, f"others {rest:,}"] if rest else words)


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", title_style="bold", pad_edge=False)
    table.add_column(first)
    return table


def _triple(values: Quantiles) -> str:
    found: Iterable[float | None] = (values.p50, values.p95, values.p99)
    return " / ".join(map(_number, found)) if values.count else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
