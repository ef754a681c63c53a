"""What a record of Envoy's access log says about its upstream, and what its breaker is told of that.

A failed attempt, an answer under 200 that was none or broke off, a first token that was late: each may be the
upstream's fault, or its caller's, whose prompt breaks everywhere, who left, or who gave it too little time. Each fault
is told once.

Deliberately not here: what breakers make of it (core.breaker), what comes back to whom (flights), and the meaning of
errors (dialects).
"""

from __future__ import annotations

from extproc.breakers import Breakers
from extproc.core.breaker import Evidence, Outcome
from extproc.core.flight import Flight
from extproc.core.forecast import Pace
from extproc.core.hurry import ample_s
from extproc.core.policy import Policy
from extproc.core.request import Request
from extproc.core.routing import is_callers_word
from extproc.core.suspects import Suspects
from extproc.dialects import ErrorClass, classify
from extproc.ports import Clock, Record, RecordKind

__all__ = ["CLIENT_LEFT", "CUT", "OVERLOADED", "STALLED", "UNSENT", "Judge", "fault_of", "is_none"]

CLIENT_LEFT = frozenset({"downstream_connection_termination", "downstream_remote_reset"})
UNSENT = frozenset(
    {"upstream_connection_failure", "no_healthy_upstream", "upstream_overflow", "dns_resolution_failure"}
)
CUT = frozenset(
    {
        "upstream_request_timeout", "upstream_remote_reset", "upstream_connection_termination", "local_reset",
        "upstream_protocol_error", "stream_idle_timeout", "duration_timeout",
    }
)  # fmt: skip
STALLED = "stream_idle_timeout"
WAITED = frozenset({"upstream_request_timeout", STALLED, "duration_timeout"})
"""Of these those of an upstream that said nothing for too long."""
SILENT, CUT_OFF = "silent", "cut"
"""Ways to fail; see `_way`."""
HOLLOW = frozenset({"broken", "empty", "short"})
"""What is wrong with an answer that has its end; its caller may have brought it about, by a grammar nothing fits."""
MALFORMED = "malformed"
"""How the filter at the upstream calls an answer that is no JSON."""
NO_SUCH_MODEL = "model_not_found"
OVERLOADED = 503
FAILED = 500
PASSES = frozenset({OVERLOADED, 504, *range(520, 531)})
"""Statuses that tell of an overload, or of a connection or an answer that did not come (52x: Cloudflare): not of what
was asked."""
OVERLOADS = ("overload", "unavailable", "capacity", "queue_")
"""Parts of an error's words that tell of an overload, in any case."""


class Judge:
    """Judges upstreams by records, one after the other. See the head of this file."""

    def __init__(self, policy: Policy, breakers: Breakers, clock: Clock, pace: Pace) -> None:
        """Nothing was heard yet."""
        self._policy = policy
        self._breakers = breakers
        self._clock = clock
        self._pace = pace
        self._suspects = Suspects()

    def follow(self, policy: Policy) -> None:
        """Go by other rules from now on."""
        self._policy = policy

    def attempt(self, record: Record, flight: Flight | None = None) -> tuple[Outcome, str]:
        """What a failed attempt says about its upstream, and why. flight: whose it was, None where nobody knows."""
        outcome = _outcome(record, self._provider(record.upstream))
        if flight is not None and "upstream_request_timeout" in record.flags and self._was_hurried(flight, record):
            outcome = Outcome.IGNORED
        if flight is not None and outcome in (Outcome.FAILURE, Outcome.CREDENTIAL):
            outcome = self._of_the_request(record.upstream, record.status, record.error, outcome, flight.request)
        malformed = is_none(record.error)
        if flight is not None and outcome is Outcome.FAILURE and self._fails_anywhere(record, flight.request):
            outcome, malformed = Outcome.IGNORED, False
        what = record.error or ", ".join(sorted(record.flags)) or "no answer"
        cause = f"status {record.status}: {what}"
        if flight is None:
            began = self._clock.time() - record.duration_s
            self._breakers.record(record.upstream, outcome, began=began, cause=cause)
        else:
            self._tell_breaker(flight, record, outcome, cause, malformed=malformed)
        return outcome, cause

    def answer(self, flight: Flight, record: Record) -> None:
        """What an answer under 200 that its caller waited for says about its upstream."""
        outcome, cause, malformed = _verdict(record, self._provider(record.upstream))
        if outcome in (Outcome.FAILURE, Outcome.CREDENTIAL):
            error = str(record.tail.get("error", ""))
            outcome = self._of_the_request(record.upstream, record.status, error, outcome, flight.request)
        if outcome is Outcome.FAILURE and self._fails_anywhere(record, flight.request):
            outcome, malformed = Outcome.IGNORED, False
        self._tell_breaker(flight, record, outcome, cause, malformed=malformed)

    def first_token(self, flight: Flight, record: Record) -> None:
        """How long its first token took, or that it did not come in this time, is all that it says."""
        if flight.request.stream and not flight.timed:
            self._tell_breaker(flight, record, Outcome.IGNORED, "first tokens are late")

    def _was_hurried(self, flight: Flight, record: Record) -> bool:
        """Whether an attempt that ran out of time was given less than is enough there, so that it says nothing."""
        request, given_s, upstream = flight.request, flight.given_s, record.upstream
        begun = request.stream and 0 < record.status < 400  # noqa: PLR2004 - HTTP
        if begun or given_s >= flight.limit_s:  # it is not the caller's limit that ran out
            return False
        if record.kind is RecordKind.FINAL and flight.departed is not None:  # the limit of all attempts together
            given_s = given_s - (flight.came - flight.departed) if flight.at == upstream else 0.0
        p95_s = self._breakers.usual_first_s(upstream, request.model, request.size.input)
        output_s = self._pace.output_s(request.model, request.size.output)
        return given_s < ample_s(request, flight.first_token_s, flight.limit_s, p95_s=p95_s, output_s=output_s)

    def _fails_anywhere(self, record: Record, request: Request) -> bool:
        """Whether it may be the request's own fault: it failed in this way at another upstream, too, in this flight or
        when its client sent it before.
        """
        way = _way(record)
        if not way:
            return False
        return self._suspects.failed(request.fingerprint or request.ticket, way, record.upstream, self._clock.time())

    def _of_the_request(self, upstream: str, status: int, error: str, outcome: Outcome, request: Request) -> Outcome:
        """What it says where it may be about what was asked.

        A model that is missing, or that our key may not use, is our mistake; but where a caller may ask for any name it
        says nothing. What our key may not do may be for the request's content, or for what it refers to: however often
        that is sent, it is one sign.
        """
        kind, _, code = error.partition("/")
        means, place = classify(self._provider(upstream), status, kind, code), self._policy.upstreams.get(upstream)
        missing = means is ErrorClass.MISSING or code == NO_SUCH_MODEL
        if missing and place is not None and is_callers_word(self._policy, place, request.model):
            return Outcome.IGNORED
        if means is ErrorClass.FORBIDDEN:
            name, now = request.fingerprint or request.ticket, self._clock.time()
            return Outcome.IGNORED if self._suspects.failed(name, means, upstream, now, once=True) else outcome
        return outcome

    def _tell_breaker(
        self, flight: Flight, record: Record, outcome: Outcome, cause: str, *, malformed: bool = False
    ) -> None:
        request, first_token_s = flight.request, record.first_token_s
        gave_up = first_token_s is None and record.kind is RecordKind.FINAL and not record.status
        failed = record.kind is RecordKind.ATTEMPT or record.status >= 400  # noqa: PLR2004 - HTTP
        if failed or flight.timed or not request.stream or flight.departed is None or record.attempt > 1:
            first_token_s = None
        elif gave_up:
            first_token_s = record.duration_s - flight.waited_s
        flight.timed = flight.timed or first_token_s is not None
        if outcome in (Outcome.FAILURE, Outcome.PACED):
            if (record.upstream, outcome) in flight.blamed:  # asked a second time; that it failed is one sign
                return
            flight.blamed += ((record.upstream, outcome),)
        hollow = malformed and (record.tail.get("bad") or record.error.partition("/")[2]) in HOLLOW
        size, model = request.size.input, request.model
        evidence = Evidence(request.id, size, first_token_s, malformed, model, gave_up, hollow, request.endpoint)
        began = self._clock.time() if flight.departed is None else flight.departed
        self._breakers.record(record.upstream, outcome, began=began, cause=cause, evidence=evidence)

    def _provider(self, name: str) -> str:
        upstream = self._policy.upstreams.get(name)
        return upstream.provider if upstream else ""


