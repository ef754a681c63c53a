"""What istiod does with EnvoyFilters, as Istio's reference and its behaviour say, on a bootstrap with everything in it.

    proxy = Proxy("apps", {"app": "chat"}, gateway=False)
    done = patched(bootstrap, filters, proxy)       done.config, done.idle: patches that changed nothing

- An EnvoyFilter is for the proxies of its namespace that have all labels of its selector; one in the root namespace
  is for those of all. Order: root namespace first, then by priority, then by age (here: as given).
- Clusters, listeners and routes are patched apart. In a listener: the listener itself, its filter chains, network
  filters, HTTP filters; within each level removals and merges first (for filters: insertions first), then additions.
- A patch whose match finds nothing changes nothing, and nobody is told.
- MERGE is that of protobuf: lists are appended to, maps' entries and scalars replaced, messages merged. A scalar that
  is zero, false or empty does not replace anything, unless it is a wrapped one: such values are refused as doubtful.
- The port of a match means the listener's own, but the filter chain's in virtualInbound and virtualOutbound.

Not here, because nothing uses it: targetRefs, Envoy's own defaults of `oneof` fields, other kinds of `applyTo`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Data = dict[str, Any]

ROOT = "istio-system"
MANAGER = "envoy.filters.network.http_connection_manager"
_VIRTUAL = ("virtualInbound", "virtualOutbound")
_MAPS = ("typed_per_filter_config", "typed_extension_protocol_options", "filter_metadata")
_WRAPPED = ("use_remote_address",)
_INSERTS = ("ADD", "INSERT_BEFORE", "INSERT_AFTER", "INSERT_FIRST")


@dataclass(frozen=True)
class Proxy:
    """Whose configuration is patched."""

    namespace: str
    labels: Mapping[str, str]
    gateway: bool
    version: str = "1.32.0"


@dataclass
class Patched:
    """The outcome."""

    config: Data
    idle: list[Data] = field(default_factory=list)


def patched(bootstrap: Data, filters: list[Data], proxy: Proxy) -> Patched:
    """`bootstrap` as the proxy would get it."""
    config = copy.deepcopy(bootstrap)
    work = _Work(
        [patch for each in _ordered(filters) if _selects(each, proxy) for patch in _patches(each, proxy)], proxy
    )
    static = config["static_resources"]
    static["clusters"] = work.clusters(static["clusters"])
    static["listeners"] = work.listeners(static["listeners"])
    return Patched(config, [patch for patch in work.patches if id(patch) not in work.used])


def merged(target: Any, patch: Any, key: str = "") -> Any:
    """Protobuf's merge, of JSON."""
    if isinstance(target, dict) and isinstance(patch, dict):
        assert target.get("@type", "") == patch.get("@type", target.get("@type", "")), "two types cannot be merged"
        return {
            **target,
            **{
                k: merged(target[k], v, k) if k in target and key not in _MAPS else copy.deepcopy(v)
                for k, v in patch.items()
            },
        }
    if isinstance(target, list) and isinstance(patch, list):
        return [*target, *copy.deepcopy(patch)]
    assert patch or key in _WRAPPED or isinstance(patch, (dict, list)), f"{key}: {patch!r} may be nothing at all"
    return copy.deepcopy(patch)


def _ordered(filters: list[Data]) -> list[Data]:
    return sorted(filters, key=lambda each: (each["metadata"]["namespace"] != ROOT, each["spec"].get("priority", 0)))


def _selects(each: Data, proxy: Proxy) -> bool:
    wanted = each["spec"].get("workloadSelector", {}).get("labels", {})
    here = each["metadata"]["namespace"] in (ROOT, proxy.namespace)
    return here and all(proxy.labels.get(key) == value for key, value in wanted.items())


def _patches(each: Data, proxy: Proxy) -> Iterator[Data]:
    for patch in each["spec"]["configPatches"]:
        version = patch.get("match", {}).get("proxy", {}).get("proxyVersion")
        if version is None or re.search(version, proxy.version):
            yield patch


