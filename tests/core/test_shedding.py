"""Who has to go when a lane, or all of them together, hold too much."""

from __future__ import annotations

import random
from typing import Any

import pytest

from extproc.core.lanes import Lanes
from extproc.core.lines import Backlog, Group, Waiter
from extproc.core.policy import Bounds, Lane, WhenBusy
from extproc.core.request import Size
from tests.doubles import request

GROUPS = [Group((name,), frozenset({f"{name}/slots"})) for name in "ab"]
PLENTY = {"max_requests": 100_000, "max_tokens": 10**9, "max_bytes": 10**9}
UNITS = {"max_requests": "requests", "max_tokens": "tokens", "max_bytes": "bytes"}
WIDE = Bounds(**PLENTY)


def lanes_of(**changes: Any) -> Lanes:
    """P1 with these bounds, P0 and P2 without any to speak of."""
    ranks = {"P0": 0, "P1": 1, "P2": 2}
    return Lanes(
        Lane(name, rank, 30, WhenBusy.HOLD, 1, **(PLENTY | (changes if name == "P1" else {})))
        for name, rank in ranks.items()
    )


class Room:
    """Lanes that are told of newcomers, and who is shed for them."""

    def __init__(self, bounds: Bounds = WIDE, new_share: float = 1.0, **changes: Any) -> None:
        self.lanes = lanes_of(**changes)
        self.bounds = bounds
        self.new_share = new_share
        self.promised = Backlog()
        self.waiting: list[Waiter] = []
        self.seq = 0

    def come(self, tenant: str = "a", *, since: float | None = None, group: int = 0, **changes: Any) -> Waiter:
        """One more stands in line, a second after the one before."""
        self.seq += 1
        wish = request(tenant=tenant, ticket=str(self.seq), **({"arrived": float(self.seq)} | changes))
        one = Waiter(wish, GROUPS[group], self.seq, wish.arrived if since is None else since)
        self.lanes.join(one)
        self.waiting.append(one)
        return one

    def shed(self, newcomer: Waiter) -> list[int]:
        """Everybody who has to go, one after the other, until there is room."""
        gone = []
        while victim := self.lanes.shed(newcomer, self.bounds, self.new_share, self.promised):
            self.lanes.leave(victim)
            self.waiting.remove(victim)
            gone.append(victim.seq)
            if victim is newcomer:
                break
        return gone

    def arrive(self, tenant: str = "a", **changes: Any) -> list[int]:
        """Come, and see who goes."""
        return self.shed(self.come(tenant, **changes))


@pytest.mark.parametrize(("bound", "most"), [("max_requests", 3), ("max_tokens", 300), ("max_bytes", 30)])
def test_a_lane_holds_exactly_its_bound(bound: str, most: int) -> None:
    """Of requests, tokens, or bytes: three of one, and the fourth has to go; a leaver makes room."""
    room = Room(**{bound: most})
    assert [room.arrive(bytes=10) for _ in range(4)] == [[], [], [], [4]]
    assert room.lanes.over("P1") == []
    fourth = room.come(bytes=10)
    assert room.lanes.over("P1") == [bound]
    assert room.lanes.over("P0") == []
    room.lanes.leave(fourth)
    room.lanes.leave(room.waiting[0])
    assert room.arrive(bytes=10) == []


def test_several_go_where_one_needs_the_room_of_several() -> None:
    """Until what is left fits: for 250 tokens of another tenant two of the heaviest's newest go, not the third."""
    room = Room(max_tokens=450)
    for _ in range(4):
        room.arrive("heavy")
    assert room.arrive("light", size=Size(200, 50)) == [4, 3]


def test_who_is_shed_is_the_newest_of_the_tenant_that_takes_most() -> None:
    """Not the newcomer, if others take more; of equals the newcomer's own."""
    room = Room(max_requests=4)
    for tenant in ("heavy", "heavy", "light", "heavy"):
        room.arrive(tenant)
    assert room.arrive("light") == [4]
    assert room.arrive("light") == [6]
    assert room.arrive("heavy") == [7]
    assert room.arrive("new") == [2]


