"""The admin API is what its OpenAPI document says, whatever is sent to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.console.world import PROOF, World, beside, by_token, client

OPTIONS = [
    "--seed=1",
    "--max-examples=5",
    "--checks=all",
    "--exclude-path=/api/v1/stream",  # it has no end; test_stream reads it
    "--continue-on-failure",
    "--generation-database=none",
    "--no-color",
]
MANY = 300


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture(scope="module")
def url(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with beside(world, by_token(tmp_path_factory.mktemp("admin"))) as url:
        yield url


def schemathesis(url: str, folder: Path, *options: str) -> None:
    """It fails where anything is not as the document says, and where it hardly tried."""
    command = [Path(sys.executable).with_name("schemathesis"), "run", f"{url}/api/openapi.json", *OPTIONS, *options]
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (found := re.search(r"(\d+) generated, (\d+) passed", ended.stdout)), ended.stdout
    assert int(found[2]) > MANY


@pytest.mark.slow
def test_whoever_may_act_gets_what_is_described(url: str, world: World, tmp_path: Path) -> None:
    """Right and wrong requests: every status, header and body is as the document has it, and something is done."""
    schemathesis(
        url,
        tmp_path,
        "--phases=examples,coverage,fuzzing,stateful",
        f"--header=Authorization: {PROOF['authorization']}",
    )
    assert {what[1] for what in world.levers.done} >= {"pause", "resume", "take_out", "change", "bypass", "drain"}
    assert world.sessions.limit > 1000


@pytest.mark.slow
def test_whoever_may_not_act_gets_what_is_described(url: str, world: World, tmp_path: Path) -> None:
    """The same without the token, and with others: nothing is done."""
    world.levers.done.clear()
    before = world.levers.state(), world.sessions.limit, dict(world.log)
    schemathesis(url, tmp_path, "--phases=examples,coverage")
    assert world.levers.done == []
    assert (world.levers.state(), world.sessions.limit, world.log) == before


async def test_the_document_names_every_route_once(url: str) -> None:
    """With an id of its own, what may go wrong, and what proves who asks; there is no page that loads it from afar."""
    async with client(url) as http:
        document = (await http.get("/api/openapi.json")).raise_for_status().json()
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert (await http.get(path)).status_code == 404
    routes = [(method, route) for path in document["paths"].values() for method, route in path.items()]
    names = [route["operationId"] for _, route in routes]
    assert len(set(names)) == len(names)
    for method, route in routes:
        proofs = route["security"]
        assert proofs == [] or {"token": []} in proofs
        if method != "get":
            assert {} not in proofs
            assert {"400", "401", "403", "415", "422", "503"} <= route["responses"].keys()
        for status, answer in route["responses"].items():
            assert status == "200" or answer["content"]["application/json"]["schema"]["$ref"].endswith("/Problem")
    assert document["components"]["securitySchemes"].keys() == {"token", "certificate"}


def test_the_document_is_read_by_any_client(url: str) -> None:
    """It is there for whoever may read."""
    assert httpx.get(f"{url}/api/openapi.json", trust_env=False).json()["openapi"].startswith("3.1")
