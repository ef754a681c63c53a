"""What is around the pods of a gateway of its own."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from extproc.render.k8s.placed import NAME, config_map, placed
from extproc.render.k8s.pod import GRPC, HTTP, LABELS, STATE_VOLUME, Fakes, pod_template
from extproc.render.shape import Data
from extproc.settings import Settings

__all__ = ["CLIENT_LABEL", "NAMESPACE", "kept_state", "namespace", "objects", "replica_guard"]

NAMESPACE = NAME
CLIENT_LABEL = "tidegate/envoy"
"""Pods with this label, "true", may ask Tidegate itself: Envoys of elsewhere."""
_DNS = 53


def objects(settings: Settings, fakes: Fakes | None = None) -> list[Data]:
    """Everything that a gateway needs but the Secret, in an order in which it can be created. RenderError."""
    there = placed(settings, sidecar=False)
    config = config_map(there)
    return [
        _of("v1", "ServiceAccount", automountServiceAccountToken=False),
        config,
        _service(there),
        _headless(there),
        _network_policy(there),
        _disruption_budget(there),
        _deployment(there, config, fakes or {}),
    ]


def namespace() -> Data:
    """A namespace in which Kubernetes itself sees to it that pods are locked down."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}


def kept_state() -> tuple[Data, Data]:
    """A claim for what Tidegate keeps over a restart, and the patch of the Deployment that uses it.

    Nobody else may have it meanwhile, so the old pod ends before the new one starts.
    """
    size = {"requests": {"storage": "64Mi"}}
    claim = _of("v1", "PersistentVolumeClaim", STATE_VOLUME, spec={"accessModes": ["ReadWriteOnce"], "resources": size})
    volume = {"name": STATE_VOLUME, "emptyDir": None, "persistentVolumeClaim": {"claimName": STATE_VOLUME}}
    strategy = {"type": "Recreate", "rollingUpdate": None}
    patch = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": NAME},
        "spec": {"strategy": strategy, "template": {"spec": {"volumes": [volume]}}},
    }
    return claim, patch


def replica_guard(settings: Settings) -> list[Data]:
    """Refuses to scale the Deployment to more than the limits are divided by, whoever asks."""
    replicas = settings.service.replicas
    api, name = "admissionregistration.k8s.io/v1", f"{NAME}-replicas"
    what = {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"]}
    policy = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [{**what, "resources": ["deployments", "deployments/scale"]}]},
        "matchConditions": [{"name": "ours", "expression": f"object.metadata.name == '{NAME}'"}],
        "validations": [
            {
                "expression": f"!has(object.spec.replicas) || object.spec.replicas <= {replicas}",
                "message": (
                    f"every limit of this gateway is divided by {replicas}; more replicas would pass the providers' "
                    "limits: set service.replicas and render the manifests anew"
                ),
            }
        ],
    }
    ours = {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}
    binding = {
        "policyName": name,
        "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": ours},
    }
    return [
        {"apiVersion": api, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name}, "spec": policy},
        {"apiVersion": api, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name}, "spec": binding},
    ]


def _of(version: str, kind: str, name: str = NAME, **fields: object) -> Data:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": LABELS}, **fields}


def _service(settings: Settings) -> Data:
    ports = [{"name": HTTP, "port": settings.gateway.port, "targetPort": HTTP}]
    return _of("v1", "Service", spec={"selector": LABELS, "ports": ports})


def _headless(settings: Settings) -> Data:
    """Every pod's address, for those that balance by themselves: with few long streams a connection's chance is not
    even, and limits that are divided want to be used evenly. An Envoy takes STRICT_DNS and LEAST_REQUEST.
    """
    ports = [
        {"name": HTTP, "port": settings.gateway.port, "targetPort": HTTP},
        {"name": GRPC, "port": int(settings.service.address.rpartition(":")[2]), "targetPort": GRPC},
    ]
    return _of("v1", "Service", f"{NAME}-headless", spec={"clusterIP": "None", "selector": LABELS, "ports": ports})


def _network_policy(settings: Settings) -> Data:
    """Callers reach the gateway alone; Tidegate's own port is for Envoys with a label, and for Kubernetes' probes,
    which no policy stops. Outwards only what the settings name.
    """
    grpc = int(settings.service.address.rpartition(":")[2])
    clients = [{"podSelector": {"matchLabels": {CLIENT_LABEL: "true"}}}]
    ingress = [
        {"ports": [{"protocol": "TCP", "port": settings.gateway.port}]},
        {"ports": [{"protocol": "TCP", "port": grpc}], "from": clients},
    ]
    dns = [{"protocol": protocol, "port": _DNS} for protocol in ("UDP", "TCP")]
    out = [{"protocol": "TCP", "port": port} for port in sorted(set(_ports(settings)))]
    spec = {
        "podSelector": {"matchLabels": LABELS},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": [{"ports": [*dns, *out]}],
    }
    return _of("networking.k8s.io/v1", "NetworkPolicy", spec=spec)


def _ports(settings: Settings) -> Iterator[int]:
    for upstream in settings.upstreams.values():
        yield upstream.port
        if upstream.kv and upstream.kv.prometheus:
            url = urlsplit(upstream.kv.prometheus)
            yield url.port or (443 if url.scheme == "https" else 80)


def _disruption_budget(settings: Settings) -> Data:
    """A single replica is never evicted: `kubectl rollout restart` moves it without a gap. Of several one at a time."""
    alone = settings.service.replicas == 1
    spec = {
        **({"minAvailable": 1} if alone else {"maxUnavailable": 1}),
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": LABELS},
    }
    return _of("policy/v1", "PodDisruptionBudget", spec=spec)


def _deployment(settings: Settings, config: Data, fakes: Fakes) -> Data:
    """A new pod is there before an old one ends."""
    spec = {
        "replicas": settings.service.replicas,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "selector": {"matchLabels": LABELS},
        "template": pod_template(settings, config, fakes),
    }
    return _of("apps/v1", "Deployment", spec=spec)
