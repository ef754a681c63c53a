"""`tidegate bundle`: one file for whoever is to help, with everything but secrets and content.

What is in it: the config without secrets, the overview, the last hour, the newest decisions, metrics, actions,
versions, and what Envoy says of itself. No prompt and no answer is ever kept by Tidegate, so none can be there.

Secrets are kept out three times over: what is known to hold one is not asked for; the values of all secrets that the
config names, or that the environment holds, are looked for in every text and struck out, as they are and as they may
have been encoded; and what looks like a key is struck out, whoever it belongs to.

What cannot be had is told in the bundle and left out. Nothing is sent anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import platform
import re
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from extproc.console.asking import Access, ConsoleError, fetch, quoted
from extproc.settings import Settings
from extproc.settings.public import public

__all__ = ["Bundle", "BundleError", "Scrubber", "collect", "save"]

STRUCK = "[struck out]"
LEAST = 8
"""Characters of a secret that is looked for: what is shorter is in any text by chance."""
LARGEST = 32 * 1024 * 1024
"""Bytes of one file of the bundle."""
TIMEOUT_S = 15.0
DECISIONS = 200
EXPLAINED = 25
"""So many of the newest decisions are listed; so many of them, and of those that were refused, are explained."""
SECRET_FILES = re.compile(r"(^|_)(key|token|headers)_file$")
SECRET_VARIABLES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
HEADER = re.compile(r"[A-Za-z0-9-]+")
LOOKS_SECRET = tuple(
    re.compile(pattern)
    for pattern in (
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[A-Za-z0-9+/=\s]|\\[nr])*(?:-----END [A-Z ]*PRIVATE KEY-----)?",
        r"(?i)\b(?:bearer|basic)\s+[a-z0-9._~+/=-]{8,}",
        r"\b(?:sk|pk|rk|xai|gsk|ghp|glpat)[-_][A-Za-z0-9_-]{12,}",
        r"\bAIza[A-Za-z0-9_-]{30,}",
        r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
        r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
        r"(?i)\b[0-9a-f]{64}\b",
    )
)
"""Keys of usual shapes, tokens, and digests as long as those of keys."""
READ_ME = """\
What a running Tidegate and its Envoy said of themselves.

There is no prompt, no answer and no secret in it: values of secrets were struck out wherever they stood. Names of
tenants, sessions, models and upstreams are in it, and ids of requests.

