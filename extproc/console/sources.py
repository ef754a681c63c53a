"""What the console shows and what it may have done, as functions: app.py gives them, so that the console knows nobody.

What is None is not there, and has no address on the console either.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from extproc.ports import Operations

__all__ = ["Data", "Pages", "Sessions", "Sources"]

Data = Mapping[str, Any]


class Sessions(Protocol):
    """Agent sessions, and what each may still use."""

    def look(self, tenant: str, session_id: str) -> Data | None:
        """A session as plain data, None when it is not known."""
        ...

    async def add(self, tenant: str, session_id: str, tokens: int, usd: float) -> Data | None:
        """Let it use so much more; then as `look`. ValueError where it has no such limit."""
        ...


class Pages(Protocol):
    """Metrics as text, for a Prometheus."""

    def kind(self, accept: str) -> str:
        """The content type for whoever sends this header; one of a few."""
        ...

    def page(self, state: Data, accept: str) -> tuple[bytes, str]:
        """A state as text, and its content type. Called in a thread."""
        ...


@dataclass(frozen=True, slots=True)
class Sources:
    """Each is called on the event loop, but for pages of metrics; all give plain data.

    overview: awaited, as it may work in a thread. requests: the newest, by keywords (limit, and any of tenant, lane,
    reason, upstream, state). explain: by request id or ticket, None when it is not known. log, set_log: settings of the
    log, and keywords of what to change. config: every value in force, without secrets.
    """

    state: Callable[[], Data]
    metrics: Pages | None = None
    sessions: Sessions | None = None
    operations: Operations | None = None
    overview: Callable[[], Awaitable[Data]] | None = None
    history: Callable[[], Data] | None = None
    requests: Callable[..., Sequence[Data]] | None = None
    explain: Callable[[str], Data | None] | None = None
    config: Callable[[], Data] | None = None
    log: Callable[[], Data] | None = None
    set_log: Callable[..., None] | None = None
