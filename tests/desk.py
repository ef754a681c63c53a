"""A handler with everything that decides behind it, in virtual time; and clients with an Envoy and upstreams."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from extproc.admission import Admission
from extproc.core.identity import Directory
from extproc.core.refusal import RULES
from extproc.dispatch import Dispatch, Outlook, Timing
from extproc.examination import Examination
from extproc.handler import Handler
from extproc.ports import Departure, Head, Record, RecordKind
from extproc.reception import Reception, SessionRules
from extproc.settings import parse
from extproc.wording import Wording
from tests.doubles import FakeExchange, Observer, Suspending, VirtualLoop

__all__ = ["CONFIG", "LEFT", "TIMEOUT", "WHOLE", "Desk", "Wire", "chat"]

CONFIG = """
upstreams:
  a: {provider: openai, limits: [{tpm: 6_000_000, rpm: 60_000}], concurrency: 1}
  b: {provider: openai, limits: [{tpm: 6_000_000, rpm: 60_000}], concurrency: 2}
  c: {provider: openai, limits: [{tpm: 6_000_000, rpm: 60_000}], concurrency: 2, models: {c: own}}
routes:
  - {models: [a], chain: [a], acknowledge_unowned: true}
  - {models: [b], chain: [b, a], acknowledge_unowned: true}
  - {models: [c], chain: [a, c], acknowledge_unowned: true}
tenants:
  default: {lanes: [P1], tpm: 5_000_000, rpm: 50_000, concurrency: 40, usd_per_day: 1000}
lanes:
  P1: {max_wait_s: 20, spill_after_s: 1}
