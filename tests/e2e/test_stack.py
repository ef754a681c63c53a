"""The commands a person types: `tidegate up` from its first line to Ctrl-C, `check`, `render`, and their mistakes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from extproc.settings import parse
from extproc.stack import envoy_binary, free_ports
from tests.e2e.conftest import chat
from tests.e2e.doubles import CHAT, until

TIDEGATE = str(Path(sys.executable).with_name("tidegate"))
HTTP = httpx.Client(timeout=30)
PUBLIC_KEY = {"kty": "oct", "alg": "HS256", "kid": "test", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldA"}
LINE = re.compile(
    r"\d\d:\d\d:\d\d  waiting P0 \d+ P1 \d+ P2 \d+ \| running \d+ \| admitted \d+/s \| served [^|]+ \| shed [^|]+"
    r"( \| failed [^|]+)? \| free [^|]+( \| breakers [^|]+)?"
)


def config(**overrides: Any) -> dict[str, Any]:
    """A config with two fakes, all on free ports; the gateway's own port is left to the environment."""
    ports = iter(free_ports(8))
    fakes = {
        name: {"provider": "fake", "url": f"http://127.0.0.1:{next(ports)}", "limits": [{"tpm": 600_000}]}
        for name in ("primary", "backup")
    }
    return {
        "gateway": {"admin_port": next(ports), "probe_port": next(ports)},
        "service": {"address": f"127.0.0.1:{next(ports)}", "console": f"127.0.0.1:{next(ports)}", "drain_s": 3},
        "upstreams": {**fakes, "backup": {**fakes["backup"], "owned": True}},
        "routes": [{"models": ["gpt-5"], "chain": ["primary", "backup"]}],
        **overrides,
    }


def written(folder: Path, content: Mapping[str, Any] | str) -> Path:
    """The config file with this in it."""
    file = folder / "tidegate.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content), "utf-8")
    return file


def tidegate(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [TIDEGATE, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environ}
    )


class Up:
    """A running `tidegate up`, and what it has said so far."""

    def __init__(self, folder: Path, file: Path, port: int) -> None:
        """Start it."""
        self.url = f"http://127.0.0.1:{port}"
        self.workdir = folder / "run"
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [TIDEGATE, "up", "--config", file, "--workdir", self.workdir],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "TIDEGATE_PORT": str(port)},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in self.process.stdout)

    def said(self, part: str, within_s: float = 30.0) -> str:
        """The first line that has `part` in it, once it was said."""
        return str(until(lambda: next((line for line in self.lines if part in line), ""), within_s))

    def seconds(self) -> list[str]:
        """The lines that were said every second."""
        return [line for line in self.lines if re.match(r"\d\d:\d\d:\d\d", line)]

    def pid(self, part: str) -> int:
        """The process it started whose command has `part` in it."""
        (found,) = [pid for pid, command in processes() if part in command and f"{self.workdir}" in command]
        return found

    def children(self) -> list[str]:
        """Commands of all processes in the sessions of those it started."""
        return [command for pid, command in processes() if f"{self.workdir}" in command and pid != self.process.pid]

    def end(self, how: signal.Signals) -> int:
        """Tell it to stop, and wait until it has."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait(30)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def processes() -> Iterator[tuple[int, str]]:
    """Every process of this machine with its command."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if command:
            yield int(folder.name), command


