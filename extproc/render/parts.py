"""Tidegate's parts of an Envoy that has other work, too: for `tidegate merge`, and to put in by hand.

The same filters, routes and clusters as in the whole bootstrap, made such that nothing else of the Envoy feels them:

- Every filter is `disabled` and every route of ours switches it on. So other routes have none of them in their way:
  Envoy chooses who takes part by the route it finds first, before any filter runs.
- The routes take exactly the paths of LLM endpoints, not everything.
- The first filter leaves a mark in the request's metadata. Logs of ours, and our wording of Envoy's own answers, are
  for marked requests only; what a filter before it refused was worded by whoever configured that filter.
- Headers that only Envoy and the service may set are taken away by a filter, since an early header mutation would take
  them from everybody. A request gets a new `x-request-id` there, which joins its attempts to it.
- Bodies are kept up to `gateway.max_body_bytes` by a buffer filter, whatever the listener's own limit is.

Everything has a name that begins with `tidegate`, or is marked in its metadata (clusters), so that it can be told from
what was there before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from extproc.dialects.paths import FAMILIES
from extproc.render.access_log import attempts, outcomes
from extproc.render.clusters import clusters
from extproc.render.filters import ADMISSION, JWT_NAMESPACE, http_filters
from extproc.render.gates import gate_listeners
from extproc.render.listener import request_cleaning
from extproc.render.lua import host_script
from extproc.render.names import FLAGS_HEADER
from extproc.render.probe import probe_listener
from extproc.render.refusals import cel, local_replies
from extproc.render.routes import route_config
from extproc.render.shape import Data, extension, set_header, source, typed
from extproc.render.tracing import collector_clusters, tracing
from extproc.render.upstream import secrets
from extproc.settings import Settings

__all__ = ["FLUSH", "LLM_PATHS", "MARK", "NO_UPGRADES", "OURS", "OWNER", "Parts", "parts", "paths_taken"]

OURS = "tidegate."
"""How the names of filters, routes, logs and the listener begin."""
OWNER = "tidegate"
"""Namespace of the metadata that marks a cluster as ours, and a request that came as far as our filters."""

MARK = f"{OURS}mark"
"""The filter that marks a request as ours."""

NO_UPGRADES = f"{OURS}no-upgrades"
"""A route that only a mesh's Envoys have, see `istio.patches`."""

LLM_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
)
"""The paths that are counted in tokens."""

FLUSH = "5s"
"""How often a running answer is reported, so that its slot stays taken over a restart of the service."""

_HERE: Data = {
    "metadata_filter": {
        "matcher": {"filter": OWNER, "path": [{"key": "here"}], "value": {"bool_match": True}},
        "match_if_key_not_found": False,
    }
}
"""Whether a request came as far as our first filter."""

_NAMES = {
    "envoy.filters.http.local_ratelimit": "tidegate.flood",
    JWT_NAMESPACE: "tidegate.jwt",
    ADMISSION: "tidegate.admission",
}
_BUFFER = "tidegate.buffer"
_LETTERS = 70
_MODELS = "models"
_BATCHES = "messages/batches"

_NO_PREFLIGHT: Data = {"name": ":method", "string_match": {"exact": "OPTIONS"}, "invert_match": True}
"""What browsers ask before they call is for the routes that are there, and for what answers it there (`cors`)."""

# What a router adds unless it is told otherwise for all routes; the count of attempts to each retry anew. And who the
# caller is, as a connection manager or the proxy before it tells.
_HIDDEN_FROM_UPSTREAMS = (
    "x-envoy-expected-rq-timeout-ms",
    "x-envoy-decorator-operation",
    "x-envoy-attempt-count",
    "x-forwarded-client-cert",
)
_HIDDEN_FROM_CALLERS = ("x-envoy-upstream-service-time", "x-envoy-attempt-count", "x-envoy-decorator-operation")


