"""Engines are watched truly: what a page says, whose word counts, and what is told when nothing can be known.

Pages come from strings and from the fake engine over real HTTP; rounds run in virtual time with scripted instances.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.bucket import Slots
from extproc.core.capacity import Gauge, Tuning
from extproc.core.events import Scraped
from extproc.core.policy import KvRules
from extproc.core.watermark import Reading, Watermark
from extproc.fakes import FakeSettings, Running, running
from extproc.probes.engines import Engines, Pool, Rounds
from extproc.probes.exposition import Page, Sample, Unreadable, highest
from extproc.settings import PROVIDERS, EngineMetrics, UpstreamSettings
from extproc.shared.memory import MemoryCapacity
from tests.doubles import HandClock, Observer, VirtualLoop, play

VLLM = Page(PROVIDERS["vllm"].metrics or EngineMetrics(()))
SGLANG = Page(PROVIDERS["sglang"].metrics or EngineMetrics(()))

VLLM_PAGE = b"""# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 11841.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="org/Qwen3 {32B} \\"x\\""} 7.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="org/Qwen3 {32B} \\"x\\""} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="org/Qwen3 {32B} \\"x\\""} 6.25e-01 1764450000000
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7644e+09
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.048576e+06
vllm:generation_tokens_total{engine="0",model_name="m"} 70.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="m"} 12.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_cpu_blocks="None",num_gpu_blocks="573"} 1.0
"""


# What a page says.


def test_a_page_of_vllm() -> None:
    """Exact names only, whatever stands in labels; blocks times their size is the cache; timestamps are left alone."""
    sample = VLLM.read(VLLM_PAGE)
    assert replace(sample, pulse=()) == Sample(0.625, waiting=2.0, running=7.0, preemptions=3.0, tokens=573 * 16)
    assert sample.pulse == (0.625, 2.0, 7.0, 3.0, 1048576.0, 70.0)
    assert VLLM.missing(VLLM_PAGE) == []


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (b'block_size="16",num_gpu_blocks="10"', 160.0),
        (b'block_size="16",kv_cache_size_tokens="999",num_gpu_blocks="10"', 999.0),
        (b'block_size="16",kv_cache_size_tokens="None",num_gpu_blocks="10"', 160.0),
        (b'block_size="16",num_gpu_blocks="None"', None),
        (b'enable_prefix_caching="True"', None),
    ],
)
def test_the_size_of_vllms_cache(config: bytes, tokens: float | None) -> None:
    """As it is told by whatever generation of vLLM, or not at all."""
    page = b"vllm:kv_cache_usage_perc 0.5\nvllm:cache_config_info{" + config + b"} 1\n"
    assert VLLM.read(page).tokens == tokens


def test_an_older_name_will_do() -> None:
    """Where both generations of a name are there, the newer counts."""
    assert VLLM.read(b'vllm:gpu_cache_usage_perc{model_name="m"} 0.3\n').usage == 0.3
    assert VLLM.read(b"vllm:gpu_cache_usage_perc 0.3\nvllm:kv_cache_usage_perc 0.4\n").usage == 0.4


def test_engines_of_one_instance_add_up() -> None:
    """Data parallel: the fullest counts, queues and caches add up."""
    rows = [
        f'vllm:{name}{{engine="{engine}",model_name="m"}} {value}'
        for name, values in {
            "kv_cache_usage_perc": (0.2, 0.9),
            "num_requests_waiting": (1, 2),
            "num_requests_running": (3, 4),
            "num_preemptions_total": (5, 6),
        }.items()
        for engine, value in enumerate(values)
    ]
    rows += [f'vllm:cache_config_info{{block_size="16",engine="{e}",num_gpu_blocks="10"}} 1' for e in (0, 1)]
    assert replace(VLLM.read("\n".join(rows).encode()), pulse=()) == Sample(0.9, 3.0, 7.0, 11.0, 320.0)


def test_ranks_of_one_engine_and_parts_of_a_total_count_once() -> None:
    """SGLang tells retractions once for each tensor-parallel rank, and counts of requests again for each priority."""
    page = b"""sglang:token_usage{model_name="m",priority="",tp_rank="0"} 0.42
sglang:num_queue_reqs{dp_rank="0",priority="",tp_rank="0"} 5
sglang:num_queue_reqs{dp_rank="0",priority="200",tp_rank="0"} 3
sglang:num_queue_reqs{dp_rank="0",priority="0",tp_rank="0"} 2
sglang:num_queue_reqs{dp_rank="1",priority="",tp_rank="0"} 7
sglang:num_queue_reqs_total{model_name="m"} 999
sglang:num_retracted_requests_total{tp_rank="0"} 4
sglang:num_retracted_requests_total{tp_rank="1"} 4
sglang:max_total_num_tokens{tp_rank="0"} 1000
sglang:max_total_num_tokens{tp_rank="1"} 1000
"""
    assert replace(SGLANG.read(page), pulse=()) == Sample(0.42, 12.0, 0.0, 4.0, 1000.0)
    assert SGLANG.missing(page) == ["sglang:num_running_reqs"]


def test_any_engine_by_the_names_of_its_metrics() -> None:
    """A name may pick the series with certain labels."""
    names = EngineMetrics(
        usage=('nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"}',), waiting="tgi_queue_size"
    )
    page = b"""nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="m",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m",version="1"} 0.5
