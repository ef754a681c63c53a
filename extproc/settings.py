"""One YAML file and the environment, validated at the door, turned into the frozen rules of `core`.

    load(path) -> Settings        every mistake raises SettingsError: one line each, with its path in the file
    settings.policy() -> Policy   what the core decides by

Order of precedence: environment over file over the defaults below. `TIDEGATE_PORT` sets the gateway's port; any key can
be set as `TIDEGATE__SECTION__KEY=value` (the value is read as YAML). Secrets are never values here: `key_file` names a
file that Envoy reads by itself.

Deliberately not here: how Envoy is configured (render) and whether Envoy agrees (the `check` command).
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from extproc.core import policy as core
from extproc.core.refusal import RULES, Reason
from extproc.core.request import Dialect

__all__ = ["PROVIDERS", "Provider", "Settings", "SettingsError", "UpstreamSettings", "load", "parse"]

MAX_SYNCHRONOUS_WAIT_S = 900.0
MARGIN_S = 5.0
"""A held request must be answered this much before Envoy gives up on it."""


class SettingsError(Exception):
    """The configuration cannot be used. `problems` has one line for each mistake."""

    def __init__(self, problems: list[str]) -> None:
        """Keep the problems; the message is all of them, a line each."""
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Provider:
    """What is known of a vendor's API: where it is, how it wants its key, and when it charges its token limit."""

    url: str | None
    dialects: tuple[Dialect, ...] = (Dialect.OPENAI,)
    path: str = "/v1"
    key_header: str = "authorization"
    key_prefix: str = "Bearer "
    accounting: core.Accounting = core.Accounting.ACTUAL


_BOTH = (Dialect.OPENAI, Dialect.ANTHROPIC)
_UPFRONT = core.Accounting.UPFRONT

PROVIDERS: dict[str, Provider] = {
    "openai": Provider("https://api.openai.com", accounting=_UPFRONT),
    "azure": Provider(None, path="/openai/v1", key_header="api-key", key_prefix="", accounting=_UPFRONT),
    "anthropic": Provider("https://api.anthropic.com", (Dialect.ANTHROPIC,), key_header="x-api-key", key_prefix=""),
    "gemini": Provider("https://generativelanguage.googleapis.com", path="/v1beta/openai"),
    "openrouter": Provider("https://openrouter.ai", path="/api/v1"),
    "groq": Provider("https://api.groq.com", path="/openai/v1"),
    "mistral": Provider("https://api.mistral.ai"),
    "deepseek": Provider("https://api.deepseek.com"),
    "together": Provider("https://api.together.xyz"),
    "cerebras": Provider("https://api.cerebras.ai", accounting=_UPFRONT),
    "xai": Provider("https://api.x.ai"),
    "vllm": Provider(None),
    "sglang": Provider(None),
    "compatible": Provider(None, accounting=_UPFRONT),
    "fake": Provider(None, _BOTH, accounting=_UPFRONT),
}


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not yes or no")  # noqa: TRY004 - pydantic wants it so
    return value


def _host_port(value: str) -> str:
    if not re.fullmatch(r"([^\s:/\[\]]*|\[[0-9a-fA-F:]+\]):[0-9]{1,5}", value):
        raise ValueError("must be host:port")
    return value


def _address(value: str) -> str:
    return value if re.fullmatch(r"unix:/.+", value) else _host_port(value)


def _one_or_many(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
HeaderName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
HostPort = Annotated[str, AfterValidator(_host_port)]
Address = Annotated[str, AfterValidator(_address)]
Seconds = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
SomeSeconds = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Port = Annotated[int, BeforeValidator(_number), Field(ge=1, le=65535)]
Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]


