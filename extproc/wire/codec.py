"""Envoy's messages to our values and back; nothing here waits or decides.

Field numbers and meanings: protos/. Metadata is built field by field because that is several times cheaper than
`Struct.update`, and this is the hot path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import ceil

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from extproc.ports import Departure, Head, Record, RecordKind
from extproc.wire.pb.access_log_pb2 import AccessLogCommon, AccessLogType, HttpAccessLogEntry, HttpResponseProperties
from extproc.wire.pb.ext_proc_pb2 import (
    BodyResponse,
    HeadersResponse,
    HeaderValueOption,
    ProcessingRequest,
    ProcessingResponse,
    TrailersResponse,
)

__all__ = [
    "CONTINUE",
    "FLAGS",
    "LAST_RESORT",
    "ROUTE",
    "TAIL",
    "TRACE",
    "TRAILERS_PASS",
    "departure",
    "head",
    "immediate",
    "leaving",
    "patience",
    "put",
    "record",
    "upstream_at",
    "whole_ms",
]

ROUTE = "llm.route"
"""Metadata namespace that this service writes and Envoy routes by."""
TAIL = "llm.tail"
"""Metadata namespace where Envoy's response filters note what they saw."""
LIMITS = "llm.limits"
"""Metadata namespace where they note the rate limit headers of the upstream that answered."""
LAST_RESORT = "x-tidegate-last-resort"
"""Header of an answer that stands in where every upstream failed."""
FLAGS = "x-tg-flags"
"""Where a gate says, in Envoy's short words, why it answered in place of its upstream."""
SHORT = {
    "UH": "no_healthy_upstream",
    "UT": "upstream_request_timeout",
    "LR": "local_reset",
    "UR": "upstream_remote_reset",
    "UF": "upstream_connection_failure",
    "UC": "upstream_connection_termination",
    "UO": "upstream_overflow",
    "SI": "stream_idle_timeout",
    "DT": "duration_timeout",
    "UPE": "upstream_protocol_error",
    "DF": "dns_resolution_failure",
}
OWN = "tidegate:"
"""Begins the names of clusters that are not an upstream's own."""
GATES = "@tidegate/"
"""Begins the addresses of gates."""
TRACE = "traceparent"
"""Name of the header, and of the metadata of a gRPC stream, in which a span names itself to those that it asks."""
WAIT = "x-tg-wait"
"""Where they put how long an error says to wait in its body."""
JWT = "envoy.filters.http.jwt_authn"
JWT_KEY = "claims"
NO_FLAGS: frozenset[str] = frozenset()
OVERWRITE = HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD

CONTINUE = ProcessingResponse(request_headers=HeadersResponse()).SerializeToString()
TRAILERS_PASS = ProcessingResponse(response_trailers=TrailersResponse()).SerializeToString()

_PERIODIC = AccessLogType.DownstreamPeriodic
_ATTEMPT = AccessLogType.UpstreamEnd


def head(message: ProcessingRequest, trace: str = "") -> Head:
    """The request headers, named in lower case by Envoy. Values that are not UTF-8 keep their bytes as surrogates.

    trace: `traceparent` of Envoy's own span, in place of the caller's, where Envoy traces this request.
    """
    asked = message.request_headers
    headers = {h.key: h.raw_value.decode("utf-8", "surrogateescape") or h.value for h in asked.headers.headers}
    if trace:
        headers[TRACE] = trace
    claims = {}
    if message.HasField("metadata_context"):
        verified = message.metadata_context.filter_metadata
        if JWT in verified:
            claims = MessageToDict(verified[JWT]).get(JWT_KEY, {})
    return Head(headers, asked.end_of_stream, claims if isinstance(claims, dict) else {})


def patience(seconds: float) -> bytes:
    """Ask Envoy to wait `seconds` and a margin for the answer to the message at hand."""
    response = ProcessingResponse()
    response.override_message_timeout.seconds = ceil(seconds) + 4
    return response.SerializeToString()


