"""The provider model: it counts by itself, says no by itself, and tells it as a provider does."""

import asyncio
import random

import pytest

from extproc.core.policy import Accounting
from extproc.sim.account import Account, AccountRules
from extproc.sim.virtual import VirtualLoop, play
from extproc.sim.work import SUCCESS, Work


def account(loop: VirtualLoop, **changes) -> Account:
    """60,000 tokens a minute in a bucket of ten seconds, no jitter."""
    rules = {"tpm": 60_000, "burst_s": 10.0, "jitter": 0.0, "first_token_s": 0.5, "prompt_tokens_per_s": 1000.0}
    return Account(AccountRules(**{**rules, "output_tokens_per_s": 100.0, **changes}), loop, random.Random(1))


def send(loop: VirtualLoop, where: Account, prompt: int, output: int, cap: int | None = None) -> Work:
    work = Work(1, prompt, output, cap, 0, loop)
    where.begin(work)
    return work


def test_an_answer_begins_after_reading_and_flows_at_its_pace():
    """Half a second, a second for 1,000 tokens, then 100 per second."""

    async def one(loop: VirtualLoop) -> tuple[float, float]:
        work, began = send(loop, account(loop), 1000, 101, 200), loop.time()
        assert (await work.told).status == SUCCESS
        first = loop.time() - began
        assert await work.ended
        return first, loop.time() - began

    assert play(one) == (pytest.approx(1.5), pytest.approx(2.5))


def test_what_is_above_the_limit_is_refused_with_a_time_and_counted():
    """10,000 tokens are there; the second request wants 6,000 of the 4,000 left."""

    async def two(loop: VirtualLoop) -> None:
        where = account(loop)
        send(loop, where, 5000, 10, 1000)
        told = await send(loop, where, 5000, 10, 1000).told
        assert told.status == 429
        assert told.error == "tokens/rate_limit_exceeded"
        assert float(told.headers["retry-after-ms"]) == pytest.approx(2000, abs=40)
        assert told.headers["x-ratelimit-limit-tokens"] == "60000"
        assert int(told.headers["x-ratelimit-remaining-tokens"]) < 4100
        assert where.books.over == 6000
        assert where.books.refused[429] == 1
        await asyncio.sleep(2.0)
        assert (await send(loop, where, 5000, 10, 1000).told).status == SUCCESS

    play(two)


@pytest.mark.parametrize(("accounting", "charged"), [(Accounting.UPFRONT, 2000), (Accounting.ACTUAL, 1100)])
def test_the_cap_is_charged_for_good_or_only_what_was_generated(accounting, charged):
    """1,000 tokens of prompt, 100 generated, 1,000 allowed."""

    async def one(loop: VirtualLoop) -> float:
        where = account(loop, accounting=accounting)
        await send(loop, where, 1000, 100, 1000).ended
        return where.books.charged

    assert play(one) == charged


def test_without_a_cap_the_answer_is_charged_when_it_is_there():
    """Whatever the accounting."""

    async def one(loop: VirtualLoop) -> tuple[float, float]:
        where = account(loop)
        work = send(loop, where, 1000, 100)
        before = where.books.charged
        await work.ended
        return before, where.books.charged

    assert play(one) == (1000, 1100)


def test_whoever_leaves_has_wasted_what_was_done_so_far():
    """The prompt, and half a second of answer."""

    async def leave(loop: VirtualLoop) -> None:
        where = account(loop)
        work = send(loop, where, 1000, 500, 500)
        await work.told
        await asyncio.sleep(0.5)
        where.abandon(work)
        where.abandon(work)
        assert not await work.ended
        assert where.books.wasted == pytest.approx(1051)
        assert where.books.running == 0
        assert where.books.charged == 1500

    play(leave)


def test_an_outage_refuses_newcomers_and_those_who_wait_for_their_first_token():
    """Answers that have begun go on."""

    async def outage(loop: VirtualLoop) -> None:
        where = account(loop)
        begun, waiting = send(loop, where, 10, 500, 500), send(loop, where, 3000, 10, 10)
        await begun.told
        where.fail(down=True)
        assert (await waiting.told).status == 503
        assert (await send(loop, where, 10, 10, 10).told).status == 503
        assert await begun.ended
        where.fail(down=False)
        assert (await send(loop, where, 10, 10, 10).told).status == SUCCESS

    play(outage)


def test_a_halved_limit_is_half_as_much_until_it_is_back():
    """The bucket shrinks at once and tells so."""

    async def halve(loop: VirtualLoop) -> None:
        where = account(loop)
        where.limit(0.5)
        work = send(loop, where, 5500, 1, 1)  # larger than the bucket, which was full: into debt
        assert where.level() == 0.0
        told = await work.told
        assert told.status == SUCCESS
        assert told.headers["x-ratelimit-limit-tokens"] == "30000"
        where.limit(1.0)
        await asyncio.sleep(20)
        assert where.level() == 1.0

    play(halve)


def test_slow_and_full():
    """Twice the time; one more than its places is refused."""

    async def slow(loop: VirtualLoop) -> None:
        where = account(loop, concurrency=1)
        where.slow(2.0)
        work, began = send(loop, where, 500, 101, 101), loop.time()
        assert (await send(loop, where, 1, 1, 1).told).status == 503
        await work.ended
        assert loop.time() - began == pytest.approx(4.0)

    play(slow)


@pytest.mark.parametrize("seed", range(30))
def test_no_minute_is_charged_more_than_its_limit(seed):
    """However requests come: a bucket and a minute of refill, counted apart from what enforces it."""

    async def flood(loop: VirtualLoop) -> None:
        rng, where = random.Random(seed), account(loop)
        for _ in range(300):
            await asyncio.sleep(rng.expovariate(5))
            prompt, output = rng.randint(1, 3000), rng.randint(1, 400)
            work = send(loop, where, prompt, output, output + rng.randint(0, 300))
            if rng.random() < 0.2:
                loop.call_later(rng.uniform(0, 4), where.abandon, work)
        await asyncio.sleep(60)
        assert where.books.busiest_minute <= 60_000 + 10_000
        assert where.books.refused[429] > 50
        assert where.books.running == 0

    play(flood)
