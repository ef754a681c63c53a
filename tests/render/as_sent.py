"""Errors as providers send them: status, headers and body, and what they mean. Messages are in our own words.

Shapes and codes are what providers document or what was read in issues and public code; a row that turns out wrong is
corrected here and in `extproc/dialects/errors.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from extproc.dialects import ErrorClass

PACE, OVERLOAD, TERMINAL = ErrorClass.PACE, ErrorClass.OVERLOAD, ErrorClass.TERMINAL
CREDENTIAL, FORBIDDEN = ErrorClass.CREDENTIAL, ErrorClass.FORBIDDEN
MISSING, CLIENT = ErrorClass.MISSING, ErrorClass.CLIENT


@dataclass(frozen=True)
class Sent:
    """One error. body: JSON data, or bytes. too_long: a wider window would do. missing: it may be elsewhere."""

    provider: str
    status: int
    body: Any
    means: ErrorClass
    headers: Mapping[str, str] = field(default_factory=dict)
    too_long: bool = False
    missing: bool = False

    @property
    def bytes(self) -> bytes:
        """The body as it comes."""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    def __str__(self) -> str:
        """Shown as the name of a test."""
        return f"{self.provider}-{self.status}-{self.bytes.decode()[:60]}"


def openai(message: str, kind: str | None, code: Any = None) -> dict[str, Any]:
    """OpenAI's shape, which most others share."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def azure(message: str, code: str, **more: Any) -> dict[str, Any]:
    """Azure's."""
    return {"error": {"code": code, "message": message, **more}}


def anthropic(message: str, kind: str, **more: Any) -> dict[str, Any]:
    """Anthropic's."""
    return {"type": "error", "error": {"type": kind, "message": message, **more}, "request_id": "req_1"}


def gemini(message: str, code: int, status: str, *quotas: str) -> list[dict[str, Any]]:
    """Gemini's, in the list that its OpenAI-compatible endpoint puts around it."""
    violations = [{"quotaMetric": "generativelanguage.googleapis.com/requests", "quotaId": quota} for quota in quotas]
    details = [
        {"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": violations},
        {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "22s"},
    ]
    error = {"code": code, "message": message, "status": status}
    return [{"error": {**error, "details": details} if quotas else error}]


def vllm(message: str, kind: str, code: int) -> dict[str, Any]:
    """Older vLLM and SGLang."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


def openrouter(message: str, code: int, **metadata: Any) -> dict[str, Any]:
    """OpenRouter's."""
    return {"error": {"code": code, "message": message, "metadata": metadata}, "user_id": "user_1"}


def aws(name: str) -> dict[str, str]:
    """How Bedrock names an exception."""
    return {"x-amzn-errortype": f"{name}:http://internal.amazon.com/coral/com.amazon.bedrock/"}


LIMIT = "Rate limit reached for gpt in organization org-x on tokens per min (TPM): Limit 30000, Used 29000."
TOO_LONG = "This model's maximum context length is 8192 tokens, but the messages have 9001."
NO_CREDIT = "Your credit balance is too low to use this API."
DAY, MINUTE = (
    "GenerateRequestsPerDayPerProjectPerModel-FreeTier",
    "GenerateRequestsPerMinutePerProjectPerModel-FreeTier",
)

