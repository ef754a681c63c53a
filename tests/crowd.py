"""A crowd of clients in virtual time against the real limiter: they come at random, are refused, and come back.

What comes out of it: how wrong forecasts were, and what became of those who came back at the time they were told.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median

from extproc.core.capacity import Change, Claim, Store
from extproc.core.forecast import Pace
from extproc.core.lanes import Lanes
from extproc.core.policy import Lane
from extproc.core.refusal import Rejected
from extproc.core.request import Request, Size
from extproc.limiter import Limiter
from extproc.turn import Wants
from tests.doubles import FakeExchange, Ledger, Observer, VirtualLoop, request

SDK_RETRIES = 2
SDK_LONGEST_S = 60.0


@dataclass
class Figures:
    """waits: forecast and wait of those who queued and went. told: of each who came at its time, whether it went.

    ends, of: how requests ended, in all and by tenant. served, longest: tokens, and longest wait, by tenant.
    """

    waits: list[tuple[float, float]] = field(default_factory=list)
    told: list[bool] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    of: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    served: Counter[str] = field(default_factory=Counter)
    longest: Counter[str] = field(default_factory=Counter)

    def end(self, tenant: str, word: str) -> None:
        """Count one in."""
        self.ends[word] += 1
        self.of[tenant][word] += 1

    def errors(self, longer_than_s: float = 1.0) -> list[float]:
        """Relative errors of forecasts of waits longer than that, ascending."""
        return sorted(abs(told - was) / was for told, was in self.waits if was > longer_than_s)

    def error(self, quantile: float = 0.5, longer_than_s: float = 1.0) -> float:
        found = self.errors(longer_than_s)
        return found[min(len(found) - 1, int(quantile * len(found)))] if found else inf

    def kept(self) -> float:
        """Share of those who came back at their time that went."""
        return sum(self.told) / max(1, len(self.told))

    def line(self) -> str:
        errors = " ".join(f"q{round(100 * q)} {self.error(q):.2f}" for q in (0.25, 0.5, 0.75, 0.9))
        bias = median([told / was for told, was in self.waits if was > 1.0] or [0.0])
        return (
            f"{len(self.errors())} waits > 1 s, relative error {errors}, told/was {bias:.2f}; "
            f"{self.kept():.1%} of {len(self.told)} promises held; {dict(self.ends)}"
        )


@dataclass
class Client:
    """Of whom a crowd is made. sizes: input and output as estimated; used: share of the estimate that is really used.

    holds_s: how long it holds what is held. persists: comes back whenever told, as often as told. bursts: it comes for
    so many seconds, and not for so many.
    """

    lane: str
    tenant: str = "default"
    per_s: float = 1.0
    weight: float = 1.0
    vip: bool = False
    input: tuple[int, int] = (50, 1000)
    output: tuple[int, int] = (50, 500)
    used: tuple[float, float] = (1.0, 1.0)
    holds_s: tuple[float, float] = (0.5, 5.0)
    names: str = "a"
    persists: bool = True
    fingerprint: bool = True
    bursts: tuple[float, float] = (inf, 0.0)


class Crowd:
    """Clients against one limiter."""

    def __init__(self, loop: VirtualLoop, seed: int, lanes: list[Lane], store: Store, **more: object) -> None:
        self.loop = loop
        self.rng = random.Random(seed)
        self.store = store
        self.capacity = Ledger(loop, store)
        self.lanes = Lanes(lanes)
        self.pace = Pace()
        self.observer = Observer()
        self.limiter = Limiter(
            self.lanes, self.capacity, loop, lambda _: True, self.pace, self.observer, lambda _: inf,
            chance=self.rng.random, **more,
        )  # fmt: skip
        self.running = asyncio.ensure_future(self.limiter.run())
        self.figures = Figures()
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.warm_until = loop.time()

    async def come(self, client: Client, until: float) -> None:
        """Requests of one kind of client, Poisson, until then."""
        began, (comes_s, rests_s) = self.loop.time(), client.bursts
        while True:
            await asyncio.sleep(self.rng.expovariate(client.per_s))
            if (past_s := (self.loop.time() - began) % (comes_s + rests_s)) > comes_s:
                await asyncio.sleep(comes_s + rests_s - past_s)
            if self.loop.time() > until:
                return
            task = asyncio.ensure_future(self._live(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def run(self, clients: list[Client], seconds: float, warm_s: float = 0.0) -> Figures:
        """Everybody for so long, counting after `warm_s`."""
        self.warm_until = self.loop.time() + warm_s
        until = self.loop.time() + seconds
        await asyncio.gather(*(self.come(client, until) for client in clients))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        return self.figures

    async def _live(self, client: Client) -> None:
        """One request of a client, with all its retries."""
        rng, lane = self.rng, self.lanes.rules[client.lane]
        self._number += 1
        size = Size(rng.randint(*client.input), rng.randint(*client.output))
        one = request(
            lane=client.lane, tenant=client.tenant, weight=client.weight, vip=client.vip, size=size, bytes=100,
            fingerprint=f"f{self._number}" if client.fingerprint else "",
        )  # fmt: skip
        told = False
        for attempt in range(1000 if client.persists else 1 + SDK_RETRIES):
            now = self.loop.time()
            one = replace(
                one, ticket=f"t{self._number}-{attempt}", arrived=now, wait_until=now + lane.max_wait_s, retries=attempt
            )
            wait = await self._try(one, client, told=told)
            if wait is None:
                return
            told = client.persists or wait <= SDK_LONGEST_S
            if not told:
                return
            await asyncio.sleep(wait * (1 + 0.25 * rng.random()))

    async def _try(self, one: Request, client: Client, *, told: bool) -> float | None:
        """None when it went, else the seconds until it may come back."""
        began = self.loop.time()
        try:
            grant = await self.limiter.acquire(one, self.wants(one, client), FakeExchange().hold)
        except Rejected as refused:
            if self._counts():
                self.figures.end(one.tenant, str(refused.reason))
                if told:
                    self.figures.told.append(False)
            return refused.retry_after
        if self._counts():
            waited = self.loop.time() - began
            self.figures.end(one.tenant, "served")
            self.figures.served[one.tenant] += one.size.total
            self.figures.longest[one.tenant] = max(self.figures.longest[one.tenant], waited)
            if told:
                self.figures.told.append(True)
            if grant.waited:
                self.figures.waits.append((grant.predicted_s or 0.0, waited))
        await self._serve(one, client, grant.upstream)
        return None

    def _counts(self) -> bool:
        return self.loop.time() >= self.warm_until

    async def _serve(self, one: Request, client: Client, upstream: str) -> None:
        held_s = self.rng.uniform(*client.holds_s)
        await asyncio.sleep(held_s)
        self.pace.learn_hold(upstream, held_s)
        used = self.rng.uniform(*client.used)
        back = []
        for claim in self.wants(one, client).prices[upstream]:
            if claim.key.endswith(("/slots", "/kv")):
                back.append(Change(claim.key, claim.amount))
            elif claim.key.endswith("/total"):
                back.append(Change(claim.key, one.size.output * (1 - used)))
        await self.capacity.change(back)
        self.limiter.settled(one, Size(one.size.input, round(one.size.output * used)))
        self.limiter.kick()

    def wants(self, one: Request, client: Client) -> Wants:
        """At each upstream what the store counts there."""
        amounts = {"slots": 1.0, "requests": 1.0, "total": float(one.size.total), "kv": float(one.size.total)}
        amounts |= {"input": float(one.size.input), "output": float(one.size.output)}
        prices = {
            name: tuple(Claim(key, amounts[key.rpartition("/")[2]]) for key in self.store if f"/{name}/" in key)
            for name in client.names
        }
        return Wants(tuple(client.names), prices)
