"""An upstream that becomes slower for good: who may still be asked, what is usual by then, and how often it is told."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from random import Random

import pytest

from extproc.core.baseline import BLOCK_S, DIP, DIP_S, ENOUGH, RELEARN_S, Baseline, Tempo, Trial
from extproc.core.breaker import Breaker, Evidence, Outcome, Sign, Signal, State
from extproc.core.policy import BreakerRules, SlowRules

HOUR_S = 3600.0
USUAL_S = 2.0
SUCCESS, FAILURE, PACED = Outcome.SUCCESS, Outcome.FAILURE, Outcome.PACED


class Days:
    """One upstream in virtual time, whose canaries are always answered, and what came of it. Times in seconds.

    openings: when it opened. learned: when the usual median was within a tenth of `slower` times the old one first.
    """

    def __init__(self, seed: int = 1, rps: float = 0.5, differ: float = 0.3) -> None:
        self.breaker, self.now = Breaker(), 0.0
        self.openings: list[float] = []
        self.learned = inf
        self._chance, self._rps, self._differ = Random(seed), rps, differ
        self._ends: list[tuple[float, float]] = []
        self._before = 0
        self._look = self._next = 0.0
        self.play(HOUR_S, lambda _: 1.0)

    @property
    def median_s(self) -> float:
        """The usual one."""
        assert self.breaker.tempo is not None
        return self.breaker.tempo.baseline("", 100).median_s

    def play(self, lasts_s: float, slower: Callable[[float], float]) -> None:
        """So many seconds, in each of which first tokens take `slower` times as long, by the seconds since it began."""
        began = self.now
        while self.now < began + lasts_s:
            self.now = min(self._look, self._next, self._ends[0][0] if self._ends else inf)
            factor = slower(self.now - began)
            if self._ends and self._ends[0][0] == self.now:
                self._end()
                if self.learned == inf and abs(self.median_s / (USUAL_S * factor) - 1.0) < 0.1:
                    self.learned = self.now - began
            elif self._look == self.now:
                self._look += 1.0
                self._watch()
            else:
                self._next += self._chance.expovariate(self._rps)
                if self.breaker.allows(self._returned(), self.now):
                    seconds = USUAL_S * factor * self._chance.lognormvariate(0.0, self._differ)
                    heappush(self._ends, (self.now + seconds, self.now))

    def _end(self) -> None:
        end, began = heappop(self._ends)
        self._before -= self._before > 0 and began < self.breaker.since
        evidence = Evidence(prompt=100, first_token_s=end - began)
        if self.breaker.record(SUCCESS, began=began, now=end, chance=self._chance.random(), evidence=evidence):
            assert self.breaker.verdict.sign is Sign.SLOW
            self.openings.append(end)

    def _watch(self) -> None:
        signal = None
        if self.breaker.due(self.now):
            signal = Signal.RESTED
        elif self.breaker.state is State.HALF_OPEN:
            signal, self._before = Signal.PROBE_OK, len(self._ends)
        elif self.breaker.ramped(self._returned(), self.now):
            signal = Signal.RAMPED
        if signal is not None:
            self.breaker.move(signal, now=self.now, chance=self._chance.random())

    def _returned(self) -> int:
        return len(self._ends) - min(self._before, len(self._ends))


@pytest.mark.parametrize("slower", [1.8, 2.5, 4.0])
def test_what_is_slower_for_good_is_usual_after_some_hours_and_seldom_told_until_then(slower: float) -> None:
    """It opens now and again, ever more rarely; and is trusted as before when it has agreed with itself long enough."""
    days = Days()
    days.learned = inf
    days.play(6 * HOUR_S, lambda _: slower)
    assert 4 * BLOCK_S <= days.learned <= 5 * HOUR_S
    assert 5 <= len(days.openings) <= 40
    assert days.breaker.state is State.CLOSED
    before = len(days.openings)
    days.play(6 * HOUR_S, lambda _: slower)
    assert len(days.openings) == before


def test_a_decay_never_becomes_usual_however_long_it_takes() -> None:
    """A fifth slower each hour for half a day, up to nine times as slow: what is usual has risen by a tenth an hour at
    the most, before it opened, and not since.
    """
    days = Days()
    days.play(12 * HOUR_S, lambda at: 1.2 ** (at / HOUR_S))
    assert days.openings
    assert days.median_s <= USUAL_S * 1.1 ** (days.openings[0] / HOUR_S) * 1.1
    assert days.breaker.state is not State.CLOSED


def test_an_upstream_that_is_well_again_is_used_again_after_a_quarter_of_the_time_at_most() -> None:
    """And what was usual is usual still."""
    days = Days()
    days.play(1200.0, lambda _: 5.0)
    days.play(300.0 + 30.0, lambda _: 1.0)
    assert days.breaker.state is State.CLOSED
    assert days.median_s == pytest.approx(USUAL_S, rel=0.1)


def slow(breaker: Breaker, now: float) -> float:
    """Open one by late answers from `now` on, and the time then."""
    evidence = Evidence(prompt=100, first_token_s=20.0)
    while not breaker.record(SUCCESS, began=now, now=now, chance=0.0, evidence=evidence):
        now += 1.0
    return now


def back(breaker: Breaker, *, closed: bool) -> float:
    """Let one that rests take traffic back, and the time then."""
    now = breaker.rests_until
    for signal in (Signal.RESTED, Signal.PROBE_OK, *([Signal.RAMPED] if closed else [])):
        breaker.move(signal, now=now, chance=0.0)
    return now


def used() -> tuple[Breaker, float]:
    """A breaker that knows what is usual, and the time then."""
    breaker = Breaker()
    for n in range(300):
        good(breaker, float(n))
    return breaker, 300.0


def good(breaker: Breaker, now: float) -> None:
    """One answer as usual."""
    evidence = Evidence(prompt=100, first_token_s=USUAL_S)
    assert not breaker.record(SUCCESS, began=now, now=now, chance=0.0, evidence=evidence)


def test_rests_grow_though_it_closes_in_between_and_has_answered_well() -> None:
    """Twice as long up to the cap, then a quarter of the time since it was slow first, up to ten minutes."""
    breaker, now = used()
    now = first = slow(breaker, now)
    rests = [breaker.rests_until - now]
    while now < first + 1.5 * HOUR_S:
        now = back(breaker, closed=True)
        good(breaker, now)
        now = slow(breaker, now)
        rests.append(breaker.rests_until - now)
        assert rests[-1] == pytest.approx(min(600.0, max(5 * 2 ** min(2, len(rests) - 1), (now - first) / 4)))
    assert rests[:3] == [5.0, 10.0, 20.0]
    assert rests[-1] == 600.0
    assert len(rests) < 30


@pytest.mark.parametrize(("well_s", "rest_s"), [(599.0, 600.0), (601.0, 5.0)])
@pytest.mark.parametrize("asked", [True, False])
def test_it_is_slow_anew_when_it_was_closed_for_ten_minutes(
    well_s: float,
    rest_s: float,
    asked: bool,  # noqa: FBT001
) -> None:
    """Whether or not anybody asked it then."""
    breaker, now = used()
    now = first = slow(breaker, now)
    while now < first + HOUR_S:
        back(breaker, closed=False)
        now = slow(breaker, breaker.since)
    now = back(breaker, closed=True) + well_s
    if asked:
        good(breaker, now)
    for n in range(25):
        late = Evidence(prompt=100, first_token_s=20.0 + n)
        if breaker.record(SUCCESS, began=now, now=now, chance=0.0, evidence=late):
            break
    assert breaker.state is State.OPEN
    assert breaker.rests_until - now == pytest.approx(rest_s if asked else max(rest_s, 20.0))


def test_a_reset_forgets_since_when_it_was_slow() -> None:
    """An operator knows better."""
    breaker, now = used()
    slow(breaker, now)
    breaker.move(Signal.RESET, now=now + 50, chance=0.0)
    assert (breaker.slow_since, breaker.merely_slow) == (inf, False)


def test_merely_slow_is_who_opened_for_that_until_more_is_known() -> None:
    """Through rest, canary and return, until that is over or the canary fails; no other sign makes it so."""
    breaker, now = used()
    assert not breaker.merely_slow
    slow(breaker, now)
    assert breaker.merely_slow
    for signal, merely in ((Signal.RESTED, True), (Signal.PROBE_OK, True), (Signal.RAMPED, False)):
        breaker.move(signal, now=1000.0, chance=0.0)
        assert breaker.merely_slow is merely
    slow(breaker, 1000.0)
    breaker.move(Signal.RESTED, now=1100.0, chance=0.0)
    breaker.move(Signal.PROBE_FAILED, now=1100.0, chance=0.0)
    assert not breaker.merely_slow
    breaker.move(Signal.RESET, now=1200.0, chance=0.0)
    for _ in range(3):
        breaker.record(FAILURE, began=1200.0, now=1200.0, chance=0.0)
    assert (breaker.state, breaker.merely_slow) == (State.OPEN, False)


@pytest.mark.parametrize(
    ("outcomes", "merely"),
    [
        ([FAILURE] * 2, True),
        ([FAILURE] * 3, False),
        ([FAILURE, FAILURE, SUCCESS, FAILURE, FAILURE], True),
        ([PACED] * 5, False),
        ([Outcome.CREDENTIAL], False),
        ([Outcome.TERMINAL], False),
        ([Outcome.IGNORED] * 9, True),
    ],
)
def test_who_is_asked_though_slow_and_fails_is_not_merely_slow(
    outcomes: list[Outcome],
    merely: bool,  # noqa: FBT001
) -> None:
    """Its state does not move by that; but a canary tries it soon, for its long rest was for being slow."""
    breaker, now = used()
    now = first = slow(breaker, now)
    while now < first + HOUR_S:
        back(breaker, closed=False)
        now = slow(breaker, breaker.since)
    assert breaker.rests_until - now == 600.0
    assert breaker.rest_s(now) == 20.0
    for outcome in outcomes:
        assert not breaker.record(outcome, began=now, now=now + 1, chance=0.0)
        assert not breaker.record(outcome, began=now - 1, now=now + 1, chance=0.0), "it began before"
    assert (breaker.state, breaker.merely_slow) == (State.OPEN, merely)
    assert breaker.rests_until - now == (600.0 if merely else 21.0)


def test_large_prompts_answered_badly_do_not_make_it_more_than_slow() -> None:
    """They keep away their size class alone."""
    breaker, now = used()
    now = slow(breaker, now)
    evidence = Evidence(prompt=20_000, malformed=True)
    assert not any(breaker.record(FAILURE, began=now, now=now, chance=0.0, evidence=evidence) for _ in range(9))
    assert breaker.merely_slow


def lasting(usual: Baseline, now: float, lasts_s: float, factor: Callable[[float], float], every: float) -> list[float]:
    """Answers that take `factor` times what was usual, for so long; when something else was usual by that."""
    found = []
    for n in range(int(lasts_s / every)):
        at = n * every
        if usual.median_s < inf and usual.hear(USUAL_S * factor(at), now + at):
            found.append(at)
        else:
            usual.learn(USUAL_S * factor(at), now + at)
    return found


def known() -> Baseline:
    """One that has seen three hundred answers, until 0."""
    usual = Baseline()
    for n in range(300):
        usual.learn(USUAL_S, n - 300.0)
    return usual


def test_what_agrees_with_itself_for_two_hours_is_usual() -> None:
    """Its median and its 95th percentile; from then on that rises slowly."""
    usual = known()
    every = 10.0
    found = lasting(usual, 0.0, 2.5 * HOUR_S, lambda at: 4.0 if at % 100 else 8.0, every)
    assert found == [4 * BLOCK_S + every]
    assert usual.median_s == pytest.approx(4 * USUAL_S, rel=0.06)
    assert usual.p95_s == pytest.approx(8 * USUAL_S, rel=0.06)
    assert usual.recent < 0.5
    assert not lasting(usual, 3 * HOUR_S, HOUR_S, lambda _: 5.6, 1.0)
    assert usual.median_s <= 4 * USUAL_S * 1.1**2 * 1.06


@pytest.mark.parametrize(
    "factor",
    [
        lambda at: 2.0 * 1.125 ** (at / HOUR_S),
        lambda at: 2.0 * 1.5 ** (at / HOUR_S),
        lambda at: 4.0 if BLOCK_S <= at % (4 * BLOCK_S) < 3 * BLOCK_S else 2.5,
        lambda at: 3.0 if at % (4 * BLOCK_S) < 2 * BLOCK_S else 4.0,
    ],
)
def test_what_does_not_is_not(factor: Callable[[float], float]) -> None:
    """Decay; ups and downs whose halves are alike; and one level after the other."""
    assert not lasting(known(), 0.0, 6 * HOUR_S, factor, 10.0)


@pytest.mark.parametrize(("every", "usual_anew"), [(2.0, True), (36.0, False)])
def test_what_differs_much_needs_more_answers(every: float, usual_anew: bool) -> None:  # noqa: FBT001
    """That the means of a few agree would be chance."""
    found = lasting(known(), 0.0, 3 * HOUR_S, lambda at: 1.5 if at % (2 * every) else 15.0, every)
    assert bool(found) is usual_anew


def test_few_answers_take_longer() -> None:
    """Fifty in a block, however long that takes; and a whole day is enough where even that is too little."""
    assert lasting(known(), 0.0, 23 * HOUR_S, lambda _: 4.0, 240.0) == [(4 * ENOUGH + 1) * 240.0]
    usual = known()
    assert lasting(usual, 0.0, 30 * HOUR_S, lambda _: 4.0, HOUR_S)[0] >= RELEARN_S
    assert usual.median_s == inf


def test_a_dip_restarts_nothing_unless_it_lasts() -> None:
    """Some minutes, and some answers: chance brings a few good ones."""

    def dipping(lasts_s: float) -> Callable[[float], float]:
        return lambda at: 1.2 if HOUR_S <= at < HOUR_S + lasts_s else 2.0

    [short] = lasting(known(), 0.0, 3 * HOUR_S, dipping(DIP_S), 5.0)
    [long] = lasting(known(), 0.0, 3.5 * HOUR_S, dipping(DIP_S + 120.0), 5.0)
    assert short <= 4 * BLOCK_S + 60
    assert long >= HOUR_S + 4 * BLOCK_S


def test_a_dip_lasts_when_there_were_enough_answers_in_enough_time() -> None:
    """One of them that was not good begins it anew."""
    trial = Trial(0.0)
    assert not any(trial.over(240.0 * n, degraded=False) for n in range(DIP - 1))
    assert trial.over(240.0 * DIP, degraded=False)
    assert not trial.over(5000.0, degraded=True)
    assert not any(trial.over(5001.0 + n, degraded=False) for n in range(int(DIP_S)))
    assert trial.over(5001.0 + DIP_S, degraded=False)


def test_nothing_is_learned_while_it_is_degraded() -> None:
    """Not even from those before it has settled."""
    usual = known()
    seen = usual.seen
    lasting(usual, 0.0, HOUR_S, lambda _: 1.7, 10.0)
    assert usual.seen <= seen + 10


def test_each_model_becomes_usual_by_itself() -> None:
    """That one is as usual does not keep another from being learned, nor does its slowness freeze the first."""
    tempo, now = Tempo(SlowRules(times=50.0, median_times=None)), 0.0
    for n in range(300):
        for model in ("fast", "slow"):
            tempo.note(USUAL_S, model, 100, float(n))
    now, seen = 300.0, tempo.baseline("fast", 100).seen
    for n in range(900):
        tempo.note(USUAL_S, "fast", 100, now + 10.0 * n)
        tempo.note(3 * USUAL_S, "slow", 100, now + 10.0 * n)
    assert tempo.baseline("fast", 100).seen == seen + 900
    assert tempo.baseline("fast", 100).median_s == pytest.approx(USUAL_S, rel=0.06)
    assert tempo.baseline("slow", 100).median_s == pytest.approx(3 * USUAL_S, rel=0.06)


def test_what_is_heard_while_users_are_kept_away_teaches_what_is_usual_by_now() -> None:
    """Where nobody else of a chain may be asked it is asked all the same; what it answers moves nothing."""
    breaker, now = used()
    now = slow(breaker, now)
    assert breaker.tempo is not None
    told = Evidence(prompt=100, first_token_s=6.0), Evidence(prompt=100, first_token_s=1.0, gave_up=True)
    for n in range(800):
        for evidence in told:
            at = now + 10.0 * n
            assert not breaker.record(SUCCESS, began=at - 6.0, now=at, chance=0.0, evidence=evidence)
    assert breaker.tempo.baseline("", 100).median_s == pytest.approx(6.0, rel=0.06)
    assert breaker.state is State.OPEN
    back(breaker, closed=True)
    assert not any(breaker.record(SUCCESS, began=2e4, now=2e4 + n, chance=0.0, evidence=told[0]) for n in range(100))


def test_with_that_sign_off_nothing_is_heard() -> None:
    """Nor known of what is new there."""
    breaker = Breaker(BreakerRules(slow=None))
    breaker.move(Signal.TRIP, now=0.0, chance=0.0)
    evidence = Evidence(prompt=100, first_token_s=9.0)
    assert not breaker.record(SUCCESS, began=1.0, now=9.0, chance=0.0, evidence=evidence)
    fresh, _ = used()
    fresh.move(Signal.TRIP, now=400.0, chance=0.0)
    new = Evidence(first_token_s=9.0, model="n")
    assert not fresh.record(SUCCESS, began=401.0, now=409.0, chance=0.0, evidence=new)
    assert fresh.tempo is not None
    assert fresh.tempo.baseline("n", 0).seen == 0
