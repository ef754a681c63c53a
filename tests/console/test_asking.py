"""What a command says, and ends with, when a console does not answer as it should: what may have been done is told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import trustme
from typer.testing import CliRunner, Result

from extproc.cli import app
from extproc.console import asking
from extproc.console.asking import Access, AwayError, ConsoleError, UnknownError, ask
from tests.console.world import TOKEN, World, beside, by_token

Serving = Callable[[socket.socket, threading.Event], None]

MAYBE = "it may have been done all the same; see `tidegate admin audit`"


def whole(connection: socket.socket) -> None:
    """Hear a request to its end: what stands in the body comes by itself."""
    heard = b""
    while b"\r\n\r\n" not in heard:
        heard += connection.recv(65_536) or b"\r\n\r\n"
    head, _, body = heard.lower().partition(b"\r\n\r\n")
    left = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0) - len(body)
    while left > 0 and (more := connection.recv(65_536)):
        left -= len(more)


@contextmanager
def somebody(serve: Serving) -> Iterator[str]:
    """host:port of who hears a whole request, and does with the connection what it likes until it is over."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def listen() -> None:
            while not over.is_set():
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    whole(connection)
                    serve(connection, over)

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            over.set()
            listening.shutdown(socket.SHUT_RDWR)
    thread.join(30)


def says(answer: bytes) -> Serving:
    """Somebody who says this to everything, and leaves."""
    return lambda connection, _: connection.sendall(answer)


def silent(_: socket.socket, over: threading.Event) -> None:
    over.wait(60)


def leaves(_: socket.socket, __: threading.Event) -> None:
    """Without a word."""


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["admin", *words], env={"TIDEGATE_TOKEN": TOKEN})


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where no config is."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def serve(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Serving:
    """Who is silent is not waited for as long as others may take."""
    if request.param is silent:
        monkeypatch.setattr(asking, "READ_S", 0.5)
        monkeypatch.setattr(asking, "ACT_S", 0.75)
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("serve", "why"),
    [
        (silent, "did not answer within 0.75 s"),
        (leaves, "broke off before it answered"),
        (says(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"), "broke off before it answered"),
        (says(b"HTTP/1.1 504 Late\r\ncontent-length: 0\r\n\r\n"), "the console answered 504"),
        (says(b'HTTP/1.1 500 Oh\r\ncontent-length: 16\r\n\r\n{"error":"half"}'), "half"),
        (says(b"HTTP/1.1 500 Oh\r\ncontent-length: 100\r\n\r\n{"), "the console answered 500"),
    ],
    indirect=["serve"],
)
def test_what_may_have_been_done_is_told_as_that(serve: Serving, why: str) -> None:
    """The request had reached somebody: that it came to nothing nobody knows."""
    with somebody(serve) as place:
        told = run("drain", "--console", place)
    assert (told.exit_code, told.stdout) == (4, "")
    assert why in told.stderr
    assert MAYBE in told.stderr
    assert len(told.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("serve", "why"),
    [
        (silent, "within 0.5 s"),
        (leaves, "no Tidegate answers"),
        (says(b"SSH-2.0-OpenSSH_9.6\r\n"), "no Tidegate answers"),
        (says(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"), "no Tidegate answers"),
    ],
    indirect=["serve"],
)
def test_looking_does_nothing(serve: Serving, why: str) -> None:
    """So nothing can have been done."""
    with somebody(serve) as place:
        told = run("show", "--console", place)
    assert (told.exit_code, told.stdout) == (3, "")
    assert why in told.stderr
    assert MAYBE not in told.stderr


def test_where_nobody_is_nothing_was_done() -> None:
    """Nor where somebody is who is no Tidegate, nor at an address that is none."""
    for place in ("127.0.0.1:1", "https://127.0.0.1:1", "127.0.0.1:x", "nowhere.invalid:1"):
        told = run("drain", "--console", place)
        assert (told.exit_code, MAYBE in told.stderr) == (3, False), told.stderr
        assert told.stderr.startswith(f"no Tidegate answers at {place.removeprefix('https://')}")
    for answer in (b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"):
        with somebody(says(answer)) as place:
            assert run("drain", "--console", place).exit_code == 3


def test_a_refusal_is_no_riddle(tmp_path: Path) -> None:
    """What the console did not do it says; 503 is that nothing could be written down."""
    with beside(World(), by_token(tmp_path)) as url:
        assert run("drain", "--console", url).exit_code == 0
        assert run("pause", "P9", "--console", url).exit_code == 1
        assert run("drain", "--console", url, "--token-file", str(tmp_path / "none")).exit_code == 1
    with somebody(says(b'HTTP/1.1 503 No\r\ncontent-length: 16\r\n\r\n{"error":"full"}')) as place:
        told = run("drain", "--console", place)
    assert (told.exit_code, told.stderr) == (1, "full\n")
    assert run("drain", "--for", "soon").exit_code == 2


def test_whose_certificate_is_asked_for_late_did_nothing(tmp_path: Path) -> None:
    """TLS 1.3 refuses a client only after its request was sent; if the refusal itself is lost, that is a doubt."""
    ca = trustme.CA()
    own = ca.issue_cert("localhost")
    files = {"cert_file": str(tmp_path / "own.pem"), "key_file": str(tmp_path / "own.key")}
    Path(files["cert_file"]).write_bytes(b"".join(part.bytes() for part in own.cert_chain_pems))
    own.private_key_pem.write_to_path(files["key_file"])
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    stranger = trustme.CA().issue_cert("stranger")
    stranger.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "stranger.pem"))
    world = World()
    with beside(world, by_token(tmp_path, **files, client_ca_file=str(tmp_path / "ca.pem"))) as url:
        place = url.replace("http://127.0.0.1", "localhost")
        shown = Access(place, TOKEN, tls=True, ca_file=str(tmp_path / "ca.pem"),
                       client_cert_file=str(tmp_path / "stranger.pem"))  # fmt: skip
        with pytest.raises(ConsoleError) as caught:
            ask(shown, "POST", "/api/v1/drain", {})
    assert type(caught.value) in (AwayError, UnknownError)
    assert world.levers.done == []


def test_acting_has_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What takes longer than looking may is done, and told."""
    assert asking.ACT_S > asking.READ_S
    monkeypatch.setattr(asking, "ACT_S", 60.0)
    world = World()
    world.levers.takes_s = 0.5
    with beside(world, by_token(tmp_path)) as url, patch.object(asking, "READ_S", 0.01):
        told = run("drain", "--console", url)
    assert (told.exit_code, told.stderr) == (0, "")
    assert "draining" in told.stdout


def test_the_codes_are_told() -> None:
    """Where somebody looks who writes a script."""
    told = " ".join(run("--help").stdout.split())
    for words in (
        "0 when it is done",
        "1 when it was refused",
        "3 when no Tidegate answers",
        "4 when it may have been",
    ):
        assert words in told
