"""Who uses most, of any number of names, in bounded memory."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.telemetry.heaviest import LEAST_KEPT, Heaviest, Row
from tests.doubles import HandClock


def heaviest(shown: int = 10, clock: HandClock | None = None, half_life_s: float = 1800.0) -> Heaviest[str]:
    return Heaviest(shown, (clock or HandClock()).time, half_life_s)


def test_numbers_are_exact_while_all_fit() -> None:
    one = heaviest(2)
    for name, tokens in (("a", 5), ("b", 100), ("c", 20), ("a", 7)):
        one.used(name, tokens, 0.5)
    one.refused("c")
    told = one.told()
    assert [name for name, _ in told] == ["b", "c"]
    assert dict(told)["c"] == Row(weight=22, requests=2, tokens=20, usd=0.5, refused=1)
    assert one.rest(told) == Row(requests=2, tokens=12, usd=1.0)
    assert one.sum == Row(requests=5, tokens=132, usd=2.0, refused=1)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), heavy=st.integers(1, 20), small=st.integers(1, 3))
def test_whoever_used_more_than_its_share_is_among_them(seed: int, heavy: int, small: int) -> None:
    """Whatever the order, and whoever else comes by: 50,000 others, each of them once or a few times.

    What is told of a name is never more than it used, and no less than that by more than the sketch may miss.
    """
    chance = random.Random(seed)
    used: Counter[str] = Counter()
    events = [(f"small-{number}", chance.randint(1, small)) for number in range(50_000)]
    events += [(f"heavy-{chance.randrange(heavy)}", 200) for _ in range(1000 * heavy // 20 + 100)]
    chance.shuffle(events)
    one = heaviest(20)
    for name, tokens in events:
        one.used(name, tokens, 0.0)
        used[name] += tokens
    assert len(one.rows) <= one.kept == LEAST_KEPT
    weight = sum(used.values()) + len(events)
    missed = 2 * weight / one.kept
    for name, row in one.rows.items():
        assert used[name] - missed <= row.tokens <= used[name]
    sure = {name for name, tokens in used.items() if tokens > missed}
    assert sure <= one.rows.keys()
    shown = [name for name, _ in one.told()]
    best = [name for name in shown if name.startswith("heavy")]
    assert {name for name in sure if name.startswith("heavy")} <= {*best}


def test_a_flood_of_names_does_not_push_out_who_uses_much() -> None:
    """Also one of refused requests, of which each is of another name."""
    one = heaviest(1)
    one.used("steady", 500_000, 1.0)
    for number in range(200_000):
        one.refused(f"flood-{number}")
    [(name, row)] = one.told()
    assert (name, row.tokens) == ("steady", 500_000)
    assert len(one.rows) <= one.kept
    assert one.rest(one.told()).refused == 200_000


def test_who_used_much_long_ago_makes_room() -> None:
    """Its numbers do not shrink: they are a counter's."""
    clock = HandClock(0.0)
    one = heaviest(1, clock, half_life_s=60.0)
    one.used("morning", 1_000_000, 0.0)
    clock.now = 59.0
    assert one.told()[0][1].weight == 1_000_001
    clock.now = 1200.0
    one.used("now", 1000, 0.0)
    assert [name for name, _ in one.told()] == ["now"]
    assert one.rows["morning"].tokens == 1_000_000


def test_rest_never_falls_when_somebody_else_is_told() -> None:
    one = heaviest(1)
    one.used("a", 10, 1.0)
    one.used("b", 5, 1.0)
    first = one.rest(one.told()).tokens
    one.used("b", 100, 1.0)
    assert (first, one.rest(one.told()).tokens) == (5, 10)


def test_looking_and_refusing_make_older_ones_lighter_too() -> None:
    """Whatever happens first after the time has come."""
    for act in (Heaviest[str].told, lambda one: one.refused("b")):
        clock = HandClock(0.0)
        one = heaviest(1, clock, half_life_s=60.0)
        one.used("a", 99, 0.0)
        clock.now = 120.0
        act(one)
        assert one.rows["a"].weight == 25
