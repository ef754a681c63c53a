"""What a dialect has to offer the server: endpoints, the wording of refusals, and rate-limit headers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from extproc.fakes.answer import Answer, Ask, Script
    from extproc.fakes.limits import Kind, Level
    from extproc.fakes.refusal import Refusal


@dataclass(frozen=True, slots=True)
class Worded:
    """A refusal as it leaves."""

    status: int
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one family of providers speaks where endpoints do not differ."""

    name: str
    request_id_header: str
    word: Callable[[Refusal, str], Worded]
    """Word a refusal; the string is the request id."""
    limit_headers: Callable[[Mapping[Kind, Level], float], dict[str, str]]
    """Headers for the state of the buckets; the number is the wall clock in Unix seconds."""
    filters_in_answer: bool
    """A filtered request is answered with a finish reason (True) or refused (False)."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path that generates, or at least answers."""

    path: str
    dialect: Dialect
    read: Callable[[dict[str, Any]], Ask] | None
    """Read a JSON body, raising `Refused`; None where the body is not looked at."""
    write: Callable[[Answer], bytes]
    """Write the whole answer."""
    script: Callable[[Answer], Script] | None = None
    """Write the answer as a stream; None where there are no streams."""
    content_type: str = "application/json"
