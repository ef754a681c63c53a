"""The file for whoever is to help: what is in it, that no secret is, and what it says of what it could not get."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import stat
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from typer.testing import CliRunner

from extproc.bundle import EXPLAINED, LARGEST, Bundle, BundleError, Scrubber, collect, save
from extproc.cli import app
from extproc.console.asking import access
from extproc.settings import Settings, load
from tests.console.world import REQUEST, World, beside, by_token

API_KEY = 'sesame-"opens"/every+door='
OTHER_KEY = "another-key-of-ours-0815"
COLLECTOR = "collector-pass-4711-word"
DIGEST = hashlib.sha256(b"a tenant's key").hexdigest()
FROM_ENVIRONMENT = "in-the-environment-1234"
FIRST_LINE, LAST_LINE = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC", "q83vASNFZ4mrze8BI0VniavN"
PRIVATE = f"-----BEGIN PRIVATE KEY-----\n{FIRST_LINE}\n{LAST_LINE}\n-----END PRIVATE KEY-----\n"
STRANGERS = "sk-proj-1234567890abcdefghijkl"
"""A key that this config does not know of."""
KNOWN = (API_KEY, OTHER_KEY, COLLECTOR, DIGEST, FROM_ENVIRONMENT, FIRST_LINE, LAST_LINE)
UNKNOWN = (STRANGERS, "stolen-bearer-token-99")
"""Of these nobody can know how they were encoded."""


NOBODY = ("--console", "127.0.0.1:1", "--envoy", "http://127.0.0.1:1")


def every_form(secret: str) -> list[str]:
    """How it could stand in a text."""
    raw = secret.encode()
    forms = [secret, json.dumps(secret)[1:-1], quote(secret, safe=""), hashlib.sha256(raw).hexdigest()]
    return [*forms, base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()]


EVERYWHERE = " ".join(form for secret in KNOWN for form in every_form(secret)) + f" authorization: Bearer {STRANGERS}"


class Admin(http.server.BaseHTTPRequestHandler):
    """An Envoy's admin page that tells more than it should."""

    def do_GET(self) -> None:
        if self.path.startswith("/clusters"):
            self.send_error(503)
            return
        dump = {
            "authorization": "Bearer stolen-bearer-token-99",
            "inline": EVERYWHERE,
            "pem": PRIVATE,
            "kept": self.path,
        }
        body = json.dumps(dump).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def envoy() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Admin)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config that names secrets in every place there is for one."""
    files = {
        "key": API_KEY, "other": OTHER_KEY + "\n", "headers": f"authorization: Basic {COLLECTOR}\n# x\n",
        "tls.pem": PRIVATE, "ca.pem": "-----BEGIN CERTIFICATE-----\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    by_token(tmp_path)
    file = tmp_path / "tidegate.yaml"
    file.write_text(f"""
upstreams:
  a: {{provider: openai, key_file: key, limits: [{{model: "*", tpm: 1000}}]}}
  b: {{provider: openai, key_file: other, owned: true, concurrency: 2,
      client_cert_file: ca.pem, client_key_file: tls.pem}}
