"""What OpenAI and Anthropic clients and providers say: reading requests, usage, errors and limits; writing refusals.

Pure: bytes and headers in, values out. Nothing here waits, looks at a clock, or logs.
"""

from extproc.dialects.document import Document, Rewrite, Span, rewrite
from extproc.dialects.errors import ErrorClass, classify
from extproc.dialects.headers import header_sessions, idempotency_key, language, retry_count, timeouts
from extproc.dialects.models import models_answer
from extproc.dialects.paths import endpoint_of, without_keys
from extproc.dialects.rates import Reported, charged, reported, retry_after_s
from extproc.dialects.reading import hides_usage, read, without_prompt
from extproc.dialects.refusal import message_of, refuse
from extproc.dialects.stand_in import signed, stand_in
from extproc.dialects.usage import merge, usage_of

__all__ = [
    "Document",
    "ErrorClass",
    "Reported",
    "Rewrite",
    "Span",
    "charged",
    "classify",
    "endpoint_of",
    "header_sessions",
    "hides_usage",
    "idempotency_key",
    "language",
    "merge",
    "message_of",
    "models_answer",
    "read",
    "refuse",
    "reported",
    "retry_after_s",
    "retry_count",
    "rewrite",
    "signed",
    "stand_in",
    "timeouts",
    "usage_of",
    "without_keys",
    "without_prompt",
]
