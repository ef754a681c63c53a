"""What the fake has seen, for tests and benchmarks to read: a bounded list of requests, and counters that prove things.

"In flight" is from the moment a request passed the limits until just before the last bytes of its answer are written:
a gateway that frees its slot when the answer ends can never be ahead of this count. Requests whose client went away
are left out of the proof, because the gateway knows that earlier than we do.

No credential is kept: of a key, only the first 8 hexadecimal digits of its SHA-256.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_WINDOW_S = 60.0
_SPANS_BEFORE_FOLDING = 2000
_HEADERS_KEPT = frozenset(
    {
        "accept",
        "anthropic-beta",
        "anthropic-version",
        "content-length",
        "content-type",
        "host",
        "idempotency-key",
        "openai-organization",
        "openai-project",
        "traceparent",
        "transfer-encoding",
        "user-agent",
    },
)
_KEY_HEADERS = ("x-api-key", "api-key", "x-goog-api-key")
_CREDENTIAL_ENDS = ("-key", "-token", "-secret", "-authorization", "-password", "-cookie")
_NO_CREDENTIALS = frozenset({"x-idempotency-key"})


@dataclass(slots=True, eq=False)
class Seen:
    """One request. Times are in seconds of the monotonic clock, as the event loop's; `wall` is in Unix seconds."""

    time: float
    wall: float
    id: str
    path: str
    headers: dict[str, str]
    key: str | None
    body_bytes: int = 0
    body_sha256: str | None = None
    model: str | None = None
    stream: bool = False
    include_usage: bool = False
    priority: int = 0
    prompt_tokens: int = 0
    max_tokens: int | None = None
    charged: int = 0
    admitted: float | None = None
    """When it passed the limits."""
    finished: float | None = None
    """Just before the last bytes of the answer, or when it ended otherwise."""
    output_tokens: int = 0
    status: int | None = None
    """None: no answer was begun."""
    fault: str | None = None
    aborted: bool = False
    """The client went away before the answer was complete."""


@dataclass(slots=True)
class _Charges:
    """Tokens charged in the last minute, and the most there ever were."""

    total: int = 0
    busiest: int = 0
    _sum: int = 0
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, tokens: int, now: float) -> None:
        """Count a charge, or with a negative number what came back of it."""
        self.total += tokens
        self._sum += tokens
        self._recent.append((now, tokens))
        while self._recent[0][0] <= now - _WINDOW_S:
            self._sum -= self._recent.popleft()[1]
        self.busiest = max(self.busiest, self._sum)


class _Overlap:
    """How many requests were in flight together, at most, out of those that ended well.

    Which ones those are is known only at their end, so their spans are kept until nothing that is still in flight can
    have begun before them; then only the number remains.
    """

    def __init__(self) -> None:
        self._most = 0
        self._spans: list[tuple[float, float]] = []
        self._fold_at = _SPANS_BEFORE_FOLDING

    def add(self, span: tuple[float, float], open_since: float) -> None:
        """Count a request that ended. `open_since`: no request in flight was admitted before this moment."""
        self._spans.append(span)
        if len(self._spans) >= self._fold_at:
            self._fold(open_since)

    def most(self, running: list[tuple[float, float]]) -> int:
        """Return the number, with the requests that are in flight."""
        return max(self._most, most_at_once([*self._spans, *running]))

    def _fold(self, open_since: float) -> None:
        past = [(start, min(end, open_since)) for start, end in self._spans if start < open_since]
        self._most = max(self._most, most_at_once(past))
        self._spans = [(max(start, open_since), end) for start, end in self._spans if end > open_since]
        self._fold_at = max(_SPANS_BEFORE_FOLDING, 2 * len(self._spans))


