"""What guaranteed shares promise, wherever they are: a minimum while one waits, and everything else to better lanes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from extproc.core.bucket import EPSILON, Slots, TokenBucket
from extproc.core.capacity import Claim, Gauge, tune
from extproc.core.policy import KvRules
from extproc.core.shares import AHEAD, LAPSE_S, TURNS, Standing, Terms, charge, held_back, is_due, register
from extproc.core.watermark import Reading, Watermark
from tests.core.floods import Flood

shares = st.lists(st.sampled_from([0.05, 0.1, 0.2, 0.3]), min_size=1, max_size=3)
sizes = st.sampled_from([0.01, 0.1, 0.5, 1.0, 3.0])


def lanes_of(minima: list[float], *, best: float = 0.0, keep_free: float = 0.0) -> list[Terms]:
    """P0, and a lane behind it for each share."""
    return [Terms("P0", 0, best)] + [Terms(f"P{i}", i, share, keep_free) for i, share in enumerate(minima, 1)]


@effort(max_examples=20)
@given(
    shares,
    st.lists(sizes, min_size=4, max_size=4),
    st.sampled_from([1.0, 20.0]),
    st.sampled_from([0.0, 0.3, 0.9]),
    st.sampled_from([0.1, 1.0]),
    st.integers(0, 10**6),
)
def test_of_a_bucket_every_lane_gets_its_share_and_the_best_one_all_the_rest(
    minima: list[float], largest: list[float], fill_s: float, keep_free: float, least: float, seed: int
) -> None:
    """Under endless floods: the share less one request, no more than one request beyond it, and nothing overflows."""
    rng, capacity = random.Random(seed), 100.0
    rate = capacity / fill_s
    lanes = lanes_of(minima, best=rng.choice([0.0, 0.1]), keep_free=keep_free)
    most = {terms.lane: capacity * size for terms, size in zip(lanes, largest, strict=False)}

    def draw(terms: Terms) -> tuple[Claim, ...]:
        return (Claim("k", most[terms.lane] * rng.uniform(least, 1.0)),)

    def never_full(now: float, heads: dict[str, tuple[Claim, ...]]) -> None:
        assert bucket.level_at(now) < capacity - EPSILON / 2, heads

    bucket = TokenBucket(rate, capacity, 0.0, 0.0)
    flood = Flood({"k": bucket}, lanes, draw, each=never_full)
    seconds = 15 * max(most.values()) / rate
    flood.run(seconds)
    for terms in lanes[1:]:
        entitled = terms.share * rate * flood.now
        late = terms.share * len(lanes) * max(capacity, *most.values())  # others' debt, and others due, go first
        assert flood.got[terms.lane, "k"] >= entitled - most[terms.lane] - late - EPSILON, terms
        assert flood.got[terms.lane, "k"] <= entitled + most[terms.lane] + late + EPSILON, terms
    rest = (1.0 - sum(minima)) * rate * flood.now
    assert flood.got["P0", "k"] >= rest - capacity - sum(most.values()) - EPSILON


@pytest.mark.parametrize("largest", [(1.0, 1.0, 1.0), (0.02, 1.0, 0.3), (1.0, 0.02, 3.0), (3.0, 0.3, 0.02)])
def test_in_the_long_run_shares_of_a_bucket_are_exact(largest: tuple[float, ...]) -> None:
    """Small requests against large ones, larger than the bucket even: within a part in fifty after 300 fillings."""
    rng, lanes = random.Random(1), lanes_of([0.1, 0.3])
    most = dict(zip((terms.lane for terms in lanes), largest, strict=True))
    bucket = TokenBucket(20.0, 100.0, 0.0, 0.0)
    flood = Flood({"k": bucket}, lanes, lambda t: (Claim("k", 100.0 * most[t.lane] * rng.uniform(0.1, 1.0)),))
    flood.run(1500)
    for terms, share in zip(lanes, (0.6, 0.1, 0.3), strict=True):
        assert flood.got[terms.lane, "k"] == pytest.approx(share * 20.0 * flood.now, rel=0.02, abs=300)


@effort(max_examples=20)
@given(shares, st.sampled_from([1, 2, 5, 20]), st.sampled_from([0.0, 0.2, 0.9]), st.integers(0, 10**6))
def test_of_slots_every_lane_gets_its_share_of_turns(
    minima: list[float], limit: int, keep_free: float, seed: int
) -> None:
    """Whatever they keep free for better lanes; and no slot is left free while everybody waits."""
    rng = random.Random(seed)
    lanes, slots = lanes_of(minima, keep_free=keep_free), Slots(limit)

    def all_held(_now: float, _heads: object) -> None:
        assert slots.used == limit

    flood = Flood(
        {"s": slots},
        lanes,
        lambda _: (Claim("s", 1.0),),
        lambda: rng.uniform(0.5, 5.0),
        frozenset("s"),
        all_held,
    )
    flood.run(150)
    turns = sum(flood.grants.values())
    for terms in lanes[1:]:
        before = terms.share * limit  # turns that went before anybody had to wait
        assert abs(flood.grants[terms.lane] - terms.share * turns) <= before + 2, terms
        assert flood.gap_s[terms.lane] <= (2 + 1 / terms.share) * 5.0 / limit + 5.0
    flood.drain()
    assert slots.used == 0


@effort(max_examples=15)
@given(
    shares,
    st.sampled_from([2_000, 10_000]),
    st.sampled_from([1, 3]),
    st.sampled_from([{}, {"P1": (0.5, 0.4)}]),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 10**6),
)
def test_of_a_cache_every_lane_gets_its_share_of_tokens(
    minima: list[float], size: int, instances: int, marks: dict[str, tuple[float, float]], keep_free: float, seed: int
) -> None:
    """Whatever their own marks are, and however often the metrics come; what is held is never above the mark."""
    rng = random.Random(seed)
    lanes = lanes_of(minima, keep_free=keep_free)
    most = {terms.lane: rng.choice([50, 300, 1000]) for terms in lanes}
    gate = Watermark(KvRules(tokens=size, lanes=marks))
    store, read = {"kv": gate}, 0.0

    def look(now: float, _heads: object) -> None:
        nonlocal read
        assert gate.booked <= 0.82 * size * instances + EPSILON
        if now - read > 0.3:
            read = now
            usage = gate.booked * rng.uniform(0.5, 1.0) / (size * instances)
            tune(store, [Gauge("kv", Reading(usage, 0.0, gate.held, None, instances, 0.0, 0.05))], now)

    tune(store, [Gauge("kv", Reading(0.0, instances=instances))], 0.0)
    flood = Flood(
        store,
        lanes,
        lambda terms: (Claim("kv", float(rng.randint(10, most[terms.lane]))),),
        lambda: rng.uniform(0.5, 5.0),
        frozenset({"kv"}),
        look,
    )
    flood.run(60)
    total = sum(flood.got.values())
    for terms in lanes[1:]:
        at_once = terms.share * 2 * size * instances  # before anybody had to wait, and what it has yet to be given
        assert flood.got[terms.lane, "kv"] >= terms.share * total - at_once - most[terms.lane], terms
    flood.drain()
    assert (gate.booked, gate.held) == (0, 0)


@pytest.mark.parametrize("seed", range(12))
def test_who_waits_for_several_things_gets_the_share_of_one_of_them(seed: int) -> None:
    """Tokens, slots and cache together: what a lane has of one is not lost while it waits for the next."""
    rng = random.Random(seed)
    lanes = lanes_of(rng.choices([0.05, 0.1, 0.2, 0.3], k=rng.randint(1, 3)))
    most = {terms.lane: rng.choice([50, 300, 1000]) for terms in lanes}
    store = {
        "s": Slots(rng.choice([1, 2, 5, 20])),
        "b": TokenBucket(rng.choice([50, 200, 1000]), 2000, 0.0, 0.0),
        "kv": Watermark(KvRules(tokens=rng.choice([2000, 10_000]))),
    }
    keys = rng.choice(["sb", ("s", "kv"), ("b", "kv"), ("s", "b", "kv")])

    def draw(terms: Terms) -> tuple[Claim, ...]:
        amount = float(rng.randint(10, most[terms.lane]))
        return tuple(Claim(key, 1.0 if key == "s" else amount) for key in keys)

    def look(now: float, _heads: object) -> None:
        tune(store, [Gauge("kv", Reading(0.0, 0.0, 1.0))], now)

    flood = Flood(store, lanes, draw, lambda: rng.uniform(0.5, 5.0), frozenset({"s", "kv"}), look)
    flood.run(200)
    for terms in lanes[1:]:
        shares_had = [flood.grants[terms.lane] / sum(flood.grants.values())]
        shares_had += [flood.share(terms.lane, key) for key in keys if key != "s"]
        assert max(shares_had) >= terms.share - 0.04, (terms, shares_had)


def test_a_lane_without_a_share_is_owed_nothing_and_one_with_a_share_only_where_it_lacked() -> None:
    """Being refused for want of something else makes no claim here, but keeps one that was made."""
    standings: dict[str, Standing] = {}
    batch = Terms("P2", 2, 0.1)
    register(standings, batch, 5.0, 0.0, short=False)
    assert standings == {}
    register(standings, batch, 5.0, 0.0, short=True)
    register(standings, batch, 9.0, 1.5, short=False)
    assert standings == {"P2": Standing(0.1, 5.0, kept=1.5, short=False)}


def test_who_has_not_asked_lately_is_owed_nothing() -> None:
    """When it asks again it begins anew, though what it took too much stays."""
    standings = {"P2": Standing(0.5, 1.0, kept=0.0, owed=1.0), "P3": Standing(0.5, 1.0, kept=0.0, owed=-1.0)}
    assert is_due(standings, "P2", 1.0, LAPSE_S - 0.1)
    assert held_back(standings, "P0", LAPSE_S - 0.1) == 1.0
    assert not is_due(standings, "P2", 1.0, LAPSE_S)
    assert held_back(standings, "P0", LAPSE_S) == 0.0
    for name in ("P2", "P3"):
        register(standings, Terms(name, 2, 0.5), 1.0, 10.0, short=True)
    assert [standing.owed for standing in standings.values()] == [0.0, -1.0]
    charge(standings, "P0", 1.0, 20.0)
    assert standings == {}


def test_places_are_left_to_who_is_due_and_lacks_just_them() -> None:
    """Not to oneself, not to who waits for something else meanwhile, not to who is owed too little."""
    standings = {
        "P1": Standing(0.5, 1.0, kept=0.0, owed=1.0),
        "P2": Standing(0.5, 1.0, kept=0.0, owed=1.0, short=False),
        "P3": Standing(0.5, 2.0, kept=0.0, owed=1.0),
    }
    assert [held_back(standings, name, 0.0) for name in ("P0", "P1", "P2", "P3")] == [1, 0, 1, 1]
    standings["P3"].owed = 7.0
    assert held_back(standings, "P0", 0.0) == 1 + 6


def test_a_turn_that_has_to_wait_does_not_pile_up() -> None:
    """Who is due and waits for something else is owed a turn or two; who lacks just this, more, but not without end."""
    elsewhere, here = Standing(0.5, 1.0, kept=0.0, short=False), Standing(0.5, 1.0, kept=0.0)
    standings = {"P1": elsewhere, "P2": here}
    for _ in range(1000):
        charge(standings, "P0", 1.0, 0.0)
    assert (elsewhere.owed, here.owed) == (AHEAD * 1.5, TURNS * 1.5)
    assert held_back(standings, "P0", 0.0) == TURNS * 1.5
    charge(standings, "P2", 1.0, 0.0)
    assert here.owed == TURNS * 1.5 - 1.0
    here.owed = 2.7
    assert held_back(standings, "P0", 0.0) == 2.0
