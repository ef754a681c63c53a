"""The engine: slots, a KV cache, and who waits; and how it shows itself. Time is moved by hand where it can be."""

import asyncio
from typing import Any

import pytest

from extproc.fakes.engine import Engine, Flight
from extproc.fakes.metrics import Totals, metrics_page
from extproc.fakes.settings import FakeSettings
from tests.fakes.conftest import Fake, StartFake


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


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        ({}, [-5, 0, 7]),
        ({"engine": "sglang"}, [7, 0, -5]),
        ({"priorities": "ignored"}, [0, -5, 7]),
    ],
)
def test_each_engine_has_its_own_order_of_priorities(settings: dict[str, Any], order: list[int]) -> None:
    """Lower first in vLLM, higher first in SGLang; where it does not schedule by priority, whoever came first."""
    there = engine(Hands(), concurrency=1, queue=None, **settings)
    there.enter(first := Flight(1, 1))
    waiting = [Flight(1, 1, priority=priority) for priority in (0, -5, 7)]
    for flight in waiting:
        there.enter(flight)
    there.leave(first)
    served = []
    while there.running:
        (running,) = [flight for flight in waiting if flight.serial and flight.running.is_set()]
        served.append(running.priority)
        there.leave(running)
    assert served == order


def test_the_victim_is_the_least_urgent_in_either_order() -> None:
    """What a better lane sends outlives what a worse one sends, when the cache overflows."""
    for kind, best in (("vllm", -200), ("sglang", 200)):
        clock = Hands()
        there = engine(clock, engine=kind, kv_tokens=1000, queue=None, output_tokens_per_s=100)
        there.enter(urgent := Flight(400, 400, priority=best))
        there.enter(patient := Flight(400, 400))
        clock.now = 2.0
        there.relieve()
        assert (urgent.running.is_set(), patient.running.is_set()) == (True, False)


def test_sglangs_page_tells_the_total_and_then_its_parts() -> None:
    """With priorities each count has a row with an empty label, and a row for each priority again."""
    there = engine(Hands(), engine="sglang", concurrency=1, queue=None, kv_tokens=1000)
    for priority in (200, 100, 0):
        there.enter(Flight(100, 10, priority=priority))
    rows = metrics_page(there, Totals()).splitlines()
    told = [
        row.rpartition("{")[2].partition("priority=")[2] for row in rows if row.startswith("sglang:num_queue_reqs{")
    ]
    assert told == ['""} 2.0', '"100"} 1.0', '"0"} 1.0']
    assert [row.rpartition(" ")[2] for row in rows if row.startswith("sglang:token_usage{")] == ["0.11"]
    assert [row.rpartition(" ")[2] for row in rows if row.startswith("sglang:max_total_num_tokens{")] == ["1000.0"]
    there.change(FakeSettings(name="p", port=0, engine="sglang", priorities="ignored"))
    assert "priority=" not in metrics_page(there, Totals())


def test_vllms_page_counts_output_while_it_is_generated() -> None:
    """Also that of requests that were preempted, so that a counter never goes back."""
    clock = Hands()
    there = engine(clock, kv_tokens=1000, queue=None, output_tokens_per_s=100)
    for _ in range(2):
        there.enter(Flight(400, 400))
    counts = []
    for now in (0.5, 1.0, 1.2):
        clock.now = now
        there.relieve()
        page = metrics_page(there, Totals(generation_tokens=7))
        counts += [
            float(r.rpartition(" ")[2]) for r in page.splitlines() if r.startswith("vllm:generation_tokens_total{")
        ]
    assert there.preemptions == 1
    assert counts == sorted(counts)
    assert counts[0] == 7 + 2 * 51
    assert 'block_size="16"' in page
    assert 'num_gpu_blocks="62"' in page


async def page_of(fake: Fake) -> tuple[int, str]:
    """Status and text of the metrics page."""
    async with fake.http.get(f"{fake.url}/metrics") as response:
        return response.status, await response.text()


async def test_the_page_can_go_wrong_in_every_way(start_fake: StartFake) -> None:
    """Missing, no page at all, in percent, of a moment ago, and late."""
    fake = await start_fake(kv_usage=0.5, kv_tokens=1000)
    _, told = await page_of(fake)
    await fake.admin("settings", {"metrics": "missing"})
    assert (await page_of(fake))[0] == 404
    await fake.admin("settings", {"metrics": "garbage"})
    assert (await page_of(fake))[1].startswith("<html>")
    await fake.admin("settings", {"metrics": "percent"})
    assert "vllm:kv_cache_usage_perc" in (await page_of(fake))[1]
    assert " 50.0\n" in (await page_of(fake))[1]
    await fake.admin("settings", {"metrics": "frozen"})
    assert (await page_of(fake))[1] == told
    await fake.admin("settings", {"kv_usage": 0.9})
    assert (await page_of(fake))[1] == told
    await fake.admin("settings", {"metrics": "told"})
    assert " 0.9\n" in (await page_of(fake))[1]
    await fake.admin("settings", {"metrics": "slow", "metrics_delay_s": 0.1})
    loop = asyncio.get_running_loop()
    started = loop.time()
    assert (await page_of(fake))[0] == 200
    assert loop.time() - started >= 0.099
    status, answer = await fake.admin("settings", {"metrics": "gone"})
    assert (status, "metrics must be one of" in answer["error"]) == (400, True)


@pytest.mark.parametrize(("engine", "rows"), [("vllm", 1), ("sglang", 0)])
async def test_metrics_may_be_asked_for_by_name(start_fake: StartFake, engine: str, rows: int) -> None:
    """As Prometheus' library serves them; it finds none where several processes share a page, as in SGLang."""
    fake = await start_fake(engine=engine)
    query = "name[]=vllm:num_requests_running&name[]=sglang:num_running_reqs"
    async with fake.http.get(f"{fake.url}/metrics?{query}") as response:
        told = [row for row in (await response.text()).splitlines() if not row.startswith("#")]
    assert len(told) == rows


@pytest.mark.parametrize(
    ("settings", "status", "told"),
    [
        ({}, 404, None),
        ({"server_info": True}, 200, ("vllm_config", {"scheduler_config": {"policy": "priority"}})),
        (
            {"server_info": True, "priorities": "ignored"},
            200,
            ("vllm_config", {"scheduler_config": {"policy": "fcfs"}}),
        ),
        ({"engine": "sglang"}, 200, ("enable_priority_scheduling", True)),
        ({"engine": "sglang", "priorities": "ignored"}, 200, ("enable_priority_scheduling", False)),
    ],
)
async def test_engines_tell_how_they_schedule(
    start_fake: StartFake, settings: dict[str, Any], status: int, told: tuple[str, Any] | None
) -> None:
    """SGLang always, vLLM only in its development mode."""
    fake = await start_fake(**settings)
    async with fake.http.get(f"{fake.url}/server_info") as response:
        assert response.status == status
        if told is not None:
            assert (await response.json())[told[0]] == told[1]


async def test_an_old_vllm_refuses_priorities_it_would_not_follow(start_fake: StartFake) -> None:
    """With vLLM's words; 0 is no priority."""
    fake = await start_fake(priorities="refused")
    async with fake.chat(priority=-200) as response:
        assert response.status == 400
        assert "Priority scheduling is not enabled" in (await response.json())["error"]["message"]
    async with fake.chat(priority=0) as response:
        assert response.status == 200
