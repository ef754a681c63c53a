"""Envoy's own spans, for the collector that `telemetry.otlp` names: of each request, and of each attempt.

A trace that a caller began is kept or not as its `traceparent` says; of those that begin here `telemetry.trace_sample`
is kept. That is the sampler's decision: the listener's own sampling would drop what a caller wants kept. Tidegate goes
by what Envoy decided, so that either both tell of a request or neither.

Upstreams that are `owned` get `traceparent`, so that an engine's spans join the trace. Others get none of it, and no
`baggage` either: a provider cannot put its spans there, and whose requests belong together, or what a caller wrote into
its baggage, is no affair of a third party. Envoy names each attempt anew, so an owned upstream behind another still
joins the trace; baggage that was taken away before is not there (in the native profile). In the classic profile only
the listener that callers reach has spans, not the gates: what a gate's router put in could not be taken out again.

What the collector wants to see in headers stands in a file that Envoy reads by itself whenever it sends, as Tidegate
does at its start; it is in no rendered text.

Deliberately not here: meshes and Envoy Gateway, which have tracing of their own for their Envoys, and canaries.
"""

from __future__ import annotations

import json
from urllib.parse import urlsplit

from extproc.render.lua import headers_script
from extproc.render.shape import HTTP_PROTOCOLS, Data, address, extension, source, typed
from extproc.render.tls import collector_tls, is_address
from extproc.settings import OtlpSettings, Settings, UpstreamSettings

__all__ = ["COLLECTOR", "TRACE_HEADERS", "collector_clusters", "collector_port", "hides_traces", "is_ours", "tracing"]

COLLECTOR = "tidegate:collector"
"""No upstream can have this name: a colon is not allowed in theirs."""
TRACE_HEADERS = ("traceparent", "tracestate", "baggage")
SERVICE_NAME = "tidegate-envoy"
_SAMPLERS = "envoy.extensions.tracers.opentelemetry.samplers.v3"
_MILLION = 1_000_000
_WITHOUT_QUERY = "%REQ(:SCHEME)%://%REQ(:AUTHORITY)%%PATH(NQ:PATH):256%"
_TIMEOUT = "5s"


def tracing(settings: Settings) -> Data:
    """`{tracing: ...}` for an HTTP connection manager, or nothing."""
    otlp = _otlp(settings)
    if otlp is None:
        return {}
    share = extension(
        "envoy.tracers.opentelemetry.samplers.trace_id_ratio_based",
        f"{_SAMPLERS}.TraceIdRatioBasedSamplerConfig",
        sampling_percentage={
            "numerator": round(settings.telemetry.trace_sample * _MILLION),
            "denominator": "MILLION",
        },
    )
    tracer = extension(
        "envoy.tracers.opentelemetry",
        "envoy.config.trace.v3.OpenTelemetryConfig",
        http_service={"http_uri": {"uri": _url(otlp), "cluster": COLLECTOR, "timeout": _TIMEOUT}},
        service_name=SERVICE_NAME,
        sampler=extension(
            "envoy.tracers.opentelemetry.samplers.parent_based",
            f"{_SAMPLERS}.ParentBasedSamplerConfig",
            wrapped_sampler=share,
        ),
    )
    return {
        "tracing": {
            "provider": tracer,
            "random_sampling": {"value": 100},
            "spawn_upstream_span": True,
            **_url_tag(settings),
        }
    }


def _url_tag(settings: Settings) -> Data:
    """Envoy's tag of the URL without its query: some callers prove themselves there, and of what is refused nobody has
    taken that out. Envoys before 1.38 know no such tag; there the path is left out, which our own spans tell.
    """
    if settings.gateway.profile == "classic":
        return {"max_path_tag_length": 0}
    return {"custom_tags": [{"tag": "http.url", "value": _WITHOUT_QUERY}]}


def is_ours(told: object) -> bool:
    """Whether tracing of a connection manager is what `tracing` made, whatever the settings were."""
    return json.dumps(COLLECTOR) in json.dumps(told, default=str)


def collector_clusters(settings: Settings) -> list[Data]:
    """The collector, where Envoy has to know it. It may be away: nothing waits for it, not even Envoy's start."""
    otlp = _otlp(settings)
    if otlp is None:
        return []
    url = urlsplit(otlp.endpoint)
    host, port = str(url.hostname), _port(otlp)
    looked_up = {} if is_address(host) else {"dns_lookup_family": "V4_PREFERRED", "wait_for_warm_on_init": False}
    protocols: Data = {"explicit_http_config": {"http_protocol_options": {}}}
    return [
        {
            "name": COLLECTOR,
            "connect_timeout": "2s",
            "type": "STATIC" if is_address(host) else "STRICT_DNS",
            **looked_up,
            "load_assignment": {
                "cluster_name": COLLECTOR,
                "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(host, port)}}]}],
            },
            **({"transport_socket": collector_tls(host)} if url.scheme == "https" else {}),
            "typed_extension_protocol_options": {
                HTTP_PROTOCOLS: typed(HTTP_PROTOCOLS, **protocols, **_filters(otlp)),
            },
        }
    ]


def collector_port(settings: Settings) -> int | None:
    """Where Tidegate or Envoy connect to for telemetry; None where there is no collector."""
    otlp = settings.telemetry.otlp
    return _port(otlp) if otlp is not None else None


def hides_traces(settings: Settings, upstream: UpstreamSettings) -> bool:
    """Whether an upstream is to see none of the traces that Envoy has."""
    return _otlp(settings) is not None and not upstream.owned


def _otlp(settings: Settings) -> OtlpSettings | None:
    otlp = settings.telemetry.otlp
    return otlp if otlp is not None and otlp.traces else None


def _port(otlp: OtlpSettings) -> int:
    url = urlsplit(otlp.endpoint)
    return url.port or (443 if url.scheme == "https" else 80)


def _url(otlp: OtlpSettings) -> str:
    return f"{otlp.endpoint.rstrip('/')}/v1/traces"


def _filters(otlp: OtlpSettings) -> Data:
    if otlp.headers_file is None:
        return {}
    script = source(headers_script(otlp.headers_file))
    return {
        "http_filters": [
            extension("tidegate.headers", "envoy.extensions.filters.http.lua.v3.Lua", default_source_code=script),
            extension(
                "envoy.filters.http.upstream_codec",
                "envoy.extensions.filters.http.upstream_codec.v3.UpstreamCodec",
            ),
        ]
    }
