"""The checks that ask a model, with as few tokens as will do: what happens behind Tidegate only shows there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from extproc.core.refusal import Reason
from extproc.doctor.asking import Answer, NoAnswer, number
from extproc.doctor.visit import CHAT, MESSAGES, Result, Verdict, Visit, answered_by

__all__ = ["moves_on", "passes_large", "streams"]

OK, UNFIT, TOO_LARGE, SERVER_ERROR = 200, (400, 422), 413, 500
ANSWER_TOKENS = 16
STREAM_TOKENS = 96
PROMPT_TOKENS = 20
"""About as many have the prompts below."""
SHORT, LONG = "reply OK", "Count from one to one hundred in words, without any other text."
CAP, NEWER_CAP = "max_tokens", "max_completion_tokens"
PIECE_S = 0.002
"""Pieces that come closer together came as one."""
LEAST_EVENTS, LEAST_PIECES = 8, 4
LEAST_SHARE = 0.1
"""Of a stream's time that passes between its first and its last piece."""
LEAST_S = 0.2
"""A stream of less says nothing: it may have been written at once."""
LEAST_DEADLINE_S = 0.04
HURRY = 0.5
"""Share of the usual time to the first token that all attempts together are given."""
TIMED_OUT = (Reason.DEADLINE_PASSED, Reason.UPSTREAM_FAILED)

_EVENT = re.compile(rb"^data:", re.MULTILINE)
_USED = re.compile(rb'"(?:prompt_tokens|completion_tokens|input_tokens|output_tokens)"\s*:\s*([0-9]{1,9})')


def passes_large(visit: Visit) -> Result:
    """A large body goes all the way, and its answer comes back. It is large by spaces, which are no tokens."""
    size = visit.expected.large
    limits = "request_body_buffer_limit of the route; limits of what stands between Envoy and the upstream"
    try:
        answer = ask(visit, SHORT, ANSWER_TOKENS, size=size)
    except NoAnswer as error:
        return Result(Verdict.WRONG, f"{size:,} bytes: {error}", limits)
    if answer.status == OK:
        visit.upstream = answer.headers.get("x-tidegate-upstream", "")
        by = f" by {visit.upstream}" if visit.upstream else ""
        return Result(Verdict.OK, f"{size:,} bytes were answered{by} within {answer.seconds:.1f} s")
    if answer.status == TOO_LARGE or (answer.status >= SERVER_ERROR and not answer.reason):
        return Result(Verdict.WRONG, f"{size:,} bytes: {answered_by(answer)}: {answer.message}", limits)
    return _unserved(answer)


def streams(visit: Visit) -> Result:
    """The pieces of a stream come one by one, as the model writes them."""
    answer = ask(visit, LONG, STREAM_TOKENS, stream=True)
    if answer.status != OK:
        return _unserved(answer)
    visit.upstream = answer.headers.get("x-tidegate-upstream", "")
    times, events = answer.arrivals, len(_EVENT.findall(answer.body))
    if times:
        visit.first_token_s = max(0.0, times[0] - answer.connect_s)
    if events < LEAST_EVENTS:
        return Result(Verdict.NOT_TOLD, f"only {events} events came, too few to tell; name another model")
    pieces, spread = _apart(times), times[-1] - times[0]
    seen = f"{events} events came in {pieces} pieces, the last {spread:.2f} s after the first, {times[0]:.2f} s in"
    if pieces >= LEAST_PIECES and spread >= LEAST_SHARE * times[-1]:
        return Result(Verdict.OK, seen)
    if times[-1] < LEAST_S:
        return Result(Verdict.NOT_TOLD, f"{seen}: too fast to tell; name another model")
    change = (
        "response_body_mode: NONE (or STREAMED) in ext_proc's processing_mode; no buffering or compressing filter "
        "for text/event-stream in Envoy, nor in what stands in front of it (proxy_buffering off)"
    )
    return Result(Verdict.WRONG, seen, change)


def moves_on(visit: Visit) -> Result:
    """A request that one upstream does not answer in time goes on at the next.

    All attempts together are given half of the time that a first token usually takes. Tidegate divides it among them,
    so that each is ended before it has begun; an end that a caller was in such a hurry for counts against nobody.
    """
    if visit.first_token_s is None:
        return Result(Verdict.NOT_TOLD, "no stream was answered, so nobody knows how long a first token takes")
    deadline_s = max(LEAST_DEADLINE_S, HURRY * visit.first_token_s)
    limit = str(int(deadline_s * 1000))
    return _moved(visit, ask(visit, SHORT, ANSWER_TOKENS, stream=True, x_request_timeout_ms=limit), limit)