tgi_queue_size 3
"""
    assert replace(Page(names).read(page), pulse=()) == Sample(0.5, waiting=3.0)
    with pytest.raises(ValueError, match="is not the name of a metric"):
        Page(EngineMetrics(("not a name",)))


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (b"", "no vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc on the page"),
        (b"<html><body>502</body></html>", "no vllm:kv_cache_usage_perc"),
        (b"# vllm:kv_cache_usage_perc 0.5\n", "no vllm:kv_cache_usage_perc"),
        (b"xvllm:kv_cache_usage_perc 0.5\n", "no vllm:kv_cache_usage_perc"),
        (b"vllm:kv_cache_usage_perc\n", "no vllm:kv_cache_usage_perc"),
        (b'vllm:kv_cache_usage_perc{a="b 0.5\n', "no vllm:kv_cache_usage_perc"),
        (b"vllm:kv_cache_usage_perc none\n", "no vllm:kv_cache_usage_perc"),
        (b"vllm:kv_cache_usage_perc NaN\n", "no vllm:kv_cache_usage_perc"),
        (b"vllm:kv_cache_usage_perc 37.5\n", "is no share of 0 to 1; is it in percent?"),
        (b"vllm:kv_cache_usage_perc -1\n", "is no share of 0 to 1"),
        (b"vllm:kv_cache_usage_perc +Inf\n", "is no share of 0 to 1"),
    ],
)
def test_what_cannot_be_a_share_is_not_guessed_at(page: bytes, message: str) -> None:
    """No reading is better than a wrong one; the words stay the same from second to second."""
    with pytest.raises(Unreadable) as unreadable:
        VLLM.read(page)
    assert message in str(unreadable.value)
    assert "37" not in str(unreadable.value)


def test_a_little_over_is_full() -> None:
    """Shares are sampled and rounded."""
    assert VLLM.read(b"vllm:kv_cache_usage_perc 1.001\n").usage == 1.0


def test_numbers_that_are_none_are_as_if_not_told() -> None:
    """A queue of NaN or infinity is no queue; a cache of no tokens has no known size."""
    page = b"vllm:kv_cache_usage_perc 0\nvllm:num_requests_waiting NaN\nvllm:num_requests_running +Inf\n"
    assert replace(VLLM.read(page), pulse=()) == Sample(0.0)
    assert SGLANG.read(b"sglang:token_usage 0\nsglang:max_total_num_tokens 0\n").tokens is None


ODD = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)


@given(
    st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), ODD, max_size=4),
    st.floats(0, 1),
    st.sampled_from(["{:f}", "{:e}", "{:.17g}", "{:G}", "+{:f}"]),
    st.sampled_from(["", " 1764450000000", "\t-1"]),
    st.sampled_from(["\n", ""]),
)
def test_whatever_labels_say(labels: dict[str, str], number: float, form: str, stamp: str, end: str) -> None:
    """Quotes, braces, line breaks and commas in label values mislead nobody; numbers may be written in any way."""

    def escaped(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    inside = ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items())
    block = f"{{{inside}}}" if labels else ""
    page = f"# x\nvllm:kv_cache_usage_perc{block} {form.format(number)}{stamp}{end}"
    assert VLLM.read(page.encode()).usage == pytest.approx(number, abs=1e-6)


@given(st.binary(max_size=300))
def test_no_page_breaks_it(noise: bytes) -> None:
    """Whatever an engine serves is a sample or Unreadable."""
    for page in (
        noise,
        b"vllm:kv_cache_usage_perc{" + noise,
        b"vllm:kv_cache_usage_perc 0.5\nvllm:cache_config_info" + noise,
    ):
        try:
            assert 0.0 <= VLLM.read(page).usage <= 1.0
        except Unreadable:
            continue


@given(st.binary(max_size=300))
def test_no_answer_of_a_prometheus_breaks_it(noise: bytes) -> None:
    """The same for answers to a query."""
    for answer in (noise, b'{"status":"success","data":' + noise + b"}"):
        try:
            assert 0.0 <= highest(answer) <= 1.0
        except Unreadable:
            continue


def vector(*values: str) -> bytes:
    """Prometheus' answer with these values."""
    rows = ",".join(
        f'{{"metric":{{"pod":"{i}"}},"value":[1764450000.781,"{value}"]}}' for i, value in enumerate(values)
    )
    return f'{{"status":"success","data":{{"resultType":"vector","result":[{rows}]}}}}'.encode()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (vector("0.25"), 0.25),
        (vector("0.25", "0.75", "NaN"), 0.75),
        (b'{"status":"success","data":{"resultType":"scalar","result":[1764450000.781,"0.5"]}}', 0.5),
        (vector(), "the query has no result"),
        (vector("NaN"), "the query has no result"),
        (vector("82"), "is it in percent?"),
        (b'{"status":"success","data":{"resultType":"matrix","result":[]}}', "not a scalar or a vector"),
        (b'{"status":"error","errorType":"bad_data","error":"parse error: 1:5"}', "vector: parse error: 1:5"),
        (b"<html>", "the answer is not a scalar or a vector"),
        (b"[]", "the answer is not a scalar or a vector"),
    ],
)
def test_the_largest_value_of_a_query(answer: bytes, told: float | str) -> None:
    """A scalar or a vector; anything else is no answer, and says why."""
    if isinstance(told, float):
        assert highest(answer) == told
    else:
        with pytest.raises(Unreadable, match=told.replace("?", r"\?")):
            highest(answer)


