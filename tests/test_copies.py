"""At most one copy of a request: who takes over whose place, and random schedules that try to run two."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from extproc.copies import LET_GO_S, Copies, Copy
from extproc.core.events import Retried, Settled
from extproc.core.policy import RetryRules
from extproc.core.refusal import Reason, Rejected
from extproc.core.request import Request
from extproc.core.retries import KEYED, RetryBudget
from tests.doubles import Observer, VirtualLoop, play, request

BODY = "body/1"
KEY = f"{KEYED}1"


class Client:
    """One copy of a request, as the handler serves it: held until `go` is set, then running until `over` is.

    lands_s: how long Envoy takes to end it when it is aborted. settles: its record comes when its stream ends.
    """

    def __init__(self, bench: Bench, one: Request, lands_s: float, *, settles: bool) -> None:
        self.request = one
        self.copy: Copy | None = None
        self.go, self.over = asyncio.Event(), asyncio.Event()
        self.runs = False
        self.aborted = 0
        self.refusal: Reason | None = None
        self._bench = bench
        self._lands_s = lands_s
        self._settles = settles
        self.task = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        try:
            async with self._bench.copies.sole(self.request) as self.copy:
                await self.go.wait()
                if self.refusal:
                    raise Rejected(self.refusal)
                self.copy.departs(self._abort)
                self.runs = True
                self._bench.started(self)
                try:
                    await self.over.wait()
                finally:
                    self.runs = False
        finally:
            if self._settles and self.copy is not None and self.copy.running:
                self._bench.settle(self, gone=self.aborted > 0 or not self.over.is_set())

    async def _abort(self) -> None:
        self.aborted += 1
        await asyncio.sleep(self._lands_s)
        self.over.set()

    async def outcome(self) -> str:
        """Served, cancelled, or the reason of its refusal."""
        try:
            await self.task
        except asyncio.CancelledError:
            return "cancelled"
        except Rejected as rejected:
            return rejected.reason
        return "served"


class Bench:
    """Copies with what is around them; `most` is how many copies of one fingerprint ever ran at once."""

    def __init__(self, loop: VirtualLoop, rules: RetryRules = RetryRules()) -> None:  # noqa: B008 - frozen
        self.loop = loop
        self.observer = Observer()
        self.budget = RetryBudget(rules)
        self.copies = Copies(loop, self.observer, self.budget)
        self.clients: list[Client] = []
        self.most = 0

    def send(
        self, fingerprint: str = BODY, retries: int = 0, lands_s: float = 0.002, *, settles: bool = False, **more: Any
    ) -> Client:
        """A request arrives now."""
        number = len(self.clients) + 1
        told = {"ticket": f"p-{number}", "fingerprint": fingerprint, "retries": retries, **more}
        self.clients.append(Client(self, request(arrived=self.loop.time(), **told), lands_s, settles=settles))
        return self.clients[-1]

    def started(self, client: Client) -> None:
        """Count how many run."""
        kind = client.request.fingerprint
        self.most = max(self.most, sum(c.runs for c in self.clients if c.request.fingerprint == kind))

    def settle(self, client: Client, status: int = 200, *, gone: bool = False) -> None:
        """The record of a client's request is there."""
        self.copies.settled(Settled(client.request, "a", 1, status, None, 0.0, client_gone=gone))

    def assert_empty(self) -> None:
        """Nobody is here any more, and nothing is left of them but places."""
        assert len(self.copies) == 0
        assert not self.copies._here
        assert not self.copies._ending
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def took(self) -> list[str]:
        """Whose places were taken over, in order."""
        return [event.took for event in self.observer.of(Retried)]


async def soon() -> None:
    """Let everything happen that needs no time."""
    for _ in range(10):
        await asyncio.sleep(0)


