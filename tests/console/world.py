"""A console with everything there is to show and to move, all of it pretended, and served for real."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import uvloop

from extproc.console import asking
from extproc.console.server import Console, serve
from extproc.console.sources import Data, Sources
from extproc.settings import AdminSettings
from extproc.stack import free_ports
from tests.telemetry.metrics_world import told

TOKEN = "0123456789abcdef0123456789abcdef"
REQUEST, TICKET = "5f0c1a9e-7c0b-4b7e-9d52-0d4c2f9b6a11", "5f0c1a9e7c0b-1"
OVERVIEWS = Path(__file__).parent / "overviews"
STATE = told()
HOUR = {
    "step_s": 10.0,
    "at": [10.5, 20.5],
    "lanes": {"P1": {"waiting": [None, 3], "admitted": [None, 5], "refused": [None, 1], "wait_p95_s": [None, 0.5]}},
    "upstreams": {
        "a": {"tokens_per_s": [0.0, 3.5], "errors": [0, 1], "level": [None, 0.5], "state": ["closed", "open"]}
    },
    "refused": {"lane_full": [0, 1]},
}
PROOF = {"authorization": f"Bearer {TOKEN}"}


class Levers:
    """Levers that are moved and do nothing. done: who asked for what, in order."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.changes: list[Data] = []
        self.paused: set[str] = set()
        self.out: set[str] = set()
        self.bypassed = False
        self.draining = False
        self.broken: Exception | None = None
        self.takes_s = 0.0

    def state(self) -> Data:
        return {
            "bypass": {"until": None} if self.bypassed else None,
            "draining": self.draining,
            "lanes": {lane: {"paused": lane in self.paused, "until": None} for lane in ("P0", "P1", "P2")},
            "upstreams": {"primary": {"out": "primary" in self.out, "until": None}},
            "changes": list(self.changes),
        }

    async def _do(self, *what: Any) -> None:
        if self.broken is not None:
            raise self.broken
        await asyncio.sleep(self.takes_s)
        self.done.append(what)

    def _lane(self, lane: str) -> None:
        if lane not in ("P0", "P1", "P2"):
            raise LookupError(f"no such lane: {lane}")

    def _upstream(self, upstream: str) -> None:
        if upstream != "primary":
            raise LookupError(f"no such upstream: {upstream}")

    async def pause(self, lane: str, for_s: float | None = None, *, by: str) -> None:
        self._lane(lane)
        await self._do(by, "pause", lane, for_s)
        self.paused.add(lane)

    async def resume(self, lane: str, *, by: str) -> None:
        self._lane(lane)
        await self._do(by, "resume", lane)
        self.paused.discard(lane)

    async def trip(self, upstream: str, *, by: str) -> None:
        self._upstream(upstream)
        await self._do(by, "trip", upstream)

    async def reset(self, upstream: str, *, by: str) -> None:
        self._upstream(upstream)
        await self._do(by, "reset", upstream)

    async def take_out(self, upstream: str, for_s: float | None = None, *, by: str) -> None:
        self._upstream(upstream)
        await self._do(by, "take_out", upstream, for_s)
        self.out.add(upstream)

    async def put_back(self, upstream: str, *, by: str) -> None:
        self._upstream(upstream)
        await self._do(by, "put_back", upstream)
        self.out.discard(upstream)

    async def change(self, place: str, value: float, for_s: float | None = None, *, by: str) -> str:
        if place != "lanes.P2.max_requests":
            raise LookupError(f"no such setting: {place}")
        if value <= 0:
            raise ValueError("must be greater than 0")
        await self._do(by, "change", place, value, for_s)
        self.changes.append({"id": f"c{len(self.done)}", "place": place, "value": value, "was": 1000, "until": None})
        return str(self.changes[-1]["id"])

    async def revert(self, change: str, *, by: str) -> None:
        if change not in [each["id"] for each in self.changes]:
            raise LookupError("no such change")
        await self._do(by, "revert", change)
        self.changes = [each for each in self.changes if each["id"] != change]

    async def bypass(self, for_s: float | None = None, *, by: str) -> None:
        await self._do(by, "bypass", for_s)
        self.bypassed = True

    async def no_bypass(self, *, by: str) -> None:
        await self._do(by, "no_bypass")
        self.bypassed = False

    async def drain(self, *, by: str) -> None:
        await self._do(by, "drain")
        self.draining = True

    async def undrain(self, *, by: str) -> None:
        await self._do(by, "undrain")
        self.draining = False


