"""What the console's server rests on in uvicorn, which promises none of it: an upgrade that changes it is told here.

Whoever raises uvicorn's upper bound in pyproject.toml sees that these and test_server hold, and reads what is new in
uvicorn's h11_impl.py and server.py.
"""

from __future__ import annotations

import asyncio
import inspect
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import h11
import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from extproc.console.server import _Connection, _Server
from extproc.settings import AdminSettings
from tests.console.world import World, client, served

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
IS = f"uvicorn {version('uvicorn')} is not as extproc/console/server.py takes it to be"
OVERRIDDEN: list[tuple[type, type, str]] = [
    (_Connection, H11Protocol, "connection_made"),
    (_Connection, H11Protocol, "connection_lost"),
    (_Connection, H11Protocol, "data_received"),
    (_Connection, H11Protocol, "send_400_response"),
    (_Connection, H11Protocol, "pause_writing"),
    (_Connection, H11Protocol, "resume_writing"),
    (_Server, uvicorn.Server, "capture_signals"),
    (_Server, uvicorn.Server, "startup"),
]


def bare() -> uvicorn.Config:
    found = uvicorn.Config(lambda *_: None, ws="none", loop="none", lifespan="off", log_config=None)
    found.load()
    return found


@pytest.mark.parametrize("name", ["uvicorn", "h11"])
def test_the_version_is_bounded_and_within(name: str) -> None:
    """No version that nobody has tried is installed with Tidegate."""
    wanted = map(Requirement, tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"])
    [found] = [one for one in wanted if one.name == name]
    assert any(one.operator == "<" for one in found.specifier)
    assert found.specifier.contains(version(name))


@pytest.mark.parametrize(("ours", "theirs", "name"), OVERRIDDEN)
def test_what_is_overridden_is_there_and_called_alike(ours: type, theirs: type, name: str) -> None:
    """With as many arguments, in the same order."""

    def taken(method: Callable[..., Any]) -> list[tuple[Any, bool]]:
        parameters = inspect.signature(method).parameters.values()
        return [(one.kind, one.default is one.empty) for one in parameters]

    assert name in vars(theirs), f"{IS}: {theirs.__name__} has no {name}"
    assert taken(vars(ours)[name]) == taken(vars(theirs)[name]), f"{IS}: {name} takes something else"


def test_nothing_else_of_theirs_is_overridden_by_mistake() -> None:
    """A name of ours may be one of theirs tomorrow."""
    config = bare()
    loop = asyncio.new_event_loop()
    theirs = {H11Protocol: H11Protocol(config, ServerState(), {}, loop), uvicorn.Server: uvicorn.Server(config)}
    loop.close()
    own = {
        H11Protocol: {*vars(_Connection), "clients", "came"},
        uvicorn.Server: {*vars(_Server), "_clients"},
    }
    for kind, names in own.items():
        meant = {name for _, base, name in OVERRIDDEN if base is kind}
        shared = {name for name in names if name in dir(theirs[kind]) and not name.startswith("__")} - meant
        assert not shared, f"{IS}: {kind.__name__} has {shared} of its own"


def test_what_is_read_of_theirs_is_there() -> None:
    """Fields of a connection that has heard nothing yet, and of a server that has not begun."""
    config = bare()
    loop, state = asyncio.new_event_loop(), ServerState()
    connection = H11Protocol(config, state, {}, loop)
    loop.close()
    assert connection.connections is state.connections == set(), IS
    assert isinstance(connection.conn, h11.Connection), IS
    assert (connection.cycle, connection.loop, connection.transport) == (None, loop, None), IS
    assert callable(connection.app), IS
    server = uvicorn.Server(config)
    assert (server.config, server.started, server.should_exit) == (config, False, False), IS
    assert server.server_state.tasks == set(), IS
    assert {"ssl", "backlog"} <= vars(config).keys(), IS


async def test_how_an_answer_stands_is_seen() -> None:
    """A connection is the server's while it is open; its answer begins, and is complete; its task comes and goes."""
    async with served(World(), AdminSettings()) as (address, console), client(f"http://{address}") as http:
        state = console._server.server_state
        assert state.connections == set(), IS

        async def until(true: Callable[[], bool], what: str) -> None:
            try:
                async with asyncio.timeout(60):
                    while not true():  # noqa: ASYNC110 - nobody tells
                        await asyncio.sleep(0.02)
            except TimeoutError:
                pytest.fail(f"{IS}: {what}")

        await http.get("/healthz")
        [connection] = state.connections
        assert isinstance(connection, _Connection), IS
        assert connection.cycle.response_complete is True, IS
        assert not connection.begun
        await until(lambda: not state.tasks, "an answer that is over still has its task")
        async with http.stream("GET", "/api/v1/stream"):
            assert [each.begun for each in state.connections] == [True], IS
            assert len(state.tasks) == 1, IS
        await until(lambda: not state.tasks and not state.connections, "who has gone is still there")
