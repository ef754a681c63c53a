"""One request, several upstreams: what moves on to the next, what does not, and what each of them gets to see.

Every failure here is made by a fake provider and every answer read by the real SDKs. Breakers are out of the way (they
have a file of their own), and buckets refill so slowly that what was charged can be read from the state page.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from extproc import dialects, tokens
from extproc.core.request import Endpoint
from extproc.fakes.record import fingerprint
from extproc.fakes.text import answer_text
from extproc.stack import Stack
from extproc.telemetry.catalog import METRICS
from extproc.telemetry.formats import OPEN_TYPE
from tests.e2e.conftest import GRACE_S, books_balance, chat
from tests.e2e.doubles import (
    ANSWER,
    CHAT,
    MESSAGES,
    NEVER_OPENS,
    Crowd,
    Received,
    Upstream,
    crowd,
    emptied,
    forget,
    running,
    tell,
    until,
)

CASES = [(dialect, stream) for dialect in ("openai", "anthropic") for stream in (False, True)]
CHAIN = ("primary", "backup", "local")
ORDERS = list(itertools.permutations(CHAIN))
VENDORS = ("azure", "gemini", "vllm", "anthropic")
VENDOR_ORDERS = [
    *itertools.permutations(("azure", "gemini", "vllm")),
    ("anthropic", "primary"),
    ("primary", "anthropic"),
]
OWN_NAMES = {"primary": "p", "backup": 'a-longer "name" of the backup', "local": "qwen3-32b"}
SLOW = {"tpm": 60, "rpm": 60, "burst_s": 100_000}
"""One unit per second into a bucket of a hundred thousand."""
QUICK_S = 0.05
"""A state that was told in this time is of one moment."""
FIRST_TOKEN_S = 0.5
STALL_S = 2.0
TEXT = answer_text(0, 16)
"""All that the fakes say to `chat()`."""
HTTP = httpx.Client(timeout=30)


@pytest.fixture(scope="module")
def vendors() -> Iterator[dict[str, Upstream]]:
    """Upstreams that keep every header they get."""
    with ExitStack() as open_ones:
        yield {name: open_ones.enter_context(Upstream().listening()) for name in VENDORS}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, vendors: dict[str, Upstream]) -> Iterator[Stack]:
    """The stack of this file."""
    folder = tmp_path_factory.mktemp("failover")
    upstreams = {name: fake(folder, name) for name in CHAIN}
    upstreams |= {name: vendor(folder, name, one.port) for name, one in vendors.items()}
    upstreams["tight"] = fake(folder, "tight", limits=[{"tpm": 60, "burst_s": 60}])
    upstreams["narrow"] = fake(folder, "narrow", limits=[], concurrency=1)
    routes = [{"models": ["gpt-5"], "chain": CHAIN}]
    routes += [{"models": [f"order-{i}"], "chain": order} for i, order in enumerate(ORDERS)]
    routes += [{"models": [f"vendors-{i}"], "chain": order} for i, order in enumerate(VENDOR_ORDERS)]
    routes += [{"models": [name], "chain": ["primary", name, "local"]} for name in ("tight", "narrow")]
    routes.append({"models": ["thinker"], "chain": CHAIN, "first_token_s": 60})
    half_full(folder, *CHAIN)
    with running(
        folder,
        full=False,
        upstreams=upstreams,
        routes=[{**route, "chain": list(route["chain"]), "acknowledge_unowned": True} for route in routes],
        timeouts={"first_token_s": FIRST_TOKEN_S, "stall_s": STALL_S},
        tokens={"calibrate": False},
    ) as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack, vendors: dict[str, Upstream]) -> Iterator[Stack]:
    """The shared stack with empty records; whatever a test took is given back when it ends."""
    with emptied(shared, vendors) as stack:
        yield stack


def fake(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    """Settings of a fake provider with a key of its own and a breaker that never opens."""
    return {
        "key_file": key_file(folder, name),
        "limits": [SLOW],
        "headroom": 0,
        "follow_headers": False,
        "models": {"gpt-5": OWN_NAMES.get(name, name)} | {f"order-{i}": OWN_NAMES.get(name, name) for i in range(6)},
        "owned": name == "local",
        "breaker": NEVER_OPENS,
        "fake": {"first_token_s": 0.01, "output_tokens_per_s": 2000, "burst_s": 100_000},
        **more,
    }


def vendor(folder: Path, name: str, port: int) -> dict[str, Any]:
    """Settings of an upstream that has a vendor's ways: path, key header, model name."""
    owned = name == "vllm"
    return {
        "provider": name,
        "url": f"http://127.0.0.1:{port}",
        "concurrency": 100,
        "follow_headers": False,
        "owned": owned,
        "models": {f"vendors-{i}": f"{name}-model" for i in range(len(VENDOR_ORDERS))},
        "breaker": NEVER_OPENS,
    } | ({} if owned else {"key_file": key_file(folder, name)})


def key_of(name: str) -> str:
    """The key that an upstream must see."""
    return f"sk-{name}-secret"


def key_file(folder: Path, name: str) -> str:
    """The file with that key."""
    file = folder / f"{name}.key"
    file.write_text(key_of(name), "utf-8")
    return str(file)


def half_full(folder: Path, *names: str) -> None:
    """Let the service find these upstreams' buckets half full, so that every refill can be accounted for."""
    levels = {f"upstream/{name}/*/{kind}": 50_000 for name in names for kind in ("total", "requests")}
    levels["upstream/tight/*/total"] = 60
    (folder / "levels.json").write_text(json.dumps({"at": time.time(), "levels": levels}), "utf-8")


@dataclass(frozen=True, slots=True)
class Got:
    """One answer as an SDK understood it."""

    text: str
    finish: str | None
    headers: Mapping[str, str]

    @property
    def way(self) -> tuple[str, str, int]:
        """Who answered by its own word, who by ours, and at which attempt."""
        headers = self.headers
        return headers["x-fake-provider"], headers["x-tidegate-upstream"], int(headers["x-tidegate-attempts"])


