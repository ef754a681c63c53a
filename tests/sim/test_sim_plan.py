"""What a replay makes of a trace: times, lanes, tenants, and streams."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.plan import Mix, MixError, offered_tokens_per_s, plan
from extproc.sim.trace import Arrival

LANES = Mix.parse("P0=0.3,P1=0.4,P2=0.3")
MANY = [Arrival(i / 10, 100, 10) for i in range(5000)]


def test_times_are_divided_by_the_speed_and_cut_at_the_end():
    """Ten seconds of trace at five times the speed are two seconds of wall time."""
    arrivals = [Arrival(second, 10, 5) for second in range(20)]
    assert [request.at_s for request in plan(arrivals, speed=5, seconds=2, lanes=LANES)] == [i / 5 for i in range(10)]


def test_the_rest_of_a_trace_is_not_read():
    """So that a mistake far behind the window does not matter, and a large file costs nothing."""

    def arrivals():
        yield Arrival(0, 10, 5)
        yield Arrival(100, 10, 5)
        raise AssertionError

    assert len(plan(arrivals(), speed=1, seconds=60, lanes=LANES)) == 1


def test_mixes_are_drawn_in_their_shares():
    """Lanes, tenants and streams are drawn independently of each other."""
    requests = plan(MANY, speed=1, seconds=1e9, lanes=LANES, tenants=Mix.parse("a=1,b=3"), json_share=0.1)
    lanes, tenants = Counter(r.lane for r in requests), Counter(r.tenant for r in requests)
    assert lanes["P0"] / 5000 == pytest.approx(0.3, abs=0.03)
    assert tenants["b"] / 5000 == pytest.approx(0.75, abs=0.03)
    assert sum(not r.stream for r in requests) / 5000 == pytest.approx(0.1, abs=0.02)
    assert sum(r.lane == "P0" and r.tenant == "b" for r in requests) / 5000 == pytest.approx(0.225, abs=0.03)


def test_a_seed_gives_the_same_plan_and_another_seed_another():
    """A request's draws hang on its number alone: a longer window changes nothing of the start."""
    draw = {"speed": 1, "lanes": LANES, "json_share": 0.5}
    first = plan(MANY, seconds=100, seed=7, **draw)
    assert plan(MANY, seconds=200, seed=7, **draw)[: len(first)] == first
    assert plan(MANY, seconds=100, seed=8, **draw) != first


def test_what_the_trace_names_is_kept():
    """A mix only fills what the trace leaves open; nobody asks for an answer or a prompt of nothing."""
    (request,) = plan([Arrival(0, 0, 0, "P9", "chat")], speed=1, seconds=1, lanes=LANES, tenants=Mix.parse("a"))
    assert (request.lane, request.tenant, request.prompt_tokens, request.output_tokens) == ("P9", "chat", 1, 1)


def test_offered_tokens_are_prompt_and_answer_per_second():
    """Of wall time."""
    assert offered_tokens_per_s(plan(MANY, speed=1, seconds=100, lanes=LANES), 100) == pytest.approx(1100)


def test_a_mix_is_read_by_weight():
    """Weights need not add up to one; a name alone weighs one."""
    assert Mix.parse(" a = 1, b=3 ").shares == (0.25, 0.75)
    assert Mix.parse("a,b").shares == (0.5, 0.5)
    assert str(Mix.parse("P0=3,P1=1")) == "P0 75%, P1 25%"


@pytest.mark.parametrize("text", ["", ",", "=1", "a=x", "a=-1", "a=nan", "a=inf", "a=0", "a=1,a=2"])
def test_a_mistaken_mix_is_refused(text):
    """One line, with the mistake in it."""
    with pytest.raises(MixError):
        Mix.parse(text)


@given(st.floats(0, 1, exclude_max=True), st.lists(st.floats(0.001, 1000), min_size=1, max_size=5))
def test_every_chance_picks_a_name(chance, weights):
    """Rounding never leaves a gap at the end."""
    mix = Mix.parse(",".join(f"n{i}={weight}" for i, weight in enumerate(weights)))
    assert mix.pick(chance) in mix.names
