"""`tidegate check` finds out whether engines do what the settings count on, and says exactly what to change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from extproc.check import advice, ask, validate
from extproc.fakes import FakeSettings, Running, running
from extproc.probes.inquiry import Finding, inquire
from extproc.render.envoy import RenderError, write_secrets
from extproc.settings import Settings, SettingsError, TelemetrySettings, UpstreamSettings, load, parse
from tests.test_engines import VLLM_PAGE, resolve_to, serving, vector

ON = "start it with --scheduling-policy priority"


@asynccontextmanager
async def fakes(*settings: dict[str, Any]) -> AsyncIterator[list[Running]]:
    """Fake engines on addresses of this machine, all on the port of the first."""
    async with AsyncExitStack() as stack:
        found: list[Running] = []
        for i, given in enumerate(settings):
            port = int(found[0].url.rpartition(":")[2]) if found else 0
            fake = FakeSettings(name=f"e{i}", port=port, host=f"127.0.0.{i + 1}", **given)
            found.append(await stack.enter_async_context(running(fake)))
        yield found


async def findings(url: str, provider: str = "vllm", **upstream: Any) -> list[Finding]:
    """What is found about one engine."""
    settings = UpstreamSettings.model_validate({"provider": provider, "url": url, "concurrency": 9, **upstream})
    return await inquire({"e": settings}, {"e": "m"})


async def asked(fake: dict[str, Any], provider: str = "vllm", **upstream: Any) -> list[tuple[str, bool]]:
    """The same of a fake engine with these settings: what is said, and whether it is wrong."""
    async with fakes(fake) as [engine]:
        return [(f"{f.where}: {f.what}", f.wrong) for f in await findings(engine.url, provider, **upstream)]


@pytest.mark.parametrize(
    ("fake", "provider", "said", "wrong"),
    [
        ({"server_info": True}, "vllm", "", False),
        ({"server_info": True, "priorities": "ignored"}, "vllm", f"vLLM ignores priorities: {ON}", True),
        ({"priorities": "refused"}, "vllm", f"vLLM ignores priorities: {ON}", True),
        ({}, "vllm", "make sure that vLLM runs with --scheduling-policy priority", False),
        ({"priorities": "ignored"}, "vllm", "make sure that vLLM runs with", False),
        ({"key": "sk-1"}, "vllm", "make sure that vLLM runs with", False),
        ({"engine": "sglang"}, "sglang", "", False),
        (
            {"engine": "sglang", "priorities": "ignored"},
            "sglang",
            "SGLang ignores priorities: start it with --enable-priority-scheduling",
            True,
        ),
    ],
)
async def test_whether_an_engine_schedules_by_priority(
    fake: dict[str, Any],
    provider: str,
    said: str,
    wrong: bool,  # noqa: FBT001
) -> None:
    """What is known to be off is wrong; what cannot be known is only said."""
    told = await asked(fake, provider, engine_priority=True)
    if not said:
        assert told == []
    else:
        [(line, is_wrong)] = told
        assert line.startswith(f"upstreams.e.engine_priority: {said}")
        assert is_wrong is wrong


async def test_only_who_has_to_be_asked_is_asked() -> None:
    """Without kv and engine_priority nobody is; priorities cost one request of one token."""
    async with fakes({}) as [engine]:
        assert await findings(engine.url) == []
        assert engine.provider.record.requests == []
        await findings(engine.url, engine_priority=True)
        [seen] = engine.provider.record.requests
        assert (seen.priority, seen.max_tokens, seen.path) == (100, 1, "/v1/chat/completions")


@pytest.mark.parametrize(
    ("info", "said", "wrong"),
    [
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, "serves low values", True),
        ({"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 500}, "beyond 500", False),
        ({"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 10}, "", False),
        ({"version": "0.4"}, "SGLang does not tell", False),
        ([], "SGLang does not tell", False),
    ],
)
async def test_what_sglang_tells_of_itself(info: Any, said: str, wrong: bool) -> None:  # noqa: FBT001
    """At the older path too, and none of its secrets is repeated."""

    async def answer(request: web.Request) -> web.Response:
        if request.path != "/get_server_info":
            raise web.HTTPNotFound
        return web.json_response({**info, "api_key": "sk-secret"} if isinstance(info, dict) else info)

    async with serving(answer) as port:
        found = await findings(f"http://127.0.0.1:{port}", "sglang", engine_priority=True)
    assert [(said in f.what, f.wrong) for f in found] == ([(True, wrong)] if said else [])
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("fake", "kv", "said", "wrong"),
    [
        ({"kv_tokens": 1600}, {}, "", False),
        ({"kv_tokens": 1600}, {"tokens": 1700}, "", False),
        ({"kv_tokens": 1600}, {"tokens": 9000}, "kv.tokens: 9000, but the engine tells 1600", False),
        ({"metrics": "missing"}, {}, "kv.path: /metrics gives status 404; vLLM shows them at /metrics, unless", True),
        ({}, {"path": "/nowhere"}, "kv.path: /nowhere gives status 404", True),
        ({"metrics": "garbage"}, {}, "kv: no vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc on the page", True),
        ({"metrics": "percent", "kv_usage": 0.5}, {}, "is no share of 0 to 1; is it in percent?", True),
        (
            {"metrics": "slow", "metrics_delay_s": 9},
            {"scrape_s": 0.05, "stale_s": 0.4},
            "no answer in 0.2 s, so",
            False,
        ),
        ({}, {"metrics": {"usage": "my_share"}}, "kv: no my_share on the page", True),
        (
            {},
            {"metrics": {"usage": "vllm:kv_cache_usage_perc", "waiting": "my_queue"}, "tokens": 5},
            "kv: not on the page, so taken for 0: my_queue",
            False,
        ),
        (
            {},
            {"metrics": {"usage": "vllm:kv_cache_usage_perc"}},
            "kv.tokens: not set, and the engine does not tell; a few requests will go per reading",
            False,
        ),
    ],
)
async def test_whether_an_engine_shows_its_metrics(
    fake: dict[str, Any],
    kv: dict[str, Any],
    said: str,
    wrong: bool,  # noqa: FBT001
) -> None:
    """Where it answers and does not, the gate would only ever let a trickle through: that is wrong."""
    told = await asked(fake, kv=kv)
    if not said:
        assert told == []
    else:
        [(line, is_wrong)] = told
        assert said in line
        assert is_wrong is wrong


async def test_instances_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is true of all is said once; what is true of some is said with their addresses."""
    resolve_to(monkeypatch, "127.0.0.1", "127.0.0.2")
    async with fakes({"priorities": "refused"}, {"priorities": "refused", "metrics": "missing"}) as engines:
        port = engines[0].url.rpartition(":")[2]
        found = await findings(f"http://engines.example:{port}", kv={}, engine_priority=True)
    assert [(f.what.startswith("vLLM ignores priorities"), "(127.0.0.2)" in f.what, f.wrong) for f in found] == [
        (True, False, True),
        (False, True, True),
    ]


