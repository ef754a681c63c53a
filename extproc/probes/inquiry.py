"""Whether engines are set up for what the settings count on; asked by `tidegate check`, never by the service.

An engine that ignores priorities, or shows no metrics, answers every request all the same. So it is asked how it runs:

* metrics: its page, or the Prometheus, has to be there and to say what is looked for;
* priority in SGLang: `/server_info` tells;
* priority in vLLM: `/server_info` tells where vLLM runs in its development mode. Else one request of one token with a
  priority: older ones refuse it where they do not schedule by it. Those of today ignore it, so that nothing is proven.

Who cannot be reached from here is no mistake, only unknown. No credentials are sent, and nothing else is kept or told
of what SGLang's `/server_info` says: its keys are in it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from extproc.core.routing import PRIORITY_STEP
from extproc.probes.exposition import Page, Unreadable
from extproc.probes.sources import OK, Instances, Prometheus, Unreachable
from extproc.settings import EngineMetrics, KvSettings, UpstreamSettings

__all__ = ["Finding", "inquire"]

MOST = 32
"""Instances that are asked of one upstream."""
REFUSED = 400
NOT_ENABLED = b"riority scheduling is not enabled"
FAR_OFF = 0.1
"""A configured cache may differ by this share from what the engine tells."""

HINTS = {
    "vllm": "vLLM shows them at /metrics, unless it runs with --disable-log-stats",
    "sglang": "SGLang shows them at /metrics when it runs with --enable-metrics",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for an operator. wrong: the engine was reached, and does not do what the settings count on."""

    where: str
    what: str
    wrong: bool = False


async def inquire(upstreams: Mapping[str, UpstreamSettings], models: Mapping[str, str]) -> list[Finding]:
    """Ask all engines at once, each instance of each. `models`: for each upstream the name of one that it serves."""
    asked = {name: upstream for name, upstream in upstreams.items() if upstream.kv or upstream.engine_priority}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        pools = (_pool(session, name, upstream, models.get(name, "")) for name, upstream in asked.items())
        return [finding for found in await asyncio.gather(*pools) for finding in found]


async def _pool(session: aiohttp.ClientSession, name: str, upstream: UpstreamSettings, model: str) -> list[Finding]:
    kv, place = upstream.kv or KvSettings(), f"upstreams.{name}"
    names = upstream.engine_metrics or EngineMetrics(())
    instances = Instances(session, upstream, kv, names, asyncio.get_running_loop())
    found: list[Finding] = []
    if kv.prometheus:
        found += await _prometheus(Prometheus(session, kv), f"{place}.kv")
    if (upstream.kv and not kv.prometheus) or upstream.engine_priority:
        addresses = list(await instances.addresses())[:MOST]
        if not addresses:
            found.append(Finding(place, f"{upstream.host} has no address here, so the engine could not be asked"))
        engines = [_Engine(instances, address, upstream, names, place) for address in addresses]
        found += _merged(addresses, await asyncio.gather(*(engine.findings(model) for engine in engines)))
    return found


async def _prometheus(prometheus: Prometheus, place: str) -> list[Finding]:
    try:
        for address in await prometheus.addresses():
            await prometheus.ask(address)
    except Unreachable as error:
        return [Finding(f"{place}.prometheus", f"{error}, so the query could not be tried")]
    except Unreadable as error:
        return [Finding(f"{place}.query", str(error), wrong=True)]
    return []


def _merged(addresses: Sequence[str], found: Sequence[Sequence[Finding]]) -> list[Finding]:
    """What all instances say is said once; else it is said of whom it is true."""
    by_finding: dict[Finding, list[str]] = {}
    for address, findings in zip(addresses, found, strict=True):
        for finding in findings:
            by_finding.setdefault(finding, []).append(address)
    return [
        finding
        if len(said_by) == len(addresses)
        else Finding(finding.where, f"{finding.what} ({', '.join(said_by)})", wrong=finding.wrong)
        for finding, said_by in by_finding.items()
    ]


