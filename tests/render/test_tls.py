"""TLS as it is rendered: for Envoy, followed or not, and in pods. And what is listened on, which nothing public is."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.render import k8s
from extproc.render.envoy import RenderError, bootstrap, to_yaml, validate, write_secrets
from extproc.render.names import SERVICE_CLUSTER
from extproc.settings import PROVIDERS, Settings, load, parse
from tests.certificates import Mounted, tls_of
from tests.render.rig import Data

IN_POD = "/etc/tidegate/tls"


@pytest.fixture
def files(tmp_path: Path) -> Mounted:
    """Certificates of one authority."""
    return Mounted(tmp_path / "mounted")


def settings(files: Mounted, *, followed: str | None = None, **service: Any) -> Settings:
    """Mutual TLS to Tidegate and to an upstream, one more upstream with a CA of its own, and one with the system's."""
    tls = tls_of(files)
    own = {"ca_file": tls["ca_file"], "provider": "vllm", "concurrency": 9}
    client = {key: tls[key] for key in ("client_cert_file", "client_key_file")}
    raw = {
        "gateway": {"secrets_dir": followed},
        "service": {"address": "tidegate.svc:10003", "tls": tls, **service},
        "upstreams": {
            "mutual": {"url": "https://vllm.svc:8443", **own, **client},
            "near": {"url": "https://127.0.0.1:8443", **own, "owned": True},
            "openai": {"provider": "openai", "learn": True},
        },
        "routes": [{"models": ["m"], "chain": ["openai", "mutual", "near"]}],
    }
    return parse(yaml.safe_dump(raw), "test", {})


def context(config: Data, cluster: str) -> Data:
    """How TLS is spoken to a cluster."""
    (found,) = [each for each in config["static_resources"]["clusters"] if each["name"] == cluster]
    return dict(found["transport_socket"]["typed_config"])


def test_the_service_is_known_by_its_name_and_envoy_by_its_certificate(files: Mounted) -> None:
    """HTTP/2 is told, as gRPC insists; the name is sent, and looked for in the certificate."""
    told = context(bootstrap(settings(files)), SERVICE_CLUSTER)
    common = told["common_tls_context"]
    assert (told["sni"], common["alpn_protocols"]) == ("tidegate.svc", ["h2"])
    (shown,) = common["tls_certificates"]
    assert shown["private_key"]["filename"] == files.path("client.key")
    named = {"san_type": "DNS", "matcher": {"exact": "tidegate.svc"}}
    trusted = {"filename": files.path("ca.pem")}
    assert common["validation_context"] == {"trusted_ca": trusted, "match_typed_subject_alt_names": [named]}
    near = context(bootstrap(settings(files, address="127.0.0.1:1")), SERVICE_CLUSTER)
    assert "sni" not in near
    (named,) = near["common_tls_context"]["validation_context"]["match_typed_subject_alt_names"]
    assert named == {"san_type": "IP_ADDRESS", "matcher": {"exact": "127.0.0.1"}}
    other = settings(files, tls={**tls_of(files), "server_name": "other.svc"})
    assert context(bootstrap(other), SERVICE_CLUSTER)["sni"] == "other.svc"


def test_followed_files_are_told_of_in_a_folder(files: Mounted, tmp_path: Path) -> None:
    """One for each secret, with the folder to watch; no private key is in any of them. The system's CAs are not."""
    folder = tmp_path / "told"
    known = settings(files, followed=str(folder))
    write_secrets(known)
    told = {path.name: json.loads(path.read_text("utf-8"))["resources"][0] for path in folder.iterdir()}
    pairs = {"_service.certificate.json", "_tls-mutual.certificate.json"}
    assert set(told) == pairs | {"_service.ca.json", "_tls-mutual.ca.json", "_tls-near.ca.json"}
    assert all(f"{one['name']}.json" == name for name, one in told.items())
    watched = [one.get("tls_certificate") or one["validation_context"] for one in told.values()]
    assert {one["watched_directory"]["path"] for one in watched} == {str(files.folder)}
    text = to_yaml(bootstrap(known))
    assert {name for name in told if f"{folder}/{name}" in text} == set(told)
    assert files.path("client.key") not in text


