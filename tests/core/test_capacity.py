"""Batches of asks: whole or not at all, in order, nobody overtaken."""

from __future__ import annotations

from copy import deepcopy
from math import inf, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget
from extproc.core.capacity import (
    Ask,
    Claim,
    Declare,
    Forget,
    Gauge,
    Level,
    Option,
    Pause,
    Resize,
    Seats,
    Store,
    Tuning,
    answer,
    tune,
)
from extproc.core.policy import KvRules
from extproc.core.shares import PLAIN, RENEW_S, Standing, Terms
from extproc.core.watermark import Reading, Watermark

KEYS = ["a", "b", "c", "d", "free"]  # the last is never declared: unlimited

counters = st.one_of(
    st.builds(
        TokenBucket, rate=st.sampled_from([0, 1, 50]), capacity=st.just(100), level=st.floats(-50, 100), at=st.just(0)
    ),
    st.builds(Slots, limit=st.integers(0, 5), used=st.integers(0, 6)),
)
stores = st.fixed_dictionaries(dict.fromkeys(KEYS[:-1], counters))
options = st.builds(
    lambda name, claims: Option(name, tuple(Claim(key, amount) for key, amount in claims.items())),
    st.sampled_from("xyz"),
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from([1.0, 3.0, 40.0, 400.0]), max_size=3),
)
asks = st.builds(
    lambda options, followed: Ask("t", tuple(options), followed), st.lists(options, max_size=3), st.booleans()
)
plain_asks = st.builds(lambda options: Ask("t", tuple(options)), st.lists(options, max_size=3))


def _amounts(store: Store) -> dict[str, float]:
    return {key: -c.used if isinstance(c, Slots) else c.level_at(0.0) for key, c in store.items()}


@given(stores, st.lists(asks, max_size=8))
def test_what_is_granted_is_taken_whole_and_nothing_else(store: Store, batch: list[Ask]) -> None:
    """Counters fall by exactly the claims of the granted options; there is one answer per ask."""
    expected = _amounts(store)
    answers = answer(store, batch, 0.0)
    assert len(answers) == len(batch)
    for given_answer, ask in zip(answers, batch, strict=True):
        if given_answer.option is not None:
            assert given_answer.option in ask.options
            for claim in given_answer.option.claims:
                if claim.key in expected:
                    expected[claim.key] -= claim.amount
    assert _amounts(store) == expected


@given(stores, st.lists(asks, max_size=8))
def test_an_earlier_ask_is_never_overtaken_on_a_key_it_lacks(store: Store, batch: list[Ask]) -> None:
    """Once an ask was refused for want of a key, no later ask of the batch takes any of that key."""
    answers = answer(store, batch, 0.0)
    for i, refused in enumerate(answers):
        for later in answers[i + 1 :]:
            if later.option is not None:
                assert not set(refused.short) & {claim.key for claim in later.option.claims}


@given(stores, st.lists(plain_asks, max_size=8))
def test_each_ask_gets_the_first_option_that_can_be_had(store: Store, batch: list[Ask]) -> None:
    """In order, the best option of which no key lacks or is closed; none only when every option has such a key."""
    answers = answer(naive := deepcopy(store), batch, 0.0)
    closed: set[str] = set()
    for ask, given_answer in zip(batch, answers, strict=True):
        shorts = [[c.key for c in option.claims if _short(store, c, closed)] for option in ask.options]
        had = next((option for option, short in zip(ask.options, shorts, strict=True) if not short), None)
        assert given_answer.option == had
        if had is None:
            closed.update(key for short in shorts for key in short)
            assert set(given_answer.short) == {key for short in shorts for key in short}
        else:
            for claim in had.claims:
                if claim.key in store:
                    store[claim.key].change(-claim.amount, 0.0)
    assert _amounts(store) == _amounts(naive)


def _short(store: Store, claim: Claim, closed: set[str]) -> bool:
    counter = store.get(claim.key)
    return counter is not None and (claim.key in closed or counter.wait_for(claim.amount, 0.0) > 0)