def test_weight_counts_in_who_takes_most() -> None:
    """With weight three, three requests take no more room than one does."""
    room = Room(max_requests=5)
    for _ in range(3):
        room.arrive("a", weight=3.0)
    for _ in range(2):
        room.arrive("b")
    assert room.arrive("a", weight=3.0) == [5]
    assert room.arrive("a", weight=3.0) == [7]


@pytest.mark.parametrize("unit", ["tokens", "bytes"])
def test_the_heaviest_is_so_in_the_unit_that_is_short(unit: str) -> None:
    """Many small ones take fewer tokens, or bytes, than one large; and the ranking of one unit is not another's."""
    room = Room(max_requests=6, **{f"max_{unit}": 1000})
    for _ in range(5):
        room.arrive("many", size=Size(1, 0), bytes=1)
    room.arrive("large", size=Size(900, 0), bytes=900)
    assert room.arrive("many", size=Size(1, 0), bytes=1) == [7]
    room.lanes.leave(room.waiting[0])
    assert room.arrive("many", size=Size(200, 0), bytes=200) == [6]


def test_new_sessions_go_before_running_ones_and_old_tenants_before_none() -> None:
    """Of the tenant that is shed: the newest of its fresh calls, in whatever line, then the newest of the others."""
    room = Room(max_requests=4)
    for fresh, group in ((False, 0), (True, 0), (True, 1), (False, 1)):
        room.arrive(fresh=fresh, group=group)
    assert [room.arrive() for _ in range(3)] == [[3], [2], [7]]


def test_a_place_inherited_is_as_old_as_its_first_arrival() -> None:
    """So somebody who came later goes, although it stands in line for longer."""
    room = Room(max_requests=2)
    room.arrive()
    room.arrive()
    assert room.arrive(since=0.5) == [2]
    assert room.arrive(since=0.7) == [1]


def test_new_sessions_use_only_a_part_of_a_lane() -> None:
    """At four fifths of ten the ninth new call is refused; a running session's, and an inherited place, are not."""
    room = Room(max_requests=10, new_share=0.8)
    assert [room.arrive(fresh=True) for _ in range(9)] == [[]] * 8 + [[9]]
    assert room.arrive(fresh=False) == []
    assert room.arrive(fresh=True) == [11]
    assert room.arrive(fresh=True, since=0.0) == []
    assert room.arrive(fresh=False) == [8]


def test_a_new_session_of_a_tenant_below_its_part_is_taken() -> None:
    """Whoever filled the lane, a light tenant's new call has room as long as the lane has any."""
    room = Room(max_requests=10, new_share=0.5)
    for _ in range(7):
        room.arrive("heavy")
    assert room.arrive("light", fresh=True) == []
    assert room.arrive("heavy", fresh=True) == [9]
    assert room.arrive("light", fresh=True) == []
    assert room.arrive("light", fresh=True) == []
    assert room.arrive("light", fresh=True) == [7]


def test_the_part_of_a_tenant_is_by_weight() -> None:
    """Two of weight one and three: of eight the parts are two and six; who has its part, has no more of the rest."""
    room = Room(max_requests=10, new_share=0.5)
    for _ in range(5):
        room.arrive("a", weight=3.0)
    room.arrive("b")
    assert room.arrive("b", fresh=True) == [7]
    assert room.arrive("a", fresh=True, weight=3.0) == [8]
    for part in ([10], []):
        room.arrive("b")
        assert room.arrive("a", fresh=True, weight=3.0) == part


@pytest.mark.parametrize("bound", UNITS)
def test_room_is_kept_for_what_was_promised(bound: str) -> None:
    """Seven of ten promised leave three, in every unit; who has a place inherited does not mind."""
    room = Room(**{bound: 10})
    room.promised.requests = 1
    setattr(room.promised, UNITS[bound], 7)
    each = {"size": Size(1, 0), "bytes": 1}
    assert [room.arrive(**each) for _ in range(4)] == [[], [], [], [4]]
    assert room.arrive(since=0.0, **each) == []
    assert room.arrive("light", **each) == []


