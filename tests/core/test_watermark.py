"""Which requests an engine's cache may take: what it says of itself, what was let go from here, and neither."""

from __future__ import annotations

import random
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.policy import KvRules
from extproc.core.shares import LAPSE_S, SEEN_S, Standing, Terms
from extproc.core.watermark import FEW, LAG_S, Reading, Watermark, recheck_s

BEST, MIDDLE, BATCH = Terms("P0", 0), Terms("P1", 1), Terms("P2", 2, share=0.1)
RULES = KvRules(high=0.8, low=0.6, tokens=1000, waiting=4, stale_s=5.0, trickle_rps=2.0)
UNKNOWN = KvRules(high=0.8, low=0.6, waiting=4, stale_s=5.0, trickle_rps=2.0)


def gate(usage: float = 0.0, *, running: float = 1.0, rules: KvRules = RULES, **told: float) -> Watermark:
    """A gate whose metrics were read at time 0; somebody else's request runs there."""
    found = Watermark(rules)
    found.observe(Reading(usage, running=running, **told), 0.0)  # type: ignore[arg-type]
    return found


def goes(kv: Watermark, amount: float, now: float = 0.0, terms: Terms = BEST) -> bool:
    return kv.wait_for(amount, now, terms) == 0


def test_a_request_goes_as_long_as_it_fits_below_the_mark() -> None:
    """Measured usage and the request itself together; what fits exactly goes."""
    kv = gate(0.5)
    assert (goes(kv, 300), goes(kv, 301)) == (True, False)
    assert kv.free_at(0.0) == pytest.approx(300)
    assert kv.fill(0.0) == 0.5
    assert kv.saturation(0.0) == 0.5 / 0.8


def test_what_was_admitted_since_the_metrics_were_asked_for_is_added() -> None:
    """A burst between two readings does not pass on one reading. What ends meanwhile may still be in it."""
    kv = gate(0.5)
    kv.take(200, 1.0, BEST)
    assert (goes(kv, 100, 1.0), goes(kv, 101, 1.0)) == (True, False)
    kv.change(200, 1.5)
    assert (goes(kv, 100, 1.5), goes(kv, 101, 1.5)) == (True, False)
    kv.observe(Reading(0.5, running=1.0), 2.0)
    assert goes(kv, 300, 2.0)


def test_a_reading_that_comes_late_does_not_show_what_went_after_it_was_asked_for() -> None:
    """Nor what went so shortly before that it cannot have arrived."""
    kv = gate(0.1)
    kv.take(200, 1.0, BEST)
    kv.take(100, 1.9, BEST)
    kv.take(50, 1.9 - LAG_S / 2, BEST)
    kv.observe(Reading(0.3, running=1.0, age_s=0.1), 2.0)
    assert kv.since == 150
    assert kv.fill(2.0) == pytest.approx(0.45)
    kv.observe(Reading(0.45, running=1.0), 2.0 + LAG_S)
    assert kv.since == 0


def test_a_reading_older_than_the_last_is_passed_over() -> None:
    """So is that there was none: the last one holds until it is stale."""
    kv = gate(0.1)
    kv.observe(Reading(0.9, running=1.0), 1.0)
    kv.observe(Reading(0.2, age_s=1.5), 2.0)
    kv.observe(None, 2.5)
    assert kv.fill(2.5) == 0.9
    assert not goes(kv, 1, 2.5)


def test_what_is_booked_counts_where_the_engine_has_not_got_to_it_yet() -> None:
    """Prompt and expected output are held until the end, though the cache fills as tokens come."""
    kv = gate(0.1)
    kv.take(500, 0.0, BEST)
    kv.observe(Reading(0.1, running=2.0), 1.0)
    assert kv.fill(1.0) == 0.5
    assert (goes(kv, 300, 1.0), goes(kv, 301, 1.0)) == (True, False)
    kv.change(500, 1.0)
    assert kv.fill(1.0) == 0.1


