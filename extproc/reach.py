"""Which upstreams somebody who wants a turn may be sent to now, and how long it has to leave one alone.

The rules are those of core.routing. Here they are asked of breakers, of what an operator has taken out, of the dollars
that are left, and of pauses that providers asked for.

Deliberately not here: whose turn it is, and whether there is room for it (limiter).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from types import MappingProxyType

from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Request
from extproc.core.routing import affordable, askable, breaker_key, dollars_lack, out_key
from extproc.ports import Capacity, Clock
from extproc.turn import Wants

__all__ = ["LEAST_RETRY_S", "NOBODY", "OUT", "Reach"]

LEAST_RETRY_S = 1.0
"""Nobody is told to come back sooner."""
NOBODY: Mapping[str, float] = MappingProxyType({})
OUT = "an operator has taken all upstreams of this model that could serve it out of use"


class Reach:
    """See the head of this file.

    owned: upstreams that serve when nobody else can be waited for; others from a reload on.
    """

    def __init__(
        self,
        capacity: Capacity,
        clock: Clock,
        allows: Callable[[str], bool],
        earliest_probe: Callable[[tuple[str, ...]], float],
        owned: frozenset[str] = frozenset(),
        *,
        fits: Callable[[str, int], bool] = lambda _name, _prompt: True,
        slow: Callable[[str], bool] = lambda _: False,
        out: Mapping[str, float] = NOBODY,
    ) -> None:
        """Keep them; see Limiter for what each of them tells."""
        self.owned = owned
        self.out = out
        self.earliest_probe = earliest_probe
        self._capacity = capacity
        self._clock = clock
        self._allows = allows
        self._fits = fits
        self._slow = slow

    def open(self, wants: Wants) -> list[str]:
        """The upstreams that may be asked now: those that answer such prompts well, where there are any."""
        paid = self.affordable(wants)
        names = self._in_use(paid) if wants.forced else askable(paid, self._allows, self._slow)
        return [name for name in names if self._fits(name, wants.prompt)] or names

    def affordable(self, wants: Wants) -> tuple[str, ...]:
        """Those of its upstreams whose own dollars allow it."""
        return wants.names if wants.costless is None else self._paid_from(wants, wants.costless)

    def fitting(self, wants: Wants) -> tuple[str, ...]:
        """Those that answer such prompts well, where there are any: others who want them all must not stand behind."""
        return tuple(name for name in wants.names if self._fits(name, wants.prompt)) or wants.names

    def with_owned(self, request: Request, wants: Wants) -> Wants:
        """Where all are sick and rest for longer than the request can wait, what is owned serves all the same."""
        names = self.affordable(wants)
        if wants.forced or any(map(self._allows, names)) or any(map(self._slow, names)):
            return wants
        if self.earliest_probe(names) <= request.wait_until:
            return wants
        owned = next((name for name in names if name in self.owned and name not in self.out), None)
        return wants if owned is None else Wants((owned,), wants.prices, forced=True, prompt=wants.prompt)

    def bypassed_to(self, wants: Wants) -> str:
        """Where to in a bypass; money does not count. Rejected when all is taken out."""
        names = [name for name in wants.names if self._allows(name)]
        return next((name for name in names if self._fits(name, wants.prompt)), None) or self.first_in_use(wants)

    def first_in_use(self, wants: Wants) -> str:
        """The first that is not taken out. Rejected when all are."""
        name = next(iter(self._in_use(wants.names)), None)
        if name is None:
            raise Rejected(Reason.NO_UPSTREAM, OUT, retry_after=self.back_s(wants.names))
        return name

    def back_s(self, names: tuple[str, ...]) -> float | None:
        """Seconds until the first of those that are taken out may be asked again, None where nobody knows."""
        seconds = self.earliest_probe(names) - self._clock.time()
        return max(LEAST_RETRY_S, seconds) if isfinite(seconds) else None

    def bound(self, wants: Wants, name: str) -> bool:
        """Whether it may go there only as far as a breaker's window has room: not where nobody else may be asked."""
        return not (wants.forced or (self._slow(name) and not any(map(self._allows, self.affordable(wants)))))

    def strays(self, wants: Wants, name: str) -> bool:
        """Whether it was given one that is paid for want of another's dollars, which were left when it was asked for.

        Others of the same batch have taken them; so it is not let go but asked for anew.
        """
        return wants.costless is not None and name not in self._paid_from(wants, wants.costless, taken=name)

    def closed(self, wants: Wants) -> tuple[str, ...]:
        """Why nobody of whom it wants could be asked."""
        return tuple(out_key(name) if name in self.out else breaker_key(name) for name in self.affordable(wants))

    def paused_s(self, wants: Wants) -> float:
        """Seconds for which every upstream that may be asked is paused; the part of a wait that no queue makes."""
        return min((self.pause_at(name, wants) for name in self.open(wants)), default=0.0)

    def pause_at(self, name: str, wants: Wants) -> float:
        """Seconds for which an upstream has to be left alone."""
        levels, now = self._capacity.levels(), self._clock.time()
        counters = (levels.get(claim.key) for claim in wants.prices[name])
        return max([0.0, *(c.closed_until - now for c in counters if c is not None and not c.shadow)])

    def _paid_from(self, wants: Wants, costless: frozenset[str], taken: str = "") -> tuple[str, ...]:
        """The same; what it costs at `taken` has been taken."""
        store, now = self._capacity.levels(), self._clock.time()
        return affordable(
            wants.names, costless, lambda name: name != taken and dollars_lack(wants.prices[name], store, now)
        )

    def _in_use(self, names: tuple[str, ...]) -> list[str]:
        """Those that are not taken out."""
        return [name for name in names if name not in self.out]
