"""The classic profile's exchange: routing by headers, the answer passing by, and one record of every end."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from extproc.ports import Departure, Gone, Record, RecordKind
from extproc.wire import answers, codec
from extproc.wire.classic import ClassicExchange, Silence
from extproc.wire.doubts import Doubts
from extproc.wire.pb.access_log_pb2 import AccessLogType, HttpAccessLogEntry
from extproc.wire.pb.ext_proc_pb2 import ProcessingMode, ProcessingRequest, ProcessingResponse
from tests.wire.test_exchange import headers_message

DEPARTURE = Departure(
    ticket="p-1",
    order=("a", "b"),
    path="/v1/chat/completions",
    dialect="openai",
    stream=True,
    queue_ms=7,
    fail_body='{"error": "\u6ca1"}',
    fail_retry_s=5,
    hide_usage=True,
    again=True,
    last_resort="json",
    deadline_ms=9000,
    per_try_s=0.5,
    heads={"a": '{"model":"\u6ca1"'},
    width=24,
    facts={"tenant": "t\u00e9", "cap": 16.0},
)
WORD = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = {":status": "200", "content-type": "text/event-stream", "content-length": "99"}
JSON = {":status": "200", "content-type": "application/json", "content-length": "99"}
GATE = "@tidegate/1/a"
CUT = b'"code": "SERVER_OVERLOADED"'


def answer_message(headers: dict[str, str], *, end: bool = False, **attributes: str | float) -> ProcessingRequest:
    message = ProcessingRequest()
    message.response_headers.end_of_stream = end
    for name, value in headers.items():
        header = message.response_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    told: dict[str, str | float] = {
        "upstream.address": "@tidegate/10000/b",
        "upstream.request_attempt_count": 2.0,
        "response.code_details": "via_upstream",
        "response.flags": 0.0,
    }
    told |= {name.replace("__", "."): value for name, value in attributes.items()}
    for name, value in told.items():
        field = message.attributes["envoy.filters.http.ext_proc"].fields[name]
        if isinstance(value, str):
            field.string_value = value
        else:
            field.number_value = value
    return message


def piece(body: bytes, *, end: bool = False) -> ProcessingRequest:
    message = ProcessingRequest()
    message.response_body.body, message.response_body.end_of_stream = body, end
    return message


class Envoy:
    """The other side. Gives a message when it is told to, and keeps the answers and what went on to the caller."""

    def __init__(self) -> None:
        self.answers: list[ProcessingResponse] = []
        self.out = b""
        self.now = 100.0
        self.running: list[Record] = []
        self.exchange = ClassicExchange(
            self._read, self._write, lambda: self.now, Silence(5.0, 60.0), self.running.append
        )
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._asked: list[ProcessingRequest] = []

    def say(self, *messages: ProcessingRequest) -> None:
        for message in messages:
            self._queue.put_nowait(message.SerializeToString())

    def close(self) -> None:
        self._queue.put_nowait(None)

    async def depart(self, departure: Departure = DEPARTURE) -> asyncio.Task[None]:
        """Let a request go, and begin to watch."""
        self.say(headers_message((":path", b"/v1/x"), ("x-request-id", b"r-1"), end=True))
        await self.exchange.head()
        await self.exchange.forward(departure)
        watching = asyncio.create_task(self.exchange.ended())
        await settle()
        return watching

    @property
    def last(self) -> ProcessingResponse:
        return self.answers[-1]

    async def _read(self) -> bytes | None:
        data = await self._queue.get()
        if data is not None:
            self._asked.append(ProcessingRequest.FromString(data))
        return data

    async def _write(self, data: bytes) -> None:
        await asyncio.sleep(0)
        answer = ProcessingResponse.FromString(data)
        self.answers.append(answer)
        if answer.WhichOneof("response") == "response_body":
            asked = next(m for m in reversed(self._asked) if m.WhichOneof("request") == "response_body")
            mutation = answer.response_body.response.body_mutation
            kind = mutation.WhichOneof("mutation")
            self.out += asked.response_body.body if kind is None else mutation.body


async def settle() -> None:
    """Let everybody come to rest."""
    for _ in range(20):
        await asyncio.sleep(0)


def headers_of(answer: ProcessingResponse) -> dict[str, str]:
    kind = answer.WhichOneof("response")
    mutation = getattr(answer, kind).response.header_mutation
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


# ------------------------------------------------------------------------------------------------ on the way out


async def test_gates_are_told_what_the_metadata_says() -> None:
    """In ASCII, as far as gates want to know it, and with the time from which a deadline counts."""
    envoy = Envoy()
    await envoy.depart()
    sent = headers_of(envoy.last)
    assert sent["x-tidegate-cluster"] == "tidegate:chain:a+b"
    assert sent["x-tidegate-route"].isascii()
    told = json.loads(sent["x-tidegate-route"])
    metadata = MessageToDict(envoy.last.dynamic_metadata)["llm.route"]
    assert told.pop("began_ms") > 1.7e12
    assert sent[":path"] == metadata["path"]
    assert told == {name: metadata[name] for name in (*PLAINLY, "again", "deadline_ms", "per_try_ms", *HEADS, "cap")}


PLAIN = Departure(
    ticket="t", order=("a",), path="/v1/x", dialect="openai", stream=False, queue_ms=0, fail_body="", fail_retry_s=1
)


@pytest.mark.parametrize(("left_s", "told"), [(0.0004, 1), (0.0012, 1), (0.2509, 250)])
def test_a_limit_is_at_least_a_millisecond(left_s: float, told: int) -> None:
    """In both profiles, and the same for Envoy and for the script that compares it with what is left of a deadline."""
    going = replace(PLAIN, per_try_s=left_s, total_s=left_s, deadline_ms=1)
    leaving = codec.leaving(going, "request_headers")
    sent = headers_of(leaving)
    limits = [sent[f"x-envoy-upstream-rq-{which}timeout-ms"] for which in ("per-try-", "")]
    assert limits == [str(told)] * 2
    assert MessageToDict(leaving.dynamic_metadata)["llm.route"]["per_try_ms"] == told
    assert answers.route(going, 0)["per_try_ms"] == told


PLAINLY, HEADS = ("priority_groups", "ticket"), ("heads", "width")


def test_what_is_not_said_is_left_out() -> None:
    assert answers.route(PLAIN, 1).keys() == set(PLAINLY)


def test_what_callers_wrote_does_not_grow_in_headers() -> None:
    """Envoy refuses a mutation when the headers of a request come to 60 KiB by it; a caller may send nearly so many."""
    long = "/v1/chat/completions?" + "a" * 40_000
    facts = {"tenant": "t" * 9000, "session": "s" * 9000, "model": "m" * 256}
    message = ProcessingResponse.FromString(
        answers.departure(replace(PLAIN, path=long, facts=facts), "request_body", 1)
    )
    sent = headers_of(message)
    assert sent.pop(":path") == long  # in place of the same
    assert sum(len(name) + len(text) for name, text in sent.items()) < 200


# ----------------------------------------------------------------------------------------------- on the way back


async def test_a_stream_is_read_and_its_usage_hidden() -> None:
    envoy = Envoy()
    watching = await envoy.depart()
    envoy.now = 101.0
    envoy.say(answer_message({**STREAM, "x-tg-err": "-/-", "x-ratelimit-remaining-tokens": "7", "retry-after": "2"}))
    await settle()
    assert envoy.last.mode_override.response_body_mode == ProcessingMode.BodySendMode.STREAMED
    removed = envoy.last.response_headers.response.header_mutation.remove_headers
    assert set(removed) == {"x-tg-err", "x-ratelimit-remaining-tokens", "content-length"}
    envoy.now = 102.0
    envoy.say(piece(WORD[:20]), piece(WORD[20:]), piece(FINISH + USAGE), piece(DONE), piece(b"", end=True))
    await settle()
    envoy.now = 103.0
    envoy.close()
    await watching
    assert envoy.out == WORD + FINISH + DONE
    assert not envoy.exchange.doubt
    assert envoy.exchange.final() == Record(
        kind=RecordKind.FINAL,
        ticket="p-1",
        upstream="b",
        status=200,
        flags=frozenset(),
        details="via_upstream",
        attempt=2,
        duration_s=3.0,
        first_token_s=2.0,
        answered_s=1.0,
        request_id="r-1",
        shown=200,
        headers={"x-ratelimit-remaining-tokens": "7", "retry-after": "2"},
        tail={"in": 3.0, "out": 2.0, "finish": "stop", "done": "1", "events": 4.0},
    )


async def test_an_answer_in_one_piece_is_told_by_its_gate() -> None:
    """Its body is not shown to us; it is whole once it begins."""
    envoy = Envoy()
    watching = await envoy.depart()
    envoy.say(answer_message({**JSON, "x-tg-tail": "in=3;out=12;finish=stop;cached=x;done=1"}))
    await settle()
    assert not envoy.last.HasField("mode_override")
    assert list(envoy.last.response_headers.response.header_mutation.remove_headers) == ["x-tg-tail"]
    envoy.close()
    await watching
    record = envoy.exchange.final()
    assert record is not None
    assert record.tail == {"in": 3.0, "out": 12.0, "finish": "stop", "done": "1"}
    assert not envoy.exchange.doubt


@pytest.mark.parametrize(
    ("status", "upstream", "shown"),
    [("503", GATE, 503), ("529", GATE, 503), ("429", GATE, 503), ("400", GATE, 400), ("504", "", 504)],
)
async def test_failures_have_the_status_that_the_caller_sees(status: str, upstream: str, shown: int) -> None:
    """What the last upstream failed with becomes Envoy's own word; what Envoy says itself stays."""
    envoy = Envoy()
    watching = await envoy.depart()
    details = "response_timeout" if not upstream else "via_upstream"
    told: dict[str, Any] = {"upstream__address": upstream, "response__code_details": details, "response__flags": 4.0}
    envoy.say(answer_message({":status": status}, end=True, **told))
    envoy.close()
    await watching
    record = envoy.exchange.final()
    assert record is not None
    assert (record.status, record.details) == (shown, details)
    assert record.flags == {"upstream_request_timeout"}


