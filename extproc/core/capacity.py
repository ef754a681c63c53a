"""What is asked of capacity, and what it answers, as plain values that fit into one call.

A request needs several things at once: tokens of an account, one of its requests per minute, a concurrent slot. An
`Option` names all that one upstream would need; an `Ask` lists the options of one request, best first; a batch of asks
is answered in order. Four rules make a batch fair. An option is taken whole or not at all. What an earlier ask wanted
and could not get is closed to the later asks of the batch, so that a large request is not overtaken for ever. When an
ask is granted whose followers were left out of the batch, it ends there, because they come before the later asks. And
what a lane with a guaranteed share is owed by now (see shares) it gets though other lanes' asks have closed the key.

An ask that was refused leaves a trace: the counters know that its lane waits, and for how much. So everybody in line is
asked for again and again; a lane with a share that is not asked for in two seconds counts as gone.

`tune` moves the counters themselves: what a provider, an engine or an operator let know of them.

Deliberately not here: the order of the asks (lanes), and what the counters of each kind count (bucket, watermark,
budget).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from extproc.core import shares
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget
from extproc.core.shares import PLAIN, RENEW_S, Terms
from extproc.core.value import value
from extproc.core.watermark import Reading, Watermark

__all__ = [
    "Absent", "Adopt", "Answer", "Ask", "Change", "Claim", "Counter", "Declare", "Forget", "Gauge", "Level", "Option",
    "Pause", "Resize", "Retire", "Seats", "Store", "Tuning", "answer", "tune",
]  # fmt: skip

Counter = TokenBucket | Slots | Watermark | Budget
"""What counts one key. All have `wait_for`, `due_in`, `free_at`, `take`, `change`, `refused`, `closes`, `shadow`,
`closed_until` and `retired` (see `Retire`). They tell what the limit says, in shadow mode or not; `answer` does not
refuse for a shadowed one."""
Store = dict[str, Counter]
"""Everything that is counted, by key."""
Closed = dict[str, set[str]]
"""Per key the lanes whose asks could not get it in this batch."""


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
    """Count `key` from now on, unless it is counted already. One that was retired counts by these rules again."""

    key: str
    counter: Counter


@value
class Forget:
    """Stop counting `key`. retired: only if it still refuses nobody."""

    key: str
    retired: bool = False


@value
class Adopt:
    """Count `key` by the rules of `counter` from now on; what is taken of it, and owed, stays as far as it fits."""

    key: str
    counter: Counter


@value
class Retire:
    """Refuse nobody any more for want of `key`. It is counted all the same: what was taken of it will come back."""

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
    """A new number of slots, or limit of a budget; what is held or used stays."""

    key: str
    limit: float


@value
class Gauge:
    """What an engine's instances said of themselves; see watermark. reading None: they did not answer."""

    key: str
    reading: Reading | None


@value
class Absent:
    """A lane, of this rank, does not wait any more at `key`: nothing is left to it until it asks again."""

    key: str
    lane: str
    rank: int


Tuning = Absent | Declare | Forget | Adopt | Retire | Resize | Level | Pause | Seats | Gauge
"""What became known of a counter, from a provider, an engine or an operator. Keys that are not counted are ignored."""


def answer(store: Store, asks: Iterable[Ask], now: float) -> list[Answer]:
    """Decide a whole batch in order against `store`, taking what is granted. Unknown keys are unlimited."""
    closed: Closed = {}
    answers: list[Answer] = []
    over = False
    for ask in asks:
        answers.append(Answer(None) if over else _answer_one(store, ask, closed, now))
        over = over or (ask.followed and answers[-1].option is not None)
    return answers


def tune(store: Store, tunings: Iterable[Tuning], now: float) -> None:
    """Follow what became known of counters, in order. Keys that are not counted, or count otherwise, are ignored."""
    for tuning in tunings:
        if isinstance(tuning, Declare):
            if (declared := store.setdefault(tuning.key, tuning.counter)).retired:
                _adopt(declared, tuning.counter, now)
        elif isinstance(tuning, Forget):
            known = store.get(tuning.key)
            if known is not None and (known.retired or not tuning.retired):
                del store[tuning.key]
        elif isinstance(tuning, Adopt):
            _adopt(store.setdefault(tuning.key, tuning.counter), tuning.counter, now)
        elif counter := store.get(tuning.key):
            _tune_one(counter, tuning, now)


