"""Configuration as text that people read: short things on one line, scripts as they were written."""

from __future__ import annotations

from typing import Any

import yaml

from extproc.render.shape import Data

__all__ = ["Dumper", "plain", "to_yaml"]

_WIDTH = 120
_INLINE = 96
"""Longest mapping or list, in characters, that stands on one line."""

_HEADER = """\
# Rendered by Tidegate from its settings; change those, not this file.
# For Envoy 1.40 or newer, or an older one where gateway.profile says so.
# Keys are read by Envoy from their files and never stand here.
"""


class Dumper(yaml.CSafeDumper):
    """Writes data the way that is described above."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - no anchors, ever
        """Write everything out where it stands."""
        return True


def _text(dumper: Dumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def _mapping(dumper: Dumper, value: Data) -> yaml.MappingNode:
    return dumper.represent_mapping("tag:yaml.org,2002:map", value.items(), flow_style=_short(value))


def _sequence(dumper: Dumper, value: list[Any]) -> yaml.SequenceNode:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=_short(value))


def _short(value: Data | list[Any]) -> bool:
    shown = str(value)
    return len(shown) <= _INLINE and "\\n" not in shown


Dumper.add_representer(str, _text)
Dumper.add_representer(dict, _mapping)
Dumper.add_representer(list, _sequence)


def to_yaml(bootstrap: Data) -> str:
    """`bootstrap` as YAML; equal data gives equal text."""
    return _HEADER + plain(bootstrap)


def plain(data: Data, dumper: type[Dumper] = Dumper) -> str:
    """Any data as YAML; equal data gives equal text."""
    return yaml.dump(data, Dumper=dumper, sort_keys=False, width=_WIDTH, allow_unicode=True)
