"""Canaries against a listener of our own: what they ask, what they make of the answer, and what they cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from extproc.breakers import Breakers
from extproc.core.breaker import Evidence, Outcome, Sign, Signal, State
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget
from extproc.core.events import BreakerMoved, Probed
from extproc.core.policy import BreakerRules, Dollars, Kind, Limit, Prices, Upstream
from extproc.core.request import Dialect, Endpoint
from extproc.core.spend import PriceList
from extproc.probes.canary import Canary, Target
from tests.doubles import Ledger, Observer

GOOD = {"choices": [{"message": {"content": "OK"}}], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
CLAUDE = {"content": [{"type": "text", "text": "OK"}], "usage": {"input_tokens": 10, "output_tokens": 3}}
RULES = BreakerRules(cool_down_s=0.01, cool_down_max_s=0.01, jitter=0.0)
CENT = 10_000.0


class Listener:
    """Plays Envoy's probe listener and the upstream behind it. Answers go out in turn, the last one for ever."""

    def __init__(self, *answers: tuple[int, Any], health: int = 404) -> None:
        self.answers = list(answers) or [(200, GOOD)]
        self.health = health
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked: list[tuple[str, str, Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.asked.append((f"{request.method} {request.path}", request.headers.get("x-tidegate-probe", ""), body))
        if request.path == "/health":
            return web.Response(status=self.health)
        await self.may_answer.wait()
        status, told = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return (
            web.json_response(told, status=status)
            if not isinstance(told, str)
            else web.Response(status=status, text=told)
        )


class Bench:
    """One upstream that was just tripped, and its canary."""

    def __init__(self, url: str, provider: str, dialects: frozenset[Dialect], prices: dict[str, Prices]) -> None:
        loop = asyncio.get_running_loop()
        limit = Limit("*", Kind.TOTAL, 6000.0, 1000.0)
        listed = {model: (price,) for model, price in prices.items()}
        dollars = Dollars(per_day=5.0)
        upstream = Upstream("a", provider, dialects, (limit,), breaker=RULES, prices=listed, dollars=dollars)
        self.observer = Observer()
        self.breakers = Breakers([upstream], loop, self.observer)
        self.bucket = TokenBucket(0.0, 1000.0, 1000.0, loop.time())
        self.purse = Budget(5.0)
        store = {"upstream/a/*/total": self.bucket, "upstream/a/slots": Slots(9), "upstream/a/usd_day": self.purse}
        capacity, known = Ledger(loop, store), PriceList({"a": upstream})

        def rates(names: tuple[str, ...], model: str) -> Mapping[str, Prices]:
            return known.rates(names, model, 0.0)

        self.canary = Canary(url, {"a": Target(upstream, "small")}, self.breakers, capacity, loop, self.observer, rates)
        self.breakers.signal("a", Signal.TRIP, "test")

    async def probed(self, count: int = 1) -> list[Probed]:
        async with asyncio.timeout(120):
            while len(self.observer.of(Probed)) < count:  # noqa: ASYNC110 - a look now and then will do
                await asyncio.sleep(0.01)
        return self.observer.of(Probed)


@asynccontextmanager
async def bench(
    listener: Listener,
    provider: str = "openai",
    dialects: frozenset[Dialect] = frozenset(Dialect),
    prices: dict[str, Prices] | None = None,
) -> AsyncIterator[Bench]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", listener.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    [address] = runner.addresses
    made = Bench(f"http://127.0.0.1:{address[1]}", provider, dialects, prices or {})
    work = asyncio.create_task(made.canary.run())
    try:
        yield made
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await runner.cleanup()


async def test_it_asks_for_five_tokens_of_the_cheapest_model_in_the_upstreams_dialect() -> None:
    """Never a user's prompt; the upstream is forced by name. It works, so traffic returns by and by."""
    listener = Listener()
    async with bench(listener) as at:
        [probed] = await at.probed()
        assert at.breakers.by_name["a"].state is State.RAMPING
    messages = [{"role": "user", "content": "reply OK"}]
    body = {"model": "small", "messages": messages, "max_tokens": 5}
    assert listener.asked == [("POST /v1/chat/completions", "a", body)]
    assert probed.ok
    claude = Listener((200, CLAUDE))
    async with bench(claude, "anthropic", frozenset({Dialect.ANTHROPIC})) as at:
        assert (await at.probed())[0].tokens == 13
    assert claude.asked[0][0] == "POST /v1/messages"


@pytest.mark.parametrize("provider", ["vllm", "sglang"])
@pytest.mark.parametrize(("health", "asked", "ok"), [(200, True, True), (404, True, True), (503, False, False)])
async def test_an_engine_is_asked_for_its_health_first(provider: str, health: int, asked: bool, ok: bool) -> None:  # noqa: FBT001
    """A sick one is not made to generate; one without such a page is asked at once."""
    listener = Listener(health=health)
    async with bench(listener, provider) as at:
        [probed] = await at.probed()
    assert probed.ok is ok
    calls = [what for what, _, _ in listener.asked]
    assert calls[:2] == ["GET /health", *["POST /v1/chat/completions"] * asked][:2]
    assert {name for _, name, _ in listener.asked} == {"a"}
    assert (probed.tokens == 11) is ok


async def test_a_provider_has_no_health_page() -> None:
    """Only engines are asked for it."""
    listener = Listener()
    async with bench(listener, "openai") as at:
        await at.probed()
    assert [what for what, _, _ in listener.asked] == ["POST /v1/chat/completions"]


async def test_what_it_costs_is_told_and_taken_from_the_bucket() -> None:
    """Tokens as the upstream reports them, dollars where a price is known; a failed one costs nothing that is known.

    The upstream's own dollars pay for it.
    """
    async with bench(Listener((503, {}), (200, GOOD)), prices={"small": Prices(1 * CENT, 2 * CENT)}) as at:
        failed, worked = await at.probed(2)
        assert (failed.ok, failed.tokens, failed.cost_usd) == (False, 0, None)
        assert (worked.ok, worked.tokens, worked.cost_usd) == (True, 11, pytest.approx(0.13))
        assert at.bucket.level <= 1000 - 2 * 17
        assert at.purse.used == pytest.approx(0.13)
    async with bench(Listener((200, {"choices": [1]}))) as at:
        [probed] = await at.probed()
        assert (probed.tokens, probed.cost_usd) == (17, None)


@pytest.mark.parametrize(
    ("status", "told"),
    [(500, {}), (200, {"error": {}}), (200, {}), (200, []), (200, "no JSON"), (200, "[" * 60_000), (429, {})],
)
async def test_what_is_no_proper_answer_has_failed(status: int, told: Any) -> None:
    """It rests again, and no longer than others do."""
    async with bench(Listener((status, told))) as at:
        [probed, *_] = await at.probed()
        assert not probed.ok
        assert [moved.after for moved in at.observer.of(BreakerMoved)][:3] == [State.OPEN, State.HALF_OPEN, State.OPEN]
        assert at.breakers.by_name["a"].graves == 0


@pytest.mark.parametrize(
    ("provider", "status", "told", "sign"),
    [
        ("openai", 401, {"error": {"code": "invalid_api_key"}}, Sign.CREDENTIAL),
        ("openai", 403, "forbidden", Sign.CREDENTIAL),
        ("openai", 429, {"error": {"type": "insufficient_quota"}}, Sign.TERMINAL),
        ("anthropic", 401, {"type": "error", "error": {"type": "authentication_error"}}, Sign.CREDENTIAL),
        ("gemini", 403, [{"error": {"code": 403, "status": "PERMISSION_DENIED"}}], Sign.CREDENTIAL),
        ("deepseek", 402, {}, Sign.TERMINAL),
        ("openai", 200, {"error": {"code": "billing_not_active"}}, Sign.TERMINAL),
        ("openai", 400, {"error": "words"}, None),
    ],
)
async def test_one_that_is_told_of_our_credit_or_key_sends_it_to_rest_for_long(
    provider: str, status: int, told: Any, sign: Sign | None
) -> None:
    """A quarter of an hour, and it is told as that."""
    async with bench(Listener((status, told)), provider) as at:
        await at.probed()
        breaker = at.breakers.by_name["a"]
        assert breaker.verdict.sign is sign
        assert (breaker.rests_until - breaker.since > 899) is (sign is not None)


async def test_what_was_without_credit_stays_so_while_a_canary_is_refused_in_other_words() -> None:
    """Some say so under 400, in words alone."""
    async with bench(Listener((402, {}), (400, {"error": {"type": "invalid_request_error"}})), "anthropic") as at:
        await at.probed()
        breaker = at.breakers.by_name["a"]
        assert breaker.verdict.sign is Sign.TERMINAL
        breaker.rests_until = 0.0
        await at.probed(2)
        assert (breaker.verdict.sign, breaker.graves) == (Sign.TERMINAL, 2)


NEWER = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
USED_UP = "Could not finish the message because max_tokens or model output limit was reached."
TOO_SMALL = "Invalid 'max_output_tokens': integer below minimum value."


@pytest.mark.parametrize(
    ("answers", "caps", "ok"),
    [
        (((400, NEWER), (200, "good")), ["max_tokens", "max_completion_tokens"], True),
        (((400, NEWER), (400, USED_UP)), ["max_tokens", "max_completion_tokens"], True),
        (((400, NEWER), (500, "sorry")), ["max_tokens", "max_completion_tokens"], False),
        (((400, USED_UP),), ["max_tokens"], True),
        (((422, TOO_SMALL),), ["max_tokens"], True),
        (((400, "no such thing"),), ["max_tokens"], False),
        (((500, USED_UP),), ["max_tokens"], False),
    ],
)
async def test_a_model_that_only_dislikes_our_cap_on_tokens_serves(
    answers: tuple[tuple[int, str], ...],
    caps: list[str],
    ok: bool,  # noqa: FBT001
) -> None:
    """Newer ones want it by another name, and may find it too small: otherwise they would never be used again."""
    told = [(status, GOOD if word == "good" else {"error": {"message": word}}) for status, word in answers]
    listener = Listener(*told)
    async with bench(listener) as at:
        [probed, *_] = await at.probed()
    assert probed.ok is ok
    assert [cap for _, _, body in listener.asked for cap in body if cap.startswith("max_")][: len(caps)] == caps


async def test_a_complaint_of_the_cap_is_no_proof_where_the_account_was_without_credit() -> None:
    """That may be said in words that only a client's error would have."""
    words = {"error": {"type": "invalid_request_error", "message": TOO_SMALL}}
    async with bench(Listener((402, {}), (400, words)), "anthropic") as at:
        await at.probed()
        at.breakers.by_name["a"].rests_until = 0.0
        [_, probed] = await at.probed(2)
    assert not probed.ok


class Pieces(Listener):
    """Answers in several pieces, blanks first, as some do to keep a connection alive."""

    async def answer(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        answer = web.StreamResponse()
        await answer.prepare(request)
        for piece in (b"\n  ", *(json.dumps(GOOD).encode()[at : at + 40] for at in range(0, 200, 40))):
            await answer.write(piece)
            await asyncio.sleep(0.01)
        return answer


async def test_an_answer_is_read_to_its_end() -> None:
    """It may come in pieces."""
    async with bench(Pieces()) as at:
        [probed] = await at.probed()
    assert (probed.ok, probed.tokens) == (True, 11)


@pytest.mark.parametrize("told", [-5, 10**400, 2.5, None])
async def test_usage_that_cannot_be_is_not_believed(told: Any) -> None:
    """Ours counts in its stead."""
    usage = {"prompt_tokens": told, "completion_tokens": 2}
    async with bench(Listener((200, {**GOOD, "usage": usage})), prices={"small": Prices(1 * CENT, 2 * CENT)}) as at:
        [probed] = await at.probed()
    assert (probed.ok, probed.tokens, probed.cost_usd) == (True, 14, pytest.approx(0.16))


async def test_a_canary_that_breaks_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its upstream is tried again, and not forgotten half-way."""
    monkeypatch.setattr("extproc.probes.canary.cost", lambda *_: 1 / 0)
    async with bench(Listener(), prices={"small": Prices(1 * CENT, 2 * CENT)}) as at, asyncio.timeout(120):
        while len(at.observer.of(BreakerMoved)) < 3:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        assert at.observer.of(BreakerMoved)[2].cause == "canary broke: ZeroDivisionError"


@pytest.mark.parametrize(("served", "asked"), [("", "default"), ("m", "m")])
async def test_where_only_callers_name_models_the_last_that_was_served_is_asked_for(served: str, asked: str) -> None:
    """Any other might be none of its."""
    listener = Listener()
    async with bench(listener) as at:
        at.canary._targets = {"a": Target(at.canary._targets["a"].upstream, "")}
        for outcome, model in ((Outcome.SUCCESS, served), (Outcome.IGNORED, "no such")):
            evidence = Evidence(model=model, endpoint=Endpoint.CHAT)
            at.breakers.record("a", outcome, began=0.0, cause="", evidence=evidence)
        await at.probed()
    assert listener.asked[0][2]["model"] == asked


ASK = "reply OK"
CHATS = [{"role": "user", "content": ASK}]
EMBEDDING = {"object": "list", "data": [{"embedding": [0.1234567890123456] * 8192}], "usage": {"prompt_tokens": 3}}
REPLY = {"object": "response", "status": "completed", "error": None, "output": [{"type": "message"}]}
CUT_SHORT = {**REPLY, "status": "incomplete", "output": [], "usage": {"input_tokens": 8, "output_tokens": 16}}
TEXT = {"choices": [{"text": "OK"}]}
FORMS = [
    (Endpoint.CHAT, GOOD, "/v1/chat/completions", {"messages": CHATS, "max_tokens": 5}, 11),
    (Endpoint.COMPLETIONS, TEXT, "/v1/completions", {"prompt": ASK, "max_tokens": 5}, 17),
    (Endpoint.RESPONSES, REPLY, "/v1/responses", {"input": ASK, "max_output_tokens": 16}, 28),
    (Endpoint.RESPONSES, CUT_SHORT, "/v1/responses", {"input": ASK, "max_output_tokens": 16}, 24),
    (Endpoint.MESSAGES, CLAUDE, "/v1/messages", {"messages": CHATS, "max_tokens": 5}, 13),
    (Endpoint.EMBEDDINGS, EMBEDDING, "/v1/embeddings", {"input": ASK}, 3),
]


def answered(at: Bench, *forms: tuple[Endpoint, str]) -> None:
    """The upstream did, in this order."""
    for endpoint, model in forms:
        evidence = Evidence(model=model, endpoint=endpoint)
        at.breakers.record("a", Outcome.SUCCESS, began=0.0, cause="answered", evidence=evidence)


def is_target(at: Bench, model: str, *, own: bool = False) -> None:
    """What the settings say."""
    at.canary._targets = {"a": Target(at.canary._targets["a"].upstream, model, own)}


@pytest.mark.parametrize(("endpoint", "good", "path", "body", "used"), FORMS)
async def test_it_is_asked_in_the_form_in_which_it_last_answered(
    endpoint: Endpoint, good: Any, path: str, body: Any, used: int
) -> None:
    """By the smallest call of that endpoint: one that only embeds cannot chat, and would never return. Uploads and the
    like tell nothing of how to ask.
    """
    listener = Listener((200, good))
    async with bench(listener) as at:
        is_target(at, "")
        answered(at, (Endpoint.CHAT, "old"), (endpoint, "new"), (Endpoint.OTHER, "*"), (Endpoint.COUNT_TOKENS, "c"))
        [probed] = await at.probed()
    assert listener.asked == [(f"POST {path}", "a", {"model": "new", **body})]
    assert (probed.ok, probed.tokens) == (True, used)


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        (Endpoint.EMBEDDINGS, {"data": []}),
        (Endpoint.EMBEDDINGS, GOOD),
        (Endpoint.RESPONSES, {**REPLY, "output": []}),
        (Endpoint.RESPONSES, {**CUT_SHORT, "error": {"code": "server_error"}}),
        (Endpoint.CHAT, EMBEDDING),
    ],
)
async def test_in_each_form_there_must_be_something_in_the_answer(endpoint: Endpoint, told: Any) -> None:
    """And no error."""
    async with bench(Listener((200, told))) as at:
        answered(at, (endpoint, "small"))
        [probed, *_] = await at.probed()
    assert not probed.ok


@pytest.mark.parametrize(
    ("model", "own", "forms", "asked"),
    [
        ("small", False, [(Endpoint.RESPONSES, "small"), (Endpoint.EMBEDDINGS, "e")], ("/v1/responses", "small")),
        ("small", True, [(Endpoint.RESPONSES, "small"), (Endpoint.CHAT, "big")], ("/v1/responses", "small")),
        ("small", False, [(Endpoint.EMBEDDINGS, "e")], ("/v1/embeddings", "e")),
        ("small", False, [(Endpoint.CHAT, "big"), (Endpoint.EMBEDDINGS, "e")], ("/v1/chat/completions", "small")),
        ("", False, [(Endpoint.CHAT, "big"), (Endpoint.EMBEDDINGS, "e")], ("/v1/embeddings", "e")),
        ("small", True, [(Endpoint.RESPONSES, "big"), (Endpoint.EMBEDDINGS, "e")], ("/v1/responses", "small")),
        ("small", True, [(Endpoint.EMBEDDINGS, "e")], ("/v1/embeddings", "small")),
        ("small", True, [(Endpoint.OTHER, "*")], ("/v1/chat/completions", "small")),
        ("small", False, [], ("/v1/chat/completions", "small")),
    ],
)
async def test_a_model_of_the_settings_is_asked_as_it_answers(
    model: str,
    own: bool,  # noqa: FBT001
    forms: list[tuple[Endpoint, str]],
    asked: tuple[str, str],
) -> None:
    """One that never answered, and is not meant for canaries, gives way where nothing generates."""
    listener = Listener()
    async with bench(listener) as at:
        is_target(at, model, own=own)
        answered(at, *forms)
        await at.probed()
    what, _, body = listener.asked[0]
    assert (what.removeprefix("POST "), body["model"]) == asked


NO_CHAT = {"object": "error", "message": "The model does not support Chat Completions API", "code": 400}
NOT_HERE = "This model is only supported in v1/responses and not in v1/chat/completions."
NO_CHAT_MODEL = "This is not a chat model and thus not supported in the v1/chat/completions endpoint."
NO_OPERATION = "The chatCompletion operation does not work with the specified model, e. Please choose different model."


@pytest.mark.parametrize(
    ("provider", "status", "told", "ok"),
    [
        ("vllm", 400, NO_CHAT, True),
        ("vllm", 501, NO_CHAT, True),
        ("vllm", 404, {"detail": "Not Found"}, True),
        ("vllm", 404, {"object": "error", "message": "The model `e` does not exist.", "code": 404}, False),
        ("vllm", 500, NO_CHAT, False),
        ("openai", 404, {"error": {"message": NOT_HERE, "type": "invalid_request_error"}}, True),
        ("openai", 404, {"error": {"message": NO_CHAT_MODEL, "type": "invalid_request_error"}}, True),
        ("openai", 404, {"error": {"message": "The model `e` does not exist", "code": "model_not_found"}}, False),
        ("azure", 400, {"error": {"message": NO_OPERATION, "code": "OperationNotSupported"}}, True),
        ("compatible", 400, {"error": {"message": '"bge-m3" does not support chat'}}, True),
        ("compatible", 501, {"error": {"message": "This server does not support completions."}}, True),
    ],
)
async def test_who_says_that_this_is_the_wrong_endpoint_serves(provider: str, status: int, told: Any, ok: bool) -> None:  # noqa: FBT001
    """It has read the question, and it costs nothing; before anything was answered there is no better one to ask."""
    async with bench(Listener((status, told), health=200), provider) as at:
        [probed, *_] = await at.probed()
        assert at.breakers.by_name["a"].state in ((State.RAMPING,) if ok else (State.OPEN, State.HALF_OPEN))
    assert (probed.ok, probed.tokens, probed.cost_usd) == (ok, 0, None)


async def test_a_wrong_endpoint_is_no_proof_where_the_account_was_without_credit() -> None:
    """It may look at the model first."""
    async with bench(Listener((402, {}), (400, NO_CHAT)), "compatible") as at:
        await at.probed()
        at.breakers.by_name["a"].rests_until = 0.0
        [_, probed] = await at.probed(2)
    assert not probed.ok


async def test_nobody_there_is_a_failure() -> None:
    """The listener cannot be reached."""
    async with bench(Listener()) as at:
        at.canary._url = "http://127.0.0.1:1"
        [probed] = await at.probed()
        assert not probed.ok


async def test_it_waits_five_seconds_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a tenth of a second, health and call together."""
    monkeypatch.setattr("extproc.probes.canary.TIMEOUT_S", 0.1)
    listener = Listener()
    listener.may_answer.clear()
    async with bench(listener, "vllm") as at:
        [probed] = await at.probed()
        listener.may_answer.set()
    assert not probed.ok
    assert 0.1 <= probed.seconds < 60


async def test_an_operator_who_moved_it_meanwhile_is_right() -> None:
    """The canary's answer comes too late to move anything."""
    listener = Listener()
    listener.may_answer.clear()
    async with bench(listener) as at:
        async with asyncio.timeout(120):
            while not listener.asked:  # noqa: ASYNC110 - a look now and then will do
                await asyncio.sleep(0.01)
        at.breakers.signal("a", Signal.RESET, "operator")
        listener.may_answer.set()
        await at.probed()
        assert at.breakers.by_name["a"].state is State.CLOSED
