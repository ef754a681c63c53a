"""An upstream's key is changed while requests run: nobody notices, and the next request has the new one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Gate, chat
from tests.e2e.doubles import CHAT, Upstream, crowd


@pytest.fixture(scope="module")
def vendor() -> Iterator[Upstream]:
    """It keeps every header it gets."""
    with Upstream().listening() as vendor:
        yield vendor


@pytest.mark.parametrize("renamed", ["key", "..data"])
async def test_a_key_that_is_replaced_is_in_use_at_once(
    gate: Gate, vendor: Upstream, tmp_path: Path, renamed: str
) -> None:
    """By renaming the file, or the link above it as Kubernetes does; every request has one of the two keys."""
    vendor.received.clear()
    folder = tmp_path / "mounted"
    (folder / "old").mkdir(parents=True)
    (folder / "old" / "key").write_text("sk-old")
    (folder / "..data").symlink_to("old")
    (folder / "key").symlink_to("..data/key")
    stack = gate(
        gateway={"secrets_dir": str(tmp_path / "own")} if renamed == "key" else {},
        upstreams={
            "vendor": {
                "provider": "openai", "url": f"http://127.0.0.1:{vendor.port}", "concurrency": 99,
                "key_file": str(folder / "key"), "follow_headers": False,
            }
        },
    )  # fmt: skip
    async with crowd(stack) as clients:
        answers = [await clients.ask(chat(f"{i}"), CHAT) for i in range(3)]
        running = [asyncio.create_task(clients.ask(chat(f"{i}"), CHAT)) for i in range(20)]
        if renamed == "key":
            (folder / "next").write_text("sk-new")
            (folder / "next").rename(folder / "key")
        else:
            (folder / "new").mkdir()
            (folder / "new" / "key").write_text("sk-new")
            (folder / "..next").symlink_to("new")
            (folder / "..next").rename(folder / "..data")
        answers += await asyncio.gather(*running)

        async def asked_with() -> bytes:
            answers.append(await clients.ask(chat("again"), CHAT))
            return vendor.last().get("authorization") or b""

        while await asked_with() != b"Bearer sk-new":
            assert len(answers) < 500
            await asyncio.sleep(0.02)
    assert {one.get("authorization") for one in vendor.received} == {b"Bearer sk-old", b"Bearer sk-new"}
    assert {answer.status for answer in answers} == {200}
