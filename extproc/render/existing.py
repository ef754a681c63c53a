"""An Envoy configuration that somebody else wrote: read and written again such that it says exactly the same.

Every scalar is kept as the text that stood there, quoted or not, for Envoy's YAML and Python's differ in what they take
for numbers, truth and dates. Mappings and lists keep their style where that is still readable. Anchors are written out,
so that a change in one place is none in another. Comments are lost; so are parts tagged `!ignore`, which Envoy skips.

    load(text, name)       mappings, lists and `Plain` or `Quoted` text; RenderError where it cannot be read
    dump(data, header)     text again; plain Python data may stand in it, too
    dig(data, *path)       what stands at a path, None where it ends before
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from extproc.render.envoy import RenderError
from extproc.render.text import Dumper, plain

__all__ = ["Kept", "KeptList", "Plain", "Quoted", "dig", "dump", "load"]

_LONGEST_INLINE = 300
"""Longest mapping or list, in characters, that stays on one line where it was written so."""
_MERGE = "tag:yaml.org,2002:merge"
_TEXT = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"


_RESOLVER: Any = yaml.resolver.Resolver()


class Plain(str):
    """A scalar without quotes: text, number, truth or nothing, whatever its reader makes of it."""

    __slots__ = ()


class Quoted(str):  # noqa: SLOT000 - it has an attribute, which a str cannot have in slots
    """A scalar that is text for sure, and how it was quoted."""

    style: str = '"'


class Kept(dict[str, Any]):
    """A mapping, and whether it was written on one line."""

    inline = False


class KeptList(list[Any]):
    """A list, and whether it was written on one line."""

    inline = False


def load(text: str, name: str) -> Kept:
    """Read the one mapping that `text` is; `name` is what messages call it."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        value = None if root is None else _value(root)
    except yaml.YAMLError as error:
        raise RenderError(f"{name}: no YAML that can be read: {error}") from None
    except RecursionError:
        raise RenderError(f"{name}: an anchor contains itself") from None
    except _UnreadableError as error:
        raise RenderError(f"{name}: {error}") from None
    if not isinstance(value, Kept):
        raise RenderError(f"{name}: not an Envoy configuration: expected a mapping with static_resources")
    return value


def dump(data: dict[str, Any], header: str) -> str:
    """`data` as YAML below `header`."""
    return header + plain(data, _Dumper)


def dig(data: Any, *path: str | int) -> Any:
    """Follow keys and positions. What is written as null is not there, as it is to Envoy."""
    for step in path:
        if isinstance(step, int):
            data = data[step] if isinstance(data, list) and step < len(data) else None
        else:
            data = data.get(step) if isinstance(data, dict) else None
    return None if isinstance(data, Plain) and _tag_of(data) == _NULL else data


# --------------------------------------------------------------------------------------------- reading


class _UnreadableError(Exception):
    pass


def _value(node: yaml.Node) -> Any:
    """What a node is, anew for each alias, so that nothing is shared."""
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if isinstance(node, yaml.SequenceNode):
        _check_tag(node, "tag:yaml.org,2002:seq")
        items = KeptList(map(_value, node.value))
        items.inline = bool(node.flow_style)
        return items
    _check_tag(node, "tag:yaml.org,2002:map")
    found = Kept(_pairs(node))
    found.inline = bool(getattr(node, "flow_style", False))
    return found


def _scalar(node: yaml.ScalarNode) -> Plain | Quoted:
    if node.style is None and node.tag == _tag_of(node.value):
        return Plain(node.value)
    _check_tag(node, _TEXT)
    text = Quoted(node.value)
    text.style = "|" if node.style == ">" else node.style or '"'
    return text


def _tag_of(plain: str) -> str:
    """What Python takes a scalar without quotes for."""
    return str(_RESOLVER.resolve(yaml.ScalarNode, plain, (True, False)))


def _pairs(node: yaml.Node) -> dict[str, Any]:
    """The pairs of a mapping; what it merges in (`<<`) comes first, and its own pairs win."""
    merged: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, value in node.value:
        if key.tag == "!ignore":
            continue
        if key.tag == _MERGE:
            for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                merged = {**_pairs(source), **merged}
            continue
        if not isinstance(key, yaml.ScalarNode):
            raise _UnreadableError(f"{_place(key)}: a key that is no text")
        if key.value in own:
            raise _UnreadableError(f"{_place(key)}: {key.value} is there twice in one mapping; one would be lost")
        own[key.value] = _value(value)
    return {**merged, **own}


def _check_tag(node: yaml.Node, expected: str) -> None:
    if node.tag != expected:
        raise _UnreadableError(f"{_place(node)}: the tag {node.tag} is not understood")


def _place(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


# --------------------------------------------------------------------------------------------- writing


class _Dumper(Dumper):
    pass


def _plain(_dumper: _Dumper, value: Plain) -> yaml.ScalarNode:
    """As it stood; what only Python takes for a number or a date (`1:30`) cannot always stand so, and is text."""
    tag = _TEXT if ":" in value else _tag_of(value)
    return yaml.ScalarNode(tag, "null" if tag == _NULL else str(value))


def _quoted(dumper: _Dumper, value: Quoted) -> yaml.ScalarNode:
    return dumper.represent_scalar(_TEXT, str(value), style=value.style)


def _kept(dumper: _Dumper, value: Kept) -> yaml.MappingNode:
    return dumper.represent_mapping("tag:yaml.org,2002:map", value.items(), flow_style=_inline(value))


def _kept_list(dumper: _Dumper, value: KeptList) -> yaml.SequenceNode:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=_inline(value))


def _inline(value: Kept | KeptList) -> bool:
    """An empty one can only be written so."""
    return not value or (value.inline and sum(map(len, _texts(value))) <= _LONGEST_INLINE)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    else:
        yield str(value)


_Dumper.add_representer(Plain, _plain)
_Dumper.add_representer(Quoted, _quoted)
_Dumper.add_representer(Kept, _kept)
_Dumper.add_representer(KeptList, _kept_list)