@given(stores, st.lists(asks, min_size=1, max_size=8))
def test_a_batch_ends_behind_a_granted_ask_whose_followers_are_not_in_it(store: Store, batch: list[Ask]) -> None:
    """Later asks are told to ask again at once, and take nothing, because those followers come first."""
    answers = answer(store, batch, 0.0)
    ends = [i for i, (ask, a) in enumerate(zip(batch, answers, strict=True)) if ask.followed and a.option is not None]
    if ends:
        assert len(ends) == 1
        assert all(later.option is None and later.retry_after == 0 for later in answers[ends[0] + 1 :])
    assert all(a.option is not None or a.retry_after > 0 for a in answers[: ends[0] if ends else None])


@given(stores, plain_asks)
def test_alone_it_is_granted_after_the_time_it_was_told(store: Store, ask: Ask) -> None:
    """`retry_after` is when asking again helps, if nobody else takes anything; infinite where only a release helps."""
    [first] = answer(store, [ask], 0.0)
    if first.option is None and isfinite(first.retry_after):
        assert first.retry_after > 0
        assert answer(deepcopy(store), [ask], first.retry_after / 2)[0].option is None
        assert answer(store, [ask], first.retry_after + 1e-3)[0].option is not None


def test_a_free_key_that_was_closed_depends_on_who_closed_it() -> None:
    """Behind a large request the small one is told to wait for a release, not for a time of its own."""
    store: Store = {"a": TokenBucket(1, 100, 50, 0.0)}
    large, small = (Ask("t", (Option("x", (Claim("a", amount),)),)) for amount in (80.0, 10.0))
    assert [a.retry_after for a in answer(store, [large, small], 0.0)] == [30, inf]
    [soon] = answer(store, [Ask("t", (Option("x", (Claim("a", 50.25),)),))], 0.0)
    assert soon.retry_after == 0.25


def test_who_wants_nothing_that_is_counted_always_goes() -> None:
    """Unknown keys are unlimited, and an ask without options is refused without closing anything."""
    store: Store = {"a": Slots(1)}
    nothing, free, slot = (
        Ask("1", ()),
        Ask("2", (Option("x", (Claim("?", 9.0),)),)),
        Ask("3", (Option("y", (Claim("a", 1.0),)),)),
    )
    names = [a.option and a.option.name for a in answer(store, [nothing, free, slot, free], 0.0)]
    assert names == [None, "x", "y", "x"]


def _ask(*claims: tuple[str, float], terms: Terms = PLAIN, followed: bool = False) -> Ask:
    return Ask("t", (Option("x", tuple(Claim(*claim) for claim in claims)),), followed, terms)


P0, P1, P2 = Terms("P0", 0), Terms("P1", 1, share=0.2), Terms("P2", 2, share=0.1)


def _granted(store: Store, asks: list[Ask], now: float) -> list[bool]:
    return [a.option is not None for a in answer(store, asks, now)]


def test_a_guaranteed_share_is_had_though_a_better_lane_closed_the_key() -> None:
    """A better lane that never ends leaves what the lane behind it is owed, and has everything else."""
    store: Store = {"b": TokenBucket(10, 100, 0, 0.0)}
    flood = [_ask(("b", 30), terms=P0), _ask(("b", 30), terms=P0), _ask(("b", 10), terms=P2)]
    served = [_granted(store, flood, t / 10) for t in range(1, 1001)]
    assert sum(first + second for first, second, _ in served) == 30
    times = [i / 10 for i, (_, _, batch) in enumerate(served, 1) if batch]
    assert times == pytest.approx([10.1 * n for n in range(1, 10)], abs=1.0)


def test_inside_a_lane_nobody_is_overtaken_on_what_the_lane_is_owed() -> None:
    """The first waiter that was refused is the one the lane saves for; a smaller one behind it does not eat it up."""
    store: Store = {"b": TokenBucket(10, 100, 0, 0.0)}
    batch = [_ask(("b", 90), terms=P0), _ask(("b", 40), terms=P2), _ask(("b", 1), terms=P2)]
    for t in range(1, 9):
        assert _granted(store, batch, float(t)) == [False, False, False]
    bucket = store["b"]
    assert isinstance(bucket, TokenBucket)
    assert bucket.lanes["P2"].need == 40
    assert bucket.owed(8.0)["P2"] == pytest.approx(7.0)


