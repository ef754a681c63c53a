"""What the settings would render, in the two ways in which it can stand in an Envoy: alone, or among others."""

from __future__ import annotations

from dataclasses import dataclass, field

from extproc.against.dump import Manager, Running, managers
from extproc.render.clusters import clusters
from extproc.render.envoy import bootstrap
from extproc.render.existing import dig
from extproc.render.filters import JWT_NAMESPACE, http_filters
from extproc.render.listener import listener
from extproc.render.names import SERVICE_CLUSTER
from extproc.render.parts import OURS, OWNER, parts
from extproc.render.probe import probe_listener
from extproc.render.shape import Data
from extproc.render.tracing import collector_clusters, is_ours
from extproc.render.upstream import secrets
from extproc.settings import Settings

__all__ = ["Expected", "admits", "expected_in", "is_there", "names"]

_OPTIONAL = frozenset({"envoy.filters.http.local_ratelimit", JWT_NAMESPACE})
"""Filters of the whole bootstrap that some settings have, and whose names are not ours."""


@dataclass(frozen=True, slots=True)
class Expected:
    """merged: among others. listeners: beside the one that callers reach. own_*: what there is of that one, its
    manager and virtual host where all is ours.
    """

    merged: bool
    filters: list[Data]
    routes: list[Data]
    clusters: list[Data]
    secrets: list[Data]
    listeners: list[Data]
    access_log: list[Data]
    upstream_log: list[Data]
    mappers: list[Data]
    own_listener: Data = field(default_factory=dict)
    own_manager: Data = field(default_factory=dict)
    own_host: Data = field(default_factory=dict)
    own_router: Data = field(default_factory=dict)

    def mend(self, part: str, *, control_plane: bool = False) -> str:
        """What to do about a part that is not as it should be."""
        if control_plane:
            return f"have the control plane send what `tidegate render --part {part}` prints"
        if self.merged:
            return f"merge again, or put in what `tidegate render --part {part}` prints"
        return "start Envoy with what `tidegate render` prints"

    def is_ours(self, name: str) -> bool:
        """Whether a filter or a route can only have been rendered, whatever the settings were."""
        return name.startswith(OURS) or (not self.merged and name in _OPTIONAL)


def names(items: list[Data]) -> list[str]:
    """The name of each."""
    return [str(dig(item, "name")) for item in items]


def admits(item: Data) -> bool:
    """Whether a filter asks Tidegate, whatever it is called."""
    return bool(dig(item, "typed_config", "grpc_service", "envoy_grpc", "cluster_name") == SERVICE_CLUSTER)


def is_there(running: Running, settings: Settings) -> bool:
    """Whether there is anything of Tidegate at all."""
    listeners = {"tidegate", *names([probe_listener(settings)]), f"{OURS}probe"}
    return (
        SERVICE_CLUSTER in running.clusters
        or not listeners.isdisjoint(names(running.listeners))
        or any(_filters_of_ours(one) for one in managers(running))
    )


def expected_in(running: Running, settings: Settings) -> Expected:
    """In the way that is nearer to what runs."""
    if not _is_merged(running, settings):
        return _alone(settings)
    traced = any(is_ours(dig(one.config, "tracing")) for one in managers(running))
    return _among_others(settings, traced=traced)


def _is_merged(running: Running, settings: Settings) -> bool:
    if f"{OURS}probe" in names(running.listeners):
        return True
    if any(dig(one, "metadata", "filter_metadata", OWNER) for one in running.clusters.values()):
        return True
    others = set(names(parts(settings).http_filters)) - set(names(http_filters(settings)))
    return any(others.intersection(_filters_of_ours(one)) for one in managers(running))


def _filters_of_ours(manager: Manager) -> list[str]:
    return [name for name in names(manager.config.get("http_filters") or []) if name.startswith(OURS)]


def _among_others(settings: Settings, *, traced: bool) -> Expected:
    """traced: for our collector. A mesh has tracing of its own, and so may an Envoy that was merged into."""
    ours = parts(settings, traced=traced)
    return Expected(
        merged=True,
        filters=ours.http_filters,
        routes=ours.routes,
        clusters=ours.clusters,
        secrets=ours.secrets,
        listeners=ours.listeners,
        access_log=ours.access_log,
        upstream_log=ours.upstream_log,
        mappers=ours.mappers,
    )


def _alone(settings: Settings) -> Expected:
    whole = listener(settings)
    manager = whole["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    router = manager["http_filters"][-1]["typed_config"]
    elsewhere = ("http_filters", "route_config", "access_log", "local_reply_config")
    return Expected(
        merged=False,
        filters=manager["http_filters"][:-1],
        routes=host["routes"],
        clusters=[*clusters(settings), *collector_clusters(settings)],
        secrets=secrets(settings),
        listeners=bootstrap(settings)["static_resources"]["listeners"][1:],
        access_log=manager.get("access_log", []),
        upstream_log=router["upstream_log"],
        mappers=manager["local_reply_config"]["mappers"],
        own_listener={key: one for key, one in whole.items() if key != "filter_chains"},
        own_manager={key: one for key, one in manager.items() if key not in elsewhere},
        own_host={key: one for key, one in host.items() if key != "routes"},
        own_router={key: one for key, one in router.items() if key != "upstream_log"},
    )
