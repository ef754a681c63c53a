"""The HTTP filters between a client and the routes, in the order a request meets them.

Flood guard (before a byte of the body is kept), the wording of final failures, the response tail, who is calling (JWT),
admission (ext_proc), the router. Answers pass them in reverse: the tail reads an answer before anything else could
change it, and after admission, which does not look at answers at all.

In the classic profile admission reads the answers itself, so there is no tail; what it alone may read of an answer is
taken away behind it, should it be away.
"""

from __future__ import annotations

from collections.abc import Iterator

from extproc.render.access_log import attempts
from extproc.render.lua import notes_script, tail_script
from extproc.render.names import FLAGS_HEADER, GATE_HEADER, ROUTE, SERVICE_CLUSTER, UNDELIVERED
from extproc.render.shape import Data, extension, seconds, source, typed
from extproc.settings import FloodSettings, JwtSettings, Settings

__all__ = ["ADMISSION", "TAIL_FILTER", "http_filters", "local_rate_limit", "processing_mode", "router"]

EXHAUSTED = "upstreams_exhausted"
"""Response code details of a request whose last upstream failed by its own answer."""

ADMISSION = "envoy.filters.http.ext_proc"
TAIL_FILTER = "tidegate.response_tail"
JWT_NAMESPACE = "envoy.filters.http.jwt_authn"

_KEY_HEADERS = ("authorization", "x-api-key", "api-key")
_UNLIMITED = 4294967295

_ABOUT_ANSWERS = (
    "upstream.address",
    "upstream.request_attempt_count",
    "response.code_details",
    "response.flags",
    "xds.cluster_name",
)
"""What admission is told of an answer besides its headers, in the classic profile."""


def http_filters(settings: Settings) -> list[Data]:
    """All filters of the main listener."""
    classic = settings.gateway.profile == "classic"
    return [
        *_flood(settings.flood),
        *([_hiding(), _final_failures(_FROM_GATE, UNDELIVERED)] if classic else [_native_failures(), _tail()]),
        *([_jwt(settings.identity.jwt)] if settings.identity.jwt else []),
        _admission(settings),
        router(upstream_log=attempts(settings, *([FLAGS_HEADER] if classic else []))),
    ]


def router(**fields: object) -> Data:
    """The filter that sends a request on. `x-envoy-` headers stay between Envoy and the service."""
    kind = "envoy.extensions.filters.http.router.v3.Router"
    return extension("envoy.filters.http.router", kind, suppress_envoy_headers=True, **fields)


def local_rate_limit(stat_prefix: str, bucket: Data, **fields: object) -> Data:
    """A local rate limit that is in force for every request."""
    always = {"default_value": {"numerator": 100}}
    return extension(
        "envoy.filters.http.local_ratelimit",
        "envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit",
        stat_prefix=stat_prefix,
        token_bucket=bucket,
        filter_enabled=always,
        filter_enforced=always,
        **fields,
    )


def token_bucket(per_second: int, burst_s: int = 1) -> Data:
    """A bucket filled each second."""
    return {"max_tokens": per_second * burst_s, "tokens_per_fill": per_second, "fill_interval": "1s"}


def _flood(flood: FloodSettings) -> Iterator[Data]:
    """Requests per second of each credential and of each client address; the least recently seen is forgotten first."""
    actions: list[Data] = []
    descriptors: list[Data] = []
    if flood.per_key_rps:
        for header in _KEY_HEADERS:
            actions.append({"request_headers": {"header_name": header, "descriptor_key": header}})
            descriptors.append(_any_value(header, token_bucket(flood.per_key_rps, flood.burst_s)))
    if flood.per_address_rps:
        actions.append({"masked_remote_address": {"v4_prefix_mask_len": 32, "v6_prefix_mask_len": 64}})
        descriptors.append(_any_value("masked_remote_address", token_bucket(flood.per_address_rps, flood.burst_s)))
    if actions:
        yield local_rate_limit(
            "flood",
            {"max_tokens": _UNLIMITED, "tokens_per_fill": _UNLIMITED, "fill_interval": "1s"},
            always_consume_default_token_bucket=False,
            max_dynamic_descriptors=flood.max_keys,
            rate_limits=[{"actions": [action]} for action in actions],
            descriptors=descriptors,
        )


def _any_value(key: str, bucket: Data) -> Data:
    """A bucket of its own for each value of `key`."""
    return {"entries": [{"key": key}], "token_bucket": bucket}