def test_the_way_shuts_at_the_high_mark_and_opens_at_the_low_one() -> None:
    """In between it stays as it was, so that it does not flutter."""
    kv, states = gate(0.5), []
    for n, usage in enumerate([0.7, 0.8, 0.79, 0.7, 0.61, 0.6, 0.7, 0.79], 1):
        kv.observe(Reading(usage, running=1.0), n / 10)
        states.append(goes(kv, 1, n / 10))
        assert (kv.free_at(n / 10) > 0) == states[-1]
    assert states == [True, False, False, False, False, True, True, True]


def test_lanes_have_marks_of_their_own() -> None:
    """A lower lane stops earlier; a lane without marks has the common ones."""
    kv = gate(0.5, rules=KvRules(high=0.8, low=0.7, lanes={"P2": (0.55, 0.5), "P0": (0.9, 0.85)}, tokens=1000))
    assert [goes(kv, 50, terms=terms) for terms in (BEST, MIDDLE, Terms("P2", 2))] == [True, True, True]
    assert [goes(kv, 51, terms=terms) for terms in (BEST, MIDDLE, Terms("P2", 2))] == [True, True, False]
    assert [goes(kv, 301, terms=terms) for terms in (BEST, MIDDLE)] == [True, False]
    kv.take(50, 0.0, BEST)
    assert kv.shut == {(0.55, 0.5)}
    assert [kv.free_at(0.0, terms) for terms in (BEST, MIDDLE, Terms("P2", 2))] == pytest.approx([350, 250, 0])


def test_a_queue_in_the_engine_shuts_like_a_full_cache() -> None:
    """From `waiting` requests on; below it follows the same hysteresis."""
    kv = gate(0.1, waiting=4)
    assert not goes(kv, 1)
    assert kv.saturation(0.0) == 1
    kv.observe(Reading(0.1, waiting=3.5, running=1.0), 0.1)
    assert not goes(kv, 1, 0.1)
    kv.observe(Reading(0.1, waiting=2.9, running=1.0), 0.2)
    assert goes(kv, 1, 0.2)


def test_of_several_instances_the_fullest_counts_and_none_gets_more_than_its_part_and_one_request() -> None:
    """What went since is spread, though not evenly: the mean, and the largest on top of it, but never more than all."""
    kv = gate(0.3, instances=4)
    kv.take(100, 0.0, BEST)
    assert kv.fill(0.0) == pytest.approx(0.4)
    for _ in range(3):
        kv.take(100, 0.0, BEST)
    assert kv.fill(0.0) == pytest.approx(0.5)
    assert kv.largest == 100
    for _ in range(8):
        kv.take(100, 0.0, BEST)
    assert kv.fill(0.0) == pytest.approx(0.7)
    assert (goes(kv, 160), goes(kv, 161)) == (True, False)
    kv.observe(Reading(0.1, running=1.0, instances=4), 1.0)
    assert kv.fill(1.0) == pytest.approx(1200 / 4000)
    assert kv.free_at(1.0) == pytest.approx(2000)


def test_of_what_went_since_a_reading_the_largest_counts() -> None:
    """A small one after it changes nothing; with the next reading both are forgotten."""
    kv = gate(0.1, instances=2)
    for at, amount in ((0.0, 50), (0.5, 300), (0.9, 100)):
        kv.take(amount, at, BEST)
    kv.observe(Reading(0.1, running=1.0, instances=2, age_s=0.7), 1.0)
    assert (kv.since, kv.largest) == (400, 300)
    kv.observe(Reading(0.1, running=1.0, instances=2, age_s=0.0), 2.0)
    assert (kv.since, kv.largest) == (0, 0)


def test_the_engine_may_tell_how_large_its_cache_is() -> None:
    """What the rules say goes before it."""
    assert (gate(0.1, rules=UNKNOWN, tokens=500.0).cache, gate(0.1, tokens=500.0).cache) == (500, 1000)
    assert (Watermark(UNKNOWN).cache, Watermark(RULES).cache, Watermark(RULES, cache=7.0).cache) == (0, 1000, 7)