def ask(stack: Stack, dialect: str, fault: str | None = None, *, stream: bool, model: str = "gpt-5") -> Got:
    """One request through the SDK of a dialect. The fault goes to every upstream unless it names one."""
    headers = {"x-fake-fault": fault} if fault else {}
    options = {**chat(), "model": model, "extra_headers": headers}
    client = sdk_of(dialect, stack.url)
    if dialect == "openai":
        raw = client.chat.completions.with_raw_response.create(**options, stream=stream)
        chunks = list(raw.parse()) if stream else [raw.parse()]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        text = "".join((c.delta if stream else c.message).content or "" for c in choices)
        return Got(text, choices[-1].finish_reason, raw.headers)
    raw = client.messages.with_raw_response.create(**options, stream=stream)
    if not stream:
        said = raw.parse()
        return Got("".join(block.text for block in said.content if block.type == "text"), said.stop_reason, raw.headers)
    events = list(raw.parse())
    text = "".join(e.delta.text for e in events if e.type == "content_block_delta" and e.delta.type == "text_delta")
    return Got(text, next((e.delta.stop_reason for e in events if e.type == "message_delta"), None), raw.headers)


@cache
def sdk_of(dialect: str, url: str) -> Any:
    """The SDK of a dialect, with a key that no upstream may ever see."""
    if dialect == "openai":
        return openai.OpenAI(base_url=f"{url}/v1", api_key="sk-client", max_retries=0)
    return anthropic.Anthropic(base_url=url, api_key="sk-client", max_retries=0)


def price(model: str) -> int:
    """Tokens that `chat()` is reserved with under the name of a model."""
    return 16 + tokens.estimate(dialects.read(Endpoint.CHAT, json.dumps(chat()).encode()).call.prompt, model)


def seen(stack: Stack, name: str) -> list[dict[str, Any]]:
    """The requests that a fake got, canaries never among them."""
    return list(stack.record(name)["requests"])


def counts(stack: Stack, *names: str) -> list[int]:
    """How many requests each of these fakes got."""
    return [len(seen(stack, name)) for name in names]


def metrics(stack: Stack) -> Counter[tuple[str, ...]]:
    """Values by name and labels' values (by the labels' names), as both of its formats tell them, and nothing that the
    catalog has not.
    """
    address = f"http://{stack.settings.service.console}/metrics"
    found: list[Counter[tuple[str, ...]]] = []
    for accept, parse in (("text/plain", text_string_to_metric_families), (OPEN_TYPE, open_families)):
        page = HTTP.get(address, headers={"accept": accept}).raise_for_status().text
        families = list(parse(page))
        assert {family.name for family in families} <= {metric.family for metric in METRICS}
        samples = [one for family in families for one in family.samples]
        found.append(Counter({(one.name, *_values(one.labels)): one.value for one in samples}))
    assert found[0].keys() == found[1].keys()
    return found[0]


def _values(labels: Mapping[str, str]) -> list[str]:
    return [labels[name] for name in sorted(labels)]


def dated(stack: Stack) -> tuple[float, dict[str, Any]]:
    """The state of the service, and the time that it is of. What took long is asked for again; the quickest counts."""
    took, at, state = inf, 0.0, dict[str, Any]()
    for _ in range(5):
        began = time.monotonic()
        told = stack.state()
        ended = time.monotonic()
        if told and ended - began < took:
            took, at, state = ended - began, (began + ended) / 2, told
        if took < QUICK_S:
            break
    return at, state


class Meter:
    """What is taken from buckets while it is in use, refill left out."""

    def __init__(self, stack: Stack) -> None:
        """Note the levels of all buckets."""
        self._stack = stack
        self._at, self._before = dated(stack)

    def spent(self, key: str) -> float:
        """Units that `key` has lost since, net."""
        at, state = dated(self._stack)
        before, now = self._before["counters"][key], state["counters"][key]
        return float(before["level"] + before["per_second"] * (at - self._at) - now["level"])

    def counted(self, name: str, key: str | None = None) -> int:
        """By how much a count of the tally has grown; of one key, where it is kept by key."""
        before, now = (state["tally"][name] for state in (self._before, self._stack.state()))
        return int(now - before if key is None else now.get(key, 0) - before.get(key, 0))


REFUSED = ["500", "503", "529", "429;retry-after=5", "429-bare", "slow-down", "reset", "context-length", "404", "413"]
OUR_ACCOUNT = ["401", "402", "403", "billing", "spend-limit", "error-200;billing"]


@pytest.mark.parametrize("fault", [*REFUSED, *OUR_ACCOUNT, "error-200", "html-200"])
@pytest.mark.parametrize(("dialect", "stream"), CASES)
def test_a_refusal_moves_on_within_the_request(stack: Stack, dialect: str, fault: str, *, stream: bool) -> None:
    """Overload, pace, a broken connection, our own key or credit, a window that is too small, a model that is not
    there, an error or a page under 200: the backup answers, the client notices nothing, each upstream was asked once,
    and a retry-after is not waited for.
    """
    meter, began = Meter(stack), time.monotonic()
    got = ask(stack, dialect, f"{fault};provider=primary", stream=stream)
    assert (got.text, got.way) == (TEXT, ("backup", "backup", 2))
    assert time.monotonic() - began < 4
    assert int(got.headers["x-tidegate-queue-ms"]) < 1000
    assert counts(stack, *CHAIN) == [1, 1, 0]
    until(lambda: meter.counted("failed_attempts", "primary") == 1)


