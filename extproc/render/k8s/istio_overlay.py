"""The standalone gateway as a host of an Istio mesh."""

from __future__ import annotations

import json

from extproc.render.istio import destination_rule, ports_left_out, virtual_service
from extproc.render.k8s.objects import own_host
from extproc.render.k8s.placed import NAME, placed
from extproc.render.shape import Data
from extproc.settings import Settings

__all__ = ["istio_overlay"]


def istio_overlay(settings: Settings) -> tuple[Data, dict[str, Data]]:
    """Fields of its kustomization, and files beside it. The pod has no sidecar, and takes gRPC from labelled pods of
    any namespace; callers' sidecars are told how to treat it.
    """
    host = own_host(settings)
    annotations = ports_left_out(placed(settings, sidecar=False))
    pod = {"labels": {"sidecar.istio.io/inject": "false"}, "annotations": annotations}
    anywhere = [{"op": "add", "path": "/spec/ingress/1/from/0/namespaceSelector", "value": {}}]
    mesh = {"virtualservice.yaml": virtual_service(host, None, host), "destinationrule.yaml": destination_rule(host)}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": NAME},
        "spec": {"template": {"metadata": pod}},
    }
    patches = [
        {"path": "deployment.yaml"},
        {"target": {"kind": "NetworkPolicy", "name": NAME}, "patch": json.dumps(anywhere)},
    ]
    return {"resources": ["../standalone", *mesh], "patches": patches}, {"deployment.yaml": deployment, **mesh}
