"""What a simulation assumes beside the config: clients, how upstreams really behave, what goes wrong and when.

A YAML file (`--scenario`), checked like the config itself; a fault or a burst may also be one line of words:

    outage primary at 600 for 60
    slow primary at 600 for 120 by 3
    limit primary at 600 for 120 by 0.5
    blind pool at 600 for 60
    P1 at 60 for 30 load 5 prompt 8000-32000 output 100-400 patience 2 retries 3
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from extproc.core.policy import Accounting
from extproc.settings import Section, Settings, SettingsError
from extproc.sim.account import AccountRules
from extproc.sim.engine import EngineRules
from extproc.sim.plan import Mix

__all__ = [
    "Behaviour", "Burst", "Clients", "EngineBehaviour", "Fault", "FaultKind", "Range", "Scenario", "changed",
    "load_scenario", "read_burst", "read_fault",
]  # fmt: skip

S = TypeVar("S", bound=Section)

ENGINES = frozenset({"vllm", "sglang"})

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


def _range(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    if isinstance(value, str):
        low, _, high = value.partition("-")
        return (low, high or low)
    return value


Range = Annotated[tuple[Count, Count], BeforeValidator(_range)]
"""Tokens: one number, or `least-most`."""


class Clients(Section):
    """How callers behave: as the OpenAI and Anthropic SDKs do, unless told otherwise."""

    retries: Annotated[int, Field(ge=0, le=100)] = 2
    timeout_s: Positive = 600.0
    """They leave when the first token (of a JSON answer: all of it) has not come within this, and try again."""
    tells_timeout: bool = True
    """Whether they say so in a header, as the SDKs do; people who walk away do not."""
    lingers_s: Seconds = 0.0
    """How long something between them and us keeps the connection of a client open that has left."""


class FaultKind(StrEnum):
    """What may go wrong: nothing is accepted; everything takes longer; limits shrink; an engine's metrics are lost."""

    OUTAGE = "outage"
    SLOW = "slow"
    LIMIT = "limit"
    BLIND = "blind"


class Fault(Section):
    """One thing that goes wrong with one upstream, `at_s` seconds after the start, for `for_s` seconds."""

    kind: FaultKind
    upstream: str
    at_s: Seconds
    for_s: Positive
    by: Positive | None = None
    """Factor: of all times when slow (2), of every limit (0.5)."""

    @property
    def factor(self) -> float:
        """The factor in force."""
        return self.by or {FaultKind.SLOW: 2.0, FaultKind.LIMIT: 0.5}.get(self.kind, 1.0)


class Burst(Section):
    """Generated requests at random times, of random sizes between two bounds."""

    lane: str
    at_s: Seconds = 0.0
    for_s: Positive
    rps: Positive | None = None
    load: Positive | None = None
    """Times the capacity of all upstreams, where rps is not given."""
    prompt: Range = (200, 2000)
    output: Range = (50, 400)
    tenant: str | None = None
    patience_s: Positive | None = None
    """These callers leave after so long without a first token, without having said so."""
    retries: Annotated[int, Field(ge=0, le=100)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.rps is None) == (self.load is None):
            raise ValueError("give either rps or load")
        for name in ("prompt", "output"):
            least, most = getattr(self, name)
            if least > most:
                raise ValueError(f"{name}: {least}-{most} has its ends swapped")
        return self


class EngineBehaviour(Section):
    """An inference engine with continuous batching; see sim.engine."""

    instances: Count = 1
    kv_tokens: Count | None = None
    max_running: Count = 256
    max_waiting: Count | None = None
    prefill_tokens_per_s: Positive = 15_000.0
    chunk_tokens: Count = 2048
    step_s: Positive = 0.018
    step_per_running_s: Seconds = 0.00012
    step_per_kv_token_s: Seconds = 2e-8
    by_priority: bool | None = None
    """Whether it schedules by priority; absent: where the config has `engine_priority`."""

    def rules(self, kv_tokens: int | None, *, by_priority: bool) -> EngineRules:
        """One instance; `kv_tokens` and `by_priority` are what the config says of it."""
        given = self.model_dump(exclude={"instances"}, exclude_none=True)
        return EngineRules(**{"by_priority": by_priority} | ({"kv_tokens": kv_tokens} if kv_tokens else {}) | given)


