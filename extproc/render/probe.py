"""A second listener, loopback only, for health canaries: one upstream, named by the call.

The upstream's own filters apply, so a canary uses its real path and key, while nothing here admits, logs or retries. It
is slow and small on purpose: whoever reaches it could otherwise spend the keys.
"""

from __future__ import annotations

from extproc.core.orders import name_of
from extproc.render.filters import local_rate_limit, router, token_bucket
from extproc.render.listener import connection_manager
from extproc.render.names import PROBE_HEADER
from extproc.render.shape import Data, address, extension
from extproc.settings import Settings

__all__ = ["probe_listener"]

_MAX_BODY = 4096
_PER_SECOND = 5
"""On top of one for each upstream, which may all have to be tried at once; engines are asked for their health, too."""
_ENGINES = frozenset({"vllm", "sglang"})


def probe_listener(settings: Settings) -> Data:
    """The canaries' listener."""
    body_limit = extension(
        "envoy.filters.http.buffer", "envoy.extensions.filters.http.buffer.v3.Buffer", max_request_bytes=_MAX_BODY
    )
    manager = connection_manager(
        stat_prefix="probe",
        stream_idle_timeout="15s",
        route_config={"name": "probe", "virtual_hosts": [_host(settings)]},
        http_filters=[
            local_rate_limit("probe", token_bucket(_PER_SECOND + _calls(settings))),
            body_limit,
            router(),
        ],
    )
    return {
        "name": "probe",
        "address": address("127.0.0.1", settings.gateway.probe_port),
        "per_connection_buffer_limit_bytes": settings.gateway.max_answer_bytes,
        "filter_chains": [{"filters": [manager]}],
    }


def _calls(settings: Settings) -> int:
    return sum(2 if upstream.provider in _ENGINES else 1 for upstream in settings.upstreams.values())


def _host(settings: Settings) -> Data:
    return {
        "name": "probe",
        "domains": ["*"],
        "request_headers_to_remove": [PROBE_HEADER, "accept-encoding", "x-forwarded-proto"],
        "routes": [*(_route(settings, name) for name in settings.upstreams), _nothing()],
    }


def _route(settings: Settings, name: str) -> Data:
    where = name_of((name,)) if settings.gateway.profile == "classic" else name
    forced = {"name": PROBE_HEADER, "string_match": {"exact": name}}
    return {
        "name": name,
        "match": {"prefix": "/", "headers": [forced]},
        "route": {"cluster": where, "timeout": "15s", "auto_host_rewrite": True},
    }


def _nothing() -> Data:
    return {"name": "nothing", "match": {"prefix": "/"}, "direct_response": {"status": 404}}
