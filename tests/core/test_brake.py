"""Pauses and cuts after a refusal for speed, and how they are taken back."""

from __future__ import annotations

import random

import pytest

from extproc.core import brake
from extproc.core.brake import Brake

T = 1000.0


def refused(one: Brake, now: float = T, wait_s: float | None = None, **more) -> float:
    asked = {"began": now - 0.1, "explained": False, "chance": 0.5, **more}
    return one.refused(asked.pop("began"), now, wait_s, **asked)


def test_it_waits_as_long_as_it_is_told_to():
    """Exactly; and the rate is cut, a little when headers explain the refusal."""
    one = Brake()
    assert one.calm
    assert refused(one, wait_s=7.5) == 7.5
    assert (one.share, one.paused_until, one.calm) == (0.8, T + 7.5, False)
    other = Brake()
    assert refused(other, wait_s=7.5, explained=True) == 7.5
    assert (other.share, other.yielded, other.factor, other.calm) == (1.0, 0.95, 0.95, False)


def test_a_burst_of_refusals_is_one():
    """Requests that departed before the cut tell nothing new, but how long to wait."""
    one = Brake()
    refused(one, T)
    share = one.share
    assert refused(one, T + 0.2, began=T - 1.0) == 0.0
    assert refused(one, T + 0.3, began=T - 1.0, wait_s=9.0) == 9.0
    assert (one.share, one.paused_until) == (share, T + 9.3)
    refused(one, T + 12.0)
    assert one.share == pytest.approx(share * 0.8)


def test_the_longer_of_two_pauses_holds():
    """A later and shorter one does not shorten it."""
    one = Brake()
    refused(one, T, 20.0)
    refused(one, T + 1, 2.0)
    assert one.paused_until == T + 20.0


def test_untold_pauses_grow_with_jitter_up_to_a_cap():
    """Between a base and three times the former one; drawn anew each time."""
    for seed in range(200):
        one, rng, now, before = Brake(), random.Random(seed), T, 0.0
        for _ in range(30):
            pause = refused(one, now, chance=rng.random())
            assert brake.BASE_S <= pause <= min(brake.CAP_S, 3 * max(before, brake.BASE_S)), f"seed {seed}"
            now, before = now + pause + 1.0, pause
    one = Brake()
    for i in range(20):
        refused(one, T + 100 * i, chance=0.99)
    assert refused(one, T + 5000, chance=0.99) == brake.CAP_S
    assert one.share == brake.LEAST


def test_answers_shorten_the_next_untold_pause():
    """Only those to requests that departed after the refusal."""
    one = Brake()
    for i in range(5):
        refused(one, T + 100 * i, chance=0.99)
    one.served(T + 1)
    assert refused(one, T + 500, chance=0.0) == brake.BASE_S
    assert not one.calm
    one.served(T + 501)
    one.recover(T + 5000)
    assert one.calm


def test_a_cut_comes_back_by_the_minute_and_not_while_paused():
    """A tenth of the whole each, up to the whole."""
    one = Brake()
    refused(one, T, 60.0)
    one.recover(T + 30.0)
    assert one.share == 0.8
    one.recover(T + 120.0)
    assert one.share == pytest.approx(0.9)
    one.recover(T + 119.0)
    assert one.share == pytest.approx(0.9)
    one.recover(T + 1200.0)
    assert one.share == 1.0
    for i in range(200):
        refused(one, T + 2000.0 + i, 0.1, explained=i % 2 == 0)
    assert one.factor == one.share == one.yielded == brake.LEAST
    one.recover(T + 9999.0)
    assert one.factor == 1.0


def test_a_spent_day_is_asked_again_now_and_then():
    """At a trickle, with longer and longer pauses, until an answer shows that there is something again."""
    one = Brake()
    assert one.exhausted(T - 1, T, 40_000.0) == 300.0
    assert (one.factor, one.calm) == (brake.TRICKLE, False)
    assert one.exhausted(T - 1, T + 1, 40_000.0) == 0.0
    one.served(T - 1)
    assert one.probation
    assert one.exhausted(T + 301, T + 302, None) == 600.0
    one.served(T + 903)
    assert (one.factor, one.calm) == (1.0, True)
    assert one.exhausted(T + 904, T + 905, 5.0) == 5.0


def test_the_pauses_of_a_spent_window_have_a_longest():
    """An hour, however often it was asked."""
    one, now = Brake(), T
    for _ in range(30):
        pause = one.exhausted(now, now, None)
        assert pause <= brake.RECHECK_MAX_S
        now += pause + 1.0
    assert pause == brake.RECHECK_MAX_S
