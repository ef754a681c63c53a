"""The three variants that the benchmark compares, each an Envoy of its own in front of one and the same upstream.

plain     what Tidegate renders, without ext_proc and logs, and with one static cluster: Envoy alone
noop      what Tidegate renders, with the comparator in Tidegate's place
tidegate  as shipped

Limits are out of reach, so nothing waits. The chain is the built-in demo's: three upstreams whose names for the model
differ, so that bodies are rewritten as they are in earnest.
"""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from load_cases import SDK_HEADERS, Case

from extproc.render.envoy import bootstrap, to_yaml
from extproc.settings import (
    FloodSettings,
    GatewaySettings,
    LimitSettings,
    ServiceSettings,
    Settings,
    UpstreamSettings,
    load,
)
from extproc.stack import Stack, envoy_binary, free_ports
from extproc.wire.pb.ext_proc_pb2 import ProcessingRequest, ProcessingResponse

HERE = Path(__file__).parent
PORTS = 5
FAR = LimitSettings(tpm=10**12, rpm=10**9)
ADMISSION = "envoy.filters.http.ext_proc"
HELD = "override_message_timeout"
METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


def settings_for(upstream_port: int) -> Settings:
    """The demo's routes and lanes, on free ports, before one upstream that is never full."""
    gateway, admin, probe, service, console = free_ports(PORTS)
    demo = load(None, {})
    return demo.model_copy(
        update={
            "gateway": GatewaySettings(port=gateway, admin_port=admin, probe_port=probe),
            "service": ServiceSettings(
                address=f"127.0.0.1:{service}", console=f"127.0.0.1:{console}", restart_ramp_s=0
            ),
            "upstreams": {
                name: UpstreamSettings(
                    provider="compatible",
                    url=f"http://127.0.0.1:{upstream_port}",
                    limits=(FAR,),
                    models=upstream.models,
                    owned=upstream.owned,
                )
                for name, upstream in demo.upstreams.items()
            },
            "flood": FloodSettings(per_key_rps=None, per_address_rps=None),
        }
    )


class Plain(Stack):
    """Envoy alone."""

    def start(self) -> None:
        """Start Envoy."""
        self.workdir.mkdir(parents=True, exist_ok=True)
        file = self.workdir / "envoy.yaml"
        file.write_text(to_yaml(without_admission(bootstrap(self.settings))), "utf-8")
        command = [envoy_binary(), "-c", str(file), "--use-dynamic-base-id", "--concurrency", str(self.workers)]
        self._spawn("envoy", [*command, "--log-level", "warning"])
        self._wait("envoy", f"http://127.0.0.1:{self.settings.gateway.admin_port}/ready")


@dataclass
class Noop(Stack):
    """The comparator in Tidegate's place. answers: by length of body."""

    answers: Mapping[int, bytes] | None = None

    def start_service(self) -> None:
        """Start the comparator."""
        service = self.settings.service
        command = [sys.executable, str(HERE / "load_noop.py"), service.address, service.console]
        told = json.dumps({length: base64.b64encode(data).decode() for length, data in (self.answers or {}).items()})
        self._fed("service", command, told)
        self._wait("service", f"http://{service.console}/")

    def _fed(self, name: str, command: list[str], text: str) -> None:
        """Like `_spawn`, with `text` on standard input."""
        file = self.workdir / f"{name}.in"
        file.write_text(text, "utf-8")
        self._spawn(name, ["sh", "-c", f'exec "$@" < {file}', "sh", *command])


def without_admission(envoy: dict[str, Any]) -> dict[str, Any]:
    """What is left of a rendered configuration when admission is taken out of it."""
    resources = envoy["static_resources"]
    resources["listeners"] = resources["listeners"][:1]
    resources["clusters"] = [c for c in resources["clusters"] if "health_checks" not in c]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    for key in ("access_log", "access_log_options"):
        manager.pop(key, None)
    manager["http_filters"] = [f for f in manager["http_filters"] if f["name"] != ADMISSION]
    manager["http_filters"][-1]["typed_config"].pop("upstream_log", None)
    (host,) = manager["route_config"]["virtual_hosts"]
    forward = next(route for route in host["routes"] if "route" in route)
    action = {k: v for k, v in forward["route"].items() if k not in ("inline_cluster_specifier_plugin", "retry_policy")}
    kept = {k: v for k, v in forward.items() if k in ("request_headers_to_remove", "response_headers_to_remove")}
    host["routes"] = [
        {
            "name": "all",
            "match": {"prefix": "/"},
            "route": {**action, "cluster": resources["clusters"][0]["name"]},
            **kept,
        }
    ]
    return envoy


@contextmanager
def upstream(cases: list[Case], workdir: Path) -> Iterator[tuple[int, int]]:
    """The upstream's port and process id, while it runs."""
    (port,) = free_ports(1)
    told = workdir / "cases.json"
    told.write_text(json.dumps([case.data for case in cases]), "utf-8")
    with (
        told.open("rb") as feed,
        subprocess.Popen(
            [sys.executable, str(HERE / "load_upstream.py"), str(port)], stdin=feed, start_new_session=True
        ) as process,
    ):
        try:
            yield port, process.pid
        finally:
            process.send_signal(signal.SIGTERM)


def answer_of(service: str, case: Case) -> bytes:
    """What a Tidegate at `service` answers to the body of `case`, asked as Envoy asks, once it has let it go."""
    head, body = ProcessingRequest(), ProcessingRequest()
    pseudo = {":method": "POST", ":path": "/v1/chat/completions", ":scheme": "http", ":authority": "gateway.example"}
    for name, value in {**pseudo, **SDK_HEADERS, "x-request-id": "00000000-0000-4000-8000-000000000000"}.items():
        header = head.request_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    body.request_body.body = case.bodies[0]
    body.request_body.end_of_stream = True
    with grpc.insecure_channel(service) as channel:
        call = channel.stream_stream(METHOD)(iter([head.SerializeToString(), body.SerializeToString()]))
        next(call)
        answer = next(data for data in call if not ProcessingResponse.FromString(data).HasField(HELD))
        call.cancel()
    return bytes(answer)
