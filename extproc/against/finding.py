"""One disagreement, as whoever runs the gateway reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from extproc.against.comparing import Difference, short

__all__ = ["Finding", "consequence", "findings_of"]

_CONSEQUENCES = {
    "observability_mode": "Tidegate would only watch",
    "failure_mode_allow": "without it a restart of Tidegate cuts running answers",
    "message_timeout": "Envoy would not wait for an answer of Tidegate's",
    "max_message_timeout": "requests held for longer are not waited for",
    "request_body_mode": "Tidegate would not read requests",
    "response_body_mode": "answers would go through Tidegate",
    "response_trailer_mode": "Tidegate would not learn when an answer ends",
    "mutation_rules": "Tidegate could not say how many upstreams are tried",
    "metadata_options": "what Tidegate decided would not reach the routes",
    "max_receive_message_length": "larger messages end the stream",
    "circuit_breakers": "Envoy would turn admitted requests away",
    "health_checks": "nobody would notice that Tidegate hangs",
    "healthy_panic_threshold": "a Tidegate that hangs would be asked all the same",
    "connection_keepalive": "nobody would notice a lost connection to Tidegate",
    "sni": "the provider may not know which name is meant",
    "trusted_ca": "another CA would be trusted",
    "idle_timeout": "silence is not ended as the settings say",
    "stream_idle_timeout": "what is held for longer ends with 504",
    "timeout": "long answers would be cut, or waited for in vain",
    "retry_policy": "the next upstream is not tried as the settings say",
    "per_connection_buffer_limit_bytes": "bodies are taken up to another size",
    "request_body_buffer_limit": "bodies are taken up to another size",
    "max_request_bytes": "bodies are taken up to another size",
    "typed_per_filter_config": "a route does not switch on what it needs",
    "disabled": "other routes would have it in their way",
    "source_code": "written by another version of Tidegate, or for other settings",
    "default_source_code": "written by another version of Tidegate, or for other settings",
    "priority_groups": "rendered for other upstreams",
    "early_header_mutation_extensions": "callers could send what only Envoy may say",
}
"""Field, and what it means that it differs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """where: a place in Envoy. what: a thing or field there. expected, found: short. do: what mends it."""

    where: str
    what: str
    expected: str
    found: str
    do: str

    def __str__(self) -> str:
        """All of it in one line."""
        text = f"{self.where}: {self.what}: expected {self.expected}, found {self.found}; {self.do}"
        return " ".join(text.split())


def findings_of(where: str, differing: Iterable[Difference], do: str, what: str = "") -> Iterator[Finding]:
    """A finding for each difference; `what` is what their fields are fields of."""
    for one in differing:
        told = " ".join(filter(None, (what, one.field))) or "all of it"
        yield Finding(where, told, short(one.expected), short(one.found), _advice(one.path, do))


def consequence(field: str, do: str) -> str:
    """What it means that `field` differs, and what to do."""
    return f"{means}: {do}" if (means := _CONSEQUENCES.get(field)) else do


def _advice(path: tuple[Any, ...], do: str) -> str:
    for step in reversed(path):
        if step in _CONSEQUENCES:
            return consequence(step, do)
    return do
