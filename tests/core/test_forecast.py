"""How long a wait would be."""

from __future__ import annotations

from itertools import count
from math import inf
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.core.bucket import Slots, TokenBucket
from extproc.core.budget import Budget
from extproc.core.capacity import Claim, Counter, Store
from extproc.core.curve import Curve
from extproc.core.forecast import LONG_S, SHORT_S, Demand, Forecast, Pace, Served
from extproc.core.lanes import Lanes
from extproc.core.lines import Group, Waiter
from extproc.core.policy import KvRules, Lane, Order, Pacing, WhenBusy
from extproc.core.promises import Promises
from extproc.core.request import Size
from extproc.core.watermark import Reading, Watermark
from tests.doubles import request

USUAL = Size(80, 20)


def lane(rank: int, **more: Any) -> Lane:
    return Lane(f"P{rank}", rank, 30, WhenBusy.SPILL, 1, 10**6, 10**9, 10**9, **more)


def test_dollars_are_no_wait() -> None:
    """They come back with a period, not with time: who lacks them is not kept in line for them."""
    scene = Scene(keys=("k/usd_hour",))
    claim = (Claim("k/usd_hour", 5.0),)
    assert scene.forecast.wait_s(scene.waiter(), ["a"], {"a": claim}, {"k/usd_hour": Budget(1.0)}, 0.0) == 0


class Scene:
    """Lanes, promises and what has been learned, at time 0; everybody wants all of `keys` at the upstream `a`."""

    def __init__(self, *lanes: Lane, keys: tuple[str, ...] = ("k/total",)) -> None:
        self.lanes = Lanes(lanes or (lane(0), lane(1), lane(2)))
        self.promises = Promises()
        self.pace = Pace()
        self.sick: set[str] = set()
        self.forecast = Forecast(self.lanes, self.promises, self.pace, lambda name: name not in self.sick)
        self.group = Group(("a",), frozenset(keys))
        self.numbers = count()

    def waiter(self, size: Size = USUAL, since: float = -inf, before: float = inf, **changes: Any) -> Waiter:
        """Somebody who has just come."""
        number = next(self.numbers)
        one = {"lane": "P1", "ticket": str(number), "arrived": number * 1e-6, "size": size, "weight": 1.0, **changes}
        return Waiter(request(**one), self.group, number, since, before)

    def join(self, *sizes: Size, group: Group | None = None, **changes: Any) -> list[Waiter]:
        """Some more in line."""
        joined = []
        for size in sizes:
            joined.append(self.waiter(size, **changes))
            joined[-1].group = group or self.group
            self.lanes.join(joined[-1])
        return joined

    def promise(self, turn_s: float, size: Size = USUAL, **changes: Any) -> None:
        """Somebody who was told to come back a second before its turn."""
        one = self.waiter(size, fingerprint=f"f{next(self.numbers)}", **changes).request
        self.promises.make(one, self.group, one.arrived, 0.0, max(0.5, turn_s - 1), turn_s)

    def wait(self, counter: Counter, key: str = "k/total", amount: float = 100.0, **changes: Any) -> float:
        """Forecast for a newcomer who claims so much of this."""
        return self.wait_of(self.waiter(**changes), {key: counter}, Claim(key, amount))

    def wait_of(self, waiter: Waiter, store: Store, *claims: Claim) -> float:
        return self.forecast.wait_s(waiter, ["a"], {"a": claims}, store, 0.0)


def bucket(rate: float = 10, level: float = 0.0, capacity: float = 1000) -> TokenBucket:
    return TokenBucket(rate, capacity, level, 0.0)


@pytest.mark.parametrize(
    ("kind", "amount", "expected"),
    [("total", 100, 60), ("input", 100, 50), ("output", 100, 20), ("requests", 1, 0.6), ("slots", 1, 0)],
)
def test_a_bucket_waits_for_what_is_ahead_of_its_own_kind(kind: str, amount: float, expected: float) -> None:
    """Input is not held up by the output of others, nor requests by tokens. The bucket is empty and fills at 10/s."""
    key = f"upstream/a/m/{kind}"
    scene = Scene(keys=(key,))
    scene.join(*[USUAL] * 5)
    assert scene.wait(Slots(10) if kind == "slots" else bucket(), key, amount) == pytest.approx(expected)


