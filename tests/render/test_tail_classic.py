"""The response tail of the classic profile against the one that runs in Envoy: the same bytes on, at once, and the same
notes, whatever the stream and wherever it is cut.
"""

from __future__ import annotations

import random

import pytest

from extproc.dialects.tail import Tail
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
