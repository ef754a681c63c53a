"""Envoy's own tracing: what is rendered for a collector, that Envoy takes it, and who is told of traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa import luajit21

from extproc.render import k8s
from extproc.render.envoy import bootstrap, to_yaml, validate
from extproc.render.existing import dump, load
from extproc.render.lua import headers_script
from extproc.render.merge import HEADER, merge
from extproc.render.mesh import for_istio
from extproc.render.tracing import COLLECTOR, TRACE_HEADERS, collector_clusters
from extproc.settings import Settings, parse
from tests.render.rig import Data, manager_of

FOLDER = Path(__file__).parent / "existing"
COLLECTORS = {
    "http": {"endpoint": "http://10.0.0.9:4318"},
    "https": {"endpoint": "https://otlp.example.com/base/"},
    "name": {"endpoint": "http://collector.observability:4318", "headers_file": '/run/it\'s \\ "one".txt'},
}


def settings(otlp: dict[str, Any] | None, profile: str = "native", **telemetry: Any) -> Settings:
    """A provider and an engine of our own."""
    raw = {
        "gateway": {"profile": profile},
        "upstreams": {
            "openai": {"provider": "openai", "limits": [{"tpm": 1000}]},
            "vllm": {"provider": "vllm", "url": "http://vllm:8000", "owned": True, "concurrency": 8},
        },
        "routes": [{"models": ["m"], "chain": ["openai", "vllm"]}],
        "telemetry": {"otlp": otlp, **telemetry},
    }
    return parse(yaml.safe_dump(raw), "test", {})


def cluster(config: Data, name: str = COLLECTOR) -> Data:
    (found,) = [one for one in config["static_resources"]["clusters"] if one["name"] == name]
    return dict(found)


@pytest.mark.parametrize("profile", ["native", "classic"])
@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_real_envoy_takes_it(kind: str, profile: str) -> None:
    """Whatever the collector's address, and with whatever in the name of a file."""
    validate(to_yaml(bootstrap(settings(COLLECTORS[kind], profile))))


@pytest.mark.parametrize("profile", ["native", "classic"])
@pytest.mark.parametrize("otlp", [None, {**COLLECTORS["name"], "traces": False}])
def test_without_traces_nothing_is_rendered(otlp: dict[str, Any] | None, profile: str) -> None:
    """Nor is anything taken from requests."""
    text = to_yaml(bootstrap(settings(otlp, profile)))
    assert not any(word in text for word in ("tracing", COLLECTOR, *TRACE_HEADERS))


@pytest.mark.parametrize("profile", ["native", "classic"])
def test_no_query_is_told(profile: str) -> None:
    """Some callers have their key there. Older Envoys cannot leave it out without the path."""
    told = manager_of(bootstrap(settings(COLLECTORS["https"], profile)))["tracing"]
    if profile == "classic":
        assert told["max_path_tag_length"] == 0
        assert "custom_tags" not in told
    else:
        (tag,) = told["custom_tags"]
        assert tag["tag"] == "http.url"
        assert "%PATH(NQ:" in tag["value"]


def test_the_callers_decision_is_kept_and_of_the_rest_a_share() -> None:
    """The listener's own sampling lets all pass, for what it drops is dropped whatever the sampler says."""
    told = manager_of(bootstrap(settings(COLLECTORS["https"], trace_sample=0.0123)))["tracing"]
    assert (told["random_sampling"], told["spawn_upstream_span"]) == ({"value": 100}, True)
    tracer = told["provider"]["typed_config"]
    assert tracer["http_service"]["http_uri"]["uri"] == "https://otlp.example.com/base/v1/traces"
    sampler = tracer["sampler"]["typed_config"]
    assert sampler["@type"].endswith("ParentBasedSamplerConfig")
    share = sampler["wrapped_sampler"]["typed_config"]["sampling_percentage"]
    assert share == {"numerator": 12_300, "denominator": "MILLION"}


