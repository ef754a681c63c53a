"""`tidegate check --against`: nothing is found where Envoy runs what the settings say; whatever is not so, is found."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from extproc.against.command import disagreements
from extproc.against.dump import AdminError, understand
from extproc.against.finding import Finding
from extproc.render.envoy import write_secrets
from extproc.settings import Settings
from tests.against.conftest import FITTING, Dumped, merged_text, run, settings_with
from tests.render.rig import Data

pytestmark = pytest.mark.e2e

Change = Callable[[Data], None]
SERVICE = "tidegate:service"
COMPRESSOR = {
    "name": "envoy.filters.http.compressor",
    "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.compressor.v3.Compressor"},
}
UNKNOWN = {"name": "house.own", "typed_config": {"@type": "type.googleapis.com/house.own.v1.Filter", "x": [{"y": 1}]}}


# ------------------------------------------------------------------------------------ nothing is wrong


def test_the_bootstrap_agrees(alone: Dumped) -> None:
    assert alone.found == []


def test_a_merged_one_agrees(among_others: Dumped) -> None:
    assert among_others.found == []


@pytest.mark.parametrize("name", ["plain.yaml", "anchors.yaml"])
def test_the_other_merged_ones_agree(name: str, files: Path, tmp_path: Path) -> None:
    settings = settings_with(files, FITTING[name])
    assert run(settings, tmp_path, merged_text(name, settings)).found == []


@pytest.mark.parametrize("name", [None, "plain.yaml"])
def test_the_classic_profile_agrees(name: str | None, files: Path, tmp_path: Path) -> None:
    settings = settings_with(files, "gateway: {profile: classic}")
    dumped = run(settings, tmp_path, name and merged_text(name, settings))
    assert dumped.found == []
    (line,) = found(dumped, without_listener(-1))  # a gate
    assert line.startswith("listeners: tidegate")


@pytest.mark.parametrize("name", [None, "plain.yaml"])
def test_tracing_agrees_and_another_collector_is_found(name: str | None, files: Path, tmp_path: Path) -> None:
    """Where an Envoy of others has tracing of its own, ours is not missed."""
    settings = settings_with(files, "telemetry: {otlp: {endpoint: 'https://collector.example:4318'}}")
    dumped = run(settings, tmp_path, name and merged_text(name, settings))
    assert dumped.found == []
    (line,) = found(dumped, without_cluster("tidegate:collector"))
    assert "tidegate:collector" in line
    if name:
        assert found(dumped, without_our_tracing) == []


def test_followed_keys_agree_and_a_missing_one_is_named(files: Path, tmp_path: Path) -> None:
    """Envoy starts without a key that it is told to wait for."""
    settings = settings_with(files, f"gateway: {{secrets_dir: {tmp_path / 'none'}}}")
    write_secrets(settings)
    (tmp_path / "none" / "keyed.json").write_text(json.dumps({"resources": []}))
    (line,) = run(settings, tmp_path).found
    assert line.startswith("secrets: tidegate:key:keyed: expected it, found that Envoy still waits for its file")


# --------------------------------------------------------------------------------------- looking about


def configs(dump: Data, part: str) -> Data:
    return next(one for one in dump["configs"] if one["@type"].endswith(f".{part}ConfigDump"))


def listener(dump: Data) -> Data:
    """The one that is not the canaries'."""
    found: Data = configs(dump, "Listeners")["static_listeners"][0]["listener"]
    return found


