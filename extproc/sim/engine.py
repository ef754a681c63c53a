"""A model of a continuous-batching inference engine, after the way vLLM schedules.

Requests wait in the engine's own line (first come first served, or by priority) until there is a place in the batch,
room for their prompt in the KV cache, and something left of a step's chunk: while a long prompt is read nobody else
enters. Prompts are read one after the other in chunks that share each step with the batch; every step gives each
request of the batch one token. A step takes

    step_s + step_per_running_s x requests + step_per_kv_token_s x tokens in the cache (+ chunk / prefill speed)

so generation slows down with the batch and while prompts are read. The cache grows by a token per request and step;
when it overflows, the least urgent and youngest request is preempted: it loses its cache, goes back in line, and reads
its prompt and its own output anew.

Between two events the batch does not change, so every request's progress is the same line in time and nothing happens
per token: the time of the next event (a prompt read, an answer complete, the cache full) is computed, and slept for.

Not modelled: prefix caching, blocks, several answers to one request.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

from extproc.sim.work import OK, Books, Told, Work

__all__ = ["Engine", "EngineRules", "Pool", "Scrape"]

EPSILON = 1e-3
"""A thousandth of a token is rounding."""
LOOK_AGAIN_S = 1.0
"""The speed of a step is computed anew at least this often, because the cache fills meanwhile."""
FULL = Told(503, {}, "server_error/server_is_overloaded")
WAITING, READING, WRITING = "waiting", "reading", "writing"


@dataclass(frozen=True, slots=True)
class EngineRules:
    """One instance; see the head of this file. Times in seconds, sizes in tokens. max_waiting None: any number."""

    kv_tokens: int = 300_000
    max_running: int = 256
    max_waiting: int | None = None
    prefill_tokens_per_s: float = 15_000.0
    chunk_tokens: int = 2048
    step_s: float = 0.018
    step_per_running_s: float = 0.00012
    step_per_kv_token_s: float = 2e-8
    overhead_s: float = 0.02
    by_priority: bool = False


@dataclass(frozen=True, slots=True)
class Scrape:
    """What an instance's metrics say. usage: share of the KV cache; preemptions: since it started."""

    usage: float
    waiting: int
    running: int
    preemptions: int


