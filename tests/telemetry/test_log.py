"""What the log says, of what, and how much of it."""

from __future__ import annotations

import io
import json
import logging
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from extproc.core.breaker import Outcome, Sign, State
from extproc.core.events import (
    Admitted,
    AttemptFailed,
    BreakerMoved,
    BudgetUsed,
    Event,
    Left,
    Observed,
    Queued,
    Refused,
    Settled,
    SizesMoved,
    Waited,
)
from extproc.core.refusal import Reason
from extproc.core.request import Request, Usage
from extproc.telemetry.dossiers import Dossiers
from extproc.telemetry.log import JsonLines, Logging, LogSettings, level_of
from tests.doubles import request

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


class Log:
    """The log of a service: its lines, as they are written to a stream that takes bytes of UTF-8."""

    def __init__(self) -> None:
        self.raw = io.BytesIO()
        self._text = io.TextIOWrapper(self.raw, "utf-8", write_through=True)
        self.handler = logging.StreamHandler(self._text)
        self.handler.setFormatter(JsonLines())
        self.dossiers = Dossiers(50)
        self.logging: Logging
        self.now = 100.0

    def opens(self, override: str = "", **settings: Any) -> Logging:
        """It goes by these settings."""
        chance = random.Random(7).random
        rest = {"chance": chance, "clock": lambda: self.now}
        self.logging = Logging(LogSettings(**settings), self.dossiers, override=override, **rest)
        return self.logging

    def tell(self, *events: Event) -> None:
        """As the service tells its listeners."""
        for event in events:
            self.dossiers(event)
            self.logging(event)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All lines so far, each of which has to be JSON by the book."""
        return [json.loads(line, parse_constant=_none) for line in self.raw.getvalue().splitlines()]


def _none(word: str) -> Any:
    raise AssertionError(f"{word} is no JSON")


@pytest.fixture
def log() -> Iterator[Log]:
    one, logger = Log(), logging.getLogger("tidegate")
    level = logger.level
    logger.addHandler(one.handler)
    yield one
    logger.removeHandler(one.handler)
    logger.setLevel(level)


def made(number: int = 1, **more: Any) -> Request:
    return replace(request(tenant="search", lane="P1"), ticket=f"p-{number}", **({"id": f"r{number}"} | more))


def waited(one: Request, seconds: float) -> tuple[Event, ...]:
    """Its life, when it waited so long and was served."""
    usage = Usage(10, 20)
    return (
        Queued(one, 2.0, 3, ("upstream/a/slots",)),
        Waited(one, seconds),
        Admitted(one, ("a",), seconds),
        Settled(one, "a", 1, 200, usage, seconds),
    )


def refused(one: Request | None, reason: Reason = Reason.LANE_FULL, **more: Any) -> Refused:
    name = one.id if one else "unread"
    return Refused(reason, 503, "search", "P1", 0.0, name, one, **more)


@pytest.mark.parametrize(("status", "reason"), [(503, "upstream_failed"), (504, "deadline_passed"), (400, "")])
def test_one_that_no_upstream_answered_leaves_a_line(log: Log, status: int, reason: str) -> None:
    """Its caller was told a reason, as who is refused is; an error of its own that was passed on is none."""
    log.opens(level="info")
    one = made()
    log.tell(Admitted(one, ("a",), 0.0), Settled(one, "", 1, status, None, 0.0, duration_s=0.5))
    found = [(line["message"], line["decision"]["reason"]) for line in log.lines]
    assert found == ([("failed", reason)] if reason else [])


@pytest.mark.parametrize("status", [0, 200])
def test_one_that_was_evicted_while_it_ran_leaves_a_line(log: Log, status: int) -> None:
    """As one that was evicted in line, by the same word; whether its answer had begun or not."""
    log.opens(level="info")
    one = made()
    log.tell(Admitted(one, ("a",), 0.0), Settled(one, "a", 1, status, None, 0.0, duration_s=0.5, evicted=True))
    [line] = log.lines
    assert (line["message"], line["decision"]["state"], line["decision"]["reason"]) == ("evicted",) * 3


def test_a_refused_request_leaves_one_line_that_explains_it(log: Log) -> None:
    """With its id and trace; a request that nobody read has one, too."""
    log.opens(level="info")
    log.tell(refused(made(trace=PARENT), retry_after=4.0), refused(None, Reason.BAD_REQUEST, trace=PARENT))
    full, bad = log.lines
    assert (full["level"], full["message"], full["request_id"], full["trace_id"]) == ("info", "refused", "r1", TRACE)
    assert full["decision"]["refusal"]["reason"] == "lane_full"
    assert full["decision"]["refusal"]["retry_after_s"] == 4.0
    assert full["decision"]["caller"]["tenant"] == "search"
    assert full["time"] > 1_600_000_000
    assert (bad["request_id"], bad["trace_id"], bad["decision"]["reason"]) == ("unread", TRACE, "bad_request")


def test_a_request_that_waited_long_leaves_one_when_its_books_are_closed(log: Log) -> None:
    """Also one whose client left; who waited less leaves none."""
    log.opens(level="info", slow_s=5)
    *before, settled = waited(made(1), 5.0)
    log.tell(*before)
    assert log.lines == []
    log.tell(settled, *waited(made(2), 4.9), Left(made(3), 6.0), Left(made(4), 1.0))
    slow, left = log.lines
    assert (slow["message"], slow["request_id"], slow["decision"]["state"]) == ("slow", "r1", "served")
    assert slow["decision"]["queue"]["binding"] == [{"key": "upstream/a/slots", "words": "a free slot at a"}]
    assert slow["decision"]["settlement"]["used"]["total"] == 30
    assert (left["message"], left["request_id"], left["decision"]["state"]) == ("slow", "r3", "left")
    assert "trace_id" not in slow


def test_one_that_was_refused_though_it_had_gone_is_told_as_refused(log: Log) -> None:
    """A later copy took its place in the moment that it was let go."""
    log.opens(level="info")
    one = made()
    log.tell(Admitted(one, ("a",), 0.0), refused(one, Reason.EVICTED), Settled(one, "a", 1, 0, None, 0.0))
    [line] = log.lines
    assert (line["message"], line["decision"]["reason"]) == ("refused", "evicted")


def test_how_much_is_written_can_be_changed_while_it_runs(log: Log) -> None:
    """Level, bound and share, each by itself."""
    logs = log.opens(level="warning")
    log.tell(refused(made(1)))
    assert log.lines == []
    logs.set_log(level="info")
    assert logs.settings == LogSettings(level="info")
    assert logs.state() == {"level": "info", "slow_s": 10.0, "sample": 1.0}
    log.tell(refused(made(2)))
    logs.set_log(sample=0.0)
    log.tell(refused(made(3)))
    logs.set_log(slow_s=1.0, sample=1.0)
    log.tell(*waited(made(4), 2.0))
    logs.set_log(level="error")
    log.tell(refused(made(5)))
    assert [line["request_id"] for line in log.lines] == ["r2", "r4"]
    assert logs.settings == LogSettings(level="error", slow_s=1.0, sample=1.0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"level": "loud"}, "log.level: Input should be 'debug', 'info', 'warning' or 'error'"),
        ({"slow_s": -1}, "log.slow_s: "),
        ({"sample": 1.5}, "log.sample: "),
        ({"sample": float("nan")}, "log.sample: "),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(log: Log, wrong: dict[str, Any], words: str) -> None:
    """And changes nothing."""
    logs = log.opens(level="info")
    with pytest.raises(ValueError, match=r"^log") as caught:
        logs.set_log(**{"slow_s": 3.0, **wrong})
    assert str(caught.value).startswith(words)
    assert logs.settings == LogSettings(level="info")


def test_of_decisions_a_share_is_drawn_by_a_chance_that_can_be_given(log: Log) -> None:
    """The same chance draws the same."""
    log.opens(level="info", sample=0.25)
    chance = random.Random(7)
    expected = [f"r{number}" for number in range(400) if chance.random() < 0.25]
    for number in range(400):
        log.now += 0.1
        log.tell(refused(made(number)))
    assert [line["request_id"] for line in log.lines] == expected
    assert 60 < len(expected) < 140


def test_the_environments_level_comes_before_that_of_the_config(log: Log) -> None:
    """Also of one that is reloaded; who changes it at run time has the last word, until the config changes."""
    logs = log.opens(override=level_of({"TIDEGATE_LOG": "INFO"}), level="error")
    assert logs.settings.level == "info"
    logs.follow(LogSettings(level="error"))
    logs.set_log(level="debug")
    logs.follow(LogSettings(level="error"))
    assert logs.settings.level == "debug"
    logs.follow(LogSettings(level="warning", slow_s=3.0))
    assert logs.settings == LogSettings(level="info", slow_s=3.0)
    assert level_of({}) == level_of({"TIDEGATE_LOG": ""}) == ""
    with pytest.raises(ValueError, match=r"^TIDEGATE_LOG: Input should be 'debug', 'info', "):
        level_of({"TIDEGATE_LOG": "loud"})


def test_no_name_breaks_a_line(log: Log) -> None:
    """Neither by what it is made of, nor by its length; numbers that JSON does not know are none."""
    log.opens(level="debug", slow_s=1.0)
    names = [
        "\n{}",
        '"}\n{"level":"error"',
        "\u2028\u0085\x1b[2J",
        "\ud800",
        "\x00",
        "名字",
        "\u202egnp",
        "x" * 100_000,
    ]
    for number, name in enumerate(names):
        one = made(number, id=name, tenant=name, session=replace(request().session, id=name), model=name)
        log.tell(
            replace(refused(one, retry_after=float("inf"), detail=name), tenant=name),
            Observed(one, Reason.LANE_FULL, float("inf")),
            *waited(replace(one, ticket=f"q-{number}"), float("nan")),
            *waited(replace(one, ticket=f"s-{number}"), 5.0),
            BreakerMoved(name, State.CLOSED, State.OPEN, name, "", {name: float("inf")}, (name,)),
        )
    lines = log.lines
    assert all(line.isascii() for line in log.raw.getvalue().splitlines())
    assert {line["level"] for line in lines} == {"info", "warning"}
    assert max(len(json.dumps(line)) for line in lines) < 20_000
    assert {line["request_id"] for line in lines if "名" in str(line.get("request_id"))} == {"名字"}


def test_lines_of_events_name_the_request(log: Log) -> None:
    """Also where the event knows its ticket only."""
    log.opens(level="info")
    one = made(trace=PARENT)
    log.tell(Admitted(one, ("a",), 0.0), AttemptFailed("a", Outcome.FAILURE, 500, "server_error", "p-1"))
    log.tell(AttemptFailed("a", Outcome.FAILURE, 500, "", "unknown"), Observed(one, None))
    failed, unknown, observed = log.lines
    assert {name: failed[name] for name in ("request_id", "ticket", "tenant", "lane", "trace_id", "upstream")} == {
        "request_id": "r1", "ticket": "p-1", "tenant": "search", "lane": "P1", "trace_id": TRACE, "upstream": "a",
    }  # fmt: skip
    assert (failed["message"], failed["status"], failed["error"]) == ("AttemptFailed", 500, "server_error")
    assert (unknown["ticket"], "request_id" in unknown) == ("unknown", False)
    assert (observed["request_id"], observed["message"], observed["reason"]) == ("r1", "Observed", None)


def test_a_trace_that_began_here_is_named(log: Log) -> None:
    """Where the client brought none, as its sampling says."""
    log.logging = Logging(LogSettings(level="info"), log.dossiers, trace=lambda one: "ours" if not one.trace else "")
    log.tell(refused(made(1)), refused(made(2, trace=PARENT)), refused(made(3, trace="nonsense" * 9)))
    assert [line.get("trace_id") for line in log.lines] == ["ours", TRACE, None]


def test_a_budget_that_runs_out_is_a_warning(log: Log) -> None:
    """With its numbers."""
    log.opens()
    log.tell(BudgetUsed("upstream/a/usd_day", 8.1, 10.0, 3600.0))
    [line] = log.lines
    assert (line["level"], line["key"], line["used"]) == ("warning", "upstream/a/usd_day", 8.1)


def test_our_credit_and_our_key_are_logged_as_errors(log: Log) -> None:
    """Other transitions as warnings; the line has cause, numbers and requests."""
    log.opens()
    for sign in (Sign.FAILURES, Sign.TERMINAL, Sign.CREDENTIAL):
        log.tell(BreakerMoved("a", State.CLOSED, State.OPEN, "why", sign, {"failures": 3}, ("r1", "r2")))
    log.tell(SizesMoved("a", "64000-", shut=True, cause="why"))
    assert [line["level"] for line in log.lines] == ["warning", "error", "error", "warning"]
    line = log.lines[0]
    assert (line["sign"], line["numbers"], line["requests"]) == ("failures", {"failures": 3}, ["r1", "r2"])


def test_what_broke_is_told_with_its_traceback() -> None:
    """In the same line."""
    try:
        raise RuntimeError("no\nluck")  # noqa: TRY301 - it is what is told
    except RuntimeError:
        record = logging.LogRecord("tidegate", logging.ERROR, "", 1, "it %s", ("broke",), sys.exc_info())
    line = json.loads(JsonLines().format(record))
    assert (line["level"], line["message"]) == ("error", "it broke")
    assert line["error"].endswith("RuntimeError: no\nluck")


def test_a_flood_leaves_so_many_lines_a_second_of_a_kind_and_says_how_many_are_missing(log: Log) -> None:
    """Refusals do not crowd out other kinds, and warnings are always written."""
    log.opens(level="info")

    def flood(count: int) -> None:
        for _ in range(count):
            log.tell(Refused(Reason.LANE_FULL, 503, request_id="r"))

    flood(200)
    log.tell(Observed(request(), None), *[SizesMoved("a", "0-1", shut=True, cause="x")] * 60)
    assert [line["message"] for line in log.lines] == ["refused"] * 50 + ["Observed"] + ["SizesMoved"] * 60
    log.now += 1.0
    flood(2)
    assert [line.get("unwritten") for line in log.lines[-2:]] == [150, None]
