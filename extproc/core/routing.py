"""Which upstreams may serve a request, what each would cost, and the order they are tried in.

Three questions, asked at three times. On arrival: who could ever serve it (`able`: dialect, abilities, pinned state;
`eligible`: context window, per-minute limits). At every dispatch: who may be asked now (`affordable`: whose dollars are
not spent; `askable`: breakers; `options`: whether a busy first choice may be passed over). At departure: who stands
behind the first choice (`order`: only upstreams that have room now, since the router will not ask again).

Slow beats refused: an upstream that is kept away merely because its first tokens are late is asked when nobody else of
the chain may be, and stands behind all healthy ones of an order. A breaker knows one upstream and cannot know that.

Deliberately not here: breakers themselves, and how an order reaches Envoy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import takewhile
from math import inf
from types import MappingProxyType

from extproc.core.capacity import Claim, Option, Store
from extproc.core.events import PassedOver, Why
from extproc.core.policy import Kind, Limit, Policy, Route, Upstream, WhenBusy
from extproc.core.quota import PERIODS
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Ability, Dialect, Endpoint, Size

__all__ = [
    "UNMETERED", "able", "affordable", "askable", "breaker_key", "bucket_key", "claims", "dollars_lack", "eligible",
    "fitting", "holds", "is_callers_word", "kv_key", "limits_of", "matches", "options", "order", "out_key",
    "paused_key", "priorities", "reserve_of", "route_of", "slots_key", "unable",
]  # fmt: skip

KNOW_PRIORITIES = frozenset({"vllm", "sglang", "fake", "compatible"})
"""Providers that are, or may be, engines that schedule by a `priority` in the body."""
SAME: Mapping[str, Size] = MappingProxyType({})
UNMETERED = frozenset({Endpoint.OTHER, Endpoint.COUNT_TOKENS})
"""Endpoints whose tokens are not known."""
PRIORITY_STEP = 100
"""Between two lanes. SGLang lets one request preempt another only when their priorities are more than 10 apart."""


def route_of(policy: Policy, model: str) -> Route:
    """The first route that names `model` exactly, else the first whose pattern matches. Rejects an unknown model."""
    route = policy.naming(model) or policy.patterned(model)
    if route is None:
        raise Rejected(Reason.UNKNOWN_MODEL, f"no route serves model {model[:100]!r}")
    return route


def matches(model: str, patterns: Iterable[str]) -> bool:
    """Whether `model` is one of these names or fits one of these shell-style patterns."""
    return any(fnmatchcase(model, pattern) for pattern in patterns)


def is_callers_word(policy: Policy, upstream: Upstream, model: str) -> bool:
    """Whether `upstream` is asked for `model` by a name that is written nowhere here: a pattern lets callers say it."""
    written = policy.naming(model) is not None
    return not written and upstream.own_name(model) == model and policy.patterned(model) is not None


def eligible(
    policy: Policy, names: tuple[str, ...], model: str, size: Size, sizes: Mapping[str, Size] = SAME
) -> tuple[str, ...]:
    """Those of `names`, which are `able`, that could ever hold this request, in order.

    sizes: its size at upstreams that count otherwise. Rejects as `too_large` when it exceeds every window and limit.
    """
    found = _large_enough(policy, names, model, size, sizes)
    if not found:
        least = min(sizes.get(name, size).total for name in names)
        raise Rejected(Reason.TOO_LARGE, f"{least} tokens exceed every upstream's window or per-minute limit")
    return found


def unable(
    policy: Policy,
    route: Route,
    dialect: Dialect,
    model: str,
    size: Size,
    pin: str | None,
    needs: frozenset[Ability] = frozenset(),
    sizes: Mapping[str, Size] = SAME,
) -> tuple[PassedOver, ...]:
    """The upstreams of the chain that are not `eligible`, and why; of several reasons the first."""
    known, speaking, found = _sieved(policy, route, dialect, pin, needs)
    large_enough = _large_enough(policy, found, model, size, sizes)
    others = []
    for name in route.chain:
        if name in large_enough:
            continue
        why = Why.TOO_LARGE if name in found else Why.ABILITY if name in speaking else Why.DIALECT
        others.append(PassedOver(name, why if name in known else Why.PINNED))
    return tuple(others)


def able(
    policy: Policy, route: Route, dialect: Dialect, pin: str | None, needs: frozenset[Ability] = frozenset()
) -> tuple[str, ...]:
    """The upstreams of the chain that could serve such a request if it is small enough, in order.

    Rejects as `no_upstream` when none speaks the dialect, or can do what it needs.
    """
    _, speaking, found = _sieved(policy, route, dialect, pin, needs)
    if not speaking:
        never = f"no upstream of this model's chain speaks the {dialect} API"
        raise Rejected(Reason.NO_UPSTREAM, never, retry_after=inf)
    if not found:
        never = f"no upstream of this model's chain can do all that this request needs: {', '.join(sorted(needs))}"
        raise Rejected(Reason.NO_UPSTREAM, never, retry_after=inf)
    return found


def fitting(policy: Policy, inputs: Mapping[str, int], output: int, model: str = "*") -> int:
    """The output to reserve where the client named none: `output`, cut to what the widest upstream holds.

    What it holds is its context window and its per-minute limits of `model`. inputs: prompt tokens at each upstream.
    """
    room = max(_output_room(policy.upstreams[name], model, prompt) for name, prompt in inputs.items())
    return int(min(output, max(1, room)))


def holds(upstream: Upstream, model: str, size: Size) -> bool:
    """Whether its context window and every limit of `model` that is kept could ever take `size`."""
    if size.total <= surely_held(upstream, model):
        return True
    if upstream.window is not None and size.total > upstream.window:
        return False
    amounts: Mapping[Kind, int] = {Kind.TOTAL: size.total, Kind.INPUT: size.input, Kind.OUTPUT: size.output}
    return all(amounts.get(limit.kind, 0) <= limit.per_minute for limit in _enforced(upstream, model))


def claims(
    upstream: Upstream, model: str, size: Size, endpoint: Endpoint, expected: int | None = None
) -> tuple[Claim, ...]:
    """All that `upstream` needs for one request: a slot, a request, its tokens by kind, and room in its KV cache.

    expected: output tokens that will probably be generated, where that is known to be less than what is reserved. The
    cache is shared by what really runs; only limits that are charged for the reservation need all of it.
    """
    amounts = {Kind.TOTAL: size.total, Kind.INPUT: size.input, Kind.OUTPUT: size.output, Kind.REQUESTS: 1}
    metered = endpoint not in UNMETERED
    slots, buckets = _counters(upstream, model)
    found = [Claim(key, float(amounts[kind])) for key, kind in buckets if metered or kind is Kind.REQUESTS]
    if upstream.kv is not None and metered:
        output = size.output if expected is None else min(size.output, expected)
        found.append(Claim(kv_key(upstream.name), float(size.input + output)))
    return (Claim(slots, 1.0), *found)


def affordable(names: tuple[str, ...], costless: frozenset[str], spent: Callable[[str], bool]) -> tuple[str, ...]:
    """Those of `names` that may be asked for money's sake: from the first that is `spent` on, only what costs nothing.

    So a limit never moves its cost to the next upstream; whoever comes before it in the chain is not touched by it.
    """
    over = False
    chosen = []
    for name in names:
        over = over or spent(name)
        if not over or name in costless:
            chosen.append(name)
    return tuple(chosen)


def dollars_lack(price: Iterable[Claim], store: Store, now: float) -> bool:
    """Whether what is left of an upstream's own dollars does not cover `price`. Limits in shadow mode cover all."""
    for claim in price:
        if claim.key.rpartition("/")[2] in PERIODS:
            counter = store.get(claim.key)
            if counter is not None and not counter.shadow and counter.wait_for(claim.amount, now) > 0:
                return True
    return False


