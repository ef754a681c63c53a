"""The Lua that Envoy runs, put together from the files in `lua/`.

Each script stands alone once rendered: Envoy shares no code between its Lua filters, so the common readers are put in
front of what uses them.
"""

from __future__ import annotations

from importlib import resources

from extproc.settings import UpstreamSettings

__all__ = ["tail_script", "upstream_script"]


def tail_script() -> str:
    """What reads the end of a streamed answer."""
    return _joined("json", "usage", "tail")


def upstream_script(name: str, upstream: UpstreamSettings) -> str:
    """What fits a request to one upstream, and reads its answer."""
    owned = "true" if upstream.owned else "false"
    own = f"local SELF = {{ name = {_quoted(name)}, prefix = {_quoted(upstream.path)}, owned = {owned} }}\n\n"
    return own + _joined("json", "usage", "upstream")


def _joined(*names: str) -> str:
    folder = resources.files("extproc.render").joinpath("lua")
    return "\n".join(folder.joinpath(f"{name}.lua").read_text("utf-8") for name in names)


def _quoted(text: str) -> str:
    return '"' + "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else _escaped(c) for c in text) + '"'


def _escaped(character: str) -> str:
    return "".join(f"\\{byte:03d}" for byte in character.encode())
