"""Where an engine's numbers come from: every instance behind a name, or one Prometheus that has asked them already.

Whatever goes wrong on the way is `Unreadable`, in words that do not change from one second to the next, so that the
same trouble is told once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Collection, Mapping
from typing import Any, Protocol
from urllib.parse import quote

import aiohttp

from extproc.ports import Clock
from extproc.probes.exposition import Absent, Page, Sample, Unreadable, highest
from extproc.settings import EngineMetrics, KvSettings, UpstreamSettings

__all__ = ["Instances", "Prometheus", "Source", "Unreachable"]

RESOLVE_EVERY_S = 5.0
TIMEOUT_MAX_S = 2.0
PAGE_MAX_BYTES = 8 * 1024 * 1024
OK, BROKEN = 200, 500
IDENTITY = {"accept-encoding": "identity"}
"""On the same network nobody gains by packing a page and unpacking it again."""


class Unreachable(Unreadable):
    """Nobody answers there, at least not now; it says nothing about what would be answered."""


class Source(Protocol):
    """Where the numbers of one upstream come from."""

    async def addresses(self) -> Collection[str]:
        """Whom to ask; empty when nobody is known. What takes long goes on in the background."""
        ...

    async def ask(self, address: str) -> Sample:
        """What one of them says now. Unreadable when it does not."""
        ...


class Instances:
    """The metrics pages of all addresses of an upstream's name, and whatever else they serve.

    To write its whole page costs a busy engine more than we would like to ask of it twice a second. So it is asked for
    the few metrics that are wanted, as Prometheus' own library for Python lets one. Who does not know of that serves
    everything; who serves nothing then (that library does, where several processes share a page) is asked for all.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        upstream: UpstreamSettings,
        kv: KvSettings,
        names: EngineMetrics,
        clock: Clock,
    ) -> None:
        """`session` is for everybody; connections stay open between rounds."""
        self._web = _Web(session, min(TIMEOUT_MAX_S, kv.stale_s / 2))
        self._upstream = upstream
        self._path = kv.path
        self._page = Page(names)
        wanted = "&".join(f"name%5B%5D={quote(name)}" for name in self._page.names())
        self._some = f"{kv.path}{'&' if '?' in kv.path else '?'}{wanted}"
        self._whole: set[str] = set()
        self._lookup = _Lookup(upstream.host, upstream.port, clock)
        self._trust: ssl.SSLContext | None = None

    async def addresses(self) -> Collection[str]:
        """See Source."""
        return await self._lookup.addresses()

    async def ask(self, address: str) -> Sample:
        """See Source."""
        if address not in self._whole:
            try:
                return await self._read(address, self._some)
            except Absent:
                pass
        sample = await self._read(address, self._path)
        self._whole.add(address)
        return sample

    async def _read(self, address: str, path: str) -> Sample:
        status, page = await self.fetch(address, path)
        if status != OK:
            raise Absent(f"status {status}") if status < BROKEN else Unreachable(f"status {status}")
        return self._page.read(page)

    async def fetch(self, address: str, path: str, *, method: str = "GET", **more: Any) -> tuple[int, bytes]:
        """Status and body of what one of them serves at `path`. Unreachable when it does not answer."""
        upstream = self._upstream
        place = f"[{address}]" if ":" in address else address
        url = f"{'https' if upstream.tls else 'http'}://{place}:{upstream.port}{path}"
        headers = {**IDENTITY, **({"host": f"{upstream.host}:{upstream.port}"} if address != upstream.host else {})}
        if upstream.tls:
            more |= {"ssl": self._trusted(), "server_hostname": upstream.host}
        return await self._web.fetch(method, url, headers=headers, **more)

    def _trusted(self) -> ssl.SSLContext:
        if self._trust is None:
            try:
                self._trust = ssl.create_default_context(cafile=self._upstream.ca_file)
            except OSError:
                raise Unreachable(f"ca_file {self._upstream.ca_file} cannot be read here") from None
        return self._trust


class Prometheus:
    """The largest value that one query finds."""

    def __init__(self, session: aiohttp.ClientSession, kv: KvSettings) -> None:
        """`kv` names the Prometheus and the query."""
        self._web = _Web(session, min(TIMEOUT_MAX_S, kv.stale_s / 2))
        self._url = (kv.prometheus or "").rstrip("/") + "/api/v1/query"
        self._query = {"query": kv.query or ""}

    async def addresses(self) -> Collection[str]:
        """See Source."""
        return (self._url,)

    async def ask(self, address: str) -> Sample:
        """See Source."""
        status, body = await self._web.fetch("GET", address, headers=IDENTITY, params=self._query)
        if status not in (OK, 400, 422):  # a query that cannot be run, with the reason in the body
            raise Unreachable(f"status {status}")
        return Sample(highest(body))


class _Web:
    """One question, bounded in time and in the size of its answer."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def fetch(self, method: str, url: str, *, headers: Mapping[str, str], **more: Any) -> tuple[int, bytes]:
        """Status and body. Redirects are not followed."""
        try:
            async with self._session.request(
                method, url, headers=headers, timeout=self._timeout, allow_redirects=False, **more
            ) as response:
                return response.status, await _bounded(response)
        except TimeoutError:
            raise Unreachable(f"no answer in {self._timeout_s:g} s") from None
        except aiohttp.ClientConnectorCertificateError:
            raise Unreachable("its certificate is not trusted") from None
        except aiohttp.ClientConnectorError:
            raise Unreachable("connection failed") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unreachable(f"request failed: {type(error).__name__}") from None


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > PAGE_MAX_BYTES:
            raise Unreadable(f"the page is larger than {PAGE_MAX_BYTES >> 20} MiB")
    return b"".join(pieces)


class _Lookup:
    """The addresses of a name, looked up anew every few seconds beside everything else.

    When a lookup fails those that are known stay: names fail more often than the instances behind them. Of a name with
    addresses of both families only IPv4 counts, as in Envoy's clusters; else instances would count twice.
    """

    def __init__(self, host: str, port: int, clock: Clock) -> None:
        self._host, self._port, self._clock = host, port, clock
        self._fixed = _is_address(host)
        self._known: tuple[str, ...] = (host,) if self._fixed else ()
        self._due = float("-inf")
        self._asking: asyncio.Future[Any] | None = None

    async def addresses(self) -> Collection[str]:
        """Those known now."""
        now = self._clock.time()
        if self._asking is None and now >= self._due and not self._fixed:
            self._due = now + RESOLVE_EVERY_S
            loop = asyncio.get_running_loop()
            lookup = loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._asking = asyncio.ensure_future(lookup)
            self._asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._asking is not None:
            if not self._known:
                await asyncio.wait([self._asking], timeout=TIMEOUT_MAX_S)
            if self._asking.done():
                self._take(self._asking)
                self._asking = None
        return self._known

    def _take(self, asked: asyncio.Future[Any]) -> None:
        try:
            found = asked.result()
        except (OSError, UnicodeError):
            return
        old, new = (
            [place[0] for family, _, _, _, place in found if family == wanted]
            for wanted in (socket.AF_INET, socket.AF_INET6)
        )
        self._known = tuple(dict.fromkeys(old or new))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