def scenario(play_it: Callable[[Bench], Awaitable[None]]) -> Callable[[], None]:
    """A test in virtual time, after which nothing may be left."""

    def test() -> None:
        async def main(loop: VirtualLoop) -> None:
            bench = Bench(loop)
            await play_it(bench)
            for client in bench.clients:
                client.go.set()
                client.over.set()
            await asyncio.gather(*(client.outcome() for client in bench.clients))
            await asyncio.sleep(60)
            bench.assert_empty()

        play(main)

    test.__name__, test.__doc__ = play_it.__name__, play_it.__doc__
    return test


@scenario
async def test_the_retry_of_a_held_request_takes_its_place(bench: Bench) -> None:
    """The first copy is refused at once, and the second stands where the first stood."""
    first = bench.send()
    await asyncio.sleep(5)
    second = bench.send(retries=1)
    assert await first.outcome() == Reason.EVICTED
    assert bench.loop.time() == second.request.arrived
    await soon()
    assert second.copy is not None
    assert second.copy.since == first.request.arrived
    second.go.set()
    second.over.set()
    assert await second.outcome() == "served"
    assert bench.took() == ["held"]


@scenario
async def test_who_was_replaced_is_told_not_to_come_again(bench: Bench) -> None:
    """Its retry is here already: no time to retry, whatever the reason usually allows."""
    first = bench.send()
    await soon()
    bench.send(retries=1)
    with pytest.raises(Rejected) as refusal:
        await first.task
    assert refusal.value.retry_after == float("inf")


@scenario
async def test_the_retry_of_a_running_request_waits_until_it_has_landed(bench: Bench) -> None:
    """It is ended in Envoy, once; only when it has let go of everything does its retry go on."""
    first = bench.send(lands_s=0.3)
    first.go.set()
    await soon()
    second = bench.send(retries=1)
    second.go.set()
    await asyncio.sleep(0.2)
    assert (first.runs, first.aborted, second.runs) == (True, 1, False)
    assert await first.outcome() == "served"
    await soon()
    assert second.runs
    assert second.copy is not None
    assert second.copy.since == first.request.arrived
    assert bench.took() == ["running"]
    assert bench.most == 1


@scenario
async def test_a_request_that_does_not_end_is_not_doubled(bench: Bench) -> None:
    """Its retry is refused, before Envoy would lose patience with it, and may come again."""
    first = bench.send(lands_s=60)
    first.go.set()
    await soon()
    second = bench.send(retries=1)
    assert await second.outcome() == Reason.LANE_FULL
    assert bench.loop.time() == second.request.arrived + LET_GO_S
    assert bench.most == 1


@scenario
async def test_the_same_prompt_twice_is_no_duplicate(bench: Bench) -> None:
    """People ask the same thing several times at once, on purpose: all of them run."""
    clients = [bench.send() for _ in range(3)]
    for client in clients:
        client.go.set()
    await soon()
    assert [client.runs for client in clients] == [True] * 3
    assert bench.took() == []


@scenario
async def test_an_idempotency_key_makes_two_requests_one(bench: Bench) -> None:
    """Even without a retry count: the later one is the retry."""
    first, second = bench.send(KEY), bench.send(KEY)
    assert await first.outcome() == Reason.EVICTED
    second.go.set()
    await soon()
    assert second.runs


@scenario
async def test_different_requests_have_nothing_to_do_with_each_other(bench: Bench) -> None:
    """Another body, or none that could be told: no place is taken."""
    clients = [bench.send("body/1"), bench.send("body/2", retries=1), bench.send("", retries=1), bench.send("")]
    for client in clients:
        client.go.set()
    await soon()
    assert all(client.runs for client in clients)
    assert bench.took() == ["", ""]
    assert len(bench.copies) == 2


