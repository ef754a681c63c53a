"""Where requests go: to the upstreams once admitted, to a refusal until then.

"Admitted" is a ticket in the request's metadata, which only the service can put there. Envoy chooses the route twice:
before admission, which is where the flood guard and ext_proc read their per-route settings, and again after it. So
every path has a route of both kinds, and both carry the same ext_proc override.

In the classic profile a retry stays in the cluster that admission named: it takes the next of its order (see `gates`).
"""

from __future__ import annotations

from collections.abc import Iterator

from extproc.core.request import Dialect
from extproc.render.filters import ADMISSION, TAIL_FILTER, processing_mode
from extproc.render.names import (
    ERROR_HEADER,
    HIDDEN_FROM_UPSTREAMS,
    HOST,
    ORDER_HEADER,
    REQUEST_ID_HEADER,
    ROUTE,
    STATUS_HEADER,
    UPSTREAM_HEADER,
    WAIT_HEADER,
)
from extproc.render.refusals import LANGUAGES, away
from extproc.render.shape import Data, extension, seconds, set_header, typed
from extproc.settings import Settings

__all__ = ["route_config"]

_PRICED = r"/v1/(chat/completions|completions|embeddings|responses)"
_PRICED_ANTHROPIC = r"/v1/messages(/count_tokens)?"

_NOTES = (ERROR_HEADER, STATUS_HEADER, WAIT_HEADER)
_HIDDEN_FROM_CALLERS = (
    "alt-svc",
    "set-cookie",
    "strict-transport-security",
    "anthropic-organization-id",
    "openai-organization",
    "openai-project",
)

_NEXT_PRIORITY: Data = {
    "retry_priority": extension(
        "envoy.retry_priorities.previous_priorities",
        "envoy.extensions.retry.priority.previous_priorities.v3.PreviousPrioritiesConfig",
        update_frequency=1,
    )
}
"""What a retry takes in an aggregate cluster: a member that was not tried."""


def route_config(settings: Settings) -> Data:
    """The route table of the main listener.

    Its buffer limit counts from the router on, for answers too: a JSON answer is read whole by the upstream's filters.
    What admission keeps of a request is limited by the listener.
    """
    return {
        "name": "tidegate",
        "virtual_hosts": [
            {
                "name": "tidegate",
                "domains": ["*"],
                "request_body_buffer_limit": max(settings.gateway.max_body_bytes, settings.gateway.max_answer_bytes),
                "routes": [*_admitted(settings), *_not_admitted(settings)],
            }
        ],
    }


def _admitted(settings: Settings) -> Iterator[Data]:
    """Streams may not fall silent for long; a whole answer is silent until it is there; the rest is passed through.

    A stream's silence is told by the route's idle timeout: the router forgets its own, per try, once the time for the
    first token is over.
    """
    priced = {"safe_regex": {"regex": f"{_PRICED}|{_PRICED_ANTHROPIC}"}}
    stall, idle = settings.timeouts.stall_s, settings.gateway.idle_timeout_s
    streams = [_metadata("ticket", {"present_match": True}), _metadata("stream", {"bool_match": True})]
    tickets = [_metadata("ticket", {"present_match": True})]
    others = _next(settings, len(settings.upstreams) - 1)
    for kind, told, silence in (("stream", streams, stall), ("answer", tickets, idle)):
        again = {**priced, "dynamic_metadata": [*told, _metadata("again", {"bool_match": True})]}
        yield _forward(settings, f"{kind}-again", again, silence, _again())
        yield _forward(settings, kind, {**priced, "dynamic_metadata": told}, silence, others)
    yield {
        **_forward(settings, "other", {"prefix": "/", "dynamic_metadata": tickets}, idle, None),
        "typed_per_filter_config": {**_pass_through(), **_no_tail(settings)},
    }


