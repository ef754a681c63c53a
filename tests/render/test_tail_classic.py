"""What the classic profile makes of answers against what runs in Envoy: of a stream the same bytes on, at once, and the
same notes, whatever the stream and wherever it is cut; of JSON the same notes, in a header.
"""

from __future__ import annotations

import random

import pytest

from extproc.dialects.tail import Tail
from extproc.wire.answers import noted
from tests.render.scripts import Attempt
from tests.render.scripts import Tail as Lua
from tests.render.streams import HOSTILE, MARK, Stream, make

CASES = 3000
PARTS = [
    *(text.encode("utf-8", "surrogatepass") for text in HOSTILE),
    *(
        b"\n",
        b"\n\n",
        b"\r\n\r\n",
        b"\r",
        b"\n\r\n",
        b"data: ",
        b"data:",
        b": hi\n\n",
        b"event: error\n",
        b"event:error\r\n",
    ),
    *(b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b" ", b"null", b"12", b"-1.5e3", b"true", b"0x1f"),
    *(b'"error":', b'"message":', b'"code":', b'"detail":', b'"type":', b'"object":', b'"status":', b'"usage":{'),
    *(b'"choices":[', b'"finish_reason":"stop"', b'"delta":{', b'"response":{', b'"stop_reason":"', b'"content":"x"'),
    *(b'"prompt_tokens":3', b'"completion_tokens":2', b'"total_tokens":9', b"data: [DONE]\n\n", b'"output":[', MARK),
    *(b'"Your credit balance is low"', b'"insufficient_quota"', b'"response.completed"', b'"content_block_delta"'),
]
"""What streams are made of, in no order."""


@pytest.fixture(scope="module")
def lua() -> Lua:
    return Lua()


def same(lua: Lua, stream: Stream, where: object) -> None:
    """Play a stream to both."""
    theirs = lua.run(stream)
    ours = Tail(
        stream.dialect, stream.path, hide=stream.hide, cap=stream.cap, stops=stream.stops, results=stream.results
    )
    sent = [ours.take(chunk) for chunk in stream.chunks]
    sent[-1] += ours.last_words()
    assert sent == theirs.sent, where
    assert ours.notes == theirs.notes, where
    assert not theirs.logged, (theirs.logged, where)


def test_streams_of_servers(lua: Lua) -> None:
    """Whole ones and broken ones, in the ways that servers write them."""
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - to find it again
    for case in range(CASES):
        same(lua, make(random.Random(seed + case)), (case, seed))


def test_streams_that_were_tampered_with(lua: Lua) -> None:
    """Those of servers, with a piece put in, taken out, or sent twice, here and there."""
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - to find it again
    for case in range(CASES):
        chance = random.Random(seed + case)
        stream = make(chance)
        for _ in range(chance.choice([1, 1, 2, 5])):
            place = chance.randrange(len(stream.chunks))
            chunk = stream.chunks[place]
            at = chance.choice([0, len(chunk), chance.randrange(len(chunk) + 1)])
            piece = chance.choice([chance.choice(PARTS), chunk[at : at + 9], chunk])
            stream.chunks[place] = chunk[:at] + piece + chunk[at + chance.choice([0, 0, 1, 5]) :]
        same(lua, stream, (case, seed))


def test_streams_of_nobody(lua: Lua) -> None:
    """Pieces of what both look for, thrown together."""
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - to find it again
    for case in range(CASES):
        chance = random.Random(seed + case)
        data = b"".join(chance.choice(PARTS) for _ in range(chance.choice([3, 10, 30, 100])))
        places = sorted(chance.randrange(len(data) + 1) for _ in range(chance.choice([0, 1, 5, 30])))
        chunks = [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
        stream = Stream(chance.choice(["openai", "anthropic", "gemini"]), chance.random() < 0.5, data, chunks)
        stream.path = chance.choice(["/v1/chat/completions", "/v1/responses"])
        same(lua, stream, (case, seed))


JSONS: list[bytes] = [
    b'{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}',
    b'{"choices":[{"message":{"content":""},"finish_reason":"stop"}],"usage":{"prompt_tokens":3}}',
    b'{"type":"message","content":[{"type":"text","text":"x"}],"stop_reason":"end_turn","usage":{"input_tokens":12345678}}',
    b'{"id":"resp_1","status":"incomplete","output":[{"type":"x"}],"incomplete_details":{"reason":"max; tokens=1"}}',
    b'{"data":[{"embedding":[0.1,-2]}],"usage":{"prompt_tokens":99999999999,"total_tokens":99999999999}}',
]


@pytest.mark.parametrize("body", JSONS)
def test_a_gate_tells_of_json_in_a_header(body: bytes) -> None:
    """Where the native profile writes metadata."""
    native, gate = Attempt("openai").run(body), Attempt("openai", "classic").run(body)
    assert native.notes
    assert noted(gate.headers["x-tg-tail"]) == native.notes
    assert gate.notes == {}


def test_limits_stay_in_their_headers_behind_a_gate() -> None:
    """Admission reads them there, and takes them away."""
    gate = Attempt("openai", "classic").run(JSONS[0], headers={"x-ratelimit-remaining-tokens": "7"})
    assert (gate.headers["x-ratelimit-remaining-tokens"], gate.limits) == ("7", {})


@pytest.mark.parametrize(
    ("provider", "header", "sent"), [("openai", "authorization", "Bearer k"), ("anthropic", "x-api-key", "k")]
)
def test_the_line_break_behind_a_key_stays_here(provider: str, header: str, sent: str) -> None:
    """Envoys before 1.40 read it with the key; with it no request leaves them."""
    gate = Attempt(provider, "classic", key_file="key")
    assert gate.ask({header: f"{sent}\n"})[header] == sent
    assert gate.ask({header: sent})[header] == sent
    keyless = Attempt(provider, "classic")
    assert keyless.ask({}).keys() == {":path"}
