"""`tidegate check --against URL` as a command: what it prints and returns, and what it says of other URLs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from extproc.against import dump
from extproc.against.comparing import differences, same, short
from extproc.against.dump import AdminError, read
from extproc.cli import app
from tests.against.conftest import Dumped
from tests.render.rig import free_port

INFO = json.dumps({"version": "1c/1.40.0/Clean/RELEASE/BoringSSL"})


@contextmanager
def admin(info: str, dumped: str, status: int = 200) -> Iterator[str]:
    """Something that answers at a URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (info if self.path == "/server_info" else dumped).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def check(url: str, dumped: Dumped, folder: Path) -> tuple[int, list[str], str]:
    """Exit status, lines of stdout, stderr."""
    config = folder / "tidegate.yaml"
    config.write_text(yaml.safe_dump(dumped.settings.model_dump(mode="json")))
    done = CliRunner().invoke(app, ["check", "--config", str(config), "--against", url])
    return done.exit_code, done.stdout.splitlines(), done.stderr


@pytest.mark.e2e
def test_one_line_and_success_where_all_agrees(alone: Dumped, tmp_path: Path) -> None:
    with admin(INFO, alone.dump) as url:
        assert check(url, alone, tmp_path) == (0, [], f"ok: the Envoy at {url} runs what the config says\n")


@pytest.mark.e2e
def test_a_line_for_each_disagreement_and_failure(alone: Dumped, tmp_path: Path) -> None:
    changed = alone.dump.replace('"failure_mode_allow": true', '"failure_mode_allow": false').replace(
        '"max_requests": 100000', '"max_requests": 5'
    )
    with admin(INFO, changed) as url:
        status, lines, said = check(url, alone, tmp_path)
    assert status == 1
    assert said == ""
    assert len(lines) == 1 + 3, lines  # admission, and the clusters of two upstreams and the service
    assert all("expected" in line and "found" in line for line in lines)


BROKEN: dict[str, tuple[str, str, str]] = {
    "HTML": ("<html>hello</html>", "", "not JSON .* it begins with '<html>hello</html>'"),
    "a list": ("[]", "", "/server_info: not what an Envoy says"),
    "another service": ('{"status": "ok"}', "", "tells no version: not the admin interface of an Envoy"),
    "cut": (INFO, '{"configs": [{"@type": ', "/config_dump.*: not JSON"),
    "empty": (INFO, "{}", "/config_dump: no configs in it: not a config dump of Envoy"),
    "nested without end": (INFO, "[" * 200_000, "/config_dump.*: not JSON"),
    "another's configs": (INFO, '{"configs": ["x", 7, null]}', "no configs in it"),
    "huge": (INFO, json.dumps({"configs": ["x" * 5000]}), "more than .* MB"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_no_admin_interface_is_told_so(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    info, dumped, said = BROKEN[what]
    if what == "huge":
        monkeypatch.setattr(dump, "_LARGEST", 4000)
    with admin(info, dumped) as url, pytest.raises(AdminError, match=said) as error:
        read(url)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (
            lambda: f"http://127.0.0.1:{free_port()}",
            "nobody answers as the admin interface of an Envoy would: .*refused",
        ),
        (lambda: "127.0.0.1:9901", "no URL of an admin interface; it has to be like"),
        (lambda: "file:///etc/passwd", "no URL of an admin interface"),
        (lambda: "http://[::1", "no URL of an admin interface"),
        (lambda: "http://127.0.0.1:99999", "nobody answers"),
    ],
)
def test_a_url_where_nobody_answers_is_told_so(url: Callable[[], str], said: str) -> None:
    with pytest.raises(AdminError, match=said):
        read(url())


def test_another_status_is_told() -> None:
    with admin(INFO, "", status=403) as url, pytest.raises(AdminError, match="403 Forbidden: not the admin interface"):
        read(url)


# ------------------------------------------------------------------------------------------ comparing


@pytest.mark.parametrize(
    ("expected", "there"),
    [
        ({"a": "2s"}, {"a": "2.000s"}),
        ({"a": 16777216}, {"a": "16777216"}),
        ({"a": 100}, {"a": 100.0}),
        ({"a": False, "b": 0, "c": "", "d": [], "e": "AUTO"}, {}),
        ({"a": {"value": 0}}, {"a": {}}),
        ({"secret": {"filename": "/x"}}, {"secret": {"filename": "[redacted]"}}),
        ({"secret": {"inline_bytes": "eA=="}}, {"secret": {"inline_bytes": "W3JlZGFjdGVkXQ=="}}),
        ({"a": 1}, {"a": 1, "metadata": {"filter_metadata": {"istio": {}}}, "locality": {}}),
        ([{"name": "a", "x": 1}], [{"name": "a", "x": 1}]),
    ],
)
def test_what_envoy_writes_otherwise_is_no_difference(expected: object, there: object) -> None:
    assert same(expected, there)
    assert list(differences(expected, there)) == []


@pytest.mark.parametrize(
    ("expected", "there", "field"),
    [
        ({"a": "2s"}, {"a": "2"}, "a"),
        ({"a": "2s"}, {"a": "2.001s"}, "a"),
        ({"a": True}, {"a": False}, "a"),
        ({"num_retries": 0}, {}, "num_retries"),
        ({}, {"max_requests": 0}, "max_requests"),
        ({"a": {"@type": "x"}}, {"a": {"@type": "y"}}, "a.@type"),
        ({"a": {}}, {}, "a"),
        ({"a": [1, 2]}, {"a": [2, 1]}, "a"),
        ({"a": [{"x": 1}, {"x": 2}]}, {"a": [{"x": 1}, {"x": 3}]}, "a[1].x"),
        ({"a": [{"name": "n"}, {"name": "m"}]}, {"a": [{"name": "m"}, {"name": "n"}]}, "a"),
        ({"a": [{"name": "n", "x": 1}]}, {"a": [{"name": "n", "x": 2}]}, "a[n].x"),
        ({"a": [{"name": "n"}]}, {"a": []}, "a[n]"),
        ({"a": {"b": 1}}, {"a": [1]}, "a"),
    ],
)
def test_what_envoy_would_do_otherwise_is_a_difference(expected: object, there: object, field: str) -> None:
    assert [one.field for one in differences(expected, there)] == [field]
    assert not same(expected, there)


def test_a_long_value_is_short_and_on_one_line() -> None:
    assert short("x" * 500) == "x" * 86 + " ..."
    assert short("a\nb\nc").startswith("a text of 2 lines (")
    assert short({"a": True}) == '{"a": true}'
    assert short(None) == "nothing"
