"""EnvoyFilters: what Istio would take, where its rules put the parts, and that Envoy accepts what comes out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import certifi
import pytest
import yaml
from typer.testing import CliRunner

from extproc.cli import app
from extproc.render import istio, k8s
from extproc.render.envoy import RenderError, validate
from extproc.render.existing import dump
from extproc.render.existing import load as load_existing
from extproc.render.merge import merge
from extproc.render.mesh import for_istio
from extproc.render.parts import parts
from extproc.settings import Settings, parse
from tests.render.istio_schema import problems
from tests.render.istiod import MANAGER, ROOT, Data, Proxy, merged, patched

HERE = Path(__file__).parent
K8S = HERE.parents[1] / "k8s"
RUN = CliRunner()
OPTIONS: dict[str, Any] = {"namespace": "apps", "labels": ["app=chat"]}
GATEWAY: dict[str, Any] = {**OPTIONS, "gateway": True, "host": "llm.example.com:80"}
SIDECAR: dict[str, Any] = {**OPTIONS, "gateway": False}
OWN = "tidegate.tidegate.svc.cluster.local:10000"
HEADLESS = "tidegate-headless.tidegate.svc.cluster.local"
CASES = {"gateway": (GATEWAY, "llm.example.com:80"), "sidecar": (SIDECAR, OWN)}
CHAT = {"app": "chat", "version": "2"}


def settings_of(**changes: Any) -> Settings:
    """Two upstreams that every pod can reach; `changes` in place of sections."""
    raw: dict[str, Any] = {
        "upstreams": {
            "vendor": {"provider": "compatible", "url": "https://llm.example.org", "limits": [{"tpm": 1_000_000}]},
            "own": {"provider": "vllm", "url": "http://vllm.ml:8000", "owned": True, "concurrency": 8},
        },
        "routes": [{"models": ["m"], "chain": ["vendor", "own"]}],
        **changes,
    }
    return parse(yaml.safe_dump(raw), "test", {})


def rendered(options: Data, settings: Settings | None = None, **more: Any) -> list[Data]:
    """The objects, each of them one that Istio takes."""
    documents = list(yaml.safe_load_all(for_istio(settings or settings_of(), **{**options, **more})))
    for each in documents:
        assert each["kind"] == "ConfigMap" or problems(each) == []
    return documents


def filters_of(documents: list[Data]) -> list[Data]:
    return [each for each in documents if each["kind"] == "EnvoyFilter"]


def mesh(kind: str) -> Data:
    """A bootstrap like istiod's."""
    return dict(yaml.safe_load((HERE / "meshes" / f"{kind}.yaml").read_text("utf-8")))


def proxy(kind: str, **changes: Any) -> Proxy:
    return Proxy(**{"namespace": "apps", "labels": CHAT, "gateway": kind == "gateway", **changes})


def manager_of(config: Data, port: int) -> Data:
    (found,) = [
        chain["filters"][0]["typed_config"]
        for listener in config["static_resources"]["listeners"]
        for chain in listener["filter_chains"]
        if listener["address"]["socket_address"]["port_value"] == port
    ]
    return dict(found)


def hosts_of(manager: Data) -> dict[str, list[Data]]:
    return {host["name"]: host["routes"] for host in manager["route_config"]["virtual_hosts"]}


PORTS = {"gateway": 8080, "sidecar": 10000}


# ------------------------------------------------------------------------------------ what Istio says of it


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("applyTo",), "HTTP_FILTERS"),
        (("match", "context"), "SIDECAR"),
        (("match", "listener", "port"), 80),
        (("match", "listener", "filterChain", "filter", "subFilter", "name"), ""),
        (("match", "cluster"), {"name": "x"}),
        (("patch", "operation"), "INSERT"),
        (("patch", "values"), {}),
        (("patch", "value", "typed_config", "@type"), "envoy.Lua"),
    ],
)
def test_the_schema_would_tell(path: tuple[str, ...], value: Any) -> None:
    """A wrong word, a field that is none, a match that does not belong there."""
    (found,) = [each for each in filters_of(rendered(GATEWAY)) if each["metadata"]["name"] == "tidegate"]
    place = next(p for p in found["spec"]["configPatches"] if p["applyTo"] == "HTTP_FILTER")
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert problems(found)