@pytest.mark.parametrize("bound", UNITS)
def test_room_tells_which_share_the_lane_can_hold(bound: str) -> None:
    """Of what waits and is promised together, in the unit that is shortest."""
    room = Room(**{bound: 10})
    promised = Backlog(**{UNITS[bound]: 15})
    assert room.lanes.room("P1", Backlog()) == 1
    for _ in range(5):
        room.come(size=Size(1, 0), bytes=1)
    assert room.lanes.room("P1", Backlog()) == 1
    assert room.lanes.room("P1", promised) == 0.5
    assert room.lanes.room("P2", promised) == 1


def test_a_lower_lanes_newest_makes_room_for_a_better_lanes_newcomer() -> None:
    """All lanes together hold four: the lowest lane that has anybody gives, at last the better one itself."""
    room = Room(Bounds(4, 10**9, 10**9))
    for lane in ("P2", "P1", "P2", "P1"):
        assert room.arrive(lane=lane) == []
    assert [room.arrive(lane="P0") for _ in range(5)] == [[3], [1], [4], [2], [9]]
    assert room.arrive(lane="P2") == [10]


@pytest.mark.parametrize("bound", UNITS)
def test_all_lanes_together_are_bounded_in_each_unit(bound: str) -> None:
    """Exactly as much as the bound, and not one more."""
    room = Room(Bounds(**(PLENTY | {bound: 3})))
    each = {"size": Size(1, 0), "bytes": 1}
    assert [room.arrive(lane=lane, **each) for lane in ("P0", "P1", "P2", "P0")] == [[], [], [], [3]]


def test_in_a_lower_lane_it_is_the_heaviest_tenants_newest_who_goes() -> None:
    """The newcomer's tenant counts there with what it has there, if anything."""
    room = Room(Bounds(5, 10**9, 10**9))
    for tenant in ("a", "b", "b", "c", "a"):
        room.arrive(tenant, lane="P2")
    assert room.arrive("b", lane="P1") == [3]
    assert room.arrive("stranger", lane="P1") == [5]


def test_a_lanes_own_bound_comes_before_that_of_all() -> None:
    """Who is over its own lane's bound does not push out others before its own lane has made room."""
    room = Room(Bounds(3, 10**9, 10**9), max_requests=1)
    room.arrive(lane="P2")
    room.arrive(lane="P1")
    assert room.arrive(lane="P1") == [3]
    assert room.arrive(lane="P0") == []


@pytest.mark.parametrize("bound", UNITS)
def test_a_bound_in_shadow_mode_only_counts(bound: str) -> None:
    """Nobody goes for it, new sessions and promises included; it is told apart from those that hold."""
    room = Room(**{bound: 2}, shadow=frozenset({bound}), new_share=0.5)
    setattr(room.promised, UNITS[bound], 1)
    assert [room.arrive(size=Size(1, 0), bytes=1, fresh=True) for _ in range(3)] == [[], [], []]
    assert room.lanes.over("P1") == []
    assert room.lanes.over("P1", shadow=True) == [bound]
    assert room.lanes.over("P2", shadow=True) == []


def test_beside_a_bound_in_shadow_mode_the_others_hold() -> None:
    """Over both, only one of them sheds."""
    room = Room(max_requests=1, max_bytes=25, shadow=frozenset({"max_requests"}))
    assert [room.arrive(bytes=10) for _ in range(3)] == [[], [], [3]]


def test_who_takes_most_is_known_anew_after_everybody_has_left() -> None:
    """And after tenants have come, grown, shrunk and gone between two sheddings."""
    room = Room(max_requests=3)
    for tenant in ("a", "a", "b", "b"):
        room.arrive(tenant)
    for one in list(room.waiting):
        room.lanes.leave(one)
    room.waiting.clear()
    assert not room.lanes.queues["P1"]._heaviest
    for tenant in ("c", "c", "d"):
        room.arrive(tenant)
    assert room.arrive("d") == [8]


