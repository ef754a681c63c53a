"""The JSON reader in Lua against Python's."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from importlib import resources
from typing import Any

from lupa import luajit21

from tests.render.streams import HOSTILE

CASES = 3000


def reader() -> Any:
    """`members`, from outside: bytes in; where values start, and where the object ends."""
    lua = luajit21.LuaRuntime(encoding=None)
    text = resources.files("extproc.render").joinpath("lua/json.lua").read_text("utf-8")
    lua.execute(text.encode() + b"\nfunction top(s) local at, stop = members(s, 1) return at, stop end")
    return lua.globals()[b"top"]


def value(chance: random.Random, depth: int = 0) -> Any:
    """Any JSON value, with strings and numbers that are hard to skip."""
    simple: list[Callable[[], Any]] = [
        lambda: "".join(chance.choices(HOSTILE, k=2)),
        lambda: chance.choice([None, True, False, 0, -1.5e-7, 12345678901234567890, ""]),
        lambda: [chance.random() - 0.5 for _ in range(chance.choice([1, 3, 50]))],
        lambda: [[1], [-2, "]"], [3, [4]], {"[": [5]}],
    ]
    if depth > 3:
        return chance.choice(simple)()
    deep: list[Callable[[], Any]] = [
        lambda: [value(chance, depth + 1) for _ in range(chance.randrange(4))],
        lambda: {f"k{i}": value(chance, depth + 1) for i in range(chance.randrange(4))},
    ]
    return chance.choice([*simple, *deep])()


def test_members_are_found_where_they_are() -> None:
    """For any object, however it is spaced; and an object that is cut short is never taken for a whole one."""
    top, seed = reader(), random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - to find it again
    for case in range(CASES):
        chance = random.Random(seed + case)
        data = {f"key{i}": value(chance) for i in range(chance.randrange(6))}
        indent = chance.choice([None, None, 1])
        spaced = chance.choice([(",", ":"), (" ,\t", " :\r\n ")])
        text = json.dumps(data, ensure_ascii=chance.random() < 0.5, separators=spaced, indent=indent).encode()
        at, stop = top(text)
        places = {key.decode(): place for key, place in at.items()}
        where = (seed, case)
        assert stop == len(text) + 1, where
        assert places.keys() == data.keys(), where
        for key, place in places.items():
            found, _ = json.JSONDecoder().raw_decode(text[place - 1 :].decode())
            assert found == data[key], where
        cut = chance.randrange(len(text))
        _, stop = top(text[:cut])
        assert stop is None, where


def test_what_is_no_object_has_no_members() -> None:
    top = reader()
    for text in (
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"a"',
        b'{"a":',
        b'{"a":1',
        b'{"a":1,',
        b'{"a":1,}',
        b"{a:1}",
        b'{"a":1 "b":2}',
        b"<html>",
    ):
        assert top(text)[1] is None, text


def test_of_a_key_written_twice_the_last_counts() -> None:
    """As every JSON reader of note has it."""
    assert reader()(b'{"a":1,"a":2}')[0][b"a"] == 12


def test_large_and_hostile_texts_take_no_time() -> None:
    """Embeddings, and texts made to be searched over and over; Envoy serves nobody else meanwhile."""
    top = reader()
    vectors = json.dumps({"data": [{"embedding": [0.12345678] * 1536}] * 200, "usage": {}}).encode()
    quotes, arrays = b'{"a":"' + b'\\"' * 500_000 + b'","b":1}', b'{"a":[' + b"[1]," * 250_000 + b"[2]]}"
    slashes = b'{"a":"' + b"\\" * 1_000_001
    for text in (vectors, quotes, arrays, slashes):
        began = time.thread_time()
        top(text)
        assert time.thread_time() - began < 1.0