def departure(going: Departure, asked: str) -> bytes:
    """The answer that lets a request go, to the message named `asked` (request_headers or request_body)."""
    return leaving(going, asked).SerializeToString()


def leaving(going: Departure, asked: str) -> ProcessingResponse:
    """The same as a message, to which more may be added."""
    response = ProcessingResponse()
    answer: HeadersResponse | BodyResponse = getattr(response, asked)
    common = answer.response
    common.clear_route_cache = True
    mutation = common.header_mutation
    # Envoy acts on clear_route_cache only together with a header mutation: the retry count always is one.
    put(mutation.set_headers, "x-envoy-max-retries", str(len(going.order) - 1 + going.again))
    if going.per_try_s is not None:
        put(mutation.set_headers, "x-envoy-upstream-rq-per-try-timeout-ms", str(whole_ms(going.per_try_s)))
    if going.total_s is not None:
        put(mutation.set_headers, "x-envoy-upstream-rq-timeout-ms", str(whole_ms(going.total_s)))
    mutation.remove_headers.extend(going.removed)
    if going.body is not None:
        common.body_mutation.body = going.body
        put(mutation.set_headers, "content-length", str(len(going.body)))
    _write_route(response.dynamic_metadata.fields[ROUTE].struct_value, going)
    return response


def immediate(status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> bytes:
    """Answer the client without any upstream."""
    response = ProcessingResponse()
    answer = response.immediate_response
    answer.status.code = status
    answer.body = body
    answer.details = details
    for name, value in headers:
        put(answer.headers.set_headers, name, value)
    return response.SerializeToString()


def record(entry: HttpAccessLogEntry) -> Record | None:
    """What one access log entry says, None when it is about a request that was never let go."""
    common = entry.common_properties
    metadata = common.metadata.filter_metadata
    ticket = common.custom_tags.get("ticket", "").strip("-")
    response = entry.response
    kind = {_PERIODIC: RecordKind.RUNNING, _ATTEMPT: RecordKind.ATTEMPT}.get(common.access_log_type, RecordKind.FINAL)
    if not ticket and kind is not RecordKind.ATTEMPT:
        return None
    return Record(
        kind=kind,
        ticket=ticket,
        upstream=_upstream(common),
        status=_status(response),
        flags=_flags(common, response.response_headers),
        details=response.response_code_details,
        attempt=common.upstream_request_attempt_count,
        duration_s=common.duration.seconds + common.duration.nanos / 1e9,
        first_token_s=_micros(common.custom_tags.get("ttft_us", "")),
        answered_s=_answered(common),
        request_id=entry.request.request_id,
        shown=response.response_code.value,
        error=response.response_headers.get("x-tg-err", ""),
        headers=_limits(_words(metadata[LIMITS]) if LIMITS in metadata else {}, response.response_headers),
        tail=_words(metadata[TAIL]) if TAIL in metadata else {},
    )


def _write_route(route: Struct, going: Departure) -> None:
    frame = _frame(going.order, going.dialect, going.fail_retry_s, going.stream, going.hide_usage, going.last_resort)
    route.CopyFrom(frame)
    fields = route.fields
    fields["ticket"].string_value = going.ticket
    fields["path"].string_value = going.path
    fields["queue_ms"].string_value = str(going.queue_ms)
    fields["fail_body"].string_value = going.fail_body
    if going.again:
        fields["again"].bool_value = True
    if going.deadline_ms is not None:
        fields["deadline_ms"].number_value = going.deadline_ms
        if going.per_try_s is not None:
            fields["per_try_ms"].number_value = whole_ms(going.per_try_s)
    if going.heads:
        fields["width"].number_value = going.width
        heads = fields["heads"].struct_value.fields
        for name, text in going.heads.items():
            heads[name].string_value = text
    for name, word in going.facts.items():
        if isinstance(word, str):
            fields[name].string_value = word
        else:
            fields[name].number_value = word


@lru_cache(maxsize=4096)
def _frame(
    order: tuple[str, ...],
    dialect: str,
    retry_s: int,
    stream: bool,  # noqa: FBT001 - the cache is faster without names
    hide_usage: bool,  # noqa: FBT001 - same
    last_resort: str,
) -> Struct:
    """What many departures have in common; copied, never changed."""
    frame = Struct()
    groups = frame.fields["priority_groups"].list_value.values
    for name in order:
        groups.add().struct_value.fields["name"].string_value = name
    frame.fields["dialect"].string_value = dialect
    frame.fields["fail_retry"].string_value = str(retry_s)
    if last_resort:
        frame.fields["last_resort"].string_value = last_resort
    for name, flag in (("stream", stream), ("hide_usage", hide_usage)):
        if flag:
            frame.fields[name].bool_value = True
    return frame


def put(headers: Iterable[HeaderValueOption], name: str, value: str) -> None:
    """Set a header, in place of any of its name."""
    option = headers.add()  # type: ignore[attr-defined]
    option.append_action = OVERWRITE
    header = option.header
    header.key, header.raw_value = name, value.encode("utf-8", "surrogateescape")


def _status(response: HttpResponseProperties) -> int:
    """What the upstream really sent where a filter made it a failure; an error under 200 stays the failure it is, and
    an answer of last resort means that there was none.
    """
    if LAST_RESORT in response.response_headers:
        return 503
    sent = response.response_headers.get("x-tg-status", "")
    return int(sent) if sent.isdigit() and int(sent) >= 400 else response.response_code.value  # noqa: PLR2004


def _upstream(common: AccessLogCommon) -> str:
    """Who was asked. Behind a gate that is the gate's name, and so the last part of its address."""
    name: str = common.upstream_cluster
    if name.startswith(OWN) and common.HasField("upstream_remote_address"):
        return upstream_at(common.upstream_remote_address.pipe.path) or name
    return name


def upstream_at(address: str) -> str:
    """The upstream behind the gate at `address`; empty where that is none."""
    return address.rpartition("/")[2] if address.startswith(GATES) else ""


def _flags(common: AccessLogCommon, headers: Mapping[str, str]) -> frozenset[str]:
    """What became of it; where a gate answered in place of its upstream, what became of it there."""
    own = NO_FLAGS
    if common.HasField("response_flags"):
        own = frozenset(field.name for field, value in common.response_flags.ListFields() if value is True)
    told = headers.get(FLAGS)
    return own | {SHORT[word] for word in told.split(",") if word in SHORT} if told else own


def _answered(common: AccessLogCommon) -> float | None:
    if not common.HasField("time_to_first_upstream_rx_byte"):
        return None
    first = common.time_to_first_upstream_rx_byte
    return first.seconds + first.nanos / 1e9


def whole_ms(seconds: float) -> int:
    """A limit in milliseconds, as Envoy takes it. Never 0, which would be none, and not what is left of a deadline."""
    return max(1, int(seconds * 1000))


def _words(struct: Struct) -> Mapping[str, str | float]:
    found: dict[str, str | float] = {}
    for name, value in struct.fields.items():
        kind = value.WhichOneof("kind")
        if kind in ("string_value", "number_value", "bool_value"):
            found[name] = getattr(value, kind)
    return found


def _limits(noted: Mapping[str, str | float], sent: Mapping[str, str]) -> dict[str, str]:
    """Headers about limits: those that were noted when they were taken off an answer, and those that were left on."""
    if not noted and not sent:
        return {}
    found = {name: str(word) for name, word in noted.items()} | dict(sent)
    if WAIT in found:
        found.setdefault("retry-after", found[WAIT])
    return found


def _micros(text: str) -> float | None:
    return int(text) / 1e6 if text.isdigit() else None
