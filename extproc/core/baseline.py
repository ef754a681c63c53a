"""Shares of bad results, and how long a first token usually takes: what the signals of sickness are measured with.

Theory. Whether an upstream is slow can only be said against what is usual there, for that model and for prompts of that
size. What is usual is a histogram of what was seen in good times, of which the median and the 95th percentile (P95)
matter. Two things keep slow decay from teaching it that slow is normal. It is frozen while the upstream is degraded:
nothing is learned while the median of late is half again above the usual one. And once it has settled, what is usual
rises by at most a tenth in an hour, however much is learned; it sinks freely.

An upstream is slow when more than `share` of its last answers took longer than `times` the usual P95, which is to say
that their P95 did. That is known only when answers have begun, and by then as many again are on their way; so it is
slow, too, when half of the last took longer than `median_times` the usual median. In a gradual decay that comes first.
They must have taken longer than the usual P95, too: where times differ much, as those of models that think first, every
fourth is above twice the median on a good day, and half of some twenty would be before long.

A change for good has to become usual all the same, or a usable upstream would be kept away for ever. What tells it from
decay is that it agrees with itself. So while it is degraded its answers are laid aside in blocks of half an hour and
some fifty answers (`Trial`); when the later two of four are within a tenth of the earlier two, what chance makes of so
few included, and none is far from the others, they are what is usual from then on. A decay that passes for that is
slower than a tenth in an hour, which is what a baseline may rise by in good times. What counts for nothing otherwise,
because its upstream is kept away, is laid aside, too. Where that is too little, or never agrees, a whole day of it is
usual by then. All this is found of each baseline by itself; and it goes on through a few good answers, which chance
brings: a dip has to last, too.

Deliberately not here: what follows from it (breaker).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate
from math import ceil, exp, inf, log, sqrt

from extproc.core.policy import SlowRules

__all__ = ["SIZES", "Baseline", "Share", "Tempo", "Trial", "size_class"]

SIZES = (1_000, 4_000, 16_000, 64_000)
"""Prompt tokens at which a new size class begins."""
PARTS = 10
"""A window is forgotten in so many parts."""
LEAST_BAD = 3
"""Fewer slow answers are chance, whatever share they are."""
FIRST_S, LOG_GROWTH, BINS = 0.005, log(1.1), 104
"""Histograms: the end of the first bin in seconds, how much larger each next one is (its logarithm), and how many."""
KNOWN, SETTLED, KEPT = 20, 200, 4_000
"""Answers from which a baseline is used, from which it rises slowly, and from which old ones count half."""
RENEW = 16
"""The figures of a settled baseline are computed anew every so many answers."""
RISE_PER_S = log(1.1) / 3600
DEGRADED = log(1.5)
"""Logarithm of the median of late over the usual one from which nothing is learned."""
SMOOTH = 1 / 8
BLOCKS, BLOCK_S, ENOUGH = 4, 1800.0, 50
"""What becomes usual while degraded: so many blocks, each of at least so many seconds and answers."""
AGREES = log(1.1)
"""How far apart, in logarithms, the later half of them and the earlier may be; any two of them twice as far."""
DIP_S, DIP = 300.0, 20
"""It is degraded no longer after so many seconds, and answers, that were not."""
RELEARN_S = 86_400.0
"""What has been degraded for so long is usual by now."""
MOST_BASELINES = 256
"""Models have names from outside; beyond this many one size class shares a baseline."""


def size_class(prompt: int) -> int:
    """The class of a prompt of so many tokens, 0 for the smallest."""
    return bisect_right(SIZES, prompt)


class Share:
    """How many results of the last `window_s` seconds there were, and how many of them were bad."""

    __slots__ = ("_parts", "_width", "bad", "total")

    def __init__(self, window_s: float) -> None:
        """Nothing yet."""
        self._width = window_s / PARTS
        self._parts: deque[list[int]] = deque()
        self.total = self.bad = 0

    @property
    def share(self) -> float:
        """Share of bad ones, 0 where there is nothing."""
        return self.bad / self.total if self.total else 0.0

    def note(self, *, bad: bool, now: float) -> None:
        """Count one result. A clock that goes back counts for the latest part."""
        parts, number = self._parts, int(now // self._width)
        if not parts or number > parts[-1][0]:
            parts.append([number, 0, 0])
            while parts[0][0] <= number - PARTS:
                _, total, wrong = parts.popleft()
                self.total -= total
                self.bad -= wrong
        last = parts[-1]
        last[1] += 1
        last[2] += bad
        self.total += 1
        self.bad += bad

    def over(self, window_s: float) -> Share:
        """The same over another window; what was counted in this one is not known by that."""
        return self if self._width == window_s / PARTS else Share(window_s)

    def clear(self) -> None:
        """Forget all."""
        self._parts.clear()
        self.total = self.bad = 0


class Trial:
    """What may be usual before long: the answers since `since`, when it was degraded first, in blocks."""

    __slots__ = ("_blocks", "_well", "_well_since", "since")

    def __init__(self, now: float) -> None:
        """Nothing was laid aside."""
        self.since = self._well_since = now
        self._well = 0
        self._blocks = deque([_Block(now)], BLOCKS)

    def note(self, seconds: float, now: float) -> list[int] | None:
        """Lay one answer aside. The histogram of them, when they agree with each other."""
        block = self._blocks[-1]
        block.counts[_bin(seconds)] += 1
        block.answers += 1
        taken = log(max(seconds, FIRST_S))
        block.logs += taken
        block.squares += taken * taken
        if block.answers < ENOUGH or now - block.since < BLOCK_S:
            return None
        if self._agree():
            return [sum(counts) for counts in zip(*(block.counts for block in self._blocks), strict=True)]
        self._blocks.append(_Block(now))
        return None

    def over(self, now: float, *, degraded: bool) -> bool:
        """Whether it has been well for long enough."""
        if degraded:
            self._well = 0
            return False
        if not self._well:
            self._well_since = now
        self._well += 1
        return self._well >= DIP and now - self._well_since >= DIP_S

    def _agree(self) -> bool:
        means, half = [block.mean for block in self._blocks], BLOCKS // 2
        moved = abs(sum(means[:half]) - sum(means[half:])) / half
        doubt = sqrt(sum(block.doubt for block in self._blocks)) / half
        return len(means) == BLOCKS and moved + doubt <= AGREES and max(means) - min(means) <= 2 * AGREES


class _Block:
    """Some answers that came after `since`: how many, their histogram, the sums of their logarithms and squares."""

    __slots__ = ("answers", "counts", "logs", "since", "squares")

    def __init__(self, now: float) -> None:
        self.since = now
        self.answers, self.logs, self.squares = 0, 0.0, 0.0
        self.counts = [0] * BINS

    @property
    def mean(self) -> float:
        """Of the logarithms."""
        return self.logs / self.answers

    @property
    def doubt(self) -> float:
        """Variance of that mean, by chance."""
        return max(0.0, self.squares / self.answers - self.mean * self.mean) / self.answers


class Baseline:
    """What is usual for one model and size class: `median_s` and `p95_s`, infinite until that is known.

    recent: logarithm of the median of late over the usual one.
    """

    __slots__ = ("_at", "_counts", "_total", "_trial", "median_s", "p95_s", "recent", "seen")

    def __init__(self) -> None:
        """Nothing was seen."""
        self._counts = [0] * BINS
        self._total = self.seen = 0
        self._at = -inf
        self.median_s = self.p95_s = inf
        self.recent = 0.0
        self._trial: Trial | None = None

    def hear(self, seconds: float, now: float) -> bool:
        """How one answer compares with what is usual, which is known. True when something else is usual by now."""
        self.recent += SMOOTH * (log(max(seconds, FIRST_S) / self.median_s) - self.recent)
        degraded = self.recent > DEGRADED
        if self._trial is None:
            if not degraded:
                return False
            self._trial = Trial(now)
        if self._trial.over(now, degraded=degraded):
            self._trial = None
            return False
        return self._found(self._trial, self._trial.note(seconds, now), now)

    def learn(self, seconds: float, now: float) -> None:
        """Count one answer of good times."""
        if self.recent > DEGRADED:
            return
        self._counts[_bin(seconds)] += 1
        self._total += 1
        self.seen += 1
        if self.seen >= KNOWN and (self.seen < SETTLED or self.seen % RENEW == 0):
            self._renew(now)
        if self._total >= KEPT:
            self._counts = [count // 2 for count in self._counts]
            self._total = sum(self._counts)

    def _found(self, trial: Trial, counts: list[int] | None, now: float) -> bool:
        if counts is None and now - trial.since < RELEARN_S:
            return False
        self._begin(counts or [0] * BINS, now)
        return True

    def _begin(self, counts: list[int], now: float) -> None:
        """Only these answers were seen, and they are usual; where there are none, nothing is."""
        self._counts, self._total = counts, sum(counts)
        self._at, self.recent, self._trial = now, 0.0, None
        self.seen = max(SETTLED, self._total) if self._total else 0
        self.median_s = self._quantile(0.5) if self._total else inf
        self.p95_s = self._quantile(0.95) if self._total else inf

    def _renew(self, now: float) -> None:
        rise = exp(RISE_PER_S * max(0.0, now - self._at)) if self.seen >= SETTLED else inf
        self.median_s = min(self._quantile(0.5), self.median_s * rise)
        self.p95_s = min(self._quantile(0.95), self.p95_s * rise)
        self._at = now

    def _quantile(self, share: float) -> float:
        """Seconds in the middle of the bin that the quantile falls into."""
        least = share * self._total
        number = next(number for number, count in enumerate(accumulate(self._counts)) if count >= least)
        return FIRST_S * exp((number - 0.5) * LOG_GROWTH)


class Tempo:
    """Whether an upstream is slow. Times in seconds on the caller's clock.

    tail: of the last answers those that took longer than `times` the usual P95. late: how many of the last `volume`
    took longer than `median_times` the usual median, and than the usual P95.
    """

    __slots__ = ("_baselines", "_last", "_rules", "late", "tail")

    def __init__(self, rules: SlowRules) -> None:
        """Nothing is usual yet."""
        self._rules = rules
        self._baselines: dict[tuple[str, int], Baseline] = {}
        self._last: deque[tuple[float, bool]] = deque()
        self.tail = Share(rules.window_s)
        self.late = 0

    def baseline(self, model: str, prompt: int) -> Baseline:
        """What is usual for such a prompt."""
        key = (model, size_class(prompt))
        if key not in self._baselines and len(self._baselines) >= MOST_BASELINES:
            key = ("", key[1])
        found = self._baselines.get(key)
        if found is None:
            found = self._baselines[key] = Baseline()
        return found

    def note(self, seconds: float, model: str, prompt: int, now: float, *, at_least: bool = False) -> bool:
        """An answer began after `seconds`. True when that was late.

        at_least: it had not begun by then; what is not late by then says nothing.
        """
        rules, usual = self._rules, self.baseline(model, prompt)
        beyond = seconds > max(rules.least_s, rules.times * usual.p95_s)
        late = beyond or seconds > max(rules.least_s, usual.p95_s, (rules.median_times or inf) * usual.median_s)
        if at_least and not late:
            return False
        if usual.median_s == inf:
            usual.learn(seconds, now)
            return False
        if usual.hear(seconds, now):
            self.clear()  # it was late by what was usual then
            return False
        self.tail.note(bad=beyond, now=now)
        self._note_late(late, now)
        usual.learn(seconds, now)
        return late

    def overhear(self, seconds: float, model: str, prompt: int, now: float) -> None:
        """The same of an answer that counts for nothing, but for what is usual by now."""
        usual = self.baseline(model, prompt)
        if usual.median_s < inf and usual.hear(seconds, now):
            self.clear()

    def slow(self, *, ramping: bool) -> bool:
        """Whether it is. While traffic returns a quarter of the volume will do: it was slow just now."""
        rules, tail = self._rules, self.tail
        volume = ceil(rules.volume / 4) if ramping else rules.volume
        beyond = tail.total >= volume and tail.bad >= LEAST_BAD and tail.bad > rules.share * tail.total
        return beyond or (len(self._last) >= volume and 2 * self.late > len(self._last))

    def mostly_late(self, now: float) -> bool:
        """Whether more than half of the last are late, however few they are."""
        self._drop(now)
        return 2 * self.late > len(self._last)

    def follow(self, rules: SlowRules) -> None:
        """Go by other rules from now on; what is usual stays."""
        self._rules = rules
        self.tail = self.tail.over(rules.window_s)

    def clear(self) -> None:
        """Forget how it was of late; what is usual stays."""
        self.tail.clear()
        self._last.clear()
        self.late = 0

    def _note_late(self, late: bool, now: float) -> None:  # noqa: FBT001 - the one thing that is noted
        self._last.append((now, late))
        self.late += late
        self._drop(now)

    def _drop(self, now: float) -> None:
        last = self._last
        while last and (len(last) > self._rules.volume or last[0][0] < now - self._rules.window_s):
            self.late -= last.popleft()[1]


def _bin(seconds: float) -> int:
    if seconds <= FIRST_S:
        return 0
    return min(BINS - 1, ceil(log(seconds / FIRST_S) / LOG_GROWTH))
