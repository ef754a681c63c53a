"""Objects for Envoy Gateway: what its CRDs take, what its patches change, and what Envoy says to the result."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from extproc.cli import app
from extproc.render import k8s
from extproc.render.envoy import RenderError, validate
from extproc.render.parts import parts
from extproc.settings import Settings, load, parse
from tests.render import eg_model
from tests.render.eg_model import LISTENER, ROUTES, Data, NotAppliedError

SCHEMAS = yaml.safe_load((Path(__file__).parent / "eg_schemas.yaml").read_text("utf-8"))
API = {
    "Gateway": "gateway.networking.k8s.io/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "ReferenceGrant": "gateway.networking.k8s.io/v1beta1",
}
SERVICES = {"tidegate:10000": 10000, "tidegate-headless:10003": 10003}
NAME = "tidegate/tidegate/http"
FORMS = [k8s.Target(), k8s.Target(extension_policy=True)]
PROFILES = ["native", "classic"]


@pytest.fixture(autouse=True)
def _the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody overrides it, and there is no config beside the command."""
    for name in [name for name in os.environ if name.startswith("TIDEGATE")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def default(profile: str = "native") -> Settings:
    """The built-in demo's settings."""
    return load(None, {"TIDEGATE__GATEWAY__PROFILE": profile})


def demo(target: k8s.Target | None = None, profile: str = "native") -> list[Data]:
    """The objects for the demo, whose providers run in Tidegate's pod."""
    settings = default(profile)
    return k8s.envoy_gateway(settings, target, dict.fromkeys(settings.upstreams, ()))


def with_files(**more: Any) -> Settings:
    """Settings with keys, certificates and a key set."""
    limits = {"limits": [{"tpm": 1000}]}
    raw = {
        "identity": {"tenant": ["jwt:team"], "jwt": {"jwks_file": "/home/jwks.json"}},
        "upstreams": {
            "openai": {"provider": "openai", "key_file": "/home/openai", **limits},
            "OpenAI": {"provider": "openai", "key_file": "/home/other", **limits},
            "own": {"provider": "vllm", "url": "https://vllm:8443", "ca_file": "/home/ca", "owned": True, **limits},
        },
        "routes": [{"models": ["m"], "chain": ["openai", "OpenAI", "own"]}],
        **more,
    }
    return parse(yaml.safe_dump(raw), "file", {})


def accepted(documents: list[Data]) -> None:
    """By what the CRDs say of each kind."""
    metadata = SCHEMAS["x-common"]["metadata"]
    for each in documents:
        if each["kind"] == "ConfigMap":
            continue
        assert each["apiVersion"] == API.get(each["kind"], "gateway.envoyproxy.io/v1alpha1")
        jsonschema.validate(each["metadata"], metadata)
        jsonschema.validate(each["spec"], SCHEMAS[each["kind"]])


def the(documents: list[Data], kind: str, name: str = "tidegate") -> Data:
    """The spec of an object."""
    (found,) = [each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return dict(found["spec"])


# ------------------------------------------------------------------------------------------- the objects


@pytest.mark.parametrize("target", [*FORMS, k8s.Target("ns", "gw", "web", "llm.example.com", existing=True)])
@pytest.mark.parametrize("profile", PROFILES)
def test_all_of_it_is_what_the_crds_take(target: k8s.Target, profile: str) -> None:
    accepted(demo(target, profile))
    accepted(k8s.envoy_gateway(with_files(gateway={"profile": profile, "idle_timeout_s": 900.5}), target))


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        ("ClientTrafficPolicy", ("path", "escapedSlashesAction"), "Reject"),
        ("ClientTrafficPolicy", ("timeout", "http", "requestReceivedTimeout"), "0.5s"),
        ("ClientTrafficPolicy", ("connection", "bufferLimits"), "1"),
        ("BackendTrafficPolicy", ("circuitBreaker", "maxRequests"), 1),
        ("BackendTrafficPolicy", ("loadBalancer", "type"), "LEAST_REQUEST"),
        ("EnvoyExtensionPolicy", ("extProc", 0, "maxMessageTimeout"), "5s"),
        ("EnvoyExtensionPolicy", ("extProc", 0, "processingMode", "request", "body"), "BUFFERED"),
        ("EnvoyExtensionPolicy", ("extProc", 0, "metadata", "writableNamespaces"), ["envoy.filters.http.lua"]),
        ("EnvoyPatchPolicy", ("jsonPatches", 0, "type"), "envoy.config.listener.v3.Listener"),
        ("EnvoyPatchPolicy", ("jsonPatches", 0, "operation", "op"), "merge"),
        ("EnvoyPatchPolicy", ("jsonPatches", 0, "operation", "jsonpath"), "$"),
        ("EnvoyProxy", ("filterOrder", 0, "after"), "envoy.filters.http.router"),
    ],
)
def test_the_schemas_would_tell(kind: str, place: tuple[Any, ...], value: Any) -> None:
    """Fields that are not there, and words that are none."""
    wrong = copy.deepcopy(next(each for each in demo(FORMS[1]) if each["kind"] == kind))
    inner = wrong["spec"]
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        accepted([wrong])