@given(st.floats(1, 1000), st.floats(0, 500), st.lists(st.integers(1, 300), max_size=8), st.integers(1, 1000))
def test_the_forecast_of_a_bucket_is_when_the_last_in_line_gets_its_turn(
    rate: float, level: float, ahead: list[int], amount: int
) -> None:
    """Serving everybody ahead as early as possible, the last goes at the forecast time, or earlier by rounding."""
    scene, counter, now = Scene(), TokenBucket(rate, 500, level, 0.0), 0.0
    scene.join(*(Size(each, 0) for each in ahead))
    told = scene.wait(counter, amount=amount)
    for each in [*ahead, amount]:
        now += counter.wait_for(each, now)
        counter.change(-each, now)
    assert now == pytest.approx(told, abs=1e-2 * (len(ahead) + 1) / rate)


def test_slots_wait_as_long_as_those_ahead_hold_them() -> None:
    """Two slots, both taken, five ahead and 3 s each: the sixth gets its turn after 6 x 3 / 2 seconds."""
    scene = Scene(keys=("a/slots",))
    scene.join(*[USUAL] * 5)
    assert scene.wait(Slots(2, 2.0), "a/slots", 1) == 0, "nobody knows how long"
    scene.pace.learn_hold("a", 3)
    assert scene.wait(Slots(2, 2.0), "a/slots", 1) == pytest.approx(9)
    assert scene.wait(Slots(20, 2.0), "a/slots", 1) == 0
    assert scene.wait(Slots(inf, 2.0), "a/slots", 1) == 0
    assert scene.wait(Slots(0, 0.0), "a/slots", 1) == inf


@pytest.mark.parametrize("counter", [Slots(10), bucket(level=1000), bucket(level=500), Slots(inf)])
def test_a_pause_is_waited_for(counter: TokenBucket | Slots) -> None:
    """Whatever there is meanwhile."""
    scene = Scene()
    scene.join(*[USUAL] * 5)
    counter.closed_until = 20.0
    assert scene.wait(counter) == 20.0


def test_the_longest_claim_counts_and_what_is_not_counted_or_never_refuses_does_not() -> None:
    """A request waits for all it needs; unknown keys and limits in shadow mode are never waited for."""
    scene, shadow = Scene(), bucket()
    shadow.shadow = True
    scene.pace.learn_hold("a", 2.0)
    store = {"a/slots": Slots(1, 1.0), "a/total": bucket(), "b/total": shadow}
    wants = [Claim("a/slots", 1), Claim("a/total", 50), Claim("?", 9), Claim("b/total", 900)]
    for start, expected in [(0, 5), (2, 0)]:
        assert scene.wait_of(scene.waiter(), store, *wants[start:]) == expected
    assert scene.wait_of(scene.waiter(), store, wants[0]) == 2


def test_a_bucket_that_never_refills_is_an_infinite_wait() -> None:
    """Unless it holds enough for everybody ahead as well."""
    scene = Scene()
    scene.join(*[USUAL] * 5)
    assert scene.wait(bucket(0, 550), amount=51) == inf
    assert scene.wait(bucket(0, 551), amount=51) == 0


def test_what_better_lanes_hold_and_take_is_not_there_for_worse_ones() -> None:
    """Of 10 per second better lanes take 6: a wait for 50 is 50 / 4 seconds, and never longer than at 5 % of it."""
    scene = Scene()
    assert scene.wait(bucket(), amount=50) == pytest.approx(5)
    for second in range(300):
        scene.forecast.demand.note(0, [Claim("k/total", 6)], second - 300.0)
    assert scene.wait(bucket(), amount=50) == pytest.approx(12.5, rel=0.1)
    assert scene.wait(bucket(), amount=50, lane="P0") == pytest.approx(5)
    scene.join(Size(40, 0), lane="P0")
    scene.join(Size(900, 0), lane="P2")
    assert scene.wait(bucket(), amount=50) == pytest.approx(22.5, rel=0.1)
    for second in range(300):
        scene.forecast.demand.note(0, [Claim("k/total", 60)], second - 300.0)
    assert scene.wait(bucket(), amount=50) == pytest.approx(180)


