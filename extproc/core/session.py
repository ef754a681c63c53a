"""Which agent sessions are known, and what each may still use.

A session belongs to its tenant: the same id under two tenants is two sessions. Memory is bounded, and a flood of
sessions pushes out those of its own tenant: when memory is full, a tenant that has its part of it or more forgets the
one it has not heard of for longest. Only a tenant with less makes room elsewhere: of the tenants that were silent for
longest, the one with the most forgets its oldest. A session with open books is never forgotten: the bound gives way
to as many as are under way, and is reached again with the newcomers after them.

A session that was silent for long enough is forgotten, with all that it used. A refused call is not silence: a loop
that runs into its limit stays stopped for as long as it goes on.

Deliberately not here: what is used (counted in capacity, under `keys`), and which id a request has (identity).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from extproc.core.budget import Budget
from extproc.core.capacity import Claim, Store
from extproc.core.identity import quoted
from extproc.core.policy import SessionLimits

__all__ = ["Known", "Sessions"]

LOOK = 64
"""At most so many tenants are looked at in one step."""
DROP = 1000
"""At most so many sessions are forgotten for their silence in one step."""
YIELD = 2
"""At most so many are forgotten for one newcomer, so that what is above the bound goes down again."""


@dataclass(slots=True, eq=False)
class Known:
    """One session that is remembered.

    heard: when it last called or was answered, on the clock. max_tokens, max_usd: what it may use in all, with what was
    added to it; None is no limit. tokens_key, usd_key: names of the counters, empty where there is no limit. served: it
    was answered at least once. declared: its counters are counted. pins: how many of its calls have open books.
    """

    tenant: str
    id: str
    limits: SessionLimits
    heard: float
    max_tokens: float | None = field(init=False)
    max_usd: float | None = field(init=False)
    tokens_key: str = field(init=False)
    usd_key: str = field(init=False)
    served: bool = False
    declared: bool = False
    pins: int = 0

    def __post_init__(self) -> None:
        """What it may use at first, and how that is called where it is counted."""
        self.max_tokens, self.max_usd = self.limits.max_tokens, self.limits.max_usd
        self._name()

    def _name(self) -> None:
        place = f"session/{quoted(self.tenant)}/{quoted(self.id)}"
        self.tokens_key = "" if self.max_tokens is None else f"{place}/tokens"
        self.usd_key = "" if self.max_usd is None else f"{place}/usd"

    def follow(self, limits: SessionLimits) -> None:
        """Go by other limits from now on; what was added to the old ones is added to the new ones, too."""
        self.max_tokens = _raised(self.max_tokens, self.limits.max_tokens, limits.max_tokens)
        self.max_usd = _raised(self.max_usd, self.limits.max_usd, limits.max_usd)
        self.limits = limits
        self._name()

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the counters that it has."""
        return tuple(filter(None, (self.tokens_key, self.usd_key)))

    def claims(self, tokens: float, usd: float | None) -> list[Claim]:
        """What a call takes of it that may use so much; usd None: it costs nothing, whatever it uses."""
        found = []
        if self.tokens_key:
            found.append(Claim(self.tokens_key, tokens))
        if usd is not None and self.usd_key:
            found.append(Claim(self.usd_key, usd))
        return found

    def counters(self, now: float) -> Store:
        """What counts it, as long as nothing was used."""
        shadow, found = self.limits.shadow, Store()
        if self.max_tokens is not None:
            found[self.tokens_key] = Budget(self.max_tokens, at=now, shadow="max_tokens" in shadow)
        if self.max_usd is not None:
            found[self.usd_key] = Budget(self.max_usd, at=now, shadow="max_usd" in shadow)
        return found

    def ended(self, now: float) -> None:
        """The books of one of its calls are closed."""
        self.pins -= 1
        self.heard = now

    def silent(self, now: float) -> bool:
        """Whether it has been silent for so long that it is forgotten."""
        return not self.pins and now - self.heard > self.limits.idle_s


