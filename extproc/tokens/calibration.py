"""What reported usage teaches: per model, how far the estimate is off.

Theory. A tokenizer that is not the model's own is off by a factor that hardly changes, so one ratio per model is worth
learning: reported tokens over estimated ones, as a moving average. The first few ratios are kept and their median is
the start, so that one odd answer (a cached prompt reported short, a hidden system prompt) does not set the tone. From
then on each new ratio moves the average by a tenth, and counts as at most half as much again, or as little as two
thirds, of what is known: an outlier shifts it by 5 % at most, while a real change still gets through within a few dozen
answers. Ratios are kept between 0.5 and 3: beyond that something else is wrong, and a limit must not follow it.

Where a prompt is counted as one model and answered by another, the ratio is between the two, and its key names both.
That is for models whose own vocabulary nobody published. Between two known ones there is no such ratio: it depends on
the text, and one tenant's digits would make another's prose three times as large (sizes).

Deliberately not here: the estimate itself, persistence, and any clock: a ratio does not grow old.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import median

__all__ = ["MOST", "Calibration"]

LEAST, MOST = 0.5, 3.0
"""No ratio is less, or more."""
SAMPLES = 5
WEIGHT = 0.1
STEP = 1.5
MODELS = 1_000
FEWEST_TOKENS = 16  # below this the frame of a message weighs more than its text


@dataclass(slots=True)
class _Ratio:
    first: list[float] = field(default_factory=list)
    value: float = 1.0


class Calibration:
    """Learned ratios of reported to estimated prompt tokens, for the thousand models used last (any key names one).

    Always learn with the estimate as it came from the tokenizer, never with one that `correct` has changed.
    """

    def __init__(self, models: int = MODELS) -> None:
        """Start without any knowledge; models: how many to remember."""
        self._models = models
        self._ratios: OrderedDict[Hashable, _Ratio] = OrderedDict()

    def correct(self, model: Hashable, estimate: int) -> int:
        """Return what the upstream will probably report; the estimate itself until enough was learned."""
        return math.ceil(estimate * self.ratio(model))

    def ratio(self, model: Hashable) -> float:
        """Return the learned ratio, 1.0 until enough was learned."""
        known = self.learned(model)
        return 1.0 if known is None else known

    def learned(self, model: Hashable) -> float | None:
        """Return the learned ratio, None until enough was learned."""
        known = self._ratios.get(model)
        return None if known is None or len(known.first) < SAMPLES else known.value

    def learn(self, model: Hashable, estimated: int, reported: int) -> None:
        """Take in the prompt tokens that an upstream reported for an estimate of the tokenizer."""
        if estimated < FEWEST_TOKENS or reported <= 0:
            return
        seen = min(MOST, max(LEAST, reported / estimated))
        known = self._ratios.setdefault(model, _Ratio())
        self._ratios.move_to_end(model)
        if len(self._ratios) > self._models:
            self._ratios.popitem(last=False)
        if len(known.first) < SAMPLES:
            known.first.append(seen)
            known.value = median(known.first)
            return
        damped = min(known.value * STEP, max(known.value / STEP, seen))
        known.value += WEIGHT * (damped - known.value)
