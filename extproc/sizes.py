"""How many prompt tokens a request has at each upstream: everyone is held against the tokenizer of its own model.

A prompt is counted once, as the model's public name says. What that is at an upstream:

* the count times the ratio that the upstream's own model has taught (tokens.Calibration), once it has;
* before that, what its own name says (tokens.encodings): nothing new where that is counted as the public name is, or as
  the first upstream's, whose ratio then holds for both; mere arithmetic where only factor and overheads differ;
* with another vocabulary the same arithmetic, as if the vocabularies were one. It is off by some per cent on prose, but
  may be off by `tokens.spread`. Where that decides whether the upstream can hold the request at all, the text is
  counted anew with that vocabulary, and only there: it costs what the first count did.

A learned ratio is trusted for every prompt, whatever its script: whom it misleads tells so by an error, and the next
upstream is asked (flights).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil

from extproc import tokens
from extproc.core import routing
from extproc.core.policy import Policy
from extproc.core.request import Call, Endpoint, Prompt, Size
from extproc.core.value import value

__all__ = ["Counted", "Sizes"]

NAMES = 4096
"""Pairs of upstream and model of which it is remembered how they count; clients may invent names."""


@value
class Counted:
    """Tokens of a prompt: as its public name says, and at upstreams for which it had to be counted anew."""

    tokens: int
    anew: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Gauge:
    """How an upstream counts a model. key: what its ratio is learned by. alike: as the public name does."""

    name: str
    key: tuple[str, str]
    encoding: tokens.Encoding
    alike: bool


class Sizes:
    """See the head of this file. `executor` counts long prompts."""

    def __init__(self, policy: Policy, calibration: tokens.Calibration, executor: Executor) -> None:
        """Keep them."""
        self._upstreams = policy.upstreams
        self._calibration = calibration
        self._executor = executor
        self._gauge = lru_cache(NAMES)(self._gauge_of)
        self._strangers = lru_cache(NAMES)(self._strangers_of)

    async def count(self, call: Call, chain: tuple[str, ...], usual: int) -> Counted:
        """Count the prompt of `call`, which may go to any of `chain`. usual: output it gets where it names no cap."""
        if call.endpoint in (Endpoint.OTHER, Endpoint.COUNT_TOKENS):
            return Counted(0)
        counted = await self._estimate(call.prompt, call.model)
        strangers = self._strangers(chain, call.model)
        unsure = [gauge for gauge in strangers if self._is_unsure(gauge, call, counted, usual)] if strangers else ()
        if not unsure:
            return Counted(counted)
        by_own = {own: await self._estimate(call.prompt, own) for own in {gauge.key[0] for gauge in unsure}}
        return Counted(counted, {gauge.name: by_own[gauge.key[0]] for gauge in unsure})

    def inputs(self, call: Call, names: tuple[str, ...], counted: Counted) -> dict[str, int]:
        """Prompt tokens at each of `names`, of a prompt that was `counted`."""
        if not counted.tokens:
            return dict.fromkeys(names, 0)
        found: dict[str, int] = {}
        first = self._gauge(names[0], call.model)
        for name in names:
            gauge = self._gauge(name, call.model)
            ratio = self._calibration.learned(gauge.key)
            if ratio is not None:
                found[name] = ceil(counted.tokens * ratio)
            elif name in counted.anew:
                found[name] = counted.anew[name]
            elif found and gauge.encoding is first.encoding:
                found[name] = found[first.name]
            else:
                found[name] = counted.tokens if gauge.alike else _converted(counted.tokens, call, gauge)
        return found

    def _is_unsure(self, gauge: _Gauge, call: Call, counted: int, usual: int) -> bool:
        """Whether the upstream could hold it, or not, depending on what its vocabulary makes of the text."""
        if self._calibration.learned(gauge.key) is not None:
            return False
        guess, spread, upstream = (
            _converted(counted, call, gauge),
            tokens.spread(call.prompt),
            self._upstreams[gauge.name],
        )
        least, most = (call.output_cap,) * 2 if call.output_cap is not None else (1, usual)
        if not call.endpoint.generates:
            least = most = 0
        low, high = Size(int(guess / spread), least), Size(ceil(guess * spread), most)
        return not routing.holds(upstream, call.model, high) and routing.holds(upstream, call.model, low)

    async def _estimate(self, prompt: Prompt, model: str) -> int:
        if tokens.is_long(prompt):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, tokens.estimate, prompt, model)
        return tokens.estimate(prompt, model)

    def _gauge_of(self, name: str, model: str) -> _Gauge:
        own = self._upstreams[name].own_name(model)
        encoding = tokens.encoding_of(own, model)
        return _Gauge(name, (own, model), encoding, alike=encoding == tokens.encoding_for(model))

    def _strangers_of(self, chain: tuple[str, ...], model: str) -> tuple[_Gauge, ...]:
        """Those of `chain` with another vocabulary than the public name's."""
        vocabulary = tokens.encoding_for(model).vocabulary
        gauges = (self._gauge(name, model) for name in chain)
        return tuple(gauge for gauge in gauges if gauge.encoding.vocabulary != vocabulary)


def _converted(counted: int, call: Call, gauge: _Gauge) -> int:
    return tokens.recounted(counted, call.prompt, tokens.encoding_for(call.model), gauge.encoding)
