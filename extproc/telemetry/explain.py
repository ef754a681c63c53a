"""One request explained: why it waited, went where it went, or was refused; as plain data, and as a story to read.

    {"id", "ticket", "state", "arrived", "caller": {...}, "asked": {...}, "size": {...}, "checks": [...],
     "queue": {...}, "choice": {...}, "attempts": [...], "refusal": {...}, "settlement": {...}, "notes": [...]}

What does not apply is absent. Times of the calendar are epoch seconds, all others seconds. What somebody is to read is
in members called `words`. Everything is made from what was announced while it happened, and nothing from how things
stand now, but for a request that is still in line: how it stands there can be given.

Deliberately not here: prompts, answers, keys. Nobody announces them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from extproc.core import events
from extproc.core.refusal import Reason
from extproc.core.request import Endpoint, Request, Size, Usage
from extproc.shapes import Row
from extproc.telemetry.dossiers import Dossier
from extproc.telemetry.sampling import parent_of
from extproc.telemetry.story import told
from extproc.telemetry.words import key_words, keys_words, plain, seconds, why_not

__all__ = ["explain", "summary", "told"]

EXACT = 1.25
"""A forecast that was off by less than this factor was right."""
SHORT_S = 0.1
"""A wait of less is not compared with its forecast."""
BEGUN = range(1, 400)
"""Statuses of answers that were begun."""
CHECKS = ("headers", "body", "allowance", "line", "turn")
CHECK_WORDS = {
    "headers": "who calls, for what, and until when",
    "body": "what is asked, and that an upstream of its model could serve it",
    "allowance": "what its tenant, session and route may use",
    "line": "that its lane has room, and its turn comes in time",
    "turn": "that its turn came",
}
REASON_WORDS: Mapping[str, str] = {
    Reason.TENANT_QUOTA: "its tenant has used what it may use in a minute",
    Reason.TENANT_CONCURRENCY: "its tenant has as many requests here as it may have at a time",
    Reason.QUEUE_TIMEOUT: "it waited as long as its lane lets anybody wait",
    Reason.LANE_FULL: "its lane was full, or its tenant had come again too often",
    Reason.EVICTED: "it had to make room in line for others, or for a later copy of itself",
    Reason.DEADLINE_UNMEETABLE: "its turn would have come too late for it",
    Reason.DEADLINE_PASSED: "its deadline had passed",
    Reason.SESSION_BUDGET: "its session has used what it may use",
    Reason.SPEND_BUDGET: "the dollars that it would have cost are spent",
    Reason.TOO_LARGE: "it is larger than anything that could serve it",
    Reason.NO_UPSTREAM: "no upstream of its model could be asked in time",
    Reason.UNAUTHENTICATED: "nobody knows who calls",
    Reason.FORBIDDEN: "its tenant may not use this model or lane",
    Reason.UNKNOWN_MODEL: "no route serves this model",
    Reason.DRAINING: "Tidegate was about to stop",
    Reason.BAD_REQUEST: "it cannot be read as what its path says",
    Reason.NOT_FOUND: "nothing is served at this path",
}


def explain(
    dossier: Dossier, standing: Mapping[str, Any] | None = None, now: float | None = None, trace: str = ""
) -> dict[str, Any]:
    """Everything that is known of one request. See the head of this file.

    standing: how it stands in line now, if it does (Limiter.standing). now: on the clock of the dossier, for how long
    it has been here; the last that was heard of it counts where that is not given. trace: the id of its trace, where
    that is not its client's.
    """
    sections = {
        "caller": _caller(dossier),
        "asked": _asked(dossier),
        "size": _size(dossier),
        "checks": _checks(dossier),
        "queue": _queue(dossier, standing),
        "choice": _choice(dossier),
        "attempts": list(_attempts(dossier)),
        "refusal": _refusal(dossier),
        "settlement": _settlement(dossier),
        "notes": list(_notes(dossier)),
        "timeline": [{"at_s": at - dossier.began, "event": type(event).__name__} for at, event in dossier.events],
    }
    known: dict[str, Any] = plain(_head(dossier, now, trace) | {name: part for name, part in sections.items() if part})
    return known


def summary(dossier: Dossier, now: float | None = None) -> Row:
    """One line of a list: what it was, and what became of it. now: as for `explain`."""
    settled = dossier.last(events.Settled)
    usage = settled.usage if settled else None
    line: Row = plain(
        {
            "id": dossier.id,
            "ticket": dossier.ticket,
            "at": dossier.epoch_s(dossier.began),
            "tenant": dossier.tenant,
            "lane": dossier.lane,
            "model": dossier.model,
            "state": dossier.state,
            "reason": dossier.reason,
            "upstream": dossier.upstream,
            "waited_s": _waited_s(dossier, now),
            "tokens": usage.total if usage else dossier.request.size.total if dossier.request else 0,
        }
    )
    return line


def _head(dossier: Dossier, now: float | None, trace: str) -> dict[str, Any]:
    last = dossier.ended if dossier.ended is not None else dossier.heard if now is None else now
    settled = dossier.last(events.Settled)
    if settled is not None and settled.duration_s:  # its record may be late
        last = min(last, dossier.began + settled.duration_s)
    head: dict[str, Any] = {
        "id": dossier.id,
        "ticket": dossier.ticket,
        "state": dossier.state,
        "arrived": dossier.epoch_s(dossier.began),
        "lasted_s": last - dossier.began,
    }
    if dossier.reason:
        head["reason"] = dossier.reason
    parent = parent_of(dossier.trace)
    if trace or parent:
        head["trace_id"] = trace or (parent.trace if parent else "")
    if dossier.earlier:
        head["earlier_of_this_id"] = dossier.earlier
    if dossier.dropped:
        head["events_not_kept"] = dossier.dropped
    return head


def _caller(dossier: Dossier) -> dict[str, Any]:
    request, caller = dossier.request, {"tenant": dossier.tenant, "lane": dossier.lane}
    if request is None:
        return {name: word for name, word in caller.items() if word}
    more = {"session": request.session.id, "session_was_named": not request.session.derived}
    if request.vip:
        more["vip"] = True
    if request.fresh:
        more["new_session"] = True
    return caller | more


def _asked(dossier: Dossier) -> dict[str, Any]:
    request = dossier.request
    if request is None:
        refused = dossier.last(events.Refused)
        return {"path": refused.path} if refused and refused.path else {}
    asked = {
        "endpoint": request.endpoint,
        "model": request.model,
        "route": request.route,
        "stream": request.stream,
        "bytes": request.bytes,
        "may_wait_s": request.wait_until - request.arrived,
    }
    if request.deadline is not None:
        asked["deadline_s"] = request.deadline - request.arrived
    if request.retries:
        asked["retries"] = request.retries
    if request.observed:
        asked["observed"] = True
    return asked


def _size(dossier: Dossier) -> dict[str, Any]:
    request = dossier.request
    if request is None:
        return {}
    size = _tokens(request.size) | {"counted": request.counted}
    if request.sizes:
        size["elsewhere"] = {name: _tokens(other) for name, other in request.sizes.items()}
    return size | {"output_by": _output_by(request), "words": _size_words(request)}


def _tokens(size: Size) -> dict[str, Any]:
    return {"input": size.input, "output": size.output, "total": size.total}


def _output_by(request: Request) -> str:
    if not request.endpoint.generates:
        return "nothing is generated"
    return "its client's cap" if request.capped else "what such answers usually have"


def _size_words(request: Request) -> str:
    size, counted = request.size, request.counted
    if request.endpoint in (Endpoint.OTHER, Endpoint.COUNT_TOKENS):
        return "tokens are not counted here: limited by requests, places and dollars"
    prompt = f"{size.input} tokens of prompt"
    if counted and counted != size.input:
        prompt += f" ({counted} by the tokenizer, times {size.input / counted:.2f} as upstreams have reported)"
    elsewhere = "".join(f", {other.total} at {name}" for name, other in request.sizes.items())
    if not request.endpoint.generates:
        return f"{prompt}{elsewhere}"
    return f"{prompt} and {size.output} reserved for the answer ({_output_by(request)}): {size.total}{elsewhere}"


def _checks(dossier: Dossier) -> list[dict[str, Any]]:
    passed = dict.fromkeys(CHECKS[: _passed(dossier)], True)
    if dossier.reason and not dossier.sent and len(passed) < len(CHECKS):
        passed[CHECKS[len(passed)]] = False
    return [{"check": name, "passed": good, "words": CHECK_WORDS[name]} for name, good in passed.items()]


def _passed(dossier: Dossier) -> int:
    """How many of the checks it has passed for sure."""
    refused = dossier.last(events.Refused)
    if dossier.sent:
        return 5
    if dossier.last(events.Queued):
        return 4
    if refused is not None and refused.passed_over and dossier.request is not None:
        return 3 if refused.reason is not Reason.DEADLINE_PASSED else 4
    if dossier.request is not None:
        return 2
    return int(refused is not None and bool(refused.lane))


def _queue(dossier: Dossier, standing: Mapping[str, Any] | None) -> dict[str, Any]:
    queued, waited = dossier.last(events.Queued), dossier.last(events.Waited)
    if queued is None:
        return {}
    spells = [
        {"keys": spell.keys, "seconds": spell.seconds, "words": _for_want(spell)}
        for spell in (waited.spells if waited else ())
    ]
    found: dict[str, Any] = {
        "position": queued.position,
        "predicted_s": queued.predicted_s,
        "in_line": queued.waiting,
        "binding": [{"key": key, "words": key_words(key)} for key in queued.binding],
    }
    if waited is not None:
        found |= {"waited_s": waited.seconds, "forecast": _forecast(queued.predicted_s, waited.seconds)}
        found["waited_for"] = spells
    elif standing is not None:
        found["now"] = dict(standing) | {"words": keys_words(standing.get("lacking", ()))}
    return found | {"words": _queue_words(dossier, queued, waited, standing)}


def _for_want(spell: events.Spell) -> str:
    return keys_words(spell.keys) or "many other things in turn"


def _forecast(predicted_s: float, waited_s: float) -> str:
    if max(predicted_s, waited_s) < SHORT_S:
        return "right"
    if waited_s <= predicted_s / EXACT:
        return "too long"
    return "too short" if waited_s > predicted_s * EXACT else "right"


def _queue_words(
    dossier: Dossier, queued: events.Queued, waited: events.Waited | None, standing: Mapping[str, Any] | None
) -> str:
    foreseen = f"turn foreseen in {seconds(queued.predicted_s)}" if queued.predicted_s > 0 else "no wait foreseen"
    words = f"number {queued.position} in line, {foreseen}"
    if queued.binding:
        words += f"; held by {keys_words(queued.binding)}"
    if waited is None:
        if standing is not None:
            words += f"; now number {standing['position']}, held by {keys_words(standing['lacking']) or 'others'}"
        return words
    ends = {"refused": "was refused", "left": "its client left"}.get(dossier.state, "went")
    if dossier.sent:
        ends = "went"
    words += f"; {ends} after {seconds(waited.seconds)}"
    longest = [f"{_for_want(spell)} ({seconds(spell.seconds)})" for spell in waited.spells[:3]]
    return f"{words}, of which for {', '.join(longest)}" if longest else words


def _choice(dossier: Dossier) -> dict[str, Any]:
    admitted, refused = dossier.last(events.Admitted), dossier.last(events.Refused)
    passed = admitted.passed_over if admitted else refused.passed_over if refused else ()
    others = [
        {
            "upstream": one.upstream,
            "why": one.why,
            "words": why_not(one),
            "keys": one.keys,
            "wait_s": one.wait_s,
            "breaker": one.state,
            "asked_if_others_fail": one.behind,
        }
        for one in passed
    ]
    found: dict[str, Any] = {
        "others": [{name: v for name, v in one.items() if v or name == "upstream"} for one in others]
    }
    if admitted is not None:
        found = {"upstream": admitted.order[0], "order": admitted.order, "waited_s": admitted.waited_s} | found
    return found if admitted or others else {}


def _attempts(dossier: Dossier) -> Iterator[dict[str, Any]]:
    for at, event in dossier.events:
        if isinstance(event, events.AttemptFailed):
            yield {
                "upstream": event.upstream,
                "at_s": at - dossier.began,
                "ok": False,
                "status": event.status,
                "seconds": event.seconds,
                "error": event.error,
                "outcome": event.outcome,
                "cause": event.cause,
                "paid_for": event.charged,
                "then": event.following,
            }
    settled = dossier.last(events.Settled)
    if settled is not None and settled.upstream:
        yield {
            "upstream": settled.upstream,
            "ok": dossier.state == "served",
            "status": settled.status,
            "first_token_s": settled.first_token_s,
            "cause": _cause(settled),
        }


def _cause(settled: events.Settled) -> str:
    """Why the answer did not come to its end; empty where it did."""
    if settled.evicted:
        return "a later copy of it took its place"
    return "its client left" if settled.client_gone else settled.fault or ", ".join(sorted(settled.flags))


def _refusal(dossier: Dossier) -> dict[str, Any]:
    refused = dossier.last(events.Refused)
    if refused is None:
        return {}
    found = {
        "reason": refused.reason,
        "status": refused.status,
        "detail": refused.detail,
        "waited_s": refused.waited_s,
        "retry_after_s": refused.retry_after,
        "words": REASON_WORDS.get(refused.reason, ""),
    }
    if refused.instead:
        found["answered_instead"] = True
    return found


def _settlement(dossier: Dossier) -> dict[str, Any]:
    settled = dossier.last(events.Settled)
    if settled is None:
        return {}
    reserved = settled.request.size_at(settled.upstream)
    found: dict[str, Any] = {
        "status": settled.status,
        "upstream": settled.upstream,
        "attempts": settled.attempts,
        "reserved": _tokens(reserved),
        "cost_usd": settled.cost_usd,
        "first_token_s": settled.first_token_s,
        "duration_s": settled.duration_s,
        "finish": settled.finish,
        "fault": settled.fault,
        "client_gone": settled.client_gone,
        "evicted": settled.evicted,
        "flags": settled.flags,
        "details": settled.details,
        "record": not settled.lost,
    }
    if settled.usage is not None:
        found["used"] = _used(settled.usage) | {"total": settled.usage.total}
        found["beyond_reserved"] = max(0, settled.usage.total - reserved.total)
    over = [event for _, event in dossier.events if isinstance(event, events.Overshot)]
    if over:
        found["into_debt"] = [{"key": o.key, "amount": o.amount, "words": key_words(o.key)} for o in over]
    return found | {"words": _settlement_words(settled, reserved)}


def _used(usage: Usage) -> dict[str, Any]:
    names = ("input", "output", "cached", "cache_write", "reasoning")
    return {name: count for name in names if (count := getattr(usage, name)) is not None}


def _settlement_words(settled: events.Settled, reserved: Size) -> str:
    if settled.lost:
        return "no record of it came, so its estimate was kept"
    cost = "" if settled.cost_usd is None else f", {settled.cost_usd:.6f} dollars"
    if settled.usage is None:
        answered = settled.status in BEGUN and not settled.given_up
        kept = "its estimate was kept" if answered else "what came back is by how it ended"
        return f"{reserved.total} tokens reserved, no usage reported: {kept}{cost}"
    used = settled.usage
    return f"{reserved.total} tokens reserved, {used.input or 0} + {used.output or 0} used{cost}"


def _notes(dossier: Dossier) -> Iterator[str]:
    """What else was announced of it."""
    for _, event in dossier.events:
        match event:
            case events.Retried(took=took):
                yield f"sent again by its client{f'; took the place of a copy that {COPIES[took]}' if took else ''}"
            case events.Observed(reason=reason, predicted_s=predicted_s):
                what = "been held" if reason is None else f"been refused ({reason})"
                foreseen = f", turn foreseen in {seconds(predicted_s)}" if predicted_s > 0 else ""
                yield f"only observed: it would have {what}{foreseen}"
            case events.Admitted(bypassed=True):
                yield "let go by a bypass, whatever was free"
            case events.Shadowed(limit=limit):
                yield f"a limit in shadow mode would have stopped it: {key_words(limit)}"
            case _:
                pass
    unheard = _unheard(dossier)
    if unheard:
        yield f"asked {unheard} times more, in vain: no record has told of that"


def _unheard(dossier: Dossier) -> int:
    """How many attempts there were of which nothing is known but that, as long as no late record tells of them."""
    settled = dossier.last(events.Settled)
    failed = sum(isinstance(event, events.AttemptFailed) for _, event in dossier.events)
    return 0 if settled is None or settled.lost else max(0, settled.attempts - failed - bool(settled.upstream))


COPIES = {"held": "waited", "running": "ran", "left": "had left"}


def _waited_s(dossier: Dossier, now: float | None) -> float:
    known = dossier.last(events.Admitted) or dossier.last(events.Refused) or dossier.last(events.Left)
    return known.waited_s if known is not None else (dossier.heard if now is None else now) - dossier.began