@scenario
async def test_a_chain_of_retries_keeps_the_first_place(bench: Bench) -> None:
    """A third copy replaces the second while that still waits for the end of the first, and waits for it, too."""
    first = bench.send(lands_s=0.5)
    first.go.set()
    await asyncio.sleep(3)
    second = bench.send(retries=1)
    await asyncio.sleep(0.1)
    third = bench.send(retries=2)
    third.go.set()
    assert await second.outcome() == Reason.EVICTED
    assert not third.runs
    assert await first.outcome() == "served"
    await soon()
    assert third.runs
    assert third.copy is not None
    assert third.copy.since == first.request.arrived
    assert (first.aborted, bench.most) == (1, 1)


@scenario
async def test_a_retry_that_leaves_still_ends_the_first(bench: Bench) -> None:
    """What was begun is seen through: the first copy's client had asked again, so nobody waits for its answer."""
    first = bench.send(lands_s=0.5)
    first.go.set()
    await soon()
    second = bench.send(retries=1)
    await asyncio.sleep(0.1)
    second.task.cancel()
    assert await second.outcome() == "cancelled"
    assert await first.outcome() == "served"
    assert first.aborted == 1


@scenario
async def test_who_leaves_the_line_keeps_its_place(bench: Bench) -> None:
    """The usual way of an impatient client: it closes its connection, and comes back after a pause."""
    first = bench.send()
    await asyncio.sleep(2)
    first.task.cancel()
    await asyncio.sleep(1)
    second = bench.send(retries=1)
    await soon()
    assert second.copy is not None
    assert second.copy.since == first.request.arrived
    assert bench.took() == ["left"]
    second.task.cancel()
    await asyncio.sleep(1)
    third = bench.send(retries=2)
    await soon()
    assert third.copy is not None
    assert third.copy.since == first.request.arrived


@pytest.mark.parametrize(
    ("status", "gone", "early", "place"),
    [
        (200, False, False, False),
        (200, False, True, False),
        (200, True, False, True),
        (0, True, False, True),
        (0, True, True, True),
        (503, False, False, False),
        (503, False, True, False),
    ],
)
def test_who_leaves_a_running_request_keeps_its_place(status: int, *, gone: bool, early: bool, place: bool) -> None:
    """Which it was is known from its record, before its stream ends (early) or after. Served or failed: no place."""

    async def main(loop: VirtualLoop) -> None:
        bench = Bench(loop)
        first = bench.send()
        first.go.set()
        await soon()
        if early:
            bench.settle(first, status, gone=gone)
        first.over.set()
        await soon()
        if not early:
            bench.settle(first, status, gone=gone)
        second = bench.send(retries=1)
        await soon()
        assert second.copy is not None
        assert second.copy.since == (first.request.arrived if place else None)
        second.task.cancel()
        await second.outcome()

    play(main)


@pytest.mark.parametrize(
    ("reason", "place"),
    [
        (Reason.DEADLINE_PASSED, True),
        (Reason.QUEUE_TIMEOUT, False),
        (Reason.LANE_FULL, False),
        (Reason.TENANT_QUOTA, False),
        (Reason.EVICTED, False),
    ],
)
def test_whose_own_time_is_over_keeps_its_place(reason: Reason, *, place: bool) -> None:
    """An SDK tells its timeout, so it is refused in the moment in which it gives up. Others have no place to keep."""

    async def main(loop: VirtualLoop) -> None:
        bench = Bench(loop)
        first = bench.send()
        first.refusal = reason
        await asyncio.sleep(1)
        first.go.set()
        assert await first.outcome() == reason
        second = bench.send(retries=1)
        await soon()
        assert second.copy is not None
        assert second.copy.since == (first.request.arrived if place else None)
        second.task.cancel()
        await second.outcome()

    play(main)


