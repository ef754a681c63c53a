"""What a caller gets on a bad day, and what each provider sees of it.

Every row of `DAYS` is played through the real SDKs as people run them: two retries, thirty seconds of patience, one
upstream to fall back on, streaming and not, both dialects. `pytest -s` prints what was measured, as a table.

Each row has a primary and a backup of its own, all of them at two fake providers, so that no row changes the next.
Breakers are out of the way, but in the last part, where a primary is down for a while.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anthropic
import httpx
import openai
import pytest

from extproc.fakes.text import answer_text
from extproc.stack import Stack, free_ports
from tests.e2e.conftest import books_balance
from tests.e2e.doubles import NEVER_OPENS, forget, running, until

FIRST_TOKEN_S = 0.5
STALL_S = 1.5
RETRY_S = 1
"""How long a caller is told to stay away when everybody failed: the first choice's cool-down."""
TOKENS = 60
TEXT = answer_text(0, TOKENS)
PROMPT = [{"role": "user", "content": "hello"}]
PREFILL = {"role": "assistant", "content": "Well,"}
CASES = [(dialect, stream) for dialect in ("openai", "anthropic") for stream in (True, False)]
PATIENT = {**NEVER_OPENS, "cool_down_s": RETRY_S}
SHORT_S = 6.0
HTTP = httpx.Client(timeout=30)


@dataclass(frozen=True)
class Told:
    """What a caller must get. by: who answers, empty for nobody. error: what the SDK raises then, and says.

    within: bounds in seconds. asked: requests that the primary and the backup get. tries: how often the SDK sends it.
    """

    by: str = ""
    error: str = ""
    says: str = ""
    within: tuple[float, float] = (0.0, 4.0)
    asked: tuple[int, int] = (1, 1)
    tries: int = 1


@dataclass(frozen=True)
class Day:
    """One kind of bad day. at_backup: what the backup does meanwhile. solo: there is no backup.

    deadline_ms: the caller's own, for JSON answers that would take its whole patience. more: further settings of the
    primary. dialect: the only one in which it can happen.
    """

    name: str
    fault: str
    stream: Told | None
    json: Told | None
    times: int | None = None
    at_backup: str = ""
    solo: bool = False
    deadline_ms: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    dialect: str = ""

    @property
    def slug(self) -> str:
        """Its model, and how its upstreams are called."""
        return "".join(c if c.isalnum() else "-" for c in self.name)

    def told(self, *, stream: bool) -> Told | None:
        """What the caller must get."""
        return self.stream if stream else self.json


BACKUP, PRIMARY = Told(by="backup"), Told(by="primary", asked=(1, 0))
FAILED = Told(error="InternalServerError", says="upstream_failed")
LATE = Told(error="InternalServerError", says="deadline_passed", within=(1.0, 4.0), asked=(1, 0))
BROKEN = "APIConnectionError|RemoteProtocolError|APIError"
THREE = (2.0 * RETRY_S, 14.0)
"""Bounds of three tries of which each fails at once: the two waits between them are kept."""
SECOND = Told(by="primary", asked=(2, 0))
PREFILLED = Told(by="primary", within=(RETRY_S, 6.0), asked=(2, 1), tries=2)
ALONE = Told(error="InternalServerError", says="upstream_failed", within=THREE, asked=(6, 0), tries=3)

