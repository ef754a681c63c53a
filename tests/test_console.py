"""The console's sessions: who may look, who may raise, and what is wrong with what was sent."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from extproc.allowances import Allowances
from extproc.console import state
from extproc.console.asking import Access, ConsoleError
from extproc.console.server import serve
from extproc.console.sessions import ask, told
from extproc.console.sources import Sources
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget, Period
from extproc.core.capacity import Ask, Option, Store
from extproc.core.lanes import Lanes
from extproc.core.policy import KvRules, Lane, Policy, SessionLimits, Tenant, WhenBusy
from extproc.core.request import Session
from extproc.core.watermark import Watermark
from extproc.settings import AdminSettings
from extproc.shared.memory import MemoryCapacity
from extproc.stack import free_ports
from tests.doubles import request

TOKEN = "0123456789abcdef0123456789abcdef"
PROOF = {"authorization": f"Bearer {TOKEN}"}
JSON = {"content-type": "application/json"}
POLICY = Policy(
    upstreams={},
    routes=(),
    lanes={},
    tenants={"default": Tenant("default", (), ""), "half": Tenant("half", (), "", sessions=SessionLimits(max_usd=1.0))},
    sessions=SessionLimits(max_tokens=1000, max_usd=2.0),
    any_tenant=Tenant("*", (), "", tpm=500),
)
ODD = ["a/b", "%2F", "a%b", "..", ".", "a b", "?x=1#y", "会话", "a+b", "&", "'\"", "//", "x" * 256]


class Console:
    """A console with one session of 100 tokens used, and a client for it."""

    def __init__(self, allowances: Allowances, address: str, client: aiohttp.ClientSession) -> None:
        self.allowances = allowances
        self.address = address
        self._client = client

    async def heard(self, tenant: str = "default", session: str = "s") -> None:
        """A call of this session that has taken 100 tokens."""
        allowance = self.allowances.of(request(tenant=tenant, session=Session(session)), {})
        await self.allowances.prepare(allowance)
        option = Option("x", allowance.claims)
        await self.allowances._capacity.take([Ask("t", (option,))])
        self.allowances.close(allowance)

    async def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = JSON
    ) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        url = f"http://{self.address}{path}"
        async with self._client.request(method, url, data=data, headers={**PROOF, **headers}) as response:
            return response.status, await response.json()


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Console]:
    loop, address = asyncio.get_running_loop(), f"127.0.0.1:{free_ports(1)[0]}"
    allowances = Allowances(POLICY, MemoryCapacity(loop, {}), loop)
    (folder / "token").write_text(TOKEN)
    served = await serve(address, Sources(allowances.state, sessions=allowances), by_token(folder))
    try:
        async with aiohttp.ClientSession() as client:
            console = Console(allowances, address, client)
            await console.heard()
            yield console
    finally:
        await served.close()


def by_token(folder: Path) -> AdminSettings:
    return AdminSettings(token_file=str(folder / "token"))


async def test_a_session_is_shown(tmp_path: Path) -> None:
    """What it used, may use and has left; an unknown one is not found, under whatever tenant."""
    async with running(tmp_path) as console:
        status, seen = await console.send("GET", "/sessions/default/s")
        assert status == 200
        assert (seen["tenant"], seen["session"], seen["served"], seen["running"]) == ("default", "s", False, 0)
        assert seen["tokens"] == {"limit": 1000, "used": 100, "left": 900}
        assert seen["usd"] == {"limit": 2.0, "used": 0, "left": 2}
        for path in ("/sessions/default/t", "/sessions/half/s", "/sessions/nobody/s"):
            assert (await console.send("GET", path))[0] == 404
            assert (await console.send("POST", path, {"add_tokens": 1}))[0] == 404


async def test_a_session_is_raised(tmp_path: Path) -> None:
    """By tokens, by dollars or by both, as often as one likes; the answer shows what holds from now on."""
    async with running(tmp_path) as console:
        status, seen = await console.send("POST", "/sessions/default/s", {"add_tokens": 500})
        assert (status, seen["tokens"]) == (200, {"limit": 1500, "used": 100, "left": 1400})
        await console.send("POST", "/sessions/default/s", {"add_usd": 0.5})
        await console.send("POST", "/sessions/default/s", {"add_tokens": 1, "add_usd": 1})
        _, seen = await console.send("GET", "/sessions/default/s")
        assert (seen["tokens"]["limit"], seen["usd"]["limit"]) == (1501, 3.5)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"[]", b"7", b"null", b"not json", b"\xff", b"[" * 10_000, {"add_tokens": 0}, {"add_tokens": -5},
        {"add_tokens": True}, {"add_tokens": 1.5}, {"add_tokens": "5"}, {"add_tokens": None}, {"add_tokens": 10**13},
        b'{"add_tokens": ' + b"9" * 5000 + b"}", {"add_usd": 0}, {"add_usd": -1.0}, {"add_usd": True},
        {"add_usd": "1"}, {"add_usd": 1e10}, b'{"add_usd": NaN}', b'{"add_usd": Infinity}', b'{"add_usd": 1e999}',
        {"add_tokens": 5, "set_tokens": 9}, {"tokens": 5}, {"add_usd": 10**400},
    ],
)  # fmt: skip
async def test_what_makes_no_sense_is_told_and_changes_nothing(body: Any, tmp_path: Path) -> None:
    """Whatever was sent: what is wrong with it, in one sentence."""
    async with running(tmp_path) as console:
        status, answer = await console.send("POST", "/sessions/default/s", body)
        assert status == 400
        assert answer["error"]
        _, seen = await console.send("GET", "/sessions/default/s")
        assert (seen["tokens"]["limit"], seen["usd"]["limit"]) == (1000, 2.0)


async def test_a_limit_that_is_not_there_cannot_be_raised(tmp_path: Path) -> None:
    """The other one can; both or none."""
    async with running(tmp_path) as console:
        await console.heard("half")
        status, answer = await console.send("POST", "/sessions/half/s", {"add_tokens": 5, "add_usd": 1})
        assert status == 400
        assert "tokens" in answer["error"]
        assert (await console.send("GET", "/sessions/half/s"))[1]["usd"]["limit"] == 1.0
        assert (await console.send("POST", "/sessions/half/s", {"add_usd": 1}))[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({**JSON, "origin": "https://evil.example"}, 403),
        ({**JSON, "origin": "null"}, 403),
        ({**JSON, "sec-fetch-site": "cross-site"}, 403),
        ({**JSON, "sec-fetch-site": "same-site"}, 403),
        ({**JSON, "host": "evil.example:10004"}, 403),
        ({**JSON, "host": "127.0.0.1.evil.example"}, 403),
        ({**JSON, "sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:10004"}, 200),
        ({**JSON, "host": "localhost:9"}, 200),
        ({**JSON, "host": "[::1]:9"}, 200),
        ({**JSON, "host": "[::1"}, 403),
        ({**JSON, "host": ""}, 403),
    ],
)
async def test_a_web_page_cannot_raise_anything(headers: dict[str, str], status: int, tmp_path: Path) -> None:
    """Forms, pages of other sites and names made to point here are refused; tools are not."""
    async with running(tmp_path) as console:
        assert (await console.send("POST", "/sessions/default/s", {"add_tokens": 5}, headers))[0] == status
        limit = (await console.send("GET", "/sessions/default/s"))[1]["tokens"]["limit"]
        assert limit == (1005 if status == 200 else 1000)
        if status == 403:
            assert (await console.send("GET", "/sessions/default/s", headers=headers))[0] == 403


async def test_an_endless_body_is_not_read(tmp_path: Path) -> None:
    """Some kilobytes are more than any sum needs."""
    async with running(tmp_path) as console:
        url = f"http://{console.address}/sessions/default/s"
        async with console._client.post(url, data=b" " * 100_000, headers={**PROOF, **JSON}) as response:
            assert response.status == 413


@pytest.mark.parametrize("name", ODD)
async def test_any_name_can_be_asked_for(name: str, tmp_path: Path) -> None:
    """Slashes, dots and signs that mean something in a URL, as tenant and as session, from the command line too."""
    async with running(tmp_path) as console:
        await console.heard(name, name)
        loop = asyncio.get_running_loop()
        seen = await loop.run_in_executor(
            None, lambda: ask(Access(console.address, TOKEN), name, name, tokens=7, usd=0.25)
        )
        assert (seen["tenant"], seen["session"]) == (name, name)
        assert (seen["tokens"]["limit"], seen["usd"]["limit"]) == (1007, 2.25)
        path = f"/sessions/{quote(name, safe='')}/{quote(name, safe='')}"
        if name not in (".", ".."):  # a browser or a library may take these out of a path
            assert (await console.send("GET", path))[0] == 200


async def test_who_asks_from_the_command_line_is_told_why_not(tmp_path: Path) -> None:
    """An unknown session, a limit that is not there, a console that is not there, something else at its port."""
    loop = asyncio.get_running_loop()

    async def why(console_address: str, *arguments: Any, **more: Any) -> str:
        with pytest.raises(ConsoleError) as caught:
            await loop.run_in_executor(None, lambda: ask(Access(console_address, TOKEN), *arguments, **more))
        return str(caught.value)

    async with running(tmp_path) as console:
        await console.heard("half")
        assert "no such session" in await why(console.address, "default", "t")
        assert "no limit" in await why(console.address, "half", "s", tokens=5)
        port = console.address.rpartition(":")[2]
        seen = await loop.run_in_executor(None, lambda: ask(Access(f":{port}"), "default", "s"))
        assert seen["tokens"]["used"] == 100
    assert "no Tidegate answers" in await why(console.address, "default", "s")
    server = await asyncio.start_server(_nonsense, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert "no Tidegate answers" in await why(f"127.0.0.1:{port}", "default", "s")


async def _nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
    writer.close()


def test_a_session_is_told_in_words() -> None:
    """What has no limit says so."""
    known = {
        "tenant": "etl", "session": "s", "served": False, "running": 2, "silent_s": 3.5,
        "tokens": {"limit": 1500, "used": 1400.0, "left": 100}, "usd": None,
    }  # fmt: skip
    assert told(known).splitlines() == [
        "session s of tenant etl: never served, 2 running, silent for 3.5 s",
        "  tokens 1,400 of 1,500 used, 100 left",
        "  usd    no limit",
    ]
    assert (
        told(known | {"session": "\x1b]0;mine\x07\u202e"})
        .splitlines()[0]
        .startswith(r"session \x1b]0;mine\x07\u202e of")
    )


def test_the_state_page_stays_small() -> None:
    """However many tenants and sessions are counted: sessions are left out, and of the others so many are shown."""
    store: Store = {"upstream/a/slots": Slots(5), "tenant/t/usd_hour": Budget(5.0, Period.HOUR, used=1.0)}
    store |= {f"session/t/{i}/tokens": Budget(5.0) for i in range(10)}
    store |= {f"tenant/{i}/total": TokenBucket(1.0, 1.0, 1.0, 0.0) for i in range(state.MOST_COUNTERS)}
    counters = state.describe(Lanes([]), store, 0.0)["counters"]
    assert len(counters) == state.MOST_COUNTERS
    assert not any(key.startswith("session") for key in counters)
    assert counters["tenant/t/usd_hour"]["spent"] == 1.0


def test_the_state_page_tells_every_kind_of_counter() -> None:
    """As JSON that has no infinity in it; what does not apply is left out."""
    rules = Lane("P1", 0, 30.0, WhenBusy.HOLD, 1.0, 10, 1000, 100_000)
    lanes, kv = Lanes([rules]), Watermark(KvRules(tokens=1000))
    kv.take(300.0, 10.0)
    paused = TokenBucket(1.0, 10.0, 5.0, 10.0, shadow=True, closed_until=12.5)
    store: Store = {
        "bucket": paused, "slots": Slots(5, 2.0), "open": Slots(inf), "kv": kv,
        "day": Budget(5.0, Period.DAY, used=2.0),
        "for good": Budget(5.0, used=1.0, closed_until=inf),
    }  # fmt: skip
    told = json.loads(json.dumps(state.describe(lanes, store, 10.0), allow_nan=False))
    assert told["waiting"] == {"P1": {"requests": 0, "tokens": 0, "bytes": 0}}
    assert told["counters"]["bucket"] == {
        "level": 5.0, "capacity": 10.0, "per_second": 1.0, "closed_s": 2.5, "shadow": True
    }  # fmt: skip
    assert told["counters"]["slots"] == {"used": 2.0, "limit": 5}
    assert told["counters"]["open"] == {"used": 0.0, "limit": None}
    assert told["counters"]["kv"]["used"] == 300
    assert told["counters"]["day"] == {"spent": 2.0, "budget": 5.0, "ends_in_s": 86_390.0}
    assert told["counters"]["for good"] == {"spent": 1.0, "budget": 5.0, "ends_in_s": None, "closed_s": None}


async def test_the_rest_of_the_console_is_there(tmp_path: Path) -> None:
    """Its health and its state; without allowances there are no sessions."""
    async with running(tmp_path) as console:
        assert await console.send("GET", "/state") == (
            200,
            {"unlisted_tenants": 0, "sessions": 1, "forgotten_in_use": 0},
        )
        connection = http.client.HTTPConnection(console.address)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, connection.request, "GET", "/healthz")
        response = await loop.run_in_executor(None, connection.getresponse)
        assert response.read() == b"ok\n"
        connection.close()
    served = await serve(console.address, Sources(dict))
    async with aiohttp.ClientSession() as client, client.get(f"http://{console.address}/sessions/a/b") as missing:
        assert missing.status == 404
    await served.close()
