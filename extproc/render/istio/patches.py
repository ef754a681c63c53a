"""EnvoyFilters: the parts of `tidegate merge`, put in by istiod.

- Clusters and listeners are added. Of the listeners the one for canaries is only for a Tidegate in the same pod; a
  Tidegate elsewhere has an Envoy of its own beside it for them.
- Filters go right before the router, each before it in turn, so that they stand in their order, behind all of Istio's.
- Routes are put first into their virtual host, the last of them first. Istio cannot tell where a host's own route for
  everything begins.
- The connection manager is merged into: lists are appended to. What would hold for all of its routes stays as it is,
  unless the target is `alone`: without that no running answer is reported, since Istio's own log would write a line
  for each report, and no patch can change a log that is there.

istiod reads every value with the Envoy API it was built with. A type that it does not know is refused when the object
is applied; a field that it does not know is dropped, and only warned of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from extproc.render.fragments import manager_settings
from extproc.render.istio.target import Target
from extproc.render.parts import FLUSH, MARK, NO_UPGRADES, OURS, Parts, parts
from extproc.render.shape import Data, typed
from extproc.settings import Settings

__all__ = ["MANAGER", "ROUTER", "envoy_filters"]

MANAGER = "envoy.filters.network.http_connection_manager"
ROUTER = "envoy.filters.http.router"
_MANAGER_TYPE = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER_TYPE = "envoy.extensions.filters.http.router.v3.Router"
_MOST = 900_000
"""Bytes in one object; Kubernetes keeps objects of up to 1.5 MB."""
_NAME = "tidegate"


def envoy_filters(settings: Settings, target: Target) -> list[Data]:
    """Clusters first, in as many objects as it takes, then the one that uses them. settings: as in the Envoys' pods."""
    settings = settings.model_copy(update={"service": settings.service.model_copy(update={"address": target.service})})
    ours = parts(settings, traced=False)
    clusters = [_patch(target, "CLUSTER", "ADD", cluster) for cluster in ours.clusters]
    groups = list(_of_a_size(clusters))
    named = {f"{_NAME}-clusters{f'-{i}' if i else ''}": group for i, group in enumerate(groups)}
    return [
        _object(target, name, found) for name, found in {**named, _NAME: list(_uses(ours, settings, target))}.items()
    ]


def _uses(ours: Parts, settings: Settings, target: Target) -> Iterator[Data]:
    for listener in ours.listeners:
        if target.beside or listener["name"] != f"{OURS}probe":
            yield _patch(target, "LISTENER", "ADD", listener)
    for item in ours.http_filters:
        yield _patch(target, "HTTP_FILTER", "INSERT_BEFORE", item, _in_manager(target, ROUTER))
    router = {"name": ROUTER, "typed_config": typed(_ROUTER_TYPE, upstream_log=ours.upstream_log)}
    yield _patch(target, "HTTP_FILTER", "MERGE", router, _in_manager(target, ROUTER))
    manager = {"name": MANAGER, "typed_config": typed(_MANAGER_TYPE, **_manager(ours, settings, target))}
    yield _patch(target, "NETWORK_FILTER", "MERGE", manager, _in_manager(target))
    for route in reversed([_no_upgrades(ours), *ours.routes]):
        yield _patch(
            target, "HTTP_ROUTE", "INSERT_FIRST", route, {"routeConfiguration": {"vhost": {"name": target.host}}}
        )


def _no_upgrades(ours: Parts) -> Data:
    """Istio's listeners take WebSockets, and have no limit on silence: one on an LLM path, which is read whole before
    it goes on, would be waited for without end. The mark lets our wording of refusals have it.
    """
    paths = next(route["match"]["safe_regex"] for route in ours.routes)
    return {
        "name": NO_UPGRADES,
        "match": {"safe_regex": paths, "headers": [{"name": "upgrade", "present_match": True}]},
        "direct_response": {"status": 403},
        "typed_per_filter_config": {MARK: typed("envoy.config.route.v3.FilterConfig", config={})},
    }


def _manager(ours: Parts, settings: Settings, target: Target) -> Data:
    fields = {"access_log": ours.access_log, "local_reply_config": {"mappers": ours.mappers}}
    if target.alone:
        fields |= {**manager_settings(settings), "access_log_options": {"access_log_flush_interval": FLUSH}}
    return fields


def _in_manager(target: Target, http_filter: str | None = None) -> Data:
    sub = {"subFilter": {"name": http_filter}} if http_filter else {}
    port = {"portNumber": target.listener_port} if target.listener_port else {}
    return {"listener": {**port, "filterChain": {"filter": {"name": MANAGER, **sub}}}}


def _patch(target: Target, apply_to: str, operation: str, value: Data, match: Data | None = None) -> Data:
    proxy = {"proxy": {"proxyVersion": target.proxy_version}} if target.proxy_version else {}
    return {
        "applyTo": apply_to,
        "match": {"context": target.context, **proxy, **(match or {})},
        "patch": {"operation": operation, "value": value},
    }


def _object(target: Target, name: str, patches: list[Data]) -> Data:
    return {
        "apiVersion": "networking.istio.io/v1alpha3",
        "kind": "EnvoyFilter",
        "metadata": {"name": name, "namespace": target.namespace},
        "spec": {"workloadSelector": {"labels": dict(target.labels)}, "configPatches": patches},
    }


def _of_a_size(patches: list[Data]) -> Iterator[list[Data]]:
    some: list[Data] = []
    size = 0
    for patch in patches:
        bytes_ = len(json.dumps(patch, ensure_ascii=False).encode())
        if some and size + bytes_ > _MOST:
            yield some
            some, size = [], 0
        some.append(patch)
        size += bytes_
    yield some