DAYS = [
    Day("429 with retry-after, once", "429;retry-after=1", BACKUP, BACKUP, times=1),
    Day("429 for ever, no retry-after", "429-bare", BACKUP, BACKUP),
    Day("500 once", "500", BACKUP, BACKUP, times=1),
    Day("503 for ever", "503", BACKUP, BACKUP),
    Day("529 for ever", "529", BACKUP, BACKUP),
    Day("reset before headers", "reset", BACKUP, BACKUP),
    Day("our key is refused", "401", BACKUP, BACKUP),
    Day("our credit is gone", "billing", BACKUP, BACKUP),
    Day("silence", "silence", Told(by="backup", within=(FIRST_TOKEN_S, 4)), LATE, deadline_ms=1200),
    Day(
        "first token late, headers with it",
        "slow-first-token;s=2",
        Told(by="backup", within=(FIRST_TOKEN_S, 1.9)),
        Told(by="primary", within=(2, 6), asked=(1, 0)),
    ),
    Day(
        "first token late, headers at once",
        "slow-first-token;s=1.2;early-headers",
        Told(by="primary", within=(1.2, 5), asked=(1, 0)),
        Told(by="primary", within=(1.2, 5), asked=(1, 0)),
    ),
    Day(
        "first token late, headers at once, `hold_headers`",
        "slow-first-token;s=2;early-headers",
        Told(by="backup", within=(FIRST_TOKEN_S, 1.9)),
        Told(by="primary", within=(2, 6), asked=(1, 0)),
        more={"hold_headers": True},
    ),
    Day(
        "cut at 40 of 60 tokens",
        "cut;at=40",
        Told(error=BROKEN, says="peer closed|Connection error", asked=(1, 0)),
        BACKUP,
    ),
    Day(
        "stall of 30 s",
        "stall;s=30",
        Told(error=BROKEN, says="peer closed|Connection error", within=(STALL_S, 6), asked=(1, 0)),
        LATE,
        deadline_ms=1200,
    ),
    Day(
        "malformed event",
        "malformed",
        Told(error="JSONDecodeError|APIError|ValueError", asked=(1, 0)),
        BACKUP,
    ),
    Day("error event after some tokens", "error-later", Told(error="APIError|APIStatusError", asked=(1, 0)), BACKUP),
    Day(
        "error event without a member `error`",
        "error-later;flat",
        Told(error="APIError|APIStatusError", says="ended its answer early", asked=(1, 0)),
        BACKUP,
    ),
    Day("end without finish", "early-end", Told(error="APIError", says="ended its answer early", asked=(1, 0)), None),
    Day("no [DONE]", "no-done", PRIMARY, PRIMARY),
    Day("error under 200", "error-200", BACKUP, BACKUP),
    Day("context length exceeded", "context-length", BACKUP, BACKUP),
    Day(
        "context length exceeded everywhere",
        "context-length",
        Told(error="BadRequestError", says="maximum context length|prompt is too long"),
        Told(error="BadRequestError", says="maximum context length|prompt is too long"),
        at_backup="context-length",
    ),
    Day(
        "content filter",
        "content-filter",
        Told(error="BadRequestError", says="content management policy", asked=(1, 0)),
        Told(error="BadRequestError", says="content management policy", asked=(1, 0)),
        dialect="openai",
    ),
    Day(
        "everybody 503",
        "503",
        Told(error="InternalServerError", says="upstream_failed", within=THREE, asked=(3, 3), tries=3),
        Told(error="InternalServerError", says="upstream_failed", within=THREE, asked=(3, 3), tries=3),
        at_backup="503",
    ),
    Day("503 once, and the backup rejects prefill", "503", PREFILLED, PREFILLED, times=1, at_backup="prefill"),
    Day(
        "everybody silent",
        "silence",
        Told(
            error="InternalServerError",
            says="upstream_failed",
            within=(6 * FIRST_TOKEN_S + 2 * RETRY_S, 16),
            asked=(3, 3),
            tries=3,
        ),
        None,
        at_backup="silence",
    ),
    Day(
        "the caller's deadline passes",
        "silence",
        Told(error="InternalServerError", says="deadline_passed", within=(0.5, 4), asked=(1, 1)),
        Told(error="InternalServerError", says="deadline_passed", within=(0.5, 4), asked=(1, 0)),
        at_backup="silence",
        deadline_ms=600,
    ),
    Day(
        "429 with retry-after, once, no backup",
        "429;retry-after=1",
        Told(by="primary", within=(1.0, 8), asked=(2, 0), tries=2),
        Told(by="primary", within=(1.0, 8), asked=(2, 0), tries=2),
        times=1,
        solo=True,
    ),
    Day("503 once, no backup", "503", SECOND, SECOND, times=1, solo=True),
    Day("reset once, no backup", "reset", SECOND, SECOND, times=1, solo=True),
    Day("500 for ever, no backup", "500", *[dataclasses.replace(ALONE, asked=(3, 0))] * 2, solo=True),
    Day("503 for ever, no backup", "503", ALONE, ALONE, solo=True),
]
BY_SLUG = {day.slug: day for day in DAYS}


