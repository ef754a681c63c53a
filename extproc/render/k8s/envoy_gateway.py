"""What an Envoy Gateway user applies, so that Tidegate decides in the Envoys that Envoy Gateway runs.

    objects(settings, target, fakes) -> [dict]      next to the objects of a gateway of Tidegate's own (`k8s.objects`)

Policies set what they can: ClientTrafficPolicy how callers are treated, BackendTrafficPolicy how the gateway in
Tidegate's own pod is. EnvoyPatchPolicy adds what no policy can say (see `envoy_patches`): our filters, routes by
metadata, upstreams with filters of their own, logs. It is off by default in Envoy Gateway, and it depends on names that
Envoy Gateway gives to what it generates. So nothing is let to depend on it alone:

- The HTTPRoute sends the paths of LLM endpoints to the gateway in Tidegate's own pod. Patches put our routes before it.
  Where they are not taken, requests make one hop more, through an Envoy that has everything: nobody passes unprotected.
- Tidegate's pod has an Envoy in any case: canaries go through it.

An EnvoyExtensionPolicy is there only when asked for (`Target.extension_policy`). It can make the ext_proc filter, but
not let it hold (`max_message_timeout`), nor set retries (`mutation_rules`), nor last as long as the answer, so a patch
has to complete it; and where it puts the filter, and under which name, is another matter in newer versions.

Deliberately not here: Backend and BackendTLSPolicy for upstreams. Envoy Gateway names their clusters itself, and no
policy puts filters into one; ours have their keys, paths and models there, and their TLS with them. Nor more than one
replica: an Envoy tells any one of them how a request ended, not the one that admitted it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from extproc.render.envoy import RenderError
from extproc.render.k8s.envoy_patches import patches
from extproc.render.k8s.objects import CLIENT_LABEL, NAMESPACE
from extproc.render.k8s.placed import (
    CONFIG_DIR,
    NAME,
    SDS,
    SECRET,
    SECRETS_DIR,
    TLS_DIR,
    envoys_tls_items,
    is_loopback,
    is_tidegates,
    needed_files,
    placed,
)
from extproc.render.k8s.pod import Fakes
from extproc.render.names import ROUTE
from extproc.render.parts import LLM_PATHS, parts, paths_taken
from extproc.render.shape import Data
from extproc.render.upstream import secret_files
from extproc.settings import Settings, UpstreamSettings

__all__ = ["POLICY", "Target", "about", "objects", "settings_there"]

_GATEWAY_API = "gateway.networking.k8s.io"
_POLICIES = "gateway.envoyproxy.io"
_VERSION = f"{_POLICIES}/v1alpha1"
POLICY = NAME
"""Name of every policy."""
_ADMISSION_ROUTE = f"{NAME}-admission"
_MANY = 100_000
_NEVER = 4_294_967_295
_STREAMS = 1000
"""Requests at once on one HTTP/2 connection of a caller; Envoy Gateway's own is 100."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where it is attached. existing: the Gateway is there. system: namespace of Envoy Gateway's Envoys;
    tidegate: that of Tidegate; namespace: of all that is printed, which is the Gateway's.

    xds_listener, xds_routes: what Envoy Gateway calls the listener's configuration and that of its routes, where it
    does not follow its first scheme (namespace/gateway/listener for both).
    """

    namespace: str = NAMESPACE
    gateway: str = NAME
    listener: str = "http"
    hostname: str | None = None
    existing: bool = False
    gateway_class: str = "eg"
    system: str = "envoy-gateway-system"
    tidegate: str = NAMESPACE
    extension_policy: bool = False
    xds_listener: str | None = None
    xds_routes: str | None = None

    @property
    def xds_names(self) -> tuple[str, str]:
        """Of the listener, and of its routes."""
        usual = f"{self.namespace}/{self.gateway}/{self.listener}"
        return self.xds_listener or usual, self.xds_routes or usual


def objects(settings: Settings, target: Target | None = None, fakes: Fakes | None = None) -> list[Data]:
    """Everything, in an order in which it can be created. RenderError where it cannot work."""
    target = target or Target()
    there = settings_there(settings, target, fakes or {})
    ours = parts(there, traced=False)
    made = f"envoy.filters.http.ext_proc/envoyextensionpolicy/{target.namespace}/{POLICY}/extproc/0"
    admission = made if target.extension_policy else None
    patched = [
        _policy(target, "EnvoyPatchPolicy", name, type="JSONPatch", targetRef=_gateway(target), jsonPatches=operations)
        for name, operations in patches(ours, target.xds_names, target.hostname, admission)
    ]
    return [
        *_secrets_map(there, target),
        _proxy(there, target),
        *([] if target.existing else [_own_gateway(target)]),
        *([_grant(target)] if _elsewhere(target) else []),
        _route(there, target),
        _client_policy(there, target),
        _backend_policy(there, target),
        *(_extension(there, target) if target.extension_policy else ()),
        *patched,
    ]


def about(settings: Settings, target: Target) -> str:
    """What to know before it is applied, as comments."""
    told = _ABOUT.format(namespace=target.namespace, needs=_NEEDS[settings.gateway.profile])
    told += (_EXISTING if target.existing else "") + (_ADMISSION if target.extension_policy else "")
    sources = "".join(
        f" \\\n#     --from-file={entry}={file}"
        for entry, file in sorted(needed_files(settings).items())
        if not is_tidegates(entry)
    )
    return told + (_FILES.format(secret=SECRET, system=target.system, sources=sources) if sources else "")


_ABOUT = """\
# Rendered by Tidegate from its settings; change those, not this.
#   tidegate render envoy-gateway ... | kubectl apply --server-side -f -    (too large for kubectl's own annotation)
# Tidegate itself has to be there, and its NetworkPolicy has to let in Envoys of another namespace: as in
# overlays/envoy-gateway of `tidegate k8s --write`, which has all of this, too.
# Envoy Gateway takes an EnvoyPatchPolicy only where its own configuration (ConfigMap envoy-gateway-config, or the
# chart's value config.envoyGateway) says so:
#   extensionApis: {{enableEnvoyPatchPolicy: true}}
# {needs}
# Whether all were taken: kubectl --namespace {namespace} get envoypatchpolicies. Until then LLM requests go by way of
# the Envoy in Tidegate's own pod.
"""
_NEEDS = {
    "native": "Profile native: an Envoy Gateway built for Envoy 1.40, and running it; others need profile classic.",
    "classic": "Profile classic: an Envoy Gateway that runs Envoy 1.36 or newer.",
}
_EXISTING = """\
# The Gateway is there already: its EnvoyProxy needs what the one below says (label, volumes, drainTimeout).
"""
_ADMISSION = """\
# The ext_proc filter is made by an EnvoyExtensionPolicy, and patched where Envoy Gateway puts it: into http_filters of
# the listener. Newer ones keep it in a filter_chain and do not take that patch; for them leave --extension-policy out.
"""
_FILES = """\
# Envoy Gateway's Envoys need the same Secret as Tidegate's pod, in their namespace:
#   kubectl create secret generic {secret} --namespace {system}{sources}
"""


def settings_there(settings: Settings, target: Target, fakes: Fakes) -> Settings:
    """The settings as Envoy Gateway's Envoys have to see them. RenderError where they cannot work there."""
    if settings.service.replicas > 1:
        raise RenderError(
            "service.replicas: Envoys of elsewhere tell any one replica how a request ended, not the one that admitted "
            "it; with Envoy Gateway it must be 1"
        )
    if settings.service.tls and target.extension_policy:
        raise RenderError("service.tls: an EnvoyExtensionPolicy cannot show a certificate; leave one of both out")
    there = placed(settings, sidecar=False)
    host = f"{NAME}-headless.{target.tidegate}.svc.cluster.local"
    upstreams = {name: _reached(name, upstream, host, fakes) for name, upstream in there.upstreams.items()}
    address = f"{host}:{there.service.address.rpartition(':')[2]}"
    service = there.service.model_copy(update={"address": address})
    return there.model_copy(update={"service": service, "upstreams": upstreams})


