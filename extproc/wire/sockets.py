"""A unix socket to listen on: whose file it is, who may use it, and that nobody's who lives is taken away.

gRPC by itself would replace any socket, leave the rights of the new one to the umask, and take away whatever has its
name in the end. So it is made under a name of its own, and gets the right one when all is set.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SocketError", "UnixSocket"]

_LISTENS_S = 1.0
_STARTS_S, _LOOK_S = 5.0, 0.02
"""So long another that makes its own socket is waited for, and this long between two looks."""


class SocketError(Exception):
    """An address cannot be listened on. The message begins with it."""


@dataclass
class UnixSocket:
    """mode: rights of the file. group: name of the group that gets it, None for that of the process."""

    path: str
    mode: int
    group: str | None = None
    _ours: tuple[int, ...] | None = None
    _lock: int | None = None

    def claim(self) -> None:
        """Make room for it. SocketError when it is taken, or cannot be made.

        Until `open` no other Tidegate does the same in this folder: of two that found the same dead one, each would
        take away what the other has made since.
        """
        self._group()
        self._keep_others_out()
        try:
            self._remove_dead()
        except SocketError:
            self._let_others_in()
            raise

    def open(self, bind: Callable[[str], int]) -> None:
        """Have `bind` listen on it once it is claimed, and set its rights. SocketError when that cannot be done."""
        new = Path(f"{self.path}.{os.getpid()}")
        before = os.umask(0o177)  # nobody else gets in before the rights are set
        try:
            bind(f"unix:{new}")
            os.chown(new, -1, self._group())
            new.chmod(self.mode)
            new.rename(self.path)
            self._ours = self._identity()
        except (OSError, RuntimeError) as error:
            raise SocketError(f"{self.path}: {getattr(error, 'strerror', None) or error}") from None
        finally:
            os.umask(before)
            self._let_others_in()

    def remove(self) -> None:
        """Take the file away, unless it is another's by now. While it is listened on nobody else can claim it."""
        if self._ours is not None and self._identity() == self._ours:
            Path(self.path).unlink(missing_ok=True)

    def _keep_others_out(self) -> None:
        """Not where the folder cannot be locked."""
        try:
            lock = os.open(Path(self.path).parent, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return
        until = time.monotonic() + _STARTS_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(lock)
                    raise SocketError(f"{self.path}: another process has locked its folder") from None
                time.sleep(_LOOK_S)
            except OSError:
                os.close(lock)
                return
            else:
                self._lock = lock
                return

    def _let_others_in(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _group(self) -> int:
        """Its number; -1 leaves it as it is."""
        try:
            return -1 if self.group is None else grp.getgrnam(self.group).gr_gid
        except KeyError:
            raise SocketError(f"{self.path}: there is no group {self.group!r}") from None

    def _remove_dead(self) -> None:
        try:
            kind = os.lstat(self.path).st_mode
        except FileNotFoundError:
            if not Path(self.path).parent.is_dir():
                raise SocketError(f"{self.path}: its folder is not there") from None
            return
        except OSError as error:
            raise SocketError(f"{self.path}: {error.strerror}") from None
        if not stat.S_ISSOCK(kind):
            raise SocketError(f"{self.path}: is there and no socket")
        if self._is_listened_on():
            raise SocketError(f"{self.path}: another process listens there")
        Path(self.path).unlink(missing_ok=True)

    def _is_listened_on(self) -> bool:
        """Whoever cannot be asked is taken to be alive."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_LISTENS_S)
            try:
                probe.connect(self.path)
            except OSError as error:
                return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
        return True

    def _identity(self) -> tuple[int, ...] | None:
        try:
            found = os.lstat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns
