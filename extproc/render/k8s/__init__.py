"""Kubernetes objects, rendered from Settings.

    objects(settings, fakes) -> [dict]      a gateway of its own: what `tidegate k8s` prints
    sidecar(settings, fakes) -> Sidecar     the same beside an application's container, as a patch of its Deployment
    files(settings, fakes) -> {path: text}  both as a kustomize tree: a base, and overlays
    envoy_gateway(settings, target, fakes) -> [dict]  what lets Envoys of an Envoy Gateway ask the Tidegate of `objects`
    to_yaml(objects) -> str                 documents as `kubectl apply` takes them

Envoy and Tidegate are always in one pod. Tidegate is a native sidecar (an init container that goes on): it is up before
Envoy starts, and is ended only when Envoy has ended, so that no request meets an Envoy without it. `placed` says where
things are in a pod, `pod` makes containers, `objects` what is around them, `tree` the files.

Deliberately not here: patches of a mesh's own Envoys (see `istio`); and keys, which are a Secret that nobody renders.
"""

from extproc.render.k8s.envoy_gateway import Target
from extproc.render.k8s.envoy_gateway import objects as envoy_gateway
from extproc.render.k8s.envoy_gateway import settings_there as envoy_gateway_settings
from extproc.render.k8s.objects import CLIENT_LABEL, headless_host, objects, own_host
from extproc.render.k8s.placed import HEADERS, SDS_DIR, SECRET, SECRETS_DIR, TLS_DIR, needed_files, placed, tls_items
from extproc.render.k8s.pod import Sidecar, sidecar
from extproc.render.k8s.tree import envoy_gateway_yaml, files, remarks, secret_hint, to_yaml

__all__ = [
    "CLIENT_LABEL", "HEADERS", "SDS_DIR", "SECRET", "SECRETS_DIR", "TLS_DIR", "Sidecar", "Target",
    "envoy_gateway", "envoy_gateway_settings", "envoy_gateway_yaml", "files", "headless_host", "needed_files",
    "objects", "own_host", "placed", "remarks", "secret_hint", "sidecar", "tls_items", "to_yaml",
]  # fmt: skip