routes: [{{models: [m], chain: [a, b]}}]
tenants: {{chat: {{key_sha256: [{DIGEST}]}}}}
telemetry: {{otlp: {{endpoint: "http://127.0.0.1:4318", headers_file: headers}}}}
admin: {{token_file: token}}
""")
    return file


class Leaking(World):
    """A service that says secrets wherever it says anything."""

    async def overview(self) -> dict[str, Any]:
        return {"status": "ok", "leak": EVERYWHERE, EVERYWHERE: "as a name"}

    def requests(self, **wanted: Any) -> list[dict[str, Any]]:
        self.asked.append(wanted)
        return [{"id": EVERYWHERE, "ticket": ticket, "state": "refused"} for ticket in (REQUEST, "gone")]


def unpacked(path: Path) -> dict[str, str]:
    """Files of a bundle by their names without the folder."""
    found = {}
    with tarfile.open(path) as archive:
        for entry in archive.getmembers():
            assert entry.isfile()
            assert entry.mode == 0o600
            folder, _, name = entry.name.partition("/")
            assert folder == path.name.removesuffix(".tar.gz")
            content = archive.extractfile(entry)
            assert content is not None
            found[name] = content.read().decode()
    return found


def test_nothing_secret_is_in_it(tmp_path: Path, config: Path, envoy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it was written, wherever it stood, in names of files and of fields, too; the rest is all there."""
    monkeypatch.setenv("OPENAI_API_KEY", FROM_ENVIRONMENT)
    world, settings = Leaking(), load(config)
    token = (tmp_path / "token").read_text().strip()
    path = tmp_path / "out.tar.gz"
    with beside(world, settings.admin) as url:
        save(collect(settings, access(settings, console=url), envoy), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    files = unpacked(path)
    for name, text in files.items():
        for secret in (*UNKNOWN, *(form for known in (*KNOWN, token) for form in every_form(known))):
            assert secret not in name
            assert secret not in text, f"{secret} in {name}"
    assert {
        "README.txt", "manifest.json", "config.yaml", "versions.json", "console/overview.json", "console/state.json",
        "console/history.json", "console/decisions.json", "console/explained.json", "console/config.json",
        "console/audit.json", "console/log.json", "console/metrics.txt", "envoy/stats.txt", "envoy/server_info.json",
        "envoy/config_dump.json",
    } == files.keys()  # fmt: skip
    assert "stolen" not in files["envoy/config_dump.json"]
    assert "config_dump?include_eds" in files["envoy/config_dump.json"]
    manifest = json.loads(files["manifest.json"])
    assert list(manifest["missing"]) == ["envoy/clusters.txt"]
    assert "503" in manifest["missing"]["envoy/clusters.txt"]
    first, second = json.loads(files["console/explained.json"])
    assert first == {"id": REQUEST}
    assert "no such request" in second["missing"]
    assert [(asked["limit"], asked["state"]) for asked in world.asked[-2:]] == [
        (EXPLAINED, "refused"),
        (EXPLAINED, None),
    ]
    assert json.loads(files["versions.json"])["packages"]["pydantic"]
    shown = load_yaml(files["config.yaml"])
    assert shown["upstreams"]["a"]["key_file"].endswith("/key"), "names of files are no secret"
    assert shown["telemetry"]["log"]["level"] == "info"


def load_yaml(text: str) -> dict[str, Any]:
    return dict(yaml.safe_load(text))


def test_what_cannot_be_had_is_told(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a service nor an Envoy: the config and the versions are worth something all the same."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app,
        ["bundle", "-c", str(config), "--console", "127.0.0.1:1", "--envoy", "http://127.0.0.1:1", "-o", "b.tar.gz"],
    )
    assert done.exit_code == 0, done.output
    assert "without console/overview.json: no Tidegate answers at 127.0.0.1:1" in done.stderr
    assert "without envoy/stats.txt: http://127.0.0.1:1" in done.stderr
    assert done.stdout == "b.tar.gz\n"
    files = unpacked(tmp_path / "b.tar.gz")
    assert {"README.txt", "manifest.json", "config.yaml", "versions.json"} == files.keys()
    assert len(json.loads(files["manifest.json"])["missing"]) == 13


def test_nothing_is_written_over(tmp_path: Path) -> None:
    """A file that is there is somebody's."""
    path = tmp_path / "b.tar.gz"
    path.write_text("mine")
    with pytest.raises(BundleError, match="File exists"):
        save(Bundle(), path)
    assert path.read_text() == "mine"
    with pytest.raises(BundleError, match="No such file"):
        save(Bundle(), tmp_path / "nowhere" / "b.tar.gz")


def test_by_itself_it_is_named_by_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, of the demo, where there is no config."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bundle", *NOBODY])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("tidegate-bundle-2")


def test_a_token_file_that_is_none(tmp_path: Path, config: Path) -> None:
    """A mistake is a message."""
    done = CliRunner().invoke(app, ["bundle", "-c", str(config), "--token-file", str(tmp_path / "no")])
    assert done.exit_code == 1
    assert "no" in done.stderr


def test_what_is_too_long_is_cut_and_told() -> None:
    """A dump may be of any size."""
    bundle = Bundle()
    bundle.add("x", lambda: "y" * (LARGEST + 5))
    assert len(bundle.files["x"]) == LARGEST
    assert "are kept of" in bundle.missing["the end of x"]


@pytest.mark.parametrize(
    "text",
    [
        "authorization: Bearer abcdefgh12345678",
        "Authorization: Basic dXNlcjpwYXNzd29yZA==",
        f"x {STRANGERS} y",
        "AIzaSyA1234567890abcdefghijklmnopqrstuv",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        DIGEST,
        PRIVATE,
        "-----BEGIN RSA PRIVATE KEY-----\nMIIabc",
    ],
)
def test_what_looks_like_a_key_is_struck_out(text: str) -> None:
    """Though nobody here knows whose it is."""
    struck = Scrubber(())(text)
    assert "[struck out]" in struck
    for word in text.split():
        if len(word) > 14:
            assert word not in struck


def test_words_stay() -> None:
    """Numbers, versions, ids of requests and short secrets are no reason to strike out half of a text."""
    text = "tokens 12345678 r-1b4e28ba-2fa1-11d2-883f-0016d3cca427 config 22a2ed4a016c task-id secret"
    assert Scrubber(("secret", ""))(text) == text
    assert Scrubber((API_KEY, API_KEY[:12]))(f"<{API_KEY}>") == "<[struck out]>", "the longest first"


def test_settings_without_secrets(tmp_path: Path) -> None:
    """There is nothing to strike out, and all goes the same way."""
    settings: Settings = load(None)
    bundle = collect(settings, access(settings, console="127.0.0.1:1"), "http://127.0.0.1:1")
    save(bundle, tmp_path / "b.tar.gz")
    assert "upstreams" in unpacked(tmp_path / "b.tar.gz")["config.yaml"]