def test_a_lane_counts_on_its_share_and_better_ones_leave_it_that() -> None:
    """A fifth of 10 per second for 40 + 60 of its own is 50 s, whatever better lanes hold, and a debt comes first."""
    scene = Scene(lane(0), lane(1, min_share=0.2))
    scene.join(*[Size(1000, 0)] * 9, lane="P0")
    scene.join(Size(40, 0))
    assert scene.wait(bucket(), amount=60) == pytest.approx(50)
    assert scene.wait(bucket(level=-30), amount=60) == pytest.approx(53)
    assert scene.wait(bucket(), amount=600, lane="P0") == pytest.approx(9600 / 8)
    other = Scene(lane(0), lane(1, min_share=0.2), keys=("other",))
    other.join(USUAL)
    assert other.wait(bucket(), amount=80, lane="P0") == pytest.approx(8), "what waits elsewhere is owed nothing here"


def test_what_a_lane_keeps_free_and_its_pace_are_not_there_for_it() -> None:
    """It leaves half of the bucket, and one that takes evenly has nothing of what is saved up in it."""
    scene = Scene(lane(0), lane(1, keep_free=0.5), lane(2, pacing=Pacing.SMOOTH))
    assert scene.wait(bucket(level=550)) == pytest.approx(5)
    assert scene.wait(bucket(), amount=5000) == pytest.approx(100), "a full bucket, less what it leaves, and the rest"
    scene.join(Size(300, 0), lane="P2")
    assert scene.wait(bucket(level=1000), lane="P2") == pytest.approx(30)
    assert scene.wait(Slots(9), lane="P2", amount=1) == 0


def test_a_cache_gives_what_it_was_seen_to_give() -> None:
    """Nobody knows at first; then 200 tokens ahead and 100 of its own at 50 a second."""
    scene = Scene(keys=("a/kv",))
    cache = Watermark(KvRules(tokens=1000))
    cache.take(820, -5.0)
    cache.observe(Reading(0.82, running=3), 0.0)
    scene.join(*[USUAL] * 2)
    assert scene.wait(cache, "a/kv", 100) == 0
    scene.forecast.served.looked(["a/kv"], -10.0)
    for second in range(10):
        scene.forecast.served.granted([Claim("a/kv", 50), Claim("other", 1)])
        scene.forecast.served.looked(["a/kv"], second - 9.0)
    assert scene.wait(cache, "a/kv", 100) == 0, "how long they hold it is not known"
    scene.pace.learn_hold("a", 100.0)
    assert scene.wait(cache, "a/kv", 100) == pytest.approx(6, rel=0.05)


def test_what_is_held_of_a_cache_comes_back_within_the_time_it_is_usually_held() -> None:
    """However little was seen to come of late; others' work tells nothing."""
    scene = Scene(keys=("a/kv",))
    cache = Watermark(KvRules(tokens=1000))
    cache.take(820, -5.0)
    cache.observe(Reading(0.82, running=3), 0.0)
    scene.pace.learn_hold("a", 4.1)
    scene.forecast.served.looked(["a/kv"], -10.0)
    scene.forecast.served.granted([Claim("a/kv", 1)])
    scene.forecast.served.looked(["a/kv"], 0.0)
    assert scene.wait(cache, "a/kv", 100) == pytest.approx(0.5, rel=0.05), "100 at 200 a second"
    cache.change(820, 0.0)
    assert scene.wait(cache, "a/kv", 100) == 0


