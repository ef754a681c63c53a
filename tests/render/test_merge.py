"""Tidegate's parts put into configurations of others: where they go, that nothing else changes, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.render.command import merged
from extproc.render.envoy import RenderError, validate, write_secrets
from extproc.render.existing import dump, load
from extproc.render.merge import HEADER, merge
from extproc.settings import Settings
from tests.render.rig import Data, settings_of, upstream

FOLDER = Path(__file__).parent / "existing"
MANAGER = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
CASES: dict[str, tuple[str | None, str | None]] = {
    "plain.yaml": (None, None),
    "anchors.yaml": ("secure", "api"),
    "tls.yaml": (None, "shop"),
}
"""File, and the listener and virtual host that are asked for."""
FILTERS = [
    "tidegate.clean_request",
    "tidegate.mark",
    "tidegate.flood",
    "tidegate.final_failures",
    "tidegate.response_tail",
    "tidegate.buffer",
    "tidegate.admission",
]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Two upstreams, one of which has a key."""
    (tmp_path / "key").write_text("sk-x")
    key = {"provider": "openai", "key_file": str(tmp_path / "key"), "limits": [{"tpm": 1000}]}
    return settings_of("gateway: {probe_port: 10002}\nservice: {address: '127.0.0.1:10003'}", openai=key, mine=1)


def done(name: str, settings: Settings, again: str | None = None) -> tuple[Data, tuple[str, ...], str]:
    """The merged configuration as plain data, its notes, its text."""
    listener, host = CASES[name]
    result = merge(load(again or (FOLDER / name).read_text(), name), settings, listener, host)
    text = dump(result.config, HEADER)
    return yaml.safe_load(text), result.notes, text


def before(name: str) -> Data:
    """The configuration as it was; what is tagged to be ignored is ignored."""
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("!ignore", lambda _loader, node: f"ignored {node.value}")
    whole: Data = yaml.load(json_safe(name), Loader=loader)  # noqa: S506 - our own file
    return copy.deepcopy(json.loads(json.dumps({k: v for k, v in whole.items() if not k.startswith("ignored")})))


def json_safe(name: str) -> str:
    return (FOLDER / name).read_text()


def managers(config: Data) -> list[Data]:
    """Every connection manager but that of the canaries."""
    chains = [c for one in config["static_resources"]["listeners"] for c in one["filter_chains"]]
    every = [item["typed_config"] for chain in chains for item in chain["filters"]]
    return [one for one in every if one["stat_prefix"] != "probe"]


def names(items: list[Data]) -> list[str]:
    return [str(item.get("name")) for item in items]


# ---------------------------------------------------------------------------------------------- accepted


@pytest.mark.e2e
@pytest.mark.parametrize("name", CASES)
def test_a_real_envoy_accepts_the_original_and_what_becomes_of_it(name: str, settings: Settings) -> None:
    validate(json_safe(name))
    validate(done(name, settings)[2])


@pytest.mark.e2e
def test_a_real_envoy_accepts_one_with_everything(tmp_path: Path) -> None:
    """Keys that are followed, tokens, other endpoints, words of last resort."""
    (tmp_path / "jwks").write_text(
        '{"keys": [{"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0", "alg": "HS256"}]}'
    )
    (tmp_path / "key").write_text("sk-x")
    settings = settings_of(
        json.dumps(
            {
                "service": {"address": "unix:/run/tidegate.sock"},
                "gateway": {"secrets_dir": str(tmp_path / "told"), "probe_port": 10002},
                "identity": {"tenant": ["jwt:team", "api_key"], "jwt": {"jwks_file": str(tmp_path / "jwks")}},
                "other_endpoints": "openai",
            }
        ),
        openai={"provider": "openai", "key_file": str(tmp_path / "key"), "limits": [{"tpm": 1000, "rpm": 10}]},
        mine=1,
    )
    config, notes, text = done("tls.yaml", settings)
    write_secrets(settings)
    assert any("node: has no id and cluster, without which Envoy follows no keys" in note for note in notes)
    validate(text + "node: {id: shop, cluster: shop}\n")
    assert "tidegate.jwt" in names(managers(config)[0]["http_filters"])
    assert any("payload_in_metadata" in note for note in notes)


# --------------------------------------------------------------------------------- what was there stays


@pytest.mark.parametrize("name", CASES)
def test_merging_again_changes_nothing(name: str, settings: Settings) -> None:
    once = done(name, settings)
    again = done(name, settings, once[2])
    assert again[2] == once[2]
    assert again[1] == once[1]