@pytest.mark.parametrize("fault", ["malformed", "error-first", "cut"])
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_a_json_answer_that_is_none_moves_on(stack: Stack, dialect: str, fault: str) -> None:
    """Half a JSON document, an error in place of an answer, a connection that breaks in the middle of the body."""
    got = ask(stack, dialect, f"{fault};provider=primary", stream=False)
    assert (got.text, got.way) == (TEXT, ("backup", "backup", 2))
    assert counts(stack, *CHAIN) == [1, 1, 0]


@pytest.mark.parametrize(("dialect", "stream"), CASES)
def test_an_early_answer_wins(stack: Stack, dialect: str, *, stream: bool) -> None:
    """Without any fault the primary answers and nobody else is asked."""
    got = ask(stack, dialect, stream=stream)
    assert (got.text, got.way) == (TEXT, ("primary", "primary", 1))
    assert counts(stack, *CHAIN) == [1, 0, 0]


def test_a_request_is_explained_by_its_id(stack: Stack) -> None:
    """Who failed it, who served it, and what it took, from the records of Envoy. One that was refused unread is told,
    too, and one that nobody has seen is not.
    """
    answer = HTTP.post(stack.url + CHAT, json=chat(), headers={"x-fake-fault": "503;provider=primary"})
    name = answer.headers["x-tidegate-request-id"]
    known = until(lambda: (found := told_by_console(stack, f"/{name}")) and len(found["attempts"]) > 1 and found)
    assert (known["state"], known["choice"]["order"]) == ("served", list(CHAIN))
    assert [(one["upstream"], one["ok"], one["status"]) for one in known["attempts"]] == [
        ("primary", False, 503), ("backup", True, 200),
    ]  # fmt: skip
    assert known["attempts"][0]["then"] == "backup"
    assert known["settlement"]["reserved"]["output"] == 16
    assert known["settlement"]["used"]["total"] == answer.json()["usage"]["total_tokens"]
    refused = HTTP.post(stack.url + CHAT, json={"model": "gpt-5"})
    known = told_by_console(stack, f"/{refused.headers['x-tidegate-request-id']}")
    assert (known["reason"], known["refusal"]["detail"]) == ("bad_request", "messages is missing")
    assert told_by_console(stack, "/nobodys") == {}


def told_by_console(stack: Stack, what: str) -> dict[str, Any]:
    """What the console says of requests, or of one; empty where that is not known."""
    answer = HTTP.get(f"http://{stack.settings.service.console}/api/v1/requests{what}")
    assert answer.status_code in (200, 404)
    return dict(answer.json()) if answer.is_success else {}


def test_killed_upstreams_are_passed_over(stack: Stack) -> None:
    """The primary's process is killed: requests go on at the backup; then that one: at local. Streaming and not, in
    both dialects, within the same request.
    """
    try:
        stack.kill("primary")
        for dialect, stream in CASES:
            assert ask(stack, dialect, stream=stream).way == ("backup", "backup", 2)
        stack.kill("backup")
        for dialect, stream in CASES:
            assert ask(stack, dialect, stream=stream).way == ("local", "local", 3)
    finally:
        stack.start_fake("primary")
        stack.start_fake("backup")
    assert ask(stack, "openai", stream=True).way == ("primary", "primary", 1)


def test_a_killed_upstream_breaks_the_streams_it_was_sending(stack: Stack) -> None:
    """Killed in the middle of an answer: that client's connection breaks, no other upstream is asked to go on."""
    with HTTP.stream(
        "POST", stack.url + CHAT, json=chat(stream=True), headers={"x-fake-fault": "stall;s=20;provider=primary"}
    ) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data:")
        stack.kill("primary")
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    stack.start_fake("primary")
    assert counts(stack, "backup", "local") == [0, 0]


@pytest.mark.parametrize(("dialect", "stream"), CASES)
def test_every_upstream_gets_its_own_model_and_key_in_every_order(stack: Stack, dialect: str, *, stream: bool) -> None:
    """Whatever the order, and time after time: each attempt carries that upstream's model name and key and a body that
    is whole, as long as content-length says, and equal but for the name; nobody sees another's key or the client's.
    """
    for _ in range(2):
        for i, order in enumerate(ORDERS):
            forget(stack)
            path, body = (CHAT if dialect == "openai" else MESSAGES), {**chat(stream=stream), "model": f"order-{i}"}
            headers = {"x-fake-fault": f"503;provider={order[0]}", "authorization": "Bearer sk-client"}
            failed = order[:1]
            if i % 2:
                post_fault(stack, order[1], "503")
                failed = order[:2]
            response = HTTP.post(stack.url + path, json=body, headers=headers)
            assert response.status_code == 200, response.text
            assert response.headers["x-tidegate-upstream"] == order[len(failed)]
            for name in order[: len(failed) + 1]:
                (got,) = seen(stack, name)
                assert (got["model"], got["key"]) == (OWN_NAMES[name], fingerprint(key_of(name)))
                assert got["headers"]["content-length"] == str(got["body_bytes"])
                assert got["body_sha256"] == hashlib.sha256(expected_body(dialect, body, name, order)).hexdigest()
                assert not [header for header in got["headers"] if header.startswith(("x-envoy", "x-tidegate", "x-tg"))]
            assert counts(stack, *order[len(failed) + 1 :]) == [0] * (2 - len(failed))


def expected_body(dialect: str, body: Mapping[str, Any], name: str, order: tuple[str, ...]) -> bytes:
    """What an upstream of an order must get: the same length for all, its own model's name, all else byte for byte."""
    sent = json.dumps(body, separators=(",", ":"))
    options = ',"stream_options":{"include_usage":true}' if dialect == "openai" and body["stream"] else ""
    heads = {one: f'{{"model":{json.dumps(OWN_NAMES[one])}{options}' for one in order}
    rest = sent.removeprefix(f'{{"model":"{body["model"]}"')
    return (heads[name].ljust(max(map(len, heads.values()))) + rest).encode()