def askable(names: Sequence[str], allows: Callable[[str], bool], slow: Callable[[str], bool]) -> list[str]:
    """Those of `names` that users' requests may go to now; where there are none, those that are merely slow."""
    return [name for name in names if allows(name)] or [name for name in names if slow(name)]


def options(
    healthy: Sequence[str],
    price: Callable[[str], tuple[Claim, ...]],
    when_busy: WhenBusy,
    *,
    spilled: bool,
) -> tuple[Option, ...]:
    """What to ask for now: every upstream that may be asked, or only the first of them while the lane holds."""
    asked = healthy if spilled and when_busy is WhenBusy.SPILL else healthy[:1]
    return tuple(Option(name, price(name)) for name in asked)


def order(
    first: str,
    names: Sequence[str],
    allows: Callable[[str], bool],
    has_room: Callable[[str], bool],
    slow: Callable[[str], bool] = lambda _: False,
    fits: Callable[[str], bool] = lambda _: True,
) -> tuple[str, ...]:
    """`first`, then those behind it in the chain, those before it, those that are merely slow, and the unfit.

    fits: whether an upstream answers such prompts well; a bad answer is better than nobody's. It ends before the first
    of them without room, so that a failover never lands on a full upstream.
    """
    at = names.index(first)
    chosen, slowly, badly = [first], [], []
    for name in (*names[at + 1 :], *names[:at]):
        allowed = allows(name)
        if not allowed and not slow(name):
            continue
        if not fits(name):
            badly.append(name)
        elif not allowed:
            slowly.append(name)
        elif has_room(name):
            chosen.append(name)
        else:
            return tuple(chosen)
    return (*chosen, *takewhile(has_room, (*slowly, *badly)))


