"""`tidegate explain`: a story for people, data for programs, and a word where nothing is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from extproc.cli import app
from extproc.console.sources import Sources
from extproc.core.events import Refused
from extproc.core.refusal import Reason
from extproc.settings import AdminSettings
from extproc.telemetry.dossiers import Dossiers
from extproc.telemetry.explain import explain, told
from tests.console.world import World, beside

CONFIG: dict[str, Any] = {
    "upstreams": {"primary": {"provider": "fake", "url": "http://127.0.0.1:1", "owned": True, "concurrency": 5}},
    "routes": [{"models": ["*"], "chain": ["primary"]}],
}
NAME = "a/b?c#d%2F\x1b[2J"
"""An id that has to be quoted with care, and is not to be printed as it is."""


class Remembers(World):
    """A console of a service that has refused one request."""

    def __init__(self) -> None:
        super().__init__()
        self.dossiers = Dossiers(5)
        self.dossiers(Refused(Reason.DRAINING, 503, request_id=NAME))

    def sources(self) -> Sources:
        return replace(super().sources(), explain=self._explain)

    def _explain(self, name: str) -> dict[str, Any] | None:
        dossier = self.dossiers.of(name)
        return None if dossier is None else explain(dossier)


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    with beside(Remembers(), AdminSettings()) as url:
        file = tmp_path / "tidegate.yaml"
        file.write_text(yaml.safe_dump({**CONFIG, "service": {"console": url.removeprefix("http://")}}))
        yield file


def run(config: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["explain", *words, "--config", str(config)])


def test_a_request_is_told_by_its_id(config: Path) -> None:
    """Whatever its client made up for one; as a story, or as all that is known."""
    story = run(config, NAME)
    assert story.exit_code == 0, story.output
    assert story.stdout.startswith("a/b?c#d%2F?[2J: refused after 0 ms: draining (Tidegate was about to stop)\n")
    assert story.stdout.isascii()
    data = run(config, NAME, "--json")
    known = json.loads(data.stdout)
    assert (known["reason"], known["ticket"]) == ("draining", "refused-1")
    assert story.stdout == told(known)
    assert run(config, "refused-1").stdout == story.stdout


def test_one_that_nobody_knows_is_an_error(config: Path) -> None:
    """In words, and nothing else; so is a service that is not there."""
    nobody = run(config, "nobody")
    assert (nobody.exit_code, nobody.stdout) == (1, "")
    assert "no such request is known, or it was too long ago" in nobody.stderr
    config.write_text(config.read_text().replace("127.0.0.1:", "127.0.0.1:1 #"))
    assert "no Tidegate answers at 127.0.0.1:1: " in run(config, "nobody").stderr
