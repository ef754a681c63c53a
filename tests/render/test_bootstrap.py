"""The rendered configuration as a whole: what it must have, what it must not have, and that a real Envoy accepts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.render.envoy import RenderError, bootstrap, to_yaml, validate, write_secrets
from extproc.render.names import SERVICE_CLUSTER
from extproc.settings import Settings, load, parse
from tests.render.rig import Data, manager_of, settings_of, upstream

DROPIN = Path(__file__).parents[2] / "envoy" / "dropin.yaml"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Every file that settings can name."""
    texts = {
        "key": "sk-very-secret\n",
        "jwks": '{"keys": [{"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0", "alg": "HS256"}]}',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in texts}


def everything(files: dict[str, str]) -> Settings:
    """One of each kind."""
    limits = {"limits": [{"tpm": 1000}]}
    return settings_of(
        json.dumps(
            {
                "service": {"address": "unix:/run/tidegate.sock"},
                "identity": {
                    "tenant": ["jwt:team", "header:x-tidegate-tenant", "header:x-team", "api_key"],
                    "jwt": {"jwks_file": files["jwks"], "issuer": "me", "audiences": ["a", "b"]},
                },
                "other_endpoints": "vllm.pool-1_a",
                "internal_headers": False,
                "statuses": {"too_large": 400, "upstream_failed": 502, "admission_unavailable": 529},
            }
        ),
        openai={"provider": "openai", "key_file": files["key"], **limits},
        azure={
            "provider": "azure",
            "url": "https://x.openai.azure.com",
            "key_file": files["key"],
            "models": {"a": "b"},
            **limits,
        },
        claude={"provider": "anthropic", "key_file": files["key"], **limits},
        **{"vllm.pool-1_a": {"provider": "vllm", "url": "http://vllm-headless:8000", "owned": True, "concurrency": 9}},
        six={"provider": "compatible", "url": "http://[::1]:8000/api/v2/", "learn": True},
        near={"provider": "vllm", "url": "https://127.0.0.1:8443", "learn": True},
    )


# -------------------------------------------------------------------------------------------- accepted


@pytest.mark.e2e
def test_the_dropin_is_rendered_from_the_default_settings() -> None:
    """`make dropin` writes it anew."""
    text = to_yaml(bootstrap(load(None, {})))
    assert DROPIN.read_text("utf-8") == text
    validate(text)


@pytest.mark.e2e
def test_a_real_envoy_accepts_one_of_everything(files: dict[str, str]) -> None:
    validate(to_yaml(bootstrap(everything(files))))


@pytest.mark.e2e
@pytest.mark.parametrize(
    "flood", ["{per_key_rps: null}", "{per_address_rps: null}", "{per_key_rps: null, per_address_rps: null}"]
)
def test_parts_of_the_flood_guard_can_be_off(flood: str) -> None:
    config = bootstrap(settings_of(f"flood: {flood}", a=1))
    validate(to_yaml(config))
    guards = [item for item in manager_of(config)["http_filters"] if "local_ratelimit" in item["name"]]
    assert len(guards) == (flood.count("null") == 1)


@pytest.mark.e2e
def test_keys_are_followed_where_a_folder_is_named(files: dict[str, str], tmp_path: Path) -> None:
    """One file for each upstream with a key, which tells where it is; the keys themselves are nowhere."""
    settings = everything(files)
    gateway = settings.gateway.model_copy(update={"secrets_dir": str(tmp_path / "told" / "here")})
    settings = settings.model_copy(update={"gateway": gateway})
    write_secrets(settings)
    told = {file.stem: file.read_text("utf-8") for file in (tmp_path / "told" / "here").iterdir()}
    assert set(told) == {name for name, upstream in settings.upstreams.items() if upstream.key_file}
    text = to_yaml(bootstrap(settings))
    validate(text)
    key = Path(files["key"]).read_text("utf-8").strip()
    assert not [one for one in (text, *told.values()) if key in one]


@pytest.mark.e2e
def test_envoy_tells_what_is_wrong() -> None:
    """In the configuration, and in its scripts."""
    with pytest.raises(RenderError, match="nonsense"):
        validate(to_yaml({**bootstrap(load(None, {})), "nonsense": 1}))
    with pytest.raises(RenderError, match="PortValue: value must be less") as long:
        validate(to_yaml(bootstrap(load(None, {}))).replace("port_value: 10002", "port_value: 99999"))
    assert len(str(long.value)) < 1100
    with pytest.raises(RenderError, match="script load error"):
        validate(to_yaml(bootstrap(load(None, {}))).replace("local LIMIT = 1048576", "local LIMIT = = 1"))


