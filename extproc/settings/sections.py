"""The sections of the config file: every key, its default, and what makes it wrong by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime
from math import inf
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    field_validator,
    model_validator,
)

from extproc.core import policy as core
from extproc.core.request import Ability, Dialect
from extproc.settings.providers import PROVIDERS, EngineMetrics, Provider

__all__ = [
    "AdminSettings",
    "BreakerSettings",
    "FakeBehaviour",
    "FloodSettings",
    "GatewaySettings",
    "IdentitySettings",
    "JwtSettings",
    "KvSettings",
    "LaneSettings",
    "LimitSettings",
    "LogSettings",
    "Name",
    "OtlpSettings",
    "PriceSettings",
    "QueueSettings",
    "RetrySettings",
    "RouteSettings",
    "Section",
    "ServiceSettings",
    "ServiceTlsSettings",
    "SessionSettings",
    "TelemetrySettings",
    "TenantSettings",
    "TimeoutSettings",
    "TokenSettings",
    "UpstreamSettings",
]


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


def _octal(value: Any) -> Any:
    """Rights of a file as people write them: 0660, which YAML reads as a number, or the same as text."""
    if isinstance(value, str) and re.fullmatch(r"0o?[0-7]{3}", value):
        return int(value.removeprefix("0o"), 8)
    return value


def _moment(value: Any) -> Any:
    """A date as YAML reads it, or as text, made a time in UTC."""
    if value is None:
        return None
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if not isinstance(value, date):
        raise ValueError("must be a date, as in 2026-01-31, or a time of one")  # noqa: TRY004 - pydantic wants it so
    if not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)  # noqa: DTZ001 - the zone is given below
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def _one_or_many(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
HeaderName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
HostPort = Annotated[str, AfterValidator(_host_port)]
Address = Annotated[str, AfterValidator(_address)]
Seconds = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
SomeSeconds = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
FileMode = Annotated[
    int,
    BeforeValidator(_octal),
    Field(ge=0, le=0o777),
    PlainSerializer(lambda mode: f"{mode:04o}", return_type=str, when_used="json"),
]
Port = Annotated[int, BeforeValidator(_number), Field(ge=1, le=65535)]
Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1, allow_inf_nan=False)]
PartShare = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
Usd = Positive
LONGEST_SOCKET = 99
"""Bytes of a path: Linux takes 107, and it is made under a longer name at first."""
UsdPrice = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
MetricName = Annotated[str, Field(pattern=r"^[A-Za-z_:][A-Za-z0-9_:]*(\{.*\})?$")]


class Section(BaseModel):
    """Every section refuses keys it does not know and is frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class GatewaySettings(Section):
    """Envoy's side: where clients connect, and what Envoy may hold."""

    profile: Literal["native", "classic"] = "native"
    """What this Envoy can: `native` needs 1.40 or newer, `classic` is for older ones."""
    address: str = "127.0.0.1"
    port: Port = 10000
    admin_port: Port = 10001
    probe_port: Port = 10002
    """Private listener for health canaries: loopback only, one upstream forced per call."""
    metrics_port: Port | None = None
    """Where the metrics of Tidegate and of Envoy are shown, and nothing else; 10005 in a gateway's pod, else absent."""
    workers: int | None = Field(default=None, ge=1)
    """Envoy worker threads. When absent one per core, at most 4, of `tidegate up`, and 2 in a pod."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024, le=256 * 1024 * 1024)
    max_answer_bytes: int = Field(default=16 * 1024 * 1024, ge=1024, le=256 * 1024 * 1024)
    message_timeout_s: Seconds = 2.0
    max_message_timeout_s: Seconds | None = None
    """Longest time Envoy lets a request be held; longest lane wait + 5 s when absent."""
    upload_timeout_s: Seconds = 120.0
    """How long a client may take to send its request; the wait in a queue does not count."""
    idle_timeout_s: Seconds = 960.0
    """Longest silence on one request, waiting included."""
    secrets_dir: str | None = None
    """Folder of the files by which Envoy follows keys that are replaced; without it a key is read at Envoy's start."""
    drain_s: Seconds = 600.0
    """How long `tidegate drain` lets running answers come to their end before Envoy ends, as a pod's does."""


