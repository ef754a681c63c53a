"""`tidegate admin`: what it asks for, what it prints, and what it says when it may not or cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import trustme
import typer
import yaml
from typer.testing import CliRunner, Result

from extproc.cli import app
from extproc.cli.admin import levers_told, seconds
from extproc.console.terminal import harmless
from tests.console.world import TOKEN, World, beside, by_token

CONFIG: dict[str, Any] = {
    "upstreams": {"primary": {"provider": "fake", "url": "http://127.0.0.1:1", "owned": True, "concurrency": 5}},
    "routes": [{"models": ["*"], "chain": ["primary"]}],
}


class Here:
    """A console, and the config of the Tidegate that it is part of."""

    def __init__(self, folder: Path, url: str, world: World) -> None:
        self.folder, self.world = folder, world
        self.console = url.removeprefix("http://").removeprefix("https://")
        self.config = self.write(token_file=str(folder / "token"))

    def write(self, **admin: str) -> Path:
        file = self.folder / "tidegate.yaml"
        file.write_text(yaml.safe_dump({**CONFIG, "service": {"console": self.console}, "admin": admin}))
        return file

    def run(self, *words: str, config: bool = True, **env: str) -> Result:
        more = ["--config", str(self.config)] if config else []
        return CliRunner().invoke(app, ["admin", *words, *more], env={"TIDEGATE_TOKEN": None, **env})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    monkeypatch.chdir(tmp_path)
    world = World()
    with beside(world, by_token(tmp_path)) as url:
        yield Here(tmp_path, url, world)


def test_levers_are_moved_and_told(here: Here) -> None:
    """One by one, by whoever has the config's token; `show` tells what is moved, `audit` who moved it."""
    assert here.run("show").stdout == "nothing is moved\n"
    for words, done in (
        (["pause", "P2", "--for", "15m", "--reason", "rush"], ("pause", "P2", 900)),
        (["resume", "P2"], ("resume", "P2")),
        (["out", "primary", "--for", "90"], ("take_out", "primary", 90)),
        (["in", "primary"], ("put_back", "primary")),
        (["trip", "primary"], ("trip", "primary")),
        (["reset", "primary"], ("reset", "primary")),
        (["bypass", "--for", "2h"], ("bypass", 7200)),
        (["bypass", "--end"], ("no_bypass",)),
        (["drain"], ("drain",)),
        (["drain", "--end"], ("undrain",)),
        (["set", "lanes.P2.max_requests", "50"], ("change", "lanes.P2.max_requests", 50, None)),
    ):
        told = here.run(*words)
        assert told.exit_code == 0, told.output
        assert here.world.levers.done[-1] == ("token", *done)
    assert "lanes.P2.max_requests is 50, not 1000, until undone (id c11)" in told.stdout
    assert here.run("revert", "c11").stdout == "nothing is moved\n"
    lines = here.run("audit").stdout.splitlines()
    assert len(lines) == 12
    assert lines[-1].split("  ")[1:] == [
        "done",
        "pause_lane",
        "lane=P2 for_s=900.0",
        "by token from 127.0.0.1",
        '"rush"',
    ]
    assert len(here.run("audit", "--limit", "3").stdout.splitlines()) == 3
    assert json.loads(here.run("pause", "P0", "--json").stdout)["lanes"]["P0"]["paused"] is True


def test_the_log_is_shown_and_changed(here: Here) -> None:
    """What is not given stays as it is."""
    assert here.run("log").stdout == "level warning, waits from 10 s on, 100% of such lines\n"
    assert here.run("log", "--level", "debug", "--sample", "0.5").stdout.startswith(
        "level debug, waits from 10 s on, 50%"
    )
    assert here.world.log == {"level": "debug", "slow_s": 10.0, "sample": 0.5}
    wrong = here.run("log", "--level", "loud")
    assert (wrong.exit_code, wrong.stdout) == (1, "")
    assert "level: " in wrong.stderr


def test_where_the_token_is_from(here: Here, tmp_path: Path) -> None:
    """--token-file before TIDEGATE_TOKEN before the config, or what `tidegate up` has made in this folder; without any,
    what would do is told.
    """
    other = tmp_path / "other"
    other.write_text("x" * 32)
    assert "not the token" in here.run("drain", "--token-file", str(other), TIDEGATE_TOKEN=TOKEN).stderr
    assert "not the token" in here.run("drain", TIDEGATE_TOKEN="y" * 32).stderr
    here.write(token_file=str(other))
    assert here.run("drain", TIDEGATE_TOKEN=TOKEN).exit_code == 0
    assert here.run("drain", "--token-file", str(tmp_path / "token"), TIDEGATE_TOKEN="y" * 32).exit_code == 0
    here.write()
    refused = here.run("drain")
    assert refused.exit_code == 1
    assert "send the token" in refused.stderr
    assert "(give --token-file or TIDEGATE_TOKEN)" in refused.stderr
    assert here.run("show").exit_code == 0
    made = tmp_path / "run" / "admin.token"
    made.parent.mkdir()
    made.write_text(TOKEN)
    assert here.run("drain").exit_code == 0
    here.write(token_file=str(tmp_path / "gone"))
    assert "gone: No such file" in here.run("drain").stderr
    assert "gone2: No such file" in here.run("drain", "--token-file", str(tmp_path / "gone2")).stderr
    assert "TIDEGATE_TOKEN" in here.run("drain", TIDEGATE_TOKEN="no\ntoken").stderr