async def test_who_cannot_be_reached_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks also run where the engines are not."""
    [one] = await findings("http://127.0.0.1:1", kv={}, engine_priority=True)
    assert (one.what, one.wrong) == ("connection failed, so the engine could not be asked how it runs", False)
    resolve_to(monkeypatch)
    [one] = await findings("http://engines.example:1", kv={})
    assert (one.what, one.wrong) == ("engines.example has no address here, so the engine could not be asked", False)


@pytest.mark.parametrize(
    ("answer", "status", "said", "wrong"),
    [
        (vector("0.5"), 200, "", False),
        (vector(), 200, "kv.query: the query has no result", True),
        (b'{"status":"error","error":"parse error"}', 400, "kv.query: the answer is not a scalar or a vector", True),
        (b"", 503, "kv.prometheus: status 503, so the query could not be tried", False),
    ],
)
async def test_whether_a_prometheus_answers(answer: bytes, status: int, said: str, wrong: bool) -> None:  # noqa: FBT001
    """A query that finds nothing is wrong; a Prometheus that is away is not."""

    async def serve(_: web.Request) -> web.Response:
        return web.Response(body=answer, status=status)

    async with serving(serve) as port:
        kv = {"prometheus": f"http://127.0.0.1:{port}", "query": "max(x)"}
        found = await findings("http://engines.example:1", kv=kv)
    assert [(said in f"{f.where}: {f.what}", f.wrong) for f in found] == ([(True, wrong)] if said else [])


def settings(lanes: dict[str, Any] | None = None, **engine: Any) -> Settings:
    """One engine that serves everything."""
    upstream = {
        "provider": "vllm",
        "url": "http://127.0.0.1:1",
        "owned": True,
        "concurrency": 9,
        "window": 99_999,
        **engine,
    }
    raw = {
        "upstreams": {"e": {key: value for key, value in upstream.items() if value is not None}},
        "routes": [{"models": ["m"], "chain": ["e"]}],
        "service": {"state_file": "levels.json"},
    }
    if lanes:
        raw["lanes"] = lanes
    return parse(yaml.safe_dump(raw), "file", {})


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({}, None),
        ({"concurrency": None, "limits": [{"tpm": 1000}]}, "an engine without kv or concurrency; nothing keeps"),
        ({"kv": {"lanes": {"P2": {"high": 0.7, "low": 0.6}}}}, None),
        (
            {"kv": {"lanes": {"P2": {"high": 0.9, "low": 0.6}}}},
            "kv.lanes: P2 may fill the cache to 0.9, P1 only to 0.82",
        ),
        (
            {"kv": {"lanes": {"P0": {"high": 0.7, "low": 0.6}}}},
            "kv.lanes: P1 may fill the cache to 0.82, P0 only to 0.7",
        ),
        ({"kv": {"prometheus": "http://p", "query": "x"}}, "kv.tokens: not set, and Prometheus does not tell"),
        ({"kv": {"prometheus": "http://p", "query": "x", "tokens": 5}}, None),
        ({"engine_priority": True}, None),
        (
            {"engine_priority": True, "dialects": ["openai", "anthropic"]},
            "engine_priority: engines read none from callers of the anthropic API",
        ),
    ],
)
def test_what_works_but_may_surprise(engine: dict[str, Any], said: str | None) -> None:
    """Settings alone can tell these."""
    lines = [line for line in advice(settings(**engine)) if "API" not in line or "engine_priority" in line]
    assert [said in line for line in lines if said] == ([True] if said else [])
    assert said or lines == []


def in_thread(work: Callable[[], Any]) -> Any:
    """`check` runs a loop of its own."""
    return asyncio.to_thread(work)


async def test_the_command_fails_on_what_is_wrong_and_notes_the_rest() -> None:
    """One line each, with the place in the file."""
    async with fakes({"priorities": "refused"}) as [engine]:
        with pytest.raises(SettingsError) as error:
            await in_thread(lambda: ask(settings(url=engine.url, engine_priority=True)))
    assert error.value.problems == [f"upstreams.e.engine_priority: vLLM ignores priorities: {ON}"]
    [line] = await in_thread(lambda: ask(settings(kv={})))
    assert line == "note: upstreams.e: connection failed, so the engine could not be asked how it runs"


async def test_a_page_that_is_right_is_nothing_to_speak_of() -> None:
    """A real page of vLLM."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=VLLM_PAGE)

    async with serving(answer) as port:
        assert await findings(f"http://127.0.0.1:{port}", kv={}) == []


