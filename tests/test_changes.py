"""What two configurations differ in, and which of it can be followed without rendering Envoy's config again."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from extproc.render.envoy import bootstrap
from extproc.settings import Settings, SettingsError, load, parse
from extproc.settings.changes import Need, differences, follow, version_of

RICH: dict[str, Any] = {
    "upstreams": {
        "a": {
            "provider": "openai", "url": "https://a.test/v1", "key_file": "/key", "ca_file": "/ca",
            "limits": [{"tpm": 60_000, "rpm": 600}], "models": {"m": "m-a"}, "breaker": {}, "window": 30_000,
            "prices": {"m-a": {"input": 1.0, "output": 2.0}}, "usd_per_day": 5,
            "client_cert_file": "/cert", "client_key_file": "/cert.key",
        },
        "engine": {
            "provider": "vllm", "url": "http://engine:8000", "kv": {"lanes": {"P0": {"high": 0.9, "low": 0.8}}},
            "concurrency": 8, "owned": True, "window": 50_000,
        },
        "free": {"provider": "fake", "url": "http://127.0.0.1:9", "owned": True, "concurrency": 3, "fake": {}},
    },
    "routes": [{"models": ["m", "n"], "chain": ["a", "engine"]}, {"models": ["last*"], "chain": ["free"]}],
    "other_endpoints": "free",
    "service": {
        "tls": {
            "cert_file": "/tls.pem", "key_file": "/tls.key", "ca_file": "/ca", "client_ca_file": "/ca",
            "client_cert_file": "/envoy.pem", "client_key_file": "/envoy.key",
        },
    },
    "identity": {"jwt": {"jwks_file": "/jwks"}},
    "tenants": {"one": {"tpm": 1000, "sessions": {}}},
    "telemetry": {"otlp": {"endpoint": "http://collector:4318"}},
}  # fmt: skip

LIVE: dict[str, Any] = {
    "gateway.drain_s": 10,
    "service.replicas": 2,
    "service.drain_s": 10,
    "service.state_file": "/levels",
    "service.restart_ramp_s": 1,
    "service.record_grace_s": 7,
    "identity.tenant": ["jwt:team", "header:x-team", "api_key"],
    "identity.unknown": "reject",
    "identity.session_headers": ["x-agent", "x-tidegate-session"],
    "identity.session_window_s": 60,
    "upstreams.a.usd_per_hour": 3,
    "upstreams.a.usd_per_day": 3,
    "upstreams.a.usd_per_month": 30,
    "upstreams.a.models": {"m": "m-b", "n": "n-a"},
    "upstreams.a.limits": [{"model": "m", "itpm": 9000, "otpm": 500, "rpm": 8, "burst_s": 2, "shadow": True}],
    "upstreams.a.headroom": 0.2,
    "upstreams.a.concurrency": 4,
    "upstreams.free.learn": True,
    "upstreams.a.window": 40_000,
    "upstreams.a.lacks": ["images"],
    "upstreams.a.accounting": "actual",
    "upstreams.a.canary_model": "small",
    "upstreams.a.breaker": {"failures": 7, "paced": 1, "errors": {"share": 0.1, "window_s": 3, "volume": 4}},
    "upstreams.a.breaker.slow": {
        "times": 5, "median_times": 4, "share": 0.1, "window_s": 10, "volume": 5, "least_s": 2
    },
    "upstreams.a.breaker.malformed": {"share": 0.5, "window_s": 10, "volume": 9},
    "upstreams.a.breaker.cool_down_s": 1,
    "upstreams.a.breaker.cool_down_max_s": 100,
    "upstreams.a.breaker.quarantine_s": 100,
    "upstreams.a.breaker.quarantine_max_s": 1000,
    "upstreams.a.breaker.ramp_s": 1,
    "upstreams.a.breaker.ramp_from": 3,
    "upstreams.a.follow_headers": False,
    "upstreams.a.ramp": True,
    "upstreams.a.prices": {
        "*": [{"from": "2026-01-01", "input": 1, "output": 1, "cached": 1, "cache_write": 1, "reasoning": 1}]
    },
    "upstreams.a.burn": 0.5,
    "upstreams.a.shadow": ["concurrency"],
    "upstreams.a.kv": {"prometheus": "http://p", "query": "q", "prometheus_lag_s": 1, "shadow": True},
    "upstreams.engine.engine_priority": True,
    "upstreams.engine.kv": {"high": 0.6, "low": 0.5, "waiting": 1, "tokens": 9, "trickle_rps": 2},
    "upstreams.engine.kv.scrape_s": 1.0,
    "upstreams.engine.kv.stale_s": 9.0,
    "upstreams.engine.kv.path": "/other",
    "upstreams.engine.kv.metrics": {"usage": "u", "waiting": "w", "running": "r", "preemptions": "p", "tokens": "t"},
    "upstreams.engine.kv.lanes.P0": {"high": 0.8, "low": 0.1},
    "routes": [{"models": ["m", "o"], "chain": ["a", "engine"], "observe": 0.5, "usd_per_hour": 1,
                "usd_per_day": 2, "usd_per_month": 3, "shadow": ["usd_per_day"], "first_token_s": 20},
               {"models": ["last*"], "chain": ["free"]},
               {"models": ["x"], "chain": ["engine", "a"], "acknowledge_unowned": True}],
    "lanes": {"P1": {"min_share": 0.2}, "fast": {"max_wait_s": 1}, "P0": {"max_wait_s": 110}},
    "lanes.P1.max_wait_s": 9,
    "lanes.P0.when_busy": "hold",
    "lanes.P0.spill_after_s": 9,
    "lanes.P0.max_requests": 9,
    "lanes.P0.max_tokens": 9,
    "lanes.P0.max_bytes": 9,
    "lanes.P0.min_share": 0.1,
    "lanes.P0.keep_free": 0.1,
    "lanes.P0.pacing": "smooth",
    "lanes.P0.order": "edf",
    "lanes.P0.vip_share": 0.1,
    "lanes.P0.lifo_above": 0.1,
    "lanes.P0.shadow": ["max_bytes"],
    "queue": {"max_requests": 5, "max_tokens": 6, "max_bytes": 7},
    "tenants": {"two": {"lanes": ["P0"], "default_lane": "P0", "models": ["m"], "key_sha256": ["ab" * 32], "tpm": 5,
                        "rpm": 5, "concurrency": 5, "weight": 2, "vip": True, "shadow": ["tpm"], "usd_per_hour": 1,
                        "usd_per_day": 1, "usd_per_month": 1, "sessions": {}}},
    "sessions": {"max_tokens": 9, "max_usd": 9, "idle_s": 9, "derived": True, "new_share": 0.5, "limit": 9,
                 "shadow": ["max_usd"]},
    "retries": {"share": 0.5, "least_per_s": 5},
    "other_endpoints": None,
    "observe": 0.5,
    "timeouts.first_token_s": 9,
    "timeouts.prompt_tokens_per_s": 9,
    "timeouts.answer_s": 9,
    "tokens": {"default_output": 9, "output_percentile": 0.5, "sample_above_bytes": 9, "calibrate": False},
    "statuses": {"queue_timeout": 503, "lane_full": 503},
    "telemetry.log": {"level": "info", "slow_s": 1, "sample": 0.5},
}  # fmt: skip
ENVOY: dict[str, Any] = {
    "gateway.address": "0.0.0.0",
    "gateway.port": 5,
    "gateway.admin_port": 5,
    "gateway.probe_port": 5,
    "gateway.metrics_port": 5,
    "gateway.max_body_bytes": 5000,
    "gateway.max_answer_bytes": 5000,
    "gateway.message_timeout_s": 5,
    "gateway.max_message_timeout_s": 500,
    "gateway.upload_timeout_s": 5,
    "gateway.idle_timeout_s": 500,
    "gateway.secrets_dir": "/secrets",
    "service.address": "127.0.0.1:5",
    "service.addresses": ["127.0.0.1:10003"],
    "service.tls": None,
    "service.tls.ca_file": "/other",
    "service.tls.server_name": "other.test",
    "service.tls.client_cert_file": "/other",
    "service.tls.client_key_file": "/other",
    "identity.tenant": "header:x-tidegate-team",
    "identity.session_headers": ["x-tidegate-agent"],
    "identity.jwt": None,
    "identity.jwt.issuer": "x",
    "identity.jwt.audiences": ["x"],
    "identity.jwt.jwks_file": "/x",
    "identity.jwt.header": "x-jwt",
    "upstreams.a.url": "https://b.test/v1",
    "upstreams.a.key_file": "/other",
    "upstreams.a.ca_file": "/other",
    "upstreams.a.client_cert_file": "/other",
    "upstreams.a.client_key_file": "/other",
    "upstreams.a.connect_timeout_s": 5,
    "upstreams.a.hold_headers": True,
    "upstreams.engine.owned": False,
    "upstreams.a.window": 60_000,
    "upstreams.a.dialects": ["openai", "anthropic"],
    "upstreams.a.provider": "azure",
    "lanes.P2.max_wait_s": 200,
    "routes": [{"models": ["m"], "chain": ["a", "engine"], "last_resort": {"text": "sorry", "no_upstream": True}}],
    "flood.per_key_rps": 5,
    "flood.per_address_rps": 5,
    "flood.burst_s": 5,
    "flood.max_keys": 5,
    "timeouts.stall_s": 5,
    "internal_headers": False,
    "statuses": {"tenant_quota": 503},
    "telemetry.otlp": None,
    "telemetry.otlp.endpoint": "https://c",
    "telemetry.otlp.headers_file": "/headers",
    "telemetry.otlp.traces": False,
    "telemetry.trace_sample": 0.5,
}
RESTART: dict[str, Any] = {
    "gateway.workers": 3,
    "service.console": "127.0.0.1:5",
    "service.watchdog_s": 9,
    "service.socket_mode": 0o600,
    "service.socket_group": "envoy",
    "service.health": "127.0.0.1:5",
    "service.tls.cert_file": "/other",
    "service.tls.key_file": "/other",
    "service.tls.client_ca_file": "/other",
    "telemetry.otlp.metrics": False,
    "telemetry.otlp.every_s": 1,
    "telemetry.requests": 9,
    "telemetry.tenants": 9,
    "admin.token_file": "/token",
    "admin": {"cert_file": "/cert", "key_file": "/key", "client_ca_file": "/ca", "audit_file": "/audit"},
    "upstreams.free.fake": {
        "first_token_s": 1, "prompt_tokens_per_s": 1, "output_tokens_per_s": 1, "tokens_per_event": 1, "burst_s": 1,
        "engine": "sglang", "concurrency": 1, "queue": 1, "kv_tokens": 1,
    },
}  # fmt: skip


def settings(raw: dict[str, Any] | None = None, profile: str = "native") -> Settings:
    told = {"gateway": {"profile": profile}, **(RICH if raw is None else raw)}
    return parse(yaml.safe_dump(told, sort_keys=False), "test")


def changed(place: str, value: Any, profile: str = "native") -> Settings:
    """The rich settings with one place changed, cross-checks apart: what matters is what is rendered."""
    raw = settings(profile=profile).model_dump(mode="json")
    *above, last = place.split(".")
    section = raw
    for key in above:
        section = section[key]
    section[last] = value
    return Settings.model_validate(raw)


@pytest.mark.parametrize("profile", ["native", "classic"])
@pytest.mark.parametrize(("place", "value"), [*LIVE.items(), *RESTART.items()], ids=[*LIVE, *RESTART])
def test_what_is_live_or_needs_a_restart_renders_the_same(place: str, value: Any, profile: str) -> None:
    """Envoy need not know of it."""
    old, new = settings(profile=profile), changed(place, value, profile)
    found = differences(old, new)
    assert found
    assert {one.need for one in found} == {Need.LIVE if place in LIVE else Need.RESTART}, list(map(str, found))
    assert bootstrap(old) == bootstrap(new)
    assert version_of(old) != version_of(new)


@pytest.mark.parametrize(("place", "value"), ENVOY.items(), ids=ENVOY)
def test_what_is_said_to_need_rendering_renders_differently(place: str, value: Any) -> None:
    """And the running service keeps the old value of it, for as long as Envoy does."""
    old, new = settings(), changed(place, value)
    needs = {one.need for one in differences(old, new)}
    assert Need.ENVOY in needs
    assert bootstrap(old) != bootstrap(new)
    held, waiting = follow(old, new)
    assert waiting
    assert not any(one.need is Need.ENVOY for one in differences(old, held))


@pytest.mark.parametrize("otlp", [None, {"endpoint": "http://collector:4318", "traces": False}])
@pytest.mark.parametrize(
    ("place", "value"),
    [("telemetry.trace_sample", 0.5), ("telemetry.otlp", {"endpoint": "http://c", "traces": False, "every_s": 3})],
)
def test_envoy_need_not_know_of_a_collector_that_takes_no_traces(otlp: Any, place: str, value: Any) -> None:
    """Tidegate sends the metrics."""
    without = settings({**RICH, "telemetry": {"otlp": otlp}})
    new = without.model_dump(mode="json")
    new["telemetry"][place.removeprefix("telemetry.")] = value
    changed = Settings.model_validate(new)
    assert {one.need for one in differences(without, changed)} == {Need.RESTART}
    assert bootstrap(without) == bootstrap(changed)


def leaves(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Names of all settings that are no sections, by the section's class."""
    for name, field in model.model_fields.items():
        inner = [kind for kind in _classes(field.annotation) if issubclass(kind, BaseModel)]
        if not inner:
            yield f"{above}{name}" if above else name
        for kind in inner:
            yield from leaves(kind, f"{kind.__name__}.")


