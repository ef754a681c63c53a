"""The config changes under load on a real Envoy, by file, by link and by SIGHUP: nobody who is here notices but by what
changed for the better.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from extproc.stack import Stack
from tests.e2e.conftest import chat
from tests.e2e.doubles import CHAT, running

UPSTREAMS: dict[str, Any] = {
    "few": {"concurrency": 1, "fake": {"first_token_s": 0.01, "output_tokens_per_s": 40, "tokens_per_event": 1}},
    "many": {"concurrency": 200, "fake": {"first_token_s": 0.01, "output_tokens_per_s": 4000}},
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A model with one place, and one with plenty."""
    routes = [{"models": [name], "chain": [name], "acknowledge_unowned": True} for name in UPSTREAMS]
    lanes = {"P0": {"max_wait_s": 100}, "P1": {"max_wait_s": 100}, "P2": {"max_wait_s": 110}}
    with running(tmp_path_factory.mktemp("reload"), upstreams=deepcopy(UPSTREAMS), routes=routes, lanes=lanes) as stack:
        yield stack


def raw(stack: Stack) -> dict[str, Any]:
    """What the service was started with: the stack adds a file for its token."""
    return stack.settings.model_dump(mode="json") | {"admin": {"token_file": str(stack.token_file)}}


def replaced(path: Path, text: str) -> None:
    """As an editor does it: a new file under the same name."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)


def metrics(stack: Stack) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples of the page of metrics by name and labels' values."""
    page = httpx.get(f"http://{stack.settings.service.console}/metrics").raise_for_status().text
    families = text_string_to_metric_families(page)
    return {(one.name, tuple(one.labels.values())): one.value for family in families for one in family.samples}


async def state(stack: Stack) -> dict[str, Any]:
    return await asyncio.to_thread(stack.state)


async def until(stack: Stack, holds: Callable[[dict[str, Any]], Any], within_s: float = 60.0) -> dict[str, Any]:
    """Wait for a state of the service."""
    end = time.monotonic() + within_s
    while not holds(found := await state(stack)):
        assert time.monotonic() < end, found
        await asyncio.sleep(0.05)
    return found


def test_a_reload_under_load_loses_nobody(stack: Stack) -> None:
    """A held request goes by the new limit, a stream goes on, constant traffic sees no error; a bad file changes
    nothing, and what cannot be followed is told by name.
    """
    asyncio.run(_under_load(stack))


async def _under_load(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=100, limits=httpx.Limits(max_connections=100)) as http:
        gate = Gate(stack, http)
        stop = asyncio.Event()
        load = asyncio.create_task(_constantly(lambda: gate.ask("many"), stop))
        stream = asyncio.create_task(gate.stream())
        await gate.flows_on()
        held = [asyncio.create_task(gate.ask("few")) for _ in range(3)]
        await until(stack, lambda found: found["waiting"]["P1"]["requests"] == 3)
        await gate.refuses_a_mistake()
        assert not any(task.done() for task in held)
        await gate.follows_a_file(held)
        await gate.follows_a_link()
        limited = await gate.follows_a_signal()
        stop.set()
        results = await load
        await gate.flows_on()
        assert not stream.done()
        stream.cancel()
        assert len(results) > 20
        assert set(results) - {200} <= {429}
        assert results.count(429) <= limited, "only while its tenant might have one at a time"
        found = metrics(stack)
        assert found["tidegate_config_reloads_total", ("refused",)] == 1
        assert found["tidegate_config_reloads_total", ("applied",)] == gate.told["applied"]
        assert time.time() - 100 < found["tidegate_config_last_reload_timestamp_seconds", ()] <= time.time()
        assert found["tidegate_admitted_total", ("P1",)] >= results.count(200) + 6