def _reached(name: str, upstream: UpstreamSettings, host: str, fakes: Fakes) -> UpstreamSettings:
    """The demo's providers run in Tidegate's pod; nothing else that is on its loopback can be reached."""
    if not is_loopback(upstream.host):
        return upstream
    if name not in fakes:
        raise RenderError(
            f"upstreams.{name}.url: {upstream.host} is another pod for each Envoy; name a host that all of them reach"
        )
    return upstream.model_copy(update={"url": f"http://{host}:{upstream.port}"})


# --------------------------------------------------------------------------------------------- Gateway


def _secrets_map(settings: Settings, target: Target) -> Iterator[Data]:
    """Where Envoy finds each key: beside Envoy Gateway's Envoys, which are not in the Gateway's namespace."""
    if found := secret_files(settings):
        metadata = {"name": f"{NAME}-{SDS}", "namespace": target.system}
        yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": found}


def _proxy(settings: Settings, target: Target) -> Data:
    """How Envoy Gateway runs its Envoys: with our label, our files, and time for answers to come to their end."""
    volumes, mounts = [], []
    if not all(map(is_tidegates, needed_files(settings))):
        volumes.append({"name": "tidegate-files", "secret": {"secretName": SECRET}})
        mounts.append({"name": "tidegate-files", "mountPath": SECRETS_DIR, "readOnly": True})
    if tls := envoys_tls_items(settings.service):
        volumes.append({"name": "tidegate-tls", "secret": {"secretName": SECRET, "items": tls}})
        mounts.append({"name": "tidegate-tls", "mountPath": TLS_DIR, "readOnly": True})
    if secret_files(settings):
        volumes.append({"name": "tidegate-sds", "configMap": {"name": f"{NAME}-{SDS}"}})
        mounts.append({"name": "tidegate-sds", "mountPath": f"{CONFIG_DIR}/{SDS}", "readOnly": True})
    pod = {"labels": {CLIENT_LABEL: "true"}, **({"volumes": volumes} if volumes else {})}
    deployment = {"pod": pod, **({"container": {"volumeMounts": mounts}} if mounts else {})}
    order = [{"name": "envoy.filters.http.ext_proc", "after": "envoy.filters.http.ratelimit"}]
    spec = {
        "provider": {"type": "Kubernetes", "kubernetes": {"envoyDeployment": deployment}},
        "shutdown": {"drainTimeout": _duration(settings.gateway.drain_s)},
        **({"concurrency": settings.gateway.workers} if settings.gateway.workers else {}),
        **({"filterOrder": order} if target.extension_policy else {}),
    }
    return _object(_VERSION, "EnvoyProxy", target, POLICY, spec)


