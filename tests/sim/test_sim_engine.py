"""The engine model: speed, cache, line, preemption, and that it always gives back what it took."""

import asyncio
import random

import pytest

from extproc.sim.engine import EngineRules, Pool
from extproc.sim.virtual import VirtualLoop, play
from extproc.sim.work import SUCCESS, Work

RULES = EngineRules(
    kv_tokens=10_000,
    max_running=64,
    prefill_tokens_per_s=10_000.0,
    chunk_tokens=2000,
    step_s=0.02,
    step_per_running_s=0.001,
    step_per_kv_token_s=0.0,
    overhead_s=0.01,
)


class Bench:
    """A pool, and works sent to it."""

    def __init__(self, loop: VirtualLoop, instances: int = 1, **changes) -> None:
        self.loop = loop
        self.pool = Pool(EngineRules(**{**{f: getattr(RULES, f) for f in RULES.__slots__}, **changes}), instances, loop)
        self.jobs = 0

    def send(self, prompt: int, output: int, priority: int = 0, job: int | None = None) -> Work:
        self.jobs += 1
        work = Work(self.jobs if job is None else job, prompt, output, None, priority, self.loop)
        self.pool.begin(work)
        return work

    @property
    def usage(self) -> float:
        return max(one.usage for one in self.pool.scrape())


def test_one_request_reads_its_prompt_and_then_writes_a_token_per_step():
    """1,000 tokens at 10,000 per second, then 100 steps of 21 ms."""

    async def one(loop: VirtualLoop) -> tuple[float, float]:
        work = Bench(loop).send(1000, 101)
        began = loop.time()
        assert (await work.told).status == SUCCESS
        first = loop.time() - began
        assert await work.ended
        return first, loop.time() - began

    first, whole = play(one)
    assert first == pytest.approx(0.1, abs=0.001)
    assert whole == pytest.approx(0.1 + 100 * 0.021, rel=0.01)


def test_a_larger_batch_writes_slower():
    """Every request of the batch makes each step a little longer."""

    async def alone_and_together(loop: VirtualLoop) -> tuple[float, float]:
        took = []
        for count in (1, 20):
            bench, began = Bench(loop), loop.time()
            for work in [bench.send(10, 200) for _ in range(count)]:
                await work.ended
            took.append(loop.time() - began)
        return took[0], took[1]

    alone, together = play(alone_and_together)
    assert together == pytest.approx(alone * 0.040 / 0.021, rel=0.1)


def test_a_prompt_being_read_slows_down_those_who_write():
    """A chunk shares the step with the batch."""

    async def beside(loop: VirtualLoop) -> tuple[float, float]:
        took = []
        for prompt in (0, 9000):
            bench, began = Bench(loop, kv_tokens=100_000), loop.time()
            writing = bench.send(10, 100)
            await writing.told
            if prompt:
                bench.send(prompt, 1)
            await writing.ended
            took.append(loop.time() - began)
        return took[0], took[1]

    alone, beside_one = play(beside)
    assert beside_one > alone + 0.5


def test_what_does_not_fit_waits_and_the_cache_is_empty_in_the_end():
    """Prompts of 4,000 tokens, two at a time."""

    async def three(loop: VirtualLoop) -> None:
        bench = Bench(loop)
        works = [bench.send(4000, 50) for _ in range(3)]
        await works[0].told
        seen = bench.pool.scrape()[0]
        assert (seen.running, seen.waiting) == (2, 1)
        for work in works:
            assert await work.ended
        assert bench.usage == 0.0
        assert bench.pool.books.running == 0

    play(three)


def test_an_overflow_throws_out_the_youngest_who_starts_over():
    """It costs what was processed, and nobody loses an answer."""

    async def overflow(loop: VirtualLoop) -> Bench:
        bench = Bench(loop)
        old, young = bench.send(4000, 1500), bench.send(4000, 1500)
        await old.ended
        assert not young.ended.done()
        assert await young.ended
        return bench

    bench = play(overflow)
    assert bench.pool.books.preempted == 1
    assert bench.pool.books.wasted > 4000
    assert bench.pool.books.served == 2


