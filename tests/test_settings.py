"""Config fails at the door: every mistake is one line with its path, and what is accepted means what it says."""

from __future__ import annotations

from datetime import UTC, date, datetime
from math import inf, isfinite
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.core.policy import (
    Accounting,
    BreakerRules,
    Dollars,
    Kind,
    Limit,
    Prices,
    RatioRules,
    SlowRules,
    WhenBusy,
)
from extproc.core.refusal import RULES, Reason
from extproc.core.request import Dialect
from extproc.settings import PROVIDERS, Settings, SettingsError, load, parse

PLAIN = """
upstreams:
  a: {provider: fake, url: 'http://127.0.0.1:1', owned: true, concurrency: 3}
routes:
  - {models: [m], chain: [a]}
"""
DIGEST = "ab" * 32


def problems(text: str, environ: dict[str, str] | None = None) -> list[str]:
    """The mistakes found in a config, without the name of the file."""
    with pytest.raises(SettingsError) as error:
        parse(text, "file", environ or {})
    assert str(error.value) == "\n".join(error.value.problems)
    assert not any("\n" in line for line in error.value.problems)
    return [line.removeprefix("file: ") for line in error.value.problems]


def plain(**upstream: Any) -> str:
    """The plain config with the upstream changed; None removes a key."""
    raw = yaml.safe_load(PLAIN)
    raw["upstreams"]["a"] = {k: v for k, v in (raw["upstreams"]["a"] | upstream).items() if v is not None}
    return yaml.safe_dump(raw)