@pytest.mark.parametrize("name", CASES)
def test_merging_with_other_settings_leaves_nothing_of_the_earlier_ones(name: str, settings: Settings) -> None:
    other = settings_of(
        "other_endpoints: next\ngateway: {probe_port: 10022}", next={"provider": "openai", "limits": [{"rpm": 9}]}
    )
    assert done(name, settings, done(name, other)[2])[2] == done(name, settings)[2]
    assert done(name, other, done(name, settings)[2])[2] == done(name, other)[2]


@pytest.mark.parametrize("name", CASES)
def test_without_what_is_ours_it_is_the_original(name: str, settings: Settings) -> None:
    """Every value and every order, and nothing twice: found by a walk that knows nothing of how merging is done."""
    config = done(name, settings)[0]
    assert _without_ours(config) == before(name)


def _without_ours(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_ours(item) for item in value if not _ours(item)]
    if not isinstance(value, dict):
        return value
    found = {key: _without_ours(inner) for key, inner in value.items()}
    if found.get("access_log_options") == {"access_log_flush_interval": "5s"}:
        del found["access_log_options"]
    ends_only = {"log_type_filter": {"types": ["DownstreamPeriodic"], "exclude": True}}
    if found.get("filter") == ends_only:
        del found["filter"]
    elif isinstance(found.get("filter"), dict) and ends_only in found["filter"].get("and_filter", {}).get(
        "filters", []
    ):
        found["filter"] = found["filter"]["and_filter"]["filters"][0]
    return {key: inner for key, inner in found.items() if not (value[key] and inner in ([], {}) and key in _NEW)}


_NEW = ("access_log", "upstream_log", "local_reply_config", "mappers", "secrets")


