"""The command line as a whole; what its commands do is tested where that is done."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from extproc.cli import app

SLOW = ("aiohttp", "google.protobuf", "grpc", "opentelemetry", "textual", "urllib.request", "uvloop")
"""What is slow to import, and what only some of the commands need."""


def test_nobody_waits_for_what_only_others_need() -> None:
    """Probes and hooks run every few seconds: a command imports what it needs when it runs, and nothing as it ends."""
    told = f"print(*sorted({{*{SLOW!r}}} & sys.modules.keys()), file=sys.stderr)"
    asked = f"import atexit, sys; atexit.register(lambda: {told}); from extproc.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", asked, "--help"], capture_output=True, text=True, check=True)
    assert "fake-provider" in done.stdout
    assert done.stderr.split() == []


@pytest.mark.parametrize("command", ["session a b", "explain a", "top --once", "bundle", "admin show"])
def test_whoever_asks_a_console_finds_it_in_the_same_way(command: str) -> None:
    """A token file that is not there is told by each in the same words, with exit status 1."""
    done = CliRunner().invoke(app, [*command.split(), "--console", "127.0.0.1:1", "--token-file", "not/there"])
    assert done.exit_code == 1
    assert done.stderr.startswith("not/there: ")