@dataclass(frozen=True)
class Got:
    """How one request ended for its caller, and when."""

    seconds: float
    tries: list[float]
    text: str = ""
    finish: str | None = None
    model: str = ""
    headers: Any = field(default_factory=dict)
    error: BaseException | None = None

    @property
    def words(self) -> str:
        """The answer or the error in a few words."""
        if self.error is None:
            return f"whole answer of {self.headers['x-fake-provider']}"
        status = getattr(self.error, "status_code", "")
        reason = getattr(self.error, "response", None)
        reason = reason.headers.get("x-tidegate-reason", "") if reason is not None else ""
        return " ".join(filter(None, (f"`{type(self.error).__name__}`", str(status), f"`{reason}`" if reason else "")))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack of the table."""
    ports = dict(zip(("primary", "backup"), free_ports(2), strict=True))
    fakes = {name: place(port, provider="fake", fake=quick()) for name, port in ports.items()}
    upstreams: dict[str, Any] = dict(fakes)
    routes = []
    for day in DAYS:
        chain = [f"{day.slug}-{name}" for name in (("primary",) if day.solo else ports)]
        for name in chain:
            at = name.rpartition("-")[2]
            more = day.more if at == "primary" else {}
            upstreams[name] = place(ports[at], models={day.slug: own_name(day.slug, at)}, **more)
        routes.append({"models": [day.slug], "chain": chain, "acknowledge_unowned": True})
    with running(
        tmp_path_factory.mktemp("days"),
        upstreams=upstreams,
        routes=routes,
        timeouts={"first_token_s": FIRST_TOKEN_S, "stall_s": STALL_S},
    ) as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    """The stack of the table, with no fault up."""
    calm(shared)
    yield shared
    calm(shared)


def place(port: int, **more: Any) -> dict[str, Any]:
    """Settings of an upstream at one of the fakes."""
    return {
        "provider": "compatible",
        "url": f"http://127.0.0.1:{port}",
        "dialects": ["openai", "anthropic"],
        "concurrency": 50,
        "limits": [{"tpm": 60_000_000, "rpm": 600_000}],
        "breaker": PATIENT,
        **more,
    }


def quick() -> dict[str, Any]:
    return {"first_token_s": 0.01, "output_tokens_per_s": 2000, "tokens_per_event": 1}


def own_name(model: str, at: str) -> str:
    """What a provider calls a model."""
    return f"{model}-of-{at}"


def calm(stack: Stack) -> None:
    """Take all faults down, and empty the records."""
    for upstream in stack.fakes.values():
        HTTP.delete(f"{upstream.where}/admin/fault").raise_for_status()
    forget(stack)


def strike(stack: Stack, name: str, fault: str, times: int | None = None, match: str | None = None) -> None:
    """Put a fault up at a fake."""
    order = {"fault": fault, "count": times, "match": match}
    HTTP.post(f"{stack.fakes[name].where}/admin/fault", json=order).raise_for_status()


def open_again(stack: Stack, which: str) -> None:
    """Wait until nothing of these upstreams is paused any more."""
    until(lambda: not closed(stack, which), within_s=20)


def closed(stack: Stack, which: str) -> bool:
    """Whether an upstream whose name begins like this is paused."""
    counters = stack.state()["counters"].items()
    return any("closed_s" in counter for key, counter in counters if key.startswith(f"upstream/{which}"))


def seen(stack: Stack, name: str) -> list[dict[str, Any]]:
    """The requests that a fake got, in order; canaries never among them."""
    return [one for one in stack.record(name)["requests"] if one["max_tokens"] == TOKENS]


def ask(
    stack: Stack,
    dialect: str,
    model: str,
    *,
    stream: bool,
    prompt: list[dict[str, str]] = PROMPT,
    patience_s: float = 30,
    **headers: str,
) -> Got:
    """One request, as an SDK sends it, and however it ends."""
    began = time.monotonic()
    tries: list[float] = []
    hooks: dict[str, list[Callable[..., Any]]] = {"request": [lambda _: tries.append(time.monotonic() - began)]}
    named = {name.replace("_", "-"): word for name, word in headers.items()}
    options = {"model": model, "max_tokens": TOKENS, "messages": prompt, "extra_headers": named}
    library, talk = {"openai": (openai, _openai), "anthropic": (anthropic, _anthropic)}[dialect]
    with library.DefaultHttpxClient(event_hooks=hooks) as http:
        sdk = {"api_key": "sk-client", "max_retries": 2, "timeout": patience_s, "http_client": http}
        try:
            said = talk(stack, sdk, options, stream=stream)
        except Exception as error:  # noqa: BLE001 - whatever it is goes into the table
            return Got(time.monotonic() - began, tries, error=error)
        return Got(time.monotonic() - began, tries, **said)


def _openai(stack: Stack, sdk: dict[str, Any], options: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", **sdk)
    raw = client.chat.completions.with_raw_response.create(**options, stream=stream)
    chunks = list(raw.parse()) if stream else [raw.parse()]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
    return {"text": text, "finish": choices[-1].finish_reason, "model": chunks[0].model, "headers": raw.headers}


def _anthropic(stack: Stack, sdk: dict[str, Any], options: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    client = anthropic.Anthropic(base_url=stack.url, **sdk)
    raw = client.messages.with_raw_response.create(**options, stream=stream)
    if not stream:
        said = raw.parse()
        text = "".join(block.text for block in said.content)
        return {"text": text, "finish": said.stop_reason, "model": said.model, "headers": raw.headers}
    events = list(raw.parse())
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    finish = next((event.delta.stop_reason for event in events if event.type == "message_delta"), None)
    return {"text": text, "finish": finish, "model": events[0].message.model, "headers": raw.headers}


# Answers that take more than a minute. They are asked for first and waited for last, so that nobody waits for them.

LONG_S = 62.0
LONG = {"slow-first-token": "silent, and then all of it", "stall": "half of it, then silent, then the rest"}


@dataclass(frozen=True)
class Slow:
    """A stack that is set up as it comes, and whole answers on their way to patient clients."""

    stack: Stack
    answers: dict[tuple[str, str], Future[Got]]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slow]:
    """One answer of each kind in each dialect."""
    limits = [{"tpm": 60_000_000, "rpm": 600_000}]
    upstreams = {name: {"limits": limits, "fake": quick()} for name in ("primary", "backup")}
    kinds = [(dialect, fault) for dialect in ("openai", "anthropic") for fault in LONG]
    with running(tmp_path_factory.mktemp("slow"), upstreams=upstreams) as stack, ThreadPoolExecutor(len(kinds)) as pool:
        headers = [(kind, {"x_fake_fault": f"{kind[1]};s={LONG_S};provider=primary"}) for kind in kinds]
        asked = {
            kind: pool.submit(partial(ask, stack, kind[0], "gpt-5", stream=False, patience_s=600, **fault))
            for kind, fault in headers
        }
        yield Slow(stack, asked)


def test_answers_of_more_than_a_minute_are_on_their_way(slow: Slow) -> None:
    """Each was asked for once, at the primary."""
    until(lambda: len(seen(slow.stack, "primary")) == len(slow.answers))
    assert slow.stack.state()["flying"] == len(slow.answers)
    assert not seen(slow.stack, "backup")


# The table.


class Table:
    """What was measured, printed as it stands in README."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[bool, str]] = {}
        self._seen: dict[str, dict[bool, str]] = {}

    def add(self, day: Day, *, stream: bool, got: Got, asked: list[list[float]]) -> None:
        """Keep the first dialect's figures of a row."""
        tries = f", {len(got.tries)} tries" if len(got.tries) > 1 else ""
        self._rows.setdefault(day.name, {}).setdefault(stream, f"{got.words} after {got.seconds:.1f} s{tries}")
        times = ["at " + ", ".join(f"{at:.1f}" for at in one) if one else "nothing" for one in asked]
        self._seen.setdefault(day.name, {}).setdefault(stream, " / ".join(times))

    def lines(self) -> Iterator[str]:
        """The table in Markdown."""
        yield "| Fault | Stream: the caller got | primary / backup saw, s | JSON: the caller got | they saw, s |"
        yield "|---|---|---|---|---|"
        for name, row in self._rows.items():
            saw = self._seen[name]
            yield f"| {name} | " + " | ".join(f"{row.get(s, '')} | {saw.get(s, '')}" for s in (True, False)) + " |"


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """Printed when the last row was played."""
    made = Table()
    yield made
    print("", *made.lines(), sep="\n")  # noqa: T201 - for those who ask with -s


