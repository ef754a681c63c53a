"""Canary calls: whether a rested upstream serves again is tried with a call of our own, never with a user's prompt.

The call asks for "reply OK" with at most five tokens, within five seconds, through Envoy's private probe listener with
that upstream forced: so the credentials, the path and the network are the ones that users' requests will meet. An
engine is asked for its `/health` first, where it has one, because a dead one need not be made to generate. What a
canary costs is charged to the upstream's buckets and dollars like anything else, and booked apart: nobody asked for it.

A canary that is told of our credit or our key sends the upstream to rest for long.

Newer models call the cap on tokens by another name, and may refuse one so small, or end with an error when it is used
up. Whoever complains of our cap by its newer name, or of nothing but its size, has read the question: it serves.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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

SIZE = Size(input=12, output=5)
TIMEOUT_S = 5.0
CHECK_EVERY_S = 0.25
MAX_ANSWER_BYTES = 65_536
ENGINES = frozenset({"vllm", "sglang"})
OK = 200
NO_SUCH_PAGE = (404, 405)
UNFIT = (400, 422)
ANY_MODEL = "default"
CAP, NEWER_CAP = "max_tokens", "max_completion_tokens"
CAPS = (b"max_tokens", b"max_completion_tokens", b"max_output_tokens")
MOST_USED = 1_000_000
"""No canary uses more tokens than this, whatever is reported."""
GRAVE = {
    ErrorClass.TERMINAL: Sign.TERMINAL,
    ErrorClass.CREDENTIAL: Sign.CREDENTIAL,
    ErrorClass.FORBIDDEN: Sign.CREDENTIAL,  # what was asked is our own
}


@dataclass(frozen=True, slots=True)
class Target:
    """How to try one upstream: `model` is the upstream's own name of its cheapest model, empty where none is known."""

    upstream: Upstream
    model: str


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
        target, breaker = self._target(name), self._breakers.by_name[name]
        await self._charge(target)
        found = await self._call(session, target)
        used, prices = found.used, self._rates((name,), target.model).get(name)
        cost_usd = cost(prices, used) if used and prices else None
        if cost_usd:
            keys = purse_keys(upstream_place(target.upstream), target.upstream.dollars)
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

    def _target(self, name: str) -> Target:
        """Where only callers name models, the last that was served there."""
        target = self._targets[name]
        if target.model:
            return target
        model = self._breakers.served.get(name, ANY_MODEL)
        return replace(target, model=target.upstream.own_name(model))

    async def _call(self, session: aiohttp.ClientSession, target: Target) -> Finding:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if target.upstream.provider in ENGINES and (cause := await self._unhealthy(session, target)):
                    return Finding(cause)
                return await self._ask(session, target)
        except TimeoutError:
            return Finding(f"canary got no answer in {TIMEOUT_S:g} s")
        except (aiohttp.ClientError, ValueError, RecursionError) as error:
            return Finding(f"canary failed: {type(error).__name__}")

    async def _unhealthy(self, session: aiohttp.ClientSession, target: Target) -> str:
        """What an engine says of its own health; empty when it is well, or has no such page."""
        async with session.get(self._url + "/health", headers=_forced(target)) as response:
            return "" if response.status in (OK, *NO_SUCH_PAGE) else f"engine's health is {response.status}"

    async def _ask(self, session: aiohttp.ClientSession, target: Target) -> Finding:
        status, text = await self._told(session, target, CAP)
        if status in UNFIT and NEWER_CAP.encode() in text:
            status, text = await self._told(session, target, NEWER_CAP)
        if status != OK:
            grave = self._grave(target, status, text)
            if grave is None and status in UNFIT and any(cap in text for cap in CAPS):
                return Finding(used=SIZE)
            return Finding(f"canary got status {status}", grave)
        answer = json.loads(text)
        if not isinstance(answer, dict) or "error" in answer or not (answer.get("choices") or answer.get("content")):
            return Finding("canary got an answer that is none", self._grave(target, OK, text))
        return Finding(used=_used(answer))

    async def _told(self, session: aiohttp.ClientSession, target: Target, cap: str) -> tuple[int, bytes]:
        """Status and body of the answer, in however many pieces it comes."""
        path, body = _question(target, cap)
        async with session.post(self._url + path, json=body, headers=_forced(target)) as response:
            text = b""
            while len(text) < MAX_ANSWER_BYTES and (more := await response.content.read(MAX_ANSWER_BYTES)):
                text += more
            return response.status, text[:MAX_ANSWER_BYTES]

    def _grave(self, target: Target, status: int, text: bytes) -> Sign | None:
        """Whether that is about our credit or our key.

        Some say so in words that only a client's error would have, so what was one of these stays one.
        """
        means = classify(target.upstream.provider, status, *_complaint(text))
        if means in GRAVE:
            return GRAVE[means]
        before = self._breakers.by_name[target.upstream.name].verdict.sign
        return before if means is ErrorClass.CLIENT and before in GRAVE.values() else None

    async def _charge(self, target: Target) -> None:
        price = claims(target.upstream, target.model, SIZE, Endpoint.CHAT)
        changes = [Change(claim.key, -claim.amount) for claim in price if not claim.key.endswith(("/slots", "/kv"))]
        await self._capacity.change(changes)


def _forced(target: Target) -> dict[str, str]:
    return {"x-tidegate-probe": target.upstream.name}


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


def _used(answer: dict[str, object]) -> Size:
    """Tokens as it reports them in either dialect, ours where it does not."""
    usage = answer.get("usage")
    told = usage if isinstance(usage, dict) else {}
    sent, got = (
        told.get("prompt_tokens", told.get("input_tokens")),
        told.get("completion_tokens", told.get("output_tokens")),
    )
    return Size(_number(sent, SIZE.input), _number(got, SIZE.output))


def _number(told: object, ours: int) -> int:
    return told if isinstance(told, int) and 0 <= told <= MOST_USED else ours


def _question(target: Target, cap: str) -> tuple[str, dict[str, object]]:
    body: dict[str, object] = {
        "model": target.model,
        "messages": [{"role": "user", "content": "reply OK"}],
        cap: SIZE.output,
    }
    return ("/v1/chat/completions" if Dialect.OPENAI in target.upstream.dialects else "/v1/messages"), body