def test_the_schema_would_tell_of_a_time_that_istio_refuses() -> None:
    service = istio.virtual_service(OWN, None, OWN)
    assert problems(service) == []
    assert problems({**service, "apiVersion": "v1"})
    service["spec"]["http"][0]["timeout"] = "0s"
    assert problems(service) == ["duration must be greater than 1ms"]


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize(
    "more", [{}, {"alone": True}, {"proxy_version": r"^1\.3[1-9]"}, {"service": "127.0.0.1:10003"}]
)
@pytest.mark.parametrize("profile", ["native", "classic"])
def test_istio_takes_what_is_rendered(kind: str, more: Data, profile: str) -> None:
    """And every patch finds its place in a proxy as it should be; the classic profile's gates are there, too."""
    settings = settings_of(gateway={"profile": profile})
    done = patched(mesh(kind), filters_of(rendered(CASES[kind][0], settings, **more)), proxy(kind))
    assert done.idle == []
    added = [each["name"] for each in done.config["static_resources"]["listeners"] if "tidegate." in each["name"]]
    gates = [f"tidegate.gate.{name}" for name in settings.upstreams] if profile == "classic" else []
    assert added == [*(["tidegate.probe"] if "service" in more else []), *gates]


# -------------------------------------------------------------------------------------------- istiod's rules


def test_merging_appends_lists_and_replaces_the_rest() -> None:
    there = {"a": [1], "b": {"c": "1s", "d": 2}, "filter_metadata": {"x": {"y": 1}, "z": {}}}
    change = {"a": [2], "b": {"c": "0s"}, "filter_metadata": {"x": {"w": 1}}}
    assert merged(there, change) == {
        "a": [1, 2], "b": {"c": "0s", "d": 2}, "filter_metadata": {"x": {"w": 1}, "z": {}},
    }  # fmt: skip
    with pytest.raises(AssertionError, match="may be nothing"):
        merged({"merge_slashes": True}, {"merge_slashes": False})


def one_patch(apply_to: str, operation: str, value: Data | None = None, **match: Any) -> Data:
    patch = {"operation": operation, **({} if value is None else {"value": value})}
    spec = {"configPatches": [{"applyTo": apply_to, "match": match, "patch": patch}]}
    return {"metadata": {"name": "x", "namespace": ROOT}, "spec": spec}


def named(sub: str | None) -> Data:
    return {"filterChain": {"filter": {"name": MANAGER, **({"subFilter": {"name": sub}} if sub else {})}}}


@pytest.mark.parametrize(
    ("operation", "sub", "expected"),
    [
        ("ADD", None, ["rbac", "grpc_stats", "fault", "cors", "router", "new"]),
        ("INSERT_FIRST", "router", ["new", "rbac", "grpc_stats", "fault", "cors", "router"]),
        ("INSERT_BEFORE", "router", ["rbac", "grpc_stats", "fault", "cors", "new", "router"]),
        ("INSERT_BEFORE", None, ["new", "rbac", "grpc_stats", "fault", "cors", "router"]),
        ("INSERT_BEFORE", "none", ["rbac", "grpc_stats", "fault", "cors", "router"]),
        ("INSERT_AFTER", "fault", ["rbac", "grpc_stats", "fault", "new", "cors", "router"]),
        ("INSERT_AFTER", None, ["rbac", "grpc_stats", "fault", "cors", "router", "new"]),
        ("REPLACE", "cors", ["rbac", "grpc_stats", "fault", "new", "router"]),
        ("REPLACE", None, ["rbac", "grpc_stats", "fault", "cors", "router"]),
        ("REMOVE", "cors", ["rbac", "grpc_stats", "fault", "router"]),
    ],
)
def test_where_a_filter_goes(operation: str, sub: str | None, expected: list[str]) -> None:
    name = sub and f"envoy.filters.http.{sub}"
    patch = one_patch("HTTP_FILTER", operation, {"name": "envoy.filters.http.new"}, listener=named(name))
    found = manager_of(patched(mesh("gateway"), [patch], proxy("gateway")).config, 8080)["http_filters"]
    assert [item["name"].removeprefix("envoy.filters.http.") for item in found] == expected