class ServiceTlsSettings(Section):
    """TLS between Envoy and Tidegate: files in PEM, which may be replaced while everything runs (see README)."""

    cert_file: str
    """Tidegate's own certificate, with those between it and the CA."""
    key_file: str
    ca_file: str
    """By which Envoy knows Tidegate."""
    server_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9:]([A-Za-z0-9.:-]*[A-Za-z0-9:])?$")] | None = None
    """What Tidegate's certificate must name: a DNS name or an IP address; the host of `address` when absent."""
    client_ca_file: str | None = None
    """By which Tidegate knows Envoy. Without it whoever reaches the port is let in."""
    client_cert_file: str | None = None
    """What Envoy, and `tidegate ready`, show."""
    client_key_file: str | None = None

    @model_validator(mode="after")
    def _both_sides(self) -> Self:
        clients = self.client_ca_file, self.client_cert_file, self.client_key_file
        if any(clients) and not all(clients):
            raise ValueError("client_ca_file: goes with client_cert_file and client_key_file; give all three, or none")
        return self

    @property
    def files(self) -> dict[str, str]:
        """Every file that is named, by its key here."""
        named = self.model_dump(exclude={"server_name"})
        return {key: path for key, path in named.items() if path is not None}


class ServiceSettings(Section):
    """Tidegate's own process."""

    address: Address = "127.0.0.1:10003"
    """host:port, or unix:/path/of/socket, where Envoy reaches ext_proc, access log and health."""
    addresses: tuple[HostPort, ...] = ()
    """Of all Tidegates behind one Envoy, `address` among them; none where it is the only one."""
    tls: ServiceTlsSettings | None = None
    socket_mode: FileMode = 0o660
    """Who may connect to a unix socket: Envoy needs the right to write."""
    socket_group: str | None = None
    """Name of the group that a unix socket is given to; that of the process when absent."""
    health: HostPort | None = None
    """host:port of a plain gRPC health service and nothing else, for probes that know no TLS."""
    console: HostPort = "127.0.0.1:10004"
    """host:port of the state page; keep it private."""
    replicas: Count = 1
    """How many Tidegates serve the same upstreams side by side; each has this part of every limit."""
    drain_s: Seconds = 30.0
    watchdog_s: Seconds = 5.0
    state_file: str | None = None
    """Where bucket levels are kept over a restart; without it buckets start empty."""
    restart_ramp_s: SomeSeconds = 10.0
    """After a start, this long at half concurrency, while running answers of the last process are counted again."""
    record_grace_s: Seconds = 15.0
    """How long an ended request waits for its outcome record before its estimate is kept."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.tls and self.socket_path:
            raise ValueError("tls: not on a unix socket, which socket_mode and socket_group guard")
        if self.socket_path and len(self.socket_path.encode()) > LONGEST_SOCKET:
            raise ValueError(f"address: the path of a unix socket has at most {LONGEST_SOCKET} bytes")
        if self.addresses:
            self._check_addresses()
        return self

    def _check_addresses(self) -> None:
        if self.address not in self.addresses:
            raise ValueError(f"addresses: {self.address}, this one's own address, is not among them")
        if len(set(self.addresses)) < len(self.addresses):
            raise ValueError("addresses: one is named twice")
        if self.replicas < len(self.addresses):
            raise ValueError(f"replicas: {self.replicas}, but there are {len(self.addresses)} addresses")
        hosts = {place.rpartition(":")[0] for place in self.addresses}
        if self.tls and not self.tls.server_name and len(hosts) > 1:
            raise ValueError("tls.server_name: say which name all addresses have in their certificates")

    @property
    def rank(self) -> int | None:
        """Which of several Tidegates behind one Envoy this is; None where it is the only one."""
        return self.addresses.index(self.address) if self.addresses else None

    @property
    def socket_path(self) -> str | None:
        """The file of the unix socket; None where it is a port."""
        return self.address.removeprefix("unix:") if self.address.startswith("unix:") else None

    @property
    def server_name(self) -> str:
        """What a certificate of Tidegate must name."""
        named = self.tls.server_name if self.tls else None
        return named or self.address.rpartition(":")[0].strip("[]")


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
    shadow: bool = False
    """Only count what it would have stopped."""

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
                yield core.Limit(self.model, kind, rate, rate / 60.0 * self.burst_s, shadow=self.shadow)


class PriceSettings(Section):
    """US dollars per million tokens. What is absent costs what input (for reasoning: output) does."""

    model_config = ConfigDict(serialize_by_alias=True)

    since: Annotated[datetime | None, BeforeValidator(_moment), Field(alias="from")] = None
    """From when they hold, midnight UTC where no time is given; from ever when absent."""
    input: UsdPrice
    output: UsdPrice
    cached: UsdPrice | None = None
    """Input read from the provider's prompt cache."""
    cache_write: UsdPrice | None = None
    """Input written to it."""
    reasoning: UsdPrice | None = None

    def rules(self) -> core.Prices:
        """The prices as the core knows them."""
        plain = self.model_dump(exclude={"since"})
        return core.Prices(**plain, since=-inf if self.since is None else self.since.timestamp())


