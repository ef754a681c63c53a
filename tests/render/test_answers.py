"""Whole answers under 200, read by the Lua at the upstream: which are none, where they go, what is noted of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.render.scripts import Attempt
from tests.render.streams import MARK

Data = dict[str, Any]


@pytest.fixture(scope="module")
def here() -> Attempt:
    return Attempt("openai")


def chat(finish: str | None = "stop", usage: Data | None = None, **message: Any) -> Data:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return {"choices": [choice], "usage": usage or {"prompt_tokens": 5, "completion_tokens": 10}}


def claude(*content: Data, stop: str = "end_turn") -> Data:
    return {"type": "message", "content": list(content), "stop_reason": stop, "usage": {"output_tokens": 10}}


def response(*output: Data, status: str = "completed", reason: str | None = None) -> Data:
    details = {"reason": reason} if reason else None
    return {"object": "response", "status": status, "incomplete_details": details, "output": list(output)}


def said(kind: str, text: str) -> Data:
    return {"type": "message", "content": [{"type": kind, "text": text}]}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
THOUGHT = {"prompt_tokens": 5, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 9}}

EMPTY = [
    chat(content=""),
    chat(content=None, tool_calls=[], annotations=[]),
    {"choices": []},
    {"choices": [{"text": "", "finish_reason": "stop"}]},
    claude(),
    claude({"type": "text", "text": ""}),
    response(),
    response(said("output_text", "")),
]
GOOD = [
    chat(content="a"),
    chat(content=[{"type": "text", "text": "a"}]),
    chat(content="", reasoning_content="hm"),
    chat(content="", usage=THOUGHT),
    chat(content=None, refusal="no"),
    chat("tool_calls", content=None, tool_calls=[CALL]),
    chat("stop", content=None, tool_calls=[CALL]),
    chat("content_filter", content=""),
    chat("length", content=""),
    {"choices": [{"text": "a", "finish_reason": "stop"}]},
    {"choices": [{"message": {"content": ""}}, {"message": {"content": "second"}}]},
    claude({"type": "text", "text": "a"}),
    claude({"type": "tool_use", "id": "t", "input": {}}, stop="tool_use"),
    claude({"type": "thinking", "thinking": ""}),
    claude(stop="refusal"),
    claude(stop="pause_turn"),
    response(said("output_text", "a")),
    response({"type": "message", "content": [{"type": "refusal", "refusal": "no"}]}),
    response({"type": "function_call", "name": "f"}),
    response({"type": "reasoning", "summary": []}),
    response(status="incomplete", reason="content_filter"),
    response(status="queued"),
    {"object": "list", "data": [], "usage": {"prompt_tokens": 1}},
]


@pytest.mark.parametrize("answer", EMPTY)
def test_an_empty_answer_is_asked_for_elsewhere(here: Attempt, answer: Data) -> None:
    """The last one's is passed on, and noted."""
    body = json.dumps(answer).encode()
    moved = here.run(body, then=["wide"])
    assert (moved.status, moved.error) == (503, ("malformed", "empty"))
    last = here.run(body)
    assert (last.status, last.notes["bad"], last.notes["done"]) == (200, "empty", "1")


@pytest.mark.parametrize(
    ("answer", "bad"),
    [
        (chat(content=""), None),
        ({"choices": [{"text": "", "finish_reason": "stop"}]}, None),
        (claude(), None),
        (claude(stop="stop_sequence"), None),
        ({"choices": []}, "empty"),
        (chat(None, content=""), "empty"),
    ],
)
def test_an_answer_may_stop_before_its_first_word(here: Attempt, answer: Data, bad: str | None) -> None:
    """Where its caller said where it is to stop, and it says that it did: it is asked for once."""
    got = here.run(json.dumps(answer).encode(), then=["wide"], stops=True)
    assert (got.passed, got.error) == (not bad, ("malformed", "empty") if bad else ("", ""))
    last = here.run(json.dumps(answer).encode(), stops=True)
    assert (last.status, last.notes.get("bad"), last.notes["done"]) == (200, bad, "1")