@pytest.mark.parametrize(("deadline_ms", "status"), [(500, 504), (None, 503)], ids=["in the caller's time", "in ours"])
async def test_an_answer_that_is_late_is_told_as_the_caller_sees_it(deadline_ms: int | None, status: int) -> None:
    """Whether Envoy shows its own words, which it may not, or just ends."""
    going = replace(PLAIN, deadline_ms=deadline_ms, total_s=0.5)
    for shows in (True, False):
        envoy = Envoy()
        watching = await envoy.depart(going)
        envoy.now += 0.5
        if shows:  # the upstream is the one that was asked
            told: dict[str, Any] = {"response__code_details": "response_timeout", "response__flags": 4.0}
            envoy.say(answer_message({":status": str(status)}, upstream__address=GATE, **told))
        envoy.close()
        await watching
        record = envoy.exchange.final()
        assert record is not None
        assert (record.status, record.details) == (status, "response_timeout")
        assert record.flags == {"upstream_request_timeout"}
        assert record.first_token_s is None


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_an_answer_of_last_resort_is_nobodys(kind: str) -> None:
    """Envoy gives it by itself once the time is over: nobody is paid for it, and its events are not read."""
    envoy = Envoy()
    watching = await envoy.depart()
    told = {"response__code_details": "upstream_per_try_timeout", "response__flags": 4.0}
    headers = {":status": "200", "content-type": kind, "x-tidegate-last-resort": "true"}
    envoy.say(answer_message(headers, **told))
    await settle()
    assert not envoy.last.HasField("mode_override")
    envoy.close()
    await watching
    record = envoy.exchange.final()
    assert record is not None
    assert (record.status, record.flags, record.tail) == (503, {"upstream_request_timeout"}, {})


