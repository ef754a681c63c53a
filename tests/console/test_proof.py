"""Who may act and who may read: what proves it, and what is told to whom it is not proven."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import trustme

from extproc.check import advice, validate
from extproc.console import proof
from extproc.console.proof import NOBODY, TokenError
from extproc.settings import AdminSettings, SettingsError, load
from tests.console.world import PROOF, TOKEN, World, beside, by_token, client, served

ACTIONS = [
    ("POST", "/api/v1/drain"), ("POST", "/api/v1/undrain"), ("POST", "/api/v1/bypass"), ("DELETE", "/api/v1/bypass"),
    ("POST", "/api/v1/lanes/P2/pause"), ("POST", "/api/v1/lanes/P2/resume"), ("POST", "/api/v1/changes"),
    ("DELETE", "/api/v1/changes/1"), ("POST", "/api/v1/upstreams/primary/trip"), ("PUT", "/api/v1/log"),
    ("POST", "/api/v1/upstreams/primary/reset"), ("POST", "/api/v1/upstreams/primary/out"),
    ("POST", "/api/v1/upstreams/primary/in"), ("POST", "/api/v1/sessions/agents/a%2Fb"),
    ("POST", "/sessions/agents/a%2Fb"),
]  # fmt: skip
BODIES = {
    "/api/v1/changes": {"place": "lanes.P2.max_requests", "value": 5},
    "/api/v1/log": {"level": "debug"},
    "/api/v1/sessions/agents/a%2Fb": {"add_tokens": 5},
    "/sessions/agents/a%2Fb": {"add_tokens": 5},
}
READS = [
    "/state", "/sessions/agents/a%2Fb", "/api/openapi.json",
    *(f"/api/v1/{name}" for name in ("state", "overview", "stream", "history", "requests", "requests/x", "audit")),
    *(f"/api/v1/{name}" for name in ("config", "log", "levers", "sessions/agents/a%2Fb")),
]  # fmt: skip
OPEN = ["/healthz", "/metrics", "/", "/assets/app.js"]
WRONG = [
    "Bearer",
    "Bearer x",
    f"Bearer {TOKEN}x",
    f"Bearer {TOKEN[:-1]}",
    f"Basic {TOKEN}",
    TOKEN,
    "Bearer ü",
]


async def test_nobody_acts_without_a_proof(tmp_path: Path) -> None:
    """Not on loopback either, nor with something like the token; with the token it is done."""
    world = World()
    async with served(world, by_token(tmp_path)) as (address, _), client(f"http://{address}") as http:
        for (method, path), wrong in itertools.product(ACTIONS, [None, *WRONG]):
            headers = [] if wrong is None else [(b"authorization", wrong.encode())]
            refused = await http.request(method, path, json=BODIES.get(path, {}), headers=headers)
            assert refused.status_code == 401, (path, wrong)
            assert refused.headers["www-authenticate"].startswith("Bearer")
            assert TOKEN not in refused.text
        assert world.levers.done == []
        assert (world.sessions.limit, world.log["level"]) == (1000, "warning")
        for method, path in ACTIONS:
            done = await http.request(method, path, json=BODIES.get(path, {}), headers=PROOF)
            assert done.status_code == (404 if path.endswith("changes/1") else 200)


async def test_where_nothing_is_set_nobody_acts_at_all() -> None:
    """And is told which setting would change that."""
    world = World()
    async with served(world, AdminSettings()) as (address, _), client(f"http://{address}") as http:
        for method, path in ACTIONS:
            refused = await http.request(method, path, json=BODIES.get(path, {}), headers=PROOF)
            assert (refused.status_code, refused.json()) == (403, {"error": NOBODY})
    assert world.levers.done == []


async def test_every_action_is_tried_here() -> None:
    """Whatever is added to the API has to be added above."""
    async with served(World(), AdminSettings()) as (address, _), client(f"http://{address}") as http:
        document = (await http.get("/api/openapi.json")).json()
    routes = {(method.upper(), path) for path, route in document["paths"].items() for method in route}
    named = {
        ("P2", "{lane}"),
        ("primary", "{name}"),
        ("agents/a%2Fb", "{tenant}/{session}"),
        ("changes/1", "changes/{id}"),
    }
    tried = set()
    for method, path in ACTIONS:
        for name, stands_for in named:
            path = path.replace(name, stands_for)  # noqa: PLW2901
        tried.add((method, path))
    assert {(method, path) for method, path in routes if method != "GET"} == tried
    read = {path for method, path in routes if method == "GET"} - set(OPEN)
    assert len(read) == len(READS) - 1  # the document is not in itself


async def test_elsewhere_than_on_loopback_reading_needs_it_too(tmp_path: Path) -> None:
    """Whoever asks from where."""
    async with served(World(), by_token(tmp_path), "0.0.0.0") as (address, _), client(f"http://{address}") as http:
        for path in READS:
            refused = await http.get(path)
            assert refused.status_code == 401
            assert "www-authenticate" in refused.headers
            assert await _status(http, path, PROOF) == (404 if path.endswith("/x") else 200)
    async with served(World(), by_token(tmp_path)) as (address, _), client(f"http://{address}") as http:
        for path in READS:
            assert await _status(http, path, {}) == (404 if path.endswith("/x") else 200)


async def _status(http: httpx.AsyncClient, path: str, headers: dict[str, str]) -> int:
    """Without waiting for the end of the answer, for one has none."""
    async with http.stream("GET", path, headers=headers) as answer:
        return answer.status_code


async def test_health_metrics_and_the_empty_page_are_for_all(tmp_path: Path) -> None:
    """They hold nothing that anybody could want; without any setting nobody reads the rest from outside."""
    for admin in (by_token(tmp_path), AdminSettings()):
        async with served(World(), admin, "0.0.0.0") as (address, _), client(f"http://{address}") as http:
            for path in OPEN:
                assert (await http.get(path, headers={"host": "tidegate.example"})).status_code == 200
            assert (await http.get("/state")).status_code == (401 if admin.token_file else 403)


async def test_a_new_token_holds_at_once(tmp_path: Path) -> None:
    """However the file is replaced; one that is gone, empty or short lets nobody in, and words say why."""
    world, admin = World(), by_token(tmp_path)
    file = tmp_path / "token"
    async with served(world, admin) as (address, _), client(f"http://{address}") as http:

        async def drained(token: str) -> httpx.Response:
            return await http.post("/api/v1/drain", headers={"authorization": f"Bearer {token}"})

        assert (await drained(TOKEN)).status_code == 200
        fresh = tmp_path / "fresh"
        fresh.write_text("n" * 32)
        fresh.rename(file)
        assert [(await drained(token)).status_code for token in (TOKEN, "n" * 32)] == [401, 200]
        for held, why in (("", "is empty"), ("short", "at least 16"), ("two words of it all", "one word")):
            file.write_text(held)
            told = await drained(held or "x")
            assert told.status_code == 403
            assert "admin.token_file" in told.json()["error"]
            assert why in told.json()["error"]
        file.unlink()
        assert "No such file" in (await drained("n" * 32)).json()["error"]
        file.write_text(f"  {TOKEN}\n\n")
        assert (await drained(TOKEN)).status_code == 200


def test_what_a_token_file_may_hold(tmp_path: Path) -> None:
    """One word, not too short; the message names the file and never what is in it."""
    file = tmp_path / "t"
    for held in (b"\xff" * 20, b"a b" * 10, b"a" * 15, b"\n\n", "ü".encode() * 20, b"a" * 5000 + b" b"):
        file.write_bytes(held)
        if held.startswith(b"a" * 16):
            continue
        with pytest.raises(TokenError) as caught:
            proof.read_token(str(file))
        assert str(file) in str(caught.value)
        assert "aaa" not in str(caught.value)
    file.write_bytes(b"abcDEF012-._~+/==\r\n")
    assert proof.read_token(str(file)) == b"abcDEF012-._~+/=="
    with pytest.raises(TokenError, match="Is a directory"):
        proof.read_token(str(tmp_path))


async def test_files_that_cannot_be_used_keep_it_from_starting(tmp_path: Path) -> None:
    """With the name of the setting, and nothing is listened to."""
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for admin, words in (
        (AdminSettings(token_file=str(tmp_path / "gone")), r"^admin\.token_file: .*gone: No such file"),
        (AdminSettings(token_file=str(bad)), r"^admin\.token_file: .*one word|at least 16"),
        (AdminSettings(cert_file=str(bad), key_file=str(bad)), r"^admin\.cert_file: .*bad\.pem"),
    ):
        with pytest.raises(SettingsError, match=words):
            async with served(World(), admin):
                pass


def test_check_names_the_files_of_admin_too(tmp_path: Path) -> None:
    """Beside all others that cannot be read."""
    with pytest.raises(SettingsError, match=r"^admin\.token_file: .*gone: No such file"):
        validate(load(None, {"TIDEGATE__ADMIN__TOKEN_FILE": str(tmp_path / "gone")}))
    noted = [*advice(load(None, {"TIDEGATE__SERVICE__CONSOLE": "0.0.0.0:10004"}))]
    assert any("nobody may read it without admin.token_file" in line for line in noted)


async def test_a_token_that_others_may_read_is_warned_of_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `check` does; it is used all the same."""
    admin = by_token(tmp_path)
    (tmp_path / "token").chmod(0o644)
    async with served(World(), admin) as (address, _), client(f"http://{address}", headers=PROOF) as http:
        assert (await http.post("/api/v1/drain")).status_code == 200
    assert "may be read by everybody" in caplog.text