class Behaviour(Section):
    """How one upstream really behaves, where the config does not tell or the truth is another."""

    engine: EngineBehaviour | None = None
    tpm: Count | None = None
    rpm: Count | None = None
    input_tpm: Count | None = None
    output_tpm: Count | None = None
    burst_s: Positive | None = None
    accounting: Accounting | None = None
    concurrency: Count | None = None
    first_token_s: Seconds | None = None
    prompt_tokens_per_s: Positive | None = None
    output_tokens_per_s: Positive | None = None
    jitter: Annotated[float, Field(ge=0, lt=1)] | None = None


class Scenario(Section):
    """Everything that is assumed. Shares of lanes and tenants are weights."""

    lanes: dict[str, Positive] = Field(default_factory=dict)
    """How often a request that names no lane is in each; absent: the best 0.3, the next 0.4, the others 0.3."""
    tenants: dict[str, Positive] = Field(default_factory=dict)
    """The same for tenants; absent: all of the config alike, each in its own lanes."""
    slo_s: dict[str, Positive] = Field(default_factory=dict)
    """First token within; absent: 5 in the best lane, 30 in the next, its longest wait in any other."""
    clients: Clients = Clients()
    clients_of: dict[str, Clients] = Field(default_factory=dict)
    """Other habits in some lanes."""
    json_share: Share = 0.1
    uncapped: Share = 0.0
    """Share of requests that name no max_tokens; the others name their answer's length, up to a power of two."""
    miscount: Annotated[float, Field(gt=-0.5, lt=0.5)] = -0.03
    """How far our tokenizer is from the upstream's count, as a share of the prompt."""
    miscount_spread: Annotated[float, Field(ge=0, lt=0.5)] = 0.05
    """How much that differs from prompt to prompt, either way."""
    calls_per_session: Annotated[float, Field(ge=1)] = 4.0
    upstreams: dict[str, Behaviour] = Field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    bursts: tuple[Burst, ...] = ()

    def problems(self, settings: Settings) -> Iterable[str]:
        """What does not fit the config; a line each."""
        for where, names in (
            ("lanes", self.lanes), ("slo_s", self.slo_s), ("clients_of", self.clients_of),
            ("bursts", [burst.lane for burst in self.bursts]),
        ):  # fmt: skip
            yield from _unknown(f"{where}: lane", names, settings.lanes)
        named = [fault.upstream for fault in self.faults]
        yield from _unknown("upstreams: upstream", self.upstreams, settings.upstreams)
        yield from _unknown("faults: upstream", named, settings.upstreams)
        for fault in self.faults:
            engine = fault.upstream in settings.upstreams and self.engine_of(settings, fault.upstream) is not None
            if fault.kind is FaultKind.LIMIT and engine:
                yield f"faults: {fault.upstream} is an engine and has no rate limit"
            if fault.kind is FaultKind.BLIND and not engine:
                yield f"faults: {fault.upstream} is no engine and shows no metrics"

    def engine_of(self, settings: Settings, name: str) -> EngineBehaviour | None:
        """How the upstream behaves as an engine; None when it is an account at a provider."""
        told, upstream = self.upstreams.get(name, Behaviour()), settings.upstreams[name]
        if told.engine is None and (upstream.provider in ENGINES or upstream.kv is not None):
            return EngineBehaviour()
        return told.engine

    def engine_rules(self, settings: Settings, name: str, engine: EngineBehaviour) -> EngineRules:
        """One instance of it."""
        upstream = settings.upstreams[name]
        told = upstream.fake.kv_tokens if upstream.fake else None
        size = told or (upstream.kv.tokens if upstream.kv else None)
        return engine.rules(size, by_priority=upstream.engine_priority)

    def account_rules(self, settings: Settings, name: str, model: str) -> AccountRules:
        """How the upstream behaves as a provider: its limits are those of the config, headroom not taken off."""
        upstream, told = settings.upstreams[name], self.upstreams.get(name, Behaviour())
        limits = [limit for limit in upstream.limits if limit.model in (model, upstream.models.get(model, model))]
        limit = next(iter(limits or [limit for limit in upstream.limits if limit.model == "*"]), None)
        values: dict[str, Any] = {"anthropic": upstream.provider == "anthropic", "concurrency": upstream.concurrency}
        values["accounting"] = settings.policy().upstreams[name].accounting
        if limit is not None:
            values |= {"tpm": limit.tpm, "rpm": limit.rpm, "input_tpm": limit.itpm, "output_tpm": limit.otpm}
        if upstream.fake is not None:
            values |= upstream.fake.model_dump(include=_FAKE)
        return AccountRules(**values | told.model_dump(exclude={"engine"}, exclude_none=True))