@pytest.mark.parametrize(
    ("operation", "route", "expected"),
    [
        ("ADD", None, ["default", "new"]),
        ("MERGE", "default", ["default"]),
        ("INSERT_FIRST", None, ["new", "default"]),
        ("INSERT_FIRST", "none", ["default"]),
        ("INSERT_BEFORE", "default", ["new", "default"]),
        ("INSERT_AFTER", "default", ["default", "new"]),
        ("REMOVE", "default", []),
    ],
)
def test_where_a_route_goes(operation: str, route: str | None, expected: list[str]) -> None:
    vhost = {"name": OWN, **({"route": {"name": route}} if route else {})}
    value = {"decorator": {"propagate": True}} if operation == "MERGE" else {"name": "new"}
    patch = one_patch("HTTP_ROUTE", operation, value, context="SIDECAR_OUTBOUND", routeConfiguration={"vhost": vhost})
    hosts = hosts_of(manager_of(patched(mesh("sidecar"), [patch], proxy("sidecar")).config, 10000))
    assert [each["name"] for each in hosts[OWN]] == expected
    assert [len(routes) for name, routes in hosts.items() if name != OWN] == [1, 1]
    if operation == "MERGE":
        assert hosts[OWN][0]["decorator"] == {"operation": f"{OWN}/*", "propagate": True}


@pytest.mark.parametrize(
    "match",
    [
        {"context": "GATEWAY"},
        {"context": "SIDECAR_OUTBOUND", "listener": {"portNumber": 8000}},
        {"context": "SIDECAR_INBOUND", "listener": {"portNumber": 10000}},
        {"context": "SIDECAR_OUTBOUND", "listener": {"name": "virtualInbound"}},
        {"context": "SIDECAR_OUTBOUND", "proxy": {"proxyVersion": r"^1\.2\d"}},
    ],
)
def test_what_finds_nothing_is_left_out_without_a_word(match: Data) -> None:
    match["listener"] = {**match.get("listener", {}), **named("envoy.filters.http.router")}
    done = patched(
        mesh("sidecar"), [one_patch("HTTP_FILTER", "INSERT_BEFORE", {"name": "x"}, **match)], proxy("sidecar")
    )
    assert done.config == mesh("sidecar")
    assert bool(done.idle) is ("proxy" not in match)


def test_the_order_of_objects() -> None:
    """The root namespace first, then by priority."""
    filters = [one_patch("CLUSTER", "ADD", {"name": name}) for name in "abc"]
    filters[0]["metadata"]["namespace"] = "apps"
    filters[2]["spec"]["priority"] = -1
    found = patched(mesh("gateway"), filters, proxy("gateway")).config["static_resources"]["clusters"]
    assert [cluster["name"] for cluster in found[-3:]] == ["c", "b", "a"]


# ------------------------------------------------------------------------------------- what comes out of it


@pytest.mark.parametrize("kind", CASES)
def test_it_is_what_merge_would_make(kind: str) -> None:
    """Filters, routes, clusters, wording and logs are those of `tidegate merge`, in its places; the host's own routes
    stand behind, and the log that is there is none of ours to change.
    """
    options, host = CASES[kind]
    text = (HERE / "meshes" / f"{kind}.yaml").read_text("utf-8")
    settings = settings_of()
    listener = f"0.0.0.0_{PORTS[kind]}"
    expected = yaml.safe_load(dump(merge(load_existing(text, "mesh"), settings, listener, host).config, ""))
    documents = rendered(options, service=settings.service.address)
    found = patched(mesh(kind), filters_of(documents), proxy(kind)).config
    wanted, ours = manager_of(expected, PORTS[kind]), manager_of(found, PORTS[kind])
    names = [item["name"] for item in ours["http_filters"]]
    assert names == [item["name"] for item in wanted["http_filters"]]
    assert names[-1] == "envoy.filters.http.router"
    assert names[-2] == "tidegate.admission"
    upgrades = hosts_of(ours)[host].pop(0)
    assert upgrades["direct_response"] == {"status": 403}, "Istio's listeners take WebSockets"
    assert {name: [route.get("name") for route in routes] for name, routes in hosts_of(ours).items()} == {
        name: [route.get("name") for route in routes] for name, routes in hosts_of(wanted).items()
    }
    assert ours["local_reply_config"]["mappers"] == parts(settings).mappers
    assert [log["name"] for log in ours["access_log"]] == [log["name"] for log in wanted["access_log"]]
    assert "access_log_options" not in ours
    everything = found["static_resources"]
    assert [each["name"] for each in everything["clusters"]] == [
        each["name"] for each in expected["static_resources"]["clusters"]
    ]
    assert everything["listeners"][-1]["name"] == "tidegate.probe"


