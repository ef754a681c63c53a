"""What the other side says of a replay: the service's state page, and the fake providers' records.

Both are optional: a gateway elsewhere may show neither, and a real provider keeps no record for us. What does not
answer is None, never a guess.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

__all__ = ["Bucket", "Gauges", "Target", "buckets", "filling", "held"]

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Target:
    """Where a replay goes: base URL of the gateway, and where to look at what it does. fakes: name -> base URL."""

    gateway: str
    state: str | None = None
    fakes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A token limit as the gateway keeps it, headroom taken off."""

    upstream: str
    per_second: float
    capacity: float


@dataclass(slots=True)
class Gauges:
    """Reads them over `session`."""

    session: aiohttp.ClientSession
    target: Target

    async def state(self) -> dict[str, Any] | None:
        """The state page."""
        return await self._get(self.target.state) if self.target.state else None

    async def records(self) -> dict[str, dict[str, Any]]:
        """The record of each fake provider that answers, without its list of requests."""
        found = {name: await self._get(f"{url}/admin/record?last=0") for name, url in self.target.fakes.items()}
        return {name: record for name, record in found.items() if record is not None}

    async def limits(self) -> dict[str, dict[str, Any]]:
        """The settings of each fake provider that answers."""
        found = {name: await self._get(f"{url}/admin/settings") for name, url in self.target.fakes.items()}
        return {name: settings for name, settings in found.items() if settings is not None}

    async def forget(self) -> None:
        """Let the fake providers start their records anew."""
        for url in self.target.fakes.values():
            await self._call("DELETE", f"{url}/admin/record")

    async def settle(self, within_s: float) -> tuple[dict[str, Any] | None, float]:
        """Wait until nothing is held and every bucket is full again; the last state, and how long it took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            state = await self.state()
            if state is None or not (held(state) or filling(state)) or loop.time() - began > within_s:
                return state, loop.time() - began
            await asyncio.sleep(POLL_S)

    async def _get(self, url: str) -> dict[str, Any] | None:
        answer = await self._call("GET", url)
        return answer if isinstance(answer, dict) else None

    async def _call(self, method: str, url: str) -> Any:
        try:
            async with self.session.request(method, url, timeout=aiohttp.ClientTimeout(5)) as response:
                return await response.json() if response.ok else None
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError):
            return None


def held(state: Mapping[str, Any]) -> list[str]:
    """What is still held in a state, a few words each; empty when every request has let go of everything."""
    words = [
        f"{name} {backlog['requests']} waiting" for name, backlog in state["waiting"].items() if backlog["requests"]
    ]
    words += [f"{name} {state[name]}" for name in ("flying", "unsettled") if state[name]]
    words += [f"{key} {counter['used']:g} used" for key, counter in state["counters"].items() if counter.get("used")]
    return words


def filling(state: Mapping[str, Any]) -> list[str]:
    """Buckets that are not full, a few words each. Levels are rounded, so a token is not worth a word."""
    return [
        f"{key} {counter['level']:,.0f} of {counter['capacity']:,.0f}"
        for key, counter in state["counters"].items()
        if counter.get("level", 0) < counter.get("capacity", 0) - 1
    ]


def buckets(state: Mapping[str, Any]) -> dict[str, Bucket]:
    """The limit on all tokens of each upstream that has one for any model."""
    found = {}
    for key, counter in state["counters"].items():
        match key.split("/"):
            case ["upstream", upstream, _, "total"] if counter["per_second"]:
                found[upstream] = Bucket(upstream, counter["per_second"], counter["capacity"])
    return found
