"""Clients that come back: pauses, patience, what is tried again, and the stories that come of it."""

import asyncio
import random

import pytest

from extproc.sim.callers import Caller, Fate, Story, pause_s
from extproc.sim.envoy import Reply
from extproc.sim.scenario import Clients
from extproc.sim.traffic import Job
from extproc.sim.virtual import VirtualLoop, play

SERVED = Reply(200, {}, whole=True, admitted=True, upstream="a")


def job(*, stream: bool = True, **habits) -> Job:
    return Job(3, 0.0, 100, 50, 64, 100, "P1", "t", "s", stream, Clients(**habits))


class Desk:
    """Answers with `replies` in turn, each after `takes_s`, an answer beginning after `first_s`."""

    def __init__(self, loop: VirtualLoop, *replies: Reply, takes_s: float = 1.0, first_s: float | None = None) -> None:
        self.loop = loop
        self.replies = list(replies)
        self.takes_s = takes_s
        self.first_s = first_s
        self.came: list[float] = []
        self.open = 0
        self.most = 0

    async def call(self, _: Job, attempt: int, first) -> Reply:
        assert attempt == len(self.came)
        self.came.append(self.loop.time())
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            if self.first_s is not None:
                await asyncio.sleep(self.first_s)
                first()
            await asyncio.sleep(self.takes_s)
        finally:
            self.open -= 1
        return self.replies.pop(0)


def told(job: Job, *replies: Reply, **desk) -> tuple[Story, Desk, list[float]]:
    """The story of one job, the desk, and the pauses between its tries."""

    async def one(loop: VirtualLoop) -> tuple[Story, Desk]:
        counter, story = Desk(loop, *replies, **desk), Story(job)
        caller = Caller(counter, loop, random.Random(1))
        await caller.want(job, story)
        await caller.quiet()
        assert story.over
        assert counter.open == 0
        return story, counter

    story, counter = play(one)
    took = desk.get("takes_s", 1.0)
    return story, counter, [b - a - took for a, b in zip(counter.came, counter.came[1:], strict=False)]


def refused(status: int = 429, reason: str = "queue_timeout", **headers: str) -> Reply:
    return Reply(status, {"x-tidegate-reason": reason, **{name.replace("_", "-"): v for name, v in headers.items()}})


def test_an_answer_ends_the_story():
    """One try, and when its first token came."""
    story, _, _ = told(job(), SERVED, first_s=0.5)
    assert (story.fate, story.tries, story.upstream) == (Fate.SERVED, 1, "a")
    assert story.first_s == pytest.approx(0.5)


def test_pauses_double_up_to_eight_seconds_and_are_at_most_a_quarter_shorter():
    """As the SDKs compute them."""
    assert pause_s({}, 0, 0.0) == (0.5, False)
    assert pause_s({}, 3, 0.0) == (4.0, False)
    assert pause_s({}, 10, 0.0) == (8.0, False)
    assert pause_s({}, 10, 1.0) == (6.0, False)


@pytest.mark.parametrize(
    ("headers", "pause"),
    [
        ({"retry-after-ms": "1500", "retry-after": "9"}, (1.5, True)),
        ({"retry-after": "9"}, (9.0, True)),
        ({"retry-after": "60"}, (60.0, True)),
        ({"retry-after": "61"}, (0.5, False)),
        ({"retry-after": "0"}, (0.5, False)),
        ({"retry-after": "-3"}, (0.5, False)),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, (0.5, False)),
    ],
)
def test_what_the_server_says_is_obeyed_up_to_a_minute(headers, pause):
    """Milliseconds before seconds."""
    assert pause_s(headers, 0, 0.0) == pause


def test_a_retry_at_the_time_it_was_told_is_a_promise_kept_or_broken():
    """The first retry is refused again, the second goes."""
    story, _, pauses = told(job(), refused(retry_after="3"), refused(retry_after="2"), SERVED)
    assert pauses == [pytest.approx(3), pytest.approx(2)]
    assert [(back.after_s, back.went) for back in story.returns] == [(3.0, False), (2.0, True)]
    assert story.fate is Fate.SERVED


def test_a_providers_own_refusal_promises_nothing():
    """Only what the gateway said is its promise."""
    story, _, pauses = told(job(), Reply(429, {"retry-after": "3"}), SERVED)
    assert pauses == [pytest.approx(3)]
    assert story.returns == []


@pytest.mark.parametrize(
    ("reply", "tries"),
    [
        (Reply(429, {}), 3),
        (Reply(503, {}), 3),
        (Reply(409, {}), 3),
        (Reply(400, {}), 1),
        (Reply(429, {"x-should-retry": "false"}), 1),
        (Reply(403, {"x-should-retry": "true"}), 3),
        (Reply(200, {}, whole=False), 1),
    ],
)
def test_what_is_tried_again(reply, tries):
    """Two retries; an answer that broke off is not repaired."""
    story, _, _ = told(job(), *[reply] * 3)
    assert story.tries == tries


@pytest.mark.parametrize(
    ("reply", "fate", "word"),
    [
        (refused(503, "lane_full", x_should_retry="false"), Fate.SHED, "lane_full"),
        (refused(429, "queue_timeout", x_should_retry="false"), Fate.EXPIRED, "queue_timeout"),
        (refused(504, "deadline_passed", x_should_retry="false"), Fate.EXPIRED, "deadline_passed"),
        (refused(503, "upstream_failed", x_should_retry="false"), Fate.FAILED, "upstream_failed"),
        (Reply(429, {"x-should-retry": "false"}), Fate.FAILED, "http 429"),
        (Reply(200, {}, whole=False), Fate.FAILED, "cut"),
    ],
)
def test_every_end_has_a_word(reply, fate, word):
    """The gateway's refusals are told from failures."""
    story, _, _ = told(job(), reply)
    assert (story.fate, story.word, story.first_s) == (fate, word, None)


def test_the_impatient_leave_and_try_again():
    """Two seconds each time, and nothing is left open behind them."""
    story, desk, _ = told(job(timeout_s=2.0, retries=3), SERVED, takes_s=60.0)
    assert (story.fate, story.word, story.tries) == (Fate.GONE, "gave up", 4)
    assert story.total_s == pytest.approx(8 + 0.5 + 1 + 2, abs=1.0)
    assert desk.most == 1


def test_a_stream_that_has_begun_is_read_to_its_end():
    """Patience is for the first token."""
    story, _, _ = told(job(timeout_s=2.0), SERVED, first_s=1.9, takes_s=500.0)
    assert story.fate is Fate.SERVED


def test_a_json_answer_has_to_be_whole_in_time():
    """Its first byte is its last."""
    story, _, _ = told(job(stream=False, timeout_s=2.0, retries=0), SERVED, first_s=1.9, takes_s=1.0)
    assert story.fate is Fate.GONE


def test_a_connection_may_linger_though_its_client_has_left():
    """Then two are open at a time, and both end."""
    story, desk, _ = told(job(timeout_s=2.0, retries=1, lingers_s=10.0), takes_s=60.0)
    assert story.tries == 2
    assert desk.most == 2