def realistic(lines: int = 1500) -> bytes:
    """A page of vLLM as it is in production: most of it are histograms."""
    rows = [VLLM_PAGE.decode()]
    histogram = 0
    while len(rows) < lines - VLLM_PAGE.count(b"\n"):
        name = f"vllm:request_{histogram}_time_seconds"
        rows += [f"# HELP {name} Histogram of time spent in some phase.", f"# TYPE {name} histogram"]
        rows += [
            f'{name}_bucket{{engine="0",le="{le}",model_name="org/Qwen3-32B-Instruct"}} {le}.0' for le in range(22)
        ]
        histogram += 1
    return "\n".join(rows).encode()


def test_a_long_page_costs_little() -> None:
    """1,500 lines in a small part of a millisecond of CPU; the bound leaves room for a busy machine."""
    page = realistic()
    assert page.count(b"\n") >= 1400
    spent = []
    for _ in range(20):
        began = time.thread_time()
        VLLM.read(page)
        spent.append(time.thread_time() - began)
    assert min(spent) < 0.002


# Rounds, in virtual time.

Answer = Sample | str | float | BaseException
"""What an instance does: answers, is unreadable, never answers within so many seconds, or shows a bug."""


class Script:
    """Instances that do what they are told."""

    def __init__(self, **instances: Answer) -> None:
        self.instances: dict[str, Answer] = instances
        self.asked: list[tuple[float, str]] = []
        self.at_once = 0

    async def addresses(self) -> Collection[str]:
        return list(self.instances)

    async def ask(self, address: str) -> Sample:
        loop = asyncio.get_running_loop()
        self.asked.append((loop.time(), address))
        self.at_once += 1
        try:
            answer = self.instances.get(address, "gone")
            if isinstance(answer, float):
                await asyncio.sleep(answer)
                answer = f"no answer in {answer:g} s"
            if isinstance(answer, str):
                raise Unreadable(answer)
            if isinstance(answer, BaseException):
                raise answer
            return answer
        finally:
            self.at_once -= 1


class Told(MemoryCapacity):
    """Capacity that keeps what it was told."""

    def __init__(self, clock: Any) -> None:
        self.slots = Slots(inf)
        super().__init__(clock, {"upstream/e/slots": self.slots, "upstream/e/kv": Watermark(KvRules())})
        self.readings: list[Reading | None] = []

    async def tune(self, tunings: Any) -> None:
        tuning: Tuning
        for tuning in tunings:
            assert isinstance(tuning, Gauge)
            assert tuning.key == "upstream/e/kv"
            self.readings.append(tuning.reading)
        await super().tune(tunings)

    @property
    def last(self) -> Reading | None:
        return self.readings[-1]


