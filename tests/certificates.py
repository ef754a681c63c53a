"""Certificates made when a test runs: an authority, what it issues, and files of them, replaced as Kubernetes does it.

In `Mounted`: `ca.pem`, `server.pem`, `server.key`, `client.pem`, `client.key`, each behind a link that is swapped.
"""

from __future__ import annotations

import itertools
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

__all__ = ["Mounted", "soon", "tls_of", "write"]


def write(cert: trustme.LeafCert, folder: Path, name: str) -> tuple[str, str]:
    """Chain and key as files: their paths."""
    chain, key = folder / f"{name}.pem", folder / f"{name}.key"
    chain.write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
    key.write_bytes(cert.private_key_pem.bytes())
    return str(chain), str(key)


def soon(days: float) -> datetime:
    """So many days from now."""
    return datetime.now(UTC) + timedelta(days=days)


class Mounted:
    """A folder as a Secret is mounted: real files in a folder of their own, and a link `..data` to the newest."""

    def __init__(self, folder: Path, name: str = "localhost") -> None:
        """name: what the server's certificates are for. Everything is issued once."""
        self.folder, self.name = folder, name
        self._serials = itertools.count(1)
        folder.mkdir(parents=True, exist_ok=True)
        self.renew()
        for file in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key"):
            (folder / file).symlink_to(Path("..data") / file)

    def renew(self, ca: trustme.CA | None = None, *, key_of_before: bool = False) -> None:
        """Everything anew, by a new authority unless one is given. key_of_before: but for the server's key."""
        self.ca = ca or trustme.CA()
        new = self.folder / f"..{next(self._serials)}"
        new.mkdir()
        self.ca.cert_pem.write_to_path(new / "ca.pem")
        self.server = self.ca.issue_cert(self.name)
        write(self.server, new, "server")
        write(self.ca.issue_cert("envoy.example"), new, "client")
        if key_of_before:
            (new / "server.key").write_bytes((self.folder / "server.key").read_bytes())
        (self.folder / "..next").symlink_to(new.name)
        os.replace(self.folder / "..next", self.folder / "..data")  # noqa: PTH105 - a rename over a link

    def path(self, file: str) -> str:
        """Where users of the folder find a file."""
        return str(self.folder / file)


def tls_of(files: Mounted) -> dict[str, str]:
    """`service.tls` by these files."""
    return {
        "cert_file": files.path("server.pem"),
        "key_file": files.path("server.key"),
        "ca_file": files.path("ca.pem"),
        "client_ca_file": files.path("ca.pem"),
        "client_cert_file": files.path("client.pem"),
        "client_key_file": files.path("client.key"),
    }
