"""Two Tidegates behind one Envoy, replaced one after the other under load: nobody notices, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import yaml

from extproc.against.command import compare
from extproc.settings import Settings
from extproc.stack import Stack, _tidegate, free_ports
from tests.e2e.conftest import PATIENCE_S, chat, fill_buckets, settings_for
from tests.e2e.doubles import CHAT, until

CLIENTS = 24
SLOTS = 16
"""Fewer than clients, so that some always wait; each Tidegate has half of them."""


@dataclass
class Pair(Stack):
    """A stack with two Tidegates. Ends them at once: what a drain does is for the tests."""

    each: list[Settings] = field(default_factory=list)

    def start_service(self) -> None:
        """Start both."""
        for rank in (0, 1):
            self.start_one(rank)

    def start_one(self, rank: int) -> None:
        """Start one, and wait until it answers."""
        config = self.workdir / f"service-{rank}.yaml"
        config.write_text(yaml.safe_dump(self.each[rank].model_dump(mode="json"), sort_keys=False), "utf-8")
        self._spawn(f"service-{rank}", [*_tidegate(), "serve", "--config", str(config)])
        self._wait(f"service-{rank}", f"http://{self.each[rank].service.console}/healthz")

    def state_of(self, rank: int) -> dict[str, Any]:
        """The state page of one."""
        with urllib.request.urlopen(f"http://{self.each[rank].service.console}/state", timeout=5) as answer:
            return dict(json.loads(answer.read()))

    def stop(self) -> None:
        """Without a drain."""
        for rank in (0, 1):
            if process := self.processes.pop(f"service-{rank}", None):
                process.kill()
                process.wait()
        super().stop()


@dataclass
class Load:
    """Clients that never pause, every second one with a stream. What did not go well is kept."""

    url: str
    served: int = 0
    wrong: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=self._ask, args=(i % 2 == 0,)) for i in range(CLIENTS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, stream: bool) -> None:  # noqa: FBT001 - one of two
        with httpx.Client(timeout=60) as client:
            while not self._over.is_set():
                try:
                    answer = client.post(self.url + CHAT, json=chat(stream=stream, max_tokens=200))
                    whole = "data: [DONE]" in answer.text if stream else answer.json()["choices"][0]["message"]
                    if answer.status_code != 200 or not whole:
                        self.wrong.append(f"{answer.status_code} {answer.text[-300:]}")
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    self.wrong.append(repr(error))
                self.served += 1


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Started, with full buckets."""
    ports = free_ports(3)
    places = [f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}"]
    settings = settings_for(
        upstreams={
            "only": {
                "owned": True,
                "concurrency": SLOTS,
                "limits": [{"tpm": 600_000, "rpm": 60_000, "burst_s": 60}],
                "fake": {"first_token_s": 0.05, "output_tokens_per_s": 150, "concurrency": SLOTS},
            }
        },
        service={"address": places[0], "addresses": places, "replicas": 2, "drain_s": 40},
        lanes={"P1": {"max_wait_s": 60}},
    )
    each = []
    for rank, (place, console) in enumerate(
        zip(places, [settings.service.console, f"127.0.0.1:{ports[2]}"], strict=True)
    ):
        own = {"address": place, "console": console, "state_file": str(tmp_path / f"levels-{rank}.json")}
        one = settings.model_copy(update={"service": settings.service.model_copy(update=own)})
        fill_buckets(one)
        each.append(one)
    with Pair(settings, tmp_path, workers=2, patience_s=PATIENCE_S, each=each) as stack:
        yield stack


def test_a_rolling_update_is_noticed_by_nobody(pair: Pair) -> None:
    """No request fails, no stream is cut; the books of all four processes together are what the provider wrote."""
    settings = pair._with_secrets()
    assert compare(f"http://127.0.0.1:{settings.gateway.admin_port}", settings) == []
    lives = []
    with Load(pair.url) as load:
        for rank in (0, 1):
            until(lambda: all(pair.state_of(each)["flying"] for each in (0, 1)), within_s=30)
            before = load.served
            lives.append(ended(pair, rank))
            pair.start_one(rank)
            until(lambda at=rank: pair.state_of(at)["flying"], within_s=30)
            assert load.served > before  # the other served meanwhile
    lives += [until(lambda at=rank: closed(pair.state_of(at)), within_s=30)["tally"] for rank in (0, 1)]
    record = pair.record("only")
    assert load.wrong == []
    assert load.served == record["served"] == sum(one["served"].get("only", 0) for one in lives)
    assert sum(one["tokens"].get("only", 0) for one in lives) == record["charged_tokens"]
    assert sum(one["unknown_usage"] for one in lives) == 0
    assert record["refused_429"] == record["aborted"] == 0
    assert record["max_in_flight"] <= SLOTS


def ended(pair: Pair, rank: int) -> dict[str, Any]:
    """End one as an orchestrator does. What it had counted in its last moments, when nothing was held any more."""
    process = pair.processes[f"service-{rank}"]
    process.send_signal(signal.SIGTERM)
    last: dict[str, Any] = {}
    while process.poll() is None:
        with contextlib.suppress(OSError):
            last = pair.state_of(rank)
        time.sleep(0.05)
    assert process.returncode == 0
    assert closed(last), last
    found: dict[str, Any] = last["tally"]
    return found


def closed(state: dict[str, Any]) -> dict[str, Any] | None:
    """The state of one if it holds nothing any more."""
    held = [key for key, counter in state["counters"].items() if counter.get("used")]
    waiting = sum(lane["requests"] for lane in state["waiting"].values())
    return None if held or waiting or state["flying"] or state["unsettled"] else state
