"""The `/metrics` page of a vLLM server, as far as gateways read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.fakes.engine import Engine


@dataclass(slots=True)
class Totals:
    """Tokens since the start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0


def metrics_page(engine: Engine, totals: Totals) -> str:
    """Return the page in Prometheus' text format."""
    settings = engine.settings
    model = settings.name if "*" in settings.models else settings.models[0]
    labels = f'{{engine="0",model_name="{_escaped(model)}"}}'
    rows = [
        ("num_requests_running", "gauge", "Number of requests in model execution batches.", engine.running),
        ("num_requests_waiting", "gauge", "Number of requests waiting to be processed.", engine.waiting),
        ("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", engine.kv_usage()),
        ("num_preemptions_total", "counter", "Cumulative number of preemptions.", engine.preemptions),
        ("prompt_tokens_total", "counter", "Number of prefill tokens processed.", totals.prompt_tokens),
        ("generation_tokens_total", "counter", "Number of generation tokens processed.", totals.generation_tokens),
    ]
    lines = []
    for name, kind, text, value in rows:
        lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} {kind}", f"vllm:{name}{labels} {float(value)}"]
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
