"""The engine: slots, a KV cache, and who waits. Time is moved by hand, except where a request really waits."""

import asyncio

from extproc.fakes.engine import Engine, Flight
from extproc.fakes.settings import FakeSettings


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now


def engine(clock: Hands, **settings: object) -> Engine:
    """Return an idle engine."""
    return Engine(FakeSettings(name="p", port=0, **settings), clock)  # type: ignore[arg-type]


def test_tokens_come_at_the_speed_of_the_settings() -> None:
    """First token after the base latency and the prompt; the others one by one."""
    clock = Hands()
    one = Flight(prompt_tokens=1000, tokens=10)
    engine(clock, base_latency_s=0.5, prompt_tokens_per_s=2000, output_tokens_per_s=10).enter(one)
    assert one.token_at(0) == 1.0
    assert one.token_at(9) == 1.9
    assert [one.done(now) for now in (0.9, 1.0, 1.35, 99.0)] == [0, 1, 4, 10]
    one.delay(5.0)
    assert one.token_at(0) == 6.0


def test_requests_wait_for_a_slot_in_order_of_priority_and_age() -> None:
    """Lower priority first, as vLLM has it; then whoever came first."""
    there = engine(Hands(), concurrency=1, queue=None)
    first, late, early, urgent = Flight(1, 1), Flight(1, 1, priority=1), Flight(1, 1), Flight(1, 1, priority=-5)
    for flight in (first, late, early, urgent):
        there.enter(flight)
    assert (there.running, there.waiting) == (1, 3)
    order = []
    for _ in range(4):
        running = next(flight for flight in (first, late, early, urgent) if flight.running.is_set() and flight.serial)
        order.append(running)
        there.leave(running)
    assert order == [first, urgent, early, late]


def test_a_full_engine_says_so() -> None:
    """Slots and queue are both counted; no queue setting means any number may wait."""
    there = engine(Hands(), concurrency=1, queue=1)
    assert not there.full(Flight(1, 1))
    there.enter(Flight(1, 1))
    assert not there.full(Flight(1, 1))
    there.enter(waiter := Flight(1, 1))
    assert there.full(Flight(1, 1))
    there.leave(waiter)
    there.leave(waiter)
    assert not there.full(Flight(1, 1))
    there.change(FakeSettings(name="p", port=0, concurrency=1, queue=None))
    assert not there.full(Flight(1, 1))


def test_the_cache_admits_prompts_as_long_as_there_is_room() -> None:
    """A prompt that does not fit waits; one larger than the cache may run alone."""
    clock = Hands()
    there = engine(clock, kv_tokens=1000, queue=None, output_tokens_per_s=10)
    there.enter(big := Flight(5000, 10))
    there.enter(small := Flight(400, 100))
    assert (there.running, there.waiting) == (1, 1)
    assert there.kv_usage() == 1.0
    there.leave(big)
    assert small.running.is_set()
    clock.now = 4.95
    assert there.kv_tokens() == 450
    assert there.kv_usage() == 0.45


def test_a_full_cache_preempts_the_youngest_of_the_least_urgent() -> None:
    """The victim loses its place, and reads everything again before it goes on with the next token."""
    clock = Hands()
    there = engine(clock, kv_tokens=1000, queue=None, output_tokens_per_s=100, prompt_tokens_per_s=1000)
    flights = [Flight(300, 400), Flight(300, 400, priority=1), Flight(300, 400)]
    for flight in flights:
        there.enter(flight)
    there.relieve()
    assert there.preemptions == 0
    clock.now = 0.3 + 0.4
    there.relieve()
    assert there.preemptions == 1
    assert (there.running, there.waiting) == (2, 1)
    assert not flights[1].running.is_set()
    there.leave(flights[0])
    assert flights[1].running.is_set()
    # 41 tokens were there: 341 are read again.
    assert abs(flights[1].token_at(41) - (0.7 + 0.341)) < 1e-9
    assert there.waiting == 0


def test_reported_usage_can_be_pinned() -> None:
    """A test of watermarks needs no real load."""
    assert engine(Hands(), kv_usage=0.95).kv_usage() == 0.95
    assert engine(Hands()).kv_usage() == 0.0


async def test_waiting_for_a_token_survives_a_preemption() -> None:
    """Whoever waits for a token gets it when it is really there."""
    loop = asyncio.get_running_loop()
    settings = FakeSettings(name="p", port=0, concurrency=1, queue=None, output_tokens_per_s=100)
    there = Engine(settings, loop.time)
    there.enter(blocker := Flight(1, 1))
    there.enter(flight := Flight(1, 100))
    waiting = asyncio.create_task(there.until_token(flight, 3))
    await asyncio.sleep(0)
    assert not waiting.done()
    started = loop.time()
    there.leave(blocker)
    await waiting
    assert loop.time() - started >= 0.029
