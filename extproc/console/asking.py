"""How the command line asks the console of a running Tidegate."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

from extproc.console.proof import TokenError, on_loopback, read_token
from extproc.settings import Settings

__all__ = ["Access", "AwayError", "ConsoleError", "UnknownError", "access", "ask", "fetch", "quoted"]

READ_S, ACT_S = 5.0, 30.0
"""So long an answer is waited for: to who looks, and to who acts, which may mean that many others have to go first."""
TOKEN_VARIABLE = "TIDEGATE_TOKEN"  # noqa: S105 - the name of a variable
MAYBE = "it may have been done all the same; see `tidegate admin audit`, and `tidegate admin show` for what is moved"
MADE = "run/admin.token"
"""Where `tidegate up` leaves a token, seen from where it was started, if its config names none."""


class ConsoleError(Exception):
    """Why the console of a running Tidegate did not do what was asked, in words for who asked.

    code: what a command ends with for it.
    """

    code = 1


class AwayError(ConsoleError):
    """There is no Tidegate, or it does not answer; nothing was done."""

    code = 3


class UnknownError(ConsoleError):
    """What was asked for may have been done, or not, or in part: nobody told."""

    code = 4


@dataclass(frozen=True, slots=True)
class Access:
    """Where a console is, and what proves who asks. why_no_token: why there is none, for whom it is missing.

    pinned: the one certificate that the console may have; ca_file: whose certificates are trusted, else the system's.
    """

    console: str
    token: str = ""
    why_no_token: str = ""
    tls: bool = False
    pinned: str | None = None
    ca_file: str | None = None
    client_cert_file: str | None = None
    client_key_file: str | None = None

    @property
    def url(self) -> str:
        """Without a slash at the end."""
        place = self.console
        place = f"127.0.0.1{place}" if place.startswith(":") else place
        host, _, port = place.rpartition(":")
        if host in ("0.0.0.0", "[::]"):
            place = f"127.0.0.1:{port}" if host == "0.0.0.0" else f"[::1]:{port}"
        return f"{'https' if self.tls else 'http'}://{place}"


def access(
    settings: Settings,
    *,
    console: str | None = None,
    token_file: str | None = None,
    ca_file: str | None = None,
    client_cert_file: str | None = None,
    client_key_file: str | None = None,
) -> Access:
    """How to reach the console of these settings, or of `console` (host:port or a URL).

    The token is that of `token_file`, or TIDEGATE_TOKEN, or the one that the settings name, in this order; where they
    name none, the one that `tidegate up` has made here, if the console is on this machine.
    ConsoleError where a file that was named here cannot be used.
    """
    admin = settings.admin
    place, tls = settings.service.console, admin.cert_file is not None
    if console is not None:
        scheme, _, rest = console.rpartition("://")
        place, tls = rest.rstrip("/"), scheme == "https" or (not scheme and tls)
    made = MADE if on_loopback(place) and Path(MADE).is_file() else None
    token, why = _token(token_file, admin.token_file or made)
    own = console is None or on_loopback(place)
    pinned = admin.cert_file if tls and own and ca_file is None else None
    return Access(place, token, why, tls, pinned, ca_file, client_cert_file, client_key_file)


def _token(named: str | None, set_: str | None) -> tuple[str, str]:
    if named is not None:
        try:
            return read_token(named).decode(), ""
        except TokenError as error:
            raise ConsoleError(str(error)) from None
    if token := os.environ.get(TOKEN_VARIABLE, "").strip():
        if not token.isascii() or not token.isprintable():
            raise ConsoleError(f"{TOKEN_VARIABLE}: is no token")
        return token, ""
    if set_ is None:
        return "", f"give --token-file or {TOKEN_VARIABLE}"
    try:
        return read_token(set_).decode(), ""
    except TokenError as error:
        return "", str(error)


def quoted(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="")


def ask(
    access: Access, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
) -> Any:
    """What the console answers, as plain data. ConsoleError tells why not, and what is known of what was to be done."""
    answer = fetch(access, method, path, body, timeout_s)
    try:
        return json.loads(answer)
    except ValueError as error:
        raise AwayError(f"no Tidegate answers at {access.console}: {error}") from None


def fetch(
    access: Access, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
) -> bytes:
    """The same as it came. timeout_s: see READ_S where there is none."""
    headers = {"content-type": "application/json"} if body is not None else {}
    if access.token:
        headers["authorization"] = f"Bearer {access.token}"
    data = json.dumps(body).encode() if body is not None else None
    request = Request(access.url + path, data, headers, method=method)  # noqa: S310 - http or https
    patience_s = timeout_s or (READ_S if method == "GET" else ACT_S)
    try:
        with _opener(access).open(request, timeout=patience_s) as response:
            return bytes(response.read())
    except HTTPError as error:
        raise _refused(error, access, method) from None
    except (URLError, OSError, HTTPException, ValueError) as error:
        if method != "GET" and _was_sent(error):
            raise UnknownError(f"{access.console} {_silence(error, patience_s)}: {MAYBE}") from None
        raise AwayError(_away(error, access, patience_s)) from None


def _was_sent(error: Exception) -> bool:
    """Whether a whole request may have reached somebody who did not answer it.

    What fails before that is told as URLError, or is a fault of ours; who answers something else than HTTP is no
    Tidegate; and an alert of TLS, which may come late, says that nobody was let in.
    """
    if isinstance(error, ssl.SSLError):
        return isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    return isinstance(error, OSError | IncompleteRead) and not isinstance(error, URLError)


def _silence(error: Exception, patience_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"did not answer within {patience_s:g} s"
    return f"broke off before it answered ({str(error).rstrip('.') or type(error).__name__})"


def _away(error: Exception, access: Access, patience_s: float) -> str:
    reason = getattr(error, "reason", None) or error
    if isinstance(reason, TimeoutError):
        return f"no Tidegate answers at {access.console} within {patience_s:g} s"
    unknown = isinstance(reason, ssl.SSLCertVerificationError) and access.ca_file is None
    help_ = " (--ca-file says whose certificates to trust)" if unknown else ""
    return f"no Tidegate answers at {access.console}: {reason}{help_}"


def _opener(access: Access) -> OpenerDirector:
    """Through no proxy; over TLS where the console speaks it. ConsoleError where a file of it cannot be used."""
    if not access.tls:
        return build_opener(ProxyHandler({}))
    if access.pinned is not None and Path(access.pinned).is_file():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # there is no other certificate that it could be
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(access.pinned)
    else:
        with _named(access.ca_file):
            context = ssl.create_default_context(cafile=access.ca_file)
    if access.client_cert_file is not None:
        with _named(access.client_cert_file, access.client_key_file):
            context.load_cert_chain(access.client_cert_file, access.client_key_file)
    return build_opener(ProxyHandler({}), HTTPSHandler(context=context))


@contextmanager
def _named(*files: str | None) -> Iterator[None]:
    """Says which of our own files it is that cannot be used, rather than that nobody answers."""
    try:
        yield
    except OSError as error:
        raise ConsoleError(f"{', '.join(filter(None, files))}: {error.strerror or error}") from None


def _refused(error: HTTPError, access: Access, method: str) -> ConsoleError:
    """An answer that is no good one. What failed in the middle may have been done in part."""
    said = _said(error, access)
    if method != "GET" and error.code >= 500 and error.code != 503:  # noqa: PLR2004 - HTTP
        return UnknownError(f"{said}: {MAYBE}")
    return ConsoleError(said)


def _said(error: HTTPError, access: Access) -> str:
    try:
        said = str(json.loads(error.read())["error"])
    except (ValueError, KeyError, TypeError, OSError, HTTPException):
        return f"the console answered {error.code}"
    missing = error.code == 401 and not access.token and access.why_no_token  # noqa: PLR2004
    return f"{said} ({access.why_no_token})" if missing else said