def test_what_is_worth_saying(tmp_path: Path) -> None:
    """A token that everybody on the machine may read; a console that others reach, without proof or in the clear."""
    admin = by_token(tmp_path)
    assert [*proof.notes(admin, "127.0.0.1:1")] == [*proof.notes(admin, ":1")] == [*proof.notes(admin, "[::1]:1")] == []
    (tmp_path / "token").chmod(0o644)
    assert "may be read by everybody" in next(proof.notes(admin, "127.0.0.1:1"))
    (tmp_path / "token").chmod(0o640)
    assert "without admin.cert_file" in next(proof.notes(admin, "0.0.0.0:1"))
    assert "nobody may read it without admin.token_file" in next(proof.notes(AdminSettings(), "10.0.0.1:1"))
    assert [*proof.notes(AdminSettings(token_file="/gone"), "localhost:1")] == []


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def _secured(folder: Path, ca: trustme.CA, *, token: bool, clients: trustme.CA | None = None) -> AdminSettings:
    server = ca.issue_cert("127.0.0.1", "localhost")
    server.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "cert.pem").write_bytes(b"".join(part.bytes() for part in server.cert_chain_pems))
    (clients or ca).cert_pem.write_to_path(folder / "ca.pem")
    tls = {"cert_file": str(folder / "cert.pem"), "key_file": str(folder / "key.pem")}
    more = {"client_ca_file": str(folder / "ca.pem")} if clients else {}
    return by_token(folder, **tls, **more) if token else AdminSettings(**tls, **more)