def ask(visit: Visit, text: str, tokens: int, *, stream: bool = False, size: int = 0, **headers: str) -> Answer:
    """Ask the model, and book what it cost. Newer ones call the cap on tokens by another name."""
    anthropic = "claude" in visit.model if visit.anthropic is None else visit.anthropic
    path = MESSAGES if anthropic else CHAT
    body: dict[str, Any] = {"model": visit.model, CAP: tokens, "messages": [{"role": "user", "content": text}]}
    if stream:
        body |= {"stream": True} if anthropic else {"stream": True, "stream_options": {"include_usage": True}}
    answer = visit.gateway.ask("POST", path, _written(body, size), **headers)
    if answer.status in UNFIT and not answer.reason and NEWER_CAP in answer.message:
        body[NEWER_CAP] = body.pop(CAP)
        answer = visit.gateway.ask("POST", path, _written(body, size), **headers)
    visit.spent.requests += 1
    visit.spent.tokens += _used(answer, tokens)
    return answer


def _written(body: Mapping[str, Any], size: int) -> bytes:
    """The body in JSON, filled up to `size` with spaces inside the list of messages, where no rewrite drops them."""
    text = json.dumps(body)
    return text.replace('"messages": [', '"messages": [' + " " * max(0, size - len(text))).encode()


def _used(answer: Answer, cap: int) -> int:
    """Tokens of an answer as it reports them, which streams may do several times; else at most."""
    told = [(found[0].split(b'"')[1], int(found[1])) for found in _USED.finditer(answer.body)]
    most: dict[bytes, int] = {}
    for name, count in told:
        most[name] = max(count, most.get(name, 0))
    if most:
        return sum(most.values())
    return PROMPT_TOKENS + cap if answer.status == OK else PROMPT_TOKENS if answer.reason in TIMED_OUT else 0


def _apart(times: Sequence[float]) -> int:
    """How many pieces came apart from the one before."""
    return sum(later - earlier >= PIECE_S for earlier, later in pairwise(times)) + bool(times)


def _unserved(answer: Answer) -> Result:
    return Result(Verdict.NOT_TOLD, f"the model did not answer: {answered_by(answer)}: {answer.message}")


def _moved(visit: Visit, answer: Answer, limit: str) -> Result:
    """What an answer to somebody with so little time tells; limit: of it, in milliseconds."""
    attempts, last = answer.headers.get("x-tidegate-attempts", ""), answer.headers.get("x-tidegate-upstream", "")
    if answer.status != OK and answer.reason not in TIMED_OUT:
        return _unserved(answer)
    asked = number(attempts)
    if asked is None or not (visit.upstream and last):
        return Result(Verdict.NOT_TOLD, "answers do not tell who served them; set internal_headers: true for a while")
    visit.spent.tokens += PROMPT_TOKENS * (asked - 1)
    if last != visit.upstream and asked > 1:
        return Result(
            Verdict.OK, f"{visit.upstream} was given too little time, and {last} was asked, {attempts} in all"
        )
    if answer.status == OK:
        return Result(Verdict.NOT_TOLD, f"{last} answered within {limit} ms, too fast to be ended; ask again")
    return _stayed(visit, last)


def _stayed(visit: Visit, last: str) -> Result:
    change = (
        "on the route: a retry_policy with retry_on 5xx,reset,connect-failure, num_retries, refresh_cluster_on_retry, "
        "and the priority_group cluster specifier with override_metadata_namespace llm.route (in the classic profile "
        "retry_priority and cluster_header x-tidegate-cluster); max_retries of the clusters' circuit breakers"
    )
    chain = visit.expected.chain_of(visit.model)
    if len(chain) > 1:
        return Result(Verdict.WRONG, f"only {last} was asked, of {', '.join(chain)}", change)
    if visit.expected.known:
        return Result(Verdict.OK, f"only {last} was asked, which is the whole chain")
    return Result(Verdict.NOT_TOLD, f"only {last} was asked; is it the whole chain? --config tells", change)
