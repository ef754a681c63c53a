"""What the classic profile sends and is sent, beside what both do (see codec): how a request is routed by headers, and
what is shown of its answer.

An Envoy before 1.40 cannot be told the order of upstreams by metadata. It is told a cluster by header, and each
upstream's gate is told by another what to do for this request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from extproc.core.orders import name_of
from extproc.core.value import value
from extproc.ports import Departure
from extproc.wire import codec
from extproc.wire.pb.ext_proc_pb2 import BodyResponse, HeadersResponse, ProcessingMode, ProcessingRequest
from extproc.wire.pb.ext_proc_pb2 import ProcessingResponse as Response

__all__ = ["BODY_PASSES", "CONTINUE", "Shown", "body", "departure", "noted", "pass_head", "route", "shown"]

CLUSTER = "x-tidegate-cluster"
"""Header that names the cluster a request goes to."""
ROUTE = "x-tidegate-route"
"""Header that tells the gates what the metadata of the same meaning tells the upstream's own filters."""
TAIL = "x-tg-tail"
"""Header with what a gate noted of an answer that it read whole: `key=word;key=word`."""
NUMBERS = frozenset({"in", "out", "cached", "cache_write", "reasoning"})
"""Which of these words are numbers."""
READ = frozenset({"cap", "stops", "results"})
"""What an upstream's script wants to know of what the caller asked."""
INTERNAL = "x-tg-"
LIMITS = ("ratelimit-", "tokenlimit-")
"""What a name holds that tells of the limits of our account: the caller does not see those of answers that it gets."""
NEARLY = 0.95
"""So much of a deadline counts as all of it."""
VIA_UPSTREAM = "via_upstream"
"""Details of an answer that Envoy did not make itself."""
ATTRIBUTES = "envoy.filters.http.ext_proc"
_ATTRIBUTES = ("upstream.address", "upstream.request_attempt_count", "response.code_details", "response.flags")

BODY_PASSES = Response(response_body=BodyResponse()).SerializeToString()

_FLAGS = (
    (1, "no_healthy_upstream"),
    (2, "upstream_request_timeout"),
    (3, "local_reset"),
    (4, "upstream_remote_reset"),
    (5, "upstream_connection_failure"),
    (6, "upstream_connection_termination"),
    (7, "upstream_overflow"),
    (14, "downstream_connection_termination"),
    (15, "upstream_retry_limit_exceeded"),
    (16, "stream_idle_timeout"),
    (22, "duration_timeout"),
    (23, "upstream_protocol_error"),
    (26, "dns_resolution_failure"),
    (28, "downstream_remote_reset"),
)
"""Envoy's response flags by their bit in the attribute `response.flags`, as far as a record may name them."""


@value
class Shown:
    """The head of an answer. status: as the caller will see it. upstream: who answered, empty where Envoy did by
    itself. details, flags, attempt: as in ports.Record. tail: what a gate noted. limits: headers for ports.Record.
    removed: headers that the caller does not see. own: it is Envoy's, even if an upstream was asked. silent: it is a
    gate's, whose upstream gave none. instead: it stands in where every upstream failed. whole: no body follows.
    """

    status: int
    kind: str
    upstream: str
    details: str
    flags: frozenset[str]
    attempt: int
    own: bool
    silent: bool
    instead: bool
    whole: bool
    limits: Mapping[str, str] = field(default_factory=dict)
    tail: Mapping[str, str | float] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


def _asking(response: Response, body: ProcessingMode.BodySendMode) -> Response:
    """Has the head of the answer shown, and its end.

    Asked for request by request: where Envoy showed all answers, it would show those that it gives by itself, to a
    flood or to what is no HTTP, and have dropped the latter before we let it go on.
    """
    mode, send = response.mode_override, ProcessingMode.HeaderSendMode.SEND
    mode.request_header_mode = mode.response_header_mode = mode.response_trailer_mode = send
    mode.request_trailer_mode = ProcessingMode.HeaderSendMode.SKIP
    mode.request_body_mode = body
    return response


CONTINUE = _asking(
    Response(request_headers=HeadersResponse()), ProcessingMode.BodySendMode.BUFFERED
).SerializeToString()
"""Lets the body of a request come. A word about the answer counts only in what is said to headers."""


