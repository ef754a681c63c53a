"""What the checks share: whom they ask, what is expected, what was seen so far and what it cost; and their verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from extproc.core.policy import Route
from extproc.core.refusal import RULES, Reason
from extproc.core.routing import matches
from extproc.dialects import examination
from extproc.dialects.examination import Told
from extproc.doctor.asking import Answer, Gateway
from extproc.settings import Settings

__all__ = [
    "CHAT", "MESSAGES", "Check", "Expected", "Need", "Result", "Spent", "Verdict", "Visit", "answered_by", "error_of",
]  # fmt: skip

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
LARGE = 1_250_000
"""Bytes: 1 MB, and more than the 1 MiB that Envoy keeps unless it is told otherwise."""
LARGER = 2_500_000
"""Where it is told to show what it has (`BUFFERED_PARTIAL`), that is up to twice as much."""


class Verdict(StrEnum):
    """What a check found."""

    OK = "ok"
    WRONG = "wrong"
    NOT_TOLD = "not told"


@dataclass(frozen=True, slots=True)
class Result:
    """A verdict, why, and what to change where something can be changed."""

    verdict: Verdict
    why: str
    change: str = ""


class Need(StrEnum):
    """What a check cannot do without. A later one includes those before it."""

    NOTHING = "nothing"
    FILTER = "filter"
    """Tidegate answers."""
    QUESTIONS = "questions"
    """It answers questions, too: the caller is let in."""
    TOKENS = "tokens"
    """A model may be asked, which costs."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to prove. The function asks, and judges what it is told."""

    name: str
    proves: str
    need: Need
    run: Callable[[Visit], Result]


@dataclass(frozen=True, slots=True)
class Expected:
    """What the config says, its defaults where none is given. known: one was given."""

    known: bool = False
    message_timeout_s: float = 2.0
    max_body_bytes: int = 8 * 1024 * 1024
    fails_open: bool = False
    statuses: Mapping[Reason, int] = field(default_factory=dict)
    routes: tuple[Route, ...] = ()

    @classmethod
    def of(cls, settings: Settings | None, *, fails_open: bool) -> Expected:
        """Read it from the settings of the gateway that is looked at; None where nobody gave them."""
        if settings is None:
            return cls(fails_open=fails_open)
        gateway = settings.gateway
        return cls(
            known=True,
            message_timeout_s=gateway.message_timeout_s,
            max_body_bytes=gateway.max_body_bytes,
            fails_open=fails_open,
            statuses=settings.statuses,
            routes=settings.policy().routes,
        )

    def status_of(self, reason: str) -> int | None:
        """The status that goes with a reason; None for a word that is no reason."""
        if reason not in list(Reason):
            return None
        return self.statuses.get(Reason(reason), RULES[Reason(reason)].status)

    def chain_of(self, model: str) -> tuple[str, ...]:
        """The upstreams of a model, empty where nobody knows them."""
        return next((route.chain for route in self.routes if matches(model, route.models)), ())

    @property
    def large(self) -> int:
        """Bytes of the large body: no larger than the gateway is to accept."""
        return min(LARGE, self.max_body_bytes)

    @property
    def larger(self) -> int:
        """The same where it costs nothing, and it is known that so much is to be accepted."""
        return min(LARGER, self.max_body_bytes) if self.known else self.large


@dataclass
class Spent:
    """What was asked of models: how often, and tokens as reported, or as estimated where nothing was."""

    requests: int = 0
    tokens: int = 0


@dataclass
class Visit:
    """One look at a gateway. model: empty until one is known. tokens: whether models may be asked.

    The rest is what checks found out for those after them: whether Tidegate answers, and questions, too; why a caller
    is not let in; after how many seconds Envoy gives up on a silent Tidegate, None where it was not seen to; who
    serves, and how long the first token takes there (seconds, without the network's share).
    """

    gateway: Gateway
    expected: Expected = Expected()
    model: str = ""
    anthropic: bool | None = None
    tokens: bool = True
    other: str = ""
    spent: Spent = field(default_factory=Spent)
    filtered: bool = False
    understood: bool = False
    barred: str = ""
    gives_up_s: float | None = None
    upstream: str = ""
    first_token_s: float | None = None

    def question(self, path: str = CHAT, **asked: int) -> tuple[Answer, Told | None]:
        """Put a question (see dialects.examination) and read its answer."""
        answer = self.gateway.ask("POST", path, examination.question(**asked))
        return answer, examination.told(answer.message) if answer.reason == Reason.BAD_REQUEST else None

    def models(self) -> list[str]:
        """The models that Tidegate lists for this caller. Costs nothing."""
        listed = self.gateway.ask("GET", "/v1/models").data.get("data")
        found = [model.get("id") for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
        return [name for name in found if isinstance(name, str)]

    def lacks(self, need: Need) -> str:
        """Why a check with this need cannot be made; empty where it can."""
        order = list(Need)
        rank = order.index(need)
        if rank >= order.index(Need.FILTER) and not self.filtered:
            return "Tidegate does not answer here"
        if rank >= order.index(Need.QUESTIONS) and not self.understood:
            return self.barred
        if need is Need.TOKENS and not self.tokens:
            return "it asks a model, and was told to spend nothing"
        if need is Need.TOKENS and not self.model:
            return "no model is known; name one with --model"
        return ""


def answered_by(answer: Answer) -> str:
    """An answer in a few words: its status, its reason or who wrote it, and how long it took."""
    server = answer.headers.get("server", "")
    who = f"as {answer.reason}" if answer.reason else f"by {server}" if server else "without a word of who it is"
    return f"status {answer.status} {who}, after {answer.seconds:.1f} s"


def error_of(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The error of a body, empty where it has none."""
    error = data.get("error")
    return error if isinstance(error, dict) else {}