SENT = [
    Sent("openai", 429, openai(f"{LIMIT} Please try again in 2s.", "tokens", "rate_limit_exceeded"), PACE),
    Sent("openai", 429, openai(LIMIT, "requests", "rate_limit_exceeded"), PACE),
    Sent("openai", 429, openai("Traffic grows too fast.", "rate_limit_error", "slow_down"), PACE),
    Sent("openai", 503, openai("Traffic grows too fast.", "server_error", "slow_down"), PACE),
    Sent("openai", 503, openai("Overloaded.", "server_error", "server_is_overloaded"), OVERLOAD),
    Sent("openai", 500, openai("Something went wrong.", "server_error"), OVERLOAD),
    Sent("openai", 502, b"<html>Bad gateway</html>", OVERLOAD),
    *(
        Sent("openai", 429, openai("No more for you.", "insufficient_quota", code), TERMINAL)
        for code in (
            "insufficient_quota",
            "credit_balance_exhausted",
            "organization_spend_limit_exceeded",
            "project_spend_limit_exceeded",
            "organization_usage_limit_exceeded",
        )
    ),
    *(
        Sent("openai", 429, openai("No more for you.", None, code), TERMINAL)
        for code in (
            "insufficient_quota",
            "credit_balance_exhausted",
            "organization_spend_limit_exceeded",
            "project_spend_limit_exceeded",
            "organization_usage_limit_exceeded",
            "billing_not_active",
        )
    ),
    Sent("openai", 503, openai("No more for you.", "insufficient_quota"), TERMINAL),
    Sent("openai", 400, openai("Hard limit.", "invalid_request_error", "billing_hard_limit_reached"), TERMINAL),
    Sent(
        "openai",
        401,
        openai("Incorrect API key provided: sk-a", "invalid_request_error", "invalid_api_key"),
        CREDENTIAL,
    ),
    Sent("openai", 401, openai("Deactivated.", "invalid_request_error", "account_deactivated"), CREDENTIAL),
    Sent("openai", 401, openai("No such organization.", "invalid_request_error", "invalid_organization"), CREDENTIAL),
    Sent(
        "openai",
        401,
        openai("Your IP 1.2.3.4 is not allowed.", "invalid_request_error", "ip_not_authorized"),
        CREDENTIAL,
    ),
    Sent("openai", 403, openai("Not here.", "request_forbidden", "unsupported_country_region_territory"), CREDENTIAL),
    Sent("openai", 403, openai("Missing scopes: model.request", "invalid_request_error"), FORBIDDEN),
    Sent("openai", 404, openai("No such model.", "invalid_request_error", "model_not_found"), CLIENT, missing=True),
    Sent("openai", 400, openai(TOO_LONG, "invalid_request_error", "context_length_exceeded"), CLIENT, too_long=True),
    Sent("openai", 400, openai("Your input exceeds the context window of this model.", None), CLIENT, too_long=True),
    Sent("openai", 400, openai("Flagged.", "invalid_request_error", "content_policy_violation"), CLIENT),
    Sent("openai", 400, openai("Missing: 'messages'.", "invalid_request_error", "missing_required_parameter"), CLIENT),
    Sent("openai", 200, openai("Something went wrong.", "server_error"), OVERLOAD),
    Sent("openai", 200, openai("No more for you.", "insufficient_quota", "insufficient_quota"), TERMINAL),
    Sent("azure", 429, azure("Token rate limit exceeded. Please retry after 6 seconds.", "429"), PACE),
    Sent(
        "azure",
        429,
        azure("The system is experiencing high demand.", "too_many_requests", type="too_many_requests"),
        PACE,
    ),
    Sent("azure", 429, openai("Quota of this deployment.", "insufficient_quota"), PACE),
    Sent("azure", 429, openai("Quota of this deployment.", None, "insufficient_quota"), PACE),
    Sent("azure", 503, azure("Try later.", "ServiceUnavailable"), OVERLOAD),
    Sent("azure", 401, azure("Access denied due to invalid subscription key.", "401"), CREDENTIAL),
    Sent("azure", 401, {"statusCode": 401, "message": "Token is missing or invalid."}, CREDENTIAL),
    Sent("azure", 404, azure("The API deployment does not exist.", "DeploymentNotFound"), MISSING, missing=True),
    Sent(
        "azure",
        400,
        azure("Filtered.", "content_filter", status=400, innererror={"code": "ResponsibleAIPolicyViolation"}),
        CLIENT,
    ),
    Sent("azure", 200, azure("High demand.", "429"), PACE),
    Sent("anthropic", 429, anthropic("Over the limit of your organization.", "rate_limit_error"), PACE),
    Sent(
        "anthropic",
        429,
        anthropic("Limit.", "rate_limit_error", details={"error_code": "enforced_spend_limit_reached"}),
        TERMINAL,
    ),
    Sent("anthropic", 429, anthropic("Your organization has reached its spend limit.", "rate_limit_error"), TERMINAL),
    Sent("anthropic", 400, anthropic(NO_CREDIT, "invalid_request_error"), TERMINAL),
    Sent(
        "anthropic",
        400,
        anthropic("You have reached your specified API usage limits. Access returns later.", "invalid_request_error"),
        TERMINAL,
    ),
    Sent("anthropic", 402, anthropic("Payment is due.", "billing_error"), TERMINAL),
    Sent("anthropic", 529, anthropic("Overloaded", "overloaded_error"), OVERLOAD),
    Sent("anthropic", 529, b"", OVERLOAD),
    Sent("anthropic", 500, anthropic("Internal server error", "api_error"), OVERLOAD),
    Sent("anthropic", 504, anthropic("Timed out", "timeout_error"), OVERLOAD),
    Sent("anthropic", 401, anthropic("invalid x-api-key", "authentication_error"), CREDENTIAL),
    Sent("anthropic", 403, anthropic("No permission", "permission_error"), FORBIDDEN),
    Sent("anthropic", 404, anthropic("model: x", "not_found_error"), CLIENT, missing=True),
    Sent("anthropic", 413, anthropic("Request exceeds the maximum size", "request_too_large"), CLIENT, too_long=True),
    Sent(
        "anthropic", 400, anthropic("prompt is too long: 9 tokens > 8", "invalid_request_error"), CLIENT, too_long=True
    ),
    Sent(
        "anthropic",
        400,
        anthropic("input length and `max_tokens` exceed context limit: 7 + 2 > 8", "invalid_request_error"),
        CLIENT,
        too_long=True,
    ),
    Sent("anthropic", 400, anthropic("Output blocked by content filtering policy", "invalid_request_error"), CLIENT),
    Sent("anthropic", 400, anthropic("This model does not support prefill.", "invalid_request_error"), CLIENT),
    Sent("anthropic", 200, anthropic("Overloaded", "overloaded_error"), OVERLOAD),
    Sent("gemini", 429, gemini("Over quota.", 429, "RESOURCE_EXHAUSTED", MINUTE), PACE),
    Sent("gemini", 429, gemini("Over quota.", 429, "RESOURCE_EXHAUSTED", DAY), TERMINAL),
    Sent("gemini", 429, gemini("Over quota.", 429, "RESOURCE_EXHAUSTED", MINUTE, DAY), TERMINAL),
    Sent("gemini", 429, gemini("Over quota.", 429, "RESOURCE_EXHAUSTED", DAY, MINUTE), TERMINAL),
    Sent("gemini", 429, gemini("You exceeded your current quota.", 429, "RESOURCE_EXHAUSTED"), PACE),
    Sent("gemini", 429, gemini("Your prepayment credits are depleted.", 429, "RESOURCE_EXHAUSTED"), TERMINAL),
    Sent("gemini", 429, {"error": {"message": "Over quota.", "type": "GenerateRequestsPerDayPerProject"}}, TERMINAL),
    Sent("gemini", 503, gemini("Overloaded.", 503, "UNAVAILABLE"), OVERLOAD),
    Sent("gemini", 500, gemini("Internal.", 500, "INTERNAL"), OVERLOAD),
    Sent("gemini", 504, gemini("Too late.", 504, "DEADLINE_EXCEEDED"), OVERLOAD),
    Sent("gemini", 400, gemini("API key not valid. Please pass one.", 400, "INVALID_ARGUMENT"), CREDENTIAL),
    Sent("gemini", 400, gemini("API key expired. Please renew it.", 400, "INVALID_ARGUMENT"), CREDENTIAL),
    Sent("gemini", 401, gemini("Who are you?", 401, "UNAUTHENTICATED"), CREDENTIAL),
    Sent("gemini", 403, gemini("Not you.", 403, "PERMISSION_DENIED"), FORBIDDEN),
    Sent(
        "gemini",
        403,
        gemini("CachedContent not found (or permission denied)", 403, "PERMISSION_DENIED"),
        FORBIDDEN,
    ),
    Sent("gemini", 400, gemini("Not from where you are.", 400, "FAILED_PRECONDITION"), TERMINAL),
    Sent("gemini", 400, gemini("Bad argument.", 400, "INVALID_ARGUMENT"), CLIENT),
    Sent(
        "gemini",
        400,
        gemini("The input token count exceeds the maximum number of tokens allowed (8).", 400, "INVALID_ARGUMENT"),
        CLIENT,
        too_long=True,
    ),
    Sent("gemini", 404, gemini("No such model.", 404, "NOT_FOUND"), CLIENT, missing=True),
    Sent("vllm", 503, vllm("Too many requests wait.", "ServiceUnavailableError", 503), OVERLOAD),
    Sent("vllm", 429, b"", OVERLOAD),
    Sent("vllm", 404, vllm("The model `x` does not exist.", "NotFoundError", 404), MISSING, missing=True),
    Sent("vllm", 404, openai("The model `a/b:c` does not exist.", "NotFoundError", 404), MISSING, missing=True),
    Sent(
        "vllm",
        404,
        openai("Response with id 'the model `x` does not exist' not found.", "invalid_request_error", 404),
        CLIENT,
        missing=True,
    ),
    Sent("vllm", 404, {"detail": "Not Found"}, CLIENT, missing=True),
    Sent("vllm", 400, vllm(TOO_LONG, "BadRequestError", 400), CLIENT, too_long=True),
    Sent("vllm", 400, openai(TOO_LONG, "BadRequestError", 400), CLIENT, too_long=True),
    Sent(
        "vllm",
        400,
        vllm("prompt (length 9) is longer than the maximum model length of 8", "x", 400),
        CLIENT,
        too_long=True,
    ),
    Sent("vllm", 400, vllm("Temperature must be positive.", "BadRequestError", 400), CLIENT),
    Sent("vllm", 500, b"Internal Server Error", OVERLOAD),
    Sent("sglang", 429, vllm("The request queue is full.", "x", 429), OVERLOAD),
    Sent("sglang", 503, vllm("The request queue is full.", "x", 503), OVERLOAD),
    Sent(
        "sglang",
        404,
        openai("The model 'x' does not exist", "invalid_request_error", "model_not_found"),
        MISSING,
        missing=True,
    ),
    Sent("sglang", 404, {"detail": "Not Found"}, CLIENT, missing=True),
    Sent(
        "sglang",
        400,
        vllm("The input (9 tokens) is longer than the model's context length (8).", "BadRequest", 400),
        CLIENT,
        too_long=True,
    ),
    Sent("deepseek", 402, openai("Insufficient Balance", "unknown_error", "invalid_request_error"), TERMINAL),
    Sent("deepseek", 401, openai("Authentication fails", "authentication_error", "invalid_request_error"), CREDENTIAL),
    Sent("deepseek", 422, openai("Bad parameter", "invalid_request_error", "invalid_request_error"), CLIENT),
    Sent("deepseek", 429, openai("Too fast", "rate_limit_error"), PACE),
    Sent("deepseek", 503, openai("Overloaded", "server_error"), OVERLOAD),
    Sent("openrouter", 402, openrouter("Insufficient credits", 402), TERMINAL),
    Sent("openrouter", 200, openrouter("Insufficient credits", 402), TERMINAL),
    Sent("openrouter", 429, openrouter("Rate-limited upstream", 429), PACE),
    Sent("openrouter", 200, openrouter("Rate-limited upstream", 429), PACE),
    Sent("openrouter", 408, openrouter("Timed out", 408), OVERLOAD),
    Sent("openrouter", 200, openrouter("Timed out", 408), OVERLOAD),
    Sent("openrouter", 502, openrouter("Provider returned error", 502), OVERLOAD),
    Sent("openrouter", 200, openrouter("Provider returned error", 502), OVERLOAD),
    Sent("openrouter", 503, openrouter("Nobody is there", 503), OVERLOAD),
    Sent("openrouter", 401, openrouter("No auth credentials found", 401), CREDENTIAL),
    Sent("openrouter", 403, openrouter("Flagged", 403, reasons=["violence"]), CLIENT),
    Sent("openrouter", 200, openrouter("Flagged", 403, reasons=["violence"]), CLIENT),
    Sent("bedrock", 429, {"message": "Too many tokens, please wait."}, PACE, aws("ThrottlingException")),
    Sent("bedrock", 429, {"__type": "com.amazon.coral.service#ThrottlingException", "message": "Slow."}, PACE),
    Sent("bedrock", 400, {"message": "Over the account's quota."}, PACE, aws("ServiceQuotaExceededException")),
    Sent("bedrock", 503, {"message": "Try again."}, OVERLOAD, aws("ServiceUnavailableException")),
    Sent("bedrock", 429, {"message": "The model is warming up."}, OVERLOAD, aws("ModelNotReadyException")),
    Sent("bedrock", 408, {"message": "Too late."}, OVERLOAD, aws("ModelTimeoutException")),
    Sent("bedrock", 500, {"message": "Oops."}, OVERLOAD, aws("InternalServerException")),
    Sent("bedrock", 424, {"message": "The model failed."}, OVERLOAD, aws("ModelErrorException")),
    Sent("bedrock", 424, {"message": "The model failed."}, OVERLOAD, aws("ModelStreamErrorException")),
    Sent("bedrock", 424, {"__type": "modelStreamErrorException", "message": "x"}, OVERLOAD),
    Sent("bedrock", 403, {"Message": "Not you."}, CREDENTIAL, aws("UnrecognizedClientException")),
    Sent("bedrock", 403, {"message": "Old token."}, CREDENTIAL, aws("ExpiredTokenException")),
    Sent("bedrock", 403, {"message": "No access to the model."}, FORBIDDEN, aws("AccessDeniedException")),
    Sent("bedrock", 400, {"message": "Malformed input."}, CLIENT, aws("ValidationException")),
    Sent(
        "bedrock",
        400,
        {"message": "Input is too long for requested model."},
        CLIENT,
        aws("ValidationException"),
        too_long=True,
    ),
    Sent("together", 429, {"error": {"message": "Slow.", "type": "dynamic_request_limited"}}, PACE),
    Sent("together", 429, {"error": "Slow.", "error_type": "dynamic_token_limited"}, PACE),
    Sent("together", 402, openai("Add credit.", "credit_limit"), TERMINAL),
    Sent("together", 503, openai("No capacity.", "service_unavailable"), OVERLOAD),
    Sent("groq", 429, openai(LIMIT, "tokens", "rate_limit_exceeded"), PACE),
    Sent("groq", 413, openai("Request too large", "tokens", "rate_limit_exceeded"), CLIENT, missing=True),
    Sent("groq", 498, openai("No flex capacity", "tokens", "capacity_exceeded"), OVERLOAD),
    Sent("groq", 400, openai("Blocked", "invalid_request_error", "blocked_api_access"), TERMINAL),
    Sent("groq", 400, openai("Restricted", "invalid_request_error", "organization_restricted"), CREDENTIAL),
    Sent("mistral", 429, vllm("Capacity of this tier exceeded.", "service_tier_capacity_exceeded", 3505), OVERLOAD),
    Sent("mistral", 429, {"message": "Requests rate limit exceeded"}, PACE),
    Sent("mistral", 401, {"detail": "Unauthorized"}, CREDENTIAL),
    Sent("mistral", 422, {"detail": [{"loc": ["body", "messages"], "msg": "Field required"}]}, CLIENT),
    Sent(
        "cerebras",
        429,
        {"message": "High traffic", "type": "too_many_requests_error", "code": "queue_exceeded"},
        OVERLOAD,
    ),
    Sent("cerebras", 429, {"message": "Too many tokens processed", "code": "token_quota_exceeded"}, PACE),
    Sent("cerebras", 401, {"message": "Wrong API Key", "code": "wrong_api_key"}, CREDENTIAL),
    Sent(
        "xai",
        403,
        {
            "code": "The caller does not have permission",
            "error": "Your team 1-a has either used all available credits.",
        },
        TERMINAL,
    ),
    *(
        Sent("xai", 403, {"code": code, "error": f"Content violates usage guidelines. {more}"}, CLIENT)
        for code, more in (
            ("The caller does not have permission to execute the specified operation", "Failed check: X"),
            ("permission-denied", ""),
        )
    ),
    Sent("xai", 403, {"code": "permission-denied", "error": "Access to the chat endpoint is denied."}, FORBIDDEN),
    Sent("xai", 400, {"code": "Invalid argument", "error": "Incorrect API key provided: xa***. See x.ai."}, CREDENTIAL),
    Sent(
        "xai",
        400,
        {"code": "Invalid argument", "error": "This model's maximum prompt length is 8 but has 9."},
        CLIENT,
        too_long=True,
    ),
    Sent("scaleway", 429, {"error": "INSUFFICIENT QUOTA", "message": "Tokens per minute"}, PACE),
    Sent("scaleway", 429, openai("INSUFFICIENT QUOTA", "insufficient_quota", "insufficient_quota"), PACE),
    Sent("digitalocean", 429, openai("Slow.", "rate_limit"), PACE),
    Sent("compatible", 429, openai("No more.", "insufficient_quota"), TERMINAL),
    Sent("compatible", 429, openai("No more.", None, "insufficient_quota"), TERMINAL),
    Sent("compatible", 402, b"Payment Required", TERMINAL),
    Sent("compatible", 402, openai("Pay.", "billing_error"), TERMINAL),
    Sent("compatible", 400, openai("Pay.", "billing_error"), TERMINAL),
    Sent("compatible", 429, anthropic("x", "x", details={"error_code": "enforced_spend_limit_reached"}), TERMINAL),
    Sent("compatible", 400, openai(NO_CREDIT, "invalid_request_error"), TERMINAL),
    Sent("compatible", 400, openai("You have reached your spend limit.", "invalid_request_error"), TERMINAL),
    Sent("compatible", 400, gemini("API key not valid.", 400, "INVALID_ARGUMENT"), CREDENTIAL),
    Sent("compatible", 400, openai("No.", "invalid_request_error", "invalid_api_key"), CREDENTIAL),
    Sent("compatible", 400, openai("No.", "authentication_error"), CREDENTIAL),
    Sent("compatible", 400, openai("No.", "permission_error"), FORBIDDEN),
    Sent("compatible", 401, b"go away", CREDENTIAL),
    Sent("compatible", 403, b"", FORBIDDEN),
    Sent("compatible", 403, openai("Filtered.", None, "content_filter"), CLIENT),
    Sent("compatible", 400, openai("Filtered.", None, "content_policy_violation"), CLIENT),
    Sent("compatible", 429, b"", PACE),
    Sent("compatible", 408, b"", OVERLOAD),
    Sent("compatible", 425, b"", OVERLOAD),
    Sent("compatible", 200, openai("x", "rate_limit_error"), PACE),
    Sent("compatible", 200, openai("x", "rate_limit_exceeded"), PACE),
    Sent("compatible", 200, openai("x", None, "rate_limit_exceeded"), PACE),
    Sent("compatible", 200, openai("x", "overloaded_error"), OVERLOAD),
    Sent("compatible", 200, openai("x", "server_error"), OVERLOAD),
    Sent("compatible", 200, openai("x", "api_error"), OVERLOAD),
    Sent("compatible", 200, openai("x", None, "server_is_overloaded"), OVERLOAD),
    Sent("compatible", 200, openai("x", "invalid_request_error"), CLIENT),
    Sent("compatible", 200, openai("x", None, "content_filter"), CLIENT),
    Sent("compatible", 200, openai("x", None, "context_length_exceeded"), CLIENT, too_long=True),
    Sent("compatible", 200, anthropic(NO_CREDIT, "invalid_request_error"), TERMINAL),
    Sent("compatible", 200, {"error": "something else"}, OVERLOAD),
    Sent("compatible", 400, openai("x", "exceed_context_size_error", 400), CLIENT, too_long=True),
    Sent("compatible", 404, openai("x", "invalid_request_error", "model_not_found"), CLIENT, missing=True),
    Sent("compatible", 409, {}, CLIENT),
    Sent("compatible", 500, {}, OVERLOAD),
]