def test_what_cannot_be_done_is_one_line(here: Here) -> None:
    """An unknown lane, a value that cannot be, a time that is none."""
    for words, why in (
        (["pause", "P/9"], "no such lane: P/9"),
        (["set", "lanes.P2.max_requests", "0"], "must be greater than 0"),
        (["revert", "never"], "no such change"),
        (["pause", "\x1b[2J\u202e"], r"no such lane: \x1b[2J\u202e"),
    ):
        told = here.run(*words)
        assert (told.exit_code, told.stdout) == (1, "")
        assert why in told.stderr
        assert len(told.stderr.splitlines()) == 1
    assert here.run("pause", "P2", "--for", "soon").exit_code == 2
    assert here.world.levers.done == []


def test_a_console_elsewhere(here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By host:port or URL, with no config at all."""
    monkeypatch.chdir(tmp_path.parent)
    for place in (here.console, f"http://{here.console}", f"http://{here.console}/"):
        assert here.run("show", "--console", place, config=False).stdout == "nothing is moved\n"
    assert here.run("pause", "P1", "--console", here.console, config=False, TIDEGATE_TOKEN=TOKEN).exit_code == 0


def test_over_tls(tmp_path: Path) -> None:
    """The config's own certificate is trusted and no other, but by --ca-file; a client's certificate proves it, too."""
    ca, people = trustme.CA(), trustme.CA()
    names = {}
    for name, authority in (("server", ca), ("other", ca), ("mine", people)):
        cert = authority.issue_cert("localhost")
        names[name] = str(tmp_path / f"{name}.pem"), str(tmp_path / f"{name}.key")
        Path(names[name][0]).write_bytes(b"".join(part.bytes() for part in cert.cert_chain_pems))
        cert.private_key_pem.write_to_path(names[name][1])
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    people.cert_pem.write_to_path(str(tmp_path / "people.pem"))
    tls = {"cert_file": names["server"][0], "key_file": names["server"][1]}
    world = World()
    with beside(world, by_token(tmp_path, **tls, client_ca_file=str(tmp_path / "people.pem"))) as url:
        here = Here(tmp_path, url, world)
        here.write(token_file=str(tmp_path / "token"), **tls)
        assert here.run("drain").exit_code == 0
        here.write(**tls)
        assert here.run("drain").exit_code == 1
        mine = ["--client-cert-file", names["mine"][0], "--client-key-file", names["mine"][1]]
        assert here.run("drain", *mine).exit_code == 0
        place = here.console.replace("127.0.0.1", "https://localhost")
        named = ["--console", place, "--ca-file", str(tmp_path / "ca.pem")]
        assert here.run("show", *named, config=False).exit_code == 0
        assert "certificate" in here.run("show", "--console", place, "--ca-file", str(tmp_path / "people.pem")).stderr
        assert (
            "(--ca-file says whose certificates to trust)" in here.run("show", "--console", place, config=False).stderr
        )
        assert (
            here.run("show", "--console", place, "--ca-file", "gone.pem").stderr
            == "gone.pem: No such file or directory\n"
        )
        ca.cert_pem.write_to_path(str(tmp_path / "bare.pem"))
        assert here.run("show", "--client-cert-file", "bare.pem").stderr.startswith("bare.pem: ")
        here.write(cert_file=names["other"][0], key_file=names["other"][1])
        assert "certificate" in here.run("show").stderr
    assert [what[0].split(",")[0].split("=")[0] for what in world.levers.done] == ["token", "O"]


def test_times() -> None:
    """As people write them."""
    assert [seconds(text) for text in ("90", "90s", "1.5m", "2h", "1d", None)] == [90, 90, 90, 7200, 86400, None]
    for text in ("", "0", "-5", "5w", "m", "1h30m", "nan"):
        with pytest.raises((typer.BadParameter, click.BadParameter)):
            seconds(text)


def test_hostile_names_do_not_move_the_cursor() -> None:
    """Whatever they are made of."""
    assert harmless("a\x1b[2J\nb\u202ec\u2028é 会") == r"a\x1b[2J\nb\u202ec\u2028é 会"
    levers = {"bypass": {"until": 0}, "draining": True, "lanes": {"\x1b": {"paused": True, "until": None}}}
    told = levers_told({**levers, "upstreams": {"x\n": {"out": True, "until": None}}, "changes": []})
    assert told.replace("\n", "").isprintable()
    assert len(told.splitlines()) == 4