ROWS = [
    pytest.param(day, dialect, stream, id=f"{day.slug}-{dialect}-{'stream' if stream else 'json'}")
    for day in DAYS
    for dialect, stream in CASES
    if (told := day.told(stream=stream)) and day.dialect in ("", dialect)
    # What takes long is played once streamed and once not.
    if told.within[1] <= SHORT_S or (dialect == "openai") == stream
]


@pytest.mark.parametrize(("day", "dialect", "stream"), ROWS)
def test_a_bad_day(stack: Stack, table: Table, day: Day, dialect: str, *, stream: bool) -> None:
    """The caller gets a whole answer or an error, never a part as if it were the whole, never nothing; nobody is asked
    more often than the row says; and who is said to have answered did.
    """
    told = day.told(stream=stream)
    assert told is not None
    open_again(stack, day.slug)
    strike(stack, "primary", day.fault, day.times, day.slug)
    if day.at_backup:
        strike(stack, "backup", day.at_backup, None, day.slug)
    headers = {"x_request_timeout_ms": str(day.deadline_ms)} if day.deadline_ms else {}
    began = time.monotonic()
    prompt = [*PROMPT, PREFILL] if day.at_backup == "prefill" else PROMPT
    got = ask(stack, dialect, day.slug, stream=stream, prompt=prompt, **headers)
    asked = [[one["time"] - began for one in seen(stack, name)] for name in ("primary", "backup")]
    table.add(day, stream=stream, got=got, asked=asked)
    check_outcome(day, told, got)
    low, high = told.within
    assert low - 0.05 <= got.seconds <= high
    assert tuple(map(len, asked)) == told.asked
    assert len(got.tries) == told.tries
    if told.asked[1] and told.tries == 1 and low == 0.0:
        assert asked[1][0] - asked[0][0] < 1.0, "the hop to the next provider waits for nothing"
    if told.tries > 1:
        gaps = [after - before for before, after in itertools.pairwise(got.tries)]
        assert min(gaps) >= RETRY_S, "the time to retry is kept"