@pytest.mark.parametrize(
    ("addition", "line"),
    [
        ("gatway: {}", "gatway: unknown key"),
        ("gateway: {prot: 1}", "gateway.prot: unknown key"),
        ("identity: {jwt: {jwks_file: f, isuer: x}}", "identity.jwt.isuer: unknown key"),
        ("lanes: {P0: {max_wait: 4}}", "lanes.P0.max_wait: unknown key"),
        ("gateway: {port: 0}", "gateway.port: Input should be greater than or equal to 1"),
        (
            "gateway: {port: many}",
            "gateway.port: Input should be a valid integer, unable to parse string as an integer",
        ),
        ("gateway: {port: yes}", "gateway.port: must be a number, not yes or no"),
        ("gateway: {port: 10001}", "gateway: port, admin_port, probe_port and metrics_port must differ"),
        ("gateway: 7", "gateway: is not a section"),
        ("gateway:", "gateway: is not a section"),
        ("tenants: {'**': {}}", "tenants.**: String should match pattern"),
        ("gateway: {max_body_bytes: 1}", "gateway.max_body_bytes: Input should be greater than or equal to 1024"),
        ("service: {address: here}", "service.address: must be host:port"),
        ("service: {console: 'unix:/x'}", "service.console: must be host:port"),
        ("service: {drain_s: 0}", "service.drain_s: Input should be greater than 0"),
        ("service: {drain_s: .inf}", "service.drain_s: Input should be a finite number"),
        ("service: {restart_ramp_s: .inf}", "service.restart_ramp_s: Input should be a finite number"),
        ("service: {restart_ramp_s: -1}", "service.restart_ramp_s: Input should be greater than or equal to 0"),
        ("lanes: {}", "lanes: Dictionary should have at least 1 item after validation, not 0"),
        ("lanes: {P0: {when_busy: wait}}", "lanes.P0.when_busy: Input should be 'spill' or 'hold'"),
        ("lanes: {P0: {spill_after_s: .inf}}", "lanes.P0.spill_after_s: Input should be a finite number"),
        ("lanes: {'a b': {}}", "lanes.a b: String should match pattern '^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$'"),
        (
            "lanes: {P0: {order: edf, lifo_above: 0.5}}",
            "lanes.P0: order edf and lifo_above say two things of whose turn",
        ),
        (
            "lanes: {P0: {}, P1: {min_share: 0.5, keep_free: 0.6}}",
            "lanes.P1: min_share 0.5 cannot be had while keep_free",
        ),
        ("tenants: {x: {tpm: 5, shadow: [rpm]}}", "tenants.x.shadow: rpm is not set, so there is nothing to watch"),
        ("lanes: {P0: {max_wait_s: 901}}", "lanes.P0.max_wait_s: 901 s is longer than a synchronous wait may be"),
        (
            "gateway: {max_message_timeout_s: 114}",
            "lanes.P2.max_wait_s: 110 s + 5 s exceeds gateway.max_message_timeout_s (114): Envoy would cut the wait",
        ),
        ("timeouts: {first_token_s: 960}", "timeouts.first_token_s: 960 s reaches gateway.idle_timeout_s (960), where"),
        ("gateway: {idle_timeout_s: 115}", "lanes.P2.max_wait_s: 110 s + 5 s reaches gateway.idle_timeout_s (115)"),
        ("tenants: {x: {lanes: [P9]}}", "tenants.x.lanes: unknown lane 'P9'; known: P0, P1, P2"),
        ("tenants: {x: {default_lane: P9}}", "tenants.x.lanes: unknown lane 'P9'; known: P0, P1, P2"),
        ("tenants: {x: {lanes: [P0], default_lane: P1}}", "tenants.x.default_lane: 'P1' is not among its lanes"),
        ("tenants: {x: {tpm: 0}}", "tenants.x.tpm: Input should be greater than or equal to 1"),
        ("tenants: {x: {lanes: P0}}", "tenants.x.lanes: Input should be a valid tuple"),
        ("other_endpoints: b", "other_endpoints: unknown upstream 'b'"),
        (
            f"tenants: {{x: {{key_sha256: [{DIGEST}]}}, y: {{key_sha256: [{DIGEST}]}}}}",
            "tenants.y.key_sha256: a key is",
        ),
        ("identity: {tenant: 'cookie:x'}", "identity.tenant: 'cookie:x' is not api_key, header:NAME or jwt:CLAIM"),
        ("identity: {tenant: 'header:'}", "identity.tenant: 'header:' is not api_key, header:NAME or jwt:CLAIM"),
        ("identity: {tenant: 'header:X-Team'}", "identity.tenant: 'X-Team' is not a lower-case header name"),
        ("identity: {tenant: [api_key, 'jwt:t']}", "identity.tenant: jwt:CLAIM needs identity.jwt with a jwks_file"),
        ("tenants: {'*': {rpm: 5}}", "tenants.*: identity.tenant names no header and no claim, so nobody is named"),
        (
            f"identity: {{tenant: 'header:x-team'}}\ntenants: {{'*': {{key_sha256: ['{'a' * 64}']}}}}",
            "tenants.*.key_sha256: a key belongs to one tenant; list that by its name",
        ),
        ("identity: {unknown: ask}", "identity.unknown: Input should be 'default' or 'reject'"),
        ("identity: {jwt: {issuer: x}}", "identity.jwt.jwks_file: is required"),
        ("statuses: {lane_full: 200}", "statuses.lane_full: Input should be greater than or equal to 400"),
        ("statuses: {full: 503}", "statuses.full: Input should be 'tenant_quota', "),
    ],
)
def test_each_mistake_beside_the_upstreams_is_one_line_with_its_path(addition: str, line: str) -> None:
    """Unknown keys at any depth, wrong types, values out of range, and what only shows when sections meet."""
    [found] = problems(PLAIN + addition)
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"provider": None}, "upstreams.a.provider: is required"),
        ({"provider": "opneai"}, "upstreams.a.provider: 'opneai' is not one of openai, azure, "),
        ({"url": None}, "upstreams.a.url: provider fake needs one"),
        ({"url": "127.0.0.1:1"}, "upstreams.a.url: '127.0.0.1:1' is not http(s)://host[:port][/path]"),
        ({"url": "ftp://h"}, "upstreams.a.url: 'ftp://h' is not http(s)://host[:port][/path]"),
        ({"url": "http://h:0"}, "upstreams.a.url: 'http://h:0' is not http(s)://host[:port][/path]"),
        ({"url": "http://h:99999"}, "upstreams.a.url: has no valid host and port"),
        ({"url": "http://[::1"}, "upstreams.a.url: has no valid host and port"),
        ({"concurrency": None}, "upstreams.a.limits: missing; give limits, concurrency, kv or learn: true"),
        ({"concurrency": None, "learn": True, "limits": [{"tpm": 1}]}, "upstreams.a.learn: give limits or learn them"),
        ({"limits": [{"model": "m"}]}, "upstreams.a.limits[0]: name at least one of tpm, itpm, otpm, rpm"),
        ({"limits": [{"tpm": 1}, {"rpm": 1}]}, "upstreams.a.limits: model '*' is named twice"),
        ({"limits": [{"tpm": 1}, {"tmp": 1}]}, "upstreams.a.limits[1].tmp: unknown key"),
        ({"limits": [{"tpm": 1.5}]}, "upstreams.a.limits[0].tpm: Input should be a valid integer, got a number with"),
        ({"limits": {"tpm": 1}}, "upstreams.a.limits: Input should be a valid tuple"),
        ({"headroom": 1}, "upstreams.a.headroom: Input should be less than 1"),
        ({"provider": "vllm", "fake": {}}, "upstreams.a.fake: only for provider: fake"),
        ({"dialects": ["gemini"]}, "upstreams.a.dialects[0]: Input should be 'openai' or 'anthropic'"),
        ({"owned": False}, "routes[0].chain: ends on 'a', which is not owned; end on an upstream with owned: true, or"),
        ({"models": {"m": 5}}, "upstreams.a.models.m: Input should be a valid string"),
        ({"burn": 1}, "upstreams.a.burn: Input should be less than 1"),
        ({"usd_per_day": 5}, "upstreams.a.owned: is free, and serves when the dollars of others are spent"),
        ({"prices": {"m": []}}, "upstreams.a.prices.m: Value should have at least 1 item"),
        ({"prices": {"m": {"input": 1}}}, "upstreams.a.prices.m[0].output: is required"),
        (
            {"prices": {"m": {"input": 1, "output": 2, "from": "soon"}}},
            "upstreams.a.prices.m[0].from: Invalid isoformat string: 'soon'",
        ),
        (
            {"prices": {"m": {"input": 1, "output": 2, "from": 2026}}},
            "upstreams.a.prices.m[0].from: must be a date, as in 2026-01-31, or a time of one",
        ),
        (
            {"prices": {"m": [{"input": 1, "output": 2}, {"input": 3, "output": 2}]}},
            "upstreams.a.prices.m: two of them hold from the same time",
        ),
    ],
)
def test_each_mistake_in_an_upstream_is_one_line_with_its_path(change: dict[str, Any], line: str) -> None:
    """Missing, wrong, contradictory."""
    [found] = problems(plain(**change))
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("routes", "lines"),
    [
        ("[{models: [m], chain: [b]}]", ["routes[0].chain: unknown upstream 'b'; known: a"]),
        ("[{models: [m], chain: [a, a]}]", ["routes[0].chain: names an upstream twice"]),
        ("[{models: [m], chain: []}]", ["routes[0].chain: Tuple should have at least 1 item after validation, not 0"]),
        ("[{models: [], chain: [a]}]", ["routes[0].models: Tuple should have at least 1 item after validation, not 0"]),
        ("[{chain: [a]}]", ["routes[0].models: is required"]),
        ("[]", ["routes: Tuple should have at least 1 item after validation, not 0"]),
        (
            "[{models: [m, n], chain: [a]}, {models: [n], chain: [a]}]",
            ["routes[1].models: 'n' is already served by routes[0]"],
        ),
        ("[{models: [m], chain: [a], timeout: 3}]", ["routes[0].timeout: unknown key"]),
        ("[{models: [m], chain: [a], usd_per_day: 0}]", ["routes[0].usd_per_day: Input should be greater than 0"]),
        (
            "[{models: [m], chain: [a], usd_per_hour: 1, shadow: [usd_per_day]}]",
            ["routes[0].shadow: usd_per_day is not set, so there is nothing to watch"],
        ),
        (
            "[{models: [m], chain: [a], first_token_s: 0}]",
            ["routes[0].first_token_s: Input should be greater than 0"],
        ),
        (
            "[{models: [m], chain: [a], first_token_s: 960}, {models: [n], chain: [a], first_token_s: 959}]",
            ["routes[0].first_token_s: 960 s reaches gateway.idle_timeout_s (960), where Envoy ends it for good"],
        ),
    ],
)
def test_each_mistake_in_a_route_is_one_line_with_its_path(routes: str, lines: list[str]) -> None:
    """And nothing that only follows from it."""
    text = PLAIN[: PLAIN.index("routes:")]
    assert problems(f"{text}routes: {routes}") == lines