identity: {tenant: "header:x-team"}
retries: {share: 0.2, least_per_s: 0.5}
"""
WHOLE: dict[str, Any] = {"finish": "stop", "done": "1", "in": 12, "out": 30}
LEFT = frozenset({"downstream_connection_termination"})
TIMEOUT = frozenset({"upstream_request_timeout"})


class Wire(FakeExchange):
    """A client's connection, with Envoy and an upstream behind it. runs: the upstream works on it.

    slow: how long each write takes. lands_s: how long Envoy takes to end what it is told to end. tail: what its record
    will say of a whole answer. silent: there is none, and Envoy's patience runs out. served_by: who answers; the first
    of the order where that is empty.
    """

    def __init__(self, desk: Desk, body: dict[str, Any], *, lasts_s: float = 1.0, slow: float = 0.0, **headers: str):
        named = {":method": "POST", ":path": "/v1/chat/completions", "x-request-id": f"r{len(desk.wires)}"}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        self.request_id = named["x-request-id"]
        super().__init__(Head(named, bodiless=False), json.dumps(body).encode(), stays_s=lasts_s, hold_s=slow)
        self.desk = desk
        self.slow = slow
        self.lands_s = 0.002
        self.tail = WHOLE
        self.served_by = ""
        self.runs = self.silent = False
        self.name = headers.get("idempotency_key") or json.dumps(body)
        self.task: asyncio.Task[None]

    async def forward(self, departure: Departure) -> None:
        await asyncio.sleep(self.slow)
        await super().forward(departure)
        self.runs = True
        self.desk.most[self.name] = max(self.desk.most[self.name], self.desk.running(self.name))

    async def ended(self) -> None:
        try:
            await super().ended()
        finally:
            self.runs = False
            self.desk.report(self)

    async def answer(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> None:
        await asyncio.sleep(self.slow)
        await super().answer(status, headers, body, details)

    async def abort(self, status: int, headers: Sequence[tuple[str, str]], body: bytes, details: str) -> None:
        await asyncio.sleep(self.lands_s)
        await super().abort(status, headers, body, details)


class Desk:
    """A handler and all that it needs, in virtual time. most: how many copies of a request ever ran at once."""

    def __init__(self, loop: VirtualLoop, config: str = CONFIG) -> None:
        settings = parse(config, "test")
        policy = settings.policy()
        self.loop = loop
        self.observer = Observer()
        self.admission = admission = Admission(policy, loop, self.observer, grace_s=5.0, chance=lambda: 0.5)
        for counter in admission.capacity.levels().values():
            if hasattr(counter, "level"):
                counter.level = counter.capacity
        wording = Wording(lambda reason: RULES[reason].status, lambda: 0.0)
        self.executor = ThreadPoolExecutor(1)
        reception = Reception(
            policy,
            Directory(policy.tenants, ("header:x-team",), reject_unknown=False),
            admission.calibration,
            admission.affinity,
            admission.pace,
            admission.outputs,
            admission.allowances.sessions.fresh,
            loop,
            process="p",
            sessions=SessionRules(settings.identity.session_headers, 600.0),
            executor=self.executor,
            chance=lambda: 0.5,
            rates=admission.rates,
        )
        breakers, timing = admission.breakers, Timing(10, 1e4, 60, 600)
        outlook = Outlook(
            breakers.rest_s, breakers.earliest_probe, admission.limiter.prospects.predicted_s, breakers.standing
        )
        desk = policy, admission.capacity, loop, timing, wording, breakers.allows, breakers.fits
        dispatch = Dispatch(*desk, outlook=outlook, slow=breakers.slow)
        self.handler = Handler(
            reception,
            admission.copies,
            admission.flights,
            admission.limiter,
            dispatch,
            wording,
            loop,
            admission.observe,
            Examination(settings.longest_wait_s),
        )
        self.wires: list[Wire] = []
        self.most: Counter[str] = Counter()
        self.duties = [asyncio.ensure_future(admission.limiter.run())]

    def send(self, body: dict[str, Any], **how: Any) -> Wire:
        """A request arrives."""
        wire = Wire(self, body, **how)
        self.wires.append(wire)
        wire.task = asyncio.ensure_future(self.handler(wire))
        return wire

    def running(self, name: str) -> int:
        """Copies of a request that an upstream works on."""
        return sum(wire.runs for wire in self.wires if wire.name == name)

    def report(self, wire: Wire) -> None:
        """Its record will be there a little later, whatever became of its handler."""
        self.duties.append(asyncio.ensure_future(self._report(wire)))

    async def _report(self, wire: Wire) -> None:
        departure = wire.departures[0]
        how: dict[str, Any] = {"status": 200, "flags": frozenset(), "details": "via_upstream", "tail": wire.tail}
        if wire.aborts:
            how |= {"status": 503, "details": wire.aborts[0][3], "tail": {}}
        elif wire.task.cancelling():
            how |= {"status": 0, "flags": LEFT, "tail": {}}
        more = {"attempt": 1, "duration_s": 1.0, "first_token_s": 0.1}
        first = departure.order[0]
        if wire.silent:
            more["first_token_s"] = None
            how |= {"status": 504, "flags": TIMEOUT, "details": "response_timeout", "tail": {}}
        await asyncio.sleep(0.02)
        if wire.silent and departure.total_s is None:
            known = {"request_id": wire.request_id, "flags": TIMEOUT, "details": ""}
            await self.admission.hear(Record(RecordKind.ATTEMPT, "", first, 0, **known, **more))
            how["details"] = "upstream_per_try_timeout"
        await self.admission.hear(Record(RecordKind.FINAL, departure.ticket, wire.served_by or first, **how, **more))

    async def settle_down(self) -> None:
        """Until everything has come to its end, however that is; then nothing may be left."""
        await asyncio.gather(*(wire.task for wire in self.wires), return_exceptions=True)
        await asyncio.sleep(10)
        for _ in range(3):
            await self.admission.sweep()
        admission = self.admission
        assert (len(admission.flights), admission.flights.unsettled, len(admission.copies)) == (0, 0, 0)
        slots = {key: counter.used for key, counter in admission.capacity.levels().items() if key.endswith("/slots")}
        assert not any(slots.values()), slots
        assert not list(admission.lanes.waiters())
        if isinstance(admission.capacity, Suspending):
            assert admission.capacity.broken_off == 0
        for duty in self.duties:
            duty.cancel()
        await asyncio.gather(*self.duties, return_exceptions=True)
        self.executor.shutdown()
        assert asyncio.all_tasks() == {asyncio.current_task()}


def chat(text: str = "hi", model: str = "a") -> dict[str, Any]:
    return {"model": model, "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": text}]}