def check_outcome(day: Day, told: Told, got: Got) -> None:
    """Who answered, and whether that was told truthfully; or what went wrong."""
    if told.by:
        assert got.error is None, got.error
        assert (got.text, bool(got.finish)) == (TEXT, True)
        assert got.headers["x-fake-provider"] == told.by
        assert got.headers["x-tidegate-upstream"] == f"{day.slug}-{told.by}"
        attempts = told.asked[0] - (told.tries - 1) if told.by == "primary" else sum(told.asked)
        assert int(got.headers["x-tidegate-attempts"]) == attempts
        assert got.model == own_name(day.slug, told.by)
        return
    assert got.error is not None, f"an answer: {got.text!r}"
    kinds = {kind.__name__ for kind in type(got.error).__mro__}
    assert kinds & set(told.error.split("|")), repr(got.error)
    said = str(got.error) + str(getattr(got.error, "body", ""))
    assert not told.says or any(word in said for word in told.says.split("|")), said
    if told.says in ("upstream_failed", "deadline_passed"):
        response: Any = getattr(got.error, "response", None)
        told_all = (response.text + str(response.headers)).lower()
        assert not [
            word for word in ("x-tg-", "x-fake", "org-fake", "ratelimit", "sk-", "overloaded or") if word in told_all
        ]


def test_a_retry_after_closes_its_upstream_until_then(stack: Stack) -> None:
    """The hop to the backup is not delayed by it; who comes meanwhile goes to the backup at once, and who comes when it
    is over to the primary.
    """
    model = "429-with-retry-after--once"
    open_again(stack, model)
    strike(stack, "primary", "429;retry-after=2", 1)
    began = time.monotonic()
    assert ask(stack, "openai", model, stream=True).headers["x-tidegate-attempts"] == "2"
    until(lambda: closed(stack, f"{model}-primary"))
    meanwhile = ask(stack, "openai", model, stream=True)
    told = meanwhile.headers["x-tidegate-upstream"], meanwhile.headers["x-tidegate-attempts"]
    if time.monotonic() - began < 2:
        assert told == (f"{model}-backup", "1")
    open_again(stack, f"{model}-primary")
    assert ask(stack, "openai", model, stream=True).headers["x-tidegate-upstream"] == f"{model}-primary"
    first, second = (one["time"] for one in seen(stack, "primary"))
    assert second - first >= 2


# With breakers: a primary that is down for a while; and what is charged, and what is said, when all is lost.

PRICES = {"primary": 1000.0, "backup": 10.0}
"""Dollars per million tokens, of input and output alike."""
SORRY = 'We are sorry: "nobody" can answer now.\n请稍后再试。'
DOWN_S = 2.5