def test_without_the_size_of_the_cache_a_few_go_per_reading() -> None:
    """Marks hold all the same. With each reading a few more, for each instance."""
    kv = gate(0.5, rules=UNKNOWN)
    for _ in range(FEW):
        assert goes(kv, 10_000)
        assert kv.free_at(0.0, BEST) == inf
        kv.take(10_000, 0.0, BEST)
    assert not goes(kv, 1)
    assert kv.free_at(0.0, BEST) == 0
    assert kv.fill(0.0) == 0.5
    kv.observe(Reading(0.7, running=1.0, instances=2), 1.0)
    for _ in range(2 * FEW):
        assert goes(kv, 1, 1.0)
        kv.take(1, 1.0, BEST)
    assert not goes(kv, 1, 1.0)
    kv.observe(Reading(0.8, running=1.0), 2.0)
    assert not goes(kv, 1, 2.0)


def test_of_a_few_per_reading_one_is_left_to_who_is_due() -> None:
    """And in a pause there are as many as without it."""
    kv = gate(0.5, rules=UNKNOWN)
    kv.lanes["P2"] = Standing(0.1, 50, kept=0.0, owed=50)
    kv.recent = [(0.0, 1.0)] * (FEW - 1)
    assert (goes(kv, 1), goes(kv, 50, terms=BATCH)) == (False, True)
    kv.closed_until = 10.0
    assert (kv.free_at(0.0, BEST), kv.free_at(0.0, BATCH)) == (0, inf)


def test_a_pool_that_runs_nothing_takes_one_request_whatever_its_size() -> None:
    """Whatever the metrics claim; the next one has to fit beside it."""
    kv = gate(0.9, running=0.0, waiting=9)
    assert goes(kv, 5000)
    kv.take(5000, 0.0, BEST)
    assert not goes(kv, 1)
    kv.change(5000, 1.0)
    assert goes(kv, 5000, 1.0, BATCH)


def test_a_request_above_the_mark_goes_when_there_is_next_to_nothing_else() -> None:
    """On a pool that others use, too, it need not wait for an emptiness that never comes."""
    kv = gate(0.2)
    assert (goes(kv, 600), goes(kv, 700)) == (True, True)
    assert not goes(gate(0.21), 700)


def test_preemptions_shut_all_lanes_but_the_best_until_the_next_reading() -> None:
    """The engine had to throw work away: its mark was too high for what runs there now."""
    kv = gate(0.1, preemptions=1)
    kv.lanes["P2"] = Standing(0.1, 50, kept=0.0, owed=50)
    assert [goes(kv, 50, terms=terms) for terms in (BEST, MIDDLE, BATCH)] == [True, False, False]
    assert kv.free_at(0.0, BEST) == pytest.approx(700)
    kv.observe(Reading(0.1, running=1.0), 1.0)
    assert [goes(kv, 50, 1.0, terms) for terms in (BEST, MIDDLE, BATCH)] == [True, True, True]


def test_who_is_refused_asks_again_when_the_reading_is_stale_at_the_latest() -> None:
    """And soon enough to see that others, for whom something was left, have gone."""
    kv = gate(0.9)
    assert (kv.wait_for(1, 0.0), kv.wait_for(1, 4.0)) == (LAPSE_S, 1.0)


def test_without_a_reading_a_trickle_goes() -> None:
    """So many per second, never a burst of what was saved up, never none."""
    kv, times, now = Watermark(UNKNOWN), [], 0.0
    for _ in range(FEW):
        now += kv.wait_for(1000, now, BEST)
        times.append(now)
        kv.take(1000, now, BEST)
    assert times == [0.0, 0.5, 1.0, 1.5]
    assert kv.wait_for(1000, 100.0) == inf
    kv.change(1000, 100.0)
    assert kv.wait_for(1000, 100.0) == 0
    assert (kv.saturation(0.0), kv.fill(0.0)) == (None, 0.0)
    assert Watermark(KvRules(trickle_rps=0)).wait_for(1, 0.0) == 0


def test_no_more_run_without_a_reading_than_ran_when_there_was_one() -> None:
    """A long silence of the metrics does not fill the engine slowly; nor does it empty it."""
    kv = gate(0.1, rules=UNKNOWN)
    for _ in range(9):
        kv.take(100, 0.0, BEST)
    kv.observe(Reading(0.5, running=9.0), 1.0)
    assert kv.wait_for(1, 6.0) == inf
    kv.change(100, 6.0)
    assert kv.wait_for(1, 6.0) == 0
    many = gate(0.1, rules=UNKNOWN, instances=3)
    for n in range(3 * FEW):
        assert many.wait_for(1, 100.0 + n) == 0
        many.take(1, 100.0 + n, BEST)
    assert many.wait_for(1, 200.0) == inf