def _trusting(ca: trustme.CA, mine: trustme.LeafCert | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    if mine is not None:
        mine.configure_cert(context)
    return context


async def test_a_certificate_proves_it_as_a_token_does(tmp_path: Path, ca: trustme.CA) -> None:
    """With both set either will do, and who acted is told by name; without either there is a clear answer."""
    world, people = World(), trustme.CA()
    mine = people.issue_cert("ops@example.com", common_name="ops", organization_name="Ops <b>")
    admin = _secured(tmp_path, ca, token=True, clients=people)
    async with served(world, admin) as (address, _):
        url = f"https://{address}"
        async with client(url, verify=_trusting(ca, mine)) as http:
            assert (await http.post("/api/v1/drain")).status_code == 200
        async with client(url, verify=_trusting(ca)) as http:
            assert (await http.get("/healthz")).text == "ok\n"
            assert (await http.post("/api/v1/drain")).status_code == 401
            assert (await http.post("/api/v1/drain", headers=PROOF)).status_code == 200
            page = (await http.get("/api/v1/audit")).json()["actions"]
        async with client(f"http://{address}") as http:
            with pytest.raises(httpx.TransportError):
                await http.get("/healthz")
    by_certificate, by_token_ = (what[0] for what in world.levers.done)
    assert by_certificate.startswith("O=Ops <b>,")
    assert by_certificate.endswith(",CN=ops")
    assert [entry["who"] for entry in page] == [by_token_, "", by_certificate]
    assert by_token_ == "token"


async def test_a_certificate_of_anybody_else_proves_nothing(tmp_path: Path, ca: trustme.CA) -> None:
    """It ends the handshake; and where no client CA is set none is asked for."""
    stranger = trustme.CA().issue_cert("ops@example.com")
    async with served(World(), _secured(tmp_path, ca, token=False, clients=trustme.CA())) as (address, _):
        async with client(f"https://{address}", verify=_trusting(ca, stranger)) as http:
            with pytest.raises(httpx.TransportError):
                await http.post("/api/v1/drain")
        async with client(f"https://{address}", verify=_trusting(ca)) as http:
            refused = await http.post("/api/v1/drain", headers=PROOF)
            assert (refused.status_code, refused.json()) == (401, {"error": "show a client certificate"})
    async with served(World(), _secured(tmp_path, ca, token=True)) as (address, _):
        http = client(f"https://{address}", verify=_trusting(ca, stranger))
        assert (await http.post("/api/v1/drain")).status_code == 401
        await http.aclose()


async def test_certificates_may_be_renewed_meanwhile(tmp_path: Path, ca: trustme.CA) -> None:
    """The next handshake has the new one; half of a renewal is not taken."""
    admin, another = _secured(tmp_path, ca, token=True), trustme.CA()

    async def answers(address: str, trusted: trustme.CA) -> bool:
        async with client(f"https://{address}", verify=_trusting(trusted)) as http:
            try:
                return (await http.get("/healthz")).status_code == 200
            except httpx.TransportError:
                return False

    async with served(World(), admin) as (address, _):
        assert await answers(address, ca)
        key = (tmp_path / "key.pem").read_bytes()
        (tmp_path / "key.pem").write_text("half of it")
        assert await answers(address, ca)
        (tmp_path / "key.pem").write_bytes(key)
        _secured(tmp_path, another, token=True)
        assert await answers(address, another)
        assert not await answers(address, ca)


@pytest.mark.parametrize("where", ["host", "origin", "sec-fetch-site"])
async def test_no_other_sites_page_reads_or_acts(tmp_path: Path, where: str) -> None:
    """Whoever's token it has. Elsewhere than on loopback any name may stand for the console, for reads need a proof."""
    bad = {"host": "evil.example", "origin": "https://evil.example", "sec-fetch-site": "cross-site"}[where]
    world = World()
    async with served(world, by_token(tmp_path)) as (address, _), client(f"http://{address}") as http:
        for path in (*READS, "/metrics"):
            assert (await http.get(path, headers={**PROOF, where: bad})).status_code == 403, path
        for method, path in ACTIONS:
            body = BODIES.get(path, {})
            assert (await http.request(method, path, json=body, headers={**PROOF, where: bad})).status_code == 403
        assert (await http.get("/healthz", headers={where: bad})).status_code == 200
        assert (await http.options("/api/v1/drain", headers={"origin": "https://evil.example"})).status_code == 405
        assert "access-control-allow-origin" not in (await http.get("/state", headers={where: bad})).headers
    assert world.levers.done == []
    async with served(world, by_token(tmp_path), "0.0.0.0") as (address, _), client(f"http://{address}") as http:
        status = (await http.get("/state", headers={**PROOF, where: bad})).status_code
        assert status == (200 if where == "host" else 403)


async def test_who_watches_with_a_token_that_holds_no_more_is_let_go(tmp_path: Path) -> None:
    """Within a moment."""
    async with served(World(), by_token(tmp_path), "0.0.0.0") as (address, _), client(f"http://{address}") as http:
        watched = await http.send(http.build_request("GET", "/api/v1/stream", headers=PROOF), stream=True)
        async with asyncio.timeout(120):
            lines = [line async for line in _first_then(watched, tmp_path / "token")]
        assert any(line.startswith("data:") for line in lines)
        await watched.aclose()


async def _first_then(watched: httpx.Response, token: Path) -> AsyncIterator[str]:
    """All lines, until the server ends it; the token is another one after the first."""
    async for line in watched.aiter_lines():
        token.write_text("another-token-that-is-long-enough")  # noqa: ASYNC240 - a few bytes
        yield line


@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
async def test_what_is_no_file_is_not_waited_for(put: Callable[[Path], None], tmp_path: Path) -> None:
    """A pipe, a folder or a device in the token's place while it runs: whoever asks is told, until it is a file again.

    It does not start with one either.
    """
    admin, token, kept = by_token(tmp_path), tmp_path / "token", tmp_path / "kept"
    async with served(World(), admin) as (address, _), client(f"http://{address}") as http, asyncio.timeout(60):
        for moved in (lambda: (token.rename(kept), put(token)), lambda: (token.rename(tmp_path / "aside"),)):
            moved()
            refused = await http.post("/api/v1/drain", headers=PROOF)
            assert refused.status_code == 403
            assert f"{token} is not a file" in refused.text or not await asyncio.to_thread(token.exists)
        await asyncio.to_thread(kept.rename, token)
        assert (await http.post("/api/v1/drain", headers=PROOF)).status_code == 200
    await asyncio.to_thread(token.unlink)
    put(token)
    assert [*proof.problems(admin)] == [f"admin.token_file: {token} is not a file"]


async def test_whose_ca_counts_no_more_may_not_act(tmp_path: Path, ca: trustme.CA) -> None:
    """Neither on the connection that there is, nor on a new one by a session of before."""
    world, former, latter = World(), trustme.CA(), trustme.CA()
    admin = _secured(tmp_path, ca, token=False, clients=former)
    context = _trusting(ca, former.issue_cert("ops@example.com"))
    with beside(world, admin) as url:
        host, port = url.removeprefix("http://").split(":")

        def ask(session: ssl.SSLSession | None = None) -> tuple[bytes, ssl.SSLSession | None]:
            plain = socket.create_connection((host, int(port)), 30)
            with context.wrap_socket(plain, server_hostname=host, session=session) as secured:
                secured.sendall(b"POST /api/v1/drain HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                got = b"".join(iter(lambda: secured.recv(65536), b""))
                return got.split(b"\r\n")[0], secured.session

        async with client(f"https://{host}:{port}", verify=context) as http:
            assert (await http.post("/api/v1/drain")).status_code == 200
            good, session = await asyncio.to_thread(ask)
            assert good == b"HTTP/1.1 200 OK"
            latter.cert_pem.write_to_path(tmp_path / "ca.pem")
            refused = await http.post("/api/v1/drain")
            assert (refused.status_code, refused.headers["connection"]) == (401, "close")
            with suppress(OSError):  # it may be cut off
                assert (await asyncio.to_thread(ask, session))[0] == b""
        assert len(world.levers.done) == 2
        async with client(f"https://{host}:{port}", verify=_trusting(ca, latter.issue_cert("ops@example.com"))) as http:
            assert (await http.post("/api/v1/drain")).status_code == 200