@pytest.mark.parametrize("kind", CASES)
def test_nothing_else_is_touched(kind: str) -> None:
    """Other hosts, other listeners and clusters are as they were; filters that they meet are disabled."""
    before, done = mesh(kind), patched(mesh(kind), filters_of(rendered(CASES[kind][0])), proxy(kind)).config
    was, now = manager_of(before, PORTS[kind]), manager_of(done, PORTS[kind])
    host = CASES[kind][1]
    own = hosts_of(was).pop(host)
    assert hosts_of(now)[host][-len(own) :] == own
    assert {name: routes for name, routes in hosts_of(now).items() if name != host} == {
        name: routes for name, routes in hosts_of(was).items() if name != host
    }
    added = [item for item in now["http_filters"] if item not in was["http_filters"]]
    assert [item["name"] for item in added if not item.get("disabled")] == ["envoy.filters.http.router"]
    changed = {key for key in now.keys() | was.keys() if now.get(key) != was.get(key)}
    assert changed == {"http_filters", "route_config", "access_log", "local_reply_config"}
    others = [each for each in before["static_resources"]["listeners"] if each["name"] != f"0.0.0.0_{PORTS[kind]}"]
    assert [each for each in done["static_resources"]["listeners"] if each in others] == others
    assert (
        done["static_resources"]["clusters"][: len(before["static_resources"]["clusters"])]
        == (before["static_resources"]["clusters"])
    )


def test_a_listener_of_llm_paths_alone_gets_its_times() -> None:
    now = manager_of(patched(mesh("gateway"), filters_of(rendered(GATEWAY, alone=True)), proxy("gateway")).config, 8080)
    assert now["stream_idle_timeout"] == "960s", "0s is replaced, not kept"
    assert (now["request_timeout"], now["delayed_close_timeout"]) == ("120s", "0s")
    assert now["access_log_options"] == {"access_log_flush_interval": "5s"}


@pytest.mark.parametrize(
    "other",
    [
        {"labels": {"app": "shop"}},
        {"labels": {}},
        {"namespace": "shops"},
        {"version": "1.28.0"},
        {"gateway": True},
    ],
)
def test_other_proxies_are_left_alone(other: Data) -> None:
    filters = filters_of(rendered(SIDECAR, proxy_version=r"^1\.(29|[3-9]\d)\."))
    assert patched(mesh("sidecar"), filters, proxy("sidecar", **other)).config == mesh("sidecar")


def test_in_the_root_namespace_it_is_for_the_labelled_pods_of_all() -> None:
    filters = filters_of(rendered(SIDECAR, namespace=ROOT))
    assert patched(mesh("sidecar"), filters, proxy("sidecar")).idle == []


def test_a_host_that_is_not_there_keeps_its_own_route() -> None:
    """Nothing of ours is switched on: what Istio leaves out cannot leave a request without admission half way."""
    done = patched(mesh("gateway"), filters_of(rendered({**GATEWAY, "host": "typo.example.com:80"})), proxy("gateway"))
    assert {patch["applyTo"] for patch in done.idle} == {"HTTP_ROUTE"}
    assert hosts_of(manager_of(done.config, 8080)) == hosts_of(manager_of(mesh("gateway"), 8080))