def test_all_mistakes_are_told_at_once() -> None:
    """One per line, so that a config is mended in one round."""
    found = problems(PLAIN + "gateway: {prot: 1, port: 0}\nlanes: {P0: {max_wait_s: -1}}\nx: 1")
    assert [line.partition(":")[0] for line in found] == ["gateway.port", "gateway.prot", "lanes.P0.max_wait_s", "x"]


def test_a_chain_may_end_on_words_of_the_operators_own() -> None:
    """A last resort is something that never fails; without a text it is none."""
    route = (
        parse(plain(owned=None).replace("chain", "last_resort: {text: Sorry.}\n  chain"), "file", {}).policy().routes[0]
    )
    assert (route.last_resort, route.unasked) == ("Sorry.", False)
    with pytest.raises(SettingsError, match="last_resort"):
        parse(plain(owned=None).replace("chain", "last_resort: {text: ''}\n  chain"), "file", {})


def test_a_route_may_wait_longer_for_its_first_tokens() -> None:
    """Absent, it is what `timeouts` says."""
    settings = parse(PLAIN.replace("chain", "first_token_s: 90, chain") + "timeouts: {first_token_s: 7}", "file", {})
    assert settings.policy().routes[0].first_token_s == 90
    assert settings.first_token_s_of(settings.routes[0]) == 90
    settings = parse(PLAIN + "timeouts: {first_token_s: 7}", "file", {})
    assert settings.policy().routes[0].first_token_s is None
    assert settings.first_token_s_of(settings.routes[0]) == 7


def test_an_unowned_end_can_be_acknowledged() -> None:
    """Who says so may depend on a provider alone."""
    settings = parse(plain(owned=None).replace("chain", "acknowledge_unowned: true\n  chain"), "file", {})
    assert not settings.upstreams["a"].owned


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "must be a mapping with at least upstreams and routes"),
        ("# nothing\n", "must be a mapping with at least upstreams and routes"),
        ("- a", "must be a mapping with at least upstreams and routes"),
        ("&a [*a]", "must be a mapping with at least upstreams and routes"),
        ("{}", "upstreams: is required"),
        ("a: b: c", "file:1: mapping values are not allowed here"),
        ("a: 1\nb: [", "file:2: expected the node content, but found '<stream end>'"),
        ("a: 1\n---\nb: 2", "file:2: but found another document"),
        ("a: 1\na: 2", "file:2: 'a' is written twice"),
        ("a: {b: {c: 1, d: 2, c: 3}}", "file:1: 'c' is written twice"),
        ("a: [1, {b: 1, b: 1}]", "file:1: 'b' is written twice"),
        ("1: a\n1.0: b", "file:2: 1.0 is written twice"),
        ("? [a]\n: 1", "file:1: a key must be a word"),
        ("? {a: 1}\n: 1", "file:1: a key must be a word"),
        ("? !!set {a}\n: 1", "file:1: a key must be a word"),
        ("a: &a {b: *a}", "file:1: found unconstructable recursive node"),
        ("a: *b", "file:1: found undefined alias 'b'"),
        ("a: !!python/object/apply:os.system [x]", "file:1: could not determine a constructor for the tag "),
        ("a: !secret x", "file:1: could not determine a constructor for the tag '!secret'"),
        ("a: !!timestamp x", "not YAML: "),
        ("a: !!bool x", "not YAML: "),
        ("a: !!int ''", "not YAML: "),
        ("a: 2024-13-45", "not YAML: ValueError: month must be in 1..12"),
        ("a: \x00", "not YAML: "),
        ("[" * 5000, "not YAML: RecursionError: "),
        ("{a: " * 5000, "not YAML: RecursionError: "),
        ("a: 1" + "0" * 5000, "not YAML: "),
    ],
)  # fmt: skip
def test_what_is_no_yaml_is_one_line_with_its_place(text: str, line: str) -> None:
    """Nothing but SettingsError comes out, whatever goes in."""
    assert problems(text)[0].startswith(line)


def test_a_bomb_of_aliases_is_only_a_wrong_config() -> None:
    """Nine to the tenth elements that share nine lists: found wrong at once, wherever it stands."""
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [f"{b}: &{b} [{','.join(['*' + a] * 9)}]" for a, b in zip("abcdefghij", "bcdefghijk", strict=True)]
    bomb = "\n".join(lines)
    assert "upstreams: is required" in problems(bomb)
    for place in ("upstreams: *k", "routes: *k", "routes: [{models: *k, chain: *k}]", "lanes: {P0: *k}"):
        assert len(problems(f"{bomb}\n{place}")) < 100


