"""What somebody was held by, kept in little room: whole to the second, and nothing said that was not so."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from extproc.core.lines import Group, Line
from extproc.core.spells import MOST, OTHERS, Keys, Spells, added_since, merged


class Held:
    """A line that is refused for want of other keys again and again, with all of it on record. Whole seconds."""

    def __init__(self) -> None:
        self.line = Line(Group(("a",), frozenset()))
        self.now = 0.0
        self.known: list[tuple[Keys, float]] = []

    def spell(self, keys: Keys, seconds: float) -> None:
        self.line.refused(keys, self.now)
        self.now += seconds
        self.known.append((keys, seconds))

    def lacked(self) -> Spells:
        return self.line.lacked(self.now)

    def truth(self, after: int = 0) -> Spells:
        """What lacked for how long from the so-manieth spell on."""
        found: Spells = defaultdict(float)
        for keys, seconds in self.known[after:]:
            if keys:
                found[keys] += seconds
        return dict(found)


def named(number: int) -> Keys:
    return (f"upstream/a/m{number}/total",)


def test_as_many_things_as_are_kept_apart_are_told_to_the_second() -> None:
    """Each with all of its spells, whatever came before; that is summed up under no key."""
    held = Held()
    for number in range(1000, 1000 + 3 * MOST):
        held.spell(named(number), 1.0)
    before, came = held.lacked(), len(held.known)
    assert before[OTHERS] == 2 * MOST
    for _ in range(5):
        for number in range(MOST):
            held.spell(named(number), number + 1.0)
    assert added_since(held.lacked(), before) == held.truth(came)
    assert len(held.lacked()) == MOST + 1


def test_the_one_that_was_not_for_longest_gives_way() -> None:
    """What comes again and again is told apart however many others come once."""
    held = Held()
    for number in range(50):
        held.spell(("upstream/a/slots",), 3.0)
        held.spell(named(number), 1.0)
    lacked = held.lacked()
    assert lacked[("upstream/a/slots",)] == 150
    assert lacked[OTHERS] == 50 - (MOST - 1)
    assert sum(lacked.values()) == 200


@pytest.mark.parametrize("seed", range(30))
def test_seconds_add_up_and_are_put_to_nothing_that_did_not_lack(seed: int) -> None:
    """For everybody who comes at some time, among few things and among many more than are kept apart."""
    rng, held = random.Random(seed), Held()
    kinds = rng.choice([5, MOST, MOST + 1, 60])
    waiting: list[tuple[int, Spells]] = []
    for _ in range(400):
        keys = () if rng.random() < 0.1 else named(min(rng.randrange(kinds), rng.randrange(kinds)))
        held.spell(keys, float(rng.randrange(5)))
        if rng.random() < 0.2:
            waiting.append((len(held.known), held.lacked()))
        assert len(held.lacked()) <= MOST + 1
    for came, before in waiting:
        told, truth = added_since(held.lacked(), before), held.truth(came)
        assert sum(told.values()) == sum(truth.values())
        assert all(seconds <= truth[keys] for keys, seconds in told.items() if keys != OTHERS)
        if kinds <= MOST:
            assert told == {keys: seconds for keys, seconds in truth.items() if seconds}


def test_what_is_left_of_rounding_is_nothing() -> None:
    """Sums of large numbers differ a little from what they are sums of."""
    before = {named(1): 0.1 + 0.2, OTHERS: 1e6}
    assert added_since({named(1): 0.3 + 0.3, OTHERS: 1e6 + 1e-9}, before) == {named(1): pytest.approx(0.3)}


def test_spells_in_several_lines_are_one_account() -> None:
    """Beyond what is kept apart the shortest are summed up, however often one moved."""
    told: Spells = {}
    for number in range(1, MOST + 5):
        told = merged(told, {named(number): 10.0 + number, named(0): 1.0, OTHERS: 0.5})
        assert len(told) <= MOST + 1
    assert sum(told.values()) == sum(10.0 + number + 1.5 for number in range(1, MOST + 5))
    assert told[named(0)] == MOST + 4
    assert named(1) not in told
    assert told[named(MOST + 4)] == 10 + MOST + 4
