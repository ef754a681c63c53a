"""What `tidegate doctor` asks a running Tidegate in the place of a request, and what it is told.

Whether Envoy waits for an answer, and brings a large body, can only be seen where an answer is late and a body large.
So the doctor may ask for both: a question is a body, sent where requests are sent, that says for how long Tidegate is
to hold it (as it would a queued request), or to say nothing at all (as if it hung). It is refused in any case.

Any caller may ask. A question must therefore be good for nothing else: where a gateway fails open, a request that could
ask for silence would be waved through, past all limits. So a question has exactly one shape, which names no model and
no message and is nothing that an upstream could serve; any other body is a request like all the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["LONGEST_MS", "PREFIX", "Question", "Told", "asked", "busy", "question", "tell", "told"]

PREFIX = b'{"tidegate_doctor":'
"""How every question begins."""
LONGEST_MS = 5_000
"""Nobody is kept waiting for longer."""

_QUESTION = re.compile(PREFIX + rb'\{"(hold|silence)_ms":([0-9]{1,5})\}\}')
_TOLD = re.compile(
    r"doctor: ([0-9]{1,15}) bytes read, (?:(hold|silence) of ([0-9]{1,5}) ms|too many ask at the same time)"
)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked for. hold: Envoy is told to wait, else it hears nothing. ms: for how long, 0 for no time at all."""

    hold: bool
    ms: int


@dataclass(frozen=True, slots=True)
class Told:
    """What came of it. size: bytes of body that were read. question: None where too many asked at the same time."""

    size: int
    question: Question | None


def question(*, hold_ms: int = 0, silence_ms: int = 0, size: int = 0) -> bytes:
    """The body of a question, filled up to `size` bytes with spaces, which mean nothing in JSON."""
    kind, ms = ("silence", silence_ms) if silence_ms else ("hold", hold_ms)
    return (PREFIX + f'{{"{kind}_ms":{ms}}}}}'.encode()).ljust(size)


def asked(body: bytes) -> Question | None:
    """Read a question; None where the body is anything else."""
    found = _QUESTION.fullmatch(body.rstrip(b" ")) if body.startswith(PREFIX) else None
    return Question(found[1] == b"hold", min(int(found[2]), LONGEST_MS)) if found else None


def tell(size: int, waited: Question) -> str:
    """The detail of the refusal that answers a question."""
    return f"doctor: {size} bytes read, {'hold' if waited.hold else 'silence'} of {waited.ms} ms"


def busy(size: int) -> str:
    """The same where nobody waited, because too many ask at the same time."""
    return f"doctor: {size} bytes read, too many ask at the same time"


def told(message: str) -> Told | None:
    """Find in a refusal's message what a question was told; None where it answers none."""
    found = _TOLD.search(message)
    if found is None:
        return None
    return Told(int(found[1]), Question(found[2] == "hold", int(found[3])) if found[2] else None)
