"""Canary calls: whether a rested upstream serves again is tried with a call of our own, never with a user's prompt.

The call asks for "reply OK" with at most five tokens, within five seconds, through Envoy's private probe listener with
that upstream forced: so the credentials, the path and the network are the ones that users' requests will meet. What it
costs is charged to the upstream's buckets like anything else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from extproc.breakers import Breakers
from extproc.core.breaker import Signal, State
from extproc.core.capacity import Change
from extproc.core.events import Probed
from extproc.core.policy import Upstream
from extproc.core.request import Dialect, Endpoint, Size
from extproc.core.routing import claims
from extproc.ports import Capacity, Clock, Observer

__all__ = ["Canary", "Target"]

SIZE = Size(input=12, output=5)
TIMEOUT_S = 5.0
CHECK_EVERY_S = 0.25
MAX_ANSWER_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Target:
    """How to try one upstream: `model` is the upstream's own name of its cheapest model."""

    upstream: Upstream
    model: str


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
    ) -> None:
        """`url` is Envoy's probe listener."""
        self._url = url
        self._targets = targets
        self._breakers = breakers
        self._capacity = capacity
        self._clock = clock
        self._observe = observer
        self._probes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Look for due breakers until cancelled."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                while True:
                    for name in self._breakers.due():
                        self._breakers.signal(name, Signal.RESTED, "rested")
                        probe = asyncio.create_task(self._probe(session, name))
                        self._probes.add(probe)
                        probe.add_done_callback(self._probes.discard)
                    await asyncio.sleep(CHECK_EVERY_S)
            finally:
                for probe in self._probes:
                    probe.cancel()

    async def _probe(self, session: aiohttp.ClientSession, name: str) -> None:
        began = self._clock.time()
        target = self._targets[name]
        await self._charge(target)
        cause = await self._call(session, target)
        self._observe(Probed(name, not cause, self._clock.time() - began))
        if self._breakers.by_name[name].state is State.HALF_OPEN:  # an operator may have moved it meanwhile
            signal = Signal.PROBE_FAILED if cause else Signal.PROBE_OK
            self._breakers.signal(name, signal, cause or "canary answered")

    async def _call(self, session: aiohttp.ClientSession, target: Target) -> str:
        """Empty when the upstream answered as it should, else what was wrong."""
        path, body = _question(target)
        headers = {"x-tidegate-probe": target.upstream.name}
        try:
            async with session.post(self._url + path, json=body, headers=headers) as response:
                if response.status != 200:  # noqa: PLR2004
                    return f"canary got status {response.status}"
                answer = json.loads(await response.content.read(MAX_ANSWER_BYTES))
        except TimeoutError:
            return f"canary got no answer in {TIMEOUT_S:g} s"
        except (aiohttp.ClientError, ValueError, RecursionError) as error:
            return f"canary failed: {type(error).__name__}"
        sound = isinstance(answer, dict) and "error" not in answer and (answer.get("choices") or answer.get("content"))
        return "" if sound else "canary got an answer that is none"

    async def _charge(self, target: Target) -> None:
        price = claims(target.upstream, target.model, SIZE, Endpoint.CHAT)
        changes = [Change(claim.key, -claim.amount) for claim in price if not claim.key.endswith(("/slots", "/kv"))]
        await self._capacity.change(changes)


def _question(target: Target) -> tuple[str, dict[str, object]]:
    body: dict[str, object] = {
        "model": target.model,
        "messages": [{"role": "user", "content": "reply OK"}],
        "max_tokens": SIZE.output,
    }
    return ("/v1/chat/completions" if Dialect.OPENAI in target.upstream.dialects else "/v1/messages"), body
