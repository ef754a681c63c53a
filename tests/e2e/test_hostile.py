"""Whatever a client sends: nothing breaks, nothing passes unmetered, nothing forged is believed or passed on."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from extproc.stack import Stack
from tests.e2e.conftest import books_balance, chat
from tests.e2e.doubles import (
    ANSWER,
    CHAT,
    MESSAGES,
    NEVER_OPENS,
    Reply,
    Upstream,
    connect,
    read_reply,
    running,
    talk,
    until,
    waiting,
    written,
)

MB = 1024 * 1024


@dataclass(frozen=True)
class Gate:
    """A stack between hostile clients and two upstreams that keep every byte."""

    stack: Stack
    first: Upstream
    second: Upstream

    def seen(self) -> int:
        """How many requests any upstream got so far."""
        fakes = sum(len(self.stack.record(name)["requests"]) for name in self.stack.fakes)
        return len(self.first.received) + len(self.second.received) + fakes


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """`gpt-5` goes to the first double and then to the second, `plain` to the first as it is, others to a fake."""
    folder = tmp_path_factory.mktemp("hostile")
    for name in ("first", "second"):
        (folder / name).write_text(f"sk-own-{name}", "utf-8")
    fast = {"first_token_s": 0, "output_tokens_per_s": 1e6}

    def double(name: str, upstream: Upstream, models: dict[str, str]) -> dict[str, Any]:
        url = f"http://127.0.0.1:{upstream.port}"
        own = {"key_file": str(folder / name), "models": models, "concurrency": 100, "breaker": NEVER_OPENS}
        return {"provider": "compatible", "url": url, **own}

    with Upstream().listening() as first, Upstream().listening() as second, running(
        folder,
        upstreams={
            "first": double("first", first, {"gpt-5": "own-1", "模型": '内"部\\'}),
            "second": double("second", second, {"gpt-5": "a-name-that-is-much-longer"}),
            "fake": {"concurrency": 100, "breaker": NEVER_OPENS},
            "meter": {"limits": [{"tpm": 200_000}], "fake": fast},
        },
        routes=[
            {"models": ["gpt-5"], "chain": ["first", "second"], "acknowledge_unowned": True},
            {"models": ["plain", "模型"], "chain": ["first"], "acknowledge_unowned": True},
            {"models": ["meter"], "chain": ["meter"], "acknowledge_unowned": True},
            {"models": ["*"], "chain": ["fake"], "acknowledge_unowned": True},
        ],
        other_endpoints="fake",
    ) as stack:  # fmt: skip
        yield Gate(stack, first, second)


def refused(answer: httpx.Response | Reply, status: int, reason: str) -> None:
    """It is one of our refusals, in JSON."""
    body = answer.json()
    assert (answer.status_code if isinstance(answer, httpx.Response) else answer.status) == status, body
    assert answer.headers["x-tidegate-reason"] == reason
    assert answer.headers["content-type"] == "application/json"
    assert body["error"]["reason"] == reason


def post(gate: Gate, body: bytes, path: str = CHAT, **headers: str) -> httpx.Response:
    return httpx.post(gate.stack.url + path, content=body, headers=headers, timeout=60, verify=False)  # noqa: S501 - no TLS


def served(answer: httpx.Response | Reply) -> None:
    """An upstream answered."""
    assert (answer.status_code if isinstance(answer, httpx.Response) else answer.status) == 200, answer
    assert answer.json()["choices"]


# Sizes.


def test_five_megabytes_pass_byte_for_byte(gate: Gate) -> None:
    """A long prompt reaches an upstream that needs no rewriting exactly as it was sent."""
    body = json.dumps(chat("long prompt 长 " * (5 * MB // 16), model="plain"), ensure_ascii=False).encode()
    assert len(body) > 5 * MB
    served(post(gate, body))
    assert gate.first.last().body == body


def test_five_megabytes_are_rewritten_for_each_upstream(gate: Gate) -> None:
    """The same with a model name of its own for each attempt: only the name differs."""
    text = "long prompt 长 " * (5 * MB // 16)
    gate.first.answers.append((500, {}, b"{}"))
    served(post(gate, json.dumps(chat(text)).encode()))
    assert gate.first.last().json() == {**chat(text), "model": "own-1"}
    assert gate.second.last().json() == {**chat(text), "model": "a-name-that-is-much-longer"}


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_body_over_the_limit_is_too_large_in_the_callers_dialect(gate: Gate, path: str) -> None:
    """9 MB, announced or chunked, is a JSON 413 that names its reason; no upstream sees a byte of it."""
    seen = gate.seen()
    body = json.dumps(chat("x" * (9 * MB))).encode()
    for answer in (post(gate, body, path), httpx.post(gate.stack.url + path, content=iter([body]), timeout=20)):
        refused(answer, 413, "too_large")
        assert answer.headers["x-should-retry"] == "false"
        assert ("type" in answer.json()) == (path == MESSAGES)
    assert "。" in post(gate, body, path, **{"accept-language": "zh"}).json()["error"]["message"]
    assert gate.seen() == seen


# Bodies.

DEEP = 100_000
BROKEN = {
    "empty": b"",
    "blank": b"   \n",
    "cut": b'{"model": "gpt-5", "messages": [',
    "list": b"[]",
    "null": b"null",
    "text": b'"gpt-5"',
    "no-model": b'{"messages": [{"role": "user", "content": "x"}]}',
    "null-model": b'{"model": null, "messages": [{"role": "user", "content": "x"}]}',
    "no-messages": b'{"model": "gpt-5"}',
    "empty-messages": b'{"model": "gpt-5", "messages": []}',
    "two-objects": json.dumps(chat()).encode() * 2,
    "trailing-comma": b'{"model": "gpt-5", "messages": [{"role": "user", "content": "x"}],}',
    "single-quotes": b"{'model': 'gpt-5'}",
    "comment": b'{"model": "gpt-5" /* x */}',
    "nan": b'{"model": "gpt-5", "temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
    "infinity": b'{"model": "gpt-5", "messages": [{"role": "user", "content": -Infinity}]}',
    "long-number": b'{"model": "gpt-5", "seed": ' + b"9" * 10_000 + b"}",
    "deep-lists": b'{"model": "gpt-5", "messages": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep-objects": b'{"model": "gpt-5", "messages": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "deep-content": b'{"model": "gpt-5", "messages": [{"role": "user", "content": '
    + b'[{"type": "tool_result", "content": ' * 20_000 + b'"x"' + b"}]" * 20_000 + b"}]}",
    "not-utf-8": b'{"model": "gpt-5", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "surrogate-bytes": b'{"model": "gpt-5", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    "utf-16": json.dumps(chat()).encode("utf-16"),
    "byte-order-mark": b"\xef\xbb\xbf" + json.dumps(chat()).encode(),
    "nul": json.dumps(chat()).encode() + b"\x00",
    "gzip": gzip.compress(json.dumps(chat()).encode()),
    "many-members": b"{" + b",".join(b'"k%d":1' % i for i in range(200_000)) + b',"model":"gpt-5"}',
    "surrogate-model": b'{"model": "gpt\\ud800", "messages": [{"role": "user", "content": "x"}]}',
    "newline-model": json.dumps(chat(model="gpt-5\nx")).encode(),
    "long-model": json.dumps(chat(model="g" * 2000)).encode(),
    "number-model": json.dumps(chat(model=5)).encode(),
    "empty-model": json.dumps(chat(model="")).encode(),
    "stream-yes": json.dumps(chat(stream="yes")).encode(),
    "stream-one": json.dumps(chat(stream=1)).encode(),
    "options-text": json.dumps(chat(stream=True, stream_options="include_usage")).encode(),
    "messages-text": json.dumps(chat(messages="hello")).encode(),
    "message-text": json.dumps(chat(messages=["hello"])).encode(),
    "content-number": json.dumps(chat(messages=[{"role": "user", "content": 5}])).encode(),
}  # fmt: skip


ANTHROPIC_HAS_NO = {"options-text"}
"""Fields that only OpenAI's API knows; elsewhere they are a vendor's own and pass."""


@pytest.mark.parametrize(
    ("what", "path"),
    [(what, path) for what in BROKEN for path in (CHAT, MESSAGES) if path == CHAT or what not in ANTHROPIC_HAS_NO],
)
def test_a_body_that_cannot_be_priced_is_refused(gate: Gate, what: str, path: str) -> None:
    """It is a clear bad_request, quickly, in the caller's dialect, and reaches no upstream."""
    seen = gate.seen()
    encoding = {"content-encoding": "gzip"} if what == "gzip" else {}
    began = time.monotonic()
    answer = post(gate, BROKEN[what], path, **encoding)
    refused(answer, 400, "bad_request")
    assert answer.headers["x-should-retry"] == "false"
    assert time.monotonic() - began < 5
    assert gate.seen() == seen


