"""The Lua that Envoy runs, put together from the files in `lua/`.

Each script stands alone once rendered: Envoy shares no code between its Lua filters, so the common readers are put in
front of what uses them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources

from extproc.dialects.errors import Row, rows_of, words_about_us
from extproc.settings import PROVIDERS, Settings, UpstreamSettings

__all__ = ["gate_script", "headers_script", "host_script", "notes_script", "tail_script", "upstream_script"]


def tail_script() -> str:
    """What reads the end of a streamed answer."""
    ours = f"local OURS = {_table(f'[{_quoted(word)}] = true' for word in words_about_us())}\n\n"
    return ours + _joined("json", "words", "usage", "content", "tail")


def host_script(host: str) -> str:
    """What names the host that an upstream is."""
    return f'function envoy_on_request(handle) handle:headers():replace(":authority", {_quoted(host)}) end'


def gate_script(header: str) -> str:
    """What turns a header of admission's into metadata."""
    return f"local HEADER = {_quoted(header)}\n\n" + _joined("json", "gate")


def headers_script(file: str) -> str:
    """What puts the headers that `file` has, one `name: value` a line, into a request."""
    return f"local FILE = {_quoted(file)}\n\n{_joined('headers')}"


def notes_script(gate_header: str) -> str:
    """What takes notes off an answer."""
    return f"local GATE = {_quoted(gate_header)}\n\n{_joined('notes')}"


def upstream_script(settings: Settings, name: str) -> str:
    """What fits a request to one upstream, and reads its answer."""
    upstream = settings.upstreams[name]
    own = {
        "name": _quoted(name),
        "prefix": _quoted(upstream.path),
        "owned": "true" if upstream.owned else "false",
        **(_in_gate(upstream) if settings.gateway.profile == "classic" else {}),
        "wider": _table(f"[{_quoted(other)}] = true" for other in _wider(settings, name)),
    }
    known = f"local SELF = {_table(f'{key} = {value}' for key, value in own.items())}\n"
    rows = ",\n  ".join(map(_row, rows_of(upstream.provider)))
    return f"{known}local ROWS = {{\n  {rows},\n}}\n\n" + _joined("json", "words", "usage", "content", "upstream")


def _in_gate(upstream: UpstreamSettings) -> dict[str, str]:
    return {"gate": "true"} | ({"key": _quoted(PROVIDERS[upstream.provider].key_header)} if upstream.key_file else {})


def _wider(settings: Settings, name: str) -> Iterator[str]:
    """Who may take what is too long for this upstream; where a window is not known, it may."""
    own = settings.upstreams[name].window
    for other, upstream in settings.upstreams.items():
        if other != name and (own is None or upstream.window is None or upstream.window > own):
            yield other


def _row(row: Row) -> str:
    return f'{{ {row.status}, {_pattern(row.kind)}, {_pattern(row.code)}, "{row.means}" }}'


def _pattern(text: str) -> str:
    """A Lua pattern for what a row writes with `*`."""
    if text == "*":
        return _quoted("")
    return _quoted("^" + re.sub(r"[^\w*]", r"%\g<0>", text).replace("*", ".*") + "$")


def _table(items: Iterator[str]) -> str:
    inside = ", ".join(items)
    return f"{{ {inside} }}" if inside else "{}"


def _joined(*names: str) -> str:
    folder = resources.files("extproc.render").joinpath("lua")
    return "\n".join(folder.joinpath(f"{name}.lua").read_text("utf-8") for name in names)


def _quoted(text: str) -> str:
    return '"' + "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else _escaped(c) for c in text) + '"'


def _escaped(character: str) -> str:
    return "".join(f"\\{byte:03d}" for byte in character.encode())
