"""The inference engine behind the fake: slots, a KV cache, and time, after the way vLLM schedules.

Requests run when a slot is free and the cache has room for their prompt; else they wait, by priority (lower first with
vLLM, higher first with SGLang) and age. While they generate they grow. When the cache overflows, the least urgent and
youngest one is preempted: it loses its cache, waits again, and has to read its prompt and its own output anew before it
goes on.

Each running request is its own clockwork: the time of its n-th token is known, so nothing happens per token here.

Not modelled: decode speed falling with the size of the batch, prefix caching, blocks.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.fakes.settings import FakeSettings

# Event loops round timers to milliseconds: waiting for less is turning in circles.
_TIMER_GRAIN_S = 0.0005


class Flight:
    """One request in the engine."""

    def __init__(self, prompt_tokens: int, tokens: int, choices: int = 1, priority: int = 0) -> None:
        """Describe the request. `tokens` is the output per choice; the choices are generated side by side."""
        self.prompt_tokens = prompt_tokens
        self.tokens = tokens
        self.choices = choices
        self.priority = priority
        self.serial = 0
        """Order of arrival; 0 while it is not in an engine."""
        self.running = asyncio.Event()
        self._first_at = math.inf
        self._speed = math.inf

    def begin(self, now: float, settings: FakeSettings) -> None:
        """Start reading the prompt."""
        self._speed = settings.output_tokens_per_s or math.inf
        self._first_at = now + settings.base_latency_s + _reading_s(self.prompt_tokens, settings)

    def resume(self, now: float, done: int, settings: FakeSettings) -> None:
        """Go on after a preemption: everything known so far is read again, then token `done` comes."""
        self._speed = settings.output_tokens_per_s or math.inf
        ready_at = now + _reading_s(self.prompt_tokens + done * self.choices, settings)
        self._first_at = ready_at - done / self._speed

    def delay(self, seconds: float) -> None:
        """Move all tokens to come by some seconds."""
        self._first_at += seconds

    def token_at(self, index: int) -> float:
        """Return when token `index` (from 0) is there."""
        return self._first_at + index / self._speed

    def done(self, now: float) -> int:
        """Return how many tokens each choice has by now; one that is due within the grain of timers is sent already."""
        since_s = now + _TIMER_GRAIN_S - self._first_at
        if since_s < 0:
            return 0
        if math.isinf(self._speed):
            return self.tokens
        return min(self.tokens, int(since_s * self._speed) + 1)

    def held(self, now: float) -> int:
        """Return how many tokens of the KV cache it holds."""
        return self.prompt_tokens + self.done(now) * self.choices


class Engine:
    """Who runs, who waits, and who is thrown out."""

    def __init__(self, settings: FakeSettings, clock: Callable[[], float]) -> None:
        """Make an idle engine. `clock` is a steady clock in seconds."""
        self.settings = settings
        self.preemptions = 0
        self._clock = clock
        self._serials = count(1)
        self._running: dict[Flight, None] = {}
        self._waiting: list[tuple[int, int, Flight]] = []
        self._preempted: dict[Flight, int] = {}

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    def priorities(self) -> tuple[Counter[int], Counter[int]]:
        """Running and waiting requests by their own priorities."""
        waiting = (flight.priority for _, _, flight in self._waiting)
        return Counter(flight.priority for flight in self._running), Counter(waiting)

    @property
    def waiting(self) -> int:
        """Requests that wait for one, preempted ones included."""
        return len(self._waiting)

    def full(self, flight: Flight) -> bool:
        """Return whether a new request finds neither room to run nor room to wait."""
        if self._may_start(flight):
            return False
        return self.settings.queue is not None and self.waiting >= self.settings.queue

    def enter(self, flight: Flight) -> None:
        """Start a request or put it in line; `flight.running` is set when it runs."""
        flight.serial = next(self._serials)
        self._line_up(flight)
        self._admit()

    def leave(self, flight: Flight) -> None:
        """Take a request out, wherever it is, and let others in. Harmless if it has left already."""
        if not flight.serial:
            return
        if flight in self._running:
            del self._running[flight]
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not flight]
            heapq.heapify(self._waiting)
        flight.serial = 0
        self._preempted.pop(flight, None)
        self._admit()

    async def until_token(self, flight: Flight, index: int) -> None:
        """Return when token `index` of a request is there, however often it is preempted until then."""
        while True:
            await flight.running.wait()
            left_s = flight.token_at(index) - self._clock()
            if left_s <= _TIMER_GRAIN_S:
                return
            await asyncio.sleep(left_s)

    def done(self, flight: Flight) -> int:
        """Return how many tokens each choice of a request has by now."""
        return flight.done(self._clock())

    def generated(self) -> int:
        """Return the output tokens of those who are here, running or preempted."""
        now = self._clock()
        preempted = sum(done * flight.choices for flight, done in self._preempted.items())
        return preempted + sum(flight.done(now) * flight.choices for flight in self._running)

    def kv_tokens(self) -> int:
        """Return the tokens in the KV cache."""
        now = self._clock()
        return sum(flight.held(now) for flight in self._running)

    def kv_usage(self) -> float:
        """Return the used share of the KV cache, 0 to 1."""
        if self.settings.kv_usage is not None:
            return self.settings.kv_usage
        if self.settings.kv_tokens is None:
            return 0.0
        return min(1.0, self.kv_tokens() / self.settings.kv_tokens)

    def relieve(self) -> None:
        """Preempt until the cache fits, then let others in. To be called every now and then while a cache is set."""
        if self.settings.kv_tokens is None:
            return
        while len(self._running) > 1 and self.kv_tokens() > self.settings.kv_tokens:
            self._preempt(max(self._running, key=lambda flight: (self._rank(flight), flight.serial)))
        self._admit()

    def change(self, settings: FakeSettings) -> None:
        """Apply new settings to those who enter from now on, and to the room there is."""
        self.settings = settings
        self._admit()

    def _preempt(self, flight: Flight) -> None:
        del self._running[flight]
        self.preemptions += 1
        self._preempted[flight] = flight.done(self._clock())
        flight.running.clear()
        self._line_up(flight)

    def _line_up(self, flight: Flight) -> None:
        heapq.heappush(self._waiting, (self._rank(flight), flight.serial, flight))

    def _rank(self, flight: Flight) -> int:
        """Whose turn comes first: the lowest."""
        if self.settings.priorities != "followed":
            return 0
        return -flight.priority if self.settings.engine == "sglang" else flight.priority

    def _admit(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][2]):
            self._start(heapq.heappop(self._waiting)[2])

    def _start(self, flight: Flight) -> None:
        now = self._clock()
        if (done := self._preempted.pop(flight, None)) is None:
            flight.begin(now, self.settings)
        else:
            flight.resume(now, done, self.settings)
        self._running[flight] = None
        flight.running.set()

    def _may_start(self, flight: Flight) -> bool:
        return not self._waiting and self._has_room(flight)

    def _has_room(self, flight: Flight) -> bool:
        if not self._running:
            # Alone it may always run, or a prompt larger than the cache would wait for ever.
            return True
        if self.settings.concurrency is not None and self.running >= self.settings.concurrency:
            return False
        if self.settings.kv_tokens is None:
            return True
        return self.kv_tokens() + flight.prompt_tokens + self._preempted.get(flight, 0) <= self.settings.kv_tokens


def _reading_s(tokens: int, settings: FakeSettings) -> float:
    return tokens / settings.prompt_tokens_per_s if settings.prompt_tokens_per_s else 0.0