def test_estimates_that_come_back_make_a_bucket_faster_than_its_refill() -> None:
    """It is seen to give 25 a second though it refills at 10. Slower than its refill it cannot be for long."""
    scene = Scene()
    for rate, expected in [(25, 4), (5, 10)]:
        scene.forecast.served = served = Served()
        for second in range(60):
            served.looked(["k/total"], second - 60.0)
            served.granted([Claim("k/total", rate)])
        served.looked([], 0.0)
        assert scene.wait(bucket()) == pytest.approx(expected, rel=0.05)


def test_nobody_has_seen_anything_in_a_moment() -> None:
    """A rate counts after two seconds of waiting, and only what was given while somebody waited for it."""
    served = Served()
    served.granted([Claim("k", 1000)])
    for second in range(3):
        served.looked(["k"], float(second))
        assert served.rate("k") is None
        served.granted([Claim("k", 10)])
    served.looked([], 3.0)
    assert served.rate("k") == pytest.approx(10, rel=0.05)
    served.granted([Claim("k", 1000)])
    assert served.rate("k") == pytest.approx(10, rel=0.05)


def test_upstreams_work_off_a_line_together() -> None:
    """Their rates add up; one of which nothing is known means no wait, one that never gives changes nothing."""
    scene = Scene()
    prices = {name: (Claim(name, 100.0),) for name in "abcd"}
    store: Store = {"a": bucket(10), "b": bucket(30), "c": bucket(0)}
    for names, expected in [("a", 10), ("ab", 2.5), ("ac", 10), ("c", inf), ("ad", 0), ("", inf)]:
        assert scene.forecast.wait_s(scene.waiter(), names, prices, store, 0.0) == pytest.approx(expected)


def test_only_what_goes_to_an_upstream_is_ahead_there() -> None:
    """Not what waits for another one, or for another model of it, and what holds only at its first healthy one."""
    scene = Scene()
    scene.join(USUAL, group=Group(("b",), frozenset({"k/total"})))
    scene.join(USUAL, group=Group(("a",), frozenset({"other"})))
    scene.join(USUAL, group=Group(("b", "a"), frozenset({"k/total"}), first_only=True))
    assert scene.wait(bucket()) == pytest.approx(10)
    scene.sick = {"b"}
    assert scene.wait(bucket()) == pytest.approx(20)


SIZES = st.builds(Size, st.integers(1, 300), st.integers(0, 100))


@given(
    backlogs=st.lists(st.tuples(st.lists(SIZES, min_size=1, max_size=8), st.sampled_from([1.0, 3.0])), max_size=5),
    own=st.lists(SIZES, max_size=4),
    size=SIZES,
)
@example(backlogs=[([Size(300, 0)] * 8, 1.0)], own=[], size=Size(1, 0))
def test_among_tenants_the_forecast_is_when_fairness_lets_it_go(
    backlogs: list[tuple[list[Size], float]], own: list[Size], size: Size
) -> None:
    """Whatever waits: served by the lanes themselves it goes within a request of each tenant of the time foretold."""
    scene, tokens_per_s = Scene(), 100.0
    for number, (sizes, weight) in enumerate(backlogs):
        scene.join(*sizes, tenant=f"t{number}", weight=weight)
    scene.join(*own, tenant="own")
    newcomer = scene.waiter(size, tenant="own")
    told = scene.wait_of(newcomer, {"k/total": bucket(tokens_per_s)}, Claim("k/total", size.total))
    scene.lanes.join(newcomer)
    served, head = 0, None
    while head is not newcomer:
        ((head, _),) = scene.lanes.heads()
        scene.lanes.serve(head)
        served += head.request.size.total
    largest = [max(one.total for one in sizes) for sizes, _ in backlogs]
    assert told * tokens_per_s == pytest.approx(served, abs=sum(largest) + 1)


def test_a_light_tenants_newcomer_does_not_wait_behind_a_heavy_ones_backlog() -> None:
    """A hundred of the heavy one wait; of them one or two go first. The heavy one's own newcomer is behind all."""
    scene = Scene()
    scene.join(*[USUAL] * 100, tenant="heavy")
    assert 10 <= scene.wait(bucket(), tenant="light") < 30
    assert scene.wait(bucket(), tenant="heavy") == pytest.approx(1010)


