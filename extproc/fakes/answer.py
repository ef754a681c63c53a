"""What is asked, what will be answered, and in which pieces: frozen values between the dialects and the server.

A dialect reads a body into an `Ask`, `planned` turns it into an `Answer`, and the dialect writes that as one JSON body
or as the `Script` of a stream. Everything is known before the first byte leaves, so a stream costs little per event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from extproc.fakes.limits import Cost
from extproc.fakes.text import answer_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from extproc.fakes.faults import Fault
    from extproc.fakes.settings import FakeSettings

Finish = Literal["stop", "length", "filter"]


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request asks for, in any dialect."""

    model: str
    prompt_tokens: int = 0
    talks: bool = True
    """False where nothing is generated (embeddings, token counts): no output is charged."""
    cap: int | None = None
    """Most output tokens per choice."""
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    priority: int = 0
    """As vLLM reads it: lower goes first."""
    says_ok: bool = False
    """The caller asked to reply OK, as health checks do."""
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What will be answered, decided on arrival. Token counts are per choice."""

    ask: Ask
    provider: str
    serial: str
    """Unique part of all ids of this answer."""
    created: int
    """Unix seconds."""
    tokens: int
    reasoning_tokens: int
    cached_tokens: int
    finish: Finish

    @property
    def visible_tokens(self) -> int:
        """Tokens of the text; the others were spent on reasoning."""
        return self.tokens - self.reasoning_tokens

    @property
    def completion_tokens(self) -> int:
        """Output of all choices, reasoning included."""
        return self.tokens * self.ask.choices

    def text(self, start: int = 0, end: int | None = None) -> str:
        """Return visible tokens `start` to `end`; safe to put into JSON as it is."""
        end = self.visible_tokens if end is None else min(end, self.visible_tokens)
        if self.ask.says_ok:
            return "OK"[start * 2 : end * 2]
        return answer_text(start, end)


@dataclass(frozen=True, slots=True)
class Script:
    """A stream as bytes: opening, deltas, closing, end. Functions, because some dialects number their events."""

    opening: bytes
    delta: Callable[[int, int], bytes]
    """Bytes of the event(s) that carry visible tokens `start` to `end`, for every choice."""
    closing: Callable[[], bytes]
    """The finish reason, and the usage where it was asked for."""
    end: Callable[[], bytes]
    """What tells the client that nothing follows."""
    error: Callable[[], bytes]
    """An error in place of the rest."""


def cost_of(ask: Ask, settings: FakeSettings) -> Cost:
    """Return what the account is charged on arrival: the prompt and all that may be generated."""
    return Cost(input=ask.prompt_tokens, output=_cap(ask, settings) * ask.choices)


def planned(ask: Ask, settings: FakeSettings, fault: Fault | None, serial: str, created: int) -> Answer:
    """Decide the answer. Pure: the same arguments give the same answer."""
    tokens, finish = _length(ask, settings, fault)
    return Answer(
        ask=ask,
        provider=settings.name,
        serial=serial,
        created=created,
        tokens=tokens,
        reasoning_tokens=_reasoning(ask, settings, fault, tokens),
        cached_tokens=int(ask.prompt_tokens * settings.cached_share),
        finish=finish,
    )


def _reasoning(ask: Ask, settings: FakeSettings, fault: Fault | None, tokens: int) -> int:
    if fault is not None and fault.name == "reasoning-only":
        return tokens
    return 0 if ask.says_ok else min(settings.reasoning_tokens, tokens)


def _length(ask: Ask, settings: FakeSettings, fault: Fault | None) -> tuple[int, Finish]:
    cap = _cap(ask, settings)
    natural = cap if settings.output_tokens is None else settings.output_tokens
    if ask.says_ok:
        natural = 1
    tokens = min(natural, cap)
    if not ask.talks:
        return 0, "stop"
    match fault.name if fault else None:
        case "empty":
            return 0, "stop"
        case "truncated":
            # Far below the cap: a model that stopped although it was allowed to go on.
            return max(1, tokens // 10), "length"
        case "content-filter":
            return max(1, tokens // 2), "filter"
    return tokens, "length" if natural > cap else "stop"


def _cap(ask: Ask, settings: FakeSettings) -> int:
    if not ask.talks:
        return 0
    return settings.default_output_tokens if ask.cap is None else ask.cap
