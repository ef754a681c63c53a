"""The response tail, run by LuaJIT on a stand-in of Envoy's handle, against a plain reference."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from extproc.render.lua import tail_script
from tests.render.scripts import Ran, Tail
from tests.render.streams import LIMIT, MARK, Reference, Stream, make

CASES = 4000
CUT = {"openai": b'data: {"error": {', "anthropic": b"event: error\ndata: {"}


@pytest.fixture(scope="module")
def tail() -> Tail:
    return Tail()


def text(*chunks: bytes, hide: bool = False, dialect: str = "openai", cap: int | None = None) -> Stream:
    return Stream(dialect, hide, b"".join(chunks), list(chunks), cap)


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
    """Every chunk that went on is what the reference lets go on of the same chunk."""
    where = f"case {case} of seed {seed}"
    reference = Reference(stream, words(stream.dialect))
    expected = [reference.feed(chunk) for chunk in stream.chunks]
    assert ran.sent[:-1] == expected[:-1], where
    assert ran.sent[-1] == expected[-1] + reference.end(), where
    assert ran.notes == reference.notes, where


@cache
def words(dialect: str) -> bytes:
    """What is said where an answer is not complete."""
    return Tail().run(text(b"", dialect=dialect)).out


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
    assert ran.notes == {"in": 3, "out": 0, "finish": "stop", "done": "1", "events": 2, "bad": "empty"}


def test_a_line_too_many_does_not_end_the_reading(tail: Tail) -> None:
    """Some servers end an event with three line ends."""
    ran = tail.run(text(WORD, WORD + b"\n", FINISH, USAGE, DONE, hide=True))
    assert ran.out == WORD + WORD + b"\n" + FINISH + DONE
    assert (ran.notes["in"], ran.logged) == (3, [])


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
        "local function read(state, event, ended)\n", "local function read(state, event, ended)\n  error('x')\n"
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


# ------------------------------------------------------------------------------------------- bad answers


def chat(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {}, **choice}]}).encode() + b"\n\n"


def named(kind: str, **members: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **members})}\n\n".encode()


ROLE = chat(delta={"role": "assistant", "content": "", "refusal": None})
STOP = chat(finish_reason="stop")
BLOCK = {"index": 0, "content_block": {"type": "text", "text": ""}}
END_TURN = named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2})
SHELL = {"id": "r", "status": "completed", "output": []}


@pytest.mark.parametrize(
    "chunks",
    [
        [ROLE, STOP, DONE],
        [DONE],
        [chat(text=""), STOP, DONE],
        [ROLE, chat(delta={"content": None, "tool_calls": []}), STOP],
        [named("message_start", message={"content": []}), named("content_block_start", **BLOCK), END_TURN],
        [named("response.created", response=SHELL), named("response.completed", response=SHELL)],
    ],
)
def test_a_whole_answer_that_says_nothing_is_empty(tail: Tail, chunks: list[bytes]) -> None:
    """In each dialect; it goes on all the same, as it came."""
    ran = tail.run(text(*chunks))
    assert (ran.notes["bad"], ran.out) == ("empty", b"".join(chunks))


@pytest.mark.parametrize("chunks", [[ROLE, STOP, DONE], [STOP], [named("content_block_start", **BLOCK), END_TURN]])
def test_a_stream_may_stop_before_its_first_word(tail: Tail, chunks: list[bytes]) -> None:
    """Where its caller said where it is to stop; not where it does not say that it stopped."""
    asked = Stream("openai", hide=False, data=b"", chunks=chunks, stops=True)
    assert "bad" not in tail.run(asked).notes
    asked.chunks = [ROLE, DONE]
    assert tail.run(asked).notes["bad"] == "empty"


def test_claude_may_have_nothing_to_add_to_what_tools_answered(tail: Tail) -> None:
    """Where it says that its turn has ended."""
    chunks = [named("message_start", message={"content": []}), END_TURN, named("message_stop")]
    asked = Stream("anthropic", hide=False, data=b"", chunks=chunks, results=True)
    assert "bad" not in tail.run(asked).notes
    asked.results = False
    assert tail.run(asked).notes["bad"] == "empty"
    asked.results, asked.chunks = True, [ROLE, STOP, DONE]
    assert tail.run(asked).notes["bad"] == "empty"


def test_a_stream_that_says_it_was_broken_off_is_noted(tail: Tail) -> None:
    for finish in ("error", "abort", "insufficient_system_resource"):
        ran = tail.run(text(WORD, chat(finish_reason=finish), DONE))
        assert (ran.notes["bad"], ran.notes["finish"]) == ("broken", finish)
    assert "bad" not in tail.run(text(WORD, chat(finish_reason="eos"), DONE)).notes


TOOL = [{"index": 0, "function": {"name": "f", "arguments": ""}}]
SAYING = [
    [chat(delta={"content": "a"}), STOP],
    [chat(text="a"), STOP],
    [chat(delta={"reasoning_content": "hm"}), STOP],
    [chat(delta={"refusal": "no"}), STOP],
    [chat(delta={"tool_calls": TOOL}), chat(finish_reason="tool_calls")],
    [chat(delta={"audio": {"data": "x"}}), STOP],
    [ROLE, chat(finish_reason="content_filter")],
    [ROLE, chat(finish_reason="length")],
    [ROLE, STOP, b'data: {"choices":[],"usage":{"completion_tokens_details":{"reasoning_tokens":9}}}\n\n'],
    [named("content_block_start", content_block={"type": "tool_use", "id": "t", "input": {}}), END_TURN],
    [named("content_block_start", **BLOCK), named("content_block_delta", delta={"type": "t", "text": "a"}), END_TURN],
    [named("content_block_delta", delta={"type": "thinking_delta", "thinking": "hm"}), END_TURN],
    [named("message_delta", delta={"stop_reason": "refusal"}), named("message_stop")],
    [named("message_delta", delta={"stop_reason": "pause_turn"}), named("message_stop")],
    [named("response.output_text.delta", delta="a"), named("response.completed", response=SHELL)],
    [named("response.output_item.added", item={"type": "function_call"}), named("response.completed", response=SHELL)],
    [named("response.output_item.added", item={"type": "reasoning"}), named("response.completed", response=SHELL)],
    [
        named(
            "response.completed", response={**SHELL, "output": [{"type": "message", "content": [{"type": "refusal"}]}]}
        )
    ],
]


@pytest.mark.parametrize("chunks", SAYING)
def test_reasoning_tools_refusals_and_filters_are_no_empty_answers(tail: Tail, chunks: list[bytes]) -> None:
    """Nor is one whose cap was used up before the first word."""
    assert "bad" not in tail.run(text(*chunks)).notes


@pytest.mark.parametrize(
    ("finish", "out", "cap", "bad"),
    [
        ("length", 10, 100, "short"),
        ("length", 49, 100, "short"),
        ("length", 50, 100, None),
        ("length", 100, 100, None),
        ("length", 10, None, None),
        ("stop", 10, 100, None),
        ("content_filter", 10, 100, None),
        ("length", 4096, 100_000, None),  # the most that this model can write
    ],
)
def test_ended_by_a_cap_that_is_far_away(tail: Tail, finish: str, out: int, cap: int | None, bad: str | None) -> None:
    usage = f'data: {{"choices":[],"usage":{{"prompt_tokens":5,"completion_tokens":{out}}}}}\n\n'.encode()
    ran = tail.run(text(WORD, chat(finish_reason=finish), usage, DONE, cap=cap))
    assert ran.notes.get("bad") == bad


def test_hidden_thinking_uses_the_cap_up(tail: Tail) -> None:
    """Gemini counts it in the total alone."""
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":10,"total_tokens":105}}\n\n'
    notes = tail.run(text(WORD, chat(finish_reason="length"), usage, DONE, cap=100)).notes
    assert (notes["out"], notes.get("bad")) == (100, None)


@pytest.mark.parametrize(
    "broken", [b'data: {"choices":[{"delta":{"content":"b\n\n', b"data: <html>\r\n\r\n", b"data: [1\n\n"]
)
def test_an_event_that_is_no_json_is_noted(tail: Tail, broken: bytes) -> None:
    """At whatever place, also between good ones in one chunk; the bytes go on as they are."""
    for chunks in ([broken, WORD, STOP, DONE], [WORD, broken, STOP, DONE], [WORD + WORD + broken + WORD, STOP, DONE]):
        for hide in (False, True):
            ran = tail.run(text(*chunks, hide=hide))
            assert (ran.notes.get("bad"), ran.out) == ("json", b"".join(chunks))


def test_garbage_behind_an_event_is_noted_where_it_is_read(tail: Tail) -> None:
    """Until something was said everything is; later, an event that ends in a brace passes for whole."""
    broken = b'data: {"a":1}}\n\n'
    assert tail.run(text(broken, WORD, STOP, DONE)).notes["bad"] == "json"
    assert "bad" not in tail.run(text(WORD, broken, STOP, DONE)).notes


def test_what_is_no_data_is_no_bad_json(tail: Tail) -> None:
    for harmless in (b": ping\n\n", b"retry: 3000\n\n", b"event: ping\n\n", b"data:\n\n", b"data: \r\n\r\n", b"\n\n"):
        assert "bad" not in tail.run(text(WORD, harmless, STOP, DONE)).notes
    assert tail.run(text(WORD, b'data: {"unfinished')).notes.get("bad") is None


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
@pytest.mark.parametrize("hide", [False, True])
def test_errors_about_our_account_are_not_shown(tail: Tail, dialect: str, hide: bool) -> None:  # noqa: FBT001
    """However the chunks fall, whatever follows, and where the last event has no end; what came before stays whole."""
    secret = b"sk-secret of org-9"
    for error in (
        b'data: {"error":{"message":"' + secret + b'","type":"insufficient_quota","code":null}}\n\n',
        b'event: error\r\ndata: {"type":"error","error":{"type":"authentication_error","message":"'
        + secret
        + b'"}}\r\n\r\n',
        b'data: {"type":"error","error":{"type":"x","message":"Your credit balance, ' + secret + b'"}}\n\n',
        b'data: {"error":{"code":402,"message":"' + secret + b'"},"choices":[]}\n\n',
        b'{"error": {"code": 403,\r\n "message": "' + secret + b'", "status": "PERMISSION_DENIED"}}\r\n\r\n',
        b'[{"error":{"code":429,"message":"' + secret + b'","status":"RESOURCE_EXHAUSTED"}}]\n\n',
        b'data: [{"error":{"code":400,"message":"' + secret + b'","type":"INVALID_ARGUMENT"}}]\n\n',
    ):
        for rest in (error, error + error, error + DONE, error.rstrip(), error[:-12]):
            whole = WORD + rest
            for cuts in (
                [],
                [len(WORD)],
                [len(WORD) + 9],
                [len(WORD) + 40],
                [20, len(whole) - 3],
                range(1, len(whole)),
            ):
                edges = [0, *cuts, len(whole)]
                chunks = [whole[a:b] for a, b in pairwise(edges)]
                ran = tail.run(text(*chunks, hide=hide, dialect=dialect))
                assert secret not in ran.out, chunks
                assert ran.out.startswith(WORD)
                assert words(dialect) in ran.out
                assert ("cut" in ran.notes) is (rest == error[:-12])
                assert not ran.logged


def test_other_errors_are_the_providers_to_word(tail: Tail) -> None:
    error = b'data: {"error":{"message":"try again","type":"server_error"}}\n\n'
    for chunks in ([WORD, error], [WORD, error[:25], error[25:]]):
        assert tail.run(text(*chunks)).out == WORD + error


def test_an_error_that_no_client_can_read_is_worded_anew(tail: Tail) -> None:
    """Bare JSON in place of an event, or a list: the SDKs would pass over it, and take what came for the answer."""
    for shape in (b"%s\n\n", b"%s", b"[%s\n]\n\n", b"data: [%s]\n\n"):
        error = shape % b'{"error":{"code":503,"status":"UNAVAILABLE","message":"no room"}}'
        for whole in (WORD + error, error):
            for cut in range(len(whole)):
                ran = tail.run(text(whole[:cut], whole[cut:]))
                assert (ran.notes["error"], b"no room" in ran.out) == ("UNAVAILABLE/503", False)
                assert ran.out.endswith(words("openai"))
    for other in (b'{"choices": []}\n\n', b'{"choices": [\n\n', b'["x"]\n\n'):
        for hide in (False, True):
            ran = tail.run(text(WORD, other, STOP, DONE, hide=hide))
            assert (ran.out, ran.notes.get("bad")) == (WORD + other + STOP + DONE, None)


FLAT_ERRORS = [
    b'data: {"object":"error","message":"no room","type":"InternalServerError","param":null,"code":500}\n\n',
    b'data: {"type":"error","code":"server_error","message":"no room"}\n\n',
    b'data: {"detail":"no room"}\n\n',
    b'data: {"detail" : [ {"msg": "no room"} ]}\r\n\r\n',
    b'data: {"code":503,"message":"no room"}\n\n',
    b'data: {"message":"no room"}\n\n',
    b'data: {"message":"no room","type":"server_error"}\n\n',
    b'data: {"status":503,"message":"no room","path":"/v1"}\n\n',
    b'event: error\ndata: {"message":"no room","progress":1}\n\n',
    b"event: error\r\ndata: no room\r\n\r\n",
    b'id: 7\nevent:error\ndata: {"detail":null,"x":"no room"}\n\n',
    b'{"object":"error","message":"no room","code":500}\n\n',
    b'{"detail":"no room"}\n\n',
]


@pytest.mark.parametrize("error", FLAT_ERRORS)
def test_an_error_without_a_member_error_is_worded_anew(tail: Tail, error: bytes) -> None:
    """OpenAI's SDK would read past it, and its user take what came for the answer; wherever it stands, with a mark of
    the byte order before it or not, and also where the stream says that all is well.
    """
    for before in (b"", WORD, MARK, MARK + WORD):
        for after in (b"", DONE, STOP + DONE):
            ran = tail.run(text(before, error, after))
            assert ran.out == before.removeprefix(MARK) + words("openai") + after
            assert "error" in ran.notes
            assert not ran.notes.keys() & {"bad", "cut"}
    for cut in range(len(WORD), len(WORD + error)):
        ran = tail.run(text((WORD + error)[:cut], (WORD + error)[cut:]))
        assert ran.out.endswith(words("openai"))
        assert ran.notes["error"]


def test_what_a_client_raises_is_the_providers_to_word(tail: Tail) -> None:
    """The Responses API hands its error events on; Anthropic's SDK looks for the event's name alone."""
    said = b'data: {"type":"error","code":"server_error","message":"no room"}\n\n'
    stream = Stream("openai", hide=False, data=b"", chunks=[said], path="/v1/responses")
    assert (tail.run(stream).out, tail.run(stream).notes["error"]) == (said, "error/server_error")
    for error in (said, b'data: {"message":"no room","code":500}\n\n'):
        assert tail.run(text(b"event: error\n" + error, dialect="anthropic")).out == b"event: error\n" + error
        assert tail.run(text(error, dialect="anthropic")).out == words("anthropic")


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"message":"loading","progress":0.5}\n\n',
        b'data: {"status":"processing","message":"you are third"}\n\n',
        b'data: {"code":0,"message":"success","id":"x"}\n\n',
        b'data: {"type":"info","message":"an error is no reason to panic"}\n\n',
        b'data: {"detail":null,"model":"m"}\n\n',
        b'data: {"object":"chat.completion.chunk","message":"x"}\n\n',
        b'event: errors\ndata: {"x":1}\n\n',
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"m"}}\n\n',
        b'data: {"type":"response.error.x","message":"x","detail":"y"}\n\n',
        chat(delta={"content": '"message": "error", "detail": "x", event: error\n'}),
    ],
)
def test_not_every_message_is_an_error(tail: Tail, event: bytes) -> None:
    for chunks in ([event, WORD, STOP, DONE], [WORD, event, STOP, DONE], [WORD + event + STOP + DONE]):
        ran = tail.run(text(*chunks))
        assert (ran.out, ran.notes.keys() & {"error", "bad", "cut"}) == (b"".join(chunks), set())


def test_a_byte_order_mark_is_taken_off(tail: Tail) -> None:
    """Clients read past the event behind one. However it is cut, nothing else is touched; the first event counts."""
    whole = WORD + STOP + DONE
    for first in range(len(MARK) + 2):
        for then in range(first, len(MARK) + 2):
            data = MARK + whole
            ran = tail.run(text(data[:first], data[first:then], data[then:]))
            assert (ran.out, ran.notes["events"], "bad" in ran.notes) == (whole, 3, False)
    for other in (MARK[:1], MARK[:2], MARK[:2] + whole, MARK[1:] + whole):
        assert tail.run(text(other[:1], other[1:])).out.startswith(other)


def test_an_error_tells_more_than_what_is_missing(tail: Tail) -> None:
    assert "bad" not in tail.run(text(ROLE, b'data: {"error":{"code":429}}\n\n', DONE)).notes