def _classes(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        yield annotation
    for argument in (
        *getattr(annotation, "__args__", ()),
        *([annotation.__value__] if hasattr(annotation, "__value__") else ()),
    ):
        yield from _classes(argument)


def test_every_setting_is_tried() -> None:
    """A setting that is new has to be put into one of the lists above."""

    def words(place: str, value: Any) -> Iterator[str]:
        yield from place.split(".")
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                for key, inner in each.items():
                    yield from words(str(key), inner)

    tried = {word for each in (LIVE, ENVOY, RESTART) for place, value in each.items() for word in words(place, value)}
    tried |= {"since", "text", "profile"}  # written otherwise, or rendered in more than one place
    untried = {place for place in leaves(Settings) if place.rpartition(".")[2] not in tried}
    assert untried == set(), "say in a list above what a change of it needs"


def test_envoy_has_to_know_whether_the_console_speaks_tls() -> None:
    """Where it shows the console's metrics, and only whether it does."""
    for metrics_port, need in ((None, Need.RESTART), (5, Need.ENVOY)):
        plain, one, other = (deepcopy(RICH) for _ in range(3))
        for raw in (plain, one, other):
            raw["gateway"] = {**raw.get("gateway", {}), "metrics_port": metrics_port}
        one["admin"] = {"cert_file": "/a", "key_file": "/k"}
        other["admin"] = {"cert_file": "/b", "key_file": "/k"}
        for old, new, wanted in ((plain, one, need), (one, plain, need), (one, other, Need.RESTART)):
            found = {each.place: each.need for each in differences(settings(old), settings(new))}
            assert found["admin.cert_file"] is wanted


def test_new_and_removed_upstreams_wait_and_the_rest_is_followed() -> None:
    """What runs keeps the upstreams it has; that a limit changes beside them is followed all the same."""
    raw = deepcopy(RICH)
    raw["upstreams"]["b"] = {"provider": "groq", "concurrency": 2}
    raw["upstreams"]["a"]["limits"][0]["tpm"] = 1
    raw["routes"][1]["chain"] = ["engine"]
    del raw["upstreams"]["free"]
    raw["other_endpoints"] = "engine"
    old, new = settings(), settings(raw)
    assert {one.place: one.need for one in differences(old, new)} == {
        "upstreams.a.limits.*.tpm": Need.LIVE,
        "upstreams.free": Need.ENVOY,
        "upstreams.b": Need.ENVOY,
        "routes.last*.chain": Need.LIVE,
        "other_endpoints": Need.LIVE,
    }
    held, waiting = follow(old, new)
    assert list(map(str, waiting)) == ["upstreams.free: removed", "upstreams.b: added"]
    assert set(held.upstreams) == {"a", "engine", "free"}
    assert (held.upstreams["a"].limits[0].tpm, held.routes[1].chain) == (1, ("engine",))


def test_what_makes_no_sense_without_what_has_to_wait_is_refused_by_name() -> None:
    """A route to an upstream that Envoy does not have cannot be followed, nor anything beside it."""
    raw = deepcopy(RICH)
    raw["upstreams"]["b"] = {"provider": "groq", "concurrency": 2}
    raw["routes"][0]["chain"] = ["b", "engine"]
    with pytest.raises(SettingsError) as error:
        follow(settings(), settings(raw))
    first, second = error.value.problems
    assert first.startswith("routes[0].chain: unknown upstream 'b'")
    assert second == "upstreams.b: needs Envoy's config rendered again"


def test_the_classic_profile_has_to_know_of_new_orders_beforehand() -> None:
    """There a chain of other upstreams waits; other turns of the same ones do not."""
    old = settings(profile="classic")
    for chain, need in ((["engine", "a"], Need.LIVE), (["a", "free"], Need.ENVOY), (["a"], Need.LIVE)):
        raw = deepcopy(RICH)
        raw["routes"][0] |= {"chain": chain, "acknowledge_unowned": True}
        new = settings(raw, "classic")
        assert {one.need for one in differences(old, new) if one.path[-1] == "chain"} == {need}
        held, _ = follow(old, new)
        assert held.routes[0].chain == (tuple(chain) if need is Need.LIVE else ("a", "engine"))


def test_a_lane_may_not_outlast_what_envoy_was_told() -> None:
    """Up to the longest wait that was rendered it is free, also after others were shortened."""
    old = settings({**RICH, "lanes": {"P0": {"max_wait_s": 4}, "P1": {"max_wait_s": 30}}})
    for wait_s, need in ((30, Need.LIVE), (31, Need.ENVOY)):
        new = settings({**RICH, "lanes": {"P0": {"max_wait_s": wait_s}, "P1": {"max_wait_s": 5}}})
        assert {one.place: one.need for one in differences(old, new)} == {
            "lanes.P0.max_wait_s": need,
            "lanes.P1.max_wait_s": Need.LIVE,
        }


def test_the_version_is_that_of_the_values() -> None:
    """Comments, order and what is a default anyway do not matter; the order of lanes does."""
    plain = settings()
    assert version_of(
        settings({**RICH, "observe": 0.0, "upstreams": dict(reversed(RICH["upstreams"].items()))})
    ) == version_of(plain)
    lanes = {"P0": {}, "P1": {}}
    one, other = ({**RICH, "lanes": each} for each in (lanes, dict(reversed(lanes.items()))))
    assert version_of(settings(one)) != version_of(settings(other))
    assert [str(one) for one in differences(settings(one), settings(other))] == [
        'lanes.(order): ["P0", "P1"] -> ["P1", "P0"]'
    ]


def test_nothing_differs_from_itself() -> None:
    """Also after it was written down and read again."""
    for one in (settings(), load(None, {})):
        again = parse(yaml.safe_dump(one.model_dump(mode="json"), sort_keys=False), "again")
        assert differences(one, again) == []
        assert follow(one, again) == (again, [])