FLAT = [
    Sent("openai", 200, {"type": "error", "code": "server_error", "message": "x", "param": None}, OVERLOAD),
    Sent("vllm", 200, vllm("x", "InternalServerError", 500), OVERLOAD),
    Sent("vllm", 200, vllm("x", "BadRequestError", 400), CLIENT),
    Sent("azure", 200, {"statusCode": 429, "message": "Rate limit is exceeded."}, PACE),
    Sent("mistral", 200, {"message": "Requests rate limit exceeded"}, OVERLOAD),
    Sent("mistral", 200, vllm("Capacity of this tier exceeded.", "service_tier_capacity_exceeded", 3505), OVERLOAD),
    Sent("mistral", 200, {"detail": "Internal error"}, OVERLOAD),
    Sent("cerebras", 200, {"message": "x", "type": "too_many_requests_error", "code": "queue_exceeded"}, OVERLOAD),
    Sent("bedrock", 200, {"__type": "ThrottlingException", "message": "x"}, PACE),
    Sent("compatible", 200, {"code": 429, "message": "x"}, PACE),
    Sent("compatible", 200, {"code": "oops", "message": "x"}, OVERLOAD),
    Sent("compatible", 200, {"detail": [{"loc": ["body"], "msg": "x"}]}, OVERLOAD),
    Sent("compatible", 200, {"detail": NO_CREDIT}, TERMINAL),
    Sent("compatible", 200, {"code": 401, "message": "sk-1 is unknown"}, CREDENTIAL),
]
"""Errors under 200 that have no member `error`."""

