"""Who may act, and who may read: by a bearer token from a file, or by a certificate of a CA that is trusted for it.

The token's file is looked at with every request, so a new token holds at once and a file that is taken away lets nobody
in any more. Tokens are compared in constant time, and neither they nor what was sent in their place is ever repeated.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path

from extproc.settings import AdminSettings
from extproc.settings.files import Mark, mark_of

__all__ = ["NOBODY", "Proof", "TokenError", "notes", "on_loopback", "problems", "read_token"]

SHORTEST = 16
MOST_BYTES = 4096
TOKEN = re.compile(rb"[A-Za-z0-9._~+/-]+=*")
NOBODY = (
    "nobody may do this here: set admin.token_file, or admin.client_ca_file with cert_file and key_file, "
    "and start Tidegate again"
)


class TokenError(Exception):
    """A file that holds no token to go by. The message says which and why."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why somebody is not let in. status: 401 where the right proof would do, 403 where there is none."""

    status: int
    why: str


class Proof:
    """See the head of this file."""

    def __init__(self, admin: AdminSettings) -> None:
        """Reads nothing yet. `problems` tells whether what is there can be used."""
        self._file = None if admin.token_file is None else Path(admin.token_file)
        self._certificates = admin.client_ca_file is not None
        self._seen: Mark = None
        self._token = b""
        self._why = ""

    def of(self, authorization: str | None, certificate: str | None) -> str | Refusal:
        """Who this is, or why it is nobody.

        authorization: that header. certificate: the subject of a client's certificate that was verified.
        """
        if certificate is not None and self._certificates:
            return certificate
        if self._file is None:
            return Refusal(401, "show a client certificate") if self._certificates else Refusal(403, NOBODY)
        scheme, _, given = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not given:
            return Refusal(401, "send the token that admin.token_file holds: Authorization: Bearer ...")
        self._look(self._file)
        if self._why:
            return Refusal(403, self._why)
        right = compare_digest(given.strip().encode("utf-8", "replace"), self._token)
        return "token" if right else Refusal(401, "that is not the token")

    def _look(self, file: Path) -> None:
        mark = mark_of(file)
        if mark == self._seen and mark is not None:
            return
        self._seen, self._token, self._why = mark, b"", ""
        try:
            self._token = _kept_token(str(file))
        except TokenError as error:
            self._why = f"admin.token_file: {error}"


def read_token(path: str) -> bytes:
    """The token that a file holds, white space around it not counted. TokenError."""
    try:
        with Path(path).open("rb") as file:
            held = file.read(MOST_BYTES).strip()
    except OSError as error:
        raise TokenError(f"{path}: {error.strerror}") from None
    if not held:
        raise TokenError(f"{path} is empty")
    if len(held) < SHORTEST:
        raise TokenError(f"{path}: a token has at least {SHORTEST} characters, as `openssl rand -hex 32` makes it")
    if not TOKEN.fullmatch(held):
        raise TokenError(f"{path}: a token is one word of letters, digits and - . _ ~ + /")
    return held


def _kept_token(path: str) -> bytes:
    """That of a file which is read again and again; what has no end, or comes when it likes, is not waited for."""
    if Path(path).exists() and not Path(path).is_file():
        raise TokenError(f"{path} is not a file")
    return read_token(path)


def problems(admin: AdminSettings) -> Iterator[str]:
    """What keeps these settings from being used; a line each, path first."""
    if admin.token_file is not None:
        try:
            _kept_token(admin.token_file)
        except TokenError as error:
            yield f"admin.token_file: {error}"
    if admin.cert_file is not None and admin.key_file is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(admin.cert_file, admin.key_file)
        except (OSError, ValueError) as error:
            yield f"admin.cert_file: {admin.cert_file}, {admin.key_file}: {error}"
        if admin.client_ca_file is not None:
            try:
                context.load_verify_locations(admin.client_ca_file)
            except (OSError, ValueError) as error:
                yield f"admin.client_ca_file: {admin.client_ca_file}: {error}"


def notes(admin: AdminSettings, console: str) -> Iterator[str]:
    """What is worth saying though it is no mistake. console: host:port that it listens on."""
    for key in ("token_file", "key_file"):
        path = getattr(admin, key)
        try:
            if path is not None and Path(path).stat().st_mode & 0o007:
                yield f"admin.{key}: {path} may be read by everybody on this machine; chmod it to 0600"
        except OSError:
            continue
    if on_loopback(console):
        return
    if admin.token_file is None and admin.client_ca_file is None:
        yield f"service.console: {console} can be reached from outside, and nobody may read it without admin.token_file"
    elif admin.cert_file is None:
        yield f"service.console: {console} can be reached from outside; without admin.cert_file tokens go in the clear"


def on_loopback(console: str) -> bool:
    """Whether nobody from outside reaches host:port. Where it names no host, it is."""
    host = console.rpartition(":")[0].strip("[]")
    try:
        return host in ("", "localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
