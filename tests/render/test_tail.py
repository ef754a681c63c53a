"""The response tail, run by LuaJIT on a stand-in of Envoy's handle, against a plain reference."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from lupa import luajit21

from extproc.render.lua import tail_script
from tests.render.streams import LIMIT, Data, Reference, Stream, make

CASES = 4000
CUT = {"openai": b'data: {"error": {', "anthropic": b"event: error\ndata: {"}


class Tail:
    """The script in a Lua state of its own."""

    def __init__(self, script: str = tail_script()) -> None:
        self._lua = luajit21.LuaRuntime(encoding=None)
        self._lua.execute(Path(__file__).with_name("stand_in.lua").read_bytes())
        self._lua.execute(script.encode())
        self._run, self._respond = self._lua.globals()[b"run"], self._lua.globals()[b"envoy_on_response"]

    def run(
        self, stream: Stream, *, route: Data | None = None, ending: str = "data", headers: Data | None = None
    ) -> Ran:
        """Play a stream; `route` is what admission wrote."""
        if route is None:
            route = {"ticket": "t", "dialect": stream.dialect, "hide_usage": stream.hide}
        names = {":status": "200", "content-type": "text/event-stream", **(headers or {})}
        lua = self._lua
        sent, tail, writes, logged, left = self._run(
            self._respond, self._table(names), self._table(route), lua.table_from(stream.chunks), ending.encode()
        )
        notes = {key.decode(): _plain(value) for key, value in tail.items()}
        return Ran(list(sent.values()), notes, writes, list(logged.values()), {key.decode() for key in left})

    def _table(self, values: Data) -> Any:
        return self._lua.table_from({k.encode(): v.encode() if isinstance(v, str) else v for k, v in values.items()})


class Ran:
    """What came of a run."""

    def __init__(
        self, sent: list[bytes], notes: dict[str, Any], writes: int, logged: list[bytes], headers: set[str]
    ) -> None:
        self.sent = sent
        self.notes = notes
        self.writes = writes
        self.logged = logged
        self.headers = headers
        self.out = b"".join(sent)


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


@pytest.fixture(scope="module")
def tail() -> Tail:
    return Tail()


def text(*chunks: bytes, hide: bool = False, dialect: str = "openai") -> Stream:
    return Stream(dialect, hide, b"".join(chunks), list(chunks))


def test_random_streams_come_out_as_the_reference_says(tail: Tail) -> None:
    """Whatever the dialect, the writing and the cuts: right bytes, at once, and right notes."""
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - to find it again
    for case in range(CASES):
        stream = make(random.Random(seed + case))
        ran = tail.run(stream)
        check(stream, ran, case, seed)
        assert not ran.logged, (ran.logged, seed, case)


def check(stream: Stream, ran: Ran, case: int, seed: int) -> None:
    """Every prefix that went on is what the reference lets go on of the same prefix."""
    where = f"case {case} of seed {seed}"
    sent, came = b"", b""
    for chunk, out in list(zip(stream.chunks, ran.sent, strict=True))[:-1]:
        came += chunk
        sent += out
        kept, _ = Reference(stream).whole_events(came)
        assert sent == (kept if stream.hide else came), where
    reference = Reference(stream)
    kept, rest = reference.whole_events(stream.data)
    last = reference.last_words(rest, CUT[stream.dialect])
    if "cut" in reference.notes:
        assert ran.out.startswith(kept + last), where
        assert ran.out.endswith(b"\n\n"), where
    else:
        assert ran.out == kept + last, where
    assert ran.notes == reference.notes, where


# --------------------------------------------------------------------------------------- special cases


FINISH = b'data: {"choices":[{"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n'
WORD = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}],"usage":null}\n\n'
DONE = b"data: [DONE]\n\n"


def test_nothing_is_touched_that_was_not_admitted_or_is_no_stream(tail: Tail) -> None:
    """Replies of Envoy and Tidegate themselves, JSON, and failures pass as they are."""
    for headers, route in (
        ({}, {}),
        ({}, {"dialect": "openai", "hide_usage": True}),
        ({"content-type": "application/json"}, {"ticket": "t", "dialect": "openai", "hide_usage": True}),
        ({":status": "500"}, {"ticket": "t", "dialect": "openai", "hide_usage": True}),
    ):
        ran = tail.run(text(USAGE, hide=True), route=route, headers={"content-length": "1", **headers})
        assert (ran.out, ran.notes) == (USAGE, {})
        assert "content-length" in ran.headers


def test_a_length_that_would_no_longer_be_true_is_taken_away(tail: Tail) -> None:
    assert "content-length" not in tail.run(text(FINISH, USAGE, hide=True), headers={"content-length": "99"}).headers


def test_an_answer_in_one_piece_is_complete(tail: Tail) -> None:
    """Also where the stream and its last event have no end of their own."""
    assert tail.run(text(WORD + FINISH + USAGE + DONE, hide=True)).out == WORD + FINISH + DONE
    assert tail.run(text(WORD, b"data: [DONE]")).out == WORD + b"data: [DONE]"
    assert tail.run(text(WORD, FINISH, USAGE.rstrip(), hide=True)).out == WORD + FINISH


def test_usage_on_a_chunk_with_choices_is_noted_and_kept(tail: Tail) -> None:
    chunk = (
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":0}}\n\n'
    )
    ran = tail.run(text(chunk, DONE, hide=True))
    assert ran.out == chunk + DONE
    assert ran.notes == {"in": 3, "out": 0, "finish": "stop", "done": "1", "events": 2}


def test_usage_is_shown_to_those_who_asked(tail: Tail) -> None:
    assert tail.run(text(FINISH, USAGE, DONE)).out == FINISH + USAGE + DONE


def test_the_first_chunk_without_choices_is_no_usage(tail: Tail) -> None:
    """Azure begins with filter results; only a chunk that has usage is taken out."""
    first = b'data: {"choices":[],"prompt_filter_results":[{"usage":{"a":1}}],"usage":null}\n\n'
    assert tail.run(text(first, FINISH, hide=True)).out == first + FINISH


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_a_stream_that_just_stops_gets_a_word_of_why(tail: Tail, dialect: str) -> None:
    """Decision 7, in the caller's dialect; an empty stream too."""
    for chunks in ([WORD], [b""], [WORD, b": keep-alive\n\n", b""]):
        ran = tail.run(text(*chunks, dialect=dialect))
        assert ran.out.startswith(b"".join(chunks) + CUT[dialect])
        assert ran.notes["cut"] == "1"
        assert b'"reason": "upstream_failed"' in ran.out