def test_sections_may_share_what_an_anchor_names() -> None:
    """Aliases and merge keys work as in any YAML; a merged key may be written again."""
    text = """
upstreams:
  a: &base {provider: fake, url: 'http://h:1', owned: true, concurrency: 3}
  b: *base
  c: {<<: *base, concurrency: 4}
routes: [{models: [m], chain: [a, b, c]}]
"""
    upstreams = parse(text, "file", {}).upstreams
    assert [upstreams[name].concurrency for name in "abc"] == [3, 3, 4]
    assert problems(text.replace("{<<: *base,", "{<<: *base, concurrency: 5,"))[0].startswith("file:5: 'concurrency'")


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        (plain(key="sk-secret"), {}),
        (plain(api_key="sk-secret"), {}),
        (plain(url="http://user:sk-secret@h"), {}),
        (plain(url="http://sk-secret@h"), {}),
        (plain(url="http://h/v1?key=sk-secret"), {}),
        (plain(url="http://h:sk-secret"), {}),
        (PLAIN + "tenants: {x: {key_sha256: [sk-secret]}}", {}),
        (PLAIN + "tenants: {x: {keys: [sk-secret]}}", {}),
        (PLAIN, {"TIDEGATE__UPSTREAMS__A__KEY": "sk-secret"}),
    ],
)
def test_a_secret_given_as_a_value_is_refused_and_not_repeated(text: str, environ: dict[str, str]) -> None:
    """Keys live in files that Envoy reads. The message names the place, not the secret."""
    [line] = problems(text, environ)
    assert "sk-secret" not in line
    assert line.startswith(("upstreams.a.", "tenants.x."))


@pytest.mark.parametrize(
    ("environ", "path", "value"),
    [
        ({"TIDEGATE_PORT": "8080"}, "gateway.port", 8080),
        ({"TIDEGATE__GATEWAY__PORT": "8080"}, "gateway.port", 8080),
        ({"TIDEGATE__GATEWAY__PORT": "1", "TIDEGATE_PORT": "8080"}, "gateway.port", 8080),
        ({"TIDEGATE__SERVICE__STATE_FILE": "/var/x.json"}, "service.state_file", "/var/x.json"),
        ({"TIDEGATE__INTERNAL_HEADERS": "false"}, "internal_headers", False),
        ({"TIDEGATE__IDENTITY__TENANT": "[api_key, 'header:x-team']"}, "identity.tenant", ("api_key", "header:x-team")),
        ({"TIDEGATE__FLOOD__PER_KEY_RPS": "null"}, "flood.per_key_rps", None),
        ({"TIDEGATE_LOG": "INFO", "PATH": "/bin", "TIDEGATE_PORT": "8080"}, "gateway.port", 8080),
    ],
)
def test_the_environment_wins_over_the_file(environ: dict[str, str], path: str, value: object) -> None:
    """Any key by its path, read as YAML; foreign names are left alone."""
    found: Any = parse(PLAIN + "gateway: {port: 7777}", "file", environ)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_a_mistake_of_the_environment_is_told_as_such() -> None:
    """Its own value, or a section that is there for its sake alone; whatever else is wrong is the file's."""
    environ = {"TIDEGATE__UPSTREAMS__B__URL": "http://b:1", "TIDEGATE_PORT": "0", "TIDEGATE__SERVICE__DRAIN_S": "3"}
    assert problems(PLAIN + "gateway: {admin_port: x}", environ) == [
        "gateway.port: Input should be greater than or equal to 1 (the environment has TIDEGATE_PORT)",
        "gateway.admin_port: Input should be a valid integer, unable to parse string as an integer",
        "upstreams.b.provider: is required (the environment has TIDEGATE__UPSTREAMS__B__URL)",
    ]


def test_environment_names_have_no_case() -> None:
    """They find the name as the file has it, or lower case where it is new."""
    environ = {"TIDEGATE__LANES__P0__MAX_WAIT_S": "3", "TIDEGATE__UPSTREAMS__A__CONCURRENCY": "9"}
    settings = parse(PLAIN + "lanes: {P0: {max_wait_s: 4}, P1: {}}", "file", environ)
    assert (settings.lanes["P0"].max_wait_s, settings.upstreams["a"].concurrency) == (3, 9)


