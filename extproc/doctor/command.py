"""All checks in order, and how what they found is shown.

A check that cannot be made, because one before it found that something is missing, says so and asks nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from extproc.doctor import free, paid
from extproc.doctor.asking import NoAnswer, printable
from extproc.doctor.visit import Check, Need, Result, Verdict, Visit

__all__ = ["CHECKS", "examine", "report", "run"]

CHECKS = (
    Check("in the path", "what is asked at this URL is decided upon by Tidegate", Need.NOTHING, free.in_the_path),
    Check("all LLM paths", "no endpoint that is priced in tokens goes past it", Need.FILTER, free.sees_all),
    Check("refuses", "refusals arrive as they were worded, in both dialects", Need.FILTER, free.refuses),
    Check("slow answers", "Envoy waits longer than 200 ms for Tidegate", Need.QUESTIONS, free.answers_in_time),
    Check("without Tidegate", "fails closed or open, as configured", Need.QUESTIONS, free.fails_as_configured),
    Check("holds", "queued requests are waited for", Need.QUESTIONS, free.holds),
    Check("reads 1 MB", "Tidegate sees large bodies whole", Need.QUESTIONS, free.reads_large),
    Check("passes 1 MB", "large bodies go all the way to an upstream", Need.TOKENS, paid.passes_large),
    Check("streams", "tokens arrive as they are written", Need.TOKENS, paid.streams),
    Check("moves on", "the next upstream is asked when one does not answer", Need.TOKENS, paid.moves_on),
    Check("other paths", "what is no LLM endpoint is left alone", Need.NOTHING, free.leaves_others),
)
PLAIN_WIDTH = 120
STYLES = {Verdict.OK: "green", Verdict.WRONG: "bold red", Verdict.NOT_TOLD: "yellow"}


def run(visit: Visit, console: Console, json_file: Path | None = None) -> int:
    """Make all checks and show what they found. 0: nothing is wrong; 1: something is; 2: nobody answers there."""
    results = examine(visit)
    if json_file is not None:
        text = json.dumps(data(visit, results), indent=2, ensure_ascii=False) + "\n"
        if str(json_file) == "-":
            sys.stdout.write(text)
        else:
            json_file.write_text(text, "utf-8")
    if json_file is None or str(json_file) != "-":
        report(visit, results, console)
    return int(any(result.verdict is Verdict.WRONG for result in results))


def examine(visit: Visit) -> list[Result]:
    """A result for each of CHECKS. NoAnswer when nothing at all answers."""
    first, *others = CHECKS
    results = [first.run(visit)]
    if not visit.model and visit.understood and visit.tokens:
        visit.model = _some_model(visit)
    results += [_examined(check, visit) for check in others]
    return [replace(one, why=printable(one.why), change=printable(one.change)) for one in results]


def data(visit: Visit, results: Sequence[Result]) -> dict[str, Any]:
    """Everything as plain data."""
    checks = [
        {"name": check.name, "proves": check.proves, **asdict(result)}
        for check, result in zip(CHECKS, results, strict=True)
    ]
    return {"url": visit.gateway.url, "model": visit.model, "checks": checks, "spent": asdict(visit.spent)}


def report(visit: Visit, results: Sequence[Result], console: Console) -> None:
    """A table of all checks, and below it what to change."""
    table = Table(title=f"{visit.gateway.url}", title_justify="left", title_style="bold", pad_edge=False)
    for name in ("check", "verdict", "why"):
        table.add_column(name, no_wrap=name == "verdict", overflow="fold")
    for check, result in zip(CHECKS, results, strict=True):
        what = Text.assemble((check.name, "bold"), "\n", (check.proves, "dim"))
        table.add_row(what, Text(result.verdict, STYLES[result.verdict]), Text(result.why))
    console.print(table)
    for check, result in zip(CHECKS, results, strict=True):
        if result.change:
            console.print(Text.assemble((f"{check.name}: ", "bold"), result.change))
    console.print(Text(_closing(visit, results)))


def _closing(visit: Visit, results: Sequence[Result]) -> str:
    counts = [(verdict, sum(result.verdict is verdict for result in results)) for verdict in Verdict]
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts if count)
    spent = visit.spent
    return f"{told}; {spent.requests} requests to {visit.model or 'models'} took about {spent.tokens} tokens"


def _examined(check: Check, visit: Visit) -> Result:
    if lacking := visit.lacks(check.need):
        return Result(Verdict.NOT_TOLD, lacking)
    try:
        return check.run(visit)
    except NoAnswer as error:
        return Result(Verdict.WRONG, str(error), "find out who breaks the connection: Envoy's access log and /stats")


def _some_model(visit: Visit) -> str:
    """The first that is listed and writes text; empty where none is."""
    try:
        return next((name for name in visit.models() if "embed" not in name and name == printable(name)), "")
    except NoAnswer:
        return ""