def test_attached_to_what_is_there() -> None:
    """To a Gateway of somebody else's, one listener, one host name."""
    target = k8s.Target("ns", "gw", "web", "llm.example.com", existing=True)
    documents = demo(target)
    assert not [each for each in documents if each["kind"] == "Gateway"]
    assert {each["metadata"]["namespace"] for each in documents if each["kind"] != "ReferenceGrant"} == {"ns"}
    route = the(documents, "HTTPRoute")
    assert route["parentRefs"] == [{"name": "gw", "sectionName": "web"}]
    assert route["hostnames"] == ["llm.example.com"]
    for each in eg_model.of_kind(documents, "EnvoyPatchPolicy"):
        assert each["spec"]["targetRef"]["name"] == "gw"
        for patch in each["spec"]["jsonPatches"]:
            whole = patch["operation"].get("path") == ""
            assert whole or patch["name"] == "ns/gw/web"
    (text,) = {p["operation"]["jsonPath"] for p in the(documents, "EnvoyPatchPolicy", "tidegate-routes")["jsonPatches"]}
    assert "'llm.example.com'" in text


def test_tidegate_may_be_in_another_namespace() -> None:
    """Which allows that it is referred to; its own needs no leave."""
    target = k8s.Target("ns", existing=True, extension_policy=True)
    documents = demo(target)
    (grant,) = [each for each in documents if each["kind"] == "ReferenceGrant"]
    assert grant["metadata"]["namespace"] == "tidegate"
    allowed = {(each["kind"], each["namespace"]) for each in grant["spec"]["from"]}
    assert allowed == {("HTTPRoute", "ns"), ("EnvoyExtensionPolicy", "ns")}
    (rule,) = the(documents, "HTTPRoute")["rules"]
    (asked,) = the(documents, "EnvoyExtensionPolicy")["extProc"]
    assert [each["namespace"] for each in (*rule["backendRefs"], *asked["backendRefs"])] == ["tidegate", "tidegate"]
    assert "tidegate-headless.tidegate.svc" in json.dumps(documents)
    beside = demo(k8s.Target("ns", tidegate="ns"))
    assert not [each for each in beside if each["kind"] == "ReferenceGrant"]
    assert "tidegate-headless.ns.svc" in json.dumps(beside)


def test_the_knobs_say_what_the_settings_say() -> None:
    """Those of callers, and of the way to Tidegate's own Envoy."""
    settings = with_files(gateway={"max_body_bytes": 2_000_000, "max_answer_bytes": 3_000_000, "idle_timeout_s": 177.5})
    documents = k8s.envoy_gateway(settings)
    callers, backend = the(documents, "ClientTrafficPolicy"), the(documents, "BackendTrafficPolicy")
    assert callers["connection"] == {"bufferLimit": "2000000"}
    assert callers["timeout"]["http"] == {"requestReceivedTimeout": "120s", "streamIdleTimeout": "177s500ms"}
    assert backend["connection"] == {"bufferLimit": "3000000"}
    assert backend["retry"] == {"numRetries": 0}
    assert backend["timeout"]["http"]["requestTimeout"] == "0s"


def test_files_are_mounted_where_envoy_looks_for_them() -> None:
    """In Envoy Gateway's Envoys, whose namespace has the Secret and what says where each key is."""
    documents = k8s.envoy_gateway(with_files())
    deployment = the(documents, "EnvoyProxy")["provider"]["kubernetes"]["envoyDeployment"]
    mounts = {each["name"]: each["mountPath"] for each in deployment["container"]["volumeMounts"]}
    (files,) = [each for each in documents if each["kind"] == "ConfigMap"]
    assert files["metadata"] == {"name": "tidegate-sds", "namespace": "envoy-gateway-system"}
    text = json.dumps(eg_model.of_kind(documents, "EnvoyPatchPolicy"))
    for name in ("openai", "OpenAI"):
        assert f"{mounts['tidegate-files']}/{name}.key" in files["data"][f"{name}.json"]
        assert f"{mounts['tidegate-sds']}/{name}.json" in text
    for file in ("own.ca", "jwks.json"):
        assert f"{mounts['tidegate-files']}/{file}" in text + str(files["data"])
    assert "/home" not in json.dumps(documents)
    assert deployment["pod"]["labels"] == {"tidegate/envoy": "true"}