def _own_gateway(target: Target) -> Data:
    listener = {
        "name": target.listener,
        "protocol": "HTTP",
        "port": 80,
        **({"hostname": target.hostname} if target.hostname else {}),
        "allowedRoutes": {"namespaces": {"from": "Same"}},
    }
    proxy = {"group": _POLICIES, "kind": "EnvoyProxy", "name": POLICY}
    spec = {
        "gatewayClassName": target.gateway_class,
        "infrastructure": {"parametersRef": proxy},
        "listeners": [listener],
    }
    return _object(f"{_GATEWAY_API}/v1", "Gateway", target, target.gateway, spec)


def _route(settings: Settings, target: Target) -> Data:
    """LLM paths to the gateway in Tidegate's pod: what is left of them where no patch is in force."""
    paths = [{"path": {"type": "Exact", "value": path}} for path in LLM_PATHS]
    others = [path for path in paths_taken(settings) if path not in LLM_PATHS]
    paths += [{"path": {"type": "PathPrefix", "value": path}} for path in others]
    backend = {"name": NAME, **_elsewhere(target), "port": settings.gateway.port}
    rules = [{"matches": paths, "backendRefs": [backend]}]
    return _http_route(target, NAME, rules)


def _elsewhere(target: Target) -> Data:
    """What a reference to a Service says where that is in another namespace."""
    return {} if target.tidegate == target.namespace else {"namespace": target.tidegate}


def _grant(target: Target) -> Data:
    """Tidegate's namespace allows those references."""
    kinds = [(_GATEWAY_API, "HTTPRoute"), *([(_POLICIES, "EnvoyExtensionPolicy")] if target.extension_policy else [])]
    spec = {
        "from": [{"group": group, "kind": kind, "namespace": target.namespace} for group, kind in kinds],
        "to": [{"group": "", "kind": "Service"}],
    }
    metadata = {"name": f"{NAME}-from-{target.namespace}", "namespace": target.tidegate}
    return {"apiVersion": f"{_GATEWAY_API}/v1beta1", "kind": "ReferenceGrant", "metadata": metadata, "spec": spec}


def _http_route(target: Target, name: str, rules: list[Data]) -> Data:
    spec = {
        "parentRefs": [{"name": target.gateway, "sectionName": target.listener}],
        **({"hostnames": [target.hostname]} if target.hostname else {}),
        "rules": rules,
    }
    return _object(f"{_GATEWAY_API}/v1", "HTTPRoute", target, name, spec)