def test_the_collector_is_looked_up_and_trusted_as_its_address_says() -> None:
    """TLS where it is https, with the name proven; Envoy's start waits for no name."""
    plain, secure, named = (cluster(bootstrap(settings(otlp))) for otlp in COLLECTORS.values())
    assert (plain["type"], "transport_socket" in plain) == ("STATIC", False)
    assert (secure["type"], secure["wait_for_warm_on_init"]) == ("STRICT_DNS", False)
    context = secure["transport_socket"]["typed_config"]
    assert context["sni"] == "otlp.example.com"
    assert "trusted_ca" in context["common_tls_context"]["validation_context"]
    where = secure["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
    assert where == {"address": "otlp.example.com", "port_value": 443}
    assert "http_filters" in json.dumps(named)
    assert "http_filters" not in json.dumps(plain)


@pytest.mark.parametrize("profile", ["native", "classic"])
def test_providers_see_nothing_of_our_traces_and_engines_of_ours_do(profile: str) -> None:
    """Whatever stands in them is no affair of a third party."""
    config = bootstrap(settings(COLLECTORS["http"], profile))
    if profile == "native":
        ways = {name: json.dumps(cluster(config, name)) for name in ("openai", "vllm")}
    else:
        gates = {one["name"]: json.dumps(one) for one in config["static_resources"]["listeners"]}
        ways = {name: gates[f"tidegate.gate.{name}"] for name in ("openai", "vllm")}
        assert not any('"tracing"' in way for way in gates.values() if "tidegate.gate" in way)
    for header in TRACE_HEADERS:
        assert json.dumps({"remove": header}) in ways["openai"]
        assert header not in ways["vllm"]


@pytest.mark.parametrize(
    ("text", "headers"),
    [
        (
            "Authorization: Bearer a:b \r\n\n  X-Key :v\nno header\n: none\n",
            {"authorization": "Bearer a:b", "x-key": "v"},
        ),
        ("", {}),
        (None, {}),
    ],
)
def test_headers_come_from_the_file_whenever_something_is_sent(
    tmp_path: Path, text: str | None, headers: dict[str, str]
) -> None:
    """As they stand there by then; without the file it goes without them."""
    file = tmp_path / 'it\'s "one" \\ é'
    lua = luajit21.LuaRuntime()
    lua.execute(headers_script(str(file)))
    lua.execute(
        "sent = {} local h = {} function h:replace(n, v) sent[n] = v end "
        "local r = {} function r:headers() return h end function run() sent = {} envoy_on_request(r) return sent end"
    )
    assert dict(lua.globals().run()) == {}
    if text is not None:
        file.write_text(text, "utf-8")
    assert dict(lua.globals().run()) == headers


# ------------------------------------------------------------------------------------------ among others


def _merged(text: str, told: Settings) -> tuple[Data, str, str]:
    result = merge(load(text, "envoy.yaml"), told)
    written = dump(result.config, HEADER)
    return yaml.safe_load(written), "\n".join(result.notes), written


def test_merge_adds_tracing_and_takes_it_out_again() -> None:
    """It holds for all routes of the listener, which is said. Merging again changes nothing."""
    plain, told = (FOLDER / "plain.yaml").read_text(), settings(COLLECTORS["name"])
    config, notes, text = _merged(plain, told)
    assert manager_of(config)["tracing"] == manager_of(bootstrap(told))["tracing"]
    assert [one["name"] for one in config["static_resources"]["clusters"]].count(COLLECTOR) == 1
    assert "all of its routes are traced now" in notes
    assert _merged(text, told)[2] == text
    without = _merged(text, settings(None))[0]
    assert without == _merged(plain, settings(None))[0]
    assert COLLECTOR not in json.dumps(without)


def test_tracing_that_is_there_stays_as_it_is() -> None:
    """Also where Tidegate is merged in again, with or without a collector."""
    own = (
        "tracing: {provider: {name: envoy.tracers.zipkin, typed_config: {'@type': "
        "type.googleapis.com/envoy.config.trace.v3.ZipkinConfig, collector_cluster: zipkin, "
        "collector_endpoint: /api/v2/spans}}}"
    )
    plain = (FOLDER / "plain.yaml").read_text()
    at = plain.index("stat_prefix:")
    indent = " " * (at - plain.rindex("\n", 0, at) - 1)
    text = f"{plain[:at]}{own}\n{indent}{plain[at:]}"
    config, notes, written = _merged(text, settings(COLLECTORS["name"]))
    assert manager_of(config)["tracing"] == yaml.safe_load(own)["tracing"]
    assert "its tracing stays as it is" in notes
    assert manager_of(_merged(written, settings(None))[0])["tracing"] == yaml.safe_load(own)["tracing"]


def test_meshes_are_left_to_their_own_tracing() -> None:
    """Their Envoys get no collector from us; providers see none of their traces all the same."""
    told = settings(COLLECTORS["name"])
    gateway = json.dumps(k8s.envoy_gateway(told))
    patches = for_istio(told, gateway=True, namespace="mesh", labels=["app=ingress"], host="llm.example.com:80")
    for text in (gateway, patches):
        assert COLLECTOR not in text
        assert "traceparent" in text


def test_a_pod_has_the_headers_for_both_and_may_reach_the_collector() -> None:
    """Tidegate and Envoy send by themselves."""
    documents = k8s.objects(settings(COLLECTORS["name"]))
    (deployment,) = [one for one in documents if one["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    containers = [*pod["containers"], *pod["initContainers"]]
    mounted = {one["name"]: {each["mountPath"] for each in one["volumeMounts"]} for one in containers}
    assert all("/etc/tidegate/collector" in mounted[name] for name in ("tidegate", "envoy"))
    (config,) = [one for one in documents if one["kind"] == "ConfigMap"]
    there = parse(config["data"]["tidegate.yaml"], "there", {})
    assert there.telemetry.otlp is not None
    assert there.telemetry.otlp.headers_file == "/etc/tidegate/collector/headers"
    assert "/etc/tidegate/collector/headers" in config["data"]["envoy.yaml"]
    (policy,) = [one for one in documents if one["kind"] == "NetworkPolicy"]
    assert 4318 in [port["port"] for port in policy["spec"]["egress"][0]["ports"]]
    secret = [volume["secret"] for volume in pod["volumes"] if "collector" in volume["name"]]
    assert secret == [{"secretName": "tidegate-files", "items": [{"key": "_collector.headers", "path": "headers"}]}]


def test_no_collector_no_cluster() -> None:
    assert collector_clusters(settings(None)) == []
