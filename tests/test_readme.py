"""README: what it links to is there, and what it names by a command is one."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command

from extproc.cli import app

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text("utf-8")
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)


def anchors() -> list[str]:
    """Of all headings, as the sites that show it make them."""
    titles = re.findall(r"^#+ (.+)$", PROSE, re.MULTILINE)
    return [re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in titles]


def test_links_lead_somewhere() -> None:
    """To a heading that there is once, or to a file; and the table of contents leaves no chapter out."""
    there = anchors()
    assert len(there) == len({*there})
    links = re.findall(r"\]\(([^)]+)\)", PROSE)
    assert len(links) > 50
    for link in links:
        file, _, anchor = link.partition("#")
        assert (ROOT / file).exists(), link
        assert not anchor or file or anchor in there, link
    top = PROSE.partition("\n## ")[0]
    chapters = {"metrics-traces-alerts"}  # is there by its sections
    chapters |= {link.removeprefix("#") for link in re.findall(r"\]\((#[^)]+)\)", top)}
    assert {*anchors()} - chapters <= {"tidegate", *runbook(there)}


def runbook(there: list[str]) -> list[str]:
    """Its sections: alerts lead there."""
    return there[there.index("runbook") + 1 : there.index("measured")]


def test_commands_that_it_shows_are_there() -> None:
    """With the options that it gives them."""
    root = get_command(app)
    shown = re.findall(r"^\$ (?:[A-Z_=:. ]* )?\.venv/bin/tidegate (.+)$", TEXT.replace("\\\n", " "), re.MULTILINE)
    assert len(shown) > 30
    for line in shown:
        words, at = re.split(r"\s[#|&>]", line)[0].split(), root
        while words and words[0] in getattr(at, "commands", {}):
            at = at.commands[words.pop(0)]
        assert at is not root, line
        known = {name for option in at.params for name in (*option.opts, *option.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, line
