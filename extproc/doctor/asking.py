"""One HTTP/1.1 request on a connection of its own, and when each piece of its answer came."""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Answer", "BadUrl", "Gateway", "NoAnswer", "number", "printable"]

PIECE = 65_536
MOST_KEPT = 4 * 1024 * 1024
"""Bytes of an answer that are kept; no check asks for more than a few thousand."""


_NUMBER = re.compile(r"[0-9]{1,15}")
_VERSION = "/v1"


class BadUrl(Exception):  # noqa: N818 - what it is
    """This cannot be asked at all: the URL, a header, or the CA's file is not one."""


class NoAnswer(Exception):  # noqa: N818 - what it is
    """No whole answer came; the message says what came instead, and after how long."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. seconds: from the request's first byte to the answer's last. arrivals: for each piece of the
    body, the seconds since the request was sent. connect_s: how long it took to connect, about one round trip.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float = 0.0
    arrivals: tuple[float, ...] = ()
    connect_s: float = 0.0

    @property
    def reason(self) -> str:
        """Why Tidegate, or Envoy in its words, refused; empty where neither did."""
        return self.headers.get("x-tidegate-reason", "")

    @property
    def data(self) -> dict[str, Any]:
        """The body as a JSON object, empty where it is none."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def message(self) -> str:
        """What its error says to people, in either dialect; else the beginning of its body."""
        error = self.data.get("error")
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return str(error["message"])
        return self.body[:200].decode("utf-8", "replace").strip()


@dataclass(frozen=True)
class Gateway:
    """Where to ask, and as whom. timeout_s: for each answer. headers: sent with every request, after the key's."""

    url: str
    key: str | None = None
    timeout_s: float = 60.0
    headers: Mapping[str, str] = field(default_factory=dict)
    ca_file: str | None = None

    def __post_init__(self) -> None:
        """BadUrl where it is none, or the CA's file cannot be read."""
        like = f"{self.url!r} is no URL of a gateway; it has to be like http://gateway:10000"
        if not _is_url(self.url):
            raise BadUrl(like)
        if urlsplit(self.url).path.rstrip("/").endswith(_VERSION):
            raise BadUrl(f"{like}, without {_VERSION}, with which every path begins that is asked for")
        try:
            self._connection().close()
        except HTTPException:
            raise BadUrl(like) from None
        except OSError as error:
            raise BadUrl(f"{self.ca_file}: {error}") from None

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """Ask once; underscores in names of `headers` stand for dashes. NoAnswer where no whole answer came."""
        connection, began = self._connection(), time.monotonic()
        try:
            connection.connect()
            connect_s, began = time.monotonic() - began, time.monotonic()
            with _ended_after(self.timeout_s, connection.sock):
                self._send(connection, method, path, body, headers)
                return self._read(connection.getresponse(), began, connect_s)
        except (OSError, HTTPException) as error:
            what = printable(str(error)) or type(error).__name__
            if isinstance(error, ssl.SSLCertVerificationError):
                what += "; a CA of your own is named with --ca-file"
            raise NoAnswer(f"no whole answer, after {time.monotonic() - began:.1f} s: {what}") from error
        finally:
            connection.close()

    def _connection(self) -> HTTPConnection:
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        if parts.scheme == "http":
            return HTTPConnection(host, parts.port, timeout=self.timeout_s)
        trusted = ssl.create_default_context(cafile=self.ca_file)
        return HTTPSConnection(host, parts.port, timeout=self.timeout_s, context=trusted)

    def _send(
        self, connection: HTTPConnection, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        connection.putrequest(method, urlsplit(self.url).path.rstrip("/") + path)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {"user-agent": "tidegate-doctor", **self._key(path), **self.headers, **named}
        if body:
            sent |= {"content-type": "application/json", "content-length": str(len(body))}
        try:
            for name, value in sent.items():
                connection.putheader(name, value)
        except ValueError as error:
            raise BadUrl(f"the key, or a header, cannot be sent: {error}") from None
        connection.endheaders()
        with suppress(ConnectionError):  # who refuses a large body need not read it, and its answer tells why
            connection.send(body)

    def _key(self, path: str) -> dict[str, str]:
        if path.startswith("/v1/messages"):
            return {"anthropic-version": "2023-06-01", **({"x-api-key": self.key} if self.key else {})}
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def _read(self, response: HTTPResponse, began: float, connect_s: float) -> Answer:
        pieces, arrivals, kept = [], [], 0
        while piece := response.read1(PIECE):
            arrivals.append(time.monotonic() - began)
            kept += len(piece)
            pieces.append(piece)
            if arrivals[-1] > self.timeout_s or kept > MOST_KEPT:
                raise NoAnswer(f"an answer without end, {kept} bytes within {arrivals[-1]:.1f} s")
        headers = {name.lower(): value for name, value in response.getheaders()}
        body, seconds = b"".join(pieces), time.monotonic() - began
        if len(body) < (number(headers.get("content-length", "")) or 0):
            raise NoAnswer(f"an answer that was cut, after {seconds:.1f} s")
        return Answer(response.status, headers, body, seconds, tuple(arrivals), connect_s)


def number(text: str) -> int | None:
    """A count as headers write it; None where it is none that could be meant."""
    return int(text) if _NUMBER.fullmatch(text) else None


def printable(text: str) -> str:
    """Without what would not be shown but obeyed by a terminal: answers are written by anybody."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def _is_url(url: str) -> bool:
    """Whether all of it can be used: nobody is told of what comes behind a path, or of a name before the host."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        known = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        return False
    behind = parts.netloc.rpartition("]")[2] if "[" in parts.netloc else ""
    spare = parts.query or parts.fragment or "@" in parts.netloc or not (behind or ":").startswith(":")
    return bool(known and host and not spare and url.isascii() and url.isprintable() and " " not in url)


@contextmanager
def _ended_after(seconds: float, connection: socket.socket) -> Iterator[None]:
    """Break a connection that takes longer; TimeoutError then. A peer that sends a little now and then is never slow
    for a single read.
    """
    late = threading.Event()

    def end() -> None:
        late.set()
        with suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # TLS is not told, which its reader may be busy with

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, HTTPException, NoAnswer):
        if not late.is_set():
            raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError("timed out")
