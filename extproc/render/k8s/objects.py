"""What is around the pods of a gateway of its own."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from extproc.render.k8s.placed import NAME, config_map, placed
from extproc.render.k8s.pod import GRPC, HTTP, LABELS, METRICS, STATE_VOLUME, Fakes, pod_template
from extproc.render.metrics import PAGES
from extproc.render.monitoring import alerts
from extproc.render.shape import Data
from extproc.render.tracing import collector_port
from extproc.settings import Settings

__all__ = [
    "CLIENT_LABEL",
    "NAMESPACE",
    "fakes_reached",
    "headless_host",
    "kept_state",
    "monitor",
    "namespace",
    "objects",
    "own_host",
    "replica_guard",
    "rules",
]

NAMESPACE = NAME
CLIENT_LABEL = "tidegate/envoy"
"""Pods with this label, "true", may ask Tidegate itself: Envoys of elsewhere."""
HEADLESS = "tidegate/headless"
"""Tells that Service from the other, which has the same pods."""
COLLECTORS = {"app.kubernetes.io/name": "prometheus"}
"""Pods with this label, of any namespace, may read metrics: what the Prometheus operator gives to its own."""
_DNS = 53
_DOMAIN = "svc.cluster.local"


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


def own_host(settings: Settings) -> str:
    """host:port of the gateway, for callers in the cluster."""
    return f"{NAME}.{NAMESPACE}.{_DOMAIN}:{settings.gateway.port}"


def headless_host(settings: Settings) -> str:
    """host:port of Tidegate itself, for Envoys in the cluster."""
    return f"{NAME}-headless.{NAMESPACE}.{_DOMAIN}:{settings.service.address.rpartition(':')[2]}"


def namespace() -> Data:
    """A namespace in which Kubernetes itself sees to it that pods are locked down."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}


def kept_state() -> tuple[Data, Data]:
    """A claim for what Tidegate keeps over a restart, and the patch of the Deployment that uses it.

    Nobody else may have it meanwhile, so the old pod ends before the new one starts.
    """
    size = {"requests": {"storage": "64Mi"}}
    claim = _here(
        _of("v1", "PersistentVolumeClaim", STATE_VOLUME, spec={"accessModes": ["ReadWriteOnce"], "resources": size})
    )
    volume = {"name": STATE_VOLUME, "emptyDir": None, "persistentVolumeClaim": {"claimName": STATE_VOLUME}}
    strategy = {"type": "Recreate", "rollingUpdate": None}
    patch = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": NAME},
        "spec": {"strategy": strategy, "template": {"spec": {"volumes": [volume]}}},
    }
    return claim, patch


def monitor() -> Data:
    """For the Prometheus operator: every pod's metrics, of Tidegate and of its Envoy.

    Both are of one port. A label tells them apart, else they would be one target, with one `up` for two.
    """
    told = [{"sourceLabels": ["__metrics_path__"], "targetLabel": "metrics_path"}]
    pages = [{"port": METRICS, "path": path, "interval": "15s", "relabelings": told} for path in PAGES]
    spec = {"selector": {"matchLabels": {**LABELS, HEADLESS: "true"}}, "endpoints": pages}
    return _here(_of("monitoring.coreos.com/v1", "ServiceMonitor", spec=spec))


def rules(settings: Settings) -> Data:
    """For the Prometheus operator: what to alert on."""
    return _here(_of("monitoring.coreos.com/v1", "PrometheusRule", spec=alerts(settings)))


def fakes_reached(settings: Settings, fakes: Fakes) -> list[tuple[str, str, list[Data]]]:
    """Patches (kind, name, JSON patch): Envoys of elsewhere reach Tidegate, and the demo's providers in its pod."""
    ports = [settings.upstreams[name].port for name in fakes]
    listen = [
        {"op": "add", "path": f"/spec/template/spec/initContainers/{i}/command/-", "value": word}
        for i in range(len(ports))
        for word in ("--host", "0.0.0.0")
    ]
    opened = [{"op": "add", "path": "/spec/ingress/1/from/0/namespaceSelector", "value": {}}]
    opened += [{"op": "add", "path": "/spec/ingress/1/ports/-", "value": {"protocol": "TCP", "port": p}} for p in ports]
    served = [{"op": "add", "path": "/spec/ports/-", "value": {"name": f"fake-{p}", "port": p}} for p in ports]
    patches: list[tuple[str, str, list[Data]]] = [
        ("NetworkPolicy", NAME, opened),
        ("Deployment", NAME, listen),
        ("Service", f"{NAME}-headless", served),
    ]
    return [patch for patch in patches if patch[2]]


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


def _here(each: Data) -> Data:
    """In the namespace of `overlays/standalone`, which has set its own before a component comes to it."""
    return {**each, "metadata": {**each["metadata"], "namespace": NAMESPACE}}


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
        {"name": METRICS, "port": settings.gateway.metrics_port, "targetPort": METRICS},
    ]
    service = _of("v1", "Service", f"{NAME}-headless", spec={"clusterIP": "None", "selector": LABELS, "ports": ports})
    return {**service, "metadata": {**service["metadata"], "labels": {**LABELS, HEADLESS: "true"}}}


def _network_policy(settings: Settings) -> Data:
    """Callers reach the gateway alone; Tidegate's own port is for Envoys with a label, and for Kubernetes' probes,
    which no policy stops; metrics are for Prometheus. Outwards only what the settings name.
    """
    grpc = int(settings.service.address.rpartition(":")[2])
    clients = [{"podSelector": {"matchLabels": {CLIENT_LABEL: "true"}}}]
    collectors = [{"namespaceSelector": {}, "podSelector": {"matchLabels": COLLECTORS}}]
    ingress = [
        {"ports": [{"protocol": "TCP", "port": settings.gateway.port}]},
        {"ports": [{"protocol": "TCP", "port": grpc}], "from": clients},
        {"ports": [{"protocol": "TCP", "port": settings.gateway.metrics_port}], "from": collectors},
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
    if (port := collector_port(settings)) is not None:
        yield port


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
