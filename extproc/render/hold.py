"""A filter that holds the headers of an answer back until the first of its body has come.

The router gives up on an attempt, and asks the next upstream, only until it has seen headers. Upstreams that send them
before the first token would keep a request however late that token is. None of Envoy's own filters can wait for a part
of a body, Lua included: it waits for all or for nothing. WebAssembly can, and this is all there is to it:

    on_response_headers: unless the answer ends here, stop
    on_response_body:    go on

Written byte by byte, because it is a hundred bytes, and a compiler for it would be a dependency.

Not done: a first event without a token, or a comment that says that the upstream is alive, lets the headers go, too.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable

from extproc.render.shape import Data, extension

__all__ = ["hold_headers", "module"]

_I32, _FUNCTION, _MEMORY = b"\x7f", b"\x00", b"\x02"
_GET_2, _CONST, _EQZ, _END = b"\x20\x02", b"\x41", b"\x45", b"\x0b"
_BUFFER = b"\x80\x08"
"""1024, as the format writes it: where the host may put what it has to say. Nobody reads it."""

# Name, number of parameters, number of results, body.
_FUNCTIONS = (
    ("proxy_abi_version_0_2_1", 0, 0, b""),
    ("malloc", 1, 1, _CONST + _BUFFER),
    ("proxy_on_vm_start", 2, 1, _CONST + b"\x01"),
    ("proxy_on_configure", 2, 1, _CONST + b"\x01"),
    ("proxy_on_context_create", 2, 0, b""),
    ("proxy_on_response_headers", 3, 1, _GET_2 + _EQZ),
    ("proxy_on_response_body", 3, 1, _CONST + b"\x00"),
)


def hold_headers() -> Data:
    """The filter, for an upstream's own chain. It stands before what reads the answer there."""
    code = {"local": {"inline_bytes": b64encode(module()).decode()}}
    vm = {"vm_id": "tidegate.hold_headers", "runtime": "envoy.wasm.runtime.v8", "code": code}
    config = {"name": "tidegate.hold_headers", "vm_config": vm, "allow_on_headers_stop_iteration": True}
    return extension("tidegate.hold_headers", "envoy.extensions.filters.http.wasm.v3.Wasm", config=config)


def module() -> bytes:
    """The WebAssembly module."""
    types = [b"\x60" + _vector([_I32] * takes) + _vector([_I32] * gives) for _, takes, gives, _ in _FUNCTIONS]
    indices = [bytes([i]) for i in range(len(_FUNCTIONS))]
    exports = [_named(name, _FUNCTION, i) for i, (name, *_) in enumerate(_FUNCTIONS)]
    bodies = [_sized(b"\x00" + body + _END) for *_, body in _FUNCTIONS]
    sections = {
        1: _vector(types),
        3: _vector(indices),
        5: _vector([b"\x00\x02"]),  # two pages of memory
        7: _vector([_named("memory", _MEMORY, 0), *exports]),
        10: _vector(bodies),
    }
    return b"\x00asm\x01\x00\x00\x00" + b"".join(bytes([n]) + _sized(content) for n, content in sections.items())


def _vector(items: Iterable[bytes]) -> bytes:
    items = list(items)
    return _length(len(items)) + b"".join(items)


def _named(name: str, kind: bytes, index: int) -> bytes:
    return _sized(name.encode()) + kind + bytes([index])


def _sized(content: bytes) -> bytes:
    return _length(len(content)) + content


def _length(count: int) -> bytes:
    """A number as the format writes it: seven bits at a time, the lowest first."""
    low, high = count & 0x7F, count >> 7
    return bytes([low | 0x80]) + _length(high) if high else bytes([low])
