"""Canary calls: whether a rested upstream serves again is tried with a call of our own, never with a user's prompt.

The call asks for "reply OK" with at most five tokens, within five seconds, through Envoy's private probe listener with
that upstream forced: so the credentials, the path and the network are the ones that users' requests will meet. An
engine is asked for its `/health` first, where it has one, because a dead one need not be made to generate. What a
canary costs is charged to the upstream's buckets and dollars like anything else, and booked apart: nobody asked for it.

Not every upstream chats. So it is asked in the form, endpoint and model, in which it last answered well (`FORMS` has
those that can be asked cheaply): the settings' model as that one did; where it never answered, as those that generate
do. Where none does, what answered is asked, but for a model that is meant for canaries. Before anything did, it chats.
Who says that this is the wrong endpoint, or not one for this model, has read the question, too: it serves.

A canary that is told of our credit or our key sends the upstream to rest for long.

Newer models call the cap on tokens by another name, and may refuse one so small, or end with an error when it is used
up. Whoever complains of our cap by its newer name, or of nothing but its size, has read the question: it serves.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import aiohttp

from extproc.breakers import Breakers
from extproc.core.breaker import Sign, Signal, State
from extproc.core.capacity import Change
from extproc.core.events import Probed
from extproc.core.policy import Prices, Upstream
from extproc.core.quota import purse_keys, upstream_place
from extproc.core.request import Dialect, Endpoint, Size
from extproc.core.routing import claims
from extproc.core.spend import cost
from extproc.dialects import ErrorClass, classify
from extproc.ports import Capacity, Clock, Observer

__all__ = ["Canary", "Finding", "Target"]

log = logging.getLogger("tidegate")

TIMEOUT_S = 5.0
CHECK_EVERY_S = 0.25
MAX_ANSWER_BYTES = 262_144
"""An embedding may have thousands of numbers."""
ENGINES = frozenset({"vllm", "sglang"})
OK = 200
NO_SUCH_PAGE = (404, 405)
UNFIT = (400, 422)
MISPLACED = (400, 404, 405, 422, 501)
ANY_MODEL = "default"
CAP, NEWER_CAP, OUTPUT_CAP = "max_tokens", "max_completion_tokens", "max_output_tokens"
CAPS = (b"max_tokens", b"max_completion_tokens", b"max_output_tokens")
ELSEWHERE = (
    b"does not support chat",  # vLLM, Ollama, Groq
    b"do not support chat",  # Ollama, before
    b"does not support completions",  # vLLM, llama.cpp
    b"does not support embeddings",  # vLLM, Ollama, llama.cpp
    b"does not support responses",
    b"does not support messages",
    b"does not support generate",  # Ollama
    b"not a chat model",  # OpenAI
    b"only supported in v1/",
    b"not supported in the v1/",
    b"operation does not work with the specified model",  # Azure
    b'"detail":"not found"',  # vLLM and SGLang, which may have no page for what their model cannot do
    b'"detail": "not found"',
)
"""How they say, in small letters, that an endpoint is not there, or is not one for this model."""
MOST_USED = 1_000_000
"""No canary uses more tokens than this, whatever is reported."""
GRAVE = {
    ErrorClass.TERMINAL: Sign.TERMINAL,
    ErrorClass.CREDENTIAL: Sign.CREDENTIAL,
    ErrorClass.FORBIDDEN: Sign.CREDENTIAL,  # what was asked is our own
}


@dataclass(frozen=True, slots=True)
class Target:
    """How to try one upstream: `model` is the upstream's own name of its cheapest model, empty where none is known.

    own: that is named for canaries, and need not be one that users ask for.
    """

    upstream: Upstream
    model: str
    own: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """The smallest call of an endpoint. says: the member of a good answer that has something in it."""

    path: str
    asks: Mapping[str, object]
    cap: str
    size: Size
    says: str


PROMPT = "reply OK"
CHAT = {"messages": [{"role": "user", "content": PROMPT}]}
FORMS = {
    Endpoint.CHAT: Form("/v1/chat/completions", CHAT, CAP, Size(12, 5), "choices"),
    Endpoint.MESSAGES: Form("/v1/messages", CHAT, CAP, Size(12, 5), "content"),
    Endpoint.COMPLETIONS: Form("/v1/completions", {"prompt": PROMPT}, CAP, Size(12, 5), "choices"),
    Endpoint.RESPONSES: Form("/v1/responses", {"input": PROMPT}, OUTPUT_CAP, Size(12, 16), "output"),  # takes no less
    Endpoint.EMBEDDINGS: Form("/v1/embeddings", {"input": PROMPT}, "", Size(12, 0), "data"),
}


@dataclass(frozen=True, slots=True)
class Question:
    """What one upstream is asked. model: as it calls it."""

    upstream: Upstream
    endpoint: Endpoint
    model: str

    @property
    def form(self) -> Form:
        """How that is written."""
        return FORMS[self.endpoint]

    def body(self, cap: str) -> dict[str, object]:
        """What is sent, with the name of the cap on its tokens."""
        capped = {cap: self.form.size.output} if cap else {}
        return {"model": self.model, **self.form.asks, **capped}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a canary found: why the upstream does not serve, empty when it does. grave: that is our credit or our key.

    used: tokens of its answer, None when there was none.
    """

    cause: str = ""
    grave: Sign | None = None
    used: Size | None = None