def test_what_an_older_envoy_does_not_know_is_told_without_the_whole_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so before the configuration, of which some thousand bytes would hide it."""
    said = "could not find @type 'type.googleapis.com/envoy.PriorityGroupClusterSpecifier'"
    envoy = tmp_path / "envoy"
    error = f"error `Unable to parse JSON as proto (INVALID_ARGUMENT: {said}): "
    envoy.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{error}{{{'x' * 5000}}}\nEND\nexit 1\n", "utf-8")
    envoy.chmod(0o755)
    monkeypatch.setenv("TIDEGATE_ENVOY", str(envoy))
    with pytest.raises(RenderError) as told:
        validate("{}")
    first, last = str(told.value).splitlines()
    assert (said in first, len(first) < 200) == (True, True)
    assert last == "Envoy is older than 1.40? Then say gateway: {profile: classic}."


def test_without_an_envoy_that_is_said() -> None:
    with pytest.raises(RenderError, match="no-such-envoy: not found"):
        validate("{}", envoy="no-such-envoy")


# ------------------------------------------------------------------------------------------------ text


def test_the_text_says_the_same_as_the_data(files: dict[str, str]) -> None:
    """Plain data (decision 12), written for people: scripts as they are, no anchors, nothing endless."""
    config = bootstrap(everything(files))
    text = to_yaml(config)
    assert yaml.safe_load(text) == config == json.loads(json.dumps(config))
    assert text.startswith("# Rendered")
    assert "function envoy_on_response(handle)\n" in text
    assert to_yaml(bootstrap(everything(files)).copy()).count("\n") == text.count("\n")


def test_no_secret_stands_in_the_text(files: dict[str, str]) -> None:
    text = to_yaml(bootstrap(everything(files)))
    assert "sk-very-secret" not in text
    assert files["key"] in text


def test_names_cannot_escape_into_scripts() -> None:
    """Whatever an upstream's address is, it stays a string in Lua."""
    url = "http://a/x%22]]%20--\\\"\u00e9'"
    script = _scripts(bootstrap(settings_of("", a=upstream(1, url=url))))[0]
    first = script.splitlines()[0]
    assert (
        first == 'local SELF = { name = "a", prefix = "/x%22]]%20--\\092\\034\\195\\169\'", owned = false, wider = {} }'
    )


def _scripts(config: Data) -> list[str]:
    found = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if "default_source_code" in value:
                found.append(value["default_source_code"]["inline_string"])
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(config["static_resources"]["clusters"])
    return found


# ------------------------------------------------------------------------------------------- decisions


@pytest.fixture
def config(files: dict[str, str]) -> Data:
    return bootstrap(everything(files))


def clusters_of(config: Data) -> dict[str, Data]:
    return {cluster["name"]: cluster for cluster in config["static_resources"]["clusters"]}


def test_the_service_is_watched(config: Data) -> None:
    """Decision 1, and envoy's default of 1,024 open requests is out of the way."""
    service = clusters_of(config)[SERVICE_CLUSTER]
    assert '"connection_keepalive"' in json.dumps(service)
    assert service["circuit_breakers"]["thresholds"][0]["max_requests"] == 100_000
    assert service["common_lb_config"]["healthy_panic_threshold"] == {"value": 0}
    assert service["health_checks"][0]["grpc_health_check"] == {}
    assert service["lb_policy"] == "LEAST_REQUEST"


def test_no_breaker_of_envoys_stands_in_the_way_of_failover(config: Data) -> None:
    """Decision 2, on every upstream: any may come first."""
    for cluster in clusters_of(config).values():
        (limits,) = cluster["circuit_breakers"]["thresholds"]
        assert limits["max_retries"] == 1000
        assert min(limits[name] for name in ("max_connections", "max_pending_requests", "max_requests")) == 100_000


def test_only_metadata_admits(config: Data) -> None:
    """Decision 3: no header does, and no route to an upstream can be had without the ticket."""
    for route in manager_of(config)["route_config"]["virtual_hosts"][0]["routes"]:
        needs = [condition["path"] for condition in route["match"].get("dynamic_metadata", ())]
        assert ("route" in route) == ([{"key": "ticket"}] in needs)
    text = to_yaml(config)
    assert "x-tidegate-ticket" not in text
    assert "suppress_envoy_headers: true" in text


