"""Istio objects, rendered from Settings: Tidegate's parts as patches of Envoys that istiod configures.

    envoy_filters(settings, target) -> [dict]     the patches
    virtual_services(target) -> [dict]            what leads callers to the patched host, and lets nobody try again
    virtual_service(...), destination_rule(...)   the same for Tidegate's own host
    ports_left_out(settings) -> dict              annotations of Tidegate's own pod

Two places of a mesh can do what Tidegate's own Envoy does. A *gateway* (ingress or egress) has all callers of a host
behind it, and the providers' keys are in one place. The *sidecars of callers* spare a hop, each for its own pod. Both
ask the one Tidegate that has its pod elsewhere (or beside the gateway's Envoy, at 127.0.0.1).

Nothing is put before an engine's own pods (SIDECAR_INBOUND): which upstream serves was decided before a request comes
there, and each pod would know only of itself.

Every LLM path of the host is taken over by routes that stand first. The host's own route leads to Tidegate's own Envoy
(see `traffic`): where Istio leaves patches out, without a word, requests go there and are admitted all the same. Where
it leaves out a part of them, they are refused, for only our routes lead to our clusters, and only with a ticket.
"""

from extproc.render.istio.patches import envoy_filters
from extproc.render.istio.target import Target, target_of
from extproc.render.istio.traffic import destination_rule, ports_left_out, virtual_service, virtual_services

__all__ = [
    "Target", "destination_rule", "envoy_filters", "ports_left_out", "target_of", "virtual_service", "virtual_services",
]  # fmt: skip