class _Work:
    """All patches for one proxy, and which of them found their place."""

    def __init__(self, patches: list[Data], proxy: Proxy) -> None:
        self.patches = patches
        self.proxy = proxy
        self.used: set[int] = set()

    # Clusters.

    def clusters(self, found: list[Data]) -> list[Data]:
        kept = []
        for cluster in found:
            inbound = cluster["name"].startswith("inbound|")
            patch_of = self._of("CLUSTER", self._context(inbound=inbound))
            here = [p for p in patch_of if _fits_cluster(p, cluster)]
            if any(self._does(p, "REMOVE") for p in here):
                continue
            for patch in here:
                if self._does(patch, "MERGE"):
                    cluster = merged(cluster, patch["patch"]["value"])  # noqa: PLW2901 - one after the other
            kept.append(cluster)
        contexts = {self._context(inbound=False), self._context(inbound=True)}
        for context in sorted(contexts):
            kept += [self._value(p) for p in self._of("CLUSTER", context) if self._does(p, "ADD")]
        return kept

    # Listeners, from the outside to the inside.

    def listeners(self, found: list[Data]) -> list[Data]:
        kept = []
        for listener in found:
            context = self._context(inbound=listener.get("traffic_direction") == "INBOUND")
            here = [p for p in self._of("LISTENER", context) if _fits_listener(p, listener)]
            if any(self._does(p, "REMOVE") for p in here):
                continue
            for patch in here:
                if self._does(patch, "MERGE"):
                    listener = merged(listener, patch["patch"]["value"])  # noqa: PLW2901 - one after the other
            for chain in listener["filter_chains"]:
                self._network_filters(context, listener, chain)
            kept.append(listener)
        outside = self._context(inbound=False)
        return kept + [self._value(p) for p in self._of("LISTENER", outside) if self._does(p, "ADD")]

    def _network_filters(self, context: str, listener: Data, chain: Data) -> None:
        here = [p for p in self._of("NETWORK_FILTER", context) if _fits_chain(p, listener, chain)]
        chain["filters"] = self._inserted(here, chain["filters"], _network_name)
        for i, item in enumerate(chain["filters"]):
            for patch in here:
                if _network_name(patch) in (None, item["name"]) and self._does(patch, "MERGE"):
                    item = merged(item, patch["patch"]["value"])  # noqa: PLW2901 - one after the other
            chain["filters"][i] = item
            if item["name"] == MANAGER:
                self._manager(context, listener, chain, item["typed_config"])

    def _manager(self, context: str, listener: Data, chain: Data, manager: Data) -> None:
        here = [
            p
            for p in self._of("HTTP_FILTER", context)
            if _fits_chain(p, listener, chain) and _network_name(p) in (None, MANAGER)
        ]
        manager["http_filters"] = self._inserted(here, manager["http_filters"], _http_name)
        for i, item in enumerate(manager["http_filters"]):
            for patch in here:
                if _http_name(patch) in (None, item["name"]) and self._does(patch, "MERGE"):
                    item = merged(item, patch["patch"]["value"])  # noqa: PLW2901 - one after the other
            manager["http_filters"][i] = item
        if "route_config" in manager and listener["name"] in self._known_routes(listener):
            self._route_config(context, manager["route_config"])

    def _known_routes(self, listener: Data) -> set[str]:
        """Routes of listeners that an EnvoyFilter added are not patched: istiod made none of them."""
        added = [p["patch"]["value"]["name"] for p in self._of("LISTENER", self._context(inbound=False))
                 if p["patch"]["operation"] == "ADD"]  # fmt: skip
        return {listener["name"]} - set(added)

    def _inserted(self, here: list[Data], items: list[Data], named: Callable[[Data], str | None]) -> list[Data]:
        """Insertions, replacements and removals, one after the other."""
        for patch in here:
            operation, name = patch["patch"]["operation"], named(patch)
            at = next((i for i, item in enumerate(items) if item["name"] == name), None)
            if operation == "ADD" or (operation == "INSERT_AFTER" and name is None):
                items = [*items, self._value(patch)]
            elif operation == "INSERT_FIRST" or (operation == "INSERT_BEFORE" and name is None):
                items = [self._value(patch), *items]
            elif at is None or operation == "MERGE":
                continue
            elif operation == "INSERT_BEFORE":
                items = [*items[:at], self._value(patch), *items[at:]]
            elif operation == "INSERT_AFTER":
                items = [*items[: at + 1], self._value(patch), *items[at + 1 :]]
            elif operation == "REPLACE":
                items = [*items[:at], self._value(patch), *items[at + 1 :]]
            else:
                assert operation == "REMOVE", operation
                items = [item for item in items if item["name"] != name]
            self.used.add(id(patch))
        return items

    # Routes.

    def _route_config(self, context: str, table: Data) -> None:
        for patch in self._of("ROUTE_CONFIGURATION", context):
            if _fits_table(patch, table, gateway=self.proxy.gateway) and self._does(patch, "MERGE"):
                table |= merged(table, patch["patch"]["value"])
        hosts = [p for p in self._of("VIRTUAL_HOST", context) if _fits_table(p, table, gateway=self.proxy.gateway)]
        kept = []
        for host in table["virtual_hosts"]:
            here = [p for p in hosts if _vhost(p).get("name") in (None, host["name"])]
            if any(self._does(p, "REMOVE") for p in here):
                continue
            for patch in here:
                if self._does(patch, "MERGE"):
                    host = merged(host, patch["patch"]["value"])  # noqa: PLW2901 - one after the other
                elif self._does(patch, "REPLACE"):
                    host = self._value(patch)  # noqa: PLW2901 - one after the other
            self._routes(context, table, host)
            kept.append(host)
        table["virtual_hosts"] = kept + [self._value(p) for p in hosts if self._does(p, "ADD")]

    def _routes(self, context: str, table: Data, host: Data) -> None:
        here = [
            p
            for p in self._of("HTTP_ROUTE", context)
            if _fits_table(p, table, gateway=self.proxy.gateway) and _vhost(p).get("name") in (None, host["name"])
        ]
        routes = []
        for route in host["routes"]:
            ours = [p for p in here if _fits_route(p, route)]
            if any(self._does(p, "REMOVE") for p in ours):
                continue
            for patch in ours:
                if self._does(patch, "MERGE"):
                    route = merged(route, patch["patch"]["value"])  # noqa: PLW2901 - one after the other
            routes.append(route)
        for patch in here:
            operation = patch["patch"]["operation"]
            if operation not in _INSERTS:
                continue
            any_route = "route" not in _vhost(patch)
            at = next((i for i, route in enumerate(routes) if _fits_route(patch, route)), None)
            if operation == "ADD" or (operation == "INSERT_AFTER" and any_route):
                routes.append(self._value(patch))
            elif any_route:
                routes.insert(0, self._value(patch))
            elif at is None:
                continue
            else:
                routes.insert(
                    {"INSERT_FIRST": 0, "INSERT_BEFORE": at, "INSERT_AFTER": at + 1}[operation], self._value(patch)
                )
            self.used.add(id(patch))
        host["routes"] = routes

    # What all share.

    def _context(self, *, inbound: bool) -> str:
        if self.proxy.gateway:
            return "GATEWAY"
        return "SIDECAR_INBOUND" if inbound else "SIDECAR_OUTBOUND"

    def _of(self, apply_to: str, context: str) -> list[Data]:
        return [
            p
            for p in self.patches
            if p["applyTo"] == apply_to and p.get("match", {}).get("context", "ANY") in ("ANY", context)
        ]

    def _does(self, patch: Data, operation: str) -> bool:
        """Whether it is such a patch, which has then found its place."""
        if patch["patch"]["operation"] != operation:
            return False
        self.used.add(id(patch))
        return True

    def _value(self, patch: Data) -> Data:
        return copy.deepcopy(patch["patch"]["value"])