@pytest.mark.e2e
@pytest.mark.parametrize("how", ["read once", "followed"])
def test_a_real_envoy_accepts_it(files: Mounted, tmp_path: Path, how: str) -> None:
    """Both ways."""
    known = settings(files, followed=str(tmp_path / "told") if how == "followed" else None)
    if how == "followed":
        write_secrets(known)
    validate(to_yaml(bootstrap(known)))


# ---------------------------------------------------------------------------------------------------- in pods


def pod(documents: list[Data]) -> Data:
    """The gateway's pod."""
    (deployment,) = [each for each in documents if each["kind"] == "Deployment"]
    return dict(deployment["spec"]["template"]["spec"])


def test_in_a_pod_both_have_their_certificates_and_kubernetes_a_port_to_ask(files: Mounted) -> None:
    """Envoy reaches it by loopback and looks for the name all the same. Keys of upstreams are not shown to Tidegate."""
    known = settings(files)
    documents = k8s.objects(known)
    spec = pod(documents)
    (config,) = [each["data"] for each in documents if each["kind"] == "ConfigMap"]
    there = parse(config["tidegate.yaml"], "there", {})
    assert there.service.tls is not None
    assert (there.service.address, there.service.server_name) == ("127.0.0.1:10003", "tidegate.svc")
    assert {Path(path).parent for path in there.service.tls.files.values()} == {Path(IN_POD)}
    assert context(yaml.safe_load(config["envoy.yaml"]), SERVICE_CLUSTER)["sni"] == "tidegate.svc"
    volumes = {volume["name"]: volume.get("secret", {}).get("items") for volume in spec["volumes"]}
    mounted = {f"{IN_POD}/{item['path']}": item["key"] for item in volumes["tidegate-tls"]}
    assert set(there.service.tls.files.values()) == mounted.keys()
    needed = k8s.needed_files(known)
    assert set(mounted.values()) | {item["key"] for item in volumes["tidegate-files"]} == needed.keys()
    (service,) = [each for each in spec["initContainers"] if each["name"] == "tidegate"]
    assert {mount["name"] for mount in service["volumeMounts"]} == {
        "tidegate-config", "tidegate-tls", "tidegate-state",
    }  # fmt: skip
    (envoy,) = spec["containers"]
    assert {"tidegate-tls", "tidegate-files"} <= {mount["name"] for mount in envoy["volumeMounts"]}
    told = "".join(text for key, text in config.items() if key != "tidegate.yaml")
    assert set(re.findall(rf"{IN_POD}/[\w.-]+", told)) < mounted.keys()
    assert f"{IN_POD}/client_key_file" in told
    assert f'{IN_POD}/key_file"' not in told


def test_probes_of_kubernetes_ask_the_plain_health_port(files: Mounted) -> None:
    """Which exists for that; where there is no TLS they ask Tidegate's own."""
    (service,) = [each for each in pod(k8s.objects(settings(files)))["initContainers"] if each["name"] == "tidegate"]
    told = {each["name"]: each["value"] for each in service["env"]}
    assert told["TIDEGATE__SERVICE__HEALTH"] == "0.0.0.0:10006"
    assert {service[probe]["grpc"]["port"] for probe in ("startupProbe", "livenessProbe")} == {10006}
    plain = k8s.objects(load(None, {}))
    (service,) = [each for each in pod(plain)["initContainers"] if each["name"] == "tidegate"]
    assert service["startupProbe"]["grpc"]["port"] == 10003
    assert "TIDEGATE__SERVICE__HEALTH" not in {each["name"] for each in service["env"]}


def test_a_sidecar_has_them_too(files: Mounted) -> None:
    """Its probes run in it."""
    spec = k8s.sidecar(settings(files)).patch["spec"]["template"]["spec"]
    for container in spec["initContainers"]:
        assert "tidegate-tls" in {mount["name"] for mount in container["volumeMounts"]}, container["name"]
        assert container["startupProbe"]["exec"]["command"][:2] == ["tidegate", "ready"]


# -------------------------------------------------------------------------------------------------- addresses