class Watched:
    """One pool that is watched in virtual time."""

    def __init__(
        self, loop: VirtualLoop, script: Script, *, pulse: bool = True, lag_s: float = 0.0, **rules: Any
    ) -> None:
        self.loop = loop
        self.script = script
        self.capacity = Told(loop)
        self.observer = Observer()
        self.kicks = 0
        pool = Pool(
            "e",
            KvRules(**{"stale_s": 5.0 + lag_s, **rules}),
            script,
            Rounds(0.5, lag_s=lag_s, pulse=pulse),
            self.capacity,
            loop,
            self.observer,
            self._kicked,
            chance=lambda: 0.5,
        )
        self.task = asyncio.create_task(pool.run())

    def _kicked(self) -> None:
        self.kicks += 1

    async def after(self, seconds: float) -> Reading | None:
        """What was told last, when so much time has passed."""
        await asyncio.sleep(seconds)
        if self.task.done():
            await self.task
        return self.capacity.last if self.capacity.readings else None

    async def stop(self) -> None:
        """End it; nothing may be left."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        assert self.script.at_once == 0


def watched(script: Script, scenario: Callable[[Watched], Awaitable[None]], **how: Any) -> None:
    """Play a scenario with a pool that is watched, and end it."""

    async def main(loop: VirtualLoop) -> None:
        there = Watched(loop, script, **how)
        try:
            await scenario(there)
        finally:
            await there.stop()

    play(main)


def test_the_fullest_instance_counts() -> None:
    """Usage and queue of the fullest, requests of all, the mean size, and how long ago they were asked."""
    a, b = Sample(0.2, 3.0, 5.0, 0.0, 1000.0), Sample(0.7, 0.0, 7.0, 0.0, 3000.0)

    async def scenario(there: Watched) -> None:
        reading = await there.after(0.2)
        assert reading == Reading(0.7, 3.0, 12.0, 2000.0, 2, 0.0, reading.age_s if reading else -1)
        assert reading.age_s == pytest.approx(0.0, abs=0.06)
        assert there.observer.of(Scraped) == [Scraped("e", pytest.approx(0.7 / 0.82), 0.0)]
        assert there.kicks == 1
        there.script.instances["b"] = Sample(0.9, running=1.0, tokens=3000.0)
        assert (await there.after(0.5)).usage == 0.9
        assert there.observer.of(Scraped)[-1].saturation == pytest.approx(0.9 / 0.82)

    watched(Script(a=a, b=b), scenario, pulse=False)


def test_the_size_of_a_cache_may_be_configured() -> None:
    """Whatever the engine says of it."""

    async def scenario(there: Watched) -> None:
        assert (await there.after(0.2)).tokens == 777

    watched(Script(a=Sample(0.2, tokens=1000.0)), scenario, tokens=777)


def test_a_slow_instance_holds_up_nobody_and_is_asked_once_at_a_time() -> None:
    """Others are told of every round; what it said last counts until it is stale, then it is left out."""

    async def scenario(there: Watched) -> None:
        assert (await there.after(0.2)).usage == 0.8
        there.script.instances["slow"] = 2.0
        for step in range(8):
            there.script.instances["quick"] = Sample(0.1 + step / 100)
            reading = await there.after(0.5)
            assert (reading.usage, reading.instances) == (0.8, 2)
        assert len([who for _, who in there.script.asked if who == "slow"]) <= 4
        assert there.script.at_once <= 1
        reading = await there.after(2.5)
        assert (reading.usage, reading.instances) == (0.17, 1)
        there.script.instances["slow"] = Sample(0.5)
        assert (await there.after(3.0)).instances == 2

    watched(Script(slow=Sample(0.8), quick=Sample(0.1)), scenario, pulse=False)


def test_the_age_is_that_of_the_instance_that_counts() -> None:
    """An old answer of the fullest makes the reading old; that of another does not."""

    async def scenario(there: Watched) -> None:
        await there.after(0.2)
        there.script.instances["slow"] = 3.0
        assert (await there.after(2.0)).age_s > 1.5
        there.script.instances["quick"] = Sample(0.9, running=1.0)
        reading = await there.after(1.0)
        assert (reading.usage, reading.age_s < 0.3) == (0.9, True)

    watched(Script(slow=Sample(0.8), quick=Sample(0.1)), scenario, pulse=False)


def test_metrics_that_are_lost_are_told_once_and_when_they_are_back() -> None:
    """Nothing is said of them while the last reading is young enough; then that there is none, once."""

    async def scenario(there: Watched) -> None:
        await there.after(0.2)
        there.script.instances["a"] = "status 404"
        await there.after(4.5)
        assert None not in there.capacity.readings
        assert await there.after(2.0) is None
        told = len(there.capacity.readings)
        await there.after(60.0)
        assert (len(there.capacity.readings), there.observer.of(Scraped)[-1]) == (told, Scraped("e", None))
        there.script.instances["a"] = Sample(0.4)
        assert (await there.after(0.6)).usage == 0.4

    watched(Script(a=Sample(0.2)), scenario)


def test_an_engine_that_never_answered_is_told_as_unknown() -> None:
    """From the first round on."""

    async def scenario(there: Watched) -> None:
        assert await there.after(0.3) is None
        assert there.capacity.readings == [None]

    watched(Script(a="connection failed"), scenario)


def test_a_page_that_stands_still_while_requests_run_is_as_old_as_its_last_movement() -> None:
    """So it goes stale although it is served; and it is news again once it moves."""
    hung = Sample(0.8, running=3.0, pulse=(0.8, 3.0, 70.0))

    async def scenario(there: Watched) -> None:
        await there.after(3.0)
        assert there.capacity.last.age_s == pytest.approx(3.0, abs=0.6)
        assert await there.after(3.0) is None
        there.script.instances["a"] = replace(hung, pulse=(0.8, 3.0, 71.0))
        assert (await there.after(0.5)).usage == 0.8

    watched(Script(a=hung), scenario)


def test_an_idle_page_may_stand_still_for_ever() -> None:
    """Nothing runs, nothing moves: the reading is as young as the answer. So with numbers that have no pulse."""
    for sample, pulse in ((Sample(0.0, pulse=(0.0,)), True), (Sample(0.8, running=3.0), False)):

        async def scenario(there: Watched) -> None:
            await there.after(60.0)
            assert None not in there.capacity.readings
            assert there.capacity.last.age_s < 0.1

        watched(Script(a=sample), scenario, pulse=pulse)


def test_an_idle_page_is_believed_when_a_request_has_just_left_for_it() -> None:
    """Only when requests of ours have been there for long, and no instance admits to them, does the page lie."""

    async def scenario(there: Watched) -> None:
        await there.after(60.0)
        there.capacity.slots.used = 1.0
        await there.after(2.0)
        assert there.capacity.last.age_s < 2.6
        assert None not in there.capacity.readings
        assert await there.after(4.0) is None
        there.capacity.slots.used = 0.0
        assert (await there.after(0.6)).usage == 0.0

    watched(Script(a=Sample(0.0, pulse=(0.0,)), b=Sample(0.0, pulse=(0.0,))), scenario)


def test_an_idle_instance_beside_a_busy_one_is_believed() -> None:
    """What we have there runs in the other."""

    async def scenario(there: Watched) -> None:
        there.capacity.slots.used = 1.0
        for step in range(40):
            there.script.instances["busy"] = Sample(0.5, running=1.0, pulse=(step,))
            await there.after(0.5)
            assert there.capacity.last.instances == 2

    watched(Script(busy=Sample(0.5, running=1.0), idle=Sample(0.0, pulse=(0.0,))), scenario)


def test_preemptions_are_counted_from_one_reading_to_the_next() -> None:
    """Not those from before it was watched; a count that fell is that of an engine that began anew."""
    steps = [(7.0, 0.0), (7.0, 0.0), (9.0, 2.0), (9.0, 0.0), (3.0, 3.0), (3.0, 0.0)]

    async def scenario(there: Watched) -> None:
        for count, since in steps:
            there.script.instances["a"] = Sample(0.5, preemptions=count)
            assert ((await there.after(0.5)).preemptions, count) == (since, count)
        assert sum(event.preemptions for event in there.observer.of(Scraped)) == 5.0

    watched(Script(a=Sample(0.5, preemptions=7.0), b=Sample(0.1, preemptions=100.0)), scenario)


def test_preemptions_that_nobody_could_be_told_of_are_not_lost() -> None:
    """They come with the next reading."""

    async def scenario(there: Watched) -> None:
        await there.after(0.2)
        there.script.instances["a"] = "status 500"
        assert await there.after(6.0) is None
        there.script.instances["a"] = Sample(0.5, preemptions=4.0)
        assert (await there.after(0.6)).preemptions == 4.0

    watched(Script(a=Sample(0.5)), scenario)


def test_instances_come_and_go() -> None:
    """A name's addresses change; who is gone does not count, and is not waited for."""

    async def scenario(there: Watched) -> None:
        assert (await there.after(0.2)).instances == 1
        there.script.instances = {"b": Sample(0.3), "c": 30.0}
        reading = await there.after(1.0)
        assert (reading.usage, reading.instances) == (0.3, 1)
        there.script.instances = {"b": Sample(0.4)}
        await there.after(1.0)
        assert there.script.at_once == 0
        there.script.instances = {}
        assert await there.after(1.0) is None

    watched(Script(a=Sample(0.9)), scenario)


