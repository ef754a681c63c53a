"""What is wrong with clusters, their keys, and the listeners that callers do not reach."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.against.comparing import Difference, differences
from extproc.against.dump import Running
from extproc.against.expected import Expected, names
from extproc.against.finding import Finding, findings_of
from extproc.render.existing import dig
from extproc.render.names import SERVICE_CLUSTER
from extproc.render.parts import OWNER
from extproc.render.shape import Data
from extproc.render.tls import BUNDLES
from extproc.settings import Settings

__all__ = ["about_clusters", "about_keys", "about_listeners"]


def about_clusters(running: Running, expected: Expected) -> Iterator[Finding]:
    """Upstreams and the service: there, and as the settings say."""
    do = expected.mend("clusters")
    wanted = {one["name"]: one for one in expected.clusters}
    for name, cluster in wanted.items():
        if (found := running.clusters.get(name)) is None:
            yield Finding("clusters", _what(name), "it", f"no cluster {name}", do)
        else:
            compared = differences(*_comparable(cluster, found, running))
            yield from findings_of(f"cluster {name}", (one for one in compared if not _is_machines_own(one)), do)
    for name, found in running.clusters.items():
        if name not in wanted and dig(found, "metadata", "filter_metadata", OWNER):
            yield Finding(
                f"cluster {name}", "upstream", "none of this name", "it", f"rendered for other settings: {do}"
            )


def _is_machines_own(one: Difference) -> bool:
    """Whether both are where a system keeps the certificates it trusts; this machine need not be Envoy's."""
    return one.path[-2:] == ("trusted_ca", "filename") and {one.expected, one.found} <= set(BUNDLES)


def _what(name: str) -> str:
    return "Tidegate itself" if name.startswith(SERVICE_CLUSTER) else f"upstream {name}"


def _comparable(expected: Data, found: Data, running: Running) -> tuple[Data, Data]:
    """Where a control plane sends the endpoints, they are told apart from the cluster, and it looks up names."""
    if found.get("type") != "EDS":
        return expected, found
    place = str(dig(found, "eds_cluster_config", "service_name") or found["name"])
    told = ("type", "eds_cluster_config", "load_assignment", "dns_lookup_family")
    one, other = ({k: v for k, v in cluster.items() if k not in told} for cluster in (expected, found))
    if expected["type"] == "STATIC":
        one["addresses"] = [dig(end, "endpoint", "address") for end in _ends(expected)]
        other["addresses"] = [dig(end, "address") for end in running.endpoints.get(place, [])]
    return one, other


def _ends(cluster: Data) -> list[Data]:
    return [end for place in cluster["load_assignment"]["endpoints"] for end in place["lb_endpoints"]]


def about_keys(running: Running, expected: Expected, settings: Settings) -> Iterator[Finding]:
    """Keys of providers: Envoy has them."""
    for name in names(expected.secrets):
        if name not in running.secrets:
            yield Finding("secrets", name, "it", "no such secret", expected.mend("secrets"))
    for name in sorted(running.waiting):
        if name.startswith(f"{OWNER}:"):
            do = f"see that its file is in {settings.gateway.secrets_dir}: tidegate render --write-secrets"
            yield Finding("secrets", name, "it", "that Envoy still waits for its file", do)


def about_listeners(running: Running, expected: Expected) -> Iterator[Finding]:
    """Those that only Envoy and Tidegate themselves reach: the canaries', and the gates of the classic profile."""
    do, there = expected.mend("listeners"), {str(dig(one, "name")): one for one in running.listeners}
    for wanted in expected.listeners:
        if (found := there.get(wanted["name"])) is None:
            why = ", so breakers cannot try an upstream" if wanted["name"].endswith("probe") else ""
            yield Finding("listeners", wanted["name"], "it", f"none{why}", do)
        else:
            yield from findings_of(f"listener {wanted['name']}", differences(wanted, found), do)