@pytest.mark.parametrize(
    ("share", "vip_waits", "other_waits"), [(0.2, 161, 81), (0.5, 161, 82), (0.8, 151, 161), (1.0, 121, 161)]
)
def test_vips_go_first_up_to_their_share(share: float, vip_waits: float, other_waits: float) -> None:
    """Twelve VIPs of 100 and four others of 100 wait. A newcomer of each kind; 10 a second."""
    scene = Scene(lane(1, vip_share=share))
    scene.join(*[Size(100, 0)] * 12, tenant="vip", vip=True)
    scene.join(*[Size(100, 0)] * 4, tenant="other")
    one = Size(10, 0)
    assert scene.wait(bucket(), amount=10, size=one, tenant="vip", vip=True) == pytest.approx(vip_waits, abs=11)
    assert scene.wait(bucket(), amount=10, size=one, tenant="other") == pytest.approx(other_waits, abs=11)


def test_vips_with_no_share_wait_as_others_do() -> None:
    """By their counters alone."""
    scene = Scene(lane(1, vip_share=0.0))
    scene.join(*[Size(100, 0)] * 8, tenant="other")
    assert scene.wait(bucket(), amount=10, tenant="vip", vip=True) < 20
    scene.join(*[Size(100, 0)] * 4, tenant="vip", vip=True)
    assert scene.wait(bucket(), amount=10, tenant="vip", vip=True) == pytest.approx(81, abs=11)


def test_who_goes_first_inside_its_tenant_waits_for_less() -> None:
    """By deadline, by an inherited place, or as the newest where the newest go first."""
    urgent = Scene(lane(1, order=Order.EDF))
    urgent.join(*[USUAL] * 9, wait_until=50.0)
    assert urgent.wait(bucket(), wait_until=60.0) == pytest.approx(100)
    assert urgent.wait(bucket(), wait_until=40.0) == pytest.approx(10)
    placed = Scene()
    placed.join(*[USUAL] * 9)
    early = placed.waiter(since=4.5e-6, before=0.0)
    assert placed.wait_of(early, {"k/total": bucket()}, Claim("k/total", 100)) == pytest.approx(60)
    newest = Scene(lane(1, lifo_above=1e-6))
    newest.join(*[USUAL] * 9)
    newest.promise(20)
    assert newest.wait(bucket()) == pytest.approx(10)


def test_who_stands_in_line_is_not_ahead_of_itself() -> None:
    """Whoever else wants the same."""
    for others in ([], ["x"], ["default"]):
        scene = Scene()
        for tenant in others:
            scene.join(USUAL, tenant=tenant)
        (one,) = scene.join(USUAL)
        told = scene.wait_of(one, {"k/total": bucket()}, Claim("k/total", 100))
        assert told == pytest.approx(10 + 10 * len(others), abs=6)


def test_its_place_in_line_is_behind_better_lanes_and_its_own_tenants_earlier_ones() -> None:
    """Of another tenant only what fairness serves before it counts, and nobody who wants other upstreams."""
    scene = Scene()
    names = ("a",)
    first, second = scene.join(USUAL, USUAL)
    assert [scene.forecast.place(one, names, 0.0) for one in (first, second, scene.waiter())] == [1, 2, 3]
    scene.join(USUAL, USUAL, USUAL, lane="P0")
    scene.join(*[USUAL] * 9, group=Group(("b",), frozenset({"b/total"})))
    scene.join(*[USUAL] * 9, lane="P2")
    assert [scene.forecast.place(one, names, 0.0) for one in (first, second)] == [4, 5]
    assert scene.forecast.place(scene.waiter(lane="P0", tenant="light"), names, 0.0) < 4
    assert scene.forecast.place(scene.waiter(), ("b",), 0.0) == 10
    assert scene.forecast.place(scene.waiter(), (), 0.0) == 1