def test_the_environment_changes_only_the_section_it_names() -> None:
    """Not another one that shares its values by an alias."""
    text = """
upstreams:
  a: &base {provider: fake, url: 'http://h:1', owned: true, breaker: &calm {failures: 3}, concurrency: 3}
  b: *base
routes: [{models: [m], chain: [a, b]}]
"""
    upstreams = parse(text, "file", {"TIDEGATE__UPSTREAMS__A__BREAKER__FAILURES": "7"}).upstreams
    assert [upstreams[name].breaker.failures for name in "ab"] == [7, 3]


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({"TIDEGATE_PORT": "many"}, "gateway.port: Input should be a valid integer"),
        ({"TIDEGATE_PORT": ""}, "gateway.port: Input should be a valid integer"),
        ({"TIDEGATE_PORT": "["}, "environment TIDEGATE_PORT:1: "),
        ({"TIDEGATE__GATEWAY__PORT": "a: b: c"}, "environment TIDEGATE__GATEWAY__PORT:1: "),
        ({"TIDEGATE__GATEWAY__PORT": "{a: 1, a: 2}"}, "environment TIDEGATE__GATEWAY__PORT:1: 'a' is written twice"),
        ({"TIDEGATE__GATEWAY": "5"}, "gateway: is not a section"),
        ({"TIDEGATE__GATEWAY__PROT": "5"}, "gateway.prot: unknown key"),
        ({"TIDEGATE__ROUTES__0__MODELS": "[x]"}, "environment TIDEGATE__ROUTES__0__MODELS: routes is not a section"),
        ({"TIDEGATE__OTHER__PORT": "5"}, "other: unknown key"),
        (
            {"TIDEGATE__UPSTREAMS__A__OWNED__X": "5"},
            "environment TIDEGATE__UPSTREAMS__A__OWNED__X: owned is not a section",
        ),
    ],
)
def test_a_mistake_in_the_environment_is_one_line_too(environ: dict[str, str], line: str) -> None:
    """With the variable's name, or the path that it set."""
    [found] = problems(PLAIN, environ)
    assert found.startswith(line)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    """Missing, a directory, not text."""
    (latin := tmp_path / "latin.yaml").write_bytes(b"a: \xe4")
    for path, reason in [
        (tmp_path / "none.yaml", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (latin, "is not UTF-8 text"),
    ]:
        with pytest.raises(SettingsError) as error:
            load(path, {})
        assert error.value.problems == [f"{path}: {reason}"]


def test_a_file_is_named_in_its_mistakes(tmp_path: Path) -> None:
    """With the line where YAML itself is broken."""
    (path := tmp_path / "t.yaml").write_text("a: 1\na: 2", "utf-8")
    with pytest.raises(SettingsError) as error:
        load(path, {})
    assert error.value.problems == [f"{path}:2: 'a' is written twice"]


def test_without_a_file_the_demo_is_loaded() -> None:
    """It is valid, and the environment still counts."""
    assert load(None, {"TIDEGATE_PORT": "8080"}).gateway.port == 8080


PRODUCT = """
identity: {tenant: "jwt:team", unknown: reject, jwt: {jwks_file: jwks.json}}
upstreams:
  openai: {provider: openai, key_file: secrets/openai, limits: [{model: gpt-5, tpm: 2_000_000, rpm: 10_000}]}
  azure:
    provider: azure
    url: https://x.openai.azure.com
    key_file: secrets/azure
    models: {gpt-5: prod5}
    limits: [{model: gpt-5, tpm: 1_000_000}]
  vllm: {provider: vllm, url: http://vllm:8000, owned: true, models: {gpt-5: qwen3-32b}, concurrency: 64}
routes:
  - {models: [gpt-5], chain: [openai, azure, vllm]}
lanes:
  P0: {max_wait_s: 4, when_busy: spill}
  P1: {max_wait_s: 30, when_busy: spill}
  P2: {max_wait_s: 110, when_busy: hold}
tenants:
  chat: {lanes: [P0, P1], tpm: 1_500_000}
  etl:  {lanes: [P2], tpm: 800_000}
"""
POOL = """
upstreams:
  pool: {provider: vllm, url: http://vllm-headless:8000, owned: true, learn: true}
routes:
  - {models: ["*"], chain: [pool]}
"""
FULL = """
gateway: {port: 8080, workers: 2, max_message_timeout_s: 200}
service: {address: 'unix:/run/tidegate.sock', console: '[::1]:9', state_file: levels.json, restart_ramp_s: 0}
identity: {tenant: [api_key, 'header:x-team'], session_headers: [x-a, x-b]}
upstreams:
  a:
    provider: anthropic
    limits: [{itpm: 400_000, otpm: 80_000, rpm: 4000, burst_s: 6}, {model: big, tpm: 60}]
    headroom: 0
    window: 200_000
    burn: null
    usd_per_hour: 5
    usd_per_month: 900
    shadow: [usd_per_hour]
    prices: {m: [{input: 3, output: 15, from: 2026-02-01}, {input: 1, output: 2}], "*": {input: 1, output: 5}}
    accounting: upfront
    breaker: {failures: 9, cool_down_s: 1.5}
  f: {provider: fake, url: 'http://h:1/x/', owned: true, concurrency: 1, dialects: [openai], fake: {first_token_s: 0}}
routes: [{models: [m, 'x-*'], chain: [a, f], usd_per_day: 70}]
other_endpoints: f
lanes: {fast: {spill_after_s: 0}, slow: {max_requests: 5, when_busy: hold}}
tenants: {t: {lanes: [slow], key_sha256: [DIGEST], models: ['x-*'], rpm: 5, concurrency: 1}}
flood: {per_key_rps: null, per_address_rps: 5}
statuses: {lane_full: 529, queue_timeout: 503}
tokens: {default_output: 100, calibrate: false}
""".replace("DIGEST", DIGEST)


@pytest.mark.parametrize("text", [PLAIN, PRODUCT, POOL, FULL])
def test_what_is_in_force_can_be_written_and_read_again(text: str) -> None:
    """`check --show` prints a config that means the same."""
    settings = parse(text, "file", {})
    shown = yaml.safe_dump(settings.model_dump(mode="json"))
    assert parse(shown, "shown", {}) == settings


def test_the_product_example_means_what_it_says() -> None:
    """Chain, limits below the provider's by the headroom, buckets of ten seconds, lanes in order, tenants' lanes."""
    policy = parse(PRODUCT, "file", {}).policy()
    assert policy.routes[0].chain == ("openai", "azure", "vllm")
    limits = [
        (limit.model, limit.kind, limit.per_minute, round(limit.capacity))
        for limit in policy.upstreams["openai"].limits
    ]
    assert limits == [("gpt-5", Kind.TOTAL, 1_900_000, 316_667), ("gpt-5", Kind.REQUESTS, 9_500, 1_583)]
    assert policy.upstreams["azure"].own_name("gpt-5") == "prod5"
    assert [(lane.rank, lane.max_wait_s, lane.when_busy) for lane in policy.lanes.values()] == [
        (0, 4, WhenBusy.SPILL),
        (1, 30, WhenBusy.SPILL),
        (2, 110, WhenBusy.HOLD),
    ]
    assert (policy.tenants["chat"].default_lane, policy.tenants["etl"].lanes) == ("P1", ("P2",))
    assert policy.tenants["default"].lanes == ("P0", "P1", "P2")


def test_headroom_and_burst_make_the_bucket() -> None:
    """Refill is the limit less headroom; the bucket holds `burst_s` seconds of it. Headroom 0 takes all."""
    limits = parse(FULL, "file", {}).policy().upstreams["a"].limits
    assert limits == (
        Limit("*", Kind.INPUT, 400_000, 40_000),
        Limit("*", Kind.OUTPUT, 80_000, 8_000),
        Limit("*", Kind.REQUESTS, 4000, 400),
        Limit("big", Kind.TOTAL, 60, 10),
    )
    [halved] = (
        parse(plain(limits=[{"tpm": 600, "burst_s": 30}], headroom=0.5), "file", {}).policy().upstreams["a"].limits
    )
    assert halved == Limit("*", Kind.TOTAL, 300, 150)


def test_an_upstream_that_learns_claims_every_kind_from_the_start() -> None:
    """Nothing is counted before the provider has told its limits, but what is claimed can be counted later."""
    upstream = parse(POOL, "file", {}).policy().upstreams["pool"]
    assert {limit.kind for limit in upstream.limits} == set(Kind)
    assert not any(isfinite(limit.per_minute) for limit in upstream.limits)
    assert {limit.capacity for limit in upstream.limits} == {inf}


@pytest.mark.parametrize(
    ("lanes", "default"),
    [
        ("{lanes: [P0, P1, P2]}", "P1"),
        ("{lanes: [P2, P0]}", "P2"),
        ("{lanes: [P0]}", "P0"),
        ("{}", "P1"),
        ("{default_lane: P0}", "P0"),
    ],
)
def test_a_request_that_asks_for_no_lane_is_never_put_into_the_best_by_chance(lanes: str, default: str) -> None:
    """The tenant's default, else P1 where it may, else the first of its own lanes; lanes rank as they are written."""
    tenant = parse(PLAIN + f"tenants: {{t: {lanes}}}", "file", {}).policy().tenants["t"]
    assert tenant.default_lane == default
    assert list(tenant.lanes) == sorted(tenant.lanes)


def test_without_a_p1_whoever_is_free_to_choose_gets_the_last_lane() -> None:
    """Lanes of other names, and a tenant that may use all of them."""
    policy = parse(PLAIN + "lanes: {fast: {}, slow: {}}", "file", {}).policy()
    assert policy.tenants["default"].default_lane == "slow"


def test_statuses_have_defaults_and_can_be_changed() -> None:
    """Per reason."""
    settings = parse(FULL, "file", {})
    changed = {Reason.LANE_FULL: 529, Reason.QUEUE_TIMEOUT: 503}
    assert {reason: settings.status_of(reason) for reason in Reason} == {
        reason: changed.get(reason, RULES[reason].status) for reason in Reason
    }


@pytest.mark.parametrize("name", PROVIDERS)
def test_every_provider_can_be_used_with_a_key_and_a_limit(name: str) -> None:
    """Those without a URL of their own need one; where, how and when it charges has a default each."""
    url = None if PROVIDERS[name].url else "https://h"
    upstream = parse(plain(provider=name, url=url, key_file="k"), "file", {}).upstreams["a"]
    assert upstream.path == PROVIDERS[name].path
    assert (upstream.tls, upstream.port) == (True, 443)
    rules = upstream.rules("a")
    assert rules.accounting is PROVIDERS[name].accounting
    assert rules.dialects == frozenset(PROVIDERS[name].dialects)


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://h", "h", 80, "/v1"),
        ("https://h:8443/", "h", 8443, "/v1"),
        ("https://H.example/llm/v1/", "h.example", 443, "/llm/v1"),
        ("http://[::1]:5", "::1", 5, "/v1"),
    ],
)
def test_a_url_is_where_to_connect_and_what_stands_for_v1(url: str, host: str, port: int, path: str) -> None:
    """Host, port by scheme, and the path in place of the gateway's `/v1`."""
    upstream = parse(plain(url=url), "file", {}).upstreams["a"]
    assert (upstream.host, upstream.port, upstream.path) == (host, port, path)