@pytest.mark.parametrize("reason", [Reason.QUEUE_TIMEOUT, Reason.LANE_FULL, None])
def test_the_retry_of_one_that_is_gone_replaces_nobody_else(reason: Reason | None) -> None:
    """Two with one prompt: one of them was refused, or its upstream failed. Its retry leaves the other one alone."""

    async def main(loop: VirtualLoop) -> None:
        bench = Bench(loop)
        other, gone = bench.send(), bench.send()
        other.go.set()
        gone.refusal = reason
        gone.go.set()
        gone.over.set()
        await gone.outcome()
        bench.settle(gone, 503)
        retry = bench.send(retries=1)
        await soon()
        assert other.runs
        assert not other.aborted
        other.task.cancel()
        retry.task.cancel()
        await asyncio.gather(other.outcome(), retry.outcome())

    play(main)


@scenario
async def test_where_it_is_not_clear_whose_retry_it_is_nobody_is_ended(bench: Bench) -> None:
    """Two with one prompt are here and neither has left: the retry may be that of either."""
    one, two = bench.send(), bench.send()
    await soon()
    retry = bench.send(retries=1)
    await soon()
    assert not one.task.done()
    assert not two.task.done()
    assert retry.copy is not None
    assert retry.copy.since is None
    later = bench.send(retries=2)
    assert not later.task.done()
    assert bench.took() == [""]


@scenario
async def test_a_retry_never_replaces_a_later_one(bench: Bench) -> None:
    """Copies overtake each other on the way; the one that was sent last stays."""
    later = bench.send(retries=2)
    await soon()
    earlier = bench.send(retries=1)
    await soon()
    assert not later.task.done()
    assert earlier.copy is not None
    assert earlier.copy.since is None


@scenario
async def test_two_retries_of_the_same_count_are_of_two_requests(bench: Bench) -> None:
    """A retry's own earlier copy was sent once less."""
    one, other = bench.send(retries=1), bench.send(retries=1)
    await soon()
    assert not one.task.done()
    assert not other.task.done()
    assert bench.took() == ["", ""]


@scenario
async def test_who_gets_its_turn_in_the_moment_in_which_it_is_replaced_does_not_run(bench: Bench) -> None:
    """It is interrupted where it stands, before it could be let go: nothing would end it in Envoy any more."""
    first = bench.send()
    await soon()
    bench.send(retries=1)
    first.go.set()
    assert await first.outcome() == Reason.EVICTED
    assert first.copy is not None
    assert not first.copy.running


@scenario
async def test_who_was_served_is_not_mistaken_for_one_that_left(bench: Bench) -> None:
    """Its record came before its stream ended: the retry that comes later is that of somebody else, who is here."""
    served = bench.send()
    served.go.set()
    await soon()
    bench.settle(served)
    served.over.set()
    await served.outcome()
    first = bench.send()
    await soon()
    bench.send(retries=1)
    assert await first.outcome() == Reason.EVICTED


@scenario
async def test_what_is_only_observed_is_not_ended(bench: Bench) -> None:
    """It is told what would have been taken over, and both go on."""
    first = bench.send(observed=True)
    await soon()
    second = bench.send(retries=1, observed=True)
    second.go.set()
    await soon()
    assert not first.task.done()
    assert second.runs
    assert bench.took() == ["held"]


@scenario
async def test_a_real_cancellation_stays_one(bench: Bench) -> None:
    """The first copy's client leaves in the same moment in which its retry replaces it, before or after."""
    for before in (True, False):
        first = bench.send(KEY)
        await soon()
        if before:
            first.task.cancel()
        second = bench.send(KEY)
        await asyncio.sleep(0)
        if not before:
            first.task.cancel()
        assert await first.outcome() == "cancelled"
        await soon()
        second.task.cancel()
        await second.outcome()


@scenario
async def test_a_retry_is_paid_for_unless_it_replaced_a_copy(bench: Bench) -> None:
    """What takes the place of one that is here adds nothing; whose copy has left would be one more in line."""
    while not bench.budget.spend("default", bench.loop.time()):
        pass
    held, gone = bench.send("body/held"), bench.send("body/gone")
    await soon()
    gone.task.cancel()
    await soon()
    replacing, returning = bench.send("body/held", retries=1), bench.send("body/gone", retries=1)
    unheard = bench.send("", retries=1)
    await soon()
    assert held.task.done()
    assert bench.took() == ["held", "left", ""]
    assert bench.copies.patience(replacing.request) == 0.0
    assert bench.copies.patience(returning.request) > 0.0
    assert bench.copies.patience(unheard.request) > 0.0


