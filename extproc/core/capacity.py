"""What is asked of capacity, and what it answers, as plain values that fit into one call.

A request needs several things at once: tokens of an account, one of its requests per minute, a concurrent slot. An
`Option` names all that one upstream would need; an `Ask` lists the options of one request, best first; a batch of asks
is answered in order. Three rules make a batch fair. An option is taken whole or not at all. What an earlier ask wanted
and could not get is closed to the later asks of the batch, so that a large request is not overtaken for ever. And when
an ask is granted whose followers were left out of the batch, it ends there, because they come before the later asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.shares import PLAIN, Terms
from extproc.core.value import value
from extproc.core.watermark import Reading

__all__ = [
    "Answer", "Ask", "Change", "Claim", "Counter", "Declare", "Forget", "Gauge", "Level", "Option", "Pause", "Resize",
    "Seats", "Store", "Tuning", "answer",
]  # fmt: skip

Counter = TokenBucket | Slots
Store = dict[str, Counter]
"""Everything that is counted, by key."""


@value
class Claim:
    """`amount` of what `key` counts: tokens, requests or slots."""

    key: str
    amount: float


@value
class Option:
    """All that the upstream `name` would need for a request."""

    name: str
    claims: tuple[Claim, ...]


@value
class Ask:
    """One request's options, best first. followed: others who want the same come next, but are not in the batch."""

    ticket: str
    options: tuple[Option, ...]
    followed: bool = False
    terms: Terms = PLAIN


@value
class Answer:
    """The option that was taken, or None with `retry_after`: seconds until asking again may help.

    retry_after is infinite when only a release can help, 0 when the batch ended before. short: keys that were lacking.
    shadowed: keys of limits in shadow mode that would have been lacking.
    """

    option: Option | None
    retry_after: float = 0.0
    short: tuple[str, ...] = ()
    shadowed: tuple[str, ...] = ()


@value
class Change:
    """`amount` given back to `key`; negative charges it, into debt if need be."""

    key: str
    amount: float


@value
class Declare:
    """Count `key` from now on, unless it is counted already."""

    key: str
    counter: Counter


@value
class Forget:
    """Stop counting `key`."""

    key: str


@value
class Resize:
    """A bucket's new rate (units per second) and capacity; what is in it stays, as far as it fits."""

    key: str
    rate: float
    capacity: float


@value
class Level:
    """What is in a bucket is at most `most` and at least `least`, never above its capacity."""

    key: str
    most: float = inf
    least: float = -inf


@value
class Pause:
    """Nothing is taken of `key` for so many seconds. The later of two pauses holds."""

    key: str
    seconds: float


@value
class Seats:
    """A new number of slots; those held stay held."""

    key: str
    limit: float


@value
class Gauge:
    """What an engine's instances said of themselves; see watermark. reading None: they did not answer."""

    key: str
    reading: Reading | None


Tuning = Declare | Forget | Resize | Level | Pause | Seats | Gauge
"""What became known of a counter, from a provider, an engine or an operator. Keys that are not counted are ignored."""


def answer(store: Store, asks: Iterable[Ask], now: float) -> list[Answer]:
    """Decide a whole batch in order against `store`, taking what is granted. Unknown keys are unlimited."""
    closed: set[str] = set()
    answers: list[Answer] = []
    over = False
    for ask in asks:
        answers.append(Answer(None) if over else _answer_one(store, ask, closed, now))
        over = over or (ask.followed and answers[-1].option is not None)
    return answers


def _answer_one(store: Store, ask: Ask, closed: set[str], now: float) -> Answer:
    retry_after, short = inf, []
    for option in ask.options:
        lacking, wait = _lacking(store, option, closed, now)
        if not lacking:
            for claim in option.claims:
                if counter := store.get(claim.key):
                    counter.change(-claim.amount, now)
            return Answer(option)
        short += lacking
        retry_after = min(retry_after, wait)
    closed.update(short)
    return Answer(None, retry_after, tuple(short))


def _lacking(store: Store, option: Option, closed: set[str], now: float) -> tuple[list[str], float]:
    lacking, wait = [], 0.0
    for claim in option.claims:
        counter = store.get(claim.key)
        if counter is None:
            continue
        claim_wait = counter.wait_for(claim.amount, now)
        if claim_wait > 0 or claim.key in closed:
            lacking.append(claim.key)
            wait = max(wait, claim_wait or inf)  # free, but closed: it depends on whoever closed it
    return lacking, wait