async def test_an_answer_of_last_resort_that_is_not_shown_is_nobodys_either() -> None:
    envoy = Envoy()
    watching = await envoy.depart(replace(DEPARTURE, stream=False, total_s=0.5))
    envoy.now += 0.5
    envoy.close()
    await watching
    record = envoy.exchange.final()
    assert record is not None
    assert (record.status, record.details) == (503, "response_timeout")


@pytest.mark.parametrize("path", ["/v1/threads/t/runs", "/v1/responses/r_1?stream=true", "/v1/audio/speech"])
async def test_events_that_are_not_counted_in_tokens_pass_unread(path: str) -> None:
    """Such a stream has no [DONE], and what it says of usage is not this request's."""
    envoy = Envoy()
    watching = await envoy.depart(replace(DEPARTURE, path=path))
    envoy.say(answer_message(STREAM))
    await settle()
    assert not envoy.last.HasField("mode_override")
    assert not envoy.last.response_headers.response.header_mutation.remove_headers
    envoy.close()
    await watching
    record = envoy.exchange.final()
    assert record is not None
    assert (record.status, record.tail) == (200, {})


@pytest.mark.parametrize("pieces", [(), (b"\x1f\x8b" + b"x" * 50,)], ids=["nothing came", "nothing is understood"])
async def test_events_that_nobody_counted_are_not_told_as_none(pieces: tuple[bytes, ...]) -> None:
    """The answer that they were may have been paid for: then the estimate holds."""
    envoy = Envoy()
    watching = await envoy.depart()
    envoy.say(answer_message(STREAM), *map(piece, pieces))
    await settle()
    envoy.close()
    await watching
    record = envoy.exchange.final()
    assert record is not None
    assert "events" not in record.tail


