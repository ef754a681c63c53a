"""Every error as its provider sends it, read by the Lua that Envoy runs: its class, what becomes of it, who sees it."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest

from extproc.dialects import ErrorClass, classify
from extproc.dialects.errors import TABLE, rows_of
from extproc.settings import PROVIDERS
from tests.render.as_sent import CLIENT, EVENTS, FLAT, MISSING, SENT, Sent, anthropic, openai
from tests.render.scripts import Answered, Attempt, Tail
from tests.render.streams import HOSTILE, MARK, Stream


@cache
def reader(provider: str) -> Attempt:
    """The script of an upstream of this provider."""
    return Attempt(provider)


def read(sent: Sent, *then: str) -> Answered:
    """What comes of an error when `then` stand behind in the order."""
    return reader(sent.provider).run(sent.bytes, sent.status, sent.headers, then=then)


def class_of(provider: str, answered: Answered) -> ErrorClass:
    """As the service will class the record of this attempt."""
    return classify(provider, answered.logged_status, *answered.error)


@pytest.mark.parametrize("sent", SENT, ids=str)
def test_errors_mean_what_they_mean(sent: Sent) -> None:
    """By provider, whatever status it is written under: and the same whether or not somebody is left to ask."""
    for then in ([], ["wide"], ["narrow"]):
        assert class_of(sent.provider, read(sent, *then)) is sent.means


@pytest.mark.parametrize("sent", FLAT, ids=str)
def test_an_error_without_a_member_error_is_one_in_a_whole_answer_too(sent: Sent) -> None:
    """It goes to the next upstream unless it is about the request, and never out under a status of success."""
    for text in (sent.bytes, MARK + sent.bytes):
        for then in ([], ["wide"]):
            got = reader(sent.provider).run(text, then=then)
            assert class_of(sent.provider, got) is sent.means
            assert (got.passed, got.status >= 400) == (sent.means is CLIENT, True)


@pytest.mark.parametrize("sent", SENT, ids=str)
def test_only_the_clients_own_errors_reach_it(sent: Sent) -> None:
    """They are passed on, tried nowhere else, and never under a status of success; all others go to the next upstream,
    or end in our own words. A request that is too long goes to where there is a wider window, one for what is not here
    to anybody who is left.
    """
    assert read(sent).passed is (sent.means is CLIENT or sent.missing)
    assert read(sent, "wide").passed is (sent.means is CLIENT and not sent.too_long and not sent.missing)
    assert read(sent, "narrow").passed is (sent.means is CLIENT and not sent.missing)
    assert read(sent, "narrow", "wide").passed is read(sent, "wide").passed
    assert read(sent).status >= 400


@pytest.mark.parametrize("sent", SENT, ids=str)
def test_an_account_is_not_asked_twice(sent: Sent) -> None:
    """Where the only upstream may have a second go, which it has for 503 alone."""
    got = reader(sent.provider).run(sent.bytes, sent.status, sent.headers, again=True)
    if sent.means in (ErrorClass.TERMINAL, ErrorClass.CREDENTIAL, ErrorClass.FORBIDDEN):
        assert got.status != 503
    assert class_of(sent.provider, got) is sent.means


@pytest.mark.parametrize("sent", EVENTS, ids=str)
def test_error_events_mean_what_they_mean(sent: Sent) -> None:
    """In a stream, where the status is long gone."""
    data = b"data: " + sent.bytes + b"\n\n"
    kind, _, code = Tail().run(Stream("openai", hide=False, data=data, chunks=[data])).notes["error"].partition("/")
    assert classify(sent.provider, 200, kind, code) is sent.means


@pytest.mark.parametrize("sent", EVENTS, ids=str)
def test_an_error_event_in_place_of_a_short_stream_goes_on(sent: Sent) -> None:
    """Where its length is known it is read before its headers go on, so that another upstream may still answer."""
    body = b"event: error\r\ndata: " + sent.bytes + b"\r\n\r\n"
    headers = {"content-type": "text/event-stream", "content-length": str(len(body))}
    got = reader(sent.provider).run(body, 200, headers, then=["wide"])
    assert got.passed is ("choices" in sent.body or (sent.means is CLIENT and not sent.missing))
    if not got.passed:
        assert class_of(sent.provider, got) is sent.means


def _rows_hit() -> set[tuple[str, int]]:
    """Provider and place of the first row that matches each fixture, as it is really read."""
    cases = [(s.provider, a.logged_status, *a.error) for s in SENT for a in (read(s), read(s, "wide"))]
    for sent in EVENTS:
        data = b"data: " + sent.bytes + b"\n\n"
        error = Tail().run(Stream("openai", hide=False, data=data, chunks=[data])).notes["error"]
        cases.append((sent.provider, 200, *error.split("/")))
    hit = set()
    for provider, status, kind, code in cases:
        own = len(TABLE.get(provider, ()))
        plain = kind.removeprefix("-"), code.removeprefix("-")
        for place, row in enumerate(rows_of(provider)):
            if row.matches(status, *plain):
                hit.add((provider, place) if place < own else ("generic", place - own))
                break
    return hit


def test_every_row_is_hit() -> None:
    """By an error as it is sent. Azure's last rows are OpenAI's, which are hit there."""
    rows = {(name, i) for name, own in TABLE.items() for i in range(len(own))}
    shared = {("azure", i) for i, row in enumerate(TABLE["azure"]) if row in TABLE["openai"]}
    missed = rows - shared - _rows_hit()
    assert not missed, [(name, TABLE[name][i]) for name, i in sorted(missed)]


def test_envoy_and_the_service_agree() -> None:
    """Whatever provider, status, type and code: what the filter hides and what the service counts is one decision. 429
    and 5xx go on whatever they say: the router sees the status alone.
    """
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - to find it again
    chance = random.Random(seed)
    words = sorted({w.replace("*", "x") for rows in TABLE.values() for row in rows for w in (row.kind, row.code)})
    for _ in range(4000):
        provider = chance.choice(list(PROVIDERS))
        status = chance.choice([200, 400, 401, 402, 403, 404, 408, 413, 422, 424, 425, 429, 498, 500, 503, 529])
        error = {"type": chance.choice([*words, None, "x"]), "code": chance.choice([*words, None, 7])}
        got = reader(provider).run(json.dumps({"error": error}).encode(), status)
        means = class_of(provider, got)
        expected = means in (CLIENT, MISSING) and got.logged_status < 500 and got.logged_status != 429
        assert got.passed is expected, (seed, provider, status, error)


@pytest.mark.parametrize("provider", ["openai", "anthropic", "gemini", "compatible"])
def test_a_caller_cannot_say_our_words(provider: str) -> None:
    """Providers quote what a caller wrote: that must not take an upstream out for everybody."""
    for said in (
        "credit balance",
        "your credit balance",
        "spend limit",
        "API key not valid",
        "incorrect api key provided",
    ):
        for message in (f"Invalid value: '{said}'.", f'unknown role: "{said}"', f"messages.0.role: {said}"):
            body = json.dumps({"error": {"message": message, "type": "invalid_request_error"}}).encode()
            got = reader(provider).run(body, 400)
            assert (got.passed, class_of(provider, got)) == (True, CLIENT), message
    quoted = openai('{"quotaId": "PerDay"}', "invalid_request_error")
    assert class_of(provider, reader(provider).run(json.dumps(quoted).encode(), 400)) is CLIENT


def test_words_of_an_error_fit_into_a_header() -> None:
    """And no body makes the script fail, whatever is in it or missing from it."""
    endless = b"1" * 10_000
    told = reader("openai").run(b'{"error": {"type": "x", "code": ' + endless + b"}}", 400)
    assert told.error == ("x", "1" * 64)
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - to find it again
    chance = random.Random(seed)
    bodies = [sent.bytes for sent in SENT]
    for _ in range(3000):
        body = chance.choice(bodies).replace(b"x", "".join(chance.choices(HOSTILE, k=2)).encode())
        body = body[: chance.randrange(len(body) + 1)] if chance.random() < 0.5 else body
        got = reader(chance.choice(["openai", "gemini", "bedrock"])).run(body, chance.choice([200, 400, 429, 503]))
        assert all(ord(" ") < ord(c) < 127 for word in got.error for c in word), (seed, body)


def test_waits_are_read_where_only_the_body_has_them() -> None:
    """Under 429 only: elsewhere a message may quote a caller."""
    body = json.dumps(openai("Please try again in 1m2.5s.", "tokens", "rate_limit_exceeded")).encode()
    assert reader("openai").run(body, 429).headers["x-tg-wait"] == "1m2.5s"
    assert "x-tg-wait" not in reader("openai").run(body, 400).headers
    gemini = next(sent for sent in SENT if sent.provider == "gemini" and b"retryDelay" in sent.bytes)
    assert read(gemini).headers["x-tg-wait"] == "22s"


def test_a_status_in_an_error_counts_under_200() -> None:
    """An error object that names a status is answered with it, where it is the caller's to read."""
    body = json.dumps({"error": {"code": 422, "message": "no"}}).encode()
    assert reader("compatible").run(body).status == 422
    body = json.dumps(anthropic("no", "invalid_request_error")).encode()
    assert reader("anthropic").run(body, path="/v1/messages").status == 400


@pytest.mark.parametrize("shape", [b"%s", b"[%s\n]\n", b"data: [%s]\n\n"])
def test_a_bare_error_in_place_of_a_short_stream_goes_on(shape: bytes) -> None:
    """Or a list with one, as Gemini sends it."""
    body = shape % b'{"error": {"code": 503, "status": "UNAVAILABLE", "message": "busy"}}'
    headers = {"content-type": "text/event-stream", "content-length": str(len(body))}
    got = reader("gemini").run(body, 200, headers, then=["wide"])
    assert (got.passed, got.error) == (False, ("UNAVAILABLE", "503"))
