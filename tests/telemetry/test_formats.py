"""Which format of metrics is told to whom."""

from __future__ import annotations

import pytest

from extproc.telemetry import formats
from extproc.telemetry.formats import OPEN_TYPE, TEXT_1_TYPE, TEXT_TYPE, preferred
from extproc.telemetry.metrics import Metrics
from tests.telemetry.metrics_world import told

OPEN = "application/openmetrics-text"
PROMETHEUS_3 = (
    f"{OPEN};version=1.0.0;escaping=allow-utf-8;q=0.6,{OPEN};version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROTOBUF_FIRST = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.7," + PROMETHEUS_3
)
PROMETHEUS_2 = f"{OPEN};version=1.0.0,{OPEN};version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
TEXT_ONLY = "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.4,*/*;q=0.2"


@pytest.mark.parametrize("accept", ["", " ", ",;,", "*/*", "text/*", "text/plain", "text/plain;version=0.0.4"])
def test_whoever_does_not_care_gets_plain_text(accept: str) -> None:
    """As people and old scrapers ask."""
    assert preferred(accept) == TEXT_TYPE


@pytest.mark.parametrize("accept", [PROMETHEUS_2, PROMETHEUS_3, PROTOBUF_FIRST])
def test_a_prometheus_gets_exemplars(accept: str) -> None:
    """As those of versions 2 and 3 ask, also for what is not offered at all."""
    assert preferred(accept) == OPEN_TYPE


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (TEXT_ONLY, TEXT_1_TYPE),
        (f"{OPEN};q=0.3,text/plain;q=0.8", TEXT_TYPE),
        (f"text/plain;q=0.3,{OPEN};q=0.8", OPEN_TYPE),
        (f"text/plain,{OPEN}", TEXT_TYPE),
        (f"{OPEN},text/plain", OPEN_TYPE),
        (f"*/*,{OPEN}", TEXT_TYPE),
        (f'{OPEN.upper()} ; Version="1.0.0" ; Q=1.000', OPEN_TYPE),
        ("application/*", OPEN_TYPE),
    ],
)
def test_what_weighs_most_is_told(accept: str, expected: str) -> None:
    """And of what weighs the same, what was named first."""
    assert preferred(accept) == expected


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (f"{OPEN};q=0,*/*", TEXT_TYPE),
        ("text/plain;q=0,*/*;q=0.1", OPEN_TYPE),
        ("text/plain;q=0.1,text/plain;version=1.0.0;q=0.9", TEXT_1_TYPE),
        ("text/plain;version=0.0.4;q=0,text/*", TEXT_1_TYPE),
        (f"*/*;q=0.9,{OPEN};q=0.1", TEXT_TYPE),
    ],
)
def test_the_narrowest_range_counts(accept: str, expected: str) -> None:
    """Also where it says less than a wider one."""
    assert preferred(accept) == expected


@pytest.mark.parametrize(
    "accept",
    [
        "image/png",
        "*/*;q=0",
        f"{OPEN};version=0.0.1",
        "text/plain;version=9",
        f"{OPEN};q=2",
        f"{OPEN};q=-1",
        f"{OPEN};q=nan",
        f"{OPEN};q=",
        "x" * 5000,
    ],
)
def test_where_nothing_fits_plain_text_is_told_all_the_same(accept: str) -> None:
    """Also where nothing can be read."""
    assert preferred(accept) == TEXT_TYPE


def test_of_very_many_ranges_the_first_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """No others are even read: whoever may ask must not keep the service busy."""
    read: list[str] = []

    class Read(formats._Range):
        def __init__(self, kind: str, version: str, weight: float) -> None:
            super().__init__(kind, version, weight)
            read.append(kind)

    monkeypatch.setattr(formats, "_Range", Read)
    assert preferred(f"{OPEN};q=0.5," + "text/plain;q=0.6," * 100_000) == TEXT_TYPE
    assert len(read) == formats.MOST
    assert preferred("image/png," * (formats.MOST - 1) + OPEN) == OPEN_TYPE
    assert preferred("image/png," * formats.MOST + OPEN) == TEXT_TYPE
    assert len(read) == 3 * formats.MOST


@pytest.mark.parametrize(("kind", "end"), [(TEXT_TYPE, False), (TEXT_1_TYPE, False), (OPEN_TYPE, True)])
def test_each_kind_is_made_for_who_accepts_it(kind: str, end: bool) -> None:  # noqa: FBT001 - a parameter
    """A content type says itself what it accepts."""
    page, told_kind = Metrics().page(told(), kind)
    assert (told_kind, Metrics.kind(kind)) == (kind, kind)
    assert page.endswith(b"# EOF\n") is end
