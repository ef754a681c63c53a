"""Batches of asks: whole or not at all, in order, nobody overtaken."""

from __future__ import annotations

from copy import deepcopy
from math import inf, isfinite

from hypothesis import given
from hypothesis import strategies as st

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.capacity import Ask, Claim, Option, Store, answer

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