class Engine:
    """One instance. Everything happens in the loop that it is made in."""

    def __init__(self, rules: EngineRules, loop: asyncio.AbstractEventLoop, books: Books | None = None) -> None:
        """Idle."""
        self.rules = rules
        self.books = books or Books()
        self._loop = loop
        self._numbers = count(1)
        self._waiting: list[tuple[int, int, Work]] = []
        self._reading: deque[Work] = deque()
        self._left = 0.0
        self._behind = 0.0
        self._writing: dict[Work, None] = {}
        self._ends: list[tuple[float, int, Work]] = []
        self._kv = 0.0
        self._steps = 0.0
        self._at = loop.time()
        self._steps_per_s = 0.0
        self._reads_per_s = 0.0
        self._factor = 1.0
        self._down = False
        self._timer: asyncio.TimerHandle | None = None
        self._preemptions = 0

    @property
    def load(self) -> int:
        """Requests that run or wait here."""
        return len(self._waiting) + self._batch

    @property
    def _batch(self) -> int:
        return len(self._reading) + len(self._writing)

    def scrape(self) -> Scrape:
        """Read the metrics."""
        self._advance()
        usage = min(1.0, self._kv / self.rules.kv_tokens)
        return Scrape(usage, len(self._waiting), self._batch, self._preemptions)

    def begin(self, work: Work) -> None:
        """See work.Model."""
        limit = self.rules.max_waiting
        if self._down or (limit is not None and len(self._waiting) >= limit):
            self.books.refused[FULL.status] += 1
            self._loop.call_later(self.rules.overhead_s, work.tell, FULL)
            return
        self.books.accept(work)
        work.serial = next(self._numbers)
        self._advance()
        self._line_up(work)
        self._settle()

    def abandon(self, work: Work) -> None:
        """See work.Model."""
        if not work.accepted:
            return
        self._advance()
        spent, writing = self._spent(work), work.state == WRITING
        self._remove(work)
        if writing:
            work.generated = spent - work.prompt
        self.books.close(work, whole=False, processed=spent)
        work.end(whole=False)
        self._settle()

    def fail(self, *, down: bool) -> None:
        """See work.Model. Who is being answered stays; who waits is refused."""
        self._down = down
        self._advance()
        for _, _, work in sorted(self._waiting) if down else ():
            if not work.told.done():
                self.abandon(work)
                self.books.refused[FULL.status] += 1
                work.tell(FULL)

    def slow(self, factor: float) -> None:
        """See work.Model."""
        self._advance()
        self._factor = factor
        self._settle()

    def _line_up(self, work: Work) -> None:
        work.state = WAITING
        heapq.heappush(self._waiting, (work.priority if self.rules.by_priority else 0, work.serial, work))

    def _held(self, work: Work) -> float:
        """Tokens of the cache that a running request holds."""
        if work.state == WRITING:
            return work.prompt + work.generated + self._steps - work.since
        return work.prompt + work.generated if work.state == READING else 0.0

    def _spent(self, work: Work) -> float:
        """Tokens that were processed for a request since it last got a place."""
        held = self._held(work)
        if work.state == READING:
            return held - self._left if self._reading[0] is work else 0.0
        return held

    def _remove(self, work: Work) -> None:
        """Out of wherever it is. Its entry in the heap of ends stays, and is passed over."""
        self._kv -= self._held(work)
        if work.state == WAITING:
            self._waiting = [entry for entry in self._waiting if entry[2] is not work]
            heapq.heapify(self._waiting)
        elif work.state == READING:
            if self._reading[0] is work:
                self._next_prompt()
            else:
                self._reading.remove(work)
                self._behind -= work.prompt + work.generated
        else:
            del self._writing[work]
        work.state = ""
        if not self._batch:
            self._kv = 0.0

    def _advance(self) -> None:
        """Let the time that has passed take effect."""
        now = self._loop.time()
        passed, self._at = now - self._at, now
        if passed > 0.0 and self._batch:
            steps = passed * self._steps_per_s
            self._steps += steps
            self._kv += steps * len(self._writing)
            self._left -= passed * self._reads_per_s

    def _turn(self) -> None:
        self._timer = None
        self._advance()
        self._settle()

    def _settle(self) -> None:
        """Do all that is due, and sleep until the next event."""
        while self._reading and self._left <= EPSILON:
            self._read_through(self._next_prompt())
        while self._ends and self._ends[0][0] <= self._steps + EPSILON:
            _, _, work = heapq.heappop(self._ends)
            if work.state == WRITING and work.since + work.output - work.generated <= self._steps + EPSILON:
                self._finish(work)
        while self._kv > self.rules.kv_tokens + EPSILON and self._batch > 1:
            self._preempt()
        self._admit()
        self.books.most_running = max(self.books.most_running, self._batch)
        self._sleep()

    def _read_through(self, work: Work) -> None:
        """The prompt is read; the first token comes with that."""
        work.state, work.since = WRITING, self._steps
        if not work.told.done():
            work.tell(OK)
            work.generated = 1.0
            self._kv += 1.0
        self._writing[work] = None
        heapq.heappush(self._ends, (self._steps + work.output - work.generated, work.serial, work))

    def _next_prompt(self) -> Work:
        """Done with the prompt at hand, whose request is returned; the next is begun."""
        work = self._reading.popleft()
        self._left = 0.0
        if self._reading:
            self._left = self._reading[0].prompt + self._reading[0].generated
            self._behind -= self._left
        return work

    def _finish(self, work: Work) -> None:
        self._remove(work)
        self.books.close(work, whole=True, processed=0.0)
        work.end(whole=True)

    def _preempt(self) -> None:
        """The least urgent, and of those the youngest, starts over."""
        work = max((*self._writing, *self._reading), key=self._urgency)
        self.books.wasted += self._spent(work)
        if work.state == WRITING:
            work.generated, work.since = work.generated + self._steps - work.since, self._steps
        self._remove(work)
        self._preemptions += 1
        self.books.preempted += 1
        self._line_up(work)

    def _urgency(self, work: Work) -> tuple[int, int]:
        return (work.priority if self.rules.by_priority else 0, work.serial)

    def _admit(self) -> None:
        rules = self.rules
        while self._waiting and self._batch < rules.max_running and self._left + self._behind < self._chunk():
            work = self._waiting[0][2]
            need = work.prompt + work.generated
            if self._batch and self._kv + need > rules.kv_tokens:
                return
            heapq.heappop(self._waiting)
            work.state = READING
            self._kv += need
            if self._reading:
                self._behind += need
            else:
                self._left = need
            self._reading.append(work)

    def _chunk(self) -> float:
        """Most prompt tokens that a step reads, beside a token for everybody who writes."""
        return max(1.0, self.rules.chunk_tokens - len(self._writing))

    def _sleep(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._batch:
            self._set_speed()
            self._timer = self._loop.call_later(min(LOOK_AGAIN_S, self._next_s()), self._turn)

    def _set_speed(self) -> None:
        rules, writing = self.rules, len(self._writing)
        step = rules.step_s + rules.step_per_running_s * writing + rules.step_per_kv_token_s * self._kv
        chunk = 0.0
        if self._reading:
            chunk = max(1.0, min(self._chunk(), self._left + self._behind))
            step = (step if writing else 0.0) + chunk / rules.prefill_tokens_per_s
        step *= self._factor
        self._steps_per_s = 1.0 / step
        self._reads_per_s = chunk / step

    def _next_s(self) -> float:
        """Seconds until something happens."""
        soonest = self._left / self._reads_per_s if self._reading else inf
        while self._ends and self._ends[0][2].state != WRITING:
            heapq.heappop(self._ends)
        if self._ends:
            soonest = min(soonest, (self._ends[0][0] - self._steps) / self._steps_per_s)
        if self._writing and self._batch > 1:
            room = max(0.0, self.rules.kv_tokens - self._kv) + 2 * EPSILON
            soonest = min(soonest, room / (self._steps_per_s * len(self._writing)))
        return max(0.0, soonest)


class Pool:
    """Several instances behind one name: each request goes to the one with the fewest."""

    def __init__(self, rules: EngineRules, instances: int, loop: asyncio.AbstractEventLoop) -> None:
        """All idle, with one set of books."""
        self.rules = rules
        self.books = Books()
        self._engines = [Engine(rules, loop, self.books) for _ in range(instances)]

    def begin(self, work: Work) -> None:
        """See work.Model."""
        work.place = min(range(len(self._engines)), key=lambda place: self._engines[place].load)
        self._engines[work.place].begin(work)

    def abandon(self, work: Work) -> None:
        """See work.Model."""
        self._engines[work.place].abandon(work)

    def fail(self, *, down: bool) -> None:
        """See work.Model."""
        for engine in self._engines:
            engine.fail(down=down)

    def slow(self, factor: float) -> None:
        """See work.Model."""
        for engine in self._engines:
            engine.slow(factor)

    def scrape(self) -> Sequence[Scrape]:
        """Read the metrics of every instance."""
        return [engine.scrape() for engine in self._engines]