def test_promises_that_come_before_its_turn_are_ahead_of_a_newcomer() -> None:
    """One after the other, but not those that are due after its own turn: there is time for it before them."""
    scene = Scene()
    for turn_s in (10, 20, 100):
        scene.promise(turn_s)
    assert scene.wait(bucket(), amount=50) == pytest.approx(5), "it is served before the first of them"
    assert scene.wait(bucket()) == pytest.approx(30), "10 s, and the two that are due within 20 s"
    scene.promise(5, lane="P0")
    scene.promise(5, lane="P2")
    assert scene.wait(bucket()) == pytest.approx(40), "those of a better lane, too, but of no worse one"
    for lane in ("P0", "P1"):
        for book, _ in scene.promises.booked(lane, 0.0):
            book.kept = 0.5
    assert scene.wait(bucket()) == pytest.approx(25, abs=5), "half of them do not come"


def test_who_comes_back_has_only_earlier_turns_before_it_as_far_as_they_come_in_time() -> None:
    """Its own place is before all that was promised later; of those that are due any time now a part comes in time."""
    scene = Scene()
    for turn_s in (1, 40):
        scene.promise(turn_s)
    back = scene.waiter(since=-5.0, before=30.0)
    told = scene.wait_of(back, {"k/total": bucket()}, Claim("k/total", 100))
    assert told == pytest.approx(20)
    same = scene.waiter(since=-5.0, before=1)
    assert scene.wait_of(same, {"k/total": bucket()}, Claim("k/total", 100)) == pytest.approx(15)


def test_a_light_tenant_does_not_wait_for_what_a_heavy_one_was_promised() -> None:
    """Of which as much goes first as would if it stood in line; its own promises go first as a whole."""
    scene = Scene()
    scene.join(*[USUAL] * 5, tenant="heavy")
    for turn_s in range(1, 20):
        scene.promise(turn_s, tenant="heavy")
    assert scene.wait(bucket(), tenant="heavy") == pytest.approx(250)
    assert scene.wait(bucket(), tenant="light") < 30
    for turn_s in (1, 2):
        scene.promise(turn_s, tenant="light")
    assert scene.wait(bucket(), tenant="light") == pytest.approx(60, abs=20)
    scene.promise(1, tenant="absent", weight=2.0)
    assert scene.wait(bucket(), tenant="light") == pytest.approx(70, abs=20)


@pytest.mark.parametrize(
    ("predicted", "room", "expected"), [(100, 1.0, 89.5), (20, 1.0, 20 / 1.125 - 5.25), (100, 0.05, 95), (3, 1.0, 0)]
)
def test_one_comes_back_shortly_before_its_turn_and_when_there_is_room(
    predicted: float, room: float, expected: float
) -> None:
    """A third of its patience of 30 s earlier, since it comes up to a quarter late; or when the line has moved on."""
    one = request(arrived=0.0, wait_until=30.0)
    assert Scene().forecast.comeback_s(one, predicted, room) == pytest.approx(expected, abs=0.1)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 100), st.floats(0, 50)), max_size=8), st.floats(-10, 250))
def test_a_curve_is_the_sum_of_its_tenants(spans: list[tuple[float, float, float]], counter: float) -> None:
    """Each of them from nothing where it starts to all of its work where it ends."""
    curve = Curve((start, start + width, work) for start, width, work in spans)
    done = sum(work * min(1.0, max(0.0, (counter - start) / width)) for start, width, work in spans)
    assert curve.total == pytest.approx(sum(work for *_, work in spans))
    assert curve.share(counter) * curve.total == pytest.approx(done, abs=1e-6)