@pytest.mark.parametrize(
    ("first_s", "timeouts", "said"),
    [
        (None, {}, None),
        (30, {}, None),
        (31, {}, "2 first tokens may take 62 s, longer than timeouts.stall_s (60 s): its streams may fall silent for"),
        (31, {"stall_s": 62}, None),
        (None, {"first_token_s": 31}, "2 first tokens may take 62 s, longer than timeouts.stall_s (60 s)"),
        (30, {"first_token_s": 31}, None),
        (480, {"stall_s": 960}, None),
        (481, {"stall_s": 2000}, "2 first tokens may take 962 s, but after gateway.idle_timeout_s (960 s) Envoy ends"),
    ],
)
def test_first_tokens_that_may_take_longer_than_a_stall_are_told(
    first_s: float | None, timeouts: dict[str, Any], said: str | None
) -> None:
    """An only upstream may be asked twice. A silence is then ended late, or the last is never asked."""
    raw = settings().model_dump(mode="json", exclude_unset=True) | {"timeouts": timeouts}
    raw["routes"][0]["first_token_s"] = first_s
    lines = [line for line in advice(parse(yaml.safe_dump(raw), "file", {})) if "first tokens may" in line]
    assert [line.startswith(f"note: routes[0]: {said}") for line in lines] == ([True] if said else [])