def _in_time(prices: tuple[PriceSettings, ...]) -> tuple[PriceSettings, ...]:
    known = [one.rules().since for one in prices]
    if len(set(known)) < len(known):
        raise ValueError("two of them hold from the same time")
    return tuple(sorted(prices, key=lambda one: one.rules().since))


Prices = Annotated[
    tuple[PriceSettings, ...], BeforeValidator(_one_or_many), Field(min_length=1), AfterValidator(_in_time)
]
"""Those of one model: a mapping, or a list of them, each `from` a date."""


class Purse(Section):
    """How many US dollars may be spent per period of the calendar (UTC)."""

    usd_per_hour: Usd | None = None
    usd_per_day: Usd | None = None
    usd_per_month: Usd | None = None

    @property
    def dollars(self) -> core.Dollars:
        """The limits as the core knows them."""
        return core.Dollars(self.usd_per_hour, self.usd_per_day, self.usd_per_month)


class Marks(Section):
    """Watermarks in used shares of the KV cache: shut at `high`, open again at `low`."""

    high: Share
    low: Share

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low >= self.high:
            raise ValueError("low must be below high")
        return self


class MetricNames(Section):
    """Names of an engine's metrics, where they are not those of vLLM or SGLang; `name{label="x"}` picks its series."""

    usage: MetricName
    """Used share of the KV cache, 0 to 1."""
    waiting: MetricName | None = None
    running: MetricName | None = None
    preemptions: MetricName | None = None
    """A counter."""
    tokens: MetricName | None = None
    """Size of the cache in tokens."""

    def names(self) -> EngineMetrics:
        """The same as the scraper knows them."""
        return EngineMetrics((self.usage,), self.waiting, self.running, self.preemptions, self.tokens)


class KvSettings(Section):
    """Hold requests while the engine's KV cache is nearly full."""

    high: Share = 0.82
    low: Share = 0.75
    lanes: dict[str, Marks] = {}
    """Other marks per lane."""
    waiting: Count = 4
    """Requests in an instance's own queue that count as saturated."""
    tokens: Count | None = None
    """Size of one instance's cache in tokens, where the engine does not tell it."""
    scrape_s: Annotated[float, BeforeValidator(_number), Field(ge=0.05, allow_inf_nan=False)] = 0.5
    stale_s: Seconds = 5.0
    """Age from which metrics say nothing any more."""
    trickle_rps: Positive = 1.0
    """Requests per second that pass while metrics are missing or stale."""
    path: Annotated[str, Field(pattern=r"^/[!-~]*$")] = "/metrics"
    metrics: MetricNames | None = None
    prometheus: str | None = None
    """URL of a Prometheus, where instances cannot be scraped; then `query` gives the used share, 0 to 1."""
    query: str | None = None
    """Scalar or vector, of which the largest value counts."""
    prometheus_lag_s: SomeSeconds = 15.0
    """How old what Prometheus tells may be: the interval at which it scrapes. Stale is `stale_s` on top of it."""
    shadow: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.low >= self.high:
            raise ValueError("low: must be below high")
        if (self.prometheus is None) != (self.query is None):
            raise ValueError("prometheus: needs a query, and a query needs it")
        if self.prometheus is not None and (problem := _url_problem(self.prometheus)):
            raise ValueError(f"prometheus: {problem}")
        if self.stale_s < 2 * self.scrape_s:
            raise ValueError("stale_s: must be at least twice scrape_s")
        return self

    @property
    def lag_s(self) -> float:
        """How much older than its answer what is told may be."""
        return self.prometheus_lag_s if self.prometheus else 0.0

    def rules(self) -> core.KvRules:
        """The marks as the core knows them."""
        return core.KvRules(
            high=self.high,
            low=self.low,
            lanes={name: (marks.high, marks.low) for name, marks in self.lanes.items()},
            waiting=self.waiting,
            tokens=self.tokens,
            stale_s=self.stale_s + self.lag_s,
            trickle_rps=self.trickle_rps,
            shadow=self.shadow,
        )


