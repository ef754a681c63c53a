"""The doctor asks whoever is there: servers that lie, hang, or write what is meant for a terminal; and wrong URLs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO

import pytest
from rich.console import Console

from extproc.doctor import command
from extproc.doctor.asking import BadUrl, Gateway, NoAnswer
from extproc.doctor.visit import Result, Verdict, Visit

Serve = Callable[[socket.socket, threading.Event], None]


@contextmanager
def liar(serve: Serve, host: str = "127.0.0.1") -> Iterator[str]:
    """A server that does this with every connection, once it was asked something; the event is set at the end."""
    over = threading.Event()

    def one(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65_536)
            serve(connection, over)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65_536):
                pass  # to close before all was read would take the answer away from who has not read it yet

    def all_of_them(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection = listener.accept()[0]
                threading.Thread(target=one, args=(connection,), daemon=True).start()

    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        accepting = threading.Thread(target=all_of_them, args=(listener,), daemon=True)
        accepting.start()
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join(5)


def says(status: int, body: bytes, *headers: bytes) -> Serve:
    """The same whole answer to everything."""
    head = [b"HTTP/1.1 %d x" % status, *headers, b"content-length: %d" % len(body)]
    return lambda connection, _: connection.sendall(b"\r\n".join(head) + b"\r\n\r\n" + body)


def for_ever(first: bytes, piece: bytes) -> Serve:
    """It begins well, and goes on with this, a little at a time."""

    def serve(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(first)
        while not over.wait(0.1):
            connection.sendall(piece)

    return serve


ENDLESS = {
    "silence": for_ever(b"", b""),
    "continue": for_ever(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "headers": for_ever(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"),
    "half a line": for_ever(b"HTTP/1.1 ", b"2"),
    "a body": for_ever(b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n", b"x"),
    "chunks": for_ever(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_whoever_sends_a_little_now_and_then_is_not_listened_to_for_ever(name: str) -> None:
    """The time is for the whole answer, not for each of its bytes."""
    ended = threading.Event()
    found: list[str] = []

    def ask(url: str) -> None:
        with pytest.raises(NoAnswer) as error:
            Gateway(url, timeout_s=0.5).ask("GET", "/v1/models")
        found.append(str(error.value))
        ended.set()

    with liar(ENDLESS[name]) as url:
        threading.Thread(target=ask, args=(url,), daemon=True).start()
        assert ended.wait(60)
    assert "timed out" in found[0] or "without end" in found[0]


def seen(serve: Serve) -> dict[str, Result]:
    """What all checks find there."""
    with liar(serve) as url:
        results = command.examine(Visit(Gateway(url, timeout_s=30)))
    return {check.name: result for check, result in zip(command.CHECKS, results, strict=True)}


@pytest.mark.parametrize(
    ("serve", "word"),
    [
        (says(200, b"<html>Welcome to nginx!</html>", b"server: nginx", b"content-type: text/html"), "by nginx"),
        (says(405, b"<html>", b"server: nginx/1.2"), "by nginx/1.2"),
        (says(200, b"", b"content-length: \xb2"), "something else answered"),
        (says(200, b"\x1f\x8b\x08\x00", b"content-encoding: gzip"), "something else answered"),
    ],
)
def test_another_server_is_no_tidegate(serve: Serve, word: str) -> None:
    """And no check after it asks a model."""
    results = seen(serve)
    assert results["in the path"].verdict is Verdict.WRONG
    assert word in results["in the path"].why
    assert all(results[name].verdict is Verdict.NOT_TOLD for name in ("refuses", "holds", "streams"))


def test_where_a_redirect_leads_is_told() -> None:
    """It is not followed: a key would go along."""
    first = seen(says(301, b"", b"location: https://gateway.example/"))["in the path"]
    assert first.verdict is Verdict.WRONG
    assert "https://gateway.example/" in first.change


@pytest.mark.parametrize("status", [401, 403])
def test_a_caller_who_is_not_let_in_is_to_be_named(status: int) -> None:
    """What authenticates stands before Tidegate: that alone says nothing against the place of ext_proc."""
    first = seen(says(status, b"Jwt is missing", b"server: envoy"))["in the path"]
    assert first.verdict is Verdict.WRONG
    assert first.change.startswith("who stands before Tidegate refused this caller")
    assert "--header" in first.change


@pytest.mark.parametrize("count", [b"9" * 40, b"9" * 5000])
def test_numbers_without_sense_are_no_numbers(count: bytes) -> None:
    """A question is not answered by them."""
    body = b'{"error": {"reason": "bad_request", "message": "doctor: %b bytes read, hold of 0 ms"}}' % count
    results = seen(says(400, body, b"x-tidegate-reason: bad_request"))
    assert results["reads 1 MB"].verdict is Verdict.NOT_TOLD


def test_what_is_shown_cannot_command_the_terminal() -> None:
    """Whatever headers and bodies hold; a model with such a name is not asked for."""
    body = rb'{"error": {"message": "\u001b[2J\u009b2J\u0007doctor"}, "data": [{"id": "\u001b[2J"}, {"id": "ok"}]}'
    text = StringIO()
    with liar(says(400, body, b"x-tidegate-reason: bad\x1b[31m", b"server: e\x1b[2Jvil\x9b2J")) as url:
        command.run(Visit(Gateway(url, timeout_s=30)), Console(file=text, width=100))
    shown = text.getvalue()
    assert "bad" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_nor_can_what_is_no_answer_at_all() -> None:
    """The message quotes it."""
    with liar(lambda connection, _: connection.sendall(b"\x1b[2Jand\x07more\r\n\r\n")) as url:
        gateway = Gateway(url, timeout_s=30)
        with pytest.raises(NoAnswer, match="and more") as error:
            gateway.ask("GET", "/v1/models")
    assert str(error.value).isprintable()


def test_a_gateway_may_have_an_address_of_version_six() -> None:
    """In brackets, as URLs have it."""
    with liar(says(204, b""), "::1") as url:
        assert Gateway(url, timeout_s=30).ask("GET", "/v1/models").status == 204


@pytest.mark.parametrize(
    "url",
    [
        "http://" + "a" * 70 + ".example", "http://.", "http://exa mple", "http://a\u202e", "http://gateway/\u00fc",
        "http://gateway/?team=a", "http://gateway/#a", "http://user:secret@gateway", "http://[::1]x", "http://[]",
        "http://gateway:0", "http://gateway:-1", "http://gateway:x", "//gateway", "",
    ],
)  # fmt: skip
def test_what_is_no_url_is_told_before_anything_is_asked(url: str) -> None:
    """With what one looks like."""
    with pytest.raises(BadUrl, match="http://gateway:10000"):
        Gateway(url)


@pytest.mark.parametrize("url", ["http://gateway:10000/v1", "https://gateway/llm/v1/"])
def test_the_base_url_of_an_sdk_has_too_much(url: str) -> None:
    """Every path would have it twice."""
    with pytest.raises(BadUrl, match="without /v1"):
        Gateway(url)


@pytest.mark.parametrize("url", ["http://my_gateway", "HTTP://gateway/", "http://[fe80::1]:10000", "https://a.b/llm"])
def test_what_is_a_url_is_one(url: str) -> None:
    """Names of containers, capitals, addresses in brackets, prefixes."""
    assert Gateway(url).url == url
