"""Which upstream keeps a piece of state."""

from __future__ import annotations

from extproc.core.affinity import Affinity


def test_what_was_learned_is_known_and_the_last_place_counts() -> None:
    """A state that moved is where it was seen last; an unknown one is nowhere."""
    affinity = Affinity()
    affinity.learn("resp_1", "primary")
    affinity.learn("resp_1", "backup")
    assert affinity.upstream_of("resp_1") == "backup"
    assert affinity.upstream_of("resp_2") is None


def test_memory_is_bounded_and_forgets_what_is_not_used() -> None:
    """The least recently used id goes first."""
    affinity = Affinity(limit=2)
    affinity.learn("a", "x")
    affinity.learn("b", "x")
    assert affinity.upstream_of("a") == "x"
    affinity.learn("c", "x")
    assert affinity.upstream_of("b") is None
    assert affinity.upstream_of("a") == "x"
