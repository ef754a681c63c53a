"""An upstream's key is changed while requests run: nobody notices, and the next request has the new one."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from extproc.bundle import collect
from extproc.console.asking import access
from tests.e2e.conftest import Gate, chat
from tests.e2e.doubles import CHAT, Upstream, crowd

OLD, NEW = "vendors-old-key-4711", "vendors-new-key-0815"


@pytest.fixture(scope="module")
def vendor() -> Iterator[Upstream]:
    """It keeps every header it gets."""
    with Upstream().listening() as vendor:
        yield vendor


@pytest.mark.parametrize("renamed", ["key", "..data"])
async def test_a_key_that_is_replaced_is_in_use_at_once(
    gate: Gate, vendor: Upstream, tmp_path: Path, renamed: str
) -> None:
    """By renaming the file, or the link above it as Kubernetes does; every request has one of the two keys.

    Neither is in what is packed for who is to help, though Envoy's own configuration is.
    """
    vendor.received.clear()
    folder = tmp_path / "mounted"
    (folder / "old").mkdir(parents=True)
    (folder / "old" / "key").write_text(OLD)
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
            (folder / "next").write_text(NEW)
            (folder / "next").rename(folder / "key")
        else:
            (folder / "new").mkdir()
            (folder / "new" / "key").write_text(NEW)
            (folder / "..next").symlink_to("new")
            (folder / "..next").rename(folder / "..data")
        answers += await asyncio.gather(*running)

        async def asked_with() -> bytes:
            answers.append(await clients.ask(chat("again"), CHAT))
            return vendor.last().get("authorization") or b""

        while await asked_with() != f"Bearer {NEW}".encode():
            assert len(answers) < 500
            await asyncio.sleep(0.02)
    assert {one.get("authorization") for one in vendor.received} == {f"Bearer {key}".encode() for key in (OLD, NEW)}
    assert {answer.status for answer in answers} == {200}
    bundle = await asyncio.to_thread(collect, stack.settings, access(stack.settings))
    assert bundle.missing == {}
    assert '"vendor"' in bundle.files["envoy/config_dump.json"]
    told = "\n".join(bundle.files.values())
    assert not [key for key in (OLD, NEW) if key in told or b64encode(key.encode()).decode().rstrip("=") in told]
