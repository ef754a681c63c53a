"""A whole Tidegate on a real Envoy for each test that asks, and the books checked when it ends."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from extproc.settings import Settings, parse
from extproc.stack import Stack, free_ports

Gate = Callable[..., Stack]

PATIENCE_S = 30.0
"""So long a busy machine may take for what is there at once on another; nobody waits for longer than it takes."""

CLIENTS_SOCKETS = r"ignore:Exception ignored in. <socket\.socket:pytest.PytestUnraisableExceptionWarning"
"""SDKs leave sockets to the collector, which finds them in whatever test comes later, in this folder or not."""

GRACE_S = 3.0
"""How long a record may take to come before books are closed without it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a real Envoy."""
    for item in items:
        if "tests/e2e" in str(item.path):
            item.add_marker(pytest.mark.e2e)
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.filterwarnings(CLIENTS_SOCKETS))


@pytest.fixture(scope="session", autouse=True)
def _hang_up() -> Iterator[None]:
    """What a file's own client keeps open to stacks that are gone is closed at the end."""
    yield
    for name, module in list(sys.modules.items()):
        client = getattr(module, "HTTP", None) if name.startswith("tests.e2e.") else None
        if isinstance(client, httpx.Client):
            client.close()


def settings_for(**overrides: Any) -> Settings:
    """Three fake providers on free ports with room to spare; `overrides` are merged over it, section by section.

    `upstreams` given replaces all; a fake's url is filled in. Without `routes` all models go to all upstreams in order.
    """
    ports = iter(free_ports(12))
    upstreams = overrides.pop("upstreams", None) or {
        "primary": {"limits": [{"tpm": 60_000_000, "rpm": 600_000}]},
        "backup": {"limits": [{"tpm": 60_000_000, "rpm": 600_000}], "models": {"gpt-5": "gpt-5-backup"}},
        "local": {"owned": True, "concurrency": 500, "models": {"gpt-5": "qwen3-32b", "claude": "qwen3-32b"}},
    }
    for upstream in upstreams.values():
        upstream.setdefault("provider", "fake")
        if upstream["provider"] == "fake":
            upstream.setdefault("url", f"http://127.0.0.1:{next(ports)}")
            upstream.setdefault("fake", {"first_token_s": 0.01, "output_tokens_per_s": 2000})
    raw: dict[str, Any] = {
        "gateway": {
            "profile": os.environ.get("TIDEGATE_PROFILE", "native"),
            "port": next(ports),
            "admin_port": next(ports),
            "probe_port": next(ports),
        },
        "service": {
            "address": f"127.0.0.1:{next(ports)}",
            "console": f"127.0.0.1:{next(ports)}",
            "restart_ramp_s": 0,
            "record_grace_s": GRACE_S,
            "drain_s": 5,
        },
        "upstreams": upstreams,
        "routes": [{"models": ["*"], "chain": list(upstreams), "acknowledge_unowned": True}],
        "other_endpoints": next(iter(upstreams)),
        "flood": {"per_key_rps": None, "per_address_rps": None},
    }
    for section, value in overrides.items():
        if isinstance(value, dict) and isinstance(raw.get(section), dict):
            raw[section] = {**raw[section], **value}
        else:
            raw[section] = value
    return parse(yaml.safe_dump(raw, sort_keys=False), "test")


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Start a stack: `gate(full=True, **overrides)`; full buckets unless told otherwise."""
    running: list[Stack] = []

    def start(*, full: bool = True, settled: bool = True, **overrides: Any) -> Stack:
        workdir = tmp_path / f"stack{len(running)}"
        workdir.mkdir()
        service = {"state_file": str(workdir / "levels.json"), **overrides.pop("service", {})}
        settings = settings_for(service=service, **overrides)
        if full:
            fill_buckets(settings)
        stack = Stack(settings, workdir, workers=1, patience_s=PATIENCE_S)
        stack.settled_at_end = settled  # type: ignore[attr-defined]
        stack.start()
        running.append(stack)
        return stack

    yield start
    try:
        for stack in running:
            if stack.settled_at_end:  # type: ignore[attr-defined]
                books_balance(stack)
    finally:
        for stack in running:
            stack.stop()


def fill_buckets(settings: Settings) -> None:
    """Let the service find full buckets, as if it had been idle for long before a restart."""
    path = settings.service.state_file
    assert path is not None
    levels = {
        f"upstream/{name}/{limit.model}/{limit.kind}": limit.capacity
        for name, upstream in settings.policy().upstreams.items()
        for limit in upstream.limits
    }
    Path(path).write_text(json.dumps({"at": time.time() - 1, "levels": levels}), "utf-8")


def books_balance(stack: Stack, within_s: float = PATIENCE_S) -> None:
    """Nothing waits, flies, is unsettled or holds a slot any more."""
    until = time.monotonic() + within_s
    while True:
        state = stack.state()
        if not state:
            assert time.monotonic() < until, "the service does not answer"
            continue
        held = {key: c["used"] for key, c in state["counters"].items() if c.get("used", 0) != 0}
        waiting = sum(lane["requests"] for lane in state["waiting"].values())
        if not held and not waiting and not state["flying"] and not state["unsettled"]:
            return
        assert time.monotonic() < until, (
            f"held {held}, waiting {waiting}, flying {state['flying']}, {state['unsettled']}"
        )
        time.sleep(0.05)


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    """Body of a small chat request."""
    return {"model": "gpt-5", "max_tokens": 16, "messages": [{"role": "user", "content": text}], **more}