def test_lone_surrogates_in_a_prompt_pass_as_they_are(gate: Gate) -> None:
    """Escapes that mean nothing are the provider's to judge: the bytes go through unchanged, rewritten model or not."""
    text = b'"messages": [{"role": "user", "content": "a \\ud800 b \\uDFFF"}], "n": 1'
    served(post(gate, b'{"model": "plain", ' + text + b"}"))
    assert gate.first.last().body == b'{"model": "plain", ' + text + b"}"
    served(post(gate, b'{"model": "gpt-5", ' + text + b"}"))
    assert b"a \\ud800 b \\uDFFF" in gate.first.last().body
    assert gate.first.last().json()["model"] == "own-1"


TWICE = [
    (b'{"model": "nobody", "model": "plain", "messages": M}', {"model": "plain"}),
    (b'{"model": "nobody", "messages": M, "mod\\u0065l": "gpt-5"}', {"model": "own-1"}),
    (b'{"mod\\u0065l": "meter", "messages": M, "model": "gpt-5"}', {"model": "own-1"}),
    (b'{"max_tokens": 1, "model": "plain", "messages": M, "max_tokens": 9}', {"model": "plain", "max_tokens": 9}),
    (b'{"max_tokens": 9, "model": "gpt-5", "messages": M, "max\\u005ftokens": 1}', {"model": "own-1", "max_tokens": 1}),
    (b'{"n": 9, "model": "plain", "messages": M, "n": 1}', {"model": "plain", "n": 1}),
    (b'{"messages": [], "model": "plain", "messages": M}', {"model": "plain"}),
    (b'{"stream": true, "model": "plain", "messages": M, "stream": false}', {"model": "plain", "stream": False}),
]


