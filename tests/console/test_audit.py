"""What was done can be found later, and what cannot be found later is not done."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from extproc.console import audit, guard
from extproc.console.audit import Actor, Audit, NotWrittenError
from extproc.telemetry.log import JsonLines
from tests.console.world import PROOF, World, by_token, client, served

NASTY = 'a\nb\r{"at": 1}\x1b[2J\u2028\u202e<script>alert(1)</script> "\\ \x00é'
SOMEBODY = Actor("token", "127.0.0.1")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


async def test_an_action_is_written_before_and_after(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who, from where, what, with which arguments, why and when; the file is for its owner alone."""
    file, world = tmp_path / "audit.jsonl", World()
    console = served(world, by_token(tmp_path, audit_file=str(file)))
    async with console as (address, _), client(f"http://{address}", headers=PROOF) as http:
        with caplog.at_level(logging.INFO, "tidegate.audit"):
            body = {"for_s": 60, "reason": "too much batch"}
            assert (await http.post("/api/v1/lanes/P2/pause", json=body)).status_code == 200
            assert (await http.post("/api/v1/lanes/nope/pause", json={})).status_code == 404
            world.levers.broken = RuntimeError("boom")
            assert (await http.post("/api/v1/drain")).status_code == 500
        told = (await http.get("/api/v1/audit")).json()["actions"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    begun, done, _, failed, _, broken = lines(file)
    assert begun["result"] == "begun"
    assert done == begun | {"result": "done"}
    expected = {"who": "token", "from": "127.0.0.1", "action": "pause_lane", "reason": "too much batch"}
    assert done.items() >= {**expected, "arguments": {"lane": "P2", "for_s": 60}}.items()
    assert failed.items() >= {"result": "failed", "why": "no such lane: nope", "arguments": {"lane": "nope"}}.items()
    assert (broken["action"], broken["result"], broken["why"]) == ("drain", "failed", "RuntimeError")
    assert told == [broken, failed, done]
    assert [record.message for record in caplog.records if record.name == "tidegate.audit"] == [
        "pause_lane done", "pause_lane failed", "drain failed",
    ]  # fmt: skip


async def test_what_cannot_be_written_down_is_not_done(tmp_path: Path) -> None:
    """A folder that is gone, a full disk, no right to write: 503 with the reason; it is done once it can be."""
    world, folder = World(), tmp_path / "logs"
    admin = by_token(tmp_path, audit_file=str(folder / "audit.jsonl"))
    async with served(world, admin) as (address, _), client(f"http://{address}", headers=PROOF) as http:
        for path in ("/api/v1/drain", "/api/v1/lanes/P2/pause", "/api/v1/sessions/agents/a%2Fb", "/api/v1/log"):
            refused = await http.request(
                "PUT" if path.endswith("log") else "POST", path, json={"add_tokens": 5} if "sessions" in path else {}
            )
            assert refused.status_code == 503
            assert "admin.audit_file" in refused.json()["error"]
            assert "No such file" in refused.json()["error"]
        assert (world.levers.done, world.sessions.limit) == ([], 1000)
        assert (await http.get("/api/v1/audit")).json()["actions"] == []
        folder.mkdir()
        assert (await http.post("/api/v1/drain")).status_code == 200
    assert [entry["result"] for entry in lines(folder / "audit.jsonl")] == ["begun", "done"]


@pytest.mark.parametrize("place", ["/dev/full", "/", "/proc/version"])
async def test_places_that_take_no_lines(place: str) -> None:
    """Each is told by its name."""
    with pytest.raises(NotWrittenError, match=f"^admin.audit_file: {place}: "):
        await Audit(place).begin(SOMEBODY, "drain", {}, "")


async def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    """It is no file to keep anything in."""
    os.mkfifo(tmp_path / "pipe")
    async with asyncio.timeout(60):
        with pytest.raises(NotWrittenError):
            await Audit(str(tmp_path / "pipe")).begin(SOMEBODY, "drain", {}, "")


async def test_a_line_that_was_cut_short_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next begins a line of its own; what was done meanwhile is in the log."""
    file = tmp_path / "audit"
    book = Audit(str(file))
    entry = await book.begin(SOMEBODY, "drain", {}, "")
    with monkeypatch.context() as patched:
        patched.setattr(audit.os, "write", lambda fd, data, write=os.write: write(fd, data[:20]))
        await book.end(entry, "done")
    assert "is only told as begun there" in caplog.text
    await book.begin(SOMEBODY, "undrain", {}, "")
    first, cut, last = file.read_text().splitlines()
    assert (json.loads(first)["action"], json.loads(last)["action"]) == ("drain", "undrain")
    assert len(cut) == 20


async def test_the_file_may_be_moved_away(tmp_path: Path) -> None:
    """As log rotation does it; what is there already is kept."""
    file, book = tmp_path / "audit", Audit(str(tmp_path / "audit"))
    file.write_text('{"before": true}\n')
    await book.begin(SOMEBODY, "drain", {}, "")
    file.rename(tmp_path / "audit.1")
    await book.begin(SOMEBODY, "undrain", {}, "")
    assert [len(lines(tmp_path / name)) for name in ("audit.1", "audit")] == [2, 1]


async def test_hostile_words_stay_one_line_of_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the file, in the log and in the answer; they come back as they were sent, as JSON."""
    file = tmp_path / "audit"
    console = served(World(), by_token(tmp_path, audit_file=str(file)))
    async with console as (address, _), client(f"http://{address}", headers=PROOF) as http:
        with caplog.at_level(logging.INFO, "tidegate.audit"):
            assert (await http.post("/api/v1/drain", json={"reason": NASTY})).status_code == 200
            path = "/api/v1/lanes/%0A%1B%5B2J%3Cb%3E%2F%E2%80%AE/pause"
            assert (await http.post(path, json={})).status_code == 404
        page = await http.get("/api/v1/audit")
    assert page.headers["content-type"] == "application/json"
    assert page.json()["actions"][1]["reason"] == NASTY
    assert page.json()["actions"][0]["arguments"] == {"lane": "\n\x1b[2J<b>/\u202e"}
    raw = file.read_bytes()
    assert raw.count(b"\n") == 4
    assert raw.isascii()
    assert b"\x1b" not in raw
    written = [JsonLines().format(record) for record in caplog.records if record.name == "tidegate.audit"]
    assert all("\n" not in line and "\x1b" not in line for line in written)
    assert json.loads(written[0])["reason"].isprintable()
    assert "<script>alert(1)</script>" in written[0]


async def test_refused_attempts_are_told_and_do_not_flood() -> None:
    """So many a minute, one by one; the next one that is told says how many were not. The ring has an end."""
    now = [0.0]
    book = Audit(now=lambda: now[0])
    for _ in range(audit.REFUSALS_A_MINUTE + 70):
        await book.refuse(Actor("", "10.0.0.9"), "drain", {}, "that is not the token")
    assert len(book.newest()) == audit.REFUSALS_A_MINUTE
    now[0] = 60.0
    await book.refuse(Actor("", "10.0.0.9"), "drain", {}, "that is not the token")
    newest = book.newest(1)[0]
    assert (newest["unlisted"], newest["result"], newest["from"]) == (70, "refused", "10.0.0.9")
    for _ in range(2 * audit.KEPT):
        await book.end(await book.begin(SOMEBODY, "drain", {}, ""), "done")
    assert len(book.newest()) == len(book.kept) == audit.KEPT
    assert book.newest(3) == book.newest()[:3]


async def test_refused_attempts_over_the_api(tmp_path: Path) -> None:
    """Nobody's name, the path's own words, and no token that was tried."""
    file, world = tmp_path / "audit", World()
    console = served(world, by_token(tmp_path, audit_file=str(file)))
    async with console as (address, _), client(f"http://{address}") as http:
        tried = {"authorization": "Bearer guessed-this-one-0000"}
        await http.post("/api/v1/upstreams/primary/out", json={}, headers=tried)
        await http.post("/api/v1/drain", headers={**PROOF, "origin": "https://evil.example"})
        told = (await http.get("/api/v1/audit")).json()["actions"]
    assert [(entry["action"], entry["who"], entry["why"]) for entry in told] == [
        ("drain", "", "not for web pages of others"),
        ("take_upstream_out", "", "that is not the token"),
    ]
    assert "guessed" not in file.read_text()
    assert told[::-1] == lines(file)


WITHOUT_SENSE: dict[str, dict[str, Any]] = {
    "no JSON": {"content": b"{", "headers": {"content-type": "application/json"}},
    "no text": {"content": b"\xff", "headers": {"content-type": "application/json"}},
    "another kind": {"content": b"a=b", "headers": {"content-type": "application/x-www-form-urlencoded"}},
    "unknown": {"json": {"no": "such"}},
    "too long": {"content": b" " * (guard.MOST_BODY + 1), "headers": {"content-type": "application/json"}},
}


@pytest.mark.parametrize(("method", "path"), [("POST", "drain"), ("POST", "changes"), ("PUT", "log"),
                                              ("DELETE", "bypass"), ("POST", "sessions/agents/a%2Fb")])  # fmt: skip
async def test_the_proof_comes_before_the_body(method: str, path: str, tmp_path: Path) -> None:
    """Whatever the body is: who has proven nothing learns nothing of it, and every attempt is in the audit log."""
    world = World()
    async with served(world, by_token(tmp_path)) as (address, _), client(f"http://{address}/api/v1") as http:
        for sent in WITHOUT_SENSE.values():
            refused = await http.request(method, path, **sent)
            assert (refused.status_code, "token" in refused.text) == (401, True)
        told = (await http.get("audit")).json()["actions"]
        assert [one["result"] for one in told] == ["refused"] * len(WITHOUT_SENSE)
        codes = [
            (await http.request(method, path, **{**sent, "headers": {**sent.get("headers", {}), **PROOF}})).status_code
            for sent in WITHOUT_SENSE.values()
        ]
    unknown = 400 if "sessions" in path else 422
    assert codes == [400, 400, 415, unknown, 413]
    assert world.levers.done == []