def test_trouble_is_told_once_for_each_kind_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    """Not once a second; and only what is new."""

    async def scenario(there: Watched) -> None:
        await there.after(0.2)
        for answer, seconds in (("status 404", 20.0), ("connection failed", 20.0), ("status 404", 20.0)):
            there.script.instances["a"] = answer
            await there.after(seconds)
        there.script.instances["a"] = Sample(0.1)
        await there.after(20.0)
        there.script.instances = {}
        await there.after(20.0)

    with caplog.at_level(logging.WARNING, "tidegate"):
        watched(Script(a=Sample(0.1), b=Sample(0.2)), scenario)
    assert [record.getMessage() for record in caplog.records] == [
        "metrics of e: status 404 (2 of 2 instances tell)",
        "metrics of e: connection failed (1 of 2 instances tell)",
        "metrics of e: all instances tell again",
        "metrics of e: its name has no address (0 of 0 instances tell)",
    ]


def test_standing_still_is_told_only_when_somebody_is_kept_waiting(caplog: pytest.LogCaptureFixture) -> None:
    """Some engines show their last moment while they rest."""
    last = Sample(0.3, running=1.0, pulse=(1.0,))

    async def scenario(there: Watched) -> None:
        await there.after(60.0)
        assert caplog.records == []
        there.capacity.slots.used = 1.0
        await there.after(60.0)

    with caplog.at_level(logging.WARNING, "tidegate"):
        watched(Script(a=last), scenario)
    assert [record.getMessage() for record in caplog.records] == [
        "metrics of e: numbers stand still though requests run (0 of 1 instances tell)"
    ]