def test_large_bodies_fail_over_whole(stack: Stack, vendors: dict[str, Upstream]) -> None:
    """Three megabytes, refused twice: the third gets the same bytes as the first but for the name."""
    order = VENDOR_ORDERS[0]
    for name in order[:2]:
        vendors[name].answers.append((503, {}, b"{}"))
    sent = {**chat("x" * 3_000_000), "model": "vendors-0"}
    response = HTTP.post(stack.url + CHAT, json=sent)
    assert (response.status_code, response.headers["x-tidegate-attempts"]) == (200, "3")
    bodies = [vendors[name].received[0].body for name in order]
    assert len({len(body) for body in bodies}) == 1
    tails = {hashlib.sha256(body.partition(b',"max_tokens"')[2]).hexdigest() for body in bodies}
    assert len(tails) == 1
    assert [json.loads(body) for body in bodies] == [{**sent, "model": f"{name}-model"} for name in order]


def post_fault(stack: Stack, name: str, fault: str) -> None:
    """Let the next request at a fake fail."""
    order = {"fault": fault, "count": 1}
    HTTP.post(f"{stack.fakes[name].where}/admin/fault", json=order).raise_for_status()


PATHS = {"azure": "/openai/v1", "gemini": "/v1beta/openai", "vllm": "/v1", "anthropic": "/v1"}
KEY_HEADERS = {
    "azure": {"api-key": key_of("azure")},
    "gemini": {"authorization": f"Bearer {key_of('gemini')}"},
    "vllm": {},
    "anthropic": {"x-api-key": key_of("anthropic")},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("i", range(6))
def test_vendors_get_their_own_path_and_key_header_in_every_order(
    stack: Stack,
    vendors: dict[str, Upstream],
    i: int,
    *,
    stream: bool,
) -> None:
    """Vendors differ in path and in the header of the key: an attempt has only its own, whoever was tried before, and
    the query of the path is kept.
    """
    order = VENDOR_ORDERS[i]
    for name in order[:2]:
        vendors[name].answers.append((503, {}, b"{}"))
    vendors[order[2]].answers.append((200, {}, ANSWER))
    sent = {**chat(stream=stream), "model": f"vendors-{i}"}
    headers = {"authorization": "Bearer sk-client", "x-api-key": "sk-client", "api-key": "sk-client"}
    response = HTTP.post(f"{stack.url}{CHAT}?a=b", json=sent, headers=headers)
    assert (response.status_code, response.headers["x-tidegate-attempts"]) == (200, "3")
    for name in order:
        (got,) = vendors[name].received
        check_vendor(name, got, CHAT)
        assert got.json()["messages"] == sent["messages"]
        assert got.path.endswith("?a=b")


@pytest.mark.parametrize("i", [6, 7])
def test_the_anthropic_key_stays_with_anthropic(stack: Stack, vendors: dict[str, Upstream], i: int) -> None:
    """The same for the Anthropic dialect, before and behind an upstream that takes bearer tokens."""
    order = VENDOR_ORDERS[i]
    vendors["anthropic"].answers.append((529, {}, b"{}") if order[0] == "anthropic" else (200, {}, ANSWER))
    headers = {"x-fake-fault": "529" if order[0] == "primary" else "", "x-api-key": "sk-client"}
    body = {**chat(), "model": f"vendors-{i}"}
    response = HTTP.post(stack.url + MESSAGES, json=body, headers={k: v for k, v in headers.items() if v})
    assert response.status_code == 200
    (got,) = vendors["anthropic"].received
    check_vendor("anthropic", got, MESSAGES)
    assert got.get("anthropic-version") == b"2023-06-01"
    (at_primary,) = seen(stack, "primary")
    assert at_primary["key"] == fingerprint(key_of("primary"))
    assert "x-api-key" not in at_primary["headers"]


def check_vendor(name: str, got: Received, path: str) -> None:
    """Path, model, key and length are the vendor's own."""
    assert got.path.partition("?")[0] == PATHS[name] + path.removeprefix("/v1")
    assert got.json()["model"] == f"{name}-model"
    assert got.get("content-length") == str(len(got.body)).encode()
    keys = {
        header: value.decode() for header, value in got.headers if header in ("authorization", "api-key", "x-api-key")
    }
    assert keys == KEY_HEADERS[name]


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
@pytest.mark.parametrize("fault", ["silence", "slow-first-token;s=20"])
def test_a_stream_that_does_not_begin_moves_on(stack: Stack, dialect: str, fault: str) -> None:
    """No first token within the limit, headers withheld until then: the next upstream is asked."""
    began = time.monotonic()
    got = ask(stack, dialect, f"{fault};provider=primary", stream=True)
    assert (got.text, got.way) == (TEXT, ("backup", "backup", 2))
    assert FIRST_TOKEN_S <= time.monotonic() - began < 10
    until(lambda: stack.record("primary")["in_flight"] == 0)


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_a_route_whose_models_think_waits_for_its_first_upstream(stack: Stack, dialect: str) -> None:
    """What is silence on another route is patience on this one, and it is asked once; a failure still moves on."""
    late = f"slow-first-token;s={1.25 * STALL_S};provider=primary"
    got = ask(stack, dialect, late, stream=True, model="thinker")
    assert (got.text, got.way) == (TEXT, ("primary", "primary", 1))
    assert counts(stack, "primary", "backup") == [1, 0]
    assert ask(stack, dialect, late, stream=True).way == ("backup", "backup", 2)
    assert ask(stack, dialect, "503;provider=primary", stream=True, model="thinker").way == ("backup", "backup", 2)


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_early_headers_settle_who_answers(stack: Stack, dialect: str) -> None:
    """An upstream that sends its headers at once keeps the request, however late its first token."""
    got = ask(stack, dialect, "slow-first-token;s=0.8;early-headers;provider=primary", stream=True)
    assert (got.text, got.way) == (TEXT, ("primary", "primary", 1))


@pytest.mark.parametrize("fault", ["slow-first-token;s=0.8", "silence"])
def test_json_answers_have_no_first_token_limit(stack: Stack, fault: str) -> None:
    """A JSON answer may take longer than a stream's first token; its limit is the caller's deadline."""
    limit_ms = "1500" if fault == "silence" else "20000"
    headers = {"x-fake-fault": f"{fault};provider=primary", "x-request-timeout-ms": limit_ms}
    began = time.monotonic()
    response = HTTP.post(stack.url + CHAT, json=chat(), headers=headers)
    if fault == "silence":
        assert (response.status_code, response.headers["x-tidegate-reason"]) == (504, "deadline_passed")
        assert 1.4 < time.monotonic() - began < 5
    else:
        assert (response.status_code, response.headers["x-tidegate-upstream"]) == (200, "primary")
    assert counts(stack, "backup") == [0]


@pytest.mark.parametrize("fault", OUR_ACCOUNT)
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_words_about_our_account_never_reach_a_caller(stack: Stack, dialect: str, fault: str) -> None:
    """Our key or our credit is refused everywhere: the caller is told that nobody could answer, not a word of why."""
    refused = HTTP.post(
        stack.url + (CHAT if dialect == "openai" else MESSAGES), json=chat(), headers={"x-fake-fault": fault}
    )
    assert (refused.status_code, refused.headers["x-tidegate-reason"]) == (503, "upstream_failed")
    assert counts(stack, *CHAIN) == [1, 1, 1]
    assert not about_us(refused.text + str(refused.headers))


def about_us(said: str) -> list[str]:
    """What of it speaks of an account, or is a header of ours."""
    words = ("key", "credit", "quota", "billing", "payment", "balance", "spend", "permission", "x-tg-")
    return [word for word in words if word in said.lower()]


@pytest.mark.parametrize("fault", ["error-first;billing", "error-later;billing"])
@pytest.mark.parametrize(("dialect", "path"), [("openai", CHAT), ("anthropic", MESSAGES)])
def test_not_inside_a_stream_either(stack: Stack, dialect: str, path: str, fault: str) -> None:
    """An error event about our account is replaced: the SDK raises, and hears only that the answer ended early. It
    counts as a failure of that upstream.
    """
    sound(stack, dialect)
    headers = {"x-fake-fault": f"{fault};provider=primary"}
    raw = HTTP.post(stack.url + path, json=chat(stream=True), headers=headers)
    assert (raw.status_code, about_us(raw.text)) == (200, [])
    error = openai.APIError if dialect == "openai" else anthropic.APIError
    with pytest.raises(error, match="ended its answer early"):
        ask(stack, dialect, f"{fault};provider=primary", stream=True)
    assert counts(stack, *CHAIN) == [3, 0, 0]
    until(lambda: failures(stack) == 2)


@pytest.mark.parametrize(("dialect", "path"), [("openai", CHAT), ("anthropic", MESSAGES)])
@pytest.mark.parametrize("fault", ["prefill", "error-200;filter"])
def test_what_the_request_itself_is_refused_for_is_passed_on(stack: Stack, dialect: str, path: str, fault: str) -> None:
    """In the provider's own words and as an error, whatever status they came under; nobody else is asked, and it counts
    against nobody.
    """
    sound(stack, dialect)
    begun = {**chat(), "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "{"}]}
    told = HTTP.post(stack.fakes["primary"].where + path, json=begun, headers={"x-fake-fault": fault})
    got = HTTP.post(stack.url + path, json=begun, headers={"x-fake-fault": f"{fault};provider=primary"})
    assert (got.status_code, got.json()["error"]) == (400, told.json()["error"])
    assert counts(stack, "backup", "local") == [0, 0]
    books_balance(stack)
    assert failures(stack) == 0


def test_a_402_is_our_account_too(stack: Stack, vendors: dict[str, Upstream]) -> None:
    """Payment required: the next upstream is asked; if it is the last, its body is kept from the caller."""
    insufficient = (402, {}, b'{"error": {"message": "Insufficient Balance", "type": "unknown_error"}}')
    order = VENDOR_ORDERS[0]
    vendors[order[0]].answers.append(insufficient)
    assert HTTP.post(stack.url + CHAT, json={**chat(), "model": "vendors-0"}).headers["x-tidegate-upstream"] == order[1]
    for name in order:
        vendors[name].answers.append(insufficient)
    refused = HTTP.post(stack.url + CHAT, json={**chat(), "model": "vendors-0"})
    assert (refused.status_code, refused.headers["x-tidegate-reason"]) == (503, "upstream_failed")
    assert "balance" not in refused.text.lower()


@pytest.mark.parametrize(("dialect", "stream"), CASES)
def test_too_long_for_everybody_is_said_honestly(stack: Stack, dialect: str, *, stream: bool) -> None:
    """A prompt beyond the first windows is tried at the others; when the last refuses too, its own 400 is passed on."""
    error = openai.BadRequestError if dialect == "openai" else anthropic.BadRequestError
    with pytest.raises(error, match=r"maximum context length|prompt is too long") as caught:
        ask(stack, dialect, "context-length", stream=stream)
    assert caught.value.response.headers["x-tidegate-attempts"] == "3"
    assert "x-tidegate-reason" not in caught.value.response.headers
    assert counts(stack, *CHAIN) == [1, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_clients_own_error_is_passed_on_once(stack: Stack, *, stream: bool) -> None:
    """A 400 about the request itself: byte for byte what the provider said, not retried, counted against nobody. Its
    tokens come back at once, and nothing is taken from those who were not asked, not even for a moment.
    """
    headers = {"x-fake-fault": "content-filter"}
    told = HTTP.post(stack.fakes["primary"].where + CHAT, json=chat(stream=stream), headers=headers)
    forget(stack)
    before, meter = stack.state()["breakers"], Meter(stack)
    got = HTTP.post(stack.url + CHAT, json=chat(stream=stream), headers=headers)
    assert (got.status_code, got.content) == (400, told.content)
    assert got.headers["x-tidegate-attempts"] == "1"
    assert counts(stack, *CHAIN) == [1, 0, 0]
    books_balance(stack, within_s=GRACE_S - 1)  # sooner than the grace period for missing records
    assert stack.state()["breakers"] == before
    assert meter.spent("upstream/primary/*/total") == pytest.approx(0, abs=0.3)
    assert meter.spent("upstream/primary/*/requests") == pytest.approx(1, abs=0.3)
    assert meter.spent("upstream/backup/*/total") == pytest.approx(0, abs=0.3)
    assert meter.spent("upstream/backup/*/requests") == pytest.approx(0, abs=0.3)


@pytest.mark.parametrize(("fault", "status"), [("503", 503), ("429", 429), ("reset", 0)])
@pytest.mark.parametrize("language", ["en", "zh-CN,zh;q=0.9"])
@pytest.mark.parametrize(("dialect", "path"), [("openai", CHAT), ("anthropic", MESSAGES)])
def test_all_failed_is_worded_for_the_caller(
    stack: Stack, dialect: str, path: str, language: str, fault: str, status: int
) -> None:
    """Every upstream failed, however: 503 `upstream_failed` in the caller's dialect and language, with a time to retry
    that body and header agree on.
    """
    headers = {"x-fake-fault": fault, "accept-language": language}
    refused = HTTP.post(stack.url + path, json=chat(), headers=headers)
    assert (refused.status_code, refused.headers["x-tidegate-reason"]) == (503, "upstream_failed"), status
    assert (refused.headers["x-should-retry"], refused.headers["content-type"]) == ("true", "application/json")
    wait = int(refused.headers["retry-after"])
    assert wait >= 1
    error = refused.json()["error"]
    assert error["reason"] == "upstream_failed"
    assert f"{wait} 秒" in error["message"] if "zh" in language else f"{wait} second" in error["message"]
    if dialect == "openai":
        assert (error["type"], error["code"], error["param"]) == ("server_busy", "SERVER_OVERLOADED", None)
    else:
        assert (refused.json()["type"], error["type"]) == ("error", "overloaded_error")
    assert counts(stack, *CHAIN) == [1, 1, 1]


@pytest.mark.parametrize(("dialect", "stream"), CASES)
def test_sdks_raise_when_all_failed(stack: Stack, dialect: str, *, stream: bool) -> None:
    """The SDKs see a 503 of their own kind."""
    error = openai.InternalServerError if dialect == "openai" else anthropic.InternalServerError
    with pytest.raises(error) as caught:
        ask(stack, dialect, "503", stream=stream)
    assert caught.value.status_code == 503


async def test_forty_failovers_at_once_all_succeed_and_are_charged_where_they_went(stack: Stack) -> None:
    """Forty requests lose their primary together: all are answered by the backup. Tokens come back to the primary, and
    the backup is charged for forty, tokens and requests, without a word of overshoot while its bucket holds them.
    Metrics say the same as the providers do.
    """
    meter, before = Meter(stack), metrics(stack)
    async with crowd(stack) as clients:
        results = await gather(clients, 40, chat(), "503;after=0.1;provider=primary")
    assert {(r.status, r.headers["x-tidegate-upstream"], r.headers["x-tidegate-attempts"]) for r in results} == {
        (200, "backup", "2")
    }
    await asyncio.to_thread(books_balance, stack)
    assert counts(stack, *CHAIN) == [40, 40, 0]
    assert meter.spent("upstream/primary/*/total") == pytest.approx(0, abs=0.5)
    assert meter.spent("upstream/backup/*/total") == pytest.approx(40 * price("gpt-5"), abs=0.5)
    assert meter.spent("upstream/local/*/total") == pytest.approx(0, abs=0.5)
    assert meter.spent("upstream/primary/*/requests") == pytest.approx(40, abs=0.5)
    assert meter.spent("upstream/backup/*/requests") == pytest.approx(40, abs=0.5)
    assert meter.counted("failed_attempts", "primary") == 40
    assert meter.counted("overshot", "upstream/backup/*/total") == 0
    await asyncio.sleep(0.6)  # a page of metrics serves for half a second whoever asks
    new = metrics(stack) - before
    assert new["tidegate_failovers_total", "backup", "primary"] == 40
    assert new["tidegate_failed_attempts_total", "failure", "primary"] == 40
    prompts = sum(one["prompt_tokens"] for one in seen(stack, "backup"))
    for kind, used in (("input", prompts), ("output", 40 * 16)):
        sums = {key: n for key, n in new.items() if key[0] == "gen_ai_client_token_usage_sum" and kind in key}
        assert [n for key, n in sums.items() if "backup" in key] == [used]
    assert sum(n for key, n in new.items() if key[0] == "gen_ai_server_request_duration_seconds_count") == 40


async def test_failovers_into_a_small_bucket_are_counted_as_overshoot(stack: Stack) -> None:
    """Ten failovers that each saw room for one: all are served, the debt is exactly what they cost, it is told as
    overshoot, and while in debt the upstream is neither asked nor fallen back on: the primary is asked a second time.
    """
    until(lambda: stack.state()["counters"]["upstream/tight/*/total"]["level"] > 59, within_s=70)
    meter, body = Meter(stack), {**chat(), "model": "tight"}
    async with crowd(stack) as clients:
        # Late enough for all of them to be there before the first fails.
        results = await gather(clients, 10, body, "503;after=2;provider=primary")
    assert {(r.status, r.headers["x-tidegate-upstream"]) for r in results} == {(200, "tight")}
    await asyncio.to_thread(books_balance, stack)
    level = stack.state()["counters"]["upstream/tight/*/total"]["level"]
    cost = 10 * price("tight")
    assert level == pytest.approx(60 - cost, abs=10)
    assert meter.counted("overshot", "upstream/tight/*/total") == pytest.approx(cost - 60, abs=5)
    async with crowd(stack) as clients:
        (refused,) = await gather(clients, 1, body, "503;provider=primary")
    assert (refused.status, refused.headers["x-tidegate-attempts"]) == (503, "2")
    assert counts(stack, "primary", "tight", "local") == [12, 10, 0]


async def gather(clients: Crowd, count: int, body: Mapping[str, Any], fault: str) -> list[Any]:
    """Many requests at once, all with one fault."""
    return await asyncio.gather(*(clients.ask(body, x_fake_fault=fault) for _ in range(count)))


def test_a_full_upstream_is_never_entered_by_failover(stack: Stack) -> None:
    """The next in the chain has no slot free: the order ends before it, the request fails after a second attempt at its
    only upstream, and nobody behind it is asked either. When its slot is free again it serves.
    """
    body = {**chat(), "model": "narrow"}
    fault = {"x-fake-fault": "503;provider=primary"}
    slow = {"x-fake-fault": "503;provider=primary"}
    tell(stack, "narrow", output_tokens_per_s=20)
    long = {**body, "stream": True, "max_tokens": 2000}
    with HTTP.stream("POST", stack.url + CHAT, json=long, headers=slow) as held:
        assert held.headers["x-tidegate-upstream"] == "narrow"
        until(lambda: stack.state()["counters"]["upstream/narrow/slots"]["used"] == 1)
        (before,) = counts(stack, "primary")
        refused = HTTP.post(stack.url + CHAT, json=body, headers=fault)
        assert (refused.status_code, refused.headers["x-tidegate-reason"]) == (503, "upstream_failed")
        assert refused.headers["x-tidegate-attempts"] == "2"
        assert counts(stack, "primary", "narrow", "local") == [before + 2, 1, 0]
    until(lambda: stack.state()["counters"]["upstream/narrow/slots"]["used"] == 0)
    tell(stack, "narrow", output_tokens_per_s=2000)
    served = HTTP.post(stack.url + CHAT, json=body, headers=fault)
    assert (served.status_code, served.headers["x-tidegate-upstream"]) == (200, "narrow")


# Once an answer has begun nobody else can take over: whatever goes wrong then must be seen by the client.

BROKEN = r"peer closed connection|Connection error"


def sound(stack: Stack, dialect: str) -> None:
    """One good answer of the primary, and heard of, so that its failures are counted from zero."""
    ask(stack, dialect, stream=True)
    books_balance(stack)
    until(lambda: failures(stack) == 0)


def failures(stack: Stack) -> int:
    """Consecutive failures that the primary's breaker has counted."""
    return int(stack.state()["breakers"]["primary"]["failures"])


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_a_cut_stream_breaks_the_connection_quickly(stack: Stack, dialect: str) -> None:
    """The upstream hangs up in the middle: the SDK raises, at once, and nobody takes the half for the whole."""
    sound(stack, dialect)
    began = time.monotonic()
    with pytest.raises(Exception, match=BROKEN):
        ask(stack, dialect, "cut;provider=primary", stream=True)
    assert time.monotonic() - began < STALL_S, "nothing is waited for"
    assert counts(stack, *CHAIN) == [2, 0, 0]
    until(lambda: failures(stack) == 1)


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_a_stream_that_just_ends_gets_a_word_of_why(stack: Stack, dialect: str) -> None:
    """A clean end without finish reason: an error event in the caller's dialect is appended, and the SDK raises it."""
    sound(stack, dialect)
    error = openai.APIError if dialect == "openai" else anthropic.APIError
    with pytest.raises(error, match="ended its answer early") as caught:
        ask(stack, dialect, "early-end;provider=primary", stream=True)
    assert "upstream_failed" in str(caught.value.body)
    assert counts(stack, *CHAIN) == [2, 0, 0]
    until(lambda: failures(stack) == 1)


@pytest.mark.parametrize("fault", ["error-first", "error-later"])
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_an_error_inside_a_stream_is_passed_on_and_counted(stack: Stack, dialect: str, fault: str) -> None:
    """An error event under status 200, first or later: the SDK raises what the provider said, nothing is added to it,
    and it counts as a failure of that upstream.
    """
    sound(stack, dialect)
    error = openai.APIError if dialect == "openai" else anthropic.APIError
    with pytest.raises(error, match=r"had an error while processing|Overloaded"):
        ask(stack, dialect, f"{fault};provider=primary", stream=True)
    until(lambda: failures(stack) == 1)


@pytest.mark.parametrize("fault", ["error-first;flat", "error-later;flat"])
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_an_error_that_no_sdk_would_see_is_worded_anew(stack: Stack, dialect: str, fault: str) -> None:
    """One without a member `error`, as an engine may send it under 200: the SDK raises, and it counts; in place of a
    whole answer the next upstream is asked.
    """
    sound(stack, dialect)
    error = openai.APIError if dialect == "openai" else anthropic.APIError
    with pytest.raises(error, match="ended its answer early"):
        ask(stack, dialect, f"{fault};provider=primary", stream=True)
    until(lambda: failures(stack) == 1)
    assert ask(stack, dialect, f"{fault};provider=primary", stream=False).way == ("backup", "backup", 2)
    until(lambda: failures(stack) == 2)


@pytest.mark.parametrize("at", [0, 8, 15])
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_a_stalled_stream_is_ended(stack: Stack, dialect: str, at: int) -> None:
    """Silence between tokens longer than `stall_s`, after the first event or before the last word: the connection
    breaks, long before the upstream would go on; nobody else is asked, and it counts once.
    """
    sound(stack, dialect)
    began = time.monotonic()
    with pytest.raises(Exception, match=BROKEN):
        ask(stack, dialect, f"stall;s=30;at={at};provider=primary", stream=True)
    assert STALL_S <= time.monotonic() - began < 10
    until(lambda: stack.record("primary")["in_flight"] == 0)
    books_balance(stack)
    assert failures(stack) == 1
    assert counts(stack, *CHAIN) == [2, 0, 0]


def test_what_came_before_a_stall_has_gone_on(stack: Stack) -> None:
    """As it was, and neither an error nor an end behind it: the connection breaks, so no client takes it for all."""
    came: list[bytes] = []
    fault = {"x-fake-fault": "stall;s=30;at=8;provider=primary"}
    request = HTTP.stream("POST", stack.url + CHAT, json=chat(stream=True), headers=fault)
    with pytest.raises(httpx.RemoteProtocolError), request as answer:
        came.extend(answer.iter_bytes())
    events = [json.loads(line.removeprefix("data: ")) for line in b"".join(came).decode().split("\n\n") if line]
    assert "".join(one["choices"][0]["delta"]["content"] for one in events) == answer_text(0, 8)


@pytest.mark.parametrize(("fault", "length"), [("truncated", 1), ("empty", 0)])
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_short_answers_move_on_where_they_can(stack: Stack, dialect: str, fault: str, length: int) -> None:
    """Empty, or ended by a cap that is far away: a JSON answer is asked for elsewhere, and the last one's is passed on
    as it is. In a stream it is too late: nothing is added to it, nobody else is asked.
    """
    got = ask(stack, dialect, f"{fault};provider=primary", stream=False)
    assert (got.text, got.way) == (TEXT, ("backup", "backup", 2))
    got = ask(stack, dialect, fault, stream=False)
    assert (len(got.text.split()), got.way) == (length, ("local", "local", 3))
    got = ask(stack, dialect, f"{fault};provider=primary", stream=True)
    assert (len(got.text.split()), got.way) == (length, ("primary", "primary", 1))
    assert got.finish


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("dialect", "path", "asked"),
    [("openai", CHAT, {"stop": ["a"]}), ("anthropic", MESSAGES, {"stop_sequences": ["a"]})],
)
def test_an_answer_that_its_caller_stopped_is_whole(
    stack: Stack, dialect: str, path: str, asked: dict[str, Any], *, stream: bool
) -> None:
    """However empty: nobody else is asked and paid for it, and it counts as good."""
    sound(stack, dialect)
    ask(stack, dialect, "503;provider=primary", stream=stream)
    until(lambda: failures(stack) == 1)
    got = HTTP.post(stack.url + path, json=chat(stream=stream, **asked), headers={"x-fake-fault": "empty"})
    assert (got.status_code, got.headers["x-tidegate-upstream"], got.headers["x-tidegate-attempts"]) == (
        200, "primary", "1",
    )  # fmt: skip
    until(lambda: failures(stack) == 0)


@pytest.mark.parametrize("fault", ["truncated", "empty", "malformed"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("dialect", "path"), [("openai", CHAT), ("anthropic", MESSAGES)])
def test_failures_that_look_like_success_count(
    stack: Stack, dialect: str, path: str, fault: str, *, stream: bool
) -> None:
    """In a stream they can only be counted; a JSON answer is asked for elsewhere as well."""
    sound(stack, dialect)
    headers = {"x-fake-fault": f"{fault};provider=primary"}
    got = HTTP.post(stack.url + path, json=chat(stream=stream), headers=headers)
    assert got.headers["x-tidegate-upstream"] == ("primary" if stream else "backup")
    until(lambda: failures(stack) == 1)


@pytest.mark.parametrize("fault", ["reasoning-only", "content-filter;finish", "no-done"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_answers_that_only_look_like_failures(stack: Stack, dialect: str, fault: str, *, stream: bool) -> None:
    """Nothing to read because all was thought, or because a filter stopped it; a finish without an end: all of them are
    answers, are asked for once, and count as good.
    """
    sound(stack, dialect)
    ask(stack, dialect, "503;provider=primary", stream=stream)
    until(lambda: failures(stack) == 1)
    assert ask(stack, dialect, f"{fault};provider=primary", stream=stream).way == ("primary", "primary", 1)
    until(lambda: failures(stack) == 0)


def test_a_tool_call_is_an_answer(stack: Stack, vendors: dict[str, Upstream]) -> None:
    """Without a word of text."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    choice = {"message": {"role": "assistant", "content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    for finish in ("tool_calls", "stop"):
        body = json.dumps({"choices": [{**choice, "finish_reason": finish}]}).encode()
        vendors["azure"].answers.append((200, {}, body))
        got = HTTP.post(stack.url + CHAT, json={**chat(), "model": "vendors-0"})
        assert (got.content, got.headers["x-tidegate-upstream"]) == (body, "azure")


def test_an_answer_that_says_it_was_broken_off_goes_on(stack: Stack, vendors: dict[str, Upstream]) -> None:
    """Half an answer whose finish is no finish: the next upstream is asked."""
    choice = {"message": {"role": "assistant", "content": "half of"}, "finish_reason": "error"}
    vendors["azure"].answers.append((200, {}, json.dumps({"choices": [choice]}).encode()))
    got = HTTP.post(stack.url + CHAT, json={**chat(), "model": "vendors-0"})
    assert (got.status_code, got.headers["x-tidegate-attempts"]) == (200, "2")
    assert "half of" not in got.text


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_a_missing_done_is_no_error(stack: Stack, dialect: str) -> None:
    """A stream that has its finish reason but not its last event is complete; no error is appended."""
    got = ask(stack, dialect, "no-done;provider=primary", stream=True)
    assert (got.text, got.way) == (TEXT, ("primary", "primary", 1))
    assert got.finish


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_a_broken_event_reaches_the_client_as_it_is(stack: Stack, dialect: str) -> None:
    """Half an event in the middle of a stream: the SDK's own parser says so, nothing is hidden."""
    with pytest.raises((json.JSONDecodeError, openai.APIError, anthropic.APIError)):
        ask(stack, dialect, "malformed;provider=primary", stream=True)
