"""Following the config file: what counts as a change of it, and what is told of it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc import up
from extproc.reloading import Reloading, Watch
from extproc.settings import Settings, load
from extproc.settings.loading import MOST_BYTES
from extproc.stack import Stack

RAW: dict[str, Any] = {
    "upstreams": {"a": {"provider": "groq", "concurrency": 1}},
    "routes": [{"models": ["m"], "chain": ["a"], "acknowledge_unowned": True}],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A config file."""
    return written(tmp_path / "tidegate.yaml")


def written(path: Path, **sections: Any) -> Path:
    """A file of these sections over the usual ones, by another under its name."""
    beside = path.with_suffix(".new")
    beside.write_text(yaml.safe_dump({**RAW, **sections}))
    beside.replace(path)
    return path


def test_another_content_counts_once_it_holds_still(path: Path) -> None:
    """Not another file with the same content, nor none; and each content once."""
    watch = Watch(path)
    assert [watch.changed() for _ in range(3)] == [False] * 3
    written(path)
    assert [watch.changed() for _ in range(3)] == [False] * 3, "another file, the same content"
    written(path, observe=0.5)
    assert [watch.changed() for _ in range(4)] == [False, True, False, False]
    path.write_text("half of a fi")
    assert not watch.changed()
    path.write_text("half of a file that goes on")
    assert [watch.changed() for _ in range(3)] == [False, True, False]
    path.unlink()
    assert [watch.changed() for _ in range(3)] == [False] * 3
    written(path, observe=0.7)
    assert [watch.changed() for _ in range(3)] == [False, True, False]


def test_the_swap_of_a_link_above_it_is_a_change(tmp_path: Path) -> None:
    """As a volume of a ConfigMap is brought up to date: neither the file's name nor its folder is touched."""
    for version in (1, 2):
        (tmp_path / f"v{version}").mkdir()
        written(tmp_path / f"v{version}" / "tidegate.yaml", observe=version / 10)
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "tidegate.yaml").symlink_to("..data/tidegate.yaml")
    watch = Watch(tmp_path / "tidegate.yaml")
    (tmp_path / "..new").symlink_to("v2")
    (tmp_path / "..new").replace(tmp_path / "..data")
    assert [watch.changed() for _ in range(3)] == [False, True, False]


def test_what_was_read_on_demand_is_no_change_any_more(path: Path) -> None:
    """Whoever has read it need not be told again."""
    watch = Watch(path)
    written(path, observe=0.5)
    assert watch.read()
    assert [watch.changed() for _ in range(3)] == [False] * 3


class Bench:
    """A file that is followed, and what was to hold. `seconds`: between looks."""

    def __init__(self, path: Path | None, seconds: float = 0.01) -> None:
        self.started = load(path)
        self.held: list[Settings] = []
        self.prepared: list[Settings] = []
        self.reloading = Reloading(self.started, path, self.prepared.append, self.apply, seconds)

    async def apply(self, settings: Settings) -> None:
        assert self.prepared[-1] == settings
        self.held.append(settings)

    async def until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(120):
            while not holds():  # noqa: ASYNC110 - a look now and then will do
                await asyncio.sleep(0.01)