def _native_failures() -> Data:
    from_upstream = _input("envoy.type.matcher.v3.HttpResponseLocalReplyMatchInput", {"exact": "false"})
    return _final_failures(from_upstream, response_code_details=EXHAUSTED)


def _final_failures(from_upstream: Data, *also: int, **fields: str) -> Data:
    """Turns an upstream's last 5xx or 429 into a local reply, which `refusals` words like every other. also: more
    statuses that are failures.
    """
    status = "envoy.type.matcher.v3.HttpResponseStatusCode"
    server_error = _input(f"{status}ClassMatchInput", {"exact": "5xx"})
    special = [_input(f"{status}MatchInput", {"exact": str(code)}) for code in (429, *also)]
    policy = extension(
        "reword",
        "envoy.extensions.http.custom_response.local_response_policy.v3.LocalResponsePolicy",
        status_code=503,
        **fields,
    )
    failed = {"or_matcher": {"predicate": [server_error, *special]}}
    matcher = {"predicate": {"and_matcher": {"predicate": [from_upstream, failed]}}, "on_match": {"action": policy}}
    return extension(
        "tidegate.final_failures",
        "envoy.extensions.filters.http.custom_response.v3.CustomResponse",
        custom_response_matcher={"matcher_list": {"matchers": [matcher]}},
    )


def _input(kind: str, value: Data, **fields: str) -> Data:
    read = {"name": kind, "typed_config": typed(kind, **fields)}
    return {"single_predicate": {"input": read, "value_match": value}}


_FROM_GATE = _input(
    "envoy.type.matcher.v3.HttpResponseHeaderMatchInput",
    {"safe_regex": {"google_re2": {}, "regex": ".+"}},
    header_name=GATE_HEADER,
)
"""Whether an answer came through a gate: older Envoys cannot tell whether a reply is their own."""


def _tail() -> Data:
    """Reads the end of a streamed answer."""
    return extension(TAIL_FILTER, "envoy.extensions.filters.http.lua.v3.Lua", default_source_code=source(tail_script()))


def _hiding() -> Data:
    """Takes off what gates and upstreams tell Envoy and admission."""
    script = source(notes_script(GATE_HEADER))
    return extension("tidegate.hide_notes", "envoy.extensions.filters.http.lua.v3.Lua", default_source_code=script)


def _jwt(jwt: JwtSettings) -> Data:
    """Verifies a token where there is one; what it proves decides admission, which refuses where a token is needed."""
    provider = {
        **({"issuer": jwt.issuer} if jwt.issuer else {}),
        **({"audiences": list(jwt.audiences)} if jwt.audiences else {}),
        "local_jwks": {"filename": jwt.jwks_file},
        "from_headers": [
            {"name": jwt.header, **({"value_prefix": "Bearer "} if jwt.header == "authorization" else {})}
        ],
        "forward": True,
        "payload_in_metadata": "claims",
    }
    either = {"requirements": [{"provider_name": "caller"}, {"allow_missing_or_failed": {}}]}
    return extension(
        JWT_NAMESPACE,
        "envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication",
        providers={"caller": provider},
        rules=[{"match": {"prefix": "/"}, "requires": {"requires_any": either}}],
    )


def _admission(settings: Settings) -> Data:
    """Asks Tidegate. Should it be away, the request goes on without a ticket, and the routes refuse it: running answers
    must not be cut when the service restarts. Trailers are asked for so that the stream lives as long as the answer.
    """
    classic = settings.gateway.profile == "classic"
    namespaces = {"receiving_namespaces": {"untyped": [ROUTE]}}
    if settings.identity.jwt:
        namespaces = {"forwarding_namespaces": {"untyped": [JWT_NAMESPACE]}, **namespaces}
    return extension(
        ADMISSION,
        "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": SERVICE_CLUSTER}},
        failure_mode_allow=True,
        message_timeout=seconds(settings.gateway.message_timeout_s),
        max_message_timeout=seconds(settings.max_message_timeout_s),
        mutation_rules={"allow_envoy": True},
        processing_mode=processing_mode("BUFFERED"),
        metadata_options=namespaces,
        **({"response_attributes": list(_ABOUT_ANSWERS), "allow_mode_override": True} if classic else {}),
    )


def processing_mode(body: str) -> Data:
    """What admission is shown of a request, and that it is shown nothing of the answer but its end.

    In the classic profile admission asks for more where it lets a request go.
    """
    return {
        "request_header_mode": "SEND",
        "request_body_mode": body,
        "request_trailer_mode": "SKIP",
        "response_header_mode": "SKIP",
        "response_body_mode": "NONE",
        "response_trailer_mode": "SEND",
    }
