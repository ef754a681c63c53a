"""Faults on demand: how a provider fails, by name.

A fault is written `name;param=value;flag`, for example `503`, `slow-first-token;s=20;early-headers`, `cut;at=40`. A
request brings one in the header `x-fake-fault`, or a test puts one on the `FaultBoard` for the next requests.

Every fault takes `provider=NAME` (only there; a gateway may send the same headers to several upstreams), and those that
refuse or reset take `after=SECONDS` (how long the provider takes to say so).

Refusing faults come before the limits and cost nothing. All others are charged like a served request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from extproc.fakes.limits import Shortage
from extproc.fakes.refusal import Reason, Refusal, bad_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.fakes.settings import FakeSettings

FAULT_HEADER: Final = "x-fake-fault"

# Name -> the parameters it knows, with their defaults; None means "no default", False is a flag.
FAULTS: Final[Mapping[str, Mapping[str, float | bool | None]]] = {
    # Refusals.
    "500": {"after": 0.0},
    "503": {"after": 0.0},
    "529": {"after": 0.0},
    "429": {"after": 0.0, "retry-after": 1.0},
    "429-bare": {"after": 0.0},
    "401": {"after": 0.0},
    "403": {"after": 0.0},
    "402": {"after": 0.0},
    "404": {"after": 0.0},
    "413": {"after": 0.0},
    "slow-down": {"after": 0.0},
    "billing": {"after": 0.0},
    "spend-limit": {"after": 0.0},
    "context-length": {"after": 0.0},
    # Only where the last message is the assistant's.
    "prefill": {"after": 0.0},
    "error-200": {"after": 0.0, "billing": False, "filter": False},
    "html-200": {"after": 0.0},
    # No answer.
    "reset": {"after": 0.0},
    "silence": {},
    # Answers that go wrong. `at`: after how many tokens; default: half of them.
    "slow-first-token": {"s": 20.0, "early-headers": False},
    "stall": {"s": 30.0, "at": None},
    "cut": {"at": None},
    "early-end": {"at": None},
    "malformed": {"at": None},
    "no-done": {},
    # `flat`: as vLLM writes it, without a member `error`.
    "error-first": {"billing": False, "flat": False},
    "error-later": {"at": None, "billing": False, "flat": False},
    "truncated": {},
    "content-filter": {"after": 0.0, "finish": False},
    "empty": {},
    "reasoning-only": {},
}

_REASONS: Final[Mapping[str, Reason]] = {
    "500": "server_error",
    "503": "unavailable",
    "529": "overloaded",
    "429": "rate",
    "429-bare": "rate",
    "401": "wrong_key",
    "403": "forbidden",
    "402": "payment",
    "404": "unknown_model",
    "413": "too_large_body",
    "slow-down": "slow_down",
    "billing": "billing",
    "spend-limit": "spend_limit",
    "prefill": "prefill",
    "context-length": "context_length",
    "content-filter": "content_filter",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault and its parameters."""

    name: str
    params: Mapping[str, float | bool | None] = field(default_factory=dict)
    provider: str | None = None

    def seconds(self, param: str) -> float:
        """Return a parameter in seconds; 0 if this fault does not know it."""
        return float(self.params.get(param) or 0.0)

    def flag(self, param: str) -> bool:
        """Return whether a flag is set."""
        return bool(self.params.get(param))

    def at(self, tokens: int) -> int:
        """Return after how many of `tokens` tokens the fault strikes."""
        at = self.params.get("at")
        return tokens // 2 if at is None else min(tokens, int(at))


def parse_fault(text: str) -> Fault:
    """Read a fault. Raises `Refused` (bad request) for an unknown name, an unknown parameter or a bad number."""
    name, *pairs = (part.strip() for part in text.split(";"))
    if name not in FAULTS:
        raise bad_request(f"unknown fault {name!r}; known: {', '.join(FAULTS)}", FAULT_HEADER)
    params = dict(FAULTS[name])
    provider = None
    for pair in filter(None, pairs):
        param, _, value = pair.partition("=")
        if param == "provider":
            provider = value
        elif param in params:
            params[param] = _flag(value) if params[param] is False else _number(param, value)
        else:
            raise bad_request(f"fault {name!r} has no parameter {param!r}", FAULT_HEADER)
    return Fault(name=name, params=params, provider=provider)


def error_of(fault: Fault) -> Refusal:
    """Return what an error under status 200 is about."""
    if fault.flag("billing"):
        return Refusal("billing")
    return Refusal("content_filter" if fault.flag("filter") else "server_error")


def refusal_by(fault: Fault, settings: FakeSettings) -> Refusal | None:
    """Return the refusal this fault means; None if it is a fault of another kind."""
    reason = _REASONS.get(fault.name)
    if reason is None or fault.flag("finish"):
        return None
    if reason != "rate":
        return Refusal(reason)
    wait_s = fault.seconds("retry-after") if fault.name == "429" else None
    limit = settings.tpm or 10_000
    shortage = Shortage(kind="tokens", limit=limit, used=limit, requested=max(1, limit // 100), wait_s=wait_s)
    return Refusal("rate", shortage=shortage)


def prefilled(body: Mapping[str, Any]) -> bool:
    """Tell whether a request has begun the answer itself."""
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


@dataclass(slots=True)
class _Posted:
    fault: Fault
    spelled: str
    left: int | None
    match: str | None

    def fits(self, model: str, provider: str) -> bool:
        here = self.fault.provider in (None, provider)
        return here and (self.left is None or self.left > 0) and (self.match is None or self.match in model)


class FaultBoard:
    """Faults that a test has put up for the requests to come. The oldest that fits applies."""

    def __init__(self) -> None:
        """Start without faults."""
        self._posted: list[_Posted] = []

    def post(self, order: Mapping[str, Any]) -> None:
        """Put one up: `fault` as in the header, `count` requests (null: all), `match` a part of the model's name.

        Raises `Refused` (bad request) when the order cannot be read.
        """
        spelled, count, match = order.get("fault"), order.get("count"), order.get("match")
        if not isinstance(spelled, str):
            raise bad_request("fault must be a string", "fault")
        if count is not None and (not isinstance(count, int) or count < 1):
            raise bad_request("count must be a number above 0, or null", "count")
        if match is not None and not isinstance(match, str):
            raise bad_request("match must be a string", "match")
        self._posted.append(_Posted(parse_fault(spelled), spelled, count, match))

    def clear(self) -> None:
        """Take all faults down."""
        self._posted.clear()

    def take(self, model: str, provider: str) -> Fault | None:
        """Return the fault for a request, and count it."""
        for posted in self._posted:
            if posted.fits(model, provider):
                if posted.left is not None:
                    posted.left -= 1
                self._posted = [other for other in self._posted if other.left != 0]
                return posted.fault
        return None

    def shown(self) -> list[dict[str, Any]]:
        """Return the faults that are still up."""
        return [{"fault": p.spelled, "count": p.left, "match": p.match} for p in self._posted]


def _flag(value: str) -> bool:
    return value.lower() not in ("0", "false", "no")


def _number(param: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise bad_request(f"fault parameter {param} must be a number of at least 0, not {value!r}", FAULT_HEADER)
    return number