def test_nothing_listens_on_a_public_address_by_default() -> None:
    """Whatever Envoy is told to listen on, and whatever Tidegate and the demo's fakes do."""
    known = load(None, {})
    config = bootstrap(known)
    listened = [*listened_on(config["admin"])]
    for listener in config["static_resources"]["listeners"]:
        listened += listened_on(listener["address"])
    assert len(listened) == 3
    service = known.service
    listened += [service.address.rpartition(":")[0], service.console.rpartition(":")[0]]
    listened += [upstream.host for upstream in known.upstreams.values()]
    assert all(ipaddress.ip_address(host).is_loopback for host in listened), listened
    assert service.health is None


def test_a_gateway_that_faces_the_network_takes_nothing_else_along() -> None:
    """Of all addresses only that of traffic is the one that was set; admin, canaries and console stay where they are.
    In pods metrics are told, too; and Services and NetworkPolicy name nothing but these, and Tidegate's port.
    """
    known = load(None, {"TIDEGATE__GATEWAY__ADDRESS": "0.0.0.0"})
    public = [at for at, host in places(bootstrap(known)) if host == "0.0.0.0"]
    assert public == ["static_resources.listeners.0.address.socket_address"]
    documents = k8s.objects(known)
    (config,) = [each["data"]["envoy.yaml"] for each in documents if each["kind"] == "ConfigMap"]
    there = {host: at for at, host in places(yaml.safe_load(config)) if at not in public}
    assert there.pop("0.0.0.0") == "static_resources.listeners.2.address.socket_address"
    assert yaml.safe_load(config)["static_resources"]["listeners"][2]["name"] == "metrics"
    assert "0.0.0.0" not in there
    named = {
        port["port"]
        for each in documents if each["kind"] in ("Service", "NetworkPolicy")
        for port in each["spec"].get("ports", ()) or (p for rule in each["spec"]["ingress"] for p in rule["ports"])
    }  # fmt: skip
    assert named == {known.gateway.port, 10003, 10005}


def listened_on(address: Data) -> Iterator[str]:
    """Hosts in an address, however deep."""
    return (host for _, host in places(address))


def places(node: Any, at: str = "") -> list[tuple[str, str]]:
    """Every socket address below, with where it stands."""
    if isinstance(node, dict):
        own = [(at, str(node["address"]))] if "port_value" in node else []
        return own + [found for key, each in node.items() for found in places(each, f"{at}.{key}".strip("."))]
    if isinstance(node, list):
        return [found for i, each in enumerate(node) for found in places(each, f"{at}.{i}")]
    return []


def test_every_provider_that_has_an_address_is_reached_by_tls() -> None:
    """None of them has a plain one."""
    assert all(each.url.startswith("https://") for each in PROVIDERS.values() if each.url)


def test_envoys_of_envoy_gateway_have_them_too(files: Mounted) -> None:
    """Each with its own part of the Secret; a policy cannot show a certificate, and that is said."""
    known = settings(files)
    there = known.upstreams["near"].model_copy(update={"url": "https://10.1.2.3:8443"})
    known = known.model_copy(update={"upstreams": {**known.upstreams, "near": there}})
    documents = k8s.envoy_gateway(known)
    (proxy,) = [each["spec"]["provider"]["kubernetes"] for each in documents if each["kind"] == "EnvoyProxy"]
    (mount,) = [
        each for each in proxy["envoyDeployment"]["container"]["volumeMounts"] if each["name"] == "tidegate-tls"
    ]
    assert mount["mountPath"] == IN_POD
    volumes = {each["name"]: each["secret"] for each in proxy["envoyDeployment"]["pod"]["volumes"] if "secret" in each}
    assert {item["path"] for item in volumes["tidegate-tls"]["items"]} == {
        "ca_file", "client_cert_file", "client_key_file",
    }  # fmt: skip
    (told,) = [each["data"] for each in documents if each["kind"] == "ConfigMap"]
    assert f"{IN_POD}/client_key_file" in told["_service.certificate.json"]
    with pytest.raises(RenderError, match=r"^service\.tls: "):
        k8s.envoy_gateway(known, k8s.Target(extension_policy=True))