def is_none(error: str) -> bool:
    """Whether these are the words for an answer that is none, and not a provider's own (`malformed_request`)."""
    return error.partition("/")[0] == MALFORMED


def _way(record: Record) -> str:
    """In which way it failed, where what was asked may be why. Empty where it tells of the upstream, whoever asks: it
    could not be reached, or said that it is overloaded.
    """
    if record.flags & UNSENT:
        return ""
    if record.flags & CUT:
        return SILENT if record.flags & WAITED else CUT_OFF
    error = record.error or str(record.tail.get("error", ""))
    if record.tail.get("bad") or is_none(error):
        return MALFORMED
    begun, code = record.status < 400, error.partition("/")[2]  # noqa: PLR2004 - HTTP
    if begun and not error:
        return CUT_OFF
    status = int(code) if begun and code.isdecimal() else record.status  # a stream names it
    refused = 400 <= status < FAILED  # noqa: PLR2004 - HTTP
    return "" if refused or status in PASSES or any(word in error.casefold() for word in OVERLOADS) else "error"


def _outcome(record: Record, provider: str) -> Outcome:
    if record.flags & CLIENT_LEFT:
        return Outcome.IGNORED
    if record.flags & (UNSENT | CUT):
        return Outcome.FAILURE
    return _meaning(provider, record.status, record.error)


def fault_of(record: Record) -> str:
    """What was wrong with an answer under 200, in a few words; empty for nothing."""
    outcome, cause, _ = _verdict(record, "")
    return cause if outcome is not Outcome.SUCCESS else ""


def _verdict(record: Record, provider: str) -> tuple[Outcome, str, bool]:
    """What an answer under 200 says about its upstream, why, and whether it is none."""
    error, bad = str(record.tail.get("error", "")), record.tail.get("bad")
    if bad or is_none(error):
        return Outcome.FAILURE, f"answer is none: {bad or error}", True
    if error:
        return _meaning(provider, record.status, error), f"answer with error {error}", False
    if record.tail.get("cut") or record.flags & CUT:
        return Outcome.FAILURE, "answer ended early", True
    return Outcome.SUCCESS, "answered", False


def _meaning(provider: str, status: int, error: str) -> Outcome:
    kind, _, code = error.partition("/")
    match classify(provider, status, kind, code):
        case ErrorClass.PACE:
            return Outcome.PACED
        case ErrorClass.TERMINAL:
            return Outcome.TERMINAL
        case ErrorClass.CREDENTIAL:
            return Outcome.CREDENTIAL
        case ErrorClass.CLIENT | ErrorClass.NONE:
            return Outcome.IGNORED
        case _:
            return Outcome.FAILURE
