"""Answers that Envoy makes without Tidegate, worded as Tidegate words them.

Where Envoy refuses by itself (flood, body too large, malformed request, service away, every upstream failed) the caller
still gets JSON in its own dialect, `x-tidegate-reason`, `x-should-retry`, and `retry-after` where a retry can help. One
list of mappers does it, the first that matches; a reply that names its reason already is Tidegate's own and is never
touched. A mapper without a filter, or a default `body_format`, would overwrite those. An upstream's own last failure is
made one of these replies by the custom response filter, which only triggers it.

What is said when every upstream failed was written at dispatch (`llm.route.fail_body`), in the caller's language and
with the wait forecast then; the static text is for requests that carry none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from extproc.core.refusal import Reason
from extproc.core.request import Dialect
from extproc.dialects import message_of
from extproc.render.names import LAST_RESORT_HEADER, REQUEST_ID_HEADER, ROUTE
from extproc.render.shape import Data, extension, set_header, source
from extproc.settings import Settings

__all__ = ["LANGUAGES", "away", "cel", "local_replies"]

LANGUAGES: dict[str, list[Data]] = {
    "zh": [{"name": "accept-language", "string_match": {"safe_regex": {"regex": r"\s*[zZ][hH]\b.*"}}}],
    "en": [],
}
"""Languages in the order to try, and the header matchers that tell who asked for each."""

_ANTHROPIC_PATH = r"^/v1/messages([/?].*)?$"
_REQUEST_ID = "%REQ(x-request-id)%"
_REQUEST_ID_HEADERS = (REQUEST_ID_HEADER, "x-request-id", "request-id")
"""Where people, OpenAI's SDK and Anthropic's look for it."""
_WITH_REQUEST_ID = f', "request_id": "{_REQUEST_ID}"'
_FAIL_BODY = f"%DYNAMIC_METADATA({ROUTE}:fail_body)%"
_DEADLINE = "response.code_details == 'response_timeout'"
"""The limit on a whole answer ran out; where the request had a deadline, that is the limit."""
_LAST_TRY = "response.code_details == 'upstream_per_try_timeout'"
"""The limit on the last attempt of a stream ran out; it is the deadline where that attempt was noted as `late`."""
_KINDS = {"json": "application/json", "events": "text/event-stream"}
"""Kinds of answers of last resort, and their content types."""
_FAIL_RETRY = f"%DYNAMIC_METADATA({ROUTE}:fail_retry)%"
_JITTER_MS = "%START_TIME(%3f)%"
"""Three digits behind whole seconds: the millisecond of a request's arrival, so that clients come back one by one."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_CODES = {429: "RATE_LIMIT_EXCEEDED", 503: "SERVER_OVERLOADED"}
_OK = 200
_SERVER_ERROR = 500


@dataclass(frozen=True, slots=True)
class _Refusal:
    """One refusal of Envoy's own: what it is called, its status, and what the caller reads."""

    reason: Reason
    status: int
    message: str
    retry_after_s: int | None = None

    def body(self, dialect: Dialect, language: str) -> str:
        """The JSON body, as an Envoy format string."""
        message = self.message if language == "en" else message_of(self.reason, language, self.retry_after_s)
        busy = self.status >= _SERVER_ERROR or self.status in _CODES
        if dialect is Dialect.ANTHROPIC:
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if busy else "invalid_request_error")
            error = {"type": kind, "message": message, "reason": self.reason}
            return json.dumps({"type": "error", "error": error, "request_id": _REQUEST_ID})
        return json.dumps(
            {
                "error": {
                    "message": message,
                    "type": "server_busy" if busy else "invalid_request_error",
                    "param": None,
                    "code": _CODES.get(self.status, self.reason.upper()),
                    "reason": self.reason,
                }
            }
        )

    def headers(self, retry_after: str | None = None) -> list[Data]:
        """The headers that every refusal carries; `retry_after` in place of the static one."""
        wait = retry_after or (str(self.retry_after_s) if self.retry_after_s else None)
        return [
            set_header("x-tidegate-reason", self.reason.value),
            set_header("x-should-retry", "true" if wait else "false"),
            *([set_header("retry-after", wait), set_header("retry-after-ms", wait + _JITTER_MS)] if wait else []),
            *(set_header(name, _REQUEST_ID) for name in _REQUEST_ID_HEADERS),
        ]


def away(settings: Settings, dialect: Dialect, language: str) -> Data:
    """Fields of a route that answers: admission is not available."""
    refusal = _Refusal(
        Reason.ADMISSION_UNAVAILABLE,
        settings.status_of(Reason.ADMISSION_UNAVAILABLE),
        "Admission is not available at the moment. Please try again.",
        retry_after_s=2,
    )
    body = refusal.body(dialect, language)
    if settings.gateway.profile == "classic":  # older Envoys put nothing into the body of a route
        return {
            "direct_response": {"status": refusal.status, "body": source(body.replace(_WITH_REQUEST_ID, ""))},
            "response_headers_to_add": [*refusal.headers(), set_header("content-type", "application/json")],
        }
    return {
        "direct_response": {"status": refusal.status, "body_format": _json(body)},
        "response_headers_to_add": refusal.headers(),
    }


