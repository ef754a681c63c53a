"""PLACEHOLDER for the owner of this file."""

from __future__ import annotations

from extproc.core.value import value

__all__ = ["Reading"]


@value
class Reading:
    """The metrics of one pool of engine instances at one moment, the fullest instance counting.

    usage: used share of the KV cache, 0..1. waiting, running: requests in the fullest instance's queue, and running in
    all. tokens: KV cache of one instance in tokens, None when not told. instances: how many answered. preemptions:
    since the reading before. age_s: how long ago the metrics were asked for.
    """

    usage: float
    waiting: float = 0.0
    running: float = 0.0
    tokens: float | None = None
    instances: int = 1
    preemptions: float = 0.0
    age_s: float = 0.0
