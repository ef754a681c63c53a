"""The running Tidegate that is looked at, through its console."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from extproc.console.asking import Access, ask, quoted

__all__ = ["Console", "Remote"]


class Console(Protocol):
    """What the terminal view needs. Each call blocks, and raises ConsoleError with words for who looks."""

    place: str
    why_not: str
    """Why nothing can be done from here; empty where it can."""

    def overview(self) -> dict[str, Any]:
        """The newest."""
        ...

    def request(self, name: str) -> dict[str, Any]:
        """All that is known of a request."""
        ...

    def act(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """Do something; `path` is below /api/v1/."""
        ...


class Remote:
    """See `Console`."""

    def __init__(self, access: Access) -> None:
        """Nothing is asked yet."""
        self._access = access
        self.place = access.console
        proven = access.token or access.client_cert_file
        self.why_not = "" if proven else f"nothing can be done without a token: {access.why_no_token}"

    def overview(self) -> dict[str, Any]:
        """See `Console`."""
        return dict(ask(self._access, "GET", "/api/v1/overview"))

    def request(self, name: str) -> dict[str, Any]:
        """See `Console`."""
        return dict(ask(self._access, "GET", f"/api/v1/requests/{quoted(name)}"))

    def act(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """See `Console`."""
        return ask(self._access, method, f"/api/v1/{path}", body)