async def test_a_changed_file_holds_and_a_bad_one_does_not(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each is told once, with its words; what was refused is forgotten with the next that holds."""
    bench = Bench(path)
    told, running = bench.reloading.told, asyncio.create_task(bench.reloading.run())
    first = told.version
    written(path, observe=0.5)
    await bench.until(lambda: told.applied == 1)
    assert ([each.observe for each in bench.held], told.version != first) == ([0.5], True)
    assert "observe: 0.0 -> 0.5" in caplog.text
    written(path, observe="much")
    await bench.until(lambda: told.refused == 1)
    assert told.problems == [f"{path}: observe: Input should be a valid number, unable to parse string as a number"]
    assert told.problems[0] in caplog.text
    written(path, observe=0.0)
    await bench.until(lambda: told.applied == 2)
    assert (told.version, told.problems, len(bench.held)) == (first, [], 2)
    running.cancel()


async def test_what_has_to_wait_is_told_once_and_until_it_is_taken_back(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By name and with what it needs. What can be followed beside it is."""
    bench = Bench(path)
    told = bench.reloading.told
    written(path, observe=0.5, gateway={"port": 5}, service={"watchdog_s": 9})
    assert await bench.reloading.reload(path)
    waiting = [
        {"change": "gateway.port: 10000 -> 5", "needs": "needs Envoy's config rendered again"},
        {"change": "service.watchdog_s: 5.0 -> 9.0", "needs": "needs a restart"},
    ]
    assert told.state()["waiting"] == waiting
    assert (bench.held[0].observe, bench.held[0].gateway.port, bench.held[0].service.watchdog_s) == (0.5, 10000, 5.0)
    written(path, observe=0.6, gateway={"port": 5}, service={"watchdog_s": 9})
    assert await bench.reloading.reload(path)
    assert told.state()["waiting"] == waiting
    assert caplog.text.count("gateway.port: 10000 -> 5 is kept back, it needs Envoy's config rendered again") == 1
    written(path, observe=0.6)
    assert await bench.reloading.reload(path)
    assert (told.state()["waiting"], told.applied, len(bench.held)) == ([], 3, 2), "then nothing differs"


async def test_very_many_changes_are_not_all_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log has one line of a length that can be read; and it has no keys, nor what they are made of."""
    bench = Bench(written(path, tenants={"one": {"key_sha256": ["ab" * 32]}}))
    tenants = {f"t{number:02}": {} for number in range(60)}
    written(path, tenants={"one": {"key_sha256": ["cd" * 32, "ef" * 32]}, **tenants})
    assert await bench.reloading.reload(path)
    assert "tenants.one.key_sha256: 1 -> 2, other keys; tenants.t00: added" in caplog.text
    assert "tenants.t48: added; and 11 more" in caplog.text
    assert not any(digest * 4 in caplog.text for digest in ("ab", "cd", "ef"))


def put_instead(path: Path, other: str) -> None:
    """Something else under its name. Bombs are short, and say more than any memory holds."""
    beside, names = path.with_suffix(".other"), "abcdefghijkl"
    match other:
        case "pipe":
            os.mkfifo(beside)
        case "folder":
            beside.mkdir()
            path.unlink()
        case "far too large":
            with beside.open("wb") as file:
                file.truncate(MOST_BYTES + 1)
        case "bomb" | "merged bomb":
            nine = [", ".join(f"k{i}: *{a}" for i in range(9)) for a in names]
            if other == "merged bomb":
                nine = [f"<<: [{', '.join([f'*{a}'] * 9)}]" for a in names]
            rows = [f"{name}: &{name} {{{held}}}" for name, held in zip(names[1:], nine, strict=False)]
            beside.write_text("\n".join(["a: &a {x: 1}", *rows]))
        case _:
            if path.is_dir():
                path.rmdir()
            return
    beside.replace(path)


@pytest.mark.parametrize("other", ["pipe", "folder", "far too large", "bomb", "merged bomb"])
async def test_what_is_no_config_is_refused_and_not_waited_for(path: Path, other: str) -> None:
    """Also when a signal asks for it. The service goes on, and so does the following."""
    bench = Bench(path)
    told, running = bench.reloading.told, asyncio.create_task(bench.reloading.run())
    await asyncio.sleep(0.05)
    put_instead(path, other)
    await bench.until(lambda: told.refused == 1)
    assert told.problems[0].startswith(str(path))
    bench.reloading.ask()
    await bench.until(lambda: told.refused == 2)
    put_instead(path, "nothing")
    written(path, observe=0.5)
    await bench.until(lambda: told.applied == 1)
    running.cancel()


async def test_others_go_on_while_settings_are_read(path: Path) -> None:
    """Who reads lets go of the interpreter more often than usual."""
    bench = Bench(path)
    seen: list[float] = []
    prepare = bench.reloading._prepare
    bench.reloading._prepare = lambda settings: (seen.append(sys.getswitchinterval()), prepare(settings))
    usual = sys.getswitchinterval()
    await bench.reloading.reload(path)
    assert [interval < usual / 5 for interval in seen] == [True]
    assert sys.getswitchinterval() == usual


async def test_a_signal_reads_it_at_once(path: Path) -> None:
    """Also when nothing has changed, and when it is not there."""
    bench = Bench(path, seconds=1000)
    told, running = bench.reloading.told, asyncio.create_task(bench.reloading.run())
    await asyncio.sleep(0.05)
    for applied in (1, 2):
        bench.reloading.ask()
        await bench.until(lambda applied=applied: told.applied == applied)  # type: ignore[misc]
    assert bench.held == []
    await asyncio.to_thread(path.unlink)
    bench.reloading.ask()
    await bench.until(lambda: told.refused == 1)
    assert told.problems == [f"{path}: No such file or directory"]
    running.cancel()


async def test_a_mistake_of_ours_refuses_the_file_and_does_not_end_the_service(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as nothing was changed yet."""
    bench = Bench(path)

    def broken(_: Settings) -> None:
        raise RuntimeError("no such vocabulary")

    monkeypatch.setattr(bench.reloading, "_prepare", broken)
    written(path, observe=0.5)
    assert not await bench.reloading.reload(path)
    assert bench.held == []
    assert bench.reloading.told.problems == [f"{path}: cannot be prepared: RuntimeError: no such vocabulary"]


async def test_what_changed_while_it_started_is_not_missed(path: Path) -> None:
    """The file is compared with what it was started with."""
    bench = Bench(path)
    written(path, observe=0.5)
    running = asyncio.create_task(bench.reloading.run())
    await bench.until(lambda: bench.reloading.told.applied == 1)
    running.cancel()


async def test_without_a_file_there_is_nothing_to_follow(caplog: pytest.LogCaptureFixture) -> None:
    """And who asks for it is told so."""
    bench = Bench(None)
    running = asyncio.create_task(bench.reloading.run())
    bench.reloading.ask()
    await bench.until(lambda: "no config file" in caplog.text)
    assert bench.reloading.told.state()["reloads"] == {"applied": 0, "refused": 0}
    running.cancel()


def test_up_starts_a_service_again_as_its_envoy_knows_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs Envoy's config rendered again holds no more for a service that ended than for one that did not."""
    stack = Stack(load(path), tmp_path / "run")
    stack.workdir.mkdir()
    started: list[Settings] = []
    mine = stack.workdir / "tidegate.yaml"
    monkeypatch.setattr(Stack, "start_service", lambda _: started.append(load(mine, {})))
    written(path, observe=0.5, service={"address": "127.0.0.1:10903"})
    up.follow(stack, path)
    up.restart(stack)
    more = {"a": RAW["upstreams"]["a"], "b": RAW["upstreams"]["a"]}
    written(path, upstreams=more, routes=[{**RAW["routes"][0], "chain": ["b"]}])
    up.follow(stack, path)
    up.restart(stack)
    assert [(each.observe, each.service.address) for each in started] == [
        (0.5, "127.0.0.1:10003"),
        (0.0, "127.0.0.1:10003"),
    ]
    without = started[1].model_copy(update={"admin": stack.settings.admin})  # the stack adds a file for its token
    assert without == stack.settings, "nothing of it makes sense without what Envoy does not know"


def test_up_hands_a_changed_file_to_its_service(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake is told, and the service's own file stays as it was."""
    stack = Stack(load(path), tmp_path / "run")
    stack.workdir.mkdir()
    written(path, observe=0.5)
    up.follow(stack, path)
    mine = stack.workdir / "tidegate.yaml"
    assert load(mine, {}).observe == 0.5
    written(path, observe="much")
    up.follow(stack, path)
    assert load(mine, {}).observe == 0.5
    told = capsys.readouterr().out
    assert "has changed" in told
    assert "observe: Input should be a valid number" in told
    assert os.listdir(stack.workdir) == ["tidegate.yaml"]  # noqa: PTH208 - its names
