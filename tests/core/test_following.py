"""Other rules for what is there already: counters, lanes and who waits in them, breakers, pacers, what was learned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf

import pytest

from extproc.core.alarms import Alarms
from extproc.core.breaker import Breaker, Evidence, Outcome, Signal, State
from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget
from extproc.core.capacity import Adopt, Claim, Counter, Declare, Forget, Retire, Seats, Store, Tuning, tune
from extproc.core.lanes import Lanes
from extproc.core.lines import Group, Waiter
from extproc.core.outputs import Outputs
from extproc.core.pacing import Brakes, Pacer, Reported, Rules
from extproc.core.policy import (
    Bounds,
    BreakerRules,
    KvRules,
    Lane,
    Order,
    RatioRules,
    RetryRules,
    SessionLimits,
    SlowRules,
    Tenant,
    WhenBusy,
)  # fmt: skip
from extproc.core.quota import Accounts, account_of
from extproc.core.retries import RetryBudget
from extproc.core.session import Known, Sessions
from extproc.core.shares import Terms
from extproc.core.watermark import Reading, Watermark
from tests.doubles import request

NOW = 1000.0
WIDE = Bounds()
GROUP, OTHER = Group(("a",), frozenset({"a"})), Group(("b",), frozenset({"b"}))


def lane(name: str, rank: int, **rules: object) -> Lane:
    usual = {"max_requests": 1000, "max_tokens": 10**9, "max_bytes": 10**9}
    return Lane(name, rank, 30, WhenBusy.HOLD, 1, **{**usual, **rules})  # type: ignore[arg-type]


def nobody(_: str) -> Tenant | None:
    return None


# Counters.


@pytest.mark.parametrize(
    ("before", "rules", "after"),
    [
        (
            TokenBucket(1.0, 100.0, 80.0, NOW),
            TokenBucket(2.0, 50.0, 7.0, NOW, shadow=True, reserve=0.2),
            (2.0, 50.0, 50.0, True, 0.2),
        ),
        (TokenBucket(1.0, 100.0, -5.0, NOW), TokenBucket(2.0, 500.0, 7.0, NOW), (2.0, 500.0, -5.0, False, 0.0)),
    ],
)
def test_a_bucket_keeps_its_level_as_far_as_it_fits(
    before: TokenBucket, rules: TokenBucket, after: tuple[object, ...]
) -> None:
    """Debts included; rate, size, shadow and reserve are new."""
    tune(store := {"k": before}, [Adopt("k", rules)], NOW)
    assert store["k"] is before
    assert (before.rate, before.capacity, before.level, before.shadow, before.reserve) == after


def test_slots_and_budgets_keep_what_is_taken_also_above_the_limit() -> None:
    """Nothing more is taken then, until it is back below."""
    store: Store = {"s": Slots(9.0, 5.0), "b": Budget(9.0, used=5.0, at=NOW)}
    tune(store, [Adopt("s", Slots(3.0, shadow=True)), Adopt("b", Budget(3.0, at=NOW, shadow=True))], NOW)
    for counter in store.values():
        assert isinstance(counter, Slots | Budget)
        assert (counter.used, counter.limit, counter.shadow) == (5.0, 3.0, True)
        assert counter.wait_for(1.0, NOW) == inf


def test_marks_of_a_cache_shut_and_open_anew() -> None:
    """By what the engine said last and what is held, whatever the former marks made of it."""
    counter = Watermark(KvRules(high=0.8, low=0.7))
    counter.observe(Reading(0.75, tokens=1000.0, running=3), NOW)
    store: Store = {"k": counter}
    assert counter.wait_for(10, NOW) == 0
    tune(store, [Adopt("k", Watermark(KvRules(high=0.6, low=0.5, tokens=2000, shadow=True)))], NOW)
    assert (counter.shut, counter.cache, counter.shadow) == ({(0.6, 0.5)}, 2000.0, True)
    assert counter.wait_for(10, NOW) > 0
    tune(store, [Adopt("k", Watermark(KvRules(high=0.9, low=0.8)))], NOW)
    assert (counter.shut, counter.cache, counter.wait_for(10, NOW)) == (set(), 1000.0, 0)


def test_what_is_not_counted_yet_is_from_then_on_and_another_kind_is_left_alone() -> None:
    """As of any tuning that means another kind of counter."""
    store: Store = {"k": Slots(1.0, 1.0)}
    bucket = TokenBucket(1.0, 1.0, 1.0, NOW)
    tune(store, [Adopt("k", bucket), Adopt("new", bucket)], NOW)
    assert store == {"k": Slots(1.0, 1.0), "new": bucket}


@pytest.mark.parametrize("counter", [Slots(1.0, 1.0), TokenBucket(1.0, 5.0, -3.0, NOW), Budget(1.0, used=2.0, at=NOW)])
def test_a_retired_counter_refuses_nobody_and_goes_on_counting(counter: Counter) -> None:
    """So that what is given back later is what was taken, if it is ever in force again. A pause is over, too."""
    counter.closed_until = inf
    moves: Iterable[Tuning] = [Retire("k"), Retire("unknown")]
    tune(store := {"k": counter}, moves, NOW)
    assert (counter.shadow, counter.closed_until, list(store)) == (True, -inf, ["k"])


def test_a_retired_counter_that_is_declared_anew_counts_again() -> None:
    """By the new rules, with what is taken of it; and it is not forgotten for having been retired once."""
    store: Store = {"s": Slots(3.0, 2.0), "t": Slots(3.0, 2.0), "u": Slots(3.0, 2.0)}
    tune(store, [Retire("s"), Retire("t"), Declare("s", Slots(4.0)), Declare("u", Slots(4.0))], NOW)
    tune(store, [Forget(key, retired=True) for key in ("s", "t", "unknown")], NOW)
    assert store == {"s": Slots(4.0, 2.0), "u": Slots(3.0, 2.0)}


# Lanes.


class Line:
    """Lanes, and who comes."""

    def __init__(self, *rules: Lane) -> None:
        self.lanes = Lanes(rules)
        self.count = 0

    def come(self, tenant: str = "x", lane: str = "P1", group: Group = GROUP, **about: object) -> Waiter:
        self.count += 1
        usual = {"ticket": f"{self.count}", "arrived": float(self.count), "wait_until": 1000.0 - self.count}
        one = Waiter(request(tenant=tenant, lane=lane, **{**usual, **about}), group, self.count)
        self.lanes.join(one)
        return one

    def order(self) -> list[int]:
        """Everybody, in turn."""
        waiters = list(self.lanes.waiters())
        found = []
        while heads := self.lanes.heads():
            head = heads[0][0]
            found.append(head.seq)
            self.lanes.leave(head)
        for waiter in waiters:
            self.lanes.join(waiter)
        return found

    def follow(self, *rules: Lane, bounds: Bounds = WIDE, tenant_of: Callable[[str], Tenant | None] = nobody) -> None:
        self.lanes.follow(rules, bounds, tenant_of)


def test_lanes_come_go_and_change_their_rank_with_those_who_wait() -> None:
    """Who waits in one goes where it ranks now."""
    line = Line(lane("P0", 0), lane("P1", 1))
    for name in ("P1", "P0"):
        line.come(lane=name)
    assert line.order() == [2, 1]
    line.follow(lane("P0", 2), lane("new", 0), lane("P1", 1))
    line.come(lane="new")
    assert line.order() == [3, 1, 2]
    assert (list(line.lanes.rules), list(line.lanes.backlogs)) == (["new", "P1", "P0"], ["new", "P1", "P0"])


def test_another_order_holds_for_those_who_wait() -> None:
    """First come, earliest deadline, or the newest; those who have left are not among them."""
    line = Line(lane("P1", 0))
    waiters = [line.come() for _ in range(4)]
    line.lanes.leave(waiters[1])
    assert line.order() == [1, 3, 4]
    line.follow(lane("P1", 0, order=Order.EDF))
    assert line.order() == [4, 3, 1]
    line.follow(lane("P1", 0, max_requests=3, lifo_above=0.5))
    [queue] = line.lanes.queues.values()
    assert (queue.lifo, line.lanes.heads()[0][0].seq) == (True, 4)
    line.come()
    assert line.lanes.heads()[0][0].seq == 5
    line.follow(lane("P1", 0, max_requests=4, lifo_above=0.9))
    assert queue.lifo, "it is as full as before"
    line.follow(lane("P1", 0))
    assert (queue.lifo, line.order()) == (False, [1, 3, 4, 5])


def test_bounds_below_what_waits_hold_for_who_comes() -> None:
    """One in, that one out; as it empties the new bound comes into force. A change of group is no leaving."""
    line = Line(lane("P1", 0), lane("P2", 1))
    waiters = [line.come() for _ in range(6)]
    line.follow(lane("P1", 0, max_requests=2), lane("P2", 1))
    queue = line.lanes.queues["P1"]
    assert queue.spared == {"max_requests": 6}
    newcomer = line.come()
    assert line.lanes.shed(newcomer, WIDE, 1.0) is newcomer
    line.lanes.leave(newcomer)
    assert line.lanes.shed(waiters[0], WIDE, 1.0) is None, "who waits is within it"
    line.lanes.regroup(waiters[0], OTHER)
    assert queue.spared == {"max_requests": 6}
    for gone in waiters[:3]:
        line.lanes.leave(gone)
    assert queue.spared == {"max_requests": 3}
    for gone in waiters[3:]:
        line.lanes.leave(gone)
    assert queue.spared == {}
    for _ in range(3):
        newcomer = line.come()
    assert line.lanes.shed(newcomer, WIDE, 1.0) is newcomer


def test_the_bounds_of_all_lanes_do_so_too() -> None:
    """Counted over all of them."""
    line = Line(lane("P1", 0), lane("P2", 1))
    waiters = [line.come(lane=name) for name in ("P1", "P2", "P2")]
    few = Bounds(max_requests=1)
    line.follow(lane("P1", 0), lane("P2", 1), bounds=few)
    assert line.lanes.spared == {"max_requests": 3}
    assert line.lanes.shed(waiters[0], few, 1.0) is None
    newcomer = line.come()
    assert line.lanes.shed(newcomer, few, 1.0) is waiters[2]
    for one in (newcomer, *waiters):
        line.lanes.leave(one)
    assert line.lanes.spared == {}


def test_a_tenant_in_line_gets_another_weight_and_another_rank() -> None:
    """It keeps its counter, and the sums of VIPs and weights are right; others are not touched."""
    line = Line(lane("P1", 0, vip_share=0.9))
    for tenant in "xyz" * 2:
        line.come(tenant, vip=tenant == "x")
    rules = {
        "x": Tenant("x", (), "", weight=3.0), "y": Tenant("y", (), "", vip=True), "z": Tenant("z", (), "")
    }  # fmt: skip
    [queue] = line.lanes.queues.values()
    assert line.lanes.heads()[0][0].seq == 1
    line.follow(lane("P1", 0, vip_share=0.9), tenant_of=rules.get)
    assert line.lanes.heads()[0][0].seq == 2
    assert (queue.vips.requests, queue.vips.tokens, queue.vips.cost) == (2, 200, pytest.approx(280))
    assert queue._weights == pytest.approx(5.0)
    line.follow(lane("P1", 0), tenant_of=nobody)
    assert queue._weights == pytest.approx(5.0)
    while heads := line.lanes.heads():
        line.lanes.serve(heads[0][0])
    assert (len(line.lanes), queue.vips.requests) == (0, 0)


# Breakers.


def fails(breaker: Breaker, times: int, now: float = NOW, **evidence: object) -> None:
    for _ in range(times):
        breaker.record(Outcome.FAILURE, began=now, now=now, chance=0.0, evidence=Evidence(**evidence))  # type: ignore[arg-type]


def test_a_breaker_that_rests_goes_on_resting_by_the_rest_that_began() -> None:
    """And counts by the new rules afterwards."""
    breaker = Breaker(BreakerRules(cool_down_s=50, cool_down_max_s=500))
    breaker.move(Signal.TRIP, now=NOW, chance=0.0)
    breaker.follow(BreakerRules(failures=1, cool_down_s=1))
    assert (breaker.state, breaker.rests_until) == (State.OPEN, NOW + 50)
    breaker.move(Signal.RESET, now=NOW + 1, chance=0.0)
    fails(breaker, 1, NOW + 2)
    assert breaker.state is State.OPEN


def test_signs_are_turned_off_and_on() -> None:
    """What is counted over the same window goes on; what was usual stays known as long as it is asked for."""
    rules = BreakerRules(failures=None, errors=RatioRules(0.5, 30.0, 4), slow=SlowRules())
    breaker = Breaker(rules)
    fails(breaker, 3)
    tempo = breaker.tempo
    breaker.follow(replace(rules, slow=SlowRules(window_s=10.0)))
    assert breaker.tempo is tempo
    fails(breaker, 1)
    assert breaker.state is State.OPEN
    breaker.move(Signal.RESET, now=NOW, chance=0.0)
    breaker.follow(replace(rules, errors=None, slow=None))
    assert (breaker.errors, breaker.tempo) == (None, None)
    fails(breaker, 50)
    assert breaker.state is State.CLOSED
    breaker.follow(replace(rules, errors=RatioRules(0.5, 60.0, 2)))
    assert breaker.tempo is not None
    fails(breaker, 2)
    assert breaker.state is State.OPEN


def test_sizes_that_are_kept_away_return_when_nothing_is_to_be() -> None:
    """Else they rest on; other rules of it count anew over another window."""
    rules = BreakerRules(malformed=RatioRules(0.3, 300.0, 2))
    breaker = Breaker(rules)

    def broken(times: int) -> None:
        for _ in range(times):
            breaker.sizes.record(Evidence(prompt=5000, malformed=True), began=NOW + 1, now=NOW + 1, chance=0.0)

    broken(2)
    assert not breaker.sizes.fits(5000)
    breaker.follow(replace(rules, malformed=RatioRules(0.3, 100.0, 2)))
    assert not breaker.sizes.fits(5000)
    breaker.follow(replace(rules, malformed=None))
    assert breaker.sizes.fits(5000)
    broken(9)
    assert (breaker.sizes.fits(5000), breaker.sizes.rested(NOW + 2)) == (True, [])
    breaker.follow(rules)
    broken(2)
    assert not breaker.sizes.fits(5000)


# Pacing.


def followed(pacer: Pacer, **rules: float) -> TokenBucket | None:
    tunings = pacer.follow(Rules(**rules), NOW)  # type: ignore[arg-type]
    if not tunings:
        return None
    [tuning] = tunings
    assert isinstance(tuning, Adopt)
    assert isinstance(tuning.counter, TokenBucket)
    return tuning.counter


def test_what_the_provider_said_holds_beside_new_limits_of_ours() -> None:
    """The smaller of both, also where ours were the smaller ones before."""
    pacer = Pacer("k", Rules(100.0, 1000.0))
    seen = Reported("tokens", limit=3000.0, remaining=3000.0)
    pacer.told(seen, NOW - 1, NOW - 0.5, 500.0, NOW)
    for rate, holds in ((200.0, 47.5), (10.0, 10.0), (200.0, 47.5)):
        found = followed(pacer, rate=rate, capacity=10 * rate, reserve=0.1)
        assert found is not None
        assert (found.rate, found.capacity, found.reserve) == (pytest.approx(holds), pytest.approx(10 * holds), 0.1)


def test_a_limit_that_is_to_be_learned_counts_from_what_was_said() -> None:
    """And nothing where nothing was, as one of ours that is given counts at once."""
    pacer = Pacer("k", Rules())
    assert followed(pacer) is None
    found = followed(pacer, rate=5.0, capacity=50.0)
    assert found is not None
    assert (found.rate, found.capacity) == (5.0, 50.0)
    assert followed(pacer, rate=inf, capacity=inf) is None
    pacer.told(Reported("tokens", limit=600.0, remaining=600.0), NOW - 1, NOW - 0.5, None, NOW)
    found = followed(pacer, rate=inf, capacity=inf)
    assert found is not None
    assert found.rate == pytest.approx(9.5)


def test_slots_follow_as_far_as_a_brake_lets_them() -> None:
    """A number of them, any number, and a part while they are held back."""
    brakes = Brakes("k", 10.0)
    assert brakes.follow(20.0) == Seats("k", 20.0)
    brakes.hold_back(0.5, "test")
    assert brakes.follow(8.0) == Seats("k", 4.0)
    assert brakes.follow(inf) == Seats("k", inf)
    assert brakes.hold_back(1.0, "test") == []


# What was learned and what is remembered.


def test_lengths_of_answers_are_known_on() -> None:
    """Only what nothing is known of is another prior."""
    outputs = Outputs(0.95, 512)
    for _ in range(20):
        outputs.learn("x", "m", 100, capped=False)
    outputs.follow(0.5, 9)
    assert (outputs.usual("x", "m"), outputs.usual("x", "other")) == (100, 9)


def test_budgets_of_retries_have_what_they_had() -> None:
    """Within the new bound of what is saved up."""
    budget = RetryBudget(RetryRules(share=0.0, least_per_s=1.0))
    assert [budget.spend("x", NOW) for _ in range(10)] == [0.0] * 10
    budget.follow(RetryRules(share=0.0, least_per_s=0.2))
    assert budget.spend("x", NOW) == pytest.approx(5.0)
    assert [budget.spend("x", NOW + 1000) == 0.0 for _ in range(3)] == [True, True, False]


def test_alarms_tell_nothing_twice() -> None:
    """A budget that is watched on; one that is watched anew is told."""
    store: Store = {name: Budget(10.0, used=9.0, at=NOW) for name in "abc"}
    alarms = Alarms("ab")
    assert [key for key, _ in alarms.look(store, NOW)] == ["a", "b"]
    alarms.follow("bc")
    assert [key for key, _ in alarms.look(store, NOW)] == ["c"]


def test_tenants_that_nobody_listed_follow_with_their_accounts() -> None:
    """But for those that are listed by now; where nothing is limited any more none is kept."""
    accounts = Accounts(Tenant("*", (), "", rpm=5), 10)
    first, _ = accounts.hear("one", lambda _: True)
    second, _ = accounts.hear("two", lambda _: True)
    assert accounts.accounts == [first, second]
    assert accounts.follow(Tenant("*", (), "", concurrency=2, tpm=7), {"two"}) == [first]
    assert [accounts.knows(each) for each in (first, second)] == [True, False]
    first.follow(Tenant("one", (), "", concurrency=2, tpm=7))
    assert (first.claims(3.0, None), first.rules.name) == (account_of(first.rules).claims(3.0, None), "one")
    assert [claim.key for claim in first.claims(3.0, None)] == ["tenant/one/slots", "tenant/one/total"]
    assert accounts.follow(Tenant("*", (), "", concurrency=2, tpm=7), {"three"}) == [], "nothing differs"
    assert accounts.follow(Tenant("*", (), ""), ()) == [first]
    assert (accounts.knows(first), len(accounts)) == (False, 0)


def test_sessions_follow_with_what_was_added() -> None:
    """Where a limit is new nothing was added; one that is gone is none."""
    limits = SessionLimits(max_tokens=100)
    sessions = Sessions(10)
    known, _ = sessions.hear("x", "s", limits, NOW)
    same, _ = sessions.hear("y", "s", limits, NOW)
    assert known.max_tokens is not None
    known.max_tokens += 50
    more = SessionLimits(max_tokens=200, max_usd=3.0)
    other, _ = sessions.hear("x", "t", limits, NOW)
    found = sessions.follow(5, {"x": more, "y": limits}.__getitem__)
    assert found == [(known, more), (other, more)]
    known.follow(more)
    other.follow(more)
    assert other.max_tokens == 200
    assert (known.max_tokens, known.max_usd, same.max_tokens) == (250, 3.0, 100)
    assert known.claims(1.0, 2.0) == [Claim("session/x/s/tokens", 1.0), Claim("session/x/s/usd", 2.0)]
    for one, none in sessions.follow(5, lambda _: SessionLimits()):
        one.follow(none)
    assert sessions.knows(known)
    assert not any(map(sessions.knows, (Known("x", "s", limits, NOW), Known("z", "s", limits, NOW))))
    assert (known.max_tokens, known.keys, same.keys) == (None, (), ())


def test_who_owes_a_share_is_told_by_the_new_terms() -> None:
    """A lane's standing at a counter stays when the counter is resized, as far as it fits."""
    bucket = TokenBucket(10.0, 100.0, 0.0, NOW)
    terms = Terms("P1", 1, 0.5)
    bucket.refused(80.0, NOW, terms, short=True)
    tune({"k": bucket}, [Adopt("k", TokenBucket(10.0, 20.0, 0.0, NOW))], NOW + 1)
    assert bucket.lanes["P1"].need == 20.0
    assert bucket.owed(NOW + 1) == {"P1": pytest.approx(5.0)}