def manager(dump: Data) -> Data:
    found: Data = listener(dump)["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def filters(dump: Data) -> list[Data]:
    found: list[Data] = manager(dump)["http_filters"]
    return found


def position(items: list[Data], name: str) -> int:
    (at,) = [i for i, one in enumerate(items) if one["name"].endswith(name)]
    return at


def filter_called(dump: Data, name: str) -> Data:
    found: Data = filters(dump)[position(filters(dump), name)]["typed_config"]
    return found


def host(dump: Data) -> Data:
    found: Data = manager(dump)["route_config"]["virtual_hosts"][0]
    return found


def route(dump: Data, name: str) -> Data:
    (found,) = [one for one in host(dump)["routes"] if one.get("name") in (name, f"tidegate.{name}")]
    return found


def cluster(dump: Data, name: str) -> Data:
    (found,) = [
        one["cluster"] for one in configs(dump, "Clusters")["static_clusters"] if one["cluster"]["name"] == name
    ]
    return found


def protocols(dump: Data, name: str) -> Data:
    (found,) = cluster(dump, name)["typed_extension_protocol_options"].values()
    return found


def endpoint(dump: Data, name: str) -> Data:
    found: Data = cluster(dump, name)["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    return found


def move(items: list[Data], name: str, to: int) -> None:
    items.insert(to, items.pop(position(items, name)))


def put(place: Callable[[Data], Data], key: str, value: Any) -> Change:
    return lambda dump: place(dump).__setitem__(key, value)


def drop(place: Callable[[Data], Data], key: str) -> Change:
    return lambda dump: place(dump).__delitem__(key)


def found(dumped: Dumped, change: Change, settings: Settings | None = None, version: str | None = None) -> list[str]:
    """What is told after a change of the dump."""
    dump = json.loads(dumped.dump)
    change(dump)
    return list(map(str, told(dumped, dump, settings, version)))


def told(dumped: Dumped, dump: Data, settings: Settings | None = None, version: str | None = None) -> list[Finding]:
    return disagreements(understand(version or dumped.version, dump), settings or dumped.settings)


# ---------------------------------------------------------------------------------- one thing is wrong


def admission(dump: Data) -> Data:
    return next(one["typed_config"] for one in filters(dump) if "processing_mode" in one["typed_config"])


def without(items: Callable[[Data], list[Data]], name: str) -> Change:
    return lambda dump: items(dump).__delitem__(position(items(dump), name))


def routes(dump: Data) -> list[Data]:
    found: list[Data] = host(dump)["routes"]
    return found


def clusters(dump: Data) -> list[Data]:
    found: list[Data] = configs(dump, "Clusters")["static_clusters"]
    return found


def without_cluster(name: str) -> Change:
    def change(dump: Data) -> None:
        clusters(dump)[:] = [one for one in clusters(dump) if one["cluster"]["name"] != name]

    return change


def without_our_tracing(dump: Data) -> None:
    del manager(dump)["tracing"]
    without_cluster("tidegate:collector")(dump)


def without_listener(which: int) -> Change:
    return lambda dump: configs(dump, "Listeners")["static_listeners"].__delitem__(which)


EVERYWHERE: dict[str, tuple[Change, str]] = {
    "admission is missing": (
        lambda dump: filters(dump).remove(next(one for one in filters(dump) if "processing_mode" in str(one))),
        "http_filters: expected (envoy.filters.http.ext_proc|tidegate.admission), found none",
    ),
    "tail is missing": (without(filters, "response_tail"), "http_filters: expected tidegate.response_tail, found none"),
    "compressor behind ours": (
        lambda dump: filters(dump).insert(-1, COMPRESSOR),
        "filter compressor: expected before Tidegate's, found behind them; answers reach",
    ),
    "message timeout": (
        lambda dump: admission(dump).__setitem__("message_timeout", "0.200s"),
        r"message_timeout: expected [\d.]+s, found 0.200s; Envoy would not wait",
    ),
    "longest message timeout": (
        lambda dump: admission(dump).__setitem__("max_message_timeout", "10s"),
        r"max_message_timeout: expected [\d.]+s, found 10s; requests held",
    ),
    "body mode": (
        lambda dump: admission(dump)["processing_mode"].__setitem__("request_body_mode", "STREAMED"),
        "processing_mode.request_body_mode: expected BUFFERED, found STREAMED",
    ),
    "answers through Tidegate": (
        lambda dump: admission(dump)["processing_mode"].__setitem__("response_body_mode", "BUFFERED"),
        "processing_mode.response_body_mode: expected NONE, found BUFFERED",
    ),
    "failure mode": (
        lambda dump: admission(dump).__delitem__("failure_mode_allow"),
        "failure_mode_allow: expected true, found nothing; without it a restart",
    ),
    "mutation rules": (
        lambda dump: admission(dump)["mutation_rules"].__delitem__("allow_envoy"),
        "mutation_rules.allow_envoy: expected true, found nothing; Tidegate could not say",
    ),
    "only watching": (
        lambda dump: admission(dump).update(observability_mode=True),
        "observability_mode: expected nothing, found true; Tidegate would only watch",
    ),
    "size of gRPC messages": (
        lambda dump: admission(dump)["grpc_service"]["envoy_grpc"].__setitem__("max_receive_message_length", 4194304),
        "grpc_service.envoy_grpc.max_receive_message_length: expected nothing, found 4194304; larger messages",
    ),
    "metadata that decides": (
        lambda dump: admission(dump)["metadata_options"].__delitem__("receiving_namespaces"),
        "metadata_options.receiving_namespaces: expected .*, found nothing; what Tidegate decided",
    ),
    "no routes": (
        lambda dump: routes(dump).clear(),
        "routes: expected (tidegate.)?stream-again, .* and .* more, found none of them",
    ),
    "a route is missing": (without(routes, "answer-again"), "routes: expected (tidegate.)?answer-again, found none"),
    "routes in another order": (
        lambda dump: move(routes(dump), "answer", 0),
        "order of routes: expected (tidegate.)?stream-again next, found (tidegate.)?answer",
    ),
    "shadowed route": (
        lambda dump: routes(dump).insert(0, {"match": {"prefix": "/v1"}, "route": {"cluster": "mine"}}),
        r'route routes\[0\]: expected Tidegate\'s routes before it, found it before them, with {"prefix": "/v1"}',
    ),
    "route timeout": (
        lambda dump: route(dump, "answer")["route"].__setitem__("timeout", "15s"),
        "route (tidegate.)?answer route.timeout: expected 0s, found 15s; long answers",
    ),
    "silence of streams": (
        lambda dump: route(dump, "stream")["route"].__setitem__("idle_timeout", "5s"),
        "route (tidegate.)?stream route.idle_timeout: expected 60s, found 5s",
    ),
    "retries of a route": (
        lambda dump: route(dump, "answer")["route"]["retry_policy"].__setitem__("num_retries", 0),
        "retry_policy.num_retries: expected 1, found 0; the next upstream",
    ),
    "per-route override": (
        lambda dump: route(dump, "other").__delitem__("typed_per_filter_config"),
        "route (tidegate.)?other typed_per_filter_config: expected .*, found nothing; a route does not",
    ),
    "upstream missing": (without_cluster("mine"), "clusters: upstream mine: expected it, found no cluster mine"),
    "service missing": (
        without_cluster(SERVICE),
        f"clusters: Tidegate itself: expected it, found no cluster {SERVICE}",
    ),
    "address of an upstream": (
        lambda dump: endpoint(dump, "mine")["address"]["socket_address"].__setitem__("address", "10.0.0.7"),
        "cluster mine: .*address: expected 127.0.0.1, found 10.0.0.7",
    ),
    "port of the service": (
        lambda dump: endpoint(dump, SERVICE)["address"]["socket_address"].__setitem__("port_value", 7),
        f"cluster {SERVICE}: .*port_value: expected .*, found 7;",
    ),
    "SNI": (
        lambda dump: cluster(dump, "keyed")["transport_socket"]["typed_config"].__setitem__("sni", "example.com"),
        "cluster keyed: transport_socket.sni: expected localhost, found example.com; the provider may not",
    ),
    "no TLS": (
        lambda dump: cluster(dump, "keyed").__delitem__("transport_socket"),
        "cluster keyed: transport_socket: expected .*, found nothing",
    ),
    "breaker of Envoy's": (
        lambda dump: cluster(dump, "mine")["circuit_breakers"]["thresholds"][0].__setitem__("max_requests", 1024),
        r"cluster mine: circuit_breakers.thresholds\[0\].max_requests: expected 100000, found 1024; Envoy would turn",
    ),
    "no breakers' limits": (
        lambda dump: cluster(dump, SERVICE).__delitem__("circuit_breakers"),
        f"cluster {SERVICE}: circuit_breakers: expected .*, found nothing; Envoy would turn",
    ),
    "filter of an upstream": (
        lambda dump: protocols(dump, "keyed")["http_filters"].pop(-2),
        r"cluster keyed: http_filters\[tidegate.upstream\]: expected .*, found nothing",
    ),
    "script of an upstream": (
        lambda dump: protocols(dump, "mine")["http_filters"][-2]["typed_config"]["default_source_code"].__setitem__(
            "inline_string", "-- old\n-- older\n-- oldest"
        ),
        r"cluster mine: http_filters\[tidegate.upstream\].*: expected a text of .*, found a text of 2 lines .*an",
    ),
    "buffer of an upstream": (
        lambda dump: cluster(dump, "mine").__setitem__("per_connection_buffer_limit_bytes", 32768),
        "cluster mine: per_connection_buffer_limit_bytes: expected .*, found 32768; bodies",
    ),
    "health of the service": (
        lambda dump: cluster(dump, SERVICE).__delitem__("health_checks"),
        f"cluster {SERVICE}: health_checks: expected .*, found nothing; nobody would notice",
    ),
    "no log of outcomes": (
        lambda dump: manager(dump).__delitem__("access_log"),
        "access_log: expected tidegate.outcomes, found no log; Tidegate would not learn",
    ),
    "no log of attempts": (
        lambda dump: filter_called(dump, "router").__setitem__(
            "upstream_log",
            [one for one in filter_called(dump, "router")["upstream_log"] if "tidegate" not in one["name"]],
        ),
        "upstream_log: expected tidegate.attempts, found .*; Tidegate would not learn",
    ),
    "a log that reports less": (
        lambda dump: next(one for one in manager(dump)["access_log"] if "tidegate" in one["name"])["typed_config"][
            "common_config"
        ]["custom_tags"].pop(),
        "access_log tidegate.outcomes common_config.custom_tags: expected .*ticket.*, found nothing",
    ),
    "wording of refusals": (
        lambda dump: manager(dump)["local_reply_config"]["mappers"][1].__setitem__("status_code", 500),
        r"local_reply_config.mappers\[1\] status_code: expected .*, found 500",
    ),
    "no wording of refusals": (
        lambda dump: manager(dump).__delitem__("local_reply_config"),
        "local_reply_config.mappers: expected all [0-9]+ of Tidegate's, found 0 of them",
    ),
    "key of a provider": (
        lambda dump: configs(dump, "Secrets").__setitem__(
            "static_secrets",
            [one for one in configs(dump, "Secrets")["static_secrets"] if "tidegate" not in one["name"]],
        ),
        "secrets: tidegate:key:keyed: expected it, found no such secret",
    ),
    "no canaries": (without_listener(-1), r"listeners: (tidegate\.)?probe: expected it, found none, so breakers"),
    "canaries' listener": (
        lambda dump: configs(dump, "Listeners")["static_listeners"][-1]["listener"]["address"][
            "socket_address"
        ].__setitem__("address", "0.0.0.0"),
        "probe: address.socket_address.address: expected 127.0.0.1, found 0.0.0.0",
    ),
    "a refused listener": (
        lambda dump: configs(dump, "Listeners").__setitem__(
            "dynamic_listeners", [{"name": "new", "error_state": {"details": "unknown filter"}}]
        ),
        "Envoy: what it was sent: expected that it takes it, found that it refused listener new: unknown filter",
    ),
}


@pytest.mark.parametrize("which", ["alone", "among_others"])
@pytest.mark.parametrize("what", EVERYWHERE)
def test_whatever_is_wrong_is_named_in_one_line(what: str, which: str, request: pytest.FixtureRequest) -> None:
    change, line = EVERYWHERE[what]
    lines = found(request.getfixturevalue(which), change)
    assert len(lines) == 1, lines
    assert re.search(line, lines[0]), lines
    assert "\n" not in lines[0]


ALONE: dict[str, tuple[Change, str]] = {
    "jwt behind admission": (
        lambda dump: move(filters(dump), "jwt_authn", -1),
        "order of http_filters: expected .*jwt_authn, envoy.filters.http.ext_proc, found .*ext_proc, .*jwt_authn",
    ),
    "idle timeout": (
        lambda dump: manager(dump).__setitem__("stream_idle_timeout", "30s"),
        "stream_idle_timeout: expected 960s, found 30s; what is held for longer ends with 504",
    ),
    "longest stream": (
        lambda dump: manager(dump).__setitem__("common_http_protocol_options", {"max_stream_duration": "10s"}),
        "max_stream_duration: expected at least .* s, or none, found 10 s",
    ),
    "buffer of the listener": (
        lambda dump: listener(dump).__delitem__("per_connection_buffer_limit_bytes"),
        "listener tidegate: per_connection_buffer_limit_bytes: expected 8388608, found nothing; bodies",
    ),
    "buffer of the routes": (
        lambda dump: host(dump).__setitem__("request_body_buffer_limit", "1024"),
        "request_body_buffer_limit: expected 16777216, found 1024; bodies",
    ),
    "headers of callers": (
        lambda dump: manager(dump).__delitem__("early_header_mutation_extensions"),
        "early_header_mutation_extensions: expected .*, found nothing; callers could send",
    ),
    "what upstreams are told": (
        lambda dump: filter_called(dump, "router").__delitem__("suppress_envoy_headers"),
        "router suppress_envoy_headers: expected true, found nothing",
    ),
    "admin's port": (
        lambda dump: configs(dump, "Bootstrap")["bootstrap"]["admin"]["address"]["socket_address"].__setitem__(
            "port_value", 9901
        ),
        "admin: address socket_address.port_value: expected .*, found 9901",
    ),
}


@pytest.mark.parametrize("what", ALONE)
def test_what_can_only_be_wrong_with_the_whole_bootstrap(what: str, alone: Dumped) -> None:
    change, wanted = ALONE[what]
    (line,) = found(alone, change)
    assert re.search(wanted, line), line


def add_filter(kind: str, to: int) -> Change:
    config = {"@type": f"type.googleapis.com/envoy.extensions.filters.http.x.v3.{kind}"}
    return lambda dump: filters(dump).insert(to, {"name": "added", "typed_config": config})


AMONG: dict[str, tuple[Change, str]] = {
    "ours before a compressor": (
        lambda dump: move(filters(dump), "compressor", -2),
        "filter compressor: expected before Tidegate's, found behind them",
    ),
    "its jwt_authn behind admission": (
        lambda dump: move(filters(dump), "jwt_authn", len(filters(dump)) - 2),
        "filter jwt_authn: expected before Tidegate's, found behind tidegate.admission; Tidegate admits what it turns",
    ),
    "ext_authz behind admission": (add_filter("ExtAuthz", -1), "filter added: expected before Tidegate's"),
    "own jwt behind admission": (
        lambda dump: move(filters(dump), "tidegate.jwt", -1),
        "order of http_filters: expected .*tidegate.jwt, .*, found .*tidegate.admission, tidegate.jwt",
    ),
    "a filter that is on for everybody": (
        lambda dump: filters(dump)[position(filters(dump), "tidegate.buffer")].__delitem__("disabled"),
        "filter tidegate.buffer disabled: expected true, found nothing; other routes",
    ),
    "a filter twice": (
        lambda dump: filters(dump).insert(0, filters(dump)[position(filters(dump), "tidegate.mark")]),
        "filter tidegate.mark: expected it once, found it 2 times",
    ),
    "a filter that nothing switches on": (
        lambda dump: route(dump, "answer")["typed_per_filter_config"].__delitem__("tidegate.admission"),
        "route tidegate.answer typed_per_filter_config.tidegate.admission: expected .*, found nothing",
    ),
    "its buffer": (
        lambda dump: filter_called(dump, "http.buffer").__setitem__("max_request_bytes", 1000),
        "filter buffer max_request_bytes: expected at least 65536, found 1000; larger LLM requests get its 413",
    ),
    "idle timeout": (
        lambda dump: manager(dump).__setitem__("stream_idle_timeout", "5s"),
        "stream_idle_timeout: expected at least .* s, or none, found 5 s; what is held for longer",
    ),
    "its mappers first": (
        lambda dump: manager(dump)["local_reply_config"]["mappers"].insert(0, {"status_code": 418}),
        "local_reply_config.mappers: expected Tidegate's first, in their order, found another order",
    ),
    "an upstream that was removed": (
        lambda dump: clusters(dump).append({"cluster": {**cluster(dump, "mine"), "name": "old"}}),
        "cluster old: upstream: expected none of this name, found it; rendered for other settings",
    ),
    "a route that was removed": (
        lambda dump: routes(dump).insert(3, {**route(dump, "answer"), "name": "tidegate.old"}),
        "route tidegate.old: expected nothing, found it; rendered for other settings",
    ),
}


@pytest.mark.parametrize("what", AMONG)
def test_what_can_only_be_wrong_among_others(what: str, among_others: Dumped) -> None:
    change, wanted = AMONG[what]
    lines = [line for line in found(among_others, change) if re.search(wanted, line)]
    assert len(lines) == 1, found(among_others, change)


# ------------------------------------------------------------------- the same, delivered in another way


def dynamic(dump: Data) -> None:
    """As a control plane would have sent it all: LDS, RDS, CDS with EDS, a filter by discovery, another as a struct."""
    listeners, clusters_, routes_ = (configs(dump, part) for part in ("Listeners", "Clusters", "Routes"))
    table = {"name": "table", **manager(dump).pop("route_config")}
    manager(dump)["rds"] = {"route_config_name": table["name"], "config_source": {"ads": {}}}
    routes_["static_route_configs"] = []
    routes_["dynamic_route_configs"] = [{"version_info": "7", "route_config": table}]
    there = filters(dump)
    tail = there[position(there, "response_tail")]
    delivered = {"name": tail["name"], "typed_config": tail.pop("typed_config")}
    tail["config_discovery"] = {"config_source": {"ads": {}}, "type_urls": ["x"]}
    dump["configs"].append(
        {"@type": "type.googleapis.com/envoy.admin.v3.EcdsConfigDump", "ecds_filters": [{"ecds_filter": delivered}]}
    )
    asking = next(one for one in there if "processing_mode" in str(one))
    config = asking["typed_config"]
    asking["typed_config"] = {
        "@type": "type.googleapis.com/xds.type.v3.TypedStruct",
        "type_url": config.pop("@type"),
        "value": config,
    }
    there.insert(0, UNKNOWN)
    mine = cluster(dump, "mine")
    del mine["load_assignment"]
    mine |= {"type": "EDS", "eds_cluster_config": {"service_name": "outbound|1||mine", "eds_config": {"ads": {}}}}
    for one in configs(dump, "Endpoints")["static_endpoint_configs"]:
        if one["endpoint_config"]["cluster_name"] == "mine":
            one["endpoint_config"]["cluster_name"] = "outbound|1||mine"
    clusters_["dynamic_active_clusters"] = clusters_.pop("static_clusters")
    listeners["dynamic_listeners"] = [
        {"name": one["listener"]["name"], "active_state": {"listener": one["listener"]}}
        for one in listeners.pop("static_listeners")
    ]
    dump["configs"].append({"@type": "type.googleapis.com/house.own.v1.ConfigDump", "any": ["thing", None]})


@pytest.mark.parametrize("which", ["alone", "among_others"])
def test_what_a_control_plane_sent_agrees_too(which: str, request: pytest.FixtureRequest) -> None:
    assert found(request.getfixturevalue(which), dynamic) == []


def test_what_asks_tidegate_may_be_called_otherwise(among_others: Dumped) -> None:
    """As with an EnvoyExtensionPolicy of Envoy Gateway."""

    def change(dump: Data) -> None:
        filters(dump)[position(filters(dump), "tidegate.admission")]["name"] = "policy/extproc/0"
        for one in routes(dump):
            own = one.get("typed_per_filter_config", {})
            if "tidegate.admission" in own:
                own["policy/extproc/0"] = own.pop("tidegate.admission")

    assert found(among_others, change) == []


def test_what_to_do_is_told_for_a_control_plane(among_others: Dumped) -> None:
    def change(dump: Data) -> None:
        del admission(dump)["failure_mode_allow"]
        del routes(dump)[position(routes(dump), "answer-again")]
        endpoints = configs(dump, "Endpoints")["static_endpoint_configs"]
        (mine,) = [one["endpoint_config"] for one in endpoints if one["endpoint_config"]["cluster_name"] == "mine"]
        mine["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]["port_value"] = 4
        dynamic(dump)

    filters_, routes_, cluster_ = found(among_others, change)
    assert filters_.endswith("have the control plane send what `tidegate render --part http_filters` prints")
    assert routes_.endswith("have the control plane send what `tidegate render --part routes` prints")
    assert "cluster mine: addresses" in cluster_
    assert "expected 1, found 4" in cluster_


def test_a_route_table_that_did_not_arrive_is_named(alone: Dumped) -> None:
    def change(dump: Data) -> None:
        dynamic(dump)
        configs(dump, "Routes")["dynamic_route_configs"] = []

    (line,) = found(alone, change)
    assert re.search("route table t[a-z]+: expected it, by RDS, found that it has not arrived", line)


def test_where_envoys_machine_keeps_trusted_certificates_may_differ(alone: Dumped) -> None:
    def at(path: str) -> Change:
        def change(dump: Data) -> None:
            common = cluster(dump, "keyed")["transport_socket"]["typed_config"]["common_tls_context"]
            common["validation_context"]["trusted_ca"]["filename"] = path

        return change

    assert found(alone, at("/etc/ssl/cert.pem")) == []
    (line,) = found(alone, at("/etc/house/ca.pem"))
    assert "trusted_ca.filename: expected" in line
    assert "another CA would be trusted" in line


# ------------------------------------------------------------------------------------- other settings


def test_an_older_version_of_the_settings_is_told_apart(alone: Dumped, files: Path) -> None:
    """Each change of the settings since is named: an upstream, a longer wait, a limit of the flood guard."""
    now = settings_with(files, upstreams={"third": 2})
    settings = now.model_copy(
        update={"gateway": alone.settings.gateway, "service": alone.settings.service, "flood": now.flood}
    )
    lines = found(alone, lambda _dump: None, settings)
    assert any("clusters: upstream third: expected it, found no cluster third" in line for line in lines), lines
    assert any("priority_groups[third]" in line and "rendered for other upstreams" in line for line in lines), lines
    assert any("route answer route.retry_policy.num_retries: expected 2, found 1" in line for line in lines), lines


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("1c/1.36.4/Clean/RELEASE/BoringSSL", "1.40.0 or newer for gateway.profile native, found 1.36.4; run a newer"),
        ("1c/1.9.10/Clean/RELEASE/BoringSSL", "found 1.9.10"),
        ("1c/1.39.3/Clean/RELEASE/BoringSSL", "found 1.39.3"),
        ("1c/1.40.0-dev/Modified/DEBUG/BoringSSL", ""),
        ("1c/2.0.0/Clean/RELEASE/BoringSSL", ""),
    ],
)
def test_an_envoy_that_is_too_old_is_named(version: str, wanted: str, alone: Dumped) -> None:
    lines = found(alone, lambda _dump: None, version=version)
    assert [wanted in line for line in lines] == ([True] if wanted else [])


def test_an_envoy_without_tidegate_is_told_in_one_line(alone: Dumped) -> None:
    def change(dump: Data) -> None:
        configs(dump, "Listeners")["static_listeners"] = []
        configs(dump, "Clusters")["static_clusters"] = []

    (line,) = found(alone, change)
    assert line.startswith("Envoy: Tidegate: expected its filters, routes and clusters, found nothing of it; merge")


# --------------------------------------------------------------------------------------------- broken


@pytest.mark.parametrize("seed", range(2))
def test_a_dump_that_is_broken_anywhere_is_an_error_or_a_finding(seed: int, among_others: Dumped) -> None:
    """A value of the wrong kind, at places picked at random, breaks nothing that is not told."""
    rng = random.Random(seed)
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            places.append((value, key))
            if isinstance(inner, dict | list):
                collect(inner)

    dump = json.loads(among_others.dump)
    collect([one for one in dump["configs"] if "Bootstrap" not in one["@type"]])
    for container, key in rng.sample(places[1:], 40):
        kept = container[key]
        container[key] = rng.choice([None, 7, "x", [], {}, [1], {"a": [None]}, True])
        with suppress(AdminError):  # nothing else
            assert all("\n" not in line for line in map(str, told(among_others, dump)))
        container[key] = kept
    assert told(among_others, dump) == []
