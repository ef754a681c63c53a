"""What a refusal for speed (429) does: a pause, and a cut of the rate that is taken back slowly.

The provider says how long to wait, or does not. What it says is kept to the letter. Without a word from it the pause is
drawn between a base and three times the pause before (decorrelated jitter), so that many gateways do not come back in
step, and it is short, because nobody knows. A cut multiplies the rate by `CUT`; it comes back at `RECOVERY` of the
whole per minute (additive increase, multiplicative decrease), so the rate settles around what the provider serves.
Where headers explain the refusal they are followed, and the rate yields only a little: it gives slack to others who use
the same account, so that refusals stay rare.

Refusals of requests that departed before the last cut are its echo and cut nothing: a burst of them says no more than
one. A window that is spent for hours is asked again now and then, on probation: at `TRICKLE` of the rate, until an
answer shows that it is open.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

__all__ = ["Brake"]

CUT, YIELD, LEAST = 0.8, 0.95, 0.05
RECOVERY = 0.1
BASE_S, CAP_S = 0.5, 30.0
RECHECK_S, RECHECK_MAX_S = 300.0, 3600.0
TRICKLE = 0.01


@dataclass(slots=True)
class Brake:
    """Of one account and model. Times are seconds on the caller's clock; `chance` is in [0, 1).

    share: of the rate otherwise allowed, 1 when nothing is wrong; yielded: of that, after refusals that were explained.
    paused_until: as far as this brake asked for it.
    """

    share: float = 1.0
    yielded: float = 1.0
    paused_until: float = -inf
    probation: bool = False
    _cut_at: float = -inf
    _pause_s: float = 0.0
    _rechecks: int = 0
    _seen_at: float = -inf

    @property
    def factor(self) -> float:
        """What the rate is multiplied with now."""
        return TRICKLE if self.probation else max(LEAST, self.share * self.yielded)

    @property
    def calm(self) -> bool:
        """Whether there is nothing to recover from."""
        return self.share >= 1.0 and self.yielded >= 1.0 and not self.probation and not self._pause_s

    def refused(self, began: float, now: float, wait_s: float | None, *, explained: bool, chance: float) -> float:
        """Seconds to pause after a refusal of a request that departed at `began`; 0 for none.

        explained: the provider's headers show why, so that limit and level are followed besides.
        """
        echo = began < self._cut_at
        if not echo:
            self._cut_at = self._seen_at = now
            if explained:
                self.yielded = max(LEAST, self.yielded * YIELD)
            else:
                self.share = max(LEAST, self.share * CUT)
        if wait_s is None:
            if echo:
                return 0.0
            self._pause_s = min(CAP_S, BASE_S + chance * max(0.0, 3.0 * (self._pause_s or BASE_S) - BASE_S))
            self._cut_at = now
            wait_s = self._pause_s
        return self._paused(now, wait_s)

    def exhausted(self, began: float, now: float, wait_s: float | None) -> float:
        """Seconds to pause when a window of hours or more is spent; it is asked again before long in any case."""
        if not self.probation or began >= self.paused_until:
            longest = min(RECHECK_MAX_S, RECHECK_S * 2.0**self._rechecks)
            self._rechecks = min(self._rechecks + 1, 10)
            self.probation = True
            return self._paused(now, longest if wait_s is None else min(wait_s, longest))
        return 0.0

    def served(self, began: float) -> None:
        """A request that departed at `began` was answered, and nothing is spent."""
        if began >= self.paused_until:
            self.probation, self._rechecks = False, 0
        if began >= self._cut_at:
            self._pause_s = self._pause_s / 2.0 if self._pause_s > BASE_S else 0.0

    def recover(self, now: float) -> None:
        """Take back a little of the cut, by the time that went by; none of it during a pause."""
        since = max(self._seen_at, self.paused_until)
        if now > since:
            back = RECOVERY * (now - since) / 60.0
            self.share, self.yielded = min(1.0, self.share + back), min(1.0, self.yielded + back)
            self._seen_at = now

    def _paused(self, now: float, seconds: float) -> float:
        self.paused_until = max(self.paused_until, now + seconds)
        return seconds