class RatioSettings(Section):
    """Sick when at least `share` of the results of `window_s` seconds are bad, of `volume` at least."""

    share: Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)]
    window_s: Seconds
    volume: Count


class ErrorSettings(RatioSettings):
    """Share of failed attempts."""

    share: Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)] = 0.5
    window_s: Seconds = 30.0
    volume: Count = 20


class MalformedSettings(RatioSettings):
    """Share of answers that are none (invalid, empty, truncated) to prompts of one size class."""

    share: Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)] = 0.3
    window_s: Seconds = 300.0
    volume: Count = 5


class SlowSettings(Section):
    """Time to the first token of streams, against what is usual for that model and size of prompt."""

    times: Annotated[float, BeforeValidator(_number), Field(gt=1, allow_inf_nan=False)] = 3.0
    """Sick when its 95th percentile is above so many times the usual one."""
    median_times: Annotated[float, BeforeValidator(_number), Field(gt=1, allow_inf_nan=False)] | None = 2.0
    """Or the median of the last `volume` above so many times the usual one, and above its usual 95th percentile:
    gradual decay shows there first."""
    share: Annotated[float, BeforeValidator(_number), Field(gt=0, lt=1)] = 0.05
    """Share that may be later than `times` says; 5 % makes it the 95th percentile."""
    window_s: Seconds = 30.0
    volume: Count = 20
    least_s: SomeSeconds = 1.0
    """What comes within so many seconds is never slow."""


