"""The parts as text, each with what has to be known where it is put in by hand.

fragment("routes", settings) -> str       one part
fragment("all", settings) -> str          each as a YAML document of its own
"""

from __future__ import annotations

from collections.abc import Callable

from extproc.render.parts import FLUSH, Parts, parts
from extproc.render.shape import Data, seconds
from extproc.render.text import plain
from extproc.settings import Settings

__all__ = ["FRAGMENTS", "fragment", "manager_settings"]

_FIRST = """\
# Rendered by Tidegate from its settings; change those, not this.
"""

_ABOUT: dict[str, str] = {
    "http_filters": """\
# Into `http_filters` of the HTTP connection manager that callers reach, right before its router: behind what
# authenticates (jwt_authn, ext_authz, rbac), so that it is asked first, and nearest to the answers, which must be read
# before a compressor changes them. All are disabled: only the routes of the part `routes` switch them on.
""",
    "upstream_log": """\
# Into `typed_config` of that connection manager's router, beside logs that are there. Tells Tidegate of every attempt
# that failed at one of its upstreams.
""",
    "routes": """\
# Into `routes` of a virtual host, before the first route that takes everything (a catch-all, `/v1/`). They take the
# paths of LLM endpoints only, and each switches Tidegate's filters on.
""",
    "access_log": """\
# Into the HTTP connection manager, beside logs that are there. Tells Tidegate how its own requests ended. The options
# have running answers reported, which keeps their slots taken over a restart of Tidegate; give other logs the filter
#   log_type_filter: {types: [DownstreamPeriodic], exclude: true}
# or they write a line for each report, too. The classic profile needs none of this.
""",
    "local_replies": """\
# Into the HTTP connection manager, before mappers that are there. Words Envoy's own answers (a body that is too large,
# an upstream that failed) in the caller's dialect, for Tidegate's requests only.
""",
    "connection_manager": """\
# Settings of the HTTP connection manager that suit Tidegate. They hold for all of its routes, so weigh them:
# - stream_idle_timeout: what waits in a queue for longer than this ends with 504
# - request_timeout: how long a caller may take to send its request
# - delayed_close_timeout: callers learn that an answer was cut only after this
""",
    "tracing": """\
# Into the HTTP connection manager, if it has no tracing: spans of all of its routes go to the collector of
# telemetry.otlp. Leave tracing of its own as it is; Tidegate's spans join whatever it makes.
""",
    "clusters": """\
# Into `clusters` of `static_resources`: one for each upstream, and Tidegate itself.
""",
    "secrets": """\
# Into `secrets` of `static_resources`: where Envoy finds the upstreams' keys. Empty where no upstream has a key_file,
# and where gateway.secrets_dir lets Envoy follow them.
""",
    "listeners": """\
# Into `listeners` of `static_resources`: loopback only; Tidegate tries upstreams through it before breakers close. In
# the classic profile also the gates before upstreams, on unix sockets of this Envoy.
""",
}

_DATA: dict[str, Callable[[Parts], Data]] = {
    "http_filters": lambda ours: {"http_filters": ours.http_filters},
    "upstream_log": lambda ours: {"upstream_log": ours.upstream_log},
    "routes": lambda ours: {"routes": ours.routes},
    "access_log": lambda ours: (
        {"access_log": ours.access_log, "access_log_options": {"access_log_flush_interval": FLUSH}}
        if ours.access_log
        else {}
    ),
    "local_replies": lambda ours: {"local_reply_config": {"mappers": ours.mappers}},
    "tracing": lambda ours: ours.tracing,
    "clusters": lambda ours: {"clusters": ours.clusters},
    "secrets": lambda ours: {"secrets": ours.secrets},
    "listeners": lambda ours: {"listeners": ours.listeners},
}

FRAGMENTS = (*_ABOUT, "all")
"""Names of what there is to ask for."""


def fragment(name: str, settings: Settings) -> str:
    """One of FRAGMENTS as YAML."""
    ours = parts(settings)
    if name == "all":
        there = [one for one in _ABOUT if one != "tracing" or ours.tracing]
        return _FIRST + "".join(f"---\n{_ABOUT[one]}{plain(_data(one, ours, settings))}" for one in there)
    return _FIRST + _ABOUT[name] + plain(_data(name, ours, settings))


def _data(name: str, ours: Parts, settings: Settings) -> Data:
    return manager_settings(settings) if name == "connection_manager" else _DATA[name](ours)


def manager_settings(settings: Settings) -> Data:
    """What suits Tidegate of what holds for all routes of an HTTP connection manager."""
    gateway = settings.gateway
    return {
        "stream_idle_timeout": seconds(gateway.idle_timeout_s),
        "request_timeout": seconds(gateway.upload_timeout_s),
        "delayed_close_timeout": "0s",
    }