def listening(port: int) -> bool:
    """Whether anybody accepts connections there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def up(folder: Path) -> Iterator[tuple[Up, Mapping[str, Any]]]:
    """A `tidegate up` that has greeted, stopped at the latest when the block ends."""
    content, (port,) = config(), free_ports(1)
    one = Up(folder, written(folder, content), port)
    try:
        one.said("curl")
        yield one, content
    finally:
        one.end(signal.SIGINT)


def ports_of(one: Up, content: Mapping[str, Any]) -> list[int]:
    """Every port that a stack listens on."""
    addresses = [content["service"]["address"], content["service"]["console"], one.url]
    addresses += [upstream["url"] for upstream in content["upstreams"].values()]
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    return [*ports, content["gateway"]["admin_port"], content["gateway"]["probe_port"]]


def test_up_greets_serves_reports_and_stops(tmp_path: Path) -> None:
    """It says where it listens and what to try, and that works as it is written; a line per second tells how it goes; a
    second one on the same ports says in one line what is wrong and leaves the first alone; Ctrl-C ends everything.
    """
    with up(tmp_path) as (one, content):
        assert one.url in one.said("listens on")
        curl = shlex.split(one.said("curl"))
        answer = subprocess.run([*curl, "--silent", "--fail"], capture_output=True, text=True, timeout=30, check=True)
        assert '"choices"' in answer.stdout
        one.said("served primary 1")
        before, began = len(one.seconds()), time.monotonic()
        until(lambda: len(one.seconds()) >= before + 3)
        assert time.monotonic() - began > 1.9, "one in a second, no more"
        assert all(LINE.fullmatch(line) for line in one.seconds()), one.seconds()
        assert all(map(listening, ports_of(one, content)))

        (tmp_path / "other").mkdir()
        second = tidegate("up", "--config", tmp_path / "tidegate.yaml", "--workdir", tmp_path / "other/run")
        assert (second.returncode, second.stdout) == (2, "starting ...\n")
        assert re.fullmatch(r"[a-z_.]+: port \d+ is taken by another process\n", second.stderr)
        assert HTTP.post(one.url + CHAT, json=chat()).status_code == 200

        assert one.children()
        assert one.end(signal.SIGINT) == 0
        assert one.lines[-1] == "stopped"
        assert one.children() == []
        assert not any(map(listening, ports_of(one, content)))


def test_up_looks_after_its_parts(tmp_path: Path) -> None:
    """A killed fake is a failover to watch; a killed service is started again; a killed Envoy is the end, and told."""
    with up(tmp_path) as (one, content):
        pid = int(re.search(r"fake provider primary: pid (\d+)", "\n".join(one.lines)).group(1))  # type: ignore[union-attr]
        os.kill(pid, signal.SIGKILL)
        answer = HTTP.post(one.url + CHAT, json=chat())
        assert (answer.status_code, answer.headers["x-tidegate-upstream"]) == (200, "backup")
        one.said("served backup 1")

        os.kill(one.pid(" serve "), signal.SIGKILL)
        one.said("the service ended; starting it again")
        until(lambda: HTTP.post(one.url + CHAT, json=chat()).status_code == 200, within_s=60, every_s=0.05)

        os.kill(one.pid("envoy.yaml"), signal.SIGKILL)
        assert one.process.wait(60) == 2
        assert "envoy ended; see " in one.said("envoy ended")
        assert one.children() == []
        assert not any(map(listening, ports_of(one, content)))


def test_up_ends_in_order_however_often_it_is_told(tmp_path: Path) -> None:
    """An answer is under way, so stopping takes a moment, and Ctrl-C is pressed again and again: nothing is left."""
    with up(tmp_path) as (one, content):
        headers = {"x-fake-fault": "stall;s=30;at=4"}
        with HTTP.stream("POST", one.url + CHAT, json=chat(stream=True), headers=headers) as answer:
            assert answer.status_code == 200
            for _ in range(10):
                one.process.send_signal(signal.SIGINT)
                time.sleep(0.1)
            assert one.end(signal.SIGINT) == 0
        assert one.lines[-1] == "stopped"
        assert one.children() == []
        assert not any(map(listening, ports_of(one, content)))


def test_up_ends_on_sigterm_too(tmp_path: Path) -> None:
    """What a supervisor sends: the same as Ctrl-C, also while it is starting."""
    content, (port,) = config(), free_ports(1)
    one = Up(tmp_path, written(tmp_path, content), port)
    one.said("starting")
    until(lambda: listening(int(content["upstreams"]["backup"]["url"].rpartition(":")[2])), within_s=20)
    assert one.end(signal.SIGTERM) == 0
    assert one.children() == []
    assert not any(map(listening, ports_of(one, content)))


@pytest.mark.parametrize(
    ("where", "told"),
    [
        (("gateway", "probe_port"), "gateway.probe_port"),
        (("service", "address"), "service.address"),
        (("service", "console"), "service.console"),
        (("upstreams", "primary", "url"), "upstreams.primary.url"),
    ],
)
def test_a_taken_port_is_one_clear_line(tmp_path: Path, where: tuple[str, ...], told: str) -> None:
    """Somebody else listens there: which setting, which port, and nothing is left running."""
    content: Any = config()
    value = content
    for key in where:
        value = value[key]
    with socket.socket() as taken:
        port = int(str(value).rpartition(":")[2])
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        gateway = str(free_ports(1)[0])
        done = tidegate(
            "up", "--config", written(tmp_path, content), "--workdir", tmp_path / "run", TIDEGATE_PORT=gateway
        )
    assert (done.returncode, done.stderr) == (2, f"{told}: port {port} is taken by another process\n")
    assert [command for _, command in processes() if f"{tmp_path}" in command] == []


def test_check_accepts_the_demo_and_shows_every_value(tmp_path: Path) -> None:
    """The built-in demo is fine; what `--show` prints is a config, and the same one, with what the environment says."""
    assert tidegate("check", TIDEGATE_PORT="12345").returncode == 0
    shown = tidegate("check", "--show", TIDEGATE_PORT="12345", TIDEGATE__SERVICE__DRAIN_S="7.5")
    assert (shown.returncode, shown.stderr.splitlines()[-1]) == (0, "ok")
    again = parse(shown.stdout, "shown")
    assert (again.gateway.port, again.service.drain_s) == (12345, 7.5)
    written(tmp_path, shown.stdout)
    assert tidegate("check", "--show", "--config", tmp_path / "tidegate.yaml").stdout == shown.stdout


def test_what_render_prints_is_accepted_by_envoy(tmp_path: Path) -> None:
    """`render | envoy --mode validate`, for the demo and for a config with keys, TLS, JWT, other ports."""
    (tmp_path / "key").write_text("sk-secret", "utf-8")
    (tmp_path / "jwks").write_text(json.dumps({"keys": [PUBLIC_KEY]}), "utf-8")
    upstreams = {
        "openai": {"provider": "openai", "key_file": str(tmp_path / "key"), "limits": [{"tpm": 1000, "rpm": 10}]},
        "claude": {"provider": "anthropic", "key_file": str(tmp_path / "key"), "learn": True},
        "mine": {"provider": "vllm", "url": "http://[::1]:8000/v1", "owned": True, "concurrency": 4},
    }
    rich = config(
        upstreams=upstreams,
        routes=[{"models": ["gpt-*"], "chain": ["openai", "claude", "mine"]}],
        identity={"tenant": ["jwt:team", "api_key"], "jwt": {"jwks_file": str(tmp_path / "jwks")}},
    )
    for arguments in ([], ["--config", written(tmp_path, rich)]):
        printed = tidegate("render", *arguments)
        assert (printed.returncode, printed.stderr) == (0, "")
        assert "sk-secret" not in printed.stdout
        (tmp_path / "envoy.yaml").write_text(printed.stdout, "utf-8")
        envoy = [envoy_binary(), "--mode", "validate", "-c", tmp_path / "envoy.yaml"]
        assert subprocess.run(envoy, capture_output=True, check=False).returncode == 0
    assert tidegate("check", "--config", tmp_path / "tidegate.yaml").returncode == 0


MISTAKES: dict[str, tuple[Any, list[str]]] = {
    "each section has its own": (
        config(gateway={"port": 0, "workres": 1}, lanes={"P1": {"max_wait_s": "long"}}, flood=[]),
        ["gateway.port: ", "gateway.workres: unknown key", "lanes.P1.max_wait_s: ", "flood: "],
    ),
    "sections that do not fit together": (
        config(
            routes=[{"models": ["gpt-5", "gpt-5"], "chain": ["primary", "nowhere"]}],
            other_endpoints="nobody",
            tenants={"team": {"lanes": ["P9"]}},
            lanes={"P1": {"max_wait_s": 1000}},
        ),
        [
            "routes[0].chain: unknown upstream 'nowhere'",
            "routes[0].models: 'gpt-5' is already served",
            "other_endpoints: unknown upstream 'nobody'",
            "tenants.team.lanes: unknown lane 'P9'",
            "lanes.P1.max_wait_s: 1000 s is longer than a synchronous wait may be",
        ],
    ),
    "an upstream without limits": (
        config(upstreams={"primary": {"provider": "vllm", "url": "http://localhost", "owned": True}}),
        ["upstreams.primary.limits: missing"],
    ),
    "a chain that ends on somebody else's": (
        config(routes=[{"models": ["gpt-5"], "chain": ["primary"]}]),
        ["routes[0].chain: ends on 'primary', which is not owned"],
    ),
    "not YAML": ("upstreams: {a: [}", [":1: "]),
    "a key written twice": ("routes: []\nroutes: []\n", [":2: 'routes' is written twice"]),
    "a list": ("- 1\n", ["must be a mapping"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_is_one_line(tmp_path: Path, name: str) -> None:
    """All mistakes at once, a line each that begins with the file and the place; exit code 2; never a traceback."""
    content, expected = MISTAKES[name]
    file = written(tmp_path, content)
    done = tidegate("check", "--config", file)
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (2, "", len(expected)), done.stderr
    assert all(line.startswith(str(file)) for line in lines)
    for part in expected:
        assert sum(part in line for line in lines) == 1, (part, lines)


def test_every_command_says_what_is_wrong(tmp_path: Path) -> None:
    """Whatever is asked of a config that is none, or not there, or overridden by nonsense: one line and exit code 2."""
    file = written(tmp_path, "upstreams: 5\nroutes: []\n")
    for command in ("up", "serve", "check", "render"):
        done = tidegate(command, "--config", file)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == 2
    missing = tidegate("check", "--config", tmp_path / "missing.yaml")
    assert (missing.returncode, missing.stderr) == (2, f"{tmp_path / 'missing.yaml'}: No such file or directory\n")
    odd = tidegate("check", TIDEGATE_PORT="many")
    assert (odd.returncode, len(odd.stderr.splitlines())) == (2, 1)
    assert "gateway.port" in odd.stderr


def test_check_misses_files_before_envoy_does(tmp_path: Path) -> None:
    """A key that cannot be read is told by the name of its setting."""
    content: Any = config()
    content["upstreams"]["primary"]["key_file"] = str(tmp_path / "nothing")
    done = tidegate("check", "--config", written(tmp_path, content))
    assert done.returncode == 2
    assert done.stderr == f"upstreams.primary.key_file: {tmp_path / 'nothing'} cannot be read, or is empty\n"
