"""What is known of each vendor's API before anything is configured."""

from __future__ import annotations

from dataclasses import dataclass

from extproc.core import policy as core
from extproc.core.request import Dialect

__all__ = ["PROVIDERS", "Provider"]


@dataclass(frozen=True, slots=True)
class Provider:
    """What is known of a vendor's API: where it is, how it wants its key, and when it charges its token limit."""

    url: str | None
    dialects: tuple[Dialect, ...] = (Dialect.OPENAI,)
    path: str = "/v1"
    key_header: str = "authorization"
    key_prefix: str = "Bearer "
    accounting: core.Accounting = core.Accounting.ACTUAL


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
    "vllm": Provider(None),
    "sglang": Provider(None),
    "compatible": Provider(None, accounting=_UPFRONT),
    "fake": Provider(None, _BOTH, accounting=_UPFRONT),
}
