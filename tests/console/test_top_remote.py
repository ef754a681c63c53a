"""The terminal view and a real console between them: what is asked, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from extproc.cli import app
from extproc.console.asking import Access, ConsoleError
from extproc.console.top.remote import Remote
from extproc.settings import AdminSettings
from tests.console.test_top_tables import recorded
from tests.console.world import REQUEST, TOKEN, World, beside, by_token


def world() -> World:
    found = World()
    found.told = recorded("overload")
    return found


def test_what_is_shown_and_explained() -> None:
    """Without any proof, on loopback."""
    with beside(world(), AdminSettings()) as url:
        remote = Remote(Access(url.removeprefix("http://"), why_no_token="give --token-file"))
        assert remote.overview()["status"] == "shedding"
        assert remote.request(REQUEST)["id"] == REQUEST
        with pytest.raises(ConsoleError, match="no such request"):
            remote.request("unknown/../x")
        assert remote.why_not == "nothing can be done without a token: give --token-file"
        with pytest.raises(ConsoleError, match="nobody may do this here"):
            remote.act("POST", "lanes/P1/pause", {})


def test_without_a_token_it_is_told_where_one_could_be(tmp_path: Path) -> None:
    """Somebody may act there, but not who looks."""
    with beside(world(), by_token(tmp_path)) as url:
        remote = Remote(Access(url.removeprefix("http://"), why_no_token="give --token-file"))
        with pytest.raises(ConsoleError, match="give --token-file"):
            remote.act("POST", "lanes/P1/pause", {})


def test_every_action_reaches_its_lever(tmp_path: Path) -> None:
    """By the paths that keys ask for, with what is sent along."""
    seen, admin = world(), by_token(tmp_path)
    with beside(seen, admin) as url:
        remote = Remote(Access(url.removeprefix("http://"), TOKEN))
        assert remote.why_not == ""
        remote.act("POST", "lanes/P1/pause", {"for_s": 60.0, "reason": "jam"})
        remote.act("POST", "lanes/P1/resume", {})
        remote.act("POST", "upstreams/primary/trip", {})
        remote.act("POST", "upstreams/primary/reset", {})
        remote.act("POST", "upstreams/primary/out", {"for_s": 5.0})
        remote.act("POST", "upstreams/primary/in", {})
        remote.act("POST", "bypass", {"for_s": 5.0})
        assert seen.levers.bypassed
        remote.act("DELETE", "bypass", None)
        assert not seen.levers.bypassed


def test_once_prints_a_page(tmp_path: Path) -> None:
    """Plain text for scripts; a console that is not there is a message."""
    with beside(world(), AdminSettings()) as url:
        done = CliRunner().invoke(app, ["top", "--once", "--console", url], env={"COLUMNS": "90"})
    assert done.exit_code == 0, done.output
    assert "SHEDDING" in done.stdout.splitlines()[0]
    assert "\x1b" not in done.stdout
    gone = CliRunner().invoke(app, ["top", "--once", "--console", "127.0.0.1:1"])
    assert gone.exit_code == 3
    assert "no Tidegate answers at 127.0.0.1:1" in gone.stderr
    wrong = CliRunner().invoke(app, ["top", "--token-file", str(tmp_path / "none")])
    assert wrong.exit_code == 1
