"""A model of a rate-limited provider: an account's token buckets, and answers at a steady pace.

The buckets are the fake provider's own (`fakes.limits`), which share nothing with the gateway's: the provider counts
tokens its own way and says no by itself. It charges prompt and cap on arrival, and gives back what was not generated
only where its accounting is `actual`. Of a request without a cap it charges the answer when it is there.

The first token comes after `first_token_s` and the time to read the prompt; both speeds differ a little from request to
request (`jitter`, a share).
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from extproc.core.policy import Accounting
from extproc.fakes import FakeSettings
from extproc.fakes.anthropic import ANTHROPIC
from extproc.fakes.limits import Cost, Limits, Shortage
from extproc.fakes.openai import OPENAI
from extproc.fakes.refusal import Refusal
from extproc.sim.work import MINUTE_S, SUCCESS, Books, Told, Work

__all__ = ["Account", "AccountRules"]

OVERLOADED = Told(503, {}, "server_error/server_is_overloaded")
READING, WRITING = "reading", "writing"


@dataclass(frozen=True, slots=True)
class AccountRules:
    """Limits per minute, None for none; burst_s: size of each bucket in seconds of refill. concurrency: answers at a
    time, one more is refused with 503. Times in seconds, speeds in tokens per second.
    """

    tpm: int | None = None
    rpm: int | None = None
    input_tpm: int | None = None
    output_tpm: int | None = None
    burst_s: float = 60.0
    accounting: Accounting = Accounting.UPFRONT
    concurrency: int | None = None
    first_token_s: float = 0.4
    prompt_tokens_per_s: float = 8000.0
    output_tokens_per_s: float = 80.0
    refusal_s: float = 0.03
    jitter: float = 0.2
    anthropic: bool = False

    def fake(self, factor: float = 1.0) -> FakeSettings:
        """As the fake provider's limits know them, `factor` times as large."""

        def scaled(limit: int | None) -> int | None:
            return None if limit is None else max(1, round(limit * factor))

        return FakeSettings(
            name="simulated",
            port=0,
            tpm=scaled(self.tpm),
            rpm=scaled(self.rpm),
            input_tpm=scaled(self.input_tpm),
            output_tpm=scaled(self.output_tpm),
            burst_s=self.burst_s,
            accounting="actual",
        )


class Account:
    """See the head of this file. `rng` draws the jitter."""

    def __init__(self, rules: AccountRules, loop: asyncio.AbstractEventLoop, rng: random.Random) -> None:
        """Idle, with full buckets."""
        self.rules = rules
        self.books = Books()
        self._loop = loop
        self._rng = rng
        self._limits = Limits(rules.fake(), loop.time())
        self._dialect = ANTHROPIC if rules.anthropic else OPENAI
        self._running: dict[Work, float] = {}
        self._factor = 1.0
        self._down = False

    def level(self) -> float | None:
        """What is left in the token bucket that is emptiest, as a share of its size; None without one."""
        full_s, levels = self.rules.burst_s / MINUTE_S, self._limits.levels(self._loop.time())
        shares = [level.remaining / (level.limit * full_s) for kind, level in levels.items() if kind != "requests"]
        return min(shares, default=None)

    def begin(self, work: Work) -> None:
        """See work.Model."""
        now, cost = self._loop.time(), Cost(work.prompt, work.cap or 0)
        full = self.rules.concurrency is not None and len(self._running) >= self.rules.concurrency
        if self._down or full:
            self._refuse(work, OVERLOADED)
            return
        shortage = self._limits.take(cost, now)
        if shortage is not None:
            self.books.over += cost.tokens
            self._refuse(work, self._worded(shortage))
            return
        self.books.accept(work)
        self.books.charge(cost.tokens, now)
        self.books.largest = max(self.books.largest, cost.tokens)
        self._start(work)

    def abandon(self, work: Work) -> None:
        """See work.Model."""
        if work.accepted:
            self._stop(work, whole=False)

    def fail(self, *, down: bool) -> None:
        """See work.Model. Answers that have begun go on; who still waits for one is refused."""
        self._down = down
        for work in [work for work in self._running if work.state == READING] if down else ():
            self._stop(work, whole=False)
            self.books.refused[OVERLOADED.status] += 1
            work.tell(OVERLOADED)

    def slow(self, factor: float) -> None:
        """See work.Model."""
        self._factor = factor

    def limit(self, factor: float) -> None:
        """Multiply every limit, of what the rules say."""
        self._limits.change(self.rules.fake(factor), self._loop.time())

    def _start(self, work: Work) -> None:
        rules, slower = self.rules, self._factor * (1.0 + self.rules.jitter * (2.0 * self._rng.random() - 1.0))
        first_s = slower * (rules.first_token_s + work.prompt / rules.prompt_tokens_per_s)
        self._running[work] = rules.output_tokens_per_s / slower
        self.books.most_running = max(self.books.most_running, len(self._running))
        work.state = READING
        work.timer = self._loop.call_later(first_s, self._first, work)

    def _first(self, work: Work) -> None:
        work.state, work.since = WRITING, self._loop.time()
        work.timer = self._loop.call_later((work.output - 1) / self._running[work], self._stop, work)
        work.tell(Told(SUCCESS, self._told()))

    def _stop(self, work: Work, *, whole: bool = True) -> None:
        if work.timer is not None:
            work.timer.cancel()
        now, speed = self._loop.time(), self._running.pop(work)
        if whole:
            work.generated = float(work.output)
        elif work.state == WRITING:
            work.generated = min(work.output, 1.0 + (now - work.since) * speed)
        self._settle(work, now)
        self.books.close(work, whole=whole, processed=work.prompt + work.generated)
        work.end(whole=whole)

    def _settle(self, work: Work, now: float) -> None:
        """Charge what was generated, where that is how it is charged."""
        if work.cap is not None and self.rules.accounting is Accounting.UPFRONT:
            return
        reserved, real = Cost(work.prompt, work.cap or 0), Cost(work.prompt, round(work.generated))
        back = self._limits.settle(reserved, real, now)
        self.books.charge(-back, now)
        self.books.late += max(0, -back)

    def _refuse(self, work: Work, told: Told) -> None:
        self.books.refused[told.status] += 1
        self._loop.call_later(self.rules.refusal_s, work.tell, told)

    def _worded(self, shortage: Shortage) -> Told:
        worded = self._dialect.word(Refusal("rate", shortage=shortage), "")
        kind = "rate_limit_error" if self.rules.anthropic else f"{shortage.kind}/rate_limit_exceeded"
        return Told(worded.status, {**self._told(), **worded.headers}, kind)

    def _told(self) -> dict[str, str]:
        return self._dialect.limit_headers(self._limits.levels(self._loop.time()), 0.0)
