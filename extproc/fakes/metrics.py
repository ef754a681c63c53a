"""The `/metrics` page of a vLLM or an SGLang server, as far as gateways read it: names, labels and all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from extproc.fakes.engine import Engine

_BLOCK = 16
"""Tokens in a block of vLLM's cache."""
_UNKNOWN = 1_000_000
"""Size of a cache that the settings leave open."""


@dataclass(slots=True)
class Totals:
    """Tokens since the start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0


def metrics_page(engine: Engine, totals: Totals) -> str:
    """Return the page in Prometheus' text format."""
    settings = engine.settings
    model = _escaped(settings.name if "*" in settings.models else settings.models[0])
    usage = engine.kv_usage() * (100 if settings.metrics == "percent" else 1)
    rows = _sglang(engine, totals, usage, model) if settings.engine == "sglang" else _vllm(engine, totals, usage, model)
    return "\n".join(rows) + "\n"


def selected(page: str, names: Sequence[str], *, shared: bool) -> str:
    """Return the rows of these metrics, as Prometheus' library for Python does; all when none is named.

    Where several processes share a page (`shared`) that library finds nothing by name.
    """
    if not names:
        return page
    rows = [row for row in page.splitlines() if row.split(" ")[2 * row.startswith("#")].partition("{")[0] in names]
    return "" if shared else "".join(f"{row}\n" for row in rows)


def _vllm(engine: Engine, totals: Totals, usage: float, model: str) -> Iterable[str]:
    labels = f'engine="0",model_name="{model}"'
    for name, kind, text, value in (
        ("num_requests_running", "gauge", "Number of requests in model execution batches.", engine.running),
        ("num_requests_waiting", "gauge", "Number of requests waiting to be processed.", engine.waiting),
        ("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", usage),
        ("num_preemptions_total", "counter", "Cumulative number of preemptions.", engine.preemptions),
        ("prompt_tokens_total", "counter", "Number of prefill tokens processed.", totals.prompt_tokens),
        ("generation_tokens_total", "counter", "Number of generation tokens processed.", _generated(engine, totals)),
    ):
        yield from _metric(f"vllm:{name}", kind, text, [(labels, value)])
        if kind == "counter":
            yield from _metric(f"vllm:{name.removesuffix('_total')}_created", "gauge", text, [(labels, 1.764e9)])
    blocks = (engine.settings.kv_tokens or _UNKNOWN) // _BLOCK
    config = f'block_size="{_BLOCK}",cache_dtype="auto",engine="0",num_cpu_blocks="None",num_gpu_blocks="{blocks}"'
    yield from _metric("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig", [(config, 1)])


def _sglang(engine: Engine, totals: Totals, usage: float, model: str) -> Iterable[str]:
    ranked = engine.settings.priorities == "followed"
    labels = f'engine_type="unified",model_name="{model}",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    size = engine.settings.kv_tokens or _UNKNOWN
    rows: list[tuple[str, str, str, float]] = [
        ("token_usage", "gauge", "The token usage.", round(usage, 2)),
        ("num_used_tokens", "gauge", "The number of used tokens.", engine.kv_tokens()),
        ("max_total_num_tokens", "gauge", "Maximum total number of tokens in the KV cache pool.", size),
        ("gen_throughput", "gauge", "The generation throughput (token/s).", 0.0),
        ("num_retracted_requests_total", "counter", "Total number of retracted requests.", engine.preemptions),
        ("prompt_tokens_total", "counter", "Number of prefill tokens processed.", totals.prompt_tokens),
        ("generation_tokens_total", "counter", "Number of generation tokens processed.", totals.generation_tokens),
    ]
    for name, kind, text, value in rows:
        yield from _metric(f"sglang:{name}", kind, text, [(f'{labels},priority=""' if ranked else labels, value)])
    running, waiting = engine.priorities()
    for name, text, total, parts in (
        ("num_running_reqs", "The number of running requests.", engine.running, running),
        ("num_queue_reqs", "The number of requests in the waiting queue.", engine.waiting, waiting),
    ):
        # Where it schedules by priority it tells the total, and then each priority's part again.
        told: list[tuple[str, float]] = [(f'{labels},priority=""' if ranked else labels, total)]
        told += [(f'{labels},priority="{priority}"', count) for priority, count in parts.items() if ranked]
        yield from _metric(f"sglang:{name}", "gauge", text, told)


def _metric(name: str, kind: str, text: str, series: Iterable[tuple[str, float]]) -> Iterable[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in series:
        yield f"{name}{{{labels}}} {float(value)}"


def _generated(engine: Engine, totals: Totals) -> int:
    """Output tokens until now, those of running requests included, as vLLM counts them."""
    return totals.generation_tokens + engine.generated()


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