class Section(BaseModel):
    """Every section refuses keys it does not know and is frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class GatewaySettings(Section):
    """Envoy's side: where clients connect, and what Envoy may hold."""

    address: str = "127.0.0.1"
    port: Port = 10000
    admin_port: Port = 10001
    probe_port: Port = 10002
    """Private listener for health canaries: loopback only, one upstream forced per call."""
    workers: int | None = Field(default=None, ge=1)
    """Envoy worker threads; one per core when absent. Used by `tidegate up`."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024, le=256 * 1024 * 1024)
    max_answer_bytes: int = Field(default=16 * 1024 * 1024, ge=1024, le=256 * 1024 * 1024)
    message_timeout_s: Seconds = 2.0
    max_message_timeout_s: Seconds | None = None
    """Longest time Envoy lets a request be held; longest lane wait + 5 s when absent."""
    upload_timeout_s: Seconds = 120.0
    """How long a client may take to send its request; the wait in a queue does not count."""
    idle_timeout_s: Seconds = 960.0
    """Longest silence on one request, waiting included."""


class ServiceSettings(Section):
    """Tidegate's own process."""

    address: Address = "127.0.0.1:10003"
    """host:port, or unix:/path/of/socket, where Envoy reaches ext_proc, access log and health."""
    console: HostPort = "127.0.0.1:10004"
    """host:port of the state page; keep it private."""
    drain_s: Seconds = 30.0
    watchdog_s: Seconds = 5.0
    state_file: str | None = None
    """Where bucket levels are kept over a restart; without it buckets start empty."""
    restart_ramp_s: SomeSeconds = 10.0
    """After a start, this long at half concurrency, while running answers of the last process are counted again."""
    record_grace_s: Seconds = 15.0
    """How long an ended request waits for its outcome record before its estimate is kept."""


class JwtSettings(Section):
    """A JWT that Envoy verifies before Tidegate reads a claim of it."""

    issuer: str | None = None
    audiences: tuple[str, ...] = ()
    jwks_file: str
    header: HeaderName = "authorization"


class IdentitySettings(Section):
    """Who is calling: tried in order, the first that names a known tenant wins."""

    tenant: Annotated[tuple[str, ...], BeforeValidator(_one_or_many)] = ("api_key",)
    """Any of `api_key`, `header:NAME` (a header that only trusted proxies can set), `jwt:CLAIM`."""
    unknown: Literal["default", "reject"] = "default"
    jwt: JwtSettings | None = None
    session_headers: tuple[HeaderName, ...] = ("x-tidegate-session",)
    session_window_s: Seconds = 1800.0

    @model_validator(mode="after")
    def _known_sources(self) -> Self:
        for source in self.tenant:
            kind, _, name = source.partition(":")
            if not (source == "api_key" or (kind in ("header", "jwt") and name)):
                raise ValueError(f"tenant: {source!r} is not api_key, header:NAME or jwt:CLAIM")
            if kind == "header" and not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
                raise ValueError(f"tenant: {name!r} is not a lower-case header name")
            if kind == "jwt" and self.jwt is None:
                raise ValueError("tenant: jwt:CLAIM needs identity.jwt with a jwks_file")
        return self