def test_a_curve_is_kept_until_an_eighth_of_its_tenants_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a forecast among a thousand tenants costs what one among ten does."""
    scene, drawn = Scene(), []
    monkeypatch.setattr("extproc.core.forecast.Curve", lambda spans: drawn.append(1) or Curve(spans))
    for number in range(80):
        scene.join(USUAL, tenant=f"t{number}")
    for number in range(40):
        scene.join(USUAL, tenant=f"t{number}")
        scene.wait(bucket(), tenant="new")
    assert len(drawn) <= 2 * 5
    scene.join(USUAL, tenant="vip", vip=True)
    assert scene.wait(bucket(), tenant="new") > 0, "a first VIP is not in the curve yet"
    assert len(drawn) <= 2 * 5


def test_demand_is_what_better_lanes_took_lately() -> None:
    """A steady 6 per second is known as such by the lanes below, not by the lane itself, and is soon forgotten."""
    demand, end = Demand(), 4 * LONG_S
    for second in range(int(end) + 1):
        demand.note(0, [Claim("a/total", 6)], float(second))
    assert demand.above("a/total", 1, end) == pytest.approx(6, rel=0.15)
    assert demand.above("a/total", 2, end) == demand.above("a/total", 1, end)
    assert demand.above("a/total", 0, end) == 0
    assert demand.above("b/total", 1, end) == 0
    assert demand.above("a/total", 1, end + 6 * SHORT_S) < 0.03


def test_vips_who_are_yet_to_come_go_before_others_of_their_lane() -> None:
    """Of 10 per second VIPs of the lane take 4, so a wait for 60 is 10 s; never more than their share, nor all."""
    for share, expected in [(0.8, 10), (0.2, 7.5), (1.0, 10)]:
        scene = Scene(lane(0), lane(1, vip_share=share))
        for second in range(300):
            scene.forecast.demand.note(1, [Claim("k/total", 4)], second - 300.0, vip=True)
            scene.forecast.demand.note(1, [Claim("k/total", 4)], second - 300.0)
        assert scene.wait(bucket(), amount=60) == pytest.approx(expected, rel=0.1)
        assert scene.wait(bucket(), amount=60, vip=True) == pytest.approx(6)
        assert scene.wait(bucket(), amount=60, lane="P0") == pytest.approx(6)
        assert scene.wait(bucket(rate=0), amount=60) == inf


def test_what_is_taken_at_once_is_summed_as_what_is_taken_bit_by_bit() -> None:
    """A hundred grants within a moment are remembered as one of them all."""
    one, many = Demand(), Demand()
    one.note(0, [Claim("k", 100)], 0.0)
    for number in range(100):
        many.note(0, [Claim("k", 1)], number * 0.0005)
    for later in (0.0, 1.0, 10.0):
        assert many.above("k", 1, later) == pytest.approx(one.above("k", 1, later), rel=0.02)


def test_a_burst_is_not_taken_for_a_habit() -> None:
    """What came at once counts as spread over the long memory, so that one burst does not refuse everybody below."""
    demand = Demand()
    demand.note(0, [Claim("a/total", 6000)], 0.0)
    assert demand.above("a/total", 1, 0.0) == pytest.approx(6000 / LONG_S)


def test_pace_learns_a_moving_average_and_knows_nothing_at_first() -> None:
    """Unknown is 0, so that it refuses nobody; the first value counts whole, later ones a tenth."""
    pace = Pace()
    assert (pace.hold_s("a"), pace.output_s("m", 100)) == (0, 0)
    pace.learn_hold("a", 10)
    pace.learn_hold("a", 20)
    assert pace.hold_s("a") == pytest.approx(11)
    pace.learn_output("m", 2.0, 100)
    assert pace.output_s("m", 50) == pytest.approx(1.0)


@pytest.mark.parametrize(("seconds", "tokens"), [(0.0, 5), (-1.0, 5), (1.0, 0)])
def test_pace_learns_nothing_from_nonsense(seconds: float, tokens: int) -> None:
    """No tokens or no time say nothing about speed."""
    pace = Pace()
    pace.learn_output("m", seconds, tokens)
    assert pace.output_s("m", 100) == 0


def test_pace_forgets_the_names_it_has_not_heard_of_for_longest() -> None:
    """Its memory is bounded."""
    pace = Pace(limit=2)
    for name in ("a", "b", "a", "c"):
        pace.learn_hold(name, 5)
    assert [pace.hold_s(name) for name in "abc"] == [5, 0, 5]