class Canary:
    """Probes whatever breaker is due. One probe at a time per upstream."""

    def __init__(
        self,
        url: str,
        targets: Mapping[str, Target],
        breakers: Breakers,
        capacity: Capacity,
        clock: Clock,
        observer: Observer,
        rates: Callable[[tuple[str, ...], str], Mapping[str, Prices]],
    ) -> None:
        """`url` is Envoy's probe listener; `rates` tells the prices of a model at some upstreams that hold now."""
        self._url = url
        self._targets = targets
        self._breakers = breakers
        self._capacity = capacity
        self._clock = clock
        self._observe = observer
        self._rates = rates
        self._probes: set[asyncio.Task[None]] = set()

    def follow(self, targets: Mapping[str, Target]) -> None:
        """Try the same upstreams in another way from now on."""
        self._targets = targets

    async def run(self) -> None:
        """Look for due breakers until cancelled."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                while True:
                    self._breakers.tick()
                    for name in self._breakers.due():
                        self._breakers.signal(name, Signal.RESTED, "rested")
                        probe = asyncio.create_task(self._probe(session, name))
                        self._probes.add(probe)
                        probe.add_done_callback(partial(self._over, name))
                    await asyncio.sleep(CHECK_EVERY_S)
            finally:
                for probe in self._probes:
                    probe.cancel()

    def _over(self, name: str, probe: asyncio.Task[None]) -> None:
        """One that broke has failed, or its upstream would never be tried again."""
        self._probes.discard(probe)
        if not probe.cancelled() and (error := probe.exception()) is not None:
            log.error("a canary broke", exc_info=error)
            if self._breakers.by_name[name].state is State.HALF_OPEN:
                self._breakers.signal(name, Signal.PROBE_FAILED, f"canary broke: {type(error).__name__}")

    async def _probe(self, session: aiohttp.ClientSession, name: str) -> None:
        began = self._clock.time()
        question, breaker = self._question(name), self._breakers.by_name[name]
        await self._charge(question)
        found = await self._call(session, question)
        used, prices = found.used, self._rates((name,), question.model).get(name)
        cost_usd = cost(prices, used) if used and prices else None
        if cost_usd:
            keys = purse_keys(upstream_place(question.upstream), question.upstream.dollars)
            await self._capacity.change([Change(key, -cost_usd) for key in keys])
        self._observe(
            Probed(
                name,
                not found.cause,
                self._clock.time() - began,
                tokens=used.total if used else 0,
                cost_usd=cost_usd,
            )
        )
        if breaker.state is State.HALF_OPEN:  # an operator may have moved it meanwhile
            signal = Signal.PROBE_FAILED if found.cause else Signal.PROBE_OK
            self._breakers.signal(name, signal, found.cause or "canary answered", grave=found.grave)

    def _question(self, name: str) -> Question:
        """In the form that is said at the head of this file."""
        target = self._targets[name]
        upstream, answered = target.upstream, self._breakers.served.get(name, {})
        latest = [(form, upstream.own_name(model)) for form, model in reversed(answered.items()) if form in FORMS]
        form = next((form for form, model in latest if model == target.model), None)
        if form is not None:
            return Question(upstream, form, target.model)
        form = next((form for form, _ in latest if form.generates), None)
        if latest and (not target.model or (form is None and not target.own)):
            return Question(upstream, *latest[0])
        usual = Endpoint.CHAT if Dialect.OPENAI in upstream.dialects else Endpoint.MESSAGES
        form = form or (latest[0][0] if latest else usual)
        return Question(upstream, form, target.model or upstream.own_name(ANY_MODEL))

    async def _call(self, session: aiohttp.ClientSession, question: Question) -> Finding:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if question.upstream.provider in ENGINES and (cause := await self._unhealthy(session, question)):
                    return Finding(cause)
                return await self._ask(session, question)
        except TimeoutError:
            return Finding(f"canary got no answer in {TIMEOUT_S:g} s")
        except (aiohttp.ClientError, ValueError, RecursionError) as error:
            return Finding(f"canary failed: {type(error).__name__}")

    async def _unhealthy(self, session: aiohttp.ClientSession, question: Question) -> str:
        """What an engine says of its own health; empty when it is well, or has no such page."""
        async with session.get(self._url + "/health", headers=_forced(question)) as response:
            return "" if response.status in (OK, *NO_SUCH_PAGE) else f"engine's health is {response.status}"

    async def _ask(self, session: aiohttp.ClientSession, question: Question) -> Finding:
        form = question.form
        status, text = await self._told(session, question, form.cap)
        if status in UNFIT and form.cap == CAP and NEWER_CAP.encode() in text:
            status, text = await self._told(session, question, NEWER_CAP)
        if status != OK:
            return self._refused(question, status, text)
        answer = json.loads(text)
        if not isinstance(answer, dict) or answer.get("error") is not None or not _says(answer, form):
            return Finding("canary got an answer that is none", self._grave(question, OK, text))
        return Finding(used=_used(answer, form.size))

    def _refused(self, question: Question, status: int, text: bytes) -> Finding:
        """It serves where it complains of nothing but how it was asked. Of that, a wrong endpoint costs nothing."""
        if status in MISPLACED and any(words in text.lower() for words in ELSEWHERE) and not self._was_grave(question):
            return Finding()
        grave = self._grave(question, status, text)
        if grave is None and status in UNFIT and any(cap in text for cap in CAPS):
            return Finding(used=question.form.size)
        return Finding(f"canary got status {status}", grave)

    async def _told(self, session: aiohttp.ClientSession, question: Question, cap: str) -> tuple[int, bytes]:
        """Status and body of the answer, in however many pieces it comes."""
        url, body = self._url + question.form.path, question.body(cap)
        async with session.post(url, json=body, headers=_forced(question)) as response:
            text = b""
            while len(text) < MAX_ANSWER_BYTES and (more := await response.content.read(MAX_ANSWER_BYTES)):
                text += more
            return response.status, text[:MAX_ANSWER_BYTES]

    def _grave(self, question: Question, status: int, text: bytes) -> Sign | None:
        """Whether that is about our credit or our key.

        Some say so in words that only a client's error would have, so what was one of these stays one.
        """
        means = classify(question.upstream.provider, status, *_complaint(text))
        if means in GRAVE:
            return GRAVE[means]
        return self._was_grave(question) if means is ErrorClass.CLIENT else None

    def _was_grave(self, question: Question) -> Sign | None:
        before = self._breakers.by_name[question.upstream.name].verdict.sign
        return before if before in GRAVE.values() else None

    async def _charge(self, question: Question) -> None:
        price = claims(question.upstream, question.model, question.form.size, question.endpoint)
        changes = [Change(claim.key, -claim.amount) for claim in price if not claim.key.endswith(("/slots", "/kv"))]
        await self._capacity.change(changes)


def _forced(question: Question) -> dict[str, str]:
    return {"x-tidegate-probe": question.upstream.name}


def _complaint(text: bytes) -> tuple[str, str]:
    """Type and code of an error body, empty words where it has none."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return "", ""
    told = told[0] if isinstance(told, list) and told else told
    error = told.get("error", told) if isinstance(told, dict) else None
    if not isinstance(error, dict):
        return "", ""
    kind, code = error.get("type") or error.get("status"), error.get("code")
    return _word(kind), _word(code)


def _word(told: object) -> str:
    return str(told) if isinstance(told, (str, int)) else ""


def _says(answer: dict[str, object], form: Form) -> bool:
    """Whether there is something in it, or its cap on tokens was used up before there was."""
    return bool(answer.get(form.says)) or (form.cap == OUTPUT_CAP and answer.get("status") == "incomplete")


def _used(answer: dict[str, object], ours: Size) -> Size:
    """Tokens as it reports them in either dialect, ours where it does not."""
    usage = answer.get("usage")
    told = usage if isinstance(usage, dict) else {}
    sent, got = (
        told.get("prompt_tokens", told.get("input_tokens")),
        told.get("completion_tokens", told.get("output_tokens")),
    )
    return Size(_number(sent, ours.input), _number(got, ours.output))


def _number(told: object, ours: int) -> int:
    return told if isinstance(told, int) and 0 <= told <= MOST_USED else ours