# -------------------------------------------------------------------------------------------- policies


def _client_policy(settings: Settings, target: Target) -> Data:
    """How callers are treated: as on a listener of our own. It holds for all routes of the Gateway's listener."""
    gateway = settings.gateway
    return _policy(
        target,
        "ClientTrafficPolicy",
        POLICY,
        targetRefs=[{**_gateway(target), "sectionName": target.listener}],
        connection={"bufferLimit": str(gateway.max_body_bytes)},
        timeout={
            "http": {
                "requestReceivedTimeout": _duration(gateway.upload_timeout_s),
                "streamIdleTimeout": _duration(gateway.idle_timeout_s),
            }
        },
        http2={
            "initialStreamWindowSize": str(max(_SMALLEST_WINDOW, gateway.max_body_bytes)),
            "maxConcurrentStreams": _STREAMS,
        },
        path={"escapedSlashesAction": "RejectRequest", "disableMergeSlashes": False},
        headers={"enableEnvoyHeaders": False, "requestID": "Generate"},
    )


_SMALLEST_WINDOW = 65_535


def _backend_policy(settings: Settings, target: Target) -> Data:
    """How the gateway in Tidegate's pod is treated: it decides itself how much it takes and how often it tries, and its
    refusals are answers, not signs of illness.
    """
    return _policy(
        target,
        "BackendTrafficPolicy",
        POLICY,
        targetRefs=[{"group": _GATEWAY_API, "kind": "HTTPRoute", "name": NAME}],
        timeout={"tcp": {"connectTimeout": "1s"}, "http": {"requestTimeout": "0s"}},
        retry={"numRetries": 0},
        circuitBreaker={
            "maxConnections": _MANY,
            "maxPendingRequests": _MANY,
            "maxParallelRequests": _MANY,
            "maxParallelRetries": _MANY,
        },
        connection={"bufferLimit": str(settings.gateway.max_answer_bytes)},
        loadBalancer={"type": "LeastRequest"},
        healthCheck={"passive": {"consecutive5XxErrors": _NEVER}},
    )


def _extension(settings: Settings, target: Target) -> Iterator[Data]:
    """The ext_proc filter, as far as a policy can make it. It is for no path but one that answers 404: our routes,
    which a patch adds, switch it on for themselves.
    """
    answer = {"directResponse": {"statusCode": 404}}
    yield _object(_VERSION, "HTTPRouteFilter", target, _ADMISSION_ROUTE, answer)
    reference = {"group": _POLICIES, "kind": "HTTPRouteFilter", "name": _ADMISSION_ROUTE}
    match = {"path": {"type": "Exact", "value": "/tidegate/admission"}}
    rule = {"matches": [match], "filters": [{"type": "ExtensionRef", "extensionRef": reference}]}
    yield _http_route(target, _ADMISSION_ROUTE, [rule])
    port = int(settings.service.address.rpartition(":")[2])
    asked = {
        "backendRefs": [
            {"group": "", "kind": "Service", "name": f"{NAME}-headless", **_elsewhere(target), "port": port}
        ],
        "backendSettings": {"circuitBreaker": {"maxParallelRequests": _MANY, "maxPendingRequests": _MANY}},
        "messageTimeout": _duration(settings.gateway.message_timeout_s),
        "failOpen": True,
        "processingMode": {"request": {"body": "Buffered"}},
        "metadata": {
            "writableNamespaces": [ROUTE],
            **({"accessibleNamespaces": ["envoy.filters.http.jwt_authn"]} if settings.identity.jwt else {}),
        },
    }
    refs = [{"group": _GATEWAY_API, "kind": "HTTPRoute", "name": _ADMISSION_ROUTE}]
    yield _policy(target, "EnvoyExtensionPolicy", POLICY, targetRefs=refs, extProc=[asked])


def _gateway(target: Target) -> Data:
    return {"group": _GATEWAY_API, "kind": "Gateway", "name": target.gateway}


def _policy(target: Target, kind: str, name: str, **spec: object) -> Data:
    return _object(_VERSION, kind, target, name, dict(spec))


def _object(version: str, kind: str, target: Target, name: str, spec: Data) -> Data:
    metadata = {"name": name, "namespace": target.namespace}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _duration(seconds: float) -> str:
    """As Gateway API writes one: no fractions."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return (f"{whole}s" if whole or not thousandths else "") + (f"{thousandths}ms" if thousandths else "")
