"""How many prompt tokens a request has at each upstream: everyone is held against the tokenizer of its own model.

A prompt is counted once: with the vocabulary of the first upstream of its chain where that is known, else as the
model's public name says. What that is at an upstream:

* the count times the ratio that the upstream's own model has taught (tokens.Calibration), once it has;
* before that, what its own name says (tokens.encodings): nothing new where that is counted as the first count was, or
  as the first upstream's, whose ratio then holds for both; mere arithmetic where only factor and overheads differ;
* with another vocabulary the same arithmetic, as if the vocabularies were one. It is off by some per cent on prose, but
  may be off by `tokens.spread`. Where that decides whether the upstream can hold the request at all, the text is
  counted anew with that vocabulary, and only there: it costs what the first count did.

A ratio holds for everybody, but what taught it are some callers' prompts. So it never stands between vocabularies that
are both known: there it would be one of scripts, not of models; such an upstream is never corrected, only counted anew
near its edge. And where it alone would keep a prompt out (of an upstream, or of what its tenant may use in a minute),
what the known vocabulary counts holds instead. Should that mislead, the upstream tells so by an error, and the next is
asked (flights). Only a vocabulary that nobody published is believed to be as the ratio says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, inf

from extproc import tokens
from extproc.core import routing
from extproc.core.policy import Policy, Upstream
from extproc.core.request import Call, Endpoint, Prompt, Size
from extproc.core.value import value

__all__ = ["Counted", "Sizes", "may_teach"]

NOWHERE: Mapping[str, int] = {}
NAMES = 4096
"""Pairs of upstream and model of which it is remembered how they count; clients may invent names."""


@value
class Counted:
    """Tokens of a prompt, and at upstreams where no more than its own count holds. by: as which model it was counted,
    empty for its public name.
    """

    tokens: int
    anew: Mapping[str, int] = field(default_factory=dict)
    by: str = ""


@dataclass(frozen=True, slots=True)
class _Gauge:
    """How an upstream counts a model. key: what its ratio is learned by."""

    name: str
    key: tuple[str, str]
    encoding: tokens.Encoding


@dataclass(frozen=True, slots=True)
class _Scale:
    """How prompts of a chain are counted: as which model, and who knows better. strangers: have another vocabulary;
    kin: have the same, and it is known to be theirs. room: tokens that any of these holds for sure. named: as in
    `Counted`.
    """

    by: str
    named: str
    encoding: tokens.Encoding
    strangers: tuple[_Gauge, ...]
    kin: tuple[_Gauge, ...]
    room: float


class Sizes:
    """See the head of this file. `executor` counts long prompts."""

    def __init__(self, policy: Policy, calibration: tokens.Calibration, executor: Executor) -> None:
        """Keep them."""
        self._upstreams = policy.upstreams
        self._calibration = calibration
        self._executor = executor
        self._gauge = lru_cache(NAMES)(self._gauge_of)
        self._scale = lru_cache(NAMES)(self._scale_of)

    async def count(self, call: Call, chain: tuple[str, ...], usual: int, tpm: int | None = None) -> Counted:
        """Count the prompt of `call`, which may go to any of `chain`. usual: output it gets where it names no cap.

        tpm: the most that its tenant may use at once, in tokens.
        """
        if call.endpoint in (Endpoint.OTHER, Endpoint.COUNT_TOKENS):
            return Counted(0)
        scale = self._scale(chain, call.model)
        counted = await self._estimate(call.prompt, scale.by)
        most = counted * tokens.MOST + (call.output_cap or usual)
        far = most <= scale.room and (tpm is None or most <= tpm)
        if far and not scale.strangers:
            return Counted(counted, NOWHERE, scale.named)
        edge = _Edge(call, usual, inf if tpm is None else tpm)
        anew = {} if far else self._spared(edge, counted, scale)
        unsure = [gauge for gauge in scale.strangers if self._is_unsure(gauge, edge, counted, scale)]
        if unsure:
            by_own = {own: await self._estimate(call.prompt, own) for own in {gauge.key[0] for gauge in unsure}}
            anew |= {gauge.name: by_own[gauge.key[0]] for gauge in unsure}
        return Counted(counted, anew, scale.named)

    def inputs(self, call: Call, names: tuple[str, ...], counted: Counted) -> dict[str, int]:
        """Prompt tokens at each of `names`, of a prompt that was `counted`."""
        if not counted.tokens:
            return dict.fromkeys(names, 0)
        found: dict[str, int] = {}
        first, by = self._gauge(names[0], call.model), tokens.encoding_for(counted.by or call.model)
        for name in names:
            gauge = self._gauge(name, call.model)
            ratio = self._calibration.learned(gauge.key)
            if name in counted.anew:
                found[name] = counted.anew[name]
            elif ratio is not None and not gauge.encoding.strange_to(by):
                found[name] = ceil(counted.tokens * ratio)
            elif found and gauge.encoding is first.encoding:
                found[name] = found[first.name]
            else:
                found[name] = _converted(counted.tokens, call, by, gauge)
        return found

    def _spared(self, edge: _Edge, counted: int, scale: _Scale) -> dict[str, int]:
        """Tokens at those whose known vocabulary would let the prompt in, and a ratio would not: that of any, where
        nothing was learned of their own.
        """
        ratios = [self._calibration.learned(gauge.key) for gauge in scale.kin]
        most = max((ratio for ratio in ratios if ratio is not None), default=1.0)
        if most <= 1.0:
            return {}
        found = {}
        for gauge, ratio in zip(scale.kin, ratios, strict=True):
            plain = _converted(counted, edge.call, scale.encoding, gauge)
            if self._lies_between(gauge, edge, plain, ceil(counted * (ratio or most))):
                found[gauge.name] = plain
        return found

    def _is_unsure(self, gauge: _Gauge, edge: _Edge, counted: int, scale: _Scale) -> bool:
        """Whether the upstream could hold it, or not, depending on what its vocabulary makes of the text."""
        if not gauge.encoding.known and self._calibration.learned(gauge.key) is not None:
            return False
        guess, spread = _converted(counted, edge.call, scale.encoding, gauge), tokens.spread(edge.call.prompt)
        return self._lies_between(gauge, edge, int(guess / spread), ceil(guess * spread))

    def _lies_between(self, gauge: _Gauge, edge: _Edge, low: int, high: int) -> bool:
        """Whether the most that the upstream could hold, or the tenant may use, lies between prompts of this many."""
        call, upstream = edge.call, self._upstreams[gauge.name]
        least, most = (call.output_cap,) * 2 if call.output_cap is not None else (1, edge.usual)
        if not call.endpoint.generates:
            least = most = 0
        if high + most <= edge.tpm and routing.holds(upstream, call.model, Size(high, most)):
            return False
        return low + least <= edge.tpm and routing.holds(upstream, call.model, Size(low, least))

    async def _estimate(self, prompt: Prompt, model: str) -> int:
        if tokens.is_long(prompt):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, tokens.estimate, prompt, model)
        return tokens.estimate(prompt, model)

    def _gauge_of(self, name: str, model: str) -> _Gauge:
        own = self._upstreams[name].own_name(model)
        return _Gauge(name, (own, model), tokens.encoding_of(own, model))

    def _scale_of(self, chain: tuple[str, ...], model: str) -> _Scale:
        by = tokens.measured_as(self._upstreams[chain[0]].own_name(model), model)
        encoding = tokens.encoding_for(by)
        gauges = [self._gauge(name, model) for name in chain]
        strangers = tuple(gauge for gauge in gauges if gauge.encoding.vocabulary != encoding.vocabulary)
        kin = tuple(gauge for gauge in gauges if gauge.encoding.known and gauge not in strangers)
        room = min((routing.surely_held(self._upstreams[gauge.name], model) for gauge in kin), default=inf)
        return _Scale(by, "" if by == model else by, encoding, strangers, kin, room)


def may_teach(first: Upstream, own: str, public: str) -> bool:
    """Whether what a model called `own` reports teaches a ratio to what was counted for a chain that begins at `first`.

    public: what callers call it.
    """
    by = tokens.measured_as(first.own_name(public), public)
    return not tokens.encoding_of(own, public).strange_to(tokens.encoding_for(by))


@value
class _Edge:
    """What else decides whether a prompt fits: `Sizes.count`."""

    call: Call
    usual: int
    tpm: float


def _converted(counted: int, call: Call, by: tokens.Encoding, gauge: _Gauge) -> int:
    return counted if gauge.encoding is by else tokens.recounted(counted, call.prompt, by, gauge.encoding)