def test_a_bug_in_asking_ends_the_watch() -> None:
    """It is a duty of the service: one that dies must not look alive."""

    async def scenario(there: Watched) -> None:
        with pytest.raises(ZeroDivisionError):
            await there.after(1.0)

    watched(Script(a=ZeroDivisionError()), scenario)


def test_what_a_prometheus_tells_is_older_than_its_answer() -> None:
    """By its own interval: so old is the reading, and so much later it is stale."""

    async def scenario(there: Watched) -> None:
        assert (await there.after(0.2)).age_s == pytest.approx(15.0, abs=0.1)
        there.script.instances["p"] = "status 503"
        await there.after(4.5)
        assert None not in there.capacity.readings
        assert await there.after(2.0) is None

    watched(Script(p=Sample(0.4)), scenario, pulse=False, lag_s=15.0)


def test_rounds_keep_their_pace() -> None:
    """One question per instance and interval, however long the answers take."""

    async def scenario(there: Watched) -> None:
        await there.after(100.0)
        assert 199 <= len(there.script.asked) <= 202

    watched(Script(a=Sample(0.5)), scenario)


class Restless(Script):
    """Instances that come and go, hang, fail and answer late.

    said: of each that is there, when it was last asked with success, and when it answered; usages: all that was said.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.asking: set[str] = set()
        self.said: dict[str, tuple[float, float]] = {}
        self.usages: set[float] = set()

    def stir(self) -> None:
        """Something changes."""
        name = f"i{self.rng.randrange(4)}"
        if name in self.instances and self.rng.random() < 0.3:
            del self.instances[name]
            self.said.pop(name, None)
        else:
            self.instances[name] = self.rng.choice([Sample(self.rng.random()), "status 500", 0.3, 8.0])

    async def ask(self, address: str) -> Sample:
        assert address not in self.asking, "asked twice at once"
        loop = asyncio.get_running_loop()
        asked = loop.time()
        self.asking.add(address)
        try:
            await asyncio.sleep(self.rng.choice([0.0, 0.01, 0.4]))
            sample = await super().ask(address)
        finally:
            self.asking.remove(address)
        self.said[address] = asked, loop.time()
        self.usages.add(sample.usage)
        return sample


@pytest.mark.parametrize("seed", range(60))
def test_whatever_instances_do(seed: int) -> None:
    """Over random histories: none is asked twice at once; every reading is what somebody said, and not stale; there is
    one as long as somebody has said something lately, and none when nobody has.
    """
    print(f"seed {seed}")  # noqa: T201 - to play it again
    script = Restless(random.Random(seed))

    async def scenario(there: Watched) -> None:
        for _ in range(150):
            script.stir()
            reading = await there.after(script.rng.uniform(1.3, 2.5))
            now = there.loop.time()
            if any(now - asked < 4.0 and now - answered > 0.8 for asked, answered in script.said.values()):
                assert reading is not None
            if all(now - asked > 6.5 for asked, _ in script.said.values()):
                assert reading is None
        told = [reading for reading in there.capacity.readings if reading is not None]
        assert len(told) > 50
        assert all(reading.usage in script.usages and 0.0 <= reading.age_s <= 5.0 for reading in told)

    watched(script, scenario, pulse=False)


# Over real HTTP.


@asynccontextmanager
async def fake_engines(*settings: dict[str, Any]) -> AsyncIterator[list[Running]]:
    """Fake engines on addresses of this machine, all on the port of the first."""
    async with AsyncExitStack() as stack:
        found: list[Running] = []
        for i, given in enumerate(settings):
            port = int(found[0].url.rpartition(":")[2]) if found else 0
            fake = FakeSettings(name=f"e{i}", port=port, host=f"127.0.0.{i + 1}", **given)
            found.append(await stack.enter_async_context(running(fake)))
        yield found


@asynccontextmanager
async def watching(**upstream: Any) -> AsyncIterator[Told]:
    """Watch one upstream for real. Where nothing is to be known soon, its `kv` has to say how soon."""
    kv = {"scrape_s": 0.05, "stale_s": 60.0, **upstream.pop("kv", {})}
    settings = UpstreamSettings.model_validate({"provider": "vllm", "kv": kv, **upstream})
    clock = asyncio.get_running_loop()
    capacity = Told(clock)
    task = asyncio.create_task(Engines({"e": settings}, capacity, clock, Observer(), lambda: None).run())
    try:
        yield capacity
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def told(capacity: Told, holds: Callable[[Reading | None], bool]) -> Reading | None:
    """The first reading that is as it should be."""
    async with asyncio.timeout(120):
        while not (capacity.readings and holds(capacity.last)):  # noqa: ASYNC110 - a look now and then will do
            await asyncio.sleep(0.01)
    return capacity.last


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Let every name have these addresses; returns the list that is looked at."""
    known = list(addresses)

    async def getaddrinfo(_loop: Any, _host: str, port: int, **_more: Any) -> list[Any]:
        if not known:
            raise socket.gaierror
        family = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in known]
        return [(f, socket.SOCK_STREAM, 6, "", (address, port)) for f, address in zip(family, known, strict=True)]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return known


