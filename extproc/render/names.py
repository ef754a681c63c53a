"""Words that the rendered Envoy and the service share: clusters, logs, metadata namespaces, internal headers.

Metadata that the service writes at admission, namespace `llm.route` (all strings unless said otherwise):

    ticket        id of the admitted flight; its presence is what "admitted" means to the routes
    priority_groups  [{name: upstream}, ...]: the order of this request
    tenant, lane, model, session, reserved  what else a reader of the access log may want to know
    cap           number: output tokens that the caller allowed; absent where it named none
    stops         number: 1 where the caller named texts that end the answer; absent where it named none
    path          original path and query, `/v1/...`; absent for canaries
    dialect       "openai" or "anthropic"
    again         bool: the only upstream of the order may be asked a second time
    stream        bool: a stream whose first token is due within `timeouts.stall_s`; silence as long as that ends it
    hide_usage    bool: the client did not ask for the usage chunk that its stream will have
    heads, width  {upstream: head}, number: the first `width` bytes of the body are replaced by that head and spaces
    deadline_ms   number: time left at departure, told to owned upstreams
    per_try_ms    number: how long an attempt may take to begin its answer, where there is a deadline
    began_ms, late  number, bool, by Lua at each attempt: when the first began, whether this one ends with the deadline
    queue_ms      time spent waiting, shown to the caller
    fail_body, fail_retry  body and retry-after of "every upstream failed"
    last_resort   "json" or "events" where `fail_body` is an answer rather than an error, and such a one

Metadata that Lua writes: `llm.tail`, what the answer said of itself (see `lua/usage.lua`), and `llm.limits`, the rate
limit headers of the upstream that answered, by header name; the caller does not see those.
"""

from __future__ import annotations

__all__ = [
    "ATTEMPTS_LOG",
    "ERROR_HEADER",
    "FLAGS_HEADER",
    "GATE_HEADER",
    "HIDDEN_FROM_UPSTREAMS",
    "HOST",
    "LAST_RESORT_HEADER",
    "LIMITS",
    "ORDER_HEADER",
    "OUTCOMES_LOG",
    "PROBE_HEADER",
    "REQUEST_ID_HEADER",
    "ROUTE",
    "ROUTE_HEADER",
    "SERVICE_CLUSTER",
    "STATUS_HEADER",
    "TAIL",
    "TAIL_HEADER",
    "UNDELIVERED",
    "UPSTREAM_HEADER",
    "WAIT_HEADER",
    "one_service",
]

SERVICE_CLUSTER = "tidegate:service"
"""No upstream can have this name: a colon is not allowed in theirs."""

OUTCOMES_LOG = "outcomes"
ATTEMPTS_LOG = "attempts"

ROUTE = "llm.route"
TAIL = "llm.tail"
LIMITS = "llm.limits"

PROBE_HEADER = "x-tidegate-probe"

ERROR_HEADER = "x-tg-err"
"""`type/code` of an upstream's error, for the attempts log."""
FLAGS_HEADER = "x-tg-flags"
"""Classic profile: Envoy's flags where an upstream gave a gate no answer, for the attempts log."""
LAST_RESORT_HEADER = "x-tidegate-last-resort"
"""Marks an answer that stands in where no upstream answered."""
STATUS_HEADER = "x-tg-status"
"""Status that the upstream really sent, where Lua replaced it so that the next one is tried."""
TAIL_HEADER = "x-tg-tail"
"""Classic profile: what an upstream's script noted of a JSON answer, `key=word;key=word`."""
WAIT_HEADER = "x-tg-wait"
"""How long an upstream's error says to wait in its body, as a duration (`22s`)."""

UPSTREAM_HEADER = "x-tidegate-upstream"
"""Who answered, or was asked last."""
REQUEST_ID_HEADER = "x-tidegate-request-id"
"""Envoy's id of the request, by which it can be explained. Providers' answers have an `x-request-id` of their own."""
GATE_HEADER = "x-tidegate-gate"
"""Classic profile: name of the gate that an answer came through. Callers do not see it."""
HOST = "tidegate"
"""Classic profile: metadata of a gate, as a host, with the name of the `upstream` behind it."""
UNDELIVERED = 421
"""Classic profile: status under which a gate tells that it could not deliver an answer. No provider answers so."""
ORDER_HEADER = "x-tidegate-cluster"
"""Classic profile: the cluster by which a request goes through its order of upstreams."""
ROUTE_HEADER = "x-tidegate-route"
"""Classic profile: what gates are to know of `llm.route`, as JSON in ASCII."""

HIDDEN_FROM_UPSTREAMS = (
    "accept-encoding",
    "x-forwarded-for",
    "x-forwarded-proto",
    "x-envoy-attempt-count",
    "x-envoy-external-address",
    "x-envoy-internal",
)
"""What Envoy says of the caller and of itself."""


def one_service(rank: int) -> str:
    """The cluster of one of several Tidegates: what it has let go is reported to itself."""
    return f"{SERVICE_CLUSTER}:{rank}"
