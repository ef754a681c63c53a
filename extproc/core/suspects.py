"""Requests that fail wherever they are sent, and so may be at fault themselves.

Theory. An upstream answers 500, falls silent or breaks off because it is sick, or because of what it was asked: a
prompt that trips a bug trips it everywhere. Its client's SDK sends it again and again, each time through the whole
chain, and so a single prompt would open every breaker there is, for everybody. One request cannot tell the two apart;
several can. What fails at one upstream counts against that one. What fails in the same way at a second one, in this
flight or when its client sends it again, says nothing about either any more. A real outage of several upstreams shows
in others' requests: each of them counts once, at the first upstream it comes to, and when that rests at the next.

Memory is bounded: of too many requests the oldest is forgotten, and then merely counts as a new one.

Deliberately not here: which failures are of this kind, and in which way (flights).
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["KEPT_S", "Suspects"]

KEPT_S = 300.0
"""Seconds for which it is remembered where a request failed: longer than any SDK goes on trying."""


class Suspects:
    """See the head of this file. Times are in seconds on any clock that never goes back. limit: requests remembered."""

    def __init__(self, limit: int = 4096) -> None:
        """Nothing has failed yet."""
        self._limit = limit
        self._failed: OrderedDict[tuple[str, str], dict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        """Requests remembered, each once for every way in which it failed."""
        return len(self._failed)

    def failed(self, request: str, way: str, upstream: str, now: float, *, once: bool = False) -> bool:
        """`request` (by any name that its retries share) failed at `upstream`, in this way.

        True where it has, in the same way, at another one lately: then this says nothing about `upstream`. once: nor
        does it where it has at this one.
        """
        places = self._failed.setdefault((request, way), {})
        self._failed.move_to_end((request, way))
        elsewhere = any(now - at < KEPT_S for name, at in places.items() if once or name != upstream)
        places[upstream] = now
        self._forget(now)
        return elsewhere

    def _forget(self, now: float) -> None:
        """Those that are too old, and the oldest of too many; never the newest."""
        while len(self._failed) > 1:
            oldest, places = next(iter(self._failed.items()))
            if len(self._failed) <= self._limit and now - max(places.values()) < KEPT_S:
                return
            del self._failed[oldest]