class Gate:
    """The gateway under load, its config file, and what was told of reloads so far."""

    def __init__(self, stack: Stack, http: httpx.AsyncClient) -> None:
        self.stack, self.http = stack, http
        self.path, self.raw = stack.workdir / "tidegate.yaml", raw(stack)
        self.told = {"applied": 0, "refused": 0}
        self.events = 0
        self.refused = 0

    async def ask(self, model: str) -> int:
        answer = await self.http.post(CHAT, json=chat(model=model, max_tokens=8))
        self.refused += answer.status_code == 429
        return answer.status_code

    async def stream(self) -> None:
        """An answer that goes on for longer than anything here."""
        async with self.http.stream("POST", CHAT, json=chat(model="few", max_tokens=60_000, stream=True)) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                self.events += line.startswith("data: {")

    async def flows_on(self) -> None:
        """The stream has gone on by some events."""
        end, before = time.monotonic() + 60, self.events
        while self.events < before + 5:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)

    async def reloaded(self, result: str) -> dict[str, Any]:
        self.told[result] += 1
        found = await until(self.stack, lambda found: found["config"]["reloads"] == self.told)
        await self.flows_on()
        return dict(found["config"])

    def text(self) -> str:
        return yaml.safe_dump(self.raw, sort_keys=False)

    async def refuses_a_mistake(self) -> None:
        """In the words of `check`, and nothing has changed."""
        version = (await state(self.stack))["config"]["version"]
        replaced(self.path, yaml.safe_dump({**self.raw, "lanes": {"P1": {"max_wait_s": "soon"}}}))
        told = await self.reloaded("refused")
        assert [line.partition(": ")[2] for line in told["problems"]] == [
            "lanes.P1.max_wait_s: Input should be a valid number, unable to parse string as a number"
        ]
        assert told["version"] == version
        assert metrics(self.stack)["tidegate_config_info", (version,)] == 1

    async def follows_a_file(self, held: list[asyncio.Task[int]]) -> None:
        """There are more places at once, for who waits. What Envoy would have to be told waits by name."""
        version = (await state(self.stack))["config"]["version"]
        self.raw["upstreams"]["few"]["concurrency"] = 3
        self.raw["gateway"]["idle_timeout_s"] = 700.0
        replaced(self.path, self.text())
        told = await self.reloaded("applied")
        assert told["waiting"] == [
            {"change": "gateway.idle_timeout_s: 960.0 -> 700.0", "needs": "needs Envoy's config rendered again"}
        ]
        assert (told["version"] != version, told["problems"]) == (True, [])
        assert await asyncio.gather(*held) == [200, 200, 200]

    async def follows_a_link(self) -> None:
        """The swap of a link above it, as a ConfigMap's volume does it."""
        self.raw["upstreams"]["few"]["concurrency"] = 1
        del self.raw["gateway"]["idle_timeout_s"]
        swapped(self.path, self.text(), "first")
        assert (await self.reloaded("applied"))["waiting"] == []
        held = [asyncio.create_task(self.ask("few")) for _ in range(2)]
        await until(self.stack, lambda found: found["waiting"]["P1"]["requests"] == 2)
        self.raw["upstreams"]["few"]["concurrency"] = 2
        swapped(self.path, self.text(), "second")
        await self.reloaded("applied")
        assert await asyncio.gather(*held) == [200, 200]

    async def follows_a_signal(self) -> int:
        """Read at once, whether it differs or not. A tenant gets a limit, and loses it: how many that refused."""
        version = (await state(self.stack))["config"]["version"]
        self.stack.kill("service", signal.SIGHUP)
        assert (await self.reloaded("applied"))["version"] == version
        before = self.refused
        for concurrency in (1, None):
            self.raw["tenants"] = {"default": {"concurrency": concurrency}}
            replaced(self.path.resolve(), self.text())
            self.stack.kill("service", signal.SIGHUP)
            await until(self.stack, lambda found, is_set=concurrency is not None: _limits(found) is is_set)
            await self.flows_on()
        self.told = (await state(self.stack))["config"]["reloads"]
        return self.refused - before + 4  # those that are answered meanwhile


def _limits(found: dict[str, Any]) -> bool:
    """Whether the tenant has a limit; one that is over is only counted, until what it counts has come back."""
    counter = found["counters"].get("tenant/default/slots")
    return counter is not None and not counter.get("shadow")


async def _constantly(ask: Callable[[], Awaitable[int]], stop: asyncio.Event) -> list[int]:
    """Some callers who ask again and again; the status of every answer."""

    async def one() -> list[int]:
        found = []
        while not stop.is_set():
            found.append(await ask())
            await asyncio.sleep(0.02)
        return found

    return [status for each in await asyncio.gather(*(one() for _ in range(4))) for status in each]


def swapped(path: Path, text: str, name: str) -> None:
    """A volume's folder whose `..data` names the version in force; the file is a link through it."""
    folder = path.parent / "volume"
    (folder / name).mkdir(parents=True)
    (folder / name / path.name).write_text(text)
    link = folder / "..new"
    link.symlink_to(name)
    link.replace(folder / "..data")
    if not path.is_symlink():
        path.unlink()
        path.symlink_to(folder / "..data" / path.name)
