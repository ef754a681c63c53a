"""Which upstream keeps a piece of state, so that a request that builds on it goes nowhere else.

Answers of the Responses API can be named by later requests (`previous_response_id`), and only the account that gave
them knows them. The last `limit` of them are remembered; what is not is taken to be at the first upstream of its chain.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Affinity"]


class Affinity:
    """Bounded memory of state ids, the least recently used forgotten first."""

    def __init__(self, limit: int = 100_000) -> None:
        """Remember nothing yet."""
        self._limit = limit
        self._places: OrderedDict[str, str] = OrderedDict()

    def learn(self, state: str, upstream: str) -> None:
        """`upstream` keeps `state`."""
        self._places[state] = upstream
        self._places.move_to_end(state)
        if len(self._places) > self._limit:
            self._places.popitem(last=False)

    def upstream_of(self, state: str) -> str | None:
        """Who keeps `state`, None when that is not known."""
        if state in self._places:
            self._places.move_to_end(state)
        return self._places.get(state)
