"""The classic profile as it is rendered, and what its gates make of what admission tells them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from lupa import luajit21

from extproc.core.orders import name_of, orders_of
from extproc.render.envoy import bootstrap
from extproc.render.lua import gate_script
from extproc.render.parts import OURS, parts
from extproc.settings import Settings, parse
from tests.render.rig import settings_of, upstream
from tests.render.streams import HOSTILE

CASES = 1000

# ------------------------------------------------------------------------------------------ what is rendered

TOO_NEW = (
    "priority_group",
    "refresh_cluster_on_retry",
    "upstream_codec",
    "HttpResponseLocalReplyMatchInput",
    "response_code_details",
    "body_format",
    "header_value_prefix",
)
"""What Envoy 1.36 does not know, or cannot do here: extensions, and fields of messages."""


@pytest.fixture(scope="module")
def settings() -> Settings:
    """Three upstreams with keys, in one chain; two of them in another."""
    keyed = {"provider": "openai", "key_file": "/keys/a"}
    routes = '[{models: [one], chain: [a, b], acknowledge_unowned: true}, {models: ["*"], chain: [a, b, c]}]'
    return settings_of(
        f"gateway: {{profile: classic}}\nroutes: {routes}",
        a=upstream(1, **keyed),
        b=upstream(2, hold_headers=True),
        c=upstream(3, owned=True),
    )


def every(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All values, each with the keys that lead to it."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from every(value, (*path, key))
    elif isinstance(data, list):
        for value in data:
            yield from every(value, path)
    else:
        yield path, data


def test_nothing_is_used_that_older_envoys_do_not_know(settings: Settings) -> None:
    for path, value in every(bootstrap(settings)["static_resources"]):
        if "inline_string" in path:
            continue
        for name in TOO_NEW:
            in_direct = "direct_response" in path or name != "body_format"
            assert not (name in path and in_direct), (name, path)
            assert not (in_direct and isinstance(value, str) and name in value), (name, path)


def test_the_native_profile_does_use_it(settings: Settings) -> None:
    """So that the test above would notice."""
    native = settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"profile": "native"})})
    text = json.dumps(bootstrap(native))
    assert all(name in text for name in TOO_NEW)


def test_every_order_has_a_cluster_of_gates(settings: Settings) -> None:
    clusters = {cluster["name"]: cluster for cluster in bootstrap(settings)["static_resources"]["clusters"]}
    orders = orders_of(route.chain for route in settings.routes)
    assert len(orders) == 12
    for order in orders:
        members = clusters[name_of(order)]["cluster_type"]["typed_config"]["clusters"]
        assert members == [name_of((name,)) for name in order]
        assert set(members) <= clusters.keys()


def test_a_gate_is_where_its_cluster_says(settings: Settings) -> None:
    rendered = bootstrap(settings)["static_resources"]
    listeners = {listener["name"]: listener for listener in rendered["listeners"]}
    clusters = {cluster["name"]: cluster for cluster in rendered["clusters"]}
    for name in "abc":
        (endpoint,) = clusters[name_of((name,))]["load_assignment"]["endpoints"][0]["lb_endpoints"]
        place = listeners[f"tidegate.gate.{name}"]["address"]
        assert place == endpoint["endpoint"]["address"]
        assert place["pipe"]["path"].endswith(f"/{name}")
        options = clusters[name]["typed_extension_protocol_options"].values()
        assert all("http_filters" not in each for each in options)


def test_gates_listen_nowhere_else(settings: Settings) -> None:
    """Nor do they close with the main listener when Envoy drains: what is inbound does."""
    inbound = [x["name"] for x in bootstrap(settings)["static_resources"]["listeners"] if "traffic_direction" in x]
    assert inbound == ["tidegate"]
    gates = [x for x in bootstrap(settings)["static_resources"]["listeners"] if x["name"].startswith("tidegate.gate.")]
    assert len(gates) == 3
    assert all(set(gate["address"]) == {"pipe"} and gate["address"]["pipe"]["path"][0] == "@" for gate in gates)


def test_what_a_gate_says_itself_is_known_by_its_name(settings: Settings) -> None:
    """Not all replies that Envoy makes pass its filters: the first word of each has to have it."""
    for gate in bootstrap(settings)["static_resources"]["listeners"]:
        if gate["name"].startswith("tidegate.gate."):
            replies = gate["filter_chains"][0]["filters"][0]["typed_config"]["local_reply_config"]["mappers"]
            for reply in replies:
                header = reply["headers_to_add"][0]["header"]
                assert (header["key"], header["value"]) == (
                    "x-tidegate-gate",
                    gate["name"].removeprefix("tidegate.gate."),
                )
            assert "response.code >= 400" in json.dumps(replies[-1])


def test_parts_for_an_envoy_that_is_there_have_gates(settings: Settings) -> None:
    ours = parts(settings)
    assert {listener["name"] for listener in ours.listeners} == {f"{OURS}probe", *(f"{OURS}gate.{x}" for x in "abc")}
    assert ours.access_log == []
    told = json.dumps(ours.upstream_log)
    assert "startsWith('tidegate:')" in told
    assert "x-tg-flags" in told
    assert all("tidegate" in cluster.get("metadata", {}).get("filter_metadata", {}) for cluster in ours.clusters)


def test_a_profile_that_there_is_not_is_told() -> None:
    with pytest.raises(Exception, match=r"gateway\.profile"):
        parse(json.dumps({"gateway": {"profile": "old"}}), "test")


# ------------------------------------------------------------------------------------- what a gate is told

PLAY = b"""
function told(text)
  local headers, written = { ["x-tidegate-route"] = text, [":path"] = "/v1/x" }, {}
  local handle = {
    headers = function() return {
      get = function(_, name) return headers[name] end,
      remove = function(_, name) headers[name] = nil end,
    } end,
    streamInfo = function() return { dynamicMetadata = function() return {
      set = function(_, namespace, key, value) written[namespace .. "/" .. key] = value end,
    } end } end,
    logErr = function(_, text) error(text) end,
  }
  envoy_on_request(handle)
  return written, headers["x-tidegate-route"]
