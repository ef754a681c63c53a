"""Learning from reported usage."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.tokens import Calibration


def test_nothing_changes_before_a_few_answers():
    """Four answers prove nothing, five do."""
    calibration = Calibration()
    for _ in range(4):
        calibration.learn("m", 100, 170)
        assert calibration.correct("m", 100) == 100
        assert calibration.learned("m") is None
    calibration.learn("m", 100, 170)
    assert calibration.learned("m") == calibration.ratio("m") == 1.7
    assert calibration.correct("m", 100) == 170
    assert calibration.correct("other", 100) == 100


@given(
    off=st.floats(0.55, 2.8),
    noise=st.floats(0, 0.15),
    seed=st.integers(0, 10**6),
)
def test_it_converges_on_a_tokenizer_that_is_off(off, noise, seed):
    """Whatever the factor: after a hundred answers corrected estimates are right within the noise."""
    rng = random.Random(seed)
    calibration = Calibration()
    for _ in range(100):
        estimated = rng.randint(50, 5_000)
        calibration.learn("m", estimated, round(estimated * off * rng.uniform(1 - noise, 1 + noise)))
    assert calibration.ratio("m") == pytest.approx(off, rel=noise / 2 + 0.02)


def test_a_factor_of_one_point_seven_is_learned_quickly():
    """Claude's or any other tokenizer: within 2 % after ten answers."""
    calibration = Calibration()
    for _ in range(10):
        calibration.learn("m", 1_000, 1_700)
    assert calibration.correct("m", 2_000) == pytest.approx(3_400, rel=0.02)


@given(st.integers(1, 10**12), st.integers(0, 2))
def test_outliers_are_damped(odd, early):
    """One absurd answer among good ones, early or late, moves the ratio by 5 % at most."""
    calibration = Calibration()
    for index in range(20):
        calibration.learn("m", 1_000, odd if index == early * 9 else 1_000)
        if index >= 5:
            assert calibration.ratio("m") == pytest.approx(1.0, abs=0.051)


def test_a_real_change_gets_through():
    """A model that changes its tokenizer is followed within fifty answers."""
    calibration = Calibration()
    for _ in range(50):
        calibration.learn("m", 1_000, 1_000)
    for _ in range(50):
        calibration.learn("m", 1_000, 2_500)
    assert calibration.ratio("m") == pytest.approx(2.5, rel=0.05)


@given(st.lists(st.tuples(st.integers(-10, 10**6), st.integers(-10, 10**12)), max_size=40))
def test_it_never_leaves_its_bounds(answers):
    """Between half and three times, whatever is reported."""
    calibration = Calibration()
    for estimated, reported in answers:
        calibration.learn("m", estimated, reported)
        assert 0.5 <= calibration.ratio("m") <= 3.0


def test_what_teaches_nothing_is_ignored():
    """Tiny prompts are all frame; a report of nothing is no report."""
    calibration = Calibration()
    for _ in range(10):
        calibration.learn("m", 15, 60)
        calibration.learn("m", 1_000, 0)
        calibration.learn("m", 0, 5)
    assert calibration.ratio("m") == 1.0


def test_it_remembers_a_bounded_number_of_models():
    """The one used longest ago goes first."""
    calibration = Calibration(models=3)
    for model in ("a", "b", "c", "a", "d"):
        for _ in range(5):
            calibration.learn(model, 1_000, 2_000)
    assert [calibration.ratio(model) for model in "abcd"] == [2.0, 1.0, 2.0, 2.0]


def test_a_flood_of_names_does_not_grow_it():
    """Ten thousand names of nobody's models leave a thousand."""
    calibration = Calibration()
    for index in range(10_000):
        calibration.learn(f"m{index}", 1_000, 2_000)
    assert len(calibration._ratios) == 1_000