def test_without_a_reading_what_is_booked_still_counts() -> None:
    """Where the size of the cache is known, it is never filled above the best lane's mark from here."""
    kv = gate(0.1)
    kv.take(700, 0.0, BEST)
    assert (kv.wait_for(100, 5.0), kv.wait_for(101, 5.0)) == (0, inf)
    assert kv.free_at(5.0) == pytest.approx(100)
    assert Watermark(RULES).wait_for(5000, 0.0) == 0


def test_without_a_reading_the_one_that_may_go_is_left_to_who_is_due() -> None:
    """Turns count also in a trickle."""
    kv = Watermark(UNKNOWN, lanes={"P2": Standing(0.1, 50, kept=0.0, owed=50)})
    assert (kv.wait_for(50, 0.0, BEST), kv.wait_for(50, 0.0, BATCH)) == (0.5, 0)


def test_what_went_long_before_a_reading_could_tell_is_forgotten() -> None:
    """A trickle of hours does not grow the memory."""
    kv = Watermark(UNKNOWN)
    for n in range(100):
        kv.take(1, float(n), BEST)
    assert len(kv.recent) == UNKNOWN.stale_s
    assert kv.since == kv.largest * UNKNOWN.stale_s == UNKNOWN.stale_s


def test_a_due_lane_is_left_what_its_first_waiter_needs() -> None:
    """By all others, and neither its own lower marks nor what it keeps free hold it."""
    rules = KvRules(high=0.8, low=0.6, lanes={"P2": (0.3, 0.2)}, tokens=1000)
    kv = gate(0.4, rules=rules)
    kv.lanes["P2"] = Standing(0.1, 100, kept=0.0, owed=100)
    assert (goes(kv, 300), goes(kv, 301)) == (True, False)
    assert (kv.free_at(0.0, BEST), kv.due_in(100, 0.0, BATCH)) == (pytest.approx(300), 0)
    assert (goes(kv, 100, terms=BATCH), goes(kv, 101, terms=BATCH)) == (True, False)
    assert kv.due_in(101, 0.0, BATCH) == inf
    kv.lanes.clear()
    shy = Terms("P1", 1, share=0.1, keep_free=0.5)
    kv.seen[0] = 0.0
    assert not goes(kv, 300, terms=shy)
    kv.lanes["P1"] = Standing(0.1, 300, kept=0.0, owed=300)
    assert goes(kv, 300, terms=shy)


def test_a_due_lane_comes_before_others_on_a_pool_that_takes_one_at_a_time() -> None:
    """Else whoever is asked first would have every moment in which the pool is empty."""
    kv = gate(0.0, running=0.0)
    kv.lanes["P2"] = Standing(0.1, 900, kept=0.0, owed=900)
    assert (goes(kv, 900), goes(kv, 900, terms=BATCH)) == (False, True)


def test_turns_are_counted_in_tokens() -> None:
    """Who waits is owed its share of every admission, in tokens; only who has a share is owed anything."""
    kv = gate(0.1)
    kv.refused(50, 0.0, BEST, short=True)
    kv.refused(50, 0.0, BATCH, short=True)
    kv.take(200, 0.0, BEST)
    assert kv.owed(0.0) == {"P2": 20}


def test_a_share_of_the_cache_is_kept_free_for_better_lanes_that_were_seen() -> None:
    """As long as one was seen lately. Marks of a lane's own say that already. A large request still can go."""
    kv, shy = gate(0.3), Terms("P2", 2, keep_free=0.5)
    assert goes(kv, 500, terms=shy)
    kv.take(100, 0.0, BEST)
    assert (goes(kv, 100, terms=shy), goes(kv, 101, terms=shy)) == (True, False)
    assert kv.free_at(0.0, shy) == pytest.approx(100)
    kv.observe(Reading(0.2, running=1.0), 1.0)
    assert goes(kv, 900, 1.0, shy)
    kv.observe(Reading(0.4, running=1.0), SEEN_S)
    assert goes(kv, 400, SEEN_S, shy)
    own = gate(0.3, rules=KvRules(high=0.8, low=0.6, lanes={"P2": (0.7, 0.6)}, tokens=1000))
    own.seen[0] = 0.0
    assert goes(own, 400, terms=shy)
    few = gate(0.3, rules=UNKNOWN)
    few.take(1, 0.0, BEST)
    few.take(1, 0.0, BEST)
    assert goes(few, 1, terms=shy)
    few.take(1, 0.0, BEST)
    assert (goes(few, 1, terms=shy), goes(few, 1)) == (False, True)