class Record:
    """The list and the counters."""

    def __init__(self, size: int) -> None:
        """Keep the last `size` requests."""
        self._size = size
        self._in_flight: dict[Seen, None] = {}
        self._watchers: list[asyncio.Event] = []
        self.reset()

    @property
    def requests(self) -> list[Seen]:
        """The requests, oldest first."""
        return list(self._seen)

    @property
    def in_flight(self) -> int:
        """How many passed the limits and are not finished."""
        return len(self._in_flight)

    async def until(self, holds: Callable[[Record], bool]) -> None:
        """Return as soon as something holds, for tests in the same event loop."""
        while not holds(self):
            changed = asyncio.Event()
            self._watchers.append(changed)
            await changed.wait()

    def reset(self) -> None:
        """Forget everything but the requests that are in flight."""
        self._seen: deque[Seen] = deque(self._in_flight, maxlen=self._size)
        self._overlap = _Overlap()
        self._charges = _Charges()
        self._statuses: Counter[int] = Counter()
        self._peak = len(self._in_flight)
        self._served = 0
        self._aborted = 0

    def arrived(self, seen: Seen) -> None:
        """List a request."""
        self._seen.append(seen)
        self._announce()

    def admitted(self, seen: Seen, charged: int, now: float) -> None:
        """Count a request that passed the limits."""
        seen.admitted = now
        seen.charged = charged
        self._in_flight[seen] = None
        self._peak = max(self._peak, len(self._in_flight))
        self._charges.add(charged, now)
        self._announce()

    def settled(self, seen: Seen, returned: int, now: float) -> None:
        """Count what the account gave back."""
        if returned:
            seen.charged -= returned
            self._charges.add(-returned, now)

    def finished(self, seen: Seen, now: float) -> None:
        """Take a request out of flight; only the first call counts."""
        if seen.finished is not None:
            return
        seen.finished = now
        self._in_flight.pop(seen, None)
        self._announce()

    def ended(self, seen: Seen, now: float) -> None:
        """Close a request, after its answer or without one. To be called once."""
        self.finished(seen, now)
        if seen.aborted:
            self._aborted += 1
        elif seen.admitted is not None and seen.finished is not None:
            self._overlap.add((seen.admitted, seen.finished), self._in_flight_since(seen.finished))
            self._served += 1
        if seen.status is not None:
            self._statuses[seen.status] += 1
        self._announce()

    def report(self, now: float, last: int | None = None) -> dict[str, Any]:
        """Return the counters and the requests, or only the `last` ones."""
        first = 0 if last is None else max(0, len(self._seen) - last)
        running = [(flight.admitted or now, now) for flight in self._in_flight]
        return {
            "now": now,
            "in_flight": self.in_flight,
            "max_in_flight": self._overlap.most(running),
            "max_in_flight_with_aborted": self._peak,
            "served": self._served,
            "aborted": self._aborted,
            "charged_tokens": self._charges.total,
            "busiest_minute_tokens": self._charges.busiest,
            "refused_429": self._statuses[429],
            "statuses": {str(status): number for status, number in sorted(self._statuses.items())},
            "requests": self.requests[first:],
        }

    def _in_flight_since(self, now: float) -> float:
        """Return when the oldest request in flight was admitted."""
        # The dict keeps the order of admission.
        oldest = next(iter(self._in_flight), None)
        return now if oldest is None or oldest.admitted is None else oldest.admitted

    def _announce(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.set()


def most_at_once(spans: list[tuple[float, float]]) -> int:
    """Return how many spans overlap at most; one that ends when another starts does not overlap it."""
    steps = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    here = most = 0
    for _, step in steps:
        here += step
        most = max(most, here)
    return most


def headers_seen(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers worth keeping, names in lower case, without credentials."""
    kept: dict[str, str] = {}
    for name, value in headers.items():
        lower = name.lower()
        if lower in _HEADERS_KEPT:
            kept[lower] = value
        elif lower.startswith("x-"):
            secret = lower.endswith(_CREDENTIAL_ENDS) and lower not in _NO_CREDENTIALS
            kept[lower] = f"sha256:{fingerprint(value)}" if secret else value
    return kept


def key_of(headers: Mapping[str, str]) -> str | None:
    """Return the key a request carries, in whatever header."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return next((value for name in _KEY_HEADERS if (value := headers.get(name))), None)


@lru_cache(maxsize=1024)
def fingerprint(secret: str) -> str:
    """Return what may be shown of a secret: enough to tell two apart."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()[:8]


def body_hash(body: bytes) -> str:
    """Return the SHA-256 of a body."""
    return hashlib.sha256(body).hexdigest()