def _not_admitted(settings: Settings) -> Iterator[Data]:
    """The service is away, silent, or did not say go."""
    unread = {"typed_per_filter_config": _pass_through()}
    messages = {"path_separated_prefix": "/v1/messages"}
    for language, asked in LANGUAGES.items():
        headers = {"headers": asked} if asked else {}
        anthropic, openai = (away(settings, dialect, language) for dialect in (Dialect.ANTHROPIC, Dialect.OPENAI))
        anthropic_priced = {"safe_regex": {"regex": _PRICED_ANTHROPIC}, **headers}
        yield {"name": f"away-messages-{language}", "match": anthropic_priced, **anthropic}
        yield {"name": f"away-priced-{language}", "match": {"safe_regex": {"regex": _PRICED}, **headers}, **openai}
        yield {"name": f"away-other-messages-{language}", "match": {**messages, **headers}, **anthropic, **unread}
        yield {"name": f"away-other-{language}", "match": {"prefix": "/", **headers}, **openai, **unread}


def _metadata(key: str, value: Data) -> Data:
    return {"filter": ROUTE, "path": [{"key": key}], "value": value}


def _forward(settings: Settings, name: str, match: Data, idle_s: float, retries: Data | None) -> Data:
    """A route to the upstreams, in the order that admission wrote."""
    classic = settings.gateway.profile == "classic"
    return {
        "name": name,
        "match": match,
        "route": {
            **({"cluster_header": ORDER_HEADER} if classic else _by_priority(settings)),
            "timeout": "0s",
            "idle_timeout": seconds(idle_s),
            **({} if classic else {"auto_host_rewrite": True}),
            **({"retry_policy": retries} if retries else {}),
        },
        "request_headers_to_remove": [*HIDDEN_FROM_UPSTREAMS, *([ORDER_HEADER] if classic else [])],
        "response_headers_to_remove": [*([] if classic else _NOTES), *_HIDDEN_FROM_CALLERS],
        "response_headers_to_add": _told_to_callers(settings),
    }


def _by_priority(settings: Settings) -> Data:
    """The order of the metadata; without one, as the settings list them."""
    groups = [{"name": name, "clusters": [{"cluster_name": name, "weight": 1}]} for name in settings.upstreams]
    specifier = extension(
        "envoy.router.cluster_specifier_plugin.priority_group",
        "envoy.extensions.router.cluster_specifiers.priority_group.v3.PriorityGroupClusterSpecifier",
        override_metadata_namespace=ROUTE,
        priority_groups=groups,
    )
    return {"inline_cluster_specifier_plugin": {"extension": specifier}}


def _next(settings: Settings, count: int) -> Data:
    """The next upstream, at once. Admission lowers the count to its order with `x-envoy-max-retries`."""
    return {
        "retry_on": "5xx,reset,connect-failure,retriable-status-codes",
        "retriable_status_codes": [429],
        "num_retries": count,
        **(_NEXT_PRIORITY if settings.gateway.profile == "classic" else {"refresh_cluster_on_retry": True}),
        "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.010s"},
    }


def _again() -> Data:
    """The same upstream once more, after a moment, where the answer had not begun: a lost connection, a first token
    that did not come, or an overload that may be over. Whatever else it said it would say again.
    """
    return {
        "retry_on": "reset,connect-failure,retriable-status-codes",
        "retriable_status_codes": [503],
        "num_retries": 1,
        "retry_back_off": {"base_interval": "0.100s", "max_interval": "0.200s"},
    }


def _told_to_callers(settings: Settings) -> list[Data]:
    headers = {"x-tidegate-queue-ms": f"%DYNAMIC_METADATA({ROUTE}:queue_ms)%"}
    headers[REQUEST_ID_HEADER] = "%REQ(x-request-id)%"
    if settings.internal_headers:
        classic = settings.gateway.profile == "classic"
        headers[UPSTREAM_HEADER] = f"%UPSTREAM_METADATA({HOST}:upstream)%" if classic else "%UPSTREAM_CLUSTER%"
        headers["x-tidegate-attempts"] = "%UPSTREAM_REQUEST_ATTEMPT_COUNT%"
    return [set_header(name, value) for name, value in headers.items()]


def _pass_through() -> Data:
    """Uploads are not kept in memory: admission decides by their headers."""
    kind = "envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    return {ADMISSION: typed(kind, overrides={"processing_mode": processing_mode("NONE")})}


def _no_tail(settings: Settings) -> Data:
    if settings.gateway.profile == "classic":
        return {}
    return {TAIL_FILTER: typed("envoy.extensions.filters.http.lua.v3.LuaPerRoute", disabled=True)}