@pytest.fixture(scope="module")
def breaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Breakers that open, prices, and routes with a last resort."""
    ports = dict(zip(PRICES, free_ports(2), strict=True))
    upstreams: dict[str, Any] = {}
    opens = {**NEVER_OPENS, "failures": 3, "cool_down_s": 0.5}
    for name, price in PRICES.items():
        rates = {"*": {"input": price, "output": price}}
        upstreams[name] = place(ports[name], provider="fake", fake=quick(), prices=rates)
        upstreams[f"kind-{name}"] = place(ports[name], prices=rates)
        upstreams[f"down-{name}"] = place(ports[name], breaker=opens)
    dead = {
        "url": f"http://127.0.0.1:{free_ports(1)[0]}",
        "breaker": {**NEVER_OPENS, "failures": 1, "cool_down_s": 60, "cool_down_max_s": 60},
    }
    upstreams["dead"] = {"provider": "compatible", "dialects": ["openai", "anthropic"], "concurrency": 5, **dead}
    last = {"text": SORRY}
    with running(
        tmp_path_factory.mktemp("breaking"),
        upstreams=upstreams,
        routes=[
            {"models": ["gpt-5"], "chain": list(PRICES), "acknowledge_unowned": True},
            {"models": ["down"], "chain": [f"down-{name}" for name in PRICES], "acknowledge_unowned": True},
            {"models": ["kind"], "chain": [f"kind-{name}" for name in PRICES], "last_resort": last},
            {"models": ["dead"], "chain": ["dead"], "last_resort": {**last, "no_upstream": True}},
        ],
        tenants={"default": {"usd_per_day": 1000}},
        timeouts={"first_token_s": FIRST_TOKEN_S, "stall_s": STALL_S},
        tokens={"calibrate": False},
    ) as stack:
        yield stack


@pytest.fixture
def lost(breaking: Stack) -> Iterator[Stack]:
    """That stack, with no fault up and nobody paused."""
    calm(breaking)
    open_again(breaking, "")
    yield breaking
    calm(breaking)


def test_a_primary_that_is_down_for_a_while(lost: Stack) -> None:
    """A request every so often: each is answered whole; the primary is left alone while it is down, but for the first
    few and for canaries, and serves again soon after it is back.
    """
    strike(lost, "primary", "503")
    began = time.monotonic()
    during: list[Got] = []
    while time.monotonic() - began < DOWN_S:
        during.append(ask(lost, "openai", "down", stream=True))
        time.sleep(0.1)
    asked = len(seen(lost, "primary"))
    HTTP.delete(f"{lost.fakes['primary'].where}/admin/fault").raise_for_status()
    back, after = time.monotonic(), list[Got]()
    while not after or after[-1].headers["x-tidegate-upstream"] != "down-primary":
        assert time.monotonic() - back < 30, "not used again within 30 s"
        after.append(ask(lost, "openai", "down", stream=True))
        time.sleep(0.1)
    again_s = time.monotonic() - back
    print(  # noqa: T201 - for those who ask with -s
        f"\ndown for {DOWN_S} s, {len(during)} requests: all answered, the longest after "
        f"{max(got.seconds for got in during):.2f} s; the primary saw {asked} of them, and served again "
        f"{again_s:.1f} s after it was back"
    )
    assert [got.error for got in (*during, *after)] == [None] * (len(during) + len(after))
    assert {got.text for got in (*during, *after)} == {TEXT}
    assert asked <= 4
    assert len(during) > asked


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
@pytest.mark.parametrize(
    ("fault", "paid"),
    [("503", 0.0), ("429-bare", 0.0), ("reset", 1.0), ("silence", 1.0), ("cut;at=40", None)],
)
def test_who_is_paid_after_a_failover(lost: Stack, dialect: str, fault: str, paid: float | None) -> None:
    """The tenant pays who served for what it used; who refused gets nothing; who was cut after it took the request gets
    the prompt, and of a broken answer what was seen of it.
    """
    before = spent(lost)
    strike(lost, "primary", fault, 1)
    got = ask(lost, dialect, "gpt-5", stream=True)
    books_balance(lost)
    at = {name: seen(lost, name) for name in PRICES}
    prompt = at["primary"][0]["prompt_tokens"]
    if paid is None:
        assert got.error is not None
        assert not at["backup"]
        low, high = prompt + 30, prompt + TOKENS
        assert low * PRICES["primary"] <= (spent(lost) - before) * 1e6 <= high * PRICES["primary"]
        return
    assert got.headers["x-tidegate-upstream"] == "backup"
    served = (at["backup"][0]["prompt_tokens"] + TOKENS) * PRICES["backup"]
    cut = (spent(lost) - before) * 1e6 - served
    assert cut == pytest.approx(paid * prompt * PRICES["primary"], rel=0.7, abs=1e-3)


def spent(stack: Stack) -> float:
    """Dollars that the tenant has spent today."""
    return float(stack.state()["counters"]["tenant/default/usd_day"]["spent"])


@pytest.mark.parametrize(("dialect", "stream"), CASES)
def test_a_last_resort_answers_when_the_chain_is_exhausted(lost: Stack, dialect: str, *, stream: bool) -> None:
    """The operator's own words, as an answer that both SDKs take for one, marked as what it is and paid to nobody."""
    before, failed = spent(lost), lost.state()["tally"]
    for name in PRICES:
        strike(lost, name, "503", 1, "kind")
    got = ask(lost, dialect, "kind", stream=stream)
    check_last_resort(got)
    assert len(got.tries) == 1
    books_balance(lost)
    assert [len(seen(lost, name)) for name in PRICES] == [1, 1]
    assert spent(lost) == before
    assert lost.state()["tally"]["settled"] == failed["settled"] + 1


