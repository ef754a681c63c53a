"""Envoy's configuration, rendered from Settings.

    bootstrap(settings) -> dict     plain data, as Envoy reads it
    to_yaml(bootstrap) -> str       readable text of it
    validate(text)                  raises RenderError with what Envoy itself says against it

One request: `listener` (headers that only Envoy may set are removed) -> `filters` (flood guard, identity, admission) ->
`routes` (the order of upstreams that admission wrote, or a refusal) -> `upstream` (path, model name and key of each
attempt) -> back through `lua/upstream.lua` and `lua/tail.lua`, which note what the answer said, to `access_log`.

Data, not types: Envoy is the authority on its own configuration, and every rendered one is put before it in the tests.
For Envoys before 1.40 there is another way to the upstreams, see `gates`. Deliberately not here: Kubernetes objects
(see `k8s`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from extproc.render.clusters import clusters
from extproc.render.gates import gate_listeners
from extproc.render.listener import listener
from extproc.render.metrics import metrics_clusters, metrics_listeners
from extproc.render.probe import probe_listener
from extproc.render.shape import Data, address
from extproc.render.text import to_yaml
from extproc.render.tracing import collector_clusters
from extproc.render.upstream import secret_files, secrets
from extproc.settings import Settings

__all__ = ["RenderError", "bootstrap", "find_envoy", "to_yaml", "validate", "write_secrets"]

_VALIDATION_TIMEOUT_S = 60
_LONGEST = 1000
"""What Envoy says against a value comes last, after the whole configuration."""
_UNKNOWN = re.compile(r"^.*?Unable to parse JSON as proto \(.*?\)(?=: \{)", re.DOTALL)
"""What it says of a field or type that it does not know comes first, before the whole configuration."""
_NEWER = ("PriorityGroupClusterSpecifier", "HttpResponseLocalReplyMatchInput", "refresh_cluster_on_retry")
"""What an Envoy before 1.40 does not know of the native profile: it tells of the first that it meets."""
_OLDER = "\nEnvoy is older than 1.40? Then say gateway: {profile: classic}."
_LOG_PREFIX = re.compile(r"^(\[[^\]]*\]){4} (\[[^\]]*\] )?", re.MULTILINE)
"""Time, thread, level, logger and source line, which say nothing about the configuration."""


class RenderError(Exception):
    """Envoy does not accept a configuration, or there is no Envoy to ask."""


def bootstrap(settings: Settings) -> Data:
    """The whole configuration of one Envoy."""
    gates = gate_listeners(settings) if settings.gateway.profile == "classic" else []
    return {
        "node": {"id": "tidegate", "cluster": "tidegate"},
        "admin": {"address": address("127.0.0.1", settings.gateway.admin_port)},
        "static_resources": {
            "secrets": secrets(settings),
            "listeners": [listener(settings), probe_listener(settings), *metrics_listeners(settings), *gates],
            "clusters": [*clusters(settings), *metrics_clusters(settings), *collector_clusters(settings)],
        },
    }


def write_secrets(settings: Settings) -> None:
    """Write what Envoy has to find in `gateway.secrets_dir`. RenderError when that cannot be done."""
    try:
        for name, text in secret_files(settings).items():
            file = Path(settings.gateway.secrets_dir or "", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
    except OSError as error:
        raise RenderError(f"gateway.secrets_dir: {error}") from error


def find_envoy(name: str = "envoy") -> str:
    """Path of the Envoy binary: what TIDEGATE_ENVOY says, else beside this Python, else on PATH.

    RenderError where there is none.
    """
    if told := os.environ.get("TIDEGATE_ENVOY"):
        if shutil.which(told) is None:
            raise RenderError(f"TIDEGATE_ENVOY: {told} is no program")
        return told
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if not found:
        raise RenderError(f"{name}: not found beside {sys.executable} nor on PATH")
    return found


def validate(text: str, envoy: str = "envoy") -> None:
    """Ask Envoy whether it accepts `text`. Files it names (keys, certificates, JWKS) must exist. RenderError if not."""
    with tempfile.TemporaryDirectory(prefix="tidegate-") as folder:
        file = Path(folder) / "envoy.yaml"
        file.write_text(text, "utf-8")
        command = [find_envoy(envoy), "--mode", "validate", "-c", str(file), "-l", "error"]
        try:
            done = subprocess.run(  # noqa: S603 - our own command
                command, capture_output=True, text=True, timeout=_VALIDATION_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RenderError(f"{command[0]}: {error}") from error
    if done.returncode:
        problem = _LOG_PREFIX.sub("", done.stderr or done.stdout).strip()
        hint = _OLDER if any(word in problem for word in _NEWER) else ""
        raise RenderError(_shortened(problem) + hint)


def _shortened(problem: str) -> str:
    if len(problem) <= _LONGEST:
        return problem
    unknown = _UNKNOWN.match(problem)
    return unknown[0][:_LONGEST] if unknown else f"... {problem[-_LONGEST:]}"
