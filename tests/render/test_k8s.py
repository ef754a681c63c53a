"""The Kubernetes objects: what Kubernetes itself takes, what kustomize makes of them, and what a pod must be."""

from __future__ import annotations

import base64
import copy
import gzip
import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import celpy
import certifi
import kubernetes_validate
import pytest
import yaml

from extproc.cli import rendering
from extproc.render import k8s
from extproc.render.envoy import RenderError, validate
from extproc.settings import Settings, load, parse
from tests.render import test_envoy_gateway
from tests.render.rig import Data

ROOT = Path(__file__).parents[2]
CRDS = {
    "Kustomization", "Component", "ServiceMonitor", "PrometheusRule", "Gateway", "HTTPRoute", "EnvoyProxy",
    "ClientTrafficPolicy", "BackendTrafficPolicy", "EnvoyPatchPolicy",
    "VirtualService", "DestinationRule",
}  # fmt: skip
"""Kinds of which Kubernetes itself knows nothing."""
PATCHES = {"overlays/sidecar/sidecar.yaml", "overlays/kept-state/deployment.yaml", "overlays/istio/deployment.yaml"}
PLAIN = {"overlays/monitoring/alerts.yaml", "overlays/monitoring/dashboard.json"}
"""For a Prometheus and a Grafana, not for Kubernetes."""
OLDEST = "1.33"
"""The first Kubernetes that has everything used here without a switch."""
APP = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: shop, labels: {tidegate/sidecar: "true"}}
spec:
  replicas: 1
  selector: {matchLabels: {app: shop}}
  template:
    metadata: {labels: {app: shop}, annotations: {mine: kept}}
    spec:
      initContainers: [{name: migrate, image: shop}]
      containers: [{name: shop, image: shop}]
      volumes: [{name: own, emptyDir: {}}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: other}
spec:
  selector: {matchLabels: {app: other}}
  template: {metadata: {labels: {app: other}}, spec: {containers: [{name: other, image: other}]}}
"""


def default(**service: Any) -> Settings:
    """The built-in demo's settings."""
    settings = load(None, {})
    return settings.model_copy(update={"service": settings.service.model_copy(update=service)})


def with_files(**more: Any) -> Settings:
    """Settings that name every kind of file."""
    limits = {"limits": [{"tpm": 1000}]}
    raw = {
        "identity": {"tenant": ["jwt:team"], "jwt": {"jwks_file": "/home/jwks.json"}},
        "upstreams": {
            "openai": {"provider": "openai", "key_file": "/home/openai", **limits},
            "Own_1.x": {"provider": "vllm", "url": "https://vllm:8443", "key_file": "/home/own", "ca_file": "/home/ca",
                        "kv": {"prometheus": "http://prometheus:9090", "query": "x", "tokens": 5}, "owned": True},
        },
        "routes": [{"models": ["m"], "chain": ["openai", "Own_1.x"]}],
        **more,
    }  # fmt: skip
    return parse(yaml.safe_dump(raw), "file", {})