@pytest.mark.parametrize("fault", ["silence", "reset", "429-bare", "401"])
def test_a_last_resort_answers_whatever_went_wrong(lost: Stack, fault: str) -> None:
    """Silence, broken connections, pace, our own key."""
    for name in PRICES:
        strike(lost, name, fault, 1, "kind")
    check_last_resort(ask(lost, "openai", "kind", stream=True))


@pytest.mark.parametrize(("dialect", "stream"), CASES)
def test_a_last_resort_answers_when_nobody_may_be_asked(lost: Stack, dialect: str, *, stream: bool) -> None:
    """Where the route says so, `no_upstream` is answered, too."""
    check_last_resort(ask(lost, dialect, "dead", stream=stream))
    until(lambda: lost.state()["breakers"]["dead"]["state"] == "open")
    check_last_resort(ask(lost, dialect, "dead", stream=stream, x_tidegate_priority="P0"))


def check_last_resort(got: Got) -> None:
    """It is the operator's text, marked, and no upstream is said to have written it."""
    assert got.error is None, got.error
    assert (got.text, bool(got.finish), got.model) == (SORRY, True, "last-resort")
    assert got.headers["x-tidegate-last-resort"] == "true"
    assert "x-fake-provider" not in got.headers


def test_other_apis_have_their_last_resort_too(lost: Stack) -> None:
    """Completions and the Responses API; an embedding has no words, so the error stands."""
    client = openai.OpenAI(base_url=f"{lost.url}/v1", api_key="sk-client", max_retries=0)
    for stream in (False, True):
        lose(lost)
        said: Any = client.completions.create(model="kind", prompt="hello", max_tokens=5, stream=stream)
        assert "".join(chunk.choices[0].text for chunk in (said if stream else [said])) == SORRY
        lose(lost)
        reply: Any = client.responses.create(model="kind", input="hello", max_output_tokens=16, stream=stream)
        last = list(reply)[-1].response if stream else reply
        assert (last.output_text, last.status) == (SORRY, "completed")
    lose(lost)
    with pytest.raises(openai.InternalServerError, match="Every model that was asked failed"):
        client.embeddings.create(model="kind", input="hello")


def lose(stack: Stack) -> None:
    """Let everybody fail once."""
    for name in PRICES:
        strike(stack, name, "503", 1, "kind")


@pytest.mark.parametrize("fault", LONG)
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_a_whole_answer_may_take_more_than_a_minute(slow: Slow, dialect: str, fault: str) -> None:
    """Nothing cuts it short, nobody else is asked, and it says nothing against its upstream: only streams have a usual
    time to their first token.
    """
    got = slow.answers[dialect, fault].result(timeout=2 * LONG_S)
    assert got.error is None, got.error
    assert (got.text, len(got.tries)) == (TEXT, 1)
    assert LONG_S <= got.seconds < 1.5 * LONG_S
    assert (got.headers["x-tidegate-upstream"], got.headers["x-tidegate-attempts"]) == ("primary", "1")
    books_balance(slow.stack)
    assert [len(seen(slow.stack, name)) for name in ("primary", "backup")] == [len(slow.answers), 0]
    state = slow.stack.state()
    breaker = state["breakers"]["primary"]
    assert (breaker["state"], breaker["failures"], breaker["error_share"], "timed" in breaker) == (
        "closed",
        0,
        0,
        False,
    )
    assert not state["tally"]["alerts"]