def _adopt(counter: Counter, rules: Counter, now: float) -> None:
    counter.retired = False
    match counter, rules:
        case TokenBucket(), TokenBucket():
            counter.adopt(rules, now)
        case Slots(), Slots():
            counter.adopt(rules)
        case Watermark(), Watermark():
            counter.adopt(rules)
        case Budget(), Budget():
            counter.adopt(rules)


def _tune_one(counter: Counter, tuning: Absent | Retire | Resize | Level | Pause | Seats | Gauge, now: float) -> None:
    match counter, tuning:
        case _, Retire():
            counter.shadow, counter.closed_until, counter.retired = True, -inf, True
        case _, Pause(seconds=seconds):
            counter.closed_until = max(counter.closed_until, now + seconds)
        case TokenBucket(), Resize(rate=rate, capacity=capacity):
            counter.resize(rate, capacity, now)
        case TokenBucket(), Level(most=most, least=least):
            counter.clamp(least, most, now)
        case Slots() | Budget(), Seats(limit=limit):
            counter.limit = limit
        case Watermark(), Gauge(reading=reading):
            counter.observe(reading, now)
        case TokenBucket() | Slots() | Watermark(), Absent(lane=lane, rank=rank):
            shares.leave(counter.lanes, lane)
            if not isinstance(counter, TokenBucket):
                counter.seen.pop(rank, None)


def _answer_one(store: Store, ask: Ask, closed: Closed, now: float) -> Answer:
    terms, retry_after = ask.terms, inf
    short: list[str] = []
    for option in ask.options:
        lacking, shadowed, wait = _lacking(store, option, terms, closed, now)
        if not lacking:
            _take(store, option, terms, closed, now)
            return Answer(option, shadowed=shadowed)
        short += lacking
        retry_after = min(retry_after, wait)
    if short:
        _refuse(store, ask, short, closed, now)
    return Answer(None, min(retry_after, RENEW_S) if terms.share else retry_after, tuple(short))


def _take(store: Store, option: Option, terms: Terms, closed: Closed, now: float) -> None:
    for claim in option.claims:
        counter = store.get(claim.key)
        if counter is None:
            continue
        if closed and isinstance(counter, TokenBucket):
            counter.take(claim.amount, now, terms, passing=claim.key in closed)
        else:
            counter.take(claim.amount, now, terms)


def _lacking(
    store: Store, option: Option, terms: Terms, closed: Closed, now: float
) -> tuple[tuple[str, ...], tuple[str, ...], float]:
    """Keys that lack for `option`, those that would lack but are in shadow mode, and the longest wait of the former."""
    lacking: tuple[str, ...] = ()
    shadowed: tuple[str, ...] = ()
    longest = 0.0
    for claim in option.claims:
        counter = store.get(claim.key)
        if counter is None:
            continue
        if closed and claim.key in closed:
            wait = _wait_behind(counter, claim.amount, terms, closed[claim.key], now)
        else:
            wait = counter.wait_for(claim.amount, now, terms)
        if wait > 0:
            if counter.shadow:
                shadowed += (claim.key,)
            else:
                lacking += (claim.key,)
                longest = max(longest, wait)
    return lacking, shadowed, longest


def _wait_behind(counter: Counter, amount: float, terms: Terms, lanes: set[str], now: float) -> float:
    """The wait at a key that earlier asks of these `lanes` could not get: it depends on them, unless one is due."""
    if terms.share and terms.lane not in lanes:
        return counter.due_in(amount, now, terms)
    return counter.wait_for(amount, now, terms) or inf


def _refuse(store: Store, ask: Ask, short: list[str], closed: Closed, now: float) -> None:
    """Close what lacked to later asks, and tell the counters who waits: of each lane, the first that was refused."""
    terms = ask.terms
    for option in ask.options:
        for claim in option.claims:
            counter = store.get(claim.key)
            if counter is None or (claim.key in closed and terms.lane in closed[claim.key]):
                continue
            lacked = claim.key in short
            if terms.lane:
                counter.refused(claim.amount, now, terms, short=lacked)
            if lacked and (not terms.smooth or counter.closes(claim.amount, now, terms)):
                closed.setdefault(claim.key, set()).add(terms.lane)