@pytest.mark.parametrize("seed", range(30))
def test_shedding_is_that_of_a_naive_model(seed: int) -> None:
    """Random arrivals, leaves and grants under all bounds at once; after each, everybody fits again."""
    chance = random.Random(seed)
    room = Room(
        Bounds(30, 6000, 300), new_share=0.7, max_requests=12, max_tokens=2000, max_bytes=90,
        shadow=frozenset(chance.sample(list(UNITS), chance.randrange(2))),
    )  # fmt: skip
    weights = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0}
    for _ in range(400):
        room.promised = Backlog(*(chance.randrange(4) * most for most in (1, 100, 0, 5)))
        tenant = chance.choice(list(weights))
        newcomer = room.come(
            tenant, weight=weights[tenant], lane=chance.choice(["P0", "P1", "P1", "P2"]), group=chance.randrange(2),
            size=Size(chance.randrange(200), chance.randrange(100)), bytes=chance.randrange(12),
            fresh=chance.random() < 0.4, since=float(room.seq - chance.randrange(9)) if chance.random() < 0.2 else None,
        )  # fmt: skip
        while True:
            victims = _victims(room, newcomer)
            gone = room.lanes.shed(newcomer, room.bounds, room.new_share, room.promised)
            assert (gone in victims) if victims else gone is None, f"seed {seed}"
            if gone is None:
                break
            room.lanes.leave(gone)
            room.waiting.remove(gone)
            if gone is newcomer:
                break
        for _ in range(chance.choice([0, 0, 0, 1, 2])):
            if room.waiting:
                one = room.waiting.pop(chance.randrange(len(room.waiting)))
                room.lanes.serve(one) if chance.random() < 0.5 else room.lanes.leave(one)


def _victims(room: Room, newcomer: Waiter) -> list[Waiter]:
    """All who may go next by the rules; of tenants that are equal it may be either, but for the newcomer's own."""
    lane, mine = newcomer.request.lane, newcomer.request.tenant
    rule, inside = room.lanes.rules[lane], [one for one in room.waiting if one.request.lane == lane]
    total, promised = (
        _sums(inside),
        dict(zip(UNITS, (room.promised.requests, room.promised.tokens, room.promised.bytes), strict=True)),
    )
    held = [bound for bound in UNITS if bound not in rule.shadow]
    if newcomer.since >= newcomer.request.arrived and (newcomer.request.fresh or room.promised.requests):
        share = room.new_share if newcomer.request.fresh else 1.0
        weights = {one.request.tenant: one.request.weight for one in inside}
        own = _sums([one for one in inside if one.request.tenant == mine])
        part = weights[mine] / sum(weights.values())
        for bound in held:
            if (
                total[bound] + promised[bound] > share * getattr(rule, bound)
                and own[bound] >= part * total[bound] - 1e-9
            ):
                return [newcomer]
    for bound in held:
        if total[bound] > getattr(rule, bound):
            return _heaviest(inside, bound, mine)
    for bound in UNITS:
        if _sums(room.waiting)[bound] > getattr(room.bounds, bound):
            lowest = max(one.request.lane for one in room.waiting)
            return _heaviest([one for one in room.waiting if one.request.lane == lowest], bound, mine)
    return []


def _heaviest(inside: list[Waiter], bound: str, mine: str) -> list[Waiter]:
    by_tenant: dict[str, list[Waiter]] = {}
    for one in inside:
        by_tenant.setdefault(one.request.tenant, []).append(one)
    takes = {name: _sums(some)[bound] / some[0].request.weight for name, some in by_tenant.items()}
    most = [name for name, amount in takes.items() if amount == max(takes.values())]
    return [
        max(by_tenant[name], key=lambda one: (one.request.fresh, one.since, one.seq))
        for name in ([mine] if mine in most else most)
    ]


def _sums(waiters: list[Waiter]) -> dict[str, int]:
    requests = [one.request for one in waiters]
    tokens, held = sum(one.size.total for one in requests), sum(one.bytes for one in requests)
    return {"max_requests": len(requests), "max_tokens": tokens, "max_bytes": held}
