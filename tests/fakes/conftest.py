"""A fake provider on a free port, and clients to talk to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import cached_property
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from extproc.fakes import FakeSettings, Running, running


class Fake:
    """A running provider with clients that do not retry."""

    def __init__(self, running: Running, http: aiohttp.ClientSession, key: str, stack: AsyncExitStack) -> None:
        self.running = running
        self.http = http
        self._key = key
        self._stack = stack

    @cached_property
    def openai(self) -> openai.AsyncOpenAI:
        """The real SDK, made when it is needed: it takes long to make."""
        client = openai.AsyncOpenAI(api_key=self._key, base_url=f"{self.url}/v1", max_retries=0)
        self._stack.push_async_callback(client.close)
        return client

    @cached_property
    def anthropic(self) -> anthropic.AsyncAnthropic:
        """The other real SDK."""
        client = anthropic.AsyncAnthropic(api_key=self._key, base_url=self.url, max_retries=0)
        self._stack.push_async_callback(client.close)
        return client

    @property
    def url(self) -> str:
        """Base URL."""
        return self.running.url

    @property
    def record(self) -> Any:
        """The provider's record, in process."""
        return self.running.provider.record

    def chat(self, content: str = "hi", *, headers: dict[str, str] | None = None, **members: Any) -> Any:
        """Post a chat completion without an SDK: an aiohttp request to enter."""
        body = {"model": "gpt-x", "max_tokens": 20, "messages": [{"role": "user", "content": content}], **members}
        return self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)

    def message(self, content: str = "hi", *, headers: dict[str, str] | None = None, **members: Any) -> Any:
        """Post an Anthropic message without an SDK."""
        body = {"model": "claude-x", "max_tokens": 20, "messages": [{"role": "user", "content": content}], **members}
        return self.http.post(f"{self.url}/v1/messages", json=body, headers=headers)

    async def report(self) -> dict[str, Any]:
        """Read the record as another process would."""
        async with self.http.get(f"{self.url}/admin/record") as response:
            return await response.json()  # type: ignore[no-any-return]

    async def admin(self, what: str, order: Any, method: str = "POST") -> tuple[int, Any]:
        """Give an order; return status and body."""
        async with self.http.request(method, f"{self.url}/admin/{what}", json=order) as response:
            return response.status, await response.json()


StartFake = Callable[..., Awaitable[Fake]]


@pytest.fixture
async def start_fake() -> AsyncIterator[StartFake]:
    """Return a function that starts a provider with the given settings; all end with the test."""
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> Fake:
            fake = await stack.enter_async_context(running(FakeSettings(**{"name": "primary", "port": 0, **settings})))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            return Fake(fake, session, settings.get("key") or "sk-test", stack)

        yield start


@pytest.fixture
async def fake(start_fake: StartFake) -> Fake:
    """Return a provider without limits that answers at once."""
    return await start_fake()


def events(text: str) -> list[Any]:
    """Return the data of all events of a stream, parsed where it is JSON."""
    datas = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(data) if data.startswith("{") else data for data in datas]