@pytest.mark.parametrize(("kind", "profile"), [("gateway", "native"), ("sidecar", "native"), ("gateway", "classic")])
def test_envoy_accepts_what_comes_out(kind: str, profile: str, tmp_path: Path) -> None:
    """With keys, CAs, TLS to Tidegate and verified tokens, mounted where the rendered text says."""
    files = {name: str(tmp_path / name) for name in ("key", "ca", "jwks")}
    for file in files.values():
        Path(file).write_text("x", "utf-8")
    settings = settings_of(
        upstreams={
            "vendor": {"provider": "openai", "key_file": files["key"], "limits": [{"tpm": 1_000_000, "rpm": 1000}]},
            "own": {
                "provider": "vllm",
                "url": "https://vllm.ml:8000",
                "ca_file": files["ca"],
                "owned": True,
                "concurrency": 8,
            },
        },
        identity={"tenant": ["jwt:team"], "jwt": {"jwks_file": files["jwks"]}},
        other_endpoints="vendor",
        gateway={"profile": profile},
        service={"tls": dict.fromkeys(("cert_file", "key_file", "ca_file"), files["ca"])},
    )
    documents = rendered(CASES[kind][0], settings, alone=kind == "gateway")
    done = patched(mesh(kind), filters_of(documents), proxy(kind))
    assert done.idle == []
    told = json.loads(documents[0]["data"]["vendor.json"])["resources"][0]["generic_secret"]["secret"]
    assert told == {"filename": "/etc/tidegate/files/vendor.key"}
    pod = tmp_path / "pod"
    (pod / "config" / "sds").mkdir(parents=True)
    (pod / "files").mkdir()
    (pod / "tls").mkdir()
    for name, text in documents[0]["data"].items():
        (pod / "config" / "sds" / name).write_text(text.replace("/etc/tidegate", str(pod)), "utf-8")
    authority = Path(certifi.where()).read_text("utf-8")
    keys = {"keys": [{"kty": "oct", "k": "c2VjcmV0", "alg": "HS256", "kid": "a"}]}
    mounted = {"vendor.key": "sk", "own.ca": authority, "jwks.json": json.dumps(keys)}
    (pod / "tls" / "ca_file").write_text(authority, "utf-8")
    for name, text in mounted.items():
        (pod / "files" / name).write_text(text, "utf-8")
    validate(yaml.safe_dump(done.config, sort_keys=False).replace("/etc/tidegate", str(pod)))


# --------------------------------------------------------------------------------- where Tidegate is, and keys