@scenario
async def test_the_budget_hears_of_first_requests_only(bench: Bench) -> None:
    """A share of first-time traffic: retries do not pay for retries."""
    while not bench.budget.spend("default", bench.loop.time()):
        pass
    for _ in range(20):
        bench.send("")
    await soon()
    assert sum(bench.budget.spend("default", bench.loop.time()) == 0 for _ in range(10)) == 2
    for _ in range(50):
        bench.send("", retries=1)
    await soon()
    assert bench.budget.spend("default", bench.loop.time()) > 0


def test_settling_what_is_long_gone_changes_nothing() -> None:
    """Records come late, twice, or for requests that nobody could tell apart."""

    async def main(loop: VirtualLoop) -> None:
        bench = Bench(loop)
        client, nameless = bench.send(), bench.send("")
        for each in (client, nameless):
            each.go.set()
            each.over.set()
            await each.outcome()
            for gone in (False, True, False):
                bench.settle(each, gone=gone)
        retry = bench.send(retries=1)
        await soon()
        assert retry.copy is not None
        assert retry.copy.since is None
        retry.task.cancel()
        await retry.outcome()

    play(main)


@pytest.mark.parametrize("keyed", [True, False])
def test_random_schedules_never_run_two_copies(*, keyed: bool) -> None:
    """Clients come, leave, retry with and without leaving first, at any moment; Envoy ends what it is told to, late.

    Of requests that are told apart beyond doubt no two copies ever run together; a client that leaves sees nothing but
    its own cancellation; and in the end nothing is left.
    """
    for _ in range(300):
        seed = random.randrange(2**32)
        try:
            play(lambda loop: _schedule(loop, random.Random(seed), keyed=keyed))  # noqa: B023 - played at once
        except BaseException:
            print(f"seed {seed}")  # noqa: T201 - to repeat it
            raise


async def _schedule(loop: VirtualLoop, rng: random.Random, *, keyed: bool) -> None:
    bench = Bench(loop)
    lines: dict[str, list[Client]] = {f"{KEYED if keyed else 'body/'}{kind}": [] for kind in range(2)}
    left: set[Client] = set()
    for _ in range(60):
        kind, line = rng.choice(list(lines.items()))
        last = line[-1] if line else None
        match rng.randrange(6):
            case 0 | 1:
                # Without a key a request is sent again only by the one client that sent it.
                if keyed or last is None or last.request.retries < 90:
                    retries = 0 if last is None or (keyed and rng.random() < 0.3) else last.request.retries + 1
                    line.append(bench.send(kind, retries, rng.choice([0.0, 0.001, 0.2]), settles=True))
            case 2 if last:
                last.go.set()
            case 3 if last:
                last.over.set()
            case 4 if last and not last.task.done():
                left.add(last)
                last.task.cancel()
            case _:
                await asyncio.sleep(rng.choice([0.0, 0.0, 0.001, 0.1, 1.0]))
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
    for client in bench.clients:
        client.go.set()
        client.over.set()
    outcomes = {client: await client.outcome() for client in bench.clients}
    await asyncio.sleep(1)
    assert bench.most <= 1
    assert all(outcome in ("served", "cancelled", Reason.EVICTED, Reason.LANE_FULL) for outcome in outcomes.values())
    assert all(outcomes[client] == "cancelled" or client.aborted or client.over.is_set() for client in left)
    assert not any(outcome == "cancelled" for client, outcome in outcomes.items() if client not in left)
    bench.assert_empty()
