"""What came of a replay, in numbers. Pure: results in, figures out.

Percentiles are of the nearest rank: the smallest value that at least that share of all values does not exceed, so that
every figure is one that really occurred.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

__all__ = ["End", "Figures", "Quantiles", "Result", "figures", "percentile", "quantiles"]


class End(StrEnum):
    """How a request ended. SERVED: a whole answer. SHED: refused with a reason of ours. FAILED: anything else."""

    SERVED = "served"
    SHED = "shed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Result:
    """What one request met with. Times in seconds from its sending, None where there is none.

    lag_s: how late it was sent. word: the reason when SHED, what went wrong when FAILED. tokens: as the provider
    reported them, prompt and output.
    """

    number: int
    lane: str
    end: End
    lag_s: float = 0.0
    word: str = ""
    status: int = 0
    upstream: str = ""
    waited_s: float | None = None
    first_token_s: float | None = None
    total_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Quantiles:
    """p50, p95 and p99 of `count` values, in the unit of the values; None when there are none."""

    count: int
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one lane, or of all. unanswered: those that had no end when the replay was stopped."""

    offered: int
    served: int
    shed: Mapping[str, int]
    failed: Mapping[str, int]
    unanswered: int
    upstreams: Mapping[str, int]
    tokens: int
    waited_s: Quantiles
    first_token_s: Quantiles
    shed_after_s: Quantiles


def figures(offered: int, results: Sequence[Result]) -> Figures:
    """The figures of `results`, out of `offered` requests.

    waited_s and first_token_s are of served requests; the latter of streams only, and it includes the wait.
    """
    served = [result for result in results if result.end is End.SERVED]
    shed = [result for result in results if result.end is End.SHED]
    return Figures(
        offered=offered,
        served=len(served),
        shed=_counted(result.word for result in shed),
        failed=_counted(result.word for result in results if result.end is End.FAILED),
        unanswered=offered - len(results),
        upstreams=_counted(result.upstream for result in served),
        tokens=sum(result.prompt_tokens + result.output_tokens for result in served),
        waited_s=quantiles(result.waited_s for result in served),
        first_token_s=quantiles(result.first_token_s for result in served),
        shed_after_s=quantiles(result.total_s for result in shed),
    )


def quantiles(values: Iterable[float | None]) -> Quantiles:
    """The quantiles of the values that are there."""
    known = sorted(value for value in values if value is not None)
    p50, p95, p99 = (percentile(known, share) for share in (0.5, 0.95, 0.99))
    return Quantiles(len(known), p50, p95, p99)


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The value of nearest rank in `ordered` (ascending); None when it is empty."""
    if not ordered:
        return None
    return ordered[max(0, ceil(share * len(ordered) - 1e-9) - 1)]


def _counted(words: Iterable[str]) -> Mapping[str, int]:
    return dict(Counter(words).most_common())