@pytest.mark.parametrize(("body", "expected"), TWICE)
def test_a_key_that_is_written_twice_is_priced_and_served_as_one(
    gate: Gate, body: bytes, expected: dict[str, Any]
) -> None:
    """The upstream gets each key once, with the value that admission read: the last."""
    served(post(gate, body.replace(b"M", b'[{"role": "user", "content": "x"}]')))
    pairs = json.loads(gate.first.last().body, object_pairs_hook=list)
    assert len(pairs) == len(dict(pairs))
    got = json.loads(gate.first.last().body)
    assert {key: got[key] for key in expected} == expected
    assert len(got["messages"]) == 1


@pytest.mark.parametrize("key", ["model", "stream", "stream_options", "priority", "max_tokens"])
def test_the_same_key_deeper_down_means_nothing(gate: Gate, key: str) -> None:
    """Only members at the top count; the same names inside messages and tools pass untouched."""
    deep = {"metadata": {key: {"model": "x", key: [1, {key: 2}]}}, "tools": [{"type": "function", key: "model"}]}
    served(post(gate, json.dumps(chat(**deep)).encode()))
    assert gate.first.last().json() == {**chat(**deep), "model": "own-1"}


NUMBERS = [
    ("max_tokens", 0, 200), ("max_tokens", 100_000_000, 200), ("max_tokens", None, 200), ("n", 1, 200),
    ("n", None, 200), ("max_tokens", -1, 400), ("max_tokens", 1.5, 400), ("max_tokens", "16", 400),
    ("max_tokens", True, 400), ("max_tokens", 10**9, 400), ("max_tokens", 10**30, 400), ("max_tokens", [], 400),
    ("max_completion_tokens", -5, 400),
    ("n", 0, 400), ("n", -1, 400), ("n", 10_001, 400), ("n", 2.0, 400), ("n", "2", 400), ("best_of", 10**12, 400),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "status"), NUMBERS)
def test_numbers_are_numbers(gate: Gate, key: str, value: Any, status: int) -> None:
    """Caps and choices are whole numbers in range, or the request is refused; nothing is guessed."""
    answer = post(gate, json.dumps({**chat(model="plain"), key: value}).encode())
    if status == 200:
        served(answer)
    else:
        refused(answer, 400, "bad_request")
        assert key in answer.json()["error"]["message"]


def test_a_huge_number_of_digits_or_exponent_is_not_computed(gate: Gate) -> None:
    """1e400 where nothing depends on it is the provider's business; as a cap it is refused."""
    served(post(gate, b'{"model": "plain", "temperature": 1e400, "messages": [{"role": "user", "content": "x"}]}'))
    assert b"1e400" in gate.first.last().body
    answer = post(gate, b'{"model": "plain", "max_tokens": 1e400, "messages": [{"role": "user", "content": "x"}]}')
    refused(answer, 400, "bad_request")


NAMES = [
    "it's \"quoted\"", "back\\slash", "../../etc/passwd", "%DYNAMIC_METADATA(llm.route:ticket)%", "模型-五", "🦊", "*",
    "gpt-[5]?", "a/b:c@d", "x" * 256, "</script>", "${jndi:x}", "%s%n", "{0}", "{request-id}",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_any_printable_model_name_survives(gate: Gate, name: str) -> None:
    """A model's name is data: it reaches the upstream as it is, and an exhausted chain is worded in clean JSON."""
    answer = post(gate, json.dumps(chat(model=name)).encode(), **{"x-fake-fault": "503"})
    refused(answer, 503, "upstream_failed")
    served(post(gate, json.dumps(chat(model=name)).encode()))
    assert gate.stack.record("fake")["requests"][-1]["model"] == name


def test_model_names_outside_ascii_are_rewritten_too(gate: Gate) -> None:
    """Public and own names may hold anything; the upstream reads exactly its own."""
    served(post(gate, json.dumps(chat(model="模型"), ensure_ascii=False).encode()))
    assert gate.first.last().json()["model"] == '内"部\\'


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


@pytest.mark.parametrize(
    ("body", "least"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE] * 4}]}, 4 * 85),
        ({"max_tokens": 1, "max_completion_tokens": 3000}, 3000),
        ({"max_tokens": 3000, "max_completion_tokens": 1}, 3000),
        ({"max_tokens": 500, "n": 6}, 3000),
        (
            {"max_tokens": 1, "tools": [{"type": "function", "function": {"name": "f", "description": "say " * 900}}]},
            900,
        ),
        ({"max_tokens": 1, "messages": [{"role": "user", "content": ""}] * 200}, 600),
    ],
    ids=["images", "new-cap", "old-cap", "choices", "tools", "empty-messages"],
)
def test_nothing_that_costs_is_free(gate: Gate, body: dict[str, Any], least: int) -> None:
    """Images, either cap, every choice, tools and the frames of messages are taken from the bucket before it goes."""
    key = "upstream/meter/*/total"
    full = until(lambda: (level := gate.stack.state()["counters"][key])["level"] >= level["capacity"] and level)
    began = time.monotonic()
    served(post(gate, json.dumps(chat(**{"model": "meter", **body})).encode()))
    refilled = (time.monotonic() - began) * full["per_second"]
    assert gate.stack.state()["counters"][key]["level"] <= full["capacity"] - least + refilled + 100