@dataclass(frozen=True, slots=True)
class Parts:
    """Each part as it stands in Envoy's own field of that name."""

    http_filters: list[Data]
    routes: list[Data]
    clusters: list[Data]
    secrets: list[Data]
    listeners: list[Data]
    access_log: list[Data]
    upstream_log: list[Data]
    mappers: list[Data]
    tracing: Data


def parts(settings: Settings, *, traced: bool = True) -> Parts:
    """All parts for these settings. traced: Envoy's own tracing among them, where it is set."""
    filters = list(_filters(settings))
    classic = settings.gateway.profile == "classic"
    return Parts(
        http_filters=filters,
        routes=list(_routes(settings, [item["name"] for item in filters])),
        clusters=[
            _cluster(settings, cluster)
            for cluster in (*clusters(settings), *(collector_clusters(settings) if traced else []))
        ],
        secrets=secrets(settings),
        listeners=[
            {**probe_listener(settings), "name": f"{OURS}probe"},
            *(gate_listeners(settings) if classic else []),
        ],
        access_log=[] if classic else [_of_marked(log) for log in outcomes(settings)],
        upstream_log=[
            _of_our_upstreams(settings, log) for log in attempts(settings, *([FLAGS_HEADER] if classic else []))
        ],
        mappers=[_left_alone(), *(_of_ours(mapper) for mapper in local_replies(settings)["mappers"])],
        tracing=tracing(settings) if traced else {},
    )


def _cluster(settings: Settings, cluster: Data) -> Data:
    """Marked as ours. Its own filters remove what the router tells upstreams, and set the host: where the router does
    that, it tells which host callers asked for. In the classic profile gates do both.
    """
    found = {**cluster, "metadata": {"filter_metadata": {OWNER: {"part": True}}}}
    if cluster["name"].startswith(f"{OWNER}:") or settings.gateway.profile == "classic":
        return found
    (protocols,) = cluster["typed_extension_protocol_options"].values()
    endpoint = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    script = source(host_script(endpoint["hostname"]))
    kind = "envoy.extensions.filters.http.header_mutation.v3.HeaderMutation"
    hiding = {"request_mutations": [{"remove": name} for name in _HIDDEN_FROM_UPSTREAMS]}
    protocols["http_filters"][:0] = [
        extension("tidegate.hide", kind, mutations=hiding),
        extension("tidegate.host", "envoy.extensions.filters.http.lua.v3.Lua", default_source_code=script),
    ]
    return found


def paths_taken(settings: Settings) -> tuple[str, ...]:
    """One path for each endpoint that the routes take."""
    return (*LLM_PATHS, *(f"/v1/{family}" for family in _others(settings)))


def _others(settings: Settings) -> tuple[str, ...]:
    """Families of endpoints that are not counted in tokens; what nobody here would serve is left to other routes."""
    return FAMILIES if settings.other_endpoints else (_MODELS,)


# --------------------------------------------------------------------------------------------- filters


def _filters(settings: Settings) -> Iterator[Data]:
    """Cleaning and mark, flood guard, final failures, tail, JWT, buffer, admission."""
    yield _disabled(_cleaning(settings))
    yield _disabled(_marking())
    for item in http_filters(settings)[:-1]:
        if item["name"] == ADMISSION:
            yield _disabled(_buffer(settings))
        yield _disabled({**item, "name": _NAMES.get(item["name"], item["name"])})


def _disabled(item: Data) -> Data:
    return {"name": item["name"], "disabled": True, "typed_config": item["typed_config"]}


def _cleaning(settings: Settings) -> Data:
    fresh = {"append": set_header("x-request-id", "%UNIQUE_ID%")}
    return extension(
        "tidegate.clean_request",
        "envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
        mutations={"request_mutations": [fresh, *request_cleaning(settings)]},
    )


def _marking() -> Data:
    return extension(
        MARK,
        "envoy.extensions.filters.http.set_metadata.v3.Config",
        metadata=[{"metadata_namespace": OWNER, "value": {"here": True}}],
    )