class LimitSettings(Section):
    """One provider limit of an account, per minute. Tokens count input plus output unless itpm/otpm split them."""

    model: str = "*"
    tpm: Count | None = None
    itpm: Count | None = None
    otpm: Count | None = None
    rpm: Count | None = None
    burst_s: Seconds = 10.0
    """Size of the bucket in seconds of refill."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not any((self.tpm, self.itpm, self.otpm, self.rpm)):
            raise ValueError("name at least one of tpm, itpm, otpm, rpm")
        return self

    def buckets(self, headroom: float) -> Iterator[core.Limit]:
        """The buckets of this limit, `headroom` (a fraction) below what the provider allows."""
        kinds = {core.Kind.TOTAL: self.tpm, core.Kind.INPUT: self.itpm, core.Kind.OUTPUT: self.otpm}
        for kind, per_minute in (*kinds.items(), (core.Kind.REQUESTS, self.rpm)):
            if per_minute is not None:
                rate = per_minute * (1.0 - headroom)
                yield core.Limit(self.model, kind, rate, rate / 60.0 * self.burst_s)


class BreakerSettings(Section):
    """When an upstream counts as sick."""

    failures: Count = 3
    paced: Count = 5
    """Consecutive 429s."""
    cool_down_s: Seconds = 5.0
    cool_down_max_s: Seconds = 120.0


class FakeBehaviour(Section):
    """How a built-in fake provider behaves; only for `provider: fake`."""

    first_token_s: SomeSeconds = 0.05
    prompt_tokens_per_s: Seconds = 20000.0
    output_tokens_per_s: Seconds = 400.0
    tokens_per_event: Count = 4
    burst_s: Seconds = 60.0


class UpstreamSettings(Section):
    """One place to send to. Give its limits, or its concurrency, or `learn: true`."""

    provider: str
    url: str | None = None
    key_file: str | None = None
    ca_file: str | None = None
    models: dict[str, str] = {}
    dialects: tuple[Dialect, ...] | None = None
    limits: tuple[LimitSettings, ...] = ()
    headroom: float = Field(default=0.05, ge=0, lt=1)
    concurrency: Count | None = None
    learn: bool = False
    owned: bool = False
    window: Count | None = None
    """Context window in tokens, prompt plus output."""
    accounting: core.Accounting | None = None
    canary_model: str | None = None
    """Cheapest model for health calls (its own name); else the first of `models`, else that of the last request."""
    connect_timeout_s: Seconds = 2.0
    breaker: BreakerSettings = BreakerSettings()
    fake: FakeBehaviour | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.provider not in PROVIDERS:
            raise ValueError(f"provider: {self.provider!r} is not one of {', '.join(PROVIDERS)}")
        if self.url is None and PROVIDERS[self.provider].url is None:
            raise ValueError(f"url: provider {self.provider} needs one")
        if problem := _url_problem(self.where):
            raise ValueError(f"url: {problem}")
        if self.limits and self.learn:
            raise ValueError("learn: give limits or learn them, not both")
        if not (self.limits or self.concurrency or self.learn):
            raise ValueError("limits: missing; give limits, concurrency or learn: true")
        seen = [limit.model for limit in self.limits]
        if twice := sorted({m for m in seen if seen.count(m) > 1}):
            raise ValueError(f"limits: model {twice[0]!r} is named twice")
        if self.fake is not None and self.provider != "fake":
            raise ValueError("fake: only for provider: fake")
        return self

    @property
    def where(self) -> str:
        """Base URL in force."""
        return self.url or PROVIDERS[self.provider].url or ""

    @property
    def host(self) -> str:
        """Host to connect to and to name in the Host header."""
        return urlsplit(self.where).hostname or ""

    @property
    def tls(self) -> bool:
        """Whether the upstream is reached over TLS."""
        return urlsplit(self.where).scheme == "https"

    @property
    def port(self) -> int:
        """TCP port to connect to."""
        return urlsplit(self.where).port or (443 if self.tls else 80)

    @property
    def path(self) -> str:
        """What stands at this upstream where the gateway's own paths have `/v1`; no trailing slash."""
        return urlsplit(self.where).path.rstrip("/") or PROVIDERS[self.provider].path

    def rules(self, name: str) -> core.Upstream:
        """The upstream as the core knows it."""
        provider = PROVIDERS[self.provider]
        limits = tuple(bucket for limit in self.limits for bucket in limit.buckets(self.headroom))
        if self.learn:
            # Claims are made on these from the start; until the provider has told its limit nothing is counted there.
            limits += tuple(core.Limit("*", kind, inf, inf) for kind in core.Kind)
        return core.Upstream(
            name=name,
            provider=self.provider,
            dialects=frozenset(self.dialects or provider.dialects),
            limits=limits,
            concurrency=self.concurrency,
            models=dict(self.models),
            owned=self.owned,
            learn=self.learn,
            window=self.window,
            accounting=self.accounting or provider.accounting,
            breaker=core.BreakerRules(**self.breaker.model_dump()),
        )


class RouteSettings(Section):
    """Which upstreams serve which models, first choice first."""

    models: Annotated[tuple[str, ...], Field(min_length=1)]
    chain: Annotated[tuple[str, ...], Field(min_length=1)]
    acknowledge_unowned: bool = False
    """Set to accept that the chain does not end on something you own: a provider outage is then your outage."""