def test_nothing_goes_in_a_pause() -> None:
    """An empty pool does not help, nor a due lane."""
    kv = gate(0.0, running=0.0)
    kv.closed_until = 3.0
    assert (kv.wait_for(1, 0.0), kv.wait_for(1, 2.5)) == (3.0, 0.5)
    kv.observe(Reading(0.9, running=1.0), 0.0)
    assert (kv.wait_for(1, 0.0), kv.wait_for(1, 2.5)) == (3.0, LAPSE_S)


def test_a_gate_that_only_counts_says_what_it_would_say() -> None:
    """The rules or the maker of the gate decide that."""
    assert Watermark(KvRules(shadow=True)).shadow
    assert Watermark(KvRules(), shadow=True).shadow
    assert not Watermark(KvRules()).shadow


def test_what_nobody_holds_cannot_be_released() -> None:
    """A release too many, or too large, leaves nothing below zero; a claim of nothing holds nothing."""
    kv = gate()
    kv.change(50, 0.0)
    kv.take(0.0, 0.0)
    assert (kv.booked, kv.held) == (0, 0)
    kv.change(-10.1, 0.0)
    kv.take(20.2, 0.0, BEST)
    kv.change(10.2, 0.0)
    assert kv.held == 1
    kv.change(20.2, 0.0)
    assert (kv.booked, kv.held) == (0, 0)
    assert kv.closes(1, 0.0, BEST)


@given(st.integers(0, 10**6))
def test_what_is_held_returns_to_nothing_and_never_passes_the_mark_in_between(seed: int) -> None:
    """Random takes, releases, readings and silences; nothing but one request on an empty pool may be above the mark."""
    rng = random.Random(seed)
    rules = KvRules(tokens=rng.choice([None, 1000]), trickle_rps=5.0, stale_s=2.0)
    kv, now, held = Watermark(rules), 0.0, []
    for _ in range(200):
        now += rng.expovariate(3.0)
        amount, terms = float(rng.randint(1, 400)), rng.choice([BEST, MIDDLE, BATCH])
        match rng.choice(["ask", "ask", "ask", "end", "read"]):
            case "ask" if kv.wait_for(amount, now, terms) == 0:
                kv.take(amount, now, terms)
                held.append(amount)
                assert len(held) == 1 or not kv.cache or sum(held) <= rules.high * kv.cache + 1e-6
            case "ask":
                assert kv.wait_for(amount, now, terms) > 0
                kv.refused(amount, now, terms, short=True)
            case "end" if held:
                kv.change(held.pop(rng.randrange(len(held))), now)
            case "read":
                usage = min(1.0, sum(held) * rng.uniform(0.3, 1.0) / 1000)
                kv.observe(Reading(usage, running=float(len(held)), age_s=rng.uniform(0.0, 0.3)), now)
        assert (kv.booked, kv.held) == (pytest.approx(sum(held)), len(held))
    for amount in held:
        kv.change(amount, now)
    assert (kv.booked, kv.held) == (0, 0)


def test_looks_at_an_engine_come_at_random_and_ever_more_seldom() -> None:
    """U(0, min(500 ms, 50 ms x 1.5^n)): whoever waits does not look at the same moment as everybody else."""
    longest = [recheck_s(n, 1.0) for n in range(9)]
    assert longest[:3] == pytest.approx([0.05, 0.075, 0.1125])
    assert all(before <= after for before, after in pairwise(longest))
    assert longest[-1] == recheck_s(10**6, 1.0) == 0.5
    assert recheck_s(3, 0.0) == 0
    assert recheck_s(3, 0.5) == pytest.approx(longest[3] / 2)
