"""Why a request is refused: one closed list, which each dialect words in its own way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from extproc.fakes.limits import Shortage

Reason = Literal[
    "bad_request",
    "no_key",
    "wrong_key",
    "forbidden",
    "unknown_model",
    "unknown_path",
    "too_large_body",
    "context_length",
    "content_filter",
    "billing",
    "payment",
    "spend_limit",
    "slow_down",
    "prefill",
    "rate",
    "overloaded",
    "unavailable",
    "queue_full",
    "server_error",
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal, before it is worded."""

    reason: Reason
    detail: str = ""
    """What is wrong, for `bad_request`; the model, for `unknown_model`; the path, for `unknown_path`."""
    param: str | None = None
    """The member of the body that is wrong."""
    shortage: Shortage | None = None
    """What is short; set for `rate`, and only there."""


class Refused(Exception):  # noqa: N818 - it is an outcome, not an error of the server
    """Raised where the reason is known, caught once, in the server."""

    def __init__(self, refusal: Refusal) -> None:
        """Carry the refusal."""
        super().__init__(refusal.reason)
        self.refusal = refusal


def bad_request(detail: str, param: str | None = None) -> Refused:
    """Return the refusal of a body that cannot be served."""
    return Refused(Refusal("bad_request", detail=detail, param=param))