# ------------------------------------------------------------------------------------------------ matches


def _of_listener(patch: Data) -> Data:
    return dict(patch.get("match", {}).get("listener", {}))


def _chain(patch: Data) -> Data:
    return dict(_of_listener(patch).get("filterChain", {}))


def _network_name(patch: Data) -> str | None:
    return _chain(patch).get("filter", {}).get("name")


def _http_name(patch: Data) -> str | None:
    return _chain(patch).get("filter", {}).get("subFilter", {}).get("name")


def _fits_listener(patch: Data, listener: Data) -> bool:
    wanted = _of_listener(patch)
    if wanted.get("name", listener["name"]) != listener["name"]:
        return False
    if patch["applyTo"] != "LISTENER" and listener["name"] in _VIRTUAL:
        return True
    port = listener["address"]["socket_address"]["port_value"]
    return bool(wanted.get("portNumber", port) == port)


def _fits_chain(patch: Data, listener: Data, chain: Data) -> bool:
    wanted, found = _chain(patch), chain.get("filter_chain_match", {})
    port = _of_listener(patch).get("portNumber")
    return (
        _fits_listener(patch, listener)
        and (port is None or listener["name"] not in _VIRTUAL or found.get("destination_port") == port)
        and wanted.get("name", chain.get("name")) == chain.get("name")
        and wanted.get("destinationPort", found.get("destination_port")) == found.get("destination_port")
        and wanted.get("transportProtocol", found.get("transport_protocol")) == found.get("transport_protocol")
        and ("sni" not in wanted or wanted["sni"] in found.get("server_names", ()))
    )


def _fits_cluster(patch: Data, cluster: Data) -> bool:
    wanted = patch.get("match", {}).get("cluster", {})
    if "name" in wanted:
        return bool(wanted["name"] == cluster["name"])
    _, port, subset, service = (cluster["name"].split("|") + [""] * 4)[:4]
    here = {"portNumber": port, "subset": subset, "service": service}
    return all(str(value) == here[key] for key, value in wanted.items())


def _table(patch: Data) -> Data:
    return dict(patch.get("match", {}).get("routeConfiguration", {}))


def _vhost(patch: Data) -> Data:
    return dict(_table(patch).get("vhost", {}))


def _fits_table(patch: Data, table: Data, *, gateway: bool) -> bool:
    """By name: `http.PORT`, `https.PORT.NAME.GATEWAY.NAMESPACE` in gateways; `PORT`, `inbound|PORT||` in sidecars."""
    wanted, name = _table(patch), table["name"]
    port, port_name, of = name, None, None
    if gateway:
        _, port, port_name, *rest = [*name.split("."), None]
        of = "/".join(reversed(rest[:2])) if len(rest) > 2 else None
    elif name.startswith("inbound|"):
        port = name.split("|")[1]
    found = {"name": name, "portNumber": port, "portName": port_name, "gateway": of}
    return all(str(wanted[key]) == str(value) for key, value in found.items() if key in wanted)


def _fits_route(patch: Data, route: Data) -> bool:
    wanted = _vhost(patch).get("route", {})
    kinds = {"ROUTE": "route", "REDIRECT": "redirect", "DIRECT_RESPONSE": "direct_response"}
    action = wanted.get("action", "ANY")
    return wanted.get("name", route.get("name")) == route.get("name") and (action == "ANY" or kinds[action] in route)
