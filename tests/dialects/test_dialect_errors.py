"""A fixture for every row of the table of provider errors."""

import pytest

from extproc.dialects import ErrorClass, classify
from extproc.dialects.errors import TABLE

PACE, OVERLOAD, TERMINAL = ErrorClass.PACE, ErrorClass.OVERLOAD, ErrorClass.TERMINAL
CREDENTIAL, CLIENT, NONE = ErrorClass.CREDENTIAL, ErrorClass.CLIENT, ErrorClass.NONE

CASES = [
    ("openai", 429, "insufficient_quota", "insufficient_quota", TERMINAL),
    ("openai", 429, "insufficient_quota", "", TERMINAL),
    ("openai", 429, "x", "insufficient_quota", TERMINAL),
    ("openai", 429, "x", "credit_balance_exhausted", TERMINAL),
    ("openai", 429, "x", "organization_spend_limit_exceeded", TERMINAL),
    ("openai", 429, "x", "project_spend_limit_exceeded", TERMINAL),
    ("openai", 429, "x", "organization_usage_limit_exceeded", TERMINAL),
    ("openai", 400, "x", "billing_hard_limit_reached", TERMINAL),
    ("openai", 429, "x", "billing_not_active", TERMINAL),
    ("openai", 401, "invalid_request_error", "account_deactivated", CREDENTIAL),
    ("openai", 429, "rate_limit_error", "slow_down", PACE),
    ("openai", 503, "rate_limit_error", "slow_down", PACE),
    ("openai", 429, "tokens", "rate_limit_exceeded", PACE),
    ("openai", 429, "requests", "rate_limit_exceeded", PACE),
    ("openai", 503, "server_error", "server_is_overloaded", OVERLOAD),
    ("openai", 200, "server_error", "server_is_overloaded", OVERLOAD),
    ("openai", 401, "invalid_request_error", "invalid_api_key", CREDENTIAL),
    ("openai", 403, "request_forbidden", "unsupported_country_region_territory", CREDENTIAL),
    ("openai", 400, "invalid_request_error", "context_length_exceeded", CLIENT),
    ("openai", 404, "invalid_request_error", "model_not_found", CLIENT),
    ("openai", 500, "server_error", "", OVERLOAD),
    ("azure", 429, "insufficient_quota", "", PACE),
    ("azure", 429, "", "insufficient_quota", PACE),
    ("azure", 429, "", "429", PACE),
    ("azure", 200, "", "429", PACE),
    ("azure", 429, "too_many_requests", "too_many_requests", PACE),
    ("azure", 503, "", "ServiceUnavailable", OVERLOAD),
    ("azure", 400, "invalid_request_error", "content_filter", CLIENT),
    ("azure", 404, "", "DeploymentNotFound", CREDENTIAL),
    ("azure", 403, "", "", CREDENTIAL),
    ("anthropic", 429, "rate_limit_error", "", PACE),
    ("anthropic", 429, "rate_limit_error", "enforced_spend_limit_reached", TERMINAL),
    ("anthropic", 402, "billing_error", "", TERMINAL),
    ("anthropic", 400, "invalid_request_error", "credit_balance_too_low", TERMINAL),
    ("anthropic", 400, "invalid_request_error", "spend_limit_reached", TERMINAL),
    ("anthropic", 529, "overloaded_error", "", OVERLOAD),
    ("anthropic", 200, "overloaded_error", "", OVERLOAD),
    ("anthropic", 529, "", "", OVERLOAD),
    ("anthropic", 500, "api_error", "", OVERLOAD),
    ("anthropic", 504, "timeout_error", "", OVERLOAD),
    ("anthropic", 401, "authentication_error", "", CREDENTIAL),
    ("anthropic", 403, "permission_error", "", CREDENTIAL),
    ("anthropic", 404, "not_found_error", "", CLIENT),
    ("anthropic", 413, "request_too_large", "", CLIENT),
    ("anthropic", 400, "invalid_request_error", "", CLIENT),
    ("gemini", 429, "RESOURCE_EXHAUSTED", "GenerateRequestsPerMinutePerProjectPerModel-FreeTier", PACE),
    ("gemini", 429, "RESOURCE_EXHAUSTED", "GenerateRequestsPerDayPerProjectPerModel-FreeTier", TERMINAL),
    ("gemini", 429, "GenerateRequestsPerDayPerProject", "", TERMINAL),
    ("gemini", 429, "RESOURCE_EXHAUSTED", "", PACE),
    ("gemini", 503, "UNAVAILABLE", "", OVERLOAD),
    ("gemini", 500, "INTERNAL", "", OVERLOAD),
    ("gemini", 504, "DEADLINE_EXCEEDED", "", OVERLOAD),
    ("gemini", 400, "INVALID_ARGUMENT", "API_KEY_INVALID", CREDENTIAL),
    ("gemini", 401, "UNAUTHENTICATED", "", CREDENTIAL),
    ("gemini", 403, "PERMISSION_DENIED", "", CREDENTIAL),
    ("gemini", 400, "FAILED_PRECONDITION", "", TERMINAL),
    ("gemini", 400, "INVALID_ARGUMENT", "", CLIENT),
    ("gemini", 404, "NOT_FOUND", "", CLIENT),
    ("vllm", 503, "ServiceUnavailableError", "", OVERLOAD),
    ("vllm", 429, "", "", OVERLOAD),
    ("vllm", 404, "NotFoundError", "", CREDENTIAL),
    ("vllm", 400, "BadRequestError", "", CLIENT),
    ("sglang", 429, "", "", OVERLOAD),
    ("sglang", 503, "", "", OVERLOAD),
    ("sglang", 404, "", "", CREDENTIAL),
    ("deepseek", 402, "unknown_error", "invalid_request_error", TERMINAL),
    ("deepseek", 422, "", "", CLIENT),
    ("deepseek", 429, "", "", PACE),
    ("deepseek", 503, "", "", OVERLOAD),
    ("openrouter", 402, "", "", TERMINAL),
    ("openrouter", 200, "", "402", TERMINAL),
    ("openrouter", 200, "", "429", PACE),
    ("openrouter", 408, "", "", OVERLOAD),
    ("openrouter", 200, "", "408", OVERLOAD),
    ("openrouter", 200, "", "502", OVERLOAD),
    ("openrouter", 200, "", "503", OVERLOAD),
    ("openrouter", 403, "", "", CLIENT),
    ("openrouter", 401, "", "", CREDENTIAL),
    ("bedrock", 429, "ThrottlingException", "", PACE),
    ("bedrock", 400, "ServiceQuotaExceededException", "", PACE),
    ("bedrock", 503, "ServiceUnavailableException", "", OVERLOAD),
    ("bedrock", 429, "ModelNotReadyException", "", OVERLOAD),
    ("bedrock", 408, "ModelTimeoutException", "", OVERLOAD),
    ("bedrock", 424, "modelStreamErrorException", "", OVERLOAD),
    ("bedrock", 403, "AccessDeniedException", "", CREDENTIAL),
    ("bedrock", 400, "ValidationException", "", CLIENT),
    ("together", 429, "dynamic_request_limited", "", PACE),
    ("together", 429, "dynamic_token_limited", "", PACE),
    ("together", 402, "", "", TERMINAL),
    ("together", 503, "", "", OVERLOAD),
    ("scaleway", 429, "insufficient_quota", "", PACE),
    ("generic", 429, "insufficient_quota", "", TERMINAL),
    ("generic", 429, "", "insufficient_quota", TERMINAL),
    ("generic", 402, "", "", TERMINAL),
    ("generic", 400, "invalid_request_error", "credit_balance_too_low", TERMINAL),
    ("generic", 400, "invalid_request_error", "spend_limit_reached", TERMINAL),
    ("generic", 400, "invalid_request_error", "API_KEY_INVALID", CREDENTIAL),
    ("generic", 429, "", "", PACE),
    ("generic", 401, "", "", CREDENTIAL),
    ("generic", 403, "", "", CREDENTIAL),
    ("generic", 408, "", "", OVERLOAD),
    ("generic", 425, "", "", OVERLOAD),
    ("generic", 200, "rate_limit_error", "", PACE),
    ("generic", 200, "rate_limit_exceeded", "", PACE),
    ("generic", 200, "", "rate_limit_exceeded", PACE),
    ("generic", 200, "overloaded_error", "", OVERLOAD),
    ("generic", 200, "server_error", "", OVERLOAD),
    ("generic", 200, "api_error", "", OVERLOAD),
    ("generic", 200, "", "server_is_overloaded", OVERLOAD),
    ("generic", 200, "invalid_request_error", "", CLIENT),
    ("generic", 200, "", "context_length_exceeded", CLIENT),
    ("generic", 400, "", "", CLIENT),
    ("generic", 418, "whatever", "", CLIENT),
    ("generic", 500, "", "", OVERLOAD),
    ("generic", 200, "whatever", "", OVERLOAD),
    ("somebody new", 429, "", "", PACE),
    ("openai", 200, "", "", NONE),
    ("openai", 200, "-", "-", NONE),
    ("openai", 304, "", "", NONE),
]


@pytest.mark.parametrize(("provider", "status", "kind", "code", "means"), CASES)
def test_errors_are_classed_by_provider(provider, status, kind, code, means):
    """What each provider really sends, and whose fault it is."""
    assert classify(provider, status, kind, code) is means


# Azure's own rows stand before OpenAI's, which are tested as OpenAI's.
ROWS = [(name, row) for name, rows in TABLE.items() for row in rows if name != "azure" or row not in TABLE["openai"]]


@pytest.mark.parametrize(("provider", "row"), ROWS)
def test_every_row_has_a_fixture(provider, row):
    """No row is dead: each is the first to match one of the fixtures above."""
    firsts = [
        next((rule for rule in TABLE[provider] if rule.matches(status, kind, code)), None)
        for name, status, kind, code, _ in CASES
        if name == provider
    ]
    assert row in firsts