async def test_a_stream_that_just_stops_gets_a_word_of_why() -> None:
    envoy = Envoy()
    watching = await envoy.depart()
    envoy.say(answer_message(STREAM), piece(WORD), piece(b"", end=True))
    envoy.close()
    await watching
    assert envoy.out.startswith(WORD)
    assert CUT in envoy.out
    record = envoy.exchange.final()
    assert record is not None
    assert record.tail["cut"] == "1"


@pytest.mark.parametrize(
    ("chunks", "quiet_s", "flags", "in_doubt"),
    [
        ((WORD,), 1.0, {"downstream_remote_reset"}, True),
        ((WORD,), 4.9, {"stream_idle_timeout"}, False),
        ((WORD, FINISH, DONE), 1.0, set(), False),
        ((WORD, FINISH, DONE), 4.9, set(), False),
        ((WORD, b'data: {"error":{"code":"x"}}\n\n'), 1.0, set(), False),
        ((WORD, FINISH), 1.0, {"downstream_remote_reset"}, True),
    ],
    ids=["broken off", "stalled", "complete", "complete and quiet", "an error", "no last word"],
)
async def test_what_a_stream_said_tells_how_it_ended(
    chunks: tuple[bytes, ...],
    quiet_s: float,
    flags: set[str],
    in_doubt: bool,  # noqa: FBT001 - a parameter
) -> None:
    """A reader that leaves at the last words has all of it; where nothing came for too long, Envoy ended it."""
    envoy = Envoy()
    watching = await envoy.depart()
    envoy.say(answer_message(STREAM), *map(piece, chunks))
    await settle()
    envoy.now += quiet_s
    watching.cancel()
    await asyncio.wait([watching])
    assert envoy.exchange.doubt == (("a", "b", "a") if in_doubt else ())
    record = envoy.exchange.final()
    assert record is not None
    assert record.flags == flags
    assert record.tail["events"] == len(chunks)


