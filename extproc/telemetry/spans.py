"""The spans of one request, told from its dossier when it has ended: what they are called, when, and what is said.

    request               from its arrival to the end of its answer, or to its refusal
      wait                in line, if it had to
      attempt (each)      at one upstream after the other: those that failed, then the one that answered

Times are on the event loop's clock. When a request left its line and how long each failed attempt took was told; the
rest follows: an attempt begins when the one before it has ended (what Envoy waits between two, a few milliseconds, or a
fifth of a second where the same upstream is asked again, counts for the later), and the last one ends with the answer.

A status is an error where the request failed or was refused for want of room (429, 5xx). What its caller did wrong is
none (the conventions for servers), nor that a later copy has taken its place: `error.type` tells it all the same.

Names are those of the GenAI conventions where they have one, and `tidegate.` ones. Never here: prompts and answers,
keys, session ids (some agents put users' names into them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, TypeVar

from extproc.core import events
from extproc.core.refusal import Reason
from extproc.core.request import Request, Usage
from extproc.core.value import value
from extproc.telemetry.conventions import OPERATIONS, OTHER, Conventions
from extproc.telemetry.dossiers import Dossier

__all__ = ["LONGEST", "Attributes", "Told", "tree"]

T = TypeVar("T")
Word = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, Word]
Words = dict[str, Word | None]
"""Of which some may not be known."""

LONGEST = 200
"""Characters of a text that came from outside."""
_MOST = 32
"""Of a list."""
_PACED = 429
_FAILED = 500
_REFUSED = 400
_CUT = frozenset(
    {
        "upstream_request_timeout", "upstream_remote_reset", "upstream_connection_termination", "local_reset",
        "upstream_protocol_error", "stream_idle_timeout", "duration_timeout",
    }
)  # fmt: skip
"""Envoy's flags of an answer that broke off."""


@value
class Told:
    """One span: its times in seconds on the loop's clock. error: why its status is one, in a word; empty for none."""

    name: str
    kind: Literal["server", "internal", "client"]
    began: float
    ended: float
    attributes: Attributes
    error: str = ""


def tree(dossier: Dossier, conventions: Conventions) -> tuple[Told, list[Told]]:
    """The span of the request, and those below it in the order of their beginning."""
    ended = _end(dossier)
    children = [*_wait(dossier, ended), *_attempts(dossier, ended, conventions)]
    return _request(dossier, ended, conventions), children


# --------------------------------------------------------------------------------------------- the request


def _request(dossier: Dossier, ended: float, conventions: Conventions) -> Told:
    request, refused, settled = dossier.request, dossier.last(events.Refused), dossier.last(events.Settled)
    attributes: Words = {
        "tidegate.decision": _decision(dossier),
        "tidegate.request_id": _text(dossier.id),
        "tidegate.tenant": _text(dossier.tenant),
        "tidegate.lane": dossier.lane,
        **(_asked(request) if request else {}),
        **_decided(dossier),
        **(_refused(refused) if refused and settled is None else {}),
        **(_settled(settled, conventions) if settled else {}),
    }
    kind, error = _error(dossier)
    if kind:
        attributes["error.type"] = kind
    return Told(_name(request, conventions), "server", dossier.began, ended, _said(attributes), error)


def _name(request: Request | None, conventions: Conventions) -> str:
    """With the model only where the settings list it: names of spans are to be few."""
    if request is None:
        return "request"
    model = conventions.model(request.model)
    operation = OPERATIONS.get(request.endpoint, OTHER)
    return operation if model == OTHER else f"{operation} {model}"


def _decision(dossier: Dossier) -> str:
    if dossier.sent:
        return "admitted"
    return "refused" if dossier.reason else "left"


def _asked(request: Request) -> Words:
    """What was asked for, and what it was taken for."""
    return {
        "gen_ai.operation.name": OPERATIONS.get(request.endpoint, OTHER),
        "gen_ai.request.model": _text(request.model),
        "gen_ai.request.stream": request.stream,
        "gen_ai.request.max_tokens": request.size.output if request.capped else None,
        "gen_ai.request.choice.count": request.choices if request.choices != 1 else None,
        "tidegate.ticket": request.ticket,
        "tidegate.route": request.route,
        "tidegate.counted_tokens": request.counted,
        "tidegate.reserved.input_tokens": request.size.input,
        "tidegate.reserved.output_tokens": request.size.output,
        "tidegate.retries": request.retries or None,
        "tidegate.observed": request.observed or None,
    }