def test_a_complete_answer_gets_none(tail: Tail) -> None:
    for chunk in (FINISH, DONE, b'data: {"error":{"code":429}}\n\n'):
        assert tail.run(text(WORD, chunk)).out == WORD + chunk


def test_an_unknown_dialect_gets_none(tail: Tail) -> None:
    ran = tail.run(text(WORD), route={"ticket": "t"})
    assert (ran.out, "cut" in ran.notes) == (WORD, False)


def test_an_event_that_is_too_long_passes_unread(tail: Tail) -> None:
    """And what is held stays bounded; what follows is read again; nothing is concluded from the end."""
    for hide in (False, True):
        filling = [b"x" * 60_000] * 20
        ran = tail.run(
            text(
                WORD,
                b'data: {"usage":{"prompt_tokens":9},"choices":[],"y":"',
                *filling,
                b'"}\n',
                b"\n",
                USAGE,
                hide=hide,
            )
        )
        assert ran.out == b"".join(
            [WORD, b'data: {"usage":{"prompt_tokens":9},"choices":[],"y":"', *filling, b'"}\n\n']
        ) + (b"" if hide else USAGE)
        assert ran.notes["in"] == 3
        assert "cut" not in ran.notes
        held = 0
        for came, out in zip([WORD, b"", *filling], ran.sent, strict=False):
            held += len(came) - len(out)
            assert held <= LIMIT + 60_100


@pytest.mark.parametrize("hide", [False, True])
def test_lines_that_end_in_a_bare_cr_pass_unread(tail: Tail, hide: bool) -> None:  # noqa: FBT001
    chunks = [b'data: {"choices":[', b"]}\r\rdata: [DO", b"NE]\r\r", USAGE]
    ran = tail.run(text(*chunks, hide=hide))
    assert ran.out == b"".join(chunks)
    assert "cut" not in ran.notes


@pytest.mark.parametrize("hide", [False, True])
def test_a_failure_of_the_script_loses_nothing(hide: bool) -> None:  # noqa: FBT001
    """Whatever is held goes on, in order, and so does the rest."""
    broken = tail_script().replace(
        "local function read(event, notes)\n", "local function read(event, notes)\n  error('x')\n"
    )
    assert broken != tail_script()
    chunks = [WORD, USAGE[:20], USAGE[20:] + WORD, DONE, b"more", b""]
    ran = Tail(broken).run(text(*chunks, hide=hide))
    assert ran.out == b"".join(chunks)
    assert len(ran.logged) == 1
    assert ran.sent[3:] == chunks[3:]


def test_trailers_end_a_stream_too(tail: Tail) -> None:
    """There the last chunk is out of reach: whole events are all there, and the script does not fail."""
    ran = tail.run(text(WORD, FINISH, USAGE, DONE, hide=True), ending="trailers")
    assert (ran.out, ran.logged) == (WORD + FINISH + DONE, [])
    ran = tail.run(text(WORD, b"data: {"), ending="trailers")
    assert (ran.out, ran.logged) == (WORD + b"data: {", [])


def test_dull_events_cost_no_metadata(tail: Tail) -> None:
    """The count of events is written in steps that grow, and is right within an eighth at any moment."""
    ran = tail.run(text(*[WORD] * 1000))
    assert ran.notes["events"] == 1000
    assert ran.writes < 60
    for count in (1, 5, 9, 50, 777):
        seen = tail.run(text(*[WORD] * count), ending="abort").notes["events"]
        assert count * 7 / 8 <= seen <= count


def test_comments_are_no_events(tail: Tail) -> None:
    assert tail.run(text(b": keep-alive\n\n" * 5, WORD, b": \n\n", WORD, DONE)).notes["events"] == 3


def test_words_are_fit_for_headers_and_labels(tail: Tail) -> None:
    """An error is named in at most 64 plain characters each, whatever an upstream writes."""
    error = b'data: {"error":{"type":"a b\\n\xc3\xa9<' + b"x" * 99 + b'","code":-32000}}\n\n'
    kind, _, code = tail.run(text(error)).notes["error"].partition("/")
    assert (len(kind), code) == (64, "-32000")
    assert kind.startswith("a_b_n___x")