end
"""


def gate() -> Any:
    """`told`, from outside: text in; what was written, and what is left of the header."""
    lua = luajit21.LuaRuntime(encoding=None)
    lua.execute(gate_script("x-tidegate-route").encode())
    lua.execute(PLAY)
    return lua.globals()[b"told"]


def plain(value: Any) -> Any:
    """A value of Lua as Python has it; a table with numbers for keys is a list."""
    if luajit21.lua_type(value) == "table":
        keys = list(value.keys())
        if keys and all(isinstance(key, int) for key in keys):
            return [plain(value[i + 1]) for i in range(len(keys))]
        return {key.decode(): plain(value[key]) for key in keys}
    return value.decode() if isinstance(value, bytes) else value


def words(chance: random.Random) -> dict[str, Any]:
    """What admission may write."""

    def text() -> str:
        # Half of a pair alone is no text, and never sent.
        return "".join(
            c
            for c in "".join(chance.choices([*HOSTILE, "\\", "\0", "😀", "ü", "\u2028"], k=4))
            if c < "\ud800" or c > "\udfff"
        )

    return {
        "priority_groups": [{"name": f"n{i}"} for i in range(chance.randrange(1, 4))],
        "again": chance.random() < 0.5,
        "deadline_ms": chance.choice([1, 1500, 1.5e3, 12345678]),
        "heads": {f"n{i}": text() for i in range(chance.randrange(1, 3))},
        "tenant": text(),
    }


def test_a_gate_reads_what_admission_wrote() -> None:
    told, seed = gate(), random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - to find it again
    for case in range(CASES):
        written = words(random.Random(seed + case))
        found, left = told(json.dumps(written, separators=(",", ":")).encode())
        assert left is None
        assert {key.decode(): plain(value) for key, value in found.items()} == {
            f"llm.route/{key}": value for key, value in {**written, "path": "/v1/x"}.items()
        }, (seed, case)


def test_a_gate_without_words_is_left_alone() -> None:
    assert dict(gate()(None)[0].items()) == {}