@pytest.mark.parametrize(("by_priority", "first_out"), [(True, "urgent last"), (False, "youngest")])
def test_priority_decides_who_is_thrown_out_where_the_engine_follows_it(by_priority, first_out):
    """The less urgent, though it is older; without, the younger, though it is urgent."""

    async def overflow(loop: VirtualLoop) -> bool:
        bench = Bench(loop, by_priority=by_priority)
        lazy, urgent = bench.send(4000, 1500, priority=5), bench.send(4000, 1500, priority=0)
        await urgent.ended
        return lazy.ended.done()

    assert play(overflow) is (first_out == "youngest")


def test_one_request_larger_than_the_cache_still_runs():
    """Alone it may always run."""

    async def giant(loop: VirtualLoop) -> bool:
        return await Bench(loop).send(30_000, 10).ended

    assert play(giant)


def test_a_full_line_refuses():
    """503, after a moment, and nothing is counted as begun."""

    async def full(loop: VirtualLoop) -> tuple[int, int]:
        bench = Bench(loop, max_waiting=1)
        bench.send(9000, 100)
        bench.send(9000, 100)
        told = await bench.send(9000, 100).told
        return told.status, bench.pool.books.begun

    assert play(full) == (503, 2)


def test_an_outage_refuses_who_waits_and_lets_who_is_answered_go_on():
    """And serves again afterwards."""

    async def outage(loop: VirtualLoop) -> None:
        bench = Bench(loop)
        running, waiting = bench.send(8000, 20), bench.send(8000, 20)
        await running.told
        bench.pool.fail(down=True)
        assert (await waiting.told).status == 503
        assert (await bench.send(10, 10).told).status == 503
        assert await running.ended
        bench.pool.fail(down=False)
        assert await bench.send(10, 10).ended

    play(outage)


def test_slow_is_slow_until_it_is_over():
    """Three times as long for a second of work, then as before."""

    async def slow(loop: VirtualLoop) -> float:
        bench, began = Bench(loop), loop.time()
        work = bench.send(10, 101)
        bench.pool.slow(3.0)
        await asyncio.sleep(1.05)
        bench.pool.slow(1.0)
        await work.ended
        return loop.time() - began

    assert play(slow) == pytest.approx(2.1 + 0.7, abs=0.05)


def test_requests_go_to_the_instance_with_the_fewest():
    """Four requests on two instances are two on each."""

    async def four(loop: VirtualLoop) -> list[int]:
        bench = Bench(loop, instances=2)
        for _ in range(4):
            bench.send(100, 100)
        return [one.running for one in bench.pool.scrape()]

    assert play(four) == [2, 2]


@pytest.mark.parametrize("seed", range(60))
def test_however_requests_come_and_go_everything_is_given_back(seed):
    """Random arrivals, sizes, priorities and departures; the cache is never above its size while anybody shares it."""

    async def schedule(loop: VirtualLoop) -> None:
        rng = random.Random(seed)
        bench = Bench(loop, instances=rng.choice([1, 1, 3]), by_priority=rng.random() < 0.5)
        works = []
        for _ in range(40):
            await asyncio.sleep(rng.expovariate(4))
            works.append(bench.send(rng.randint(1, 4000), rng.randint(1, 600), rng.randint(0, 2)))
            if rng.random() < 0.3:
                loop.call_later(rng.uniform(0, 3), bench.pool.abandon, works[-1])
            for seen in bench.pool.scrape():
                assert seen.usage <= 1.0 + 1e-6 or seen.running == 1, seed
        for work in works:
            whole = await work.ended
            assert not whole or work.told.done()
        books = bench.pool.books
        assert books.begun == 40
        assert books.served == sum(work.ended.result() for work in works)
        assert books.running == 0
        assert all(one.usage == one.waiting == one.running == 0 for one in bench.pool.scrape()), seed

    play(schedule)


def test_a_copy_of_a_running_job_is_counted():
    """The books tell how many works of one job ran at a time."""

    async def twice(loop: VirtualLoop) -> tuple[int, int]:
        bench = Bench(loop)
        works = [bench.send(10, 10, job=7), bench.send(10, 10, job=7)]
        for work in works:
            await work.ended
        await bench.send(10, 10, job=7).ended
        return bench.pool.books.copies, bench.pool.books.doubled

    assert play(twice) == (2, 1)