class LaneSettings(Section):
    """The bounded queue of one priority. Lanes rank in the order they are written."""

    max_wait_s: Seconds = 30.0
    when_busy: core.WhenBusy = core.WhenBusy.SPILL
    spill_after_s: SomeSeconds = 1.0
    max_requests: Count = 10_000
    max_tokens: Count = 50_000_000
    max_bytes: Count = 512 * 1024 * 1024


class TenantSettings(Section):
    """What one tenant may use."""

    lanes: tuple[str, ...] = ()
    """Lanes it may ask for; all when empty."""
    default_lane: str | None = None
    """Lane of a request that asks for none: else P1 where allowed, else the first of `lanes`."""
    models: tuple[str, ...] = ()
    key_sha256: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = ()
    """SHA-256 of each API key this tenant may present, in hex."""
    tpm: Count | None = None
    rpm: Count | None = None
    concurrency: Count | None = None


class FloodSettings(Section):
    """Envoy's own guard at the door, before a byte of the body is buffered. Requests per second and burst."""

    per_key_rps: Count | None = 500
    per_address_rps: Count | None = 2000
    burst_s: Count = 2
    max_keys: Count = 10_000


class TimeoutSettings(Section):
    """Limits on an upstream's answer."""

    first_token_s: Seconds = 10.0
    """Streams only: time to the first token, on top of the time to read the prompt."""
    prompt_tokens_per_s: Seconds = 5000.0
    """How fast the slowest upstream reads a prompt."""
    stall_s: Seconds = 60.0
    answer_s: Seconds = 900.0
    """Longest silence before a JSON answer without a deadline."""


class TokenSettings(Section):
    """How requests are priced before anything is known."""

    default_output: Count = 512
    sample_above_bytes: Count = 16_384
    calibrate: bool = True


def _lanes() -> dict[str, LaneSettings]:
    return {
        "P0": LaneSettings(max_wait_s=4.0),
        "P1": LaneSettings(max_wait_s=30.0),
        "P2": LaneSettings(max_wait_s=110.0, when_busy=core.WhenBusy.HOLD),
    }