def test_what_a_lane_is_owed_is_kept_while_it_waits_for_something_else() -> None:
    """Tokens first, then a slot: the one is not lost while the other comes."""
    store: Store = {"b": TokenBucket(10, 100, 0, 0.0), "s": Slots(1, 1.0)}
    both = [_ask(("b", 50), terms=P0), _ask(("b", 5), ("s", 1), terms=P2)]
    for t in range(1, 21):
        _granted(store, both, t * 0.5)
    bucket, slots = store["b"], store["s"]
    assert isinstance(bucket, TokenBucket)
    assert isinstance(slots, Slots)
    assert (bucket.owed(10.0)["P2"], bucket.lanes["P2"].short) == (5, False)
    slots.change(1, 10.0)
    assert _granted(store, both, 10.0) == [False, True]
    assert (bucket.owed(10.0)["P2"], slots.used) == (0, 1)


def test_lanes_with_a_share_are_to_ask_again_every_second() -> None:
    """Else their claim would lapse. Who has none may sleep until it helps."""
    store: Store = {"s": Slots(1, 1.0)}
    waits = [a.retry_after for a in answer(store, [_ask(("s", 1), terms=P0), _ask(("s", 1), terms=P2)], 0.0)]
    assert waits == [inf, RENEW_S]


def test_what_a_lane_keeps_to_by_its_own_pace_is_not_closed_to_others() -> None:
    """A smooth lane that waits for its pace only leaves the tokens to those behind it."""
    store: Store = {"b": TokenBucket(10, 100, 80, 0.0)}
    even = Terms("P1", 1, smooth=True)
    assert _granted(store, [_ask(("b", 20), terms=even)] * 2 + [_ask(("b", 20), terms=P2)], 0.0) == [True, False, True]
    assert _granted(store, [_ask(("b", 90), terms=even), _ask(("b", 20), terms=P2)], 0.0) == [False, False]


def test_a_limit_in_shadow_mode_refuses_nobody_and_closes_nothing() -> None:
    """It is named where it would have; what is taken is counted all the same."""
    store: Store = {
        "s": Slots(1, shadow=True),
        "b": TokenBucket(10, 100, 10, 0.0, shadow=True),
        "kv": Watermark(KvRules(shadow=True, tokens=100, trickle_rps=0.1)),
        "usd": Budget(1, shadow=True),
        "hard": Slots(3),
    }
    every = _ask(("s", 1), ("b", 10), ("kv", 50), ("usd", 1), ("hard", 1), terms=P2)
    first, second, third, fourth = answer(store, [every] * 4, 0.0)
    assert (first.option, first.shadowed) == (every.options[0], ())
    assert second.shadowed == third.shadowed == ("s", "b", "kv", "usd")
    assert (fourth.option, fourth.short, fourth.shadowed) == (None, ("hard",), ())
    assert (store["s"].used, store["kv"].booked, store["usd"].used) == (3, 150, 3)  # type: ignore[union-attr]


def test_tunings_follow_what_became_known() -> None:
    """In order; what is counted already stays when it is declared again; the later of two pauses holds."""
    store: Store = {"b": TokenBucket(10, 100, 50, 0.0)}
    tune(
        store,
        [
            Declare("b", TokenBucket(1, 1, 1, 0.0)),
            Declare("new", Slots(2)),
            Declare("usd", Budget(5)),
            Declare("kv", Watermark(KvRules(tokens=100))),
            Declare("gone", Slots(1)),
            Forget("gone"),
            Forget("unknown"),
            Resize("b", 20, 200),
            Level("b", most=40),
            Pause("b", 5),
            Pause("b", 3),
            Seats("new", 7),
            Seats("usd", 9),
            Gauge("kv", Reading(0.5)),
            Gauge("kv", None),
        ],
        1.0,
    )
    assert store == {
        "b": TokenBucket(20, 200, 40, 1.0, closed_until=6.0),
        "new": Slots(7),
        "usd": Budget(9),
        "kv": Watermark(KvRules(tokens=100), reading=Reading(0.5), asked=1.0),
    }
    tune(store, [Level("b", least=90), Pause("new", 1), Pause("usd", 1), Pause("kv", 1)], 1.0)
    assert [c.closed_until for c in store.values()] == [6, 2, 2, 2]
    assert store["b"].free_at(1.0) == 90


