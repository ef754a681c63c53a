"""How long a wait would be."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.capacity import Claim
from extproc.core.forecast import LONG_S, SHORT_S, Demand, Pace, wait_s
from extproc.core.lanes import Backlog

AHEAD = Backlog(requests=5, tokens=500, input=400)


def forecast(
    counter: TokenBucket | Slots, key: str, amount: float, ahead: Backlog = AHEAD, hold_s: float = 0.0
) -> float:
    return wait_s({key: counter}, [Claim(key, amount)], lambda _: ahead, lambda _: 0.0, hold_s, 0.0)


@pytest.mark.parametrize(
    ("kind", "amount", "expected"),
    [("total", 100, 60), ("input", 100, 50), ("output", 100, 20), ("requests", 1, 0.6), ("slots", 1, 0)],
)
def test_a_bucket_waits_for_what_is_ahead_of_its_own_kind(kind: str, amount: float, expected: float) -> None:
    """Input is not held up by the output of others, nor requests by tokens. The bucket is empty and fills at 10/s."""
    counter = Slots(10) if kind == "slots" else TokenBucket(10, 1000, 0, 0.0)
    assert forecast(counter, f"upstream/a/m/{kind}", amount) == expected


@given(st.floats(1, 1000), st.floats(0, 500), st.lists(st.integers(1, 300), max_size=8), st.integers(1, 1000))
def test_the_forecast_of_a_bucket_is_when_the_last_in_line_gets_its_turn(
    rate: float, level: float, ahead: list[int], amount: int
) -> None:
    """Serving everybody ahead as early as possible, the last goes at the forecast time, or earlier by rounding."""
    bucket, now = TokenBucket(rate, 500, level, 0.0), 0.0
    told = forecast(bucket, "k/total", amount, Backlog(len(ahead), sum(ahead)))
    for each in [*ahead, amount]:
        now += bucket.wait_for(each, now)
        bucket.change(-each, now)
    assert now == pytest.approx(told, abs=1e-2 * (len(ahead) + 1) / rate)


def test_slots_wait_as_long_as_those_ahead_hold_them() -> None:
    """Two slots, both taken, five ahead and 3 s each: the sixth gets its turn after 6 x 3 / 2 seconds."""
    assert forecast(Slots(2, 2.0), "a/slots", 1, hold_s=3) == 9
    assert forecast(Slots(2, 2.0), "a/slots", 1, hold_s=0) == 0
    assert forecast(Slots(20, 2.0), "a/slots", 1, hold_s=3) == 0
    assert forecast(Slots(0, 0.0), "a/slots", 1, hold_s=3) == inf


@pytest.mark.parametrize("counter", [Slots(10), TokenBucket(10, 1000, 1000, 0.0), TokenBucket(10, 1000, 500, 0.0)])
def test_a_pause_is_waited_for(counter: TokenBucket | Slots) -> None:
    """Whatever there is meanwhile."""
    counter.closed_until = 20.0
    assert forecast(counter, "upstream/a/m/total", 100) == 20.0


def test_the_longest_claim_counts_and_unknown_keys_do_not() -> None:
    """A request waits for all it needs; what is not counted is never waited for."""
    store = {"a/slots": Slots(1, 1.0), "a/total": TokenBucket(10, 100, 0, 0.0)}
    wants = [Claim("a/slots", 1), Claim("a/total", 50), Claim("?", 9)]
    assert wait_s(store, wants, lambda _: Backlog(), lambda _: 0.0, 2.0, 0.0) == 5
    assert wait_s(store, wants[:1], lambda _: Backlog(), lambda _: 0.0, 2.0, 0.0) == 2
    assert wait_s(store, wants[2:], lambda _: Backlog(), lambda _: 0.0, 2.0, 0.0) == 0


def test_a_bucket_that_never_refills_is_an_infinite_wait() -> None:
    """Unless it holds enough for everybody ahead as well."""
    assert forecast(TokenBucket(0, 1000, 550, 0.0), "a/total", 51) == inf
    assert forecast(TokenBucket(0, 1000, 551, 0.0), "a/total", 51) == 0


def test_what_better_lanes_take_is_not_there_for_worse_ones() -> None:
    """Of 10 per second better lanes take 6: a wait for 50 is 50 / 4 seconds, and never longer than at 5 % of it."""
    store, claim = {"a/total": TokenBucket(10, 100, 0, 0.0)}, Claim("a/total", 50)
    assert wait_s(store, [claim], lambda _: Backlog(), lambda _: 6.0, 0.0, 0.0) == pytest.approx(12.5)
    assert wait_s(store, [claim], lambda _: Backlog(), lambda _: 60.0, 0.0, 0.0) == pytest.approx(100)


def test_demand_is_what_better_lanes_took_lately() -> None:
    """A steady 6 per second is known as such by the lanes below, not by the lane itself, and is soon forgotten."""
    demand, end = Demand(), 4 * LONG_S
    for second in range(int(end) + 1):
        demand.note(0, [Claim("a/total", 6)], float(second))
    assert demand.above("a/total", 1, end) == pytest.approx(6, rel=0.15)
    assert demand.above("a/total", 2, end) == demand.above("a/total", 1, end)
    assert demand.above("a/total", 0, end) == 0
    assert demand.above("b/total", 1, end) == 0
    assert demand.above("a/total", 1, end + 6 * SHORT_S) < 0.03


def test_a_burst_is_not_taken_for_a_habit() -> None:
    """What came at once counts as spread over the long memory, so that one burst does not refuse everybody below."""
    demand = Demand()
    demand.note(0, [Claim("a/total", 6000)], 0.0)
    assert demand.above("a/total", 1, 0.0) == pytest.approx(6000 / LONG_S)


def test_pace_learns_a_moving_average_and_knows_nothing_at_first() -> None:
    """Unknown is 0, so that it refuses nobody; the first value counts whole, later ones a tenth."""
    pace = Pace()
    assert (pace.hold_s("a"), pace.output_s("m", 100)) == (0, 0)
    pace.learn_hold("a", 10)
    pace.learn_hold("a", 20)
    assert pace.hold_s("a") == pytest.approx(11)
    pace.learn_output("m", 2.0, 100)
    assert pace.output_s("m", 50) == pytest.approx(1.0)


@pytest.mark.parametrize(("seconds", "tokens"), [(0.0, 5), (-1.0, 5), (1.0, 0)])
def test_pace_learns_nothing_from_nonsense(seconds: float, tokens: int) -> None:
    """No tokens or no time say nothing about speed."""
    pace = Pace()
    pace.learn_output("m", seconds, tokens)
    assert pace.output_s("m", 100) == 0


def test_pace_forgets_the_names_it_has_not_heard_of_for_longest() -> None:
    """Its memory is bounded."""
    pace = Pace(limit=2)
    for name in ("a", "b", "a", "c"):
        pace.learn_hold(name, 5)
    assert [pace.hold_s(name) for name in "abc"] == [5, 0, 5]