_FAKE = {"first_token_s", "prompt_tokens_per_s", "output_tokens_per_s", "burst_s"}


def load_scenario(path: Path | None) -> Scenario:
    """The scenario of a YAML file; the default one when None. SettingsError on any mistake."""
    if path is None:
        return Scenario()
    try:
        raw = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError([f"{path}: {error.strerror}"]) from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise SettingsError([f"{path}: not YAML: {' '.join(str(error).split())[:200]}"]) from None
    return _made(Scenario, raw if raw is not None else {}, str(path))


def changed(
    scenario: Scenario,
    *,
    faults: Iterable[str] = (),
    bursts: Iterable[str] = (),
    lanes: str | None = None,
    tenants: str | None = None,
    slo_s: str | None = None,
) -> Scenario:
    """The scenario with more faults and bursts, and other numbers where given. SettingsError, MixError on a mistake."""
    changes: dict[str, Any] = {
        "faults": (*scenario.faults, *map(read_fault, faults)),
        "bursts": (*scenario.bursts, *map(read_burst, bursts)),
    }
    for name, text in (("lanes", lanes), ("tenants", tenants)):
        if text is not None:
            mix = Mix.parse(text)
            changes[name] = {key: share for key, share in zip(mix.names, mix.shares, strict=True) if share}
    if slo_s is not None:
        changes["slo_s"] = scenario.slo_s | dict(word.partition("=")[::2] for word in slo_s.split(","))
    return _made(Scenario, scenario.model_dump() | changes, "simulate")


def read_fault(text: str) -> Fault:
    """A fault from a line of words. SettingsError when it is none."""
    kind, upstream, *rest = [*text.split(), "", ""][: max(2, len(text.split()))]
    return _made(
        Fault, {"kind": kind, "upstream": upstream} | _pairs(text, rest, _FAULT_WORDS), repr(text), _FAULT_WORDS
    )


def read_burst(text: str) -> Burst:
    """A burst from a line of words. SettingsError when it is none."""
    lane, *rest = text.split() or [""]
    return _made(Burst, {"lane": lane} | _pairs(text, rest, _BURST_WORDS), repr(text), _BURST_WORDS)


_FAULT_WORDS = {"at": "at_s", "for": "for_s", "by": "by"}
_BURST_WORDS = {
    "at": "at_s", "for": "for_s", "rps": "rps", "load": "load", "prompt": "prompt", "output": "output",
    "tenant": "tenant", "patience": "patience_s", "retries": "retries",
}  # fmt: skip


def _pairs(text: str, words: list[str], known: Mapping[str, str]) -> dict[str, str]:
    found = dict(zip(words[::2], words[1::2], strict=False))
    if len(words) % 2 or len(found) * 2 < len(words):
        raise SettingsError([f"{text!r}: expected pairs of a word and a value after the name"])
    if unknown := [word for word in found if word not in known]:
        raise SettingsError([f"{text!r}: unknown word {unknown[0]!r}; known: {', '.join(known)}"])
    return {known[word]: value for word, value in found.items()}


def _made(kind: type[S], raw: Any, source: str, words: Mapping[str, str] | None = None) -> S:
    written = {key: word for word, key in (words or {}).items()}
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        places = (
            (".".join(written.get(str(part), str(part)) for part in e["loc"]), _said(e["type"], e["msg"]))
            for e in error.errors()
        )
        raise SettingsError([f"{source}: {place + ': ' if place else ''}{what}" for place, what in places]) from None


def _said(kind: str, message: str) -> str:
    return {"missing": "is required", "extra_forbidden": "unknown key"}.get(kind, message)


def _unknown(where: str, names: Iterable[str], known: Iterable[str]) -> Iterable[str]:
    known = list(known)
    return (f"{where} {name!r} is not in the config; known: {', '.join(known)}" for name in names if name not in known)