manifest.json    what is here, and what could not be had, with the reason
config.yaml      the config file with every default, as this command read it
console/         what the service said: overview, last hour, decisions, explanations, metrics, actions, log level
envoy/           statistics, clusters, and the configuration that Envoy runs
versions.json    of Tidegate, Python, its packages, and the system
"""
PAGES = {
    "overview.json": "/api/v1/overview",
    "state.json": "/api/v1/state",
    "history.json": "/api/v1/history",
    "decisions.json": f"/api/v1/requests?limit={DECISIONS}",
    "config.json": "/api/v1/config",
    "audit.json": "/api/v1/audit",
    "log.json": "/api/v1/log",
    "metrics.txt": "/metrics",
}
OF_ENVOY = {
    "server_info.json": "server_info",
    "stats.txt": "stats",
    "clusters.txt": "clusters",
    "config_dump.json": "config_dump?include_eds",
}


class BundleError(Exception):
    """The bundle could not be written."""


class Scrubber:
    """Strikes secrets out of texts: known ones in whatever form, and what looks like one."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """Those that are known."""
        forms = {form for secret in secrets if len(secret) >= LEAST for form in _forms(secret)}
        longest_first = sorted(forms, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first)), re.IGNORECASE) if forms else None

    def __call__(self, text: str) -> str:
        """The text without them."""
        if self._known is not None:
            text = self._known.sub(STRUCK, text)
        for pattern in LOOKS_SECRET:
            text = pattern.sub(STRUCK, text)
        return text


def _forms(secret: str) -> Iterator[str]:
    """How it may be written: as it is, in JSON, in a URL, in base64, as a digest."""
    raw = secret.encode()
    yield secret
    yield json.dumps(secret)[1:-1]
    yield quote(secret, safe="")
    yield base64.b64encode(raw).decode().rstrip("=")
    yield base64.urlsafe_b64encode(raw).decode().rstrip("=")
    yield hashlib.sha256(raw).hexdigest()


@dataclass(slots=True)
class Bundle:
    """Files by name, and why some are missing."""

    files: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, get: Callable[[], str]) -> None:
        """A file, or why there is none."""
        try:
            text = get()
        except (ConsoleError, OSError, HTTPException, ValueError) as error:
            self.missing[name] = str(error) or type(error).__name__
            return
        if len(text) > LARGEST:
            self.missing[f"the end of {name}"] = f"only its first {LARGEST} characters are kept of {len(text)}"
        self.files[name] = text[:LARGEST]


def collect(settings: Settings, access: Access, envoy: str | None = None) -> Bundle:
    """Everything that can be had now, without secrets. envoy: URL of its admin page, that of the settings if None."""
    bundle = Bundle()
    bundle.add("config.yaml", lambda: yaml.safe_dump(public(settings), sort_keys=False))
    bundle.add("versions.json", lambda: _as_json(versions()))
    for name, path in PAGES.items():
        bundle.add(f"console/{name}", lambda path=path: _told(fetch(access, "GET", path, None, TIMEOUT_S)))  # type: ignore[misc]
    bundle.add("console/explained.json", lambda: _explained(access))
    admin = envoy or f"http://127.0.0.1:{settings.gateway.admin_port}"
    for name, path in OF_ENVOY.items():
        bundle.add(f"envoy/{name}", lambda path=path: _admin(admin, path))  # type: ignore[misc]
    scrub = Scrubber(known_secrets(settings, access.token))
    bundle.files = {name: scrub(text) for name, text in bundle.files.items()}
    bundle.missing = {name: scrub(why) for name, why in bundle.missing.items()}
    return bundle


def save(bundle: Bundle, path: Path) -> None:
    """Write it as a .tar.gz that only its owner can read. BundleError where there is something already, or no room."""
    stem = path.name.removesuffix(".tar.gz")
    now = time.time()
    manifest = {
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        "files": {name: len(text.encode()) for name, text in bundle.files.items()},
        "missing": bundle.missing,
    }
    files = {"README.txt": READ_ME, "manifest.json": _as_json(manifest), **bundle.files}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            content = text.encode()
            entry = tarfile.TarInfo(f"{stem}/{name}")
            entry.size, entry.mtime, entry.mode = len(content), int(now), 0o600
            archive.addfile(entry, io.BytesIO(content))
    try:
        with open(path, "xb", opener=_private) as file:
            file.write(packed.getvalue())
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}") from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def versions() -> dict[str, Any]:
    """Of everything that runs here, but for Envoy, which tells its own."""
    packages = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    return {
        "tidegate": metadata.version("tidegate"),
        "python": sys.version,
        "system": platform.platform(),
        "packages": dict(sorted(packages.items())),
    }


def known_secrets(settings: Settings, token: str = "") -> set[str]:
    """Every secret that the settings name or the environment holds, and that can be read: none of them goes out."""
    dumped = settings.model_dump(mode="json")
    found = {token, *(digest for tenant in settings.tenants.values() for digest in tenant.key_sha256)}
    for path in _secret_files(dumped):
        found |= _of_file(path)
    found |= {value for name, value in os.environ.items() if SECRET_VARIABLES.search(name) and not _is_plain(value)}
    return {secret for secret in found if len(secret) >= LEAST}


def _secret_files(node: Any) -> Iterator[Path]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if isinstance(value, str) and SECRET_FILES.search(str(key)):
                yield Path(value)
            else:
                yield from _secret_files(value)


def _of_file(path: Path) -> set[str]:
    """What of a file is secret: all of it, each line, and of headers what stands behind their names, word by word."""
    try:
        text = path.read_text("utf-8", "replace") if path.is_file() and path.stat().st_size <= LARGEST else ""
    except OSError:
        return set()
    lines = [line.strip() for line in text.splitlines() if not line.startswith("-----")]
    behind = [value.strip() for line in lines for name, _, value in [line.partition(":")] if HEADER.fullmatch(name)]
    words = [word for value in behind for word in value.split()]
    return {text.strip(), *lines, *behind, *words}


def _is_plain(value: str) -> bool:
    """Whether a variable's value is a path or a number rather than a secret."""
    return value.isdecimal() or value.startswith(("/", "./", "http://", "https://"))


def _explained(access: Access) -> str:
    """What is known of those that were refused last, and of the newest."""
    tickets: dict[str, None] = {}
    for wanted in ("&state=refused", ""):
        listed = fetch(access, "GET", f"/api/v1/requests?limit={EXPLAINED}{wanted}", None, TIMEOUT_S)
        tickets |= dict.fromkeys(str(row["ticket"]) for row in json.loads(listed)["requests"])
    found = []
    for ticket in tickets:
        try:
            found.append(json.loads(fetch(access, "GET", f"/api/v1/requests/{quoted(ticket)}")))
        except ConsoleError as error:  # it was forgotten meanwhile
            found.append({"ticket": ticket, "missing": str(error)})
    return _as_json(found)


def _told(answer: bytes) -> str:
    """JSON is written to be read; anything else stays as it is."""
    text = answer.decode("utf-8", "replace")
    try:
        return _as_json(json.loads(text))
    except ValueError:
        return text


def _admin(url: str, path: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}/{path}", timeout=TIMEOUT_S) as answer:
            return str(answer.read(LARGEST + 1).decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        raise OSError(f"{url}/{path}: {error.code}") from None
    except (OSError, urllib.error.URLError) as error:
        raise OSError(f"{url}: {getattr(error, 'reason', error)}") from None


def _as_json(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
