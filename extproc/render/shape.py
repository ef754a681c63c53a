"""The few shapes that an Envoy configuration repeats, as plain data."""

from __future__ import annotations

import ipaddress
from typing import Any

__all__ = [
    "HTTP_PROTOCOLS",
    "Data",
    "address",
    "breakers",
    "extension",
    "is_loopback",
    "seconds",
    "set_header",
    "source",
    "typed",
]

Data = dict[str, Any]

HTTP_PROTOCOLS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
"""Type of a cluster's options for HTTP, and the key that they stand under."""

_TYPES = "type.googleapis.com/"
_MANY = 100_000
_RETRIES = 1000


def typed(kind: str, **fields: Any) -> Data:
    """A message wrapped with its type, as every extension point wants it."""
    return {"@type": _TYPES + kind, **fields}


def extension(name: str, kind: str, **fields: Any) -> Data:
    """A named extension with its configuration."""
    return {"name": name, "typed_config": typed(kind, **fields)}


def set_header(name: str, value: str, *, only_if_absent: bool = False) -> Data:
    """Set a header to `value` (an Envoy format string), whatever was there; or only where nothing was."""
    action = "ADD_IF_ABSENT" if only_if_absent else "OVERWRITE_IF_EXISTS_OR_ADD"
    return {"header": {"key": name, "value": value}, "append_action": action}


def seconds(value: float) -> str:
    """A duration as Envoy writes it, to the millisecond."""
    return f"{value:.3f}".rstrip("0").rstrip(".") + "s"


def source(text: str) -> Data:
    """Inline text as a data source."""
    return {"inline_string": text}


def address(host: str, port: int) -> Data:
    """An IP address and port to listen on or to connect to."""
    return {"socket_address": {"address": host, "port_value": port}}


def breakers() -> Data:
    """Envoy's own limits of a cluster, out of the way."""
    limits = {"max_connections": _MANY, "max_pending_requests": _MANY, "max_requests": _MANY, "max_retries": _RETRIES}
    return {"thresholds": [limits]}


def is_loopback(host: str) -> bool:
    """Whether `host`, an address or a name, is this very machine or pod."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
