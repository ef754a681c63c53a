"""A pod on this machine, without a cluster: the rendered containers are run as the kubelet would, in its order.

Volumes are folders below `folder`, and every mount path in commands, environment and mounted text is replaced by its
folder; pods share the machine's loopback, so their ports must differ. What the kubelet promises is kept: sidecars
(init containers with `restartPolicy: Always`) start one after another, each when the startup probe of the one before
succeeds; at the end hooks are run first, then containers get SIGTERM, then sidecars one after another in reverse order,
and who outlasts the grace period is killed.

Where this machine lets us (root, and namespaces), a container has the user of the manifest, no rights, and a root that
is read-only but for its writable mounts. Its one right too many is to read: Python may be in somebody's home.
"""

from __future__ import annotations

import base64
import functools
import gzip
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from extproc.wire.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse

Data = dict[str, Any]
SLOW = 3
"""So many times slower than it should be this machine may be."""


@dataclass
class Pod:
    """`start`, then `terminate`. ended: names of the containers in the order in which they ended, with their codes."""

    spec: Data
    config_maps: Mapping[str, Data]
    folder: Path
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ended: list[tuple[str, int]] = field(default_factory=list)
    hooks: list[tuple[str, int]] = field(default_factory=list)

    def start(self) -> None:
        """Lay the volumes and start everything in order. AssertionError when a probe does not succeed in time."""
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o755)
        for volume in self.spec["volumes"]:
            self._lay(volume)
        for container in self._everybody():
            if container in self.spec["initContainers"] and container.get("restartPolicy") != "Always":
                limit = time.monotonic() + SLOW * 60
                assert self._exec(container, container["command"], limit) == 0, container["name"]
                continue
            self._run(container)
            self._await(container, container["startupProbe"])

    def ready(self) -> bool:
        """Whether every readiness probe succeeds right now: whether Services would name the pod."""
        probes = [(c, c["readinessProbe"]) for c in self._everybody() if "readinessProbe" in c]
        return all(self._succeeds(container, probe) for container, probe in probes)

    def alive(self) -> bool:
        """Whether every liveness probe succeeds right now."""
        probes = [(c, c["livenessProbe"]) for c in self._everybody() if "livenessProbe" in c]
        return bool(probes) and all(self._succeeds(container, probe) for container, probe in probes)

    def terminate(self, before_sidecars: Callable[[], None] = lambda: None) -> None:
        """End it as the kubelet does; `before_sidecars` is called when all containers but the sidecars have ended."""
        until = time.monotonic() + self.spec["terminationGracePeriodSeconds"]
        for container in self.spec["containers"]:
            hook = container.get("lifecycle", {}).get("preStop")
            if hook:
                self.hooks.append((container["name"], self._exec(container, hook["exec"]["command"], until)))
            self._end(container["name"], until)
        before_sidecars()
        for container in reversed(list(self._sidecars())):
            self._end(container["name"], until)

    def kill(self) -> None:
        """Whatever still runs when a test is over."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def log(self, name: str) -> str:
        """What a container has said."""
        return (self.folder / f"{name}.log").read_text("utf-8", "replace")

    def written_to(self) -> set[str]:
        """Regular files that a process of the pod may write to, by the descriptors that it has open."""
        found = set()
        for process in self.processes.values():
            for entry in Path(f"/proc/{process.pid}/fdinfo").iterdir():
                flags = next(int(x.split()[1], 8) for x in entry.read_text().splitlines() if x.startswith("flags"))
                target = Path(f"/proc/{process.pid}/fd/{entry.name}").readlink()
                if flags & (os.O_WRONLY | os.O_RDWR) and target.is_file():
                    found.add(str(target))
        return found

    def _sidecars(self) -> Iterator[Data]:
        return (each for each in self.spec["initContainers"] if each.get("restartPolicy") == "Always")

    def _everybody(self) -> list[Data]:
        return [*self.spec["initContainers"], *self.spec["containers"]]

    def _lay(self, volume: Data) -> None:
        """Mounted text is what was rendered, with paths as they are here. Kubernetes mounts by a link that it swaps."""
        place = self._volume(volume["name"])
        if "emptyDir" in volume:
            place.mkdir()
            place.chmod(0o777)
            return
        if "configMap" in volume:
            config = self.config_maps[volume["configMap"]["name"]]
            data = {key: self._here(text).encode() for key, text in config["data"].items()}
            data |= {key: self._repacked(text) for key, text in config.get("binaryData", {}).items()}
            entries = {item["path"]: data[item["key"]] for item in volume["configMap"]["items"]}
        else:
            secret = self.secrets[volume["secret"]["secretName"]]
            items = volume["secret"].get("items") or [{"key": key, "path": key} for key in secret]
            entries = {item["path"]: secret[item["key"]].encode() for item in items}
        for path, content in entries.items():
            file = place / "..1" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        (place / "..data").symlink_to("..1")
        for top in {Path(path).parts[0] for path in entries}:
            (place / top).symlink_to(Path("..data") / top)

    def _repacked(self, text: str) -> bytes:
        """The same of what is compressed."""
        return gzip.compress(self._here(gzip.decompress(base64.b64decode(text)).decode()).encode())

    def _volume(self, name: str) -> Path:
        return self.folder / name

    def _here(self, text: str) -> str:
        """Mount paths are where their volumes are."""
        mounts = {m["mountPath"]: m["name"] for c in self._everybody() for m in c.get("volumeMounts", ())}
        for path, name in mounts.items():
            text = text.replace(path, str(self._volume(name)))
        return text

    def _command(self, container: Data, words: list[str]) -> dict[str, Any]:
        """What `subprocess` needs to run a command in a container."""
        told = {each["name"]: self._here(each["value"]) for each in container.get("env", ())}
        installed = Path(sys.executable).with_name(words[0])
        program = str(installed if installed.exists() else shutil.which(words[0]))
        return {
            "args": [*self._jail(container), program, *map(self._here, words[1:])],
            "env": {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **told},
            "cwd": "/",
        }

    def _jail(self, container: Data) -> list[str]:
        """What a command begins with to be locked up as the manifest says."""
        rights = container["securityContext"]
        if not jails():
            return []
        mounts = [mount for mount in container.get("volumeMounts", ()) if not mount.get("readOnly")]
        kept = [f"mount --bind {place} {place}; " for place in (self._volume(mount["name"]) for mount in mounts)]
        root = "mount -o remount,bind,ro /; " if rights["readOnlyRootFilesystem"] else ""
        user = f"--reuid {rights['runAsUser']} --regid {rights['runAsUser']} --clear-groups"
        return ["unshare", "-m", "sh", "-ec", f'{"".join(kept)}{root}exec setpriv {user} {_CAPS} -- "$@"', "jail"]

    def _run(self, container: Data) -> None:
        name = container["name"]
        with (self.folder / f"{name}.log").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                **self._command(container, container["command"]), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _await(self, container: Data, probe: Data) -> None:
        until = time.monotonic() + SLOW * probe["periodSeconds"] * probe["failureThreshold"]
        while not self._succeeds(container, probe):
            ended = self.processes[container["name"]].poll()
            assert ended is None, f"{container['name']} ended with {ended}: {self.log(container['name'])[-2000:]}"
            assert time.monotonic() < until, f"{container['name']} is not up: {self.log(container['name'])[-2000:]}"
            time.sleep(0.1)

    def _succeeds(self, container: Data, probe: Data) -> bool:
        limit_s = SLOW * probe["timeoutSeconds"]
        if "grpc" in probe:
            return _serves(probe["grpc"]["port"], limit_s)
        if "tcpSocket" in probe:
            return _accepts(probe["tcpSocket"]["port"], limit_s)
        return self._exec(container, probe["exec"]["command"], time.monotonic() + limit_s) == 0

    def _exec(self, container: Data, words: list[str], until: float) -> int:
        """A command inside a container, and its code; -1 when it is not over in time."""
        limit_s = max(0.1, until - time.monotonic())
        with (self.folder / f"{container['name']}.hooks.log").open("ab") as output:
            try:
                command = self._command(container, words)
                return subprocess.run(**command, stdout=output, stderr=output, timeout=limit_s, check=False).returncode
            except subprocess.TimeoutExpired:
                return -1

    def _end(self, name: str, until: float) -> None:
        """SIGTERM, and SIGKILL when the grace period is over."""
        process = self.processes[name]
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(max(2.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
        self.ended.append((name, process.wait()))


_CAPS = (
    "--inh-caps=-all,+dac_read_search --ambient-caps=+dac_read_search --bounding-set=-all,+dac_read_search "
    "--no-new-privs"
)


@functools.cache
def jails() -> bool:
    """Whether containers can be locked up here."""
    script = f"mount -o remount,bind,ro / && exec setpriv --reuid 65532 {_CAPS} true"
    try:
        return subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _serves(port: int, limit_s: float) -> bool:
    """As the kubelet asks grpc.health.v1."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        try:
            return bool(check(HealthCheckRequest(), timeout=limit_s).status == HealthCheckResponse.SERVING)
        except grpc.RpcError:
            return False


def _accepts(port: int, limit_s: float) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), limit_s).close()
    except OSError:
        return False
    return True
