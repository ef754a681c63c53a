"""How long answers usually are: percentiles of a window, fallbacks, bounds."""

from __future__ import annotations

import random
import time
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from extproc.core.outputs import ENOUGH, MOST_TOKENS, WINDOW, Outputs

PRIOR = 512
answers = st.lists(st.integers(1, 100_000), min_size=ENOUGH, max_size=3 * WINDOW)


def learned(*tokens: int, tenant: str = "t", model: str = "m", capped: bool = False) -> Outputs:
    outputs = Outputs(0.95, PRIOR)
    for each in tokens:
        outputs.learn(tenant, model, each, capped=capped)
    return outputs


def test_the_prior_holds_until_enough_is_known() -> None:
    """One answer more than too few, and what was learned is believed."""
    outputs = learned(*[100] * (ENOUGH - 1))
    assert outputs.usual("t", "m") == PRIOR
    outputs.learn("t", "m", 100, capped=False)
    assert outputs.usual("t", "m") == 100


def test_a_tenant_that_is_not_known_yet_is_taken_for_the_usual_user_of_the_model() -> None:
    """Tenant and model, else the model, else the prior."""
    outputs = learned(*[100] * ENOUGH, tenant="a")
    assert outputs.usual("b", "m") == 100
    assert outputs.usual("a", "other") == PRIOR
    for _ in range(ENOUGH):
        outputs.learn("b", "m", 3000, capped=False)
    assert outputs.usual("b", "m") == 3000
    assert outputs.usual("a", "m") == 100


def test_answers_that_were_cut_short_do_not_shorten_the_others() -> None:
    """A tenant whose pings are limited to 5 tokens still has its long answers reserved for."""
    outputs = learned(*[2000] * ENOUGH)
    for _ in range(10 * WINDOW):
        outputs.learn("t", "m", 5, capped=True)
    assert outputs.usual("t", "m") == 2000
    assert outputs.usual("t", "m", capped=True) == 5


def test_an_empty_answer_teaches_nothing() -> None:
    """Nothing generated is no measure of what is generated."""
    outputs = learned(*[0] * 100, -1)
    assert len(outputs) == 0
    assert outputs.usual("t", "m") == PRIOR


def test_an_absurd_answer_is_bounded() -> None:
    """A number that no model generates does not break the window."""
    assert learned(*[10**30] * ENOUGH).usual("t", "m") == MOST_TOKENS


@given(answers, st.sampled_from([0.5, 0.9, 0.95, 0.99, 1.0]))
def test_it_is_the_percentile_of_the_last_answers(tokens: list[int], percentile: float) -> None:
    """Exactly, whatever came before the window."""
    outputs = Outputs(percentile, PRIOR)
    for each in tokens:
        outputs.learn("t", "m", each, capped=False)
    window = sorted(tokens[-WINDOW:])
    assert outputs.usual("t", "m") == window[ceil(percentile * len(window)) - 1]


@given(answers)
def test_nearly_all_answers_stay_below_it(tokens: list[int]) -> None:
    """Of the window's answers, at most one in twenty is longer than the 95th percentile."""
    outputs = learned(*tokens)
    window = tokens[-WINDOW:]
    longer = sum(each > outputs.usual("t", "m") for each in window)
    assert longer <= 0.05 * len(window)


def test_a_change_of_habit_is_followed_within_a_window() -> None:
    """What was usual once is forgotten."""
    outputs = learned(*[4000] * (5 * WINDOW), *[50] * WINDOW)
    assert outputs.usual("t", "m") == 50


def test_memory_is_bounded_and_the_least_used_is_forgotten_first() -> None:
    """However many tenants and models, only so many are kept; those in use stay."""
    outputs = Outputs(0.95, PRIOR, limit=20)
    for _ in range(ENOUGH):
        outputs.learn("busy", "m", 700, capped=False)
    for number in range(1000):
        outputs.learn(f"t{number}", f"m{number}", 9, capped=False)
        outputs.learn("busy", "m", 700, capped=False)
    assert len(outputs) == 20
    assert outputs.usual("busy", "m") == 700
    assert outputs.usual("t0", "m0") == PRIOR


def test_learning_costs_microseconds() -> None:
    """With full windows, an answer is learned in far less than the bound, which is for a slow machine."""
    outputs, rng = Outputs(0.95, PRIOR), random.Random(1)
    tokens = [rng.randrange(1, 4000) for _ in range(5000)]
    for each in tokens[:500]:
        outputs.learn("t", "m", each, capped=False)
    began = time.thread_time()
    for each in tokens:
        outputs.learn("t", "m", each, capped=False)
    assert (time.thread_time() - began) / len(tokens) < 100e-6


def test_an_answer_with_a_limit_is_taken_to_use_it_until_more_is_known() -> None:
    """A prior below the client's own limit would let an engine's cache overflow."""
    outputs = Outputs(0.95, PRIOR)
    assert outputs.usual("t", "m", capped=True) == MOST_TOKENS
    for _ in range(ENOUGH):
        outputs.learn("t", "m", 30, capped=True)
    assert outputs.usual("t", "m", capped=True) == 30
