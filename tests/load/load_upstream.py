"""The upstream of the benchmark: answers every request with prebuilt bytes, told apart by the header `x-bench`.

    python load_upstream.py PORT < cases.json

A bare asyncio protocol on uvloop, which costs a fraction of any proxy in front of it.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

import uvloop
from load_cases import PACE_S

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_NAME = re.compile(rb"\r\nx-bench: *([^\r]+)", re.IGNORECASE)
_HEALTH = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Upstream(asyncio.Protocol):
    """One connection."""

    def __init__(self, answers: dict[bytes, list[bytes]]) -> None:
        self._answers = answers
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer when the whole request is there; one at a time on a connection."""
        self._buffer = self._buffer + data if self._buffer else data
        head = self._buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        length = _LENGTH.search(self._buffer, 0, head + 2)
        if len(self._buffer) < head + 4 + (int(length[1]) if length else 0):
            return
        name = _NAME.search(self._buffer, 0, head + 2)
        self._buffer = b""
        self._play(self._answers[name[1]] if name else [_HEALTH], 0)

    def _play(self, pieces: list[bytes], at: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(pieces[at])
        if at + 1 < len(pieces):
            asyncio.get_running_loop().call_later(PACE_S, self._play, pieces, at + 1)


async def main(port: int, answers: dict[bytes, list[bytes]]) -> None:
    """Serve for ever."""
    server = await asyncio.get_running_loop().create_server(lambda: Upstream(answers), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    told = json.load(sys.stdin)
    uvloop.run(main(int(sys.argv[1]), {c["name"].encode(): [p.encode() for p in c["pieces"]] for c in told}))