class Sessions:
    """All that are remembered, at most `limit` of them. Times are seconds on one clock."""

    def __init__(self, limit: int) -> None:
        """None is known at first."""
        self._limit = limit
        self._of: OrderedDict[str, OrderedDict[str, Known]] = OrderedDict()
        self._count = 0
        self._round: list[str] = []

    def __len__(self) -> int:
        """How many are remembered."""
        return self._count

    def fresh(self, tenant: str, session_id: str) -> bool:
        """Whether this session was never served. Only sessions that count, named or not, are remembered."""
        sessions = self._of.get(tenant)
        known = None if sessions is None else sessions.get(session_id)
        return known is None or not known.served

    def find(self, tenant: str, session_id: str, now: float) -> Known | None:
        """What is known of a session; None when it was never heard of, or is forgotten."""
        sessions = self._of.get(tenant)
        known = None if sessions is None else sessions.get(session_id)
        return None if known is None or known.silent(now) else known

    def hear(self, tenant: str, session_id: str, limits: SessionLimits, now: float) -> tuple[Known, list[Known]]:
        """A call of this session: what is known of it from now on, and who had to be forgotten for that."""
        sessions = self._of.get(tenant)
        known = None if sessions is None else sessions.get(session_id)
        if sessions is not None and known is not None and not known.silent(now):
            known.heard = now
            sessions.move_to_end(session_id)
            self._of.move_to_end(tenant)
            return known, []
        gone = self._make_room(tenant) if known is None else [self._drop(known)]
        known = Known(tenant, session_id, limits, now)
        self._of.setdefault(tenant, OrderedDict())[session_id] = known
        self._of.move_to_end(tenant)
        self._count += 1
        return known, gone

    def knows(self, known: Known) -> bool:
        """Whether it is remembered."""
        sessions = self._of.get(known.tenant)
        return sessions is not None and sessions.get(known.id) is known

    def follow(self, limit: int, limits_of: Callable[[str], SessionLimits]) -> list[tuple[Known, SessionLimits]]:
        """At most `limit` from now on. Returns those whose limits are others by now, which have to follow yet
        (`Known.follow`): there may be very many. limits_of: by tenant.
        """
        self._limit = limit
        found = []
        for tenant, sessions in self._of.items():
            limits = limits_of(tenant)
            same: dict[int, bool] = {}  # nearly all have one and the same, and there may be very many
            for known in sessions.values():
                former = known.limits
                if (like := same.get(id(former))) is None:
                    like = same[id(former)] = former == limits
                if not like:
                    found.append((known, limits))
        return found

    def forget_silent(self, now: float) -> list[Known]:
        """Forget some that have been silent for too long, and tell which. Call it about once a second."""
        if not self._round:
            self._round = list(self._of)
        gone: list[Known] = []
        for tenant in self._round[-LOOK:]:
            sessions = self._of.get(tenant)
            while sessions and len(gone) < DROP and (first := next(iter(sessions.values()))).silent(now):
                gone.append(self._drop(first))
        del self._round[-LOOK:]
        return gone

    def _make_room(self, tenant: str) -> list[Known]:
        gone: list[Known] = []
        while self._count >= self._limit and len(gone) < YIELD and (found := self._victim(tenant)):
            gone.append(self._drop(found))
        return gone

    def _victim(self, tenant: str) -> Known | None:
        own: OrderedDict[str, Known] = self._of.get(tenant, OrderedDict())
        crowd = sorted(islice(self._of.values(), LOOK), key=len, reverse=True)
        greedy = len(own) * (len(self._of) + (not own)) >= self._limit
        found = map(_oldest_idle, [own, *crowd] if greedy else crowd)
        return next(filter(None, found), None)

    def _drop(self, known: Known) -> Known:
        sessions = self._of[known.tenant]
        del sessions[known.id]
        self._count -= 1
        if not sessions:
            del self._of[known.tenant]
        return known


def _raised(now: float | None, before: float | None, limit: float | None) -> float | None:
    """A new limit, with what was added to the old one."""
    return None if limit is None else limit + (0.0 if now is None or before is None else now - before)


def _oldest_idle(sessions: OrderedDict[str, Known]) -> Known | None:
    """The one not heard of for longest that may be forgotten. Those under way go to the end: they are in use."""
    for _ in range(len(sessions)):
        first = next(iter(sessions.values()))
        if not first.pins:
            return first
        sessions.move_to_end(first.id)
    return None