@pytest.mark.parametrize(
    ("windows", "timeouts", "said"),
    [
        ((None, None, None), {}, (3, "50,000")),
        ((None,), {}, (2, "100,000")),
        ((50_001, 50_001, 50_001), {}, (3, "50,000")),
        ((50_000, 50_000, 50_000), {}, None),
        ((None, None, 32_000), {}, (2, "100,000")),
        ((128_000, None), {}, (2, "100,000")),
        ((128_000, 64_000), {}, (2, "100,000")),
        ((100_000, 64_000), {}, None),
        ((None, None, None), {"stall_s": 180}, None),
        ((None, None, None), {"stall_s": 120, "first_token_s": 5}, (3, "175,000")),
        ((1_000_000, 1_000_000), {"prompt_tokens_per_s": 20_000}, (2, "400,000")),
        ((None, None), {"prompt_tokens_per_s": 20_000}, None),
    ],
)
def test_prompts_that_take_so_long_to_read_that_a_stall_cannot_be_told_are_told(
    windows: tuple[int | None, ...], timeouts: dict[str, Any], said: tuple[int, str] | None
) -> None:
    """By the size from which on that is so, where an upstream would take it."""
    base = {"provider": "openai", "limits": [{"tpm": 1000}]}
    upstreams = {f"u{i}": base | ({"window": window} if window else {}) for i, window in enumerate(windows)}
    routes = [{"models": ["m"], "chain": list(upstreams), "acknowledge_unowned": True}]
    raw = {"upstreams": upstreams, "routes": routes, "timeouts": timeouts}
    lines = [line for line in advice(parse(yaml.safe_dump(raw), "test")) if "first token" in line]
    start = f"note: routes[0]: {said[0]} first tokens of a prompt of more than {said[1]} tokens may" if said else ""
    assert [line.startswith(start) for line in lines] == ([True] if said else [])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, False),
        ({"tenants": {"t": {"rpm": 5, "sessions": {"max_tokens": 5}}}}, False),
        ({"tenants": {"t": {"usd_per_hour": 5}}}, True),
        ({"tenants": {"t": {"usd_per_day": 5}}}, True),
        ({"tenants": {"t": {"sessions": {"max_usd": 5}}}}, True),
        ({"sessions": {"max_usd": 5}}, True),
    ],
)
def test_a_limit_in_dollars_without_prices_is_told(more: dict[str, Any], said: bool) -> None:  # noqa: FBT001
    """Of every upstream that costs somebody something; what is owned needs none."""
    upstreams = {
        "dear": {"provider": "openai", "limits": [{"tpm": 1000}], "prices": {"*": {"input": 1, "output": 2}}},
        "unknown": {"provider": "openai", "limits": [{"tpm": 1000}]},
        "ours": {"provider": "fake", "url": "http://127.0.0.1:1", "owned": True, "concurrency": 5},
    }
    raw = {"upstreams": upstreams, "routes": [{"models": ["*"], "chain": list(upstreams)}], **more}
    lines = [line for line in advice(parse(yaml.safe_dump(raw), "test")) if "prices" in line]
    expected = ["note: upstreams.unknown.prices: not set, what it serves counts against nobody's dollars"]
    assert lines == (expected if said else [])


def test_a_bound_that_is_never_reached_is_told() -> None:
    """All lanes together may hold less than one of them."""
    lanes = {"P0": {"max_requests": 30_000}, "P1": {"max_requests": 20_000}}
    lines = [line for line in advice(settings(lanes=lanes)) if "lanes" in line]
    assert lines == ["note: lanes.P0.max_requests: 30,000 is never reached, queue.max_requests is 20,000"]


@pytest.mark.parametrize(
    ("upstream", "chain", "told"),
    [
        (
            {"usd_per_day": 5},
            ["dear", "ours"],
            ["note: upstreams.dear.prices: not set, so its dollars are never spent"],
        ),
        ({"usd_per_day": 5, "prices": {"*": {"input": 1, "output": 1}}}, ["dear", "ours"], []),
        (
            {"usd_per_day": 5, "prices": {"*": {"input": 1, "output": 1}}},
            ["dear"],
            ["note: routes[0].chain: nothing in it is free, so it refuses when the dollars of dear are spent"],
        ),
        ({"usd_per_day": 5, "prices": {"*": {"input": 1, "output": 1}}}, ["dear", "gratis"], []),
    ],
)
def test_dollars_of_an_upstream_that_steer_nowhere_are_told(
    upstream: dict[str, Any], chain: list[str], told: list[str]
) -> None:
    """Without prices nothing is ever spent; without anything free what is spent refuses."""
    limits = {"provider": "openai", "limits": [{"tpm": 1000}]}
    upstreams = {
        "dear": limits | upstream,
        "gratis": {**limits, "prices": {"*": {"input": 0, "output": 0}}},
        "ours": {"provider": "fake", "url": "http://127.0.0.1:1", "owned": True, "concurrency": 5},
    }
    raw = {"upstreams": upstreams, "routes": [{"models": ["*"], "chain": chain, "acknowledge_unowned": True}]}
    lines = [line for line in advice(parse(yaml.safe_dump(raw), "test")) if "prices" in line or "free" in line]
    assert lines == told


