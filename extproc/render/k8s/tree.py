"""The objects as files: a base, and overlays that `kubectl kustomize` builds and `kubectl apply -k` applies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from extproc.render.envoy import RenderError
from extproc.render.k8s.envoy_gateway import Target, about
from extproc.render.k8s.envoy_gateway import objects as envoy_gateway
from extproc.render.k8s.istio_overlay import istio_overlay
from extproc.render.k8s.objects import (
    NAMESPACE,
    fakes_reached,
    kept_state,
    monitor,
    namespace,
    objects,
    replica_guard,
    rules,
)
from extproc.render.k8s.placed import NAME, SECRET, needed_files
from extproc.render.k8s.pod import IMAGE, LABELS, Fakes, sidecar
from extproc.render.monitoring import alerts_yaml, dashboard_json
from extproc.render.shape import Data, is_loopback
from extproc.render.text import plain
from extproc.settings import Settings

__all__ = ["SIDECAR_LABEL", "envoy_gateway_yaml", "files", "remarks", "secret_hint", "to_yaml"]

SIDECAR_LABEL = "tidegate/sidecar=true"
"""Which Deployments get the sidecar."""

_HEADER = "# Rendered by Tidegate from its settings; change those, not this file.\n"
_ENVOY_GATEWAY = "overlays/envoy-gateway"
_MONITORING = "overlays/monitoring"
_DASHBOARD = "dashboard.json"
_GATEWAYS = ("overlays/standalone/", "overlays/istio/", f"{_ENVOY_GATEWAY}/")
"""Overlays that say in which namespace they are."""
_KUSTOMIZE = "kustomize.config.k8s.io"


def to_yaml(documents: Sequence[Data], settings: Settings, in_namespace: str | None = None) -> str:
    """All objects in one stream; it begins with how to make the Secret that it counts on."""
    return _HEADER + secret_hint(settings, in_namespace) + "---\n".join(plain(each) for each in documents)


def envoy_gateway_yaml(settings: Settings, target: Target, fakes: Fakes | None = None) -> str:
    """All objects for an Envoy Gateway in one stream; it begins with what to know of it."""
    return about(settings, target) + "---\n".join(map(plain, envoy_gateway(settings, target, fakes)))


def secret_hint(settings: Settings, in_namespace: str | None = None, without: frozenset[str] = frozenset()) -> str:
    """The command that makes the Secret, as a comment; empty where no file is needed. without: entries to leave out."""
    needed = {entry: file for entry, file in needed_files(settings).items() if entry not in without}
    if not needed:
        return ""
    sources = "".join(f" \\\n#     --from-file={entry}={file}" for entry, file in sorted(needed.items()))
    where = f" --namespace {in_namespace}" if in_namespace else ""
    return f"# Needs a Secret:\n#   kubectl create secret generic {SECRET}{where}{sources}\n"


def files(settings: Settings, fakes: Fakes | None = None) -> dict[str, str]:
    """Path below the folder -> text."""
    base = {f"{each['kind'].lower()}.yaml": [each] for each in objects(settings, fakes) if each["kind"] != "Service"}
    base["service.yaml"] = [each for each in objects(settings, fakes) if each["kind"] == "Service"]
    beside = sidecar(settings, fakes)
    standalone = {"namespace.yaml": [namespace()], "replicas.yaml": replica_guard(settings)}
    written: dict[str, list[Data]] = {
        "base/kustomization.yaml": [_kustomization("Kustomization", resources=list(base))],
        **{f"base/{file}": documents for file, documents in base.items()},
        "overlays/standalone/kustomization.yaml": [
            _kustomization(
                "Kustomization",
                namespace=NAMESPACE,
                resources=[*standalone, "../../base"],
                images=[dict(zip(("name", "newName", "newTag"), (NAME, *IMAGE.split(":")), strict=True))],
            )
        ],
        **{f"overlays/standalone/{file}": documents for file, documents in standalone.items()},
        "overlays/sidecar/kustomization.yaml": [
            _kustomization(
                "Component",
                resources=["configmap.yaml"],
                patches=[{"path": "sidecar.yaml", "target": {"kind": "Deployment", "labelSelector": SIDECAR_LABEL}}],
            )
        ],
        "overlays/sidecar/configmap.yaml": [beside.config],
        "overlays/sidecar/sidecar.yaml": [beside.patch],
        **_monitoring(settings),
        **_istio(settings),
        **_envoy_gateway(settings, fakes or {}),
        **(_kept_state() if settings.service.replicas == 1 else {}),
    }
    texts = {path: to_yaml(documents, settings, _namespace_of(path)) for path, documents in written.items()}
    texts |= {
        f"{_MONITORING}/alerts.yaml": alerts_yaml(settings),
        f"{_MONITORING}/{_DASHBOARD}": dashboard_json(settings),
    }
    first = f"{_ENVOY_GATEWAY}/policies.yaml"
    return {**texts, first: about(settings, Target()) + texts[first]} if first in texts else texts


def remarks(settings: Settings, fakes: Fakes | None = None, *, tree: bool) -> Iterator[str]:
    """What whoever renders these settings for pods should know, a line each. tree: as `files`."""
    for name, upstream in settings.upstreams.items():
        if is_loopback(upstream.host) and name not in (fakes or {}):
            yield f"upstreams.{name}.url: {upstream.host} is the pod itself there"
    if not tree:
        return
    try:
        envoy_gateway(settings, None, fakes or {})
    except RenderError as error:
        yield f"overlays/envoy-gateway is left out: {error}"


def _namespace_of(path: str) -> str | None:
    return NAMESPACE if path.startswith(_GATEWAYS) else None


def _envoy_gateway(settings: Settings, fakes: Fakes) -> dict[str, list[Data]]:
    """The standalone gateway, and all that Envoys of an Envoy Gateway need of it; nothing where they cannot use it."""
    folder = _ENVOY_GATEWAY
    try:
        each = envoy_gateway(settings, None, fakes)
    except RenderError:
        return {}
    there = {"policies.yaml": [one for one in each if one["kind"] != "EnvoyPatchPolicy"]}
    there["patches.yaml"] = [one for one in each if one["kind"] == "EnvoyPatchPolicy"]
    patches = [
        {"target": {"kind": kind, "name": name}, "patch": json.dumps(patch)}
        for kind, name, patch in fakes_reached(settings, fakes)
    ]
    return {
        f"{folder}/kustomization.yaml": [
            _kustomization("Kustomization", resources=["../standalone", *there], patches=patches)
        ],
        **{f"{folder}/{file}": documents for file, documents in there.items()},
    }


def _monitoring(settings: Settings) -> dict[str, list[Data]]:
    """Beside what an operator reads there are the same rules, and the dashboard, as files for who has none."""
    documents = {"servicemonitor.yaml": monitor(), "prometheusrule.yaml": rules(settings)}
    generated = {
        "name": f"{NAME}-dashboard",
        "namespace": NAMESPACE,
        "files": [_DASHBOARD],
        "options": {"labels": {**LABELS, "grafana_dashboard": "1"}, "disableNameSuffixHash": True},
    }
    there = _kustomization("Component", resources=list(documents), configMapGenerator=[generated])
    return {
        f"{_MONITORING}/kustomization.yaml": [there],
        **{f"{_MONITORING}/{file}": [document] for file, document in documents.items()},
    }


def _istio(settings: Settings) -> dict[str, list[Data]]:
    folder, (fields, there) = "overlays/istio", istio_overlay(settings)
    built = _kustomization("Kustomization", namespace=NAMESPACE, **fields)
    return {f"{folder}/{file}": [each] for file, each in {"kustomization.yaml": built, **there}.items()}


def _kept_state() -> dict[str, list[Data]]:
    claim, patch = kept_state()
    folder = "overlays/kept-state"
    return {
        f"{folder}/kustomization.yaml": [
            _kustomization("Component", resources=["claim.yaml"], patches=[{"path": "deployment.yaml"}])
        ],
        f"{folder}/claim.yaml": [claim],
        f"{folder}/deployment.yaml": [patch],
    }


def _kustomization(kind: str, **fields: object) -> Data:
    version = "v1alpha1" if kind == "Component" else "v1beta1"
    return {"apiVersion": f"{_KUSTOMIZE}/{version}", "kind": kind, **fields}