class BreakerSettings(Section):
    """When an upstream counts as sick; null turns a sign off."""

    failures: Count | None = 3
    """In a row."""
    paced: Count | None = 5
    """429s in a row."""
    errors: ErrorSettings | None = ErrorSettings()
    slow: SlowSettings | None = SlowSettings()
    """Off for what is owned, unless it is written there: nothing stands behind that, and queues make it slow."""
    malformed: MalformedSettings | None = MalformedSettings()
    cool_down_s: Seconds = 5.0
    """First rest; it doubles after each canary that fails, up to `cool_down_max_s`."""
    cool_down_max_s: Seconds = 20.0
    quarantine_s: Seconds | None = 900.0
    """The same where our account has no credit, or our key is refused a canary, too; null: as any other failure."""
    quarantine_max_s: Seconds = 7200.0
    ramp_s: SomeSeconds = 10.0
    """How long traffic takes to return; 0 for at once."""
    ramp_from: Count = 2
    """With so many requests at a time it begins."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.cool_down_max_s < self.cool_down_s:
            raise ValueError("cool_down_max_s: must be at least cool_down_s")
        if self.quarantine_s is not None and self.quarantine_max_s < self.quarantine_s:
            raise ValueError("quarantine_max_s: must be at least quarantine_s")
        return self

    def rules(self) -> core.BreakerRules:
        """The same as the core knows it."""
        told = self.model_dump(exclude={"errors", "slow", "malformed"})
        return core.BreakerRules(
            **told,
            errors=None if self.errors is None else core.RatioRules(**self.errors.model_dump()),
            slow=None if self.slow is None else core.SlowRules(**self.slow.model_dump()),
            malformed=None if self.malformed is None else core.RatioRules(**self.malformed.model_dump()),
        )


class FakeBehaviour(Section):
    """How a built-in fake provider behaves; only for `provider: fake`."""

    first_token_s: SomeSeconds = 0.05
    prompt_tokens_per_s: Seconds = 20000.0
    output_tokens_per_s: Seconds = 400.0
    tokens_per_event: Count = 4
    burst_s: Seconds = 60.0
    engine: Literal["vllm", "sglang"] = "vllm"
    """Whose metrics it shows, and whose order of priorities it follows."""
    concurrency: Count | None = None
    """Requests that run at once; any number when absent."""
    queue: Annotated[int, BeforeValidator(_number), Field(ge=0)] | None = None
    """Requests that may wait for a place in the engine, one more is refused with 503; any number when absent."""
    kv_tokens: Count | None = None
    """Size of the KV cache in tokens; when it overflows, requests are preempted."""


class UpstreamSettings(Purse):
    """One place to send to. Give its limits, or its concurrency, or `learn: true`."""

    provider: str
    url: str | None = None
    key_file: str | None = None
    ca_file: str | None = None
    client_cert_file: str | None = None
    """What Envoy shows to an upstream that asks for a certificate, and the key of it."""
    client_key_file: str | None = None
    models: dict[str, str] = {}
    dialects: tuple[Dialect, ...] | None = None
    limits: tuple[LimitSettings, ...] = ()
    headroom: float = Field(default=0.05, ge=0, lt=1)
    concurrency: Count | None = None
    learn: bool = False
    owned: bool = False
    window: Count | None = None
    """Context window in tokens, prompt plus output."""
    lacks: tuple[Ability, ...] = ()
    """What its models cannot do; requests that need it go elsewhere."""
    accounting: core.Accounting | None = None
    canary_model: str | None = None
    """Cheapest model for health calls (its own name); else the first of `models`, else that of the last good answer."""
    connect_timeout_s: Seconds = 2.0
    breaker: BreakerSettings = BreakerSettings()
    hold_headers: bool = False
    """It sends headers before the first token: hold them back until that comes, or the next upstream is asked."""
    follow_headers: bool = True
    """Let what the provider says (limits in its headers, refusals for speed) tighten the limits given here."""
    ramp: bool = False
    """The provider wants traffic to grow by at most half within 15 minutes."""
    prices: dict[str, Prices] = {}
    """By own model name, "*" for any other; several where they change, each `from` a date."""
    burn: Annotated[float, BeforeValidator(_number), Field(gt=0, lt=1)] | None = 0.85
    """Used share of a bucket of tokens from which on the rest is for the best lane alone; null for never."""
    kv: KvSettings | None = None
    engine_priority: bool = False
    """Write the lane's priority into the body, for engines that schedule by it (`check` asks them)."""
    shadow: tuple[Literal["concurrency", "usd_per_hour", "usd_per_day", "usd_per_month"], ...] = ()
    """Limits that only count what they would have stopped; limits and kv have their own `shadow`."""
    fake: FakeBehaviour | None = None

    @model_validator(mode="before")
    @classmethod
    def _never_slow(cls, raw: Any) -> Any:
        """What is owned is not sick for being slow, unless that is written."""
        if not isinstance(raw, dict) or raw.get("owned") is not True:
            return raw
        breaker = raw.get("breaker", {})
        return {**raw, "breaker": {"slow": None, **breaker}} if isinstance(breaker, dict) else raw

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.provider not in PROVIDERS:
            raise ValueError(f"provider: {self.provider!r} is not one of {', '.join(PROVIDERS)}")
        if self.url is None and PROVIDERS[self.provider].url is None:
            raise ValueError(f"url: provider {self.provider} needs one")
        if problem := _url_problem(self.where):
            raise ValueError(f"url: {problem}")
        self._fits_tls()
        if self.limits and self.learn:
            raise ValueError("learn: give limits or learn them, not both")
        if not (self.limits or self.concurrency or self.learn or self.kv):
            raise ValueError("limits: missing; give limits, concurrency, kv or learn: true")
        if self.engine_priority and PROVIDERS[self.provider].priority_sign is None:
            raise ValueError(f"engine_priority: provider {self.provider} has none")
        if self.kv and not self.kv.prometheus and not self.engine_metrics:
            raise ValueError(f"kv: name the metrics of provider {self.provider}, or a prometheus query")
        seen = [limit.model for limit in self.limits]
        if twice := sorted({m for m in seen if seen.count(m) > 1}):
            raise ValueError(f"limits: model {twice[0]!r} is named twice")
        if self.fake is not None and self.provider != "fake":
            raise ValueError("fake: only for provider: fake")
        return self

    def _fits_tls(self) -> None:
        if bool(self.client_cert_file) != bool(self.client_key_file):
            raise ValueError("client_cert_file: goes with client_key_file; give both, or none")
        for key in ("ca_file", "client_cert_file"):
            if getattr(self, key) and not self.tls:
                raise ValueError(f"{key}: is for a url that begins with https")

    @model_validator(mode="after")
    def _pays(self) -> Self:
        if self.owned and self.dollars.limited:
            raise ValueError("owned: is free, and serves when the dollars of others are spent; it has no usd_per_...")
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

    @property
    def engine(self) -> Provider:
        """What is known of the API it speaks; a fake is taken for the engine that it plays."""
        return PROVIDERS[self.fake.engine if self.fake and self.provider == "fake" else self.provider]

    @property
    def engine_metrics(self) -> EngineMetrics | None:
        """Names of its metrics, None where it has none that are known."""
        return self.kv.metrics.names() if self.kv and self.kv.metrics else self.engine.metrics

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
            follow=self.follow_headers,
            headroom=self.headroom,
            window=self.window,
            lacks=frozenset(self.lacks),
            accounting=self.accounting or provider.accounting,
            breaker=self.breaker.rules(),
            ramp=self.ramp,
            prices={model: tuple(one.rules() for one in prices) for model, prices in self.prices.items()},
            dollars=self.dollars,
            burn=self.burn,
            kv=self.kv.rules() if self.kv else None,
            engine_priority=self.engine.priority_sign if self.engine_priority else None,
            shadow=frozenset(self.shadow),
        )