@pytest.mark.parametrize(
    ("answer", "bad"),
    [(claude(), None), (chat(content=""), "empty"), (response(), "empty"), ({"choices": []}, "empty")],
)
def test_claude_may_have_nothing_to_add_to_what_tools_answered(here: Attempt, answer: Data, bad: str | None) -> None:
    """It says that its turn has ended; that is asked for once. Others have no such habit."""
    got = here.run(json.dumps(answer).encode(), then=["wide"], results=True)
    assert (got.passed, got.error) == (not bad, ("malformed", "empty") if bad else ("", ""))
    last = here.run(json.dumps(answer).encode(), results=True)
    assert (last.status, last.notes.get("bad"), last.notes["done"]) == (200, bad, "1")


@pytest.mark.parametrize("finish", ["error", "abort", "insufficient_system_resource", "network_error"])
def test_an_answer_that_says_it_was_broken_off_is_asked_for_elsewhere(here: Attempt, finish: str) -> None:
    """However much of it there is; the last one's is passed on with its own word for it."""
    for answer in (chat(finish, content="half"), chat(finish, content="")):
        body = json.dumps(answer).encode()
        for stops in (False, True):
            moved, last = here.run(body, then=["wide"], stops=stops), here.run(body, stops=stops)
            assert (moved.status, moved.error) == (503, ("malformed", "broken"))
            assert (last.status, last.notes["bad"], last.notes["finish"]) == (200, "broken", finish)


@pytest.mark.parametrize("answer", GOOD)
def test_what_only_looks_empty_is_an_answer(here: Attempt, answer: Data) -> None:
    """Whatever its spacing."""
    for separators in ((",", ":"), (" , ", " : ")):
        got = here.run(json.dumps(answer, separators=separators).encode(), then=["wide"], cap=None)
        assert (got.status, got.notes.get("bad")) == (200, None)


@pytest.mark.parametrize(
    ("finish", "out", "cap", "short"),
    [
        ("length", 10, 100, True),
        ("length", 50, 100, False),
        ("length", 10, None, False),
        ("length", 4096, 100_000, False),
        ("stop", 10, 100, False),
        ("content_filter", 10, 100, False),
    ],
)
def test_an_answer_ended_by_a_cap_that_is_far_away(
    here: Attempt, finish: str, out: int, cap: int | None, *, short: bool
) -> None:
    body = json.dumps(chat(finish, {"prompt_tokens": 5, "completion_tokens": out}, content="a")).encode()
    assert here.run(body, then=["wide"], cap=cap).error == (("malformed", "short") if short else ("", ""))
    last = here.run(body, cap=cap)
    assert (last.status, last.notes.get("bad")) == (200, "short" if short else None)


@pytest.mark.parametrize("answer", [chat(content="a"), claude({"type": "text", "text": "a"})])
def test_an_answer_behind_a_byte_order_mark_is_read(here: Attempt, answer: Data) -> None:
    """And so is an error."""
    got = here.run(MARK + json.dumps(answer).encode(), then=["wide"])
    assert (got.status, got.notes["out"], got.notes["done"]) == (200, 10, "1")
    wrong = here.run(MARK + b'{"error": {"type": "server_error"}}', then=["wide"])
    assert (wrong.status, wrong.error) == (503, ("server_error", "-"))


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b'{"choices": [{"message": {"content": "cut sho', b'{"a": 1} x', b"[]"]
)
def test_what_is_no_json_is_never_passed_on(here: Attempt, body: bytes) -> None:
    """Half an answer, or a page; not even where nobody is left to ask."""
    for then in ([], ["wide"]):
        for kind in ("application/json", "text/html; charset=utf-8"):
            got = here.run(body, headers={"content-type": kind}, then=then)
            assert (got.status, got.error) == (503, ("malformed", "json"))


def test_what_is_not_priced_is_not_judged(here: Attempt) -> None:
    """Nor what is compressed, and could not be read."""
    page = {"content-type": "text/html"}
    assert here.run(b"<html>", headers=page, path="/v1/files").status == 200
    assert here.run(b"\x1f\x8b", headers={"content-encoding": "gzip"}).status == 200