def departure(going: Departure, asked: str, now_ms: int) -> bytes:
    """The answer that lets a request go. now_ms: since the epoch."""
    response = codec.leaving(going, asked)
    if asked == "request_headers":
        _asking(response, ProcessingMode.BodySendMode.NONE)
    answer: HeadersResponse | BodyResponse = getattr(response, asked)
    headers = answer.response.header_mutation.set_headers
    codec.put(headers, CLUSTER, name_of(going.order))
    codec.put(headers, ":path", going.path)
    codec.put(headers, ROUTE, json.dumps(route(going, now_ms), separators=(",", ":")))
    if _ends_with_deadline(going):
        response.dynamic_metadata.fields[codec.ROUTE].struct_value.fields["late"].bool_value = True
    return response.SerializeToString()


def route(going: Departure, now_ms: int) -> dict[str, Any]:
    """What gates are told: of what stands in the metadata only what an upstream's script reads. Envoy takes no more of
    headers than 60 KiB altogether, the caller's included, and what callers wrote may be long.

    The path is the request's own there. Each attempt starts with this, so that where there is a deadline it also says
    when the first began.
    """
    words: dict[str, Any] = {
        "priority_groups": [{"name": name} for name in going.order],
        "ticket": going.ticket,
        **{name: word for name, word in going.facts.items() if name in READ},
    }
    if going.again:
        words["again"] = True
    if going.deadline_ms is not None:
        words |= {"deadline_ms": going.deadline_ms, "began_ms": now_ms}
        if going.per_try_s is not None:
            words["per_try_ms"] = codec.whole_ms(going.per_try_s)
    if going.heads:
        words |= {"width": going.width, "heads": dict(going.heads)}
    return words


def shown(message: ProcessingRequest) -> Shown:
    """The head of an answer, from an upstream or of Envoy's own making."""
    answer = message.response_headers
    headers = {h.key: h.raw_value.decode("utf-8", "surrogateescape") or h.value for h in answer.headers.headers}
    told = message.attributes[ATTRIBUTES].fields if ATTRIBUTES in message.attributes else {}
    words = {name: told[name].string_value or told[name].number_value for name in _ATTRIBUTES if name in told}
    status = headers.get(":status", "")
    removed = tuple(name for name in headers if name.startswith(INTERNAL) or any(part in name for part in LIMITS))
    limits = {name: headers[name] for name in removed if not name.startswith(INTERNAL)}
    if "retry-after" in headers:
        limits["retry-after"] = headers["retry-after"]
    upstream, details = codec.upstream_at(str(words.get("upstream.address", ""))), words.get("response.code_details")
    return Shown(
        status=int(status) if status.isdigit() else 0,
        kind=headers.get("content-type", ""),
        upstream=upstream,
        details=str(details or ""),
        flags=_flags(int(words.get("response.flags", 0))),
        attempt=int(words.get("upstream.request_attempt_count", 0)),
        own=not upstream or details not in (None, VIA_UPSTREAM),
        silent=codec.FLAGS in headers,
        instead=codec.LAST_RESORT in headers,
        whole=answer.end_of_stream,
        limits=limits,
        tail=noted(headers.get(TAIL, "")),
        removed=removed,
    )


def noted(text: str) -> dict[str, str | float]:
    """What a gate noted of an answer."""
    if not text:
        return {}
    found: dict[str, str | float] = {}
    for part in text.split(";"):
        key, _, word = part.partition("=")
        if key not in NUMBERS:
            found[key] = word
        elif word.isdecimal():
            found[key] = float(word)
    return found


def pass_head(head: Shown, *, read: bool) -> bytes:
    """Let the head of an answer go on, without what only we may see. read: its body is shown to us as it comes.

    An answer that is changed on its way can no longer say how long it is.
    """
    response = Response()
    mutation = response.response_headers.response.header_mutation
    mutation.remove_headers.extend(head.removed)
    if read:
        mutation.remove_headers.append("content-length")
        response.mode_override.response_body_mode = ProcessingMode.BodySendMode.STREAMED
    else:
        mutation.SetInParent()
    return response.SerializeToString()


def body(sent: bytes) -> bytes:
    """Let `sent` go on in place of a piece of an answer."""
    response = Response()
    mutation = response.response_body.response.body_mutation
    if sent:
        mutation.body = sent
    else:
        mutation.clear_body = True
    return response.SerializeToString()


def _ends_with_deadline(going: Departure) -> bool:
    """Whether no time is left of the deadline once each attempt has used its own. A gate cannot tell Envoy's replies
    before it, as the upstream's own filters do attempt by attempt (`lua/upstream.lua`).
    """
    if going.deadline_ms is None or going.per_try_s is None:
        return False
    return going.per_try_s * 1000 * (len(going.order) + going.again) >= NEARLY * going.deadline_ms


def _flags(bits: int) -> frozenset[str]:
    return frozenset(name for bit, name in _FLAGS if bits >> bit & 1)