class LastResortSettings(Section):
    """A text of yours that answers, marked as such, where an error would."""

    text: Annotated[str, Field(min_length=1)]
    no_upstream: bool = False
    """Also where no upstream may even be asked (`no_upstream`); else only where all that were asked failed."""


class RouteSettings(Purse):
    """Which upstreams serve which models, first choice first; and what all of it may cost, a hard stop."""

    models: Annotated[tuple[str, ...], Field(min_length=1)]
    chain: Annotated[tuple[str, ...], Field(min_length=1)]
    observe: Share = 0.0
    """Share of its requests that are decided upon, counted and reported, but neither held nor refused."""
    acknowledge_unowned: bool = False
    """Set to accept that the chain does not end on something you own: a provider outage is then your outage."""
    shadow: tuple[Literal["usd_per_hour", "usd_per_day", "usd_per_month"], ...] = ()
    """Limits that only count what they would have stopped."""
    last_resort: LastResortSettings | None = None
    """Answers when the whole chain has failed; counts as an end that you own."""
    first_token_s: Seconds | None = None
    """As in `timeouts`, where its models think for longer before their first token; absent for what is said there."""

    def rules(self, name: str, observe: float) -> core.Route:
        """The route as the core knows it."""
        last = self.last_resort
        text, unasked = (last.text, last.no_upstream) if last else (None, False)
        return core.Route(
            name,
            self.models,
            self.chain,
            max(self.observe, observe),
            dollars=self.dollars,
            shadow=frozenset(self.shadow),
            last_resort=text,
            unasked=unasked,
            first_token_s=self.first_token_s,
        )


class LaneSettings(Section):
    """The bounded queue of one priority. Lanes rank in the order they are written."""

    max_wait_s: Seconds = 30.0
    when_busy: core.WhenBusy = core.WhenBusy.SPILL
    spill_after_s: SomeSeconds = 1.0
    max_requests: Count = 10_000
    max_tokens: Count = 50_000_000
    max_bytes: Count = 512 * 1024 * 1024
    min_share: PartShare = 0.0
    """Share of every capacity that this lane gets while it waits, whatever better lanes want."""
    keep_free: PartShare = 0.0
    """Share of every capacity that this lane leaves free for better lanes."""
    pacing: core.Pacing = core.Pacing.BURST
    order: core.Order = core.Order.FIFO
    """Inside one tenant: first come first served, or earliest deadline first."""
    vip_share: Share = 0.5
    """Up to this share of the lane's service VIP tenants go first."""
    lifo_above: Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)] | None = None
    """Fill of the lane from which the newest goes first; absent for never."""
    shadow: tuple[Literal["max_requests", "max_tokens", "max_bytes"], ...] = ()
    """Bounds that only count what they would have stopped."""


class QueueSettings(Section):
    """What all lanes may hold together; beyond it a better lane's newcomer pushes out a lower lane's newest."""

    max_requests: Count = 20_000
    max_tokens: Count = 100_000_000
    max_bytes: Count = 1024 * 1024 * 1024