class Settings(Section):
    """The whole configuration."""

    gateway: GatewaySettings = GatewaySettings()
    service: ServiceSettings = ServiceSettings()
    identity: IdentitySettings = IdentitySettings()
    upstreams: Annotated[dict[Name, UpstreamSettings], Field(min_length=1)]
    routes: Annotated[tuple[RouteSettings, ...], Field(min_length=1)]
    other_endpoints: str | None = None
    """Upstream of LLM endpoints that are not priced in tokens (images, audio, files, batches); refused when absent."""
    lanes: Annotated[dict[Name, LaneSettings], Field(min_length=1)] = Field(default_factory=_lanes)
    tenants: dict[Name, TenantSettings] = {}
    flood: FloodSettings = FloodSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    tokens: TokenSettings = TokenSettings()
    internal_headers: bool = True
    """Whether answers tell `x-tidegate-upstream` and `x-tidegate-attempts`."""
    statuses: dict[Reason, Annotated[int, Field(ge=400, le=599)]] = {}
    """HTTP status per refusal reason, where the default does not suit."""

    @property
    def longest_wait_s(self) -> float:
        """The longest that any lane lets a request wait."""
        return max(lane.max_wait_s for lane in self.lanes.values())

    @property
    def max_message_timeout_s(self) -> float:
        """How long Envoy is told to let a held request be."""
        return self.gateway.max_message_timeout_s or self.longest_wait_s + MARGIN_S

    def status_of(self, reason: Reason) -> int:
        """The HTTP status that `reason` has here."""
        return self.statuses.get(reason, RULES[reason].status)

    def policy(self) -> core.Policy:
        """The rules as the core reads them."""
        names = tuple(self.lanes)
        return core.Policy(
            upstreams={name: upstream.rules(name) for name, upstream in self.upstreams.items()},
            routes=tuple(core.Route(_route_name(i, r), r.models, r.chain) for i, r in enumerate(self.routes)),
            lanes={
                name: core.Lane(name=name, rank=rank, **lane.model_dump())
                for rank, (name, lane) in enumerate(self.lanes.items())
            },
            tenants={
                name: _tenant(name, t, names) for name, t in {"default": TenantSettings(), **self.tenants}.items()
            },
            other=core.Route("other", ("*",), (self.other_endpoints,)) if self.other_endpoints else None,
            default_output_tokens=self.tokens.default_output,
        )

    def problems(self) -> Iterator[str]:
        """What only shows when sections are read together; a line each, path first."""
        yield from self._route_problems()
        yield from self._tenant_problems()
        yield from self._wait_problems()
        if self.other_endpoints and self.other_endpoints not in self.upstreams:
            yield f"other_endpoints: unknown upstream {self.other_endpoints!r}"
        elif self.other_endpoints and not _limits_requests(self.upstreams[self.other_endpoints]):
            yield (
                f"other_endpoints: nothing limits them at {self.other_endpoints!r}; give it concurrency, or a limit "
                'with rpm for model "*"'
            )
        ports = [self.gateway.port, self.gateway.admin_port, self.gateway.probe_port]
        if len(set(ports)) < len(ports):
            yield "gateway: port, admin_port and probe_port must differ"

    def _route_problems(self) -> Iterator[str]:
        claimed: dict[str, int] = {}
        for i, route in enumerate(self.routes):
            for name in route.chain:
                if name not in self.upstreams:
                    yield f"routes[{i}].chain: unknown upstream {name!r}; known: {', '.join(self.upstreams)}"
            if len(set(route.chain)) < len(route.chain):
                yield f"routes[{i}].chain: names an upstream twice"
            last = self.upstreams.get(route.chain[-1])
            if last is not None and not last.owned and not route.acknowledge_unowned:
                yield (
                    f"routes[{i}].chain: ends on {route.chain[-1]!r}, which is not owned; end on an upstream with "
                    "owned: true, or set acknowledge_unowned: true on this route"
                )
            for model in route.models:
                if model in claimed:
                    yield f"routes[{i}].models: {model!r} is already served by routes[{claimed[model]}]"
                claimed.setdefault(model, i)

    def _tenant_problems(self) -> Iterator[str]:
        owner: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            for lane in (*tenant.lanes, *((tenant.default_lane,) if tenant.default_lane else ())):
                if lane not in self.lanes:
                    yield f"tenants.{name}.lanes: unknown lane {lane!r}; known: {', '.join(self.lanes)}"
            if tenant.default_lane and tenant.lanes and tenant.default_lane not in tenant.lanes:
                yield f"tenants.{name}.default_lane: {tenant.default_lane!r} is not among its lanes"
            for digest in tenant.key_sha256:
                if digest in owner:
                    yield f"tenants.{name}.key_sha256: a key is already owned by tenant {owner[digest]!r}"
                owner.setdefault(digest, name)

    def _wait_problems(self) -> Iterator[str]:
        for name, lane in self.lanes.items():
            where = f"lanes.{name}.max_wait_s: {lane.max_wait_s:g} s"
            if lane.max_wait_s > MAX_SYNCHRONOUS_WAIT_S:
                yield f"{where} is longer than a synchronous wait may be (900 s); longer work belongs in a batch queue"
            elif lane.max_wait_s + MARGIN_S > self.max_message_timeout_s:
                yield (
                    f"{where} + {MARGIN_S:g} s exceeds gateway.max_message_timeout_s "
                    f"({self.max_message_timeout_s:g}): Envoy would cut the wait"
                )
            elif lane.max_wait_s + MARGIN_S >= self.gateway.idle_timeout_s:
                yield f"{where} + {MARGIN_S:g} s reaches gateway.idle_timeout_s ({self.gateway.idle_timeout_s:g})"