def one(documents: list[Data], kind: str, name: str = "tidegate") -> Data:
    """The object of that kind and name."""
    (found,) = [each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pod_of(documents: list[Data], name: str = "tidegate") -> Data:
    """The pod of a Deployment."""
    return dict(one(documents, "Deployment", name)["spec"]["template"]["spec"])


def accepted(documents: list[Data]) -> None:
    """Nothing is misspelt, missing or of the wrong type."""
    for each in documents:
        kubernetes_validate.validate(each, OLDEST, strict=True)


def built(folder: Path) -> list[Data]:
    """What kustomize, as it is part of kubectl, makes of a folder."""
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


# ------------------------------------------------------------------------------------------- the folder


@pytest.fixture(autouse=True)
def _nobody_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands read the environment."""
    for name in [name for name in os.environ if name.startswith("TIDEGATE")]:
        monkeypatch.delenv(name)


def test_the_folder_is_rendered_from_the_default_settings(tmp_path: Path) -> None:
    """`make k8s` writes it anew."""
    rendering.k8s(ROOT / "extproc" / "default.yaml", write=tmp_path)
    assert dict(written(ROOT / "k8s")) == dict(written(tmp_path))


def test_what_pods_would_not_reach_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And why an overlay is not there. Files of a gateway say where their Secret has to be."""
    key, file = tmp_path / "key", tmp_path / "tidegate.yaml"
    key.write_text("k", "utf-8")
    near = {"provider": "vllm", "url": "http://127.0.0.1:8000", "owned": True, "concurrency": 1, "key_file": str(key)}
    file.write_text(
        json.dumps({"upstreams": {"near": near}, "routes": [{"models": ["*"], "chain": ["near"]}]}), "utf-8"
    )
    rendering.k8s(file, write=tmp_path / "tree")
    near_note, left_out = capsys.readouterr().err.splitlines()
    assert near_note == "note: upstreams.near.url: 127.0.0.1 is the pod itself there"
    assert left_out.startswith("note: overlays/envoy-gateway is left out: upstreams.near.url")
    assert not (tmp_path / "tree" / "overlays" / "envoy-gateway").exists()
    first = (tmp_path / "tree" / "overlays" / "standalone" / "kustomization.yaml").read_text("utf-8")
    assert "create secret generic tidegate-files --namespace tidegate" in first
    rendering.k8s(file)
    assert capsys.readouterr().err == f"{near_note}\n"


def written(folder: Path) -> Iterator[tuple[str, str]]:
    """Every file in it."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield str(file.relative_to(folder)), file.read_text("utf-8")


def test_all_of_it_is_taken_by_kubernetes() -> None:
    """Every file, by the published schemas; patches are not whole, and are looked at where they have been applied."""
    files = [text for path, text in written(ROOT / "k8s") if path not in PATCHES | PLAIN]
    documents = [each for text in files for each in yaml.safe_load_all(text)]
    assert len(documents) > 10
    accepted([each for each in documents if each["kind"] not in CRDS])


def test_the_schemas_would_tell() -> None:
    """A misspelt field deep inside, and a wrong type."""
    deployment = one(k8s.objects(default()), "Deployment")
    for place, value in (("readOnlyRootFileSystem", True), ("runAsUser", "root")):
        wrong = copy.deepcopy(deployment)
        wrong["spec"]["template"]["spec"]["containers"][0]["securityContext"][place] = value
        with pytest.raises(kubernetes_validate.ValidationError):
            accepted([wrong])


def test_the_base_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """The same objects, in another order and split into files."""
    rendering.k8s(ROOT / "extproc" / "default.yaml")
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    accepted(printed)
    assert sorted(map(json.dumps, built(ROOT / "k8s" / "base"))) == sorted(
        json.dumps(each, sort_keys=True) for each in printed
    )


def test_the_sidecar_is_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    """The ConfigMap, and the patch for those that do not use kustomize."""
    rendering.k8s(ROOT / "extproc" / "default.yaml", sidecar=True)
    config, patch = yaml.safe_load_all(capsys.readouterr().out)
    assert (config["metadata"]["name"], patch["kind"]) == ("tidegate-sidecar", "Deployment")


# ------------------------------------------------------------------------------------------ the overlays


def test_standalone_is_the_base_in_a_namespace_of_its_own() -> None:
    """Locked down by Kubernetes, and not to be scaled beyond what the limits are divided by."""
    documents = built(ROOT / "k8s" / "overlays" / "standalone")
    accepted(documents)
    kinds = {each["kind"] for each in documents}
    assert kinds >= {"Namespace", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "Deployment"}
    namespaced = [each for each in documents if each["kind"] in {e["kind"] for e in k8s.objects(default())}]
    assert {each["metadata"]["namespace"] for each in namespaced} == {"tidegate"}
    binding = one(documents, "ValidatingAdmissionPolicyBinding", "tidegate-replicas")["spec"]
    assert binding["matchResources"]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "tidegate"}
    images = {each["image"] for each in every_container(pod_of(documents))}
    assert images == {f"tidegate:{version('tidegate')}"}


@pytest.mark.parametrize(
    ("replicas", "kind", "asked", "name", "refused"),
    [
        (1, "Deployment", 1, "tidegate", False),
        (1, "Deployment", 2, "tidegate", True),
        (1, "Scale", 2, "tidegate", True),
        (1, "Scale", None, "tidegate", False),
        (1, "Deployment", 2, "other", False),
        (3, "Scale", 3, "tidegate", False),
        (3, "Scale", 4, "tidegate", True),
    ],
)
def test_more_replicas_than_limits_are_divided_by_are_refused(
    replicas: int,
    kind: str,
    asked: int | None,
    name: str,
    refused: bool,  # noqa: FBT001
) -> None:
    """The expressions, evaluated: whoever scales, by the Deployment or by its scale (which leaves out a 0)."""
    text = k8s.files(default(replicas=replicas))["overlays/standalone/replicas.yaml"]
    spec = one(list(yaml.safe_load_all(text)), "ValidatingAdmissionPolicy", "tidegate-replicas")["spec"]
    tested = {"kind": kind, "metadata": {"name": name}, "spec": {} if asked is None else {"replicas": asked}}
    environment = celpy.Environment()

    def holds(expression: str) -> bool:
        program = environment.program(environment.compile(expression))
        return bool(program.evaluate({"object": celpy.json_to_cel(tested)}))

    meant = all(holds(each["expression"]) for each in spec["matchConditions"])
    assert (meant and not all(holds(each["expression"]) for each in spec["validations"])) == refused


def test_the_sidecar_goes_into_deployments_that_ask_for_it(tmp_path: Path) -> None:
    """By a component that any kustomization may use; what is there stays, and starts after Tidegate and Envoy."""
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    (tmp_path / "app.yaml").write_text(APP, "utf-8")
    (tmp_path / "kustomization.yaml").write_text(
        "resources: [app.yaml]\ncomponents: [k8s/overlays/sidecar]\n"
        "images: [{name: tidegate, newName: registry/tidegate, newTag: '7'}]\n",
        "utf-8",
    )
    documents = built(tmp_path)
    accepted(documents)
    pod = pod_of(documents, "shop")
    names = [each["name"] for each in pod["initContainers"]]
    assert names == ["fake-primary", "fake-backup", "fake-local", "tidegate", "envoy", "migrate"]
    assert all(each["restartPolicy"] == "Always" for each in pod["initContainers"][:5])
    assert [each["name"] for each in pod["containers"]] == ["shop"]
    assert {"own", "tidegate-config", "tidegate-state"} == {each["name"] for each in pod["volumes"]}
    assert {each["image"] for each in pod["initContainers"][:5]} == {"registry/tidegate:7"}
    annotations = one(documents, "Deployment", "shop")["spec"]["template"]["metadata"]["annotations"]
    assert annotations.keys() == {"mine", "checksum/config"}
    assert pod_of(documents, "other") == {"containers": [{"image": "other", "name": "other"}]}
    envoy = yaml.safe_load(one(documents, "ConfigMap", "tidegate-sidecar")["data"]["envoy.yaml"])
    assert loopback_only(envoy)
    assert not any("ports" in each for each in pod["initContainers"])
    assert all("TIDEGATE__SERVICE__ADDRESS" not in json.dumps(each) for each in pod["initContainers"])


def test_state_that_is_kept_has_one_pod_at_a_time(tmp_path: Path) -> None:
    """By a component, where there is a single replica; several cannot share one file."""
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    (tmp_path / "kustomization.yaml").write_text(
        "resources: [k8s/overlays/standalone]\ncomponents: [k8s/overlays/kept-state]\n", "utf-8"
    )
    documents = built(tmp_path)
    accepted(documents)
    assert one(documents, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    (volume,) = [each for each in pod_of(documents)["volumes"] if each["name"] == "tidegate-state"]
    claim = one(documents, "PersistentVolumeClaim", "tidegate-state")
    assert claim["metadata"]["namespace"] == one(documents, "Deployment")["metadata"]["namespace"]
    assert volume == {"name": "tidegate-state", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    assert {"tidegate-config", "tidegate-state"} == {each["name"] for each in pod_of(documents)["volumes"]}
    assert not [path for path in k8s.files(default(replicas=2)) if "kept-state" in path]


def test_envoy_gateways_envoys_reach_tidegate_and_the_demos_providers() -> None:
    """The standalone gateway, its policy open to labelled pods of other namespaces, and what Envoy Gateway is told."""
    documents = built(ROOT / "k8s" / "overlays" / "envoy-gateway")
    accepted([each for each in documents if each["kind"] not in CRDS])
    test_envoy_gateway.accepted([each for each in documents if each["kind"] in CRDS])
    kinds = {each["kind"] for each in documents}
    assert kinds >= {"Deployment", "Namespace", "Gateway", "HTTPRoute", "EnvoyProxy", "EnvoyPatchPolicy"}
    rule = one(documents, "NetworkPolicy")["spec"]["ingress"][1]
    assert rule["from"] == [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"tidegate/envoy": "true"}}}]
    labels = one(documents, "EnvoyProxy")["spec"]["provider"]["kubernetes"]["envoyDeployment"]["pod"]["labels"]
    assert labels == rule["from"][0]["podSelector"]["matchLabels"]
    open_ports = {each["port"] for each in rule["ports"]}
    served = {each["port"]: each.get("targetPort", each["port"]) for each in headless(documents)["spec"]["ports"]}
    listening = {each["name"]: each["command"] for each in every_container(pod_of(documents))}
    for name, port in (("primary", 10011), ("backup", 10012), ("local", 10013)):
        assert port in open_ports
        assert served[port] == port
        command = listening[f"fake-{name}"]
        assert command[command.index("--port") + 1] == str(port)
        assert command[command.index("--host") + 1] == "0.0.0.0"
    assert served[10003] == "grpc"


def headless(documents: list[Data]) -> Data:
    return one(documents, "Service", "tidegate-headless")


def test_the_service_for_envoys_is_headless_and_envoys_take_the_least_busy() -> None:
    """Every pod's address, looked up again and again, and a choice for each request."""
    documents = built(ROOT / "k8s" / "overlays" / "envoy-gateway")
    assert headless(documents)["spec"]["clusterIP"] == "None"
    (patch,) = one(documents, "EnvoyPatchPolicy", "tidegate-cluster-service-915cf295")["spec"]["jsonPatches"]
    cluster = patch["operation"]["value"]
    (place,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert place["endpoint"]["address"]["socket_address"] == {
        "address": "tidegate-headless.tidegate.svc.cluster.local",
        "port_value": 10003,
    }
    assert (cluster["type"], cluster["lb_policy"]) == ("STRICT_DNS", "LEAST_REQUEST")


def test_no_overlay_for_an_envoy_gateway_where_it_could_not_work() -> None:
    assert not [path for path in k8s.files(default(replicas=2)) if "envoy-gateway" in path]


@pytest.mark.parametrize("beside", ["standalone", "envoy-gateway"])
def test_prometheus_finds_the_metrics_and_may_read_them(tmp_path: Path, beside: str) -> None:
    """By a component, since ServiceMonitor is a kind of the Prometheus operator."""
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [k8s/overlays/{beside}]\ncomponents: [k8s/overlays/monitoring]\n", "utf-8"
    )
    documents = built(tmp_path)
    monitor = one(documents, "ServiceMonitor")
    assert monitor["metadata"]["namespace"] == headless(documents)["metadata"]["namespace"] == "tidegate"
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    services = [each for each in documents if each["kind"] == "Service"]
    chosen = [each for each in services if wanted <= each["metadata"]["labels"].items()]
    assert chosen == [headless(documents)], "each pod once"
    assert [each["path"] for each in monitor["spec"]["endpoints"]] == ["/metrics", "/stats/prometheus"]
    told = [rule["targetLabel"] for each in monitor["spec"]["endpoints"] for rule in each["relabelings"]]
    assert told == ["metrics_path"] * 2, "they are of one port, and would be one target"
    ports = {each["name"]: each for each in headless(documents)["spec"]["ports"]}
    assert {each["port"] for each in monitor["spec"]["endpoints"]} == {"metrics"}
    (envoy,) = pod_of(documents)["containers"]
    assert {"name": ports["metrics"]["targetPort"], "containerPort": 10005} in envoy["ports"]
    rule = one(documents, "NetworkPolicy")["spec"]["ingress"][2]
    assert rule["ports"] == [{"protocol": "TCP", "port": 10005}]
    (who,) = rule["from"]
    assert who["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prometheus"}


def test_alerts_and_dashboard_are_the_same_with_an_operator_and_without(tmp_path: Path) -> None:
    """The PrometheusRule has the rules of the file; the ConfigMap carries the dashboard, with a label."""
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    (tmp_path / "kustomization.yaml").write_text(
        "resources: [k8s/overlays/standalone]\ncomponents: [k8s/overlays/monitoring]\n", "utf-8"
    )
    documents, folder = built(tmp_path), ROOT / "k8s" / "overlays" / "monitoring"
    rules = one(documents, "PrometheusRule")
    assert rules["metadata"]["namespace"] == "tidegate"
    assert rules["spec"] == yaml.safe_load((folder / "alerts.yaml").read_text("utf-8"))
    carried = one(documents, "ConfigMap", "tidegate-dashboard")
    accepted([carried])
    assert carried["metadata"]["namespace"] == "tidegate"
    assert carried["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert carried["data"] == {"dashboard.json": (folder / "dashboard.json").read_text("utf-8")}


# ------------------------------------------------------------------------------------------------ a pod


def every_container(pod: Data) -> list[Data]:
    """All containers of a pod."""
    return [*pod["initContainers"], *pod["containers"]]


def loopback_only(envoy: Data) -> bool:
    """Whether nothing can be reached from outside the pod."""
    listeners = [*envoy["static_resources"]["listeners"], envoy["admin"]]
    hosts = [each["address"]["socket_address"]["address"] for each in listeners]
    return all(ipaddress.ip_address(host).is_loopback for host in hosts)


@pytest.mark.parametrize("form", ["gateway", "sidecar"])
def test_containers_are_locked_down(form: str) -> None:
    """No root, nothing to write to but the state, no rights, no token."""
    documents = k8s.objects(with_files())
    pod = pod_of(documents) if form == "gateway" else k8s.sidecar(with_files()).patch["spec"]["template"]["spec"]
    for container in [*pod["initContainers"], *pod.get("containers", [])]:
        rights = container["securityContext"]
        assert (rights["runAsNonRoot"], rights["runAsUser"], rights["readOnlyRootFilesystem"]) == (True, 65532, True)
        assert (rights["allowPrivilegeEscalation"], rights["capabilities"]) == (False, {"drop": ["ALL"]})
        assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
        writable = [each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")]
        assert writable == (["/var/lib/tidegate"] if container["name"] == "tidegate" else [])
    if form == "gateway":
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False


def test_order_of_start_and_end() -> None:
    """Tidegate is a native sidecar: before Envoy, and after it. The pod has time for both drains."""
    settings = default(drain_s=20).model_copy(update={"gateway": default().gateway.model_copy(update={"drain_s": 100})})
    pod = pod_of(k8s.objects(settings))
    (tidegate,), (envoy,) = pod["initContainers"], pod["containers"]
    assert (tidegate["name"], tidegate["restartPolicy"], envoy["name"]) == ("tidegate", "Always", "envoy")
    assert tidegate["startupProbe"]["grpc"] == tidegate["livenessProbe"]["grpc"] == {"port": 10003}
    assert "preStop" not in tidegate.get("lifecycle", {})
    hook = envoy["lifecycle"]["preStop"]["exec"]["command"]
    assert hook == ["tidegate", "drain", "--config", "/etc/tidegate/config/tidegate.yaml"]
    assert pod["terminationGracePeriodSeconds"] == 130


def test_the_service_is_told_its_port_whatever_kubernetes_says() -> None:
    """A Service called tidegate gives pods TIDEGATE_PORT=tcp://..., which is our own variable."""
    settings = default()
    for container in [*pod_of(k8s.objects(settings))["initContainers"], *pod_of(k8s.objects(settings))["containers"]]:
        assert {"name": "TIDEGATE_PORT", "value": "10000"} in container["env"]


@pytest.mark.parametrize(("replicas", "budget"), [(1, {"minAvailable": 1}), (3, {"maxUnavailable": 1})])
def test_replicas(replicas: int, budget: dict[str, int]) -> None:
    """A single one stays in its Service while Tidegate is away, and is not evicted; others make way for each other."""
    documents = k8s.objects(default(replicas=replicas))
    accepted(documents)
    deployment, disruption = one(documents, "Deployment")["spec"], one(documents, "PodDisruptionBudget")["spec"]
    assert deployment["replicas"] == replicas
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert {key: disruption[key] for key in budget} == budget
    (tidegate,) = pod_of(documents)["initContainers"]
    assert ("readinessProbe" in tidegate) == ("topologySpreadConstraints" in pod_of(documents)) == (replicas > 1)
    told = parse(one(documents, "ConfigMap")["data"]["tidegate.yaml"], "there", {})
    assert told.service.replicas == replicas


def test_metrics_have_a_port_that_nothing_else_has() -> None:
    """The one in the settings, else the first that is free in the pod; none in a sidecar, which nobody reaches."""
    gateway = default().gateway
    for changed, port in (({"metrics_port": 9999}, 9999), ({}, 10005), ({"port": 10005, "admin_port": 10006}, 10007)):
        settings = default().model_copy(update={"gateway": gateway.model_copy(update=changed)})
        there = parse(one(k8s.objects(settings), "ConfigMap")["data"]["tidegate.yaml"], "there", {})
        assert there.gateway.metrics_port == port
    beside = parse(k8s.sidecar(settings).config["data"]["tidegate.yaml"], "there", {})
    assert beside.gateway.metrics_port is None


def test_one_selector_for_all() -> None:
    """Services, budget and policy mean the pods of the Deployment."""
    documents = k8s.objects(default())
    labels = one(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    chosen = [
        one(documents, "Deployment")["spec"]["selector"]["matchLabels"],
        one(documents, "Service")["spec"]["selector"],
        one(documents, "Service", "tidegate-headless")["spec"]["selector"],
        one(documents, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one(documents, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(each == labels for each in chosen)
    assert one(documents, "Service", "tidegate-headless")["spec"]["clusterIP"] == "None"
    named = {port["name"]: port["containerPort"] for c in every_container(pod_of(documents)) for port in c["ports"]}
    for service in ("tidegate", "tidegate-headless"):
        for port in one(documents, "Service", service)["spec"]["ports"]:
            assert named[port["targetPort"]] == port["port"]


def test_the_network_is_open_where_it_is_needed() -> None:
    """Inwards the gateway, and Tidegate for Envoys with a label; outwards names and what the settings name."""
    policy = one(k8s.objects(with_files()), "NetworkPolicy")["spec"]
    everybody, envoys, collectors = policy["ingress"]
    assert everybody == {"ports": [{"protocol": "TCP", "port": 10000}]}
    assert envoys["ports"] == [{"protocol": "TCP", "port": 10003}]
    assert envoys["from"] == [{"podSelector": {"matchLabels": {"tidegate/envoy": "true"}}}]
    assert collectors["ports"] == [{"protocol": "TCP", "port": 10005}]
    (out,) = policy["egress"]
    assert [port["port"] for port in out["ports"]] == [53, 53, 443, 8443, 9090]
    assert policy["policyTypes"] == ["Ingress", "Egress"]


# ---------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("form", ["gateway", "sidecar"])
def test_what_is_mounted_is_what_was_written(form: str) -> None:
    """The same settings but for paths and addresses; every file that Envoy is told of is there."""
    settings = with_files(service={"state_file": "/home/levels", "drain_s": 7}, observe=0.5)
    config = one(k8s.objects(settings), "ConfigMap") if form == "gateway" else k8s.sidecar(settings).config
    there = parse(config["data"]["tidegate.yaml"], "there", {}, folder=Path("/nowhere"))
    assert there.gateway.address == ("0.0.0.0" if form == "gateway" else "127.0.0.1")
    assert (there.service.address, there.service.state_file) == ("127.0.0.1:10003", "/var/lib/tidegate/levels.json")
    assert there.upstreams["openai"].key_file == "/etc/tidegate/files/openai.key"
    assert there.upstreams["Own_1.x"].ca_file == "/etc/tidegate/files/Own_1.x.ca"
    assert there.policy().upstreams.keys() == settings.policy().upstreams.keys()
    restored = there.model_dump() | {"gateway": None, "upstreams": None, "identity": None}
    assert restored | {"service": None} == settings.model_dump() | dict.fromkeys(
        ("gateway", "upstreams", "identity", "service")
    )
    needed = k8s.needed_files(settings)
    assert needed == {
        "openai.key": "/home/openai", "Own_1.x.key": "/home/own", "Own_1.x.ca": "/home/ca",
        "jwks.json": "/home/jwks.json",
    }  # fmt: skip
    text = config["data"]["envoy.yaml"] + "".join(v for k, v in config["data"].items() if k.startswith("sds-"))
    assert set(re.findall(r"/etc/tidegate/files/([\w.-]+)", text)) == set(needed)
    assert "/home/" not in json.dumps(config)


def test_what_proves_who_may_act_is_tidegates_alone() -> None:
    """Its token and its certificate are no files of Envoy's; what is done is written where it can be."""
    named = {"token_file": "/home/token", "cert_file": "/home/cert", "key_file": "/home/key"}
    settings = parse(yaml.safe_dump({**RAW_OF_ADMIN, "admin": {**named, "audit_file": "/home/audit"}}), "test", {})
    assert k8s.needed_files(settings) == {f"_admin.{key}": path for key, path in named.items()}
    config, deployment = (
        next(each for each in k8s.objects(settings) if each["kind"] == kind) for kind in ("ConfigMap", "Deployment")
    )
    there = parse(config["data"]["tidegate.yaml"], "pod", {}).admin
    assert there.token_file == "/etc/tidegate/admin/token_file"
    assert there.audit_file == "/var/lib/tidegate/audit.jsonl"
    assert "/home/" not in json.dumps(config)
    pod = deployment["spec"]["template"]["spec"]
    mounted = {each["name"]: {mount["mountPath"] for mount in each["volumeMounts"]} for each in pod_containers(pod)}
    assert {name for name, paths in mounted.items() if "/etc/tidegate/admin" in paths} == {"tidegate"}
    assert not any("/etc/tidegate/files" in paths for paths in mounted.values())
    secret = next(each["secret"] for each in pod["volumes"] if each["name"] == "tidegate-admin")
    assert secret["items"] == [{"key": f"_admin.{key}", "path": key} for key in named]
    assert secret["defaultMode"] == 0o440
    assert "_admin" not in k8s.envoy_gateway_yaml(settings, k8s.Target())


RAW_OF_ADMIN = {
    "upstreams": {"a": {"provider": "fake", "url": "http://10.0.0.1:1", "owned": True, "concurrency": 5}},
    "routes": [{"models": ["*"], "chain": ["a"]}],
}


def pod_containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in (*pod["initContainers"], *pod["containers"]) if "volumeMounts" in each]


def test_entries_are_mounted_where_envoy_looks() -> None:
    """What tells it where keys are."""
    documents = k8s.objects(with_files())
    volumes = {volume["name"]: volume for volume in pod_of(documents)["volumes"]}
    paths = {item["path"] for item in volumes["tidegate-config"]["configMap"]["items"]}
    keys, trusted = {"sds/openai.json", "sds/Own_1.x.json"}, "sds/_tls-Own_1.x.ca.json"
    assert paths == {"tidegate.yaml", "envoy.yaml", *keys, trusted}
    assert volumes["tidegate-files"]["secret"]["secretName"] == "tidegate-files"
    assert "/etc/tidegate/config/sds/openai.json" in one(documents, "ConfigMap")["data"]["envoy.yaml"]
    assert not {"tidegate-files"} & {volume["name"] for volume in pod_of(k8s.objects(default()))["volumes"]}


def test_the_stream_says_which_secret_it_needs() -> None:
    """As a command."""
    text = k8s.to_yaml(k8s.objects(with_files()), with_files())
    assert "kubectl create secret generic tidegate-files" in text
    assert "--from-file=openai.key=/home/openai" in text
    assert "create secret" not in k8s.to_yaml(k8s.objects(default()), default())


def test_another_config_rolls_the_pods() -> None:
    """By an annotation; the same config does not."""

    def told(**service: Any) -> str:
        template = one(k8s.objects(default(**service)), "Deployment")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert told() == told()
    assert told() != told(drain_s=31)


def test_what_cannot_be_in_a_pod_is_told() -> None:
    """A socket that Kubernetes cannot ask, and more than a ConfigMap holds."""
    with pytest.raises(RenderError, match=r"^service\.address: in a pod it must be host:port"):
        k8s.objects(default(address="unix:/run/t.sock"))
    hashes = [f"{i:064x}" for i in range(16_000)]
    with pytest.raises(RenderError, match="even when compressed, more than a ConfigMap may hold"):
        k8s.objects(with_files(tenants={"t": {"key_sha256": hashes}}))


@pytest.mark.parametrize("form", ["gateway", "sidecar"])
def test_what_is_large_is_packed(form: str) -> None:
    """Fifty upstreams are more than a ConfigMap holds; before Envoy starts its configuration is unpacked."""
    settings = many()
    documents = k8s.objects(settings)
    accepted(documents)
    beside = k8s.sidecar(settings)
    config = one(documents, "ConfigMap") if form == "gateway" else beside.config
    pod = pod_of(documents) if form == "gateway" else beside.patch["spec"]["template"]["spec"]
    assert "envoy.yaml" not in config["data"]
    told = gzip.decompress(base64.b64decode(config["binaryData"]["envoy.yaml.gz"])).decode()
    assert len(told) > 1_048_576 > len(json.dumps(config))
    upstreams = [c for c in yaml.safe_load(told)["static_resources"]["clusters"] if ":" not in c["name"]]
    assert len(upstreams) == 50
    order = [each["name"] for each in [*pod["initContainers"], *pod.get("containers", [])]]
    assert order == ["tidegate", "unpack", "envoy"]
    assert {item["path"] for item in pod["volumes"][0]["configMap"]["items"]} >= {"envoy.yaml.gz", "sds/u0.json"}


def many() -> Settings:
    """Fifty upstreams, 200 routes."""
    upstreams = {f"u{i}": {"provider": "openai", "key_file": "/home/key", "learn": True} for i in range(50)}
    routes = [
        {"models": [f"m{i}"], "chain": [f"u{i % 50}", f"u{(i + 1) % 50}"], "acknowledge_unowned": True}
        for i in range(200)
    ]
    return parse(yaml.safe_dump({"upstreams": upstreams, "routes": routes}), "file", {})


@pytest.mark.e2e
@pytest.mark.parametrize("form", ["gateway", "sidecar"])
def test_envoy_takes_what_is_in_the_config_map(form: str, tmp_path: Path) -> None:
    """With the mount paths moved to where the files are here."""
    settings = with_files()
    config = one(k8s.objects(settings), "ConfigMap") if form == "gateway" else k8s.sidecar(settings).config
    (tmp_path / "sds").mkdir()
    (tmp_path / "files").mkdir()
    for entry in k8s.needed_files(settings):
        (tmp_path / "files" / entry).write_text(CONTENT.get(entry.rpartition(".")[2], "secret"), "utf-8")

    def here(text: str) -> str:
        return text.replace("/etc/tidegate/config", str(tmp_path)).replace("/etc/tidegate/files", f"{tmp_path}/files")

    for key, text in config["data"].items():
        if key.startswith("sds-"):
            (tmp_path / "sds" / key.removeprefix("sds-")).write_text(here(text), "utf-8")
    validate(here(config["data"]["envoy.yaml"]))


CONTENT = {
    "ca": Path(certifi.where()).read_text("utf-8"),
    "json": '{"keys": [{"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0", "alg": "HS256"}]}',
}


# ---------------------------------------------------------------------------------------------------- the image


def test_the_image_has_what_the_containers_run() -> None:
    """The user, the commands and what is copied agree with the manifests and the package."""
    lines = (ROOT / "Containerfile").read_text("utf-8").splitlines()
    (user,) = [line.split()[1] for line in lines if line.startswith("USER")]
    assert user == "65532:65532"
    copied = {
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    }
    assert all((ROOT / word).exists() for word in copied)
    kept = (ROOT / ".containerignore").read_text("utf-8").splitlines()
    assert {f"!{word.removeprefix('./')}" for word in copied} <= set(kept)
    programs = {container["command"][0] for container in every_container(pod_of(k8s.objects(default())))}
    assert programs == {"tidegate", "envoy"}
    assert all(Path(sys.executable).with_name(program).exists() for program in programs)


# ------------------------------------------------------------------------------------------- odd settings


def odd(**more: Any) -> Settings:
    """Settings with one fake provider, and what is given."""
    fake = {"provider": "fake", "url": "http://127.0.0.1:9101", "limits": [{"tpm": 1000}]}
    raw: dict[str, Any] = {"upstreams": {"one": fake}, **more}
    raw["routes"] = [{"models": ["m"], "chain": list(raw["upstreams"]), "acknowledge_unowned": True}]
    return parse(yaml.safe_dump(raw), "file", {})


def test_containers_have_names_of_their_own() -> None:
    """Also where the upstreams' differ in what Kubernetes takes in no name only, and where they are long."""
    names = ["a.b", "a_b", "a-b", "A" * 63, "a" * 62 + "b", "envoy"]
    fakes: dict[str, list[str]] = {name: [] for name in names}
    pod = pod_of(k8s.objects(odd(), fakes))
    found = [each["name"] for each in [*pod["initContainers"], *pod["containers"]]]
    assert len(set(found)) == len(found) == len(names) + 2
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name) for name in found), found


@pytest.mark.parametrize(("port", "start"), [(80, "80"), (443, "443"), (1024, None), (10000, None)])
def test_a_low_port_is_left_to_who_is_not_root(port: int, start: str | None) -> None:
    """Else Envoy, which is not, could not listen there."""
    documents = k8s.objects(odd(gateway={"port": port}))
    accepted(documents)
    told = pod_of(documents)["securityContext"].get("sysctls", [])
    assert told == ([{"name": "net.ipv4.ip_unprivileged_port_start", "value": start}] if start else [])


def test_what_listens_to_everybody_elsewhere_does_not_in_a_pod() -> None:
    """No policy of the network guards an application's pod, nor the console anywhere."""
    everybody = {"address": "0.0.0.0:10003", "console": "0.0.0.0:10004", "health": "0.0.0.0:10007"}
    settings = odd(gateway={"address": "0.0.0.0", "metrics_port": 9090}, service=everybody)
    config = k8s.sidecar(settings).config["data"]
    assert loopback_only(yaml.safe_load(config["envoy.yaml"]))
    inside = parse(config["tidegate.yaml"], "pod", {}).service
    assert (inside.console, inside.health) == ("127.0.0.1:10004", "127.0.0.1:10007")
    data = one(k8s.objects(settings), "ConfigMap")["data"]
    assert parse(data["tidegate.yaml"], "pod", {}).service.console == "127.0.0.1:10004"


@pytest.mark.parametrize("form", ["gateway", "sidecar"])
def test_of_several_behind_one_envoy_each_pod_has_one(form: str) -> None:
    """Its Envoy asks the one beside it, and that starts with what it is given in the pod."""
    places = ["127.0.0.1:10003", "127.0.0.1:10013"]
    settings = odd(service={"address": places[0], "addresses": places, "replicas": 2})
    documents = k8s.objects(settings)
    config = one(documents, "ConfigMap") if form == "gateway" else k8s.sidecar(settings).config
    env = pod_of(documents)["initContainers"][0]["env"] if form == "gateway" else []
    inside = parse(config["data"]["tidegate.yaml"], "pod", {each["name"]: each["value"] for each in env})
    assert (inside.service.addresses, inside.service.replicas) == ((), 2)
    assert places[1].rpartition(":")[2] not in config["data"]["envoy.yaml"]


def test_a_service_that_kubernetes_cannot_ask_is_refused() -> None:
    """Before anything is written."""
    with pytest.raises(RenderError, match="must be host:port"):
        k8s.objects(odd(service={"address": "unix:/run/tidegate/s"}))
