"""The console's HTTP server: uvicorn, in the event loop that also decides on requests, and so without its habits.

It installs no signal handlers, writes no log of its own, and never ends the process. Clients are given little: of time
for a request's head and for reading an answer, of bytes for both, of connections in all. When it is closed, whoever
watches is told so, and whoever does not go is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from extproc.console import api, proof
from extproc.console.answers import encoded
from extproc.console.audit import Audit
from extproc.console.clerk import Clerk
from extproc.console.guard import HEADERS, LAST, MOST_HEAD
from extproc.console.sources import Sources
from extproc.console.stream import Overviews
from extproc.console.tls import ca_mark, context_of, subject_of
from extproc.settings import AdminSettings, SettingsError
from extproc.settings.files import Mark

__all__ = ["Console", "serve"]

log = logging.getLogger("tidegate")

HEAD_S = 5.0
"""So long the head of a request may take to come, and a client of TLS to shake hands."""
STUCK_S = 10.0
"""So long a client may leave an answer unread."""
KEEP_ALIVE_S = 15
MOST_CONNECTIONS = 200
SEND_BUFFER = 262_144
"""Bytes that the system keeps for a client that does not read."""
LEAVE_S = 0.3
"""So long, when it ends, whoever is being answered may take."""


class Console:
    """A console that is served. `close` ends it, in less than a second."""

    def __init__(self, server: _Server, overviews: Overviews | None, serving: asyncio.Task[None]) -> None:
        """What there is to end."""
        self._server, self._overviews, self._serving = server, overviews, serving

    async def close(self) -> None:
        """No new connections, and an end to those that there are."""
        if self._overviews is not None:
            self._overviews.close()
        self._server.stop_listening()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                while self._server.server_state.tasks:  # noqa: ASYNC110 - uvicorn tells nobody
                    await asyncio.sleep(0.02)
        self._server.cut_off()
        self._server.should_exit = True
        await self._serving


async def serve(address: str, sources: Sources, admin: AdminSettings | None = None) -> Console:
    """Serve the console on host:port.

    OSError where the address cannot be had, SettingsError where a file that `admin` names cannot be used.
    """
    admin = admin or AdminSettings()
    if wrong := [*proof.problems(admin)]:
        raise SettingsError(wrong)
    for line in proof.notes(admin, address):
        log.warning("%s", line)
    context = context_of(admin)
    overviews = None if sources.overview is None else Overviews(sources.overview)
    clerk = Clerk(sources, proof.Proof(admin), Audit(admin.audit_file), overviews, address)
    listening = await _listening(address)
    config = uvicorn.Config(
        api.build(clerk),
        http=_Connection,
        ws="none",
        loop="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=2 * MOST_HEAD,
        backlog=128,
    )
    config.load()
    config.ssl = context
    server = _Server(config, partial(ca_mark, admin))
    try:
        await server.startup(listening)
    except BaseException:
        for each in listening:
            each.close()
        raise
    return Console(server, overviews, asyncio.create_task(server.serve(listening)))


class _Server(uvicorn.Server):
    """uvicorn's, which begins to listen before it is waited for, and leaves signals to others."""

    servers: list[asyncio.Server]

    def __init__(self, config: uvicorn.Config, clients: Callable[[], Mark]) -> None:
        """clients: another mark for another CA whose clients may act."""
        super().__init__(config)
        self._clients = clients

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are the service's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, once. OSError."""
        if self.started:
            return
        loop, config = asyncio.get_running_loop(), self.config

        def connection() -> asyncio.Protocol:
            return _Connection(config, self.server_state, {}, loop, self._clients)

        limits: dict[str, Any] = {"ssl_handshake_timeout": HEAD_S, "ssl_shutdown_timeout": 1.0} if config.ssl else {}
        self.servers = [
            await loop.create_server(connection, sock=each, ssl=config.ssl, backlog=config.backlog, **limits)
            for each in sockets or ()
        ]
        self.started = True

    def stop_listening(self) -> None:
        """Nobody else comes."""
        for server in self.servers:
            server.close()

    def cut_off(self) -> None:
        """Whoever is still here has to go."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _Connection(H11Protocol):
    """One client, that may be slow, silent or gone."""

    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
        clients: Callable[[], Mark] = lambda: None,
    ) -> None:
        """clients: see `_Server`."""
        super().__init__(config, server_state, app_state, loop)
        self.clients = clients

    @property
    def begun(self) -> bool:
        """Whether an answer is under way."""
        return self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It has so long for its request, and is whom its certificate names."""
        super().connection_made(transport)
        self.came = self.loop.time()
        self._make_room()
        transport.set_write_buffer_limits(high=1)  # so that `pause_writing` tells of all that is not read
        self._late = self.loop.call_later(HEAD_S, transport.abort)
        if certificate := transport.get_extra_info("peercert"):
            self.app = _as(subject_of(certificate), self.clients, self.app)

    def _make_room(self) -> None:
        """Where there are too many, the one that has said nothing for the longest time goes; else who just came.

        Who is silent, or slow to say what it wants, must not keep others out: not who looks whether this still runs.
        """
        here = [each for each in self.connections if not each.transport.is_closing()]
        if len(here) > MOST_CONNECTIONS:
            silent = (each for each in here if isinstance(each, _Connection) and not each.begun)
            min(silent, key=lambda each: each.came, default=self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        _off(self._late, self._stuck)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Part of a request. What has no whole head yet is not waited for without end, however often a bit comes."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            _off(self._late)
            self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """What cannot be read as HTTP; where an answer is under way it cannot be another one."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = encoded({"error": msg})
        about = {b"content-type": b"application/json", b"content-length": b"%d" % len(body), b"connection": b"close"}
        for event in (
            h11.Response(status_code=400, headers=[*HEADERS.items(), *about.items()], reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def pause_writing(self) -> None:
        """It does not read."""
        super().pause_writing()
        _off(self._stuck)
        self._stuck = self.loop.call_later(STUCK_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        _off(self._stuck)
        super().resume_writing()


def _off(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()


def _as(subject: str, clients: Callable[[], Mark], app: Any) -> Any:
    """The same for whoever has shown this certificate, while those of the same CA may act."""
    shown = clients()

    async def named(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if clients() == shown:
            scope = {**scope, "extensions": {"tls": {"client_cert_name": subject}}}
        else:
            scope = {**scope, "state": {**scope.get("state", {}), LAST: True}}  # to come again, and to show it anew
        await app(scope, receive, send)

    return named


async def _listening(address: str) -> list[socket.socket]:
    """Sockets on everything that the host stands for, loopback where there is none. OSError."""
    host, _, port = address.rpartition(":")
    wanted = await asyncio.get_running_loop().getaddrinfo(
        host.strip("[]") or "127.0.0.1", int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    found: list[socket.socket] = []
    try:
        for family, kind, protocol, _, place in dict.fromkeys(wanted):
            one = socket.socket(family, kind, protocol)
            found.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.settimeout(0)
            one.bind(place)
            one.listen(128)
    except OSError as error:
        for one in found:
            one.close()
        raise OSError(error.errno, f"{address}: {(error.strerror or str(error)).lower()}") from None
    return found