def load(path: Path | None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from `path` (the built-in demo when None) under the environment. SettingsError on any mistake."""
    if path is None:
        return parse(resources.files("extproc").joinpath("default.yaml").read_text("utf-8"), "default", environ)
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise SettingsError([f"{path}: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise SettingsError([f"{path}: is not UTF-8 text"]) from None
    return parse(text, str(path), environ)


def parse(text: str, source: str, environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from YAML text; `source` names it in errors. SettingsError lists every mistake found."""
    raw = _read_yaml(text, source)
    try:
        settings = Settings.model_validate(_overridden(raw, environ or {}))
    except ValidationError as error:
        raise SettingsError([f"{source}: {_one_line(e)}" for e in _causes(error.errors())]) from None
    if problems := list(settings.problems()):
        raise SettingsError([f"{source}: {problem}" for problem in problems])
    return settings


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice; plain YAML would silently keep the last."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} is written twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _read_yaml(text: str, source: str) -> dict[str, Any]:
    raw = _value_of(text, source)
    if not isinstance(raw, dict):
        raise SettingsError([f"{source}: must be a mapping with at least upstreams and routes"])
    return raw


def _value_of(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError([f"{source}{line}: {error.problem}"]) from None
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise SettingsError([f"{source}: not YAML: {reason[:200]}"]) from None


def _overridden(raw: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    places = {key: key[10:].lower().split("__") for key in environ if key.startswith("TIDEGATE__")}
    if "TIDEGATE_PORT" in environ:
        places["TIDEGATE_PORT"] = ["gateway", "port"]
    for key, path in places.items():
        section = raw
        for name in path[:-1]:
            written = _as_written(section, name)
            inner = section.get(written, {})
            if not isinstance(inner, dict):
                raise SettingsError([f"environment {key}: {name} is not a section"])
            section[written] = section = dict(inner)  # a copy, because YAML shares what an alias names
        section[_as_written(section, path[-1])] = _value_of(environ[key], f"environment {key}")
    return raw


def _as_written(section: Mapping[Any, Any], name: str) -> str:
    """Environment names have no case; `p0` means the `P0` that the file has."""
    return next((key for key in section if isinstance(key, str) and key.lower() == name), name)


def _causes(errors: list[Any]) -> Iterator[Any]:
    """Without those that only say that a list is too short because its items are wrong."""
    for error in errors:
        place = error["loc"]
        inside = any(len(each["loc"]) > len(place) and each["loc"][: len(place)] == place for each in errors)
        if error["type"] != "too_short" or not inside:
            yield error


def _one_line(error: Any) -> str:
    place = ""
    for part in error["loc"]:
        if part != "[key]":
            place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = "unknown key"
    elif error["type"] == "missing":
        message = "is required"
    joint = "." if error["type"] == "value_error" and re.match(r"^[a-z_]+: ", message) and place else ": "
    return " ".join(f"{place}{joint}{message}".split()) if place else message


def _url_problem(url: str) -> str | None:
    """What is wrong with an upstream's base URL. It is repeated only where it can hold no secret."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "has no valid host and port"
    if parts.username is not None or parts.query or parts.fragment:
        return "may have no user, query or fragment; a key belongs in the file that key_file names"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return f"{url!r} is not http(s)://host[:port][/path]"
    return None


def _route_name(index: int, route: RouteSettings) -> str:
    return f"{index}:{route.models[0]}"


def _limits_requests(upstream: UpstreamSettings) -> bool:
    return bool(
        upstream.concurrency or upstream.learn or any(limit.model == "*" and limit.rpm for limit in upstream.limits)
    )


def _tenant(name: str, tenant: TenantSettings, lanes: tuple[str, ...]) -> core.Tenant:
    allowed = tuple(lane for lane in lanes if lane in tenant.lanes) if tenant.lanes else lanes
    default = tenant.default_lane or ("P1" if "P1" in allowed else (tenant.lanes or allowed[-1:])[0])
    return core.Tenant(
        name, allowed, default, tenant.models, tpm=tenant.tpm, rpm=tenant.rpm, concurrency=tenant.concurrency
    )