def test_settings_are_frozen() -> None:
    """What was checked stays as it was checked."""
    settings = parse(FULL, "file", {})
    assert settings.upstreams["f"].rules("f").dialects == {Dialect.OPENAI}
    assert settings.upstreams["a"].rules("a").accounting is Accounting.UPFRONT
    with pytest.raises(ValueError, match="frozen"):
        settings.internal_headers = False  # type: ignore[misc]


def test_the_longest_wait_decides_how_long_envoy_lets_a_request_be() -> None:
    """Five seconds more than the longest lane, unless it is set."""
    assert parse(PLAIN, "file", {}).max_message_timeout_s == 115
    assert parse(FULL, "file", {}).max_message_timeout_s == 200


@pytest.mark.parametrize(
    ("limits", "enough"),
    [
        ({"concurrency": None, "limits": [{"tpm": 9}]}, False),
        ({"concurrency": None, "limits": [{"model": "m", "rpm": 9}]}, False),
        ({"concurrency": None, "limits": [{"rpm": 9}]}, True),
        ({"concurrency": None, "learn": True}, True),
        ({}, True),
    ],
)
def test_other_endpoints_are_never_unlimited(limits: dict[str, Any], enough: bool) -> None:  # noqa: FBT001
    """They have no tokens to count, so requests or concurrency must be limited where they go."""
    text = plain(**limits) + "other_endpoints: a"
    if enough:
        assert parse(text, "file", {}).policy().other is not None
    else:
        assert problems(text)[0].startswith("other_endpoints: nothing limits them at 'a'")


