"""Which format of a page of metrics somebody wants, by the header `accept` (RFC 9110, 12.5.1).

Neither starlette nor prometheus_client weighs that header: the latter takes the first format that it knows.

What a scraper says of names (`escaping=`) needs no heed: all names here are of letters, digits and underscores, and so
the same however others were to be escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["OPEN_TYPE", "TEXT_1_TYPE", "TEXT_TYPE", "preferred"]

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TEXT_1_TYPE = "text/plain; version=1.0.0; charset=utf-8; escaping=underscores"
OPEN_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"
"""Has exemplars, too."""

OFFERED = (
    ("text/plain", "0.0.4", TEXT_TYPE),
    ("application/openmetrics-text", "1.0.0", OPEN_TYPE),
    ("text/plain", "1.0.0", TEXT_1_TYPE),
)
"""Media type, version, and how that is told; the first is for whoever does not care."""
MOST = 50
"""Of more ranges the first count: whoever may ask must not keep the service busy."""
WEIGHT = re.compile(r"0(?:\.\d*)?|1(?:\.0*)?")


@dataclass(frozen=True, slots=True)
class _Range:
    """One thing that is accepted. version: empty for any. weight: 0 (not at all) to 1."""

    kind: str
    version: str
    weight: float

    def fits(self, kind: str, version: str) -> int:
        """How narrowly this is what was meant; 0 where it is not."""
        if self.kind == kind:
            return {version: 4, "": 3}.get(self.version, 0)
        return 2 if self.kind == f"{kind.partition('/')[0]}/*" else int(self.kind == "*/*")


def preferred(accept: str) -> str:
    """The content type for whoever sends this; the first that is offered where none would do.

    Of equals the one that was named first.
    """
    ranges = list(_ranges(accept)) or [_Range("*/*", "", 1.0)]

    def rank(offered: tuple[str, str, str]) -> tuple[float, int]:
        kind, version, _ = offered
        fit, place = max((one.fits(kind, version), -at) for at, one in enumerate(ranges))
        return (ranges[-place].weight, place) if fit else (0.0, 0)

    best = max(OFFERED, key=rank)
    return best[2] if rank(best)[0] > 0 else TEXT_TYPE


def _ranges(accept: str) -> Iterator[_Range]:
    """What cannot be read is passed over."""
    for one in accept.lower().split(",", MOST)[:MOST]:
        kind, *rest = (part.strip() for part in one.split(";"))
        told = {name.strip(): word.strip().strip('"') for name, _, word in (part.partition("=") for part in rest)}
        weight = told.get("q", "1")
        if kind and WEIGHT.fullmatch(weight):
            yield _Range(kind, told.get("version", ""), float(weight))