def _buffer(settings: Settings) -> Data:
    kind = "envoy.extensions.filters.http.buffer.v3.Buffer"
    return extension(_BUFFER, kind, max_request_bytes=settings.gateway.max_body_bytes)


# ---------------------------------------------------------------------------------------------- routes


def _routes(settings: Settings, filters: list[str]) -> Iterator[Data]:
    unread = [name for name in filters if name != _BUFFER]
    for route in route_config(settings)["virtual_hosts"][0]["routes"]:
        match, name = route["match"], f"{OURS}{route['name']}"
        if "dynamic_metadata" not in match:
            match = {**match, "headers": [*match.get("headers", []), _NO_PREFLIGHT]}
        if "safe_regex" in match:
            yield _route(settings, {**route, "name": name, "match": match}, filters)
            continue
        families = _others(settings) if "prefix" in match else [f for f in _others(settings) if f == _BATCHES]
        conditions = {key: value for key, value in match.items() if "prefix" not in key}
        for i, some in enumerate(_few(families)):
            narrow = {"safe_regex": {"regex": f"/v1/({'|'.join(some)})(/.*)?"}, **conditions}
            yield _route(settings, {**route, "name": f"{name}-{i}" if i else name, "match": narrow}, unread)


def _few(families: Iterable[str]) -> Iterator[list[str]]:
    """Groups of a size that Envoy accepts in one expression: a hundred steps, about one for each letter."""
    some: list[str] = []
    for family in families:
        if sum(map(len, [*some, family])) > _LETTERS:
            yield some
            some = []
        some.append(family)
    if some:
        yield some


def _route(settings: Settings, route: Data, filters: list[str]) -> Data:
    """A route that switches the filters on; what virtual hosts would add to one that goes upstream is kept out."""
    own = {_NAMES.get(name, name): config for name, config in route.get("typed_per_filter_config", {}).items()}
    on = typed("envoy.config.route.v3.FilterConfig", config={})
    changed = {
        **route,
        "typed_per_filter_config": {name: own.get(name, on) for name in filters},
    }
    if "route" not in route:
        return changed
    gateway = settings.gateway
    return {
        **changed,
        "route": {"retry_policy": {}, **{k: v for k, v in route["route"].items() if k != "auto_host_rewrite"}},
        "request_body_buffer_limit": max(gateway.max_body_bytes, gateway.max_answer_bytes),
        "response_headers_to_remove": [*route["response_headers_to_remove"], *_HIDDEN_FROM_CALLERS],
    }


# ------------------------------------------------------------------------------- logs and local replies


def _of_our_upstreams(settings: Settings, log: Data) -> Data:
    """An attempt carries no metadata, but the cluster that it went to."""
    names = ", ".join(f"'{name}'" for name in settings.upstreams)
    ours = f"xds.cluster_name in [{names}]"
    if settings.gateway.profile == "classic":
        ours = "xds.cluster_name.startsWith('tidegate:')"
    return {**log, "filter": _both(cel(ours), log["filter"])}


def _of_marked(log: Data) -> Data:
    return {**log, "filter": _both(_HERE, log["filter"]) if "filter" in log else _HERE}


def _of_ours(mapper: Data) -> Data:
    return {**mapper, "filter": _both(_HERE, mapper["filter"])}


def _left_alone() -> Data:
    """What Tidegate worded, or answers itself, stays as it is, whatever mappers and formats there are for others."""
    ours = ["'x-tidegate-reason' in response.headers", "'x-tidegate-last-resort' in response.headers"]
    worded = cel(" || ".join(["response.code < 400", *ours]))
    return {
        "filter": _both(_HERE, worded),
        "body_format_override": {"text_format_source": {"inline_string": "%LOCAL_REPLY_BODY%"}},
    }


def _both(one: Data, other: Data) -> Data:
    return {"and_filter": {"filters": [one, other]}}