def test_tidegate_elsewhere_has_an_envoy_of_its_own_for_canaries() -> None:
    found = filters_of(rendered(SIDECAR))
    every = [patch for each in found for patch in each["spec"]["configPatches"]]
    assert "LISTENER" not in {patch["applyTo"] for patch in every}
    service = next(p["patch"]["value"] for p in every if p["patch"]["value"].get("name") == "tidegate:service")
    assert service["type"] == "STRICT_DNS"
    (endpoint,) = service["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert endpoint["endpoint"]["address"]["socket_address"] == {"address": HEADLESS, "port_value": 10003}


def test_tidegate_where_the_settings_say() -> None:
    settings = settings_of(service={"address": "gate.example.com:7000"})
    assert "address: gate.example.com, port_value: 7000" in for_istio(settings, **SIDECAR)


def test_files_are_named_and_never_told() -> None:
    """The command that makes the Secret, and what the proxies have to mount."""
    settings = settings_of(upstreams={"a": {"provider": "openai", "key_file": "/home/a", "limits": [{"tpm": 9_000}]}},
                           routes=[{"models": ["m"], "chain": ["a"], "acknowledge_unowned": True}])  # fmt: skip
    text = for_istio(settings, **SIDECAR)
    assert (
        "#   kubectl create secret generic tidegate-files --namespace apps \\\n#     --from-file=a.key=/home/a\n"
        in text
    )
    noted = [line.partition(": ")[2].strip("'") for line in text.splitlines() if "sidecar.istio.io/userVolume" in line]
    volumes, mounts = map(json.loads, noted)
    assert [volume["name"] for volume in volumes] == [mount["name"] for mount in mounts]
    assert [mount["mountPath"] for mount in mounts] == ["/etc/tidegate/files", "/etc/tidegate/config/sds"]
    assert yaml.safe_load(text.split("---")[0])["metadata"] == {"name": "tidegate-sds", "namespace": "apps"}
    assert "Mount" not in for_istio(settings_of(), **SIDECAR)


def test_what_only_tidegate_reads_is_not_given_to_proxies() -> None:
    """Its own certificate's key stays in its own pod."""
    named = {key: f"/home/{key}" for key in ("cert_file", "key_file", "ca_file")}
    named |= {key: f"/home/{key}" for key in ("client_ca_file", "client_cert_file", "client_key_file")}
    text = for_istio(settings_of(service={"tls": named}), **SIDECAR)
    for key in named:
        assert (f"--from-file=_service.{key}=" in text) is (key in ("ca_file", "client_cert_file", "client_key_file"))
    assert "/etc/tidegate/tls/key_file" not in text
    assert '"mountPath": "/etc/tidegate/tls"' in text


def test_many_upstreams_are_in_several_objects() -> None:
    """None is larger than what Kubernetes keeps."""
    one = {"provider": "vllm", "url": "http://vllm.ml:8000", "owned": True, "concurrency": 8}
    settings = settings_of(
        upstreams={f"u{i}": one for i in range(60)}, routes=[{"models": ["m"], "chain": ["u0", "u59"]}]
    )
    found = filters_of(rendered(SIDECAR, settings))
    assert [each["metadata"]["name"] for each in found][:2] == ["tidegate-clusters", "tidegate-clusters-1"]
    assert found[-1]["metadata"]["name"] == "tidegate"
    assert max(len(json.dumps(each)) for each in found) < 1_500_000
    done = patched(mesh("sidecar"), found, proxy("sidecar"))
    assert done.idle == []
    assert len(done.config["static_resources"]["clusters"]) == 4 + 60 + 1


# ------------------------------------------------------------------------------------------- callers' sidecars


def test_nobody_tries_again() -> None:
    """Tidegate's own host has its object where Tidegate is; another one here, and a gateway's if it is bound."""
    assert not [each for each in rendered(SIDECAR) if each["kind"] == "VirtualService"]
    assert not [each for each in rendered(GATEWAY) if each["kind"] == "VirtualService"]
    (other,) = [each for each in rendered(SIDECAR, host="llm.example.com:80") if each["kind"] == "VirtualService"]
    (bound,) = [each for each in rendered(GATEWAY, attach="infra/public") if each["kind"] == "VirtualService"]
    for each, to in ((other, "llm.example.com"), (bound, OWN.partition(":")[0])):
        assert each["spec"]["hosts"] == ["llm.example.com"]
        (http,) = each["spec"]["http"]
        assert http["retries"] == {"attempts": 0}
        assert http["route"][0]["destination"]["host"] == to
    assert bound["spec"]["gateways"] == ["infra/public"]
    assert "gateways" not in other["spec"]


def test_the_overlay() -> None:
    """The standalone gateway without a sidecar, as a host of the mesh whose callers ask once and in plain HTTP."""
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run(
        [kubectl, "kustomize", K8S / "overlays" / "istio"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    documents = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout)}
    pod = documents["Deployment", "tidegate"]["spec"]["template"]["metadata"]
    assert pod["labels"] == {"app.kubernetes.io/name": "tidegate", "sidecar.istio.io/inject": "false"}
    assert pod["annotations"]["traffic.sidecar.istio.io/excludeInboundPorts"] == "10000,10003,10005"
    assert pod["annotations"]["traffic.sidecar.istio.io/excludeOutboundPorts"] == "10011,10012,10013"
    assert "checksum/config" in pod["annotations"]
    service, rule = (
        next(each for (kind, _), each in documents.items() if kind == wanted)
        for wanted in ("VirtualService", "DestinationRule")
    )
    for each in (service, rule):
        assert problems(each) == []
        assert each["metadata"]["namespace"] == "tidegate"
    assert service["spec"]["hosts"] == [rule["spec"]["host"]] == [OWN.partition(":")[0]]
    port = next(p for p in documents["Service", "tidegate"]["spec"]["ports"])
    assert service["spec"]["http"][0]["route"][0]["destination"]["port"] == {"number": port["port"]}
    assert port["name"] == "http", "by its name Istio knows that it is HTTP"
    let_in = documents["NetworkPolicy", "tidegate"]["spec"]["ingress"][1]["from"]
    assert let_in == [{"namespaceSelector": {}, "podSelector": {"matchLabels": {k8s.CLIENT_LABEL: "true"}}}]


def test_ports_of_prometheus_are_left_out_too() -> None:
    upstreams = {
        "own": {"provider": "vllm", "url": "https://v.ml", "owned": True, "concurrency": 8,
                "kv": {"prometheus": "http://p:9090", "query": "x", "tokens": 5}},
    }  # fmt: skip
    settings = settings_of(upstreams=upstreams, routes=[{"models": ["m"], "chain": ["own"]}])
    assert istio.ports_left_out(settings)["traffic.sidecar.istio.io/excludeOutboundPorts"] == "443,9090"


# ---------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({**GATEWAY, "host": None}, "--host: which host"),
        ({**GATEWAY, "host": "llm.example.com"}, "must be host:port"),
        ({**GATEWAY, "host": "llm.example.com:70000"}, "must be host:port"),
        ({**SIDECAR, "labels": []}, "every proxy of the namespace"),
        ({**SIDECAR, "labels": ["app"]}, "must be key=value"),
        ({**SIDECAR, "namespace": "A b"}, "no name of a namespace"),
        ({**SIDECAR, "service": "nowhere"}, "--service nowhere"),
        ({**SIDECAR, "attach": "a/b"}, "goes with --gateway"),
        ({**GATEWAY, "attach": "b"}, "must be namespace/name"),
        ({**SIDECAR, "proxy_version": "("}, "--proxy-version"),
    ],
)
def test_mistakes_are_told(options: Data, said: str) -> None:
    with pytest.raises(RenderError, match=said):
        for_istio(settings_of(), **options)