@pytest.mark.parametrize(("deadline_ms", "late"), [(1500, True), (1570, True), (2000, False), (None, False)])
async def test_attempts_that_end_with_the_deadline_are_told_as_that(deadline_ms: int | None, late: bool) -> None:  # noqa: FBT001
    """Two attempts of half a second each, and a second go."""
    given = {name: getattr(DEPARTURE, name) for name in DEPARTURE.__slots__}
    data = answers.departure(Departure(**{**given, "deadline_ms": deadline_ms}), "request_body", 1)
    metadata = MessageToDict(ProcessingResponse.FromString(data).dynamic_metadata)["llm.route"]
    assert metadata.get("late", False) is late


async def test_what_cannot_be_read_goes_on_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of ours loses no byte: what was held goes first."""
    envoy = Envoy()
    await envoy.depart()
    envoy.say(answer_message(STREAM), piece(WORD + USAGE[:30]))
    await settle()
    monkeypatch.setattr("extproc.dialects.tail.members", lambda *_: 1 / 0)
    envoy.say(piece(USAGE[30:]), piece(DONE), piece(b"", end=True))
    await settle()
    assert envoy.out == WORD + USAGE + DONE


async def test_a_long_stream_is_told_of_while_it_goes_on() -> None:
    """Every five seconds, when something comes: what its head said, and how long its first token took."""
    envoy = Envoy()
    await envoy.depart()
    envoy.say(answer_message({**STREAM, "x-ratelimit-remaining-tokens": "7"}))
    for _ in range(12):
        envoy.now += 1.0
        envoy.say(piece(WORD))
        await settle()
    assert [(r.kind, r.status, r.duration_s) for r in envoy.running] == [(RecordKind.RUNNING, 200, 0.0)] * 2
    assert (envoy.running[0].first_token_s, envoy.running[0].tail["events"]) == (1.0, 5.0)
    assert envoy.running[0].headers == {"x-ratelimit-remaining-tokens": "7"}
    assert envoy.running[0].flags == frozenset()


async def test_an_answer_that_did_not_come_in_time() -> None:
    """Envoy shows no reply of its own: the time that was left tells of it."""
    for waited_s, expected in ((2.0, (504, "response_timeout")), (1.9, (0, ""))):
        envoy = Envoy()
        given = {name: getattr(DEPARTURE, name) for name in DEPARTURE.__slots__}
        watching = await envoy.depart(Departure(**{**given, "total_s": 2.0, "last_resort": ""}))
        envoy.now += waited_s
        envoy.close()
        await watching
        record = envoy.exchange.final()
        assert record is not None
        assert (record.status, record.details) == expected
        assert envoy.exchange.doubt == ("a", "b", "a")


async def test_what_is_held_goes_on_when_the_service_lets_go() -> None:
    """An event that came in part is held; let go, its bytes leave before the next piece, and nothing is told."""
    envoy = Envoy()
    watching = await envoy.depart()
    envoy.say(answer_message(STREAM), piece(WORD + USAGE[:30]))
    await settle()
    assert envoy.out == WORD
    assert envoy.exchange.release()
    await settle()
    assert not watching.done()
    envoy.say(piece(USAGE[30:] + DONE))
    await watching
    assert envoy.out == WORD + USAGE + DONE
    assert envoy.exchange.final() is None


async def test_an_abort_in_the_middle_of_an_answer() -> None:
    """The caller was replaced: the record says so, and no piece is answered any more."""
    envoy = Envoy()
    watching = await envoy.depart()
    envoy.say(answer_message(STREAM), piece(WORD))
    await settle()
    await envoy.exchange.abort(503, [], b"{}", "tidegate_evicted")
    count = len(envoy.answers)
    envoy.say(piece(WORD))
    envoy.close()
    await watching
    assert len(envoy.answers) == count
    assert envoy.last.immediate_response.details == "tidegate_evicted"
    record = envoy.exchange.final()
    assert record is not None
    assert (record.status, record.details, envoy.exchange.doubt) == (200, "tidegate_evicted", ())


async def test_what_never_left_has_no_record() -> None:
    envoy = Envoy()
    envoy.say(headers_message(end=True))
    await envoy.exchange.head()
    await envoy.exchange.answer(503, [], b"", "x")
    assert envoy.exchange.final() is None


async def test_any_end_at_any_time_makes_one_record() -> None:
    """Random schedules: pieces of a whole or broken stream, an abort, a release, a client that leaves, a broken
    connection. At most one record; whoever was not let go has one; nothing of the stream is lost or sent twice.
    """
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - to find it again
    for case in range(400):
        await one_schedule(random.Random(seed + case), (case, seed))


async def one_schedule(chance: random.Random, where: object) -> None:
    """One of them."""
    envoy, told = Envoy(), []

    async def learn(record: Record) -> None:
        await asyncio.sleep(0)
        told.append(record)

    doubts = Doubts(learn)
    hide = chance.random() < 0.5
    going = Departure(**{**{name: getattr(DEPARTURE, name) for name in DEPARTURE.__slots__}, "hide_usage": hide})
    serving = asyncio.create_task(serve(envoy.exchange, doubts, going))
    data = WORD * chance.randrange(4) + FINISH + USAGE + DONE
    cuts = sorted(chance.randrange(len(data)) for _ in range(chance.randrange(6)))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    script = [headers_message(("x-request-id", b"r-1"), end=True), answer_message(STREAM)]
    script += [piece(part) for part in pieces] + [piece(b"", end=True)]
    happening = chance.choice(["nothing", "abort", "release", "leave", "close", "garbage"])
    at, let_go = chance.randrange(1, len(script) + 1), False
    for i, message in enumerate(script):
        if i == at and not serving.done():
            let_go = await happen(envoy, serving, happening)
        envoy.say(message)
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
    envoy.close()
    await asyncio.wait([serving], timeout=60)
    assert serving.done(), where
    assert serving.cancelled() or serving.exception() is None, where
    await doubts.close()
    assert len(told) <= 1, where
    if envoy.answers and not let_go:
        assert [record.ticket for record in told] == ["p-1"], where
    if happening == "nothing" or at == len(script):
        assert envoy.out == (data.replace(USAGE, b"") if hide else data), where
        assert (told[0].tail["in"], told[0].flags) == (3.0, frozenset()), where
    assert hide or data.startswith(envoy.out), where


async def serve(exchange: ClassicExchange, doubts: Doubts, going: Departure) -> None:
    """As the server does."""
    try:
        await exchange.head()
        await exchange.forward(going)
        await exchange.ended()
    except Gone:
        pass
    finally:
        record = exchange.final()
        if record is not None:
            doubts.tell(record, exchange.doubt)


async def happen(envoy: Envoy, serving: asyncio.Task[None], what: str) -> bool:
    """Whether the answer goes on without us."""
    if what == "abort" and envoy.answers:
        await envoy.exchange.abort(503, [], b"", "tidegate_evicted")
    elif what == "release":
        return envoy.exchange.release()
    elif what == "leave":
        serving.cancel()
    elif what == "close":
        envoy.close()
    elif what == "garbage":
        envoy.say(headers_message())
    return False


# ------------------------------------------------------------------------------------------ who ended it


def final(**more: Any) -> Record:
    given: dict[str, Any] = {
        "kind": RecordKind.FINAL,
        "ticket": "p-1",
        "upstream": "a",
        "status": 200,
        "shown": 200,
        "flags": frozenset({"downstream_remote_reset"}),
        "details": "",
        "attempt": 1,
        "duration_s": 1.0,
        "first_token_s": None,
        "request_id": "r-1",
    }
    return Record(**(given | more))


def attempt(*flags: str, **more: Any) -> Record:
    return final(**({"kind": RecordKind.ATTEMPT, "ticket": "", "upstream": "b", "flags": frozenset(flags)} | more))


LEFT, CUT_OFF, LATE = "downstream_remote_reset", "upstream_remote_reset", "upstream_request_timeout"
NONE = {"status": 0, "shown": 0}


@pytest.mark.parametrize("first", ["end", "attempts"])
@pytest.mark.parametrize(
    ("heard", "record", "expected"),
    [
        ([attempt(CUT_OFF)], final(), (200, {CUT_OFF}, "b")),
        ([attempt(LEFT, **NONE)], final(**NONE), (0, {LEFT}, "b")),
        ([attempt(LATE, **NONE)], final(), (200, {LEFT}, "a")),
        ([attempt(CUT_OFF, request_id="r-2")], final(), (200, {LEFT}, "a")),
        ([attempt(CUT_OFF, status=503, shown=503)], final(), (200, {LEFT}, "a")),
        ([], final(), (200, {LEFT}, "a")),
        ([], final(**NONE), (0, {LEFT}, "a")),
        ([attempt(LATE, **NONE)], final(**NONE), (0, {LEFT}, "b")),
        ([attempt(LATE, **NONE)] * 2, final(**NONE), (0, {LEFT}, "b")),
        ([attempt(LATE, **NONE), attempt(LATE, duration_s=2.0, **NONE)], final(**NONE), (503, set(), "b")),
        ([attempt(status=503, shown=503), attempt(LATE, duration_s=2.0, **NONE)], final(**NONE), (503, set(), "b")),
        ([attempt(CUT_OFF)], final(**NONE), (200, {CUT_OFF}, "b")),
        ([attempt(LATE, **NONE)], final(status=504, shown=0, flags=frozenset({LATE})), (504, {LATE}, "b")),
    ],
    ids=[
        "cut", "left before an answer", "an earlier one", "another's", "a refusal", "nothing", "nothing at all",
        "left after one failed", "told twice", "all were late", "all failed", "cut before it was shown", "timed out",
    ],
)  # fmt: skip
async def test_the_records_of_the_attempts_know(
    first: str, heard: list[Record], record: Record, expected: tuple[int, set[str], str]
) -> None:
    """Whichever comes first. Two upstreams could be asked."""
    told: list[Record] = []

    async def learn(record: Record) -> None:
        told.append(record)

    doubts = Doubts(learn)
    if first == "end":
        doubts.tell(record, ("a", "b"))
    for one in heard:
        doubts.hear(one)
    if first == "attempts":
        doubts.tell(record, ("a", "b"))
    await doubts.close()
    if first == "end" and record.status == 504:
        expected = (504, {LATE}, "a")  # told at once
    assert [(record.status, record.flags, record.upstream) for record in told] == [expected]


async def test_what_is_sure_is_told_at_once() -> None:
    told: list[Record] = []

    async def learn(record: Record) -> None:
        told.append(record)

    doubts = Doubts(learn)
    doubts.tell(final(flags=frozenset()))
    await settle()
    assert len(told) == 1
    await doubts.close()
    assert len(told) == 1


def test_an_attempt_behind_a_gate_is_its_upstreams() -> None:
    """By the gate's address; and what became of it there by the flags that the gate put in a header."""
    entry = HttpAccessLogEntry()
    common = entry.common_properties
    common.access_log_type = AccessLogType.UpstreamEnd
    common.upstream_cluster = "tidegate:chain:a+b"
    common.upstream_remote_address.pipe.path = "@tidegate/10000/b"
    entry.response.response_code.value = 503
    entry.response.response_headers["x-tg-flags"] = "UF,URX"
    record = codec.record(entry)
    assert record is not None
    assert (record.upstream, record.flags) == ("b", {"upstream_connection_failure"})
    common.upstream_cluster = "a"
    assert codec.record(entry).upstream == "a"  # type: ignore[union-attr]
