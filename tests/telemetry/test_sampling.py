"""Which requests have a trace: whatever stands in `traceparent`, and which share of those that come without one."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.telemetry.sampling import NONE, Parent, Sampling, parent_of
from tests.doubles import request

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("traceparent", "parent"),
    [
        (f"00-{TRACE}-{SPAN}-01", Parent(TRACE, SPAN, sampled=True)),
        (f"00-{TRACE}-{SPAN}-00", Parent(TRACE, SPAN, sampled=False)),
        (f"00-{TRACE}-{SPAN}-03", Parent(TRACE, SPAN, sampled=True)),
        (f"cc-{TRACE}-{SPAN}-01", Parent(TRACE, SPAN, sampled=True)),
        (f"cc-{TRACE}-{SPAN}-01-what the future brings", Parent(TRACE, SPAN, sampled=True)),
    ],
)
def test_a_valid_traceparent_names_trace_and_span_and_says_whether_it_is_kept(traceparent: str, parent: Parent) -> None:
    """As W3C Trace Context has it, later versions included."""
    assert parent_of(traceparent) == parent


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "-",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-",
        f"00-{TRACE}-{SPAN}-01-more",
        f"cc-{TRACE}-{SPAN}-01more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0 ",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-\u0661\u0661",
        f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01",
        "\udcff" * 55,
        "0" * 1_000_000,
    ],
)
def test_a_traceparent_that_is_none_counts_as_none(traceparent: str) -> None:
    """Whoever sends one gets a trace of its own, or none, like others."""
    assert parent_of(traceparent) is None
    name = str(uuid4())
    assert Sampling(1.0).of(traceparent, name, "t") == name.replace("-", "")
    assert Sampling(0.0).of(traceparent, name, "t") == ""


@given(st.text(max_size=80))
def test_no_text_at_all_is_trouble(text: str) -> None:
    """Neither as header nor as a name."""
    found = parent_of(text)
    assert found is None or int(found.trace, 16) > 0
    assert len(Sampling(1.0).of("", text, text)) == 32


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_of_requests_that_come_without_a_trace_a_share_has_one(share: float) -> None:
    """By their ids, whether these are UUIDs or not: the same for a request whenever and wherever it is asked."""
    sampling, numbers = Sampling(share), range(20_000)
    for names in ([str(UUID(int=(n * 0x9E3779B97F4A7C15F39CC0605CEDC835) % 2**128)) for n in numbers], ["x"] * 20_000):
        traces = [sampling.of("", name, f"p-{i}") for i, name in enumerate(names)]
        assert abs(sum(map(bool, traces)) / 20_000 - share) < 0.01
        assert traces == [sampling.of("", name, f"p-{i}") for i, name in enumerate(names)]
        assert len({*filter(None, traces)}) == sum(map(bool, traces))


def test_who_comes_with_a_trace_decides() -> None:
    """Whatever the share is."""
    asked = request(id=str(uuid4()), trace=f"00-{TRACE}-{SPAN}-01")
    assert Sampling(0.0)(asked) == TRACE
    asked = request(id=str(uuid4()), trace=f"00-{TRACE}-{SPAN}-00")
    assert Sampling(1.0)(asked) == ""


def test_without_traces_nobody_has_one() -> None:
    """What others ask where there are none."""
    assert NONE(request(trace=f"00-{TRACE}-{SPAN}-01")) == ""


def test_a_uuid_of_zeros_is_no_trace() -> None:
    """The standard forbids it."""
    assert Sampling(1.0).of("", str(UUID(int=0)), "t") == ""