def test_every_object_has_a_name_of_its_own() -> None:
    """Upstreams may differ in case only."""
    documents = k8s.envoy_gateway(with_files(), k8s.Target(extension_policy=True))
    names = [(each["kind"], each["metadata"]["name"]) for each in documents]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"service": {"replicas": 2}}, "service.replicas"),
        ({"service": {"address": "unix:/run/tidegate"}}, "service.address"),
    ],
)
def test_what_cannot_work_there_is_refused(changed: Data, said: str) -> None:
    with pytest.raises(RenderError, match=said):
        k8s.envoy_gateway(with_files(**changed))


def test_an_upstream_on_the_loopback_is_nobodys() -> None:
    """Each Envoy would ask itself. The demo's providers are in Tidegate's pod, which has a name."""
    with pytest.raises(RenderError, match=r"upstreams\.primary\.url: 127\.0\.0\.1"):
        k8s.envoy_gateway(default())
    assert "tidegate-headless.tidegate.svc.cluster.local" in json.dumps(
        the(demo(), "EnvoyPatchPolicy", "tidegate-cluster-primary")
    )


# ------------------------------------------------------------------------------------------ what they do


def generated(documents: list[Data]) -> eg_model.Xds:
    return eg_model.generate(documents, SERVICES)


def patched(documents: list[Data]) -> eg_model.Xds:
    return eg_model.patched(generated(documents), eg_model.of_kind(documents, "EnvoyPatchPolicy"))


def manager(made: eg_model.Xds) -> Data:
    (item,) = made.found[LISTENER][NAME]["default_filter_chain"]["filters"]
    return dict(item["typed_config"])


@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize("profile", PROFILES)
def test_envoy_takes_the_result(target: k8s.Target, profile: str) -> None:
    """With patches, and without."""
    documents = demo(target, profile)
    for made in (generated(documents), patched(documents)):
        validate(yaml.safe_dump(eg_model.bootstrap(made, 10080, 19000)))


@pytest.mark.parametrize("target", FORMS)
def test_filters_stand_before_the_router_in_their_order(target: k8s.Target) -> None:
    """Ours and nobody else's, all of them disabled but for routes that switch them on."""
    settings = default()
    made = manager(patched(demo(target)))
    names = [each["name"] for each in made["http_filters"]]
    ours = [each["name"] for each in parts(settings).http_filters]
    if target.extension_policy:
        ours[-1] = "envoy.filters.http.ext_proc/envoyextensionpolicy/tidegate/tidegate/extproc/0"
    assert names == [*ours, "envoy.filters.http.router"]
    assert all(each["disabled"] for each in made["http_filters"][:-1])
    assert [each["name"] for each in made["access_log"]] == ["envoy.access_loggers.file", "tidegate.outcomes"]
    assert len(made["http_filters"][-1]["typed_config"]["upstream_log"]) == 1


def test_a_filter_that_a_policy_made_becomes_as_ours() -> None:
    """In each field; the policy has said some, patches the others."""
    (whole,) = [each for each in manager(patched(demo()))["http_filters"] if each["name"] == "tidegate.admission"]
    completed = manager(patched(demo(FORMS[1])))["http_filters"][-2]["typed_config"]
    spaces = completed["metadata_options"]
    assert spaces.pop("forwarding_namespaces") == {"untyped": []}
    assert completed == {**whole["typed_config"], "message_timeout": "2s"}


@pytest.mark.parametrize("target", FORMS)
def test_routes_come_before_those_that_are_there(target: k8s.Target) -> None:
    """In their order; each switches on filters that there are."""
    made = patched(demo(target))
    (host,) = made.found[ROUTES][NAME]["virtual_hosts"]
    (before,) = generated(demo(target)).found[ROUTES][NAME]["virtual_hosts"]
    settings = k8s.envoy_gateway_settings(default(), target, dict.fromkeys(default().upstreams, ()))
    ours = [route["name"] for route in parts(settings).routes]
    assert [route["name"] for route in host["routes"]] == [*ours, *(route["name"] for route in before["routes"])]
    there = {each["name"] for each in manager(made)["http_filters"]}
    assert all(set(route["typed_per_filter_config"]) <= there for route in host["routes"])