async def test_two_megabytes_of_one_letter_do_not_stop_the_others(
    gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counting tokens of the worst texts never blocks the event loop for 100 ms."""
    texts = {
        "a": "a" * 2 * MB,
        "blank": " " * 2 * MB,
        "newline": "\n" * 2 * MB,
        "han": "中" * (MB // 2),
        "0": "0" * 2 * MB,
    }
    bodies = [json.dumps(chat(text, model="plain"), ensure_ascii=False).encode() for text in texts.values()]
    worst = []
    async with httpx.AsyncClient(timeout=30, base_url=gate.stack.url) as http:
        for _ in range(3):
            with watching(gate.stack) as slowest:
                for body in bodies:
                    served(await http.post(CHAT, content=body))
            worst += slowest
        with watching(gate.stack) as crowded:
            answers = await asyncio.gather(*(http.post(CHAT, content=body) for body in bodies * 4))
        assert [answer.status_code for answer in answers] == [200] * len(bodies) * 4
    with capsys.disabled():
        alone = ", ".join(f"{1000 * seconds:.0f}" for seconds in worst)
        print(f"\n  2 MB of one letter: event loop answers in {alone} ms at worst; ", end="")  # noqa: T201
        print(f"beside 20 of them at once in {1000 * crowded[0]:.0f} ms")  # noqa: T201
    assert min(worst) < 0.1


def _bomb(unit: bytes) -> bytes:
    """7.9 MB of JSON in which everything is a value."""
    start = b'{"model": "plain", "messages": [{"role": "user", "content": "x"}], "metadata": ['
    return start + (unit + b",") * (79 * MB // 10 // (len(unit) + 1)) + unit + b"]}"


BOMBS = [_bomb(unit) for unit in (b"1", b"[]", b"{}", b'{"a":1}', b"1e9", b'"a"', b'{"type":"x","b":[1,{}]}')]


PROMPT_S, TRIES = 0.1, 12


def test_millions_of_tiny_values_do_not_stop_the_others(gate: Gate, capsys: pytest.CaptureFixture[str]) -> None:
    """A body that is all structure is refused before it is parsed, and ten at once do not seem like an outage."""
    worst = [min(_stood_still(gate, body)) for body in BOMBS]
    with ThreadPoolExecutor(10) as pool:
        asks = [pool.submit(post, gate, BOMBS[i % len(BOMBS)]) for i in range(10)]
        others = [post(gate, json.dumps(chat()).encode()) for _ in range(10)]
        assert {ask.result().status_code for ask in asks} == {400}
    assert {answer.status_code for answer in others} == {200}
    with capsys.disabled():
        print(f"\n  8 MB of tiny values: event loop answers in {1000 * max(worst):.0f} ms at worst")  # noqa: T201
    assert max(worst) < PROMPT_S


def _stood_still(gate: Gate, body: bytes) -> list[float]:
    """For how long the event loop did not answer while a bomb was refused, again until it was no time to speak of.

    On a machine that is busy with other things any process stands still now and then.
    """
    found: list[float] = []
    while min(found, default=PROMPT_S) >= PROMPT_S and len(found) < TRIES:
        with watching(gate.stack) as slowest:
            answer = post(gate, body)
        refused(answer, 400, "bad_request")
        assert "too many values" in answer.json()["error"]["message"]
        found += slowest
    return found


WATCH = """
import http.client, os, select, sys, time
connection, page = http.client.HTTPConnection(sys.argv[1]), f"/proc/{sys.argv[2]}/task/{sys.argv[2]}/stat"
def clocks():
    with open(page) as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return time.monotonic(), (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
took = []
while not select.select([sys.stdin], [], [], 0.002)[0]:
    before = clocks()
    connection.request("GET", "/healthz")
    connection.getresponse().read()
    took.append(min(now - then for now, then in zip(clocks(), before)))
    if len(took) == 1:
        print("watching", flush=True)
assert len(took) > 1
print(max(took))
"""


@contextlib.contextmanager
def watching(stack: Stack) -> Iterator[list[float]]:
    """The slowest answer in seconds of the service's own event loop meanwhile, seen from a process of its own: for so
    long it worked on other things. That it waits for a processor, on a busy machine, is nobody's fault.
    """
    slowest: list[float] = []
    pid = str(stack.processes["service"].pid)
    command = [sys.executable, "-c", WATCH, stack.settings.service.console, pid]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout
        assert watch.stdout.readline() == "watching\n"
        yield slowest
        slowest.append(float(watch.communicate("\n")[0]))


# Paths and methods.


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/embeddings"])
def test_a_priced_path_takes_only_posts(gate: Gate, method: str, path: str) -> None:
    """Any other method is not found, with a reason, and reaches no upstream."""
    seen = gate.seen()
    answer = httpx.request(method, gate.stack.url + path, timeout=60)
    assert answer.status_code in (400, 404)
    assert answer.headers["x-tidegate-reason"] in ("not_found", "bad_request")
    assert gate.seen() == seen


SAME = [
    "//v1/chat/completions", "/v1//chat/completions", "/v1/./chat/completions", "/v1/x/../chat/completions",
    "/v1/%2e/chat/completions", "/v1/x/%2e%2e/chat/completions", "/v1/files/../chat/completions",
    "/%761/chat/completions",
    "/v1/chat/completions?", "/v1/chat/completions?api-version=1&x=%2F..%2Fy", "http://elsewhere/v1/chat/completions",
    "/v1/chat/completions?/../../v1/files", "/v1/%63hat/completions", "\\v1\\chat\\completions",
]  # fmt: skip
OTHERS = [
    "/v1/chat/completions/", "/v1/chat%2fcompletions", "/v1/chat%2Fcompletions", "/v1/chat%5ccompletions",
    "/v1/chat/completions%00", "/v1/chat/completions%20", "/v1/chat/completions;x=1", "/V1/CHAT/COMPLETIONS",
    "/v1/chat/completions%3fx", "/v1/chat/completions%23", "/v1/chat/completions/..", "/v2/chat/completions", "/",
    "/v1",
    "/v1/chat/completions/%2e%2e/completions", "/v1/chat/completions#x", "/v1/chat/completionsx", "/admin/record",
    "/v1/images/../../admin/record", "/v1/files/..%2fchat/completions", "/health", "/metrics",
]  # fmt: skip


@pytest.mark.parametrize("path", SAME)
def test_other_spellings_of_a_path_are_priced_like_the_path_or_refused(gate: Gate, path: str) -> None:
    """What Envoy normalises is the same endpoint for everybody: read, priced, rewritten; or it is refused."""
    seen = gate.seen()
    answer = talk(gate.stack, written(path=path, body=json.dumps(chat()).encode()))
    if answer.status != 200:
        assert answer.headers["x-tidegate-reason"] in ("not_found", "bad_request")
        assert gate.seen() == seen
        return
    served(answer)
    got = gate.first.last()
    assert got.path.partition("?")[0] == CHAT
    assert got.json()["model"] == "own-1"
    assert gate.seen() == seen + 1


@pytest.mark.parametrize("path", OTHERS)
def test_what_is_spelled_otherwise_never_reaches_a_priced_endpoint(gate: Gate, path: str) -> None:
    """A path that could mean something else to an upstream is refused as it stands."""
    seen = gate.seen()
    with connect(gate.stack) as connection:
        connection.sendall(written(path=path, body=json.dumps(chat()).encode()))
        answer = read_reply(connection)[0]
    if path in ("/v1/chat/completions/..", "/v1/chat/completions/%2e%2e/completions"):
        assert answer.status in (200, 400, 404)  # these are normalised to another path, which may exist
        return
    assert answer.status in (400, 404)
    assert answer.headers["x-tidegate-reason"] in ("not_found", "bad_request")
    assert gate.seen() == seen


def test_endpoints_that_are_not_priced_go_to_their_own_upstream_only(gate: Gate) -> None:
    """Files and images pass unread to the upstream that was named for them, never to a model's chain."""
    before = len(gate.first.received) + len(gate.second.received)
    for path in ("/v1/files", "/v1/images/generations", "/v1/audio/speech"):
        httpx.post(gate.stack.url + path, content=b"\x00\xff not json", headers={"authorization": "Bearer sk-mine"})
        last = gate.stack.record("fake")["requests"][-1]
        assert last["path"] == path
        assert last["key"] is None
    assert len(gate.first.received) + len(gate.second.received) == before


# Connections.


def test_http2_clients_are_served_like_others(gate: Gate) -> None:
    """Prior-knowledge h2c: answers, streams, refusals and many at once on one connection."""
    with httpx.Client(http1=False, http2=True, base_url=gate.stack.url) as http:
        answer = http.post(CHAT, json=chat())
        served(answer)
        assert answer.http_version == "HTTP/2"
        assert "[DONE]" in http.post(CHAT, json=chat(model="x", stream=True)).text
        refused(http.post(CHAT, json=chat(n=0)), 400, "bad_request")
        served(http.post(CHAT, json=chat()))


@pytest.mark.parametrize("size", [7 * MB, 8 * MB + MB // 4, 9 * MB, 12 * MB])
def test_http2_bodies_are_bounded_like_others(gate: Gate, size: int) -> None:
    """Below 8 MiB a body passes; above it is too large, however wide the client's window, and never unavailability."""
    seen = gate.seen()
    with httpx.Client(http1=False, http2=True, base_url=gate.stack.url, timeout=20) as http:
        try:
            answer = http.post(CHAT, json=chat("word " * (size // 5), model="plain"))
        except httpx.LocalProtocolError:
            answer = None  # refused while it was still sending, which this client does not read
    if size < 8 * MB:
        served(answer)
        assert gate.seen() == seen + 1
    else:
        assert answer is None or refused(answer, 413, "too_large") is None
        assert gate.seen() == seen


def test_chunked_uploads_are_read_whole(gate: Gate) -> None:
    """A body in chunks of any size is one body, and its length is right for the upstream."""
    body = json.dumps(chat("chunked 块" * 1000), ensure_ascii=False).encode()
    for size in (7, 1000, len(body)):
        served(httpx.post(gate.stack.url + CHAT, content=(body[i : i + size] for i in range(0, len(body), size))))
        got = gate.first.last()
        assert got.json() == {**json.loads(body), "model": "own-1"}
        assert (got.get("content-length") is None) != (got.get("transfer-encoding") is None)


def test_a_slow_upload_holds_nothing_but_its_connection(gate: Gate) -> None:
    """Headers now, body after longer than any message timeout: served, and no slot was held meanwhile."""
    books_balance(gate.stack)
    body = json.dumps(chat()).encode()
    request = written(body=body)
    with connect(gate.stack) as connection:
        connection.sendall(request[: -len(body)])
        time.sleep(2.5)  # the message timeout is two seconds
        assert gate.stack.state()["unsettled"] == 0
        for byte in body:
            connection.sendall(bytes([byte]))
        served(read_reply(connection)[0])


def test_a_client_that_leaves_in_the_middle_of_its_upload_leaves_nothing(gate: Gate) -> None:
    """Half a body and a closed connection: no upstream is asked, nothing stays open."""
    seen = gate.seen()
    request = written(body=json.dumps(chat()).encode())
    for cut in (10, len(request) // 2, len(request) - 1):
        with connect(gate.stack) as connection:
            connection.sendall(request[:cut])
    books_balance(gate.stack)
    assert gate.seen() == seen


def test_a_half_closed_client_leaks_nothing(gate: Gate) -> None:
    """A client that shuts its sending side is answered or let go, and the books balance either way."""
    for _ in range(5):
        with connect(gate.stack) as connection:
            connection.sendall(written(body=json.dumps(chat(model="x")).encode()))
            connection.shutdown(socket.SHUT_WR)
            try:
                assert read_reply(connection)[0].status == 200
            except ConnectionError:
                continue
    books_balance(gate.stack)
    assert waiting(gate.stack) == 0


def test_pipelined_requests_are_answered_in_order(gate: Gate) -> None:
    """Three requests in one packet, one of them late: three answers, each to its own, on one connection."""
    late = {"x-request-timeout-ms": "0"}
    requests = [written(body=json.dumps(chat()).encode(), headers=more) for more in ({}, late, {})]
    with connect(gate.stack) as connection:
        connection.sendall(b"".join(requests))
        first, rest = read_reply(connection)
        second, rest = read_reply(connection, rest)
        third, rest = read_reply(connection, rest)
    assert [first.status, second.status, third.status] == [200, 504, 200]
    assert rest == b""


def test_a_refusal_does_not_cost_the_connection(gate: Gate) -> None:
    """Who is refused can ask again on the same connection, or a busy gateway would have to greet everybody anew."""
    with connect(gate.stack) as connection:
        for more, path, status in (
            ({"x-request-timeout-ms": "0"}, CHAT, 504),
            ({}, "/nowhere", 404),
            ({"x-fake-fault": "503"}, CHAT, 503),
            ({}, CHAT, 200),
        ):
            connection.sendall(written(path=path, body=json.dumps(chat(model="x")).encode(), headers=more))
            answer = read_reply(connection)[0]
            assert (answer.status, answer.headers.get("connection")) == (status, None)


@pytest.mark.parametrize(
    "framing",
    [
        {"content-length": "5", "transfer-encoding": "chunked"},
        {"content-length": "-1"},
        {"content-length": "5, 6"},
        {"content-length": "0x5"},
        {"transfer-encoding": "chunked, identity"},
        {"transfer-encoding": "xchunked"},
    ],
)
def test_ambiguous_framing_is_refused(gate: Gate, framing: dict[str, str]) -> None:
    """Two lengths, or none that can be believed: nothing is smuggled, nothing reaches an upstream."""
    seen = gate.seen()
    smuggled = written(body=json.dumps(chat()).encode())
    refused(talk(gate.stack, written(body=b"0\r\n\r\n" + smuggled, headers=framing)), 400, "bad_request")
    assert gate.seen() == seen


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/chat/completions HTTP/1.0\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/9.9\r\nhost: x\r\n\r\n",
        b"POST  HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nbad header: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx: a\x00b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
    ids=["http-1.0", "no-host", "version", "no-path", "header-name", "nul", "tls"],
)
def test_what_is_hardly_http_is_refused_in_json(gate: Gate, head: bytes) -> None:
    """Whatever Envoy itself cannot read is a bad request like any other."""
    seen = gate.seen()
    refused(talk(gate.stack, head), 400, "bad_request")
    assert gate.seen() == seen


def test_an_empty_post_is_a_bad_request(gate: Gate) -> None:
    """`content-length: 0`, no length at all, and an empty chunked body: the body is empty, and that is said."""
    for answer in (
        talk(gate.stack, written(headers={"content-length": "0"})),
        talk(gate.stack, written(headers={})),
        talk(gate.stack, written(body=b"0\r\n\r\n", headers={"transfer-encoding": "chunked"})),
    ):
        refused(answer, 400, "bad_request")
        assert "empty" in answer.json()["error"]["message"]


def test_clients_that_ask_first_whether_to_go_on_are_told_to(gate: Gate) -> None:
    """`expect: 100-continue` gets its interim answer, and then the answer."""
    body = json.dumps(chat()).encode()
    with connect(gate.stack) as connection:
        connection.sendall(written(body=body, headers={"expect": "100-continue"})[: -len(body)])
        assert read_reply(connection)[0].status == 100
        connection.sendall(body)
        served(read_reply(connection)[0])
    assert gate.first.last().get("expect") is None


def test_upgrades_are_not_for_us(gate: Gate) -> None:
    """A websocket on the realtime path is refused in JSON, not tunnelled past admission."""
    seen = gate.seen()
    upgrade = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "eA==",
    }
    answer = talk(gate.stack, written("GET", "/v1/realtime", headers=upgrade))
    refused(answer, 403, "forbidden")
    assert gate.seen() == seen


# Headers.

FORGED = {
    "X-Envoy-Max-Retries": "50", "x-envoy-retry-on": "5xx", "x-envoy-retry-grpc-on": "cancelled",
    "x-envoy-upstream-rq-timeout-ms": "1", "x-envoy-upstream-rq-per-try-timeout-ms": "1",
    "x-envoy-upstream-stream-duration-ms": "1", "x-envoy-expected-rq-timeout-ms": "1",
    "x-envoy-hedge-on-per-try-timeout": "true", "x-envoy-original-path": "/admin/record",
    "x-envoy-original-dst-host": "127.0.0.1:1", "x-envoy-internal": "true", "x-envoy-upstream-alt-stat-name": "x",
    "x-envoy-force-trace": "1", "x-envoy-ip-tags": "x", "x-envoy-decorator-operation": "x",
    "X-Tidegate-Ticket": "forged-1", "x-tidegate-probe": "second", "x-tidegate-upstream": "second",
    "x-tidegate-reason": "evicted", "x-tidegate-attempts": "9", "x-tidegate-queue-ms": "9", "x-tidegate-tenant": "vip",
    "x-tidegate-session": "s-1",
    "x-tg-err": "forged/-", "x-tg-status": "401", "x-tg-in-0": "P0", "x-tg-in-1": "x", "x-llm-ticket": "forged",
    "x-request-id": "forged-id", "x-forwarded-for": "10.0.0.1", "x-forwarded-proto": "https", "x-real-ip": "10.0.0.1",
}  # fmt: skip
INTERNAL = ("x-envoy-", "x-tidegate-", "x-tg-", "x-forwarded-")


def test_forged_headers_change_nothing_and_go_nowhere(gate: Gate) -> None:
    """With every internal header forged the order, the attempts and the answer are what they are without."""
    gate.first.answers.append((503, {}, b"{}"))
    before = len(gate.first.received), len(gate.second.received)
    answer = post(gate, json.dumps(chat()).encode(), **FORGED)
    served(answer)
    assert (len(gate.first.received), len(gate.second.received)) == (before[0] + 1, before[1] + 1)
    assert answer.headers["x-tidegate-upstream"] == "second"
    assert answer.headers["x-tidegate-attempts"] == "2"
    assert int(answer.headers["x-tidegate-queue-ms"]) < 9000
    assert "x-tidegate-reason" not in answer.headers
    for got in (gate.first.last(), gate.second.last()):
        names = [name.lower() for name, _ in got.headers]
        assert not [name for name in names if name.startswith(INTERNAL)], names
        assert got.get("x-request-id") != b"forged-id"


def test_a_failing_chain_is_tried_once_each_however_often_a_client_asks_for_retries(gate: Gate) -> None:
    """`x-envoy-max-retries: 50` buys nothing: one attempt at each upstream."""
    gate.first.answers.append((500, {}, b"{}"))
    gate.second.answers.append((500, {}, b"{}"))
    before = gate.seen()
    refused(post(gate, json.dumps(chat()).encode(), **FORGED), 503, "upstream_failed")
    assert gate.seen() == before + 2


CREDENTIALS = {
    "authorization": "Bearer sk-clients-own", "x-api-key": "sk-clients-own", "api-key": "sk-clients-own",
    "x-goog-api-key": "sk-clients-own", "cookie": "session=sk-clients-own",
    "proxy-authorization": "Basic sk-clients-own", "openai-organization": "org-sk-clients-own",
    "openai-project": "proj-sk-clients-own",
}  # fmt: skip


def test_credentials_of_clients_stay_here_and_each_upstream_gets_its_own(gate: Gate) -> None:
    """No upstream ever sees a caller's key, cookie or organisation, nor another upstream's key after a failover."""
    gate.first.answers.append((500, {}, b"{}"))
    served(post(gate, json.dumps(chat()).encode(), **CREDENTIALS))
    for name, got in (("first", gate.first.last()), ("second", gate.second.last())):
        values = b"\n".join(value for _, value in got.headers)
        assert b"sk-clients-own" not in values
        assert b"org-" not in values
        assert got.get("authorization") == f"Bearer sk-own-{name}".encode()
        assert values.count(b"sk-own-") == 1


def test_credentials_in_repeated_headers_stay_here_too(gate: Gate) -> None:
    """A header that is sent twice is removed twice."""
    request = written(body=json.dumps(chat()).encode(), headers={"authorization": "Bearer sk-clients-own"})
    twice = request.replace(
        b"\r\n\r\n", b"\r\nAuthorization: Bearer sk-clients-own-2\r\nX-Tidegate-Priority: P0\r\n\r\n", 1
    )
    served(talk(gate.stack, twice))
    got = gate.first.last()
    assert [value for name, value in got.headers if name.lower() == "authorization"] == [b"Bearer sk-own-first"]
    assert got.get("x-tidegate-priority") is None


def test_credentials_in_the_query_stay_here_too(gate: Gate) -> None:
    """Some APIs take keys as parameters: those are taken out, whatever their spelling, and the others pass."""
    for query, left in (
        ("?api-version=1&key=sk-clients-own&x=%26a", "?api-version=1&x=%26a"),
        ("?%6bey=sk-clients-own", ""),
        ("?API_KEY=sk-clients-own&access_token=sk-clients-own&beta=true", "?beta=true"),
        ("?a&b=&c", "?a&b=&c"),
    ):
        served(post(gate, json.dumps(chat()).encode(), CHAT + query))
        assert gate.first.last().path == CHAT + left


def test_huge_headers_are_refused_in_json(gate: Gate) -> None:
    """Over the size or the number that Envoy takes: a JSON refusal; below it everything passes."""
    refused(talk(gate.stack, written(body=b"{}", headers={"x-long": "x" * 70_000})), 400, "bad_request")
    many = {f"x-many-{i}": "1" for i in range(150)}
    refused(talk(gate.stack, written(body=b"{}", headers=many)), 400, "bad_request")
    served(talk(gate.stack, written(body=json.dumps(chat()).encode(), headers={"x-long": "x" * 50_000})))


@pytest.mark.parametrize(
    "name",
    [
        "user-agent", "authorization", "x-tidegate-session", "accept-language", "x-request-timeout-ms",
        "x-stainless-timeout",
    ],
)  # fmt: skip
def test_header_values_that_are_not_text_do_no_harm(gate: Gate, name: str) -> None:
    """Bytes that are no UTF-8 in a header are taken as absent or unknown."""
    for value in (b"\xff\xfe\x80", "é中".encode(), b"a" * 5000, b'"\\%{}'):
        served(talk(gate.stack, written(body=json.dumps(chat()).encode(), headers={name: value})))


@pytest.mark.parametrize("value", [b"P9", b"\xff", b"P0, P2", b"p" * 2000, b"0", b"-1", b"NaN", b"P0;drop"])
def test_a_priority_that_is_none_is_refused(gate: Gate, value: bytes) -> None:
    """A lane that does not exist is a mistake to be told, never a silent default."""
    answer = talk(gate.stack, written(body=json.dumps(chat()).encode(), headers={"x-tidegate-priority": value}))
    refused(answer, 400, "bad_request")


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("x-request-timeout-ms", "0", 504), ("x-request-timeout-ms", "-1", 504), ("grpc-timeout", "0S", 504),
        ("x-request-timeout-ms", "NaN", 200), ("x-request-timeout-ms", "inf", 200),
        ("x-request-timeout-ms", "1e9", 200), ("x-request-timeout-ms", "9" * 40, 200),
        ("x-request-timeout-ms", "", 200), ("x-request-timeout-ms", "soon", 200),
        ("grpc-timeout", "99999999H", 200), ("grpc-timeout", "-1S", 200), ("x-stainless-read-timeout", "0", 200),
        ("x-stainless-timeout", "-3", 200), ("x-stainless-timeout", "NOT_GIVEN", 200), ("x-tidegate-priority", "", 200),
        ("x-tidegate-priority", "p0", 200),
    ],
)  # fmt: skip
def test_timeouts_and_priorities_of_any_kind(gate: Gate, name: str, value: str, status: int) -> None:
    """A time that is over is over; nonsense is no limit; neither ends in an error of ours."""
    answer = talk(gate.stack, written(body=json.dumps(chat()).encode(), headers={name: value}))
    assert answer.status == status
    if status == 504:
        refused(answer, 504, "deadline_passed")
    else:
        assert gate.first.last().get("x-request-timeout-ms") is None


# Upstreams that are not to be trusted either.


def test_an_upstream_cannot_speak_in_our_name(gate: Gate) -> None:
    """Headers that mean us in an upstream's answer are ours or absent."""
    forged = {
        "x-tidegate-reason": "evicted", "x-tidegate-upstream": "forged", "x-tidegate-attempts": "7",
        "x-tg-err": "forged/-", "x-tg-status": "200", "x-envoy-overloaded": "true", "set-cookie": "a=b",
        "x-ratelimit-remaining-tokens": "1", "anthropic-ratelimit-tokens-limit": "1",
    }  # fmt: skip
    for status in (200, 400):
        body = b'{"error": {"type": "invalid_request_error", "message": "no"}}'
        gate.first.answers.append((status, forged, ANSWER if status == 200 else body))
        answer = post(gate, json.dumps(chat(model="plain")).encode())
        assert answer.status_code == status
        assert answer.headers["x-tidegate-upstream"] == "first"
        assert answer.headers["x-tidegate-attempts"] == "1"
        wrong = [name for name in answer.headers if name in forged and answer.headers[name] == forged[name]]
        assert wrong == []


def test_all_is_given_back_in_the_end(gate: Gate) -> None:
    """After all of this nothing is held, and the service still serves."""
    books_balance(gate.stack)
    served(post(gate, json.dumps(chat()).encode()))
