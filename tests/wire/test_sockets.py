"""A unix socket to listen on: its rights, the file of a dead process, that of a living one, and what is left of it."""

from __future__ import annotations

import grp
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import yaml

from extproc.stack import free_ports
from extproc.wire.server import Server
from extproc.wire.sockets import SocketError, UnixSocket

LISTENER = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print(flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where it is."""
    return tmp_path / "tidegate.sock"


@pytest.fixture
def living(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that listens there."""
    with subprocess.Popen([sys.executable, "-c", LISTENER, path], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        yield other
        other.kill()


def server_at(path: Path, mode: int = 0o660, group: str | None = None) -> Server:
    """A server that nobody asks anything."""
    place = UnixSocket(str(path), mode, group)
    return Server(f"unix:{path}", None, None, max_body_bytes=1024, socket=place)  # type: ignore[arg-type]


def accepts(path: Path) -> bool:
    """Whether somebody listens."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def rights(path: Path) -> tuple[int, int] | None:
    """Mode and group of a file; None where it is not."""
    return (path.stat().st_mode & 0o777, path.stat().st_gid) if path.exists() else None


@pytest.mark.parametrize("mode", [0o660, 0o600, 0o777])
async def test_the_rights_are_those_of_the_settings(path: Path, mode: int) -> None:
    """Whatever the umask, which is as before."""
    umask = os.umask(0o027)
    try:
        server = server_at(path, mode, grp.getgrgid(os.getgid()).gr_name)
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(umask)
    await server.start()
    assert rights(path) == (mode, os.getgid())
    assert accepts(path)
    await server.stop()
    assert rights(path) is None


def test_a_living_ones_socket_stays(path: Path, living: subprocess.Popen[bytes]) -> None:
    """Also where it is stopped and answers nothing."""
    living.send_signal(signal.SIGSTOP)
    inode = path.stat().st_ino
    with pytest.raises(SocketError, match=r"tidegate\.sock: another process listens there"):
        server_at(path)
    assert path.stat().st_ino == inode
    assert accepts(path)


async def test_a_dead_ones_socket_is_replaced(path: Path, living: subprocess.Popen[bytes]) -> None:
    """It had no time to take it away."""
    living.kill()
    living.wait()
    assert rights(path) is not None
    server = server_at(path)
    await server.start()
    assert accepts(path)
    await server.stop()
    assert rights(path) is None


def test_of_two_that_start_at_once_one_gets_it(path: Path) -> None:
    """The second waits until the first has made its own, and leaves it alone then."""
    first, second = (UnixSocket(str(path), 0o600) for _ in range(2))
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as lives, ThreadPoolExecutor() as other:
        dead.bind(str(path))  # nobody listens
        first.claim()
        claiming = other.submit(second.claim)
        assert not wait([claiming], timeout=0.3).done

        def bind(place: str) -> int:
            lives.bind(place.removeprefix("unix:"))
            lives.listen()
            return 1

        first.open(bind)
        with pytest.raises(SocketError, match="another process listens there"):
            claiming.result(10)
        assert accepts(path)
    path.unlink()
    second.claim()


async def test_a_socket_that_is_anothers_by_now_stays(path: Path) -> None:
    """Who listens there next is not cut off by the end of who did before."""
    first = server_at(path)
    await first.start()
    os.unlink(path)  # noqa: PTH108 - as a shell would
    second = server_at(path)
    await second.start()
    await first.stop()
    assert accepts(path)
    await second.stop()


def test_what_cannot_be_a_socket_is_said(path: Path) -> None:
    """A file that is something else, a folder that is not there, a group that is not known; nothing is removed."""
    path.write_text("mine")
    with pytest.raises(SocketError, match="is there and no socket"):
        server_at(path)
    with pytest.raises(SocketError, match="Not a directory"):
        server_at(path / "below")
    assert path.read_text() == "mine"
    with pytest.raises(SocketError, match="no group 'no-such-group'"):
        server_at(path, group="no-such-group")
    with pytest.raises(SocketError, match=r"gone/tidegate\.sock: its folder is not there"):
        server_at(path.parent / "gone" / path.name)


@pytest.mark.parametrize("place", ["address", "console"])
def test_a_port_that_is_taken_is_told(place: str, tmp_path: Path) -> None:
    """As where an earlier Tidegate still drains."""
    other = free_ports(1)[0]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"address": other, "console": other, place: port}
        file = tmp_path / "tidegate.yaml"
        settings = {
            "upstreams": {"up": {"provider": "fake", "url": "http://127.0.0.1:1", "owned": True, "concurrency": 1}},
            "routes": [{"models": ["*"], "chain": ["up"]}],
            "service": {key: f"127.0.0.1:{ports[key]}" for key in ports},
        }
        file.write_text(yaml.safe_dump(settings), "utf-8")
        command = [sys.executable, "-m", "extproc", "serve", "--config", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert str(port) in done.stderr.splitlines()[-1]
