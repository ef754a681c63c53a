"""Which requests have a trace, and of what name: told from what is known of a request, so that nobody need remember it.

A request that comes with a valid `traceparent` (W3C Trace Context) belongs to that trace, and its flags say whether it
is kept: Envoy's decision where it traces, else the caller's. Any other gets a trace of its own: the request id of
Envoy, which is a random UUID, and of those a share is kept. What is no valid `traceparent` counts as none.

    sampled(request) -> "4bf92f3577b34da6a3ce929d0e0e4736", or "" for no trace

No span is known here, and no library: this is asked once or more for every request.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from hashlib import blake2b

from extproc.core.request import Request
from extproc.core.value import value

__all__ = ["NONE", "Parent", "Sampling", "parent_of"]

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_ZEROS = frozenset({"0" * 32, "0" * 16})
_FORBIDDEN = "ff"
_FIRST = "00"
_SAMPLED = 1
_DIGITS = 14
"""Hexadecimal digits at the end of a trace's id that are random for certain, by W3C and in a UUID of Envoy's."""
_ALL = 16**_DIGITS


@value
class Parent:
    """The span that a request comes from: ids in hexadecimal, and whether its trace is kept."""

    trace: str
    span: str
    sampled: bool


def parent_of(traceparent: str) -> Parent | None:
    """What a `traceparent` says; None where it is none that the standard allows.

    Later versions may say more behind what this one knows; the first may not.
    """
    form = _FORM.fullmatch(traceparent)
    if form is None:
        return None
    version, trace, span, flags, more = form.groups()
    if version == _FORBIDDEN or (version == _FIRST and more) or trace in _ZEROS or span in _ZEROS:
        return None
    return Parent(trace, span, bool(int(flags, 16) & _SAMPLED))


class Sampling:
    """See the head of this file. share: of the traces that begin here, 0 to 1."""

    def __init__(self, share: float) -> None:
        """Names of requests without a UUID differ between processes."""
        self._below = round(share * _ALL)
        self._salt = secrets.token_bytes(16)

    def __call__(self, request: Request) -> str:
        """The id of its trace in hexadecimal, or empty where it has none that is kept."""
        return self.of(request.trace, request.id, request.ticket)

    def of(self, traceparent: str, request_id: str, ticket: str) -> str:
        """The same of a request of which no more is known. ticket: a name of it that no other has."""
        if traceparent and (parent := parent_of(traceparent)) is not None:
            return parent.trace if parent.sampled else ""
        trace = request_id.replace("-", "") if _UUID.fullmatch(request_id) else self._named(ticket)
        return trace if int(trace[-_DIGITS:], 16) < self._below and trace not in _ZEROS else ""

    def _named(self, ticket: str) -> str:
        """An id for whoever has none that is random."""
        return blake2b(ticket.encode("utf-8", "surrogatepass"), digest_size=16, key=self._salt).hexdigest()


NONE: Callable[[Request], str] = lambda _: ""  # noqa: E731 - a constant that is called
"""What to ask where there are no traces."""
