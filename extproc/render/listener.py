"""The listener that clients connect to.

HTTP/1.1 and HTTP/2 without TLS on one port; put TLS in front of it or into this listener where it faces a network.
"""

from __future__ import annotations

from collections.abc import Iterator

from extproc.render.access_log import outcomes
from extproc.render.filters import http_filters
from extproc.render.refusals import local_replies
from extproc.render.routes import route_config
from extproc.render.shape import Data, address, extension, seconds, set_header, typed
from extproc.render.tracing import tracing
from extproc.settings import Settings

__all__ = ["connection_manager", "listener", "request_cleaning"]

_INTERNAL = "x-tg-"
_SAVED = f"{_INTERNAL}in-"
_SMALLEST_WINDOW = 65535


def listener(settings: Settings) -> Data:
    """The main listener."""
    gateway = settings.gateway
    manager = connection_manager(
        stat_prefix="tidegate",
        use_remote_address=True,
        stream_idle_timeout=seconds(gateway.idle_timeout_s),
        request_timeout=seconds(gateway.upload_timeout_s),
        early_header_mutation_extensions=[_clean_request(settings)],
        # An HTTP/2 client's window is also what Envoy keeps of its request: with a wider one, a body that is too large
        # reaches the service, which cannot take it either, and would seem to be away.
        http2_protocol_options={"initial_stream_window_size": max(_SMALLEST_WINDOW, gateway.max_body_bytes)},
        local_reply_config=local_replies(settings),
        **({} if gateway.profile == "classic" else _outcomes(settings)),
        **tracing(settings),
        route_config=route_config(settings),
        http_filters=http_filters(settings),
    )
    return {
        "name": "tidegate",
        "address": address(gateway.address, gateway.port),
        **({"traffic_direction": "INBOUND"} if gateway.profile == "classic" else {}),  # for drains: gates stay open
        "per_connection_buffer_limit_bytes": gateway.max_body_bytes,
        "filter_chains": [{"filters": [manager]}],
    }


def _outcomes(settings: Settings) -> Data:
    """How requests ended, and which still run. In the classic profile admission sees it."""
    return {"access_log": outcomes(settings), "access_log_options": {"access_log_flush_interval": "5s"}}


def connection_manager(**fields: object) -> Data:
    """An HTTP connection manager with what both listeners need.

    Paths are normalised before anything looks at them, so that admission and the routes see the same one.

    A connection to be closed is closed as soon as all is written. Any delay would keep a caller waiting to learn that
    its answer was cut; and a short one cuts a large answer that a slow caller of `connection: close` is still reading.
    """
    return extension(
        "envoy.filters.network.http_connection_manager",
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        codec_type="AUTO",
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action="REJECT_REQUEST",
        server_name="tidegate",
        request_headers_timeout="10s",
        delayed_close_timeout="0s",
        **fields,
    )


def _clean_request(settings: Settings) -> Data:
    """Takes away what only Envoy and the service may say, before anything reads it."""
    mutations = [{"remove": "x-request-id"}, *request_cleaning(settings)]
    kind = "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation"
    return {"name": "tidegate.clean_request", "typed_config": typed(kind, mutations=mutations)}


def request_cleaning(settings: Settings) -> list[Data]:
    """Mutations that take away all `x-tg-`, `x-tidegate-` and `x-envoy-` headers that a client may not send.

    Of the `x-tidegate-` names those that the settings trust are saved under another name meanwhile, for an Envoy
    matcher cannot say "all but these". A name that is sent twice counts once.
    """
    inbound = list(_inbound(settings))
    mutations = [_remove_all(_INTERNAL)]
    mutations += [_copy(name, f"{_SAVED}{i}") for i, name in enumerate(inbound)]
    mutations += [_remove_all("x-tidegate-"), _remove_all("x-envoy-")]
    mutations += [_copy(f"{_SAVED}{i}", name) for i, name in enumerate(inbound)]
    return mutations + [{"remove": f"{_SAVED}{i}"} for i in range(len(inbound))]


def _inbound(settings: Settings) -> Iterator[str]:
    """The closed list of `x-tidegate-` headers that a client may send. Others that are trusted need no saving."""
    tenant = (source.removeprefix("header:") for source in settings.identity.tenant if source.startswith("header:"))
    for name in dict.fromkeys(("x-tidegate-priority", *settings.identity.session_headers, *tenant)):
        if name.startswith("x-tidegate-"):
            yield name


def _remove_all(prefix: str) -> Data:
    return {"remove_on_match": {"key_matcher": {"prefix": prefix}}}


def _copy(name: str, to: str) -> Data:
    """Sets `to` to the value of `name`; an absent one is left out."""
    return {"append": set_header(to, f"%REQ({name})%")}