class SessionSettings(Section):
    """What one agent session may use in all; a hard stop. Absent limits are none."""

    max_tokens: Count | None = None
    max_usd: Usd | None = None
    idle_s: Seconds = 86_400.0
    """A session that was silent this long is forgotten."""
    derived: bool = False
    """Count sessions that no client named (tenant and key within a window), too."""
    new_share: Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)] = 0.8
    """Share of a lane's bounds and patience that calls of sessions never served before may use."""
    limit: Count = 100_000
    """Most sessions that are remembered."""
    shadow: tuple[Literal["max_tokens", "max_usd"], ...] = ()

    def rules(self) -> core.SessionLimits:
        """The limits as the core knows them."""
        return core.SessionLimits(**self.model_dump(exclude={"shadow"}), shadow=frozenset(self.shadow))


class RetrySettings(Section):
    """Retries that clients announce, or that carry the same idempotency key or body."""

    share: Share = 0.1
    """Of a tenant's requests, this share may be retries that wait; more are refused when they cannot go at once."""
    least_per_s: SomeSeconds = 1.0
    """This many a second may wait in any case."""


class TenantSettings(Purse):
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
    weight: Positive = 1.0
    """Its share of a lane against other tenants that wait."""
    vip: bool = False
    """Goes first in its lane, up to the lane's vip_share."""
    sessions: SessionSettings | None = None
    """Limits of its sessions where they differ from those of all."""
    shadow: tuple[Literal["tpm", "rpm", "concurrency", "usd_per_hour", "usd_per_day", "usd_per_month"], ...] = ()
    """Limits that only count what they would have stopped."""


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
    """Output reserved for a request that names no cap, until this tenant and model have taught better."""
    output_percentile: Annotated[float, BeforeValidator(_number), Field(gt=0, lt=1)] = 0.95
    """Which percentile of the output seen is reserved."""
    sample_above_bytes: Count = 16_384
    calibrate: bool = True


class LogSettings(Section):
    """What Tidegate writes to its log. May be changed while it runs, by a reload or from its admin API."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Decisions are told at info, 50 a second at most."""
    slow_s: SomeSeconds = 10.0
    """A request that waited at least so long leaves a line of its decision, as every refused one does."""
    sample: Share = 1.0
    """Share of those lines that is written."""


class OtlpSettings(Section):
    """Where an OpenTelemetry collector takes metrics and traces, over HTTP."""

    endpoint: str
    """http(s)://host:port of the collector; `/v1/metrics` and `/v1/traces` are added."""
    headers_file: str | None = None
    """One `name: value` a line, for collectors that ask for a key."""
    metrics: bool = True
    traces: bool = True
    """Of requests, by Tidegate and by the Envoy that is rendered for it."""
    every_s: Seconds = 15.0
    """How often metrics are sent."""

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, endpoint: str) -> str:
        if (problem := _url_problem(endpoint)) is not None:
            raise ValueError(problem)
        return endpoint


class TelemetrySettings(Section):
    """What is told of requests, to whom, and how much of it is kept."""

    log: LogSettings = LogSettings()
    otlp: OtlpSettings | None = None
    trace_sample: Share = 0.05
    """Share of requests with a trace, where neither their caller nor Envoy has decided on it."""
    requests: Count = 2000
    """So many of the last requests can be explained."""
    tenants: Count = 50
    """So many of those with the most tokens are named in metrics, of tenants and of sessions; the rest are one."""


class AdminSettings(Section):
    """Who may act on a running Tidegate through its console: nobody, without a token or a client CA.

    Reading is open to whoever reaches the console while that is on loopback; elsewhere it needs the same proof.
    """

    token_file: str | None = None
    """A bearer token of at least 16 characters. It is read anew when it changes."""
    cert_file: str | None = None
    """With key_file: the console speaks TLS."""
    key_file: str | None = None
    client_ca_file: str | None = None
    """Whoever shows a certificate by this CA may act, too. The console speaks only TLS 1.3 then."""
    audit_file: str | None = None
    """JSON lines of every action: one before it is done, one with what came of it. They are in the log in any case.

    An action that cannot be written there is not done.
    """

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file: goes with key_file; give both, or none")
        if self.client_ca_file and not self.cert_file:
            raise ValueError("client_ca_file: needs cert_file and key_file")
        return self


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