@dataclass(frozen=True, slots=True)
class _Engine:
    """One instance that is asked. `place` is where the upstream stands in the settings."""

    instances: Instances
    address: str
    upstream: UpstreamSettings
    names: EngineMetrics
    place: str

    async def findings(self, model: str) -> list[Finding]:
        """All there is to say of it."""
        found: list[Finding] = []
        try:
            if self.upstream.kv and not self.upstream.kv.prometheus:
                found += await self._metrics(self.upstream.kv)
            if self.upstream.engine_priority:
                found += await (self._sglang() if self._kind == "sglang" else self._vllm(model))
        except Unreachable as error:
            found.append(Finding(self.place, f"{error}, so the engine could not be asked how it runs"))
        return found

    @property
    def _kind(self) -> str:
        return self.upstream.fake.engine if self.upstream.fake else self.upstream.provider

    async def _metrics(self, kv: KvSettings) -> list[Finding]:
        status, body = await self.instances.fetch(self.address, kv.path)
        hint = "" if kv.metrics else f"; {HINTS.get(self._kind, HINTS['vllm'])}"
        if status != OK:
            return [Finding(f"{self.place}.kv.path", f"{kv.path} gives status {status}{hint}", wrong=True)]
        page = Page(self.names)
        try:
            size = page.read(body).tokens
        except Unreadable as error:
            absent = self.names.usage[0] in page.missing(body)
            return [Finding(f"{self.place}.kv", f"{error}{hint if absent else ''}", wrong=True)]
        found = []
        if missing := [name for name in page.missing(body) if name not in (self.names.config, self.names.tokens)]:
            found.append(Finding(f"{self.place}.kv", f"not on the page, so taken for 0: {', '.join(missing)}"))
        return found + self._size(kv, size)

    def _size(self, kv: KvSettings, told: float | None) -> list[Finding]:
        place = f"{self.place}.kv.tokens"
        if kv.tokens is None and told is None:
            return [Finding(place, "not set, and the engine does not tell; a few requests will go per reading")]
        if kv.tokens and told and abs(kv.tokens - told) > FAR_OFF * told:
            return [Finding(place, f"{kv.tokens}, but the engine tells {told:.0f}")]
        return []

    async def _sglang(self) -> list[Finding]:
        info = await self._info("/server_info") or await self._info("/get_server_info")
        place = f"{self.place}.engine_priority"
        if "enable_priority_scheduling" not in info:
            return [Finding(place, "SGLang does not tell whether it runs with --enable-priority-scheduling")]
        if info["enable_priority_scheduling"] is not True:
            return [Finding(place, "SGLang ignores priorities: start it with --enable-priority-scheduling", wrong=True)]
        if info.get("schedule_low_priority_values_first"):
            what = "SGLang serves low values first: start it without --schedule-low-priority-values-first"
            return [Finding(place, what, wrong=True)]
        threshold = info.get("priority_scheduling_preemption_threshold")
        if isinstance(threshold, int) and threshold >= PRIORITY_STEP:
            what = f"SGLang preempts only beyond {threshold}, lanes are {PRIORITY_STEP} apart"
            return [Finding(place, f"{what}: lower --priority-scheduling-preemption-threshold")]
        return []

    async def _vllm(self, model: str) -> list[Finding]:
        place = f"{self.place}.engine_priority"
        ignores = Finding(place, "vLLM ignores priorities: start it with --scheduling-policy priority", wrong=True)
        match await self._info("/server_info?config_format=json"):
            case {"vllm_config": {"scheduler_config": {"policy": str(policy)}}}:
                return [] if policy == "priority" else [ignores]
        if await self._refuses(model):
            return [ignores]
        what = (
            "make sure that vLLM runs with --scheduling-policy priority; it does not tell, and ignores them otherwise"
        )
        return [Finding(place, what)]

    async def _refuses(self, model: str) -> bool:
        """Whether it says to a request with a priority that it schedules by none."""
        body = {
            "model": model,
            "max_tokens": 1,
            "priority": PRIORITY_STEP,
            "messages": [{"role": "user", "content": "reply OK"}],
        }
        path = f"{self.upstream.path}/chat/completions"
        try:
            status, answer = await self.instances.fetch(self.address, path, method="POST", json=body)
        except Unreachable:  # one that is busy says nothing either
            return False
        return status == REFUSED and NOT_ENABLED in answer

    async def _info(self, path: str) -> dict[str, Any]:
        """What a page of JSON says, nothing when it is not there."""
        status, body = await self.instances.fetch(self.address, path)
        try:
            told = json.loads(body) if status == OK else {}
        except (ValueError, RecursionError):
            return {}
        return told if isinstance(told, dict) else {}