EVENTS = [
    Sent("openai", 200, openai("x", "server_error", "server_is_overloaded"), OVERLOAD),
    Sent("openai", 200, openai("x", "insufficient_quota", "insufficient_quota"), TERMINAL),
    Sent("azure", 200, azure("High demand.", "429"), PACE),
    Sent("anthropic", 200, anthropic("Overloaded", "overloaded_error"), OVERLOAD),
    Sent("anthropic", 200, anthropic("x", "api_error"), OVERLOAD),
    Sent("anthropic", 200, anthropic("x", "rate_limit_error"), PACE),
    Sent("openrouter", 200, openrouter("x", 402), TERMINAL),
    Sent("openrouter", 200, openrouter("x", 401), CREDENTIAL),
    Sent("openrouter", 200, openrouter("x", 408), OVERLOAD),
    Sent("openrouter", 200, openrouter("x", 429), PACE),
    Sent("openrouter", 200, openrouter("x", 502), OVERLOAD),
    Sent("openrouter", 200, openrouter("x", 503), OVERLOAD),
    Sent("openrouter", 200, {"choices": [], **openrouter("x", 502)}, OVERLOAD),
    Sent("anthropic", 200, anthropic(NO_CREDIT, "invalid_request_error"), TERMINAL),
    Sent("gemini", 200, openai("API key expired.", "x"), CREDENTIAL),
    Sent("compatible", 200, {"error": "overloaded_error"}, OVERLOAD),
    Sent("xai", 200, {"code": "permission-denied", "error": "Content violates usage guidelines."}, CLIENT),
    Sent("vllm", 200, openai("The model `x` does not exist.", "NotFoundError", 404), MISSING, missing=True),
    Sent("vllm", 200, openai("Response with id 'x' not found.", "invalid_request_error", 404), CLIENT, missing=True),
    Sent("xai", 200, {"code": "x", "error": "Your team 1-a has either used all available credits."}, TERMINAL),
    Sent("compatible", 200, openai("x", None), OVERLOAD),
    Sent("compatible", 200, openai("x", None, 429), PACE),
    Sent("compatible", 200, openai("x", "BadRequestError", 400), CLIENT),
    *FLAT,
]
"""Errors that come as an event of a stream."""