def priorities(
    upstreams: Mapping[str, Upstream], names: Sequence[str], endpoint: Endpoint, below: int
) -> dict[str, int] | None:
    """Engine priority for each of `names` that wants one; None where the body may keep what the client wrote.

    below: how many lanes rank below the request's. Wherever one of them could be an engine the client's own priority
    has to go, or a client would rank itself: then the answer is a mapping, even if an empty one. No engine reads a
    priority from Anthropic's API.
    """
    if KNOW_PRIORITIES.isdisjoint([upstreams[name].provider for name in names]):
        return None
    if endpoint.dialect is not Dialect.OPENAI:
        return {}
    signs = ((name, upstreams[name].engine_priority) for name in names)
    return {name: sign * PRIORITY_STEP * below for name, sign in signs if sign is not None}


def limits_of(upstream: Upstream, model: str) -> list[Limit]:
    """The limits that count `model`: those that name it (by public or own name), else those for any model."""
    names = (model, upstream.own_name(model))
    exact = [limit for limit in upstream.limits if limit.model in names]
    return exact or [limit for limit in upstream.limits if limit.model == "*"]


def bucket_key(upstream: str, limit: Limit) -> str:
    """Name of a limit's bucket among all that is counted."""
    return f"upstream/{upstream}/{limit.model}/{limit.kind}"


def reserve_of(upstream: Upstream, kind: Kind) -> float:
    """Share of a bucket of `kind` that is for the best lane alone: of tokens, what `burn` leaves."""
    return 0.0 if upstream.burn is None or kind is Kind.REQUESTS else 1.0 - upstream.burn


def slots_key(upstream: str) -> str:
    """Name of an upstream's concurrent slots among all that is counted."""
    return f"upstream/{upstream}/slots"


def breaker_key(upstream: str) -> str:
    """Name of an upstream's breaker, beside those of its counters."""
    return f"upstream/{upstream}/breaker"


def out_key(upstream: str) -> str:
    """Name of an upstream's being out of use, by an operator's word."""
    return f"upstream/{upstream}/out"


def paused_key(lane: str) -> str:
    """Name of a lane's being paused."""
    return f"lane/{lane}/paused"


def kv_key(upstream: str) -> str:
    """Name of the room in an engine's KV cache among all that is counted."""
    return f"upstream/{upstream}/kv"


def _sieved(
    policy: Policy, route: Route, dialect: Dialect, pin: str | None, needs: frozenset[Ability]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Who of the chain knows the state it builds on, who of those speaks the dialect, and who of those can do it."""
    known = route.chain if pin is None else tuple(name for name in route.chain if name == pin)
    speaking = tuple([name for name in known if dialect in policy.upstreams[name].dialects])
    return known, speaking, tuple([name for name in speaking if not needs & policy.upstreams[name].lacks])


def _large_enough(
    policy: Policy, names: tuple[str, ...], model: str, size: Size, sizes: Mapping[str, Size]
) -> tuple[str, ...]:
    return tuple([name for name in names if holds(policy.upstreams[name], model, sizes.get(name, size))])


@lru_cache(maxsize=4096)
def _counters(upstream: Upstream, model: str) -> tuple[str, tuple[tuple[str, Kind], ...]]:
    buckets = tuple((bucket_key(upstream.name, limit), limit.kind) for limit in limits_of(upstream, model))
    return slots_key(upstream.name), buckets


def _enforced(upstream: Upstream, model: str) -> Iterator[Limit]:
    """The limits that a request has to fit into; those in shadow mode stop nobody."""
    return (limit for limit in limits_of(upstream, model) if not limit.shadow)


def _output_room(upstream: Upstream, model: str, prompt: int) -> float:
    room = inf if upstream.window is None else upstream.window - prompt
    for limit in _enforced(upstream, model):
        if limit.kind is Kind.TOTAL:
            room = min(room, limit.per_minute - prompt)
        elif limit.kind is Kind.OUTPUT:
            room = min(room, limit.per_minute)
    return room


@lru_cache(maxsize=4096)
def surely_held(upstream: Upstream, model: str) -> float:
    """Tokens up to which any request fits, whatever they are of."""
    limits = (limit.per_minute for limit in _enforced(upstream, model) if limit.kind is not Kind.REQUESTS)
    return min((inf if upstream.window is None else upstream.window, *limits))