def test_other_endpoints_go_to_their_upstream_or_nowhere() -> None:
    """A route of their own, for models of any name."""
    assert parse(PLAIN, "file", {}).policy().other is None
    other = parse(FULL, "file", {}).policy().other
    assert other is not None
    assert (other.models, other.chain) == (("*",), ("f",))


def test_defaults_can_be_built_without_a_file() -> None:
    """Every section but upstreams and routes has defaults that pass their own checks."""
    settings = Settings.model_validate(yaml.safe_load(PLAIN))
    assert list(settings.problems()) == []


def test_a_model_that_nothing_limits_is_a_mistake() -> None:
    """A limit for another model would leave the routed one without any."""
    with pytest.raises(SettingsError) as wrong:
        parse(
            "upstreams: {a: {provider: openai, owned: true, limits: [{model: x, tpm: 1000}]}}\n"
            "routes: [{models: [m], chain: [a]}]",
            "t.yaml",
        )
    assert wrong.value.problems == ["t.yaml: upstreams.a.limits: nothing limits 'm', which routes[0] sends there"]


def test_refusing_everybody_is_a_mistake() -> None:
    """`reject` without a tenant would let nobody in."""
    with pytest.raises(SettingsError, match=r"identity.unknown: reject refuses everybody"):
        parse(
            "identity: {unknown: reject}\n"
            "upstreams: {a: {provider: vllm, url: 'http://a', owned: true, concurrency: 1}}\n"
            "routes: [{models: [m], chain: [a]}]",
            "t.yaml",
        )


def test_relative_files_are_beside_the_config_file(tmp_path: Path) -> None:
    """Wherever the command is run, `key_file: secrets/key` means the one beside the config; absolute ones stay."""
    config = tmp_path / "t.yaml"
    config.write_text(
        "upstreams: {a: {provider: openai, owned: true, concurrency: 1, key_file: secrets/key, ca_file: /etc/ca.pem}}\n"
        "routes: [{models: [m], chain: [a]}]\nservice: {state_file: levels.json}\n"
        "gateway: {secrets_dir: told}\nadmin: {token_file: token, audit_file: audit}\n"
        "telemetry: {otlp: {endpoint: 'http://c', headers_file: headers}}",
        "utf-8",
    )
    settings = load(config, {})
    assert settings.upstreams["a"].key_file == str(tmp_path / "secrets/key")
    assert settings.upstreams["a"].ca_file == "/etc/ca.pem"
    assert settings.service.state_file == str(tmp_path / "levels.json")
    assert settings.gateway.secrets_dir == str(tmp_path / "told")
    assert settings.admin.token_file == str(tmp_path / "token")
    assert settings.admin.audit_file == str(tmp_path / "audit")
    assert settings.telemetry.otlp is not None
    assert settings.telemetry.otlp.headers_file == str(tmp_path / "headers")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"kv": {"high": 0.7}}, "upstreams.a.kv.low: must be below high"),
        ({"kv": {"lanes": {"P2": {"high": 0.5, "low": 0.5}}}}, "upstreams.a.kv.lanes.P2: low must be below high"),
        ({"kv": {"lanes": {"P9": {"high": 0.5, "low": 0.4}}}}, "upstreams.a.kv.lanes: unknown lane 'P9'; known: P0, "),
        ({"kv": {"query": "x"}}, "upstreams.a.kv.prometheus: needs a query, and a query needs it"),
        (
            {"kv": {"prometheus": "http://u:p@h", "query": "x"}},
            "upstreams.a.kv.prometheus: may have no user, query or ",
        ),
        ({"kv": {"scrape_s": 0.01}}, "upstreams.a.kv.scrape_s: Input should be greater than or equal to 0.05"),
        ({"kv": {"scrape_s": 3}}, "upstreams.a.kv.stale_s: must be at least twice scrape_s"),
        ({"kv": {"path": "metrics"}}, "upstreams.a.kv.path: String should match pattern"),
        ({"kv": {"metrics": {"waiting": "x"}}}, "upstreams.a.kv.metrics.usage: is required"),
        ({"kv": {"metrics": {"usage": "my share"}}}, "upstreams.a.kv.metrics.usage: String should match pattern"),
        (
            {"provider": "openai", "kv": {}},
            "upstreams.a.kv: name the metrics of provider openai, or a prometheus query",
        ),
        ({"provider": "openai", "engine_priority": True}, "upstreams.a.engine_priority: provider openai has none"),
        ({"fake": {"engine": "tgi"}}, "upstreams.a.fake.engine: Input should be 'vllm' or 'sglang'"),
    ],
)
def test_each_mistake_about_an_engine_is_one_line_with_its_path(change: dict[str, Any], line: str) -> None:
    """Marks, metrics and priorities."""
    [found] = problems(plain(**change))
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("upstream", "sign", "usage"),
    [
        ({"provider": "vllm"}, -1, "vllm:kv_cache_usage_perc"),
        ({"provider": "sglang"}, 1, "sglang:token_usage"),
        ({}, -1, "vllm:kv_cache_usage_perc"),
        ({"fake": {"engine": "sglang"}}, 1, "sglang:token_usage"),
        ({"provider": "sglang", "kv": {"metrics": {"usage": 'x{kind="used"}'}}}, 1, 'x{kind="used"}'),
    ],
)
def test_an_engine_is_known_by_its_provider(upstream: dict[str, Any], sign: int, usage: str) -> None:
    """In which direction its priorities go, and how it names its metrics; a fake is taken for what it plays."""
    found = parse(plain(**{"kv": {}, "engine_priority": True, **upstream}), "file", {}).upstreams["a"]
    assert found.rules("a").engine_priority == sign
    assert found.engine_metrics is not None
    assert found.engine_metrics.usage[0] == usage
    assert found.model_copy(update={"engine_priority": False}).rules("a").engine_priority is None


