"""What is known of each vendor's API before anything is configured."""

from __future__ import annotations

from dataclasses import dataclass

from extproc.core import policy as core
from extproc.core.request import Dialect

__all__ = ["PROVIDERS", "EngineMetrics", "Provider"]


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Names of an inference engine's Prometheus metrics; usage is a share of 0 to 1, the first name that is there.

    config: an information metric whose labels tell the size of the cache, where no number (`tokens`) does. pulse:
    numbers that move whenever the engine works, so that a page that stands still is noticed.
    """

    usage: tuple[str, ...]
    waiting: str | None = None
    running: str | None = None
    preemptions: str | None = None
    tokens: str | None = None
    config: str | None = None
    pulse: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Provider:
    """What is known of a vendor's API: where it is, how it wants its key, and when it charges its token limit.

    priority_sign: 1 where an engine serves higher priorities first, -1 where lower ones; None where it knows none.
    metrics: how an engine names its own, None where it shows none.
    """

    url: str | None
    dialects: tuple[Dialect, ...] = (Dialect.OPENAI,)
    path: str = "/v1"
    key_header: str = "authorization"
    key_prefix: str = "Bearer "
    accounting: core.Accounting = core.Accounting.ACTUAL
    priority_sign: int | None = None
    metrics: EngineMetrics | None = None


_VLLM = EngineMetrics(
    usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    waiting="vllm:num_requests_waiting",
    running="vllm:num_requests_running",
    preemptions="vllm:num_preemptions_total",
    config="vllm:cache_config_info",
    pulse=("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
)
_SGLANG = EngineMetrics(
    usage=("sglang:token_usage",),
    waiting="sglang:num_queue_reqs",
    running="sglang:num_running_reqs",
    preemptions="sglang:num_retracted_requests_total",
    tokens="sglang:max_total_num_tokens",
    pulse=("sglang:num_used_tokens", "sglang:gen_throughput", "sglang:prompt_tokens_total"),
)
_BOTH = (Dialect.OPENAI, Dialect.ANTHROPIC)
_UPFRONT = core.Accounting.UPFRONT

PROVIDERS: dict[str, Provider] = {
    "openai": Provider("https://api.openai.com", accounting=_UPFRONT),
    "azure": Provider(None, path="/openai/v1", key_header="api-key", key_prefix="", accounting=_UPFRONT),
    "anthropic": Provider("https://api.anthropic.com", (Dialect.ANTHROPIC,), key_header="x-api-key", key_prefix=""),
    "gemini": Provider("https://generativelanguage.googleapis.com", path="/v1beta/openai"),
    "openrouter": Provider("https://openrouter.ai", path="/api/v1"),
    "groq": Provider("https://api.groq.com", path="/openai/v1"),
    "mistral": Provider("https://api.mistral.ai"),
    "deepseek": Provider("https://api.deepseek.com"),
    "together": Provider("https://api.together.xyz"),
    "cerebras": Provider("https://api.cerebras.ai", accounting=_UPFRONT),
    "xai": Provider("https://api.x.ai"),
    "digitalocean": Provider("https://inference.do-ai.run"),
    "scaleway": Provider("https://api.scaleway.ai"),
    "bedrock": Provider(None, path="/openai/v1", accounting=_UPFRONT),
    "vllm": Provider(None, priority_sign=-1, metrics=_VLLM),
    "sglang": Provider(None, priority_sign=1, metrics=_SGLANG),
    "compatible": Provider(None, accounting=_UPFRONT),
    "fake": Provider(None, _BOTH, accounting=_UPFRONT, priority_sign=-1, metrics=_VLLM),
}
