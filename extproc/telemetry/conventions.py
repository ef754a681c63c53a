"""What OpenTelemetry's conventions want said of an upstream, and which names of models are told at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from extproc.core.request import Endpoint
from extproc.settings import Settings

__all__ = ["OPERATIONS", "OTHER", "Conventions"]

OTHER = "other"
"""Instead of a name that nobody listed."""
PROVIDERS = {
    "azure": "azure.ai.openai",
    "gemini": "gcp.gemini",
    "bedrock": "aws.bedrock",
    "mistral": "mistral_ai",
    "xai": "x_ai",
}
"""Providers that the conventions call otherwise than the settings."""
OPERATIONS = {
    Endpoint.CHAT: "chat",
    Endpoint.RESPONSES: "chat",
    Endpoint.MESSAGES: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
    Endpoint.COUNT_TOKENS: "count_tokens",
}
"""What an endpoint is asked for, in the words of the conventions where they have one."""
PATTERN = frozenset("*?[")
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Conventions:
    """Per upstream its provider, address and port; and the names of models that are listed."""

    upstreams: Mapping[str, Mapping[str, str | int]]
    models: frozenset[str]

    @classmethod
    def of(cls, settings: Settings) -> Conventions:
        """As the settings say."""
        return cls(
            {name: _place(upstream) for name, upstream in settings.upstreams.items()}, frozenset(_listed(settings))
        )

    def model(self, name: str) -> str:
        """The name of a model if it is listed: callers may ask for any that fits a pattern."""
        return name if name in self.models else OTHER

    def attributes(self, upstream: str, model: str, endpoint: Endpoint) -> dict[str, Any]:
        """Of a request that was served there."""
        return {
            "gen_ai.operation.name": OPERATIONS.get(endpoint, OTHER),
            "gen_ai.request.model": model,
            **self.upstreams.get(upstream, {}),
            "upstream": upstream,
        }


def _place(upstream: Any) -> dict[str, str | int]:
    url = urlsplit(upstream.where)
    return {
        "gen_ai.provider.name": PROVIDERS.get(upstream.provider, upstream.provider),
        "server.address": url.hostname or "",
        "server.port": url.port or PORTS[url.scheme],
    }


def _listed(settings: Settings) -> set[str]:
    named = {model for route in settings.routes for model in route.models}
    for upstream in settings.upstreams.values():
        named |= {*upstream.models, *upstream.models.values()}
    return {name for name in named if not PATTERN & set(name)}