def test_what_a_prometheus_tells_may_be_older() -> None:
    """By as much as it lags is stale later."""
    scraped = parse(plain(kv={}), "file", {}).upstreams["a"].kv
    asked = parse(plain(kv={"prometheus": "http://p", "query": "x"}), "file", {}).upstreams["a"].kv
    assert scraped is not None
    assert asked is not None
    assert (scraped.rules().stale_s, asked.rules().stale_s) == (5.0, 20.0)


@pytest.mark.parametrize(
    ("upstream", "model"),
    [
        ({}, "m"),
        ({"models": {"m": "own"}}, "own"),
        ({"models": {"m": "own"}, "canary_model": "tiny"}, "tiny"),
    ],
)
def test_a_model_that_an_upstream_serves(upstream: dict[str, Any], model: str) -> None:
    """For calls of our own: the cheapest where it is told, by the upstream's own name."""
    assert parse(plain(**upstream), "file", {}).model_of("a") == model


def test_of_an_upstream_that_serves_only_patterns_no_model_is_known() -> None:
    """Callers name them."""
    assert parse(PLAIN.replace("[m]", "['*']"), "file", {}).model_of("a") == ""


def rented(**upstream: Any) -> str:
    """The plain config with an upstream that is not owned."""
    raw = yaml.safe_load(plain(owned=False, **upstream))
    raw["routes"][0]["acknowledge_unowned"] = True
    return yaml.safe_dump(raw)


def test_each_sign_of_a_breaker_can_be_turned_off_and_set() -> None:
    """Null turns it off; what is not said keeps its default."""
    off = {"failures": None, "paced": None, "errors": None, "slow": None, "malformed": None, "quarantine_s": None}
    rules = parse(rented(breaker=off), "file", {}).policy().upstreams["a"].breaker
    signs = (rules.failures, rules.paced, rules.errors, rules.slow, rules.malformed, rules.quarantine_s)
    assert signs == (None,) * 6
    some = {"errors": {"share": 0.2}, "slow": {"times": 4, "median_times": None}, "malformed": {"volume": 50}}
    rules = parse(rented(breaker=some), "file", {}).policy().upstreams["a"].breaker
    assert rules.errors == RatioRules(0.2, 30.0, 20)
    assert rules.slow == SlowRules(times=4.0, median_times=None)
    assert rules.malformed == RatioRules(0.3, 300.0, 50)
    assert parse(rented(), "file", {}).policy().upstreams["a"].breaker == BreakerRules()


def test_what_is_owned_is_not_sick_for_being_slow() -> None:
    """Unless it is written: nothing stands behind it, and queues make it slow."""
    assert parse(plain(owned=True), "file", {}).policy().upstreams["a"].breaker == BreakerRules(slow=None)
    rules = parse(plain(owned=True, breaker={"slow": {}}), "file", {}).policy().upstreams["a"].breaker
    assert rules.slow == SlowRules()


@pytest.mark.parametrize(
    ("breaker", "said"),
    [
        ({"cool_down_s": 60}, "cool_down_max_s: must be at least cool_down_s"),
        ({"quarantine_s": 9000}, "quarantine_max_s: must be at least quarantine_s"),
        ({"errors": {"share": 0}}, "errors.share"),
        ({"slow": {"times": 1}}, "slow.times"),
        ({"failures": 0}, "failures"),
        ({"malformed": {"bad": 1}}, "malformed.bad"),
    ],
)
def test_breakers_that_make_no_sense_are_refused(breaker: dict[str, object], said: str) -> None:
    """With the place in the file."""
    with pytest.raises(SettingsError) as caught:
        parse(plain(breaker=breaker), "file", {})
    assert said in str(caught.value)


def test_prices_may_change_on_a_day() -> None:
    """Midnight UTC, or the time that is given; in whatever order they are written. A mapping alone holds for ever."""
    dated = [
        {"input": 3, "output": 3, "from": date(2026, 2, 1)},
        {"input": 1, "output": 1},
        {"input": 4, "output": 4, "from": datetime.fromisoformat("2026-02-01T12:00:00+02:00")},
        {"input": 2, "output": 2, "from": "2026-01-01"},
    ]
    text = plain(owned=True, prices={"m": dated, "n": {"input": 9, "output": 9}})
    prices = parse(text, "test").policy().upstreams["a"].prices
    begin = [datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC), datetime(2026, 2, 1, 10, tzinfo=UTC)]
    assert [(one.input, one.since) for one in prices["m"]] == [
        (1, -inf), *((usd, at.timestamp()) for usd, at in zip((2, 3, 4), begin, strict=True))
    ]  # fmt: skip
    assert prices["n"] == (Prices(9, 9),)


def test_dollars_are_limited_for_tenants_routes_and_upstreams() -> None:
    """Per hour, day and month, each on its own; a limit may only be watched."""
    policy = parse(FULL.replace("rpm: 5,", "rpm: 5, usd_per_day: 3, usd_per_month: 40,"), "test").policy()
    assert policy.upstreams["a"].dollars == Dollars(5, None, 900)
    assert policy.upstreams["a"].shadow == {"usd_per_hour"}
    assert policy.routes[0].dollars == Dollars(per_day=70)
    assert policy.tenants["t"].dollars == Dollars(None, 3, 40)
    assert not policy.tenants["default"].dollars.limited
    assert [policy.upstreams[name].burn for name in "af"] == [None, 0.85]