def _decided(dossier: Dossier) -> Words:
    """How long it waited and for what, where it went, and who was passed over."""
    queued, admitted, refused = dossier.last(events.Queued), dossier.last(events.Admitted), dossier.last(events.Refused)
    left, observed = dossier.last(events.Left), dossier.last(events.Observed)
    told, chose = admitted or refused or left, admitted or refused
    passed = chose.passed_over if chose else ()
    return {
        "tidegate.wait_s": round(told.waited_s, 6) if told else None,
        "tidegate.predicted_wait_s": round(queued.predicted_s, 6) if queued else None,
        "tidegate.binding": _binding(dossier),
        "tidegate.order": admitted.order if admitted else None,
        "tidegate.observed_reason": str(observed.reason or "held") if observed else None,
        "tidegate.shadowed": tuple(_text(e.limit) for _, e in dossier.events if isinstance(e, events.Shadowed)),
        "tidegate.passed_over": tuple(f"{one.upstream}: {one.why}" for one in passed),
    }


def _binding(dossier: Dossier) -> tuple[str, ...]:
    """The counters for want of which it waited, the longest first."""
    waited, queued = dossier.last(events.Waited), dossier.last(events.Queued)
    if waited is not None and waited.spells:
        return tuple(dict.fromkeys(_text(key) for spell in waited.spells for key in spell.keys))
    return tuple(map(_text, queued.binding)) if queued else ()


def _refused(refused: events.Refused) -> Words:
    return {
        "tidegate.reason": str(refused.reason),
        "tidegate.detail": _text(refused.detail),
        "tidegate.retry_after_s": None if refused.retry_after is None else round(refused.retry_after, 3),
        "url.path": _text(refused.path),
        "http.response.status_code": 200 if refused.instead else refused.status,
    }


def _settled(settled: events.Settled, conventions: Conventions) -> Words:
    usage = settled.usage or Usage()
    return {
        "gen_ai.provider.name": _provider(conventions, settled.upstream),
        "gen_ai.usage.input_tokens": usage.input,
        "gen_ai.usage.output_tokens": usage.output,
        "gen_ai.usage.cache_read.input_tokens": usage.cached,
        "gen_ai.usage.cache_creation.input_tokens": usage.cache_write,
        "gen_ai.response.finish_reasons": (_text(settled.finish),) if settled.finish else (),
        "gen_ai.response.time_to_first_chunk": settled.first_token_s,
        "http.response.status_code": settled.status or None,
        "tidegate.upstream": settled.upstream,
        "tidegate.attempts": settled.attempts,
        "tidegate.cost_usd": settled.cost_usd,
        "tidegate.client_gone": settled.client_gone or None,
        "tidegate.reason": str(Reason.EVICTED) if settled.evicted else None,
        "tidegate.outcome_unknown": settled.lost or None,
    }


def _error(dossier: Dossier) -> tuple[str, str]:
    """What kind of error it is, and what its status says; both empty for none."""
    settled, refused = dossier.last(events.Settled), dossier.last(events.Refused)
    if settled is not None:
        if settled.lost or settled.given_up:
            return str(Reason.EVICTED) if settled.evicted else "", ""
        if broken := _broken(settled):
            return broken
        kind = str(settled.status) if settled.status >= _REFUSED else ""
        return kind, _bad(settled.status) and "no upstream answered"
    if refused is None or refused.instead:
        return "", ""
    return str(refused.reason), _bad(refused.status) and f"refused: {refused.reason}"


def _broken(settled: events.Settled) -> tuple[str, str] | None:
    """What was wrong with an answer that was begun and waited for: kind of error, and what its status says."""
    if settled.given_up or settled.status >= _REFUSED:
        return None
    if settled.flags & _CUT:
        return "cut", "the answer broke off"
    return ("bad_answer", _text(settled.fault)) if settled.fault else None


def _bad(status: int) -> str:
    return "error" if status == _PACED or status >= _FAILED else ""


