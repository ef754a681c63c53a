"""The filter that holds headers back: whole, and only where it was asked for. What it does is in e2e/test_bad_days."""

from __future__ import annotations

import json

from extproc.render.clusters import clusters
from extproc.render.hold import module
from tests.render.rig import settings_of, upstream


def sections(data: bytes) -> dict[int, bytes]:
    """The sections of a WebAssembly module, by number."""
    assert data[:8] == b"\x00asm\x01\x00\x00\x00"
    found, at = {}, 8
    while at < len(data):
        number, at = data[at], at + 1
        size = shift = 0
        while True:
            byte, at = data[at], at + 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        found[number], at = data[at : at + size], at + size
    assert at == len(data)
    return found


def test_the_module_is_whole() -> None:
    """Its sections stand in order, and as many functions have a body as have a type and a name."""
    found = sections(module())
    assert list(found) == [1, 3, 5, 7, 10]
    assert found[1][0] == found[3][0] == found[10][0] == found[7][0] - 1
    for name in (b"proxy_abi_version_0_2_1", b"proxy_on_response_headers", b"proxy_on_response_body", b"malloc"):
        assert bytes([len(name)]) + name in found[7]


def test_only_upstreams_that_ask_for_it_have_it() -> None:
    """It costs a call into another machine for each piece of an answer."""
    settings = settings_of(a=upstream(1, hold_headers=True), b=upstream(2))
    has = {cluster["name"]: "tidegate.hold_headers" in json.dumps(cluster) for cluster in clusters(settings)}
    assert (has["a"], has["b"]) == (True, False)