@pytest.mark.parametrize(("profile", "length", "said"), [("classic", 60, 1), ("classic", 9, 0), ("native", 60, 0)])
def test_a_chain_that_is_too_long_for_older_envoys_is_told(profile: str, length: int, said: int) -> None:
    upstreams = {f"u{i}": {"provider": "openai", "owned": True, "concurrency": 1} for i in range(length)}
    names = list(upstreams)
    routes = [{"models": ["short"], "chain": names[:3]}, {"models": ["long"], "chain": names}]
    raw = {"gateway": {"profile": profile}, "upstreams": upstreams, "routes": routes}
    lines = [line for line in advice(parse(yaml.safe_dump(raw), "test")) if "profile" in line]
    assert len(lines) == said
    assert all("routes[1].chain" in line for line in lines)


def test_dollars_of_a_route_without_prices_are_told() -> None:
    """Of the upstreams in its chain, not of others."""
    upstreams = {name: {"provider": "openai", "limits": [{"tpm": 1000}]} for name in ("a", "b")}
    routes = [
        {"models": ["m"], "chain": ["a"], "acknowledge_unowned": True, "usd_per_month": 5},
        {"models": ["n"], "chain": ["b"], "acknowledge_unowned": True},
    ]
    raw = {"upstreams": upstreams, "routes": routes}
    lines = [line for line in advice(parse(yaml.safe_dump(raw), "test")) if "prices" in line]
    assert lines == ["note: upstreams.a.prices: not set, what it serves counts against nobody's dollars"]


def test_prices_of_a_model_that_no_route_sends_there_are_told() -> None:
    """By the upstream's own name; what the canary asks for is asked for."""
    price = {"input": 1, "output": 1}
    upstream = {
        "provider": "openai", "limits": [{"tpm": 1000}], "models": {"m": "own-m"}, "canary_model": "mini",
        "prices": dict.fromkeys(("own-m", "m", "x-5", "y-5", "mini", "*"), price),
    }  # fmt: skip
    routes = [{"models": ["m", "x-*"], "chain": ["a"], "acknowledge_unowned": True}]
    lines = list(advice(parse(yaml.safe_dump({"upstreams": {"a": upstream}, "routes": routes}), "test")))
    assert [line for line in lines if "prices" in line] == [
        f"note: upstreams.a.prices: no route sends {model!r} there" for model in ("m", "y-5")
    ]


def test_a_file_of_headers_that_cannot_be_read_is_a_mistake(tmp_path: Path) -> None:
    """The service would not start."""
    headers = tmp_path / "headers"
    headers.write_text("x-key=abc\n")
    otlp = {"endpoint": "http://127.0.0.1:1", "headers_file": str(headers)}
    with pytest.raises(SettingsError, match=r"otlp.headers_file .*, line 1: is not `name: value`"):
        validate(load(None, {}).model_copy(update={"telemetry": TelemetrySettings.model_validate({"otlp": otlp})}))


def test_files_by_which_keys_are_followed_are_missed(tmp_path: Path) -> None:
    """Until they are written, and when they tell of another place."""
    (tmp_path / "key").write_text("sk-own", "utf-8")
    followed = settings(key_file=str(tmp_path / "key"))
    gateway = followed.gateway.model_copy(update={"secrets_dir": str(tmp_path / "told")})
    followed = followed.model_copy(update={"gateway": gateway})

    def missed() -> list[str]:
        return [line for line in advice(followed) if "secrets_dir" in line]

    assert missed() == [
        f"note: gateway.secrets_dir: {tmp_path}/told/e.json is not as it should be; run tidegate render --write-secrets"
    ]
    write_secrets(followed)
    assert missed() == []
    (tmp_path / "told" / "e.json").write_text("{}", "utf-8")
    assert len(missed()) == 1


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A file is in its place."""
    (tmp_path / "file").write_text("", "utf-8")
    followed = settings(key_file="key")
    gateway = followed.gateway.model_copy(update={"secrets_dir": str(tmp_path / "file")})
    with pytest.raises(RenderError, match=r"^gateway\.secrets_dir: "):
        write_secrets(followed.model_copy(update={"gateway": gateway}))
