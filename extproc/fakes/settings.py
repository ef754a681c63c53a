"""What a fake provider is told before it starts, and what a test may change while it runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping

Accounting = Literal["upfront", "actual"]
Kind = Literal["vllm", "sglang"]
Priorities = Literal["followed", "ignored", "refused"]
Metrics = Literal["told", "missing", "frozen", "slow", "garbage", "percent"]

_FIXED_AT_START = frozenset({"name", "host", "port"})


@dataclass(frozen=True, slots=True)
class FakeSettings:
    """One fake provider. Times are in seconds, sizes in LLM tokens, limits per minute; None means "no limit".

    Raises ValueError when a value cannot mean anything.
    """

    name: str
    """Who answers: told in `system_fingerprint` and in the header `x-fake-provider`."""
    port: int
    """0 lets the operating system choose."""
    host: str = "127.0.0.1"

    # What the account may spend.
    tpm: int | None = None
    rpm: int | None = None
    input_tpm: int | None = None
    output_tpm: int | None = None
    burst_s: float = 60.0
    """Capacity of every bucket, in seconds of its own refill."""
    accounting: Accounting = "upfront"
    """`upfront`: prompt + cap x choices on arrival, never refunded. `actual`: the same, settled to the real output."""

    # How much fits into the engine at once.
    concurrency: int | None = None
    queue: int | None = 0
    """How many requests may wait for the engine; one more is refused with 503. None: any number."""
    kv_tokens: int | None = None
    """Tokens that the KV cache holds. Above it the engine preempts."""
    kv_usage: float | None = None
    """Reported as KV usage instead of the computed one (0 to 1)."""

    # Which engine it plays.
    engine: Kind = "vllm"
    """Whose metrics it shows, and whose priorities it follows: vLLM's (lower first) or SGLang's (higher first)."""
    priorities: Priorities = "followed"
    """Whether it schedules by `priority`. Today's vLLM and SGLang ignore it when they do not; older vLLM refused it."""
    server_info: bool = False
    """Show vLLM's `/server_info`, as in its development mode. SGLang always does."""
    metrics: Metrics = "told"
    """How the metrics page is: as it should be, 404, the page of a moment ago, late, not a page, or in percent."""
    metrics_delay_s: float = 10.0
    """How late the page is when it is slow."""

    # How fast it is. None means "instantly".
    base_latency_s: float = 0.0
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    early_headers: bool = False
    """Send the headers of a stream at once instead of together with the first token."""

    # What it answers.
    tokens_per_event: int = 1
    default_output_tokens: int = 64
    """The cap of a request that brings none."""
    output_tokens: int | None = None
    """How long the model talks if nothing stops it. None: exactly as long as the cap allows."""
    reasoning_tokens: int = 0
    """Output spent on thinking before the first visible token; part of the output count."""
    cached_share: float = 0.0
    """Share of every prompt that is reported as read from the prompt cache."""

    # Whom it serves.
    key: str | None = None
    models: tuple[str, ...] = ("*",)
    embeds_only: bool = False
    """Whether its model only embeds, so that who chats with it is refused."""
    record_size: int = 10_000
    """How many requests the record keeps."""

    def __post_init__(self) -> None:
        """Refuse what cannot be served."""
        _require(bool(self.name), "name must not be empty")
        _require(0 <= self.port < 1 << 16, "port must be 0 to 65535")
        _require(self.accounting in get_args(Accounting), f"accounting must be one of {get_args(Accounting)}")
        _require(bool(self.models) and not isinstance(self.models, str), "models must be a tuple of names")
        for name in ("tpm", "rpm", "input_tpm", "output_tpm", "concurrency", "kv_tokens"):
            _require(_none_or_at_least(getattr(self, name), 1), f"{name} must be at least 1, or None")
        for name in ("prompt_tokens_per_s", "output_tokens_per_s"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name} must be above 0, or None")
        for name in ("queue", "output_tokens"):
            _require(_none_or_at_least(getattr(self, name), 0), f"{name} must be at least 0, or None")
        for name in ("tokens_per_event", "default_output_tokens", "record_size"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1")
        for name in ("base_latency_s", "reasoning_tokens"):
            _require(getattr(self, name) >= 0, f"{name} must be at least 0")
        _require(self.burst_s > 0, "burst_s must be above 0")
        _require(0 <= self.cached_share <= 1, "cached_share must be 0 to 1")
        _require(self.engine in get_args(Kind), f"engine must be one of {get_args(Kind)}")
        _require(self.priorities in get_args(Priorities), f"priorities must be one of {get_args(Priorities)}")
        _require(self.metrics in get_args(Metrics), f"metrics must be one of {get_args(Metrics)}")
        _require(self.metrics_delay_s >= 0, "metrics_delay_s must be at least 0")
        _require(self.kv_usage is None or 0 <= self.kv_usage <= 1, "kv_usage must be 0 to 1, or None")


def changed(settings: FakeSettings, changes: Mapping[str, Any]) -> FakeSettings:
    """Return the settings with some values replaced, as a test asks for at run time.

    Raises ValueError for an unknown name, a name that is fixed at start, or a value that cannot be served.
    """
    known = {field.name for field in dataclasses.fields(settings)} - _FIXED_AT_START
    if unknown := sorted(set(changes) - known):
        msg = f"cannot change {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        raise ValueError(msg)
    values = dict(changes)
    if isinstance(values.get("models"), list):
        values["models"] = tuple(values["models"])
    try:
        return dataclasses.replace(settings, **values)
    except TypeError as error:
        msg = f"wrong type in {changes}"
        raise ValueError(msg) from error


def shown(settings: FakeSettings) -> dict[str, Any]:
    """Return the settings as plain data, without the key."""
    return {**dataclasses.asdict(settings), "key": None if settings.key is None else "(set)"}


def _require(condition: bool, message: str) -> None:  # noqa: FBT001 - reads as the sentence it is
    if not condition:
        raise ValueError(message)


def _none_or_at_least(value: int | None, least: int) -> bool:
    return value is None or value >= least