async def test_every_address_of_a_name_is_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A headless service: the fullest counts. Of two families only IPv4 does, as with the router."""
    async with fake_engines({"kv_usage": 0.25, "kv_tokens": 1600}, {"kv_usage": 0.75, "kv_tokens": 3200}) as engines:
        port = engines[0].url.rpartition(":")[2]
        resolve_to(monkeypatch, "127.0.0.1", "127.0.0.2", "127.0.0.1", "::1")
        async with watching(url=f"http://engines.example:{port}", kv={"stale_s": 3.0}) as capacity:
            reading = await told(capacity, lambda r: r is not None and r.instances == 2)
            assert (reading.usage, reading.tokens) == (0.75, 2400.0)
            assert caplog.text == ""
            engines[1].provider.change({"metrics": "missing"})
            assert (await told(capacity, lambda r: r is not None and r.instances == 1)).usage == 0.25


async def test_addresses_are_looked_up_again_and_kept_when_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names fail more often than what is behind them."""
    monkeypatch.setattr("extproc.probes.sources.RESOLVE_EVERY_S", 0.1)
    async with fake_engines({"kv_usage": 0.25}, {"kv_usage": 0.75}) as engines:
        port = engines[0].url.rpartition(":")[2]
        known = resolve_to(monkeypatch, "127.0.0.1")
        async with watching(url=f"http://engines.example:{port}") as capacity:
            assert (await told(capacity, lambda r: r is not None)).usage == 0.25
            known[:] = ["127.0.0.2"]
            assert (await told(capacity, lambda r: r is not None and r.usage == 0.75)).instances == 1
            known.clear()
            await asyncio.sleep(0.5)
            assert capacity.last.usage == 0.75


async def test_a_name_that_nobody_knows_is_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no end of the watch."""
    resolve_to(monkeypatch)
    async with watching(url="http://engines.example:1") as capacity:
        assert await told(capacity, lambda r: r is None) is None


@pytest.mark.parametrize("how", ["missing", "garbage", "slow", "percent"])
async def test_a_page_that_went_wrong_is_no_reading(how: str) -> None:
    """404, not a page, too late, in percent: after stale_s nothing is known; when it is mended it is."""
    async with (
        fake_engines({"kv_usage": 0.5, "metrics_delay_s": 30.0}) as [engine],
        watching(url=engine.url, kv={"stale_s": 1.0}) as capacity,
    ):
        assert (await told(capacity, lambda r: r is not None)).usage == 0.5
        engine.provider.change({"metrics": how})
        assert await told(capacity, lambda r: r is None) is None
        engine.provider.change({"metrics": "told"})
        assert (await told(capacity, lambda r: r is not None)).usage == 0.5


async def test_nobody_there_is_no_reading() -> None:
    """A refused connection is as good as no metrics."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with watching(url=f"http://127.0.0.1:{unused.getsockname()[1]}") as capacity:
            assert await told(capacity, lambda r: r is None) is None


async def test_a_fake_sglang_is_read_as_one() -> None:
    """Its own names, and the total of what it tells by priority."""
    settings = {"engine": "sglang", "kv_usage": 0.5, "kv_tokens": 1000}
    async with fake_engines(settings) as [engine], watching(provider="sglang", url=engine.url) as capacity:
        reading = await told(capacity, lambda r: r is not None)
        assert (reading.usage, reading.tokens, reading.running) == (0.5, 1000.0, 0.0)