def local_replies(settings: Settings) -> Data:
    """The HTTP connection manager's `local_reply_config`."""

    def refusal(reason: Reason, message: str, retry_after_s: int | None = None) -> _Refusal:
        return _Refusal(reason, settings.status_of(reason), message, retry_after_s)

    failed = refusal(Reason.UPSTREAM_FAILED, "This request could not be answered. Please try again.", 2)
    quota = refusal(Reason.TENANT_QUOTA, "Too many requests per second. Please slow down.", 1)
    large = refusal(Reason.TOO_LARGE, "The request is larger than this gateway accepts.")
    missing = refusal(Reason.NOT_FOUND, "There is nothing at this path.")
    late = refusal(Reason.DEADLINE_PASSED, "The answer was not ready before the deadline of this request.")
    barred = refusal(Reason.FORBIDDEN, "This gateway does not serve such requests.")
    broken = refusal(Reason.BAD_REQUEST, "The request is malformed.")
    cases = [
        ("response.code == 429", quota),
        ("response.code == 413", large),
        ("response.code == 404", missing),
        ("response.code == 403", barred),
        ("response.code >= 400 && response.code < 500 || response.code == 501", broken),
        ("response.code >= 500", failed),
    ]
    worded = [_worded(_late(), late), *(_worded(_unworded(case), what) for case, what in cases)]
    first, *others = worded
    instead = _stand_ins() if any(route.last_resort for route in settings.routes) else []
    return {"mappers": [*instead, *first, _forecast(failed), *(mapper for mappers in others for mapper in mappers)]}


def _stand_ins() -> list[Data]:
    """Answers where the operator wrote one for the route: dispatch put it in the place of the error."""
    return [
        _mapper(
            [_unworded("response.code >= 400"), _admitted_with("last_resort", {"string_match": {"exact": kind}})],
            _OK,
            [set_header(LAST_RESORT_HEADER, "true")],
            _FAIL_BODY,
            content_type,
        )
        for kind, content_type in _KINDS.items()
    ]


def _late() -> Data:
    """The caller's deadline passed: that of a whole answer, or of the last attempt of a stream."""
    answer = [_unworded(_DEADLINE), _admitted_with("deadline_ms", {"present_match": True})]
    stream = [_unworded(_LAST_TRY), _admitted_with("late", {"bool_match": True})]
    return {"or_filter": {"filters": [{"and_filter": {"filters": both}} for both in (answer, stream)]}}


def _forecast(refusal: _Refusal) -> Data:
    """Once admitted, whatever Envoy answers by itself means that no upstream could: it says what dispatch wrote."""
    conditions = [_unworded("response.code >= 400"), _admitted_with("fail_body", {"present_match": True})]
    return _mapper(conditions, refusal.status, refusal.headers(_FAIL_RETRY), _FAIL_BODY)


def _worded(condition: Data, refusal: _Refusal) -> list[Data]:
    """The mappers of one refusal, in every language: Anthropic's callers, then everybody.

    They are known by their path, or by what admission noted: an attempt leaves its upstream's own path behind.
    """
    path = _header({"name": ":path", "string_match": {"safe_regex": {"regex": _ANTHROPIC_PATH}}})
    noted = _admitted_with("dialect", {"string_match": {"exact": Dialect.ANTHROPIC.value}})
    anthropic = {"or_filter": {"filters": [path, noted]}}
    return [
        _mapper(
            [condition, *map(_header, asked), *spoken],
            refusal.status,
            refusal.headers(),
            refusal.body(dialect, language),
        )
        for language, asked in LANGUAGES.items()
        for dialect, spoken in ((Dialect.ANTHROPIC, [anthropic]), (Dialect.OPENAI, []))
    ]


def _mapper(
    conditions: list[Data], status: int, headers: list[Data], body: str, content_type: str = "application/json"
) -> Data:
    condition = conditions[0] if len(conditions) == 1 else {"and_filter": {"filters": conditions}}
    return {
        "filter": condition,
        "status_code": status,
        "headers_to_add": headers,
        "body_format_override": _format(body, content_type),
    }


def _json(body: str) -> Data:
    return _format(body, "application/json")


def _format(body: str, content_type: str) -> Data:
    return {"content_type": content_type, "text_format_source": {"inline_string": body}}


def _header(matcher: Data) -> Data:
    return {"header_filter": {"header": matcher}}


def _admitted_with(key: str, value: Data) -> Data:
    """Whether admission wrote such a value."""
    matcher = {"filter": ROUTE, "path": [{"key": key}], "value": value}
    return {"metadata_filter": {"matcher": matcher, "match_if_key_not_found": False}}


def _unworded(condition: str) -> Data:
    """`condition` of a reply that does not name its reason yet, so that it is none of Tidegate's own."""
    return cel(f"({condition}) && !('x-tidegate-reason' in response.headers)")


def cel(expression: str) -> Data:
    """An access log filter that is true where a CEL expression is."""
    kind = "envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter"
    return {"extension_filter": extension("envoy.access_loggers.extension_filters.cel", kind, expression=expression)}