def test_timeouts_fit_into_each_other() -> None:
    """Decision 4: the longest wait < the longest patience with a message < the idle timeout."""
    settings = parse((DROPIN.parents[1] / "extproc/default.yaml").read_text(), "default")
    manager = manager_of(bootstrap(settings))
    admission = next(item for item in manager["http_filters"] if "ext_proc" in item["name"])["typed_config"]
    assert (admission["message_timeout"], admission["max_message_timeout"]) == ("2s", "115s")
    assert admission["failure_mode_allow"] is True
    assert manager["stream_idle_timeout"] == "960s"


def test_nothing_of_what_was_ruled_out_is_there(config: Data) -> None:
    """Decisions 6 and 13."""
    text = to_yaml(config)
    for word in ("preserve_response_code_details", "transcoder", "request_info", "body_size_limit", "json_to_metadata"):
        assert word not in text
    assert "ai_protocol_manager" not in text
    assert "sse_to_metadata" not in text
    replies = manager_of(config)["local_reply_config"]
    assert replies.keys() == {"mappers"}
    assert all("filter" in mapper for mapper in replies["mappers"])


def test_callers_are_told_no_more_than_they_should(config: Data) -> None:
    """Upstream and attempts are for internal callers only; the wait is for everybody."""
    text = json.dumps(manager_of(config)["route_config"])
    assert "x-tidegate-queue-ms" in text
    assert "x-tidegate-upstream" not in text
    assert "x-tidegate-upstream" in json.dumps(bootstrap(load(None, {})))


def test_statuses_of_the_settings_are_envoys_too(config: Data) -> None:
    manager = manager_of(config)
    assert {mapper["status_code"] for mapper in manager["local_reply_config"]["mappers"]} >= {400, 502}
    answers = [route["direct_response"]["status"] for route in _routes(manager) if "direct_response" in route]
    assert set(answers) == {529}


def _routes(manager: Data) -> list[Data]:
    return list(manager["route_config"]["virtual_hosts"][0]["routes"])


def test_routes_before_and_after_admission_agree_on_what_is_read(config: Data) -> None:
    """Envoy reads the override of the first and may read that of the second."""
    for route in _routes(manager_of(config)):
        override = route.get("typed_per_filter_config", {}).get("envoy.filters.http.ext_proc")
        assert (override is not None) == ("other" in route["name"])


@pytest.mark.parametrize(
    ("name", "host", "port", "hostname", "tls"),
    [
        ("openai", "api.openai.com", 443, "api.openai.com", True),
        ("azure", "x.openai.azure.com", 443, "x.openai.azure.com", True),
        ("vllm.pool-1_a", "vllm-headless", 8000, "vllm-headless:8000", False),
        ("six", "::1", 8000, "[::1]:8000", False),
        ("near", "127.0.0.1", 8443, "127.0.0.1:8443", True),
    ],
)
def test_where_upstreams_are(config: Data, name: str, host: str, port: int, hostname: str, tls: bool) -> None:  # noqa: FBT001
    """Names are looked up, addresses are not; the Host header has the port where it is not the usual one."""
    cluster = clusters_of(config)[name]
    first = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    assert first["address"]["socket_address"] == {"address": host, "port_value": port}
    assert first["hostname"] == hostname
    assert ("transport_socket" in cluster) == tls
    assert cluster["type"] == ("STATIC" if host[0] in ":1" else "STRICT_DNS")


def test_credentials_are_set_or_removed_by_every_upstream(config: Data) -> None:
    """All attempts share one header map: what one sets, each of the others must remove."""
    own = {"openai": "authorization", "azure": "api-key", "claude": "x-api-key"}
    for name, cluster in clusters_of(config).items():
        if name == SERVICE_CLUSTER:
            continue
        ((_, protocols),) = cluster["typed_extension_protocol_options"].items()
        kinds = [item["name"].rpartition(".")[2] for item in protocols["http_filters"]]
        (mutations,) = [
            item["typed_config"]["mutations"] for item in protocols["http_filters"] if "mutation" in item["name"]
        ]
        removed = {mutation.get("remove") for mutation in mutations["request_mutations"]}
        everywhere = {"authorization", "api-key", "x-api-key", "cookie", "proxy-authorization"}
        assert everywhere - removed == ({own[name]} if name in own else set())
        assert ("credential_injector" in kinds) == (name in own)
        assert kinds[-2:] == ["upstream", "upstream_codec"]
