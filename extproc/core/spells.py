"""For how long somebody could not go for want of which keys: seconds by what lacked together.

There are as many combinations of keys as there are subsets of them, so only so many are kept apart: when another
begins, the one that has not been for longest is summed up with those like it, under no key at all. No second is lost by
that, and none is put to keys that did not lack. What a waiter was held by is told apart but for what gave way while it
stood there: so all of it, where its line has not lacked more than so many things in turn.

Deliberately not here: what lacks (capacity), and in which line who stands meanwhile (lines).
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["MOST", "OTHERS", "Keys", "Spells", "added_since", "began", "merged"]

Keys = tuple[str, ...]
Spells = dict[Keys, float]
MOST = 16
"""So many combinations are kept apart."""
OTHERS: Keys = ()
"""All others together."""
TINY_S = 1e-6
"""Less than this is what sums of large numbers differ by."""


def began(spells: Mapping[Keys, float], keys: Keys) -> Spells:
    """A copy in which there is a place for the seconds of a spell that begins now."""
    found = {known: seconds for known, seconds in spells.items() if known != keys}
    while len(found) - (OTHERS in found) >= MOST:
        _sum_up(found, next(known for known in found if known != OTHERS))
    found[keys] = spells.get(keys, 0.0)
    return found


def added_since(spells: Mapping[Keys, float], before: Mapping[Keys, float]) -> Spells:
    """What has been added since it was as `before`."""
    more = {
        keys: seconds - before.get(keys, 0.0)
        for keys, seconds in spells.items()
        if keys != OTHERS and seconds > before.get(keys, 0.0)
    }
    if OTHERS in spells:
        rest = sum(spells.values()) - sum(before.values()) - sum(more.values())
        if rest > TINY_S:
            more[OTHERS] = rest
    return more


def merged(spells: Mapping[Keys, float], more: Mapping[Keys, float]) -> Spells:
    """Both together; the shortest are summed up where they are too many."""
    found = dict(spells)
    for keys, seconds in more.items():
        found[keys] = found.get(keys, 0.0) + seconds
    while len(found) - (OTHERS in found) > MOST:
        _sum_up(found, min((keys for keys in found if keys != OTHERS), key=lambda keys: found[keys]))
    return found


def _sum_up(found: Spells, keys: Keys) -> None:
    found[OTHERS] = found.get(OTHERS, 0.0) + found.pop(keys)
