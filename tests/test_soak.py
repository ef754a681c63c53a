"""The run that looks for what grows: that it is one, and that it would tell."""

from __future__ import annotations

import uvloop

from tests.load.soak import SAMPLES, Sample, Soak, verdicts


def test_everybody_is_settled_and_something_is_exported() -> None:
    """A short one; what fills up is not full by then, so that nothing is said of growth."""
    lines: list[str] = []
    soak = Soak(400, 100, lines.append, samples=4)
    uvloop.run(soak.run())
    assert len(lines) == 4
    assert soak.samples[-1].requests == 400
    assert sum(soak.ends.values()) == 400
    assert soak.ends["went"] > 300
    assert soak.ends["tidegate_tenant_quota"] > 0
    assert soak.ends["left"] > 0
    assert soak.collector.taken > 0


def test_what_grows_is_told_and_what_is_warm_by_then_is_not() -> None:
    """Filling up in the first half is no growth; a few objects for each request in the second are."""
    warming = [Sample(n, 100.0 + min(n, 20), 100_000 + 1000 * min(n, 20)) for n in range(SAMPLES)]
    assert verdicts(warming) == []
    assert verdicts([Sample(n, 120.0, 100_000 + 300 * n) for n in range(SAMPLES)]) == [
        "objects grew from 107,350 to 110,350"
    ]
    (told,) = verdicts([Sample(n, 120.0 + n, 100_000) for n in range(SAMPLES)])
    assert told == "resident memory grew from 144.5 to 154.5 MiB"
