"""A real Prometheus for a test: it reads both pages of a gateway as in production, and goes by our rules, faster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from extproc.render.monitoring import alerts_yaml
from extproc.settings import Settings
from extproc.stack import free_ports

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TIME = re.compile(r"(?<=\[)(\d+)([smhd])(?=\])|(?<=for: )(\d+)([smhd])$", re.MULTILINE)
EVERY_S = 0.5


def faster(rules: str, times: float) -> str:
    """Rules whose windows and patience are so many times shorter; no window is too short for two samples."""

    def shorter(found: re.Match[str]) -> str:
        number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
        milliseconds = int(number) * UNITS[unit] * 1000 / times
        return f"{max(milliseconds, 4 * EVERY_S * 1000 if found[1] else 1):.0f}ms"

    return _TIME.sub(shorter, rules)


@dataclass(frozen=True, slots=True)
class Prometheus:
    """One that runs."""

    url: str

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The result of a query now."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": query}, timeout=30).raise_for_status().json()
        return list(answer["data"]["result"])

    def number(self, query: str) -> float:
        """The one number that a query gives."""
        (only,) = self.ask(query)
        return float(only["value"][1])

    def fired(self, last_s: float) -> dict[str, set[str]]:
        """Alerts that fired at some time in the last seconds, and the upstreams or lanes that they were of."""
        window = f"{max(1, int(last_s * 1000))}ms"
        found: dict[str, set[str]] = {}
        for each in self.ask(f'max_over_time(ALERTS{{alertstate="firing"}}[{window}])'):
            of = each["metric"]
            found.setdefault(of["alertname"].removeprefix("Tidegate"), set()).add(
                of.get("upstream") or of.get("lane") or of.get("instance", "")
            )
        return found

    def problems(self) -> list[str]:
        """What is wrong with rules and targets."""
        groups = httpx.get(f"{self.url}/api/v1/rules", timeout=30).raise_for_status().json()["data"]["groups"]
        targets = httpx.get(f"{self.url}/api/v1/targets", timeout=30).raise_for_status().json()["data"]
        wrong = [rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")]
        return wrong + [each["lastError"] for each in targets["activeTargets"] if each["lastError"]]


@contextmanager
def prometheus(folder: Path, settings: Settings, times: float) -> Iterator[Prometheus | None]:
    """One that watches a stack while the block runs; None where there is no Prometheus here."""
    binary = shutil.which("prometheus")
    if binary is None:
        if os.environ.get("TIDEGATE_PROMETHEUS") == "required":
            pytest.fail("there is no Prometheus here, and it is required")
        yield None
        return
    assert settings.gateway.metrics_port
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    (folder / "alerts.yaml").write_text(faster(alerts_yaml(settings), times), "utf-8")
    every = f"{EVERY_S * 1000:.0f}ms"
    jobs = [
        {
            "job_name": f"tidegate{path.replace('/', '-')}", "metrics_path": path,
            "static_configs": [{"targets": [f"127.0.0.1:{settings.gateway.metrics_port}"]}],
        }
        for path in ("/metrics", "/stats/prometheus")
    ]  # fmt: skip
    timing = {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
    config = {"global": timing, "rule_files": ["alerts.yaml"], "scrape_configs": jobs}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), "utf-8")
    url = f"http://127.0.0.1:{port}"
    command = [
        binary, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with (
        (folder / "prometheus.log").open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True) as process,
    ):
        try:
            _await(url, folder, process)
            yield Prometheus(url)
        finally:
            process.terminate()


def _await(url: str, folder: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            httpx.get(f"{url}/-/ready", timeout=5).raise_for_status()
        except httpx.HTTPError:
            told = (folder / "prometheus.log").read_text("utf-8", "replace")
            assert process.poll() is None, told
            assert time.monotonic() < until, told
            time.sleep(0.1)
        else:
            return