def test_tunings_of_other_counters_and_of_unknown_keys_are_ignored() -> None:
    """Whoever learned of a limit need not know what is counted."""
    store: Store = {"s": Slots(2), "b": TokenBucket(1, 10, 5, 0.0)}
    tunings: list[Tuning] = [Resize("s", 1, 1), Level("s", 0), Gauge("s", Reading(1)), Gauge("b", None), Seats("b", 1)]
    tune(store, [*tunings, Pause("?", 9), Resize("?", 1, 1), Seats("?", 1), Level("?", 1), Gauge("?", None)], 0.0)
    assert store == {"s": Slots(2), "b": TokenBucket(1, 10, 5, 0.0)}


lanes_of_all_kinds = st.sampled_from(
    [PLAIN, P0, P1, P2, Terms("P3", 3, 0.3, keep_free=0.5), Terms("P4", 4, 0.1, smooth=True), Terms("P5", 5, 0.0, 0.9)]
)
any_asks = st.builds(
    lambda options, followed, terms: Ask("t", tuple(options), followed, terms),
    st.lists(options, max_size=3),
    st.booleans(),
    lanes_of_all_kinds,
)


@given(stores, st.lists(st.tuples(st.lists(any_asks, max_size=6), st.floats(0, 3)), max_size=8))
def test_on_whatever_terms_what_is_granted_is_taken_and_nothing_else(
    store: Store, batches: list[tuple[list[Ask], float]]
) -> None:
    """Over many batches: buckets and slots move by exactly what was granted and what flowed in; limits hold."""
    now, copy = 0.0, deepcopy(store)
    for batch, pause in batches:
        now += pause
        held = {key: c.used for key, c in store.items() if isinstance(c, Slots)}
        for given_answer in answer(store, batch, now):
            for claim in given_answer.option.claims if given_answer.option else ():
                if claim.key in copy:
                    copy[claim.key].change(-claim.amount, now)
        for key, counter in store.items():
            twin = copy[key]
            if isinstance(counter, Slots) and isinstance(twin, Slots):
                assert counter.used == twin.used <= max(counter.limit, held[key])
            elif isinstance(counter, TokenBucket) and isinstance(twin, TokenBucket):
                assert counter.level_at(now) == pytest.approx(twin.level_at(now), abs=1e-6)


@given(stores, st.lists(any_asks, min_size=1, max_size=8))
def test_a_refusal_always_says_what_lacked_and_when_to_come_again(store: Store, batch: list[Ask]) -> None:
    """Never at once, so that nobody spins; only behind a followed grant everybody is asked again at once."""
    over = False
    for ask, given_answer in zip(batch, answer(store, batch, 0.0), strict=True):
        if given_answer.option is None:
            assert (given_answer.retry_after == 0) == over
            assert over or bool(given_answer.short) == bool(ask.options)
        over = over or (ask.followed and given_answer.option is not None)


def test_who_goes_while_others_wait_owes_what_it_takes_beyond_a_full_bucket() -> None:
    """A lane whose requests are larger than the bucket gets its share, too, and no more; in its own turn it is free."""
    for closed, owed in (("b", -200.0), ("s", 0.0)):
        bucket = TokenBucket(10, 100, 100, 0.0)
        bucket.lanes["P2"] = Standing(0.1, 100, kept=0.0, owed=100.0)
        store: Store = {"b": bucket, "s": Slots(0)}
        assert _granted(store, [_ask((closed, 100), terms=P0), _ask(("b", 300), terms=P2)], 0.0) == [False, True]
        assert bucket.owed(0.0) == {"P2": owed}