def _ours(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    name = str(item.get("name", ""))
    mapper = "body_format_override" in item and "'filter': 'tidegate'" in str(item.get("filter"))
    return name.startswith("tidegate") or mapper or "tidegate" in item.get("metadata", {}).get("filter_metadata", {})


def test_values_stay_as_they_were_written() -> None:
    """What Python and Envoy read differently is not read at all: numbers, truth, dates, leading zeros, quotes."""
    text = """
a: [0123, 1_000, 1e3, 0x1F, 2024-01-01, yes, "yes", 'no', on, ~, "", 5s, '5', "a\\tb", y, !!str 12]
b:
c: |
  two
  lines
d: >
  one
  line
e: &e {f: 1, g: 2}
h: {<<: *e, g: 3}
i: [*e]
"""
    found = dump(load(text, "x"), "")
    assert found.splitlines()[0] == (
        'a: [0123, 1_000, 1e3, 0x1F, 2024-01-01, yes, "yes", \'no\', on, null, "", 5s, \'5\', "a\\tb", y, "12"]'
    )
    assert yaml.safe_load(found) == yaml.safe_load(text)
    assert dump(load(found, "x"), "") == found
    assert dump(load("{a: 1:30}", "x"), "") == "{a: '1:30'}\n", "Envoy takes it for text, and reads numbers from text"
    assert "&" not in found
    assert "*" not in found


# ------------------------------------------------------------------------------------------ where it goes


def test_filters_stand_behind_what_authenticates_and_before_the_router(settings: Settings) -> None:
    config, notes, _ = done("tls.yaml", settings)
    shop, status = managers(config)
    own = ["compressor", "jwt_authn", "ext_authz", "rbac", "buffer"]
    expected = [*(f"envoy.filters.http.{name}" for name in own), *FILTERS, "envoy.filters.http.router"]
    assert names(shop["http_filters"]) == expected
    assert names(status["http_filters"]) == ["envoy.filters.http.router"]
    assert all(item["disabled"] is True for item in shop["http_filters"] if item["name"] in FILTERS)
    assert any("behind compressor, jwt_authn, ext_authz, rbac, buffer, which are asked first" in note for note in notes)
    assert any("filter_chains[1]: has no virtual host shop" in note for note in notes)


def test_every_route_of_ours_switches_the_filters_on_and_takes_llm_paths_only(settings: Settings) -> None:
    (manager,) = managers(done("plain.yaml", settings)[0])
    (host,) = manager["route_config"]["virtual_hosts"]
    ours = [route for route in host["routes"] if route.get("name", "").startswith("tidegate.")]
    assert ours
    for route in ours:
        on = route["typed_per_filter_config"]
        read = set(FILTERS) - ({"tidegate.buffer"} if "other" in route["name"] else set())
        assert on.keys() == read
        assert route["match"]["safe_regex"]["regex"].startswith("/v1/")
        if "route" in route:
            assert route["match"]["dynamic_metadata"][0]["filter"] == "llm.route"
            assert "retry_policy" in route["route"], "else the virtual host's is taken"
        else:
            assert route["match"]["headers"][-1]["string_match"] == {"exact": "OPTIONS"}, "preflights are not ours"
            assert route["match"]["headers"][-1]["invert_match"]


@pytest.mark.parametrize(
    ("name", "own_before"),
    [("plain.yaml", ["None", "users"]), ("anchors.yaml", ["None", "None"]), ("tls.yaml", [])],
)
def test_routes_stand_before_the_first_that_takes_llm_paths(
    name: str, own_before: list[str], settings: Settings
) -> None:
    """A catch-all, `/v1`, or one that is just for such a path; conditional ones stay where they are."""
    listener, host = CASES[name]
    config = done(name, settings)[0]
    hosts = [h for m in managers(config) for h in m["route_config"]["virtual_hosts"] if h["name"] == (host or "shop")]
    found = names(hosts[0]["routes"])
    at = next(i for i, one in enumerate(found) if one.startswith("tidegate."))
    assert found[:at] == own_before
    assert listener in (None, "secure")


def test_logs_are_added_and_those_there_write_no_line_more(settings: Settings) -> None:
    plain, secure = managers(done("anchors.yaml", settings)[0])
    assert names(plain["access_log"]) == ["envoy.access_loggers.stdout"]
    assert plain["access_log"][0]["filter"] == {"not_health_check_filter": {}}, "shared by an anchor, changed for one"
    assert names(secure["access_log"]) == ["envoy.access_loggers.stdout", "tidegate.outcomes"]
    first, second = secure["access_log"][0]["filter"]["and_filter"]["filters"]
    assert first == {"not_health_check_filter": {}}
    assert second == {"log_type_filter": {"types": ["DownstreamPeriodic"], "exclude": True}}
    assert names(secure["http_filters"][-1]["typed_config"]["upstream_log"]) == ["tidegate.attempts"]


def test_an_interval_that_is_there_is_kept(settings: Settings) -> None:
    """Somebody wants lines of running requests, and goes on getting them."""
    text = json_safe("plain.yaml").replace("codec_type: AUTO", "access_log_options: {access_log_flush_interval: 60s}")
    (manager,) = managers(done("plain.yaml", settings, text)[0])
    assert manager["access_log_options"] == {"access_log_flush_interval": "60s"}
    assert "filter" not in manager["access_log"][0]


def test_what_does_not_suit_is_told_and_not_changed(settings: Settings) -> None:
    notes = "\n".join(done("anchors.yaml", settings)[1])
    assert "stream_idle_timeout is 30 s: what Tidegate holds for longer ends with 504" in notes
    assert "delayed_close_timeout" not in notes
    assert "request_headers_to_add are sent to LLM providers, too: x-edge" in notes
    assert "route routes[0]: stands before Tidegate's and keeps requests with its headers for /v1/chat" in notes
    assert "route routes[2]: no longer gets /v1/chat/completions" in notes
    assert "routes[3]" not in notes, "a catch-all that is meant to be one"
    notes = "\n".join(done("tls.yaml", settings)[1])
    assert "route old_chat: no longer gets /v1/chat/completions, which" in notes
    for word in (
        "upgrade_configs",
        "max_stream_duration is 600 s",
        "max_request_bytes 65536 is less",
        "no request_timeout",
    ):
        assert word in notes
    assert "payload_in_metadata" not in notes, "these settings read no tokens"


@pytest.mark.parametrize("identity", ["api_key", "header:x-team"])
def test_filters_that_meet_llm_paths_are_told(identity: str) -> None:
    """One that answers browsers, and one that replaces what a caller is known by."""
    kinds = {"cors": "cors.v3.Cors", "injector": "credential_injector.v3.CredentialInjector"}
    filters = "".join(
        f'{{name: {name}, typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.{kind}'
        f"{', overwrite: true' if name == 'injector' else ''}}}}}\n          - "
        for name, kind in kinds.items()
    )
    text = minimal().replace("{name: r,", f"{filters}{{name: r,")
    known = f"identity: {{tenant: '{identity}'}}\ntenants: {{a: {{key_sha256: [{'ab' * 32}]}}}}"
    notes = "\n".join(merge(load(text, "x"), settings_of(known, mine=1)).notes)
    assert "filter cors: answers preflights of LLM paths as before" in notes
    assert ("filter injector: puts its key in place of the caller's" in notes) == (identity == "api_key")
    switched = text.replace("{name: injector,", "{name: injector, disabled: true,")
    assert "filter injector: " not in "\n".join(merge(load(switched, "x"), settings_of(known, mine=1)).notes)


# ---------------------------------------------------------------------------------------------- refused


def minimal(manager: str = "", host: str = "routes: []", listener: str = "name: a", **static: Any) -> str:
    """The smallest configuration with a manager."""
    return f"""
static_resources:
  listeners:
  - {listener}
    address: {{socket_address: {{address: 127.0.0.1, port_value: 9000}}}}
    filter_chains:
    - filters:
      - name: m
        typed_config:
          "@type": {MANAGER}
          {manager or f'route_config: {{virtual_hosts: [{{name: h, domains: ["*"], {host}}}]}}'}
          http_filters:
          - {{name: r, typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}}}
  {json.dumps(static)[1:-1]}
"""


TWO_HOSTS = 'route_config: {virtual_hosts: [{name: x, domains: ["x"]}, {name: y, domains: ["y"]}]}'
REFUSED: dict[str, tuple[str, dict[str, str], str]] = {
    "rds": (minimal("rds: {route_config_name: far}"), {}, "its routes come from RDS (far) and are not in this file"),
    "scoped": (minimal("scoped_routes: {name: s}"), {}, "scoped_routes choose among many route tables"),
    "vhds": (minimal("route_config: {vhds: {}, name: v}"), {}, "route_config has no virtual_hosts"),
    "a tree": (minimal(host="matcher: {}"), {}, "its routes are a matcher tree"),
    "two hosts": (minimal(TWO_HOSTS), {}, "several virtual hosts: x, y; choose one with --virtual-host"),
    "no such host": (minimal(), {"virtual_host": "z"}, "--virtual-host z: there is none; there is h"),
    "nor there": (minimal(), {"listener": "a", "virtual_host": "z"}, "listener a has none; it has h"),
    "no such listener": (minimal(), {"listener": "z"}, "--listener z: no such listener that serves HTTP; there is a"),
    "no router": (minimal().replace("router.v3.Router", "x.v3.X"), {}, "the last one is not a router"),
    "an old manager": (minimal().replace(MANAGER, "http_connection_manager.v2.X"), {}, "without the type"),
    "lds": ("static_resources: {}\ndynamic_resources: {lds_config: {}}", {}, "the listeners come from LDS"),
    "no http": ("static_resources: {listeners: [{name: tcp}]}", {}, "none of them has an HTTP connection manager"),
    "xds": ("resources: []", {}, "a file of xDS resources"),
    "nothing": ("admin: {}", {}, "no static_resources"),
    "a list": ("[1]", {}, "not an Envoy configuration"),
    "empty": ("", {}, "not an Envoy configuration"),
    "not yaml": ("a: [", {}, "no YAML that can be read"),
    "twice": ("a: 1\nb: {c: 1, c: 2}", {}, "line 2: c is there twice in one mapping"),
    "a tag": ("a: !!binary YQ==", {}, "the tag tag:yaml.org,2002:binary is not understood"),
    "itself": ("a: &a {b: *a}", {}, "an anchor contains itself"),
    "no list": (minimal(host="routes: {}"), {}, ".routes: expected a list"),
    "a cluster": (
        minimal(clusters=[{"name": "x"}, {"name": "mine"}]),
        {},
        "static_resources.clusters[1] and upstreams.mine of Tidegate's settings are both called 'mine'",
    ),
    "a port": (
        minimal().replace("9000", "10002"),
        {},
        "gateway.probe_port of Tidegate's settings and listener a both want port 10002",
    ),
    "the service's": (minimal().replace("9000", "10003"), {}, "service.address of Tidegate's settings and listener a"),
    "admin's": (
        "admin: {address: {socket_address: {address: 0.0.0.0, port_value: 10002}}}" + minimal(),
        {},
        "gateway.probe_port of Tidegate's settings and admin both want port 10002",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_merged_says_what_to_do(name: str, settings: Settings, tmp_path: Path) -> None:
    text, choice, told = REFUSED[name]
    file = tmp_path / "envoy.yaml"
    file.write_text(text)
    with pytest.raises(RenderError) as error:
        merged(file, settings, **choice)
    assert told in str(error.value)
    assert all(line.startswith(f"{file}: ") for line in str(error.value).splitlines()[:1])


def test_several_listeners_have_to_be_chosen_from(settings: Settings) -> None:
    text = json_safe("anchors.yaml")
    with pytest.raises(RenderError, match="several listeners serve HTTP: plain, secure; choose one with --listener"):
        merge(load(text, "x"), settings)
    found = merge(load(text, "x"), settings, None, "api").config
    assert names(managers(found)[1]["http_filters"])[1] == FILTERS[0], "only one has a host of that name"


def test_a_file_that_cannot_be_read(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(RenderError, match=r"nowhere\.yaml: "):
        merged(tmp_path / "nowhere.yaml", settings)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RenderError, match=r"bytes\.yaml: "):
        merged(tmp_path / "bytes.yaml", settings)


def test_where_envoy_says_no_the_notes_are_told_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may be the reason, as a node without a name is."""
    file, envoy, key = tmp_path / "existing.yaml", tmp_path / "envoy", tmp_path / "key"
    file.write_text(minimal(), "utf-8")
    key.write_text("k", "utf-8")
    envoy.write_text("#!/bin/sh\necho no >&2\nexit 1\n", "utf-8")
    envoy.chmod(0o755)
    monkeypatch.setenv("TIDEGATE_ENVOY", str(envoy))
    watched = settings_of(f"gateway: {{secrets_dir: {tmp_path}}}", far={**upstream(1), "key_file": str(key)})
    with pytest.raises(RenderError) as told:
        merged(file, watched, check=True)
    *notes, last = str(told.value).splitlines()
    assert last == "no"
    assert any(note.startswith("warning: node: has no id") for note in notes)


def test_json_is_merged_into_as_well(settings: Settings) -> None:
    text = json.dumps(yaml.safe_load(json_safe("plain.yaml")))
    config, _, written = done("plain.yaml", settings, text)
    assert config == done("plain.yaml", settings)[0]
    assert max(map(len, written.splitlines())) < 3000


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("static_resources", "staticResources", "staticResources"),
        ("http_filters", "httpFilters", "typed_config.httpFilters"),
        ("route_config", "routeConfig", "typed_config.routeConfig"),
    ],
)
def test_fields_in_camel_case_are_refused(old: str, new: str, place: str, settings: Settings) -> None:
    """Envoy reads both: one that is not seen would be written a second time, or its routes be passed over."""
    with pytest.raises(RenderError, match=f"{place}: .* only snake_case can be merged into"):
        merge(load(minimal().replace(old, new), "x"), settings)


@pytest.mark.parametrize("field", ["local_reply_config", "access_log_options", "access_log"])
@pytest.mark.parametrize("nothing", ["", "~", "null"])
def test_what_is_written_as_nothing_is_not_there(field: str, nothing: str, settings: Settings) -> None:
    """As Envoy reads it: the same comes of it as without the field."""
    text = minimal().replace("          http_filters:", f"          {field}: {nothing}\n          http_filters:")
    assert f"{field}: {nothing}\n" in text
    written, without = (yaml.safe_load(dump(merge(load(one, "x"), settings).config, "")) for one in (text, minimal()))
    assert written == without


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("{name: h, ", "h, {name: h, ", "route_config.virtual_hosts"),
        ("routes: []", "routes: [x]", "virtual host h.routes"),
        ("http_filters:", "access_log: [x]\n          http_filters:", "access_log"),
    ],
)
def test_what_is_no_list_of_mappings_is_refused(old: str, new: str, place: str, settings: Settings) -> None:
    """And where it is, is told."""
    with pytest.raises(RenderError, match=rf"{place}: expected a list of mappings"):
        merge(load(minimal().replace(old, new), "x"), settings)


def test_every_address_of_a_listener_is_looked_at(settings: Settings) -> None:
    """A port that is taken by one that was added is taken."""
    more = "additional_addresses: [{address: {socket_address: {address: '::', port_value: 10002}}}]"
    with pytest.raises(RenderError, match=r"gateway\.probe_port .* and listener a both want port 10002"):
        merge(load(minimal(listener=f"name: a\n    {more}"), "x"), settings)