def test_only_the_host_that_is_meant_gets_routes() -> None:
    """Others on the same listener are as they were."""
    documents = demo(k8s.Target(hostname="llm.example.com"))
    app = copy.deepcopy(next(each for each in documents if each["kind"] == "HTTPRoute"))
    app["metadata"]["name"], app["spec"]["hostnames"] = "app", ["app.example.com"]
    made = patched([*documents, app])
    counts = {host["domains"][0]: len(host["routes"]) for host in made.found[ROUTES][NAME]["virtual_hosts"]}
    assert counts["app.example.com"] < counts["llm.example.com"]
    assert "tidegate." not in json.dumps(
        [host for host in made.found[ROUTES][NAME]["virtual_hosts"] if host["domains"] == ["app.example.com"]]
    )


def test_patches_for_another_gateway_are_told_of() -> None:
    """Where names are not as rendered, Envoy Gateway finds nothing to patch; the model is as strict."""
    documents = demo()
    other = eg_model.of_kind(demo(k8s.Target(listener="other")), "EnvoyPatchPolicy")
    with pytest.raises(NotAppliedError, match="unable to find"):
        eg_model.patched(generated(documents), other)
    with pytest.raises(NotAppliedError, match="is there already"):
        eg_model.patched(patched(documents), eg_model.of_kind(documents, "EnvoyPatchPolicy")[2:])


@pytest.mark.parametrize("refused", ["tidegate-listener", "tidegate-routes", "tidegate-cluster-primary"])
def test_envoy_takes_what_is_left_when_a_policy_is_refused(refused: str) -> None:
    """Without filters nobody has a ticket, so routes refuse; without routes Tidegate's own Envoy is asked."""
    documents = demo()
    policies = eg_model.of_kind(documents, "EnvoyPatchPolicy")
    taken = [each for each in policies if each["metadata"]["name"] != refused]
    assert len(taken) == len(policies) - 1
    made = eg_model.patched(generated(documents), taken)
    validate(yaml.safe_dump(eg_model.bootstrap(made, 10080, 19000)))


def test_probes_listen_in_tidegates_pod_only() -> None:
    """Whoever reaches that listener could spend the keys; Envoy Gateway's Envoys have no use for it."""
    assert "tidegate.probe" not in json.dumps(demo())


def test_fifty_upstreams_fit_into_what_kubernetes_takes() -> None:
    """Each object on its own."""
    upstreams = {f"u{i}": {"provider": "openai", "limits": [{"tpm": 1000}]} for i in range(50)}
    routes = [{"models": [f"m{i}"], "chain": [f"u{i}", f"u{(i + 1) % 50}"]} for i in range(50)]
    raw = {"upstreams": upstreams, "routes": [{**route, "acknowledge_unowned": True} for route in routes]}
    documents = k8s.envoy_gateway(parse(yaml.safe_dump(raw), "file", {}))
    assert max(len(json.dumps(each)) for each in documents) < 1_000_000


# ------------------------------------------------------------------------------------------- the command


def printed(*words: str) -> str:
    done = CliRunner().invoke(app, ["render", "envoy-gateway", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_prints_what_is_to_be_applied(tmp_path: Path) -> None:
    """Begun by what has to be known; options say where."""
    text = printed()
    assert list(yaml.safe_load_all(text)) == demo()
    assert text.startswith("# Rendered by Tidegate")
    assert "enableEnvoyPatchPolicy: true" in text
    told = printed("--gateway", "edge", "--namespace", "llm", "--listener", "web", "--xds-listener", "tcp-80",
                   "--xds-routes", "http-80", "--extension-policy")  # fmt: skip
    documents = list(yaml.safe_load_all(told))
    assert [each["kind"] for each in documents if each["kind"].startswith("Gateway")] == []
    assert "is there already" in told
    assert len(eg_model.of_kind(documents, "EnvoyExtensionPolicy")) == 1
    names = {
        each["metadata"]["name"]: each["spec"]["jsonPatches"][0]["name"]
        for each in eg_model.of_kind(documents, "EnvoyPatchPolicy")
    }
    assert (names["tidegate-listener"], names["tidegate-routes"]) == ("tcp-80", "http-80")
    config = tmp_path / "tidegate.yaml"
    config.write_text(yaml.safe_dump(with_files().model_dump(mode="json", exclude_unset=True)), "utf-8")
    assert "--namespace envs --from-file" in printed("--config", str(config), "--system", "envs").replace(
        " \\\n#    ", ""
    )


def test_the_k8s_command_has_a_second_name() -> None:
    runs = [CliRunner().invoke(app, words) for words in (["k8s"], ["render", "k8s"])]
    assert [run.exit_code for run in runs] == [0, 0]
    assert runs[0].stdout == runs[1].stdout
