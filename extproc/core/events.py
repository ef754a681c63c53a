"""What happened, as typed facts that telemetry listens to. Deciding code announces these and never counts anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from extproc.core.breaker import Outcome, State
from extproc.core.refusal import Reason
from extproc.core.request import Request, Usage
from extproc.core.value import value

__all__ = [
    "Admitted", "AttemptFailed", "BreakerMoved", "BudgetUsed", "Event", "Left", "LeverMoved", "LimitsMoved", "Observed",
    "Overshot", "PassedOver", "Probed", "Queued", "Refused", "Retried", "Scraped", "Settled", "Shadowed", "SizesMoved",
    "Spell", "Waited", "Why",
]  # fmt: skip


class Why(StrEnum):
    """Why an upstream of its chain was not where a request went, or does not stand behind it for failover.

    BUSY: it had no room when the request's turn came, but has now. BEHIND: it comes after one without room. ORDER:
    Envoy was told no such order. HOLD: its lane waits for the first choice. TURN: nothing stands against it, but others
    come first.
    """

    DIALECT = "dialect"
    ABILITY = "ability"
    PINNED = "pinned"
    TOO_LARGE = "too_large"
    DOLLARS = "dollars"
    BREAKER = "breaker"
    SLOW = "slow"
    SIZES = "sizes"
    NO_ROOM = "no_room"
    BUSY = "busy"
    BEHIND = "behind"
    ORDER = "order"
    HOLD = "hold"
    TURN = "turn"


@value
class PassedOver:
    """One upstream that a request did not go to first, and why. keys: of the counters that lacked.

    wait_s: seconds until they would have had enough, or its breaker lets it be tried; None where nobody knows. state:
    of its breaker, where that is why, or "out" where an operator has taken it out. behind: it is asked all the same if
    those before it fail.
    """

    upstream: str
    why: Why
    keys: tuple[str, ...] = ()
    wait_s: float | None = None
    state: str = ""
    behind: bool = False


@value
class Spell:
    """For `seconds` a request was held for want of these keys: of counters, or one of `upstream/<name>/breaker`,
    `upstream/<name>/out` (taken out by an operator) and `lane/<name>/paused`. No keys: of others (see core.spells).
    """

    keys: tuple[str, ...]
    seconds: float


@value
class Queued:
    """A request has to wait; predicted_s is the forecast of its wait.

    position: its place in line, 1 for the first, as far as can be told. binding: the keys for want of which it did not
    go at once (see `Spell`); empty when others stand before it. waiting: requests in line then, in its lane and better
    ones, by lane.
    """

    request: Request
    predicted_s: float
    position: int = 0
    binding: tuple[str, ...] = ()
    waiting: Mapping[str, int] = field(default_factory=dict, hash=False)


@value
class Waited:
    """A wait has ended, however: what it was for, the longest first."""

    request: Request
    seconds: float
    spells: tuple[Spell, ...] = ()


@value
class Admitted:
    """A request goes to order[0], with the rest of `order` behind it for failover.

    predicted_s: the forecast of its wait when it joined its lane, None when it did not queue. passed_over: every
    upstream of its chain that it does not go to though it comes before order[0], or that is not in the order.
    bypassed: it was let go by a bypass, whatever was free.
    """

    request: Request
    order: tuple[str, ...]
    waited_s: float
    predicted_s: float | None = None
    passed_over: tuple[PassedOver, ...] = ()
    bypassed: bool = False


@value
class Refused:
    """A request was refused. tenant and lane are empty when it was refused before they were known.

    request: None when it was refused before it was priced; what is told beside it is known all the same. retry_after:
    seconds that its client is told, None for never. trace: as in Request. instead: another answer was given.
    passed_over: the upstreams of its chain, where it is for want of them.
    """

    reason: Reason
    status: int
    tenant: str = ""
    lane: str = ""
    waited_s: float = 0.0
    request_id: str = ""
    request: Request | None = None
    detail: str = ""
    retry_after: float | None = None
    trace: str = ""
    path: str = ""
    instead: bool = False
    passed_over: tuple[PassedOver, ...] = ()


@value
class Left:
    """A client left before its request was let go or refused, after so many seconds."""

    request: Request
    waited_s: float


@value
class Retried:
    """A client sent a request again. took: what the copy was whose place it got (held, running, left), or empty."""

    request: Request
    took: str


@value
class AttemptFailed:
    """One attempt at one upstream failed; error is the provider's type/code where it gave one. Told once, at times
    after its request was settled.

    following: where the request is now, empty for nowhere. charged: an answer came and was none, so that it was paid.
    number: which attempt of its request it was. seconds: how long it took. cause: in a few words.
    """

    upstream: str
    outcome: Outcome
    status: int
    error: str
    ticket: str
    following: str = ""
    charged: bool = False
    number: int = 0
    seconds: float = 0.0
    cause: str = ""


@value
class Settled:
    """The books on a request are closed. Emitted once per admitted request.

    usage None: unknown, the estimate was kept. upstream is who served, or where it was when its client left or it was
    evicted; empty when nobody did. status 0: no upstream's answer was sent. first_token_s: seconds from the upstream's
    first byte asked to the first body byte, None when unknown. cost_usd: what it cost, attempts that were cut included;
    None when nobody knows a price. flags, details: Envoy's, of how it ended. lost: no record came, so that nothing is
    known but that it ended. asked: the last upstream that was asked, whether it answered or not; empty when nobody
    knows. fault: what was wrong with an answer that was begun and waited for to its end, in a few words; empty for
    nothing. evicted: it was ended here while it ran, because a later copy of it had come.
    """

    request: Request
    upstream: str
    attempts: int
    status: int
    usage: Usage | None
    waited_s: float
    first_token_s: float | None = None
    duration_s: float | None = None
    client_gone: bool = False
    finish: str = ""
    cost_usd: float | None = None
    flags: frozenset[str] = frozenset()
    details: str = ""
    lost: bool = False
    asked: str = ""
    fault: str = ""
    evicted: bool = False

    @property
    def answered(self) -> bool:
        """Whether an answer was begun that was none of an error."""
        return 0 < self.status < 400  # noqa: PLR2004 - HTTP

    @property
    def given_up(self) -> bool:
        """Whether nobody waited for its end any more: neither its client nor, since a later copy had come, we."""
        return self.client_gone or self.evicted


@value
class Overshot:
    """`amount` of `key` was charged into debt: a failover or a wrong estimate. ticket: of whose request it was."""

    key: str
    amount: float
    ticket: str = ""


@value
class BreakerMoved:
    """An upstream's breaker went from one state to another; cause is a few words.

    sign: of what it was taken for sick, empty where something else moved it. numbers: what had been counted, and the
    rest that follows. requests: ids of the last that led to it.
    """

    upstream: str
    before: State
    after: State
    cause: str
    sign: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    requests: tuple[str, ...] = ()


@value
class SizesMoved:
    """Prompts of one size class (`from-to` in tokens) are kept away from an upstream, or return there (not shut)."""

    upstream: str
    sizes: str
    shut: bool
    cause: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    requests: tuple[str, ...] = ()


@value
class Probed:
    """A canary call to an upstream ended. What it used: tokens, and dollars where a price is known."""

    upstream: str
    ok: bool
    seconds: float
    tokens: int = 0
    cost_usd: float | None = None


@value
class Observed:
    """A request in observe mode went, though it would have been held (reason None) or refused for `reason`."""

    request: Request
    reason: Reason | None
    predicted_s: float = 0.0


@value
class Shadowed:
    """A limit in shadow mode would have stopped a request: name of the counter, or of the bound."""

    request: Request
    limit: str


@value
class LimitsMoved:
    """What a provider said moved a counter: cause is a few words with numbers."""

    upstream: str
    key: str
    cause: str


@value
class Scraped:
    """An engine's metrics were read, or could not be (saturation None)."""

    upstream: str
    saturation: float | None
    preemptions: float = 0.0


@value
class BudgetUsed:
    """Most of a budget of dollars is used, what is reserved included; `key` names it. It ends in so many seconds."""

    key: str
    used: float
    limit: float
    ends_in_s: float


@value
class LeverMoved:
    """An operator moved something by hand, or it returned by itself.

    action: name of the operation (see ports.Operations). name: the lane, upstream or setting, empty for the whole
    service. by: who did it, or "time", or "reload". until: when it returns by itself, in epoch seconds; None for never.
    """

    action: str
    name: str = ""
    by: str = ""
    until: float | None = None


Event = (
    Queued | Waited | Admitted | Refused | Left | Retried | AttemptFailed | Settled | Overshot | BreakerMoved | Probed
    | Observed | Shadowed | LimitsMoved | Scraped | SizesMoved | BudgetUsed | LeverMoved
)  # fmt: skip