@pytest.mark.parametrize(
    ("answers", "asks"),
    [
        ("some", ["some", "some", "some"]),
        ("everything", ["some", "some", "some"]),
        ("nothing", ["some", "all", "all"]),
        ("404", ["some", "all", "all"]),
    ],
)
async def test_an_engine_is_asked_for_what_is_wanted_only(answers: str, asks: list[str]) -> None:
    """Its whole page costs it more; who cannot choose serves all of it, or is asked for all from then on."""
    asked: list[str] = []
    names: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        chosen = request.query.getall("name[]", [])
        asked.append("some" if chosen else "all")
        names.extend(chosen)
        if chosen and answers == "404":
            raise web.HTTPNotFound
        return web.Response(body=b"" if chosen and answers == "nothing" else VLLM_PAGE)

    async with serving(answer) as port, watching(url=f"http://127.0.0.1:{port}", kv={"path": "/m?a=b"}) as capacity:
        assert (await told(capacity, lambda r: r is not None)).usage == 0.625
        await told(capacity, lambda _: len(asked) >= 3)
    assert asked[:3] == asks
    assert {"vllm:kv_cache_usage_perc", "vllm:cache_config_info", "vllm:generation_tokens_total"} <= set(names)


@asynccontextmanager
async def serving(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], tls: Any = None
) -> AsyncIterator[int]:
    """A server of our own on a free port of this machine."""
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_one_prometheus_instead_of_many_instances() -> None:
    """Its query, url-encoded; the largest value; an error of its own is told in its words."""
    queries = []
    answers = [vector("0.1", "0.6")]

    async def answer(request: web.Request) -> web.Response:
        queries.append((request.path, request.query["query"]))
        return web.Response(body=answers[-1], status=200 if b"success" in answers[-1] else 400)

    query = 'max(vllm:kv_cache_usage_perc{job="a&b"})'
    async with serving(answer) as port:
        kv = {"prometheus": f"http://127.0.0.1:{port}/prom", "query": query, "prometheus_lag_s": 0.2, "stale_s": 1.0}
        async with watching(url="http://engines.example:1", kv=kv) as capacity:
            assert (await told(capacity, lambda r: r is not None)).usage == 0.6
            answers.append(b'{"status":"error","error":"parse error"}')
            assert await told(capacity, lambda r: r is None) is None
    assert set(queries) == {("/prom/api/v1/query", query)}


async def test_a_page_without_end_is_cut(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read beyond a bound."""
    monkeypatch.setattr("extproc.probes.sources.PAGE_MAX_BYTES", 1 << 20)

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"# nothing\n" * 6000)

    async with serving(answer) as port, watching(url=f"http://127.0.0.1:{port}") as capacity:
        await told(capacity, lambda _: "the page is larger than 1 MiB" in caplog.text)
        assert capacity.last is None


async def test_redirects_are_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    """A page elsewhere is not this instance's."""

    async def answer(_: web.Request) -> web.Response:
        raise web.HTTPFound("http://127.0.0.1:1/metrics")

    async with serving(answer) as port, watching(url=f"http://127.0.0.1:{port}") as capacity:
        await told(capacity, lambda _: "status 302" in caplog.text)
        assert capacity.last is None


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for engines.example, trusted by nobody else, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    files = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=engines"]
    command += ["-addext", "subjectAltName=DNS:engines.example", "-out", files[0], "-keyout", files[1]]
    subprocess.run(command, check=True, capture_output=True)
    return files


@pytest.mark.parametrize(
    ("ca", "host", "trouble"),
    [
        ("own", "engines.example", ""),
        ("own", "other.example", "its certificate is not trusted"),
        ("system", "engines.example", "its certificate is not trusted"),
        ("gone", "engines.example", "cannot be read here"),
    ],
)
async def test_engines_behind_tls(
    certificate: tuple[str, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    ca: str,
    host: str,
    trouble: str,
) -> None:
    """Each address is asked under the upstream's name, and its certificate wanted for that name."""
    resolve_to(monkeypatch, "127.0.0.1")
    hosts = set()

    async def answer(request: web.Request) -> web.Response:
        hosts.add(request.headers["host"])
        return web.Response(body=VLLM_PAGE)

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    ca_file = {"own": certificate[0], "system": None, "gone": str(Path(certificate[0]).with_name("none.pem"))}[ca]
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serving(answer, context))
        there = watching(url=f"https://{host}:{port}", ca_file=ca_file)
        capacity = await stack.enter_async_context(there)
        reading = await told(capacity, lambda r: r is not None or (trouble and trouble in caplog.text))
        if trouble:
            assert reading is None
        else:
            assert reading.usage == 0.625
            assert hosts == {f"engines.example:{port}"}


async def test_nothing_to_watch() -> None:
    """Without `kv` there is nothing to do."""
    clock = HandClock()
    plain = UpstreamSettings.model_validate({"provider": "vllm", "url": "http://127.0.0.1:1", "concurrency": 1})
    await Engines({"e": plain}, Told(clock), clock, Observer(), lambda: None).run()
