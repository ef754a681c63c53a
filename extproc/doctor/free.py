"""The checks that cost nothing: Tidegate itself, or Envoy in its place, answers all that they ask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from extproc.core.refusal import Reason
from extproc.dialects.examination import LONGEST_MS
from extproc.doctor.asking import Answer
from extproc.doctor.visit import CHAT, MESSAGES, Result, Verdict, Visit, answered_by, error_of

__all__ = ["answers_in_time", "fails_as_configured", "holds", "in_the_path", "leaves_others", "reads_large", "refuses",
           "sees_all"]  # fmt: skip

PRICED = (CHAT, MESSAGES, "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages/count_tokens")
NO_LLM_PATH = "/tidegate-doctor/no-llm-path"
CALLER = (Reason.UNAUTHENTICATED, Reason.FORBIDDEN)
SLOW_MS = 1_000
HELD_MS = 3_000
BEYOND_MS = 1_000
"""So much longer than `message_timeout` Tidegate is to be silent, for Envoy to give it up."""
NOT_LET_IN = (401, 403)
NOT_FOUND = 404
REDIRECTS = (301, 302, 303, 307, 308)
SERVER_ERROR = 500
SHOW_BODY = "request_body_mode: BUFFERED in ext_proc's processing_mode, for its route too (ExtProcPerRoute overrides)"
REACH = (
    "the ext_proc filter on this route, its grpc_service (address, HTTP/2, TLS, health check) and Tidegate's own log; "
    f"{SHOW_BODY}"
)
FIRST = (
    "put the HTTP filter envoy.filters.http.ext_proc before the router, in the listener and on the route that serve "
    "this URL; make sure that the URL is the gateway's"
)

NAMED = "who stands before Tidegate refused this caller: name one that is let in, with --key or --header"


def in_the_path(visit: Visit) -> Result:
    """A question can only be answered by Tidegate, which has read its body."""
    answer, told = visit.question()
    visit.filtered = bool(answer.reason) and answer.reason != Reason.ADMISSION_UNAVAILABLE
    visit.understood = told is not None
    if told is not None:
        return Result(Verdict.OK, f"Tidegate answered within {answer.seconds:.2f} s")
    if not answer.reason:
        to = answer.headers.get("location", "") if answer.status in REDIRECTS else ""
        change = f"it sends callers to {to}, and nobody follows with a POST; give that URL" if to else FIRST
        if answer.status in NOT_LET_IN:
            change = f"{NAMED}; otherwise {FIRST}"
        return Result(Verdict.WRONG, f"something else answered: {answered_by(answer)}", change)
    if not visit.filtered:
        return Result(Verdict.WRONG, f"Envoy got no answer from Tidegate: {answered_by(answer)}", f"check {REACH}")
    if answer.reason in CALLER:
        visit.barred = f"this caller is not let in ({answer.reason}); give --key or --header"
    else:
        visit.barred = f"Tidegate did not answer the question: {answered_by(answer)}: {answer.message}"
    return Result(Verdict.OK, f"refused: {answered_by(answer)}: {answer.message}")


def sees_all(visit: Visit) -> Result:
    """No endpoint that is priced in tokens goes past it."""
    past: list[str] = []
    unread: list[str] = []
    absent: list[str] = []
    for path in PRICED:
        answer, _ = visit.question(path)
        if answer.reason == Reason.ADMISSION_UNAVAILABLE:
            unread.append(path)
        elif not answer.reason:
            (absent if answer.status == NOT_FOUND else past).append(path)
    if past:
        return Result(Verdict.WRONG, f"answered by something else: {', '.join(past)}", FIRST)
    if unread:
        return Result(Verdict.WRONG, f"Tidegate is not asked, or not shown the body: {', '.join(unread)}", SHOW_BODY)
    seen = f"{len(PRICED) - len(absent)} paths are Tidegate's"
    return Result(Verdict.OK, f"{seen}; not served here: {', '.join(absent)}" if absent else seen)


def refuses(visit: Visit) -> Result:
    """A refusal reaches callers of both dialects as Tidegate words it."""
    wrong: list[str] = []
    for path, problems in ((CHAT, _openai), (MESSAGES, _anthropic)):
        answer, _ = visit.question(path)
        if path == CHAT or answer.reason:
            wrong += [f"{path}: {problem}" for problem in (*_refusal(visit, answer), *problems(answer.data))]
    if wrong:
        change = (
            "pass on whatever carries x-tidegate-reason: no custom error pages or header rules in front of Envoy, no "
            "local_reply_config mapper without a filter, no body_format of its own"
        )
        return Result(Verdict.WRONG, "; ".join(wrong), change)
    return Result(Verdict.OK, "status, headers and body are as they should be, for SDKs of OpenAI and of Anthropic")


def answers_in_time(visit: Visit) -> Result:
    """Tidegate may need longer than the 200 ms that Envoy waits unless it is told otherwise."""
    ms = min(SLOW_MS, int(visit.expected.message_timeout_s * 500))
    answer, told = visit.question(silence_ms=ms)
    if told is None:
        change = (
            f"message_timeout of ext_proc (gateway.message_timeout_s, {visit.expected.message_timeout_s:g} s): "
            "Envoy's default is 200 ms"
        )
        return Result(Verdict.WRONG, f"an answer after {ms} ms came too late: {answered_by(answer)}", change)
    if told.question is None:
        return _busy()
    return Result(Verdict.OK, f"an answer after {ms} ms was waited for")


def fails_as_configured(visit: Visit) -> Result:
    """Tidegate is silent on one request for longer than Envoy waits, as if it hung; only that one is concerned."""
    expected = visit.expected
    wished = int(expected.message_timeout_s * 1000) + BEYOND_MS if expected.known else LONGEST_MS
    ms = min(wished, LONGEST_MS)
    answer, told = visit.question(silence_ms=ms)
    if told is not None and told.question is None:
        return _busy()
    if told is not None:
        why = f"Envoy waits for longer than {ms / 1000:g} s; stop Tidegate for a moment, and ask again, to see it"
        return Result(Verdict.NOT_TOLD, why)
    visit.gives_up_s = answer.seconds
    opened = not answer.reason and (answer.status < SERVER_ERROR or "x-tidegate-upstream" in answer.headers)
    if opened is not expected.fails_open:
        return _other_than_expected(visit, answer)
    return _open(answer) if opened else _closed(visit, answer)


def holds(visit: Visit) -> Result:
    """A queued request is waited for, for as long as the most patient lane lets it stand in line.

    Envoy heeds a plea for more than it was told to grant not at all: then the request is cut after `message_timeout`.
    """
    timeout_s = visit.gives_up_s or visit.expected.message_timeout_s
    ms = min(LONGEST_MS, max(HELD_MS, int(timeout_s * 1000) + BEYOND_MS))
    answer, told = visit.question(hold_ms=ms)
    if told is None:
        change = (
            "max_message_timeout of ext_proc: the longest lane's max_wait_s + 5 s (gateway.max_message_timeout_s); "
            "where it cannot be set, as in Envoy Gateway, message_timeout itself; stream_idle_timeout and timeouts of "
            "what stands in front have to be longer, too"
        )
        return Result(Verdict.WRONG, f"a request held for {ms} ms was cut: {answered_by(answer)}", change)
    if told.question is None:
        return _busy()
    if visit.gives_up_s is None:
        return Result(Verdict.OK, f"a request was held for {ms} ms; how much longer Envoy would wait cannot be seen")
    return Result(Verdict.OK, f"a request was held for {ms} ms, with leave for the longest wait of all lanes")


def reads_large(visit: Visit) -> Result:
    """A large body reaches Tidegate whole."""
    size = visit.expected.larger
    answer, told = visit.question(size=size)
    if told is not None and told.size == size:
        return Result(Verdict.OK, f"{size:,} bytes were read")
    limits = (
        "per_connection_buffer_limit_bytes of the listener or request_body_buffer_limit of the route "
        "(gateway.max_body_bytes); what stands in front has a limit, too (client_max_body_size)"
    )
    if told is not None:
        return Result(Verdict.WRONG, f"{told.size:,} of {size:,} bytes were read", SHOW_BODY)
    if answer.reason == Reason.BAD_REQUEST:
        return Result(Verdict.WRONG, f"a part of {size:,} bytes was read: {answer.message}", SHOW_BODY)
    if answer.reason == Reason.ADMISSION_UNAVAILABLE:
        change = f"{limits}; the service takes messages of gateway.max_body_bytes; message_timeout"
        return Result(Verdict.WRONG, f"{size:,} bytes were not answered: {answered_by(answer)}", change)
    return Result(Verdict.WRONG, f"{size:,} bytes were refused: {answered_by(answer)}", limits)


def leaves_others(visit: Visit) -> Result:
    """What is no LLM endpoint is answered by whoever it belongs to."""
    path = visit.other or NO_LLM_PATH
    answer = visit.gateway.ask("GET", path)
    if not answer.reason:
        return Result(Verdict.OK, f"GET {path}: {answered_by(answer)}, not Tidegate")
    change = (
        "give other services routes of their own, before those of the LLM endpoints, on which ext_proc is off "
        "(ExtProcPerRoute: disabled: true)"
    )
    if answer.reason == Reason.ADMISSION_UNAVAILABLE or visit.other:
        return Result(Verdict.WRONG, f"GET {path}: {answered_by(answer)}", change)
    why = f"GET {path}: {answered_by(answer)}, as on a listener of Tidegate's own; name a path of others with --other"
    return Result(Verdict.NOT_TOLD, why)


def _busy() -> Result:
    return Result(Verdict.NOT_TOLD, "others ask the same at this moment; ask again")


def _open(answer: Answer) -> Result:
    return Result(Verdict.OK, f"fails open: went on without Tidegate, {answered_by(answer)}")


def _closed(visit: Visit, answer: Answer) -> Result:
    if answer.reason != Reason.ADMISSION_UNAVAILABLE:
        why = f"fails closed, but with {answered_by(answer)}: running streams are cut, too, whenever Tidegate restarts"
        change = "where it can be set: failure_mode_allow: true, and routes that refuse what carries no ticket"
        return Result(Verdict.OK, why, change)
    if wrong := "; ".join(_refusal(visit, answer)):
        return Result(Verdict.WRONG, f"fails closed, but {wrong}", "the direct_response of the routes without a ticket")
    return Result(Verdict.OK, f"fails closed: {answered_by(answer)}")


def _other_than_expected(visit: Visit, answer: Answer) -> Result:
    if visit.expected.fails_open:
        why = f"fails closed, where it was to fail open: {answered_by(answer)}"
        return Result(Verdict.WRONG, why, "failure_mode_allow: true, and a route for what carries no ticket")
    change = (
        "failure_mode_allow: false, or better true with routes that refuse what carries no ticket, as rendered; "
        "say --open where it is meant so"
    )
    return Result(Verdict.WRONG, f"fails open: a request went past, {answered_by(answer)}", change)


def _refusal(visit: Visit, answer: Answer) -> Iterator[str]:
    """What is wrong with a refusal, whatever its dialect."""
    reason, headers = answer.reason, answer.headers
    if not reason:
        yield f"x-tidegate-reason is missing, {answered_by(answer)}"
        return
    if (status := visit.expected.status_of(reason)) != answer.status:
        yield f"status {answer.status} for {reason}, not {status}"
    if not headers.get("content-type", "").startswith("application/json"):
        yield f"content-type is {headers.get('content-type', 'absent')}, not application/json"
    if error_of(answer.data).get("reason") != reason:
        yield f"the body does not name {reason}"
    again = headers.get("x-should-retry")
    if again not in ("true", "false"):
        yield "x-should-retry is missing"
    elif (again == "true") != ("retry-after" in headers):
        yield f"x-should-retry is {again}, retry-after is {headers.get('retry-after', 'absent')}"


def _openai(data: Mapping[str, object]) -> Iterator[str]:
    missing = [key for key in ("message", "type", "code") if not isinstance(error_of(data).get(key), str)]
    if missing:
        yield f"error.{', error.'.join(missing)} missing in the body"


def _anthropic(data: Mapping[str, object]) -> Iterator[str]:
    if data.get("type") != "error":
        yield 'the body is not of type "error"'
    missing = [key for key in ("message", "type") if not isinstance(error_of(data).get(key), str)]
    if missing:
        yield f"error.{', error.'.join(missing)} missing in the body"