class Sessions:
    """One session, of 1000 tokens and 5 dollars, or none where it is not to have any."""

    def __init__(self) -> None:
        self.limit = 1000
        self.usd: float | None = 5.0

    def look(self, tenant: str, session_id: str) -> Data | None:
        if (tenant, session_id) != ("agents", "a/b"):
            return None
        return {
            "tenant": tenant, "session": session_id, "served": True, "running": 0, "silent_s": 1.5,
            "tokens": {"limit": self.limit, "used": 10, "left": self.limit - 10},
            "usd": None if self.usd is None else {"limit": self.usd, "used": 0.0, "left": self.usd},
        }  # fmt: skip

    async def add(self, tenant: str, session_id: str, tokens: int, usd: float) -> Data | None:
        if self.look(tenant, session_id) is None:
            return None
        if usd and self.usd is None:
            raise ValueError("this session has no limit on its dollars")
        self.limit += tokens
        self.usd = None if self.usd is None else self.usd + usd
        return self.look(tenant, session_id)


class Pages:
    """Empty pages, of two kinds."""

    def kind(self, accept: str) -> str:
        return "application/openmetrics-text" if "openmetrics" in accept else "text/plain"

    def page(self, state: Data, accept: str) -> tuple[bytes, str]:  # noqa: ARG002 - as pages are asked for
        return b"# EOF\n", accept


class World:
    """Everything that a console is given. overviews: how many were made."""

    def __init__(self) -> None:
        self.levers, self.sessions = Levers(), Sessions()
        self.log: Data = {"level": "warning", "slow_s": 10.0, "sample": 1.0}
        self.overviews = 0
        self.told: dict[str, Any] = json.loads((OVERVIEWS / "calm.json").read_text())
        self.asked: list[Data] = []
        self.broken, self.failed = False, 0

    async def overview(self) -> Data:
        if self.broken:
            self.failed += 1
            raise RuntimeError("no overview")
        self.overviews += 1
        return {**self.told, "uptime_s": self.overviews}

    def requests(self, **wanted: Any) -> list[Data]:
        self.asked.append(wanted)
        row = {
            "id": REQUEST, "ticket": TICKET, "at": 1.5, "tenant": "<b>", "lane": "P1", "model": "gpt-5", "upstream": "",
            "state": "refused", "reason": "lane_full", "waited_s": 0.25, "tokens": 100,
        }  # fmt: skip
        return [row][: wanted["limit"]]

    def sources(self) -> Sources:
        return Sources(
            state=lambda: STATE,
            metrics=Pages(),
            sessions=self.sessions,
            operations=self.levers,
            overview=self.overview,
            history=lambda: HOUR,
            requests=self.requests,
            explain=lambda name: {"id": REQUEST} if name in (REQUEST, TICKET) else None,
            config=lambda: {"observe": 0.0},
            log=lambda: self.log,
            set_log=self.log.update,
        )


def by_token(folder: Path, **more: Any) -> AdminSettings:
    """Whoever has TOKEN may act."""
    file = folder / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    return AdminSettings(token_file=str(file), **more)


@asynccontextmanager
async def served(world: World, admin: AdminSettings, host: str = "127.0.0.1") -> AsyncIterator[tuple[str, Console]]:
    """host:port of a console, and the console itself."""
    address = f"{host}:{free_ports(1)[0]}"
    console = await serve(address, world.sources(), admin)
    try:
        yield address.replace("0.0.0.0", "127.0.0.1"), console
    finally:
        await console.close()


@contextmanager
def beside(world: World, admin: AdminSettings, host: str = "127.0.0.1") -> Iterator[str]:
    """The same in a thread of its own, for clients that block, and are patient: the URL."""
    ready, ending, place = threading.Event(), [], []

    async def run() -> None:
        stop = asyncio.Event()
        ending.append((asyncio.get_running_loop(), stop))
        async with served(world, admin, host) as (address, _):
            place.append(address)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=uvloop.run, args=(run(),))  # the loop that the service has
    thread.start()
    try:
        assert ready.wait(120)
        with patch.object(asking, "READ_S", 60.0):
            yield f"http://{place[0]}"
    finally:
        loop, stop = ending[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(120)


def client(url: str = "", **more: Any) -> httpx.AsyncClient:
    """Through no proxy, patient."""
    return httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, **more)