def test_what_only_one_pod_has_is_told() -> None:
    """The demo's upstreams are loopback; beside the Envoy they are right."""
    upstreams = {"own": {"provider": "vllm", "url": "http://127.0.0.1:8000", "owned": True, "concurrency": 8}}
    settings = settings_of(upstreams=upstreams, routes=[{"models": ["m"], "chain": ["own"]}])
    with pytest.raises(
        RenderError, match=r"upstreams\.own\.url: http://127\.0\.0\.1:8000 is another place in every pod"
    ):
        for_istio(settings, **SIDECAR)
    assert for_istio(settings, **SIDECAR, service="127.0.0.1:10003")


def test_several_replicas_are_told() -> None:
    """An Envoy would ask one and report to another."""
    settings = settings_of(service={"replicas": 2})
    with pytest.raises(RenderError, match=r"service\.replicas"):
        for_istio(settings, **SIDECAR)
    assert for_istio(settings, **GATEWAY, service="127.0.0.1:10003")


def test_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "tidegate.yaml"
    config.write_text(yaml.safe_dump(settings_of().model_dump(mode="json", exclude_unset=True)), "utf-8")
    asked = ["render", "istio", "--config", str(config), "--sidecar", "--label", "app=chat", "--namespace", "apps"]
    done = RUN.invoke(app, asked)
    assert (done.exit_code, done.stdout) == (0, for_istio(settings_of(), **SIDECAR))
    of_no_kind = RUN.invoke(app, [*asked[:4], "--label", "a=b", "--namespace", "x"])
    assert (of_no_kind.exit_code, "--gateway or --sidecar" in of_no_kind.output) == (2, True)
    wrong = RUN.invoke(app, ["render", "--config", str(config), "istio", *asked[4:]])
    assert wrong.exit_code == 2
    assert "come behind it" in wrong.output
    both = [RUN.invoke(app, ["render", *words, "--config", str(config)]).stdout for words in ((), ("envoy",))]
    assert both[0] == both[1] != ""