def _end(dossier: Dossier) -> float:
    """When its last byte was sent, which the record of it tells; that was heard a little later."""
    heard = dossier.heard if dossier.ended is None else dossier.ended
    settled = dossier.last(events.Settled)
    if settled is None or not settled.duration_s:
        return max(dossier.began, heard)
    return max(dossier.began, min(heard, dossier.began + settled.duration_s))


# ----------------------------------------------------------------------------------------------- its parts


def _wait(dossier: Dossier, ended: float) -> Iterator[Told]:
    """In line: from when it joined until it was let go, refused, or given up."""
    joined = _first(dossier, events.Queued)
    if joined is None:
        return
    at, queued = joined
    out = next((when for when, event in dossier.events if isinstance(event, _ENDS) and when >= at), ended)
    attributes: Words = {
        "tidegate.lane": queued.request.lane,
        "tidegate.position": queued.position or None,
        "tidegate.predicted_wait_s": round(queued.predicted_s, 6),
        "tidegate.binding": _binding(dossier),
    }
    yield Told("wait", "internal", min(at, ended), max(at, min(out, ended)), _said(attributes))


_ENDS = (events.Waited, events.Admitted, events.Refused, events.Left)


def _attempts(dossier: Dossier, ended: float, conventions: Conventions) -> Iterator[Told]:
    sent, settled = _first(dossier, events.Admitted), dossier.last(events.Settled)
    if sent is None:
        return
    at, admitted = sent
    failed = [event for _, event in dossier.events if isinstance(event, events.AttemptFailed)]
    for number, one in enumerate(sorted(failed, key=_number), 1):
        over = max(at, min(at + one.seconds, ended))
        yield _failed(one, number, at, over, conventions)
        at = over
    if settled is not None and settled.upstream and (settled.status < _REFUSED or settled.given_up):
        yield _last(settled, len(failed) + 1, min(at, ended), ended, conventions)
    elif settled is not None and settled.lost and not failed:
        first = admitted.order[0]
        attributes = _said(_there(first, 1, conventions))
        yield Told(_attempt(first), "client", min(at, ended), ended, attributes)


def _number(failed: events.AttemptFailed) -> int:
    return failed.number


def _failed(one: events.AttemptFailed, number: int, began: float, ended: float, conventions: Conventions) -> Told:
    kind = str(one.status) if one.status >= _REFUSED else str(one.outcome)
    attributes: Words = {
        **_there(one.upstream, number, conventions),
        "http.response.status_code": one.status or None,
        "error.type": kind,
        "tidegate.cause": _text(one.cause or one.error),
        "tidegate.outcome": str(one.outcome),
        "tidegate.following": one.following,
        "tidegate.charged": one.charged or None,
    }
    return Told(_attempt(one.upstream), "client", began, ended, _said(attributes), _text(one.cause) or kind)


def _last(settled: events.Settled, number: int, began: float, ended: float, conventions: Conventions) -> Told:
    """The one that answered, or was about to when its client left or a later copy came."""
    kind, error = _broken(settled) or ("", "")
    attributes: Words = {
        **_there(settled.upstream, number, conventions),
        "http.response.status_code": settled.status or None,
        "gen_ai.response.time_to_first_chunk": settled.first_token_s,
        "error.type": kind,
    }
    return Told(_attempt(settled.upstream), "client", began, ended, _said(attributes), error)


def _attempt(upstream: str) -> str:
    return f"attempt {upstream}"


def _there(upstream: str, number: int, conventions: Conventions) -> Words:
    place = conventions.upstreams.get(upstream, {})
    return {"tidegate.upstream": upstream, "tidegate.attempt": number, **place}


def _provider(conventions: Conventions, upstream: str) -> str | None:
    name = conventions.upstreams.get(upstream, {}).get("gen_ai.provider.name")
    return None if name is None else str(name)


def _first(dossier: Dossier, kind: type[T]) -> tuple[float, T] | None:
    return next(((at, event) for at, event in dossier.events if isinstance(event, kind)), None)


# -------------------------------------------------------------------------------------------------- words


def _text(word: str) -> str:
    """What came from outside: of any length, and maybe no text at all, which would lose the whole batch."""
    return word[:LONGEST].encode("utf-8", "replace").decode()


def _said(attributes: Words) -> Attributes:
    """Those of which something is known."""
    return {
        name: word[:_MOST] if isinstance(word, tuple) else word
        for name, word in attributes.items()
        if word is not None and word not in ("", ())
    }
